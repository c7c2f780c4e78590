"""Device meshes that cases are divided over: dimensions, divisibility, and necessary
collectives.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal, get_args

from mha_spec import InputError
from mha_spec.rules import as_count
from parity.measure.core.case import Case
from parity.measure.core.records import JsonRecord
from parity.measure.core.trace import Trace

AxisKind = Literal["automatic", "explicit"]
"""JAX's axis types of a mesh."""

NUMBERS, FLAGS = "all-reduce", "all-reduce of flags"
"""Reductions of numbers, and of booleans, which flag the non-finite tokens."""


@dataclass(frozen=True)
class MeshPlan:
    """Dimensions of a mesh.

    Attributes:
        data: number of devices that sequences are divided over.
        tensor: number of devices that heads are divided over.
        sequence: number of devices that tokens are divided over.
        axes: JAX's axis type of all dimensions.

    Raises:
        TypeError: if a size is not an integer.
        ValueError: if a size is below 1, or the axis type is unknown.
    """

    data: int = 1
    tensor: int = 1
    sequence: int = 1
    axes: AxisKind = "automatic"

    def __post_init__(self) -> None:
        for name in DIMENSIONS:
            as_count(name, getattr(self, name))
        if self.axes not in get_args(AxisKind):
            raise InputError("axes", f"be {' or '.join(get_args(AxisKind))}", axes=self.axes)

    @property
    def shape(self) -> dict[str, int]:
        """Sizes above 1 by name; all dimensions for a single device."""
        return {
            name: size for name in DIMENSIONS if (size := getattr(self, name)) > 1
        } or dict.fromkeys(DIMENSIONS, 1)

    @property
    def size(self) -> int:
        """Number of devices."""
        return math.prod(self.shape.values())

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.shape.items())


DIMENSIONS = tuple(field.name for field in fields(MeshPlan) if field.name != "axes")


def parse_mesh(text: str, axes: AxisKind = "automatic") -> MeshPlan:
    """Return the mesh of a text such as `data=2,tensor=4`.

    Raises:
        ValueError: if the text has another form.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = (word.strip() for word in part.partition("="))
        if (
            name not in DIMENSIONS
            or not equals
            or not size.isdecimal()
            or not int(size)
            or name in sizes
        ):
            known = f"give {', '.join(DIMENSIONS)} a number of devices, each at most once"
            raise InputError("mesh", f"{known}, such as data=2,tensor=4", mesh=text)
        sizes[name] = int(size)
    return MeshPlan(**sizes, axes=axes)


def why_not_divided(case: Case, plan: MeshPlan) -> str | None:
    """Return why a mesh does not divide a case evenly, or None if it does."""
    sizes = {"data": ("sequences", case.batch), "tensor": ("query heads", case.spec.num_heads)}
    for name, (what, count) in sizes.items():
        if count % (devices := getattr(plan, name)):
            return f"{name}={devices} does not divide {count} {what}"
    if plan.tensor > 1 and case.spec.fused_qkv:
        return "fused_qkv keeps q, k and v in one weight, whose heads are not consecutive"
    if case.spec.shared_kv:
        return "the keys and values of another layer are not divided"
    if plan.sequence > 1:
        if case.spec.relative_products is not None:
            return "relative products are computed for whole sequences only"
        if case.is_cached:
            return "tokens that arrive in steps cannot be divided"
        for what, count in {"query": case.seq_len, "key": case.key_len}.items():
            if count % plan.sequence:
                return f"sequence={plan.sequence} does not divide {count} {what} tokens"
    return None


# ---- Collectives ---------------------------------------------------------------------------------

Counts = dict[str, int]
"""Number of collective operations of a compiled program, by kind."""


def words_of(counts: Counts) -> str:
    """Return `1 all-reduce, 2 all-gather`, or `nothing`."""
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "nothing"


@dataclass(frozen=True)
class Collectives(JsonRecord):
    """Collectives of a program of a case on a mesh.

    Attributes:
        case, dtype, backend: see `Comparison`.
        program: `forward`, `gradient`, `prompt` or `step`, prefixed by its path: `fused.forward`.
        counted: collectives of the compiled program, or of the run.
        ideal: necessary collectives.
        excuse: reason for additional ones; empty if there must be none.
    """

    case: str
    dtype: str
    backend: str
    program: str
    counted: Counts
    ideal: Counts
    excuse: str = ""

    IN_JSON = ("case", "dtype", "backend", "program", "passed", "counted", "ideal", "excuse")

    @property
    def passed(self) -> bool:
        """Return whether all collectives are necessary or excused."""
        return bool(self.excuse) or self.is_ideal

    @property
    def is_ideal(self) -> bool:
        """Return whether all collectives are necessary."""
        return all(count <= self.ideal.get(name, 0) for name, count in self.counted.items())


def collectives_of(trace: Trace) -> list[Collectives]:
    """Return the counted and the necessary collectives of a trace on a mesh."""
    if not trace.collectives:
        return []
    plan, case = parse_mesh(trace.numerics["mesh"]), trace.problem.case
    about = (case.name, trace.problem.dtype, trace.title)
    found = []
    for program, counted in trace.collectives.items():
        told = (case, plan, program, trace.backend)
        found.append(
            Collectives(*about, program, counted, ideal_collectives(*told), excuse_of(*told))
        )
    return found


def ideal_collectives(case: Case, plan: MeshPlan, program: str, backend: str = "jax") -> Counts:
    """Return the collectives that a program of a case needs on a mesh.

    The forward pass of a layer with divided heads sums its outputs. The gradient sums that of its
    input over heads; those of weights over sequences and tokens, and for replicated weights also
    over heads; and that of sinks over tokens separately: once each.

    A norm over the width of all heads sums the squares of each token, a layer norm also the
    features before them, and the gradient does the same; in JAX a gradient's program has both. XLA
    may send the mask of some heads as flags.

    Args:
        case: layer and inputs.
        plan: mesh.
        program: see `Collectives`.
        backend: except in JAX, tokens always use a ring.
    """
    has_heads, spec = plan.tensor > 1, case.spec
    path, _, kind = program.rpartition(".")
    wide = spec.wide_norms if has_heads else {}
    of_norms = sum(2 if norm.kind == "layer" else 1 for norm in wide.values())
    sums = int(has_heads and spec.out_proj)
    if kind == "gradient":
        shared = [
            name for name, norm in spec.norms.items() if not norm.per_head and name not in wide
        ]
        products = spec.relative_products
        is_shared = bool(shared or spec.latent) or (products is not None and not products.per_head)
        sums = (
            int(has_heads)
            + int(plan.data > 1)
            + int(plan.sequence > 1)
            + int(has_heads and is_shared)
        )
        sums += int(plan.sequence > 1 and spec.sinks)
        of_norms *= 2 if backend == "jax" else 1
    exchanged = _of_tokens(case, plan, path, backend, is_gradient=kind == "gradient")
    flags = int("all-to-all" in exchanged and case.random_mask)
    found = {NUMBERS: sums + of_norms, FLAGS: flags} | exchanged
    return {name: count for name, count in found.items() if count}


def _of_tokens(case: Case, plan: MeshPlan, path: str, backend: str, *, is_gradient: bool) -> Counts:
    """Return the exchanges for divided tokens: all-to-all of tokens and heads, or keys and values
    in a ring.
    """
    size, spec = plan.sequence, case.spec
    if size == 1 or not path:
        return {}
    own = spec.num_kv_heads if spec.num_kv_heads % plan.tensor else spec.num_kv_heads // plan.tensor
    if backend == "jax" and own % size == 0 and spec.alibi is None:
        has_bias = case.bias or spec.relative_bias is not None
        of_masks = int(case.random_mask) + (2 if is_gradient else 1) * has_bias
        return {"all-to-all": (8 if is_gradient else 4) + of_masks}
    tokens = case.seq_len // size
    passes = size - 1
    reach = spec.window_size or spec.chunk_size
    if reach is not None and case.key_len == case.seq_len:
        far = 0 if spec.chunk_size and tokens % spec.chunk_size == 0 else -(-(reach - 1) // tokens)
        if backend == "jax":  # causality is part of a mask here, so keys travel both ways
            passes = min(2 * far, passes)
        elif case.is_causal:  # torch's parts travel in one direction
            passes = min(far, passes)
    halves = 0
    if (
        backend == "torch"
        and case.is_causal
        and reach is None
        and tokens % 2 == 0
        and case.key_len == case.seq_len
    ):
        halves = 8  # to zigzag order and back
    return {
        "collective-permute": (6 if is_gradient else 2) * passes
        + 2 * (is_gradient and passes > 0)
        + halves
    }


def excuse_of(case: Case, plan: MeshPlan, program: str, backend: str = "jax") -> str:
    """Return why a program may have additional collectives; empty if it may not."""
    if backend != "jax":  # only XLA merges collectives
        is_cross = program.endswith("gradient") and case.seq_len_k is not None
        return (
            "the gradients of queries' and keys' inputs are summed separately" if is_cross else ""
        )
    if plan.sequence > 1 and case.spec.relative_bias and program.endswith("gradient"):
        return "the gradient of a bias for distances is summed by rows and by buckets"
    if plan.sequence > 1 and case.not_finite == "visible":
        return "a contained kernel finds the NaN of all tokens"
    if plan.sequence > 1 and "." not in program:
        return "attention weights are rows over all keys, which are gathered"
    count, size = case.spec.num_kv_heads, plan.tensor
    if count % size and (size % count or not program.endswith("forward")):
        return "devices share key/value heads, whose partial results are gathered"
    return ""

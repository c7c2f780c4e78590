"""A mesh of devices that cases are divided over: its dimensions, what divides, and what devices should have to send."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal, get_args

from mha_spec import Refusal
from mha_spec.rules import as_count
from parity.core.case import Case
from parity.core.records import JsonRecord
from parity.core.trace import Trace

AxisKind = Literal["automatic", "explicit"]
"""How JAX divides work along a dimension: by itself, or by the types of arrays."""

NUMBERS, FLAGS = "all-reduce", "all-reduce of flags"
"""Sums of numbers, and of booleans: of each token, whether it is finite."""


@dataclass(frozen=True)
class MeshPlan:
    """The dimensions of a mesh.

    Attributes:
        data: number of devices that share the sequences of a batch.
        tensor: of those that share the heads of a layer.
        sequence: of those that share the tokens of a sequence.
        axes: how JAX divides work along them.

    Raises:
        TypeError: if a size is not an integer.
        ValueError: if one is below 1, or there is no such kind of axes.
    """

    data: int = 1
    tensor: int = 1
    sequence: int = 1
    axes: AxisKind = "automatic"

    def __post_init__(self) -> None:
        for name in DIMENSIONS:
            as_count(name, getattr(self, name))
        if self.axes not in get_args(AxisKind):
            raise Refusal("axes", f"be {' or '.join(get_args(AxisKind))}", axes=self.axes)

    @property
    def shape(self) -> dict[str, int]:
        """The sizes of the dimensions that it has, by name; of one device, those of all."""
        return {name: size for name in DIMENSIONS if (size := getattr(self, name)) > 1} or dict.fromkeys(DIMENSIONS, 1)

    @property
    def size(self) -> int:
        """The number of devices."""
        return math.prod(self.shape.values())

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.shape.items())


DIMENSIONS = tuple(field.name for field in fields(MeshPlan) if field.name != "axes")


def parse_mesh(text: str, axes: AxisKind = "automatic") -> MeshPlan:
    """A mesh as one types it: `data=2,tensor=4`.

    Raises:
        ValueError: if it is not that.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = (word.strip() for word in part.partition("="))
        if name not in DIMENSIONS or not equals or not size.isdecimal() or not int(size) or name in sizes:
            known = f"of {', '.join(DIMENSIONS)}, each once with the number of its devices"
            raise Refusal("mesh", f"be {known}, such as data=2,tensor=4", mesh=text)
        sizes[name] = int(size)
    return MeshPlan(**sizes, axes=axes)


def why_not_divided(case: Case, plan: MeshPlan) -> str | None:
    """Why a mesh does not divide a case evenly, or None if it does."""
    sizes = {"data": ("sequences", case.batch), "tensor": ("query heads", case.spec.num_heads)}
    for name, (what, count) in sizes.items():
        if count % (devices := getattr(plan, name)):
            return f"{name}={devices} does not divide {count} {what}"
    if plan.tensor > 1 and case.spec.fused_qkv:
        return "fused_qkv keeps q, k and v in one weight, whose heads are not neighbours"
    if case.spec.shared_kv:
        return "the keys and values of another layer are not divided"
    if plan.sequence > 1:
        if case.is_cached:
            return "tokens that come in steps are not divided"
        for what, count in {"query": case.seq_len, "key": case.key_len}.items():
            if count % plan.sequence:
                return f"sequence={plan.sequence} does not divide {count} {what} tokens"
    return None


# ---- What devices send -----------------------------------------------------------------------------------------------

Counts = dict[str, int]
"""How many operations of a compiled program have devices wait for each other, by what they do."""


def words_of(counts: Counts) -> str:
    """`1 all-reduce, 2 all-gather`, or `nothing`."""
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "nothing"


@dataclass(frozen=True)
class Collectives(JsonRecord):
    """What the devices of a mesh send each other in a program of a case.

    Attributes:
        case, dtype, backend: as a `Comparison` has them.
        program: `forward`, `gradient`, `prompt` or `step`, after the path that it is of: `fused.forward`.
        counted: of the compiled program, or of what ran.
        ideal: how many are needed.
        excuse: why there may be more; empty where there may not.
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
        """Whether there is none that need not be, or there is an excuse."""
        return bool(self.excuse) or self.is_ideal

    @property
    def is_ideal(self) -> bool:
        """Whether there is none that need not be."""
        return all(count <= self.ideal.get(name, 0) for name, count in self.counted.items())


def collectives_of(trace: Trace) -> list[Collectives]:
    """What was counted when a trace was made on a mesh, beside what is needed."""
    if not trace.collectives:
        return []
    plan, case = parse_mesh(trace.numerics["mesh"]), trace.problem.case
    about = (case.name, trace.problem.dtype, trace.title)
    found = []
    for program, counted in trace.collectives.items():
        told = (case, plan, program, trace.backend)
        found.append(Collectives(*about, program, counted, ideal_collectives(*told), excuse_of(*told)))
    return found


def ideal_collectives(case: Case, plan: MeshPlan, program: str, backend: str = "jax") -> Counts:
    """How many collectives a program of a case needs on a mesh.

    Forward, a layer whose heads are divided adds its outputs up. A gradient adds up that of its input over the heads,
    those of weights over the sequences and over their tokens, those of weights that are whole on each device over the
    heads, too, and that of sinks over the tokens by itself: once each. In JAX, whether a token is finite is a flag for
    each, which is the same for all heads.

    A norm over the width of all heads adds up the squares of each token, a layer norm the features before them, and
    the gradient adds up theirs; in JAX a gradient's program has both. There, it takes one flag of its own. XLA may send
    the mask of some heads in the form of flags.

    Args:
        case: the layer, and what it is applied to.
        plan: the mesh.
        program: as a `Collectives` names it.
        backend: whose tokens, where it is not JAX, always go round in a ring, and which then sends no flags.
    """
    has_heads, spec = plan.tensor > 1, case.spec
    path, _, kind = program.rpartition(".")
    wide = spec.wide_norms if has_heads else {}
    of_norms = sum(2 if norm.kind == "layer" else 1 for norm in wide.values())
    sums = int(has_heads and spec.out_proj)
    if kind == "gradient":
        shared = [name for name, norm in spec.norms.items() if not norm.per_head and name not in wide]
        sums = (
            int(has_heads)
            + int(plan.data > 1)
            + int(plan.sequence > 1)
            + int(has_heads and bool(shared or spec.latent))
        )
        sums += int(plan.sequence > 1 and spec.sinks)
        of_norms *= 2 if backend == "jax" else 1
    exchanged = _of_tokens(case, plan, path, backend, is_gradient=kind == "gradient")
    flags = int(has_heads) + len(wide) if backend == "jax" else 0
    flags += int("all-to-all" in exchanged and case.random_mask)
    found = {NUMBERS: sums + of_norms, FLAGS: flags} | exchanged
    return {name: count for name, count in found.items() if count}


def _of_tokens(case: Case, plan: MeshPlan, path: str, backend: str, *, is_gradient: bool) -> Counts:
    """What is exchanged where tokens are divided: tokens for heads and back, or keys and values as they go round."""
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
        if backend == "jax":  # causality is in a mask here, so that keys go both ways
            passes = min(2 * far, passes)
        elif case.is_causal:  # torch's parts go round in one direction
            passes = min(far, passes)
    halves = 0
    if backend == "torch" and case.is_causal and reach is None and tokens % 2 == 0 and case.key_len == case.seq_len:
        halves = 8  # to the order in which all have as much to do, and back
    return {"collective-permute": (6 if is_gradient else 2) * passes + 2 * (is_gradient and passes > 0) + halves}


def excuse_of(case: Case, plan: MeshPlan, program: str, backend: str = "jax") -> str:
    """Why a program may have more than it needs; empty where it may not."""
    if backend != "jax":  # whose compiler alone joins anything
        is_cross = program.endswith("gradient") and case.seq_len_k is not None
        return "the gradients of queries' and keys' inputs are added up one by one" if is_cross else ""
    if plan.sequence > 1 and case.spec.relative_bias and program.endswith("gradient"):
        return "the gradient of a bias for distances is added up by rows and by buckets"
    if plan.sequence > 1 and "." not in program:
        return "attention weights are rows over all keys, which are gathered"
    count, size = case.spec.num_kv_heads, plan.tensor
    if count % size and (size % count or not program.endswith("forward")):
        return "devices share key/value heads, and what is computed of these in parts is gathered"
    return ""

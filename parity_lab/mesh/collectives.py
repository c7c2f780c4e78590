"""Collective operations of programs on a mesh: what was counted, what is necessary, and why a
program may have more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from mha_spec.shares import axis_of_heads
from parity.measure.core.case import Case
from parity.measure.core.records import JsonRecord
from parity_lab.mesh.plan import MeshPlan

NUMBERS, FLAGS = "all-reduce", "all-reduce of flags"
"""Reductions of floats, and of booleans, which flag the non-finite tokens."""

Counts = dict[str, int]
"""Number of collective operations of a program, by kind."""


def words_of_counts(counts: Counts) -> str:
    """Return `1 all-reduce, 2 all-gather`, or `nothing`."""
    if not counts:
        return "nothing"
    return ", ".join(f"{count} {name}" for name, count in counts.items())


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


def collectives_of(
    case: Case, dtype: str, backend: str, plan: MeshPlan, counts: Mapping[str, Counts]
) -> list[Collectives]:
    """Return the counted and the necessary collectives of each program of a case on a mesh."""
    collectives = []
    for program, counted in counts.items():
        ideal = ideal_collectives(case, plan, program, backend)
        excuse = excuse_of(case, plan, program, backend)
        collectives.append(Collectives(case.name, dtype, backend, program, counted, ideal, excuse))
    return collectives


def ideal_collectives(case: Case, plan: MeshPlan, program: str, backend: str = "jax") -> Counts:
    """Return the collectives that a program of a case needs on a mesh.

    The forward pass of a layer with divided heads sums its outputs. The gradient of its input is
    summed over heads; gradients of weights over sequences and tokens, and for replicated weights
    also over heads; and the gradient of sinks over tokens separately: once each.

    A norm over the width of all heads sums the squares of each token, a layer norm also the
    features before them, and the gradient does the same; in JAX a gradient's program has both. XLA
    may send the mask of some heads as flags.

    Args:
        case: layer and inputs.
        plan: mesh.
        program: see `Collectives`.
        backend: except in JAX, tokens always use a ring.
    """
    path, _, kind = program.rpartition(".")
    is_gradient = kind == "gradient"
    if is_gradient:
        sums = _sums_of_gradients(case, plan)
    else:
        sums = int(plan.tensor > 1 and case.spec.out_proj)
    sums_of_norms = _sums_of_wide_norms(case, plan)
    if is_gradient and backend == "jax":
        # The compiled program of a gradient also has the forward pass.
        sums_of_norms *= 2
    exchanged: Counts = {}
    # Without a path it is the plain one, which uses whole sequences.
    if plan.sequence > 1 and path:
        exchanged = _exchanges_of_tokens(case, plan, backend, is_gradient=is_gradient)
    flags = int("all-to-all" in exchanged and case.random_mask)
    counts = {NUMBERS: sums + sums_of_norms, FLAGS: flags} | exchanged
    return {name: count for name, count in counts.items() if count}


def _sums_of_gradients(case: Case, plan: MeshPlan) -> int:
    """Return the number of sums in the gradient, except the sums of norms over the width."""
    spec = case.spec
    replicated_norms = [
        name
        for name, norm in spec.norms.items()
        if not norm.per_head and not (plan.tensor > 1 and name in spec.wide_norms)
    ]
    shared_by_heads = [name for name in spec.score_shapes if axis_of_heads(name, spec) is None]
    has_replicated_weights = (
        bool(replicated_norms) or spec.latent is not None or bool(shared_by_heads)
    )
    sums = [
        plan.tensor > 1,  # of the gradient of the input
        plan.data > 1,  # of the gradients of weights
        plan.sequence > 1,
        plan.tensor > 1 and has_replicated_weights,
        plan.sequence > 1 and spec.sinks,
    ]
    return sum(sums)


def _sums_of_wide_norms(case: Case, plan: MeshPlan) -> int:
    """Return the number of sums in norms over the width of divided heads."""
    if plan.tensor == 1:
        return 0
    # A layer norm sums the features, for their mean, before it sums the squares.
    return sum(2 if norm.kind == "layer" else 1 for norm in case.spec.wide_norms.values())


def _exchanges_of_tokens(case: Case, plan: MeshPlan, backend: str, *, is_gradient: bool) -> Counts:
    """Return the exchanges for divided tokens: all-to-all of tokens and heads, or keys and values
    in a ring.
    """
    spec = case.spec
    kv_heads = spec.num_kv_heads
    if kv_heads % plan.tensor == 0:
        kv_heads = kv_heads // plan.tensor
    if backend == "jax" and kv_heads % plan.sequence == 0 and spec.alibi is None:
        # q, k, v and the output, and as many gradients; masks have none, but biases do.
        arrays = 8 if is_gradient else 4
        if case.random_mask:
            arrays += 1
        if case.bias or spec.relative_bias is not None:
            arrays += 2 if is_gradient else 1
        return {"all-to-all": arrays}
    passes = _passes_of_ring(case, plan, backend)
    transfers = 2 * passes  # of keys and values
    if is_gradient and passes > 0:
        # They go around again, with their gradients, which at last return to their own device.
        transfers += 4 * passes + 2
    if backend == "torch" and _is_in_zigzag(case, plan):
        transfers += 8  # to zigzag order and back
    return {"collective-permute": transfers}


def _passes_of_ring(case: Case, plan: MeshPlan, backend: str) -> int:
    """Return the number of devices to which keys and values go."""
    spec = case.spec
    tokens = case.seq_len // plan.sequence
    everywhere = plan.sequence - 1
    reach = spec.window_size or spec.chunk_size
    if reach is None or case.key_len != case.seq_len:
        return everywhere
    if spec.chunk_size and tokens % spec.chunk_size == 0:
        devices_in_reach = 0  # no chunk lies on two devices
    else:
        devices_in_reach = math.ceil((reach - 1) / tokens)
    if backend == "jax":
        # Causality is part of a mask here, so keys travel both ways.
        return min(2 * devices_in_reach, everywhere)
    if case.is_causal:
        # torch's parts travel in one direction.
        return min(devices_in_reach, everywhere)
    return everywhere


def _is_in_zigzag(case: Case, plan: MeshPlan) -> bool:
    """Return whether torch's ring balances the work of causal attention, by half of the queries
    from the beginning and half from the end.
    """
    reach = case.spec.window_size or case.spec.chunk_size
    are_halves = case.seq_len // plan.sequence % 2 == 0
    return case.is_causal and reach is None and are_halves and case.key_len == case.seq_len


def excuse_of(case: Case, plan: MeshPlan, program: str, backend: str = "jax") -> str:
    """Return why a program may have additional collectives; empty if it may not."""
    is_gradient = program.endswith("gradient")
    if backend != "jax":
        # Only XLA merges collectives.
        if is_gradient and case.seq_len_k is not None:
            return "the gradients of queries' and keys' inputs are summed separately"
        return ""
    if plan.sequence > 1:
        if case.spec.relative_bias and is_gradient:
            return "the gradient of a bias for distances is summed by rows and by buckets"
        if case.not_finite == "visible":
            return "a contained kernel finds the NaN of all tokens"
        if "." not in program:
            return "attention weights are rows over all keys, which are gathered"
    kv_heads, devices = case.spec.num_kv_heads, plan.tensor
    if kv_heads % devices == 0:
        return ""
    # If a head lies on several devices and no device has parts of two, the forward pass needs no
    # partial results.
    if devices % kv_heads == 0 and program.endswith("forward"):
        return ""
    return "devices share key/value heads, whose partial results are gathered"

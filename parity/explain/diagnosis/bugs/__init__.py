"""The known bugs of attention layers: one record each, by topic.

`parity.diagnose` searches for the bugs that, injected into the reference, reproduce an
implementation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

from parity.explain.diagnosis.bugs import (
    backward,
    batches,
    blocks,
    caches,
    distances,
    gates,
    heads,
    latents,
    masks,
    moved_slots,
    norms,
    precision,
    quantized_caches,
    ranks,
    rings,
    rope,
    rope_kinds,
    scores,
    serving,
    sharing,
    softmax,
    strays,
    temperature,
    weights,
)
from parity.explain.diagnosis.bugs.families import FUSED_QKV
from parity.explain.diagnosis.bugs.heads import permuted_heads
from parity.explain.diagnosis.bugs.precision import FIDELITIES, PRECISIONS, low_products
from parity.explain.diagnosis.bugs.record import Edit, Override
from parity.explain.diagnosis.bugs.registry import OWN_BUGS, load_entry_points, own_bugs
from parity.explain.diagnosis.bugs.specs import edited_spec
from parity.explain.diagnosis.changed_layer import ChangedLayer
from parity.explain.diagnosis.sample import SampledProblem
from parity.explain.diagnosis.sampled_layer import SampledLayer
from parity.explain.diagnosis.work import CountedArithmetic
from parity.measure.core.cases import CASES, Case
from parity.measure.core.problem import Problem
from parity.measure.core.quantization import CacheQuantization
from parity.measure.core.weights import dtype_named

__all__ = [
    "FIDELITIES",
    "GRADIENTS",
    "PRECISIONS",
    "Edit",
    "Override",
    "bug_by_name",
    "bugs_for",
    "bugs_from_call",
    "bugs_of_overflow",
    "edited_layer",
    "known_bugs",
    "low_products",
    "own_bugs",
    "page_by_bug",
    "page_by_known_bug",
    "permuted_heads",
    "precision_bugs",
    "structural_bugs",
]

MASK, QKV, CACHE, SCORES, ATTN_WEIGHTS, CONTEXT, OUTPUT = (
    "mask",
    "qkv",
    "cache",
    "scores",
    "attn_weights",
    "context",
    "output",
)
"""Steps of the reference."""

GRADIENTS = "gradients"
"""The backward pass of the reference."""


class Topic(NamedTuple):
    """Known bugs of one topic.

    Attributes:
        bugs_of: yields those that a case could have, usual ones first.
        steps: the steps of the reference that they change. All change the step of a whole module,
            except bugs of the backward pass.
    """

    bugs_of: Callable[[Case], Iterable[Edit]]
    steps: frozenset[str]


def _topic(bugs_of: Callable[[Case], Iterable[Edit]], *steps: str) -> Topic:
    return Topic(bugs_of, frozenset([*steps, "whole"]))


def _of_backward(bugs_of: Callable[[Case], Iterable[Edit]]) -> Topic:
    return Topic(bugs_of, frozenset([GRADIENTS]))


TOPICS = (
    _topic(scores.not_finite, ATTN_WEIGHTS, CONTEXT),
    _topic(weights.transposed, QKV, OUTPUT),
    _topic(weights.swapped, QKV),
    _topic(weights.rotated_qkv, QKV),
    _topic(rope_kinds.scaled, QKV),
    _topic(rope.turned_otherwise, QKV),
    _topic(precision.rope_numbers, QKV),
    _topic(rope.other_theta, QKV),
    _topic(rope_kinds.partly, QKV),
    _topic(rope_kinds.on_several_axes, QKV),
    _topic(rope_kinds.neighbours, QKV),
    _topic(rope.turned_alone, QKV),
    _topic(rope.own_positions, QKV),
    _topic(weights.fused_qkv, QKV),
    _topic(latents.latents, QKV, CACHE, SCORES),
    _topic(norms.norms, QKV, OUTPUT),
    _topic(weights.not_clipped, QKV),
    _topic(temperature.temperature, QKV),
    _topic(gates.gates, QKV, OUTPUT),
    _topic(sharing.shared, QKV),
    _topic(heads.shared, SCORES, CONTEXT),
    _topic(heads.split_or_combined, QKV, CACHE, OUTPUT),
    _topic(heads.padded, OUTPUT),
    _topic(heads.reordered, QKV),
    _topic(masks.used_or_made, MASK, ATTN_WEIGHTS),
    _topic(masks.own, MASK),
    _topic(masks.by_slot, MASK),
    # A call of one token that reads no cache looks like one with a transposed causal mask, which is
    # less usual.
    _topic(masks.earlier_calls, MASK),
    _topic(masks.causal, MASK),
    _topic(masks.padding, MASK),
    _topic(masks.window, MASK),
    _topic(masks.reach, MASK),
    _topic(scores.scale, SCORES, ATTN_WEIGHTS),
    _topic(scores.soft_cap, SCORES, ATTN_WEIGHTS),
    _topic(scores.bias, SCORES, ATTN_WEIGHTS),
    _topic(distances.alibi, SCORES),
    _topic(distances.relative_bias, SCORES),
    _topic(distances.relative_products, SCORES),
    _topic(softmax.sinks, ATTN_WEIGHTS),
    _topic(softmax.softmax_axis, ATTN_WEIGHTS),
    _topic(softmax.after_softmax, ATTN_WEIGHTS),
    _topic(softmax.mask_as_number, ATTN_WEIGHTS),
    _topic(softmax.other_functions, ATTN_WEIGHTS),
    _topic(softmax.dropout, ATTN_WEIGHTS),
    _topic(batches.batches, ATTN_WEIGHTS, CONTEXT),
    _topic(strays.products, CONTEXT),
    _topic(strays.of_other_tokens, QKV),
    _topic(strays.multiplied, CONTEXT, OUTPUT),
    _topic(strays.lost, CONTEXT),
    _topic(blocks.blocks, ATTN_WEIGHTS, CONTEXT),
    _topic(weights.no_out_proj, OUTPUT),
    _topic(weights.residual, OUTPUT),
    _topic(weights.out_columns, OUTPUT),
    _topic(weights.missing_biases, QKV, OUTPUT),
    _topic(quantized_caches.quantized_caches, CACHE),
    _topic(caches.caches, CACHE),
    _topic(caches.lengths, MASK, QKV, CACHE, SCORES),
    _topic(serving.ragged, MASK, QKV, CACHE, SCORES),
    _topic(serving.left_padded, MASK, CACHE),
    _topic(serving.raised_otherwise, MASK, QKV, CACHE, SCORES),
    _topic(serving.late, CACHE, SCORES, CONTEXT),
    _topic(serving.exchanged_when_read, SCORES, CONTEXT),
    _topic(serving.rotated_again, CACHE),
    _topic(rings.rings, MASK, QKV, SCORES, ATTN_WEIGHTS),
    _topic(softmax.empty_rows, ATTN_WEIGHTS),
    _of_backward(backward.stopped),
    _of_backward(backward.groups),
    _of_backward(backward.stopped_norms),
    _of_backward(backward.without_gradient),
    _of_backward(backward.kernels),
    _of_backward(backward.masks),
    _of_backward(backward.terms),
    _of_backward(backward.blocks),
)
"""All topics but lost precision, in the order in which they are tried."""

OVERFLOWING = _topic(scores.overflow, QKV, SCORES, ATTN_WEIGHTS, CONTEXT, OUTPUT)
"""The topic of bugs that are tried only if values are not finite."""

LOST_PRECISION = (
    _topic(precision.rounded_parts, QKV, CACHE, SCORES, ATTN_WEIGHTS, OUTPUT),
    _of_backward(backward.narrow_sums),
)
"""The topics of bugs that only lose precision."""


WITHOUT_LATENTS = frozenset(
    {
        *(weights.transposed, weights.swapped, weights.rotated_qkv, weights.fused_qkv),
        weights.missing_biases,
        *(rope_kinds.partly, heads.reordered),
    }
)
"""Groups of bugs in q_proj, k_proj and v_proj."""

WITHOUT_KEYS = frozenset({weights.swapped, weights.rotated_qkv, weights.fused_qkv})
"""Groups that read k_proj or v_proj."""

OF_OWN_KEYS = re.compile("[kv]_proj-.*|.*-[qkv]|qkv-bias-missing|rope-on-values")
"""Names in groups for keys or values that a layer makes itself, or for queries alone."""


def bugs_for(case: Case, steps: Collection[str] | None = None) -> list[Edit]:
    """Return every bug that a case could have, usual ones first, and last those from outside.

    Args:
        case: the case.
        steps: only bugs that may change one of these steps of the reference; by default, all.
    """
    return [*known_bugs(case, steps), *own_bugs(case)]


def known_bugs(case: Case, steps: Collection[str] | None = None) -> list[Edit]:
    """Return every bug of this package that a case could have, usual ones first; see `bugs_for`."""
    return [*structural_bugs(case, steps), *precision_bugs(case, steps)]


def precision_bugs(case: Case, steps: Collection[str] | None = None) -> list[Edit]:
    """Return the known bugs that only lose precision; see `bugs_for`.

    They are many, and explain only small errors.
    """
    return _bugs_of(LOST_PRECISION, case, steps)


def structural_bugs(case: Case, steps: Collection[str] | None = None) -> list[Edit]:
    """Return the other known bugs: those that change what a layer computes; see `bugs_for`."""
    return _bugs_of(TOPICS, case, steps)


def _bugs_of(topics: Iterable[Topic], case: Case, steps: Collection[str] | None) -> list[Edit]:
    """Return the bugs of some topics that a case could have."""
    spec = case.spec
    left_out: frozenset[Any] = frozenset()
    if spec.shared_kv:
        left_out = WITHOUT_KEYS
    elif spec.latent is not None:
        left_out = WITHOUT_LATENTS
    bugs: list[Edit] = []
    for topic in topics:
        is_relevant = steps is None or not topic.steps.isdisjoint(steps)
        if GRADIENTS in topic.steps and not case.has_gradients:
            continue
        if is_relevant and topic.bugs_of not in left_out:
            bugs += topic.bugs_of(case)
    if spec.shared_kv:
        return [bug for bug in bugs if not OF_OWN_KEYS.fullmatch(bug.name)]
    return bugs


def bugs_of_overflow(case: Case, steps: Collection[str]) -> list[Edit]:
    """Return the bugs by which values that exceed the largest float16 become infinite.

    They are tried only if a stage is not finite where the reference is.

    Args:
        case: the case.
        steps: only bugs that may change one of these steps of the reference.
    """
    return _bugs_of([OVERFLOWING], case, steps)


LOST_ONCE = ("cache-slot-stale", "cache-slot-late", "cache-slot-early")
"""Writes that may be wrong in one call alone: all later calls show it."""


def bugs_from_call(case: Case, call: int, observed: Mapping[str, np.ndarray]) -> list[Edit]:
    """Return the bugs of a cache that begin in a call: in it alone, or from it on.

    All calls together have many. A search needs the bugs of the first wrong call.

    Args:
        case: the case.
        call: the call.
        observed: the stages, which determine some of their parameters.
    """
    if not case.is_cached or not 0 <= call < len(case.chunks):
        return []
    if call == 0:
        return [
            *serving.not_reset(case, observed),
            *serving.reordered(case, call, None),
            *serving.blocks(case, call, None),
        ]
    bugs: list[Edit] = []
    for bug in caches.caches(case):
        if bug.name in LOST_ONCE:
            bugs.append(replace(bug, calls=frozenset([call]), when=f"in call {call} alone"))
    bugs += rings.lost_in_call(case, call)
    moved = moved_slots.moved_slots(case, call, observed)
    bugs += serving.reordered(case, call, moved)
    bugs += serving.blocks(case, call, moved)
    if moved is not None:
        bugs += serving.exchanges(case, call, moved)
    return bugs


@cache
def bug_by_name() -> dict[str, Edit]:
    """Return every bug that a layer could have, by name, as in the first case that could have
    it.
    """
    bugs: list[Edit] = []
    for case in CASES.values():
        bugs += known_bugs(case)
    # The longest sequence is neither the first nor the last.
    bugs += known_bugs(replace(CASES["padding"], batch=3, key_padding_lengths=(2, 1, 3)))
    own = {"mask": np.zeros((1, 1, 1, 1), bool), "position_ids": np.arange(7)[None]}
    bugs += known_bugs(replace(CASES["rope-gqa"], seq_len=7, is_causal=True, **own))
    # No case has a quantized cache, or one with other slots.
    cached = CASES["decode-gqa-rope"]
    for zero_point in ("none", "integer"):
        quantization = CacheQuantization("int8", "head", zero_point=zero_point)
        bugs += known_bugs(replace(cached, cache_quantization=quantization))
    bugs += known_bugs(replace(cached, cache_slots=np.arange(cached.seq_len)[None]))
    padding = np.arange(cached.capacity) < 1
    positions = np.maximum(np.arange(cached.seq_len) - 1, 0)[None]
    bugs += known_bugs(replace(cached, mask=padding[None, None, None], position_ids=positions))
    # A server's cache: prompts of several lengths, and a window that is full.
    served = replace(
        CASES["ragged"],
        spec=replace(CASES["rope-gqa"].spec, window_size=4),
        batch=3,
        seq_len=9,
        chunks=(6, 1, 2),
        new_lengths=((4, 5, 2), (1, 1, 1), (2, 2, 2)),
        capacity=10,
    )
    bugs += known_bugs(served)
    for call in range(len(served.chunks)):
        bugs += bugs_from_call(served, call, {})
    bugs += [*PRECISIONS.values(), *FIDELITIES.values()]
    bugs += scores.overflow(served)
    # Orders and exchanges that are found by comparing are not in the table.
    exchanged = np.arange(served.batch * served.capacity)
    exchanged[[0, 1]] = 1, 0
    bugs.append(moved_slots.exchanging(served, 1, exchanged))
    bugs += [heads.permuted(name, np.arange(0)) for name in "qkv"]
    about = "a packed weight is read in a different order than it was packed in"
    bugs.append(weights.misread(weights.MISREAD, np.arange(0), (), about, FUSED_QKV.fix))
    bugs += [*backward.of_dropout(np.ones(1)), *backward.redrawn(np.ones(1))]
    bugs += [backward.multiplied(2.0), backward.of_sequences([0], ["sinks"])]
    return {bug.name: bug for bug in reversed(bugs)}


def page_by_known_bug() -> dict[str, str]:
    """Return the page of every bug of this package, by its name."""
    pages = {name: bug.page for name, bug in bug_by_name().items()}
    return pages | dict.fromkeys(ranks.NAMES, ranks.PAGE)


def page_by_bug() -> dict[str, str]:
    """Return the page of every bug, by its name; a bug from outside has a page of its name."""
    load_entry_points()
    return page_by_known_bug() | {name: name for name in OWN_BUGS}


def edited_layer(
    problem: Problem,
    dtype: str,
    edits: Sequence[Edit],
    arithmetic: str = "ieee",
    requested: str = "qkv",
) -> ChangedLayer:
    """Return the reference with edits, the first of them outermost, in a dtype and an
    arithmetic.
    """
    spec = edited_spec(problem.spec, edits)
    if spec != problem.spec:
        problem = replace(problem, case=replace(problem.case, spec=spec))
    layer_type = SampledLayer if isinstance(problem, SampledProblem) else ChangedLayer
    layer = layer_type(problem, CountedArithmetic(dtype_named(dtype), arithmetic), requested)
    for edit in reversed(edits):
        for method, override in edit.overrides.items():
            layer.override(**{method: partial(override, layer, getattr(layer, method))})
    return layer

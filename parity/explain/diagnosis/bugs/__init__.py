"""The known bugs of attention layers: one record each, by topic.

`parity.diagnose` searches for the bugs that, injected into the reference, reproduce an
implementation.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial

import numpy as np

from parity.explain.diagnosis.bugs import (
    batches,
    blocks,
    caches,
    distances,
    gates,
    heads,
    latents,
    masks,
    norms,
    precision,
    ranks,
    rope,
    rope_kinds,
    scores,
    sharing,
    softmax,
    strays,
    temperature,
    weights,
)
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
from parity.measure.core.weights import dtype_named

__all__ = [
    "FIDELITIES",
    "PRECISIONS",
    "Edit",
    "Override",
    "bug_by_name",
    "bugs_for",
    "edited_layer",
    "known_bugs",
    "low_products",
    "page_by_bug",
    "page_by_known_bug",
    "permuted_heads",
]

GROUPS = (
    scores.not_finite,
    weights.transposed,
    weights.swapped,
    rope_kinds.scaled,
    rope.turned_otherwise,
    rope.other_theta,
    rope_kinds.partly,
    rope_kinds.on_several_axes,
    rope_kinds.neighbours,
    rope.turned_alone,
    weights.fused_qkv,
    latents.latents,
    norms.norms,
    weights.not_clipped,
    temperature.temperature,
    gates.gates,
    sharing.shared,
    heads.shared,
    heads.split_or_combined,
    heads.padded,
    heads.reordered,
    masks.used_or_made,
    masks.causal,
    masks.padding,
    masks.window,
    masks.reach,
    scores.scale,
    scores.soft_cap,
    scores.bias,
    distances.alibi,
    distances.relative_bias,
    distances.relative_products,
    softmax.sinks,
    softmax.softmax_axis,
    softmax.after_softmax,
    softmax.mask_as_number,
    softmax.other_functions,
    softmax.dropout,
    batches.batches,
    strays.products,
    strays.of_other_tokens,
    strays.multiplied,
    strays.lost,
    blocks.blocks,
    weights.no_out_proj,
    weights.residual,
    weights.out_columns,
    weights.missing_biases,
    caches.lengths,
    caches.caches,
    softmax.empty_rows,
    precision.rounded_parts,
)


WITHOUT_LATENTS = frozenset(
    {
        *(weights.transposed, weights.swapped, weights.fused_qkv, weights.missing_biases),
        *(rope_kinds.partly, heads.reordered),
    }
)
"""Groups of bugs in q_proj, k_proj and v_proj."""

WITHOUT_KEYS = frozenset({weights.swapped, weights.fused_qkv})
"""Groups that read k_proj or v_proj."""

OF_OWN_KEYS = re.compile("[kv]_proj-.*|.*-[qkv]|qkv-bias-missing|rope-on-values")
"""Names in groups for keys or values that a layer makes itself, or for queries alone."""


def bugs_for(case: Case) -> list[Edit]:
    """Return every bug that a case could have, usual ones first, and last those from outside."""
    return [*known_bugs(case), *own_bugs(case)]


def known_bugs(case: Case) -> list[Edit]:
    """Return every bug of this package that a case could have, usual ones first."""
    spec = case.spec
    left_out = (
        WITHOUT_KEYS if spec.shared_kv else frozenset() if spec.latent is None else WITHOUT_LATENTS
    )
    bugs: list[Edit] = []
    for group in GROUPS:
        if group not in left_out:
            bugs += group(case)
    if spec.shared_kv:
        return [bug for bug in bugs if not OF_OWN_KEYS.fullmatch(bug.name)]
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
    bugs += [*PRECISIONS.values(), *FIDELITIES.values()]
    bugs += [heads.permuted(name, np.arange(0)) for name in "qkv"]
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

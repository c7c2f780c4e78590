"""Known bugs that are injected into the implementations, written by hand: at least one for each
page of `parity/bugs`.

They share no code with the records that inject the same bugs into the reference, so that one tests
the other.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np

from mha_spec import InputError, LinearScaling, ProportionalScaling, Rope, YarnScaling
from parity.explain.diagnosis.bugs import PRECISIONS, Edit, bugs_for
from parity.measure.backends import BACKENDS, load_backend
from parity.measure.backends.port import Port
from parity.measure.core.case import Case
from parity.measure.core.problem import Problem
from parity.measure.core.weights import Weights

Override = Callable[..., Any]
"""Replacement of a function of an implementation: `override(plan, original, *inputs)`."""


@dataclass
class Plan:
    """Plan of a bug in an implementation.

    Attributes:
        problem: the problem, without the bug.
        sibling: package of the implementation.
        xp: array functions of its framework.
        backend: its backend adapter, which converts arrays of NumPy.
        weights: a copy of the problem's weights, to be changed.
        functions: replacements, by the names of functions.
    """

    problem: Problem
    sibling: Any
    xp: Any
    backend: Port
    weights: Weights
    functions: dict[str, Override]


Injection = Callable[[Plan], None]
"""A function that adds a bug to a plan."""


def breaking(**functions: Override) -> Injection:
    """Return a bug that only replaces functions."""
    return partial(_replace_functions, functions)


def _replace_functions(functions: dict[str, Override], plan: Plan) -> None:
    plan.functions.update(functions)


def _first_input(_: Plan, __: Any, x: Any, *rest: Any) -> Any:
    """Replace a function: it leaves its first input as it is."""
    return x


# ---- Weights -------------------------------------------------------------------------------------


def _q_transposed(plan: Plan) -> None:
    plan.weights["q_proj.weight"] = plan.weights["q_proj.weight"].T


def _q_bias_missing(plan: Plan) -> None:
    plan.weights["q_proj.bias"] = np.zeros_like(plan.weights["q_proj.bias"])


def _packed_read_as_thirds(plan: Plan) -> None:
    """Pack q, k and v group by group, and read them one after the other."""
    spec = plan.problem.spec
    for leaf in ("weight", "bias"):
        names = [f"{letter}_proj.{leaf}" for letter in "qkv"]
        if names[0] not in plan.weights:
            continue
        tail = plan.weights[names[0]].shape[1:]
        groups = [plan.weights[name].reshape(spec.num_kv_heads, -1, *tail) for name in names]
        packed = np.concatenate(groups, axis=1).reshape(-1, *tail)
        parts = np.split(packed, [spec.q_width, spec.q_width + spec.k_width])
        for name, part in zip(names, parts, strict=True):
            plan.weights[name] = np.ascontiguousarray(part)


def _k_v_swapped(plan: Plan) -> None:
    for k, v in (("k_proj.weight", "v_proj.weight"), ("k_proj.bias", "v_proj.bias")):
        if k in plan.weights and v in plan.weights:
            plan.weights[k], plan.weights[v] = plan.weights[v], plan.weights[k]


def _without_out_proj(_: Plan, project_with: Any, *weights: Any) -> Any:
    """Return projections of which out_proj is missing."""

    def project(which: str, x: Any) -> Any:
        if which == "out_proj":
            return x
        return project_with(*weights)(which, x)

    return project


def _with_residual(plan: Plan, project_with: Any, *weights: Any) -> Any:
    """Return projections of which out_proj adds the query."""

    def project(which: str, x: Any) -> Any:
        projected = project_with(*weights)(which, x)
        if which != "out_proj":
            return projected
        return projected + plan.backend.from_numpy(plan.problem.inputs["query"])

    return project


# ---- Queries, keys and values --------------------------------------------------------------------


def _with_spec(**changed: Any) -> Injection:
    """Queries, keys and values are projected as a different specification says."""

    def project_qkv(
        _: Plan, original: Any, project: Any, q: Any, k: Any, v: Any, spec: Any, *rest: Any
    ) -> Any:
        return original(project, q, k, v, replace(spec, **changed), *rest)

    return breaking(project_qkv=project_qkv)


def _kv_factor_missing(_: Plan, original: Any, project: Any, x: Any, spec: Any, *rest: Any) -> Any:
    return original(project, x, replace(spec, latent=replace(spec.latent, kv_factor=1.0)), *rest)


def _split_without_moving(_: Plan, __: Any, x: Any, n: int) -> Any:
    return x.reshape(x.shape[0], n, x.shape[1], -1)


def _rotated_again(
    plan: Plan,
    original: Any,
    project: Any,
    query: Any,
    key: Any,
    value: Any,
    spec: Any,
    positions: Any = None,
) -> Any:
    """Rotate the keys that another layer has rotated."""
    q, k, v = original(project, query, key, value, spec, positions)
    if positions is None:
        positions = plan.xp.arange(k.shape[2])[None]
    return q, plan.sibling.apply_rope(k, positions, spec.rope), v


def _heads_tiled(_: Plan, __: Any, x: Any, n: int) -> Any:
    return x[:, np.arange(n) % x.shape[1]]


def _padded_and_combined(plan: Plan, combine_heads: Any, x: Any) -> Any:
    """Pad values to the width of keys, and cut the context after its heads are combined."""
    missing = plan.problem.spec.head_dim - x.shape[3]
    wide = plan.xp.concatenate([x, *[x[..., :1] * 0.0] * missing], -1)
    return combine_heads(wide)[..., : x.shape[1] * x.shape[3]]


# ---- RoPE ----------------------------------------------------------------------------------------


def _at_positions(change: Callable[[Any], Any]) -> Injection:
    """Rotate by other positions."""

    def apply_rope(_: Plan, rotate: Any, x: Any, positions: Any, rope: Rope) -> Any:
        return rotate(x, change(positions), rope)

    return breaking(apply_rope=apply_rope)


def _axes_swapped(positions: Any) -> Any:
    """Exchange the last two axes of positions, of which the first stands for their axes."""
    order = [*range(len(positions) - 2), -1, -2]
    return positions[np.array(order)]


def _restarted(positions: Any) -> Any:
    return positions - positions[:, :1]


def _running_on(positions: Any) -> Any:
    """Return the positions 0, 1, … in every row, of torch or JAX."""
    ones = positions * 0 + 1
    return ones.cumsum(-1) - 1


def _by_rope(change: Callable[[Rope], Rope]) -> Injection:
    """Rotate as a different `Rope` says."""

    def apply_rope(_: Plan, rotate: Any, x: Any, positions: Any, rope: Rope) -> Any:
        return rotate(x, positions, change(rope))

    return breaking(apply_rope=apply_rope)


def _with_theta_10000(rope: Rope) -> Rope:
    return replace(rope, theta=1e4)


def _unscaled_rope(rope: Rope) -> Rope:
    return replace(rope, scaling=None)


def _interleaved(_: Plan, rotate: Any, x: Any, positions: Any, rope: Rope) -> Any:
    evens_first = np.argsort(rope.pair_order(x.shape[-1]))
    return rotate(x[..., evens_first], positions, rope)[..., np.argsort(evens_first)]


def _without_attention_factor(rope: Rope) -> Rope:
    scaling: Any = rope.scaling
    if isinstance(scaling, YarnScaling):
        scaling = replace(scaling, attention_factor=1.0, mscale=None, mscale_all_dim=None)
    else:
        scaling = replace(scaling, attention_factor=1.0)
    return replace(rope, scaling=scaling)


def _of_whole_head(rope: Rope) -> Rope:
    scaling = rope.scaling
    if isinstance(scaling, ProportionalScaling):
        factor = scaling.factor
        scaling = None
        if factor != 1.0:
            scaling = LinearScaling(factor)
    return replace(rope, rotary_dim=None, scaling=scaling)


# ---- Masks ---------------------------------------------------------------------------------------


def _distances(plan: Plan, t: int, s: int | None) -> Any:
    if s is None:
        s = t
    return plan.xp.arange(t)[:, None] - plan.xp.arange(s)[None, :]


def _next_key_visible(plan: Plan) -> None:
    """Show each token the next one, in whichever function hides it."""

    def attention_mask(
        plan: Plan, original: Any, t: int, s: int, *, is_causal: bool = False, **options: Any
    ) -> Any:
        mask = original(t, s, **options)
        if not is_causal:
            return mask
        of_next_rows = plan.sibling.create_causal_mask(t + 1, s)[1:]
        return mask | of_next_rows[None, None]

    def cache_mask(_: Plan, original: Any, lengths: Any, t: int, s: int, **options: Any) -> Any:
        return original(lengths, t + 1, s, **options)[:, :, 1:]

    def window_mask(
        plan: Plan, _: Any, t: int, s: int | None = None, *, window_size: int, **__: Any
    ) -> Any:
        distances = _distances(plan, t, s)
        return (distances < -1) | (distances >= window_size)

    plan.functions |= {
        "create_attention_mask": attention_mask,
        "create_cache_mask": cache_mask,
        "create_sliding_window_mask": window_mask,
    }


def _window_ignored(plan: Plan) -> None:
    def without_reach(_: Plan, original: Any, *inputs: Any, **options: Any) -> Any:
        return original(*inputs, **{**options, "window_size": None})

    def later_keys(plan: Plan, _: Any, t: int, s: int | None = None, **__: Any) -> Any:
        return _distances(plan, t, s) < 0

    plan.functions |= {
        "create_attention_mask": without_reach,
        "create_cache_mask": without_reach,
        "create_sliding_window_mask": later_keys,
    }


def _padding_ignored(_: Plan, create_attention_mask: Any, *inputs: Any, **options: Any) -> Any:
    return create_attention_mask(*inputs, **{**options, "key_padding_lengths": None})


# ---- Scores --------------------------------------------------------------------------------------


def _unscaled(plan: Plan, attention_scores: Any, q: Any, *rest: Any) -> Any:
    spec = plan.problem.spec
    divisor = spec.head_dim**0.5
    if spec.scale:
        divisor = 1.0 / spec.scale
    return attention_scores(q * divisor, *rest)


def _unbiased(
    _: Plan, attention_scores: Any, q: Any, k: Any, bias: Any = None, *rest: Any, **options: Any
) -> Any:
    return attention_scores(q, k, None, *rest, **options)


def _uncapped(
    _: Plan,
    attention_scores: Any,
    q: Any,
    k: Any,
    bias: Any = None,
    spec: Any = None,
    *rest: Any,
    **options: Any,
) -> Any:
    return attention_scores(q, k, bias, replace(spec, soft_cap=None), *rest, **options)


def _times_zero(_: Plan, bias: Any, *inputs: Any, **options: Any) -> Any:
    return 0.0 * bias(*inputs, **options)


# ---- The softmax ---------------------------------------------------------------------------------


def _of_masked(change: Callable[..., Any]) -> Injection:
    """Make other attention weights: `change(xp, softmax, scores, mask)`, the softmax with the sinks
    of the call.
    """

    def masked_softmax(
        plan: Plan, original: Any, scores: Any, mask: Any = None, *sinks: Any, **options: Any
    ) -> Any:
        def softmax(scores: Any, mask: Any) -> Any:
            return original(scores, mask, *sinks, **options)

        return change(plan.xp, softmax, scores, mask)

    return breaking(masked_softmax=masked_softmax)


def _flipped(_: Any, softmax: Any, scores: Any, mask: Any) -> Any:
    if mask is None:
        return softmax(scores, None)
    return softmax(scores, ~mask)


def _unmasked(_: Any, softmax: Any, scores: Any, mask: Any) -> Any:
    return softmax(scores, None)


def _twice(_: Any, softmax: Any, scores: Any, mask: Any) -> Any:
    return softmax(softmax(scores, mask), None)


def _as_with_dropout(_: Any, softmax: Any, scores: Any, mask: Any) -> Any:
    return softmax(scores, mask) * (100.0 / 90.0)


def _added(xp: Any, softmax: Any, scores: Any, mask: Any) -> Any:
    if mask is not None:
        scores = xp.where(mask, scores + 1.0, scores)
    return softmax(scores, None)


def _over_queries(_: Any, softmax: Any, scores: Any, mask: Any) -> Any:
    if mask is not None:
        mask = (mask | (scores != scores) & False).swapaxes(2, 3)  # of the scores' whole shape
    return softmax(scores.swapaxes(2, 3), mask).swapaxes(2, 3)


def _empty_rows_nan(xp: Any, softmax: Any, scores: Any, mask: Any) -> Any:
    attn_weights = softmax(scores, mask)
    if mask is None:
        return attn_weights
    is_empty = mask.all(-1)[..., None]
    return xp.where(is_empty, xp.zeros_like(scores) + np.nan, attn_weights)


def _without_sinks(_: Plan, masked_softmax: Any, scores: Any, mask: Any = None, *__: Any) -> Any:
    return masked_softmax(scores, mask)


# ---- Attention -----------------------------------------------------------------------------------


def _batch_as_tokens(
    plan: Plan, attend: Any, q: Any, k: Any, v: Any, visible: Any, *rest: Any, **options: Any
) -> Any:
    case = plan.problem.case
    _, attn_weights = attend(q, k, v, visible, *rest, **options)
    causal = None
    if case.is_causal:
        causal = plan.sibling.create_causal_mask(case.batch, case.batch)
    exchanged = [x.swapaxes(0, 2) for x in (q, k, v)]
    context, _ = attend(*exchanged, replace(visible, mask=causal), *rest, **options)
    return context.swapaxes(0, 2), attn_weights


def _weights_transposed(_: Plan, attention_context: Any, weights: Any, value: Any) -> Any:
    return attention_context(weights.swapaxes(2, 3), value)


def _context_doubled(_: Plan, attention_context: Any, weights: Any, value: Any) -> Any:
    context = attention_context(weights, value)
    return context + context


def _last_head_lost(plan: Plan, attention_context: Any, weights: Any, value: Any) -> Any:
    context = attention_context(weights, value)
    return plan.xp.concatenate([context[:, :-1], context[:, -1:] * 0.0], 1)


def _sum_not_rescaled(plan: Plan, attention_context: Any, weights: Any, value: Any) -> Any:
    """Divide by the sum of a kernel with blocks of 4 keys, which is not rescaled.

    Weights are exponentials relative to the highest score, over their sum. Relative to the highest
    score so far, the weights of a block are larger by the ratio of the highest weights.
    """
    xp = plan.xp
    highest = xp.amax(weights, -1)[..., None]
    so_far, total = xp.zeros_like(highest), xp.zeros_like(highest)
    for begin in range(0, weights.shape[-1], 4):
        block = weights[..., begin : begin + 4]
        so_far = xp.maximum(so_far, xp.amax(block, -1)[..., None])
        is_visible = so_far > 0.0
        larger = highest / xp.where(is_visible, so_far, xp.ones_like(so_far))
        total = total + block.sum(-1)[..., None] * larger
    total = xp.where(total > 0.0, total, xp.ones_like(total))
    return attention_context(weights / total, value)


def _values_rolled(plan: Plan, project_qkv: Any, *inputs: Any) -> Any:
    q, k, v = project_qkv(*inputs)
    return q, k, plan.xp.roll(v, 1, 2)


def _as_the_formula(plan: Plan, *_: Any) -> Any:
    """Return a kernel that attends by the formula, in which a hidden NaN times 0 is NaN."""

    def attend(query: Any, key: Any, value: Any, mask: Any, scores: Any) -> Any:
        context, _ = plan.sibling.stages.attend(query, key, value, mask, scores)
        return context

    return attend


def _read_as_zeros(_: Plan, append: Any, cache: Any, k: Any, v: Any, **new: Any) -> Any:
    grown = append(cache, k, v, **new)
    return replace(grown, keys=grown.keys * 0.0, values=grown.values * 0.0)


def _keys_as_values(_: Plan, append: Any, cache: Any, k: Any, v: Any, **new: Any) -> Any:
    return append(cache, k, k, **new)


# ---- The backward pass ---------------------------------------------------------------------------


def _stopped(x: Any) -> Any:
    """Return an array of torch or JAX without its gradient."""
    if hasattr(x, "detach"):
        return x.detach()
    import jax

    return jax.lax.stop_gradient(x)


def _with_gradient_times(x: Any, factor: float) -> Any:
    """Return an array whose gradient is multiplied."""
    scaled = x * factor
    return _stopped(x) + (scaled - _stopped(scaled))


def _keys_stopped(_: Plan, project_qkv: Any, *inputs: Any) -> Any:
    q, k, v = project_qkv(*inputs)
    # The keys stay in the graph, because torch raises an error about unused weights.
    return q, _with_gradient_times(k, 0.0), v


def _first_of_group(plan: Plan, repeat_kv_heads: Any, x: Any, n: int) -> Any:
    """Repeat heads, and let the first copy of each alone have a gradient."""
    repeated = repeat_kv_heads(x, n)
    group = n // x.shape[1]
    copies = [repeated[:, i : i + 1] for i in range(n)]
    heads = [copy if i % group == 0 else _stopped(copy) for i, copy in enumerate(copies)]
    return plan.xp.concatenate(heads, 1)


def _gradients_unscaled(plan: Plan, attention_scores: Any, q: Any, k: Any, *rest: Any) -> Any:
    factor = 1.0 / plan.problem.spec.score_scale
    return attention_scores(_with_gradient_times(q, factor), _with_gradient_times(k, factor), *rest)


# ---- Precision -----------------------------------------------------------------------------------


def products_of(bits: int) -> Injection:
    """Let every matrix product take inputs with this number of explicit bits of their mantissa."""
    return partial(_cut_products, bits)


def _cut_products(bits: int, plan: Plan) -> None:
    for name, x in plan.weights.items():
        if name.endswith("proj.weight"):
            plan.weights[name] = _cut(bits, np, x)
    plan.functions["project_with"] = partial(_projecting_cut, bits)
    plan.functions["attention_scores"] = partial(_scores_of_cut, bits)
    plan.functions["attention_context"] = partial(_context_of_cut, bits)


def _cut(bits: int, xp: Any, x: Any) -> Any:
    """Round to a number of explicit bits of the mantissa."""
    is_tiny = abs(x) < 2.0**-100  # what is smaller may stay as it is
    exponent = xp.floor(xp.log2(xp.where(is_tiny, xp.ones_like(x), abs(x))))
    step = xp.exp2(exponent - bits)
    return xp.where(is_tiny, x, xp.round(x / step) * step)


def _projecting_cut(bits: int, plan: Plan, project_with: Any, *weights: Any) -> Any:
    def project(which: str, x: Any) -> Any:
        if which.endswith("proj"):
            x = _cut(bits, plan.xp, x)
        return project_with(*weights)(which, x)

    return project


def _scores_of_cut(bits: int, plan: Plan, attention_scores: Any, q: Any, k: Any, *rest: Any) -> Any:
    return attention_scores(_cut(bits, plan.xp, q), _cut(bits, plan.xp, k), *rest)


def _context_of_cut(bits: int, plan: Plan, attention_context: Any, *inputs: Any) -> Any:
    return attention_context(*[_cut(bits, plan.xp, x) for x in inputs])


# ---- Quantized caches ----------------------------------------------------------------------------


def _quantized(xp: Any, x: Any) -> tuple[Any, Any]:
    """Return the values in int8, and a scale for each head of each token."""
    scales = xp.amax(xp.abs(x), axis=-1, keepdims=True) / 127
    return xp.round(x / scales), scales


def _appended_quantized(plan: Plan, append: Any, cache: Any, new: Any, *lengths: Any) -> Any:
    """Append keys and values as a quantized cache returns them."""
    read = []
    for x in new:
        numbers, scales = _quantized(plan.xp, x)
        read.append(numbers * scales)
    return append(cache, tuple(read), *lengths)


def _appended_without_scales(plan: Plan, append: Any, cache: Any, new: Any, *lengths: Any) -> Any:
    numbers = [_quantized(plan.xp, x)[0] for x in new]
    return append(cache, tuple(numbers), *lengths)


# ---- All -----------------------------------------------------------------------------------------

INJECTIONS: dict[str, Injection] = {
    "q_proj-transposed": _q_transposed,
    "k-v-swapped": _k_v_swapped,
    "q_proj-bias-missing": _q_bias_missing,
    "fused-qkv-read-as-thirds": _packed_read_as_thirds,
    "rope-interleaved": breaking(apply_rope=_interleaved),
    "qk-norm-missing": _with_spec(qk_norm=None),
    "clip-qkv-missing": _with_spec(clip_qkv=None),
    "rope-missing": breaking(apply_rope=_first_input),
    "rope-theta-10000": _by_rope(_with_theta_10000),
    "rope-scaling-missing": _by_rope(_unscaled_rope),
    "rope-attention-factor-missing": _by_rope(_without_attention_factor),
    "rope-whole-head": _by_rope(_of_whole_head),
    "rope-sections-axes-swapped": _at_positions(_axes_swapped),
    "rope-positions-run-on": _at_positions(_running_on),
    "cache-position-restarted": _at_positions(_restarted),
    "temperature-ignored": breaking(apply_temperature=_first_input),
    "shared-kv-rotated-again": breaking(project_qkv=_rotated_again),
    "kv-heads-tiled": breaking(repeat_kv_heads=_heads_tiled),
    "heads-not-moved": breaking(split_unchecked=_split_without_moving),
    "mask-flipped": _of_masked(_flipped),
    "mask-ignored": _of_masked(_unmasked),
    "mask-added": _of_masked(_added),
    "causal-off-by-one": _next_key_visible,
    "padding-ignored": breaking(create_attention_mask=_padding_ignored),
    "window-ignored": _window_ignored,
    "scale-missing": breaking(attention_scores=_unscaled),
    "soft-cap-ignored": breaking(attention_scores=_uncapped),
    "alibi-missing": breaking(alibi_bias=_times_zero),
    "relative-bias-ignored": breaking(relative_position_bias=_times_zero),
    "relative-products-ignored": breaking(relative_position_products=_times_zero),
    "sinks-ignored": breaking(masked_softmax=_without_sinks),
    "score-bias-missing": breaking(attention_scores=_unbiased),
    "batch-as-tokens": breaking(attend=_batch_as_tokens),
    "attn-weights-transposed": breaking(attention_context=_weights_transposed),
    "values-of-token-before": breaking(project_qkv=_values_rolled),
    "context-doubled": breaking(attention_context=_context_doubled),
    "last-head-lost": breaking(attention_context=_last_head_lost),
    "blocks-sum-not-rescaled": breaking(attention_context=_sum_not_rescaled),
    "softmax-over-queries": _of_masked(_over_queries),
    "softmax-twice": _of_masked(_twice),
    "dropout-factor-10": _of_masked(_as_with_dropout),
    "empty-row-nan": _of_masked(_empty_rows_nan),
    "nan-leaks": breaking(contained=_as_the_formula),
    "gate-missing": breaking(apply_gate=_first_input),
    "value-padding-combined": breaking(combine_heads=_padded_and_combined),
    "latent-kv-factor-missing": breaking(project_latents=_kv_factor_missing),
    "residual-added": breaking(project_with=_with_residual),
    "out-proj-missing": breaking(project_with=_without_out_proj),
    "cache-keys-as-values": breaking(append_to_cache=_keys_as_values),
    "cache-empty": breaking(append_to_cache=_read_as_zeros),
    "cache-scale-missing": breaking(append_unchecked=_appended_without_scales),
    "grad-stopped-at-k": breaking(project_qkv=_keys_stopped),
    "grad-group-not-summed": breaking(repeat_kv_heads=_first_of_group),
    "grad-scale-missing": breaking(attention_scores=_gradients_unscaled),
    "precision-bfloat16": products_of(7),
}
"""By the names of `parity.explain.diagnosis.bugs`, in the order of the pages in
`parity/bugs/README.md`.
"""


@cache
def bugs_to_inject(case: Case) -> dict[str, Edit]:
    """Return the known bugs that can be injected into a case, by name; the more usual one of each
    name.
    """
    known = bugs_for(case)
    if not case.is_cached:
        known += PRECISIONS.values()
    injectable: dict[str, Edit] = {}
    for bug in known:
        if bug.name in INJECTIONS and bug.shows_alone:
            injectable.setdefault(bug.name, bug)
    return injectable


def bug_to_inject(name: str, case: Case) -> Edit:
    """Return the bug of a name, if it can be injected into a case.

    Raises:
        ValueError: if there is no such bug.
    """
    if name not in bugs_to_inject(case):
        raise InputError("bug", f"be a bug that can be injected into {case.name}", bug=name)
    return bugs_to_inject(case)[name]


def plan_of(bug: str | Injection, problem: Problem, backend: str) -> Plan:
    """Return the plan of a bug, by name or as a function; an empty name changes nothing.

    Raises:
        ValueError: if there is no such bug.
    """
    port, xp = load_backend(backend), importlib.import_module(BACKENDS[backend].arrays)
    plan = Plan(problem, port.SIBLING, xp, port, dict(problem.weights), {})
    if problem.case.cache_quantization is not None:
        # No implementation has a quantized cache, so the self-test adds one.
        plan.functions["append_unchecked"] = _appended_quantized
    if isinstance(bug, str) and bug:
        bug = INJECTIONS[bug_to_inject(bug, problem.case).name]
    if callable(bug):
        bug(plan)
    return plan

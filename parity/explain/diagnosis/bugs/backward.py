"""Bugs of the backward pass: the forward pass is right, and gradients are not.

They override methods of `reference.Backward` and never methods of the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mha_spec import Norm
from parity.explain.diagnosis.bugs.families import (
    BACKWARD,
    BATCH_SUMS,
    DROPOUT_MASK,
    GROUP_SUMS,
    LOSS_FACTOR,
    PRECISION,
    STOPPED,
    BugFamily,
)
from parity.explain.diagnosis.bugs.record import Edit, Override
from parity.explain.diagnosis.bugs.sites import SIXTEEN_BITS, for_names, in_sixteen_bits
from parity.measure.core.case import Case
from parity.measure.core.reference import Backward, Layer
from parity.measure.core.stages import Values
from parity.measure.core.weights import weight_shapes
from parity.measure.text import some_of

BLOCKS = (2, 4, 8)
"""Numbers of equal blocks, or ranks of a ring, that are tried."""

BLOCK_SIZES = (16, 32, 64, 128)
"""Sizes of blocks of keys that are tried."""

MOST_NAMED = 3
"""The number of parameters that a bug of many lists."""

MOST_HEADS = 16
"""The largest group of query heads whose heads are tried one by one."""

SHOWN_BY = {
    f"grad.{name}": (f"grad.{name}_norm.weight", f"grad.{name}_proj.weight") for name in "qkv"
}
"""Gradients that show a bug first if the gradients of the stage are not recorded."""

Change = Callable[[Backward, np.ndarray], np.ndarray]
"""Turns a gradient into a wrong one."""

Exponentials = Callable[[Backward, Values], np.ndarray]
"""Returns exp(score - log sum exp) as a kernel computes it again, 0 for hidden keys."""


def _bug(
    family: BugFamily,
    name: str,
    about: str,
    backward: Mapping[str, Override],
    *stages: str,
    is_loss: bool = False,
) -> Edit:
    """Return a bug of the backward pass, and the gradients of which one shows it first."""
    shown_by: dict[str, None] = {}
    for stage in stages:
        shown_by |= dict.fromkeys((stage, *SHOWN_BY.get(stage, ())))
    bug = family.shown_in(*shown_by)(name, about, {}, is_loss=is_loss)
    return replace(bug, backward=backward)


def _passing(names: Collection[str], change: Change) -> dict[str, Override]:
    """Change the gradients of some stages, projections or inputs."""

    def passed(backward: Any, original: Any, name: str, d_x: np.ndarray) -> np.ndarray:
        return change(backward, original(name, d_x))

    return {"passed": for_names(names, passed)}


def _zero(_: Backward, d_x: np.ndarray) -> np.ndarray:
    return np.zeros_like(d_x)


# ---- Stopped gradients ---------------------------------------------------------------------------


def stopped(case: Case) -> Iterator[Edit]:
    """Yield gradients that are stopped at a stage, a projection or its input."""
    spec = case.spec
    yield from _stopped_stage("attn-weights", "the attention weights", "attn_weights")
    yield from _stopped_stage("k", "the keys", "k")
    yield from _stopped_stage("v", "the values", "v")
    yield from _stopped_stage("q", "the queries", "q")
    yield from _stopped_stage("kv", "the keys and the values", "k", "v")
    yield from _stopped_stage("context", "the context", "context")
    if spec.gate is not None:
        yield from _stopped_stage("gate", "the gate", "gate")
        yield _stopped("gate-input", "the input of the gate", ["gate_input"], "grad.query")
    if spec.latent is not None or spec.shared_kv:
        return
    for name in "qkv":
        projection, side = f"{name}_proj", f"{name}_input"
        if spec.norms.get(f"{name}_norm") is not None:
            stage = f"grad.{projection}.weight"
            yield _stopped(f"{name}-proj", f"the result of {projection}", [projection], stage)
        yield _stopped(f"{name}-input", f"the input of {projection}", [side], "grad.query")
    words = "the input of k_proj and v_proj"
    yield _stopped("kv-input", words, ["k_input", "v_input"], "grad.query")


def _stopped_stage(site: str, words: str, *names: str) -> Iterator[Edit]:
    """Yield stages whose recorded gradient is 0, or right and not passed on."""
    stages = [f"grad.{name}" for name in names]
    yield _stopped(site, words, names, *stages)
    yield _stopped(site, words, [f"before {name}" for name in names], *stages)


def _stopped(site: str, words: str, names: Collection[str], *stages: str) -> Edit:
    about = f"no gradient flows through {words}"
    return _bug(STOPPED, f"grad-stopped-at-{site}", about, _passing(names, _zero), *stages)


def stopped_norms(case: Case) -> Iterator[Edit]:
    """Yield norms whose statistics, or whose input, get no gradient."""
    names = [name.removesuffix("_norm") for name, norm in case.spec.norms.items() if norm]
    groups = [tuple(names)]
    if len(names) > 1:
        groups += [(name,) for name in names]
    for group in groups:
        words = " and ".join(f"{name}_norm" for name in group)
        yield _bug(
            STOPPED,
            "grad-stopped-in-norm",
            f"the mean square in {words} is a constant in the backward pass",
            {"of_standardised": _standardised(group, _by_constant)},
            "grad.query",
        )
        yield _bug(
            STOPPED,
            "grad-stopped-before-norm",
            f"no gradient flows through the input of {words}",
            {"of_standardised": _standardised(group, _by_nothing)},
            "grad.query",
        )
        yield _bug(
            STOPPED,
            "grad-stopped-before-norm",
            f"gradients flow through the mean square in {words} alone",
            {"of_standardised": _standardised(group, _by_mean_square)},
            "grad.query",
        )


def _standardised(names: Collection[str], change: Callable[..., np.ndarray]) -> Override:
    """Change the gradient of the input of some norms: `change(right, d_hat, s)`."""

    def of_standardised(
        _: Any,
        original: Any,
        name: str,
        d_hat: np.ndarray,
        x_hat: np.ndarray,
        s: np.ndarray,
        norm: Norm,
    ) -> np.ndarray:
        return change(original(name, d_hat, x_hat, s, norm), d_hat, s)

    return for_names(names, of_standardised)


def _by_constant(_: np.ndarray, d_hat: np.ndarray, s: np.ndarray) -> np.ndarray:
    return d_hat / s


def _by_nothing(right: np.ndarray, d_hat: np.ndarray, s: np.ndarray) -> np.ndarray:
    return np.zeros_like(right)


def _by_mean_square(right: np.ndarray, d_hat: np.ndarray, s: np.ndarray) -> np.ndarray:
    return right - d_hat / s


def without_gradient(case: Case) -> Iterator[Edit]:
    """Yield biases and other parameters whose gradient is 0."""
    spec = case.spec
    biases = [name for name in weight_shapes(spec) if name.endswith("_proj.bias")]
    for name in biases:
        words = name.removesuffix(".bias")
        yield _without(f"{words}-bias", f"the bias of {words}", name)
    if len(biases) > 1:
        yield _without("all-bias", "the bias of every projection", *biases)
    of_qkv = [name for name in biases if name[:2] in ("q_", "k_", "v_")]
    if 1 < len(of_qkv) < len(biases):
        yield _without("qkv-bias", "the bias of q_proj, k_proj and v_proj", *of_qkv)
    if case.bias:
        yield _without("score-bias", "the bias of the scores", "bias")
    if spec.sinks:
        yield _without("sinks", "the sinks", "sinks")
    if spec.relative_bias is not None:
        yield _without("relative-bias", "the table of the relative bias", "relative_bias")


def _without(site: str, words: str, *names: str) -> Edit:
    return _bug(
        STOPPED,
        f"grad-missing-of-{site}",
        f"{words} gets no gradient",
        _passing(names, _zero),
        *[f"grad.{name}" for name in names],
    )


# ---- Groups of heads -----------------------------------------------------------------------------


def groups(case: Case) -> Iterator[Edit]:
    """Yield shared key/value heads whose gradients are not the sum over their query heads."""
    num_heads, num_kv_heads = case.spec.num_heads, case.spec.num_kv_heads
    group = num_heads // num_kv_heads
    if group == 1 or case.spec.latent is not None:
        return
    for names, words in (("kv", "keys and values"), ("k", "keys"), ("v", "values")):
        stages = [f"grad.{name}" for name in names]
        yield _bug(
            GROUP_SUMS,
            "grad-group-averaged",
            f"the gradients of {words} are averaged over the {group} query heads of a group",
            {"per_kv_head": _summed_by(names, np.mean)},
            *stages,
        )
        if num_kv_heads > 1:
            yield _bug(
                GROUP_SUMS,
                "grad-group-tiled",
                f"the gradients of {words} are summed over heads n, n + {num_kv_heads}, … "
                f"instead of the query heads of a group",
                {"per_kv_head": _summed_as_tiled(names)},
                *stages,
            )
    for heads, words in _heads_of_group(group):
        for names, of_names in (("kv", "keys and values"), ("k", "keys"), ("v", "values")):
            yield _bug(
                GROUP_SUMS,
                "grad-group-not-summed",
                f"only the gradients of {words} of each group of {group} query heads reach the "
                f"{of_names}",
                {"per_kv_head": _of_heads(names, heads)},
                *[f"grad.{name}" for name in names],
            )
        for name, of_name in (("q", "queries"), ("context", "context")):
            yield _bug(
                STOPPED,
                "grad-stopped-at-heads",
                f"gradients flow through the {of_name} of {words} of each group alone",
                _passing([name], _only_heads(heads)),
                f"grad.{name}",
            )


def _heads_of_group(group: int) -> Iterator[tuple[np.ndarray, str]]:
    """Yield some query heads of a group, as a mask, with words: each alone, all but one."""
    for head in range(min(group, MOST_HEADS)):
        alone = np.arange(group) == head
        yield alone, f"head {head}"
        if group > 2:
            yield ~alone, f"all heads but {head}"


def _summed_by(names: str, mean: Callable[..., Any]) -> Override:
    def per_kv_head(backward: Any, original: Any, name: str, x: np.ndarray) -> np.ndarray:
        return mean(_in_groups(backward, x), axis=2)

    return for_names(names, per_kv_head)


def _in_groups(backward: Backward, x: np.ndarray) -> np.ndarray:
    """Return heads (B, N, S, H) as (B, K, N // K, S, H)."""
    num_kv_heads = backward.layer.problem.spec.num_kv_heads
    return x.reshape(x.shape[0], num_kv_heads, -1, *x.shape[2:])


def _summed_as_tiled(names: str) -> Override:
    def per_kv_head(backward: Any, original: Any, name: str, x: np.ndarray) -> np.ndarray:
        num_kv_heads = backward.layer.problem.spec.num_kv_heads
        return x.reshape(x.shape[0], -1, num_kv_heads, *x.shape[2:]).sum(axis=1)

    return for_names(names, per_kv_head)


def _of_heads(names: str, heads: np.ndarray) -> Override:
    def per_kv_head(backward: Any, original: Any, name: str, x: np.ndarray) -> np.ndarray:
        return _in_groups(backward, x)[:, :, heads].sum(axis=2)

    return for_names(names, per_kv_head)


def _only_heads(heads: np.ndarray) -> Change:
    def change(backward: Backward, d_x: np.ndarray) -> np.ndarray:
        is_counted = np.tile(heads, backward.layer.problem.spec.num_kv_heads)
        return d_x * is_counted[:, None, None].astype(d_x.dtype)

    return change


# ---- All gradients -------------------------------------------------------------------------------


def multiplied(factor: float) -> Edit:
    """Return the bug that all gradients are multiplied by a number."""

    def change(_: Backward, d_x: np.ndarray) -> np.ndarray:
        return d_x * d_x.dtype.type(factor)

    return _bug(
        LOSS_FACTOR,
        "grad-factor",
        f"all gradients are {factor:.6g} times what they should be",
        _passing(["output"], change),
        "grad.out_proj.weight",
    )


# ---- Sums over the batch -------------------------------------------------------------------------


def of_sequences(sequences: Sequence[int], names: Sequence[str]) -> Edit:
    """Return the bug that gradients of parameters are sums over some sequences of the batch alone.

    Args:
        sequences: these sequences.
        names: the parameters.
    """
    of_which = f"sequence {sequences[0]}"
    if len(sequences) > 1:
        of_which = f"sequences {', '.join(map(str, sequences))}"
    about = (
        f"the gradient of {names[0]} is not summed over the batch: it comes from {of_which} alone"
    )
    if len(names) > 1:
        parameters = some_of(names, MOST_NAMED)
        about = (
            f"the gradients of {parameters} are not summed over the batch: they come from "
            f"{of_which} alone"
        )

    def gradients(
        backward: Any, original: Any, *, with_stages: bool = False
    ) -> dict[str, np.ndarray]:
        grads = original(with_stages=with_stages)
        partial_sums = gradients_of_sequences(backward, sequences)
        return grads | {f"grad.{name}": partial_sums[f"grad.{name}"] for name in names}

    return _bug(
        BATCH_SUMS,
        "grad-batch-not-summed",
        about,
        {"gradients": gradients},
        *[f"grad.{name}" for name in names],
    )


def gradients_of_sequences(backward: Any, sequences: Sequence[int]) -> dict[str, np.ndarray]:
    """Return the gradients of a backward pass if only some sequences have a loss.

    Sequences share nothing but the parameters, so these gradients add up over the batch.
    """

    def change(_: Backward, d_output: np.ndarray) -> np.ndarray:
        d_some = np.zeros_like(d_output)
        d_some[[*sequences]] = d_output[[*sequences]]
        return d_some

    return backward.with_overrides(_passing(["output"], change)).gradients()


# ---- Kernels that compute their weights again ----------------------------------------------------


def kernels(case: Case) -> Iterator[Edit]:
    """Yield wrong factors and terms of a backward pass that is written by hand."""
    for names, words in (("qk", "queries and keys"), ("q", "queries"), ("k", "keys")):
        yield _bug(
            BACKWARD,
            "grad-scale-missing",
            f"the gradients of {words} are not scaled",
            _passing(names, _unscaled),
            *[f"grad.{name}" for name in names],
        )
        yield _bug(
            BACKWARD,
            "grad-scale-squared",
            f"the gradients of {words} are scaled twice",
            _passing(names, _scaled_again),
            *[f"grad.{name}" for name in names],
        )
    yield _bug(
        BACKWARD,
        "grad-softmax-mean-missing",
        "the mean gradient of a row is not subtracted in the backward pass of the softmax",
        {"of_softmax": _not_centered},
        "grad.scores",
    )
    if case.spec.rope is not None:
        yield _bug(
            BACKWARD,
            "grad-rope-not-reversed",
            "the gradients of queries and keys are rotated forward instead of back",
            {"turned_back": _turned_forward},
            "grad.query",
        )
        yield _bug(
            BACKWARD,
            "grad-rope-missing",
            "the gradients of queries and keys are not rotated back",
            {"turned_back": _not_turned},
            "grad.query",
        )
    if case.spec.soft_cap is not None:
        yield _bug(
            BACKWARD,
            "grad-soft-cap-ignored",
            "the backward pass leaves out the slope of the soft cap",
            {"slope_of_cap": _without_slope},
            "grad.q",
        )


def _unscaled(backward: Backward, d_x: np.ndarray) -> np.ndarray:
    return d_x * d_x.dtype.type(backward.layer.scale())


def _scaled_again(backward: Backward, d_x: np.ndarray) -> np.ndarray:
    return d_x / d_x.dtype.type(backward.layer.scale())


def _not_centered(
    _: Backward, original: Any, attn_weights: np.ndarray, d_weights: np.ndarray, mean: np.ndarray
) -> np.ndarray:
    return original(attn_weights, d_weights, np.zeros_like(mean))


def _turned_forward(
    backward: Backward, original: Any, d_heads: np.ndarray, positions: np.ndarray
) -> np.ndarray:
    return backward.layer.rotate(d_heads, positions)


def _not_turned(
    _: Backward, original: Any, d_heads: np.ndarray, positions: np.ndarray
) -> np.ndarray:
    return d_heads


def _without_slope(_: Backward, original: Any, values: Values) -> float:
    return 1.0


def masks(case: Case) -> Iterator[Edit]:
    """Yield masks that are forgotten, or different, where weights are computed again."""
    for name, about, other in _other_masks(case):
        yield from _recomputed(name, about, _with_mask_of(other))
    if case.has_mask or case.spec.window_size or case.spec.chunk_size:
        about = "the backward pass computes its weights without the mask"
        yield from _recomputed("grad-mask-ignored", about, _exponentials)


def _other_masks(case: Case) -> Iterator[tuple[str, str, Case]]:
    """Yield names of bugs, their descriptions, and cases that have the wrong masks."""
    lacking = "its weights lack this mask"
    if case.key_padding_lengths is not None:
        about = f"padded keys get gradients: {lacking}"
        yield "grad-padding-visible", about, replace(case, key_padding_lengths=None)
    if case.is_causal:
        about = f"the backward pass attends to later keys: {lacking}"
        yield "grad-causal-ignored", about, replace(case, is_causal=False)
    if case.segment_ids is not None:
        about = f"packed sequences get gradients from each other: {lacking}"
        yield "grad-segments-ignored", about, replace(case, segment_ids=None)
    spec = case.spec
    if spec.chunk_size is not None:
        about = f"the backward pass ignores the chunks: {lacking}"
        other_spec = replace(spec, chunk_size=None)
        yield "grad-chunk-ignored", about, replace(case, spec=other_spec)
    size = spec.window_size or case.window_size
    if size is None:
        return
    about = f"the backward pass ignores the window: {lacking}"
    yield "grad-window-ignored", about, _with_window(case, None)
    about = "the window in which the backward pass computes its weights is one key too {}"
    yield "grad-window-one-too-wide", about.format("wide"), _with_window(case, size + 1)
    if size > 1:
        yield "grad-window-one-too-narrow", about.format("narrow"), _with_window(case, size - 1)


def _with_window(case: Case, size: int | None) -> Case:
    """Return a case with another window, of the layer or of the call."""
    if case.spec.window_size is not None:
        return replace(case, spec=replace(case.spec, window_size=size))
    # The window of a call also hides later keys.
    return replace(case, window_size=size, is_causal=True)


def terms(case: Case) -> Iterator[Edit]:
    """Yield terms of the scores, and sinks, that are forgotten where weights are computed again."""
    spec = case.spec
    without: list[tuple[str, str, dict[str, Any]]] = []
    if spec.relative_bias is not None:
        without.append(("grad-relative-bias-ignored", "the relative bias", {"relative_bias": None}))
    if spec.alibi is not None:
        without.append(("grad-alibi-ignored", "the biases of ALiBi", {"alibi": None}))
    if spec.soft_cap is not None:
        without.append(("grad-scores-uncapped", "the soft cap", {"soft_cap": None}))
    about = "the backward pass computes its weights from scores without {}"
    for name, words, fields in without:
        other = replace(case, spec=replace(spec, **fields))
        yield from _recomputed(name, about.format(words), _with_scores_of(other))
    if spec.soft_cap is not None:
        uncapped = _with_scores_of(replace(case, spec=replace(spec, soft_cap=None)))
        yield _bug(
            BACKWARD,
            "grad-scores-uncapped",
            f"{about.format('the soft cap')}, and leaves out its slope",
            _kernel_with({**_weights_of(uncapped), "slope_of_cap": _without_slope}),
            "grad.v",
        )
    if case.bias:
        weights = _with_scores_of(replace(case, bias=False))
        yield from _recomputed("grad-bias-ignored", about.format("their bias"), weights)
    if spec.sinks:
        yield from _without_sinks()


def _weights_of(exponentials: Exponentials) -> dict[str, Override]:
    def attn_weights(backward: Backward, _: Any, values: Values) -> np.ndarray:
        return exponentials(backward, values)

    return {"attn_weights": attn_weights}


def _without_sinks() -> Iterator[Edit]:
    about = "the log-sum-exp of the backward pass lacks the sinks"
    for words, overrides in (
        ("", {"attn_weights": _normalized_without_sinks}),
        (", also for their own gradient", {"log_sum_exp": _log_sum_exp_without_sinks}),
    ):
        weights = {"attn_weights": _recomputed_weights, **overrides}
        yield _bug(BACKWARD, "grad-sinks-ignored", about + words, _kernel_with(weights), "grad.v")


def _recomputed(name: str, about: str, exponentials: Exponentials) -> Iterator[Edit]:
    """Yield wrong weights of a backward pass: with the log-sum-exp of the forward pass, and the
    mean of each row from the output; or a second softmax.
    """

    def normalized(backward: Backward, _: Any, values: Values) -> np.ndarray:
        weights = exponentials(backward, values)
        total = weights.sum(axis=-1, keepdims=True)
        if "sink_weights" in values:
            total = total + values["sink_weights"]
        return weights / np.where(total == 0.0, 1.0, total)

    yield _bug(BACKWARD, name, about, _kernel_with(_weights_of(exponentials)), "grad.v")
    again = {"attn_weights": normalized, "weighed": _of_weights}
    yield _bug(BACKWARD, name, f"{about}, in a softmax of its own", again, "grad.v")


def _kernel_with(overrides: Mapping[str, Override]) -> dict[str, Override]:
    """Return overrides of a kernel: its row means come from the output, as in FlashAttention."""
    return {"weighed": _of_output, **overrides}


def _of_output(
    backward: Backward,
    original: Any,
    values: Values,
    d_context: np.ndarray,
    attn_weights: np.ndarray,
    d_attn_weights: np.ndarray,
) -> np.ndarray:
    return backward.weighed_by_output(values, d_context)


def _of_weights(
    backward: Backward,
    original: Any,
    values: Values,
    d_context: np.ndarray,
    attn_weights: np.ndarray,
    d_attn_weights: np.ndarray,
) -> np.ndarray:
    return (attn_weights * d_attn_weights).sum(axis=-1, keepdims=True)


def _layer_of(case: Case, backward: Backward) -> Layer:
    """Return the layer of another case with the same weights and inputs."""
    problem = backward.layer.problem
    inputs = problem.inputs
    if not case.bias:
        inputs = {name: x for name, x in inputs.items() if name != "bias"}
    return Layer(replace(problem, case=case, inputs=inputs), backward.arithmetic)


def _with_mask_of(case: Case) -> Exponentials:
    def exponentials(backward: Backward, values: Values) -> np.ndarray:
        mask = _layer_of(case, backward).mask({})["mask"]
        return np.where(mask, 0.0, _exponentials(backward, values)).astype(values["scores"].dtype)

    return exponentials


def _with_scores_of(case: Case) -> Exponentials:
    def exponentials(backward: Backward, values: Values) -> np.ndarray:
        scores = _layer_of(case, backward).scores(values)["scores"]
        weights = _exponentials(backward, values, scores)
        return np.where(values["mask"], 0.0, weights).astype(scores.dtype)

    return exponentials


def _recomputed_weights(backward: Backward, _: Any, values: Values) -> np.ndarray:
    weights = _exponentials(backward, values)
    return np.where(values["mask"], 0.0, weights).astype(weights.dtype)


def _normalized_without_sinks(backward: Backward, original: Any, values: Values) -> np.ndarray:
    weights = _recomputed_weights(backward, original, values)
    total = weights.sum(axis=-1, keepdims=True)
    return weights / np.where(total == 0.0, 1.0, total)


def _log_sum_exp_without_sinks(backward: Backward, _: Any, values: Values) -> np.ndarray:
    case = backward.layer.problem.case
    other = _layer_of(replace(case, spec=replace(case.spec, sinks=False)), backward)
    return Backward(other).log_sum_exp(values)


def _exponentials(
    backward: Backward, values: Values, scores: np.ndarray | None = None
) -> np.ndarray:
    """Return exp(score - log sum exp), also of hidden keys; by default of the right scores."""
    if scores is None:
        scores = values["scores"]
    finite = np.where(np.isfinite(scores), scores, 0.0)
    with np.errstate(over="ignore"):
        return np.exp(finite - backward.log_sum_exp(values)).astype(scores.dtype)


# ---- Blocks and rings ----------------------------------------------------------------------------


def blocks(case: Case) -> Iterator[Edit]:
    """Yield bugs of attention in blocks of keys, one after the other or on the ranks of a ring."""
    num_keys = case.key_len
    sizes = [
        (num_keys // count, f"{count} equal blocks")
        for count in BLOCKS
        if num_keys % count == 0 and num_keys > count
    ]
    sizes += [(size, f"blocks of {size} keys") for size in BLOCK_SIZES if size < num_keys]
    tried: set[int] = set()
    for size, words in sizes:
        if size in tried:
            continue
        tried.add(size)
        yield _bug(
            BACKWARD,
            "grad-lse-not-merged",
            f"in the backward pass each of {words} has its own log-sum-exp, not one over all keys",
            _kernel_with({"attn_weights": _normalized_by_block(size)}),
            "grad.v",
        )
    is_plain = case.key_padding_lengths is None and case.segment_ids is None
    is_plain = is_plain and not (case.random_mask or case.window_size or case.bias)
    spec = case.spec
    if not is_plain or spec.window_size or spec.chunk_size or spec.has_distance_bias:
        return
    for count in BLOCKS:
        if case.seq_len != case.key_len or num_keys % count or num_keys <= count:
            continue
        for names, words in (("kv", "keys and values"), ("k", "keys"), ("v", "values")):
            yield _bug(
                BACKWARD,
                "grad-ring-block-stale",
                f"in the backward pass of a ring of {count}, each rank uses its own block of "
                f"{words} in every step",
                _by_stale_blocks(count, names),
                "grad.v",
            )


def _normalized_by_block(size: int) -> Override:
    def attn_weights(backward: Backward, original: Any, values: Values) -> np.ndarray:
        weights = original(values)
        parts = []
        for begin in range(0, weights.shape[-1], size):
            part = weights[..., begin : begin + size]
            total = part.sum(axis=-1, keepdims=True)
            parts.append(part / np.where(total == 0.0, 1.0, total))
        return np.concatenate(parts, axis=-1)

    return attn_weights


def _by_stale_blocks(count: int, names: str) -> dict[str, Override]:
    """Compute every step of a ring's backward pass with the keys or values of the first one.

    The step of a rank for a block of keys adds to the gradients of that block, from products with
    the rank's own block. Its mask is the one of the right block.
    """

    def attn_weights(backward: Backward, original: Any, values: Values) -> np.ndarray:
        weights = _exponentials(backward, values, _of_own_blocks(values["scores"], count))
        return np.where(values["mask"], 0.0, weights).astype(weights.dtype)

    def slope_of_cap(backward: Backward, original: Any, values: Values) -> np.ndarray | float:
        slope = original(values)
        if isinstance(slope, np.ndarray):
            return _of_own_blocks(slope, count)
        return slope

    def of_products(
        backward: Backward, original: Any, d_scores: np.ndarray, q: np.ndarray, k: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        _, d_k = original(d_scores, q, k)
        return backward.arithmetic.matmul(_into_own_blocks(d_scores, count), k), d_k

    def dropped(backward: Any, original: Any, use: str, d_weights: np.ndarray) -> np.ndarray:
        return original(use, _of_own_blocks(d_weights, count))

    overrides: dict[str, Override] = {}
    if "k" in names:
        overrides |= {
            "attn_weights": attn_weights,
            "slope_of_cap": slope_of_cap,
            "of_products": of_products,
        }
    if "v" in names:
        overrides["dropped"] = for_names(["attn_weights"], dropped)
    return _kernel_with(overrides)


def _in_blocks(x: np.ndarray, count: int) -> np.ndarray:
    """Return (B, N, T, S) as (B, N, blocks, T / blocks, blocks, S / blocks)."""
    num_queries, num_keys = x.shape[2:]
    return x.reshape(*x.shape[:2], count, num_queries // count, count, num_keys // count)


def _of_own_blocks(x: np.ndarray, count: int) -> np.ndarray:
    """Return products (B, N, T, S) in which every block of keys is the one of the queries."""
    own = np.einsum("bnrtrs->bnrts", _in_blocks(x, count))
    return np.repeat(own[:, :, :, :, None], count, axis=4).reshape(x.shape)


def _into_own_blocks(d_x: np.ndarray, count: int) -> np.ndarray:
    """Return the gradient before `_of_own_blocks`, from that after it."""
    of_rank = _in_blocks(d_x, count).sum(axis=4)
    is_own = np.eye(count, dtype=d_x.dtype)
    return np.einsum("bnrts,rc->bnrtcs", of_rank, is_own).reshape(d_x.shape)


# ---- Dropout -------------------------------------------------------------------------------------


def of_dropout(factors: np.ndarray) -> Iterator[Edit]:
    """Yield bugs of the backward pass of a layer that drops attention weights.

    Args:
        factors: 0 for a dropped weight, 1 / (1 - p) for others, (B, N, T, S).
    """
    is_kept = (factors > 0.0).astype(factors.dtype)
    bugs = {
        "grad-dropout-unscaled": (
            "the backward pass does not divide by 1 - p",
            _kernel_with({"dropped": _times(is_kept)}),
        ),
        "grad-dropout-ignored": (
            "the backward pass has no dropout",
            _kernel_with({"dropped": _times(np.ones_like(is_kept))}),
        ),
        "grad-dropout-of-softmax": (
            "the backward pass of the softmax has the weights after dropout instead of before",
            _kernel_with({"of_softmax": _with_dropped_weights(factors)}),
        ),
    }
    for name, (about, overrides) in bugs.items():
        yield _bug(DROPOUT_MASK, name, about, overrides, "grad.v", "grad.scores")
    for use, words in (("attn_weights", "attention weights"), ("v", "values")):
        yield _bug(
            DROPOUT_MASK,
            "grad-dropout-unscaled",
            f"the gradients of the {words} are not divided by 1 - p",
            _kernel_with({"dropped": _times(is_kept, use)}),
            f"grad.{use}",
        )


def redrawn(factors: np.ndarray) -> Iterator[Edit]:
    """Yield the bug that the backward pass drops other weights than the forward pass.

    Its row means come from the output of the forward pass, or from a second forward pass.

    Args:
        factors: factors of the backward pass: 0 for a dropped weight, 1 / (1 - p) for others.
    """
    again = {"dropped": _times(factors)}
    for overrides in (_kernel_with(again), again):
        yield _bug(
            DROPOUT_MASK,
            "grad-dropout-redrawn",
            "the backward pass draws dropout again: it drops other weights than the forward pass",
            overrides,
            "grad.v",
        )


def dropout_of(factors: np.ndarray) -> Edit:
    """Return the dropout of a forward pass, which its backward pass follows."""

    def dropped_weights(layer: Layer, original: Any, values: Values) -> dict[str, np.ndarray]:
        a = layer.arithmetic
        weights = a.widen(original(values)["attn_weights"]) * factors.astype(a.wide)
        return {"attn_weights": a.keep(weights)}

    def before_dropout(backward: Backward, original: Any, values: Values) -> np.ndarray:
        return backward.recomputed_attn_weights(values)

    return Edit(
        "dropout",
        "attention weights are dropped",
        {"attn_weights": dropped_weights},
        backward={"dropped": _times(factors), "attn_weights": before_dropout},
    )


def _times(factors: np.ndarray, *uses: str) -> Override:
    """Return the dropout with some factors, in some of its uses; by default in both."""

    def dropped(backward: Any, original: Any, use: str, x: np.ndarray) -> np.ndarray:
        return x * factors.astype(x.dtype)

    return for_names(uses or ("attn_weights", "v"), dropped)


def _with_dropped_weights(factors: np.ndarray) -> Override:
    def of_softmax(
        _: Backward,
        original: Any,
        attn_weights: np.ndarray,
        d_weights: np.ndarray,
        mean: np.ndarray,
    ) -> np.ndarray:
        return original(attn_weights * factors.astype(attn_weights.dtype), d_weights, mean)

    return of_softmax


# ---- Sums in 16 bits -----------------------------------------------------------------------------


def narrow_sums(case: Case) -> Iterator[Edit]:
    """Yield sums of gradients, and gradients between operations, that are kept in 16 bits."""
    for dtype in SIXTEEN_BITS:
        if case.spec.num_kv_heads < case.spec.num_heads and case.spec.latent is None:
            yield _loss(
                f"grad-group-sums-{dtype}",
                f"the gradients of keys and values are summed over their query heads in {dtype}",
                {"per_kv_head": _group_sums_in(dtype)},
                "grad.v",
            )
            yield _loss(
                f"grad-group-sums-{dtype}",
                f"the gradients of keys and values are rounded to {dtype} for each query head, and "
                f"their sums again",
                {"per_kv_head": _sums_ofin_sixteen_bits(dtype)},
                "grad.v",
            )
        yield _loss(
            f"grad-weight-sums-{dtype}",
            f"the gradients of weights are summed over sequences in {dtype}",
            {"of_weight": _weight_sums_in(dtype)},
            "grad.out_proj.weight",
        )
        yield _loss(
            f"grad-scores-{dtype}",
            f"the gradients of the scores are rounded to {dtype}",
            _passing(["scores"], _rounded_to(dtype)),
            "grad.scores",
        )
        for names, words in (
            ("qkv", "queries, keys and values"),
            ("q", "queries"),
            ("k", "keys"),
            ("v", "values"),
        ):
            yield _loss(
                f"grad-heads-{dtype}",
                f"the gradients of {words} are rounded to {dtype}",
                _passing(names, _rounded_to(dtype)),
                *[f"grad.{name}" for name in reversed(names)],
            )
        for suffixes, words in (
            ((), "parameters"),
            (("_proj.weight",), "projections' weights"),
            ((".bias",), "biases"),
        ):
            parameters = []
            for name in weight_shapes(case.spec):
                if not suffixes or name.endswith(suffixes):
                    parameters.append(name)
            yield _loss(
                f"grad-parameters-{dtype}",
                f"the gradients of all {words} are rounded to {dtype} in the end",
                {"gradients": _with_rounded(parameters, dtype)},
                *[f"grad.{name}" for name in parameters],
            )


def _loss(name: str, about: str, backward: Mapping[str, Override], *stages: str) -> Edit:
    return _bug(PRECISION, name, about, backward, *stages, is_loss=True)


def _with_rounded(parameters: Collection[str], dtype: str) -> Override:
    """Round the gradients of some parameters, from which no others are computed."""

    def gradients(
        _: Backward, original: Any, *, with_stages: bool = False
    ) -> dict[str, np.ndarray]:
        grads = original(with_stages=with_stages)
        rounded = {}
        for name in parameters:
            # A layer with another bug may lack a parameter.
            if f"grad.{name}" in grads:
                rounded[f"grad.{name}"] = in_sixteen_bits(grads[f"grad.{name}"], dtype)
        return grads | rounded

    return gradients


def _rounded_to(dtype: str) -> Change:
    def change(_: Backward, d_x: np.ndarray) -> np.ndarray:
        return in_sixteen_bits(d_x, dtype)

    return change


def _group_sums_in(dtype: str) -> Override:
    def per_kv_head(backward: Backward, original: Any, name: str, x: np.ndarray) -> np.ndarray:
        heads = in_sixteen_bits(_in_groups(backward, x), dtype)
        total = heads[:, :, 0]
        for head in range(1, heads.shape[2]):
            total = in_sixteen_bits(total + heads[:, :, head], dtype)
        return total

    return per_kv_head


def _sums_ofin_sixteen_bits(dtype: str) -> Override:
    def per_kv_head(backward: Backward, original: Any, name: str, x: np.ndarray) -> np.ndarray:
        heads = in_sixteen_bits(_in_groups(backward, x), dtype)
        return in_sixteen_bits(heads.sum(axis=2), dtype)

    return per_kv_head


def bias_sums_in(dtype: str) -> Edit:
    """Return an edit of the noise: gradients of biases are sums in 16 bits, token by token."""

    def of_bias(_: Backward, original: Any, d_y: np.ndarray) -> np.ndarray:
        total = np.zeros(d_y.shape[-1], d_y.dtype)
        for of_token in d_y.reshape(-1, d_y.shape[-1]):
            total = in_sixteen_bits(total + of_token, dtype)
        return total

    return Edit(backward={"of_bias": of_bias})


def _weight_sums_in(dtype: str) -> Override:
    def of_weight(backward: Backward, original: Any, d_y: np.ndarray, x: np.ndarray) -> np.ndarray:
        d_y, x = d_y.reshape(len(x), -1, d_y.shape[-1]), x.reshape(len(x), -1, x.shape[-1])
        total = np.zeros((d_y.shape[-1], x.shape[-1]), d_y.dtype)
        for of_sequence, tokens in zip(d_y, x, strict=True):
            term = in_sixteen_bits(original(of_sequence[None], tokens[None]), dtype)
            total = in_sixteen_bits(total + term, dtype)
        return total

    return of_weight

"""Bugs in norms of queries, keys, values and the context."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from mha_spec import AttentionSpec, Norm
from parity.explain.diagnosis.bugs.record import Edit, Override, known_bug
from parity.explain.diagnosis.bugs.sites import Overrides, always, for_names, read_as, weights
from parity.explain.diagnosis.bugs.specs import of_spec
from parity.measure.core.case import Case
from parity.measure.core.reference import Layer

of_norms = partial(known_bug, page="qk-norm", stages=("q", "k"))


def norms(case: Case) -> Iterator[Edit]:
    spec = case.spec
    if spec.v_norm is not None:
        yield _missing("v-norm-missing", "values", of_spec(spec, v_norm=None), stages=("v",))
    if spec.context_norm is not None:
        yield from _of_context(spec)
    if spec.qk_norm is not None:
        yield from _of_queries_and_keys(spec, spec.qk_norm)


def _of_context(spec: AttentionSpec) -> Iterator[Edit]:
    yield _missing(
        "context-norm-missing",
        "contexts",
        of_spec(spec, context_norm=None),
        stages=("output",),
    )
    if spec.num_heads > 1:
        yield of_norms(
            "context-norm-per-head",
            "the context is normalized head by head",
            _head_by_head({"context": spec.num_heads}),
            fix="normalize the context of all heads together",
            stages=("output",),
        )


def _of_queries_and_keys(spec: AttentionSpec, norm: Norm) -> Iterator[Edit]:
    yield _missing("qk-norm-missing", "queries and keys", of_spec(spec, qk_norm=None))
    yield _missing("qk-norm-missing-q", "queries", _without_norm("q"))
    yield _missing("qk-norm-missing-k", "keys", _without_norm("k"), stages=("k",))
    if norm.weight is not None:
        yield from _of_weights(spec, norm)
    does_not_commute = norm.weight is not None or norm.kind == "layer"
    if spec.rope is not None and norm.over == "head" and does_not_commute:
        right, wrong = "before", "after"
        if norm.after_rope:
            right, wrong = "after", "before"
        yield of_norms(
            f"qk-norm-{wrong}-rope",
            f"queries and keys are normalized {wrong} RoPE instead of {right} it",
            of_spec(spec, qk_norm=replace(norm, after_rope=not norm.after_rope)),
            fix=f"normalize {right} RoPE: with a weight, the two do not commute",
        )
    yield _of_another_kind(spec, norm)
    if spec.num_heads > 1:
        yield _over_other_features(spec, norm)
    yield of_norms(
        "qk-norm-eps-outside",
        "eps is added to the root of the mean square instead of the mean square",
        {"standardised": for_names(("q", "k"), _with_eps_outside)},
        fix=f"divide by sqrt(mean(x²) + {norm.eps:g})",
    )


def _missing(name: str, whose: str, overrides: Overrides, **more: Any) -> Edit:
    return of_norms(
        name, f"{whose} are not normalized", overrides, fix=f"normalize the {whose}", **more
    )


def _without_norm(names: Collection[str]) -> Overrides:
    return {"norm": for_names(names, always(None))}


def _of_weights(spec: AttentionSpec, norm: Norm) -> Iterator[Edit]:
    """Bugs in the weights of the norm of queries and keys, if it has any."""
    yield _weight_missing("weight", norm.initial_weight)
    if norm.bias:
        yield _weight_missing("bias", 0.0)
    if norm.weight == "w":
        yield of_norms(
            "qk-norm-weight-plus-one",
            "the norm multiplies by 1 + w instead of w",
            of_spec(spec, qk_norm=replace(norm, weight="1+w")),
            fix="multiply by w, or subtract 1 from the weight on loading",
        )
    else:
        yield of_norms(
            "qk-norm-weight-without-one",
            "the norm multiplies by w instead of 1+w",
            of_spec(spec, qk_norm=replace(norm, weight="w")),
            fix="multiply by 1+w, or add 1 to the weight on loading",
        )
    if not spec.shared_kv and spec.norm_shapes("q_norm") == spec.norm_shapes("k_norm"):
        yield of_norms(
            "qk-norms-swapped",
            "q_norm and k_norm are exchanged",
            {"parameter": read_as({"q_norm": "k_norm", "k_norm": "q_norm"})},
            fix="exchange q_norm and k_norm",
        )
        yield of_norms(
            "k-norm-from-q",
            "keys are normalized with the weight of q_norm",
            {"parameter": read_as({"k_norm": "q_norm"})},
            fix="use k_norm for the keys",
            stages=("k",),
        )


def _weight_missing(leaf: str, initial: float) -> Edit:
    """Return the bug that a weight of the norm was not loaded."""
    names = (f"q_norm.{leaf}", f"k_norm.{leaf}")
    return of_norms(
        f"qk-norm-{leaf}-missing",
        f"the {leaf} of the norm of queries and keys has its initial value",
        weights(partial(np.full_like, fill_value=initial), names),
        fix=f"load {names[0]} and {names[1]}",
    )


def _of_another_kind(spec: AttentionSpec, norm: Norm) -> Edit:
    if norm.kind == "rms":
        return of_norms(
            "qk-norm-mean-subtracted",
            "the norm of queries and keys subtracts their mean",
            of_spec(spec, qk_norm=replace(norm, kind="layer")),
            fix="use the RMS norm",
        )
    return of_norms(
        "qk-norm-mean-kept",
        "the norm of queries and keys does not subtract their mean",
        of_spec(spec, qk_norm=replace(norm, kind="rms")),
        fix="use the layer norm",
    )


def _over_other_features(spec: AttentionSpec, norm: Norm) -> Edit:
    # Not the layer of a different specification: that one has norms of other widths.
    if norm.over == "width":
        return of_norms(
            "qk-norm-per-head",
            "queries and keys are normalized head by head",
            _head_by_head({"q": spec.num_heads, "k": spec.num_kv_heads}),
            fix="normalize over the whole width, before the heads are split",
        )
    return of_norms(
        "qk-norm-over-width",
        "queries and keys are normalized over all heads together",
        {"standardised": for_names(("q", "k"), _over_width)},
        fix="normalize each head separately",
    )


# ---- Norms ---------------------------------------------------------------------------------------


def _head_by_head(num_heads: Mapping[str, int]) -> Overrides:
    """Normalize each head alone: queries, keys or the context, by their number of heads."""

    def standardised(_: Layer, original: Override, name: str, x: np.ndarray, norm: Norm) -> Any:
        heads = x.reshape(*x.shape[:2], num_heads[name], -1)
        return original(name, heads, norm).reshape(x.shape)

    return {"standardised": for_names(num_heads, standardised)}


def _over_width(_: Layer, original: Override, name: str, x: np.ndarray, norm: Norm) -> np.ndarray:
    """Normalize heads, (B, N, T, H), together."""
    tokens_first = x.swapaxes(1, 2)
    width = tokens_first.reshape(*tokens_first.shape[:2], -1)
    return original(name, width, norm).reshape(tokens_first.shape).swapaxes(1, 2)


def _with_eps_outside(_: Layer, __: Override, name: str, x: np.ndarray, norm: Norm) -> np.ndarray:
    if norm.kind == "layer":
        x = x - x.mean(axis=-1, keepdims=True)
    root = np.sqrt((x * x).mean(axis=-1, keepdims=True))
    return x / (root + x.dtype.type(norm.eps))

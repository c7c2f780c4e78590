"""Bugs in norms of queries, keys, values and the context."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial
from typing import Any

import numpy as np

from mha_spec import Norm
from parity.explain.diagnosis.bugs.record import Edit, Override, known_bug
from parity.explain.diagnosis.bugs.sites import Overrides, norm_with, read_as, weights
from parity.measure.core.case import Case
from parity.measure.core.reference import Layer

of_norms = partial(known_bug, page="qk-norm", stages=("q", "k"))


def norms(case: Case) -> Iterator[Edit]:
    spec, norm = case.spec, case.spec.qk_norm
    if spec.v_norm is not None:
        yield _missing("v-norm-missing", "v", "values", stages=("v",))
    if spec.context_norm is not None:
        yield _missing("context-norm-missing", ("context",), "contexts", stages=("output",))
        if spec.num_heads > 1:
            yield of_norms(
                "context-norm-per-head",
                "the context is normalized head by head",
                {"standardised": _by_heads("context", spec.num_heads)},
                fix="normalize the context of all heads together",
                stages=("output",),
            )
    if norm is None:
        return
    yield _missing("qk-norm-missing", "qk", "queries and keys")
    yield _missing("qk-norm-missing-q", "q", "queries")
    yield _missing("qk-norm-missing-k", "k", "keys", stages=("k",))
    if norm.weight is not None:
        yield from _of_weights(norm)
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
    if (
        spec.rope is not None
        and norm.over == "head"
        and (norm.weight is not None or norm.kind == "layer")
    ):
        right, wrong = ("after", "before") if norm.after_rope else ("before", "after")
        yield of_norms(
            f"qk-norm-{wrong}-rope",
            f"queries and keys are normalized {wrong} RoPE instead of {right} it",
            norm_with(after_rope=not norm.after_rope),
            fix=f"normalize {right} RoPE: with a weight, the two do not commute",
        )
    is_rms = norm.kind == "rms"
    yield of_norms(
        "qk-norm-mean-subtracted" if is_rms else "qk-norm-mean-kept",
        f"the norm of queries and keys "
        f"{'subtracts their mean' if is_rms else 'does not subtract their mean'}",
        norm_with(kind="layer" if is_rms else "rms"),
        fix=f"use the {'RMS' if is_rms else 'layer'} norm",
    )
    if spec.num_heads > 1:
        is_width = norm.over == "width"
        yield of_norms(
            "qk-norm-per-head" if is_width else "qk-norm-over-width",
            f"queries and keys are normalized "
            f"{'head by head' if is_width else 'over all heads together'}",
            _over_heads(spec.num_heads, spec.num_kv_heads) if is_width else _over_width(),
            fix="normalize over the whole width, before the heads are split"
            if is_width
            else "normalize each head separately",
        )
    yield of_norms(
        "qk-norm-eps-outside",
        "eps is added to the root of the mean square instead of the mean square",
        _standardised(_with_eps_outside),
        fix=f"divide by sqrt(mean(x²) + {norm.eps:g})",
    )


def _missing(name: str, of: Collection[str], whose: str, **more: Any) -> Edit:
    without = {"norm": lambda _, original, which: None if which in of else original(which)}
    return of_norms(
        name, f"{whose} are not normalized", without, fix=f"normalize the {whose}", **more
    )


def _of_weights(norm: Norm) -> Iterator[Edit]:
    lost = {"weight": norm.initial_weight} | ({"bias": 0.0} if norm.bias else {})
    for leaf, value in lost.items():
        names = [f"{each}_norm.{leaf}" for each in "qk"]
        yield of_norms(
            f"qk-norm-{leaf}-missing",
            f"the {leaf} of the norm of queries and keys has its initial value",
            weights(lambda x, value=value: np.full_like(x, value), names),
            fix=f"load {names[0]} and {names[1]}",
        )
    is_w = norm.weight == "w"
    yield of_norms(
        "qk-norm-weight-plus-one" if is_w else "qk-norm-weight-without-one",
        f"the norm multiplies by {'1 + w' if is_w else 'w'} instead of {norm.weight}",
        norm_with(weight="1+w" if is_w else "w"),
        fix=(
            f"multiply by {norm.weight}, or {'subtract 1 from' if is_w else 'add 1 to'} the "
            f"weight on loading"
        ),
    )


# ---- Norms ---------------------------------------------------------------------------------------


def _standardised(wrong: Override) -> Overrides:
    """Divide queries and keys by something other than the root of their mean square."""

    def override(_: Layer, original: Override, name: str, x: np.ndarray, norm: Norm) -> np.ndarray:
        return wrong(original, name, x, norm) if name in ("q", "k") else original(name, x, norm)

    return {"standardised": override}


def _by_heads(whose: str, num_heads: int) -> Override:
    def override(_: Layer, original: Override, name: str, x: np.ndarray, norm: Norm) -> np.ndarray:
        if name != whose:
            return original(name, x, norm)
        return original(name, x.reshape(*x.shape[:2], num_heads, -1), norm).reshape(x.shape)

    return override


def _over_heads(num_heads: int, num_kv_heads: int) -> Overrides:
    counts = {"q": num_heads, "k": num_kv_heads}

    def wrong(original: Override, name: str, x: np.ndarray, norm: Norm) -> np.ndarray:
        return original(name, x.reshape(*x.shape[:2], counts[name], -1), norm).reshape(x.shape)

    return _standardised(wrong)


def _over_width() -> Overrides:
    def wrong(original: Override, name: str, x: np.ndarray, norm: Norm) -> np.ndarray:
        tokens_first = x.swapaxes(1, 2)
        width = tokens_first.reshape(*tokens_first.shape[:2], -1)
        return original(name, width, norm).reshape(tokens_first.shape).swapaxes(1, 2)

    return _standardised(wrong)


def _with_eps_outside(_: Override, __: str, x: np.ndarray, norm: Norm) -> np.ndarray:
    x = x - x.mean(axis=-1, keepdims=True) if norm.kind == "layer" else x
    return x / (np.sqrt((x * x).mean(axis=-1, keepdims=True)) + x.dtype.type(norm.eps))

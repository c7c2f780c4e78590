"""Mistakes in how queries, keys and values are normalised."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from mha_spec import Norm
from parity.core.case import Case
from parity.core.reference import Layer
from parity.diagnosis.mistakes.record import Mistake, Override

STAGES = ("q", "k")

SEEN_EPS = 1e-3  # a smaller one is lost in the rounding of float32


def norms(case: Case) -> Iterator[Mistake]:
    spec, norm = case.spec, case.spec.qk_norm
    if spec.v_norm is not None:
        yield _missing("v", "v")
    if norm is None:
        return
    for of in ("qk", "q", "k"):
        yield _missing("qk" if of == "qk" else of, of)
    shapes = [spec.norm_shapes(name) for name in ("q_norm", "k_norm")]
    if norm.weight is not None:
        yield from _parameters_lost(norm)
        yield _other_weight(norm)
        if shapes[0] == shapes[1]:
            yield _swapped()
            yield _taken_from_q()
    if spec.rope is not None and norm.over == "head" and (norm.weight is not None or norm.kind == "layer"):
        yield _on_the_other_side_of_rope(norm)
    yield _other_kind(norm)
    if spec.num_heads > 1:
        yield _over_the_other(norm, spec.num_heads, spec.num_kv_heads)
    if norm.eps >= SEEN_EPS:
        yield _eps_outside(norm)


def _with(**changed: Any) -> dict[str, Override]:
    """The reference with another norm of queries and keys."""

    def norm(_: Layer, original: Any, name: str) -> Norm | None:
        found = original(name)
        return found if found is None or name == "v" else replace(found, **changed)

    return {"norm": norm}


# ---- Missing ---------------------------------------------------------------------------------------------------------


def _missing(of: str, name: str) -> Mistake:
    def norm(_: Layer, original: Any, which: str) -> Norm | None:
        return None if which in of else original(which)

    whose = {"qk": "queries and keys", "q": "queries", "k": "keys", "v": "values"}[name]
    return Mistake(
        "v-norm-missing" if of == "v" else f"qk-norm-missing{'' if name == 'qk' else f'-{name}'}",
        f"{whose} are not normalised",
        f"normalise the {whose}",
        "qk-norm",
        tuple(of) if of in "kv" else STAGES,
        {"norm": norm},
    )


def _parameters_lost(norm: Norm) -> Iterator[Mistake]:
    lost = {"weight": norm.initial_weight} | ({"bias": 0.0} if norm.bias else {})
    return (_parameter_lost(leaf, value) for leaf, value in lost.items())


def _parameter_lost(leaf: str, value: float) -> Mistake:
    names = [f"{each}_norm.{leaf}" for each in "qk"]

    def parameter(_: Layer, original: Any, name: str) -> np.ndarray:
        return np.full_like(original(name), value) if name in names else original(name)

    return Mistake(
        f"qk-norm-{leaf}-missing",
        f"the {leaf} of the norm of queries and keys is that of a new layer",
        f"load {names[0]} and {names[1]}",
        "qk-norm",
        STAGES,
        {"parameter": parameter},
    )


# ---- Weights ---------------------------------------------------------------------------------------------------------


def _other_weight(norm: Norm) -> Mistake:
    is_w = norm.weight == "w"
    return Mistake(
        "qk-norm-weight-plus-one" if is_w else "qk-norm-weight-without-one",
        f"the norm multiplies by {'1 + w' if is_w else 'w'}, and not by {norm.weight}",
        f"multiply by {norm.weight}, or {'subtract 1 from' if is_w else 'add 1 to'} the weight when it is loaded",
        "qk-norm",
        STAGES,
        _with(weight="1+w" if is_w else "w"),
    )


def _swapped() -> Mistake:
    return _exchanged(
        "qk-norms-swapped",
        "q_norm and k_norm are exchanged",
        "exchange q_norm and k_norm",
        {"q_norm": "k_norm", "k_norm": "q_norm"},
        STAGES,
    )


def _taken_from_q() -> Mistake:
    return _exchanged(
        "k-norm-from-q",
        "keys are normalised with the weight of q_norm",
        "give keys a norm of their own, k_norm",
        {"k_norm": "q_norm"},
        ("k",),
    )


def _exchanged(name: str, about: str, fix: str, instead: dict[str, str], stages: tuple[str, ...]) -> Mistake:
    def parameter(_: Layer, original: Any, name: str) -> np.ndarray:
        part, leaf = name.split(".")
        return original(f"{instead.get(part, part)}.{leaf}")

    return Mistake(name, about, fix, "qk-norm", stages, {"parameter": parameter})


# ---- What is normalised, and when ------------------------------------------------------------------------------------


def _on_the_other_side_of_rope(norm: Norm) -> Mistake:
    right, wrong = ("after", "before") if norm.after_rope else ("before", "after")

    return Mistake(
        f"qk-norm-{wrong}-rope",
        f"queries and keys are normalised {wrong} RoPE, and not {right} it",
        f"normalise {right} the rotation: with a weight the two do not commute",
        "qk-norm",
        STAGES,
        _with(after_rope=not norm.after_rope),
    )


def _other_kind(norm: Norm) -> Mistake:
    is_rms = norm.kind == "rms"
    kind = "layer" if is_rms else "rms"
    return Mistake(
        "qk-norm-mean-subtracted" if is_rms else "qk-norm-mean-kept",
        f"the norm of queries and keys {'subtracts their mean' if is_rms else 'does not subtract their mean'}",
        f"take the {'RMS' if is_rms else 'layer'} norm",
        "qk-norm",
        STAGES,
        _with(kind=kind),
    )


def _over_the_other(norm: Norm, num_heads: int, num_kv_heads: int) -> Mistake:
    is_width = norm.over == "width"
    heads = {"q": num_heads, "k": num_kv_heads}

    def other_axis(x: Any, count: int) -> Any:
        """What is normalised as the mistake has it, its features on the last axis."""
        return x.reshape(*x.shape[:2], count, -1) if is_width else x.swapaxes(1, 2).reshape(x.shape[0], x.shape[2], -1)

    def back(y: Any, shape: Any) -> Any:
        return y.reshape(shape) if is_width else y.reshape(shape[0], shape[2], shape[1], -1).swapaxes(1, 2)

    def standardised(_: Layer, original: Any, name: str, x: np.ndarray, norm: Norm) -> np.ndarray:
        if name == "v":
            return original(name, x, norm)
        return back(original(name, other_axis(x, heads[name]), norm), x.shape)

    return Mistake(
        "qk-norm-per-head" if is_width else "qk-norm-over-width",
        f"queries and keys are normalised {'head by head' if is_width else 'over all heads together'}",
        f"normalise {'before the heads are split, over their whole width' if is_width else 'each head by itself'}",
        "qk-norm",
        STAGES,
        {"standardised": standardised},
    )


def _eps_outside(norm: Norm) -> Mistake:
    def standardised(_: Layer, original: Any, name: str, x: np.ndarray, norm: Norm) -> np.ndarray:
        if name == "v":
            return original(name, x, norm)
        x = x - x.mean(axis=-1, keepdims=True) if norm.kind == "layer" else x
        return x / (np.sqrt((x * x).mean(axis=-1, keepdims=True)) + x.dtype.type(norm.eps))

    return Mistake(
        "qk-norm-eps-outside",
        "eps is added to the root of the mean square, and not to the mean square",
        f"divide by sqrt(mean(x²) + {norm.eps:g})",
        "qk-norm",
        STAGES,
        {"standardised": standardised},
    )

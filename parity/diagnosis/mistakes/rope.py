"""Mistakes in the rotary position embedding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import numpy as np

from mha_spec import AttentionSpec, DynamicScaling, Rope, YarnScaling
from parity.core.case import Case
from parity.core.reference import Layer
from parity.diagnosis.mistakes.families import CACHE_POSITIONS, EXPONENTS, MISSING_ROPE, POSITIONS, REVERSED_ROPE, THETA
from parity.diagnosis.mistakes.record import Mistake, Override

THETAS = (1e2, 1e3, 1e4, 1e5, 5e5, 1e6, 1e7)  # bases that are in use
STAGES = ("q", "latents", "k")


def turned_otherwise(case: Case) -> Iterator[Mistake]:
    """Of queries and keys, of queries alone, of keys alone."""
    if case.spec.rope is None:
        return
    for of in ("qk", "q", "k"):
        whose = {"qk": "the", "q": "q's", "k": "k's"}[of]
        suffix = "" if of == "qk" else f"-{of}"
        if case.spec.rope.pairs == "half":
            yield _interleaved(case, of, whose, suffix)
            if case.spec.latent is None:
                yield from _weights_reordered(case, of, whose, suffix)
        yield _missing(of, suffix)
        if not case.spec.rope.depends_on_length:  # of negative positions there is no length
            yield _reversed(of, whose, suffix)
        yield _shifted(of, whose, f"one{suffix}", 1)
        yield _shifted(of, whose, f"minus-one{suffix}", -1)
        yield _twice(of, whose, suffix)
        if case.is_cached and not case.has_positions:
            yield from _cached_positions(of, whose, suffix)
            if any(len({*case.lengths_before(call)}) > 1 for call in range(len(case.chunks))):
                yield _of_longest(of, whose, suffix)
    rope = case.spec.rope
    if case.spec.num_heads > 1 and case.spec.latent is None and rope.sections is None and not rope.depends_on_length:
        yield _over_heads()
    if not rope.depends_on_length:
        yield _exchanged()
    if case.positions().max() > 256:
        yield _rounded_positions()
    if case.spec.latent is None and case.spec.value_head_dim == case.spec.head_dim:
        norm = case.spec.v_norm
        if norm is None or not norm.after_rope:
            yield _of_values()


def _turning(of: str, turned: Override) -> dict[str, Override]:
    """The reference that rotates some heads in another way: `turned(layer, x, positions)`."""

    def override(layer: Layer, original: Any, name: str, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        return turned(layer, x, positions) if name in of else original(name, x, positions)

    return {"turned": override}


# ---- Pairs -----------------------------------------------------------------------------------------------------------


def _rotated(rope: Rope | None, size: int) -> list[int]:
    """Which of so many features are rotated."""
    return list(range(size))[cast(Rope, rope).rotated_features(size)]


def _pairs_side_by_side(case: Case, size: int) -> np.ndarray:
    """So many features, those of each pair one after the other: 0, R/2, 1, R/2 + 1, …"""
    order, rotated = np.arange(size), _rotated(case.spec.rope, size)
    order[rotated] = np.array(rotated).reshape(2, -1).T.reshape(-1)
    return order


def _interleaved(case: Case, of: str, whose: str, suffix: str) -> Mistake:
    def turned(layer: Layer, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        order = _pairs_side_by_side(case, x.shape[-1])
        return layer.rotate(x[..., np.argsort(order)], positions)[..., order]

    return Mistake(
        f"rope-interleaved{suffix}",
        f"{whose} RoPE pairs are interleaved, (2 i, 2 i + 1), and not (i, i + H/2)",
        "rotate the pairs (i, i + H/2), or interleave the rows of the weights when they are loaded",
        "rope-pairs",
        STAGES,
        _turning(of, turned),
    )


def _weights_reordered(case: Case, of: str, whose: str, suffix: str) -> Iterator[Mistake]:
    size = case.spec.head_dim
    order = _pairs_side_by_side(case, size)

    def with_rows(rows: np.ndarray) -> dict[str, Override]:
        def parameter(_: Layer, original: Any, name: str) -> np.ndarray:
            found = original(name)
            if name[0] not in of or not name.startswith(("q_proj", "k_proj")):
                return found
            return found.reshape(-1, size, *found.shape[1:])[:, rows].reshape(found.shape)

        return {"parameter": parameter}

    yield Mistake(
        f"rope-weights-interleaved{suffix}",
        f"{whose} weights are in the order of interleaved RoPE pairs (Meta's, GGUF's)",
        "undo the interleaving of q_proj's and k_proj's rows, each with its own number of heads",
        "rope-pairs",
        STAGES,
        with_rows(order),
    )
    yield Mistake(
        f"rope-weights-deinterleaved{suffix}",
        f"{whose} weights were un-interleaved, though their RoPE pairs are (i, i + H/2) already",
        "leave the rows of q_proj and k_proj as they are",
        "rope-pairs",
        STAGES,
        with_rows(np.argsort(order)),
    )


# ---- Positions -------------------------------------------------------------------------------------------------------


def _missing(of: str, suffix: str) -> Mistake:
    return Mistake(
        f"rope-missing{suffix}",
        "RoPE is missing" if of == "qk" else f"RoPE is missing on {of}",
        MISSING_ROPE.fix,
        MISSING_ROPE.page,
        STAGES,
        _turning(of, lambda layer, x, positions: x),
    )


def _reversed(of: str, whose: str, suffix: str) -> Mistake:
    return Mistake(
        f"rope-reversed{suffix}",
        f"{whose} RoPE rotates the other way",
        REVERSED_ROPE.fix,
        REVERSED_ROPE.page,
        STAGES,
        _turning(of, lambda layer, x, positions: layer.rotate(x, -positions)),
    )


def _shifted(of: str, whose: str, by: str, step: int) -> Mistake:
    return Mistake(
        f"rope-off-by-{by}",
        f"{whose} RoPE positions are one too {'high' if step > 0 else 'low'}",
        POSITIONS.fix,
        POSITIONS.page,
        STAGES,
        _turning(of, lambda layer, x, positions: layer.rotate(x, positions + step)),
    )


def _twice(of: str, whose: str, suffix: str) -> Mistake:
    return Mistake(
        f"rope-twice{suffix}",
        f"{whose} RoPE is applied twice",
        "rotate queries and keys once: keys from a cache have been rotated",
        "rope-positions",
        STAGES,
        _turning(of, lambda layer, x, positions: layer.rotate(layer.rotate(x, positions), positions)),
    )


def _exchanged() -> Mistake:
    """A quarter turn, and back by the position: the scores are those of RoPE the other way."""

    return Mistake(
        "rope-sin-cos-exchanged",
        "RoPE's sines and cosines are exchanged",
        REVERSED_ROPE.fix,
        REVERSED_ROPE.page,
        STAGES,
        {"tables": lambda layer, original, positions: original(positions)[::-1]},
    )


def _over_heads() -> Mistake:
    def turned(layer: Layer, x: np.ndarray, _: np.ndarray) -> np.ndarray:
        return layer.rotate(x.swapaxes(1, 2), np.arange(x.shape[1])[None]).swapaxes(1, 2)

    return Mistake(
        "rope-over-heads",
        "RoPE turns heads by their number, and not tokens by their position",
        "let cosines and sines go along the tokens: (B, 1, T, H) beside (B, N, T, H)",
        "rope-positions",
        STAGES,
        _turning("qk", turned),
    )


def _of_values() -> Mistake:
    def turned(layer: Layer, original: Any, name: str, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        return layer.rotate(x, positions) if name == "v" else original(name, x, positions)

    return Mistake(
        "rope-on-values",
        "values are rotated, too",
        "rotate queries and keys only",
        "rope-positions",
        ("v",),
        {"turned": turned},
    )


def _rounded_positions() -> Mistake:
    """Whole numbers above 256 have more bits than a bfloat16 has."""

    def rounded(layer: Layer, original: Any, x: np.ndarray, positions: np.ndarray, *direction: int) -> np.ndarray:
        step = np.maximum(np.exp2(np.floor(np.log2(np.maximum(positions, 1))) - 7), 1)
        return original(x, (np.round(positions / step) * step).astype(positions.dtype), *direction)

    return Mistake(
        "rope-positions-bfloat16",
        "RoPE positions are numbers of bfloat16, in which those above 256 collapse",
        "keep positions as integers, and make the angles of them in float32",
        "rope-positions",
        STAGES,
        {"rotate": rounded},
    )


def _of_longest(of: str, whose: str, suffix: str) -> Mistake:
    def turned(layer: Layer, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        first = positions[:, :1]
        return layer.rotate(x, positions - first + first.max())

    return Mistake(
        f"cache-position-of-longest{suffix}",
        f"{whose} RoPE positions of all sequences go on from the longest one",
        "a new token's position is the number of tokens cached before it, in its own sequence",
        "cache-positions",
        STAGES,
        _turning(of, turned),
    )


def _cached_positions(of: str, whose: str, suffix: str) -> Iterator[Mistake]:
    yield Mistake(
        f"cache-position-off-by-one{suffix}",
        f"{whose} RoPE positions after the first call are one too high",
        CACHE_POSITIONS.fix,
        CACHE_POSITIONS.page,
        STAGES,
        _turning(of, lambda layer, x, positions: layer.rotate(x, positions + (positions[:, :1] > 0))),
    )
    yield Mistake(
        f"cache-position-restarted{suffix}",
        f"{whose} RoPE positions begin at 0 in every call",
        CACHE_POSITIONS.fix,
        CACHE_POSITIONS.page,
        STAGES,
        _turning(of, lambda layer, x, positions: layer.rotate(x, positions - positions[:, :1])),
    )


# ---- Theta -----------------------------------------------------------------------------------------------------------


def other_theta(case: Case) -> Iterator[Mistake]:
    """Another base, or other exponents, which are another base, too: both are said where that one is in use."""
    rope = case.spec.rope
    if rope is None:
        return
    said = {rope.theta}
    if not isinstance(rope.scaling, (YarnScaling, DynamicScaling)):  # which look at theta for more than its powers
        for word, exponents, power in (("halved", "i / R", 0.5), ("doubled", "4 i / R", 2.0)):
            yield _other_exponents(word, exponents, power, case.spec)
            said.add(rope.theta**power)
    yield from (_other_theta(theta, case.spec) for theta in THETAS if theta not in said)


def _other_theta(theta: float, spec: AttentionSpec) -> Mistake:
    right = cast(Rope, spec.rope).theta
    return Mistake(
        f"rope-theta-{theta:.0f}",
        THETA.about.format(found=f"{theta:g}", right=f"{right:g}"),
        THETA.fix_for(spec),
        THETA.page,
        STAGES,
        {"rope": lambda layer, original: replace(original(), theta=theta)},
    )


def _other_exponents(word: str, exponents: str, power: float, spec: AttentionSpec) -> Mistake:
    right = cast(Rope, spec.rope).theta
    theta = right**power
    return Mistake(
        f"rope-exponents-{word}",
        f"RoPE's frequencies are theta ** (-{exponents}) and not theta ** (-2 i / R), or theta is {theta:g} "
        f"and not {right:g}",
        EXPONENTS.fix_for(spec),
        EXPONENTS.page,
        STAGES,
        {"rope": lambda layer, original: replace(original(), theta=theta)},
    )

"""Bugs in the rotary position embedding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from mha_spec import DynamicScaling, Rope, YarnScaling
from parity.explain.diagnosis.bugs.families import (
    CACHE_POSITIONS,
    EXPONENTS,
    MISSING_ROPE,
    POSITIONS,
    REVERSED_ROPE,
    THETA,
)
from parity.explain.diagnosis.bugs.record import Bug, Override
from parity.explain.diagnosis.bugs.sites import after, positions, turned, weights
from parity.explain.fitting.thetas import THETAS_IN_USE
from parity.measure.core.case import Case
from parity.measure.core.reference import Layer
from parity.measure.core.reference.rope import axes, frequencies
from parity.measure.core.weights import dtype_named

of_rope = partial(Bug, page="rope-positions", stages=("q", "latents", "k"))
of_pairs = partial(of_rope, page="rope-pairs")


def turned_alone(case: Case) -> Iterator[Bug]:
    """Other rotations of queries alone, or of keys alone."""
    yield from _turned_in(case, "q", "q's", "-q")
    yield from _turned_in(case, "k", "k's", "-k")


def _turned_in(case: Case, of: str, whose: str, suffix: str) -> Iterator[Bug]:
    """Return other rotations of queries, keys or both."""
    rope = case.spec.rope
    if rope is None:
        return
    if rope.pairs == "half":
        yield from _other_pairs(case, rope, of, whose, suffix)
    yield from _turned(rope, of, whose, suffix)
    if case.is_cached and not case.has_positions:
        yield from _cached_positions(case, of, whose, suffix)


def turned_otherwise(case: Case) -> Iterator[Bug]:
    """Other rotations of queries and keys."""
    rope, spec = case.spec.rope, case.spec
    if rope is None:
        return
    yield from _turned_in(case, "qk", "the", "")
    if (
        spec.num_heads > 1
        and spec.latent is None
        and rope.sections is None
        and not rope.depends_on_length
    ):
        yield of_rope(
            "rope-over-heads",
            "RoPE rotates heads by their index instead of tokens by their position",
            turned("qk", _over_heads),
            fix="broadcast cosines and sines along the tokens: (B, 1, T, H) with (B, N, T, H)",
        )
    if not rope.depends_on_length:
        # A quarter turn, and back by the position: the scores equal those of the opposite rotation.
        yield of_rope(
            "rope-sin-cos-exchanged",
            "RoPE's sines and cosines are exchanged",
            {"tables": after(lambda tables: tables[::-1])},
            fix=REVERSED_ROPE.fix,
        )
    if case.positions().max() > 256:
        yield of_rope(
            "rope-positions-bfloat16",
            "RoPE positions are bfloat16 numbers, which are inexact above 256",
            {"rotate": _by_rounded_positions},
            fix="keep positions as integers, and compute the angles in float32",
        )
    longest = int(case.positions().max()) + 1
    exact = np.array(frequencies(rope, spec.head_dim, longest), np.float32)
    for dtype in ("bfloat16", "float16"):
        if np.array_equal(exact.astype(dtype_named(dtype)).astype(np.float32), exact):
            continue
        yield of_rope(
            f"rope-frequencies-{dtype}",
            f"RoPE's frequencies are rounded to {dtype} before they are multiplied by positions",
            {"angles": _with_rounded_frequencies(dtype)},
            fix="keep the frequencies (inv_freq) in float32, also if the model is cast to 16 bits",
            page=THETA.page,
        )
    if (
        spec.latent is None
        and spec.value_head_dim == spec.head_dim
        and not (spec.v_norm and spec.v_norm.after_rope)
    ):
        yield of_rope(
            "rope-on-values",
            "values are also rotated",
            positions("v", lambda places: places),
            fix="rotate queries and keys only",
            stages=("v",),
        )


# ---- Pairs ---------------------------------------------------------------------------------------


def _other_pairs(case: Case, rope: Rope, of: str, whose: str, suffix: str) -> Iterator[Bug]:
    def interleaved(layer: Layer, x: np.ndarray, places: np.ndarray) -> np.ndarray:
        order = rope.pair_order(x.shape[-1])
        return layer.rotate(x[..., np.argsort(order)], places)[..., order]

    yield of_pairs(
        f"rope-interleaved{suffix}",
        f"{whose} RoPE pairs are interleaved, (2 i, 2 i + 1), instead of (i, i + H/2)",
        turned(of, interleaved),
        fix="rotate the pairs (i, i + H/2), or interleave the rows of the weights on loading",
    )
    if case.spec.latent is not None:
        return
    size = case.spec.head_dim
    names = [f"{name}_proj.{leaf}" for name in of for leaf in ("weight", "bias")]
    order = rope.pair_order(size)
    for word, rows, about, fix in (
        (
            "interleaved",
            order,
            "weights are in the order of interleaved RoPE pairs (Meta's, GGUF's)",
            "undo the interleaving of q_proj's and k_proj's rows, each with its own number of "
            "heads",
        ),
        (
            "deinterleaved",
            np.argsort(order),
            "weights were de-interleaved, although their RoPE pairs are already (i, i + H/2)",
            "leave the rows of q_proj and k_proj as they are",
        ),
    ):

        def in_order(x: np.ndarray, rows: np.ndarray = rows) -> np.ndarray:
            return x.reshape(-1, size, *x.shape[1:])[:, rows].reshape(x.shape)

        yield of_pairs(
            f"rope-weights-{word}{suffix}", f"{whose} {about}", weights(in_order, names), fix=fix
        )


# ---- Positions -----------------------------------------------------------------------------------


def _turned(rope: Rope, of: str, whose: str, suffix: str) -> Iterator[Bug]:
    yield of_rope(
        f"rope-missing{suffix}",
        "RoPE is missing" if of == "qk" else f"RoPE is missing on {of}",
        turned(of, lambda layer, x, places: x),
        fix=MISSING_ROPE.fix,
    )
    if not rope.depends_on_length:  # negative positions have no length
        yield of_rope(
            f"rope-reversed{suffix}",
            f"{whose}RoPE rotates in the opposite direction",
            positions(of, np.negative),
            fix=REVERSED_ROPE.fix,
        )
    for by, word, step in (("one", "high", 1), ("minus-one", "low", -1)):
        yield of_rope(
            f"rope-off-by-{by}{suffix}",
            f"{whose} RoPE positions are one too {word}",
            positions(of, lambda places, step=step: places + step),
            fix=POSITIONS.fix,
        )
    yield of_rope(
        f"rope-twice{suffix}",
        f"{whose} RoPE is applied twice",
        turned(of, lambda layer, x, places: layer.rotate(layer.rotate(x, places), places)),
        fix="rotate queries and keys once: cached keys are already rotated",
    )


def _over_heads(layer: Layer, x: np.ndarray, _: np.ndarray) -> np.ndarray:
    return layer.rotate(x.swapaxes(1, 2), np.arange(x.shape[1])[None]).swapaxes(1, 2)


def _by_rounded_positions(
    _: Layer, original: Override, x: np.ndarray, places: np.ndarray, *way: int
) -> np.ndarray:
    """Integers above 256 have more bits than a bfloat16."""
    step = np.maximum(np.exp2(np.floor(np.log2(np.maximum(places, 1))) - 7), 1)
    return original(x, (np.round(places / step) * step).astype(places.dtype), *way)


def _with_rounded_frequencies(dtype: str) -> Override:
    """Return an override of `angles`, which are positions times frequencies."""

    def angles(layer: Layer, original: Override, positions: np.ndarray) -> np.ndarray:
        right = original(positions)
        # Frequencies may depend on the longest position, so they are those of the angles
        # themselves.
        of_axes = positions if positions.ndim == 3 else positions[None]
        which = (
            axes(layer.rope(), layer.problem.spec.head_dim)
            if positions.ndim == 3
            else [0] * right.shape[-1]
        )
        places = np.moveaxis(of_axes[which], 0, -1)[:, None].astype(np.float64)
        exact = np.divide(right, places, out=np.zeros(right.shape), where=places != 0.0)
        rounded = exact.astype(np.float32).astype(dtype_named(dtype)).astype(np.float64)
        return (rounded * places).astype(right.dtype)

    return angles


def _cached_positions(case: Case, of: str, whose: str, suffix: str) -> Iterator[Bug]:
    cached = partial(of_rope, fix=CACHE_POSITIONS.fix, page=CACHE_POSITIONS.page)
    yield cached(
        f"cache-position-off-by-one{suffix}",
        f"{whose} RoPE positions after the first call are one too high",
        positions(of, lambda places: places + (places[:, :1] > 0)),
    )
    yield cached(
        f"cache-position-restarted{suffix}",
        f"{whose} RoPE positions restart at 0 in every call",
        positions(of, lambda places: places - places[:, :1]),
    )
    if any(len({*case.lengths_before(call)}) > 1 for call in range(len(case.chunks))):
        yield cached(
            f"cache-position-of-longest{suffix}",
            f"{whose} RoPE positions of all sequences continue from the longest one",
            positions(of, lambda places: places - places[:, :1] + places[:, :1].max()),
            fix=f"{CACHE_POSITIONS.fix}, in its own sequence",
        )


# ---- Theta ---------------------------------------------------------------------------------------


def other_theta(case: Case) -> Iterator[Bug]:
    """Another base, or other exponents, which equal another base: both are reported if that base is
    in use.
    """
    spec, rope = case.spec, case.spec.rope
    if rope is None:
        return
    named = {rope.theta}
    if not isinstance(
        rope.scaling, (YarnScaling, DynamicScaling)
    ):  # which use theta for more than its powers
        for word, exponents, power in (("halved", "i / R", 0.5), ("doubled", "4 i / R", 2.0)):
            theta = rope.theta**power
            named.add(theta)
            yield of_rope(
                f"rope-exponents-{word}",
                f"RoPE's frequencies are theta ** (-{exponents}) instead of theta ** (-2 i / R), "
                f"or theta is {theta:g} "
                f"instead of {rope.theta:g}",
                _with_theta(theta),
                fix=EXPONENTS.fix_for(spec),
                page=EXPONENTS.page,
            )
    for theta in (theta for theta in THETAS_IN_USE if theta not in named):
        about = THETA.about.format(found=f"{theta:g}", right=f"{rope.theta:g}")
        fix = THETA.fix_for(spec)
        yield of_rope(
            f"rope-theta-{theta:.0f}", about, _with_theta(theta), fix=fix, page=THETA.page
        )


def _with_theta(theta: float) -> dict[str, Override]:
    return {"rope": after(lambda rope: replace(rope, theta=theta))}

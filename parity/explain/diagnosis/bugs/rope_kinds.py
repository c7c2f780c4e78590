"""Bugs in kinds of RoPE: scaled frequencies, parts of a head, positions on several axes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from mha_spec import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    Rope,
    YarnScaling,
)
from parity.explain.diagnosis.bugs.record import Edit, Override, instead
from parity.explain.diagnosis.bugs.rope import of_pairs, of_rope
from parity.explain.diagnosis.bugs.sites import Overrides, before
from parity.measure.core.case import Case
from parity.measure.core.reference import Layer
from parity.measure.core.reference.rope import frequencies

of_scaling = partial(of_rope, page="rope-scaling")
of_factor = partial(of_rope, page="rope-attention-factor")
of_part = partial(of_rope, page="rope-partial")
of_axes = partial(of_rope, page="rope-sections")


def _as(wrong: Rope) -> Overrides:
    """Rotate queries and keys by another `Rope`."""
    return {"rope": instead(lambda: wrong)}


# ---- Scaling -------------------------------------------------------------------------------------


def scaled(case: Case) -> Iterator[Edit]:
    """Frequencies that are scaled in another way, or not at all."""
    rope = case.spec.rope
    if rope is None or rope.scaling is None or isinstance(rope.scaling, ProportionalScaling):
        return
    scaling = rope.scaling
    is_beyond, is_within, is_divided = _lengths(case, rope)
    if is_beyond or not isinstance(scaling, DynamicScaling):
        yield of_scaling(
            "rope-scaling-missing",
            f"RoPE's frequencies are not scaled ({scaling.kind})",
            _as(replace(rope, scaling=None)),
            fix="read the RoPE scaling from the model's configuration and apply it",
        )
    if isinstance(scaling, (DynamicScaling, Llama3Scaling, YarnScaling)):
        yield of_scaling(
            "rope-scaling-linear",
            f"all RoPE frequencies are divided by the factor ({scaling.kind} divides some)",
            _as(replace(rope, scaling=LinearScaling(scaling.factor))),
            fix=(
                f"scale the frequencies as {type(scaling).__name__} specifies, not all by the "
                f"factor"
            ),
        )
    if isinstance(scaling, Llama3Scaling):
        yield from _inverted(case, rope, scaling)
    if isinstance(scaling, YarnScaling):
        name, about = (
            ("not-truncated", "are not rounded")
            if scaling.truncate
            else ("truncated", "are rounded")
        )
        yield of_scaling(
            f"rope-yarn-{name}",
            f"the ends of YaRN's ramp {about} to whole pairs",
            _as(replace(rope, scaling=replace(scaling, truncate=not scaling.truncate))),
            fix=f"set truncate to {scaling.truncate}",
        )
    if isinstance(scaling, LongRopeScaling):
        sets = {
            "short": (scaling.short_factors, is_beyond),
            "long": (scaling.long_factors, is_within),
        }
        for name, (factors, is_seen) in sets.items():
            if is_seen:
                yield of_scaling(
                    f"rope-longrope-{name}-only",
                    f"LongRoPE always uses the {name} factors",
                    _as(
                        replace(
                            rope,
                            scaling=replace(scaling, short_factors=factors, long_factors=factors),
                        )
                    ),
                    fix=(
                        "use the long factors if the last position + 1 exceeds the original "
                        "length, else the short ones"
                    ),
                )
    if is_divided:
        yield of_scaling(
            "rope-length-by-token",
            "RoPE's frequencies depend on each token's own position instead of the last one of "
            "the call",
            {"lengths": instead(lambda positions: positions + 1)},
            fix="choose the frequencies once for a call, by its last position",
        )
    if isinstance(scaling, (YarnScaling, LongRopeScaling)) and rope.attention_factor != 1.0:
        yield from _attention_factor(rope, scaling)


def _lengths(case: Case, rope: Rope) -> tuple[bool, bool, bool]:
    """Return if calls of a sequence end beyond the original length, within it, and beyond with
    tokens within it.
    """
    if not isinstance(rope.scaling, (DynamicScaling, LongRopeScaling)):
        return False, False, False
    calls = range(len(case.chunks)) if case.is_cached else [None]
    rows = [
        row
        for call in calls
        for row in case.positions(call).reshape(-1, case.positions(call).shape[-1])
    ]
    original = rope.scaling.original_length
    beyond = [row for row in rows if row.max() + 1 > original]
    return bool(beyond), len(beyond) < len(rows), any(row.min() + 1 <= original for row in beyond)


def _inverted(case: Case, rope: Rope, scaling: Llama3Scaling) -> Iterator[Edit]:
    """The ramp has the opposite direction, if it contains any frequency."""
    head_dim, single = case.spec.head_dim, np.float32
    right = np.array(frequencies(rope, head_dim, 0))
    plain = np.array(frequencies(replace(rope, scaling=None), head_dim, 0), single)
    low, high = single(scaling.low_freq_factor), single(scaling.high_freq_factor)
    slowed = (single(scaling.original_length) * plain / single(2 * math.pi) - low) / (high - low)
    is_between = (slowed > 0) & (slowed < 1)
    mixed = slowed * (plain / single(scaling.factor)) + (1 - slowed) * plain
    ratio = np.where(is_between, mixed / right, 1.0)
    if np.allclose(ratio, 1.0, rtol=1e-6):
        return

    def angles(layer: Layer, original: Override, positions: np.ndarray) -> np.ndarray:
        return (original(positions) * ratio).astype(layer.arithmetic.wide)

    yield of_scaling(
        "rope-llama3-inverted",
        "llama3's ramp runs the wrong way: its faster frequencies are divided by the factor, its "
        "slower ones are kept",
        {"angles": angles},
        fix="for smooth = (original_length / wavelength - low) / (high - low), the frequency f "
        "becomes "
        "(1 - smooth) * f / factor + smooth * f",
    )


def _attention_factor(rope: Rope, scaling: YarnScaling | LongRopeScaling) -> Iterator[Edit]:
    right = rope.attention_factor
    fix = (
        f"multiply cosines and sines by {right:.6g}, once, and leave the scale of the scores "
        f"unchanged"
    )
    plain = (
        replace(scaling, mscale=None, mscale_all_dim=None)
        if isinstance(scaling, YarnScaling)
        else scaling
    )
    for name, about, wrong in (
        ("missing", "cosines and sines are not multiplied by the attention factor", 1.0),
        ("squared", "cosines and sines are multiplied by the attention factor twice", right**2),
    ):
        other = replace(rope, scaling=replace(plain, attention_factor=wrong))
        yield of_factor(f"rope-attention-factor-{name}", about, _as(other), fix=fix)
    if isinstance(plain, YarnScaling) and plain != scaling and plain.amplitude() != right:
        yield of_factor(
            "rope-yarn-mscale-ignored",
            "YaRN's attention factor is 0.1 ln(factor) + 1 instead of the ratio of mscale and "
            "mscale_all_dim",
            _as(replace(rope, scaling=plain)),
            fix="divide 0.1 mscale ln(factor) + 1 by the same of mscale_all_dim",
        )


# ---- Parts of a head -----------------------------------------------------------------------------


def partly(case: Case) -> Iterator[Edit]:
    """Other features of a head are rotated, or by other frequencies."""
    rope, size = case.spec.rope, case.spec.head_dim
    if rope is None or rope.sections is not None:
        return
    if isinstance(rope.scaling, ProportionalScaling):
        yield from _proportional(rope, rope.scaling, size)
    count = size if rope.rotary_dim is None else rope.rotary_dim
    if count == size:
        return
    if size % 2 == 0 and not isinstance(rope.scaling, LongRopeScaling):
        yield _whole_head(replace(rope, rotary_dim=None), count, size)
    other = "first" if rope.rotated == "last" else "last"
    yield of_part(
        f"rope-rotates-{other}",
        f"the {other} {count} features of a head are rotated instead of the {rope.rotated} ones",
        _as(replace(rope, rotated=other)),
        fix=f"rotate the {rope.rotated} {count} features",
    )
    if not isinstance(
        rope.scaling, DynamicScaling
    ):  # which derives a base from the divisor of the exponents
        yield of_part(
            "rope-frequencies-over-head-dim",
            f"the exponents of RoPE's frequencies are divided by head_dim, {size}, instead of "
            f"rotary_dim, {count}",
            _as(replace(rope, theta=rope.theta ** (count / size))),
            fix="use the frequencies theta ** (-2 i / rotary_dim)",
        )
    if rope.scaling is None and int(count / size * size // 2) == count // 2 and size % 2 == 0:
        yield of_part(
            "rope-partial-as-proportional",
            "partial RoPE is read as proportional: pairs and exponents span the whole head",
            _as(
                replace(
                    rope,
                    rotary_dim=None,
                    rotated="first",
                    scaling=ProportionalScaling(count / size),
                )
            ),
            fix="pair features within the rotary_dim, and divide the exponents by it",
        )


def _whole_head(wrong: Rope, count: int, size: int) -> Edit:
    return of_part(
        "rope-whole-head",
        f"all {size} features of a head are rotated instead of {count}",
        _as(wrong),
        fix=f"rotate {count} features and leave the others unchanged",
    )


def _proportional(rope: Rope, scaling: ProportionalScaling, size: int) -> Iterator[Edit]:
    count = 2 * int(scaling.fraction * size // 2)
    if count == size or not count:
        return
    plain = None if scaling.factor == 1.0 else LinearScaling(scaling.factor)
    yield _whole_head(replace(rope, scaling=plain), count, size)
    yield of_part(
        "rope-proportional-as-partial",
        "proportional RoPE is read as partial: pairs and exponents span a smaller head",
        _as(replace(rope, scaling=plain, rotary_dim=count)),
        fix=(
            "pair features across the whole head, divide the exponents by head_dim, and set the "
            "other frequencies to 0"
        ),
    )


# ---- Several axes, neighbors ---------------------------------------------------------------------


def on_several_axes(case: Case) -> Iterator[Edit]:
    """Positions of another axis rotate a pair."""
    rope = case.spec.rope
    if rope is None or rope.sections is None:
        return
    other = "contiguous" if rope.section_order == "interleaved" else "interleaved"
    yield of_axes(
        f"rope-sections-{other}",
        f"the sections of M-RoPE are {other} instead of {rope.section_order}",
        _as(replace(rope, section_order=other)),
        fix=f"set section_order to {rope.section_order!r}",
    )

    for series in ("shared", "own", "strided"):
        if series == rope.section_frequencies or rope.scaling is not None:
            continue
        if series == "strided" and len(set(rope.sections)) > 1:
            continue
        yield of_axes(
            f"rope-sections-{series}",
            f"the frequencies of the axes are {series} instead of {rope.section_frequencies}",
            _as(replace(rope, section_frequencies=series)),
            fix=f"set section_frequencies to {rope.section_frequencies!r}",
        )

    def as_text(positions: np.ndarray) -> np.ndarray:
        """Return the place of each token in the pictures of `Case.positions`, on every axis."""
        if len(positions) == 2:
            row, column = positions - case.first_position
            return positions * 0 + case.first_position + 3 * row + column
        frame, row, column = positions
        place = frame + 5 * (frame - case.first_position) + 3 * (row - frame) + (column - frame)
        return positions * 0 + place[None]

    for name, about, read in (
        (
            "time-only",
            "all pairs are rotated by the first position",
            lambda positions: positions[[0] * len(positions)],
        ),
        (
            "axes-swapped",
            "rows and columns are exchanged",
            lambda positions: np.stack([*positions[:-2], *positions[:-3:-1]]),
        ),
        ("ignored", "all pairs are rotated by the place in the sequence, as in text", as_text),
    ):
        yield of_axes(
            f"rope-sections-{name}",
            f"{about} (M-RoPE)",
            {"turned": before(lambda of, x, positions, read=read: (of, x, read(positions)))},
            fix="pass positions as (time, row, column), and rotate each section by its own axis",
        )


def neighbours(case: Case) -> Iterator[Edit]:
    """Pairs of neighbors are read as halves; the opposite is `rope-interleaved`."""
    rope = case.spec.rope
    if rope is not None and rope.pairs != "half":
        yield of_pairs(
            "rope-half-split",
            "the RoPE pairs are (i, i + R/2) instead of (2 i, 2 i + 1)",
            _as(replace(rope, pairs="half")),
            fix=(
                "rotate the pairs (2 i, 2 i + 1), or de-interleave the rows of the weights on "
                "loading"
            ),
        )

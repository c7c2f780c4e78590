"""Bugs in kinds of RoPE: scaled frequencies, parts of a head, positions on several axes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from mha_spec import (
    AttentionSpec,
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    Rope,
    YarnScaling,
)
from mha_spec.features.scaling import Scaling
from parity.explain.diagnosis.bugs.record import Edit, Override, instead
from parity.explain.diagnosis.bugs.rope import of_pairs, of_rope
from parity.explain.diagnosis.bugs.sites import Change, always, before
from parity.explain.diagnosis.bugs.specs import with_rope
from parity.measure.core.case import Case
from parity.measure.core.reference import Layer
from parity.measure.core.reference.rope import frequencies

of_scaling = partial(of_rope, page="rope-scaling")
of_factor = partial(of_rope, page="rope-attention-factor")
of_part = partial(of_rope, page="rope-partial")
of_axes = partial(of_rope, page="rope-sections")


# ---- Scaling -------------------------------------------------------------------------------------


def scaled(case: Case) -> Iterator[Edit]:
    """Frequencies that are scaled differently, or not at all."""
    spec, rope = case.spec, case.spec.rope
    if rope is None or rope.scaling is None or isinstance(rope.scaling, ProportionalScaling):
        return
    scaling = rope.scaling
    is_beyond, is_within, is_divided = _lengths(case, rope)
    if is_beyond or not isinstance(scaling, DynamicScaling):
        yield of_scaling(
            "rope-scaling-missing",
            f"RoPE's frequencies are not scaled ({scaling.kind})",
            with_rope(spec, replace(rope, scaling=None)),
            fix="read the RoPE scaling from the model's configuration and apply it",
        )
        if rope.attention_factor != 1.0:
            yield _unscaled_but_multiplied(spec, rope, scaling)
    if isinstance(scaling, (DynamicScaling, Llama3Scaling, YarnScaling)):
        yield of_scaling(
            "rope-scaling-linear",
            f"all RoPE frequencies are divided by the factor ({scaling.kind} divides some)",
            with_rope(spec, replace(rope, scaling=LinearScaling(scaling.factor))),
            fix=(
                f"scale the frequencies as {type(scaling).__name__} specifies, not all by the "
                f"factor"
            ),
        )
    if isinstance(scaling, Llama3Scaling):
        yield from _of_ramp(case, rope, scaling)
    if isinstance(scaling, YarnScaling):
        yield _with_other_ends(spec, rope, scaling)
    if isinstance(scaling, LongRopeScaling):
        if is_beyond:
            yield _with_one_list(spec, rope, scaling, "short", scaling.short_factors)
        if is_within:
            yield _with_one_list(spec, rope, scaling, "long", scaling.long_factors)
    if is_divided:
        yield of_scaling(
            "rope-length-by-token",
            "RoPE's frequencies depend on each token's own position instead of the last one of "
            "the call",
            {"lengths": instead(partial(np.add, 1))},
            fix="choose the frequencies once for a call, by its last position",
        )
    if isinstance(scaling, (YarnScaling, LongRopeScaling)):
        yield from _attention_factor(spec, rope, scaling)


def _unscaled_but_multiplied(spec: AttentionSpec, rope: Rope, scaling: Scaling) -> Edit:
    """The frequencies are not scaled, but cosines and sines have the factor of the scaling."""
    return of_scaling(
        "rope-scaling-missing",
        f"RoPE's frequencies are not scaled ({scaling.kind}), although cosines and sines are "
        f"multiplied by its attention factor",
        {
            **with_rope(spec, replace(rope, scaling=None)),
            "attention_factor": always(rope.attention_factor),
        },
        fix="apply the RoPE scaling to the frequencies, not only its attention factor",
    )


def _with_other_ends(spec: AttentionSpec, rope: Rope, scaling: YarnScaling) -> Edit:
    if scaling.truncate:
        name, are_rounded = "not-truncated", "are not rounded"
    else:
        name, are_rounded = "truncated", "are rounded"
    wrong = replace(scaling, truncate=not scaling.truncate)
    return of_scaling(
        f"rope-yarn-{name}",
        f"the ends of YaRN's ramp {are_rounded} to whole pairs",
        with_rope(spec, replace(rope, scaling=wrong)),
        fix=f"set truncate to {scaling.truncate}",
    )


def _with_one_list(
    spec: AttentionSpec,
    rope: Rope,
    scaling: LongRopeScaling,
    name: str,
    factors: tuple[float, ...],
) -> Edit:
    wrong = replace(scaling, short_factors=factors, long_factors=factors)
    return of_scaling(
        f"rope-longrope-{name}-only",
        f"LongRoPE always uses the {name} factors",
        with_rope(spec, replace(rope, scaling=wrong)),
        fix=(
            "use the long factors if the last position + 1 exceeds the original length, else the "
            "short ones"
        ),
    )


def _lengths(case: Case, rope: Rope) -> tuple[bool, bool, bool]:
    """Return if calls of a sequence end beyond the original length, within it, and beyond with
    tokens within it.
    """
    if not isinstance(rope.scaling, (DynamicScaling, LongRopeScaling)):
        return False, False, False
    calls: Sequence[int | None] = [None]
    if case.is_cached:
        calls = range(len(case.chunks))
    original = rope.scaling.original_length
    is_beyond = is_within = is_divided = False
    for call in calls:
        positions = case.positions(call)
        for row in positions.reshape(-1, positions.shape[-1]):
            if row.max() + 1 <= original:
                is_within = True
                continue
            is_beyond = True
            if row.min() + 1 <= original:
                is_divided = True
    return is_beyond, is_within, is_divided


def _of_ramp(case: Case, rope: Rope, scaling: Llama3Scaling) -> Iterator[Edit]:
    """The ramp has the opposite direction, or is missing, if it contains any frequency."""
    head_dim, single = case.spec.head_dim, np.float32
    right = np.array(frequencies(rope, head_dim, 0))
    plain = np.array(frequencies(replace(rope, scaling=None), head_dim, 0), single)
    low, high = single(scaling.low_freq_factor), single(scaling.high_freq_factor)
    turns = single(scaling.original_length) * plain / single(2 * math.pi)
    slowed = (turns - low) / (high - low)
    is_between = (slowed > 0) & (slowed < 1)
    mixed = slowed * (plain / single(scaling.factor)) + (1 - slowed) * plain
    ratio = np.where(is_between, mixed / right, 1.0)
    if np.allclose(ratio, 1.0, rtol=1e-6):
        return
    yield of_scaling(
        "rope-llama3-inverted",
        "llama3's ramp runs the wrong way: its faster frequencies are divided by the factor, its "
        "slower ones are kept",
        {"angles": partial(_multiplied_angles, ratio)},
        fix=(
            "for smooth = (original_length / wavelength - low) / (high - low), the frequency f "
            "becomes (1 - smooth) * f / factor + smooth * f"
        ),
    )
    # If low_freq_factor and high_freq_factor are exchanged, nothing is between them. The first
    # condition that a program tests decides then.
    slowest, fastest = turns[is_between].min(), turns[is_between].max()
    for about, frequency, number in (
        ("not scaled", plain, f"high_freq_factor is at most {slowest:.4g}"),
        (
            "divided by the factor",
            plain / single(scaling.factor),
            f"low_freq_factor is at least {fastest:.4g}",
        ),
    ):
        yield of_scaling(
            "rope-llama3-no-ramp",
            f"the frequencies of llama3's ramp are {about}: the ramp is missing, low_freq_factor "
            f"and high_freq_factor are exchanged, or {number}",
            {"angles": partial(_multiplied_angles, np.where(is_between, frequency / right, 1.0))},
            fix=(
                f"set low_freq_factor to {scaling.low_freq_factor:g} and high_freq_factor to "
                f"{scaling.high_freq_factor:g}, and mix the frequencies between them"
            ),
        )


def _multiplied_angles(
    factors: np.ndarray, layer: Layer, original: Override, positions: np.ndarray
) -> np.ndarray:
    return (original(positions) * factors).astype(layer.arithmetic.wide)


def _attention_factor(
    spec: AttentionSpec, rope: Rope, scaling: YarnScaling | LongRopeScaling
) -> Iterator[Edit]:
    right = rope.attention_factor
    plain = scaling
    if isinstance(scaling, YarnScaling):
        plain = replace(scaling, mscale=None, mscale_all_dim=None)
    if right != 1.0:
        fix = (
            f"multiply cosines and sines by {right:.6g}, once, and leave the scale of the scores "
            f"unchanged"
        )
        for name, about, wrong in (
            ("missing", "cosines and sines are not multiplied by the attention factor", 1.0),
            ("squared", "cosines and sines are multiplied by the attention factor twice", right**2),
        ):
            other = replace(rope, scaling=replace(plain, attention_factor=wrong))
            yield of_factor(f"rope-attention-factor-{name}", about, with_rope(spec, other), fix=fix)
    if isinstance(scaling, YarnScaling) and scaling.mscale is not None:
        yield from _mscale_ignored(spec, rope, scaling)


def _mscale_ignored(spec: AttentionSpec, rope: Rope, scaling: YarnScaling) -> Iterator[Edit]:
    """Attention factors without mscale, mscale_all_dim or both, also if these are equal."""
    right = scaling.amplitude()
    usual = replace(scaling, mscale=None, mscale_all_dim=None)
    # Without a factor, an amplitude is not divided by the amplitude of mscale_all_dim.
    numerator = right * math.sqrt(scaling.score_factor)
    fix = (
        f"divide 0.1 mscale ln(factor) + 1 by the same of mscale_all_dim: cosines and sines are "
        f"multiplied by {right:.6g}"
    )
    amplitudes = [right]
    for about, wrong in (
        (
            "YaRN's attention factor is 0.1 ln(factor) + 1 instead of the ratio of mscale and "
            "mscale_all_dim",
            usual.amplitude(),
        ),
        (
            "YaRN's attention factor is 0.1 mscale ln(factor) + 1, not divided by the same of "
            "mscale_all_dim",
            numerator,
        ),
    ):
        if np.isclose(wrong, amplitudes).any():
            continue
        amplitudes.append(wrong)
        other = replace(rope, scaling=replace(usual, attention_factor=wrong))
        yield of_factor("rope-yarn-mscale-ignored", about, with_rope(spec, other), fix=fix)


# ---- Parts of a head -----------------------------------------------------------------------------


def partly(case: Case) -> Iterator[Edit]:
    """Other features of a head are rotated, or by other frequencies."""
    spec, rope, size = case.spec, case.spec.rope, case.spec.head_dim
    if rope is None or rope.sections is not None:
        return
    if isinstance(rope.scaling, ProportionalScaling):
        yield from _proportional(spec, rope, rope.scaling)
    count = rope.rotary_dim
    if count is None or count == size:
        return
    if size % 2 == 0 and not isinstance(rope.scaling, LongRopeScaling):
        yield _whole_head(spec, replace(rope, rotary_dim=None), count)
    other = "last"
    if rope.rotated == "last":
        other = "first"
    yield of_part(
        f"rope-rotates-{other}",
        f"the {other} {count} features of a head are rotated instead of the {rope.rotated} ones",
        with_rope(spec, replace(rope, rotated=other)),
        fix=f"rotate the {rope.rotated} {count} features",
    )
    # Dynamic scaling derives a base from the divisor of the exponents.
    if not isinstance(rope.scaling, DynamicScaling):
        yield of_part(
            "rope-frequencies-over-head-dim",
            f"the exponents of RoPE's frequencies are divided by head_dim, {size}, instead of "
            f"rotary_dim, {count}",
            with_rope(spec, replace(rope, theta=rope.theta ** (count / size))),
            fix="use the frequencies theta ** (-2 i / rotary_dim)",
        )
    fraction = count / size
    # Proportional RoPE rounds the number of pairs down, which must be the same number.
    has_as_many_pairs = int(fraction * size // 2) == count // 2
    if rope.scaling is None and has_as_many_pairs and size % 2 == 0:
        proportional = replace(
            rope, rotary_dim=None, rotated="first", scaling=ProportionalScaling(fraction)
        )
        yield of_part(
            "rope-partial-as-proportional",
            "partial RoPE is read as proportional: pairs and exponents span the whole head",
            with_rope(spec, proportional),
            fix="pair features within the rotary_dim, and divide the exponents by it",
        )
        # The exponents of the whole head, of a different base, equal the exponents of the
        # rotary_dim.
        across = replace(proportional, theta=rope.theta ** (size / count))
        yield of_part(
            "rope-partial-across-head",
            f"the pairs of partial RoPE are (i, i + {size // 2}) across the head instead of within "
            f"the {count} rotated features, with the right frequencies",
            with_rope(spec, across),
            fix="pair features within the rotary_dim: (i, i + rotary_dim / 2)",
        )


def _whole_head(spec: AttentionSpec, wrong: Rope, count: int) -> Edit:
    return of_part(
        "rope-whole-head",
        f"all {spec.head_dim} features of a head are rotated instead of {count}",
        with_rope(spec, wrong),
        fix=f"rotate {count} features and leave the others unchanged",
    )


def _proportional(spec: AttentionSpec, rope: Rope, scaling: ProportionalScaling) -> Iterator[Edit]:
    size = spec.head_dim
    count = 2 * int(scaling.fraction * size // 2)
    if count == size or not count:
        return
    plain = None
    if scaling.factor != 1.0:
        plain = LinearScaling(scaling.factor)
    yield _whole_head(spec, replace(rope, scaling=plain), count)
    yield of_part(
        "rope-proportional-as-partial",
        "proportional RoPE is read as partial: pairs and exponents span a smaller head",
        with_rope(spec, replace(rope, scaling=plain, rotary_dim=count)),
        fix=(
            "pair features across the whole head, divide the exponents by head_dim, and set the "
            "other frequencies to 0"
        ),
    )
    # The exponents of the smaller head, of a different base, equal the exponents of the whole head.
    in_block = replace(rope, scaling=plain, rotary_dim=count, theta=rope.theta ** (count / size))
    yield of_part(
        "rope-proportional-in-block",
        f"the pairs of proportional RoPE are (i, i + {count // 2}) within the first {count} "
        f"features instead of (i, i + {size // 2}), with the right frequencies",
        with_rope(spec, in_block),
        fix="pair features across the whole head: (i, i + head_dim / 2)",
    )


# ---- Several axes, neighbors ---------------------------------------------------------------------


def on_several_axes(case: Case) -> Iterator[Edit]:
    """Positions of the wrong axis rotate a pair."""
    spec, rope = case.spec, case.spec.rope
    if rope is None or rope.sections is None:
        return
    other = "interleaved"
    if rope.section_order == "interleaved":
        other = "contiguous"
    yield of_axes(
        f"rope-sections-{other}",
        f"the sections of M-RoPE are {other} instead of {rope.section_order}",
        with_rope(spec, replace(rope, section_order=other)),
        fix=f"set section_order to {rope.section_order!r}",
    )
    if rope.scaling is None:
        yield from _with_other_frequencies(spec, rope, rope.sections)
    yield _by_other_axes(
        "time-only", "all pairs are rotated by the first position", _first_axis_alone
    )
    yield _by_other_axes(
        "axes-swapped", "rows and columns are exchanged", _rows_and_columns_exchanged
    )
    yield _by_other_axes(
        "ignored",
        "all pairs are rotated by the position in the sequence, as in text",
        partial(_positions_in_text, case.first_position),
    )


def _with_other_frequencies(
    spec: AttentionSpec, rope: Rope, sections: tuple[int, ...]
) -> Iterator[Edit]:
    """The axes of positions have other series of frequencies."""
    for series in ("shared", "own", "strided"):
        if series == rope.section_frequencies:
            continue
        # Strided frequencies go around the axes, so that all have equally many.
        if series == "strided" and len(set(sections)) > 1:
            continue
        yield of_axes(
            f"rope-sections-{series}",
            f"the frequencies of the axes are {series} instead of {rope.section_frequencies}",
            with_rope(spec, replace(rope, section_frequencies=series)),
            fix=f"set section_frequencies to {rope.section_frequencies!r}",
        )


def _by_other_axes(name: str, about: str, read: Change) -> Edit:
    return of_axes(
        f"rope-sections-{name}",
        f"{about} (M-RoPE)",
        {"turned": before(partial(_with_positions, read))},
        fix="pass positions as (time, row, column), and rotate each section by its own axis",
    )


def _with_positions(
    read: Change, name: str, x: np.ndarray, positions: np.ndarray
) -> tuple[str, np.ndarray, np.ndarray]:
    return name, x, read(positions)


def _first_axis_alone(positions: np.ndarray) -> np.ndarray:
    return positions[[0] * len(positions)]


def _rows_and_columns_exchanged(positions: np.ndarray) -> np.ndarray:
    *frames, rows, columns = positions
    return np.stack([*frames, columns, rows])


def _positions_in_text(first_position: int, positions: np.ndarray) -> np.ndarray:
    """Return the position of each token in the pictures of `Case.positions`, on every axis."""
    if len(positions) == 2:
        row, column = positions - first_position
        position = first_position + 3 * row + column
    else:
        frame, row, column = positions
        position = frame + 5 * (frame - first_position) + 3 * (row - frame) + (column - frame)
    return np.stack([position] * len(positions))


def neighbours(case: Case) -> Iterator[Edit]:
    """Pairs of neighbors are read as halves; the opposite is `rope-interleaved`."""
    rope = case.spec.rope
    if rope is not None and rope.pairs != "half":
        yield of_pairs(
            "rope-half-split",
            "the RoPE pairs are (i, i + R/2) instead of (2 i, 2 i + 1)",
            with_rope(case.spec, replace(rope, pairs="half")),
            fix=(
                "rotate the pairs (2 i, 2 i + 1), or de-interleave the rows of the weights on "
                "loading"
            ),
        )

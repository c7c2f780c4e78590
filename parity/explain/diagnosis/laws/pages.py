"""The family of a pattern: a pattern with several possible families has the pages of all, or
none.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from mha_spec import AttentionSpec
from parity.explain.diagnosis.bugs import families as of
from parity.explain.diagnosis.bugs.families import BugFamily
from parity.explain.diagnosis.bugs.record import Edit
from parity.explain.diagnosis.laws.record import Seen
from parity.explain.diagnosis.laws.rotation import as_exponent
from parity.explain.diagnosis.laws.words import LOOSEST, RATES, is_round
from parity.explain.diagnosis.sample import sample_of
from parity.measure.core.reference import Arithmetic, Layer
from parity.measure.core.stages import stage_named

NEAR = 0.02
"""The tolerance for the numbers of an order of heads, and for a theta that is only rounded."""

CONVINCING = 1000.0
"""The error, in multiples of the tolerance, that one fitted number does not remove by chance."""

ONE_FAMILY = {
    "rope unscaled": of.SCALING,
    "attention factor": of.AMPLITUDE,
    "rotary_dim": of.ROTARY_DIM,
    "rope missing": of.MISSING_ROPE,
    "rope reversed": of.REVERSED_ROPE,
    "temperature": of.TEMPERATURE,
    "temperature length": of.TEMPERATURE,
    "max_distance": of.RELATIVE_BIAS,
    "max_bias": of.ALIBI,
    "mean of v": of.EMPTY_ROWS,
    "dropout": of.DROPOUT,
    "rounded": of.PRECISION,
    "tokens and features": of.QK_NORM,
    "lost rows": of.LOST,
}
"""Patterns that belong to one family, in any stage."""

Families = tuple[BugFamily, ...]


def with_families(law: Edit, spec: AttentionSpec, *families: BugFamily) -> Edit:
    """Return a pattern with the pages and fixes of its families."""
    fixes = dict.fromkeys(family.fix_for(spec) for family in families if family.fix)
    return replace(
        law, pages=tuple(dict.fromkeys(family.page for family in families)), fixes=tuple(fixes)
    )


def with_pages(law: Edit, seen: Seen) -> Edit:
    """Return a pattern with its pages, if its stage and its numbers determine them."""
    if law.pages or seen.problem is None:
        return law
    one, spec = ONE_FAMILY.get(law.name), seen.problem.spec
    families = (one,) if one is not None else _BY_NAME.get(law.name, _of_scaling)(law, seen, spec)
    return with_families(law, spec, *families)


def _of_scaling(law: Edit, seen: Seen, spec: AttentionSpec) -> Families:
    is_of_scaling = (
        law.name.startswith("rope ") and spec.rope is not None and spec.rope.scaling is not None
    )
    return (of.SCALING,) if is_of_scaling and _has_positions(seen) else ()


def _has_positions(seen: Seen) -> bool:
    """Return True if there are several positions: one does not distinguish frequencies from an
    offset.
    """
    return seen.problem is not None and seen.problem.case.positions(seen.stage.step).shape[-1] > 1


def _is_of_steps(seen: Seen) -> bool:
    return bool(seen.stage.step)


def _of_scale(law: Edit, seen: Seen, spec: AttentionSpec) -> Families:
    """Return the family of scales; after the scores also that of norms, which multiply queries and
    keys as well.

    A scale that is almost right is not a wrong scale if the error is small: any bug that changes
    scores a little resembles one.
    """
    scale = law.numbers.get("value", math.inf)
    is_near = abs(scale - spec.score_scale) <= NEAR * spec.score_scale
    if is_near and not _is_convincing(seen):
        return ()
    is_behind = seen.stage.quantity in ("context", "output") and spec.qk_norm is not None
    return (of.scale_family(spec), *([of.QK_NORM] if is_behind else []))


def _is_convincing(seen: Seen) -> bool:
    """Return True if an error is so large that one fitted number cannot remove it by chance."""
    return float(seen.errors.max()) > CONVINCING * seen.allowed["max"]


def _of_theta(law: Edit, _: Seen, spec: AttentionSpec) -> Families:
    """Return the family of thetas, unless it is the right one, rounded.

    A theta that is not round is probably a different bug in the frequencies, which setting the
    theta does not fix.
    """
    right = law.numbers["expected"]
    theta = law.numbers["theta" if "theta" in law.numbers else "value"]
    if abs(theta - right) <= NEAR * right:
        return ()
    if as_exponent(theta, spec):
        return (of.EXPONENTS,)
    return (of.THETA,) if is_round(theta) else (of.FREQUENCIES,)


def _span_of(spec: AttentionSpec) -> BugFamily:
    """Return the family of the layer's window or chunk."""
    if spec.chunk_size is not None:
        return of.CHUNK
    return of.WINDOW if spec.window_size is not None else of.NO_WINDOW


def _of_span(_: Edit, seen: Seen, spec: AttentionSpec) -> Families:
    is_of_case = seen.problem is not None and seen.problem.case.window_size is not None
    return (of.WINDOW if is_of_case else _span_of(spec),)


def _of_cap(_: Edit, __: Seen, spec: AttentionSpec) -> Families:
    return (of.NO_CAP if spec.soft_cap is None else of.SOFT_CAP,)


def _of_eps(law: Edit, _: Seen, __: AttentionSpec) -> Families:
    return (of.LATENTS if "latents" in law.about else of.QK_NORM,)


def _of_factor(law: Edit, seen: Seen, spec: AttentionSpec) -> Families:
    axes, numbers = law.numbers["axes"], law.numbers["factors"]
    if seen.stage.quantity in ("q", "k", "v") and "H" not in axes and len(axes) > 1:
        return (of.QK_NORM, *([of.TEMPERATURE] if spec.temperature is not None else []))
    if axes:
        return (of.FACTOR,) if axes[0] in ("N", "K") else ()
    is_whole = all(
        len(which) == size for which, size in zip(seen.box[:2], seen.expected.shape, strict=False)
    )
    of_norm = (of.QK_NORM,) if spec.qk_norm is not None else ()
    if seen.stage.kind == "scores":
        is_of_scale = is_whole and spec.soft_cap is None
        return (of.scale_family(spec),) if is_of_scale else ()
    if seen.stage.is_attn_weights:
        is_of_dropout = any(abs(numbers[0] * (1.0 - p) - 1.0) <= LOOSEST for p in RATES)
        return (of.DROPOUT,) if is_of_dropout and is_whole else (of.FACTOR,)
    if seen.stage.quantity not in ("q", "k"):
        return (of.FACTOR,)
    scales = [spec.score_scale**power for power in (1.0, -1.0, 0.5)]
    is_scale = any(abs(numbers[0] - x) <= LOOSEST * x for x in scales if x != 1.0)
    return (of.scale_family(spec) if is_scale and is_whole else of.FACTOR, *of_norm)


def _of_zeros(_: Edit, seen: Seen, __: AttentionSpec) -> Families:
    """Return the family of lost values; slots of a cache that are empty in every head were not
    written.

    A context of a cache is also 0 if the values that it reads are empty.
    """
    if seen.stage.quantity in ("mask", "scores") or seen.stage.is_exact:
        return ()
    is_of_heads = len(seen.box[1]) < seen.expected.shape[1]
    if seen.stage.step is not None and seen.stage.quantity == "context" and not is_of_heads:
        return ()
    return (of.LOST,) if "cache" not in seen.stage.kind or is_of_heads else (of.CACHE_SLOTS,)


def _of_offset(law: Edit, seen: Seen, _: AttentionSpec) -> Families:
    if seen.stage.kind == "cache.lengths":
        return (of.CACHE_SLOTS,)
    is_bias = {*law.numbers["axes"]} & {"H", "E", "W"} and not {*law.numbers["axes"]} & {
        "B",
        "T",
        "S",
    }
    return (of.BIAS,) if is_bias and seen.stage.quantity in ("q", "k", "v") else ()


def _of_order(law: Edit, seen: Seen, spec: AttentionSpec) -> Families:
    axis, quantity = law.numbers["axis"], seen.stage.quantity
    if "cache" in seen.stage.kind:
        return (of.CACHE_SLOTS,) if axis in ("B", "S", "T") else ()
    if quantity == "mask":
        if axis == "N":
            return (of.MASK_HEADS,)
        return (of.PADDING,) if axis == "B" and _is_padded(seen) else ()
    if axis == "B":
        return (of.SEQUENCES,) if quantity in ("q", "k", "v", "context", "output") else ()
    if axis in ("S", "T") and quantity in ("q", "k", "v", "context", "output"):
        return (of.TOKENS,)
    if axis in ("N", "K") and sorted(law.numbers["of"]) == sorted(law.numbers["from"]):
        is_shared = quantity == "context" and spec.num_kv_heads < spec.num_heads
        if quantity in ("q", "k", "v", "context"):
            return (of.GROUPED, of.HEAD_ORDER) if is_shared else (of.HEAD_ORDER,)
    is_of_pairs = axis == "H" and spec.rope is not None and ", instead of" in law.about
    return (of.PAIRS,) if is_of_pairs and quantity in ("q", "k") else ()


def _is_padded(seen: Seen) -> bool:
    return seen.problem is not None and seen.problem.case.key_padding_lengths is not None


def _of_shift(_: Edit, seen: Seen, __: AttentionSpec) -> Families:
    if "cache" in seen.stage.kind:
        return (of.CACHE_SLOTS,)
    return (of.TOKENS,) if seen.stage.quantity in ("q", "k", "v", "context", "output") else ()


def _of_axes(law: Edit, seen: Seen, spec: AttentionSpec) -> Families:
    if "cache" in seen.stage.kind or seen.problem is None:
        return ()
    if seen.stage.kind == "scores":
        return (of.SWAPPED,) if law.numbers.get("axes") == ["T", "S"] else ()
    if seen.stage.kind == "mask":
        return (
            (of.CAUSAL, *([of.POLARITY] if seen.problem.case.random_mask else []))
            if not _is_of_steps(seen)
            else ()
        )
    return (of.HEAD_ORDER,) if seen.stage.quantity in ("q", "k", "v", "context", "output") else ()


def _of_stage(law: Edit, seen: Seen, _: AttentionSpec) -> Families:
    other, own = stage_named(law.numbers["stage"]), seen.stage
    if "cache" in own.kind and "cache" in other.kind:
        # Slots that are stale in some sequences alone may follow from their lengths.
        is_of_sequences = len(seen.box[0]) < seen.expected.shape[0]
        if other.step != own.step and is_of_sequences:
            return (of.CACHE_SLOTS, of.CACHE_LENGTHS)
        return (of.CACHE_SLOTS,)
    projections = {"q", "k", "v"}
    return (of.SWAPPED,) if {other.kind, own.kind} <= projections and other.step == own.step else ()


def _of_offset_of_rope(_: Edit, seen: Seen, __: AttentionSpec) -> Families:
    return (of.POSITIONS,) if seen.stage.step is None else (of.CACHE_POSITIONS, of.POSITIONS)


def _of_exponent(law: Edit, _: Seen, __: AttentionSpec) -> Families:
    return (of.ROTARY_DIM if law.numbers["exponent"] == "2 i / head_dim" else of.EXPONENTS,)


def _of_frequencies(law: Edit, seen: Seen, spec: AttentionSpec) -> Families:
    """Return the family of frequencies that follow no rule, if every number of RoPE is known.

    A frequency of 0 is a pair that is not rotated, and nearly right ones are rounded.
    """
    if spec.rope is None or spec.rope.scaling is not None or not _has_positions(seen):
        return ()
    used, right = np.array(law.numbers["used"]), np.array(law.numbers["right"])
    is_wrong = np.abs(used - right).max() > NEAR * np.abs(right).max()
    is_of_frequencies = is_wrong and bool(used.all()) and law.numbers["amplitude"] == 1.0
    return (of.FREQUENCIES,) if is_of_frequencies else ()


def _of_rope_factor(law: Edit, seen: Seen, spec: AttentionSpec) -> Families:
    if not _has_positions(seen):
        return ()
    factor = float(law.numbers["factor" if law.name == "rope scaling" else "value"])
    is_scaling = factor > 1.0 or (spec.rope is not None and spec.rope.scaling is not None)
    return (of.SCALING,) if is_scaling else (of.SCALING, of.POSITIONS)


def _of_leak(_: Edit, seen: Seen, __: AttentionSpec) -> Families:
    if seen.problem is None or seen.stage.step is not None or sample_of(seen.problem) is not None:
        return ()
    right = Layer(seen.problem, Arithmetic(np.dtype(np.float64))).mask({})["mask"]
    is_right = seen.hidden is not None and np.array_equal(right, seen.hidden)
    return (of.LEAKING,) if is_right else ()  # otherwise the mask is wrong, or another one is used


def _of_distances(_: Edit, __: Seen, spec: AttentionSpec) -> Families:
    if spec.alibi is not None:
        return (of.ALIBI,)
    if spec.relative_bias is not None:
        return (of.RELATIVE_BIAS,)
    return (of.RELATIVE_PRODUCTS,) if spec.relative_products is not None else ()


def _of_mask(law: Edit, seen: Seen, spec: AttentionSpec) -> Families:
    if seen.problem is None or seen.problem.case.is_cached:
        return ()
    has_window = (spec.window_size or spec.chunk_size or seen.problem.case.window_size) is not None
    if law.name == "inverted":
        return (*_of_span(law, seen, spec), of.POLARITY) if has_window else (of.POLARITY,)
    return (*_of_span(law, seen, spec), of.CAUSAL) if has_window else (of.CAUSAL,)


def _of_mixture(law: Edit, _: Seen, __: AttentionSpec) -> Families:
    mixture = np.array(law.numbers["heads"])
    factors = np.diag(mixture)
    if np.abs(mixture - np.diag(factors)).max() < NEAR:
        is_lost = bool((np.minimum(np.abs(factors), np.abs(factors - 1.0)) < NEAR).all())
        return (of.LOST,) if is_lost else (of.FACTOR,)
    places = np.abs(mixture) > 0.5
    is_order = (places.sum(axis=0) == 1).all() and (places.sum(axis=1) == 1).all()
    return (of.HEAD_ORDER,) if is_order and np.abs(mixture - places).max() < NEAR else ()


_BY_NAME: dict[str, Callable[[Edit, Seen, AttentionSpec], Families]] = {
    "theta": _of_theta,
    "rope theta": _of_theta,
    "scale": _of_scale,
    "power": _of_scale,
    "soft cap": _of_cap,
    "eps": _of_eps,
    "factor": _of_factor,
    "offset": _of_offset,
    "order": _of_order,
    "shift": _of_shift,
    "transposed": _of_axes,
    "reshaped": _of_axes,
    "other stage": _of_stage,
    "rope offset": _of_offset_of_rope,
    "rope positions": _of_offset_of_rope,
    "rope exponent": _of_exponent,
    "rope factor": _of_rope_factor,
    "rope scaling": _of_rope_factor,
    "rope frequencies": _of_frequencies,
    "zeros": _of_zeros,
    "unmasked": _of_leak,
    "slope": _of_distances,
    "by distance": _of_distances,
    "inverted": _of_mask,
    **dict.fromkeys(("window", "window instead", "chunk", "chunk instead"), _of_span),
    "band": _of_mask,
    "heads in output": _of_mixture,
}

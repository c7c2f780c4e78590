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
from parity.explain.diagnosis.bugs.record import Edit, known_bug
from parity.explain.diagnosis.bugs.sites import (
    after,
    features_unchanged,
    for_names,
    positions,
    turned,
    weights,
)
from parity.explain.diagnosis.bugs.specs import with_rope
from parity.explain.fitting.thetas import THETAS_IN_USE
from parity.measure.core.case import Case
from parity.measure.core.reference import Layer

of_rope = partial(known_bug, page="rope-positions", stages=("q", "latents", "k"))
of_pairs = partial(of_rope, page="rope-pairs")


def turned_alone(case: Case) -> Iterator[Edit]:
    """Other rotations of queries alone, or of keys alone."""
    yield from _turned_in(case, "q", "q's", "-q")
    yield from _turned_in(case, "k", "k's", "-k")


def own_positions(case: Case) -> Iterator[Edit]:
    """Yield rotations that ignore the positions of the case, or of its packed sequences."""
    if case.spec.rope is None:
        return
    if case.position_ids is None:
        if case.segment_ids is not None:
            yield of_rope(
                "rope-positions-run-on",
                "positions run on over packed sequences instead of restarting in each",
                positions("qk", partial(_instead_of, replace(case, segment_ids=None).positions())),
                fix="count the positions of each packed sequence from 0",
            )
        return
    if case.is_cached:
        yield of_rope(
            "rope-position-ids-ignored",
            "the positions that were passed are ignored: tokens are rotated by their slots",
            positions("qk", partial(_of_slots, case)),
            fix="rotate each token by the position that was passed for it, in steps as well",
        )
        return
    yield of_rope(
        "rope-position-ids-ignored",
        "the positions that were passed are ignored: tokens are rotated as the tokens 0, 1, …",
        positions("qk", partial(_instead_of, case.positions_in_order())),
        fix="rotate each token by the position that was passed for it",
    )


def _of_slots(case: Case, passed: np.ndarray) -> np.ndarray:
    """Return the positions of a call without those that were passed: its slots."""
    in_order = replace(case, position_ids=None, mask=None)
    for call in range(len(case.chunks)):
        if np.array_equal(passed, case.positions(call)):
            return in_order.positions(call)
    raise ValueError("another bug changes the positions")


def _instead_of(in_order: np.ndarray, passed: np.ndarray) -> np.ndarray:
    return in_order


def _turned_in(case: Case, of: str, whose: str, suffix: str) -> Iterator[Edit]:
    """Return other rotations of queries, keys or both."""
    rope = case.spec.rope
    if rope is None:
        return
    if rope.pairs == "half":
        yield from _other_pairs(case, rope, of, whose, suffix)
    yield from _turned(rope, of, whose, suffix)
    if case.is_cached and not case.has_positions:
        yield from _cached_positions(case, of, whose, suffix)
    if len(case.chunks) > 2 and rope.sections is None:
        yield from _stuck_positions(case, of, whose, suffix)


def turned_otherwise(case: Case) -> Iterator[Edit]:
    """Other rotations of queries and keys."""
    rope, spec = case.spec.rope, case.spec
    if rope is None:
        return
    yield from _turned_in(case, "qk", "the", "")
    has_plain_positions = rope.sections is None and not rope.depends_on_length
    if spec.num_heads > 1 and spec.latent is None and has_plain_positions:
        yield of_rope(
            "rope-over-heads",
            "RoPE rotates heads by their index instead of tokens by their position",
            turned("qk", _over_heads),
            fix="broadcast cosines and sines along the tokens: (B, 1, T, H) with (B, N, T, H)",
        )
    if not rope.depends_on_length:
        # A quarter turn, and back by the position: the scores equal the scores of the opposite
        # rotation.
        yield of_rope(
            "rope-sin-cos-exchanged",
            "RoPE's sines and cosines are exchanged",
            {"tables": after(_exchanged)},
            fix=REVERSED_ROPE.fix,
        )
    is_normed_after_rope = spec.v_norm is not None and spec.v_norm.after_rope
    has_one_width = spec.value_head_dim == spec.head_dim
    if spec.latent is None and has_one_width and not is_normed_after_rope:
        yield of_rope(
            "rope-on-values",
            "values are also rotated",
            turned("v", _rotated),
            fix="rotate queries and keys only",
            stages=("v",),
        )


# ---- Pairs ---------------------------------------------------------------------------------------


def _other_pairs(case: Case, rope: Rope, of: str, whose: str, suffix: str) -> Iterator[Edit]:
    yield of_pairs(
        f"rope-interleaved{suffix}",
        f"{whose} RoPE pairs are interleaved, (2 i, 2 i + 1), instead of (i, i + H/2)",
        turned(of, partial(_rotated_side_by_side, rope)),
        fix="rotate the pairs (i, i + H/2), or interleave the rows of the weights on loading",
    )
    if case.spec.latent is not None:
        return
    names = []
    for name in of:
        names += [f"{name}_proj.weight", f"{name}_proj.bias"]
    order = rope.pair_order(case.spec.head_dim)
    yield of_pairs(
        f"rope-weights-interleaved{suffix}",
        f"{whose} weights are in the order of interleaved RoPE pairs (Meta's, GGUF's)",
        weights(partial(_with_rows_in_order, order), names),
        fix=(
            "undo the interleaving of q_proj's and k_proj's rows, each with its own number of heads"
        ),
    )
    yield of_pairs(
        f"rope-weights-deinterleaved{suffix}",
        f"{whose} weights were de-interleaved, although their RoPE pairs are already (i, i + H/2)",
        weights(partial(_with_rows_in_order, np.argsort(order)), names),
        fix="leave the rows of q_proj and k_proj as they are",
    )


def _rotated_side_by_side(
    rope: Rope, layer: Layer, x: np.ndarray, token_positions: np.ndarray
) -> np.ndarray:
    """Rotate features that are next to each other as pairs."""
    order = rope.pair_order(x.shape[-1])
    return layer.rotate(x[..., np.argsort(order)], token_positions)[..., order]


def _with_rows_in_order(order: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Return a weight with the rows of each head in an order."""
    by_head = weight.reshape(-1, len(order), *weight.shape[1:])
    return by_head[:, order].reshape(weight.shape)


# ---- Positions -----------------------------------------------------------------------------------


def _turned(rope: Rope, of: str, whose: str, suffix: str) -> Iterator[Edit]:
    about = "RoPE is missing"
    if of != "qk":
        about = f"RoPE is missing on {of}"
    yield of_rope(
        f"rope-missing{suffix}",
        about,
        {"turned": for_names(of, features_unchanged)},
        fix=MISSING_ROPE.fix,
    )
    if not rope.depends_on_length:  # negative positions have no length
        yield of_rope(
            f"rope-reversed{suffix}",
            f"{whose} RoPE rotates in the opposite direction",
            positions(of, np.negative),
            fix=REVERSED_ROPE.fix,
        )
    for by, word, step in (("one", "high", 1), ("minus-one", "low", -1)):
        yield of_rope(
            f"rope-off-by-{by}{suffix}",
            f"{whose} RoPE positions are one too {word}",
            positions(of, partial(np.add, step)),
            fix=POSITIONS.fix,
        )
    yield of_rope(
        f"rope-twice{suffix}",
        f"{whose} RoPE is applied twice",
        turned(of, _rotated_twice),
        fix="rotate queries and keys once: cached keys are already rotated",
    )


def _rotated_twice(layer: Layer, x: np.ndarray, token_positions: np.ndarray) -> np.ndarray:
    return layer.rotate(layer.rotate(x, token_positions), token_positions)


def _rotated(layer: Layer, x: np.ndarray, token_positions: np.ndarray) -> np.ndarray:
    return layer.rotate(x, token_positions)


def _over_heads(layer: Layer, x: np.ndarray, _: np.ndarray) -> np.ndarray:
    return layer.rotate(x.swapaxes(1, 2), np.arange(x.shape[1])[None]).swapaxes(1, 2)


def _exchanged(tables: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    cos, sin = tables
    return sin, cos


def _cached_positions(case: Case, of: str, whose: str, suffix: str) -> Iterator[Edit]:
    cached = partial(of_rope, fix=CACHE_POSITIONS.fix, page=CACHE_POSITIONS.page)
    yield cached(
        f"cache-position-off-by-one{suffix}",
        f"{whose} RoPE positions after the first call are one too high",
        positions(of, _one_higher_later),
    )
    yield cached(
        f"cache-position-restarted{suffix}",
        f"{whose} RoPE positions restart at 0 in every call",
        positions(of, _restarted),
    )
    if _is_ragged(case):
        yield cached(
            f"cache-position-of-longest{suffix}",
            f"{whose} RoPE positions of all sequences continue from the longest one",
            positions(of, _of_longest),
            fix=f"{CACHE_POSITIONS.fix}, in its own sequence",
        )


def _stuck_positions(case: Case, of: str, whose: str, suffix: str) -> Iterator[Edit]:
    """Yield positions of later calls that all begin at the end of the first one."""
    for begin, number in (("after", 1), ("at", 0)):
        yield of_rope(
            f"cache-position-stuck{suffix}",
            f"{whose} RoPE positions begin {begin} the last token of the first call in every later "
            f"one",
            positions(of, partial(_stuck, _ends_of_first_call(case), number)),
            fix=CACHE_POSITIONS.fix,
            page=CACHE_POSITIONS.page,
        )


def _is_ragged(case: Case) -> bool:
    """Return True if the sequences of a cache have different lengths before a call."""
    calls = range(len(case.chunks))
    return any(len(set(case.lengths_before(call))) > 1 for call in calls)


def _one_higher_later(token_positions: np.ndarray) -> np.ndarray:
    is_later_call = token_positions[:, :1] > 0
    return token_positions + is_later_call


def _ends_of_first_call(case: Case) -> np.ndarray:
    """Return the position of the last token of the first call, (B or 1,)."""
    if case.position_ids is not None:
        return case.position_ids[:, case.chunks[0] - 1]
    return case.first_position + np.array(case.lengths_before(1)) - 1


def _stuck(ends: np.ndarray, number: int, token_positions: np.ndarray) -> np.ndarray:
    begins = token_positions[:, :1]
    stuck = ends[:, None] + number + token_positions - begins
    return np.where(begins > ends[:, None], stuck, token_positions)


def _restarted(token_positions: np.ndarray) -> np.ndarray:
    return token_positions - token_positions[:, :1]


def _of_longest(token_positions: np.ndarray) -> np.ndarray:
    return token_positions - token_positions[:, :1] + token_positions[:, :1].max()


# ---- Theta ---------------------------------------------------------------------------------------


def other_theta(case: Case) -> Iterator[Edit]:
    """A different base, or other exponents, which equal a different base: both are reported if that
    base is in use.
    """
    spec, rope = case.spec, case.spec.rope
    if rope is None:
        return
    named = {rope.theta}
    # YaRN and dynamic scaling use theta for more than its powers.
    if not isinstance(rope.scaling, (YarnScaling, DynamicScaling)):
        for word, exponents, power in (("halved", "i / R", 0.5), ("doubled", "4 i / R", 2.0)):
            theta = rope.theta**power
            named.add(theta)
            yield of_rope(
                f"rope-exponents-{word}",
                f"RoPE's frequencies are theta ** (-{exponents}) instead of theta ** (-2 i / R), "
                f"or theta is {theta:g} instead of {rope.theta:g}",
                with_rope(spec, replace(rope, theta=theta)),
                fix=EXPONENTS.fix_for(spec),
                page=EXPONENTS.page,
            )
        # Rounding of large frequencies times positions is far more than the noise of right ones.
        inverse = of_rope(
            "rope-exponents-inverted",
            f"RoPE's frequencies are theta ** (2 i / R) instead of theta ** (-2 i / R), or theta "
            f"is {1.0 / rope.theta:g} instead of {rope.theta:g}",
            with_rope(spec, replace(rope, theta=1.0 / rope.theta)),
            fix=EXPONENTS.fix_for(spec),
            page=EXPONENTS.page,
        )
        yield replace(inverse, has_more_noise=True)
    for theta in THETAS_IN_USE:
        if theta in named:
            continue
        yield of_rope(
            f"rope-theta-{theta:.0f}",
            THETA.about.format(found=f"{theta:g}", right=f"{rope.theta:g}"),
            with_rope(spec, replace(rope, theta=theta)),
            fix=THETA.fix_for(spec),
            page=THETA.page,
        )

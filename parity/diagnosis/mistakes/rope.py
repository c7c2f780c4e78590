"""Mistakes in the rotary position embedding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import cycle
from typing import Any, cast

import numpy as np

from mha_spec import AttentionSpec, DynamicScaling, Rope, YarnScaling
from parity.core.cases import Case
from parity.core.reference import Layer
from parity.diagnosis.mistakes.families import CACHE_POSITIONS, EXPONENTS, MISSING_ROPE, POSITIONS, REVERSED_ROPE, THETA
from parity.diagnosis.mistakes.record import Mistake, Override, Plan, breaking

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


def _turning_in_sibling(of: str, turned: Override) -> Callable[[Plan], None]:
    """Plants another way to rotate some heads: `turned(plan, rotate, x, positions, rope)`."""

    def plant(plan: Plan) -> None:
        turns = cycle("qk")  # project_qkv rotates q, then k

        def override(plan: Plan, rope: Any, *inputs: Any) -> Any:
            return turned(plan, rope, *inputs) if next(turns) in of else rope(*inputs)

        plan.functions["apply_rope"] = override

    return plant


# ---- Pairs -----------------------------------------------------------------------------------------------------------


def _rotated(rope: Rope | None, size: int) -> list[int]:
    """Which of so many features are rotated."""
    return list(range(size))[cast(Rope, rope).rotated_features(size)]


def pairs_of(rope: Rope, size: int) -> tuple[list[int], list[int]]:
    """The first and the second feature of each pair that is rotated, of so many features."""
    rotated = _rotated(rope, size)
    half = len(rotated) // 2
    return (rotated[:half], rotated[half:]) if rope.pairs == "half" else (rotated[0::2], rotated[1::2])


def _pairs_side_by_side(case: Case, size: int) -> np.ndarray:
    """So many features, those of each pair one after the other: 0, R/2, 1, R/2 + 1, …"""
    order, rotated = np.arange(size), _rotated(case.spec.rope, size)
    order[rotated] = np.array(rotated).reshape(2, -1).T.reshape(-1)
    return order


def _interleaved(case: Case, of: str, whose: str, suffix: str) -> Mistake:
    def turned(layer: Layer, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        order = _pairs_side_by_side(case, x.shape[-1])
        return layer.rotate(x[..., np.argsort(order)], positions)[..., order]

    def planted(_: Plan, rotate: Any, x: Any, positions: Any, rope: Rope) -> Any:
        size, rotated = x.shape[-1], _rotated(rope, x.shape[-1])
        evens_first = np.array([*range(rotated[0]), *rotated[0::2], *rotated[1::2], *range(rotated[-1] + 1, size)])
        return rotate(x[..., evens_first], positions, rope)[..., np.argsort(evens_first)]

    return Mistake(
        f"rope-interleaved{suffix}",
        f"{whose} RoPE pairs are interleaved, (2 i, 2 i + 1), and not (i, i + H/2)",
        "rotate the pairs (i, i + H/2), or interleave the rows of the weights when they are loaded",
        "rope-pairs",
        STAGES,
        _turning(of, turned),
        _turning_in_sibling(of, planted),
    )


def _weights_reordered(case: Case, of: str, whose: str, suffix: str) -> Iterator[Mistake]:
    size = case.spec.head_dim
    order, rotated = _pairs_side_by_side(case, size), _rotated(case.spec.rope, size)
    half, features = len(rotated) // 2, slice(rotated[0], rotated[-1] + 1)

    def with_rows(rows: np.ndarray) -> dict[str, Override]:
        def parameter(_: Layer, original: Any, name: str) -> np.ndarray:
            found = original(name)
            if name[0] not in of or not name.startswith(("q_proj", "k_proj")):
                return found
            return found.reshape(-1, size, *found.shape[1:])[:, rows].reshape(found.shape)

        return {"parameter": parameter}

    def swapping(axes: tuple[int, int]) -> Callable[[Plan], None]:
        """Plants rows whose place in a head is counted along two axes, and these exchanged."""

        def plant(plan: Plan) -> None:
            for name in (f"{each}_proj.{leaf}" for each in of for leaf in ("weight", "bias")):
                if name in plan.weights:
                    heads = plan.weights[name].reshape(-1, size, *plan.weights[name].shape[1:]).copy()
                    pairs = heads[:, features].reshape(len(heads), *axes, *heads.shape[2:])
                    heads[:, features] = pairs.swapaxes(1, 2).reshape(heads[:, features].shape)
                    plan.weights[name] = heads.reshape(plan.weights[name].shape)

        return plant

    yield Mistake(
        f"rope-weights-interleaved{suffix}",
        f"{whose} weights are in the order of interleaved RoPE pairs (Meta's, GGUF's)",
        "undo the interleaving of q_proj's and k_proj's rows, each with its own number of heads",
        "rope-pairs",
        STAGES,
        with_rows(order),
        swapping((2, half)),
    )
    yield Mistake(
        f"rope-weights-deinterleaved{suffix}",
        f"{whose} weights were un-interleaved, though their RoPE pairs are (i, i + H/2) already",
        "leave the rows of q_proj and k_proj as they are",
        "rope-pairs",
        STAGES,
        with_rows(np.argsort(order)),
        swapping((half, 2)),
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
        _turning_in_sibling(of, lambda plan, rotate, x, positions, rope: x),
    )


def _reversed(of: str, whose: str, suffix: str) -> Mistake:
    return Mistake(
        f"rope-reversed{suffix}",
        f"{whose} RoPE rotates the other way",
        REVERSED_ROPE.fix,
        REVERSED_ROPE.page,
        STAGES,
        _turning(of, lambda layer, x, positions: layer.rotate(x, -positions)),
        _turning_in_sibling(of, lambda plan, rotate, x, positions, rope: rotate(x, -positions, rope)),
    )


def _shifted(of: str, whose: str, by: str, step: int) -> Mistake:
    return Mistake(
        f"rope-off-by-{by}",
        f"{whose} RoPE positions are one too {'high' if step > 0 else 'low'}",
        POSITIONS.fix,
        POSITIONS.page,
        STAGES,
        _turning(of, lambda layer, x, positions: layer.rotate(x, positions + step)),
        _turning_in_sibling(of, lambda plan, rotate, x, positions, rope: rotate(x, positions + step, rope)),
    )


def _twice(of: str, whose: str, suffix: str) -> Mistake:
    return Mistake(
        f"rope-twice{suffix}",
        f"{whose} RoPE is applied twice",
        "rotate queries and keys once: keys from a cache have been rotated",
        "rope-positions",
        STAGES,
        _turning(of, lambda layer, x, positions: layer.rotate(layer.rotate(x, positions), positions)),
        _turning_in_sibling(
            of, lambda _, rotate, x, positions, rope: rotate(rotate(x, positions, rope), positions, rope)
        ),
    )


def _exchanged() -> Mistake:
    """A quarter turn, and back by the position: the scores are those of RoPE the other way."""

    def planted(plan: Plan, rotate: Any, x: Any, positions: Any, rope: Rope) -> Any:
        first, second = pairs_of(rope, x.shape[-1])
        order, signs = np.arange(x.shape[-1]), np.ones(x.shape[-1])
        order[first], order[second], signs[first] = second, first, -1
        return rotate(x, -positions, rope)[..., order] * plan.xp.asarray(signs[None, None, None], dtype=x.dtype)

    return Mistake(
        "rope-sin-cos-exchanged",
        "RoPE's sines and cosines are exchanged",
        REVERSED_ROPE.fix,
        REVERSED_ROPE.page,
        STAGES,
        {"tables": lambda layer, original, positions: original(positions)[::-1]},
        breaking(apply_rope=planted),
    )


def _over_heads() -> Mistake:
    def planted(plan: Plan, rotate: Any, x: Any, _: Any, rope: Rope) -> Any:
        return rotate(x.swapaxes(1, 2), plan.xp.arange(x.shape[1])[None], rope).swapaxes(1, 2)

    def turned(layer: Layer, x: np.ndarray, _: np.ndarray) -> np.ndarray:
        return layer.rotate(x.swapaxes(1, 2), np.arange(x.shape[1])[None]).swapaxes(1, 2)

    return Mistake(
        "rope-over-heads",
        "RoPE turns heads by their number, and not tokens by their position",
        "let cosines and sines go along the tokens: (B, 1, T, H) beside (B, N, T, H)",
        "rope-positions",
        STAGES,
        _turning("qk", turned),
        _turning_in_sibling("qk", planted),
    )


def _of_values() -> Mistake:
    def turned(layer: Layer, original: Any, name: str, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        return layer.rotate(x, positions) if name == "v" else original(name, x, positions)

    def project_qkv(plan: Plan, original: Any, *inputs: Any) -> tuple[Any, Any, Any]:
        q, k, v = original(*inputs)
        spec, positions = inputs[4], inputs[5] if len(inputs) > 5 else None
        positions = plan.xp.arange(v.shape[2])[None] if positions is None else positions
        return q, k, plan.sibling.apply_rope(v, positions, spec.rope)

    return Mistake(
        "rope-on-values",
        "values are rotated, too",
        "rotate queries and keys only",
        "rope-positions",
        ("v",),
        {"turned": turned},
        breaking(project_qkv=project_qkv),
    )


def _rounded_positions() -> Mistake:
    """Whole numbers above 256 have more bits than a bfloat16 has."""

    def rounded(layer: Layer, original: Any, x: np.ndarray, positions: np.ndarray, *direction: int) -> np.ndarray:
        step = np.maximum(np.exp2(np.floor(np.log2(np.maximum(positions, 1))) - 7), 1)
        return original(x, (np.round(positions / step) * step).astype(positions.dtype), *direction)

    def planted(plan: Plan, rotate: Any, x: Any, positions: Any, rope: Rope) -> Any:
        collapsed = plan.xp.asarray(plan.xp.asarray(positions, dtype=plan.xp.bfloat16), dtype=plan.xp.int32)
        return rotate(x, collapsed, rope)

    return Mistake(
        "rope-positions-bfloat16",
        "RoPE positions are numbers of bfloat16, in which those above 256 collapse",
        "keep positions as integers, and make the angles of them in float32",
        "rope-positions",
        STAGES,
        {"rotate": rounded},
        breaking(apply_rope=planted),
    )


def _of_longest(of: str, whose: str, suffix: str) -> Mistake:
    def turned(layer: Layer, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        first = positions[:, :1]
        return layer.rotate(x, positions - first + first.max())

    def planted(plan: Plan, rotate: Any, x: Any, positions: Any, rope: Rope) -> Any:
        return rotate(x, positions + (plan.xp.max(positions[:, 0]) - positions[:, :1]), rope)

    return Mistake(
        f"cache-position-of-longest{suffix}",
        f"{whose} RoPE positions of all sequences go on from the longest one",
        "a new token's position is the number of tokens cached before it, in its own sequence",
        "cache-positions",
        STAGES,
        _turning(of, turned),
        _turning_in_sibling(of, planted),
    )


def _cached_positions(of: str, whose: str, suffix: str) -> Iterator[Mistake]:
    def one_late(plan: Plan, rotate: Any, x: Any, positions: Any, rope: Rope) -> Any:
        return rotate(x, plan.xp.where(positions[:, :1] > 0, positions + 1, positions), rope)

    yield Mistake(
        f"cache-position-off-by-one{suffix}",
        f"{whose} RoPE positions after the first call are one too high",
        CACHE_POSITIONS.fix,
        CACHE_POSITIONS.page,
        STAGES,
        _turning(of, lambda layer, x, positions: layer.rotate(x, positions + (positions[:, :1] > 0))),
        _turning_in_sibling(of, one_late),
    )
    yield Mistake(
        f"cache-position-restarted{suffix}",
        f"{whose} RoPE positions begin at 0 in every call",
        CACHE_POSITIONS.fix,
        CACHE_POSITIONS.page,
        STAGES,
        _turning(of, lambda layer, x, positions: layer.rotate(x, positions - positions[:, :1])),
        _turning_in_sibling(of, lambda _, rotate, x, positions, rope: rotate(x, positions - positions[:, :1], rope)),
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
        breaking(apply_rope=lambda plan, rotate, x, positions, rope: rotate(x, positions, replace(rope, theta=theta))),
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
        breaking(apply_rope=lambda _, rotate, x, positions, rope: rotate(x, positions, _with_power(rope, power))),
    )


def _with_power(rope: Rope, power: float) -> Rope:
    return replace(rope, theta=rope.theta**power)

"""Mistakes in latents: what queries, keys and values are made of, and the scale of their scores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from mha_spec import AttentionSpec, Latent, YarnScaling
from parity.core.case import Case
from parity.core.reference import Layer
from parity.diagnosis.mistakes.record import Mistake
from parity.diagnosis.mistakes.scores import other_scale, yarn_factor

SCALE = "multiply the scores by mscale² / sqrt(head_dim), all features of a head counted; mscale is 1 without YaRN"
"""What to do about every other scale."""


def latents(case: Case) -> Iterator[Mistake]:
    spec, latent = case.spec, case.spec.latent
    if latent is None:
        return
    own_features = spec.head_dim - latent.rope_dim
    yield _norm_missing("kv_a", "the latent of keys and values", ("latents",))
    if latent.q_rank is not None:
        yield _norm_missing("q_a", "the latent of queries", ("q",))
    yield from _other_factors(latent)
    yield from _columns_read_otherwise(spec, latent, own_features)
    yield from _other_scales(spec, latent, own_features)


def _norm_missing(name: str, words: str, stages: tuple[str, ...]) -> Mistake:
    def normed(_: Layer, original: Any, of: str, x: np.ndarray, norm: Any) -> np.ndarray:
        return x if of == name else original(of, x, norm)

    return Mistake(
        f"latent-{name.removesuffix('_a')}-norm-missing",
        f"{words} is not normalised",
        f"apply {name}_norm to {words}, before what is made of it",
        "latents",
        stages,
        {"normed": normed},
    )


def _other_factors(latent: Latent) -> Iterator[Mistake]:
    """What the latents are multiplied by after their norms: nothing, its square, or what is the other's."""
    for of, words, stage in (("q", "queries", "q"), ("kv", "keys and values", "latents")):
        name, factor = f"{of}_factor", getattr(latent, f"{of}_factor")
        fix = f"multiply the latent of {words} by {factor:.6g} after its norm, once"
        if factor != 1.0:
            about = f"the latent of {words} is not multiplied by its factor"
            yield _factored(f"latent-{of}-factor-missing", about, fix, (stage,), {name: 1.0})
            about = f"the latent of {words} is multiplied by its factor twice, or by it without its square root"
            yield _factored(f"latent-{of}-factor-twice", about, fix, (stage,), {name: factor**2})
    if latent.q_rank is not None and latent.q_factor != latent.kv_factor:
        yield _factored(
            "latent-factors-swapped",
            "the latent of queries is multiplied by the factor of keys and values, and theirs by that of queries",
            f"multiply queries' latent by {latent.q_factor:.6g}, that of keys and values by {latent.kv_factor:.6g}",
            ("q", "latents"),
            {"q_factor": latent.kv_factor, "kv_factor": latent.q_factor},
        )


def _factored(name: str, about: str, fix: str, stages: tuple[str, ...], factors: dict[str, float]) -> Mistake:
    """Latents times other factors."""

    def latent(_: Layer, original: Any) -> Latent:
        return replace(original(), **factors)

    return Mistake(name, about, fix, "latents", stages, {"latent": latent})


def _columns_read_otherwise(spec: AttentionSpec, latent: Latent, own_features: int) -> Iterator[Mistake]:
    """What a projection gives, cut in another order than its weight has."""
    num_heads, value_dim, shared = spec.num_heads, spec.value_head_dim, latent.rope_dim
    of_keys, of_values = np.arange(num_heads * own_features), np.arange(num_heads * value_dim)
    halves = np.concatenate(
        [of_keys.reshape(num_heads, -1), len(of_keys) + of_values.reshape(num_heads, -1)], axis=1
    ).reshape(-1)
    if num_heads > 1:
        yield _read_otherwise(
            "latent-kv-in-halves",
            "kv_b_proj is read as all keys and then all values, and not head by head",
            "cut what kv_b_proj gives into heads first, and each head into its key and its value",
            "kv_b_proj",
            halves,
            ("k", "v"),
        )
    yield _read_otherwise(
        "latent-values-first",
        "in a head of kv_b_proj the value is read before the key",
        "take the first features of each head of kv_b_proj as its key",
        "kv_b_proj",
        _in_heads(num_heads, np.roll(np.arange(own_features + value_dim), -value_dim)),
        ("k", "v"),
    )
    yield _read_otherwise(
        "latent-shared-first",
        "what the heads share of their keys is read before the latent",
        "take the first kv_rank features of what kv_a_proj gives as the latent",
        "kv_a_proj",
        np.roll(np.arange(latent.width), -shared),
        ("latents",),
    )
    yield _read_otherwise(
        "latent-rope-first",
        "in a head of the queries the features that are rotated are read first",
        "take the last rope_dim features of each head of the queries as those that are rotated",
        "q_proj" if latent.q_rank is None else "q_b_proj",
        _in_heads(num_heads, np.roll(np.arange(spec.head_dim), -shared)),
        ("q",),
    )


def _in_heads(num_heads: int, order: np.ndarray) -> np.ndarray:
    return (len(order) * np.arange(num_heads)[:, None] + order).reshape(-1)


def _read_otherwise(
    name: str, about: str, fix: str, projection: str, order: np.ndarray, stages: tuple[str, ...]
) -> Mistake:
    def linear(_: Layer, original: Any, of: str, x: np.ndarray) -> np.ndarray:
        return original(of, x)[..., order] if of == projection else original(of, x)

    return Mistake(name, about, fix, "latents", stages, {"linear": linear})


def _other_scales(spec: AttentionSpec, latent: Latent, own_features: int) -> Iterator[Mistake]:
    if spec.scale is not None:
        return
    kept = yarn_factor(spec)
    right = 1.0 / spec.score_scale
    told = [right, *map(float, np.sqrt([spec.d_model, spec.value_head_dim]) / kept)]  # those of `scores.scale`
    root, own, width = map(float, np.sqrt([spec.head_dim, own_features, latent.width]))
    whole = _whole_mscale(spec)
    for name, words, divisor in (
        ("scale-by-own-features", "is 1 / sqrt(head_dim - rope_dim)", own / kept),
        ("scale-by-width", "is 1 / sqrt(kv_rank + rope_dim), that of what is absorbed", width / kept),
        ("mscale-missing", "is 1 / sqrt(head_dim), without mscale", root),
        ("mscale-once", "has mscale in it once, and not squared", root / float(np.sqrt(kept))),
        ("mscale-all-dim-ignored", "has 0.1 ln(factor) + 1 for mscale, without mscale_all_dim", root / whole**2),
    ):
        if not np.isclose(divisor, told).any():
            told.append(divisor)
            about = f"the scale of the scores {words}"
            yield other_scale(f"latent-{name}", about, SCALE, "latents", divisor, right / divisor)


def _whole_mscale(spec: AttentionSpec) -> float:
    """mscale where mscale_all_dim is 1; 1 without one."""
    scaling = None if spec.rope is None else spec.rope.scaling
    if not isinstance(scaling, YarnScaling) or scaling.mscale_all_dim is None:
        return 1.0
    return float(np.sqrt(replace(scaling, mscale_all_dim=1.0).score_factor))

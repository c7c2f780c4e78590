"""Bugs in latents: the projections of queries, keys and values, and the scale of their scores."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from mha_spec import AttentionSpec, Latent, YarnScaling
from parity.explain.diagnosis.bugs.families import LATENTS
from parity.explain.diagnosis.bugs.record import Edit
from parity.explain.diagnosis.bugs.scores import yarn_factor
from parity.explain.diagnosis.bugs.sites import Overrides, after, features_unchanged, for_names
from parity.explain.diagnosis.bugs.specs import of_spec, without_default_scale
from parity.measure.core.case import Case


def latents(case: Case) -> Iterator[Edit]:
    spec, latent = case.spec, case.spec.latent
    if latent is None:
        return
    own_features = spec.head_dim - latent.rope_dim
    yield _norm_missing("kv", "the latent of keys and values", "latents")
    if latent.q_rank is not None:
        yield _norm_missing("q", "the latent of queries", "q")
    yield from _other_factors(spec, latent)
    yield from _columns_read_otherwise(spec, latent, own_features)
    yield from _other_scales(spec, latent, own_features)


def _norm_missing(name: str, words: str, stage: str) -> Edit:
    return LATENTS.shown_in(stage)(
        f"latent-{name}-norm-missing",
        f"{words} is not normalized",
        {"normed": for_names((f"{name}_a",), features_unchanged)},
        fix=f"apply {name}_a_norm to {words} before it is projected",
    )


def _other_factors(spec: AttentionSpec, latent: Latent) -> Iterator[Edit]:
    """Factors of the latents: 1, the square of the right one, or the factor of the other latent."""
    for of, words, stage in (("q", "queries", "q"), ("kv", "keys and values", "latents")):
        name = f"{of}_factor"
        factor = getattr(latent, name)
        bug = LATENTS.shown_in(stage)
        fix = f"multiply the latent of {words} by {factor:.6g} after its norm, once"
        if factor != 1.0:
            yield bug(
                f"latent-{of}-factor-missing",
                f"the latent of {words} is not multiplied by its factor",
                of_spec(spec, latent=replace(latent, **{name: 1.0})),
                fix=fix,
            )
            yield bug(
                f"latent-{of}-factor-twice",
                f"the latent of {words} is multiplied by its factor twice, or by the factor "
                f"without its square root",
                of_spec(spec, latent=replace(latent, **{name: factor**2})),
                fix=fix,
            )
    if latent.q_rank is not None and latent.q_factor != latent.kv_factor:
        exchanged = replace(latent, q_factor=latent.kv_factor, kv_factor=latent.q_factor)
        yield LATENTS.shown_in("q", "latents")(
            "latent-factors-swapped",
            "the factors of the two latents, of queries and of keys and values, are exchanged",
            of_spec(spec, latent=exchanged),
            fix=(
                f"multiply queries' latent by {latent.q_factor:.6g}, the latent of keys and "
                f"values by {latent.kv_factor:.6g}"
            ),
        )


def _columns_read_otherwise(
    spec: AttentionSpec, latent: Latent, own_features: int
) -> Iterator[Edit]:
    """Split the features of a projection in a different order than its weight."""
    num_heads, value_dim, shared = spec.num_heads, spec.value_head_dim, latent.rope_dim
    q_projection = "q_b_proj"
    if latent.q_rank is None:
        q_projection = "q_proj"
    if num_heads > 1:
        key_rows = np.arange(num_heads * own_features).reshape(num_heads, -1)
        value_rows = key_rows.size + np.arange(num_heads * value_dim).reshape(num_heads, -1)
        order = np.concatenate([key_rows, value_rows], axis=1).ravel()
        yield LATENTS.shown_in("k", "v")(
            "latent-kv-in-halves",
            "kv_b_proj is read as all keys, then all values, instead of head by head",
            _read("kv_b_proj", order),
            fix=(
                "split the output of kv_b_proj into heads first, and each head into its key and "
                "its value"
            ),
        )
    yield LATENTS.shown_in("k", "v")(
        "latent-values-first",
        "in each head of kv_b_proj, the value is read before the key",
        _read("kv_b_proj", _rolled(num_heads, own_features + value_dim, -value_dim)),
        fix="use the first features of each head of kv_b_proj as its key",
    )
    yield LATENTS.shown_in("latents")(
        "latent-shared-first",
        "the features that all heads share are read before the latent",
        _read("kv_a_proj", _rolled(1, latent.width, -shared)),
        fix="use the first kv_rank features of the output of kv_a_proj as the latent",
    )
    yield LATENTS.shown_in("q")(
        "latent-rope-first",
        "in each head of the queries, the rotated features are read first",
        _read(q_projection, _rolled(num_heads, spec.head_dim, -shared)),
        fix="rotate the last rope_dim features of each head of the queries",
    )


def _rolled(num_heads: int, size: int, by: int) -> np.ndarray:
    return np.roll(np.arange(num_heads * size).reshape(num_heads, size), by, axis=1).ravel()


def _read(projection: str, order: np.ndarray) -> Overrides:
    """Read the output of a projection in a different order."""
    return {"linear": for_names((projection,), after(partial(_reordered, order)))}


def _reordered(order: np.ndarray, features: np.ndarray) -> np.ndarray:
    return features[..., order]


def _other_scales(spec: AttentionSpec, latent: Latent, own_features: int) -> Iterator[Edit]:
    spec = without_default_scale(spec)
    if spec.scale is not None:
        return
    mscale_squared = yarn_factor(spec)
    root = math.sqrt(spec.head_dim)
    known = [
        1.0 / spec.score_scale,
        # `scores.scale` has these two.
        math.sqrt(spec.d_model) / mscale_squared,
        math.sqrt(spec.value_head_dim) / mscale_squared,
    ]
    for name, words, divisor in (
        (
            "scale-by-own-features",
            "is 1 / sqrt(head_dim - rope_dim)",
            math.sqrt(own_features) / mscale_squared,
        ),
        (
            "scale-by-width",
            "is 1 / sqrt(kv_rank + rope_dim), the width of absorbed heads",
            math.sqrt(latent.width) / mscale_squared,
        ),
        ("mscale-missing", "is 1 / sqrt(head_dim), without mscale", root),
        (
            "mscale-once",
            "contains mscale once instead of squared",
            root / math.sqrt(mscale_squared),
        ),
        (
            "mscale-twice",
            "contains mscale four times instead of twice",
            root / mscale_squared**2,
        ),
        (
            "mscale-all-dim-ignored",
            "uses 0.1 ln(factor) + 1 as mscale, without mscale_all_dim",
            root / _whole_mscale(spec) ** 2,
        ),
    ):
        if np.isclose(divisor, known).any():
            continue
        known.append(divisor)
        yield LATENTS.shown_in("scores")(
            f"latent-{name}",
            f"the scale of the scores {words}",
            of_spec(spec, scale=1.0 / divisor),
            fix=(
                "multiply the scores by mscale² / sqrt(head_dim), all features of a head counted; "
                "mscale is 1 without YaRN"
            ),
        )


def _whole_mscale(spec: AttentionSpec) -> float:
    """Return mscale for mscale_all_dim = 1; 1 without one."""
    if spec.rope is None:
        return 1.0
    scaling = spec.rope.scaling
    if not isinstance(scaling, YarnScaling) or scaling.mscale_all_dim is None:
        return 1.0
    return math.sqrt(replace(scaling, mscale_all_dim=1.0).score_factor)

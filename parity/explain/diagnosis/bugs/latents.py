"""Bugs in latents: the projections of queries, keys and values, and the scale of their scores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from mha_spec import AttentionSpec, Latent, YarnScaling
from parity.explain.diagnosis.bugs.families import LATENTS
from parity.explain.diagnosis.bugs.record import Edit, instead
from parity.explain.diagnosis.bugs.scores import yarn_factor
from parity.explain.diagnosis.bugs.sites import Overrides, after
from parity.measure.core.case import Case


def latents(case: Case) -> Iterator[Edit]:
    spec, latent = case.spec, case.spec.latent
    if latent is None:
        return
    own_features = spec.head_dim - latent.rope_dim
    yield _norm_missing("kv", "the latent of keys and values", "latents")
    if latent.q_rank is not None:
        yield _norm_missing("q", "the latent of queries", "q")
    yield from _other_factors(latent)
    yield from _columns_read_otherwise(spec, latent, own_features)
    yield from _other_scales(spec, latent, own_features)


def _norm_missing(name: str, words: str, stage: str) -> Edit:
    return LATENTS.seen_in(stage)(
        f"latent-{name}-norm-missing",
        f"{words} is not normalized",
        {
            "normed": lambda _, original, of, x, norm: (
                x if of == f"{name}_a" else original(of, x, norm)
            )
        },
        fix=f"apply {name}_a_norm to {words}before it is projected",
    )


def _other_factors(latent: Latent) -> Iterator[Edit]:
    """Factors of the latents: 1, the square of the right one, or that of the other latent."""
    for of, words, stage in (("q", "queries", "q"), ("kv", "keys and values", "latents")):
        name, factor = f"{of}_factor", getattr(latent, f"{of}_factor")
        bug = LATENTS.seen_in(stage)
        fix = f"multiply the latent of {words} by {factor:.6g} after its norm, once"
        if factor != 1.0:
            yield bug(
                f"latent-{of}-factor-missing",
                f"the latent of {words} is not multiplied by its factor",
                _with(**{name: 1.0}),
                fix=fix,
            )
            yield bug(
                f"latent-{of}-factor-twice",
                f"the latent of {words} is multiplied by its factor twice, or by the factor "
                f"without its square root",
                _with(**{name: factor**2}),
                fix=fix,
            )
    if latent.q_rank is not None and latent.q_factor != latent.kv_factor:
        yield LATENTS.seen_in("q", "latents")(
            "latent-factors-swapped",
            "the factors of the two latents, of queries and of keys and values, are exchanged",
            _with(q_factor=latent.kv_factor, kv_factor=latent.q_factor),
            fix=(
                f"multiply queries' latent by {latent.q_factor:.6g}, that of keys and values by "
                f"{latent.kv_factor:.6g}"
            ),
        )


def _with(**factors: float) -> Overrides:
    """Multiply latents by other factors."""
    return {"latent": after(lambda latent: replace(latent, **factors))}


def _columns_read_otherwise(
    spec: AttentionSpec, latent: Latent, own_features: int
) -> Iterator[Edit]:
    """Split the features of a projection in another order than its weight."""
    num_heads, value_dim, shared = spec.num_heads, spec.value_head_dim, latent.rope_dim
    of_keys, of_values = np.arange(num_heads * own_features), np.arange(num_heads * value_dim)
    if num_heads > 1:
        halves = [of_keys.reshape(num_heads, -1), len(of_keys) + of_values.reshape(num_heads, -1)]
        yield LATENTS.seen_in("k", "v")(
            "latent-kv-in-halves",
            "kv_b_proj is read as all keys, then all values, instead of head by head",
            _read("kv_b_proj", np.concatenate(halves, axis=1).ravel()),
            fix=(
                "split the output of kv_b_proj into heads first, and each head into its key and "
                "its value"
            ),
        )
    yield LATENTS.seen_in("k", "v")(
        "latent-values-first",
        "in each head of kv_b_proj, the value is read before the key",
        _read("kv_b_proj", _rolled(num_heads, own_features + value_dim, -value_dim)),
        fix="use the first features of each head of kv_b_proj as its key",
    )
    yield LATENTS.seen_in("latents")(
        "latent-shared-first",
        "the features that all heads share are read before the latent",
        _read("kv_a_proj", _rolled(1, latent.width, -shared)),
        fix="use the first kv_rank features of the output of kv_a_proj as the latent",
    )
    yield LATENTS.seen_in("q")(
        "latent-rope-first",
        "in each head of the queries, the rotated features are read first",
        _read(
            "q_proj" if latent.q_rank is None else "q_b_proj",
            _rolled(num_heads, spec.head_dim, -shared),
        ),
        fix="rotate the last rope_dim features of each head of the queries",
    )


def _rolled(num_heads: int, size: int, by: int) -> np.ndarray:
    return np.roll(np.arange(num_heads * size).reshape(num_heads, size), by, axis=1).ravel()


def _read(projection: str, order: np.ndarray) -> Overrides:
    """Read the output of a projection in another order."""
    return {
        "linear": lambda _, original, of, x: (
            original(of, x)[..., order] if of == projection else original(of, x)
        )
    }


def _other_scales(spec: AttentionSpec, latent: Latent, own_features: int) -> Iterator[Edit]:
    if spec.scale is not None:
        return
    kept = yarn_factor(spec)
    known = [1.0 / spec.score_scale]
    known += map(
        float, np.sqrt([spec.d_model, spec.value_head_dim]) / kept
    )  # those of `scores.scale`
    root, own, width = map(float, np.sqrt([spec.head_dim, own_features, latent.width]))
    whole = _whole_mscale(spec)
    for name, words, divisor in (
        ("scale-by-own-features", "is 1 / sqrt(head_dim - rope_dim)", own / kept),
        (
            "scale-by-width",
            "is 1 / sqrt(kv_rank + rope_dim), the width of absorbed heads",
            width / kept,
        ),
        ("mscale-missing", "is 1 / sqrt(head_dim), without mscale", root),
        ("mscale-once", "contains mscale once instead of squared", root / float(np.sqrt(kept))),
        (
            "mscale-all-dim-ignored",
            "uses 0.1 ln(factor) + 1 as mscale, without mscale_all_dim",
            root / whole**2,
        ),
    ):
        if not np.isclose(divisor, known).any():
            known.append(divisor)
            yield LATENTS.seen_in("scores")(
                f"latent-{name}",
                f"the scale of the scores {words}",
                {"scale": instead(lambda divisor=divisor: divisor)},
                fix="multiply the scores by mscale² / sqrt(head_dim), all features of a head "
                "counted; mscale is 1 "
                "without YaRN",
            )


def _whole_mscale(spec: AttentionSpec) -> float:
    """Return mscale for mscale_all_dim = 1; 1 without one."""
    scaling = None if spec.rope is None else spec.rope.scaling
    if not isinstance(scaling, YarnScaling) or scaling.mscale_all_dim is None:
        return 1.0
    return float(np.sqrt(replace(scaling, mscale_all_dim=1.0).score_factor))

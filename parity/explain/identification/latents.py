"""Fit latents (MLA), from which keys and values, and optionally queries, of all heads are
projected.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from mha_spec import InputError, Latent, Norm
from parity.explain.identification.ends import end_of
from parity.explain.identification.found import Fit
from parity.explain.identification.norms import norm_of
from parity.explain.identification.observe import ObservedLayer, Submodule
from parity.explain.identification.trace import Traced, columns_of, flat, is_close
from parity.measure.core.weights import Weights


@dataclass(frozen=True)
class LatentNorm:
    """A latent between two projections, with its norm.

    Attributes:
        source: projection that returned the latent.
        places: indices of its features in that output.
        norm: the norm that follows.
        name: name of the norm.
        weights: weights of the norm.
        factor: factor of the latent after the norm.
    """

    source: Submodule
    places: list[int]
    norm: Norm
    name: str
    weights: Weights
    factor: float


def latent_of(layer: ObservedLayer, projection: Submodule) -> LatentNorm | None:
    """Return the latent that a projection receives; None if it receives no latent."""
    given = flat(projection.given)
    for norm in layer.norms():
        if flat(norm.result).shape != given.shape:
            continue
        factor = (
            1.0
            if np.array_equal(flat(norm.result), given)
            else _factor_of(flat(norm.result), given)
        )
        if factor is None:
            continue
        wanted = list(columns_of(flat(norm.given)))
        for source in layer.linears():
            if len(flat(source.result)) != len(given):
                continue
            known = {bits: place for place, bits in enumerate(columns_of(flat(source.result)))}
            if all(bits in known for bits in wanted):
                found, weights = norm_of(norm, "width")
                return LatentNorm(
                    source, [known[bits] for bits in wanted], found, norm.name, weights, factor
                )
    return None


def _factor_of(one: np.ndarray, other: np.ndarray) -> float | None:
    """Return the scalar factor between arrays; None if there is none."""
    size = float(np.square(one, dtype=np.float64).sum())
    factor = float((one.astype(np.float64) * other).sum() / size) if size else 0.0
    return factor if factor > 0.0 and is_close(factor * one.astype(np.float64), other) else None


def is_latent(k: Traced, v: Traced) -> bool:
    """Return whether two projections make the keys, and the first of them also makes the values."""
    return len(k.modules) == 2 and len(v.modules) == 1 and k.modules[0].name == v.modules[0].name


def fit_latents(layer: ObservedLayer, found: Fit, q: Traced, k: Traced, v: Traced) -> None:
    """Fit latents, their norms and the projections before and after them.

    Raises:
        ValueError: if a `Latent` cannot express them.
    """
    num_heads, head_dim = k.heads.shape[1], k.heads.shape[3]
    rope_dim = _num_shared(k)
    own = head_dim - rope_dim
    kv, of_q = latent_of(layer, k.modules[0]), latent_of(layer, q.modules[0])
    shared = k.of_head(slice(own, None))
    if len(q.modules) != 1 or kv is None or shared.modules[0].name != kv.source.name:
        raise InputError(
            "latents", "be made by one projection with the shared part of keys", "several"
        )
    kv_places, q_places = shared.places[:rope_dim], q.places.reshape(num_heads, head_dim)
    rope = found.fields.get("rope")
    if rope is not None and rope.pairs == "half":
        order = _interleaved(kv_places)
        if order is not None and all(_interleaved(each) is not None for each in q_places[:, own:]):
            found.fields["rope"] = rope = rope.replace(pairs="interleaved")
            found.evidence = [
                replace(x, value=rope) if x.field == "rope" else x for x in found.evidence
            ]
            kv_places = kv_places[order]
            q_places = np.concatenate([q_places[:, :own], q_places[:, own:][:, order]], axis=1)
    first = [("kv_a", kv)] + ([] if of_q is None else [("q_a", of_q)])
    biases = {}
    for name, each in first:
        rows = [*each.places, *(kv_places if name == "kv_a" else ())]
        biases[name] = found.project(f"{name}_proj", each.source, rows)
        found.normalize(f"{name}_norm", each.name, each.weights)
    of_kv = np.concatenate(
        [k.of_head(slice(0, own)).places.reshape(num_heads, own), v.places.reshape(num_heads, -1)],
        1,
    )
    second = {
        "kv_b_proj": (k.modules[0], of_kv),
        "q_proj" if of_q is None else "q_b_proj": (q.modules[0], q_places),
    }
    for name, (module, places) in second.items():
        biases[name] = found.project(name, module, places.reshape(-1))
    if biases["kv_b_proj"] or biases.get("q_b_proj"):
        raise InputError("projections of latents", "have no bias", biases=biases)
    width = kv.source.given.shape[-1]
    latent = _latent(kv, of_q, rope_dim, width, q.factor)
    found.add(
        "latent",
        latent,
        f"{kv.source.name} returns the latent of keys and values, {k.modules[0].name} both of it",
    )
    q_bias = biases["q_proj" if of_q is None else "q_a"]
    found.add(
        "qkv_bias", (q_bias, biases["kv_a"], biases["kv_a"]), "the projections of the input add one"
    )
    found.ends["query"] = end_of(q.modules[0] if of_q is None else of_q.source)
    found.ends["key"] = found.ends["value"] = end_of(kv.source)


def _interleaved(places: np.ndarray) -> np.ndarray | None:
    """Return the order in which places ascend, if they are interleaved halves; otherwise None."""
    count = len(places) // 2
    order = np.stack([np.arange(count), count + np.arange(count)], axis=1).reshape(-1)
    return order if count > 1 and (np.diff(places[order]) == 1).all() else None


def _num_shared(k: Traced) -> int:
    """Return how many trailing features of keys are shared by all heads."""
    num_heads, head_dim = k.heads.shape[1], k.heads.shape[3]
    is_shared = np.array([each is not k.sources[0] for each in k.sources]).reshape(
        num_heads, head_dim
    )
    count = int(is_shared[0].sum())
    places = k.places.reshape(num_heads, head_dim)[:, head_dim - count :]
    if (
        not (is_shared == (np.arange(head_dim) >= head_dim - count)).all()
        or not (places == places[0]).all()
    ):
        raise InputError("keys", "end with features that all heads share", "another order")
    return count


def _latent(
    kv: LatentNorm, q: LatentNorm | None, rope_dim: int, width: int, q_factor: float
) -> Latent:
    norms = {each.norm for each in (kv, q) if each is not None}
    if len(norms) != 1 or (norm := norms.pop()) != Norm(over="width", eps=norm.eps):
        raise InputError("norms of latents", "be one RMS norm with a weight", norms=norms)
    kv_rank, q_rank = len(kv.places), None if q is None else len(q.places)
    q_factor = _rounded(q_factor * (1.0 if q is None else q.factor), width, q_rank)
    return Latent(
        kv_rank, rope_dim, q_rank, norm.eps, q_factor, _rounded(kv.factor, width, kv_rank)
    )


def _rounded(factor: float, width: int, rank: int | None) -> float:
    """Return the square root of the ratio of both widths if a factor equals it; otherwise the
    factor.
    """
    known = math.sqrt(width / rank) if rank else factor
    return known if math.isclose(factor, known, rel_tol=1e-6) else factor

"""Fit latents (MLA), from which keys and values, and optionally queries, of all heads are
projected.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mha_spec import InputError, Latent, Norm, Rope
from parity.explain.identification.endpoints import endpoint_of
from parity.explain.identification.evidence import FittedLayer
from parity.explain.identification.norms import norm_of
from parity.explain.identification.observe import ObservedLayer, Submodule
from parity.explain.identification.trace import Traced, as_tokens, columns_of, is_close
from parity.measure.core.weights import Weights


@dataclass(frozen=True)
class LatentNorm:
    """A latent between two projections, with its norm.

    Attributes:
        source: projection that returned the latent.
        indices: indices of its features in that output.
        norm: the norm that follows.
        name: name of the norm.
        weights: weights of the norm.
        factor: factor of the latent after the norm.
    """

    source: Submodule
    indices: list[int]
    norm: Norm
    name: str
    weights: Weights
    factor: float


def latent_before(layer: ObservedLayer, projection: Submodule) -> LatentNorm | None:
    """Return the latent that a projection receives; None if it receives no latent."""
    latent = as_tokens(projection.input)
    for submodule in layer.norms():
        factor = _factor_between(as_tokens(submodule.output), latent)
        if factor is None:
            continue
        source = _source_of(layer, as_tokens(submodule.input))
        if source is None:
            continue
        linear, indices = source
        norm, weights = norm_of(submodule, "width")
        return LatentNorm(linear, indices, norm, submodule.name, weights, factor)
    return None


def _factor_between(before: np.ndarray, after: np.ndarray) -> float | None:
    """Return the scalar factor between arrays; None if there is none."""
    if before.shape != after.shape:
        return None
    if np.array_equal(before, after):
        return 1.0
    wide = before.astype(np.float64)
    size = float((wide**2).sum())
    if not size:
        return None
    factor = float((wide * after).sum() / size)
    if factor > 0.0 and is_close(factor * wide, after):
        return factor
    return None


def _source_of(layer: ObservedLayer, features: np.ndarray) -> tuple[Submodule, list[int]] | None:
    """Return the projection with features (tokens, width) in its output, and their indices."""
    columns = list(columns_of(features))
    for linear in layer.linears():
        output = as_tokens(linear.output)
        if len(output) != len(features):
            continue
        index_of_bits = {bits: index for index, bits in enumerate(columns_of(output))}
        if index_of_bits.keys() >= set(columns):
            return linear, [index_of_bits[bits] for bits in columns]
    return None


def is_latent(k: Traced, v: Traced) -> bool:
    """Return whether two projections make the keys, and the first of them also makes the values."""
    if len(k.modules) != 2 or len(v.modules) != 1:
        return False
    return k.modules[0].name == v.modules[0].name


def fit_latents(layer: ObservedLayer, fitted: FittedLayer, q: Traced, k: Traced, v: Traced) -> None:
    """Fit latents, their norms and the projections before and after them.

    Raises:
        ValueError: if a `Latent` cannot express them.
    """
    num_heads, head_dim = k.heads.shape[1], k.heads.shape[3]
    rope_dim = _num_shared_features(k)
    own_dim = head_dim - rope_dim
    kv_b, q_last = k.modules[0], q.modules[0]
    kv_latent, q_latent = latent_before(layer, kv_b), latent_before(layer, q_last)
    shared_keys = k.of_head(slice(own_dim, None))
    if (
        len(q.modules) != 1
        or kv_latent is None
        or shared_keys.modules[0].name != kv_latent.source.name
    ):
        rule = "be made by one projection with the shared part of keys"
        raise InputError("latents", rule, "several")

    # All heads share the rotated features of keys: the features of the first head stand for all.
    k_rotated = shared_keys.indices_by_head[0]
    q_indices = q.indices_by_head
    order = _interleaved_order(fitted.fields.get("rope"), k_rotated, q_indices[:, own_dim:])
    if order is not None:
        _use_interleaved_pairs(fitted)
        k_rotated = k_rotated[order]
        q_indices = np.concatenate(
            [q_indices[:, :own_dim], q_indices[:, own_dim:][:, order]], axis=1
        )

    own_keys = k.of_head(slice(0, own_dim)).indices_by_head
    kv_indices = np.concatenate([own_keys, v.indices.reshape(num_heads, -1)], axis=1)
    kv_bias = _project_latent("kv", kv_latent, [*kv_latent.indices, *k_rotated], fitted)
    _project_from_latent("kv_b_proj", kv_b, kv_indices, fitted)
    if q_latent is None:
        q_source = q_last
        q_bias = fitted.project("q_proj", q_last, q_indices.reshape(-1))
    else:
        q_source = q_latent.source
        q_bias = _project_latent("q", q_latent, q_latent.indices, fitted)
        _project_from_latent("q_b_proj", q_last, q_indices, fitted)

    width = kv_latent.source.input.shape[-1]
    latent = _latent(kv_latent, q_latent, rope_dim, width, q.factor)
    how = f"{kv_latent.source.name} returns the latent of keys and values, {kv_b.name} both of it"
    fitted.add("latent", latent, how)
    biases = q_bias, kv_bias, kv_bias
    fitted.add("qkv_bias", biases, "the projections of the input add one")
    fitted.endpoints["query"] = endpoint_of(q_source)
    fitted.endpoints["key"] = fitted.endpoints["value"] = endpoint_of(kv_latent.source)


def _project_latent(
    name: str, latent: LatentNorm, rows: Sequence[int], fitted: FittedLayer
) -> bool:
    """Use the projection that makes a latent, and its norm; return whether it has a bias."""
    has_bias = fitted.project(f"{name}_a_proj", latent.source, rows)
    fitted.normalize(f"{name}_a_norm", latent.name, latent.weights)
    return has_bias


def _project_from_latent(
    name: str, submodule: Submodule, indices: np.ndarray, fitted: FittedLayer
) -> None:
    """Use a projection of a latent, by the indices (N, features) of its heads.

    Raises:
        ValueError: if it has a bias.
    """
    if fitted.project(name, submodule, indices.reshape(-1)):
        raise InputError("projections of latents", "have no bias", f"one of {submodule.name}")


def _num_shared_features(k: Traced) -> int:
    """Return how many trailing features of keys are shared by all heads.

    Raises:
        ValueError: if other features are shared.
    """
    num_heads, head_dim = k.heads.shape[1], k.heads.shape[3]
    is_shared = np.array([source is not k.sources[0] for source in k.sources])
    is_shared = is_shared.reshape(num_heads, head_dim)
    count = int(is_shared[0].sum())
    is_trailing = np.arange(head_dim) >= head_dim - count
    indices = k.indices_by_head[:, head_dim - count :]
    if not (is_shared == is_trailing).all() or not (indices == indices[0]).all():
        raise InputError("keys", "end with features that all heads share", "a different order")
    return count


# ---- Order of pairs ------------------------------------------------------------------------------


def _interleaved_order(
    rope: Rope | None, k_indices: np.ndarray, q_indices: np.ndarray
) -> np.ndarray | None:
    """Return the order in which rotated features ascend, if a layer reads interleaved pairs as
    halves; otherwise None.

    Args:
        rope: as fitted to the heads.
        k_indices: indices of the rotated features of keys in the output of their projection, (R,).
        q_indices: the same for queries, (N, R).
    """
    if rope is None or rope.pairs != "half" or len(k_indices) < 4:
        return None
    order = Rope().pair_order(len(k_indices))
    for indices in (k_indices, *q_indices):
        if (np.diff(indices[order]) != 1).any():
            return None
    return order


def _use_interleaved_pairs(fitted: FittedLayer) -> None:
    """Replace RoPE's pairs: the weights have the order of interleaved ones."""
    rope = fitted.fields["rope"].replace(pairs="interleaved")
    fitted.fields["rope"] = rope
    for index, evidence in enumerate(fitted.evidence):
        if evidence.field == "rope":
            fitted.evidence[index] = replace(evidence, value=rope)


# ---- The record ----------------------------------------------------------------------------------


def _latent(
    kv: LatentNorm, q: LatentNorm | None, rope_dim: int, width: int, q_factor: float
) -> Latent:
    """Return the record of latents.

    Raises:
        ValueError: if their norms are of several kinds, or not RMS norms with a weight.
    """
    norms = {kv.norm}
    q_rank = None
    if q is not None:
        norms.add(q.norm)
        q_rank = len(q.indices)
        q_factor = q_factor * q.factor
    _check_norms(list(norms))
    return Latent(
        len(kv.indices),
        rope_dim,
        q_rank,
        kv.norm.eps,
        _as_root(q_factor, width, q_rank),
        _as_root(kv.factor, width, len(kv.indices)),
    )


def _check_norms(norms: Sequence[Norm]) -> None:
    if len(norms) == 1 and norms[0] == Norm(over="width", eps=norms[0].eps):
        return
    raise InputError("norms of latents", "be one RMS norm with a weight", norms=set(norms))


def _as_root(factor: float, width: int, rank: int | None) -> float:
    """Return the square root of the ratio of both widths if a factor equals it; otherwise the
    factor.
    """
    if not rank:
        return factor
    root = math.sqrt(width / rank)
    if math.isclose(factor, root, rel_tol=1e-6):
        return root
    return factor

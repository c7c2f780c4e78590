"""Fit a specification to an observed attention layer. Each fit records its evidence."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mha_spec import InputError, Norm, Rope
from parity.explain.identification.call_masks import without_call_mask
from parity.explain.identification.context_norms import fit_context_norm
from parity.explain.identification.endpoints import (
    between_endpoints,
    describe_endpoints,
    endpoint_of,
)
from parity.explain.identification.evidence import Evidence, FittedLayer
from parity.explain.identification.from_call import parts_from_call, with_segments
from parity.explain.identification.gates import fit_gate
from parity.explain.identification.latents import fit_latents, is_latent
from parity.explain.identification.norms import fit_norm
from parity.explain.identification.observe import ObservedLayer, Submodule
from parity.explain.identification.padding import without_padding
from parity.explain.identification.rotation import fit_rope, positions_of, ropes_of
from parity.explain.identification.scores import fit_bias, fit_mask, fit_scale
from parity.explain.identification.sharing import describe_source, kv_source_of
from parity.explain.identification.temperatures import factors_of_tokens, fit_temperature
from parity.explain.identification.trace import Traced, as_tokens, features_of, is_close, trace

LEAST_TOKENS = 8
"""Fewest tokens that distinguish features and angles."""

HOW_HEADS = "heads of the keys that attention receives, each once"
"""How the number of key heads is found, unless some are copies."""

ALIKE = 1e-3
"""Largest difference of values between tokens, relative to the largest value, at which attention is
not observable.
"""

SIDES = {"q": "query", "k": "key", "v": "value"}
"""Names of the inputs of projections."""


def fit(
    layer: ObservedLayer,
    config: Mapping[str, Any],
    fitted: FittedLayer,
    others: Sequence[ObservedLayer] = (),
) -> None:
    """Fit the specification and the weights of a layer to one call.

    Args:
        layer: the observed layer.
        config: configuration of its model, used only for fields that a short input cannot show.
        fitted: collects the fields.
        others: layers of its model in the same call.

    Raises:
        ValueError: if a stage is not explained; the message names the first one.
    """
    _check_observable(layer)
    values = layer.values
    fitted.add("num_heads", values["q"].shape[1], "heads of the queries that attention receives")
    fitted.add("num_kv_heads", values["k"].shape[1], HOW_HEADS)
    fitted.add("head_dim", values["q"].shape[3], "features of those heads")
    fitted.fields["value_head_dim"] = values["v"].shape[3]
    _fit_projections(layer, config, fitted, others)
    _fit_output(layer, fitted)
    fitted.descriptions = describe_endpoints(layer, fitted.endpoints) | fitted.received
    inputs = _described_arguments(layer, fitted.descriptions)
    fitted.from_call |= parts_from_call(layer, inputs)

    layer = with_segments(between_endpoints(layer, fitted.endpoints), fitted)
    values = layer.values
    fitted.add("d_model", values["output"].shape[-1], "width of the output")
    fitted.add("d_in", values["input"].shape[-1], "width of the input of queries")
    if layer.is_cross:
        fitted.add("d_kv", values["key_input"].shape[-1], "width of the input of keys")
    fit_scale(layer, fitted)
    layer = without_call_mask(without_padding(layer), fitted)
    fit_mask(layer, fitted)
    fit_bias(layer, config, fitted)


def _check_observable(layer: ObservedLayer) -> None:
    """Check that a call shows enough of a layer.

    Raises:
        ValueError: if it does not.
    """
    values = layer.values
    missing = [name for name in ("q", "k", "v", "output") if name not in values]
    if missing or layer.tapped.calls[0].past:
        reason = layer.tapped.not_observed
        if not reason and missing:
            reason = f"no {' or '.join(missing)}"
        rule = "be attention whose queries, keys and values are observed"
        raise InputError("the layer", rule, reason or "a cache")
    batch_size, _, num_tokens, _ = values["q"].shape
    longest = num_tokens
    if "segment_ids" in values:
        _, counts = np.unique(values["segment_ids"], return_counts=True)
        longest = int(counts.max())
    if longest < LEAST_TOKENS or batch_size * num_tokens < 2 * LEAST_TOKENS:
        rule = f"be at least {LEAST_TOKENS} tokens of 2 sequences, or {2 * LEAST_TOKENS} of one"
        raise InputError("inputs", rule, f"{longest} of {batch_size * num_tokens // longest}")
    num_keys = values["k"].shape[2]
    if layer.is_cross and num_keys < LEAST_TOKENS:
        rule = f"be at least {LEAST_TOKENS} tokens to attend to"
        raise InputError("inputs", rule, f"{num_keys}")
    # With equal values any attention weights return the same context.
    v = values["v"]
    has_equal_values = np.ptp(v, axis=2).max() <= ALIKE * np.abs(v).max()
    if has_equal_values and "attn_weights" not in values:
        raise InputError("inputs", "differ between tokens", "equal values at all of them")


def _described_arguments(layer: ObservedLayer, descriptions: Mapping[str, str]) -> set[str]:
    """Return the arguments of a layer that its inputs or its output are described with, and those
    equal to them.
    """
    words: set[str] = set()
    for description in descriptions.values():
        words.update(word.strip(",") for word in description.split())
    described = set()
    for name, argument in layer.arguments.items():
        for word in words & layer.arguments.keys():
            if word == name or np.array_equal(argument, layer.arguments[word]):
                described.add(name)
    return described


# ---- Projections ---------------------------------------------------------------------------------


def _fit_projections(
    layer: ObservedLayer,
    config: Mapping[str, Any],
    fitted: FittedLayer,
    others: Sequence[ObservedLayer],
) -> None:
    """Fit the projections of queries, keys and values, with the norms and RoPE after them."""
    ropes = ropes_of(config, layer.values["q"].shape[-1], layer.tapped.kind)
    fit_clip(layer, layer.linears(), fitted)
    source = _source_of_keys(layer, ropes, fitted, others)
    if source is not None:
        how = f"keys and values are shared with {source.tapped.name}, bit for bit"
        fitted.add("shared_kv", True, how)
        fitted.received = describe_source(layer, others)
    q = _HeadFit(layer, "q", ropes, config, fitted).fit()
    if source is not None:
        _check_unscaled(q, fitted)
        has_bias = _project(layer, "q", q, fitted)
        fitted.add("qkv_bias", has_bias, "the projections add one")
        return
    k = _HeadFit(layer, "k", ropes, config, fitted).fit()
    v = _HeadFit(layer, "v", ropes, config, fitted).fit()
    if is_latent(k, v):
        fit_latents(layer, fitted, q, k, v)
        return
    _check_unscaled(q, fitted)
    q_bias = _project(layer, "q", q, fitted)
    k_bias = _project(layer, "k", k, fitted)
    v_bias = _project(layer, "v", v, fitted)
    fitted.add("qkv_bias", (q_bias, k_bias, v_bias), "the projections add one")


def _source_of_keys(
    layer: ObservedLayer, ropes: list[Rope], fitted: FittedLayer, others: Sequence[ObservedLayer]
) -> ObservedLayer | None:
    """Return the layer whose keys and values a layer receives; None if it makes its own."""
    limit = fitted.fields.get("clip_qkv")
    for part in ("k", "v"):
        if _trace_heads(layer, part, layer.values[part], ropes, limit) is None:
            return kv_source_of(layer, others)
    return None


def _check_unscaled(q: Traced, fitted: FittedLayer) -> None:
    if q.factor != 1.0 and not fitted.is_scaled_before:
        raise InputError("q", "be the output of a projection", f"{q.factor:.4g} times that")


def _project(layer: ObservedLayer, part: str, traced: Traced, fitted: FittedLayer) -> bool:
    """Use the projection of heads; return whether it has a bias."""
    name = f"{part}_proj"
    if len(traced.modules) != 1:
        raise InputError(name, "return the features of the heads", "several that do")
    (submodule,) = traced.modules
    has_bias = fitted.project(name, submodule, traced.indices)
    fitted.endpoints[SIDES[part]] = endpoint_of(submodule)
    if part != "q":
        _describe_copies(part, traced, layer.values["q"].shape[1], fitted)
    return has_bias


def _describe_copies(part: str, traced: Traced, num_heads: int, fitted: FittedLayer) -> None:
    """Record as evidence that a projection returns fewer key or value heads than attention
    receives, and their order.

    Consecutive copies are grouped-query attention, and already removed. Copies in a different order
    are
    not: its query heads n use key head n // (N / K). So the weights hold copies, and only the
    evidence shows which heads are equal.
    """
    first_heads: list[int] = []  # for each head, the first head with the same rows
    heads = traced.indices_by_head.tolist()
    for rows in heads:
        first_heads.append(heads.index(rows))
    distinct = sorted(set(first_heads))
    count = len(distinct)
    if count == len(heads):
        return
    order = [distinct.index(first) for first in first_heads]
    group = num_heads // len(heads)
    listed = " ".join(map(str, np.repeat(order, group)))
    how = f"{traced.modules[0].name} returns {count} heads, and query heads use {listed} of them"
    tiled = [head % count for head in range(len(order))]
    repeated = [head * count // len(order) for head in range(len(order))]
    if order == tiled:
        used = "n"
        if group > 1:
            used = f"n // {group}"
        per_head = num_heads // count
        how += f": tiled, head {used} mod {count} for query head n, and not n // {per_head}"
    elif order == repeated:
        how += f": repeated, head n // {num_heads // count} for query head n"
    how += f"; the rows of {part}_proj are copies"

    name = "num_kv_heads of values"
    if part == "k":
        name = "num_kv_heads"
        fitted.evidence = [entry for entry in fitted.evidence if entry.how != HOW_HEADS]
    fitted.evidence.append(Evidence(name, len(heads), how))


def fit_clip(layer: ObservedLayer, projections: Sequence[Submodule], fitted: FittedLayer) -> None:
    """Fit the clipping limit of projection outputs, if values reach it."""
    if "clip_qkv" in fitted.fields:
        return
    v = layer.values["v"]
    limit = float(str(np.abs(v).max()))
    is_plain = _are_equal(trace(v, projections), v)
    is_clipped = _are_equal(trace(v, projections, limit=limit), v)
    if is_clipped and not is_plain:
        how = "the largest values, which several projected ones would pass"
        fitted.add("clip_qkv", limit, how)


def _are_equal(traced: Traced | None, heads: np.ndarray) -> bool:
    return traced is not None and np.array_equal(traced.heads, heads)


# ---- Norms, RoPE and temperature -----------------------------------------------------------------


@dataclass
class _HeadFit:
    """Fits the steps between a projection and the heads that attention receives, from the last to
    the first.

    Attributes:
        layer: the layer.
        part: q, k or v.
        ropes: RoPE that the configuration may specify.
        config: configuration of the model.
        fitted: collects the fields.
        norm: the norm so far.
        norm_name: name of its module.
        rope: RoPE so far.
    """

    layer: ObservedLayer
    part: str
    ropes: list[Rope]
    config: Mapping[str, Any]
    fitted: FittedLayer
    norm: Norm | None = None
    norm_name: str = ""
    rope: Rope | None = None

    def fit(self) -> Traced:
        """Fit all steps, and return the heads before them.

        Raises:
            ValueError: if no steps explain the heads.
        """
        heads = self.layer.values[self.part]
        while True:
            traced = self._traced(heads)
            before = traced.heads * np.float32(traced.factor)
            if self.part == "q":
                heads = self._without_temperature(before, heads)
            self._fit_rotation(before, heads)
            if traced.modules[0].is_linear:
                break
            heads = self._before_norm(traced)
        self._add_fields(traced)
        return traced

    def _traced(self, heads: np.ndarray) -> Traced:
        limit = self.fitted.fields.get("clip_qkv")
        return _traced_heads(self.layer, self.part, heads, self.ropes, limit)

    def _fit_rotation(self, before: np.ndarray, after: np.ndarray) -> None:
        rope = fit_rope(before, after, self.ropes)
        if rope is None:
            return
        if self.rope is not None or self.part == "v":
            got = f"{self.part} turned by {rope}"
            raise InputError("rope", "turn queries and keys, and once", got)
        if self.norm is not None:
            self.norm = self.norm.replace(after_rope=True)
        self.rope = rope

    def _before_norm(self, traced: Traced) -> np.ndarray:
        """Fit the norm that returned heads, and return those that it received."""
        if self.norm is not None:
            raise InputError(f"{self.part}_norm", "be one norm", "two")
        self.norm, weights, heads = fit_norm(self.part, traced)
        self.norm_name = traced.modules[0].name
        self.fitted.normalize(f"{self.part}_norm", self.norm_name, weights)
        return heads

    def _without_temperature(self, before: np.ndarray, heads: np.ndarray) -> np.ndarray:
        """Fit the temperature of queries, and return them without it."""
        factors = factors_of_tokens(before, heads)
        if factors is None:
            return heads
        num_tokens = heads.shape[2]
        positions = np.arange(num_tokens)
        if "positions" in self.layer.values:
            positions = self.layer.values["positions"].reshape(-1, num_tokens)[0]
        temperature = fit_temperature(factors, positions, self.config)
        if temperature is None or "temperature" in self.fitted.fields:
            rule = "be multiplied by a temperature of its positions"
            raise InputError("q", rule, f"factors {np.round(factors, 4).tolist()}")
        how = "factor of the length of queries at each position"
        self.fitted.add("temperature", temperature, how, up_to=num_tokens)
        untempered = (heads / factors[:, None]).astype(heads.dtype)
        if is_close(before, untempered):
            return before
        return untempered

    def _add_fields(self, traced: Traced) -> None:
        """Add the norm, RoPE and the factor of heads."""
        part, norm, rope = self.part, self.norm, self.rope
        if part == "v":
            self.fitted.agree("v_norm", norm)
        else:
            self.fitted.agree("qk_norm", norm)
        if norm is not None:
            how = f"{self.norm_name} recomputed from its input"
            self.fitted.evidence.append(Evidence(f"{part}_norm", norm, how))
        if part != "v":
            self.fitted.agree("rope", rope)
        _check_axes(self.layer, rope)
        _, _, num_tokens, head_dim = traced.heads.shape
        if part == "q" and rope is not None:
            how = "angles of pairs of queries and keys, before and after"
            if rope.sections is not None:
                how += "; they belong to integers on each axis"
            self.fitted.evidence.append(Evidence("rope", rope, how, num_tokens))
        if part == "q":
            is_default_scale = math.isclose(traced.factor, head_dim**-0.5)
            if self.layer.tapped.scale == 1.0 and is_default_scale:
                self.fitted.is_scaled_before = True
        elif traced.factor != 1.0:
            got = f"{traced.factor:.4g} times that"
            raise InputError(part, "be the output of a projection", got)


def _check_axes(layer: ObservedLayer, rope: Rope | None) -> None:
    """Reject RoPE whose axes differ from the axes of the model's positions."""
    positions = layer.values.get("positions")
    if rope is None or positions is None:
        return
    has_one_axis = positions.ndim == 2
    if (rope.sections is None) == has_one_axis:
        return
    got = f"{len(positions)} that are the same"
    if has_one_axis:
        got = "one axis"
    raise InputError("positions", "have one axis for each axis of RoPE", got)


def positions_on_axes(layer: ObservedLayer, fitted: FittedLayer) -> np.ndarray:
    """Return the positions (axes, B, T) of a layer's tokens, from the rotation of its queries by
    RoPE with several axes.

    Raises:
        ValueError: if no positions explain the rotation.
    """
    q, rope = layer.values["q"], fitted.fields["rope"]
    traced = _traced_heads(layer, "q", q, [rope], fitted.fields.get("clip_qkv"))
    return positions_of(traced.heads * np.float32(traced.factor), q, rope)


def _traced_heads(
    layer: ObservedLayer, part: str, heads: np.ndarray, ropes: list[Rope], limit: float | None
) -> Traced:
    """Trace heads to norms, otherwise to linear submodules.

    Raises:
        ValueError: if a feature has no source.
    """
    traced = _trace_heads(layer, part, heads, ropes, limit)
    if traced is None:
        rule = "be made of features that a projection or a norm returns"
        raise InputError(part, rule, f"{part} of {heads.shape}")
    return traced


def _trace_heads(
    layer: ObservedLayer, part: str, heads: np.ndarray, ropes: list[Rope], limit: float | None
) -> Traced | None:
    """Trace heads to norms, otherwise to linear submodules; None if a feature has no source."""
    amplitudes = tuple(dict.fromkeys((1.0, *(rope.attention_factor for rope in ropes))))
    traced = trace(heads, layer.norms(), amplitudes)
    if traced is None:
        traced = trace(heads, layer.linears(), amplitudes, limit)
    if traced is not None:
        return traced
    for factor in _possible_factors(layer, part, heads.shape[-1]):
        traced = trace(heads, layer.linears(), (factor,))
        if traced is not None:
            return replace(traced, factor=factor)
    return None


def _possible_factors(layer: ObservedLayer, part: str, head_dim: int) -> list[float]:
    """Return factors of projections: constants of the module, and for queries the default scale."""
    factors = []
    if part == "q":
        factors.append(head_dim**-0.5)
    for value in vars(layer.module).values():
        if type(value) is float and value > 0.0:
            factors.append(value)
    return factors


# ---- Output --------------------------------------------------------------------------------------


def _fit_output(layer: ObservedLayer, fitted: FittedLayer) -> None:
    """Fit the output projection, and what lies between it and the context."""
    values = layer.values
    if "context" not in values:
        raise InputError("context", "be returned by the attention function", "nothing")
    context = features_of(values["context"])
    if np.array_equal(context, as_tokens(values["output"])):
        fitted.add("out_proj", False, "the output is the context")
        return
    for linear in layer.linears():
        projected = as_tokens(linear.input)
        is_of_inputs = endpoint_of(linear) in fitted.endpoints.values()
        if is_of_inputs or projected.shape != context.shape:
            continue
        if np.array_equal(projected, context):
            received = "the context"
        elif fit_context_norm(layer, projected, fitted):
            received = "the context, normalized,"
        elif fit_gate(layer, projected, fitted):
            received = "the context, times its gate,"
        else:
            continue
        has_bias = fitted.project("out_proj", linear, np.arange(linear.output.shape[-1]))
        fitted.add(
            "out_bias", has_bias, f"{linear.name} receives {received} and returns the output"
        )
        fitted.endpoints["output"] = endpoint_of(linear)
        return
    raise InputError("output", "be a projection of the context", "something else")

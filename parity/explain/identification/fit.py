"""Fit a specification to an observed attention layer. Each fit records its evidence."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mha_spec import InputError, Rope
from parity.explain.identification.call_masks import without_call_mask
from parity.explain.identification.context_norms import fit_context_norm
from parity.explain.identification.ends import between, end_of, words_of
from parity.explain.identification.found import Evidence, Fit
from parity.explain.identification.from_call import parts_from_call, with_segments
from parity.explain.identification.gates import gates_of
from parity.explain.identification.latents import fit_latents, is_latent
from parity.explain.identification.norms import fit_norm
from parity.explain.identification.observe import ObservedLayer, Submodule
from parity.explain.identification.padding import without_padding
from parity.explain.identification.rotation import fit_rope, positions_of, ropes_of
from parity.explain.identification.scores import fit_bias, fit_mask, fit_scale
from parity.explain.identification.sharing import kv_source_of, words_of_source
from parity.explain.identification.temperatures import factors_of, fit_temperature
from parity.explain.identification.trace import Traced, features_of, flat, is_close, trace

LEAST_TOKENS = 8
"""Fewest tokens that distinguish features and angles."""

HOW_HEADS = "heads of the keys that attention receives, each once"
"""How the number of key heads is found, unless some are copies."""

ALIKE = 1e-3
"""Largest difference of values between tokens, relative to the largest value, at which attention is
not observable.
"""


def fit(
    layer: ObservedLayer,
    config: Mapping[str, Any],
    found: Fit,
    others: Sequence[ObservedLayer] = (),
) -> None:
    """Fit the specification and the weights of a layer to one call.

    Args:
        layer: the observed layer.
        others: layers of its model in the same call.
        config: configuration of its model, used only for fields that a short input cannot show.
        found: collects the fields.

    Raises:
        ValueError: if a stage is not explained; the message names the first one.
    """
    values = layer.values
    missing = [name for name in ("q", "k", "v", "output") if name not in values]
    if missing or layer.tapped.calls[0].past:
        reason = layer.tapped.not_seen or (f"no {' or '.join(missing)}" if missing else "a cache")
        raise InputError(
            "the layer", "be attention whose queries, keys and values are seen", reason
        )
    q, k, v = (values[name] for name in "qkv")
    batch_size, num_heads, num_tokens, head_dim = q.shape
    segments = values.get("segment_ids")
    longest = (
        num_tokens if segments is None else int(np.unique(segments, return_counts=True)[1].max())
    )
    if longest < LEAST_TOKENS or batch_size * num_tokens < 2 * LEAST_TOKENS:
        rule = f"be at least {LEAST_TOKENS} tokens of 2 sequences, or {2 * LEAST_TOKENS} of one"
        raise InputError("inputs", rule, f"{longest} of {batch_size * num_tokens // longest}")
    if layer.is_cross and k.shape[2] < LEAST_TOKENS:
        raise InputError(
            "inputs", f"be at least {LEAST_TOKENS} tokens to attend to", f"{k.shape[2]}"
        )
    is_even = np.ptp(v, axis=2).max() <= ALIKE * np.abs(v).max()
    if is_even and "attn_weights" not in values:  # any attention weights return the same context
        raise InputError("inputs", "differ between tokens", "equal values at all of them")
    found.add("num_heads", num_heads, "heads of the queries that attention receives")
    found.add("num_kv_heads", k.shape[1], HOW_HEADS)
    found.add("head_dim", head_dim, "features of those heads")
    found.fields["value_head_dim"] = v.shape[-1]
    _fit_projections(layer, config, found, others)
    _fit_output(layer, found)
    found.words = words_of(layer, found.ends) | found.received
    found.from_call |= parts_from_call(layer, _named_in(found.words, layer))
    layer = with_segments(between(layer, found.ends), found)
    found.add("d_model", layer.values["output"].shape[-1], "width of the output")
    found.add("d_in", layer.values["input"].shape[-1], "width of the input of queries")
    if layer.is_cross:
        found.add("d_kv", layer.values["key_input"].shape[-1], "width of the input of keys")
    fit_scale(layer, found)
    layer = without_call_mask(without_padding(layer), found)
    fit_mask(layer, found, layer.values["q"].shape[2])
    fit_bias(layer, config, found)


def _named_in(words: Mapping[str, str], layer: ObservedLayer) -> set[str]:
    """Return the arguments of a layer that its inputs or its output are described with, and those
    equal to them.
    """
    in_words = {word.strip(",") for text in words.values() for word in text.split()}
    named = {name: x for name, x in layer.arguments.items() if name in in_words}
    equal = [
        name
        for name, x in layer.arguments.items()
        if any(np.array_equal(x, other) for other in named.values())
    ]
    return {*named, *equal}


# ---- Projections, norms and RoPE -----------------------------------------------------------------


def _fit_projections(
    layer: ObservedLayer, config: Mapping[str, Any], found: Fit, others: Sequence[ObservedLayer]
) -> None:
    ropes = ropes_of(config, layer.values["q"].shape[-1], layer.tapped.kind)
    fit_clip(layer, layer.linears(), found)
    limit = found.fields.get("clip_qkv")
    is_own = all(
        _returned(layer, part, layer.values[part], ropes, limit) is not None for part in "kv"
    )
    source = None if is_own else kv_source_of(layer, others)
    if source is not None:
        found.add(
            "shared_kv", True, f"keys and values are those of {source.tapped.name}, bit for bit"
        )
        found.received = words_of_source(layer, others)
    heads = {
        part: _fit_heads(layer, part, ropes, config, found) for part in ("q" if source else "qkv")
    }
    q = heads["q"]
    if source is None and is_latent(heads["k"], heads["v"]):
        fit_latents(layer, found, q, heads["k"], heads["v"])
        return
    if q.factor != 1.0 and not found.is_scaled_before:
        raise InputError("q", "be the output of a projection", f"{q.factor:.4g} times that")
    biases = []
    sides = {"q": "query", "k": "key", "v": "value"}
    for part, traced in heads.items():
        if len(traced.modules) != 1:
            raise InputError(f"{part}_proj", "return the features of the heads", "several that do")
        (each,) = traced.modules
        biases.append(found.project(f"{part}_proj", each, traced.places))
        found.ends[sides[part]] = end_of(each)
        if part != "q":
            _tell_copies(part, traced, layer.values["q"].shape[1], found)
    found.add("qkv_bias", tuple(biases) if source is None else biases[0], "the projections add one")


def _tell_copies(part: str, traced: Traced, num_heads: int, found: Fit) -> None:
    """Record as evidence that a projection returns fewer key or value heads than attention
    receives, and their order.

    Consecutive copies are grouped-query attention, and already removed. Copies in another order are
    not: its query heads n use key head n // (N / K). So the weights hold copies, and only the
    evidence shows which heads are equal.
    """
    heads = traced.places.reshape(traced.heads.shape[1], -1)
    first_with = {rows.tobytes(): head for head, rows in reversed(list(enumerate(heads)))}
    distinct = sorted(first_with.values())
    if len(distinct) == len(heads):
        return
    order = [distinct.index(first_with[rows.tobytes()]) for rows in heads]
    module, count, group = traced.modules[0].name, len(distinct), num_heads // len(heads)
    listed = " ".join(map(str, np.repeat(order, group)))
    how = f"{module} returns {count} heads, and query heads use {listed} of them"
    if order == [head % count for head in range(len(order))]:
        used = "n" if group == 1 else f"n // {group}"
        how += (
            f": tiled, head {used} mod {count} for query head n, and not n // {num_heads // count}"
        )
    elif order == [head * count // len(order) for head in range(len(order))]:
        how += f": repeated, head n // {num_heads // count} for query head n"
    how += f"; the rows of {part}_proj are copies"
    name = "num_kv_heads" if part == "k" else "num_kv_heads of values"
    if part == "k":
        found.evidence[:] = [each for each in found.evidence if each.how != HOW_HEADS]
    found.evidence.append(Evidence(name, len(heads), how))


def fit_clip(layer: ObservedLayer, projections: Sequence[Submodule], found: Fit) -> None:
    """Fit the clipping limit of projection outputs, if values reach it."""
    v = layer.values["v"]
    limits = None, float(str(np.abs(v).max()))
    plain, clipped = (trace(v, projections, limit=limit) for limit in limits)
    is_plain, is_clipped = (
        each is not None and np.array_equal(each.heads, v) for each in (plain, clipped)
    )
    if "clip_qkv" not in found.fields and is_clipped and not is_plain:
        found.add(
            "clip_qkv", limits[1], "the largest values, which several projected ones would pass"
        )


def _fit_heads(
    layer: ObservedLayer, part: str, ropes: list[Rope], config: Mapping[str, Any], found: Fit
) -> Traced:
    """Fit norms, RoPE and factors of projected heads, and return the heads before them."""
    heads, norm, rope, module = layer.values[part], None, None, ""
    while True:
        traced = _returned(layer, part, heads, ropes, found.fields.get("clip_qkv"))
        if traced is None:
            raise InputError(
                part,
                "be made of features that a projection or a norm returns",
                f"{part} of {heads.shape}",
            )
        before = traced.heads * np.float32(traced.factor)
        factors = factors_of(before, heads) if part == "q" else None
        if factors is not None:
            heads = _untempered(layer, before, heads, factors, config, found)
        turned = fit_rope(before, heads, ropes)
        if turned is not None and (rope is not None or part == "v"):
            raise InputError(
                "rope", "turn queries and keys, and once", f"{part} turned by {turned}"
            )
        if turned is not None and norm is not None:
            norm = norm.replace(after_rope=True)
        rope = rope or turned
        if traced.modules[0].is_linear:
            break
        if norm is not None:
            raise InputError(f"{part}_norm", "be one norm", "two")
        norm, weights, heads = fit_norm(part, traced)
        module = traced.modules[0].name
        found.normalize(f"{part}_norm", module, weights)
    found.agree("v_norm" if part == "v" else "qk_norm", norm)
    if norm is not None:
        found.evidence.append(Evidence(f"{part}_norm", norm, f"{module} recomputed from its input"))
    if part != "v":
        found.agree("rope", rope)
    _check_axes(layer, rope)
    if part == "q" and rope is not None:
        how = "angles of pairs of queries and keys, before and after"
        how += "" if rope.sections is None else "; they are those of integers on each axis"
        found.evidence.append(Evidence("rope", rope, how, heads.shape[2]))
    if (
        part == "q"
        and layer.tapped.scale == 1.0
        and math.isclose(traced.factor, heads.shape[-1] ** -0.5)
    ):
        found.is_scaled_before = True
    elif part != "q" and traced.factor != 1.0:
        raise InputError(part, "be the output of a projection", f"{traced.factor:.4g} times that")
    return traced


def _check_axes(layer: ObservedLayer, rope: Rope | None) -> None:
    """Reject RoPE whose axes differ from those of the model's positions."""
    places = layer.values.get("positions")
    if rope is not None and places is not None and (rope.sections is None) != (places.ndim == 2):
        known = "one axis" if places.ndim == 2 else f"{len(places)} that are the same"
        raise InputError("positions", "have one axis for each axis of RoPE", known)


def positions_on_axes(layer: ObservedLayer, found: Fit) -> np.ndarray:
    """Return the positions (axes, B, T) of a layer's tokens, from the rotation of its queries by
    RoPE with several axes.

    Raises:
        ValueError: if no positions explain the rotation.
    """
    q, rope = layer.values["q"], found.fields["rope"]
    traced = _returned(layer, "q", q, [rope], found.fields.get("clip_qkv"))
    if traced is None:
        raise InputError(
            "q", "be made of features that a projection or a norm returns", f"q of {q.shape}"
        )
    return positions_of(traced.heads * np.float32(traced.factor), q, rope)


def _untempered(
    layer: ObservedLayer,
    before: np.ndarray,
    heads: np.ndarray,
    factors: np.ndarray,
    config: Mapping[str, Any],
    found: Fit,
) -> np.ndarray:
    """Fit the temperature of queries, and return them without it."""
    num_tokens = heads.shape[2]
    positions = layer.values["positions"] if "positions" in layer.values else np.arange(num_tokens)
    temperature = fit_temperature(factors, positions.reshape(-1, num_tokens)[0], config)
    if temperature is None or "temperature" in found.fields:
        raise InputError(
            "q",
            "be multiplied by a temperature of its positions",
            f"factors {np.round(factors, 4).tolist()}",
        )
    how = "factor of the length of queries at each position"
    found.add("temperature", temperature, how, up_to=num_tokens)
    exact = (heads / factors[:, None]).astype(heads.dtype)
    return before if is_close(before, exact) else exact


def _returned(
    layer: ObservedLayer, part: str, heads: np.ndarray, ropes: list[Rope], limit: float | None
) -> Traced | None:
    """Trace heads to norms, otherwise to linear submodules."""
    amplitudes = tuple(dict.fromkeys((1.0, *(rope.attention_factor for rope in ropes))))
    for pool, most in ((layer.norms(), None), (layer.linears(), limit)):
        if (traced := trace(heads, pool, amplitudes, most)) is not None:
            return traced
    held = [x for x in vars(layer.module).values() if type(x) is float and x > 0.0]
    for factor in [heads.shape[-1] ** -0.5, *held] if part == "q" else held:
        if (traced := trace(heads, layer.linears(), (factor,))) is not None:
            return replace(traced, factor=factor)
    return None


# ---- Output --------------------------------------------------------------------------------------


def _fit_output(layer: ObservedLayer, found: Fit) -> None:
    values = layer.values
    if "context" not in values:
        raise InputError("context", "be returned by the attention function", "nothing")
    context = features_of(values["context"])
    if np.array_equal(context, flat(values["output"])):
        found.add("out_proj", False, "the output is the context")
        return
    for each in layer.linears():
        entered = flat(each.given)
        if entered.shape != context.shape or end_of(each) in found.ends.values():
            continue
        is_made = np.array_equal(entered, context) or fit_context_norm(layer, entered, found)
        if not is_made and not _fit_gate(layer, entered, found):
            continue
        has_bias = found.project("out_proj", each, np.arange(each.result.shape[-1]))
        words = {"gate": "the context, times its gate,", "context_norm": "the context, normalized,"}
        received = next(
            (said for name, said in words.items() if name in found.fields), "the context"
        )
        found.add("out_bias", has_bias, f"{each.name} receives {received} and returns the output")
        found.ends["output"] = end_of(each)
        return
    raise InputError("output", "be a projection of the context", "another")


def _fit_gate(layer: ObservedLayer, entered: np.ndarray, found: Fit) -> bool:
    """Fit the gate before an output projection; return whether there is one."""
    query = layer.submodule(*found.ends["query"])
    for gate, each, places, bias, added in gates_of(layer, entered):
        if np.array_equal(flat(each.given), flat(query.given)):
            has_bias = found.project("gate_proj", each, places)
            how = f"the context is multiplied by the sigmoid of the output of {each.name}"
            if bias:
                added = added[places] + found.weights.get("gate_proj.bias", 0.0)
                found.weights["gate_proj.bias"], found.names["gate_proj.bias"] = added, bias
                how += f" plus {bias}"
            found.add("gate", gate.replace(bias=has_bias or bool(bias)), how)
            found.ends["gate"] = end_of(each)
            return True
    return False

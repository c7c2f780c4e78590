"""Fit a specification to what an attention layer was seen to do. Each fit says how it knows what it found."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from mha_spec import AttentionSpec, Norm, Refusal
from parity.core.arrays import to_numpy
from parity.core.weights import Weights
from parity.identification.observe import ObservedLayer, Submodule, columns_of, features_of, matrix_of
from parity.identification.rotation import fit_rope, ropes_of
from parity.tapping.record import is_hidden

LEAST_TOKENS = 8
"""Tokens that tell features and angles apart."""

CLOSE = 3e-5
"""Largest error of a norm or a projection that is recomputed, of its largest output, in float32."""


@dataclass(frozen=True)
class Evidence:
    """Evidence for a field of a specification.

    Attributes:
        field: its name.
        value: what was found.
        how: in words.
        up_to: the number of tokens up to which it was seen; None if it does not depend on that.
        is_seen: False if it was read, from an attribute or a configuration, and the input was too short to show it.
    """

    field: str
    value: Any
    how: str
    up_to: int | None = None
    is_seen: bool = True

    def __str__(self) -> str:
        seen = f", seen up to {self.up_to} tokens" if self.up_to is not None and self.is_seen else ""
        return f"{self.field}={self.value!r}: {self.how}{seen}{'' if self.is_seen else ', not seen'}"


@dataclass
class Fit:
    """A layer as far as it has been fitted.

    Attributes:
        fields: of the specification.
        weights: canonical weights.
        names: the parameter of the module that each weight is, or is part of.
        is_causal: whether queries attend to no later key.
        evidence: how each field was found.
        is_scaled_before: whether queries are multiplied by the scale, instead of scores.
    """

    fields: dict[str, Any] = field(default_factory=dict)
    weights: Weights = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    is_causal: bool = False
    evidence: list[Evidence] = field(default_factory=list)
    is_scaled_before: bool = False

    def add(self, name: str, value: Any, how: str, **seen: Any) -> None:
        """Take a field of the specification, and how it was found."""
        self.fields[name] = value
        self.evidence.append(Evidence(name, value, how, **seen))

    @property
    def spec(self) -> AttentionSpec:
        """The specification of what was fitted."""
        return AttentionSpec(**self.fields)


def fit(layer: ObservedLayer, config: Mapping[str, Any]) -> Fit:
    """Fit the specification and the weights of a layer to one call.

    Args:
        layer: what it was seen to do.
        config: of its model, for what a short input cannot show; it decides nothing that is seen.

    Raises:
        ValueError: naming the first stage that nothing explains.
    """
    values, found = layer.values, Fit()
    missing = [name for name in ("input", "q", "k", "v", "output") if name not in values]
    if missing or layer.tapped.calls[0].past or "value_input" in values:
        reason = f"no {' or '.join(missing)}" if missing else "a cache, or values of another input than keys"
        raise Refusal("the layer", "be attention whose heads the attention function receives", reason)
    q, k, v = (values[name] for name in "qkv")
    batch_size, num_heads, num_tokens, head_dim = q.shape
    if batch_size < 2 or num_tokens < LEAST_TOKENS:
        raise Refusal("inputs", f"be at least {LEAST_TOKENS} tokens of 2 sequences", f"{num_tokens} of {batch_size}")
    found.add("d_model", values["output"].shape[-1], "width of the output")
    found.add("num_heads", num_heads, "heads of the queries that the attention function received")
    found.add("num_kv_heads", k.shape[1], "heads of the keys that the attention function received")
    found.add("head_dim", head_dim, "features of those heads")
    found.add("d_in", values["input"].shape[-1], "width of the input")
    found.fields["value_head_dim"] = v.shape[-1]
    if layer.is_cross:
        found.add("d_kv", values["key_input"].shape[-1], "width of the sequence that it attends to")
    _fit_projections(layer, config, found)
    _fit_scale(layer, found)
    _fit_mask(layer, found, num_tokens)
    _fit_output(layer, found)
    return found


# ---- Projections, norms and RoPE -------------------------------------------------------------------------------------


def _fit_projections(layer: ObservedLayer, config: Mapping[str, Any], found: Fit) -> None:
    biases, ropes = [], ropes_of(config, layer.values["q"].shape[-1], layer.tapped.kind)
    factors = dict.fromkeys((1.0, *(rope.attention_factor for rope in ropes)))
    for part in "qkv":
        heads = layer.values[part]
        before = next((x for factor in factors if (x := _before_rope(layer, heads, factor)) is not None), None)
        if before is None and part == "q" and layer.tapped.scale == 1.0:
            before = _before_scale(layer, heads)
            heads = heads if before is None else before[0]
            found.is_scaled_before = before is not None
        if before is None:
            raise Refusal(part, "be made of features that a projection or a norm returns", f"{part} of {heads.shape}")
        source, is_normed = before
        if part != "v":
            rope = fit_rope(source, heads, ropes)
            _agree(found, "rope", rope)
            if part == "q" and rope is not None:
                how = "angles of pairs of queries and keys, before and after"
                found.evidence.append(Evidence("rope", rope, how, heads.shape[2]))
        if is_normed:
            source = _fit_norm(layer, part, source, found)
        biases.append(_fit_projection(layer, part, source, found))
    found.add("qkv_bias", tuple(biases), "the projections add one")


def _agree(found: Fit, name: str, value: Any) -> None:
    """Take a field that queries and keys must share."""
    if name in found.fields and found.fields[name] != value:
        raise Refusal(name, "be the same for queries and keys", f"{found.fields[name]} and {value}")
    found.fields[name] = value


def _before_rope(layer: ObservedLayer, heads: np.ndarray, factor: float) -> tuple[np.ndarray, bool] | None:
    """Return the heads (B, heads, T, H) before RoPE, and whether a norm returned them.

    The first token is not turned, so its features are, bit for bit, those that were, times the factor of RoPE.
    """
    batch_size, num_heads, num_tokens, head_dim = heads.shape
    for pool, is_normed in ((layer.norms(), True), (layer.linears(), False)):
        tokens = [_as_tokens(each.result, batch_size, num_tokens) for each in pool]
        tokens = [each for each in tokens if each is not None]
        if not tokens:
            continue
        features = np.concatenate(tokens, axis=-1)  # (B, T, features)
        first = features[:, 0] * np.float32(factor)
        places = {bits: place for place, bits in enumerate(columns_of(first))}
        wanted = columns_of(features_of(heads[:, :, :1]))
        order = [places.get(bits, -1) for bits in wanted]
        if -1 not in order:
            picked = features[..., order].reshape(batch_size, num_tokens, num_heads, head_dim)
            return picked.transpose(0, 2, 1, 3), is_normed
    return None


def _before_scale(layer: ObservedLayer, heads: np.ndarray) -> tuple[np.ndarray, bool] | None:
    """Return queries before they were multiplied by the scale of scores, as Whisper does."""
    scale = heads.shape[-1] ** -0.5
    before = _before_rope(layer, heads, scale)
    return before if before is not None and np.array_equal(before[0] * np.float32(scale), heads) else None


def _as_tokens(x: np.ndarray, batch_size: int, num_tokens: int) -> np.ndarray | None:
    """Return an output as (B, T, features), be it tokens or heads; None if it is neither."""
    if x.ndim == 3 and x.shape[:2] == (batch_size, num_tokens):
        return x
    if x.ndim == 4 and x.shape[0] == batch_size and num_tokens in x.shape[1:3]:
        x = x if x.shape[1] == num_tokens else x.transpose(0, 2, 1, 3)
        return x.reshape(batch_size, num_tokens, -1)
    return None


def _fit_norm(layer: ObservedLayer, part: str, heads: np.ndarray, found: Fit) -> np.ndarray:
    """Fit the norm that returned heads, and return the heads that it received."""
    batch_size, num_heads, num_tokens, head_dim = heads.shape
    target = features_of(heads)
    for each in layer.norms():
        result, given = (_as_tokens(x, batch_size, num_tokens) for x in (each.result, each.given))
        if result is None or given is None or not np.array_equal(result.reshape(len(target), -1), target):
            continue
        over = "width" if each.result.ndim == 3 and num_heads > 1 else "head"
        norm, weights = _norm_of(each, over)
        _agree(found, "v_norm" if part == "v" else "qk_norm", norm)
        if part != "k":
            found.evidence.append(Evidence(f"{part}_norm", norm, f"{each.name} recomputed from its input"))
        for leaf, weight in weights.items():
            found.weights[f"{part}_norm.{leaf}"] = weight
            found.names[f"{part}_norm.{leaf}"] = f"{each.name}.{leaf}"
        return given.reshape(batch_size, num_tokens, num_heads, head_dim).transpose(0, 2, 1, 3)
    raise Refusal(f"{part}_norm", "be one norm over heads or the width", "none that returned these features")


def _norm_of(each: Submodule, over: Literal["head", "width"]) -> tuple[Norm, Weights]:
    """Return the norm that recomputes the output of a submodule, and its parameters."""
    parameters = {name: to_numpy(x) for name, x in each.module.named_parameters()}
    eps = next((getattr(each.module, name) for name in ("eps", "variance_epsilon") if hasattr(each.module, name)), 1e-6)
    eps = float(np.finfo(np.float32).eps) if eps is None else eps  # as torch does
    weight, bias = parameters.get("weight"), parameters.get("bias")
    factors: dict[Any, Any] = {None: 1.0} if weight is None else {"w": weight, "1+w": 1.0 + weight}
    x = each.given.astype(np.float64)
    for kind in ("rms", "layer"):
        centered = x - x.mean(-1, keepdims=True) if kind == "layer" else x
        normed = centered / np.sqrt((centered**2).mean(-1, keepdims=True) + eps)
        for word, factor in factors.items():
            made = normed * factor if bias is None else normed * factor + bias
            if _is_close(made, each.result):
                leaves = {} if weight is None else {"weight": weight} | ({} if bias is None else {"bias": bias})
                return Norm(kind=kind, over=over, weight=word, bias=bias is not None, eps=eps), leaves
    raise Refusal(each.name, "be an RMS or a layer norm", type(each.module).__name__)


def _fit_projection(layer: ObservedLayer, part: str, heads: np.ndarray, found: Fit) -> bool:
    """Fit the projection that returned heads; return whether it has a bias."""
    target, places = features_of(heads), {}
    for each in layer.linears():
        flat = each.result.reshape(-1, each.result.shape[-1])
        if flat.shape[0] == target.shape[0]:
            places |= {bits: (each, place) for place, bits in enumerate(columns_of(flat))}
    wanted = list(columns_of(target))
    order = [places[bits] for bits in wanted if bits in places]
    if len(order) < len(wanted) or len({each.name for each, _ in order}) != 1:
        raise Refusal(f"{part}_proj", "return the features of the heads", "none that does")
    each, rows = order[0][0], [place for _, place in order]
    x = _flat(layer.values["key_input" if layer.is_cross and part != "q" else "input"])
    if not np.array_equal(_flat(each.given), x):
        raise Refusal(f"{part}_proj", "receive the input of the layer", f"{each.name} received another")
    weight, bias = matrix_of(each.module)[rows], getattr(each.module, "bias", None)
    made = x.astype(np.float64) @ weight.T.astype(np.float64)
    found.weights[f"{part}_proj.weight"] = np.ascontiguousarray(weight)
    found.names[f"{part}_proj.weight"] = f"{each.name}.weight"
    if bias is not None:
        found.weights[f"{part}_proj.bias"] = to_numpy(bias)[rows]
        found.names[f"{part}_proj.bias"] = f"{each.name}.bias"
        made = made + found.weights[f"{part}_proj.bias"]
    if not _is_close(made, target):
        raise Refusal(f"{part}_proj", "be the product with one matrix", f"{each.name} returned another")
    return bias is not None


# ---- Scores, mask and output -----------------------------------------------------------------------------------------


def _fit_scale(layer: ObservedLayer, found: Fit) -> None:
    scale, default = layer.tapped.scale, layer.values["q"].shape[-1] ** -0.5
    if found.is_scaled_before:
        found.evidence.append(Evidence("scale", default, "queries are multiplied by it"))
    elif scale is not None and not math.isclose(scale, default, rel_tol=1e-6):
        found.add("scale", scale, "what the attention function was told")
    if layer.tapped.soft_cap is not None:
        found.add("soft_cap", layer.tapped.soft_cap, "what the attention function was told", is_seen=False)
    sinks = getattr(layer.module, "sinks", None)
    if sinks is not None:
        found.add("sinks", True, "parameter sinks of the module")
        found.weights["sinks"], found.names["sinks"] = to_numpy(sinks), "sinks"


def _fit_mask(layer: ObservedLayer, found: Fit, num_tokens: int) -> None:
    mask = layer.values.get("mask")
    if layer.is_cross:
        if mask is not None and is_hidden(mask).any():
            raise Refusal("the mask", "hide nothing of another sequence", "one that hides keys")
        return
    places = np.arange(num_tokens)
    distances = places[:, None] - places
    if mask is None:
        hidden = distances < 0 if layer.tapped.is_causal else np.zeros_like(distances, bool)
    else:
        hidden = is_hidden(np.broadcast_to(mask, (*mask.shape[:2], num_tokens, num_tokens)))
        if not (hidden == hidden[:1, :1]).all() or ("is_real" in layer.values):
            raise Refusal("the mask", "be the same for all sequences and heads, without padding", str(mask.shape))
        if mask.dtype != np.bool_ and np.any(mask[~is_hidden(mask)] != 0):
            raise Refusal("the mask", "only hide keys", "numbers that are added to scores")
        hidden = hidden[0, 0]
    found.is_causal = bool((hidden | (distances >= 0)).all() and hidden[distances < 0].all())
    own = distances >= 0 if found.is_causal else np.ones_like(hidden)
    if hidden[own].any():
        _fit_span(hidden, own, distances, found, num_tokens)
    else:
        _read_window(layer, found, num_tokens)


def _fit_span(hidden: np.ndarray, own: np.ndarray, distances: np.ndarray, found: Fit, num_tokens: int) -> None:
    window = int(np.abs(distances)[hidden & own].min())
    if np.array_equal(hidden & own, (np.abs(distances) >= window) & own):
        found.add("window_size", window, "the mask", up_to=num_tokens)
        return
    places = np.arange(num_tokens)
    for chunk in range(1, num_tokens):
        if np.array_equal(hidden & own, (places[:, None] // chunk != places // chunk) & own):
            found.add("chunk_size", chunk, "the mask", up_to=num_tokens)
            return
    raise Refusal("the mask", "be causal, a window or chunks", "another pattern")


def _read_window(layer: ObservedLayer, found: Fit, num_tokens: int) -> None:
    window = layer.tapped.window
    if window is not None and window < num_tokens:
        raise Refusal("the window", "hide keys", f"{window} and a mask of {num_tokens} tokens that hides none")
    if window is not None:
        found.add("window_size", window, "what the attention function was told", is_seen=False)


def _fit_output(layer: ObservedLayer, found: Fit) -> None:
    values = layer.values
    if "context" not in values:
        raise Refusal("context", "be what the attention function returns", "nothing")
    context = features_of(values["context"])
    output = _flat(values["output"])
    if np.array_equal(context, output):
        found.add("out_proj", False, "the output is the context")
        return
    for each in layer.linears():
        if np.array_equal(_flat(each.given), context) and np.array_equal(_flat(each.result), output):
            bias = getattr(each.module, "bias", None)
            found.weights["out_proj.weight"] = np.ascontiguousarray(matrix_of(each.module))
            found.names["out_proj.weight"] = f"{each.name}.weight"
            found.add("out_bias", bias is not None, f"{each.name} receives the context and returns the output")
            if bias is not None:
                found.weights["out_proj.bias"] = to_numpy(bias)
                found.names["out_proj.bias"] = f"{each.name}.bias"
            return
    raise Refusal("output", "be a projection of the context", "another")


def _flat(x: np.ndarray) -> np.ndarray:
    return x.reshape(-1, x.shape[-1])


def _is_close(made: np.ndarray, seen: np.ndarray) -> bool:
    return bool(np.abs(made - seen).max() <= CLOSE * np.abs(seen).max())

"""Fit the steps between products and softmax: scale, mask and biases."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from mha_spec import InputError
from parity.explain.fitting.distances import band_of, chunk_of, key_distances
from parity.explain.identification.biases import (
    AddedNumbers,
    added_to,
    fit_alibi,
    fit_relative_bias,
    products_of,
    scored,
)
from parity.explain.identification.evidence import Evidence, FittedLayer
from parity.explain.identification.observe import ObservedLayer
from parity.explain.identification.products import fit_relative_products
from parity.explain.identification.trace import CLOSE
from parity.measure.core.arrays import to_numpy
from parity.port.tapping.record import is_hidden


def fit_scale(layer: ObservedLayer, fitted: FittedLayer) -> None:
    """Fit the scale, the soft cap and the sinks of scores."""
    scale, default = layer.tapped.scale, fitted.spec.score_scale
    has_scores = "scores" in layer.values
    how_scale = how_cap = "argument of the attention function"
    if has_scores:
        how_scale, how_cap = "factor of the scores", "tanh of scores"
    if fitted.is_scaled_before:
        fitted.evidence.append(Evidence("scale", default, "queries are multiplied by it"))
    elif scale is not None and not math.isclose(scale, default, rel_tol=1e-6):
        fitted.add("scale", scale, how_scale)
    if layer.tapped.soft_cap is not None:
        fitted.add("soft_cap", layer.tapped.soft_cap, how_cap, is_observed=has_scores)
    sinks = getattr(layer.module, "sinks", None)
    num_heads = layer.values["q"].shape[1]
    if tuple(getattr(sinks, "shape", ())) == (num_heads,):
        fitted.add("sinks", True, "parameter sinks of the module")
        fitted.weights["sinks"], fitted.names["sinks"] = to_numpy(sinks), "sinks"


# ---- The mask ------------------------------------------------------------------------------------


def fit_mask(layer: ObservedLayer, fitted: FittedLayer) -> None:
    """Fit causality, a window or chunks to the keys that the mask hides.

    Raises:
        ValueError: if the mask has a different pattern.
    """
    num_tokens = layer.values["q"].shape[2]
    hidden = hidden_keys(layer)
    if layer.is_cross:
        if hidden.any():
            raise InputError("the mask", "hide nothing of another sequence", "one that hides keys")
        return
    distances = key_distances(num_tokens, num_tokens)
    is_same_segment = _same_segments(layer, num_tokens)
    if "mask" in layer.values and not hidden[~is_same_segment].all():
        rule = f"hide other segments of {fitted.from_call['segment_ids']}"
        raise InputError("the mask", rule, "one that does not")
    hidden = hidden | ~is_same_segment
    fitted.is_causal = bool(hidden[distances > 0].all())
    cells = is_same_segment
    if fitted.is_causal:
        cells = cells & (distances <= 0)
    if hidden[cells].any():
        _fit_span(hidden, cells, fitted)
    else:
        _read_window(layer, fitted, num_tokens)


def hidden_keys(layer: ObservedLayer) -> np.ndarray:
    """Return the keys that the mask hides, (T, S).

    Raises:
        ValueError: if they differ between sequences or heads.
    """
    mask = layer.values.get("mask")
    num_queries, num_keys = layer.values["q"].shape[2], layer.values["k"].shape[2]
    if mask is None:
        hidden = np.zeros((num_queries, num_keys), bool)
        if layer.tapped.is_causal and not layer.is_cross:
            hidden[key_distances(num_queries, num_keys) > 0] = True
        return hidden
    hidden = is_hidden(np.broadcast_to(mask, (*mask.shape[:2], num_queries, num_keys)))
    if not (hidden == hidden[:1, :1]).all() or "is_real" in layer.values:
        rule = "be the same for all sequences and heads, without padding"
        raise InputError("the mask", rule, str(mask.shape))
    return hidden[0, 0]


def _same_segments(layer: ObservedLayer, num_tokens: int) -> np.ndarray:
    """Return which keys are in the segment of each query, (T, T).

    Raises:
        ValueError: if segments differ between sequences.
    """
    ids = layer.values.get("segment_ids")
    if ids is None:
        return np.ones((num_tokens, num_tokens), bool)
    if (ids != ids[:1]).any():
        raise InputError("segments", "be the same for all sequences", str(ids.shape))
    return ids[0][:, None] == ids[0]


def _fit_span(hidden: np.ndarray, cells: np.ndarray, fitted: FittedLayer) -> None:
    """Fit a window or chunks to a mask (T, T).

    Args:
        hidden: the mask.
        cells: keys that no causal mask and no other segment hides.
        fitted: collects the field.

    Raises:
        ValueError: if the mask is neither.
    """
    num_tokens = len(hidden)
    band = band_of(hidden, key_distances(num_tokens, num_tokens), cells)
    if band is not None and (fitted.is_causal or band.last == -band.first):
        fitted.add("window_size", 1 - band.first, "the mask", up_to=num_tokens)
        return
    chunk = chunk_of(hidden, cells)
    if chunk is None:
        raise InputError("the mask", "be causal, a window or chunks", "a different pattern")
    fitted.add("chunk_size", chunk, "the mask", up_to=num_tokens)


def _read_window(layer: ObservedLayer, fitted: FittedLayer, num_tokens: int) -> None:
    """Add a window that is longer than the input."""
    window = layer.tapped.window
    if window is None:
        return
    if window < num_tokens:
        got = f"{window} and a mask of {num_tokens} tokens that hides none"
        raise InputError("the window", "hide keys", got)
    fitted.add("window_size", window, "argument of the attention function", is_observed=False)


# ---- Biases --------------------------------------------------------------------------------------


def fit_bias(layer: ObservedLayer, config: Mapping[str, Any], fitted: FittedLayer) -> None:
    """Fit the biases of scores, in addition to the mask.

    Args:
        layer: the observed layer.
        config: configuration of its model, for distances that a short input cannot show.
        fitted: collects the fields.

    Raises:
        ValueError: if no field expresses them.
    """
    no_products = np.zeros(1)
    try:
        _fit_constant_bias(layer, config, fitted, no_products)
    except InputError:
        # The values may depend on queries or keys: then they differ between sequences.
        added, hidden = _added_per_sequence(layer), hidden_keys(layer)
        if added is None:
            raise
        products = fit_relative_products(layer, added, hidden, config, fitted)
        if products is None:
            raise
        _fit_constant_bias(layer, config, fitted, products)


def _fit_constant_bias(
    layer: ObservedLayer, config: Mapping[str, Any], fitted: FittedLayer, products: np.ndarray
) -> None:
    """Fit the values that are added to the scores of each sequence alike.

    Args:
        layer: the observed layer.
        config: configuration of its model.
        fitted: collects the fields.
        products: values that are known to be added, (B, N, T, S), or zeros.

    Raises:
        ValueError: if they are neither ALiBi nor from a table.
    """
    added = _added(layer, products)
    if added is None or added.is_zero:
        return
    num_tokens = len(added.hidden)
    alibi = fit_alibi(added, fitted.spec.score_scale)
    if alibi is not None:
        fitted.add("alibi", alibi, "values that are added to scores", up_to=num_tokens)
        return

    tables = {}
    for name, parameter in layer.model.named_parameters():
        if parameter.ndim == 2 and parameter.shape[1] == len(added.values):
            tables[name] = to_numpy(parameter)
    relative = fit_relative_bias(added, tables, _distances_in(layer, config))
    if relative is None:
        rule = "be a mask, ALiBi or a table for distances or positions on a grid"
        got = f"values up to {np.abs(added.values).max():.2g}"
        raise InputError("values added to scores", rule, got)
    bias, name = relative
    how = f"{name} is added to scores"
    fitted.add("relative_bias", bias, how, up_to=num_tokens)
    fitted.weights["relative_bias"] = tables[name]
    fitted.names["relative_bias"] = name.removeprefix(f"{layer.tapped.name}.")


def _distances_in(layer: ObservedLayer, config: Mapping[str, Any]) -> list[int]:
    """Return the integers of a layer and a configuration that may be the largest distance."""
    settings = [*vars(layer.module).items(), *config.items()]
    return [value for name, value in settings if type(value) is int and "distance" in name]


def _added_per_sequence(layer: ObservedLayer) -> np.ndarray | None:
    """Return the values added to scores of each sequence, (B, N, T, S), 0 for hidden keys; None if
    none are observed.
    """
    values, mask = layer.values, layer.values.get("mask")
    hidden = hidden_keys(layer)
    products = products_of(values["q"], values["k"])
    if "scores" in values:
        if layer.tapped.soft_cap is not None:
            return None
        return np.where(hidden, 0.0, values["scores"] - layer.scale * products)
    if mask is None or mask.dtype == np.bool_:
        return None
    return np.broadcast_to(np.where(hidden, 0.0, mask), products.shape)


def _added(layer: ObservedLayer, products: np.ndarray) -> AddedNumbers | None:
    """Return the values added to scores in addition to known products with vectors, from the
    scores or from a mask of floats; None if neither is observed.
    """
    values, mask = layer.values, layer.values.get("mask")
    hidden = hidden_keys(layer)
    if "scores" in values:
        scale, soft_cap = layer.scale, layer.tapped.soft_cap
        expected = scored(products_of(values["q"], values["k"]), scale, soft_cap) + products
        description = f"scale={scale:.6g}, soft_cap={soft_cap}"
        return added_to(values["scores"], expected, hidden, description)
    if mask is None or mask.dtype == np.bool_:
        return None
    numbers = np.where(hidden, 0.0, mask - products)
    if products.any():
        # The rest of a subtraction has rounding errors of the products.
        rounding = CLOSE * np.abs(products).max()
        numbers = np.where(np.abs(numbers) <= rounding, 0.0, numbers)
    if (numbers != numbers[:1]).any():
        rule = "be the same for all sequences"
        raise InputError("values added to scores", rule, str(mask.shape))
    num_heads = values["q"].shape[1]
    of_heads = np.broadcast_to(numbers[0], (num_heads, *numbers.shape[2:]))
    return AddedNumbers(of_heads, hidden, 1e-6 * float(np.abs(of_heads).max()))

"""Fit the steps between products and softmax: scale, mask and biases."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from mha_spec import InputError
from parity.explain.identification.biases import (
    Added,
    added_to,
    fit_alibi,
    fit_relative_bias,
    scored,
)
from parity.explain.identification.found import Evidence, Fit
from parity.explain.identification.observe import ObservedLayer
from parity.explain.identification.products import fit_relative_products
from parity.explain.identification.trace import CLOSE
from parity.measure.core.arrays import to_numpy
from parity.port.tapping.record import is_hidden


def fit_scale(layer: ObservedLayer, found: Fit) -> None:
    """Fit the scale, the soft cap and the sinks of scores."""
    scale, default = layer.tapped.scale, found.spec.score_scale
    how = (
        "factor of the scores" if "scores" in layer.values else "argument of the attention function"
    )
    if found.is_scaled_before:
        found.evidence.append(Evidence("scale", default, "queries are multiplied by it"))
    elif scale is not None and not math.isclose(scale, default, rel_tol=1e-6):
        found.add("scale", scale, how)
    if layer.tapped.soft_cap is not None:
        how = "tanh of scores" if "scores" in layer.values else how
        found.add("soft_cap", layer.tapped.soft_cap, how, is_seen="scores" in layer.values)
    sinks = getattr(layer.module, "sinks", None)
    if tuple(getattr(sinks, "shape", ())) == (layer.values["q"].shape[1],):
        found.add("sinks", True, "parameter sinks of the module")
        found.weights["sinks"], found.names["sinks"] = to_numpy(sinks), "sinks"


def fit_mask(layer: ObservedLayer, found: Fit, num_tokens: int) -> None:
    """Fit causality, a window or chunks to the keys that the mask hides.

    Raises:
        ValueError: if the mask has another pattern.
    """
    hidden = _hidden(layer, num_tokens)
    if layer.is_cross:
        if hidden.any():
            raise InputError("the mask", "hide nothing of another sequence", "one that hides keys")
        return
    places = np.arange(num_tokens)
    distances = places[:, None] - places
    together = _together(layer, num_tokens)
    if "mask" in layer.values and not hidden[~together].all():
        raise InputError(
            "the mask",
            f"hide other segments of {found.from_call['segment_ids']}",
            "one that does not",
        )
    hidden = hidden | ~together
    found.is_causal = bool((hidden | (distances >= 0)).all() and hidden[distances < 0].all())
    own = (distances >= 0) & together if found.is_causal else together
    if hidden[own].any():
        _fit_span(hidden, own, distances, found, num_tokens)
    else:
        _read_window(layer, found, num_tokens)


def _together(layer: ObservedLayer, num_tokens: int) -> np.ndarray:
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


def _fit_span(
    hidden: np.ndarray, own: np.ndarray, distances: np.ndarray, found: Fit, num_tokens: int
) -> None:
    window = int(np.abs(distances)[hidden & own].min())
    if np.array_equal(hidden & own, (np.abs(distances) >= window) & own):
        found.add("window_size", window, "the mask", up_to=num_tokens)
        return
    places = np.arange(num_tokens)
    for chunk in range(1, num_tokens):
        if np.array_equal(hidden & own, (places[:, None] // chunk != places // chunk) & own):
            found.add("chunk_size", chunk, "the mask", up_to=num_tokens)
            return
    raise InputError("the mask", "be causal, a window or chunks", "another pattern")


def _read_window(layer: ObservedLayer, found: Fit, num_tokens: int) -> None:
    window = layer.tapped.window
    if window is not None and window < num_tokens:
        raise InputError(
            "the window", "hide keys", f"{window} and a mask of {num_tokens} tokens that hides none"
        )
    if window is not None:
        found.add("window_size", window, "argument of the attention function", is_seen=False)


def _hidden(layer: ObservedLayer, num_tokens: int) -> np.ndarray:
    """Return the keys that the mask hides, (T, S).

    Raises:
        ValueError: if they differ between sequences or heads.
    """
    mask, num_keys = layer.values.get("mask"), layer.values["k"].shape[2]
    if mask is None:
        is_causal = layer.tapped.is_causal and not layer.is_cross
        return np.triu(np.full((num_tokens, num_keys), is_causal, bool), 1)
    hidden = is_hidden(np.broadcast_to(mask, (*mask.shape[:2], num_tokens, num_keys)))
    if not (hidden == hidden[:1, :1]).all() or "is_real" in layer.values:
        raise InputError(
            "the mask", "be the same for all sequences and heads, without padding", str(mask.shape)
        )
    return hidden[0, 0]


def fit_bias(layer: ObservedLayer, config: Mapping[str, Any], found: Fit) -> None:
    """Fit the biases of scores, in addition to the mask.

    Args:
        layer: the observed layer.
        config: configuration of its model, for distances that a short input cannot show.
        found: collects the fields.

    Raises:
        ValueError: if no field expresses them.
    """
    try:
        _fit_constant(layer, config, found, 0.0)
    except InputError:  # numbers that depend on queries or keys
        rest, hidden = _rest(layer), _hidden(layer, layer.values["q"].shape[2])
        gained = None if rest is None else fit_relative_products(layer, rest, hidden, config, found)
        if gained is None:
            raise
        _fit_constant(layer, config, found, gained)


def _fit_constant(
    layer: ObservedLayer, config: Mapping[str, Any], found: Fit, gained: np.ndarray | float
) -> None:
    """Fit the numbers that are added to the scores of each sequence alike, in addition to others
    that are known.
    """
    added = _added(layer, gained)
    if added is None or added.is_zero:
        return
    alibi, num_tokens = fit_alibi(added, found.spec.score_scale), len(added.hidden)
    if alibi is not None:
        found.add("alibi", alibi, "numbers that are added to scores", up_to=num_tokens)
        return
    num_heads = len(added.values)
    tables = {
        name: to_numpy(x)
        for name, x in layer.model.named_parameters()
        if x.ndim == 2 and x.shape[1] == num_heads
    }
    numbers = [*vars(layer.module).items(), *config.items()]
    candidates = [x for name, x in numbers if type(x) is int and "distance" in name]
    relative = fit_relative_bias(added, tables, candidates)
    if relative is None:
        known = f"numbers up to {np.abs(added.values).max():.2g}"
        raise InputError(
            "numbers added to scores",
            "be a mask, ALiBi or a table for distances or places on a grid",
            known,
        )
    value, name = relative
    found.add(
        "relative_bias",
        value,
        f"numbers that are added to scores are those of {name}",
        up_to=num_tokens,
    )
    found.weights["relative_bias"] = tables[name]
    found.names["relative_bias"] = name.removeprefix(f"{layer.tapped.name}.")


def _rest(layer: ObservedLayer) -> np.ndarray | None:
    """Return the numbers added to scores of each sequence, (B, N, T, S), 0 for hidden keys; None if
    none are seen.
    """
    values, scale, mask = layer.values, layer.tapped.scale, layer.values.get("mask")
    q, k, hidden = (
        values["q"].astype(np.float64),
        values["k"].astype(np.float64),
        _hidden(layer, values["q"].shape[2]),
    )
    k = k.repeat(q.shape[1] // k.shape[1], axis=1)
    if "scores" in values and layer.tapped.soft_cap is None:
        made = scored(q @ k.swapaxes(2, 3), 1.0 if scale is None else scale, None)
        return np.where(hidden, 0.0, values["scores"] - made)
    if "scores" in values or mask is None or mask.dtype == np.bool_:
        return None
    return np.broadcast_to(np.where(hidden, 0.0, mask), (*q.shape[:3], k.shape[2]))


def _added(layer: ObservedLayer, gained: np.ndarray | float) -> Added | None:
    """Return the numbers added to scores in addition to known ones, from the scores or from a mask
    of numbers.
    """
    values, scale, soft_cap = layer.values, layer.tapped.scale, layer.tapped.soft_cap
    q, mask = values["q"], values.get("mask")
    hidden = _hidden(layer, q.shape[2])
    if "scores" in values:
        return added_to(
            values["scores"],
            q,
            values["k"],
            hidden,
            1.0 if scale is None else scale,
            soft_cap,
            gained,
        )
    if mask is None or mask.dtype == np.bool_:
        return None
    numbers = np.where(hidden, 0.0, mask - gained)
    if not isinstance(gained, float):
        tolerance = CLOSE * float(np.abs(gained).max())
        numbers = np.where(np.abs(numbers) <= tolerance, 0.0, numbers)
    if (numbers != numbers[:1]).any():
        raise InputError(
            "numbers added to scores", "be the same for all sequences", str(mask.shape)
        )
    numbers = np.broadcast_to(numbers[0], (q.shape[1], *numbers.shape[2:]))
    return Added(numbers, hidden, 1e-6 * float(np.abs(numbers).max()))

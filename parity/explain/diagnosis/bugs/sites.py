"""Sites of bugs in the reference: each turns a change of values into overrides."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from mha_spec import Norm
from parity.explain.diagnosis.bugs.record import Override
from parity.measure.core.reference import Layer
from parity.measure.core.stages import Values

Change = Callable[[Any], Any]
Overrides = dict[str, Override]

# ---- Any method ----------------------------------------------------------------------------------


def before(change: Callable[..., tuple[Any, ...]]) -> Override:
    """Return an override that changes the inputs of a method."""
    return lambda _, original, *inputs: original(*change(*inputs))


def after(change: Change) -> Override:
    """Return an override that changes the result of a method, unless another bug omits it."""

    def override(_: Layer, original: Any, *inputs: Any) -> Any:
        found = original(*inputs)
        return None if found is None else change(found)

    return override


# ---- Weights -------------------------------------------------------------------------------------


def weights(change: Change, names: Collection[str]) -> Overrides:
    """Change the weights of some names."""
    return {
        "parameter": lambda _, original, name: (
            change(original(name)) if name in names else original(name)
        )
    }


def read_as(others: Mapping[str, str]) -> Override:
    """Return an override of `parameter`: weights, or whole projections, are read under other
    names.
    """

    def parameter(_: Layer, original: Any, name: str) -> np.ndarray:
        projection, dot, leaf = name.partition(".")
        return original(others.get(name, others.get(projection, projection) + dot + leaf))

    return parameter


def packed(
    names: tuple[str, ...], count: int, leaves: Collection[str], *, by_head: bool
) -> Overrides:
    """Read a packed weight in the wrong order.

    Args:
        names: the packed projections.
        count: number of heads, or groups of heads, of each of them.
        leaves: the packed ones of weight and bias.
        by_head: True if it is packed head by head and read projection by projection; False for the
            opposite.
    """

    def parameter(_: Layer, original: Any, name: str) -> np.ndarray:
        projection, __, leaf = name.partition(".")
        if projection not in names or leaf not in leaves:
            return original(name)
        parts, which = [original(f"{each}.{leaf}") for each in names], names.index(projection)
        ends = np.cumsum([len(part) for part in parts])[:-1]
        rest = parts[0].shape[1:]
        if by_head:
            heads = [part.reshape(count, -1, *rest) for part in parts]
            return np.split(np.concatenate(heads, axis=1).reshape(-1, *rest), ends)[which]
        heads = np.concatenate(parts).reshape(count, -1, *rest)
        return np.split(heads, ends // count, axis=1)[which].reshape(-1, *rest)

    return {"parameter": parameter}


# ---- Queries, keys and values --------------------------------------------------------------------


def projected(change: Callable[[Values], Values]) -> Overrides:
    """Change heads at the input of attention: `change` returns the changed ones."""
    return {"project": after(lambda heads: {**heads, **change(heads)})}


def norm_with(**fields: Any) -> Overrides:
    """Change fields of the norm of queries and keys."""

    def norm(_: Layer, original: Any, name: str) -> Norm | None:
        found = original(name)
        return found if found is None or name in ("v", "context") else replace(found, **fields)

    return {"norm": norm}


def turned(of: str, turn: Callable[[Layer, np.ndarray, np.ndarray], np.ndarray]) -> Overrides:
    """Rotate some of q, k and v in another way."""

    def override(
        layer: Layer, original: Any, name: str, x: np.ndarray, positions: np.ndarray
    ) -> np.ndarray:
        return turn(layer, x, positions) if name in of else original(name, x, positions)

    return {"turned": override}


def positions(of: str, change: Change) -> Overrides:
    """Rotate some of q, k and v by other positions."""
    return turned(of, lambda layer, x, places: layer.rotate(x, change(places)))


# ---- Scores and attention weights ----------------------------------------------------------------


def attn_weights(change: Callable[[Layer, np.ndarray], np.ndarray]) -> Overrides:
    """Change the attention weights after the softmax, in wide numbers."""

    def override(layer: Layer, original: Any, values: Values) -> dict[str, np.ndarray]:
        found, a = original(values)["attn_weights"], layer.arithmetic
        return {"attn_weights": a.keep(change(layer, a.widen(found)))}

    return {"attn_weights": override}

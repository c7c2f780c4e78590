"""Sites of bugs in the reference: each turns a change of values into overrides."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import numpy as np

from parity.explain.diagnosis.bugs.record import Override
from parity.measure.core.reference import Layer
from parity.measure.core.stages import Values
from parity.measure.core.weights import dtype_named

Change = Callable[[Any], Any]
Overrides = dict[str, Override]

# ---- Any method ----------------------------------------------------------------------------------


def before(change: Callable[..., tuple[Any, ...]]) -> Override:
    """Return an override that changes the inputs of a method."""

    def override(_: Layer, original: Any, *inputs: Any) -> Any:
        return original(*change(*inputs))

    return override


def after(change: Change) -> Override:
    """Return an override that changes the result of a method, unless another bug omits it."""

    def override(_: Layer, original: Any, *inputs: Any) -> Any:
        result = original(*inputs)
        if result is None:
            return None
        return change(result)

    return override


def always(value: Any) -> Override:
    """Return an override that returns a value, whatever the inputs are."""

    def override(_: Layer, original: Any, *inputs: Any) -> Any:
        return value

    return override


def for_names(names: Collection[str], wrong: Override) -> Override:
    """Return an override that replaces a method for some names alone, its first input.

    The method may be one of the backward pass as well.
    """

    def override(owner: Any, original: Any, name: str, *inputs: Any) -> Any:
        if name in names:
            return wrong(owner, original, name, *inputs)
        return original(name, *inputs)

    return override


def features_unchanged(_: Layer, original: Override, name: str, x: np.ndarray, *rest: Any) -> Any:
    """Override a method of named features: it leaves them as they are."""
    return x


SIXTEEN_BITS = ("bfloat16", "float16")
"""The dtypes of 16 bits, the usual one first."""


def in_sixteen_bits(x: np.ndarray, dtype: str) -> np.ndarray:
    """Return float32 values rounded to bfloat16 or float16, in the array's own dtype."""
    with np.errstate(over="ignore"):
        return x.astype(np.float32).astype(dtype_named(dtype)).astype(x.dtype)


# ---- Weights -------------------------------------------------------------------------------------


def weights(change: Change, names: Collection[str]) -> Overrides:
    """Change the weights of some names."""
    return {"parameter": for_names(names, after(change))}


def read_as(others: Mapping[str, str]) -> Override:
    """Return an override of `parameter`: weights, or whole projections, are read under other
    names.
    """

    def parameter(_: Layer, original: Any, name: str) -> np.ndarray:
        projection, dot, leaf = name.partition(".")
        return original(others.get(name, others.get(projection, projection) + dot + leaf))

    return parameter


def named_as(others: Mapping[str, str]) -> Override:
    """Return an override of a method of a name: it gets the name of another one."""

    def override(_: Layer, original: Any, name: str) -> Any:
        return original(others.get(name, name))

    return override


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
    if by_head:
        read = _split_into_projections
    else:
        read = _split_into_heads

    def parameter(_: Layer, original: Any, name: str) -> np.ndarray:
        projection, __, leaf = name.partition(".")
        if projection not in names or leaf not in leaves:
            return original(name)
        parts = [original(f"{part}.{leaf}") for part in names]
        return read(parts, count)[names.index(projection)]

    return {"parameter": parameter}


def _split_into_projections(parts: list[np.ndarray], count: int) -> list[np.ndarray]:
    """Pack projections head by head, and split the rows into one block for each projection."""
    rest = parts[0].shape[1:]
    heads = [part.reshape(count, -1, *rest) for part in parts]
    rows = np.concatenate(heads, axis=1).reshape(-1, *rest)
    return np.split(rows, _ends(parts))


def _split_into_heads(parts: list[np.ndarray], count: int) -> list[np.ndarray]:
    """Pack projections one after the other, and split the rows as if each head had its own."""
    rest = parts[0].shape[1:]
    heads = np.concatenate(parts).reshape(count, -1, *rest)
    split = np.split(heads, _ends(parts) // count, axis=1)
    return [rows.reshape(-1, *rest) for rows in split]


def _ends(parts: list[np.ndarray]) -> np.ndarray:
    """Return the ends of all parts but the last one, if they follow each other."""
    return np.cumsum([len(part) for part in parts])[:-1]


# ---- Queries, keys and values --------------------------------------------------------------------


def projected(change: Callable[[Values], Values]) -> Overrides:
    """Change heads at the input of attention: `change` returns the changed ones."""

    def with_changed(heads: Values) -> dict[str, np.ndarray]:
        return {**heads, **change(heads)}

    return {"project": after(with_changed)}


def turned(names: str, turn: Callable[[Layer, np.ndarray, np.ndarray], np.ndarray]) -> Overrides:
    """Rotate some of q, k and v differently."""

    def rotation(
        layer: Layer, _: Any, name: str, x: np.ndarray, positions: np.ndarray
    ) -> np.ndarray:
        return turn(layer, x, positions)

    return {"turned": for_names(names, rotation)}


def positions(names: str, change: Change) -> Overrides:
    """Rotate some of q, k and v by other positions."""

    def turn(layer: Layer, x: np.ndarray, token_positions: np.ndarray) -> np.ndarray:
        return layer.rotate(x, change(token_positions))

    return turned(names, turn)


# ---- The cache -----------------------------------------------------------------------------------


class NewTokens(NamedTuple):
    """The inputs of the reference's `appended`: what a call adds to a cache.

    Attributes:
        cache: prefix of the cache's stages.
        values: the stages before, with the cache before the call.
        new: keys and values of the new tokens, (B, K, T, H), or their latents, by name.
        before: numbers of tokens cached before, (B,): the first slots of the new ones.
        added: numbers of real new tokens, (B,).
    """

    cache: str
    values: Values
    new: dict[str, np.ndarray]
    before: np.ndarray
    added: np.ndarray

    def with_lengths(
        self, grown: Mapping[str, np.ndarray], lengths: np.ndarray | None = None
    ) -> dict[str, np.ndarray]:
        """Return a cache with other lengths, (B,); by default the right ones."""
        if lengths is None:
            lengths = self.before + self.added
        return {**grown, f"{self.cache}lengths": lengths.astype(np.int32)}

    def with_cached_before(self, change: Callable[[np.ndarray], np.ndarray]) -> NewTokens:
        """Return the inputs with a different cache before the call, if there is one."""
        changed = {}
        for name in self.new:
            stage = f"previous.{self.cache}{name}"
            cached = self.values.get(stage)
            if cached is not None:
                changed[stage] = change(cached)
        return self._replace(values={**self.values, **changed})

    def with_cached(
        self, grown: Mapping[str, np.ndarray], change: Callable[[np.ndarray], np.ndarray]
    ) -> dict[str, np.ndarray]:
        """Return a cache after the call with a change of its keys and values, or its latents."""
        names = [f"{self.cache}{name}" for name in self.new]
        return {**grown, **{name: change(grown[name]) for name in names}}


# ---- Scores and attention weights ----------------------------------------------------------------


def attn_weights(change: Callable[[Layer, np.ndarray], np.ndarray]) -> Overrides:
    """Change the attention weights after the softmax, in a wide dtype."""

    def override(layer: Layer, original: Any, values: Values) -> dict[str, np.ndarray]:
        a = layer.arithmetic
        wide = a.widen(original(values)["attn_weights"])
        return {"attn_weights": a.keep(change(layer, wide))}

    return {"attn_weights": override}

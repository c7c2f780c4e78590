"""Attention of a few query rows without computing keys and values, directly over their inputs.

Queries are multiplied by the key projection instead, and weighted sums of inputs by the value
projection. For R rows that is R / S of the work.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from inspect import ismethod
from typing import Any

import numpy as np

from parity.measure.core.stages import Values
from parity.measure.core.work import PER_FACTOR, PER_MULTIPLICATION, ask, begin

KEPT = frozenset({"linear", "tables", "parameter", "has_bias", "scale", "attn_weights"})
"""Overrides of a layer that do not require keys and values."""

BEGINNING = 16
"""Leading numbers of a weight's row, by which the row is found."""


@dataclass(frozen=True, eq=False)
class Unmade:
    """Keys or values, as their inputs and the projection of each head."""

    x: np.ndarray  # (B, S, d_kv)
    weight: np.ndarray  # (K, H, d_kv)
    bias: np.ndarray  # (K, H)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return self.x.nbytes + self.weight.nbytes + self.bias.nbytes


def rows_of_query(rows: np.ndarray) -> str:
    """Return the name of a sample's input that has some rows of the query, (B, rows, d_in)."""
    return f"query.{','.join(map(str, rows))}"


def has_rows_of_query(problem: Any) -> bool:
    """Return whether a problem is a sample with the query rows that it needs."""
    return problem.sample is not None and rows_of_query(problem.sample.rows) in problem.inputs


def is_plain(layer: Any) -> bool:
    """Return whether q, k and v are computed as usual, possibly from other weights; False with
    latents or shared_kv.
    """
    linear = layer.overrides.get("linear")
    is_right = layer.overrides.keys() <= KEPT and (
        linear is None or ismethod(linear.func)
    )  # a method only caches
    return is_right and layer.problem.spec.latent is None and not layer.problem.spec.shared_kv


@contextmanager
def making_weights_once(layer: Any) -> Iterator[None]:
    """Let a layer compute each of its wrong weights only once within the block."""
    made = layer.overrides.get("parameter")
    with nullcontext() if made is None else layer.overriding(parameter=cache(made)):
        yield


def queries(layer: Any, rows: np.ndarray) -> np.ndarray | None:
    """Return the queries of some rows only, (B, N, rows, H); None if they need all tokens, or q is
    not needed.
    """
    spec, some = layer.problem.spec, layer.problem.inputs.get(rows_of_query(rows))
    is_by_length = spec.rope is not None and spec.rope.depends_on_length
    if some is None or "q" not in layer.asked or is_by_length or not is_plain(layer):
        return None
    return layer.entering(
        "q", layer.linear("q_proj", some), layer.problem.case.positions()[..., rows]
    )


def wrong_weights(layer: Any) -> dict[str, np.ndarray]:
    """Return the unknown weights of k and v, if these are plain projections.

    For the layer's own weights, or their rows in another order,
    `parity.measure.core.reference.Remembered` has the products.
    """
    spec, held = layer.problem.spec, layer.problem.weights
    if not is_plain(layer) or spec.clip_qkv is not None:
        return {}
    turned = "qk" if spec.rope is not None else "q"  # queries have only some rows anyway
    names = (
        name
        for name in layer.asked
        if name not in turned and spec.norms.get(f"{name}_norm") is None
    )
    found = {name: layer.parameter(f"{name}_proj.weight") for name in names}
    known = [x for name, x in held.items() if name.endswith("_proj.weight")]
    return {
        name: x
        for name, x in found.items()
        if not any(x is own or _is_row_of(x[0], own) for own in known)
    }


def _is_row_of(row: np.ndarray, weight: np.ndarray) -> bool:
    """Return whether a weight contains a row, by its first numbers."""
    return len(row) == weight.shape[1] and bool(
        (weight[:, :BEGINNING] == row[:BEGINNING]).all(axis=1).any()
    )


def without(layer: Any, names: Collection[str]) -> Any:
    """Return the layer without some of q, k and v."""
    return layer.asking("".join(name for name in layer.asked if name not in names))


def unmade(layer: Any, name: str, weight: np.ndarray, x: np.ndarray, rows: int) -> Unmade:
    """Return keys "k" or values "v" of a layer as inputs x and a weight (K * H, d_kv), without
    multiplying them.

    They are for some query rows. If their products would take too much work, nothing is done.
    """
    projection, heads, a = f"{name}_proj", layer.num_heads(name), layer.arithmetic
    ask(PER_MULTIPLICATION * rows * layer.num_heads("q") * x.size)
    begin(2 * PER_FACTOR * (weight.size + x.size))
    weight, bias = a.widen(weight), np.zeros(len(weight), a.wide)
    bias = a.widen(layer.parameter(f"{projection}.bias")) if layer.has_bias(projection) else bias
    return Unmade(a.widen(x), weight.reshape(heads, -1, weight.shape[-1]), bias.reshape(heads, -1))


def products(layer: Any, values: Values, k: Unmade) -> np.ndarray:
    """Return the scaled products of queries and keys, (B, N, T, S)."""
    a = layer.arithmetic
    q = _by_kv_head(a.widen(values["q"]), len(k.weight))
    back = a.matmul(q, k.weight)
    found = a.matmul(back.reshape(len(back), -1, back.shape[-1]), k.x.swapaxes(1, 2)).reshape(
        *q.shape[:3], -1
    )
    found = found + (q * k.bias[:, None]).sum(axis=-1, keepdims=True)
    keep = a.between_scores
    return keep(keep(found.reshape(*values["q"].shape[:3], -1)) / a.wide.type(layer.scale()))


def context(layer: Any, values: Values, v: Unmade) -> np.ndarray:
    """Return the weighted sums of values, (B, N, T, H)."""
    a = layer.arithmetic
    attn_weights = _by_kv_head(a.widen(values["attn_weights"]), len(v.weight))
    taken = a.matmul(attn_weights.reshape(len(attn_weights), -1, attn_weights.shape[-1]), v.x)
    found = a.matmul(taken.reshape(*attn_weights.shape[:3], -1), v.weight.swapaxes(1, 2))
    found = found + attn_weights.sum(axis=-1, keepdims=True) * v.bias[:, None]
    return a.keep(found.reshape(*values["attn_weights"].shape[:3], -1))


def _by_kv_head(x: np.ndarray, heads: int) -> np.ndarray:
    """Return (B, N, T, …) of query heads as (B, K, N / K * T, …)."""
    return x.reshape(len(x), heads, -1, x.shape[-1])

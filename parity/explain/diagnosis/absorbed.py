"""Attention of a few query rows without computing keys and values, directly over their inputs.

Queries are multiplied by the key projection instead, and weighted sums of inputs by the value
projection. For R rows that is R / S of the work. Without it, a transposed k_proj of a BERT layer
with 4096 features and 2048 tokens has no name: its keys alone take longer than the search may.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from inspect import ismethod

import numpy as np

from parity.explain.diagnosis.changed_layer import ChangedLayer
from parity.explain.diagnosis.sample import rows_of_query
from parity.explain.diagnosis.work import PER_FACTOR, PER_MULTIPLICATION, ask, begin
from parity.measure.core.stages import Values

WITHOUT_EFFECT = frozenset({"linear", "tables", "parameter", "has_bias", "scale", "attn_weights"})
"""Overrides of a layer that do not require keys and values."""

BEGINNING = 16
"""Leading elements of a weight's row, by which the row is found. Trained or drawn rows differ long
before; a row that is found is compared whole before its product is used.
"""


@dataclass(frozen=True, eq=False)
class DeferredHeads:
    """Keys or values, as their inputs and the projection of each head."""

    x: np.ndarray  # (B, S, d_kv)
    weight: np.ndarray  # (K, H, d_kv)
    bias: np.ndarray  # (K, H)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return self.x.nbytes + self.weight.nbytes + self.bias.nbytes


def is_plain(layer: ChangedLayer) -> bool:
    """Return whether q, k and v are computed as usual, possibly from other weights.

    With latents or shared_kv they are not.
    """
    spec = layer.problem.spec
    if spec.latent is not None or spec.shared_kv:
        return False
    linear = layer.overrides.get("linear")
    # `Remembered.linear` is a method, and only caches; a bug's is a function.
    only_caches = linear is None or (isinstance(linear, partial) and ismethod(linear.func))
    return only_caches and layer.overrides.keys() <= WITHOUT_EFFECT


@contextmanager
def computing_weights_once(layer: ChangedLayer) -> Iterator[None]:
    """Let a layer compute each of its wrong weights only once within the block."""
    parameter = layer.overrides.get("parameter")
    if parameter is None:
        yield
        return
    with layer.overriding(parameter=cache(parameter)):
        yield


def queries(layer: ChangedLayer, rows: np.ndarray) -> np.ndarray | None:
    """Return the queries of some rows only, (B, N, rows, H).

    None if they need all tokens, or q is not requested.
    """
    problem = layer.problem
    query_rows = problem.inputs.get(rows_of_query(rows))
    rope = problem.spec.rope
    needs_all_tokens = rope is not None and rope.depends_on_length
    if query_rows is None or needs_all_tokens or "q" not in layer.requested or not is_plain(layer):
        return None
    positions = problem.case.positions()[..., rows]
    return layer.entering("q", layer.linear("q_proj", query_rows), positions)


def wrong_weights(layer: ChangedLayer) -> dict[str, np.ndarray]:
    """Return the unknown weights of k and v, if these are plain projections.

    For the layer's own weights, or their rows in a different order,
    `parity.explain.diagnosis.remembered` has the products.
    """
    problem = layer.problem
    if not is_plain(layer) or problem.spec.clip_qkv is not None:
        return {}
    own_weights = [x for name, x in problem.weights.items() if name.endswith("_proj.weight")]
    unknown = {}
    for name in layer.requested:
        if name == "q":  # which has only some rows anyway
            continue
        # A rotation or a norm needs the keys themselves.
        if name == "k" and problem.spec.rope is not None:
            continue
        if problem.spec.norms.get(f"{name}_norm") is not None:
            continue
        weight = layer.parameter(f"{name}_proj.weight")
        if not any(weight is own or _has_row(own, weight[0]) for own in own_weights):
            unknown[name] = weight
    return unknown


def _has_row(weight: np.ndarray, row: np.ndarray) -> bool:
    """Return whether a weight contains a row, by its first elements."""
    if len(row) != weight.shape[1]:
        return False
    return bool((weight[:, :BEGINNING] == row[:BEGINNING]).all(axis=1).any())


def without(layer: ChangedLayer, names: Collection[str]) -> ChangedLayer:
    """Return the layer without some of q, k and v."""
    return layer.requesting("".join(name for name in layer.requested if name not in names))


def deferred(
    layer: ChangedLayer, name: str, weight: np.ndarray, x: np.ndarray, rows: int
) -> DeferredHeads:
    """Return keys "k" or values "v" of a layer without computing them.

    They consist of inputs x and a weight (K * H, d_kv), and serve some query rows. Nothing is done
    if their products would take too much work.
    """
    projection, heads, a = f"{name}_proj", layer.num_heads(name), layer.arithmetic
    ask(PER_MULTIPLICATION * rows * layer.num_heads("q") * x.size)
    begin(2 * PER_FACTOR * (weight.size + x.size))
    weight, bias = a.widen(weight), np.zeros(len(weight), a.wide)
    if layer.has_bias(projection):
        bias = a.widen(layer.parameter(f"{projection}.bias"))
    by_head = weight.reshape(heads, -1, weight.shape[-1])
    return DeferredHeads(a.widen(x), by_head, bias.reshape(heads, -1))


def products(layer: ChangedLayer, values: Values, k: DeferredHeads) -> np.ndarray:
    """Return the scaled products of queries and keys, (B, N, T, S)."""
    a = layer.arithmetic
    q = _by_kv_head(a.widen(values["q"]), len(k.weight))
    q_of_inputs = a.matmul(q, k.weight)  # (B, K, N / K * T, d_kv)
    rows = q_of_inputs.reshape(len(q), -1, q_of_inputs.shape[-1])
    scores = a.matmul(rows, k.x.swapaxes(1, 2)).reshape(*q.shape[:3], -1)
    scores = scores + (q * k.bias[:, None]).sum(axis=-1, keepdims=True)
    scores = scores.reshape(*values["q"].shape[:3], -1)
    keep = a.between_scores
    return keep(keep(scores) / a.wide.type(layer.scale()))


def context(layer: ChangedLayer, values: Values, v: DeferredHeads) -> np.ndarray:
    """Return the weighted sums of values, (B, N, T, H)."""
    a = layer.arithmetic
    attn_weights = _by_kv_head(a.widen(values["attn_weights"]), len(v.weight))
    rows = attn_weights.reshape(len(attn_weights), -1, attn_weights.shape[-1])
    sums_of_inputs = a.matmul(rows, v.x).reshape(*attn_weights.shape[:3], -1)
    sums = a.matmul(sums_of_inputs, v.weight.swapaxes(1, 2))
    sums = sums + attn_weights.sum(axis=-1, keepdims=True) * v.bias[:, None]
    return a.keep(sums.reshape(*values["attn_weights"].shape[:3], -1))


def _by_kv_head(x: np.ndarray, heads: int) -> np.ndarray:
    """Return (B, N, T, …) of query heads as (B, K, N / K * T, …)."""
    return x.reshape(len(x), heads, -1, x.shape[-1])

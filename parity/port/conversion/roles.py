"""Roles of a weight's axes: where heads and their features are, so that reordering or scaling is
written once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

import numpy as np

from mha_spec import AttentionSpec
from mha_spec.features.relative_products import SIDES
from mha_spec.shares import OF_QUERIES


@dataclass(frozen=True)
class Role:
    """The place of heads in a weight.

    Attributes:
        axis: axis of heads with their features; None if heads and features are separate axes.
        heads: `q`, the N query heads; `kv`, the K key/value heads; or `shared`, one set of features
            for all heads.
        features: `qk`, the H features of queries and keys; `v`, the Hv features of values; or empty
            for others.
    """

    axis: int | None
    heads: Literal["q", "kv", "shared"]
    features: Literal["qk", "v", ""]

    def view(self, x: np.ndarray, spec: AttentionSpec) -> np.ndarray:
        """Return a view (K, heads of the group, features, the rest); K and heads are 1 if they are
        shared.
        """
        groups = 1 if self.heads == "shared" else spec.num_kv_heads
        of_group = spec.num_heads // spec.num_kv_heads if self.heads == "q" else 1
        x = x.reshape(len(x), -1) if x.ndim == 3 else x  # vectors for each head
        rows = x.reshape(-1) if self.axis is None else np.moveaxis(x, self.axis, 0)
        return rows.reshape(groups, of_group, len(rows) // (groups * of_group), -1)


def roles(spec: AttentionSpec) -> dict[str, Role]:
    """Return the roles of weights with heads, by canonical name. Biases of the output and latents
    have none.
    """
    found: dict[str, Role] = {}
    of_parts: dict[str, Role] = {
        "q_proj": Role(0, "q", "qk" if spec.latent is None else ""),
        "q_b_proj": Role(0, "q", ""),
        "k_proj": Role(0, "kv", "qk"),
        "v_proj": Role(0, "kv", "v"),
        "kv_b_proj": Role(0, "kv", ""),
        "gate_proj": Role(0, "q", "" if spec.gate is None or spec.gate.per_head else "v"),
        "sinks": Role(0, "q", ""),
        "relative_bias": Role(1, "q", ""),
    }
    if spec.relative_products is not None:
        of_parts |= dict.fromkeys(
            SIDES, Role(1, "q" if spec.relative_products.per_head else "shared", "qk")
        )
    for name, shape in spec.weight_shapes.items():
        part = name.partition(".")[0]
        if name == "out_proj.weight":  # with latents, the features of values are rows of kv_b_proj
            found[name] = Role(1, "q", "v" if spec.latent is None else "")
        elif part in ("q_norm", "k_norm", "v_norm", "context_norm"):
            has_heads = len(shape) == 2 or spec.norms[part].over == "width"
            heads = ("q" if part in OF_QUERIES else "kv") if has_heads else "shared"
            features = "v" if part in ("v_norm", "context_norm") else "qk"
            found[name] = Role(0 if len(shape) == 1 else None, heads, features)
        elif part in of_parts:
            found[name] = of_parts[part]
    return found


def digests(rows: np.ndarray) -> np.ndarray:
    """Return a digest of the bytes of each row over the last axis; both zeros have the same
    digest.
    """
    flat = np.ascontiguousarray(rows + rows.dtype.type(0)).reshape(-1, rows.shape[-1])
    found = np.empty(len(flat), object)
    found[:] = [blake2b(row.tobytes(), digest_size=12).digest() for row in flat]
    return found.reshape(rows.shape[:-1])


def matched(before: Sequence[object], after: Sequence[object]) -> np.ndarray | None:
    """Return the order with after[i] == before[order[i]]; None if the elements differ.

    Elements that are in place stay there.
    """
    left: dict[object, list[int]] = {}
    for index in reversed(range(len(before))):
        if index >= len(after) or before[index] != after[index]:
            left.setdefault(before[index], []).append(index)
    order = np.arange(len(after))
    for index, key in enumerate(after):
        if index < len(before) and before[index] == key:
            continue
        if not left.get(key):
            return None
        order[index] = left[key].pop()
    return order if len(before) == len(after) else None

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
from mha_spec.score_weights import score_axes
from mha_spec.shares import OF_QUERIES


@dataclass(frozen=True)
class Role:
    """The position of heads in a weight.

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
        groups = heads_of_group = 1
        if self.heads != "shared":
            groups = spec.num_kv_heads
        if self.heads == "q":
            heads_of_group = spec.num_heads // spec.num_kv_heads
        if x.ndim == 3:  # vectors for each head
            x = x.reshape(len(x), -1)
        if self.axis is None:
            rows = x.reshape(-1)
        else:
            rows = np.moveaxis(x, self.axis, 0)
        features = len(rows) // (groups * heads_of_group)
        return rows.reshape(groups, heads_of_group, features, -1)


def roles(spec: AttentionSpec) -> dict[str, Role]:
    """Return the roles of weights with heads, by canonical name. Biases of the output and latents
    have none.
    """
    by_part = _roles_of_parts(spec)
    by_name: dict[str, Role] = {}
    for name, shape in spec.weight_shapes.items():
        part = name.partition(".")[0]
        if name == "out_proj.weight":
            by_name[name] = _role_of_out_proj(spec)
        elif part in ("q_norm", "k_norm", "v_norm", "context_norm"):
            by_name[name] = _role_of_norm(part, shape, spec)
        elif part in by_part:
            by_name[name] = by_part[part]
        elif name in spec.score_shapes:
            by_name[name] = _role_in_scores(score_axes(name, shape))
    return by_name


def _role_of_out_proj(spec: AttentionSpec) -> Role:
    # With latents, the features of values are rows of kv_b_proj.
    if spec.latent is not None:
        return Role(1, "q", "")
    return Role(1, "q", "v")


def _roles_of_parts(spec: AttentionSpec) -> dict[str, Role]:
    """Return the roles of all weights of a part of the layer, by the first word of their names."""
    features_of_q = "qk"
    if spec.latent is not None:
        # The rows of q_proj have features with RoPE and features without.
        features_of_q = ""
    features_of_gate = ""
    if spec.gate is not None and not spec.gate.per_head:
        features_of_gate = "v"
    return {
        "q_proj": Role(0, "q", features_of_q),
        "q_b_proj": Role(0, "q", ""),
        "k_proj": Role(0, "kv", "qk"),
        "v_proj": Role(0, "kv", "v"),
        "kv_b_proj": Role(0, "kv", ""),
        "gate_proj": Role(0, "q", features_of_gate),
    }


def _role_in_scores(axes: str) -> Role:
    """Return the role of a weight that changes scores, by its axes: see `SCORE_WEIGHTS`."""
    heads = "shared"
    if "N" in axes:
        heads = "q"
    features = ""
    if "H" in axes:
        features = "qk"
    if axes == "NH":
        axis = None
    elif axes[0] in "CE":
        axis = 1
    else:
        axis = 0
    return Role(axis, heads, features)


def _role_of_norm(part: str, shape: tuple[int, ...], spec: AttentionSpec) -> Role:
    """Return the role of the weight of a norm, which may be shared by all heads."""
    is_shared = len(shape) == 1 and spec.norms[part].over != "width"
    if is_shared:
        heads = "shared"
    elif part in OF_QUERIES:
        heads = "q"
    else:
        heads = "kv"
    features = "qk"
    if part in ("v_norm", "context_norm"):
        features = "v"
    axis = None
    if len(shape) == 1:
        axis = 0
    return Role(axis, heads, features)


def digests(rows: np.ndarray) -> np.ndarray:
    """Return a digest of the bytes of each row over the last axis; both zeros have the same
    digest.
    """
    # Adding 0 turns -0 into 0.
    flat = np.ascontiguousarray(rows + rows.dtype.type(0)).reshape(-1, rows.shape[-1])
    row_digests = np.empty(len(flat), object)
    for index, row in enumerate(flat):
        # 12 bytes: two of a million different rows have one digest with a probability of 1e-17.
        row_digests[index] = blake2b(row.tobytes(), digest_size=12).digest()
    return row_digests.reshape(rows.shape[:-1])


def matched(before: Sequence[object], after: Sequence[object]) -> np.ndarray | None:
    """Return the order with after[i] == before[order[i]]; None if the elements differ.

    Elements at their own position stay there.
    """
    if len(before) != len(after):
        return None
    moved: dict[object, list[int]] = {}
    # From the end, so that `pop` returns the first index of equal elements.
    for index in reversed(range(len(before))):
        if before[index] != after[index]:
            moved.setdefault(before[index], []).append(index)
    order = np.arange(len(after))
    for index, element in enumerate(after):
        if before[index] == element:
            continue
        if not moved.get(element):
            return None
        order[index] = moved[element].pop()
    return order

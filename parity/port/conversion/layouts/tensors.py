"""Parts of tables of layouts: tensors of four projections, of packed ones, of optional weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mha_spec.score_weights import SCORE_WEIGHTS
from parity.port.conversion.layouts.layout import Tensor

ROWS, COLUMNS = "(n h) d", "d (n h)"  # (out, in) as in torch, and (in, out)

EINSUM: dict[str, Any] = {"leaf": "kernel", "heads": "d n h", "biases": "n h", "back": "n h e"}
"""Keyword arguments of `separate` for an axis of heads, as in Flax and Keras."""


def separate(
    q: str,
    k: str,
    v: str,
    out: str,
    *,
    leaf: str = "weight",
    heads: str = ROWS,
    biases: str = "(n h)",
    back: str = "e (n h)",
) -> tuple[Tensor, ...]:
    """Return four weights and their biases, by layer name.

    Args:
        q, k, v, out: names of the layers.
        leaf: name of their weights.
        heads: axes of a projection.
        biases: axes of its bias.
        back: axes of the weight of the output.
    """
    return (
        Tensor(f"{q}.{leaf}", "q", "weight", heads),
        Tensor(f"{k}.{leaf}", "k", "weight", heads),
        Tensor(f"{v}.{leaf}", "v", "weight", heads),
        Tensor(f"{q}.bias", "q", "bias", biases),
        Tensor(f"{k}.bias", "k", "bias", biases),
        Tensor(f"{v}.bias", "v", "bias", biases),
        Tensor(f"{out}.{leaf}", "out", "weight", back),
        Tensor(f"{out}.bias", "out", "bias", "e"),
    )


def packed(
    qkv: str, out: str, *, leaf: str = "weight", heads: str = ROWS, back: str = "e (n h)"
) -> tuple[Tensor, ...]:
    """Return one weight for q, k and v, one for the output, and their biases.

    Args:
        qkv, out: names of the two projections.
        leaf: name of their weights.
        heads: axes of the weight of q, k and v.
        back: axes of the output.
    """
    return (
        Tensor(f"{qkv}.{leaf}", "qkv", "weight", heads),
        Tensor(f"{qkv}.bias", "qkv", "bias", "(n h)"),
        Tensor(f"{out}.{leaf}", "out", "weight", back),
        Tensor(f"{out}.bias", "out", "bias", "e"),
    )


NORMS = ("q_norm", "k_norm", "v_norm", "context_norm", "q_a_norm", "kv_a_norm")
NARROW = ("q_a_proj", "q_b_proj", "kv_a_proj", "kv_b_proj")  # of latents
EVERYTHING = ("gate_proj", *NARROW, *NORMS, *SCORE_WEIGHTS)
"""Weights that only some layers have in addition to q, k, v and out, by canonical name."""


def optional(
    same: Iterable[str] = (), *, leaf: str = "weight", axes: str = "...", **renamed: str
) -> tuple[Tensor, ...]:
    """Return the tensors of optional weights.

    Args:
        same: those that have their canonical names.
        leaf: name of a weight of a projection.
        axes: its axes.
        renamed: names of the others, by canonical name.
    """
    tensors: list[Tensor] = []
    for ours, theirs in (dict.fromkeys(same, "") | renamed).items():
        name = theirs or ours
        if ours in SCORE_WEIGHTS:
            tensors.append(Tensor(name, ours, "whole", "..."))
            continue
        # Norms have no axes to transpose, and their weights are called so in every library here.
        own_leaf, own_axes = leaf, axes
        if ours in NORMS:
            own_leaf, own_axes = "weight", "..."
        tensors.append(Tensor(f"{name}.{own_leaf}", f"{ours}.weight", "whole", own_axes))
        tensors.append(Tensor(f"{name}.bias", f"{ours}.bias", "whole", "..."))
    return tuple(tensors)


def with_and_without_out(tensors: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], ...]:
    """Return the form with an output projection, and the form without one."""
    return tensors, tuple(tensor for tensor in tensors if tensor.holds != "out")

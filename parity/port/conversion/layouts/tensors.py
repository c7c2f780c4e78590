"""Building blocks for tables of layouts: tensors of four projections, of packed ones, and of
optional weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mha_spec.features.relative_products import SIDES
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
    """Return four weights and their biases, by layer name; `heads`, `biases` and `back` are the
    axes.
    """
    names = {"q": q, "k": k, "v": v}
    return (
        *(
            Tensor(f"{name}.{leaf}", projection, "weight", heads)
            for projection, name in names.items()
        ),
        *(Tensor(f"{name}.bias", projection, "bias", biases) for projection, name in names.items()),
        Tensor(f"{out}.{leaf}", "out", "weight", back),
        Tensor(f"{out}.bias", "out", "bias", "e"),
    )


def packed(
    qkv: str, out: str, *, leaf: str = "weight", rows: str = ROWS, columns: str = "e (n h)"
) -> tuple[Tensor, ...]:
    """Return one tensor for q, k and v, and one for the output."""
    return (
        Tensor(f"{qkv}.{leaf}", "qkv", "weight", rows),
        Tensor(f"{qkv}.bias", "qkv", "bias", "(n h)"),
        Tensor(f"{out}.{leaf}", "out", "weight", columns),
        Tensor(f"{out}.bias", "out", "bias", "e"),
    )


SCORES = ("sinks", "relative_bias", *SIDES)
NORMS = ("q_norm", "k_norm", "v_norm", "context_norm", "q_a_norm", "kv_a_norm")
NARROW = ("q_a_proj", "q_b_proj", "kv_a_proj", "kv_b_proj")  # of latents
EVERYTHING = ("gate_proj", *NARROW, *NORMS, *SCORES)
"""Weights that only some layers have in addition to q, k, v and out, by canonical name."""


def beside(
    same: Iterable[str] = (), *, leaf: str = "weight", axes: str = "...", **renamed: str
) -> tuple[Tensor, ...]:
    """Return the tensors of optional weights, by canonical name or renamed."""
    found: list[Tensor] = []
    for ours, theirs in (dict.fromkeys(same) | renamed).items():
        theirs = theirs or ours
        if ours in SCORES:
            found.append(Tensor(theirs, ours, "whole", "..."))
            continue
        of_weight = ("weight", "...") if ours in NORMS else (leaf, axes)
        found.append(Tensor(f"{theirs}.{of_weight[0]}", f"{ours}.weight", "whole", of_weight[1]))
        found.append(Tensor(f"{theirs}.bias", f"{ours}.bias", "whole", "..."))
    return tuple(found)


def with_and_without_out(tensors: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], ...]:
    """Return the form with an output projection, and the form without one."""
    return tensors, tuple(tensor for tensor in tensors if tensor.holds != "out")

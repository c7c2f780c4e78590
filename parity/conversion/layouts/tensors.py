"""The words of tables of layouts: tensors of four projections, of packed ones, and of what lies beside them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mha_spec.relative_products import SIDES
from parity.conversion.layouts.layout import Tensor

ROWS, COLUMNS = "(n h) d", "d (n h)"  # (out, in) as torch keeps it, and (in, out)

EINSUM: dict[str, Any] = {"leaf": "kernel", "heads": "d n h", "biases": "n h", "back": "n h e"}
"""The keywords of `separate` where heads are an axis, as in Flax and Keras."""


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
    """Four weights and their biases, by the names of their layers; `heads`, `biases` and `back` are the axes."""
    names = {"q": q, "k": k, "v": v}
    return (
        *(Tensor(f"{name}.{leaf}", projection, "weight", heads) for projection, name in names.items()),
        *(Tensor(f"{name}.bias", projection, "bias", biases) for projection, name in names.items()),
        Tensor(f"{out}.{leaf}", "out", "weight", back),
        Tensor(f"{out}.bias", "out", "bias", "e"),
    )


def packed(
    qkv: str, out: str, *, leaf: str = "weight", rows: str = ROWS, columns: str = "e (n h)"
) -> tuple[Tensor, ...]:
    """One tensor for q, k and v, and one for the output."""
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
"""Weights that only some layers have beside q, k, v and out, by its canonical name."""


def beside(same: Iterable[str] = (), *, leaf: str = "weight", axes: str = "...", **renamed: str) -> tuple[Tensor, ...]:
    """The tensors of what only some layers have, each by its canonical name or one of its own."""
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
    """The form that has an output projection, and the one that has none."""
    return tensors, tuple(tensor for tensor in tensors if tensor.holds != "out")

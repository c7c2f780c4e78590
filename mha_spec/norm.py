"""Normalisation of queries, keys or values: over which features, with which weights, before or after RoPE."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from mha_spec.record import Record
from mha_spec.refusal import Refusal, WrongType
from mha_spec.rules import as_boolean, as_number, as_one_of


@dataclass(frozen=True, repr=False)
class Norm(Record):
    """Normalisation of projected features x: x / sqrt(mean(x²) + eps), times a weight, plus a bias.

    The result is rounded to the dtype of x once, after weight and bias, as in Gemma; Llama's kind rounds before the
    weight, too, which is less exact in half precision.

    Attributes:
        kind: `rms`; or `layer`, which first subtracts the mean of x.
        over: the features that mean and mean square are taken of: those of a `head`; or of the whole `width` of the
            projection, all heads together.
        weight: what the result is multiplied by: the learned weight `w`; `1+w`; or nothing, None.
        per_head: each head has weights of its own; else the heads share them.
        bias: a learned bias is added.
        eps: added to the mean square.
        after_rope: queries and keys are normalised after their rotation; else before it.

    Raises:
        TypeError: if eps is not a number, or what a norm has or has not not a boolean.
        ValueError: if a word is none of those, eps is not positive and finite, or two fields contradict each other.

    Source: RMSNorm, arXiv:1910.07467; LayerNorm, arXiv:1607.06450; of queries and keys, arXiv:2010.04245 and
    arXiv:2302.05442.
    """

    kind: Literal["rms", "layer"] = "rms"
    over: Literal["head", "width"] = "head"
    weight: Literal["w", "1+w"] | None = "w"
    per_head: bool = False
    bias: bool = False
    eps: float = 1e-6
    after_rope: bool = False

    def __post_init__(self) -> None:
        as_one_of("kind", self.kind, ("rms", "layer"))
        as_one_of("over", self.over, ("head", "width"))
        as_one_of("weight", self.weight, ("w", "1+w", None))
        for name in ("per_head", "bias", "after_rope"):
            object.__setattr__(self, name, as_boolean(name, getattr(self, name)))
        object.__setattr__(self, "eps", as_number("eps", self.eps))
        if not 0.0 < self.eps < math.inf:
            raise Refusal("eps", "be positive and finite", eps=self.eps)
        for name in ("per_head", "bias"):
            if getattr(self, name) and self.weight is None:
                raise Refusal(name, "come with a weight", {name: True, "weight": None})
        for name in ("per_head", "after_rope"):  # a width has one weight for each of its features
            if getattr(self, name) and self.over == "width":
                raise Refusal(name, "come with over='head'", {name: True, "over": "width"})

    @property
    def initial_weight(self) -> float:
        """The weight that a new layer has, which multiplies by 1."""
        return 0.0 if self.weight == "1+w" else 1.0

    def shapes(self, num_heads: int, head_dim: int) -> dict[str, tuple[int, ...]]:
        """Its parameters by name and shape: `weight` and `bias`, (H,), (heads, H) or, over the width, (heads * H,)."""
        shape = (num_heads * head_dim,) if self.over == "width" else (head_dim,)
        names = ("weight",) * (self.weight is not None) + ("bias",) * self.bias
        return dict.fromkeys(names, (num_heads, head_dim) if self.per_head else shape)


def check_norm(norm: object) -> None:
    """Refuse what is not a `Norm`.

    Raises:
        TypeError: if it is not one.
    """
    if not isinstance(norm, Norm):
        raise WrongType("norm", "be a Norm", norm=norm)

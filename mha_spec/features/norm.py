"""Norms of queries, keys, values and context."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mha_spec.errors import InputError, InputTypeError
from mha_spec.record import Record
from mha_spec.rules import as_boolean, as_factor, as_one_of


@dataclass(frozen=True, repr=False)
class Norm(Record):
    """Norm of projected features x: x / sqrt(mean(x²) + eps), times a weight, plus a bias.

    The result is rounded to the dtype of x once, after weight and bias, as in Gemma. Llama also
    rounds before the weight, which is less accurate in half precision.

    Attributes:
        kind: `rms`; or `layer`, which first subtracts the mean of x.
        over: features to average over: each `head`, or the `width` of all heads.
        weight: factor of the result: the learned weight `w`, or `1+w`; None for no weight.
        per_head: each head has its own weights; otherwise heads share them.
        bias: add a learned bias.
        eps: added to the mean square.
        after_rope: normalize queries and keys after RoPE instead of before.

    Raises:
        TypeError: if eps is not a number, or a flag not a boolean.
        ValueError: if a word is unknown, eps is not positive and finite, or two fields contradict
            each other.

    Source: RMSNorm, arXiv:1910.07467; LayerNorm, arXiv:1607.06450; query-key norms,
    arXiv:2010.04245 and arXiv:2302.05442.
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
        object.__setattr__(self, "eps", as_factor("eps", self.eps))
        for name in ("per_head", "bias"):
            if getattr(self, name) and self.weight is None:
                raise InputError(name, "come with a weight", {name: True, "weight": None})
        for name in ("per_head", "after_rope"):  # a norm over the width has one weight per feature
            if getattr(self, name) and self.over == "width":
                raise InputError(name, "come with over='head'", {name: True, "over": "width"})

    @property
    def initial_weight(self) -> float:
        """Initial weight, whose factor is 1."""
        if self.weight == "1+w":
            return 0.0
        return 1.0

    def shapes(self, num_heads: int, head_dim: int) -> dict[str, tuple[int, ...]]:
        """Return parameter shapes by name: `weight` and `bias`, (H,), (heads, H) or, over the
        width, (heads * H,).
        """
        if self.over == "width":
            shape = (num_heads * head_dim,)
        else:
            shape = (head_dim,)
        names = ("weight",) * (self.weight is not None) + ("bias",) * self.bias
        return dict.fromkeys(names, (num_heads, head_dim) if self.per_head else shape)


def check_norm(norm: object) -> None:
    """Reject anything but a `Norm`.

    Raises:
        TypeError: if it is anything else.
    """
    if not isinstance(norm, Norm):
        raise InputTypeError("norm", "be a Norm", norm=norm)

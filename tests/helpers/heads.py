"""Attention of split heads with all arrays as keywords, as tests draw, cast and differentiate
them.
"""

from dataclasses import dataclass
from typing import Any

from mha_spec.score_weights import SCORE_WEIGHTS


@dataclass(frozen=True)
class HeadsAttention:
    """`scaled_dot_product_attention` of an implementation, with learned weights as keywords.

    Attributes:
        package: the implementation.
        kernel: its kernel, unless a call has its own; None for the formula.
    """

    package: Any
    kernel: Any = None

    def __call__(self, *heads: Any, **options: Any) -> Any:
        """Return the context and the attention weights or None."""
        weights = {name: options.pop(name) for name in SCORE_WEIGHTS if name in options}
        learned = {name: x for name, x in weights.items() if x is not None}
        return self.package.scaled_dot_product_attention(
            *heads, **{"kernel": self.kernel, "learned": learned} | options
        )


def plain_attention(package: Any) -> HeadsAttention:
    """Return the formula of an implementation."""
    return HeadsAttention(package)


def fused_attention(package: Any) -> HeadsAttention:
    """Return the attention of an implementation with the default kernel of its layers."""
    return HeadsAttention(package, package.fused.attend)


def attention_in(form: str, package: Any) -> HeadsAttention:
    """Return the attention of an implementation in the form "plain" or "fused"."""
    return plain_attention(package) if form == "plain" else fused_attention(package)

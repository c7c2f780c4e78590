"""The input of a template: a layer, and the form of its calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from mha_spec import AttentionSpec, InputError, Norm


class CallKeywords(TypedDict, total=False):
    """Keyword arguments that describe how a layer is called.

    Attributes:
        is_causal: whether queries attend to no later key; default: True.
        is_cross: whether keys and values come from a second input.
        has_mask: whether a call passes a boolean mask, True = masked.
        has_bias: whether a call passes a bias that is added to the scores.
        has_positions: whether a call passes the positions of its tokens; default: 0, 1, … after
            cached tokens.
        cache: `static`, slots for a fixed number of tokens, with equal lengths in all sequences;
            `ragged`, with a length per sequence; None for no cache, the default.
    """

    is_causal: bool
    is_cross: bool
    has_mask: bool
    has_bias: bool
    has_positions: bool
    cache: Literal["static", "ragged"] | None


@dataclass(frozen=True)
class CallForm:
    """The form of a layer's calls, with the fields of `CallKeywords`."""

    is_causal: bool = True
    is_cross: bool = False
    has_mask: bool = False
    has_bias: bool = False
    has_positions: bool = False
    cache: Literal["static", "ragged"] | None = None

    def __post_init__(self) -> None:
        if self.cache not in (None, "static", "ragged"):
            raise InputError("cache", "be static, ragged or None", cache=self.cache)
        if self.cache is not None and not self.is_causal:
            raise InputError(
                "is_causal", "be True with a cache", is_causal=self.is_causal, cache=self.cache
            )
        for name in ("is_cross", "has_mask", "has_bias"):
            if self.cache is not None and getattr(self, name):
                raise InputError(name, "be False with a cache", {name: True, "cache": self.cache})


spec = AttentionSpec(64, 4, num_kv_heads=2)
"""Placeholder for the layer in templates, so that a checker knows its type."""

call = CallForm()
"""Placeholder for the form of its calls."""

norm = Norm()
"""Placeholder for the norm of queries and keys, of values, of the context or of latents."""

EPS = norm.eps
"""Placeholder for the constant of that norm."""

own_norms: tuple[str, ...] = ()
"""Placeholder for the norms that have a class of their own in PyTorch: qk, v and context."""

ABSENT: Any = object()
"""Value of an argument to remove from a call."""

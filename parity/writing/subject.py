"""Subject of a template: a layer, and the form of its calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from mha_spec import AttentionSpec, Refusal


class CallKeywords(TypedDict, total=False):
    """Keywords that say how a layer is called.

    Attributes:
        is_causal: no query attends to a later key; the default.
        is_cross: keys and values are made of a second input.
        has_mask: a call passes a boolean mask, True = masked.
        has_bias: a call passes a bias that is added to the scores.
        has_positions: a call passes the positions of its tokens; default: 0, 1, … after those in the cache.
        cache: `static`, slots for a fixed number of tokens, the same number in use in each sequence; `ragged`, each
            sequence has its own; None for no cache, the default.
    """

    is_causal: bool
    is_cross: bool
    has_mask: bool
    has_bias: bool
    has_positions: bool
    cache: Literal["static", "ragged"] | None


@dataclass(frozen=True)
class CallForm:
    """Form of a layer's calls, by the fields of `CallKeywords`."""

    is_causal: bool = True
    is_cross: bool = False
    has_mask: bool = False
    has_bias: bool = False
    has_positions: bool = False
    cache: Literal["static", "ragged"] | None = None

    def __post_init__(self) -> None:
        if self.cache not in (None, "static", "ragged"):
            raise Refusal("cache", "be static, ragged or None", cache=self.cache)
        if self.cache is not None and not self.is_causal:
            raise Refusal("is_causal", "be True with a cache", is_causal=self.is_causal, cache=self.cache)
        for name in ("is_cross", "has_mask", "has_bias"):
            if self.cache is not None and getattr(self, name):
                raise Refusal(name, "be False with a cache", {name: True, "cache": self.cache})


spec = AttentionSpec(64, 4, num_kv_heads=2)
"""Stands for the layer in templates, so that they are checked like any other module."""

call = CallForm()
"""Stands for the form of its calls."""

ABSENT: Any = None
"""Value of a keyword argument that is left out of a call."""

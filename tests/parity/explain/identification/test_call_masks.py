"""Attention in windows whose layer receives a mask: it is identified, and oddities of the mask are
rejected.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.samples import sample
from torch import Tensor, nn

from parity.explain.identification import Identification, identify

HEADS, WIDTH, TOKENS = 4, 8, 16


class WindowAttention(nn.Module):
    """Attention in windows (B * W, T, E); a function combines its scores with a mask (W, T, T)."""

    def __init__(self, change: Callable[..., Tensor]) -> None:
        super().__init__()
        self.change = change
        self.query, self.key, self.value, self.out = (
            nn.Linear(HEADS * WIDTH, HEADS * WIDTH) for _ in range(4)
        )

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        q, k, v = (
            projection(x).unflatten(-1, (HEADS, WIDTH)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        mask = attention_mask.repeat(len(x) // len(attention_mask), 1, 1)[:, None]
        weights = self.change(q @ k.mT * WIDTH**-0.5, mask).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


def mask_of_windows() -> Tensor:
    """Return an additive mask (3, T, T): the first window hides nothing, and the last one is not
    symmetric.
    """
    mask = torch.zeros(3, TOKENS, TOKENS)
    mask[1, :6, 6:] = mask[1, 6:, :6] = mask[2, 3:, :2] = mask[2, :9, 12:] = -100.0
    return mask


class Windows(nn.Module):
    """Two images of three windows, and their attention."""

    def __init__(self, change: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = WindowAttention(change)

    def forward(self, images: Tensor) -> Tensor:
        return self.attention(images.flatten(0, 1), mask_of_windows())


def identified(change: Callable[..., Tensor]) -> Identification:
    images = torch.randn(2, 3, TOKENS, HEADS * WIDTH, generator=torch.Generator().manual_seed(1))
    (layer,) = identify(Windows(change).eval(), {"images": images})
    return layer


def test_window_mask_is_evidence_not_spec():
    """A mask that the layer receives is named in the evidence and adds nothing to the spec."""
    layer = identified(lambda scores, mask: scores + mask)
    assert layer.spec is not None, str(layer)
    assert layer.spec.given() == {"d_model": HEADS * WIDTH, "num_heads": HEADS}
    assert layer.is_causal is False
    (evidence,) = (entry for entry in layer.evidence if entry.field == "mask")
    assert evidence.value == "attention_mask"


def at_hidden(change: Callable[[Tensor], Any]) -> Callable[..., Tensor]:
    """Return a function that changes scores of windows that hide keys, and then adds the mask."""

    def changed(scores: Tensor, mask: Tensor) -> Tensor:
        return (
            torch.where(mask.flatten(1).any(1)[:, None, None, None], change(scores), scores) + mask
        )

    return changed


ODDITIES: dict[str, Callable[..., Tensor]] = {
    "mask-transposed": lambda scores, mask: scores + mask.mT,
    "mask-of-another-window": lambda scores, mask: scores + mask.roll(1, 0),
    "mask-of-one-window": lambda scores, mask: (
        scores + mask * (torch.arange(len(mask)) % 3 == 1)[:, None, None, None]
    ),
    "mask-one-late": lambda scores, mask: scores + mask.roll(1, -1),
    "mask-of-a-head": lambda scores, mask: (
        scores + mask * (torch.arange(HEADS) == 0)[:, None, None]
    ),
    "mask-that-is-weak": lambda scores, mask: scores + 0.03 * mask,
    "mask-and-the-first-key": lambda scores, mask: (
        scores + mask.index_fill(3, torch.tensor(0), -100.0)
    ),
    "mask-that-is-left-out": lambda scores, mask: scores,
    "scale-of-masked-windows": at_hidden(lambda scores: 1.05 * scores),
    "bias-of-masked-windows": at_hidden(lambda scores: scores + 0.05 * torch.arange(TOKENS)),
    "cap-of-masked-windows": at_hidden(lambda scores: 2.0 * torch.tanh(scores / 2.0)),
    "causal-beside-the-mask": lambda scores, mask: (
        scores + mask - 100.0 * torch.ones(TOKENS, TOKENS).triu(1)
    ),
}
"""Layers whose scores are not the products plus the mask that they receive."""


@sample(6)
@pytest.mark.parametrize("name", ODDITIES)
def test_window_mask_oddity_is_rejected(name):
    """A layer that does not add exactly its mask to the scores has no spec, and a reason."""
    layer = identified(ODDITIES[name])
    assert layer.spec is None, str(layer)
    assert layer.reason

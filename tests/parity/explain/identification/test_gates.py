"""Gates whose bias is a parameter of their layer are identified, and oddities of them are
rejected.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers.samples import sample
from torch import Tensor, nn

from mha_spec import Gate
from parity.explain.identification import Identification, identify

HEADS, WIDTH = 4, 8


class GatedAttention(nn.Module):
    """Attention whose context is multiplied by a function of gates (B, T, N, H) and of a
    parameter.
    """

    def __init__(
        self, opened: Callable[[Tensor, Tensor], Tensor], shape: tuple[int, ...], width: int
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.opened, self.gate_bias = opened, nn.Parameter(torch.randn(shape))
        self.query, self.key, self.value, self.out = (
            nn.Linear(HEADS * WIDTH, HEADS * WIDTH) for _ in range(4)
        )
        self.gate = nn.Linear(HEADS * WIDTH, HEADS * width, bias=shape == (HEADS,))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, gate = (
            projection(x).unflatten(-1, (HEADS, -1))
            for projection in (self.query, self.key, self.value, self.gate)
        )
        q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))
        context = (q @ k.mT * WIDTH**-0.5).softmax(-1) @ v
        return self.out((context.transpose(1, 2) * self.opened(gate, self.gate_bias)).flatten(2))


def identified(
    opened: Callable[[Tensor, Tensor], Tensor],
    shape: tuple[int, ...] = (HEADS,),
    width: int = WIDTH,
) -> tuple[GatedAttention, Identification]:
    module = GatedAttention(opened, shape, width).eval()
    x = torch.randn(3, 24, HEADS * WIDTH, generator=torch.Generator().manual_seed(1))
    (layer,) = identify(module, {"x": x})
    return module, layer


def of_heads(gate: Tensor, bias: Tensor) -> Tensor:
    return torch.sigmoid(gate + bias[:, None])


@pytest.mark.parametrize("width", [WIDTH, 1])
def test_head_bias_becomes_gate_bias(width):
    """A parameter per head is added to the bias of the gate
    projection, for gates per head and per feature.
    """
    module, layer = identified(of_heads, width=width)
    assert layer.spec is not None, str(layer)
    assert layer.spec.gate == Gate(per_head=width == 1, bias=True)
    expected = module.gate.bias.detach() + module.gate_bias.detach().repeat_interleave(width)
    torch.testing.assert_close(torch.from_numpy(layer.weights["gate_proj.bias"]), expected)
    assert layer.names["gate_proj.bias"] == "gate_bias"


def test_feature_bias_becomes_gate_bias():
    """A parameter per feature is the bias of the gate projection, bit for bit."""
    module, layer = identified(
        lambda gate, bias: torch.sigmoid(gate + bias.unflatten(0, (HEADS, WIDTH))), (HEADS * WIDTH,)
    )
    assert layer.spec is not None, str(layer)
    assert layer.spec.gate == Gate(bias=True)
    assert (layer.weights["gate_proj.bias"] == module.gate_bias.detach().numpy()).all()


ODDITIES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "bias-of-other-heads": lambda gate, bias: of_heads(gate, bias.roll(1)),
    "bias-doubled": lambda gate, bias: of_heads(gate, 2.0 * bias),
    "bias-of-later-tokens": lambda gate, bias: torch.cat(
        [of_heads(gate[:, :9], bias), torch.sigmoid(gate[:, 9:])], 1
    ),
    "bias-after-the-sigmoid": lambda gate, bias: torch.sigmoid(gate) + bias[:, None],
    "factor-of-heads": lambda gate, bias: torch.sigmoid(gate * bias[:, None]),
    "softplus": lambda gate, bias: nn.functional.softplus(gate + bias[:, None]),
    "bias-of-small-gates-alone": lambda gate, bias: of_heads(
        gate, bias if gate.abs().max() < 9.0 else 0.9 * bias
    ),
}


@sample(4)
@pytest.mark.parametrize("name", ODDITIES)
def test_gate_oddity_is_rejected(name):
    """A gate that is not the sigmoid of its projection plus the bias has no spec, and a reason."""
    _, layer = identified(ODDITIES[name])
    assert layer.spec is None, str(layer)
    assert layer.reason

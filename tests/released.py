"""Attention layers of released models, tiny and with random weights: what a specification must be able to say.

They are transformers' own modules, made from configurations; nothing is downloaded.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from conftest import Sibling
from torch import Tensor, nn

import parity
from mha_spec import AttentionSpec

NAMES = {"o_proj": "out_proj"}
TOLERANCE = 3e-6  # of the largest value: both sides compute in float32

Sees = Callable[[Any, Any, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Released:
    """A released module, and the specification of what it computes.

    Attributes:
        module: the attention layer.
        spec: what it is to us.
        rotary: gives the module its cosines and sines, from an array and positions.
        sees: whether a query sees a key, in transformers' form: of a batch, a head, and the places of both.
        names: our names for its parts, where they differ.
        keywords: what else it is called with, by the positions of its tokens.
    """

    module: nn.Module
    spec: AttentionSpec
    rotary: Callable[[Tensor, Tensor], Any] | None = None
    sees: Sees = lambda batch, head, query, key: key <= query
    names: Mapping[str, str] = field(default_factory=lambda: NAMES)
    keywords: Callable[[Tensor], dict[str, Any]] = lambda positions: {}

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        with torch.no_grad():
            for parameter in self.module.parameters():
                parameter.copy_(torch.randn_like(parameter) * (0.4 if parameter.ndim > 1 else 0.7))
        self.module.eval()

    def __call__(self, x: Tensor, **keywords: Any) -> Tensor:
        """The output for a whole sequence."""
        positions = torch.arange(x.shape[1])[None]
        visible = self.sees(0, 0, positions[0][:, None], positions[0][None])
        mask = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(x.dtype).min)[None, None]
        if self.rotary is not None:
            keywords["position_embeddings"] = self.rotary(x, positions)
        found = self.module(x, attention_mask=mask, **keywords, **self.keywords(positions))
        return found[0] if isinstance(found, tuple) else found

    def canonical(self, tensors: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
        """Its tensors by our names."""
        found = {}
        for name, tensor in tensors.items():
            part, dot, leaf = name.rpartition(".")
            found[self.names.get(name, self.names.get(part, part) + dot + leaf)] = tensor.detach().numpy()
        return found


def inputs(d_model: int, seq_len: int = 11, batch: int = 2) -> np.ndarray:
    """Tokens, (B, T, E)."""
    return np.random.default_rng(1).standard_normal((batch, seq_len, d_model)).astype(np.float32)


def close(found: np.ndarray, expected: np.ndarray, what: str) -> None:
    """Equal but for rounding."""
    assert found.shape == expected.shape, what
    error, largest = np.abs(found - expected).max(), np.abs(expected).max()
    assert error <= TOLERANCE * largest, f"{what} is {error / largest:.1e} of its largest value off"


def filled(sibling: Sibling, kind: str, released: Released) -> Any:
    """A module of ours with its weights."""
    module = parity.load_into(sibling.module(kind, released.spec), released.canonical(released.module.state_dict()))
    return module.eval() or module


def check_forward(sibling: Sibling, released: Released, *, is_causal: bool = True, seq_len: int = 11) -> None:
    """Both paths of our module give what it gives."""
    x = inputs(released.spec.d_in, seq_len)
    with torch.no_grad():
        expected = released(torch.from_numpy(x)).numpy()
    module = filled(sibling, "MultiHeadAttention", released)
    for need_weights in (False, True):
        output, _ = module(sibling.array(x), is_causal=is_causal, need_weights=need_weights)
        close(sibling.numpy(output), expected, f"the output with need_weights={need_weights}")


def check_gradients(released: Released, *, is_causal: bool = True) -> None:
    """Our gradients of inputs and weights are its gradients; the siblings' own agree, as every case shows."""
    import mha_torch

    x = torch.from_numpy(inputs(released.spec.d_in)).requires_grad_()
    expected = released(x)
    cotangent = torch.from_numpy(inputs(expected.shape[-1]))
    parameters = dict(released.module.named_parameters())
    grads = torch.autograd.grad(expected, [x, *parameters.values()], cotangent)
    expected_grads = {"x": grads[0].numpy(), **released.canonical(dict(zip(parameters, grads[1:], strict=True)))}

    module = parity.load_into(mha_torch.MultiHeadAttention(released.spec), released.canonical(parameters)).eval()
    output, _ = module(x, is_causal=is_causal, need_weights=True)
    own = dict(module.named_parameters())
    found = dict(zip(["x", *own], torch.autograd.grad(output, [x, *own.values()], cotangent), strict=True))
    assert found.keys() == expected_grads.keys()
    scale = max(np.abs(grad).max() for grad in expected_grads.values())
    for name, grad in found.items():
        assert np.abs(grad.numpy() - expected_grads[name]).max() <= 2 * TOLERANCE * scale, f"the gradient of {name}"


def check_decode(sibling: Sibling, released: Released, *, seq_len: int = 11, prompt: int = 4) -> None:
    """A prompt and then token by token through our cache: at each position what it gives for the whole."""
    x = inputs(released.spec.d_in, seq_len)
    with torch.no_grad():
        expected = released(torch.from_numpy(x)).numpy()
    module = filled(sibling, "MultiHeadAttentionWithCache", released)
    cache, outputs = module.init_cache(x.shape[0], seq_len), []
    for part in np.split(x, range(prompt, seq_len), axis=1):
        output, cache = module(sibling.array(part), cache)
        outputs.append(sibling.numpy(output))
    close(np.concatenate(outputs, axis=1), expected, "the output through the cache")

"""Attention modules as transformers released them, made from tiny configurations, and ours beside them."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from torch import Tensor, nn

import mha_jax
import mha_torch
from mha_spec import AttentionSpec
from parity.backends import jax as jax_backend

NEAR = 2e-6  # of the largest element: a few roundings of float32, in which their norms and softmax compute
NEAR_GRADIENT = 2e-5  # of the largest element of all gradients, each a sum over all tokens

Weights = Mapping[str, Tensor]


def made(family: str, name: str, config: str, seed: int = 0, **options: object) -> tuple[nn.Module, object]:
    """A released module with random parameters, none of them near 0 or 1 in a norm, and its configuration."""
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    settings = getattr(importlib.import_module(f"transformers.models.{family}"), config)(**options)
    settings._attn_implementation = "eager"
    return drawn(getattr(modeling, name)(settings, layer_idx=0), seed), settings


def drawn(module: nn.Module, seed: int = 0) -> nn.Module:
    """A module with random parameters, none of them near 0 or 1 in a norm, in evaluation."""
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            is_matrix = parameter.ndim == 2 and min(parameter.shape) > 8
            values = torch.randn(parameter.shape, generator=rng) * (0.2 if is_matrix else 1.0)
            parameter.copy_(values if is_matrix else values.sign() * (0.4 + 0.4 * values.abs()))
    return module.eval()


def rotary(family: str, name: str, settings: object, x: Tensor, *layer_type: str) -> object:
    """What the released rotary embedding gives for positions 0, 1, …"""
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    return getattr(modeling, name)(settings)(x, torch.arange(x.shape[1])[None], *layer_type)


def causal(seq_len: int) -> Tensor:
    """The additive mask that eager modules take, (1, 1, T, T)."""
    return torch.full((seq_len, seq_len), -torch.inf).triu(1)[None, None]


def half_split(rows: Tensor, head_dim: int) -> Tensor:
    """Rows (or features) of heads whose RoPE pairs are interleaved, as (i, i + H/2)."""
    heads = rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:])
    return heads.transpose(1, 2).reshape(rows.shape)


def renamed(parameters: Weights, names: Mapping[str, str]) -> dict[str, Tensor]:
    """Parameters by our names; `names` are parts of theirs, and what ours are."""
    found = {}
    for name, parameter in parameters.items():
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        found[name] = parameter
    return found


def check_equal(
    released: Callable[[Tensor], Tensor],
    module: nn.Module,
    spec: AttentionSpec,
    weights_of: Callable[[Weights], Weights],
    x: Tensor,
    *,
    is_causal: bool = True,
) -> None:
    """Our layer gives what the released one gives: on every path, its gradients, and token by token with a cache.

    Args:
        released: the output of the module.
        module: the module.
        spec: our layer.
        weights_of: our weights as a function of the module's parameters.
        x: (B, T, d_in).
        is_causal: whether no token sees a later one; if so the layer is also asked with a cache.
    """
    parameters = dict(module.named_parameters())
    x = x.clone().requires_grad_()
    expected = released(x)
    cotangent = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    leaves = {"x": x, **parameters}
    wanted = torch.autograd.grad(expected, [*leaves.values()], cotangent)
    for need_weights in (False, True):
        weights = weights_of(parameters)
        output, _ = mha_torch.multi_head_attention(x, weights, spec, is_causal=is_causal, need_weights=need_weights)
        _near(output, expected)
        found = torch.autograd.grad(output, [*leaves.values()], cotangent)
        largest = max(float(grad.abs().max()) for grad in wanted)
        for name, ours, theirs in zip(leaves, found, wanted, strict=True):
            assert float((ours - theirs).abs().max()) <= NEAR_GRADIENT * largest, name
    held = {name: weight.detach() for name, weight in weights_of(parameters).items()}
    params = jax_backend.to_params({name: weight.numpy() for name, weight in held.items()}, spec)
    tokens = jnp.asarray(x.detach().numpy())
    for need_weights in (False, True):
        output, _ = mha_jax.multi_head_attention(tokens, params, spec, is_causal=is_causal, need_weights=need_weights)
        _near(np.asarray(output), expected)
    if is_causal:
        _check_cached(held, params, spec, x.detach(), expected)


def _check_cached(held: Weights, params: Any, spec: AttentionSpec, x: Tensor, expected: Tensor) -> None:
    """A prompt of two tokens, then token by token."""
    batch_size, seq_len, _ = x.shape
    sizes = (batch_size, spec.num_kv_heads, seq_len, spec.head_dim)
    chunks = [slice(0, 2), *(slice(t, t + 1) for t in range(2, seq_len))]
    cache, outputs = mha_torch.init_cache(*sizes), []
    with torch.no_grad():
        for chunk in chunks:
            output, cache = mha_torch.multi_head_attention_with_static_cache(x[:, chunk], held, spec, cache)
            outputs.append(output)
    _near(torch.cat(outputs, dim=1), expected)
    cache, outputs = mha_jax.init_cache(*sizes), []
    for chunk in chunks:
        tokens = jnp.asarray(x[:, chunk].numpy())
        output, cache = mha_jax.multi_head_attention_with_static_cache(tokens, params, spec, cache)
        outputs.append(np.asarray(output))
    _near(np.concatenate(outputs, axis=1), expected)


def _near(actual: Tensor | np.ndarray, expected: Tensor) -> None:
    found, wanted = (x.detach().numpy() if isinstance(x, Tensor) else x for x in (actual, expected))
    assert found.shape == wanted.shape
    assert np.abs(found - wanted).max() <= NEAR * np.abs(wanted).max()

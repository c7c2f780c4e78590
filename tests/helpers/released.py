"""Attention layers of transformers, tiny and with random weights, compared with ours.

Nothing is downloaded.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import mha_torch
from helpers.frameworks import SIBLINGS, Sibling
from mha_spec import AttentionSpec, Rope
from parity import load_into

# of the largest number: norms, softmax and RoPE of these layers are float32, also in a float64
# layer
NEAR = 3e-6

SIZES = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
}
plain_spec = partial(
    AttentionSpec, 32, 4, num_kv_heads=2, qkv_bias=False, out_bias=False, rope=Rope()
)
"""Specification shared by most layers of these sizes; each test adds the feature it covers."""

NAMES = {
    "o_proj": "out_proj",
    "dense": "out_proj",
    "q_layernorm": "q_norm",
    "k_layernorm": "k_norm",
}
NAMES |= {"query_layernorm": "q_norm", "key_layernorm": "k_norm"}
NAMES |= {
    "q_a_layernorm": "q_a_norm",
    "kv_a_layernorm": "kv_a_norm",
    "kv_a_proj_with_mqa": "kv_a_proj",
}

Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class Released:
    """A layer of transformers and our specification of it.

    Attributes:
        module: the layer.
        spec: our specification of it.
        rotary: returns cosines and sines for the module, from its input and the token positions.
        sees: returns True if a query attends to a key, from (batch, head, query index, key index)
            as in transformers.
        repacked: maps its parameters, already renamed to ours, to our weights.
        keywords: additional arguments of its call.
    """

    module: nn.Module
    spec: AttentionSpec
    rotary: Callable[[Tensor, Tensor], Any] | None = None
    sees: Callable[..., Tensor] = lambda batch, head, query, key: key <= query
    repacked: Callable[[dict[str, Tensor]], Weights] = dict
    keywords: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        """Draw the parameters, with none of a norm near 0 or 1."""
        generator = torch.Generator().manual_seed(0)
        self.module.double().eval()
        with torch.no_grad():
            for parameter in self.module.parameters():
                values = torch.randn(parameter.shape, generator=generator)
                is_matrix = parameter.ndim == 2 and min(parameter.shape) > 8
                parameter.copy_(
                    values * 0.3 if is_matrix else values.sign() * (0.4 + 0.4 * values.abs())
                )

    def __call__(self, x: Tensor, past: int = 0, **keywords: Any) -> Tensor:
        """Return the output for tokens that follow `past` others in a cache, which is passed by
        keyword.
        """
        positions = torch.arange(past + x.shape[1])
        visible = self.sees(0, 0, positions[past:, None], positions)
        mask = torch.zeros(visible.shape, dtype=x.dtype).masked_fill(
            ~visible, torch.finfo(x.dtype).min
        )[None, None]
        if self.rotary is not None:
            keywords["position_embeddings"] = self.rotary(
                x, positions_of(self.spec, x.shape[1], past)
            )
        return self.module(hidden_states=x, attention_mask=mask, **keywords, **self.keywords or {})[
            0
        ]

    def weights(self) -> Weights:
        """Return our weights as a function of its parameters."""
        weights: dict[str, Tensor] = {}
        widths = (self.spec.q_width, self.spec.k_width, self.spec.v_width)
        for name, parameter in self.module.named_parameters():
            for theirs, ours in NAMES.items():
                name = name.replace(theirs, ours)
            kind, _, leaf = name.rpartition(".")
            if kind == "query_key_value":  # q, k and v of each head in turn
                parts = [
                    part.flatten(0, 1)
                    for part in parameter.unflatten(0, (-1, 3, self.spec.head_dim)).unbind(1)
                ]
            elif kind == "qkv_proj":
                parts = parameter.split(widths)
            else:
                weights[name] = parameter
                continue
            weights |= {
                f"{letter}_proj.{leaf}": part for letter, part in zip("qkv", parts, strict=True)
            }
        return self.repacked(weights)


def made(
    family: str,
    prefix: str,
    spec: AttentionSpec,
    rope: Mapping[str, Any] | None = None,
    *,
    layer_type: str | None = None,
    options: Mapping[str, Any] | None = None,
    kind: str = "Attention",
    **others: Any,
) -> Released:
    """Build a layer of transformers.

    Args:
        family: model family in transformers whose module defines the layer.
        prefix: common prefix of its class names.
        spec: our specification of it.
        rope: RoPE parameters, if they differ from the defaults.
        layer_type: key of these RoPE parameters in models with several layer types.
        options: additional configuration options.
        kind: suffix of its class name.
        others: attributes of `Released`.
    """
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    attention, configuration, rotary = (
        getattr(modeling, f"{prefix}Text{suffix}", None) or getattr(modeling, f"{prefix}{suffix}")
        for suffix in (kind, "Config", "RotaryEmbedding")
    )
    parameters = {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 1.0,
        **(rope or {}),
    }
    of_rope = {"rope_parameters": {layer_type: parameters} if layer_type else parameters}
    of_layer = {"layer_types": [layer_type]} if layer_type else {}
    config = configuration(
        **SIZES | of_rope | of_layer | dict(options or {}), attn_implementation="eager"
    )
    embedding, of_type = rotary(config), {"layer_type": layer_type} if layer_type else {}
    module = attention(config, layer_idx=0)
    keywords: dict[str, Any] = {"rotary": lambda x, positions: embedding(x, positions, **of_type)}
    return Released(module, spec, **keywords | others)


def positions_of(spec: AttentionSpec, length: int, past: int = 0) -> Tensor:
    """Return positions of a text, (1, T), or of frames of 2 x 3 patches, (3, 1, T)."""
    tokens = torch.arange(past, past + length)[None]
    if spec.rope is None or spec.rope.sections is None:
        return tokens
    return torch.stack([tokens // 6, tokens // 6 + tokens % 6 // 3, tokens // 6 + tokens % 3])


def check_equal(
    released: Released, *, length: int = 11, is_causal: bool = True, in_steps: bool = True
) -> None:
    """Check that our layer matches the released one on both paths, in cached steps and in its
    gradients.

    Args:
        released: the layer.
        length: sequence length.
        is_causal: True if no token attends to a later one.
        in_steps: True if cached steps match the whole sequence, which fails if frequencies depend
            on the length.
    """
    x = torch.randn(
        2, length, released.spec.d_in, generator=torch.Generator().manual_seed(1)
    ).double()
    with torch.no_grad():
        expected = released(x).numpy()
    for sibling in SIBLINGS.values():
        _check_output(sibling, released, x.float().numpy(), expected, is_causal)
        if is_causal and in_steps:
            _check_steps(sibling, released, x.float().numpy(), expected)
    _check_gradients(
        released, x, is_causal
    )  # every case shows that the implementations agree on gradients


def check_near(actual: np.ndarray, expected: np.ndarray, what: str, allowed: float = NEAR) -> None:
    """Check equality up to rounding."""
    assert actual.shape == expected.shape, what
    error, largest = np.abs(actual - expected).max(), np.abs(expected).max()
    assert error <= allowed * largest, f"{what} is {error / largest:.1e} of its largest number off"


def _filled(sibling: Sibling, kind: str, released: Released) -> Any:
    weights = {name: weight.detach().float().numpy() for name, weight in released.weights().items()}
    return load_into(sibling.module(kind, released.spec), weights, released.spec)


def _axes(released: Released, length: int) -> np.ndarray | None:
    """Return positions if they are not 0, 1, …"""
    positions = positions_of(released.spec, length)
    return positions.int().numpy() if positions.ndim == 3 else None


def _check_output(
    sibling: Sibling, released: Released, x: np.ndarray, expected: np.ndarray, is_causal: bool
) -> None:
    module, axes = _filled(sibling, "MultiHeadAttention", released), _axes(released, x.shape[1])
    options = {} if axes is None else {"positions": sibling.array(axes)}
    for need_weights in (False, True):
        output, _ = module(
            sibling.array(x), is_causal=is_causal, need_weights=need_weights, **options
        )
        what = f"the output of {sibling.name} with need_weights={need_weights}"
        check_near(sibling.numpy(output), expected, what, 2 * NEAR)


def _check_steps(sibling: Sibling, released: Released, x: np.ndarray, expected: np.ndarray) -> None:
    """Check a prompt followed by single tokens; with latents, using a cache of keys and values and
    one of latents.
    """
    batch_size, length, _ = x.shape
    axes = _axes(released, length)
    kinds = (
        "MultiHeadAttentionWithCache",
        *("MultiHeadLatentAttention",) * (released.spec.latent is not None),
    )
    for kind in kinds:
        module = _filled(sibling, kind, released)
        cache, outputs = module.init_cache(batch_size, length), []
        for begin, end in [(0, 4), *((t, t + 1) for t in range(4, length))]:
            options = {} if axes is None else {"positions": sibling.array(axes[..., begin:end])}
            output, cache = module(sibling.array(x[:, begin:end]), cache, **options)
            outputs.append(sibling.numpy(output))
        check_near(
            np.concatenate(outputs, axis=1),
            expected,
            f"the output of {sibling.name}'s {kind}",
            2 * NEAR,
        )


def _check_gradients(released: Released, x: Tensor, is_causal: bool) -> None:
    """Check gradients in float64, of the input and of each parameter of the released layer, on both
    paths.
    """
    leaves = {"x": x.clone().requires_grad_(), **dict(released.module.named_parameters())}
    expected = released(leaves["x"])
    cotangent = torch.randn(
        expected.shape, generator=torch.Generator().manual_seed(2), dtype=x.dtype
    )
    wanted = torch.autograd.grad(expected, [*leaves.values()], cotangent)
    largest = max(grad.abs().max().item() for grad in wanted)
    axes = _axes(released, x.shape[1])
    options: dict[str, Any] = {} if axes is None else {"positions": torch.from_numpy(axes)}
    for need_weights in (False, True):
        output, _ = mha_torch.multi_head_attention(
            leaves["x"],
            dict(released.weights()),
            released.spec,
            is_causal=is_causal,
            need_weights=need_weights,
            **options,
        )
        gradients = torch.autograd.grad(output, [*leaves.values()], cotangent)
        for name, ours, theirs in zip(leaves, gradients, wanted, strict=True):
            # The terms of some biases cancel, such as the bias of k if few features are rotated.
            scale = largest if name.endswith("bias") else theirs.abs().max().item()
            assert (ours - theirs).abs().max().item() <= NEAR * scale, f"the gradient of {name}"

"""Layers of keras-hub, a check independent of transformers, have the same output as ours.

They are written in Keras, from papers and checkpoints; here they run on PyTorch with random
weights.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from helpers.frameworks import SIBLINGS
from helpers.released import NEAR, check_near

from mha_spec import (
    Alibi,
    AttentionSpec,
    Gate,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    Norm,
    RelativeBias,
    Rope,
    YarnScaling,
)
from parity import convert, load_into

with pytest.MonkeyPatch.context() as _environment:
    _environment.setenv(
        "KERAS_BACKEND", "torch"
    )  # on JAX it would not run under conftest's strict promotion
    importlib.import_module("keras_hub")

LENGTH, WIDTH = 40, 32
HEADS = {"num_query_heads": 4, "num_key_value_heads": 2}
plain = partial(AttentionSpec, WIDTH, 4, num_kv_heads=2, qkv_bias=False, out_bias=False)
wide = partial(plain, head_dim=16)  # wider heads than WIDTH / num_heads
SHORT, LONG = (1.0, 1.2, 1.5, 2.0), (1.0, 2.0, 5.0, 9.0)


def called_masked(layer, x, visible):
    output = layer(x, attention_mask=visible)
    return output[0] if isinstance(output, tuple) else output


def called_falcon(layer, x, visible):
    decoder = importlib.import_module("keras_hub.src.models.falcon.falcon_transformer_decoder")
    slopes = decoder.FalconTransformerDecoder(layer.num_heads, WIDTH)._build_alibi_tensor
    return layer(x, slopes(layer.num_heads, torch.ones(x.shape[:2])), attention_mask=visible)


def as_layout(name, spec):
    """A function that converts to our weights by a layout of the converter."""
    return partial(convert, source=name, target="canonical", spec=spec)


def of_neox(arrays):
    """Queries, keys and values of a head are features of one kernel."""
    kernel, bias = arrays["query_key_value.kernel"], arrays["query_key_value.bias"]
    parts = zip("qkv", np.split(kernel, 3, axis=2), np.split(bias, 3, axis=1), strict=True)
    weights = {}
    for name, weight, its_bias in parts:
        weights |= {
            f"{name}_proj.weight": weight.reshape(WIDTH, -1).T,
            f"{name}_proj.bias": its_bias.reshape(-1),
        }
    return weights | {
        "out_proj.weight": arrays["attention_output.kernel"].T,
        "out_proj.bias": arrays["attention_output.bias"],
    }


def of_t5(arrays):
    projections = {"q": "query", "k": "key", "v": "value", "out": "output"}
    weights = {
        f"{name}_proj.weight": arrays[f"{projection}_projector.kernel"].T
        for name, projection in projections.items()
    }
    return weights | {"relative_bias": arrays["embeddings"]}


def of_qwen35(arrays):
    """The gate of a head follows its queries."""
    query, gate = np.split(arrays["query.kernel"], 2, axis=2)
    weights = {
        f"{name}_proj.weight": kernel.reshape(WIDTH, -1).T
        for name, kernel in (
            ("q", query),
            ("gate", gate),
            ("k", arrays["key.kernel"]),
            ("v", arrays["value.kernel"]),
        )
    }
    norms = {f"{name[0]}_norm.weight": arrays[f"{name}_norm.scale"] for name in ("query", "key")}
    return (
        weights
        | norms
        | {"out_proj.weight": arrays["attention_output.kernel"].reshape(-1, WIDTH).T}
    )


@dataclass(frozen=True)
class Voice:
    """A layer of keras-hub and its specification.

    Attributes:
        layer: its path, `family.module.Class`.
        spec: the specification of an equal layer of ours.
        options: arguments of its constructor.
        source: a layout or a function that converts its variables to our weights.
        call: calls the layer with tokens and a mask, True where a token attends to another.
    """

    layer: str
    spec: AttentionSpec
    options: Mapping[str, Any]
    source: str | Callable[[Mapping[str, np.ndarray]], Mapping[str, np.ndarray]] = "keras_hub.LLaMA"
    call: Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor] = called_masked

    def made(self) -> Any:
        """The layer with random weights; vectors such as weights of norms have no values near 0."""
        family, module, name = self.layer.split(".")
        layer = getattr(importlib.import_module(f"keras_hub.src.models.{family}.{module}"), name)(
            **self.options
        )
        self.call(
            layer, torch.zeros(1, 2, WIDTH), torch.ones(1, 2, 2, dtype=torch.bool)
        )  # builds the layer
        rng = np.random.default_rng(0)
        for variable in layer.variables:
            values = rng.standard_normal(variable.shape)
            is_matrix = len(variable.shape) > 1 and "bias" not in variable.path
            variable.assign(
                values * 0.3 if is_matrix else np.sign(values) * (0.4 + 0.4 * np.abs(values))
            )
        return layer

    def weights(self, layer: Any) -> Mapping[str, np.ndarray]:
        """Our weights, with the same values."""
        arrays = {
            variable.path.removeprefix(f"{layer.name}/").replace(
                "/", "."
            ): variable.value.detach().numpy()
            for variable in layer.variables
        }
        source = as_layout(self.source, self.spec) if isinstance(self.source, str) else self.source
        return {name: np.ascontiguousarray(x) for name, x in source(arrays).items()}


VOICES = {
    "Llama 3.1": Voice(
        "llama.llama_attention.LlamaAttention",
        plain(rope=Rope(5e5, scaling=Llama3Scaling(8.0, 64))),
        HEADS
        | {
            "rope_max_wavelength": 5e5,
            "rope_pretraining_sequence_length": 64,
            "rope_frequency_adjustment_factor": 8.0,
        }
        | {"rope_low_freq_factor": 1.0, "rope_high_freq_factor": 4.0},
    ),
    "Qwen3": Voice(
        "qwen3.qwen3_attention.Qwen3Attention",
        wide(rope=Rope(1e6, scaling=LinearScaling(4.0)), qk_norm=Norm(eps=1e-5)),
        HEADS | {"head_dim": 16, "rope_max_wavelength": 1e6, "rope_scaling_factor": 4.0},
    ),
    "Qwen3.5": Voice(
        "qwen3_5.qwen3_5_attention.Qwen3_5Attention",
        wide(rope=Rope(rotary_dim=4), qk_norm=Norm(weight="1+w"), gate=Gate()),
        HEADS | {"head_dim": 16},
        of_qwen35,
    ),
    "Gemma 2": Voice(
        "gemma.gemma_attention.CachedGemmaAttention",
        wide(rope=Rope(), scale=8**-0.5, soft_cap=5.0, window_size=4),
        HEADS
        | {"head_dim": 16, "logit_soft_cap": 5.0, "query_head_dim_normalize": False}
        | {"use_sliding_window_attention": True, "sliding_window_size": 4},
        "keras_hub.Gemma",
    ),
    "Gemma 3": Voice(
        "gemma3.gemma3_attention.CachedGemma3Attention",
        wide(rope=Rope(1e6, scaling=LinearScaling(8.0)), qk_norm=Norm(weight="1+w")),
        HEADS
        | {
            "head_dim": 16,
            "use_query_key_norm": True,
            "rope_wavelength": 1e6,
            "rope_scaling_factor": 8.0,
        },
        "keras_hub.Gemma",
    ),
    "gpt-oss": Voice(
        "gpt_oss.gpt_oss_attention.GptOssAttention",
        AttentionSpec(
            WIDTH,
            4,
            num_kv_heads=2,
            sinks=True,
            rope=Rope(1.5e5, scaling=YarnScaling(32.0, 4096, truncate=False)),
            window_size=5,  # a window of 4 in keras-hub includes the token 4 positions away
        ),
        HEADS | {"rope_max_wavelength": 1.5e5, "rope_scaling_factor": 32.0, "sliding_window": 4},
    ),
    "Phi-3": Voice(
        "phi3.phi3_attention.Phi3Attention",
        plain(rope=Rope(scaling=LongRopeScaling(4.0, 8, SHORT, LONG))),
        HEADS
        | {"max_sequence_length": 32, "pretraining_sequence_length": 8, "rope_scaling_type": "su"}
        | {"rope_scaling_short_factor": SHORT, "rope_scaling_long_factor": LONG},
    ),
    "GPT-NeoX": Voice(
        "gpt_neo_x.gpt_neo_x_attention.GPTNeoXAttention",
        AttentionSpec(WIDTH, 2, rope=Rope(rotary_dim=4)),
        {"num_heads": 2, "hidden_dim": WIDTH},
        of_neox,
    ),
    "BLOOM": Voice(
        "bloom.bloom_attention.BloomAttention",
        AttentionSpec(WIDTH, 4, alibi=Alibi()),
        {"num_heads": 4},
        "keras_hub.BLOOM",
    ),
    "Falcon": Voice(
        "falcon.falcon_attention.FalconAttention",
        AttentionSpec(WIDTH, 4, alibi=Alibi(scaled=True)),
        {"num_heads": 4, "attention_dropout_rate": 0.0},
        "keras_hub.BLOOM",
        called_falcon,
    ),
    "T5": Voice(
        "t5.t5_multi_head_attention.T5MultiHeadAttention",
        AttentionSpec(
            WIDTH,
            4,
            qkv_bias=False,
            out_bias=False,
            scale=1.0,
            relative_bias=RelativeBias(bidirectional=False),
        ),
        {
            "is_decoder": True,
            "hidden_dim": WIDTH,
            "key_value_dim": 8,
            "num_heads": 4,
            "dropout": 0.0,
        }
        | {"use_relative_attention_bias": True},
        of_t5,
        lambda layer, x, visible: layer.call(x, mask=visible)[
            0
        ],  # `mask` of __call__ has a different meaning in Keras
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", VOICES)
def test_keras_hub_layer_matches_ours(name):
    """JAX and PyTorch match the layer of keras-hub on 40 causal tokens within 2 * NEAR."""
    voice = VOICES[name]
    layer = voice.made()
    x = np.random.default_rng(1).standard_normal((2, LENGTH, WIDTH)).astype(np.float32)
    visible = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().expand(2, -1, -1)
    expected = voice.call(layer, torch.from_numpy(x), visible).detach().numpy()
    for sibling in SIBLINGS.values():
        module = load_into(
            sibling.module("MultiHeadAttention", voice.spec), voice.weights(layer), voice.spec
        )
        for need_weights in (
            (False, True) if sibling.name == "torch" else (False,)
        ):  # each would compile again in JAX
            output, _ = module(sibling.array(x), is_causal=True, need_weights=need_weights)
            check_near(sibling.numpy(output), expected, f"{name} in {sibling.name}", 2 * NEAR)

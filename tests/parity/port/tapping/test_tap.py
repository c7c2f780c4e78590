"""Taps on live models: nothing changes, correct layers pass, and a bug in one layer is found and
named.
"""

import json
import os
import random
import re
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from io import StringIO

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import linen, nnx
from helpers import ROOT
from helpers.injections import BUGS, inject
from helpers.input_errors import Misuse, rejects, rejects_type
from helpers.samples import sample
from helpers.selection import first_families, stack_signature
from rich.console import Console
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    QuantizedCache,
    QuantizedLayer,
    StaticCache,
)

import mha_jax
import mha_torch
import parity
from parity import AttentionSpec, CacheQuantization, Rope, specs_of
from parity.explain.diagnosis import taps
from parity.explain.diagnosis.diagnose import Diagnosis, Finding
from parity.explain.diagnosis.tapped import _cache
from parity.measure.core.stages import stage_named
from parity.measure.core.weights import save_tensors
from parity.port.models.families import FAMILIES
from parity.port.models.specs import ModelLayer
from parity.port.tapping.record import TappedCall
from parity.use.cli.main import main
from parity.use.reporting.taps import print_difference
from parity.use.running.taps import layers_in

TRIALS = int(os.environ.get("PARITY_TAP_TRIALS", "8"))
"""The number of bugs that are injected, one after the other; 200 take two minutes."""

# ---- Models --------------------------------------------------------------------------------------

COMMON = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "vocab_size": 64,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "head_dim": 16,
    "sliding_window": 5,
    "use_sliding_window": True,
    "max_window_layers": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "n_shared_experts": 1,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
LATENT = {
    "num_key_value_heads": 4,
    "head_dim": None,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
}
GPT = {"n_embd": 32, "n_head": 4, "n_layer": 4, "n_positions": 64, "n_inner": 48, "rotary_dim": 4}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
SECTIONS = {
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.25,
    "mrope_section": [2, 1, 1],
    "mrope_interleaved": True,
}
QWEN35 = {**LINEAR, "head_dim": 32, "rope_parameters": {"rope_type": "default", **SECTIONS}}
BERTS = {
    **{
        key: {}
        for key in (
            "bert",
            "camembert",
            "data2vec-text",
            "electra",
            "ernie",
            "megatron-bert",
            "rembert",
        )
    },
    **{
        key: {}
        for key in (
            "bert-generation",
            "roberta",
            "roberta-prelayernorm",
            "xlm-roberta",
            "xlm-roberta-xl",
        )
    },
    "electra": {"embedding_size": 32},
    "rembert": {"input_embedding_size": 32, "output_embedding_size": 32},
    "roc_bert": {"pronunciation_vocab_size": 64, "shape_vocab_size": 64},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "roformer": {},
}
OWN = {
    **dict.fromkeys(
        ("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu", "minicpm3"), LATENT
    ),
    **dict.fromkeys(
        ("bloom", "codegen", "gpt-sw3", "gpt2", "gpt_bigcode", "gptj", "openai-gpt"), GPT
    ),
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text"), QWEN35),
    **{family: {"is_decoder": True, **sizes} for family, sizes in BERTS.items()},
    "dbrx": {
        "d_model": 32,
        "n_heads": 4,
        "n_layers": 4,
        "max_seq_len": 64,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 2, "moe_top_k": 1},
    },
    "kimi_linear": {
        **LATENT,
        "q_lora_rank": None,
        "n_routed_experts": 4,
        "num_experts": 4,
        "num_experts_per_token": 2,
        "num_experts_per_tok": 2,
        "linear_head_dim": 8,
        "linear_num_heads": 2,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "modernbert-decoder": {
        "local_attention": 10,
        "sliding_window": None,
    },  # which transformers computes from the other
    "bamba": {**MAMBA, "attn_layer_indices": [1, 3]},
    "falcon": {"multi_query": False, "new_decoder_architecture": False, "alibi": False},
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 64},
    "gemma3n_text": {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 4},
    "gemma4_text": {"vocab_size_per_layer_input": 64},
    "gpt_neo": {
        "num_heads": 4,
        "num_layers": 4,
        "attention_types": [[["global", "local"], 2]],
        "window_size": 5,
    },
    "granitemoehybrid": {**MAMBA, "layer_types": ["mamba", "attention"] * 2},
    "helium": {"head_dim": 8},
    "jamba": {
        "mamba_dt_rank": 4,
        "mamba_d_state": 8,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 4, "max_seq_len": 64},
    "nemotron_h": {
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 1,
        "layers_block_type": ["mamba", "attention", "moe", "attention"],
        "sliding_window": None,
    },
    "olmo_hybrid": LINEAR,
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "phi3": {"head_dim": None},
    "xglm": {"d_model": 32, "ffn_dim": 48, "attention_heads": 4, "num_layers": 4},
}
SEEN = {"mask", "q", "k", "v", "attn_weights", "context", "output"}
MODELS = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
NOT_HERE = {"minimax"}  # whose special cache is not read: it fails
# These compute a part of a layer after the attention function, or outside the module:
# docs/how-to/taps.md.
NOT_HERE |= {
    *("granite_swa", "granitemoe_swa", "gpt_neox_japanese", "flint", "mimo_v2_flash"),
}
GENERATED = sorted(
    family
    for family in FAMILIES.keys() & MODELS.keys() - NOT_HERE
    if len(FAMILIES[family].stacks) == 1
)
"""Families of decoders."""

ROPE = {"rope_type": "default", "rope_theta": 1e4}
KINDS = ["sliding_attention", "full_attention"] * 3
SIX = {
    **COMMON,
    "num_hidden_layers": 6,
    "head_dim": 8,
    "rope_parameters": ROPE,
    "use_sliding_window": False,
}
SIX_LAYERS = {
    "llama": ("llama", {}),
    "llama, biases": ("llama", {"num_key_value_heads": 4, "attention_bias": True}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "mistral": ("mistral", {}),
    "gemma2": ("gemma2", {"layer_types": KINDS, "attn_logit_softcapping": 2.0}),
    "gpt_oss": ("gpt_oss", {"layer_types": KINDS}),
}


def made(family, options, *, seed=0, implementation="eager"):
    """Return a tiny model of a family. Weights of its attention are random; in norms, none is near
    0 or 1.
    """
    configuration = type(transformers.AutoConfig.for_model(family))
    known = configuration().to_dict().keys()
    settings = {
        name: value for name, value in options.items() if name in known and value is not None
    }
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(
        configuration(**settings), attn_implementation=implementation
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "attn" not in name and "attention" not in name:
                continue
            if parameter.ndim == 2 and parameter.shape[0] > 1:
                parameter.copy_(torch.randn_like(parameter) * 0.3)
            else:
                parameter.copy_(
                    torch.randn_like(parameter).sign() * (0.4 + 0.4 * torch.rand_like(parameter))
                )
    return model.eval()


def of_six_layers(name, *, seed=0, implementation="eager"):
    family, options = SIX_LAYERS[name]
    return made(family, SIX | options, seed=seed, implementation=implementation)


def weights_in(model, tapped, specs):
    """Return canonical weights of each layer that was tapped and has attention."""
    modules = dict(model.named_modules())
    return {
        layer.index: parity.from_transformers(
            modules[layer.name.removesuffix(".self")], model.config, layer.index
        )[1]
        for layer in tapped.layers
        if specs[layer.index].spec is not None
    }


def prompts(length=7, *, padded=0):
    """Return two prompts, the first with padding on its left."""
    tokens = torch.randint(3, 64, (2, length), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)
    mask[0, :padded] = 0
    return {"input_ids": tokens, "attention_mask": mask}


def generate(model, count=4, **options):
    arguments = {
        "do_sample": False,
        "max_new_tokens": count,
        "min_new_tokens": count,
        "pad_token_id": 0,
        **options,
    }
    return model.generate(
        **prompts(padded=2), **arguments, output_logits=True, return_dict_in_generate=True
    )


def hooks_in(model):
    names = (
        "_forward_hooks",
        "_forward_pre_hooks",
        "_forward_hooks_with_kwargs",
        "_forward_pre_hooks_with_kwargs",
    )
    return [(len(getattr(module, name))) for module in model.modules() for name in names]


# ---- Nothing changes -----------------------------------------------------------------------------


@pytest.mark.costly("generates with a model of six layers, twice")
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_tap_changes_and_leaves_nothing(implementation):
    """A tapped model generates the same tokens and logits,
    bit for bit, and no hook or patch remains.
    """
    from transformers.cache_utils import Cache
    from transformers.modeling_utils import AttentionInterface

    model = of_six_layers("llama", implementation=implementation)
    functions, hooks = (AttentionInterface.get_interface, Cache.update), hooks_in(model)
    expected = generate(model)
    with parity.tap(model) as tapped:
        actual = generate(model)
        assert hooks_in(model) != hooks
    assert torch.equal(actual.sequences, expected.sequences)
    assert all(
        torch.equal(one, other) for one, other in zip(actual.logits, expected.logits, strict=True)
    )
    assert [len(layer.calls) for layer in tapped.layers] == [4] * 6
    assert hooks_in(model) == hooks
    assert (AttentionInterface.get_interface, Cache.update) == functions
    generate(model)
    assert [len(layer.calls) for layer in tapped.layers] == [4] * 6


def test_taps_end_on_errors_and_overlap():
    """No hook remains after an exception, and overlapping taps
    that end in any order record their calls.
    """
    from transformers.modeling_utils import AttentionInterface

    model = of_six_layers("llama")
    function, hooks = AttentionInterface.get_interface, hooks_in(model)
    with pytest.raises(IndexError), parity.tap(model):
        model(torch.tensor([[64]]))  # which is outside the vocabulary
    assert hooks_in(model) == hooks
    assert AttentionInterface.get_interface is function
    one, other = parity.tap(model), parity.tap(model, layers="*.1.self_attn")
    first, second = one.__enter__(), other.__enter__()
    model(**prompts())
    one.__exit__(None, None, None)  # before the one that was opened later
    model(**prompts())
    other.__exit__(None, None, None)
    assert [len(layer.calls) for layer in first.layers] == [1] * 6
    assert [len(layer.calls) for layer in second.layers] == [2]
    assert second.layers[0].index == 1
    assert set(second.layers[0].calls[1].values) >= {"q", "k", "v", "context"}
    assert hooks_in(model) == hooks
    assert AttentionInterface.get_interface is function


def test_failed_attention_ends_its_recording():
    """After nn.MultiheadAttention raises an exception, nothing observes operations any more."""
    layer = nn.MultiheadAttention(8, 2, batch_first=True)
    with parity.tap(layer):
        with pytest.raises(AssertionError):
            layer(*[torch.zeros(1, 3, 7)] * 3)  # of 7 features instead of 8
        assert _get_current_dispatch_mode() is None


def test_recorded_names_and_shapes():
    """A tap records names, shapes and dtypes of all stages for a
    prompt, and a step with its cached window.
    """
    model = of_six_layers("gemma2")
    with parity.tap(model) as tapped:
        generate(model)
    layer = tapped.layers[2]
    assert (layer.name, layer.index, layer.title) == (
        "model.layers.2.self_attn",
        2,
        "layer 2 (sliding_attention)",
    )
    prompt, step = layer.calls[0], layer.calls[-1]
    shapes = {name: x.shape for name, x in prompt.values.items()}
    assert shapes == {
        "input": (2, 7, 32),
        "positions": (2, 7),
        "is_real": (2, 7),
        "mask": (2, 1, 7, 7),
        "q": (2, 4, 7, 8),
        "k": (2, 2, 7, 8),
        "v": (2, 2, 7, 8),
        "context": (2, 4, 7, 8),
        "attn_weights": (2, 4, 7, 7),
        "output": (2, 7, 32),
    }
    assert (prompt.past, step.past, step.first_key) == (0, 9, 5)  # a window of 5 keeps 4 of 9
    assert step.values["k"].shape == (2, 2, 1, 8)
    assert step.values["attn_weights"].shape == (2, 4, 1, 5)
    assert "cache.keys" not in step.values
    for name, x in prompt.values.items():
        assert x.dtype == {"positions": np.int64, "is_real": bool}.get(name, np.float32), name


# ---- Caches --------------------------------------------------------------------------------------


class MinimumCache(QuantizedLayer):
    """A backend of transformers' quantized cache: 4 bits, and a minimum of each head of a token."""

    def _quantize(self, x, axis):
        lowest = x.amin(-1, keepdim=True)
        size = x.amax(-1, keepdim=True) - lowest
        scale = torch.where(size > 0, size / 15, 1.0)
        return ((x - lowest) / scale).round(), scale, lowest

    def _dequantize(self, stored):
        numbers, scale, lowest = stored
        return numbers * scale + lowest


def of_minima(**options):
    return Cache(layers=[MinimumCache(**options), MinimumCache(**options)])


def with_cache(model, kv_cache, *, lengths, padded=0, **options):
    """Tap a model that computes tokens call by call, and return the verdict."""
    tokens = torch.randint(3, 64, (2, sum(lengths)), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)
    mask[0, :padded] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    stop = 0
    with parity.tap(model) as tapped, torch.no_grad():
        for length in lengths:
            start, stop = stop, stop + length
            model(
                tokens[:, start:stop],
                past_key_values=kv_cache,
                attention_mask=mask[:, :stop],
                position_ids=positions[:, start:stop],
            )
    specs = specs_of(model.config.to_dict())
    return parity.check_tap(tapped, specs, weights_in(model, tapped, specs), **options)


def of_two_layers(family, **options):
    return made(family, {**SIX, "num_hidden_layers": 2, **options})


KINDS_OF_TWO = {"layer_types": ["sliding_attention", "full_attention"]}


@pytest.mark.costly("runs models with caches of several kinds")
def test_caches_of_transformers_agree():
    """Static, sliding and quantized caches of right models agree, also with padding."""
    mixed = of_two_layers("gemma2", **KINDS_OF_TWO)
    llama = of_two_layers("llama")
    caches = {
        "static": (mixed, StaticCache(config=mixed.config, max_cache_len=16), None),
        "sliding": (mixed, DynamicCache(config=mixed.config), None),
        "float8": (llama, QuantizedCache("fp8", llama.config), None),
        "4 bits": (llama, of_minima(residual_length=3), MINIMUM),
    }
    for name, (model, kv_cache, quantization) in caches.items():
        verdict = with_cache(
            model, kv_cache, lengths=(4, 1, 3, 1), padded=2, cache_quantization=quantization
        )
        assert verdict.passed, name
        assert not any(layer.left_out for layer in verdict.layers), name
        stages = {comparison.stage for comparison in verdict.layers[1].comparisons}
        assert ("step3.cache.keys" in stages) == (model is llama), name
    # If it is not known how a cache rounds, the first call alone is compared.
    verdict = with_cache(llama, of_minima(), lengths=(4, 1))
    assert verdict.passed
    assert all("cache_quantization" in layer.left_out for layer in verdict.layers)


MINIMUM = CacheQuantization(
    "int4", "token_head", zero_point="minimum", exact="new", residual_length=3
)


def without_scales(layer):
    layer._dequantize = lambda stored: stored[0].float()


def without_minima(layer):
    layer._dequantize = lambda stored: stored[0] * stored[1]


def one_slot_early(layer):
    update = layer.update

    def early(keys, values):
        is_step = int(layer.get_seq_length() > 0)
        layer.cumulative_length.sub_(is_step)
        cached = update(keys, values)
        layer.cumulative_length.add_(is_step)
        return cached

    layer.update = early


def stale_values(layer):
    update = layer.update

    def stale(keys, values):
        before = None if layer.values is None else layer.values.clone()
        update(keys, values)
        if before is not None:
            layer.values.copy_(before)
        return layer.keys, layer.values

    layer.update = stale


@pytest.mark.costly("diagnoses models with caches of several kinds")
def test_bugs_of_caches_are_named():
    """A bug of one layer's cache is named there, and the other layer agrees."""
    mixed = of_two_layers("gemma2", **KINDS_OF_TWO)
    llama = of_two_layers("llama")
    static = StaticCache(config=llama.config, max_cache_len=16)
    sliding = StaticCache(config=mixed.config, max_cache_len=16)
    float8 = QuantizedCache("fp8", llama.config)
    own = of_minima(residual_length=1)
    minimum = MINIMUM.replace(residual_length=1)
    bugs = (
        (llama, float8, 1, without_scales, None, "cache-scale-missing"),
        (llama, own, 1, without_minima, minimum, "cache-zero-point-missing"),
        (llama, static, 1, one_slot_early, None, "cache-slot-early"),
        (mixed, sliding, 0, stale_values, None, "cache-values-missing"),
    )
    for model, kv_cache, index, break_cache, quantization, name in bugs:
        break_cache(kv_cache.layers[index])
        verdict = with_cache(model, kv_cache, lengths=(3, 1, 1), cache_quantization=quantization)
        assert [layer.index for layer in verdict.wrong] == [index], name
        assert name in verdict.first.diagnosis.likely_bug, name


def one_slot_late(layer):
    update = layer.update

    def late(keys, values):
        is_step = int(layer.get_seq_length() > 0)
        if layer.get_seq_length() + is_step + keys.shape[2] > layer.max_cache_len:
            layer.cumulative_length.add_(keys.shape[2])
            return layer.keys, layer.values  # the token is lost
        layer.cumulative_length.add_(is_step)
        cached = update(keys, values)
        layer.cumulative_length.sub_(is_step)
        return cached

    layer.update = late


@pytest.mark.costly("diagnoses a model with two caches")
def test_late_slot_in_cache_is_one_finding():
    """A static cache whose tokens are one slot late has one bug, also if it loses the last one."""
    llama = of_two_layers("llama")
    for capacity in (5, 16):
        static = StaticCache(config=llama.config, max_cache_len=capacity)
        one_slot_late(static.layers[1])
        verdict = with_cache(llama, static, lengths=(3, 1, 1))
        assert [layer.index for layer in verdict.wrong] == [1], capacity
        (finding,) = verdict.first.diagnosis.findings
        assert finding.bugs == ("cache-slot-late",), capacity


# ---- Families ------------------------------------------------------------------------------------


@sample(10, family=first_families(GENERATED, by=stack_signature))
@pytest.mark.parametrize("family", sorted(first_families(GENERATED)))
def test_layers_pass_during_generation(family):
    """Every attention layer of a generating decoder passes in all stages that its family shows."""
    model = made(family, COMMON | OWN.get(family, {}))
    with parity.tap(model) as tapped:
        generate(model)
    specs = specs_of(model.config.to_dict())
    verdict = parity.check_tap(tapped, specs, weights_in(model, tapped, specs))
    layers = [layer for layer in verdict.layers if specs[layer.index].spec is not None]
    assert all(layer.passed for layer in layers), str(verdict)
    assert [layer.index for layer in layers] == [
        layer.index for layer in specs if layer.spec is not None
    ]
    compared_stages = {comparison.stage for layer in layers for comparison in layer.comparisons}
    assert compared_stages == SEEN
    if family in (
        "mpt",
        "openai-gpt",
    ):  # which generate without a cache here, and receive all tokens again
        return
    tokens = sum(
        comparison.shape[1] for comparison in layers[-1].comparisons if comparison.stage == "output"
    )
    assert tokens == 10 + 8  # a prompt of 7 and 3 tokens that were fed back; 2 fewer with padding


def test_page_has_number_of_families():
    """docs/evidence/diagnosis.md has the numbers of families of
    decoders and of encoder-decoders.
    """
    page = (ROOT / "docs" / "evidence" / "diagnosis.md").read_text(encoding="utf-8")
    assert (
        f"{len(GENERATED)} families of decoders and {len(ENCODER_DECODERS)} with an encoder" in page
    )


NOT_TRIED = {"dbrx", "kimi_linear", "modernbert-decoder"}
NARROW = [family for family in GENERATED if family not in NOT_TRIED][::2]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("dtype", "implementation"), [(torch.bfloat16, "eager"), (torch.float16, "sdpa")]
)
def test_layers_pass_in_16_bits(dtype, implementation):
    """At least 15 families pass in bfloat16 with eager attention, and in float16 with sdpa."""
    families = NARROW[implementation == "sdpa" :: 2]
    if implementation == "sdpa":
        families = [
            family for family in families if getattr(transformers, MODELS[family])._supports_sdpa
        ]
    assert len(families) >= 15
    for family in families:
        model = made(family, COMMON | OWN.get(family, {}), implementation=implementation).to(dtype)
        with parity.tap(model) as tapped:
            generate(model)
        assert {layer.attention for layer in tapped.layers} == {implementation}
        specs = specs_of(model.config.to_dict())
        verdict = parity.check_tap(tapped, specs, weights_in(model, tapped, specs))
        assert verdict.passed, f"{family}: {verdict}"


def test_16_bit_scores_only_in_eager():
    """Scores rounded to float16 pass with eager attention, and
    fail if the tap is marked as sdpa.
    """
    model = made("nemotron", COMMON).to(torch.float16)
    with parity.tap(model) as tapped:
        generate(model)
    specs = specs_of(model.config.to_dict())
    weights = weights_in(model, tapped, specs)
    assert parity.check_tap(tapped, specs, weights).passed
    tapped.layers[2].attention = "sdpa"  # which keeps scores in float32
    (wrong,) = parity.check_tap(tapped, specs, weights).wrong
    assert (wrong.index, wrong.difference.stage) == (2, "attn_weights")


@sample(what=["theta", "no cap"])
@pytest.mark.parametrize(
    "what",
    ["no scale", "theta", "tiled", "v heads", "window wide", "no cap", "sinks of 0"],
)
def test_injected_bug_is_found_in_16_bits(what):
    """In bfloat16, a bug in layer 2 is found in that layer alone and named."""
    bug = BUGS[what]
    name = {"window wide": "gemma2", "no cap": "gemma2", "sinks of 0": "gpt_oss"}.get(what, "llama")
    verdict = verdict_of(of_six_layers(name).to(torch.bfloat16), bug, 2)
    assert [layer.index for layer in verdict.layers if layer.difference is not None] == [2]
    (finding,) = verdict.first.diagnosis.named
    assert finding.bugs[0] in bug.names


@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}])
def test_sdpa_with_static_cache_passes(options):
    """All layers pass with sdpa and a dynamic or static cache, down to the output."""
    for name in ("llama", "mistral"):
        model = of_six_layers(name, implementation="sdpa")
        with parity.tap(model) as tapped:
            generate(model, **options)
        specs = specs_of(model.config.to_dict())
        verdict = parity.check_tap(tapped, specs, weights_in(model, tapped, specs))
        assert verdict.passed, str(verdict)
        assert {"q", "k", "v", "context", "output"} <= {
            comparison.stage for comparison in verdict.layers[3].comparisons
        }


# ---- Cross-attention -----------------------------------------------------------------------------

TOKENS = {
    "vocab_size": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
BART = {
    **TOKENS,
    "d_model": 32,
    "max_position_embeddings": 64,
    "num_experts": 2,
    "expert_capacity": 16,
    "decoder_vocab_size": 64,
    "max_source_positions": 8,
    "max_target_positions": 32,
    "num_mel_bins": 8,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    **{
        f"{part}_{what}": n
        for part in ("encoder", "decoder")
        for what, n in (("layers", 2), ("ffn_dim", 48))
    },
    **{f"{part}_attention_heads": 4 for part in ("encoder", "decoder")},
}
T5 = {
    **TOKENS,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_heads": 4,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_experts": 2,
}
ENCODER_DECODERS = {
    **dict.fromkeys(
        ("bart", "mbart", "pegasus", "marian", "blenderbot", "m2m_100", "plbart", "whisper"), BART
    ),
    **dict.fromkeys(("nllb-moe",), BART),
    **dict.fromkeys(("t5", "mt5", "umt5", "switch_transformers"), T5),
}


def encoder_decoder(family, implementation="eager"):
    kind = type(transformers.AutoConfig.for_model(family))
    known = {
        name: value for name, value in ENCODER_DECODERS[family].items() if name in kind().to_dict()
    }
    classes = (
        transformers.AutoModelForSpeechSeq2Seq
        if family == "whisper"
        else transformers.AutoModelForSeq2SeqLM
    )
    torch.manual_seed(0)
    model = classes.from_config(kind(**known), attn_implementation=implementation)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "att" in name.lower() and "norm" not in name and parameter.ndim == 2:
                parameter.copy_(torch.randn_like(parameter) * 0.3)
    return model.eval()


def from_encoded(model, **options):
    """Generate from two sequences, one of them padded; for whisper without padding."""
    arguments = {
        "do_sample": False,
        "max_new_tokens": 4,
        "min_new_tokens": 4,
        "decoder_start_token_id": 1,
        **options,
    }
    if model.config.model_type == "whisper":
        return model.generate(torch.randn(2, 8, 16, dtype=model.dtype), **arguments)
    tokens = torch.randint(3, 64, (2, 7), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)
    mask[0, 5:] = 0
    return model.generate(input_ids=tokens, attention_mask=mask, **arguments)


def verdict_by_folder(model, tapped, folder):
    model.save_pretrained(folder)
    return parity.check_tap(tapped, *layers_in(folder))


@sample(7, dtype=[torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ENCODER_DECODERS)
def test_encoder_decoder_layers_pass(family, dtype, tmp_path):
    """All layers of an encoder-decoder pass, including cross-attention in all seven stages."""
    model = encoder_decoder(family).to(dtype)
    with parity.tap(model) as tapped:
        from_encoded(model)
    verdict = verdict_by_folder(model, tapped, tmp_path)
    assert verdict.passed, str(verdict)
    crossing = ("decoder", "cross_attention")
    parts = (("encoder", "full_attention"), ("decoder", "full_attention"), crossing)
    assert {layer.layer: layer.not_compared for layer in verdict.layers} == {
        f"{part} layer {index} ({kind})": "" for part, kind in parts for index in range(2)
    }
    comparisons = {layer.layer: layer for layer in verdict.layers}[
        "decoder layer 1 (cross_attention)"
    ].comparisons
    assert [comparison.stage for comparison in comparisons[:7]] == [
        "mask",
        "q",
        "k",
        "v",
        "attn_weights",
        "context",
        "output",
    ]
    queries, keys = (
        2 * sum(len(call.values["input"][0]) for call in tapped.layers[-1].calls),
        {comparisons[2].shape[2]},
    )
    assert (
        sum(
            comparison.shape[0] * comparison.shape[1]
            for comparison in comparisons
            if comparison.stage == "output"
        )
        == queries
        >= 8
    )
    assert keys == {8 if family == "whisper" else 7}


@pytest.mark.parametrize("options", [{}, {"use_cache": False}, {"num_beams": 2}])
def test_cross_attention_passes_with_cache(options, tmp_path):
    """Cross-attention passes with a cache, without one and with beams; a cache holds keys that were
    computed once; saved and live recordings agree.
    """
    model = encoder_decoder("bart", "sdpa")
    with parity.tap(model) as tapped:
        from_encoded(model, **options)
    crossing = [layer for layer in tapped.layers if "encoder_attn" in layer.name]
    has_keys = [["k" in call.values for call in layer.calls] for layer in crossing]
    assert (
        has_keys == [[True, *[bool(options.get("use_cache") is False)] * 3]] * 2
    )  # made once, and kept
    verdict = verdict_by_folder(model, tapped, tmp_path)
    assert all(layer.passed for layer in verdict.layers if "cross" in layer.layer), str(verdict)
    tapped.save(tmp_path / "tap.safetensors")
    difference = parity.compare_taps(tapped, parity.load_tap(tmp_path / "tap.safetensors"))
    assert difference.agrees, str(difference)
    assert all(
        "key_input" in layer.errors
        for layer in difference.layers
        if "encoder_attn" in layer.names[0]
    )


def test_cross_attention_bugs_are_found(tmp_path):
    """Swapped keys and values, an ignored mask and a changed cache are
    each found in one cross-attention layer.
    """
    model = encoder_decoder("bart")
    module = model.model.decoder.layers[1].encoder_attn
    model.save_pretrained(tmp_path)
    specs, weights = layers_in(tmp_path)

    def wrong():
        with parity.tap(model) as tapped:
            from_encoded(model)
        (layer,) = parity.check_tap(tapped, specs, weights).wrong
        assert layer.layer == "decoder layer 1 (cross_attention)"
        return stage_named(layer.difference.stage).quantity, layer.diagnosis

    with ExitStack() as stack:
        BUGS["k and v"].inject(model, module, stack)
        stage, diagnosis = wrong()
    assert (stage, diagnosis.named[0].bugs) == ("k", ("k-v-swapped",))

    def unmasked(_, args, kwargs):
        return args, {**kwargs, "attention_mask": None}

    handle = module.register_forward_pre_hook(unmasked, with_kwargs=True)
    stage, diagnosis = wrong()
    handle.remove()
    assert (stage, diagnosis.named[0].bugs) == ("mask", ("mask-ignored",))

    def forgetful(_, args, kwargs):
        cached = kwargs["past_key_values"].cross_attention_cache.layers[1]
        if cached.is_initialized:
            cached.keys[:, :, 0] = 0.0

    handle = module.register_forward_pre_hook(forgetful, with_kwargs=True)
    stage, diagnosis = wrong()
    handle.remove()
    assert (stage, diagnosis.kind, diagnosis.stage) == ("cache.keys", "unknown", "step1.cache.keys")


def test_uncomparable_cross_attention(tmp_path):
    """Cross-attention specified as self-attention is not compared, a change of its input raises an
    error, and in torch values may come from a third sequence.
    """
    model = encoder_decoder("bart")
    with parity.tap(model) as tapped:
        from_encoded(model)
    specs = [replace(spec, kind="full_attention") for spec in specs_of(model.config.to_dict())]
    model.save_pretrained(tmp_path)
    verdict = parity.check_tap(tapped, specs, layers_in(tmp_path)[1])
    reasons = [layer.not_compared for layer in verdict.layers if "encoder_attn" in layer.name]
    assert reasons == ["it attends to another sequence, and should not"] * 2
    layer = next(layer for layer in tapped.layers if "encoder_attn" in layer.name)
    layer.calls[1].values["key_input"] = layer.calls[0].values["key_input"] + 1
    with rejects("model.decoder.layers.0.encoder_attn", "a different one"):
        parity.check_tap(tapped, *layers_in(tmp_path))
    module, (x, y, z) = (
        torch.nn.MultiheadAttention(32, 4, batch_first=True).eval(),
        torch.randn(3, 2, 5, 32),
    )
    specs, weights = {0: parity.spec_of(module)}, {0: parity.weights_of(module)}
    with parity.tap(torch.nn.Sequential(module)) as tapped, torch.no_grad():
        module(x, y, y)
    assert parity.check_tap(tapped, specs, weights).passed
    with parity.tap(torch.nn.Sequential(module)) as tapped, torch.no_grad():
        module(x, y, z)
    assert parity.check_tap(tapped, specs, weights).passed
    tapped.layers[0].calls[0].values["value_input"] = y.numpy()
    assert not parity.check_tap(tapped, specs, weights).passed


def test_parts_with_equal_paths_are_separate(tmp_path):
    """Layers of CLIP's text and vision parts are matched by part;
    without parts they are ambiguous.
    """
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
    }
    text = {**sizes, "vocab_size": 64, "max_position_embeddings": 16, "eos_token_id": 2}
    vision = {
        **sizes,
        "hidden_size": 48,
        "num_attention_heads": 6,
        "image_size": 16,
        "patch_size": 8,
    }
    torch.manual_seed(0)
    model = transformers.CLIPModel(
        transformers.CLIPConfig(text_config=text, vision_config=vision)
    ).eval()
    with parity.tap(model) as tapped, torch.no_grad():
        model(input_ids=torch.tensor([[5, 3, 2, 0]]), pixel_values=torch.randn(1, 3, 16, 16))
    verdict = verdict_by_folder(model, tapped, tmp_path)
    assert verdict.passed, str(verdict)
    parts = [
        f"{part} layer {index} (full_attention)"
        for part in ("text", "vision")
        for index in range(2)
    ]
    assert [layer.layer for layer in verdict.layers] == parts
    specs, weights = layers_in(tmp_path)
    verdict = parity.check_tap(tapped, [replace(spec, part="") for spec in specs], weights)
    reason = "it may be any of 2 layers of the model, by its name"
    assert (verdict.layers[0].not_compared, verdict.passed) == (reason, False)


def test_visible_left_padding_is_named():
    """A layer of a live model that ignores its padding mask gets the bug's name: its padding is
    compared as well, and not only real tokens.
    """
    model = made("llama", COMMON, implementation="sdpa")
    attention = model.model.layers[1].self_attn
    forward = attention.forward
    attention.forward = lambda *args, attention_mask=None, **options: forward(
        *args, attention_mask=None, **options
    )
    with parity.tap(model) as tapped:
        generate(model)
    specs = specs_of(model.config.to_dict())
    verdict = parity.check_tap(tapped, specs, weights_in(model, tapped, specs))
    assert [layer.index for layer in verdict.wrong] == [1]
    (finding,) = verdict.first.diagnosis.findings
    assert finding.bugs == ("own-mask-ignored",)
    assert "as padding, are visible to every query" in finding.others[0]


def test_bert_layers_end_at_the_context():
    """BERT's layers are compared without their output projection; a transposed projection is found
    at stage `v`.
    """
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
    }
    torch.manual_seed(0)
    model = transformers.BertModel(transformers.BertConfig(**sizes, vocab_size=64)).eval()
    model.set_attn_implementation("eager")
    with parity.tap(model) as tapped, torch.no_grad():
        model(**prompts(padded=2))
    assert [layer.name for layer in tapped.layers] == [
        f"encoder.layer.{index}.attention.self" for index in range(2)
    ]
    weights = {
        index: parity.from_transformers(layer.attention, model.config, index)[1]
        for index, layer in enumerate(model.encoder.layer)
    }
    verdict = parity.check_tap(tapped, specs_of(model.config.to_dict()), weights)
    assert verdict.passed, str(verdict)
    compared_stages = {
        comparison.stage for layer in verdict.layers for comparison in layer.comparisons
    }
    assert compared_stages == SEEN
    weights[1] = {**weights[1], "v_proj.weight": weights[1]["v_proj.weight"].T.copy()}
    first = parity.check_tap(tapped, specs_of(model.config.to_dict()), weights).first
    assert (first.index, first.difference.stage) == (1, "v")


# ---- Bugs ----------------------------------------------------------------------------------------


@cache
def trials():
    """Return models, bugs and layers, in random order."""
    rng = random.Random(0)
    rows = []
    for name in SIX_LAYERS:
        layers = specs_of(of_six_layers(name).config.to_dict())
        for what, bug in BUGS.items():
            if fitting := [layer.index for layer in layers if bug.fits(layer.spec)]:
                rows.append((name, what, rng.choice(fitting)))
    rng.shuffle(rows)
    return (rows * (1 + TRIALS // len(rows)))[:TRIALS]


def verdict_of(model, bug=None, layer=0):
    specs = specs_of(model.config.to_dict())
    module = model.model.layers[layer].self_attn
    with parity.tap(model) as tapped:
        pass
    weights = weights_in(model, tapped, specs)
    if bug is None:
        with parity.tap(model) as tapped:
            generate(model)
    else:
        with inject(bug, model, module), parity.tap(model) as tapped:
            generate(model)
    return parity.check_tap(tapped, specs, weights)


@pytest.mark.thorough
def test_injected_bugs_are_found_and_named():
    """At least 95% of injected bugs are found in the right layer
    and stage, with one correct name.
    """
    missed = []
    for seed, (name, what, layer) in enumerate(trials()):
        bug = BUGS[what]
        verdict = verdict_of(of_six_layers(name, seed=seed), bug, layer)
        wrong = [layer.index for layer in verdict.layers if layer.difference is not None]
        first = verdict.first
        names = [bug for finding in first.diagnosis.named for bug in finding.bugs] if first else []
        stage = stage_named(first.difference.stage).quantity if first else ""
        if (
            wrong != [layer]
            or len(names) != 1
            or names[0] not in bug.names
            or stage not in bug.stages
        ):
            missed.append((name, what, layer, wrong, stage, names))
    assert len(missed) <= 0.05 * TRIALS, missed
    print(f"{TRIALS - len(missed)} of {TRIALS} found")


@sample(4)
@pytest.mark.parametrize("name", SIX_LAYERS)
def test_no_bug_in_unchanged_model(name):
    """All six layers of a model without a bug pass, and the verdict says so."""
    verdict = verdict_of(of_six_layers(name, seed=1))
    assert verdict.passed
    assert verdict.first is None
    assert str(verdict) == "6 layers agree with the reference, each for its own input"


@pytest.mark.costly("compares a recording of six layers and diagnoses one")
def test_verdict_names_layer_and_bug():
    """The verdict and its dict name the first wrong layer, its stage and the likely bug."""
    verdict = verdict_of(of_six_layers("gemma2"), BUGS["window wide"], 4)
    lines = ["First wrong layer: layer 4 (sliding_attention)", "Likely bug: window-one-too-wide"]
    assert str(verdict).splitlines()[:2] == lines
    assert "First wrong stage: step0.mask, which should be exact" in str(verdict)
    # The mask of a step of one token is right.
    assert "one key too wide, in calls of several tokens" in str(verdict)
    content = verdict.to_dict()
    assert [layer["passed"] for layer in content["layers"]] == [True] * 4 + [False, True]
    assert content["layers"][4]["diagnosis"]["findings"][0]["bugs"] == ["window-one-too-wide"]


# ---- Two recordings ------------------------------------------------------------------------------


def in_steps(model, tokens, first):
    """Run a prompt, then token by token."""
    result = model(tokens[:, :first], use_cache=True)
    for index in range(first, tokens.shape[1]):
        result = model(
            tokens[:, index : index + 1], past_key_values=result.past_key_values, use_cache=True
        )


@sample(4)
@pytest.mark.parametrize("name", SIX_LAYERS)
def test_prompt_agrees_with_steps(name):
    """A recording of a prompt agrees with one of the same
    tokens in steps, in every stage and token.
    """
    model, tokens = of_six_layers(name), prompts(12)["input_ids"]
    with parity.tap(model) as one:
        model(tokens)
    with parity.tap(model) as other:
        in_steps(model, tokens, 4)
    assert [len(layer.calls) for layer in other.layers] == [9] * 6
    difference = parity.compare_taps(one, other)
    assert difference.agrees, str(difference)
    assert not difference.alone
    assert all(layer.tokens == 24 for layer in difference.layers)
    assert all(
        {"q", "k", "v", "mask", "attn_weights"} <= layer.errors.keys()
        for layer in difference.layers
    )


@pytest.mark.parametrize("what", ["no RoPE", "k and v", "tiled", "mask ignored", "restarted"])
def test_differing_layer_is_found_by_taps(what):
    """Two recordings, without weights, locate a bug in layer 3 and in one of its stages."""
    model, tokens = of_six_layers("llama"), prompts(12)["input_ids"]
    with parity.tap(model) as one:
        model(tokens)
    with inject(BUGS[what], model, model.model.layers[3].self_attn), parity.tap(model) as other:
        in_steps(model, tokens, 4)
    difference = parity.compare_taps(one, other)
    assert difference.first is not None
    assert difference.first.layer == "layer 3"
    assert difference.first.stage in BUGS[what].stages
    assert not difference.agrees
    assert str(difference).startswith(f"layer 3, stage {difference.first.stage}: ")


def test_taps_need_the_same_inputs():
    """Different inputs are reported as such; an empty
    recording or a different batch size raises an error.
    """
    model = of_six_layers("llama")
    with parity.tap(model) as one:
        model(prompts(12)["input_ids"])
    with parity.tap(model) as other:
        model(prompts(12)["input_ids"].flip(1))
    difference = parity.compare_taps(one, other)
    assert difference.differs_before
    assert not difference.agrees
    assert "the input of layer 0 already differs" in str(difference)
    with parity.tap(model) as none:
        pass
    with rejects("taps", "none"):
        parity.compare_taps(one, none)
    with parity.tap(model) as less:
        model(prompts(12)["input_ids"][:1])
    with rejects("taps", "2 and 1"):
        parity.compare_taps(one, less)


# ---- Printed -------------------------------------------------------------------------------------


def test_tap_prints_names_of_stages():
    """A printed recording has a line per layer with its stages, and no numbers."""
    model = of_six_layers("qwen3")
    with parity.tap(model) as tapped:
        model(prompts(12)["input_ids"])
    lines = str(tapped).splitlines()
    assert lines[0] == "Qwen3ForCausalLM, tapped"
    assert lines[1].startswith(
        "layer 0 (full_attention), model.layers.0.self_attn: 1 call, with input, positions"
    )
    assert lines[1].endswith("q, k, v, attn_weights, context, output")
    assert len(lines) == 7
    assert "array(" not in repr(tapped)


# ---- Files ---------------------------------------------------------------------------------------


def test_saved_tap_round_trip(tmp_path):
    """A saved recording is equal when loaded, and passes; other files raise an error."""
    model = of_six_layers("gpt_oss")
    with parity.tap(model) as tapped:
        generate(model)
    tapped.save(tmp_path / "tap.safetensors")
    read = parity.load_tap(tmp_path / "tap.safetensors")
    assert read.config == tapped.config
    assert read.model == "GptOssForCausalLM"
    for one, other in zip(tapped.layers, read.layers, strict=True):
        assert (one.name, one.index, one.kind, one.is_causal) == (
            other.name,
            other.index,
            other.kind,
            other.is_causal,
        )
        for a, b in zip(one.calls, other.calls, strict=True):
            assert (a.past, a.first_key, a.values.keys()) == (b.past, b.first_key, b.values.keys())
            assert all(np.array_equal(a.values[name], b.values[name]) for name in a.values)
    specs = specs_of(read.config)
    assert parity.check_tap(read, specs, weights_in(model, read, specs)).passed
    save_tensors(tmp_path / "other.safetensors", {"x": np.zeros(2)}, {"format": "1"})
    with rejects("…/other.safetensors", "['format']"):
        parity.load_tap(tmp_path / "other.safetensors")
    save_tensors(
        tmp_path / "none.safetensors", {"0/0/q": np.zeros(2)}, {"format": "1", "kind": "tap"}
    )
    with rejects("…/none.safetensors", "KeyError('tap')"):
        parity.load_tap(tmp_path / "none.safetensors")


# ---- Other modules -------------------------------------------------------------------------------


class Block(torch.nn.Module):
    """Our layer in a user's model."""

    def __init__(self, spec):
        super().__init__()
        self.attn = mha_torch.MultiHeadAttention(spec)
        self.out = torch.nn.Linear(spec.d_model, spec.d_model)

    def forward(self, x):
        return x + self.out(self.attn(x, is_causal=True)[0])


def test_tap_of_mha_torch_modules():
    """Our modules in a user's model pass, and a transposed projection of one is named."""
    torch.manual_seed(0)
    spec = AttentionSpec(32, 4, num_kv_heads=2, rope=Rope(10000.0))
    model = torch.nn.Sequential(Block(spec), Block(spec)).eval()
    with parity.tap(model) as tapped, torch.no_grad():
        model(torch.randn(2, 6, 32))
    assert [(layer.name, layer.index) for layer in tapped.layers] == [("0.attn", 0), ("1.attn", 1)]
    weights = {index: parity.weights_of(model[index].attn) for index in range(2)}
    verdict = parity.check_tap(tapped, dict.fromkeys(range(2), spec), weights)
    assert verdict.passed
    assert {comparison.stage for comparison in verdict.layers[0].comparisons} == SEEN - {
        "attn_weights"
    }
    weights[1] = {**weights[1], "q_proj.weight": weights[1]["q_proj.weight"].T.copy()}
    verdict = parity.check_tap(tapped, dict.fromkeys(range(2), spec), weights)
    assert verdict.first.index == 1
    assert verdict.first.diagnosis.named[0].bugs == ("q_proj-transposed",)


def test_tap_of_torch_fast_path():
    """A tap records torch's fast path without changing the
    output; causality decides whether it passes.
    """
    torch.manual_seed(0)
    module = torch.nn.MultiheadAttention(32, 4).eval()  # (T, B, E)
    model, x = torch.nn.Sequential(), torch.randn(6, 2, 32)
    model.add_module("attention", module)
    with torch.no_grad():
        expected, _ = module(x, x, x, need_weights=False)
        with parity.tap(model) as tapped:
            actual, _ = module(x, x, x, need_weights=False)
    assert torch.equal(actual, expected)
    assert "forward" not in vars(module)
    assert tapped.layers[0].calls[0].values["input"].shape == (2, 6, 32)
    specs, weights = {0: parity.spec_of(module)}, {0: parity.weights_of(module)}
    assert parity.check_tap(tapped, specs, weights, is_causal=False).passed
    assert not parity.check_tap(tapped, specs, weights, is_causal=True).passed


def test_layers_are_selected_by_pattern():
    """`layers` selects modules by patterns of names and classes; no match raises an error."""
    model = of_six_layers("llama")
    with parity.tap(model, layers=["model.layers.[12].self_attn", "LlamaMLP"]) as tapped:
        model(**prompts())
    names = [layer.name for layer in tapped.layers]
    assert names[:3] == ["model.layers.0.mlp", "model.layers.1.self_attn", "model.layers.1.mlp"]
    assert len(names) == 8
    assert {"projections.gate_proj", "projections.up_proj", "projections.down_proj"} <= set(
        tapped.layers[0].calls[0].values
    )
    with rejects("layers", "['nothing']"):
        parity.tap(model, layers="nothing").__enter__()
    with rejects("model"):
        parity.tap(torch.nn.Linear(2, 2)).__enter__()


# ---- Invalid models and recordings ---------------------------------------------------------------


def test_invalid_taps_raise():
    """A dict, a compiled model, and caches that began before the tap or were cropped raise errors;
    layers that were not called are not compared.
    """
    with rejects_type("model", "dict"):
        parity.tap({})
    model = of_six_layers("llama")
    with rejects("model"):
        parity.tap(torch.compile(model, backend="eager")).__enter__()
    specs, tokens = specs_of(model.config.to_dict()), prompts(6)["input_ids"]
    result = model(tokens, use_cache=True)
    with parity.tap(model) as late:
        model(tokens[:, :1], past_key_values=result.past_key_values, use_cache=True)
    weights = weights_in(model, late, specs)
    with rejects("model.layers.0.self_attn", "a cache of 6 tokens"):
        parity.check_tap(late, specs, weights)
    with parity.tap(model) as cropped:
        result = model(tokens, use_cache=True)
        result.past_key_values.crop(-3)
        model(tokens[:, :1], past_key_values=result.past_key_values, use_cache=True)
    with rejects("model.layers.0.self_attn", "a cache of 3 tokens after 6"):
        parity.check_tap(cropped, specs, weights)
    with parity.tap(model) as none:
        pass
    verdict = parity.check_tap(none, specs, weights)
    assert not verdict.passed
    every_layer = ", ".join(f"layer {index} (full_attention)" for index in range(6))
    assert f"Not compared: {every_layer}, because it was not called" in str(verdict)


def test_plain_lists_match_tapped_layers():
    """Lists of specs and weights belong to tapped layers in
    order; other lengths and types raise errors.
    """
    model = of_six_layers("llama")
    layers = specs_of(model.config.to_dict())
    with parity.tap(model) as tapped, torch.no_grad():
        model(**prompts(6))
    by_index = weights_in(model, tapped, layers)
    specs, weights = [layer.spec for layer in layers], [by_index[layer.index] for layer in layers]
    assert parity.check_tap(tapped, specs, weights).passed
    with rejects("specs", "5 of them"):
        parity.check_tap(tapped, specs[1:], weights)
    with rejects("weights", "5 of them"):
        parity.check_tap(tapped, specs, weights[1:])
    with rejects_type("specs", "some of both"):
        parity.check_tap(tapped, [specs[0], *layers[1:]], weights)
    for wrong, name in ((specs[0], "AttentionSpec"), ([{}] * 6, "dict")):
        with rejects_type("specs", name):
            parity.check_tap(tapped, wrong, weights)
    with rejects_type("weights", "one that is ndarray"):
        parity.check_tap(tapped, specs, weights[0])


GEMMA = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "vocab_size": 64,
    "sliding_window": 4,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
}


def small_gemma():
    torch.manual_seed(0)
    config = transformers.Gemma3TextConfig(**GEMMA)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    layers = enumerate(model.model.layers)
    return model, {
        index: parity.from_transformers(layer.self_attn, config)[1] for index, layer in layers
    }


def test_padding_inside_prompt_is_left_out():
    """Padding between tokens is left out of windowed layers,
    which are not compared if nothing remains.
    """
    model, weights = small_gemma()
    tokens = torch.arange(1, 13)[None].repeat(2, 1)
    real = torch.ones_like(tokens)
    real[0, 5] = 0
    with parity.tap(model) as tapped, torch.no_grad():
        model(input_ids=tokens, attention_mask=real)
    verdict = parity.check_tap(tapped, specs_of(model.config.to_dict()), weights)
    assert verdict.passed, str(verdict)
    reasons = [layer.left_out for layer in verdict.layers]
    assert reasons[0] == reasons[1] == reasons[2]
    assert reasons[0].startswith("in sequence 0 of its batch padding lies between")
    assert reasons[3] == ""
    with parity.tap(model) as tapped, torch.no_grad():
        model(input_ids=tokens[:1], attention_mask=real[:1])
    verdict = parity.check_tap(tapped, specs_of(model.config.to_dict()), weights)
    assert [bool(layer.not_compared) for layer in verdict.layers] == [True, True, True, False]
    assert str(verdict).count("padding lies between its real tokens") == 1


def test_explanation_is_reused_in_layers(monkeypatch):
    """An explanation of the first wrong layer is reused for later ones without another search."""
    model, weights = small_gemma()
    model.model.rotary_emb.sliding_attention_inv_freq /= 8.0  # a pattern that is not a known bug
    with parity.tap(model) as tapped, torch.no_grad():
        model(input_ids=torch.arange(1, 13)[None])
    searched = []

    def counting(*arguments, **options):
        searched.append(arguments)
        return diagnose(*arguments, **options)

    diagnose = taps.diagnose
    monkeypatch.setattr(taps, "diagnose", counting)
    verdict = parity.check_tap(tapped, specs_of(model.config.to_dict()), weights)
    diagnoses = [layer.diagnosis for layer in verdict.layers]
    assert [diagnosis and diagnosis.likely_bug for diagnosis in diagnoses] == [
        "rope-scaling"
    ] * 3 + [None]
    of_first_layer = {arguments[1].case.name for arguments in searched}
    assert of_first_layer == {"layer 0 (sliding_attention)"}
    for diagnosis in diagnoses[1:3]:
        assert (
            diagnosis.named[0].about
            == diagnoses[0].named[0].about
            == "RoPE's positions are divided by 8"
        )


@pytest.mark.thorough
@pytest.mark.costly("diagnoses several layers of a recording")
def test_different_bugs_are_kept_apart():
    """Different bugs in two layers are found at their own stages, with different causes."""
    model, weights = small_gemma()
    specs = specs_of(model.config.to_dict())
    weights[0] = {**weights[0], "k_proj.weight": weights[0]["k_proj.weight"] * 2.0}
    weights[2] = {**weights[2], "v_proj.weight": weights[2]["v_proj.weight"] * 3.0}
    with parity.tap(model) as tapped, torch.no_grad():
        model(input_ids=torch.arange(1, 13)[None])
    verdict = parity.check_tap(tapped, specs, weights)
    assert [layer.index for layer in verdict.wrong] == [0, 2]
    assert [layer.difference.stage for layer in verdict.wrong] == ["k", "v"]
    assert verdict.layers[0].diagnosis.cause != verdict.layers[2].diagnosis.cause


# ---- Flax ----------------------------------------------------------------------------------------


class LinenBlock(linen.Module):
    @linen.compact
    def __call__(self, x, mask):
        for _ in range(2):
            x = x + linen.MultiHeadDotProductAttention(4, qkv_features=32, name=None)(x, mask=mask)
        return x


class NnxBlock(nnx.Module):
    def __init__(self, kind, count=2):
        self.layers = nnx.List([kind() for _ in range(count)])

    def __call__(self, x, **keywords):
        for layer in self.layers:
            output = layer(x, **keywords)
            x = x + (output[0] if isinstance(output, tuple) else output)
        return x


FULL = AttentionSpec(32, 4)


@pytest.mark.parametrize("key", ["", "MultiHeadDotProductAttention", 0])
def test_flax_root_module_is_compared(key, rng):
    """A bound linen module that is itself the layer passes, with
    weights by name, class or index.
    """
    x = jnp.asarray(rng.standard_normal((2, 6, 32), dtype=np.float32))
    module = linen.MultiHeadDotProductAttention(4, qkv_features=32)
    bound = module.bind(module.init(jax.random.key(0), x))
    with parity.tap(bound) as tapped:
        bound(x)
    (layer,) = tapped.layers
    assert layer.name == ""
    verdict = parity.check_tap(tapped, [FULL], {key: parity.weights_of(bound)}, is_causal=False)
    assert verdict.passed, str(verdict)


def verdict_in_flax(tapped, weights, *, is_causal=True):
    return parity.check_tap(tapped, dict.fromkeys(weights, FULL), weights, is_causal=is_causal)


def test_linen_layers_pass(rng):
    """Layers of linen pass in six stages with an unchanged output, and `sow` is restored; a
    transposed projection of one is named.
    """
    x = jnp.asarray(rng.standard_normal((2, 6, 32), dtype=np.float32))
    mask = linen.make_causal_mask(x[..., 0])
    model = LinenBlock()
    variables = model.init(jax.random.key(0), x, mask)
    expected, sow = model.apply(variables, x, mask), linen.Module.sow
    with parity.tap(model) as tapped:
        actual = model.apply(variables, x, mask)
    assert np.array_equal(actual, expected)
    assert linen.Module.sow is sow
    names = [f"MultiHeadDotProductAttention_{index}" for index in range(2)]
    assert [(layer.name, layer.index, len(layer.calls)) for layer in tapped.layers] == [
        (names[0], 0, 1),
        (names[1], 1, 1),
    ]
    weights = {
        index: parity.weights_of(
            linen.MultiHeadDotProductAttention(4, qkv_features=32).bind({"params": params})
        )
        for index, params in enumerate(variables["params"][name] for name in names)
    }
    verdict = verdict_in_flax(tapped, weights)
    assert verdict.passed, str(verdict)
    assert [comparison.stage for comparison in verdict.layers[1].comparisons] == [
        "mask",
        "q",
        "k",
        "v",
        "context",
        "output",
    ]
    weights[1] = {**weights[1], "k_proj.weight": weights[1]["k_proj.weight"].T.copy()}
    first = verdict_in_flax(tapped, weights).first
    assert (first.index, first.difference.stage) == (1, "k")
    assert first.diagnosis.named[0].bugs == ("k_proj-transposed",)


@pytest.mark.filterwarnings("ignore:Using 'Module.sow")  # which remains without a capture
def test_nnx_layers_pass(rng):
    """Layers of nnx pass in seven stages, with and without weights, and the class is restored."""
    rngs = nnx.Rngs(0)
    model = NnxBlock(lambda: nnx.MultiHeadAttention(4, 32, decode=False, rngs=rngs))
    x = jnp.asarray(rng.standard_normal((2, 6, 32), dtype=np.float32))
    mask = nnx.make_causal_mask(x[..., 0])
    call, expected = nnx.MultiHeadAttention.__call__, model(x, mask=mask)
    with parity.tap(model) as tapped:
        actual = model(x, mask=mask, sow_weights=True)
    assert nnx.MultiHeadAttention.__call__ is call
    assert np.allclose(actual, expected, atol=1e-6)  # with weights it runs a different path
    assert [layer.name for layer in tapped.layers] == ["layers.0", "layers.1"]
    weights = {index: parity.weights_of(layer) for index, layer in enumerate(model.layers)}
    verdict = verdict_in_flax(tapped, weights)
    assert verdict.passed, str(verdict)
    stages = ["mask", "q", "k", "v", "attn_weights", "context", "output"]
    assert [comparison.stage for comparison in verdict.layers[1].comparisons] == stages
    with parity.tap(model) as again:
        assert np.array_equal(model(x, mask=mask), expected)
    assert verdict_in_flax(again, weights).passed


def test_jax_and_torch_taps_agree(rng):
    """Recordings of our JAX and torch layers with the same weights
    pass, and agree with each other.
    """
    weights = [parity.random_weights(FULL, seed) for seed in (1, 2)]
    ours = NnxBlock(lambda: mha_jax.MultiHeadAttention(FULL, rngs=nnx.Rngs(0)))
    theirs = torch.nn.ModuleList([mha_torch.MultiHeadAttention(FULL) for _ in weights])
    for index, weight in enumerate(weights):
        parity.load_into(ours.layers[index], weight, FULL)
        parity.load_into(theirs[index], weight, FULL)
    x = rng.standard_normal((2, 6, 32), dtype=np.float32)
    with parity.tap(ours) as one:
        ours(jnp.asarray(x), is_causal=True, need_weights=True)
    with parity.tap(theirs) as other, torch.no_grad():
        y = torch.from_numpy(x)
        for layer in theirs:
            y = y + layer(y, is_causal=True, need_weights=True)[0]
    for tapped in (one, other):
        verdict = verdict_in_flax(tapped, dict(enumerate(weights)))
        assert verdict.passed, str(verdict)
        stages = {comparison.stage for comparison in verdict.layers[1].comparisons}
        assert stages == (SEEN if tapped is other else {"attn_weights", "output"})
    difference = parity.compare_taps(one, other)
    assert difference.agrees, str(difference)
    assert difference.layers[1].errors.keys() == {"input", "attn_weights", "output"}


class OthersAttention(nnx.Module):
    """Attention as in other libraries of nnx: positions have a different name, and the cache is
    returned first.
    """

    def __init__(self, spec, weights):
        self.inner = mha_jax.MultiHeadAttention(spec, rngs=nnx.Rngs(0))
        parity.load_into(self.inner, weights, spec)
        self.query = nnx.LinearGeneral(
            spec.d_model, (spec.num_heads, spec.head_dim), rngs=nnx.Rngs(0)
        )

    def __call__(self, x, segment_pos):
        self.query(x)
        return None, self.inner(x, positions=segment_pos, is_causal=True)[0]


class CatchAllAttention(nnx.Module):
    """Attention whose other arguments have no names of their own."""

    def __init__(self):
        self.inner = mha_jax.MultiHeadAttention(FULL, rngs=nnx.Rngs(0))

    def __call__(self, *inputs, **options):
        return self.inner(inputs[0], key=inputs[1], positions=options["positions"])


def test_flax_catch_all_is_recorded_by_name(rng):
    """Inputs in `*inputs` and positions in `**options` of a Flax layer are recorded."""
    x, y = jnp.asarray(rng.standard_normal((2, 1, 6, 32), dtype=np.float32))
    positions = jnp.arange(6)[None]
    model = nnx.List([CatchAllAttention()])
    with parity.tap(model, "CatchAllAttention") as tapped:
        model[0](x, y, positions=positions)
    (call,) = tapped.layers[0].calls
    assert np.array_equal(call.values["input"], x)
    assert np.array_equal(call.values["positions"], positions)


class Underscored(nnx.Module):
    """Layers whose numbers are parts of names."""

    def __init__(self, layers):
        for number, layer in layers.items():
            setattr(self, f"layers_{number}", layer)


@pytest.mark.thorough
def test_other_nnx_library_by_layer_number(rng):
    """Layers of a different nnx library are matched by number with weights of transformers; wrong
    weights are found in layer 10, and weights without names compare nothing.
    """
    spec = AttentionSpec(32, 4, qkv_bias=False, out_bias=False, rope=Rope(10000.0))
    numbers = range(12)
    weights = {number: parity.random_weights(spec, number) for number in numbers}
    model = Underscored({number: OthersAttention(spec, weights[number]) for number in numbers})
    x = jnp.asarray(rng.standard_normal((1, 6, 32), dtype=np.float32))
    positions = jnp.asarray([[0, 1, 2, 5, 6, 9]])  # not 0, 1, …, so that RoPE has an effect
    with parity.tap(model, "OthersAttention") as tapped:
        for number in numbers:
            getattr(model, f"layers_{number}")(x, positions)
    assert [layer.name for layer in tapped.layers] == [f"layers_{number}" for number in numbers]
    named = {f"model.layers.{number}.self_attn": weight for number, weight in weights.items()}
    specs = [
        ModelLayer(number, "", spec, {}, path=f"layers.{number}.self_attn") for number in numbers
    ]
    verdict = parity.check_tap(tapped, specs, named)
    assert verdict.passed, str(verdict)
    assert [[comparison.stage for comparison in layer.comparisons] for layer in verdict.layers] == [
        ["output"]
    ] * 12
    named["model.layers.10.self_attn"] = weights[2]
    assert [layer.index for layer in parity.check_tap(tapped, specs, named).wrong] == [10]
    nameless = parity.check_tap(tapped, specs, {"one": weights[0]})
    assert not nameless.passed
    assert str(nameless).endswith("no layer was compared")


@pytest.mark.thorough
def test_rope_of_another_layer_is_named():
    """A layer that uses the RoPE of a different layer is
    reported to be like that layer, if one matches.
    """
    yarn = {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 1e4,
    }
    rope = {"sliding_attention": ROPE, "full_attention": yarn}
    options = SIX | {"num_hidden_layers": 2, "layer_types": KINDS[:2], "rope_parameters": rope}
    model = made("olmo3", options, seed=1)
    specs = specs_of(model.config.to_dict())

    def verdict_of_prompt():
        with parity.tap(model) as tapped, torch.no_grad():
            model(torch.tensor([[5, 3, 8, 1, 7, 9]]))
        return parity.check_tap(tapped, specs, weights_in(model, tapped, specs))

    assert verdict_of_prompt().passed
    rotary = model.model.rotary_emb
    rotary.sliding_attention_inv_freq = rotary.full_attention_inv_freq
    rotary.sliding_attention_attention_scaling = rotary.full_attention_attention_scaling
    (wrong,) = verdict_of_prompt().wrong
    assert (wrong.index, wrong.difference.stage) == (0, "q")
    (finding,) = wrong.diagnosis.findings
    assert finding.bugs == ("configuration-of-another-layer",)
    assert "the configuration of layer 1 (full_attention): rope=" in finding.about
    assert finding.fix == "use this layer's own configuration"
    assert finding.about in str(wrong)
    rotary.sliding_attention_attention_scaling *= 1.5  # which no layer has
    (wrong,) = verdict_of_prompt().wrong
    assert "configuration-of-another-layer" not in wrong.diagnosis.likely_bug


def test_compiled_flax_model_raises(rng):
    """A tapped nnx model under `jax.jit` raises a `TypeError`, and the class is restored."""
    model = NnxBlock(lambda: nnx.MultiHeadAttention(4, 32, decode=False, rngs=nnx.Rngs(0)))
    x = jnp.asarray(rng.standard_normal((2, 6, 32), dtype=np.float32))
    call = nnx.MultiHeadAttention.__call__
    with rejects_type("model", "a tracer: call it under jax.disable_jit()"), parity.tap(model):
        jax.jit(lambda x: model(x))(x)
    assert nnx.MultiHeadAttention.__call__ is call


# ---- On a command line ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recordings(tmp_path_factory):
    """Write a model's folder, a recording of it, and a recording with a bug in layer 4; return
    their paths.
    """
    folder = tmp_path_factory.mktemp("recordings")
    model = of_six_layers("gemma2")
    model.save_pretrained(folder / "model")
    with parity.tap(model) as tapped:
        generate(model, 6)
    tapped.save(folder / "right.safetensors")
    with (
        inject(BUGS["window wide"], model, model.model.layers[4].self_attn),
        parity.tap(model) as tapped,
    ):
        generate(model, 6)
    tapped.save(folder / "wrong.safetensors")
    return {
        name: str(folder / name) for name in ("model", "right.safetensors", "wrong.safetensors")
    }.values()


@pytest.mark.costly("compares a recording of six layers and diagnoses one")
def test_diagnose_command_uses_model(recordings, tmp_path, capsys):
    """`diagnose --model` finds the bug of a recording and exits with 1, or with 0 if there is none;
    `--weights` raises an error that names `--model`.
    """
    model, right, wrong = recordings
    assert main(["diagnose", wrong, "--model", model, "--json", str(tmp_path / "told.json")]) == 1
    out = capsys.readouterr().out
    assert "First wrong layer: layer 4 (sliding_attention)" in out
    assert "Likely bug: window-one-too-wide" in out
    (recording,) = json.loads((tmp_path / "told.json").read_text())["recordings"]
    assert [layer["passed"] for layer in recording["layers"]] == [True] * 4 + [False, True]
    page = tmp_path / "page.html"
    assert main(["diagnose", right, "--model", model, "--html", str(page)]) == 0
    assert "6 layers agree with the reference, each for its own input" in capsys.readouterr().out
    assert page.read_text("utf-8").count('<svg class="heat layers"') == 1
    assert main(["diagnose", right, "--weights", model]) == 2
    captured = capsys.readouterr()
    assert rejects("--weights", right, hint="--model").is_printed_in(captured.err)
    assert captured.out == ""


def test_compare_command_with_recordings(recordings, tmp_path, capsys):
    """`compare --model` fails the wrong layer of one recording, in JSON and in the HTML page."""
    model, right, wrong = recordings
    page, report_path = tmp_path / "page.html", tmp_path / "told.json"
    assert (
        main(
            [
                "compare",
                right,
                wrong,
                "--model",
                model,
                "--html",
                str(page),
                "--json",
                str(report_path),
            ]
        )
        == 1
    )
    assert "do NOT agree with the float64 reference: 6 cases" in capsys.readouterr().out
    report = json.loads(report_path.read_text())
    assert {result["case"] for result in report["results"] if result["status"] == "failed"} == {
        "layer 4 (sliding_attention)"
    }
    strips = re.findall(r'<svg class="heat layers".*?</svg>', page.read_text("utf-8"))
    assert [strip.count("<path") for strip in strips] == [6, 6]
    assert ["beyond the budget: none" in strip for strip in strips] == [True, False]
    assert "beyond the budget: layer 4 (sliding_attention), mask ∞" in strips[1]
    assert main(["compare", right, "--model", model]) == 0


def test_two_recordings_without_model(recordings, tmp_path, capsys):
    """`compare` and `diagnose` find the layer and the stage where two recordings differ; only
    `compare` prints all stages.
    """
    _, right, wrong = recordings
    report_path = tmp_path / "told.json"
    for command in ("compare", "diagnose"):
        assert main([command, right, wrong, "--json", str(report_path)]) == 1
        out = capsys.readouterr().out
        assert "layer 4 (sliding_attention), stage mask: " in out
        assert ("attn_weights" in out) == (command == "compare")
        assert json.loads(report_path.read_text())["layers"][4]["stage"] == "mask"


def test_dropped_window_keys_are_restored():
    """Keys that a window dropped from the cache are the keys of earlier calls."""
    cached, joined = np.ones((1, 2, 3, 4), np.float32), {"k": np.arange(40.0).reshape(1, 2, 5, 4)}
    whole = TappedCall({"cache.keys": cached}, past=4)
    np.testing.assert_array_equal(_cache(whole, joined, "k"), cached)
    restored = _cache(replace(whole, first_key=2), joined, "k")
    np.testing.assert_array_equal(restored, np.concatenate([joined["k"][:, :, :2], cached], axis=2))


def test_narrow_terminal_prints_each_layer(recordings):
    """At a width of 60 columns, each of six layers has a line with its errors."""
    _, right, wrong = map(str, recordings)
    difference, out = (
        parity.compare_taps(parity.load_tap(right), parity.load_tap(wrong)),
        StringIO(),
    )
    print_difference(difference, Console(file=out, width=60), with_table=True)
    printed = " ".join(out.getvalue().split())
    assert len(difference.layers) == 6
    for layer in difference.layers:
        assert f"{layer.layer}: input {layer.errors['input']:.0e}, " in printed


def test_tokens_after_difference_are_ignored(recordings):
    """Tokens that follow a different generated token are not compared, and their number is
    reported.
    """
    _, right, wrong = map(str, recordings)
    difference = parity.compare_taps(parity.load_tap(right), parity.load_tap(wrong))
    assert difference.left_out > 0
    assert difference.layers[0].errors["output"] == 0.0
    assert f"{difference.left_out} tokens were not compared" in str(difference)


def test_invalid_recording_commands_fail(recordings, tmp_path, capsys):
    """Commands without a model, with mixed files or with unsuitable options exit with 2."""
    model, right, wrong = recordings
    parity.save(tmp_path / "layer.safetensors", parity.random_weights(FULL), FULL)
    layer, page = str(tmp_path / "layer.safetensors"), str(tmp_path / "page.html")
    for input_error, arguments in (
        (rejects("--model"), ["compare", right]),
        (rejects("recordings", f"{right} {layer}"), ["diagnose", right, layer]),
        (rejects("recordings", f"{right} {right}"), ["compare", right, right]),
        (Misuse("--html requires --model"), ["compare", right, wrong, "--html", page]),
        (Misuse("--model requires recordings"), ["compare", str(tmp_path), "--model", model]),
        (Misuse("--causal cannot be combined with recordings"), ["diagnose", right, "--no-causal"]),
    ):
        assert main(arguments) == 2
        assert input_error.is_printed_in(capsys.readouterr().err)


def test_nnx_steps_with_cache_pass(rng):
    """Six steps of an nnx layer with its cache are recorded with their past lengths, and pass."""
    model = NnxBlock(lambda: nnx.MultiHeadAttention(4, 32, decode=True, rngs=nnx.Rngs(0)), count=1)
    model.layers[0].init_cache((2, 6, 32))
    x = jnp.asarray(rng.standard_normal((2, 6, 32), dtype=np.float32))
    with parity.tap(model) as tapped:
        for index in range(6):
            model(x[:, index : index + 1])
    assert [call.past for call in tapped.layers[0].calls] == list(range(6))
    verdict = verdict_in_flax(tapped, {0: parity.weights_of(model.layers[0])})
    assert verdict.passed, str(verdict)
    assert [comparison.stage for comparison in verdict.layers[0].comparisons] == [
        "mask",
        "q",
        "k",
        "v",
        "context",
        "output",
    ]


@pytest.mark.costly("compares a recording of three beams")
def test_beam_search_follows_its_sequences(tmp_path):
    """Beam search continues sequences in other rows: they are followed back, and every layer
    agrees, also in a file.
    """
    model = of_six_layers("llama")
    specs = specs_of(model.config.to_dict())
    with parity.tap(model) as tapped:
        generate(model, num_beams=3)
    rows = [call.continued_rows for call in tapped.layers[0].calls]
    assert any(of_call is not None for of_call in rows)
    weights = weights_in(model, tapped, specs)
    path = tmp_path / "tap.safetensors"
    tapped.save(path)
    for recording in (tapped, parity.load_tap(path)):
        assert [call.continued_rows for call in recording.layers[0].calls] == rows
        assert parity.check_tap(recording, specs, weights).passed


def test_beams_with_two_caches_are_followed(tmp_path):
    """An encoder and decoder have two caches, which beam search reorders together."""
    model = encoder_decoder("bart")
    with parity.tap(model) as tapped:
        from_encoded(model, num_beams=3)
    decoder = [layer for layer in tapped.layers if "decoder" in layer.name]
    rows = {tuple(call.continued_rows for call in layer.calls) for layer in decoder}
    assert len(rows) == 1
    assert any(of_call is not None for of_call in rows.pop())
    assert not any("cache.keys" in call.values for layer in decoder for call in layer.calls)
    assert verdict_by_folder(model, tapped, tmp_path).passed


def test_lost_order_of_beams_is_named(monkeypatch):
    """A cache that keeps its rows where beam search continues others has wrong keys, and one bug
    in each layer.
    """
    model = of_two_layers("llama")
    # Calls of another prompt before do not matter.
    with parity.tap(model) as tapped:
        generate(model)
        monkeypatch.setattr(CacheLayerMixin, "reorder_cache", lambda *_: None)
        generate(model, num_beams=3)
    for layer in tapped.layers:
        wrong = ["cache.keys" in call.values for call in layer.calls]
        assert not any(wrong[:5])
        assert any(wrong[5:])
    specs = specs_of(model.config.to_dict())
    verdict = parity.check_tap(tapped, specs, weights_in(model, tapped, specs))
    assert len(verdict.wrong) == 2
    for layer in verdict.wrong:
        (finding,) = layer.diagnosis.findings
        assert finding.bugs == ("cache-rows-reordered",)
        assert "the order that it asks for is lost" in finding.about


def test_unknown_layers_are_searched_less(monkeypatch):
    """Layers that are wrong at the same stage as an unexplained one are searched in less time."""
    model = of_two_layers("llama")
    specs = specs_of(model.config.to_dict())

    def in_other_order(layer, rows):
        layer.keys = layer.keys[rows.flip(0)]

    monkeypatch.setattr(CacheLayerMixin, "reorder_cache", in_other_order)
    with parity.tap(model) as tapped:
        generate(model, num_beams=3)
    limits = []

    def explains_nothing(stages, problem, *, arithmetic, seconds):
        limits.append(seconds)
        return Diagnosis("step1.cache.keys", 1.0, 2.0, [Finding("step1.cache.keys", 1.0, 2.0)])

    monkeypatch.setattr(taps, "diagnose", explains_nothing)
    verdict = parity.check_tap(tapped, specs, weights_in(model, tapped, specs))
    assert [layer.diagnosis.kind for layer in verdict.wrong] == ["unknown"] * 2
    # Each layer is searched for the sequences with padding, and for those without.
    searched = sorted(set(limits), reverse=True)
    assert searched == [taps.SECONDS / number**2 for number in range(1, 5)]


def test_rows_of_beams_in_a_file_are_checked(tmp_path):
    """Rows that the call before does not have raise an error when a recording is read."""
    model = of_six_layers("llama")
    with parity.tap(model) as tapped:
        generate(model, count=2, num_beams=2)
    layer = tapped.layers[0]
    layer.calls[1] = replace(layer.calls[1], continued_rows=(0, 1, 2, 4))
    path = tmp_path / "tap.safetensors"
    tapped.save(path)
    with pytest.raises(ValueError, match=r"continued_rows of .*a row below 4"):
        parity.load_tap(path)


class _Decoder(nnx.Module):
    """A layer of a library whose cache is unknown here."""

    def __init__(self):
        self.self_attention = SelfAttention()

    def __call__(self, x, cache=None):
        return self.self_attention(x, cache=cache)


class SelfAttention(nnx.Module):
    def __call__(self, x, cache=None):
        return 2.0 * x


def test_steps_with_unknown_cache_raise():
    """A step with an unknown cache has no past length, and its comparison raises an error."""
    model, x = _Decoder(), jnp.ones((1, 3, 8))
    with parity.tap(model) as tapped:
        model(x)
        model(x[:, :1], cache={"k": x, "v": x})
    (layer,) = tapped.layers
    assert [call.past for call in layer.calls] == [0, None]
    spec = AttentionSpec(8, 2)
    with rejects("self_attention"):
        parity.check_tap(
            tapped,
            [ModelLayer(0, "full_attention", spec, {})],
            {0: parity.random_weights(spec)},
        )

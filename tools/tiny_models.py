"""Tiny transformers models of any type with random weights, and inputs that fit them, for
tools/coverage.
"""

import copy
import importlib
import inspect
import json
import math
import re
import time
from contextlib import suppress
from itertools import islice, product, zip_longest
from pathlib import Path
from pkgutil import iter_modules
from typing import NamedTuple

import torch
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

SEQUENCES, TOKENS, VOCABULARY = 3, 24, 320
LARGEST = 130_000_000
"""Largest number of parameters."""

TRIALS = 60
"""Most calls to try for a model."""

PATIENCE = 4
"""CPU seconds after which no further recipe is tried."""


class Recipe(NamedTuple):
    """A way to make a configuration small.

    Attributes:
        layers: number of layers; None to keep it.
        width: `fixed` to numbers of this file, divided by a `ratio`, or `unchanged`.
        derived: whether to omit fields without a default of their own, which follow from others.
        images: whether to make images small.
    """

    layers: int | None
    width: str
    derived: bool = False
    images: bool = True


RECIPES = (
    Recipe(2, "fixed"),
    Recipe(2, "fixed", derived=True),
    Recipe(4, "fixed", images=False),
    Recipe(2, "ratio"),
    Recipe(2, "unchanged", derived=True),
    Recipe(6, "ratio", derived=True),
    Recipe(None, "unchanged", images=False),
)
"""Recipes, the smallest first. The first one whose model runs is used."""

# ---- Configurations ------------------------------------------------------------------------------

LEFT_OUT = re.compile(
    "transformers_version|architectures|(torch_)?dtype|stage_names|id2label|label2id|out_features"
    "|_?attn_implementation|_?name_or_path"
)
SPECIAL = re.compile(r"_?(\w+)_(token_id|token_index|token_ids)$")
HIERARCHICAL = re.compile(r"depths|heads|hidden_sizes|embed_dims")
"""Names of lists in models with stages, whose widths depend on each other and stay unchanged."""

AT_MOST = {
    r"vocab(_size)?\w*$": VOCABULARY,
    r"(qk_)?rope_head_dim$": 8,
    r"qk_head_dim$": 24,
    r"kv_lora_rank$": 32,
    r"q_lora_rank$": 24,
    r"index_topk$|index_kpool$": 8,
    r"(num|n_routed|moe_num)_(\w+_)?experts$|^num_experts$": 4,
    r"experts_per_tok\w*$|moe_topk$|moe_k$|^top_?k_experts$|num_selected_experts$": 2,
    r"(^|_)n_group$|topk_group$|num_expert_group$|n_shared_experts$|first_k_dense_replace$": 1,
    r"sliding_window(_size)?$|attention_chunk_size$|^local_attention$": 6,
    r"max_source_positions$": 64,
    r"mamba_n_heads$|mamba_num_heads$": 8,
    r"mamba_(d_)?head(_dim)?$": 16,
    r"intermediate_size\w*$|ffn_dim$|ffn_hidden\w*$|mlp_dim$|d_inner$": 64,
    r"num_kv_shared_layers$|max_window_layers$": 1,
}
"""Largest values, by field name."""

LAYERS = re.compile(r"(^|_)(layers?|depth|blocks)$")
NOT_LAYERS = re.compile(
    r"feat_extract|cross_attn_every|n_every|upscale|residual_layers|moe_layer|mlp_only"
)
COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth")
KV_HEADS = re.compile(r"(key_value|kv)_heads$|query_groups$|^multi_query_group_num$")
HEADS = re.compile(r"(^|_)(heads?|nhead)$|_attention_heads_?\w*$")
HEAD_DIMS = re.compile(r"head_dim$|head_size$|^d_kv$|^kv_channels$|^d_head$|^dim_head$")
WIDTHS = re.compile(
    r"(hidden_size|d_model|n_embd|(^|_)dim|width|hidden_dim|channels|embedding_size|d_ff|n_inner|inner_dim)\w*$"
)
NOT_WIDTHS = re.compile(
    r"(num|in|audio)_channels|^in_dim|input_dim|rotary|kernel|ratio|_fine|dim_size$|conv_dim|num_|proportion"
)

ABSENT = {
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "num_experts": 4,
    "n_shared_experts": 1,
    "top_k_experts": 2,
    "head_dim": 16,
    "moe_intermediate_size": 64,
}
"""Values for fields that may be unset, but that some models require."""

TIMM = ("timm_backbone", "timm_wrapper")
"""Model types of parts that need another package; a ResNet replaces them."""

KINDS = ("full_attention", "sliding_attention")
SERIES = {"prediction_length": 24, "num_time_features": 1}
COMPASS = {"rope_parameters": {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in KINDS}}
TALKER = {"shared_expert_intermediate_size": 64}
HUNYUAN = {
    "head_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2] * 4},
}
EXCEPTIONS = {
    "autoformer": SERIES,
    "informer": SERIES,
    "time_series_transformer": SERIES,
    "hunyuan_vl": HUNYUAN,
    "hunyuan_vl_text": HUNYUAN,
    "chameleon": {"vocabulary_map": {"<image>": 8}},
    "emu3": {"vocabulary_map": {"<image>": 8}},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2},
    "esm": {"vocab_size": VOCABULARY, "pad_token_id": 1},
    "seggpt": {"merge_index": 0},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"]},
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16},
    "upernet": {"use_auxiliary_head": False},
    "step3p5": {"sliding_window": 6},
    "cohere_compass": {"text_config": COMPASS},
    "cohere_compass_text": COMPASS,
    "molmo2": {"adapter_config": {"vision_feature_layer": [1, 0]}},
    "muse_spark": {"audio_config": {"out_hidden_size": 64}},
    "dots3_note_audio_encoder": {"adapter_input_size": 64},
    "fast_vlm": {"vision_config": {"hidden_size": 2048}},
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0}},
    "qwen3_omni_moe": {"talker_config": {"spatial_merge_size": 2, "text_config": TALKER}},
    "t5gemma2_encoder": {"text_config": {"dropout_rate": 0.0}},
    "t5gemma2_decoder": {"dropout_rate": 0.0},
    "perceiver": {
        "d_model": 64,
        "d_latents": 64,
        "num_self_attends_per_block": 2,
        "num_latents": 32,
    },
}
"""Values of fields by model type and part, if no rule finds them."""


def tiny_config(model_type, recipe):
    """Return a small configuration."""
    cls = CONFIG_MAPPING[model_type]
    values = _small(cls().to_dict(), recipe)
    return cls(**_changed(values, EXCEPTIONS.get(model_type, {})))


def _changed(values, changes):
    """Return the values of a configuration with changes, and of its parts, by the names of
    these.
    """
    changed = {**values, **changes}
    for name, change in changes.items():
        if name.endswith("_config"):
            changed[name] = _changed(values.get(name) or {}, change)
    return changed


def _small(values, recipe):
    """Return the values of a configuration, or of a part of it, made small."""
    if values.get("model_type") in TIMM:
        values = CONFIG_MAPPING["resnet"](out_indices=[2, 3, 4]).to_dict()
    values = _arguments(values, recipe)
    is_hierarchical = _is_hierarchical(values)
    if is_hierarchical:
        recipe = recipe._replace(width="unchanged")
    num_layers = _first(values, *COUNTS, default=0)
    chosen_layers = _chosen_layers(values, num_layers, recipe)
    if chosen_layers:
        recipe = recipe._replace(layers=len(chosen_layers))

    small = {}
    for name, x in values.items():
        if _is_by_layer(x):
            small[name] = _small_by_layer(x, chosen_layers, recipe)
        elif isinstance(x, dict):
            if "model_type" in x or name.endswith("_config"):
                small[name] = _small(x, recipe)
            else:
                small[name] = _with_sections(x, values, recipe)
        elif isinstance(x, (list, tuple)):
            if is_hierarchical and "out" in name:
                small[name] = list(x)
            elif chosen_layers and len(x) == num_layers:
                small[name] = [x[layer] for layer in chosen_layers]
            else:
                small[name] = _short(name, x, recipe)
        elif x is None and (name != "head_dim" or recipe.derived):
            small[name] = ABSENT.get(name)
        elif type(x) is int:
            small[name] = _number(name, x, values, recipe)
        else:
            small[name] = x

    if recipe.width == "fixed" and type(values.get("head_dim")) is int:
        small["head_dim"] = _head_dim(values)
    if "qk_rope_head_dim" in values and recipe.width == "fixed" and _sections(values):
        small["qk_rope_head_dim"] = _head_dim(values)
        small["qk_head_dim"] = small.get("qk_nope_head_dim", 0) + _head_dim(values)
    if recipe.images:
        small |= _small_images(values, is_hierarchical)
    return small


def _is_hierarchical(values):
    """Return whether a model has stages, with lists of their widths."""
    lists = [name for name, x in values.items() if isinstance(x, list)]
    return any(HIERARCHICAL.search(name) for name in lists)


def _is_by_layer(x):
    """Return whether a value has a configuration for each layer, by its number."""
    if not isinstance(x, dict) or not x:
        return False
    return all(str(key).isdigit() and isinstance(part, dict) for key, part in x.items())


def _small_by_layer(parts, chosen_layers, recipe):
    """Return the configurations of the layers that are kept, made small, by their new numbers."""
    layers = chosen_layers or range(recipe.layers or 10**6)
    small = {}
    for key, part in parts.items():
        if int(key) in layers:
            small[layers.index(int(key))] = _small(part, recipe)
    return small


def _small_images(values, is_hierarchical):
    """Return the sizes of images, in pixels, that are larger than necessary, made small."""
    patch_size = _first(values, "patch_size", default=0)
    size = 64 if is_hierarchical or patch_size < 8 else 6 * patch_size
    small = {}
    for name in ("image_size", "input_size"):
        x = values.get(name)
        if type(x) is int and x > size:
            small[name] = size
        elif isinstance(x, (list, tuple)) and len(x) == 2 and min(x) > size:
            small[name] = [size, size]
    return small


def _arguments(values, recipe):
    """Return the arguments of a configuration, without derived ones."""
    cls = None
    if values.get("model_type") in CONFIG_MAPPING:
        cls = CONFIG_MAPPING[values["model_type"]]
    declared = getattr(cls, "__dataclass_fields__", {})
    arguments = {}
    for name, x in values.items():
        if LEFT_OUT.fullmatch(name):
            continue
        if declared and not (name in declared or name == "model_type" or "config" in name):
            continue
        if recipe.derived and name in declared:
            has_default = declared[name].default is not None
            if not has_default and x and not isinstance(x, dict):
                continue
        arguments[name] = x
    return arguments


def _first(values, *names, default):
    """Return the first of some values that is a number."""
    return next((values[name] for name in names if type(values.get(name)) is int), default)


def _chosen_layers(values, num_layers, recipe):
    """Return the layers to keep: one of each kind, according to lists with one word per layer; None
    without such lists.
    """
    if num_layers <= 2 or recipe.layers is None:
        return None
    lists = [x for x in values.values() if isinstance(x, (list, tuple)) and len(x) == num_layers]
    if not lists:
        return None
    kinds = [repr(kind) for kind in zip(*lists, strict=True)]
    first_layers = [kinds.index(kind) for kind in dict.fromkeys(kinds)][:6]
    if len(first_layers) < recipe.layers:
        return sorted({*first_layers, *range(recipe.layers)})
    return sorted(first_layers)


def _number(name, x, values, recipe):
    """Return a number of a configuration, made small."""
    if special := SPECIAL.match(name):
        usual = {"pad": 0, "bos": 1, "eos": 2, "decoder_start": 1}
        return x if x < 0 else usual.get(special[1], 210 + sum(map(ord, special[1])) % 100)
    if name == "max_position_embeddings" and x > 0:
        return max(x, 128)
    for pattern, most in AT_MOST.items():
        if re.search(pattern, name) and not (recipe.width == "unchanged" and "dim" in name):
            return min(x, most)
    if LAYERS.search(name) and not NOT_LAYERS.search(name):
        return x if recipe.layers is None else min(x, recipe.layers)
    if recipe.width == "unchanged":
        return x
    is_fixed = recipe.width == "fixed"
    if KV_HEADS.search(name):
        heads = _first(values, "num_attention_heads", "n_head", "num_heads", default=x)
        return min(x, 2 if x < heads else 4) if is_fixed else max(1, x // 2)
    if HEADS.search(name):
        return min(x, 4) if is_fixed else max(1, x // 2)
    if HEAD_DIMS.search(name):
        return min(x, 16) if is_fixed else max(8, x // 4)
    if WIDTHS.search(name) and not NOT_WIDTHS.search(name) and x >= 96:
        return 64 if is_fixed else x // 8
    return x


def _short(name, x, recipe):
    """Return a list of layer numbers or positions, made small."""
    count = recipe.layers
    if count is None or not x or not all(type(number) is int for number in x):
        return list(x)
    if name in ("depths", "depth", "num_blocks", "layers", "encoder_layers"):
        return [min(number, 2) for number in x]
    are_indices = re.search(r"ind(ex|ic)e|idx|_layers$", name) and list(x) == sorted({*x})
    if not are_indices or max(x) <= count:
        return list(x)
    indices = sorted({min(number, count - 1) for number in x})
    if len(indices) < len(x) and "out" in name:
        # As many outputs as before, of the last layers.
        return list(range(count - len(x) + 1, count + 1))
    return indices


def _with_sections(values, whole, recipe):
    """Return parameters of RoPE whose sections fit small heads."""
    if recipe.width != "fixed" or not isinstance(values, dict):
        return values
    small = {name: _with_sections(x, whole, recipe) for name, x in values.items()}
    section = values.get("mrope_section")
    if not section and "rope_theta" in values:
        section = _own_section(whole.get("model_type"))
    if section:
        num_pairs = int(_head_dim(whole) * _fraction(whole)) // 2
        parts = [size * num_pairs // sum(section) for size in section]
        # The first sections have the pairs that rounding has left.
        for index in range(num_pairs - sum(parts)):
            parts[index] += 1
        small["mrope_section"] = parts
    return small


def _head_dim(values):
    """Return the small head_dim of a part, with two pairs per axis; one independent of the width
    stays unchanged.
    """
    if "qk_rope_head_dim" in values:
        return 16 if _sections(values) else 8
    head_dim = _first(values, "head_dim", default=0)
    num_heads = _first(values, "num_attention_heads", default=0)
    d_model = _first(values, "hidden_size", default=0)
    small = 16
    if head_dim and num_heads and d_model and head_dim * num_heads != d_model:
        small = 32
    if head_dim and _sections(values):
        return max(small, int(16 / _fraction(values)))
    return small


def _sections(values):
    """Return the sections of RoPE of a part, if it has some."""
    rope_parameters = values.get("rope_parameters") or {}
    return rope_parameters.get("mrope_section") or _own_section(values.get("model_type"))


def _fraction(values):
    """Return the share of the features of a head that RoPE turns."""
    rope_parameters = values.get("rope_parameters") or {}
    own = values.get("partial_rotary_factor")
    return rope_parameters.get("partial_rotary_factor") or own or 1.0


def _own_section(model_type):
    """Return the RoPE sections that a model type has in its code."""
    if model_type not in CONFIG_MAPPING:
        return None
    source = Path(inspect.getfile(CONFIG_MAPPING[model_type]))
    text = "".join(path.read_text() for path in source.parent.glob("modeling_*.py"))
    match = re.search(r'"mrope_section", (\[[\d, ]+\])', text)
    return match and json.loads(match[1])


# ---- Models --------------------------------------------------------------------------------------


def classes_of(model_type):
    """Return model classes of a type, the plainest first."""
    cls = CONFIG_MAPPING[model_type]
    package = cls.__module__.rpartition(".")[0]
    names = MODEL_MAPPING_NAMES.get(model_type, ())
    if isinstance(names, str):
        names = (names,)
    classes = []
    for file in iter_modules(importlib.import_module(package).__path__):
        if not file.name.startswith("modeling_"):
            continue
        module = importlib.import_module(f"{package}.{file.name}")
        for value in vars(module).values():
            if _is_model_of(value, module, cls) and value not in classes:
                classes.append(value)

    def rank(model_class):
        name = model_class.__name__
        return (name not in names, _rank_of_kind(name))

    return sorted(classes, key=rank)


def _is_model_of(value, module, config_class):
    """Return whether a value is a model class of this module and configuration."""
    if not inspect.isclass(value) or not issubclass(value, PreTrainedModel):
        return False
    if "PreTrainedModel" in value.__name__ or value.__module__ != module.__name__:
        return False
    return getattr(value, "config_class", None) is config_class


def _rank_of_kind(name):
    """Return the rank of a class by its name: the plainest have the lowest."""
    kinds = ("Model", "ForConditionalGeneration", "Backbone", "ForCausalLM")
    for rank, kind in enumerate(kinds):
        if name.endswith(kind):
            return rank
    return len(kinds)


class NoAttention(Exception):
    """Raised for models without attention."""


def attention_layers(model):
    """Return the names of the innermost attention modules with projections."""
    modules = dict(model.named_modules())
    names = []
    for name, module in modules.items():
        if re.search("Attention|Attn", type(module).__name__):
            names.append(name)
    innermost = []
    for name in names:
        prefix = f"{name}." if name else ""
        has_inner = any(other != name and other.startswith(prefix) for other in names)
        num_matrices = sum(x.ndim >= 2 for x in modules[name].parameters())
        if not has_inner and num_matrices > 1:
            innermost.append(name)
    return innermost


def build(cls, config):
    """Return a model in evaluation mode whose random norms and biases have an effect.

    Raises:
        NoAttention: if it has no attention.
        ValueError: if it is too large.
    """
    torch.manual_seed(0)
    config._attn_implementation = "eager"
    with torch.device("meta"):
        model = cls._from_config(copy.deepcopy(config), attn_implementation="eager")
    if not attention_layers(model):
        raise NoAttention
    size = sum(x.numel() for x in model.parameters())
    if size > LARGEST:
        raise ValueError(f"{size // 10**6} million parameters")
    model = cls._from_config(config, attn_implementation="eager").float().eval()
    for name, parameter in model.named_parameters():
        x = parameter.data
        if not x.is_floating_point():
            continue
        if x.ndim <= 1:
            # Scales of norms are around 1, biases around 0.
            center = 1.0 if x.numel() and x.mean() > 0.5 else 0.0
            parameter.data = torch.randn(x.shape) * 0.3 + center
        elif "att" in name.lower():
            parameter.data = torch.randn(x.shape) / math.sqrt(x[0].numel())
    return model


# ---- Inputs --------------------------------------------------------------------------------------


class Call(NamedTuple):
    """A call of a model, or of a part of it.

    Attributes:
        part: name of the called module; empty for the model itself.
        inputs, fresh: keyword arguments, and others of the same shapes.
        ran: names of the modules that ran.
    """

    part: str
    inputs: dict
    fresh: dict
    ran: set


def find(config, *names, default=None):
    """Return a value of a configuration or, if it has none, of one of its parts."""
    return next(iter(every_value(config, *names)), default)


def every_value(config, *names):
    """Return the distinct values of a configuration and its parts under some names."""
    values = []
    for name in names:
        value = getattr(config, name, None)
        if value is not None and value not in values:
            values.append(value)
    for name in getattr(config, "sub_configs", ()):
        part = getattr(config, name, None)
        if part is None:
            continue
        for value in every_value(part, *names):
            if value not in values:
                values.append(value)
    return values


def makers_of(model, generator):
    """Return functions that make an input, by its name; several if its shape depends on the
    model.
    """
    config, parameters = model.config, inspect.signature(model.forward).parameters

    def normal(*shape):
        return lambda: torch.randn(shape, generator=generator)

    def integers(low, high, *shape):
        return lambda: torch.randint(low, high, shape, generator=generator)

    def constant(x):
        return lambda: torch.as_tensor(x).clone()

    def whole(*names, default):
        return next((x for x in every_value(config, *names) if type(x) is int), default)

    try:
        words = getattr(model.get_input_embeddings(), "num_embeddings", VOCABULARY)
    except (AttributeError, NotImplementedError):
        words = whole("vocab_size", default=VOCABULARY)
    tokens = [integers(max(0, min(3, words - 2)), max(min(words, 200), 2), SEQUENCES, TOKENS)]
    first = [
        x.shape[-1] for count in (1, 2) for x in [*model.parameters()][:4] if x.ndim == count
    ]  # input widths

    channels, patch = (
        whole(*names, default=8)
        for names in (("num_channels", "in_channels", "in_chans"), ("patch_size",))
    )
    size, frames = (
        find(config, "image_size", default=64),
        whole("num_frames", "frames_per_clip", default=4),
    )
    height, width = (
        size
        if isinstance(size, (list, tuple))
        else (size, size)
        if isinstance(size, int)
        else (64, 64)
    )
    channels = 3 if channels == 8 else channels
    image = (channels, height, width)
    images = [
        image,
        (channels, 64, 64),
        (channels, 224, 224),
        (1, *image),
        (frames, *image),
        (1, 1, *image),
    ]
    images += [(channels, patch, 64 * patch)] + [(64, patch_size) for patch_size in first]
    pixels = [normal(SEQUENCES, *size) for size in images] + [normal(SEQUENCES * frames, *image)]
    if {"grid_thw", "image_grid_thw"} & parameters.keys():
        flat = {channels * depth * patch**2 for depth in (1, 2)} | {*first}
        count = 64 * SEQUENCES
        pixels = [normal(count, size) for size in sorted(flat)] + [
            normal(1, count, channels, patch, patch)
        ]
        pixels += [normal(count, channels, patch, patch)]

    names = (
        "num_mel_bins",
        "input_feat_per_channel",
        "feature_size",
        "n_mels",
        "feature_projection_input_dim",
    )
    mels = [
        x
        for x in every_value(config, *names, "input_dim", "input_size", "hidden_size")
        if type(x) is int
    ] + first or [80]
    length = whole("max_source_positions", default=64)
    length = 2 * length if length <= 3000 else 128
    features = [
        shape
        for mel in mels
        for shape in ((mel, length), (128, mel), (mel, 128), (200, mel), (mel, 200))
    ]
    features += [(1, 128, mels[0]), (1, whole("spec_size", default=256), mels[0])]
    features = [normal(SEQUENCES, *shape) for shape in features]
    if "feature_lens" in parameters:
        features = [normal(mels[0], 200 * SEQUENCES)]
    sounds = [(10000,), (1, 10000), (whole("max_length", default=128), mels[0]), (128, mels[0])]
    sounds = [normal(SEQUENCES, *shape) for shape in sounds]

    widths = every_value(config, "hidden_size", "d_model", "embed_dim", "encoder_hidden_size") or [
        64
    ]
    states = [normal(SEQUENCES, TOKENS, width) for width in [*widths, *mels] if type(width) is int]
    series = whole("num_input_channels", "input_size", default=1)
    context = whole("context_length", "prediction_length", "patch_length", default=32)
    steps, times = (
        context + max(find(config, "lags_sequence", default=[0])),
        whole("num_time_features", default=0),
    )
    pixels = [[x, y] for x in range(8) for y in range(8)]
    return {
        "input_ids": tokens,
        "decoder_input_ids": tokens,
        "pixel_values": pixels,
        "pixel_values_videos": pixels,
        "input_features": features,
        "input_values": sounds,
        "audio_values": sounds,
        "prompt_pixel_values": pixels[:1],
        "prompt_masks": [normal(SEQUENCES, *image)],
        "bbox": [lambda: integers(0, 10, SEQUENCES, TOKENS, 4)() + torch.tensor([0, 0, 10, 10])],
        "past_values": [normal(SEQUENCES, steps), normal(SEQUENCES, steps, series)],
        "past_time_features": [normal(SEQUENCES, steps, times)],
        "past_observed_mask": [constant(torch.ones(SEQUENCES, steps))],
        "future_values": [normal(SEQUENCES, context)],
        "future_time_features": [normal(SEQUENCES, context, times)],
        "hidden_states": pixels if "grid_thw" in parameters else states,
        "inputs_embeds": states,
        "encoder_hidden_states": states,
        "t_cond": [normal(1, 1, widths[0])],
        **{key: [constant([[1, 8, 8]] * SEQUENCES)] for key in ("grid_thw", "image_grid_thw")},
        **{
            key: [constant([[8, 8]] * SEQUENCES)]
            for key in ("target_sizes", "tgt_sizes", "spatial_shapes")
        },
        "pixel_position_ids": [constant([pixels] * SEQUENCES)],
        "pixel_attention_mask": [constant(torch.ones(SEQUENCES, 64, dtype=torch.long))],
        "flattened_patches": [
            lambda: torch.cat(
                [torch.tensor([pixels] * SEQUENCES) + 1.0, normal(SEQUENCES, 64, first[0])()], -1
            )
        ],
        "mask": [constant(torch.ones(SEQUENCES, TOKENS, dtype=torch.bool))],
        "feature_lens": [constant([200] * SEQUENCES)],
        "input_features_mask": [
            constant(torch.ones(SEQUENCES, length_of_input, dtype=torch.long))
            for length_of_input in (length, 128, 200)
        ],
    }


VARIABLE = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
MODALITIES = (
    *("input_ids", "pixel_values", "image_grid_thw", "input_features", "input_values", "bbox"),
    *("future_values", "future_time_features"),
)


def inputs_for(model, seed, *, every=False):
    """Yield functions that make keyword arguments for a model, the likeliest first; with `every`,
    all at once.
    """
    makers = makers_of(model, torch.Generator().manual_seed(seed))
    parameters = inspect.signature(model.forward).parameters
    chosen = [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty and parameter.kind not in VARIABLE
    ]
    main = getattr(model, "main_input_name", "input_ids")
    main = (
        main if main in parameters else next((name for name in makers if name in parameters), main)
    )
    chosen = [*dict.fromkeys([*chosen, main])]
    if getattr(model.config, "is_encoder_decoder", False) and "decoder_input_ids" in parameters:
        chosen = [*dict.fromkeys([*chosen, "decoder_input_ids"])]
    full = [*dict.fromkeys([*chosen, *(name for name in MODALITIES if name in parameters)])]
    others = [x for x in makers if x in parameters and x not in chosen]
    sets = [chosen, full, *([*chosen, x] for x in others), *([x] for x in others)]
    if every:
        sets = [
            full,
            *([*chosen, x] for x in ("encoder_hidden_states", "pixel_values") if x in others),
        ]
    known = [names for names in sets if all(name in makers for name in names)]
    choices = [product(*(makers[name] for name in names)) for names in known]
    for row in zip_longest(*choices):  # the first choices before any second choice
        for names, choice in zip(known, row, strict=True):
            if choice is not None:
                yield dict(zip(names, choice, strict=True))


def with_required_tokens(inputs, config, reason):
    """Return inputs with the number of image or audio tokens that an error requires, or None."""
    match = re.search(
        r"(\w+) features and \w+ tokens do not match.*?tokens:? *\d+.*?features:? *(\d+)", reason
    )
    if match is None or "input_ids" not in inputs:
        return None
    kind, count = match[1].lower(), int(match[2]) // SEQUENCES
    token = find(config, f"{kind}_token_id", f"{kind}_token_index")
    first, rest = inputs["input_ids"][:, : TOKENS // 2], inputs["input_ids"][:, TOKENS // 2 :]
    return {
        **inputs,
        "input_ids": torch.cat([first, torch.full((SEQUENCES, count), token), rest], dim=1),
    }


def call_of(model, part="", *, every=False):
    """Return a successful call of a model, or of a part of it.

    Raises:
        ValueError: if all fail, with the reasons.
    """
    called, reasons = model.get_submodule(part), []
    for index, making in enumerate(islice(inputs_for(called, 1, every=every), TRIALS)):
        inputs = {name: make() for name, make in making.items()}
        for _ in range(3):
            try:
                ran = _run(model, called, inputs)
            except Exception as error:
                reasons.append(
                    f"{type(called).__name__}({', '.join(inputs)}): {type(error).__name__}: {error}"
                )
                inputs = with_required_tokens(inputs, called.config, str(error)) if every else None
                if inputs is None:
                    break
                continue
            making = next(islice(inputs_for(called, 2, every=every), index, None))
            fresh = {name: make() for name, make in making.items()}
            fresh |= {"input_ids": inputs["input_ids"]} if every and "input_ids" in inputs else {}
            return Call(part, inputs, fresh, ran)
    unknown = [
        name
        for name in inspect.signature(called.forward).parameters
        if name not in makers_of(called, None)
    ]
    raise ValueError(
        " | ".join(reasons) or f"{type(called).__name__}: no inputs are known for {unknown}"
    )


def _run(model, called, inputs):
    """Call a part of a model; return the names of the modules that ran."""
    ran, hooks = set(), []
    for name, module in model.named_modules():
        hooks.append(module.register_forward_hook(lambda *_, name=name: ran.add(name)))
    try:
        with torch.no_grad():
            called(**inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return ran


def more_calls(model, missing):
    """Yield calls of parts of a model, and of all its modalities, that reach modules which have not
    run.
    """
    missing = set(missing)
    for name, part in [*model.named_modules(), ("", model)][1:]:
        if isinstance(part, PreTrainedModel) and any(
            f"{name_of_missing}.".startswith(f"{name}." if name else "")
            for name_of_missing in missing
        ):
            try:
                call = call_of(model, name, every=not name)
            except Exception:  # it does not work alone
                continue
            if missing & call.ran:
                missing -= call.ran
                yield call


def tiny_model(model_type):
    """Return a model of a type, a call of it, and the way it was made.

    Raises:
        NoAttention: if it has no attention.
        ValueError: if no model can be made, with the reasons.
    """
    reasons, first, lacking, begin = [], None, 0, time.process_time()
    for recipe in RECIPES:
        try:
            tiny_config(model_type, recipe)
            classes = classes_of(model_type)
        except Exception as error:
            reasons.append(f"config: {type(error).__name__}: {error}")
            continue
        for cls in classes[:3]:
            if time.process_time() - begin > PATIENCE:
                break
            try:
                model = build(cls, tiny_config(model_type, recipe))
            except NoAttention:
                lacking += 1
                continue
            except Exception as error:
                reasons.append(f"{cls.__name__}: {type(error).__name__}: {error}")
                continue
            first = first or (
                model,
                Call("", {}, {}, set()),
                f"{cls.__name__}, {recipe}, parts alone",
            )
            try:
                return model, call_of(model), f"{cls.__name__}, {recipe}"
            except ValueError as error:
                reasons.append(str(error))
    if first is not None:
        return first
    if lacking:
        raise NoAttention
    raise ValueError(
        " | ".join(dict.fromkeys(reason.replace("\n", " ")[:300] for reason in reasons))
        or "no model class"
    )


# ---- Layers alone --------------------------------------------------------------------------------

QUERIES = (
    *(
        "hidden_states",
        "hidden_state",
        "queries",
        "query",
        "query_states",
        "query_tensor",
        "input_tensor",
        "inputs",
    ),
    *(
        "input",
        "x",
        "q",
        "latents",
        "target",
        "current_vision_features",
        "vision_features",
        "single_states",
    ),
)
"""Names of the tokens that a layer makes queries of."""

KEYS = (
    *(
        "keys",
        "key",
        "key_states",
        "k",
        "key_value_states",
        "encoder_hidden_states",
        "key_hidden_states",
        "context",
    ),
    *(
        "kv",
        "memory",
        "values",
        "value",
        "value_states",
        "v",
        "value_hidden_states",
        "cross_attention_states",
    ),
    *("text_features", "image_features"),
)
"""Names of the tokens from which it makes keys and values."""

POSITIONS = ("position_embeddings", "rotary_pos_emb", "cos", "sin", "object_queries")
"""Names of arguments with positions of tokens, which are optional."""

AROUND = 3
"""Modules that are tried for a layer: itself, and those around it."""


def calls_alone(model, names):
    """Yield calls of layers alone, or of the modules right around them, that run layers with some
    names.
    """
    missing = set(names)
    for name in names:
        part = name
        for _ in range(AROUND):
            call = None if name not in missing or not part else _call_alone(model, part)
            if call is not None and name in call.ran:
                missing -= call.ran
                yield call
                break
            part = part.rpartition(".")[0]


def _call_alone(model, part):
    """Return a call of a module that is not a model, with inputs by the names of its parameters;
    None if all fail.
    """
    called, made = model.get_submodule(part), []
    for seed in (1, 2):
        made.append(
            list(islice(_inputs_alone(model, part, torch.Generator().manual_seed(seed)), TRIALS))
        )
    for first, second in zip(*made, strict=True):
        inputs = {name: make() for name, make in first.items()}
        with suppress(Exception):
            return Call(
                part,
                inputs,
                {name: make() for name, make in second.items()},
                _run(model, called, inputs),
            )
    return None


def _inputs_alone(model, part, generator):
    """Yield functions that make keywords for a module that is not a model, the likeliest first."""
    called = model.get_submodule(part)
    parameters = inspect.signature(called.forward).parameters
    makers = _makers_alone(model, part, generator)
    needed = [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty and parameter.kind not in VARIABLE
    ]
    is_cross = re.search(
        r"cross|encoder_attn|encoder_decoder", f"{part} {type(called).__name__}".lower()
    )
    more = (
        [name for name in KEYS if name in parameters and name not in needed][:1] if is_cross else []
    )
    position_names = [name for name in POSITIONS if name in parameters]
    sets = [[*needed, *more, *position_names], [*needed, *more], [*needed, *position_names], needed]
    for names in dict.fromkeys(tuple(dict.fromkeys(names_of_set)) for names_of_set in sets):
        if all(name in makers for name in names):
            several = [makers[name] for name in names]
            for index in range(
                max(map(len, several), default=0)
            ):  # the same of all, such as their width
                yield {
                    name: value[min(index, len(value) - 1)]
                    for name, value in zip(names, several, strict=True)
                }
            for choice in product(*several):
                yield dict(zip(names, choice, strict=True))


def _makers_alone(model, part, generator):
    """Return functions that make an input of a module that is not a model, by its name."""
    called = model.get_submodule(part)
    linears = [
        x for x in called.modules() if getattr(getattr(x, "weight", None), "ndim", 0) in (2, 4)
    ]
    widths = list(dict.fromkeys(x.weight.shape[type(x).__name__ != "Conv1D"] for x in linears)) or [
        64
    ]
    is_first = all(getattr(x, "batch_first", True) for x in called.modules())

    def normal(*shape):
        return lambda: torch.randn(shape, generator=generator)

    def tokens(width, count=TOKENS):
        return normal(SEQUENCES, count, width) if is_first else normal(count, SEQUENCES, width)

    def constant(x):
        return lambda: x

    widths = widths[:3]
    queries = [tokens(width) for width in widths]
    queries += [
        normal(SEQUENCES, width, 4, TOKENS // 4)
        for width in widths[:1]
        if any(x.weight.ndim == 4 for x in linears)
    ]
    queries += [normal(SEQUENCES, 4, TOKENS // 4, width) for width in widths[:1]]
    queries += [normal(SEQUENCES, 1, TOKENS, width) for width in widths[:1]]
    keys = [tokens(width, TOKENS - 5) for width in widths]
    keys += [normal(SEQUENCES, 1, TOKENS - 5, width) for width in widths[:1]] * (
        len(queries) - len(keys)
    )
    if "cu_seqlens" in inspect.signature(called.forward).parameters:
        joined = SEQUENCES * TOKENS
        queries = [
            normal(*shape) for width in widths for shape in ((joined, width), (1, joined, width))
        ]
    positions = torch.arange(TOKENS)[None].expand(SEQUENCES, -1)
    rotary = [constant(x) for x in _angles(model, part)]
    nothing = (
        "attention_bias",
        "attention_mask",
        "mask",
        "cache",
        "past_key_values",
        "alibi",
        "head_mask",
    )
    return {
        **dict.fromkeys(QUERIES, queries),
        **dict.fromkeys(KEYS, keys),
        **{name: [*rotary, *queries] for name in ("position_embeddings", "rotary_pos_emb")},
        **{
            name: [constant(x[index]) for x in _angles(model, part)]
            for index, name in enumerate(("cos", "sin"))
        },
        **{name: [*queries, *keys] for name in ("object_queries", "spatial_position_embeddings")},
        **{name: [constant(None)] for name in nothing},
        **{name: [constant(positions)] for name in ("position_ids", "positions")},
        "cu_seqlens": [constant(TOKENS * torch.arange(SEQUENCES + 1, dtype=torch.int32))],
        "max_seqlen": [constant(TOKENS)],
        "layer_idx": [constant(getattr(called, "layer_idx", 0))],
        "height": [constant(4)],
        "width": [constant(TOKENS // 4)],
        "output_attentions": [constant(False)],
    }


def _angles(model, part):
    """Yield cosines and sines of the positions of tokens, as modules of a model that rotate return
    them.
    """
    rotary = {
        name: module for name, module in model.named_modules() if "Rotary" in type(module).__name__
    }
    near = sorted(rotary, key=lambda name: not f"{part}.".startswith(f"{name.rpartition('.')[0]}."))
    positions, x = torch.arange(TOKENS)[None], torch.zeros(1, TOKENS, 1)
    kinds = dict.fromkeys((getattr(model.get_submodule(part), "layer_type", None), *KINDS))
    for module in (rotary[name] for name in near):
        for arguments in (
            (x, positions),
            *((x, positions, kind) for kind in kinds),
            (positions,),
            (x, positions.expand(3, 1, -1)),
        ):
            with suppress(Exception), torch.no_grad():
                made = module(*arguments)
                if isinstance(made, tuple) and len(made) == 2:
                    yield made
                    break
    dim = getattr(model.get_submodule(part), "head_dim", None)
    if type(dim) is int:
        angles = positions[..., None] * 10000.0 ** (-torch.arange(0, dim, 2) / dim)
        angles = torch.cat([angles, angles], dim=-1)
        yield angles.cos(), angles.sin()

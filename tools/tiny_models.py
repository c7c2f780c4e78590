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
    size = 6 * patch_size
    if is_hierarchical or patch_size < 8:
        size = 64
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
    special = SPECIAL.match(name)
    if special is not None:
        return _special_token(special[1], x)
    if name == "max_position_embeddings" and x > 0:
        return max(x, 128)
    for pattern, most in AT_MOST.items():
        if re.search(pattern, name) and not (recipe.width == "unchanged" and "dim" in name):
            return min(x, most)
    if LAYERS.search(name) and not NOT_LAYERS.search(name):
        if recipe.layers is None:
            return x
        return min(x, recipe.layers)
    if recipe.width == "fixed":
        return _fixed(name, x, values)
    if recipe.width == "ratio":
        return _divided(name, x)
    return x


def _special_token(word, x):
    """Return the id of a special token, within the small vocabulary; a negative one means none."""
    if x < 0:
        return x
    usual = {"pad": 0, "bos": 1, "eos": 2, "decoder_start": 1}
    if word in usual:
        return usual[word]
    # Beyond the ids of usual tokens, and rarely the same for two words.
    return 210 + sum(map(ord, word)) % 100


def _fixed(name, x, values):
    """Return a number of heads or features, at most a number of this file."""
    if KV_HEADS.search(name):
        num_heads = _first(values, "num_attention_heads", "n_head", "num_heads", default=x)
        # Grouped heads stay grouped.
        most = 2 if x < num_heads else 4
        return min(x, most)
    if HEADS.search(name):
        return min(x, 4)
    if HEAD_DIMS.search(name):
        return min(x, 16)
    if _is_width(name, x):
        return 64
    return x


def _divided(name, x):
    """Return a number of heads or features, divided by a ratio."""
    if KV_HEADS.search(name) or HEADS.search(name):
        return max(1, x // 2)
    if HEAD_DIMS.search(name):
        return max(8, x // 4)
    if _is_width(name, x):
        return x // 8
    return x


def _is_width(name, x):
    """Return whether a number of a configuration is a large width."""
    return x >= 96 and WIDTHS.search(name) and not NOT_WIDTHS.search(name)


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
    indices = sorted({min(index, count - 1) for index in x})
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
        if _sections(values):
            return 16
        return 8
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
    if match is None:
        return None
    return json.loads(match[1])


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
            center = 0.0
            if x.numel() and x.mean() > 0.5:
                center = 1.0
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


class Draws:
    """Functions without arguments, each of which makes an input of a model when it is called.

    Attributes:
        generator: generator of all random numbers.
    """

    def __init__(self, generator):
        self.generator = generator

    def normal(self, *shape):
        """Return a function that draws normal numbers."""
        return lambda: torch.randn(shape, generator=self.generator)

    def integers(self, low, high, *shape):
        """Return a function that draws integers from `low` to below `high`."""
        return lambda: torch.randint(low, high, shape, generator=self.generator)

    def boxes(self):
        """Draw boxes around tokens, from their upper left corner to the lower right one."""
        corners = torch.randint(0, 10, (SEQUENCES, TOKENS, 4), generator=self.generator)
        return corners + torch.tensor([0, 0, 10, 10])

    def patches(self, width):
        """Return a function that draws patches of images, each after its coordinates."""

        def make():
            coordinates = torch.tensor([COORDINATES] * SEQUENCES) + 1.0
            values = torch.randn((SEQUENCES, len(COORDINATES), width), generator=self.generator)
            return torch.cat([coordinates, values], -1)

        return make


COORDINATES = [[x, y] for x in range(8) for y in range(8)]
"""Coordinates of the patches of an image."""


def tensor_of(x):
    """Return a function that makes a tensor of constant values."""
    return lambda: torch.as_tensor(x).clone()


def whole_number(config, *names, default):
    """Return the first integer of a configuration and its parts under some names."""
    for x in every_value(config, *names):
        if type(x) is int:
            return x
    return default


def makers_of(model, generator):
    """Return functions that make an input, by its name; several if its shape depends on the
    model.
    """
    config = model.config
    parameters = inspect.signature(model.forward).parameters
    draws = Draws(generator)

    tokens = [_maker_of_tokens(model, draws)]
    input_widths = _input_widths(model)
    image = _image_shape(config)
    pixels = _makers_of_pixels(config, parameters, image, input_widths, draws)
    mel_counts = _mel_counts(config) + input_widths or [80]
    length = whole_number(config, "max_source_positions", default=64)
    if length <= 3000:
        length *= 2  # a convolution halves the number of frames
    else:
        length = 128
    features = _makers_of_features(config, parameters, mel_counts, length, draws)
    max_length = whole_number(config, "max_length", default=128)
    sounds = [
        draws.normal(SEQUENCES, 10000),
        draws.normal(SEQUENCES, 1, 10000),
        draws.normal(SEQUENCES, max_length, mel_counts[0]),
        draws.normal(SEQUENCES, 128, mel_counts[0]),
    ]

    widths = every_value(config, "hidden_size", "d_model", "embed_dim", "encoder_hidden_size")
    if not widths:
        widths = [64]
    states = []
    for width in [*widths, *mel_counts]:
        if type(width) is int:
            states.append(draws.normal(SEQUENCES, TOKENS, width))
    hidden_states = states
    if "grid_thw" in parameters:
        hidden_states = pixels

    num_series = whole_number(config, "num_input_channels", "input_size", default=1)
    num_predicted = whole_number(
        config, "context_length", "prediction_length", "patch_length", default=32
    )
    num_steps = num_predicted + max(find(config, "lags_sequence", default=[0]))
    num_times = whole_number(config, "num_time_features", default=0)

    grids = [tensor_of([[1, 8, 8]] * SEQUENCES)]
    sizes = [tensor_of([[8, 8]] * SEQUENCES)]
    masks_of_features = []
    for num_frames in (length, 128, 200):
        masks_of_features.append(tensor_of(torch.ones(SEQUENCES, num_frames, dtype=torch.long)))
    return {
        "input_ids": tokens,
        "decoder_input_ids": tokens,
        "pixel_values": pixels,
        "pixel_values_videos": pixels,
        "input_features": features,
        "input_values": sounds,
        "audio_values": sounds,
        "prompt_pixel_values": pixels[:1],
        "prompt_masks": [draws.normal(SEQUENCES, *image)],
        "bbox": [draws.boxes],
        "past_values": [
            draws.normal(SEQUENCES, num_steps),
            draws.normal(SEQUENCES, num_steps, num_series),
        ],
        "past_time_features": [draws.normal(SEQUENCES, num_steps, num_times)],
        "past_observed_mask": [tensor_of(torch.ones(SEQUENCES, num_steps))],
        "future_values": [draws.normal(SEQUENCES, num_predicted)],
        "future_time_features": [draws.normal(SEQUENCES, num_predicted, num_times)],
        "hidden_states": hidden_states,
        "inputs_embeds": states,
        "encoder_hidden_states": states,
        "t_cond": [draws.normal(1, 1, widths[0])],
        "grid_thw": grids,
        "image_grid_thw": grids,
        "target_sizes": sizes,
        "tgt_sizes": sizes,
        "spatial_shapes": sizes,
        "pixel_position_ids": [tensor_of([COORDINATES] * SEQUENCES)],
        "pixel_attention_mask": [tensor_of(torch.ones(SEQUENCES, 64, dtype=torch.long))],
        "flattened_patches": [draws.patches(width) for width in input_widths[:1]],
        "mask": [tensor_of(torch.ones(SEQUENCES, TOKENS, dtype=torch.bool))],
        "feature_lens": [tensor_of([200] * SEQUENCES)],
        "input_features_mask": masks_of_features,
    }


def _maker_of_tokens(model, draws):
    """Return the maker of token ids, without the ids that `_number` makes special."""
    try:
        num_words = getattr(model.get_input_embeddings(), "num_embeddings", VOCABULARY)
    except (AttributeError, NotImplementedError):
        num_words = whole_number(model.config, "vocab_size", default=VOCABULARY)
    low = max(0, min(3, num_words - 2))
    high = max(min(num_words, 200), 2)
    return draws.integers(low, high, SEQUENCES, TOKENS)


def _input_widths(model):
    """Return last sizes of the first parameters of a model, vectors first: its inputs may have
    one of these.
    """
    first_parameters = [*model.parameters()][:4]
    vectors = [x.shape[-1] for x in first_parameters if x.ndim == 1]
    matrices = [x.shape[-1] for x in first_parameters if x.ndim == 2]
    return vectors + matrices


def _image_shape(config):
    """Return the channels, height and width of images."""
    channels = whole_number(config, "num_channels", "in_channels", "in_chans", default=3)
    size = find(config, "image_size", default=64)
    if isinstance(size, (list, tuple)):
        height, width = size
    elif isinstance(size, int):
        height = width = size
    else:
        height = width = 64
    return channels, height, width


def _makers_of_pixels(config, parameters, image, input_widths, draws):
    """Return makers of images, of videos, or of the patches of images in one sequence."""
    channels = image[0]
    patch = whole_number(config, "patch_size", default=8)
    if "grid_thw" in parameters or "image_grid_thw" in parameters:
        count = 64 * SEQUENCES
        flat_widths = {channels * patch**2, 2 * channels * patch**2, *input_widths}
        makers = [draws.normal(count, width) for width in sorted(flat_widths)]
        makers.append(draws.normal(1, count, channels, patch, patch))
        makers.append(draws.normal(count, channels, patch, patch))
        return makers
    num_frames = whole_number(config, "num_frames", "frames_per_clip", default=4)
    shapes = [
        image,
        (channels, 64, 64),
        (channels, 224, 224),
        (1, *image),
        (num_frames, *image),
        (1, 1, *image),
        (channels, patch, 64 * patch),
    ]
    shapes += [(64, width) for width in input_widths]
    makers = [draws.normal(SEQUENCES, *shape) for shape in shapes]
    makers.append(draws.normal(SEQUENCES * num_frames, *image))
    return makers


def _mel_counts(config):
    """Return numbers that a configuration may have for the features of a frame of sound."""
    values = every_value(
        config,
        "num_mel_bins",
        "input_feat_per_channel",
        "feature_size",
        "n_mels",
        "feature_projection_input_dim",
        "input_dim",
        "input_size",
        "hidden_size",
    )
    return [x for x in values if type(x) is int]


def _makers_of_features(config, parameters, mel_counts, length, draws):
    """Return makers of spectrograms, with the time as the first or the second axis."""
    if "feature_lens" in parameters:
        return [draws.normal(mel_counts[0], 200 * SEQUENCES)]
    shapes = []
    for mels in mel_counts:
        shapes += [(mels, length), (128, mels), (mels, 128), (200, mels), (mels, 200)]
    shapes.append((1, 128, mel_counts[0]))
    shapes.append((1, whole_number(config, "spec_size", default=256), mel_counts[0]))
    return [draws.normal(SEQUENCES, *shape) for shape in shapes]


VARIABLE = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
MODALITIES = (
    "input_ids",
    "pixel_values",
    "image_grid_thw",
    "input_features",
    "input_values",
    "bbox",
    "future_values",
    "future_time_features",
)


def _required(parameters):
    """Return the names of parameters without a default."""
    names = []
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and parameter.kind not in VARIABLE:
            names.append(name)
    return names


def _unique(names):
    """Return names without repetitions, in the order of the first ones."""
    return list(dict.fromkeys(names))


def inputs_for(model, seed, *, every=False):
    """Yield functions that make keyword arguments for a model, the likeliest first; with `every`,
    all at once.
    """
    makers = makers_of(model, torch.Generator().manual_seed(seed))
    parameters = inspect.signature(model.forward).parameters
    main = getattr(model, "main_input_name", "input_ids")
    if main not in parameters:
        main = next((name for name in makers if name in parameters), main)
    needed = _unique([*_required(parameters), main])
    if getattr(model.config, "is_encoder_decoder", False) and "decoder_input_ids" in parameters:
        needed = _unique([*needed, "decoder_input_ids"])
    modalities = [name for name in MODALITIES if name in parameters]
    full = _unique([*needed, *modalities])
    others = [name for name in makers if name in parameters and name not in needed]
    if every:
        sets = [full]
        for name in ("encoder_hidden_states", "pixel_values"):
            if name in others:
                sets.append([*needed, name])
    else:
        sets = [needed, full]
        sets += [[*needed, name] for name in others]
        sets += [[name] for name in others]
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
    kind = match[1].lower()
    count = int(match[2]) // SEQUENCES
    token = find(config, f"{kind}_token_id", f"{kind}_token_index")
    tokens = inputs["input_ids"]
    begin, end = tokens[:, : TOKENS // 2], tokens[:, TOKENS // 2 :]
    added = torch.full((SEQUENCES, count), token)
    return {**inputs, "input_ids": torch.cat([begin, added, end], dim=1)}


def make_all(makers):
    """Return keyword arguments, each made by its function."""
    return {name: make() for name, make in makers.items()}


def call_of(model, part="", *, every=False):
    """Return a successful call of a model, or of a part of it.

    Raises:
        ValueError: if all fail, with the reasons.
    """
    called = model.get_submodule(part)
    reasons = []
    for index, makers in enumerate(islice(inputs_for(called, 1, every=every), TRIALS)):
        inputs, ran = _run_with_tokens(model, called, make_all(makers), reasons, every=every)
        if inputs is None:
            continue
        # The same choice with a different seed.
        fresh = make_all(next(islice(inputs_for(called, 2, every=every), index, None)))
        if every and "input_ids" in inputs:
            fresh["input_ids"] = inputs["input_ids"]
        return Call(part, inputs, fresh, ran)
    if reasons:
        raise ValueError(" | ".join(reasons))
    makers = makers_of(called, None)
    parameters = inspect.signature(called.forward).parameters
    unknown = [name for name in parameters if name not in makers]
    raise ValueError(f"{type(called).__name__}: no inputs are known for {unknown}")


def _run_with_tokens(model, called, inputs, reasons, *, every):
    """Call a part of a model; with `every`, again with the tokens that its error requires.

    Returns the inputs of the successful call, and the names of the modules that ran; None for
    both if all fail, after the reasons were appended.
    """
    # Images and sounds may each require tokens.
    for _ in range(3):
        try:
            return inputs, _run(model, called, inputs)
        except Exception as error:
            names = ", ".join(inputs)
            kind = type(error).__name__
            reasons.append(f"{type(called).__name__}({names}): {kind}: {error}")
            if not every:
                break
            inputs = with_required_tokens(inputs, called.config, str(error))
            if inputs is None:
                break
    return None, None


def _run(model, called, inputs):
    """Call a part of a model; return the names of the modules that ran."""
    ran = set()
    hooks = []
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
    _, *parts = model.named_modules()  # the first one is the model
    for name, part in [*parts, ("", model)]:
        if not isinstance(part, PreTrainedModel):
            continue
        prefix = f"{name}." if name else ""
        if not any(f"{layer}.".startswith(prefix) for layer in missing):
            continue
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
    reasons = []
    # The first model that was made, if only its parts can be called.
    in_parts = None
    is_without_attention = False
    begin = time.process_time()
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
                is_without_attention = True
                continue
            except Exception as error:
                reasons.append(f"{cls.__name__}: {type(error).__name__}: {error}")
                continue
            way = f"{cls.__name__}, {recipe}"
            if in_parts is None:
                in_parts = model, Call("", {}, {}, set()), f"{way}, parts alone"
            try:
                return model, call_of(model), way
            except ValueError as error:
                reasons.append(str(error))
    if in_parts is not None:
        return in_parts
    if is_without_attention:
        raise NoAttention
    if not reasons:
        raise ValueError("no model class")
    short_reasons = [reason.replace("\n", " ")[:300] for reason in reasons]
    raise ValueError(" | ".join(_unique(short_reasons)))


# ---- Layers alone --------------------------------------------------------------------------------

QUERIES = (
    "hidden_states",
    "hidden_state",
    "queries",
    "query",
    "query_states",
    "query_tensor",
    "input_tensor",
    "inputs",
    "input",
    "x",
    "q",
    "latents",
    "target",
    "current_vision_features",
    "vision_features",
    "single_states",
)
"""Names of the tokens that a layer makes queries of."""

KEYS = (
    "keys",
    "key",
    "key_states",
    "k",
    "key_value_states",
    "encoder_hidden_states",
    "key_hidden_states",
    "context",
    "kv",
    "memory",
    "values",
    "value",
    "value_states",
    "v",
    "value_hidden_states",
    "cross_attention_states",
    "text_features",
    "image_features",
)
"""Names of the tokens from which it makes keys and values."""

POSITIONS = ("position_embeddings", "rotary_pos_emb", "cos", "sin", "object_queries")
"""Names of arguments with positions of tokens, which are optional."""

NOTHING = (
    "attention_bias",
    "attention_mask",
    "mask",
    "cache",
    "past_key_values",
    "alibi",
    "head_mask",
)
"""Names of arguments that are None."""

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
            # The call of another layer may have run this one.
            if name not in missing or not part:
                break
            call = _call_alone(model, part)
            if call is not None and name in call.ran:
                missing -= call.ran
                yield call
                break
            part = part.rpartition(".")[0]


def _call_alone(model, part):
    """Return a call of a module that is not a model, with inputs by the names of its parameters;
    None if all fail.
    """
    called = model.get_submodule(part)
    choices = list(islice(_inputs_alone(model, part, seed=1), TRIALS))
    fresh_choices = list(islice(_inputs_alone(model, part, seed=2), TRIALS))
    for makers, fresh_makers in zip(choices, fresh_choices, strict=True):
        inputs = make_all(makers)
        with suppress(Exception):
            fresh = make_all(fresh_makers)
            return Call(part, inputs, fresh, _run(model, called, inputs))
    return None


def _inputs_alone(model, part, seed):
    """Yield functions that make keywords for a module that is not a model, the likeliest first."""
    called = model.get_submodule(part)
    parameters = inspect.signature(called.forward).parameters
    makers = _makers_alone(model, part, Draws(torch.Generator().manual_seed(seed)))
    needed = _required(parameters)
    names_of_keys = []
    words = f"{part} {type(called).__name__}".lower()
    if re.search(r"cross|encoder_attn|encoder_decoder", words):
        others = [name for name in KEYS if name in parameters and name not in needed]
        names_of_keys = others[:1]
    names_of_positions = [name for name in POSITIONS if name in parameters]
    sets = [
        [*needed, *names_of_keys, *names_of_positions],
        [*needed, *names_of_keys],
        [*needed, *names_of_positions],
        needed,
    ]
    for names in _unique(tuple(_unique(names)) for names in sets):
        if not all(name in makers for name in names):
            continue
        alternatives = [makers[name] for name in names]
        most = max(map(len, alternatives), default=0)
        # Alternatives of the same number first: theirs is the same width, for example.
        for index in range(most):
            choice = [several[min(index, len(several) - 1)] for several in alternatives]
            yield dict(zip(names, choice, strict=True))
        for choice in product(*alternatives):
            yield dict(zip(names, choice, strict=True))


def unchanged(x):
    """Return a function that returns x."""
    return lambda: x


def _makers_alone(model, part, draws):
    """Return functions that make an input of a module that is not a model, by its name."""
    called = model.get_submodule(part)
    queries, keys = _makers_of_tokens_alone(called, draws)
    angles = list(_angles(model, part))
    embeddings = [*(unchanged(pair) for pair in angles), *queries]
    positions = [unchanged(torch.arange(TOKENS)[None].expand(SEQUENCES, -1))]
    nothing = [unchanged(None)]
    return {
        **dict.fromkeys(QUERIES, queries),
        **dict.fromkeys(KEYS, keys),
        **dict.fromkeys(NOTHING, nothing),
        "position_embeddings": embeddings,
        "rotary_pos_emb": embeddings,
        "cos": [unchanged(cosines) for cosines, _ in angles],
        "sin": [unchanged(sines) for _, sines in angles],
        "object_queries": [*queries, *keys],
        "spatial_position_embeddings": [*queries, *keys],
        "position_ids": positions,
        "positions": positions,
        "cu_seqlens": [unchanged(TOKENS * torch.arange(SEQUENCES + 1, dtype=torch.int32))],
        "max_seqlen": [unchanged(TOKENS)],
        "layer_idx": [unchanged(getattr(called, "layer_idx", 0))],
        "height": [unchanged(4)],
        "width": [unchanged(TOKENS // 4)],
        "output_attentions": [unchanged(False)],
    }


def _makers_of_tokens_alone(called, draws):
    """Return the makers of queries, and of as many keys."""
    matrices = []
    for module in called.modules():
        if getattr(getattr(module, "weight", None), "ndim", 0) in (2, 4):
            matrices.append(module)
    widths = _widths_of(matrices)[:3]
    # Modules of images have tokens in rows and columns.
    width = widths[0]
    queries = [_maker_in_order(called, draws, TOKENS, width) for width in widths]
    if any(module.weight.ndim == 4 for module in matrices):
        queries.append(draws.normal(SEQUENCES, width, 4, TOKENS // 4))
    queries.append(draws.normal(SEQUENCES, 4, TOKENS // 4, width))
    queries.append(draws.normal(SEQUENCES, 1, TOKENS, width))
    num_keys = TOKENS - 5  # fewer than queries, so that a call with swapped axes fails
    keys = [_maker_in_order(called, draws, num_keys, width) for width in widths]
    keys_of_one_image = draws.normal(SEQUENCES, 1, num_keys, width)
    keys += [keys_of_one_image] * (len(queries) - len(keys))
    if "cu_seqlens" in inspect.signature(called.forward).parameters:
        # All sequences are joined.
        queries = []
        for width in widths:
            queries.append(draws.normal(SEQUENCES * TOKENS, width))
            queries.append(draws.normal(1, SEQUENCES * TOKENS, width))
    return queries, keys


def _widths_of(matrices):
    """Return the different input widths of modules with a matrix, in their order."""
    widths = {}
    for module in matrices:
        # Only the Conv1D of transformers has the inputs in the first axis.
        if type(module).__name__ == "Conv1D":
            widths[module.weight.shape[0]] = None
        else:
            widths[module.weight.shape[1]] = None
    return list(widths) or [64]


def _maker_in_order(called, draws, count, width):
    """Return the maker of tokens, with the axis of sequences where a module has it."""
    if all(getattr(module, "batch_first", True) for module in called.modules()):
        return draws.normal(SEQUENCES, count, width)
    return draws.normal(count, SEQUENCES, width)


def _angles(model, part):
    """Yield cosines and sines of the positions of tokens, as modules of a model that rotate return
    them.
    """
    rotary = {}
    for name, module in model.named_modules():
        if "Rotary" in type(module).__name__:
            rotary[name] = module

    def is_far(name):
        parent = name.rpartition(".")[0]
        return not f"{part}.".startswith(f"{parent}.")

    layer = model.get_submodule(part)
    layer_type = getattr(layer, "layer_type", None)
    positions = torch.arange(TOKENS)[None]
    for name in sorted(rotary, key=is_far):
        angles = _angles_of(rotary[name], positions, layer_type)
        if angles is not None:
            yield angles
    head_dim = getattr(layer, "head_dim", None)
    if type(head_dim) is int:
        frequencies = 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
        angles = positions[..., None] * frequencies
        angles = torch.cat([angles, angles], dim=-1)
        yield angles.cos(), angles.sin()


def _angles_of(module, positions, layer_type):
    """Return the cosines and sines of a module that rotates; None if no way to call it works."""
    x = torch.zeros(1, TOKENS, 1)
    ways = [(x, positions)]
    ways += [(x, positions, kind) for kind in _unique([layer_type, *KINDS])]
    ways.append((positions,))
    ways.append((x, positions.expand(3, 1, -1)))
    for arguments in ways:
        with suppress(Exception), torch.no_grad():
            angles = module(*arguments)
            if isinstance(angles, tuple) and len(angles) == 2:
                return angles
    return None

"""Tiny models of transformers with random weights, of any model type, and inputs that fit them: for tools/coverage."""

import copy
import importlib
import inspect
import json
import math
import re
import time
from itertools import islice, product, zip_longest
from pathlib import Path
from pkgutil import iter_modules
from typing import NamedTuple

import torch
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

SEQUENCES, TOKENS, VOCABULARY = 3, 24, 320
LARGEST = 130_000_000
"""Parameters of a model."""

TRIALS = 60
"""Calls that are tried of a model."""

PATIENCE = 15
"""Seconds of the processor after which no other way to make a model is tried."""

SPECIAL = re.compile(r"_?(?P<name>\w+)_(token_id|token_index|token_ids)$")

RECIPES = (
    {"layers": 2, "width": "fixed"},
    {"layers": 2, "width": "fixed", "derived": True},
    {"layers": 4, "width": "fixed", "images": "kept"},
    {"layers": 2, "width": "ratio"},
    {"layers": 2, "width": "kept", "derived": True},
    {"layers": 6, "width": "ratio", "derived": True},
    {"layers": None, "width": "kept"},
)
"""Ways to make a configuration small, the smallest first. The first one whose model runs is taken.

Fields without a default of their own are left out where they are `derived` from others.
"""

LAYERS = re.compile(r"(^|_)(layers?|depth|blocks)$")
NOT_LAYERS = re.compile(r"feat_extract_layers|cross_attn_every|n_every|upscale|residual_layers|moe_layer|first_k|mlp_only")
HEADS = re.compile(r"(^|_)(heads?|nhead)$|_attention_heads_?\w*$")
KV_HEADS = re.compile(r"(key_value|kv)_heads$|query_groups$|^multi_query_group_num$")
HEAD_DIMS = re.compile(r"head_dim$|head_size$|^d_kv$|^kv_channels$|^d_head$|^dim_head$|mamba_d_head$")
WIDTHS = re.compile(r"(hidden_size|d_model|n_embd|(^|_)dim|width|hidden_dim|channels|embedding_size|d_ff|n_inner|inner_dim)\w*$")
NOT_WIDTHS = re.compile(r"num_channels|in_channels|audio_channels|^in_dim|input_dim|rotary|kernel|ratio|_fine|dim_size$|conv_dim|num_|proportion")
FIXED = {
    r"(qk_)?rope_head_dim$": 8,
    r"qk_head_dim$": 24,
    r"kv_lora_rank$": 32,
    r"q_lora_rank$": 24,
    r"index_topk$": 8,
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
"""Values by names of fields, where they are larger."""

ABSENT = {"num_experts_per_tok": 2, "n_routed_experts": 4, "num_experts": 4, "n_shared_experts": 1, "head_dim": 16, "moe_intermediate_size": 64}
"""Values of fields that may have none, and that some models cannot do without."""

PART = {"timm_backbone": "resnet", "timm_wrapper": "resnet"}
"""Model types of parts that need another package, and what takes their place."""

EXCEPTIONS = {
    **dict.fromkeys(
        ("autoformer", "informer", "time_series_transformer"), {"prediction_length": 24, "num_time_features": 1}
    ),
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]]},
    **dict.fromkeys(
        ("hunyuan_vl_text", "hunyuan_vl"),
        {"head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2, 2]}},
    ),
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "emu3": {"vocabulary_map": {"<image>": 8}},
    "chameleon": {"vocabulary_map": {"<image>": 8}},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2},
    "perceiver": {"d_model": 64, "d_latents": 64, "num_self_attends_per_block": 2, "num_latents": 32, "max_position_embeddings": 64, "vocab_size": 300},
}
"""Values of fields by model type, as far as no rule finds them."""


def tiny_config(model_type, recipe):
    """Return a small configuration."""
    cls = CONFIG_MAPPING[model_type]
    values = _small(cls().to_dict(), recipe)
    return cls(**{**values, **EXCEPTIONS.get(model_type, {})})


def _small(values, recipe):
    """Return the values of a configuration, or of a part of it, made small."""
    if values.get("model_type") in PART:
        values = CONFIG_MAPPING[PART[values["model_type"]]](out_indices=[2, 3, 4]).to_dict()
    left_out = ("model_type", "transformers_version", "architectures", "dtype", "torch_dtype", "stage_names", "id2label", "label2id")
    values = {name: x for name, x in values.items() if name not in left_out or (name == "model_type")}
    values = {name: x for name, x in values.items() if name.lstrip("_") not in ("attn_implementation", "name_or_path", "out_features")}
    declared = getattr(CONFIG_MAPPING[values["model_type"]], "__dataclass_fields__", {}) if values.get("model_type") in CONFIG_MAPPING else {}
    if declared:
        values = {name: x for name, x in values.items() if name in declared or name == "model_type" or "config" in name}
    if recipe.get("derived"):
        values = {name: x for name, x in values.items() if name not in declared or declared[name].default is not None or isinstance(x, dict) or x is None}
    is_hierarchical = any(isinstance(x, list) and re.search(r"depths|heads|hidden_sizes|embed_dims", name) for name, x in values.items())
    width = "kept" if is_hierarchical else recipe["width"]
    old = next((values[name] for name in ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth") if isinstance(values.get(name), int)), None)
    lists = [x for name, x in values.items() if isinstance(x, (list, tuple)) and old is not None and len(x) == old and old > 2]
    count = recipe["layers"]
    picked = None
    if lists and count is not None:
        kinds = list(zip(*lists, strict=True))
        firsts = [kinds.index(kind) for kind in dict.fromkeys(kinds)][:6]
        picked = sorted({*firsts, *range(count)}) if len(firsts) < count else sorted(firsts)
        count = len(picked)
    given = {}
    for name, x in values.items():
        if isinstance(x, dict) and x and all(str(each).isdigit() and isinstance(y, dict) for each, y in x.items()):
            kept = picked or range(count or 10**6)
            given[name] = {kept.index(int(each)): _small(y, recipe) for each, y in x.items() if int(each) in kept}
        elif isinstance(x, dict):
            given[name] = _small(x, recipe) if "model_type" in x or name.endswith("_config") else _sections(x, values, width)
        elif isinstance(x, (list, tuple)):
            given[name] = list(x) if is_hierarchical and "out" in name else _short(name, x, old, picked, count)
        elif x is None and name in ABSENT and (name != "head_dim" or recipe.get("derived")):
            given[name] = ABSENT[name]
        elif isinstance(x, bool) or not isinstance(x, int):
            given[name] = x
        else:
            given[name] = _number(name, x, values, count, width)
    if width == "fixed" and isinstance(values.get("head_dim"), int):
        given["head_dim"] = _head_dim(values)
    patch = values.get("patch_size")
    for name in ("image_size", "input_size") if recipe.get("images") != "kept" else ():
        size = 6 * patch if isinstance(patch, int) and not is_hierarchical and patch >= 8 else 64
        if isinstance(values.get(name), int) and values[name] > size and recipe["layers"] is not None:
            given[name] = size
        elif isinstance(values.get(name), (list, tuple)) and len(values[name]) == 2 and min(values[name]) > size and recipe["layers"]:
            given[name] = [size, size]
    return given


def _number(name, x, values, count, width):
    """Return a number of a configuration, made small."""
    special = SPECIAL.match(name)
    if special:
        names = {"pad": 0, "bos": 1, "eos": 2, "decoder_start": 1, "_pad": 0}
        return x if x < 0 else names.get(special["name"], 210 + sum(map(ord, special["name"])) % 100)
    if name == "max_position_embeddings" and x > 0:
        return max(x, 128)
    if re.search(r"vocab(_size)?\w*$", name):
        return min(x, VOCABULARY)
    for pattern, value in FIXED.items():
        if re.search(pattern, name) and not (width == "kept" and "dim" in name):
            return min(x, value)
    if LAYERS.search(name) and not NOT_LAYERS.search(name):
        return x if count is None else min(x, count)
    if width == "kept":
        return x
    if KV_HEADS.search(name):
        heads = next((values[each] for each in ("num_attention_heads", "n_head", "num_heads") if isinstance(values.get(each), int)), x)
        return (min(x, 2 if x < heads else 4)) if width == "fixed" else max(1, x // 2)
    if HEADS.search(name):
        return min(x, 4) if width == "fixed" else max(1, x // 2)
    if HEAD_DIMS.search(name):
        return min(x, 16) if width == "fixed" else max(8, x // 4)
    if WIDTHS.search(name) and not NOT_WIDTHS.search(name) and x >= 96:
        return 64 if width == "fixed" else x // 8
    return x


def _short(name, x, old, picked, count):
    """Return a list of a configuration, made short."""
    if picked is not None and len(x) == old:
        return [x[index] for index in picked]
    if name in ("depths", "depth", "num_blocks", "layers", "encoder_layers"):
        return [min(each, 2) if isinstance(each, int) else each for each in x]
    if count is not None and x and all(type(each) is int for each in x) and re.search(r"ind(ex|ic)e|idx|_layers$", name) and max(x) > count and x == sorted({*x}):
        kept = sorted({min(each, count - 1) for each in x})
        return kept if len(kept) == len(x) or "out" not in name else [count - len(x) + 1 + each for each in range(len(x))]
    return list(x)


def _sections(values, whole, width):
    """Return parameters of RoPE whose sections fit heads of 16 or 32 features."""
    if width != "fixed" or not isinstance(values, dict):
        return values
    given = {name: _sections(x, whole, width) for name, x in values.items()}
    section = values.get("mrope_section") or ("rope_theta" in values and _own_section(whole.get("model_type")))
    if section:
        fraction = values.get("partial_rotary_factor") or whole.get("partial_rotary_factor") or 1.0
        half = int(_head_dim(whole) * fraction) // 2
        parts = [each * half // sum(section) for each in section]
        given["mrope_section"] = [part + (place < half - sum(parts)) for place, part in enumerate(parts)]
    return given


def _head_dim(values):
    """Return the small head_dim of a part: one that the width is not made of stays so."""
    if "qk_rope_head_dim" in values:
        return 8
    dim, heads, hidden = (values.get(each) for each in ("head_dim", "num_attention_heads", "hidden_size"))
    known = all(isinstance(each, int) for each in (dim, heads, hidden))
    return 32 if known and dim * heads != hidden else 16


def _own_section(model_type):
    """Return the sections of RoPE that the code of a model type has by itself."""
    if model_type not in CONFIG_MAPPING:
        return None
    source = Path(inspect.getfile(CONFIG_MAPPING[model_type]))
    text = "".join(each.read_text() for each in source.parent.glob("modeling_*.py"))
    found = re.search(r'"mrope_section", (\[[\d, ]+\])', text)
    return found and json.loads(found[1])


# ---- Models ----------------------------------------------------------------------------------------------------------


def classes_of(model_type):
    """Return model classes of a type, the plainest first."""
    cls = CONFIG_MAPPING[model_type]
    package = cls.__module__.rpartition(".")[0]
    names = MODEL_MAPPING_NAMES.get(model_type, ())
    names = (names,) if isinstance(names, str) else names
    found = []
    for each in iter_modules(importlib.import_module(package).__path__):
        if each.name.startswith("modeling_"):
            module = importlib.import_module(f"{package}.{each.name}")
            for value in vars(module).values():
                is_own = inspect.isclass(value) and issubclass(value, PreTrainedModel) and value.__module__ == module.__name__
                if is_own and getattr(value, "config_class", None) is cls:
                    found.append(value)

    def rank(each):
        name = each.__name__
        kinds = ("Model", "ForConditionalGeneration", "Backbone", "ForCausalLM")
        place = next((i for i, kind in enumerate(kinds) if name.endswith(kind)), len(kinds))
        return (name not in names, place)

    found = [each for each in found if "PreTrainedModel" not in each.__name__]
    return sorted(dict.fromkeys(found), key=rank)


class NoAttention(Exception):
    """Raised for models without attention."""


def attention_layers(model):
    """Return names of the innermost modules that are attention and hold projections."""
    modules = dict(model.named_modules())
    names = [name for name, module in modules.items() if re.search("Attention|Attn", type(module).__name__)]
    inner = [name for name in names if not any(each != name and each.startswith(f"{name}." if name else "") for each in names)]
    return [name for name in inner if sum(x.ndim >= 2 for x in modules[name].parameters()) > 1]


def build(cls, config):
    """Return a model with random weights whose norms and biases show, in evaluation.

    Raises:
        NoAttention: if it has none.
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
            parameter.data = torch.randn(x.shape) * 0.3 + (1.0 if x.numel() and x.mean() > 0.5 else 0.0)
        elif "att" in name.lower():
            parameter.data = torch.randn(x.shape) / math.sqrt(x[0].numel())
    return model


# ---- Inputs ----------------------------------------------------------------------------------------------------------


class Call(NamedTuple):
    """A call of a model, or of a part of it.

    Attributes:
        part: name of the module that is called; empty if it is the model.
        inputs, fresh: keywords, and others of the same shapes.
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
    """Return the values of a configuration and of its parts that have one of some names, each once."""
    parts = [getattr(config, name, None) for name in getattr(config, "sub_configs", ())]
    own = [getattr(config, name) for name in names if getattr(config, name, None) is not None]
    found = own + [x for part in parts if part is not None for x in every_value(part, *names)]
    return [x for index, x in enumerate(found) if x not in found[:index]]


def makers_of(model, generator):
    """Return functions that make an input, by its name; several where its shape depends on the model."""
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
    first = [x.shape[-1] for count in (1, 2) for x in [*model.parameters()][:4] if x.ndim == count]  # what it may take

    channels, patch = (whole(*each, default=8) for each in (("num_channels", "in_channels", "in_chans"), ("patch_size",)))
    size, frames = find(config, "image_size", default=64), whole("num_frames", "frames_per_clip", default=4)
    height, width = size if isinstance(size, (list, tuple)) else (size, size) if isinstance(size, int) else (64, 64)
    channels = 3 if channels == 8 else channels
    image = (channels, height, width)
    images = [image, (channels, 64, 64), (channels, 224, 224), (1, *image), (frames, *image), (1, 1, *image)]
    images += [(channels, patch, 64 * patch)] + [(64, each) for each in first]
    pixels = [normal(SEQUENCES, *each) for each in images] + [normal(SEQUENCES * frames, *image)]
    if {"grid_thw", "image_grid_thw"} & parameters.keys():
        flat = {channels * depth * patch**2 for depth in (1, 2)} | {*first}
        count = 64 * SEQUENCES
        pixels = [normal(count, each) for each in sorted(flat)] + [normal(1, count, channels, patch, patch)]
        pixels += [normal(count, channels, patch, patch)]

    names = ("num_mel_bins", "input_feat_per_channel", "feature_size", "n_mels", "feature_projection_input_dim")
    mels = [x for x in every_value(config, *names, "input_dim", "input_size", "hidden_size") if type(x) is int] + first or [80]
    length = whole("max_source_positions", default=64)
    length = 2 * length if length <= 3000 else 128
    features = [shape for mel in mels for shape in ((mel, length), (128, mel), (mel, 128), (200, mel), (mel, 200))]
    features += [(1, 128, mels[0]), (1, whole("spec_size", default=256), mels[0])]
    features = [normal(SEQUENCES, *each) for each in features]
    if "feature_lens" in parameters:
        features = [normal(mels[0], 200 * SEQUENCES)]
    sounds = [(10000,), (1, 10000), (whole("max_length", default=128), mels[0]), (128, mels[0])]
    sounds = [normal(SEQUENCES, *each) for each in sounds]

    widths = every_value(config, "hidden_size", "d_model", "embed_dim", "encoder_hidden_size") or [64]
    states = [normal(SEQUENCES, TOKENS, each) for each in [*widths, *mels] if type(each) is int]
    series = whole("num_input_channels", "input_size", default=1)
    context = whole("context_length", "prediction_length", "patch_length", default=32)
    steps, times = context + max(find(config, "lags_sequence", default=[0])), whole("num_time_features", default=0)
    places = [[x, y] for x in range(8) for y in range(8)]
    return {
        **{"input_ids": tokens, "decoder_input_ids": tokens, "pixel_values": pixels, "pixel_values_videos": pixels},
        **{"input_features": features, "input_values": sounds, "audio_values": sounds, "prompt_pixel_values": pixels[:1]},
        "prompt_masks": [normal(SEQUENCES, *image)],
        "bbox": [lambda: integers(0, 10, SEQUENCES, TOKENS, 4)() + torch.tensor([0, 0, 10, 10])],
        "past_values": [normal(SEQUENCES, steps), normal(SEQUENCES, steps, series)],
        "past_time_features": [normal(SEQUENCES, steps, times)],
        "past_observed_mask": [constant(torch.ones(SEQUENCES, steps))],
        "future_values": [normal(SEQUENCES, context)],
        "future_time_features": [normal(SEQUENCES, context, times)],
        "hidden_states": pixels if "grid_thw" in parameters else states,
        **{"inputs_embeds": states, "encoder_hidden_states": states, "t_cond": [normal(1, 1, widths[0])]},
        **dict.fromkeys(("grid_thw", "image_grid_thw"), [constant([[1, 8, 8]] * SEQUENCES)]),
        **dict.fromkeys(("target_sizes", "tgt_sizes", "spatial_shapes"), [constant([[8, 8]] * SEQUENCES)]),
        "pixel_position_ids": [constant([places] * SEQUENCES)],
        "pixel_attention_mask": [constant(torch.ones(SEQUENCES, 64, dtype=torch.long))],
        "flattened_patches": [
            lambda: torch.cat([torch.tensor([places] * SEQUENCES) + 1.0, normal(SEQUENCES, 64, first[0])()], -1)
        ],
        "mask": [constant(torch.ones(SEQUENCES, TOKENS, dtype=torch.bool))],
        "feature_lens": [constant([200] * SEQUENCES)],
        "input_features_mask": [constant(torch.ones(SEQUENCES, each, dtype=torch.long)) for each in (length, 128, 200)],
    }


MODALITIES = (
    *("input_ids", "pixel_values", "image_grid_thw", "input_features", "input_values", "bbox"),
    *("future_values", "future_time_features"),
)


def inputs_for(model, seed, *, every=False):
    """Yield what makes keywords of calls that may fit a model, the likeliest first; with `every`, of all at once."""
    makers = makers_of(model, torch.Generator().manual_seed(seed))
    parameters = inspect.signature(model.forward).parameters
    variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    chosen = [name for name, each in parameters.items() if each.default is each.empty and each.kind not in variable]
    main = getattr(model, "main_input_name", "input_ids")
    main = main if main in parameters else next((name for name in makers if name in parameters), main)
    chosen = [*dict.fromkeys([*chosen, main])]
    if getattr(model.config, "is_encoder_decoder", False) and "decoder_input_ids" in parameters:
        chosen = [*dict.fromkeys([*chosen, "decoder_input_ids"])]
    full = [*dict.fromkeys([*chosen, *(name for name in MODALITIES if name in parameters)])]
    others = [x for x in makers if x in parameters and x not in chosen]
    sets = [chosen, full, *([*chosen, x] for x in others), *([x] for x in others)]
    if every:
        sets = [full, *([*chosen, x] for x in ("encoder_hidden_states", "pixel_values") if x in others)]
    known = [names for names in sets if all(name in makers for name in names)]
    choices = [product(*(makers[name] for name in names)) for names in known]
    for row in zip_longest(*choices):  # the first of each before the second of any
        for names, choice in zip(known, row, strict=True):
            if choice is not None:
                yield dict(zip(names, choice, strict=True))


def placed(inputs, config, reason):
    """Return inputs with as many tokens of an image or of sounds as an error asks for, or None."""
    found = re.search(r"(\w+) features and \w+ tokens do not match.*?tokens:? *\d+.*?features:? *(\d+)", reason)
    if found is None or "input_ids" not in inputs:
        return None
    kind, count = found[1].lower(), int(found[2]) // SEQUENCES
    token = find(config, f"{kind}_token_id", f"{kind}_token_index")
    first, rest = inputs["input_ids"][:, : TOKENS // 2], inputs["input_ids"][:, TOKENS // 2 :]
    return {**inputs, "input_ids": torch.cat([first, torch.full((SEQUENCES, count), token), rest], dim=1)}


def call_of(model, part="", *, every=False):
    """Return a call of a model, or of a part of it, that does not fail.

    Raises:
        ValueError: with the reasons, if all fail.
    """
    called, reasons = model.get_submodule(part), []
    for index, making in enumerate(islice(inputs_for(called, 1, every=every), TRIALS)):
        inputs = {name: make() for name, make in making.items()}
        for _ in range(3):
            try:
                ran = _run(model, called, inputs)
            except Exception as error:
                reasons.append(f"{type(called).__name__}({', '.join(inputs)}): {type(error).__name__}: {error}")
                inputs = placed(inputs, called.config, str(error)) if every else None
                if inputs is None:
                    break
                continue
            making = next(islice(inputs_for(called, 2, every=every), index, None))
            fresh = {name: make() for name, make in making.items()}
            fresh |= {"input_ids": inputs["input_ids"]} if every and "input_ids" in inputs else {}
            return Call(part, inputs, fresh, ran)
    raise ValueError(" | ".join(reasons))


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
    """Yield calls of parts of a model, and of all its modalities, that run modules which have not run."""
    missing = set(missing)
    for name, part in [*model.named_modules(), ("", model)][1:]:
        if isinstance(part, PreTrainedModel) and any(f"{each}.".startswith(f"{name}." if name else "") for each in missing):
            try:
                call = call_of(model, name, every=not name)
            except Exception:  # it is of no use alone
                continue
            if missing & call.ran:
                missing -= call.ran
                yield call


def tiny_model(model_type):
    """Return a model of a type, a call of it, and how it was made.

    Raises:
        NoAttention: if it has none.
        ValueError: with the reasons, if none can be made.
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
            first = first or (model, Call("", {}, {}, set()), f"{cls.__name__}, {recipe}, parts alone")
            try:
                return model, call_of(model), f"{cls.__name__}, {recipe}"
            except ValueError as error:
                reasons.append(str(error))
    if first is not None and next(more_calls(first[0], [name for name, _ in first[0].named_modules()]), None):
        return first
    if lacking and not first:
        raise NoAttention
    raise ValueError(" | ".join(dict.fromkeys(each.replace("\n", " ")[:300] for each in reasons)) or "no model class")

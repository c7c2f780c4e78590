"""Whole models of transformers, tiny and with random weights, and our layers compared with their
attention layers.

The specification of a layer, its causality and the path and layout of its weights in a checkpoint
are all read from the configuration. Nothing is downloaded.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

import mha_torch
from helpers.released import check_near
from mha_spec import AttentionSpec
from parity import load_into, specs_of
from parity.port.models.specs import ModelLayer

SMALL = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 24,
}
SMALL |= {"vocab_size": 40, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


@dataclass(frozen=True)
class Model:
    """A model to create.

    Attributes:
        family: its `model_type`.
        options: options of its configuration in addition to `SMALL`; `LEFT_OUT` removes an option
            of `SMALL`.
        inputs: kind of its inputs: `tokens`, `masked` tokens if the model is not causal without a
            mask, `pairs` of tokens for encoder and decoder, `pixels`, `patches`, `wave`, `waves`
            for both, `mel`, `mel alone` for an encoder, `masked mel alone` for an encoder that
            requires a mask, `frames`, `bins`, `states` or `positions`.
        module: path of its attention modules in memory, by the part of the model, if it differs
            from the checkpoint.
        output: submodule of its attention modules that has the output of attention, if they do not
            have it.
        input: submodule of its attention modules that has the input of attention, if they do not
            have it.
        attention: its attention function.
        class_name: its class in transformers, after the name of its folder if it is not public,
            such as `altclip.AltRobertaModel`.
        dtype: dtype of its weights.
    """

    family: str
    options: Mapping[str, Any] = field(default_factory=dict)
    inputs: str = "tokens"
    module: Mapping[str, str] = field(default_factory=dict)
    output: str = ""
    input: str = ""
    attention: str = "eager"
    class_name: str = "AutoModel"
    dtype: torch.dtype = torch.float64

    def config(self) -> Any:
        """Return its configuration."""
        options = {
            name: value
            for name, value in {**SMALL, **self.options}.items()
            if value is not LEFT_OUT
        }
        return transformers.AutoConfig.for_model(self.family, **options)

    def made(self, config: Any) -> Any:
        """Return the model of a configuration."""
        folder, _, name = self.class_name.rpartition(".")
        module = (
            importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
            if folder
            else transformers
        )
        kind = getattr(module, name)
        return kind.from_config(config) if name == "AutoModel" else kind(config)


PLACES = torch.arange(11)
AXES = torch.stack([PLACES // 6, PLACES // 6 + PLACES % 6 // 3, PLACES // 6 + PLACES % 3])[:, None]
"""Positions of 11 patches, in frames of 2 x 3: (3, 1, 11)."""

LEFT_OUT = object()
"""Value that removes an option of `SMALL`."""


def check_model(
    model: Model, folder: Path, read: Callable[[Any], list[ModelLayer]] = specs_of
) -> None:
    """Check that our layers, with specifications and weights from the checkpoint, match the
    released ones.
    """
    config = model.config()
    config._attn_implementation = model.attention
    config._experts_implementation = "eager"  # other implementations do not support float64
    released = model.made(config).to(model.dtype).eval()
    draw(released)
    layers = [layer for layer in read(config.to_dict()) if layer.spec is not None]
    observed = run_released(released, model, layers)
    released.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    beginnings, made = set(), {}
    for index, layer in enumerate(layers):
        beginning, tensors_of_layer = _of_layer(tensors, layer)
        beginnings.add(beginning)
        assert layer.spec is not None
        tensors_of_layer |= _of_others(layer, layers, tensors)
        weights = canonical(layer.layout, tensors_of_layer, layer.spec)
        received = None if layer.kv_source is None else made[layer.part, layer.kv_source]
        what = f"layer {index} of {model.family}, {layer.part} {layer.kind}"
        made[layer.part, layer.index] = _check(
            layer, weights, *observed[index], received=received, what=what
        )
    assert len(beginnings) == 1, beginnings


def draw(module: nn.Module) -> None:
    """Draw parameters, none of them near 0, nor near 1 in a norm."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            if not parameter.requires_grad:  # RoFormer's sines and cosines
                continue
            values = torch.randn(parameter.shape, generator=generator)
            is_matrix = parameter.ndim >= 2 and min(parameter.shape) > 8
            parameter.copy_(
                values * 0.3 if is_matrix else values.sign() * (0.4 + 0.4 * values.abs())
            )


def run_released(
    released: nn.Module, model: Model, layers: list[ModelLayer]
) -> list[tuple[Tensor, Tensor | None, Tensor]]:
    """Return the inputs, the inputs of keys and values, and the outputs of all attention
    modules.
    """
    modules = dict(released.named_modules())
    recorded: list[dict[str, Any]] = [{} for _ in layers]
    taken = []
    for layer, into in zip(layers, recorded, strict=True):
        path = model.module.get(layer.part, "").replace("{i}", str(layer.index)) or layer.path
        names = [name for name in modules if name == path or name.endswith(f".{path}")]
        assert len(names) == 1, f"{path} is the path of {names}"
        name = names[0]
        first, last = (
            modules[f"{name}.{path}".rstrip(".")] for path in (model.input, model.output)
        )
        taken.append(first.register_forward_pre_hook(_keep_input(into), with_kwargs=True))
        taken.append(last.register_forward_hook(_keep_output(into)))
    with torch.no_grad():
        released(**_inputs(released, model))
    for hook in taken:
        hook.remove()
    is_shared = len({layer.path for layer in layers}) < len(
        layers
    )  # one module, called once for each layer
    calls = [layer.index if is_shared else 0 for layer in layers]
    return [
        (record["x"][call], record["kv"][call], record["output"][call])
        for record, call in zip(recorded, calls, strict=True)
    ]


def _keep_input(into: dict[str, Any]) -> Any:
    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        named = (kwargs.get(name) for name in ("key_value_states", "encoder_hidden_states"))
        into.setdefault("x", []).append(x)
        into.setdefault("kv", []).append(
            next((value for value in named if value is not None), None)
        )

    return keep


def _keep_output(into: dict[str, Any]) -> Any:
    def keep(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        first, *others = output if isinstance(output, tuple | list) else (output,)
        biases = [
            extra for extra in others if isinstance(extra, nn.Parameter)
        ]  # GPT-NeoX-Japanese adds its bias outside
        into.setdefault("output", []).append(sum(biases, start=first))

    return keep


def _inputs(released: nn.Module, model: Model) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    config: Any = released.config

    def tokens(length: int) -> Tensor:
        return torch.randint(3, 40, (2, length), generator=generator)

    def values(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(
            next(released.parameters()).dtype
        )

    if model.inputs == "pairs":
        return {"input_ids": tokens(11), "decoder_input_ids": tokens(7)}
    if model.inputs == "pixels":
        return {"pixel_values": values(2, 3, 6, 6)}
    if model.inputs == "patches":  # 2 x 3 of them
        shapes = torch.tensor([[2, 3], [2, 3]])
        patches = values(2, 6, 3 * config.patch_size**2)
        return {
            "pixel_values": patches,
            "pixel_attention_mask": torch.ones(2, 6),
            "spatial_shapes": shapes,
        }
    if model.inputs == "states":
        return {"hidden_states": values(2, 11, config.hidden_size)}
    if model.inputs == "masked":
        return {"input_ids": tokens(11), "attention_mask": torch.ones(2, 11, dtype=torch.long)}
    if model.inputs == "bins":
        return {"input_values": values(2, config.max_length, config.num_mel_bins)}
    if model.inputs == "wave":
        return {"input_values": values(2, 4000)}
    if model.inputs == "waves":
        return {"input_values": values(2, 4000), "decoder_input_ids": tokens(7)}
    if model.inputs.endswith("mel alone"):
        mel = values(2, config.num_mel_bins, 2 * config.max_source_positions)
        mask = {"input_features_mask": torch.ones(2, mel.shape[-1], dtype=torch.long)}
        return {"input_features": mel, **(mask if "masked" in model.inputs else {})}
    if model.inputs == "frames alone":
        return {"input_features": values(2, 88, config.num_mel_bins)}
    if model.inputs == "frames":
        return {
            "input_features": values(2, 24, config.input_feat_per_channel),
            "decoder_input_ids": tokens(7),
        }
    if model.inputs == "mel":
        mel = values(2, config.num_mel_bins, 2 * config.max_source_positions)
        return {"input_features": mel, "decoder_input_ids": tokens(7)}
    if model.inputs == "positions":  # on three axes
        return {
            "inputs_embeds": values(2, 11, config.hidden_size),
            "position_ids": AXES.expand(-1, 2, -1),
        }
    return {"input_ids": tokens(11)}


def _of_layer(tensors: Mapping[str, Tensor], layer: ModelLayer) -> tuple[str, dict[str, Tensor]]:
    """Return the prefix of a layer's path in a checkpoint, and its tensors by the rest of their
    names.
    """
    by_prefix: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        before, path, after = name.rpartition(f"{layer.path}.")
        if path and (not before or before.endswith(".")):
            by_prefix.setdefault(before, {})[after] = tensor
    assert len(by_prefix) == 1, f"no tensors of {layer.path} in {sorted(tensors)}"
    return next(iter(by_prefix.items()))


def _of_others(
    layer: ModelLayer, layers: list[ModelLayer], tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the relative bias, which T5 keeps in the first layer of a stack, and MPNet and BEiT
    outside all layers.
    """
    if layer.spec is None or layer.spec.relative_bias is None:
        return {}
    names = (
        "relative_attention_bias.weight",
        "relative_position_bias.relative_position_bias_table",
    )
    first = next(other for other in layers if (other.part, other.kind) == (layer.part, layer.kind))
    own, shared = (
        [tensor for name, tensor in _of_layer(tensors, source)[1].items() if name.endswith(names)]
        for source in (layer, first)
    )
    common = [
        t
        for name, t in tensors.items()
        if name.endswith(tuple(f"encoder.{name}" for name in names))
    ]
    return {"relative_bias": [*own, *shared, *common][0]}


def _check(
    layer: ModelLayer,
    weights: Mapping[str, Tensor],
    x: Tensor,
    kv: Tensor | None,
    output: Tensor,
    *,
    received: tuple[Tensor, Tensor] | None,
    what: str,
) -> tuple[Tensor, Tensor]:
    """Compare our layer with the released one, and return its keys and values."""
    assert layer.spec is not None
    assert (kv is not None) == (layer.kind == "cross_attention"), what
    ours = mha_torch.MultiHeadAttention(layer.spec, dtype=torch.float64).eval()
    load_into(
        ours,
        {name: weight.detach().double().numpy() for name, weight in weights.items()},
        layer.spec,
    )
    options = (
        {} if layer.spec.rope is None or layer.spec.rope.sections is None else {"positions": AXES}
    )
    of_keys = (None if kv is None else kv.double(),) if received is None else received
    with torch.no_grad():
        actual, _ = ours(x.double(), *of_keys, is_causal=layer.is_causal, **options)
        key, value = received or (x.double() if kv is None else kv.double(),) * 2
        _, k, v = mha_torch.project_qkv(
            ours.project, x.double(), key, value, layer.spec, options.get("positions")
        )
    check_near(actual.numpy(), output.reshape(actual.shape).numpy(), what)
    return k, v


# ---- Weights -------------------------------------------------------------------------------------

SEPARATE = {
    "canonical": ("q_proj", "k_proj", "v_proj", "out_proj"),
    "transformers.LLaMA": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "transformers.BERT": ("self.query", "self.key", "self.value", "output.dense"),
    "transformers.ALBERT": ("query", "key", "value", "dense"),
    "transformers.DistilBERT": ("q_lin", "k_lin", "v_lin", "out_lin"),
    "transformers.MPNet": ("attn.q", "attn.k", "attn.v", "attn.o"),
    "transformers.ViT": ("attention.query", "attention.key", "attention.value", "output.dense"),
    "transformers.T5": ("q", "k", "v", "o"),
    "transformers.Phi": ("q_proj", "k_proj", "v_proj", "dense"),
    "transformers.StableLM": ("q_proj", "k_proj", "v_proj", "o_proj"),
    **dict.fromkeys(
        ("transformers.Flint", "transformers.MiMo-V2"), ("q_proj", "k_proj", "v_proj", "o_proj")
    ),
    "transformers.Qwen3-Next": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "transformers.BitNet": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "transformers.Kosmos-2": ("q_proj", "k_proj", "v_proj", "out_proj"),
    "transformers.Parakeet": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "transformers.Conformer": ("linear_q", "linear_k", "linear_v", "linear_out"),
    "transformers.LFM2": ("q_proj", "k_proj", "v_proj", "out_proj"),
    "transformers.HunYuan": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "transformers.Gemma4": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "transformers.ModernBERT-decoder": ("q_proj", "k_proj", "v_proj", "Wo"),
    **dict.fromkeys(
        ("transformers.DeepSeek", "transformers.LongCat"), ("q_proj", "", "", "o_proj")
    ),
}
"""Names of the projections in a layout."""

PACKED = {
    "transformers.ModernBERT": ("Wqkv", "Wo", "rows"),
    **dict.fromkeys(("transformers.MPT", "transformers.DBRX"), ("Wqkv", "out_proj", "rows")),
    "transformers.GPT2": ("c_attn", "c_proj", "columns"),
    "transformers.Phi3": ("qkv_proj", "o_proj", "rows"),
    "transformers.GPT-NeoX": ("query_key_value", "dense", "groups"),
    "transformers.GPT-NeoX-Japanese": ("query_key_value", "dense", "groups"),
    "transformers.Falcon": ("query_key_value", "dense", "groups"),
    "transformers.GPTBigCode": ("c_attn", "c_proj", "groups"),
    "transformers.CodeGen": ("qkv_proj", "out_proj", "four"),
}
"""Names of the projections in a layout with one for queries, keys and values, and its packing: rows
or columns of each in turn; groups of queries, key and value of each key head; queries, values and
keys of a fourth of all heads.
"""


BESIDE = {"q_norm": "q_norm", "k_norm": "k_norm", "q_layernorm": "q_norm", "k_layernorm": "k_norm"}
BESIDE |= {
    "query_layernorm": "q_norm",
    "key_layernorm": "k_norm",
    "relative_bias": "relative_bias",
    "sinks": "sinks",
}
BESIDE |= {"attn_sub_norm": "context_norm", "inner_attn_ln": "context_norm"}
BESIDE |= {
    "q_a_layernorm": "q_a_norm",
    "kv_a_layernorm": "kv_a_norm",
    "kv_a_proj_with_mqa": "kv_a_proj",
}
BESIDE |= {"softmax_offset": "sinks", "attention_sink_bias": "sinks", "dense_bias": "out_proj.bias"}
BESIDE |= {name: name for name in ("q_a_proj", "q_b_proj", "kv_b_proj", "gate_proj")}
BESIDE |= dict.fromkeys(("relative_k_proj", "linear_pos"), "relative_sinusoids")
BESIDE |= dict.fromkeys(("bias_u", "pos_bias_u"), "content_bias")
BESIDE |= dict.fromkeys(("bias_v", "pos_bias_v"), "position_bias")
"""Names of other parameters, the same in all layouts that have them."""


def canonical(layout: str, tensors: Mapping[str, Tensor], spec: AttentionSpec) -> dict[str, Tensor]:
    """Return the canonical weights of a layer from its tensors in a layout."""
    names = dict(BESIDE)
    if layout in SEPARATE:
        names |= dict(
            zip(SEPARATE[layout], ("q_proj", "k_proj", "v_proj", "out_proj"), strict=True)
        )
    else:
        qkv, out, packing = PACKED[layout]
        names |= {out: "out_proj", **{f"{letter}_proj": f"{letter}_proj" for letter in "qkv"}}
        tensors = {
            name: tensor.T if packing == "columns" and tensor.ndim == 2 else tensor
            for name, tensor in tensors.items()
        }
        tensors = _unpacked(tensors, qkv, packing, spec)
    renamed = {}
    for name, tensor in tensors.items():
        kind, _, leaf = name.rpartition(".")
        ours = names.get(kind or leaf)
        if ours is not None:
            renamed[f"{ours}.{leaf}" if kind else ours] = tensor
    return renamed | OWN.get(layout, lambda renamed, spec: {})(renamed, spec)


def _gates(tensors: Mapping[str, Tensor], spec: AttentionSpec) -> dict[str, Tensor]:
    """Return queries and gates of Qwen3-Next, whose q_proj has the queries of a head and then its
    gate.
    """
    parts = {}
    for leaf in ("weight", "bias"):
        if f"q_proj.{leaf}" in tensors:
            q, gate = (
                tensors[f"q_proj.{leaf}"].unflatten(0, (spec.num_heads, 2, spec.head_dim)).unbind(1)
            )
            parts |= {f"q_proj.{leaf}": q.flatten(0, 1), f"gate_proj.{leaf}": gate.flatten(0, 1)}
    return parts


def _keys_as_values(tensors: Mapping[str, Tensor], spec: AttentionSpec) -> dict[str, Tensor]:
    """Return values of Gemma 4, which are projected as keys without another projection."""
    names = ("weight", "bias")
    copied = {
        f"v_proj.{leaf}": tensors[f"k_proj.{leaf}"] for leaf in names if f"k_proj.{leaf}" in tensors
    }
    return {} if "v_proj.weight" in tensors else copied


def _sinusoids(tensors: dict[str, Tensor], spec: AttentionSpec) -> dict[str, Tensor]:
    """Return the projection of sinusoids, whose rows are the heads' rows in files."""
    rows = tensors.pop("relative_sinusoids.weight")
    return {"relative_sinusoids": rows.T.reshape(-1, spec.num_heads, spec.head_dim)}


OWN = {"transformers.Qwen3-Next": _gates, "transformers.Gemma4": _keys_as_values}
OWN |= {"transformers.Parakeet": _sinusoids, "transformers.Conformer": _sinusoids}
"""Conversions of some layouts in addition to names and packing."""


def _unpacked(
    tensors: Mapping[str, Tensor], qkv: str, packing: str, spec: AttentionSpec
) -> dict[str, Tensor]:
    """Return the same tensors with three projections instead of one."""
    unpacked = dict(tensors)
    for leaf in ("weight", "bias"):
        packed = unpacked.pop(f"{qkv}.{leaf}", None)
        if packed is None:
            continue
        if packing == "four":
            q, v, k = packed.unflatten(0, (4, 3, -1)).unbind(1)
            parts = [part.flatten(0, 1) for part in (q, k, v)]
        elif packing == "groups":
            group = spec.num_heads // spec.num_kv_heads
            heads = packed.unflatten(0, (spec.num_kv_heads, group + 2, spec.head_dim))
            parts = [part.flatten(0, 2) for part in heads.split((group, 1, 1), 1)]
        else:
            parts = packed.split((spec.q_width, spec.k_width, spec.v_width))
        unpacked |= {
            f"{letter}_proj.{leaf}": part for letter, part in zip("qkv", parts, strict=True)
        }
    return unpacked

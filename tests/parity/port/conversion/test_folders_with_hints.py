"""A config.json, a file's metadata and the caller each describe the right layers."""

import json

import numpy as np
import pytest
import torch
import transformers
from helpers.checkpoints import open_layers
from helpers.input_errors import rejects
from helpers.released_models import SMALL
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import mha_torch
from mha_spec import InputError, Rope
from parity import from_transformers, load, load_into, specs_of
from parity.port.conversion.prefixes import Names
from parity.use.cli.main import main
from parity.use.running.models import run_model

TEXT = {**SMALL, "max_position_embeddings": 16, "projection_dim": 8}
VISION = TEXT | {"num_attention_heads": 2, "image_size": 8, "patch_size": 4}
GROUPED = SMALL | {"num_key_value_heads": 2, "head_dim": 8}


def specs_in(folder, *args, **hints):
    with open_layers(folder, *args, **hints) as layers:
        return {layer.label: layer.spec for layer in layers}


def saved(model, folder):
    model.save_pretrained(folder)
    return model


def llama(folder):
    return saved(transformers.LlamaModel(transformers.LlamaConfig(**GROUPED)), folder)


def gemma2(folder):
    return saved(
        transformers.Gemma2Model(transformers.Gemma2Config(**GROUPED, sliding_window=4)), folder
    )


def converted(path, target):
    assert main(["convert", str(path), str(target), "--to", "canonical"]) == 0
    return target


def rewritten(path, change=lambda metadata: {}, names=lambda tensors: tensors):
    """Rewrite a file with other metadata or other tensors."""
    with safe_open(path, "np") as file:
        metadata = file.metadata()
    save_file(names(load_file(path)), path, metadata=metadata | change(metadata))


# ---- Several parts, several models ---------------------------------------------------------------


def test_model_parts_have_own_head_counts(tmp_path):
    """CLIP's text layers have 4 heads and are causal; its vision layers have 2 and are not."""
    config = transformers.CLIPConfig(text_config=TEXT, vision_config=VISION)
    model = saved(transformers.CLIPModel(config), tmp_path)
    with open_layers(tmp_path) as layers:
        specs = {
            (layer.label.split(".")[0], layer.spec.num_heads, layer.model.is_causal)
            for layer in layers
        }
    assert specs == {("text_model", 4, True), ("vision_model", 2, False)}
    for part, heads in (("text_model", 4), ("vision_model", 2)):
        path = f"{part}.encoder.layers.1.self_attn"
        assert (
            from_transformers(model.get_submodule(path), config, 1, path=path)[0].num_heads == heads
        )


def without(*words):
    """Return a filter that keeps tensors unless their names have all of some words."""
    return lambda tensors: {
        name: x for name, x in tensors.items() if not all(word in name for word in words)
    }


@pytest.mark.parametrize("part", ["text", "vision"])
def test_layer_missing_in_one_part_is_named(part, tmp_path, capsys):
    """`convert` names a layer that one part of CLIP lacks, and the part's configuration."""
    config = transformers.CLIPConfig(text_config=TEXT, vision_config=VISION)
    saved(transformers.CLIPModel(config), tmp_path / "model")
    assert (
        main(["convert", str(tmp_path / "model"), str(tmp_path / "whole.npz"), "--to", "canonical"])
        == 0
    )
    assert "its metadata requires" not in capsys.readouterr().err
    rewritten(
        tmp_path / "model" / "model.safetensors",
        names=without(f"{part}_model", "layers.1.self_attn"),
    )
    assert (
        main(["convert", str(tmp_path / "model"), str(tmp_path / "c.npz"), "--to", "canonical"])
        == 0
    )
    assert (
        f"requires them: encoder.layers.1.self_attn of {part}_config (1)" in capsys.readouterr().err
    )


def test_shared_layers_are_not_missing(tmp_path, capsys):
    """`convert` does not report layers of ALBERT, which share their weights, as missing."""
    saved(
        transformers.AlbertModel(transformers.AlbertConfig(**SMALL, embedding_size=16)),
        tmp_path / "model",
    )
    converted(tmp_path / "model", tmp_path / "c.npz")
    assert "its metadata requires" not in capsys.readouterr().err


def test_attention_is_found_in_mixed_layers(tmp_path):
    """Attention layers 1 and 3 of Nemotron-H, after other layers, are found, also by prefix."""
    kinds = ["linear_attention", "full_attention", "mlp", "full_attention"]
    options = {
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 1,
        "layers_block_type": kinds,
    }
    config = transformers.NemotronHConfig(**GROUPED | {"num_hidden_layers": 4}, **options)
    saved(transformers.NemotronHModel(config), tmp_path)
    specs = specs_in(tmp_path)
    assert specs.keys() == {"layers.1.mixer", "layers.3.mixer"}
    assert specs_in(tmp_path, prefix="layers.{i}.mixer") == specs


def test_unknown_part_stays_unread(tmp_path):
    """Layers of an unknown vision part are not read with the configuration of the text part."""
    llama(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    parts = {
        "model_type": "of two",
        "text_config": config,
        "vision_config": {"model_type": "nobody's"},
    }
    (tmp_path / "config.json").write_text(json.dumps(parts))

    def twice(tensors):
        return {
            f"{part}.{name}": x
            for part in ("text_model", "vision_model")
            for name, x in tensors.items()
        }

    rewritten(tmp_path / "model.safetensors", names=twice)
    assert specs_in(tmp_path).keys() == {f"text_model.layers.{i}.self_attn" for i in (0, 1)}


def test_each_part_agrees_with_its_module(tmp_path):
    """LLaVA's text and vision layers agree with their modules; none is skipped."""
    text = GROUPED | {"model_type": "llama", "num_key_value_heads": 4}
    vision = VISION | {"model_type": "clip_vision_model"}
    config = transformers.LlavaConfig(text_config=text, vision_config=vision, image_token_index=5)
    saved(transformers.LlavaForConditionalGeneration(config), tmp_path)
    report = run_model(tmp_path, ["torch"], against="transformers")
    assert not report.failed
    assert not report.skipped_cases


def test_module_runs_with_its_model_mask(tmp_path):
    """CLIP's text module runs with the mask of its model: no case fails or is skipped."""
    config = transformers.CLIPTextConfig(**TEXT)
    saved(transformers.CLIPTextModel(config), tmp_path)
    report = run_model(tmp_path, ["torch"], against="transformers")
    assert not report.failed
    assert not report.skipped_cases
    assert {comparison.backend for comparison in report.comparisons} == {"torch", "transformers"}


@pytest.mark.thorough
@pytest.mark.costly("a model of transformers is saved and loaded")
def test_model_without_a_module_raises(tmp_path):
    """Comparing a SigLIP text model with transformers, which cannot make it, raises an error."""
    saved(transformers.SiglipTextModel(transformers.SiglipTextConfig(**TEXT)), tmp_path)
    with rejects("transformers"):
        run_model(tmp_path, ["torch"], against="transformers")


def test_two_models_require_a_prefix(tmp_path):
    """A file with two models raises an error, unless a prefix selects the two layers of one."""
    llama(tmp_path)
    rewritten(
        tmp_path / "model.safetensors",
        names=lambda tensors: {
            f"{who}.{name}": x for who in ("one", "other") for name, x in tensors.items()
        },
    )
    with rejects("prefix"):
        specs_in(tmp_path)
    assert len(specs_in(tmp_path, prefix="other.layers.{i}.self_attn")) == 2


def test_partial_stack_raises(tmp_path):
    """A stack of one of six layers raises; a stack of all six has their specifications."""
    options = GROUPED | {"num_hidden_layers": 6, "sliding_window": 4}
    saved(transformers.Gemma3TextModel(transformers.Gemma3TextConfig(**options)), tmp_path)

    def stacked(tensors, layers):
        names = [
            name.removeprefix("layers.0.")
            for name in tensors
            if name.startswith("layers.0.self_attn")
        ]
        return {
            f"layers.{name}": np.stack([tensors[f"layers.{i}.{name}"] for i in layers])
            for name in names
        }

    whole = specs_in(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    save_file(stacked(tensors, [5]), path)
    with rejects("a stack", "1 of them", where="layers.self_attn"):
        specs_in(tmp_path, "transformers.LLaMA", prefix="layers.self_attn")
    save_file(stacked(tensors, range(6)), path)
    specs = specs_in(tmp_path, "transformers.LLaMA", prefix="layers.self_attn")
    assert list(specs.values()) == list(whole.values())


def test_layers_pair_in_any_file_order(tmp_path, capsys):
    """`compare` pairs all six layers of BART, although one file has the encoder first."""
    options = {
        f"{part}_{what}": n
        for part in ("encoder", "decoder")
        for what, n in (("layers", 2), ("ffn_dim", 8))
    }
    options |= {
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "d_model": 32,
        "vocab_size": 40,
    }
    model = saved(transformers.BartModel(transformers.BartConfig(**options)), tmp_path / "a")
    (tmp_path / "b").mkdir()
    torch.save(model.state_dict(), tmp_path / "b" / "pytorch_model.bin")  # the encoder first
    (tmp_path / "b" / "config.json").write_bytes((tmp_path / "a" / "config.json").read_bytes())
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert "in all 6 layers: 6 the same, bit for bit" in " ".join(capsys.readouterr().out.split())


def test_names_are_listed_under_prefixes():
    """The names under a.b are a.b.c and a.b.d, but not a.b itself or a.bb.c."""
    names = Names(["a.b.c", "a.b", "c", "a.bb.c", "a.b.d"])
    assert {prefix: names.under(prefix) for prefix in ("", "a", "a.b", "b")} == {
        "": ["a.b.c", "a.b", "c", "a.bb.c", "a.b.d"],
        "a": ["a.b.c", "a.b", "a.bb.c", "a.b.d"],
        "a.b": ["a.b.c", "a.b.d"],
        "b": [],
    }


def test_shared_layers_are_listed_once(tmp_path):
    """ALBERT's layers, which share their weights, are listed once, as layer 0."""
    saved(transformers.AlbertModel(transformers.AlbertConfig(**SMALL, embedding_size=16)), tmp_path)
    with open_layers(tmp_path) as layers:
        assert [layer.model.index for layer in layers] == [0]


# ---- Arguments of the caller ---------------------------------------------------------------------


@pytest.mark.parametrize("own", [False, True], ids=["config.json", "metadata"])
def test_repeated_head_count_changes_nothing(tmp_path, own):
    """num_heads=4, as in the file, changes nothing; the caller's RoPE changes only RoPE."""
    path = tmp_path / "model"
    gemma2(path)
    expected = specs_in(path)
    assert {spec.soft_cap for spec in expected.values()} == {50.0}
    if own:
        path = converted(path, tmp_path / "own.safetensors")
    hints = {
        "layout": "canonical" if own else "transformers.LLaMA",
        "prefix": "layers.{i}.self_attn",
        "num_heads": 4,
    }
    assert specs_in(path, **hints) == expected
    specs = specs_in(path, **hints, rope=Rope(500.0))
    assert {spec.rope for spec in specs.values()} == {Rope(500.0)}
    assert {spec.soft_cap for spec in specs.values()} == {50.0}


@pytest.mark.parametrize("name", ["num_heads", "num_kv_heads", "head_dim"])
def test_contradicting_head_sizes_raise(tmp_path, name):
    """A head size other than in the file's equal layers raises; an equal one is accepted."""
    llama(tmp_path / "model")
    path = converted(tmp_path / "model", tmp_path / "own.safetensors")
    with rejects(name):
        specs_in(path, **{name: 1})
    (spec,) = set(specs_in(path).values())
    assert set(specs_in(path, **{name: getattr(spec, name)}).values()) == {spec}


def test_contradicting_head_count_raises(tmp_path):
    """num_heads=2 raises an error for a converted file whose layers have 4 heads."""
    gemma2(tmp_path / "model")
    path = converted(tmp_path / "model", tmp_path / "own.safetensors")
    with rejects("num_heads", "num_heads=2", where="layers.0.self_attn"):
        specs_in(path, num_heads=2)


def test_rope_argument_must_keep_scaling(tmp_path):
    """A RoPE without the configured scaling raises an error; the configured RoPE is accepted."""
    llama(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    prefix = "layers.0.self_attn"
    with rejects("rope", rope=..., where="layers.0.self_attn"):
        load(tmp_path, prefix=prefix, rope=Rope(500.0))
    scaled = specs_of(tmp_path)[0].spec.rope
    assert load(tmp_path, prefix=prefix, rope=scaled)[1].rope == scaled


def test_layers_without_rope_stay_without(tmp_path):
    """Cohere 2's layers with and without RoPE keep their specs; passing a RoPE raises an error."""
    options = GROUPED | {"num_hidden_layers": 4, "sliding_window": 4}
    saved(transformers.Cohere2Model(transformers.Cohere2Config(**options)), tmp_path / "model")
    own = converted(tmp_path / "model", tmp_path / "own.safetensors")
    assert specs_in(own) == specs_in(tmp_path / "model")
    for path in (tmp_path / "model", own):
        with rejects("rope", rope=...):
            specs_in(path, rope=Rope(500.0))


# ---- Invalid metadata and configurations ---------------------------------------------------------


@pytest.fixture
def canonical(tmp_path):
    llama(tmp_path / "model")
    return converted(tmp_path / "model", tmp_path / "c.safetensors")


@pytest.mark.parametrize("name", ["nonsense", "d_model"])
def test_invalid_dropped_names_raise(canonical, name, tmp_path, capsys):
    """Metadata that list a name as dropped that cannot be dropped make `compare` exit with 2."""
    rewritten(canonical, lambda metadata: {"dropped": json.dumps([name])})
    assert main(["compare", str(tmp_path / "model"), str(canonical)]) == 2
    assert rejects("…/c.safetensors", name).is_printed_in(capsys.readouterr().err)


def test_dropped_scaling_hides_no_rope_base(canonical, tmp_path, capsys):
    """`compare` reports different RoPE bases, although the scaling was dropped."""

    def other(metadata):
        spec = json.loads(metadata["spec"])
        spec["rope"]["theta"] = 500.0
        return {"spec": json.dumps(spec), "dropped": '["rope.scaling"]'}

    rewritten(canonical, other)
    assert main(["compare", str(tmp_path / "model"), str(canonical)]) == 2
    differ = "rope=Rope(theta=10000.0) and Rope(theta=500.0)"
    assert rejects("the layers", differ).is_printed_in(capsys.readouterr().err)


@pytest.mark.parametrize(
    ("family", "changes", "argument"),
    [
        ("llama", {"num_attention_heads": 0, "head_dim": None}, "num_attention_heads"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        ("llama", {"attention_dropout": 10**400}, "attention_dropout"),
        ("llama", {"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ("llama", {"model_type": ["llama"]}, "model_type"),
        ("gpt_neo", {"attention_layers": {"global": 1}}, "attention_layers"),
    ],
)
def test_invalid_config_values_raise(family, changes, argument):
    """An impossible value in a configuration raises an error that names its key."""
    config = json.loads(transformers.AutoConfig.for_model(family).to_json_string(use_diff=False))
    with pytest.raises(InputError) as rejected:
        specs_of(config | changes)
    assert argument in f"{rejected.value.argument} {rejected.value.rule}"


# ---- Live modules --------------------------------------------------------------------------------


def difference(module, own_layer, x, **kwargs):
    """Largest difference of our layer from a module, and the module's largest value."""
    spec, weights = own_layer
    ours = mha_torch.MultiHeadAttention(spec)
    load_into(ours.eval(), weights, spec)
    with torch.no_grad():
        theirs = module(x, **kwargs)[0]
        return float((ours(x)[0] - theirs).abs().max()), float(theirs.abs().max())


@pytest.mark.parametrize("name", ["T5", "MT5", "SwitchTransformers"])
def test_t5_block_without_table_raises(name):
    """T5's first block matches ours; the second, which lacks the bias table, raises an error."""
    config = getattr(transformers, f"{name}Config")(
        d_model=32,
        d_kv=8,
        d_ff=16,
        num_layers=2,
        num_heads=4,
        vocab_size=16,
        decoder_start_token_id=0,
    )
    model = getattr(transformers, f"{name}Model")(config).eval()
    first, second = (model.encoder.block[i].layer[0].SelfAttention for i in (0, 1))
    x = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(0))
    error, size = difference(
        first, from_transformers(first, config, 0, path="encoder.block.0.layer.0.SelfAttention"), x
    )
    assert error < 1e-5 * size
    for path in (None, "encoder.block.1.layer.0.SelfAttention"):
        with rejects("module", "block.0.layer.0.SelfAttention.relative_attention_bias.weight"):
            from_transformers(second, config, 1, path=path)


def test_gpt_neox_japanese_output_bias():
    """Only the last layer of GPT-NeoX Japanese has an output bias; both layers match ours."""
    config = transformers.GPTNeoXJapaneseConfig(**SMALL, intermediate_multiple_size=1)
    model = transformers.GPTNeoXJapaneseModel(config).eval()
    model.layers[1].attention.dense_bias.data.normal_()
    recorded = {}
    for index in (0, 1):  # the module returns the bias, and its caller adds it
        model.layers[index].attention.register_forward_hook(
            lambda module, args, output, index=index: recorded.update(
                {index: (args[0], output[0], output[2])}
            )
        )
    with torch.no_grad():
        model(torch.arange(3, 14)[None])
    for index in (0, 1):
        spec, weights = from_transformers(model.layers[index].attention, config, index)
        x, output, bias = recorded[index]
        assert spec.out_bias == (bias is not None) == (index == 1)
        ours = load_into(mha_torch.MultiHeadAttention(spec).eval(), weights, spec)
        with torch.no_grad():
            our_output = ours(x, mask=mha_torch.create_causal_mask(x.shape[1]))[0]
        torch.testing.assert_close(our_output, output if bias is None else output + bias)


def test_module_of_another_part_raises():
    """X-CLIP's text module matches ours; modules of its vision parts raise an error."""
    vision = VISION | {"num_attention_heads": 4, "mit_hidden_size": 32, "mit_intermediate_size": 16}
    vision |= {"mit_num_hidden_layers": 1, "mit_num_attention_heads": 2}
    config = transformers.XCLIPConfig(text_config=TEXT, vision_config=vision, projection_dim=8)
    model = transformers.XCLIPModel(config).eval()
    text = model.text_model.encoder.layers[0].self_attn
    error, size = difference(text, from_transformers(text, config, 0), torch.randn(1, 5, 32))
    assert error < 1e-5 * size
    for module in (
        model.mit.encoder.layers[0].self_attn,
        model.vision_model.encoder.layers[0].self_attn,
    ):
        with rejects("module", "vision_config"):
            from_transformers(module, config, 0)
    other = model.mit.encoder.layers[0].self_attn  # also by the text's own configuration
    with rejects("module", "xclip_vision_model"):
        from_transformers(other, config.text_config, 0)
    del other.config
    with rejects("module", "2 heads where layer 0 has 4"):
        from_transformers(other, config.text_config, 0)


def test_default_head_dim_must_be_configured():
    """head_dim=128, a default of transformers, is read; a configuration without it raises."""
    options = {
        **SMALL,
        "num_key_value_heads": 2,
        "layer_types": ["full_attention"] * 2,
        "rope_parameters": None,
    }
    options |= {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
    options |= {"shared_expert_intermediate_size": 8}
    config = transformers.AutoConfig.for_model("kolibri1", **options)
    module = transformers.AutoModel.from_config(config).layers[0].self_attn
    values = config.to_dict()
    assert from_transformers(module, values, 0)[0].head_dim == module.head_dim == 128
    del values["head_dim"]
    with rejects("the configuration"):
        specs_of(values)

"""Folders saved by transformers: config.json suffices to find, read, run and convert layers.

Nothing is downloaded: models are tiny and have random weights.
"""

import json
import shlex
import shutil
from dataclasses import replace

import jax
import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from helpers.checkpoints import open_layers
from helpers.command_line import error_line
from helpers.configurations import older
from helpers.families import MODELS
from helpers.frameworks import SIBLINGS
from helpers.input_errors import Misuse, rejects, rejects_type
from helpers.released import check_near
from helpers.released_models import AXES, SMALL, run_released
from helpers.samples import sample
from helpers.saved_models import APART, SECTIONS, saved
from helpers.selection import first_families, stack_signature
from helpers.tensors import same_tensors
from safetensors.numpy import load_file, save_file

import mha_jax
import mha_torch
import parity
from mha_spec import LinearScaling, Rope
from parity import (
    AttentionSpec,
    IgnoredSettingsWarning,
    convert,
    convert_file,
    from_transformers,
    load_into,
    make_problem,
    random_weights,
    specs_of,
    weights_of,
)
from parity.port.conversion.layouts import LAYOUTS
from parity.port.conversion.layouts.losses import Written, check_losses
from parity.port.foreign.transformers import NotAlone, Skeleton
from parity.port.models.families import FAMILIES
from parity.use.cli.main import main
from parity.use.running.models import run_model

AS_LLAMA = (
    *("--from", "transformers.LLaMA", "--prefix", "layers.{i}.self_attn"),
    *("--num-heads", "4"),
)
"""The options that describe the layers of the folder `llama` without its configuration."""

NEAR = 2e-5  # of the largest number, for layers in float32

HERE = {
    **MODELS,
    **{
        family: None
        for family in FAMILIES
        if family not in APART | {m.family for m in MODELS.values()}
    },
}


def layers_in(folder):
    """Labels, weights and specifications of the layers in a folder, in the order of the
    configuration.
    """
    with open_layers(folder) as layers:
        loaded = [(layer.label, layer.model, *layer.load()) for layer in layers]
    assert loaded
    return loaded


# test_models_whole computes a layer of every family. Here are some of those that differ in how they
# say what their layers are. Tests that share a folder have one sample.
one_a_layout = sample(14, folder=first_families(HERE, by=stack_signature))


@pytest.fixture(scope="module", params=sorted(first_families(HERE)))
def folder(request, tmp_path_factory):
    """A saved model: its folder, its name, its description and the released module."""
    path = tmp_path_factory.mktemp("model")
    return path, request.param, *saved(request.param, path)


@one_a_layout
def test_folder_layers_match_released_model(folder):
    """Layers of a folder have the configured specs and the outputs of the released layers."""
    path, name, model, released = folder
    by_path = {layer.path: (weights, spec) for _, layer, weights, spec in layers_in(path)}
    layers = [layer for layer in specs_of(path) if layer.spec is not None]
    assert by_path.keys() == {layer.path for layer in layers}
    checked, done_by_jax = {}, set()
    for layer, (x, kv, output) in zip(layers, run_released(released, model, layers), strict=True):
        weights, spec = by_path[layer.path]
        checked[layer.part, layer.index] = weights, spec, x
        kv = kv if layer.kv_source is None else heads_of(*checked[layer.part, layer.kv_source])
        assert spec == layer.spec
        check_siblings(layer, weights, x, kv, output, ["torch"], model.inputs)
        # PyTorch checks all files, and test_models_whole covers all options of layers: for each
        # distinct model, JAX runs only the layers with an option that no earlier layer had.
        call = {"is_causal": layer.is_causal, "is_cross": kv is not None, "inputs": model.inputs}
        has = {*traits(json.loads(layer.spec.to_json())), *traits(call)}
        if name in MODELS and not has <= done_by_jax:
            check_siblings(layer, weights, x, kv, output, ["jax"], model.inputs)
            done_by_jax |= has


def heads_of(weights, spec, x):
    """Keys and values of a layer, as they enter its attention."""
    module = load_into(mha_torch.MultiHeadAttention(spec), weights, spec)
    with torch.no_grad():
        return mha_torch.project_qkv(module.project, x.float(), x.float(), x.float(), spec)[1:]


def traits(values, where=""):
    """Each option with its value; floats are represented only by their type."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from traits(value, f"{where}{name}.")
        else:
            yield f"{where}{name}={type(value) if isinstance(value, float) else value}"


UNFILLED = {
    "torch": mha_torch.MultiHeadAttention,
    "jax": lambda spec: nnx.eval_shape(
        lambda: mha_jax.MultiHeadAttention(spec, rngs=nnx.Rngs(0))
    ),  # no random weights
}


def output_of(module, *inputs, is_causal, positions=None):
    return module(*inputs, is_causal=is_causal, positions=positions)[0]


CALL = {"torch": output_of, "jax": jax.jit(output_of, static_argnames="is_causal")}


def check_siblings(layer, weights, x, kv, output, names, inputs):
    """Check that mha_jax or mha_torch matches the output of the released layer."""
    of_text = np.tile(np.arange(x.shape[1]), (3, 1, 1))  # the same on each axis
    positions = (AXES.numpy() if inputs == "positions" else of_text).astype(np.int32)
    spec = replace(layer.spec, dropout=0.0, output_dropout=0.0)
    for name in names:
        sibling = SIBLINGS[name]
        module = load_into(UNFILLED[name](spec), weights, spec)
        options = {"is_causal": layer.is_causal}
        if spec.rope is not None and spec.rope.sections:
            options["positions"] = sibling.array(positions)
        of_keys = kv if isinstance(kv, tuple) else [] if kv is None else [kv]
        keys = [sibling.array(tensor.float().numpy()) for tensor in of_keys]
        result = CALL[name](module, sibling.array(x.float().numpy()), *keys, **options)
        result = sibling.numpy(result)
        check_near(
            result, output.reshape(result.shape).float().numpy(), f"{layer.path} of {name}", NEAR
        )


@one_a_layout
def test_folder_round_trip_is_exact(folder, tmp_path):
    """A folder converts to canonical weights and back with every tensor equal, bit for bit."""
    path, *_ = folder
    layers = layers_in(path)
    there = convert_file(path, tmp_path / "c.safetensors", target="canonical")
    assert there.layers == [label for label, *_ in layers]
    assert not there.dropped
    assert not there.unconverted
    with open_layers(tmp_path / "c.safetensors") as canonical:  # its metadata describe each layer
        for layer, (label, _, weights, spec) in zip(canonical, layers, strict=True):
            assert (layer.label, layer.spec) == (label, spec)
            assert same_tensors(layer.load()[0], weights)
    (layout,) = {layer.layout for _, layer, *_ in layers}
    convert_file(tmp_path / "c.safetensors", tmp_path / "b.safetensors", target=layout)
    before, after = load_file(path / "model.safetensors"), load_file(tmp_path / "b.safetensors")
    assert same_tensors(after, before)


# ---- Keys that are values ------------------------------------------------------------------------

ONE_PROJECTION = "gemma4_text, one projection"


def test_keys_are_values_only_if_configured(tmp_path):
    """Only layer 1's keys are its values; a missing or an additional v_proj raises an error."""
    saved(ONE_PROJECTION, tmp_path / "model")
    layers = layers_in(tmp_path / "model")
    assert [layer.keys_are_values for _, layer, *_ in layers] == [False, True]
    assert not same_tensors(
        {"": layers[0][2]["k_proj.weight"]}, {"": layers[0][2]["v_proj.weight"]}
    )
    assert same_tensors({"": layers[1][2]["k_proj.weight"]}, {"": layers[1][2]["v_proj.weight"]})
    path = tmp_path / "model" / "model.safetensors"
    tensors = load_file(path)
    save_file(
        {name: x for name, x in tensors.items() if name != "layers.0.self_attn.v_proj.weight"}, path
    )
    with rejects("values", where="layers.0.self_attn"):
        layers_in(tmp_path / "model")
    more = {"layers.1.self_attn.v_proj.weight": tensors["layers.1.self_attn.k_proj.weight"] * 2}
    save_file(tensors | more, path)
    with rejects("values", where="layers.1.self_attn"):
        layers_in(tmp_path / "model")


def test_gemma4_omits_values_equal_to_keys(tmp_path):
    """Gemma 4's layout omits v_proj if it equals k_proj, but not in a stack with another layer."""
    spec = AttentionSpec(8, 2, num_kv_heads=1, qkv_bias=False, out_bias=False)
    weights = random_weights(spec)
    alike = weights | {"v_proj.weight": weights["k_proj.weight"]}
    for weights_of_layer, has_values in ((weights, True), (alike, False)):
        converted = convert(
            weights_of_layer, source="canonical", target="transformers.Gemma4", num_heads=2
        )
        assert ("v_proj.weight" in converted) == has_values
        assert same_tensors(
            convert(converted, source="transformers.Gemma4", target="canonical", spec=spec),
            weights_of_layer,
        )
    stack = {
        f"layers.{i}.self_attn.{name}": x
        for i, weights_of_layer in enumerate((weights, alike))
        for name, x in weights_of_layer.items()
    }
    save_file(stack, tmp_path / "layers.safetensors")
    for to, names in (
        (None, 7),
        ("layers.self_attn", 4),
    ):  # either all layers in one array have values, or none
        convert_file(
            *(tmp_path / "layers.safetensors", tmp_path / f"{names}.safetensors"),
            source="canonical",
            prefix="layers.{i}.self_attn",
            to_prefix=to,
            num_heads=2,
            target="transformers.Gemma4",
        )
        assert len(load_file(tmp_path / f"{names}.safetensors")) == names
        convert_file(
            tmp_path / f"{names}.safetensors", tmp_path / f"{names}.npz", target="canonical"
        )
        with open_layers(tmp_path / f"{names}.npz") as layers:
            for layer, expected in zip(layers, (weights, alike), strict=True):
                assert same_tensors(layer.load()[0], expected)


def test_older_config_gives_equal_specs(tmp_path):
    """The older spelling of a config.json gives the same specifications in four families."""
    for name in ("llama", "gemma3_text", "deepseek_v3", "gpt_neox"):
        folder = tmp_path / name
        saved(name, folder)
        before = layers_in(folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(older(config)))
        assert [spec for *_, spec in layers_in(folder)] == [spec for *_, spec in before]


AGAINST = (
    "llama",
    "gemma3_text",
    "qwen3_next",
    "deepseek_v3",
    "llama4_text",
    "gpt2",
    "bloom",
    "bert",
    "phi3",
)
BESIDE = (
    "xlm-roberta-xl",
    "mpnet",
)  # norms before queries in the module; weights that another module has
BESIDE += (
    "vit",
    "t5",
    "whisper",
)  # other paths in memory; a table of the first layer; inputs that are not embeddings
BESIDE += (
    "wav2vec2",
    "clip_text_model",
    "electra",
    "dpr",
    "nemotron_h",
    "gemma3n_text",
    "flint",
    "mimo_v2_flash",
)


@sample(6, name=[*AGAINST[::2], *BESIDE[::2], "t5"])
@pytest.mark.parametrize("name", [*AGAINST, *BESIDE])
def test_model_agrees_with_its_own_modules(name, tmp_path):
    """Every attention layer is compared with its transformers module; none fails or is skipped."""
    saved(name, tmp_path)
    report = run_model(tmp_path, ["torch"], against="transformers")
    assert not report.failed
    assert not report.skipped_cases
    assert report.status == 0
    count = sum(layer.spec is not None for layer in specs_of(tmp_path))
    own = [
        comparison.case for comparison in report.comparisons if comparison.backend == "transformers"
    ]
    # Relative biases, for example, show in a further case of the first layer.
    further = [line.partition(":")[0] for line in report.exercised]
    assert len([case for case in own if case not in further]) == count


# ---- Keys and values of another layer ------------------------------------------------------------

SHARED_KV = {"gemma3n_text, shared": [0, 2], "gemma4_text, shared": [2, 0]}
"""The numbers of the layers whose keys and values the last two layers share."""


@pytest.mark.parametrize("name", SHARED_KV)
def test_shared_kv_comes_from_source_layer(name, tmp_path):
    """Layers that share keys and values receive the ones that the configured layer computes."""
    saved(name, tmp_path)
    layers = specs_of(tmp_path)
    assert [layer.kv_source for layer in layers if layer.spec.shared_kv] == SHARED_KV[name]
    received = {}

    def keep(trace, reference, comparisons):
        received[trace.problem.case.name] = trace.problem

    report = run_model(tmp_path, ["torch"], against="transformers", seq_len=9, on_compared=keep)
    assert not report.failed
    assert {skipped_case.case for skipped_case in report.skipped_cases} == {
        f"layer-{layer.index}-causal" for layer in layers if layer.kv_source is not None
    }
    assert report.status == 2
    by_index = {model.index: (weights, spec) for _, model, weights, spec in layers_in(tmp_path)}
    for layer in layers:
        problem = received[f"layer-{layer.index}-causal"]
        if layer.kv_source is None:
            assert "k" not in problem.inputs
            continue
        weights, spec = by_index[layer.kv_source]
        source = make_problem(
            replace(problem.case, name=f"{problem.case.name}-source", spec=spec), "float32", weights
        )
        k, v = heads_of(weights, spec, torch.from_numpy(source.inputs["query"]))
        check_near(problem.inputs["k"], k.numpy(), "keys", NEAR)
        check_near(problem.inputs["v"], v.numpy(), "values", NEAR)


def test_unused_projections_are_kept(tmp_path):
    """Unused k and v projections in Gemma 3n's sharing layers change no layer, and are kept."""
    saved("gemma3n_text, shared", tmp_path / "model")
    path, before = tmp_path / "model" / "model.safetensors", layers_in(tmp_path / "model")
    tensors = load_file(path)
    unused = {
        name.replace("layers.0.", f"layers.{i}."): x + 1
        for name, x in tensors.items()
        for i in (3, 4)
        if name.startswith(("layers.0.self_attn.k_", "layers.0.self_attn.v_"))
    }
    assert unused
    save_file(tensors | unused, path)
    layers = layers_in(tmp_path / "model")
    assert [spec for *_, spec in layers] == [spec for *_, spec in before]
    assert all(
        same_tensors(one, other)
        for (_, _, one, _), (_, _, other, _) in zip(layers, before, strict=True)
    )
    done = convert_file(path, tmp_path / "c.safetensors", target="canonical")
    assert {*unused} <= {*done.copied}
    with open_layers(tmp_path / "c.safetensors") as canonical:
        assert all(
            same_tensors(layer.load()[0], prefix)
            for layer, (_, _, prefix, _) in zip(canonical, before, strict=True)
        )


def test_encoder_and_decoder_layers_run(tmp_path):
    """T5 runs full, causal, decoding and cross-attention cases; none fails or is skipped."""
    saved("t5", tmp_path)
    report = run_model(tmp_path, ["torch"], against="transformers")
    assert not report.failed
    kinds = {comparison.case.rpartition("-")[2] for comparison in report.comparisons}
    assert kinds == {"full", "causal", "decode", "cross"}
    assert {
        comparison.case for comparison in report.comparisons if comparison.backend == "transformers"
    } >= {
        "encoder.block.0.layer.0.SelfAttention-full",
        "decoder.block.0.layer.0.SelfAttention-causal",
    }
    assert report.skipped_cases == []


@pytest.mark.parametrize("name", AGAINST)
def test_live_module_equals_saved_layer(name, tmp_path):
    """A module in memory has the spec and weights of its file; wrong argument types raise."""
    _, released = saved(name, tmp_path)
    for label, layer, weights, spec in layers_in(tmp_path):
        module = released.get_submodule(label)
        loaded, loaded_spec = from_transformers(module, released.config, layer.index)
        assert loaded == spec
        assert same_tensors(loaded_spec, weights)
        assert from_transformers(module, tmp_path, layer.index)[0] == spec
        with rejects_type("layer_idx", layer_idx=True):
            from_transformers(module, released.config, True)
        with rejects_type("module", "parity.from_transformers"):
            weights_of(module)


# ---- The command line ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gemma") / "model"
    saved("gemma3_text", folder)
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama") / "model"
    saved("llama", folder)
    return folder


def printed_by(capsys, *arguments, status=0):
    """Run a command and return its output."""
    assert main(list(map(str, arguments))) == status
    captured = capsys.readouterr()
    return captured.out + captured.err


def test_run_selects_layers_of_a_model(gemma, capsys, tmp_path):
    """`run --layers 1,4-5` runs the six cases of three layers; missing layers exit with 2."""
    report = tmp_path / "r.json"
    out = printed_by(
        capsys,
        *("run", "--model", gemma, "--backends", "torch", "--layers", "1,4-5"),
        *("--against", "transformers", "--json", report),
    )
    assert "torch and transformers agree with the float64 reference: 6 cases" in out
    results = json.loads(report.read_text())["results"]
    assert {result["case"] for result in results} == {
        f"layer-{n}-{how}" for n in (1, 4, 5) for how in ("causal", "decode")
    }
    out = printed_by(capsys, "run", "--model", gemma, "--layers", "9", status=2)
    assert rejects("--layers", {"--layers": [9]}).is_printed_in(out)
    assert str([0, 1, 2, 3, 4, 5]) in out
    assert "--layers" in error_line(capsys, "run", "--model", gemma, "--layers", "3-1")
    out = printed_by(capsys, "run", "--layers", "1", status=2)
    assert Misuse("--layers requires --model").is_printed_in(out)
    assert Misuse("--model cannot be combined with --cases").is_printed_in(
        printed_by(capsys, "run", "--model", gemma, "--cases", "all", status=2)
    )


def test_wrong_layer_of_a_model_is_found(gemma, capsys, tmp_path):
    """`compare` and `diagnose` name layer 4 of six, whose query heads are in a different order."""
    tensors = load_file(gemma / "model.safetensors")
    name = "layers.4.self_attn.q_proj.weight"
    tensors[name] = np.ascontiguousarray(
        tensors[name].reshape(4, 8, -1)[::-1].reshape(32, -1)
    )  # heads in a different order
    (tmp_path / "b").mkdir()
    save_file(tensors, tmp_path / "b" / "model.safetensors")
    (tmp_path / "b" / "config.json").write_text((gemma / "config.json").read_text())
    out = printed_by(capsys, "compare", gemma, tmp_path / "b", status=1)
    assert "layers.4.self_attn and layers.4.self_attn differ first at q" in out
    assert "do NOT hold the same attention in all 6 layers: 5 the same, bit for bit" in " ".join(
        out.split()
    )
    out = printed_by(capsys, "diagnose", gemma, tmp_path / "b", status=1)
    assert "layers.4.self_attn and layers.4.self_attn are the first of 6 layers that differ" in out


def test_rope_loss_raises_or_is_dropped(gemma, llama, capsys, tmp_path):
    """Without `--drop rope`, `convert` to Flax NNX exits with 2; verify reports the drop."""
    target = tmp_path / "a.safetensors"
    out = printed_by(capsys, "convert", llama, target, "--to", "flax.nnx", status=2)
    assert "weights in flax.nnx" in out
    assert rejects("…", rope=Rope(theta=10000.0), remedy={"--drop": "rope"}).is_printed_in(out)
    assert not target.exists()
    printed_by(capsys, "convert", llama, target, "--to", "flax.nnx", "--drop", "rope")
    out = printed_by(capsys, "compare", llama, target, status=2)
    assert "hold the same weights in all 2 layers: 2 the same, bit for bit" in out
    assert f"not compared: rope (left out when {target} was written)" in out
    out = printed_by(capsys, "convert", gemma, tmp_path / "b.npz", "--to", "meta.LLaMA", status=2)
    assert rejects("the layer", {"qk_norm": ..., "window_size": 4}).is_printed_in(out)
    out = printed_by(
        capsys,
        "convert",
        gemma,
        tmp_path / "b.npz",
        "--to",
        "canonical",
        "--drop",
        "ropes",
        status=2,
    )
    assert rejects("--drop", {"--drop": "ropes"}).is_printed_in(out)
    assert "rope.scaling" in out


def accepted(out):
    """Return the command that the last line of an error ends with."""
    return shlex.split(out.strip().splitlines()[-1].partition(": mha-parity ")[2])


def test_every_loss_is_listed_at_once(capsys, tmp_path):
    """ModernBERT has RoPE in each layer, and windows in some; the printed command accepts both."""
    saved("modernbert", tmp_path / "model folder")
    target = tmp_path / "a.safetensors"
    for drops in ((), ("--drop=rope",), ("--drop", "window_size")):
        out = printed_by(
            capsys,
            "convert",
            tmp_path / "model folder",
            target,
            "--to",
            "flax.linen",
            *drops,
            status=2,
        )
        lost = {"rope": ..., "window_size": ...}
        lost = {name: value for name, value in lost.items() if name not in "".join(drops)}
        assert rejects("the layer", lost).is_printed_in(out)
        command = accepted(out)
        assert {*command[command.index("--drop") + 1].split(",")} == {"rope", "window_size"}
        assert command.count("--drop") == 1
    assert not target.exists()
    printed_by(capsys, *command)
    assert target.exists()


def test_losses_and_biases_are_both_listed(llama, capsys, tmp_path):
    """Llama's layers, with as many keys as queries, lack biases and lose RoPE in GPT-2."""
    weights, spec = parity.load(llama, prefix="layers.0.self_attn")
    spec = replace(spec, num_kv_heads=spec.num_heads)
    weights |= {name: np.concatenate([x, x]) for name, x in weights.items() if name[0] in "kv"}
    with rejects("the layer", rope=..., qkv_bias=False, remedy={"drop": "rope", "fill_bias": True}):
        check_losses([Written(spec, but_for=())], LAYOUTS["transformers.GPT2"])
    check_losses(
        [Written(spec, but_for=())], LAYOUTS["transformers.GPT2"], ["rope"], fill_bias=True
    )
    parity.save(tmp_path / "w.npz", weights, spec)
    out = printed_by(
        capsys,
        "convert",
        tmp_path / "w.npz",
        tmp_path / "g.npz",
        "--to",
        "transformers.GPT2",
        status=2,
    )
    printed_by(capsys, *accepted(out))
    assert (tmp_path / "g.npz").exists()


def test_unnamed_weights_cannot_be_dropped(capsys, tmp_path):
    """gpt-oss's sinks cannot be dropped: the error lists layouts that hold them, and one works."""
    saved("gpt_oss", tmp_path / "model")
    out = printed_by(
        capsys, "convert", tmp_path / "model", tmp_path / "a.npz", "--to", "flax.nnx", status=2
    )
    assert rejects("the layer", "['sinks']", hint="canonical, ").is_printed_in(out)
    assert all(name in out for name in ("rope.scaling", "window_size"))
    assert "--drop" not in out
    printed_by(capsys, "convert", tmp_path / "model", tmp_path / "a.npz", "--to", "canonical")


def test_norms_raise_or_are_dropped(capsys, tmp_path):
    """Qwen3's norms convert to Meta's layout only with `--drop qk_norm`; latents never to Phi's."""
    saved("qwen3", tmp_path / "model")
    target = tmp_path / "m.safetensors"
    out = printed_by(capsys, "convert", tmp_path / "model", target, "--to", "meta.LLaMA", status=2)
    assert rejects("the layer", {"qk_norm": ...}, remedy={"--drop": "qk_norm"}).is_printed_in(out)
    printed_by(
        capsys, "convert", tmp_path / "model", target, "--to", "meta.LLaMA", "--drop", "qk_norm"
    )
    with open_layers(tmp_path / "model") as before, open_layers(target) as after:
        for one, other in zip(before, after, strict=True):
            weights, spec = one.load()
            assert other.spec == replace(spec, qk_norm=None)
            assert other.dropped == ("qk_norm",)
            assert same_tensors(
                other.load()[0], {name: x for name, x in weights.items() if "norm" not in name}
            )
    assert not any("norm" in name for name in load_file(target) if "self_attn" in name)
    out = printed_by(capsys, "compare", tmp_path / "model", target, status=2)
    assert rejects("the layers", "qk_norm=Norm(").is_printed_in(out)
    saved("deepseek_v3", tmp_path / "latents")
    out = printed_by(
        capsys,
        "convert",
        tmp_path / "latents",
        tmp_path / "l.npz",
        "--to",
        "transformers.Phi",
        status=2,
    )
    assert "['kv_a_norm.weight', " in out
    assert "--drop" not in out


def test_latent_factors_are_rejected(capsys, tmp_path):
    """DeepSeek-V3's latents convert to MaxText bit for bit; LongCat's factors raise an error."""
    for name in ("deepseek_v3", "longcat_flash"):
        saved(name, tmp_path / name)
    to = (
        "--to",
        "maxtext.MLA",
        "--rest",
        "drop",
        "--to-prefix",
        "params.decoder.moe_layers_{i}.self_attention",
    )
    printed_by(capsys, "convert", tmp_path / "deepseek_v3", tmp_path / "m.npz", *to)
    out = printed_by(capsys, "compare", tmp_path / "deepseek_v3", tmp_path / "m.npz")
    assert "in all 2 layers: 2 the same, bit for bit" in " ".join(out.split())
    out = printed_by(
        capsys, "convert", tmp_path / "longcat_flash", tmp_path / "l.npz", *to, status=2
    )
    assert rejects("…", {"latent.factors": ...}).is_printed_in(out)
    out = printed_by(
        capsys,
        "convert",
        tmp_path / "longcat_flash",
        tmp_path / "l.npz",
        "--to",
        "transformers.DeepSeek",
        status=2,
    )
    assert rejects("…", {"latent.factors": ...}).is_printed_in(out)


def test_rope_scaling_is_not_lost_silently(llama, capsys, tmp_path):
    """RoPE scaling exits with 2 unless `--drop rope.scaling`, which `compare` then reports."""
    folder = tmp_path / "scaled"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes((llama / "model.safetensors").read_bytes())
    config = json.loads((llama / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    (folder / "config.json").write_text(json.dumps(config))
    target = tmp_path / "m.safetensors"
    out = printed_by(capsys, "convert", folder, target, "--to", "meta.LLaMA", status=2)
    scaling = {"rope.scaling": LinearScaling(4.0)}
    assert rejects("…", scaling, remedy={"--drop": "rope.scaling"}).is_printed_in(out)
    printed_by(capsys, "convert", folder, target, "--to", "meta.LLaMA", "--drop", "rope.scaling")
    with open_layers(target) as layers:
        assert layers[0].spec.rope == replace(specs_of(folder)[0].spec.rope, scaling=None)
        assert layers[0].dropped == ("rope.scaling",)
    out = printed_by(capsys, "compare", folder, target, status=2)
    assert "bit for bit" in out
    assert f"not compared: rope.scaling (left out when {target} was written)" in out


def test_biases_are_added_on_request(llama, capsys, tmp_path):
    """Layers without biases convert to GPT-2 only with `--fill-bias`, which writes zeros."""
    config = json.loads((llama / "config.json").read_text()) | {"num_key_value_heads": 4}
    folder = tmp_path / "heads"
    folder.mkdir()
    tensors = load_file(llama / "model.safetensors")
    tensors = {
        name: np.concatenate([x, x]) if "k_proj" in name or "v_proj" in name else x
        for name, x in tensors.items()
    }
    np.savez(folder / "model.npz", **tensors)
    (folder / "config.json").write_text(json.dumps(config))
    target = tmp_path / "g.safetensors"
    arguments = (
        "convert",
        folder / "model.npz",
        target,
        "--to",
        "transformers.GPT2",
        "--drop",
        "rope",
    )
    fill = rejects("the layer", qkv_bias=False, remedy={"--fill-bias": True})
    assert fill.is_printed_in(printed_by(capsys, *arguments, status=2))
    assert rejects("…", rope=...).is_printed_in(
        printed_by(capsys, *arguments[:-2], "--fill-bias", status=2)
    )
    printed_by(capsys, *arguments, "--fill-bias")
    written = load_file(target)
    assert not written["layers.0.self_attn.c_attn.bias"].any()
    assert written["layers.0.self_attn.c_attn.weight"].any()


@pytest.mark.parametrize(
    ("target", "got"),
    [
        ("qkv_proj", {"qkv_bias": (True, False, True)}),
        ("transformers.GPT2", {"qkv_bias": (True, False, True)}),
        ("ttnn", {"qkv_bias": (True, False, True)}),
    ],
)
def test_missing_key_bias_needs_fill_bias(target, got, capsys, tmp_path):
    """Whisper's keys lack a bias: they are packed only with `--fill-bias`, which adds zeros."""
    saved("whisper", tmp_path / "model")
    arguments = ("convert", tmp_path / "model", tmp_path / "p.safetensors", "--to", target)
    out = printed_by(capsys, *arguments, status=2)
    assert rejects("the layer", got, remedy={"--fill-bias": True}).is_printed_in(out)
    assert "--fill-bias adds zero biases" in out
    printed_by(capsys, *arguments, "--fill-bias")
    with (
        open_layers(tmp_path / "model") as before,
        open_layers(tmp_path / "p.safetensors") as after,
    ):
        for one, other in zip(before, after, strict=True):
            weights = other.load()[0]
            assert not weights.pop("k_proj.bias").any()
            assert same_tensors(weights, one.load()[0])


def test_fill_bias_is_not_always_suggested(gemma, capsys, tmp_path):
    """`--fill-bias` is not suggested for Gemma, whose grouped heads GPT-2's layout cannot hold."""
    out = printed_by(
        capsys, "convert", gemma, tmp_path / "g.npz", "--to", "transformers.GPT2", status=2
    )
    assert rejects("the layer", num_heads=4, num_kv_heads=2).is_printed_in(out)
    assert "--fill-bias" not in out


def test_inspect_lists_equal_layers_once(tmp_path, capsys):
    """`inspect` shows twelve equal layers in shards without a config.json on one line."""
    folder = tmp_path / "shards"
    config = transformers.LlamaConfig(**SMALL | {"num_hidden_layers": 12}, num_key_value_heads=2)
    transformers.LlamaModel(config).save_pretrained(folder, max_shard_size="30KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    (folder / "config.json").unlink()
    out = printed_by(capsys, "inspect", folder, "--num-heads", "4")
    assert [
        line.split()[:3] for line in out.splitlines() if line.startswith(" layers.{i}.self_attn ")
    ] == [["layers.{i}.self_attn", "12", "transformers.LLaMA"]]


def test_shards_are_found_by_target_name(llama, capsys, tmp_path):
    """`compare` finds shards by the name passed to `convert`, which wrote an index instead."""
    target = tmp_path / "s.safetensors"
    out = printed_by(
        capsys, "convert", llama, target, "--to", "mha_jax", "--max-shard-gib", "0.00001"
    )
    assert f"wrote {target}.index.json" in out
    assert "bit for bit" in printed_by(capsys, "compare", llama, target)


def test_inspect_explains_misfit_layers(llama, capsys, tmp_path):
    """`inspect` shows missing tensors or wrong shapes if config.json has other biases or heads."""
    config = json.loads((llama / "config.json").read_text())
    for name, changes, why in (
        ("biases", {"attention_bias": True}, "missing"),
        (
            "heads",
            {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64},
            "q_proj.weight.shape=",
        ),
    ):
        shutil.copytree(llama, tmp_path / name)
        (tmp_path / name / "config.json").write_text(json.dumps(config | changes))
        out = " ".join(printed_by(capsys, "inspect", tmp_path / name).split())
        assert rejects("…layers.{i}.self_attn 2 transformers.LLaMA tensors", why).is_printed_in(out)


@pytest.mark.parametrize("name", ["weight_scale_inv", "weight.absmax", "SCB", "scales"])
def test_quantized_safetensors_raise(llama, capsys, tmp_path, name):
    """Scales of quantized weights make convert and run exit with 2; `inspect` suggests GGUF."""
    more = {
        f"layers.{i}.self_attn.{letter}_proj.{name}": np.ones((1, 1), np.float32)
        for i in (0, 1)
        for letter in "qkvo"
    }
    folder = with_tensors(llama, tmp_path / "quantized", more)
    for command in (
        ("convert", folder, tmp_path / "c.npz", "--to", "canonical"),
        ("run", "--model", folder),
    ):
        assert "quantized" in printed_by(capsys, *command, status=2)
    assert "quantized weights are read only from GGUF" in " ".join(
        printed_by(capsys, "inspect", folder).split()
    )


def test_unusable_config_is_explained(llama, capsys, tmp_path):
    """Errors name an unknown model_type, a missing config.json or a truncated one as the cause."""
    command = ("convert", tmp_path / "m", tmp_path / "c.npz", "--to", "canonical")
    shutil.copytree(llama, tmp_path / "m")
    config = json.loads((llama / "config.json").read_text())
    (tmp_path / "m" / "config.json").write_text(
        json.dumps(config | {"model_type": "unseen", "rope_parameters": None})
    )
    assert "model_type 'unseen'" in printed_by(capsys, *command, status=2)
    (tmp_path / "m" / "config.json").unlink()
    assert "no config.json" in printed_by(capsys, *command, status=2)
    assert "config.json" in printed_by(capsys, "spec", tmp_path / "m", status=2)
    (tmp_path / "m" / "config.json").write_text("{")
    cut = rejects(str(tmp_path / "m" / "config.json"))
    assert cut.is_printed_in(printed_by(capsys, "spec", tmp_path / "m", status=2))


def test_output_folder_is_not_created(llama, capsys, tmp_path):
    """`convert` to a folder that does not exist exits with 2 and writes nothing."""
    for target in (f"{tmp_path}/new/", tmp_path / "new"):
        out = printed_by(capsys, "convert", llama, target, "--to", "canonical", status=2)
        assert rejects(str(target)).is_printed_in(out)
    assert not list(tmp_path.iterdir())


def test_existing_folder_receives_weights(llama, capsys, tmp_path):
    """`convert` to an existing folder writes weights that `compare` finds equal, bit for bit."""
    (tmp_path / "there").mkdir()
    printed_by(capsys, "convert", llama, tmp_path / "there", "--to", "canonical")
    assert "bit for bit" in printed_by(capsys, "compare", llama, tmp_path / "there")


def test_one_from_applies_to_unlabeled_file(llama, capsys, tmp_path):
    """A single `--from` applies to the file without metadata; RoPE must still be specified."""
    printed_by(capsys, "convert", llama, tmp_path / "j.safetensors", "--to", "mha_jax")
    bare = tmp_path / "bare.safetensors"
    bare.write_bytes((llama / "model.safetensors").read_bytes())
    out = printed_by(capsys, "compare", bare, tmp_path / "j.safetensors", *AS_LLAMA, status=2)
    assert (
        "rope=None and Rope(theta=10000.0); --rope-theta 10000, or rope=Rope(10000), sets it for "
        "the other" in out
    )
    out = printed_by(
        capsys, "compare", bare, tmp_path / "j.safetensors", *AS_LLAMA, "--rope-theta", "1e4"
    )
    assert "bit for bit" in out


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("transformers.Qwen2", "transformers.LLaMA"),
        ("flax.nn", "flax.nnx"),
        ("transformers.BLOOM", "transformers.GPT-NeoX"),
        ("transformers.Swin", "transformers.BERT"),
    ],
)
def test_unknown_layout_suggests_nearest(name, nearest, capsys):
    """The error for an unknown layout suggests the nearest one."""
    out = printed_by(capsys, "inspect", name, status=2)
    assert rejects("layout", layout=name, hint=nearest).is_printed_in(out)


def test_inspect_shows_long_prefixes_whole(llama, capsys, tmp_path, monkeypatch):
    """`inspect` shows a prefix of 84 characters whole in 100 and 160 columns."""
    prefix = "a_model_of_some_length.with_a_decoder_of_layers.layers.{i}.self_attention_of_a_layer"
    printed_by(
        capsys,
        "convert",
        llama,
        tmp_path / "p.npz",
        "--to",
        "canonical",
        "--prefix",
        "layers.{i}.self_attn",
        "--to-prefix",
        prefix,
    )
    for width in (100, 160):
        monkeypatch.setenv("COLUMNS", str(width))
        assert prefix in printed_by(capsys, "inspect", tmp_path / "p.npz")


def test_other_layer_types_are_not_converted(capsys, tmp_path):
    """`convert` writes the one attention layer of Qwen3-Next, bit for bit, and skips the others."""
    saved("qwen3_next", tmp_path / "model")
    out = printed_by(
        capsys, "convert", tmp_path / "model", tmp_path / "c.safetensors", "--to", "canonical"
    )
    assert out.startswith("converted 1 attention layer ")
    assert "bit for bit" in printed_by(
        capsys, "compare", tmp_path / "model", tmp_path / "c.safetensors"
    )


TEXT_PART = {**SMALL, "num_key_value_heads": 2, "rope_parameters": SECTIONS}
PARTS = {
    "clip": (
        transformers.CLIPModel,
        {"text_config": SMALL, "vision_config": {**SMALL, "image_size": 6, "patch_size": 2}},
    ),
    "qwen2_vl": (
        transformers.Qwen2VLForConditionalGeneration,
        {
            "text_config": TEXT_PART,
            "vision_config": {
                "depth": 1,
                "embed_dim": 32,
                "num_heads": 4,
                "hidden_size": 32,
                "patch_size": 2,
            },
        },
    ),
}


@pytest.mark.parametrize("name", PARTS)
def test_unknown_model_parts_are_reported(name, tmp_path, capsys):
    """Commands use each known part of a model, and report Qwen2-VL's vision part as not covered."""
    kind, options = PARTS[name]
    kind(transformers.AutoConfig.for_model(name, **options)).save_pretrained(tmp_path / "m")
    count = 4 if name == "clip" else 2
    why = "warning: vision_config is not read: model_type 'qwen2_vl_vision' is not covered"
    for hints in (
        ("inspect", tmp_path / "m"),
        ("convert", tmp_path / "m", tmp_path / "c.safetensors", "--to", "canonical"),
    ):
        capsys.readouterr()
        assert (why in " ".join(printed_by(capsys, *hints).split())) == (name == "qwen2_vl"), hints
    out = printed_by(
        capsys,
        "run",
        "--model",
        tmp_path / "m",
        "--backends",
        "torch",
        status=2 if name == "qwen2_vl" else 0,
    )
    why = "NOT compared: vision_config (model_type 'qwen2_vl_vision' is not covered"
    assert (why in out.splitlines()[-1]) == (name == "qwen2_vl")
    assert len(layers_in(tmp_path / "c.safetensors")) == len(layers_in(tmp_path / "m")) == count


# ---- Other tensors and files of released checkpoints ---------------------------------------------


def with_tensors(folder, target, more):
    """Copy a model with additional tensors."""
    target.mkdir()
    save_file(load_file(folder / "model.safetensors") | more, target / "model.safetensors")
    (target / "config.json").write_text((folder / "config.json").read_text())
    return target


def test_extra_layers_are_not_converted(llama, capsys, tmp_path):
    """Layers beyond the configured number are not converted, and are reported as not compared."""
    tensors = load_file(llama / "model.safetensors")
    more = {
        name.replace("layers.1.", "layers.2."): x
        for name, x in tensors.items()
        if "layers.1." in name
    }
    folder = with_tensors(llama, tmp_path / "more", more)
    with pytest.warns(
        IgnoredSettingsWarning, match=r"does not describe them: layers\.\{i\}\.self_attn"
    ):
        assert [label for label, *_ in layers_in(folder)] == [
            "layers.0.self_attn",
            "layers.1.self_attn",
        ]
    out = printed_by(capsys, "convert", folder, tmp_path / "c.safetensors", "--to", "canonical")
    assert out.startswith("converted 2 attention layers ")
    out = printed_by(capsys, "compare", folder, tmp_path / "c.safetensors", status=2)
    assert "not compared: layers.{i}.self_attn" in out
    layers = ("--prefix", "layers.{i}.self_attn")
    assert "bit for bit" in printed_by(
        capsys, "compare", folder, tmp_path / "c.safetensors", *layers
    )
    out = printed_by(capsys, "run", "--model", folder, "--backends", "torch", "--quiet", status=2)
    assert "NOT compared: layers.{i}.self_attn (not read, because the config.json" in out
    printed_by(
        capsys, "run", "--model", folder, "--backends", "torch", "--quiet", "--layers", "0,1"
    )


def test_layers_missing_in_file_are_named(llama, capsys, tmp_path):
    """Commands name a layer that config.json requires and the file lacks."""
    tensors = load_file(llama / "model.safetensors")
    (tmp_path / "part").mkdir()
    some = {name: x for name, x in tensors.items() if "layers.1." not in name}
    save_file(some, tmp_path / "part" / "model.safetensors")
    (tmp_path / "part" / "config.json").write_text((llama / "config.json").read_text())
    words = (
        "missing in the file, though its configuration or its metadata requires them: "
        "layers.1.self_attn (1)"
    )
    assert words in printed_by(
        capsys, "convert", tmp_path / "part", tmp_path / "c.npz", "--to", "canonical"
    )
    assert words not in printed_by(
        capsys, "convert", llama, tmp_path / "d.npz", "--to", "canonical"
    )
    words = (
        f"NOT compared: 1 layer, layers.1.self_attn (not in {tmp_path / 'part'}, although its "
        f"configuration or its metadata"
    )
    assert words in printed_by(
        capsys, "run", "--backends", "torch", "--model", tmp_path / "part", status=2
    )
    for command in ("compare", "diagnose"):  # they require the same number of layers
        out = printed_by(capsys, command, llama, tmp_path / "part", status=2)
        assert f"not compared: layers.1.self_attn (not in {tmp_path / 'part'}" in out
    assert (
        "not compared"
        not in printed_by(capsys, "run", "--backends", "torch", "--model", llama).lower()
    )


@pytest.fixture
def never_alone(monkeypatch):
    """Make modules of transformers fail to run on their own."""

    def fail(*arguments, **keywords):
        raise NotAlone("its model cannot run it")

    monkeypatch.setattr(Skeleton, "run", fail)


@pytest.mark.usefixtures("never_alone")
def test_skipped_modules_are_in_every_report(llama, capsys, tmp_path):
    """If no module can run, text, JSON, JUnit and HTML reports say so, and `run` exits with 2."""
    files = {name: tmp_path / f"r.{name}" for name in ("json", "junit", "html")}
    command = ("run", "--model", llama, "--backends", "torch", "--against", "transformers")
    reports = [word for name, path in files.items() for word in (f"--{name}", path)]
    words = "NOT compared: transformers, all 2 cases in float32 (its model cannot run it)"
    out = printed_by(capsys, *command, *reports, status=2)
    assert out.splitlines()[-1].endswith(f"0 failed; {words}")
    assert (
        printed_by(capsys, *command, "--quiet", status=2).splitlines()[-1] == out.splitlines()[-1]
    )
    out = printed_by(capsys, *command, "--quiet", "--allow-skipped")
    assert words.replace("compared", "compared, as --allow-skipped permits") in out
    (entry,) = json.loads(files["json"].read_text())["not_compared"]
    assert entry["reason"] == "its model cannot run it"
    assert entry["labels"] == ["layer-0-causal", "layer-1-causal"]
    assert entry["is_open"]
    assert words in files["junit"].read_text()
    assert words in files["html"].read_text()
    assert "not everything was compared" in files["html"].read_text()


def test_linear_attention_layers_are_counted(capsys, tmp_path):
    """`run` reports the number of linear-attention layers, in which there is nothing to compare."""
    saved("qwen3_next", tmp_path / "model")
    capsys.readouterr()
    out = printed_by(capsys, "run", "--model", tmp_path / "model", "--backends", "torch", "--quiet")
    count = sum(layer.spec is None for layer in specs_of(tmp_path / "model"))
    words = (
        f"nothing to compare in {count} layer{'s' * (count > 1)} (linear_attention is not "
        f"attention over keys)"
    )
    assert words in out.splitlines()[-1]


@pytest.mark.thorough
def test_unexercised_window_is_reported(gemma, capsys, tmp_path):
    """A window of 10 has a case of its own, in the first layer that has it; with `--seq-len 9` it
    is reported as not exercised, but not with `--seq-len 11`.
    """
    folder = tmp_path / "wide"
    shutil.copytree(gemma, folder)
    config = json.loads((folder / "config.json").read_text()) | {"sliding_window": 10}
    (folder / "config.json").write_text(json.dumps(config))
    path = tmp_path / "r.json"
    command = ("run", "--model", folder, "--backends", "torch", "--quiet", "--json", path)
    *_, line, _ = printed_by(capsys, *command, "--seq-len", "9").splitlines()
    assert line.startswith("NOT exercised by 9 tokens: a window of 10 in layer-0, layer-1, ")
    assert "(--seq-len 11 would)" in line
    (entry,) = json.loads(path.read_text())["not_exercised"]
    assert (entry["what"], entry["num_tokens"], entry["needed"]) == ("a window of 10", 9, 11)
    assert "NOT exercised" not in printed_by(capsys, *command, "--seq-len", "11")
    assert "NOT exercised" not in printed_by(capsys, *command, "--against", "transformers")
    report = json.loads(path.read_text())
    assert report["not_exercised"] == []
    names = ("layer-0-causal-15-tokens", "layer-0-decode-15-tokens")
    assert report["exercised"] == [f"{name}: 15 tokens, for a window of 10" for name in names]
    compared = {(result["case"], result["backend"]) for result in report["results"]}
    assert {(names[0], "transformers"), (names[0], "torch"), (names[1], "torch")} <= compared


@pytest.mark.parametrize(
    ("length", "input_error"),
    [(length, rejects("--seq-len", {"--seq-len": length})) for length in (3, 0, -1, 131073)]
    + [(100000, rejects("seq_len", "100000, which needs about"))],
)
def test_unusable_seq_len_raises_one_line(length, input_error, gemma, capsys):
    """A sequence length that is too small or too large exits with 2 and one line."""
    out = printed_by(
        capsys, "run", "--model", gemma, "--backends", "torch", f"--seq-len={length}", status=2
    )
    assert len(out.splitlines()) == 1
    assert input_error.is_printed_in(out)


def test_seq_len_requires_a_model(capsys):
    """`--seq-len` without a model or weights exits with 2."""
    out = printed_by(capsys, "run", "--seq-len", "12", status=2)
    assert Misuse("--seq-len requires --weights or --model").is_printed_in(out)


def test_against_requires_a_config(llama, capsys, tmp_path):
    """Flags suffice to run weights without a config.json, but not for `--against transformers`."""
    (tmp_path / "alone").mkdir()
    shutil.copy(llama / "model.safetensors", tmp_path / "alone")
    command = ("run", "--backends", "torch", "--model", tmp_path / "alone", *AS_LLAMA)
    assert "agrees with the float64 reference" in printed_by(capsys, *command)
    error_line = printed_by(capsys, *command, "--against", "transformers", status=2)
    assert rejects("--against", "layers.0.self_attn").is_printed_in(error_line)
    assert "config.json" in error_line


def test_unused_t5_bias_is_ignored(tmp_path):
    """A relative bias of T5's cross-attention, which is not used, changes no layer."""
    saved("t5", tmp_path / "model")
    name = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    folder = with_tensors(
        tmp_path / "model", tmp_path / "more", {name: np.ones((8, 4), np.float32)}
    )
    before, after = layers_in(tmp_path / "model"), layers_in(folder)
    assert all(same_tensors(one[2], other[2]) for one, other in zip(before, after, strict=True))
    convert_file(folder, tmp_path / "c.safetensors", target="canonical")
    assert [label for label, *_ in layers_in(tmp_path / "c.safetensors")] == [
        label for label, *_ in before
    ]


def test_truncated_config_raises(llama, capsys, tmp_path):
    """A truncated config.json exits with 2, although flags describe the layers."""
    folder = with_tensors(llama, tmp_path / "cut", {})
    whole = (folder / "config.json").read_text()
    (folder / "config.json").write_text(whole[: len(whole) // 2])
    out = printed_by(
        capsys, "convert", folder, tmp_path / "c.npz", "--to", "canonical", *AS_LLAMA, status=2
    )
    assert rejects(str(folder / "config.json")).is_printed_in(out)


def test_folder_with_weights_is_not_a_target(llama, capsys, tmp_path):
    """`convert` to a folder with a shard exits with 2 and names the shard."""
    target = tmp_path / "there"
    target.mkdir()
    (target / "model-00001-of-00002.safetensors").touch()
    out = printed_by(capsys, "convert", llama, target, "--to", "canonical", status=2)
    assert rejects("a folder to write into", "model-00001-of-00002.safetensors").is_printed_in(out)

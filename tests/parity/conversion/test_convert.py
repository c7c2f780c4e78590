"""Conversion: layers in memory, checkpoints in files, and whether two files hold the same attention."""

import functools
import json
import re
import subprocess
import sys
import warnings
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch
from helpers import ROOT
from helpers.layouts import layout_fits, undetermined_fields
from helpers.refusals import refuses, refuses_type
from helpers.samples import sample
from helpers.tensors import bits_of, read_metadata, read_tensors, write_tensor_file

import mha_torch
from mha_spec import AttentionSpec, Rope
from parity import (
    CASES,
    NotCarriedWarning,
    first_difference,
    make_problem,
    random_weights,
    save,
    spec_of,
    to_jax,
    weights_of,
)
from parity.conversion.convert import convert, convert_file, load
from parity.conversion.inspect import find_layers
from parity.conversion.layouts import LAYOUTS, from_canonical
from parity.conversion.verify import same_bits, verify
from parity.core.weights import dtype_named, is_finite
from parity.files import open_tensors, write_tensors

GQA = AttentionSpec(16, 4, num_kv_heads=2, head_dim=6, d_in=16, qkv_bias=False, out_bias=False, rope=Rope(500.0))
MHA = AttentionSpec(16, 4)
HEADS = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 6, "rope": Rope(500.0)}
PREFIX = "model.layers.{i}.self_attn"


KINDS = {"GQA": GQA, "MHA": MHA}
HOLDING = {
    kind: [name for name, layout in LAYOUTS.items() if layout_fits(layout, spec)] for kind, spec in KINDS.items()
}


def any_bits(shape, seed):
    """bfloat16 values of all sizes, but none that is not finite."""
    values = np.random.default_rng(seed).integers(0, 1 << 16, shape).astype(np.uint16)
    return np.where(values & 0x7F80 == 0x7F80, values & 0x807F, values).astype(np.uint16).view(ml_dtypes.bfloat16)


def checkpoint(numbers=(0, 1, 2), spec=GQA, layout="transformers.LLaMA", dtype="float32", prefix=PREFIX):
    """Layers among other tensors, in an order that is not that of their names."""
    tensors = {"model.embed_tokens.weight": np.arange(12, dtype=np.int32).reshape(3, 4)}
    for number in numbers:
        weights = {n: x.astype(dtype_named(dtype)) for n, x in random_weights(spec, seed=number).items()}
        for name, x in from_canonical(weights, spec, LAYOUTS[layout]).items():
            tensors[f"{prefix.replace('{i}', str(number))}.{name}"] = x
        tensors[f"model.layers.{number}.mlp.up_proj.weight"] = any_bits((5, 3), number)
    return tensors | {"lm_head.weight": np.array([np.nan, -0.0], np.float16), "a.step": np.array(7, np.int64)}


def rest(tensors):
    return {name: x for name, x in tensors.items() if "self_attn" not in name}


# ---- In memory -------------------------------------------------------------------------------------------------------


@functools.cache
def tensors_of(spec, layout):
    return from_canonical(random_weights(spec), spec, LAYOUTS[layout])


@sample(12)
@pytest.mark.parametrize(("kind", "source"), [(kind, source) for kind in KINDS for source in HOLDING[kind]])
def test_every_layout_becomes_every_other_and_comes_back_bit_for_bit(kind, source):
    spec, names = KINDS[kind], HOLDING[kind]
    tensors, wrong = tensors_of(spec, source), []
    for target in names[names.index(source) + 1 :]:  # each pair once, there and back
        there = convert(tensors, source=source, target=target, **undetermined_fields(spec))
        back = convert(there, source=target, target=source, **undetermined_fields(spec))
        if bits_of(there) != bits_of(tensors_of(spec, target)) or bits_of(back) != bits_of(tensors):
            wrong.append(target)
    assert wrong == []


def test_an_unknown_layout_is_refused_with_those_there_are():
    with refuses("target", target="torch"):
        convert(random_weights(MHA), source="canonical", target="torch", num_heads=4)


def test_a_layout_that_cannot_hold_the_layer_is_refused_with_its_rule():
    with refuses("the layer"):
        convert(random_weights(GQA), source="canonical", target="flax.linen", **HEADS)


# ---- Whole checkpoints -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("target", ["meta.LLaMA", "qkv_proj", "flax.nnx", "ttnn", "canonical"])
def test_a_checkpoint_comes_back_bit_for_bit_and_its_metadata_tell_how(tmp_path, target, dtype):
    tensors = checkpoint(dtype=dtype)
    source = write_tensor_file(tmp_path / "a.safetensors", tensors)
    convert_file(source, tmp_path / "b.safetensors", source="transformers.LLaMA", target=target, prefix=PREFIX, **HEADS)
    convert_file(tmp_path / "b.safetensors", tmp_path / "c.safetensors", target="transformers.LLaMA")
    assert bits_of(read_tensors(tmp_path / "c.safetensors")) == bits_of(tensors)


def test_every_layer_is_converted_as_it_would_be_alone(tmp_path):
    numbers = (0, 3, 10, 11)
    tensors = checkpoint(numbers)
    source = write_tensor_file(tmp_path / "a.safetensors", tensors)
    done = convert_file(
        source, tmp_path / "b.npz", source="transformers.LLaMA", target="meta.LLaMA", prefix=PREFIX, **HEADS
    )
    found = read_tensors(tmp_path / "b.npz")
    assert done.layers == [PREFIX.format(i=number) for number in numbers]
    assert done.source == "transformers.LLaMA"
    assert undetermined_fields(done.spec) == HEADS
    for number in numbers:
        begin = f"{PREFIX.format(i=number)}."
        layer = {name.removeprefix(begin): x for name, x in found.items() if name.startswith(begin)}
        assert bits_of(layer) == bits_of(from_canonical(random_weights(GQA, seed=number), GQA, LAYOUTS["meta.LLaMA"]))


def test_all_other_tensors_are_kept_bit_for_bit_and_in_their_place(tmp_path):
    tensors = checkpoint()
    source = write_tensor_file(tmp_path / "a.npz", tensors)
    done = convert_file(
        source, tmp_path / "b.npz", source="transformers.LLaMA", target="qkv_proj", prefix=PREFIX, **HEADS
    )
    found = read_tensors(tmp_path / "b.npz")
    assert bits_of(rest(found)) == bits_of(rest(tensors))
    assert (done.kept, done.dropped) == (list(rest(tensors)), [])
    steps = [[name.partition("self_attn")[0] for name in these] for these in (found, tensors)]
    assert list(dict.fromkeys(steps[0])) == list(dict.fromkeys(steps[1]))


def test_all_other_tensors_are_dropped_on_request(tmp_path):
    tensors = checkpoint()
    done = convert_file(
        write_tensor_file(tmp_path / "a.npz", tensors),
        tmp_path / "b.npz",
        source="transformers.LLaMA",
        target="qkv_proj",
        prefix=PREFIX,
        keep_rest=False,
        **HEADS,
    )
    assert rest(read_tensors(tmp_path / "b.npz")) == {}
    assert (done.kept, done.dropped) == ([], list(rest(tensors)))


def test_layers_get_another_prefix(tmp_path):
    source = write_tensor_file(tmp_path / "a.npz", checkpoint((2, 13)))
    convert_file(
        source,
        tmp_path / "b.npz",
        source="transformers.LLaMA",
        target="meta.LLaMA",
        prefix=PREFIX,
        to_prefix="layers.{i}.attention",
        keep_rest=False,
        **HEADS,
    )
    assert list(read_tensors(tmp_path / "b.npz")) == [
        f"layers.{number}.attention.w{letter}.weight" for number in (2, 13) for letter in "qkvo"
    ]
    assert read_metadata(tmp_path / "b.npz")["prefix"] == "layers.{i}.attention"


def test_two_numbers_in_a_prefix_stay_in_their_order(tmp_path):
    prefix, to_prefix = "stack.{i}.layer.{i}", "s{i}.l{i}"
    tensors = {}
    for numbers in ((0, 12), (1, 0)):
        begin = "stack.{}.layer.{}".format(*numbers)
        tensors |= {f"{begin}.{name}": x for name, x in random_weights(MHA, seed=list(numbers)).items()}
    convert_file(
        write_tensor_file(tmp_path / "a.npz", tensors),
        tmp_path / "b.npz",
        source="canonical",
        target="W_q",
        prefix=prefix,
        to_prefix=to_prefix,
        num_heads=4,
    )
    found = read_tensors(tmp_path / "b.npz")
    assert found.keys() == {
        f"{p}.W_{w}.{leaf}" for p in ("s0.l12", "s1.l0") for w in "qkvo" for leaf in ("weight", "bias")
    }
    assert (found["s0.l12.W_k.weight"] == tensors["stack.0.layer.12.k_proj.weight"]).all()


@pytest.mark.parametrize("to_prefix", ["layers.{i}.{i}", "{i}.layers.{i}.{i}"])
def test_a_prefix_with_other_numbers_is_refused(tmp_path, to_prefix):
    source = write_tensor_file(tmp_path / "a.npz", checkpoint())
    with refuses("to_prefix", to_prefix=to_prefix, prefix="model.layers.{i}.self_attn"):
        convert_file(
            source,
            tmp_path / "b.npz",
            source="transformers.LLaMA",
            target="W_q",
            prefix=PREFIX,
            to_prefix=to_prefix,
            **HEADS,
        )


def test_names_that_are_there_already_are_refused(tmp_path):
    tensors = checkpoint() | {"layers.1.attention.wq.weight": np.zeros(3, np.float32)}
    refused_to_convert(
        tmp_path, tensors, refuses("names", "layers.1.attention.wq.weight twice"), to_prefix="layers.{i}.attention"
    )


def refused_to_convert(tmp_path, tensors, refusal, **options):
    """A refusal, after which all is as it was."""
    source = write_tensor_file(tmp_path / "a.npz", tensors)
    old = write_tensor_file(tmp_path / "b.npz", {"old": np.ones(1)}).read_bytes()
    options = {
        "force": True,
        "source": "transformers.LLaMA",
        "target": "meta.LLaMA",
        "prefix": PREFIX,
        **HEADS,
        **options,
    }
    with refusal:
        convert_file(source, tmp_path / "b.npz", **options)
    assert "\n" not in str(refusal.value)
    assert (tmp_path / "b.npz").read_bytes() == old
    assert {path.name for path in tmp_path.iterdir()} == {"a.npz", "b.npz"}


Q1 = "model.layers.1.self_attn.q_proj.weight"


def test_a_layer_of_mixed_dtypes_is_refused(tmp_path):
    tensors = checkpoint()
    tensors[Q1] = tensors[Q1].astype(np.float16)
    refused_to_convert(tmp_path, tensors, refuses("model.layers.1.self_attn", "['float16', 'float32']"))


def test_a_layer_of_integers_is_refused(tmp_path):
    tensors = {name: x.astype(np.int8) if "self_attn" in name else x for name, x in checkpoint().items()}
    refused_to_convert(tmp_path, tensors, refuses("model.layers.0.self_attn", "['int8']"))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_layer_that_is_not_finite_is_refused_and_nothing_is_written(tmp_path, value, dtype):
    tensors = checkpoint(dtype=dtype)
    tensors[Q1][-1, -1] = value
    refused_to_convert(tmp_path, tensors, refuses("model.layers.1.self_attn.q_proj.weight", "NaN or infinities"))


def test_unknown_names_under_the_prefix_are_refused(tmp_path):
    tensors = checkpoint() | {"model.layers.1.self_attn.qk_norm.weight": np.ones(6, np.float32)}
    refused_to_convert(
        tmp_path, tensors, refuses("tensors", "unknown names ['qk_norm.weight']", where="model.layers.1.self_attn")
    )
    tensors = checkpoint() | {"model.layers.1.self_attn.q_norm.weight": np.ones(6, np.float32)}
    message = refuses("the purpose of ['q_norm.weight'] in transformers.LLaMA", where="model.layers.1.self_attn")
    refused_to_convert(tmp_path, tensors, message)


def test_a_layer_that_lacks_a_tensor_is_refused(tmp_path):
    tensors = checkpoint()
    del tensors[Q1]
    refused_to_convert(tmp_path, tensors, refuses("tensors", where="model.layers.1.self_attn"))


@pytest.mark.parametrize(
    "prefix",
    [
        *("", "model.layers.{i}.attn", "model.layers.{i}.self", "odel.layers.{i}.self_attn"),
        *("model.layers.{i}.self_attn.", "model.layers.*.self_attn", "model.layers.9.self_attn"),
    ],
)
def test_a_prefix_that_is_none_is_refused_with_those_that_fit(tmp_path, prefix):
    refusal = refuses("prefix", prefix=prefix)
    refused_to_convert(tmp_path, checkpoint(), refusal, prefix=prefix)
    assert refusal.value.remedy == [{"prefix": "model.layers.{i}.self_attn"}]


def test_a_prefix_is_no_pattern(tmp_path):
    refused_to_convert(
        tmp_path, checkpoint(), refuses("prefix", prefix="model.layers...self_attn"), prefix="model.layers...self_attn"
    )


def test_heads_that_are_not_told_are_asked_for(tmp_path):
    refused_to_convert(
        tmp_path,
        checkpoint(),
        refuses("the heads", where="model.layers.0.self_attn"),
        num_heads=None,
        num_kv_heads=None,
        head_dim=None,
    )


def test_a_layout_that_is_not_told_is_asked_for(tmp_path):
    refused_to_convert(
        tmp_path,
        checkpoint(),
        refuses("source"),
        source=None,
    )


def test_a_format_that_is_only_read_is_refused(tmp_path):
    source = write_tensor_file(tmp_path / "a.npz", checkpoint())
    with refuses("…/b.gguf", "'.gguf'; GGUF files are only read"):
        convert_file(
            source, tmp_path / "b.gguf", source="transformers.LLaMA", target="gguf.LLaMA", prefix=PREFIX, **HEADS
        )


def test_layers_of_different_shapes_are_converted_each_as_it_is(tmp_path):
    wide = replace(GQA, num_heads=6)
    tensors = checkpoint((0,))
    tensors |= {f"{PREFIX.format(i=1)}.{n.replace('out_', 'o_')}": x for n, x in random_weights(wide).items()}
    source = write_tensor_file(tmp_path / "a.npz", tensors)
    heads = {"num_kv_heads": 2, "head_dim": 6, "rope": Rope(500.0)}
    done = convert_file(
        source, tmp_path / "b.npz", source="transformers.LLaMA", target="meta.LLaMA", prefix=PREFIX, **heads
    )
    assert done.spec is None
    assert "spec" not in read_metadata(tmp_path / "b.npz")
    convert_file(tmp_path / "b.npz", tmp_path / "c.npz", target="transformers.LLaMA", **heads)
    assert bits_of(read_tensors(tmp_path / "c.npz")) == bits_of(tensors)


def test_what_a_layout_ignores_is_kept_under_its_name(tmp_path):
    tensors = checkpoint() | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.array([1, np.inf], np.float16)}
    source = write_tensor_file(tmp_path / "a.npz", tensors)
    done = convert_file(
        source, tmp_path / "b.npz", source="transformers.LLaMA", target="meta.LLaMA", prefix=PREFIX, **HEADS
    )
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    assert name in done.kept
    assert bits_of({name: read_tensors(tmp_path / "b.npz")[name]}) == bits_of({name: tensors[name]})


def test_shards_are_read_and_written(tmp_path):
    tensors = checkpoint(dtype="bfloat16")
    infos = {name: (x.shape, x.dtype) for name, x in tensors.items()}
    source = write_tensors(tmp_path / "a.safetensors", infos, tensors.__getitem__, max_shard_bytes=600)
    convert_file(
        source,
        tmp_path / "b.safetensors",
        source="transformers.LLaMA",
        target="meta.LLaMA",
        prefix=PREFIX,
        max_shard_bytes=600,
        **HEADS,
    )
    index = tmp_path / "b.safetensors.index.json"
    shards = set(json.loads(index.read_text())["weight_map"].values())
    assert len(shards) > 3
    convert_file(index, tmp_path / "c.safetensors", target="transformers.LLaMA")
    assert bits_of(read_tensors(tmp_path / "c.safetensors")) == bits_of(tensors)


def test_metadata_tell_layout_heads_pairing_and_hash(tmp_path):
    source = write_tensor_file(tmp_path / "a.npz", checkpoint())
    convert_file(
        source, tmp_path / "b.safetensors", source="transformers.LLaMA", target="meta.LLaMA", prefix=PREFIX, **HEADS
    )
    metadata = read_metadata(tmp_path / "b.safetensors")
    assert metadata["layout"] == "meta.LLaMA"
    assert metadata["rope"] == "interleaved"
    assert metadata["prefix"] == PREFIX
    assert (metadata["num_heads"], metadata["num_kv_heads"], metadata["head_dim"]) == ("4", "2", "6")
    assert undetermined_fields(AttentionSpec.from_json(metadata["spec"])) == HEADS
    with open_tensors(tmp_path / "b.safetensors") as file:
        file.verify()
        assert metadata["sha256"] == file.sha256()


def test_metadata_of_others_are_no_obstacle(tmp_path):
    metadata = {"format": "pt", "spec": "of something else", "prefix": "none of ours"}
    source = write_tensor_file(tmp_path / "a.safetensors", checkpoint(), metadata)
    done = convert_file(
        source, tmp_path / "b.npz", source="transformers.LLaMA", target="meta.LLaMA", prefix=PREFIX, **HEADS
    )
    assert len(done.layers) == 3


def test_the_same_file_is_written_every_time(tmp_path):
    source = write_tensor_file(tmp_path / "a.npz", checkpoint())
    for name in ("b.safetensors", "c.safetensors"):
        convert_file(source, tmp_path / name, source="transformers.LLaMA", target="W_q", prefix=PREFIX, **HEADS)
    assert (tmp_path / "b.safetensors").read_bytes() == (tmp_path / "c.safetensors").read_bytes()


def test_a_file_is_not_converted_in_its_place(tmp_path):
    tensors = checkpoint()
    path = write_tensor_file(tmp_path / "a.safetensors", tensors)
    options = {"source": "transformers.LLaMA", "target": "meta.LLaMA", "prefix": PREFIX, "force": True, **HEADS}
    with refuses("the target", path=path, source=path):
        convert_file(path, path, **options)
    assert bits_of(read_tensors(path)) == bits_of(tensors)


def test_a_target_is_replaced_when_that_is_forced(tmp_path):
    tensors = checkpoint()
    path, target = (
        write_tensor_file(tmp_path / "a.safetensors", tensors),
        write_tensor_file(tmp_path / "b.safetensors", {"old": np.ones(1)}),
    )
    options = {"source": "transformers.LLaMA", "target": "meta.LLaMA", "prefix": PREFIX, **HEADS}
    with pytest.raises(FileExistsError, match=r"b\.safetensors exists; pass --force to replace it"):
        convert_file(path, target, **options)
    assert list(read_tensors(target)) == ["old"]
    convert_file(path, target, force=True, **options)
    assert "old" not in read_tensors(target)


def test_every_tensor_is_announced_once_before_it_is_written(tmp_path):
    source, seen = write_tensor_file(tmp_path / "a.npz", checkpoint()), []
    convert_file(
        source,
        tmp_path / "b.npz",
        source="transformers.LLaMA",
        target="W_q",
        prefix=PREFIX,
        on_tensor=seen.append,
        **HEADS,
    )
    assert seen == list(read_tensors(tmp_path / "b.npz"))


MEMORY = """
import sys
import warnings
from pathlib import Path
import ml_dtypes, numpy as np
from parity.conversion.convert import convert_file
from parity.files import write_tensors
folder, target, dtype = Path(sys.argv[1]), sys.argv[2], np.dtype(ml_dtypes.bfloat16)
layers, width, num_heads, num_kv_heads = map(int, sys.argv[3:])
rows = {"q": num_heads * 128, "k": num_kv_heads * 128, "v": num_kv_heads * 128}
shapes = {f"layers.{i}.{p}_proj.weight": (n, width) for i in range(layers) for p, n in rows.items()}
shapes |= {f"layers.{i}.o_proj.weight": (width, rows["q"]) for i in range(layers)}
shapes |= {"embedding": (8192, 1536)}
infos = {n: (shape, dtype) for n, shape in shapes.items()}
write_tensors(folder / "a.safetensors", infos, lambda n: np.zeros(shapes[n], dtype))
Path("/proc/self/clear_refs").write_text("5")  # forget the peak until now
def peak():
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line]
    return int(line.split()[1]) * 1024
before = peak()
heads = dict(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=128)
convert_file(folder / "a.safetensors", folder / "b.safetensors", source="transformers.LLaMA", target=target,
             prefix="layers.{i}", **heads)
convert_file(folder / "b.safetensors", folder / "c.safetensors", target="transformers.LLaMA")
print(peak() - before, (folder / "b.safetensors").stat().st_size)
"""


@pytest.mark.costly("the memory of a process")
@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells the peak of memory in /proc")
@pytest.mark.parametrize(
    ("target", "sizes", "largest"),  # sizes: layers, their width, heads, key/value heads
    [
        pytest.param("meta.LLaMA", [12, 1536, 12, 4], 2 * 8192 * 1536, id="many-layers"),
        pytest.param(
            "qkv_proj", [12, 1536, 12, 4], 2 * 8192 * 1536, id="many-packed-layers", marks=pytest.mark.thorough
        ),
        pytest.param("qkv_proj", [1, 3072, 32, 32], 2 * 3 * 4096 * 3072, id="one-large-packed-layer"),
    ],
)
def test_memory_holds_a_few_tensors_of_a_checkpoint_and_not_all(tmp_path, target, sizes, largest):
    command = [sys.executable, "-c", MEMORY, str(tmp_path), target, *map(str, sizes)]
    peak, size = map(int, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    assert size > 125e6
    assert peak < 1.5 * largest + 50e6
    for path in tmp_path.iterdir():
        path.unlink()


# ---- One layer -------------------------------------------------------------------------------------------------------


@sample(12)
@pytest.mark.parametrize("suffix", ["safetensors", "npz", "pt", "msgpack"])
@pytest.mark.parametrize("layout", ["canonical", "meta.LLaMA", "qkv_proj", "ttnn"])
@pytest.mark.parametrize("prefix", ["", "blocks.3.attention"])
def test_a_layer_is_loaded_as_it_was_saved(tmp_path, suffix, layout, prefix):
    path = tmp_path / f"layer.{suffix}"
    weights = {name: any_bits(x.shape, len(name)) for name, x in random_weights(GQA).items()}
    save(path, weights, GQA, layout, prefix=prefix)
    found, spec = load(path)
    assert same_bits(found, weights)
    assert spec == GQA


def test_one_layer_of_many_is_loaded(tmp_path):
    path = write_tensor_file(tmp_path / "a.npz", checkpoint((4, 14)))
    found, spec = load(path, "transformers.LLaMA", prefix=PREFIX.format(i=14), **HEADS)
    assert same_bits(found, random_weights(GQA, seed=14))
    assert undetermined_fields(spec) == HEADS


def test_a_prefix_of_several_layers_is_not_loaded(tmp_path):
    path = write_tensor_file(tmp_path / "a.npz", checkpoint())
    with refuses("prefix", "3"):
        load(path, "transformers.LLaMA", prefix=PREFIX, **HEADS)


def test_a_layer_that_is_not_finite_is_not_loaded(tmp_path):
    tensors = checkpoint()
    tensors[Q1][0, 0] = np.nan
    with refuses("model.layers.1.self_attn.q_proj.weight", "NaN or infinities"):
        load(write_tensor_file(tmp_path / "a.npz", tensors), "transformers.LLaMA", prefix=PREFIX.format(i=1), **HEADS)


def test_a_module_is_saved_with_its_own_specification(tmp_path):
    spec = replace(GQA, fused_qkv=True)
    module = mha_torch.MultiHeadAttention(spec)
    save(tmp_path / "a.npz", module)
    found, found_spec = load(tmp_path / "a.npz")
    assert same_bits(found, weights_of(module))
    assert found_spec == spec
    with refuses("the module", "rope=Rope(theta=500.0) and rope=None"):
        save(tmp_path / "b.npz", module, replace(GQA, rope=None))
    with refuses_type("spec", spec=None):
        save(tmp_path / "b.npz", random_weights(GQA))
    assert not (tmp_path / "b.npz").exists()


def test_weights_of_torch_are_converted_and_saved(tmp_path):
    layer = torch.nn.MultiheadAttention(16, 4).bfloat16()
    found = convert(layer.state_dict(), source="torch.nn.MultiheadAttention", target="canonical", num_heads=4)
    assert same_bits(found, weights_of(layer))
    save(tmp_path / "a.npz", {name: to_jax(x) for name, x in found.items()}, spec_of(layer))
    assert same_bits(load(tmp_path / "a.npz")[0], found)


@pytest.mark.costly("converts and runs a whole model")
def test_the_example_of_the_documentation_runs(tmp_path, monkeypatch):
    page = (ROOT / "docs" / "how-to" / "convert.md").read_text(encoding="utf-8")
    code = "".join(re.findall(r"^```python\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL))
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(compile(code, "convert.md", "exec"), names)
    assert (str(names["kernel"].dtype), names["kernel"].shape) == ("bfloat16", (64, 8, 8))
    assert same_bits(names["weights"], weights_of(names["layer"]))
    assert same_bits(weights_of(names["filled"]), weights_of(names["layer"]))


def test_weights_that_do_not_fit_are_not_saved(tmp_path):
    weights = random_weights(GQA)
    del weights["k_proj.weight"]
    with refuses("weights", missing=["k_proj.weight"], unexpected=[]):
        save(tmp_path / "a.npz", weights, GQA)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize("sign", [1, -1])
def test_finite_is_all_but_nan_and_infinity(dtype, sign):
    dtype = dtype_named(dtype)
    extremes = ml_dtypes.finfo(dtype)
    values = np.array([extremes.max, extremes.tiny, extremes.smallest_subnormal, 0.0], dtype) * dtype.type(sign)
    assert is_finite(values)
    assert is_finite(values[:0])
    assert is_finite(values[:1].reshape(()))
    for value in (np.nan, np.inf):
        assert not is_finite(np.append(values, dtype.type(sign) * dtype.type(value)))
        assert not is_finite(np.full((3, 5), sign * value, dtype).T[::2])
        for place in (0, 65535, 65536, 199999):
            many = np.zeros(200000, dtype)
            many[place] = sign * value
            assert not is_finite(many)


# ---- What is in a file -----------------------------------------------------------------------------------------------


def found_in(path, **heads):
    with open_tensors(path) as file:
        return {(found.layout, found.prefix): found for found in find_layers(file, **heads)}


def test_layers_are_found_with_their_prefix_and_every_layout_that_fits(tmp_path):
    bert = checkpoint((0, 1), MHA, "transformers.BERT", prefix="bert.encoder.layer.{i}.attention")
    found = found_in(
        write_tensor_file(tmp_path / "a.npz", bert | checkpoint((5, 16, 17), dtype="bfloat16")), num_heads=4
    )
    llama = found["transformers.LLaMA", PREFIX]
    assert (llama.layers, llama.heads, llama.dtype) == (3, "4 x 6, key/value 2", "bfloat16")
    other = found["transformers.BERT", "bert.encoder.layer.{i}.attention"]
    assert (other.layers, other.heads, other.dtype) == (2, "4 x 4, key/value 4", "float32")
    assert {prefix for _, prefix in found} == {PREFIX, "bert.encoder.layer.{i}.attention"}


def test_the_dtype_of_a_layer_is_that_of_its_weights_and_not_of_what_lies_beside(tmp_path):
    weights = {name: x.astype(np.float16) for name, x in random_weights(GQA).items()}
    tensors = {"blk.0.attn_norm.weight": np.ones(16, np.float32)}
    tensors |= {f"blk.0.{name}": x for name, x in from_canonical(weights, GQA, LAYOUTS["gguf.LLaMA"]).items()}
    found = found_in(write_tensor_file(tmp_path / "a.npz", tensors), **HEADS)
    assert found["gguf.LLaMA", "blk.{i}"].dtype == "float16"


def test_heads_that_are_not_known_are_told_as_such(tmp_path):
    found = found_in(write_tensor_file(tmp_path / "a.npz", checkpoint()))
    assert refuses("the heads").is_printed_in(found["transformers.LLaMA", PREFIX].heads)


def test_layers_of_other_heads_than_those_given_are_told_as_such(tmp_path):
    path = write_tensor_file(
        tmp_path / "a.npz", checkpoint() | checkpoint((0,), MHA, "transformers.BERT", prefix="bert.{i}")
    )
    found = found_in(path, num_heads=5)
    refusal = refuses("the heads", num_heads=5)
    assert all(refusal.is_printed_in(each.heads) for each in found.values())
    assert not any(refuses("…").is_printed_in(each.heads) for each in found_in(path, num_heads=4).values())


def test_nothing_is_found_where_there_is_nothing(tmp_path):
    assert found_in(write_tensor_file(tmp_path / "a.npz", rest(checkpoint()))) == {}


def test_layers_of_other_heads_under_one_prefix_are_told_apart(tmp_path):
    other = AttentionSpec(10, 4, num_kv_heads=1, head_dim=5, d_in=7)
    path = write_tensor_file(tmp_path / "a.npz", checkpoint((0, 1, 2)) | checkpoint((3,), other))
    with open_tensors(path) as file:
        found = [(f.layers, f.heads) for f in find_layers(file, num_heads=4) if f.layout == "transformers.LLaMA"]
    assert found == [(3, "4 x 6, key/value 2"), (1, "4 x 5, key/value 1")]


def test_inputs_beside_the_weights_survive_there_and_back(tmp_path):
    save(tmp_path / "a.npz", random_weights(GQA), GQA)
    tensors = read_tensors(tmp_path / "a.npz") | {"inputs.query": np.ones((1, 2, 7), np.float32)}
    write_tensor_file(tmp_path / "b.npz", tensors, read_metadata(tmp_path / "a.npz"))
    convert_file(tmp_path / "b.npz", tmp_path / "c.npz", target="meta.LLaMA")
    convert_file(tmp_path / "c.npz", tmp_path / "d.npz", target="canonical")
    assert bits_of(read_tensors(tmp_path / "d.npz")) == bits_of(tensors)


def test_a_layer_without_a_prefix_is_found(tmp_path):
    save(tmp_path / "a.npz", random_weights(GQA), GQA)
    assert found_in(tmp_path / "a.npz")["canonical", ""].layers == 1


# ---- The same attention ----------------------------------------------------------------------------------------------

BIASED = AttentionSpec(16, 4, num_kv_heads=2, head_dim=4, rope=Rope(500.0))


def first_wrong(weights, other, spec=BIASED):
    wrong = first_difference(verify(weights, spec, other, spec))
    return None if wrong is None else wrong.stage


def test_the_same_bits_hold_the_same_attention():
    weights = random_weights(BIASED)
    comparisons = verify(weights, BIASED, {**weights}, BIASED)
    assert all(comparison.passed for comparison in comparisons)
    assert [comparison.stage for comparison in comparisons][:3] == ["q", "k", "v"]
    assert same_bits(weights, {**weights})


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("seed", range(3))
def test_a_rounded_layer_holds_the_same_attention_up_to_rounding(dtype, seed):
    weights = random_weights(BIASED, seed=seed)
    rounded = {name: x.astype(dtype_named(dtype)) for name, x in weights.items()}
    assert first_wrong(weights, rounded) is None
    assert first_wrong(rounded, weights) is None
    assert not same_bits(weights, rounded)


@pytest.mark.parametrize(
    ("stage", "change"),
    [
        ("k", lambda w: {"k_proj.weight": w["v_proj.weight"], "v_proj.weight": w["k_proj.weight"]}),
        ("q", lambda w: {"q_proj.weight": w["q_proj.weight"].T}),
        ("output", lambda w: {"out_proj.weight": w["out_proj.weight"].T}),
        ("q", lambda w: {"q_proj.bias": 0 * w["q_proj.bias"]}),
        ("k", lambda w: {"k_proj.bias": 0 * w["k_proj.bias"]}),
        ("v", lambda w: {"v_proj.bias": 0 * w["v_proj.bias"]}),
        ("output", lambda w: {"out_proj.bias": 0 * w["out_proj.bias"]}),
        ("q", lambda w: {"q_proj.weight": w["q_proj.weight"] * np.float32(1.001)}),
        ("k", lambda w: {"k_proj.weight": np.roll(w["k_proj.weight"], 4, axis=0)}),  # groups of the other queries
        ("q", lambda w: {"q_proj.weight": w["q_proj.weight"].reshape(2, 2, 4, 16).swapaxes(0, 1).reshape(16, 16)}),
        ("v", lambda w: {"v_proj.weight": np.nextafter(w["v_proj.weight"], 9) + np.float32(1e-5)}),
    ],
    ids=[
        *("k-and-v-swapped", "q-transposed", "out-transposed", "no-q-bias", "no-k-bias", "no-v-bias", "no-out-bias"),
        *("q-scaled", "kv-heads-permuted", "groups-tiled-for-repeated", "v-shifted"),
    ],
)
def test_what_is_wrong_is_reported_at_its_stage(stage, change):
    weights = random_weights(BIASED)
    changed = {name: np.ascontiguousarray(x) for name, x in change(weights).items()}
    assert first_wrong(weights, {**weights, **changed}) == stage


@pytest.mark.parametrize("seed", range(5))
def test_the_wrong_pairing_of_features_is_reported(tmp_path, seed):
    weights = random_weights(GQA, seed=seed)
    tensors = from_canonical(weights, GQA, LAYOUTS["meta.LLaMA"])
    names = {"wq": "q_proj", "wk": "k_proj", "wv": "v_proj", "wo": "o_proj"}
    path = write_tensor_file(tmp_path / "a.npz", {f"{names[name[:2]]}{name[2:]}": x for name, x in tensors.items()})
    other, spec = load(path, "transformers.LLaMA", **HEADS)
    wrong = first_difference(verify(weights, GQA, other, spec))
    assert wrong is not None
    assert wrong.stage == "q"


def test_layers_that_are_not_alike_are_not_compared():
    with refuses("the layers", "500.0"):
        verify(random_weights(BIASED), BIASED, random_weights(BIASED), replace(BIASED, rope=None))


# ---- A layer that was trained, as llama.cpp writes it ----------------------------------------------------------------


def as_llama_cpp(weight, num_heads):
    """`permute` of llama.cpp's convert_hf_to_gguf.py."""
    half = weight.shape[0] // num_heads // 2
    return weight.reshape(num_heads, 2, half, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


@pytest.fixture
def smollm2(tmp_path):
    """A trained layer as a GGUF file and as half-split weights."""
    import gguf

    problem = make_problem(CASES["trained-smollm2-causal"], "float32")
    weights, spec = problem.weights, problem.spec
    writer = gguf.GGUFWriter(tmp_path / "layer.gguf", "llama")
    names = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "out_proj": "attn_output"}
    heads = {"q_proj": spec.num_heads, "k_proj": spec.num_kv_heads}
    for name, x in weights.items():
        projection = name.removesuffix(".weight")
        laid_out = as_llama_cpp(x, heads[projection]) if projection in heads else x
        writer.add_tensor(f"blk.7.{names[projection]}.weight", np.ascontiguousarray(laid_out))
    writer.add_tensor("blk.7.attn_norm.weight", np.ones(576, np.float32))
    writer.add_tensor("token_embd.weight", np.ones((4, 576), np.float32))
    writer.add_embedding_length(576)
    writer.add_head_count(spec.num_heads)
    writer.add_head_count_kv(spec.num_kv_heads)
    writer.add_rope_dimension_count(spec.head_dim)
    writer.add_rope_freq_base(spec.rope.theta)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "layer.gguf", weights, spec


def test_a_trained_layer_of_gguf_equals_the_half_split_one_bit_for_bit(smollm2):
    path, weights, spec = smollm2
    found, found_spec = load(path, "gguf.LLaMA", prefix="blk.7", **undetermined_fields(spec))
    assert same_bits(found, weights)
    assert all(comparison.passed for comparison in verify(found, found_spec, weights, found_spec))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda writer: writer.add_rope_dimension_count(4), "rope.dimension_count=4"),
        (lambda writer: writer.add_string("llama.rope.scaling.type", "yarn"), "rope.scaling.type=yarn"),
        (lambda writer: writer.add_tensor("rope_freqs.weight", np.ones(4, np.float32)), "rope_freqs.weight"),
    ],
)
def test_rope_of_a_gguf_file_that_is_not_read_is_named(tmp_path, change, words):
    spec = gguf_layer(tmp_path / "layer.gguf", "llama", change)
    with pytest.warns(NotCarriedWarning, match=f"GGUF sets {words}"):
        _, found = load(tmp_path / "layer.gguf", "gguf.LLaMA", prefix="blk.0")
    assert found == spec


def gguf_layer(path, family, change):
    """A GGUF file of one layer, with changes; and the layer without RoPE."""
    import gguf

    spec = AttentionSpec(32, 4, num_kv_heads=2, qkv_bias=False, out_bias=False)
    writer = gguf.GGUFWriter(path, family)
    for name, x in from_canonical(random_weights(spec), spec, LAYOUTS["gguf.LLaMA"]).items():
        writer.add_tensor(f"blk.0.{name}", x)
    writer.add_embedding_length(32)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(500.0)
    writer.add_layer_norm_rms_eps(1e-6)
    change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return spec


UNREAD = {
    "attn_logit_softcapping=50.0": lambda writer: writer.add_attn_logit_softcapping(50.0),
    "attention.sliding_window=4096": lambda writer: writer.add_sliding_window(4096),
    "attention.scale=0.125": lambda writer: writer.add_attention_scale(0.125),
    "attention.max_alibi_bias=8.0": lambda writer: writer.add_max_alibi_bias(8.0),
    "attention.clamp_kqv=6.0": lambda writer: writer.add_clamp_kqv(6.0),
    "attention.value_length=16": lambda writer: writer.add_value_length(16),
}


@sample(12)
@pytest.mark.parametrize("family", ["gemma2", "gpt-oss", "llama"])
@pytest.mark.parametrize("words", UNREAD)
@pytest.mark.parametrize("said", [{}, {"num_heads": 4}, {"rope": Rope(500.0)}], ids=["", "heads", "RoPE"])
def test_attention_of_a_gguf_file_that_is_not_read_is_named(words, family, said, tmp_path):
    spec = gguf_layer(tmp_path / "layer.gguf", family, UNREAD[words])
    with pytest.warns(NotCarriedWarning, match=f"GGUF sets {re.escape(words)}, .*accepts a complete spec=") as caught:
        _, found = load(tmp_path / "layer.gguf", "gguf.Qwen2", prefix="blk.0", **said)
    assert "RoPE is left out" not in str(caught[0].message)
    assert found == replace(spec, rope=Rope(500.0))
    with warnings.catch_warnings(action="error"):
        _, found = load(tmp_path / "layer.gguf", "gguf.Qwen2", prefix="blk.0", spec=spec)
    assert found == spec


def test_a_window_of_a_whole_gguf_model_is_refused(tmp_path):
    """llama.cpp has no window for the architecture `llama`, and neither has its configuration."""

    def change(writer):
        writer.add_block_count(1)
        writer.add_sliding_window(4)

    gguf_layer(tmp_path / "layer.gguf", "llama", change)
    with refuses("the values of …layer.gguf"):
        load(tmp_path / "layer.gguf", prefix="blk.0")


def test_a_number_of_a_whole_gguf_model_that_is_none_is_refused(tmp_path):
    def change(writer):
        writer.add_block_count(1)
        writer.add_string("qwen2.attention.sliding_window", "16.0")

    gguf_layer(tmp_path / "layer.gguf", "qwen2", change)
    with refuses("the values of …layer.gguf", "attention.sliding_window"):
        load(tmp_path / "layer.gguf", prefix="blk.0")


def test_rope_of_no_feature_in_a_gguf_file_is_not_read(tmp_path):
    gguf_layer(tmp_path / "layer.gguf", "qwen2", lambda writer: writer.add_rope_dimension_count(0))
    with pytest.warns(NotCarriedWarning, match=r"GGUF sets rope\.dimension_count=0, .*: RoPE is left out"):
        load(tmp_path / "layer.gguf", "gguf.Qwen2", prefix="blk.0")


def test_lists_and_nothings_of_a_gguf_file(tmp_path):
    def change(writer):
        writer.add_attn_logit_softcapping(0.0)
        writer.add_value_length(8)
        writer.add_rope_dimension_sections([1, 1, 2, 0])

    gguf_layer(tmp_path / "layer.gguf", "qwen2vl", change)
    with pytest.warns(
        NotCarriedWarning, match=r"GGUF sets rope\.dimension_sections=a list of 4, .*: RoPE is left out"
    ) as on:
        _, found = load(tmp_path / "layer.gguf", "gguf.Qwen2", prefix="blk.0")
    assert "complete spec" not in str(on[0].message)
    assert found.rope is None


def test_sinks_of_a_gguf_file_are_refused_by_name(tmp_path):
    gguf_layer(
        tmp_path / "a.gguf", "gpt-oss", lambda writer: writer.add_tensor("blk.0.attn_sinks.weight", np.ones(4, "f4"))
    )
    with refuses("tensors", "unknown names ['attn_sinks.weight']", where="blk.0"):
        load(tmp_path / "a.gguf", "gguf.Qwen2", prefix="blk.0")


def test_a_whole_gguf_file_is_converted(smollm2, tmp_path):
    path, weights, spec = smollm2
    done = convert_file(
        path,
        tmp_path / "b.safetensors",
        source="gguf.LLaMA",
        target="transformers.LLaMA",
        prefix="blk.{i}",
        to_prefix=PREFIX,
        **undetermined_fields(spec),
    )
    assert sorted(done.kept) == ["blk.7.attn_norm.weight", "token_embd.weight"]
    assert same_bits(load(tmp_path / "b.safetensors")[0], weights)


def test_a_gguf_file_that_tells_its_heads_needs_no_flags(smollm2, tmp_path):
    path, weights, spec = smollm2
    found, found_spec = load(path, "gguf.LLaMA", prefix="blk.7")
    assert same_bits(found, weights)
    assert undetermined_fields(found_spec) == undetermined_fields(spec)


def test_a_trained_layer_of_gguf_read_as_half_split_is_reported(smollm2, tmp_path):
    path, weights, spec = smollm2
    names = {"attn_q": "q_proj", "attn_k": "k_proj", "attn_v": "v_proj", "attn_output": "o_proj"}
    tensors = {name.split(".")[2]: x for name, x in read_tensors(path).items() if name.split(".")[-2] in names}
    wrong = write_tensor_file(tmp_path / "wrong.npz", {f"{names[name]}.weight": x for name, x in tensors.items()})
    other, other_spec = load(wrong, "transformers.LLaMA", **undetermined_fields(spec))
    difference = first_difference(verify(weights, spec, other, other_spec))
    assert difference is not None
    assert difference.stage == "q"

"""Conversion: layers in memory, checkpoints in files, and whether two files hold the same
attention.
"""

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
from helpers.input_errors import rejects, rejects_type
from helpers.layouts import layout_fits, undetermined_fields
from helpers.samples import sample
from helpers.tensors import bits_of, read_metadata, read_tensors, write_tensor_file

import mha_torch
from mha_spec import AttentionSpec, Rope
from parity import (
    CASES,
    IgnoredSettingsWarning,
    make_problem,
    random_weights,
    save,
    spec_of,
    to_jax,
    weights_of,
)
from parity.explain.diagnosis.weights.verify import verify
from parity.measure.core.compare import first_difference
from parity.measure.core.weights import dtype_named, is_finite
from parity.measure.files import open_tensors, write_tensors
from parity.port.conversion.bits import same_bits
from parity.port.conversion.checkpoint import Checkpoint
from parity.port.conversion.convert import convert, convert_file, load
from parity.port.conversion.inspect import find_layers
from parity.port.conversion.layouts import LAYOUTS, from_canonical

GQA = AttentionSpec(
    16, 4, num_kv_heads=2, head_dim=6, d_in=16, qkv_bias=False, out_bias=False, rope=Rope(500.0)
)
MHA = AttentionSpec(16, 4)
HEADS = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 6, "rope": Rope(500.0)}
PREFIX = "model.layers.{i}.self_attn"


KINDS = {"GQA": GQA, "MHA": MHA}
HOLDING = {
    kind: [name for name, layout in LAYOUTS.items() if layout_fits(layout, spec)]
    for kind, spec in KINDS.items()
}


def any_bits(shape, seed):
    """Finite bfloat16 values of all sizes."""
    values = np.random.default_rng(seed).integers(0, 1 << 16, shape).astype(np.uint16)
    return (
        np.where(values & 0x7F80 == 0x7F80, values & 0x807F, values)
        .astype(np.uint16)
        .view(ml_dtypes.bfloat16)
    )


def checkpoint(
    numbers=(0, 1, 2), spec=GQA, layout="transformers.LLaMA", dtype="float32", prefix=PREFIX
):
    """Layers among other tensors, not sorted by name."""
    tensors = {"model.embed_tokens.weight": np.arange(12, dtype=np.int32).reshape(3, 4)}
    for number in numbers:
        weights = {
            n: x.astype(dtype_named(dtype)) for n, x in random_weights(spec, seed=number).items()
        }
        for name, x in from_canonical(weights, spec, LAYOUTS[layout]).items():
            tensors[f"{prefix.replace('{i}', str(number))}.{name}"] = x
        tensors[f"model.layers.{number}.mlp.up_proj.weight"] = any_bits((5, 3), number)
    return tensors | {
        "lm_head.weight": np.array([np.nan, -0.0], np.float16),
        "a.step": np.array(7, np.int64),
    }


def rest(tensors):
    return {name: x for name, x in tensors.items() if "self_attn" not in name}


# ---- In memory -----------------------------------------------------------------------------------


@functools.cache
def tensors_of(spec, layout):
    return from_canonical(random_weights(spec), spec, LAYOUTS[layout])


@sample(12)
@pytest.mark.parametrize(
    ("kind", "source"), [(kind, source) for kind in KINDS for source in HOLDING[kind]]
)
def test_every_layout_pair_round_trips(kind, source):
    """Weights of each layout convert to each later layout and back, bit for bit."""
    spec, names = KINDS[kind], HOLDING[kind]
    tensors, wrong = tensors_of(spec, source), []
    for target in names[names.index(source) + 1 :]:  # each pair once, in both directions
        there = convert(tensors, source=source, target=target, **undetermined_fields(spec))
        back = convert(there, source=target, target=source, **undetermined_fields(spec))
        if bits_of(there) != bits_of(tensors_of(spec, target)) or bits_of(back) != bits_of(tensors):
            wrong.append(target)
    assert wrong == []


def test_unknown_target_layout_raises():
    """The unknown layout `torch` as a target raises an error."""
    with rejects("target", target="torch"):
        convert(random_weights(MHA), source="canonical", target="torch", num_heads=4)


def test_unsupported_layer_raises():
    """Converting grouped heads to Flax Linen's layout raises an error."""
    with rejects("the layer"):
        convert(random_weights(GQA), source="canonical", target="flax.linen", **HEADS)


# ---- Whole checkpoints ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("target", ["meta.LLaMA", "qkv_proj", "flax.nnx", "ttnn", "canonical"])
def test_checkpoint_round_trip_is_exact(tmp_path, target, dtype):
    """A checkpoint converts in three dtypes, and back bit for bit by its metadata alone."""
    tensors = checkpoint(dtype=dtype)
    source = write_tensor_file(tmp_path / "a.safetensors", tensors)
    convert_file(
        source,
        tmp_path / "b.safetensors",
        source="transformers.LLaMA",
        target=target,
        prefix=PREFIX,
        **HEADS,
    )
    convert_file(
        tmp_path / "b.safetensors", tmp_path / "c.safetensors", target="transformers.LLaMA"
    )
    assert bits_of(read_tensors(tmp_path / "c.safetensors")) == bits_of(tensors)


def test_layers_convert_independently(tmp_path):
    """Each of four layers converts as it would alone, and the result lists all of them."""
    numbers = (0, 3, 10, 11)
    tensors = checkpoint(numbers)
    source = write_tensor_file(tmp_path / "a.safetensors", tensors)
    done = convert_file(
        source,
        tmp_path / "b.npz",
        source="transformers.LLaMA",
        target="meta.LLaMA",
        prefix=PREFIX,
        **HEADS,
    )
    converted = read_tensors(tmp_path / "b.npz")
    assert done.layers == [PREFIX.format(i=number) for number in numbers]
    assert done.source == "transformers.LLaMA"
    assert undetermined_fields(done.spec) == HEADS
    for number in numbers:
        begin = f"{PREFIX.format(i=number)}."
        layer = {
            name.removeprefix(begin): x for name, x in converted.items() if name.startswith(begin)
        }
        assert bits_of(layer) == bits_of(
            from_canonical(random_weights(GQA, seed=number), GQA, LAYOUTS["meta.LLaMA"])
        )


def test_other_tensors_keep_bits_and_order(tmp_path):
    """Tensors outside layers keep their bits and their order in the file, and are listed."""
    tensors = checkpoint()
    source = write_tensor_file(tmp_path / "a.npz", tensors)
    done = convert_file(
        source,
        tmp_path / "b.npz",
        source="transformers.LLaMA",
        target="qkv_proj",
        prefix=PREFIX,
        **HEADS,
    )
    converted = read_tensors(tmp_path / "b.npz")
    assert bits_of(rest(converted)) == bits_of(rest(tensors))
    assert (done.copied, done.dropped) == (list(rest(tensors)), [])
    steps = [[name.partition("self_attn")[0] for name in these] for these in (converted, tensors)]
    assert list(dict.fromkeys(steps[0])) == list(dict.fromkeys(steps[1]))


def test_other_tensors_drop_on_request(tmp_path):
    """keep_rest=False omits all tensors outside layers, and lists them as dropped."""
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
    assert (done.copied, done.dropped) == ([], list(rest(tensors)))


def test_layers_get_new_prefix(tmp_path):
    """Layers 2 and 13 move to a new prefix, which the metadata contain."""
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


def test_prefix_numbers_keep_their_order(tmp_path):
    """Two numbers in a prefix keep their order in the new prefix."""
    prefix, to_prefix = "stack.{i}.layer.{i}", "s{i}.l{i}"
    tensors = {}
    for numbers in ((0, 12), (1, 0)):
        begin = "stack.{}.layer.{}".format(*numbers)
        tensors |= {
            f"{begin}.{name}": x for name, x in random_weights(MHA, seed=list(numbers)).items()
        }
    convert_file(
        write_tensor_file(tmp_path / "a.npz", tensors),
        tmp_path / "b.npz",
        source="canonical",
        target="W_q",
        prefix=prefix,
        to_prefix=to_prefix,
        num_heads=4,
    )
    converted = read_tensors(tmp_path / "b.npz")
    assert converted.keys() == {
        f"{p}.W_{w}.{leaf}"
        for p in ("s0.l12", "s1.l0")
        for w in "qkvo"
        for leaf in ("weight", "bias")
    }
    assert (converted["s0.l12.W_k.weight"] == tensors["stack.0.layer.12.k_proj.weight"]).all()


@pytest.mark.parametrize("to_prefix", ["layers.{i}.{i}", "{i}.layers.{i}.{i}"])
def test_mismatched_placeholders_raise(tmp_path, to_prefix):
    """A target prefix with more placeholders than the source prefix raises an error."""
    source = write_tensor_file(tmp_path / "a.npz", checkpoint())
    with rejects("to_prefix", to_prefix=to_prefix, prefix="model.layers.{i}.self_attn"):
        convert_file(
            source,
            tmp_path / "b.npz",
            source="transformers.LLaMA",
            target="W_q",
            prefix=PREFIX,
            to_prefix=to_prefix,
            **HEADS,
        )


def test_colliding_target_names_raise(tmp_path):
    """A converted tensor with the name of an existing one raises an error."""
    tensors = checkpoint() | {"layers.1.attention.wq.weight": np.zeros(3, np.float32)}
    fails_to_convert(
        tmp_path,
        tensors,
        rejects("names", "layers.1.attention.wq.weight twice"),
        to_prefix="layers.{i}.attention",
    )


def fails_to_convert(tmp_path, tensors, input_error, **options):
    """Check that a conversion raises an error of one line and changes no file."""
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
    with input_error:
        convert_file(source, tmp_path / "b.npz", **options)
    assert "\n" not in str(input_error.value)
    assert (tmp_path / "b.npz").read_bytes() == old
    assert {path.name for path in tmp_path.iterdir()} == {"a.npz", "b.npz"}


Q1 = "model.layers.1.self_attn.q_proj.weight"


def test_mixed_dtypes_in_a_layer_raise(tmp_path):
    """A layer with float16 and float32 tensors raises an error with both dtypes."""
    tensors = checkpoint()
    tensors[Q1] = tensors[Q1].astype(np.float16)
    fails_to_convert(
        tmp_path, tensors, rejects("model.layers.1.self_attn", "['float16', 'float32']")
    )


def test_integer_layer_raises(tmp_path):
    """A layer of int8 tensors raises an error with the dtype."""
    tensors = {
        name: x.astype(np.int8) if "self_attn" in name else x for name, x in checkpoint().items()
    }
    fails_to_convert(tmp_path, tensors, rejects("model.layers.0.self_attn", "['int8']"))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_non_finite_layer_raises(tmp_path, value, dtype):
    """A NaN or an infinity in a layer raises an error with the tensor, and nothing is written."""
    tensors = checkpoint(dtype=dtype)
    tensors[Q1][-1, -1] = value
    fails_to_convert(
        tmp_path, tensors, rejects("model.layers.1.self_attn.q_proj.weight", "NaN or infinities")
    )


def test_unknown_tensors_in_a_layer_raise(tmp_path):
    """Unknown tensors of a layer, such as norms, raise an error with their names."""
    tensors = checkpoint() | {"model.layers.1.self_attn.qk_norm.weight": np.ones(6, np.float32)}
    fails_to_convert(
        tmp_path,
        tensors,
        rejects("tensors", "unknown names ['qk_norm.weight']", where="model.layers.1.self_attn"),
    )
    tensors = checkpoint() | {"model.layers.1.self_attn.q_norm.weight": np.ones(6, np.float32)}
    message = rejects(
        "the purpose of ['q_norm.weight'] in transformers.LLaMA", where="model.layers.1.self_attn"
    )
    fails_to_convert(tmp_path, tensors, message)


def test_layer_without_a_tensor_raises(tmp_path):
    """A layer without its query weight raises an error that names the layer."""
    tensors = checkpoint()
    del tensors[Q1]
    fails_to_convert(tmp_path, tensors, rejects("tensors", where="model.layers.1.self_attn"))


@pytest.mark.parametrize(
    "prefix",
    [
        *("", "model.layers.{i}.attn", "model.layers.{i}.self", "odel.layers.{i}.self_attn"),
        *("model.layers.{i}.self_attn.", "model.layers.*.self_attn", "model.layers.9.self_attn"),
    ],
)
def test_wrong_prefix_suggests_the_right_one(tmp_path, prefix):
    """A prefix that matches no layer raises an error that suggests the right prefix."""
    input_error = rejects("prefix", prefix=prefix)
    fails_to_convert(tmp_path, checkpoint(), input_error, prefix=prefix)
    assert input_error.value.remedy == [{"prefix": "model.layers.{i}.self_attn"}]


def test_prefix_is_not_a_pattern(tmp_path):
    """A prefix is not a regular expression: its dots match only dots."""
    fails_to_convert(
        tmp_path,
        checkpoint(),
        rejects("prefix", prefix="model.layers...self_attn"),
        prefix="model.layers...self_attn",
    )


def test_missing_head_sizes_raise(tmp_path):
    """Converting a checkpoint without head sizes raises an error that names the layer."""
    fails_to_convert(
        tmp_path,
        checkpoint(),
        rejects("the heads", where="model.layers.0.self_attn"),
        num_heads=None,
        num_kv_heads=None,
        head_dim=None,
    )


def test_missing_source_layout_raises(tmp_path):
    """Converting a checkpoint without its layout raises an error."""
    fails_to_convert(
        tmp_path,
        checkpoint(),
        rejects("source"),
        source=None,
    )


def test_gguf_as_target_raises(tmp_path):
    """Converting to a GGUF file raises an error: such files are only read."""
    source = write_tensor_file(tmp_path / "a.npz", checkpoint())
    with rejects("…/b.gguf", "'.gguf'; GGUF files are only read"):
        convert_file(
            source,
            tmp_path / "b.gguf",
            source="transformers.LLaMA",
            target="gguf.LLaMA",
            prefix=PREFIX,
            **HEADS,
        )


def test_layers_may_differ_in_shape(tmp_path):
    """Layers with 4 and 6 heads round-trip bit for bit, without a common spec in metadata."""
    wide = replace(GQA, num_heads=6)
    tensors = checkpoint((0,))
    tensors |= {
        f"{PREFIX.format(i=1)}.{n.replace('out_', 'o_')}": x
        for n, x in random_weights(wide).items()
    }
    source = write_tensor_file(tmp_path / "a.npz", tensors)
    heads = {"num_kv_heads": 2, "head_dim": 6, "rope": Rope(500.0)}
    done = convert_file(
        source,
        tmp_path / "b.npz",
        source="transformers.LLaMA",
        target="meta.LLaMA",
        prefix=PREFIX,
        **heads,
    )
    assert done.spec is None
    assert "spec" not in read_metadata(tmp_path / "b.npz")
    convert_file(tmp_path / "b.npz", tmp_path / "c.npz", target="transformers.LLaMA", **heads)
    assert bits_of(read_tensors(tmp_path / "c.npz")) == bits_of(tensors)


def test_layer_missing_by_metadata_is_named(tmp_path):
    """A layer that only metadata of ours describe is warned about, at the line of the caller."""
    weights = {0: random_weights(GQA), 1: random_weights(replace(GQA, num_heads=6))}
    tensors = {}
    for index, of_layer in weights.items():
        for name, x in of_layer.items():
            tensors[f"{PREFIX.format(i=index)}.{name.replace('out_', 'o_')}"] = x
    heads = {"num_kv_heads": 2, "head_dim": 6, "rope": Rope(500.0)}
    source = write_tensor_file(tmp_path / "a.npz", tensors)
    whole = tmp_path / "b.npz"
    convert_file(
        source, whole, source="transformers.LLaMA", target="canonical", prefix=PREFIX, **heads
    )
    metadata = {name: text for name, text in read_metadata(whole).items() if name != "sha256"}
    of_first = {name: x for name, x in read_tensors(whole).items() if ".1." not in name}
    part = write_tensor_file(tmp_path / "c.npz", of_first, metadata)
    with pytest.warns(IgnoredSettingsWarning, match=r"or its metadata describes .*\.1\.") as warned:
        load(part)
    assert warned[0].filename == __file__


def test_ignored_buffer_is_kept(tmp_path):
    """A buffer in a layer that the layout ignores is kept bit for bit under its name."""
    tensors = checkpoint() | {
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.array([1, np.inf], np.float16)
    }
    source = write_tensor_file(tmp_path / "a.npz", tensors)
    done = convert_file(
        source,
        tmp_path / "b.npz",
        source="transformers.LLaMA",
        target="meta.LLaMA",
        prefix=PREFIX,
        **HEADS,
    )
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    assert name in done.copied
    assert bits_of({name: read_tensors(tmp_path / "b.npz")[name]}) == bits_of({name: tensors[name]})


def test_shards_are_read_and_written(tmp_path):
    """A sharded bfloat16 checkpoint converts to more than three shards, and back bit for bit."""
    tensors = checkpoint(dtype="bfloat16")
    infos = {name: (x.shape, x.dtype) for name, x in tensors.items()}
    source = write_tensors(
        tmp_path / "a.safetensors", infos, tensors.__getitem__, max_shard_bytes=600
    )
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


def test_metadata_describe_the_conversion(tmp_path):
    """Metadata contain layout, RoPE pairing, prefix, head sizes, specification and hash."""
    source = write_tensor_file(tmp_path / "a.npz", checkpoint())
    convert_file(
        source,
        tmp_path / "b.safetensors",
        source="transformers.LLaMA",
        target="meta.LLaMA",
        prefix=PREFIX,
        **HEADS,
    )
    metadata = read_metadata(tmp_path / "b.safetensors")
    assert metadata["layout"] == "meta.LLaMA"
    assert metadata["rope"] == "interleaved"
    assert metadata["prefix"] == PREFIX
    assert (metadata["num_heads"], metadata["num_kv_heads"], metadata["head_dim"]) == (
        "4",
        "2",
        "6",
    )
    assert undetermined_fields(AttentionSpec.from_json(metadata["spec"])) == HEADS
    with open_tensors(tmp_path / "b.safetensors") as file:
        file.verify()
        assert metadata["sha256"] == file.sha256()


def test_foreign_metadata_are_ignored(tmp_path):
    """Metadata of other programs under our keys do not prevent a conversion."""
    metadata = {"format": "pt", "spec": "of something else", "prefix": "none of ours"}
    source = write_tensor_file(tmp_path / "a.safetensors", checkpoint(), metadata)
    done = convert_file(
        source,
        tmp_path / "b.npz",
        source="transformers.LLaMA",
        target="meta.LLaMA",
        prefix=PREFIX,
        **HEADS,
    )
    assert len(done.layers) == 3


def test_conversion_is_deterministic(tmp_path):
    """Two conversions of a file write the same bytes."""
    source = write_tensor_file(tmp_path / "a.npz", checkpoint())
    for name in ("b.safetensors", "c.safetensors"):
        convert_file(
            source,
            tmp_path / name,
            source="transformers.LLaMA",
            target="W_q",
            prefix=PREFIX,
            **HEADS,
        )
    assert (tmp_path / "b.safetensors").read_bytes() == (tmp_path / "c.safetensors").read_bytes()


def test_conversion_onto_its_source_raises(tmp_path):
    """Converting a file onto itself raises an error, also with force, and keeps the file."""
    tensors = checkpoint()
    path = write_tensor_file(tmp_path / "a.safetensors", tensors)
    options = {
        "source": "transformers.LLaMA",
        "target": "meta.LLaMA",
        "prefix": PREFIX,
        "force": True,
        **HEADS,
    }
    with rejects("the target", path=path, source=path):
        convert_file(path, path, **options)
    assert bits_of(read_tensors(path)) == bits_of(tensors)


def test_force_replaces_the_target(tmp_path):
    """An existing target raises FileExistsError and is kept; force=True replaces it."""
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


def test_on_tensor_receives_each_name_once(tmp_path):
    """on_tensor is called once with each tensor's name, in the order of the written file."""
    source, names = write_tensor_file(tmp_path / "a.npz", checkpoint()), []
    convert_file(
        source,
        tmp_path / "b.npz",
        source="transformers.LLaMA",
        target="W_q",
        prefix=PREFIX,
        on_tensor=names.append,
        **HEADS,
    )
    assert names == list(read_tensors(tmp_path / "b.npz"))


MEMORY = """
import sys
import warnings
from pathlib import Path
import ml_dtypes, numpy as np
from parity.port.conversion.convert import convert_file
from parity.measure.files import write_tensors
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


@pytest.mark.thorough
@pytest.mark.costly("the memory of a process")
@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells the peak of memory in /proc")
@pytest.mark.parametrize(
    ("target", "sizes", "largest"),  # sizes: layers, their width, heads, key/value heads
    [
        pytest.param("meta.LLaMA", [12, 1536, 12, 4], 2 * 8192 * 1536, id="many-layers"),
        pytest.param("qkv_proj", [12, 1536, 12, 4], 2 * 8192 * 1536, id="many-packed-layers"),
        pytest.param(
            "qkv_proj", [1, 3072, 32, 32], 2 * 3 * 4096 * 3072, id="one-large-packed-layer"
        ),
    ],
)
def test_conversion_memory_is_bounded(tmp_path, target, sizes, largest):
    """Peak memory is below 1.5 times the largest tensor plus 50 MB, for a file above 125 MB."""
    command = [sys.executable, "-c", MEMORY, str(tmp_path), target, *map(str, sizes)]
    peak, size = map(
        int, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    )
    assert size > 125e6
    assert peak < 1.5 * largest + 50e6
    for path in tmp_path.iterdir():
        path.unlink()


# ---- One layer -----------------------------------------------------------------------------------


@sample(12)
@pytest.mark.parametrize("suffix", ["safetensors", "npz", "pt", "msgpack"])
@pytest.mark.parametrize("layout", ["canonical", "meta.LLaMA", "qkv_proj", "ttnn"])
@pytest.mark.parametrize("prefix", ["", "blocks.3.attention"])
def test_saved_layer_loads_unchanged(tmp_path, suffix, layout, prefix):
    """A saved layer loads with the same bits and spec in each format, layout and prefix."""
    path = tmp_path / f"layer.{suffix}"
    weights = {name: any_bits(x.shape, len(name)) for name, x in random_weights(GQA).items()}
    save(path, weights, GQA, layout, prefix=prefix)
    loaded, spec = load(path)
    assert same_bits(loaded, weights)
    assert spec == GQA


def test_one_of_many_layers_loads(tmp_path):
    """A prefix with a number loads layer 14, not layer 4, bit for bit."""
    path = write_tensor_file(tmp_path / "a.npz", checkpoint((4, 14)))
    weights, spec = load(path, "transformers.LLaMA", prefix=PREFIX.format(i=14), **HEADS)
    assert same_bits(weights, random_weights(GQA, seed=14))
    assert undetermined_fields(spec) == HEADS


def test_loading_several_layers_raises(tmp_path):
    """Loading with a prefix of three layers raises an error with their number."""
    path = write_tensor_file(tmp_path / "a.npz", checkpoint())
    with rejects("prefix", "3"):
        load(path, "transformers.LLaMA", prefix=PREFIX, **HEADS)


def test_loading_a_non_finite_layer_raises(tmp_path):
    """Loading a layer with a NaN raises an error with the tensor's name."""
    tensors = checkpoint()
    tensors[Q1][0, 0] = np.nan
    with rejects("model.layers.1.self_attn.q_proj.weight", "NaN or infinities"):
        load(
            write_tensor_file(tmp_path / "a.npz", tensors),
            "transformers.LLaMA",
            prefix=PREFIX.format(i=1),
            **HEADS,
        )


def test_module_is_saved_with_its_spec(tmp_path):
    """A module is saved with its own spec; a different spec, or arrays without one, raise."""
    spec = replace(GQA, fused_qkv=True)
    module = mha_torch.MultiHeadAttention(spec)
    save(tmp_path / "a.npz", module)
    weights, loaded_spec = load(tmp_path / "a.npz")
    assert same_bits(weights, weights_of(module))
    assert loaded_spec == spec
    with rejects("the module", "rope=Rope(theta=500.0) and rope=None"):
        save(tmp_path / "b.npz", module, replace(GQA, rope=None))
    with rejects_type("spec", spec=None):
        save(tmp_path / "b.npz", random_weights(GQA))
    assert not (tmp_path / "b.npz").exists()


def test_torch_weights_convert_and_save(tmp_path):
    """bfloat16 weights of torch.nn.MultiheadAttention convert, save and load bit for bit."""
    layer = torch.nn.MultiheadAttention(16, 4).bfloat16()
    converted = convert(
        layer.state_dict(), source="torch.nn.MultiheadAttention", target="canonical", num_heads=4
    )
    assert same_bits(converted, weights_of(layer))
    save(tmp_path / "a.npz", {name: to_jax(x) for name, x in converted.items()}, spec_of(layer))
    assert same_bits(load(tmp_path / "a.npz")[0], converted)


@pytest.mark.costly("converts and runs a whole model")
def test_conversion_guide_example_runs(tmp_path, monkeypatch):
    """The code of docs/how-to/convert.md runs, and its weights equal the weights of its layers."""
    page = (ROOT / "docs" / "how-to" / "convert.md").read_text(encoding="utf-8")
    code = "".join(re.findall(r"^```python\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL))
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(compile(code, "convert.md", "exec"), names)
    assert (str(names["kernel"].dtype), names["kernel"].shape) == ("bfloat16", (64, 8, 8))
    assert same_bits(names["weights"], weights_of(names["layer"]))
    assert same_bits(weights_of(names["filled"]), weights_of(names["layer"]))


def test_incomplete_weights_are_not_saved(tmp_path):
    """Saving a layer without k_proj.weight raises an error and writes nothing."""
    weights = random_weights(GQA)
    del weights["k_proj.weight"]
    with rejects("weights", missing=["k_proj.weight"], unexpected=[]):
        save(tmp_path / "a.npz", weights, GQA)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize("sign", [1, -1])
def test_is_finite_detects_nan_and_infinity(dtype, sign):
    """is_finite accepts extreme and subnormal values, and detects a NaN or infinity anywhere."""
    dtype = dtype_named(dtype)
    extremes = ml_dtypes.finfo(dtype)
    values = np.array(
        [extremes.max, extremes.tiny, extremes.smallest_subnormal, 0.0], dtype
    ) * dtype.type(sign)
    assert is_finite(values)
    assert is_finite(values[:0])
    assert is_finite(values[:1].reshape(()))
    for value in (np.nan, np.inf):
        assert not is_finite(np.append(values, dtype.type(sign) * dtype.type(value)))
        assert not is_finite(np.full((3, 5), sign * value, dtype).T[::2])
        for index in (0, 65535, 65536, 199999):
            many = np.zeros(200000, dtype)
            many[index] = sign * value
            assert not is_finite(many)


# ---- Layers in a file ----------------------------------------------------------------------------


def layers_by_layout(path, **heads):
    with Checkpoint.open(path) as checkpoint:
        return {(layer.layout, layer.prefix): layer for layer in find_layers(checkpoint, **heads)}


def test_layers_are_found_with_their_layout(tmp_path):
    """Layers of two models in a file are found with layout, prefix, number, heads and dtype."""
    bert = checkpoint((0, 1), MHA, "transformers.BERT", prefix="bert.encoder.layer.{i}.attention")
    layers = layers_by_layout(
        write_tensor_file(tmp_path / "a.npz", bert | checkpoint((5, 16, 17), dtype="bfloat16")),
        num_heads=4,
    )
    llama = layers["transformers.LLaMA", PREFIX]
    assert (llama.layers, llama.heads, llama.dtype) == (3, "4 x 6, key/value 2", "bfloat16")
    other = layers["transformers.BERT", "bert.encoder.layer.{i}.attention"]
    assert (other.layers, other.heads, other.dtype) == (2, "4 x 4, key/value 4", "float32")
    assert {prefix for _, prefix in layers} == {PREFIX, "bert.encoder.layer.{i}.attention"}


def test_layer_dtype_ignores_other_tensors(tmp_path):
    """The dtype of a float16 layer is float16, although a norm next to it is float32."""
    weights = {name: x.astype(np.float16) for name, x in random_weights(GQA).items()}
    tensors = {"blk.0.attn_norm.weight": np.ones(16, np.float32)}
    tensors |= {
        f"blk.0.{name}": x
        for name, x in from_canonical(weights, GQA, LAYOUTS["gguf.LLaMA"]).items()
    }
    layers = layers_by_layout(write_tensor_file(tmp_path / "a.npz", tensors), **HEADS)
    assert layers["gguf.LLaMA", "blk.{i}"].dtype == "float16"


def test_unknown_heads_are_reported(tmp_path):
    """find_layers reports an error about the heads of a layer if no hints are given."""
    layers = layers_by_layout(write_tensor_file(tmp_path / "a.npz", checkpoint()))
    assert rejects("the heads").is_printed_in(layers["transformers.LLaMA", PREFIX].heads)


def test_unsuitable_heads_are_reported(tmp_path):
    """find_layers reports an error for each layer with num_heads=5, and none with num_heads=4."""
    path = write_tensor_file(
        tmp_path / "a.npz",
        checkpoint() | checkpoint((0,), MHA, "transformers.BERT", prefix="bert.{i}"),
    )
    layers = layers_by_layout(path, num_heads=5)
    input_error = rejects("the heads", num_heads=5)
    assert all(input_error.is_printed_in(layer.heads) for layer in layers.values())
    assert not any(
        rejects("…").is_printed_in(layer.heads)
        for layer in layers_by_layout(path, num_heads=4).values()
    )


def test_file_without_layers_has_none(tmp_path):
    """find_layers returns nothing for a file without attention layers."""
    assert layers_by_layout(write_tensor_file(tmp_path / "a.npz", rest(checkpoint()))) == {}


def test_layers_are_grouped_by_heads(tmp_path):
    """Layers under one prefix with different heads are listed separately."""
    other = AttentionSpec(10, 4, num_kv_heads=1, head_dim=5, d_in=7)
    path = write_tensor_file(tmp_path / "a.npz", checkpoint((0, 1, 2)) | checkpoint((3,), other))
    with Checkpoint.open(path) as opened:
        layers = [
            (f.layers, f.heads)
            for f in find_layers(opened, num_heads=4)
            if f.layout == "transformers.LLaMA"
        ]
    assert layers == [(3, "4 x 6, key/value 2"), (1, "4 x 5, key/value 1")]


def test_saved_inputs_survive_a_round_trip(tmp_path):
    """Inputs saved next to the weights survive a conversion and back, bit for bit."""
    save(tmp_path / "a.npz", random_weights(GQA), GQA)
    tensors = read_tensors(tmp_path / "a.npz") | {"inputs.query": np.ones((1, 2, 7), np.float32)}
    write_tensor_file(tmp_path / "b.npz", tensors, read_metadata(tmp_path / "a.npz"))
    convert_file(tmp_path / "b.npz", tmp_path / "c.npz", target="meta.LLaMA")
    convert_file(tmp_path / "c.npz", tmp_path / "d.npz", target="canonical")
    assert bits_of(read_tensors(tmp_path / "d.npz")) == bits_of(tensors)


def test_layer_without_a_prefix_is_found(tmp_path):
    """A saved layer without a prefix is found as one canonical layer."""
    save(tmp_path / "a.npz", random_weights(GQA), GQA)
    assert layers_by_layout(tmp_path / "a.npz")["canonical", ""].layers == 1


# ---- The same attention --------------------------------------------------------------------------

BIASED = AttentionSpec(16, 4, num_kv_heads=2, head_dim=4, rope=Rope(500.0))


def first_wrong(weights, other, spec=BIASED):
    wrong = first_difference(verify(weights, spec, other, spec))
    return None if wrong is None else wrong.stage


def test_equal_weights_pass_verify():
    """Equal weights pass every stage of `verify`, the first of which are q, k and v."""
    weights = random_weights(BIASED)
    comparisons = verify(weights, BIASED, {**weights}, BIASED)
    assert all(comparison.passed for comparison in comparisons)
    assert [comparison.stage for comparison in comparisons][:3] == ["q", "k", "v"]
    assert same_bits(weights, {**weights})


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("seed", range(3))
def test_rounded_weights_pass_verify(dtype, seed):
    """Weights rounded to 16 bits pass `verify` in both directions, without equal bits."""
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
        (
            "k",
            lambda w: {"k_proj.weight": np.roll(w["k_proj.weight"], 4, axis=0)},
        ),  # wrong groups of queries
        (
            "q",
            lambda w: {
                "q_proj.weight": w["q_proj.weight"]
                .reshape(2, 2, 4, 16)
                .swapaxes(0, 1)
                .reshape(16, 16)
            },
        ),
        ("v", lambda w: {"v_proj.weight": np.nextafter(w["v_proj.weight"], 9) + np.float32(1e-5)}),
    ],
    ids=[
        *(
            "k-and-v-swapped",
            "q-transposed",
            "out-transposed",
            "no-q-bias",
            "no-k-bias",
            "no-v-bias",
            "no-out-bias",
        ),
        *("q-scaled", "kv-heads-permuted", "groups-tiled-for-repeated", "v-shifted"),
    ],
)
def test_wrong_weight_fails_at_its_stage(stage, change):
    """Each wrong weight or bias is first reported at the stage that uses it."""
    weights = random_weights(BIASED)
    changed = {name: np.ascontiguousarray(x) for name, x in change(weights).items()}
    assert first_wrong(weights, {**weights, **changed}) == stage


@pytest.mark.parametrize("seed", range(5))
def test_wrong_rope_pairing_fails_at_q(tmp_path, seed):
    """Interleaved weights that are read as half-split are first reported at q."""
    weights = random_weights(GQA, seed=seed)
    tensors = from_canonical(weights, GQA, LAYOUTS["meta.LLaMA"])
    names = {"wq": "q_proj", "wk": "k_proj", "wv": "v_proj", "wo": "o_proj"}
    path = write_tensor_file(
        tmp_path / "a.npz", {f"{names[name[:2]]}{name[2:]}": x for name, x in tensors.items()}
    )
    other, spec = load(path, "transformers.LLaMA", **HEADS)
    wrong = first_difference(verify(weights, GQA, other, spec))
    assert wrong is not None
    assert wrong.stage == "q"


def test_layers_of_different_specs_raise():
    """`verify` raises an error for a layer with RoPE and one without."""
    with rejects("the layers", "500.0"):
        verify(random_weights(BIASED), BIASED, random_weights(BIASED), replace(BIASED, rope=None))


# ---- A layer that was trained, as llama.cpp writes it --------------------------------------------


def as_llama_cpp(weight, num_heads):
    """`permute` of llama.cpp's convert_hf_to_gguf.py."""
    half = weight.shape[0] // num_heads // 2
    return (
        weight.reshape(num_heads, 2, half, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    )


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


def test_trained_gguf_layer_loads_exactly(smollm2):
    """A trained layer, permuted as by llama.cpp, loads as its half-split weights, bit for bit."""
    path, weights, spec = smollm2
    loaded, loaded_spec = load(path, "gguf.LLaMA", prefix="blk.7", **undetermined_fields(spec))
    assert same_bits(loaded, weights)
    assert all(
        comparison.passed for comparison in verify(loaded, loaded_spec, weights, loaded_spec)
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda writer: writer.add_rope_dimension_count(4), "rope.dimension_count=4"),
        (
            lambda writer: writer.add_string("llama.rope.scaling.type", "yarn"),
            "rope.scaling.type=yarn",
        ),
        (
            lambda writer: writer.add_tensor("rope_freqs.weight", np.ones(4, np.float32)),
            "rope_freqs.weight",
        ),
    ],
)
def test_unread_gguf_rope_warns(tmp_path, change, words):
    """RoPE settings of a GGUF file that are not read warn, and the spec has no RoPE."""
    spec = gguf_layer(tmp_path / "layer.gguf", "llama", change)
    with pytest.warns(IgnoredSettingsWarning, match=f"GGUF sets {words}"):
        _, loaded_spec = load(tmp_path / "layer.gguf", "gguf.LLaMA", prefix="blk.0")
    assert loaded_spec == spec


def gguf_layer(path, family, change):
    """Write a GGUF file of one layer with changes; return the layer's spec without RoPE."""
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
@pytest.mark.parametrize(
    "hints", [{}, {"num_heads": 4}, {"rope": Rope(500.0)}], ids=["", "heads", "RoPE"]
)
def test_unread_gguf_attention_warns(words, family, hints, tmp_path):
    """Attention settings of a GGUF file that are not read warn, unless spec= is passed."""
    spec = gguf_layer(tmp_path / "layer.gguf", family, UNREAD[words])
    with pytest.warns(
        IgnoredSettingsWarning, match=f"GGUF sets {re.escape(words)}, .*accepts a complete spec="
    ) as caught:
        _, loaded_spec = load(tmp_path / "layer.gguf", "gguf.Qwen2", prefix="blk.0", **hints)
    assert "RoPE is left out" not in str(caught[0].message)
    assert loaded_spec == replace(spec, rope=Rope(500.0))
    with warnings.catch_warnings(action="error"):
        _, loaded_spec = load(tmp_path / "layer.gguf", "gguf.Qwen2", prefix="blk.0", spec=spec)
    assert loaded_spec == spec


def test_window_in_llama_gguf_model_raises(tmp_path):
    """A window raises: llama.cpp's architecture `llama` has none, nor has its configuration."""

    def change(writer):
        writer.add_block_count(1)
        writer.add_sliding_window(4)

    gguf_layer(tmp_path / "layer.gguf", "llama", change)
    with rejects("the values of …layer.gguf"):
        load(tmp_path / "layer.gguf", prefix="blk.0")


def test_gguf_string_as_number_raises(tmp_path):
    """A window stored as a string in a whole GGUF model raises an error with its key."""

    def change(writer):
        writer.add_block_count(1)
        writer.add_string("qwen2.attention.sliding_window", "16.0")

    gguf_layer(tmp_path / "layer.gguf", "qwen2", change)
    with rejects("the values of …layer.gguf", "attention.sliding_window"):
        load(tmp_path / "layer.gguf", prefix="blk.0")


def test_zero_gguf_rope_dimensions_warn(tmp_path):
    """rope.dimension_count=0 in a GGUF file warns that RoPE is left out."""
    gguf_layer(tmp_path / "layer.gguf", "qwen2", lambda writer: writer.add_rope_dimension_count(0))
    with pytest.warns(
        IgnoredSettingsWarning, match=r"GGUF sets rope\.dimension_count=0, .*: RoPE is left out"
    ):
        load(tmp_path / "layer.gguf", "gguf.Qwen2", prefix="blk.0")


def test_gguf_rope_sections_warn(tmp_path):
    """rope.dimension_sections, a list in a GGUF file, warns that RoPE is left out."""

    def change(writer):
        writer.add_attn_logit_softcapping(0.0)
        writer.add_value_length(8)
        writer.add_rope_dimension_sections([1, 1, 2, 0])

    gguf_layer(tmp_path / "layer.gguf", "qwen2vl", change)
    with pytest.warns(
        IgnoredSettingsWarning,
        match=r"GGUF sets rope\.dimension_sections=a list of 4, .*: RoPE is left out",
    ) as on:
        _, loaded_spec = load(tmp_path / "layer.gguf", "gguf.Qwen2", prefix="blk.0")
    assert "complete spec" not in str(on[0].message)
    assert loaded_spec.rope is None


def test_gguf_sinks_are_rejected(tmp_path):
    """Sinks in a GGUF file raise an error with the name of their tensor."""
    gguf_layer(
        tmp_path / "a.gguf",
        "gpt-oss",
        lambda writer: writer.add_tensor("blk.0.attn_sinks.weight", np.ones(4, "f4")),
    )
    with rejects("tensors", "unknown names ['attn_sinks.weight']", where="blk.0"):
        load(tmp_path / "a.gguf", "gguf.Qwen2", prefix="blk.0")


def test_gguf_file_is_converted(smollm2, tmp_path):
    """A GGUF file converts to transformers' layout bit for bit, with its other tensors."""
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
    assert sorted(done.copied) == ["blk.7.attn_norm.weight", "token_embd.weight"]
    assert same_bits(load(tmp_path / "b.safetensors")[0], weights)


def test_gguf_metadata_supply_head_sizes(smollm2, tmp_path):
    """Heads and RoPE of a layer in a GGUF file are read from its metadata."""
    path, weights, spec = smollm2
    loaded, loaded_spec = load(path, "gguf.LLaMA", prefix="blk.7")
    assert same_bits(loaded, weights)
    assert undetermined_fields(loaded_spec) == undetermined_fields(spec)


def test_misread_trained_gguf_fails_at_q(smollm2, tmp_path):
    """A trained GGUF layer that is read as half-split is first reported at q."""
    path, weights, spec = smollm2
    names = {"attn_q": "q_proj", "attn_k": "k_proj", "attn_v": "v_proj", "attn_output": "o_proj"}
    tensors = {
        name.split(".")[2]: x
        for name, x in read_tensors(path).items()
        if name.split(".")[-2] in names
    }
    wrong = write_tensor_file(
        tmp_path / "wrong.npz", {f"{names[name]}.weight": x for name, x in tensors.items()}
    )
    other, other_spec = load(wrong, "transformers.LLaMA", **undetermined_fields(spec))
    difference = first_difference(verify(weights, spec, other, other_spec))
    assert difference is not None
    assert difference.stage == "q"

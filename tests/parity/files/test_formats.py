"""Files of named tensors: bit for bit, in bounded memory, whole or not there, and safe to open whoever wrote them."""

import hashlib
import io
import itertools
import json
import os
import pickle
import random
import re
import struct
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import flax.serialization
import gguf
import huggingface_hub
import jax
import jax.numpy as jnp
import ml_dtypes
import msgpack
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from flax import nnx
from helpers import PYTHONPATH
from helpers.refusals import refuses
from helpers.samples import sample
from helpers.tensors import read_tensors, same_array

from parity import to_numpy
from parity.files import gguf as gguf_format
from parity.files import msgpack as msgpack_format
from parity.files import open_tensors, write_tensors
from parity.files.target import BEFORE, SCRATCH
from parity.files.tensor_file import flatten, hash_of, nest, parse_json
from parity.files.zipped import ALIGNMENT

SUFFIXES = [".safetensors", ".npz", ".pt", ".msgpack", ".orbax"]
FILES = [suffix for suffix in SUFFIXES if suffix != ".orbax"]
DTYPES = ["float32", "float16", "bfloat16", "float64", "int64", "bool"]
OTHER_DTYPES = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "uint64", "complex64"]


def dtype_of(name):
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def some_tensors(dtype="float32", *, empty=True):
    """Arrays of every kind that files get wrong: without axes, empty, transposed, reversed, of any bits."""
    rng = np.random.default_rng(0)
    dtype = dtype_of(dtype)

    def draw(*shape):
        if dtype.kind == "b":
            return rng.random(shape) < 0.5
        count = int(np.prod(shape, dtype=int)) * dtype.itemsize
        return rng.integers(0, 256, count, dtype=np.uint8).view(dtype).reshape(shape)  # NaNs of many kinds among them

    tensors = {
        "layers.0.q_proj.weight": draw(6, 4),
        "layers.0.transposed": draw(5, 3).T,
        "layers.0.reversed": draw(7)[::-1],
        "layers.1.strided": draw(8, 9)[::2, ::3],
        "layers.1.scalar": draw(),
        "one": draw(1, 1, 1),
        "größe": draw(2),
    }
    if empty:
        tensors |= {"empty": draw(0, 3), "layers.1.empty": draw(0)}
    return tensors


def infos_of(tensors):
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


def write(path, tensors, metadata=None, **options):
    return write_tensors(path, infos_of(tensors), tensors.__getitem__, metadata, **options)


def same_tensors(found, expected):
    return found.keys() == expected.keys() and all(same_array(found[name], expected[name]) for name in expected)


def refusal(path):
    """What opening and reading all raises, or nothing."""
    try:
        read_tensors(path)
    except (ValueError, OSError) as error:
        return error
    return None


def refuses_to_open(path, expected=""):
    """Opening and reading all raises one line that can be shown."""
    error = str(refusal(path))
    assert error != "None"
    assert error.isprintable()
    assert re.search(expected, error) if isinstance(expected, str) else expected.is_printed_in(error), error
    return error


# ---- Round trips -----------------------------------------------------------------------------------------------------


@sample(12)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_tensors_survive_a_file_bit_for_bit(tmp_path, suffix, dtype):
    tensors = some_tensors(dtype, empty=suffix != ".orbax")
    path = tmp_path / f"w{suffix}"
    assert write(path, tensors, {"spec": "ein Maß, 测量\n"}) == path
    assert os.listdir(tmp_path) == [path.name]
    with open_tensors(path) as file:
        assert {name: info[:2] for name, info in file.infos.items()} == infos_of(tensors)
        assert all(info.nbytes == tensors[name].nbytes for name, info in file.infos.items())
        assert file.metadata == {"spec": "ein Maß, 测量\n", "sha256": file.sha256()}
        assert file.ignored == []
        file.verify()
    assert same_tensors(read_tensors(path), tensors)


@sample(12)
@pytest.mark.parametrize("dtype", OTHER_DTYPES)
@pytest.mark.parametrize("suffix", FILES)
def test_other_dtypes_survive_too(tmp_path, suffix, dtype):
    tensors = some_tensors(dtype)
    write(tmp_path / f"w{suffix}", tensors)
    assert same_tensors(read_tensors(tmp_path / f"w{suffix}"), tensors)


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2])
@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ".msgpack"])
def test_float8_survives_where_a_format_has_it(tmp_path, suffix, dtype):
    tensors = {"w": np.arange(256, dtype=np.uint8).view(dtype).reshape(16, 16)}
    write(tmp_path / f"w{suffix}", tensors)
    assert same_tensors(read_tensors(tmp_path / f"w{suffix}"), tensors)


@pytest.mark.parametrize("suffix", FILES)
def test_a_file_of_no_tensors_survives(tmp_path, suffix):
    write(tmp_path / f"w{suffix}", {}, {"a": "b"})
    with open_tensors(tmp_path / f"w{suffix}") as file:
        assert not file.infos
        assert file.metadata["a"] == "b"


@pytest.mark.parametrize("suffix", FILES)
def test_the_bytes_depend_on_nothing_but_the_content(tmp_path, suffix):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write(tmp_path / name / f"w{suffix}", some_tensors(), {"a": "b"})
    assert (tmp_path / "a" / f"w{suffix}").read_bytes() == (tmp_path / "b" / f"w{suffix}").read_bytes()


def test_the_hash_is_of_the_tensors_and_not_of_the_format_or_their_order(tmp_path):
    tensors = some_tensors(empty=False)
    hashes = set()
    for suffix in SUFFIXES:
        write(tmp_path / f"w{suffix}", tensors)
        tensors = dict(reversed(tensors.items()))
        with open_tensors(tmp_path / f"w{suffix}") as file:
            hashes.add(file.metadata["sha256"])
    assert len(hashes) == 1


@pytest.mark.parametrize("change", ["name", "dtype", "shape", "value"])
def test_the_hash_is_another_when_anything_is(tmp_path, change):
    tensors = {"a": np.zeros((2, 3), np.float32), "b": np.zeros(4, np.float32)}
    write(tmp_path / "a.npz", tensors)
    changed = {
        "name": {"c": tensors["a"], "b": tensors["b"]},
        "dtype": {**tensors, "a": tensors["a"].view(np.int32)},
        "shape": {**tensors, "a": tensors["a"].T},
        "value": {**tensors, "a": -tensors["a"]},
    }[change]
    write(tmp_path / "b.npz", changed)
    with open_tensors(tmp_path / "a.npz") as a, open_tensors(tmp_path / "b.npz") as b:
        assert a.metadata["sha256"] != b.metadata["sha256"]


def test_one_file_is_copied_into_another_in_one_line(tmp_path):
    tensors = some_tensors("bfloat16")
    write(tmp_path / "a.npz", tensors, {"a": "b"})
    with open_tensors(tmp_path / "a.npz") as file:
        write_tensors(tmp_path / "b.safetensors", file.infos, file.read, file.metadata)
    assert same_tensors(read_tensors(tmp_path / "b.safetensors"), tensors)


@pytest.mark.parametrize("suffix", FILES)
def test_a_file_can_be_written_onto_itself(tmp_path, suffix):
    path = tmp_path / f"w{suffix}"
    write(path, some_tensors())
    with open_tensors(path) as file:
        write_tensors(path, file.infos, lambda name: file.read(name)[...], {})
    assert same_tensors(read_tensors(path), some_tensors())


def test_what_was_read_is_writable_and_outlives_the_file(tmp_path):
    for suffix in SUFFIXES:
        write(tmp_path / f"w{suffix}", {"a": np.ones(3)})
        with open_tensors(tmp_path / f"w{suffix}") as file:
            array = file.read("a")
        array[0] = 2.0
        with pytest.raises(ValueError, match="before the file is closed"):
            file.read("a")
    assert array.tolist() == [2.0, 1.0, 1.0]


def test_a_name_that_is_not_there_is_told(tmp_path):
    write(tmp_path / "w.npz", {"a": np.ones(3)})
    with open_tensors(tmp_path / "w.npz") as file, refuses("name", name="b"):
        file.read("b")


# ---- Files of others -------------------------------------------------------------------------------------------------


def state_dict(tensors):
    """The same as torch tensors."""
    bits = {"bfloat16": torch.bfloat16, "float8_e4m3fn": torch.float8_e4m3fn}
    return {
        name: torch.from_numpy(np.array(tensor).view(f"u{tensor.itemsize}")).view(bits[tensor.dtype.name])
        if tensor.dtype.name in bits
        else torch.from_numpy(np.array(tensor))
        for name, tensor in tensors.items()
    }


@pytest.mark.parametrize("dtype", DTYPES)
def test_safetensors_of_the_library_are_read(tmp_path, dtype):
    tensors = some_tensors(dtype)
    contiguous = {name: tensor.contiguous() for name, tensor in state_dict(tensors).items()}
    safetensors.torch.save_file(contiguous, tmp_path / "w.safetensors", {"format": "pt"})
    assert same_tensors(read_tensors(tmp_path / "w.safetensors"), tensors)


def bytes_of(tensor):
    """Return the elements of a tensor in order, as bytes."""
    return tensor.flatten().clone(memory_format=torch.contiguous_format).view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_safetensors_are_read_by_the_library(tmp_path, dtype):
    tensors = some_tensors(dtype)
    write(tmp_path / "w.safetensors", tensors, {"format": "pt"})
    found = safetensors.torch.load_file(tmp_path / "w.safetensors")
    expected = state_dict(tensors)
    assert found.keys() == expected.keys()
    for name in expected:
        assert found[name].shape == expected[name].shape
        assert torch.equal(bytes_of(found[name]), bytes_of(expected[name]))
    with safetensors.safe_open(tmp_path / "w.safetensors", "numpy") as file:
        assert file.metadata()["format"] == "pt"
        assert all(same_array(file.get_tensor(name), tensor) for name, tensor in tensors.items())


def test_arrays_of_mixed_dtypes_are_aligned_in_safetensors(tmp_path):
    tensors = {"a": np.ones(3, bool), "b": np.ones(3, np.float64), "c": np.ones(3, np.float16), "d": np.ones(1, bool)}
    write(tmp_path / "w.safetensors", tensors)
    data = (tmp_path / "w.safetensors").read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    assert (8 + length) % 8 == 0
    assert all(header[name]["data_offsets"][0] % tensor.itemsize == 0 for name, tensor in tensors.items())
    assert same_tensors(read_tensors(tmp_path / "w.safetensors"), tensors)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz_of_numpy_are_read(tmp_path, dtype, save):
    tensors = some_tensors(dtype)
    save(tmp_path / "w.npz", **tensors)
    assert same_tensors(read_tensors(tmp_path / "w.npz"), tensors)


@pytest.mark.parametrize("dtype", DTYPES)
def test_npz_are_read_by_numpy(tmp_path, dtype):
    tensors = some_tensors(dtype)
    write(tmp_path / "w.npz", tensors)
    with np.load(tmp_path / "w.npz") as found:
        assert list(found) == list(tensors)
        assert all(found[name].tobytes() == tensor.tobytes() for name, tensor in tensors.items())


def test_names_that_flax_joins_with_slashes_are_read_with_dots(tmp_path):
    tree = {"encoder": {"layer_0": {"kernel": np.ones((2, 3))}}, "step": np.ones(1)}
    np.savez(tmp_path / "w.npz", **flax.traverse_util.flatten_dict(tree, sep="/"))
    assert same_tensors(read_tensors(tmp_path / "w.npz"), flatten(tree))
    np.savez(tmp_path / "v.npz", **{"a/b": np.ones(1), "a.b": np.ones(2)})
    assert list(read_tensors(tmp_path / "v.npz")) == ["a/b", "a.b"]  # else two would have one name
    write(tmp_path / "u.npz", {"a/b": np.ones(1)})
    assert list(read_tensors(tmp_path / "u.npz")) == ["a/b"]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_suffix_in_capitals_is_the_same(tmp_path, suffix):
    write(tmp_path / f"w{suffix.upper()}", some_tensors(empty=False))
    assert same_tensors(read_tensors(tmp_path / f"w{suffix.upper()}"), some_tensors(empty=False))


def test_arrays_in_fortran_order_and_of_the_other_byte_order_are_read(tmp_path):
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.savez(tmp_path / "w.npz", fortran=np.asfortranarray(array), big=array.astype(">f4"), both=array.astype(">f4").T)
    found = read_tensors(tmp_path / "w.npz")
    assert same_tensors(found, {"fortran": array, "big": array, "both": np.ascontiguousarray(array.T)})
    assert all(tensor.flags.c_contiguous for tensor in found.values())


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_files_are_read(tmp_path, dtype):
    tensors = some_tensors(dtype)
    torch.save(state_dict(tensors), tmp_path / "w.pt")
    assert same_tensors(read_tensors(tmp_path / "w.pt"), tensors)


@sample(12)
@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("dtype", [*DTYPES, *OTHER_DTYPES])
def test_torch_files_are_read_by_torch(tmp_path, dtype, mmap):
    tensors = some_tensors(dtype)
    write(tmp_path / "w.pt", tensors, {"a": "b"})
    found = torch.load(tmp_path / "w.pt", weights_only=True, mmap=mmap)
    expected = state_dict(tensors)
    assert list(found) == list(expected)
    assert all(tensor.dtype == expected[name].dtype for name, tensor in found.items())
    assert all(tensor.shape == expected[name].shape for name, tensor in found.items())
    assert all(
        bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy()) == tensors[name].tobytes()
        for name, tensor in found.items()
        if tensor.ndim
    )


def test_torch_maps_tensors_where_they_are_aligned(tmp_path):
    write(tmp_path / "w.pt", some_tensors())
    with (tmp_path / "w.pt").open("rb") as file, zipfile.ZipFile(file) as archive:
        assert archive.testzip() is None
        for member in archive.infolist():
            if "/data/" in member.filename:
                file.seek(member.header_offset + 26)
                begin = member.header_offset + 30 + sum(struct.unpack("<HH", file.read(4)))
                assert begin % ALIGNMENT == 0


def test_a_checkpoint_of_torch_is_flattened_and_the_rest_listed(tmp_path):
    tied = torch.arange(6.0).reshape(2, 3)
    checkpoint = {
        "model": {"a": tied, "tied": tied, "slice": tied[:, 1:], "parameter": torch.nn.Parameter(tied.T)},
        "optimizer": {"state": {0: {"step": torch.tensor(3)}}, "param_groups": [{"lr": 0.1, "params": [0]}]},
        "epoch": 3,
        "none": None,
        "name": "x",
        "layers": [torch.ones(1, dtype=torch.bfloat16), (torch.zeros(1),)],
    }
    torch.save(checkpoint, tmp_path / "w.pth")
    with open_tensors(tmp_path / "w.pth") as file:
        assert file.format == "torch"
        assert list(file.infos) == [
            *("model.a", "model.tied", "model.slice", "model.parameter"),
            *("optimizer.state.0.step", "layers.0", "layers.1.0"),
        ]
        assert file.ignored == [
            *("optimizer.param_groups.0.lr", "optimizer.param_groups.0.params.0", "epoch", "none", "name"),
        ]
        assert file.read("model.slice").tolist() == [[1.0, 2.0], [4.0, 5.0]]
        assert file.read("model.parameter").flags.c_contiguous
        assert same_array(file.read("layers.0"), np.ones(1, ml_dtypes.bfloat16))


@pytest.mark.parametrize("dtype", DTYPES)
def test_msgpack_of_flax_is_read(tmp_path, dtype):
    tensors = some_tensors(dtype)
    (tmp_path / "w.msgpack").write_bytes(flax.serialization.msgpack_serialize(nested(tensors)))
    assert same_tensors(read_tensors(tmp_path / "w.msgpack"), tensors)


@pytest.mark.parametrize("dtype", DTYPES)
def test_msgpack_is_read_by_flax(tmp_path, dtype):
    tensors = some_tensors(dtype)
    write(tmp_path / "w.msgpack", tensors, {"a": "b"})
    found = flax.serialization.msgpack_restore((tmp_path / "w.msgpack").read_bytes())
    assert found.pop("__metadata__")["a"] == "b"
    assert same_tensors(flatten(found), tensors)
    target = nested({name: np.empty_like(tensor) for name, tensor in tensors.items()})
    assert same_tensors(flatten(flax.serialization.from_bytes(target, (tmp_path / "w.msgpack").read_bytes())), tensors)


def nested(tensors):
    def filled(tree):
        return {key: filled(node) if isinstance(node, dict) else tensors[node] for key, node in tree.items()}

    return filled(nest(tensors))


def test_large_arrays_are_divided_as_flax_divides_them(tmp_path, monkeypatch):
    tensors = {"a.b": np.arange(100.0).reshape(4, 25), "c": np.arange(3, dtype=np.int32)}
    monkeypatch.setattr(msgpack_format, "MAX_CHUNK", 96)
    monkeypatch.setattr(flax.serialization, "MAX_CHUNK_SIZE", 96)
    (tmp_path / "flax.msgpack").write_bytes(flax.serialization.msgpack_serialize(nested(tensors)))
    write(tmp_path / "ours.msgpack", tensors)
    assert same_tensors(read_tensors(tmp_path / "flax.msgpack"), tensors)
    assert same_tensors(read_tensors(tmp_path / "ours.msgpack"), tensors)
    found = flax.serialization.msgpack_restore((tmp_path / "ours.msgpack").read_bytes())
    assert same_array(found["a"]["b"], tensors["a.b"])


def test_what_is_no_array_in_msgpack_is_listed(tmp_path):
    tree = {
        "step": 3,
        "big": -(2**40),
        "rate": 0.1,
        "on": True,
        "none": None,
        "name": "x" * 300,
        "raw": b"x",
        "complex": 1j,
        "list": [1, np.ones(2)],
        "scalar": np.float32(2.0),
    }
    (tmp_path / "w.msgpack").write_bytes(flax.serialization.msgpack_serialize(tree))
    with open_tensors(tmp_path / "w.msgpack") as file:
        assert list(file.infos) == ["list.1", "scalar"]
        assert sorted(file.ignored) == ["big", "complex", "list.0", "name", "none", "on", "rate", "raw", "step"]
        assert file.read("scalar") == np.float32(2.0)


def test_orbax_checkpoints_are_read(tmp_path):
    tree = {"a": [jnp.ones(2), {"b": jnp.ones((2, 3), jnp.bfloat16)}], "step": 3, "x.y": np.arange(3)}
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "checkpoint", tree)
    with open_tensors(tmp_path / "checkpoint") as file:
        assert file.format == "orbax"
        assert file.ignored == ["step"]
    expected = {"a.0": np.ones(2, np.float32), "a.1.b": np.ones((2, 3), ml_dtypes.bfloat16), "x.y": np.arange(3)}
    assert same_tensors(read_tensors(tmp_path / "checkpoint"), expected)


def test_float64_of_jax_is_read_where_jax_has_none(tmp_path):
    with jax.enable_x64(True), ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "checkpoint", {"a": jnp.full(3, 1 / 3, jnp.float64)})
    found = read_tensors(tmp_path / "checkpoint")
    assert same_tensors(found, {"a": np.full(3, 1 / 3)})
    assert isinstance(found["a"], np.ndarray)


def test_orbax_checkpoints_are_read_by_orbax(tmp_path):
    tensors = some_tensors(empty=False)
    write(tmp_path / "w.orbax", tensors)
    with ocp.PyTreeCheckpointer() as checkpointer:
        assert same_tensors(flatten(checkpointer.restore(tmp_path / "w.orbax")), tensors)


def test_a_step_of_a_checkpoint_manager_is_read(tmp_path):
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(3, args=ocp.args.Composite(state=ocp.args.StandardSave({"w": jnp.ones(3)})))
        manager.wait_until_finished()
    assert same_tensors(read_tensors(tmp_path / "3"), {"w": np.ones(3, np.float32)})


def test_the_level_that_nnx_adds_is_left_out(tmp_path):
    state = nnx.state(nnx.MultiHeadAttention(2, 8, rngs=nnx.Rngs(0)))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "checkpoint", state)
    names = [f"{layer}.{leaf}" for layer in ("key", "out", "query", "value") for leaf in ("bias", "kernel")]
    assert sorted(read_tensors(tmp_path / "checkpoint")) == names


def test_names_that_cannot_be_nested_are_refused(tmp_path):
    for names in (["a", "a.b"], ["a.b", "a"], ["a.value"]):
        with pytest.raises(ValueError, match="got a"):
            write(tmp_path / "w.msgpack", {name: np.ones(1) for name in names})
    assert os.listdir(tmp_path) == []


# ---- GGUF ------------------------------------------------------------------------------------------------------------


def write_gguf(path, tensors, quantised=()):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_string("general.name", "测量")
    writer.add_uint32("llama.block_count", 2)
    writer.add_float32("llama.eps", 0.5)
    writer.add_bool("flag", True)
    writer.add_array("tokens", ["a", "bc", ""])
    writer.add_array("scores", [1.0, 2.0])
    for name, tensor in tensors.items():
        if tensor.dtype == ml_dtypes.bfloat16:
            raw = np.ascontiguousarray(tensor).view(np.uint8)
            writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(name, tensor)
    for name, kind in quantised:
        data = gguf.quants.quantize(np.ones((4, 256), np.float32), kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_gguf_is_read_with_the_shapes_of_numpy(tmp_path):
    rng = np.random.default_rng(0)
    tensors = {
        "blk.0.attn_q.weight": rng.standard_normal((6, 4)).astype(np.float32),
        "half": rng.standard_normal((3, 2, 5)).astype(np.float16),
        "brain": rng.standard_normal((2, 3)).astype(ml_dtypes.bfloat16),
        "bias": np.arange(7, dtype=np.float32),
        "ids": np.arange(5, dtype=np.int32),
    }
    write_gguf(tmp_path / "w.gguf", tensors)
    assert same_tensors(read_tensors(tmp_path / "w.gguf"), tensors)
    with open_tensors(tmp_path / "w.gguf") as file:
        assert file.format == "gguf"
        assert file.metadata == {
            "general.architecture": "llama",
            "general.name": "测量",
            "llama.block_count": "2",
            "llama.eps": "0.5",
            "flag": "True",
            "scores": "a list of 2",  # which is passed over
            "tokens": "a list of 3",
        }


def test_the_types_of_gguf_are_those_of_its_package():
    known = {kind.value: kind.name for kind in gguf.GGMLQuantizationType}
    ours = {value: name for value, name in enumerate(gguf_format.TYPES) if name}
    assert ours == {value: name for value, name in known.items() if value < len(gguf_format.TYPES)}


# ---- Shards ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_shards_are_those_of_hugging_face(tmp_path, suffix):
    tensors = {f"layer.{i}.weight": np.full((i + 1, 8), i, np.float32) for i in range(12)}
    written = write(tmp_path / f"model{suffix}", tensors, {"format": "pt"}, max_shard_bytes=500)
    theirs = huggingface_hub.split_torch_state_dict_into_shards(
        state_dict(tensors), max_shard_size=500, filename_pattern=f"model{{suffix}}{suffix}"
    )
    assert written == tmp_path / f"model{suffix}.index.json"
    assert sorted(os.listdir(tmp_path)) == sorted([*theirs.filename_to_tensors, written.name])
    index = json.loads(written.read_text())
    assert index["weight_map"] == theirs.tensor_to_filename
    assert index["metadata"]["total_size"] == theirs.metadata["total_size"]
    for name, names in theirs.filename_to_tensors.items():
        assert list(read_tensors(tmp_path / name)) == names
    for path in (written, tmp_path) if suffix == ".safetensors" else (written,):
        with open_tensors(path) as file:
            file.verify()
            assert file.metadata["format"] == "pt"
        assert same_tensors(read_tensors(path), tensors)


def test_what_fits_into_one_shard_is_one_file(tmp_path):
    assert write(tmp_path / "w.safetensors", some_tensors(), max_shard_bytes=10**6) == tmp_path / "w.safetensors"
    assert os.listdir(tmp_path) == ["w.safetensors"]


def test_shards_are_divided_anew(tmp_path):
    write(tmp_path / "w.safetensors", some_tensors(), {"a": "b"}, max_shard_bytes=100)
    with open_tensors(tmp_path / "w.safetensors.index.json") as file:
        assert file.metadata.keys() == {"a", "sha256"}
        some = dict(list(file.infos.items())[:3])
        write_tensors(tmp_path / "v.bin", some, file.read, file.metadata, max_shard_bytes=30)
    tensors = {name: some_tensors()[name] for name in some}
    assert same_tensors(read_tensors(tmp_path / "v.bin.index.json"), tensors)


def test_a_folder_of_shards_is_read_without_an_index(tmp_path):
    tensors = some_tensors()
    write(tmp_path / "w.safetensors", tensors, max_shard_bytes=100).unlink()
    assert same_tensors(read_tensors(tmp_path), tensors)
    next(tmp_path.glob("*-00002-*")).unlink()
    refuses_to_open(tmp_path, r"'w-00002-of-\d+\.safetensors")


def test_torch_shards_are_read_from_their_folder(tmp_path):
    tensors = some_tensors()
    write(tmp_path / "pytorch_model.bin", tensors, max_shard_bytes=100)
    torch.save({"not": "weights"}, tmp_path / "training_args.bin")
    assert same_tensors(read_tensors(tmp_path), tensors)


def test_shards_may_be_links_as_in_the_cache_of_hugging_face(tmp_path):
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    tensors = some_tensors()
    write(tmp_path / "snapshot" / "w.safetensors", tensors, max_shard_bytes=100)
    for i, path in enumerate((tmp_path / "snapshot").iterdir()):
        path.rename(tmp_path / "blobs" / str(i))
        path.symlink_to(Path("..") / "blobs" / str(i))
    assert same_tensors(read_tensors(tmp_path / "snapshot"), tensors)


def with_index(folder, change):
    path = write(folder / "w.safetensors", some_tensors(), max_shard_bytes=100)
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))
    return path


def point_at(shard):
    return lambda index: index["weight_map"].update(one=shard)


INDEX = "…/w.safetensors.index.json"


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        *(
            (point_at(shard), refuses(INDEX, repr(shard)))
            for shard in ("../w-00001-of-00003.safetensors", "/etc/passwd", "..", "", "w\0", "nowhere.safetensors")
        ),
        (point_at("w.safetensors.index.json"), refuses(INDEX)),
        (point_at(3), refuses(INDEX)),
        (lambda index: index.update(weight_map=[]), refuses(INDEX)),
        (lambda index: index.clear(), refuses(INDEX)),
        (lambda index: index["weight_map"].pop("one"), refuses(INDEX, tensor="one")),
        (lambda index: index["weight_map"].update(two="w-00001-of-00003.safetensors"), refuses(INDEX, tensor="two")),
    ],
)
def test_a_hostile_index_is_refused(tmp_path, change, refusal):
    refuses_to_open(with_index(tmp_path, change), refusal)


@pytest.mark.parametrize("text", ["", "[", "[" * 100_000, '{"weight_map": {"a": "b", "a": "c"}}', "\x00\xff", "7"])
def test_a_damaged_index_is_refused(tmp_path, text):
    (tmp_path / "w.safetensors.index.json").write_text(text)
    refuses_to_open(tmp_path / "w.safetensors.index.json")
    refuses_to_open(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    for i in (1, 2):
        write(tmp_path / f"w-0000{i}-of-00002.safetensors", {"a": np.ones(1)})
    shards = [f"w-0000{i}-of-00002.safetensors" for i in (1, 2)]
    refuses_to_open(tmp_path, refuses(str(tmp_path), tensor="a", shards=shards))


def test_a_folder_of_two_checkpoints_is_refused(tmp_path):
    write(tmp_path / "w.safetensors", some_tensors(), max_shard_bytes=100)
    write(tmp_path / "w.safetensors", some_tensors())
    refuses_to_open(tmp_path, refuses(str(tmp_path), "w.safetensors.index.json"))


# ---- Whole or not at all ---------------------------------------------------------------------------------------------


def before(folder, suffix):
    """Something that is there already, in each of the names that will be written."""
    write(folder / f"w{suffix}", {"old": np.ones(1)})
    if suffix in (".safetensors", ".bin"):
        write(folder / f"w{suffix}", {"old": np.ones(1), "older": np.ones(1)}, max_shard_bytes=9)
    return contents(folder)


def contents(folder):
    return {path.relative_to(folder): path.is_file() and path.read_bytes() for path in folder.rglob("*")}


@sample(12)
@pytest.mark.parametrize("error", [ValueError("no more"), KeyboardInterrupt(), OSError(28, "No space left")])
@pytest.mark.parametrize(
    ("suffix", "options"), [*((suffix, {}) for suffix in SUFFIXES), (".bin", {"max_shard_bytes": 9})]
)
def test_an_interrupted_write_leaves_the_old_and_nothing_else(tmp_path, suffix, options, error):
    old = before(tmp_path, suffix)

    def read(name):
        if name == "b":
            raise error
        return np.ones(2)

    with pytest.raises(type(error)):
        write_tensors(tmp_path / f"w{suffix}", {"a": ((2,), float), "b": ((2,), float)}, read, **options)
    assert contents(tmp_path) == old


# A folder is set aside and replaced; two shards and their index are.
@pytest.mark.parametrize(
    ("suffix", "count"), [*((".orbax", count) for count in range(2)), *((".safetensors", count) for count in range(6))]
)
def test_a_move_that_fails_half_way_is_undone(tmp_path, monkeypatch, suffix, count):
    old = before(tmp_path, suffix)
    moves, replace = itertools.count(), Path.replace

    def fail(path, target):
        if next(moves) == count:
            raise OSError(5, "Input/output error")
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", fail)
    options = {} if suffix == ".orbax" else {"max_shard_bytes": 9}
    with pytest.raises(OSError, match="Input/output"):
        write(tmp_path / f"w{suffix}", {"a": np.ones(1), "b": np.ones(1)}, **options)
    assert contents(tmp_path) == old


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(
    ("suffix", "count"), [*((".orbax", count) for count in range(2)), *((".safetensors", count) for count in range(6))]
)
def test_an_interrupt_right_before_or_after_a_move_is_undone(tmp_path, monkeypatch, suffix, count, after):
    old = before(tmp_path, suffix)
    moves, replace = itertools.count(), Path.replace

    def interrupt(path, target):
        number = next(moves)
        moved = replace(path, target) if number != count or after else None
        if number == count:
            raise KeyboardInterrupt
        return moved

    monkeypatch.setattr(Path, "replace", interrupt)
    options = {} if suffix == ".orbax" else {"max_shard_bytes": 9}
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / f"w{suffix}", {"a": np.ones(1), "b": np.ones(1)}, **options)
    assert contents(tmp_path) == old


@pytest.mark.parametrize("suffix", [".orbax", ".safetensors"])
def test_an_interrupt_when_all_is_in_its_place_undoes_nothing(tmp_path, monkeypatch, suffix):
    before(tmp_path, suffix)
    replace = Path.replace

    def interrupt(path, target):
        replace(path, target)
        if path.name == BEFORE:
            raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupt)
    options = {} if suffix == ".orbax" else {"max_shard_bytes": 9}
    tensors = {"a": np.ones(1), "b": np.ones(1)}
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / f"w{suffix}", tensors, **options)
    assert same_tensors(read_tensors(tmp_path / f"w{suffix}{'' if suffix == '.orbax' else '.index.json'}"), tensors)
    assert not list(tmp_path.glob(".*"))


FILL_THE_DISK = """
import resource
import sys

sys.dont_write_bytecode = True  # Python leaves half a file if it cannot write it
import numpy as np
from parity.files import write_tensors

resource.setrlimit(resource.RLIMIT_FSIZE, (10**5, 10**5))
names = [f"layer.{i}" for i in range(4)]
try:
    write_tensors(sys.argv[1], {name: ((10**5,), float) for name in names}, lambda name: np.random.rand(10**5))
except OSError as error:
    print(error)
"""


@pytest.mark.costly("a process whose files have a limit")
@sample(suffix=[".safetensors", ".npz"])
@pytest.mark.parametrize("suffix", FILES)
def test_a_full_disk_is_one_line(tmp_path, suffix):
    path = tmp_path / f"w{suffix}"
    result = subprocess.run([sys.executable, "-c", FILL_THE_DISK, path], capture_output=True, text=True, check=True)
    assert result.stdout == f"[Errno 27] File too large: {str(path)!r}\n"
    assert result.stderr == ""
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("suffix", FILES)
def test_a_write_that_does_not_read_back_is_an_error(tmp_path, monkeypatch, suffix):
    old = before(tmp_path, suffix)
    tensors = {"a": np.arange(1000.0), "b": np.arange(1000.0)}

    def open_damaged(path):
        data = path.read_bytes()
        place = data.rindex(np.float64(500.0).tobytes())
        path.write_bytes(data[:place] + b"\1" + data[place + 1 :])
        return open_tensors(path)

    monkeypatch.setattr("parity.files.writing.open_tensors", open_damaged)
    with pytest.raises(OSError, match=re.escape(f"/w{suffix}")) as caught:
        write(tmp_path / f"w{suffix}", tensors)
    assert len(str(caught.value).splitlines()) == 1
    assert contents(tmp_path) == old


def test_a_flush_that_fails_is_an_error(tmp_path, monkeypatch):
    old = before(tmp_path, ".npz")

    def fail(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path / "w.npz", some_tensors())
    assert contents(tmp_path) == old


def test_a_flush_that_fails_while_tensors_are_written_is_an_error(tmp_path, monkeypatch):
    """The system reports an error of the disk once, and then no more."""
    old, failed, fsync = before(tmp_path, ".safetensors"), threading.Event(), os.fsync

    def fail_once(descriptor):
        if not failed.is_set():
            failed.set()
            raise OSError(5, "Input/output error")
        fsync(descriptor)

    def read(name):
        assert failed.wait(60)
        return np.ones(2)

    monkeypatch.setattr(os, "fsync", fail_once)
    with pytest.raises(OSError, match="Input/output error"):
        write_tensors(tmp_path / "w.safetensors", {"a": ((2,), np.dtype(float))}, read)
    assert contents(tmp_path) == old


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_what_was_there_is_replaced(tmp_path, suffix):
    before(tmp_path, suffix)
    tensors = some_tensors(empty=False)
    names = os.listdir(tmp_path)
    write(tmp_path / f"w{suffix}", tensors)
    assert sorted(os.listdir(tmp_path)) == sorted(names)
    assert same_tensors(read_tensors(tmp_path / f"w{suffix}"), tensors)


def test_a_link_stays_and_what_it_leads_to_is_replaced(tmp_path):
    write(tmp_path / "old.safetensors", {"old": np.ones(1)})
    (tmp_path / "old.safetensors").rename(tmp_path / "real")
    (tmp_path / "w.safetensors").symlink_to("real")
    write(tmp_path / "w.safetensors", some_tensors())
    assert (tmp_path / "w.safetensors").is_symlink()
    assert same_tensors(read_tensors(tmp_path / "real"), some_tensors())


def test_a_file_may_be_read_by_others_as_the_umask_says(tmp_path):
    write(tmp_path / "w.safetensors", some_tensors())
    (tmp_path / "plain").touch()
    assert (tmp_path / "w.safetensors").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize("size", [0, 1, 8, 10, 16, 1001])
def test_a_hash_does_not_depend_on_the_pieces_that_are_read(tmp_path, monkeypatch, size):
    monkeypatch.setattr("parity.files.tensor_file.PIECE", 8)
    array = np.arange(size, dtype=np.uint8)
    write(tmp_path / "w.safetensors", {"a": array})
    with open_tensors(tmp_path / "w.safetensors") as file:
        file.verify()
        assert file.sha256() == hash_of(file.infos, {"a": hashlib.sha256(array.tobytes()).hexdigest()})


@pytest.mark.parametrize("size", [0, 1, 8, 17, 1001])
@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_a_tensor_of_a_file_is_copied_piece_by_piece(tmp_path, monkeypatch, suffix, size):
    monkeypatch.setattr("parity.files.tensor_file.PIECE", 8)
    array = np.random.default_rng(0).standard_normal(size).astype(np.float32)
    write(tmp_path / "w.safetensors", {"a": array, "b": array[::-1]})
    with open_tensors(tmp_path / "w.safetensors") as file:
        monkeypatch.setattr(file, "read", None)  # which holds a whole tensor
        write_tensors(tmp_path / f"copy{suffix}", file.infos, file.tensor)
    assert same_tensors(read_tensors(tmp_path / f"copy{suffix}"), {"a": array, "b": array[::-1]})


def test_no_piece_is_overwritten_before_it_is_hashed(tmp_path, monkeypatch):
    sha256 = hashlib.sha256

    class SlowHash:
        def __init__(self, data=b""):
            self.found = sha256(data)
            self.hexdigest = self.found.hexdigest

        def update(self, piece):
            time.sleep(1e-3)
            self.found.update(piece)

    tensors = {name: np.random.default_rng(i).bytes(8 * i + 3) for i, name in enumerate("abcdef")}
    tensors = {name: np.frombuffer(data, np.uint8) for name, data in tensors.items()}
    monkeypatch.setattr("parity.files.tensor_file.PIECE", 8)
    write(tmp_path / "w.safetensors", tensors)
    monkeypatch.setattr("parity.files.tensor_file.hashlib.sha256", SlowHash)
    with open_tensors(tmp_path / "w.safetensors") as file:
        write_tensors(tmp_path / "copy.safetensors", file.infos, file.tensor)
    assert same_tensors(read_tensors(tmp_path / "copy.safetensors"), tensors)


def test_a_tensor_of_a_file_is_read_when_its_values_are_needed(tmp_path):
    write(tmp_path / "w.npz", some_tensors())
    with open_tensors(tmp_path / "w.npz") as file:
        late = {name: file.tensor(name) for name in file.infos}
        assert {name: (each.shape, each.dtype) for name, each in late.items()} == {
            name: info[:2] for name, info in file.infos.items()
        }
        assert same_tensors({name: np.asarray(each) for name, each in late.items()}, some_tensors())
    with pytest.raises(ValueError, match="before the file is closed"):
        np.asarray(next(iter(late.values())))


@pytest.mark.parametrize("suffix", FILES)
def test_a_changed_byte_is_found(tmp_path, suffix):
    path = tmp_path / f"w{suffix}"
    write(path, {"a": np.arange(1000.0)})
    data = bytearray(path.read_bytes())
    data[data.index(np.float64(500.0).tobytes())] ^= 1
    path.write_bytes(data)
    with open_tensors(path) as file, pytest.raises(ValueError, match=r"sha256|CRC-32"):
        file.verify()


def test_a_file_without_a_hash_cannot_be_verified(tmp_path):
    np.savez(tmp_path / "w.npz", a=np.ones(1))
    with open_tensors(tmp_path / "w.npz") as file, refuses("…/w.npz", "[]"):
        file.verify()


# ---- What is there already -------------------------------------------------------------------------------------------


def manager_root(path):
    """What a checkpoint manager leaves: a folder of steps, and notes of a person's."""
    (path / "1000").mkdir(parents=True)
    (path / "1000" / "weights").write_text("precious")
    (path / "NOTES.md").write_text("precious")


def checkpoint_with(name):
    def make(path):
        write(path, {"old": np.ones(1)})
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text("precious")

    return make


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (manager_root, "1000"),
        (lambda path: (path / "an empty one").mkdir(parents=True), "an empty one"),
        (checkpoint_with("NOTES.md"), "['NOTES.md']"),
        (checkpoint_with("1000/_METADATA"), "1000"),
        (checkpoint_with("d/notes"), "d/notes"),
        (lambda path: (write(path, {"old": np.ones(1)}) / "_sharding").symlink_to("d"), "_sharding"),
    ],
    ids=["manager", "folder", "notes", "step", "inside", "link"],
)
def test_a_folder_is_not_replaced_unless_it_is_a_checkpoint_and_nothing_else(tmp_path, make, named):
    make(tmp_path / "run.orbax")
    old = contents(tmp_path)
    with refuses("…/run.orbax", named):
        write(tmp_path / "run.orbax", {"new": np.ones(1)})
    assert contents(tmp_path) == old


@pytest.mark.parametrize("kind", ["ours", "orbax's", "empty"])
def test_a_folder_that_is_a_checkpoint_is_replaced(tmp_path, kind):
    path = tmp_path / "w.orbax"
    if kind == "ours":
        write(path, {"old": np.ones(1)})
    elif kind == "empty":
        path.mkdir()
    else:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(path, {"a": jnp.ones(3), "b": {"c": jnp.ones(2)}})
    write(path, {"new": np.ones(1)})
    assert list(read_tensors(path)) == ["new"]
    assert os.listdir(tmp_path) == ["w.orbax"]


def test_what_comes_into_a_folder_during_the_write_is_not_removed(tmp_path):
    write(tmp_path / "w.orbax", {"old": np.ones(1)})

    def read(name):
        (tmp_path / "w.orbax" / "NOTES.md").write_text("precious")
        return np.ones(1)

    with refuses("…/w.orbax", "['NOTES.md'] there"):
        write_tensors(tmp_path / "w.orbax", {"new": ((1,), float)}, read)
    assert (tmp_path / "w.orbax" / "NOTES.md").read_text() == "precious"
    assert same_tensors(read_tensors(tmp_path / "w.orbax"), {"old": np.ones(1)})


@pytest.mark.parametrize("suffix", FILES)
def test_a_file_of_another_format_is_not_replaced(tmp_path, suffix):
    (tmp_path / f"w{suffix}").write_text("Dear diary")
    with refuses(f"…/w{suffix}", "begins with b'Dear"):
        write(tmp_path / f"w{suffix}", some_tensors())
    assert contents(tmp_path) == {Path(f"w{suffix}"): b"Dear diary"}


@pytest.mark.parametrize("suffix", FILES)
def test_an_empty_file_is_replaced(tmp_path, suffix):
    (tmp_path / f"w{suffix}").touch()
    write(tmp_path / f"w{suffix}", some_tensors())
    assert same_tensors(read_tensors(tmp_path / f"w{suffix}"), some_tensors())


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_nothing_is_replaced_where_that_is_not_wanted(tmp_path, suffix):
    old = before(tmp_path, suffix)
    with pytest.raises(FileExistsError, match=r"exists; pass --force to replace it"):
        write(tmp_path / f"w{suffix}", {"a": np.ones(1)}, overwrite=False)
    assert contents(tmp_path) == old


def test_what_comes_during_the_write_is_not_replaced_either(tmp_path):
    def read(name):
        write(tmp_path / "w.npz", {"of another": np.ones(1)})
        return np.ones(1)

    with pytest.raises(FileExistsError):
        write_tensors(tmp_path / "w.npz", {"a": ((1,), float)}, read, overwrite=False)
    assert list(read_tensors(tmp_path / "w.npz")) == ["of another"]
    assert os.listdir(tmp_path) == ["w.npz"]


def test_shards_of_another_count_go_with_their_index(tmp_path):
    (tmp_path / "v-00001-of-00009.safetensors").write_text("another checkpoint's")
    tensors = {name: np.ones(1) for name in "abcd"}
    write(tmp_path / "w.safetensors", tensors, max_shard_bytes=9)
    write(tmp_path / "w.safetensors", tensors, max_shard_bytes=17)
    shards = [f"w-0000{i}-of-00002.safetensors" for i in (1, 2)]
    others = ["v-00001-of-00009.safetensors", "w.safetensors.index.json"]
    assert sorted(os.listdir(tmp_path)) == sorted([*others, *shards])
    assert same_tensors(read_tensors(tmp_path / "w.safetensors.index.json"), tensors)


def test_shards_of_which_no_index_tells_are_not_replaced(tmp_path):
    write(tmp_path / "w-00001-of-00002.safetensors", {"precious": np.ones(1)})
    old = contents(tmp_path)
    with refuses("…/w-00001-of-00002.safetensors"):
        write(tmp_path / "w.safetensors", {"a": np.ones(1), "b": np.ones(1)}, max_shard_bytes=9)
    (tmp_path / "w.safetensors.index.json").write_text("{}")
    with refuses("…/w.safetensors.index.json"):
        write(tmp_path / "w.safetensors", {"a": np.ones(1), "b": np.ones(1)}, max_shard_bytes=9)
    assert contents(tmp_path) == {**old, Path("w.safetensors.index.json"): b"{}"}


@pytest.mark.parametrize("same", ["itself", "dot", "link", "hard link"])
def test_the_source_is_no_target(tmp_path, monkeypatch, same):
    monkeypatch.chdir(tmp_path)
    source, target = Path("a.npz"), Path("b.npz")
    write(source, some_tensors())
    if same == "itself":
        target = source
    elif same == "dot":
        target = Path("./a.npz").absolute()
    elif same == "link":
        target.symlink_to(source)
    else:
        target.hardlink_to(source)
    old = contents(tmp_path)
    with refuses("the target", path=target, source=source):
        write(target, some_tensors(), source=source)
    assert contents(tmp_path) == old


def test_a_shard_that_is_read_is_no_target(tmp_path):
    index = write(tmp_path / "w.safetensors", {"a": np.ones(1), "b": np.ones(1)}, max_shard_bytes=9)
    for source in (index, tmp_path / "w-00002-of-00002.safetensors"):
        with refuses("the target", path=..., source=source):
            write(tmp_path / "w.safetensors", {"c": np.ones(1), "d": np.ones(1)}, max_shard_bytes=9, source=source)
    with refuses("the target", path=..., source=index):
        write(tmp_path / "w-00001-of-00002.safetensors", {"c": np.ones(1)}, source=index)
    write(tmp_path / "v.safetensors", {"c": np.ones(1)}, source=index)


def test_a_folder_that_is_read_is_no_target_and_holds_none(tmp_path):
    write(tmp_path / "w.orbax", {"a": np.ones(1)})
    for target in ("w.orbax", "w.orbax/b.npz", "w.orbax/d/b.npz"):
        with refuses("the target", path=..., source=...):
            write(tmp_path / target, {"a": np.ones(1)}, source=tmp_path / "w.orbax")
    with refuses("the target", path=..., source=...):
        write(tmp_path / "w.orbax", {"a": np.ones(1)}, source=tmp_path / "w.orbax" / "_METADATA")
    assert list(read_tensors(tmp_path / "w.orbax")) == ["a"]


WRITE_AND_DIE = """
import os, signal, sys
from pathlib import Path
import numpy as np
from parity.files import target, write_tensors

path, when = Path(sys.argv[1]), sys.argv[2]

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def replace(self, to, original=Path.replace):
    if self.parent.name.endswith(target.SCRATCH):
        die()
    return original(self, to)

if when == "move":
    Path.replace = replace
write_tensors(path, {"new": ((2,), float)}, die if when == "read" else lambda name: np.ones(2))
"""


@pytest.mark.costly("a process that is killed as it writes")
@sample(where=lambda when, suffix: (when, suffix) in [("read", ".safetensors"), ("move", ".orbax")])
@pytest.mark.parametrize(
    ("when", "suffix"),
    [("read", ".safetensors"), ("read", ".orbax"), ("move", ".safetensors"), ("move", ".orbax")],
)
def test_what_a_killed_process_left_goes_with_the_next_write(tmp_path, suffix, when):
    path = tmp_path / f"w{suffix}"
    write(path, {"old": np.ones(1)})
    killed = subprocess.run([sys.executable, "-c", WRITE_AND_DIE, path, when], check=False)
    assert killed.returncode == -9
    (left,) = (name for name in os.listdir(tmp_path) if name != path.name)
    assert left.endswith(SCRATCH)
    # Killed between two moves, it had set the old folder aside, which comes back before anything else happens.
    with pytest.raises(ValueError, match="no more"):
        write_tensors(path, {"new": ((1,), float)}, no_more)
    assert list(read_tensors(path)) == ["old"]
    assert os.listdir(tmp_path) == [path.name]


def no_more(name):
    raise ValueError("no more")


def test_the_scratch_folder_of_a_process_that_still_writes_stays(tmp_path):
    path = tmp_path / "w.npz"

    def read(name):
        write(path, {"of another": np.ones(1)})
        return np.ones(1)

    write_tensors(path, {"a": ((1,), float)}, read)
    assert list(read_tensors(path)) == ["a"]
    assert os.listdir(tmp_path) == ["w.npz"]


# ---- What cannot be written ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["w", "w.gguf", "w.h5", "w.safetensors.index.json"])
def test_a_suffix_that_is_not_known_is_refused(tmp_path, name):
    with refuses(str(tmp_path / name)):
        write(tmp_path / name, some_tensors())
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("suffix", "array"),
    [
        (".npz", np.zeros(1, ml_dtypes.float8_e4m3fn)),
        (".safetensors", np.zeros(1, np.complex128)),
        (".pt", np.array([None])),
        (".npz", np.array(["text"])),
        (".msgpack", np.zeros(1, "M8[s]")),
        (".safetensors", np.zeros(1, [("a", "f4")])),
        (".orbax", np.zeros((0, 3))),
    ],
)
def test_what_a_format_cannot_hold_is_refused(tmp_path, suffix, array):
    with refuses("tensors" if suffix == ".orbax" else f"…/w{suffix}"):
        write(tmp_path / f"w{suffix}", {"a": array})
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("array", [np.ones(3), np.ones((1, 2)), np.ones(2, np.float32), [1.0], "text"])
def test_another_tensor_than_was_announced_is_refused(tmp_path, array):
    with refuses("a"):
        write_tensors(tmp_path / "w.npz", {"a": ((2,), float)}, lambda name: array)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["__metadata__", "__metadata__.a", "a\nb", "a\0", "\ud800", "\x1b[2J"])
def test_names_that_no_tensor_may_have_are_refused(tmp_path, name):
    with refuses("names", names=name) as refusal:
        write(tmp_path / "w.safetensors", {name: np.ones(1)})
    assert str(refusal.value).isprintable()


@pytest.mark.parametrize(("metadata", "error"), [({"a": 1}, TypeError), ({"a": "\ud800"}, ValueError)])
def test_metadata_that_is_no_text_is_refused(tmp_path, metadata, error):
    with pytest.raises(error):
        write(tmp_path / "w.npz", some_tensors(), metadata)
    assert os.listdir(tmp_path) == []


def test_metadata_that_a_zip_archive_cannot_hold_are_refused(tmp_path):
    with refuses("metadata", "more"):
        write(tmp_path / "w.npz", some_tensors(), {"a": "b" * 70_000})


@pytest.mark.parametrize("shape", [(2.0,), ("2",), (None,)])
def test_a_shape_that_is_none_is_refused(tmp_path, shape):
    with pytest.raises(TypeError, match="as an integer"):
        write_tensors(tmp_path / "w.npz", {"a": (shape, float)}, lambda name: np.ones(2))
    with refuses("a shape", "(-2,)"):
        write_tensors(tmp_path / "w.npz", {"a": ((-2,), float)}, lambda name: np.ones(2))


@pytest.mark.parametrize("bad", [{"max_shard_bytes": 0}, {"max_shard_bytes": -1}])
def test_a_shard_must_have_some_bytes(tmp_path, bad):
    with refuses("max_shard_bytes", max_shard_bytes=...):
        write(tmp_path / "w.safetensors", some_tensors(), **bad)


def test_only_some_formats_have_shards(tmp_path):
    with refuses("max_shard_bytes"):
        write(tmp_path / "w.npz", some_tensors(), max_shard_bytes=100)


@pytest.mark.parametrize("target", ["folder", "pipe", "loop", "device"])
def test_a_target_that_is_something_else_is_refused(tmp_path, target):
    path = tmp_path / "w.safetensors"
    something_else(path, target)
    with pytest.raises((ValueError, OSError), match=r"w\.safetensors"):
        write(path, some_tensors())
    assert os.listdir(tmp_path) == ["w.safetensors"]


def something_else(path, kind):
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "loop":
        path.symlink_to(path)
    else:
        path.symlink_to("/dev/zero")


# ---- Memory ----------------------------------------------------------------------------------------------------------

CONVERT = """
import resource
import sys

sys.dont_write_bytecode = True  # Python leaves half a file if it cannot write it
import numpy as np
from parity.files import open_tensors, write_tensors
from parity.files.target import BEFORE, SCRATCH

def resident():  # what is mapped from files may be dropped at any time, and does not count
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))

source, target = sys.argv[1:]
if ".pt" in source + target:
    import torch
size = 10 * 2**20
if source == "none":
    rng = np.random.default_rng(0)
    infos = {f"layer.{i}.weight": ((size // 4096, 1024), np.float32) for i in range(10)}
    original = lambda name: rng.random(infos[name][0], np.float32)
else:
    file = open_tensors(source)
    infos, original = file.infos, file.read
peak = 0
def read(name):
    global peak
    array = original(name)
    peak = max(peak, resident())
    return array
original(next(iter(infos)))  # what is imported and allocated once
base, base_of_all = resident(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
write_tensors(target, infos, read)
of_all = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - base_of_all
print((peak - base) / size, of_all / size)
"""


@pytest.mark.costly("the memory of a process")
@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_holds_about_one_tensor_of_a_file_of_ten(tmp_path):
    def convert(source, target):
        program = [sys.executable, "-c", CONVERT, source, tmp_path / target]
        # Else glibc keeps a freed tensor or not by what else lies in its heap: 1.0 or 2.0 tensors for the same code.
        own = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1048576"}
        result = subprocess.run(program, capture_output=True, text=True, check=False, env=own)
        assert result.returncode == 0, result.stderr
        return [float(number) for number in result.stdout.split()]

    source, used = "none", {}
    for target in ("w.safetensors", "w.npz", "w.msgpack", "w.pt", "v.safetensors"):
        used[target] = convert(source, target)
        source = tmp_path / target
    assert max(anonymous for anonymous, _ in used.values()) < 2.0, used
    # torch maps the file that it reads, and the one that it reads back: these pages are not ours.
    assert max(peak for target, (_, peak) in used.items() if target in ("w.safetensors", "w.npz", "w.msgpack")) < 3.0, (
        used
    )
    assert (tmp_path / "v.safetensors").read_bytes() == (tmp_path / "w.safetensors").read_bytes()


# ---- Hostile files ---------------------------------------------------------------------------------------------------


@sample(12)
@pytest.mark.parametrize(
    "name", ["w", *(f"w{suffix}" for suffix in [*SUFFIXES, ".gguf", ".bin", ".index.json", ".h5"])]
)
@pytest.mark.parametrize(
    "data", [b"", b"\0", bytes(4096), b"\xff" * 64, b"PK\3\4" + bytes(100), b"GGUF", b"\x81" * 999]
)
def test_a_file_of_another_kind_is_refused(tmp_path, name, data):
    (tmp_path / name).write_bytes(data)
    assert str(tmp_path / name) in refuses_to_open(tmp_path / name)


@sample(12)
@pytest.mark.parametrize("kind", ["folder", "pipe", "loop", "device"])
@pytest.mark.parametrize("name", ["w.safetensors", "w.npz", "w.pt", "w.gguf", "w.safetensors.index.json"])
def test_what_is_no_file_is_refused_at_once(tmp_path, name, kind):
    something_else(tmp_path / name, kind)
    refuses_to_open(tmp_path / name)


def test_a_path_that_is_not_there_is_an_os_error(tmp_path):
    with pytest.raises(OSError, match="nowhere"):
        open_tensors(tmp_path / "nowhere.safetensors")


@pytest.mark.parametrize("suffix", [*FILES, ".gguf"])
def test_a_file_cut_off_anywhere_is_refused(tmp_path, suffix):
    path = tmp_path / f"w{suffix}"
    if suffix == ".gguf":
        write_gguf(path, {"a": np.arange(8, dtype=np.float32)})
    else:
        write(path, {"a": np.arange(8.0)})
    whole = path.read_bytes()
    for length in range(0, len(whole), max(1, len(whole) // 60)):
        path.write_bytes(whole[:length])
        refuses_to_open(path)


# safetensors


def safetensors_file(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(shape=(2,), dtype="F32", offsets=(0, 8)):
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@sample(12)
@pytest.mark.parametrize(
    "data",
    [
        safetensors_file({"a": entry()}, bytes(8), length=2**63),
        safetensors_file({"a": entry()}, bytes(8), length=100),
        safetensors_file({"a": entry()}, bytes(8), length=200_000_000),
        safetensors_file({"a": entry()}, bytes(7)),
        safetensors_file({"a": entry()}, bytes(9)),
        safetensors_file({"a": entry(offsets=(8, 16)), "b": entry(offsets=(8, 16))}, bytes(16)),
        safetensors_file({"a": entry(), "b": entry(offsets=(4, 12))}, bytes(12)),
        safetensors_file({"a": entry(offsets=(8, 0))}, bytes(8)),
        safetensors_file({"a": entry(offsets=(0, 2**64))}, bytes(8)),
        safetensors_file({"a": entry(offsets=(-8, 0))}, bytes(8)),
        safetensors_file({"a": entry(offsets=(0,))}, bytes(8)),
        safetensors_file({"a": entry(shape=(3,))}, bytes(8)),
        safetensors_file({"a": entry(shape=(-2,))}, bytes(8)),
        safetensors_file({"a": entry(shape=(-2, -1))}, bytes(8)),
        safetensors_file({"a": entry(shape=(2.0,))}, bytes(8)),
        safetensors_file({"a": entry(shape=(2**62, 2, 2))}, bytes(8)),
        safetensors_file({"a": entry(shape="2")}, bytes(8)),
        safetensors_file({"a": entry(dtype="F33")}, bytes(8)),
        safetensors_file({"a": entry(dtype=["F32"])}, bytes(8)),
        safetensors_file({"a": entry(dtype="F4", shape=(16,))}, bytes(8)),
        safetensors_file({"a": 3}, bytes(8)),
        safetensors_file({"a": {"dtype": "F32"}}, bytes(8)),
        safetensors_file([], bytes(8)),
        safetensors_file({"__metadata__": {"a": 1}}),
        safetensors_file({"__metadata__": [1]}),
        safetensors_file(b'{"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"F32","shape":[2],'
                         b'"data_offsets":[0,8]}}', bytes(8)),
        safetensors_file(b'{"__metadata__":{"a":"b","a":"c"}}'),
        safetensors_file(b'{"a":' + b"[" * 100_000),
        safetensors_file(b'{"\xff":3}'),
        safetensors_file(b'{"\\ud800":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}'),
        safetensors_file({"a\nb": entry()}, bytes(8)),
        safetensors_file({"\x1b[2J": entry()}, bytes(8)),
    ],
)  # fmt: skip
def test_a_hostile_safetensors_file_is_refused(tmp_path, data):
    (tmp_path / "w.safetensors").write_bytes(data)
    refuses_to_open(tmp_path / "w.safetensors")


# npz


def npy(shape, descr="<f4", data=b"", fortran="False", version=(1, 0)):
    text = f"{{'descr': {descr!r}, 'fortran_order': {fortran}, 'shape': {shape}, }}".encode()
    text += b" " * (-(10 + len(text) + 1) % 64) + b"\n"
    return b"\x93NUMPY" + bytes(version) + struct.pack("<H", len(text)) + text + data


def npz(*members, compression=zipfile.ZIP_STORED):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, data in members:
            archive.writestr(name, data)
    return file.getvalue()


@sample(12)
@pytest.mark.parametrize(
    "data",
    [
        npz(("a.npy", npy((2**40,), data=bytes(8)))),
        npz(("a.npy", npy((2**70, 2**70), data=bytes(8)))),
        npz(("a.npy", npy((-2,), data=bytes(8)))),
        npz(("a.npy", npy((-1, -2), data=bytes(8)))),
        npz(("a.npy", npy((2.0,), data=bytes(8)))),
        npz(("a.npy", npy("'x'", data=bytes(8)))),
        npz(("a.npy", npy((2,), data=bytes(7)))),
        npz(("a.npy", npy((2,), data=bytes(9)))),
        npz(("a.npy", npy((2,), descr="<f9", data=bytes(8)))),
        npz(("a.npy", npy((1,), descr="|O", data=pickle.dumps([None])))),
        npz(("a.npy", npy((1,), descr="<U2", data=bytes(8)))),
        npz(("a.npy", npy((1,), descr=[("a", "<f4")], data=bytes(4)))),
        npz(("a.npy", npy((1,), descr="|V3", data=bytes(3)))),
        npz(("a.npy", npy((2,), data=bytes(8), fortran="x"))),
        npz(("a.npy", npy((2,), data=bytes(8), version=(9, 0)))),
        npz(("a.npy", npy("(" * 5000 + ")" * 5000))),
        npz(("a.npy", b"")),
        npz(("a.npy", b"\x93NUMPY")),
        npz(("a.npy", b"\x93NUMPY\2\0\xff\xff\xff\xff")),
        npz(("a.npy", npy("-" * 900 + "1"))),
        npz(("a.npy", npy("1if 1else 1"))),
        npz(("a.npy", npy("__import__('os').abort()"))),
        npz(("a.npy", npy((2,), data=bytes(8))), compression=zipfile.ZIP_BZIP2),
        npz(("a.npy", npy((2,), data=bytes(8))), compression=zipfile.ZIP_LZMA),
    ],
)
def test_a_hostile_npz_is_refused(tmp_path, data):
    (tmp_path / "w.npz").write_bytes(data)
    refuses_to_open(tmp_path / "w.npz")


def test_the_same_name_twice_in_json_is_refused():
    with refuses("names", "b twice"):
        parse_json(b'{"a": 1, "b": 2, "b": 3}')


def test_the_same_member_twice_is_refused(tmp_path):
    with pytest.warns(UserWarning, match="Duplicate name"):
        data = npz(("a.npy", npy((0,))), ("a.npy", npy((0,))))
    (tmp_path / "w.npz").write_bytes(data)
    refuses_to_open(tmp_path / "w.npz", "a.npy twice")


def test_a_zip_bomb_is_refused(tmp_path):
    np.savez_compressed(tmp_path / "w.npz", a=np.zeros(10**7))
    assert (tmp_path / "w.npz").stat().st_size < 10**5
    refuses_to_open(tmp_path / "w.npz", "100-fold")


def test_zeros_among_weights_are_no_bomb(tmp_path):
    rng = np.random.default_rng(0)
    tensors = {"zeros": np.zeros(10**7, np.float32), "weights": rng.random(10**6)}
    np.savez_compressed(tmp_path / "w.npz", **tensors)
    assert same_tensors(read_tensors(tmp_path / "w.npz"), tensors)


@pytest.mark.parametrize("name", ["../x", "/tmp/x", "..\\x", "a/../../x"])
def test_a_name_is_no_path(tmp_path, name):
    (tmp_path / "w.npz").write_bytes(npz((f"{name}.npy", npy((2,), data=bytes(8)))))
    assert list(read_tensors(tmp_path / "w.npz")) == [name]
    assert os.listdir(tmp_path) == ["w.npz"]


# torch


class Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_the_payload_works(tmp_path):  # the control of the tests below
    pickle.loads(pickle.dumps(Payload(tmp_path / "harm"))).close()
    assert (tmp_path / "harm").exists()


@pytest.mark.parametrize("name", ["w.pt", "w.bin", "w.pth", "w"])
@pytest.mark.parametrize("how", ["archive", "legacy", "pickle"])
def test_nothing_in_a_file_of_torch_is_executed(tmp_path, name, how):
    content = {"w": torch.ones(2), "x": Payload(tmp_path / "harm")}
    if how == "pickle":
        (tmp_path / name).write_bytes(pickle.dumps(content, protocol=2))
    else:
        torch.save(content, tmp_path / name, _use_new_zipfile_serialization=how == "archive")
    refuses_to_open(tmp_path / name, f"{name} .*open" if how == "archive" else "")
    assert os.listdir(tmp_path) == [name]


def test_a_file_of_torch_from_before_archives_is_read(tmp_path):
    tensors = {"a.weight": torch.randn(3, 2), "a.bias": torch.randn(3).bfloat16()}
    torch.save(tensors, tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    with open_tensors(tmp_path / "old.bin") as file:
        assert {name: file.read(name).tobytes() for name in file.infos} == {
            name: to_numpy(tensor).tobytes() for name, tensor in tensors.items()
        }
    whole = (tmp_path / "old.bin").read_bytes()
    for cut in (1, len(whole) // 2, len(whole) - 1):
        (tmp_path / "old.bin").write_bytes(whole[:cut])
        refuses_to_open(tmp_path / "old.bin")


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_nothing_in_an_npz_is_executed(tmp_path, save):
    save(tmp_path / "w.npz", a=np.array([Payload(tmp_path / "harm")], dtype=object))
    refuses_to_open(tmp_path / "w.npz")
    assert os.listdir(tmp_path) == ["w.npz"]


def torch_file(tree, **changes):
    """An archive of torch's, with some members changed."""
    file = io.BytesIO()
    torch.save(tree, file)
    with zipfile.ZipFile(file) as archive:
        members = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
    return npz(*((f"archive/{name}", data) for name, data in (members | changes).items()))


def cycle():
    tree = {}
    tree["a"] = tree
    return tree


def laughter():
    tree = {"a": torch.ones(1)}
    for _ in range(40):
        tree = {"a": tree, "b": tree}
    return tree


def deep():
    tree = torch.ones(1)
    for _ in range(200):
        tree = [tree]
    return tree


@pytest.mark.parametrize(
    "data",
    [
        lambda: torch_file(cycle()),
        lambda: torch_file(laughter()),
        lambda: torch_file(deep()),
        lambda: torch_file({0: torch.ones(1), "0": torch.ones(1)}),
        lambda: torch_file({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}),
        lambda: torch_file({"a\n": torch.ones(1)}),
        lambda: torch_file({"a": torch.ones(2).to_sparse()}),
        lambda: torch_file({"a": torch.ones(2, device="meta")}),
        lambda: torch_file({"a": torch.ones(2)}, **{"data/0": bytes(4)}),
        lambda: torch_file({"a": torch.ones(2)}, **{"data/0": bytes(12)}),
        lambda: torch_file({"a": torch.ones(2)}, **{"data.pkl": b""}),
        lambda: torch_file({"a": torch.ones(2)}, **{"data.pkl": b"\x80\x02."}),
        lambda: torch_file({"a": torch.ones(2)}, byteorder=b"middle"),
        lambda: torch_file({"a": torch.ones(2)}, version=b"99\n"),
        lambda: torch_file({"a": torch.ones(2)}, **{"constants.pkl": b""}),
    ],
)
def test_a_hostile_file_of_torch_is_refused(tmp_path, data):
    (tmp_path / "w.pt").write_bytes(data())
    refuses_to_open(tmp_path / "w.pt")


def test_a_compressed_file_of_torch_is_refused(tmp_path):
    members = [("archive/data.pkl", b""), ("archive/version", b"3\n")]
    (tmp_path / "w.pt").write_bytes(npz(*members, compression=zipfile.ZIP_DEFLATED))
    refuses_to_open(tmp_path / "w.pt", refuses("members of an archive of torch's"))


# msgpack and gguf


def array(*values):
    """An array as Flax writes it: a shape, a dtype and bytes, or something else instead."""
    return msgpack.ExtType(1, msgpack.packb(values))


@sample(12)
@pytest.mark.parametrize(
    "data",
    [
        b"\x81\xa1a" * 500,
        b"\x91" * 100_000,
        b"\xdf\xff\xff\xff\xff",
        b"\x81\xa1a\xdd\xff\xff\xff\xff" + bytes(100),
        b"\x81\xa1a\xdb\xff\xff\xff\xff" + bytes(100),
        b"\x81\xa1a\xc9\xff\xff\xff\xff\1" + bytes(100),
        b"\x81\xa1a\xc1",
        b"\x81\x90\1",
        b"\x82\xa1a\1\xa1a\1",
        b"\x81\xa1a\1\1",
        b"\x81\xa1\xff\1",
        msgpack.packb({"a": array((2**62, 8), "float32", b"")}),
        msgpack.packb({"a": array((1,), "object", bytes(8))}),
        msgpack.packb({"a": array((1,), "<f4", bytes(4))}),
        msgpack.packb({"a": array((1,), "float32", bytes(3))}),
        msgpack.packb({"a": array((1,), "float32", "four")}),
        msgpack.packb({"a": array((0,), "float32", [])}),
        msgpack.packb({"a": array((b"1",), "float32", bytes(4))}),
        msgpack.packb({"a": array((1,), "float32", bytes(4))})[:-1] + b"\0\0",
        msgpack.packb({"a": msgpack.ExtType(1, msgpack.packb([(1,), "float32"]))}),
        msgpack.packb({"a": msgpack.ExtType(1, b"\x93" * 1000)}),
        msgpack.packb({msgpack_format.CHUNKED: True}),
    ],
)
def test_a_hostile_msgpack_file_is_refused(tmp_path, data):
    (tmp_path / "w.msgpack").write_bytes(data)
    refuses_to_open(tmp_path / "w.msgpack")


def gguf_text(text):
    return struct.pack("<Q", len(text)) + text


def gguf_file(values=(), tensors=(), *, version=3, num_values=None, num_tensors=None, data=bytes(64)):
    counts = (len(tensors) if num_tensors is None else num_tensors, len(values) if num_values is None else num_values)
    head = b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join(values) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + data


def gguf_tensor(name=b"a", shape=(2,), kind=0, offset=0):
    return gguf_text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def gguf_value(kind, data, key=b"k"):
    return gguf_text(key) + struct.pack("<I", kind) + data


@sample(12)
@pytest.mark.parametrize(
    "data",
    [
        gguf_file(version=1),
        gguf_file(version=0x03000000),
        gguf_file(num_tensors=2**63),
        gguf_file(num_values=2**63),
        gguf_file([gguf_value(9, struct.pack("<IQ", 0, 2**63))]),
        gguf_file([gguf_value(9, struct.pack("<IQ", 8, 2**63))]),
        gguf_file([gguf_value(9, struct.pack("<IQ", 9, 2**63))]),
        gguf_file([gguf_value(9, struct.pack("<IQ", 9, 1) * 10_000)]),
        gguf_file([gguf_value(9, struct.pack("<IQ", 77, 1))]),
        gguf_file([gguf_value(77, b"")]),
        gguf_file([gguf_value(8, gguf_text(b"\xff"))]),
        gguf_file([gguf_value(8, struct.pack("<Q", 2**63))]),
        gguf_file([gguf_value(0, b"\1")] * 2),
        gguf_file([gguf_value(4, struct.pack("<I", 0), b"general.alignment")], [gguf_tensor()]),
        gguf_file([gguf_value(4, struct.pack("<I", 33), b"general.alignment")], [gguf_tensor()]),
        gguf_file([gguf_value(8, gguf_text(b"x"), b"general.alignment")], [gguf_tensor()]),
        gguf_file([], [gguf_tensor()] * 2),
        gguf_file([], [gguf_tensor(b"a"), gguf_tensor(b"b", offset=4)]),
        gguf_file([], [gguf_tensor(offset=2**63)]),
        gguf_file([], [gguf_tensor(shape=(2**62, 2**62))]),
        gguf_file([], [gguf_tensor(shape=(1,) * 9)]),
        gguf_file([], [gguf_tensor(shape=(100,))]),
        gguf_file([], [gguf_tensor(kind=77)]),
        gguf_file([], [gguf_tensor(b"\xff")]),
        gguf_file([], [gguf_tensor(b"a\n")]),
    ],
)
def test_a_hostile_gguf_file_is_refused(tmp_path, data):
    (tmp_path / "w.gguf").write_bytes(data)
    refuses_to_open(tmp_path / "w.gguf")


# ---- Any damage ------------------------------------------------------------------------------------------------------


def seeds(folder, suffix):
    """Files to damage."""
    tensors = {"m.a": np.arange(12.0).reshape(3, 4), "m.b": np.ones(3, ml_dtypes.bfloat16), "c": np.array([True])}
    path = folder / f"seed{suffix}"
    if suffix == ".gguf":
        del tensors["c"]
        write_gguf(path, tensors)
        plain = path.read_bytes()
        write_gguf(path, tensors, [("q", gguf.GGMLQuantizationType.Q8_0)])
        return [plain, plain, path.read_bytes()]
    if suffix == ".index.json":
        write(folder / "w.safetensors", tensors, max_shard_bytes=20).rename(folder / "w.index.json")
        return [(folder / "w.index.json").read_bytes()]
    write(path, tensors, {"spec": "x"})
    found = [path.read_bytes()]
    if suffix == ".npz":
        np.savez_compressed(path, **tensors)
    elif suffix == ".pt":
        torch.save({"model": {"a": torch.ones(3, 4), "b": torch.nn.Parameter(torch.ones(3))}, "n": [3, "x"]}, path)
    elif suffix == ".msgpack":
        path.write_bytes(flax.serialization.msgpack_serialize({"a": {"b": np.ones(3), "c": 1, "d": ["x"]}}))
    return [*found, path.read_bytes()]


def damaged(data, rng):
    data = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 4, 16])):
        end = max(1, len(data))
        i = rng.choice([rng.randrange(end), rng.randrange(min(end, 300)), end - 1 - rng.randrange(min(end, 200))])
        j = rng.randrange(end)
        length = rng.randrange(1, 33)
        kind = rng.randrange(7)
        if kind == 0 and data:
            data[i] ^= 1 << rng.randrange(8)
        elif kind == 1 and data:
            data[i] = rng.randrange(256)
        elif kind == 2:
            del data[i:]
        elif kind == 3:
            data[i : i + length] = data[j : j + length]
        elif kind == 4:
            del data[i : i + length % 8]
        elif kind == 5:
            data[i:i] = rng.randbytes(length % 8)
        else:
            data[i : i + 8] = rng.choice([b"\xff" * 8, bytes(8), b"\xff\xff\xff\x7f", b"\0\0\0\0\1\0\0\0"])
    return bytes(data)


@pytest.mark.parametrize("suffix", [*FILES, ".gguf", ".index.json"])
def test_a_damaged_file_loads_or_is_refused_in_one_line(tmp_path, suffix):
    rng = random.Random(0)
    wholes = seeds(tmp_path, suffix)
    refused = 0
    for _ in range(250):
        path = tmp_path / f"w{suffix}"
        path.write_bytes(damaged(rng.choice(wholes), rng))
        error = refusal(path)
        assert str(error).isprintable()
        refused += error is not None
    assert refused > 125


def damage_a_checkpoint(folder):
    """How often a checkpoint was refused that was damaged 60 times."""
    rng = random.Random(0)
    write(folder / "w.orbax", some_tensors(empty=False), {"a": "b"})
    wholes = {path: path.read_bytes() for path in (folder / "w.orbax").rglob("*") if path.is_file()}
    refused = 0
    for _ in range(60):
        path = rng.choice(list(wholes))
        path.write_bytes(damaged(wholes[path], rng))
        error = refusal(folder / "w.orbax")
        assert str(error).isprintable()
        refused += error is not None
        path.write_bytes(wholes[path])
    return refused


@pytest.mark.costly("threads of a library that outlive the test")
@pytest.mark.thorough
def test_a_damaged_orbax_checkpoint_loads_or_is_refused_in_one_line(tmp_path):
    # In a process of its own, for the library's threads go on to complain when all is over.
    program = (
        "import pathlib, runpy, sys\n"
        "damage = runpy.run_path(sys.argv[1])['damage_a_checkpoint']\n"
        "print(damage(pathlib.Path(sys.argv[2])))"
    )
    command = [sys.executable, "-c", program, __file__, tmp_path]
    result = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": PYTHONPATH}
    )
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) > 10


# ---- What is not installed -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("suffix", "module"), [(".pt", "torch"), (".msgpack", "msgpack"), (".orbax", "orbax.checkpoint")]
)
def test_a_library_that_is_missing_is_told(tmp_path, monkeypatch, suffix, module):
    write(tmp_path / f"w{suffix}", {"a": np.ones(1)})
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"w{suffix} needs {module.split('.')[0]}"):
        open_tensors(tmp_path / f"w{suffix}")
    with pytest.raises(
        ImportError, match=rf"v{suffix} needs {module.split('.')[0]}.*; pip install {module.split('.')[0]}"
    ):
        write(tmp_path / f"v{suffix}", {"a": np.ones(1)})
    assert os.listdir(tmp_path) == [f"w{suffix}"]

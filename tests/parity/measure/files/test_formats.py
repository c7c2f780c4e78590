"""Files of named tensors: exact, written whole or not at all, and always safe to open."""

import errno
import fcntl
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

import filelock
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
from helpers.input_errors import rejects
from helpers.samples import sample
from helpers.tensors import read_tensors, same_array

from parity import to_numpy
from parity.measure.files import gguf as gguf_format
from parity.measure.files import msgpack as msgpack_format
from parity.measure.files import open_tensors, write_tensors
from parity.measure.files.target import BEFORE, FOLDER_LOCK, SCRATCH, _acquire, _new_lock, locked
from parity.measure.files.tensor_file import flatten, hash_of, nest, parse_json
from parity.measure.files.zipped import ALIGNMENT

SUFFIXES = [".safetensors", ".npz", ".pt", ".msgpack", ".orbax"]
FILES = [suffix for suffix in SUFFIXES if suffix != ".orbax"]
DTYPES = ["float32", "float16", "bfloat16", "float64", "int64", "bool"]
OTHER_DTYPES = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "uint64", "complex64"]


def dtype_of(name):
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def some_tensors(dtype="float32", *, empty=True):
    """Arrays that formats get wrong: scalar, empty, transposed, reversed, with arbitrary bits."""
    rng = np.random.default_rng(0)
    dtype = dtype_of(dtype)

    def draw(*shape):
        if dtype.kind == "b":
            return rng.random(shape) < 0.5
        count = int(np.prod(shape, dtype=int)) * dtype.itemsize
        return (
            rng.integers(0, 256, count, dtype=np.uint8).view(dtype).reshape(shape)
        )  # including NaNs of many kinds

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


def same_tensors(actual, expected):
    return actual.keys() == expected.keys() and all(
        same_array(actual[name], expected[name]) for name in expected
    )


def input_error(path):
    """Return the error of opening a file and reading all tensors, or None."""
    try:
        read_tensors(path)
    except (ValueError, OSError) as error:
        return error
    return None


def fails_to_open(path, expected=""):
    """Check that opening and reading raises an error of one printable line, and return the line."""
    error = str(input_error(path))
    assert error != "None"
    assert error.isprintable()
    assert (
        re.search(expected, error) if isinstance(expected, str) else expected.is_printed_in(error)
    ), error
    return error


# ---- Round trips ---------------------------------------------------------------------------------


@sample(8)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_tensors_round_trip_bit_for_bit(tmp_path, suffix, dtype):
    """Tensors and metadata round-trip in six dtypes and five formats, and the hash verifies."""
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


@sample(8)
@pytest.mark.parametrize("dtype", OTHER_DTYPES)
@pytest.mark.parametrize("suffix", FILES)
def test_other_dtypes_round_trip(tmp_path, suffix, dtype):
    """Tensors of eight more dtypes round-trip in formats of one file, bit for bit."""
    tensors = some_tensors(dtype)
    write(tmp_path / f"w{suffix}", tensors)
    assert same_tensors(read_tensors(tmp_path / f"w{suffix}"), tensors)


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2])
@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ".msgpack"])
def test_float8_round_trips_if_supported(tmp_path, suffix, dtype):
    """float8 tensors round-trip in safetensors, torch and msgpack files, bit for bit."""
    tensors = {"w": np.arange(256, dtype=np.uint8).view(dtype).reshape(16, 16)}
    write(tmp_path / f"w{suffix}", tensors)
    assert same_tensors(read_tensors(tmp_path / f"w{suffix}"), tensors)


@pytest.mark.parametrize("suffix", FILES)
def test_file_without_tensors_round_trips(tmp_path, suffix):
    """A file without tensors keeps its metadata."""
    write(tmp_path / f"w{suffix}", {}, {"a": "b"})
    with open_tensors(tmp_path / f"w{suffix}") as file:
        assert not file.infos
        assert file.metadata["a"] == "b"


@pytest.mark.parametrize("suffix", FILES)
def test_files_are_deterministic(tmp_path, suffix):
    """Writing the same tensors and metadata twice writes the same bytes."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write(tmp_path / name / f"w{suffix}", some_tensors(), {"a": "b"})
    assert (tmp_path / "a" / f"w{suffix}").read_bytes() == (
        tmp_path / "b" / f"w{suffix}"
    ).read_bytes()


def test_hash_ignores_format_and_order(tmp_path):
    """The hash of tensors is the same in five formats and in either order."""
    tensors = some_tensors(empty=False)
    hashes = set()
    for suffix in SUFFIXES:
        write(tmp_path / f"w{suffix}", tensors)
        tensors = dict(reversed(tensors.items()))
        with open_tensors(tmp_path / f"w{suffix}") as file:
            hashes.add(file.metadata["sha256"])
    assert len(hashes) == 1


@pytest.mark.parametrize("change", ["name", "dtype", "shape", "value"])
def test_hash_depends_on_each_property(tmp_path, change):
    """The hash changes with a name, a dtype, a shape or a value."""
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


def test_file_is_copied_to_other_format(tmp_path):
    """One call of write_tensors copies an npz file to a safetensors file, bit for bit."""
    tensors = some_tensors("bfloat16")
    write(tmp_path / "a.npz", tensors, {"a": "b"})
    with open_tensors(tmp_path / "a.npz") as file:
        write_tensors(tmp_path / "b.safetensors", file.infos, file.read, file.metadata)
    assert same_tensors(read_tensors(tmp_path / "b.safetensors"), tensors)


@pytest.mark.parametrize("suffix", FILES)
def test_file_can_be_written_onto_itself(tmp_path, suffix):
    """A file may be replaced by its own tensors while it is open."""
    path = tmp_path / f"w{suffix}"
    write(path, some_tensors())
    with open_tensors(path) as file:
        write_tensors(path, file.infos, lambda name: file.read(name)[...], {})
    assert same_tensors(read_tensors(path), some_tensors())


def test_read_array_outlives_its_file(tmp_path):
    """An array is writable after its file is closed; reading from the closed file raises."""
    for suffix in SUFFIXES:
        write(tmp_path / f"w{suffix}", {"a": np.ones(3)})
        with open_tensors(tmp_path / f"w{suffix}") as file:
            array = file.read("a")
        array[0] = 2.0
        with pytest.raises(ValueError, match="before the file is closed"):
            file.read("a")
    assert array.tolist() == [2.0, 1.0, 1.0]


def test_reading_an_unknown_name_raises(tmp_path):
    """Reading a name that is not in the file raises an error with the name."""
    write(tmp_path / "w.npz", {"a": np.ones(3)})
    with open_tensors(tmp_path / "w.npz") as file, rejects("name", name="b"):
        file.read("b")


# ---- Files of other libraries --------------------------------------------------------------------


def state_dict(tensors):
    """The same values as torch tensors."""
    bits = {"bfloat16": torch.bfloat16, "float8_e4m3fn": torch.float8_e4m3fn}
    return {
        name: torch.from_numpy(np.array(tensor).view(f"u{tensor.itemsize}")).view(
            bits[tensor.dtype.name]
        )
        if tensor.dtype.name in bits
        else torch.from_numpy(np.array(tensor))
        for name, tensor in tensors.items()
    }


@pytest.mark.parametrize("dtype", DTYPES)
def test_reads_safetensors_of_its_library(tmp_path, dtype):
    """Files of the safetensors library are read bit for bit."""
    tensors = some_tensors(dtype)
    contiguous = {name: tensor.contiguous() for name, tensor in state_dict(tensors).items()}
    safetensors.torch.save_file(contiguous, tmp_path / "w.safetensors", {"format": "pt"})
    assert same_tensors(read_tensors(tmp_path / "w.safetensors"), tensors)


def bytes_of(tensor):
    """Return the elements of a tensor in order, as bytes."""
    return tensor.flatten().clone(memory_format=torch.contiguous_format).view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_safetensors_library_reads_ours(tmp_path, dtype):
    """The safetensors library reads tensors and metadata of our files bit for bit."""
    tensors = some_tensors(dtype)
    write(tmp_path / "w.safetensors", tensors, {"format": "pt"})
    loaded = safetensors.torch.load_file(tmp_path / "w.safetensors")
    expected = state_dict(tensors)
    assert loaded.keys() == expected.keys()
    for name in expected:
        assert loaded[name].shape == expected[name].shape
        assert torch.equal(bytes_of(loaded[name]), bytes_of(expected[name]))
    with safetensors.safe_open(tmp_path / "w.safetensors", "numpy") as file:
        assert file.metadata()["format"] == "pt"
        assert all(same_array(file.get_tensor(name), tensor) for name, tensor in tensors.items())


def test_safetensors_data_are_aligned(tmp_path):
    """Tensors of mixed dtypes begin at multiples of their item size in safetensors files."""
    tensors = {
        "a": np.ones(3, bool),
        "b": np.ones(3, np.float64),
        "c": np.ones(3, np.float16),
        "d": np.ones(1, bool),
    }
    write(tmp_path / "w.safetensors", tensors)
    data = (tmp_path / "w.safetensors").read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    assert (8 + length) % 8 == 0
    assert all(
        header[name]["data_offsets"][0] % tensor.itemsize == 0 for name, tensor in tensors.items()
    )
    assert same_tensors(read_tensors(tmp_path / "w.safetensors"), tensors)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_reads_npz_of_numpy(tmp_path, dtype, save):
    """Compressed and uncompressed npz files of NumPy are read bit for bit."""
    tensors = some_tensors(dtype)
    save(tmp_path / "w.npz", **tensors)
    assert same_tensors(read_tensors(tmp_path / "w.npz"), tensors)


@pytest.mark.parametrize("dtype", DTYPES)
def test_numpy_reads_our_npz(tmp_path, dtype):
    """NumPy reads names, in order, and bytes of our npz files."""
    tensors = some_tensors(dtype)
    write(tmp_path / "w.npz", tensors)
    with np.load(tmp_path / "w.npz") as archive:
        assert list(archive) == list(tensors)
        assert all(archive[name].tobytes() == tensor.tobytes() for name, tensor in tensors.items())


def test_flax_slashes_are_read_as_dots(tmp_path):
    """Slashes in names become dots, unless names would collide or we wrote the file."""
    tree = {"encoder": {"layer_0": {"kernel": np.ones((2, 3))}}, "step": np.ones(1)}
    np.savez(tmp_path / "w.npz", **flax.traverse_util.flatten_dict(tree, sep="/"))
    assert same_tensors(read_tensors(tmp_path / "w.npz"), flatten(tree))
    np.savez(tmp_path / "v.npz", **{"a/b": np.ones(1), "a.b": np.ones(2)})
    assert list(read_tensors(tmp_path / "v.npz")) == [
        "a/b",
        "a.b",
    ]  # otherwise both would have one name
    write(tmp_path / "u.npz", {"a/b": np.ones(1)})
    assert list(read_tensors(tmp_path / "u.npz")) == ["a/b"]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_suffix_may_be_in_capitals(tmp_path, suffix):
    """A suffix in capitals denotes the same format."""
    write(tmp_path / f"w{suffix.upper()}", some_tensors(empty=False))
    assert same_tensors(read_tensors(tmp_path / f"w{suffix.upper()}"), some_tensors(empty=False))


def test_fortran_and_big_endian_npz_are_read(tmp_path):
    """npz arrays in Fortran order and of big-endian numbers are read in C order."""
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.savez(
        tmp_path / "w.npz",
        fortran=np.asfortranarray(array),
        big=array.astype(">f4"),
        both=array.astype(">f4").T,
    )
    tensors = read_tensors(tmp_path / "w.npz")
    assert same_tensors(
        tensors, {"fortran": array, "big": array, "both": np.ascontiguousarray(array.T)}
    )
    assert all(tensor.flags.c_contiguous for tensor in tensors.values())


@pytest.mark.parametrize("dtype", DTYPES)
def test_reads_torch_files(tmp_path, dtype):
    """Files of torch.save are read bit for bit."""
    tensors = some_tensors(dtype)
    torch.save(state_dict(tensors), tmp_path / "w.pt")
    assert same_tensors(read_tensors(tmp_path / "w.pt"), tensors)


@sample(8)
@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("dtype", [*DTYPES, *OTHER_DTYPES])
def test_torch_reads_our_files(tmp_path, dtype, mmap):
    """torch.load reads our files, also with mmap, with equal names, dtypes, shapes and bytes."""
    tensors = some_tensors(dtype)
    write(tmp_path / "w.pt", tensors, {"a": "b"})
    loaded = torch.load(tmp_path / "w.pt", weights_only=True, mmap=mmap)
    expected = state_dict(tensors)
    assert list(loaded) == list(expected)
    assert all(tensor.dtype == expected[name].dtype for name, tensor in loaded.items())
    assert all(tensor.shape == expected[name].shape for name, tensor in loaded.items())
    assert all(
        bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy()) == tensors[name].tobytes()
        for name, tensor in loaded.items()
        if tensor.ndim
    )


def test_torch_file_data_are_aligned(tmp_path):
    """Tensors in our torch archives begin at multiples of ALIGNMENT, and checksums are right."""
    write(tmp_path / "w.pt", some_tensors())
    with (tmp_path / "w.pt").open("rb") as file, zipfile.ZipFile(file) as archive:
        assert archive.testzip() is None
        for member in archive.infolist():
            if "/data/" in member.filename:
                file.seek(member.header_offset + 26)
                begin = member.header_offset + 30 + sum(struct.unpack("<HH", file.read(4)))
                assert begin % ALIGNMENT == 0


def test_torch_checkpoint_is_flattened(tmp_path):
    """Nested tensors of a torch checkpoint are read by dotted names; other values are listed."""
    tied = torch.arange(6.0).reshape(2, 3)
    checkpoint = {
        "model": {
            "a": tied,
            "tied": tied,
            "slice": tied[:, 1:],
            "parameter": torch.nn.Parameter(tied.T),
        },
        "optimizer": {
            "state": {0: {"step": torch.tensor(3)}},
            "param_groups": [{"lr": 0.1, "params": [0]}],
        },
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
            *(
                "optimizer.param_groups.0.lr",
                "optimizer.param_groups.0.params.0",
                "epoch",
                "none",
                "name",
            ),
        ]
        assert file.read("model.slice").tolist() == [[1.0, 2.0], [4.0, 5.0]]
        assert file.read("model.parameter").flags.c_contiguous
        assert same_array(file.read("layers.0"), np.ones(1, ml_dtypes.bfloat16))


@pytest.mark.parametrize("dtype", DTYPES)
def test_reads_msgpack_of_flax(tmp_path, dtype):
    """msgpack files of Flax are read bit for bit, also without a suffix."""
    tensors = some_tensors(dtype)
    for name in ("w.msgpack", "checkpoint"):
        (tmp_path / name).write_bytes(flax.serialization.msgpack_serialize(nested(tensors)))
        assert same_tensors(read_tensors(tmp_path / name), tensors)


@pytest.mark.parametrize("dtype", DTYPES)
def test_flax_reads_our_msgpack(tmp_path, dtype):
    """Flax restores our msgpack files, with and without a target, bit for bit."""
    tensors = some_tensors(dtype)
    write(tmp_path / "w.msgpack", tensors, {"a": "b"})
    loaded = flax.serialization.msgpack_restore((tmp_path / "w.msgpack").read_bytes())
    assert loaded.pop("__metadata__")["a"] == "b"
    assert same_tensors(flatten(loaded), tensors)
    target = nested({name: np.empty_like(tensor) for name, tensor in tensors.items()})
    assert same_tensors(
        flatten(flax.serialization.from_bytes(target, (tmp_path / "w.msgpack").read_bytes())),
        tensors,
    )


def nested(tensors):
    def filled(tree):
        return {
            key: filled(node) if isinstance(node, dict) else tensors[node]
            for key, node in tree.items()
        }

    return filled(nest(tensors))


def test_large_arrays_are_split_as_in_flax(tmp_path, monkeypatch):
    """Arrays above Flax's limit are split in both directions, and read bit for bit."""
    tensors = {"a.b": np.arange(100.0).reshape(4, 25), "c": np.arange(3, dtype=np.int32)}
    monkeypatch.setattr(msgpack_format, "MAX_CHUNK", 96)
    monkeypatch.setattr(flax.serialization, "MAX_CHUNK_SIZE", 96)
    (tmp_path / "flax.msgpack").write_bytes(flax.serialization.msgpack_serialize(nested(tensors)))
    write(tmp_path / "ours.msgpack", tensors)
    assert same_tensors(read_tensors(tmp_path / "flax.msgpack"), tensors)
    assert same_tensors(read_tensors(tmp_path / "ours.msgpack"), tensors)
    loaded = flax.serialization.msgpack_restore((tmp_path / "ours.msgpack").read_bytes())
    assert same_array(loaded["a"]["b"], tensors["a.b"])
    chunks_of_flax, chunks_of_ours = (
        msgpack.unpackb((tmp_path / name).read_bytes())["a"]["b"]["chunks"]
        for name in ("flax.msgpack", "ours.msgpack")
    )
    assert chunks_of_ours.keys() == chunks_of_flax.keys()


def test_other_msgpack_values_are_listed(tmp_path):
    """Values of a msgpack file that are not arrays are listed as ignored."""
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
        assert sorted(file.ignored) == [
            "big",
            "complex",
            "list.0",
            "name",
            "none",
            "on",
            "rate",
            "raw",
            "step",
        ]
        assert file.read("scalar") == np.float32(2.0)


def test_reads_orbax_checkpoints(tmp_path):
    """Nested arrays of an Orbax checkpoint are read by dotted names; a number is listed."""
    tree = {
        "a": [jnp.ones(2), {"b": jnp.ones((2, 3), jnp.bfloat16)}],
        "step": 3,
        "x.y": np.arange(3),
    }
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "checkpoint", tree)
    with open_tensors(tmp_path / "checkpoint") as file:
        assert file.format == "orbax"
        assert file.ignored == ["step"]
    expected = {
        "a.0": np.ones(2, np.float32),
        "a.1.b": np.ones((2, 3), ml_dtypes.bfloat16),
        "x.y": np.arange(3),
    }
    assert same_tensors(read_tensors(tmp_path / "checkpoint"), expected)


@pytest.mark.parametrize("name", ["../a", "a/../b", "/a"])
def test_orbax_names_stay_in_the_folder(tmp_path, monkeypatch, name):
    """Names that lead out of the folder of an Orbax checkpoint raise an error, which closes it."""
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "checkpoint", {name: np.ones(2)})
    closed = []
    close = ocp.Checkpointer.close

    def counting_close(self):
        closed.append(self)
        close(self)

    monkeypatch.setattr(ocp.Checkpointer, "close", counting_close)
    with rejects("names", {"names": name}):
        open_tensors(tmp_path / "checkpoint")
    assert len(closed) == 1


def test_unsupported_orbax_dtype_raises(tmp_path):
    """An array of 4-bit integers in an Orbax checkpoint raises an error with its name and dtype."""
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "checkpoint", {"a": np.ones(2, ml_dtypes.int4)})
    with rejects("a", {"a": ...}):
        open_tensors(tmp_path / "checkpoint")


def test_several_orbax_folders_raise(tmp_path):
    """A folder with two Orbax checkpoints raises an error; the hint is to name one of them."""
    with ocp.PyTreeCheckpointer() as checkpointer:
        for name in ("params", "state"):
            checkpointer.save(tmp_path / "step" / name, {"a": np.ones(2)})
    (tmp_path / "step" / "_CHECKPOINT_METADATA").write_text("{}")
    with rejects("…/step", "['params', 'state']", hint="name one"):
        open_tensors(tmp_path / "step")


def test_empty_tensor_in_orbax_raises(tmp_path):
    """A tensor without elements, which Orbax cannot hold, raises an error with its name."""
    with rejects("tensors", {"tensors": "empty"}):
        write(tmp_path / "w.orbax", {"a": np.ones(2), "empty": np.ones((0, 2))})


def test_orbax_writing_error_is_one_line(tmp_path, monkeypatch):
    """An error of the library while it writes an Orbax checkpoint is an OSError in one line."""

    def fail(*_, **__):
        raise RuntimeError("no room\nfor a")

    monkeypatch.setattr(ocp.PyTreeCheckpointer, "save", fail)
    with pytest.raises(OSError, match=r"by orbax, got no room.*for a") as error:
        write(tmp_path / "w.orbax", {"a": np.ones(2)})
    assert "\n" not in str(error.value)


def test_float64_orbax_is_read_without_x64(tmp_path):
    """An Orbax checkpoint of float64 is read as NumPy float64, although x64 is off in JAX."""
    with jax.enable_x64(True), ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "checkpoint", {"a": jnp.full(3, 1 / 3, jnp.float64)})
    tensors = read_tensors(tmp_path / "checkpoint")
    assert same_tensors(tensors, {"a": np.full(3, 1 / 3)})
    assert isinstance(tensors["a"], np.ndarray)


def test_orbax_reads_our_checkpoints(tmp_path):
    """Orbax restores our checkpoints bit for bit."""
    tensors = some_tensors(empty=False)
    write(tmp_path / "w.orbax", tensors)
    with ocp.PyTreeCheckpointer() as checkpointer:
        assert same_tensors(flatten(checkpointer.restore(tmp_path / "w.orbax")), tensors)


def test_reads_checkpoint_manager_step(tmp_path):
    """One step in the folder of an Orbax CheckpointManager is read, without its item's name."""
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(3, args=ocp.args.Composite(state=ocp.args.StandardSave({"w": jnp.ones(3)})))
        manager.wait_until_finished()
    assert same_tensors(read_tensors(tmp_path / "3"), {"w": np.ones(3, np.float32)})


def test_nnx_value_level_is_omitted(tmp_path):
    """Names of an NNX state end in bias or kernel, without the level that NNX adds."""
    state = nnx.state(nnx.MultiHeadAttention(2, 8, rngs=nnx.Rngs(0)))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "checkpoint", state)
    names = [
        f"{layer}.{leaf}"
        for layer in ("key", "out", "query", "value")
        for leaf in ("bias", "kernel")
    ]
    assert sorted(read_tensors(tmp_path / "checkpoint")) == names


def test_names_that_cannot_nest_raise(tmp_path):
    """Names such as a and a.b raise an error in msgpack files, and nothing is written."""
    for names in (["a", "a.b"], ["a.b", "a"], ["a.value"]):
        with pytest.raises(ValueError, match="got a"):
            write(tmp_path / "w.msgpack", {name: np.ones(1) for name in names})
    assert os.listdir(tmp_path) == []


# ---- GGUF ----------------------------------------------------------------------------------------


def write_gguf(path, tensors, quantized=()):
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
    for name, kind in quantized:
        data = gguf.quants.quantize(np.ones((4, 256), np.float32), kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_gguf_is_read_with_numpy_shapes(tmp_path):
    """GGUF tensors are read with NumPy's order of axes, and metadata as text."""
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
            "scores": "a list of 2",  # lists are not read
            "tokens": "a list of 3",
        }


def test_gguf_types_match_its_package():
    """The table of GGUF types equals the gguf package's, up to our last type."""
    known = {kind.value: kind.name for kind in gguf.GGMLQuantizationType}
    ours = {value: name for value, name in enumerate(gguf_format.TYPES) if name}
    assert ours == {value: name for value, name in known.items() if value < len(gguf_format.TYPES)}


# ---- Shards --------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_shards_match_hugging_face(tmp_path, suffix):
    """Shards, index and total size equal huggingface_hub's, and all tensors are read back."""
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


def test_single_shard_is_a_plain_file(tmp_path):
    """Tensors that fit into one shard are written as one file without an index."""
    assert (
        write(tmp_path / "w.safetensors", some_tensors(), max_shard_bytes=10**6)
        == tmp_path / "w.safetensors"
    )
    assert os.listdir(tmp_path) == ["w.safetensors"]


def test_shards_can_be_redivided(tmp_path):
    """Some tensors of safetensors shards are written as smaller torch shards."""
    write(tmp_path / "w.safetensors", some_tensors(), {"a": "b"}, max_shard_bytes=100)
    with open_tensors(tmp_path / "w.safetensors.index.json") as file:
        assert file.metadata.keys() == {"a", "sha256"}
        some = dict(list(file.infos.items())[:3])
        write_tensors(tmp_path / "v.bin", some, file.read, file.metadata, max_shard_bytes=30)
    tensors = {name: some_tensors()[name] for name in some}
    assert same_tensors(read_tensors(tmp_path / "v.bin.index.json"), tensors)


def test_shards_are_read_without_an_index(tmp_path):
    """A folder of shards without an index is read; a missing shard raises an error."""
    tensors = some_tensors()
    write(tmp_path / "w.safetensors", tensors, max_shard_bytes=100).unlink()
    assert same_tensors(read_tensors(tmp_path), tensors)
    next(tmp_path.glob("*-00002-*")).unlink()
    fails_to_open(tmp_path, r"'w-00002-of-\d+\.safetensors")


def test_torch_shards_are_read_from_folder(tmp_path):
    """A folder of torch shards is read, although training_args.bin is in it."""
    tensors = some_tensors()
    write(tmp_path / "pytorch_model.bin", tensors, max_shard_bytes=100)
    torch.save({"not": "weights"}, tmp_path / "training_args.bin")
    assert same_tensors(read_tensors(tmp_path), tensors)


def test_shards_may_be_links(tmp_path):
    """Shards and index may be links to files elsewhere, as in the cache of Hugging Face."""
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
    ("change", "input_error"),
    [
        *(
            (point_at(shard), rejects(INDEX, repr(shard)))
            for shard in (
                "../w-00001-of-00003.safetensors",
                "/etc/passwd",
                "..",
                "",
                "w\0",
                "nowhere.safetensors",
            )
        ),
        (point_at("w.safetensors.index.json"), rejects(INDEX)),
        (point_at(3), rejects(INDEX)),
        (lambda index: index.update(weight_map=[]), rejects(INDEX)),
        (lambda index: index.clear(), rejects(INDEX)),
        (lambda index: index["weight_map"].pop("one"), rejects(INDEX, tensor="one")),
        (
            lambda index: index["weight_map"].update(two="w-00001-of-00003.safetensors"),
            rejects(INDEX, tensor="two"),
        ),
    ],
)
def test_hostile_index_raises(tmp_path, change, input_error):
    """An index with paths outside its folder, wrong types or wrong tensors raises one line."""
    fails_to_open(with_index(tmp_path, change), input_error)


@pytest.mark.parametrize(
    "text", ["", "[", "[" * 100_000, '{"weight_map": {"a": "b", "a": "c"}}', "\x00\xff", "7"]
)
def test_damaged_index_raises(tmp_path, text):
    """An index that is not valid JSON raises one line, also when its folder is opened."""
    (tmp_path / "w.safetensors.index.json").write_text(text)
    fails_to_open(tmp_path / "w.safetensors.index.json")
    fails_to_open(tmp_path)


def test_tensor_in_two_shards_raises(tmp_path):
    """A tensor in two shards raises an error with its name and both files."""
    for i in (1, 2):
        write(tmp_path / f"w-0000{i}-of-00002.safetensors", {"a": np.ones(1)})
    shards = [f"w-0000{i}-of-00002.safetensors" for i in (1, 2)]
    fails_to_open(tmp_path, rejects(str(tmp_path), tensor="a", shards=shards))


def test_folder_of_two_checkpoints_raises(tmp_path):
    """A folder with a sharded and an unsharded checkpoint raises an error."""
    write(tmp_path / "w.safetensors", some_tensors(), max_shard_bytes=100)
    write(tmp_path / "w.safetensors", some_tensors())
    fails_to_open(tmp_path, rejects(str(tmp_path), "w.safetensors.index.json"))


# ---- Whole or not at all -------------------------------------------------------------------------


def before(folder, suffix):
    """Write old files with all names that will be written; return the folder's contents."""
    write(folder / f"w{suffix}", {"old": np.ones(1)})
    if suffix in (".safetensors", ".bin"):
        write(folder / f"w{suffix}", {"old": np.ones(1), "older": np.ones(1)}, max_shard_bytes=9)
    return contents(folder)


def contents(folder):
    return {
        path.relative_to(folder): path.is_file() and path.read_bytes() for path in folder.rglob("*")
    }


@sample(8)
@pytest.mark.parametrize(
    "error", [ValueError("no more"), KeyboardInterrupt(), OSError(28, "No space left")]
)
@pytest.mark.parametrize(
    ("suffix", "options"),
    [*((suffix, {}) for suffix in SUFFIXES), (".bin", {"max_shard_bytes": 9})],
)
def test_interrupted_write_keeps_old_files(tmp_path, suffix, options, error):
    """An error or interrupt while tensors are read leaves the old files and no others."""
    old = before(tmp_path, suffix)

    def read(name):
        if name == "b":
            raise error
        return np.ones(2)

    with pytest.raises(type(error)):
        write_tensors(
            tmp_path / f"w{suffix}", {"a": ((2,), float), "b": ((2,), float)}, read, **options
        )
    assert contents(tmp_path) == old


# A folder is set aside and replaced in 2 moves; two shards and their index need 6.
@pytest.mark.parametrize(
    ("suffix", "count"),
    [*((".orbax", count) for count in range(2)), *((".safetensors", count) for count in range(6))],
)
def test_failed_move_restores_old_files(tmp_path, monkeypatch, suffix, count):
    """If any move of a folder or of shards fails, the old files are restored."""
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


@sample(8)
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(
    ("suffix", "count"),
    [*((".orbax", count) for count in range(2)), *((".safetensors", count) for count in range(6))],
)
def test_interrupted_move_restores_old_files(tmp_path, monkeypatch, suffix, count, after):
    """An interrupt right before or after any move restores the old files."""
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
def test_late_interrupt_keeps_new_files(tmp_path, monkeypatch, suffix):
    """An interrupt after the last move keeps the new files and leaves no scratch folder."""
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
    assert same_tensors(
        read_tensors(tmp_path / f"w{suffix}{'' if suffix == '.orbax' else '.index.json'}"), tensors
    )
    assert not list(tmp_path.glob(".*"))


FILL_THE_DISK = """
import resource
import sys

sys.dont_write_bytecode = True  # Python leaves half a file if it cannot write it
import numpy as np
from parity.measure.files import write_tensors

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
def test_full_disk_raises_one_error(tmp_path, suffix):
    """Beyond a file size limit, writing raises one OSError with the path and leaves nothing."""
    path = tmp_path / f"w{suffix}"
    result = subprocess.run(
        [sys.executable, "-c", FILL_THE_DISK, path], capture_output=True, text=True, check=True
    )
    assert result.stdout == f"[Errno 27] File too large: {str(path)!r}\n"
    assert result.stderr == ""
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("suffix", FILES)
def test_damaged_write_keeps_old_files(tmp_path, monkeypatch, suffix):
    """If the written file reads back differently, OSError is raised and old files are kept."""
    old = before(tmp_path, suffix)
    tensors = {"a": np.arange(1000.0), "b": np.arange(1000.0)}

    def open_damaged(path):
        data = path.read_bytes()
        offset = data.rindex(np.float64(500.0).tobytes())
        path.write_bytes(data[:offset] + b"\1" + data[offset + 1 :])
        return open_tensors(path)

    monkeypatch.setattr("parity.measure.files.writing.open_tensors", open_damaged)
    with pytest.raises(OSError, match=re.escape(f"/w{suffix}")) as caught:
        write(tmp_path / f"w{suffix}", tensors)
    assert len(str(caught.value).splitlines()) == 1
    assert contents(tmp_path) == old


def test_failed_flush_keeps_old_files(tmp_path, monkeypatch):
    """A failed fsync raises OSError and keeps the old files."""
    old = before(tmp_path, ".npz")

    def fail(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path / "w.npz", some_tensors())
    assert contents(tmp_path) == old


def test_failed_early_flush_raises(tmp_path, monkeypatch):
    """A failed fsync while tensors are still read raises OSError and keeps the old files.

    The system reports an error of the disk only once.
    """
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
def test_old_files_are_replaced(tmp_path, suffix):
    """A checkpoint is replaced in each format, and no file is left over."""
    before(tmp_path, suffix)
    tensors = some_tensors(empty=False)
    names = os.listdir(tmp_path)
    write(tmp_path / f"w{suffix}", tensors)
    assert sorted(os.listdir(tmp_path)) == sorted(names)
    assert same_tensors(read_tensors(tmp_path / f"w{suffix}"), tensors)


def test_writing_to_link_replaces_its_target(tmp_path):
    """Writing to a link replaces the file that it points to and keeps the link."""
    write(tmp_path / "old.safetensors", {"old": np.ones(1)})
    (tmp_path / "old.safetensors").rename(tmp_path / "real")
    (tmp_path / "w.safetensors").symlink_to("real")
    write(tmp_path / "w.safetensors", some_tensors())
    assert (tmp_path / "w.safetensors").is_symlink()
    assert same_tensors(read_tensors(tmp_path / "real"), some_tensors())


def test_file_mode_follows_the_umask(tmp_path):
    """A written file has the same mode as any new file."""
    write(tmp_path / "w.safetensors", some_tensors())
    (tmp_path / "plain").touch()
    assert (tmp_path / "w.safetensors").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize("size", [0, 1, 8, 10, 16, 1001])
def test_hash_does_not_depend_on_pieces(tmp_path, monkeypatch, size):
    """The hash of arrays of any size is the same if they are read in pieces of 8 bytes."""
    monkeypatch.setattr("parity.measure.files.tensor_file.PIECE", 8)
    array = np.arange(size, dtype=np.uint8)
    write(tmp_path / "w.safetensors", {"a": array})
    with open_tensors(tmp_path / "w.safetensors") as file:
        file.verify()
        assert file.sha256() == hash_of(
            file.infos, {"a": hashlib.sha256(array.tobytes()).hexdigest()}
        )


@pytest.mark.parametrize("size", [0, 1, 8, 17, 1001])
@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_tensor_is_copied_in_pieces(tmp_path, monkeypatch, suffix, size):
    """A tensor of a file is copied in pieces of 8 bytes, without reading it as a whole."""
    monkeypatch.setattr("parity.measure.files.tensor_file.PIECE", 8)
    array = np.random.default_rng(0).standard_normal(size).astype(np.float32)
    write(tmp_path / "w.safetensors", {"a": array, "b": array[::-1]})
    with open_tensors(tmp_path / "w.safetensors") as file:
        monkeypatch.setattr(file, "read", None)  # which would load a whole tensor
        write_tensors(tmp_path / f"copy{suffix}", file.infos, file.tensor)
    assert same_tensors(read_tensors(tmp_path / f"copy{suffix}"), {"a": array, "b": array[::-1]})


def test_pieces_are_not_overwritten_early(tmp_path, monkeypatch):
    """A copy is exact although hashing is slower than reading, in pieces of 8 bytes."""
    sha256 = hashlib.sha256

    class SlowHash:
        def __init__(self, data=b""):
            self.digest = sha256(data)
            self.hexdigest = self.digest.hexdigest

        def update(self, piece):
            time.sleep(1e-3)
            self.digest.update(piece)

    tensors = {name: np.random.default_rng(i).bytes(8 * i + 3) for i, name in enumerate("abcdef")}
    tensors = {name: np.frombuffer(data, np.uint8) for name, data in tensors.items()}
    monkeypatch.setattr("parity.measure.files.tensor_file.PIECE", 8)
    write(tmp_path / "w.safetensors", tensors)
    monkeypatch.setattr("parity.measure.files.tensor_file.hashlib.sha256", SlowHash)
    with open_tensors(tmp_path / "w.safetensors") as file:
        write_tensors(tmp_path / "copy.safetensors", file.infos, file.tensor)
    assert same_tensors(read_tensors(tmp_path / "copy.safetensors"), tensors)


def test_tensor_of_a_file_is_read_lazily(tmp_path):
    """file.tensor has a shape and a dtype, and reads values only when they are needed."""
    write(tmp_path / "w.npz", some_tensors())
    with open_tensors(tmp_path / "w.npz") as file:
        late = {name: file.tensor(name) for name in file.infos}
        assert {name: (tensor.shape, tensor.dtype) for name, tensor in late.items()} == {
            name: info[:2] for name, info in file.infos.items()
        }
        assert same_tensors(
            {name: np.asarray(tensor) for name, tensor in late.items()}, some_tensors()
        )
    with pytest.raises(ValueError, match="before the file is closed"):
        np.asarray(next(iter(late.values())))


@pytest.mark.parametrize("suffix", FILES)
def test_verify_detects_a_changed_byte(tmp_path, suffix):
    """verify raises an error about sha256 or CRC-32 if one bit of a tensor was changed."""
    path = tmp_path / f"w{suffix}"
    write(path, {"a": np.arange(1000.0)})
    data = bytearray(path.read_bytes())
    data[data.index(np.float64(500.0).tobytes())] ^= 1
    path.write_bytes(data)
    with open_tensors(path) as file, pytest.raises(ValueError, match=r"sha256|CRC-32"):
        file.verify()


def test_verify_requires_a_hash(tmp_path):
    """verify raises an error for a file without a hash."""
    np.savez(tmp_path / "w.npz", a=np.ones(1))
    with open_tensors(tmp_path / "w.npz") as file, rejects("…/w.npz", "[]"):
        file.verify()


# ---- Existing files ------------------------------------------------------------------------------


def manager_root(path):
    """The folder of a checkpoint manager: one for each step, and a person's notes."""
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
        (
            lambda path: (write(path, {"old": np.ones(1)}) / "_sharding").symlink_to("d"),
            "_sharding",
        ),
    ],
    ids=["manager", "folder", "notes", "step", "inside", "link"],
)
def test_folder_with_other_files_is_kept(tmp_path, make, named):
    """A folder with anything other than an Orbax checkpoint raises an error and is kept."""
    make(tmp_path / "run.orbax")
    old = contents(tmp_path)
    with rejects("…/run.orbax", named):
        write(tmp_path / "run.orbax", {"new": np.ones(1)})
    assert contents(tmp_path) == old


@pytest.mark.parametrize("kind", ["ours", "orbax's", "empty"])
def test_checkpoint_folder_is_replaced(tmp_path, kind):
    """An empty folder, or one with only an Orbax checkpoint, ours or Orbax's, is replaced."""
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


def test_file_added_during_a_write_is_kept(tmp_path):
    """A file added to the old folder during a write raises an error and is kept."""
    write(tmp_path / "w.orbax", {"old": np.ones(1)})

    def read(name):
        (tmp_path / "w.orbax" / "NOTES.md").write_text("precious")
        return np.ones(1)

    with rejects("…/w.orbax", "['NOTES.md'] there"):
        write_tensors(tmp_path / "w.orbax", {"new": ((1,), float)}, read)
    assert (tmp_path / "w.orbax" / "NOTES.md").read_text() == "precious"
    assert same_tensors(read_tensors(tmp_path / "w.orbax"), {"old": np.ones(1)})


@pytest.mark.parametrize("suffix", FILES)
def test_file_of_other_format_is_kept(tmp_path, suffix):
    """A target that is not a file of its format raises an error and is kept."""
    (tmp_path / f"w{suffix}").write_text("Dear diary")
    with rejects(f"…/w{suffix}", "begins with b'Dear"):
        write(tmp_path / f"w{suffix}", some_tensors())
    assert contents(tmp_path) == {Path(f"w{suffix}"): b"Dear diary"}


@pytest.mark.parametrize("suffix", FILES)
def test_empty_file_is_replaced(tmp_path, suffix):
    """An empty target is replaced in each format of one file."""
    (tmp_path / f"w{suffix}").touch()
    write(tmp_path / f"w{suffix}", some_tensors())
    assert same_tensors(read_tensors(tmp_path / f"w{suffix}"), some_tensors())


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_overwrite_false_keeps_old_files(tmp_path, suffix):
    """overwrite=False raises FileExistsError and keeps the old files in each format."""
    old = before(tmp_path, suffix)
    with pytest.raises(FileExistsError, match=r"exists; pass --force to replace it"):
        write(tmp_path / f"w{suffix}", {"a": np.ones(1)}, overwrite=False)
    assert contents(tmp_path) == old


def test_file_created_during_write_is_kept(tmp_path):
    """With overwrite=False, a file created during the write raises an error and is kept."""

    def read(name):
        write(tmp_path / "w.npz", {"of another": np.ones(1)})
        return np.ones(1)

    with pytest.raises(FileExistsError):
        write_tensors(tmp_path / "w.npz", {"a": ((1,), float)}, read, overwrite=False)
    assert list(read_tensors(tmp_path / "w.npz")) == ["of another"]
    assert os.listdir(tmp_path) == ["w.npz"]


def test_old_shards_are_removed(tmp_path):
    """Two new shards replace four old ones; a file of a different checkpoint is kept."""
    (tmp_path / "v-00001-of-00009.safetensors").write_text("another checkpoint's")
    tensors = {name: np.ones(1) for name in "abcd"}
    write(tmp_path / "w.safetensors", tensors, max_shard_bytes=9)
    write(tmp_path / "w.safetensors", tensors, max_shard_bytes=17)
    shards = [f"w-0000{i}-of-00002.safetensors" for i in (1, 2)]
    others = ["v-00001-of-00009.safetensors", "w.safetensors.index.json"]
    assert sorted(os.listdir(tmp_path)) == sorted([*others, *shards])
    assert same_tensors(read_tensors(tmp_path / "w.safetensors.index.json"), tensors)


def test_shards_not_in_an_index_are_kept(tmp_path):
    """Existing shards that no index lists raise an error and are kept."""
    write(tmp_path / "w-00001-of-00002.safetensors", {"precious": np.ones(1)})
    old = contents(tmp_path)
    with rejects("…/w-00001-of-00002.safetensors"):
        write(tmp_path / "w.safetensors", {"a": np.ones(1), "b": np.ones(1)}, max_shard_bytes=9)
    (tmp_path / "w.safetensors.index.json").write_text("{}")
    with rejects("…/w.safetensors.index.json"):
        write(tmp_path / "w.safetensors", {"a": np.ones(1), "b": np.ones(1)}, max_shard_bytes=9)
    assert contents(tmp_path) == {**old, Path("w.safetensors.index.json"): b"{}"}


@pytest.mark.parametrize("same", ["itself", "dot", "link", "hard link"])
def test_writing_onto_the_source_raises(tmp_path, monkeypatch, same):
    """Writing onto the source, also by another path or a link, raises and changes nothing."""
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
    with rejects("the target", path=target, source=source):
        write(target, some_tensors(), source=source)
    assert contents(tmp_path) == old


def test_writing_onto_a_source_shard_raises(tmp_path):
    """Writing onto a shard of the source raises an error; writing next to it works."""
    index = write(tmp_path / "w.safetensors", {"a": np.ones(1), "b": np.ones(1)}, max_shard_bytes=9)
    for source in (index, tmp_path / "w-00002-of-00002.safetensors"):
        with rejects("the target", path=..., source=source):
            write(
                tmp_path / "w.safetensors",
                {"c": np.ones(1), "d": np.ones(1)},
                max_shard_bytes=9,
                source=source,
            )
    with rejects("the target", path=..., source=index):
        write(tmp_path / "w-00001-of-00002.safetensors", {"c": np.ones(1)}, source=index)
    write(tmp_path / "v.safetensors", {"c": np.ones(1)}, source=index)


def test_target_in_source_folder_raises(tmp_path):
    """Writing onto the source folder or into it raises an error."""
    write(tmp_path / "w.orbax", {"a": np.ones(1)})
    for target in ("w.orbax", "w.orbax/b.npz", "w.orbax/d/b.npz"):
        with rejects("the target", path=..., source=...):
            write(tmp_path / target, {"a": np.ones(1)}, source=tmp_path / "w.orbax")
    with rejects("the target", path=..., source=...):
        write(tmp_path / "w.orbax", {"a": np.ones(1)}, source=tmp_path / "w.orbax" / "_METADATA")
    assert list(read_tensors(tmp_path / "w.orbax")) == ["a"]


WRITE_AND_DIE = """
import os, signal, sys
from pathlib import Path
import numpy as np
from parity.measure.files import target, write_tensors

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
@sample(when=["read"], suffix=[".safetensors"])
@pytest.mark.parametrize(
    ("when", "suffix"),
    [("read", ".safetensors"), ("read", ".orbax"), ("move", ".safetensors"), ("move", ".orbax")],
)
def test_next_write_cleans_up_after_kill(tmp_path, suffix, when):
    """The next write restores the old files and removes the scratch folder of a killed process."""
    path = tmp_path / f"w{suffix}"
    write(path, {"old": np.ones(1)})
    killed = subprocess.run([sys.executable, "-c", WRITE_AND_DIE, path, when], check=False)
    assert killed.returncode == -9
    # The lock file of the folder is there if it was killed while it moved files.
    (left,) = (name for name in os.listdir(tmp_path) if name not in (path.name, FOLDER_LOCK))
    assert left.endswith(SCRATCH)
    # If it was killed between two moves, the old folder was set aside; it is restored before
    # anything else.
    with pytest.raises(ValueError, match="no more"):
        write_tensors(path, {"new": ((1,), float)}, no_more)
    assert list(read_tensors(path)) == ["old"]
    assert os.listdir(tmp_path) == [path.name]


def no_more(name):
    raise ValueError("no more")


def test_scratch_folder_in_use_is_kept(tmp_path):
    """A write of the same path during another one does not remove its scratch folder."""
    path = tmp_path / "w.npz"

    def read(name):
        write(path, {"of another": np.ones(1)})
        return np.ones(1)

    write_tensors(path, {"a": ((1,), float)}, read)
    assert list(read_tensors(path)) == ["a"]
    assert os.listdir(tmp_path) == ["w.npz"]


def test_second_writer_waits_for_the_folder(tmp_path):
    """A writer moves its files only once no other writer has the folder's lock."""
    moved = threading.Event()

    def read(name):
        # The scratch folder exists by now, so that only the moves still need the lock.
        has_read.set()
        has_lock.wait()
        return np.ones(1)

    def write_and_report():
        write_tensors(tmp_path / "w.npz", {"a": ((1,), float)}, read)
        moved.set()

    has_read, has_lock = threading.Event(), threading.Event()
    writer = threading.Thread(target=write_and_report)
    writer.start()
    has_read.wait()
    with locked(tmp_path):
        has_lock.set()
        assert not moved.wait(timeout=0.3)
        assert "w.npz" not in os.listdir(tmp_path)
    writer.join()
    assert os.listdir(tmp_path) == ["w.npz"]


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_leftover_lock_blocks_no_writer(tmp_path, kind):
    """A lock file that a killed writer left is removed; a path that cannot be locked is kept."""
    lock = tmp_path / FOLDER_LOCK
    if kind == "file":
        lock.touch()
    else:
        lock.mkdir()
    write(tmp_path / "w.npz", {"a": np.ones(1)})
    expected = ["w.npz"] if kind == "file" else [FOLDER_LOCK, "w.npz"]
    assert sorted(os.listdir(tmp_path)) == expected


def test_file_system_without_locks(tmp_path, monkeypatch):
    """Where files cannot be locked, a file is written, and no lock file remains."""

    def no_lock(descriptor, operation):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", no_lock)
    write(tmp_path / "w.npz", {"a": np.ones(1)})
    assert os.listdir(tmp_path) == ["w.npz"]


def test_lock_that_cannot_be_opened_is_kept(tmp_path, monkeypatch):
    """If no file can be opened, the lock file of another writer stays."""
    lock = _new_lock(tmp_path / FOLDER_LOCK)
    (tmp_path / FOLDER_LOCK).touch()

    def too_many_files(self, *args, **keywords):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(type(lock), "acquire", too_many_files)
    assert not _acquire(lock, wait=False)
    assert os.listdir(tmp_path) == [FOLDER_LOCK]


@pytest.mark.parametrize("function", ["acquire", "release"])
def test_interrupted_lock_leaves_no_file(tmp_path, monkeypatch, function):
    """If a signal interrupts the acquisition or the release of a lock, its file is removed."""
    original = getattr(filelock.BaseFileLock, function)
    interrupts = iter([KeyboardInterrupt])

    def interrupted(self, *args, **keywords):
        if function == "acquire":
            Path(self.lock_file).touch()
        for interrupt in interrupts:
            raise interrupt
        return original(self, *args, **keywords)

    monkeypatch.setattr(filelock.BaseFileLock, function, interrupted)
    with pytest.raises(KeyboardInterrupt), locked(tmp_path):
        pass
    assert os.listdir(tmp_path) == []


# ---- Errors of writing ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["w", "w.gguf", "w.h5", "w.safetensors.index.json"])
def test_unknown_suffix_raises(tmp_path, name):
    """Writing to a suffix that is not supported raises an error with the path."""
    with rejects(str(tmp_path / name)):
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
def test_array_unsupported_by_format_raises(tmp_path, suffix, array):
    """An array that the format cannot hold raises an error, and nothing is written."""
    with rejects("tensors" if suffix == ".orbax" else f"…/w{suffix}"):
        write(tmp_path / f"w{suffix}", {"a": array})
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "array", [np.ones(3), np.ones((1, 2)), np.ones(2, np.float32), [1.0], "text"]
)
def test_unannounced_tensor_raises(tmp_path, array):
    """A tensor without the announced shape and dtype raises an error, and nothing is written."""
    with rejects("a"):
        write_tensors(tmp_path / "w.npz", {"a": ((2,), float)}, lambda name: array)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "name", ["__metadata__", "__metadata__.a", "a\nb", "a\0", "\ud800", "\x1b[2J"]
)
def test_invalid_tensor_name_raises(tmp_path, name):
    """Reserved names and names with control characters raise an error that is printable."""
    with rejects("names", names=name) as input_error:
        write(tmp_path / "w.safetensors", {name: np.ones(1)})
    assert str(input_error.value).isprintable()


@pytest.mark.parametrize(
    ("metadata", "error"), [({"a": 1}, TypeError), ({"a": "\ud800"}, ValueError)]
)
def test_non_text_metadata_raise(tmp_path, metadata, error):
    """Metadata that are not valid text raise an error, and nothing is written."""
    with pytest.raises(error):
        write(tmp_path / "w.npz", some_tensors(), metadata)
    assert os.listdir(tmp_path) == []


def test_oversized_npz_metadata_raise(tmp_path):
    """Metadata of 70,000 characters raise an error in npz files."""
    with rejects("metadata", "more"):
        write(tmp_path / "w.npz", some_tensors(), {"a": "b" * 70_000})


@pytest.mark.parametrize("shape", [(2.0,), ("2",), (None,)])
def test_invalid_shape_raises(tmp_path, shape):
    """A shape of floats or strings raises a TypeError, and a negative one an error."""
    with pytest.raises(TypeError, match="as an integer"):
        write_tensors(tmp_path / "w.npz", {"a": (shape, float)}, lambda name: np.ones(2))
    with rejects("a shape", "(-2,)"):
        write_tensors(tmp_path / "w.npz", {"a": ((-2,), float)}, lambda name: np.ones(2))


@pytest.mark.parametrize("bad", [{"max_shard_bytes": 0}, {"max_shard_bytes": -1}])
def test_shard_size_must_be_positive(tmp_path, bad):
    """max_shard_bytes of 0 or -1 raises an error."""
    with rejects("max_shard_bytes", max_shard_bytes=...):
        write(tmp_path / "w.safetensors", some_tensors(), **bad)


def test_sharding_an_npz_file_raises(tmp_path):
    """max_shard_bytes raises an error for npz files."""
    with rejects("max_shard_bytes"):
        write(tmp_path / "w.npz", some_tensors(), max_shard_bytes=100)


@pytest.mark.parametrize("target", ["folder", "pipe", "loop", "device"])
def test_special_target_raises(tmp_path, target):
    """Writing onto a folder, a pipe, a circular link or a device raises and adds no file."""
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


# ---- Memory --------------------------------------------------------------------------------------

CONVERT = """
import resource
import sys

sys.dont_write_bytecode = True  # Python leaves half a file if it cannot write it
import numpy as np
from parity.measure.files import open_tensors, write_tensors
from parity.measure.files.target import BEFORE, SCRATCH

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
def test_copying_memory_is_bounded(tmp_path):
    """Copying ten tensors needs the memory of less than two, or three with mapped files."""

    def convert(source, target):
        program = [sys.executable, "-c", CONVERT, source, tmp_path / target]
        # Otherwise glibc may keep a freed tensor, depending on its heap: 1.0 or 2.0 tensors for the
        # same code.
        own = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1048576"}
        result = subprocess.run(program, capture_output=True, text=True, check=False, env=own)
        assert result.returncode == 0, result.stderr
        return [float(number) for number in result.stdout.split()]

    source, used = "none", {}
    for target in ("w.safetensors", "w.npz", "w.msgpack", "w.pt", "v.safetensors"):
        used[target] = convert(source, target)
        source = tmp_path / target
    assert max(anonymous for anonymous, _ in used.values()) < 2.0, used
    # torch maps the files that it reads and reads back: their pages count here, so it is left out.
    assert (
        max(
            peak
            for target, (_, peak) in used.items()
            if target in ("w.safetensors", "w.npz", "w.msgpack")
        )
        < 3.0
    ), used
    assert (tmp_path / "v.safetensors").read_bytes() == (tmp_path / "w.safetensors").read_bytes()


# ---- Hostile files -------------------------------------------------------------------------------


@sample(8)
@pytest.mark.parametrize(
    "name", ["w", *(f"w{suffix}" for suffix in [*SUFFIXES, ".gguf", ".bin", ".index.json", ".h5"])]
)
@pytest.mark.parametrize(
    "data", [b"", b"\0", bytes(4096), b"\xff" * 64, b"PK\3\4" + bytes(100), b"GGUF", b"\x81" * 999]
)
def test_file_of_other_bytes_raises(tmp_path, name, data):
    """A file whose bytes do not belong to its suffix raises one line with the path."""
    (tmp_path / name).write_bytes(data)
    assert str(tmp_path / name) in fails_to_open(tmp_path / name)


@sample(8)
@pytest.mark.parametrize("kind", ["folder", "pipe", "loop", "device"])
@pytest.mark.parametrize(
    "name", ["w.safetensors", "w.npz", "w.pt", "w.gguf", "w.safetensors.index.json"]
)
def test_opening_a_special_file_raises(tmp_path, name, kind):
    """Opening a folder, a pipe, a circular link or a device raises one line."""
    something_else(tmp_path / name, kind)
    fails_to_open(tmp_path / name)


def test_missing_file_raises_os_error(tmp_path):
    """Opening a missing file raises an OSError with its name."""
    with pytest.raises(OSError, match="nowhere"):
        open_tensors(tmp_path / "nowhere.safetensors")


@pytest.mark.parametrize("suffix", [*FILES, ".gguf"])
def test_truncated_file_raises(tmp_path, suffix):
    """A file truncated at any of about 60 lengths raises one line."""
    path = tmp_path / f"w{suffix}"
    if suffix == ".gguf":
        write_gguf(path, {"a": np.arange(8, dtype=np.float32)})
    else:
        write(path, {"a": np.arange(8.0)})
    whole = path.read_bytes()
    for length in range(0, len(whole), max(1, len(whole) // 60)):
        path.write_bytes(whole[:length])
        fails_to_open(path)


# safetensors


def safetensors_file(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(shape=(2,), dtype="F32", offsets=(0, 8)):
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@sample(8)
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
def test_hostile_safetensors_raise(tmp_path, data):
    """Safetensors files with wrong lengths, offsets, shapes, dtypes or names raise one line."""
    (tmp_path / "w.safetensors").write_bytes(data)
    fails_to_open(tmp_path / "w.safetensors")


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


@sample(8)
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
def test_hostile_npz_raises(tmp_path, data):
    """npz files with wrong shapes, dtypes, headers or compression raise one line."""
    (tmp_path / "w.npz").write_bytes(data)
    fails_to_open(tmp_path / "w.npz")


def test_duplicate_json_name_raises():
    """A name that occurs twice in JSON raises an error with the name."""
    with rejects("names", "b twice"):
        parse_json(b'{"a": 1, "b": 2, "b": 3}')


def test_duplicate_npz_member_raises(tmp_path):
    """An npz file with the same member twice raises one line with its name."""
    with pytest.warns(UserWarning, match="Duplicate name"):
        data = npz(("a.npy", npy((0,))), ("a.npy", npy((0,))))
    (tmp_path / "w.npz").write_bytes(data)
    fails_to_open(tmp_path / "w.npz", "a.npy twice")


def test_zip_bomb_raises(tmp_path):
    """An npz file that is compressed more than 100-fold raises one line."""
    np.savez_compressed(tmp_path / "w.npz", a=np.zeros(10**7))
    assert (tmp_path / "w.npz").stat().st_size < 10**5
    fails_to_open(tmp_path / "w.npz", "100-fold")


def test_zeros_among_weights_are_read(tmp_path):
    """Many zeros next to random weights in a compressed npz file are read bit for bit."""
    rng = np.random.default_rng(0)
    tensors = {"zeros": np.zeros(10**7, np.float32), "weights": rng.random(10**6)}
    np.savez_compressed(tmp_path / "w.npz", **tensors)
    assert same_tensors(read_tensors(tmp_path / "w.npz"), tensors)


@pytest.mark.parametrize("name", ["../x", "/tmp/x", "..\\x", "a/../../x"])
def test_tensor_name_is_not_a_path(tmp_path, name):
    """Tensor names that look like paths are read unchanged and create no file."""
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


def test_payload_runs_when_unpickled(tmp_path):  # the control of the tests below
    """Unpickling the payload creates a file: the control of the tests below."""
    pickle.loads(pickle.dumps(Payload(tmp_path / "harm"))).close()
    assert (tmp_path / "harm").exists()


@pytest.mark.parametrize("name", ["w.pt", "w.bin", "w.pth", "w"])
@pytest.mark.parametrize("how", ["archive", "legacy", "pickle"])
def test_torch_payload_is_not_executed(tmp_path, name, how):
    """A torch file with a payload raises one line in each of its formats, and creates no file."""
    content = {"w": torch.ones(2), "x": Payload(tmp_path / "harm")}
    if how == "pickle":
        (tmp_path / name).write_bytes(pickle.dumps(content, protocol=2))
    else:
        torch.save(content, tmp_path / name, _use_new_zipfile_serialization=how == "archive")
    fails_to_open(tmp_path / name, f"{name} .*open" if how == "archive" else "")
    assert os.listdir(tmp_path) == [name]


def test_legacy_torch_file_is_read(tmp_path):
    """torch's format before zip archives is read bit for bit; truncated, it raises one line."""
    tensors = {"a.weight": torch.randn(3, 2), "a.bias": torch.randn(3).bfloat16()}
    torch.save(tensors, tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    with open_tensors(tmp_path / "old.bin") as file:
        assert {name: file.read(name).tobytes() for name in file.infos} == {
            name: to_numpy(tensor).tobytes() for name, tensor in tensors.items()
        }
    whole = (tmp_path / "old.bin").read_bytes()
    for cut in (1, len(whole) // 2, len(whole) - 1):
        (tmp_path / "old.bin").write_bytes(whole[:cut])
        fails_to_open(tmp_path / "old.bin")


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz_payload_is_not_executed(tmp_path, save):
    """An npz file with a pickled payload raises one line and creates no file."""
    save(tmp_path / "w.npz", a=np.array([Payload(tmp_path / "harm")], dtype=object))
    fails_to_open(tmp_path / "w.npz")
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
def test_hostile_torch_file_raises(tmp_path, data):
    """Cyclic, exponential, deep, ambiguous or inconsistent torch files raise one line."""
    (tmp_path / "w.pt").write_bytes(data())
    fails_to_open(tmp_path / "w.pt")


def test_sparse_torch_tensor_raises(tmp_path):
    """A sparse tensor raises an error that asks for a dense one."""
    (tmp_path / "w.pt").write_bytes(torch_file({"a": torch.ones(2).to_sparse()}))
    fails_to_open(tmp_path / "w.pt", "be a dense tensor")


def test_compressed_torch_file_raises(tmp_path):
    """A torch archive with compressed members raises one line."""
    members = [("archive/data.pkl", b""), ("archive/version", b"3\n")]
    (tmp_path / "w.pt").write_bytes(npz(*members, compression=zipfile.ZIP_DEFLATED))
    fails_to_open(tmp_path / "w.pt", rejects("members of an archive of torch's"))


# msgpack and gguf


def array(*values):
    """An array as Flax writes it: a shape, a dtype and bytes, or something else instead."""
    return msgpack.ExtType(1, msgpack.packb(values))


@sample(8)
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
def test_hostile_msgpack_raises(tmp_path, data):
    """Deep, truncated or inconsistent msgpack files raise one line."""
    (tmp_path / "w.msgpack").write_bytes(data)
    fails_to_open(tmp_path / "w.msgpack")


def test_repeated_name_in_msgpack_raises(tmp_path):
    """A msgpack file with two arrays of one name raises an error that asks for unique names."""
    entry = msgpack.packb("a") + msgpack.packb(array((1,), "float32", bytes(4)))
    (tmp_path / "w.msgpack").write_bytes(b"\x82" + 2 * entry)
    fails_to_open(tmp_path / "w.msgpack", "have a unique name")


def gguf_text(text):
    return struct.pack("<Q", len(text)) + text


def gguf_file(
    values=(), tensors=(), *, version=3, num_values=None, num_tensors=None, data=bytes(64)
):
    counts = (
        len(tensors) if num_tensors is None else num_tensors,
        len(values) if num_values is None else num_values,
    )
    head = b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join(values) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + data


def gguf_tensor(name=b"a", shape=(2,), kind=0, offset=0):
    return gguf_text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def gguf_value(kind, data, key=b"k"):
    return gguf_text(key) + struct.pack("<I", kind) + data


@sample(8)
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
def test_hostile_gguf_raises(tmp_path, data):
    """GGUF files with wrong counts, types, offsets, shapes or names raise one line."""
    (tmp_path / "w.gguf").write_bytes(data)
    fails_to_open(tmp_path / "w.gguf")


# ---- Any damage ----------------------------------------------------------------------------------


def seeds(folder, suffix):
    """Files to damage."""
    tensors = {
        "m.a": np.arange(12.0).reshape(3, 4),
        "m.b": np.ones(3, ml_dtypes.bfloat16),
        "c": np.array([True]),
    }
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
    contents = [path.read_bytes()]
    if suffix == ".npz":
        np.savez_compressed(path, **tensors)
    elif suffix == ".pt":
        torch.save(
            {
                "model": {"a": torch.ones(3, 4), "b": torch.nn.Parameter(torch.ones(3))},
                "n": [3, "x"],
            },
            path,
        )
    elif suffix == ".msgpack":
        path.write_bytes(
            flax.serialization.msgpack_serialize({"a": {"b": np.ones(3), "c": 1, "d": ["x"]}})
        )
    return [*contents, path.read_bytes()]


def damaged(data, rng):
    data = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 4, 16])):
        end = max(1, len(data))
        i = rng.choice(
            [
                rng.randrange(end),
                rng.randrange(min(end, 300)),
                end - 1 - rng.randrange(min(end, 200)),
            ]
        )
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
            data[i : i + 8] = rng.choice(
                [b"\xff" * 8, bytes(8), b"\xff\xff\xff\x7f", b"\0\0\0\0\1\0\0\0"]
            )
    return bytes(data)


@pytest.mark.parametrize("suffix", [*FILES, ".gguf", ".index.json"])
def test_damaged_file_loads_or_raises(tmp_path, suffix):
    """Each of 250 randomly damaged files loads or raises one line; more than 125 raise."""
    rng = random.Random(0)
    wholes = seeds(tmp_path, suffix)
    rejected = 0
    for _ in range(250):
        path = tmp_path / f"w{suffix}"
        path.write_bytes(damaged(rng.choice(wholes), rng))
        error = input_error(path)
        assert str(error).isprintable()
        rejected += error is not None
    assert rejected > 125


def damage_a_checkpoint(folder):
    """Damage a checkpoint 60 times; return how often it raised an error."""
    rng = random.Random(0)
    write(folder / "w.orbax", some_tensors(empty=False), {"a": "b"})
    wholes = {path: path.read_bytes() for path in (folder / "w.orbax").rglob("*") if path.is_file()}
    rejected = 0
    for _ in range(60):
        path = rng.choice(list(wholes))
        path.write_bytes(damaged(wholes[path], rng))
        error = input_error(folder / "w.orbax")
        assert str(error).isprintable()
        rejected += error is not None
        path.write_bytes(wholes[path])
    return rejected


@pytest.mark.costly("threads of a library that outlive the test")
@pytest.mark.nightly
def test_damaged_orbax_loads_or_raises(tmp_path):
    """Each of 60 damaged Orbax checkpoints loads or raises one line; more than 10 raise."""
    # In a process of its own, because threads of the library still print errors after the test.
    program = (
        "import pathlib, runpy, sys\n"
        "damage = runpy.run_path(sys.argv[1])['damage_a_checkpoint']\n"
        "print(damage(pathlib.Path(sys.argv[2])))"
    )
    command = [sys.executable, "-c", program, __file__, tmp_path]
    result = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": PYTHONPATH},
    )
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) > 10


# ---- Missing libraries ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("suffix", "module"),
    [(".pt", "torch"), (".msgpack", "msgpack"), (".orbax", "orbax.checkpoint")],
)
def test_missing_library_raises(tmp_path, monkeypatch, suffix, module):
    """Without its library, opening or writing a format raises an ImportError that names it."""
    write(tmp_path / f"w{suffix}", {"a": np.ones(1)})
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"w{suffix} needs {module.split('.')[0]}"):
        open_tensors(tmp_path / f"w{suffix}")
    with pytest.raises(
        ImportError,
        match=rf"v{suffix} needs {module.split('.')[0]}.*; pip install {module.split('.')[0]}",
    ):
        write(tmp_path / f"v{suffix}", {"a": np.ones(1)})
    assert os.listdir(tmp_path) == [f"w{suffix}"]

"""Canonical weights: invalid ones raise errors, modules and files keep their bits, and files are
whole or absent.
"""

import os
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch
from flax import nnx
from helpers.input_errors import rejects, rejects_type
from helpers.samples import sample
from helpers.tensors import same_array
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import mha_jax
import mha_torch
import parity
from mha_spec import InputError, Rope
from parity import AttentionSpec, random_weights
from parity.measure.core.weights import (
    check_weights,
    load_tensors,
    load_weights,
    pack_qkv,
    save_tensors,
    save_weights,
    unpack_qkv,
)

SPEC = AttentionSpec(10, 6, num_kv_heads=2, head_dim=4, d_in=7)
DTYPES = [np.float32, np.float16, np.float64, ml_dtypes.bfloat16]


@pytest.fixture
def weights():
    return random_weights(SPEC, seed=1)


# ---- Invalid weights -----------------------------------------------------------------------------


def test_weights_of_the_spec_are_accepted(weights):
    """Random weights of a specification are valid."""
    check_weights(weights, SPEC)


def test_missing_and_extra_names_raise(weights):
    """A renamed weight raises an error with the missing and the unexpected name."""
    weights["o_proj.bias"] = weights.pop("out_proj.bias")
    with rejects("weights", missing=["out_proj.bias"], unexpected=["o_proj.bias"]):
        check_weights(weights, SPEC)


def test_transposed_weight_raises(weights):
    """A transposed weight raises an error that says so."""
    weights["q_proj.weight"] = weights["q_proj.weight"].T
    with rejects("q_proj.weight", "q_proj.weight.shape=(7, 24); it looks transposed"):
        check_weights(weights, SPEC)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite_weight_raises(weights, value):
    """One NaN or infinity in a weight raises an error with their number."""
    weights["k_proj.weight"][1, 2] = value
    with rejects("k_proj.weight", "1 NaN or infinities"):
        check_weights(weights, SPEC)


@pytest.mark.parametrize("wrong", [np.zeros((8, 7), np.int32), [[0.0]], None])
def test_non_float_weight_raises(weights, wrong):
    """A weight that is an integer array, a list or None raises an error about its type."""
    weights["k_proj.weight"] = wrong
    with rejects_type("k_proj.weight"):
        check_weights(weights, SPEC)


def test_dtype_outside_safetensors_raises(tmp_path):
    """A tensor of a dtype that safetensors lacks raises an error with its name, and no file is
    left.
    """
    with rejects("w", {"w": np.dtype("complex128")}):
        save_tensors(tmp_path / "w.safetensors", {"w": np.zeros(2, np.complex128)}, {})
    assert os.listdir(tmp_path) == []


def test_framework_weights_become_numpy(weights):
    """Weights in torch or JAX are valid and become NumPy arrays with the same bits."""
    for of_framework in (parity.to_torch, parity.to_jax):
        converted = check_weights({name: of_framework(x) for name, x in weights.items()}, SPEC)
        assert converted.keys() == weights.keys()
        assert all(same_array(converted[name], weights[name]) for name in weights)


def test_mixed_dtypes_raise(weights):
    """Weights of two dtypes raise an error that lists both."""
    weights["k_proj.weight"] = weights["k_proj.weight"].astype(np.float16)
    with rejects_type("weights", "['float16', 'float32']"):
        check_weights(weights, SPEC)


# ---- In and out of modules -----------------------------------------------------------------------


@sample(12, jax=1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("fused_qkv", [False, True])
@pytest.mark.parametrize(
    "kind", ["MultiHeadAttention", "MultiHeadSelfAttention", "MultiHeadAttentionWithCache"]
)
def test_module_keeps_weights_exactly(sibling, kind, fused_qkv, dtype):
    """Weights loaded into a module are read back in order, bit for bit."""
    spec = AttentionSpec(10, 6, num_kv_heads=2, head_dim=4, d_in=7, fused_qkv=fused_qkv)
    weights = {name: weight.astype(dtype) for name, weight in random_weights(spec, seed=2).items()}
    module = parity.load_into(new_module(sibling, kind, spec, dtype), weights, spec)
    back = parity.weights_of(module)
    assert list(back) == list(weights)
    assert all(same_array(back[name], weights[name]) for name in weights)


BAD_LOADS = {
    "missing": rejects("weights", missing=["out_proj.bias"], unexpected=[]),
    "unexpected": rejects("weights", missing=[], unexpected=["in_proj.bias"]),
    "transposed": rejects("out_proj.weight", "out_proj.weight.shape=(24, 10); it looks transposed"),
    "nan": rejects("out_proj.bias", "1 NaN or infinities"),
    "dtype": rejects_type("weights", "float16 and "),
}


@pytest.mark.parametrize("change", BAD_LOADS)
def test_failed_load_keeps_module_weights(sibling, weights, change):
    """Loading invalid weights raises an error and leaves the module's unchanged."""
    module = new_module(sibling, "MultiHeadAttention", SPEC, "float32")
    before = parity.weights_of(module)
    if change == "missing":
        del weights["out_proj.bias"]
    elif change == "unexpected":
        weights["in_proj.bias"] = weights["out_proj.bias"]
    elif change == "transposed":
        weights["out_proj.weight"] = weights["out_proj.weight"].T
    elif change == "nan":
        weights["out_proj.bias"][0] = np.nan
    else:
        weights = {name: weight.astype(np.float16) for name, weight in weights.items()}
    with BAD_LOADS[change]:
        parity.load_into(module, weights, SPEC)
    after = parity.weights_of(module)
    assert all(same_array(before[name], after[name]) for name in before)


def test_weights_of_returns_a_copy(sibling, weights):
    """Changing the weights that `weights_of` returned does not change the module."""
    module = parity.load_into(
        new_module(sibling, "MultiHeadAttention", SPEC, "float32"), weights, SPEC
    )
    parity.weights_of(module)["q_proj.weight"][:] = 0.0
    assert same_array(parity.weights_of(module)["q_proj.weight"], weights["q_proj.weight"])


def test_user_subclass_is_supported(sibling, weights):
    """A subclass of MultiHeadAttention from another module can be loaded and read."""
    base = getattr(sibling.package, "MultiHeadAttention")  # noqa: B009  (a name that pyright cannot follow)
    module = new_module(sibling, "MultiHeadAttention", SPEC, "float32")
    module.__class__ = type("Mine", (base,), {"__module__": "elsewhere"})
    parity.load_into(module, weights, SPEC)
    assert same_array(parity.weights_of(module)["q_proj.weight"], weights["q_proj.weight"])


@sample(jax=1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_framework_weights_load_exactly(sibling, weights, dtype):
    """Weights in torch or JAX are loaded into a module of any framework, bit for bit."""
    weights = {name: weight.astype(dtype) for name, weight in weights.items()}
    for of_framework in (parity.to_torch, parity.to_jax):
        module = new_module(sibling, "MultiHeadAttention", SPEC, dtype)
        parity.load_into(module, {name: of_framework(x) for name, x in weights.items()}, SPEC)
        assert all(same_array(x, weights[name]) for name, x in parity.weights_of(module).items())


def test_module_loads_from_module_exactly():
    """A JAX module loaded from a torch or JAX module has its weights, bit for bit."""
    jax_layer = mha_jax.MultiHeadAttention(SPEC, rngs=nnx.Rngs(0))
    for source in (
        mha_torch.MultiHeadSelfAttention(replace(SPEC, fused_qkv=True)),
        mha_jax.MultiHeadAttentionWithCache(SPEC, rngs=nnx.Rngs(1)),
    ):
        parity.load_into(jax_layer, source)
        expected = parity.weights_of(source)
        assert all(
            same_array(x, expected[name]) for name, x in parity.weights_of(jax_layer).items()
        )


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (AttentionSpec(10, 4, head_dim=6, num_kv_heads=2, d_in=7), "num_heads=6"),
        (replace(SPEC, rope=Rope(10000.0)), "rope=Rope(theta=10000.0)"),
    ],
)
def test_weights_of_other_layer_raise(sibling, weights, other, message):
    """Weights of a different specification raise an error, and the module keeps its own."""
    module = parity.load_into(
        new_module(sibling, "MultiHeadAttention", SPEC, "float32"), weights, SPEC
    )
    layer = mha_torch.MultiHeadAttention(other)
    with rejects("the module", message):
        parity.load_into(module, layer)
    with rejects("the module", message):
        parity.load_into(module, random_weights(other), other)
    assert all(same_array(x, weights[name]) for name, x in parity.weights_of(module).items())


def test_other_number_of_heads_raises(sibling):
    """Weights of 4 heads do not load into a layer of 8 heads, though their shapes are equal."""
    four, eight = AttentionSpec(16, 4), AttentionSpec(16, 8)
    module = new_module(sibling, "MultiHeadAttention", eight, "float32")
    with rejects("the module"):
        parity.load_into(module, random_weights(four), four)
    with rejects("the module"):
        parity.load_into(module, torch.nn.MultiheadAttention(16, 4))


@pytest.mark.parametrize(
    "kind", ["MultiHeadAttention", "MultiHeadSelfAttention", "MultiHeadAttentionWithCache"]
)
def test_weights_without_spec_raise(kind, sibling, weights):
    """Weights without a specification raise an error, and the module keeps its own."""
    module = new_module(sibling, kind, replace(SPEC, d_kv=SPEC.d_in), "float32")
    weights_by_name = parity.weights_of(module)
    with rejects_type("spec", spec=None):
        parity.load_into(module, random_weights(module.spec))
    assert all(
        same_array(x, weights_by_name[name]) for name, x in parity.weights_of(module).items()
    )


@sample(jax=1)
@pytest.mark.parametrize(
    "kind", ["MultiHeadAttention", "MultiHeadSelfAttention", "MultiHeadAttentionWithCache"]
)
def test_spec_of_module_is_complete(sibling, kind):
    """`spec_of` returns the specification that a module was made with."""
    spec = AttentionSpec(
        10, 6, num_kv_heads=2, head_dim=4, d_in=7, fused_qkv=True, rope=Rope(500.0), dropout=0.25
    )
    assert parity.spec_of(new_module(sibling, kind, spec, "float32")) == spec


def test_spec_of_torch_and_flax_modules():
    """`spec_of` reads torch.nn.MultiheadAttention and nnx.MultiHeadAttention."""
    layer = torch.nn.MultiheadAttention(16, 4, kdim=8, vdim=8, bias=False)
    assert parity.spec_of(layer) == AttentionSpec(16, 4, d_kv=8, qkv_bias=False, out_bias=False)
    layer = nnx.MultiHeadAttention(4, 16, qkv_features=24, decode=False, rngs=nnx.Rngs(0))
    assert parity.spec_of(layer) == AttentionSpec(16, 4, head_dim=6)


def test_wrapped_projection_raises(sibling, weights):
    """A wrapped q_proj raises an error with its missing and unexpected names."""
    module = new_module(sibling, "MultiHeadAttention", SPEC, "float32")
    if sibling.name == "torch":
        module.q_proj = torch.nn.Sequential(module.q_proj)
        missing, unexpected = "q_proj.weight", "q_proj.0.weight"
    else:
        module.q_proj = nnx.LoRA(7, 2, 24, base_module=module.q_proj, rngs=nnx.Rngs(0))
        missing, unexpected = "q_proj.weight", "q_proj.base_module.weight"
    for call in (
        lambda: parity.weights_of(module),
        lambda: parity.load_into(module, weights, SPEC),
    ):
        input_error = rejects("module", missing=..., unexpected=...)
        with input_error:
            call()
        assert missing in input_error.value.got["missing"]
        assert unexpected in input_error.value.got["unexpected"]


def test_unknown_module_type_raises():
    """Loading into a dict raises an error about its type."""
    with rejects_type("module", "dict"):
        parity.load_into({}, {})


@pytest.mark.parametrize(
    "spec", [SPEC, AttentionSpec(8, 2, qkv_bias=False, out_proj=False), AttentionSpec(9, 3)]
)
def test_packed_qkv_round_trip_is_exact(spec):
    """Weights that are packed and unpacked are the same, in order and bit for bit."""
    weights = random_weights(spec, seed=3)
    back = unpack_qkv(pack_qkv(weights), spec)
    assert list(back) == list(weights)
    assert all(same_array(back[name], weights[name]) for name in weights)


# ---- Files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_file_round_trip_is_exact(tmp_path, weights, dtype):
    """A file restores its specification and its weights, bit for bit in each dtype."""
    weights = {name: weight.astype(dtype) for name, weight in weights.items()}
    save_weights(tmp_path / "w.safetensors", weights, SPEC)
    back, spec = load_weights(tmp_path / "w.safetensors")
    assert spec == SPEC
    assert back.keys() == weights.keys()
    assert all(same_array(back[name], weights[name]) for name in weights)


# All examples share the folder, and each overwrites the file.
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    array=hnp.arrays(
        st.sampled_from([np.float32, np.float16, np.float64, np.int32, np.bool_]),
        hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4),
    ),
    order=st.sampled_from(["C", "transposed", "reversed"]),
)
def test_any_array_survives_a_file(tmp_path, array, order):
    """A file restores an array of any dtype, shape and memory order, bit for bit."""
    array = {
        "C": array,
        "transposed": array.T,
        "reversed": array[..., ::-1] if array.ndim else array,
    }[order]
    save_tensors(tmp_path / "a.safetensors", {"a": array}, {})
    back, _ = load_tensors(tmp_path / "a.safetensors")
    assert same_array(back["a"], np.ascontiguousarray(array).reshape(array.shape))


def test_files_are_deterministic(tmp_path, weights):
    """The order of its metadata does not change a file."""
    metadata = {name: name for name in "zyxwvutsrq"}
    save_tensors(tmp_path / "a", weights, metadata)
    save_tensors(tmp_path / "b", weights, dict(reversed(metadata.items())))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_metadata_survives_a_file(tmp_path):
    """A file restores metadata with non-ASCII text."""
    save_tensors(tmp_path / "a", {"a": np.zeros(1)}, {"what": "ein Maß, 测量"})
    assert load_tensors(tmp_path / "a")[1] == {"what": "ein Maß, 测量"}


@pytest.mark.parametrize(
    "culprit", ["pathlib.Path.replace", "os.fsync", "parity.measure.core.weights.load_tensors"]
)
def test_failed_write_keeps_the_old_file(tmp_path, monkeypatch, weights, culprit):
    """A failed write leaves the old file unchanged and no other file."""
    path = tmp_path / "w.safetensors"
    save_tensors(path, {"old": np.ones(1)}, {})
    old = path.read_bytes()

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(culprit, fail)
    with pytest.raises(OSError, match="No space left"):
        save_weights(path, weights, SPEC)
    assert os.listdir(tmp_path) == ["w.safetensors"]
    assert path.read_bytes() == old


def test_other_format_is_not_overwritten(tmp_path, weights):
    """Saving as .npz, or over a file of a different format, raises an error and changes no file."""
    with rejects("…/w.npz", "the suffix of npz"):
        save_weights(tmp_path / "w.npz", weights, SPEC)
    (tmp_path / "w.safetensors").write_text("Dear diary")
    with rejects("…/w.safetensors", "one that begins with b'Dear dia'"):
        save_weights(tmp_path / "w.safetensors", weights, SPEC)
    assert (tmp_path / "w.safetensors").read_text() == "Dear diary"
    assert os.listdir(tmp_path) == ["w.safetensors"]


def test_misread_write_raises(tmp_path, monkeypatch, weights):
    """A file that reads back differently raises OSError and does not remain."""

    def misread(_):
        return {name: weight * 2 for name, weight in weights.items()}, {}

    monkeypatch.setattr("parity.measure.core.weights.load_tensors", misread)
    with pytest.raises(OSError, match=r"w\.safetensors"):
        save_weights(tmp_path / "w.safetensors", weights, SPEC)
    assert os.listdir(tmp_path) == []


def test_incomplete_weights_are_not_saved(tmp_path, weights):
    """Saving weights without a bias raises an error and writes no file."""
    del weights["out_proj.bias"]
    with rejects("weights", missing=["out_proj.bias"], unexpected=[]):
        save_weights(tmp_path / "w.safetensors", weights, SPEC)
    assert os.listdir(tmp_path) == []


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=200
)
@given(part=st.floats(0.0, 1.0, exclude_max=True))
def test_truncated_file_raises(tmp_path, part):
    """A file cut off at any byte raises an error."""
    save_weights(tmp_path / "w", random_weights(SPEC), SPEC)
    whole = (tmp_path / "w").read_bytes()
    (tmp_path / "cut").write_bytes(whole[: int(part * len(whole))])
    with rejects("…/cut"):
        load_weights(tmp_path / "cut")


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=150
)
@given(position=st.integers(0, 10_000), byte=st.integers(0, 255))
def test_damaged_header_raises_or_loads(tmp_path, position, byte):
    """A file with one changed byte in its header raises a `InputError`, or its weights are
    valid.
    """
    path = tmp_path / "w"
    save_weights(path, random_weights(SPEC), SPEC)
    data = bytearray(path.read_bytes())
    data[position % (8 + int.from_bytes(data[:8], "little"))] = byte
    path = tmp_path / "damaged"
    path.write_bytes(data)
    try:
        weights, spec = load_weights(path)
    except InputError:
        return
    check_weights(weights, spec)  # weights that load must be valid


def test_header_with_a_new_dropout_loads(tmp_path, weights):
    """The control of the test above: a header with a different valid dropout loads."""
    save_weights(tmp_path / "w", weights, SPEC)
    written = (tmp_path / "w").read_bytes()
    edited = written.replace(b'"dropout\\": 0.0', b'"dropout\\": 0.1')
    (tmp_path / "edited").write_bytes(edited)
    loaded, spec = load_weights(tmp_path / "edited")
    assert spec == replace(SPEC, dropout=0.1)
    assert all(same_array(loaded[name], weights[name]) for name in weights)


@pytest.mark.parametrize("spec", ["[" * 100_000, "7", '{"d_model": "8", "num_heads": 2}'])
def test_malformed_spec_raises(tmp_path, weights, spec):
    """A deeply nested, non-object or ill-typed specification in a file raises an error."""
    save_tensors(tmp_path / "w", weights, {"format": "1", "spec": spec})
    with rejects("…/w"):
        load_weights(tmp_path / "w")


def test_wider_weights_are_not_narrowed(sibling, weights):
    """Loading float64 weights into a float32 module raises an error about the type."""
    module = new_module(sibling, "MultiHeadAttention", SPEC, "float32")
    with rejects_type("weights"):
        parity.load_into(
            module, {name: weight.astype(np.float64) for name, weight in weights.items()}, SPEC
        )


@pytest.mark.parametrize(
    "data", [b"", b"\xff" * 8, b"\xff" * 64, b"PK\x03\x04" + bytes(100), bytes(4096)]
)
def test_non_safetensors_file_raises(tmp_path, data):
    """An empty file or bytes that are not a safetensors file raise an error."""
    (tmp_path / "w").write_bytes(data)
    with rejects("…/w"):
        load_weights(tmp_path / "w")


def test_file_without_spec_raises(tmp_path, weights):
    """A safetensors file without a specification raises an error with its metadata."""
    save_tensors(tmp_path / "w", weights, {"format": "1"})
    with rejects("…/w", format="1", metadata=["format"]):
        load_weights(tmp_path / "w")


def test_later_format_raises(tmp_path, weights):
    """A file of format 2 raises an error with that format."""
    save_tensors(tmp_path / "w", weights, {"format": "2", "spec": SPEC.to_json()})
    with rejects("…/w", format="2", metadata=["format", "spec"]):
        load_weights(tmp_path / "w")


def test_missing_file_raises_os_error(tmp_path):
    """Loading a file that does not exist raises OSError with its name."""
    with pytest.raises(OSError, match="nowhere"):
        load_weights(tmp_path / "nowhere")


def test_random_weights_are_nonzero(weights):
    """Random weights and biases have no element that is 0."""
    assert all(np.count_nonzero(weight) == weight.size for weight in weights.values())


def new_module(sibling, kind, spec, dtype):
    keyword = "dtype" if sibling.name == "torch" else "param_dtype"
    return sibling.module(kind, spec, **{keyword: sibling.array(np.zeros(1, dtype)).dtype})

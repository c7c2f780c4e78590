"""Bad input is refused before any work, by every public function, with the argument's name and the rule.

ttnn itself answers some of it with a crash of the process. RoPE refuses in test_rope.py.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter

import numpy as np
import pytest
import ttnn

import mha_tt
import parity
from mha_spec import Latent

SPEC = parity.AttentionSpec(8, 2)
ROPE_SPEC = parity.AttentionSpec(8, 2, rope=parity.Rope(100.0))
LATENT_SPEC = parity.AttentionSpec(8, 2, head_dim=6, latent=Latent(5, 2))  # (32 + 64) wide; heads 32 + 64, 32


@dataclass(frozen=True)
class Tensor:
    """A tensor of ones, made when there is a device."""

    shape: tuple[int, ...]
    dtype: ttnn.DataType = ttnn.bfloat16

    def __call__(self, device):
        return mha_tt.upload(np.ones(self.shape), device=device, dtype=self.dtype)


def ones(*shape):
    return Tensor(shape)


def wide(*shape):
    return Tensor(shape, ttnn.float32)


def booleans(*shape):
    return np.ones(shape, bool)


def lengths(*values):
    return np.array(values, np.int32)


def module(kind, spec):
    """A module, made when there is a device."""
    return lambda device: getattr(mha_tt, kind)(spec, device=device)


def cache(*sizes, dtype=ttnn.bfloat16):
    """A cache, made when there is a device."""
    return lambda device: mha_tt.init_cache(*sizes, dtype, device=device)


def latent_cache(*sizes, dtype=ttnn.bfloat16):
    """A cache of latents, made when there is a device."""
    return lambda device: mha_tt.init_latent_cache(*sizes, dtype, device=device)


def weights(spec):
    """The weights of a layer on the device, where there is one."""
    return lambda device: mha_tt.upload_weights(parity.random_weights(spec), spec, device=device)


def made(x, device):
    """What is made when there is a device, also within a dict."""
    if isinstance(x, dict):
        return {name: made(value, device) for name, value in x.items()}
    return x(device) if callable(x) else x


def refused(device, function, keywords, error, message):
    """Call a function of the package, by its name, or a module, and expect the error."""
    function = attrgetter(function)(mha_tt) if isinstance(function, str) else function(device)
    keywords = made(keywords, device)
    with pytest.raises(error, match=message):
        function(**keywords)


# ---- What is no tensor on the device ---------------------------------------------------------------------------------

CALLS = {
    # name: (function, keywords that it takes)
    "split_heads": ("split_heads", {"x": ones(2, 3, 64), "num_heads": 2}),
    "combine_heads": ("combine_heads", {"x": ones(2, 2, 3, 32)}),
    "repeat_kv_heads": ("repeat_kv_heads", {"x": ones(2, 2, 3, 32), "num_heads": 4}),
    "attention_scores": (
        "attention_scores",
        {"query": ones(2, 2, 3, 32), "key": ones(2, 2, 4, 32), "bias": ones(1, 1, 3, 4)},
    ),
    "masked_softmax": ("masked_softmax", {"scores": ones(2, 2, 3, 4)}),
    "attention_context": ("attention_context", {"attn_weights": ones(2, 2, 3, 4), "value": ones(2, 2, 4, 32)}),
    "apply_rope": ("apply_rope", {"x": ones(2, 2, 3, 64), "positions": lengths(0, 1, 2)[None], "rope": parity.Rope()}),
    **{
        function: (
            function,
            {
                "query": ones(2, 2, 3, 32),
                "key": ones(2, 2, 4, 32),
                "value": ones(2, 2, 4, 32),
                "bias": ones(1, 1, 3, 4),
            },
        )
        for function in ("scaled_dot_product_attention", "fused.scaled_dot_product_attention")
    },
    "fused.attend_to_cache": (
        "fused.attend_to_cache",
        {
            "query": ones(1, 2, 2, 32),
            "keys": ones(2, 2, 32, 32),
            "values": ones(2, 2, 32, 32),
            "last_positions": lengths(3, 4),
        },
    ),
    "multi_head_attention_core": (
        "multi_head_attention_core",
        {"query": ones(2, 3, 8), "key": ones(2, 4, 8), "value": ones(2, 4, 8), "num_heads": 2},
    ),
    "multi_head_attention": (
        "multi_head_attention",
        {
            "query": ones(2, 3, 8),
            "key": ones(2, 4, 8),
            "value": ones(2, 4, 8),
            "bias": ones(1, 1, 3, 4),
            "weights": weights(SPEC),
            "spec": SPEC,
        },
    ),
    "multi_head_attention_with_cache": (
        "multi_head_attention_with_cache",
        {
            "x": ones(2, 3, 8),
            "cache_k": ones(2, 2, 5, 32),
            "cache_v": ones(2, 2, 5, 32),
            "weights": weights(SPEC),
            "spec": SPEC,
        },
    ),
    "multi_head_attention_with_static_cache": (
        "multi_head_attention_with_static_cache",
        {"x": ones(2, 3, 8), "cache": cache(2, 2, 4, 4), "weights": weights(SPEC), "spec": SPEC},
    ),
    "append_to_cache": (
        "append_to_cache",
        {"cache": cache(2, 2, 4, 4), "key": ones(2, 2, 3, 32), "value": ones(2, 2, 3, 32)},
    ),
    "append_to_latent_cache": (
        "append_to_latent_cache",
        {"cache": latent_cache(2, 4, 5, 2), "latents": ones(2, 1, 3, 96)},
    ),
    "absorb_keys": ("absorb_keys", {"q": ones(2, 2, 3, 96), "kv_b": ones(32, 128), "spec": LATENT_SPEC}),
    "absorb_values": ("absorb_values", {"context": ones(2, 2, 3, 32), "kv_b": ones(32, 128), "spec": LATENT_SPEC}),
    "multi_head_latent_attention": (
        "multi_head_latent_attention",
        {"x": ones(2, 3, 8), "cache": latent_cache(2, 4, 5, 2), "weights": weights(LATENT_SPEC), "spec": LATENT_SPEC},
    ),
    "MultiHeadAttention": (
        module("MultiHeadAttention", SPEC),
        {"query": ones(2, 3, 8), "key": ones(2, 4, 8), "value": ones(2, 4, 8), "bias": ones(1, 1, 3, 4)},
    ),
    "MultiHeadSelfAttention": (module("MultiHeadSelfAttention", SPEC), {"x": ones(2, 3, 8)}),
    "MultiHeadAttentionWithCache": (
        module("MultiHeadAttentionWithCache", SPEC),
        {"x": ones(2, 3, 8), "cache": cache(2, 2, 4, 4)},
    ),
    "MultiHeadLatentAttention": (
        module("MultiHeadLatentAttention", LATENT_SPEC),
        {"x": ones(2, 3, 8), "cache": latent_cache(2, 4, 5, 2)},
    ),
}
OPERANDS = [
    (call, name) for call, (_, keywords) in CALLS.items() for name, x in keywords.items() if isinstance(x, Tensor)
]
NOT_TENSORS = {
    # name: (what is put in the place of a tensor of that shape, words of the refusal)
    "list": (lambda shape, device: np.ones(shape).tolist(), "{name} must be a ttnn.Tensor, got list"),
    "array": (lambda shape, device: np.ones(shape, np.float32), "{name} must be a ttnn.Tensor, got ndarray"),
    "host": (
        lambda shape, device: ttnn.Tensor(np.ones(shape, np.float32), ttnn.bfloat16, None, ttnn.TILE_LAYOUT),
        r"{name} must lie on a device \(mha_tt\.upload\), got {name}\.storage_type\(\)=",
    ),
    "rows": (
        lambda shape, device: ttnn.to_device(
            ttnn.Tensor(np.ones(shape, np.float32), ttnn.bfloat16, None, ttnn.ROW_MAJOR_LAYOUT), device
        ),
        r"{name} must be in tiles \(mha_tt\.upload\), got {name}\.layout=",
    ),
    "integers": (
        lambda shape, device: ttnn.to_device(
            ttnn.Tensor(np.ones(shape, np.int32), ttnn.int32, None, ttnn.TILE_LAYOUT), device
        ),
        r"{name}\.dtype must be ttnn\.bfloat16, ttnn\.bfloat8_b or ttnn\.float32, got {name}\.dtype=",
    ),
}


@pytest.mark.parametrize("call", CALLS)
def test_good_input_is_taken(device, call):  # the control of everything here
    function, keywords = CALLS[call]
    function = attrgetter(function)(mha_tt) if isinstance(function, str) else function(device)
    function(**made(keywords, device))


BAD_OPERANDS = [  # a bias may be an array
    (call, name, kind) for call, name in OPERANDS for kind in NOT_TENSORS if (name, kind) != ("bias", "array")
]


@pytest.mark.parametrize(("call", "name", "kind"), BAD_OPERANDS, ids=map(" ".join, BAD_OPERANDS))
def test_what_is_no_tensor_in_tiles_on_the_device_is_refused(device, call, name, kind):
    function, keywords = CALLS[call]
    make, message = NOT_TENSORS[kind]
    bad = make(keywords[name].shape, device)
    message = message.format(name="x" if call == "multi_head_attention_core" else name)  # that of `split_heads`
    refused(device, function, {**keywords, name: bad}, TypeError, message)


RANKED = [operand for operand in OPERANDS if operand[1] != "bias"]


@pytest.mark.parametrize("axes", ["fewer", "more", "one"])
@pytest.mark.parametrize(("call", "name"), RANKED, ids=map(" ".join, RANKED))
def test_another_number_of_axes_is_refused(device, call, name, axes):
    function, keywords = CALLS[call]
    shape = keywords[name].shape
    bad = {"fewer": ones(*shape[1:]), "more": ones(1, *shape), "one": ones(8)}[axes]
    refused(device, function, {**keywords, name: bad}, ValueError, f"must have {len(shape)} axes, got")


# ---- Arrays ----------------------------------------------------------------------------------------------------------

ARRAYS = {
    "integers": (np.ones(3, np.int32), {}, TypeError, "array must be floating point or boolean, got dtype=int32"),
    "list of integers": ([1, 2], {}, TypeError, "array must be floating point or boolean, got dtype=int64"),
    "complex": (np.ones(3, complex), {}, TypeError, "array must be floating point or boolean, got dtype=complex128"),
    "text": (np.array(["a"]), {}, TypeError, "array must be floating point or boolean"),
    "objects": (np.array([None]), {}, TypeError, "array must be floating point or boolean, got dtype=object"),
    "number": (1.0, {}, ValueError, r"array must have at least 1 axis, got shape=\(\)"),
    "no dtype": (np.ones(3), {"dtype": None}, TypeError, "dtype must be ttnn.bfloat16, .*got dtype=None"),
    "NumPy dtype": (np.ones(3), {"dtype": np.float32}, TypeError, "dtype must be ttnn.bfloat16"),
    "integer dtype": (np.ones(3), {"dtype": ttnn.int32}, TypeError, "dtype must be ttnn.bfloat16"),
    "narrower dtype": (np.ones(3), {"dtype": ttnn.bfloat4_b}, TypeError, "dtype must be ttnn.bfloat16"),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_upload_refuses(device, name):
    array, options, error, message = ARRAYS[name]
    with pytest.raises(error, match=message):
        mha_tt.upload(array, device=device, **options)


@pytest.mark.parametrize("kind", ["list", "array", "host"])
def test_download_refuses(device, kind):
    make, message = NOT_TENSORS[kind]
    with pytest.raises(TypeError, match=message.format(name="tensor")):
        mha_tt.download(make((3, 5), device))


# ---- Weights ---------------------------------------------------------------------------------------------------------

LAYER_SPEC = parity.AttentionSpec(8, 2, d_in=6)
WEIGHTS = parity.random_weights(LAYER_SPEC)
UPLOADS = {
    "no spec": ({"spec": 2}, TypeError, "spec must be an AttentionSpec, got spec=2"),
    "heads": (
        {"spec": parity.AttentionSpec(9, 3, d_in=6)},
        ValueError,
        r"weights must have the names and shapes .*'q_proj\.weight': \(9, 6\).*, got .*'q_proj\.weight': \(8, 6\)",
    ),
    "groups": (
        {"spec": parity.AttentionSpec(8, 2, num_kv_heads=1, d_in=6)},
        ValueError,
        r"weights must have the names and shapes .*'k_proj\.weight': \(4, 6\).*, got .*'k_proj\.weight': \(8, 6\)",
    ),
    "dtype": ({"dtype": np.float32}, TypeError, "dtype must be ttnn.bfloat16"),
    "NaN": (
        {"weights": {**WEIGHTS, "q_proj.bias": np.array([math.nan] * 8)}},
        ValueError,
        r"finite, got .* in \['q_proj\.bias'\]",
    ),
    "beyond float32": (
        {"weights": {**WEIGHTS, "out_proj.weight": np.full((8, 8), 1e300)}},
        ValueError,
        "weights must be finite",
    ),
    "infinity": (
        {"weights": {**WEIGHTS, "out_proj.bias": np.array([math.inf] * 8)}},
        ValueError,
        "weights must be finite",
    ),
    "no axis": (
        {"weights": {**WEIGHTS, "k_proj.bias": np.float32(1.0)}},
        ValueError,
        r"weights must have the names and shapes .*, got .*'k_proj\.bias': \(\)",
    ),
}


@pytest.mark.parametrize("name", UPLOADS)
def test_upload_weights_refuses(device, name):
    keywords, error, message = UPLOADS[name]
    with pytest.raises(error, match=message):
        mha_tt.upload_weights(**{"weights": WEIGHTS, "spec": LAYER_SPEC, "device": device, **keywords})


OTHER_SPECS = {
    # name: (what is not the specification of the layer, error, words of the refusal)
    "number": (2, TypeError, "spec must be an AttentionSpec, got spec=2"),
    "heads": (
        parity.AttentionSpec(9, 3, d_in=6),
        ValueError,
        r"q_proj\.weight must have shape \(6, 96\), got .*\(6, 64\)",
    ),
    "groups": (
        parity.AttentionSpec(8, 2, num_kv_heads=1, d_in=6),
        ValueError,
        r"k_proj\.weight must have shape \(6, 32\), got .*\(6, 64\)",
    ),
    "head_dim": (
        parity.AttentionSpec(8, 2, head_dim=33, d_in=6),
        ValueError,
        r"q_proj\.weight must have shape \(6, 128\), got .*\(6, 64\)",
    ),
    # With RoPE each half of a head begins at a tile, so that a head of 4 features takes 64 and not 32.
    "rope": (
        parity.AttentionSpec(8, 2, d_in=6, rope=parity.Rope()),
        ValueError,
        r"q_proj\.weight must have shape \(6, 128\), got .*\(6, 64\)",
    ),
    "no out_proj": (parity.AttentionSpec(8, 2, d_in=6, out_proj=False), ValueError, r"unexpected \['out_proj"),
    "no bias": (parity.AttentionSpec(8, 2, d_in=6, qkv_bias=False), ValueError, r"unexpected \['k_proj\.bias"),
    "packed": (parity.AttentionSpec(8, 2, d_in=6, fused_qkv=True), ValueError, r"missing \['qkv_proj.*unexpected \['k"),
}
every_other_spec = pytest.mark.parametrize("name", OTHER_SPECS)


@every_other_spec
def test_download_weights_refuses_the_spec_of_another_layer(device, name):
    spec, error, message = OTHER_SPECS[name]
    with pytest.raises(error, match=message):
        mha_tt.download_weights(weights(LAYER_SPEC)(device), spec)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"q_proj.weight": np.ones((6, 8))}, r"must have the names and shapes .*, got .*'q_proj.weight': \(6, 8\)"),
        ({"o_proj.weight": np.ones((8, 8))}, "must have the names and shapes .*, got .*o_proj"),
        ({"q_proj.bias": np.ones(7)}, "must have the names and shapes"),
        ({"k_proj.weight": np.full((8, 6), math.nan)}, r"weights must be finite, got .*\['k_proj\.weight'\]"),
    ],
    ids=["transposed", "other name", "bias", "NaN"],
)
def test_module_refuses_weights_and_keeps_its_own(device, changed, message):
    layer = mha_tt.MultiHeadAttention(LAYER_SPEC, device=device)
    before = layer.weights
    with pytest.raises(ValueError, match=message):
        layer.load_weights({**WEIGHTS, **changed})
    assert layer.weights is before


@pytest.mark.parametrize("missing", list(WEIGHTS))
def test_module_refuses_weights_that_lack_one(device, missing):
    layer = mha_tt.MultiHeadAttention(LAYER_SPEC, device=device)
    with pytest.raises(ValueError, match="weights must have the names and shapes"):
        layer.load_weights({name: weight for name, weight in WEIGHTS.items() if name != missing})


HELD = {f"{name}_proj.weight": ones(6, 64) for name in "qkv"} | {f"{name}_proj.bias": ones(1, 64) for name in "qkv"}
HELD |= {"out_proj.weight": ones(64, 8), "out_proj.bias": ones(1, 8)}
PACKED = {"qkv_proj.weight": ones(6, 192), "qkv_proj.bias": ones(1, 192)}
PACKED |= {"out_proj.weight": ones(64, 8), "out_proj.bias": ones(1, 8)}
PACKED_SPEC = parity.AttentionSpec(8, 2, d_in=6, fused_qkv=True)


def without(*names):
    return {name: x for name, x in HELD.items() if name not in names}


BAD_WEIGHTS = {
    "no mapping": ([1], TypeError, "weights must be a mapping of names to tensors, got list"),
    "nothing": ({}, ValueError, r"weights must .*missing \['k_proj.*q_proj.*v_proj"),
    "no q_proj": (without("q_proj.weight", "q_proj.bias"), ValueError, r"weights must .*missing \['q_proj"),
    "bias without weight": (without("v_proj.weight"), ValueError, r"weights must .*missing \['v_proj"),
    "out_proj bias alone": (without("out_proj.weight"), ValueError, "weights must .*out_proj"),
    "other name": ({**HELD, "o_proj.weight": ones(8, 8)}, ValueError, r"weights must .*unexpected \['o_proj"),
    "packed and separate": ({**HELD, **PACKED}, ValueError, r"weights must .*unexpected \['qkv_proj"),
    "packed": (PACKED, ValueError, r"weights must .*missing \['k_proj.*unexpected \['qkv_proj"),
    "no bias": (without("k_proj.bias"), ValueError, r"weights must .*missing \['k_proj.bias'\], unexpected \[\]"),
    "array": ({**HELD, "q_proj.weight": np.ones((6, 64))}, TypeError, "q_proj.weight must be a ttnn.Tensor"),
    "transposed q_proj": ({**HELD, "q_proj.weight": ones(64, 6)}, ValueError, "q_proj.weight must have shape"),
    "transposed out_proj": ({**HELD, "out_proj.weight": ones(8, 64)}, ValueError, "out_proj.weight must have shape"),
    "flat weight": ({**HELD, "k_proj.weight": ones(64)}, ValueError, "k_proj.weight must have 2 axes"),
    "bias of another width": (
        {**HELD, "k_proj.bias": ones(1, 6)},
        ValueError,
        r"k_proj.bias must have shape \(1, 64\)",
    ),
    "flat bias": ({**HELD, "q_proj.bias": ones(64)}, ValueError, "q_proj.bias must have 2 axes"),
    "other head_dim": ({**HELD, "k_proj.weight": ones(6, 32)}, ValueError, "k_proj.weight must have shape"),
}
BAD_PACKED = {
    "separate": (HELD, r"weights must .*missing \['qkv_proj.*unexpected \['k_proj"),
    "columns": ({**PACKED, "qkv_proj.weight": ones(6, 190)}, r"qkv_proj.weight must have shape \(6, 192\)"),
    "bias": ({**PACKED, "qkv_proj.bias": ones(1, 64)}, r"qkv_proj.bias must have shape \(1, 192\)"),
}
X = ones(2, 3, 6)
FUNCTIONS = {
    "plain": ("multi_head_attention", {"query": X, "need_weights": True}),
    "fused": ("multi_head_attention", {"query": X}),
    "growing": ("multi_head_attention_with_cache", {"x": X}),
    "static": ("multi_head_attention_with_static_cache", {"x": X, "cache": cache(2, 2, 4, 4)}),
}
every_function = pytest.mark.parametrize("function", FUNCTIONS)


@every_function
@pytest.mark.parametrize("name", BAD_WEIGHTS)
def test_function_refuses_weights(device, name, function):
    held, error, message = BAD_WEIGHTS[name]
    function, keywords = FUNCTIONS[function]
    refused(device, function, {**keywords, "weights": held, "spec": LAYER_SPEC}, error, message)


@every_function
@pytest.mark.parametrize("name", BAD_PACKED)
def test_function_refuses_packed_weights(device, name, function):
    held, message = BAD_PACKED[name]
    function, keywords = FUNCTIONS[function]
    refused(device, function, {**keywords, "weights": held, "spec": PACKED_SPEC}, ValueError, message)


@every_function
@every_other_spec
def test_function_refuses_the_spec_of_another_layer(device, name, function):
    spec, error, message = OTHER_SPECS[name]
    function, keywords = FUNCTIONS[function]
    refused(device, function, {**keywords, "weights": HELD, "spec": spec}, error, message)


@pytest.mark.parametrize("function", ["growing", "static"])
def test_cached_function_refuses_keys_of_another_width(device, function):
    spec = parity.AttentionSpec(8, 2, d_in=6, d_kv=5)
    function, keywords = FUNCTIONS[function]
    keywords = {**keywords, "weights": weights(spec), "spec": spec}
    refused(device, function, keywords, ValueError, "d_kv must equal d_in in self-attention")


# ---- Configurations --------------------------------------------------------------------------------------------------

# What a specification refuses is in tests/test_bad_input.py.
CONFIGS = {
    "number": ({"spec": 8}, TypeError, "spec must be an AttentionSpec, got spec=8"),
    "keywords": ({"spec": {"d_model": 8, "num_heads": 2}}, TypeError, "spec must be an AttentionSpec, got spec={'d_mo"),
    "dtype": ({"dtype": np.float32}, TypeError, "dtype must be ttnn.bfloat16, ttnn.bfloat8_b or ttnn.float32"),
    "dtype None": ({"dtype": None}, TypeError, "dtype must be ttnn.bfloat16"),
    "weight_dtype": ({"weight_dtype": ttnn.int32}, TypeError, "weight_dtype must be ttnn.bfloat16"),
}


@pytest.mark.parametrize("kind", ["MultiHeadSelfAttention", "MultiHeadAttentionWithCache"])
def test_self_attention_refuses_keys_of_another_width(device, kind):
    with pytest.raises(ValueError, match="d_kv must equal d_in in self-attention, got d_kv=6 and d_in=8"):
        getattr(mha_tt, kind)(parity.AttentionSpec(8, 2, d_kv=6), device=device)


@pytest.mark.parametrize("kind", ["MultiHeadAttention", "MultiHeadSelfAttention", "MultiHeadAttentionWithCache"])
@pytest.mark.parametrize("name", CONFIGS)
def test_module_refuses_the_configuration(device, kind, name):
    keywords, error, message = CONFIGS[name]
    with pytest.raises(error, match=f"^{message}"):
        getattr(mha_tt, kind)(**{"spec": SPEC, "device": device, **keywords})


# ---- Stages ----------------------------------------------------------------------------------------------------------

HEADS = ones(2, 2, 3, 32)
RELATIVE = parity.AttentionSpec(8, 2, relative_bias=parity.RelativeBias(8, 8))
STAGES = {
    "split_heads width": ("split_heads", {"x": ones(2, 3, 8), "num_heads": 3}, ValueError, "width=8 and num_heads=3"),
    "split_heads 0": ("split_heads", {"x": ones(2, 3, 8), "num_heads": 0}, ValueError, "num_heads must be at least 1"),
    "split_heads float": ("split_heads", {"x": ones(2, 3, 8), "num_heads": 2.0}, TypeError, "must be an integer"),
    "repeat groups": ("repeat_kv_heads", {"x": HEADS, "num_heads": 3}, ValueError, "num_heads=3 and num_kv_heads=2"),
    "repeat 0": ("repeat_kv_heads", {"x": HEADS, "num_heads": 0}, ValueError, "num_heads must be at least 1"),
    "scores width": ("attention_scores", {"query": HEADS, "key": ones(2, 2, 3, 64)}, ValueError, "key must .*head_dim"),
    "scores batch": ("attention_scores", {"query": HEADS, "key": ones(3, 2, 3, 32)}, ValueError, "key must .*batch"),
    "scores groups": ("attention_scores", {"query": ones(2, 3, 3, 32), "key": HEADS}, ValueError, "num_kv_heads=2"),
    "scores bias": (
        "attention_scores",
        {"query": HEADS, "key": HEADS, "bias": np.ones(5)},
        ValueError,
        r"bias must broadcast to the scores .*= \(2, 2, 3, 3\), got bias\.shape=\(5,\)",
    ),
    "scores head_dim": (
        "attention_scores",
        {"query": HEADS, "key": HEADS, "spec": parity.AttentionSpec(66, 2)},
        ValueError,
        "head_dim must be at most the 32 features of a head, got head_dim=33",
    ),
    "scores relative bias": (
        "attention_scores",
        {"query": HEADS, "key": HEADS, "spec": RELATIVE, "relative_bias": ones(2, 8)},
        ValueError,
        "relative_bias must have 4 axes",
    ),
    "scores relative bias heads": (
        "attention_scores",
        {"query": HEADS, "key": HEADS, "spec": RELATIVE, "relative_bias": ones(1, 8, 1, 2)},
        ValueError,
        r"relative_bias must have shape \(1, N, 1, num_buckets\) = \(1, 2, 1, 8\)",
    ),
    "scores without their relative bias": (
        "attention_scores",
        {"query": HEADS, "key": HEADS, "spec": RELATIVE},
        ValueError,
        "relative_bias must be given where the spec has one",
    ),
    "scores of some heads with slopes": (
        "attention_scores",
        {"query": HEADS, "key": HEADS, "spec": parity.AttentionSpec(128, 4, alibi=parity.Alibi())},
        ValueError,
        "query must have the heads of a spec with alibi, whose slopes are theirs, got 2 heads and num_heads=4",
    ),
    "softmax sinks": ("masked_softmax", {"scores": HEADS, "sinks": HEADS}, ValueError, r"sinks must have shape \(1, N"),
    "softmax mask": ("masked_softmax", {"scores": HEADS, "mask": booleans(5)}, ValueError, "mask must broadcast"),
    "softmax float mask": ("masked_softmax", {"scores": HEADS, "mask": np.ones((3, 32))}, TypeError, "must be boolean"),
    "softmax tensor mask": (
        "masked_softmax",
        {"scores": HEADS, "mask": ones(3, 32)},
        TypeError,
        "mask must be a NumPy",
    ),
    "context keys": (
        "attention_context",
        {"attn_weights": ones(2, 2, 3, 5), "value": HEADS},
        ValueError,
        "value must have the batch size and the keys of attn_weights",
    ),
    "context groups": (
        "attention_context",
        {"attn_weights": ones(2, 3, 3, 3), "value": HEADS},
        ValueError,
        "num_heads=3 and num_kv_heads=2",
    ),
    "dropout 1": ("apply_dropout", {"attn_weights": HEADS, "rate": 1.0}, ValueError, "dropout=1.0"),
    "dropout negative": ("apply_dropout", {"attn_weights": HEADS, "rate": -0.5}, ValueError, "dropout=-0.5"),
    "dropout text": ("apply_dropout", {"attn_weights": HEADS, "rate": "0.5"}, TypeError, "dropout must be a number"),
    "dropout float keep": (
        "apply_dropout",
        {"attn_weights": HEADS, "rate": 0.5, "keep": np.ones((3, 32))},
        TypeError,
        "keep must be boolean",
    ),
    "dropout keep": (
        "apply_dropout",
        {"attn_weights": HEADS, "rate": 0.5, "keep": booleans(5)},
        ValueError,
        "keep must broadcast",
    ),
    "dropout keep list": (
        "apply_dropout",
        {"attn_weights": HEADS, "rate": 0.5, "keep": [True]},
        TypeError,
        "keep must be a NumPy array, got list",
    ),
    "dropout of float32": (
        "apply_dropout",
        {"attn_weights": wide(2, 2, 3, 32), "rate": 0.5},
        TypeError,
        "attn_weights must be bfloat16 to be dropped at random",
    ),
    "dropout of bfloat8_b": (
        "apply_dropout",
        {"attn_weights": replace(HEADS, dtype=ttnn.bfloat8_b), "rate": 0.5},
        TypeError,
        "attn_weights must be bfloat16 to be dropped at random",
    ),
}


@pytest.mark.parametrize("name", STAGES)
def test_stage_refuses(device, name):
    refused(device, *STAGES[name])


# ---- Attention of split heads ----------------------------------------------------------------------------------------

DOT_PRODUCTS = {
    "key float32": ({"key": wide(2, 2, 3, 32)}, TypeError, "key must be float32 if query is"),
    "value float32": ({"value": wide(2, 2, 3, 32)}, TypeError, "value must be float32 if query is"),
    "value shape": ({"value": ones(2, 2, 5, 32)}, ValueError, "value must have the shape of key"),
    "batch": ({"query": ones(3, 2, 3, 32)}, ValueError, "key must have the batch size and head_dim of query"),
    "batch of 1": ({"query": ones(1, 2, 3, 32)}, ValueError, "key must have the batch size and head_dim of query"),
    "head_dim": ({"query": ones(2, 2, 3, 64)}, ValueError, "key must have the batch size and head_dim of query"),
    "head_dim beyond": ({"spec": parity.AttentionSpec(66, 2)}, ValueError, "head_dim must be at most the 32 features"),
    "groups": ({"query": ones(2, 3, 3, 32)}, ValueError, "num_heads=3 and num_kv_heads=2"),
    "float mask": ({"mask": np.ones((3, 3))}, TypeError, "mask must be boolean .*passed as bias"),
    "integer mask": ({"mask": np.ones((3, 3), int)}, TypeError, "mask must be boolean"),
    "mask list": ({"mask": [[True]]}, TypeError, "mask must be a NumPy array or a DeviceMask, got list"),
    "mask tensor": ({"mask": ones(3, 3)}, TypeError, "mask must be a NumPy array or a DeviceMask, got Tensor"),
    "mask keys": ({"mask": booleans(3, 4)}, ValueError, r"mask must broadcast.*mask.shape=\(3, 4\)"),
    "mask of a batch": ({"mask": booleans(3, 3, 3)}, ValueError, "mask must broadcast"),
    "mask that stretches": ({"mask": booleans(4, 1, 3, 3)}, ValueError, "mask must broadcast"),
    "mask of 5 axes": ({"mask": booleans(1, 1, 1, 3, 3)}, ValueError, "mask must broadcast"),
    "DeviceMask keys": (
        {"mask": lambda device: mha_tt.DeviceMask(booleans(3, 4), device=device)},
        ValueError,
        "mask must broadcast",
    ),
    "boolean bias": ({"bias": booleans(3, 3)}, TypeError, "bias must be floating point, got bias.dtype=bool"),
    "integer bias": ({"bias": np.ones((3, 3), int)}, TypeError, "bias must be floating point"),
    "bias keys": ({"bias": np.ones((3, 4))}, ValueError, "bias must broadcast"),
    "bias on the device": ({"bias": ones(3, 4)}, ValueError, "bias must broadcast"),
    "bias of 5 axes": ({"bias": np.ones((1, 1, 1, 3, 3))}, ValueError, "bias must broadcast"),
    "dropout 1": ({"dropout": 1.0}, ValueError, "dropout must be at least 0 and below 1"),
    "dropout negative": ({"dropout": -0.5}, ValueError, "dropout must be at least 0 and below 1"),
    "dropout text": ({"dropout": "0.5"}, TypeError, "dropout must be a number, got dropout='0.5'"),
    "dropout False": ({"dropout": False}, TypeError, "dropout must be a number, got dropout=False"),
}
KEEPS = {
    "float keep": ({"dropout": 0.5, "dropout_keep": np.ones((3, 3))}, TypeError, "keep must be boolean"),
    "keep shape": ({"dropout": 0.5, "dropout_keep": booleans(5)}, ValueError, "keep must broadcast"),
}
FLOAT32 = {name: wide(2, 2, 3, 32) for name in ("query", "key", "value")}
FUSED = {
    "need_weights": ({"need_weights": True}, ValueError, "need_weights and dropout must be left out on the fused path"),
    "dropout": ({"dropout": 0.5}, ValueError, "need_weights and dropout must be left out on the fused path"),
    "dropout_keep": ({"dropout_keep": booleans(3, 3)}, ValueError, "need_weights and dropout must be left out"),
    "float32": (FLOAT32, TypeError, "query must be bfloat16 or bfloat8_b on the fused path, got query.dtype=float32"),
    "features": (
        {name: ones(2, 2, 3, 16) for name in FLOAT32},
        ValueError,
        r"heads must have whole tiles of 32 features, got query\.shape=\(2, 2, 3, 16\)",
    ),
}
SPLIT = {"query": HEADS, "key": HEADS, "value": HEADS}


@pytest.mark.parametrize("function", ["scaled_dot_product_attention", "fused.scaled_dot_product_attention"])
@pytest.mark.parametrize("name", DOT_PRODUCTS)
def test_dot_product_attention_refuses(device, name, function):
    keywords, error, message = DOT_PRODUCTS[name]
    refused(device, function, {**SPLIT, **keywords}, error, message)


@pytest.mark.parametrize("name", KEEPS)
def test_dot_product_attention_refuses_to_keep(device, name):
    keywords, error, message = KEEPS[name]
    refused(device, "scaled_dot_product_attention", {**SPLIT, **keywords}, error, message)


@pytest.mark.parametrize("name", FUSED)
def test_fused_path_refuses_what_the_kernel_does_not_offer(device, name):
    keywords, error, message = FUSED[name]
    refused(device, "fused.scaled_dot_product_attention", {**SPLIT, **keywords}, error, message)


STEP = {
    "query": ones(1, 2, 2, 32),
    "keys": ones(2, 2, 32, 32),
    "values": ones(2, 2, 32, 32),
    "last_positions": lengths(3, 4),
}
STEPS = {
    "float32": ({"query": wide(1, 2, 2, 32)}, TypeError, "query must be bfloat16 or bfloat8_b on the fused path"),
    "float32 cache": ({"keys": wide(2, 2, 32, 32)}, TypeError, "keys"),
    "features": ({"query": ones(1, 2, 2, 16)}, ValueError, "heads must have whole tiles of 32 features"),
    "width": (
        {"query": ones(1, 2, 2, 160)},
        ValueError,
        "heads must have at most 128 features in a step, or a multiple",
    ),
    "head_dim": ({"spec": parity.AttentionSpec(80, 2)}, ValueError, "head_dim must be at most the 32 features"),
    "batch": ({"query": ones(1, 3, 2, 32)}, ValueError, "batch"),
    "value slots": ({"values": ones(2, 2, 64, 32)}, ValueError, "values"),
    "groups": ({"query": ones(1, 2, 3, 32)}, ValueError, "num_heads=3 and num_kv_heads=2"),
    "slots": ({"keys": ones(2, 2, 40, 32), "values": ones(2, 2, 40, 32)}, ValueError, "whole tiles"),
    "too few positions": ({"last_positions": lengths(3)}, ValueError, "last_positions"),
    "position beyond": ({"last_positions": lengths(3, 32)}, ValueError, "last_positions"),
    "float positions": ({"last_positions": np.array([3.0, 4.0])}, TypeError, "last_positions must be integers"),
    "sinks": ({"sinks": ones(1, 3, 1, 1)}, ValueError, r"sinks must have shape \(1, N, 1, 1\) = \(1, 2, 1, 1\)"),
}


@pytest.mark.parametrize("name", STEPS)
def test_attention_to_a_cache_refuses(device, name):
    keywords, error, message = STEPS[name]
    refused(device, "fused.attend_to_cache", {**STEP, **keywords}, error, message)


CORES = {
    "heads": ({"num_heads": 3}, ValueError, "num_heads=3"),
    "key width": ({"key": ones(2, 3, 6), "value": ones(2, 3, 6)}, ValueError, "key must have the batch size and head"),
    "value length": ({"value": ones(2, 4, 8)}, ValueError, "value must have the shape of key"),
    "float mask": ({"mask": np.ones((3, 3))}, TypeError, "mask must be boolean"),
}


@pytest.mark.parametrize("name", CORES)
def test_core_refuses(device, name):
    keywords, error, message = CORES[name]
    inputs = {name: ones(2, 3, 8) for name in ("query", "key", "value")}
    refused(device, "multi_head_attention_core", {**inputs, "num_heads": 2, **keywords}, error, message)


# ---- Layers ----------------------------------------------------------------------------------------------------------

LAYERS = {
    "query width": ({"query": ones(2, 3, 7)}, ValueError, "the input of q_proj must have 6 features"),
    "no key of that width": ({"key": None}, ValueError, "the input of k_proj must have 5 features"),
    "key width": ({"key": ones(2, 4, 6)}, ValueError, "the input of k_proj must have 5 features"),
    "key dtype": ({"key": wide(2, 4, 5)}, TypeError, "key must have the dtype of query"),
    "key batch": ({"key": ones(3, 4, 5)}, ValueError, "key must have the batch size of query"),
    "key batch of 1": ({"key": ones(1, 4, 5)}, ValueError, "key must have the batch size of query"),
    "value without key": ({"key": None, "value": ones(2, 4, 5)}, ValueError, "value must come with a key"),
    "value width": ({"value": ones(2, 4, 6)}, ValueError, "the input of v_proj must have 5 features"),
    "value length": ({"value": ones(2, 3, 5)}, ValueError, "value must have as many tokens as key"),
    "value batch": ({"value": ones(1, 4, 5)}, ValueError, "value must have the batch size"),
    "float mask": ({"mask": np.ones((3, 4))}, TypeError, "mask must be boolean"),
    "mask that stretches": ({"mask": booleans(4, 1, 3, 4)}, ValueError, "mask must broadcast"),
    "mask of S, T": ({"mask": booleans(4, 3)}, ValueError, "mask must broadcast"),
    "bias keys": ({"bias": np.ones((3, 3))}, ValueError, "bias must broadcast"),
    "positions without RoPE": ({"positions": lengths(0, 1, 2)[None]}, ValueError, "positions must come with RoPE"),
    "lengths too long": ({"key_padding_lengths": [3, 5]}, ValueError, "key_padding_lengths must lie in 0..4"),
    "lengths too few": ({"key_padding_lengths": [3]}, ValueError, "key_padding_lengths must have shape"),
    "lengths of floats": ({"key_padding_lengths": [1.0, 2.0]}, TypeError, "key_padding_lengths must be integers"),
}
CROSS_SPEC = parity.AttentionSpec(8, 2, d_in=6, d_kv=5)
INPUTS = {"query": ones(2, 3, 6), "key": ones(2, 4, 5)}
every_need = pytest.mark.parametrize("need_weights", [False, True], ids=["fused", "plain"])


@every_need
@pytest.mark.parametrize("name", LAYERS)
def test_layer_function_refuses(device, name, need_weights):
    keywords, error, message = LAYERS[name]
    options = {"weights": weights(CROSS_SPEC), "spec": CROSS_SPEC, "need_weights": need_weights}
    refused(device, "multi_head_attention", {**INPUTS, **keywords, **options}, error, message)


@every_need
@pytest.mark.parametrize("name", LAYERS)
def test_module_refuses(device, name, need_weights):
    keywords, error, message = LAYERS[name]
    layer = module("MultiHeadAttention", CROSS_SPEC)
    refused(device, layer, {**INPUTS, **keywords, "need_weights": need_weights}, error, message)


def test_layer_function_refuses_to_keep_outside_training(device):
    keywords = {"query": ones(2, 3, 8), "weights": weights(SPEC), "spec": SPEC, "dropout_keep": booleans(3, 3)}
    message = "dropout_keep must come with training=True, got dropout_keep and training=False"
    refused(device, "multi_head_attention", keywords, ValueError, message)


ROPE_LAYERS = {
    "key": ({"key": ones(2, 3, 8)}, ValueError, "key must be None .*RoPE"),
    "float positions": ({"positions": np.ones((1, 3))}, TypeError, "positions must be integers"),
    "flat positions": ({"positions": lengths(0, 1, 2)}, ValueError, "positions must have shape"),
    "too few positions": ({"positions": lengths(0, 1)[None]}, ValueError, "positions must have shape"),
    "positions list": ({"positions": [[0, 1, 2]]}, TypeError, "positions must be a NumPy array, got list"),
    "positions of another batch": ({"positions": np.zeros((3, 3), int)}, ValueError, "positions must have shape"),
}


@pytest.mark.parametrize("name", ROPE_LAYERS)
def test_layer_function_with_rope_refuses(device, name):
    keywords, error, message = ROPE_LAYERS[name]
    options = {"weights": weights(ROPE_SPEC), "spec": ROPE_SPEC}
    refused(device, "multi_head_attention", {"query": ones(2, 3, 8), **keywords, **options}, error, message)


@pytest.mark.parametrize("name", ROPE_LAYERS)
def test_module_with_rope_refuses(device, name):
    keywords, error, message = ROPE_LAYERS[name]
    layer = module("MultiHeadAttention", ROPE_SPEC)
    refused(device, layer, {"query": ones(2, 3, 8), **keywords}, error, message)


@pytest.mark.parametrize("rates", [{"dropout": 0.5}, {"output_dropout": 0.5}], ids=str)
@pytest.mark.parametrize("kind", ["MultiHeadAttention", "MultiHeadSelfAttention", "MultiHeadAttentionWithCache"])
def test_training_in_float32_is_refused_before_any_work(device, calls, kind, rates):
    layer = getattr(mha_tt, kind)(replace(SPEC, **rates), device=device, dtype=ttnn.float32)
    inputs = [wide(2, 3, 8)(device)]
    inputs += [layer.init_cache(2, 4)] if kind.endswith("Cache") else []
    calls.clear()
    with pytest.raises(TypeError, match="the module must be bfloat16 to drop at random in training"):
        layer(*inputs)
    assert calls == []


OTHER_DTYPES = {
    "wider": (ttnn.bfloat16, ttnn.float32),
    "narrower": (ttnn.float32, ttnn.bfloat16),
    "blocks": (ttnn.bfloat16, ttnn.bfloat8_b),
}


@pytest.mark.parametrize("name", OTHER_DTYPES)
@pytest.mark.parametrize("kind", ["MultiHeadAttention", "MultiHeadSelfAttention", "MultiHeadAttentionWithCache"])
def test_module_refuses_another_dtype(device, kind, name):
    dtype, other = OTHER_DTYPES[name]
    layer = getattr(mha_tt, kind)(SPEC, device=device, dtype=dtype)
    inputs = [Tensor((2, 3, 8), other)(device)]
    inputs += [layer.init_cache(2, 4)] if kind.endswith("Cache") else []
    with pytest.raises(TypeError, match=r"must have the dtype of the module"):
        layer(*inputs)


SELF_ATTENTIONS = {
    "width": ({"x": ones(2, 3, 6)}, ValueError, "the input of q_proj must have 8 features"),
    "too long": ({"key_padding_lengths": [3, 4]}, ValueError, r"key_padding_lengths must lie in 0..3, got .*\[3, 4\]"),
    "negative": ({"key_padding_lengths": [-1, 3]}, ValueError, "key_padding_lengths must lie in 0..3"),
    "too few": ({"key_padding_lengths": [3]}, ValueError, "key_padding_lengths must have shape"),
    "too many": ({"key_padding_lengths": [1, 2, 3]}, ValueError, "key_padding_lengths must have shape"),
    "floats": ({"key_padding_lengths": [1.0, 2.0]}, TypeError, "key_padding_lengths must be integers"),
    "booleans": ({"key_padding_lengths": [True, False]}, TypeError, "key_padding_lengths must be integers"),
    "number": ({"key_padding_lengths": 3}, ValueError, "key_padding_lengths must have shape"),
    "2 axes": ({"key_padding_lengths": lengths(1, 2)[None]}, ValueError, "key_padding_lengths must have shape"),
    "float mask": ({"mask": np.ones((3, 3))}, TypeError, "mask must be boolean"),
    "mask keys": ({"mask": booleans(3, 4)}, ValueError, "mask must broadcast"),
    "bias keys": ({"bias": np.ones((3, 4))}, ValueError, "bias must broadcast"),
    "positions without RoPE": ({"positions": lengths(0, 1, 2)[None]}, ValueError, "positions must come with RoPE"),
}


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", SELF_ATTENTIONS)
def test_self_attention_refuses(device, name, is_causal):
    keywords, error, message = SELF_ATTENTIONS[name]
    layer = module("MultiHeadSelfAttention", SPEC)
    refused(device, layer, {"x": ones(2, 3, 8), **keywords, "is_causal": is_causal}, error, message)


# ---- Masks -----------------------------------------------------------------------------------------------------------

MASKS = {
    "causal -1": ("create_causal_mask", (-1,), {}, ValueError, "seq_len_q must be at least 0, got seq_len_q=-1"),
    "causal keys -1": ("create_causal_mask", (2, -1), {}, ValueError, "seq_len_k must be at least 0"),
    "causal float": ("create_causal_mask", (2.0,), {}, TypeError, "seq_len_q must be an integer"),
    "causal boolean": ("create_causal_mask", (True,), {}, TypeError, "seq_len_q must be an integer"),
    "padding keys -1": ("create_padding_mask", ([0], -1), {}, ValueError, "seq_len_k must be at least 0"),
    "padding too long": ("create_padding_mask", ([1, 4], 3), {}, ValueError, r"lengths must lie in 0..3.*\[1, 4\]"),
    "padding negative": ("create_padding_mask", ([-1], 3), {}, ValueError, "lengths must lie in 0..3"),
    "padding floats": ("create_padding_mask", ([1.0], 3), {}, TypeError, "lengths must be integers"),
    "padding booleans": ("create_padding_mask", ([True, False], 2), {}, TypeError, "lengths must be integers"),
    "padding number": ("create_padding_mask", (2, 3), {}, ValueError, "lengths must have shape"),
    "padding 2 axes": ("create_padding_mask", ([[1, 2]], 3), {}, ValueError, "lengths must have shape"),
    "attention -1": ("create_attention_mask", (-1,), {}, ValueError, "seq_len_q must be at least 0"),
    "attention keys": ("create_attention_mask", (2, -1), {}, ValueError, "seq_len_k must be at least 0"),
    "attention too long": (
        "create_attention_mask",
        (2, 3),
        {"key_padding_lengths": [4]},
        ValueError,
        "lengths must lie in 0..3",
    ),
    "cached keys": (
        "create_causal_mask_with_cache",
        (2, 4, 1),
        {},
        ValueError,
        "seq_len_k must be cache_len .*seq_len_k=4, cache_len=1 and seq_len_q=2",
    ),
    "cached negative": ("create_causal_mask_with_cache", (3, 2, -1), {}, ValueError, "cache_len must be at least 0"),
    "cached less": ("create_causal_mask_with_cache", (-1, 1, 2), {}, ValueError, "seq_len_q must be at least 0"),
    "window 0": ("create_sliding_window_mask", (3,), {"window_size": 0}, ValueError, "window_size must be at least 1"),
    "window float": ("create_sliding_window_mask", (3,), {"window_size": 1.5}, TypeError, "window_size must be an int"),
    "slots too long": ("create_cache_mask", ([5], 1, 4), {}, ValueError, "lengths must lie in 0..4"),
    "slots negative": ("create_cache_mask", ([-1], 1, 4), {}, ValueError, "lengths must lie in 0..4"),
    "slots floats": ("create_cache_mask", ([1.0], 1, 4), {}, TypeError, "lengths must be integers"),
    "slots -1": ("create_cache_mask", ([1], -1, 4), {}, ValueError, "seq_len_q must be at least 0"),
    "slots capacity": ("create_cache_mask", ([0], 1, 0), {}, ValueError, "capacity must be at least 1"),
}


@pytest.mark.parametrize("name", MASKS)
def test_mask_refuses(name):
    function, args, keywords, error, message = MASKS[name]
    with pytest.raises(error, match=message):
        getattr(mha_tt, function)(*args, **keywords)


@pytest.mark.parametrize(
    ("mask", "error", "message"),
    [
        (None, TypeError, "mask must be a NumPy array"),
        ([[True]], TypeError, "mask must be a NumPy array"),
        (np.ones((3, 3)), TypeError, "mask must be boolean"),
        (np.ones((3, 3), int), TypeError, "mask must be boolean"),
        (booleans(1, 1, 1, 3, 3), ValueError, "mask must broadcast"),
    ],
    ids=["None", "list", "float", "integers", "5 axes"],
)
def test_device_mask_refuses(device, mask, error, message):
    with pytest.raises(error, match=message):
        mha_tt.DeviceMask(mask, device=device)


def test_device_mask_refuses_a_device_mask(device):
    mask = mha_tt.DeviceMask(booleans(3, 3), device=device)
    with pytest.raises(TypeError, match="mask must be a NumPy array"):
        mha_tt.DeviceMask(mask, device=device)


# ---- Caches ----------------------------------------------------------------------------------------------------------

SIZES = {"batch_size": 2, "num_kv_heads": 2, "capacity": 4, "head_dim": 4}
NBYTES = {"batch_size": 1, "num_kv_heads": 2, "capacity": 3, "head_dim": 4, "num_layers": 5}
bad_size = pytest.mark.parametrize(
    ("value", "error"), [(0, ValueError), (-1, ValueError), (1.0, TypeError), (True, TypeError)]
)


@bad_size
@pytest.mark.parametrize("size", SIZES)
def test_init_cache_refuses_size(device, size, value, error):
    if (size, value) == ("batch_size", 0):  # no sequence is fine
        value = -2
    with pytest.raises(error, match=f"{size} must be .*{size}={value}"):
        mha_tt.init_cache(**{**SIZES, size: value}, device=device)


@bad_size
@pytest.mark.parametrize("size", NBYTES)
def test_kv_cache_nbytes_refuses_size(size, value, error):
    with pytest.raises(error, match=f"{size} must be .*={value}"):
        mha_tt.kv_cache_nbytes(**{**NBYTES, size: value}, dtype=ttnn.bfloat16)


@pytest.mark.parametrize("dtype", [np.float32, ttnn.int32, ttnn.bfloat4_b, None], ids=str)
def test_init_cache_refuses_dtype(device, dtype):
    with pytest.raises(TypeError, match=r"dtype must be ttnn\.bfloat16, ttnn\.bfloat8_b or ttnn\.float32"):
        mha_tt.init_cache(**SIZES, dtype=dtype, device=device)


@pytest.mark.parametrize("dtype", [np.float32, ttnn.int32], ids=str)
def test_kv_cache_nbytes_refuses_dtype(dtype):
    with pytest.raises(TypeError, match=r"dtype must be ttnn\.bfloat16, ttnn\.bfloat8_b or ttnn\.float32"):
        mha_tt.kv_cache_nbytes(**NBYTES, dtype=dtype)


@pytest.mark.parametrize(("size", "args"), [("batch_size", (-1, 4)), ("capacity", (2, 0))])
def test_module_refuses_cache_of_size(device, size, args):
    layer = mha_tt.MultiHeadAttentionWithCache(SPEC, device=device)
    with pytest.raises(ValueError, match=f"{size} must be at least [01]"):
        layer.init_cache(*args)


CHANGES = {
    "reorder beyond": ("reorder", ([0, 2],), ValueError, r"indices must lie in 0..1, got indices=\[0, 2\]"),
    "reorder negative": ("reorder", ([-1],), ValueError, "indices must lie in 0..1"),
    "reorder floats": ("reorder", ([0.0],), TypeError, "indices must be integers"),
    "reorder a number": ("reorder", (0,), ValueError, "indices must have shape"),
    "repeat 0": ("repeat", (0,), ValueError, "repeats must be at least 1, got repeats=0"),
    "repeat float": ("repeat", (2.0,), TypeError, "repeats must be an integer"),
    "grow less": ("grow", (3,), ValueError, "capacity must be at least 4, got capacity=3"),
    "grow float": ("grow", (5.0,), TypeError, "capacity must be an integer"),
    "crop to more": ("crop", (1,), ValueError, r"lengths must not exceed those of the cache, got lengths=\[1, 1\]"),
    "crop beyond": ("crop", ([5, 0],), ValueError, "lengths must lie in 0..4"),
    "crop negative": ("crop", ([-1, 0],), ValueError, "lengths must lie in 0..4"),
    "crop too few": ("crop", ([0],), ValueError, "lengths must have shape"),
    "crop floats": ("crop", ([0.0, 0.0],), TypeError, "lengths must be integers"),
    "crop a boolean": ("crop", (True,), TypeError, "lengths must be integers"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changed_cache_refuses(device, name):
    method, args, error, message = CHANGES[name]
    held = mha_tt.init_cache(2, 2, 4, 4, device=device)
    with pytest.raises(error, match=message):
        getattr(held, method)(*args)


TOKENS = ones(2, 2, 3, 32)
APPENDS = {
    "no cache": ({"cache": None}, TypeError, "cache must be a KVCache, got NoneType"),
    "tuple": ({"cache": (1, 2)}, TypeError, "cache must be a KVCache, got tuple"),
    "heads": ({"key": ones(2, 1, 3, 32), "value": ones(2, 1, 3, 32)}, ValueError, "must have shape"),
    "batch": ({"key": ones(1, 2, 3, 32), "value": ones(1, 2, 3, 32)}, ValueError, "must have shape"),
    "head_dim": ({"key": ones(2, 2, 3, 4), "value": ones(2, 2, 3, 4)}, ValueError, "must have shape"),
    "float32": ({"key": wide(2, 2, 3, 32), "value": wide(2, 2, 3, 32)}, TypeError, "float32 if the new keys are"),
    "value shape": ({"value": ones(2, 2, 2, 32)}, ValueError, "value must have the shape of key"),
    "value dtype": ({"value": wide(2, 2, 3, 32)}, TypeError, "value must have the dtype of key"),
    "too many tokens": (
        {"key": ones(2, 2, 5, 32), "value": ones(2, 2, 5, 32)},
        ValueError,
        r"must not exceed the 4 slots of the cache, got lengths=\[0, 0\]",
    ),
    "new_lengths too long": ({"new_lengths": [3, 4]}, ValueError, r"new_lengths must lie in 0..3, got .*\[3, 4\]"),
    "new_lengths negative": ({"new_lengths": [-1, 1]}, ValueError, "new_lengths must lie in 0..3"),
    "new_lengths too few": ({"new_lengths": [3]}, ValueError, "new_lengths must have shape"),
    "new_lengths 2 axes": ({"new_lengths": [[1, 2]]}, ValueError, "new_lengths must have shape"),
    "new_lengths floats": ({"new_lengths": [1.0, 2.0]}, TypeError, "new_lengths must be integers"),
    "new_lengths booleans": ({"new_lengths": [True, False]}, TypeError, "new_lengths must be integers"),
}


@pytest.mark.parametrize("name", APPENDS)
def test_append_to_cache_refuses(device, name):
    keywords, error, message = APPENDS[name]
    keywords = {"cache": cache(2, 2, 4, 4), "key": TOKENS, "value": TOKENS, **keywords}
    refused(device, "append_to_cache", keywords, error, message)


CACHED = {
    "width": ({"x": ones(2, 3, 6)}, ValueError, "the input of q_proj must have 8 features"),
    "batch": ({"x": ones(3, 3, 8)}, ValueError, "x must have the batch size of the cache"),
    "too many tokens": ({"x": ones(2, 5, 8)}, ValueError, "must not exceed the 4 slots of the cache"),
    "no cache": ({"cache": None}, TypeError, "cache must be a KVCache"),
    "cache heads": ({"cache": cache(2, 1, 4, 4)}, ValueError, "must have shape"),
    "cache head_dim": ({"cache": cache(2, 2, 4, 40)}, ValueError, "must have shape"),
    "cache dtype": ({"cache": cache(2, 2, 4, 4, dtype=ttnn.float32)}, TypeError, "must be float32 if the cache is"),
    "new_lengths too long": ({"new_lengths": [4, 1]}, ValueError, "new_lengths must lie in 0..3"),
    "new_lengths negative": ({"new_lengths": [-1, 1]}, ValueError, "new_lengths must lie in 0..3"),
    "new_lengths too few": ({"new_lengths": [1]}, ValueError, "new_lengths must have shape"),
    "new_lengths floats": ({"new_lengths": [1.0, 2.0]}, TypeError, "new_lengths must be integers"),
    "float mask": ({"mask": np.ones((3, 4))}, TypeError, "mask must be boolean"),
    "mask of the tokens only": ({"mask": booleans(3, 3)}, ValueError, "mask must broadcast"),
    "bias of the tokens only": ({"bias": np.ones((3, 3))}, ValueError, "bias must broadcast"),
    "positions without RoPE": ({"positions": lengths(0, 1, 2)[None]}, ValueError, "positions must come with RoPE"),
}
# With one token, which is written in another way: what is 3 above is 1 here.
CACHED_STEPS = {
    "cache heads": CACHED["cache heads"],
    "cache head_dim": CACHED["cache head_dim"],
    "cache dtype": CACHED["cache dtype"],
    "batch": ({"x": ones(3, 1, 8)}, *CACHED["batch"][1:]),
    "mask of too many": ({"mask": booleans(2, 4)}, ValueError, "mask must broadcast"),
    "new_lengths too long": ({"new_lengths": [2, 1]}, ValueError, "new_lengths must lie in 0..1"),
}
CACHED_CALLS = [(name, 3, row) for name, row in CACHED.items()] + [(name, 1, row) for name, row in CACHED_STEPS.items()]
every_cached_call = pytest.mark.parametrize(
    ("seq_len", "row"),
    [(seq_len, row) for _, seq_len, row in CACHED_CALLS],
    ids=[f"{name}-{seq_len}" for name, seq_len, _ in CACHED_CALLS],
)


@every_cached_call
def test_static_cache_function_refuses(device, seq_len, row):
    keywords, error, message = row
    options = {"weights": weights(SPEC), "spec": SPEC}
    keywords = {"x": ones(2, seq_len, 8), "cache": cache(2, 2, 4, 4), **keywords, **options}
    refused(device, "multi_head_attention_with_static_cache", keywords, error, message)


@every_cached_call
def test_cached_module_refuses(device, seq_len, row):
    keywords, error, message = row
    keywords = {"x": ones(2, seq_len, 8), "cache": cache(2, 2, 4, 4), **keywords}
    refused(device, module("MultiHeadAttentionWithCache", SPEC), keywords, error, message)


GROWING = {
    "width": ({"x": ones(2, 3, 6)}, ValueError, "the input of q_proj must have 8 features"),
    "only keys": ({"cache_v": None}, ValueError, "cache_k and cache_v must be given together"),
    "only values": ({"cache_k": None}, ValueError, "cache_k and cache_v must be given together"),
    "cache_k batch": ({"cache_k": ones(1, 2, 5, 32)}, ValueError, "cache_k must have shape"),
    "cache_k heads": ({"cache_k": ones(2, 1, 5, 32)}, ValueError, "cache_k must have shape"),
    "cache_k dtype": ({"cache_k": wide(2, 2, 5, 32)}, TypeError, "cache_k must be float32 if the new keys are"),
    "cache_v length": ({"cache_v": ones(2, 2, 4, 32)}, ValueError, "cache_v must have shape"),
    "cache_v head_dim": ({"cache_v": ones(2, 2, 5, 64)}, ValueError, "cache_v must have shape"),
    "cache_v dtype": ({"cache_v": wide(2, 2, 5, 32)}, TypeError, "cache_v must be float32 if the new keys are"),
    "mask of the tokens only": ({"mask": booleans(3, 3)}, ValueError, "mask must broadcast"),
    "bias of the tokens only": ({"bias": np.ones((3, 3))}, ValueError, "bias must broadcast"),
    "positions without RoPE": ({"positions": lengths(0, 1, 2)[None]}, ValueError, "positions must come with RoPE"),
}


@pytest.mark.parametrize("name", GROWING)
def test_growing_cache_function_refuses(device, name):
    keywords, error, message = GROWING[name]
    cached = {"cache_k": ones(2, 2, 5, 32), "cache_v": ones(2, 2, 5, 32)}
    options = {"weights": weights(SPEC), "spec": SPEC}
    refused(
        device, "multi_head_attention_with_cache", {"x": ones(2, 3, 8), **cached, **keywords, **options}, error, message
    )


# ---- Latents ---------------------------------------------------------------------------------------------------------

LATENTS = {
    "keys and values": ({"cache": cache(2, 2, 4, 4)}, TypeError, "cache must be a LatentCache, got KVCache"),
    "no cache": ({"cache": None}, TypeError, "cache must be a LatentCache, got NoneType"),
    "kv_rank": (
        {"cache": latent_cache(2, 4, 33, 2)},
        ValueError,
        r"cache\.latents must have shape \(2, 1, 32, 96\), got cache\.latents\.shape=\(2, 1, 32, 128\)",
    ),
    "batch": ({"x": ones(3, 3, 8)}, ValueError, "x must have the batch size of the cache"),
    "too many tokens": ({"x": ones(2, 5, 8)}, ValueError, "must not exceed the 4 slots of the cache"),
    "dtype": ({"cache": latent_cache(2, 4, 5, 2, dtype=ttnn.float32)}, TypeError, "must be float32 if the cache is"),
    "mask of the tokens only": ({"mask": booleans(3, 3)}, ValueError, "mask must broadcast"),
    "positions without RoPE": ({"positions": lengths(0, 1, 2)[None]}, ValueError, "positions must come with RoPE"),
}
BESIDE_LATENTS = {
    # name: (function, keywords, error, words of the refusal)
    "spec without latents": (
        "multi_head_latent_attention",
        {"x": ones(2, 3, 8), "cache": latent_cache(2, 4, 5, 2), "weights": weights(SPEC), "spec": SPEC},
        ValueError,
        "spec must have latents",
    ),
    "latents for keys and values": (
        module("MultiHeadAttentionWithCache", SPEC),
        {"x": ones(2, 3, 8), "cache": latent_cache(2, 4, 5, 2)},
        TypeError,
        "cache must be a KVCache, got LatentCache",
    ),
    "a key": (
        module("MultiHeadAttention", LATENT_SPEC),
        {"query": ones(2, 3, 8), "key": ones(2, 4, 8)},
        ValueError,
        "key must be None .* with latents",
    ),
    "appended width": (
        "append_to_latent_cache",
        {"cache": latent_cache(2, 4, 5, 2), "latents": ones(2, 1, 3, 64)},
        ValueError,
        r"cache\.latents must have shape .* got cache\.latents\.shape=\(2, 1, 32, 96\)",
    ),
    "expanded width": (
        "expand_latents",
        {"project": None, "latents": ones(2, 1, 3, 64), "spec": LATENT_SPEC},
        ValueError,
        r"latents must have shape \(B, 1, S, 96\), got latents\.shape=\(2, 1, 3, 64\)",
    ),
    "absorbed weight": (
        "absorb_keys",
        {"q": ones(2, 2, 3, 96), "kv_b": ones(32, 96), "spec": LATENT_SPEC},
        ValueError,
        r"kv_b must have shape \(32, 128\), got kv_b\.shape=\(32, 96\)",
    ),
    "absorbed heads": (
        "absorb_values",
        {"context": ones(2, 3, 3, 32), "kv_b": ones(32, 128), "spec": LATENT_SPEC},
        ValueError,
        r"context must have shape \(B, 2, T, 32\), got context\.shape=\(2, 3, 3, 32\)",
    ),
    **{
        f"{name} of 0": (
            lambda device: partial(mha_tt.init_latent_cache, device=device),
            {"batch_size": 2, "capacity": 4, "kv_rank": 5, "rope_dim": 2, name: 0},
            ValueError,
            f"{name} must be at least 1, got {name}=0",
        )
        for name in ("capacity", "kv_rank", "rope_dim")
    },
}


@pytest.mark.parametrize("name", LATENTS)
@pytest.mark.parametrize("is_module", [False, True], ids=["function", "module"])
def test_latent_attention_refuses(device, is_module, name):
    keywords, error, message = LATENTS[name]
    function = module("MultiHeadLatentAttention", LATENT_SPEC) if is_module else "multi_head_latent_attention"
    options = {} if is_module else {"weights": weights(LATENT_SPEC), "spec": LATENT_SPEC}
    keywords = {"x": ones(2, 3, 8), "cache": latent_cache(2, 4, 5, 2), **keywords, **options}
    refused(device, function, keywords, error, message)


@pytest.mark.parametrize("name", BESIDE_LATENTS)
def test_what_does_not_fit_latents_is_refused(device, name):
    function, keywords, error, message = BESIDE_LATENTS[name]
    refused(device, function, keywords, error, message)


# ---- Before any work -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["too many tokens", "no cache", "new_lengths too long", "batch"])
def test_refused_call_does_not_touch_the_device(device, calls, name):
    keywords, error, message = CACHED[name]
    layer = mha_tt.MultiHeadAttentionWithCache(SPEC, device=device)
    keywords = made({"x": ones(2, 3, 8), "cache": cache(2, 2, 4, 4), **keywords}, device)
    calls.clear()
    with pytest.raises(error, match=message):
        layer(**keywords)
    assert calls == []


@pytest.mark.parametrize("name", ["too many tokens", "no cache", "kv_rank", "batch"])
def test_refused_call_over_latents_does_not_touch_the_device(device, calls, name):
    keywords, error, message = LATENTS[name]
    layer = mha_tt.MultiHeadLatentAttention(LATENT_SPEC, device=device)
    keywords = made({"x": ones(2, 3, 8), "cache": latent_cache(2, 4, 5, 2), **keywords}, device)
    calls.clear()
    with pytest.raises(error, match=message):
        layer(**keywords)
    assert calls == []

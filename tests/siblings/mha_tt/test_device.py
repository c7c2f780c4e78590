"""The device: the target that is found, its arithmetic, and the arrays and weights uploaded to
it.
"""

import re
from dataclasses import replace
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
import ttnn
from helpers.input_errors import rejects, rejects_type
from helpers.samples import sample
from helpers.tt.formulas import both_dtypes, every_dtype, module_of, rounded, rounded_weights

import mha_tt
import parity
from mha_spec import RelativeBias
from mha_tt import device as devices
from mha_tt import plain as plain_layer
from mha_tt.device import with_bfloat16_sums
from mha_tt.kernels.fused import may_zero_rows
from mha_tt.layout import round_up
from parity.port.conversion.layouts.canonical import from_canonical, to_canonical
from parity.port.conversion.layouts.tables import LAYOUTS

# ---- Target --------------------------------------------------------------------------------------

MOCK, SIMULATOR = "TT_METAL_MOCK_CLUSTER_DESC_PATH", "TT_METAL_SIMULATOR"
CARDS = ["/dev/tenstorrent/0", "/dev/tenstorrent/1"]
TARGETS = {
    # name: (environment, cards, target, words in its description)
    "nothing": ({}, [], None, ["/dev/tenstorrent", SIMULATOR, "mock"]),
    "mock": ({MOCK: "/a/p150.yaml"}, [], "mock", ["mock p150", "computes nothing"]),
    "simulator": (
        {SIMULATOR: "/sim/libttsim_wh.so"},
        [],
        "simulator",
        ["simulator", "/sim/libttsim_wh.so"],
    ),
    "card": ({}, CARDS, "silicon", ["silicon", *CARDS]),
    "mock before simulator": ({MOCK: "/a/n150.yaml", SIMULATOR: "/sim"}, [], "mock", ["mock n150"]),
    "mock before card": ({MOCK: "/a/n150.yaml"}, CARDS, "mock", ["mock n150"]),
    "simulator before card": ({SIMULATOR: "/sim"}, CARDS, "simulator", ["simulator"]),
    "empty words": ({MOCK: "", SIMULATOR: ""}, [], None, ["nothing"]),
}


@pytest.fixture
def surroundings(monkeypatch):
    """Return a function that replaces the real environment variables and cards by the given
    ones.
    """

    def put(environment, cards):
        for name in (MOCK, SIMULATOR):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(devices, "_cards", lambda: cards)

    return put


@pytest.mark.parametrize("name", TARGETS)
def test_target_from_environment_and_cards(surroundings, name):
    """target() names what ttnn would open: a mock board before a simulator before a card, or
    None.
    """
    environment, cards, expected, _ = TARGETS[name]
    surroundings(environment, cards)
    assert mha_tt.target() == expected


@pytest.mark.parametrize("name", TARGETS)
def test_target_description_names_its_source(surroundings, name):
    """describe_target() names the board, simulator or cards found, or the three locations it
    searched.
    """
    environment, cards, _, words = TARGETS[name]
    surroundings(environment, cards)
    described = mha_tt.describe_target()
    assert [word for word in words if word not in described] == []


def test_target_with_open_device_is_known(opened_device):
    """While a device is open, target() is "mock", "simulator" or "silicon"."""
    assert mha_tt.target() in ("mock", "simulator", "silicon")


OPEN = """
    import sys

    sys.modules["torch"] = None  # its import takes more time than everything else here
    import mha_tt, ttnn_mock

    {before}
    try:
        with mha_tt.open_device({number}):
            pass
    except RuntimeError as error:
        print(error)
"""


@pytest.mark.costly("a process has one board for good")
def test_missing_device_raises_with_options(only_mock, run_python):
    """Without a device, open_device raises an error that names all three locations it searched."""
    result = run_python(OPEN.format(before="", number=""))
    assert rejects("a device").is_printed_in(result.stdout)
    assert [
        word
        for word in ("/dev/tenstorrent", SIMULATOR, "ttnn_mock.board()")
        if word not in result.stdout
    ] == []


@pytest.mark.costly("a process has one board for good")
def test_unusable_board_raises_one_line(only_mock, run_python, tmp_path):
    """A board description without chips raises one line that names the board, without ttnn's
    backtrace.
    """
    (tmp_path / "empty.yaml").write_text("chips: {}\n")
    result = run_python(OPEN.format(before="", number=""), **{MOCK: str(tmp_path / "empty.yaml")})
    assert rejects("device 0").is_printed_in(result.stdout)
    assert "mock empty" in result.stdout
    assert len(result.stdout.splitlines()) == 1  # ttnn's own message is followed by a backtrace


LACKING = {
    # name: (existing files, words of the error)
    "the simulator": ([], "libttsim_bh.so"),
    "the description of its chip": (["libttsim_bh.so"], "soc_descriptor.yaml"),
    "the compiler": (
        ["libttsim_bh.so", "soc_descriptor.yaml"],
        "/runtime/sfpi",
    ),
}


@pytest.mark.costly("a process has one board for good")
@pytest.mark.parametrize("name", LACKING)
def test_incomplete_simulator_raises(only_mock, run_python, tmp_path, name):
    """A simulator without its library, chip description or compiler raises one line that names the
    missing file and tools/tt-simulator.
    """
    files, words = LACKING[name]
    for file in files:
        (tmp_path / file).touch()
    environment = {
        SIMULATOR: str(tmp_path / "libttsim_bh.so"),
        "TT_METAL_RUNTIME_ROOT": str(tmp_path),
    }
    (message,) = run_python(OPEN.format(before="", number=""), **environment).stdout.splitlines()
    assert re.search(f"{words}.*; tools/tt-simulator sets it up", message)


@pytest.mark.costly("a process has one board for good")
def test_missing_card_error_names_its_number(only_mock, run_python):
    """Opening device 7 of an n150 raises an error that names the device and the board."""
    program = OPEN.format(before="ttnn_mock.use('n150')", number="7")
    printed = run_python(program).stdout
    assert rejects("device 7").is_printed_in(printed)
    assert "mock n150" in printed


# ---- Arithmetic ----------------------------------------------------------------------------------

ACCURATE = {
    "wormhole": (
        ttnn.Arch.WORMHOLE_B0,
        "HiFi3, float32 sums, no approximations",
    ),  # for tt-metal#38306
    "blackhole": (ttnn.Arch.BLACKHOLE, "HiFi4, float32 sums, no approximations"),
}
WHOLE = {
    "accurate": (mha_tt.accurate_config, False),
    "fast": (mha_tt.fast_config, True),
}  # and whether it approximates


@pytest.mark.parametrize("name", ACCURATE)
def test_accurate_config_per_architecture(name):
    """Accurate arithmetic, also of the plain layer, is HiFi3 on Wormhole and HiFi4 on Blackhole,
    with float32 sums and no approximations.
    """
    architecture, words = ACCURATE[name]
    device = SimpleNamespace(arch=lambda: architecture)
    for accurate_config in (mha_tt.accurate_config, plain_layer.accurate_config):
        assert mha_tt.describe_config(accurate_config(device)) == words


@pytest.mark.parametrize("name", ACCURATE)
def test_fast_config_trades_accuracy(name):
    """Fast arithmetic is HiFi2 with bfloat16 sums and approximations on both architectures."""
    config = mha_tt.fast_config(SimpleNamespace(arch=lambda: ACCURATE[name][0]))
    assert mha_tt.describe_config(config) == "HiFi2, bfloat16 sums, approximations"


@pytest.mark.board
@pytest.mark.parametrize("name", WHOLE)
def test_module_repr_shows_its_arithmetic(device, name):
    """The repr of a module describes the compute_kernel_config that it was created with."""
    config = WHOLE[name][0](device)
    module = mha_tt.MultiHeadAttention(
        parity.AttentionSpec(8, 2), device=device, compute_kernel_config=config
    )
    assert f"compute_kernel_config=({mha_tt.describe_config(config)})" in repr(module)


@pytest.mark.board
def test_module_is_accurate_by_default(device):
    """Without compute_kernel_config, a module has the accurate one."""
    module = mha_tt.MultiHeadAttention(parity.AttentionSpec(8, 2), device=device)
    assert mha_tt.describe_config(mha_tt.accurate_config(device)) in repr(module)


def forward(device, dtype, need_weights, config):
    spec = parity.AttentionSpec(32, 4, num_kv_heads=2)
    module = mha_tt.MultiHeadAttention(
        spec, device=device, dtype=dtype, compute_kernel_config=config
    )
    module(
        mha_tt.upload(np.ones((2, 5, 32)), device=device, dtype=dtype), need_weights=need_weights
    )


def decode(device, dtype, config):
    spec = parity.AttentionSpec(32, 4)
    module = mha_tt.MultiHeadAttentionWithCache(
        spec, device=device, dtype=dtype, compute_kernel_config=config
    )
    cache = module.init_cache(2, 40)
    for seq_len in (5, 3, 1):
        x = mha_tt.upload(np.ones((2, seq_len, 32)), device=device, dtype=dtype)
        _, cache = module(x, cache)


BARE = parity.AttentionSpec(32, 4, qkv_bias=False, out_proj=False)


def forward_by_function(device, dtype, need_weights, config):
    weights = {
        name: np.ones((32, 32)) for name in ("q_proj.weight", "k_proj.weight", "v_proj.weight")
    }
    weights = mha_tt.upload_weights(weights, BARE, device=device, dtype=dtype)
    x = mha_tt.upload(np.ones((2, 5, 32)), device=device, dtype=dtype)
    mha_tt.multi_head_attention(
        x, weights, BARE, need_weights=need_weights, compute_kernel_config=config
    )


def decode_by_function(device, dtype, config):
    weights = {
        name: np.ones((32, 32)) for name in ("q_proj.weight", "k_proj.weight", "v_proj.weight")
    }
    weights = mha_tt.upload_weights(weights, BARE, device=device, dtype=dtype)
    cache = mha_tt.init_cache(2, 4, 40, 32, dtype=dtype, device=device)
    for seq_len in (5, 3, 1):
        x = mha_tt.upload(np.ones((2, seq_len, 32)), device=device, dtype=dtype)
        options = {"compute_kernel_config": config}
        _, cache = mha_tt.multi_head_attention_with_cache(x, weights, BARE, cache, **options)


ATTENTION = "ttnn.transformer.scaled_dot_product_attention"
PLAIN, FUSED = {"ttnn.matmul", "ttnn.softmax"}, {ATTENTION}
RUNS = {
    # name: (function to run, its attention operations)
    "float32": (lambda device, config: forward(device, ttnn.float32, False, config), PLAIN),
    "plain": (lambda device, config: forward(device, ttnn.bfloat16, True, config), PLAIN),
    "fused": (lambda device, config: forward(device, ttnn.bfloat16, False, config), FUSED),
    "bfloat8_b": (lambda device, config: forward(device, ttnn.bfloat8_b, False, config), FUSED),
    "decode-float32": (lambda device, config: decode(device, ttnn.float32, config), PLAIN),
    "decode": (
        lambda device, config: decode(device, ttnn.bfloat16, config),
        FUSED | {f"{ATTENTION}_decode"},
    ),
    "function-plain": (
        lambda device, config: forward_by_function(device, ttnn.bfloat16, True, config),
        PLAIN,
    ),
    "function-fused": (
        lambda device, config: forward_by_function(device, ttnn.bfloat16, False, config),
        FUSED,
    ),
    "function-decode-float32": (
        lambda device, config: decode_by_function(device, ttnn.float32, config),
        PLAIN,
    ),
    "function-decode": (
        lambda device, config: decode_by_function(device, ttnn.bfloat16, config),
        FUSED | {f"{ATTENTION}_decode"},
    ),
}
COMPUTING = {"ttnn.linear", f"{ATTENTION}_decode", *PLAIN, *FUSED}


def looks_for_lost_rows(call, config):
    """Return whether a call is the second run of the prompt kernel, which loses no row as the first
    may.
    """
    without = settings(with_bfloat16_sums(config, call.arguments[0].device()))
    is_kernel = may_zero_rows(config) and call.name == ATTENTION
    return is_kernel and settings(call.keywords["compute_kernel_config"]) == without


def settings(config):
    return mha_tt.describe_config(config), config.packer_l1_acc


@sample(12)
@pytest.mark.board
@pytest.mark.parametrize("arithmetic", ["default", *WHOLE])
@pytest.mark.parametrize("name", RUNS)
def test_summing_operations_use_given_config(device, calls, name, arithmetic):
    """Products, softmax and attention kernels use the requested arithmetic, by default the accurate
    one. The exception is the second run of a kernel that may lose rows.
    """
    run, attending = RUNS[name]
    config = None if arithmetic == "default" else WHOLE[arithmetic][0](device)
    run(device, config)
    computing = [call for call in calls if call.name in COMPUTING]
    assert {call.name for call in computing} == attending | {"ttnn.linear"}
    config = config or mha_tt.accurate_config(device)
    with_config = [call for call in computing if not looks_for_lost_rows(call, config)]
    assert {settings(call.keywords["compute_kernel_config"]) for call in with_config} == {
        settings(config)
    }
    assert len(computing) - len(with_config) == may_zero_rows(config) * sum(
        call.name == ATTENTION for call in with_config
    )


@pytest.mark.board
@pytest.mark.parametrize("arithmetic", WHOLE)
@pytest.mark.parametrize("name", ["fused", "decode"])
def test_only_fast_config_approximates_exp(device, calls, name, arithmetic):
    """Attention kernels approximate exponentials with the fast arithmetic and not with the accurate
    one.
    """
    make_config, approximate = WHOLE[arithmetic]
    RUNS[name][0](device, make_config(device))
    programs = [
        call.keywords["program_config"] for call in calls if call.name.startswith(ATTENTION)
    ]
    assert {program.exp_approx_mode for program in programs} == {approximate}


@pytest.mark.board
@pytest.mark.parametrize("name", ["float32", "plain"])
def test_softmax_subtracts_largest_score(device, calls, name):
    """Every softmax of the plain path runs with numeric_stable=True."""
    RUNS[name][0](device, None)
    assert {call.keywords["numeric_stable"] for call in calls if call.name == "ttnn.softmax"} == {
        True
    }


# ---- Arrays --------------------------------------------------------------------------------------

SHAPES = [(1,), (5,), (33,), (3, 5), (32, 32), (33, 65), (2, 3, 5), (1, 1, 1, 1), (2, 3, 40, 12)]
ARRAYS = {
    "float64": lambda x: x.astype(np.float64),
    "float16": lambda x: x.astype(np.float16),
    "bfloat16": lambda x: x.astype(ml_dtypes.bfloat16),
    "transposed": lambda x: np.ascontiguousarray(x.T).T,
    "strided": lambda x: np.repeat(x, 2, axis=1)[:, ::2],
    "backwards": lambda x: x[::-1].copy()[::-1],
    "repeated": lambda x: np.broadcast_to(x[:1], x.shape),
    "other bytes": lambda x: x.astype(">f4"),
}


def read_only(x):
    x.setflags(write=False)
    return x


ARRAYS["read-only"] = read_only


@sample(12)
@both_dtypes
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_upload_and_download_keep_every_bit(device, rng, shape, dtype):
    """Values that the dtype represents survive upload and download bit for bit, for every shape."""
    x = rounded(rng.standard_normal(shape), dtype)
    np.testing.assert_array_equal(
        mha_tt.download(mha_tt.upload(x, device=device, dtype=dtype)), x, strict=True
    )


@sample(12)
@every_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tiles_hold_array_and_pad_value(device, host_tensors, rng, shape, dtype):
    """Tiles hold the array, and pad_value everywhere beyond its shape."""
    x = rounded(rng.integers(-100, 100, shape), dtype)
    mha_tt.upload(x, device=device, dtype=dtype, pad_value=64.0)
    (tensor,) = host_tensors
    tiles = tensor.to_torch_with_padded_shape().float().numpy()
    expected = np.full(tiles.shape, 64.0, np.float32)
    expected[(0,) * (tiles.ndim - x.ndim) + tuple(slice(size) for size in shape)] = (
        x  # one axis lies in the first row
    )
    assert (tuple(tensor.shape), tiles.shape[-1] % 32) == (shape, 0)
    np.testing.assert_array_equal(tiles, expected)


def test_default_pad_value_is_zero(device, host_tensors):
    """Without pad_value, the rest of a tile is 0."""
    mha_tt.upload(np.ones((3, 5)), device=device)
    (tensor,) = host_tensors
    assert tensor.to_torch_with_padded_shape().sum() == 15.0


@pytest.mark.parametrize("kind", ARRAYS)
def test_upload_accepts_any_array_kind(device, rng, kind):
    """Upload accepts any float dtype, byte order, strides and axis order, and read-only arrays."""
    x = ARRAYS[kind](rounded(rng.standard_normal((6, 10)), ttnn.bfloat16))
    downloaded = mha_tt.download(mha_tt.upload(x, device=device, dtype=ttnn.float32))
    np.testing.assert_array_equal(downloaded, x.astype(np.float32))


def test_upload_converts_booleans_to_ones(device):
    """Upload converts True to 1.0 and False to 0.0."""
    downloaded = mha_tt.download(mha_tt.upload(np.array([True, False, True]), device=device))
    assert downloaded.tolist() == [1.0, 0.0, 1.0]


def test_upload_rounds_to_the_nearest_even(device, rng):
    """Upload to bfloat16 rounds to nearest, ties to even, as ml_dtypes does."""
    x = np.concatenate([rng.standard_normal(1000), 1 + np.arange(16) / 2**8]).astype(np.float32)
    downloaded = mha_tt.download(mha_tt.upload(x, device=device, dtype=ttnn.bfloat16))
    np.testing.assert_array_equal(downloaded, x.astype(ml_dtypes.bfloat16).astype(np.float32))


def test_bfloat8_b_error_is_bounded_by_block(device, rng):
    """bfloat8_b is off by at most 2^-7 of the largest of 16 neighboring values in a row."""
    x = rng.standard_normal((5, 40)).astype(np.float32)
    downloaded = mha_tt.download(mha_tt.upload(x, device=device, dtype=ttnn.bfloat8_b))
    largest = (
        np.abs(np.pad(x, ((0, 0), (0, 8))).reshape(5, 3, 16)).max(axis=2).repeat(16, axis=1)[:, :40]
    )
    assert (np.abs(downloaded - x) <= 2.0**-7 * largest).all()


def test_upload_copies_the_array(device):
    """Changing an array after its upload does not change the tensor."""
    x = np.ones((3, 5), np.float32)
    tensor = mha_tt.upload(x, device=device, dtype=ttnn.float32)
    x[:] = 2.0
    assert mha_tt.download(tensor).max() == 1.0


def test_download_returns_a_copy(device):
    """Changing a downloaded array does not change the tensor."""
    tensor = mha_tt.upload(np.ones((3, 5)), device=device, dtype=ttnn.float32)
    mha_tt.download(tensor)[:] = 2.0
    assert mha_tt.download(tensor).max() == 1.0


@every_dtype
def test_download_returns_float32(device, dtype):
    """Download returns float32 for tensors of every dtype."""
    assert (
        mha_tt.download(mha_tt.upload(np.ones((3, 5)), device=device, dtype=dtype)).dtype
        == np.float32
    )


def test_download_without_values_raises(only_mock, opened_device):
    """On a mock board without a shadow, download raises an error that mentions shadow()."""
    tensor = mha_tt.upload(np.ones((3, 5)), device=opened_device)
    with pytest.raises(RuntimeError, match=r"a mock one; .*shadow\(\)"):
        mha_tt.download(tensor)


def test_integer_layouts_of_rows_and_indices(device):
    """upload_integers makes an int32 tensor in rows, or with is_index a uint32 tensor in tiles."""
    tensor = devices.upload_integers([3, -1], device=device)
    assert (tensor.dtype, tensor.layout, tuple(tensor.shape)) == (
        ttnn.int32,
        ttnn.ROW_MAJOR_LAYOUT,
        (2,),
    )
    tensor = devices.upload_integers([[3, 1]], device=device, is_index=True)
    assert (tensor.dtype, tensor.layout, tuple(tensor.shape)) == (
        ttnn.uint32,
        ttnn.TILE_LAYOUT,
        (1, 2),
    )


# ---- Weights -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "expected"), [(0, 0), (1, 32), (32, 32), (33, 64), (64, 64)])
def test_round_up_returns_whole_tiles(count, expected):
    """round_up returns the next multiple of 32."""
    assert round_up(count) == expected


@pytest.mark.parametrize(
    ("head_dim", "plain", "rope"),
    [
        (1, 32, 64),
        (2, 32, 64),
        (32, 32, 64),
        (48, 64, 64),
        (64, 64, 64),
        (66, 96, 128),
        (80, 96, 128),
        (128, 128, 128),
    ],
)
def test_padded_head_dim_is_whole_tiles(head_dim, plain, rope):
    """padded_head_dim is a multiple of 32, and of 64 with RoPE: each half fills whole tiles."""
    assert (mha_tt.padded_head_dim(head_dim), mha_tt.padded_head_dim(head_dim, rope=True)) == (
        plain,
        rope,
    )


@pytest.mark.parametrize(
    ("head_dim", "rope", "expected"),
    [
        (3, None, [0, 1, 2]),
        (2, parity.Rope(), [0, 32]),
        (4, parity.Rope(), [0, 1, 32, 33]),
        (64, parity.Rope(), list(range(64))),
        (4, parity.Rope(pairs="interleaved"), [0, 32, 1, 33]),
        (6, parity.Rope(rotary_dim=4), [0, 1, 32, 33, 2, 34]),
        (6, parity.Rope(rotary_dim=4, rotated="last"), [2, 34, 0, 1, 32, 33]),
        (5, parity.Rope(rotary_dim=2, pairs="interleaved"), [0, 32, 1, 2, 33]),
    ],
)
def test_feature_indices_of_each_rope(head_dim, rope, expected):
    """feature_indices lists the index of each feature: half-split, interleaved or partly rotated
    heads.
    """
    assert mha_tt.feature_indices(head_dim, rope=rope).tolist() == expected


def test_feature_indices_reject_true():
    """feature_indices rejects rope=True: it expects the Rope itself."""
    with rejects_type("rope", rope=True):
        mha_tt.feature_indices(16, rope=True)


def test_feature_indices_reject_odd_width():
    """feature_indices rejects RoPE with an odd head_dim, which has no halves."""
    with rejects("head_dim", head_dim=3):
        mha_tt.feature_indices(3, rope=parity.Rope())


SPECS = {
    f"{num_heads}x{num_kv_heads}x{head_dim}": parity.AttentionSpec(
        10, num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, d_in=7
    )
    for num_heads, num_kv_heads, head_dim in [
        (4, 4, 2),
        (4, 2, 12),
        (2, 1, 16),
        (6, 2, 48),
        (2, 2, 64),
    ]
}
every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
with_and_without_rope = pytest.mark.parametrize(
    "rope", [None, parity.Rope()], ids=["no-rope", "rope"]
)


@sample(12)
@both_dtypes
@pytest.mark.parametrize("fused_qkv", [False, True], ids=["three", "packed"])
@with_and_without_rope
@every_spec
def test_weights_come_back_bit_for_bit(device, spec, rope, fused_qkv, dtype):
    """Uploaded weights, separate or packed, with or without RoPE, are downloaded bit for bit."""
    spec = replace(spec, rope=rope, fused_qkv=fused_qkv)
    weights = rounded_weights(spec, dtype)
    uploaded = mha_tt.upload_weights(weights, spec, device=device, dtype=dtype)
    assert ("qkv_proj.weight" in uploaded) == fused_qkv
    downloaded = mha_tt.download_weights(uploaded, spec)
    assert downloaded.keys() == weights.keys()
    assert [name for name in weights if not np.array_equal(downloaded[name], weights[name])] == []


def test_sinks_and_relative_bias_round_trip(device):
    """With a bfloat8_b layer, the relative bias is held in bfloat16; it and sinks are downloaded
    bit for bit.
    """
    spec = replace(SPECS["4x2x12"], sinks=True, relative_bias=RelativeBias(8, 8))
    weights = rounded_weights(spec, ttnn.bfloat16)
    uploaded = mha_tt.upload_weights(weights, spec, device=device, dtype=ttnn.bfloat8_b)
    assert (uploaded["relative_bias"].dtype, tuple(uploaded["relative_bias"].shape)) == (
        ttnn.bfloat16,
        (1, 4, 1, 8),
    )
    downloaded = mha_tt.download_weights(uploaded, spec)
    assert all(
        np.array_equal(downloaded[name], weights[name]) for name in ("sinks", "relative_bias")
    )


def padded(weights, heads, head_dim, indices, width):
    """(heads * H, …) with zeros between the features of each head, written one feature at a
    time.
    """
    rows = np.zeros((heads * width, *weights.shape[1:]), np.float32)
    for head in range(heads):
        for feature, index in enumerate(indices):
            rows[head * width + index] = weights[head * head_dim + feature]
    return rows


@with_and_without_rope
@every_spec
def test_heads_are_padded_with_zeros(device, spec, rope):
    """Each feature of a head lies at its index of feature_indices; all other features are 0."""
    weights = parity.random_weights(spec)
    uploaded = mha_tt.upload_weights(
        weights, replace(spec, rope=rope), device=device, dtype=ttnn.float32
    )
    heads = {"q_proj": spec.num_heads, "k_proj": spec.num_kv_heads, "v_proj": spec.num_kv_heads}
    layout = (
        spec.head_dim,
        mha_tt.feature_indices(spec.head_dim, rope=rope),
        mha_tt.padded_head_dim(spec.head_dim, rope=rope is not None),
    )
    expected = {"out_proj.bias": weights["out_proj.bias"][None]}
    expected["out_proj.weight"] = padded(weights["out_proj.weight"].T, spec.num_heads, *layout)
    for name, count in heads.items():
        expected[f"{name}.weight"] = padded(weights[f"{name}.weight"], count, *layout).T
        expected[f"{name}.bias"] = padded(weights[f"{name}.bias"], count, *layout)[None]
    assert {name: tuple(tensor.shape) for name, tensor in uploaded.items()} == {
        name: weight.shape for name, weight in expected.items()
    }
    assert [
        name
        for name in expected
        if not np.array_equal(mha_tt.download(uploaded[name]), expected[name])
    ] == []


def test_packed_weights_are_q_then_k_then_v(device):
    """The packed weight is the concatenation of the weights of q, k and v, in this order."""
    spec = SPECS["6x2x48"]
    weights = parity.random_weights(spec)
    apart, together = (
        mha_tt.upload_weights(
            weights, replace(spec, fused_qkv=fused_qkv), device=device, dtype=ttnn.float32
        )
        for fused_qkv in (False, True)
    )
    expected = np.concatenate(
        [mha_tt.download(apart[f"{part}_proj.weight"]) for part in "qkv"], axis=1
    )
    assert np.array_equal(mha_tt.download(together["qkv_proj.weight"]), expected)


def test_biases_of_bfloat8_b_are_bfloat16(device):
    """With bfloat8_b weights, all biases are uploaded in bfloat16."""
    spec = SPECS["2x1x16"]
    uploaded = mha_tt.upload_weights(
        parity.random_weights(spec), spec, device=device, dtype=ttnn.bfloat8_b
    )
    dtypes = {
        kind: {uploaded[f"{part}_proj.{kind}"].dtype for part in ("q", "k", "v", "out")}
        for kind in ("weight", "bias")
    }
    assert dtypes == {"weight": {ttnn.bfloat8_b}, "bias": {ttnn.bfloat16}}


@every_dtype
def test_module_keeps_weight_dtype(device, dtype):
    """A module holds its weights in weight_dtype instead of its own dtype."""
    module = mha_tt.MultiHeadAttention(
        parity.AttentionSpec(8, 2), device=device, dtype=ttnn.bfloat16, weight_dtype=dtype
    )
    assert module.weights["q_proj.weight"].dtype == dtype


@both_dtypes
@every_spec
def test_weights_of_module_match_loaded_ones(device, spec, dtype):
    """parity.weights_of returns the weights that a module was loaded with."""
    weights = rounded_weights(spec, dtype)
    read = parity.weights_of(module_of("MultiHeadAttention", spec, device, dtype, weights))
    assert [
        name for name in weights if not np.array_equal(read[name].astype(np.float32), weights[name])
    ] == []


LAYERS = {
    "heads": parity.AttentionSpec(10, 2, head_dim=32),
    "grouped": parity.AttentionSpec(10, 6, num_kv_heads=2, head_dim=48, d_in=7),
    "odd-head-dim": parity.AttentionSpec(10, 4, num_kv_heads=1, head_dim=5),
    "rope": parity.AttentionSpec(10, 4, num_kv_heads=2, head_dim=12, rope=parity.Rope(500.0)),
    "rope-odd-half": parity.AttentionSpec(10, 2, head_dim=66, rope=parity.Rope(500.0)),
    "no-qkv-bias": parity.AttentionSpec(10, 2, head_dim=8, qkv_bias=False),
    "no-biases": parity.AttentionSpec(
        10, 2, head_dim=8, qkv_bias=False, out_bias=False, rope=parity.Rope(500.0)
    ),
    "no-out-proj": parity.AttentionSpec(10, 2, head_dim=8, out_proj=False),
}


@pytest.mark.parametrize("spec", LAYERS.values(), ids=LAYERS)
def test_ttnn_layout_matches_uploads(device, spec):
    """The layout "ttnn" has the names, shapes and values of tensors that modules and upload_weights
    upload, and reads the same weights from them.
    """
    weights = rounded_weights(spec, ttnn.float32)
    laid_out = from_canonical(weights, spec, LAYOUTS["ttnn"])

    fused = replace(spec, fused_qkv=True)
    module = module_of("MultiHeadAttention", fused, device, ttnn.float32, weights)
    by_function = mha_tt.upload_weights(weights, fused, device=device, dtype=ttnn.float32)

    for uploaded in (module.weights, by_function):
        downloaded = {name: mha_tt.download(tensor) for name, tensor in uploaded.items()}
        assert {name: x.shape for name, x in downloaded.items()} == {
            name: x.shape for name, x in laid_out.items()
        }
        assert [
            name for name in laid_out if not np.array_equal(downloaded[name], laid_out[name])
        ] == []
        sizes = {
            name: getattr(spec, name) for name in ("num_heads", "num_kv_heads", "head_dim", "rope")
        }
        read, _ = to_canonical(downloaded, LAYOUTS["ttnn"], **sizes)
        assert [name for name in weights if not np.array_equal(read[name], weights[name])] == []


def test_upload_does_not_change_weights(device):
    """upload_weights does not modify the arrays that it reads."""
    spec = SPECS["4x2x12"]
    weights = parity.random_weights(spec)
    mha_tt.upload_weights(weights, replace(spec, rope=parity.Rope()), device=device)
    expected = parity.random_weights(spec)
    assert [name for name in weights if not np.array_equal(weights[name], expected[name])] == []

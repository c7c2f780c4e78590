"""Mock boards: the files they leave behind, the values they compute, and the ttnn errors they
detect.
"""

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from unittest.mock import patch

import numpy as np
import pytest
import torch
import ttnn
from helpers.tt.formulas import TOLERANCES, both_dtypes, rounded

import mha_tt
import ttnn_mock
from mha_tt.cache import write_rows
from ttnn_mock.goldens import GOLDENS

pytestmark = pytest.mark.usefixtures("only_mock")

USED = os.environ.get("MHA_TT_MOCK", "p150")

# ---- Boards --------------------------------------------------------------------------------------

BOARDS = {
    # name: (architecture, grid of cores, chips)
    "n150": ("WORMHOLE_B0", (8, 8), 1),
    "n300": ("WORMHOLE_B0", (8, 7), 2),
    "t3000": ("WORMHOLE_B0", (8, 7), 8),
    "p100": ("BLACKHOLE", (11, 10), 1),
    "p150": ("BLACKHOLE", (13, 10), 1),
}
USE = f"""
    import os, sys

    import mha_tt, numpy as np, ttnn, ttnn_mock

    for board in {list(BOARDS)}:
        if not os.fork():  # a process has one board for good, and the imports take longest
            for _ in range(2):
                with ttnn_mock.board(board) as device:
                    grid = device.compute_with_storage_grid_size()
                    print(str(device.arch()).split(".")[1], (grid.x, grid.y), device.get_num_devices())
                    x = mha_tt.upload(np.ones((40, 70)), device=device)
                    print(mha_tt.download(ttnn.matmul(x, x, transpose_b=True)).tolist() == [[70.0] * 40] * 40)
            sys.stdout.flush()
            os._exit(0)  # to free what is imported takes as long as to import it
        os.wait()
"""
DECODE = """
    import sys

    sys.modules["torch"] = None  # its import takes more time than everything else here
    import mha_tt, numpy as np, ttnn_mock
    from mha_spec import AttentionSpec

    with ttnn_mock.board(values=False) as device:
        module = mha_tt.MultiHeadAttentionWithCache(AttentionSpec(32, 4), device=device)
        output, cache = module(mha_tt.upload(np.ones((2, 5, 32)), device=device), module.init_cache(2, 8))
        output, cache = module(mha_tt.upload(np.ones((2, 1, 32)), device=device), cache)
        print(tuple(output.shape), cache.lengths.tolist())
        try:
            mha_tt.download(output)
        except RuntimeError as error:
            print(error)
"""


def files_below(folder):
    """Return the folders and files in a folder, down to two levels."""
    return sorted(
        str(path.relative_to(folder)) for path in [*folder.glob("*"), *folder.glob("*/*")]
    )


def test_all_mock_boards_are_tested():
    """The table of this file lists exactly the boards of ttnn_mock."""
    assert ttnn_mock.BOARDS.keys() == BOARDS.keys()


@pytest.mark.costly("a process has one board for good")
@pytest.mark.thorough
def test_every_board_opens_and_multiplies(run_python, tmp_path):
    """Every board opens twice in one process, reports its architecture, grid and chips, and
    multiplies; only a cache folder remains.
    """
    result = run_python(USE)
    expected = [
        (f"{architecture} {grid} {chips}", "True") for architecture, grid, chips in BOARDS.values()
    ]
    assert result.stdout.splitlines() == [line for board in expected for line in 2 * board], (
        result.stderr
    )
    assert files_below(tmp_path / "home") == [".cache", ".cache/ttnn_mock"]
    assert files_below(tmp_path / "work") == []


def test_unknown_board_name_raises():
    """ttnn_mock.use rejects a name that is not a board's."""
    with pytest.raises(ValueError, match="board='n151'"):
        ttnn_mock.use("n151")


@pytest.mark.board
def test_second_board_in_process_raises(opened_device):
    """A process that has used one board cannot use a second one."""
    other = next(name for name in BOARDS if name != USED)
    with pytest.raises(RuntimeError, match=f"'{other}' after '{USED}'"):
        ttnn_mock.use(other)


def test_cache_folder_with_space_raises(monkeypatch, tmp_path):
    """ttnn_mock.use rejects a cache folder whose path contains a space, and creates no files."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "my cache"))
    with pytest.raises(ValueError, match="the cache folder"):
        ttnn_mock.use(USED)
    assert list(tmp_path.iterdir()) == []


def test_same_board_can_be_used_again(opened_device):
    """Using the current board again changes no environment variable."""
    before = dict(os.environ)
    ttnn_mock.use(USED)
    assert dict(os.environ) == before


# ---- Files left behind ---------------------------------------------------------------------------


@pytest.mark.costly("four processes with one home")
@pytest.mark.thorough
def test_four_processes_can_start_at_once(run_python, tmp_path):
    """Four processes decode at once with an empty cache folder and leave nothing but
    ~/.cache/ttnn_mock.
    """
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(run_python, [DECODE] * 4))
    for result in results:  # without values a layer runs, but cannot be read
        shapes, input_error = result.stdout.splitlines()
        assert shapes == "(2, 1, 32) [6, 6]"
        assert "a mock one" in input_error
    assert files_below(tmp_path / "home") == [
        ".cache",
        ".cache/ttnn_mock",
    ]  # and no .cache/tt-metal-cache
    assert files_below(tmp_path / "work") == []


@pytest.mark.costly("the environment of a process")
def test_files_are_in_xdg_cache_home(run_python, tmp_path):
    """With XDG_CACHE_HOME, all files of a mock board are in its folder ttnn_mock."""
    assert run_python(DECODE, XDG_CACHE_HOME=str(tmp_path / "cache")).returncode == 0
    assert files_below(tmp_path / "home") == []
    assert files_below(tmp_path / "work") == []
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["ttnn_mock"]


@pytest.mark.costly("the compiler is a program")
def test_compiler_version_identifies_mock(opened_device):
    """The compiler reports the version of a mock compiler."""
    # Its version is part of the key of ttnn's cache. With a real version, cards would load the
    # mock's kernels.
    compiler = os.path.join(
        os.environ["TT_METAL_RUNTIME_ROOT"], "runtime/sfpi/compiler/bin/riscv-tt-elf-g++"
    )
    result = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True)
    assert result.stdout == "riscv-tt-elf-g++ (ttnn_mock)\n"


def test_kernel_cache_is_separate_from_cards(opened_device):
    """Mock boards store kernels below their own root, instead of next to the kernels of cards."""
    folder = os.environ["TT_METAL_CACHE"]
    assert folder.startswith(os.environ["TT_METAL_RUNTIME_ROOT"])
    assert folder.endswith("/")  # otherwise ttnn appends its key to the folder's name


# ---- Values --------------------------------------------------------------------------------------


def test_code_of_torch_and_ttnn_gets_values(device):
    """Code that calls only torch and ttnn gets the values of slices, sums, products and softmax."""
    x = torch.randn(2, 40, 70, generator=torch.Generator().manual_seed(0))
    tensor = ttnn.from_torch(x, dtype=ttnn.float32, layout=ttnn.TILE_LAYOUT, device=device)
    y = ttnn.to_torch(ttnn.softmax(tensor[:, 3:] * 2.0 + 1.0, dim=-1))
    assert (y - torch.softmax(x[:, 3:] * 2.0, dim=-1)).abs().max() <= TOLERANCES[ttnn.float32]


@both_dtypes
def test_values_are_rounded_to_tensor_dtype(device, rng, dtype):
    """A value is rounded to the dtype of its tensor after every operation."""
    x = rng.standard_normal((5, 40)).astype(np.float32)
    tripled = ttnn.multiply(mha_tt.upload(x, device=device, dtype=dtype), 3.0)
    assert np.array_equal(mha_tt.download(tripled), rounded(3.0 * rounded(x, dtype), dtype))


def test_values_are_rounded_to_blocks(device, rng):
    """A value cast to bfloat8_b is rounded to blocks with shared exponents."""
    x = rng.standard_normal((5, 40)).astype(np.float32)
    narrow = ttnn.typecast(mha_tt.upload(x, device=device, dtype=ttnn.bfloat16), ttnn.bfloat8_b)
    assert np.array_equal(
        mha_tt.download(narrow), rounded(rounded(x, ttnn.bfloat16), ttnn.bfloat8_b)
    )


@pytest.mark.board
def test_board_itself_computes_nothing(device, opened_device):  # the control of the tests above
    """Without the shadow, the tensor on the mock board contains only zeros."""
    tensor = ttnn.add(mha_tt.upload(np.ones((5, 40)), device=device), 1.0)
    assert ttnn._ttnn.operations.core.to_dtype(tensor.cpu(), ttnn.float32).to_numpy().max() == 0.0


def test_operations_are_recorded_in_order(opened_device):
    """A shadow lists the names of operations in the order of their calls."""
    with ttnn_mock.shadow() as values:
        x = mha_tt.upload(np.ones((2, 3)), device=opened_device)
        ttnn.softmax(x + x, dim=-1)
    assert values.operations == ["ttnn.to_device", "ttnn.add", "ttnn.softmax"]


def test_shadow_looks_up_value_by_tensor(opened_device):
    """Indexing a shadow with a tensor returns the value of the tensor."""
    with ttnn_mock.shadow() as values:
        x = mha_tt.upload(np.array([[1.0, 2.0]]), device=opened_device)
        assert values[ttnn.multiply(x, 2.0)].tolist() == [[2.0, 4.0]]


def test_nested_shadow_is_the_outer_one(opened_device):
    """A shadow inside another one is the same object, and values remain after the inner one
    ends.
    """
    with ttnn_mock.shadow() as outer:
        x = mha_tt.upload(np.array([[1.0, 2.0]]), device=opened_device)
        with ttnn_mock.shadow() as inner:
            y = ttnn.multiply(x, 2.0)
        assert inner is outer
        assert mha_tt.download(y).tolist() == [[2.0, 4.0]]


@pytest.mark.parametrize("dtype", [ttnn.float32, ttnn.bfloat16, ttnn.uint32], ids=str)
def test_moved_host_tensor_has_its_value(opened_device, dtype):
    """A tensor of a NumPy array that `ttnn.to_device` moves has the value of the array."""
    array = np.arange(6, dtype=np.uint32 if dtype == ttnn.uint32 else np.float32).reshape(2, 3)
    with ttnn_mock.shadow():
        x = ttnn.to_device(ttnn.Tensor(array, dtype, None, ttnn.TILE_LAYOUT), opened_device)
        assert ttnn.to_torch(x).tolist() == [[0, 1, 2], [3, 4, 5]]
        assert mha_tt.download(ttnn.typecast(x, ttnn.float32)).tolist() == [[0, 1, 2], [3, 4, 5]]


def test_deallocated_tensor_has_no_value(opened_device):
    """The shadow forgets the value of a tensor that is deallocated."""
    with ttnn_mock.shadow() as values:
        x = mha_tt.upload(np.ones((2, 3)), device=opened_device)
        ttnn.deallocate(x)
        with pytest.raises(KeyError):
            values[x]


def test_tensor_from_before_shadow_raises(opened_device):
    """An operation on a tensor made before the shadow raises KeyError with the tensor's shape."""
    x = mha_tt.upload(np.ones((2, 3)), device=opened_device)
    with ttnn_mock.shadow(), pytest.raises(KeyError, match=r"\(2, 3\)"):
        ttnn.multiply(x, 2.0)


def test_graph_capture_works_under_shadow(device):
    """Under a shadow, ttnn captures graphs twice in a row, and values are still computed."""
    x = mha_tt.upload(np.ones((2, 3)), device=device)
    for _ in range(2):
        ttnn.graph.begin_graph_capture()
        y = ttnn.multiply(x, 2.0)
        graph = ttnn.graph.end_graph_capture()
        assert "ttnn.multiply" in str(graph)
        assert mha_tt.download(ttnn.add(y, x)).tolist() == [[3.0] * 3] * 2
        assert not ttnn.graph.is_graph_capture_active()


@pytest.mark.costly("two processes with one cache")
def test_compiled_kernel_is_reused(run_python):
    """A kernel compiled by one process is not compiled again by the next."""
    program = """
        import resource, sys

        sys.modules["torch"] = None
        import mha_tt, numpy as np, ttnn, ttnn_mock

        with ttnn_mock.board(values=False) as device:
            before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt
            ttnn.exp(mha_tt.upload(np.ones((2, 3)), device=device))
            print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt > before)
    """
    assert [run_python(program).stdout for _ in range(2)] == ["True\n", "False\n"]


def test_shadow_restores_ttnn_on_exit(opened_device):
    """After an interrupted shadow, ttnn's settings and graph functions are restored, and values are
    gone.
    """
    graph = vars(ttnn.graph).copy()
    fast = ttnn.CONFIG.enable_fast_runtime_mode
    with pytest.raises(KeyboardInterrupt), ttnn_mock.shadow():
        raise KeyboardInterrupt
    x = mha_tt.upload(np.ones((2, 3)), device=opened_device)
    ttnn.multiply(x, 2.0)
    assert ttnn.CONFIG.enable_fast_runtime_mode == fast
    assert vars(ttnn.graph) == graph
    with pytest.raises(RuntimeError, match="a mock one"):
        mha_tt.download(x)


# ---- Golden functions ----------------------------------------------------------------------------


@pytest.fixture
def own_goldens():
    """Remove golden functions that a test registers."""
    with patch.dict(GOLDENS):
        yield


def test_operation_without_golden_raises(device):
    """An operation without a golden function raises an error that mentions ttnn_mock.golden."""
    x = mha_tt.upload(np.ones((1, 2, 32, 64)), device=device)
    with pytest.raises(
        NotImplementedError, match=r"rotate_half has no golden function; ttnn_mock\.golden\("
    ):
        ttnn.experimental.rotate_half(x)


def test_golden_function_can_be_registered(device, own_goldens, rng):
    """A registered golden function computes the values of its operation."""

    @ttnn_mock.golden("ttnn.experimental.rotate_half")
    def rotate_half(x):
        first, second = x.chunk(2, dim=-1)
        return torch.cat([-second, first], dim=-1)

    x = rounded(rng.standard_normal((1, 2, 32, 64)), ttnn.bfloat16)
    rotated = ttnn.experimental.rotate_half(mha_tt.upload(x, device=device))
    assert np.array_equal(
        mha_tt.download(rotated), np.concatenate([-x[..., 32:], x[..., :32]], axis=3)
    )


def test_registered_golden_takes_precedence(device, own_goldens):
    """A registered golden function is used instead of ttnn's own."""
    ttnn_mock.golden("ttnn.relu")(lambda x, **_: x + 41.0)
    assert (
        mha_tt.download(ttnn.relu(mha_tt.upload(np.ones((2, 3)), device=device))).tolist()
        == [[42.0] * 3] * 2
    )


def test_golden_of_wrong_shape_raises(device, own_goldens):
    """A golden function whose result has a different shape from the device's tensor raises an
    error.
    """
    ttnn_mock.golden("ttnn.relu")(lambda x, **_: x[:1])
    with pytest.raises(
        AssertionError, match=r"ttnn\.relu gives \(2, 3\), its golden function \(1, 3\)"
    ):
        ttnn.relu(mha_tt.upload(np.ones((2, 3)), device=device))


def test_linear_accepts_bias_of_two(device):
    """ttnn.linear adds a bias of two features to two output features."""
    # ttnn's golden function treats a bias of two elements as a matrix.
    x, weight, bias = (
        mha_tt.upload(np.ones(shape), device=device) for shape in ((3, 4), (4, 2), (1, 2))
    )
    assert mha_tt.download(ttnn.linear(x, weight, bias=bias)).tolist() == [[5.0] * 2] * 3


@pytest.mark.board
@pytest.mark.parametrize("slots", [[3, 0], [3, -1], [-1, -1]], ids=str)
def test_rows_are_written_to_given_slots(device, rng, slots):
    """write_rows writes one row per sequence to its slot, and nothing for slot -1."""
    cache = mha_tt.init_cache(2, 3, 32, 32, device=device)
    keys, values = rounded(rng.standard_normal((2, 1, 2, 3, 32)), ttnn.bfloat16)
    write_rows(cache, [mha_tt.upload(x, device=device) for x in (keys, values)], np.array(slots))
    expected = np.zeros((2, 3, 32, 32), np.float32)
    for sequence, slot in enumerate(slots):
        if slot >= 0:
            expected[sequence, :, slot] = keys[0, sequence]
    assert np.array_equal(mha_tt.download(cache.keys), expected)


@pytest.mark.board
@pytest.mark.parametrize("num_kv_heads", [0, 1])
def test_nlp_create_qkv_heads_splits_heads(device, rng, num_kv_heads):
    """nlp_create_qkv_heads splits heads of whole tiles into queries, keys and values."""
    x = rounded(rng.standard_normal((2, 1, 5, (2 + 2 * num_kv_heads) * 32)), ttnn.bfloat16)
    heads, keys, values = ttnn.experimental.nlp_create_qkv_heads(
        mha_tt.upload(x, device=device),
        num_heads=2,
        num_kv_heads=num_kv_heads,
        transpose_k_heads=False,
    )
    expected = x.reshape(2, 5, -1, 32).swapaxes(1, 2)
    assert np.array_equal(mha_tt.download(heads), expected[:, :2])
    if num_kv_heads:
        assert np.array_equal(mha_tt.download(keys), expected[:, 2:3])
        assert np.array_equal(mha_tt.download(values), expected[:, 3:])


# ---- Traps: calls that ttnn accepts silently and computes wrong
# ------------------------------------------------------

SHOWN = np.zeros((1, 1, 40, 40))


def mask_of_torch(device, **options):
    return ttnn.from_torch(
        torch.from_numpy(SHOWN),
        dtype=ttnn.bfloat16,
        layout=ttnn.TILE_LAYOUT,
        device=device,
        **options,
    )


FILLED_WITH_ZERO = {
    "uploaded": lambda device: mha_tt.upload(SHOWN, device=device),
    "from torch": mask_of_torch,
    "computed": lambda device: ttnn.add(*[mha_tt.upload(SHOWN, device=device, pad_value=-1e9)] * 2),
    "filled": lambda device: ttnn.fill_implicit_tile_padding(mask_of_torch(device), 0.0),
}
FILLED = {
    "uploaded": lambda device: mha_tt.upload(SHOWN, device=device, pad_value=-1e9),
    "from torch": lambda device: mask_of_torch(device, pad_value=-1e9),
    "filled": lambda device: ttnn.fill_implicit_tile_padding(
        mha_tt.upload(SHOWN, device=device), -1e9
    ),
}


def attend_under(mask, device):
    x = mha_tt.upload(np.ones((1, 1, 40, 32)), device=device)
    return ttnn.transformer.scaled_dot_product_attention(x, x, x, attn_mask=mask, is_causal=False)


@pytest.mark.board
@pytest.mark.parametrize("name", FILLED_WITH_ZERO)
def test_mask_padding_of_zero_raises(device, name):
    """A mask whose last tiles are padded with 0, however it was made, raises an error."""
    with pytest.raises(AssertionError, match=r"mask.* got 0"):
        attend_under(FILLED_WITH_ZERO[name](device), device)


def attend_within(window_size, seq_len, device, **options):
    x = mha_tt.upload(np.ones((1, 1, seq_len, 32)), device=device)
    return ttnn.transformer.scaled_dot_product_attention(
        x, x, x, sliding_window_size=window_size, **options
    )


@pytest.mark.board
def test_two_sided_window_needs_whole_tiles(device):
    """A window in both directions raises an error unless the keys fill whole tiles; a causal one
    never does.
    """
    with pytest.raises(AssertionError, match=r"keys .*window"):
        attend_within(3, 40, device, is_causal=False)
    for seq_len, options in ((64, {"is_causal": False}), (40, {}), (40, {"is_causal": True})):
        assert mha_tt.download(attend_within(3, seq_len, device, **options)).max() == 1.0


@pytest.mark.parametrize(
    ("width", "sums", "is_caught"),
    [
        *((128, True, False), (160, True, True), (288, True, True), (384, True, False)),
        *((160, False, False), (256, False, False), (288, False, True)),
    ],
)
def test_step_with_miscomputed_width_raises(device, width, sums, is_caught):
    """A step with a head width that its kernel computes wrongly raises an error, and all other
    widths run.
    """
    query, slots = (
        mha_tt.upload(np.ones(shape), device=device)
        for shape in ((1, 1, 2, width), (1, 1, 32, width))
    )
    config = ttnn.init_device_compute_kernel_config(
        device.arch(), math_fidelity=ttnn.MathFidelity.HiFi4, fp32_dest_acc_en=sums
    )
    with pytest.raises(AssertionError, match=r"^heads ") if is_caught else nullcontext():
        ttnn.transformer.scaled_dot_product_attention_decode(
            query, slots, slots, cur_pos=[3], compute_kernel_config=config
        )


@pytest.mark.board
@pytest.mark.parametrize("name", FILLED)
def test_masked_padding_is_accepted(device, name):
    """A mask whose last tiles are padded with -1e9, however it was made, is accepted."""
    assert mha_tt.download(attend_under(FILLED[name](device), device)).max() == 1.0


@pytest.mark.board
def test_mask_of_whole_tiles_is_accepted(device):
    """A mask of 64 x 64 needs no padding value."""
    x, mask = (
        mha_tt.upload(np.ones(shape), device=device) for shape in ((1, 1, 64, 32), (1, 1, 64, 64))
    )
    context = ttnn.transformer.scaled_dot_product_attention(
        x, x, x, attn_mask=mask, is_causal=False
    )
    assert mha_tt.download(context).max() == 1.0


@pytest.mark.board
def test_rows_of_more_than_32_heads_raise(device):
    """Writing rows of 33 heads, more than the operation reads, raises an error."""
    cache, new = (
        mha_tt.upload(np.ones(shape), device=device) for shape in ((2, 33, 32, 32), (1, 2, 33, 32))
    )
    cache_of_layer = mha_tt.KVCache(cache, cache, np.zeros(2, np.int32), 32)
    with pytest.raises(AssertionError, match=r"paged_update_cache .* got 33"):
        write_rows(cache_of_layer, [new, new], np.array([0, 0]))


@pytest.mark.board
@pytest.mark.parametrize("slots", [[32, 0], [0, 40]], ids=str)
def test_row_beyond_cache_raises(device, slots):
    """Writing a row to slot 32 or 40 of a cache of 32 slots raises an error."""
    cache = mha_tt.init_cache(2, 1, 32, 32, device=device)
    new = mha_tt.upload(np.ones((1, 2, 1, 32)), device=device)
    with pytest.raises(AssertionError, match=f"paged_update_cache .* got {max(slots)}"):
        write_rows(cache, [new, new], np.array(slots))


@pytest.mark.board
def test_update_cache_beyond_capacity_raises(device):
    """ttnn.update_cache at slot 32 of a cache of 32 slots raises an error."""
    cache, new = (
        mha_tt.upload(np.ones(shape), device=device) for shape in ((2, 1, 32, 32), (1, 1, 2, 32))
    )
    with pytest.raises(AssertionError, match=r"update_cache .* got 32"):
        ttnn.update_cache(cache, new, 32)


@pytest.mark.board
def test_fill_cache_beyond_capacity_raises(device):
    """ttnn.fill_cache with a tile that reaches beyond the 40 slots of a cache raises an error."""
    # The tile exists, but its last 24 rows are beyond the 40 slots.
    cache, new = (
        mha_tt.upload(np.ones(shape), device=device) for shape in ((2, 1, 40, 32), (1, 1, 32, 32))
    )
    with pytest.raises(AssertionError, match=r"fill_cache .* got 32 at 32"):
        ttnn.fill_cache(cache, new, 0, update_idx=32)


@pytest.mark.board
def test_heads_narrower_than_a_tile_raise(device):
    """nlp_create_qkv_heads with heads of 16 features, which ttnn would widen, raises an error."""
    x = mha_tt.upload(np.ones((1, 1, 5, 64)), device=device)
    with pytest.raises(AssertionError, match=r"head_dim .*nlp_create_qkv_heads, got 16"):
        ttnn.experimental.nlp_create_qkv_heads(
            x, num_heads=4, num_kv_heads=0, transpose_k_heads=False
        )

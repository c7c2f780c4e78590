"""Boards that do not exist: what they leave behind, what they compute, and the traps that they catch."""

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from unittest.mock import patch

import numpy as np
import pytest
import torch
import ttnn
from helpers.refusals import refuses
from helpers.tt.formulas import TOLERANCES, both_dtypes, rounded

import mha_tt
from mha_tt import mock
from mha_tt.cache import write_rows
from mha_tt.mock.goldens import GOLDENS

pytestmark = pytest.mark.usefixtures("only_mock")

USED = os.environ.get("MHA_TT_MOCK", "p150")

# ---- Boards ----------------------------------------------------------------------------------------------------------

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

    import mha_tt, numpy as np, ttnn

    for board in {list(BOARDS)}:
        if not os.fork():  # a process has one board for good, and the imports take longest
            for _ in range(2):
                with mha_tt.mock.board(board) as device:
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
    import mha_tt, numpy as np
    from mha_spec import AttentionSpec

    with mha_tt.mock.board(values=False) as device:
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
    """The folders and files that lie two levels deep in a folder."""
    return sorted(str(path.relative_to(folder)) for path in [*folder.glob("*"), *folder.glob("*/*")])


def test_boards_are_those_described():
    assert mock.BOARDS.keys() == BOARDS.keys()


@pytest.mark.costly("a process has one board for good")
@pytest.mark.thorough
def test_boards_open_and_multiply_and_may_be_opened_again(run_python, tmp_path):
    result = run_python(USE)
    expected = [(f"{architecture} {grid} {chips}", "True") for architecture, grid, chips in BOARDS.values()]
    assert result.stdout.splitlines() == [line for board in expected for line in 2 * board], result.stderr
    assert files_below(tmp_path / "home") == [".cache", ".cache/mha_tt"]
    assert files_below(tmp_path / "work") == []


def test_unknown_board_is_refused():
    with refuses("board", board="n151"):
        mock.use("n151")


@pytest.mark.board
def test_second_board_is_refused(opened_device):
    other = next(name for name in BOARDS if name != USED)
    with pytest.raises(RuntimeError, match=f"'{other}' after '{USED}'"):
        mock.use(other)


def test_cache_folder_with_a_blank_in_its_path_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "my cache"))
    with refuses("the cache folder"):
        mock.use(USED)
    assert list(tmp_path.iterdir()) == []


def test_the_same_board_may_be_used_again(opened_device):
    before = dict(os.environ)
    mock.use(USED)
    assert dict(os.environ) == before


# ---- What they leave behind ------------------------------------------------------------------------------------------


@pytest.mark.costly("four processes with one home")
@pytest.mark.thorough
def test_four_processes_may_begin_at_once_with_an_empty_folder_and_leave_one_of_the_home(run_python, tmp_path):
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(run_python, [DECODE] * 4))
    for result in results:  # without values a layer runs, and has nothing to read
        shapes, refusal = result.stdout.splitlines()
        assert shapes == "(2, 1, 32) [6, 6]"
        assert "a mock one" in refusal
    assert files_below(tmp_path / "home") == [".cache", ".cache/mha_tt"]  # and no .cache/tt-metal-cache
    assert files_below(tmp_path / "work") == []


@pytest.mark.costly("the environment of a process")
def test_files_lie_in_the_cache_folder_where_there_is_one(run_python, tmp_path):
    assert run_python(DECODE, XDG_CACHE_HOME=str(tmp_path / "cache")).returncode == 0
    assert files_below(tmp_path / "home") == []
    assert files_below(tmp_path / "work") == []
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["mha_tt"]


@pytest.mark.costly("the compiler is a program")
def test_compiler_says_that_it_is_none(opened_device):
    # Its version is part of the key of ttnn's cache: with the version of a real one, a card would be given its kernels.
    compiler = os.path.join(os.environ["TT_METAL_RUNTIME_ROOT"], "runtime/sfpi/compiler/bin/riscv-tt-elf-g++")
    result = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True)
    assert result.stdout == "riscv-tt-elf-g++ (mha_tt mock)\n"


def test_kernels_lie_apart_from_those_of_a_card(opened_device):
    folder = os.environ["TT_METAL_CACHE"]
    assert folder.startswith(os.environ["TT_METAL_RUNTIME_ROOT"])
    assert folder.endswith("/")  # without it ttnn glues its key to the name


# ---- Values ----------------------------------------------------------------------------------------------------------


def test_code_of_torch_and_ttnn_alone_gets_its_values(device):
    x = torch.randn(2, 40, 70, generator=torch.Generator().manual_seed(0))
    tensor = ttnn.from_torch(x, dtype=ttnn.float32, layout=ttnn.TILE_LAYOUT, device=device)
    y = ttnn.to_torch(ttnn.softmax(tensor[:, 3:] * 2.0 + 1.0, dim=-1))
    assert (y - torch.softmax(x[:, 3:] * 2.0, dim=-1)).abs().max() <= TOLERANCES[ttnn.float32]


@both_dtypes
def test_value_is_rounded_as_its_tensor_holds_it(device, rng, dtype):
    x = rng.standard_normal((5, 40)).astype(np.float32)
    tripled = ttnn.multiply(mha_tt.upload(x, device=device, dtype=dtype), 3.0)
    assert np.array_equal(mha_tt.download(tripled), rounded(3.0 * rounded(x, dtype), dtype))


def test_value_is_rounded_to_blocks(device, rng):
    x = rng.standard_normal((5, 40)).astype(np.float32)
    narrow = ttnn.typecast(mha_tt.upload(x, device=device, dtype=ttnn.bfloat16), ttnn.bfloat8_b)
    assert np.array_equal(mha_tt.download(narrow), rounded(rounded(x, ttnn.bfloat16), ttnn.bfloat8_b))


@pytest.mark.board
def test_board_itself_computes_nothing(device, opened_device):  # the control of the tests above
    tensor = ttnn.add(mha_tt.upload(np.ones((5, 40)), device=device), 1.0)
    assert ttnn._ttnn.operations.core.to_dtype(tensor.cpu(), ttnn.float32).to_numpy().max() == 0.0


def test_operations_are_noted_in_their_order(opened_device):
    with mock.shadow() as values:
        x = mha_tt.upload(np.ones((2, 3)), device=opened_device)
        ttnn.softmax(x + x, dim=-1)
    assert values.operations == ["ttnn.to_device", "ttnn.add", "ttnn.softmax"]


def test_shadow_gives_a_value_by_its_tensor(opened_device):
    with mock.shadow() as values:
        x = mha_tt.upload(np.array([[1.0, 2.0]]), device=opened_device)
        assert values[ttnn.multiply(x, 2.0)].tolist() == [[2.0, 4.0]]


def test_shadow_within_a_shadow_is_the_same(opened_device):
    with mock.shadow() as outer:
        x = mha_tt.upload(np.array([[1.0, 2.0]]), device=opened_device)
        with mock.shadow() as inner:
            y = ttnn.multiply(x, 2.0)
        assert inner is outer
        assert mha_tt.download(y).tolist() == [[2.0, 4.0]]


def test_value_of_a_deallocated_tensor_is_let_go(opened_device):
    with mock.shadow() as values:
        x = mha_tt.upload(np.ones((2, 3)), device=opened_device)
        ttnn.deallocate(x)
        with pytest.raises(KeyError):
            values[x]


def test_tensor_from_before_the_shadow_has_no_value(opened_device):
    x = mha_tt.upload(np.ones((2, 3)), device=opened_device)
    with mock.shadow(), pytest.raises(KeyError, match=r"\(2, 3\)"):
        ttnn.multiply(x, 2.0)


def test_graph_is_captured_where_one_is_asked_for(device):
    x = mha_tt.upload(np.ones((2, 3)), device=device)
    for _ in range(2):
        ttnn.graph.begin_graph_capture()
        y = ttnn.multiply(x, 2.0)
        graph = ttnn.graph.end_graph_capture()
        assert "ttnn.multiply" in str(graph)
        assert mha_tt.download(ttnn.add(y, x)).tolist() == [[3.0] * 3] * 2
        assert not ttnn.graph.is_graph_capture_active()


@pytest.mark.costly("two processes with one cache")
def test_kernel_that_was_compiled_once_is_not_compiled_by_another_process(run_python):
    program = """
        import resource, sys

        sys.modules["torch"] = None
        import mha_tt, numpy as np, ttnn

        with mha_tt.mock.board(values=False) as device:
            before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt
            ttnn.exp(mha_tt.upload(np.ones((2, 3)), device=device))
            print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt > before)
    """
    assert [run_python(program).stdout for _ in range(2)] == ["True\n", "False\n"]


def test_shadow_leaves_everything_as_it_was(opened_device):
    graph = vars(ttnn.graph).copy()
    fast = ttnn.CONFIG.enable_fast_runtime_mode
    with pytest.raises(KeyboardInterrupt), mock.shadow():
        raise KeyboardInterrupt
    x = mha_tt.upload(np.ones((2, 3)), device=opened_device)
    ttnn.multiply(x, 2.0)
    assert ttnn.CONFIG.enable_fast_runtime_mode == fast
    assert vars(ttnn.graph) == graph
    with pytest.raises(RuntimeError, match="a mock one"):
        mha_tt.download(x)


# ---- Golden functions ------------------------------------------------------------------------------------------------


@pytest.fixture
def own_goldens():
    """Takes back what a test registers."""
    with patch.dict(GOLDENS):
        yield


def test_operation_without_a_golden_function_says_how_to_give_it_one(device):
    x = mha_tt.upload(np.ones((1, 2, 32, 64)), device=device)
    with pytest.raises(NotImplementedError, match=r"rotate_half has no golden function; mha_tt\.mock\.golden\("):
        ttnn.experimental.rotate_half(x)


def test_golden_function_may_be_given(device, own_goldens, rng):
    @mock.golden("ttnn.experimental.rotate_half")
    def rotate_half(x):
        first, second = x.chunk(2, dim=-1)
        return torch.cat([-second, first], dim=-1)

    x = rounded(rng.standard_normal((1, 2, 32, 64)), ttnn.bfloat16)
    rotated = ttnn.experimental.rotate_half(mha_tt.upload(x, device=device))
    assert np.array_equal(mha_tt.download(rotated), np.concatenate([-x[..., 32:], x[..., :32]], axis=3))


def test_given_golden_function_comes_before_the_one_of_ttnn(device, own_goldens):
    mock.golden("ttnn.relu")(lambda x, **_: x + 41.0)
    assert mha_tt.download(ttnn.relu(mha_tt.upload(np.ones((2, 3)), device=device))).tolist() == [[42.0] * 3] * 2


def test_golden_function_of_another_shape_is_reported(device, own_goldens):
    mock.golden("ttnn.relu")(lambda x, **_: x[:1])
    with pytest.raises(AssertionError, match=r"ttnn\.relu gives \(2, 3\), its golden function \(1, 3\)"):
        ttnn.relu(mha_tt.upload(np.ones((2, 3)), device=device))


def test_linear_takes_a_bias_of_two(device):
    # The golden function of ttnn takes one of two elements for a matrix.
    x, weight, bias = (mha_tt.upload(np.ones(shape), device=device) for shape in ((3, 4), (4, 2), (1, 2)))
    assert mha_tt.download(ttnn.linear(x, weight, bias=bias)).tolist() == [[5.0] * 2] * 3


@pytest.mark.board
@pytest.mark.parametrize("slots", [[3, 0], [3, -1], [-1, -1]], ids=str)
def test_rows_are_written_to_a_slot_of_each_sequence_or_to_none(device, rng, slots):
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
def test_heads_of_whole_tiles_are_created(device, rng, num_kv_heads):
    x = rounded(rng.standard_normal((2, 1, 5, (2 + 2 * num_kv_heads) * 32)), ttnn.bfloat16)
    heads, keys, values = ttnn.experimental.nlp_create_qkv_heads(
        mha_tt.upload(x, device=device), num_heads=2, num_kv_heads=num_kv_heads, transpose_k_heads=False
    )
    expected = x.reshape(2, 5, -1, 32).swapaxes(1, 2)
    assert np.array_equal(mha_tt.download(heads), expected[:, :2])
    if num_kv_heads:
        assert np.array_equal(mha_tt.download(keys), expected[:, 2:3])
        assert np.array_equal(mha_tt.download(values), expected[:, 3:])


# ---- Traps: what ttnn takes without a word and gets wrong ------------------------------------------------------------

SHOWN = np.zeros((1, 1, 40, 40))


def mask_of_torch(device, **options):
    return ttnn.from_torch(
        torch.from_numpy(SHOWN), dtype=ttnn.bfloat16, layout=ttnn.TILE_LAYOUT, device=device, **options
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
    "filled": lambda device: ttnn.fill_implicit_tile_padding(mha_tt.upload(SHOWN, device=device), -1e9),
}


def attend_under(mask, device):
    x = mha_tt.upload(np.ones((1, 1, 40, 32)), device=device)
    return ttnn.transformer.scaled_dot_product_attention(x, x, x, attn_mask=mask, is_causal=False)


@pytest.mark.board
@pytest.mark.parametrize("name", FILLED_WITH_ZERO)
def test_mask_whose_last_tiles_hide_nothing_is_caught(device, name):
    with pytest.raises(AssertionError, match=r"mask.* got 0"):
        attend_under(FILLED_WITH_ZERO[name](device), device)


def attend_within(window_size, seq_len, device, **told):
    x = mha_tt.upload(np.ones((1, 1, seq_len, 32)), device=device)
    return ttnn.transformer.scaled_dot_product_attention(x, x, x, sliding_window_size=window_size, **told)


@pytest.mark.board
def test_window_both_ways_over_keys_that_are_not_whole_tiles_is_caught(device):
    with pytest.raises(AssertionError, match=r"keys .*window"):
        attend_within(3, 40, device, is_causal=False)
    for seq_len, told in ((64, {"is_causal": False}), (40, {}), (40, {"is_causal": True})):
        assert mha_tt.download(attend_within(3, seq_len, device, **told)).max() == 1.0


@pytest.mark.parametrize(
    ("width", "sums", "is_caught"),
    [
        *((128, True, False), (160, True, True), (288, True, True), (384, True, False)),
        *((160, False, False), (256, False, False), (288, False, True)),
    ],
)
def test_step_of_heads_that_its_kernel_gets_wrong_is_caught(device, width, sums, is_caught):
    query, slots = (mha_tt.upload(np.ones(shape), device=device) for shape in ((1, 1, 2, width), (1, 1, 32, width)))
    config = ttnn.init_device_compute_kernel_config(
        device.arch(), math_fidelity=ttnn.MathFidelity.HiFi4, fp32_dest_acc_en=sums
    )
    with pytest.raises(AssertionError, match=r"^heads ") if is_caught else nullcontext():
        ttnn.transformer.scaled_dot_product_attention_decode(
            query, slots, slots, cur_pos=[3], compute_kernel_config=config
        )


@pytest.mark.board
@pytest.mark.parametrize("name", FILLED)
def test_mask_whose_last_tiles_hide_their_filling_is_taken(device, name):
    assert mha_tt.download(attend_under(FILLED[name](device), device)).max() == 1.0


@pytest.mark.board
def test_mask_of_whole_tiles_needs_no_filling(device):
    x, mask = (mha_tt.upload(np.ones(shape), device=device) for shape in ((1, 1, 64, 32), (1, 1, 64, 64)))
    context = ttnn.transformer.scaled_dot_product_attention(x, x, x, attn_mask=mask, is_causal=False)
    assert mha_tt.download(context).max() == 1.0


@pytest.mark.board
def test_rows_of_more_heads_than_are_read_are_caught(device):
    cache, new = (mha_tt.upload(np.ones(shape), device=device) for shape in ((2, 33, 32, 32), (1, 2, 33, 32)))
    held = mha_tt.KVCache(cache, cache, np.zeros(2, np.int32), 32)
    with pytest.raises(AssertionError, match=r"paged_update_cache .* got 33"):
        write_rows(held, [new, new], np.array([0, 0]))


@pytest.mark.board
@pytest.mark.parametrize("slots", [[32, 0], [0, 40]], ids=str)
def test_row_beyond_the_cache_is_caught(device, slots):
    cache = mha_tt.init_cache(2, 1, 32, 32, device=device)
    new = mha_tt.upload(np.ones((1, 2, 1, 32)), device=device)
    with pytest.raises(AssertionError, match=f"paged_update_cache .* got {max(slots)}"):
        write_rows(cache, [new, new], np.array(slots))


@pytest.mark.board
def test_row_of_all_sequences_beyond_the_cache_is_caught(device):
    cache, new = (mha_tt.upload(np.ones(shape), device=device) for shape in ((2, 1, 32, 32), (1, 1, 2, 32)))
    with pytest.raises(AssertionError, match=r"update_cache .* got 32"):
        ttnn.update_cache(cache, new, 32)


@pytest.mark.board
def test_tiles_beyond_the_slots_of_a_cache_are_caught(device):
    # The tile itself is there, and its last 24 rows are beyond the 40 slots.
    cache, new = (mha_tt.upload(np.ones(shape), device=device) for shape in ((2, 1, 40, 32), (1, 1, 32, 32)))
    with pytest.raises(AssertionError, match=r"fill_cache .* got 32 at 32"):
        ttnn.fill_cache(cache, new, 0, update_idx=32)


@pytest.mark.board
def test_heads_that_ttnn_would_widen_are_caught(device):
    x = mha_tt.upload(np.ones((1, 1, 5, 64)), device=device)
    with pytest.raises(AssertionError, match=r"head_dim .*nlp_create_qkv_heads, got 16"):
        ttnn.experimental.nlp_create_qkv_heads(x, num_heads=4, num_kv_heads=0, transpose_k_heads=False)

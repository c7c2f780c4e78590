"""Steps: the cost of one token per sequence, and the correctness of positions that the device
counts by itself.

test_cache_mha and test_latent also check the results of steps: token by token, they equal one full
pass.
"""

import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import ttnn
from helpers.samples import sample
from helpers.tt.formulas import IS_MOCK, assert_close, module_of, rotate, rounded

import mha_tt
import parity
from mha_spec import DynamicScaling, Gate, Latent, Norm, Temperature
from mha_tt import device as devices
from mha_tt.decode.positions import RotaryTable

ROPE = parity.Rope(10000.0)
LAYERS = {
    "no RoPE": parity.AttentionSpec(64, 4, num_kv_heads=2),
    "few heads": parity.AttentionSpec(64, 4, num_kv_heads=2, rope=ROPE),
    "many heads": parity.AttentionSpec(64, 32, num_kv_heads=8, rope=ROPE),
    "packed": parity.AttentionSpec(64, 32, num_kv_heads=8, rope=ROPE, fused_qkv=True),
    "heads of their own keys": parity.AttentionSpec(
        64, 32, head_dim=2, rope=ROPE
    ),  # too many for an n150's cores
    "some biases": parity.AttentionSpec(64, 4, rope=ROPE, qkv_bias=(True, False, True)),
    "more than a tile of heads": parity.AttentionSpec(
        64, 40, num_kv_heads=8, head_dim=2, rope=ROPE
    ),
    "padded heads": parity.AttentionSpec(
        60, 3, head_dim=20, rope=parity.Rope(rotary_dim=12, pairs="interleaved")
    ),
    "wide heads": parity.AttentionSpec(64, 2, head_dim=256, rope=ROPE),
    "wider heads": parity.AttentionSpec(64, 1, head_dim=512, rope=ROPE),
    "sinks, no output projection": parity.AttentionSpec(
        64, 4, rope=ROPE, sinks=True, out_proj=False
    ),
    "clipped": parity.AttentionSpec(64, 4, clip_qkv=0.5),
    "norms": parity.AttentionSpec(64, 4, rope=ROPE, qk_norm=Norm()),
    "gate": parity.AttentionSpec(64, 4, rope=ROPE, gate=Gate()),
    "frequencies by length": parity.AttentionSpec(
        64, 4, rope=parity.Rope(scaling=DynamicScaling(4.0, 6))
    ),
    "latents": parity.AttentionSpec(
        64,
        4,
        head_dim=48,
        rope=parity.Rope(rotary_dim=16, rotated="last"),
        latent=Latent(32, rope_dim=16),
    ),
}
OTHERWISE = {  # steps that need a different kernel, or factors computed on the host
    "window": parity.AttentionSpec(64, 4, rope=ROPE, window_size=4),
    "soft cap": parity.AttentionSpec(64, 4, rope=ROPE, soft_cap=20.0),
    "temperature": parity.AttentionSpec(64, 4, rope=ROPE, temperature=Temperature(2, 0.5)),
    "values of a different width": parity.AttentionSpec(64, 2, value_head_dim=48),
}
HOST = {"ttnn.to_device", "ttnn.from_device", "ttnn.to_torch", "ttnn.to_dtype"}

COSTS = {
    # layer, whether fast: operations of a step; in comments, the earlier costs with positions
    # uploaded in each step
    ("no RoPE", False): 10,  # 24, and 2 uploads
    ("no RoPE", True): 8,  # 24, and 2 uploads
    ("few heads", False): 16,  # 40, and 4 uploads
    ("few heads", True): 14,  # 40, and 4 uploads
    ("many heads", False): 14,  # 38, and 4 uploads
    ("many heads", True): 14,  # 38, and 4 uploads
    ("packed", False): 14,  # 31, and 4 uploads
    ("packed", True): 14,  # 31, and 4 uploads
    ("padded heads", False): 16,
    ("sinks, no output projection", False): 15,
    ("clipped", False): 11,
    ("latents", False): 46,  # 56, and 4 uploads
    ("latents", True): 44,  # 56, and 4 uploads
}


def made(device, spec, *, fast=False, seed=0, batch_size=3):
    """Return a module in bfloat16, and seven tokens for each sequence of a batch."""
    kind = "MultiHeadLatentAttention" if spec.latent else "MultiHeadAttentionWithCache"
    config = mha_tt.fast_config(device) if fast else None
    module = module_of(kind, spec, device, ttnn.bfloat16, compute_kernel_config=config)
    return module, rounded(
        np.random.default_rng(seed).standard_normal((batch_size, 7, spec.d_model)), ttnn.bfloat16
    )


def begun(module, x, lengths=(3, 1, 2)):
    """Return a cache with the first tokens of each sequence, `lengths` of them."""
    prompt = mha_tt.upload(x[:, : max(lengths)], device=module.device)
    return module(prompt, module.init_cache(len(lengths), 40), new_lengths=lengths)[1]


def steps(module, x, cache, between=lambda cache: cache, **options):
    """Return the outputs of three steps, with `between` called on the cache before each, and the
    final cache.
    """
    outputs = []
    for token in (4, 5, 6):
        output, cache = module(
            mha_tt.upload(x[:, token : token + 1], device=module.device), between(cache), **options
        )
        outputs.append(mha_tt.download(output))
    return np.concatenate(outputs, axis=1), cache


def contents(cache):
    return [mha_tt.download(x) for x in cache.slots.values()]


# ---- Cost of a step ------------------------------------------------------------------------------


@pytest.mark.board
@pytest.mark.parametrize(("name", "fast"), COSTS, ids=str)
def test_step_cost_without_transfers(device, calls, uploads, monkeypatch, name, fast):
    """A step runs the expected number of operations, uploads no array and reads no tensor back."""
    module, x = made(device, LAYERS[name], fast=fast)
    token, cache = mha_tt.upload(x[:, :1], device=device), begun(module, x)
    _, cache = module(token, cache)
    calls.clear()
    uploads.clear()
    with monkeypatch.context() as patch:
        patch.setattr(devices, "readers", [lambda tensor: pytest.fail("a tensor was read back")])
        module(token, cache)
    names = [call.name for call in calls]
    assert len(names) == COSTS[name, fast], names
    assert not uploads
    assert not set(names) & HOST


@pytest.mark.parametrize(("batch_size", "cost"), [(1, 16), (4, 16), (5, 17), (32, 17)])
def test_step_cost_of_more_sequences(device, calls, batch_size, cost):
    """A step of 1 or 4 sequences costs 16 operations, one of 5 or 32 costs 17, because their tokens
    share tiles; the first and last sequences match those run alone.
    """
    module, x = made(device, LAYERS["few heads"], batch_size=batch_size)
    lengths = [(3, 1, 2)[i % 3] for i in range(batch_size)]
    actual, cache = steps(module, x, begun(module, x, lengths))
    for i in {0, batch_size - 1}:
        alone, _ = steps(module, x[i : i + 1], begun(module, x[i : i + 1], lengths[i : i + 1]))
        assert_close(actual[i : i + 1], alone, ttnn.bfloat16)
    token = mha_tt.upload(x[:, :1], device=device)
    calls.clear()
    module(token, cache)
    assert len(calls) == cost


@pytest.mark.parametrize("name", ["no RoPE", "few heads", "norms", "latents"])
def test_only_first_step_uploads(device, uploads, name):
    """Only the first step uploads arrays: 1 without RoPE, 5 with it."""
    module, x = made(device, LAYERS[name])
    cache = begun(module, x)
    uploads.clear()
    counts = []
    for token in range(3):
        x_t = mha_tt.upload(x[:, token : token + 1], device=device)
        uploads.clear()
        _, cache = module(x_t, cache)
        counts.append(len(uploads))
    # Slots; with RoPE also its table, the rows in it and the tensors that turn it into rotations.
    assert counts == [1 if LAYERS[name].rope is None else 5, 0, 0]


def test_unused_positions_change_no_step(device, uploads):
    """Without RoPE, given positions change neither outputs nor the absence of uploads."""
    module, x = made(device, LAYERS["no RoPE"])
    expected, _ = steps(module, x, begun(module, x))
    actual, cache = steps(module, x, begun(module, x), positions=np.array([[9]]))
    assert np.array_equal(actual, expected)
    token = mha_tt.upload(x[:, :1], device=device)
    uploads.clear()
    module(token, cache, positions=np.array([[9]]))
    assert not uploads


def test_rotary_table_serves_next_cache(device, uploads):
    """A second cache of the same capacity uploads its slots and rows, but not the table of RoPE
    again.
    """
    module, x = made(device, LAYERS["few heads"])
    steps(module, x, begun(module, x))
    cache, token = begun(module, x), mha_tt.upload(x[:, :1], device=device)
    uploads.clear()
    module(token, cache)
    assert [array.shape for array in uploads] == [(3,), (3, 1)]


def test_step_memory_does_not_grow(device):
    """After the second step, memory in use stays the same, and no core memory remains allocated."""
    module, x = made(device, LAYERS["few heads"])
    token, cache = mha_tt.upload(x[:, :1], device=device), begun(module, x)
    taken = []
    for _ in range(4):
        output, cache = module(token, cache)
        buffers = (
            ttnn.get_memory_view(device, kind)
            for kind in (ttnn.BufferType.L1, ttnn.BufferType.DRAM)
        )
        taken.append([buffer.total_bytes_allocated_per_bank for buffer in buffers])
        del output
    assert taken[1] == taken[2] == taken[3]
    assert taken[1][0] == 0


# ---- Positions counted on the device are the positions of the cache
# --------------------------------------------------------


@sample(12)
@pytest.mark.board
@pytest.mark.parametrize(
    ("name", "fast"), [*((name, False) for name in LAYERS), ("few heads", True), ("packed", True)]
)
def test_counted_positions_equal_uploads(device, name, fast):
    """Positions counted on the device give bit-identical steps to uploaded ones, close to the
    prompt kernel's.
    """
    module, x = made(device, LAYERS[name], fast=fast)
    cache = begun(module, x)
    counted, after = steps(module, x, cache.grow(40))
    uploaded, expected = steps(module, x, cache.grow(40), lambda cache: replace(cache))
    assert np.array_equal(counted, uploaded)
    assert all(map(np.array_equal, contents(after), contents(expected)))
    assert after.lengths.tolist() == [6, 4, 5]
    masked, _ = steps(module, x, cache, mask=np.zeros((1, 1, 1, 40), bool))
    assert_close(counted, masked, ttnn.bfloat16)


@pytest.mark.parametrize("name", OTHERWISE)
def test_unsupported_step_uploads_positions(device, uploads, name):
    """Layers whose steps need the host have no positions on the device and upload in every step."""
    module, x = made(device, OTHERWISE[name])
    _, cache = steps(module, x, begun(module, x))
    assert cache.next_positions is None
    token = mha_tt.upload(x[:, :1], device=device)
    uploads.clear()
    module(token, cache)
    assert uploads


def test_step_from_a_copy_is_the_same(device):
    """A step from a copy of a cache gives bit-identical outputs and caches, and leaves the cache
    unchanged.
    """
    module, x = made(device, LAYERS["few heads"])
    _, cache = module(mha_tt.upload(x[:, :1], device=device), begun(module, x))
    token = mha_tt.upload(x[:, 1:2], device=device)
    once, again = module(token, cache.copy()), module(token, cache)
    assert np.array_equal(mha_tt.download(once[0]), mha_tt.download(again[0]))
    assert all(map(np.array_equal, contents(once[1]), contents(again[1])))


BETWEEN = {
    "cropped": lambda module, cache: cache.crop(cache.lengths - 1),
    "reordered": lambda module, cache: cache.reorder([2, 0, 1]),
    "grown": lambda module, cache: cache.grow(cache.capacity + 32),
    "of other lengths": lambda module, cache: replace(cache, lengths=cache.lengths - 1),
    "in another layer": lambda module, cache: replace(cache, keys=ttnn.clone(cache.keys)),
    "after a chunk": lambda module, cache: module(
        mha_tt.upload(np.ones((3, 2, 64)), device=module.device), cache
    )[1],
    "after a step of some": lambda module, cache: module(
        mha_tt.upload(np.ones((3, 1, 64)), device=module.device), cache, new_lengths=[1, 0, 1]
    )[1],
    "after a step elsewhere": lambda module, cache: module(
        mha_tt.upload(np.ones((3, 1, 64)), device=module.device),
        cache,
        positions=np.array([[7], [0], [30]]),
    )[1],
}


@pytest.mark.parametrize("name", BETWEEN)
def test_positions_follow_cache(device, name):
    """A step after a change of the cache equals one whose positions are uploaded."""
    module, x = made(device, LAYERS["few heads"])
    actual, after = steps(module, x, begun(module, x), lambda cache: BETWEEN[name](module, cache))
    expected, cache = steps(
        module, x, begun(module, x), lambda cache: replace(BETWEEN[name](module, cache))
    )
    assert np.array_equal(actual, expected)
    assert after.lengths.tolist() == cache.lengths.tolist()


def test_cache_in_other_layer_uses_its_table(device):
    """A cache used by a layer with a different RoPE theta is rotated by the table of that layer."""
    module, x = made(device, LAYERS["few heads"])
    other, _ = made(device, replace(LAYERS["few heads"], rope=parity.Rope(100.0)))
    _, cache = steps(module, x, begun(module, x))
    token, copied = mha_tt.upload(x[:, :1], device=device), cache.copy()
    actual = mha_tt.download(other(token, cache)[0])
    expected = mha_tt.download(other(token, replace(cache))[0])
    assert np.array_equal(actual, expected)
    assert not np.array_equal(actual, mha_tt.download(module(token, copied)[0]))


def test_functions_count_like_modules(device, uploads):
    """A second step of the function uploads nothing and equals the module's step."""
    spec = LAYERS["few heads"]
    module, x = made(device, spec)
    token, cache = mha_tt.upload(x[:, :1], device=device), begun(module, x)

    def called(cache):
        return mha_tt.multi_head_attention_with_cache(token, module.weights, spec, cache)

    _, cache = called(cache)
    uploads.clear()
    output, cache = called(cache)
    assert not uploads
    expected, _ = module(token, replace(cache, lengths=cache.lengths - 1))
    assert np.array_equal(mha_tt.download(output), mha_tt.download(expected))


@pytest.mark.parametrize("name", ["few heads", "some biases", "sinks, no output projection"])
def test_loading_weights_renews_step_tensors(device, name):
    """After load_weights, steps equal the steps of a new layer with these weights."""
    spec = LAYERS[name]
    (module, x), (expected, _) = made(device, spec), made(device, spec)
    other = {name: 2.0 * weight for name, weight in parity.random_weights(spec, seed=5).items()}
    expected.load_weights(other)
    before, cache = steps(module, x, begun(module, x))
    module.load_weights(other)
    cache = cache.crop(cache.lengths - 3)
    actual, (same, _) = steps(module, x, cache)[0], steps(expected, x, replace(cache))
    assert np.array_equal(actual, same)
    assert not np.array_equal(actual, before)


def test_sinks_follow_arithmetic_of_step(device):
    """Sinks kept for steps are made again if the arithmetic changes, because only one repeats
    heads.
    """
    spec = replace(LAYERS["no RoPE"], sinks=True)
    module, x = made(device, spec)
    token, cache = mha_tt.upload(x[:, :1], device=device), begun(module, x)

    def called(cache, config):
        call = mha_tt.multi_head_attention_with_cache
        return call(token, module.weights, spec, cache, compute_kernel_config=config(device))

    outputs = []
    for config in (mha_tt.accurate_config, mha_tt.fast_config, mha_tt.accurate_config):
        expected, _ = called(replace(cache), config)
        output, cache = called(cache, config)
        outputs.append(mha_tt.download(output))
        assert np.array_equal(outputs[-1], mha_tt.download(expected))
    assert outputs[0].shape == (3, 1, 64)


class Doubled(mha_tt.MultiHeadAttentionWithCache):
    """Layer with an overridden projection."""

    def project(self, name, x):
        projected = super().project(name, x)
        return ttnn.multiply(projected, 2.0) if name == "v_proj" else projected


def test_steps_use_overridden_projection(device):
    """A step calls an overridden `project`: doubling v_proj there equals doubled weights."""
    spec = replace(LAYERS["few heads"], qkv_bias=False)
    module, x = made(device, spec)
    weights = parity.random_weights(spec)
    replaced = Doubled(spec, device=device).eval()
    replaced.load_weights(weights)
    module.load_weights(weights | {"v_proj.weight": 2.0 * weights["v_proj.weight"]})
    layer, expected = (steps(layer, x, begun(layer, x))[0] for layer in (replaced, module))
    assert_close(layer, expected, ttnn.bfloat16)
    module.load_weights(weights)
    assert not np.allclose(layer, steps(module, x, begun(module, x))[0], atol=0.1)


def test_positions_that_stay_are_wrong(device, monkeypatch):
    """Control: if the device does not advance its positions, outputs differ."""
    module, x = made(device, LAYERS["few heads"])
    expected, _ = steps(module, x, begun(module, x))
    monkeypatch.setattr(ttnn, "plus_one", lambda x: x)
    assert not np.array_equal(steps(module, x, begun(module, x))[0], expected)


@pytest.mark.parametrize("is_row_each", [True, False], ids=["by a matrix", "side by side"])
@pytest.mark.parametrize("position", [1, 4097])
def test_rotary_table_terms_match_rotation(device, position, is_row_each):
    """The table of RoPE, in two terms, is within 2^-16 of the rotation, where bfloat16 keeps
    2^-9.
    """
    table = RotaryTable(parity.AttentionSpec(128, 2, rope=ROPE), position + 1, device=device)
    row = devices.upload_rows(np.array([[position]]), device=device, dtype=ttnn.uint32)
    rotation = table.rotation(row, is_row_each=is_row_each)
    if is_row_each:
        actual = mha_tt.download(rotation.matrices)[0, 0]
    else:  # each feature by itself
        x = mha_tt.upload(np.eye(64)[None, :, None], device=device, dtype=ttnn.float32)
        actual = mha_tt.download(rotation.rotate(x))[0, :, 0]
    expected = rotate(np.eye(64)[None, :, None], [[position]], 10000.0)[0, :, 0]
    assert np.abs(actual - expected).max() <= 2**-16


# ---- Traces --------------------------------------------------------------------------------------

REPLAYED = """
import numpy as np, ttnn
import mha_tt
from mha_spec import AttentionSpec, Rope

rng = np.random.default_rng(0)
prompt, token = rng.standard_normal((2, 5, 128)), rng.standard_normal((2, 1, 128))
with mha_tt.open_device(trace_region_size=2**24) as device:
    spec = AttentionSpec(128, 4, num_kv_heads=2, rope=Rope())
    layer = mha_tt.MultiHeadAttentionWithCache(spec, device=device, rng=np.random.default_rng(1))

    def begun():
        _, cache = layer(mha_tt.upload(prompt, device=device), layer.init_cache(2, 128))
        x = mha_tt.upload(token, device=device)
        return x, layer(x, cache)[1]  # after a step its positions are on the device

    x, cache = begun()
    expected = []
    for _ in range(8):
        output, cache = layer(x, cache)
        expected.append(mha_tt.download(output))
    keys = mha_tt.download(cache.keys)

    x, cache = begun()
    trace = ttnn.begin_trace_capture(device, cq_id=0)
    output, cache = layer(x, cache)
    ttnn.end_trace_capture(device, trace, cq_id=0)
    for each in expected:
        ttnn.execute_trace(device, trace, cq_id=0, blocking=True)
        assert np.array_equal(mha_tt.download(output), each)
    assert np.array_equal(mha_tt.download(cache.keys), keys)
    print("replayed", len(expected))
"""


if not IS_MOCK:  # a mock board has no traces, so no run in CI would have this test

    @pytest.mark.costly("a device that replays")
    def test_replayed_trace_equals_steps():
        """Replaying the trace of one step 8 times equals 8 steps, bit for bit."""
        surroundings = {
            name: value
            for name, value in os.environ.items()
            if name != "TT_METAL_SLOW_DISPATCH_MODE"
        }
        result = subprocess.run(
            [sys.executable, "-c", REPLAYED], env=surroundings, capture_output=True, text=True
        )
        assert "replayed 8" in result.stdout, result.stderr


def test_trace_on_mock_board_raises(device, only_mock):
    """Capturing a trace on a mock board raises an error that names begin_trace_capture."""
    with pytest.raises(RuntimeError, match="begin_trace_capture"):
        ttnn.begin_trace_capture(device, cq_id=0)

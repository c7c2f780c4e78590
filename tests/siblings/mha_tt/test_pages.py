"""Paged caches: bit-identical to caches without pages, wherever the pages are."""

from dataclasses import replace

import numpy as np
import pytest
import ttnn
from helpers.input_errors import rejects, rejects_type
from helpers.tt.formulas import assert_close, layer, module_of, rounded, rounded_weights

import mha_tt
import parity
from mha_spec import Norm
from mha_tt import device as devices
from mha_tt.decode.slots import first_slots

ROPE = parity.Rope(10000.0)
LAYERS = {
    "no RoPE": parity.AttentionSpec(64, 4, num_kv_heads=2),
    "many heads": parity.AttentionSpec(64, 32, num_kv_heads=8, rope=ROPE),
    "sinks": parity.AttentionSpec(64, 4, rope=ROPE, sinks=True),
    "norms": parity.AttentionSpec(64, 4, rope=ROPE, qk_norm=Norm()),
    "window": parity.AttentionSpec(64, 4, rope=ROPE, window_size=40),
}
CAPACITY = 120


def made(device, spec, dtype=None, page_size=32):
    """Return a module, an empty cache without pages, and one with pages."""
    module = module_of("MultiHeadAttentionWithCache", spec, device)
    return (
        module,
        module.init_cache(3, CAPACITY, dtype),
        module.init_cache(3, CAPACITY, dtype, page_size=page_size),
    )


def tokens(device, count, seed=0):
    x = np.random.default_rng(seed).standard_normal((3, count, 64))
    return mha_tt.upload(rounded(x, ttnn.bfloat16), device=device)


def run(module, cache, between=lambda cache: cache, **options):
    """Return the outputs and the cache of a prompt, a chunk that begins and ends within pages, and
    steps.
    """
    device, outputs = module.device, []
    for count, new_lengths in ((40, [40, 3, 17]), (50, None), (1, None), (1, [1, 0, 1]), (1, None)):
        output, cache = module(
            tokens(device, count, len(outputs)), between(cache), new_lengths=new_lengths, **options
        )
        outputs.append(mha_tt.download(output))
    return outputs, cache


def in_slots(cache):
    """Return the contents of a cache, in slots."""
    return [mha_tt.download(first_slots(x, 96, cache.pages)) for x in cache.slots.values()]


@pytest.mark.board
@pytest.mark.parametrize(
    ("name", "page_size"), [*((name, 32) for name in LAYERS), ("many heads", 64)]
)
def test_pages_match_slots(device, name, page_size):
    """Outputs, lengths and contents of a paged cache equal a cache in slots, bit for bit."""
    module, slots, pages = made(device, LAYERS[name], page_size=page_size)
    expected, slots = run(module, slots)
    actual, pages = run(module, pages)
    assert all(map(np.array_equal, actual, expected))
    assert pages.lengths.tolist() == slots.lengths.tolist()
    assert all(map(np.array_equal, in_slots(pages), in_slots(slots)))


@pytest.mark.board
def test_bfloat8_b_pages_match_slots(device):
    """Outputs with a paged bfloat8_b cache equal the outputs with one in slots, bit for bit."""
    module, slots, pages = made(device, LAYERS["many heads"], ttnn.bfloat8_b)
    assert all(map(np.array_equal, run(module, pages)[0], run(module, slots)[0]))


def test_mask_over_pages_is_indexed_by_slot(device):
    """A mask applies to the slots of a paged cache, wherever the pages are."""
    mask = np.random.default_rng(1).random((1, 1, 1, CAPACITY)) < 0.3
    module, slots, pages = made(device, LAYERS["many heads"])
    assert all(
        map(np.array_equal, run(module, pages, mask=mask)[0], run(module, slots, mask=mask)[0])
    )


def test_pages_match_reference(device):
    """Outputs with a paged cache match the formulas within the tolerance of bfloat16."""
    spec = LAYERS["many heads"]
    module, _, cache = made(device, spec)
    x = np.random.default_rng(0).standard_normal((3, 70, 64))
    parts = []
    for part in (x[:, :67], x[:, 67:68], x[:, 68:69], x[:, 69:]):
        output, cache = module(mha_tt.upload(part, device=device), cache)
        parts.append(mha_tt.download(output))
    x = rounded(x, ttnn.bfloat16)
    expected, _ = layer(spec, rounded_weights(spec, ttnn.bfloat16), x, mask=~np.tri(70, dtype=bool))
    assert_close(np.concatenate(parts, axis=1), expected, ttnn.bfloat16)


@pytest.mark.board
@pytest.mark.parametrize("name", ["no RoPE", "many heads"])
def test_step_over_pages_costs_no_more(device, calls, uploads, monkeypatch, name):
    """A step over pages runs the same operations as one over slots, and uploads or reads
    nothing.
    """
    module, *caches = made(device, LAYERS[name])
    token, names = tokens(device, 1), []
    for cache in caches:
        _, cache = module(token, module(tokens(device, 40), cache)[1])
        calls.clear()
        uploads.clear()
        with monkeypatch.context() as patch:
            patch.setattr(
                devices, "readers", [lambda tensor: pytest.fail("a tensor was read back")]
            )
            module(token, cache)
        names.append([call.name.replace("paged_scaled", "scaled") for call in calls])
        assert not uploads
    assert names[0] == names[1]


BETWEEN = {
    "reordered": lambda cache: cache.reorder([2, 0, 1]),
    "cropped": lambda cache: cache.crop(np.maximum(cache.lengths - 5, 0)),
    "grown": lambda cache: cache.grow(cache.capacity + 40),
    "repeated once": lambda cache: cache.repeat(1),
}


@pytest.mark.parametrize("name", BETWEEN)
def test_changed_pages_match_changed_slots(device, name):
    """After reordering, cropping, growing or repeating once, a paged cache equals one in slots."""
    module, slots, pages = made(device, LAYERS["many heads"])
    expected, slots = run(module, slots, BETWEEN[name])
    actual, pages = run(module, pages, BETWEEN[name])
    assert all(map(np.array_equal, actual, expected))
    assert (pages.capacity, pages.lengths.tolist()) == (slots.capacity, slots.lengths.tolist())
    assert all(map(np.array_equal, in_slots(pages), in_slots(slots)))


def test_cropped_pages_hold_nothing_beyond(device):
    """A reordered and cropped cache has no values beyond the lengths of its sequences."""
    module, _, pages = made(device, LAYERS["no RoPE"])
    _, cache = module(tokens(device, 90), pages)
    cache = cache.reorder([1, 2, 0]).crop([5, 0, 70])
    for x in in_slots(cache):
        assert [int(row.any(axis=(0, 2)).sum()) for row in x] == [5, 0, 70]


def test_swapped_pages_change_outputs(device):
    """Control: exchanging the pages of two sequences changes their outputs, but not the output of
    the third.
    """
    module, _, pages = made(device, LAYERS["many heads"])
    _, cache = module(tokens(device, 40), pages)
    other = replace(cache, page_table=cache.copy().reorder([1, 0, 2]).page_table)
    token = tokens(device, 1)
    right, wrong = (
        mha_tt.download(module(token, cache_of_row)[0]) for cache_of_row in (cache, other)
    )
    assert not np.array_equal(right[:2], wrong[:2])
    assert np.array_equal(right[2], wrong[2])


def test_copied_pages_have_their_own_storage(device):
    """A copy of a paged cache keeps its contents during steps from the cache, and continues
    like it.
    """
    module, _, pages = made(device, LAYERS["many heads"])
    _, cache = module(tokens(device, 40), pages)
    copied, other, token = cache.copy(), cache.copy(), tokens(device, 1)
    before = in_slots(copied)
    expected, _ = module(token, cache)
    assert all(map(np.array_equal, in_slots(copied), before))
    assert np.array_equal(mha_tt.download(module(token, copied)[0]), mha_tt.download(expected))
    with rejects("cache", hint="cache.copy()"):
        cache.reorder([1, 0, 2])
    other.reorder([1, 0, 2])  # which has the same pages
    with rejects("cache", hint="cache.copy()"):
        module(token, other)


def test_unsupported_page_operations_raise(device):
    """Operations that pages do not support raise an error that names the argument."""
    module, slots, pages = made(device, LAYERS["no RoPE"])
    key = mha_tt.upload(np.ones((3, 2, 1, 32)), device=device)
    with rejects("indices", indices=[0, 0, 2]):
        pages.reorder([0, 0, 2])
    with rejects("indices", indices=[0, 0, 1, 1, 2, 2]):
        pages.repeat(2)
    with rejects("indices", indices=[0, 1, 3]):
        pages.reorder([0, 1, 3])
    with rejects("capacity", capacity=100):
        pages.grow(100)
    with rejects("lengths + new tokens", lengths=[0, 0, 0], new_lengths=[121, 121, 121]):
        module(tokens(device, 121), pages)
    with rejects_type("cache", "PagedKVCache"):
        mha_tt.append_to_cache(pages, key, key)
    with rejects("page_size", page_size=48):
        module.init_cache(3, CAPACITY, page_size=48)
    with rejects_type("dtype", "dtype=float32"):
        module.init_cache(3, CAPACITY, ttnn.float32, page_size=32)
    with rejects("batch_size", batch_size=0):
        module.init_cache(0, CAPACITY, page_size=32)
    with rejects("x", {"x.shape": (3, 1, 64), "cache.lengths.shape": (2,)}):
        module(tokens(device, 1), module.init_cache(2, CAPACITY, page_size=32))
    assert slots.pages is None

"""Features of torch alone: graphs, fake tensors, transforms, devices and storage, with correct
values and errors.
"""

import copy
import functools
import io
import itertools
import math
import pickle
import random
import shutil

import numpy as np
import pytest
import torch
import torch.utils._pytree as pytree
from helpers.heads import fused_attention, plain_attention
from helpers.input_errors import rejects
from helpers.kernels import attend_with, contained
from helpers.samples import sample
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import mha_torch
from mha_spec import (
    Alibi,
    AttentionSpec,
    DynamicScaling,
    Gate,
    Latent,
    LongRopeScaling,
    Norm,
    ProportionalScaling,
    RelativeBias,
    Rope,
    Temperature,
    YarnScaling,
)
from mha_torch import stages
from mha_torch.arrays import values_of

FORMS = {
    "plain": plain_attention(mha_torch),
    "fused": fused_attention(mha_torch),
}
KINDS = ("MultiHeadAttention", "MultiHeadSelfAttention", "MultiHeadAttentionWithCache")
both_forms = pytest.mark.parametrize("form", FORMS)
# torch warns that its tracer, which its forward mode also uses, is old, and that a kernel is mapped
# in a loop.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning"),
]


def module(kind, *, seed=0, device=None, dtype=None, **fields):
    torch.manual_seed(seed)
    return getattr(mha_torch, kind)(
        AttentionSpec(16, 4, num_kv_heads=2, **fields), device=device, dtype=dtype
    )


def tokens(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ---- Known and unknown values --------------------------------------------------------------------


def test_values_of_tensors_are_known():
    """values_of returns the values of a tensor, also of a scalar and an empty one."""
    assert values_of(torch.tensor([[1, 2], [3, 4]])) == [[1, 2], [3, 4]]
    assert values_of(torch.tensor(True)) is True
    assert values_of(torch.zeros(0)) == []


def fake_tensor(shape_env=None):
    with FakeTensorMode(shape_env=shape_env):
        return torch.ones(3)


UNKNOWN = {
    "meta": lambda: torch.ones(3, device="meta"),
    "fake": fake_tensor,
    "fake-with-symbols": lambda: fake_tensor(
        ShapeEnv(allow_dynamic_output_shape_ops=True, allow_scalar_outputs=True)
    ),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_values_of_fake_tensors_are_unknown(name):
    """values_of returns None for tensors on the meta device and for fake tensors."""
    x = UNKNOWN[name]()
    assert values_of(x) is None
    assert values_of(x.any()) is None


@pytest.mark.parametrize("transform", [torch.func.vmap, torch.func.functionalize])
def test_values_under_transforms_are_unknown(transform):
    """values_of returns None under vmap and functionalize."""
    known = []

    def look(x):
        known.append(values_of(x))
        return x

    transform(look)(torch.ones(3, 2))
    assert known == [None]


def cached_call(layer, lengths):
    cache = mha_torch.KVCache(
        torch.zeros(2, 2, 6, 4), torch.zeros(2, 2, 6, 4), torch.zeros(2, dtype=torch.int32)
    )
    return layer(torch.ones(2, 3, 16), cache, new_lengths=lengths)[0]


CALLS = {
    "padding": (
        "MultiHeadSelfAttention",
        lambda layer, lengths: layer(torch.ones(2, 3, 16), key_padding_lengths=lengths),
    ),
    "weights-and-mask": (
        "MultiHeadAttention",
        lambda layer, lengths: layer(
            torch.ones(2, 3, 16),
            mask=torch.ones(3, 3).triu(1).bool(),
            key_padding_lengths=lengths,
            need_weights=True,
        )[0],
    ),
    "cache": ("MultiHeadAttentionWithCache", cached_call),
}


@pytest.mark.parametrize(
    "lengths", [lambda: [1, 3], lambda: torch.tensor([1, 3])], ids=["list", "tensor"]
)
@pytest.mark.parametrize("name", CALLS)
def test_fake_tensors_have_output_shape(name, lengths):
    """Layers run on fake tensors, with lengths in a list or a tensor, and give the shape of the
    output.
    """
    kind, function = CALLS[name]
    with FakeTensorMode():
        assert function(module(kind), lengths()).shape == (2, 3, 16)


@pytest.mark.parametrize("name", CALLS)
def test_meta_tensors_have_output_shape(name):
    """Layers run on the meta device and give the shape of the output."""
    kind, function = CALLS[name]
    with torch.device("meta"):
        assert function(module(kind), torch.tensor([1, 3])).shape == (2, 3, 16)


def test_vmap_over_lengths_matches_loop():
    """vmap over inputs and lengths matches a loop."""
    layer, x, lengths = (
        module("MultiHeadSelfAttention"),
        tokens(3, 2, 5, 16),
        torch.tensor([[5, 2], [0, 1], [3, 3]]),
    )
    mapped = torch.func.vmap(lambda x, lengths: layer(x, key_padding_lengths=lengths))(x, lengths)
    by_sequence = torch.stack(
        [layer(*pair[:1], key_padding_lengths=pair[1]) for pair in zip(x, lengths, strict=True)]
    )
    torch.testing.assert_close(mapped, by_sequence)


@pytest.mark.parametrize(
    "new_lengths", [None, torch.tensor([[1, 2], [0, 2], [2, 2]])], ids=["all", "ragged"]
)
@torch.no_grad()
def test_vmap_over_cached_step_matches_batch(new_lengths):
    """vmap over tokens, caches and new lengths matches one batch, in outputs and caches."""
    layer, x = module("MultiHeadAttentionWithCache", rope=Rope(100.0)), tokens(3, 2, 2, 16)
    _, cache = layer(
        tokens(6, 3, 16, seed=2), layer.init_cache(6, 6), new_lengths=[0, 1, 2, 3, 3, 1]
    )
    mapped_cache = pytree.tree_map(lambda leaf: leaf.unflatten(0, (3, 2)), cache)
    dims = (0, 0, None if new_lengths is None else 0)
    mapped, after = torch.func.vmap(
        lambda x, cache, new: layer(x, cache, new_lengths=new), in_dims=dims
    )(x, mapped_cache, new_lengths)
    flat = None if new_lengths is None else new_lengths.flatten()
    expected, expected_after = layer(x.flatten(0, 1), copy.deepcopy(cache), new_lengths=flat)
    torch.testing.assert_close(mapped.flatten(0, 1), expected)
    for mapped_slots, slots in zip(
        pytree.tree_leaves(after), pytree.tree_leaves(expected_after), strict=True
    ):
        torch.testing.assert_close(mapped_slots.flatten(0, 1), slots)


@pytest.mark.parametrize("new_lengths", [None, [1, 0, 3]], ids=["all", "ragged"])
@torch.no_grad()
def test_unknown_lengths_write_in_place(monkeypatch, new_lengths):
    """If lengths are not available, as on an accelerator, steps write into the storage of the
    cache, with the outputs and contents of known lengths; the last step, without enough free slots,
    returns NaN and changes nothing.
    """
    layer, x = module("MultiHeadAttentionWithCache", rope=Rope(100.0)), tokens(3, 3, 16)
    _, cache = layer(tokens(3, 2, 16, seed=2), layer.init_cache(3, 6), new_lengths=[0, 1, 2])
    expected, expected_cache = layer(x, cache.copy(), new_lengths=new_lengths)
    for holder in (mha_torch.cache, mha_torch.checks, mha_torch.kernels.sdpa):
        monkeypatch.setattr(holder, "values_at_hand", lambda x: None)
    storage = cache.keys.data_ptr()
    output, after = layer(x, cache, new_lengths=new_lengths)
    torch.testing.assert_close(output, expected)
    for name in ("keys", "values", "lengths"):
        assert torch.equal(getattr(after, name), getattr(expected_cache, name))
    assert after.keys.data_ptr() == storage
    full = layer(tokens(3, 5, 16), layer.init_cache(3, 6))[1]
    contents = full.copy()
    output, after = layer(x, full)
    assert output.isnan().all()
    assert torch.equal(after.keys, contents.keys)
    assert after.lengths.tolist() == [5, 5, 5]


@torch.no_grad()
def test_lengths_may_be_copied_back():
    """A cache whose lengths are set to the lengths of the step's cache is not written over:
    captured graphs use one cache.
    """
    layer, x = module("MultiHeadAttentionWithCache"), tokens(2, 4, 16)
    expected, _ = layer(x, layer.init_cache(2, 8))
    cache, outputs = layer.init_cache(2, 8), []
    for step in x.split(1, dim=1):
        output, after = layer(step, cache)
        cache.lengths.copy_(after.lengths)
        outputs.append(output)
    torch.testing.assert_close(torch.cat(outputs, dim=1), expected)


@pytest.mark.parametrize("without_gradients", [torch.no_grad, torch.inference_mode])
def test_steps_keep_what_gradients_need(without_gradients):
    """A step without gradients writes into a copy of a cache whose gradient is still to be
    computed.
    """
    layer, x = module("MultiHeadAttentionWithCache"), tokens(2, 3, 16).requires_grad_()
    output, cache = layer(x, layer.init_cache(2, 8))
    with without_gradients():
        layer(tokens(2, 1, 16), cache)
    output.sum().backward()
    assert x.grad.isfinite().all()


@torch.no_grad()
def test_transforms_leave_an_outer_cache():
    """Under vmap, jvp and with fake tensors, a cache from outside is not written into, and can be
    used again.
    """
    layer, x = module("MultiHeadAttentionWithCache"), tokens(2, 3, 16)
    cache = layer.init_cache(1, 8)
    mapped = torch.func.vmap(lambda x: layer(x, cache)[0])(x[:, None])
    primal, _ = torch.func.jvp(lambda x: layer(x, cache)[0], (x[:1],), (x[:1],))
    with FakeTensorMode(allow_non_fake_inputs=True):
        layer(x[:1], cache)
    assert not cache.keys.any()
    expected, _ = layer(x[:1], cache)
    torch.testing.assert_close(mapped[0], expected)
    torch.testing.assert_close(primal, expected)


@torch.no_grad()
def test_steps_without_writes_are_repeated(monkeypatch):
    """A step of no tokens, and one that raised an error in its last projection, leave the cache
    unchanged.
    """
    layer, x = module("MultiHeadAttentionWithCache"), tokens(2, 3, 16)
    cache = layer.init_cache(2, 8)
    layer(x[:, :0], cache)
    project = layer.out_proj.forward

    def fails(context):
        raise RuntimeError("out of memory")

    layer.out_proj.forward = fails
    with pytest.raises(RuntimeError, match="out of memory"):
        layer(x, cache)
    layer.out_proj.forward = project
    expected, _ = layer(x, layer.init_cache(2, 8))
    torch.testing.assert_close(layer(x, cache)[0], expected)


def test_compiled_heads_may_be_symbolic():
    """One compiled function accepts a different number of heads, which makes it a symbolic size."""
    torch.compiler.reset()
    attend = functools.partial(
        mha_torch.scaled_dot_product_attention, kernel=mha_torch.fused.attend
    )
    compiled = torch.compile(attend, fullgraph=True, backend="eager")
    for num_heads in (2, 4, 6):
        heads = [tokens(1, num_heads, 3, 8), tokens(1, 2, 3, 8), tokens(1, 2, 3, 8)]
        torch.testing.assert_close(compiled(*heads)[0], attend(*heads)[0])


@torch.no_grad()
def test_mapped_overflow_yields_nan():
    """Under vmap, a step without enough free slots returns NaN and keeps its cache; the other one
    is counted.
    """
    layer, x = module("MultiHeadAttentionWithCache"), tokens(2, 1, 2, 16)
    _, cache = layer(tokens(2, 4, 16, seed=2), layer.init_cache(2, 4), new_lengths=[1, 3])
    by_sequence = pytree.tree_map(lambda leaf: leaf[:, None], cache)
    output, after = torch.func.vmap(layer)(x, by_sequence)
    assert output.isnan().all(dim=(1, 2, 3)).tolist() == [False, True]
    assert after.lengths.flatten().tolist() == [3, 3]
    torch.testing.assert_close(after.keys[1, 0], cache.keys[1], rtol=0, atol=0)


@pytest.mark.parametrize("lengths", [[1, 4], [-1, 3]], ids=["too-long", "negative"])
def test_compiled_graph_checks_list_lengths(lengths):
    """Lengths in a list that are negative or too long raise an error in a compiled graph."""
    layer = module("MultiHeadSelfAttention")
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=r"key_padding_lengths', 'lie in 0\.\.3'"):  # torch wraps it
        compiled(tokens(2, 3, 16), key_padding_lengths=lengths)


def test_vmap_caches_values_of_other_width():
    """Under vmap, a cache whose values differ in width from the keys gets the bits of a loop."""
    keys, values = (torch.randn(3, 2, 2, 2, features) for features in (4, 6))

    def append(key, value, new_lengths):
        cache = mha_torch.init_cache(2, 2, 5, 4, value_head_dim=6)
        grown = mha_torch.append_to_cache(cache, key, value, new_lengths=new_lengths)
        return grown.keys, grown.values

    lengths = torch.tensor([[2, 1], [0, 2], [1, 1]])
    actual = torch.func.vmap(append)(keys, values, lengths)
    expected = [append(*inputs) for inputs in zip(keys, values, lengths, strict=True)]
    for ours, theirs in zip(actual, zip(*expected, strict=True), strict=True):
        assert torch.equal(ours, torch.stack(theirs))


def test_length_tensors_share_compiled_graph():
    """Calls with different lengths in tensors compile one graph, and match the uncompiled layer."""
    layer, graphs = module("MultiHeadSelfAttention"), []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    for lengths in ([1, 3], [2, 2], [0, 1], [3, 3]):
        output = compiled(tokens(2, 3, 16), key_padding_lengths=torch.tensor(lengths))
        torch.testing.assert_close(output, layer(tokens(2, 3, 16), key_padding_lengths=lengths))
    assert len(graphs) == 1


@pytest.mark.thorough
@pytest.mark.skipif(
    shutil.which("g++") is None, reason="the default backend calls a compiler of C++"
)
def test_inductor_compiles_sinks_and_mask():
    """Softmax with sinks and a mask, compiled by the default backend, matches the uncompiled
    one.
    """

    def weights_of(scores: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(scores.shape[-1])
        return mha_torch.masked_softmax(scores, (positions > positions[:, None])[None, None], sinks)

    torch.compiler.reset()
    inputs = tokens(2, 4, 9, 9), tokens(4)
    torch.testing.assert_close(
        torch.compile(weights_of, fullgraph=True)(*inputs), weights_of(*inputs)
    )


FEATURES = {
    "partial": {
        "rope": Rope(100.0, rotary_dim=2, rotated="last"),
        "qk_norm": Norm(after_rope=True),
    },
    "sections": {"rope": Rope(100.0, sections=(2, 1, 1)), "head_dim": 8},
    "interleaved-sections": {
        "rope": Rope(100.0, sections=(2, 1, 1), section_order="interleaved"),
        "head_dim": 8,
    },
    "own-sections": {
        "rope": Rope(100.0, sections=(2, 2), section_frequencies="own"),
        "head_dim": 8,
    },
    "dynamic": {"rope": Rope(100.0, scaling=DynamicScaling(2.0, 4)), "sinks": True},
    "longrope": {"rope": Rope(100.0, scaling=LongRopeScaling(2.0, 4, (1.0, 2.0), (3.0, 4.0)))},
    "proportional": {
        "rope": Rope(100.0, scaling=ProportionalScaling(0.5), pairs="interleaved"),
        "window_size": 2,
    },
    "alibi": {"alibi": Alibi(scaled=True), "soft_cap": 2.0, "temperature": Temperature(2)},
    "relative-bias": {
        "relative_bias": RelativeBias(8, 9),
        "chunk_size": 3,
        "gate": Gate(per_head=True),
    },
    "latent": {
        "num_kv_heads": 4,
        "latent": Latent(5, 2, 3),
        "rope": Rope(100.0, rotary_dim=2, rotated="last", scaling=YarnScaling(4.0, 8)),
    },
}


@sample(name=["latent"])
@torch.no_grad()
@pytest.mark.parametrize("name", FEATURES)
def test_every_feature_is_one_compiled_graph(name):
    """Each feature compiles without graph breaks and matches the uncompiled layer in float64."""
    fields = FEATURES[name]
    layer = mha_torch.MultiHeadSelfAttention(AttentionSpec(16, 4, **fields), dtype=torch.float64)
    x = tokens(2, 6, 16).double()
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    torch.testing.assert_close(
        compiled(x, is_causal=True), layer(x, is_causal=True), rtol=1e-12, atol=1e-12
    )


# ---- Contained kernels ---------------------------------------------------------------------------

CONTAINED = {
    "plain": contained["torch"](lambda *arguments: stages.attend(*arguments)[0]),
    "fused": contained["torch"](mha_torch.fused.attend),
}
HIDING = (
    "nothing",
    "causal",
    "padding",
    "padding-causal",
    "mask",
    "mask-of-keys",
    "bias",
    "everything",
)


def drawn_problem(seed, hiding):
    """Return split heads, the options that hide keys, and the hidden keys, (B, N, T, S)."""
    rng, draw = random.Random(seed), torch.Generator().manual_seed(seed)
    num_kv_heads, batch_size = rng.choice([1, 2]), rng.choice([1, 3])
    num_heads = num_kv_heads * rng.choice([1, 2])
    num_queries, num_keys = rng.choice([1, 2, 5, 17, 40]), rng.choice([1, 3, 16, 19, 41, 530])
    head_dim, dtype = (
        rng.choice([4, 64]),
        rng.choice([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    )
    shapes = [(num_heads, num_queries), (num_kv_heads, num_keys), (num_kv_heads, num_keys)]
    arrays = [
        torch.randn(batch_size, *shape, head_dim, generator=draw).to(dtype) for shape in shapes
    ]
    hidden = torch.zeros(batch_size, num_heads, num_queries, num_keys, dtype=torch.bool)
    options = {}
    if hiding in ("causal", "padding-causal", "everything"):
        options["is_causal"] = True
        hidden |= torch.arange(num_keys) > torch.arange(num_queries)[:, None]
    if hiding in ("padding", "padding-causal", "everything"):
        options["key_padding_lengths"] = [rng.randint(0, num_keys) for _ in range(batch_size)]
        hidden |= (
            torch.arange(num_keys)
            >= torch.tensor(options["key_padding_lengths"])[:, None, None, None]
        )
    if hiding in ("mask", "everything"):
        shape = rng.choice(
            [(num_queries, num_keys), tuple(hidden.shape), (1, num_heads, num_queries, 1)]
        )
        options["mask"] = torch.rand(shape, generator=draw) < 0.5
    if hiding == "mask-of-keys":
        options["mask"] = torch.rand(batch_size, 1, 1, num_keys, generator=draw) < 0.5
    if hiding in ("bias", "everything"):
        shape = rng.choice([(num_queries, num_keys), (1, num_heads, 1, num_keys)])
        options["bias"] = torch.randn(shape, generator=draw).to(dtype)
        options["bias"][torch.rand(shape, generator=draw) < 0.3] = -torch.inf
        hidden |= options["bias"].isneginf()
    hidden |= options.get("mask", torch.tensor(False))
    return arrays, options, hidden


def spoil_some(arrays, hidden, seed, value):
    """Return copies with a value in some tokens or one of their features, and the rows that depend
    on it, (B, N, T).
    """
    rng, draw = random.Random(seed), torch.Generator().manual_seed(seed)
    share, one_feature = rng.choice([0.02, 0.3, 1.0]), rng.random() < 0.5
    wrong = [
        (torch.rand(x.shape[:3], generator=draw) < share) & (rng.random() < 0.5) for x in arrays
    ]
    arrays = [x.clone() for x in arrays]
    for x, where in zip(arrays, wrong, strict=True):
        x[where] = (
            torch.where(torch.arange(x.shape[3]) == 0, value, x[where]) if one_feature else value
        )
    wrong_keys = (wrong[1] | wrong[2]).repeat_interleave(
        hidden.shape[1] // wrong[1].shape[1], dim=1
    )
    rows = (wrong[0] | (wrong_keys[:, :, None] & ~hidden).any(dim=-1)) & ~hidden.all(dim=-1)
    return arrays, rows


def assert_spoilt(actual, expected, rows):
    """Check that exactly these rows are non-finite, and that all others equal the expected ones bit
    for bit.
    """
    __tracebackhide__ = True
    assert torch.equal(~actual.isfinite().all(dim=-1), rows)
    assert torch.equal(actual[~rows], expected[~rows])


@both_forms
@pytest.mark.parametrize("hiding", HIDING)
def test_nan_reaches_only_attending_rows(form, hiding):
    """In a contained kernel, NaN spoils exactly the rows that attend to it; all others keep their
    bits.
    """
    for seed in range(20):
        arrays, options, hidden = drawn_problem(seed, hiding)
        spoilt, rows = spoil_some(arrays, hidden, seed, math.nan)
        expected = attend_with(CONTAINED[form], *arrays, **options)
        assert_spoilt(attend_with(CONTAINED[form], *spoilt, **options), expected, rows)


@sample(12)
@both_forms
@pytest.mark.parametrize("value", [math.inf, -math.inf])
@pytest.mark.parametrize("hiding", HIDING[1:])
def test_inf_reaches_only_attending_rows(form, hiding, value):
    """Infinity spoils only rows that attend to it, if its score is not -inf; all others keep their
    bits.
    """
    for seed in range(10):
        arrays, options, hidden = drawn_problem(seed, hiding)
        spoilt, rows = spoil_some(arrays, hidden, seed, value)
        expected = attend_with(CONTAINED[form], *arrays, **options)
        actual = attend_with(CONTAINED[form], *spoilt, **options)
        assert torch.equal(actual[~rows], expected[~rows])
        if not torch.equal(~actual.isfinite().all(dim=-1), rows):
            # An infinite key whose score is -inf may have weight 0, as in the formula.
            assert (actual.isfinite().all(dim=-1) | rows).all()


@both_forms
@pytest.mark.parametrize("hiding", HIDING[1:])
def test_hidden_nan_reaches_no_gradient(form, hiding):
    """Hidden NaN changes no bit of the context or of any gradient."""
    for seed in range(10):
        arrays, options, hidden = drawn_problem(seed, hiding)
        unseen = (
            hidden.all(dim=2).unflatten(1, (arrays[1].shape[1], -1)).all(dim=2)[..., None]
        )  # (B, K, S, 1)
        empty = hidden.all(dim=-1)[..., None]
        unused = (empty, unseen, unseen)
        spoilt = [x.masked_fill(where, math.nan) for x, where in zip(arrays, unused, strict=True)]
        results = []
        for inputs in (arrays, spoilt):
            leaves = [x.clone().requires_grad_() for x in inputs]
            context = attend_with(CONTAINED[form], *leaves, **options)
            results.append((context.detach(), *torch.autograd.grad(context.sum(), leaves)))
        for expected, actual in zip(*results, strict=True):
            assert torch.equal(actual, expected)


@both_forms
def test_visible_nan_reaches_gradients(form):
    """Gradients of outputs before a NaN key are finite, and the gradients of queries that attend to
    it are NaN.
    """
    q, k, v = (tokens(1, 2, 5, 4, seed=seed) for seed in range(3))
    k[:, :, 3] = math.nan
    leaves = [x.requires_grad_() for x in (q, k, v)]
    context = attend_with(CONTAINED[form], *leaves, is_causal=True)
    first, _ = torch.autograd.grad(context[:, :, :3].square().sum(), leaves[:2], retain_graph=True)
    assert first.isfinite().all()
    whole, _ = torch.autograd.grad(context.square().sum(), leaves[:2])
    assert whole[:, :, 3:].isnan().all()


@both_forms
def test_row_of_overflowed_scores_is_nan(form):
    """A row whose scores all overflow to -inf is NaN instead of 0, and other rows are not."""
    q, k, v = (
        torch.full((1, 1, 2, 4), 1e30),
        torch.full((1, 1, 3, 4), -1e30),
        torch.ones(1, 1, 3, 4),
    )
    q[:, :, 0] = 0.0
    context = attend_with(CONTAINED[form], q, k, v)
    assert context.isnan().all(dim=-1).tolist() == [[[False, True]]]


@both_forms
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_non_finite_bias_spoils_its_row(form, value):
    """NaN or infinity in a bias spoils its row, and nothing if its key is hidden."""
    q, k, v = (tokens(1, 2, 5, 4, seed=seed) for seed in range(3))
    bias = torch.zeros(5, 5)
    expected = attend_with(CONTAINED[form], q, k, v, bias=bias, is_causal=True)
    bias[1, 4] = bias[3, 2] = value  # the first is hidden
    rows = torch.zeros(1, 2, 5, dtype=torch.bool)
    rows[:, :, 3] = True
    assert_spoilt(attend_with(CONTAINED[form], q, k, v, bias=bias, is_causal=True), expected, rows)


def compiled(function):
    torch.compiler.reset()
    return torch.compile(function, fullgraph=True, backend="eager")


def mapped(function):
    def call(*arrays, **options):
        return torch.func.vmap(lambda *arrays: function(*arrays, **options))(
            *(x[None] for x in arrays)
        )[0]

    return call


@sample(hiding=["padding-causal"])
@both_forms
@pytest.mark.parametrize("mode", [compiled, mapped])
@pytest.mark.parametrize("hiding", ["padding-causal", "mask", "everything"])
def test_traced_nan_reaches_only_its_rows(form, mode, hiding):
    """In compiled graphs and under vmap, NaN spoils exactly the rows that attend to it."""
    for seed in (0, 3):
        arrays, options, hidden = drawn_problem(seed, hiding)
        function = mode(functools.partial(attend_with, CONTAINED[form]))
        spoilt, rows = spoil_some(arrays, hidden, 1, math.nan)
        assert_spoilt(function(*spoilt, **options), function(*arrays, **options), rows)


def test_nan_weights_spoil_every_output():
    """With a contained kernel, NaN in the query projection makes all outputs NaN, for 3 to 700
    tokens.
    """
    layer = module("MultiHeadSelfAttention")
    layer.kernel = CONTAINED["fused"]
    torch.nn.init.constant_(layer.q_proj.weight, math.nan)
    for num_tokens in (3, 16, 700):
        assert layer(tokens(1, num_tokens, 16)).isnan().all()


@pytest.mark.parametrize("need_weights", [False, True], ids=["fused", "plain"])
def test_weight_gradients_ignore_hidden_nan(need_weights):
    """NaN in padded keys changes no bit of the gradients of weights."""
    layer, x, key = module("MultiHeadAttention"), tokens(2, 3, 16), tokens(2, 5, 16, seed=2)
    results = []
    for value in (1.0, math.nan):
        key[0, 2:] = value
        output, _ = layer(x, key, key_padding_lengths=[2, 5], need_weights=need_weights)
        results.append(torch.autograd.grad(output.square().sum(), list(layer.parameters())))
    for expected, actual in zip(*results, strict=True):
        assert torch.equal(actual, expected)


def test_nan_padding_in_cache_has_no_effect():
    """NaN in right padding changes no bit of outputs, of a step after it or of gradients."""
    layer, x = module("MultiHeadAttentionWithCache"), tokens(2, 4, 16)
    results = []
    for value in (1.0, math.nan):
        x[0, 2:] = value
        output, cache = layer(x, layer.init_cache(2, 6), new_lengths=[2, 4])
        step, _ = layer(tokens(2, 1, 16, seed=2), cache)
        results.append(
            (
                output,
                step,
                *torch.autograd.grad((output.sum() + step.sum()), list(layer.parameters())),
            )
        )
    for expected, actual in zip(*results, strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("counts", [[3, 3], [1, 3]], ids=["even", "ragged"])
@torch.no_grad()
def test_nan_in_free_slots_has_no_effect(counts):
    """With a contained kernel, NaN in free slots changes no bit of a step, compiled or not."""
    layer = module("MultiHeadAttentionWithCache")
    layer.kernel = CONTAINED["fused"]
    _, cache = layer(tokens(2, 3, 16), layer.init_cache(2, 6), new_lengths=counts)
    free = torch.arange(6) >= cache.lengths[:, None]
    keys, values = (
        x.masked_fill(free[:, None, :, None], math.nan) for x in (cache.keys, cache.values)
    )
    spoilt = mha_torch.KVCache(keys, values, cache.lengths)
    x = tokens(2, 1, 16, seed=2)
    for call in (layer, compiled(layer)):
        expected, _ = call(x, copy.deepcopy(cache))
        assert torch.equal(call(x, copy.deepcopy(spoilt))[0], expected)


# ---- Derivatives ---------------------------------------------------------------------------------


def layers_of(form):
    layer = module("MultiHeadAttention").double()
    return lambda x: layer(x, is_causal=True, need_weights=form == "plain")[0]


def test_fused_path_supports_forward_mode():
    """The forward-mode derivative of the fused path matches the plain path."""
    x, tangent = tokens(1, 4, 16).double(), tokens(1, 4, 16, seed=2).double()
    actual, expected = (
        torch.func.jvp(layers_of(form), (x,), (tangent,))[1] for form in ("fused", "plain")
    )
    torch.testing.assert_close(actual, expected)
    assert actual.abs().max() > 0


def test_fused_path_supports_jacfwd():
    """The forward-mode Jacobian of the fused path matches the reverse-mode one of the plain
    path.
    """
    x = tokens(1, 3, 16).double()
    torch.testing.assert_close(
        torch.func.jacfwd(layers_of("fused"))(x), torch.func.jacrev(layers_of("plain"))(x)
    )


def test_fused_path_supports_hessian():
    """The Hessian of the fused path matches the plain path."""
    x = tokens(1, 2, 16).double()
    layers = [layers_of(form) for form in ("fused", "plain")]
    actual, expected = (
        torch.func.hessian(lambda x, layer=layer: layer(x).square().sum())(x) for layer in layers
    )
    torch.testing.assert_close(actual, expected)


def test_plain_path_supports_double_backward():  # see the docstring of the fused path
    """The gradient of a squared gradient exists on the plain path and is not 0."""
    x = tokens(1, 3, 16).requires_grad_()
    (gradient,) = torch.autograd.grad(layers_of("plain")(x.double()).sum(), x, create_graph=True)
    (penalty,) = torch.autograd.grad(gradient.square().sum(), x)
    assert penalty.abs().max() > 0


# ---- Caches as data, and their storage -----------------------------------------------------------


def filled_cache(layer, counts=(2, 2, 2), capacity=6):
    with torch.no_grad():
        return layer(
            tokens(len(counts), 4, 16),
            layer.init_cache(len(counts), capacity),
            new_lengths=list(counts),
        )[1]


@pytest.mark.parametrize("new_lengths", [None, [1, 1, 1]], ids=["all", "ragged"])
@pytest.mark.parametrize("counts", [(2,), (4,)], ids=str)
@torch.no_grad()
def test_expanded_cache_is_copied(counts, new_lengths):
    """A step over a cache whose sequences share storage matches a repeated cache and leaves the
    original unchanged.
    """
    layer, x = module("MultiHeadAttentionWithCache"), tokens(3, 1, 16, seed=5)
    cache = filled_cache(layer, counts)
    beams = mha_torch.KVCache(
        cache.keys.expand(3, -1, -1, -1),
        cache.values.expand(3, -1, -1, -1),
        cache.lengths.repeat(3),
    )
    before = copy.deepcopy(cache)
    expected, _ = layer(x, cache.repeat(3), new_lengths=new_lengths)
    actual, _ = layer(x, beams, new_lengths=new_lengths)
    assert torch.equal(actual, expected)
    assert torch.equal(cache.keys, before.keys)


@torch.no_grad()
def test_cache_with_shared_heads_is_copied():
    """Appending to a cache whose heads share storage stores different keys for all heads."""
    cache = mha_torch.KVCache(
        *(torch.zeros(1, 1, 4, 2).expand(1, 3, 4, 2) for _ in range(2)), torch.zeros(1).int()
    )
    key = tokens(1, 3, 2, 2)
    assert torch.equal(mha_torch.append_to_cache(cache, key, key).keys[:, :, :2], key)


@pytest.mark.parametrize("counts", [(2, 2, 2), (1, 4, 0)], ids=str)
def test_inference_cache_works_outside(counts):
    """A cache made in inference mode can be used outside of it, with and without gradients."""
    layer, x = module("MultiHeadAttentionWithCache"), tokens(3, 1, 16, seed=5)
    expected, _ = layer(x, filled_cache(layer, counts))
    for mode in (torch.no_grad, torch.enable_grad):
        with torch.inference_mode():
            _, cache = layer(tokens(3, 4, 16), layer.init_cache(3, 6), new_lengths=list(counts))
        with mode():
            output, _ = layer(x, cache)
        torch.testing.assert_close(output, expected)


def test_cache_is_pytree_of_three_tensors():
    """A cache is flattened into keys, values and lengths, and restored as a KVCache."""
    cache = filled_cache(module("MultiHeadAttentionWithCache"))
    leaves, structure = pytree.tree_flatten(cache)
    assert [tuple(leaf.shape) for leaf in leaves] == [(3, 2, 6, 4), (3, 2, 6, 4), (3,)]
    assert isinstance(pytree.tree_unflatten(leaves, structure), mha_torch.KVCache)


def test_mark_of_a_cache_is_not_its_value():
    """A step without gradients marks the cache that it wrote over, besides its value; a graph marks
    nothing.
    """
    layer, x = module("MultiHeadAttentionWithCache").eval(), tokens(3, 1, 16, seed=5)
    caches = {
        mode: layer.init_cache(3, 6)
        for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode)
    }
    for mode, cache in caches.items():
        with mode():
            layer(x, cache)
        assert cache.is_written_over == (mode is not torch.enable_grad), mode

    cache = caches[torch.no_grad]
    leaves, structure = pytree.tree_flatten(cache)
    stored = io.BytesIO()
    torch.save(cache, stored)
    stored.seek(0)
    copies = [
        copy.copy(cache),
        copy.deepcopy(cache),
        pickle.loads(pickle.dumps(cache)),
        torch.load(stored),
    ]
    copies.append(pytree.tree_unflatten(leaves, structure))
    for copied in copies:
        assert torch.equal(copied.keys, cache.keys)
        assert copied.lengths.tolist() == [0, 0, 0]

    torch.compiler.reset()
    compiled, cache = torch.compile(layer, fullgraph=True, backend="eager"), layer.init_cache(3, 6)
    with torch.no_grad():
        actual, expected = compiled(x, cache)[0], layer(x, layer.init_cache(3, 6))[0]
    torch.testing.assert_close(actual, expected)
    assert not cache.is_written_over


def test_appended_latents_mark_their_cache():
    """Appending to a cache of latents marks the cache whose storage is reused, not the new one."""
    cache = mha_torch.init_latent_cache(1, 4, kv_rank=5, rope_dim=3)
    with torch.no_grad():
        after = mha_torch.append_to_latent_cache(cache, torch.ones(1, 1, 2, 8))
    assert cache.is_written_over
    assert not after.is_written_over


def test_cached_step_can_be_exported():
    """An exported step matches the module, in output, keys and lengths."""
    layer = module("MultiHeadAttentionWithCache").eval()
    cache, x = filled_cache(layer), tokens(3, 1, 16, seed=5)
    with torch.no_grad():
        exported = torch.export.export(layer, (x, copy.deepcopy(cache)), strict=False).module()
        actual, after = exported(x, copy.deepcopy(cache))
        expected, expected_after = layer(x, copy.deepcopy(cache))
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(after.keys, expected_after.keys)
    assert after.lengths.tolist() == [3, 3, 3]


def test_relative_bias_exports_any_length():
    """A layer with a relative bias, exported with a dynamic length, matches the module for 5 and 23
    tokens.
    """
    spec = AttentionSpec(16, 4, relative_bias=RelativeBias(8, 8))
    layer, x = mha_torch.MultiHeadSelfAttention(spec).eval(), tokens(2, 5, 16)
    torch.nn.init.normal_(layer.relative_bias)
    with torch.no_grad():
        length = torch.export.Dim("length", min=2, max=100)
        exported = torch.export.export(layer, (x,), dynamic_shapes={"x": {1: length}}).module()
        for count in (5, 23):
            x = tokens(2, count, 16, seed=count)
            torch.testing.assert_close(exported(x), layer(x))


def test_saved_cache_loads_with_weights_only():
    """A saved cache is loaded bit for bit with weights_only=True."""
    cache, file = filled_cache(module("MultiHeadAttentionWithCache")), io.BytesIO()
    torch.save(cache, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert isinstance(loaded, mha_torch.KVCache)
    for leaf, expected in zip(pytree.tree_leaves(loaded), pytree.tree_leaves(cache), strict=True):
        assert torch.equal(leaf, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_module_cache_dtype_under_autocast(dtype):
    """Under autocast, the cache of a float32 module is bfloat16 and the cache of a float64 module
    is float64; both fit its tokens.
    """
    layer, x = module("MultiHeadAttentionWithCache", dtype=dtype), tokens(2, 3, 16).to(dtype)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        cache = layer.init_cache(2, 6)
        for chunk in x.split([2, 1], dim=1):
            _, cache = layer(chunk, cache)
    assert cache.keys.dtype == (torch.bfloat16 if dtype == torch.float32 else torch.float64)
    assert cache.lengths.tolist() == [3, 3]


# ---- Devices -------------------------------------------------------------------------------------


def on_meta(x):
    return x.to("meta")


ELSEWHERE = {
    "key": lambda f, q, m: f(q, on_meta(q), q),
    "value": lambda f, q, m: f(q, q, on_meta(q)),
    "mask": lambda f, q, m: f(q, q, q, mask=on_meta(m)),
    "bias": lambda f, q, m: f(q, q, q, bias=on_meta(m.float())),
}


@both_forms
@pytest.mark.parametrize("name", ELSEWHERE)
def test_arrays_on_other_device_raise(form, name):
    """A key, value, mask or bias on the wrong device raises an error that names the argument."""
    with rejects(name, expected=...):
        ELSEWHERE[name](FORMS[form], torch.ones(1, 2, 3, 4), torch.zeros(3, 3, dtype=torch.bool))


@pytest.mark.parametrize("kind", KINDS[:2])
def test_layer_input_on_other_device_raises(kind):
    """An input on a different device than the layer raises an error."""
    with rejects("the input of q_proj", {"the input of q_proj.device": ..., "expected": ...}):
        module(kind)(torch.ones(1, 3, 16, device="meta"))


def test_cache_on_other_device_raises():
    """A cache on a different device than the layer raises an error."""
    layer = module("MultiHeadAttentionWithCache")
    cache = mha_torch.init_cache(1, 2, 4, 4, device="meta")
    with rejects("cache.keys", {"cache.keys.device": ..., "expected": ...}):
        layer(torch.ones(1, 3, 16), cache)


# ---- Memory of masks -----------------------------------------------------------------------------


def peak_nbytes(make):
    """Return the peak allocation while something is created, and its size."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        made = make()
    events = [
        event.nbytes()
        for event in profile.profiler.kineto_results.events()
        if event.name() == "[memory]"
    ]
    return max(itertools.accumulate(events)), made.nbytes


MASKS = {
    "causal": lambda: mha_torch.create_causal_mask(1024),
    "padding": lambda: mha_torch.create_padding_mask(list(range(0, 1024, 2)), 1024),
    "attention": lambda: mha_torch.create_attention_mask(1024),
    "attention-causal": lambda: mha_torch.create_attention_mask(1024, is_causal=True),
    "attention-padding": lambda: mha_torch.create_attention_mask(
        1024, key_padding_lengths=[5, 1024]
    ),
    "attention-both": lambda: mha_torch.create_attention_mask(
        1024, is_causal=True, key_padding_lengths=[700]
    ),
    "with-cache": lambda: mha_torch.create_causal_mask_with_cache(512, 1024, 512),
    "window": lambda: mha_torch.create_sliding_window_mask(1024, window_size=100),
    "cache": lambda: mha_torch.create_cache_mask([5, 100], 512, 1024),
}


@pytest.mark.parametrize("name", MASKS)
def test_mask_creation_needs_little_memory(name):
    """Creating a mask of at least 512 KiB allocates at most 1.5 times its size."""
    peak, size = peak_nbytes(MASKS[name])
    assert size >= 2**19
    assert size <= peak <= 1.5 * size


def test_numpy_lengths_are_accepted():
    """Lengths in a NumPy array give the bits of a list."""
    layer, x = module("MultiHeadSelfAttention"), tokens(2, 3, 16)
    expected = layer(x, key_padding_lengths=[1, 3])
    assert torch.equal(layer(x, key_padding_lengths=np.array([1, 3])), expected)

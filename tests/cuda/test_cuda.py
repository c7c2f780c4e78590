"""mha_torch on a GPU, which CI does not have: only `make test-cuda` runs these tests."""

import warnings

import numpy as np
import pytest
import torch
from helpers.heads import fused_attention, plain_attention

import mha_torch
from mha_spec import Alibi, AttentionSpec, Rope
from mha_torch import stages
from mha_torch.kernels import flex
from mha_torch.kernels.nonfinite import contained
from mha_torch.masks import Mask
from mha_torch.scores import Scores

DEVICE = torch.device("cuda")
HALVES = [torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
SHAPE = (2, 4, 2, 64)  # sequences, heads, heads of keys, width
SMALL, LARGE = 200, 2048  # tokens: below and above the number from which FlexAttention is faster

FEATURES = {
    "plain": {},
    "causal": {"is_causal": True},
    "lengths": {"key_padding_lengths": [1.0, 0.4]},
    "causal-lengths": {"is_causal": True, "key_padding_lengths": [0.7, 1.0]},
    "window": {"is_causal": True, "spec": {"window_size": 60}},
    "chunk": {"is_causal": True, "spec": {"chunk_size": 64}},
    "soft-cap": {"is_causal": True, "spec": {"soft_cap": 5.0}},
    "alibi": {"is_causal": True, "spec": {"alibi": Alibi()}},
    "sinks": {"is_causal": True, "spec": {"sinks": True}},
    "segments": {"is_causal": True, "segment_ids": 5},
    "mask": {"mask": 0.3},
    "bias": {"bias": True},
}


def problem(feature, seq_len, dtype, head_dim=SHAPE[3]):
    """Return split heads, and the keywords of both forms of attention."""
    batch_size, num_heads, num_kv_heads, _ = SHAPE
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(DEVICE, dtype)

    query, key, value = (
        draw(batch_size, n, seq_len, head_dim) for n in (num_heads, num_kv_heads, num_kv_heads)
    )
    options = dict(FEATURES[feature])
    spec = AttentionSpec(
        num_heads * head_dim, num_heads, num_kv_heads=num_kv_heads, **options.pop("spec", {})
    )
    if "key_padding_lengths" in options:
        lengths = [round(share * seq_len) for share in options["key_padding_lengths"]]
        options["key_padding_lengths"] = torch.tensor(lengths, device=DEVICE)
    if "segment_ids" in options:
        ids = torch.arange(seq_len, device=DEVICE) * options["segment_ids"] // seq_len
        options["segment_ids"] = ids.expand(batch_size, -1)
    if "mask" in options:
        options["mask"] = (
            torch.rand(batch_size, 1, seq_len, seq_len, generator=generator) < options["mask"]
        ).to(DEVICE)
    if "bias" in options:
        options["bias"] = draw(1, num_heads, seq_len, seq_len)
    if spec.sinks:
        options["sinks"] = draw(num_heads)
    return (query, key, value), {"spec": spec, **options}


def both(heads, options, *, with_gradients=False):
    """Return the context by the fastest kernel and by the definition in float32, with the gradients
    of both.
    """
    results = []
    for attend, dtype in (
        (fused_attention(mha_torch), heads[0].dtype),
        (plain_attention(mha_torch), torch.float32),
    ):
        leaves = [x.detach().to(dtype).requires_grad_(with_gradients) for x in heads]
        keywords = {
            name: x.to(dtype) if name in ("bias", "sinks") else x for name, x in options.items()
        }
        context, _ = attend(*leaves, **keywords)
        grads = (
            torch.autograd.grad(context.float().square().sum(), leaves) if with_gradients else ()
        )
        results.append((context, *grads))
    return results


@pytest.fixture(autouse=True)
def exact_products():
    torch.set_float32_matmul_precision("highest")
    torch.compiler.reset()


def assert_near(actual, expected, dtype):
    for ours, theirs in zip(actual, expected, strict=True):
        assert (
            float((ours.float() - theirs.float()).norm() / theirs.float().norm()) < TOLERANCE[dtype]
        )


@pytest.mark.parametrize("with_gradients", [False, True], ids=["forward", "gradients"])
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("feature", FEATURES)
def test_small_calls_match_definition(feature, dtype, with_gradients):
    """Contexts and gradients of 200 tokens match the definition, for each feature and dtype."""
    heads, options = problem(feature, SMALL, dtype)
    assert_near(*both(heads, options, with_gradients=with_gradients), dtype)


@pytest.mark.parametrize("with_gradients", [False, True], ids=["forward", "gradients"])
@pytest.mark.parametrize("feature", ["lengths", "window", "soft-cap", "alibi", "sinks", "segments"])
def test_large_calls_use_flex_attention(monkeypatch, feature, with_gradients):
    """Calls of 2048 and 2178 tokens run FlexAttention and match the definition, with gradients."""
    calls, kernel = [], flex._attend_between
    monkeypatch.setattr(flex, "_attend_between", lambda *args: calls.append(1) or kernel(*args))
    for seq_len in (LARGE, LARGE + 130):  # the second with other sizes, which compiles again
        heads, options = problem(feature, seq_len, torch.bfloat16)
        assert_near(*both(heads, options, with_gradients=with_gradients), torch.bfloat16)
    assert len(calls) == 2


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("feature", ["causal", "mask", "lengths"])
def test_masks_hide_large_logits(feature, dtype):
    """Masks hide keys in half precision even if logits are 250,000 times as large."""
    heads, options = problem(feature, SMALL, dtype)
    heads = (heads[0] * 500, heads[1] * 500, heads[2])
    assert_near(*both(heads, options), dtype)


def test_compiled_masks_hide_large_logits():
    """In a compiled call in bfloat16, a mask hides keys even if
    logits are 250,000 times as large.
    """
    heads, options = problem("mask", SMALL, torch.bfloat16)
    heads = (heads[0] * 500, heads[1] * 500, heads[2])
    attend = torch.compile(
        lambda *heads: fused_attention(mha_torch)(*heads, **options)[0], fullgraph=True
    )
    assert_near([attend(*heads)], [both(heads, options)[1][0]], torch.bfloat16)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_alibi_matches_with_narrow_heads(dtype):
    """ALiBi with heads of 8 features matches the definition in half precision."""
    heads, options = problem("alibi", SMALL, dtype, head_dim=8)
    assert_near(*both(heads, options), dtype)


def attend_contained(kernel, heads, spec, **masks):
    """Return the context of a contained kernel."""
    return contained(kernel)(*heads, Mask(**masks).within(spec), Scores(spec))


@pytest.mark.parametrize("seq_len", [SMALL, LARGE])
@pytest.mark.parametrize("feature", ["causal", "lengths", "window"])
def test_nan_positions_match_definition(feature, seq_len):
    """In contained kernels, NaN in queries, keys and values, and hidden infinity, yield
    NaN exactly where the definition has it.
    """
    heads, options = problem(feature, seq_len, torch.bfloat16)
    for x, index in zip(heads, (11, 150, 170), strict=True):
        x[1, 1, index, 3] = torch.nan
    if feature == "lengths":
        heads[1][1, :, seq_len - 1] = torch.inf  # hidden
    actual = attend_contained(mha_torch.fused.attend, heads, **options)
    expected = attend_contained(lambda *arguments: stages.attend(*arguments)[0], heads, **options)
    assert torch.equal(actual.isnan(), expected.isnan())
    assert actual.isnan().any()
    assert not actual.isnan().all()


def test_row_of_overflowing_scores_is_nan():
    """A contained row whose scores all overflow is NaN, and the other sequence stays finite."""
    heads, options = problem("causal", SMALL, torch.bfloat16)
    heads[0][0, 0, 7], heads[1][0, 0] = 1e30, -1e30
    actual = attend_contained(mha_torch.fused.attend, heads, **options)
    assert actual[0, 0, 7].isnan().all()
    assert actual[1].isfinite().all()


def layer_of(kind, **fields):
    torch.manual_seed(0)
    return kind(
        256, 4, num_kv_heads=2, rope=Rope(), device=DEVICE, dtype=torch.bfloat16, **fields
    ).eval()


@pytest.mark.parametrize("options", [{}, {"is_causal": True}], ids=["full", "causal"])
@pytest.mark.parametrize("is_contained", [False, True], ids=["default", "contained"])
def test_layer_synchronizes_if_contained(options, is_contained):
    """A call of a layer never synchronizes with the device; with a contained kernel, exactly
    once.
    """
    layer, x = (
        layer_of(mha_torch.MultiHeadAttention),
        torch.randn(2, 100, 256, device=DEVICE, dtype=torch.bfloat16),
    )
    layer.kernel = contained(layer.kernel) if is_contained else layer.kernel
    with torch.no_grad(), warnings.catch_warnings(record=True) as waits:
        layer(x, **options)
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            layer(x, **options)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert len([warning for warning in waits if "synchroniz" in str(warning.message)]) == int(
        is_contained
    )


@pytest.mark.parametrize("options", [{}, {"is_causal": True}], ids=["full", "causal"])
def test_layer_in_cuda_graph_keeps_nan(options):
    """A contained layer in a CUDA graph has the same output, bit for bit, and NaN at the same
    positions.
    """
    layer, x = (
        layer_of(mha_torch.MultiHeadAttention),
        torch.randn(2, 100, 256, device=DEVICE, dtype=torch.bfloat16),
    )
    layer.kernel = contained(layer.kernel)
    with torch.no_grad():
        expected = layer(x, **options)[0]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = layer(x, **options)[0]
        graph.replay()
        assert torch.equal(output, expected)
        x[1, 60, 0] = torch.nan
        graph.replay()
        assert torch.equal(output.isnan(), layer(x, **options)[0].isnan())


def test_steps_run_in_a_cuda_graph():
    """Ten steps that replay a CUDA graph match the full sequence and update the cache's lengths."""
    layer = layer_of(mha_torch.MultiHeadAttentionWithCache)
    x = torch.randn(2, 20, 256, device=DEVICE, dtype=torch.bfloat16)
    with torch.no_grad():
        expected, _ = layer(x, layer.init_cache(2, 32))
        _, cache = layer(x[:, :10], layer.init_cache(2, 32))
        token, graph = x[:, 10:11].clone(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output, after = layer(token, cache)
            cache.lengths.copy_(after.lengths)
            for slots, new in zip(cache.slots.values(), after.slots.values(), strict=True):
                slots.copy_(new)
        for position in range(10, 20):
            token.copy_(x[:, position : position + 1])
            graph.replay()
            assert_near([output[:, 0]], [expected[:, position]], torch.bfloat16)
    assert cache.lengths.tolist() == [20, 20]


def test_steps_do_not_use_cudnn(monkeypatch):
    """A prompt may use cuDNN, a step does not, as cuDNN plans again for each
    number of keys; the setting is restored.
    """
    enabled, kernel = [], torch.nn.functional.scaled_dot_product_attention

    def note(*args, **keywords):
        enabled.append(torch.backends.cuda.cudnn_sdp_enabled())
        return kernel(*args, **keywords)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", note)
    layer = layer_of(mha_torch.MultiHeadAttentionWithCache)
    x = torch.randn(1, 101, 256, device=DEVICE, dtype=torch.bfloat16)
    with torch.no_grad():
        _, cache = layer(x[:, :100], layer.init_cache(1, 128))
        layer(x[:, 100:], cache)
    assert enabled == [True, False]
    assert torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize("feature", ["causal", "window", "soft-cap"])
@pytest.mark.parametrize("seq_len", [SMALL, LARGE])
def test_compiled_calls_agree(feature, seq_len):
    """Compiled calls match the definition in bfloat16, for 200 and 2048 tokens."""
    heads, options = problem(feature, seq_len, torch.bfloat16)
    attend = torch.compile(
        lambda *heads: fused_attention(mha_torch)(*heads, **options)[0], fullgraph=True
    )
    with torch.no_grad():
        assert_near([attend(*heads)], [both(heads, options)[1][0]], torch.bfloat16)


def test_numpy_arrays_raise_on_gpu():
    """A NumPy array in a layer on a GPU raises an error that names `query`."""
    layer = layer_of(mha_torch.MultiHeadAttention)
    with pytest.raises((TypeError, ValueError), match="query"):
        layer(np.zeros((1, 2, 256), np.float32))

"""The fast paths: options instead of masks, skipped keys, blocks and library kernels change results
only by rounding.

Results are compared with the plain path of torch in float64. The tolerance is the error of the same
path in the tested dtype, times the factor of `parity.measure.core.compare`.
"""

import functools
import math
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from flax import nnx
from helpers.heads import attention_in, fused_attention, plain_attention
from helpers.input_errors import rejects
from helpers.samples import sample
from jax.sharding import NamedSharding, PartitionSpec

import mha_jax
import mha_torch
import parity
from mha_jax.kernels.fused import FusedAttention
from mha_jax.kernels.nonfinite import contained
from mha_jax.masks import Mask
from mha_jax.parallel import ContextParallel
from mha_jax.scores import Scores
from mha_spec import Alibi, AttentionSpec, RelativeBias, Rope
from mha_spec.heads import BareHeads
from parity.measure.backends import jax as jax_backend
from parity.measure.backends import torch as torch_backend

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
HALVES = {name: dtype for name, dtype in DTYPES.items() if name != "float32"}
BATCH, NUM_QUERIES, NUM_KEYS, HEAD_DIM = 3, 29, 41, 8  # in blocks of 16, the last ones are smaller
LENGTHS = (0, 17, 41)

both_forms = pytest.mark.parametrize("form", ["plain", "fused"])


SMALL_BLOCKS = FusedAttention(
    few_scores=0, queries=16, keys=16, last_keys=4
)  # every shape is computed in blocks


@pytest.fixture
def off_the_cpu(monkeypatch):
    """Make JAX use the path for accelerators."""
    monkeypatch.setattr(
        mha_jax.fused, "platform_of", lambda *arrays: "metal"
    )  # a platform without its own kernel
    with jax.numpy_dtype_promotion("standard"):  # the gradient of JAX's own function mixes dtypes
        yield


QUICKLY = {"xla_backend_optimization_level": 0}  # most programs here run only once


def problem(
    heads=(2, 2),
    lengths=(NUM_QUERIES, NUM_KEYS),
    *,
    mask=None,
    bias=None,
    padding=None,
    minus=None,
    dtype=np.float32,
):
    """Return split heads and a cotangent, and optionally a mask, a bias and padding lengths.

    A mask is an array or a shape, a bias is a shape. `minus` replaces the bias where another random
    mask is True.
    """
    rng = np.random.default_rng(5)
    (num_heads, num_kv_heads), (num_queries, num_keys) = heads, lengths
    shapes = {
        "query": (BATCH, num_heads, num_queries, HEAD_DIM),
        "key": (BATCH, num_kv_heads, num_keys, HEAD_DIM),
        "value": (BATCH, num_kv_heads, num_keys, HEAD_DIM),
        "cotangent": (BATCH, num_heads, num_queries, HEAD_DIM),
    }
    arrays = {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
    if bias is not None:
        arrays["bias"] = rng.standard_normal(bias).astype(dtype)
        if minus is not None:
            arrays["bias"][rng.random(bias) < 0.4] = minus
    if mask is not None:
        arrays["mask"] = rng.random(mask) < 0.5 if isinstance(mask, tuple) else mask
    if padding is not None:
        arrays["key_padding_lengths"] = np.array(padding, np.int32)
    return arrays


def sliding_window(num_tokens, window_size):
    distance = np.arange(num_tokens)[:, None] - np.arange(num_tokens)
    return (distance < 0) | (distance >= window_size)


def blocks_hidden():
    """Hide a block of one head, one whole sequence, and a block between two visible ones."""
    mask = np.zeros((BATCH, 2, NUM_QUERIES, NUM_KEYS), bool)
    mask[0, 0, :16, :16] = True
    mask[1] = True
    mask[2, :, :, 16:32] = True
    return mask


def rows_hidden():
    """Hide all keys from rows 3 and 20, and key 0 from all; row 0 of a causal call then has no
    key.
    """
    mask = np.zeros((NUM_QUERIES, NUM_KEYS), bool)
    mask[[3, 20]] = True
    mask[:, 0] = True
    return mask


def is_hidden(arrays, is_causal=False):
    """Return whether each key is hidden, (B, N, T, S), from the definitions."""
    (batch, num_heads, num_queries, _), num_keys = arrays["query"].shape, arrays["key"].shape[2]
    positions = np.arange(num_keys)
    hidden = np.zeros((batch, num_heads, num_queries, num_keys), bool)
    hidden |= arrays.get("mask", False)
    hidden |= np.isneginf(arrays.get("bias", np.zeros(1)).astype(np.float64))
    if "key_padding_lengths" in arrays:
        hidden |= positions >= arrays["key_padding_lengths"][:, None, None, None]
    return hidden | (positions > np.arange(num_queries)[:, None]) if is_causal else hidden


def results(package, function, arrays, **options):
    """Return the context and the gradients of floating-point inputs as NumPy arrays; JAX runs under
    jit.
    """
    if package is mha_jax:
        return numpy_of(jitted_with_gradients(function, **options)(as_jax(arrays)))
    arrays = {name: torch_backend.from_numpy(x) for name, x in arrays.items()}
    cotangent = arrays.pop("cotangent")
    leaves = {name: x.requires_grad_() for name, x in arrays.items() if x.is_floating_point()}
    context, _ = function(**arrays, **options)
    gradients = torch.autograd.grad(context, list(leaves.values()), cotangent)
    results = {
        "context": context,
        **dict(zip(map("grad.{}".format, leaves), gradients, strict=True)),
    }
    return {name: torch_backend.to_numpy(x) for name, x in results.items()}


def jitted_with_gradients(function, **options):
    return jax.jit(functools.partial(with_gradients, function, **options), compiler_options=QUICKLY)


def as_jax(arrays):
    return {name: jnp.asarray(x) for name, x in arrays.items()}


def numpy_of(arrays):
    return {name: np.asarray(x) for name, x in arrays.items()}


def with_gradients(function, arrays, **options):
    """Return the context and gradients of a function of JAX arrays, without compilation."""
    leaves = {name: x for name, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.floating)}
    hidden = {name: x for name, x in arrays.items() if name not in leaves}
    cotangent = leaves.pop("cotangent")
    context, pull_back = jax.vjp(lambda leaves: function(**leaves, **hidden, **options)[0], leaves)
    return {
        "context": context,
        **{f"grad.{name}": x for name, x in pull_back(cotangent)[0].items()},
    }


def yardstick(arrays, **options):
    """Return the expected results, and the results of another implementation in the same
    precision.
    """
    wide = {name: x if x.dtype.kind in "bi" else x.astype(np.float64) for name, x in arrays.items()}
    plain = plain_attention(mha_torch)
    return {
        "expected": results(mha_torch, plain, wide, **options),
        "same_precision": results(mha_torch, plain, arrays, **options),
    }


# Arguments of `problem`, and whether a call is causal: all ways to hide keys and to broadcast.
PROBLEMS = {
    "full": ({}, False),
    "causal": ({}, True),
    "causal-square": ({"lengths": (41, 41)}, True),
    "causal-fewer-keys": ({"lengths": (41, 29)}, True),
    "one-query": ({"lengths": (1, 41)}, False),
    "whole-blocks": ({"lengths": (32, 32)}, False),
    "whole-blocks-causal": ({"lengths": (32, 32)}, True),
    "queries-beyond-keys": ({"lengths": (64, 32)}, True),
    "window": ({"lengths": (41, 41), "mask": sliding_window(41, 5)}, False),
    "mask-of-keys": ({"mask": (NUM_KEYS,)}, False),
    "mask-t-s": ({"mask": (NUM_QUERIES, NUM_KEYS)}, False),
    "mask-b-1-1-s": ({"mask": (BATCH, 1, 1, NUM_KEYS)}, False),
    "mask-1-n-t-1": ({"mask": (1, 2, NUM_QUERIES, 1)}, False),
    "mask-b-n-t-s": ({"mask": (BATCH, 2, NUM_QUERIES, NUM_KEYS)}, False),
    "mask-of-blocks": ({"mask": blocks_hidden()}, False),
    "mask-of-rows-causal": ({"mask": rows_hidden()}, True),
    "everything-hidden": ({"mask": np.ones((1, 1), bool)}, False),
    "padding": ({"padding": LENGTHS}, False),
    "padding-causal": ({"padding": LENGTHS}, True),
    "padding-causal-mask": ({"padding": LENGTHS, "mask": (1, 2, NUM_QUERIES, NUM_KEYS)}, True),
    "odd-heads": ({"heads": (3, 3)}, True),
    "gqa": ({"heads": (4, 2)}, True),
    "gqa-mask-padding": (
        {"heads": (6, 3), "mask": (BATCH, 6, NUM_QUERIES, 1), "padding": LENGTHS},
        True,
    ),
    "mqa": ({"heads": (3, 1), "mask": (1, 3, 1, NUM_KEYS)}, False),
    "bias-of-keys": ({"bias": (NUM_KEYS,)}, False),
    "bias-t-1": ({"bias": (NUM_QUERIES, 1), "padding": LENGTHS}, True),
    "bias-n-1-1": ({"bias": (2, 1, 1), "mask": (NUM_KEYS,)}, False),
    "bias-b-1-t-s": ({"bias": (BATCH, 1, NUM_QUERIES, NUM_KEYS)}, True),
    "bias-gqa": ({"bias": (1, 4, NUM_QUERIES, NUM_KEYS), "heads": (4, 2)}, True),
    "bias-infinite": ({"bias": (BATCH, 2, NUM_QUERIES, NUM_KEYS), "minus": -np.inf}, True),
    "bias-infinite-rows": (
        {"bias": (1, 2, NUM_QUERIES, 1), "minus": -np.inf, "heads": (2, 1)},
        False,
    ),
    "bias-lowest": ({"bias": (NUM_QUERIES, NUM_KEYS), "minus": np.finfo(np.float32).min}, True),
}
# Problems whose keys JAX processes at once if one block holds all of them.
WITHOUT_LOOP = ["full", "causal-square", "causal-fewer-keys", "gqa", "bias-b-1-t-s"]
IN_HALF_PRECISION = {  # one dtype for each, because both are widened alike
    "causal": "bfloat16",
    "padding-causal-mask": "float16",
    "mask-of-blocks": "bfloat16",
    "bias-infinite": "bfloat16",
    "gqa-mask-padding": "float16",
}

IN_MAKE_TEST = [
    *(
        "queries-beyond-keys",
        "mask-of-blocks",
        "mask-of-rows-causal",
        "everything-hidden",
        "padding-causal-mask",
    ),
    *("gqa-mask-padding", "bias-gqa", "bias-infinite-rows"),
]
"""Problems that combine all ways to hide keys, to share heads and to broadcast."""

every_problem = pytest.mark.parametrize("name", PROBLEMS)
problems_in_half_precision = pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, HALVES[dtype]) for name, dtype in IN_HALF_PRECISION.items()],
    ids=map("-".join, IN_HALF_PRECISION.items()),
)


def named(name, dtype=np.float32):
    """Return the arrays and options of a problem."""
    keywords, is_causal = PROBLEMS[name]
    return problem(**keywords, dtype=dtype), {"is_causal": is_causal}


def single_key():
    """Return a problem with a single key."""
    return problem(lengths=(NUM_QUERIES, 1))


def assert_single_key_is_visible(actual, arrays):
    """Check that the context is the value, and that gradients of scores, differences of equal sums,
    are near 0.
    """
    np.testing.assert_array_equal(
        actual["context"], np.broadcast_to(arrays["value"], actual["context"].shape)
    )
    sizes = {name: float(np.abs(x).max()) for name, x in arrays.items()}
    rounding = (
        HEAD_DIM * np.finfo(np.float32).eps * sizes["cotangent"] * sizes["value"] * HEAD_DIM**-0.5
    )
    assert np.abs(actual["grad.query"]).max() <= rounding * sizes["key"]
    assert np.abs(actual["grad.key"]).max() <= rounding * sizes["query"] * NUM_QUERIES


# ---- is_causal and lengths instead of masks ------------------------------------------------------


@sample(jax=1)
@both_forms
@pytest.mark.parametrize("lengths", [(5, 5), (5, 7), (7, 5)], ids=["square", "wide", "tall"])
@pytest.mark.parametrize(
    ("padding", "is_causal"),
    [(None, True), ((0, 2, 5), False), ((5, 0, 3), True)],
    ids=["causal", "padding", "both"],
)
def test_causal_and_lengths_match_mask(sibling, form, lengths, padding, is_causal):
    """is_causal and padding lengths match the plain path with the equivalent mask, with
    gradients.
    """
    function = attention_in(form, sibling.package)
    options = problem(lengths=lengths, padding=padding)
    masked = problem(lengths=lengths, mask=is_hidden(options, is_causal))
    expected = yardstick(masked)
    parity.assert_parity(
        results(sibling.package, function, options, is_causal=is_causal), **expected
    )


@sample(jax=1)
@both_forms
def test_causal_and_lengths_join_a_mask(sibling, form):
    """is_causal and padding lengths together with a mask match the plain path with one joint
    mask.
    """
    function = attention_in(form, sibling.package)
    options = problem(lengths=(5, 7), padding=(0, 2, 7), mask=(5, 7))
    masked = problem(lengths=(5, 7), mask=is_hidden(options, is_causal=True))
    parity.assert_parity(
        results(sibling.package, function, options, is_causal=True), **yardstick(masked)
    )


@sample(jax=1)
@both_forms
@pytest.mark.parametrize(
    "kind",
    [list, tuple, lambda lengths: np.array(lengths, np.int64)],
    ids=["list", "tuple", "array"],
)
def test_lengths_of_any_kind_are_accepted(sibling, form, kind):
    """Padding lengths in a list, a tuple or an array give the same results."""
    function = attention_in(form, sibling.package)
    arrays = problem(lengths=(5, 7))
    lengths = kind([0, 2, 7])
    lengths = (
        torch.from_numpy(lengths)
        if isinstance(lengths, np.ndarray) and sibling.package is mha_torch
        else lengths
    )
    actual = results(sibling.package, function, arrays, key_padding_lengths=lengths)
    parity.assert_parity(actual, **yardstick(problem(lengths=(5, 7), padding=(0, 2, 7))))


# ---- Windows and chunks: a few queries at once ---------------------------------------------------

SPANS = {
    "window": ({"window_size": 20}, {}, True),
    "window-padding": ({"window_size": 20}, {"padding": (0, 100, 290)}, True),
    "window-both-ways-padding": ({"window_size": 20}, {"padding": (0, 100, 290)}, False),
    "window-both-ways-mask": ({"window_size": 150}, {"mask": (1, 2, 290, 290)}, False),
    "window-bias": ({"window_size": 150}, {"bias": (1, 2, 290, 290), "minus": -np.inf}, True),
    "window-tall": ({"window_size": 20}, {"lengths": (290, 120)}, True),
    "window-both-ways-tall": ({"window_size": 20}, {"lengths": (290, 120)}, False),
    "chunk-padding": ({"chunk_size": 64}, {"padding": (0, 100, 290)}, True),
    "chunk-both-ways": ({"chunk_size": 130}, {"bias": (290, 1)}, False),
}


@sample(jax=1)
@pytest.mark.parametrize("name", SPANS)
def test_spans_in_parts_match_joint_mask(sibling, name):
    """Windows and chunks, computed for a few queries at once, match a mask of hidden keys, with
    gradients.
    """
    span, keywords, is_causal = SPANS[name]
    arrays = problem(**{"lengths": (290, 290), **keywords})
    num_queries, num_keys = arrays["query"].shape[2], arrays["key"].shape[2]
    queries, keys = np.arange(num_queries)[:, None], np.arange(num_keys)
    if "window_size" in span:
        out_of_reach = abs(queries - keys) >= span["window_size"]
    else:
        out_of_reach = queries // span["chunk_size"] != keys // span["chunk_size"]
    spec = parity.AttentionSpec(2 * HEAD_DIM, 2, **span)
    function = fused_attention(sibling.package)
    options = {"kernel": FusedAttention(few_scores=0)} if sibling.package is mha_jax else {}
    actual = results(sibling.package, function, arrays, spec=spec, is_causal=is_causal, **options)
    masked = {**arrays, "mask": arrays.get("mask", False) | out_of_reach}
    parity.assert_parity(actual, **yardstick(masked, is_causal=is_causal))


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("window_size", [20, 90])
def test_torch_window_parts_match_plain_path(is_causal, window_size):
    """Windows in torch without gradients, whose equal parts are computed together, match the plain
    path.
    """
    spec, arrays = (
        parity.AttentionSpec(4 * HEAD_DIM, 4, window_size=window_size),
        problem(lengths=(290, 290)),
    )
    arrays = [torch.from_numpy(arrays[name]) for name in ("query", "key", "value")]
    arrays[0] = torch.cat([arrays[0], arrays[0] + 1.0], dim=1)  # two query heads for each key head
    actual, expected = (
        attend(*arrays, spec, is_causal=is_causal)[0]
        for attend in (fused_attention(mha_torch), plain_attention(mha_torch))
    )
    torch.testing.assert_close(actual, expected)


@sample(jax=1)
@pytest.mark.parametrize("keywords", [{}, {"key_padding_lengths": []}], ids=["alone", "lengths"])
def test_window_of_no_sequences_is_empty(sibling, keywords):
    """A window over 0 sequences returns an empty context."""
    spec, heads = parity.AttentionSpec(16, 2, window_size=20), np.zeros((0, 2, 290, 8), np.float32)
    heads = jnp.asarray(heads) if sibling.package is mha_jax else torch.from_numpy(heads)
    context, _ = fused_attention(sibling.package)(heads, heads, heads, spec, **keywords)
    assert context.shape == (0, 2, 290, 8)


# ---- JAX: block by block -------------------------------------------------------------------------

jax_fused = fused_attention(mha_jax)
jax_blocks = functools.partial(jax_fused, kernel=SMALL_BLOCKS)


@functools.cache
def jitted_in_blocks(is_causal):
    """Return a function that is compiled once for arrays of the same shapes."""
    return jitted_with_gradients(jax_blocks, is_causal=is_causal)


def in_blocks(arrays, is_causal=False):
    return numpy_of(jitted_in_blocks(is_causal)(as_jax(arrays)))


PARTS = {
    "causal": {"is_causal": True},
    "lengths": {"key_padding_lengths": [290, 100]},
    "mask-of-heads": {"is_causal": True, "mask": (2, 4, 290, 290)},
    "bias-of-heads": {"bias": (1, 4, 290, 290)},
    "mask-of-keys": {"mask": (2, 1, 1, 290)},
    "sinks": {"is_causal": True, "sinks": (4,)},
    "alibi": {"is_causal": True},
}


@sample(4)
@pytest.mark.parametrize("few_scores", [50_000, 2_000], ids=["one-kernel", "several-kernels"])
@pytest.mark.parametrize(
    "span", [{"window_size": 20}, {"chunk_size": 64}], ids=["window", "chunks"]
)
@pytest.mark.parametrize("name", PARTS)
def test_jax_window_parts_match_plain_path(name, span, few_scores):
    """In JAX, gradients of windows and chunks in parts match the plain path, as do, in contained
    kernels, contexts of overflowing and non-finite tokens. Heads of two sequences are divided over
    parts, and the last block of queries overlaps another one.
    """
    rng, options = np.random.default_rng(0), dict(PARTS[name])
    alibi = {"alibi": Alibi()} if name == "alibi" else {}
    spec = parity.AttentionSpec(32, 4, num_kv_heads=2, sinks=name == "sinks", **alibi, **span)
    query, key, value = (
        jnp.asarray(rng.standard_normal((2, n, 290, 8)), jnp.float32) for n in (4, 2, 2)
    )
    if "mask" in options:
        options["mask"] = jnp.asarray(rng.random(options["mask"]) < 0.3)
    for learned_name in {"bias", "sinks"} & options.keys():
        options[learned_name] = jnp.asarray(rng.standard_normal(options[learned_name]), jnp.float32)
    kernels = FusedAttention(few_scores=few_scores), mha_jax.stages.attend_without_weights
    attend, plain = (functools.partial(jax_fused, kernel=kernel) for kernel in kernels)

    def attended(attend, *arrays):
        return attend(*arrays, spec, **options)[0]

    for gradient, expected in zip(
        *(
            jax.grad(lambda *x, of=of: attended(of, *x).sum(), (0, 1, 2))(query, key, value)
            for of in (attend, plain)
        ),
        strict=True,
    ):
        np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-5)
    # The product of the first two overflows in float32, and the others are not finite.
    query, key = query.at[0, 1, 7].set(3e30), key.at[0, 0, 20].set(1e25)
    query, key, value = (
        query.at[1, 2, 5].set(jnp.nan),
        key.at[0, 1, 200].set(jnp.inf),
        value.at[1, 0, 80].set(jnp.nan),
    )
    attend, plain = (functools.partial(jax_fused, kernel=contained(kernel)) for kernel in kernels)
    actual, expected = (attended(of, query, key, value) for of in (attend, plain))
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=2e-6)
    assert np.isnan(expected).any()
    assert np.isfinite(expected).any()


@pytest.mark.parametrize("group", [1, 4])
def test_cached_scores_are_one_kernel(group):
    """XLA compiles the scores of a head that fit the cache into one kernel, which returns the
    context and no scores.
    """
    rows = 256
    query, key = jnp.ones((1, 2 * group, rows // group, 8)), jnp.ones((1, 2, rows // group, 8))
    attend = functools.partial(jax_fused, is_causal=True)
    program = jax.jit(lambda q, k, v: attend(q, k, v)[0]).lower(query, key, key).compile().as_text()
    kernels = re.findall(r"= \w+\[([\d,]*)\]\S* fusion\(", program[program.index("ENTRY") :])
    sizes = [math.prod(map(int, filter(None, shape.split(",")))) for shape in kernels]
    assert max(sizes) < 2 * rows * rows // group  # none returns scores
    assert 2 * rows * 8 in sizes  # one returns the context


# Masks and biases of other axes differ only in broadcasting, which "mask-1-n-t-1", "bias-t-1" and
# "bias-gqa" test.
BLOCKS_LIKE_OTHERS = {
    *(
        "causal-square",
        "whole-blocks",
        "mask-t-s",
        "mask-b-1-1-s",
        "bias-of-keys",
        "bias-n-1-1",
        "bias-b-1-t-s",
        "gqa",
    ),
}
assert PROBLEMS.keys() > BLOCKS_LIKE_OTHERS


@sample(name=IN_MAKE_TEST)
@pytest.mark.parametrize("name", [name for name in PROBLEMS if name not in BLOCKS_LIKE_OTHERS])
def test_blocks_match_plain_path(name):
    """Context and gradients in small blocks match the plain path in float64."""
    arrays, options = named(name)
    parity.assert_parity(in_blocks(arrays, **options), **yardstick(arrays, **options))


DIVIDED = replace(
    SMALL_BLOCKS, last_keys=SMALL_BLOCKS.last_keys + 1
)  # so that no earlier trace is reused


@pytest.mark.parametrize("name", ["gqa-mask-padding", "bias-infinite-rows"])
def test_divided_blocks_match_plain_path(monkeypatch, name):
    """Blocks on automatic mesh axes, which XLA divides among devices, match the plain path on one
    device.
    """
    monkeypatch.setattr(mha_jax.kernels.cpu.blockwise, "is_automatic", lambda x: True)
    arrays, options = named(name)
    attend = functools.partial(jax_blocks, kernel=DIVIDED)
    actual = numpy_of(jitted_with_gradients(attend, **options)(as_jax(arrays)))
    parity.assert_parity(actual, **yardstick(arrays, **options))


def test_divided_step_matches_plain_path(monkeypatch):
    """A step on automatic mesh axes, which XLA divides among devices, matches the plain path on one
    device.
    """
    monkeypatch.setattr(mha_jax.kernels.cpu.blockwise, "is_automatic", lambda x: True)
    arrays = cache_problem((6, 2), LAST_POSITIONS["ragged"])
    attend = functools.partial(attend_to_cache, kernel=DIVIDED)
    parity.assert_parity(
        numpy_of(jitted_with_gradients(attend)(as_jax(arrays))), **yardstick(arrays)
    )


def test_tokens_over_unknown_axis_raise():
    """Tokens divided over an axis without a mesh raise an error that names the axis."""
    x = jnp.zeros((1, 2, 4, 8))
    with rejects("tokens", axis="tokens"):
        jax_blocks(x, x, x, kernel=ContextParallel("tokens", SMALL_BLOCKS))


@sample(where=lambda name: name in IN_MAKE_TEST)
@problems_in_half_precision
def test_half_precision_blocks_match(name, dtype):
    """Context and gradients of blocks in bfloat16 and float16 match the plain path in float64."""
    arrays, options = named(name, dtype)
    parity.assert_parity(in_blocks(arrays, **options), **yardstick(arrays, **options))


@sample(name=["bias-b-1-t-s"])
@pytest.mark.parametrize("name", WITHOUT_LOOP)
def test_blocks_of_all_keys_match_plain_path(name):
    """Context and gradients of blocks that contain all keys match the plain path in float64."""
    arrays, options = named(name)
    fused = functools.partial(jax_blocks, kernel=replace(SMALL_BLOCKS, keys=512))
    parity.assert_parity(results(mha_jax, fused, arrays, **options), **yardstick(arrays, **options))


def test_block_of_one_key_returns_its_value():
    """With one key, the context is its value exactly, and gradients of scores are 0 within
    rounding.
    """
    assert_single_key_is_visible(in_blocks(single_key()), single_key())


@sample(name=["queries-beyond-keys"])
@pytest.mark.parametrize("name", ["causal-square", "queries-beyond-keys", "bias-b-1-t-s"])
def test_blocks_narrower_than_queries_match(name):
    """Context and gradients of blocks with 16 queries and 6 keys match the plain path in
    float64.
    """
    arrays, options = named(name)
    fused = functools.partial(jax_blocks, kernel=replace(SMALL_BLOCKS, keys=6))
    parity.assert_parity(results(mha_jax, fused, arrays, **options), **yardstick(arrays, **options))


@sample(name=["bias-infinite"])
@pytest.mark.parametrize("name", ["padding-causal-mask", "bias-infinite"])
def test_blocks_support_float64(name):
    """Context and gradients of blocks in float64 match the plain path within the error of
    float64.
    """
    arrays, options = named(name, np.float64)
    expected = yardstick(arrays, **options)["expected"]
    with jax.enable_x64(True):
        actual = results(mha_jax, jax_blocks, arrays, **options)
        plain = results(mha_jax, plain_attention(mha_jax), arrays, **options)
    parity.assert_parity(actual, expected, same_precision=plain)


@pytest.mark.parametrize("name", ["mask-of-rows-causal", "padding-causal", "bias-infinite-rows"])
def test_row_without_keys_has_no_gradient(name):
    """In blocks, a row without a key has a context and a query gradient of exactly 0."""
    arrays, options = named(name)
    empty = is_hidden(arrays, **options).all(axis=-1)
    actual = in_blocks(arrays, **options)
    assert empty.any()
    assert not actual["context"][empty].any()
    assert not actual["grad.query"][empty].any()


def test_blocks_work_without_jit():
    """Context and gradients of blocks without jit match the plain path in float64."""
    arrays, options = named("gqa")
    actual = with_gradients(jax_blocks, as_jax(arrays), **options)
    parity.assert_parity(actual, **yardstick(arrays, **options))


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["window"])
def test_blocks_work_with_jit_disabled(name):  # loops then count in Python integers
    """With jit disabled, in which loops count in Python integers, the context matches the plain
    path.
    """
    arrays, options = named(name)
    assert_same_without_jit(jax_blocks, arrays, **options)


def assert_same_without_jit(function, arrays, **options):
    """Check one sequence only, because every operation of a loop runs separately."""
    arrays = {name: x if name == "mask" else x[1:2] for name, x in arrays.items()}
    inputs = {name: x for name, x in as_jax(arrays).items() if name != "cotangent"}
    with jax.disable_jit():
        actual, _ = function(**inputs, **options)
    allowed = {name: x["context"] for name, x in yardstick(arrays, **options).items()}
    parity.assert_parity(np.asarray(actual), **allowed)


@sample(name=["gqa-mask-padding"])
@pytest.mark.parametrize("name", ["bias-b-1-t-s", "gqa-mask-padding"])
def test_blocks_can_be_vmapped(name):
    """Context and gradients of blocks under vmap over sequences match the plain path in float64."""
    arrays, options = named(name)

    def of_one(arrays):
        batch = {name: x[None] for name, x in arrays.items()}
        return {name: x[0] for name, x in with_gradients(jax_blocks, batch, **options).items()}

    actual = jax.jit(jax.vmap(of_one), compiler_options=QUICKLY)(as_jax(arrays))
    parity.assert_parity(actual, **yardstick(arrays, **options))


def test_blocks_can_be_rematerialized():
    """Context and gradients of blocks under jax.checkpoint match the plain path in float64."""
    arrays, options = named("padding-causal-mask")

    def function(**arrays):
        return jax.checkpoint(lambda arrays: jax_blocks(**arrays, **options))(arrays)

    parity.assert_parity(results(mha_jax, function, arrays), **yardstick(arrays, **options))


@sample(
    where=lambda num_tokens, is_causal, share: (
        (num_tokens, is_causal, share) in [(2048, True, 1 / 4)]
    )
)
@pytest.mark.parametrize(
    ("num_tokens", "is_causal", "share"),
    [(2048, True, 1 / 4), (8192, False, 1 / 50)],
)
def test_scores_are_not_stored_at_once(num_tokens, is_causal, share):
    """Temporary memory of 8 heads with gradients is below a quarter of all scores for 2048 tokens,
    and a 50th for 8192.
    """
    shape = jax.ShapeDtypeStruct((1, 8, num_tokens, 16), jnp.float32)
    arrays = dict.fromkeys(("query", "key", "value", "cotangent"), shape)
    compiled = (
        jax.jit(functools.partial(with_gradients, jax_fused, is_causal=is_causal))
        .lower(arrays)
        .compile()
    )
    assert 0 < compiled.memory_analysis().temp_size_in_bytes < share * 8 * num_tokens**2 * 4


CASES_IN_BLOCKS = [
    ("window-cross", "float32"),
    ("trained-anarcii-cross", "float32"),
    ("rope-gqa", "bfloat16"),
    ("large-logits", "float16"),
    ("bias-causal", "float64"),
]


def layer_with_gradients(problem):
    """Return output and gradients of the layer of a case, in blocks of three, as its stages."""
    case, spec = problem.case, problem.spec
    inputs = as_jax(
        {name: x for name, x in problem.inputs.items() if name in ("query", "key", "bias")}
    )
    mask = mha_jax.create_attention_mask(
        case.seq_len,
        case.key_len,
        is_causal=case.is_causal,
        key_padding_lengths=case.key_padding_lengths,
    )
    if case.window_size is not None:
        mask |= mha_jax.create_sliding_window_mask(
            case.seq_len, case.key_len, window_size=case.window_size
        )[None, None]
    if "mask" in problem.inputs:
        mask |= problem.inputs["mask"]
    layer = mha_jax.MultiHeadAttention(spec, param_dtype=jnp.dtype(problem.dtype), rngs=nnx.Rngs(0))
    layer.kernel = FusedAttention(few_scores=0, queries=3, keys=3)

    def attend(inputs, weights):
        module = nnx.clone(layer)
        nnx.update(module, weights)
        return module(**inputs, mask=mask)[0]

    @functools.partial(jax.jit, compiler_options=QUICKLY)
    def run(inputs, weights, cotangent):
        output, pull_back = jax.vjp(attend, inputs, weights)
        return output, *pull_back(cotangent)

    weights = jax_backend.to_params(problem.weights, spec)
    output, gradients, of_weights = run(inputs, weights, jnp.asarray(problem.inputs["cotangent"]))
    gradients |= jax_backend.from_params(of_weights, spec)
    return {"blocks.output": output, **{f"blocks.grad.{name}": x for name, x in gradients.items()}}


@sample(where=lambda name, dtype: (name, dtype) in [("rope-gqa", "bfloat16")])
@pytest.mark.parametrize(("name", "dtype"), CASES_IN_BLOCKS)
def test_layer_in_blocks_matches_reference(name, dtype):
    """Output and gradients of a layer in blocks of three match the reference for several cases."""
    problem = parity.make_problem(parity.CASES[name], dtype)
    with jax_backend.lock(dtype):
        actual = {stage: np.asarray(x) for stage, x in layer_with_gradients(problem).items()}
    parity.assert_parity(actual, problem=problem)


# ---- Hidden tokens have no effect ----------------------------------------------------------------


def window_of_the_last(num_tokens):
    """Hide the first 20 tokens and those from 36 on."""
    hidden = np.zeros((num_tokens, num_tokens), bool)
    hidden[:, :20] = hidden[:, 36:] = True
    return hidden


# Blocks without visible keys. The last block begins early, because it is as long as the others.
SKIPPED = {
    "mask": (
        {"lengths": (48, 48), "mask": window_of_the_last(48)},
        False,
        [(slice(None), slice(0, 16))],
    ),
    "padding": (
        {"padding": (16, 20, 5)},
        False,
        [(0, slice(16, 41)), (2, slice(16, 41)), (1, slice(32, 41))],
    ),
    "causal": ({"lengths": (29, 64)}, True, [(slice(None), slice(32, 64))]),
    "padding-causal": (
        {"padding": (0, 7, 41)},
        True,
        [(0, slice(0, 41)), (1, slice(16, 41)), (2, slice(32, 41))],
    ),
}


@pytest.mark.parametrize("name", SKIPPED)
def test_hidden_blocks_are_not_read(name):
    """Blocks without visible keys may be NaN: results have the bits of zeros instead."""
    keywords, is_causal, hidden_blocks = SKIPPED[name]
    arrays = problem(**keywords)
    emptied, spoilt = (
        {**arrays, **{side: arrays[side].copy() for side in ("key", "value")}} for _ in range(2)
    )
    for batch, keys in hidden_blocks:
        for side in ("key", "value"):
            emptied[side][batch, :, keys], spoilt[side][batch, :, keys] = 0.0, np.nan
    expected, actual = (in_blocks(inputs, is_causal) for inputs in (emptied, spoilt))
    assert all(np.isfinite(x).all() for x in expected.values())
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


UNSEEN = {  # keys that are hidden from all queries of a sequence
    "mask": ({"mask": np.arange(NUM_KEYS) % 3 == 0}, False),
    "padding": ({"padding": LENGTHS}, False),
    "padding-causal": ({"padding": LENGTHS}, True),
    "bias": ({"bias": (NUM_KEYS,), "minus": -np.inf}, False),
    "causal": ({}, True),
}


def changed_where_unseen(arrays, side, value, **options):
    unseen = is_hidden(arrays, **options).all(axis=(1, 2))  # (B, S)
    assert unseen.any()
    changed = arrays[side].copy()
    changed[np.broadcast_to(unseen[:, None], changed.shape[:3])] = value
    return {**arrays, side: changed}


@sample(6)
@pytest.mark.parametrize("value", [1e30, np.finfo(np.float32).min], ids=["large", "lowest"])
@pytest.mark.parametrize("side", ["key", "value"])
@pytest.mark.parametrize("name", UNSEEN)
def test_hidden_tokens_do_nothing_in_jax(name, side, value):
    """Changing keys or values hidden from all queries, even to 1e30, changes no bit of context and
    gradients in blocks.
    """
    keywords, is_causal = UNSEEN[name]
    arrays = problem(**keywords)
    changed = changed_where_unseen(arrays, side, value, is_causal=is_causal)
    expected, actual = (in_blocks(inputs, is_causal) for inputs in (arrays, changed))
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


@sample(10)
@pytest.mark.parametrize("value", [1e30, -1e30])
@pytest.mark.parametrize("side", ["key", "value"])
@pytest.mark.parametrize("name", UNSEEN)
def test_hidden_tokens_do_nothing_in_torch(name, side, value):
    """Changing keys or values hidden from all queries, even to 1e30, changes no bit of the context
    in torch.
    """
    keywords, is_causal = UNSEEN[name]
    arrays = problem(**keywords)
    changed = changed_where_unseen(arrays, side, value, is_causal=is_causal)
    expected, actual = (
        results(mha_torch, torch_fused, inputs, is_causal=is_causal) for inputs in (arrays, changed)
    )
    np.testing.assert_array_equal(actual["context"], expected["context"])


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_torch_does_not_read_padding(is_causal):
    """NaN in padded keys and values changes no bit of context and gradients in torch."""
    arrays = problem(padding=(1, 17, 41))
    spoilt = changed_where_unseen(arrays, "value", np.nan)
    spoilt = changed_where_unseen(spoilt, "key", np.nan)
    expected, actual = (
        results(mha_torch, torch_fused, inputs, is_causal=is_causal) for inputs in (arrays, spoilt)
    )
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


# ---- JAX: one token over a cache -----------------------------------------------------------------

CAPACITY = 43  # neither a multiple of large blocks nor of small ones
LAST_POSITIONS = {
    "ragged": (1, 17, 42),
    "without-a-key": (-1, 17, 42),
    "even": (31, 31, 31),
    "beside-a-block": (15, 16, 14),
}


def cache_problem(heads, last_positions, dtype=np.float32):
    """Return one token per sequence, its cache, and the lengths that hide slots beyond a
    position.
    """
    return problem(heads, (1, CAPACITY), padding=np.array(last_positions) + 1, dtype=dtype)


def attend_to_cache(query, key, value, key_padding_lengths, kernel=SMALL_BLOCKS):
    """Run a step of the fused kernel, with the signature that `results` expects."""
    return kernel.step(
        query,
        key,
        value,
        Mask(is_causal=True, q_offset=key_padding_lengths - 1),
        Scores(BareHeads(query.shape[3])),
    ), None


@functools.cache
def jitted_over_a_cache():
    """Return a function that is compiled once for arrays of the same shapes."""
    return jitted_with_gradients(attend_to_cache)


def over_a_cache(arrays):
    return numpy_of(jitted_over_a_cache()(as_jax(arrays)))


@pytest.mark.parametrize(
    ("heads", "last_positions"),
    [((2, 2), positions) for positions in LAST_POSITIONS.values()]
    + [(heads, LAST_POSITIONS["ragged"]) for heads in ((6, 2), (3, 1))],
    ids=[*LAST_POSITIONS, "ragged-gqa", "ragged-mqa"],
)
def test_step_matches_plain_path(heads, last_positions):
    """Context and gradients of one token over a cache match the plain path, for even and ragged
    lengths and grouped heads.
    """
    arrays = cache_problem(heads, last_positions)
    parity.assert_parity(over_a_cache(arrays), **yardstick(arrays))


@pytest.mark.thorough
def test_step_works_with_jit_disabled():
    """With jit disabled, the context of one token over a cache matches the plain path."""
    arrays = cache_problem((2, 2), LAST_POSITIONS["ragged"])
    assert_same_without_jit(attend_to_cache, arrays)


def test_first_token_of_cache_gets_its_value():
    """With one token in the cache, the context is its value exactly."""
    arrays = cache_problem((2, 2), (0, 0, 0))
    context = over_a_cache(arrays)["context"]
    np.testing.assert_array_equal(context, arrays["value"][:, :, :1])


@sample(dtype=[HALVES["bfloat16"]])
@pytest.mark.parametrize("dtype", HALVES.values(), ids=HALVES)
def test_half_precision_step_matches(dtype):
    """Context and gradients of one token over a cache in bfloat16 and float16 match the plain path
    in float64.
    """
    arrays = cache_problem((6, 2), LAST_POSITIONS["ragged"], dtype)
    parity.assert_parity(over_a_cache(arrays), **yardstick(arrays))


@sample(capacity=[mha_jax.fused.attend.keys + 1])
@pytest.mark.parametrize(
    "capacity",
    [12, mha_jax.fused.attend.keys, mha_jax.fused.attend.keys + 1],
)
def test_step_near_block_size_matches(capacity):
    """Context and gradients of one token match the plain path for capacities below, at and above a
    block of keys.
    """
    arrays = problem((4, 2), (1, capacity), padding=(2, 5, 12))
    attend = functools.partial(attend_to_cache, kernel=mha_jax.fused.attend)
    parity.assert_parity(results(mha_jax, attend, arrays), **yardstick(arrays))


def test_last_cache_blocks_fit_other_blocks():
    """Blocks of 8 keys, smaller than the default last blocks of a cache, match the plain path."""
    arrays = problem((4, 2), (1, 12), padding=(2, 5, 12))
    attend = functools.partial(
        attend_to_cache, kernel=FusedAttention(few_scores=0, queries=8, keys=8)
    )
    parity.assert_parity(results(mha_jax, attend, arrays), **yardstick(arrays))


@pytest.mark.parametrize("name", ["queries", "keys", "last_keys", "heads_side_by_side"])
def test_block_size_of_zero_raises(name):
    """A block size of 0 raises an error that names the field."""
    with rejects(name, {name: 0}):
        FusedAttention(**{name: 0})


@pytest.mark.parametrize("heads", [(2, 2), (3, 1)], ids=["mha", "mqa"])
def test_slots_beyond_last_block_are_unread(heads):
    """NaN beyond the block of the longest sequence changes no bit of a step."""
    arrays = cache_problem(heads, (17, 5, 18))
    spoilt = {**arrays, **{side: arrays[side].copy() for side in ("key", "value")}}
    for side in ("key", "value"):
        spoilt[side][:, :, 20:] = np.nan  # the longest sequence ends in the block of slots 16 to 19
    function = jax.jit(lambda arrays: attend_to_cache(**arrays)[0], compiler_options=QUICKLY)
    expected, actual = (
        function({name: x for name, x in as_jax(inputs).items() if name != "cotangent"})
        for inputs in (arrays, spoilt)
    )
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("side", ["key", "value"])
def test_free_slots_have_no_effect(side):
    """Values of 1e30 in slots beyond the last position change no bit of context and gradients."""
    arrays = cache_problem((2, 2), (17, 5, 18))
    changed = changed_where_unseen(arrays, side, 1e30)
    jax.tree.map(np.testing.assert_array_equal, over_a_cache(changed), over_a_cache(arrays))


def test_step_with_relative_bias_matches():
    """One token over a cache with a relative bias and a window matches the plain path, with the
    gradient of its table.
    """
    arrays = as_jax(cache_problem((4, 2), LAST_POSITIONS["ragged"]))
    cotangent, last_positions = arrays.pop("cotangent"), arrays.pop("key_padding_lengths") - 1
    record, table = (
        RelativeBias(8, 20, bidirectional=False),
        np.linspace(-1.0, 1.0, 32, dtype=np.float32).reshape(8, 4),
    )
    head_dim = arrays["query"].shape[3]
    spec = AttentionSpec(4 * head_dim, 4, num_kv_heads=2, relative_bias=record, window_size=30)
    visible = Mask(is_causal=True, span=spec.span, q_offset=last_positions)

    def plain(query, key, value, relative_bias):
        return mha_jax.stages.attend(
            query, key, value, visible, Scores(spec, learned={"relative_bias": relative_bias})
        )[0]

    def fused(query, key, value, relative_bias):
        return SMALL_BLOCKS.step(
            query, key, value, visible, Scores(spec, learned={"relative_bias": relative_bias})
        )

    inputs = (*(arrays[side] for side in ("query", "key", "value")), jax.numpy.asarray(table))
    expected, actual = (
        jax.jit(
            lambda *inputs, attend=attend: [
                attend(*inputs),
                *jax.vjp(attend, *inputs)[1](cotangent),
            ]
        )(*inputs)
        for attend in (plain, fused)
    )
    for ours, theirs in zip(actual, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)  # a few roundings of float32


# ---- Decoding ------------------------------------------------------------------------------------

SPEC = parity.AttentionSpec(16, 4, num_kv_heads=2, head_dim=32, rope=Rope(10000.0))


@functools.cache
def layer(package, kind):
    """Return a module with the random weights of its spec, shared by tests."""
    options = {"rngs": nnx.Rngs(0)} if package is mha_jax else {}
    return parity.load_into(
        getattr(package, kind)(SPEC, **options), parity.random_weights(SPEC), SPEC
    )


@functools.cache
def decoder(package):
    """Return a module with a cache, which runs in blocks in JAX."""
    if package is not mha_jax:
        return layer(package, "MultiHeadAttentionWithCache")
    module = nnx.clone(layer(package, "MultiHeadAttentionWithCache"))
    module.kernel = SMALL_BLOCKS
    return module


@functools.cache
def tokens(num_tokens, batch=2):
    return (
        np.random.default_rng(3).standard_normal((batch, num_tokens, SPEC.d_in)).astype(np.float32)
    )


@functools.cache
def one_pass(num_tokens, dtype=torch.float32):
    """Return the output of one causal pass over all tokens, on torch's plain path."""
    module, x = layer(mha_torch, "MultiHeadSelfAttention"), torch.from_numpy(tokens(num_tokens))
    weights = {name: weight.to(dtype) for name, weight in module.state_dict().items()}
    mask = mha_torch.create_causal_mask(num_tokens)
    return mha_torch.multi_head_attention(x.to(dtype), weights, SPEC, mask=mask, need_weights=True)[
        0
    ]


def expected_of(num_tokens, part=slice(None)):
    """Return the tokens of one pass as arguments of `assert_parity`."""
    wide, same = one_pass(num_tokens, torch.float64), one_pass(num_tokens)
    return {"expected": wide[:, part], "same_precision": same[:, part]}


@pytest.fixture
def jax_step():
    """Return a compiled step of a module that may write to its cache."""
    return jax.jit(lambda module, x, cache: module(x, cache), donate_argnums=2)


def test_jax_decoding_compiles_once():
    """64 steps in JAX are traced once, and match one pass."""
    traced = []  # a program is compiled whenever it is traced

    @functools.partial(jax.jit, donate_argnums=2)
    def step(module, x, cache):
        traced.append(x.shape)
        return module(x, cache)

    module, x = decoder(mha_jax), jnp.asarray(tokens(64))
    cache, outputs = module.init_cache(2, 70), []
    for index in range(64):
        output, cache = step(module, x[:, index : index + 1], cache)
        outputs.append(output)
    assert traced == [(2, 1, SPEC.d_in)]
    assert cache.lengths.tolist() == [64, 64]
    parity.assert_parity(jnp.concatenate(outputs, axis=1), **expected_of(64))


def test_jax_step_updates_cache_in_place(jax_step):
    """A step with a donated cache returns keys and values in the same buffers."""
    module, x = layer(mha_jax, "MultiHeadAttentionWithCache"), jnp.asarray(tokens(4))
    cache = module.init_cache(2, mha_jax.fused.attend.keys + 8)
    _, cache = jax_step(module, x[:, :1], cache)
    before = [part.unsafe_buffer_pointer() for part in (cache.keys, cache.values)]
    _, cache = jax_step(module, x[:, 1:2], cache)
    assert [part.unsafe_buffer_pointer() for part in (cache.keys, cache.values)] == before


@pytest.mark.parametrize("batch", [1, 3])
def test_jax_step_needs_little_memory(jax_step, batch):
    """A step in JAX needs temporary memory below a quarter of its cached keys."""
    module = layer(mha_jax, "MultiHeadAttentionWithCache")
    cache = module.init_cache(batch, 16 * mha_jax.fused.attend.keys)
    analysis = (
        jax_step.lower(module, jnp.asarray(tokens(1, batch)), cache).compile().memory_analysis()
    )
    assert 0 < analysis.temp_size_in_bytes < cache.keys.nbytes / 4


def filled(package, counts, num_tokens, capacity):
    """Return a module and a cache that holds `counts` tokens of each sequence."""
    module, x = decoder(package), tokens(num_tokens)
    cache = module.init_cache(len(counts), capacity)
    return module, fed(package, module, x[:, : max(counts)], cache, counts)[1] if max(
        counts
    ) else cache


def fed(package, module, x, cache, new_lengths=None):
    """Return the output of a module and its cache; JAX runs compiled."""
    if package is mha_jax:
        return jitted(
            module, x, cache, None if new_lengths is None else np.array(new_lengths, np.int32)
        )
    with torch.no_grad():
        return module(torch.from_numpy(x), cache, new_lengths=new_lengths)


jitted = jax.jit(lambda module, x, cache, new_lengths: module(x, cache, new_lengths=new_lengths))


def next_tokens(counts, num_tokens, num_new):
    """Return the tokens of each sequence after the cached ones, and their expected outputs."""
    rows, positions = (
        np.arange(len(counts))[:, None],
        np.array(counts)[:, None] + np.arange(num_new),
    )
    expected = {role: x[rows, positions] for role, x in expected_of(num_tokens).items()}
    return tokens(num_tokens)[rows, positions], expected


@sample(jax=1)
@pytest.mark.parametrize("num_new", [1, 3], ids=["step", "chunk"])
@pytest.mark.parametrize("counts", [(0, 0), (20, 20), (3, 33)], ids=str)
def test_ragged_steps_match_full_pass(sibling, counts, num_new):
    """Steps and chunks over empty, even and ragged caches match one pass."""
    module, cache = filled(sibling.package, counts, 40, 43)
    x, expected = next_tokens(counts, 40, num_new)
    output, cache = fed(sibling.package, module, x, cache)
    assert np.asarray(cache.lengths).tolist() == [count + num_new for count in counts]
    parity.assert_parity(output, **expected)


@sample(jax=1)
@pytest.mark.parametrize("counts", [(20, 20), (3, 33)], ids=["even", "ragged"])
def test_padded_chunk_matches_full_pass(sibling, counts):
    """A chunk with padding over a cache matches one pass, and outputs of padding are exactly 0."""
    module, cache = filled(sibling.package, counts, 40, 43)
    x, expected = next_tokens(counts, 40, 3)
    output, cache = fed(sibling.package, module, x, cache, [1, 3])
    parity.assert_parity(output[1], **{role: value[1] for role, value in expected.items()})
    parity.assert_parity(output[0, :1], **{role: value[0, :1] for role, value in expected.items()})
    assert not np.asarray(output[0, 1:]).any()


TORCH_STEPS = {
    "prompt": [9],
    "prompt-and-steps": [5, 1, 1, 1, 1],
    "steps": [1, 1, 1],
    "chunks": [4, 3, 2],
}


@pytest.mark.parametrize("cuts", TORCH_STEPS.values(), ids=TORCH_STEPS)
@torch.inference_mode()
def test_torch_chunks_match_full_pass(cuts):
    """In torch, outputs of chunks and steps match one pass, and they leave the keys and values of
    one chunk in the cache, within rounding.
    """
    num_tokens, module = sum(cuts), layer(mha_torch, "MultiHeadAttentionWithCache")
    x, cache, outputs = torch.from_numpy(tokens(num_tokens)), module.init_cache(2, 12), []
    for new in x.split(cuts, dim=1):
        output, cache = module(new, cache)
        outputs.append(output)
    parity.assert_parity(torch.cat(outputs, dim=1), **expected_of(num_tokens))
    _, at_once = module(x, module.init_cache(2, 12))
    parity.assert_parity(
        {"cache.keys": cache.keys, "cache.values": cache.values},
        {"cache.keys": at_once.keys, "cache.values": at_once.values},
    )


@pytest.mark.parametrize("counts", [(20, 20), (3, 33)], ids=["even", "ragged"])
@torch.inference_mode()
def test_torch_step_updates_cache_in_place(counts):
    """A step in torch returns keys and values in the same storage."""
    module, cache = filled(mha_torch, counts, 40, 43)
    _, after = module(torch.from_numpy(tokens(1)), cache)
    assert [x.data_ptr() for x in (after.keys, after.values)] == [
        x.data_ptr() for x in (cache.keys, cache.values)
    ]


def allocations(run):
    """Return the sizes in bytes of all allocations during a call, including those inside
    kernels.
    """
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        run()
    events = profile.profiler.kineto_results.events()
    return [event.nbytes() for event in events if event.name() == "[memory]" and event.nbytes() > 0]


@pytest.mark.parametrize("counts", [(500, 500), (300, 500)], ids=["even", "ragged"])
@torch.inference_mode()
def test_torch_step_allocates_little(counts):
    """A step in torch allocates no array larger than a quarter of the first 300 cached keys."""
    module, cache = filled(mha_torch, counts, 501, 1024)
    x = torch.from_numpy(tokens(1))
    sizes = allocations(lambda: module(x, cache))
    assert sizes  # the output, at least
    assert max(sizes) < cache.keys[:, :, :300].nbytes / 4


@torch.inference_mode()
def test_torch_copy_of_cache_is_measured():  # the control of the test above
    """Control: a copy of a cache allocates an array of the size of its keys."""
    _, cache = filled(mha_torch, (500, 500), 501, 1024)
    sizes = allocations(lambda: cache.grow(1024))
    assert max(sizes) >= cache.keys.nbytes


@torch.inference_mode()
def test_torch_compiled_step_matches():
    """A compiled step over even and ragged caches matches one pass."""
    torch.compiler.reset()
    compiled = torch.compile(decoder(mha_torch), fullgraph=True, backend="eager")
    for counts in ((20, 20), (3, 33)):
        _, cache = filled(mha_torch, counts, 40, 43)
        x, expected = next_tokens(counts, 40, 1)
        output, cache = compiled(torch.from_numpy(x), cache)
        assert cache.lengths.tolist() == [count + 1 for count in counts]
        parity.assert_parity(output, **expected)


@sample(backend=["aot_eager"])
@torch.inference_mode()
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_torch_compiled_overflow_yields_nan(backend):
    """A compiled step without free slots returns NaN for that sequence and leaves cached tokens
    unchanged.
    """
    torch.compiler.reset()
    compiled = torch.compile(decoder(mha_torch), fullgraph=True, backend=backend)
    _, cache = filled(mha_torch, (2, 1), 2, 2)
    before = [x.clone() for x in cache.slots.values()]
    output, cache = compiled(torch.from_numpy(tokens(1)), cache)
    assert cache.lengths.tolist() == [2, 2]
    assert output.isnan().all(dim=(1, 2)).tolist() == [True, False]
    assert not output[1].isnan().any()
    for was, slots_now in zip(before, cache.slots.values(), strict=True):
        assert torch.equal(was[0], slots_now[0])
        assert torch.equal(was[1, :, 0], slots_now[1, :, 0])


@torch.no_grad()
def test_torch_compiled_layer_matches():
    """Compiled self-attention with lengths matches the uncompiled module."""
    module, x = layer(mha_torch, "MultiHeadSelfAttention"), torch.from_numpy(tokens(9))
    lengths = torch.tensor([4, 9])
    torch.compiler.reset()
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    actual, expected = (
        layer(x, is_causal=True, key_padding_lengths=lengths) for layer in (compiled, module)
    )
    parity.assert_parity(actual, expected)


# ---- torch: the cheapest form of a mask ----------------------------------------------------------

torch_fused = fused_attention(mha_torch)


@sample(name=IN_MAKE_TEST)
@every_problem
def test_torch_kernel_matches_plain_path(name):
    """Context and gradients of the fused path of torch match the plain path in float64."""
    arrays, options = named(name)
    parity.assert_parity(
        results(mha_torch, torch_fused, arrays, **options), **yardstick(arrays, **options)
    )


def test_torch_one_key_returns_its_value():
    """With one key, the context is its value exactly, and gradients of scores are 0 within
    rounding.
    """
    assert_single_key_is_visible(results(mha_torch, torch_fused, single_key()), single_key())


@sample(where=lambda name: name in IN_MAKE_TEST)
@problems_in_half_precision
def test_torch_half_precision_matches(name, dtype):
    """Context and gradients of the fused path in bfloat16 and float16 match the plain path in
    float64.
    """
    arrays, options = named(name, dtype)
    parity.assert_parity(
        results(mha_torch, torch_fused, arrays, **options), **yardstick(arrays, **options)
    )


PADDING = {"some": (1, 17, 41), "none": (41, 41, 41), "all": (0, 0, 0), "one-empty": (41, 0, 5)}


@sample(8)
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("padding", PADDING.values(), ids=PADDING)
@pytest.mark.parametrize("heads", [(2, 2), (4, 2)], ids=["mha", "gqa"])
def test_torch_lengths_match_plain_path(heads, padding, is_causal):
    """Lengths from 0 to all keys match the plain path, causal or not, with and without grouped
    heads.
    """
    arrays = problem(heads, padding=padding)
    actual = results(mha_torch, torch_fused, arrays, is_causal=is_causal)
    parity.assert_parity(actual, **yardstick(arrays, is_causal=is_causal))


def strided(x):
    """Return the same values with tokens outermost in memory and strided features."""
    if x.ndim < 4:
        return x
    memory = torch.zeros(*x.transpose(1, 2).shape[:3], 2 * x.shape[3], dtype=x.dtype)
    memory[..., ::2] = x.transpose(1, 2)
    return memory[..., ::2].transpose(1, 2)


@pytest.mark.parametrize("name", ["causal", "padding-causal", "gqa", "bias-b-1-t-s"])
def test_torch_kernel_accepts_strided_inputs(name):
    """Inputs with tokens outermost in memory and strided features match the plain path."""
    arrays, options = named(name)

    def function(**arrays):
        return torch_fused(**{name: strided(x) for name, x in arrays.items()}, **options)

    parity.assert_parity(results(mha_torch, function, arrays), **yardstick(arrays, **options))


@pytest.fixture
def kernel_calls(monkeypatch):
    """Return a list to which the keywords of each call of torch's own function are appended."""
    calls, kernel = [], torch.nn.functional.scaled_dot_product_attention

    def note(*arrays, **keywords):
        calls.append(keywords)
        return kernel(*arrays, **keywords)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", note)
    return calls


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("padding", [None, (1, 17, 41)], ids=["whole", "padded"])
def test_torch_kernel_gets_no_mask(kernel_calls, padding, is_causal):
    """The kernel gets is_causal and no mask: once for all sequences, or once for each padded
    one.
    """
    results(mha_torch, torch_fused, problem(padding=padding), is_causal=is_causal)
    calls = [(call["attn_mask"], call["is_causal"]) for call in kernel_calls]
    assert calls == [(None, is_causal)] * (1 if padding is None else BATCH)


@pytest.fixture
def no_masks(monkeypatch):
    """Make all functions that build masks fail."""

    def fail(*args, **keywords):
        raise AssertionError("a mask is built")

    monkeypatch.setattr(mha_torch.masks.Mask, "implicit_bool", fail)
    for name in ("create_causal_mask", "create_padding_mask"):
        monkeypatch.setattr(mha_torch.mask_arrays, name, fail)


@pytest.mark.usefixtures("no_masks")
@pytest.mark.parametrize("padding", [None, [4, 9]], ids=["whole", "padded"])
@torch.no_grad()
def test_torch_causal_layer_builds_no_mask(padding):
    """Causal self-attention, with or without padding, does not call the functions that build
    masks.
    """
    module = layer(mha_torch, "MultiHeadSelfAttention")
    module(torch.from_numpy(tokens(9)), is_causal=True, key_padding_lengths=padding)


@pytest.mark.usefixtures("no_masks")
@torch.no_grad()
def test_torch_empty_sequence_builds_mask():  # the control of the test above
    """Control: causal self-attention with an empty sequence builds a mask."""
    module = layer(mha_torch, "MultiHeadSelfAttention")
    with pytest.raises(AssertionError, match="a mask is built"):
        module(torch.from_numpy(tokens(9)), is_causal=True, key_padding_lengths=[0, 9])


# ---- JAX: off the CPU ----------------------------------------------------------------------------

OFF_THE_CPU = [
    "full",
    "causal",
    "causal-square",
    "causal-fewer-keys",
    "mask-of-keys",
    "mask-1-n-t-1",
    "mask-of-blocks",
    "mask-of-rows-causal",
    "everything-hidden",
    "padding",
    "padding-causal",
    "padding-causal-mask",
    "gqa-mask-padding",
    "mqa",
    "bias-of-keys",
    "bias-gqa",
    "bias-infinite",
    "bias-infinite-rows",
]


@sample(
    name=[
        *("causal", "causal-fewer-keys", "mask-of-blocks", "everything-hidden"),
        *("padding-causal-mask", "gqa-mask-padding", "bias-gqa", "bias-infinite-rows"),
    ]
)
@pytest.mark.usefixtures("off_the_cpu")
@pytest.mark.parametrize("name", OFF_THE_CPU)
def test_library_matches_plain_path(name):
    """Context and gradients of JAX's own function match the plain path in float64."""
    arrays, options = named(name)
    parity.assert_parity(
        results(mha_jax, jax_fused, arrays, **options), **yardstick(arrays, **options)
    )


@pytest.mark.usefixtures("off_the_cpu")
@pytest.mark.parametrize("name", ["causal-square", "bias-infinite", "gqa-mask-padding"])
def test_library_matches_in_bfloat16(name):  # float16 has no gradient on a CPU
    """Context and gradients of JAX's own function in bfloat16 match the plain path in float64."""
    arrays, options = named(name, ml_dtypes.bfloat16)
    parity.assert_parity(
        results(mha_jax, jax_fused, arrays, **options), **yardstick(arrays, **options)
    )


@pytest.mark.usefixtures("off_the_cpu")
def test_library_step_matches_plain_path():
    """Context and gradients of one token over a cache, by JAX's own function, match the plain path
    in float64.
    """
    arrays = cache_problem((6, 2), LAST_POSITIONS["ragged"])
    parity.assert_parity(results(mha_jax, attend_to_cache, arrays), **yardstick(arrays))


@pytest.mark.usefixtures("off_the_cpu")
@pytest.mark.parametrize("features", [3, 12])
def test_library_accepts_other_value_width(features, rng):
    """JAX's own function with narrower or wider values than keys matches the plain path within
    1e-6.
    """
    q, k, v = (
        jax.numpy.asarray(rng.standard_normal((2, n, 5, 8)), jax.numpy.float32) for n in (4, 2, 2)
    )
    v = jax.numpy.concatenate([v, v], axis=3)[..., :features]
    actual, _ = jax_fused(q, k, v, is_causal=True)
    expected, _ = plain_attention(mha_jax)(q, k, v, is_causal=True)
    assert actual.shape == (2, 4, 5, features)
    assert float(abs(actual - expected).max()) <= 1e-6


@pytest.fixture
def library_calls(monkeypatch):
    """Return a list to which keywords of JAX's own function are appended; it always runs its
    portable form.
    """
    calls, library = [], jax.nn.dot_product_attention

    def note(*arrays, **keywords):
        calls.append(keywords)
        return library(*arrays, **{**keywords, "implementation": "xla"})

    monkeypatch.setattr(jax.nn, "dot_product_attention", note)
    return calls


@pytest.mark.parametrize(
    ("platform", "dtype", "head_dim", "expected"),
    [
        ("gpu", np.float16, 64, "cudnn"),
        ("gpu", ml_dtypes.bfloat16, 128, "cudnn"),
        ("gpu", np.float32, 64, "xla"),
        ("gpu", np.float16, 20, "xla"),
        ("gpu", np.float16, 256, "xla"),
        ("tpu", ml_dtypes.bfloat16, 64, "xla"),
    ],
    ids=["float16", "bfloat16", "float32", "odd-width", "too-wide", "tpu"],
)
def test_cudnn_is_used_where_supported(
    monkeypatch, library_calls, platform, dtype, head_dim, expected
):
    """cuDNN is used for half precision and supported widths on GPUs, and XLA otherwise."""
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    x = jax.ShapeDtypeStruct((1, 2, 4, head_dim), dtype)
    jax.eval_shape(lambda x: jax_fused(x, x, x, is_causal=True)[0], x)
    assert [(call["implementation"], call["is_causal"]) for call in library_calls] == [
        (expected, True)
    ]


def test_cpu_arrays_use_cpu_kernels(monkeypatch, library_calls):
    """Arrays on a CPU use its kernels even if the default platform is a GPU; without known devices,
    the default applies.
    """
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    x = jnp.ones((1, 2, 24, HEAD_DIM), jnp.float16)

    def attend(x):
        return jax_fused(x, x, x, is_causal=True, kernel=SMALL_BLOCKS)[0]

    mesh = jax.make_mesh((1,), ("devices",))  # its array types contain their placement
    divided = jax.device_put(x, NamedSharding(mesh, PartitionSpec()))
    for function in (attend, jax.grad(lambda x: attend(x).sum())):
        np.testing.assert_array_equal(function(x), np.asarray(function(divided)))
    assert not library_calls
    jax.eval_shape(attend, x)  # their device is not yet known
    assert [call["implementation"] for call in library_calls] == ["cudnn"]
    with jax.default_device("cpu"):
        jax.eval_shape(attend, x)
    assert len(library_calls) == 1


def test_cudnn_gets_no_float16_mask(monkeypatch, library_calls):
    """cuDNN gets masks in bfloat16 but not in float16, in which it hides keys by -32768: other
    scores fall below that.
    """
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    mask = jnp.zeros((4, 4), bool)
    for dtype, expected in ((np.float16, "xla"), (ml_dtypes.bfloat16, "cudnn")):
        x = jax.ShapeDtypeStruct((1, 2, 4, 64), dtype)
        jax.eval_shape(lambda x: jax_fused(x, x, x, mask=mask)[0], x)
        assert library_calls.pop()["implementation"] == expected


# Windows of JAX's own function with rows without a key: beyond the lengths or beyond the keys.
WINDOWS_OF_LIBRARY = {
    "causal-padding-gqa": ({"heads": (4, 2), "padding": LENGTHS}, True),
    "both-ways-padding": ({"padding": (0, 3, 41)}, False),
    "beyond-keys": ({"lengths": (41, 29)}, True),
}


@pytest.mark.parametrize("name", WINDOWS_OF_LIBRARY)
def test_library_window_matches_mask(off_the_cpu, library_calls, name):
    """A window passed to JAX's own function matches the plain path with a mask, also in rows
    without a key.
    """
    keywords, is_causal = WINDOWS_OF_LIBRARY[name]
    arrays = problem(**keywords)
    num_queries, num_keys = arrays["query"].shape[2], arrays["key"].shape[2]
    out_of_reach = abs(np.arange(num_queries)[:, None] - np.arange(num_keys)) >= 5
    masked = {**arrays, "mask": out_of_reach}
    assert is_hidden(masked, is_causal).all(axis=-1).any()
    num_heads, num_kv_heads = keywords.get("heads", (2, 2))
    spec = AttentionSpec(num_heads * HEAD_DIM, num_heads, num_kv_heads=num_kv_heads, window_size=5)
    actual = results(mha_jax, jax_fused, arrays, spec=spec, is_causal=is_causal)
    parity.assert_parity(actual, **yardstick(masked, is_causal=is_causal))
    assert [call["local_window_size"] for call in library_calls] == [(4, 0 if is_causal else 4)]


NUM_TOLD = {"square": (48, 48), "wide": (40, 48), "tall": (48, 40)}
# sizes, span, is_causal, lengths, and the options that the library gets; None if it gets a mask
TOLD = {
    "nothing": ("wide", {}, False, False, {}),
    "causal-wide": ("wide", {}, True, False, {}),
    "causal-tall": ("tall", {}, True, False, {}),
    "lengths-causal": ("tall", {}, True, True, {}),
    "window": ("wide", {"window_size": 8}, True, False, {"local_window_size": (7, 0)}),
    "window-both-ways": ("wide", {"window_size": 8}, False, False, None),
    "window-lengths": ("square", {"window_size": 8}, True, True, None),
    "window-tall": ("tall", {"window_size": 8}, True, False, None),
    "chunk": ("square", {"chunk_size": 8}, True, False, None),
}


@sample(8)
@pytest.mark.parametrize("platform", ["gpu", "tpu"])
@pytest.mark.parametrize("name", TOLD)
def test_library_gets_options_where_possible(monkeypatch, platform, name):
    """Where JAX's own function has options, it gets them, and no array of all scores is made."""
    sizes, span, is_causal, has_lengths, window = TOLD[name]
    calls = []

    def library(query, *others, **keywords):
        calls.append((others[2:], keywords))
        return query

    monkeypatch.setattr(jax.nn, "dot_product_attention", library)
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    num_queries, num_keys = NUM_TOLD[sizes]
    query, key = (jnp.zeros((2, 2, count, 16), jnp.bfloat16) for count in (num_queries, num_keys))
    spec = AttentionSpec(32, 2, **span)

    def function(query, key, lengths):
        return jax_fused(query, key, key, spec, is_causal=is_causal, key_padding_lengths=lengths)[0]

    made = str(
        jax.make_jaxpr(function)(query, key, jnp.array([0, 30], jnp.int32) if has_lengths else None)
    )
    [(mask_and_bias, options_seen)] = calls
    if platform == "tpu" and "window_size" in span:  # XLA takes any window
        window = {"local_window_size": (7, 0 if is_causal else 7)}
    is_told = mask_and_bias == (None, None)
    assert is_told == (window is not None)
    assert is_told != (f",{num_queries},{num_keys}]" in made)
    if is_told:
        options_seen.pop("scale")
        assert options_seen.pop("implementation") == ("cudnn" if platform == "gpu" else "xla")
        assert ("key_value_seq_lengths" in options_seen) == has_lengths
        assert {**options_seen, "key_value_seq_lengths": None} == {
            "is_causal": is_causal,
            "key_value_seq_lengths": None,
            **window,
        }


@sample(12, seed=1)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "hidden", [{}, {"key_padding_lengths": [150, 290]}], ids=["alone", "padding"]
)
@pytest.mark.parametrize(
    "span", [{}, {"window_size": 40}, {"chunk_size": 100}], ids=["all", "window", "chunk"]
)
@pytest.mark.parametrize("added", ["alibi", "relative_bias"])
def test_distance_biases_match_plain_path(added, span, is_causal, hidden):
    """ALiBi and relative biases of 290 queries with sinks match the plain path in torch, with
    gradients. Torch makes the bias for a few queries at once; small blocks of JAX are in all
    tests above.
    """
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, 2, 290, 8, dtype=torch.float64, generator=generator).requires_grad_()
        for _ in range(3)
    )
    leaves, sinks = (
        {"query": q, "key": k, "value": v},
        torch.tensor([0.5, -1.0], dtype=torch.float64),
    )
    if added == "relative_bias":
        leaves[added] = torch.randn(8, 2, dtype=torch.float64, generator=generator).requires_grad_()
    spec = AttentionSpec(
        16, 2, **{added: Alibi() if added == "alibi" else RelativeBias(8, 200)}, sinks=True, **span
    )
    contexts = [
        attend(spec=spec, is_causal=is_causal, sinks=sinks, **leaves, **hidden)[0]
        for attend in (plain_attention(mha_torch), torch_fused)
    ]
    expected, actual = (
        [x, *torch.autograd.grad(x.square().sum(), [*leaves.values()])] for x in contexts
    )
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)

"""Multi-head attention in every implementation: on paper, by its properties, and through every way
in.

A layer is reached by four paths: the function or the module, with attention weights (the plain
path) or without them (the fused one). A claim about every path is tested on all four, in the widest
dtype that the path takes.
"""

import inspect
import math
from dataclasses import fields

import ml_dtypes
import numpy as np
import pytest
from helpers.input_errors import rejects, rejects_type
from helpers.samples import sample
from helpers.siblings import DTYPES, EPSILON, PATHS
from helpers.textbook import TEXTBOOK_OUTPUT

import parity
from mha_spec import (
    Alibi,
    AttentionSpec,
    GridBias,
    Latent,
    Norm,
    RelativeBias,
    RelativeProducts,
    Rope,
    SinusoidProducts,
    Temperature,
)
from parity.measure.core.problem import TEXTBOOK_INPUT, TEXTBOOK_WEIGHTS

SPEC = AttentionSpec(8, 2)
BARE = AttentionSpec(8, 2, out_proj=False)  # the context is the output
SPECS = {
    "plain": SPEC,
    "bare": BARE,
    "gqa": AttentionSpec(24, 6, num_kv_heads=2),
    "mqa": AttentionSpec(8, 4, num_kv_heads=1),
    "head-dim": AttentionSpec(8, 2, head_dim=6),
    "cross": AttentionSpec(8, 2, d_in=5, d_kv=7),
    "no-biases": AttentionSpec(8, 2, qkv_bias=False, out_bias=False),
    "qkv-bias-only": AttentionSpec(8, 2, out_bias=False),
    "out-bias-only": AttentionSpec(8, 2, qkv_bias=False),
}
every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=list(SPECS))
every_path = pytest.mark.parametrize("path", PATHS)
plain_paths = pytest.mark.parametrize("path", ["function-plain", "module-plain"])
every_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))
both_forms = pytest.mark.parametrize("form", ["plain", "fused"])

# Query 1 of the first sequence attends to no key, and key 3 is hidden from all.
MASK = np.array(
    [
        [[[0, 0, 0, 1], [1, 1, 1, 1], [0, 1, 0, 1]]],
        [[[0, 0, 0, 1], [0, 0, 1, 1], [1, 0, 0, 1]]],
    ],
    bool,
)
EMPTY = (0, slice(None), 1)  # the empty row: of weights (B, N, T, S) and contexts (B, N, T, H)


def problem(spec, dtype):
    """Weights by canonical name, two sequences of three queries, and four keys each."""
    rng = np.random.default_rng(1)
    inputs = {
        "query": rng.standard_normal((2, 3, spec.d_in)),
        "key": rng.standard_normal((2, 4, spec.d_kv)),
    }
    return {name: x.astype(dtype) for name, x in {**parity.random_weights(spec), **inputs}.items()}


def problem_of(sibling, path, spec):
    """The problem in the widest dtype of a path."""
    return problem(spec, sibling.dtype_of(path))


def full(shape, value=1.0):
    return np.full(shape, value, np.float32)


# ---- On paper ------------------------------------------------------------------------------------


def test_heads_are_neighboring_features(sibling):
    """`split_heads` gives each head features that lie next to each other."""
    x = sibling.array(np.arange(8, dtype=np.float32).reshape(1, 2, 4))
    heads = sibling.numpy(sibling.package.split_heads(x, 2))
    assert heads.tolist() == [[[[0, 1], [4, 5]], [[2, 3], [6, 7]]]]


def test_combining_undoes_splitting(sibling, rng):
    """`combine_heads` restores the features that `split_heads` divided."""
    x = rng.standard_normal((2, 3, 12)).astype(np.float32)
    heads = sibling.package.split_heads(sibling.array(x), 4)
    assert np.array_equal(sibling.numpy(sibling.package.combine_heads(heads)), x)


def test_key_heads_repeat_in_groups(sibling):
    """Neighboring query heads share a key head: they are repeated, not tiled."""
    heads = np.array([0.0, 1.0], np.float32).reshape(1, 2, 1, 1)
    repeated = sibling.package.repeat_kv_heads(sibling.array(heads), 6)
    assert sibling.numpy(repeated).ravel().tolist() == [0, 0, 0, 1, 1, 1]


def test_scores_divide_by_root_of_width(sibling):
    """Scores are scaled by the square root of the width of a head."""
    ones = sibling.array(full((1, 1, 1, 4)))
    assert sibling.numpy(sibling.package.attention_scores(ones, ones)).item() == 4 / math.sqrt(4)


def test_soft_cap_comes_before_the_bias(sibling):
    """The soft cap bounds the scores, and then the bias is added."""
    ones, bias = sibling.array(full((1, 1, 1, 4))), sibling.option(full((1, 1, 1, 1)))
    spec = AttentionSpec(4, 1, soft_cap=3.0)
    score = sibling.numpy(sibling.package.attention_scores(ones, ones, bias, spec)).item()
    assert score == pytest.approx(3.0 * math.tanh(2.0 / 3.0) + 1.0, rel=1e-6)


def test_alibi_is_slope_times_distance(sibling):
    """ALiBi subtracts the slope of a head times the distance from its scores, counted from an
    offset if given.
    """
    zeros, spec = sibling.array(full((1, 2, 2, 4), 0.0)), AttentionSpec(8, 2, alibi=Alibi())
    scores = sibling.package.attention_scores
    slopes = np.array([2.0**-4, 2.0**-8])[:, None, None]
    assert sibling.numpy(scores(zeros, zeros, None, spec))[0] == pytest.approx(
        -slopes * np.array([[0, 1], [1, 0]])
    )
    offset = sibling.option(np.array([3], np.int32))
    later = sibling.numpy(scores(zeros, zeros, None, spec, offset))[0]
    assert later == pytest.approx(-slopes * np.array([[3, 2], [4, 3]]))


@sample(jax=1)
@every_dtype
def test_relative_bias_is_a_row_of_a_table(sibling, dtype):
    """A relative bias is the row of the table that belongs to the bucket of a distance."""
    zeros, record = sibling.array(np.zeros((2, 2, 2, 4), dtype)), RelativeBias(4, 3)
    scores, spec = sibling.package.attention_scores, AttentionSpec(8, 2, relative_bias=record)
    table = np.arange(8, dtype=dtype).reshape(
        4, 2
    )  # of the buckets 0; 1 and more before; none; 1 and more after
    rows = sibling.stage_weight("relative_bias", table)
    expected = table[[[0, 3], [1, 0]]].transpose(2, 0, 1)
    assert sibling.numpy(
        scores(zeros, zeros, None, spec, None, {"relative_bias": rows})
    ) == pytest.approx(np.stack([expected] * 2))
    offsets = sibling.option(np.array([1, 0], np.int32))
    later = sibling.numpy(scores(zeros, zeros, None, spec, offsets, {"relative_bias": rows}))
    assert later == pytest.approx(np.stack([table[[[1, 0], [1, 1]]].transpose(2, 0, 1), expected]))


def test_grid_bias_is_a_row_of_a_table(sibling):
    """A grid bias is the row of the table that belongs to the positions of both tokens; more tokens
    than the grid has raise an error.
    """
    zeros, record = sibling.array(full((2, 2, 2, 4), 0.0)), GridBias(1, 2, class_token=True)
    scores, spec = sibling.package.attention_scores, AttentionSpec(8, 2, relative_bias=record)
    # Rows of 1 after, 0, 1 before; the class token as query, as key, as both.
    table = np.arange(12, dtype=np.float32).reshape(6, 2)
    rows = sibling.stage_weight("relative_bias", table)
    expected = table[[[5, 3], [4, 1]]].transpose(2, 0, 1)
    assert sibling.numpy(
        scores(zeros, zeros, None, spec, None, {"relative_bias": rows})
    ) == pytest.approx(np.stack([expected] * 2))
    offsets = sibling.option(np.array([1, 0], np.int32))
    later = sibling.numpy(scores(zeros, zeros, None, spec, offsets, {"relative_bias": rows}))
    assert later == pytest.approx(np.stack([table[[[4, 1], [4, 2]]].transpose(2, 0, 1), expected]))
    x = sibling.array(full((1, 2, 4, 4), 0.0))
    with rejects("tokens", {"(T, S)": (4, 4)}):
        sibling.package.scaled_dot_product_attention(
            x, x, x, spec=spec, learned={"relative_bias": rows}
        )


def test_relative_products_use_a_distance(sibling):
    """Relative products add the products of queries and keys with the vectors of their distance,
    and are scaled.
    """
    record = RelativeProducts(1, 2, of_keys=True, per_head=True)
    spec = AttentionSpec(8, 2, num_kv_heads=1, scale=0.5, relative_products=record)
    rng = np.random.default_rng(0)
    q, k = (
        rng.normal(size=(2, 2, 2, 4)).astype(np.float32),
        rng.normal(size=(2, 1, 4, 4)).astype(np.float32),
    )
    of_queries, of_keys = rng.normal(size=(2, 4, 2, 4)).astype(np.float32)
    tables = {"relative_keys": of_queries, "relative_queries": of_keys}
    for offsets in (None, np.array([0, 3], np.int32)):
        expected = np.empty((2, 2, 2, 4))
        for b, n, t, s in np.ndindex(expected.shape):
            offset = 0 if offsets is None else offsets[b]
            bucket = min(max(s - t - offset, -1), 2) + 1
            products = (
                q[b, n, t] @ (k[b, 0, s] + of_queries[bucket, n]) + k[b, 0, s] @ of_keys[bucket, n]
            )
            expected[b, n, t, s] = 0.5 * products
        vectors = {name: sibling.stage_weight(name, table) for name, table in tables.items()}
        arguments = (
            sibling.array(q),
            sibling.array(k),
            None,
            spec,
            sibling.option(offsets),
            vectors,
        )
        actual = sibling.package.attention_scores(*arguments)
        assert sibling.numpy(actual) == pytest.approx(expected, abs=1e-5)


def test_sinusoid_products_use_a_distance(sibling):
    """Queries with a bias are multiplied by projected sinusoids of query - key, keys by another
    bias.
    """
    spec = AttentionSpec(
        8, 2, num_kv_heads=1, scale=0.5, d_in=4, relative_products=SinusoidProducts(100.0)
    )
    rng = np.random.default_rng(0)
    q = rng.normal(size=(2, 2, 2, 4)).astype(np.float32)
    k = rng.normal(size=(2, 1, 4, 4)).astype(np.float32)
    weights = {
        name: rng.normal(size=shape).astype(np.float32) for name, shape in spec.score_shapes.items()
    }
    table, content_bias, position_bias = weights.values()
    for offsets in (None, np.array([0, 3], np.int32)):
        expected = np.empty((2, 2, 2, 4))
        for b, n, t, s in np.ndindex(expected.shape):
            offset = 0 if offsets is None else offsets[b]
            distance = t + offset - s
            sinusoids = []
            for frequency in (1.0, 0.1):
                sinusoids += [math.sin(frequency * distance), math.cos(frequency * distance)]
            vector = np.array(sinusoids) @ table[:, n]
            products = (q[b, n, t] + content_bias[n]) @ k[b, 0, s]
            expected[b, n, t, s] = 0.5 * (products + (q[b, n, t] + position_bias[n]) @ vector)
        learned = {name: sibling.stage_weight(name, x) for name, x in weights.items()}
        actual = sibling.package.attention_scores(
            sibling.array(q), sibling.array(k), None, spec, sibling.option(offsets), learned
        )
        assert sibling.numpy(actual) == pytest.approx(expected, abs=1e-5)


def test_sinks_take_weight_and_give_none(sibling):
    """A sink takes weight from the keys of its head, whose weights then sum to less than one."""
    scores, sinks = (
        np.array([[[[0.0, 1.0]], [[2.0, 3.0]]]], np.float32),
        np.array([2.0, -1.0], np.float32),
    )
    hidden = sibling.option(np.array([[[[False, True]]], [[[True, True]]]]))
    softmax, sinks = sibling.package.masked_softmax, sibling.stage_weight("sinks", sinks)
    actual = sibling.numpy(softmax(sibling.array(np.repeat(scores, 2, 0)), hidden, sinks))
    expected = np.array([1 / (1 + math.e**2), 1 / (1 + math.e**-3)])
    sibling.assert_close(actual[0, :, 0, 0], expected, within=8 * EPSILON)
    assert not actual[0, ..., 1].any()
    assert not actual[1].any()  # in a row without a key, the sink has all weight
    visible_weight = sibling.numpy(softmax(sibling.array(scores), None, sinks)).sum(axis=-1)[0, 0]
    sibling.assert_close(
        visible_weight, np.array([(1 + math.e) / (1 + math.e + math.e**2)]), within=8 * EPSILON
    )


def test_softmax_of_two_keys_is_one_and_e(sibling):
    """Scores of 0 and 1 have weights in the ratio of 1 to e."""
    weights = sibling.package.masked_softmax(sibling.array(np.array([[[[0.0, 1.0]]]], np.float32)))
    expected = np.array([1.0, math.e]) / (1.0 + math.e)
    sibling.assert_close(sibling.numpy(weights)[0, 0, 0], expected, within=EPSILON)  # one rounding


@sample(jax=1)
@both_forms
def test_two_keys_weigh_one_and_e(sibling, form):
    """Attention to two keys with scores 0 and 1 weighs their values by 1 and e."""
    query, key, value = [[[[1.0]]]], [[[[0.0], [1.0]]]], [[[[10.0], [20.0]]]]
    heads = (np.array(x, sibling.dtype_of(form)) for x in (query, key, value))
    expected = np.array([[[[(10 + 20 * math.e) / (1 + math.e)]]]])
    # Two products and a sum, each rounded once, of values of at most 20.
    sibling.assert_close(sibling.attend_heads(form, *heads), expected, within=20 * 3 * EPSILON)


def test_visible_keys_share_all_weight(sibling):
    """A masked key has a weight of 0, and the others share its weight."""
    mask = sibling.option(np.array([[False, True, False]]))
    weights = sibling.numpy(
        sibling.package.masked_softmax(sibling.array(full((1, 1, 1, 3), 0.0)), mask)
    )[0, 0, 0]
    assert weights[1] == 0.0
    sibling.assert_close(weights, np.array([0.5, 0.0, 0.5]), within=0.0)


@sample(jax=1)
@both_forms
def test_bias_multiplies_by_its_exponential(sibling, form):
    """A bias of log 3 makes a weight three times as large: 1/4 and 3/4."""
    dtype = sibling.dtype_of(form)
    zeros, value = np.zeros((1, 1, 1, 1), dtype), np.array([[[[0.0], [4.0]]]], dtype)
    bias = np.array([[0.0, math.log(3.0)]], np.float32)
    context = sibling.attend_heads(form, zeros, np.zeros_like(value), value, bias=bias)
    # The logarithm, the exponential, the division and the product are rounded once each.
    sibling.assert_close(context, np.array([[[[3.0]]]]), within=3 * 4 * EPSILON)


def test_temperature_grows_with_the_length(sibling):
    """A temperature grows by the logarithm of the lengths passed.

    With a scale of 1 / ln 2 and first position 1 it is 1 at positions 0 to 2, 2 at 3 to 6, 1 +
    log2(3) at 7, 3 at 11.
    """
    x = sibling.array(full((2, 1, 4, 32)))
    positions = sibling.option(np.array([[0, 2, 3, 6], [7, 10, 11, 14]], np.int32))
    temperature = Temperature(4, 1.0 / math.log(2.0), first_position=1)
    actual = sibling.numpy(sibling.package.apply_temperature(x, positions, temperature))
    expected = np.array([[1.0, 1.0, 2.0, 2.0], [1.0 + math.log2(3.0)] * 2 + [3.0] * 2])
    sibling.assert_close(
        actual, np.broadcast_to(expected[:, None, :, None], actual.shape), within=8 * EPSILON
    )


def test_temperature_takes_positions(sibling, rng):
    """A layer with a temperature counts positions from zero, or takes others, also without RoPE."""
    spec = AttentionSpec(8, 2, temperature=Temperature(4))
    module = sibling.filled("MultiHeadAttention", spec)
    x = sibling.array(rng.standard_normal((2, 5, 8)).astype(np.float32))

    def output(*positions):
        options = {"positions": sibling.option(np.array(positions, np.int32))} if positions else {}
        return sibling.numpy(module(x, **options)[0])

    assert np.array_equal(output(), output(range(5)))
    assert np.abs(output() - output(range(3, 8))).max() > 1e-3
    with rejects("positions", {"positions.shape": (1, 4)}):
        output(range(4))
    with rejects_type("temperature", temperature=4):
        heads = sibling.array(full((2, 1, 5, 8)))
        sibling.package.apply_temperature(heads, sibling.option(np.zeros((1, 5), np.int32)), 4)


# ---- A published example -------------------------------------------------------------------------

TEXTBOOK = {name: np.array(rows, np.float32) for name, rows in TEXTBOOK_WEIGHTS.items()}
TOKENS = np.array([TEXTBOOK_INPUT] * 2, np.float32)
PRINTED = np.array([TEXTBOOK_OUTPUT] * 2)
TEXTBOOK_SPEC = AttentionSpec(4, 2, d_in=3, qkv_bias=False, out_proj=False)
FOUR_DECIMALS = 0.5e-4 + 1e-6  # half of the last digit printed, and float32's own rounding


def causal(sibling, size):
    return sibling.numpy(sibling.package.create_causal_mask(size))


@sample(jax=1)
@every_path
def test_textbook_example_is_reproduced(sibling, path):
    """The output printed in a book, to its four decimals in float32."""
    arrays = {
        name: x.astype(sibling.dtype_of(path)) for name, x in {**TEXTBOOK, "query": TOKENS}.items()
    }
    output = sibling.attended(path, TEXTBOOK_SPEC, arrays, mask=causal(sibling, 6))
    if sibling.dtype_of(path) is np.float32:
        assert np.abs(output - PRINTED).max() <= FOUR_DECIMALS + sibling.rounding
    else:
        sibling.assert_close(output, PRINTED, within=0.0)


@sample(jax=1)
@plain_paths
def test_textbook_example_is_two_layers(sibling, path):
    """The example is two layers of one head each, side by side, as the book explains it."""
    spec = AttentionSpec(2, 1, d_in=3, qkv_bias=False, out_proj=False)

    def single_head(rows):
        weights = {name: x[rows] for name, x in TEXTBOOK.items()}
        return sibling.attended(path, spec, {**weights, "query": TOKENS}, mask=causal(sibling, 6))

    output = np.concatenate([single_head(slice(0, 2)), single_head(slice(2, 4))], axis=-1)
    assert np.abs(output - PRINTED).max() <= FOUR_DECIMALS + sibling.rounding


def test_textbook_example_is_self_attention(sibling):
    """The module for self-attention builds the causal mask of the example."""
    module = sibling.filled("MultiHeadSelfAttention", TEXTBOOK_SPEC, TEXTBOOK)
    output = sibling.numpy(module(sibling.array(TOKENS), is_causal=True))
    output = sibling.without_padding(output, TEXTBOOK_SPEC)
    assert np.abs(output - PRINTED).max() <= FOUR_DECIMALS + sibling.rounding


# ---- Attention weights ---------------------------------------------------------------------------


@sample(jax=1)
@every_dtype
@plain_paths
def test_attention_weights_sum_to_one(sibling, path, dtype):
    """Attention weights of a row sum to one, or to zero in an empty row."""
    _, attn_weights = sibling.attend(path, SPEC, problem(SPEC, dtype), mask=MASK)
    assert attn_weights is not None
    expected = np.ones((2, 2, 3))
    expected[EMPTY] = 0.0
    # Each weight is rounded to the dtype once, by half an epsilon of itself; the softmax adds
    # float32's rounding.
    tolerance = float(ml_dtypes.finfo(dtype).eps) / 2 + 4 * EPSILON
    assert (
        np.abs(attn_weights.astype(np.float64).sum(axis=-1) - expected).max()
        <= tolerance + sibling.rounding
    )


@sample(jax=1)
@every_dtype
@plain_paths
def test_masked_keys_weigh_nothing(sibling, path, dtype):
    """The weight of a masked key is exactly zero, and the weight of every other key is not."""
    _, attn_weights = sibling.attend(path, SPEC, problem(SPEC, dtype), mask=MASK)
    assert np.array_equal(attn_weights == 0.0, np.broadcast_to(MASK, (2, 2, 3, 4)))


@sample(jax=1)
@every_path
def test_weights_are_given_when_needed(sibling, path):
    """A layer returns its attention weights if they are needed, and None otherwise."""
    _, attn_weights = sibling.attend(path, SPEC, problem_of(sibling, path, SPEC))
    assert (attn_weights is None) == path.endswith("fused")


@sample(12, jax=1)
@every_spec
@both_forms
def test_module_is_the_function(sibling, form, spec):
    """A module has the output of the function with its weights, for every kind of layer."""
    arrays = problem_of(sibling, form, spec)
    function, module = (
        sibling.attended(f"{kind}-{form}", spec, arrays, mask=MASK)
        for kind in ("function", "module")
    )
    sibling.assert_close(
        module, function, within=24 * EPSILON
    )  # sums of up to 24 products of order 1


@sample(jax=1)
@every_spec
def test_plain_and_fused_paths_agree(sibling, spec):
    """The fused path has the output of the plain one, in the dtype of the kernel."""
    arrays = problem_of(sibling, "fused", spec)
    plain, fused = (
        sibling.attended(f"function-{form}", spec, arrays, mask=MASK) for form in ("plain", "fused")
    )
    sibling.assert_close(fused, plain, within=24 * EPSILON)  # as above


@sample(jax=1)
@every_spec
def test_output_has_the_width_of_a_layer(sibling, spec):
    """The output is as wide as the model, or as all heads without an output projection."""
    width = spec.d_model if spec.out_proj else spec.num_heads * spec.head_dim
    assert sibling.attended("module-fused", spec, problem_of(sibling, "fused", spec)).shape == (
        2,
        3,
        width,
    )


@pytest.mark.board
@sample(jax=1)
@every_dtype
@every_path
def test_output_has_the_dtype_of_the_input(sibling, path, dtype):
    """On every path the output has the dtype of the input."""
    assert sibling.attended(path, SPEC, problem(SPEC, dtype)).dtype == dtype


# ---- Rows without a key --------------------------------------------------------------------------


@sample(jax=1)
@every_dtype
@every_path
def test_empty_row_gives_zero(sibling, path, dtype):
    """The output is zero for a query that attends to no key, and for no other query."""
    context = sibling.attended(path, BARE, problem(BARE, dtype), mask=MASK)
    assert not context[0, 1].any()
    assert (np.delete(context[0], 1, axis=0) != 0.0).all()


@sample(jax=1)
@every_dtype
@every_path
def test_empty_row_gives_the_output_bias(sibling, path, dtype):
    """After an output projection, the output of an empty row is the bias of the projection."""
    arrays = problem(SPEC, dtype)
    assert np.array_equal(
        sibling.attended(path, SPEC, arrays, mask=MASK)[0, 1], arrays["out_proj.bias"]
    )


@sample(jax=1)
@every_path
def test_infinite_bias_is_a_mask(sibling, path):
    """A bias of minus infinity hides a key as a mask does, and empties a row."""
    bias, arrays = np.where(MASK, -np.inf, 0.0).astype(np.float32), problem_of(sibling, path, BARE)
    biased = sibling.attended(path, BARE, arrays, bias=bias)
    assert not biased[0, 1].any()
    masked = sibling.attended(path, BARE, arrays, bias=np.zeros_like(bias), mask=MASK)
    sibling.assert_close(biased, masked, within=0.0)


@sample(jax=1)
@every_path
def test_bias_and_mask_empty_a_row_together(sibling, path):
    """A row is empty if a mask hides some keys and an infinite bias the others."""
    bias = np.zeros((2, 1, 3, 4), np.float32)
    bias[0, :, 1, :2] = -np.inf
    mask = np.zeros((2, 1, 3, 4), bool)
    mask[0, :, 1, 2:] = True
    context = sibling.attended(path, BARE, problem_of(sibling, path, BARE), bias=bias, mask=mask)
    assert not context[0, 1].any()


@sample(jax=1)
@every_path
def test_lowest_bias_is_not_a_mask(sibling, path):
    """A row that attends to a single key has its value, even if its bias is the lowest finite
    number.
    """
    # Additive masks of other libraries hold finfo.min.
    bias = np.zeros((3, 4), np.float32)
    bias[0, 0] = np.finfo(np.float32).min
    only_key_0 = np.array([[False, True, True, True]])
    arrays = problem_of(sibling, path, BARE)
    biased = sibling.attended(path, BARE, arrays, mask=only_key_0, bias=bias)
    sibling.assert_close(
        biased, sibling.attended(path, BARE, arrays, mask=only_key_0), within=EPSILON
    )


# ---- Masked tokens -------------------------------------------------------------------------------


@sample(12, jax=1)
@pytest.mark.parametrize("sign", [0.0, -1.0, 1.0])
@pytest.mark.parametrize("side", ["key", "value"])
@every_path
def test_masked_token_may_be_anything(sibling, path, side, sign):
    """Changing a masked key or value changes no bit, even if it is huge."""
    arrays = problem_of(sibling, path, SPEC)
    arrays["value"] = arrays["key"]
    changed = arrays[side].copy()
    changed[:, 3] = sign * sibling.huge(path)
    before = sibling.attended(path, SPEC, arrays, mask=MASK)
    after = sibling.attended(path, SPEC, {**arrays, side: changed}, mask=MASK)
    assert np.array_equal(before, after)


@sample(jax=1)
@pytest.mark.parametrize("side", ["key", "value"])
@every_path
def test_visible_token_changes_the_output(sibling, path, side):
    """Changing a key or value changes the output of the queries that attend to it: the control of
    the test above.
    """
    arrays = problem_of(sibling, path, SPEC)
    arrays["value"] = arrays["key"]
    changed = arrays[side].copy()
    changed[:, 0] = 3.0
    before = sibling.attended(path, SPEC, arrays, mask=MASK)
    after = sibling.attended(path, SPEC, {**arrays, side: changed}, mask=MASK)
    assert (after != before).any(axis=2)[~MASK[:, 0, :, 0]].all()


@sample(jax=1)
@both_forms
def test_order_of_the_keys_is_rounding(sibling, form):
    """Keys and their mask may come in a different order."""
    arrays, order = problem_of(sibling, form, SPEC), [2, 0, 3, 1]
    before = sibling.attended(f"module-{form}", SPEC, arrays, mask=MASK)
    permuted = {**arrays, "key": arrays["key"][:, order]}
    after = sibling.attended(f"module-{form}", SPEC, permuted, mask=MASK[..., order])
    sibling.assert_close(
        after, before, within=8 * EPSILON
    )  # sums of 4 values of order 1 in a different order


@sample(12, jax=1)
@pytest.mark.parametrize(
    "shape", [(4,), (3, 1), (3, 4), (2, 1, 4), (2, 1, 1, 4), (1, 2, 3, 1)], ids=str
)
@every_path
def test_mask_broadcasts_to_the_scores(sibling, path, shape):
    """A mask may have any shape that broadcasts to the scores."""
    mask, arrays = np.random.default_rng(2).random(shape) < 0.4, problem_of(sibling, path, SPEC)
    whole = np.broadcast_to(mask, (2, 2, 3, 4))
    outputs = [
        sibling.attended(path, SPEC, arrays, mask=mask_of_call) for mask_of_call in (mask, whole)
    ]
    sibling.assert_same(*outputs, path)


@sample(12, jax=1)
@pytest.mark.parametrize(
    "shape", [(4,), (3, 1), (3, 4), (2, 1, 4), (2, 1, 1, 4), (1, 2, 3, 1)], ids=str
)
@every_path
def test_bias_broadcasts_to_the_scores(sibling, path, shape):
    """A bias may have any shape that broadcasts to the scores."""
    bias = np.random.default_rng(2).standard_normal(shape).astype(np.float32)
    arrays, whole = problem_of(sibling, path, SPEC), np.broadcast_to(bias, (2, 2, 3, 4))
    outputs = [
        sibling.attended(path, SPEC, arrays, bias=bias_of_call) for bias_of_call in (bias, whole)
    ]
    sibling.assert_same(*outputs, path)


@sample(jax=1)
@every_path
def test_sequences_do_not_see_each_other(sibling, path):
    """Changing one sequence of a batch changes no bit of the other."""
    arrays = problem_of(sibling, path, SPEC)
    changed = {**arrays, "query": arrays["query"].copy(), "key": arrays["key"].copy()}
    changed["query"][1], changed["key"][1] = 5.0, -3.0
    before, after = (
        sibling.attended(path, SPEC, inputs, mask=MASK) for inputs in (arrays, changed)
    )
    assert np.array_equal(before[0], after[0])


# ---- Causal masks and padding --------------------------------------------------------------------

HIDING = {
    "causal": {"is_causal": True},
    "padding": {"key_padding_lengths": [4, 2]},
    "both": {"is_causal": True, "key_padding_lengths": [0, 3]},
}
every_hiding = pytest.mark.parametrize("hiding", HIDING.values(), ids=HIDING)


@sample(12, jax=1)
@every_hiding
@every_path
def test_layer_builds_the_mask(sibling, path, hiding):
    """A layer that builds a causal or padding mask has the output of that mask, in addition to
    another.
    """
    hidden = sibling.numpy(sibling.package.create_attention_mask(3, 4, **hiding)) | MASK[:1]
    arrays = problem_of(sibling, path, SPEC)
    output, attn_weights = sibling.attend(path, SPEC, arrays, mask=MASK[:1], **hiding)
    expected, expected_weights = sibling.attend(path, SPEC, arrays, mask=hidden)
    sibling.assert_close(output, expected, within=8 * EPSILON)
    if path.endswith("plain"):
        assert np.array_equal(attn_weights, expected_weights)


@sample(jax=1)
@pytest.mark.parametrize("padding", [None, [6, 4]], ids=["full", "padded"])
def test_self_attention_hides_the_future(sibling, rng, padding):
    """Changing later tokens changes no bit of earlier outputs of causal self-attention."""
    module = sibling.filled("MultiHeadSelfAttention", SPEC)
    x = rng.standard_normal((2, 6, 8)).astype(np.float32)
    changed = x.copy()
    changed[:, 3:] += 1.0
    options = {"is_causal": True, "key_padding_lengths": padding}
    before, after = (
        sibling.numpy(module(sibling.array(tokens), **options)) for tokens in (x, changed)
    )
    assert np.array_equal(before[:, :3], after[:, :3])
    assert (before[:, 3:] != after[:, 3:]).any(axis=2).all()


def test_self_attention_ignores_padding(sibling, rng):
    """Changing tokens beyond the length of a sequence changes no bit of the others."""
    module = sibling.filled("MultiHeadSelfAttention", SPEC)
    x = rng.standard_normal((2, 6, 8)).astype(np.float32)
    changed = x.copy()
    changed[0, 4:] = 9.0
    outputs = (module(sibling.array(tokens), key_padding_lengths=[4, 6]) for tokens in (x, changed))
    before, after = (sibling.numpy(output) for output in outputs)
    assert np.array_equal(before[0, :4], after[0, :4])


@sample(jax=1)
@every_hiding
def test_self_attention_is_attention(sibling, rng, hiding):
    """Self-attention accepts the mask, bias and positions of attention, and returns its output."""
    spec = AttentionSpec(8, 2, rope=Rope(100.0))
    options = {
        "mask": rng.random((2, 1, 4, 4)) < 0.3,
        "bias": rng.standard_normal((1, 2, 4, 4)).astype(np.float32),
        "positions": np.array([[3, 5, 6, 9], [0, 1, 2, 30]], np.int32),
    }
    x = sibling.array(rng.standard_normal((2, 4, 8)).astype(np.float32))
    options = {name: sibling.option(option) for name, option in options.items()}
    self_attention = sibling.filled("MultiHeadSelfAttention", spec)
    actual = sibling.numpy(self_attention(x, **options, **hiding))
    expected, _ = sibling.filled("MultiHeadAttention", spec)(x, **options, **hiding)
    assert np.array_equal(actual, sibling.numpy(expected))
    for name in options:  # none of them is without effect
        without = {other: option for other, option in options.items() if other != name}
        assert (sibling.numpy(self_attention(x, **without, **hiding)) != actual).any()


# ---- No tokens at all ----------------------------------------------------------------------------

NOTHING = {
    "no-queries": (2, 0, 4),
    "no-keys": (2, 3, 0),
    "neither": (2, 0, 0),
    "no-sequences": (0, 3, 4),
}


@sample(12, jax=1)
@pytest.mark.parametrize("sizes", NOTHING.values(), ids=NOTHING)
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("is_padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("is_masked", [False, True], ids=["visible", "masked"])
@pytest.mark.parametrize("path", ["module-plain", "module-fused"])
def test_nothing_gives_nothing(sibling, path, sizes, is_causal, is_padded, is_masked):
    """Without queries the output has no rows; without keys its rows are the bias of the output
    projection.
    """
    batch_size, num_queries, num_keys = sizes
    spec, dtype = AttentionSpec(24, 4, num_kv_heads=2), sibling.dtype_of(path)
    weights = {name: x.astype(dtype) for name, x in parity.random_weights(spec).items()}
    query, key = (np.ones((batch_size, count, 24), dtype) for count in (num_queries, num_keys))
    options = {
        "is_causal": is_causal,
        "key_padding_lengths": [num_keys] * batch_size if is_padded else None,
    }
    options["mask"] = np.zeros((1, 1), bool) if is_masked else None
    output, attn_weights = sibling.attend(
        path, spec, {**weights, "query": query, "key": key}, **options
    )
    assert output.shape == (batch_size, num_queries, 24)
    if num_keys == 0:
        assert (output == weights["out_proj.bias"]).all()
    if path.endswith("plain"):
        assert attn_weights.shape == (batch_size, 4, num_queries, num_keys)


# ---- Shared keys ---------------------------------------------------------------------------------

SOURCE = AttentionSpec(24, 6, num_kv_heads=2, qk_norm=Norm(), rope=Rope(500.0), window_size=3)


def sharing(sibling, dtype):
    """A layer, its input, a layer of the same weights that shares its keys and values, and these
    keys and values.
    """
    weights = {name: x.astype(dtype) for name, x in parity.random_weights(SOURCE).items()}
    source = sibling.filled("MultiHeadAttention", SOURCE, weights)
    own = {name: x for name, x in weights.items() if name[:2] not in ("k_", "v_")}
    shared = sibling.filled("MultiHeadAttention", SOURCE.replace(shared_kv=True), own)
    x = sibling.array(problem(SOURCE, dtype)["query"])
    return source, x, shared, sibling.package.project_qkv(source.project, x, x, x, SOURCE)[1:]


@sample(jax=1)
@both_forms
def test_shared_keys_are_taken_as_they_are(sibling, form):
    """A layer that shares the keys and values of another, its weights and its input gives its
    output.
    """
    source, x, shared, (k, v) = sharing(sibling, sibling.dtype_of(form))
    options = {"is_causal": True, "need_weights": form == "plain"}
    expected, expected_weights = source(x, **options)
    output, attn_weights = shared(x, k, v, **options)
    assert np.array_equal(sibling.numpy(output), sibling.numpy(expected))
    if form == "plain":
        assert np.array_equal(sibling.numpy(attn_weights), sibling.numpy(expected_weights))
    other, _ = shared(x, v, k, is_causal=True)
    assert np.abs(sibling.numpy(other) - sibling.numpy(expected)).max() > 1e-3


def test_shared_keys_must_fit(sibling):
    """Shared keys that are missing, or of other heads, raise an error."""
    _, x, shared, (k, v) = sharing(sibling, np.float32)
    with rejects("key and value", "None"):
        shared(x)
    with rejects("key", {"key.shape": (2, 1, 3, k.shape[3])}):
        shared(x, k[:, :1], v[:, :1])
    with rejects("value", {"value.shape": (2, 2, 2, v.shape[3])}):
        shared(x, k, v[:, :, :2])
    with rejects("key", {"key.shape": (2, 3, 24)}):
        shared(x, x, x)
    with rejects("key and value", "None"):
        sibling.module("MultiHeadSelfAttention", shared.spec)(x)


# ---- Modules -------------------------------------------------------------------------------------

KINDS = (
    "MultiHeadAttention",
    "MultiHeadSelfAttention",
    "MultiHeadAttentionWithCache",
    "MultiHeadLatentAttention",
)
every_kind = pytest.mark.parametrize("kind", KINDS)


@sample(jax=1)
@every_kind
def test_module_takes_the_fields_of_its_spec(sibling, kind):
    """A module accepts a spec, or the fields of one."""
    features = (
        {"latent": Latent(6, 2)}
        if kind == "MultiHeadLatentAttention"
        else {"num_kv_heads": 2, "rope": Rope()}
    )
    spec = AttentionSpec(16, 4, qkv_bias=False, **features)
    others = {"qkv_bias": False, **features}
    for module in (
        sibling.made(kind, spec),
        sibling.made(kind, spec=spec),
        sibling.made(kind, 16, 4, **others),
        sibling.made(kind, np.int64(16), num_heads=4, **others),
        sibling.made(
            kind, d_model=16, num_heads=4, **others, **sibling.in_dtype(DTYPES["bfloat16"])
        ),
    ):
        assert module.spec == spec


REJECTED = {
    "num_heads in addition to a spec": ((SPEC, 2), {}, rejects("num_heads", num_heads=2)),
    "a field in addition to a spec": ((SPEC,), {"dropout": 0.1}, rejects("dropout", dropout=0.1)),
    "both": ((SPEC, 2), {"sinks": True}, rejects("num_heads and sinks", num_heads=2, sinks=True)),
    "d_model in addition to a spec": ((SPEC,), {"d_model": 8}, rejects("d_model", d_model=8)),
    "an unknown field": ((8, 2), {"heads": 2}, rejects_type("heads", hint="num_heads")),
    "an unknown field and a spec": ((SPEC,), {"heads": 2}, rejects_type("heads", hint="num_heads")),
    "a dictionary": (({"d_model": 8},), {}, rejects_type("spec", spec={"d_model": 8})),
    "a width that is not an integer": ((8.0, 2), {}, rejects_type("spec", spec=8.0)),
    "a boolean width": ((True, 2), {}, rejects_type("d_model", d_model=True)),
    "no heads": ((8,), {}, rejects_type("spec", spec=8)),
    "no heads, d_model by name": ((), {"d_model": 8}, rejects_type("spec", spec=8)),
    "no width": ((), {"num_heads": 2}, rejects_type("spec", spec=None)),
    "nothing": ((), {}, rejects_type("spec", spec=None)),
    "d_model twice": ((8, 2), {"d_model": 8}, pytest.raises(TypeError, match="'d_model'")),
    "fields that do not fit": (
        (8, 2),
        {"num_kv_heads": 3},
        rejects("num_heads", num_heads=2, num_kv_heads=3),
    ),
}


@every_kind
@pytest.mark.parametrize("name", REJECTED)
def test_module_rejects_other_fields(sibling, kind, name):
    """A module raises an error for fields that a spec does not have, or that do not fit."""
    arguments, keywords, input_error = REJECTED[name]
    with input_error:
        sibling.made(kind, *arguments, **keywords)


@sample(jax=1)
@every_kind
def test_module_keywords_are_no_fields(sibling, kind):
    """No keyword of a module has the name of a field of its spec, except `num_heads`, which it
    passes on.
    """
    keywords = inspect.signature(getattr(sibling.package, kind).__init__).parameters.keys()
    assert keywords & {field.name for field in fields(AttentionSpec)} == {"num_heads"}


@sample(jax=1)
@pytest.mark.parametrize("fused_qkv", [False, True], ids=["separate", "fused"])
def test_weights_start_xavier_uniform(sibling, fused_qkv):
    """Each projection is drawn on its own, uniformly within its bound, and biases start at zero."""
    spec = AttentionSpec(64, 8, num_kv_heads=2, fused_qkv=fused_qkv)
    weights = parity.weights_of(sibling.module("MultiHeadAttention", spec))
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        weight = weights[f"{name}.weight"]
        bound = math.sqrt(6 / sum(weight.shape))
        # The largest of more than 1000 uniform numbers lies within 1% of the bound, but for a
        # chance of 4e-5.
        assert 0.99 * bound < np.abs(weight).max() <= bound, name
    assert not np.array_equal(weights["k_proj.weight"], weights["v_proj.weight"])
    assert [name for name, x in weights.items() if name.endswith("bias") and x.any()] == []


def test_weights_depend_on_the_seed(sibling):
    """The same seed draws the same weights, another seed draws others."""
    drawn = (
        parity.weights_of(sibling.module("MultiHeadAttention", SPEC, seed=seed))
        for seed in (0, 0, 1)
    )
    first, again, other = (weights["q_proj.weight"] for weights in drawn)
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


@sample(jax=1)
@pytest.mark.parametrize("has_key", [False, True], ids=["self", "cross"])
@every_path
def test_positions_without_use_are_ignored(sibling, path, has_key):
    """A layer accepts positions even if nothing depends on them."""
    arrays = {
        name: x for name, x in problem_of(sibling, path, SPEC).items() if has_key or name != "key"
    }
    expected = sibling.attended(path, SPEC, arrays)
    actual = sibling.attended(path, SPEC, arrays, positions=np.array([[7, 3, 5]], np.int32))
    assert np.array_equal(actual, expected)


# ---- Dropout -------------------------------------------------------------------------------------

RATES = {"weights": {"dropout": 0.5}, "outputs": {"output_dropout": 0.5}}
every_rate = pytest.mark.parametrize("rates", RATES.values(), ids=RATES)


def dropped(sibling, rates, seed=0, calls=1, **options):
    """Return the outputs of successive calls of a module in training, with dropout at these
    rates.
    """
    dtype = sibling.kernel_dtype
    module = sibling.filled("MultiHeadAttention", SPEC.replace(**rates), seed=seed, dtype=dtype)
    query = sibling.array(problem(SPEC, dtype)["query"])
    return [sibling.numpy(module(query, **options)[0]) for _ in range(calls)]


@sample(jax=1)
@every_rate
@pytest.mark.parametrize("need_weights", [False, True], ids=["fused", "plain"])
def test_dropout_depends_on_the_seed(sibling, need_weights, rates):
    """Training drops something: the same for the same seed, other values for another seed or in
    the next call.
    """
    options = {"need_weights": need_weights}
    first, second = dropped(sibling, rates, calls=2, **options)
    assert not np.array_equal(first, second)
    assert np.array_equal(dropped(sibling, rates, **options)[0], first)
    assert not np.array_equal(dropped(sibling, rates, seed=1, **options)[0], first)
    assert not np.array_equal(dropped(sibling, {}, **options)[0], first)


def test_evaluation_drops_nothing(sibling):
    """A module in evaluation has the output of a module without dropout."""
    query = sibling.array(problem(SPEC, np.float32)["query"])
    module = sibling.filled("MultiHeadAttention", SPEC.replace(dropout=0.5, output_dropout=0.5))
    module.eval()
    expected, _ = sibling.filled("MultiHeadAttention", SPEC)(query)
    assert np.array_equal(sibling.numpy(module(query)[0]), sibling.numpy(expected))


def test_attention_weights_precede_dropout(sibling):
    """A layer returns the attention weights before dropout."""
    dtype = sibling.kernel_dtype
    query = sibling.array(problem(SPEC, dtype)["query"])
    actual, expected = (
        sibling.filled("MultiHeadAttention", SPEC.replace(dropout=rate), dtype=dtype)(
            query, need_weights=True
        )[1]
        for rate in (0.5, 0.0)
    )
    assert np.array_equal(sibling.numpy(actual), sibling.numpy(expected))


@sample(jax=1)
@every_rate
@pytest.mark.parametrize("path", ["function-plain", "function-fused"])
def test_function_drops_in_training_only(sibling, path, rates):
    """A function drops in training, and otherwise has the output of a function without dropout."""
    arrays, spec = problem(SPEC, sibling.kernel_dtype), SPEC.replace(**rates)
    undropped = sibling.attended(path, SPEC, arrays)
    assert np.array_equal(sibling.attended(path, spec, arrays), undropped)
    options = {"training": True, **sibling.seeded("multi_head_attention")}
    trained = sibling.attended(path, spec, arrays, **options)
    assert np.abs(trained - undropped).max() > 1e-3
    if "output_dropout" in rates:
        is_dropped = trained == 0.0
        assert is_dropped.any()
        assert np.array_equal(trained[~is_dropped], 2 * undropped[~is_dropped])


def test_given_dropout_keeps_and_doubles(sibling):
    """A given dropout decides which keys are kept, and those count 1 / (1 - rate) times."""
    # Two keys of weight 1/2, of which the first query keeps only the second.
    zeros, value = np.zeros((1, 1, 2, 1), np.float32), np.array([[[[3.0], [7.0]]]], np.float32)
    keep = np.array([[[[False, True], [True, True]]]])
    context = sibling.attend_heads("plain", zeros, zeros, value, dropout=0.5, dropout_keep=keep)
    sibling.assert_close(context.ravel(), np.array([7.0, 10.0]), within=0.0)


def test_given_dropout_requires_training(sibling):
    """A given dropout without training raises an error."""
    keep = np.ones((2, 2, 3, 4), bool)
    with rejects("dropout_keep", "dropout_keep and training=False"):
        arrays = problem(BARE, np.float32)
        sibling.attended("function-plain", BARE.replace(dropout=0.5), arrays, dropout_keep=keep)

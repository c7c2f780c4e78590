"""JAX on accelerators: calls are lowered for CUDA and TPUs, and their programs are inspected; their
blocks run here.

Programs are inspected before XLA fuses operations, so a count of 0 holds whatever XLA does.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.heads import fused_attention
from helpers.lowered import PLATFORMS, Counts, counts, lowered, on
from helpers.samples import sample

import mha_jax
import parity
from mha_jax import stages
from mha_jax.kernels.fused import FusedAttention
from mha_jax.kernels.nonfinite import contained
from mha_jax.masks import Mask
from mha_jax.scores import Scores
from mha_spec import Alibi, AttentionSpec, RelativeBias, Rope

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}
BATCH, NUM_HEADS, NUM_KV_HEADS, SEQ_LEN, HEAD_DIM = 2, 8, 2, 4096, 32
PAIRS = SEQ_LEN**2  # larger than tokens, weights and blocks of scores

shaped = jax.ShapeDtypeStruct


def of_layer(**fields):
    return AttentionSpec(NUM_HEADS * HEAD_DIM, NUM_HEADS, num_kv_heads=NUM_KV_HEADS, **fields)


CAUSAL, SPAN = {"is_causal": True}, 256
LENGTHS = {"key_padding_lengths": ((BATCH,), jnp.int32)}
OWN = {"mask": ((SEQ_LEN, SEQ_LEN), bool)}

# Fields of a layer, keywords of a call, and shapes and dtypes of other arguments; None for the
# dtype of queries.
CALLS = {
    "nothing": ({}, {}, {}),
    "causal": ({}, CAUSAL, {}),
    "lengths": ({}, {}, LENGTHS),
    "causal-lengths": ({}, CAUSAL, LENGTHS),
    "window": ({"window_size": SPAN}, CAUSAL, {}),
    "window-lengths": ({"window_size": SPAN}, CAUSAL, LENGTHS),
    "window-both-ways": ({"window_size": SPAN}, {}, {}),
    "chunks": ({"chunk_size": SPAN}, CAUSAL, {}),
    "segments": ({}, CAUSAL, {"segment_ids": ((BATCH, SEQ_LEN), jnp.int32)}),
    "soft-cap": ({"soft_cap": 30.0}, CAUSAL, {}),
    "alibi": ({"alibi": Alibi()}, CAUSAL, {}),
    "sinks": ({"sinks": True}, CAUSAL, {"sinks": ((NUM_HEADS,), None)}),
    "mask": ({}, {}, OWN),
    "mask-causal-lengths": ({}, CAUSAL, {**OWN, **LENGTHS}),
    "mask-of-keys": ({}, {}, {"mask": ((BATCH, 1, 1, SEQ_LEN), bool)}),
    "bias": ({}, {}, {"bias": ((SEQ_LEN, SEQ_LEN), None)}),
    "relative-bias": (
        {"relative_bias": RelativeBias(32, 128)},
        CAUSAL,
        {"relative_bias": ((32, NUM_HEADS), None)},
    ),
}
LEARNED = ("sinks", "relative_bias")
ROWS = [(call, dtype, platform) for call in CALLS for dtype in DTYPES for platform in PLATFORMS]
QUICK = [
    *[(call, "float32", "cuda") for call in ("window-lengths", "sinks", "mask-causal-lengths")],
    *[(call, "bfloat16", "cuda") for call in ("causal-lengths", "mask")],
    *[(call, "bfloat16", "tpu") for call in ("chunks", "alibi")],
]

# Exceptions: arrays that are made, forward and with gradients, and the reasons.
CUDNN = "cuDNN reads a mask as floats"
EXCEPTIONS = {
    ("mask", "bfloat16", "cuda"): (CUDNN, Counts(arrays=3, masks=3), Counts(arrays=4, masks=3)),
    ("bias", "bfloat16", "cuda"): (CUDNN, Counts(arrays=8, masks=5), Counts(arrays=9, masks=5)),
    **{
        ("relative-bias", dtype, platform): (
            *("it is made for all heads and pairs", Counts(arrays=2), Counts(arrays=4)),
        )
        for dtype in DTYPES
        for platform in PLATFORMS
    },
}


def function_and_arrays(call, dtype, *, kernel=mha_jax.fused.attend):
    """Return attention as a function of split heads and other arrays, and the shapes of all
    arrays.
    """
    fields, keywords, others = CALLS[call]
    heads = {"query": NUM_HEADS, "key": NUM_KV_HEADS, "value": NUM_KV_HEADS}
    arrays = {
        name: shaped((BATCH, count, SEQ_LEN, HEAD_DIM), dtype) for name, count in heads.items()
    }
    arrays |= {name: shaped(shape, kind or dtype) for name, (shape, kind) in others.items()}

    def attend(arrays):
        fused = fused_attention(mha_jax)
        return fused(**arrays, spec=of_layer(**fields), kernel=kernel, **keywords)[0]

    return attend, arrays


def with_gradients(function, learned):
    """Return the function with the gradients of these arrays, as in training."""

    def differentiate(arrays):
        inputs = {name: x for name, x in arrays.items() if name in learned}

        def loss(inputs):
            return function({**arrays, **inputs}).astype(jnp.float32).sum()

        return jax.value_and_grad(loss)(inputs)

    return differentiate


TOKENS = ("query", "key", "value")


@sample(where=lambda call, dtype, platform: (call, dtype, platform) in QUICK)
@pytest.mark.parametrize(("call", "dtype", "platform"), ROWS)
def test_no_call_stores_all_token_pairs(call, dtype, platform):
    """Programs of the fused path, with and without gradients, make no array of all pairs of tokens,
    except in the listed calls.
    """
    attend, arrays = function_and_arrays(call, DTYPES[dtype])
    _, *expected = EXCEPTIONS.get((call, dtype, platform), ("", Counts(), Counts()))
    programs = [
        lowered(platform, function, arrays)
        for function in (attend, with_gradients(attend, (*TOKENS, *LEARNED)))
    ]
    assert [counts(program, PAIRS) for program in programs] == expected


@pytest.mark.parametrize("call", ["mask", "bias"])
def test_cudnn_copies_are_shared(call):
    """Copies of a mask or bias for cuDNN have no axis of heads or sequences."""
    attend, arrays = function_and_arrays(call, jnp.bfloat16)
    program = lowered("cuda", with_gradients(attend, TOKENS), arrays)
    assert counts(program, PAIRS + 1) == Counts()


@pytest.mark.parametrize(
    ("num_tokens", "mask", "is_taken"),
    [(64, (64, 64), True), (64, (2, 1, 1, 64), False), (63, (63, 63), False)],
    ids=["pairs", "keys", "odd"],
)
def test_cudnn_is_used_only_with_valid_masks(num_tokens, mask, is_taken):
    """cuDNN is called for a mask of all pairs of an even number of tokens, but for neither masks of
    keys nor odd numbers.
    """
    x = shaped((2, 4, num_tokens, 16), jnp.bfloat16)

    def loss(x, mask):
        return fused_attention(mha_jax)(x, x, x, mask=mask)[0].astype(jnp.float32).sum()

    program = lowered("cuda", jax.grad(loss), x, shaped(mask, bool))
    assert ("__cudnn$fmha" in program.as_text()) == is_taken


@pytest.mark.parametrize("platform", ["cuda", pytest.param("tpu", marks=pytest.mark.thorough)])
def test_only_bias_gradient_has_all_pairs(platform):
    """With a gradient for the bias, that gradient is the only array of all pairs of tokens."""
    attend, arrays = function_and_arrays("bias", jnp.float32)
    totals = counts(lowered(platform, with_gradients(attend, (*TOKENS, "bias")), arrays), PAIRS)
    assert totals == Counts(arrays=1)


# ---- Controls of the counts ----------------------------------------------------------------------


@pytest.mark.parametrize("platform", PLATFORMS)
def test_plain_path_stores_scores_and_mask(platform):
    """Control: the plain path makes more than 3 arrays of all scores and more than 2 masks."""
    attend, arrays = function_and_arrays(
        "causal-lengths", jnp.float32, kernel=stages.attend_without_weights
    )
    totals = counts(lowered(platform, attend, arrays), BATCH * NUM_HEADS * PAIRS)
    assert totals.arrays > 3
    assert counts(lowered(platform, attend, arrays), PAIRS).masks > 2


def test_few_scores_are_stored_at_once():
    """If an accelerator may store all scores, as XLA's attention does, the program has more than 3
    such arrays.
    """
    attend, arrays = function_and_arrays(
        "causal", jnp.float32, kernel=FusedAttention(most_scores=BATCH * NUM_HEADS * PAIRS)
    )
    assert counts(lowered("cuda", attend, arrays), BATCH * NUM_HEADS * PAIRS).arrays > 3


def asks_the_host(x):
    return jax.pure_callback(lambda x: x, x, x)


def prints(x):
    jax.debug.print("{}", x)
    return x


def branches(x):
    return jax.lax.cond(x[0] > 0, lambda x: x + 1, lambda x: x, x)


def loops_while_positive(x):
    return jax.lax.while_loop(lambda x: x[0] > 0, lambda x: x - 1, x)


def loops_as_often_as_told(x):
    return jax.lax.fori_loop(0, x[0].astype(jnp.int32), lambda i, x: x + 1, x)


def loops_ten_times(x):
    return jax.lax.fori_loop(0, 10, lambda i, x: x + 1, x)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (asks_the_host, Counts(callbacks=1)),
        (prints, Counts(callbacks=1)),
        (branches, Counts(branches=1)),
        (loops_while_positive, Counts(branches=1)),
        (loops_as_often_as_told, Counts(branches=1)),
        (loops_ten_times, Counts()),
    ],
)
def test_waits_for_values_are_counted(function, expected):
    """Control: callbacks, prints, conditions and loops of unknown length are counted; a loop of 10
    steps is not.
    """
    program = jax.jit(function).lower(
        shaped((4,), jnp.float32)
    )  # for a CPU: only there JAX lowers callbacks
    assert counts(program, 5) == expected


def test_float64_arrays_are_counted():
    """Control: a product in float64 is counted."""
    with jax.enable_x64(True):
        program = lowered("cuda", lambda x: x * 2, shaped((4,), jnp.float64))
    assert counts(program, 5).float64 > 0


# ---- Layers and caches ---------------------------------------------------------------------------


def module(kind, dtype, **fields):
    """Return the graph and the arrays of a layer."""
    return nnx.split(
        kind(of_layer(rope=Rope(), **fields), param_dtype=DTYPES[dtype], rngs=nnx.Rngs(0))
    )


LAYERS = [(dtype, platform) for dtype in DTYPES for platform in PLATFORMS]


@sample(
    where=lambda dtype, platform: (dtype, platform) in [("float32", "cuda"), ("bfloat16", "tpu")]
)
@pytest.mark.parametrize(("dtype", "platform"), LAYERS)
@pytest.mark.parametrize("is_training", [False, True], ids=["forward", "forward-backward"])
def test_layer_stores_no_token_pairs(dtype, platform, is_training):
    """A layer, forward or with gradients, makes no array of all pairs of tokens and nothing in
    float64.
    """
    graph, state = module(mha_jax.MultiHeadSelfAttention, dtype)
    arrays = {"x": shaped((BATCH, SEQ_LEN, NUM_HEADS * HEAD_DIM), DTYPES[dtype]), "state": state}
    arrays["lengths"] = shaped((BATCH,), jnp.int32)

    def call(arrays):
        layer = nnx.merge(graph, arrays["state"])
        return layer(arrays["x"], is_causal=True, key_padding_lengths=arrays["lengths"])

    function = with_gradients(call, ("x", "state")) if is_training else call
    assert counts(lowered(platform, function, arrays), PAIRS) == Counts()


FIELDS = {
    "causal": {},
    "window": {"window_size": SPAN},
    "soft-cap": {"soft_cap": 30.0},
    "alibi": {"alibi": Alibi()},
}
STEPS = [
    (fields, dtype, platform) for fields in FIELDS for dtype in DTYPES for platform in PLATFORMS
]


def cached(fields, dtype, platform, seq_len):
    """Return the program of new tokens over a cache."""
    graph, state = module(mha_jax.MultiHeadAttentionWithCache, dtype, **FIELDS[fields])
    cache = jax.eval_shape(lambda: nnx.merge(graph, state).init_cache(BATCH, SEQ_LEN))
    x = shaped((BATCH, seq_len, NUM_HEADS * HEAD_DIM), DTYPES[dtype])
    return lowered(
        platform, lambda state, x, cache: nnx.merge(graph, state)(x, cache), state, x, cache
    )


@sample(
    where=lambda fields, dtype, platform: (
        (fields, dtype, platform) in [("causal", "bfloat16", "cuda")]
    )
)
@pytest.mark.parametrize(("fields", "dtype", "platform"), STEPS)
def test_prompt_stores_no_pairs_of_slots(fields, dtype, platform):
    """A prompt over a cache makes no array of all pairs of tokens and slots."""
    assert counts(cached(fields, dtype, platform, SEQ_LEN), PAIRS) == Counts()


@sample(
    where=lambda fields, dtype, platform: (
        (fields, dtype, platform) in [("causal", "bfloat16", "cuda")]
    )
)
@pytest.mark.parametrize(("fields", "dtype", "platform"), STEPS)
def test_step_stores_nothing_beyond_cache(fields, dtype, platform):
    """A step of one token makes no array larger than the keys of its cache, so it copies neither
    keys nor values.
    """
    larger = BATCH * NUM_KV_HEADS * SEQ_LEN * HEAD_DIM + 1
    assert counts(cached(fields, dtype, platform, 1), larger) == Counts()


# ---- Blocks of an accelerator match the plain path -----------------------------------------------

SMALL = FusedAttention(few_scores=0, most_scores=0, queries=24, keys=24)
QUICKLY = {"xla_backend_optimization_level": 0}  # programs here run only once
SHAPES = {
    "query": (3, 4, 41, 8),
    "key": (3, 2, 50, 8),
    "value": (3, 2, 50, 8),
    "cotangent": (3, 4, 41, 8),
}
PADDING = np.array([0, 17, 50])


def rng():
    return np.random.default_rng(3)


# Fields of a layer, the mask of a call, and other arrays.
FEATURES = {
    "nothing": ({}, {}, {}),
    "causal": ({}, CAUSAL, {}),
    "lengths-soft-cap": ({"soft_cap": 2.0}, {**CAUSAL, "key_padding_lengths": PADDING}, {}),
    "alibi-offset": ({"alibi": Alibi()}, {**CAUSAL, "q_offset": np.array([0, 4, 9])}, {}),
    "sinks-segments": (
        {"sinks": True},
        {"segment_ids": (rng().integers(0, 3, (3, 41)), rng().integers(0, 3, (3, 50)))},
        {"sinks": (4,)},
    ),
    "window-offset": ({"window_size": 7}, {**CAUSAL, "q_offset": np.array([9])}, {}),
    "chunks-offset": (
        {"chunk_size": 7},
        {**CAUSAL, "q_offset": np.array([0, 4, 9]), "key_padding_lengths": PADDING},
        {},
    ),
    "mask": ({"scale": 0.3}, {**CAUSAL, "mask": rng().random((41, 50)) < 0.7}, {}),
    "mask-window": (
        {"window_size": 60},
        {**CAUSAL, "mask": rng().random((3, 4, 41, 50)) < 0.3},
        {},
    ),
    "mask-of-keys": (
        {},
        {"mask": rng().random((3, 1, 1, 50)) < 0.3, "key_padding_lengths": PADDING},
        {},
    ),
    "bias": ({}, CAUSAL, {"bias": (41, 50)}),
    "bias-of-heads": (
        {"sinks": True},
        {"key_padding_lengths": PADDING},
        {"bias": (1, 4, 1, 50), "sinks": (4,)},
    ),
    "relative-bias": ({"relative_bias": RelativeBias(32, 128)}, {}, {"relative_bias": (32, 4)}),
}
LONG = {  # more queries than a window processes at once
    "window-lengths": (
        {"window_size": 20},
        {**CAUSAL, "key_padding_lengths": np.array([0, 17, 300])},
        {},
    ),
    "window-both-ways-alibi": ({"window_size": 150, "alibi": Alibi()}, {}, {}),
    "chunks-sinks": ({"chunk_size": 100, "sinks": True}, CAUSAL, {"sinks": (4,)}),
    "window-bias": (
        {"window_size": 20},
        {**CAUSAL, "mask": rng().random((300, 300)) < 0.3},
        {"bias": (1, 4, 300, 300)},
    ),
}


def results(kernel, mask, spec, arrays):
    """Return the context and the gradients of all floating-point arrays."""

    @partial(jax.jit, compiler_options=QUICKLY)
    def run(arrays):
        inputs = {name: x for name, x in arrays.items() if name != "cotangent"}

        def attend(inputs):
            tokens = [inputs[name] for name in TOKENS]
            learned = {name: inputs[name] for name in spec.score_shapes}
            return kernel(*tokens, mask, Scores(spec, inputs.get("bias"), learned))

        context, pull_back = jax.vjp(attend, inputs)
        return {"context": context, **pull_back(arrays["cotangent"])[0]}

    return {name: np.asarray(x) for name, x in run(arrays).items()}


def assert_blocks_give_what_the_plain_path_gives(
    fields, masks, others, shapes, dtype, platform, kernel=None
):
    draws = np.random.default_rng(5)
    arrays = {name: draws.standard_normal(shape) for name, shape in {**shapes, **others}.items()}
    if "bias" in arrays:
        arrays["bias"][..., 3::7] = -np.inf
    spec = AttentionSpec(32, 4, num_kv_heads=2, **fields)
    mask = Mask(
        **{name: x if x is True else jax.tree.map(jnp.asarray, x) for name, x in masks.items()}
    )
    arrays = {name: jnp.asarray(x, DTYPES[dtype]) for name, x in arrays.items()}
    plain = stages.attend_without_weights
    with on(platform):
        kernel = kernel or replace(SMALL, queries=shapes["query"][2] // 2)
        actual = results(kernel, mask.within(spec).as_arrays(), spec, arrays)
    same = results(plain, mask.within(spec).as_arrays(), spec, arrays)
    with jax.enable_x64(True):
        wide = {name: jnp.asarray(np.asarray(x, np.float64)) for name, x in arrays.items()}
        expected = results(plain, mask.within(spec).as_arrays(), spec, wide)
    assert actual["context"].dtype == DTYPES[dtype]
    parity.assert_parity(actual, expected, same_precision=same)


@sample(name=["lengths-soft-cap", "sinks-segments", "chunks-offset"], platform=["cuda"])
@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("platform", PLATFORMS)
def test_blocks_match_plain_path(name, platform):
    """Context and gradients of small blocks match the plain path in float64 within the error of
    float32.
    """
    assert_blocks_give_what_the_plain_path_gives(*FEATURES[name], SHAPES, "float32", platform)


@sample(name=["window-bias"])
@pytest.mark.parametrize("name", LONG)
def test_windows_match_plain_path(name):
    """Context and gradients of 300 tokens, more than a window processes at once, match the plain
    path in float64.
    """
    shapes = {name: (*shape[:2], 300, shape[3]) for name, shape in SHAPES.items()}
    assert_blocks_give_what_the_plain_path_gives(*LONG[name], shapes, "float32", "cuda")


@sample(name=["bias-of-heads"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["alibi-offset", "bias-of-heads", "mask"])
def test_half_precision_blocks_match_plain(name, dtype):
    """Context and gradients of small blocks in bfloat16 and float16 match the plain path in
    float64.
    """
    assert_blocks_give_what_the_plain_path_gives(*FEATURES[name], SHAPES, dtype, "tpu")


STEPPED = {
    "nothing": ({}, {}),
    "soft-cap": ({"soft_cap": 2.0}, {}),
    "alibi-window": ({"alibi": Alibi(), "window_size": 20}, {}),
    "sinks-chunks": ({"sinks": True, "chunk_size": 20}, {"sinks": (4,)}),
    "relative-bias": ({"relative_bias": RelativeBias(32, 128)}, {"relative_bias": (32, 4)}),
}


@sample(name=["alibi-window", "nothing"])
@pytest.mark.parametrize("name", STEPPED)
def test_step_over_cache_matches_plain_path(name):
    """Context and gradients of one token over a cache match the plain path in float64."""
    fields, others = STEPPED[name]
    # The gradient of a single key is a difference of two equal sums; test_fused checks its bound.
    masks = {**CAUSAL, "q_offset": np.array([7, 30, 49])}
    shapes = {
        name: (*shape[:2], min(shape[2], 50 if shape[1] == 2 else 1), shape[3])
        for name, shape in SHAPES.items()
    }
    assert_blocks_give_what_the_plain_path_gives(
        fields, masks, others, shapes, "float32", "cuda", SMALL.step
    )


@pytest.mark.thorough
def test_non_finite_tokens_match_plain_path():
    """Non-finite tokens in blocks and windows give the context of the plain path, all contained,
    and zeros for a sequence of padding.
    """
    for seq_len, fields in ((41, {}), (300, {"window_size": 20})):
        spec, draws = AttentionSpec(32, 4, num_kv_heads=2, **fields), np.random.default_rng(0)
        q, k, v = (draws.standard_normal((2, n, seq_len, 8)).astype(np.float32) for n in (4, 2, 2))
        k[0, 0, 5], v[1, 1, 30], q[0, 3, 7] = np.nan, np.inf, np.nan
        mask = (
            Mask(is_causal=True, key_padding_lengths=jnp.array([0, seq_len - 3]))
            .within(spec)
            .as_arrays()
        )
        with on("cuda"):
            actual = jax.jit(partial(contained(SMALL), mask=mask, scores=Scores(spec)))(q, k, v)
        expected = contained(stages.attend_without_weights)(q, k, v, mask, Scores(spec))
        assert not np.isnan(actual[0]).any()  # a sequence of padding only
        assert np.isnan(actual[1]).any()
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)

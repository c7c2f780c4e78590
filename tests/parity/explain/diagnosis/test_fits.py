"""Patterns: the location and the pattern of errors injected into arrays of every kind; random
errors have none.
"""

import json
import math
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from helpers.input_errors import rejects
from helpers.samples import sample
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from mha_spec import (
    Alibi,
    AttentionSpec,
    DynamicScaling,
    Latent,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    Norm,
    ProportionalScaling,
    Rope,
    Temperature,
    YarnScaling,
)
from parity import Case, make_problem
from parity.explain.diagnosis.bugs import edited_layer
from parity.explain.diagnosis.bugs.record import with_spec
from parity.explain.diagnosis.fits import Description, describe
from parity.measure.core.compare import budget
from parity.measure.core.reference import Arithmetic, Layer
from parity.measure.core.stages import run_steps
from parity.measure.core.weights import dtype_named

NOISE = 1e-7
ALLOWED = {"rms": 4e-7, "max": 2e-6}
EXACT = {"rms": 0.0, "max": 0.0}

SHAPES = {
    "q": (2, 4, 6, 8),
    "k": (2, 2, 6, 8),
    "v": (2, 2, 6, 8),
    "latents": (2, 1, 6, 10),
    "gate": (2, 6, 12),
    "cache.keys": (2, 2, 9, 8),
    "scores": (2, 4, 6, 7),
    "attn_weights": (2, 4, 6, 7),
    "context": (2, 4, 6, 8),
    "output": (2, 6, 12),
    "module.output": (2, 6, 12),
    "step1.q": (2, 4, 6, 8),
    "grad.query": (2, 6, 10),
    "grad.q_proj.weight": (12, 10),
}
FREE = [stage for stage in SHAPES if stage != "attn_weights"]
"""The stages that may hold any values."""

NOUNS = {"B": "sequence", "N": "head", "K": "key/value head", "T": "position"}

seeds = st.integers(0, 2**32 - 1)
quick = settings(deadline=None, max_examples=40, suppress_health_check=list(HealthCheck))


def softmax(scores, hidden=None):
    scores = scores if hidden is None else np.where(hidden, -np.inf, scores)
    with np.errstate(invalid="ignore"):
        exponentials = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights = exponentials / exponentials.sum(axis=-1, keepdims=True)
    return np.where(np.isnan(weights), 0.0, weights)


def drawn(stage, seed):
    """Return random values of a stage, and their generator."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(SHAPES[stage])
    return (softmax(x) if stage == "attn_weights" else x), rng


def observed(x, rng, dtype=np.float32):
    """Return values as an implementation would: in float32, with its own rounding errors."""
    with np.errstate(invalid="ignore", over="ignore"):
        noise = NOISE * np.maximum(1.0, np.abs(x)) * rng.standard_normal(x.shape) / 2
        return np.where(x == 0.0, x, x + noise).astype(
            dtype
        )  # a softmax gives hidden keys an exact 0


def described(stage, wrong, expected, rng, **known):
    findings = describe(stage, observed(wrong, rng), expected, ALLOWED, **known)
    json.dumps(findings.to_dict(), allow_nan=False)
    return findings


def names(findings):
    return [pattern.name for pattern in findings.patterns]


def causal(queries=6, keys=7):
    return np.broadcast_to(np.arange(keys) > np.arange(queries)[:, None], (2, 4, queries, keys))


# ---- Where ---------------------------------------------------------------------------------------

Q = (2, 8, 12, 16)
PLACES = [
    (np.s_[:, 3], "only head 3 (of 8)", {"heads": (3,)}),
    (np.s_[:, 4:], "heads 4-7 (the second half)", {"heads": (4, 5, 6, 7)}),
    (np.s_[:, 2:4], "heads 2-3 (of 8)", {"heads": (2, 3)}),
    (np.s_[:, [0, 2, 5]], "heads 0, 2 and 5 (of 8)", {"heads": (0, 2, 5)}),
    (np.s_[:, :, 4:], "positions 4 and later", {"positions": tuple(range(4, 12))}),
    (np.s_[:, :, :3], "positions 0-2 (of 12)", {"positions": (0, 1, 2)}),
    (np.s_[:, :, :11], "all positions but the last", {}),
    (np.s_[:, :, 1::2], "odd positions", {}),
    (np.s_[:, :, 0::2], "even positions", {}),
    (np.s_[:, :, 2::3], "every third position from 2 on", {}),
    (np.s_[:, :, 0], "only the first token", {"positions": (0,)}),
    (np.s_[:, :, -1], "only the last token", {"positions": (11,)}),
    (np.s_[:, :, 5], "only position 5", {"positions": (5,)}),
    (
        np.s_[..., 8:],
        "features 8-15 (the second half of each head)",
        {"features": tuple(range(8, 16))},
    ),
    (np.s_[..., 5], "only feature 5 (of 16)", {"features": (5,)}),
    (np.s_[..., [i for i in range(16) if i not in (0, 8)]], "all features but 0 and 8", {}),
    (
        np.s_[1, 3, 4:],
        "only sequence 1 (of 2), only head 3 (of 8), positions 4 and later",
        {"sequences": (1,)},
    ),
    (np.s_[1, 3, 4, 5], "one element: sequence 1, head 3, position 4, feature 5", {"heads": (3,)}),
    (np.s_[...], "everywhere", {"heads": tuple(range(8)), "keys": None}),
]


@sample(12)
@pytest.mark.parametrize(("where", "words", "data"), PLACES)
def test_location_has_readable_words(where, words, data):
    """The location of an error is described in readable words, with its indices as data."""
    rng = np.random.default_rng(0)
    expected = rng.standard_normal(Q)
    wrong = expected.copy()
    wrong[where] += rng.standard_normal(wrong[where].shape) + 0.1
    findings = described("q", wrong, expected, rng)
    assert findings.where == words
    assert {name: getattr(findings.location, name) for name in data} == data
    assert findings.location.wrong <= findings.location.size == wrong.size


def test_partly_wrong_slice_is_a_location():
    """Heads of which only 60% of the elements are wrong are still the location."""
    rng = np.random.default_rng(0)
    expected = rng.standard_normal(Q)
    wrong = expected.copy()
    wrong[:, 4:] += rng.standard_normal((2, 4, 12, 16)) * (rng.random((2, 4, 12, 16)) < 0.6)
    assert described("q", wrong, expected, rng).where == "heads 4-7 (the second half)"


def test_nothing_is_wrong_within_the_budget():
    """Values within the budget have no location, no pattern and no sign."""
    expected, rng = drawn("q", 0)
    findings = described("q", expected, expected, rng)
    assert (findings.where, findings.abouts, findings.signs) == (
        "no single element is over its budget",
        (),
        (),
    )


def test_rms_error_has_a_location():
    """Heads over the rms budget are the location, though each element is within the maximum."""
    rng = np.random.default_rng(0)
    expected = rng.standard_normal(Q)
    wrong = expected.copy()
    wrong += 1e-7 * rng.standard_normal(Q)
    wrong[:, 2:4] += 1.2e-6
    findings = describe("q", wrong, expected, {"rms": 4e-7, "max": 2e-6})
    assert findings.where == "heads 2-3 (of 8)"


def hidden_and_empty():
    hidden = causal().copy()
    hidden[1, :, 2] = True
    return hidden


@pytest.mark.parametrize(
    ("stage", "cells", "words"),
    [
        ("scores", lambda hidden: hidden, "only hidden cells"),
        (
            "scores",
            lambda hidden: hidden & (np.arange(4) == 1)[:, None, None],
            "only head 1 (of 4), only hidden cells",
        ),
        ("attn_weights", lambda hidden: hidden.all(-1, keepdims=True), "only rows without a key"),
        ("scores", lambda hidden: np.eye(6, 7, dtype=bool), "only the diagonal"),
        ("scores", lambda hidden: np.eye(6, 7, -1, dtype=bool), "only the keys 1 before the query"),
        ("attn_weights", lambda hidden: np.tri(6, 7, -1, dtype=bool), "only keys before the query"),
    ],
)
def test_cells_have_a_common_location(stage, cells, words):
    """Wrong cells are described by a common property, such as hidden cells or the diagonal."""
    expected, rng = drawn(stage, 1)
    hidden = hidden_and_empty()
    where = np.broadcast_to(cells(hidden), expected.shape)
    wrong = np.where(where, expected + 0.1 + rng.random(expected.shape), expected)
    assert described(stage, wrong, expected, rng, hidden=hidden).where == words


@pytest.mark.parametrize("stage", ["context", "output"])
def test_empty_rows_show_in_later_stages(stage):
    """Errors in rows without a key are described as such at the context and the output."""
    expected, rng = drawn(stage, 1)
    hidden = hidden_and_empty()
    wrong = expected.copy()
    wrong[(1, slice(None), 2) if stage == "context" else (1, 2)] += 1.0
    assert described(stage, wrong, expected, rng, hidden=hidden).where == "only rows without a key"


def test_scattered_rows_are_counted():
    """Scattered wrong rows of the scores are described by their number."""
    expected, rng = drawn("scores", 1)
    wrong = expected.copy()
    for b, n, t in ((0, 0, 2), (0, 1, 5), (1, 3, 3)):
        wrong[b, n, t] += rng.standard_normal(7)
    findings = described("scores", wrong, expected, rng)
    assert (findings.where, findings.location.cells) == ("in 3 of 48 rows", "rows")


@pytest.mark.parametrize(
    ("stage", "wrong", "words"),
    [
        ("scores", np.s_[:, :, 2], "only query 2"),
        ("scores", np.s_[..., 3:], "keys 3 and later"),
        ("k", np.s_[:, 1], "only key/value head 1 (of 2)"),
        ("cache.keys", np.s_[:, :, 4:], "slots 4 and later"),
        ("output", np.s_[..., 6:], "features 6-11 (the second half)"),
        ("grad.q_proj.weight", np.s_[3], "only row 3 (of 12)"),
        ("step1.q", np.s_[:, 2], "only head 2 (of 4)"),
        ("no.such.stage", np.s_[2], "only index of axis0 2 (of 12)"),
    ],
)
def test_axes_have_the_names_of_their_stage(stage, wrong, words):
    """A location has the axis names of its stage, or axis numbers for an unknown stage."""
    rng = np.random.default_rng(3)
    expected = rng.standard_normal(SHAPES.get(stage, (12, 10)))
    x = expected.copy()
    x[wrong] += 0.1 + rng.random(x[wrong].shape)
    assert described(stage, x, expected, rng).where == words


def test_slices_have_a_role_in_the_layer():
    """A location says which heads share a key/value head and which features RoPE rotates."""
    spec = AttentionSpec(32, 8, num_kv_heads=2, head_dim=8, rope=Rope(rotary_dim=6))
    problem = make_problem(Case("patterns", spec, "", seq_len=6), "float32")
    rng = np.random.default_rng(0)
    expected = rng.standard_normal((2, 8, 6, 8))
    for where, words in (
        (np.s_[:, 4:], "heads 4-7 (the second half), which share key/value head 1"),
        (np.s_[..., :6], "features 0-5 (of 8), which are those that RoPE rotates"),
        (np.s_[..., 6:], "features 6-7 (of 8), which are those that RoPE does not rotate"),
    ):
        wrong = expected.copy()
        wrong[where] += 1.0
        assert described("q", wrong, expected, rng, problem=problem).where == words


# ---- No pattern for random errors ----------------------------------------------------------------


@settings(
    deadline=None, max_examples=200, suppress_health_check=list(HealthCheck), derandomize=True
)
@given(
    st.sampled_from([*SHAPES]),
    seeds,
    st.sampled_from([3e-6, 1e-4, 1e-2, 1.0, 1e3]),
    st.sampled_from(["everywhere", "a head", "tokens", "scattered", "one", "features"]),
)
def test_random_errors_have_no_pattern(stage, seed, size, where):
    """Random errors of any size, at any location of any stage, have no pattern."""
    expected, rng = drawn(stage, seed)
    error = size * rng.standard_normal(expected.shape)
    is_wrong = np.zeros(expected.shape, bool)
    if where in ("everywhere", "scattered"):
        is_wrong |= rng.random(expected.shape) < (1.0 if where == "everywhere" else 0.1)
    elif where == "one":
        is_wrong[tuple(rng.integers(0, expected.shape))] = True
    else:
        is_wrong[
            {"a head": (slice(None), 0), "tokens": np.s_[..., 2:, :], "features": np.s_[..., 3:]}[
                where
            ]
        ] = True
    findings = described(
        stage, expected + np.where(is_wrong, error, 0.0), expected, rng, hidden=causal()
    )
    assert findings.abouts == ()


@sample(size=[1e-3], stage=[*SHAPES][::2])
@pytest.mark.parametrize("size", [1e-7, 1e-3, 1e-2])
@pytest.mark.parametrize("stage", SHAPES)
def test_errors_over_budget_have_no_pattern(stage, size):
    """Random errors of 1.2 to 10 times the budget have no pattern, even one of many parameters."""
    for seed in range(20):
        for beyond in (1.2, 2.0, 10.0):
            expected, rng = drawn(stage, seed)
            wrong = expected + beyond * 4.0 * size * rng.standard_normal(expected.shape)
            assert (
                describe(stage, wrong, expected, {"rms": 4.0 * size, "max": 16.0 * size}).abouts
                == ()
            )


# ---- Values --------------------------------------------------------------------------------------

PARTS = [np.s_[...], np.s_[1], np.s_[:, -1], np.s_[..., 2:, :], np.s_[..., 1::2, :]]
parts = st.sampled_from(PARTS)


@quick
@given(st.sampled_from(FREE), parts, seeds)
def test_zeros_have_a_pattern(stage, part, seed):
    """Zeros in any part of a stage have their pattern, and no sign of a narrow format."""
    expected, _ = drawn(stage, seed)
    wrong = expected.copy()
    wrong[part] = 0.0
    findings = describe(stage, wrong.astype(np.float32), expected, ALLOWED)
    assert names(findings) == ["zeros"]
    assert not any("representable" in sign for sign in findings.signs)


@pytest.mark.parametrize(
    ("value", "pattern", "words", "fitted"),
    [
        (math.nan, "nan", "all values there are NaN", {}),
        (-math.inf, "infinite", "all values there are -infinity", {"sign": -1.0}),
        (-1e9, "constant", "all values there are -1e+09", {"value": -1e9}),
        (
            float(np.finfo(np.float32).min),
            "constant",
            "all values there are -3.403e+38 (the smallest float32)",
            {"value": float(np.finfo(np.float32).min)},
        ),
        (
            float(np.finfo(np.float32).min) / 2,
            "constant",
            "all values there are -1.701e+38 (half of the smallest float32)",
            {"value": float(np.finfo(np.float32).min) / 2},
        ),
        (
            -65504.0,
            "constant",
            "all values there are -65504 (the smallest float16)",
            {"value": -65504.0},
        ),
    ],
)
def test_constant_has_a_pattern(value, pattern, words, fitted):
    """A constant in hidden cells has a pattern with its number, or with NaN or the sign of
    infinity.
    """
    expected, _ = drawn("scores", 0)
    hidden = hidden_and_empty()
    findings = describe(
        "scores", np.where(hidden, value, expected), expected, ALLOWED, hidden=hidden
    )
    assert (findings.where, findings.abouts[0], names(findings)[0]) == (
        "only hidden cells",
        words,
        pattern,
    )
    assert findings.patterns[0].fitted == fitted
    json.dumps(findings.to_dict(), allow_nan=False)


def test_nan_has_its_own_location():
    """A sign locates NaN in rows without a key, although all other rows are also wrong."""
    expected, rng = drawn("attn_weights", 0)
    hidden = hidden_and_empty()
    wrong = softmax(3.0 * rng.standard_normal(expected.shape), hidden)
    wrong[hidden.all(-1)] = np.nan
    findings = described(
        "attn_weights", wrong, softmax(np.log(expected), hidden), rng, hidden=hidden
    )
    assert "28 of 336 elements are NaN: only rows without a key" in findings.signs


FACTORS = [
    (1 / 0.9, "1.111 (1/0.9, dropout's 1/(1 - p) with p = 0.1)"),
    (2.0, "2 (1/0.5"),
    (-1.0, "-1 (the sign is inverted)"),
    (math.sqrt(8), "2.828 (sqrt(H))"),
    (1 / math.sqrt(8), "0.3536 (1/sqrt(H))"),
    (0.125, "0.125 (1/H)"),
    (math.log(2), "0.6931 (ln 2)"),
    (1.234, "1.234 times"),
    (1 / 3, "0.3333 (1/3)"),
]


@pytest.mark.parametrize(("factor", "words"), FACTORS)
def test_known_factor_is_explained(factor, words):
    """A factor has a pattern with its number, and with its meaning if it is a known one."""
    expected, rng = drawn("q", 0)
    findings = described("q", factor * expected, expected, rng)
    assert names(findings) == ["factor"]
    assert words in findings.abouts[0]
    assert findings.patterns[0].fitted["factors"] == pytest.approx([factor], rel=1e-5)


def test_score_factor_is_shown_as_a_root():
    """A factor of 8 on the scores is shown as sqrt(64), since scores do not show head_dim."""
    expected, rng = drawn("scores", 0)
    assert "are 8 (sqrt(64)) times" in described("scores", 8 * expected, expected, rng).abouts[0]


@quick
@given(st.sampled_from(FREE), parts, st.floats(1.01, 50.0), st.booleans(), seeds)
def test_factor_is_found_in_any_part(stage, part, factor, is_divided, seed):
    """A factor on any part of any stage is the first pattern, with its value."""
    expected, rng = drawn(stage, seed)
    factor = 1 / factor if is_divided else -factor
    wrong = expected.copy()
    wrong[part] *= factor
    findings = described(stage, wrong, expected, rng)
    assert names(findings)[0] == "factor"
    assert findings.patterns[0].fitted["factors"] == pytest.approx([factor], rel=1e-4)
    assert findings.patterns[0].parameters == 1


@quick
@given(st.sampled_from(FREE), st.integers(0, 3), seeds)
def test_factors_along_an_axis_are_found(stage, axis, seed):
    """A factor for each index of an axis is the first pattern, with all its values."""
    expected, rng = drawn(stage, seed)
    axis = axis % expected.ndim
    assume(expected.size >= 3 * expected.shape[axis] and expected.shape[axis] >= 3)
    factors = 2.0 + np.arange(expected.shape[axis])
    shape = [-1 if position == axis else 1 for position in range(expected.ndim)]
    findings = described(stage, expected * factors.reshape(shape), expected, rng)
    assert names(findings)[0] == "factor"
    assert findings.patterns[0].fitted["factors"] == pytest.approx(factors, rel=1e-4)


@pytest.mark.parametrize("stage", ["q", "k", "latents"])
def test_missing_norm_has_a_pattern(stage):
    """Rows without their norm have only the pattern of a factor, which mentions the norm."""
    x, rng = drawn(stage, 0)
    normed = x / np.sqrt((x**2).mean(axis=-1, keepdims=True))
    findings = described(stage, x, normed, rng)
    assert names(findings) == ["factor"]
    assert "as by a missing or additional norm" in findings.abouts[0]


@quick
@given(st.sampled_from(FREE), parts, seeds)
def test_offset_is_found_in_any_part(stage, part, seed):
    """An offset of 0.375 on any part of any stage is the first pattern, with its value."""
    expected, rng = drawn(stage, seed)
    wrong = expected.copy()
    wrong[part] += 0.375
    findings = described(stage, wrong, expected, rng)
    assert names(findings)[0] == "offset"
    assert findings.patterns[0].fitted["offsets"] == pytest.approx([0.375], abs=1e-5)
    assert "0.375 is added to all values there" in findings.abouts


@pytest.mark.parametrize(
    ("stage", "shape", "words"),
    [
        (
            "output",
            (12,),
            "a number is added there to each feature, the same for all tokens, like a bias",
        ),
        (
            "v",
            (8,),
            "a number is added there to each feature, the same for all tokens, like a bias",
        ),
        (
            "q",
            (4, 1, 8),
            "a number is added there to each feature and head, the same for all tokens, like a "
            "bias",
        ),
        ("scores", (4, 1, 1), "a number is added there to each head"),
        ("scores", (2, 4, 6, 1), "each row there is off by a constant"),
        ("scores", (2, 4, 1, 7), "a bias that depends only on the key is added there"),
    ],
)
def test_offsets_along_axes_have_a_pattern(stage, shape, words):
    """Offsets by feature, head, row or key have their words; a softmax ignores those by row."""
    expected, rng = drawn(stage, 0)
    findings = described(stage, expected + rng.standard_normal(shape), expected, rng)
    assert findings.abouts[0].startswith(words)
    assert findings.abouts[0].endswith("which a softmax ignores") == (shape == (2, 4, 6, 1))


# ---- Order ---------------------------------------------------------------------------------------


@quick
@given(st.sampled_from([*SHAPES]), st.integers(0, 3), seeds)
def test_any_order_of_any_axis_is_found(stage, axis, seed):
    """Any permutation of any axis is the only pattern, with the indices that moved."""
    expected, rng = drawn(stage, seed)
    axis = axis % expected.ndim
    order = rng.permutation(expected.shape[axis])
    findings = described(stage, np.take(expected, order, axis=axis), expected, rng)
    if np.array_equal(order, np.arange(len(order))):
        assert findings.where == "no single element is over its budget"
        return
    (pattern,) = findings.patterns
    assert pattern.name == "order"
    wrong = np.flatnonzero(order != np.arange(len(order)))
    assert pattern.fitted["of"] == wrong.tolist()
    assert pattern.fitted["from"] == order[wrong].tolist()


@pytest.mark.parametrize(
    ("stage", "axis", "order", "words"),
    [
        ("q", 1, [3, 2, 1, 0], "heads are in reverse order"),
        ("q", 1, [0, 2, 1, 3], "heads 1 and 2 are exchanged"),
        ("q", 1, [3, 0, 1, 2], "heads are rolled by 1"),
        ("q", 1, [0, 0, 0, 0], "heads are all taken from 0"),
        ("q", 1, [0, 1, 0, 1], "heads 2 3 are taken from 0 1"),
        # Not all heads are reversed.
        ("q", 3, [0, 6, 2, 4, 3, 5, 1, 7], "features 1 3 4 6 are in reverse order"),
        ("q", 3, [4, 5, 6, 7, 0, 1, 2, 3], "features are exchanged by halves"),
        ("q", 3, [0, 2, 4, 6, 1, 3, 5, 7], "features are in halves, 0 2 4"),
        ("q", 3, [0, 4, 1, 5, 2, 6, 3, 7], "features are interleaved, instead of in halves"),
        ("q", 3, [1, 0, 3, 2, 5, 4, 7, 6], "features are exchanged with their neighbors"),
        ("q", 2, [5, 4, 3, 2, 1, 0], "positions are in reverse order"),
        ("q", 2, [0, 0, 1, 2, 3, 4], "positions are taken from the one before"),
        ("output", 0, [1, 0], "sequences 0 and 1 are exchanged"),
        ("output", 1, [1, 2, 3, 4, 5, 0], "positions are rolled by -1"),
        ("scores", 3, [6, 5, 4, 3, 2, 1, 0], "keys are in reverse order"),
    ],
)
def test_common_orders_have_words(stage, axis, order, words):
    """Common orders, such as reversed, rolled or interleaved, have their own words."""
    expected, rng = drawn(stage, 0)
    findings = described(stage, np.take(expected, order, axis=axis), expected, rng)
    assert words in findings.abouts[0]


@pytest.mark.parametrize("stage", ["k", "output", "cache.keys"])
@pytest.mark.parametrize("by", [1, -1])
@pytest.mark.parametrize("came_in", [0.0, 1.0])
def test_shifted_tokens_have_a_pattern(stage, by, came_in):
    """Tokens shifted by one have a pattern, whether zeros or other values fill the end."""
    expected, rng = drawn(stage, 0)
    wrong = np.roll(expected, by, axis=-2)
    edge = wrong[..., 0 if by > 0 else -1, :]
    edge[...] = came_in * rng.standard_normal(edge.shape)
    findings = describe(stage, wrong.astype(np.float32), expected, ALLOWED)
    assert findings.patterns[0].fitted["by"] == by
    assert ("the one at the end is 0" in findings.abouts[0]) == (came_in == 0.0)


def test_transposed_axes_have_a_pattern():
    """Transposed scores and weights and reshaped heads have their patterns."""
    rng = np.random.default_rng(0)
    scores = rng.standard_normal((2, 3, 6, 6))
    assert described("scores", scores.swapaxes(2, 3), scores, rng).abouts == (
        "queries and keys are exchanged: transposed",
    )
    weight = rng.standard_normal((8, 8))
    assert names(described("grad.q_proj.weight", weight.T, weight, rng)) == ["transposed"]
    q = rng.standard_normal((2, 3, 4, 8))
    width = q.swapaxes(1, 2).reshape(2, 4, 24)
    assert names(described("q", width.reshape(2, 3, 4, 8), q, rng)) == ["reshaped"]
    assert names(described("q", width.reshape(2, 4, 8, 3).transpose(0, 3, 1, 2), q, rng)) == [
        "reshaped"
    ]


def test_permuted_axes_have_a_pattern():
    """Permuted axes have a pattern with the expected and the actual order."""
    rng = np.random.default_rng(0)
    k = rng.standard_normal((2, 4, 4, 4))
    findings = described("k", k.transpose(0, 2, 3, 1), k, rng)
    assert findings.abouts == ("axes are exchanged: instead of (B, K, S, H) they are (B, S, H, K)",)


def test_values_of_other_stage_are_found():
    """Values of another stage or step have a pattern that names it, also transposed or repeated."""
    rng = np.random.default_rng(0)
    k, v, before = (rng.standard_normal((2, 2, 6, 6)) for _ in range(3))
    q = rng.standard_normal((2, 4, 6, 6))
    others = {"step1.k": k, "step1.v": v, "step0.k": before}

    def suggestion(stage, wrong, expected):
        return described(stage, wrong, expected, rng, others=others).abouts

    assert suggestion("step1.k", v, k) == ("the values there are taken from step1.v",)
    others["module.step1.k"] = others["step1.module.k"] = k + 1.0
    assert suggestion("step1.k", k + 1.0, k) == ("1 is added to all values there",)
    assert suggestion("step1.k", before, k) == (
        "the values there are taken from step0.k, of another step",
    )
    assert suggestion("step1.k", v.swapaxes(2, 3), k) == (
        "the values there are taken from step1.v, transposed",
    )
    assert suggestion("step1.q", np.repeat(k, 2, axis=1), q) == (
        "the values there are taken from step1.k, its heads repeated",
    )


# ---- Scores, attention weights, masks, context ---------------------------------------------------


def test_distance_bias_has_a_pattern():
    """A bias with a slope per head has a pattern with its slopes, and so has a learned one."""
    rng = np.random.default_rng(0)
    expected = rng.standard_normal((2, 4, 12, 12))
    distance = np.arange(12) - np.arange(12)[:, None]
    slopes = 2.0 ** -np.arange(1, 5)[:, None, None]
    findings = described("scores", expected - slopes * np.abs(distance), expected, rng)
    assert findings.abouts[0].startswith("slope * (|key - query|) is added there, as in ALiBi")
    assert findings.patterns[0].fitted["slopes"] == pytest.approx(
        [-0.5, -0.25, -0.125, -0.0625], abs=1e-5
    )
    learned = rng.standard_normal((4, 23))[:, distance + 11]
    assert names(described("scores", expected + learned, expected, rng)) == ["by distance"]


@quick
@given(st.floats(0.05, 8.0).filter(lambda x: abs(x - 1) > 0.01), st.booleans(), seeds)
def test_factor_before_softmax_has_a_pattern(factor, is_causal, seed):
    """Attention weights of scores times a factor have a pattern of powers, with the factor."""
    rng = np.random.default_rng(seed)
    x, hidden = rng.standard_normal((2, 4, 6, 7)), causal() if is_causal else None
    findings = described(
        "attn_weights", softmax(factor * x, hidden), softmax(x, hidden), rng, hidden=hidden
    )
    assert names(findings)[0] == "power"
    assert findings.patterns[0].fitted["factor"] == pytest.approx(factor, rel=1e-3)


def test_uniform_rows_have_a_pattern():
    """Rows uniform over visible keys have a pattern, and so have uniform rows without a key."""
    rng = np.random.default_rng(0)
    expected = softmax(rng.standard_normal((2, 4, 6, 7)), causal())
    uniform = softmax(np.zeros((2, 4, 6, 7)), causal())
    assert described("attn_weights", uniform, expected, rng, hidden=causal()).abouts == (
        "rows are uniform over the keys that they attend to",
    )
    hidden = hidden_and_empty()
    expected = softmax(rng.standard_normal((2, 4, 6, 7)), hidden)
    wrong = np.where(hidden.all(-1, keepdims=True), 1 / 7, expected)
    findings = described("attn_weights", wrong, expected, rng, hidden=hidden)
    assert findings.where == "only rows without a key"
    assert findings.abouts[0] == "all values there are 0.1429 (1/S: uniform rows)"


def test_row_sums_are_reported():
    """Rows times a factor have a pattern, and a sign has their sums if these are not 1."""
    expected, rng = drawn("attn_weights", 0)
    findings = described(
        "attn_weights", expected * np.linspace(0.5, 1.5, 6)[:, None], expected, rng
    )
    assert names(findings)[0] == "factor"
    assert "rows sum to 0.5 … 1.5, and should to 1 (48 of 48 rows)" in findings.signs
    findings = described("attn_weights", expected * (1 + rng.random((2, 4, 6, 1))), expected, rng)
    assert names(findings) == ["rows"]


def test_softmax_over_queries_has_a_sign():
    """A softmax over the queries has a sign that says so."""
    rng = np.random.default_rng(0)
    scores = rng.standard_normal((2, 4, 6, 7))
    wrong = np.exp(scores) / np.exp(scores).sum(axis=2, keepdims=True)
    findings = described("attn_weights", wrong, softmax(scores), rng)
    assert "the weights sum to 1 over the queries" in findings.signs


def test_weighted_hidden_cells_are_counted():
    """Signs count hidden cells with weight and visible cells without any."""
    rng = np.random.default_rng(0)
    scores, hidden = rng.standard_normal((2, 4, 6, 7)), causal()
    findings = described(
        "attn_weights", softmax(scores), softmax(scores, hidden), rng, hidden=hidden
    )
    assert any(
        sign.startswith(f"{hidden.sum()} hidden cells have weight, at most 0.")
        for sign in findings.signs
    )
    assert names(findings) == ["unmasked"]
    one_less = hidden | (np.arange(7) == np.arange(6)[:, None] - 1)
    findings = described(
        "attn_weights", softmax(scores, one_less), softmax(scores, hidden), rng, hidden=hidden
    )
    assert "40 visible cells have weight 0" in findings.signs


def test_hidden_weights_have_no_pattern():
    """Random weights in hidden cells of otherwise correct rows have a location but no pattern."""
    rng = np.random.default_rng(0)
    right, hidden = softmax(rng.standard_normal((2, 4, 6, 7)), causal()), causal()
    findings = described(
        "attn_weights", right + hidden * rng.random(right.shape), right, rng, hidden=hidden
    )
    assert (findings.where, findings.abouts) == ("only hidden cells", ())


def test_wrong_masks_have_a_pattern():
    """Inverted, constant, banded, transposed and rolled masks have patterns; so have wrong
    lengths.
    """
    right = causal(6, 6).astype(bool)
    distance = np.arange(6) - np.arange(6)[:, None]
    for wrong, pattern, words in (
        (~right, "inverted", "hidden cells are shown, and shown cells hidden"),
        (right & False, "constant", "none of them is hidden"),
        (right | True, "constant", "all of them are hidden"),
        (
            right | (distance <= -3),
            "band",
            "a query attends to the keys from 2 before its own to its own "
            "instead of the keys from the first key to its own",
        ),
        (right.swapaxes(2, 3), "transposed", "queries and keys are exchanged: transposed"),
        (np.roll(right, 1, axis=2), "order", "queries are rolled by 1"),
    ):
        findings = describe("mask", wrong, right, EXACT, hidden=right)
        assert (pattern, words) in {(pattern.name, pattern.about) for pattern in findings.patterns}
        json.dumps(findings.to_dict(), allow_nan=False)
    findings = describe("mask", right & False, right, EXACT, hidden=right)
    assert findings.where == "only keys after the query"
    assert names(findings) == ["constant", "band"]
    findings = describe("cache.lengths", np.array([4, 6]), np.array([3, 5]), EXACT)
    assert (findings.where, findings.abouts) == ("everywhere", ("1 is added to all values there",))


@settings(deadline=None, max_examples=50)
@given(seeds)
def test_random_masks_have_no_pattern(seed):
    """A random mask instead of the right one has no pattern."""
    rng = np.random.default_rng(seed)
    wrong, right = rng.random((2, 2, 4, 5, 6)) < 0.4
    assert describe("mask", wrong, right, EXACT).abouts == ()


def test_one_moved_value_is_not_an_order():
    """One value equal to one at a different position has no pattern, in a mask or in q."""
    right = causal(6, 6).astype(bool)
    wrong = right.copy()
    wrong[1, 2, 3, 3] ^= True
    assert describe("mask", wrong, right, EXACT).abouts == ()
    expected, _ = drawn("q", 0)
    wrong = expected.copy()
    wrong[1, 2, 3, 3] = expected[1, 2, 3, 5]
    assert describe("q", wrong, expected, ALLOWED).abouts == ()


def test_mean_of_v_in_empty_rows_is_found():
    """The mean of v in rows of the context without a key has its pattern."""
    expected, rng = drawn("context", 0)
    v, hidden = rng.standard_normal((2, 2, 7, 8)), hidden_and_empty()
    empty = hidden.all(-1, keepdims=True)
    expected = np.where(empty, 0.0, expected)
    wrong = np.where(empty, np.repeat(v.mean(axis=2, keepdims=True), 2, axis=1), expected)
    findings = described("context", wrong, expected, rng, hidden=hidden, others={"v": v})
    assert "mean of v" in names(findings)


# ---- Rounding ------------------------------------------------------------------------------------


def to_tf32(x):
    bits = np.ascontiguousarray(x.astype(np.float32)).view(np.uint32)
    return (bits & np.uint32(0xFFFFE000)).view(np.float32)


@pytest.mark.parametrize("stage", ["q", "scores", "attn_weights", "output"])
@pytest.mark.parametrize(
    ("narrow", "words"),
    [
        (
            lambda x: x.astype(ml_dtypes.bfloat16).astype(np.float32),
            "the values are rounded to bfloat16",
        ),
        (
            lambda x: x.astype(np.float16).astype(np.float32),
            "the values are rounded to float16 or TF32",
        ),
        (to_tf32, "the values are cut off to float16 or TF32"),
    ],
)
def test_rounded_values_have_a_pattern(stage, narrow, words):
    """Values rounded or cut off to fewer bits have a pattern, unless kept in a narrow dtype."""
    expected, rng = drawn(stage, 0)
    values = observed(expected, rng)
    assert words in describe(stage, narrow(values), expected, ALLOWED).abouts
    as_stored = narrow(values).astype(ml_dtypes.bfloat16)
    assert describe(stage, as_stored, expected, ALLOWED).abouts == ()


def test_problem_dtype_is_not_rounding():
    """Values rounded to bfloat16 have a pattern, but not in a bfloat16 problem."""
    expected, _ = drawn("q", 0)
    problem = make_problem(Case("patterns", AttentionSpec(32, 4), "", seq_len=6), "bfloat16")
    wide = expected.astype(ml_dtypes.bfloat16).astype(np.float64)
    assert names(describe("q", wide, expected, ALLOWED)) == ["rounded"]
    assert describe("q", wide, expected, ALLOWED, problem=problem).abouts == ()


def test_wrong_narrow_values_are_a_sign():
    """Unrelated values that bfloat16 can represent have a sign, but no pattern."""
    expected, rng = drawn("q", 0)
    other = rng.standard_normal(expected.shape).astype(ml_dtypes.bfloat16).astype(np.float32)
    findings = describe("q", other, expected, ALLOWED)
    assert findings.abouts == ()
    assert "all values there are exactly representable in bfloat16" in findings.signs


def test_narrow_sized_errors_are_a_sign():
    """Errors as large as in bfloat16 have a sign, but no pattern."""
    expected, rng = drawn("q", 0)
    wrong = expected * (1.0 + 2.0**-9 * rng.uniform(-1.0, 1.0, expected.shape))
    findings = described("q", wrong, expected, rng)
    assert findings.abouts == ()
    assert "every error is within one unit of bfloat16 of its value" in findings.signs
    assert not any(
        "within one unit" in sign for sign in described("q", expected + 0.01, expected, rng).signs
    )


# ---- The simpler pattern first -------------------------------------------------------------------


def test_simpler_pattern_comes_first():
    """If two patterns hold, they are sorted by their number of parameters."""
    rng = np.random.default_rng(0)
    half = rng.standard_normal((2, 4, 6, 4))
    expected = np.concatenate(
        [half, -half], axis=-1
    )  # turned by 180 degrees, and its halves exchanged
    findings = described("q", -expected, expected, rng)
    assert names(findings) == ["order", "factor"]
    assert [pattern.parameters for pattern in findings.patterns] == sorted(
        pattern.parameters for pattern in findings.patterns
    )


def test_implied_patterns_are_left_out():
    """A factor or an offset is the only pattern, without more complex patterns that it implies."""
    expected, rng = drawn("scores", 0)
    assert names(described("scores", 2.0 * expected, expected, rng)) == ["factor"]
    assert names(described("scores", expected + 1.0, expected, rng)) == ["offset"]


def test_expected_nan_hides_no_pattern():
    """A factor or an offset is the only pattern, although some expected values are NaN."""
    expected, rng = drawn("q", 0)
    expected[1, :, 3] = np.nan
    for wrong, pattern in ((2.0 * expected, "factor"), (expected + 0.5, "offset")):
        assert names(described("q", wrong, expected, rng)) == [pattern]


def test_unequal_shapes_raise():
    """Describing arrays of different shapes raises an error."""
    with rejects("actual", actual=(3,)):
        describe("q", np.zeros(3), np.zeros(2), ALLOWED)


# ---- Parameters of the specification -------------------------------------------------------------

ROPE = Rope(10000.0)
SPEC = AttentionSpec(64, 4, num_kv_heads=2, rope=ROPE)
YARN = Rope(10000.0, scaling=YarnScaling(4.0, 16))
CASE = Case("laws", SPEC, "", seq_len=24, is_causal=True)


def computed(problem, spec, dtype="float64"):
    return Layer(
        replace(problem, case=replace(problem.case, spec=spec)), Arithmetic(dtype_named(dtype))
    )


def changed(problem, change):
    return edited_layer(problem, "float64", [change])


def diagnosed(right, wrong, stage, *, alone=False, first_position=0, case=CASE):
    """Describe a stage of a layer with a wrong specification; `alone`: no earlier stage is
    observed.
    """
    problem = make_problem(replace(case, spec=right), "float32")
    with np.errstate(all="ignore"):
        truth = run_steps(computed(problem, right).steps())
        same = run_steps(computed(problem, right, "float32").steps())[stage]
        moved = replace(problem, case=replace(problem.case, first_position=first_position))
        stages = run_steps(computed(moved, wrong, "float32").steps())
    index = next(
        i for i, step in enumerate(computed(problem, right).steps()) if stage in step(truth)
    )

    def recompute(change):
        values = {} if alone else dict(stages)
        steps = changed(problem, change).steps()
        for step in steps[:index] if alone else ():
            values |= step(values)
        return steps[index](values)[stage]

    expected = recompute(with_spec(right))
    description = describe(
        stage,
        stages[stage],
        expected,
        budget(expected, same, "float32") if same.dtype != bool else EXACT,
        hidden=truth["mask"],
        problem=problem,
        recompute=recompute,
    )
    json.dumps(description.to_dict(), allow_nan=False)
    return description


def with_rope(rope=ROPE, **fields):
    return replace(SPEC, rope=replace(rope, **fields))


@pytest.mark.parametrize(
    ("wrong", "stage", "words"),
    [
        (with_rope(theta=500000.0), "q", "RoPE's theta is 500000 instead of 10000"),
        (with_rope(theta=123456.0), "k", "RoPE's theta is 123456 instead of 10000"),
        (
            with_rope(theta=100.0),
            "q",
            "RoPE's frequencies are theta ** -(i / d) instead of theta ** -(2 i / d), or theta "
            "is 100 instead of 10000",
        ),
        (with_rope(scaling=LinearScaling(4.0)), "q", "RoPE's positions are divided by 4"),
        (with_rope(scaling=LinearScaling(0.5)), "k", "RoPE's positions are multiplied by 2"),
        (
            with_rope(rotary_dim=12),
            "q",
            "the number of features that RoPE rotates is 12 instead of 16",
        ),
        (replace(SPEC, scale=0.3), "scores", "the scale of the scores is 0.3 instead of 0.25"),
        (replace(SPEC, soft_cap=2.5), "scores", "the soft cap is 2.5 instead of none"),
        (replace(SPEC, window_size=5), "mask", "the window is 5 instead of none"),
    ],
)
def test_spec_number_is_fitted(wrong, stage, words):
    """A wrong number of the specification has a pattern with its value, at its stage."""
    assert words in diagnosed(SPEC, wrong, stage).abouts


@sample(3)
@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (with_rope(theta=500000.0), "RoPE's theta is 500000 instead of 10000"),
        (
            with_rope(theta=100.0),
            "RoPE's theta is 100 instead of 10000, or the exponent i / d instead of 2 i / d",
        ),
        (
            with_rope(scaling=LinearScaling(4.0)),
            "the factor that RoPE's positions are divided by is 4",
        ),
        (replace(SPEC, scale=0.3), "the scale of the scores is 0.3 instead of 0.25"),
        (replace(SPEC, soft_cap=2.5), "the soft cap is 2.5 instead of none"),
        (replace(SPEC, window_size=5), "the window is 5 instead of none"),
    ],
)
def test_spec_number_is_fitted_from_output(wrong, words):
    """A wrong number of the specification is the only pattern of the output alone."""
    (pattern,) = diagnosed(SPEC, wrong, "output", alone=True).abouts
    assert pattern.startswith(words)


RECORDS = {
    "eps": (
        replace(SPEC, qk_norm=Norm(eps=1e-6)),
        replace(SPEC, qk_norm=Norm(eps=2.5e-3)),
        "q",
        "the eps of q_norm and k_norm is 0.0025 instead of 1e-06",
    ),
    "attention factor": (
        replace(SPEC, rope=YARN),
        replace(SPEC, rope=replace(YARN, scaling=YarnScaling(4.0, 16, attention_factor=1.5))),
        "q",
        "RoPE's attention factor is 1.5 instead of 1.139",
    ),
    "unscaled": (replace(SPEC, rope=YARN), SPEC, "k", "RoPE's frequencies are not scaled"),
    "missing": (replace(SPEC, rope=YARN), replace(SPEC, rope=None), "k", "RoPE is missing"),
    "any": (SPEC, replace(SPEC, rope=YARN), "k", "RoPE's frequencies are 1, 0.07906"),
    "max_bias": (
        replace(SPEC, alibi=Alibi(8.0)),
        replace(SPEC, alibi=Alibi(6.0)),
        "scores",
        "ALiBi's max_bias is 6 instead of 8",
    ),
    "temperature": (
        replace(SPEC, temperature=Temperature(8)),
        replace(SPEC, temperature=Temperature(8, 0.3)),
        "q",
        "the scale of the temperature is 0.3 instead of 0.1",
    ),
    "capped": (
        replace(SPEC, soft_cap=2.0),
        SPEC,
        "scores",
        "the soft cap is none instead of 2",
    ),
    "window": (
        replace(SPEC, window_size=5),
        replace(SPEC, window_size=4),
        "mask",
        "the window is 4 instead of 5",
    ),
    "chunk for window": (
        replace(SPEC, window_size=5),
        replace(SPEC, chunk_size=6),
        "mask",
        "the chunk size, with no window, is 6 instead of none",
    ),
    "window for chunk": (
        replace(SPEC, chunk_size=6),
        replace(SPEC, window_size=5),
        "mask",
        "the window, with no chunks, is 5 instead of none",
    ),
    "temperature length": (
        replace(SPEC, temperature=Temperature(8)),
        replace(SPEC, temperature=Temperature(16)),
        "q",
        "the length of the temperature is 16 instead of 8",
    ),
    "chunk": (
        replace(SPEC, chunk_size=8),
        replace(SPEC, chunk_size=6),
        "mask",
        "the chunk size is 6 instead of 8",
    ),
}


@pytest.mark.parametrize("field", ["window_size", "chunk_size"])
def test_missing_window_is_reported_once(field):
    """A missing window or chunk size is the only pattern of the output alone."""
    words = {"window_size": "the window", "chunk_size": "the chunk size"}[field]
    patterns = diagnosed(replace(SPEC, **{field: 6}), SPEC, "output", alone=True).abouts
    assert patterns == (f"{words} is none instead of 6",)


@sample(6)
@pytest.mark.parametrize(("right", "wrong", "stage", "words"), RECORDS.values(), ids=[*RECORDS])
def test_numbers_of_spec_parts_are_fitted(right, wrong, stage, words):
    """A wrong number or part of the specification has a pattern with its words, at its stage."""
    assert any(pattern.startswith(words) for pattern in diagnosed(right, wrong, stage).abouts)


NUM_PAIRS = SPEC.head_dim // 2
SCALINGS = [
    (YarnScaling(4.0, 16), {"original_length": 64}),
    (YarnScaling(4.0, 24), {"original_length": 96}),  # the length after scaling
    (YarnScaling(4.0, 16), {"factor": 40.0}),
    (YarnScaling(4.0, 1024, truncate=False), {"beta_fast": 16.0}),
    (YarnScaling(4.0, 1024, truncate=False), {"beta_slow": 2.0}),
    (Llama3Scaling(8.0, 16), {"original_length": 128}),
    (Llama3Scaling(8.0, 16), {"factor": 32.0}),
    (Llama3Scaling(8.0, 16), {"low_freq_factor": 2.0}),
    (Llama3Scaling(8.0, 16), {"high_freq_factor": 8.0}),
    (DynamicScaling(4.0, 16), {"factor": 2.0}),
    (DynamicScaling(4.0, 16), {"original_length": 8}),
    (ProportionalScaling(0.5), {"fraction": 0.25}),
    (LongRopeScaling(4.0, 16, (1.0,) * NUM_PAIRS, (3.0,) * NUM_PAIRS), {"original_length": 64}),
    (LongRopeScaling(4.0, 16, (1.0,) * NUM_PAIRS, (3.0,) * NUM_PAIRS), {"factor": 8.0}),
]


@sample(is_alone=[False], where=lambda right, wrong: (right, wrong) in SCALINGS[::2])
@pytest.mark.parametrize("is_alone", [False, True])
@pytest.mark.parametrize(("right", "wrong"), SCALINGS)
def test_rope_scaling_numbers_are_fitted(right, wrong, is_alone):
    """A wrong number of a RoPE scaling has a pattern, from q and from the output alone."""
    ((name, value),) = wrong.items()
    stage = "output" if is_alone else "q"
    specs = [with_rope(scaling=right), with_rope(scaling=replace(right, **wrong))]
    patterns = diagnosed(*specs, stage, alone=is_alone).abouts
    expected = getattr(right, name)
    assert (
        f"the {name} of RoPE's {right.kind} scaling is {value:g} instead of {expected:g}"
        in patterns
    )


@pytest.mark.parametrize("offset", [1, 2, 17, 100])
@pytest.mark.parametrize("stage", ["q", "k"])
def test_position_offset_has_a_pattern(offset, stage):
    """RoPE positions that are 1 to 100 too high have a pattern with the offset."""
    findings = diagnosed(SPEC, SPEC, stage, first_position=offset)
    assert f"RoPE's positions are {offset} too high" in findings.abouts


@settings(deadline=None, max_examples=15)
@given(st.floats(110.0, 1e7).filter(lambda theta: abs(theta - 10000.0) > 100.0))
def test_any_theta_is_found(theta):
    """Any wrong theta from 110 to 1e7 is the only pattern of q, with its value."""
    (pattern,) = diagnosed(SPEC, with_rope(theta=theta), "q").patterns
    assert pattern.name == "rope theta"
    assert pattern.fitted["theta"] == pytest.approx(theta, rel=1e-3)


def test_theta_of_latents_is_fitted():
    """A wrong theta is the only pattern of rotated latents."""
    rope = Rope(10000.0, rotary_dim=8, rotated="last")
    spec = AttentionSpec(64, 4, rope=rope, latent=Latent(16, 8))
    findings = diagnosed(spec, replace(spec, rope=replace(rope, theta=500.0)), "latents")
    assert findings.abouts == ("RoPE's theta is 500 instead of 10000",)


@sample(1)
@pytest.mark.parametrize("size", [1e-4, 1e-2, 1.0])
def test_random_errors_fit_no_number(size):
    """Random errors of a size at six stages have no pattern, even if parameters may be fitted."""
    problem = make_problem(CASE, "float32")
    values = run_steps(computed(problem, SPEC).steps())
    steps = computed(problem, SPEC).steps()
    for stage in ("mask", "q", "k", "scores", "attn_weights", "output"):
        index = next(i for i, step in enumerate(steps) if stage in step(values))
        expected = values[stage].astype(np.float64)
        rng = np.random.default_rng(0)
        wrong = expected + size * rng.standard_normal(expected.shape)
        if stage == "mask":
            wrong = values[stage] ^ (rng.random(expected.shape) < 0.1)
        findings = describe(
            stage,
            wrong,
            expected,
            EXACT if stage == "mask" else {"rms": 1e-6, "max": 1e-5},
            hidden=values["mask"],
            problem=problem,
            recompute=lambda x, index=index, stage=stage: changed(problem, x).steps()[index](
                values
            )[stage],
        )
        assert isinstance(findings, Description)
        assert findings.abouts == ()


def test_number_of_fits_is_bounded():
    """The search for parameters in an unexplained stage computes it at most 60 times."""
    calls = []

    def recompute(change):
        if change.spec is None:
            raise ValueError
        calls.append(change.spec)
        return (
            np.zeros((2, 4, 24, 24))
            + change.spec.score_scale * ones
            + (change.spec.soft_cap or 0.0)
        )

    problem = make_problem(CASE, "float32")
    ones = np.random.default_rng(0).standard_normal((2, 4, 24, 24))
    expected = recompute(with_spec(SPEC))
    describe("scores", expected + ones**2, expected, ALLOWED, problem=problem, recompute=recompute)
    assert len(calls) <= 60

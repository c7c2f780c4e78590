"""The comparison: rounding passes, and, as the control, injected bugs are reported at the right
stage.
"""

import inspect
import json
import math
from dataclasses import replace

import numpy as np
import pytest
from helpers.input_errors import rejects
from helpers.samples import sample

import parity.measure.backends
import parity.measure.core.compare
from mha_spec import AttentionSpec
from parity import CASES, Case, make_problem
from parity.measure.backends.record import record
from parity.measure.core.compare import (
    FACTOR,
    Label,
    budget,
    dtype_of_stage,
    factor,
    first_difference,
    slope,
)
from parity.measure.core.trace import Reference, Trace, compare_trace, nudged
from parity.measure.core.weights import dtype_named

ABOUT = {"case": "c", "backend": "b", "dtype": "float32", "stage": "context"}


@pytest.fixture
def expected(rng):
    return rng.standard_normal((2, 3, 4, 5))


def compare(actual, expected, same_precision, **about):
    """Compare an array after a cast to the dtype in which its stage is kept."""
    dtype = parity.measure.core.compare.dtype_of_stage(about["stage"], about["dtype"])
    return parity.measure.core.compare.compare(
        actual.astype(dtype), expected, same_precision, Label(**about)
    )


def noisy(expected, rng, relative=2**-24):
    return expected * (1.0 + relative * rng.standard_normal(expected.shape))


# ---- One stage -----------------------------------------------------------------------------------


def test_rounding_alone_passes(expected, rng):
    """Values that differ only by float32 rounding pass."""
    same = noisy(expected, rng)
    assert compare(noisy(expected, rng).astype(np.float32), expected, same, **ABOUT).passed


def test_relative_error_of_1e_6_fails(expected, rng):
    """Relative errors of 1e-6 in all elements fail by their rms."""
    same, signs = expected.astype(np.float32), rng.choice([-1.0, 1.0], expected.shape)
    comparison = compare(
        (expected * (1 + 1e-6 * signs)).astype(np.float32), expected, same, **ABOUT
    )
    assert not comparison.passed
    assert comparison.norm == "rms"


@pytest.mark.parametrize(
    ("dtype", "gain"), [("float32", 2e-7), ("bfloat16", 0.003), ("float16", 5e-4)]
)
def test_small_gain_fails_by_its_slope(rng, dtype, gain):
    """A small gain fails by its slope, though its rms and maximum are within the budget."""
    expected = rng.standard_normal((4, 10, 50, 50))
    narrow = dtype_named(dtype)
    about = {**ABOUT, "dtype": dtype, "stage": "q"}
    same = expected.astype(narrow)
    right = compare(
        noisy(expected, rng, float(np.finfo(np.float32).eps) / 4), expected, same, **about
    )
    assert right.passed
    wrong = compare(expected * (1 + gain), expected, same, **about)
    assert (wrong.passed, wrong.norm) == (False, "slope")
    allowed = budget(expected, same, dtype)
    errors = np.abs((expected * (1 + gain)).astype(narrow).astype(np.float64) - expected)
    assert errors.max() <= allowed["max"]
    assert np.sqrt(np.mean(errors**2)) <= allowed["rms"]


def test_slope_matches_least_squares(expected, rng):
    """The slope is the least-squares gain times the rms, and 0 for an orthogonal error."""
    counted = np.ones(expected.shape, bool)
    size = np.sqrt(np.mean(expected**2))
    assert slope(1.25 * expected, expected, counted) == pytest.approx(0.25 * size)
    away = rng.standard_normal(expected.shape)
    away -= expected * (away * expected).sum() / (expected**2).sum()  # orthogonal to a gain
    assert slope(expected + away, expected, counted) == pytest.approx(0.0, abs=1e-12)


def test_some_comparisons_have_no_slope(expected):
    """Gradients, and arithmetic that cuts off operands, have no budget for the slope."""
    same = expected.astype(np.float32)
    assert "slope" in budget(expected, same, "float32")
    assert "slope" not in budget(expected, same, "float32", arithmetic="tensix")
    assert "slope" not in budget(expected, same, "float32", has_slope=False)
    gain = (expected * (1 + 4e-7)).astype(np.float32)
    assert compare(gain, expected, same, **ABOUT).norm == "slope"
    assert compare(gain, expected, same, **{**ABOUT, "stage": "grad.query"}).norm != "slope"


def test_one_wrong_element_fails_by_maximum(rng):
    """One of 100,000 elements off by 1e-5 fails by the maximum, with its index."""
    expected = rng.standard_normal((4, 10, 50, 50))
    actual = expected.astype(np.float32)
    actual[1, 2, 3, 4] += 1e-5
    comparison = compare(actual, expected, expected.astype(np.float32), **ABOUT)
    assert not comparison.passed
    assert comparison.norm == "max"
    assert comparison.worst_index == {"B": 1, "N": 2, "T": 3, "H": 4}


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_one_non_finite_element_fails(expected, rng, wrong):
    """One NaN or infinity fails with a reason and its index."""
    actual = expected.copy()
    actual[0, 1, 2, 3] = wrong
    comparison = compare(actual, expected, noisy(expected, rng), **ABOUT)
    assert not comparison.passed
    assert comparison.reason == "1 element is NaN or infinite"
    assert comparison.worst_index == {"B": 0, "N": 1, "T": 2, "H": 3}


@pytest.mark.parametrize(
    "index", [np.s_[:, :1], np.s_[:1], np.s_[..., :1], np.s_[0], np.s_[:, :, :, None]]
)
def test_broadcastable_shape_fails(expected, index):
    """An array of a shape that would broadcast fails, with the shape as the reason."""
    comparison = compare(expected[index], expected, expected, **ABOUT)
    assert not comparison.passed
    assert "shape" in comparison.reason


def test_empty_array_fails():
    """Arrays without elements fail, with that reason."""
    empty = np.empty((2, 0, 3, 4))
    comparison = compare(empty, empty, empty, **ABOUT)
    assert not comparison.passed
    assert "no elements" in comparison.reason


@pytest.mark.parametrize("dtype", [np.float64, np.float16, np.int32, np.complex64, np.bool_])
def test_wrong_stage_dtype_fails(expected, dtype):
    """A float32 stage in the wrong dtype fails, with both dtypes as the reason."""
    comparison = parity.measure.core.compare.compare(
        expected.astype(dtype), expected, expected, Label(**ABOUT)
    )
    assert not comparison.passed
    assert comparison.reason == f"dtype {np.dtype(dtype)}, expected float32"


def test_floating_point_mask_fails(expected):
    """A mask of floats fails, with the dtype as the reason."""
    comparison = parity.measure.core.compare.compare(
        expected, expected > 0, expected > 0, Label(**{**ABOUT, "stage": "mask"})
    )
    assert not comparison.passed
    assert "dtype" in comparison.reason


def with_nan(x):
    x = x.copy()
    x[0, 1] = np.nan
    return x


def test_expected_nan_passes(expected, rng):
    """NaN where the reference is NaN passes, with the ratio of the other elements."""
    comparison = compare(
        with_nan(noisy(expected, rng)), with_nan(expected), with_nan(noisy(expected, rng)), **ABOUT
    )
    assert comparison.passed
    assert 0.0 < comparison.ratio < 1.0
    assert (comparison.reason, comparison.mismatched) == ("", 0)


@pytest.mark.parametrize("number", [0.0, 1.0, np.inf])
def test_missing_nan_fails(expected, number):
    """A number or infinity where the reference is NaN fails with a reason and its index."""
    actual = with_nan(expected)
    actual[0, 1, 2, 3] = number
    comparison = compare(actual, with_nan(expected), with_nan(expected), **ABOUT)
    assert not comparison.passed
    assert comparison.reason == "1 element is not NaN where the reference is"
    assert comparison.worst_index == {"B": 0, "N": 1, "T": 2, "H": 3}


def test_spreading_nan_fails(expected):
    """NaN where the reference is finite fails with a reason and its index."""
    actual = with_nan(expected)
    actual[1, 0, 2, 3] = np.nan
    comparison = compare(actual, with_nan(expected), with_nan(expected), **ABOUT)
    assert not comparison.passed
    assert comparison.reason == "1 element is NaN or infinite where the reference is finite"
    assert comparison.worst_index == {"B": 1, "N": 0, "T": 2, "H": 3}


def test_error_next_to_nan_fails(expected):
    """Relative errors of 1e-6 next to NaN fail by their rms, to which NaN adds nothing."""
    expected = with_nan(expected)
    signs = np.where(np.arange(expected.shape[-1]) % 2, 1.0, -1.0)
    exact = compare(
        (expected * (1 + 1e-6 * signs)).astype(np.float32),
        expected,
        expected.astype(np.float32),
        **ABOUT,
    )
    assert not exact.passed
    assert exact.norm == "rms"


def test_budget_ignores_nan(expected, rng):
    """The budget of an array with NaN is the budget of its finite elements."""
    same = noisy(expected, rng)
    alone = budget(expected[:, :1], same[:, :1], "float32")
    nan = np.full_like(expected[:, :1], np.nan)
    both = [np.concatenate([x[:, :1], nan], axis=1) for x in (expected, same)]
    assert budget(*both, "float32") == alone


def test_zero_weights_in_nan_row_pass():
    """Some attention weights of a NaN row may be 0, but not all, and not other values or stages."""
    expected, stage = np.full((1, 1, 1, 4), np.nan), {**ABOUT, "stage": "attn_weights"}
    actual = np.array([[[[np.nan, np.nan, 0.0, 0.0]]]])
    assert compare(actual, expected, expected, **stage).passed
    assert not compare(np.zeros_like(actual), expected, expected, **stage).passed
    assert not compare(np.where(np.isnan(actual), actual, 0.5), expected, expected, **stage).passed
    assert not compare(actual, expected, expected, **ABOUT).passed  # only for attention weights


def test_json_of_missing_nan_is_valid(expected):
    """The JSON of a missing NaN is valid, with null for the NaN."""
    comparison = compare(expected, with_nan(expected), with_nan(expected), **ABOUT)
    content = json.loads(json.dumps(comparison.to_dict(), allow_nan=False))
    assert content["worst_values"][1] is None


def test_one_flipped_mask_element_fails(expected):
    """One flipped element of a mask fails: its budget is 0."""
    mask = expected > 0
    flipped = mask.copy()
    flipped[1, 2, 3, 4] ^= True
    comparison = compare(flipped, mask, mask, **{**ABOUT, "stage": "mask"})
    assert not comparison.passed
    assert (comparison.budget, comparison.mismatched) == (0.0, 1)


def test_equal_masks_pass(expected):
    """Equal masks pass."""
    assert compare(expected > 0, expected > 0, expected > 0, **{**ABOUT, "stage": "mask"}).passed


def test_correlation_does_not_decide(expected, rng):
    """Values times 2 plus 0.5 fail, although their correlation is 1."""
    comparison = compare(2.0 * expected + 0.5, expected, noisy(expected, rng), **ABOUT)
    assert comparison.pcc == pytest.approx(1.0)
    assert not comparison.passed


@pytest.mark.parametrize("value", [1.0, 0.1])
def test_constant_has_no_correlation(value, rng):
    """The correlation of constants, or with one, is None, also if their mean is inexact."""
    constant = np.full((1, 1, 1, 3), value)
    others = rng.standard_normal(constant.shape)
    for actual, expected in [(7.0 * constant, constant), (constant, others), (others, constant)]:
        assert compare(actual, expected, expected, **ABOUT).pcc is None


def test_budget_grows_with_the_noise(expected, rng):
    """The budgets of rms, maximum and slope grow more than 100 times with 1,000 times the noise."""
    little, much = (
        budget(expected, noisy(expected, rng, relative), "float32") for relative in (1e-7, 1e-4)
    )
    assert set(much) == {"rms", "max", "slope"}
    assert all(much[norm] > 100 * little[norm] for norm in much)


def test_exact_budget_is_one_unit(expected):
    """With an exact reference, the maximum in float32 is 2^-23 of the largest value."""
    assert budget(expected, expected, "float32")["max"] == pytest.approx(
        2**-23 * np.abs(expected).max()
    )


def test_factor_is_the_limit_of_errors(expected, rng):
    """Errors of 0.99 times the allowed factor of the noise pass; errors of 1.01 times fail."""
    noise = 1e-3 * rng.standard_normal(expected.shape)
    same = expected + noise
    allowed = factor(expected.size)
    assert compare(expected + 0.99 * allowed * noise, expected, same, **ABOUT).passed
    assert not compare(expected + 1.01 * allowed * noise, expected, same, **ABOUT).passed


def test_factor_is_larger_for_few_elements():
    """The allowed factor is `FACTOR` for 10,000 elements, and twice as large for 4."""
    assert factor(10_000) == pytest.approx(FACTOR, rel=1e-3)
    assert factor(4) == 2 * FACTOR


def test_float64_budget_is_scaled_noise(expected, rng):
    """In float64, errors of 2^-53 pass and errors of 2^-40 fail, given float32 noise."""
    about = {**ABOUT, "dtype": "float64"}
    same = noisy(expected, rng)  # of the float32 reference
    assert compare(noisy(expected, rng, 2**-53), expected, same, **about).passed
    assert not compare(noisy(expected, rng, 2**-40), expected, same, **about).passed


def test_ulps_belong_to_the_stage_dtype():
    """An error of 2^-7 is 1 unit in the last place of bfloat16, and 2^16 of float32."""
    expected = np.ones((1, 1, 1, 2))
    actual = expected + 2**-7
    assert compare(actual, expected, expected, **{**ABOUT, "dtype": "bfloat16"}).max_ulp == 1.0
    assert compare(actual, expected, expected, **ABOUT).max_ulp == 2**16


def test_message_has_index_and_values(expected, rng):
    """The message has the stage, shape, number of wrong elements, worst index and values."""
    actual = expected.copy()
    actual[1, 2, 3, 4] = 7.0
    text = str(compare(actual, expected, noisy(expected, rng), **ABOUT))
    assert text.splitlines()[0] == "c/context: b differs from the reference (float32)"
    assert "(B N T H) = (2, 3, 4, 5)" in text
    assert "1 / 120 (0.8%)" in text
    assert f"at (b=1, n=2, t=3, h=4): 7, expected {expected[1, 2, 3, 4]:.6g}" in text


def test_json_of_failure_is_valid(expected):
    """The JSON of a failure is valid, with null for an infinite ratio."""
    comparison = compare(expected[:1], expected, expected, **ABOUT)
    assert math.isinf(comparison.ratio)
    assert json.loads(json.dumps(comparison.to_dict(), allow_nan=False))["ratio"] is None


# ---- The control: injected bugs are reported at the right stage
# ------------------------------------------------------


# Bugs with a name are injected in tests/lab/test_selftest.py; these have none. Each receives the
# function to break and the implementation, and returns the broken function.


def swapped_kv(project_qkv, _):
    def broken(*inputs, **options):
        q, k, v = project_qkv(*inputs, **options)
        return q, v, k

    return broken


def one_nan(attention_context, sibling):
    def broken(attn_weights, value):
        context = attention_context(attn_weights, value)
        addend = np.zeros(context.shape, np.float32)
        addend[1, 2, 3, 4] = np.nan
        return context + sibling.array(addend)

    return broken


MUTATIONS = {
    # name: (function, its broken form, case, the stage at which it must be reported)
    "scores x 1.01": ("attention_scores", lambda f, _: lambda *a: f(*a) * 1.01, "causal", "scores"),
    "scores x (1 + 1e-6)": (
        "attention_scores",
        lambda f, _: lambda *a: f(*a) * (1 + 1e-6),
        "causal",
        "scores",
    ),
    "one NaN": ("attention_context", one_nan, "full", "context"),
}


def mutate(monkeypatch, sibling, name, broken):
    """Replace a function in all modules of an implementation."""
    package = sibling.package
    function = inspect.unwrap(getattr(package, name))
    parts = ("masks", "stages", "mha", "cache", "cache_mha")
    holders = [package, package.features.rope, *(getattr(package, part) for part in parts)]
    for holder in holders:
        original = getattr(holder, name, None)
        # The package has a checked form of the function that its modules have.
        if original is not None and inspect.unwrap(original) is function:
            monkeypatch.setattr(holder, name, broken(original, sibling))


def difference_in(case, backend):
    expected = Reference(make_problem(CASES[case], "float32"))
    return first_difference(compare_trace(record(backend, expected), expected))


@sample(jax=1)
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_injected_bug_fails_at_its_stage(sibling, monkeypatch, mutation):
    """An injected bug is reported at its stage, and without it nothing is reported."""
    function, broken, case, stage = MUTATIONS[mutation]
    assert difference_in(case, sibling.name) is None
    mutate(monkeypatch, sibling, function, broken)
    difference = difference_in(case, sibling.name)
    assert difference is not None, "the harness did not see it"
    assert difference.stage == stage


def test_wrong_module_is_reported(sibling, monkeypatch):
    """A wrong module fails at module.attn_weights, although the stage functions are right."""
    call = "__call__" if sibling.name == "jax" else "forward"
    original = getattr(sibling.package.MultiHeadAttention, call)

    def attend(self, query, *inputs, **options):
        return original(self, query * 1.001, *inputs, **options)

    monkeypatch.setattr(sibling.package.MultiHeadAttention, call, attend)
    difference = difference_in("causal", sibling.name)
    assert difference is not None
    assert difference.stage == "module.attn_weights"


def test_unmasked_fused_path_is_reported(sibling, monkeypatch):
    """A fused path without the mask fails at fused.output."""
    original = sibling.package.fused.attend

    def forgetful(query, key, value, mask, *inputs, **options):
        return original(query, key, value, replace(mask, mask=None), *inputs, **options)

    if sibling.name == "jax":  # layers are cached, with the kernel at that time
        monkeypatch.setattr(sibling.backend, "_unfilled", sibling.backend._unfilled.__wrapped__)
    monkeypatch.setattr(sibling.package.fused, "attend", forgetful)
    difference = difference_in("causal", sibling.name)
    assert difference is not None
    assert difference.stage == "fused.output"


def test_missing_stage_of_trace_fails(sibling):
    """A stage that a trace lacks fails, with that reason."""
    expected = Reference(make_problem(CASES["full"], "float32"))
    trace = record(sibling.name, expected)
    del trace.accumulated["context"]
    difference = first_difference(compare_trace(trace, expected))
    assert difference is not None
    assert (difference.stage, difference.reason) == ("context", "the trace lacks this stage")


def test_later_stages_are_not_culprits(sibling, monkeypatch):
    """With k and v swapped, k is a culprit; scores fail, but are right by their own inputs."""
    mutate(monkeypatch, sibling, "project_qkv", swapped_kv)
    expected = Reference(make_problem(CASES["full"], "float32"))
    comparisons = {c.stage: c for c in compare_trace(record(sibling.name, expected), expected)}
    assert comparisons["k"].is_culprit
    assert not comparisons["scores"].passed
    assert not comparisons["scores"].is_culprit
    assert comparisons["scores"].local_ratio <= 1.0


def test_unknown_backend_raises():
    """An unknown backend raises an error with its name."""
    with rejects("backend", backend="numpy"):
        parity.measure.backends.load_backend("numpy")


# ---- Noise that is measured again ----------------------------------------------------------------


def saturated(number):
    """Return a problem in which most rows of the softmax have nearly all weight on one key."""
    case = Case(
        f"saturated-{number}",
        AttentionSpec(32, 2),
        "",
        batch=1,
        seq_len=4,
        is_causal=True,
        gain=12.0,
    )
    return make_problem(case, "float32")


def verdict_on(problem, values):
    """Return the comparison of attention weights if the other stages are the reference's."""
    expected = Reference(problem)
    local = {
        name: values_of_stage.astype(dtype_of_stage(name, "float32"))
        for name, values_of_stage in expected.expected(local=True).items()
    }
    (comparison,) = (
        comparison
        for comparison in compare_trace(Trace(problem, "torch", values, local), expected)
        if comparison.stage == "attn_weights"
    )
    return comparison


def test_small_noise_is_measured_again():
    """In 1 to 10 of 60 problems, correct weights pass only because the noise is measured again."""
    over = []
    for number in range(60):
        problem, rng = saturated(number), np.random.default_rng(number)
        values = Reference(nudged(problem, rng)).same_precision(
            local=False
        )  # right, except for rounding
        expected = Reference(problem)
        same, exact = (
            expected.same_precision(local=False)["attn_weights"],
            expected.accumulated["attn_weights"],
        )
        label = Label("", "", "float32", "attn_weights")
        if (
            parity.measure.core.compare.compare(values["attn_weights"], exact, same, label).ratio
            > 1.0
        ):
            over.append(number)
            assert verdict_on(problem, values).passed
    assert 1 <= len(over) <= 10, over


@pytest.mark.parametrize("times", [10.0, 30.0])
def test_remeasured_noise_hides_no_error(times):
    """Errors of 10 or 30 times the largest noise still fail when it is measured again."""
    for number in range(20):
        problem = saturated(number)
        expected = Reference(problem)
        exact = expected.accumulated["attn_weights"]
        noise = max(np.abs(stages["attn_weights"] - exact).max() for stages in expected.recounted())
        noise = max(
            noise, np.abs(expected.same_precision(local=False)["attn_weights"] - exact).max(), 1e-7
        )
        wrong = (
            exact + times * noise * np.sign(np.arange(exact.size) % 2 - 0.5).reshape(exact.shape)
        ).astype(np.float32)
        values = expected.same_precision(local=False) | {"attn_weights": wrong}
        assert not verdict_on(problem, values).passed

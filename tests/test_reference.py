"""The reference itself: against known numbers, finite differences and its own narrower versions."""

import numpy as np
import pytest

from parity import CASES, make_problem, reference
from parity.problem import TEXTBOOK_OUTPUT
from parity.run import Reference, run_steps

UNCACHED = [name for name, case in CASES.items() if not case.is_cached and case.trained is None]


def stages_of(name, dtype="float64", arithmetic="float64"):
    return run_steps(reference.steps(make_problem(CASES[name], dtype), arithmetic))


def test_reference_gives_the_textbook_numbers():
    output = stages_of("textbook")["output"]
    np.testing.assert_allclose(output, [TEXTBOOK_OUTPUT] * 2, atol=5e-5, rtol=0)  # printed to 4 decimals


@pytest.mark.parametrize("name", UNCACHED)
def test_attention_weights_sum_to_one_or_to_zero_where_all_is_masked(name):
    stages = stages_of(name)
    sums = stages["attn_weights"].sum(axis=-1)
    is_empty = stages["mask"].all(axis=-1)
    np.testing.assert_allclose(sums, np.where(is_empty, 0.0, 1.0), atol=1e-14, rtol=0)  # a few float64 roundings
    assert (sums[is_empty] == 0.0).all()


def test_empty_rows_are_there_to_be_tested():
    assert stages_of("causal-padding-empty")["mask"].all(axis=-1).any()
    assert stages_of("random-mask")["mask"].all(axis=-1).any()


def test_large_logits_are_beyond_float16():
    assert np.abs(stages_of("large-logits")["scores"]).max() > 65504
    assert np.abs(stages_of("trained-anarcii-cross")["scores"]).max() > 65504


@pytest.mark.parametrize("name", [name for name in UNCACHED if name != "large-logits"])  # a step function: no slope
def test_gradients_equal_finite_differences(name):
    """Central differences along a random direction, in float64."""
    problem = make_problem(CASES[name], "float64")
    gradients = reference.gradients(problem, "float64")
    rng = np.random.default_rng(7)
    step = 1e-5

    def loss():
        terms = run_steps(reference.steps(problem, "float64"))["output"] * problem.inputs["cotangent"]
        return terms.sum(), np.abs(terms).sum()

    for stage, gradient in gradients.items():
        key = stage.removeprefix("grad.")
        arrays = problem.inputs if key in problem.inputs else problem.weights
        direction, here = rng.standard_normal(gradient.shape), arrays[key]
        arrays[key] = here + step * direction
        above, magnitude = loss()
        arrays[key] = here - step * direction
        below, _ = loss()
        arrays[key] = here
        rounding = 4 * np.finfo(np.float64).eps * magnitude / step  # of the two sums, divided by the step
        curvature = 1e-6 * np.abs(gradient * direction).sum()  # the third derivative, times step squared
        assert abs((above - below) / (2 * step) - (gradient * direction).sum()) <= rounding + curvature, stage


def test_gradients_of_every_weight_and_input_are_given():
    problem = make_problem(CASES["bias-causal"], "float64")
    expected = {f"grad.{name}" for name in [*problem.weights, "query", "bias"]}
    assert reference.gradients(problem, "float64").keys() == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_narrower_references_err_by_their_rounding(dtype):
    """The relative error of the output is about one unit of rounding: not 0, for it is narrower, and not more."""
    unit = {"float32": 2**-24, "bfloat16": 2**-9, "float16": 2**-12}[dtype]
    problem = make_problem(CASES["full"], dtype)
    exact = run_steps(reference.steps(problem, "float64"))["output"]
    narrow = run_steps(reference.steps(problem, dtype))["output"]
    assert narrow.dtype == problem.inputs["query"].dtype
    error = np.linalg.norm(narrow.astype(np.float64) - exact) / np.linalg.norm(exact)
    assert 0.1 * unit < error < 10 * unit


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_scores_stay_in_float32(dtype):
    stages = stages_of("large-logits", dtype, dtype)
    assert stages["scores"].dtype == np.float32
    assert np.isfinite(stages["scores"]).all()


def test_decoding_token_by_token_equals_one_pass():
    """The cached reference, all steps, against the uncached one on the same layer and tokens."""
    cached = make_problem(CASES["trained-smollm2-decode"], "float64")
    steps = run_steps(reference.steps(cached, "float64"))
    outputs = [steps[f"step{index}.module.output"] for index in range(len(cached.case.chunks))]
    whole = stages_of("trained-smollm2-causal")["output"]
    np.testing.assert_allclose(np.concatenate(outputs, axis=1), whole, rtol=0, atol=1e-13 * np.abs(whole).max())


def test_local_stages_start_from_the_given_ones():
    expected = Reference(make_problem(CASES["causal"], "bfloat16"))
    local = expected.expected(local=True)["scores"]
    assert not np.array_equal(local, expected.expected(local=False)["scores"])
    q, k = (expected.given[name].astype(np.float64) for name in "qk")
    np.testing.assert_allclose(local, q @ k.swapaxes(2, 3) / np.sqrt(8), rtol=1e-12)


def test_problems_are_the_same_every_time():
    assert make_problem(CASES["cross"], "float32").digest == make_problem(CASES["cross"], "float32").digest
    assert make_problem(CASES["cross"], "float32").digest != make_problem(CASES["cross"], "float16").digest


def test_strided_inputs_are_strided():
    assert not make_problem(CASES["strided"], "float32").inputs["query"].flags.c_contiguous

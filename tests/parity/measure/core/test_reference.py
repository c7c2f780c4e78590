"""The reference itself, compared with known values, finite differences and its own narrower
versions.
"""

from dataclasses import replace

import numpy as np
import pytest
from helpers.input_errors import rejects, rejects_type
from helpers.samples import sample
from helpers.textbook import TEXTBOOK_OUTPUT

import parity
from parity import CASES, make_problem
from parity.measure.core import reference
from parity.measure.core.stages import run_steps
from parity.measure.core.trace import Reference

UNCACHED = [name for name, case in CASES.items() if not case.is_cached and case.trained is None]
NAN_QUERIES = ("nan-visible-causal", "nan-hidden-padding")  # their own rows are NaN


def stages_of(name, dtype="float64", arithmetic="float64"):
    return run_steps(reference.steps(make_problem(CASES[name], dtype), arithmetic))


def test_reference_matches_textbook():
    """The output of the textbook's example matches its values to 4 decimals."""
    output = stages_of("textbook")["output"]
    np.testing.assert_allclose(
        output, [TEXTBOOK_OUTPUT] * 2, atol=5e-5, rtol=0
    )  # printed to 4 decimals


@sample(24)
@pytest.mark.parametrize("name", [name for name in UNCACHED if name not in NAN_QUERIES])
def test_attention_weights_sum_to_one(name):
    """Attention weights sum to 1, to less with sinks, and to 0 in rows without a key."""
    stages = stages_of(name)
    sums = stages["attn_weights"].sum(axis=-1)
    is_empty = stages["mask"].all(axis=-1)
    assert (sums[is_empty] == 0.0).all()
    if CASES[name].spec.sinks:  # the sinks have the rest
        assert ((sums > 0.0) & (sums < 1.0))[~is_empty].all()
    else:
        np.testing.assert_allclose(
            sums[~is_empty], 1.0, atol=1e-14, rtol=0
        )  # a few float64 roundings


def test_two_cases_have_empty_rows():
    """The cases `causal-padding-empty` and `random-mask` have rows without a key."""
    assert stages_of("causal-padding-empty")["mask"].all(axis=-1).any()
    assert stages_of("random-mask")["mask"].all(axis=-1).any()


def test_large_logits_exceed_float16():
    """The scores of two cases exceed 65504, the largest number of float16."""
    assert np.abs(stages_of("large-logits")["scores"]).max() > 65504
    assert np.abs(stages_of("trained-anarcii-cross")["scores"]).max() > 65504


@sample(12)
@pytest.mark.parametrize(
    "name",
    # without a slope: a step function, and queries that are NaN
    [name for name in UNCACHED if name not in ("large-logits", *NAN_QUERIES)],
)
def test_gradients_equal_finite_differences(name):
    """Gradients equal central differences along a random direction, in float64."""
    problem = make_problem(CASES[name], "float64")
    gradients = reference.gradients(problem, "float64")
    assert gradients
    rng = np.random.default_rng(7)
    step = 1e-5

    def loss():
        terms = (
            run_steps(reference.steps(problem, "float64"))["output"] * problem.inputs["cotangent"]
        )
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
        rounding = (
            4 * np.finfo(np.float64).eps * magnitude / step
        )  # of the two sums, divided by the step
        curvature = (
            1e-6 * np.abs(gradient * direction).sum()
        )  # the third derivative, times step squared
        assert (
            abs((above - below) / (2 * step) - (gradient * direction).sum()) <= rounding + curvature
        ), stage


def test_gradients_cover_weights_and_inputs():
    """The gradients cover all weights, of the query and of the bias."""
    problem = make_problem(CASES["bias-causal"], "float64")
    expected = {f"grad.{name}" for name in [*problem.weights, "query", "bias"]}
    assert reference.gradients(problem, "float64").keys() == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_narrow_reference_errs_by_rounding(dtype):
    """The relative error of a narrow reference is between 0.1 and 10 units of rounding."""
    unit = {"float32": 2**-24, "bfloat16": 2**-9, "float16": 2**-12}[dtype]
    problem = make_problem(CASES["full"], dtype)
    exact = run_steps(reference.steps(problem, "float64"))["output"]
    narrow = run_steps(reference.steps(problem, dtype))["output"]
    assert narrow.dtype == problem.inputs["query"].dtype
    error = np.linalg.norm(narrow.astype(np.float64) - exact) / np.linalg.norm(exact)
    assert 0.1 * unit < error < 10 * unit


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_scores_stay_in_float32(dtype):
    """In 16-bit references, scores are float32 and finite even if the logits are large."""
    stages = stages_of("large-logits", dtype, dtype)
    assert stages["scores"].dtype == np.float32
    assert np.isfinite(stages["scores"]).all()


def test_decoding_equals_one_pass():
    """The outputs of all cached steps equal the uncached output for the same tokens."""
    cached = make_problem(CASES["trained-smollm2-decode"], "float64")
    steps = run_steps(reference.steps(cached, "float64"))
    outputs = [steps[f"step{index}.module.output"] for index in range(len(cached.case.chunks))]
    whole = stages_of("trained-smollm2-causal")["output"]
    np.testing.assert_allclose(
        np.concatenate(outputs, axis=1), whole, rtol=0, atol=1e-13 * np.abs(whole).max()
    )


def test_local_stages_use_given_inputs():
    """Local scores are computed from the given q and k, not from accumulated ones."""
    expected = Reference(make_problem(CASES["causal"], "bfloat16"))
    local = expected.expected(local=True)["scores"]
    assert not np.array_equal(local, expected.expected(local=False)["scores"])
    q, k = (expected.rounded[name].astype(np.float64) for name in "qk")
    np.testing.assert_allclose(local, q @ k.swapaxes(2, 3) / np.sqrt(8), rtol=1e-12)


def test_problems_are_deterministic():
    """A problem has the same digest each time, and a different one in each dtype."""
    assert (
        make_problem(CASES["cross"], "float32").digest
        == make_problem(CASES["cross"], "float32").digest
    )
    assert (
        make_problem(CASES["cross"], "float32").digest
        != make_problem(CASES["cross"], "float16").digest
    )


# ---- NaN -----------------------------------------------------------------------------------------

SMALL = parity.AttentionSpec(16, 4, num_kv_heads=2)


def whole(problem, dtype="float64"):
    with np.errstate(invalid="ignore"):
        return run_steps(reference.steps(problem, dtype))


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_visible_nan_reaches_its_rows_only(dtype):
    """A NaN token makes all rows NaN that attend to it, and changes no earlier row."""
    case = parity.Case("nan", SMALL, "", seq_len=6, is_causal=True, not_finite="visible")
    problem = make_problem(case, "float32")
    stages = whole(problem, dtype)
    for name in ("module.output", "fused.output"):
        is_nan = np.isnan(stages[name].astype(np.float64))
        assert not is_nan[0].any()
        assert not is_nan[1, :3].any()
        assert is_nan[1, 3:].all()
    # As if the tokens after them did not exist:
    short = replace(
        problem, inputs={**problem.inputs, "query": np.nan_to_num(problem.inputs["query"])}
    )
    np.testing.assert_array_equal(
        whole(short, dtype)["module.output"][1, :3], stages["module.output"][1, :3]
    )


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("seq_len_k", [None, 7])
def test_hidden_nan_changes_no_output(dtype, seq_len_k):
    """A hidden NaN token changes no output of a real token, and its own output is finite."""
    about = {"seq_len": 5, "seq_len_k": seq_len_k, "key_padding_lengths": (2, 5)}
    problem = make_problem(parity.Case("nan", SMALL, "", not_finite="hidden", **about), "float32")
    finite = replace(
        problem, inputs={name: np.nan_to_num(x, nan=7.0) for name, x in problem.inputs.items()}
    )
    stages, expected = whole(problem, dtype)["module.output"], whole(finite, dtype)["module.output"]
    is_query = np.isnan(problem.inputs["query"]).any(axis=-1)
    assert is_query.any() == (seq_len_k is None)
    np.testing.assert_array_equal(stages[~is_query], expected[~is_query])
    assert np.isfinite(stages.astype(np.float64)).all()


def test_hidden_nan_changes_no_gradient():
    """Hidden NaN keys change no gradient, and have a gradient of 0."""
    about = {"seq_len": 5, "seq_len_k": 7, "key_padding_lengths": (2, 6)}
    problem = make_problem(parity.Case("nan", SMALL, "", not_finite="hidden", **about), "float64")
    finite = replace(
        problem, inputs={name: np.nan_to_num(x, nan=7.0) for name, x in problem.inputs.items()}
    )
    assert problem.case.has_gradients
    for fused in (False, True):
        with np.errstate(invalid="ignore"):
            actual = reference.gradients(problem, "float64", fused=fused)
        expected = reference.gradients(finite, "float64", fused=fused)
        for name, gradient in actual.items():
            np.testing.assert_allclose(gradient, expected[name], rtol=0, atol=1e-13, err_msg=name)
        assert (actual["grad.key"][0, 2:] == 0.0).all()


def test_nan_padding_has_no_gradient():
    """NaN padding of self-attention has a gradient of 0, and weights have the gradients of zero
    padding.
    """
    case = parity.Case("nan", SMALL, "", seq_len=5, key_padding_lengths=(2, 5), not_finite="hidden")
    problem = make_problem(case, "float64")
    zeros = replace(
        problem, inputs={name: np.nan_to_num(x, nan=0.0) for name, x in problem.inputs.items()}
    )
    gradients = reference.gradients(problem, "float64")
    expected = reference.gradients(zeros, "float64")
    assert (gradients["grad.query"][0, 2:] == 0.0).all()
    assert (expected["grad.query"][0, 2:] != 0.0).any()
    for name in gradients.keys() - {"grad.query"}:
        np.testing.assert_array_equal(gradients[name], expected[name], err_msg=name)
    np.testing.assert_array_equal(gradients["grad.query"][1], expected["grad.query"][1])


@pytest.mark.parametrize(("not_finite", "cached"), [("visible", False), ("hidden", True)])
def test_no_gradients_with_nan_or_cache(not_finite, cached):
    """A case with a visible NaN or a cache has no gradients."""
    chunks = (
        {"chunks": (5,), "new_lengths": ((2, 5),), "capacity": 5}
        if cached
        else {"key_padding_lengths": (2, 5)}
    )
    assert not parity.Case("nan", SMALL, "", not_finite=not_finite, **chunks).has_gradients


def test_nan_padding_is_not_cached():
    """NaN in right padding does not enter the cache or the outputs of the steps."""
    case = parity.Case(
        "nan",
        SMALL,
        "",
        seq_len=4,
        chunks=(3, 1),
        new_lengths=((2, 3), (1, 1)),
        capacity=4,
        not_finite="hidden",
    )
    problem = make_problem(case, "float32")
    assert np.isnan(problem.inputs["query"][0, 2]).all()
    assert np.isnan(problem.inputs["query"]).sum() == 16
    stages = whole(problem)
    for name in ("module.output", "module.cache.keys", "module.cache.values", "cache.keys"):
        assert np.isfinite(stages[f"step0.{name}"]).all()
        assert np.isfinite(stages[f"step1.{name}"]).all()


def test_only_hidden_keys_empty_a_row():
    """A row is 0 only if all its keys are hidden; a row of scores that are -inf is NaN."""
    problem = make_problem("bias", "float64")
    layer = reference.Layer(problem, reference.Arithmetic(np.dtype("float64")))
    shape = (2, 4, 5, 5)
    mask = np.zeros(shape, bool)
    mask[..., 0, :] = True
    scores = np.zeros(shape)
    scores[..., 1, :] = -np.inf
    scores[..., 2, 1] = -np.inf
    scores[..., 3, 1] = np.inf
    problem.inputs["bias"][...] = 0.0
    problem.inputs["bias"][..., 4, :] = -np.inf  # it hides the keys
    scores[..., 4, :] = -np.inf
    with np.errstate(invalid="ignore"):
        weights = layer.attn_weights({"scores": scores, "mask": mask})["attn_weights"]
    assert (weights[..., 0, :] == 0.0).all()
    assert np.isnan(weights[..., 1, :]).all()
    np.testing.assert_array_equal(
        weights[..., 2, :], np.broadcast_to([0.25, 0.0, 0.25, 0.25, 0.25], (2, 4, 5))
    )
    assert np.isnan(weights[..., 3, 1]).all()
    assert (weights[..., 4, :] == 0.0).all()


def test_problem_is_made_from_case_name():
    """The name of a case makes the same problem as the case."""
    assert (
        make_problem("rope-gqa", "float32").digest
        == make_problem(CASES["rope-gqa"], "float32").digest
    )


@pytest.mark.parametrize(
    ("case", "dtype", "input_error"),
    [
        ("ropegqa", "float32", rejects("case", case="ropegqa")),
        (7, "float32", rejects_type("case", "int")),
        ("full", "float8", rejects("dtype", dtype="float8")),
    ],
)
def test_unknown_case_or_dtype_raises(case, dtype, input_error):
    """An unknown case or dtype, or a case of a wrong type, raises an error."""
    with input_error:
        make_problem(case, dtype)


def test_strided_inputs_are_strided():
    """The query of the case `strided` is not contiguous."""
    assert not make_problem(CASES["strided"], "float32").inputs["query"].flags.c_contiguous

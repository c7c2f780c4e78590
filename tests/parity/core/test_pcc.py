"""`assert_with_pcc`, and Tenstorrent's arithmetic in `assert_parity`.

`tests/siblings/mha_tt/test_bring_up.py` has tensors of TTNN.
"""

import ml_dtypes
import numpy as np
import pytest
from helpers.refusals import refuses

import parity
from parity.core.trace import Reference

EXPECTED = np.random.default_rng(0).standard_normal((2, 3, 8, 16)).astype(np.float32)
PROBLEM = parity.make_problem(parity.CASES["causal"], "float32")


def stages_of(*names):
    """The reference's own stages in float32, which rounding alone makes differ."""
    stages = Reference(PROBLEM).same_precision(local=False)
    return {name: stages[name] for name in names}


def right():
    return stages_of("output")["output"]


def cut_to_tf32(x):
    return (x.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


# ---- PCC and budget --------------------------------------------------------------------------------------------------


def test_what_agrees_is_printed_and_returned(capsys):
    narrow = EXPECTED.astype(ml_dtypes.bfloat16)
    passed, told = parity.assert_with_pcc(EXPECTED, narrow)
    assert passed
    assert told == capsys.readouterr().out.strip()
    assert told.startswith("output: PCC 0.99999")
    assert told.endswith("of its budget")


@pytest.mark.parametrize("factor", [1.05, 0.98])
def test_a_wrong_scale_correlates_and_is_wrong(factor):
    wrong = EXPECTED * np.float32(factor)
    with pytest.raises(AssertionError, match=r"^PCC (0\.999999|1\.000000) and wrong: output: PCC .* of its budget\n"):
        parity.assert_with_pcc(EXPECTED, wrong)


def test_one_wrong_element_correlates_and_is_wrong():
    wrong = np.array(EXPECTED)
    wrong[0, 0, 0, 0] += 0.05
    with pytest.raises(AssertionError, match=r"^PCC 0\.99999\d and wrong: "):
        parity.assert_with_pcc(EXPECTED, wrong)


def test_less_correlation_than_is_asked_for_fails_within_the_budget_too():
    narrow = EXPECTED.astype(ml_dtypes.bfloat16)
    with pytest.raises(AssertionError, match=r"^PCC 0\.99999\d is less than 1\.0: .*\nthe error is within its budget$"):
        parity.assert_with_pcc(EXPECTED, narrow, 1.0)


def test_noise_correlates_less():
    noisy = EXPECTED + 0.1 * np.random.default_rng(1).standard_normal(EXPECTED.shape).astype(np.float32)
    with pytest.raises(AssertionError, match=r"^PCC 0\.99\d+ is less than 0\.9999: "):
        parity.assert_with_pcc(EXPECTED, noisy)


def test_constants_have_no_correlation_and_a_budget():
    ones = np.ones((2, 3), np.float32)
    assert parity.assert_with_pcc(ones, ones)[1] == "output: PCC none, 0 of its budget"
    with pytest.raises(AssertionError, match=r"^PCC none and wrong: "):
        parity.assert_with_pcc(ones, 2.0 * ones)


def test_another_shape_is_no_agreement():
    with pytest.raises(AssertionError, match=r"^PCC none and wrong: [^\n]*\n[^\n]*\n.*shape"):
        parity.assert_with_pcc(EXPECTED, EXPECTED[:1])


def test_a_problem_gives_what_is_expected():
    output = right()
    assert "output: PCC 0.999999" in parity.assert_with_pcc(None, output, problem=PROBLEM)[1]
    with pytest.raises(AssertionError, match=r"^PCC \S+ and wrong: "):
        parity.assert_with_pcc(None, 1.01 * output, problem=PROBLEM)


# ---- The arithmetic --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [{"problem": PROBLEM}, {"expected": right()}])
def test_tf32_is_within_the_budget_of_its_own_arithmetic_only(given):
    output = cut_to_tf32(right())
    parity.assert_parity(output, **given, arithmetic="tensix")
    with pytest.raises(AssertionError, match="actual differs from"):
        parity.assert_parity(output, **given, diagnose=False)


def test_the_fixture_takes_the_arithmetic(assert_parity):
    assert_parity(cut_to_tf32(right()), problem=PROBLEM, arithmetic="tensix")


def test_the_same_precision_takes_the_arithmetic():
    output, expected = right(), right().astype(np.float64)
    with pytest.raises(AssertionError, match="beyond"):
        parity.assert_parity(cut_to_tf32(output), expected, same_precision=np.array(output))
    parity.assert_parity(cut_to_tf32(output), expected, same_precision=np.array(output), arithmetic="tensix")


def test_a_bug_is_named_in_the_arithmetic():
    """What TF32 loses is no bug beside it."""
    stages = {name: cut_to_tf32(stage) for name, stage in stages_of("q", "k", "scores").items()}
    stages["scores"] *= np.float32(PROBLEM.spec.head_dim**0.5)
    found = parity.diagnose(stages, PROBLEM, arithmetic="tensix")
    assert [name for explanation in found.explanations for name in explanation.bugs] == ["scale-missing"]
    assert not found.unknowns


@pytest.mark.parametrize("arithmetic", ["TENSIX", "tf32"])
def test_another_arithmetic_is_refused(arithmetic):
    with refuses("arithmetic", arithmetic=arithmetic):
        parity.assert_parity(EXPECTED, EXPECTED.copy(), arithmetic=arithmetic)
    with refuses("arithmetic", arithmetic=arithmetic):
        parity.diagnose({"output": right()}, PROBLEM, arithmetic=arithmetic)


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_a_dtype_that_the_hardware_has_not_is_refused(dtype):
    x = EXPECTED.astype(dtype)
    with refuses("dtype", dtype=dtype):
        parity.assert_parity(x, x.copy(), arithmetic="tensix")

"""`assert_with_pcc`, and Tenstorrent's arithmetic in `assert_parity`.

`tests/siblings/mha_tt/test_bring_up.py` tests both with TTNN tensors.
"""

import ml_dtypes
import numpy as np
import pytest
from helpers.input_errors import rejects

import parity
from parity.measure.core.trace import Reference

EXPECTED = np.random.default_rng(0).standard_normal((2, 3, 8, 16)).astype(np.float32)
PROBLEM = parity.make_problem(parity.CASES["causal"], "float32")


def stages_of(*names):
    """Return the reference's own float32 stages, which differ only by rounding."""
    stages = Reference(PROBLEM).same_precision(local=False)
    return {name: stages[name] for name in names}


def right():
    return stages_of("output")["output"]


def cut_to_tf32(x):
    return (x.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


# ---- PCC and budget ------------------------------------------------------------------------------


def test_agreement_is_printed(capsys):
    """For arrays that agree, the PCC and the part of the budget are printed and returned."""
    narrow = EXPECTED.astype(ml_dtypes.bfloat16)
    passed, message = parity.assert_with_pcc(EXPECTED, narrow)
    assert passed
    assert message == capsys.readouterr().out.strip()
    assert message.startswith("output: PCC 0.99999")
    assert message.endswith("of its budget")


@pytest.mark.parametrize("factor", [1.05, 0.98])
def test_wrong_scale_fails_despite_pcc(factor):
    """Values times 1.05 or 0.98 fail, although their PCC is at least 0.999999."""
    wrong = EXPECTED * np.float32(factor)
    with pytest.raises(
        AssertionError,
        match=r"^PCC (0\.999999|1\.000000) and wrong: output: PCC .* of its budget\n",
    ):
        parity.assert_with_pcc(EXPECTED, wrong)


def test_wrong_element_fails_despite_pcc():
    """One wrong element fails, although the PCC is at least 0.99999."""
    wrong = np.array(EXPECTED)
    wrong[0, 0, 0, 0] += 0.05
    with pytest.raises(AssertionError, match=r"^PCC 0\.99999\d and wrong: "):
        parity.assert_with_pcc(EXPECTED, wrong)


def test_low_pcc_fails_within_budget():
    """A PCC below the required one fails, although the error is within its budget."""
    narrow = EXPECTED.astype(ml_dtypes.bfloat16)
    with pytest.raises(
        AssertionError,
        match=r"^PCC 0\.99999\d is less than 1\.0: .*\nthe error is within its budget$",
    ):
        parity.assert_with_pcc(EXPECTED, narrow, 1.0)


def test_noise_fails_by_its_pcc():
    """Noise of 0.1 fails, with a PCC below the default of 0.9999."""
    noisy = EXPECTED + 0.1 * np.random.default_rng(1).standard_normal(EXPECTED.shape).astype(
        np.float32
    )
    with pytest.raises(AssertionError, match=r"^PCC 0\.99\d+ is less than 0\.9999: "):
        parity.assert_with_pcc(EXPECTED, noisy)


def test_constants_have_only_a_budget():
    """Constants have no PCC, and pass or fail by their budget."""
    ones = np.ones((2, 3), np.float32)
    assert parity.assert_with_pcc(ones, ones)[1] == "output: PCC none, 0 of its budget"
    with pytest.raises(AssertionError, match=r"^PCC none and wrong: "):
        parity.assert_with_pcc(ones, 2.0 * ones)


def test_unequal_shapes_fail():
    """Arrays of different shapes fail, with the shape in the message."""
    with pytest.raises(AssertionError, match=r"^PCC none and wrong: [^\n]*\n[^\n]*\n.*shape"):
        parity.assert_with_pcc(EXPECTED, EXPECTED[:1])


def test_problem_has_the_expected_output():
    """With a problem, its reference is the expected output: a gain of 1% fails."""
    output = right()
    assert "output: PCC 0.999999" in parity.assert_with_pcc(None, output, problem=PROBLEM)[1]
    with pytest.raises(AssertionError, match=r"^PCC \S+ and wrong: "):
        parity.assert_with_pcc(None, 1.01 * output, problem=PROBLEM)


# ---- The arithmetic ------------------------------------------------------------------------------


@pytest.mark.parametrize("expectation", [{"problem": PROBLEM}, {"expected": right()}])
def test_tf32_output_passes_as_tensix_only(expectation):
    """An output cut off to TF32 passes with the arithmetic `tensix`, and fails without."""
    output = cut_to_tf32(right())
    parity.assert_parity(output, **expectation, arithmetic="tensix")
    with pytest.raises(AssertionError, match="actual differs from"):
        parity.assert_parity(output, **expectation, diagnose=False)


def test_fixture_accepts_arithmetic(assert_parity):
    """The fixture `assert_parity` passes TF32 with the arithmetic `tensix`."""
    assert_parity(cut_to_tf32(right()), problem=PROBLEM, arithmetic="tensix")


def test_same_precision_with_arithmetic():
    """With `same_precision`, TF32 passes with the arithmetic `tensix`, and fails without."""
    output, expected = right(), right().astype(np.float64)
    with pytest.raises(AssertionError, match="beyond"):
        parity.assert_parity(cut_to_tf32(output), expected, same_precision=np.array(output))
    parity.assert_parity(
        cut_to_tf32(output), expected, same_precision=np.array(output), arithmetic="tensix"
    )


def test_bug_is_named_in_tf32_stages():
    """A missing scale is named in stages cut off to TF32, which themselves are not a bug."""
    stages = {name: cut_to_tf32(stage) for name, stage in stages_of("q", "k", "scores").items()}
    stages["scores"] *= np.float32(PROBLEM.spec.head_dim**0.5)
    diagnosis = parity.diagnose(stages, PROBLEM, arithmetic="tensix")
    assert [name for finding in diagnosis.named for name in finding.bugs] == ["scale-missing"]
    assert not diagnosis.unnamed


@pytest.mark.parametrize("arithmetic", ["TENSIX", "tf32"])
def test_unknown_arithmetic_raises(arithmetic):
    """An unknown arithmetic raises an error in `assert_parity` and `diagnose`."""
    with rejects("arithmetic", arithmetic=arithmetic):
        parity.assert_parity(EXPECTED, EXPECTED.copy(), arithmetic=arithmetic)
    with rejects("arithmetic", arithmetic=arithmetic):
        parity.diagnose({"output": right()}, PROBLEM, arithmetic=arithmetic)


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_dtype_without_hardware_raises(dtype):
    """float16 and float64, which the hardware lacks, raise an error with `tensix`."""
    x = EXPECTED.astype(dtype)
    with rejects("dtype", dtype=dtype):
        parity.assert_parity(x, x.copy(), arithmetic="tensix")

"""Users' own TTNN code: its tensors are compared and diagnosed directly, with the arithmetic of
their device.
"""

import numpy as np
import pytest
import torch
import ttnn
from helpers.tt.formulas import IS_MOCK

import mha_tt
import parity
from parity.measure.core.arrays import arithmetic_of

PROBLEM = parity.make_problem(parity.CASES["causal"], "bfloat16")


def tensor(x, device=None, dtype=ttnn.bfloat16, layout=ttnn.TILE_LAYOUT):
    return ttnn.from_torch(torch.as_tensor(x), dtype=dtype, layout=layout, device=device)


@pytest.fixture
def x(rng):
    return rng.standard_normal((2, 3, 40, 64)).astype(np.float32)


FORMS = {
    "on the device": lambda x, device: tensor(x, device),
    "on the host": lambda x, device: tensor(x),
    "in rows": lambda x, device: tensor(x, layout=ttnn.ROW_MAJOR_LAYOUT),
    "downloaded": lambda x, device: ttnn.from_device(tensor(x, device)),
    "in blocks": lambda x, device: tensor(x, device, ttnn.bfloat8_b),
    "of NumPy, without a shadow": lambda x, device: ttnn.Tensor(
        x, ttnn.bfloat16, None, ttnn.ROW_MAJOR_LAYOUT
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_tensors_are_compared_anywhere(device, x, form):
    """Tensors in any memory, layout or block format are compared; an error of 10% fails even though
    the PCC is 0.999.
    """
    tensor_of_form = FORMS[form](x, device)
    assert parity.to_numpy(tensor_of_form).dtype.name == "bfloat16"
    parity.assert_parity(tensor_of_form, x)
    parity.assert_with_pcc(torch.from_numpy(x), tensor_of_form, 0.999)
    wrong = FORMS[form](1.1 * x, device)
    with pytest.raises(AssertionError, match="actual differs from expected"):
        parity.assert_parity(wrong, x)
    with pytest.raises(AssertionError, match=r"^PCC 0\.999\d+ and wrong: output: PCC"):
        parity.assert_with_pcc(torch.from_numpy(x), wrong, 0.999)


@pytest.mark.parametrize("dtype", [ttnn.int32, ttnn.uint32], ids=["int32", "uint32"])
def test_integers_stay_integers(device, dtype):
    """int32 and uint32 tensors are read with their dtype and values."""
    integers = parity.to_numpy(
        tensor(np.arange(6, dtype=np.int32), device, dtype, ttnn.ROW_MAJOR_LAYOUT)
    )
    assert integers.dtype.name == str(dtype).rpartition(".")[2].lower()
    assert integers.tolist() == [0, 1, 2, 3, 4, 5]


def test_float32_tensors_are_read_exactly(device, x):
    """A float32 tensor is read bit for bit."""
    assert np.array_equal(parity.to_numpy(tensor(x, device, ttnn.float32)), x)


def test_arithmetic_follows_target_of_tensor(device, x, monkeypatch):
    """ttnn tensors have the arithmetic "tensix" on a simulator or card and "ieee" elsewhere; arrays
    have "ieee".
    """
    on_device = tensor(x, device)
    assert (
        arithmetic_of(on_device)
        == arithmetic_of({"q": x, "output": on_device})
        == ("ieee" if IS_MOCK else "tensix")
    )
    for target, arithmetic in (
        (None, "ieee"),
        ("mock", "ieee"),
        ("simulator", "tensix"),
        ("silicon", "tensix"),
    ):
        monkeypatch.setattr(mha_tt, "target", lambda target=target: target)
        assert arithmetic_of(on_device) == arithmetic
        assert arithmetic_of(x) == "ieee"


def test_tf32_error_passes_only_on_cards(device, monkeypatch):
    """Float32 values cut to TF32 are within the budget of a card, and outside the budget of a mock
    board.
    """
    from parity.measure.core.trace import Reference

    problem = parity.make_problem(parity.CASES["causal"], "float32")
    output = Reference(problem).same_precision(local=False)["output"]
    cut = tensor(
        (output.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32), device, ttnn.float32
    )
    monkeypatch.setattr(mha_tt, "target", lambda: "mock")
    with pytest.raises(AssertionError, match="actual differs from the reference"):
        parity.assert_parity(cut, problem=problem, diagnose=False)
    assert parity.diagnose({"output": cut}, problem).is_wrong
    monkeypatch.setattr(mha_tt, "target", lambda: "silicon")
    parity.assert_parity(cut, problem=problem)
    assert not parity.diagnose({"output": cut}, problem).is_wrong


def test_bug_in_tensors_fails_at_its_stage(device):
    """Rolled key heads in ttnn tensors fail at stage k and are diagnosed as wrong."""
    stages = {
        name: tensor(np.asarray(x, np.float32), device)
        for name, x in reference_stages("q", "k").items()
    }
    assert not parity.diagnose(stages, PROBLEM).is_wrong
    stages["k"] = ttnn.concat([stages["k"][:, 1:], stages["k"][:, :1]], dim=1)
    assert parity.diagnose(stages, PROBLEM).is_wrong
    with pytest.raises(AssertionError, match="/k: actual differs from the reference"):
        parity.assert_parity(stages, problem=PROBLEM)


def reference_stages(*names):
    from parity.measure.core.trace import Reference

    stages = Reference(PROBLEM).same_precision(local=False)
    return {name: stages[name] for name in names}


def test_mock_values_without_shadow_raise(opened_device, only_mock):
    """Comparing a tensor of a mock board without a shadow raises an error."""
    zeros = ttnn.zeros((1, 32), dtype=ttnn.bfloat16, layout=ttnn.TILE_LAYOUT, device=opened_device)
    with pytest.raises(RuntimeError, match="a mock one"):
        parity.assert_parity(zeros, np.zeros((1, 32)))

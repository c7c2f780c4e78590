"""Other people's TTNN code: its tensors judged and diagnosed as they are, by the arithmetic of what they lie on."""

import numpy as np
import pytest
import torch
import ttnn
from helpers.tt.formulas import IS_MOCK

import mha_tt
import parity
from parity.core.arrays import arithmetic_of

PROBLEM = parity.make_problem(parity.CASES["causal"], "bfloat16")


def tensor(x, device=None, dtype=ttnn.bfloat16, layout=ttnn.TILE_LAYOUT):
    return ttnn.from_torch(torch.as_tensor(x), dtype=dtype, layout=layout, device=device)


@pytest.fixture
def x(rng):
    return rng.standard_normal((2, 3, 40, 64)).astype(np.float32)


PLACES = {
    "on the device": lambda x, device: tensor(x, device),
    "on the host": lambda x, device: tensor(x),
    "in rows": lambda x, device: tensor(x, layout=ttnn.ROW_MAJOR_LAYOUT),
    "downloaded": lambda x, device: ttnn.from_device(tensor(x, device)),
    "in blocks": lambda x, device: tensor(x, device, ttnn.bfloat8_b),
    "of NumPy, without a shadow": lambda x, device: ttnn.Tensor(x, ttnn.bfloat16, None, ttnn.ROW_MAJOR_LAYOUT),
}


@pytest.mark.parametrize("place", PLACES)
def test_tensors_are_judged_wherever_they_lie(device, x, place):
    found = PLACES[place](x, device)
    assert parity.to_numpy(found).dtype.name == "bfloat16"
    parity.assert_parity(found, x)
    parity.assert_with_pcc(torch.from_numpy(x), found, 0.999)
    wrong = PLACES[place](1.1 * x, device)
    with pytest.raises(AssertionError, match="actual differs from expected"):
        parity.assert_parity(wrong, x)
    with pytest.raises(AssertionError, match=r"^PCC 0\.999\d+ and wrong: output: PCC"):
        parity.assert_with_pcc(torch.from_numpy(x), wrong, 0.999)


@pytest.mark.parametrize("dtype", [ttnn.int32, ttnn.uint32], ids=["int32", "uint32"])
def test_integers_stay_integers(device, dtype):
    found = parity.to_numpy(tensor(np.arange(6, dtype=np.int32), device, dtype, ttnn.ROW_MAJOR_LAYOUT))
    assert found.dtype.name == str(dtype).rpartition(".")[2].lower()
    assert found.tolist() == [0, 1, 2, 3, 4, 5]


def test_float32_stays_float32(device, x):
    assert np.array_equal(parity.to_numpy(tensor(x, device, ttnn.float32)), x)


def test_the_arithmetic_is_that_of_the_device(device, x, monkeypatch):
    found = tensor(x, device)
    assert arithmetic_of(found) == arithmetic_of({"q": x, "output": found}) == ("ieee" if IS_MOCK else "tensix")
    for target, arithmetic in ((None, "ieee"), ("mock", "ieee"), ("simulator", "tensix"), ("silicon", "tensix")):
        monkeypatch.setattr(mha_tt, "target", lambda target=target: target)
        assert arithmetic_of(found) == arithmetic
        assert arithmetic_of(x) == "ieee"


def test_what_a_card_gives_is_judged_by_its_arithmetic(device, monkeypatch):
    """TF32 is within the budget of a card's float32, and of no mock board's."""
    from parity.core.trace import Reference

    problem = parity.make_problem(parity.CASES["causal"], "float32")
    output = Reference(problem).same_precision(local=False)["output"]
    cut = tensor((output.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32), device, ttnn.float32)
    monkeypatch.setattr(mha_tt, "target", lambda: "mock")
    with pytest.raises(AssertionError, match="actual differs from the reference"):
        parity.assert_parity(cut, problem=problem, diagnose=False)
    assert parity.diagnose({"output": cut}, problem).is_wrong
    monkeypatch.setattr(mha_tt, "target", lambda: "silicon")
    parity.assert_parity(cut, problem=problem)
    assert not parity.diagnose({"output": cut}, problem).is_wrong


def test_a_bug_in_tensors_is_named(device):
    stages = {name: tensor(np.asarray(x, np.float32), device) for name, x in reference_stages("q", "k").items()}
    assert not parity.diagnose(stages, PROBLEM).is_wrong
    stages["k"] = ttnn.concat([stages["k"][:, 1:], stages["k"][:, :1]], dim=1)
    assert parity.diagnose(stages, PROBLEM).is_wrong
    with pytest.raises(AssertionError, match="/k: actual differs from the reference"):
        parity.assert_parity(stages, problem=PROBLEM)


def reference_stages(*names):
    from parity.core.trace import Reference

    stages = Reference(PROBLEM).same_precision(local=False)
    return {name: stages[name] for name in names}


def test_values_of_a_mock_board_without_a_shadow_are_refused(opened_device, only_mock):
    found = ttnn.zeros((1, 32), dtype=ttnn.bfloat16, layout=ttnn.TILE_LAYOUT, device=opened_device)
    with pytest.raises(RuntimeError, match="a mock one"):
        parity.assert_parity(found, np.zeros((1, 32)))

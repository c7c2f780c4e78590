"""Tests of the layer on a mock board; with a card, use `mha_tt.open_device()`."""

import attention_tt_fixed
import pytest
import ttnn
from layer import PROBLEM, made

import mha_tt
import ttnn_mock

X, PROMPT = PROBLEM.inputs["query"], 36


@pytest.fixture
def device():
    with ttnn_mock.board("n150") as device:
        yield device


def test_a_prompt(assert_parity, device):
    x = mha_tt.upload(X, device=device)
    assert_parity(made(attention_tt_fixed, x).prefill(x), problem=PROBLEM)


def test_steps_behind_a_prompt(assert_parity, device):
    prompt = mha_tt.upload(X[:, :PROMPT], device=device)
    layer = made(attention_tt_fixed, prompt)
    parts = [layer.prefill(prompt)]
    for token in range(PROMPT, X.shape[1]):
        x = mha_tt.upload(X[:, token : token + 1], device=device)
        parts.append(layer.decode(x, [token] * len(X)))
    assert_parity(ttnn.concat(parts, dim=1), problem=PROBLEM)

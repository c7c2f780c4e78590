"""Operations compared with their golden functions one by one; on a mock board, wrong values are
injected.
"""

import re
from pathlib import Path

import numpy as np
import pytest
import ttnn
from helpers.docstrings import failure_of_example
from helpers.tt.formulas import module_of

import mha_tt
import parity
from ttnn_mock import Shadow

pytestmark = pytest.mark.usefixtures("only_mock")

SPEC = parity.AttentionSpec(64, 4, num_kv_heads=2, rope=parity.Rope(10000.0))


@pytest.fixture
def layer(device):
    """Return a function that runs a layer with a cache on a prompt and two steps."""
    module = module_of("MultiHeadAttentionWithCache", SPEC, device)

    def run():
        cache = module.init_cache(2, 40)
        for count in (36, 1, 1):
            x = mha_tt.upload(
                np.random.default_rng(count).standard_normal((2, count, 64)), device=device
            )
            _, cache = module(x, cache)

    return run


def broken(monkeypatch, name, change):
    """Make the device return changed values for an operation."""
    original = Shadow.__call__

    def call(self, operation, arguments, keywords, result):
        original(self, operation, arguments, keywords, result)
        if operation.python_fully_qualified_name == name:
            for tensor in result if isinstance(result, list | tuple) else [result]:
                self._values[tensor.tensor_id] = [
                    change(part.clone()) for part in self.parts(tensor)
                ]

    monkeypatch.setattr(Shadow, "__call__", call)


def test_example_of_docstring_runs(device):
    """The example in the docstring of `assert_operations` runs on a device."""
    names = {"parity": parity, "ttnn": ttnn, "device": device}
    assert failure_of_example("assert_operations", names) == ""


def test_correct_program_passes(layer):
    """A correct layer passes: more than 60 operations are compared with their golden functions, and
    none is left out.
    """
    with parity.assert_operations() as operations:
        layer()
    assert operations.num_compared > 60
    assert not operations.not_compared


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("ttnn.transformer.scaled_dot_product_attention", lambda x: x * 1.05),
        ("ttnn.transformer.scaled_dot_product_attention_decode", lambda x: x * 1.05),
        ("ttnn.experimental.paged_fused_update_cache", lambda x: x.roll(1, 2)),
        ("ttnn.plus_one", lambda x: x + 1),
    ],
)
def test_first_wrong_operation_is_located(monkeypatch, layer, name, change):
    """The first operation that differs is reported with its number, name, shapes and source
    line.
    """
    broken(monkeypatch, name, change)
    location = rf"operation \d+, {re.escape(name)} of \(.*\), .*mha_tt.*\.py:\d+:"
    with pytest.raises(AssertionError, match=location), parity.assert_operations():
        layer()


def test_reported_location_is_user_line(monkeypatch, device):
    """The reported line number is the line of the program that calls the operation."""
    broken(monkeypatch, "ttnn.softmax", lambda x: x + 0.1)
    x = mha_tt.upload(np.ones((1, 1, 32, 32)), device=device)

    def program():
        return ttnn.softmax(ttnn.add(x, x), dim=-1)  # this one

    with pytest.raises(AssertionError) as raised, parity.assert_operations():
        program()
    line, text = re.match(
        r"operation 2, ttnn.softmax of \(1, 1, 32, 32\), .*:(\d+):\n(.*)", str(raised.value)
    ).groups()
    assert "# this one" in Path(__file__).read_text("utf-8").splitlines()[int(line) - 1]
    assert "softmax: actual differs from expected (bfloat16)" in text


def test_operations_after_wrong_one_pass(monkeypatch, device):
    """An operation is compared for the inputs that it got, so those after a wrong one pass."""
    x = mha_tt.upload(np.ones((1, 1, 32, 32)), device=device)
    broken(monkeypatch, "ttnn.add", lambda x: x * 2)
    wrong = ttnn.add(x, x)
    with parity.assert_operations() as operations:
        ttnn.softmax(wrong, dim=-1)
    assert operations.num_compared == 1


def test_unchecked_operations_are_reported(monkeypatch, device):
    """Operations without a budget or a golden function are listed with the reason, and are not
    counted.
    """
    x = mha_tt.upload(np.ones((1, 1, 32, 32)), device=device)
    with parity.assert_operations() as operations:
        ttnn.typecast(x, ttnn.bfloat8_b)
    assert operations.not_compared == {
        "ttnn.typecast": "blocks that share an exponent have no budget"
    }
    assert operations.num_compared == 0
    monkeypatch.setattr("parity.use.testing.operations._golden", lambda operation: None)
    with parity.assert_operations() as operations:
        ttnn.add(x, x)
    assert "it has no golden function" in operations.not_compared["ttnn.add"]
    assert operations.num_compared == 0


def test_fast_mode_is_restored(device):
    """ttnn's fast runtime mode is restored after an exception."""
    before = ttnn.CONFIG.enable_fast_runtime_mode
    with pytest.raises(ZeroDivisionError), parity.assert_operations():
        1 / 0  # noqa: B018
    assert ttnn.CONFIG.enable_fast_runtime_mode == before

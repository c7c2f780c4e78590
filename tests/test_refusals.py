"""The check of refusals can fail: by the argument, the kind, a value, the place, or if nothing is refused."""

import pytest
from refusals import refuses, refuses_type

from mha_spec import Refusal, WrongType


@pytest.mark.parametrize(
    "expected",
    [
        refuses("num_heads", num_heads=4),
        refuses("num_heads", {"num_heads": ..., "k.dtype": "int8"}, where="layer 1"),
        refuses("…heads"),
        refuses("num_heads", "int8"),
    ],
)
def test_a_refusal_with_the_expected_fields_passes(expected):
    for _ in range(2):
        with expected:
            raise Refusal("num_heads", "be odd", {"num_heads": 4, "k.dtype": "int8"}, where="layer 1")


@pytest.mark.parametrize(
    "expected",
    [
        refuses("heads"),
        refuses("…kv_heads"),
        refuses("num_heads", num_heads=3),
        refuses("num_heads", num_heads=4.0),
        refuses("num_heads", num_heads=True),
        refuses("num_heads", head_dim=...),
        refuses("num_heads", "int4"),
        refuses("num_heads", where="layer 2"),
        refuses_type("num_heads"),
    ],
)
def test_a_refusal_with_another_field_fails(expected):
    with pytest.raises(AssertionError), expected:
        raise Refusal("num_heads", "be odd", num_heads=4, where="layer 1")


def test_no_refusal_fails_and_other_errors_pass_through():
    with pytest.raises(pytest.fail.Exception, match="num_heads"), refuses("num_heads"):
        pass
    with pytest.raises(ZeroDivisionError), refuses("num_heads"):
        1 // 0  # noqa: B018
    with pytest.raises(AssertionError), refuses("num_heads"):
        raise WrongType("num_heads", "be an integer")
    with refuses_type("num_heads"):
        raise WrongType("num_heads", "be an integer")

"""The check of refusals can fail: by the argument, the kind, a value, the place, or if nothing is refused."""

import pytest
from helpers.refusals import refuses, refuses_type

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


PRINTED = (
    "mha-parity: layer 1: --heads must be odd, got --heads 4, --to 'a b' and n=[1, 2]; --devices 8 or --fill helps"
)


@pytest.mark.parametrize(
    "expected",
    [
        refuses("--heads"),
        refuses("--heads", {"--heads": 4, "--to": "a b", "n": [1, 2]}, where="layer 1"),
        refuses("--…", {"--heads": ...}, remedy={"--devices": 8}, hint="helps"),
        refuses("--heads", "a b", remedy={"--fill": True}),
    ],
)
def test_a_printed_refusal_is_found(expected):
    assert expected.is_printed_in(f"a line before\n{PRINTED}\n")


@pytest.mark.parametrize(
    "expected",
    [
        refuses("heads"),
        refuses("--head"),
        refuses("--heads", where="layer 2"),
        refuses("--heads", {"--heads": 5}),
        refuses("--heads", {"--hea": ...}),
        refuses("--heads", {"--to": "a"}),
        refuses("--heads", {"n": [1]}),
        refuses("--heads", {"--devices": 8}),
        refuses("--heads", "odd"),
        refuses("--heads", remedy={"--devices": 4}),
        refuses("--heads", remedy={"--heads": 4}),
        refuses("--heads", hint="near it"),
    ],
)
def test_another_argument_value_place_or_advice_is_not_printed(expected):
    assert not expected.is_printed_in(PRINTED)


def test_text_without_a_refusal_prints_none():
    assert not refuses("--heads").is_printed_in("mha-parity: --heads\n")


@pytest.mark.parametrize(
    "expected", [refuses("n", remedy={"m": 2}), refuses("n", remedy={"k": 1}), refuses("n", hint="k")]
)
def test_other_advice_fails(expected):
    with pytest.raises(AssertionError), expected:
        raise Refusal("n", "be odd", n=4, remedy={"m": 1}, hint="helps")


def test_the_expected_advice_passes():
    with refuses("n", remedy={"m": 1}, hint="helps"):
        raise Refusal("n", "be odd", n=4, remedy=[{"m": 1, "j": 2}, {"k": 2}], hint="helps")

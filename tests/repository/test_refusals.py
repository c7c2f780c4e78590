"""Tests that the check of errors can fail: by each field, or without an error."""

import pytest
from helpers.refusals import refuses, refuses_type

from mha_spec import InputError, InputTypeError


@pytest.mark.parametrize(
    "expected",
    [
        refuses("num_heads", num_heads=4),
        refuses("num_heads", {"num_heads": ..., "k.dtype": "int8"}, where="layer 1"),
        refuses("…heads"),
        refuses("num_heads", "int8"),
    ],
)
def test_expected_fields_pass(expected):
    """An expected error passes, twice in a row, if the argument, the values and the location
    match.
    """
    for _ in range(2):
        with expected:
            raise InputError(
                "num_heads", "be odd", {"num_heads": 4, "k.dtype": "int8"}, where="layer 1"
            )


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
def test_different_field_fails(expected):
    """An expected error fails if the argument, a value or its type, the location, or the kind
    differs.
    """
    with pytest.raises(AssertionError), expected:
        raise InputError("num_heads", "be odd", num_heads=4, where="layer 1")


def test_missing_error_fails():
    """The check fails without an error or with one of a different kind, and other exceptions
    pass through it.
    """
    with pytest.raises(pytest.fail.Exception, match="num_heads"), refuses("num_heads"):
        pass
    with pytest.raises(ZeroDivisionError), refuses("num_heads"):
        1 // 0  # noqa: B018
    with pytest.raises(AssertionError), refuses("num_heads"):
        raise InputTypeError("num_heads", "be an integer")
    with refuses_type("num_heads"):
        raise InputTypeError("num_heads", "be an integer")


PRINTED = (
    "mha-parity: layer 1: --heads must be odd, got --heads 4, --to 'a b' and n=[1, 2]; --devices "
    "8 or --fill helps"
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
def test_printed_error_is_found(expected):
    """A printed error is found by its argument, values, location, remedy and hint."""
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
def test_different_error_is_not_found(expected):
    """A printed error is not found by a different argument, value, location, remedy or hint."""
    assert not expected.is_printed_in(PRINTED)


def test_text_without_error_has_none():
    """A line with an argument but no rule is not a printed error."""
    assert not refuses("--heads").is_printed_in("mha-parity: --heads\n")


@pytest.mark.parametrize(
    "expected",
    [refuses("n", remedy={"m": 2}), refuses("n", remedy={"k": 1}), refuses("n", hint="k")],
)
def test_different_advice_fails(expected):
    """The check fails if the remedy or the hint differs."""
    with pytest.raises(AssertionError), expected:
        raise InputError("n", "be odd", n=4, remedy={"m": 1}, hint="helps")


def test_expected_advice_passes():
    """The check passes if one alternative has the remedy, and the hint matches."""
    with refuses("n", remedy={"m": 1}, hint="helps"):
        raise InputError("n", "be odd", n=4, remedy=[{"m": 1, "j": 2}, {"k": 2}], hint="helps")

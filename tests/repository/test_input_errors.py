"""Tests that the check of errors can fail: by each field, or without an error."""

import pytest
from helpers.input_errors import rejects, rejects_type

from mha_spec import InputError, InputTypeError


@pytest.mark.parametrize(
    "expected",
    [
        rejects("num_heads", num_heads=4),
        rejects("num_heads", {"num_heads": ..., "k.dtype": "int8"}, where="layer 1"),
        rejects("…heads"),
        rejects("num_heads", "int8"),
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
        rejects("heads"),
        rejects("…kv_heads"),
        rejects("num_heads", num_heads=3),
        rejects("num_heads", num_heads=4.0),
        rejects("num_heads", num_heads=True),
        rejects("num_heads", head_dim=...),
        rejects("num_heads", "int4"),
        rejects("num_heads", where="layer 2"),
        rejects_type("num_heads"),
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
    with pytest.raises(pytest.fail.Exception, match="num_heads"), rejects("num_heads"):
        pass
    with pytest.raises(ZeroDivisionError), rejects("num_heads"):
        1 // 0  # noqa: B018
    with pytest.raises(AssertionError), rejects("num_heads"):
        raise InputTypeError("num_heads", "be an integer")
    with rejects_type("num_heads"):
        raise InputTypeError("num_heads", "be an integer")


PRINTED = (
    "mha-parity: layer 1: --heads must be odd, got --heads 4, --to 'a b' and n=[1, 2]; --devices "
    "8 or --fill helps"
)


@pytest.mark.parametrize(
    "expected",
    [
        rejects("--heads"),
        rejects("--heads", {"--heads": 4, "--to": "a b", "n": [1, 2]}, where="layer 1"),
        rejects("--…", {"--heads": ...}, remedy={"--devices": 8}, hint="helps"),
        rejects("--heads", "a b", remedy={"--fill": True}),
    ],
)
def test_printed_error_is_found(expected):
    """A printed error is found by its argument, values, location, remedy and hint."""
    assert expected.is_printed_in(f"a line before\n{PRINTED}\n")


@pytest.mark.parametrize(
    "expected",
    [
        rejects("heads"),
        rejects("--head"),
        rejects("--heads", where="layer 2"),
        rejects("--heads", {"--heads": 5}),
        rejects("--heads", {"--hea": ...}),
        rejects("--heads", {"--to": "a"}),
        rejects("--heads", {"n": [1]}),
        rejects("--heads", {"--devices": 8}),
        rejects("--heads", "odd"),
        rejects("--heads", remedy={"--devices": 4}),
        rejects("--heads", remedy={"--heads": 4}),
        rejects("--heads", hint="near it"),
    ],
)
def test_different_error_is_not_found(expected):
    """A printed error is not found by a different argument, value, location, remedy or hint."""
    assert not expected.is_printed_in(PRINTED)


def test_text_without_error_has_none():
    """A line with an argument but no rule is not a printed error."""
    assert not rejects("--heads").is_printed_in("mha-parity: --heads\n")


@pytest.mark.parametrize(
    "expected",
    [rejects("n", remedy={"m": 2}), rejects("n", remedy={"k": 1}), rejects("n", hint="k")],
)
def test_different_advice_fails(expected):
    """The check fails if the remedy or the hint differs."""
    with pytest.raises(AssertionError), expected:
        raise InputError("n", "be odd", n=4, remedy={"m": 1}, hint="helps")


def test_expected_advice_passes():
    """The check passes if one alternative has the remedy, and the hint matches."""
    with rejects("n", remedy={"m": 1}, hint="helps"):
        raise InputError("n", "be odd", n=4, remedy=[{"m": 1, "j": 2}, {"k": 2}], hint="helps")

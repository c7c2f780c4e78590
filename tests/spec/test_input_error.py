"""Errors: records with a message, which keep their fields in other processes and on the command
line.
"""

import pickle

import numpy as np
import pytest

from mha_spec import AttentionSpec, InputError, InputTypeError
from mha_spec.errors import MAX_LENGTH


def test_message_has_argument_and_values():
    """The message and fields of an error have its argument,
    its rule and the values that were passed.
    """
    input_error = InputError(
        "num_heads", "be a multiple of num_kv_heads", num_heads=4, num_kv_heads=3
    )
    assert (
        str(input_error)
        == "num_heads must be a multiple of num_kv_heads, got num_heads=4 and num_kv_heads=3"
    )
    assert (input_error.argument, input_error.rule) == (
        "num_heads",
        "be a multiple of num_kv_heads",
    )
    assert input_error.got == {"num_heads": 4, "num_kv_heads": 3}


@pytest.mark.parametrize(
    ("input_error", "text"),
    [
        (InputError("a", "be b"), "a must be b"),
        (InputError("a", "be b", "neither"), "a must be b, got neither"),
        (InputError("a", "be b", a="1"), "a must be b, got '1'"),
        (InputError("--a", "be b", {"--a": "1 2"}), "--a must be b, got '1 2'"),
        (InputError("--a", "be b", {"--a": True}), "--a must be b, got --a"),
        (
            InputError("a", "be b", {"a.dtype": np.dtype("int8")}, c=None, d=0),
            "a must be b, got a.dtype=int8, c=None and d=0",
        ),
        (
            InputError("a", "be b", remedy={"drop": True}, hint="helps"),
            "a must be b; drop=True helps",
        ),
        (
            InputError(
                "a", "be b", remedy=[{"c": 1, "d": 2}, {"c": 2}, {"c": 3}, {"c": 4}], hint="fits"
            ),
            "a must be b; c=1 with d=2 or c=2 or c=3 (or 1 more) fits",
        ),
        (InputError("a", "be b", where="w").within("v"), "v: w: a must be b"),
        (
            InputError("a", "be b", statement="no b here", a=1, hint="helps"),
            "a=1: no b here; helps",
        ),
        (InputError("a", "be b", statement="w has no b", where="v"), "v: w has no b"),
        (InputError("a", "be b", a=10**5000), "a must be b, got a int"),
        (
            InputError("a", "be b", a=np.zeros((2, 3), np.int8), c=np.float32(2), d=[1, 2]),
            "a must be b, got a=ndarray(shape=(2, 3), dtype=int8), c=2.0 and d=[1, 2]",
        ),
        (
            InputError("a", "be b", a={"w": np.zeros(2)}, c=(np.zeros(2), 1)),
            "a must be b, got a={'w': ndarray(shape=(2,), dtype=float64)} and c=tuple of "
            "ndarray(shape=(2,), dtype=float64), 1",
        ),
    ],
)
def test_each_part_has_its_position(input_error, text):
    """Each part of an error is at its position in the message, in the expected words."""
    assert str(input_error) == text


def test_wrong_type_is_also_a_type_error():
    """`InputTypeError` is an `InputError` and a `TypeError`; an `InputError` is a `ValueError`
    only.
    """
    assert issubclass(InputTypeError, InputError)
    assert issubclass(InputTypeError, TypeError)
    assert issubclass(InputError, ValueError)
    assert not issubclass(InputError, TypeError)
    with pytest.raises(InputTypeError):
        AttentionSpec("8", 2)  # type: ignore[arg-type]


def test_flags_replace_names_in_each_field():
    """Renaming to flags changes the message of an error, but not its fields or type."""
    flags = {"prefix": "--prefix", "fill_bias": "--fill-bias", "n": "--n"}

    def rename(name: str, value: object) -> tuple[str, object]:
        return ("--rest", "drop") if name == "keep_rest" else (flags.get(name, name), value)

    input_error = InputTypeError(
        "prefix", "match", prefix="a b", n=3, d=4, remedy={"fill_bias": True, "keep_rest": False}
    )
    shown = input_error.renamed(rename)
    assert (
        str(shown)
        == "--prefix must match, got --prefix 'a b', --n 3 and d=4; --fill-bias with --rest drop"
    )
    assert type(shown) is InputTypeError
    assert input_error.argument == "prefix"
    assert "prefix" in input_error.got


@pytest.mark.parametrize("field", ["argument", "rule", "got", "text", "hint", "where"])
def test_long_part_loses_its_middle(field):
    """A part of 300,000 characters keeps its ends, other parts stay whole, and
    the message has at most MAX_LENGTH characters.
    """
    long = "<" + "x" * 300_000 + ">"
    parts = {
        "argument": "the argument",
        "rule": "be short",
        "where": "location",
        "hint": "advice",
    } | {field: long}
    got = {"got": {"value": parts.get("got", 7)}, "text": parts.get("text", "")}[
        "text" if field == "text" else "got"
    ]
    text = str(
        InputError(parts["argument"], parts["rule"], got, where=parts["where"], hint=parts["hint"])
    )
    assert len(text) <= MAX_LENGTH
    assert "<x" in text
    assert "x>" in text
    assert all(part in text for part in parts.values() if part is not long)
    text = str(InputError("a", "be b", statement=long, where="place", hint="advice"))
    assert len(text) <= MAX_LENGTH
    assert text.startswith("place: <x")
    assert text.endswith("x>; advice")


def test_pickled_error_keeps_its_fields():
    """A pickled error keeps its type, fields and message; values
    that are not plain become text.
    """
    device = type("Device", (), {"__str__": lambda self: "device 0"})()
    input_error = InputTypeError("x", "be on a device", x=3, device=device, where="here")
    copied = pickle.loads(pickle.dumps(input_error))
    assert type(copied) is InputTypeError
    assert copied.got == {"x": 3, "device": "device 0"}
    assert (
        str(copied)
        == str(input_error)
        == "here: x must be on a device, got x=3 and device=device 0"
    )

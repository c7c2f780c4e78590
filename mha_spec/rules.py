"""Validation of plain values; the results are Python values that JSON can represent."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, fields
from types import NoneType
from typing import Any

import numpy as np

from mha_spec.errors import InputError, InputTypeError
from mha_spec.hints import WRITTEN_OVER, missing_axes

LARGEST_COUNT = 2**63 - 1
"""Larger integers do not fit into arrays of integers, and some are beyond floats."""

LEAST_FACTOR, LARGEST_FACTOR = (
    float(number) for number in (np.finfo(np.float32).tiny, np.finfo(np.float32).max)
)
"""Range of factors: layers are computed in float32, which rounds values beyond it to 0 or
infinity.
"""


def as_count(name: str, value: object, minimum: int = 1) -> int:
    """Return an integer of at least `minimum`.

    Raises:
        TypeError: if it is not an integer.
        ValueError: if it is below the minimum, or above 2**63 - 1.
    """
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise InputTypeError(name, "be an integer", {name: value})
    if value < minimum:
        raise InputError(name, f"be at least {minimum}", {name: value})
    if value > LARGEST_COUNT:
        raise InputError(name, f"be at most {LARGEST_COUNT}", {name: value})
    return int(value)


def as_boolean(name: str, value: object) -> bool:
    """Return True or False.

    Raises:
        TypeError: if it is neither.
    """
    if not isinstance(value, (bool, np.bool_)):
        raise InputTypeError(name, "be a boolean", {name: value})
    return bool(value)


def as_number(name: str, value: object) -> float:
    """Return a real number.

    Raises:
        TypeError: if it is anything else.
        ValueError: if it is an integer beyond the largest float.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise InputTypeError(name, "be a number", {name: value})
    try:
        return float(value)
    except OverflowError:
        raise InputError(name, f"be at most {sys.float_info.max:.2g}", {name: value}) from None


def as_factor(name: str, value: object) -> float:
    """Return a positive, finite number in the range of float32.

    Raises:
        TypeError: if it is not a number.
        ValueError: if it is not positive, not finite, or beyond the range of float32.
    """
    factor = as_number(name, value)
    if not 0.0 < factor < math.inf:  # JSON cannot represent infinity or NaN
        raise InputError(name, "be positive and finite", {name: factor})
    if not LEAST_FACTOR <= factor <= LARGEST_FACTOR:
        rule = f"be between {LEAST_FACTOR:.3g} and {LARGEST_FACTOR:.3g}, the range of float32"
        raise InputError(name, rule, {name: factor})
    return factor


def as_rate(name: str, value: object) -> float:
    """Return a probability below 1.

    Raises:
        TypeError: if it is not a number.
        ValueError: if it lies outside [0, 1).
    """
    rate = as_number(name, value)
    if not 0.0 <= rate < 1.0:
        raise InputError(name, "be at least 0 and below 1", {name: value})
    return rate


def as_one_of(name: str, value: Any, options: Sequence[object]) -> Any:
    """Return one of the options.

    Raises:
        ValueError: if it is not an option.
    """
    # `in` is ambiguous for an array.
    if not isinstance(value, (str, NoneType)) or value not in options:
        raise InputError(name, f"be one of {list(options)}", {name: value})
    return value


def check_is_record(name: str, value: object, *kinds: type) -> None:
    """Reject anything but a record of one of these types, or None.

    Raises:
        TypeError: if it is anything else.
    """
    if value is None or isinstance(value, kinds):
        return
    articles = {kind.__name__: "an" if kind.__name__[0] in "AEIOU" else "a" for kind in kinds}
    options = ", ".join(f"{article} {kind}" for kind, article in articles.items())
    hint = ""
    if value is True:
        hint = " or ".join(_shortest_call(kind) for kind in kinds) + " switches it on"
    elif value is False:
        hint = "None switches it off"
    raise InputTypeError(name, f"be {options} or None", {name: value}, hint=hint)


def _shortest_call(kind: Any) -> str:
    """Return a call of a record with the fields that it requires."""
    required = [field.name for field in fields(kind) if field.default is MISSING]
    return f"{kind.__name__}({', '.join(f'{name}=…' for name in required)})"


def check_head_groups(num_heads: int, num_kv_heads: int) -> None:
    """Reject query heads that do not form groups of equal size, one per key/value head.

    Raises:
        TypeError: if a number of heads is not an integer.
        ValueError: if one is below 1, or num_heads is not a multiple of num_kv_heads.
    """
    as_count("num_heads", num_heads)
    as_count("num_kv_heads", num_kv_heads)
    if num_heads % num_kv_heads:
        raise InputError(
            "num_heads",
            "be a multiple of num_kv_heads",
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
        )


def check_broadcasts(name: str, shape: tuple[int, ...], scores_shape: tuple[int, ...]) -> None:
    """Reject a shape that does not broadcast to the scores, or that would enlarge them.

    Raises:
        ValueError: if it does not broadcast, or has more than 4 axes.
    """
    sizes = zip(reversed(shape), reversed(scores_shape), strict=False)
    if len(shape) > 4 or not all(a == 1 or a == b for a, b in sizes):
        rule = f"broadcast to the scores (B, N, T, S) = {scores_shape}"
        raise InputError(
            name, rule, {f"{name}.shape": shape}, hint=missing_axes(name, shape, scores_shape)
        )


def as_pair_of_segments(ids: Any) -> tuple[Any, Any]:
    """Return the segment ids of the queries and of the keys: a pair, or the same ids for both.

    Raises:
        ValueError: if the ids are a tuple that is not a pair.
    """
    if not isinstance(ids, tuple):
        return (ids, ids)
    if len(ids) != 2:
        raise InputError(
            "segment_ids",
            "be ids or a pair of them, of queries and of keys",
            f"{len(ids)} in a tuple",
        )
    return ids


def check_mapping(argument: str, weights: object) -> None:
    """Reject anything but a mapping.

    Raises:
        TypeError: if it is anything else.
    """
    if not isinstance(weights, Mapping):
        raise InputTypeError(argument, "be a mapping of names to arrays", type(weights).__name__)


def check_names(argument: str, weights: Mapping[str, object], names: Collection[str]) -> None:
    """Reject weights that do not have exactly these names.

    Raises:
        TypeError: if they are not a mapping.
        ValueError: if a name is missing or unexpected.
    """
    check_mapping(argument, weights)
    if weights.keys() == set(names):
        return
    missing = sorted(set(names) - weights.keys())
    unexpected = sorted(weights.keys() - set(names), key=str)
    raise InputError(
        argument, "have exactly the names of the spec", missing=missing, unexpected=unexpected
    )


def check_not_written_over(cache: Any) -> None:
    """Reject a cache whose storage belongs to the one that a step returned.

    Raises:
        ValueError: if `cache.is_written_over`.
    """
    # The mark is a change of a Python object, which a graph would not repeat.
    if not cache.is_written_over:
        return
    rule = "be the one that the last step returned: that step has written into its storage"
    raise InputError("cache", rule, "the one before the step", hint=WRITTEN_OVER)


def check_holds_new(lengths: Sequence[int], added: Sequence[int]) -> None:
    """Reject the lengths of another layer's cache without the new tokens, of which each sequence
    has some.

    Raises:
        ValueError: if a sequence has fewer tokens than were added.
    """
    if any(length < new for length, new in zip(lengths, added, strict=True)):
        rule = "hold the new tokens with shared_kv: the other layer appends them first"
        raise InputError("cache", rule, lengths=list(lengths), new_lengths=list(added))


def merged_shapes(
    name: str, shape: tuple[int, ...], axes: tuple[int, ...], other_axes: str, *, is_exact: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape to broadcast an array to, and the one to reshape it to, with one batch axis.

    Args:
        name: name of the argument, for the error.
        shape: shape of the array, batch axes first.
        axes: batch axes of the query.
        other_axes: letters of the other axes.
        is_exact: require the batch axes of the query; by default they need only broadcast.
    """
    letters = other_axes.split()
    first = max(len(shape) - len(letters), 0)
    own = shape[:first]
    rest = shape[first:]
    fits = len(own) <= len(axes) and all(
        a == 1 or a == b for a, b in zip(own[::-1], axes[::-1], strict=False)
    )
    # One by one: torch.compile with symbolic lengths cannot compare tuples of them.
    is_same = len(own) == len(axes) and all(a == b for a, b in zip(own, axes, strict=True))
    if not fits or (is_exact and not (is_same and len(rest) == len(letters))):
        expected = f"({', '.join(map(str, (*axes, *letters)))})"
        if is_exact:
            rule = f"have shape {expected}"
        else:
            rule = f"broadcast to {expected}"
        raise InputError(name, rule, {f"{name}.shape": shape})
    if math.prod(own) == 1:  # all sequences share it
        return shape, (1, *rest)
    return (*axes, *rest), (math.prod(axes), *rest)

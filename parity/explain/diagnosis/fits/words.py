"""Descriptions of numbers that have names, and of lists of indices."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from parity.explain.diagnosis.bugs.scores import yarn_factor
from parity.measure.core.problem import Problem
from parity.measure.text import and_listed

MOST_LISTED = 16
"""The number of listed numbers; longer lists are shortened to a range."""

RATES = (0.1, 0.2, 0.05, 0.15, 0.25, 0.3, 0.4, 0.5)
"""Usual dropout rates."""

LOOSEST = 0.01
"""The largest relative difference from a named number."""

NEAR = 0.02
"""The largest relative difference between a fitted number and the right one that may come from
rounding alone.
"""


# ---- Numbers -------------------------------------------------------------------------------------


def readable(x: float) -> str:
    """Return a number with a readable number of digits."""
    if 1e4 <= abs(x) < 1e9 and x == round(x):
        return f"{x:.0f}"
    return f"{x:.4g}"


def is_round(x: float, most: int = 3) -> bool:
    """Return True if a number has few digits, without zeros at its ends."""
    mantissa = f"{x:.12e}".partition("e")[0]
    return len(mantissa.replace(".", "").strip("-0")) <= most


def readable_apart(x: float, right: float) -> tuple[str, str]:
    """Return a number and the right one, with enough digits to distinguish them."""
    texts = readable(x), readable(right)
    if x == right or not (math.isfinite(x) and math.isfinite(right)):
        return texts
    digits = 4
    # Not "equal texts": 1e+04 is the same number as 10000.
    while float(texts[0]) == float(texts[1]):
        digits += 1
        texts = f"{x:.{digits}g}", f"{right:.{digits}g}"
    return texts


def instead_of(x: float, right: float) -> tuple[str, str]:
    """Return a wrong number and the right one as texts that differ, for `is x instead of y`.

    Raises:
        ValueError: if they are equal. A pattern must not call a right number wrong: it explains
            something else.
    """
    if x == right:
        raise ValueError(f"{readable(x)} instead of the same number")
    return readable_apart(x, right)


def listed(numbers: Sequence[float], right: float = math.nan) -> str:
    """Return numbers as a list, or as a range, with enough digits to distinguish them from the
    right one.
    """
    if len(numbers) <= MOST_LISTED:
        return ", ".join(readable_apart(x, right)[0] for x in numbers)
    least, _ = readable_apart(min(numbers), right)
    most, _ = readable_apart(max(numbers), right)
    return f"from {least} to {most}"


def known_as(
    x: float, tolerance: float, sizes: dict[str, int], problem: Problem | None = None
) -> list[str]:
    """Return the names of a factor, the simplest first; empty if it is near no named number.

    Args:
        x: the factor.
        tolerance: relative to the number; at most `LOOSEST`.
        sizes: sizes of heads and layers by their letters in formulas, `H`, `N`, `E`.
        problem: with dropout and scale, if known.
    """
    tolerance = min(max(tolerance, 1e-9), LOOSEST)
    names = _near(x, tolerance, _named_numbers(sizes, problem))
    # Scores do not show the width of heads, whose root they may be multiplied by.
    has_width = "H" in sizes
    if not names or not has_width:
        names += _near(x, min(tolerance, 1e-4), _roots(x, squares=not has_width))
    return list(dict.fromkeys(names))[:3]


def _near(x: float, tolerance: float, numbers: Iterator[tuple[str, float]]) -> list[str]:
    """Return the names of the numbers that x is, up to a relative tolerance."""
    return [name for name, number in numbers if abs(x - number) <= tolerance * abs(number)]


def _named_numbers(sizes: dict[str, int], problem: Problem | None) -> Iterator[tuple[str, float]]:
    """Yield factors by which implementations multiply, with their names."""
    yield "the sign is inverted", -1.0
    for name, size in sizes.items():
        if size > 1:
            if name != "N":
                yield f"sqrt({name})", math.sqrt(size)
                yield f"1/sqrt({name})", 1.0 / math.sqrt(size)
            yield name, float(size)
            yield f"1/{name}", 1.0 / size
    if problem is not None:
        spec = problem.spec
        yield "the scale of the scores", spec.score_scale
        yield "1 / the scale of the scores", 1.0 / spec.score_scale
        yield "query heads of a key/value head", spec.num_heads / spec.num_kv_heads
        if spec.rope is not None and spec.rope.attention_factor != 1.0:
            yield "RoPE's attention factor", spec.rope.attention_factor
            yield "1 / RoPE's attention factor", 1.0 / spec.rope.attention_factor
        mscale_squared = yarn_factor(spec)
        if mscale_squared != 1.0:
            yield "YaRN's mscale", math.sqrt(mscale_squared)
            yield "mscale² of YaRN", mscale_squared
    rates = RATES
    if problem is not None and problem.spec.dropout:
        rates = (problem.spec.dropout, *RATES)
    for rate in dict.fromkeys(rates):
        yield f"1/{1 - rate:.6g}, dropout's 1/(1 - p) with p = {rate:g}", 1.0 / (1.0 - rate)
    yield "ln 2", math.log(2.0)
    yield "1/ln 2: powers of 2 instead of e", 1.0 / math.log(2.0)


def _roots(x: float, *, squares: bool) -> Iterator[tuple[str, float]]:
    """Yield integers, their roots and the inverses that x may be; roots of squares only on
    request.
    """
    size = abs(x)
    if not 1e-4 < size < 1e4:
        return
    sign = ""
    if x < 0:
        sign = "-"
    for words, number, exponent in (
        ("{}", size, 1.0),
        ("1/{}", 1.0 / size, -1.0),
        ("sqrt({})", size**2, 0.5),
        ("1/sqrt({})", 1.0 / size**2, -0.5),
    ):
        if not 1.5 < number < 1e4:
            continue
        whole = round(number)
        is_root = abs(exponent) == 0.5
        if is_root and math.isqrt(whole) ** 2 == whole and not squares:
            continue
        yield sign + words.format(whole), math.copysign(whole**exponent, x)


def number_words(x: float, names: Sequence[str], right: float = math.nan) -> str:
    """Return a number and its names, with enough digits to distinguish it from the right one."""
    number, _ = readable_apart(x, right)
    other_names = [name for name in names if name != number]
    if not other_names:
        return number
    return f"{number} ({', or '.join(other_names)})"


# ---- Indices -------------------------------------------------------------------------------------

NOUNS = {
    "B": ("sequence", "sequences"),
    "N": ("head", "heads"),
    "K": ("key/value head", "key/value heads"),
    "T": ("position", "positions"),
    "S": ("position", "positions"),
    "H": ("feature", "features"),
    "E": ("feature", "features"),
    "W": ("feature", "features"),
    "G": ("feature", "features"),
    "d_in": ("feature", "features"),
    "d_kv": ("feature", "features"),
    "out": ("row", "rows"),
    "in": ("column", "columns"),
}
"""The names of an index of each axis."""


def noun(letters: Sequence[str], axis: int) -> tuple[str, str]:
    """Return the names of one and several indices of an axis, in a stage of these axes."""
    letter = letters[axis]
    if "T" in letters and "S" in letters:
        if letter == "T":
            return "query", "queries"
        if letter == "S":
            return "key", "keys"
    return NOUNS.get(letter, (f"index of {letter}", f"indices of {letter}"))


def indices(
    which: np.ndarray, size: int, names: tuple[str, str], *, in_time: bool, of: str = ""
) -> str:
    """Describe some of the indices 0 … size - 1; empty for all of them.

    Args:
        which: in rising order, at least one.
        size: size of the axis.
        names: nouns for one and for several indices.
        in_time: True for tokens, which have a first, a last, and later ones.
        of: the owner of halves.
    """
    one, several = names
    first, last, count = int(which[0]), int(which[-1]), len(which)
    if count == size:
        return ""
    if count == 1:
        return _single_index(first, size, one, in_time=in_time)
    if count == last - first + 1:
        return _run(first, last, size, several, in_time=in_time, of=of)
    step = int(which[1]) - first
    if count > 2 and np.array_equal(which, np.arange(first, size, step)):
        if step == 2:
            return _every_other(first, several)
        return f"every {_ordinal(step)} {one} from {first} on"
    missing = np.setdiff1d(np.arange(size), which)
    if len(missing) <= min(2, size // 4):
        return f"all {several} but {and_listed(missing)}"
    if count <= MOST_LISTED // 2:
        return f"{several} {and_listed(which)} (of {size})"
    return f"{count} of {size} {several}"


def _single_index(index: int, size: int, one: str, *, in_time: bool) -> str:
    if not in_time:
        return f"only {one} {index} (of {size})"
    token = one
    if one == "position":
        token = "token"
    if index == 0:
        return f"only the first {token}"
    if index == size - 1:
        return f"only the last {token}"
    return f"only {one} {index}"


def _run(first: int, last: int, size: int, several: str, *, in_time: bool, of: str) -> str:
    """Describe the indices from the first to the last one."""
    if in_time:
        if first == 0 and last == size - 2:
            return f"all {several} but the last"
        if last == size - 1:
            return f"{several} {first} and later"
    elif 2 * (last - first + 1) == size:
        if first == 0:
            return f"{several} {first}-{last} (the first half{of})"
        if last == size - 1:
            return f"{several} {first}-{last} (the second half{of})"
    return f"{several} {first}-{last} (of {size})"


def _every_other(first: int, several: str) -> str:
    words = f"even {several}"
    if first % 2:
        words = f"odd {several}"
    if first > 1:
        words += f" from {first} on"
    return words


def _ordinal(n: int) -> str:
    return {3: "third", 4: "fourth", 5: "fifth", 6: "sixth", 8: "eighth"}.get(n, f"{n}th")

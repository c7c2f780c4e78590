"""Mistakes in ALiBi: what scores lose for the distance of their keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from parity.core.case import Case
from parity.core.reference import Layer
from parity.core.stages import Values
from parity.diagnosis.mistakes.record import Mistake, Override, instead

FIX = "take slope * distance from the scaled scores, the distance counted from the place of the query among all keys"


def alibi(case: Case) -> Iterator[Mistake]:
    spec = case.spec
    if spec.alibi is None:
        return
    yield _times("missing", "scores lose nothing for the distance of their keys", 0.0)
    yield _times("added", "scores gain for the distance of their keys, and do not lose", -1.0)
    if spec.score_scale != 1.0:
        factor = 1.0 / spec.score_scale if spec.alibi.scaled else spec.score_scale
        words = "are not scaled as scores are" if spec.alibi.scaled else "are scaled as scores are"
        yield _times("not-scaled" if spec.alibi.scaled else "scaled", f"slopes {words}", factor)
    num_heads, num_kv_heads = spec.num_heads, spec.num_kv_heads
    n, largest = np.arange(1, num_heads + 1), 1 << (num_heads.bit_length() - 1)
    if largest != num_heads:
        yield _other_slopes(case, "evenly", "slopes are 2 ** (-8 n / N) though N is no power of two", n / num_heads)
        yield _other_slopes(
            case, "of-next-power", "slopes are the first of those of the next power of two", n / (2 * largest)
        )
    if num_kv_heads < num_heads:
        of_group = 1 + (n - 1) // (num_heads // num_kv_heads)
        about = "slopes are those of as many heads as there are key/value heads"
        yield _other_slopes(case, "of-kv-heads", about, of_group / num_kv_heads)
    if case.is_cached:
        yield _mistake(
            "restarted",
            "the distance is counted from the first key in each call with a cache",
            {"scores": _without_places},
        )


def _mistake(name: str, about: str, in_reference: dict[str, Override]) -> Mistake:
    return Mistake(f"alibi-{name}", about, FIX, "alibi", ("scores",), in_reference)


def _times(name: str, about: str, factor: float) -> Mistake:
    return _mistake(
        name,
        about,
        {"slopes": lambda layer, original: factor * original()},
    )


def _other_slopes(case: Case, name: str, about: str, exponents: np.ndarray) -> Mistake:
    """Slopes of other exponents, as shares of the largest."""
    alibi: Any = case.spec.alibi
    wrong = 2.0 ** (-alibi.max_bias * exponents)
    wrong = wrong * case.spec.score_scale if alibi.scaled else wrong
    return _mistake(f"slopes-{name}", about, {"slopes": instead(lambda: wrong)})


def _without_places(layer: Layer, original: Any, values: Values, *places: Any) -> dict[str, np.ndarray]:
    return original(values)

"""Mistakes in ALiBi: what scores lose for the distance of their keys."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from parity.core.case import Case
from parity.diagnosis.mistakes.record import Mistake, instead
from parity.diagnosis.mistakes.sites import RESTARTED, after


def alibi(case: Case) -> Iterator[Mistake]:
    spec, right = case.spec, case.spec.alibi
    if right is None:
        return
    mistake = partial(
        Mistake,
        fix="take slope * distance from the scaled scores, the distance counted from the place of the query among all "
        "keys",
        page="alibi",
        stages=("scores",),
    )
    factors = {
        "missing": (0.0, "scores lose nothing for the distance of their keys"),
        "added": (-1.0, "scores gain for the distance of their keys, and do not lose"),
    }
    if spec.score_scale != 1.0 and right.scaled:
        factors["not-scaled"] = 1.0 / spec.score_scale, "slopes are not scaled as scores are"
    elif spec.score_scale != 1.0:
        factors["scaled"] = spec.score_scale, "slopes are scaled as scores are"
    for name, (factor, about) in factors.items():
        yield mistake(f"alibi-{name}", about, {"slopes": after(lambda slopes, factor=factor: factor * slopes)})

    num_heads, num_kv_heads = spec.num_heads, spec.num_kv_heads
    n, largest = np.arange(1, num_heads + 1), 1 << (num_heads.bit_length() - 1)
    exponents = {}  # as shares of the largest
    if largest != num_heads:
        exponents["evenly"] = n / num_heads, "slopes are 2 ** (-8 n / N) though N is no power of two"
        about = "slopes are the first of those of the next power of two"
        exponents["of-next-power"] = n / (2 * largest), about
    if num_kv_heads < num_heads:
        of_group = 1 + (n - 1) // (num_heads // num_kv_heads)
        about = "slopes are those of as many heads as there are key/value heads"
        exponents["of-kv-heads"] = of_group / num_kv_heads, about
    for name, (shares, about) in exponents.items():
        slopes = 2.0 ** (-right.max_bias * shares) * (spec.score_scale if right.scaled else 1.0)
        yield mistake(f"alibi-slopes-{name}", about, {"slopes": instead(lambda slopes=slopes: slopes)})
    if case.is_cached:
        about = "the distance is counted from the first key in each call with a cache"
        yield mistake("alibi-restarted", about, RESTARTED)

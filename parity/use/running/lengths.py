"""The memory that a number of tokens needs, and features of layers that a run did not exercise."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from mha_spec import AttentionSpec, InputError
from parity.measure.core.case import Case
from parity.measure.core.exercise import features_of, more_cases
from parity.measure.core.records import JsonRecord

SCORES = 24
"""Arrays of scores in float64 that a comparison of all stages has in memory at its peak; measured
with 1024 tokens.
"""

GIB = 1 << 30
"""Bytes of a GiB."""


def gib_of(spec: AttentionSpec, num_tokens: int, batch: int = 2) -> float:
    """Return roughly how much memory a comparison of a layer needs, in GiB; its scores dominate."""
    # A float64 has 8 bytes.
    return SCORES * 8.0 * batch * spec.num_heads * num_tokens**2 / GIB


def check_memory(spec: AttentionSpec, num_tokens: int) -> None:
    """Reject a number of tokens whose scores exceed the memory of this machine.

    Raises:
        ValueError: if they do.
    """
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    except (AttributeError, OSError, ValueError):  # unknown on this system
        return
    needed = gib_of(spec, num_tokens)
    if needed > memory:
        rule = f"be small enough for {memory:.0f} GiB of memory"
        raise InputError("seq_len", rule, f"{num_tokens}, which needs about {needed:.0f} GiB")


@dataclass(frozen=True)
class NotExercised(JsonRecord):
    """A feature of layers that a run could not have shown to be right or wrong.

    Attributes:
        what: the feature in words.
        num_tokens: the largest number of tokens of the run.
        needed: smallest number of tokens that exercises it.
        gib: rough memory of a run with that many, in GiB.
        layers: names of the layers.
    """

    what: str
    num_tokens: int
    needed: int
    gib: float
    layers: list[str] = field(default_factory=list, compare=False)


def further_cases(
    cases_by_layer: Mapping[str, Sequence[Case]],
    dtypes: Iterable[str],
    *,
    with_more_tokens: bool = True,
) -> dict[str, list[Case]]:
    """Return further cases by layer, which exercise what those that were chosen do not.

    Only the first layer of each specification has some, because they test the features of layers,
    not their weights.

    Args:
        cases_by_layer: the cases of each layer.
        dtypes: names of the dtypes of the run.
        with_more_tokens: False if the number of tokens is fixed: then only positions differ.
    """
    dtypes = list(dtypes)
    specs: list[AttentionSpec] = []
    further: dict[str, list[Case]] = {}
    for layer, cases in cases_by_layer.items():
        further[layer] = []
        spec = cases[0].spec
        if spec in specs:
            continue
        specs.append(spec)
        for case in cases:
            further[layer] += more_cases(case, dtypes, with_more_tokens=with_more_tokens)
    return further


def not_exercised(
    cases_by_layer: Mapping[str, Sequence[Case]], dtypes: Iterable[str]
) -> list[NotExercised]:
    """Return the features of layers that no case of a layer of the same specification exercises,
    each once with its layers.

    Args:
        cases_by_layer: the cases that ran, by the name of their layer.
        dtypes: names of the dtypes of the run.
    """
    dtypes = list(dtypes)
    cases_by_spec: list[tuple[AttentionSpec, list[str], list[Case]]] = []
    for layer, cases in cases_by_layer.items():
        spec = cases[0].spec
        for other, layers, all_cases in cases_by_spec:
            if other == spec:
                layers.append(layer)
                all_cases.extend(cases)
                break
        else:
            cases_by_spec.append((spec, [layer], [*cases]))
    # Equal features of several specifications are one, because their layers do not count.
    entries: dict[NotExercised, NotExercised] = {}
    for spec, layers, cases in cases_by_spec:
        num_tokens = max(case.key_len for case in cases)
        for feature in features_of(spec, dtypes):
            if any(feature.is_exercised_by(case) for case in cases):
                continue
            gib = round(gib_of(spec, feature.needed), 2)
            entry = NotExercised(feature.what, num_tokens, feature.needed, gib)
            entries.setdefault(entry, entry).layers.extend(layers)
    return list(entries.values())

"""Known mistakes made in a sibling on purpose: what to change in its functions, or in its weights."""

from __future__ import annotations

import importlib
from functools import cache

from mha_spec import Refusal
from parity.backends import BACKENDS, load_backend
from parity.core.case import Case
from parity.core.problem import Problem
from parity.diagnosis.mistakes import PRECISIONS, Mistake, Plan, mistakes_for


@cache
def mistakes_of(case: Case) -> tuple[Mistake, ...]:
    """Every mistake that could be in a case, products that lose too much among them."""
    return (*mistakes_for(case), *(() if case.is_cached else PRECISIONS.values()))


def mistake_to_plant(name: str, case: Case) -> Mistake:
    """The one of a name that can be planted in a case.

    Raises:
        ValueError: if there is no such mistake.
    """
    for mistake in mistakes_of(case):
        if mistake.name == name and mistake.in_sibling is not None:
            return mistake
    raise Refusal("hypothesis", f"be one that can be planted in {case.name}", hypothesis=name)


def plan_of(hypothesis: str, problem: Problem, backend: str) -> Plan:
    """Say what to break in a sibling for a mistake; nothing where it has no name.

    Raises:
        ValueError: if there is no such mistake.
    """
    port, xp = load_backend(backend), importlib.import_module(BACKENDS[backend].arrays)
    plan = Plan(problem, port.SIBLING, xp, port, dict(problem.weights), {})
    make = mistake_to_plant(hypothesis, problem.case).in_sibling if hypothesis else None
    if make is not None:
        make(plan)
    return plan

"""The diagnosis of each port and its verdict, which tools/diagnosis-rates counts."""

from __future__ import annotations

import signal
import time
import types
import zlib
from collections.abc import Collection, Iterable
from itertools import permutations
from typing import Any, NamedTuple

import parity
from parity.explain.diagnosis.bugs import PRECISIONS, bugs_for
from parity.measure.core.case import Case
from parity.measure.core.problem import Problem
from parity.measure.core.stages import stage_named
from wild.accepted import ACCEPTED, ACCEPTED_PAGES
from wild.audit import ORDER, is_right
from wild.records import Bug, Right, half
from wild.sets import BUGS, RIGHTS

GIVES_UP = 60  # seconds of the CPU, after which a diagnosis counts as given up


class Job(NamedTuple):
    """One diagnosis: of a record, and of all its stages or of the output alone."""

    id: str
    output_only: bool = False

    @property
    def record(self) -> Right | Bug:
        """The port or the bug that is diagnosed."""
        return RIGHTS[self.id] if self.id in RIGHTS else BUGS[self.id]


Verdict = dict[str, Any]


class GaveUp(BaseException):
    """A diagnosis took too long. Not an `Exception`, so that no code in between catches it."""


def jobs(halves: Iterable[str], styles: Iterable[str] = (), only: Iterable[str] = ()) -> list[Job]:
    """Return the diagnoses to run, in an order in which any first part is a fair sample."""
    halves, styles, only = set(halves), set(styles), set(only)
    jobs_of_set: list[Job] = []
    for record in (*RIGHTS.values(), *BUGS.values()):
        if (only and record.id not in only) or (styles and record.style not in styles) or half(record.id) not in halves:
            continue
        jobs_of_set.append(Job(record.id))
        if isinstance(record, Bug):
            jobs_of_set.append(Job(record.id, output_only=True))
    return sorted(jobs_of_set, key=lambda job: zlib.crc32(f"order {job.id}".encode()))


def verdict_on(job: Job) -> Verdict:
    """Return the verdict of the diagnosis, together with the facts about its record."""
    record = job.record
    verdict: Verdict = {"id": job.id, "half": half(job.id), "style": record.style, "kind": record.kind}
    verdict |= {
        "case": record.case,
        "dtype": record.dtype,
        "is_right": isinstance(record, Right),
        "output_only": job.output_only,
    }
    if isinstance(record, Bug):
        verdict |= {
            "says": record.says,
            "stage": record.stage,
            "limited": dict(record.limited),
            "pattern": record.pattern,
        }
        verdict["in_output"] = record.in_output
        observed, problem = record.observed(output_only=job.output_only), record.problem
    else:
        if not is_right(record):
            raise AssertionError(f"{job.id} differs from the reference at its output")
        observed, problem = record.observed(), record.problem
    began = time.process_time()
    try:
        diagnosis = _in_time(observed, problem)
    except GaveUp:
        return verdict | {"verdict": "gave up", "seconds": time.process_time() - began, "names": [], "text": ""}
    except Exception as error:  # a diagnosis that fails is a result
        failed = {"verdict": "error", "seconds": time.process_time() - began, "names": []}
        return verdict | failed | {"text": f"{type(error).__name__}: {error}"}
    verdict |= {
        "verdict": diagnosis.kind,
        "seconds": time.process_time() - began,
        "text": str(diagnosis),
        "said": diagnosis.to_dict(),
    }
    explanations = _named(verdict)
    verdict["names"] = [name for explanation in explanations for name in explanation["bugs"]]
    verdict["others"] = [explanation["others"] for explanation in explanations]
    verdict["first"] = first_stage(diagnosis.stage, diagnosis.malformed)
    return verdict


def _in_time(observed: dict[str, Any], problem: Problem) -> parity.Diagnosis:
    """Return the diagnosis.

    Raises:
        GaveUp: if it takes longer than `GIVES_UP` seconds of the CPU.
    """

    def give_up(_: int, __: types.FrameType | None) -> None:
        raise GaveUp

    before = signal.signal(signal.SIGPROF, give_up)
    signal.setitimer(signal.ITIMER_PROF, GIVES_UP)
    try:
        return parity.diagnose(observed, problem)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def first_stage(stage: str, malformed: Iterable[str]) -> str:
    """Return the first stage that the diagnosis objects to."""
    named = {name for name in (stage, *malformed) if name}
    if not named:
        return ""
    if all(stage_named(name).is_gradient for name in named):
        return next(name for name in (stage, *malformed) if name)
    stages = [name for name in named if not stage_named(name).is_gradient]
    return min(stages, key=lambda name: ((stage_named(name).step or 0), ORDER.index(stage_named(name).kind)))


def is_clean(verdict: Verdict) -> bool:
    """Return whether the diagnosis finds nothing wrong."""
    return verdict["verdict"] in ("none", "convention") and not verdict["said"]["malformed"]


def is_caught(verdict: Verdict) -> bool:
    """Return whether it finds an error or, if the output does not show the bug, reports that the stage differs."""
    if verdict["verdict"] == "convention" and not verdict["in_output"]:
        return "differs" in verdict["said"]["conventions"].get(verdict["stage"], "")
    return verdict["verdict"] not in ("gave up", "error") and not is_clean(verdict)


def is_located(verdict: Verdict) -> bool:
    """Return whether it names a bug, or reports the location or the pattern of the first stage that differs."""
    unnamed = [finding for finding in verdict.get("said", {}).get("findings", []) if not finding["bugs"]]
    description = unnamed[0]["description"] if unnamed else None
    is_somewhere = description is not None and (
        description["location"]["words"] != "everywhere"
        or any("are NaN: only" in sign for sign in description["signs"])
    )
    return bool(verdict["names"]) or is_somewhere or bool(description and description["patterns"])


def _named(verdict: Verdict) -> list[dict[str, Any]]:
    """Return the findings that have a name, or the page of a family."""
    return [finding for finding in verdict["said"]["findings"] if finding["bugs"]]


GRADES = ("right", "one of several", "wrong", "none given", "to be classified")


def grade_of(verdict: Verdict) -> str:
    """Return whether the names given for a bug are right: one of `GRADES`.

    A pattern of a family has pages instead of a name: it is right if all of its pages are. `one of several`: if names
    are wrong, the diagnosis reports that it cannot distinguish them from a right one. An order of heads has no words
    before it is observed, and is not searched for there.
    """
    if not verdict["names"]:
        return "none given"
    if verdict["id"] not in ACCEPTED:
        return "to be classified"
    accepted, pages = ACCEPTED[verdict["id"]], ACCEPTED_PAGES[verdict["id"]]
    known = [finding for finding in _named(verdict) if not _is_pattern(finding)]
    patterns = [finding for finding in _named(verdict) if _is_pattern(finding)]
    if all(accepted.issuperset(finding["bugs"]) for finding in known) and all(
        pages >= {*finding["pages"]} for finding in patterns
    ):
        return "right"
    words = _words_for(accepted, BUGS[verdict["id"]].problem.case)
    is_said = all(accepted.issuperset(finding["bugs"]) or words & {*finding["others"]} for finding in known)
    return "one of several" if is_said and all(pages & {*finding["pages"]} for finding in patterns) else "wrong"


def _is_pattern(finding: dict[str, Any]) -> bool:
    """Return whether a finding is a pattern: then it has a description of the stage."""
    return finding.get("description") is not None


def _words_for(names: Collection[str], case: Case) -> set[str]:
    """Return the words for bugs, one or two at once, that the diagnosis may list as alternatives."""
    known = (*bugs_for(case), *PRECISIONS.values())
    abouts = {bug.about for bug in known if bug.name in names}
    return {*abouts, *(", and ".join(pair) for pair in permutations(abouts, 2))}

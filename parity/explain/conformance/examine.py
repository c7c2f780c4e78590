"""Determine by calls which conventions an attention follows, and whether it keeps its promises on
every path.

Each question perturbs something that must not matter (a future token, a masked key, another
sequence) or that must, and compares the outputs. This needs no reference, no weights and no
documentation, and works for functions of split heads and for layers. Libraries run different code
for the same call if weights are requested, in training, with gradients, or in a different dtype. So
every such path is tested, and paths that disagree are a finding themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any

from mha_spec import InputError
from parity.explain.conformance.answers import Answer, Conformance
from parity.explain.conformance.calls import Failed, RejectedCall
from parity.explain.conformance.discover import framework_of, made, subject_of
from parity.explain.conformance.examination import Examination
from parity.explain.conformance.peers import PEERS, peer
from parity.explain.conformance.questions import QUESTIONS
from parity.explain.conformance.rules import apply_promises, of_error
from parity.explain.conformance.subjects import DTYPES, TTNN_DTYPES, Subject
from parity.measure.core.user_code import name_of


def examine(
    target: Any,
    questions: Iterable[str] | None = None,
    dtypes: Sequence[str] | None = None,
    **declared: Any,
) -> Conformance:
    """Examine an attention function or layer with every question.

    Args:
        target: a `Subject`, or a function, module, class or factory in torch, JAX or ttnn, see
            `discover.made`.
        questions: names from `QUESTIONS`; default: all.
        dtypes: dtypes to test, the first one also with dropout; default: all, or bfloat16 for ttnn.
        declared: claims, and properties that cannot be detected: the keywords of
            `discover.subject_of`, and `params` of `made`.

    Raises:
        ValueError: if a question or dtype is unknown, a declaration is missing, or a plain call
            fails.
        TypeError: if constructing the target requires arguments.

    Example:
        >>> def attention(query, key, value):
        ...     return torch.softmax(query @ key.mT, -1) @ value
        >>> declared = {"framework": "torch", "axes": "BNTH"}
        >>> found = parity.examine(attention, ["scale"], ["float32"], **declared)
        >>> found["scale"].words
        '1 (none)'
    """
    questions = _checked_questions(questions)
    if isinstance(target, Subject):
        framework = target.framework
    else:
        declared["name"] = declared.get("name") or name_of(target)
        target = made(target, declared["name"], declared.pop("params", None))
        framework = declared.get("framework") or framework_of(target)
    _check_dtypes(dtypes or (), framework)
    with _surroundings(framework):
        subject = target
        if not isinstance(subject, Subject):
            subject = subject_of(target, **declared)
        answers = tuple(_answers(subject, questions, dtypes or subject.dtypes))
    requested = tuple(dtypes or ())
    return Conformance(
        subject.name, subject.framework, subject.version, answers, requested=requested
    )


def _checked_questions(questions: Iterable[str] | None) -> list[str]:
    """Return the names of the requested questions, by default of all.

    Raises:
        ValueError: if a name is unknown.
    """
    if questions is None:
        return list(QUESTIONS)
    names = list(questions)
    for name in names:
        if name in QUESTIONS:
            continue
        hint = ""
        similar = get_close_matches(name, QUESTIONS, 1)
        if similar:
            hint = f"did you mean {similar[0]!r}?"
        raise InputError(
            "a question", f"be one of {', '.join(QUESTIONS)}", question=name, hint=hint
        )
    return names


def _check_dtypes(dtypes: Sequence[str], framework: str | None) -> None:
    """Reject dtypes in which a framework cannot be examined."""
    supported, suffix = DTYPES, ""
    if framework == "ttnn":
        supported, suffix = TTNN_DTYPES, " for ttnn"
    unknown = [dtype for dtype in dtypes if dtype not in supported]
    if unknown:
        rule = f"be one of {', '.join(supported)}{suffix}"
        raise InputError("a dtype", rule, ", ".join(unknown))


@contextmanager
def _surroundings(framework: str | None) -> Iterator[None]:
    """Disable torch's threads, which only wait for each other on such small arrays.

    On a mock board of ttnn, values that a layer keeps on the device stay valid between calls.
    """
    if framework == "ttnn":
        from parity.measure.backends import load_backend

        with load_backend("tt").lock(TTNN_DTYPES[0]):
            yield
    elif framework == "torch":
        import torch

        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(num_threads)
    else:
        yield


def _answers(subject: Subject, questions: Iterable[str], dtypes: Sequence[str]) -> Iterator[Answer]:
    """Yield the answers to questions; an error outside of every path is an answer also."""
    examination = Examination(subject, dtypes)
    for name in questions:
        question = QUESTIONS[name]
        try:
            answer = question.ask(examination)
        except (RejectedCall, Failed) as error:
            answer = examination.only(question, of_error(error))
        yield apply_promises(answer, subject)


def examine_peers(
    names: Iterable[str] | None = None,
    questions: Iterable[str] | None = None,
    dtypes: Sequence[str] | None = None,
    on_subject: Callable[[str], None] | None = None,
) -> list[Conformance]:
    """Examine the attention of torch, JAX, Flax, Keras, Equinox and mha_*, as far as they are
    installed.

    Args:
        names: names from `parity.explain.conformance.peers.PEERS`; default: all.
        questions, dtypes: as in `examine`.
        on_subject: called before each subject, with its name; None for no calls.

    Raises:
        ImportError: if none of them is installed.
        ValueError: as in `examine`.
    """
    if names is None:
        names = PEERS
    reports = []
    for name in names:
        if on_subject is not None:
            on_subject(name)
        try:
            subject = peer(name)
        except ImportError as error:
            reports.append(Conformance(name, "", "", missing=str(error)))
            continue
        reports.append(examine(subject, questions, dtypes))
    if reports and all(report.missing for report in reports):
        reasons = dict.fromkeys(report.missing for report in reports)
        raise ImportError(f"at least one library must be installed, got {'; '.join(reasons)}")
    return reports

"""Determine by calls which conventions an attention follows, and whether it keeps its promises on
every path.

Each question perturbs something that must not matter (a future token, a masked key, another
sequence) or that must, and compares the outputs. This needs no reference, no weights and no
documentation, and works for functions of split heads and for layers. Libraries run different code
for the same call if weights are requested, in training, with gradients, or in another dtype. So
every such path is tested, and paths that disagree are a finding themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from mha_spec import InputError
from parity.explain.conformance.answers import Conformance
from parity.explain.conformance.calls import Failed, Refused
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
            `discover.subject_of`.
        questions: names from `QUESTIONS`; default: all.
        dtypes: dtypes to test, the first also with dropout; default: all, or bfloat16 for ttnn.
        declared: claims, and properties that cannot be detected: the keywords of `subject_of`.

    Raises:
        ValueError: if a question or dtype is unknown, a declaration is missing, or a plain call
            fails.
        TypeError: if constructing the target requires arguments.
    """
    questions = list(QUESTIONS if questions is None else questions)
    for question in questions:
        if question not in QUESTIONS:
            meant = get_close_matches(question, QUESTIONS, 1)
            hint = f"did you mean {meant[0]!r}?" if meant else ""
            raise InputError(
                "a question", f"be one of {', '.join(QUESTIONS)}", question=question, hint=hint
            )
    if isinstance(target, Subject):
        framework = target.framework
    else:
        declared["name"] = declared.get("name") or name_of(target)
        target = made(target, declared["name"], declared.pop("params", None))
        framework = declared.get("framework") or framework_of(target)
    known = TTNN_DTYPES if framework == "ttnn" else DTYPES
    if unknown := [dtype for dtype in dtypes or () if dtype not in known]:
        of = " for ttnn" if framework == "ttnn" else ""
        raise InputError("a dtype", f"be one of {', '.join(known)}{of}", ", ".join(unknown))
    with _surroundings(framework):
        subject = target if isinstance(target, Subject) else subject_of(target, **declared)
        found = _answers(subject, questions, dtypes or subject.dtypes)
    return replace(found, requested=tuple(dtypes or ()))


@contextmanager
def _surroundings(framework: str | None) -> Iterator[None]:
    """Disable torch's threads, which only wait for each other on such small arrays.

    On a mock board of ttnn, values that a layer keeps on the device stay valid between calls.
    """
    if framework == "ttnn":
        from parity.measure.backends import load_backend

        with load_backend("tt").lock(TTNN_DTYPES[0]):
            yield
        return
    if framework != "torch":
        yield
        return
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _answers(subject: Subject, questions: Iterable[str], dtypes: Sequence[str]) -> Conformance:
    examination = Examination(subject, dtypes)
    answers = []
    for question in map(QUESTIONS.__getitem__, questions):
        try:
            answer = question.ask(examination)
        except (Refused, Failed) as error:
            answer = examination.only(question, of_error(error))
        answers.append(apply_promises(answer, subject))
    return Conformance(subject.name, subject.framework, subject.version, tuple(answers))


def examine_peers(
    names: Iterable[str] | None = None,
    questions: Iterable[str] | None = None,
    dtypes: Sequence[str] | None = None,
    on_subject: Callable[[str], None] = lambda name: None,
) -> list[Conformance]:
    """Examine the attention of torch, JAX, Flax, Keras, Equinox and mha_*, as far as they are
    installed.

    Args:
        names: names from `parity.explain.conformance.peers.PEERS`; default: all.
        questions, dtypes: as in `examine`.
        on_subject: called before each subject, with its name.

    Raises:
        ImportError: if none of them is installed.
        ValueError: as in `examine`.
    """
    found = []
    for name in PEERS if names is None else names:
        on_subject(name)
        try:
            subject = peer(name)
        except ImportError as error:
            found.append(Conformance(name, "", "", missing=str(error)))
            continue
        found.append(examine(subject, questions, dtypes))
    if found and all(subject.missing for subject in found):
        missing = dict.fromkeys(subject.missing for subject in found)
        raise ImportError(f"at least one library must be installed, got {'; '.join(missing)}")
    return found

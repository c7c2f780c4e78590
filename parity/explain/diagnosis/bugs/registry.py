"""Bugs from outside, which users and other packages register in addition to the known ones."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np

from mha_spec import AttentionSpec, InputError, InputTypeError
from parity.explain.diagnosis.bugs.record import Edit, Override
from parity.explain.diagnosis.bugs.specs import spec_edit
from parity.measure.core.case import Case
from parity.measure.core.plugins import load_plugins, text_of_error
from parity.measure.core.reference import Layer
from parity.measure.text import in_line

ENTRY_POINTS = "mha_parity.bugs"
"""Group of the entry points by which installed packages offer bugs."""

Wrong = AttentionSpec | Mapping[str, Override] | None
"""The layer with a bug: a different specification, or overrides of the reference by method; None
for a layer that cannot have the bug.
"""


@dataclass(frozen=True)
class OwnBug:
    """A bug that a user or a package registered.

    Attributes:
        name: in reports and on the command line.
        about: its description in a line.
        edit: returns the layer with the bug, from the specification of the right one.
        fix: an instruction in a line.
        page: the text of its page, in Markdown.
        stages: the stages of which one must show it first.
    """

    name: str
    about: str
    edit: Callable[[AttentionSpec], Wrong]
    fix: str
    page: str
    stages: tuple[str, ...]

    def edit_of(self, case: Case) -> Edit | None:
        """Return the edit of a case; None if the case cannot have the bug.

        Raises:
            TypeError: if `edit` returns something else than `register_bug` describes.
            ValueError: if it overrides a method that the reference does not have.
        """
        wrong = self.edit(case.spec)
        if wrong is None or wrong == case.spec:
            return None
        if isinstance(wrong, AttentionSpec):
            edit = spec_edit(case.spec, wrong)
        elif isinstance(wrong, Mapping):
            _check_overrides(self.name, wrong)
            overrides = {
                method: partial(_with_copies, override) for method, override in wrong.items()
            }
            edit = Edit(overrides=overrides)
        else:
            rule = "return an AttentionSpec, overrides of the reference by method, or None"
            raise InputTypeError(f"the edit of {self.name}", rule, type(wrong).__name__)
        return replace(
            edit,
            name=self.name,
            about=self.about,
            pages=(self.name,),
            fixes=(self.fix,),
            stages=self.stages,
            is_registered=True,
        )


def _with_copies(override: Override, layer: Layer, original: Any, *inputs: Any) -> Any:
    """Call an override with copies of arrays, which it may change in place.

    The layer's own arrays belong to the problem, or are shared with other edits.
    """

    def copying(*values: Any) -> Any:
        return _copied(original(*values))

    return override(layer, copying, *[_copied(value) for value in inputs])


def _copied(value: Any) -> Any:
    """Return a copy of an array, or of each array by name; other values as they are."""
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, Mapping):
        return {name: _copied(x) for name, x in value.items()}
    return value


def _check_overrides(name: str, overrides: Mapping[str, Override]) -> None:
    """Reject overrides of methods that the reference does not have."""
    for method, override in overrides.items():
        is_method = isinstance(method, str) and callable(getattr(Layer, method, None))
        if not is_method or method.startswith("_"):
            rule = "override methods of the reference, parity.measure.core.reference.Layer"
            raise InputError(f"the edit of {name}", rule, repr(method))
        if not callable(override):
            rule = "override methods by functions"
            raise InputTypeError(f"the edit of {name}", rule, type(override).__name__)


OWN_BUGS: dict[str, OwnBug] = {}
"""The registered bugs by name."""


@cache  # a package that fails is reported once
def load_entry_points() -> None:
    """Call the entry points of the group `mha_parity.bugs`, once in a process.

    Each is a function without arguments that calls `register_bug`. If it fails, none of its bugs is
    known.
    """
    load_plugins(ENTRY_POINTS, "bugs", _register_package)


def _register_package(register: Callable[[], object]) -> None:
    """Call a function that registers bugs; leave none of them if it fails."""
    before = dict(OWN_BUGS)
    try:
        register()
    except BaseException:
        OWN_BUGS.clear()
        OWN_BUGS.update(before)
        raise


def own_bugs(case: Case) -> Iterator[Edit]:
    """Yield the registered bugs that a case could have, including bugs of installed packages.

    One whose edit fails is left out with a warning: a broken bug must not prevent a diagnosis that
    does not need it.
    """
    load_entry_points()
    for bug in tuple(OWN_BUGS.values()):  # an edit may register more
        try:
            edit = bug.edit_of(case)
        except KeyboardInterrupt:  # of the user
            raise
        except BaseException as error:  # code of another package may raise anything
            words = in_line(f"{bug.name}: {text_of_error(error)}")
            warnings.warn(f"a registered bug is left out: {words}", stacklevel=2)
            continue
        if edit is not None:
            yield edit

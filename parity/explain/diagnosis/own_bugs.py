"""Registration of bugs from outside."""

from __future__ import annotations

import re
from collections.abc import Callable

from mha_spec import AttentionSpec, InputError, InputTypeError
from parity.explain.diagnosis.bugs import page_by_known_bug
from parity.explain.diagnosis.bugs.registry import OWN_BUGS, OwnBug, Wrong
from parity.measure.core.stages import STAGES
from parity.measure.text import in_line, printable

NAME = re.compile("[a-z0-9]+(-[a-z0-9]+)*")
"""Names of bugs: lowercase words, joined by hyphens."""


def register_bug(
    name: str,
    about: str,
    *,
    edit: Callable[[AttentionSpec], Wrong],
    fix: str,
    page: str,
    stages: tuple[str, ...] | list[str],
) -> None:
    """Make a bug known, in this process, to the diagnosis and to `mha-parity bugs`.

    It is tried after the bugs of this package, and reported like one of them, only if the reference
    with this bug reproduces the observed values. It replaces a bug that was registered earlier
    under its name.

    Args:
        name: its name in reports, lowercase words joined by hyphens.
        about: a description in one line, such as `the scale is 1 / N instead of 1 / sqrt(H)`.
        edit: takes the specification of a layer, and returns the layer with the bug: a wrong
            `AttentionSpec`; or a mapping from methods of the reference,
            `parity.measure.core.reference.Layer`, to functions that replace them, called as
            `override(layer, original, *inputs)`; or None if the layer cannot have the bug.
        fix: an instruction in one line.
        page: the text of its page, in Markdown, which `mha-parity bugs NAME` prints.
        stages: names of the stages, one of which shows the bug first, such as `scores`.

    Raises:
        TypeError: if an argument has a wrong type.
        ValueError: if a bug or a page of this package has the name, a text is empty, or a stage is
            unknown.

    Example:
        >>> from dataclasses import replace
        >>> parity.register_bug(
        ...     "scale-by-heads",
        ...     "the scale is 1 / N instead of 1 / sqrt(H)",
        ...     edit=lambda spec: replace(spec, scale=1 / spec.num_heads),
        ...     fix="divide the scores by sqrt(head_dim)",
        ...     page="# The scale is 1 / N",
        ...     stages=["scores"],
        ... )
    """
    for argument, text in {"name": name, "about": about, "fix": fix, "page": page}.items():
        if not isinstance(text, str):
            raise InputTypeError(argument, "be a string", type(text).__name__)
        if not text.strip():
            raise InputError(argument, "have a text", repr(text))
    if not NAME.fullmatch(name):
        raise InputError("name", "be lowercase words, joined by hyphens", repr(name))
    if not callable(edit):
        raise InputTypeError("edit", "be a function", type(edit).__name__)
    if isinstance(stages, str):
        raise InputTypeError("stages", "be a list of names of stages", repr(stages))
    unknown = [stage for stage in stages if stage not in STAGES]
    if unknown or not stages:
        names = ", ".join(stage for stage in STAGES if "." not in stage)
        raise InputError("stages", f"be names of stages, {names}", repr(list(stages)))
    if name in _names_of_package():
        raise InputError("name", "be a name that no known bug or page has", repr(name))
    OWN_BUGS[name] = OwnBug(
        name, in_line(about), edit, in_line(fix), printable(page), tuple(stages)
    )


def _names_of_package() -> set[str]:
    """Return the names of the bugs and the pages of this package."""
    pages = page_by_known_bug()
    return {*pages, *pages.values()}

"""Edits of the reference: the ways in which a computation may be wrong.

A known bug, a number that was fitted to a stage, and a weight read as a different one are the same
kind of record. They differ only in how they are found.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mha_spec import AttentionSpec
from parity.measure.core.records import JsonRecord, as_json

Override = Callable[..., Any]
"""Replaces a method of the reference: `override(layer, original, *inputs)`.

The original is the replaced method, or the override of another edit.
"""


@dataclass(frozen=True)
class WrongField:
    """A field of `AttentionSpec` with a wrong value: a fix as data.

    Attributes:
        field: the name of the field, such as `rope.theta`.
        actual: the value that the implementation uses.
        expected: the value that it should use.

    Raises:
        ValueError: if they are equal: the field is right, and something else is wrong.
    """

    field: str
    actual: Any
    expected: Any

    def __post_init__(self) -> None:
        if self.actual == self.expected:
            raise ValueError(f"{self.field} is {self.actual!r} instead of the same value")

    def to_dict(self) -> dict[str, Any]:
        """Return the field for JSON: `{"field": "rope.theta", "is": 5e5, "should_be": 1e4}`."""
        return {
            "field": self.field,
            "is": as_json(self.actual),
            "should_be": as_json(self.expected),
        }


class OverridesOfSpec(dict[str, Override]):
    """Overrides that together make a layer one of a wrong specification.

    Attributes:
        wrong_fields: the fields in which that specification is wrong.
    """

    def __init__(
        self, overrides: Mapping[str, Override], wrong_fields: tuple[WrongField, ...]
    ) -> None:
        super().__init__(overrides)
        self.wrong_fields = wrong_fields


def wrong_fields_of(overrides: Mapping[str, Override]) -> tuple[WrongField, ...]:
    """Return the wrong fields of a specification to which overrides amount; empty if to none."""
    if isinstance(overrides, OverridesOfSpec):
        return overrides.wrong_fields
    return ()


@dataclass(frozen=True, eq=False)
class Edit(JsonRecord):
    """One way in which a computation may be wrong.

    An edit that neither overrides a method nor changes the specification describes the values of
    one stage alone: it explains them, and cannot be injected into the reference.

    Attributes:
        name: its name in reports and on the command line; two forms of a bug may share one. For a
            pattern, its kind, such as `factor`.
        about: a description, such as `the scores are not scaled`.
        overrides: what it overrides in the reference, by the methods of `reference.Layer`.
        spec: the specification that the layer has instead of its own; None for its own.
        pages: its pages in parity/bugs; several if it may belong to any of them.
        fixes: an instruction in one line for each of them.
        stages: the stages of which one must show it first; empty if any may.
        is_loss: True if it only loses precision. Such bugs are tried last and alone, if the error
            is small.
        shows_in_narrow: True if lost precision also shows in bfloat16 and float16.
        is_rounding: True if it only rounds differently: it must reproduce what was observed, up to
            single values.
        has_more_noise: True if values with it have much more rounding error than right ones.
        shows_alone: True if it shows in a layer that is otherwise right; otherwise it is tried with
            others.
        calls: the calls of a cache that have it; None for every call.
        when: the description of these calls; empty for every call.
        sequences: the only sequences of a batch that it changes; None if it may change any.
        is_registered: True if a user or another package registered it.
        fitted: the values that were fitted to a stage, by name.
        parameters: how many they are: fewer are simpler.
        backward: what it overrides in the backward pass, by the methods of `reference.Backward`.
        wrong_fields: the fields of the specification in which the layer with it is wrong; empty if
            it is not a wrong specification.
    """

    name: str = ""
    about: str = ""
    overrides: Mapping[str, Override] = field(default_factory=dict, repr=False)
    spec: AttentionSpec | None = field(default=None, repr=False)
    pages: tuple[str, ...] = ()
    fixes: tuple[str, ...] = ()
    stages: tuple[str, ...] = ()
    is_loss: bool = False
    shows_in_narrow: bool = False
    is_rounding: bool = False
    has_more_noise: bool = False
    shows_alone: bool = True
    calls: frozenset[int] | None = None
    when: str = ""
    sequences: frozenset[int] | None = None
    is_registered: bool = False
    fitted: Mapping[str, Any] = field(default_factory=dict)
    parameters: int = 0
    backward: Mapping[str, Override] = field(default_factory=dict, repr=False)
    wrong_fields: tuple[WrongField, ...] = ()

    IN_JSON = ("name", "about", "fitted", "parameters", "pages", "fixes")

    @property
    def page(self) -> str:
        """Its first page; empty if it has none."""
        return self.pages[0] if self.pages else ""

    @property
    def fix(self) -> str:
        """The fixes in a line."""
        return "; ".join(self.fixes)

    @property
    def sentence(self) -> str:
        """The description, with the calls that have it."""
        return f"{self.about}, {self.when}" if self.when else self.about

    @property
    def is_injectable(self) -> bool:
        """True if the reference can be computed with it."""
        return bool(self.overrides or self.backward) or self.spec is not None


Edits = tuple[Edit, ...]
"""Edits of one layer, the first of them outermost."""


def known_bug(
    name: str,
    about: str,
    overrides: Mapping[str, Override],
    fix: str,
    page: str,
    stages: tuple[str, ...],
    is_loss: bool = False,
    shows_in_narrow: bool = False,
    is_rounding: bool = False,
    shows_alone: bool = True,
) -> Edit:
    """Return an edit that has a name, one page and one fix; see `Edit` for the arguments."""
    return Edit(
        name,
        about,
        overrides,
        pages=(page,),
        fixes=(fix,),
        stages=stages,
        is_loss=is_loss,
        shows_in_narrow=shows_in_narrow,
        is_rounding=is_rounding,
        shows_alone=shows_alone,
        wrong_fields=wrong_fields_of(overrides),
    )


def pattern(
    name: str,
    about: str,
    fitted: Mapping[str, Any] | None = None,
    parameters: int = 0,
    *,
    injected: Edit | None = None,
) -> Edit:
    """Return an edit that was fitted to a stage.

    Args:
        name: name of its kind, such as `factor`.
        about: a description, with the values.
        fitted: the fitted values by name.
        parameters: how many they are.
        injected: the same change of the reference, in every call; None if the pattern concerns one
            stage alone.
    """
    if injected is None:
        injected = Edit()
    return Edit(
        name,
        about,
        injected.overrides,
        injected.spec,
        fitted=fitted or {},
        parameters=parameters,
        wrong_fields=injected.wrong_fields,
    )


def with_spec(spec: AttentionSpec) -> Edit:
    """Return an edit without a name that changes the specification of the layer."""
    return Edit(spec=spec)


def instead(function: Callable[..., Any]) -> Override:
    """Return an override that needs only the inputs."""

    def override(_: Any, original: Any, *inputs: Any) -> Any:
        return function(*inputs)

    return override

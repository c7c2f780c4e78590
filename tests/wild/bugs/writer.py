"""The shorthand in which the bugs of a style are written."""

from __future__ import annotations

from collections.abc import Mapping

from wild.records import Bug


class Writer:
    """Collects the bugs of one style."""

    def __init__(self, style: str, case: str, recording: str = "plain", *, in_output: bool = True) -> None:
        self.style, self.case, self.recording, self.in_output = style, case, recording, in_output
        self.made: list[Bug] = []

    def __call__(
        self,
        name: str,
        kind: str,
        edit: tuple[str, str],
        says: str,
        stage: str,
        *,
        pattern: str = "",
        limited: Mapping[str, tuple[int, ...]] | None = None,
        in_output: bool | None = None,
        case: str = "",
        dtype: str = "float32",
        recording: str = "",
    ) -> None:
        """One bug: see `Bug`; its id begins with its style."""
        if in_output is None:
            in_output = self.in_output
        given = (self.style, case or self.case, kind, edit, says, stage, limited or {}, pattern, in_output, dtype)
        self.made.append(Bug(f"{self.style}-{name}", *given, recording or self.recording))

"""What several commands say."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mha_spec import Refusal


def say(text: str, status: int) -> int:
    """Say in one line on standard error why a command ends, and give back its exit status."""
    print(f"mha-parity: {'; '.join(filter(None, map(str.strip, text.splitlines())))}", file=sys.stderr)
    return status


def warn(text: object) -> None:
    """Say on standard error what one should know of a command that goes on."""
    print(f"mha-parity: warning: {text}", file=sys.stderr)


def refusal(argument: str, rule: str, got: Mapping[str, Any] | str = "", /, **values: Any) -> Refusal:
    """A refusal of what a command line says; its class is imported late, because help must be fast."""
    from mha_spec import Refusal

    return Refusal(argument, rule, got, **values)


def near(name: str, known: Collection[str]) -> str:
    """The names that are nearest to one that is not known, as the end of a message."""
    found = difflib.get_close_matches(name, known, n=5, cutoff=0.5)
    return f"; near it: {', '.join(found)}" if found else ""


def no_framework() -> str:
    """Why no backend can run, and what to do about it."""
    from parity.backends import BACKENDS, why_missing

    reasons = "; ".join(str(why_missing(name)) for name in BACKENDS)
    return f"at least one backend must be installed: {reasons}. One is enough: pip install torch, or jax and flax"

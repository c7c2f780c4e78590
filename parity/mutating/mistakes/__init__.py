"""The known mistakes that can be planted in a user's attention, by the names of `mha-parity bugs`."""

from __future__ import annotations

from parity.mutating.calls import Planted
from parity.mutating.mistakes.buffers import BUFFERS
from parity.mutating.mistakes.extras import EXTRAS
from parity.mutating.mistakes.inputs import INPUTS
from parity.mutating.mistakes.masks import MASKS
from parity.mutating.mistakes.ours import OURS
from parity.mutating.mistakes.projections import HEADS_REORDERED, PROJECTED
from parity.mutating.mistakes.rope import ROPE
from parity.mutating.view import View

MISTAKES = (*MASKS, *BUFFERS, *PROJECTED, *INPUTS, *HEADS_REORDERED, *EXTRAS, *ROPE, *OURS)
"""In the order in which they are planted; of those of one name the first that a callable allows is."""


def names() -> list[str]:
    """Every name once."""
    return list(dict.fromkeys(mistake.name for mistake in MISTAKES))


def planted_in(view: View) -> tuple[dict[str, Planted], dict[str, str]]:
    """What can be planted in a callable, by name; and what cannot, with the reason."""
    fit: dict[str, Planted] = {}
    reasons: dict[str, str] = {}
    for mistake in MISTAKES:
        if reason := mistake.why_not(view):
            reasons.setdefault(mistake.name, reason)
        else:
            fit.setdefault(mistake.name, mistake)
    return fit, {name: reason for name, reason in reasons.items() if name not in fit}


def page_of(name: str) -> str:
    """The page of a mistake, for `mha-parity bugs`."""
    from parity.diagnosis.mistakes import page_by_mistake

    return page_by_mistake()[name]

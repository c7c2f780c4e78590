"""The known bugs that can be injected into a user's attention, under their names in `mha-parity
bugs`.

An injection has the name of an `Edit` of the reference, and its description and page from there.
Its change is written here again: an edit overrides methods of the reference, in NumPy, while an
injection changes the arguments, parameters or result of code that has no such methods, in arrays of
torch or JAX that may be traced.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from parity.explain.mutating.bugs.buffers import BUFFERS
from parity.explain.mutating.bugs.extras import EXTRAS
from parity.explain.mutating.bugs.inputs import INPUTS
from parity.explain.mutating.bugs.masks import MASKS
from parity.explain.mutating.bugs.ours import OURS
from parity.explain.mutating.bugs.projections import HEADS_REORDERED, PROJECTED
from parity.explain.mutating.bugs.rope import ROPE, THETAS
from parity.explain.mutating.calls import Injection
from parity.explain.mutating.view import View

if TYPE_CHECKING:
    from parity.explain.diagnosis.bugs import Edit

BUGS = (*MASKS, *BUFFERS, *PROJECTED, *INPUTS, *HEADS_REORDERED, *EXTRAS, *ROPE, *OURS)
"""The bugs, in the order of injection; of several with one name, the first that a callable allows
counts.
"""


def names() -> list[str]:
    """Return every name once."""
    return list(dict.fromkeys(bug.name for bug in BUGS))


def injections_for(view: View) -> tuple[dict[str, Injection], dict[str, str]]:
    """Return the bugs that can be injected into a callable, by name; and the reasons for the
    others.
    """
    fit: dict[str, Injection] = {}
    reasons: dict[str, str] = {}
    for bug in BUGS:
        if reason := bug.why_not(view):
            reasons.setdefault(bug.name, reason)
        else:
            fit.setdefault(bug.name, bug)
    return fit, {name: reason for name, reason in reasons.items() if name not in fit}


WORDS = {
    "q-k-swapped": "queries and keys are exchanged",
    "k-v-swapped": "keys and values are exchanged",
    "q-v-swapped": "queries and values are exchanged",
    "scale-missing": "the scale of the scores is missing",
    "scale-ignored": "the scale argument is ignored",
    "scale-squared": "the scale is applied twice",
    "scale-by-d-model": "the scale is 1 / sqrt(d_model)",
    "precision-bfloat16": "the inputs are rounded to bfloat16",
    **{f"rope-theta-{theta}": f"RoPE's theta is {theta}" for theta in THETAS},
}
"""Descriptions of bugs that the diagnosis describes by the specification of a layer, or that are
injected into inputs instead of weights or products.
"""


def about_of(name: str) -> str:
    """Return the description of a bug."""
    return WORDS.get(name) or _known(name).about


def page_of(name: str) -> str:
    """Return the page of a bug, for `mha-parity bugs`."""
    return _known(name).page


def _known(name: str) -> Edit:
    from parity.explain.diagnosis.bugs import (
        bug_by_name,
    )  # slow to import, and a user's tests don't need it

    return bug_by_name()[name]

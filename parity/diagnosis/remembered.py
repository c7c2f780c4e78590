"""The reference that remembers, as a change of it."""

from __future__ import annotations

from parity.core.reference import Remembered
from parity.diagnosis.mistakes.record import Changed


def remembering(found: Remembered | None = None) -> Changed:
    """The reference, which computes a projection of an input of its problem, and a table, once for each arithmetic.

    It must be the innermost change, and serve layers of one set of weights and inputs.
    """
    found = found or Remembered()
    return Changed({"linear": found.linear, "tables": found.tables})

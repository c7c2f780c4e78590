"""Patterns: where a stage differs that no known bug explains, and how.

`describe` returns the heads, sequences, positions and features that exceed the budget, and the
operation on the expected values there: multiplied, exchanged, rotated by a different frequency. A
pattern is verified: applied to the expected values, it leaves only rounding error.
"""

from parity.explain.diagnosis.fits.describe import EVERYWHERE, describe, location_of
from parity.explain.diagnosis.fits.record import Description, Location

__all__ = ["EVERYWHERE", "Description", "Location", "describe", "location_of"]

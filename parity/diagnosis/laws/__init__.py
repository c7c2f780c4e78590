"""What is wrong with a stage that no known mistake explains: where, and by what law.

`describe` says which heads, sequences, positions and features are beyond the budget, and what was done to the expected
values there: multiplied, exchanged, rotated by another frequency. A law is told only if it was verified: applied to the
expected values, it leaves nothing but rounding.
"""

from parity.diagnosis.laws.describe import describe
from parity.diagnosis.laws.record import Findings, Law, Place

__all__ = ["Findings", "Law", "Place", "describe"]

"""Contents of a diagnosis."""

from parity import Diagnosis


def named_bugs(diagnosis: Diagnosis) -> list[str]:
    """Return the names of the bugs in the findings of a diagnosis, in their order."""
    return [name for finding in diagnosis.named for name in finding.bugs]

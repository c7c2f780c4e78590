"""`assert_parity`, and the pytest plugin.

- `Comparison` (`parity.measure.core.compare`): the verdict on one stage.
- `ConventionWarning` (`assertion`): a stage is right, but recorded in a different convention.
- `Operations` (`operations`): which ttnn operations of a program were compared.

Start at `assertion.assert_parity`. It imports the diagnosis only when a comparison fails,
and no cases, files or reports.
"""

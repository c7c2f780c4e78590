"""Name the bug that explains a difference from the reference.

The reference is run again with one bug, or one change fitted to the data, at a time. An explanation
counts only if the changed reference reproduces the observed stages up to rounding.

- `Bug` (`bugs`): a known bug: what it overrides in the reference, and its page in
  `parity/bugs`.
- `Trial` (`trial`): the reference, run again from a stage on with a bug in it.
- `Diagnosis` (`verdicts`): the verdict, its evidence and a fix.

Start at `diagnose.diagnose`; `search` decides which bugs and pairs of bugs are tried, and in which
order.
"""

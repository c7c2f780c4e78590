"""Name the bug that explains a difference from the reference.

The reference is run again with one edit at a time: a known bug, or a change that was fitted to the
data. An edit explains a stage only if the edited reference reproduces what was observed, up to
rounding.

- `Edit` (`bugs`): one way in which a computation may be wrong: what it overrides in the reference,
  and its page in `parity/bugs`.
- `Trial` (`trial`): the reference with edits, computed from the observed stages before each stage.
- `Finding` and `Diagnosis` (`findings`): one cause with its evidence and fix, and all of them.

Start at `diagnose.diagnose`; `search` decides which edits are tried, and in which order.
"""

"""Name the bug that explains a difference from the reference.

The reference is run again with one edit at a time: a known bug, or a change that was fitted to the
data. An edit explains a stage only if the edited reference reproduces what was observed, up to
rounding.

- `Edit` (`bugs`): one way in which a computation may be wrong: what it overrides in the reference,
  and its page in `parity/bugs`.
- `Trial` (`trial`): the reference with edits, computed from the observed stages before each stage.
- `Finding` and `Diagnosis` (`findings`): one cause with its evidence and fix, and all of them.

Start at `diagnose.diagnose`. The way from stages to findings, and its files:

1. `views`: the ways to read the stages, by `readings` and `choices`.
2. `search`: which edits are tried, and in which order: known bugs (`bugs`), then `patterns`, which
   `fits` describes.
3. `trial`: whether an edit explains a stage. `changed_layer` is the reference with edits; `flow`
   and `remembered` avoid computing what an edit does not change, and `work` counts the rest.
4. `findings`: the report.

`at_size`, `sampling`, `sample`, `sampled_layer`, `whole` and `absorbed` are for large layers,
`taps` and the other `tap` files for recorded models, `ranks` for divided layers, and `weights` for
two files.
"""

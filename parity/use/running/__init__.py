"""Cases x backends -> report, recorded here or read from traces.

- `Report` (`report`): the comparisons of a run, and where it ran.
- `Elsewhere` (`elsewhere`): a run by the Python of another environment, which saves traces.
- `NotExercised` (`lengths`): a feature that sequences of this length cannot show to be wrong.

Start at `run.run_cases`. `models` runs the layers of a model and `taps` compares recordings of one;
`jobs` divides a run among processes, and `traces` writes and reads its stages.
"""

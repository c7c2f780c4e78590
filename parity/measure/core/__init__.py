"""Cases, the reference, the error budget and comparisons.

- `Case` (`case`): a specification and what a call passes; `cases` has all that a run checks.
- `Problem` (`problem`): a case with weights, inputs and the reference's stages.
- `STAGES` (`stages`): all stages, in the order of the data flow.
- `Trace` (`trace`): the stages that one backend computed.
- `Comparison` (`compare`): one stage of two implementations, its error and its budget. `budget` is
  the error that a stage may have.
- `weights`: canonical weights and their files.

Start at `problem.make_problem`. `reference` computes attention in float64 from the formulas, and
shares no code with the implementations it checks.
"""

"""Cases, the reference, the error budget and comparisons.

- `Case` (`case`): a specification and what a call passes; `cases` has all that a run checks.
- `Problem` (`problem`): a case with weights, inputs and the reference's stages.
- `Comparison` (`compare`): one stage of two implementations, with the error and the budget it was
  held to.

Start at `problem.make_problem`. `reference` computes attention in float64 from the formulas, and
shares no code with the implementations it checks.
"""

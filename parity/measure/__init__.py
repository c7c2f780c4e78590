"""Run cases in each framework and compare them with a float64 reference, stage by stage.

The lowest wing: it knows what attention computes, the canonical names and shapes of its weights,
and how large an error may be. It knows no weight names of other libraries and no bugs, and it
prints nothing.

- `core`: cases, the reference, the error budget, comparisons. Start at `core.problem.make_problem`
  and `core.compare.first_difference`.
- `backends`: the same weights in mha_jax, mha_torch and mha_tt.
- `sharding`: weights and stages divided over ranks.
- `files`: reading and writing named tensors.
- `pretrained`: trained layers with real inputs.
- `text`: text of files and errors, made safe to print.
"""

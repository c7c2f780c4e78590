"""Two sets of weights that should be the same attention: where they differ, how, and which bug
explains it.

- `differences`: tensor by tensor, in units in the last place (`ulps`). Relations of two tensors are
  in `patterns`, other weights of the same function in `same_function`, and rows of q, k and v that
  are in other tensors in `packings`; `roles` says where heads and features are.
- `verify`: stage by stage, on probe inputs.
- `diagnose`: by the known bugs, which are tried on those inputs.

Relations have the pages and fixes of the families of bugs (`bugs.families`).
"""

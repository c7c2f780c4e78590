"""Leaves out folders of frameworks that are not installed: .venv has JAX and PyTorch, .venv-tt has ttnn.

The modules of this folder are for every implementation and run in both environments.
"""

from importlib.util import find_spec

from helpers.tt import MOCK_BOARD, RECORDED_BOARD

collect_ignore = []
if find_spec("ttnn") is None:
    collect_ignore.append("mha_tt")
elif MOCK_BOARD != RECORDED_BOARD:
    collect_ignore.append("mha_tt/test_recorded_cases.py")
if find_spec("jax") is None:
    collect_ignore += ["jax_and_torch", "mha_jax", "mha_torch"]

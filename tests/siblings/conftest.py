"""Leaves out folders of frameworks that are not installed: .venv has JAX and PyTorch, .venv-tt has
ttnn.

The modules of this folder are for every implementation and run in both environments.
"""

from helpers import HAS_JAX, HAS_TTNN
from helpers.tt import MOCK_BOARD, RECORDED_BOARD

collect_ignore = []
if not HAS_TTNN:
    collect_ignore.append("mha_tt")
elif MOCK_BOARD != RECORDED_BOARD:
    collect_ignore.append("mha_tt/test_recorded_cases.py")
if not HAS_JAX:
    collect_ignore += ["jax_and_torch", "mha_jax", "mha_torch"]

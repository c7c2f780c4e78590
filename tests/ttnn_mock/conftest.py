"""Leaves out this folder if ttnn is not installed: .venv-tt has it."""

from helpers import HAS_TTNN

collect_ignore_glob = [] if HAS_TTNN else ["test_*.py"]

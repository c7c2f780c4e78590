"""The documentation of mha_tt: its code runs. That of the other siblings is run by tests/test_docs.py."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCKS = [
    pytest.param(block, id=f"{path.name}-{number}")
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    for number, block in enumerate(re.findall(r"^```python\n(.*?)^```$", path.read_text("utf-8"), re.M | re.S))
    if "mha_tt" in block
]


def test_there_are_blocks():
    assert BLOCKS


@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_runs(block, only_mock):
    """In a process of its own: the blocks open boards, and a process has one for good."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, env=environment, timeout=300)
    assert result.returncode == 0, result.stderr

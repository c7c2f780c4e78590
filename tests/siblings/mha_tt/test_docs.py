"""Code blocks of mha_tt and ttnn_mock in the documentation run; tests/repository/test_docs.py runs
the others.
"""

import os
import re
import subprocess
import sys

import pytest
from helpers import ROOT

BLOCKS = {
    f"{path.relative_to(ROOT)}-{number}": block
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    for number, block in enumerate(
        re.findall(r"^```python\n(.*?)^```$", path.read_text("utf-8"), re.M | re.S)
    )
    if "mha_tt" in block or "ttnn_mock" in block
}
FORKS = """
import os, sys
import parity, mha_tt.parallel, ttnn_mock

failed = 0
for name, block in zip(sys.argv[1::2], sys.argv[2::2]):
    if not os.fork():
        exec(compile(block, name, "exec"), {"__name__": "__main__"})
        os._exit(0)  # to free what is imported takes as long as to import it
    failed |= os.wait()[1]
sys.exit(failed != 0)
"""


def test_pages_have_blocks_of_mha_tt():
    """README.md and docs contain at least one Python block that uses mha_tt."""
    assert BLOCKS


@pytest.mark.costly("a process has one board for good")
@pytest.mark.thorough
def test_every_block_of_mha_tt_runs(only_mock):
    """Every Python block with mha_tt in README.md and docs runs.

    Each block runs in a separate process, because a process can use only one board. All are forks
    of one process, because imports take longest.
    """
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    program = [sys.executable, "-c", FORKS, *(text for block in BLOCKS.items() for text in block)]
    result = subprocess.run(program, capture_output=True, text=True, env=environment, timeout=300)
    assert result.returncode == 0, result.stderr

"""TTNN entries in the support matrix of the documentation site."""

import json
import os
import subprocess
import sys

import pytest
from helpers import ROOT

pytestmark = pytest.mark.usefixtures("only_mock")

TOOLS = ROOT / "tools" / "docs-site"

PROGRAM = """
import json, sys
sys.path.insert(0, sys.argv[1])
import support
print(json.dumps([support.support("tt"), support.recorded("tt")]))
"""


@pytest.mark.thorough
@pytest.mark.costly("the page's tool runs on a mock board of its own")
def test_recorded_layer_support_is_current():
    """To update the record, run `.venv-tt/bin/python tools/docs-site/support.py tt`."""
    variables = {
        name: value for name, value in os.environ.items() if not name.startswith("TT_METAL")
    }
    program = [
        sys.executable,
        "-c",
        PROGRAM,
        str(TOOLS),
    ]  # a separate process, because it opens a different board
    result = subprocess.run(program, env=variables, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    measured, recorded = json.loads(result.stdout)
    assert measured == recorded
    assert measured["alibi"]["heads"].startswith("alibi ")
    assert measured["alibi"]["TTNN"] == "plain"

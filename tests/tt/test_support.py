"""The answers about TTNN in the support matrix of the site."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("only_mock")

TOOLS = Path(__file__).parents[2] / "tools" / "docs-site"


def test_the_recorded_answers_are_those_of_today():
    """If not, `python tools/docs-site/support.py tt > tools/docs-site/support-tt.json` records them."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TT_METAL")}
    program = [sys.executable, str(TOOLS / "support.py"), "tt"]
    result = subprocess.run(program, env=kept, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    recorded, found = json.loads((TOOLS / "support-tt.json").read_text("utf-8")), json.loads(result.stdout)
    assert found.keys() == recorded.keys()
    assert {key: found[key] for key in found if found[key] != recorded[key]} == {}
    assert found["alibi"]["heads"].startswith("alibi must be None to be divided")
    assert found["alibi"]["TTNN"] == "plain"

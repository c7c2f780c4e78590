"""The page of released models is what the tests compare with them."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_page_of_released_models_is_that_of_the_tests():
    command = [sys.executable, ROOT / "tools" / "models-page"]
    written = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=True)
    page = (ROOT / "docs" / "models.md").read_text("utf-8")
    assert page == written.stdout, "run `tools/models-page > docs/models.md`"
    assert "| Qwen3 | `qwen3`, `Qwen3` | `qk_norm=Norm(), rope=Rope()` |" in page.splitlines()

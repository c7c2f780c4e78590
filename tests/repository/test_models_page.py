"""The page of released models is what the tests compare with them."""

import runpy
import sys

from helpers import ROOT


def test_the_page_of_released_models_is_that_of_the_tests(monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", [*sys.path])
    runpy.run_path(str(ROOT / "tools" / "models-page"))
    page = (ROOT / "docs" / "reference" / "models.md").read_text("utf-8")
    assert page == capsys.readouterr().out, "run `tools/models-page > docs/reference/models.md`"
    assert "| Qwen3 | `qwen3`, `Qwen3` | `qk_norm=Norm(), rope=Rope()` |" in page.splitlines()

"""Test that the page of released models has the specifications that the tests compare with them."""

import runpy
import sys

from helpers import ROOT


def test_models_page_is_current(monkeypatch, capsys):
    """docs/reference/models.md is the output of tools/models-page, with a row for Qwen3."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    runpy.run_path(str(ROOT / "tools" / "models-page"))
    page = (ROOT / "docs" / "reference" / "models.md").read_text("utf-8")
    assert page == capsys.readouterr().out, "run `tools/models-page > docs/reference/models.md`"
    assert "| Qwen3 | `qwen3`, `Qwen3` | `qk_norm=Norm(), rope=Rope()` |" in page.splitlines()

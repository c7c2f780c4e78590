"""Tests of values as shown in notebooks: figures, and results as text."""

from __future__ import annotations

import numpy as np
import torch

import parity
from parity.explain.conformance.answers import Conformance
from parity.use.reporting.plot import plot_attention


def test_figure_is_shown_without_a_file():
    """Without a path, `plot_attention` returns a figure with a head and its color bar, which
    a notebook shows as a PNG.
    """
    figure = plot_attention(np.eye(4)[None])
    assert figure._repr_png_().startswith(b"\x89PNG")
    assert len(figure.axes) == 2  # a head, and the color bar


def test_results_are_shown_as_text():
    """Diagnoses, reports and conformance are shown in notebooks as preformatted text, with
    HTML escaped.
    """
    problem = parity.make_problem("textbook", "float32")
    batch_size, seq_len, _ = problem.inputs["query"].shape
    q = np.zeros((batch_size, problem.spec.num_heads, seq_len, problem.spec.head_dim))
    shown = parity.diagnose({"q": q.astype(np.float32)}, problem)._repr_html_()
    assert shown.startswith("<pre")
    assert "First wrong stage: q, " in shown
    report = parity.run_cases([parity.CASES["textbook"]], ["torch"])
    assert "1 case, stages: 11 passed, 0 failed" in report._repr_html_()
    assert str(report.comparisons[0]).endswith(" of its budget")
    assert (
        Conformance("<b>", "torch", torch.__version__, missing="a < b")._repr_html_().count("&lt;")
        == 2
    )

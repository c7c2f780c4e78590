"""Tests of the HTML report: complete, harmless and offline; `make check-html` tests it in a
browser.
"""

import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.pages import Diagnosis, broken_softmax, hostile_report, page_of

import parity.use.running.run
from parity.measure.core.compare import POSITIONS, Label, compare
from parity.use.cli.main import main
from parity.use.reporting.bugs import bug_page
from parity.use.reporting.html import (
    MOST_CELLS,
    MOST_HEADS,
    STEPS,
    html_page,
    levels,
    png,
    write_html,
)
from parity.use.running.report import Report, SkippedCase


class Page(HTMLParser):
    """Elements of a page with their attributes, and its text; requires that all tags are closed."""

    VOID = ("meta", "link", "img", "br", "wbr", "path", "rect")

    def __init__(self, content: bytes):
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(content.decode())
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.text += data

    def of(self, tag: str, kind: str | None = None) -> list[dict[str, str | None]]:
        of_tag = (attributes for name, attributes in self.elements if name == tag)
        return [
            attributes
            for attributes in of_tag
            if kind is None or kind in (attributes.get("class") or "").split()
        ]


@pytest.fixture(name="broken_softmax")
def _broken_softmax():
    with broken_softmax():
        yield


@pytest.fixture(scope="module")
def good():
    return page_of(["textbook", "gqa-causal"], ["jax", "torch"], ["float32", "bfloat16"])


def test_empty_report_is_a_valid_page():
    """A report without comparisons is a page with closed tags that says that nothing was
    compared.
    """
    page = Page(html_page(Report([], {}, {"python": "3"})))
    assert "nothing was compared" in page.text
    assert "Nothing was compared." in page.text


# ---- Content -------------------------------------------------------------------------------------


def test_agreement_is_stated_first(good):
    """A page without failures begins with the agreement, and marks no first divergence,
    failure or open details.
    """
    report, _, content = good
    page = Page(content)
    assert report.failed == []
    assert page.text.index("jax and torch agree with the float64 reference") < page.text.index(
        "What failed"
    )
    assert (
        f"Nothing: each of the {len(report.comparisons)} stages is within its error budget."
        in page.text
    )
    assert "first divergence" not in page.text.replace(
        "of one that failed the first divergence", ""
    )
    assert page.of("article") == []
    assert all("open" not in details for details in page.of("details"))


def test_comparisons_have_rows_with_numbers(good):
    """Every 17th comparison, as a sample, has a row with its stage, ratio and error; each
    group has a table.
    """
    report, _, content = good
    page = Page(content)
    rows = re.findall(r"<tr.*?</tr>", content.decode())
    assert len(page.of("table", "stages")) == len(report.groups())
    for comparison in report.comparisons[::17]:
        start = (
            f'<tr><th scope="row">{comparison.stage}</th><td><span '
            f'class="number">{comparison.ratio:.2f}</span>'
        )
        error = f"<td>{comparison.error:.1e}</td>" if comparison.error else "<td>0</td>"
        assert any(row.startswith(start) and error in row for row in rows)


def test_environment_is_shown(good):
    """The page has the version of NumPy, and the device and numerics lock of torch."""
    text = Page(good[2]).text
    assert np.__version__ in text
    assert "torch: device and numerics lock" in text
    assert "float32_matmul_precision" in text


@pytest.mark.usefixtures("broken_softmax")
def test_first_divergence_is_marked():
    """With wrong attention weights, only attn_weights is marked as the first divergence, with
    its explanation and the command that reproduces it.
    """
    report, _, content = page_of(["textbook", "causal"], ["jax", "torch"])
    page = Page(content)
    assert len(report.first_differences()) == 1
    assert len(page.of("article", "failure")) == 1
    assert [attributes.get("class") for attributes in page.of("li")][:7] == [
        *["passed"] * 5,
        "first",
        "failed",
    ]
    assert len(page.of("tr", "first")) == 1
    assert re.search(
        r'<tr class="first"><th scope="row">✗ attn_weights <strong>first divergence',
        content.decode(),
    )
    assert report.first_differences()[0].as_text(with_budget=False) in page.text
    assert "mha-parity run --backends torch --cases causal --dtypes float32" in page.text
    assert [("open" in details) for details in page.of("details")] == [False, True]
    assert page.text.index("torch do NOT agree") < page.text.index("What failed")


@pytest.mark.usefixtures("broken_softmax")
def test_diagnosis_is_shown_as_its_text():
    """The page has the text of a diagnosis, with its line break and escaped characters, and the
    page of its bug.
    """
    report, maps, _ = page_of(["causal"])
    diagnosis = Diagnosis("the mask is shifted by one\n  fix it <so>")
    diagnosis.findings = [SimpleNamespace(pages=("scale",))]
    object.__setattr__(report, "diagnoses", {("causal", "float32", "torch"): diagnosis})
    text = Page(html_page(report, maps)).text
    assert "the mask is shifted by one\n  fix it <so>" in text
    assert bug_page("scale") in text


def test_skipped_cases_have_reasons(good):
    """The page lists skipped backends and cases, each with its reason."""
    skipped = [SkippedCase("full", "float16", "x", "why")]
    report = replace(good[0], skipped={"tt": "no ttnn here"}, skipped_cases=skipped)
    page = Page(html_page(report))
    assert "skipped: no ttnn here" in page.text
    assert "x, float16: why (1 case)" in page.text
    assert "x skipped it: why" in page.text
    assert len(page.of("td", "none")) > 0


def test_backend_exception_is_shown(monkeypatch):
    """The page has the exception that a backend raised, and an infinite ratio."""

    def fail(backend, reference):
        raise RuntimeError("out of <memory>")

    monkeypatch.setattr(parity.use.running.run, "record", fail)
    page = Page(page_of(["textbook"])[2])
    assert "RuntimeError: out of <memory>" in page.text
    assert "∞" in page.text


# ---- Safety --------------------------------------------------------------------------------------


def test_external_text_is_escaped_everywhere():
    """Hostile text appears literally: the page has no scripts, event handlers or control
    characters.
    """
    content = html_page(hostile_report())
    page = Page(content)
    assert page.of("script") == []
    assert page.text.count("<script>alert(1)</script>") > 10
    assert {
        name for tag, attributes in page.elements for name in attributes if name.startswith("on")
    } == set()
    assert not re.search(rb"[\x00-\x08\x0b-\x1f]", content)


@pytest.mark.usefixtures("broken_softmax")
def test_page_makes_no_network_requests():
    """All links and sources are on the page or data URLs, and its content security policy
    blocks all others.
    """
    content = page_of(["causal"], ["jax", "torch"])[2]
    page = Page(content)
    assert page.of("script") == page.of("iframe") == page.of("object") == []
    for _, attributes in page.elements:
        for name in ("src", "href", "srcset", "data", "action"):
            assert (attributes.get(name) or "#").startswith(("#", "data:"))
        assert "style" not in attributes  # the policy would block it
    style = re.search(r"<style>(.*?)</style>", content.decode(), re.DOTALL)
    assert style is not None
    assert "url(" not in style[1]
    assert "@import" not in style[1]
    (policy,) = (
        meta["content"]
        for meta in page.of("meta")
        if meta.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy is not None
    assert policy.startswith("default-src 'none'; img-src data:; style-src 'sha256-")
    assert "unsafe" not in policy


def test_every_link_has_a_target_on_the_page(good):
    """Every link leads to an id on the page, and ids are unique."""
    page = Page(good[2])
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    links = [link["href"] for link in page.of("a")]
    assert len(ids) == len(set(ids))
    assert links
    assert {f"#{id_}" for id_ in ids} >= set(links)


def test_default_run_stays_below_3_megabytes(good):
    """A page has fewer than 30,000 bytes plus 1100 per comparison: 2.8 MB for the 2554 of a
    default run.
    """
    report, _, content = good
    assert len(content) < 30_000 + 1_100 * len(
        report.comparisons
    )  # the default run has 2554 comparisons


def test_page_is_written_whole_or_not_at_all(good, tmp_path):
    """The file has the bytes of the page; if its folder does not exist, an error is raised,
    and no file is left.
    """
    report, maps, content = good
    write_html(tmp_path / "r.html", report, maps)
    assert (tmp_path / "r.html").read_bytes() == content
    with pytest.raises(FileNotFoundError):
        write_html(tmp_path / "no" / "r.html", report, maps)
    assert [path.name for path in tmp_path.iterdir()] == ["r.html"]


def test_missing_packages_fail_early(monkeypatch, capsys, tmp_path):
    """Without jinja2 and pillow, `run --html` exits with status 2 before any work, and the
    error has the command to install them.
    """
    monkeypatch.setattr(parity.use.running.run, "record", None)
    monkeypatch.setattr("parity.measure.core.packages.is_installed", lambda package: False)
    assert main(["run", "--cases", "textbook", "--html", str(tmp_path / "r.html")]) == 2
    words = "an HTML report needs jinja2 and pillow, not installed here: pip install jinja2 pillow"
    assert words in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_run_and_compare_write_the_page(tmp_path):
    """`run` and `compare` write a page with four attention maps: two heads, each of the
    reference and of torch.
    """
    traces = str(tmp_path / "traces")
    arguments = ["--cases", "textbook", "--backends", "torch", "--save-traces", traces]
    assert main(["run", *arguments, "--html", str(tmp_path / "r.html")]) == 0
    assert main(["compare", traces, "--html", str(tmp_path / "c.html")]) == 0
    for name in ("r.html", "c.html"):
        page = Page((tmp_path / name).read_bytes())
        assert len(page.of("img")) == 4  # two heads, each of the reference and of torch


# ---- Pictures ------------------------------------------------------------------------------------


def test_error_by_position_is_largest_error():
    """The error by position is the largest of each token, in budgets, and is not in the JSON."""
    expected = np.ones((1, 2, 3, 4))
    actual = expected.copy()
    actual[0, 1, 2, 0] += 0.5
    same_precision = expected.astype(np.float32) + np.float32(1e-3)
    comparison = compare(actual, expected, same_precision, Label("c", "b", "float64", "q"))
    assert len(comparison.by_position) == 3
    assert comparison.by_position[:2] == (0.0, 0.0)
    assert comparison.by_position[2] > 1.0
    assert "by_position" not in comparison.to_dict()


@pytest.mark.parametrize(
    ("stage", "shape", "length"),
    [
        ("k", (1, 2, 6, 4), 6),
        ("grad.q_proj.weight", (4, 3), 0),
        ("cache.lengths", (3,), 0),
        ("output", (1, 300, 4), POSITIONS),
    ],
)
def test_error_by_position_uses_token_axis(stage, shape, length):
    """Errors by position have the length of the token axis, at most POSITIONS, and none for
    stages without this axis.
    """
    dtype = np.int32 if stage == "cache.lengths" else np.float32
    x = np.ones(shape, dtype)
    comparison = compare(x, x, x, Label("c", "b", "float32", stage))
    assert comparison.by_position == (0.0,) * length


def test_error_in_merged_positions_is_kept():
    """NaN at the last of 300 positions makes the last of the merged ones infinite, and only
    this one.
    """
    expected = np.ones((1, 300, 4))
    actual = expected.copy()
    actual[0, 299, 0] = np.nan
    comparison = compare(actual, expected, expected, Label("c", "b", "float64", "output"))
    assert comparison.by_position == (*(0.0,) * (POSITIONS - 1), math.inf)


def test_levels_keep_largest_weight_and_nan():
    """Reduced to MOST_CELLS rows, a map keeps its largest weight as level STEPS and NaN as
    STEPS + 1, at their positions.
    """
    maps = np.zeros((1, 100, 5))
    maps[0, 99, 4] = 1.0
    maps[0, 0, 0] = np.nan
    cells = levels(maps)
    assert cells.shape == (1, MOST_CELLS, 5)
    assert cells[0, -1, -1] == STEPS
    assert cells[0, 0, 0] == STEPS + 1
    assert np.count_nonzero(cells) == 2


def test_picture_opacity_matches_levels():
    """Level 0 is transparent, level STEPS is opaque in the given color, and NaN is opaque red."""
    import base64
    import io

    from PIL import Image

    data = png(np.array([[0, STEPS, STEPS + 1]], np.uint8), (1, 2, 3)).removeprefix(
        "data:image/png;base64,"
    )
    pixels = Image.open(io.BytesIO(base64.b64decode(data))).convert("RGBA")
    assert [pixels.getpixel((x, 0)) for x in range(3)] == [
        (1, 2, 3, 0),
        (1, 2, 3, 255),
        (220, 38, 38, 255),
    ]


@pytest.mark.usefixtures("broken_softmax")
def test_failure_maps_show_worst_difference():
    """The maps of a failure show the sequence with the largest difference, and its position and
    value; agreeing backends have two maps.
    """
    _, maps, content = page_of(["causal"], ["jax", "torch"])
    assert maps["causal", "float32", "jax"].pictures.keys() == {"expected", "actual"}
    shown = maps["causal", "float32", "torch"]
    assert shown.sequence == 1
    assert shown.largest_difference == pytest.approx(0.25)
    levels_of_head, words = shown.pictures["difference"][2]
    assert levels_of_head[3, 0] == STEPS
    assert words == "largest 0.25 at t=3, s=0"
    alternatives = [image["alt"] for image in Page(content).of("img")]
    assert len(alternatives) == 4 * (2 + 3)  # jax and torch show different sequences
    assert all(alternatives)


def test_attention_maps_show_last_step():
    """Maps show the last step of a cached case, at most MOST_HEADS heads, and at most
    MOST_CELLS queries and keys.
    """
    _, maps, _ = page_of(["trained-smollm2-decode", "gqa", "rope-far"])
    assert maps["trained-smollm2-decode", "float32", "torch"].stage == "step5.attn_weights"
    assert maps["gqa", "float32", "torch"].heads == tuple(range(MOST_HEADS))
    assert maps["rope-far", "float32", "torch"].pictures["actual"][3][0].shape == (
        MOST_CELLS,
        MOST_CELLS,
    )

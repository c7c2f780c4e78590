"""Tests of the documentation site: links, generated pages and pictures, and the commands of its CI
recipe.
"""

import fnmatch
import json
import os
import re
import runpy
import shlex
import subprocess
import tomllib
from collections import Counter
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from helpers import ROOT
from helpers.command_line import parsed
from helpers.shell import environment, run
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from wild.recordings import RECORDINGS
from wild.records import STYLES
from wild.sets import BUGS, RIGHTS

import parity
from parity.explain.mutating.bugs import names as bugs_to_inject
from parity.measure.core.stages import PATHS, STAGES
from parity.measure.core.weights import save_tensors
from parity.port.conversion.layouts import LAYOUTS
from parity_lab.injections import INJECTIONS
from parity_lab.selftest import SELFTEST_CASES, SELFTESTED, selftest_bugs

TOOLS = ROOT / "tools" / "docs-site"
IMAGE = re.compile(r"\{image\} \S*pictures/([\w-]+)\.svg")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


@pytest.fixture(autouse=True)
def tools(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))


def words_of(page):
    """Return the text of a page in docs in one line."""
    return " ".join((ROOT / "docs" / f"{page}.md").read_text("utf-8").split())


# ---- Pages ---------------------------------------------------------------------------------------


def test_site_links_lead_to_existing_pages(tmp_path):
    """Relative links on the more than 80 staged pages lead to staged pages, apart from
    generated ones.
    """
    import stage

    site = stage.Site(tmp_path)
    for page in site.names:
        if str(page.relative_to(ROOT)) not in stage.REPLACED:
            site.copy(page)
    for path in sorted(site.viewed):
        site.view(path)
    pages = [path for path in tmp_path.rglob("*.md") if "source" not in path.parts]
    assert len(pages) > 80
    broken = []
    for page in pages:
        for link in re.findall(
            r"\]\(([^()\s#]+)[^()\s]*\)", stage.FENCE.sub("", page.read_text("utf-8"))
        ):
            target = (
                (page.parent / link).resolve().relative_to(tmp_path) if ":" not in link else None
            )
            is_generated = (
                target is None
                or target.parts[0] == "reference"
                or target == Path("evidence/benchmarks.md")
            )
            if not is_generated and not (tmp_path / target).exists():
                broken.append(f"{page.relative_to(tmp_path)}: {link}")
    assert broken == []
    shown = (tmp_path / "source" / "examples" / "port" / "layer.py.md").read_text("utf-8")
    assert (ROOT / "examples" / "port" / "layer.py").read_text("utf-8").strip() in shown


def test_links_in_code_blocks_stay_unchanged(tmp_path):
    """Links of a staged page are rewritten to paths of the site, but not in code blocks."""
    import stage

    site = stage.Site(tmp_path)
    page = ROOT / "docs" / "README.md"
    site.names[page] = "x/page"
    page_text = (
        "[a](../CONTRIBUTING.md#tests) [b](reference/commands.md#completion) [c](../Makefile)\n"
        "```\n[d](../CONTRIBUTING.md)\n```\n"
    )
    copied = tmp_path / "x" / "page.md"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "read_text", lambda self, encoding: page_text)
        site.copy(page)
    with copied.open(encoding="utf-8") as file:
        assert file.read() == (
            "[a](../contributing/guide.md#tests) [b](../reference/commands.md#completion) "
            "[c](../source/Makefile.md)\n"
            "```\n[d](../CONTRIBUTING.md)\n```\n"
        )
    assert site.viewed == {ROOT / "Makefile"}


def links_of_toctrees(page):
    """Return the pages in the toctrees of a page in docs, as they are written there."""
    text = (ROOT / "docs" / f"{page}.md").read_text("utf-8")
    links = []
    for tree in re.findall(r"^```\{toctree\}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        links += re.findall(r"^(?!:)(\S+)$", tree, re.MULTILINE)
    return links


def test_sidebar_groups_have_few_links():
    """The sidebar has at most 8 links below How-to guides and Reference and below each of their
    groups, and every page of these folders is in one group.
    """
    for section in ("how-to", "reference"):
        groups = links_of_toctrees(f"{section}/index")
        grouped = []
        for group in groups:
            links = links_of_toctrees(f"{section}/{group}")
            assert 0 < len(links) <= 8, group
            grouped += links
        assert 0 < len(groups) <= 8, section
        assert len(grouped) == len({*grouped}), section
        pages = {path.stem for path in (ROOT / "docs" / section).glob("*.md")}
        assert pages - {"index", *groups} - {*grouped} == set(), section


def test_generated_pages_list_every_entry():
    """Generated pages list every command, case, family, layout, bug and key of a schema."""
    import reference

    from parity.explain.diagnosis.bugs import bug_by_name
    from parity.port.models.families import FAMILIES
    from parity.port.models.families.not_covered import NOT_COVERED
    from parity.use.cli.main import COMMANDS
    from parity.use.reporting.schemas import SCHEMAS

    commands = reference.command_pages()
    assert commands.keys() == {f"reference/cli/{name}" for name in ("index", *COMMANDS)}
    assert "`--json PATH`" in commands["reference/cli/run"]
    for page, names in {
        reference.cases_tables(): parity.CASES,
        reference.families_page(): FAMILIES | NOT_COVERED,
        reference.layouts_tables(): LAYOUTS,
        reference.bugs_page(): bug_by_name(),
        reference.schemas_page(): {key for schema in SCHEMAS.values() for key in schema.keys},
    }.items():
        assert [name for name in names if f"`{name}`" not in page] == []


def test_page_of_wrong_answers_is_complete():
    """The page has a table for each of the 30 exercises, with three rows each, and the names of
    known bugs lead to their pages.
    """
    import parts

    page = parts.wrong_answers()
    assert len(re.findall(r"^\*\*\[\d\. .+\]\([\w-]+\.md#[\w-]+\)\*\*$", page, re.MULTILINE)) == 30
    rows = re.findall(r"^\| (?!---|wrong answer)", page, re.MULTILINE)
    assert len(rows) == 90
    named = re.findall(r"Likely bug[^:]*: (.+?)(?:<br>| \|)", page)
    assert len(named) > 40
    assert [
        answer for answer in named if "](../bugs/" not in answer and "unexpected" not in answer
    ] == []


def test_tables_of_the_reference_are_current():
    """The generated tables in docs/reference match the code, and each stage of a layer is on
    its page with its axes.
    """
    import reference

    for name, tables in reference.generated_parts().items():
        page = (ROOT / "docs" / f"{name}.md").read_text("utf-8")
        assert page.partition(reference.MARK)[2] == f"\n{tables}", (
            "run `python tools/docs-site/reference.py`"
        )
    page = (ROOT / "docs" / "reference" / "stages.md").read_text("utf-8")
    rows = dict(re.findall(r"^\| (`[^|]+) \| (\(.+?\)) \|", page, re.MULTILINE))
    axes = {name: letters for names, letters in rows.items() for name in names.split(", ")}
    stages = [name for name in STAGES if name.partition(".")[0] not in {*PATHS, "grad"}]
    assert [name for name in stages if f"`{name}`" not in axes] == []
    for name in stages:
        letters = set(re.findall(r"[A-Z]+", axes[f"`{name}`"]))
        assert {*STAGES[name]} <= letters, name


def test_layer_pages_have_all_arguments():
    """The page of a layer has each argument of its constructor, each field of AttentionSpec, and
    the arguments of a call that hide keys.
    """
    import reference

    page = reference.layer_page("mha_torch", "MultiHeadAttention")
    arguments = re.findall(r"^   \* - `(\w+)`$", page, re.MULTILINE)
    names = [field.name for field in fields(parity.AttentionSpec)]
    masks = ["mask", "is_causal", "key_padding_lengths", "segment_ids"]
    assert arguments == ["spec", "num_heads", "device", "dtype", "fields", *names, *masks]


def test_picture_of_first_page_is_current():
    """The pictures of README.md show the session of their page, which another test runs."""
    import front_page

    assert front_page.session()[1:]
    for path, picture in front_page.pictures().items():
        assert path.read_text("utf-8") == picture, "run `python tools/docs-site/front_page.py`"


def test_simulator_page_lists_every_case():
    """The page of the simulator lists every case except for float16 ones, and marks
    nan-visible-decode as beyond.
    """
    import reference

    page = reference.simulated_tables()
    assert [
        name
        for name, case in parity.CASES.items()
        if case.dtype != "float16" and f"`{name}`" not in page
    ] == []
    assert "| `nan-visible-decode` | **beyond** |" in page


def test_shares_come_from_a_simulator_report(monkeypatch, tmp_path):
    """Shares of a report replace the shares of its cases only; a report of a mock device raises a
    ValueError.
    """
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import shares

    result = {
        "case": "full",
        "dtype": "float32",
        "stage": "q",
        "status": "passed",
        "ratio": 0.1,
        "local_ratio": None,
    }
    results = [
        result,
        {**result, "stage": "k", "local_ratio": 0.304},
        {**result, "dtype": "bfloat16", "ratio": None},
    ]
    report = {"environment": {"backends": {"tt": {"device": "simulator (x)"}}}, "results": results}
    (tmp_path / "report.json").write_text(json.dumps(report), "utf-8")
    (tmp_path / "shares.json").write_text(
        json.dumps({"cases": {"causal": {"float32": 0.2}}}), "utf-8"
    )
    monkeypatch.setattr(shares, "SHARES", tmp_path / "shares.json")
    shares.main(str(tmp_path / "report.json"))
    written = json.loads((tmp_path / "shares.json").read_text("utf-8"))
    assert written["cases"] == {
        "causal": {"float32": 0.2},
        "full": {"float32": 0.3, "bfloat16": None},
    }
    report["environment"]["backends"]["tt"]["device"] = "mock p150"
    with pytest.raises(ValueError, match="a simulator, got mock p150"):
        shares.shares_of(report)


def test_version_is_the_same_everywhere():
    """pyproject.toml, CITATION.cff and the first entry of CHANGELOG.md have one version, and
    no module defines `__version__`.
    """
    version = PROJECT["version"]
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))["version"] == version
    first = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert first is not None
    assert first[1] == version
    code = [
        path
        for name in ("mha_spec", "mha_jax", "mha_torch", "mha_tt", "ttnn_mock", "parity")
        for path in (ROOT / name).rglob("*.py")
    ]
    assert [
        path.name
        for path in code
        if re.search(r"^__version__", path.read_text("utf-8"), re.MULTILINE)
    ] == []


@pytest.mark.parametrize(
    ("file", "extras"), [("constraints.txt", None), ("constraints-tt.txt", ("tt", "torch", "test"))]
)
def test_pinned_versions_meet_requirements(file, extras):
    """Every package that the project requires is pinned to a version that satisfies the
    requirement.
    """
    pinned = dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / file).read_text("utf-8"), re.MULTILINE))
    pinned = {canonicalize_name(name): version for name, version in pinned.items()}
    optional = PROJECT["optional-dependencies"]
    texts = [
        *PROJECT["dependencies"],
        *(text for name in extras or optional.keys() - {"tt"} for text in optional[name]),
    ]
    wanted = [
        requirement
        for requirement in map(Requirement, texts)
        if requirement.name != PROJECT["name"]
    ]
    assert len(wanted) > 10
    assert [
        str(requirement)
        for requirement in wanted
        if pinned.get(canonicalize_name(requirement.name), "none") not in requirement.specifier
    ] == []


@pytest.mark.costly("a shell runs the check")
def test_release_requires_tag_of_its_version():
    """The check of a release passes for a tag of this version and fails for v9.9.9."""
    release = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text("utf-8"))
    (check,) = [
        command
        for command in commands_of(release["jobs"]["publish"])
        if "GITHUB_REF_NAME" in command
    ]
    for tag, status in {f"v{PROJECT['version']}": 0, "v9.9.9": 1}.items():
        ran = subprocess.run(
            check,
            shell=True,
            cwd=ROOT,
            env={**os.environ, "GITHUB_REF_NAME": tag},
            capture_output=True,
        )
        assert ran.returncode == status


def test_spec_fields_have_recorded_support():
    """Every field of AttentionSpec has recorded support in each framework, and a meaning on
    its page.
    """
    import reference
    import support

    names = [field.name for field in fields(parity.AttentionSpec)]
    assert {feature.name for feature in support.FEATURES} == {*names}
    for name in support.FRAMEWORKS:
        assert support.recorded(name).keys() == {
            feature.key for feature in (*support.FEATURES, *support.ARGUMENTS)
        }
    rows = re.findall(
        r"^\| `(\w+)` \| .+ \| (.+) \| .+ \|$", reference.attention_spec_tables(), re.MULTILINE
    )
    assert [name for name, _ in rows] == names
    assert all(len(meaning) > 10 for _, meaning in rows)
    assert "gpt_oss" in reference.models_by_field()["sinks"]


KNOWN = {
    "jax": {
        ("soft_cap", "JAX, CPU"): "kernel",
        ("soft_cap", "JAX, GPU"): "plain",
        ("relative_products", "tokens"): "rejected",
        ("relative_products", "JAX, CPU"): "plain",
        ("new_lengths", "output"): "no argument",
    },
    "torch": {
        ("soft_cap", "PyTorch"): "plain",
        ("soft_cap", "PyTorch, large, CUDA"): "kernel",
        ("fused_qkv", "heads"): "rejected",
        ("fused_qkv", "tokens"): "yes",
        ("new_lengths", "cache"): "yes",
        ("mask", "tokens"): "rejected",
    },
}


@pytest.mark.costly("builds a layer for each feature")
@pytest.mark.parametrize("name", KNOWN)
def test_measured_support_matches_known(name):
    """The support of the features in KNOWN, as measured, is the known and the recorded one."""
    import support

    features = {feature.key: feature for feature in (*support.FEATURES, *support.ARGUMENTS)}
    with support.FRAMEWORKS[name]() as framework:
        measured = {
            key: support.answers(framework, features[key])
            for key in dict.fromkeys(key for key, _ in KNOWN[name])
        }
    for (key, path), answer in KNOWN[name].items():
        measured_answer = measured[key][path]
        assert ("rejected" if measured_answer.startswith(f"{key} ") else measured_answer) == answer
    recorded = support.recorded(name)
    assert measured == {key: recorded[key] for key in measured}


@pytest.mark.nightly
@pytest.mark.parametrize("name", KNOWN)
def test_recorded_layer_support_is_current(name):
    """On failure, `python tools/docs-site/support.py NAME` updates the records.

    `tests/siblings/mha_tt/test_support.py` has the records of TTNN.
    """
    import support

    assert support.support(name) == support.recorded(name)


def test_rejections_have_reasons_in_matrix():
    """Every footnote of the support matrix has its reason, with the frameworks that reject
    the feature.
    """
    import reference
    import support

    answers = support.recorded("tt")
    page = reference.support_page(
        {"jax": answers, "tt": answers | {"rope": {**answers["rope"], "heads": "reason"}}}
    )
    rows = dict(
        re.findall(r"^\| (`.+?) \| (.+) \|$", page.partition("## Kernels")[0], re.MULTILINE)
    )
    assert rows["`gate`"].split(" | ") == ["all", "all", "all", "all", "—"]
    assert re.fullmatch(r"all \| all \| all \| JAX \[\^\d+\] \| —", rows["`rope`"])
    assert re.fullmatch(r"all \| all \| all \| — \[\^\d+\] \| —", rows["`alibi`"])
    notes = dict(re.findall(r"^\[\^(\d+)\]: (.+)\.$", page, re.MULTILINE))
    assert {*re.findall(r"\[\^(\d+)\]", " ".join(rows.values()))} == {*notes}
    assert "TTNN: reason" in notes.values()
    assert f"JAX, TTNN: {answers['alibi']['heads']}" in notes.values()
    assert "| `soft_cap` | plain | plain | plain | plain |" in page


def test_conventions_table_is_complete():
    """The table has all checks and libraries, and marks as many broken conventions as were
    measured; none is of this project.
    """
    import parts

    from parity.explain.conformance.peers import PEERS
    from parity.explain.conformance.questions import QUESTIONS

    subjects = {
        subject["name"]: subject["answers"] for subject in parts.measured("conformance")["subjects"]
    }
    assert subjects.keys() == PEERS.keys()
    assert all(answers.keys() == QUESTIONS.keys() for answers in subjects.values())
    shown = parts.conventions()
    assert shown.count("<tr>") == 1 + len(QUESTIONS)
    statuses = [
        answers[name][0]
        for name in QUESTIONS
        for library, answers in subjects.items()
        if "mha_" not in library
    ]
    broken = sum(status in ("broken", "differs") for status in statuses)
    assert broken > 10
    assert shown.count("✗ ") == broken  # this project breaks none


def test_shared_answer_names_differing_class():
    """The common answer of classes is the answer of most, followed by the classes that differ;
    absent ones do not count.
    """
    import parts

    def subject(name, status, words):
        return {"name": f"mha_torch.{name}", "answers": {"causal": [status, words]}}

    answers = [
        subject("A", "ok", "top-left"),
        subject("B", "note", "either"),
        subject("C", "ok", "top-left"),
    ]
    assert parts.shared_answer(answers, "causal") == ("note", "top-left; B: either")
    assert parts.shared_answer([*answers[:1], subject("D", "absent", "—")], "causal") == (
        "ok",
        "top-left",
    )
    assert parts.shared_answer([subject("D", "absent", "—")], "causal") == ("absent", "—")


def test_injected_bugs_match_self_test():
    """The recorded self-test has every injected bug, each detected in all cases and all but
    two named; the table links every page.
    """
    import parts

    counts = parts.measured("selftest")["bugs"]
    injected = Counter(name for case in SELFTEST_CASES for name in ("", *selftest_bugs(case)))
    assert {name: count for name, (count, *_) in counts.items()} == {
        name: count * len(SELFTESTED) for name, count in injected.items()
    }, "run `python tools/docs-site/measure.py selftest`"
    assert all(count == detected for count, detected, _ in counts.values())
    # They are reported as patterns: a lost head with NaN, and blocks of a trained layer.
    not_identified = {"last-head-lost", "blocks-sum-not-rescaled"}
    assert {
        name for name, (count, _, identified) in counts.items() if identified < count
    } == not_identified
    with_bug = sum(count for name, (count, *_) in counts.items() if name)
    page = words_of("evidence/diagnosis")
    assert f"All {with_bug} were detected" in page
    assert f"In the {counts[''][0]} runs without an injected bug" in page
    shown = parts.injected_bugs()
    assert [page for page in parts.known_by_page() if f"[{page}](" not in shown] == []
    assert [name for name in INJECTIONS if f"`{name}`" not in shown] == []


def test_diagnosis_rates_match_records():
    """The recorded diagnosis rates count as many bugs and right ports as the sets have now."""
    import parts

    halves = parts.measured("diagnosis-rates")["halves"].values()
    assert sum(half["rights"] for half in halves) == len(RIGHTS), (
        "run `python tools/docs-site/measure.py diagnosis-rates`"
    )
    assert sum(half["bugs"] for half in halves) == len(BUGS)
    assert "| bugs |" in parts.diagnosis_rates()
    page = words_of("evidence/diagnosis")
    for count in (
        f"{len(STYLES)} styles",
        f"{len(BUGS)} single edits",
        f"{len(RIGHTS):,} correct ports",
        f"{len(RECORDINGS)} customary ways",
    ):
        assert count in page


def test_margins_are_of_todays_cases():
    """The margins are of every case, in each backend and dtype, and within the budget; the table
    has the worst case of each row.
    """
    import measure
    import parts

    margins = parts.measured("margins")
    assert margins["command"] == measure.COMMANDS["margins"]
    assert margins["cases"] == [*parity.CASES], "run `python tools/docs-site/measure.py margins`"
    rows = {(row["backend"], row["dtype"]): row for row in margins["rows"]}
    assert rows.keys() == {
        (backend, dtype) for backend in ("torch", "jax") for dtype in measure.MARGIN_DTYPES
    }
    assert all(0 < row["half"] < row["most"] <= row["worst"] < 1 for row in rows.values())
    assert margins["slope"] < 1
    assert margins["failed"] == 0
    shown = parts.margins()
    assert [row["case"] for row in rows.values() if f"`{row['case']}`" not in shown] == []


def test_results_are_reduced_to_page_data():
    """Results are reduced to counts per bug and to statuses with words per check; missing
    libraries are left out.
    """
    import measure

    outcomes = [
        {"bug": "", "is_caught": True, "is_named": True},
        {"bug": "a", "is_caught": True, "is_named": False},
        {"bug": "a", "is_caught": True, "is_named": True},
    ]
    assert measure.of_selftest({"outcomes": outcomes}) == {"bugs": {"": [1, 1, 1], "a": [2, 2, 1]}}
    answers = [{"question": "mask", "status": "ok", "words": "True hides", "by_path": {}}]
    subjects = [
        {"name": "x", "missing": "", "answers": answers},
        {"name": "y", "missing": "no y", "answers": []},
    ]
    summary = {"subjects": [{"name": "x", "answers": {"mask": ["ok", "True hides"]}}]}
    assert measure.of_conformance({"subjects": subjects}) == summary


def test_margins_are_counted_by_row():
    """A row has the stages of a backend and a dtype that have a budget, and the worst of them, by
    its own step if that uses more.
    """
    import measure

    result = {"status": "passed", "case": "a", "stage": "q", "norm": "rms", "local_ratio": None}
    results = [
        {**result, "backend": backend, "dtype": dtype, "ratio": ratio, "budget": ratio}
        for backend in ("torch", "jax")
        for dtype in measure.MARGIN_DTYPES
        for ratio in (0.0, 0.1, 0.2, 0.3)
    ]
    results[2] |= {"case": "b", "stage": "k", "norm": "slope", "local_ratio": 0.8}
    results.append({**result, "backend": "jax", "dtype": "float32", "status": "missing"})
    margins = measure.of_margins({"results": results, "summary": {"failed": 0}})
    first, *others = margins["rows"]
    assert first | {"half": 0.3, "worst": 0.8, "case": "b", "stage": "k"} == first
    assert all((row["half"], row["worst"], row["stages"]) == (0.2, 0.3, 3) for row in others)
    assert (margins["cases"], margins["slope"]) == (["a", "b"], 0.8)


def test_terminal_picture_has_contrast():
    """The terminal picture shows a diagnosis in color, and all colors have a contrast above 4.5."""
    import parts

    shown = parts.terminal()
    assert "kv-heads-tiled</span>" in shown
    assert "color: #ff7b72" in shown

    def luminance(color):
        shares = [c / 255 for c in color]
        r, g, b = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in shares)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    dark = luminance(parts.DARK.background_color)
    colors = [parts.DARK.ansi_colors[i] for i in range(8)] + [parts.DARK.foreground_color]
    assert min((luminance(color) + 0.05) / (dark + 0.05) for color in colors) > 4.5


def test_github_files_use_existing_targets():
    """The files in .github are valid YAML, and their `make` commands use targets of the
    Makefile.
    """
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    contents = [
        yaml.safe_load(path.read_text("utf-8")) for path in (ROOT / ".github").rglob("*.yml")
    ]
    assert len(contents) > 5
    commands = [
        command
        for content in contents
        for job in content.get("jobs", {}).values()
        for command in commands_of(job)
    ]
    made = {command.removeprefix("make ") for command in commands if command.startswith("make ")}
    assert made
    assert made <= targets
    assert (ROOT / ".ci" / "run").exists()


def test_nightly_tests_have_make_target():
    """The nightly tests, whose folder pytest skips by default, have a target of the Makefile
    and a scheduled workflow.
    """
    options = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["pytest"][
        "ini_options"
    ]
    makefile = (ROOT / "Makefile").read_text("utf-8")
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "nightly.yml").read_text("utf-8"))
    assert "nightly" in options["norecursedirs"]
    folders = [path for path in (ROOT / "tests").rglob("*") if path.is_dir()]
    left_out = [path for path in folders if path.name in options["norecursedirs"]]
    assert sorted(left_out) == [ROOT / "tests" / "cuda", ROOT / "tests" / "nightly"]
    assert list((ROOT / "tests" / "nightly").glob("test_*.py"))
    recipe = re.search(
        r"^nightly: export SAMPLES := all\nnightly: .*\n((?:\t.*\n)+)", makefile, re.MULTILINE
    )
    first, *others = recipe[1].splitlines()
    assert first.startswith("\t$(BIN)/pytest tests/nightly ")
    assert ["/pytest -m nightly " in command for command in others] == [
        True,
        True,
    ]  # one for each environment
    assert commands_of(workflow["jobs"]["run"]) == ["make nightly"]
    assert "schedule" in workflow[True]  # YAML 1.1 reads `on` as a boolean


# ---- Appearance ----------------------------------------------------------------------------------

BACKGROUNDS = {"light": "#f2f2f2", "dark": "#2b2b2b"}  # of code


def luminance(color):
    """Return the relative luminance of a color, as in WCAG 2."""
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_terminal_colors_are_readable():
    """All 8 terminal colors of the light and the dark theme have a contrast of at least 4.5
    with the background.
    """
    text = (ROOT / "docs" / "_static" / "site.css").read_text("utf-8")
    colors_of_blocks = (
        re.findall(r"--ansi-(\w+): (#\w{6})", block)
        for block in re.split(r"\n(?=@media|body\[)", text)
    )
    light, dark, chosen = filter(None, colors_of_blocks)
    assert len(light) == len(dark) == 8
    assert dark == chosen
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    for theme, colors in {"light": light, "dark": dark}.items():
        assert {
            name: color for name, color in colors if contrast(color, BACKGROUNDS[theme]) < 4.5
        } == {}
    assert all(f'[class*="-{name}"] {{ color: var(--ansi-{name}); }}' in text for name, _ in light)


# ---- Pictures ------------------------------------------------------------------------------------


def test_redrawn_pictures_are_byte_identical():
    """Four pictures that take less than a second, drawn twice, have the same bytes; `make
    docs` draws all once.
    """
    import pictures

    for draw in (
        pictures.rope_pairs,
        pictures.divided_heads,
        pictures.simulated_blackhole,
        pictures.funnel,
    ):
        first, second = draw().image("svg"), draw().image("svg")
        assert first == second
        assert first.startswith(b"<?xml")


def test_heads_are_drawn_on_their_devices():
    """With 8 query and 2 key/value heads, each of 2 devices has 4 and 1; with 4 devices,
    pairs share a key/value head.
    """
    import pictures

    assert pictures.held_heads(2) == [({0, 1, 2, 3}, {0}), ({4, 5, 6, 7}, {1})]
    assert [keys for _, keys in pictures.held_heads(4)] == [{0}, {0}, {1}, {1}]


def test_only_bugs_are_drawn_above_budget():
    """In the case causal, the error of mha_torch is below its budget, and the errors of more than
    50 bugs are above theirs.
    """
    import pictures

    budget, error = pictures.of_torch("causal")
    assert 0 < error < budget
    bugs = pictures.errors_of_bugs("causal")
    assert len(bugs) > 50
    assert all(error > budget for budget, error in bugs)


# ---- Measurements --------------------------------------------------------------------------------


def row_of(tokens, ours_ms, **fields):
    """Return a benchmark row for one sequence of the attention core."""
    row = {
        "what": "growth core",
        "framework": "jax",
        "shape": [1, 2, tokens, 8],
        "dtype": "float32",
        "group": "growth",
    }
    row |= {
        "axes": "B N S H",
        "ours_ms": ours_ms,
        "peers": {"jax.nn": 2.0},
        "ratio": 2.0,
        "limit_ratio": 1.5,
    }
    return row | {"peak_bytes": 1000 * tokens, **fields}


@pytest.fixture
def results(monkeypatch, tmp_path):
    """Return a function that writes a JSON file into an empty folder of benchmarks."""
    import measurements

    monkeypatch.setattr(measurements, "FOLDER", tmp_path)
    (tmp_path / "results").mkdir()

    def write(name, content):
        (tmp_path / name).write_text(json.dumps(content), "utf-8")

    return write


def file_of(*rows):
    return {
        "environment": {"platform": "Linux", "packages": {"jax": "1", "torch": None}},
        "rows": rows,
    }


def test_later_file_replaces_rows(results):
    """Rows in a later file of a machine replace rows of an earlier file with the same work;
    other machines do not count.
    """
    import measurements

    results("results/a-2026-01-02-more.json", file_of(row_of(128, 3.0)))
    results("results/a-2026-01-01.json", file_of(row_of(128, 1.0), row_of(256, 2.0)))
    results("results/b-2026-01-03.json", file_of(row_of(128, 9.0)))
    results("results/devices.json", {})
    assert [(row["shape"][2], row["ours_ms"]) for row in measurements.rows_of("a")] == [
        (128, 3.0),
        (256, 2.0),
    ]
    assert [(row.machine, row.date[-2:]) for row in measurements.measured()] == [
        ("a", "01"),
        ("a", "02"),
        ("b", "03"),
    ]


def test_targets_are_met_by_their_worst_row(results):
    """A target is met only if its worst row meets the bound; a target without rows raises a
    ValueError.
    """
    import measurements

    results(
        "results/a-2026-01-01.json",
        file_of(row_of(128, 1.0, ratio=1.2), row_of(256, 1.0, ratio=0.9, what="other")),
    )
    target = {
        "about": "x",
        "machine": "a",
        "rows": {"shape": "1x2x*"},
        "value": "ratio",
        "cause": "y",
    }
    half = {
        "about": "x",
        "machine": "a",
        "rows": {"what": "growth *"},
        "peer": "jax.nn",
        "cause": "y",
    }
    results(
        "targets.json",
        [{**target, "at_least": 1}, {**target, "at_most": 1.2}, {**half, "at_least": 2}],
    )
    targets = [row[1:] for row in measurements.targets()]
    assert targets[0] == ("≥ 1", "0.90 to 1.20", "**no**", "y")
    assert targets[1] == ("≤ 1.2", "0.90 to 1.20", "yes", "")
    assert targets[2] == ("≥ 2", "2.00", "yes", "")
    assert measurements.digits_of(2.9993, 3) == "2.999"  # not 3.00, which meets the bound
    results("targets.json", [{**target, "rows": {"what": "absent"}, "at_least": 1}])
    with pytest.raises(ValueError, match="have rows for 'x'"):
        list(measurements.targets())


def test_growth_is_plotted_by_tokens():
    """The growth of any kind of work is plotted by tokens, in panels for its times and its
    memory.
    """
    import plots

    steps = [
        row_of(tokens, 1.0, what="growth step", axes="B S E", shape=[1, tokens, 16])
        for tokens in (1024, 131072)
    ]
    rings = [row_of(tokens, None, what="growth ring", peers={}) for tokens in (1024, 4096)]
    figure = plots.growth([*steps, *rings])
    assert len(figure.axes) == 4
    assert [len(panel.lines) for panel in figure.axes] == [2, 1, 0, 1]
    assert list(figure.axes[0].lines[0].get_xdata()) == [1024, 131072]
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["1k", "128k"]


def test_labels_are_moved_apart_in_order():
    """Labels closer than the distance are moved apart around their middle, in order; the
    others stay.
    """
    import plots

    spread = plots.apart([1.0, 0.0, 1.1], 0.5)
    assert spread == pytest.approx([0.8, 0.0, 1.3])


def test_page_lists_every_measurement_file():
    """The page of benchmarks has a heading for each file, its pictures, and a table of targets."""
    import measurements

    text = measurements.page()
    assert [row.date for row in measurements.measured() if f"### {row.date}" not in text] == []
    assert {*IMAGE.findall(text)} >= {"ratios-epyc", "growth-epyc", "ratios-h200"}
    assert text.count(":::{dropdown}") > 14
    assert measurements.targets_table().count("\n") > 10


def test_each_search_rule_leaves_fewer_bugs():
    """Each rule of the search for scale-missing leaves fewer bugs, and the last one only this."""
    import pictures

    counts, bugs = pictures.funnel_counts("scale-missing")
    numbers = [*counts.values()]
    assert numbers == sorted({*numbers}, reverse=True)
    assert (numbers[-1], bugs) == (1, "scale-missing")


# ---- The CI recipe -------------------------------------------------------------------------------


def commands_of(job):
    """Return the commands of a GitHub or GitLab job."""
    return job.get("script") or [step["run"] for step in job["steps"] if "run" in step]


@pytest.fixture
def ci_page():
    return (ROOT / "docs" / "how-to" / "ci.md").read_text("utf-8")


def test_ci_recipe_commands_parse(ci_page, pytestconfig):
    """The commands of the recipe have valid options, files and names; tests of `mutate` and
    of the plugin run them.
    """
    files = re.findall(r"^```python\n# (\S+)\n", ci_page, re.MULTILINE)
    github, gitlab = (
        yaml.safe_load(text)
        for text in re.findall(r"^```yaml\n(.*?)^```$", ci_page, re.M | re.DOTALL)
    )
    programs = Counter()
    for command in [*commands_of(github["jobs"]["tests"]), *commands_of(gitlab["attention"])]:
        program, *words = shlex.split(command, comments=True)
        programs[program] += 1
        if program == "mha-parity":
            options = parsed(words)
            if words[0] == "mutate":
                assert options["subject"] == "attention:attend"
                assert [
                    glob for glob in options["only"] if not fnmatch.filter(bugs_to_inject(), glob)
                ] == []
                program, *words = options["tests"]
        if program == "pytest":
            assert words[-1] in files
        for word in words:
            if program == "pytest" and word.startswith("--"):
                pytestconfig.getoption(word)  # it raises a ValueError if no plugin has the option
    assert programs == {"pip": 2, "mha-parity": 3, "pytest": 2}


def test_ci_recipe_test_passes(ci_page, importable_folder):
    """The test in the recipe passes with the files on its page."""
    for code in re.findall(r"^```python\n(.*?)^```$", ci_page, re.MULTILINE | re.DOTALL):
        (importable_folder / code.split()[1]).write_text(
            code, "utf-8"
        )  # the first line names the file
    names = runpy.run_path(str(importable_folder / "test_attention.py"))
    names["test_the_layer"](parity.assert_parity)


@pytest.mark.thorough
@pytest.mark.costly("commands in a shell, as users type them")
def test_checkpoint_commands_run(tmp_path):
    """The commands for a checkpoint run on a converted model of two layers and find both the
    same.
    """
    spec = parity.AttentionSpec(128, 32, qkv_bias=False, out_bias=False)
    tensors = {}
    for i in range(2):
        layer = parity.convert(
            parity.random_weights(spec), source="canonical", target="transformers.LLaMA", spec=spec
        )
        tensors |= {f"model.layers.{i}.self_attn.{name}": array for name, array in layer.items()}
    save_tensors(tmp_path / "model.safetensors", tensors, {})
    page = (ROOT / "docs" / "how-to" / "ci.md").read_text("utf-8")
    (block,) = re.findall(r"^```\n(LAYER=.*?)^```$", page, re.MULTILINE | re.DOTALL)
    status, printed, errors = run(
        block.replace("\n", " && ").removesuffix(" && "), tmp_path, environment()
    )
    assert status == 0, errors
    assert "2 the same, bit for bit" in printed

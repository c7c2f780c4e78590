"""The site of the documentation: its links, its generated pages and pictures, and the commands of its CI recipe."""

import re
import tomllib
from collections import Counter
from pathlib import Path

import pytest
import yaml
from shell import environment, run
from wild.sets import MISTAKES, RIGHTS

import parity
from parity_lab.plants import PLANTS
from parity_lab.selftest import SELFTEST_CASES, SELFTESTED, planted_in

ROOT = Path(__file__).parents[1]
TOOLS = ROOT / "tools" / "docs-site"


@pytest.fixture(autouse=True)
def tools(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))


# ---- Pages -----------------------------------------------------------------------------------------------------------


def test_links_of_the_site_lead_to_its_pages(tmp_path):
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
        for link in re.findall(r"\]\(([^()\s#]+)[^()\s]*\)", stage.FENCE.sub("", page.read_text("utf-8"))):
            target = (page.parent / link).resolve().relative_to(tmp_path) if ":" not in link else None
            is_generated = target is None or target.parts[0] == "reference" or target.suffix == ".png"
            if not is_generated and not (tmp_path / target).exists():
                broken.append(f"{page.relative_to(tmp_path)}: {link}")
    assert broken == []
    shown = (tmp_path / "source" / "examples" / "port" / "layer.py.md").read_text("utf-8")
    assert (ROOT / "examples" / "port" / "layer.py").read_text("utf-8").strip() in shown


def test_links_in_code_stay(tmp_path):
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
            "[a](../contributing/guide.md#tests) [b](../reference/cli/index.md) [c](../source/Makefile.md)\n"
            "```\n[d](../CONTRIBUTING.md)\n```\n"
        )
    assert site.viewed == {ROOT / "Makefile"}


def test_generated_pages_have_every_command_case_family_layout_and_bug():
    import reference

    from parity.cli.main import COMMANDS
    from parity.diagnosis.mistakes import mistake_by_name
    from parity.models.families import FAMILIES

    commands = reference.command_pages()
    assert commands.keys() == {f"reference/cli/{name}" for name in ("index", *COMMANDS)}
    assert "`--json PATH`" in commands["reference/cli/run"]
    for page, names in {
        reference.cases_page(): parity.CASES,
        reference.families_page(): FAMILIES,
        reference.layouts_page(): parity.LAYOUTS,
        reference.bugs_page(): mistake_by_name(),
    }.items():
        assert [name for name in names if f"`{name}`" not in page] == []


def test_the_table_of_conventions_has_every_check_and_every_library():
    import parts

    from parity.conformance.peers import PEERS
    from parity.conformance.questions import QUESTIONS

    subjects = {each["name"]: each["answers"] for each in parts.measured("conformance")["subjects"]}
    assert subjects.keys() == PEERS.keys()
    assert all(answers.keys() == QUESTIONS.keys() for answers in subjects.values())
    shown = parts.conventions()
    assert shown.count("<tr>") == 1 + len(QUESTIONS)
    statuses = [
        answers[name][0] for name in QUESTIONS for library, answers in subjects.items() if "mha_" not in library
    ]
    broken = sum(status in ("broken", "differs") for status in statuses)
    assert broken > 10
    assert shown.count("✗ ") == broken  # this project breaks none


def test_an_answer_that_classes_share_names_the_others():
    import parts

    def subject(name, status, words):
        return {"name": f"mha_torch.{name}", "answers": {"causal": [status, words]}}

    found = [subject("A", "ok", "top-left"), subject("B", "note", "either"), subject("C", "ok", "top-left")]
    assert parts.shared_answer(found, "causal") == ("note", "top-left; B: either")
    assert parts.shared_answer([*found[:1], subject("D", "absent", "—")], "causal") == ("ok", "top-left")
    assert parts.shared_answer([subject("D", "absent", "—")], "causal") == ("absent", "—")


def test_the_table_of_injected_bugs_is_that_of_the_self_test():
    import parts

    counts = parts.measured("selftest")["bugs"]
    injected = Counter(name for case in SELFTEST_CASES for name in ("", *planted_in(case)))
    assert {name: count for name, (count, *_) in counts.items()} == {
        name: count * len(SELFTESTED) for name, count in injected.items()
    }, "run `python tools/docs-site/measure.py selftest`"
    assert all(count == detected for count, detected, _ in counts.values())
    assert {name for name, (count, _, identified) in counts.items() if identified < count} == {"precision-bfloat16"}
    shown = parts.injected_bugs()
    assert [page for page in parts.known_by_page() if f"[{page}](" not in shown] == []
    assert [name for name in PLANTS if f"`{name}`" not in shown] == []


def test_the_rates_are_those_of_the_present_records():
    import parts

    halves = parts.measured("diagnosis-rates")["halves"].values()
    assert sum(half["rights"] for half in halves) == len(RIGHTS), (
        "run `python tools/docs-site/measure.py diagnosis-rates`"
    )
    assert sum(half["bugs"] for half in halves) == len(MISTAKES)
    assert "| bugs |" in parts.diagnosis_rates()


def test_results_are_cut_to_what_the_pages_show():
    import measure

    outcomes = [
        {"hypothesis": "", "is_caught": True, "is_named": True},
        {"hypothesis": "a", "is_caught": True, "is_named": False},
        {"hypothesis": "a", "is_caught": True, "is_named": True},
    ]
    assert measure.of_selftest({"outcomes": outcomes}) == {"bugs": {"": [1, 1, 1], "a": [2, 2, 1]}}
    answers = [{"question": "mask", "status": "ok", "words": "True hides", "by_path": {}}]
    subjects = [{"name": "x", "missing": "", "answers": answers}, {"name": "y", "missing": "no y", "answers": []}]
    kept = {"subjects": [{"name": "x", "answers": {"mask": ["ok", "True hides"]}}]}
    assert measure.of_conformance({"subjects": subjects}) == kept


def test_the_terminal_has_the_colors_of_a_diagnosis_and_contrast():
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


def test_the_version_to_cite_is_that_of_the_package():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert cited["version"] == tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]


def test_workflows_and_issue_forms_are_yaml_and_run_what_there_is():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    found = [yaml.safe_load(path.read_text("utf-8")) for path in (ROOT / ".github").rglob("*.yml")]
    assert len(found) > 5
    commands = [command for each in found for job in each.get("jobs", {}).values() for command in commands_of(job)]
    made = {command.removeprefix("make ") for command in commands if command.startswith("make ")}
    assert made
    assert made <= targets
    assert (ROOT / ".ci" / "run").exists()


# ---- Pictures --------------------------------------------------------------------------------------------------------


def test_pictures_are_the_same_bytes_when_they_are_drawn_again():
    import pictures

    for draw in (pictures.rope_pairs, pictures.rope_error, pictures.divided_heads, pictures.funnel):
        first, second = draw().image("svg"), draw().image("svg")
        assert first == second
        assert first.startswith(b"<?xml")


def test_heads_are_drawn_where_they_are():
    import pictures

    assert pictures.held_heads(2) == [({0, 1, 2, 3}, {0}), ({4, 5, 6, 7}, {1})]
    assert [keys for _, keys in pictures.held_heads(4)] == [{0}, {0}, {1}, {1}]


def test_a_right_layer_is_drawn_below_the_line_and_bugs_above():
    import pictures

    budget, error = pictures.of_torch("causal")
    assert 0 < error < budget
    bugs = pictures.errors_of_bugs("causal")
    assert len(bugs) > 50
    assert all(error > budget for budget, error in bugs)


def test_each_rule_of_a_search_leaves_fewer_bugs():
    import pictures

    counts, found = pictures.funnel_counts("scale-missing")
    numbers = [*counts.values()]
    assert numbers == sorted({*numbers}, reverse=True)
    assert (numbers[-1], found) == (1, "scale-missing")


# ---- The recipe for CI -----------------------------------------------------------------------------------------------


def commands_of(job):
    """The commands of a job of GitHub or GitLab."""
    return job.get("script") or [step["run"] for step in job["steps"] if "run" in step]


def test_the_commands_of_the_recipe_for_ci_run(tmp_path):
    page = (ROOT / "docs" / "how-to" / "ci.md").read_text("utf-8")
    for code in re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        (tmp_path / code.split()[1]).write_text(code, "utf-8")  # the first line names the file
    github, gitlab = (yaml.safe_load(text) for text in re.findall(r"^```yaml\n(.*?)^```$", page, re.M | re.DOTALL))
    commands = [*commands_of(github["jobs"]["tests"]), *commands_of(gitlab["attention"])]
    assert sum(command.startswith("pytest") for command in commands) == 2
    for command in dict.fromkeys(each for each in commands if not each.startswith("pip ")):
        status, printed, errors = run(command, tmp_path, environment())
        assert status == 0, f"{command}: {printed}{errors}"
    assert "test_attention" in (tmp_path / "parity.xml").read_text("utf-8")


def test_the_commands_for_a_checkpoint_run(tmp_path):
    spec = parity.AttentionSpec(128, 32, qkv_bias=False, out_bias=False)
    tensors = {}
    for i in range(2):
        layer = parity.convert(parity.random_weights(spec), source="canonical", target="transformers.LLaMA", spec=spec)
        tensors |= {f"model.layers.{i}.self_attn.{name}": array for name, array in layer.items()}
    parity.save_tensors(tmp_path / "model.safetensors", tensors, {})
    page = (ROOT / "docs" / "how-to" / "ci.md").read_text("utf-8")
    (block,) = re.findall(r"^```\n(LAYER=.*?)^```$", page, re.MULTILINE | re.DOTALL)
    status, printed, errors = run(block.replace("\n", " && ").removesuffix(" && "), tmp_path, environment())
    assert status == 0, errors
    assert "2 the same, bit for bit" in printed

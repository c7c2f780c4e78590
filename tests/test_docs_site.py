"""The site of the documentation: its links, its generated pages and pictures, and the commands of its CI recipe."""

import re
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from shell import environment, run

import parity

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


def test_every_field_has_a_row_of_support_and_of_meaning():
    import reference
    import support

    names = [field.name for field in fields(parity.AttentionSpec)]
    assert {feature.name for feature in support.FEATURES} == {*names}
    for name in support.FRAMEWORKS:
        assert support.recorded(name).keys() == {feature.key for feature in (*support.FEATURES, *support.ARGUMENTS)}
    rows = re.findall(r"^\| `(\w+)` \| .+ \| (.+) \| .+ \|$", reference.attention_spec_page(), re.MULTILINE)
    assert [name for name, _ in rows] == names
    assert all(len(meaning) > 10 for _, meaning in rows)
    assert "gpt_oss" in reference.models_by_field()["sinks"]


KNOWN = {
    "jax": {
        ("soft_cap", "JAX, CPU"): "kernel",
        ("soft_cap", "JAX, GPU"): "plain",
        ("sinks", "JAX, TPU"): "kernel",
        ("relative_products", "tokens"): "rejected",
        ("relative_products", "JAX, CPU"): "plain",
        ("shared_kv", "heads"): "rejected",
        ("shared_kv", "tokens"): "yes",
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


@pytest.mark.parametrize("name", KNOWN)
def test_known_features_are_supported_or_rejected(name):
    import support

    features = {feature.key: feature for feature in (*support.FEATURES, *support.ARGUMENTS)}
    with support.FRAMEWORKS[name]() as framework:
        found = {key: support.answers(framework, features[key]) for key in dict.fromkeys(key for key, _ in KNOWN[name])}
    for (key, path), answer in KNOWN[name].items():
        told = found[key][path]
        assert ("rejected" if told.startswith(f"{key} ") else told) == answer
    recorded = support.recorded(name)
    assert found == {key: recorded[key] for key in found}


@pytest.mark.thorough
@pytest.mark.parametrize("name", KNOWN)
def test_the_recorded_answers_of_layers_are_those_of_today(name):
    """If not, `python tools/docs-site/support.py NAME` records them. For TTNN: tests/tt/test_support.py."""
    import support

    assert support.support(name) == support.recorded(name)


def test_the_support_matrix_has_a_reason_for_each_refusal():
    import reference
    import support

    answers = support.recorded("tt")
    page = reference.support_page({"jax": answers, "tt": answers | {"rope": {**answers["rope"], "heads": "reason"}}})
    rows = dict(re.findall(r"^\| (`.+?) \| (.+) \|$", page.partition("## Kernels")[0], re.MULTILINE))
    assert rows["`gate`"].split(" | ") == ["all", "all", "all", "all", "—"]
    assert re.fullmatch(r"all \| all \| all \| JAX \[\^\d+\] \| —", rows["`rope`"])
    assert re.fullmatch(r"all \| all \| all \| — \[\^\d+\] \| —", rows["`alibi`"])
    notes = dict(re.findall(r"^\[\^(\d+)\]: (.+)\.$", page, re.MULTILINE))
    assert {*re.findall(r"\[\^(\d+)\]", " ".join(rows.values()))} == {*notes}
    assert "TTNN: reason" in notes.values()
    assert f"JAX, TTNN: {answers['alibi']['heads']}" in notes.values()
    assert "| `soft_cap` | plain | plain | plain | plain |" in page


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

    for draw in (pictures.rope_pairs, pictures.rope_error, pictures.divided_heads):
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

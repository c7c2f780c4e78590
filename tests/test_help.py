"""What a user is told without asking a person: help, the lists of cases and of bugs, what is installed."""

import argparse
import importlib
import json
import pkgutil
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from refusals import refuses
from setuptools import find_packages

import parity.backends
import parity.cli
import parity_lab.commands
from parity.backends import BACKENDS
from parity.cli.clone import FROM_A_CLONE
from parity.cli.main import COMMANDS, main, make_parser
from parity.core.cases import CASES, DTYPES
from parity.core.packages import OPTIONAL
from parity.diagnosis.mistakes import mistakes_for
from parity.reporting.cases import covers
from parity_lab.selftest import SELFTEST_CASES

ROOT = Path(__file__).parent.parent
PAGES = {name: command.PAGE for name, command in COMMANDS.items()}


def commands():
    """The parsers of the commands, by name."""
    (action,) = (action for action in make_parser()._actions if isinstance(action, argparse._SubParsersAction))
    return action.choices


# ---- --help ----------------------------------------------------------------------------------------------------------


def test_every_module_with_a_page_is_a_command():
    modules = [
        importlib.import_module(f"{package.__name__}.{found.name}")
        for package in (parity.cli, parity_lab.commands)
        for found in pkgutil.iter_modules(package.__path__)
    ]
    assert {module.__name__ for module in modules if hasattr(module, "PAGE")} == {
        command.__name__ for command in COMMANDS.values()
    }
    assert commands().keys() == COMMANDS.keys()


@pytest.mark.parametrize("name", PAGES)
def test_help_says_what_a_command_does_with_an_example_and_the_exit_status(name, capsys):
    with pytest.raises(SystemExit) as exit_:
        main([name, "--help"])
    assert exit_.value.code == 0
    said = capsys.readouterr().out
    words = " ".join(said.split())
    assert PAGES[name].about in words
    assert words.index(PAGES[name].about) < words.index("options:")
    status = re.search(r"exit status:\n  0 .+; 2 bad usage or something missing\n", said)
    assert status
    assert ("; 1 " in status[0]) == bool(PAGES[name].wrong)
    assert max(map(len, PAGES[name].epilog.splitlines())) <= 100


@pytest.mark.parametrize("name", PAGES)
def test_the_example_of_a_command_is_one_that_it_takes(name):
    program, *arguments = shlex.split(PAGES[name].example.replace("\\\n", ""))
    assert program == "mha-parity"
    assert arguments[0] == name
    options = make_parser().parse_args(arguments)
    assert options.command == name


def test_help_of_run_lists_backends_and_dtypes():
    words = " ".join(commands()["run"].format_help().split())
    assert f"--backends A,B {', '.join(BACKENDS)};" in words
    assert all(dtype in words for dtype in DTYPES)


def test_help_imports_nothing_that_takes_time():
    program = (
        "import sys, contextlib, io\n"
        "from parity.cli.main import main\n"
        f"for name in {list(PAGES)}:\n"
        "    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):\n"
        "        main([name, '--help'])\n"
        "print(sorted({'numpy', 'rich', 'importlib.metadata', 'parity.core.cases', 'parity.reporting.console'}"
        " & set(sys.modules)))"
    )
    command = [sys.executable, "-S", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{program}"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


def test_the_page_of_commands_lists_every_command():
    page = (ROOT / "docs" / "commands.md").read_text("utf-8")
    assert sorted(re.findall(r"^\| `([\w-]+)", page, flags=re.MULTILINE)) == sorted(PAGES)


# ---- Cases -----------------------------------------------------------------------------------------------------------


def test_cases_are_listed_one_a_line_with_what_they_cover(capsys):
    assert main(["cases"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(CASES)
    assert all(case.about in line for case, line in zip(CASES.values(), lines, strict=True))
    line = next(line for line in lines if line.startswith("decode-gqa-rope "))
    assert line.endswith("heads 6/2 x 16, tokens 2 x 4+1+1+1, RoPE, cache of 8 slots, no biases")


def test_cases_are_chosen_by_their_names_and_written_as_json(tmp_path, capsys):
    assert main(["cases", "window-c*", "--json", str(tmp_path / "c.json")]) == 0
    assert capsys.readouterr().out.count("\n") == 1
    content = json.loads((tmp_path / "c.json").read_text())
    assert content["format"] == 1
    (case,) = content["cases"]
    assert case["name"] == "window-cross"
    assert case["covers"] == "heads 4 x 8, tokens 2 x 5 over 9, window 3"
    assert case["spec"]["num_heads"] == 4


@pytest.mark.parametrize(
    ("arguments", "refusal"),
    [
        (["cases", "rope_gqa"], refuses("GLOB", GLOB="rope_gqa", hint="did you mean rope-gqa")),
        (["run", "--cases", "rope_gqa"], refuses("--cases", {"--cases": "rope_gqa"}, hint="did you mean rope-gqa")),
        (
            ["plot", "no-such-file", "a.png", "--case", "causl"],
            refuses("--case", {"--case": "causl"}, hint="causal"),
        ),
        (["run", "--backends", "numpy"], refuses("--backends", {"--backends": "numpy"})),
        (["run", "--dtypes", "int8"], refuses("--dtypes", {"--dtypes": "int8"})),
        (["selftest", "--backends", "numpy"], refuses("--backends", {"--backends": "numpy"})),
        (["plot", "no-such-file", "a.txt"], refuses("DST", DST="a.txt")),
        (["bench", "--plot", "a.txt"], refuses("--plot", {"--plot": "a.txt"})),
        (["bugs", "rope-pear"], refuses("NAME", NAME="rope-pear", hint="did you mean rope-pairs")),
        (["rum"], refuses("COMMAND", "rum", hint="did you mean run?")),
        (["run", "--cass", "rope"], refuses("--cass", hint="did you mean --cases")),
        (["layouts", "llma"], refuses("layout", layout="llma", hint="LLaMA")),
    ],
)
def test_what_is_not_known_is_refused_in_the_words_of_the_command_line(capsys, arguments, refusal):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"mha-parity: error: {refusal.argument} ")
    assert refusal.is_printed_in(captured.err)
    assert captured.err.count("\n") == 1
    assert captured.out == ""


@pytest.mark.parametrize("command", ["run", "selftest"])
def test_without_a_framework_it_is_said_what_to_install(capsys, let_need, command):
    for name in BACKENDS:
        let_need(name, f"{name}_is_not_here")
    assert main([command]) == 2
    message = capsys.readouterr().err
    assert [name for name in BACKENDS if f"{name} needs {name}_is_not_here" not in message] == []
    assert message.endswith("pip install torch, or jax and flax\n")
    assert message.count("\n") == 1


@pytest.mark.parametrize("not_finite", ["visible", "hidden"])
def test_a_case_with_nan_says_so(not_finite):
    case = replace(CASES["causal"], not_finite=not_finite)
    assert covers(case) == f"heads 4 x 8, tokens 2 x 5, causal, NaN {not_finite}"


# ---- Names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [("--batch-size", "--capacity"), ("--batch", "--seq-len")])
def test_cache_size_takes_the_former_names_too_and_does_not_show_them(capsys, names):
    batch_size, capacity = names
    assert main(["cache-size", "--num-kv-heads", "2", "--head-dim", "4", batch_size, "3", capacity, "5"]) == 0
    assert "2 x 3 sequences x 2 heads x 5 slots x 4 features" in capsys.readouterr().out
    words = commands()["cache-size"].format_help().split()
    assert ({"--batch", "--seq-len"} & set(words)) == set()


def test_cache_size_without_a_capacity_is_refused(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["cache-size", "--num-kv-heads", "2", "--head-dim", "4"])
    assert exit_.value.code == 2
    assert "--capacity is required" in capsys.readouterr().err


# ---- What is installed -----------------------------------------------------------------------------------------------


def test_doctor_has_the_optional_packages_and_what_would_be_refused_without_them(tmp_path, capsys, monkeypatch):
    installed = {"jax", "flax", "torch", "pytest", "matplotlib", "transformers", "keras", "equinox", "gguf", "pillow"}
    monkeypatch.setattr("parity.core.packages.is_installed", lambda package: package in installed)
    assert main(["doctor", "--json", str(tmp_path / "d.json")]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "jinja2 missing skipped or refused: `--html`, `pytest --parity-report *.html`; pip install jinja2" in out
    assert "orbax-checkpoint missing skipped or refused: orbax checkpoints; pip install orbax-checkpoint" in out
    optional = json.loads((tmp_path / "d.json").read_text())["optional"]
    assert optional.keys() == OPTIONAL.keys()
    assert {name for name, version in optional.items() if version is None} == {"jinja2", "orbax-checkpoint"}
    assert re.match(r"\d+\.", optional["pytest"])


def test_no_message_names_a_package_of_this_name_on_an_index():
    """Nobody has to publish this project under its name: whoever does would be installed."""
    files = [*ROOT.glob("parity/**/*.py"), *ROOT.glob("mha_*/**/*.py"), *ROOT.glob("docs/*.md"), ROOT / "README.md"]
    assert [file.name for file in files if re.search(r"pip install '?mha-parity", file.read_text("utf-8"))] == []


# ---- The pages of bugs -----------------------------------------------------------------------------------------------


def test_bugs_prints_the_page_that_a_diagnosis_names(capsys):
    assert main(["bugs", "rope-pairs", "grouped-heads"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("# RoPE: which features form a pair\n")
    assert "\n# Grouped heads: tiled instead of repeated\n" in out


@pytest.mark.thorough
def test_bugs_finds_the_page_of_every_mistake(capsys):
    for name, page in {(mistake.name, mistake.page) for case in SELFTEST_CASES for mistake in mistakes_for(case)}:
        assert main(["bugs", name]) == 0
        title = (ROOT / "parity" / "bugs" / f"{page}.md").read_text("utf-8").splitlines()[0]
        assert capsys.readouterr().out.splitlines()[0] == title


def test_bugs_knows_the_mistakes_that_are_only_searched_for(capsys):
    assert main(["bugs", "v-heads-permuted"]) == 0
    assert capsys.readouterr().out == (ROOT / "parity" / "bugs" / "head-order.md").read_text("utf-8")


def test_bugs_without_a_name_prints_the_list(tmp_path, capsys):
    assert main(["bugs", "--json", str(tmp_path / "b.json")]) == 0
    assert "[rope-pairs](rope-pairs.md)" in capsys.readouterr().out
    assert json.loads((tmp_path / "b.json").read_text())["pages"].keys() == {"README"}


# ---- The wheel -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FROM_A_CLONE)
def test_a_command_of_a_clone_says_so_elsewhere(name, capsys, monkeypatch):
    monkeypatch.delitem(COMMANDS, name)
    assert main([name, "--json", "-"]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"mha-parity: error: {name} is not in the wheel")
    assert (captured.err.count("\n"), captured.out) == (1, "")
    assert f"\n    {name} " not in make_parser().format_help()


def test_the_wheel_has_no_package_that_only_a_clone_has():
    config = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]
    found = set(find_packages(str(ROOT), **config["packages"]["find"]))
    assert {name.partition(".")[0] for name in found} == {"mha_spec", "mha_jax", "mha_torch", "mha_tt", "parity"}
    assert {"parity.cli", "parity.pretrained", "mha_jax.kernels"} <= found
    assert not any("npz" in pattern for patterns in config["package-data"].values() for pattern in patterns)


@pytest.mark.thorough
def test_the_wheel_is_small_and_holds_every_page_and_the_list_of_public_names(tmp_path):
    source = tmp_path / "source"
    ignore = shutil.ignore_patterns("__pycache__")
    for package in ("mha_spec", "mha_jax", "mha_torch", "mha_tt", "parity", "parity_lab"):
        shutil.copytree(ROOT / package, source / package, ignore=ignore)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    build = ("wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(tmp_path))
    subprocess.run([sys.executable, "-m", "pip", *build, str(source)], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("mha_parity-*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    assert {f"parity/bugs/{page.name}" for page in (ROOT / "parity" / "bugs").glob("*.md")} <= held
    assert {"parity/__init__.pyi", "parity/py.typed"} <= held
    assert not any(name.startswith("parity_lab") for name in held)
    assert wheel.stat().st_size < 4_000_000
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    command = [sys.executable, "-m", "parity", "bench"]  # -m: of the folder that it runs in
    done = subprocess.run(command, cwd=tmp_path / "installed", capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "bench is not in the wheel" in done.stderr

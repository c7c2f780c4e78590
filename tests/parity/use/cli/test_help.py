"""Tests of `--help`, error lines, lists of cases and bugs, completion and `doctor`."""

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
from email.message import Message
from pathlib import Path

import click
import pytest
from helpers import ROOT
from helpers.input_errors import Misuse, rejects
from setuptools import find_packages

import parity.measure.backends
import parity.use.cli
import parity_lab.commands
from parity.explain.diagnosis.bugs import bugs_for, page_by_bug
from parity.measure.backends import BACKENDS
from parity.measure.core.cases import CASES, DTYPES
from parity.measure.core.packages import OPTIONAL
from parity.port.models.families import FAMILIES
from parity.use.cli.clone import FROM_A_CLONE
from parity.use.cli.command import Command
from parity.use.cli.main import COMMANDS, GROUPS, PROGRAM, SHELLS, command_named, main
from parity.use.cli.options import backend_list, dtype_list, named_path
from parity.use.cli.project import ProjectOptions
from parity.use.reporting.bugs import bug_page
from parity.use.reporting.cases import covers
from parity_lab.selftest import SELFTEST_CASES

PAGES = {name: command_named(name) for name in COMMANDS}


def help_of(name):
    """Return the help of a command."""
    command = PAGES[name]
    return command.get_help(click.Context(command, info_name=f"mha-parity {name}"))


# ---- --help --------------------------------------------------------------------------------------


def test_every_command_module_is_registered():
    """The modules of parity.use.cli and parity_lab.commands whose `run` is a command are the
    modules of COMMANDS.
    """
    modules = [
        importlib.import_module(f"{package.__name__}.{module.name}")
        for package in (parity.use.cli, parity_lab.commands)
        for module in pkgutil.iter_modules(package.__path__)
    ]
    registered = {
        module.__name__ for module in modules if isinstance(getattr(module, "run", None), Command)
    }
    assert registered == {*COMMANDS.values()}
    assert [*PAGES] == sorted(PAGES, key=[*COMMANDS].index)


def test_command_help_is_complete(capsys):
    """The help of a command has its description before the options, then its exit statuses;
    its lines have at most 100 columns, and `help COMMAND` prints the same.
    """
    for name, page in PAGES.items():
        assert main([name, "--help"]) == 0, name
        printed = capsys.readouterr().out
        words = " ".join(printed.split())
        assert page.about in words, name
        assert words.index(page.about) < words.index("All commands:"), name
        status = re.search(r"Exit status:\n  0 .+; 2 bad usage or something missing\n", printed)
        assert status, name
        assert ("; 1 " in status[0]) == bool(page.wrong), name
        assert max(map(len, printed.splitlines())) <= 100, name
        assert main(["help", name]) == 0
        assert capsys.readouterr().out == printed


def test_help_all_shows_rare_options(capsys):
    """`--help` leaves out the hidden options of a command, `--help-all` lists them also, and only
    commands with such options have it.
    """
    with_hidden = []
    for name, page in PAGES.items():
        hidden = [option for option in page.params if getattr(option, "hidden", False)]
        assert main([name, "--help"]) == 0
        usual = capsys.readouterr().out
        if not hidden:
            assert "--help-all" not in usual, name
            continue
        with_hidden.append(name)
        assert "--help-all" in usual, name
        assert main([name, "--help-all"]) == 0
        printed = capsys.readouterr().out
        for option in hidden:
            assert f"  {option.opts[0]} " not in usual, name
            assert f"  {option.opts[0]} " in printed, name
        assert {*usual.split()} <= {*printed.split()}, name
        assert max(map(len, printed.splitlines())) <= 100, name
        # The help after it hides them again.
        assert main([name, "--help"]) == 0
        assert capsys.readouterr().out == usual
    assert {"run", "diagnose", "compare", "plot", "convert", "write"} <= {*with_hidden}


def test_options_may_precede_the_command(capsys):
    """-q, -v and --color mean the same before the command as after it; those after it come last."""
    printed = {}
    for words in (
        "inspect canonical",
        "-q inspect canonical",
        "--color always inspect canonical",
        "--color=always inspect canonical --color never",
        "inspect canonical --color always",
    ):
        assert main(words.split()) == 0, words
        printed[words] = capsys.readouterr().out
    plain, quiet, colored, last_counts, after = printed.values()
    assert quiet == ""
    assert "\x1b[" in colored
    assert colored == after
    assert last_counts == plain
    errors = {
        "-q": "missing command; `mha-parity --help` ",
        "-q bugs -v": "--quiet cannot be combined with --verbose; ",
        "--color purple bugs": "--color 'purple' is not one of 'auto', 'always', 'never'; ",
        "-q rnu": "unknown command 'rnu'; did you mean 'run'?",
    }
    for words, error in errors.items():
        assert main(words.split()) == 2, words
        assert capsys.readouterr().err.startswith(f"mha-parity: error: {error}"), words


def test_bare_command_prints_the_help(capsys):
    """`mha-parity` and `mha-parity help` print the help with all commands in groups."""
    printed = set()
    for words in ([], ["help"], ["--help"], ["-h"]):
        assert main(words) == 0, words
        printed.add(capsys.readouterr().out)
    (text,) = printed
    assert re.findall(r"^  ([a-z-]+)  ", text, re.MULTILINE) == [
        name for names in GROUPS.values() for name in names
    ]


def test_example_of_command_is_parsed():
    """The example of each command begins with `mha-parity` and its name, and its arguments
    are valid.
    """
    for name, page in PAGES.items():
        program, *arguments = shlex.split(page.example.replace("\\\n", ""))
        assert program == "mha-parity", name
        assert arguments[0] == name
        page.make_context(name, arguments[1:])


def test_run_help_lists_backends_and_dtypes():
    """The help of `run` has the names of all backends and dtypes."""
    words = " ".join(help_of("run").split())
    assert f"--backends A,B {', '.join(BACKENDS)};" in words
    assert all(dtype in words for dtype in DTYPES)


@pytest.mark.costly("modules that a new process imports")
def test_help_imports_no_slow_module():
    """The help of all commands imports neither NumPy, Rich, importlib.metadata, the cases nor
    the console.
    """
    program = (
        "import sys, contextlib, io\n"
        "from parity.use.cli.main import main\n"
        f"for name in {list(PAGES)}:\n"
        "    with contextlib.redirect_stdout(io.StringIO()):\n"
        "        main([name, '--help'])\n"
        "print(sorted({'numpy', 'rich', 'importlib.metadata', 'parity.measure.core.cases', "
        "'parity.use.reporting.console'}"
        " & set(sys.modules)))"
    )
    command = [
        sys.executable,
        "-S",
        "-c",
        f"import sys; sys.path[:0] = {[str(ROOT), str(Path(click.__file__).parents[1])]}\n{program}",
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


# ---- Cases ---------------------------------------------------------------------------------------


def test_pages_use_existing_options():
    """Every option that a page of the documentation shows for a command exists, also in the
    rows of a table.
    """
    pages = [
        ROOT / "README.md",
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("parity/bugs/*.md"),
        *ROOT.glob("examples/*.md"),
    ]
    wrong, count = [], 0
    flags = {
        name: {flag for parameter in page.params for flag in parameter.opts}
        for name, page in PAGES.items()
    }
    for page in pages:
        text = page.read_text()
        code = "".join(re.findall(r"^```.*?^```", text, re.MULTILINE | re.DOTALL))
        called = re.findall(r"^(?:\$ )?mha-parity ([a-z][a-z-]*)", code, re.MULTILINE)
        wrong += [f"{page.name}: {name}" for name in called if name not in {*flags, "help"}]
        for command, words in re.findall(r"mha-parity ([a-z-]+)\b([^`|\n#]*)", text):
            if command not in flags:
                continue
            for option in re.findall(r"(?<!\S)--[a-z][\w-]*", words.split(" -- ")[0]):
                count += 1
                if option not in flags[command] | {"--no-causal", "--help"}:
                    wrong.append(f"{page.name}: {command} {option}")
        # Rows of a table describe options of the commands that the page calls.
        options = {"--help"}.union(*(flags.get(name, ()) for name in called))
        for option in re.findall(r"^\| `(--[a-z][\w-]*)", text, re.MULTILINE):
            if option not in options:
                wrong.append(f"{page.name}: a row of {option}")
    assert count > 50
    assert wrong == []


def test_cases_lists_one_case_per_line(capsys):
    """`run --list` prints one line per case, with its description and its settings."""
    assert main(["run", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(CASES)
    assert all(case.about in line for case, line in zip(CASES.values(), lines, strict=True))
    line = next(line for line in lines if line.startswith("decode-gqa-rope "))
    assert line.endswith("heads 6/2 x 16, tokens 2 x 4+1+1+1, RoPE, cache of 8 slots, no biases")


def test_cases_are_selected_by_glob(tmp_path, capsys):
    """`run --list --cases A,B --json` prints and writes only cases whose name matches one of the
    patterns, with their settings and specification.
    """
    words = ["run", "--list", "--cases", "window-c*,causal", "--json", str(tmp_path / "c.json")]
    assert main(words) == 0
    assert capsys.readouterr().out.count("\n") == 2
    content = json.loads((tmp_path / "c.json").read_text())
    assert content["schema"] == "mha-parity/run"
    case, other = content["cases"]
    assert other["name"] == "causal"
    assert case["name"] == "window-cross"
    assert case["covers"] == "heads 4 x 8, tokens 2 x 5 over 9, window 3"
    assert case["spec"]["num_heads"] == 4


@pytest.mark.parametrize(
    ("arguments", "input_error"),
    [
        (
            ["run", "--list", "--cases", "rope_gqa"],
            rejects("--cases", {"--cases": "rope_gqa"}, hint="did you mean rope-gqa"),
        ),
        (
            ["run", "--cases", "rope_gqa"],
            rejects("--cases", {"--cases": "rope_gqa"}, hint="did you mean rope-gqa"),
        ),
        (
            ["plot", "no-such-file", "a.png", "--case", "causl"],
            rejects("--case", {"--case": "causl"}, hint="causal"),
        ),
        (["run", "--backends", "numpy"], rejects("--backends", {"--backends": "numpy"})),
        (["run", "--dtypes", "int8"], rejects("--dtypes", {"--dtypes": "int8"})),
        (["selftest", "--backends", "numpy"], rejects("--backends", {"--backends": "numpy"})),
        (["plot", "no-such-file", "a.txt"], rejects("DST", DST="a.txt")),
        (["bench", "--plot", "a.txt"], rejects("--plot", {"--plot": "a.txt"})),
        (["bugs", "rope-pear"], rejects("NAME", NAME="rope-pear", hint="did you mean rope-pairs")),
        (["inspect", "flax.nxn"], rejects("layout", layout="flax.nxn", hint="flax.nnx")),
    ],
)
def test_unknown_value_names_its_option(capsys, arguments, input_error):
    """An unknown value or option exits with status 2 and one error line, which begins with
    the option and may suggest a similar name.
    """
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"mha-parity: error: {input_error.argument} ")
    assert input_error.is_printed_in(captured.err)
    assert captured.err.count("\n") == 1
    assert captured.out == ""


USAGE_ERRORS = {
    "rnu": "unknown command 'rnu'; did you mean 'run'?",
    "run --backend torch": "unknown option '--backend'; did you mean '--backends'?",
    "run --case rope-gqa": "unknown option '--case'; did you mean '--cases'?",
    "run --zzz": "unknown option '--zzz'; `mha-parity run --help` lists its options",
    "--zzz": "unknown option '--zzz'; `mha-parity --help` lists its options",
    "mutate math:floor pytest --bogus": (
        "unknown option '--bogus'; put -- before the command that runs your tests"
    ),
    "compare": "missing argument INPUT; usage: mha-parity compare [OPTIONS] INPUT…",
    "convert a b": "missing option --to; usage: mha-parity convert [OPTIONS] --to LAYOUT SRC DST",
    "run --layers 0": "--layers requires --model; `mha-parity run --help` ",
    "run --layers 0 --against transformers": "--layers and --against require --model; ",
    "run --model a --weights b": "--weights cannot be combined with --model; ",
    "run --model a --random 1": "--model cannot be combined with --random; ",
    "plot a b --input c --case d": "--case cannot be combined with --input; ",
    "run -v -q": "--quiet cannot be combined with --verbose; ",
    "run --jobs x": "--jobs 'x' is not a valid integer; `mha-parity run --help` ",
    "run --jobs": "option '--jobs' requires an argument; `mha-parity run --help` ",
    "run --jobs --grad": "option '--jobs' requires an argument; ",
    "run --quiet=3": "option '--quiet' does not take a value; ",
    "run --layers x": "--layers ",
    "convert a b --to c --rest kep": "--rest 'kep' is not one of 'keep', 'drop'; ",
    "write a b --to torch": "got unexpected extra argument (b); ",
    "inspect": "inspect requires INPUT or --layouts, and not both; ",
    "bugs --all rope-pairs": "--all cannot be combined with NAME; ",
    "spec --families --part x": "--part requires PATH; ",
}
"""Command lines, and the beginning of their errors."""


def test_usage_errors_are_plain_english(capsys):
    """A wrong command line exits with status 2 and one line that says in English what is wrong,
    and how to go on.
    """
    for words, error in USAGE_ERRORS.items():
        assert main(words.split()) == 2, words
        captured = capsys.readouterr()
        assert captured.err.startswith(f"mha-parity: error: {error}"), (words, captured.err)
        assert captured.err.count("\n") == 1, words
        assert len(captured.err) < 400, words
        assert captured.out == "", words


@pytest.mark.parametrize(
    ("arguments", "argument", "way_out"),
    [
        (
            "bugs rope",
            "NAME",
            "did you mean rope-pairs or rope-positions or rope-theta? `mha-parity bugs`",
        ),
        ("mutate math:floor --only maks -- true", "--only", "`mha-parity bugs --all`"),
        (
            "mutate math:floor --only fused-qkv* -- true",
            "--only",
            "mutate cannot inject fused-qkv-misread, fused-qkv-read-as-thirds",
        ),
        ("inspect llama", "layout", "`mha-parity inspect --layouts`"),
        ("conformance --libraries --only torhc", "--only", "there are "),
        (
            "conformance no_such_module:f",
            "cannot import 'no_such_module':",
            "run from the folder of the module, or set PYTHONPATH",
        ),
    ],
)
def test_wrong_value_suggests_next_step(arguments, argument, way_out, capsys):
    """A wrong value exits with status 2 and one line of fewer than 400 characters with the
    argument and a remedy: a valid name or a command.
    """
    assert main(arguments.split()) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"mha-parity: error: {argument} ")
    assert way_out in captured.err
    assert captured.err.count("\n") == 1
    assert len(captured.err) < 400
    assert captured.out == ""


@pytest.mark.parametrize("command", ["run", "selftest"])
def test_missing_frameworks_are_named(capsys, let_need, command):
    """Without any framework, `run` and `selftest` exit with status 2 and one line with the
    missing packages and how to install them.
    """
    for name in BACKENDS:
        let_need(name, f"{name}_is_not_here")
    assert main([command]) == 2
    message = capsys.readouterr().err
    assert [name for name in BACKENDS if f"{name} needs {name}_is_not_here" not in message] == []
    assert message.endswith("pip install torch, or jax and flax\n")
    assert message.count("\n") == 1


@pytest.mark.parametrize("not_finite", ["visible", "hidden"])
def test_case_summary_mentions_nan(not_finite):
    """The summary of a case with NaN ends with whether they are visible or hidden."""
    case = replace(CASES["causal"], not_finite=not_finite)
    assert covers(case) == f"heads 4 x 8, tokens 2 x 5, causal, NaN {not_finite}"


# ---- Names ---------------------------------------------------------------------------------------


def test_option_type_is_same_everywhere():
    """An option of several commands has the same type and number of values in all of them."""
    kinds = {}
    for name, page in PAGES.items():
        for parameter in page.params:
            kind = (getattr(parameter.type, "func", parameter.type.name), parameter.nargs)
            if isinstance(parameter.type, click.Choice):
                kind = ("text", parameter.nargs)
            for flag in parameter.opts if isinstance(parameter, click.Option) else ():
                kinds.setdefault(flag, {}).setdefault(kind, []).append(name)
    assert {flag: types for flag, types in kinds.items() if len(types) > 1} == {}


def test_arguments_have_help_text():
    """Every argument of a command has a help text, and no line of the help has more than 100
    columns.
    """
    for name, page in PAGES.items():
        assert [parameter.name for parameter in page.params if not parameter.help] == [], name
        assert max(map(len, help_of(name).splitlines())) <= 100, name


def test_ttnn_is_a_name_of_tt(capsys):
    """`tt` and `ttnn` are the same backend and framework in every option."""
    assert backend_list("ttnn,tt,torch") == ["tt", "torch"]
    assert named_path("ttnn=python") == ("tt", "python")
    assert PAGES["write"].make_context("write", ["m", "--to", "tt"]).params["to"] == "ttnn"
    parsed = PAGES["diagnose"].make_context("diagnose", ["a:b", "--framework", "tt"])
    assert parsed.params["framework"] == "ttnn"


def test_quiet_prints_only_errors(tmp_path, capsys):
    """With -q a command without a verdict prints nothing, and still writes its JSON; --json - is
    all that is printed.
    """
    arguments = ["cache-size", "--num-kv-heads", "1", "--head-dim", "1", "--capacity", "1"]
    assert main([*arguments, "-q", "--json", str(tmp_path / "c.json")]) == 0
    assert capsys.readouterr() == ("", "")
    assert main([*arguments, "--json", "-"]) == 0
    captured = capsys.readouterr()
    assert captured.out == (tmp_path / "c.json").read_text()
    assert captured.err == ""


def test_project_sets_options(tmp_path, monkeypatch, capsys):
    """[tool.mha-parity] of the nearest pyproject.toml sets options of all commands that have them,
    and of one; the command line overrides them, and an unknown name or a value of the wrong type is
    an error.
    """
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    project = tmp_path / "pyproject.toml"
    project.write_text(
        '[tool.mha-parity]\nbackends = ["torch"]\nallow-skipped = true\n'
        '[tool.mha-parity.run]\ncases = ["rope-g*", "causal"]\njoin = ["a", "b"]\n'
    )
    options = ProjectOptions()
    options.read(PROGRAM, "run")
    defaults = options.values
    assert PAGES["run"].make_context("run", [], default_map=defaults).params.items() >= {
        ("allow_skipped", True),
        ("join", ("a", "b")),
    }
    words = ["run", "--list", "--json", "-"]
    project.write_text(project.read_text().replace('join = ["a", "b"]\n', ""))
    for more, names in ([], ["rope-gqa", "causal"]), (["--cases", "full"], ["full"]):
        assert main([*words, *more]) == 0
        listed = json.loads(capsys.readouterr().out)["cases"]
        assert [case["name"] for case in listed] == names
    assert main(["bugs", "-q"]) == 0
    where = str(project)
    mistakes = {
        "[tool.mha-parity]\nbackend = 1": rejects(
            "[tool.mha-parity]", "backend", where=where, hint="did you mean backends?"
        ),
        "[tool.mha-parity.rum]\ncases = 1": rejects(
            "[tool.mha-parity.rum]", "rum", where=where, hint="did you mean run?"
        ),
        "[tool.mha-parity.run]\ncase = 1": rejects(
            "[tool.mha-parity.run]", "case", where=where, hint="did you mean cases"
        ),
        "[tool.mha-parity]\nx = = 1": rejects(where, "line 2"),
        "[tool]\nmha-parity = 3": rejects("[tool.mha-parity]", "int", where=where),
        "[[tool.mha-parity]]\nquiet = true": rejects("[tool.mha-parity]", "list", where=where),
        "[tool]\nmha-parity.quiet = 1": rejects(f"{where}: [tool.mha-parity] quiet", "1"),
        "[tool.mha-parity]\njson = true": rejects(f"{where}: [tool.mha-parity] json", "True"),
        "[tool.mha-parity]\njson = 1979-05-27": rejects(
            f"{where}: [tool.mha-parity] json", "datetime.date(1979, 5, 27)"
        ),
    }
    for text, input_error in mistakes.items():
        project.write_text(text)
        assert main(["bugs"]) == 2, text
        printed = capsys.readouterr().err
        assert input_error.is_printed_in(printed), printed
        assert printed.count("\n") == 1
        assert main(["bugs", "--help"]) == 0
        capsys.readouterr()


def test_wrong_value_of_project_names_file(tmp_path, monkeypatch, capsys):
    """An error about a value of pyproject.toml names the file, the table and the key; a value on
    the command line is called by its option.
    """
    monkeypatch.chdir(tmp_path)
    project = tmp_path / "pyproject.toml"
    project.write_text(
        '[tool.mha-parity]\ndtypes = "f32"\nseq-len = 3\n[tool.mha-parity.run]\njobs = "two"\n'
    )
    run_key = "[tool.mha-parity.run] jobs 'two' is not"
    mistakes = {
        ("run",): f"{project}: {run_key}",
        ("run", "-j1"): f"{project}: [tool.mha-parity] dtypes ",
        ("run", "--jobs=1", "--dtypes", "f16"): "--dtypes ",
        ("run", "--jobs=1", "--dtypes=fp16"): f"{project}: [tool.mha-parity] seq-len ",
        ("run", "--jobs=1", "--dtypes=fp16", "--seq-len=9"): "--seq-len requires",
    }
    for words, beginning in mistakes.items():
        assert main(list(words)) == 2
        printed = capsys.readouterr().err
        assert printed.startswith(f"mha-parity: error: {beginning}"), printed
        assert printed.count("\n") == 1


def test_help_describes_one_command(capsys):
    """`help` with more than one word is an error, also if the first is a command."""
    assert main(["help", "run", "extra"]) == 2
    assert Misuse("help describes one command, got run extra").is_printed_in(
        capsys.readouterr().err
    )


def test_verbose_prints_the_traceback(capsys):
    """With -v, the error of a wrong value comes after its traceback."""
    assert main(["run", "--backends", "numpy", "-v"]) == 2
    *before, last = capsys.readouterr().err.splitlines()
    assert last.startswith("mha-parity: error: --backends ")
    assert before[0] == "Traceback (most recent call last):"


def test_dtypes_have_short_names(capsys):
    """`bf16` is bfloat16; a list of dtypes may have short names, and repeated dtypes count once."""
    arguments = [
        "cache-size",
        "--num-kv-heads",
        "1",
        "--head-dim",
        "1",
        "--capacity",
        "1",
        "--dtype",
    ]
    printed = set()
    for dtype in ("bf16", "bfloat16"):
        assert main([*arguments, dtype]) == 0
        printed.add(capsys.readouterr().out)
    assert len(printed) == 1
    assert dtype_list("fp64,fp32,float32,fp16") == ["float64", "float32", "float16"]


def test_cache_size_requires_capacity(capsys):
    """`cache-size` without --capacity exits with status 2 and an error with the name of the
    option.
    """
    assert main(["cache-size", "--num-kv-heads", "2", "--head-dim", "4"]) == 2
    assert "error: missing option --capacity; " in capsys.readouterr().err


def test_spec_lists_all_families(capsys):
    """`spec --families` prints all families in order, and with a path exits with status 2."""
    assert main(["spec", "--families"]) == 0
    assert capsys.readouterr().out.splitlines() == sorted(FAMILIES)
    assert main(["spec", "--families", "config.json"]) == 2
    assert rejects("PATH, --live or --families").is_printed_in(capsys.readouterr().err)


# ---- Completion ----------------------------------------------------------------------------------


def test_completion_finds_words(monkeypatch, capsys):
    """The completion of Bash finds commands, options, choices, names of layouts, cases and bugs,
    and lets the shell find files and folders.
    """
    lines = {
        "": {*PAGES},
        "co": {"compare", "convert", "conformance"},
        "run --ba": {"--backends"},
        "run --against ": {"transformers"},
        "convert a b --to flax": {"flax.nnx", "flax.linen"},
        "convert --rest ": {"keep", "drop"},
        "write m --to t": {"torch", "ttnn"},
        "bugs rope-p": {"rope-pairs", "rope-positions", "rope-partial"},
        "plot --case rope-s": {name for name in CASES if name.startswith("rope-s")},
        "run --cases causal,rope-s": {
            f"causal,{name}" for name in CASES if name.startswith("rope-s")
        },
    }
    files = {"run --weights m": "file,m", "run --model m": "dir,m", "convert m": "file,m"}
    monkeypatch.setenv("_MHA_PARITY_COMPLETE", "bash_complete")
    for line, expected in {**lines, **files}.items():
        words = ["mha-parity", *line.split(), *([""] if not line or line.endswith(" ") else [])]
        monkeypatch.setenv("COMP_WORDS", shlex.join(words))
        monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
        assert main([]) == 0
        printed = capsys.readouterr().out.splitlines()
        if line in lines:
            assert {word.removeprefix("plain,") for word in printed} == expected, line
        else:
            assert printed == [expected], line


@pytest.mark.parametrize(
    ("instruction", "words"),
    [("bash_complete", None), ("bash_complete", "one"), ("zsh_complete", None), ("tcsh", None)],
)
def test_wrong_completion_is_an_error(instruction, words, monkeypatch, capsys):
    """The variables of a completion without the words of a command line are one clear error."""
    monkeypatch.setenv("_MHA_PARITY_COMPLETE", instruction)
    monkeypatch.delenv("COMP_WORDS", raising=False)
    if words is not None:
        monkeypatch.setenv("COMP_WORDS", "mha-parity")
        monkeypatch.setenv("COMP_CWORD", words)
    assert main([]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert rejects("_MHA_PARITY_COMPLETE", instruction).is_printed_in(captured.err)


@pytest.mark.costly("asks bash for its version")
def test_completion_scripts_call_us(capsys):
    """The completion script of each shell asks this program for words."""
    for shell in SHELLS:
        assert main(["--print-completion", shell]) == 0
        assert f"_MHA_PARITY_COMPLETE={shell}_complete" in capsys.readouterr().out


# ---- Bugs of the program -------------------------------------------------------------------------


def fail(options):
    raise KeyError("surprise")


@pytest.mark.parametrize("url", ["", "https://example.org/issues"])
def test_unexpected_error_writes_report(url, monkeypatch, tmp_path, capsys):
    """An unexpected error exits with status 70 and one line with where to report it, if the
    package has an address, and a file with the command and the traceback.
    """
    about = Message()
    about["Version"] = "0"
    if url:
        about["Project-URL"] = f"Issues, {url}"
    monkeypatch.setattr("importlib.metadata.metadata", lambda name: about)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(PAGES["bugs"], "callback", fail)
    assert main(["bugs", "rope *"]) == 70
    printed = capsys.readouterr().err
    (file,) = tmp_path.iterdir()
    at = f" at {url}" if url else ""
    line = (
        f"a bug in mha-parity, KeyError: 'surprise'; please report it{at} with {file}, which has "
        f"the command"
    )
    assert printed == f"mha-parity: error: {line} and the traceback\n"
    report = file.read_text("utf-8")
    assert "\nmha-parity bugs 'rope *'\n" in report
    assert report.endswith("KeyError: 'surprise'\n")


# ---- Installed packages --------------------------------------------------------------------------


def test_doctor_lists_optional_packages(tmp_path, capsys, monkeypatch):
    """`doctor` prints which optional packages are missing and the features that need them;
    its JSON has all, with versions.
    """
    installed = {
        "jax",
        "flax",
        "torch",
        "pytest",
        "matplotlib",
        "transformers",
        "keras",
        "equinox",
        "gguf",
        "pillow",
    }
    monkeypatch.setattr(
        "parity.measure.core.packages.is_installed", lambda package: package in installed
    )
    assert main(["doctor", "--json", str(tmp_path / "d.json")]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert (
        "jinja2 missing not available: `--html`, `pytest --parity-report *.html`; pip "
        "install jinja2" in out
    )
    assert (
        "orbax-checkpoint missing not available: orbax checkpoints; pip install "
        "orbax-checkpoint" in out
    )
    optional = json.loads((tmp_path / "d.json").read_text())["optional"]
    assert optional.keys() == OPTIONAL.keys()
    assert {name for name, version in optional.items() if version is None} == {
        "jinja2",
        "orbax-checkpoint",
    }
    assert re.match(r"\d+\.", optional["pytest"])


@pytest.mark.parametrize(
    ("required", "status", "line"),
    [
        ("torch,matplotlib", 0, ""),
        ("ttnn", 1, "tt needs ttnn_is_not_here"),
        (
            "tt,orbax-checkpoint",
            1,
            "tt needs ttnn_is_not_here, not installed here; orbax-checkpoint is not installed",
        ),
        ("numpie", 2, "error: --require "),
    ],
)
def test_doctor_require_sets_exit_status(required, status, line, capsys, monkeypatch, let_need):
    """`doctor --require` exits with status 0 if all packages are installed, 1 if some are
    missing, and 2 for an unknown name.
    """
    let_need("tt", "ttnn_is_not_here")
    monkeypatch.setattr(
        "parity.measure.core.packages.is_installed", lambda package: package != "orbax-checkpoint"
    )
    assert main(["doctor", "--require", required]) == status
    printed = capsys.readouterr().err
    assert line in printed
    assert printed.count("\n") == (status != 0)


def test_pip_install_mha_parity_is_not_shown():
    """No module or page suggests `pip install mha-parity`: anyone could publish a package of
    that name.
    """
    files = [
        *ROOT.glob("parity/**/*.py"),
        *ROOT.glob("mha_*/**/*.py"),
        *ROOT.glob("docs/**/*.md"),
        ROOT / "README.md",
    ]
    assert [
        file.name
        for file in files
        if re.search(r"pip install '?mha-parity", file.read_text("utf-8"))
    ] == []


# ---- The pages of bugs ---------------------------------------------------------------------------


def test_bugs_prints_requested_pages(capsys):
    """`bugs` with two names prints the pages of both."""
    assert main(["bugs", "rope-pairs", "grouped-heads"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("# RoPE: which features form a pair\n")
    assert "\n# Grouped heads: tiled instead of repeated\n" in out


@pytest.mark.thorough
def test_bugs_finds_page_of_every_bug(capsys):
    """`bugs NAME` prints the page of each bug that is known for a case of the self-test."""
    for name, page in {(bug.name, bug.page) for case in SELFTEST_CASES for bug in bugs_for(case)}:
        assert main(["bugs", name]) == 0
        title = (ROOT / "parity" / "bugs" / f"{page}.md").read_text("utf-8").splitlines()[0]
        assert capsys.readouterr().out.splitlines()[0] == title


def test_bugs_finds_bug_of_a_search(capsys):
    """`bugs v-heads-permuted`, a bug that is only found by a search, prints the page head-order."""
    assert main(["bugs", "v-heads-permuted"]) == 0
    first = (ROOT / "parity" / "bugs" / "head-order.md").read_text("utf-8").splitlines()[0]
    assert capsys.readouterr().out.startswith(f"{first}\n")


def test_bugs_lists_all_pages(tmp_path, capsys):
    """`bugs` without a name prints a row for each page and writes the list as JSON."""
    assert main(["bugs", "--json", str(tmp_path / "b.json")]) == 0
    title, _, *rows = capsys.readouterr().out.splitlines()
    assert "`mha-parity bugs NAME`" in title
    listed = json.loads((tmp_path / "b.json").read_text())["list"]
    assert listed.keys() == {page.stem for page in (ROOT / "parity" / "bugs").glob("*.md")} - {
        "README"
    }
    assert [row.split()[0] for row in rows if row[1] != " "] == [*listed]


def test_bugs_lists_every_bug_with_its_page(capsys):
    """`bugs --all` prints every bug with its page, sorted by name."""
    assert main(["bugs", "--all"]) == 0
    rows = [tuple(row.split()) for row in capsys.readouterr().out.splitlines()[2:]]
    assert rows == sorted(page_by_bug().items())


def test_bug_pages_link_to_no_files():
    """Pages of bugs, as printed, have no links to Markdown files, which may not be installed,
    but commands such as `mha-parity bugs rope-positions`.
    """
    pages = [bug_page(page.stem) for page in (ROOT / "parity" / "bugs").glob("*.md")]
    assert [link for page in pages for link in re.findall(r"\]\([^)]*\.md[^)]*\)", page)] == []
    assert "`mha-parity bugs rope-positions`" in "".join(pages)


# ---- The wheel -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FROM_A_CLONE)
def test_clone_only_command_is_explained(name, capsys, monkeypatch):
    """Outside a clone, a command that only a clone has exits with status 2 and one line about
    it, and is not in the help.
    """
    monkeypatch.delitem(COMMANDS, name)
    assert main([name, "--json", "-"]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"mha-parity: error: {name} is not in the wheel")
    assert (captured.err.count("\n"), captured.out) == (1, "")
    main(["--help"])
    assert f"\n  {name} " not in capsys.readouterr().out


def test_wheel_excludes_clone_only_packages():
    """The wheel is configured to have mha_spec, the three implementations, ttnn_mock and parity,
    and no .npz files.
    """
    config = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]
    packages = set(find_packages(str(ROOT), **config["packages"]["find"]))
    assert {name.partition(".")[0] for name in packages} == {
        "mha_spec",
        "mha_jax",
        "mha_torch",
        "mha_tt",
        "ttnn_mock",
        "parity",
    }
    assert {"parity.use.cli", "parity.measure.pretrained", "mha_jax.kernels"} <= packages
    assert not any(
        "npz" in pattern for patterns in config["package-data"].values() for pattern in patterns
    )


@pytest.mark.costly("pip builds a wheel")
@pytest.mark.thorough
def test_wheel_is_small_and_complete(tmp_path):
    """The wheel has less than 4.5 MB, all pages of bugs and the type stub, but not parity_lab;
    its `bench` exits with status 2 and one line about it.
    """
    source = tmp_path / "source"
    ignore = shutil.ignore_patterns("__pycache__")
    for package in (
        "mha_spec",
        "mha_jax",
        "mha_torch",
        "mha_tt",
        "ttnn_mock",
        "parity",
        "parity_lab",
    ):
        shutil.copytree(ROOT / package, source / package, ignore=ignore)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    build = (
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--wheel-dir",
        str(tmp_path),
    )
    subprocess.run(
        [sys.executable, "-m", "pip", *build, str(source)], check=True, capture_output=True
    )
    (wheel,) = tmp_path.glob("mha_parity-*.whl")
    files = set(zipfile.ZipFile(wheel).namelist())
    assert {f"parity/bugs/{page.name}" for page in (ROOT / "parity" / "bugs").glob("*.md")} <= files
    assert {"parity/__init__.pyi", "parity/py.typed"} <= files
    assert not any(name.startswith("parity_lab") for name in files)
    assert wheel.stat().st_size < 4_500_000
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    command = [sys.executable, "-m", "parity", "bench"]  # -m imports the package in this folder
    done = subprocess.run(
        command, cwd=tmp_path / "installed", capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "bench is not in the wheel" in done.stderr

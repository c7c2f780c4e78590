"""Tests of `--help`, error lines, lists of cases and bugs, completion and `doctor`."""

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
from email.message import Message

import pytest
from helpers import ROOT
from helpers.refusals import refuses
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
from parity.use.cli.completion import SHELLS
from parity.use.cli.main import COMMANDS, command_named, main, make_parser
from parity.use.cli.options import dtype_list
from parity.use.reporting.bugs import bug_page
from parity.use.reporting.cases import covers
from parity_lab.selftest import SELFTEST_CASES

PAGES = {name: command_named(name).PAGE for name in COMMANDS}


def commands():
    """Return the parsers of the commands by name."""
    (action,) = (
        action
        for action in make_parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    return action.choices


# ---- --help --------------------------------------------------------------------------------------


def test_every_command_module_is_registered():
    """The modules with a PAGE in parity.use.cli and parity_lab.commands are those of COMMANDS,
    and each command has a parser.
    """
    modules = [
        importlib.import_module(f"{package.__name__}.{found.name}")
        for package in (parity.use.cli, parity_lab.commands)
        for found in pkgutil.iter_modules(package.__path__)
    ]
    assert {module.__name__ for module in modules if hasattr(module, "PAGE")} == {
        *COMMANDS.values()
    }
    assert commands().keys() == COMMANDS.keys()


def test_command_help_is_complete(capsys):
    """The help of a command has its description before the options, then its exit statuses;
    lines of the epilog have at most 100 columns.
    """
    for name, page in PAGES.items():
        with pytest.raises(SystemExit) as exit_:
            main([name, "--help"])
        assert exit_.value.code == 0, name
        said = capsys.readouterr().out
        words = " ".join(said.split())
        assert page.about in words, name
        assert words.index(page.about) < words.index("options:"), name
        status = re.search(r"exit status:\n  0 .+; 2 bad usage or something missing\n", said)
        assert status, name
        assert ("; 1 " in status[0]) == bool(page.wrong), name
        assert max(map(len, page.epilog.splitlines())) <= 100, name


def test_example_of_command_is_parsed():
    """The example of each command begins with `mha-parity` and its name, and its arguments
    are valid.
    """
    parser = make_parser()
    for name, page in PAGES.items():
        program, *arguments = shlex.split(page.example.replace("\\\n", ""))
        assert program == "mha-parity", name
        assert arguments[0] == name
        assert parser.parse_args(arguments).command == name


def test_run_help_lists_backends_and_dtypes():
    """The help of `run` has the names of all backends and dtypes."""
    words = " ".join(commands()["run"].format_help().split())
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
        "    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):\n"
        "        main([name, '--help'])\n"
        "print(sorted({'numpy', 'rich', 'importlib.metadata', 'parity.measure.core.cases', "
        "'parity.use.reporting.console'}"
        " & set(sys.modules)))"
    )
    command = [
        sys.executable,
        "-S",
        "-c",
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{program}",
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


# ---- Cases ---------------------------------------------------------------------------------------


def test_pages_use_existing_options():
    """Every option that a page of the documentation shows for a command exists."""
    pages = [
        ROOT / "README.md",
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("parity/bugs/*.md"),
        *ROOT.glob("examples/*.md"),
    ]
    parsers, wrong, seen = commands(), [], 0
    for page in pages:
        for command, words in re.findall(r"mha-parity ([a-z-]+)\b([^`|\n#]*)", page.read_text()):
            for option in (
                re.findall(r"(?<!\S)--[a-z][\w-]*", words.split(" -- ")[0])
                if command in parsers
                else ()
            ):
                seen += 1
                if option not in parsers[command]._option_string_actions:
                    wrong.append(f"{page.name}: {command} {option}")
    assert seen > 50
    assert wrong == []


def test_cases_lists_one_case_per_line(capsys):
    """`cases` prints one line per case, with its description and its settings."""
    assert main(["cases"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(CASES)
    assert all(case.about in line for case, line in zip(CASES.values(), lines, strict=True))
    line = next(line for line in lines if line.startswith("decode-gqa-rope "))
    assert line.endswith("heads 6/2 x 16, tokens 2 x 4+1+1+1, RoPE, cache of 8 slots, no biases")


def test_cases_are_selected_by_glob(tmp_path, capsys):
    """`cases GLOB --json` prints and writes only cases whose name matches, with their
    settings and specification.
    """
    assert main(["cases", "window-c*", "--json", str(tmp_path / "c.json")]) == 0
    assert capsys.readouterr().out.count("\n") == 1
    content = json.loads((tmp_path / "c.json").read_text())
    assert content["schema"] == "mha-parity/cases"
    (case,) = content["cases"]
    assert case["name"] == "window-cross"
    assert case["covers"] == "heads 4 x 8, tokens 2 x 5 over 9, window 3"
    assert case["spec"]["num_heads"] == 4


@pytest.mark.parametrize(
    ("arguments", "refusal"),
    [
        (["cases", "rope_gqa"], refuses("GLOB", GLOB="rope_gqa", hint="did you mean rope-gqa")),
        (
            ["run", "--cases", "rope_gqa"],
            refuses("--cases", {"--cases": "rope_gqa"}, hint="did you mean rope-gqa"),
        ),
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
def test_unknown_value_names_its_option(capsys, arguments, refusal):
    """An unknown value or option exits with status 2 and one error line, which begins with
    the option and may suggest a similar name.
    """
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"mha-parity: error: {refusal.argument} ")
    assert refusal.is_printed_in(captured.err)
    assert captured.err.count("\n") == 1
    assert captured.out == ""


@pytest.mark.parametrize(
    ("arguments", "argument", "way_out"),
    [
        ("run --jobs x", "--jobs", "`mha-parity run --help`"),
        ("run --jobs", "--jobs", "`mha-parity run --help`"),
        ("run --quiet=3", "--quiet", "`mha-parity run --help`"),
        ("run -v -q", "--quiet", "`mha-parity run --help`"),
        ("run --model a --weights b", "--weights", "`mha-parity run --help`"),
        ("run --layers x", "--layers", "`mha-parity run --help`"),
        ("run --case rope-gqa", "--case", "did you mean --cases"),
        ("convert a b --to c --max-shard-gib x", "--max-shard-gib", "`mha-parity convert --help`"),
        ("convert a b --to c --rest kep", "--rest", "did you mean keep?"),
        ("convert a b", "--to", "usage: mha-parity convert [options] --to LAYOUT SRC DST"),
        ("verify a", "FILE", "usage: mha-parity verify [options] FILE FILE"),
        ("cases a b", "arguments", "mha-parity cases [options] [GLOB]"),
        ("", "COMMAND", "`mha-parity --help`"),
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
        ("layouts llama", "layout", "`mha-parity layouts`"),
        ("conformance --libraries --only torhc", "--only", "there are "),
        (
            "conformance no_such_module:f",
            "no_such_module",
            "run from the folder of the module, or set PYTHONPATH",
        ),
    ],
)
def test_usage_error_suggests_next_step(arguments, argument, way_out, capsys):
    """A usage error exits with status 2 and one line of fewer than 400 characters with the
    argument and a remedy: a valid name, a usage line or a command.
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
    for name, parser in commands().items():
        for action in parser._actions:
            for flag in action.option_strings:
                kinds.setdefault(flag, {}).setdefault((action.type, action.nargs), []).append(name)
    assert {flag: found for flag, found in kinds.items() if len(found) > 1} == {}


def test_arguments_have_help_text():
    """Every argument of a command has a help text, and no line of the help has more than 100
    columns.
    """
    for name, parser in commands().items():
        assert [action.dest for action in parser._actions if not action.help] == [], name
        assert max(map(len, parser.format_help().splitlines())) <= 100, name


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
    assert "error: --capacity " in capsys.readouterr().err


def test_spec_lists_all_families(capsys):
    """`spec --families` prints all families in order, and with a path exits with status 2."""
    assert main(["spec", "--families"]) == 0
    assert capsys.readouterr().out.splitlines() == sorted(FAMILIES)
    assert main(["spec", "--families", "config.json"]) == 2
    assert refuses("PATH, --live or --families").is_printed_in(capsys.readouterr().err)


# ---- Completion ----------------------------------------------------------------------------------


@pytest.mark.costly("bash completes")
def test_bash_completion_finds_words(tmp_path, capsys):
    """The completion of Bash finds commands, options, choices, names of cases and bugs, and
    files.
    """
    with pytest.raises(SystemExit) as exit_:
        main(["--print-completion", "bash"])
    assert exit_.value.code == 0
    (tmp_path / "completion").write_text(capsys.readouterr().out)
    (tmp_path / "folder" / "model").mkdir(parents=True)
    (tmp_path / "folder" / "model.npz").touch()
    lines = {
        "": {*PAGES},
        "co": {"compare", "convert", "conformance"},
        "run --ba": {"--backends"},
        "run --against ": {"transformers"},
        "run --model m": {"model"},
        "run --weights m": {"model", "model.npz"},
        "convert m": {"model", "model.npz"},
        "convert a b --to flax": {"flax.nnx", "flax.linen"},
        "convert --rest ": {"keep", "drop"},
        "write m --to t": {"torch", "ttnn"},
        "bugs rope-p": {"rope-pairs", "rope-positions", "rope-partial"},
        "plot --case rope-q": {name for name in CASES if name.startswith("rope-q")},
    }
    words = [
        ["mha-parity", *line.split(), *([""] if not line or line.endswith(" ") else [])]
        for line in lines
    ]
    calls = [
        f"COMP_WORDS=({shlex.join(each)}); COMP_CWORD={len(each) - 1}; COMPREPLY=(); "
        f"_shtab_mha_parity; "
        'echo "${COMPREPLY[*]}"'
        for each in words
    ]
    program = "\n".join([f"source {tmp_path}/completion", *calls])
    done = subprocess.run(
        ["bash", "-c", program], cwd=tmp_path / "folder", capture_output=True, text=True, check=True
    )
    found = dict(zip(lines, (set(line.split()) for line in done.stdout.splitlines()), strict=True))
    assert found == lines


@pytest.mark.parametrize("shell", SHELLS)
def test_completion_scripts_have_commands(shell, capsys):
    """The completion script of each shell has the names of all commands."""
    with pytest.raises(SystemExit):
        main(["--print-completion", shell])
    script = capsys.readouterr().out
    assert [name for name in PAGES if name not in script] == []


def test_completion_requires_shtab(monkeypatch, capsys):
    """Without shtab, --print-completion exits with status 2 and an error that ends with the
    command to install it.
    """
    monkeypatch.setattr(
        "parity.measure.core.packages.is_installed", lambda package: package != "shtab"
    )
    assert main(["--print-completion", "bash"]) == 2
    assert capsys.readouterr().err.endswith("pip install shtab\n")


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
    monkeypatch.setattr(parity.use.cli.cases, "run", fail)
    assert main(["cases", "rope *"]) == 70
    printed = capsys.readouterr().err
    (file,) = tmp_path.iterdir()
    at = f" at {url}" if url else ""
    line = (
        f"a bug in mha-parity, KeyError: 'surprise'; please report it{at} with {file}, which has "
        f"the command"
    )
    assert printed == f"mha-parity: error: {line} and the traceback\n"
    report = file.read_text("utf-8")
    assert "\nmha-parity cases 'rope *'\n" in report
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
        "shtab",
    }
    assert re.match(r"\d+\.", optional["pytest"])


@pytest.mark.parametrize(
    ("required", "status", "line"),
    [
        ("torch,matplotlib", 0, ""),
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
    assert f"\n    {name} " not in make_parser().format_help()


def test_wheel_excludes_clone_only_packages():
    """The wheel is configured to have mha_spec, the three implementations, ttnn_mock and parity,
    and no .npz files.
    """
    config = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]
    found = set(find_packages(str(ROOT), **config["packages"]["find"]))
    assert {name.partition(".")[0] for name in found} == {
        "mha_spec",
        "mha_jax",
        "mha_torch",
        "mha_tt",
        "ttnn_mock",
        "parity",
    }
    assert {"parity.use.cli", "parity.measure.pretrained", "mha_jax.kernels"} <= found
    assert not any(
        "npz" in pattern for patterns in config["package-data"].values() for pattern in patterns
    )


@pytest.mark.costly("pip builds a wheel")
@pytest.mark.thorough
def test_wheel_is_small_and_complete(tmp_path):
    """The wheel has less than 4 MB, all pages of bugs and the type stub, but not parity_lab;
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
    held = set(zipfile.ZipFile(wheel).namelist())
    assert {f"parity/bugs/{page.name}" for page in (ROOT / "parity" / "bugs").glob("*.md")} <= held
    assert {"parity/__init__.pyi", "parity/py.typed"} <= held
    assert not any(name.startswith("parity_lab") for name in held)
    assert wheel.stat().st_size < 4_200_000
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    command = [sys.executable, "-m", "parity", "bench"]  # -m imports the package in this folder
    done = subprocess.run(
        command, cwd=tmp_path / "installed", capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "bench is not in the wheel" in done.stderr

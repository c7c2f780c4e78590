"""Tests of the scripts that `make` uses."""

import ast
import builtins
import importlib
import importlib.machinery
import importlib.util
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
from helpers import ROOT
from helpers.command_line import parsed

import parity
from parity.use.cli.main import main

FIND = ROOT / "tools" / "find-python312"

needs_linux = pytest.mark.skipif(
    (platform.system(), platform.machine()) != ("Linux", "x86_64"),
    reason="ttnn has wheels for x86-64 Linux only",
)


def put_python(path, says="cpython 3 12 ok", status=0):
    """Write a Python that prints the given version and exits with the given status."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho {says}\nexit {status}\n")
    path.chmod(0o755)
    return path


def find(path, home):
    result = subprocess.run(
        [FIND],
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": f"{path}:{os.defpath}", "HOME": str(home)},
    )
    return result.stdout.strip()


@pytest.mark.costly("the tool is a shell script")
@needs_linux
def test_python312_is_found_on_the_path(tmp_path):
    """`find-python312` prints the python3.12 on the path."""
    python = put_python(tmp_path / "bin" / "python3.12")
    assert find(tmp_path / "bin", tmp_path) == str(python)


@pytest.mark.costly("the tool is a shell script")
@needs_linux
@pytest.mark.parametrize("says", ["cpython 3 11", "pypy 3 12", ""])
def test_wrong_python312_is_not_chosen(tmp_path, says):
    """A python3.12 on the path that has the wrong version or does not run is skipped for the
    one of pyenv.
    """
    put_python(tmp_path / "bin" / "python3.12", says, status=0 if says else 127)
    python = put_python(tmp_path / ".pyenv" / "versions" / "3.12.9" / "bin" / "python")
    assert find(tmp_path / "bin", tmp_path) == str(python)


@pytest.mark.costly("the tool is a shell script")
@needs_linux
def test_broken_shim_does_not_hide_python(tmp_path):
    """A shim that does not run is skipped for a python3.12 further down the path."""
    put_python(tmp_path / "shims" / "python3.12", "", status=127)
    python = put_python(tmp_path / "bin" / "python3.12")
    assert find(f"{tmp_path / 'shims'}:{tmp_path / 'bin'}", tmp_path) == str(python)


# ---- fuzz-cli ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fuzz():
    path = str(ROOT / "tools" / "fuzz-cli")
    loader = importlib.machinery.SourceFileLoader("fuzz_cli", path)
    spec = importlib.util.spec_from_loader("fuzz_cli", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.dont_write_bytecode", True)
        patch.setattr("sys.path", [*sys.path])
        loader.exec_module(module)
    return module


@pytest.mark.costly("commands end in processes of their own")
def test_random_commands_have_no_faults(fuzz, tmp_path):
    """40 random commands lose no file, and those that fail say why."""
    assert list(fuzz.fuzz_commands(tmp_path, 40, seed=0)) == []


@pytest.mark.thorough
@pytest.mark.costly("the tool draws many files")
def test_hostile_files_cause_no_harm(fuzz, tmp_path):
    """10 commands with random hostile files do no harm."""
    assert list(fuzz.fuzz_hostile(tmp_path, 10, seed=0)) == []


def paint(arguments):
    sys.stdout.write("\x9b2J")
    return 0


def chatter(arguments):
    sys.stdout.write("x" * 200_000)
    return 0


def crash_as_70(arguments):
    return 70


@pytest.mark.parametrize(
    ("fault", "finding"),
    [(paint, "control"), (chatter, "200000 and 0 characters"), (crash_as_70, "exit status 70")],
)
def test_fuzzing_finds_every_harm(fuzz, tmp_path, monkeypatch, fault, finding):
    """Control characters, 200,000 characters of output, and exit status 70 are found as harm."""
    monkeypatch.setattr("parity.use.cli.main.main", fault)
    monkeypatch.setattr(fuzz, "good_files", lambda folder: {})
    monkeypatch.setattr(fuzz, "hostile", lambda draw, good: ({}, ["inspect", "a.npz"]))
    (report, *_) = fuzz.fuzz_hostile(tmp_path, 1, seed=0)
    assert finding in report


def test_excess_time_and_memory_are_harm(fuzz):
    """11 seconds and 600 MiB are found as harm; 9 seconds and 500 MiB are not."""
    assert list(fuzz.harm(["inspect"], 0, "", "", 11.0, 600 << 20)) == [
        "11 seconds",
        "600 MiB more memory",
    ]
    assert list(fuzz.harm(["inspect"], 0, "", "", 9.0, 500 << 20)) == []


def lose(arguments):
    os.unlink("a.npz")
    return 0


def spoil(arguments):
    Path("r.json").write_text('{"half": ')
    return 2


def leave(arguments):
    Path(".b.npz.0.mha-parity").mkdir()
    return 0


def complain(arguments):
    sys.stderr.write("Traceback (most recent call last):\n")
    return 2


def crash(arguments):
    raise KeyError("what?")


@pytest.mark.parametrize(
    ("fault", "finding"),
    [
        (lose, "lost though not named: a.npz"),
        (spoil, "changed or written with exit status 2: r.json"),
        (spoil, "r.json is not whole"),
        (leave, "left: .b.npz.0.mha-parity"),
        (complain, "a traceback"),
        (crash, "exit status exception: Traceback"),
        (lambda arguments: 3, "exit status 3"),
        (lambda arguments: 2, "no line that says why"),
        (lambda arguments: 1, "exit status 1 of a command that compares nothing"),
        (lambda arguments: time.sleep(10), "exit status hang"),
    ],
)
def test_fuzzing_finds_every_fault(fuzz, tmp_path, monkeypatch, fault, finding):
    """A lost or changed file, a partial report, a file left, a traceback, a wrong exit status
    and a hang are found, with the command.
    """
    monkeypatch.setattr("parity.use.cli.main.main", fault)
    monkeypatch.setattr(fuzz.call, "__defaults__", (1,))
    monkeypatch.setattr(fuzz, "draw", lambda rng: (["inspect", "a.npz"], []))
    (report, *_) = [
        report for report in fuzz.fuzz_commands(tmp_path, 1, seed=0) if finding in report
    ]
    assert report.startswith("0: mha-parity 'inspect' 'a.npz'")


# ---- check-html ----------------------------------------------------------------------------------

CLEAN = {
    "requests": [],
    "errors": [],
    "violations": [],
    "views": [{"view": "400-dark", "overflow": 0}],
    "looks": [],
    "status": 0,
}
FAULTS = {
    "requests": ["http://127.0.0.1:9/x.png"],
    "errors": ["Error: oops"],
    "violations": [
        {"id": name, "view": "400-dark", "first": "<p>"} for name in ("image-alt", "color-contrast")
    ],
    "views": [{"view": "400-dark", "overflow": 1}],
    "looks": [
        "– in a table",
        "a block highlighted as Python",
        "a white picture",
        "a search finds sources",
        "a search does not begin with an explanation",
        "21 links without groups in the sidebar",
    ],
    "status": 1,
}


@pytest.fixture
def check_html(monkeypatch):
    path = ROOT / "tools" / "check-html" / "check.py"
    spec = importlib.util.spec_from_file_location("check_html", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setattr("sys.path", [*sys.path])
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "make_pages", lambda folder: None)
    return module


@pytest.fixture
def browser(check_html, monkeypatch, tmp_path):
    """Replace Node.js: return the output of `npm`, and of `node` for each page, to be changed."""
    says = {
        "npm": (0, ""),
        "failed.html": CLEAN,
        "hostile.html": CLEAN,
        "control.html": FAULTS,
        "index.html": CLEAN,
    }
    monkeypatch.setattr(check_html, "SITE", tmp_path)
    monkeypatch.setattr(check_html, "PAGES", ("index",))

    def run(tool, arguments, folder):
        if tool == "npm":
            return subprocess.CompletedProcess(arguments, says["npm"][0], "", says["npm"][1])
        printed = [
            says[page.rpartition("/")[2]] for page in arguments[1:]
        ]  # pages of the site have addresses
        if None in printed:
            return subprocess.CompletedProcess(
                arguments, 3, "", "Chromium does not start here: why\n"
            )
        return subprocess.CompletedProcess(arguments, 0, "\n".join(map(json.dumps, printed)), "")

    monkeypatch.setattr(check_html, "run", run)
    return says


def test_pages_without_faults_pass(check_html, browser, tmp_path):
    """The control of the tests below: pages without a fault exit with status 0."""
    assert check_html.main(tmp_path) == 0


@pytest.mark.parametrize("page", ["failed", "hostile", "index"])
def test_faults_of_a_page_are_reported(check_html, browser, tmp_path, capsys, page):
    """Each kind of fault of a report or a page of the site exits with status 1 and a line that
    begins with its name.
    """
    for kind, fault in FAULTS.items():
        browser[f"{page}.html"] = CLEAN | {kind: fault}
        assert check_html.main(tmp_path) == 1
        assert capsys.readouterr().out.startswith(f"{page}.html: "), kind


def test_missing_site_is_reported(check_html, browser, tmp_path, capsys, monkeypatch):
    """If the site is not built, the check exits with status 0 and a line about how to build it."""
    monkeypatch.setattr(check_html, "SITE", tmp_path / "none")
    assert check_html.main(tmp_path) == 0
    assert capsys.readouterr().out.startswith(
        "check-html: LEFT OUT, the site: `make docs` builds it"
    )


def test_every_page_is_opened_on_request(check_html, browser, tmp_path, capsys):
    """A fault of a page outside the selected ones is found only with `every_page=True`."""
    (tmp_path / "other.html").touch()
    browser["other.html"] = FAULTS
    assert check_html.main(tmp_path) == 0
    assert check_html.main(tmp_path, every_page=True) == 1
    assert "other.html: an error: Error: oops" in capsys.readouterr().out


def test_undetected_control_fault_fails(check_html, browser, tmp_path, capsys):
    """If any fault of the control page is not detected, the check exits with status 1 and
    says so.
    """
    for kind, absent in CLEAN.items():
        browser["control.html"] = FAULTS | {kind: absent}
        assert check_html.main(tmp_path) == 1
        assert capsys.readouterr().out.startswith("control.html: not detected: "), kind


@pytest.mark.parametrize(
    ("what", "says", "why"),
    [
        ("npm", (1, "npm warn x\nnpm error code EAI\n"), "no browser from npm: npm error code EAI"),
        ("failed.html", None, "Chromium does not start here: why"),
    ],
)
def test_missing_browser_is_reported(check_html, browser, tmp_path, capsys, what, says, why):
    """Without a browser, the check exits with status 0 and prints one line with the reason."""
    browser[what] = says
    assert check_html.main(tmp_path) == 0
    assert capsys.readouterr().out == f"check-html: LEFT OUT, {why}\n"


# ---- mutants -------------------------------------------------------------------------------------


@pytest.fixture
def mutants():
    path = str(FIND.with_name("mutants"))
    loader = importlib.machinery.SourceFileLoader("mutants", path)
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("mutants", loader))
    sys.modules["mutants"] = module
    loader.exec_module(module)
    yield module
    del sys.modules["mutants"]


SOURCE = '''def f(a: int = 1, b: str = "x") -> int:
    """A number: 1."""
    if a < 2 and b:
        raise ValueError(f"a is below {1 + 1}")
    g(a, b)
    return a + 1
'''
EDITS = {
    ("1", "(2)"),  # twice: the default and the summand
    ("2", "(3)"),
    ("a < 2 and b", "not (a < 2 and b)"),
    ("a < 2 and b", "(a < 2) or (b)"),
    ("a < 2", "(a <= 2)"),
    ('raise ValueError(f"a is below {1 + 1}")', "pass"),
    ("g(a, b)", "pass"),
    ("a, b", "b, a"),
    ("a + 1", "(a) - (1)"),
}


def test_mutants_are_valid_edits_of_code(mutants, tmp_path, monkeypatch):
    """The mutants of a source are the expected edits, with their positions; each can be
    compiled, and docstrings and messages stay.
    """
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    (tmp_path / "m.py").write_text(SOURCE)
    edits = list(mutants.mutants_of("m.py"))
    assert {(edit.before, edit.text) for edit in edits} == EDITS
    for edit in edits:
        assert SOURCE[edit.start : edit.end] == edit.before
        compile(SOURCE[: edit.start] + edit.text + SOURCE[edit.end :], "m.py", "exec")


@pytest.mark.costly("git lists the sources")
def test_mutants_depend_only_on_seed(mutants, monkeypatch):
    """One seed always draws the same mutants, only of packages in COUNTS, and a different seed
    draws others; the counts add up to at least 200.
    """
    assert sum(mutants.COUNTS.values()) >= 200
    assert mutants.COUNTS.keys() == {
        "mha_spec",
        "mha_jax",
        "mha_torch",
        "mha_tt",
        "ttnn_mock",
        "parity",
        "parity_lab",
    }
    monkeypatch.setattr(mutants, "COUNTS", {"mha_spec": 25})
    assert mutants.drawn(0) == mutants.drawn(0) != mutants.drawn(1)
    assert {mutant.package for mutant in mutants.drawn(0)} == {"mha_spec"}


TESTED = """
import m


def test_is_small():
    assert m.f(0) == 2


def test_is_large():
    assert m.f(5) == 6
"""


@pytest.fixture
def server(mutants, tmp_path, monkeypatch):
    """Start a server of TESTED; return a function that runs it with an edit of the module m."""
    (tmp_path / "m.py").write_text(
        "ONE = 1\n\n\ndef f(a):\n    if a < 2:\n        return a + ONE + 1\n    return a + ONE\n"
    )
    (tmp_path / "test_m.py").write_text(TESTED)
    monkeypatch.setattr(mutants, "BUILD", tmp_path)
    suite = mutants.Suite(
        "main", (sys.executable, "-m", "pytest", "--rootdir", str(tmp_path)), (str(tmp_path),), ()
    )
    process = mutants.Server(suite, tmp_path)
    source = (tmp_path / "m.py").read_text()

    def first_failure(*edit):
        tests = ["test_m.py::test_is_small", "test_m.py::test_is_large"]
        return process.first_failure(tests, 60.0, "m.py", source, source.replace(*edit))

    yield first_failure
    process.close()


@pytest.mark.costly("the tool forks a process of pytest")
@pytest.mark.thorough
def test_forks_run_tests_with_a_mutant(server):
    """The server returns the first test that fails or ends the process with a mutant, '' if none
    does, and None if the code runs at import.
    """
    assert server("return a + ONE\n", "return a - ONE\n") == "test_m.py::test_is_large"
    assert server("a < 2", "a <= 2") == ""  # the previous change is gone
    assert server("a < 2", "not (a < 2)") == "test_m.py::test_is_small"
    leaves = "__import__('os')._exit(3)\n"
    assert server("return a + ONE\n", leaves) == "test_m.py::test_is_large"
    assert server("ONE = 1", "ONE = (2)") is None  # runs as the module is imported


STARTS = """
import subprocess
import sys

from package.inner import other


def test_of_a_process():
    subprocess.run([sys.executable, "-c", "from package import m; m.f(5)"], check=True)


def test_of_its_own_process():
    assert other.g() == 1
"""


@pytest.mark.costly("the tool starts pytest")
@pytest.mark.thorough
def test_map_has_tests_of_each_mutant(mutants, tmp_path, monkeypatch):
    """The map has, for each mutant, the tests whose process or subprocess reaches its statement; for
    a template, which none imports, tests of the nearest folder.
    """
    source = "def f(a):\n    if a < 2:\n        return 1\n    return 2\n"
    package = tmp_path / "package"
    templates = package / "inner" / "templates"
    templates.mkdir(parents=True)
    (package / "m.py").write_text(source)
    (package / "inner" / "other.py").write_text("def g():\n    return 1\n")
    (templates / "t.py").write_text("def t():\n    return 1\n")
    (tmp_path / "test_starts.py").write_text(STARTS)
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    monkeypatch.setattr(mutants, "BUILD", tmp_path / "build")
    # pytest loads the modules of its plugins in its own way, as it does parity's.
    options = ("--rootdir", ".", "-p", "no:cacheprovider", "-p", "package.inner.other")
    command = (sys.executable, "-m", "pytest", *options)
    suite = mutants.Suite("main", command, ("test_starts.py",), ("package",))
    made = [
        *mutants.mutants_of("package/m.py"),
        *mutants.mutants_of("package/inner/other.py"),
        *mutants.mutants_of("package/inner/templates/t.py"),
    ]
    mutants.make_map(suite, "short", made)
    by_mutant = mutants.Map(suite)
    process, own = "test_starts.py::test_of_a_process", "test_starts.py::test_of_its_own_process"
    # Other tests of the file may depend on the result of a process.
    of_process = {("package/m.py", line): {process, own} for line in (2, 4)}
    # No test reaches line 3: those that reach other lines of its folder are near.
    expected = {
        **of_process,
        ("package/m.py", 3): {process, own},
        ("package/inner/other.py", 2): {own},
        ("package/inner/templates/t.py", 2): {own},
    }
    tests = {(mutant.path, mutant.line): {*by_mutant.tests_of(mutant)} for mutant in made}
    assert tests == expected


def test_mutant_continues_with_new_tiers(mutants, monkeypatch):
    """A mutant that passed the mapped tiers continues with the next one; slow tests beyond the limit
    are counted, not run.
    """
    tree = object.__new__(mutants.Tree)
    tree._limit, tree._servers = 2.5, {"main": None}
    runs = []
    monkeypatch.setattr(tree, "_first_failure", lambda *call: runs.append(call[1]) or "")
    tiers = dict.fromkeys("abc", "short") | {"d": "thorough"}
    lines = types.SimpleNamespace(
        tests_of=lambda _: list(tiers),
        tier=tiers,
        seconds=dict.fromkeys(tiers, 1.0),
        tiers=["short"],
    )
    result = mutants.Result("m.py:1:0", "edit")
    tree.test(result, None, mutants.SUITES[0], lines)
    assert (runs, result.omitted, result.passed) == ([["a", "b"]], 1, ["main short"])
    assert result.is_final(["main short"])
    assert not result.is_final(["main short", "main thorough"])
    lines.tiers.append("thorough")
    tree.test(result, None, mutants.SUITES[0], lines)
    assert (runs[1:], result.omitted, result.found) == ([["d"]], 1, "")


def test_mutant_may_run_in_both_suites(mutants):
    """A mutant of parity runs in the main environment, and in that of tt if tests there reach it;
    those of mha_torch or mha_tt run in one environment.
    """
    mutant = next(mutants.mutants_of("parity/measure/backends/tt.py"))
    reached = types.SimpleNamespace(reached={mutant.id})
    nothing = types.SimpleNamespace(reached=set())

    def names(mutant, **maps):
        return [suite.name for suite in mutants._suites_of(mutant, maps)]

    assert names(mutant, main=nothing, tt=reached) == ["main", "tt"]
    assert names(mutant, main=nothing, tt=nothing) == ["main"]
    of_torch = next(mutants.mutants_of("mha_torch/mha.py"))
    of_tt = next(mutants.mutants_of("mha_tt/mha.py"))
    everything = types.SimpleNamespace(reached={of_torch.id, of_tt.id})
    assert names(of_torch, main=everything, tt=everything) == ["main"]
    assert names(of_tt, main=everything, tt=everything) == ["tt"]


def test_unmapped_mutant_raises(mutants, tmp_path, monkeypatch):
    """A mutant that the map was made without raises an error, since no test would be known."""
    monkeypatch.setattr(mutants, "BUILD", tmp_path)
    mutant = next(mutants.mutants_of("mha_spec/errors.py"))
    with pytest.raises(ValueError, match="is in no map"):
        mutants.Map(mutants.SUITES[0]).tests_of(mutant)


def test_probes_keep_what_code_does(tmp_path, monkeypatch):
    """A probe runs before its statement, also in a branch and at import; docstrings stay."""
    lines = {"if": ["m.py", 4], "else": ["m.py", 7], "import": ["m.py", 1]}
    (tmp_path / "lines.json").write_text(json.dumps(lines))
    monkeypatch.setenv("MUTANTS_FOLDER", str(tmp_path))
    monkeypatch.setenv("MUTANTS_MAP", str(tmp_path))
    monkeypatch.delenv("MUTANTS_TEST", raising=False)
    monkeypatch.setattr(sys, "meta_path", sys.meta_path.copy())
    monkeypatch.setattr(builtins, "mutants_reach", None, raising=False)
    monkeypatch.syspath_prepend(str(FIND.parent))
    probes = importlib.import_module("mutants_probes")
    monkeypatch.delitem(sys.modules, "mutants_probes")
    source = '''ONE = 1
def f(a):
    """Text."""
    if a < 2:
        return ONE
    elif a < 3:
        return 2
    return 3
'''
    tree = ast.parse(source)
    tree = probes.Probes(tree, {"if": 4, "else": 7, "import": 1}).visit(tree)
    names = {}
    exec(compile(tree, "m.py", "exec"), names)
    f = names["f"]
    assert f.__doc__ == "Text."
    assert (f(1), f(3)) == (1, 3)
    assert probes.reached == {"if", "import"}
    assert f(2) == 2
    assert probes.reached == {"if", "else", "import"}


# ---- try-wheel -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def try_wheel():
    path = str(ROOT / "tools" / "try-wheel")
    loader = importlib.machinery.SourceFileLoader("try_wheel", path)
    spec = importlib.util.spec_from_loader("try_wheel", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.dont_write_bytecode", True)
        loader.exec_module(module)
    return module


def test_commands_of_try_wheel_are_valid(try_wheel):
    """Each command that `make dist` runs exists and has its options, and each program is one of
    its files; the page about installation has a row for each extra.
    """
    lines = [line for commands in try_wheel.USES.values() for line in commands]
    users = [user() for user in try_wheel.NEW_USERS.values()]
    steps = [step for user in users for step in user.steps]
    lines += [step.command for step in steps]
    programs = set(try_wheel.FILES).union(*(user.files for user in users))
    num_commands = 0
    for command in " && ".join(lines).split(" && "):
        words = shlex.split(re.sub(r"^[A-Z_]+=\S+ ", "", command))
        if words[0] == "mha-parity":
            parsed(words[1:])
            num_commands += 1
        elif words[1].endswith(".py"):
            assert words[1] in programs, command
    assert num_commands > 15
    tutorial = try_wheel.TUTORIAL.read_text("utf-8")
    of_torch = try_wheel.NEW_USERS["newcomer-torch"]()
    shown = [step.words for step in of_torch.steps if step.name in ("find a bug", "convert it")]
    assert [words for words in shown if words not in tutorial] == []
    page = (ROOT / "docs" / "contributing" / "installation.md").read_text("utf-8")
    _, _, page = page.partition("## Each extra")
    rows = re.findall(r"^\| `?([a-z,]+)`?(?:, [^|]+)? \| \d", page, re.MULTILINE)
    assert {*rows} == {*try_wheel.USES}


@pytest.mark.costly("the commands that `make dist` runs without an extra")
def test_python_of_try_wheel_runs(try_wheel, tmp_path, monkeypatch):
    """The Python that `make dist` runs in each environment works, and so do the commands that need
    no extra.
    """
    for extra in ("none", "gguf"):
        folder = tmp_path / extra
        folder.mkdir()
        monkeypatch.chdir(folder)
        names = {}
        for name, code in try_wheel.FILES.items():
            exec(compile(code, name, "exec"), names)
        names["test_attention"](parity.assert_parity)
        for command in " && ".join(try_wheel.USES[extra]).split(" && "):
            program, *words = shlex.split(command)
            if program == "mha-parity":
                assert main(words) == 0, command

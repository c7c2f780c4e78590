"""tests/helpers/budget.py: counts, runs that fail, and rows that become lower or higher."""

import json
import multiprocessing
import os
import subprocess

import pytest
from helpers import budget
from helpers.budget import Budget, Cost, Meter

FILE = "tests/test_it.py"
STARTS_TWO = {"test_a": 1, "test_b": 1}


def row(items=1, programs=0, processes=0):
    return {"items": items, "programs": programs, "processes": processes}


def budget_of(most_items=100, **files):
    """Return a budget of this environment, with rows of files of these names."""
    return Budget(
        most_items, {budget.ENVIRONMENT: {f"tests/{name}.py": row for name, row in files.items()}}
    )


@pytest.fixture
def root(tmp_path):
    """A repository with one file of tests."""
    (tmp_path / "tests").mkdir()
    (tmp_path / FILE).touch()
    return tmp_path


# ---- Rows ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cost", "expected"),
    [
        (Cost(4, {"a", "b"}, STARTS_TWO), "items 4 > 3"),
        (Cost(3, {"a", "b", "c"}, STARTS_TWO), "programs 3 > 2"),
        (Cost(3, {"a", "b"}, STARTS_TWO | {"test_c": 1}), "processes 3 > 2"),
    ],
    ids=budget.NUMBERS,
)
def test_a_row_bounds_each_number(root, cost, expected):
    """Each number may be as high as in the row, and no higher."""
    rows = budget_of(test_it=row(3, 2, 2))
    assert rows.problems({FILE: Cost(3, {"a", "b"}, STARTS_TWO)}, root) == []
    (problem,) = rows.problems({FILE: cost}, root)
    assert expected in problem
    assert f"make budget FILES={FILE} REASON" in problem


def test_a_file_needs_a_row(root):
    """A different environment's row does not count."""
    rows = Budget(100, {"another": {FILE: row()}})
    (problem,) = rows.problems({FILE: Cost(1)}, root)
    assert problem.endswith(f"{FILE} has no row: `make budget FILES={FILE}` adds it")


def test_a_row_needs_a_file(root):
    rows = budget_of(test_it=row(), test_gone=row())
    (problem,) = rows.problems({}, root)
    assert "tests/test_gone.py has a row and does not exist" in problem
    budget.remove_vanished(rows.rows, root)
    assert rows == budget_of(test_it=row())


def test_all_items_have_a_bound(root):
    """It bounds the rows of both environments, also when a run has tests of one file."""
    rows = Budget(5, {".venv": {FILE: row(3)}, ".venv-tt": {FILE: row(2)}})
    assert rows.problems({}, root) == []
    rows.most_items = 4
    assert rows.problems({}, root) == ["all rows together have 5 items, and most_items is 4"]


def test_a_new_file_gets_a_row():
    rows = budget_of()
    rows.update(FILE, Cost(3, {"a"}, STARTS_TWO), reason="")
    assert rows == budget_of(test_it=row(3, 1, 2))


def test_numbers_become_lower_alone():
    """One that would be higher stays, and the run that measured it fails."""
    rows = budget_of(test_it=row(3, 2, 1))
    rows.update(FILE, Cost(9, {"a"}), reason="")
    assert rows == budget_of(test_it=row(3, 1, 0))


def test_a_reason_raises_a_row():
    """It stays in the row, also when the row is lowered."""
    rows = budget_of(test_it=row(3, 2, 1))
    rows.update(FILE, Cost(9, {"a"}), reason="nine masks")
    assert rows == budget_of(test_it=row(9, 1, 0) | {"raised": "nine masks"})
    rows.update(FILE, Cost(8, {"a"}), reason="")
    assert rows == budget_of(test_it=row(8, 1, 0) | {"raised": "nine masks"})


def test_a_reason_without_a_raise():
    rows = budget_of(test_it=row(3))
    rows.update(FILE, Cost(2), reason="nine masks")
    assert rows == budget_of(test_it=row(2))


def test_the_text_of_rows():
    """Each row has a line, and parsing gives the same rows."""
    rows = budget_of(test_b=row(), test_a=row(2) | {"raised": 'for "this"'})
    assert Budget.parse(rows.text()) == rows
    lines = rows.text().splitlines()
    assert [line.split('"')[1] for line in lines if ".py" in line] == [
        "tests/test_a.py",
        "tests/test_b.py",
    ]


# ---- Counts --------------------------------------------------------------------------------------


def test_workers_share_a_file():
    """A program that both need, or a fixture that both set up, is one; their tests are not the
    same.
    """
    cost = Cost(5, {"a", "b"}, {"fixture[0]": 2, "test_a": 1}, {"test_a"}, 1.0, {"test_b": 3.0})
    cost.add(Cost(5, {"b", "c"}, {"fixture[0]": 2, "test_c": 1}, {"test_c"}, 2.0, {}))
    assert cost.numbers() == row(5, 3, 4)
    assert (cost.unmarked, cost.seconds, cost.slow) == ({"test_a", "test_c"}, 3.0, {"test_b": 3.0})


def fork():
    process = os.fork()
    if not process:
        os._exit(0)
    os.waitpid(process, 0)


def spawn():
    os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0)


def start(method):
    process = multiprocessing.get_context(method).Process(target=os.getpid)
    process.start()
    process.join()


@pytest.mark.costly("starts a process in each way that Python has")
@pytest.mark.filterwarnings("ignore:.*fork:RuntimeWarning", "ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize(
    "begin",
    [
        lambda: subprocess.run(["true"], check=True),
        lambda: subprocess.run(["true"], check=True, close_fds=False),  # calls os.posix_spawn
        lambda: os.system("true"),
        fork,
        spawn,
        lambda: start("fork"),
        lambda: start("spawn"),
        lambda: start("forkserver"),
    ],
    ids=[
        "run",
        "posix_spawn of run",
        "system",
        "fork",
        "posix_spawn",
        *(f"start by {name}" for name in ("fork", "spawn", "forkserver")),
    ],
)
def test_a_process_counts_once(begin, monkeypatch):
    meter, cost = Meter(), Cost()
    monkeypatch.setattr(budget, "METERS", [*budget.METERS, meter])
    budget.watch_processes()
    with meter.charging(cost), meter.counting_processes("test"):
        begin()
    assert cost.numbers()["processes"] == 1


def test_questions_about_the_machine(monkeypatch):
    """Libraries ask them once in a process, so that they are no test's."""
    meter, cost = Meter(), Cost()
    monkeypatch.setattr(budget, "METERS", [*budget.METERS, meter])
    budget.watch_processes()
    with meter.charging(cost), meter.counting_processes("test"):
        subprocess.run(["uname"], check=True)
    assert cost.processes == {}


def test_a_shared_pool_counts_once():
    """Which test of a file starts it depends on the worker, and on the order."""
    meter, cost = Meter(), Cost()
    for test in ("test_a", "test_b"):
        with meter.charging(cost), meter.counting_processes(test):
            meter.note_process(budget.ALONE)
            meter.note_process(budget.IN_POOL)
            meter.note_process(budget.IN_POOL)
    assert cost.processes == {"test_a": 1, "test_b": 1, "pool": 2}


def test_a_fixture_that_is_set_up_twice():
    """The fixture's processes count once, for itself instead of for the test that uses it first."""
    meter, cost = Meter(), Cost()
    for test in ("test_a", "test_b"):
        with (
            meter.charging(cost),
            meter.counting_processes(test),
            meter.counting_processes("fixture"),
        ):
            meter.note_process(budget.ALONE)
    assert cost.processes == {"fixture": 1}


# ---- Runs ----------------------------------------------------------------------------------------

CONFTEST = """
pytest_plugins = ["helpers.budget"]
"""
TESTS = """
import subprocess

import jax
import pytest

@pytest.fixture(scope="module")
def process():
    subprocess.run(["true"], check=True)

@pytest.mark.parametrize("x", [1, 2])
def test_program(x):
    assert int(jax.jit(lambda x: x + 1)(x)) == x + 1

COSTLY
def test_fixture(process): pass

COSTLY
def test_its_process(process):
    subprocess.run(["true"], check=True)
"""
COSTLY = '@pytest.mark.costly("starts what does nothing")'
ENOUGH = row(4, 1, 2)


@pytest.fixture
def suite(pytester, monkeypatch):
    """A folder with one file of tests, and its row."""
    monkeypatch.delenv("SAMPLES", raising=False)
    pytester.makeini(
        "[pytest]\nmarkers =\n    thorough: all the rest\n    nightly: slow\naddopts = -m 'not thorough and not nightly' -p no:logging"
    )
    pytester.makeconftest(CONFTEST)
    pytester.mkdir("tests")
    (pytester.path / FILE).write_text(TESTS.replace("COSTLY", COSTLY))
    (pytester.path / "tests" / "budget.json").write_text(budget_of(test_it=ENOUGH).text())
    (pytester.path / "tests" / "budget-seconds.json").write_text("{}")
    return pytester


def rows_of(suite):
    return Budget.parse((suite.path / "tests" / "budget.json").read_text())


@pytest.mark.costly("a test and a fixture in it start processes")
def test_a_run_within_its_row(suite):
    """A program that two tests need counts once, and so does the process of a fixture."""
    result = suite.runpytest("--budget=check")
    result.assert_outcomes(passed=4)
    assert result.ret == pytest.ExitCode.OK
    result.stdout.fnmatch_lines([f"* 4 * 1 * 2  {FILE}"])


@pytest.mark.costly("a test and a fixture in it start processes")
def test_a_run_that_exceeds_its_row(suite):
    """It fails, and says for each number what the file has and may have."""
    (suite.path / "tests" / "budget.json").write_text(budget_of(test_it=row(3, 0, 1)).text())
    result = suite.runpytest("--budget=check")
    result.assert_outcomes(passed=4)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    lines = [
        f"budget: *{FILE} exceeds its row, {name} {had} > {may}: *"
        for name, had, may in zip(budget.NUMBERS, (4, 1, 2), (3, 0, 1), strict=True)
    ]
    result.stdout.fnmatch_lines(lines)


WORKERS_TESTS = """
import pytest
from helpers import budget

@pytest.mark.parametrize("x", [1, 2, 3, 4])
def test_program(x):
    (meter,) = budget.METERS
    meter.note_program("both")
    meter.note_program(f"program {x}")
"""


@pytest.mark.thorough
@pytest.mark.costly("starts two workers")
def test_workers_send_their_counts(suite):
    """Without JAX, whose import in each worker would take most of the time."""
    (suite.path / FILE).write_text(WORKERS_TESTS)
    result = suite.runpytest("--budget=check", "-n", "2", "--dist", "load")
    result.assert_outcomes(passed=4)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        [f"* 4 * 5 * 0  {FILE}", f"budget: *{FILE} exceeds its row, programs 5 > 1: *"]
    )


@pytest.mark.costly("a test and a fixture in it start processes")
def test_a_process_needs_a_mark(suite):
    """So does a test whose fixture was set up, with its process, for a test before it."""
    (suite.path / FILE).write_text(TESTS.replace("COSTLY", ""))
    result = suite.runpytest("--budget=check")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    lines = [
        f"budget: {FILE}::{test} starts a process without *"
        for test in ("test_fixture", "test_its_process")
    ]
    result.stdout.fnmatch_lines(lines)


@pytest.mark.parametrize(
    "mark", ["costly", "costly()", 'costly(why="slow")', 'costly("slow", "very")']
)
def test_a_mark_says_why(suite, mark):
    (suite.path / FILE).write_text(f"import pytest\n\n@pytest.mark.{mark}\ndef test_x(): pass")
    result = suite.runpytest()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f'*{FILE}::test_x: the mark is @pytest.mark.costly("why")'])


def test_a_slow_test_is_printed(suite, monkeypatch):
    """It does not fail the run, since seconds depend on the machine."""
    (suite.path / FILE).write_text("def test_x(): sum(range(100_000))")
    monkeypatch.setattr(budget, "MOST_SECONDS", -1.0)
    result = suite.runpytest("--budget=check")
    assert result.ret == pytest.ExitCode.OK
    result.stdout.fnmatch_lines([f"* s without @costly, which says why: {FILE}::test_x"])


def test_writing_asks_for_a_reason(suite):
    """Without one, the run fails and the number stays; with one, it becomes higher."""
    (suite.path / FILE).write_text("def test_x(): pass\ndef test_y(): pass")
    (suite.path / "tests" / "budget.json").write_text(
        budget_of(test_it=row(1, 1), test_gone=row()).text()
    )
    result = suite.runpytest("--budget=write")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines([f"budget: *{FILE} exceeds its row, items 2 > 1: *"])
    assert rows_of(suite) == budget_of(test_it=row(1))
    assert suite.runpytest("--budget=write", "--budget-reason=both signs").ret == pytest.ExitCode.OK
    assert rows_of(suite) == budget_of(test_it=row(2) | {"raised": "both signs"})
    seconds = json.loads((suite.path / "tests" / "budget-seconds.json").read_text())
    assert list(seconds[budget.ENVIRONMENT]) == [FILE]


def test_a_failed_run_writes_nothing(suite):
    """Its tests may have ended before their programs."""
    (suite.path / FILE).write_text("def test_x(): raise ValueError")
    assert suite.runpytest("--budget=write").ret == pytest.ExitCode.TESTS_FAILED
    assert rows_of(suite) == budget_of(test_it=ENOUGH)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--budget=write"], "--budget=write counts one file alone, not 2"),
        (["--budget=write", "-n", "2"], "--budget=write counts one file in one process"),
    ],
)
def test_one_file_is_written(suite, options, message):
    """Programs that another file left in the process would be missing."""
    (suite.path / "tests" / "test_other.py").write_text("def test_x(): pass")
    result = suite.runpytest(*options)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*{message}"])


@pytest.mark.parametrize(
    ("samples", "options"), [("all", []), (None, ["-m", ""])], ids=["samples", "thorough"]
)
def test_other_runs_have_no_budget(suite, monkeypatch, samples, options):
    """The rows come from `make test`."""
    if samples is not None:
        monkeypatch.setenv("SAMPLES", samples)
    result = suite.runpytest("--budget=check", *options)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        ["*--budget needs -m 'not thorough and not nightly' and no SAMPLES, as in `make test`"]
    )

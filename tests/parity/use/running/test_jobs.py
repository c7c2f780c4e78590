"""Cases in several processes: the report is unchanged and no process is left behind."""

import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures.process import BrokenProcessPool

import pytest
from helpers.input_errors import rejects

from parity import CASES, run_cases
from parity.use.cli.main import main
from parity.use.running.elsewhere import Elsewhere
from parity.use.running.jobs import by_processes

LEFT_ALONE = """
import multiprocessing, time
from parity.use.running.jobs import by_processes

if __name__ == "__main__":
    naps = by_processes(time.sleep, [0, 600], 2, cost=lambda nap: -nap)
    next(naps)
    print(*(process.pid for process in multiprocessing.active_children()), flush=True)
    next(naps)
"""


def until(is_so, seconds=30):
    for _ in range(seconds * 20):
        if is_so():
            return True
        time.sleep(0.05)
    return False


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.costly("cases by two processes")
@pytest.mark.thorough  # `make parity` also runs them by two processes
def test_report_equals_one_process():
    """Two processes produce the same report as one, with more than 150 passed stages."""
    cases = [CASES[name] for name in ("textbook", "decode", "nan-visible-causal")]
    alone, together = (
        run_cases(
            cases, ["torch"], ["float32", "bfloat16"], with_gradients=True, jobs=jobs
        ).to_dict()
        for jobs in (1, 2)
    )
    assert together["results"] == alone["results"]
    assert together == alone
    assert alone["summary"]["passed"] > 150


@pytest.mark.costly("work by two processes")
@pytest.mark.thorough
def test_results_are_in_order():
    """Results come in the order of items, whichever process ends first."""
    assert list(by_processes(math.isqrt, [9, 4, 1, 0], 2, cost=abs)) == [3, 2, 1, 0]


@pytest.mark.costly("work by a process")
@pytest.mark.thorough
def test_most_expensive_item_starts_first(tmp_path):
    """Items start in descending order of cost, and results keep the original order."""
    paths = [str(tmp_path / name) for name in ("a", "bb", "ccc")]
    assert list(by_processes(os.mkdir, paths, 1, cost=len)) == [None] * 3
    assert [os.stat(path).st_ctime_ns for path in paths] == sorted(
        (os.stat(p).st_ctime_ns for p in paths), reverse=True
    )


@pytest.mark.costly("work by two processes")
def test_exception_in_process_is_raised():
    """An exception in a process is raised in the parent."""
    with pytest.raises(ValueError, match="nonnegative"):
        list(by_processes(math.isqrt, [9, -1], 2, cost=abs))


@pytest.mark.costly("a process that dies")
def test_dead_process_raises_an_error():
    """A process that exits raises `BrokenProcessPool` instead of hanging."""
    with pytest.raises(BrokenProcessPool):
        list(by_processes(os._exit, [3], 2, cost=abs))


@pytest.mark.costly("processes that are ended")
def test_closed_iterator_leaves_no_process():
    """Processes end within 30 seconds after the iterator is closed, even if busy."""
    others = set(multiprocessing.active_children())
    naps = by_processes(time.sleep, [0, 600, 600], 2, cost=lambda nap: -nap)
    next(naps)
    ours = set(multiprocessing.active_children()) - others
    assert ours
    naps.close()
    assert until(lambda: not set(multiprocessing.active_children()) & ours)


@pytest.mark.costly("a process that is killed")
@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="processes are looked for in /proc")
def test_killed_parent_leaves_no_process(tmp_path):
    """Processes end within 30 seconds after their parent is killed."""
    script = tmp_path / "script.py"
    script.write_text(LEFT_ALONE)
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as process:
        pids = process.stdout.readline().split()
        assert len(pids) == 2
        assert all(map(is_running, pids))
        process.send_signal(signal.SIGKILL)
    assert until(lambda: not any(map(is_running, pids)))


@pytest.mark.parametrize(
    ("arguments", "jobs"),
    [(["--jobs", "0"], 0), (["--jobs", "2", "--model", "x"], 2)],
)
def test_invalid_jobs_option_fails(arguments, jobs, capsys):
    """`--jobs 0`, and `--jobs` with `--model`, exit with 2."""
    assert main(["run", "--cases", "textbook", *arguments]) == 2
    assert rejects("--jobs", {"--jobs": jobs}).is_printed_in(capsys.readouterr().err)


def test_invalid_jobs_argument_raises():
    """`jobs=0` raises an error that names `jobs`."""
    with rejects("jobs", jobs=0):
        run_cases([CASES["textbook"]], ["torch"], jobs=0)


THREADS = ["OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"]


@pytest.mark.costly("the environment of two processes")
@pytest.mark.parametrize(("own", "expected"), [(None, ["4", "4"]), ("3", ["3", "4"])])
def test_processes_share_the_cores(monkeypatch, own, expected):
    """Two processes use 4 of 9 cores each, unless a variable is
    set; the parent's variables stay unchanged.
    """
    monkeypatch.setattr(os, "cpu_count", lambda: 9)
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False) if own is None else monkeypatch.setenv(
        "OMP_NUM_THREADS", own
    )
    assert list(by_processes(os.getenv, THREADS, 2, cost=len)) == expected
    assert os.environ.get("OMP_NUM_THREADS") == own


@pytest.mark.costly("the environment of another interpreter")
def test_other_python_shares_the_cores(tmp_path, monkeypatch):
    """A different Python that is one of four processes uses 2 of 9 cores."""
    monkeypatch.setattr(os, "cpu_count", lambda: 9)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho $OMP_NUM_THREADS >&2\nexit 2\n")
    python.chmod(0o755)
    with (
        Elsewhere(str(python), [], num_processes=4) as elsewhere,
        pytest.raises(OSError, match="exit status 2: 2"),
    ):
        elsewhere.wait()


# ---- A second Python -----------------------------------------------------------------------------

CASES_ELSEWHERE = ["--cases", "rope-gqa", "--grad", "--dtypes", "float32,bfloat16"]


def run_with(tmp_path, *options):
    path = tmp_path / "report.json"
    assert main(["run", "--quiet", "--json", str(path), *options]) == 0
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.costly("cases in another interpreter")
@pytest.mark.thorough  # `make parity` runs one, with --jobs 2
def test_other_python_has_same_results(tmp_path):
    """A backend in a different Python has the same results as here, and runs once."""
    here = run_with(tmp_path, "--backends", "torch", *CASES_ELSEWHERE)
    options = ["--python", f"torch={sys.executable}", "--backends", "torch"]
    elsewhere = run_with(tmp_path, *options, *CASES_ELSEWHERE)
    assert (
        elsewhere["results"] == here["results"]
    )  # each result occurs once: torch does not also run here
    assert {result["backend"] for result in here["results"]} == {"torch"}


@pytest.mark.costly("a program in place of an interpreter")
def test_other_python_error_is_one_line(tmp_path, capsys):
    """An error of a different Python exits with 2 and one line with its status and message."""
    python = tmp_path / "python"
    python.write_text(
        "#!/bin/sh\necho 'mha-parity: torch needs torch, not installed here' >&2\nexit 2\n"
    )
    python.chmod(0o755)
    assert (
        main(["run", "--backends", "jax", "--python", f"torch={python}", "--cases", "textbook"])
        == 2
    )
    printed = capsys.readouterr().err.splitlines()[-1]
    assert printed.startswith("mha-parity: ")
    assert rejects(
        str(python), "exit status 2: torch needs torch, not installed here"
    ).is_printed_in(printed)


@pytest.mark.costly("a program in place of an interpreter")
def test_warning_does_not_hide_a_crash(tmp_path):
    """The last line of a native crash is reported, although a warning of ours came before."""
    python = tmp_path / "python"
    python.write_text(
        "#!/bin/sh\necho 'mha-parity: warning: a setting is ignored' >&2\n"
        "echo 'Fatal Python error: Aborted' >&2\nexit 134\n"
    )
    python.chmod(0o755)
    with (
        Elsewhere(str(python), []) as elsewhere,
        pytest.raises(OSError, match="exit status 134: Fatal Python error: Aborted"),
    ):
        elsewhere.wait()


@pytest.mark.parametrize(
    ("python", "got"),
    [("torch=nowhere", "nowhere"), ("caffe=python", "caffe")],
)
def test_invalid_python_option_fails(capsys, python, got):
    """`--python` with a missing interpreter or an unknown backend exits with 2."""
    assert main(["run", "--python", python]) == 2
    assert rejects("--python", {"--python": got}).is_printed_in(capsys.readouterr().err)


@pytest.mark.costly("a program in place of an interpreter")
def test_other_python_ends_with_the_run(tmp_path, monkeypatch):
    """A different Python ends with its block and leaves no temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 600\n")
    python.chmod(0o755)
    with Elsewhere(str(python), []) as elsewhere:
        assert elsewhere.process.poll() is None
    assert elsewhere.process.poll() is not None
    assert os.listdir(tmp_path) == ["python"]

"""Tests of the command line with signals, unwritable paths, absurd numbers and bugs of its own."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.command_line import error_line
from helpers.input_errors import rejects
from helpers.samples import sample

import parity.use.cli.doctor
from parity import AttentionSpec, random_weights, save
from parity.use.cli.main import main

CACHE_SIZE = ["cache-size", "--num-kv-heads", "1", "--head-dim", "1", "--capacity", "1"]
MHA_PARITY = [sys.executable, "-m", "parity"]


# ---- Paths ---------------------------------------------------------------------------------------


@sample(9)
@pytest.mark.parametrize("flag", ["--json", "--junit", "--html"])
@pytest.mark.parametrize(
    ("path", "got"),
    [
        ("/proc/x", "/proc/x: No such file or directory"),
        ("loop", "loop: Too many levels of symbolic links"),
        ("x" * 300, "File name too long"),
        (".", ".: Is a directory"),
        ("none/x", "none/x: No such file or directory"),
        ("", "empty"),
    ],
)
def test_unwritable_report_fails_early(capsys, tmp_path, monkeypatch, flag, path, got):
    """A report path that cannot be written exits with status 2 and one error line before any
    case runs, and no file is created.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "parity.use.running.run.run_cases", lambda *_, **__: pytest.fail("it began to work")
    )
    os.symlink("loop", "loop")
    printed = error_line(capsys, "run", "--cases", "textbook", flag, path)
    assert rejects(flag, got).is_printed_in(printed)
    assert os.listdir() == ["loop"]


@pytest.mark.parametrize(
    ("path", "got"),
    [
        ("", "empty"),
        ("/proc/x/y", "/proc/x/y: No such file"),
        ("file", "file: Not a directory"),
        ("file/x", "file/x: Not a directory"),
    ],
)
def test_unwritable_traces_path_exits_2(capsys, tmp_path, monkeypatch, path, got):
    """A --save-traces path that cannot be a folder exits with status 2 and one error line."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    printed = error_line(capsys, "run", "--cases", "textbook", "--save-traces", path)
    assert rejects("--save-traces", got).is_printed_in(printed)


@pytest.mark.parametrize("command", ["plot", "bench"])
def test_unwritable_picture_exits_2(capsys, command):
    """An image path that cannot be written exits with status 2 and one error line about it,
    even if the source of `plot` is also missing.
    """
    arguments = (
        ["no.npz", "/proc/x.png"]
        if command == "plot"
        else ["--suites", "growth", "--plot", "/proc/x.png"]
    )
    assert rejects("DST" if command == "plot" else "--plot", "/proc/x.png: ").is_printed_in(
        error_line(capsys, command, *arguments)
    )


@pytest.mark.parametrize(
    "arguments", [["compare", ""], ["inspect", ""], ["compare", "", "a"], ["convert", "a", ""]]
)
def test_empty_path_is_rejected(capsys, arguments):
    """An empty path exits with status 2 and an error that calls it empty; it does not mean
    the current folder.
    """
    to = ["--to", "ttnn"] if arguments[0] == "convert" else []
    assert rejects("…", "empty").is_printed_in(error_line(capsys, *arguments, *to))


@pytest.mark.parametrize("path", ["-", "/dev/stdout"])
def test_json_to_stdout_is_alone(capsys, path):
    """With --json - or /dev/stdout, standard output has only the JSON, and standard error
    nothing.
    """
    assert main([*CACHE_SIZE, "--json", path]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {
        "schema": "mha-parity/cache-size",
        "version": 1,
        "nbytes": 4,
    }
    assert captured.err == ""


@pytest.mark.thorough
@pytest.mark.costly("a file descriptor of a process")
def test_json_is_written_into_pipe():
    """--json writes into a pipe, by /dev/fd/2 and by -."""
    command = [*MHA_PARITY, *CACHE_SIZE, "--json", "/dev/fd/2"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(result.stderr)["nbytes"] == 4
    result = subprocess.run([*command[:-1], "-"], capture_output=True, text=True, check=True)
    assert json.loads(result.stdout)["nbytes"] == 4


def test_only_one_report_goes_to_stdout(capsys):
    """--json - with --html - exits with status 2 and an error about both."""
    printed = error_line(capsys, "run", "--cases", "textbook", "--json", "-", "--html", "-")
    assert rejects("--json and --html").is_printed_in(printed)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ([], "PKG.MODULE:CALLABLE or --libraries"),
        (["torch.nn.functional:nothing"], "module 'torch.nn.functional' has no 'nothing'"),
        (["none/x:nothing"], "cannot import 'none/x': No module named 'none/x'"),
    ],
)
def test_function_is_not_checked_as_path(capsys, target, words):
    """A function of `conformance` that is missing or cannot be imported exits with status 2,
    with an error that is not about DST.
    """
    assert words in error_line(capsys, "conformance", *target)


# ---- Numbers -------------------------------------------------------------------------------------


def test_random_case_count_is_limited(capsys):
    """`run --random` with 20 digits exits with status 2 and an error with the number."""
    assert rejects("--random", {"--random": 10**20 - 1}).is_printed_in(
        error_line(capsys, "run", "--random", "9" * 20)
    )


@pytest.mark.parametrize(
    "flag", ["--batch-size", "--num-kv-heads", "--head-dim", "--capacity", "--num-layers"]
)
def test_oversized_cache_is_rejected(capsys, flag):
    """`cache-size` rejects sizes of 2^63 and of 400 digits with status 2, and accepts 2^63 - 1."""
    assert rejects(flag, {flag: 2**63}).is_printed_in(
        error_line(capsys, *CACHE_SIZE, flag, str(2**63))
    )
    assert rejects(flag).is_printed_in(error_line(capsys, *CACHE_SIZE, flag, "9" * 400))
    assert main([*CACHE_SIZE, flag, str(2**63 - 1)]) == 0


# ---- Bugs of our own -----------------------------------------------------------------------------


@pytest.fixture
def mistaken(monkeypatch):
    """Replace `doctor` by a command that raises an unexpected error."""

    def fail(options):
        raise KeyError("what?\nno")

    monkeypatch.setattr(parity.use.cli.doctor.run, "callback", fail)


@pytest.mark.usefixtures("mistaken")
def test_internal_error_exits_70(capsys, monkeypatch, tmp_path):
    """An unexpected error exits with status 70 and one line with the file of its traceback;
    with -v, the traceback is also printed.
    """
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert main(["doctor"]) == 70
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("mha-parity: error: a bug in mha-parity, KeyError: ")
    (file,) = tmp_path.iterdir()
    assert captured.err.endswith(f"with {file}, which has the command and the traceback\n")
    assert main(["doctor", "-v"]) == 70
    assert "Traceback" in capsys.readouterr().err
    assert len([*tmp_path.iterdir()]) == 2


# ---- Signals -------------------------------------------------------------------------------------

CONVERT_AND_WAIT = """
import signal, sys, time
from parity.use.cli.main import main
import parity.measure.files.writing

read = parity.measure.files.writing.Tensors.read

def wait(self, name):
    print("begun", flush=True)
    time.sleep(60)
    return read(self, name)

parity.measure.files.writing.Tensors.read = wait
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background of a shell is born without it
signal.signal(signal.SIGHUP, signal.SIG_IGN if sys.argv[1] == "nohup" else signal.SIG_DFL)  # whatever tests run in
sys.argv = [each for each in sys.argv if each != "nohup"]
sys.exit(main())
"""


@pytest.fixture
def converting(tmp_path):
    """A conversion that has begun to write."""
    spec = AttentionSpec(8, 2)
    save(tmp_path / "a.npz", random_weights(spec), spec)
    started = []

    def start(*extra):
        command = [
            sys.executable,
            "-c",
            CONVERT_AND_WAIT,
            *extra,
            "convert",
            "a.npz",
            "b.npz",
            "--to",
            "ttnn",
        ]
        process = subprocess.Popen(
            command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        assert len(os.listdir(tmp_path)) == 2
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.costly("a signal to a process that writes")
@sample(name=["SIGTERM"])
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_signal_removes_partial_file(tmp_path, converting, name):
    """A conversion that gets SIGINT, SIGTERM or SIGHUP prints one line, exits with status 128
    + the signal, and leaves no partial file.
    """
    process, number = converting(), getattr(signal, name)
    process.send_signal(number)
    by = "" if name == "SIGINT" else f" by {name}"
    assert process.communicate()[1] == f"mha-parity: interrupted{by}\n"
    assert process.returncode == 128 + number
    assert os.listdir(tmp_path) == ["a.npz"]


@pytest.mark.costly("signals to a process that writes")
def test_repeated_signals_leave_no_file(tmp_path, converting):
    """After four signals in a row, a conversion exits with a status above 128 and leaves no
    partial file.
    """
    process = converting()
    for number in (
        signal.SIGHUP,
        signal.SIGTERM,
        signal.SIGINT,
        signal.SIGTERM,
    ):  # as from a terminal that closes
        process.send_signal(number)
    process.communicate()
    assert process.returncode > 128
    assert os.listdir(tmp_path) == ["a.npz"]


@pytest.mark.costly("a signal to a process that ignores it")
def test_nohup_keeps_sighup_ignored(tmp_path, converting):
    """A conversion that starts with SIGHUP ignored continues after it, and ends at SIGTERM."""
    process = converting("nohup")
    process.send_signal(signal.SIGHUP)
    time.sleep(0.2)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.communicate()[1] == "mha-parity: interrupted by SIGTERM\n"


INTERRUPTIBLE = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background of a shell ignores it
from parity.__main__ import main
sys.exit(main())
"""


@pytest.mark.costly("a signal to a process that runs every case")
@sample(delay=[0.2])
@pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux tells which signals a process handles"
)
@pytest.mark.parametrize("delay", [0.0, 0.2, 1.0])
def test_interrupt_shows_no_traceback(tmp_path, delay):
    """SIGINT up to 1 second after handlers are installed exits with status 130 and prints
    only the line about it.
    """
    # Every case, which takes far longer than the delay.
    command = [sys.executable, "-c", INTERRUPTIBLE, "run", "--backends", "torch"]
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        deadline = time.monotonic() + 60
        while not handles(process.pid, signal.SIGTERM):  # until then, Python handles an interrupt
            assert time.monotonic() < deadline
            time.sleep(0.001)
        time.sleep(delay)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert errors == "mha-parity: interrupted\n"
    # If the interrupt met Python code that a library runs through CPython's C API, CPython itself
    # ends the process by SIGINT when all is done. A shell reports 130 for both.
    assert process.returncode in (130, -signal.SIGINT)


def handles(pid, number):
    status = Path(f"/proc/{pid}/status").read_text()
    (caught,) = (line.split()[1] for line in status.splitlines() if line.startswith("SigCgt"))
    return int(caught, 16) >> (number - 1) & 1


def test_signal_handlers_are_restored():
    """After a command, the handlers of SIGINT, SIGTERM and SIGHUP are the previous ones."""
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    assert main(CACHE_SIZE) == 0
    assert [
        signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    ] == before

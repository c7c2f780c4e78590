"""The pytest plugin: the fixture `assert_parity`, and `--parity-report PATH`.

Every run of pytest where this package is installed imports this file: it imports only pytest until
it is used.
"""

from __future__ import annotations

import importlib
import shlex
from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from parity.explain.diagnosis.diagnose import Diagnosis
    from parity.measure.core.compare import Comparison

WRITERS = {
    ".json": ("parity.use.reporting.json", "write_json"),
    ".xml": ("parity.use.reporting.junit", "write_junit"),
    ".html": ("parity.use.reporting.html", "write_html"),
}
"""The module and the function that write a report, by the suffix of the file."""

FROM_WORKER = "parity_report"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("mha-parity")
    suffixes = ", ".join(WRITERS)
    group.addoption(
        "--parity-report",
        metavar="PATH",
        help=f"write every comparison of the fixture assert_parity to this file ({suffixes})",
    )


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--parity-report")
    if path is None:
        return
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(_Worker(config), _Recorder.NAME)
        return
    controller = _Controller(config.invocation_params.dir / path)
    try:
        controller.check()
    except (ImportError, ValueError) as error:
        raise pytest.UsageError(str(error)) from None
    config.pluginmanager.register(controller, _Recorder.NAME)


@pytest.fixture
def assert_parity(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Return `parity.assert_parity(actual, expected, …)`, titled by the test and collected for
    `--parity-report`.
    """
    recorder = request.config.pluginmanager.get_plugin(_Recorder.NAME)

    def assert_parity(actual: Any, expected: Any = None, *, name: str = "", **options: Any) -> None:
        __tracebackhide__ = True
        from parity.use.testing.assertion import NEXT, compare_and_diagnose, message

        title = f"{request.node.nodeid} {name}".rstrip()
        comparisons, diagnosis = compare_and_diagnose(actual, expected, name=title, **options)
        if recorder is not None:
            test = _test_of(request.node, name)
            for comparison in comparisons:
                recorder.comparisons.append(replace(comparison, test=test))
            key = comparisons[0].key
            recorder.commands[key] = shlex.join(["pytest", request.node.nodeid])
            if diagnosis is not None:
                # A report does not need the converted arrays, which may be large.
                recorder.diagnoses.setdefault(key, replace(diagnosis, taken={}))
        verbose = request.config.get_verbosity() > 0
        next_step = "" if options.get("problem") else NEXT
        text = message(comparisons, diagnosis, next_step, verbose=verbose)
        if text:
            raise AssertionError(text)

    return assert_parity


def _test_of(node: pytest.Item, name: str) -> tuple[str, str]:
    """Return the class and the name of a test, as in pytest's own `--junit-xml`, and the title of
    the comparison.
    """
    chain = node.listchain()
    index_of_file = 0
    for index, collector in enumerate(chain):
        if isinstance(collector, pytest.File):
            index_of_file = index
    module = chain[index_of_file].nodeid.removesuffix(".py").replace("/", ".")
    classes = [collector.name for collector in chain[index_of_file + 1 : -1]]
    return ".".join([module, *classes]), f"{node.name} {name}".rstrip()


class _Recorder:
    """The collected comparisons of a session."""

    NAME = "mha_parity_report"

    def __init__(self) -> None:
        self.comparisons: list[Comparison] = []
        self.diagnoses: dict[tuple[str, str, str], Diagnosis] = {}
        self.commands: dict[tuple[str, str, str], str] = {}


class _Worker(_Recorder):
    """In a process of pytest-xdist: sends its comparisons to the controller, as plain data."""

    def __init__(self, config: pytest.Config) -> None:
        super().__init__()
        self.config: Any = config

    def pytest_sessionfinish(self) -> None:
        import pickle

        collected = (self.comparisons, self.diagnoses, self.commands)
        self.config.workeroutput[FROM_WORKER] = pickle.dumps(collected)


class _Controller(_Recorder):
    """In pytest's own process: writes the report."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.silent: list[str] = []
        """Workers that have sent nothing."""
        self.error: OSError | ValueError | None = None

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodeready(self, node: Any) -> None:
        self.silent.append(node.gateway.id)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        import pickle

        output = getattr(node, "workeroutput", {})  # a crashed worker has none
        if FROM_WORKER in output:
            # A worker is our own process, so its pickle can be trusted.
            comparisons, diagnoses, commands = pickle.loads(output[FROM_WORKER])
            # Which worker ran a test is chance: reports are in the order of the tests' names.
            self.comparisons = sorted([*self.comparisons, *comparisons], key=attrgetter("case"))
            self.diagnoses |= diagnoses
            self.commands |= commands
            if node.gateway.id in self.silent:
                self.silent.remove(node.gateway.id)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        try:
            self.write()
        except (OSError, ValueError) as error:
            self.error = error
            if session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
                session.exitstatus = pytest.ExitCode.USAGE_ERROR

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.error is not None:
            text = f"ERROR: --parity-report cannot be written: {self.error}"
            terminalreporter.write_line(text, red=True)
            return
        failed = len([comparison for comparison in self.comparisons if not comparison.passed])
        counts = f"{len(self.comparisons)} comparisons, {failed} failed"
        terminalreporter.write_sep("-", f"parity report: {self.path} ({counts})")

    def check(self) -> None:
        """Reject a report that cannot be written before the tests run."""
        from mha_spec import InputError
        from parity.measure.files.target import check_writable
        from parity.use.reporting.earlier import check_report

        suffix = self.path.suffix.lower()
        if suffix not in WRITERS:
            raise InputError(
                "--parity-report",
                f"end in one of {', '.join(WRITERS)}",
                {"--parity-report": self.path},
            )
        check_writable(self.path, "--parity-report")
        check_report(self.path, "--parity-report")
        module = importlib.import_module(WRITERS[suffix][0])
        # The page alone needs other libraries, which it imports when it is written.
        if hasattr(module, "check_installed"):
            module.check_installed()

    def write(self) -> None:
        from parity.measure.backends.numerics import environment
        from parity.use.running.report import Report

        warnings = [
            f"worker {worker} went down: its comparisons are missing" for worker in self.silent
        ]
        report = Report(
            self.comparisons,
            {},
            environment([]),
            warnings,
            diagnoses=self.diagnoses,
            commands=self.commands,
        )
        module, name = WRITERS[self.path.suffix.lower()]
        write = getattr(importlib.import_module(module), name)
        if name == "write_json":
            write(self.path, "run", report.to_dict())
        else:
            write(self.path, report)

"""The command line, `mha-parity`.

Exit status: 0 all well, 1 a mismatch, 2 bad usage or something missing, 70 a mistake of this program, 128 + signal.
"""

from __future__ import annotations

import argparse
import difflib
import fnmatch
import math
import os
import re
import signal
import sys
import tempfile
import textwrap
import threading
import time
import traceback
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from parity.cli.help import EXIT_STATUS, PAGES
from parity.conversion.not_carried import NotCarriedWarning

if TYPE_CHECKING:
    from types import FrameType

    from parity.core.spec import Case

# Everything else is imported by the command that needs it, so that --help answers at once.

PATIENCE = 5.0  # seconds that an import may go on when a signal has come
MOST_RANDOM = 10_000  # cases, which take hours
MOST_SIZE = 2**63 - 1  # of an axis, as arrays have it
MOST_GIB = 2**20  # of a shard: a pebibyte


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    SIGINT, SIGTERM and SIGHUP end it as an error does: what was begun is cleared away, and the status is 128 + signal.

    Args:
        arguments: as on the command line; those of the process when absent.

    Returns:
        The exit status.
    """
    with _signals_raise(for_good=arguments is None) as received:
        try:
            options = _parser().parse_args(arguments)
            with _warnings_in_a_line():
                return _run_command(options)
        except (Exception, KeyboardInterrupt) as error:
            if os.environ.get("MHA_PARITY_TRACEBACK"):
                traceback.print_exc()
            if received or isinstance(error, KeyboardInterrupt):  # an import that is interrupted may fail in any way
                number = received[0] if received else signal.SIGINT
                by = "" if number == signal.SIGINT else f" by {signal.Signals(number).name}"
                return _say(f"interrupted{by}", 128 + number)
            if isinstance(error, EXPECTED):
                return _say(str(error) or type(error).__name__, 2)
            what = f"{type(error).__name__}: {error}".rstrip(": ")
            return _say(f"a mistake of this program, {what}; MHA_PARITY_TRACEBACK=1 shows where", 70)


EXPECTED = (OSError, ValueError, TypeError, ImportError, RuntimeError, MemoryError)
"""What a wrong argument, a bad file or a machine raises; all else is a mistake of ours, and no mismatch."""

REPORTS = ("json", "junit", "html")
"""Flags whose result can go to standard output."""

STANDARD_OUTPUT = ("-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1")


def _say(text: str, status: int) -> int:
    print(f"mha-parity: {'; '.join(filter(None, map(str.strip, text.splitlines())))}", file=sys.stderr)
    return status


@contextmanager
def _warnings_in_a_line() -> Iterator[None]:
    """What is not carried, on standard error, each once; what others warn of as it was."""
    shown = set()

    def show(message: Warning | str, category: type[Warning], *place: Any) -> None:
        if not issubclass(category, NotCarriedWarning):
            show_others(message, category, *place)
        elif str(message) not in shown:
            shown.add(str(message))
            print(f"mha-parity: warning: {message}", file=sys.stderr)

    with warnings.catch_warnings():
        show_others, warnings.showwarning = warnings.showwarning, show
        warnings.simplefilter("always", NotCarriedWarning)
        yield


@contextmanager
def _signals_raise(*, for_good: bool) -> Iterator[list[int]]:
    """Signals that end a process raise KeyboardInterrupt instead, once: what they interrupt cleans up in peace.

    An import goes on until it is done. What is ignored, as by nohup, stays ignored. Afterwards all is as it was;
    `for_good`: a signal ends the process at once.

    Yields:
        The signals that came.
    """
    received: list[int] = []
    raised = False
    latest = math.inf

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal raised, latest
        if not received:
            received.append(number)
            latest = time.monotonic() + PATIENCE
        if raised:
            return
        if hasattr(signal, "setitimer") and _is_importing(frame) and time.monotonic() < latest:
            before.setdefault(signal.SIGALRM, signal.signal(signal.SIGALRM, interrupt))
            signal.setitimer(signal.ITIMER_REAL, 0.02)  # libraries in C print a traceback when they cannot be imported
            return
        raised = True
        raise KeyboardInterrupt

    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):  # Windows has no SIGHUP
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) not in (signal.SIG_IGN, None):
                before[number] = signal.signal(number, interrupt)
    try:
        yield received
    finally:
        if getattr(signal, "SIGALRM", None) in before:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if for_good else handler)


def _is_importing(frame: FrameType | None) -> bool:
    """Whether a frame is part of an import."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def _run_command(options: argparse.Namespace) -> int:
    _check_destinations(options)
    to_stdout = [flag for flag in REPORTS if getattr(options, flag, None) in STANDARD_OUTPUT]
    if not to_stdout:
        return options.command(options)
    if len(to_stdout) > 1:
        raise ValueError(f"--{' and --'.join(to_stdout)} must not both be standard output")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report"
        setattr(options, to_stdout[0], str(path))
        with redirect_stdout(sys.stderr):  # what is for people goes there
            status = options.command(options)
        with suppress(BrokenPipeError):  # the reader has seen enough
            sys.stdout.flush()
            sys.stdout.buffer.write(path.read_bytes())
            sys.stdout.flush()
    return status


class _Version(argparse.Action):
    """Print the version, which is looked up only when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from importlib import metadata

        print(f"{parser.prog} {metadata.version('mha-parity')}")
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mha-parity",
        description="Prove that attention layers in JAX, PyTorch and TTNN agree, or see where they do not.",
        epilog=f"`mha-parity COMMAND --help` has an example of each command. {EXIT_STATUS}",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    run = commands.add_parser("run", help="run cases on backends and judge every stage")
    run.add_argument("--backends", type=_names, metavar="A,B", help="jax, torch, tt; all that are installed by default")
    run.add_argument("--cases", default="*", metavar="GLOB", help="names such as 'rope*'; see `mha-parity cases`")
    run.add_argument("--random", type=int, default=0, metavar="N", help="also run N cases drawn at random")
    run.add_argument(
        "--dtypes",
        type=_names,
        default=["float32"],
        metavar="A,B",
        help="float32, bfloat16, float16, float64; float32 by default",
    )
    run.add_argument("--grad", action="store_true", help="also compare gradients")
    run.add_argument("--weights", metavar="FILE", help="run a layer of this file instead, in any layout")
    run.add_argument("--from", dest="layout", metavar="LAYOUT", help="of --weights; what its metadata tell by default")
    run.add_argument("--save-traces", metavar="DIR", help="keep every stage as a file, for `compare` and --join")
    run.add_argument("--join", action="append", default=[], metavar="DIR", help="also judge the traces of this folder")
    length = run.add_mutually_exclusive_group()
    length.add_argument("--verbose", action="store_true", help="print every comparison")
    length.add_argument("--quiet", action="store_true", help="print failures and the last line only")
    run.set_defaults(command=_run)

    cases = commands.add_parser("cases", help="the cases there are, and what each one covers")
    cases.add_argument("names", nargs="?", default="*", metavar="GLOB", help="such as 'rope*'; all by default")
    cases.set_defaults(command=_cases)

    compare = commands.add_parser("compare", help="judge saved traces, also from other machines")
    compare.add_argument("traces", nargs="+", metavar="DIR", help="folders of traces, or single files")
    compare.add_argument("--verbose", action="store_true", help="print every comparison")
    compare.set_defaults(command=_compare, quiet=False)

    doctor = commands.add_parser("doctor", help="what is installed, and what would be skipped and why")
    doctor.set_defaults(command=_doctor)

    bugs = commands.add_parser("bugs", help="the mistakes that are known: symptoms, reproduction and fix of each")
    bugs.add_argument("names", nargs="*", metavar="NAME", help="a page or a mistake; without one, the list of them")
    bugs.set_defaults(command=_bugs)

    cache_size = commands.add_parser("cache-size", help="memory of a key/value cache")
    cache_size.add_argument("--batch-size", type=int, default=1, metavar="B", help="sequences; 1 by default")
    cache_size.add_argument("--num-kv-heads", type=int, required=True, metavar="K")
    cache_size.add_argument("--head-dim", type=int, required=True, metavar="H")
    slots = cache_size.add_mutually_exclusive_group(required=True)
    slots.add_argument("--capacity", type=int, metavar="S", help="slots, or tokens, of each sequence")
    slots.add_argument("--seq-len", dest="capacity", type=int, help=argparse.SUPPRESS)  # its former name
    cache_size.add_argument("--batch", dest="batch_size", type=int, help=argparse.SUPPRESS)  # its former name
    cache_size.add_argument("--num-layers", type=int, default=1, metavar="L", help="1 by default")
    cache_size.add_argument(
        "--dtype", default="float16", help="float32, bfloat16, float16, float64; float16 by default"
    )
    cache_size.set_defaults(command=_cache_size)

    convert = commands.add_parser("convert", help="attention weights from one layout to another, whole checkpoints too")
    convert.add_argument("source", metavar="SRC", help="a file, or a folder of shards")
    convert.add_argument("target", metavar="DST", help="a file; its suffix tells the format")
    convert.add_argument("--from", dest="layout", metavar="LAYOUT", help="what the file's metadata tell, by default")
    convert.add_argument("--to", required=True, metavar="LAYOUT", help="see `mha-parity layouts`")
    convert.add_argument(
        "--to-prefix", metavar="P", help="of the layers that are written; without {i}, they are stacked on an axis"
    )
    convert.add_argument("--rest", choices=("keep", "drop"), default="keep", help="all other tensors; kept by default")
    convert.add_argument("--max-shard-gib", type=float, metavar="G", help="divide the target into files of that size")
    convert.add_argument("--force", action="store_true", help="replace DST, if it is of the same format")
    convert.set_defaults(command=_convert)

    layouts = commands.add_parser("layouts", help="the layouts there are, or the tensors of one")
    layouts.add_argument("name", nargs="?", metavar="LAYOUT")
    layouts.set_defaults(command=_layouts)

    inspect = commands.add_parser("inspect", help="what a file holds, and which layouts its attention layers fit")
    inspect.add_argument("file", metavar="FILE")
    inspect.set_defaults(command=_inspect)

    verify = commands.add_parser("verify", help="do two files hold the same attention?")
    verify.add_argument("files", nargs=2, metavar="FILE")
    verify.add_argument(
        "--from", dest="layouts", action="append", default=[], metavar="LAYOUT", help="of both, or each"
    )
    verify.set_defaults(command=_verify)

    plot = commands.add_parser("plot", help="heat maps of attention: which query attends to which key, head by head")
    plot.add_argument("source", metavar="SRC", help="a trace, or a file with the weights of a layer")
    plot.add_argument("target", metavar="DST", help="the picture, .png or .svg")
    given = plot.add_mutually_exclusive_group()
    given.add_argument("--input", metavar="NPY", help="what the layer is applied to, (tokens, width) or (B, …)")
    given.add_argument("--case", metavar="NAME", help="apply the layer to the inputs of this case")
    plot.add_argument("--key-input", metavar="NPY", help="with --input: keys, for cross-attention")
    plot.add_argument("--causal", action="store_true", help="with --input: no token sees a later one")
    labels = plot.add_mutually_exclusive_group()
    labels.add_argument("--tokens", metavar="A,B", help="labels of the keys, and of as many queries")
    labels.add_argument("--tokens-file", metavar="FILE", help="the same, one a line")
    plot.add_argument("--query-tokens", metavar="A,B", help="labels of the queries, where they are others")
    plot.add_argument("--heads", type=_numbers, metavar="I,J", help="all by default")
    plot.add_argument("--sequence", type=int, default=0, metavar="B", help="which of the batch; 0 by default")
    plot.add_argument("--stage", help="of a trace, such as step0.attn_weights; that of the last step by default")
    plot.add_argument(
        "--from", "--layout", dest="layout", metavar="LAYOUT", help="what the file's metadata tell, by default"
    )
    plot.set_defaults(command=_plot)

    conformance = commands.add_parser("conformance", help="an attention's conventions, and the promises it breaks")
    conformance.add_argument(
        "target", nargs="?", metavar="PKG.MODULE:CALLABLE", help="a function, a module, or what makes one"
    )
    conformance.add_argument("--peers", action="store_true", help="those of torch, JAX, Flax, Keras, Equinox; and ours")
    conformance.add_argument("--only", default="*", metavar="GLOB", help="names of peers, such as 'keras*'")
    conformance.add_argument("--questions", type=_names, metavar="A,B", help="rows of the matrix; all by default")
    conformance.add_argument("--dtypes", type=_names, metavar="A,B", help="float32,bfloat16,float16 by default")
    conformance.add_argument("--framework", choices=("torch", "jax"), help="of a function, where its module has both")
    conformance.add_argument("--axes", choices=("BNTH", "BTNH", "BTE"), help="of the inputs, where not to be found out")
    conformance.add_argument("--d-model", type=int, metavar="E", help="width of a layer's inputs")
    conformance.add_argument("--num-heads", type=int, metavar="N", help="of a layer")
    conformance.add_argument("--num-kv-heads", type=int, metavar="K", help="declare that shared heads are taken")
    conformance.add_argument("--mask-name", metavar="NAME", help="the parameter that takes the mask")
    conformance.add_argument("--mask-true", choices=("hides", "shows"), help="declare what True in a mask does")
    conformance.add_argument("--causal-name", metavar="NAME", help="the parameter that is the causal flag")
    conformance.add_argument("--causal", choices=("top-left", "bottom-right"), help="declare how it is aligned")
    conformance.set_defaults(command=_conformance)

    diagnose = commands.add_parser("diagnose", help="why does an implementation differ? which mistake explains it")
    diagnose.add_argument(
        "files", nargs="+", metavar="WHAT", help="a trace; two traces or weight files; or PKG.MODULE:CALLABLE"
    )
    diagnose.add_argument("--weights", metavar="FILE", help="with a function: the weights that it should have")
    diagnose.add_argument("--framework", choices=("torch", "jax"), help="of a function, where it cannot be told")
    diagnose.add_argument("--not-causal", action="store_true", help="with a function: every token sees every other")
    diagnose.add_argument(
        "--from", dest="layouts", action="append", default=[], metavar="LAYOUT", help="of both weight files, or each"
    )
    diagnose.set_defaults(command=_diagnose)

    selftest = commands.add_parser("selftest", help="would the harness notice? plant every mistake that it knows")
    selftest.add_argument("--backends", type=_names, metavar="A,B", help="jax,torch by default")
    selftest.add_argument("--cases", default="*", metavar="GLOB")
    selftest.add_argument("--seed", type=int, default=0, help="of the random weights")
    selftest.set_defaults(command=_selftest)

    bench = commands.add_parser("bench", help="how fast: beside other libraries in one process, and beside the limit")
    bench.add_argument("--what", type=_names, metavar="A,B", help="cores,layers,decode,memory,import,convert,growth")
    bench.add_argument("--frameworks", type=_names, metavar="A,B", help="jax, torch; those that are there by default")
    bench.add_argument("--dtypes", type=_names, metavar="A,B", help="float32 by default, on a GPU bfloat16")
    bench.add_argument("--device", default="cpu", help="of torch, cpu or cuda; JAX uses its default device")
    bench.add_argument("--quick", action="store_true", help="fewer rows and smaller shapes, in less than 90 s")
    bench.add_argument("--plot", metavar="PATH", help="also draw time and memory over sequence length, .png or .svg")
    bench.set_defaults(command=_bench)

    of_both = "the layer, in both files or each"
    of_layers = (
        (run, "the layer of --weights"),
        (convert, "a layer"),
        (diagnose, of_both),
        (verify, of_both),
        (plot, "the layer"),
        (inspect, ""),
    )
    for command, what in of_layers:
        if what:
            many: dict[str, Any] = {"action": "append", "default": []} if command in (verify, diagnose) else {}
            about = f"what the names of {what} begin with; {{i}} stands for a number"
            command.add_argument("--prefix", metavar="P", help=about, **many)
        command.add_argument("--num-heads", type=int, metavar="N", help="where the shapes do not tell")
        command.add_argument("--num-kv-heads", type=int, metavar="K")
        command.add_argument("--head-dim", type=int, metavar="H")
        command.add_argument("--rope-theta", type=float, metavar="THETA", help="base of the RoPE frequencies, if any")

    for name, command in commands.choices.items():
        command.formatter_class = argparse.RawDescriptionHelpFormatter
        command.description, command.epilog = textwrap.fill(PAGES[name].about, 78), PAGES[name].epilog
        command.add_argument("--json", metavar="PATH", help="also write the result as JSON; - is standard output")
    for command in (run, compare):
        command.add_argument("--junit", metavar="PATH", help="also write the result as JUnit XML")
        command.add_argument("--html", metavar="PATH", help="also write the result as one page that needs no network")
    return parser


def _names(text: str) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise argparse.ArgumentTypeError("must name at least one")
    return names


def _numbers(text: str) -> list[int]:
    try:
        return list(map(int, _names(text)))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be numbers, got {text}") from None


def _check_destinations(options: argparse.Namespace) -> None:
    """Refuse places that cannot be written to, or that something is read from, before the work and not after it."""
    given = vars(options)
    for name, values in given.items():
        if name in PATHS and "" in (values if isinstance(values, list) else [values]):
            raise ValueError(f"{_flag(name)} must name a file or a folder, got an empty name")
    if folder := given.get("save_traces"):
        _check_folder("--save-traces", folder)
    written = {name: path for name in (*REPORTS, "plot", "target") if (path := given.get(name)) is not None}
    if options.command is _conformance:
        written.pop("target", None)  # a function
    read = [name for name in PATHS if name not in written]
    for name, path in written.items():
        if name in REPORTS and path in STANDARD_OUTPUT:
            continue
        if name != "target" or options.command is not _convert:  # which knows what it may write
            _check_destination(_flag(name), path)
        others = [*(other for other in written if other != name), *(read if name != "target" else ())]
        for other in others:
            values = given.get(other)
            if any(_is_same(path, value) for value in (values if isinstance(values, list) else [values]) if value):
                raise ValueError(f"{_flag(name)} must name another file than {_flag(other)}, got {path} for both")


PATHS = ("source", "target", "file", "files", "traces", "weights", "input", "key_input", "tokens_file", "join")
PATHS += ("save_traces", "plot", *REPORTS)


def _flag(name: str) -> str:
    positional = {"source": "SRC", "target": "DST", "file": "FILE", "files": "FILE", "traces": "DIR"}
    return positional.get(name, f"--{name.replace('_', '-')}")


def _is_same(path: str, other: str) -> bool:
    """Whether two names are those of one file, which need not be there yet."""
    try:
        return os.path.samefile(path, other) and os.path.isfile(path)
    except OSError:
        return os.path.realpath(path) == os.path.realpath(other)


def _check_destination(flag: str, path: str) -> None:
    from parity.files.target import check_writable

    if os.path.isdir(path) or not os.path.isdir(os.path.dirname(os.path.abspath(path))):
        raise ValueError(f"{flag} must name a file in a folder that is there, got {path}")
    try:
        check_writable(path)
    except OSError as error:
        raise ValueError(f"{flag} must name a file that can be written, got {path}: {error.strerror}") from None


def _check_folder(flag: str, path: str) -> None:
    """Refuse a folder that can neither be written into nor made."""
    from parity.files.target import check_writable

    there = Path(path).absolute()
    while not os.path.lexists(there):
        there = there.parent
    try:
        check_writable(there / f".{os.getpid()}")
    except OSError as error:
        raise ValueError(f"{flag} must name a folder that can be written into, got {path}: {error.strerror}") from None


# ---- Commands --------------------------------------------------------------------------------------------------------


def _run(options: argparse.Namespace) -> int:
    from parity.backends import NEEDS, why_missing
    from parity.conversion.convert import load
    from parity.core.run import run_cases
    from parity.core.spec import DTYPES
    from parity.reporting import console as report

    _check_names("--backends", options.backends, NEEDS)
    _check_names("--dtypes", options.dtypes, DTYPES)
    weights, cases, maps = None, _chosen_cases(options), _attention_maps(options)
    of_weights = {"--from": options.layout, "--prefix": options.prefix}
    of_weights |= {f"--{name.replace('_', '-')}": value for name, value in _heads(options).items()}
    if options.weights is None and (needless := [flag for flag, value in of_weights.items() if value is not None]):
        raise ValueError(f"{', '.join(needless)} must stand with --weights")
    if options.weights is not None:
        if options.cases != "*" or options.random or options.save_traces or options.join:
            raise ValueError("--weights must stand without --cases, --random, --save-traces and --join")
        with _in_flags(options):
            weights, spec = load(options.weights, options.layout, prefix=options.prefix, **_heads(options))
        cases = _weight_cases(Path(options.weights).stem, spec)
    backends = [name for name in options.backends or NEEDS if name in NEEDS and why_missing(name) is None]
    if not (backends or options.backends or options.join):
        raise ModuleNotFoundError(_no_framework())
    runs = sum(1 if case.dtype else len(options.dtypes) for case in cases) * len(backends)
    with report.progress_bar(runs) as on_case:
        results = run_cases(
            cases,
            options.backends,
            options.dtypes,
            with_gradients=options.grad,
            weights=weights,
            traces=options.save_traces,
            join=options.join,
            on_case=on_case,
            on_judged=maps,
        )
    return _finish(options, results, maps)


def _compare(options: argparse.Namespace) -> int:
    from parity.core.run import compare_traces

    maps = _attention_maps(options)
    return _finish(options, compare_traces(options.traces, on_judged=maps), maps)


def _attention_maps(options: argparse.Namespace) -> Any:
    """What keeps the attention maps for a page, if there shall be one, and refuses to where it cannot be made."""
    if options.html is None:
        return lambda trace, reference, comparisons: None
    from parity.reporting.html import AttentionMaps

    return AttentionMaps()


def _finish(options: argparse.Namespace, results: Any, maps: Any) -> int:
    from parity.reporting import console as report

    report.print_report(results, report.console(), verbose=options.verbose, quiet=options.quiet)
    if options.json is not None:
        report.write_json(options.json, results.to_dict())
    if options.junit is not None:
        from parity.reporting.junit import write_junit

        write_junit(options.junit, results)
    if options.html is not None:
        from parity.reporting.html import write_html

        write_html(options.html, results, maps)
    return results.status


def _check_names(flag: str, names: Sequence[str] | None, known: Collection[str]) -> None:
    for name in names or ():
        if name not in known:
            raise ValueError(f"{flag} must be of {', '.join(known)}, got {name}")


def _no_framework() -> str:
    from parity.backends import NEEDS, why_missing

    reasons = "; ".join(str(why_missing(name)) for name in NEEDS)
    return f"at least one backend must be installed: {reasons}. One is enough: pip install torch, or jax and flax"


def _chosen_cases(options: argparse.Namespace) -> list[Case]:
    from parity.core.spec import random_case

    if options.random < 0:
        raise ValueError(f"--random must be at least 0, got {options.random}")
    if options.random > MOST_RANDOM:
        raise ValueError(f"--random must be at most {MOST_RANDOM}, got {options.random}")
    drawn = {case.name: case for case in map(random_case, range(options.random))}
    return list(({case.name: case for case in _cases_named("--cases", options.cases, bool(drawn))} | drawn).values())


def _cases_named(flag: str, pattern: str, may_be_none: bool = False) -> list[Case]:
    """The cases whose names fit a pattern, `random-N` too where it is the name itself."""
    from parity.core.spec import CASES, find_case

    cases = [case for name, case in CASES.items() if fnmatch.fnmatchcase(name, pattern)]
    if not cases and (case := find_case(pattern)):
        cases = [case]
    if not (cases or may_be_none):
        raise ValueError(f"{flag} must match a case, got {pattern!r}{_near(pattern, CASES)}; see `mha-parity cases`")
    return cases


def _near(name: str, known: Collection[str]) -> str:
    """The names that are nearest to one that is not known, as the end of a message."""
    near = difflib.get_close_matches(name, known, n=5, cutoff=0.5)
    return f"; near it: {', '.join(near)}" if near else ""


def _cases(options: argparse.Namespace) -> int:
    from dataclasses import asdict

    from parity.reporting import console as report

    cases = _cases_named("GLOB", options.names)
    report.print_cases(cases, report.console())
    if options.json is not None:
        listed = [{"covers": report.covers(case), **asdict(case)} for case in cases]
        report.write_json(options.json, {"format": 1, "cases": listed})
    return 0


def _bugs(options: argparse.Namespace) -> int:
    from parity.reporting import console as report

    pages = {name: report.bug_page(name) for name in options.names or ["README"]}
    report.print_pages(pages.values(), report.console())
    if options.json is not None:
        report.write_json(options.json, {"format": 1, "pages": pages})
    return 0


def _weight_cases(name: str, spec: Any) -> list[Case]:
    """What a layer of unknown purpose is tried on: all keys seen, causal and cached; or, if it must be, across."""
    from parity.core.spec import Case

    if spec.d_kv != spec.d_in:
        return [Case(f"weights-{name}-cross", spec, "queries over keys of another width", seq_len=6, seq_len_k=9)]
    return [
        Case(f"weights-{name}-full", spec, "every token sees every token", seq_len=9),
        Case(f"weights-{name}-causal", spec, "no token sees a later one", seq_len=9, is_causal=True),
        Case(f"weights-{name}-decode", spec, "a prompt, then token by token", seq_len=7, chunks=(5, 1, 1), capacity=8),
    ]


def _doctor(options: argparse.Namespace) -> int:
    from parity.backends import NEEDS, why_missing
    from parity.core.numerics import environment
    from parity.core.packages import OPTIONAL, is_installed, version_of
    from parity.reporting import console as report

    missing = {name: reason for name in NEEDS if (reason := why_missing(name))}
    for name in NEEDS.keys() - missing.keys():
        try:
            environment([name])
        except Exception as error:  # a doctor that dies of the illness is of no use
            missing[name] = f"{name} does not start: {type(error).__name__}: {error}"
    found = environment(name for name in NEEDS if name not in missing)
    out = report.console()
    table = report.begin_table(out, "Environment", show_header=False)
    table.add_row("python", found["python"])
    table.add_row("platform", found["platform"])
    table.add_row("cpus", str(found["cpus"]))
    for package, version in found["packages"].items():
        table.add_row(package, version)
    out.print(table)
    backends = report.begin_table(out, "Backends")
    for column in ("backend", "runs here", "device", "numerics while a case runs"):
        backends.add_column(column, overflow="fold")
    for name in NEEDS:
        if name in missing:
            backends.add_row(name, "[yellow]no[/]", "", f"skipped: {missing[name]}")
            continue
        facts = found["backends"][name]
        device, devices = facts["device"], facts.get("cuda_devices") or facts.get("devices") or []
        others = ", ".join(name for name in devices if name != device)
        numerics = ", ".join(f"{key}={value}" for key, value in facts["numerics"].items())
        backends.add_row(name, "[green]yes[/]", f"{device} ({others})" if others else device, numerics)
    out.print(backends)
    optional = {name: version_of(name) if is_installed(name) else None for name in OPTIONAL}
    packages = report.begin_table(out, "Optional packages")
    packages.add_column("package", no_wrap=True)
    packages.add_column("version", no_wrap=True)
    packages.add_column("needed for", overflow="fold")
    for name, (_, purpose) in OPTIONAL.items():
        version = optional[name]
        packages.add_row(
            name,
            "[yellow]missing[/]" if version is None else version,
            purpose if version is not None else f"skipped or refused: {purpose}; pip install {name}",
        )
    out.print(packages)
    if options.json is not None:
        report.write_json(options.json, {"format": 1, "environment": found, "missing": missing, "optional": optional})
    return 0


def _cache_size(options: argparse.Namespace) -> int:
    from parity.core.spec import DTYPES, AttentionSpec
    from parity.core.weights import dtype_named
    from parity.reporting import console as report

    if options.dtype not in DTYPES:
        raise ValueError(f"--dtype must be one of {', '.join(DTYPES)}, got {options.dtype}")
    for name in ("batch_size", "num_kv_heads", "head_dim", "capacity", "num_layers"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(options, name)}")
        if getattr(options, name) > MOST_SIZE:
            raise ValueError(f"--{name.replace('_', '-')} must be at most {MOST_SIZE}, got {getattr(options, name)}")
    spec = AttentionSpec(options.num_kv_heads * options.head_dim, options.num_kv_heads)
    nbytes = spec.cache_nbytes(
        options.batch_size, options.capacity, dtype_named(options.dtype), num_layers=options.num_layers
    )
    out = report.console()
    out.print(
        f"2 x {options.batch_size} sequences x {options.num_kv_heads} heads x {options.capacity} slots x "
        f"{options.head_dim} features x {options.num_layers} layers in {options.dtype}: "
        f"{nbytes} bytes = {nbytes / 2**30:.3g} GiB",
        soft_wrap=True,
    )
    if options.json is not None:
        report.write_json(options.json, {"format": 1, "nbytes": nbytes})
    return 0


@contextmanager
def _in_flags(options: argparse.Namespace) -> Iterator[None]:
    """What is refused is told in the words of the command line: `--to-prefix a` and not `to_prefix='a'`."""
    flags = {"source": "--from", "layout": "--from", "target": "--to", "prefix": "--prefix", "to_prefix": "--to-prefix"}
    heads = {name: f"--{name.replace('_', '-')}" for name, value in _heads(options).items() if value is not None}
    try:
        yield
    except (ValueError, TypeError) as error:
        text = str(error).replace("as many {i} as prefix", "as many {i} as --prefix")
        for name, flag in (flags | heads).items():
            of_layer = "be (?:at least|an integer|positive)" if name in heads else ""  # layouts have rules for layers
            text = re.sub(rf"(^|: |\(){name}(?= must {of_layer})", rf"\1{flag}", text)
            text = re.sub(rf"(?<![\w-]){name}=", f"{flag} ", text)
        raise (TypeError if isinstance(error, TypeError) else ValueError)(text) from None


def _heads(options: argparse.Namespace) -> dict[str, Any]:
    if options.rope_theta is not None and not math.isfinite(options.rope_theta):
        raise ValueError(f"--rope-theta must be finite, got {options.rope_theta}")
    return {name: getattr(options, name) for name in ("num_heads", "num_kv_heads", "head_dim", "rope_theta")}


def _convert(options: argparse.Namespace) -> int:
    from parity.conversion.convert import convert_file, count_tensors
    from parity.reporting import console as report

    gib = options.max_shard_gib
    if gib is not None and not 0 < gib <= MOST_GIB:
        raise ValueError(f"--max-shard-gib must be a number > 0 and <= {MOST_GIB}, got {gib}")
    with report.progress_bar(count_tensors(options.source)) as on_tensor, _in_flags(options):
        converted = convert_file(
            options.source,
            options.target,
            source=options.layout,
            target=options.to,
            prefix=options.prefix,
            to_prefix=options.to_prefix,
            keep_rest=options.rest == "keep",
            max_shard_bytes=None if gib is None else max(1, int(gib * 2**30)),
            force=options.force,
            on_tensor=on_tensor,
            **_heads(options),
        )
    out = report.console()
    layers, spec = converted.layers, converted.spec
    heads = f", {spec.num_heads} x {spec.head_dim}, key/value {spec.num_kv_heads}" if spec else ""
    if converted.heads_from:
        theta = f", --rope-theta {spec.rope_theta:g}" if spec and spec.rope_theta is not None else ""
        heads += f" (from {converted.heads_from}{theta})"
    out.print(
        f"{len(layers)} attention layer{'s' if len(layers) != 1 else ''}{heads}: {converted.source} -> {options.to}; "
        f"other tensors: {len(converted.kept)} kept, {len(converted.dropped)} dropped; wrote {options.target}",
        soft_wrap=True,
    )
    for what, names in (
        ("left out, for they are not tensors", converted.left_out),
        (f"kept in {converted.source}, for --prefix does not name them", converted.unconverted),
        ("kept in the old layout, which an optimizer will take for the new one", converted.optimizer_state),
    ):
        if names:
            some = f"{', '.join(names[:6])}{', …' if len(names) > 6 else ''}"
            print(f"mha-parity: warning: {what}: {some} ({len(names)})", file=sys.stderr)
    if options.json is not None:
        report.write_json(options.json, {"format": 1, **converted.to_dict()})
    return 0


def _layouts(options: argparse.Namespace) -> int:
    from parity.conversion.layouts import LAYOUTS, find_layout
    from parity.reporting import console as report

    out = report.console()
    if options.name is None:
        table = report.begin_table(out, "Layouts")
        for column in ("layout", "what it is", "RoPE pairs"):
            table.add_column(column, overflow="fold")
        for layout in LAYOUTS.values():
            table.add_row(layout.name, layout.about, layout.rope)
        out.print(table)
        shown = list(LAYOUTS.values())
    else:
        shown = [find_layout(options.name)]
        report.print_layout(shown[0], out)
    if options.json is not None:
        report.write_json(options.json, {"format": 1, "layouts": [layout.to_dict() for layout in shown]})
    return 0


def _inspect(options: argparse.Namespace) -> int:
    from dataclasses import asdict

    from parity.conversion.convert import find_layers
    from parity.files import open_tensors
    from parity.reporting import console as report

    with open_tensors(options.file) as file:
        found = find_layers(file, **_heads(options))
        infos = {name: {"shape": list(info.shape), "dtype": info.dtype.name} for name, info in file.infos.items()}
        report.print_inspection(options.file, file, found, report.console())
        told = {"file_format": file.format, "metadata": dict(file.metadata), "tensors": infos}
    if options.json is not None:
        report.write_json(options.json, {"format": 1, **told, "layers": [asdict(layer) for layer in found]})
    return 0


def _verify(options: argparse.Namespace) -> int:
    from dataclasses import replace

    from parity.conversion.verify import same_bits, verify
    from parity.diagnosis.diagnose import diagnose_weights
    from parity.reporting import console as report

    verdicts, wrong, diagnosis = [], False, None
    with _pairs_of_layers(options) as pairs:
        for one, other in pairs:
            layers = (*one.load(), *other.load())
            comparisons = verify(*layers)
            if len(pairs) > 1:
                comparisons = [replace(each, case=one.label) for each in comparisons]
            verdicts.append((one.label, other.label, comparisons, same_bits(layers[0], layers[2])))
            differs = not all(each.passed for each in comparisons)
            if diagnosis is None or (differs and not wrong):
                diagnosis = diagnose_weights(*layers)
            wrong |= differs
    report.print_verdicts(verdicts, cast(Any, diagnosis), options.files, report.console())
    if options.json is not None:
        results = [each.to_dict() for _, _, comparisons, _ in verdicts for each in comparisons]
        layers = [
            {"layers": [one, other], "same": all(each.passed for each in comparisons), "same_bits": same}
            for one, other, comparisons, same in verdicts
        ]
        told = {"results": results, "layers": layers, "diagnosis": cast(Any, diagnosis).to_dict()}
        report.write_json(options.json, {"format": 1, **told})
    return 1 if wrong else 0


@contextmanager
def _pairs_of_layers(options: argparse.Namespace) -> Iterator[list[tuple[Any, Any]]]:
    """The layers of two open files that belong together; what is given once is said of both."""
    from parity.conversion.convert import open_layers

    def each(flag: str, values: list[str]) -> list[str | None]:
        if len(values) > 2:
            raise ValueError(f"{flag} must be given once or twice, got {values}")
        return [values[0], values[-1]] if values else [None, None]

    layouts, prefixes = each("--from", options.layouts), each("--prefix", options.prefix)
    with ExitStack() as stack:
        with _in_flags(options):
            one, other = (
                stack.enter_context(open_layers(path, layout, prefix=prefix, **_heads(options)))
                for path, layout, prefix in zip(options.files, layouts, prefixes, strict=True)
            )
        places = [[layer.place for layer in layers] for layers in (one, other)]
        if places[0] != places[1] and not len(one) == len(other) == 1:
            counts = " and ".join(f"{len(layers)} ({layers[0].label}, …)" for layers in (one, other))
            raise ValueError(f"both files must have layers of the same numbers to be compared, got {counts}")
        yield list(zip(one, other, strict=True))


def _two_layers(options: argparse.Namespace) -> list[Any]:
    """The weights and specifications of one layer in each of two files."""
    with _pairs_of_layers(options) as pairs:
        if len(pairs) > 1:
            raise ValueError(f"--prefix must be that of one layer, got one of {len(pairs)}: {pairs[0][0].label}, …")
        ((one, other),) = pairs
        return [one.load(), other.load()]


def _diagnose(options: argparse.Namespace) -> int:
    from parity.diagnosis.diagnose import diagnose, diagnose_weights
    from parity.reporting import console as report

    out = report.console()
    of_function = {"--weights": options.weights, "--framework": options.framework, "--not-causal": options.not_causal}
    is_function = len(options.files) == 1 and ":" in options.files[0] and not Path(options.files[0]).exists()
    if not is_function and (given := [flag for flag, value in of_function.items() if value]):
        raise ValueError(f"{', '.join(given)} must stand with PKG.MODULE:CALLABLE, got {' '.join(options.files)}")
    if is_function:
        diagnosis = diagnose(*_observed(options))
    elif len(options.files) <= 2 and _are_traces(options.files):
        diagnosis = _diagnose_traces(options.files, out)
    elif len(options.files) == 2:
        (weights, spec), (other, other_spec) = _two_layers(options)
        diagnosis = diagnose_weights(weights, spec, other, other_spec)
    else:
        raise ValueError(
            f"diagnose must be given a trace, two traces, two weight files or a function, got {options.files}"
        )
    report.print_diagnosis(diagnosis, out)
    if options.json is not None:
        report.write_json(options.json, {"format": 1, **diagnosis.to_dict()})
    return 0 if diagnosis.kind == "none" else 1


def _is_trace(path: str) -> bool:
    from parity.files import open_tensors

    with open_tensors(path) as file:
        return file.metadata.get("kind") == "trace"


def _are_traces(files: Sequence[str]) -> bool:
    kinds = list(map(_is_trace, files))
    if any(kinds) and not all(kinds):
        raise ValueError(f"both files must be traces, or none, got {' '.join(files)}")
    return all(kinds)


def _diagnose_traces(files: Sequence[str], out: Any) -> Any:
    """The diagnosis of one trace, or of the one of two that goes wrong first."""
    from dataclasses import replace

    import numpy as np

    from parity.core.compare import first_difference
    from parity.core.run import Reference, judge, load_trace
    from parity.diagnosis.diagnose import diagnose_trace
    from parity.reporting import console as report

    traces = [load_trace(path) for path in files]
    if len({trace.problem.digest for trace in traces}) > 1:
        raise ValueError(f"traces must be of one problem, got {' '.join(files)}")
    expected = Reference(traces[0].problem, any(trace.with_gradients for trace in traces))
    sides = [judge(trace, expected) for trace in traces]
    wrong = [first_difference(side) for side in sides]
    if len(traces) == 1:
        if wrong[0] is not None:
            out.print(str(wrong[0]), markup=False, style="red")
    else:
        one, other = (trace.accumulated for trace in traces)
        with np.errstate(invalid="ignore"):
            distances = {
                name: float(np.abs(one[name].astype(np.float64) - other[name].astype(np.float64)).max(initial=0.0))
                if name in one and name in other and one[name].shape == other[name].shape
                else float("inf")
                for name in (comparison.stage for side in sides for comparison in side)
            }
        report.print_divergence(sides, distances, out)
    order = {comparison.stage: place for side in sides for place, comparison in enumerate(side)}
    places = [len(order) if each is None else order[each.stage] for each in wrong]
    worst = int(np.argmin(places))
    diagnosis, difference = diagnose_trace(traces[worst]), wrong[worst]
    if diagnosis.kind != "none" or difference is None:
        return diagnosis
    # A gradient, a dtype, a stage that lacks: nothing that a mistake in the formulas would explain.
    told = {"stage": difference.stage, "unexplained": difference.stage}
    return replace(diagnosis, kind="unknown", error=difference.error, ratio=difference.worse_ratio, **told)


def _observed(options: argparse.Namespace) -> tuple[Any, Any]:
    """What a function gives for probe inputs, and those, with the weights that it should have."""
    from parity.backends import why_missing
    from parity.conformance.discover import framework_of, load_callable
    from parity.conformance.subjects import FRAMEWORKS
    from parity.conversion.convert import load
    from parity.conversion.verify import probe_case
    from parity.core.problem import make_problem
    from parity.diagnosis.diagnose import observe

    if options.weights is None:
        raise ValueError(f"--weights must tell the weights that {options.files[0]} should have")
    function = load_callable(options.files[0])
    framework = options.framework or framework_of(function)
    if framework is None:
        raise ValueError(f"--framework must tell whose arrays {options.files[0]} takes, one of {list(FRAMEWORKS)}")
    if reason := why_missing(framework):
        raise ModuleNotFoundError(reason)
    layouts, prefixes = options.layouts or [None], options.prefix or [None]
    with _in_flags(options):
        weights, spec = load(options.weights, layouts[0], prefix=prefixes[0], **_heads(options))
    case = probe_case("diagnose", spec, is_causal=False if options.not_causal else None)
    problem = make_problem(case, "float32", weights)
    return observe(function, problem, framework), problem


def _selftest(options: argparse.Namespace) -> int:
    from parity.backends import why_missing
    from parity.diagnosis.selftest import BACKENDS, SELFTEST_CASES, mistakes_in, selftest
    from parity.reporting import console as report

    backends = options.backends or [name for name in BACKENDS if not why_missing(name)]
    _check_names("--backends", backends, BACKENDS)
    for name in backends:
        if reason := why_missing(name):
            raise ModuleNotFoundError(reason)
    if not backends:
        raise ModuleNotFoundError(_no_framework())
    cases = [case for case in SELFTEST_CASES if fnmatch.fnmatch(case.name, options.cases)]
    if not cases:
        known = ", ".join(case.name for case in SELFTEST_CASES)
        raise ValueError(f"--cases must match one of {known}, got {options.cases}")
    total = len(backends) * sum(1 + len(mistakes_in(case)) for case in cases)
    with report.progress_bar(total) as on_mistake:
        outcomes = list(selftest(backends, cases, seeds=[options.seed], on_mistake=on_mistake))
    report.print_selftest(outcomes, report.console())
    if options.json is not None:
        report.write_json(options.json, {"format": 1, "outcomes": [outcome.to_dict() for outcome in outcomes]})
    return 0 if all(outcome.is_caught for outcome in outcomes) else 1


def _bench(options: argparse.Namespace) -> int:
    from parity.bench import DEVICES, DTYPES, FRAMEWORKS, GROUPS, bench, count_rows
    from parity.reporting import console as report

    _check_names("--what", options.what, GROUPS)
    _check_names("--frameworks", options.frameworks, FRAMEWORKS)
    _check_names("--dtypes", options.dtypes, DTYPES)
    _check_names("--device", [options.device], DEVICES)
    groups = options.what or GROUPS
    if options.plot is not None:
        from parity.reporting.plot import check_destination

        check_destination(options.plot, "--plot")
        if "growth" not in groups:
            raise ValueError(f"--plot must stand with growth among --what, got --what {','.join(groups)}")
    asked = {"dtypes": options.dtypes, "device": options.device, "quick": options.quick}
    with report.progress_bar(count_rows(groups, options.frameworks, **asked)) as on_row:
        found = bench(groups, options.frameworks, **asked, on_row=on_row)
    from parity.bench.show import plot_growth, print_bench

    print_bench(found, report.console())
    if options.plot is not None:
        plot_growth(found, options.plot)
    if options.json is not None:
        report.write_json(options.json, found.to_dict())
    return 0


def _plot(options: argparse.Namespace) -> int:
    from parity.reporting import console as report
    from parity.reporting.plot import check_destination, plot_attention

    check_destination(options.target, "DST")
    if options.tokens_file is not None:
        tokens = Path(options.tokens_file).read_text("utf-8").splitlines()
    else:
        tokens = None if options.tokens is None else options.tokens.split(",")
    stage, attn_weights = _attention(options)
    heads = plot_attention(
        attn_weights,
        path=options.target,
        tokens=tokens,
        query_tokens=None if options.query_tokens is None else options.query_tokens.split(","),
        heads=options.heads,
        sequence=options.sequence,
        title=f"{Path(options.source).name}\n{stage}, sequence {options.sequence}",
    )
    drawn = f"head{'s' if len(heads) != 1 else ''} {', '.join(map(str, heads))}"
    told = f"{stage}, sequence {options.sequence}, {drawn}; wrote {options.target}"
    report.console().print(told, markup=False, soft_wrap=True)
    if options.json is not None:
        content = {"stage": stage, "sequence": options.sequence, "heads": heads, "shape": list(attn_weights.shape)}
        report.write_json(options.json, {"format": 1, **content, "target": options.target})
    return 0


def _attention(options: argparse.Namespace) -> tuple[str, Any]:
    """The stage and the attention weights that `plot` was asked for: a trace's, or a layer's for an input."""
    from parity.conversion.convert import load
    from parity.core.run import load_trace
    from parity.core.spec import CASES, find_case
    from parity.reporting.plot import attention_for, attention_in, attention_in_case, read_array

    case = None if options.case is None else find_case(options.case)
    if options.case is not None and case is None:
        near = _near(options.case, CASES)
        raise ValueError(f"--case must name a case, got {options.case!r}{near}; see `mha-parity cases`")
    of_input = {"--causal": options.causal, "--key-input": options.key_input}
    of_layer = {"--input": options.input, "--case": options.case, **of_input, "--from": options.layout}
    of_layer |= {"--prefix": options.prefix}
    if _is_trace(options.source):
        if needless := [flag for flag, value in of_layer.items() if value]:
            raise ValueError(f"{', '.join(needless)} must be left out for a trace, got {options.source}")
        return attention_in(load_trace(options.source), options.stage)
    if options.stage is not None:
        raise ValueError(f"--stage must be left out for a file of weights, got {options.stage}")
    if options.input is None and (needless := [flag for flag, value in of_input.items() if value]):
        raise ValueError(f"{', '.join(needless)} must stand with --input")
    if options.input is None and case is None:
        raise ValueError("--input or --case must say what the layer is applied to")
    with _in_flags(options):
        weights, spec = load(options.source, options.layout, prefix=options.prefix, **_heads(options))
    if case is not None:
        return attention_in_case(weights, spec, case)
    query = read_array(str(options.input))
    key = None if options.key_input is None else read_array(options.key_input)
    return "attn_weights", attention_for(weights, spec, query, key, is_causal=options.causal)


def _conformance(options: argparse.Namespace) -> int:
    from parity.conformance.answers import exit_status
    from parity.conformance.examine import examine_peers, examine_target
    from parity.conformance.peers import PEERS
    from parity.conformance.subjects import DTYPES
    from parity.core.packages import installed
    from parity.reporting import console as report
    from parity.reporting.conformance import print_conformance

    if options.peers == (options.target is not None):
        raise ValueError("either a subject must be given as pkg.module:callable, or --peers")
    claims = ("framework", "axes", "d_model", "num_heads", "num_kv_heads", "mask_name", "mask_true", "causal_name")
    declared = {name: value for name in (*claims, "causal") if (value := getattr(options, name)) is not None}
    flags = {f"--{name.replace('_', '-')}": value for name, value in declared.items()}
    _check_names("--dtypes", options.dtypes, DTYPES)
    dtypes = options.dtypes or DTYPES
    if options.peers:
        if flags:
            raise ValueError(f"--peers must stand without {', '.join(flags)}")
        names = fnmatch.filter(PEERS, options.only)
        if not names:
            raise ValueError(f"--only must match a peer, got {options.only!r}; there are {', '.join(PEERS)}")
        with report.progress_bar(len(names)) as on_subject:
            found = examine_peers(names, options.questions, dtypes, on_subject=on_subject)
    else:
        if options.only != "*":
            raise ValueError(f"--only must stand with --peers, got --only {options.only}")
        found = [examine_target(options.target, options.questions, dtypes, **declared)]

    def again(subject: str, question: str) -> str:
        given = f"--peers --only {subject}" if options.peers else options.target
        return " ".join(["mha-parity conformance", given, *(f"{flag} {value}" for flag, value in flags.items())]) + (
            f" --questions '{question}'"
        )

    print_conformance(found, report.console(), again)
    if options.json is not None:
        subjects = [subject.to_dict() for subject in found]
        report.write_json(options.json, {"format": 1, "packages": installed(), "subjects": subjects})
    return exit_status(found)

"""Traces as files: one safetensors file each, from any machine."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from mha_spec import InputError
from parity.measure.backends import BACKENDS
from parity.measure.core import reference
from parity.measure.core.case import DTYPES
from parity.measure.core.cases import find_case
from parity.measure.core.problem import make_problem
from parity.measure.core.stages import TUTORIAL, stage_named
from parity.measure.core.trace import Trace
from parity.measure.core.weights import FORMAT, load_tensors, save_tensors
from parity.measure.text import printable

REQUIRED = {"format", "kind", "case", "dtype", "backend", "digest", "environment"}
"""Metadata that each trace has; the others have been added since."""


def save_trace(folder: str | os.PathLike[str], trace: Trace) -> Path:
    """Write a trace to `<folder>/<case>-<dtype>-<backend>.safetensors`, whole or not at all.

    Raises:
        OSError: if it cannot be written.
    """
    case, dtype = trace.problem.case, trace.problem.dtype
    path = Path(folder) / f"{case.name}-{dtype}-{trace.backend}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for part, stages in (("accumulated", trace.accumulated), ("local", trace.local)):
        for name, value in stages.items():
            tensors[f"{part}/{name}"] = value
    metadata = {
        "format": FORMAT,
        "kind": "trace",
        "case": case.name,
        "spec": case.spec.to_json(),
        "dtype": dtype,
        "backend": trace.backend,
        "digest": trace.problem.digest,
        "environment": json.dumps(trace.environment, sort_keys=True),
        "skipped": trace.skipped,
        "error": trace.error,
    }
    save_tensors(path, tensors, metadata)
    return path


def load_trace(path: str | os.PathLike[str]) -> Trace:
    """Read a trace, and regenerate its problem.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if it is not a trace of a known case, or has other weights or inputs than the
            case has here.
    """
    tensors, metadata = load_tensors(path)
    if metadata.get("kind") != "trace":
        hint = "`mha-parity compare` of two files compares weights"
        rule = "be a trace, as `run --save-traces` writes it"
        raise InputError(path, rule, "a different file of tensors", hint=hint)
    if metadata.get("format") != FORMAT or not metadata.keys() >= REQUIRED:
        raise InputError(path, f"be a trace in format {FORMAT}", f"metadata {sorted(metadata)}")
    case = find_case(metadata["case"])
    if case is None or metadata["dtype"] not in DTYPES or metadata["backend"] not in BACKENDS:
        got = {name: metadata[name] for name in ("case", "dtype", "backend")}
        raise InputError(path, "be of a known case, dtype and backend", str(got))
    problem = make_problem(case, metadata["dtype"])
    if problem.digest != metadata["digest"]:
        rule = f"have the weights and inputs of case {problem.case.name}; its digest differs"
        raise InputError(path, rule)
    parts: dict[str, dict[str, np.ndarray]] = {"accumulated": {}, "local": {}}
    for name, value in tensors.items():
        part, _, stage = name.partition("/")
        if part not in parts:
            raise InputError(path, "hold accumulated and local stages", name)
        parts[part][stage] = value
    try:
        trace = Trace(
            problem,
            metadata["backend"],
            parts["accumulated"],
            parts["local"],
            BACKENDS[metadata["backend"]].paths,
            json.loads(metadata["environment"]),
            with_gradients=any(stage_named(stage).is_gradient for stage in parts["accumulated"]),
            skipped=printable(metadata.get("skipped", "")),
            error=printable(metadata.get("error", "")),
            path=str(path),
            folder=str(Path(path).parent),
        )
        arithmetic = trace.arithmetic
        if case.is_plain:
            trace = replace(trace, paths=(*trace.paths, TUTORIAL))
    except (ValueError, RecursionError, AttributeError):
        raise InputError(
            path, "have its environment as JSON", repr(metadata["environment"][:80])
        ) from None
    arithmetics = ["ieee"]
    if BACKENDS[trace.backend].has_own_arithmetic:
        arithmetics = list(reference.ARITHMETICS)
    if arithmetic not in arithmetics:
        rule = f"have an arithmetic of {trace.backend}, one of {arithmetics}"
        raise InputError(path, rule, arithmetic=arithmetic)
    return trace


def load_traces(folders: Iterable[str | os.PathLike[str]], here: Sequence[str] = ()) -> list[Trace]:
    """Return all traces of folders. A backend that runs here, or is in an earlier folder, is named
    with its folder.
    """
    traces = []
    first_folders: dict[tuple[str, str, str], str] = {}
    files = list(_trace_files(folders))
    check_different(files)
    for path in files:
        trace = load_trace(path)
        key = (trace.problem.case.name, trace.problem.dtype, trace.backend)
        first_folder = first_folders.setdefault(key, trace.folder)
        if trace.backend in here or trace.folder != first_folder:
            trace = replace(trace, is_named_by_folder=True)
        traces.append(trace)
    return traces


def check_different(files: Iterable[str | os.PathLike[str]]) -> None:
    """Reject a trace that is passed twice: it would count twice, and agree with itself.

    Raises:
        ValueError: if two paths are of one file.
    """
    known: set[str] = set()
    for path in files:
        real_path = os.path.realpath(path)
        if real_path in known:
            raise InputError("traces", "be different files", f"{os.fspath(path)} twice")
        known.add(real_path)


def _trace_files(folders: Iterable[str | os.PathLike[str]]) -> Iterator[Path]:
    for folder in folders:
        if not os.fspath(folder):
            # It would be the current folder, for an unset variable of a shell.
            raise InputError("a folder of traces", "have a name", repr(folder))
        if not os.path.exists(folder):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(folder))
        path = Path(folder)
        if path.is_file():
            yield path
            continue
        files = sorted(path.rglob("*.safetensors"))
        if not files:
            rule = "be a trace or a folder of traces"
            raise InputError(folder, rule, "no *.safetensors in it or its subfolders")
        yield from files

"""Stages of the ranks of a divided layer, from files on a command line: which ranks are wrong, and
why.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from parity.use.cli.help import Result
from parity.use.cli.layers import ASSUMED_CAUSAL, layer_options
from parity.use.cli.messages import refusal
from parity.use.cli.options import flag_of

if TYPE_CHECKING:
    import numpy as np

    from parity.measure.core.problem import Problem

    Stages = dict[str, np.ndarray]

INPUTS = ("query", "key", "cotangent")
"""Arrays of a file in addition to stages, if the layer is that of --weights."""


def diagnose(options: argparse.Namespace) -> Result:
    """Print which ranks are wrong, and which bug of dividing explains all of them."""
    from parity.explain.diagnosis.ranks import diagnose_ranks
    from parity.measure.core.weights import load_tensors
    from parity.use.reporting.console import console
    from parity.use.reporting.diagnosis import print_diagnosis

    divided = _divided(options.mesh)
    size, paths = max(divided.values()), options.files
    if len(paths) != size:
        got = f"{len(paths)}: {' '.join(paths)}"
        raise refusal(
            f"--mesh {options.mesh}", f"be passed with one file per rank, {size} in order", got
        )
    if twice := next((path for path in paths if paths.count(path) > 1), ""):
        raise refusal("each rank", "have a file of its own", f"{twice} twice")
    _check_order(paths)
    files = {path: load_tensors(path)[0] for path in paths}
    problem = (
        _problem_of_case(options, files)
        if options.weights is None
        else _problem_of_layer(options, files)
    )
    observed = [
        {name: x for name, x in held.items() if name not in INPUTS} for held in files.values()
    ]
    diagnosis = diagnose_ranks(observed, problem, **divided)
    print_diagnosis(diagnosis, console(), is_right=not diagnosis.is_wrong, verbose=options.verbose)
    return 1 if diagnosis.is_wrong else 0, diagnosis.to_dict()


def _check_order(paths: Sequence[str]) -> None:
    """Reject files that are numbered in another order: a shell sorts rank10 before rank2."""
    if len({re.sub(r"\d+", "#", path) for path in paths}) > 1:
        return
    for before, path in pairwise(paths):
        if _numbers(before) > _numbers(path):
            raise refusal("files", "be in the order of ranks", f"{before} before {path}")


def _numbers(path: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", path)]


def _divided(text: str) -> dict[str, int]:
    """Return the dimension that ranks divide and their number, an argument of `diagnose_ranks`."""
    name, _, size = text.partition("=")
    names = {"tensor": "tensor", "sequence": "tokens"}
    if name not in names or not size.isdecimal() or int(size) < 2:
        rule = "be tensor=N (ranks divide the heads) or sequence=N (ranks divide the tokens)"
        raise refusal("--mesh", rule, {"--mesh": text})
    return {names[name]: int(size)}


def _problem_of_case(options: argparse.Namespace, files: Mapping[str, Stages]) -> Problem:
    """Return the problem of a known case."""
    from parity.measure.core.cases import case_named
    from parity.measure.core.problem import make_problem

    if options.case is None:
        raise refusal("--weights or --case", "be the layer that the ranks divide", "--mesh alone")
    given = {
        "from": options.layouts,
        "prefix": options.prefix,
        "causal": options.causal is not None,
    }
    if needless := [
        flag_of(name) for name, value in (given | layer_options(options)).items() if value
    ]:
        raise refusal(", ".join(needless), "be passed with --weights")
    case = case_named(options.case)
    _check_names(options, files, ())
    return make_problem(case, _dtype_of(files))


def _problem_of_layer(options: argparse.Namespace, files: Mapping[str, Stages]) -> Problem:
    """Return the problem of the layer of a file and the input of all ranks."""
    import numpy as np

    from parity.measure.core.case import DTYPES, Case
    from parity.measure.core.problem import Problem
    from parity.measure.core.weights import dtype_named
    from parity.port.conversion.convert import load
    from parity.use.reporting.console import console

    if options.case is not None:
        raise refusal("--case", "not be combined with --weights, which has a layer of its own")
    layout, prefix = (options.layouts or [None])[0], (options.prefix or [None])[0]
    weights, spec = load(options.weights, layout, prefix=prefix, **layer_options(options))
    _check_names(options, files, INPUTS)
    inputs = {}
    for name in INPUTS:
        parts = [held[name] for held in files.values() if name in held]
        if not parts and name != "query":
            continue
        if len(parts) < len(files):
            lacking = next(path for path, held in files.items() if name not in held)
            raise refusal(
                name, "be in the file of each rank, next to the stages", f"none in {lacking}"
            )
        if any(part.ndim != 3 for part in parts):
            shapes = [part.shape for part in parts]
            raise refusal(name, "be (batch, tokens, features)", f"{name} of the shapes {shapes}")
        if options.mesh.startswith("sequence"):
            inputs[name] = np.concatenate(parts, 1)
        elif all(np.array_equal(part, parts[0], equal_nan=True) for part in parts):
            inputs[name] = parts[0]
        else:
            raise refusal(name, "be the same on all ranks of a tensor mesh", "different arrays")
    query, dtype = inputs["query"], inputs["query"].dtype.name
    widths = {"query": spec.d_in, "key": spec.d_kv, "cotangent": spec.output_width}
    for name, x in inputs.items():
        if x.shape[2] != widths[name] or x.dtype.name not in DTYPES:
            of_layer = f"{widths[name]} features of one of {', '.join(DTYPES)}"
            raise refusal(name, f"have {of_layer}", {f"{name}.shape": x.shape, "dtype": x.dtype})
    is_causal = "key" not in inputs if options.causal is None else options.causal
    if is_causal and options.causal is None:
        console().print(f"the layer {ASSUMED_CAUSAL}", soft_wrap=True)
    case = Case(
        "ranks",
        replace(spec, dropout=0.0, output_dropout=0.0),
        "inputs of the ranks",
        batch=query.shape[0],
        seq_len=query.shape[1],
        seq_len_k=inputs["key"].shape[1] if "key" in inputs else None,
        is_causal=is_causal,
    )
    return Problem(
        case,
        dtype,
        {name: weight.astype(dtype_named(dtype)) for name, weight in weights.items()},
        inputs,
    )


def _check_names(
    options: argparse.Namespace, files: Mapping[str, Stages], inputs: Sequence[str]
) -> None:
    """Reject a file that has other arrays than stages, or no stage."""
    from parity.explain.diagnosis.ranks import JUDGED

    stages = {*JUDGED, *(["grad.query"] if options.mesh.startswith("sequence") else [])}
    for path, held in files.items():
        if (unknown := sorted(held.keys() - stages - {*inputs})) or not held.keys() & stages:
            known = ", ".join([*JUDGED, *sorted(stages - {*JUDGED}), *inputs])
            raise refusal(
                path, f"have stages, out of {known}", ", ".join(unknown or sorted(held)) or "none"
            )


def _dtype_of(files: Mapping[str, Stages]) -> str:
    """Return the dtype that ranks computed in: the narrowest of their stages, because scores may be
    wider.
    """
    from parity.measure.core.case import DTYPES

    dtypes = {x.dtype for held in files.values() for x in held.values() if x.dtype.name in DTYPES}
    if not dtypes:
        raise refusal("stages", f"have one of the dtypes {', '.join(DTYPES)}", "none")
    return min(dtypes, key=lambda dtype: (dtype.itemsize, dtype.name)).name

"""Stages of the ranks of a divided layer, from files on a command line: which ranks are wrong, and
why.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from parity.use.cli.command import Options, Result
from parity.use.cli.layers import ASSUMED_CAUSAL, layer_options
from parity.use.cli.messages import contradiction, input_error, requires
from parity.use.cli.options import first_or_none, flag_of

if TYPE_CHECKING:
    import numpy as np

    from parity.measure.core.problem import Problem

    Arrays = dict[str, np.ndarray]

INPUTS = ("query", "key", "cotangent")
"""Arrays of a file in addition to stages, if the layer comes from --weights."""


def diagnose_division(options: Options) -> Result:
    """Print which ranks are wrong, and which bug of dividing explains all of them."""
    from parity.explain.diagnosis.ranks import diagnose_ranks
    from parity.measure.core.weights import load_tensors
    from parity.use.reporting.console import console, working
    from parity.use.reporting.diagnosis import print_diagnosis

    dimension, num_ranks = _division(options.mesh)
    paths = options.files
    if len(paths) != num_ranks:
        got = f"{len(paths)}: {' '.join(paths)}"
        raise input_error(
            f"--mesh {options.mesh}",
            f"be passed with one file per rank, {num_ranks} in order",
            got,
        )
    for path in paths:
        if paths.count(path) > 1:
            raise input_error("each rank", "have a file of its own", f"{path} twice")
    _check_order(paths)
    arrays = {}
    for path in paths:
        arrays[path], _ = load_tensors(path)
    if options.weights is None:
        problem = _problem_of_case(options, arrays)
    else:
        problem = _problem_of_layer(options, arrays)
    observed = [_without_inputs(arrays_of_rank) for arrays_of_rank in arrays.values()]
    with working("searching for bugs"):
        diagnosis = diagnose_ranks(observed, problem, **{dimension: num_ranks})
    is_wrong = diagnosis.is_wrong
    print_diagnosis(diagnosis, console(), is_right=not is_wrong, verbose=options.verbose)
    status = 1 if is_wrong else 0
    return status, diagnosis


def _without_inputs(arrays: Arrays) -> Arrays:
    """Return the stages among the arrays of a rank."""
    return {name: array for name, array in arrays.items() if name not in INPUTS}


def _check_order(paths: Sequence[str]) -> None:
    """Reject files that are numbered in a different order: a shell sorts rank10 before rank2."""
    # Names that differ in more than numbers have no order of their own.
    names_without_numbers = {re.sub(r"\d+", "#", path) for path in paths}
    if len(names_without_numbers) > 1:
        return
    for before, path in pairwise(paths):
        if _numbers(before) > _numbers(path):
            raise input_error("files", "be in the order of ranks", f"{before} before {path}")


def _numbers(path: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", path)]


def _division(text: str) -> tuple[str, int]:
    """Return the argument of `diagnose_ranks` for the dimension that ranks divide, and the number
    of ranks.
    """
    name, _, size = text.partition("=")
    arguments = {"tensor": "tensor", "sequence": "tokens"}
    if name not in arguments or not size.isdecimal() or int(size) < 2:
        rule = "be tensor=N (ranks divide the heads) or sequence=N (ranks divide the tokens)"
        raise input_error("--mesh", rule, {"--mesh": text})
    return arguments[name], int(size)


def _problem_of_case(options: Options, arrays: Mapping[str, Arrays]) -> Problem:
    """Return the problem of a known case."""
    from parity.measure.core.cases import case_named
    from parity.measure.core.problem import make_problem

    if options.case is None:
        raise requires("--mesh", "--weights or --case")
    of_layer = {
        "from": options.layouts,
        "prefix": options.prefix,
        "causal": options.causal is not None,
        **layer_options(options),
    }
    needless = [flag_of(name) for name, value in of_layer.items() if value]
    if needless:
        raise requires(needless, "--weights")
    case = case_named(options.case)
    # The case has its own inputs, so that the files hold stages alone.
    _check_names(options, arrays, inputs=())
    return make_problem(case, _dtype_of(arrays))


def _problem_of_layer(options: Options, arrays: Mapping[str, Arrays]) -> Problem:
    """Return the problem of the layer of a file and the input of all ranks."""
    from parity.measure.core.case import DTYPES, Case
    from parity.measure.core.problem import Problem
    from parity.measure.core.weights import dtype_named
    from parity.port.conversion.convert import load
    from parity.use.reporting.console import console

    if options.case is not None:
        raise contradiction("--case", "--weights")
    layout = first_or_none(options.layouts)
    prefix = first_or_none(options.prefix)
    weights, spec = load(options.weights, layout, prefix=prefix, **layer_options(options))
    _check_names(options, arrays, INPUTS)
    inputs = {}
    for name in INPUTS:
        is_recorded = any(name in arrays_of_rank for arrays_of_rank in arrays.values())
        if is_recorded or name == "query":
            inputs[name] = _whole_input(name, arrays, options.mesh)
    query = inputs["query"]
    dtype = query.dtype.name
    widths = {"query": spec.d_in, "key": spec.d_kv, "cotangent": spec.output_width}
    for name, array in inputs.items():
        if array.shape[2] != widths[name] or array.dtype.name not in DTYPES:
            rule = f"have {widths[name]} features of one of {', '.join(DTYPES)}"
            raise input_error(name, rule, {f"{name}.shape": array.shape, "dtype": array.dtype})
    is_causal = options.causal
    if is_causal is None:
        is_causal = "key" not in inputs
        if is_causal:
            console().print(f"the layer {ASSUMED_CAUSAL}", soft_wrap=True)
    batch, seq_len, _ = query.shape
    seq_len_k = None
    if "key" in inputs:
        seq_len_k = inputs["key"].shape[1]
    case = Case(
        "ranks",
        replace(spec, dropout=0.0, output_dropout=0.0),
        "inputs of the ranks",
        batch=batch,
        seq_len=seq_len,
        seq_len_k=seq_len_k,
        is_causal=is_causal,
    )
    weights_dtype = dtype_named(dtype)
    rounded = {name: weight.astype(weights_dtype) for name, weight in weights.items()}
    return Problem(case, dtype, rounded, inputs)


def _whole_input(name: str, arrays: Mapping[str, Arrays], mesh: str) -> np.ndarray:
    """Return an input of the undivided layer from the parts of all ranks."""
    import numpy as np

    parts = []
    for path, arrays_of_rank in arrays.items():
        if name not in arrays_of_rank:
            rule = "be in the file of each rank, next to the stages"
            raise input_error(name, rule, f"none in {path}")
        parts.append(arrays_of_rank[name])
    shapes = [part.shape for part in parts]
    if any(len(shape) != 3 for shape in shapes):
        raise input_error(name, "be (batch, tokens, features)", f"{name} of the shapes {shapes}")
    if mesh.startswith("sequence"):
        return np.concatenate(parts, 1)
    for part in parts:
        if not np.array_equal(part, parts[0], equal_nan=True):
            raise input_error(name, "be the same on all ranks of a tensor mesh", "different arrays")
    return parts[0]


def _check_names(options: Options, arrays: Mapping[str, Arrays], inputs: Sequence[str]) -> None:
    """Reject a file that has other arrays than stages, or no stage."""
    from parity.explain.diagnosis.ranks import COMPARED
    from parity.measure.core.stages import did_you_mean_stage

    stages: list[str] = [*COMPARED]
    if options.mesh.startswith("sequence"):
        stages.append("grad.query")
    for path, arrays_of_rank in arrays.items():
        names = arrays_of_rank.keys()
        unknown = names - {*stages, *inputs}
        if not unknown and names & {*stages}:
            continue
        allowed = [*stages, *inputs]
        rule = f"have stages, out of {', '.join(allowed)}"
        if not unknown:
            raise input_error(path, rule, ", ".join(sorted(names)) or "none")
        got = sorted(unknown)
        hint = did_you_mean_stage(got[0], allowed)
        raise input_error(path, rule, ", ".join(got), hint=hint)


def _dtype_of(arrays: Mapping[str, Arrays]) -> str:
    """Return the dtype that ranks computed in: the narrowest of their stages, because scores may be
    wider.
    """
    from parity.measure.core.case import DTYPES

    sizes = set()
    for arrays_of_rank in arrays.values():
        for array in arrays_of_rank.values():
            if array.dtype.name in DTYPES:
                sizes.add((array.dtype.itemsize, array.dtype.name))
    if not sizes:
        raise input_error("stages", f"have one of the dtypes {', '.join(DTYPES)}", "none")
    # The name decides between dtypes of one size: any rule would do that is always the same.
    _, narrowest = min(sizes)
    return narrowest

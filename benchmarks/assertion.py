"""Measure the cost of comparisons and diagnoses by the size of a layer, compared with the float64
reference.

    python benchmarks/assertion.py [--sizes 256,1024] [--dtypes float32,bfloat16] [--repeats 3]
    [--json PATH]

A layer has d / 64 heads, a quarter as many key/value heads, and 2 d tokens. Processor seconds of
one thread, the median of the repeats. Each step of a row runs in turn with the others, so that the
load of the machine affects all of them.
"""

from __future__ import annotations

import os

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # read when NumPy is loaded

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

import parity
from mha_spec import AttentionSpec, Llama3Scaling, Rope
from parity.measure.core.problem import Problem
from parity.measure.core.trace import Reference

SCALING = Llama3Scaling(8.0, 8192)


def problem_of(size: int, dtype: str) -> Problem:
    """Return the problem of a layer of a width."""
    heads = size // 64
    rope = Rope(500000.0, scaling=SCALING)
    spec = AttentionSpec(
        size,
        heads,
        num_kv_heads=max(1, heads // 4),
        head_dim=64,
        qkv_bias=False,
        out_bias=False,
        rope=rope,
    )
    case = parity.Case(
        f"d{size}", spec, "a layer by its size", batch=1, seq_len=2 * size, is_causal=True
    )
    return parity.make_problem(case, dtype)


def outputs_of(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """Return the output of a right layer, and of one whose RoPE is not scaled."""
    unscaled = replace(problem.spec, rope=Rope(500000.0))
    wrong = replace(problem, case=replace(problem.case, spec=unscaled))
    right, other = (
        Reference(each, stages=frozenset({"output"})).same_precision(local=False)["output"]
        for each in (problem, wrong)
    )
    return right, other


def seconds_of(step: Callable[[], object]) -> float:
    """Return the processor time of a step."""
    begin = time.process_time()
    step()
    return time.process_time() - begin


def measured(size: int, dtype: str, repeats: int) -> dict[str, object]:
    """Return the seconds of each step for a layer of a width."""
    problem = problem_of(size, dtype)
    right, wrong = outputs_of(problem)

    def fails() -> None:
        try:
            parity.assert_parity(wrong, problem=problem, diagnose=False)
        except AssertionError:
            return
        raise SystemExit(f"the layer of {size} must differ without its scaling")

    steps: dict[str, Callable[[], object]] = {
        "reference": lambda: Reference(problem, stages=frozenset({"output"})).accumulated,
        "assert, passing": lambda: parity.assert_parity(right, problem=problem),
        "assert, failing": fails,
        "diagnose": lambda: parity.diagnose({"output": wrong}, problem),
    }
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeats):
        for name, step in steps.items():
            seconds[name].append(seconds_of(step))
    likely_bug = parity.diagnose({"output": wrong}, problem).likely_bug
    medians = {name: statistics.median(of_step) for name, of_step in seconds.items()}
    return {
        "d_model": size,
        "tokens": 2 * size,
        "dtype": dtype,
        "likely_bug": likely_bug,
        "seconds": medians,
    }


def main() -> None:
    """Print a table of the costs, and write it as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", default="256,512,1024", help="widths of the layers")
    parser.add_argument("--dtypes", default="float32,bfloat16", help="dtypes of the layers")
    parser.add_argument("--repeats", type=int, default=3, help="repetitions of each step")
    parser.add_argument("--json", type=Path, help="file to write")
    arguments = parser.parse_args()
    rows = []
    for size in map(int, arguments.sizes.split(",")):
        for dtype in arguments.dtypes.split(","):
            row = measured(size, dtype, arguments.repeats)
            rows.append(row)
            reference = row["seconds"]["reference"]
            costs = [
                f"{name} {value:.2f} s ({value / reference:.1f})"
                for name, value in row["seconds"].items()
            ]
            print(
                f"d {size}, {2 * size} tokens, {dtype}: {', '.join(costs)}; "
                f"{row['likely_bug'] or 'unknown'}",
                flush=True,
            )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()

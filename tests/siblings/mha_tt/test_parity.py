"""Every case of `parity` passes: each stage, and the modules as users call them, within the case's
own noise.
"""

from dataclasses import replace
from itertools import cycle

import pytest
from helpers.input_errors import rejects
from helpers.samples import sample
from helpers.tt import MOCK_BOARD, RECORDED_BOARD
from helpers.tt.formulas import IS_MOCK

from mha_spec import AttentionSpec, Rope
from parity import CASES, Case, run_cases
from parity.measure.backends import tt as backend
from parity.measure.core.cases import random_case

DTYPES = ("float32", "bfloat16")
MORE_SEEDS = range(6, 18)  # the first six are among the cases
RUNS = [
    (case, dtype) for case in CASES.values() for dtype in ((case.dtype,) if case.dtype else DTYPES)
]
SKIPPED = [(case, dtype) for case, dtype in RUNS if backend.why_skipped(case, dtype)]
RUN = [run for run in RUNS if run not in SKIPPED] + [
    (random_case(seed), dtype) for seed in MORE_SEEDS for dtype in DTYPES
]

RECORDED = {path.stem for path in backend.RECORDINGS.rglob("*.npz")}
"""Cases that test_recorded_cases.py compares on the board of the recordings."""


def params():
    """Return the cases, each in one dtype on each mock board: golden functions do not depend on
    boards.

    `make test` runs the cases in bfloat16 that have no recordings; with the recordings, every case
    runs.
    """
    if not IS_MOCK:
        return [pytest.param(case, dtype, id=f"{case.name}-{dtype}") for case, dtype in RUN]
    rows = []
    for index, (case, dtype) in enumerate(RUN):
        name = f"{case.name}-{dtype}"
        is_on_recorded_board = (index // 2 + index) % 2 == 1
        if is_on_recorded_board != (MOCK_BOARD == RECORDED_BOARD):
            continue
        if name in RECORDED and is_on_recorded_board:
            continue
        marks = []
        if name not in RECORDED:
            marks.append(pytest.mark.board)
        # `make parity` runs every case in float32.
        if name in RECORDED or case.name not in CASES or dtype == "float32":
            marks.append(pytest.mark.thorough)
        rows.append(pytest.param(case, dtype, id=name, marks=marks))
    return rows


@pytest.mark.parametrize(("case", "dtype"), params())
def test_every_stage_of_case_passes(opened_device, case, dtype):
    """All stages of the case, and its module as users call it, are within tolerance."""
    report = run_cases([case], ["tt"], [dtype])
    assert report.comparisons
    assert report.failed == [], "\n".join(map(str, report.first_differences()))


ROPE = Rope(10000.0)


def cached(prompt, spec, **sizes):
    """Return a case of a prompt and two steps."""
    return Case(
        "", spec, "", seq_len=prompt + 2, chunks=(prompt, 1, 1), capacity=prompt + 30, **sizes
    )


SHAPES = {
    "32-sequences": Case("", AttentionSpec(128, 2), "", batch=32, seq_len=40, is_causal=True),
    "32-cached": cached(32, AttentionSpec(128, 4, num_kv_heads=2, rope=ROPE), batch=32),
}
for features, num_heads in ((48, 4), (80, 2), (96, 2)):
    spec = AttentionSpec(features * num_heads, num_heads, rope=ROPE)
    SHAPES[f"heads-of-{features}"] = Case("", spec, "", seq_len=70, is_causal=True)
    SHAPES[f"heads-of-{features}-cached"] = cached(34, spec)
SHAPES["1024-tokens"] = Case("", AttentionSpec(128, 2), "", batch=1, seq_len=1024, is_causal=True)
SHAPES["1024-cached"] = cached(1024, AttentionSpec(128, 2, rope=ROPE), batch=1)


# Each size runs in one dtype without a cache, and in the other one with a cache.
@sample(
    where=lambda name, dtype: (
        (name, dtype) in [("heads-of-48", "float32"), ("heads-of-96-cached", "bfloat16")]
    )
)
@pytest.mark.parametrize(("name", "dtype"), list(zip(SHAPES, cycle(DTYPES), strict=False)))
def test_uncommon_shapes_pass(opened_device, name, dtype):
    """Batches of 32, other head widths and 1024 tokens, with and without caches, are within
    tolerance.
    """
    report = run_cases([replace(SHAPES[name], name=name)], ["tt"], [dtype])
    assert report.comparisons
    assert report.failed == [], "\n".join(map(str, report.first_differences()))


def test_only_float16_is_skipped():
    """Cases are skipped only in float16, which ttnn does not have."""
    assert {dtype for _, dtype in SKIPPED} == {"float16"}


def test_every_other_case_runs():
    """All cases run in both dtypes, except those with a fixed one; 12 more random cases are
    included.
    """
    of_dtype = sum(case.dtype is not None for case in CASES.values())
    assert len(SKIPPED) == of_dtype
    assert len(RUN) == 2 * (len(CASES) - of_dtype + len(MORE_SEEDS))


def test_parallel_jobs_on_device_raise():
    """`jobs=2` raises an error, because a device belongs to one process."""
    with rejects("jobs", jobs=2):
        run_cases([CASES["textbook"]], ["tt"], jobs=2)

"""Tests of the benchmark: values from given times, skipped contenders, and all parts.

No test checks how fast anything is.
"""

import gc
import importlib.util
import itertools
import json
import math
import os
import subprocess
import sys
import time
from dataclasses import fields, replace
from xml.etree import ElementTree

import jax
import numpy as np
import pytest
from helpers import ROOT
from helpers.input_errors import Misuse, rejects
from helpers.samples import sample

import parity.measure.backends
import parity_lab.bench
from mha_spec import AttentionSpec
from parity.use.cli.main import main
from parity.use.reporting.console import console
from parity.use.reporting.json import write_json
from parity_lab.bench import Bench, Row, Work, bench, bench_work, plan
from parity_lab.bench.measure import (
    LIMIT,
    OURS,
    Contender,
    Probe,
    difference,
    exponent,
    growth,
    large_enough,
    run_in_turn,
    times_of,
)
from parity_lab.bench.models import bench_model
from parity_lab.bench.operations import Operations
from parity_lab.bench.report import lines_of, plot_growth, print_bench

KEYS = [
    "what",
    "framework",
    "shape",
    "dtype",
    "ours_ms",
    "peers",
    "best_peer",
    "ratio",
    "limit_ms",
    "limit_ratio",
]
TINY = {"num_heads": 2, "head_dim": 8}
HEAD = {"schema": "mha-parity/bench", "version": 1}
ONCE = {"budget_s": 0.0, "rounds": (1, 1)}


@pytest.fixture(autouse=True)
def _few_objects_to_collect():
    """Keep existing objects out of the garbage collection before each measurement."""
    gc.freeze()


@pytest.fixture
def as_users_have_it(monkeypatch):
    """Use the default promotion of JAX, on which libraries rely, unlike other tests.

    Measure in a single round.
    """
    effort = parity_lab.bench.effort
    for module in (parity_lab.bench, parity_lab.bench.models):
        monkeypatch.setattr(module, "effort", lambda quick: {**effort(quick), **ONCE})
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(scope="module")
def sides():
    from parity_lab.bench.jax import Side as JaxSide
    from parity_lab.bench.torch import Side as TorchSide

    return {"jax": JaxSide(), "torch": TorchSide()}


def ready(value, **options):
    """Return a contender whose result is this value."""
    return Contender(lambda: value, lambda result: [np.asarray(result)], **options)


class Side:
    """A framework with contenders that take no time."""

    def __init__(self, **values):
        self.values = values
        self.probe = Probe(lambda: None, 1.0)

    def settings(self):
        return {}

    def matmul(self, dtype):
        return self.probe

    def reading(self):
        return None

    def contenders(self, work, inputs):
        def maker(value):
            def make():
                if isinstance(value, Exception):
                    raise value
                return value if isinstance(value, Contender) else ready(value)

            return make

        return {name: maker(value) for name, value in self.values.items()}


def growing(of, shape, ms, peak, **options):
    what, options = "growth core causal forward", {"group": "growth", "axes": "B N S H", **options}
    return Row(what, of, shape, "float32", ms, peak_bytes=peak, **options)


GROWING = [
    growing(
        of,
        [b, 8, s, 64],
        b * s**2 * 1e-3,
        b * s * 100,
        peers={peer: b * s**2 * 2e-3},
        peers_peak_bytes={peer: s},
    )
    for of, peer in (("jax", "jax.nn"), ("torch", "SDPA"))
    for b, s in [(1, 128), (1, 256), (1, 512), (1, 1024), (2, 256), (4, 256)]
]


# ---- Values from times ---------------------------------------------------------------------------


def test_row_has_medians_and_ratios():
    """A row has the medians of its times, the fastest library that counts, and the ratios to
    it and to the limit.
    """
    seconds = {
        OURS: [0.002, 0.001, 0.009],
        "a": [0.004, 0.005, 0.006],
        "b": [0.003, 0.003, 0.1],
        "c": [0.001] * 3,
    }
    rows = times_of(
        {**seconds, LIMIT: [0.010, 0.005, 0.008]}, not_counted=["c"], amount=100.0, probe=1000.0
    )
    assert rows == {
        "ours_ms": 2.0,
        "peers": {"a": 5.0, "b": 3.0, "c": 1.0},
        "best_peer": "b",
        "ratio": 1.5,
        "limit_ms": 0.5,  # the probe's fastest run
        "limit_ratio": 4.0,
        "not_counted": ["c"],
        "range_ms": [1.0, 9.0],
        "rounds": 3,
    }


@pytest.mark.parametrize("peers", [{}, {"c": [0.1]}], ids=["none", "none that counts"])
def test_missing_comparison_has_no_ratio(peers):
    """Without another library that counts, and without a limit, the best one and the ratios
    are None.
    """
    rows = times_of({OURS: [0.5], **peers}, not_counted=["c"])
    assert [rows[name] for name in ("best_peer", "ratio", "limit_ms", "limit_ratio")] == [None] * 4


def test_contenders_run_in_turn():
    """Three contenders of one second each run 7 times in 21 seconds, in rounds of all three
    whose order changes.
    """
    now, ran = itertools.count(), []  # every run takes one second
    runs = {name: lambda name=name: ran.append(name) for name in "abc"}
    durations = run_in_turn(
        runs, budget_s=21.0, rounds=(2, 20), warm_up=False, clock=lambda: float(next(now))
    )
    assert {name: len(times) for name, times in durations.items()} == dict.fromkeys("abc", 7)
    assert all(seconds == 1.0 for times in durations.values() for seconds in times)
    assert all(sorted(ran[i : i + 3]) == ["a", "b", "c"] for i in range(0, len(ran), 3))
    assert (
        len({tuple(ran[i : i + 3]) for i in range(3, len(ran), 3)}) > 1
    )  # the order of rounds varies


@pytest.mark.parametrize(("budget", "count"), [(0.0, 2), (1e9, 4)])
def test_rounds_stay_within_bounds(budget, count):
    """With rounds=(2, 4), there are 2 rounds for no budget and 4 for a large one."""
    now = itertools.count()
    seconds = run_in_turn(
        {"a": lambda: None}, budget_s=budget, rounds=(2, 4), clock=lambda: float(next(now))
    )
    assert len(seconds["a"]) == count


def test_warm_up_counts_in_budget():
    """With the warm-up, runs of one second are timed 10 times in a budget of 20 seconds."""
    now = itertools.count()
    seconds = run_in_turn(
        {"a": lambda: None}, budget_s=20.0, rounds=(2, 20), clock=lambda: float(next(now))
    )
    assert len(seconds["a"]) == 10


@pytest.mark.parametrize("warm_up", [False, True])
def test_short_runs_are_repeated(warm_up):
    """Runs of 2 ms are repeated 5 times, or at most `most_repeats` times, with 2 more runs as
    a warm-up; a time is the time of one run.
    """
    now, ran = itertools.count(), []
    runs = {name: lambda name=name: ran.append(name) for name in "ab"}
    seconds = run_in_turn(
        runs,
        budget_s=0,
        rounds=(1, 1),
        most_repeats={"b": 2},
        warm_up=warm_up,
        clock=lambda: next(now) * 0.002,
    )
    assert (ran.count("a"), ran.count("b")) == (1 + 5 + 2 * warm_up, 1 + 2 + 2 * warm_up)
    assert seconds["a"] == [pytest.approx(0.002 / 5)]


def test_slow_probe_stays_small():
    """A probe that takes 0.05 s at size 512 stays at this size; a fast one grows to the
    largest, 1024.
    """

    def make(size):
        return Probe(lambda: time.sleep(0.05 if size == 512 else 0.0), float(size))

    assert large_enough(make, 1024).amount == 512
    assert large_enough(lambda size: Probe(lambda: None, float(size)), 1024).amount == 1024


def test_difference_is_relative_to_largest():
    """The difference is a share of the largest value, and infinite for NaN, other shapes or
    missing arrays.
    """
    ours = [np.array([1.0, -4.0]), np.array([2.0])]
    assert difference(ours, ours) == 0
    assert difference(ours, [np.array([1.0, -3.0]), np.array([2.0])]) == 0.25
    assert difference(ours, [np.array([1.0, np.nan]), np.array([2.0])]) == math.inf
    assert difference(ours, ours[:1]) == difference(ours, [np.ones((1, 2)), np.ones(1)]) == math.inf


def test_exponent_fits_larger_half():
    """The exponent is fitted to the larger half of the sizes; it is None for one size or a zero."""
    sizes = [1, 2, 4, 8, 16]
    assert exponent(sizes, [size**1.5 for size in sizes]) == pytest.approx(1.5)
    assert exponent(sizes, [100, 100, 16, 64, 256]) == pytest.approx(2.0)
    assert exponent([1, 2], [3.0, 12.0]) == pytest.approx(2.0)
    assert exponent([1], [3.0]) is exponent([1, 2], [0.0, 1.0]) is None


def test_growth_is_fitted_by_axis():
    """Growth has exponents of time and memory, by tokens and by sequences, for each framework
    and contender.
    """
    exponents = {
        (line["framework"], line["name"], line["of"], line["over"]): line["exponent"]
        for line in growth(GROWING)
    }
    assert len(exponents) == 2 * 2 * 2 * 2
    for framework, peer in (("jax", "jax.nn"), ("torch", "SDPA")):
        assert exponents[framework, OURS, "time", "S"] == pytest.approx(2.0)
        assert exponents[framework, peer, "time", "S"] == pytest.approx(2.0)
        assert exponents[framework, OURS, "time", "B"] == pytest.approx(1.0)
        assert exponents[framework, OURS, "memory", "S"] == pytest.approx(1.0)
        assert exponents[framework, peer, "memory", "B"] == pytest.approx(0.0)


def test_growth_is_fitted_by_kind_of_work():
    """Two kinds of work have separate exponents of growth."""
    steps = [
        Row(
            "growth-long decode",
            "jax",
            [1, s, 64],
            "float32",
            s * 1e-3,
            group="growth-long",
            axes="B S E",
        )
        for s in (1024, 2048, 4096)
    ]
    exponents = {
        line["what"]: (line["over"], line["exponent"])
        for line in growth([*GROWING, *steps])
        if line["of"] == "time"
    }
    assert exponents["growth-long decode"] == ("S", pytest.approx(1.0))
    assert exponents.keys() == {"growth core causal forward", "growth-long decode"}


# ---- Measurements --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"quick": True}, {"long": True}], ids=["all", "quick", "long"]
)
def test_plan_covers_every_group_once(options):
    """The plan, also the quick and the long one, has work of every group except import and
    convert, and none twice.
    """
    works = plan(parity_lab.bench.GROUPS, ["float32"], **options)
    assert {work.group for work in works} == set(parity_lab.bench.GROUPS) - {"import", "convert"}
    assert len({(work.what, *work.shape) for work in works}) == len(works)


def test_plan_covers_expected_work():
    """The plan has the expected masks, kinds, passes, batches and lengths: 4096 tokens for
    growth, 16384 with `long`, 131072 in growth-long.
    """
    works = plan(parity_lab.bench.GROUPS, ["float32"])
    whats = {work.what for work in works}
    hidden = {"full", "causal", "padded", "causal+padded"}
    assert whats >= {f"layer {which} forward" for which in hidden} | {
        "layer causal with weights forward"
    }
    assert whats >= {
        f"{kind} causal forward+backward"
        for kind in ("core", "layer", "memory core", "memory layer")
    }
    assert {tuple(work.shape[:2]) for work in works if work.what == "decode"} == {
        (1, 1024),
        (1, 4096),
        (8, 1024),
        (8, 4096),
    }
    assert [
        max(work.seq_len for work in plan(["growth"], ["float32"], **o))
        for o in ({}, {"long": True})
    ] == [
        4096,
        16384,
    ]
    long = {(work.what, work.seq_len) for work in plan(["growth-long"], ["float32"])}
    assert {
        (f"growth-long {what}", 131072) for what in ("core causal+window 512 forward", "decode")
    } <= long


@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_oversized_scores_are_left_out(framework, monkeypatch):
    """Contenders whose scores exceed MOST_SCORES are left out with the reason; the project's
    own kernel is timed.
    """
    monkeypatch.setattr("parity_lab.bench.work.MOST_SCORES", 8**2 - 1)
    work = Work("growth-long", "core", 1, 8, 1, 8, is_causal=True, window_size=2)
    (row,) = bench_work(work, parity_lab.bench.open_sides([framework], "cpu")[0], **ONCE)
    assert row.ours_ms is not None
    assert row.peers == {}
    assert len(row.left_out) == 2
    assert all(
        "InputError: scores" in reason or "ValueError: scores" in reason
        for reason in row.left_out.values()
    )


def test_limit_counts_visible_scores():
    """FLOPs and bytes count visible positions only, for causal, padded and packed sequences,
    gradients, layers and decoding.
    """
    core = Work("cores", "core", 2, 4, 3, 8)
    assert core.flops == 2 * (2 * 2 * 4 * 4 * 8) * 3  # multiply and add; two products
    assert replace(core, is_causal=True).flops == core.flops * (1 + 2 + 3 + 4) / 16
    assert replace(core, is_padded=True).lengths == [4, 2]
    assert replace(core, is_padded=True).flops == core.flops * (16 + 8) / 32
    assert (
        replace(core, is_padded=True, is_causal=True).flops
        == core.flops * (10 + 1 + 2 + 2 + 2) / 32
    )
    assert replace(core, backward=True).flops == core.flops * (2 + 5) / 2
    packed = replace(core, num_segments=2, seq_len=6)
    assert packed.segment_lengths == [4, 2]
    assert packed.flops == core.flops * (16 + 4) / 16
    layer = replace(core, kind="layer")
    assert layer.flops == core.flops + 4 * 2 * (2 * 4) * 24 * 24
    assert replace(layer, backward=True).flops == core.flops * 3.5 + 3 * (layer.flops - core.flops)
    decode = replace(core, kind="decode", dtype="bfloat16")
    assert decode.flops is None
    assert decode.nbytes == 2 * (4 * 24 * 24 + 4 * 24 + 2 * 2 * 4 * 24)


def test_different_result_is_not_timed():
    """A contender with a different result, and one that cannot be imported, are left out with
    the reason.
    """
    wrong = ready(np.ones(3) * 1.1)
    side = Side(
        **{
            OURS: np.ones(3),
            "right": np.ones(3),
            "wrong": wrong,
            "absent": ImportError("not installed"),
        }
    )
    (row,) = bench_work(Work("cores", "core", 1, 2, **TINY), {"jax": side}, **ONCE)
    assert list(row.peers) == ["right"]
    assert row.left_out["wrong"].startswith("its result differs by 1.0e-01")
    assert row.left_out["absent"] == "ImportError: not installed"


def test_other_framework_does_not_count():
    """The other framework's contender is shown in a row of JAX, but does not count as the
    best one.
    """
    sides = {"jax": Side(**{OURS: 1.0, "jax.nn": 1.0}), "torch": Side(**{OURS: 1.0, "SDPA": 1.0})}
    row, other = bench_work(Work("cores", "core", 1, 2, **TINY), sides, **ONCE)
    assert (list(row.peers), row.not_counted, row.best_peer) == (
        ["jax.nn", "torch SDPA"],
        ["torch SDPA"],
        "jax.nn",
    )
    assert (list(other.peers), other.not_counted) == (["SDPA"], [])


def test_failure_of_own_code_is_an_error():
    """If the project's own contender fails, a RuntimeError has the work, its shape and the
    cause.
    """
    with pytest.raises(RuntimeError, match=r"core full forward \[1, 2, 2, 8\] .*TypeError: no"):
        bench_work(
            Work("cores", "core", 1, 2, **TINY), {"jax": Side(**{OURS: TypeError("no")})}, **ONCE
        )


def test_memory_is_measured_without_a_run():
    """Work that is not timed has peak memory, but no time and no ratio, and its contenders do
    not run.
    """

    def never():
        raise AssertionError("not to be run")

    ours, peer = (
        Contender(never, lambda result: [], lambda peak=peak: peak) for peak in (100, 400)
    )
    work = Work("memory", "core", 1, 2, **TINY, is_timed=False)
    (row,) = bench_work(work, {"jax": Side(**{OURS: ours, "peer": peer})}, **ONCE)
    assert (row.peak_bytes, row.peers_peak_bytes, row.ours_ms, row.ratio) == (
        100,
        {"peer": 400},
        None,
        None,
    )


# ---- All contenders ------------------------------------------------------------------------------

WORKS = [
    Work("cores", "core", 2, 9, **TINY, is_causal=True, backward=True),
    Work("layers", "layer", 2, 9, **TINY, is_causal=True, is_padded=True),
    Work("layers", "layer", 1, 9, **TINY, is_causal=True, backward=True),
    Work("layers", "layer", 1, 9, **TINY, is_causal=True, need_weights=True),
    Work("decode", "prefill", 1, 9, **TINY, is_causal=True),
    Work("decode", "decode", 2, 9, **TINY),
    Work("layers", "layer", 2, 9, **TINY, is_padded=True, dtype="bfloat16"),
    Work("varlen", "core", 2, 9, **TINY, is_causal=True, is_padded=True, backward=True),
    Work("varlen", "core", 2, 9, **TINY, is_causal=True, num_segments=3),
]
FIRST = [WORKS[0], WORKS[3]]
"""One of each kind that a layer has without a cache."""

EXPECTED = {
    "jax": {
        "core": {"jax.nn", "plain path", "torch SDPA"},
        "layer": {"flax.nnx", "flax.linen", "equinox", "jax.nn by hand", "keras"},
        "prefill": {"static cache"},
        "decode": {"static cache", "concatenation", "flax.nnx"},
    },
    "torch": {
        "core": {"SDPA", "plain path"},
        "layer": {"torch.nn", "SDPA by hand", "keras"},
        "prefill": {"static cache", "concatenation", "StaticCache", "DynamicCache"},
        "decode": {"static cache", "concatenation", "StaticCache", "DynamicCache"},
    },
}


@sample(work=FIRST)
@pytest.mark.parametrize(
    "work", WORKS, ids=lambda work: f"{work.what} {work.dtype}".replace(" ", "-")
)
def test_contenders_compute_the_same(sides, as_users_have_it, work):
    """All expected contenders are timed with the same result, apart from Keras on one
    framework and Equinox if weights are needed.
    """
    rows = bench_work(work, sides, **ONCE)
    assert rows
    for row in rows:
        expected = EXPECTED[row.framework][work.kind]
        if work.group == "varlen":
            expected = {
                name.replace("SDPA", "masked SDPA") for name in expected if name != "torch SDPA"
            }
        if work.need_weights:  # other versions by hand
            expected = {
                name.replace("SDPA by", "softmax by").replace("jax.nn by", "softmax by")
                for name in expected
            }
        assert {*row.peers, *row.left_out} == expected
        # Keras runs on one of the frameworks; Equinox does not return its attention weights.
        assert set(row.left_out) <= {"keras"} | ({"equinox"} if work.need_weights else set()), (
            row.left_out
        )
        assert row.best_peer in row.peers
        assert row.limit_ms > 0
        assert isinstance(row.peak_bytes, int)
        assert set(row.peers_peak_bytes) == set(row.peers)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    "options", [{"window_size": 5}, {"is_padded": True}, {"num_segments": 3}], ids=str
)
def test_flex_attention_matches_mask(monkeypatch, options):
    """FlexAttention with a window, padding or packed sequences returns the result of SDPA
    with a mask.
    """
    import torch

    from parity_lab.bench.torch import Side as TorchSide
    from parity_lab.bench.torch import _Core

    # FlexAttention itself also compiles, with options.
    compiled = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda f, **options: compiled(f, **options) if options else f
    )
    work = Work("varlen", "core", 2, 40, 2, 16, is_causal=True, **options)
    core = _Core(TorchSide(), work, parity_lab.bench.draw_inputs(work))
    heads = [core.inputs[name] for name in ("query", "key", "value")]
    actual, expected = (
        attend(*heads, is_causal=True) for attend in (core.flex_attention(), core.masked_sdpa())
    )
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_contenders_have_operation_counts(sides, framework):
    """With `profile`, each contender has at least one kernel and no synchronization; without
    it, a row has no counts.
    """
    work = Work("cores", "core", 1, 9, **TINY, is_causal=True)
    (row,) = bench_work(work, {framework: sides[framework]}, **ONCE, profile=True)
    assert set(row.operations) == {OURS, *row.peers}
    assert all(counts.kernels and counts.syncs == 0 for counts in row.operations.values())
    assert json.dumps(row.to_dict()["operations"][OURS]["kernels"])
    (unprofiled,) = bench_work(work, {framework: sides[framework]}, **ONCE)
    assert unprofiled.operations == {}


def test_torch_memory_excludes_result(sides):
    """The peak memory of a torch run is 400,400 bytes, without its result, up to 1000 bytes."""
    import torch

    def run():
        large = torch.ones(1000, 100)
        return [large[0] + large.sum(0)]

    # 400,000 bytes for the large array; the sum of its rows, 400, exists until the end.
    assert sides["torch"].peak_bytes(run) == pytest.approx(400_400, abs=1000)


@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_settings_include_device(sides, framework):
    """The settings of a framework have its device and can be written as JSON."""
    assert sides[framework].settings()["device"]
    assert json.dumps(sides[framework].settings())


@pytest.mark.nightly
def test_imports_and_conversion_have_rows():
    """Imports and conversion have rows with their best contender; an import also has the
    extra time, a conversion a limit.
    """
    from parity_lab.bench.conversion import bench_conversion
    from parity_lab.bench.imports import bench_imports

    module, help_ = bench_imports(["torch"], repeats=1)
    (conversion,) = bench_conversion(num_layers=1, repeats=1)
    assert (module.what, module.best_peer) == ("import torch, mha_torch", "import torch")
    assert module.extra_ms == pytest.approx(module.ours_ms - module.peers["import torch"])
    assert (help_.what, help_.best_peer, list(help_.peers)) == (
        "mha-parity --help",
        None,
        ["python -c pass"],
    )
    assert (conversion.what, conversion.best_peer) == ("convert", "load_file, save_file")
    assert conversion.limit_ratio > 0


# ---- The command ---------------------------------------------------------------------------------


@pytest.fixture
def tiny_plan(monkeypatch):
    """Replace the plan by a core, two cores for growth, and one for its memory."""
    options = {"is_causal": True, **TINY}
    works = [
        Work("cores", "core", 1, 8, **options),
        *(Work("growth", "core", 1, seq_len, **options) for seq_len in (8, 16)),
        Work("memory", "core", 1, 8, **options, is_timed=False),
    ]
    monkeypatch.setattr(
        parity_lab.bench,
        "plan",
        lambda groups, *a, **o: [work for work in works if work.group in groups],
    )
    return works


@pytest.mark.costly("a whole benchmark, and a picture")
def test_bench_writes_table_json_and_plot(tiny_plan, as_users_have_it, tmp_path, capsys):
    """`bench` prints tables of times and growth, writes rows with all fields as JSON, and
    draws a plot with all contenders.
    """
    json_path, plot_path = tmp_path / "bench.json", tmp_path / "bench.svg"
    what = ["--suites", "cores,growth,memory", "--quick"]
    assert main(["bench", *what, "--json", str(json_path), "--plot", str(plot_path)]) == 0
    out = capsys.readouterr().out
    assert "JAX: times in ms" in out
    assert "jax.nn" in out
    assert "Growth: the exponent" in out
    content = json.loads(json_path.read_text())
    assert content["schema"] == "mha-parity/bench"
    assert set(content["environment"]) >= {
        "python",
        "platform",
        "cpus",
        "packages",
        "backends",
        "settings",
    }
    assert len(content["rows"]) == 2 * len(tiny_plan)
    for row in content["rows"]:
        assert set(row) == {field.name for field in fields(Row)} > {*KEYS, "peak_bytes"}
        assert isinstance(row["what"], str)
        assert isinstance(row["shape"], list)
        assert isinstance(row["peak_bytes"], int)
        assert isinstance(row["ours_ms"], float) != (row["group"] == "memory")
        assert all(isinstance(ms, float) for ms in row["peers"].values())
    assert {line["over"] for line in content["growth"]} == {"S"}
    words = [
        text.text for text in ElementTree.parse(plot_path).iter("{http://www.w3.org/2000/svg}text")
    ]
    assert {"mha_jax", "mha_torch", "jax: jax.nn", "torch: SDPA", "sequence length"} <= set(words)


@pytest.fixture(scope="module")
def gemma_folder(tmp_path_factory):
    """Save a model with layers of two kinds: 0 and 2 are alike."""
    import transformers

    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    config = transformers.Gemma3TextConfig(
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=16,
        vocab_size=11,
        sliding_window=4,
        layer_types=kinds,
    )
    folder = tmp_path_factory.mktemp("gemma")
    transformers.AutoModel.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.thorough
def test_model_layers_are_measured(gemma_folder, as_users_have_it, tmp_path, capsys):
    """The two kinds of layers of a Gemma model are timed on both frameworks, on torch also in
    transformers.
    """
    path = tmp_path / "bench.json"
    assert main(["bench", "--model", str(gemma_folder), "--quick", "--json", str(path)]) == 0
    content = json.loads(path.read_text())
    of_torch = [row for row in content["rows"] if row["framework"] == "torch"]
    whats = [
        "layers 0, 2 layer causal forward",
        "layers 0, 2 decode",
        "layer 1 layer causal forward",
        "layer 1 decode",
    ]
    assert [row["what"] for row in of_torch] == whats
    assert [row["shape"] for row in of_torch] == [[1, 256, 32]] * 4
    assert [list(row["peers"]) for row in of_torch] == [
        ["transformers"],
        [],
        ["transformers"],
        [],
    ]  # transformers is not left out
    of_jax = [row for row in content["rows"] if row["framework"] == "jax"]
    assert [row["what"] for row in of_jax] == whats
    assert all(
        row["best_peer"] is None for row in of_jax
    )  # a contender of a different framework does not count
    assert content["left_out"] == []
    assert "transformers" in content["names"]["torch"]


@pytest.mark.thorough
def test_selected_model_layers_are_measured(gemma_folder, as_users_have_it):
    """With layers=[1], only layer 1 of a model is timed."""
    report = bench_model(gemma_folder, ["torch"], layers=[1], quick=True)
    assert [row.what for row in report.rows] == ["layer 1 layer causal forward", "layer 1 decode"]


def test_limit_of_layer_follows_from_spec():
    """FLOPs and bytes of a model's layer follow from its grouped heads and its window."""
    spec = AttentionSpec(32, 4, num_kv_heads=2, window_size=4, qkv_bias=False, out_bias=False)
    work = Work("model", "layer", 1, 16, is_causal=True, layer=spec)
    matrices = 32 * (32 + 16 + 16 + 32)
    assert work.flops == 2 * 16 * matrices + 2 * (1 + 2 + 3 + 13 * 4) * (32 + 32)
    assert replace(work, kind="decode").nbytes == 4 * (matrices + 2 * 16 * 16)


def test_single_framework_is_measured(tiny_plan, as_users_have_it):
    """With one framework, all rows and the environment are of this framework."""
    report = bench(["cores"], ["torch"])
    assert [row.framework for row in report.rows] == ["torch"]
    assert list(report.environment["backends"]) == ["torch"]
    assert report.names["torch"]["SDPA"] == "torch.nn.functional.scaled_dot_product_attention"


@pytest.mark.parametrize(
    ("arguments", "input_error"),
    [
        (["--suites", "cores,speed"], rejects("--suites", {"--suites": "speed"})),
        (["--backends", "tt"], rejects("--backends", {"--backends": "tt"})),
        (["--dtypes", "float64"], rejects("--dtypes", {"--dtypes": "float64"})),
        (["--device", "tpu"], rejects("--device", {"--device": "tpu"})),
        (["--plot", "a.png", "--suites", "cores"], rejects("--plot", {"--suites": "cores"})),
        (["--layers", "0", "--num-heads", "2"], Misuse("--layers and --num-heads require --model")),
        (
            ["--model", "x", "--suites", "cores"],
            Misuse("--model cannot be combined with --suites or --plot"),
        ),
        (["--plot", "a.pdf"], rejects("--plot", {"--plot": "a.pdf"})),
        (["--json", "/nowhere/a.json"], rejects("--json", "/nowhere/a.json: ")),
    ],
)
def test_bad_usage_of_bench_exits_2(capsys, arguments, input_error):
    """An invalid option of `bench` exits with status 2 and an error with the option and its
    value.
    """
    assert main(["bench", *arguments]) == 2
    assert input_error.is_printed_in(capsys.readouterr().err)


def test_missing_framework_is_left_out(monkeypatch, capsys):
    """A framework that is not installed is left out by default; if requested, the status is
    2, and the error has the reason.
    """
    why = parity.measure.backends.why_missing
    missing = "torch needs torch, not installed here"
    monkeypatch.setattr(
        parity_lab.bench, "why_missing", lambda name: missing if name == "torch" else why(name)
    )
    assert main(["bench", "--backends", "torch"]) == 2
    assert missing in capsys.readouterr().err
    assert (
        parity_lab.bench.count_rows(["import"]) == 1 + 1
    )  # one for JAX and one for the command itself


def test_missing_device_is_rejected(monkeypatch, capsys):
    """--device cuda without a GPU exits with status 2 and an error about it."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["bench", "--device", "cuda"]) == 2
    assert rejects("a GPU", "torch").is_printed_in(capsys.readouterr().err)


@pytest.mark.costly("modules that a new process imports")
def test_bench_help_imports_no_framework():
    """`bench --help` imports neither JAX, PyTorch, NumPy nor Rich."""
    program = (
        "import sys; from parity.use.cli.main import main\ntry: main(['bench', "
        "'--help'])\nexcept SystemExit: pass\n"
    )
    program += "assert not {'jax', 'torch', 'numpy', 'rich'} & set(sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "--quick" in done.stdout


# ---- Output --------------------------------------------------------------------------------------


def test_piped_bench_output_is_plain(capsys):
    """In a pipe, the tables have plain lines of at most 100 columns, with contenders that
    were left out and the reason.
    """
    slow = {
        "left_out": {"keras": "ImportError: no"},
        "ratio": 0.5,
        "best_peer": "a peer of a long name",
    }
    rows = [
        Row(
            "layer full forward",
            "jax",
            [1, 256, 1024],
            "float32",
            2.0,
            {"a peer of a long name": 1.0},
            **slow,
        ),
        replace(GROWING[0], left_out={"keras": "ImportError: no"}),
        Row(
            "import torch, mha_torch",
            "torch",
            [],
            "",
            900.0,
            {"import torch": 890.0},
            extra_ms=10.0,
        ),
        Row(
            "memory core causal forward",
            "torch",
            [1, 8, 64, 64],
            "float32",
            peers_peak_bytes={"SDPA": 2_000_000},
        ),
    ]
    print_bench(Bench(rows, {}), console())
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    assert all(line.isprintable() for line in lines)
    text = " ".join(" ".join(lines).split())
    assert "left out: keras (jax, 2 rows): ImportError: no" in text
    assert "ours takes 10 more" in text
    assert "SDPA 2.0 MB" in text


def test_kernel_names_have_no_templates(capsys):
    """Names of kernels are printed without namespace, templates and parameters, with counts
    of kernels, copies and waits.
    """
    kernels = {"void pytorch_flash::flash_fwd_kernel<Traits<64, 128>>(Params)": 2, "aten::add": 1}
    counts = {OURS: Operations(kernels, 3, 4), "SDPA": Operations({"aten::mul": 1}, 0, 0)}
    print_bench(Bench([timed(1.0, operations=counts)], {}), console())
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [OURS, "3", "3", "4", "2", "flash_fwd_kernel,", "1", "add"] in [
        line[-8:] for line in lines
    ]
    assert ["SDPA", "1", "0", "0", "1", "mul"] in lines


def test_plot_lines_use_smallest_batch():
    """A line of the plot has the times of all lengths with the smallest batch, and memory in MB."""
    lines = {(line["framework"], line["name"]): line for line in lines_of(GROWING)}
    assert set(lines) == {("jax", OURS), ("jax", "jax.nn"), ("torch", OURS), ("torch", "SDPA")}
    assert list(lines["jax", OURS]["time"]) == [128, 256, 512, 1024]
    assert lines["torch", "SDPA"]["memory"][256] == 256 / 1e6


def test_plot_draws_no_contender_twice():
    """A contender of the other framework is not drawn if the other framework draws it itself."""
    name, shape, size = "torch SDPA", [1, 8, 128, 64], 128
    rows = [
        growing("jax", shape, 1.0, size, peers={name: 2.0}, peers_peak_bytes={name: size}),
        *GROWING,
    ]
    assert name not in {line["name"] for line in lines_of(rows)}
    assert name in {line["name"] for line in lines_of(rows[:1])}


def test_plot_without_rows_writes_nothing(tmp_path):
    """The plot of growth is written as a PNG; without rows, an error is raised and no file is
    written.
    """
    plot_growth(Bench(GROWING, {}), tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    with rejects("a plot", "none"):
        plot_growth(Bench([], {}), tmp_path / "b.png")
    assert os.listdir(tmp_path) == ["a.png"]


# ---- Two files -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compare():
    path = ROOT / "benchmarks" / "compare.py"
    spec = importlib.util.spec_from_file_location("benchmarks_compare", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def written(path, *rows):
    write_json(path, "bench", Bench(list(rows), {}).to_dict())
    return str(path)


def timed(ms, what="core full forward", **options):
    return Row(what, "jax", [1, 2, 3, 4], "float32", ms, **options)


def test_compare_reports_slower_rows(compare, tmp_path, capsys):
    """`compare.py` marks a row 1.2 times as slow, counts missing rows and exits with 1, or
    with 0 if 0.3 is allowed.
    """
    before = written(tmp_path / "a.json", timed(1.0), timed(2.0, "decode"), timed(1.0, "gone"))
    after = written(tmp_path / "b.json", timed(1.2), timed(1.0, "decode"))
    assert compare.main([before, after]) == 1
    out = capsys.readouterr().out
    first = next(line for line in out.splitlines() if line.startswith("core"))
    assert first.split() == [
        "core",
        "full",
        "forward",
        "jax",
        "1x2x3x4",
        "float32",
        "1",
        "1.2",
        "1.200",
        "slower",
    ]
    assert f"only in {before}: 1 rows, such as gone" in out
    assert "2 rows compared, 1 worse" in out
    assert compare.main([before, after, "--allow", "0.3"]) == 0


def test_compare_relative_uses_limit_share(compare, tmp_path):
    """With --relative, a time 5 times as long with the same share of the limit is not worse."""
    before = written(tmp_path / "a.json", timed(1.0, limit_ratio=2.0))
    after = written(tmp_path / "b.json", timed(5.0, limit_ratio=2.0))
    assert [compare.main([before, after, *extra]) for extra in ([], ["--relative"])] == [1, 0]


def test_compare_uses_memory_without_time(compare, tmp_path, capsys):
    """Rows without times are compared by memory: twice as much exits with status 1 and is
    marked as larger.
    """
    before = written(tmp_path / "a.json", timed(None, peak_bytes=10**6))
    after = written(tmp_path / "b.json", timed(None, peak_bytes=2 * 10**6))
    assert compare.main([before, after]) == 1
    assert "larger" in capsys.readouterr().out


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"schema": "mha-parity/bench", "version": 2, "rows": []}',
        json.dumps({**HEAD, "rows": []}),
        None,
    ],
)
def test_compare_rejects_invalid_files(compare, tmp_path, capsys, content):
    """A file that is missing, has other content, a different version or no rows exits with status
    2 and an error.
    """
    path, good = tmp_path / "a.json", written(tmp_path / "b.json", timed(1.0))
    if content is not None:
        path.write_text(content)
    assert compare.main([good, str(path)]) == 2
    assert capsys.readouterr().err.startswith("compare: ")

"""The benchmark: what it computes from given times, what it refuses to time, and that all of its parts run.

How fast anything is, no test says.
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
from helpers.refusals import refuses
from helpers.samples import sample

import parity.backends
import parity_lab.bench
from mha_spec import AttentionSpec
from parity.cli.main import main
from parity.reporting.console import console
from parity.reporting.json import write_json
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

KEYS = ["what", "framework", "shape", "dtype", "ours_ms", "peers", "best_peer", "ratio", "limit_ms", "limit_ratio"]
TINY = {"num_heads": 2, "head_dim": 8}
HEAD = {"schema": "mha-parity/bench", "version": 1}
ONCE = {"budget_s": 0.0, "rounds": (1, 1)}


@pytest.fixture(autouse=True)
def _few_objects_to_collect():
    """Each measurement collects garbage first: not that of all libraries and other tests."""
    gc.freeze()


@pytest.fixture
def as_users_have_it(monkeypatch):
    """Settings of JAX: those that the other tests are stricter with, for other libraries rely on them.

    But each round is run once.
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
    """A contender that gives this value."""
    return Contender(lambda: value, lambda found: [np.asarray(found)], **options)


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
    growing(of, [b, 8, s, 64], b * s**2 * 1e-3, b * s * 100, peers={peer: b * s**2 * 2e-3}, peers_peak_bytes={peer: s})
    for of, peer in (("jax", "jax.nn"), ("torch", "SDPA"))
    for b, s in [(1, 128), (1, 256), (1, 512), (1, 1024), (2, 256), (4, 256)]
]


# ---- What follows from times -----------------------------------------------------------------------------------------


def test_a_row_has_medians_the_best_peer_and_the_ratios():
    seconds = {OURS: [0.002, 0.001, 0.009], "a": [0.004, 0.005, 0.006], "b": [0.003, 0.003, 0.1], "c": [0.001] * 3}
    found = times_of({**seconds, LIMIT: [0.010, 0.005, 0.008]}, not_counted=["c"], amount=100.0, probe=1000.0)
    assert found == {
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
def test_without_a_peer_or_a_limit_there_is_no_ratio(peers):
    found = times_of({OURS: [0.5], **peers}, not_counted=["c"])
    assert [found[name] for name in ("best_peer", "ratio", "limit_ms", "limit_ratio")] == [None] * 4


def test_contenders_run_in_turn_as_often_as_the_budget_allows():
    now, ran = itertools.count(), []  # every run takes one second
    runs = {name: lambda name=name: ran.append(name) for name in "abc"}
    found = run_in_turn(runs, budget_s=21.0, rounds=(2, 20), warm_up=False, clock=lambda: float(next(now)))
    assert {name: len(times) for name, times in found.items()} == dict.fromkeys("abc", 7)
    assert all(seconds == 1.0 for times in found.values() for seconds in times)
    assert all(sorted(ran[i : i + 3]) == ["a", "b", "c"] for i in range(0, len(ran), 3))
    assert len({tuple(ran[i : i + 3]) for i in range(3, len(ran), 3)}) > 1  # the order changes


@pytest.mark.parametrize(("budget", "count"), [(0.0, 2), (1e9, 4)])
def test_rounds_have_a_least_and_a_most(budget, count):
    now = itertools.count()
    found = run_in_turn({"a": lambda: None}, budget_s=budget, rounds=(2, 4), clock=lambda: float(next(now)))
    assert len(found["a"]) == count


def test_what_warms_up_counts_in_the_budget():
    now = itertools.count()
    found = run_in_turn({"a": lambda: None}, budget_s=20.0, rounds=(2, 20), clock=lambda: float(next(now)))
    assert len(found["a"]) == 10


@pytest.mark.parametrize("warm_up", [False, True])
def test_short_runs_are_repeated_as_often_as_they_may_be_and_begin_warm(warm_up):
    now, ran = itertools.count(), []
    runs = {name: lambda name=name: ran.append(name) for name in "ab"}
    found = run_in_turn(
        runs, budget_s=0, rounds=(1, 1), most_repeats={"b": 2}, warm_up=warm_up, clock=lambda: next(now) * 0.002
    )
    assert (ran.count("a"), ran.count("b")) == (1 + 5 + 2 * warm_up, 1 + 2 + 2 * warm_up)
    assert found["a"] == [pytest.approx(0.002 / 5)]


def test_a_slow_probe_stays_small():
    def make(size):
        return Probe(lambda: time.sleep(0.05 if size == 512 else 0.0), float(size))

    assert large_enough(make, 1024).amount == 512
    assert large_enough(lambda size: Probe(lambda: None, float(size)), 1024).amount == 1024


def test_a_difference_is_a_share_of_the_largest_value():
    ours = [np.array([1.0, -4.0]), np.array([2.0])]
    assert difference(ours, ours) == 0
    assert difference(ours, [np.array([1.0, -3.0]), np.array([2.0])]) == 0.25
    assert difference(ours, [np.array([1.0, np.nan]), np.array([2.0])]) == math.inf
    assert difference(ours, ours[:1]) == difference(ours, [np.ones((1, 2)), np.ones(1)]) == math.inf


def test_the_exponent_is_that_of_the_larger_half():
    sizes = [1, 2, 4, 8, 16]
    assert exponent(sizes, [size**1.5 for size in sizes]) == pytest.approx(1.5)
    assert exponent(sizes, [100, 100, 16, 64, 256]) == pytest.approx(2.0)
    assert exponent([1, 2], [3.0, 12.0]) == pytest.approx(2.0)
    assert exponent([1], [3.0]) is exponent([1, 2], [0.0, 1.0]) is None


def test_growth_is_told_over_tokens_and_over_sequences():
    found = {(line["framework"], line["name"], line["of"], line["over"]): line["exponent"] for line in growth(GROWING)}
    assert len(found) == 2 * 2 * 2 * 2
    for framework, peer in (("jax", "jax.nn"), ("torch", "SDPA")):
        assert found[framework, OURS, "time", "S"] == pytest.approx(2.0)
        assert found[framework, peer, "time", "S"] == pytest.approx(2.0)
        assert found[framework, OURS, "time", "B"] == pytest.approx(1.0)
        assert found[framework, OURS, "memory", "S"] == pytest.approx(1.0)
        assert found[framework, peer, "memory", "B"] == pytest.approx(0.0)


def test_each_kind_of_work_grows_by_itself():
    steps = [
        Row("growth-long decode", "jax", [1, s, 64], "float32", s * 1e-3, group="growth-long", axes="B S E")
        for s in (1024, 2048, 4096)
    ]
    found = {
        line["what"]: (line["over"], line["exponent"]) for line in growth([*GROWING, *steps]) if line["of"] == "time"
    }
    assert found["growth-long decode"] == ("S", pytest.approx(1.0))
    assert found.keys() == {"growth core causal forward", "growth-long decode"}


# ---- What is measured ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"quick": True}, {"long": True}], ids=["all", "quick", "long"])
def test_the_plan_has_work_of_every_group_and_nothing_twice(options):
    works = plan(parity_lab.bench.GROUPS, ["float32"], **options)
    assert {work.group for work in works} == set(parity_lab.bench.GROUPS) - {"import", "convert"}
    assert len({(work.what, *work.shape) for work in works}) == len(works)


def test_the_plan_covers_what_there_is_to_compare():
    works = plan(parity_lab.bench.GROUPS, ["float32"])
    whats = {work.what for work in works}
    hidden = {"full", "causal", "padded", "causal+padded"}
    assert whats >= {f"layer {which} forward" for which in hidden} | {"layer causal with weights forward"}
    assert whats >= {f"{kind} causal forward+backward" for kind in ("core", "layer", "memory core", "memory layer")}
    assert {tuple(work.shape[:2]) for work in works if work.what == "decode"} == {
        (1, 1024),
        (1, 4096),
        (8, 1024),
        (8, 4096),
    }
    assert [max(work.seq_len for work in plan(["growth"], ["float32"], **o)) for o in ({}, {"long": True})] == [
        4096,
        16384,
    ]
    long = {(work.what, work.seq_len) for work in plan(["growth-long"], ["float32"])}
    assert {(f"growth-long {what}", 131072) for what in ("core causal+window 512 forward", "decode")} <= long


@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_scores_that_do_not_fit_are_left_out_with_the_reason(framework, monkeypatch):
    monkeypatch.setattr("parity_lab.bench.work.MOST_SCORES", 8**2 - 1)
    work = Work("growth-long", "core", 1, 8, 1, 8, is_causal=True, window_size=2)
    (row,) = bench_work(work, parity_lab.bench.open_sides([framework], "cpu")[0], **ONCE)
    assert row.ours_ms is not None
    assert row.peers == {}
    assert len(row.left_out) == 2
    assert all("Refusal: scores" in reason or "ValueError: scores" in reason for reason in row.left_out.values())


def test_the_limit_counts_what_is_seen():
    core = Work("cores", "core", 2, 4, 3, 8)
    assert core.flops == 2 * (2 * 2 * 4 * 4 * 8) * 3  # multiply and add; two products
    assert replace(core, is_causal=True).flops == core.flops * (1 + 2 + 3 + 4) / 16
    assert replace(core, is_padded=True).lengths == [4, 2]
    assert replace(core, is_padded=True).flops == core.flops * (16 + 8) / 32
    assert replace(core, is_padded=True, is_causal=True).flops == core.flops * (10 + 1 + 2 + 2 + 2) / 32
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


def test_what_computes_something_else_is_not_timed():
    wrong = ready(np.ones(3) * 1.1)
    side = Side(**{OURS: np.ones(3), "right": np.ones(3), "wrong": wrong, "absent": ImportError("not installed")})
    (row,) = bench_work(Work("cores", "core", 1, 2, **TINY), {"jax": side}, **ONCE)
    assert list(row.peers) == ["right"]
    assert row.left_out["wrong"].startswith("its result differs by 1.0e-01")
    assert row.left_out["absent"] == "ImportError: not installed"


def test_the_other_framework_is_shown_and_does_not_count():
    sides = {"jax": Side(**{OURS: 1.0, "jax.nn": 1.0}), "torch": Side(**{OURS: 1.0, "SDPA": 1.0})}
    row, other = bench_work(Work("cores", "core", 1, 2, **TINY), sides, **ONCE)
    assert (list(row.peers), row.not_counted, row.best_peer) == (["jax.nn", "torch SDPA"], ["torch SDPA"], "jax.nn")
    assert (list(other.peers), other.not_counted) == (["SDPA"], [])


def test_what_ours_cannot_do_is_an_error_that_names_it():
    with pytest.raises(RuntimeError, match=r"core full forward \[1, 2, 2, 8\] .*TypeError: no"):
        bench_work(Work("cores", "core", 1, 2, **TINY), {"jax": Side(**{OURS: TypeError("no")})}, **ONCE)


def test_memory_alone_is_measured_without_a_run():
    def never():
        raise AssertionError("not to be run")

    ours, peer = (Contender(never, lambda found: [], lambda peak=peak: peak) for peak in (100, 400))
    work = Work("memory", "core", 1, 2, **TINY, is_timed=False)
    (row,) = bench_work(work, {"jax": Side(**{OURS: ours, "peer": peer})}, **ONCE)
    assert (row.peak_bytes, row.peers_peak_bytes, row.ours_ms, row.ratio) == (100, {"peer": 400}, None, None)


# ---- All contenders --------------------------------------------------------------------------------------------------

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
FIRST = [WORKS[0], *WORKS[3:6]]
"""One of each kind."""

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
@pytest.mark.parametrize("work", WORKS, ids=lambda work: f"{work.what} {work.dtype}".replace(" ", "-"))
def test_every_contender_computes_the_same(sides, as_users_have_it, work):
    rows = bench_work(work, sides, **ONCE)
    assert rows
    for row in rows:
        expected = EXPECTED[row.framework][work.kind]
        if work.group == "varlen":
            expected = {name.replace("SDPA", "masked SDPA") for name in expected if name != "torch SDPA"}
        if work.need_weights:  # other ways by hand
            expected = {name.replace("SDPA by", "softmax by").replace("jax.nn by", "softmax by") for name in expected}
        assert {*row.peers, *row.left_out} == expected
        # Keras is there on one of the frameworks; Equinox keeps its attention weights.
        assert set(row.left_out) <= {"keras"} | ({"equinox"} if work.need_weights else set()), row.left_out
        assert row.best_peer in row.peers
        assert row.limit_ms > 0
        assert isinstance(row.peak_bytes, int)
        assert set(row.peers_peak_bytes) == set(row.peers)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("options", [{"window_size": 5}, {"is_padded": True}, {"num_segments": 3}], ids=str)
def test_flex_attention_hides_what_the_mask_hides(monkeypatch, options):
    import torch

    from parity_lab.bench.torch import Side as TorchSide
    from parity_lab.bench.torch import _Core

    # FlexAttention itself also compiles, with options.
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **options: compiled(f, **options) if options else f)
    work = Work("varlen", "core", 2, 40, 2, 16, is_causal=True, **options)
    core = _Core(TorchSide(), work, parity_lab.bench.draw_inputs(work))
    heads = [core.inputs[name] for name in ("query", "key", "value")]
    found, expected = (attend(*heads, is_causal=True) for attend in (core.flex_attention(), core.masked_sdpa()))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_operations_are_counted_for_each_contender(sides, framework):
    work = Work("cores", "core", 1, 9, **TINY, is_causal=True)
    (row,) = bench_work(work, {framework: sides[framework]}, **ONCE, profile=True)
    assert set(row.operations) == {OURS, *row.peers}
    assert all(counts.kernels and counts.syncs == 0 for counts in row.operations.values())
    assert json.dumps(row.to_dict()["operations"][OURS]["kernels"])
    (unprofiled,) = bench_work(work, {framework: sides[framework]}, **ONCE)
    assert unprofiled.operations == {}


def test_torch_memory_is_what_a_run_allocates_beyond_its_result(sides):
    import torch

    def run():
        large = torch.ones(1000, 100)
        return [large[0] + large.sum(0)]

    # 400 000 bytes for the large one; the sum of the rows, 400, is there when the result is made.
    assert sides["torch"].peak_bytes(run) == pytest.approx(400_400, abs=1000)


@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_the_settings_that_change_the_speed_are_told(sides, framework):
    assert sides[framework].settings()["device"]
    assert json.dumps(sides[framework].settings())


@pytest.mark.thorough
def test_imports_and_conversion_have_rows_of_the_same_kind():
    from parity_lab.bench.conversion import bench_conversion
    from parity_lab.bench.imports import bench_imports

    module, help_ = bench_imports(["torch"], repeats=1)
    (conversion,) = bench_conversion(num_layers=1, repeats=1)
    assert (module.what, module.best_peer) == ("import torch, mha_torch", "import torch")
    assert module.extra_ms == pytest.approx(module.ours_ms - module.peers["import torch"])
    assert (help_.what, help_.best_peer, list(help_.peers)) == ("mha-parity --help", None, ["python -c pass"])
    assert (conversion.what, conversion.best_peer) == ("convert", "load_file, save_file")
    assert conversion.limit_ratio > 0


# ---- The command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny_plan(monkeypatch):
    """In place of the planned work: a core, two of the growth, and one for its memory."""
    options = {"is_causal": True, **TINY}
    works = [
        Work("cores", "core", 1, 8, **options),
        *(Work("growth", "core", 1, seq_len, **options) for seq_len in (8, 16)),
        Work("memory", "core", 1, 8, **options, is_timed=False),
    ]
    monkeypatch.setattr(
        parity_lab.bench, "plan", lambda groups, *a, **o: [work for work in works if work.group in groups]
    )
    return works


@pytest.mark.costly("a whole benchmark, and a picture")
def test_the_command_writes_a_table_json_and_a_picture(tiny_plan, as_users_have_it, tmp_path, capsys):
    json_path, plot_path = tmp_path / "bench.json", tmp_path / "bench.svg"
    what = ["--suites", "cores,growth,memory", "--quick"]
    assert main(["bench", *what, "--json", str(json_path), "--plot", str(plot_path)]) == 0
    out = capsys.readouterr().out
    assert "JAX: times in ms" in out
    assert "jax.nn" in out
    assert "Growth: the exponent" in out
    content = json.loads(json_path.read_text())
    assert content["schema"] == "mha-parity/bench"
    assert set(content["environment"]) >= {"python", "platform", "cpus", "packages", "backends", "settings"}
    assert len(content["rows"]) == 2 * len(tiny_plan)
    for row in content["rows"]:
        assert set(row) == {field.name for field in fields(Row)} > {*KEYS, "peak_bytes"}
        assert isinstance(row["what"], str)
        assert isinstance(row["shape"], list)
        assert isinstance(row["peak_bytes"], int)
        assert isinstance(row["ours_ms"], float) != (row["group"] == "memory")
        assert all(isinstance(ms, float) for ms in row["peers"].values())
    assert {line["over"] for line in content["growth"]} == {"S"}
    words = [text.text for text in ElementTree.parse(plot_path).iter("{http://www.w3.org/2000/svg}text")]
    assert {"mha_jax", "mha_torch", "jax: jax.nn", "torch: SDPA", "sequence length"} <= set(words)


@pytest.fixture(scope="module")
def gemma_folder(tmp_path_factory):
    """Layers of two kinds, 0 and 2 alike."""
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
def test_the_layers_of_a_model_are_measured_beside_its_own_modules(gemma_folder, as_users_have_it, tmp_path, capsys):
    path = tmp_path / "bench.json"
    assert main(["bench", "--model", str(gemma_folder), "--quick", "--json", str(path)]) == 0
    content = json.loads(path.read_text())
    of_torch = [row for row in content["rows"] if row["framework"] == "torch"]
    whats = ["layers 0, 2 layer causal forward", "layers 0, 2 decode", "layer 1 layer causal forward", "layer 1 decode"]
    assert [row["what"] for row in of_torch] == whats
    assert [row["shape"] for row in of_torch] == [[1, 256, 32]] * 4
    assert [list(row["peers"]) for row in of_torch] == [
        ["transformers"],
        [],
        ["transformers"],
        [],
    ]  # it is not left out
    of_jax = [row for row in content["rows"] if row["framework"] == "jax"]
    assert [row["what"] for row in of_jax] == whats
    assert all(row["best_peer"] is None for row in of_jax)  # another framework's does not count
    assert content["left_out"] == []
    assert "transformers" in content["names"]["torch"]


def test_some_layers_of_a_model_may_be_measured_alone(gemma_folder, as_users_have_it):
    found = bench_model(gemma_folder, ["torch"], layers=[1], quick=True)
    assert [row.what for row in found.rows] == ["layer 1 layer causal forward", "layer 1 decode"]


def test_the_limit_of_a_model_s_layer_follows_from_its_spec():
    spec = AttentionSpec(32, 4, num_kv_heads=2, window_size=4, qkv_bias=False, out_bias=False)
    work = Work("model", "layer", 1, 16, is_causal=True, layer=spec)
    matrices = 32 * (32 + 16 + 16 + 32)
    assert work.flops == 2 * 16 * matrices + 2 * (1 + 2 + 3 + 13 * 4) * (32 + 32)
    assert replace(work, kind="decode").nbytes == 4 * (matrices + 2 * 16 * 16)


def test_one_framework_may_be_measured_alone(tiny_plan, as_users_have_it):
    found = bench(["cores"], ["torch"])
    assert [row.framework for row in found.rows] == ["torch"]
    assert list(found.environment["backends"]) == ["torch"]
    assert found.names["torch"]["SDPA"] == "torch.nn.functional.scaled_dot_product_attention"


@pytest.mark.parametrize(
    ("arguments", "refusal"),
    [
        (["--suites", "cores,speed"], refuses("--suites", {"--suites": "speed"})),
        (["--backends", "tt"], refuses("--backends", {"--backends": "tt"})),
        (["--dtypes", "float64"], refuses("--dtypes", {"--dtypes": "float64"})),
        (["--device", "tpu"], refuses("--device", {"--device": "tpu"})),
        (["--plot", "a.png", "--suites", "cores"], refuses("--plot", {"--suites": "cores"})),
        (["--layers", "0", "--num-heads", "2"], refuses("--layers, --num-heads")),
        (["--model", "x", "--suites", "cores"], refuses("--model")),
        (["--plot", "a.pdf"], refuses("--plot", {"--plot": "a.pdf"})),
        (["--json", "/nowhere/a.json"], refuses("--json", "/nowhere/a.json: ")),
    ],
)
def test_bad_usage_is_refused_before_the_work(capsys, arguments, refusal):
    assert main(["bench", *arguments]) == 2
    assert refusal.is_printed_in(capsys.readouterr().err)


def test_a_framework_that_is_not_there_is_refused_by_name_and_left_out_otherwise(monkeypatch, capsys):
    why = parity.backends.why_missing
    missing = "torch needs torch, not installed here"
    monkeypatch.setattr(parity_lab.bench, "why_missing", lambda name: missing if name == "torch" else why(name))
    assert main(["bench", "--backends", "torch"]) == 2
    assert missing in capsys.readouterr().err
    assert parity_lab.bench.count_rows(["import"]) == 1 + 1  # of JAX, and the command's own


def test_a_device_that_is_not_there_is_refused(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["bench", "--device", "cuda"]) == 2
    assert refuses("a GPU", "torch").is_printed_in(capsys.readouterr().err)


@pytest.mark.costly("modules that a new process imports")
def test_help_of_the_command_needs_no_framework():
    program = "import sys; from parity.cli.main import main\ntry: main(['bench', '--help'])\nexcept SystemExit: pass\n"
    program += "assert not {'jax', 'torch', 'numpy', 'rich'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--quick" in done.stdout


# ---- What is shown ---------------------------------------------------------------------------------------------------


def test_lines_in_a_pipe_are_plain_and_tell_what_was_left_out(capsys):
    slow = {"left_out": {"keras": "ImportError: no"}, "ratio": 0.5, "best_peer": "a peer of a long name"}
    rows = [
        Row("layer full forward", "jax", [1, 256, 1024], "float32", 2.0, {"a peer of a long name": 1.0}, **slow),
        replace(GROWING[0], left_out={"keras": "ImportError: no"}),
        Row("import torch, mha_torch", "torch", [], "", 900.0, {"import torch": 890.0}, extra_ms=10.0),
        Row("memory core causal forward", "torch", [1, 8, 64, 64], "float32", peers_peak_bytes={"SDPA": 2_000_000}),
    ]
    print_bench(Bench(rows, {}), console())
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    assert all(line.isprintable() for line in lines)
    text = " ".join(" ".join(lines).split())
    assert "left out: keras (jax, 2 rows): ImportError: no" in text
    assert "ours takes 10 more" in text
    assert "SDPA 2.0 MB" in text


def test_kernels_are_printed_without_their_templates(capsys):
    kernels = {"void pytorch_flash::flash_fwd_kernel<Traits<64, 128>>(Params)": 2, "aten::add": 1}
    counts = {OURS: Operations(kernels, 3, 4), "SDPA": Operations({"aten::mul": 1}, 0, 0)}
    print_bench(Bench([timed(1.0, operations=counts)], {}), console())
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [OURS, "3", "3", "4", "2", "flash_fwd_kernel,", "1", "add"] in [line[-8:] for line in lines]
    assert ["SDPA", "1", "0", "0", "1", "mul"] in lines


def test_a_line_of_the_plot_has_the_lengths_of_the_smallest_batch():
    lines = {(line["framework"], line["name"]): line for line in lines_of(GROWING)}
    assert set(lines) == {("jax", OURS), ("jax", "jax.nn"), ("torch", OURS), ("torch", "SDPA")}
    assert list(lines["jax", OURS]["time"]) == [128, 256, 512, 1024]
    assert lines["torch", "SDPA"]["memory"][256] == 256 / 1e6


def test_what_another_framework_draws_is_not_drawn_again():
    name, shape, size = "torch SDPA", [1, 8, 128, 64], 128
    rows = [growing("jax", shape, 1.0, size, peers={name: 2.0}, peers_peak_bytes={name: size}), *GROWING]
    assert name not in {line["name"] for line in lines_of(rows)}
    assert name in {line["name"] for line in lines_of(rows[:1])}


def test_a_plot_is_written_whole_or_not_at_all(tmp_path):
    plot_growth(Bench(GROWING, {}), tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    with refuses("a plot", "none"):
        plot_growth(Bench([], {}), tmp_path / "b.png")
    assert os.listdir(tmp_path) == ["a.png"]


# ---- Two files -------------------------------------------------------------------------------------------------------


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


def test_compare_tells_what_became_slower(compare, tmp_path, capsys):
    before = written(tmp_path / "a.json", timed(1.0), timed(2.0, "decode"), timed(1.0, "gone"))
    after = written(tmp_path / "b.json", timed(1.2), timed(1.0, "decode"))
    assert compare.main([before, after]) == 1
    out = capsys.readouterr().out
    first = next(line for line in out.splitlines() if line.startswith("core"))
    assert first.split() == ["core", "full", "forward", "jax", "1x2x3x4", "float32", "1", "1.2", "1.200", "slower"]
    assert f"only in {before}: 1 rows, such as gone" in out
    assert "2 rows compared, 1 worse" in out
    assert compare.main([before, after, "--allow", "0.3"]) == 0


def test_compare_may_take_times_as_shares_of_the_limit(compare, tmp_path):
    before = written(tmp_path / "a.json", timed(1.0, limit_ratio=2.0))
    after = written(tmp_path / "b.json", timed(5.0, limit_ratio=2.0))
    assert [compare.main([before, after, *extra]) for extra in ([], ["--relative"])] == [1, 0]


def test_compare_judges_memory_where_there_is_no_time(compare, tmp_path, capsys):
    before = written(tmp_path / "a.json", timed(None, peak_bytes=10**6))
    after = written(tmp_path / "b.json", timed(None, peak_bytes=2 * 10**6))
    assert compare.main([before, after]) == 1
    assert "larger" in capsys.readouterr().out


@pytest.mark.parametrize(
    "content",
    ["", "[]", '{"schema": "mha-parity/bench", "version": 2, "rows": []}', json.dumps({**HEAD, "rows": []}), None],
)
def test_compare_refuses_other_files(compare, tmp_path, capsys, content):
    path, good = tmp_path / "a.json", written(tmp_path / "b.json", timed(1.0))
    if content is not None:
        path.write_text(content)
    assert compare.main([good, str(path)]) == 2
    assert capsys.readouterr().err.startswith("compare: ")

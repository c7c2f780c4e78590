"""The main job: every case on every backend, stage by stage, in every dtype, gradients included."""

import importlib
import importlib.util
import json
import os
import subprocess
import sys
import zlib

import numpy as np
import pytest
import xmlschema
from helpers import DATA
from helpers.input_errors import rejects
from helpers.samples import sample

import mha_jax
import mha_torch.plain
import parity.measure.backends.torch
import parity.use.running.run
from mha_jax.kernels.fused import FusedAttention
from mha_spec import Alibi, Gate, Norm, RelativeBias, Temperature
from parity import CASES, AttentionSpec, Case, make_problem, run_cases
from parity.measure.backends import BACKENDS, backend_of, driver, load_backend
from parity.measure.backends import jax as jax_backend
from parity.measure.backends import torch as port
from parity.measure.backends.numerics import environment, on_device
from parity.measure.backends.record import record
from parity.measure.core.cases import QUICK, random_case
from parity.measure.core.stages import run_steps, stage_named
from parity.measure.core.trace import Reference, compare_trace
from parity.use.cli.main import main
from parity.use.reporting.html import html_page
from parity.use.reporting.junit import junit_xml
from parity.use.running.report import SkippedCase


def failures(case, backend, dtype, with_gradients):
    expected = Reference(
        make_problem(case, dtype), with_gradients=with_gradients and case.has_gradients
    )
    return [
        str(comparison)
        for comparison in compare_trace(record(backend, expected), expected)
        if not comparison.passed
    ]


# Compilation of gradients takes as long as everything else. JAX derives all except the gradients of
# attention in blocks, which depend on scores and masks: cases that differ in these are
# differentiated.
IN_BLOCKS = {
    "window-far",
    "chunk-both-ways",
    "soft-cap-bias",
    "sinks",
    "alibi",
    "relative-bias",
    "value-head-dim",
    "cross",
}

FINITE = [name for name, case in CASES.items() if case.not_finite is None]
NAN_CASES = [name for name in CASES if name not in FINITE]
"""Cases for test_nan_positions_match_reference."""


# JAX compiles each stage of each case. `make parity`, which CI also runs, has a case for each
# feature of a layer; here one layer combines several features, and only the most telling cases are
# differentiated.
MANY_AT_ONCE = {
    "masks-and-scores": AttentionSpec(
        32,
        4,
        num_kv_heads=2,
        value_head_dim=12,
        window_size=3,
        alibi=Alibi(),
        soft_cap=3.0,
        sinks=True,
        temperature=Temperature(2, 0.5),
        clip_qkv=1.0,
        qk_norm=Norm(over="width"),
        gate=Gate(),
    ),
    "packed": AttentionSpec(
        32, 4, fused_qkv=True, out_proj=False, chunk_size=3, relative_bias=RelativeBias(8, 8)
    ),
}
IN_JAX = {"causal-padding-empty", "decode-gqa-rope"}
DIFFERENTIATED = {"bias-causal", "qk-norm"}


@pytest.mark.costly("JAX compiles every stage of a case, with gradients")
@pytest.mark.parametrize("name", sorted(IN_JAX | DIFFERENTIATED))
def test_jax_agrees_with_the_reference(name):
    """JAX agrees with the reference in float32, in two cases including gradients."""
    assert failures(CASES[name], "jax", "float32", with_gradients=name in DIFFERENTIATED) == []


@pytest.mark.parametrize("name", MANY_AT_ONCE)
def test_jax_agrees_on_combined_features(name):
    """JAX agrees with the reference on layers that combine many features."""
    case = Case(name, MANY_AT_ONCE[name], "many parts at once", seq_len=7, is_causal=True)
    assert failures(case, "jax", "float32", with_gradients=False) == []


@pytest.mark.thorough
@pytest.mark.parametrize("name", sorted(IN_BLOCKS))
def test_jax_gradients_match_reference(name):
    """JAX agrees with the reference, gradients included, in cases that differ in blocks."""
    assert failures(CASES[name], "jax", "float32", with_gradients=True) == []


# Cases whose steps depend on positions in a special way. Other steps are the same as without a
# cache.
DECODE = {
    "decode-dynamic",
    "decode-chunk",
    "decode-relative-bias",
    "decode-temperature",
    "decode-latent-yarn",
}


def is_computed_elsewhere(name):
    """Return whether another test or `make parity` runs the case, or its steps are the same as
    without a cache.
    """
    others = IN_JAX | DIFFERENTIATED | IN_BLOCKS | QUICK.keys()
    return (
        CASES[name].trained is not None
        or name in others
        or (name.startswith("decode-") and name not in DECODE)
    )


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", [name for name in FINITE if not is_computed_elsewhere(name)][::3]
)  # torch runs all
def test_jax_agrees_in_further_cases(name):
    """JAX agrees with the reference in every third case that no other test runs."""
    assert failures(CASES[name], "jax", "float32", with_gradients=False) == []


@pytest.mark.costly("XLA reads its flags once in a process")
@pytest.mark.thorough
def test_jax_agrees_with_default_compilation(tmp_path):
    """JAX agrees on a trained layer, gradients included, if compiled with XLA's default flags."""
    # With conftest's quick compilation, products are summed from first to last term, which matters
    # in wide layers.
    path, case = tmp_path / "results.json", "trained-smollm2-causal"
    command = [
        "-m",
        "parity",
        "run",
        "--backends",
        "jax",
        "--cases",
        case,
        "--grad",
        "--json",
        path,
    ]
    subprocess.run(
        [sys.executable, *command],
        env=os.environ | {"XLA_FLAGS": ""},
        check=True,
        capture_output=True,
    )
    results = json.loads(path.read_text())["results"]
    assert {(result["case"], result["status"]) for result in results} == {(case, "passed")}


# Compilation takes most of JAX's time, so its other dtypes run a selection of cases: narrow ones
# the cases in which large numbers or many terms lose precision, float64 the cases in which a part
# may be computed in less.
IN_DTYPES = {
    "bfloat16": [
        "causal-padding-empty",
        "bias-causal",
        "cross",
        "rope-gqa",
        "large-logits",
        "ragged",
    ],
    "float16": ["causal-padding-empty", "large-logits", "trained-anarcii-cross"],
    "float64": ["bias-causal", "cross", "rope-gqa", "ragged", "trained-anarcii-cross"],
}


@pytest.mark.costly("JAX compiles every stage of a case")
@sample(
    dtype=["bfloat16"], name=IN_DTYPES["bfloat16"][:1]
)  # make test-thorough has the other dtypes
@pytest.mark.parametrize(
    ("dtype", "name"),
    [(dtype, name) for dtype, names in IN_DTYPES.items() for name in names[:3]],
)
def test_jax_agrees_in_other_dtypes(name, dtype):
    """JAX agrees in bfloat16, float16 and float64; the first case of each includes gradients."""
    assert failures(CASES[name], "jax", dtype, with_gradients=name == IN_DTYPES[dtype][0]) == []


# All cases in float32, and each in one more dtype, which depends on its name.
IN_TORCH = [("float32", name) for name in CASES] + [
    (dtype, name) for dtype in IN_DTYPES for name in IN_DTYPES[dtype]
]
IN_TORCH += [(case.dtype, name) for name, case in CASES.items() if case.dtype is not None]
IN_TURN = [([*IN_DTYPES][zlib.crc32(name.encode()) % len(IN_DTYPES)], name) for name in CASES]


@sample(48, where=lambda dtype, name: (dtype, name) in IN_TORCH)
@pytest.mark.parametrize(("dtype", "name"), list(dict.fromkeys([*IN_TORCH, *IN_TURN])))
def test_torch_agrees_with_the_reference(name, dtype):
    """Torch agrees with the reference, gradients included, in all
    cases and dtypes of IN_TORCH and IN_TURN.
    """
    assert failures(CASES[name], "torch", dtype, with_gradients=True) == []


@sample(8)
@pytest.mark.parametrize("seed", range(6, 26))
def test_torch_agrees_on_more_random_cases(seed):
    """Torch agrees with the reference, gradients included, in 20 random cases."""
    assert failures(random_case(seed), "torch", "float32", with_gradients=True) == []


def test_every_stage_of_a_case_is_compared():
    """Comparison covers exactly all stages of attention, of the
    module and fused paths, and all gradients.
    """
    report = run_cases([CASES["bias-causal"]], ["torch"], with_gradients=True)
    stages = {comparison.stage for comparison in report.comparisons}
    forward = {"mask", "q", "k", "v", "scores", "attn_weights", "context", "output"}
    modules = {"module.attn_weights", "module.output", "fused.output"}
    weights = {
        f"{name}_proj.{leaf}" for name in ("q", "k", "v", "out") for leaf in ("weight", "bias")
    }
    gradients = {
        f"{path}grad.{name}" for path in ("", "fused.") for name in {*weights, "query", "bias"}
    }
    assert stages == forward | modules | gradients


def test_every_step_with_cache_is_compared():
    """Each of four steps is compared in every stage,
    including keys, values and lengths of the cache.
    """
    report = run_cases([CASES["decode"]], ["torch"])
    stages = {comparison.stage for comparison in report.comparisons}
    per_step = {
        "mask",
        "q",
        "k",
        "v",
        "cache.keys",
        "cache.values",
        "cache.lengths",
        "scores",
        "attn_weights",
    }
    per_step |= {"context", "output", "module.output", "plain.output"}
    per_step |= {"module.cache.keys", "module.cache.values", "module.cache.lengths"}
    assert stages == {f"step{index}.{stage}" for index in range(4) for stage in per_step}


def test_wrong_tutorial_is_named(monkeypatch):
    """A wrong mask of the tutorial fails at `plain.output` alone; cases that it cannot express do
    not have that stage.
    """
    create_causal_mask = mha_torch.plain.create_causal_mask
    monkeypatch.setattr(
        mha_torch.plain, "create_causal_mask", lambda *sizes, device: ~create_causal_mask(*sizes)
    )
    report = run_cases([CASES["causal"], CASES["rope"]], ["torch"])
    assert [(c.case, c.stage) for c in report.failed] == [("causal", "plain.output")]
    assert [c.case for c in report.comparisons if c.stage == "plain.output"] == ["causal"]
    assert report.skipped_cases == []


BLOCKS = {
    "bias-causal": {"blocks.output", "blocks.grad.query"},
    "decode": {"step0.blocks.output", "step3.blocks.output"},
}


@pytest.mark.parametrize("seed", [370, 514, 937])
def test_gradients_with_two_features_pass(seed):
    """With heads of two features, scores are large sums of two terms, which differ by the order of
    factors alone; gradients in float64 still agree with the reference.
    """
    case = random_case(seed)
    assert case.spec.head_dim == 2
    assert failures(case, "torch", "float64", with_gradients=True) == []


@pytest.mark.costly("JAX compiles every stage of a case, with gradients")
@sample(1)
@pytest.mark.parametrize("name", BLOCKS)
def test_jax_also_runs_in_small_blocks(name):
    """Compared with torch, JAX has additional stages, all of which are stages of small blocks."""
    report = run_cases([CASES[name]], ["jax", "torch"], with_gradients=True)
    stages = {
        library: {c.stage for c in report.comparisons if c.backend == library}
        for library in ("jax", "torch")
    }
    assert stages["jax"] - stages["torch"] == {
        stage for stage in stages["jax"] if "blocks." in stage
    }
    assert stages["jax"] - stages["torch"] >= BLOCKS[name]
    assert stages["torch"] < stages["jax"]


@pytest.mark.costly("JAX compiles blocks of the usual size")
def test_jax_fused_path_has_default_blocks(monkeypatch):
    """Forward passes and gradients run JAX's fused path
    with default blocks, then with small blocks.
    """
    taken, original = [], FusedAttention.__call__

    def note(kernel, *arrays):
        taken.append(kernel)
        return original(kernel, *arrays)

    monkeypatch.setattr(FusedAttention, "__call__", note)
    problem = make_problem(CASES["causal"], "float32")
    run_steps(driver.steps(jax_backend, problem))
    driver.gradients(jax_backend, problem)
    assert taken == 2 * [mha_jax.fused.attend, jax_backend.SMALL_BLOCKS]


def test_missing_blocks_stage_is_a_failure():
    """A trace of JAX that lacks the stage of small blocks fails that stage alone."""
    expected = Reference(make_problem(CASES["full"], "float32"))
    trace = record("jax", expected)
    del trace.accumulated["blocks.output"]
    (failed,) = (
        comparison for comparison in compare_trace(trace, expected) if not comparison.passed
    )
    assert (failed.stage, failed.reason) == ("blocks.output", "the trace lacks this stage")


def test_compared_cache_is_not_empty():
    """The reference of a ragged case has nonzero cached keys, and final lengths of 6, 7 and 4."""
    expected = Reference(make_problem(CASES["ragged"], "float32")).accumulated
    assert np.count_nonzero(expected["step0.cache.keys"]) > 0
    assert expected["step3.cache.lengths"].tolist() == [6, 7, 4]


@pytest.mark.costly("JAX compiles every stage of two cases")
@sample(jax=0)
def test_backend_record_is_correct(sibling):
    """The record of a backend names its package, its array
    module and exactly the paths it computes.
    """
    known, port = BACKENDS[sibling.name], load_backend(sibling.name)
    assert known.sibling == port.SIBLING.__name__
    assert all(
        hasattr(importlib.import_module(known.arrays), name) for name in ("where", "triu", "ones")
    )
    with_cache, without = (make_problem(name, "float32") for name in ("decode", "textbook"))
    stages = [
        *record(known.name, Reference(with_cache)).local,
        *record(known.name, Reference(without)).local,
    ]
    assert {stage_named(stage).path for stage in stages} == {"", *known.paths}
    assert {"module", *port.GRADIENT_PATHS} == {"", *known.paths}


def test_backend_of_value_is_found(sibling):
    """`backend_of` finds the backend of a module or of a derived class, and None for a NumPy array
    or a layer of the tutorial, which has no specification.
    """
    module = sibling.module("MultiHeadAttention", AttentionSpec(8, 2))
    derived = type("Mine", (type(module),), {})
    assert backend_of(module) == sibling.name
    assert backend_of(object.__new__(derived)) == sibling.name
    assert backend_of(np.ones(3)) is None
    assert backend_of(object.__new__(sibling.package.plain.MultiHeadAttention)) is None


def test_missing_backend_is_skipped(let_need):
    """A backend that is not installed is skipped, with the missing package as the reason."""
    let_need("tt", "a_package_that_is_not_there")
    report = run_cases([CASES["textbook"]])
    assert report.skipped == {"tt": "tt needs a_package_that_is_not_there, not installed here"}
    assert report.summary["skipped"] == 1


def test_requested_missing_backend_raises(let_need):
    """A missing backend that is requested by name raises `ModuleNotFoundError`."""
    let_need("tt", "a_package_that_is_not_there")
    with pytest.raises(ModuleNotFoundError, match="tt needs a_package_that_is_not_there"):
        run_cases([CASES["textbook"]], ["jax", "tt"])


@pytest.fixture
def poor_torch(monkeypatch):
    """Make torch a backend without gradients and without float16."""
    monkeypatch.setattr(
        parity.measure.backends.torch,
        "why_skipped",
        lambda case, dtype: "no such dtype" if dtype == "float16" else None,
    )
    monkeypatch.setattr(parity.measure.backends.torch, "GRADIENT_PATHS", ())


@pytest.mark.usefixtures("poor_torch")
def test_unsupported_case_is_skipped():
    """A case that a backend cannot run is skipped with its
    reason, in the summary and in the results.
    """
    report = run_cases([CASES["textbook"]], ["jax", "torch"], ["float32", "float16"])
    assert report.skipped_cases == [SkippedCase("textbook", "float16", "torch", "no such dtype")]
    assert report.summary == {"passed": 35, "failed": 0, "skipped": 1, "missing": 0}
    assert report.to_dict()["results"][-1] == {
        "case": "textbook",
        "backend": "torch",
        "dtype": "float16",
        "stage": None,
        "status": "skipped",
        "reason": "no such dtype",
    }


@pytest.mark.usefixtures("poor_torch")
def test_skips_are_counted_together(let_need):
    """A skipped backend and a skipped case count as two."""
    let_need("tt", "a_package_that_is_not_there")
    assert run_cases([CASES["textbook"]], dtypes=["float16"]).summary["skipped"] == 2


@pytest.mark.usefixtures("poor_torch")
def test_requested_backend_must_run_a_case(monkeypatch):
    """A requested backend that skips all cases raises an error before anything runs."""
    monkeypatch.setattr(parity.use.running.run, "record", None)  # nothing may run before the error
    with rejects("torch", "no such dtype"):
        run_cases([CASES["textbook"], CASES["large-logits-float16"]], ["jax", "torch"], ["float16"])


@pytest.mark.costly("JAX compiles every stage of a case")
@pytest.mark.usefixtures("poor_torch")
def test_backend_without_gradients_is_listed():
    """A backend without gradients is compared in all other stages; one entry
    lists what is missing, and the status is 2.
    """
    report = run_cases([CASES["textbook"], CASES["full"]], ["jax", "torch"], with_gradients=True)
    assert not report.failed
    assert {c.backend for c in report.comparisons if "grad." in c.stage} == {"jax"}
    assert (
        sum(c.backend == "torch" for c in report.comparisons) == 11 + 12
    )  # the tutorial expresses the second
    whose = [
        (skipped.case, skipped.backend, skipped.reason, skipped.stage)
        for skipped in report.skipped_cases
    ]
    assert whose == [
        (case, "torch", "torch has no gradients", "gradients") for case in ("textbook", "full")
    ]
    (entry,) = report.not_compared
    assert entry.what == "torch, gradients of 2 cases in float32"
    assert report.status == 2


def test_missing_gradients_are_failures(monkeypatch):
    """Gradients that a backend should return but does not are failures, each as a missing stage."""
    monkeypatch.setattr(driver, "gradients", lambda *problem: {})
    report = run_cases([CASES["textbook"]], ["torch"], with_gradients=True)
    assert {c.reason for c in report.failed} == {"the trace lacks this stage"}
    assert all("grad." in c.stage for c in report.failed)


def test_missing_ttnn_names_its_platforms(monkeypatch):
    """If ttnn is missing, the reason names the platforms for which it has wheels."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "ttnn" else find_spec(name)
    )
    reason = (
        "tt needs ttnn, not installed here; it has wheels for CPython 3.10 and 3.12 on x86-64 Linux"
    )
    assert parity.measure.backends.why_missing("tt") == reason


def test_raising_backend_fails_one_case(monkeypatch):
    """An exception in a backend fails its case in stage `run`, and the next case still passes."""
    original = parity.use.running.run.record

    def record_or_raise(backend, reference):
        if reference.problem.case.name == "full":
            raise RuntimeError("out of something")
        return original(backend, reference)

    monkeypatch.setattr(parity.use.running.run, "record", record_or_raise)
    report = run_cases([CASES["full"], CASES["causal"]], ["torch"])
    assert [(c.case, c.stage, c.reason) for c in report.failed] == [
        ("full", "run", "RuntimeError: out of something")
    ]
    assert report.summary["passed"] == 12


@pytest.mark.parametrize(
    ("arguments", "input_error"),
    [
        ({"cases": []}, rejects("there", "0 cases on ['jax', 'torch'] in ['float32']")),
        ({"dtypes": ["int8"]}, rejects("dtype", dtype="int8")),
        ({"dtypes": []}, rejects("there", f"{len(CASES)} cases on ['jax', 'torch'] in []")),
        ({"backends": ["numpy"]}, rejects("backend", backend="numpy")),
    ],
)
def test_run_without_cases_raises(arguments, input_error):
    """A run without cases or dtypes, or with unknown dtypes or backends, raises an error."""
    with input_error:
        run_cases(**arguments)


# In narrow dtypes JAX compiles one case of each kind.
NARROW_IN_JAX = "nan-visible-causal", "nan-hidden-norm", "nan-hidden-decode"


@sample(jax=0)
@pytest.mark.parametrize("name", NAN_CASES)
def test_nan_positions_match_reference(name, sibling):
    """Cases with NaN or infinity pass, gradients included, and their report is valid JSON."""
    dtypes = (
        ["float32", "bfloat16"] if sibling.name == "torch" or name in NARROW_IN_JAX else ["float32"]
    )
    report = run_cases([CASES[name]], [sibling.name], dtypes, with_gradients=True)
    assert {comparison.dtype for comparison in report.comparisons} == set(dtypes)
    assert report.failed == []
    json.dumps(report.to_dict(), allow_nan=False)


def test_swallowed_nan_is_a_failure(monkeypatch):
    """A NaN that a backend replaces with 0 fails its stage, with the number of elements, in the
    JSON, JUnit and HTML reports.
    """
    original = parity.use.running.run.record

    def record(backend, reference):
        trace = original(backend, reference)
        trace.accumulated["fused.output"] = np.nan_to_num(trace.accumulated["fused.output"])
        return trace

    monkeypatch.setattr(parity.use.running.run, "record", record)
    report = run_cases([CASES["nan-visible-causal"]], ["torch"])
    (failed,) = report.failed
    assert (failed.stage, failed.reason) == (
        "fused.output",
        "96 elements are not NaN where the reference is",
    )
    content = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert [result["status"] for result in content["results"]].count("failed") == 1
    xmlschema.XMLSchema(DATA / "junit.xsd").validate(junit_xml(report).decode())
    assert b"96 elements are not NaN" in html_page(report)


def test_uncompared_gradients_are_listed():
    """Gradients that are NaN throughout are listed as not
    compared, with their reason and status 0.
    """
    report = run_cases(
        [CASES["nan-visible-causal"], CASES["nan-hidden-cross"]], ["torch"], with_gradients=True
    )
    (entry,) = report.not_compared
    words = (entry.what, entry.reason, entry.labels)
    assert words == (
        "gradients of 1 case",
        "a visible NaN makes all of them NaN",
        ["nan-visible-causal"],
    )
    assert report.status == 0  # there is nothing to compare
    assert {c.case for c in report.comparisons if "grad." in c.stage} == {"nan-hidden-cross"}


def test_torch_uses_the_device_of_the_run():
    """Arrays and modules of torch are on the device of the
    run, and on the default device afterwards.
    """
    problem = make_problem(CASES["textbook"], "float32")
    with on_device("meta"):
        assert port.from_numpy(np.ones(2, np.float32)).is_meta
        assert {x.device.type for x in port.filled(problem).module.parameters()} == {"meta"}
        assert environment(["torch"])["backends"]["torch"]["device"] == "meta"
    assert not port.from_numpy(np.ones(2, np.float32)).is_meta


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--backends", "torch", "--device", "cuda:9"], ("--device cuda:9: ",)),
        (["--backends", "torch", "--device", "gpu"], ("--device gpu: ",)),
        (["--backends", "jax", "--device", "cuda"], ("without the backend torch",)),
    ],
    ids=["absent", "unknown", "not-torch"],
)
def test_unavailable_device_fails_first(capsys, options, words):
    """A device that is unavailable or cannot apply exits with 2,
    one line of error and no output.
    """
    assert main(["run", "--cases", "textbook", *options]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert len(err.splitlines()) == 1
    for word in words:
        assert word in err


def test_missing_cuda_is_named(monkeypatch):
    """If PyTorch was built without CUDA, the error says so."""
    monkeypatch.setattr("torch.backends.cuda.is_built", lambda: False)
    with rejects("device", device="cuda:9") as error:
        on_device("cuda:9")
    assert str(error.value) == "device='cuda:9': this PyTorch has no CUDA"

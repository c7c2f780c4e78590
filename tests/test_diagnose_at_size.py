"""The diagnosis of large layers: named by samples, the same each time, with little work and within its time."""

from dataclasses import replace

import numpy as np
import pytest

import parity
from mha_spec import AttentionSpec, Rope
from parity import Case, make_problem
from parity.core import reference
from parity.core.compare import kept_dtype
from parity.core.reference import Arithmetic, Layer, arithmetic
from parity.core.stages import run_steps
from parity.core.trace import Reference
from parity.core.weights import dtype_named
from parity.diagnosis.diagnose import diagnose
from parity.diagnosis.flow import flow_of
from parity.diagnosis.mistakes import mistakes_for, wrong_layer
from parity.diagnosis.mistakes.record import Changed
from parity.diagnosis.sampling import confirming, in_order, multiplications, parts

LLAMA = Case(
    "llama",
    AttentionSpec(256, 4, num_kv_heads=2, qkv_bias=False, out_bias=False, rope=Rope()),
    "",
    batch=1,
    seq_len=160,
    is_causal=True,
)
BERT = Case("bert", AttentionSpec(256, 4), "", batch=1, seq_len=160)

ENOUGH = 120.0
"""Seconds for a search, so that no load of the machine that runs the tests decides."""


@pytest.fixture(scope="module")
def problems():
    return {case.name: make_problem(case, "float32") for case in (LLAMA, BERT)}


def given_by(problem, name=None):
    """All stages of the reference, with a mistake in it, in float32."""
    made = [each for each in mistakes_for(problem.case) if each.name == name][:1]
    assert name is None or made
    with np.errstate(all="ignore"):
        values = wrong_layer(problem, "float64", made).forward()
    return {stage: x.astype(kept_dtype(stage, "float32")) for stage, x in values.items()}


def names_of(diagnosis):
    return [name for explanation in diagnosis.explanations for name in explanation.hypotheses]


@pytest.fixture
def work(monkeypatch):
    """The multiplications of all products, counted as they are computed."""
    counted, product = [], Arithmetic.matmul

    def matmul(self, a, b, start=0.0):
        counted.append(arithmetic.multiplications(a, b))
        return product(self, a, b, start)

    monkeypatch.setattr(Arithmetic, "matmul", matmul)
    return counted


# ---- Named -----------------------------------------------------------------------------------------------------------

SHOWN_BY = {
    "the first tokens": ("llama", "rope-interleaved"),
    "rows that see later keys": ("llama", "mask-ignored"),
    "all queries of the first keys": ("llama", "softmax-over-queries"),
    "the first tokens of the first head": ("llama", "heads-not-moved-back"),
    "rows and all keys": ("bert", "k_proj-transposed"),
    "rows of other sequences": ("bert", "batch-as-tokens"),
}
"""A mistake for each way in which a sample shows one."""


@pytest.mark.parametrize(("layer", "name"), SHOWN_BY.values(), ids=list(SHOWN_BY))
def test_a_mistake_is_named_by_the_output_alone_with_little_work(problems, work, layer, name):
    problem = problems[layer]
    output = given_by(problem, name)["output"]
    work.clear()
    diagnosis = diagnose({"output": output}, problem, seconds=ENOUGH)
    assert names_of(diagnosis) == [name]
    assert diagnosis.sample
    assert sum(work) < 20 * multiplications(problem)  # of about a hundred mistakes, each in both precisions


@pytest.mark.parametrize(
    ("layer", "name"), [("llama", "rope-off-by-one-q"), ("llama", "causal-off-by-one"), ("bert", "v-heads-rolled")]
)
def test_a_mistake_is_named_by_all_stages(problems, layer, name):
    given = given_by(problems[layer], name)
    given["q"] = given["q"].swapaxes(1, 2)  # recorded as (B, T, N, H)
    diagnosis = diagnose(given, problems[layer], seconds=ENOUGH)
    assert names_of(diagnosis) == [name]
    assert "q" in diagnosis.conventions


def test_mistakes_in_two_stages_are_both_named(problems):
    given = given_by(problems["bert"], "v-heads-rolled")
    wrong = next(each for each in mistakes_for(BERT) if each.name == "out_proj-transposed")
    output = wrong_layer(problems["bert"], "float64", [wrong]).output(given)["output"]
    diagnosis = diagnose({**given, "output": output.astype(np.float32)}, problems["bert"], seconds=ENOUGH)
    assert names_of(diagnosis) == ["v-heads-rolled", "out_proj-transposed"]


def test_three_calls_give_one_verdict(problems):
    output = given_by(problems["llama"], "kv-heads-tiled")["output"]
    first, *others = [str(diagnose({"output": output}, problems["llama"], seconds=ENOUGH)) for _ in range(3)]
    assert others == [first, first]


def test_what_is_right_is_right(problems):
    given = given_by(problems["llama"])
    assert diagnose(given, problems["llama"]).kind == "none"
    assert diagnose({**given, "k": given["k"].swapaxes(1, 2)}, problems["llama"]).kind == "convention"


def test_a_wrong_place_that_no_sample_has_is_found(problems):
    output = given_by(problems["llama"])["output"]
    output[0, 100, 200] += 0.1
    diagnosis = diagnose({"output": output}, problems["llama"], seconds=0.5)
    assert diagnosis.kind == "unknown"
    with pytest.raises(AssertionError, match="t=100, e=200"):
        parity.assert_parity(output, problem=problems["llama"])


# ---- Its time --------------------------------------------------------------------------------------------------------


def test_the_time_limit_holds_inside_a_product(problems, monkeypatch):
    """The clock stands still but in the parts of products: in one of them the time ends, and the search with it."""
    output = given_by(problems["llama"], "q_proj-transposed")["output"]
    now, multiply, late = [0.0], np.matmul, []

    def slow(*inputs, **options):
        late.append(now[0] > 3.0)
        now[0] += 1.0
        return multiply(*inputs, **options)

    for clock in ("perf_counter", "thread_time"):
        monkeypatch.setattr(f"parity.diagnosis.search.time.{clock}", lambda: now[0])
    monkeypatch.setattr(arithmetic, "PART", 2**16)
    monkeypatch.setattr(arithmetic.np, "matmul", slow)
    diagnosis = diagnose({"output": output}, problems["llama"], seconds=3.0)
    assert "single mistakes" in diagnosis.untried
    assert len(late) < 20  # of the thousands of parts of all mistakes


def test_a_failing_assertion_computes_the_reference_once(monkeypatch):
    problem = make_problem(replace(BERT, seq_len=24, name="small"), "float32")
    output, computed, stages = given_by(problem)["output"], [], Reference._stages

    def counted(self, dtype, *inputs):
        computed.append(dtype)
        return stages(self, dtype, *inputs)

    monkeypatch.setattr(Reference, "_stages", counted)
    with pytest.raises(AssertionError, match="out_proj-bias-missing"):
        parity.assert_parity(output - problem.weights["out_proj.bias"], problem=problem)
    assert computed == ["float64", "float32"]


def test_a_passing_assertion_takes_little_more_than_the_layer(problems, work):
    problem = problems["llama"]
    output = given_by(problem)["output"]
    work.clear()
    parity.assert_parity(output, problem=problem)
    assert sum(work) <= 2.1 * multiplications(problem)  # once in each precision


# ---- Samples ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [LLAMA, BERT, replace(LLAMA, name="two", batch=2, key_padding_lengths=(160, 9))])
def test_the_right_layer_is_right_in_every_sample(case):
    problem = make_problem(case, "float32")
    given = wrong_layer(problem, "float64", ()).forward()
    for part in (*parts(problem, given, reference.Remembered()), *confirming(problem, given, reference.Remembered())):
        values = run_steps(Layer(part.problem, Arithmetic(dtype_named("float64"))).steps())
        for stage, x in part.observed.items():
            if part.judged is None or stage in part.judged:
                np.testing.assert_allclose(values[stage], x, rtol=1e-9, atol=1e-12, err_msg=f"{stage}: {part.words}")


def test_stages_are_brought_into_the_order_of_the_reference(problems, rng):
    x = rng.standard_normal((1, 4, 160, 64))
    for recorded in (x, x.swapaxes(1, 2), x.swapaxes(1, 2).reshape(1, 160, 256), x[0]):
        np.testing.assert_array_equal(in_order(problems["bert"], "q", recorded), x)


def test_a_step_depends_on_what_it_calls_and_reads(problems):
    mask, qkv, scores, attn_weights, context, output, _ = flow_of(problems["llama"])
    assert "is_later" in mask.methods
    assert "is_later" not in qkv.methods
    assert {"tables", "angles", "parameter"} <= qkv.methods
    assert scores.reads == {"q", "k"}
    assert attn_weights.reads == {"scores", "mask"}
    assert {"attn_weights", "v"} <= context.reads
    assert output.reads == {"context"}


# ---- Noise -----------------------------------------------------------------------------------------------------------


def test_the_noise_of_a_large_product_is_that_of_the_plainest_order(rng, monkeypatch):
    a, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((64, 2048), (2048, 96)))
    exact, float32 = a.astype(np.float64) @ b, Arithmetic(dtype_named("float32"))
    plain = float32.matmul(a, b) - exact
    monkeypatch.setattr(arithmetic, "LARGE", 0)
    drawn = float32.matmul(a, b) - exact
    assert 0.8 < drawn.std() / plain.std() < 1.25


# ---- Zeros -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_key_that_is_hidden_in_one_row_is_seen_in_half_precision(dtype):
    case = Case("zeros", AttentionSpec(16, 2), "", batch=1, seq_len=200, is_causal=True)
    problem = make_problem(case, dtype)

    def hidden(_, original, masked):
        masked = original(masked).copy()
        masked[..., -1, 0] = True
        return masked

    def stages(changes):
        values = wrong_layer(problem, dtype, changes).forward()
        return {name: values[name].astype(kept_dtype(name, dtype)) for name in ("attn_weights", "context", "output")}

    parity.assert_parity(stages([]), problem=problem)
    with pytest.raises(AssertionError):
        parity.assert_parity(stages([Changed({"hidden": hidden})]), problem=problem)

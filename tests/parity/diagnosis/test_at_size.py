"""The diagnosis of large layers: named by samples, the same each time, with little work and within its time."""

import itertools
import time
from dataclasses import replace

import numpy as np
import pytest
from helpers.diagnoses import named_bugs
from helpers.samples import sample

import parity
from mha_spec import AttentionSpec, Rope
from parity import Case, make_problem
from parity.core.absorbed import Unmade, rows_of_query
from parity.core.compare import kept_dtype
from parity.core.reference import Arithmetic, Layer, Remembered, arithmetic
from parity.core.sample import Sample
from parity.core.stages import run_steps
from parity.core.trace import Reference
from parity.core.weights import dtype_named
from parity.core.work import Work, ask, uncounted
from parity.diagnosis.at_size import RowSamples, TokenSamples
from parity.diagnosis.bugs import bugs_for, wrong_layer
from parity.diagnosis.bugs.record import Changed
from parity.diagnosis.diagnose import diagnose, diagnose_stages
from parity.diagnosis.flow import flow_of
from parity.diagnosis.replay import Replay, remembering
from parity.diagnosis.sampling import Whole, in_order, multiplications
from parity.diagnosis.whole import WholeStages

LLAMA = Case(
    "llama",
    AttentionSpec(256, 4, num_kv_heads=2, qkv_bias=False, out_bias=False, rope=Rope()),
    "",
    batch=1,
    seq_len=160,
    is_causal=True,
)
BERT = Case("bert", AttentionSpec(256, 4), "", batch=1, seq_len=160)
CROSS = replace(BERT, name="cross", seq_len_k=200, key_padding_lengths=(190,))
DECODE = replace(LLAMA, name="decode", seq_len=161, is_causal=False, chunks=(160, 1), capacity=164)

ENOUGH = 120.0
"""Seconds for a search, so that no load of the machine that runs the tests decides."""


@pytest.fixture(scope="module")
def problems():
    return {case.name: make_problem(case, "float32") for case in (LLAMA, BERT, CROSS)}


def given_by(problem, name=None):
    """All stages of the reference, with a bug in it, in float32."""
    made = [each for each in bugs_for(problem.case) if each.name == name][:1]
    assert name is None or made
    with np.errstate(all="ignore"):
        values = wrong_layer(problem, "float64", made).forward()
    return {stage: x.astype(kept_dtype(stage, "float32")) for stage, x in values.items()}


def laws_of(diagnosis):
    """The simplest law of each stage that no bug explains, and its numbers."""
    found = [each.findings for each in (*diagnosis.explanations, *diagnosis.unknowns) if each.findings is not None]
    return {each.found[0].name: each.found[0].numbers for each in found if each.found}


@pytest.fixture
def work(monkeypatch):
    """The multiplications of all products, counted as they are computed."""
    counted, product = [], Arithmetic.matmul

    def matmul(self, a, b, start=0.0, exact=None):
        counted.append(arithmetic.multiplications(a, b) if exact is None else 0)
        return product(self, a, b, start, exact)

    monkeypatch.setattr(Arithmetic, "matmul", matmul)
    return counted


# ---- Named -----------------------------------------------------------------------------------------------------------

SHOWN_BY = {
    "the first tokens": ("llama", "rope-interleaved"),
    "rows that see later keys": ("llama", "mask-ignored"),
    "all queries of the first keys": ("llama", "softmax-over-queries"),
    "the first tokens of the first head": ("llama", "heads-not-moved-back"),
    "rows and all keys": ("bert", "scale-missing"),
    "rows of other sequences": ("bert", "batch-as-tokens"),
    "the other queries as one row": ("bert", "softmax-over-queries"),
    "that of cross-attention": ("cross", "softmax-over-queries"),
    "keys that are not made": ("bert", "k_proj-transposed"),
    "rows of the weights of others": ("bert", "fused-qkv-read-per-head"),
}
"""A bug for each way in which a sample shows one."""


@pytest.mark.parametrize(("layer", "name"), SHOWN_BY.values(), ids=list(SHOWN_BY))
def test_a_bug_is_named_by_the_output_alone_with_little_work(problems, work, layer, name):
    problem = problems[layer]
    output = given_by(problem, name)["output"]
    work.clear()
    diagnosis = diagnose({"output": output}, problem, seconds=ENOUGH)
    assert named_bugs(diagnosis) == [name]
    assert diagnosis.sample
    assert sum(work) < 20 * multiplications(problem)  # of about a hundred bugs, each in both precisions


@pytest.mark.parametrize("name", ["scale-missing", "heads-not-moved"])
def test_a_search_repeats_no_projection_of_all_tokens(monkeypatch, name):
    """The reference has made them, in both precisions."""
    problem = make_problem(replace(BERT, spec=AttentionSpec(1024, 8), seq_len=256), "float32")
    reference, made, product = Reference(problem), [], Remembered._product
    assert reference.accumulated
    assert reference.same_precision(local=False)

    def _product(self, source, given, layer, x):
        known = len(self._products)
        found = product(self, source, given, layer, x)
        if len(self._products) > known and given == "query":
            made.append((source, given))
        return found

    output = given_by(problem, name)["output"]
    monkeypatch.setattr(Remembered, "_product", _product)
    monkeypatch.setattr("parity.diagnosis.search.CHEAP", 2e-3)  # as in a layer eight times as wide
    assert named_bugs(diagnose_stages({"output": output}, reference, "ieee")) == [name]
    assert not made


@pytest.mark.parametrize(
    ("layer", "name"),
    [
        ("llama", "rope-off-by-one-q"),
        ("llama", "causal-off-by-one"),
        ("bert", "v-heads-rolled"),
        ("bert", "softmax-over-queries"),
    ],
)
def test_a_bug_is_named_by_all_stages(problems, layer, name):
    given = given_by(problems[layer], name)
    given["q"] = given["q"].swapaxes(1, 2)  # recorded as (B, T, N, H)
    diagnosis = diagnose(given, problems[layer], seconds=ENOUGH)
    assert named_bugs(diagnosis) == [name]
    assert "q" in diagnosis.conventions


@pytest.mark.parametrize("name", ["q_proj-transposed", "causal-off-by-one", "cache-slot-late"])
def test_a_bug_of_a_layer_with_a_cache_is_named(name):
    problem = make_problem(DECODE, "float32")
    made = [each for each in bugs_for(DECODE) if each.name == name][:1]
    values = run_steps(wrong_layer(problem, "float64", made).steps())
    outputs = {stage: values[stage].astype(np.float32) for stage in ("step0.output", "step1.output")}
    diagnosis = diagnose(outputs, problem, seconds=ENOUGH if name.startswith("cache") else 5.0)
    assert named_bugs(diagnosis) == [name]
    assert ("first call" in diagnosis.sample) == (not name.startswith("cache"))
    assert {*outputs} >= {*diagnosis.explanations[0].stages} >= {"step1.output"}


def test_bugs_in_two_stages_are_both_named(problems):
    given = given_by(problems["bert"], "v-heads-rolled")
    wrong = next(each for each in bugs_for(BERT) if each.name == "out_proj-transposed")
    output = wrong_layer(problems["bert"], "float64", [wrong]).output(given)["output"]
    diagnosis = diagnose({**given, "output": output.astype(np.float32)}, problems["bert"], seconds=ENOUGH)
    assert named_bugs(diagnosis) == ["v-heads-rolled", "out_proj-transposed"]


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


def test_a_law_of_a_sample_is_that_of_another_one_too(problems):
    output = given_by(problems["bert"])["output"]
    diagnosis = diagnose({"output": 1.01 * output}, problems["bert"])
    assert laws_of(diagnosis) == {"factor": {"axes": [], "factors": [pytest.approx(1.01)]}}
    output[..., :128] *= 1.01  # the features of one sample
    assert diagnose({"output": output}, problems["bert"]).kind == "unknown"


def test_a_number_of_the_specification_is_found_in_a_sample(problems):
    problem = problems["bert"]
    other = replace(problem, case=replace(BERT, spec=replace(BERT.spec, scale=0.1)))
    diagnosis = diagnose({"output": given_by(other)["output"]}, problem)
    assert laws_of(diagnosis) == {"scale": {"value": pytest.approx(0.1), "expected": 0.125}}


# ---- Its work --------------------------------------------------------------------------------------------------------


def test_no_clock_changes_a_verdict(problems, monkeypatch):
    """Hours pass each time that somebody looks at a clock."""
    output, hours = given_by(problems["llama"], "q_proj-transposed")["output"], itertools.count(0.0, 3600.0)
    for clock in ("perf_counter", "monotonic", "process_time", "thread_time"):
        monkeypatch.setattr(time, clock, lambda: next(hours))
    assert named_bugs(diagnose({"output": output}, problems["llama"])) == ["q_proj-transposed"]


def test_the_limit_of_a_search_holds(problems, work):
    """A search with little work computes little: the samples without bugs in them."""
    problem = problems["bert"]
    output = given_by(problem, "k_proj-transposed")["output"]
    work.clear()
    diagnosis = diagnose({"output": output}, problem, seconds=0.01)
    assert "single bugs" in diagnosis.untried
    assert sum(work) < 4 * multiplications(problem)


def test_a_product_beyond_the_limit_is_not_computed(rng):
    a, search, float64 = rng.standard_normal((512, 512)), Work(2e-3), Arithmetic(dtype_named("float64"))
    with search.counted(), pytest.raises(TimeoutError), search.inside("a product"):
        float64.matmul(a, a)
    assert (search.spent, search.untried) == (0.0, "a product")
    with search.counted(), pytest.raises(TimeoutError), search.inside("another", most=1e-4):
        float64.matmul(a[:64], a)
    assert search.untried == "a product"  # whoever put the other one off comes back to it
    with search.counted(), search.inside("another", most=1e-4):
        ask(5e-5, of_part=True)
        with pytest.raises(TimeoutError):
            ask(2e-4, of_part=True)
    assert (search.spent, search.untried) == (0.0, "a product")


def test_work_within_other_work_counts_for_both(rng):
    a, outer, inner = rng.standard_normal((64, 64)), Work(1.0), Work(0.5)
    with outer.counted():
        with inner.counted():
            Arithmetic(dtype_named("float64")).matmul(a, a)
        with uncounted():
            Arithmetic(dtype_named("float64")).matmul(a, a)
    assert 0.0 < inner.spent == outer.spent


def test_a_search_does_as_much_where_the_reference_was_computed_before():
    problem = make_problem(replace(BERT, seq_len=24, name="small"), "float32")
    output, spent = given_by(problem)["output"] + 1.0, []
    fresh, known = Reference(problem), Reference(problem)
    assert known.accumulated
    assert known.same_precision(local=False)
    for of_problem in (fresh, known):
        work = Work(1.0)
        with work.counted():
            diagnose_stages({"output": output}, of_problem, "ieee", 0.02)
        spent.append(work.spent)
    assert spent[0] == spent[1] > 0.0


def test_a_failing_assertion_computes_the_reference_once(monkeypatch):
    problem = make_problem(replace(BERT, seq_len=24, name="small"), "float32")
    output, computed, stages = given_by(problem)["output"], [], Reference._computed

    def counted(self, dtype, *inputs):
        computed.append(dtype)
        return stages(self, dtype, *inputs)

    monkeypatch.setattr(Reference, "_computed", counted)
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
    whole = Whole(problem, given, WholeStages(given, Reference(problem), "ieee"), Remembered())
    kinds = (TokenSamples(whole), RowSamples(whole))
    judged = set()
    for part in (part for samples in kinds for part in (*samples.parts(), *samples.confirming())):
        values = run_steps(Layer(part.problem, Arithmetic(dtype_named("float64"))).steps())
        for stage, x in part.observed.items():
            if part.judged is None or stage in part.judged:
                judged.add(stage)
                np.testing.assert_allclose(values[stage], x, rtol=1e-9, atol=1e-12, err_msg=f"{stage}: {part.words}")
    assert judged >= {"mask", "q", "k", "v", "scores", "attn_weights", "context", "output"}


GROUPS = replace(BERT.spec, num_kv_heads=2, qkv_bias=False)


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        (LLAMA.spec, "q_proj-transposed"),
        (BERT.spec, "k_proj-transposed"),
        (BERT.spec, "v_proj-transposed"),
        (GROUPS, "q_proj-weights-bfloat16"),
        (GROUPS, "k_proj-weights-bfloat16"),
        (GROUPS, "v_proj-weights-bfloat16"),
    ],
)
def test_keys_and_values_that_are_not_made_give_the_same(spec, name):
    problem, rows = make_problem(replace(BERT, spec=spec, seq_len=24), "float32"), np.array([1, 9])
    made = [each for each in bugs_for(problem.case) if each.name == name][:1]
    some = {rows_of_query(rows): problem.inputs["query"][:, rows]}
    plain = replace(problem, sample=Sample(rows, np.arange(16)))
    short = replace(problem, inputs=problem.inputs | some, sample=Sample(rows, np.arange(16), absorbs=True))
    expected, found = (run_steps(wrong_layer(each, "float64", made).steps()) for each in (plain, short))
    assert [each for each in "kv" if isinstance(found[each], Unmade)] == [
        each for each in "kv" if f"{each}_proj" in name
    ]
    for stage in ("q", "scores", "attn_weights", "context", "output"):
        np.testing.assert_allclose(found[stage], expected[stage], rtol=1e-9, atol=1e-12, err_msg=stage)


def test_packed_weights_in_another_order_need_no_product(problems, work):
    problem, remembered = problems["bert"], Remembered()
    made = next(each for each in bugs_for(problem.case) if each.name == "fused-qkv-read-per-head")
    base = remembering(remembered)
    right, wrong = (wrong_layer(problem, "float64", changes) for changes in ([base], [made, base]))
    right.qkv({})
    work.clear()
    found = wrong.qkv({})
    assert not work
    expected = wrong_layer(problem, "float64", [made]).qkv({})
    for name in "qkv":
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-9, atol=1e-12)


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
    for known in (None, exact):
        drawn = float32.matmul(a, b, exact=known) - exact
        assert 0.8 < drawn.std() / plain.std() < 1.25
    cut = Arithmetic(dtype_named("float32"), "tf32")  # which sees less of the numbers than the exact product has
    np.testing.assert_array_equal(cut.matmul(a, b, exact=exact), cut.matmul(a, b))


def test_noise_is_taken_to_grow_with_the_values(problems):
    """Logarithms of weights are thousands of times the weights: so is their noise, before any budget is computed."""
    made = next(each for each in bugs_for(BERT) if each.name == "softmax-log")
    replay = Replay(problems["bert"], {"output": given_by(problems["bert"], "softmax-log")["output"]}, "ieee")
    ratios = [replay.judgement("output", (made,), quick=is_quick).ratio for is_quick in (True, False)]
    assert 0.2 < ratios[0] / ratios[1] < 5.0


# ---- Zeros -----------------------------------------------------------------------------------------------------------


@sample(dtype=["bfloat16"])
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

"""The diagnosis of large layers names bugs from samples: reproducibly, with little work and within
its limit.
"""

import itertools
import time
from dataclasses import replace

import numpy as np
import pytest
from helpers.diagnoses import named_bugs
from helpers.samples import sample

import parity
from mha_spec import AttentionSpec, Latent, Rope
from parity import Case, make_problem
from parity.explain.diagnosis.absorbed import DeferredHeads
from parity.explain.diagnosis.at_size import RowSamples, TokenSamples
from parity.explain.diagnosis.bugs import bugs_for, edited_layer
from parity.explain.diagnosis.bugs.record import Edit
from parity.explain.diagnosis.diagnose import diagnose, diagnose_stages
from parity.explain.diagnosis.flow import flow_of
from parity.explain.diagnosis.remembered import Remembered, RememberingReference, product_of
from parity.explain.diagnosis.sample import Sample, SampledProblem, rows_of_query
from parity.explain.diagnosis.sampling import Whole, in_order, multiplications
from parity.explain.diagnosis.trial import Trial, remembering
from parity.explain.diagnosis.whole import WholeStages
from parity.explain.diagnosis.work import CountedArithmetic, Work, ask, uncounted
from parity.measure.core.compare import dtype_of_stage
from parity.measure.core.reference import Arithmetic, arithmetic
from parity.measure.core.stages import run_steps
from parity.measure.core.trace import Reference
from parity.measure.core.weights import dtype_named

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

MLA = replace(
    LLAMA,
    name="mla",
    spec=AttentionSpec(
        256,
        4,
        head_dim=96,
        value_head_dim=64,
        latent=Latent(64, 32),
        rope=Rope(rotary_dim=32, rotated="last", pairs="interleaved"),
        qkv_bias=False,
        out_bias=False,
    ),
)

ENOUGH = 120.0
"""Seconds for a search, enough that the load of the machine does not matter."""


@pytest.fixture(scope="module")
def problems():
    return {case.name: make_problem(case, "float32") for case in (LLAMA, BERT, CROSS)}


def observed_stages(problem, name=None):
    """Return all stages of the reference with a bug, in float32."""
    made = [bug for bug in bugs_for(problem.case) if bug.name == name][:1]
    assert name is None or made
    with np.errstate(all="ignore"):
        values = edited_layer(problem, "float64", made).forward()
    return {stage: x.astype(dtype_of_stage(stage, "float32")) for stage, x in values.items()}


def patterns_of(diagnosis):
    """Return the simplest pattern of each stage that has patterns, and its values."""
    descriptions = [
        finding.description for finding in diagnosis.findings if finding.description is not None
    ]
    return {
        description.patterns[0].name: description.patterns[0].fitted
        for description in descriptions
        if description.patterns
    }


@pytest.fixture
def work(monkeypatch):
    """Count the multiplications of all products as they are computed."""
    counted, product = [], Arithmetic.matmul

    def matmul(self, a, b, start=0.0):
        counted.append(arithmetic.multiplications(a, b))
        return product(self, a, b, start)

    monkeypatch.setattr(Arithmetic, "matmul", matmul)
    return counted


# ---- Named ---------------------------------------------------------------------------------------

SHOWN_BY = {
    "the first tokens": ("llama", "rope-interleaved"),
    "rows that see later keys": ("llama", "mask-ignored"),
    "all queries of the first keys": ("llama", "softmax-over-queries"),
    "the first tokens of the first head": ("llama", "heads-not-moved-back"),
    "rows and all keys": ("bert", "scale-missing"),
    "rows of other sequences": ("bert", "batch-as-tokens"),
    "the other queries as one row": ("bert", "softmax-over-queries"),
    "the softmax of cross-attention": ("cross", "softmax-over-queries"),
    "keys that are not made": ("bert", "k_proj-transposed"),
    "rows of the weights of others": ("bert", "fused-qkv-read-per-head"),
}
"""A bug for each way in which a sample shows one."""


@sample(5)
@pytest.mark.parametrize(("layer", "name"), SHOWN_BY.values(), ids=list(SHOWN_BY))
def test_bug_is_named_from_a_sample(problems, work, layer, name):
    """A bug is named from a sample of the output, with less than 20 times the layer's work."""
    problem = problems[layer]
    output = observed_stages(problem, name)["output"]
    work.clear()
    diagnosis = diagnose({"output": output}, problem, seconds=ENOUGH)
    assert named_bugs(diagnosis) == [name]
    assert diagnosis.sample
    assert sum(work) < 20 * multiplications(
        problem
    )  # about a hundred bugs, each in both precisions


@sample(1)
@pytest.mark.parametrize("name", ["scale-missing", "heads-not-moved"])
def test_search_reuses_full_projections(monkeypatch, name):
    """The search computes no projection of all queries again: the reference has made them."""
    problem = make_problem(replace(BERT, spec=AttentionSpec(1024, 8), seq_len=256), "float32")
    reference, made, product = RememberingReference(problem), [], Remembered._product
    assert reference.accumulated
    assert reference.same_precision(local=False)

    def _product(self, source, side, layer, x):
        known = len(self._products)
        result = product(self, source, side, layer, x)
        if len(self._products) > known and side == "query":
            made.append((source, side))
        return result

    output = observed_stages(problem, name)["output"]
    monkeypatch.setattr(Remembered, "_product", _product)
    monkeypatch.setattr(
        "parity.explain.diagnosis.search.CHEAP", 2e-3
    )  # as in a layer eight times as wide
    assert named_bugs(diagnose_stages({"output": output}, reference, "ieee")) == [name]
    assert not made


@pytest.mark.parametrize("of_reference", [True, False])
def test_reference_products_have_no_limit(problems, of_reference):
    """A part out of work may project all queries only if the reference also has them."""
    problem, rows = problems["bert"], np.array([1, 9])
    some = {rows_of_query(rows): problem.inputs["query"][:, rows]}
    with_rows = replace(problem, inputs=problem.inputs | some)
    part = SampledProblem.of(with_rows, Sample(rows, np.arange(16)))
    base = remembering(Remembered(of_reference=of_reference))
    layer, work = edited_layer(part, "float64", [base]), Work(1.0)
    with work.counted(), work.inside("a part", most=0.0):
        if of_reference:
            q = layer.linear("q_proj", problem.inputs["query"])
            assert q.shape == (1, 160, 256)
        else:
            with pytest.raises(TimeoutError):
                layer.linear("q_proj", problem.inputs["query"])
    assert work.spent == 0.0


@sample(2)
@pytest.mark.parametrize(
    ("layer", "name"),
    [
        ("llama", "rope-off-by-one-q"),
        ("llama", "causal-off-by-one"),
        ("bert", "v-heads-rolled"),
        ("bert", "softmax-over-queries"),
    ],
)
def test_bug_is_named_from_all_stages(problems, layer, name):
    """A bug is named from all stages, although q is recorded as (B, T, N, H)."""
    observed = observed_stages(problems[layer], name)
    observed["q"] = observed["q"].swapaxes(1, 2)  # recorded as (B, T, N, H)
    diagnosis = diagnose(observed, problems[layer], seconds=ENOUGH)
    assert named_bugs(diagnosis) == [name]
    assert "q" in diagnosis.conventions


@sample(name=["causal-off-by-one"])
@pytest.mark.parametrize("name", ["q_proj-transposed", "causal-off-by-one", "cache-slot-late"])
def test_cached_layer_bug_is_named(name):
    """Bugs of a cached layer are named from its outputs; only cache bugs need later calls."""
    problem = make_problem(DECODE, "float32")
    made = [bug for bug in bugs_for(DECODE) if bug.name == name][:1]
    values = run_steps(edited_layer(problem, "float64", made).steps())
    outputs = {
        stage: values[stage].astype(np.float32) for stage in ("step0.output", "step1.output")
    }
    diagnosis = diagnose(outputs, problem, seconds=ENOUGH if name.startswith("cache") else 5.0)
    assert named_bugs(diagnosis) == [name]
    assert ("first call" in diagnosis.sample) == (not name.startswith("cache"))
    assert {*outputs} >= {*diagnosis.named[0].stages} >= {"step1.output"}


def test_bugs_in_two_stages_are_both_named(problems):
    """Rolled heads of v and a transposed output projection are both named."""
    observed = observed_stages(problems["bert"], "v-heads-rolled")
    wrong = next(bug for bug in bugs_for(BERT) if bug.name == "out_proj-transposed")
    output = edited_layer(problems["bert"], "float64", [wrong]).output(observed)["output"]
    diagnosis = diagnose(
        {**observed, "output": output.astype(np.float32)}, problems["bert"], seconds=ENOUGH
    )
    assert named_bugs(diagnosis) == ["v-heads-rolled", "out_proj-transposed"]


def test_paths_follow_an_unknown_cause(problems):
    """Wrong keys that nothing explains are one finding: the stages of a module's paths follow."""
    problem = problems["llama"]
    wrong_keys = dict(problem.weights)
    weight = wrong_keys["k_proj.weight"]
    wrong_keys["k_proj.weight"] = weight + weight * np.abs(np.roll(weight, 3, axis=0))
    stages = observed_stages(replace(problem, weights=wrong_keys))
    (finding,) = diagnose(stages, problem, seconds=0.5).findings
    assert (finding.stage, finding.is_explained) == ("k", False)
    paths = [stage for stage in stages if stage.startswith(("module.", "fused.", "blocks."))]
    assert {*paths} <= {*finding.follows}


def test_verdict_is_reproducible(problems):
    """Three diagnoses of the same output print the same text."""
    output = observed_stages(problems["llama"], "kv-heads-tiled")["output"]
    first, *others = [
        str(diagnose({"output": output}, problems["llama"], seconds=ENOUGH)) for _ in range(3)
    ]
    assert others == [first, first]


def test_correct_stages_pass_at_size(problems):
    """Correct stages have the kind `none`, or `convention` with a different axis order of k."""
    observed = observed_stages(problems["llama"])
    assert diagnose(observed, problems["llama"]).kind == "none"
    assert (
        diagnose({**observed, "k": observed["k"].swapaxes(1, 2)}, problems["llama"]).kind
        == "convention"
    )


def test_unsampled_error_is_found(problems):
    """One wrong element is unknown, and `assert_parity` shows its location, though no sample has
    it.
    """
    output = observed_stages(problems["llama"])["output"]
    output[0, 100, 200] += 0.1
    diagnosis = diagnose({"output": output}, problems["llama"], seconds=0.5)
    assert diagnosis.kind == "unknown"
    with pytest.raises(AssertionError, match="t=100, e=200"):
        parity.assert_parity(output, problem=problems["llama"])


def test_bugs_without_a_sample_are_untried():
    """With a bias, no sample shows a softmax over queries, and an unknown error says so."""
    problem = make_problem(replace(BERT, bias=True, name="bias"), "float32")
    output = observed_stages(problem)["output"]
    output[0, 100, 200] += 0.1
    diagnosis = diagnose({"output": output}, problem, seconds=0.5)
    assert (diagnosis.kind, diagnosis.untried) == ("unknown", "softmax-over-queries")
    assert "Not tried: softmax-over-queries" in str(diagnosis)


def test_pattern_must_hold_in_other_samples(problems):
    """A factor on the whole output is a pattern; on the features of one sample it is unknown."""
    output = observed_stages(problems["bert"])["output"]
    diagnosis = diagnose({"output": 1.01 * output}, problems["bert"])
    assert patterns_of(diagnosis) == {"factor": {"axes": [], "factors": [pytest.approx(1.01)]}}
    output[..., :128] *= 1.01  # the features of one sample
    assert diagnose({"output": output}, problems["bert"]).kind == "unknown"


def test_scale_is_fitted_from_a_sample(problems):
    """A scale of 0.1 instead of 0.125 is found from the output of a large layer."""
    problem = problems["bert"]
    other = replace(problem, case=replace(BERT, spec=replace(BERT.spec, scale=0.1)))
    diagnosis = diagnose({"output": observed_stages(other)["output"]}, problem)
    assert patterns_of(diagnosis) == {"scale": {"value": pytest.approx(0.1), "expected": 0.125}}


# ---- Its work ------------------------------------------------------------------------------------


def test_verdict_ignores_the_clock(problems, monkeypatch):
    """A bug is named even if every reading of a clock is an hour later."""
    output, hours = (
        observed_stages(problems["llama"], "q_proj-transposed")["output"],
        itertools.count(0.0, 3600.0),
    )
    for clock in ("perf_counter", "monotonic", "process_time", "thread_time"):
        monkeypatch.setattr(time, clock, lambda: next(hours))
    assert named_bugs(diagnose({"output": output}, problems["llama"])) == ["q_proj-transposed"]


def test_search_limit_is_respected(problems, work):
    """A search of 0.01 s leaves single bugs untried and costs less than 4 times the layer."""
    problem = problems["bert"]
    output = observed_stages(problem, "k_proj-transposed")["output"]
    work.clear()
    diagnosis = diagnose({"output": output}, problem, seconds=0.01)
    assert {"single bugs", "softmax-over-queries"} <= {*diagnosis.untried.split(", ")}
    assert sum(work) < 4 * multiplications(problem)


def test_product_over_limit_raises(rng):
    """A product over the limit raises TimeoutError, costs nothing and is reported as untried."""
    a, search, float64 = (
        rng.standard_normal((512, 512)),
        Work(2e-3),
        CountedArithmetic(dtype_named("float64")),
    )
    with search.counted(), pytest.raises(TimeoutError), search.inside("a product"):
        float64.matmul(a, a)
    assert (search.spent, search.untried) == (0.0, "a product")
    with search.counted(), pytest.raises(TimeoutError), search.inside("another", most=1e-4):
        float64.matmul(a[:64], a)
    assert search.untried == "a product"  # the postponed step is retried by its caller
    with search.counted(), search.inside("another", most=1e-4):
        ask(5e-5, of_part=True)
        with pytest.raises(TimeoutError):
            ask(2e-4, of_part=True)
    assert (search.spent, search.untried) == (0.0, "a product")


def test_nested_work_counts_for_both(rng):
    """Work in an inner count also counts for the outer one; uncounted work does not."""
    a, outer, inner = rng.standard_normal((64, 64)), Work(1.0), Work(0.5)
    with outer.counted():
        with inner.counted():
            CountedArithmetic(dtype_named("float64")).matmul(a, a)
        with uncounted():
            CountedArithmetic(dtype_named("float64")).matmul(a, a)
    assert 0.0 < inner.spent == outer.spent


def test_known_reference_changes_no_work():
    """A search does the same work whether or not the reference was computed before it."""
    problem = make_problem(replace(BERT, seq_len=24, name="small"), "float32")
    output, spent = observed_stages(problem)["output"] + 1.0, []
    fresh, known = Reference(problem), Reference(problem)
    assert known.accumulated
    assert known.same_precision(local=False)
    for of_problem in (fresh, known):
        work = Work(1.0)
        with work.counted():
            diagnose_stages({"output": output}, of_problem, "ieee", 0.02)
        spent.append(work.spent)
    assert spent[0] == spent[1] > 0.0


def test_reference_is_computed_once(monkeypatch):
    """A failing `assert_parity` computes the reference once in each precision."""
    problem = make_problem(replace(BERT, seq_len=24, name="small"), "float32")
    output, computed, stages = observed_stages(problem)["output"], [], Reference._compute

    def counted(self, dtype, *inputs):
        computed.append(dtype)
        return stages(self, dtype, *inputs)

    monkeypatch.setattr(Reference, "_compute", counted)
    with pytest.raises(AssertionError, match="out_proj-bias-missing"):
        parity.assert_parity(output - problem.weights["out_proj.bias"], problem=problem)
    assert computed == ["float64", "float32"]


def test_passing_assertion_is_cheap(problems, work):
    """A passing `assert_parity` costs at most 2.1 times the layer: once in each precision."""
    problem = problems["llama"]
    output = observed_stages(problem)["output"]
    work.clear()
    parity.assert_parity(output, problem=problem)
    assert sum(work) <= 2.1 * multiplications(problem)  # once in each precision


# ---- Samples -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case", [LLAMA, BERT, replace(LLAMA, name="two", batch=2, key_padding_lengths=(160, 9)), MLA]
)
def test_correct_layer_passes_each_sample(case):
    """Each sample of a correct layer has the layer's values; together they cover eight stages, and
    latents.
    """
    problem = make_problem(case, "float32")
    stages = edited_layer(problem, "float64", ()).forward()
    whole = Whole(problem, stages, WholeStages(stages, Reference(problem), "ieee"), Remembered())
    kinds = (TokenSamples(whole), RowSamples(whole, whole.other_stages))
    compared_stages = set()
    for part in (part for samples in kinds for part in (*samples.parts(), *samples.confirming())):
        values = run_steps(edited_layer(part.problem, "float64", ()).steps())
        for stage, x in part.observed.items():
            if part.compared_stages is None or stage in part.compared_stages:
                compared_stages.add(stage)
                np.testing.assert_allclose(
                    values[stage], x, rtol=1e-9, atol=1e-12, err_msg=f"{stage}: {part.words}"
                )
    assert compared_stages >= {"mask", "q", "k", "v", "scores", "attn_weights", "context", "output"}
    assert ("latents" in compared_stages) == (case.spec.latent is not None)


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
def test_absorbed_projections_are_exact(spec, name):
    """A sample that absorbs a wrong projection has the same stages as one that computes it."""
    problem, rows = make_problem(replace(BERT, spec=spec, seq_len=24), "float32"), np.array([1, 9])
    made = [bug for bug in bugs_for(problem.case) if bug.name == name][:1]
    some = {rows_of_query(rows): problem.inputs["query"][:, rows]}
    plain = SampledProblem.of(problem, Sample(rows, np.arange(16)))
    with_rows = replace(problem, inputs=problem.inputs | some)
    short = SampledProblem.of(with_rows, Sample(rows, np.arange(16), absorbs=True))
    expected, actual = (
        run_steps(edited_layer(version, "float64", made).steps()) for version in (plain, short)
    )
    assert [letter for letter in "kv" if isinstance(actual[letter], DeferredHeads)] == [
        letter for letter in "kv" if f"{letter}_proj" in name
    ]
    for stage in ("q", "scores", "attn_weights", "context", "output"):
        np.testing.assert_allclose(
            actual[stage], expected[stage], rtol=1e-9, atol=1e-12, err_msg=stage
        )


def test_repacked_weights_need_no_product(problems, work):
    """q, k and v of packed weights read per head are remembered products in a different order."""
    problem, remembered = problems["bert"], Remembered()
    made = next(bug for bug in bugs_for(problem.case) if bug.name == "fused-qkv-read-per-head")
    base = remembering(remembered)
    right, wrong = (edited_layer(problem, "float64", changes) for changes in ([base], [made, base]))
    right.qkv({})
    work.clear()
    actual = wrong.qkv({})
    assert not work
    expected = edited_layer(problem, "float64", [made]).qkv({})
    for name in "qkv":
        np.testing.assert_allclose(actual[name], expected[name], rtol=1e-9, atol=1e-12)


def test_stage_axes_are_reordered(problems, rng):
    """q in four recorded forms is brought into the axis order of the reference."""
    x = rng.standard_normal((1, 4, 160, 64))
    for recorded in (x, x.swapaxes(1, 2), x.swapaxes(1, 2).reshape(1, 160, 256), x[0]):
        np.testing.assert_array_equal(in_order(problems["bert"], "q", recorded), x)


def test_step_dependencies_are_found(problems):
    """`flow_of` finds the methods that a step calls and the stages that it reads."""
    mask, qkv, scores, attn_weights, context, output, _ = flow_of(problems["llama"])
    assert "is_later" in mask.methods
    assert "is_later" not in qkv.methods
    assert {"tables", "angles", "parameter"} <= qkv.methods
    assert scores.reads == {"q", "k"}
    assert attn_weights.reads == {"scores", "mask"}
    assert {"attn_weights", "v"} <= context.reads
    assert output.reads == {"context"}


# ---- Noise ---------------------------------------------------------------------------------------


def test_drawn_noise_matches_real_noise(rng, monkeypatch):
    """Noise drawn for a large product is within 25% of real rounding; TF32 draws none."""
    a, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((64, 2048), (2048, 96)))
    exact, float32 = a.astype(np.float64) @ b, Arithmetic(dtype_named("float32"))
    plain = float32.matmul(a, b) - exact
    monkeypatch.setattr(arithmetic, "LARGE", 0)
    for known in (None, exact):
        drawn = product_of(float32, a, b.T, known) - exact
        assert 0.8 < drawn.std() / plain.std() < 1.25
    cut = Arithmetic(
        dtype_named("float32"), "tf32"
    )  # which has fewer bits of the operands than the exact product
    np.testing.assert_array_equal(product_of(cut, a, b.T, exact), cut.matmul(a, b))


def test_quick_noise_grows_with_the_values(problems):
    """For logarithms of weights, the quick ratio is within a factor of 5 of the full one."""
    made = next(bug for bug in bugs_for(BERT) if bug.name == "softmax-log")
    trial = Trial(
        problems["bert"],
        {"output": observed_stages(problems["bert"], "softmax-log")["output"]},
        "ieee",
    )
    ratios = [
        trial.deviation("output", (made,), quick=is_quick).ratio for is_quick in (True, False)
    ]
    assert 0.2 < ratios[0] / ratios[1] < 5.0


# ---- Zeros ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_hidden_key_fails_in_16_bits(dtype):
    """One key wrongly hidden in the last of 200 rows fails in bfloat16 and float16."""
    case = Case("zeros", AttentionSpec(16, 2), "", batch=1, seq_len=200, is_causal=True)
    problem = make_problem(case, dtype)

    def hidden(_, original, masked):
        masked = original(masked).copy()
        masked[..., -1, 0] = True
        return masked

    def stages(changes):
        values = edited_layer(problem, dtype, changes).forward()
        return {
            name: values[name].astype(dtype_of_stage(name, dtype))
            for name in ("attn_weights", "context", "output")
        }

    parity.assert_parity(stages([]), problem=problem)
    wrong = stages([Edit(overrides={"hidden": hidden})])
    with pytest.raises(AssertionError):
        # A search of the cause would take a minute.
        parity.assert_parity(wrong, problem=problem, diagnose=False)

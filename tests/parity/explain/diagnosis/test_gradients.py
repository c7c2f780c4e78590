"""Gradients are diagnosed: bugs of the backward pass are named, and so are bugs of the forward
pass.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.input_errors import rejects
from helpers.samples import sample
from wild.rates import Job, grade_of, verdict_on
from wild.sets import BUGS, RIGHTS, TRAINING

import parity
from mha_spec import Alibi, AttentionSpec, Gate, Norm, RelativeBias, Rope
from parity.explain.diagnosis.bugs import GRADIENTS, bugs_for, known_bugs
from parity.explain.diagnosis.bugs.backward import dropout_of
from parity.explain.diagnosis.changed_backward import edited_backward
from parity.explain.diagnosis.dropout import factors_between
from parity.explain.diagnosis.gradients import GradientTrial
from parity.measure.core.stages import run_steps
from parity.measure.core.trace import Reference
from parity.measure.core.weights import dtype_named
from parity.use.testing.assertion import compare_arrays

RICH = parity.Case(
    "training",
    AttentionSpec(32, 8, num_kv_heads=2, rope=Rope(), qk_norm=Norm(), gate=Gate(bias=True)),
    "a layer with most features",
    seq_len=8,
    is_causal=True,
    key_padding_lengths=(8, 6),
    bias=True,
)
PLAIN = parity.Case("plain", AttentionSpec(32, 4), "nothing special", seq_len=8)
CAPPED = parity.Case(
    "capped", AttentionSpec(32, 4, soft_cap=2.0, sinks=True), "a cap", seq_len=8, is_causal=True
)
WINDOW = parity.Case(
    "window",
    AttentionSpec(32, 4, num_kv_heads=2, window_size=3, sinks=True),
    "a window",
    seq_len=8,
    is_causal=True,
)
BIASED = parity.Case(
    "biased",
    AttentionSpec(32, 4, relative_bias=RelativeBias(8, 16)),
    "biases",
    seq_len=8,
    bias=True,
)
CHUNKS = parity.Case("chunks", AttentionSpec(32, 4, chunk_size=4), "chunks", seq_len=8)
ALIBI = parity.Case("alibi", AttentionSpec(32, 4, alibi=Alibi()), "ALiBi", seq_len=8)
PACKED = parity.Case(
    "packed",
    AttentionSpec(32, 4),
    "two documents",
    seq_len=8,
    segment_ids=((0,) * 5 + (1,) * 3, (0,) * 8),
)
RECORDED = ("gate", "context", "attn_weights", "scores")


def gradients_of(problem, *edits):
    """Return the gradients of the reference with edits, in float32."""
    backward = edited_backward(problem, "float32", edits, "ieee", fused=False)
    return backward.gradients(with_stages=True)


def alone(gradients):
    """Return the gradients without gradients of stages that few people record."""
    return {name: x for name, x in gradients.items() if name[5:] not in (*RECORDED, *"qkv")}


def bug_named(case, name):
    return next(bug for bug in known_bugs(case, {GRADIENTS}) if bug.name == name)


@pytest.mark.costly("diagnoses every bug of the backward pass")
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(PLAIN, marks=pytest.mark.thorough),
        pytest.param(CAPPED, marks=pytest.mark.thorough),
        pytest.param(RICH, marks=pytest.mark.nightly),
    ],
    ids=lambda case: case.name,
)
def test_bugs_of_backward_pass_are_named(case):
    """Each bug that changes a gradient is named from gradients alone, or listed as an
    alternative.
    """
    problem = parity.make_problem(case, "float32")
    right = gradients_of(problem)
    names = {}
    for bug in known_bugs(case, {GRADIENTS}):
        names.setdefault(bug.name, bug)
    unnamed = []
    for name, bug in names.items():
        wrong = gradients_of(problem, bug)
        compared = compare_arrays(wrong, problem=problem)
        if all(comparison.passed for comparison in compared):
            continue
        assert any(not np.array_equal(wrong[stage], right[stage]) for stage in right)
        diagnosis = parity.diagnose(wrong, problem)
        explanations = [
            diagnosis.likely_bug,
            *(about for f in diagnosis.findings for about in f.others),
        ]
        if name not in explanations and bug.about not in explanations:
            unnamed.append((name, explanations))
    assert unnamed == []


@pytest.mark.parametrize(
    ("case", "name"),
    [
        (WINDOW, "grad-window-ignored"),
        (WINDOW, "grad-window-one-too-wide"),
        (WINDOW, "grad-window-one-too-narrow"),
        (WINDOW, "grad-sinks-ignored"),
        (CAPPED, "grad-scores-uncapped"),
        (BIASED, "grad-relative-bias-ignored"),
        (BIASED, "grad-bias-ignored"),
        (ALIBI, "grad-alibi-ignored"),
        (CHUNKS, "grad-chunk-ignored"),
        (PACKED, "grad-segments-ignored"),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_second_copy_of_weights_is_named(case, name):
    """A backward pass that computes its weights by other rules than the forward pass is named, in
    each of its forms, from gradients of stages and of weights alone.
    """
    problem = parity.make_problem(case, "float32")
    forms = [bug for bug in known_bugs(case, {GRADIENTS}) if bug.name == name]
    assert len(forms) > 1
    for bug in forms:
        wrong = gradients_of(problem, bug)
        for observed in (wrong, alone(wrong)):
            diagnosis = parity.diagnose(observed, problem)
            names = [
                diagnosis.likely_bug,
                *(about for f in diagnosis.findings for about in f.others),
            ]
            assert name in names or bug.about in names, (bug.about, names)


@pytest.mark.parametrize(
    ("stale", "words"), [("kv", "keys and values"), ("k", "keys"), ("v", "values")]
)
def test_stale_blocks_of_a_ring_are_named(stale, words):
    """A ring whose backward pass has stale keys, stale values or both is named with what is stale,
    from its steps on each rank.
    """
    for is_causal in (False, True):
        problem = parity.make_problem(replace(PLAIN, is_causal=is_causal), "float32")
        backward = edited_backward(problem, "float32", (), "ieee", fused=False)
        stages = run_steps(backward.layer.steps())
        stages["d_context"] = backward.gradients(with_stages=True)["grad.context"]
        diagnosis = parity.diagnose(gradients_of_ring(stages, stale), problem)
        assert [finding.likely_bug for finding in diagnosis.findings] == ["grad-ring-block-stale"]
        assert f"its own block of {words} in every step" in str(diagnosis)


def gradients_of_ring(stages, stale, ranks=4):
    """Return the gradients of q, k and v by the steps of the ranks of a ring."""
    q, k, v, d_context = (stages[name] for name in ("q", "k", "v", "d_context"))
    scores = np.where(stages["mask"], -np.inf, stages["scores"])
    lse = np.log(np.exp(scores).sum(axis=-1, keepdims=True))
    delta = (d_context * stages["context"]).sum(axis=-1, keepdims=True)
    scale = np.float32(q.shape[-1] ** -0.5)
    d_q, d_k, d_v = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    size = q.shape[2] // ranks
    blocks = [slice(rank * size, (rank + 1) * size) for rank in range(ranks)]
    for own in blocks:
        for block in blocks:
            keys = k[:, :, own if "k" in stale else block]
            values = v[:, :, own if "v" in stale else block]
            weights = np.exp(q[:, :, own] @ keys.swapaxes(2, 3) * scale - lse[:, :, own])
            weights = np.where(stages["mask"][:, :, own, block], np.float32(0.0), weights)
            d_weights = d_context[:, :, own] @ values.swapaxes(2, 3)
            d_scores = weights * (d_weights - delta[:, :, own]) * scale
            d_q[:, :, own] += d_scores @ keys
            d_k[:, :, block] += d_scores.swapaxes(2, 3) @ q[:, :, own]
            d_v[:, :, block] += weights.swapaxes(2, 3) @ d_context[:, :, own]
    return {"grad.q": d_q, "grad.k": d_k, "grad.v": d_v}


@pytest.mark.thorough
def test_gradients_of_sequences_are_named():
    """Gradients of parameters that come from one sequence, or from some, are named with these
    sequences, in float32 and bfloat16.
    """
    case = replace(WINDOW, batch=4)
    for dtype in ("float32", "bfloat16"):
        problem = parity.make_problem(case, dtype)
        for sequences, words in (([0], "sequence 0 alone"), ([2, 3], "sequences 2, 3 alone")):
            is_left_out = ~np.isin(np.arange(4), sequences)[:, None, None]
            cotangent = np.where(is_left_out, 0.0, problem.inputs["cotangent"])
            inputs = problem.inputs | {"cotangent": cotangent.astype(dtype_named(dtype))}
            of_some = gradients_in(replace(problem, inputs=inputs), dtype)
            right = gradients_in(problem, dtype)
            for names in (["sinks"], ["q_proj.bias", "v_proj.bias"], [*problem.weights]):
                wrong = right | {f"grad.{name}": of_some[f"grad.{name}"] for name in names}
                diagnosis = parity.diagnose(wrong, problem)
                (finding,) = diagnosis.findings
                assert finding.likely_bug == "grad-batch-not-summed"
                assert words in str(diagnosis)


def test_rounded_gradients_are_named():
    """Right gradients of parameters, rounded to 16 bits in the end, are named; one alone is
    described as rounded.
    """
    problem = parity.make_problem(PLAIN, "float32")
    right = {name: torch.from_numpy(x) for name, x in gradients_in(problem, "float32").items()}
    for dtype in ("bfloat16", "float16"):
        for ending in ("_proj.weight", ".bias", ("_proj.weight", ".bias")):
            names = [name for name in right if name.endswith(ending)]
            rounded = {name: right[name].to(getattr(torch, dtype)).float() for name in names}
            diagnosis = parity.diagnose(right | rounded, problem)
            assert [f.likely_bug for f in diagnosis.findings] == [f"grad-parameters-{dtype}"]
    alone = right["grad.out_proj.weight"].bfloat16().float()
    diagnosis = parity.diagnose(right | {"grad.out_proj.weight": alone}, problem)
    (finding,) = diagnosis.findings
    assert finding.description.abouts == ("the values are rounded to bfloat16",)


def gradients_in(problem, dtype):
    backward = edited_backward(problem, dtype, (), "ieee", fused=False)
    return backward.gradients(with_stages=True)


def test_right_gradients_raise_no_alarm():
    """Right gradients of the reference's own precision agree, in every dtype."""
    for dtype in ("float32", "bfloat16", "float16"):
        problem = parity.make_problem(RICH, dtype)
        backward = edited_backward(problem, dtype, (), "ieee", fused=True)
        gradients = backward.gradients(with_stages=True)
        assert parity.diagnose(gradients, problem).kind == "none"
        parity.assert_parity(gradients, problem=problem)


SOME_RIGHT = [right for right in RIGHTS.values() if right.style in TRAINING and right.seed == 0][
    ::7
]


@sample(4)
@pytest.mark.parametrize("right", SOME_RIGHT, ids=lambda right: right.id)
def test_right_training_raises_no_alarm(right):
    """Training steps of right ports in torch and JAX raise no alarm."""
    diagnosis = parity.diagnose(right.observed(), right.problem)
    assert diagnosis.kind == "none"
    assert not diagnosis.malformed


WRONG = [name for name, bug in BUGS.items() if bug.style in TRAINING]


SLOW = "torch_training-weights-detached-alone"
"""A bug that is named after a search of seconds, since it leaves few gradients wrong."""


@sample(where=lambda name: name in WRONG[::5] and name != SLOW)
@pytest.mark.parametrize("name", WRONG)
def test_wrong_training_steps_are_named(name):
    """Each wrong training step of the ports is named."""
    verdict = verdict_on(Job(name))
    assert grade_of(verdict) == "right", verdict["names"]
    assert verdict["first"] == BUGS[name].stage


def test_first_gradient_follows_data_flow():
    """The first wrong gradient is first in the backward data flow, whatever the order of names."""
    problem = parity.make_problem(RICH, "float32")
    wrong = gradients_of(problem, bug_named(RICH, "grad-stopped-at-k"))
    names = sorted(wrong, reverse=True)
    diagnosis = parity.diagnose({name: wrong[name] for name in names}, problem)
    assert diagnosis.stage == "grad.k"
    diagnosis = parity.diagnose(alone(wrong), problem)
    assert diagnosis.stage == "grad.k_norm.weight"
    assert diagnosis.likely_bug == "grad-stopped-at-k"


@sample(2)
@pytest.mark.parametrize("name", ["scale-missing", "rope-theta-1000", "causal-off-by-one"])
def test_forward_bug_is_one_finding(name):
    """Gradients of a layer with a forward bug follow from it; alone, they also name it."""
    problem = parity.make_problem(RICH, "float32")
    bug = next(bug for bug in bugs_for(RICH) if bug.name == name)
    wrong = edited_backward(problem, "float32", (bug,), "ieee", fused=False)
    stages = run_steps(wrong.layer.steps())
    gradients = alone(wrong.gradients())
    of_forward = {stage: stages[stage] for stage in ("q", "k", "v", "scores", "output")}
    for observed in (of_forward | gradients, {"output": stages["output"]} | gradients):
        diagnosis = parity.diagnose(observed, problem)
        (finding,) = diagnosis.findings
        assert finding.bugs == (name,)
        assert any(stage.startswith("grad.") for stage in finding.follows)
    diagnosis = parity.diagnose(gradients, problem)
    assert [finding.bugs for finding in diagnosis.findings] == [(name,)]


def test_unknown_gradients_are_one_finding():
    """Gradients that nothing explains are one finding: the first, with those that follow."""
    problem = parity.make_problem(RICH, "float32")
    gradients = gradients_of(problem)
    rng = np.random.default_rng(0)
    for name in ("grad.k", "grad.k_proj.weight", "grad.query"):
        gradients[name] = rng.standard_normal(gradients[name].shape).astype(np.float32)
    diagnosis = parity.diagnose(gradients, problem)
    assert diagnosis.kind == "unknown"
    (finding,) = diagnosis.findings
    assert finding.stage == "grad.k"
    assert finding.follows == ("grad.k_proj.weight", "grad.query")


def test_two_backward_bugs_are_two_findings():
    """A bias without a gradient and a group that is not summed are two findings."""
    problem = parity.make_problem(RICH, "float32")
    names = ("grad-missing-of-out_proj-bias", "grad-group-averaged")
    wrong = gradients_of(problem, *(bug_named(RICH, name) for name in names))
    diagnosis = parity.diagnose(wrong, problem)
    assert [finding.likely_bug for finding in diagnosis.findings] == [*names]


def test_right_layer_keeps_its_dropout():
    """The right gradients of a layer that drops weights are those with its dropout, although the
    reference has none.
    """
    problem = parity.make_problem("gqa-causal", "float32")
    shape = (problem.case.batch, problem.spec.num_heads, problem.case.seq_len, problem.case.key_len)
    dropout = dropout_of(np.random.default_rng(0).integers(0, 2, shape) * 2.0)
    reference = Reference(problem, True)
    observed = gradients_of(problem, dropout)
    trial = GradientTrial(problem, observed, "ieee", reference, inner=(dropout,))
    expected = trial.right.stage("grad.v_proj.weight")
    np.testing.assert_allclose(expected, observed["grad.v_proj.weight"], atol=1e-4)
    assert np.abs(expected - reference.accumulated["grad.v_proj.weight"]).max() > 0.1


def test_unknown_names_raise():
    """Unknown names are an error, also next to known ones, and so are gradients with a cache."""
    problem = parity.make_problem(PLAIN, "float32")
    output = problem.inputs["query"]
    for observed in (
        {"output": output, "grad.nothing": output},
        {"outputs": output},
        {"grad.query": output, "scorse": output},
        {"output": output, "gate": output},
        {},
    ):
        with rejects("observed"):
            parity.diagnose(observed, problem)
    cached = replace(PLAIN, chunks=(4, 4), capacity=8)
    with rejects("observed"):
        parity.diagnose({"grad.query": output}, parity.make_problem(cached, "float32"))


def test_absent_gradient_of_torch_is_zero():
    """A gradient that is None, as torch leaves it, is named like one of zeros."""
    problem = parity.make_problem(PLAIN, "float32")
    gradients = alone(gradients_of(problem)) | {"grad.out_proj.bias": None}
    diagnosis = parity.diagnose(gradients, problem)
    assert diagnosis.likely_bug == "grad-missing-of-out_proj-bias"
    with pytest.raises(AssertionError, match="grad-missing-of-out_proj-bias"):
        parity.assert_parity(gradients, problem=problem)


def test_absent_gradients_of_stages_are_zero():
    """None counts as 0 for a stage that gets no gradient, as `retain_grad` leaves it."""
    problem = parity.make_problem(RICH, "float32")
    wrong = gradients_of(problem, bug_named(RICH, "grad-stopped-at-k"))
    diagnosis = parity.diagnose(wrong | {"grad.k": None}, problem)
    assert diagnosis.likely_bug == "grad-stopped-at-k"
    assert diagnosis.stage == "grad.k"
    with pytest.raises(AssertionError, match="grad-stopped-at-k"):
        parity.assert_parity(wrong | {"grad.k": None}, problem=problem)
    with rejects("observed"):
        parity.diagnose({"grad.nothing": None}, problem)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_not_finite_have_no_source(value):
    """Gradients that are all NaN, or all infinite, are described so, and not as those of another
    one.
    """
    problem = parity.make_problem(PLAIN, "float32")
    gradients = alone(gradients_of(problem))
    diagnosis = parity.diagnose({name: x * 0 + value for name, x in gradients.items()}, problem)
    (finding,) = diagnosis.findings
    assert [edit.name for edit in finding.description.patterns] == [
        "nan" if np.isnan(value) else "infinite"
    ]


def test_small_factor_is_not_called_zero():
    """In 16 bits, a gradient times 0.01 is described by its factor, and one of zeros as 0."""
    problem = parity.make_problem(replace(PLAIN, is_causal=True), "bfloat16")
    backward = edited_backward(problem, "bfloat16", (), "ieee", fused=False)
    gradients = alone(backward.gradients())
    for factor, pattern in ((0.01, "factor"), (0.0, "zeros")):
        small = gradients["grad.out_proj.weight"] * factor
        diagnosis = parity.diagnose(gradients | {"grad.out_proj.weight": small}, problem)
        (finding,) = diagnosis.findings
        assert finding.description.patterns[0].name == pattern
    assert finding.description.abouts == ("all values there are 0",)


def test_one_gradient_alone_is_asserted():
    """`assert_parity` names the bug from one gradient of torch."""
    problem = parity.make_problem(PLAIN, "float32")
    wrong = gradients_of(problem, bug_named(PLAIN, "grad-softmax-mean-missing"))
    with pytest.raises(AssertionError, match="grad-softmax-mean-missing"):
        parity.assert_parity({"grad.query": torch.from_numpy(wrong["grad.query"])}, problem=problem)


def test_axes_of_recorded_gradient_are_read():
    """A gradient recorded as (B, T, N, H) is read in these axes."""
    problem = parity.make_problem(PLAIN, "float32")
    gradients = gradients_of(problem)
    swapped = gradients | {"grad.q": gradients["grad.q"].swapaxes(1, 2)}
    diagnosis = parity.diagnose(swapped, problem)
    assert diagnosis.kind == "convention"
    assert "grad.q" in diagnosis.conventions
    malformed = parity.diagnose(gradients | {"grad.q": np.zeros(3, np.float32)}, problem)
    assert malformed.is_wrong
    assert "grad.q" in malformed.malformed


def test_stage_gradients_are_optional():
    """Gradients of stages are compared if they are recorded, and required of no backend."""
    problem = parity.make_problem(PLAIN, "float32")
    every = Reference(problem, True).accumulated
    assert "grad.scores" not in every
    assert "grad.query" in every
    some = Reference(problem, True, frozenset({"grad.scores"})).accumulated
    assert {"grad.scores", "grad.context", "grad.query"} <= some.keys()


def test_dropout_is_read_from_its_weights():
    """The factors of weights with dropout are 0 where they were dropped and 1 / (1 - p) elsewhere;
    other weights have none.
    """
    rng = np.random.default_rng(0)
    right = rng.uniform(0.05, 1.0, (2, 3, 8, 8))
    right /= right.sum(axis=-1, keepdims=True)
    keep = rng.random(right.shape) > 0.25
    expected = keep / 0.75
    np.testing.assert_allclose(factors_between(expected * right, right, "float32"), expected)
    assert factors_between(rng.random(right.shape) * right, right, "float32") is None

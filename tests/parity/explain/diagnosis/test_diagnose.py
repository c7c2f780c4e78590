"""The diagnosis names the bug that explains a difference, or lists the bugs that it cannot
distinguish.
"""

import contextlib
import itertools
import json
import random
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from helpers.diagnoses import named_bugs
from helpers.input_errors import Misuse, rejects
from helpers.llama_folder import make_model
from helpers.samples import sample
from helpers.selection import one_a_code

import parity
from mha_spec import AttentionSpec, Latent, Llama3Scaling, RelativeBias, Rope, YarnScaling
from parity import CASES, Case, make_problem, random_weights
from parity.explain.diagnosis.attention import attention_for
from parity.explain.diagnosis.bugs import bugs_for, edited_layer
from parity.explain.diagnosis.bugs.record import Edit
from parity.explain.diagnosis.diagnose import diagnose, observe
from parity.explain.diagnosis.trial import Trial
from parity.explain.diagnosis.weights.diagnose import diagnose_weights
from parity.explain.diagnosis.weights.ulps import FEWER_BITS
from parity.measure.backends import driver
from parity.measure.backends.record import record
from parity.measure.core.cases import QUICK
from parity.measure.core.compare import dtype_of_stage
from parity.measure.core.stages import run_steps, stage_named, steps_of
from parity.measure.core.trace import Reference
from parity.measure.core.weights import dtype_named
from parity.use.cli.main import main
from parity.use.running.run import run_cases
from parity_lab.selftest import SELFTEST_CASES, bugs_in, inject

CASE_OF = {case.name: case for case in SELFTEST_CASES}
SPEC = AttentionSpec(32, 4, num_kv_heads=2, rope=Rope(10000.0))


def observed_in(problem, bugs=()):
    """Return the stages of the reference with bugs, in the problem's dtype."""
    with np.errstate(all="ignore"):
        values = run_steps(edited_layer(problem, problem.dtype, bugs).steps())
    return {name: x.astype(dtype_of_stage(name, problem.dtype)) for name, x in values.items()}


cached_bugs = cache(bugs_for)  # hundreds of calls while the file is collected


def bug(case, name):
    return next(known for known in cached_bugs(case) if known.name == name)


# ---- Nothing wrong -------------------------------------------------------------------------------


RIGHT = [("torch", name) for name, case in CASES.items() if case.dtype is None]
# JAX has the uncached trained cases, whose scores are the largest; test_run compares its stages of
# most cases with the budget of the diagnosis.
RIGHT += [
    ("jax", name) for name, case in CASES.items() if case.trained is not None and not case.is_cached
]


@sample(32, where=lambda backend, case: case in QUICK and backend == "torch")
@pytest.mark.parametrize(("backend", "case"), RIGHT)
def test_no_bug_in_correct_stages(backend, case):
    """Correct float32 stages have the kind `none`, and the message says that nothing differs, and
    which settings have no effect on so few tokens.
    """
    expected = Reference(make_problem(CASES[case], "float32"))
    diagnosis = diagnose(record(backend, expected).accumulated, expected.problem)
    assert diagnosis.kind == "none"
    first, *others = str(diagnosis).splitlines()
    assert first == "nothing differs by more than rounding"
    assert all(other.startswith("Not exercised: ") for other in others)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
@pytest.mark.parametrize("case", ["rope-gqa", "bias-causal", "ragged"])
def test_no_bug_in_other_dtypes(case, dtype):
    """Correct stages of torch in bfloat16, float16 and float64 have the kind `none`."""
    expected = Reference(make_problem(CASES[case], dtype))
    assert diagnose(record("torch", expected).accumulated, expected.problem).kind == "none"


def test_json_says_whether_output_agrees():
    """JSON has whether the output agrees, whatever else is wrong; null if it was not compared."""
    problem = make_problem(CASES["causal"], "float32")
    observed = observed_in(problem)
    wrong = {**observed, "output": 2 * observed["output"]}
    without_output = {name: x for name, x in observed.items() if name != "output"}
    gradient = {"grad.query": np.zeros_like(problem.inputs["query"])}
    expected = {False: wrong, None: without_output, True: observed}
    for agrees, stages in expected.items():
        assert diagnose(stages, problem).to_dict()["output_agrees"] is agrees
    wrong_gradient = diagnose({"output": observed["output"], **gradient}, problem)
    assert wrong_gradient.is_wrong
    assert wrong_gradient.output_agrees


# ---- One bug -------------------------------------------------------------------------------------

UNTRAINED = [case for case in SELFTEST_CASES if case.trained is None]
PLAIN = [
    case for case in UNTRAINED if not case.name.startswith("rope-")
]  # the others show the same bugs


def shown(case):
    """Return the names of the bugs that show in the stages of a case, and separately of those that
    only lose precision.
    """
    shown_bugs = [h for h in bugs_for(case) if h.shows_alone and not h.backward]
    if case.name == "left-padding":
        # Its only rows without a key are padding, which is not compared.
        shown_bugs = [h for h in shown_bugs if not h.name.startswith("empty-row-")]
    return {h.name for h in shown_bugs if not h.is_loss}, {h.name for h in shown_bugs if h.is_loss}


def in_one(cases):
    """Return a case for each bug: the last plain one that shows it, else the last other one.

    Lost precision has the first case that shows it.
    """
    last, first = {}, {}
    for case in (*(case for case in cases if case not in PLAIN), *PLAIN):
        plain, lost = shown(case)
        last |= dict.fromkeys(sorted(plain), case.name)
    for case in reversed(cases):
        plain, lost = shown(case)
        first |= dict.fromkeys(sorted(lost), case.name)
    return [(case, name) for name, case in {**last, **first}.items()]


ALL = in_one(SELFTEST_CASES)
"""Each bug in one case; `test_bug_shows_first_at_its_stages` covers the other cases."""


NEAREST = {
    # A number halfway between two narrower ones is rounded the other way here: one element is off
    # by a unit of the narrow dtype, hundreds of times its budget. The bug is only reported as the
    # nearest one. `mha` has a form of each softmax that is named, and one that is not.
    *(
        ("mha", name)
        for name in (
            "out_proj-in-bfloat16",
            "out_proj-in-float16",
            "scores-bfloat16",
            "scores-float16",
            "softmax-bfloat16",
            "softmax-float16",
            "v_proj-in-bfloat16",
        )
    ),
    ("cached", "cache-float16"),
    # Float16 has most angles of these few positions.
    ("packed", "rope-angles-float16"),
}


ALIKE = {"padding-of-queries", "padding-off-by-one", "own-mask-padding-visible"}
"""Bugs that differ from others only in padding, which is not compared, or not at all if a mask
hides padding alone.
"""

ALIKE_IN_CASE = {
    ("packed", "rope-angles-float16"),
    ("quantized-cache", "cache-values-missing"),  # scales of 0 leave no value either
}
"""Bugs of which a form differs from a different bug only in positions or values that a case does
not have.
"""

ONE_A_CODE = one_a_code(ALL, lambda entry: bug(CASE_OF[entry[0]], entry[1]).overrides)


SLOW = {("temperature", "cache-slot-of-shortest"), ("packed", "rope-angles-float16")}
"""Bugs whose search takes several seconds. A slot of the longest sequence and other numbers of
float16 are found in the same way.
"""


@sample(44, where=lambda case, name: (case, name) in {*ONE_A_CODE, *NEAREST} - SLOW)
@pytest.mark.parametrize(("case", "name"), ALL)
def test_each_bug_is_distinguished(case, name):
    """Each form of a bug is the only one named, or the nearest one for those in `NEAREST`."""
    may_be_nearest = (case, name) in NEAREST
    case = CASE_OF[case]
    problem = make_problem(case, "float32")
    forms = [known for known in bugs_for(case) if known.name == name]
    abouts = [form.about for form in forms]
    for made in forms:
        diagnosis = diagnose(observed_in(problem, [made]), problem)
        if may_be_nearest and not diagnosis.named:
            assert diagnosis.findings[0].nearest[0][0] in abouts
            continue
        (finding,) = diagnosis.named
        is_alike = name in ALIKE or (case.name, name) in ALIKE_IN_CASE
        is_other = is_alike and made.about in finding.others
        assert named_bugs(diagnosis) == [name] or is_other, made.about
        assert diagnosis.kind == ("precision" if made.is_loss else "structure")
        assert finding.ratio <= 1.0
        assert finding.error < finding.error_before


def visible(case):
    return [known for known in bugs_for(case) if known.shows_alone and not known.backward]


FIRST_OF = {
    (known.name, known.about): case.name
    for case in reversed(SELFTEST_CASES)
    for known in visible(case)
}
"""The first case that shows each form of each bug."""
ROUNDED = {
    ("trained-anarcii-causal", about)
    for about in (
        "the softmax takes its scores, and gives attention weights, in float16",
        "attention weights are rounded to float16",
    )
}
"""Cases, and forms of bugs, in which an attention weight halfway between two float16 values is
rounded the other way.
"""


def check_first_stages(case, bugs):
    """Each bug first shows at one of its stages, and explains all stages except in `ROUNDED`."""
    problem = make_problem(CASE_OF[case], "float32")
    for made in bugs:
        with np.errstate(all="ignore"):
            trial = Trial(problem, observed_in(problem, [made]), "ieee")
            wrong = trial.wrong(trial.stages, ())
            left = trial.wrong(trial.stages, (made,))
        assert stage_named(wrong[0]).kind in made.stages, made.about
        assert (left == []) is ((case, made.about) not in ROUNDED), made.about


@sample(
    case=[
        *("gqa-rope-causal", "rope-partial", "rope-sections-interleaved", "rope-llama3"),
        *("grid-bias", "chunk", "padded", "left-padding", "quantized-cache"),
    ]
)
@pytest.mark.parametrize("case", [case for case in CASE_OF if case in FIRST_OF.values()])
def test_bug_shows_first_at_its_stages(case):
    """Each bug shows at its stages in the first case that shows it."""
    bugs = [made for made in visible(CASE_OF[case]) if FIRST_OF[made.name, made.about] == case]
    assert bugs
    check_first_stages(case, bugs)


@pytest.mark.nightly
@pytest.mark.parametrize("case", CASE_OF)
def test_bug_shows_first_in_every_case(case):
    """Each bug shows at its stages in each case that shows it."""
    check_first_stages(case, visible(CASE_OF[case]))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "name",
    ["rope-interleaved", "kv-heads-tiled", "k-v-swapped", "causal-off-by-one", "scale-missing"],
)
def test_bugs_are_named_in_half_precision(name, dtype):
    """Five structural bugs are named in bfloat16 and in float16."""
    case = CASE_OF["gqa-rope-causal"]
    problem = make_problem(case, dtype)
    assert named_bugs(diagnose(observed_in(problem, [bug(case, name)]), problem)) == [name]


@pytest.mark.costly("injects and diagnoses every bug of a case")
@pytest.mark.parametrize(
    "case",
    [
        pytest.param("cross", marks=pytest.mark.thorough),
        pytest.param("mha", marks=pytest.mark.nightly),
        pytest.param("gqa-rope-causal", marks=pytest.mark.nightly),
    ],
)
def test_bug_is_named_from_output_alone(case):
    """A bug that changes the output is named from it alone, or is among the alternatives."""
    case = CASE_OF[case]
    problem = make_problem(case, "float32")
    clean = observed_in(problem)["output"]
    wrong = []
    for made in bugs_for(case):
        if made.is_loss:  # tested in test_precision
            continue
        output = observed_in(problem, [made])["output"]
        diagnosis = diagnose({"output": output}, problem)
        (finding, *_) = diagnosis.named or [None]
        if np.allclose(output, clean, rtol=1e-5, atol=1e-5):
            is_right = diagnosis.kind == "none"  # the bug cancels, as a shift of all positions does
        else:
            is_right = finding and (finding.bugs == (made.name,) or made.about in finding.others)
        if not is_right:
            wrong.append((made.name, str(diagnosis)))
    assert wrong == []


def test_indistinguishable_bugs_are_listed():
    """Two bugs of RoPE positions with the same output are both listed as indistinguishable."""
    case = CASE_OF["gqa-rope-causal"]
    problem = make_problem(case, "float32")
    output = observed_in(problem, [bug(case, "rope-off-by-one-k")])["output"]
    diagnosis = diagnose({"output": output}, problem)
    (finding,) = diagnosis.named
    explanations = {finding.about, *finding.others}
    assert explanations == {
        "q's RoPE positions are one too low",
        "k's RoPE positions are one too high",
    }
    assert f"or {finding.others[0]}: the observed stages cannot distinguish them" in str(diagnosis)


@pytest.mark.parametrize(
    ("case", "stage"), [("mha", "q"), ("mha", "k"), ("gqa-rope-causal", "q"), ("cross", "v")]
)
def test_permuted_heads_show_their_order(case, stage):
    """Permuted heads of q, k or v are named, and the message has their order."""
    case = CASE_OF[case]
    problem = make_problem(case, "float32")
    order = [2, 0, 3, 1, *reversed(range(4, case.spec.num_heads))]
    permuted = dict(problem.weights)
    for leaf in ("weight", "bias"):
        x = permuted[f"{stage}_proj.{leaf}"]
        heads = x.reshape(case.spec.num_heads, -1, *x.shape[1:])
        permuted[f"{stage}_proj.{leaf}"] = heads[order].reshape(x.shape)
    wrong = replace(problem, weights=permuted)
    observed = record("torch", Reference(problem), wrong).accumulated
    diagnosis = diagnose(observed, problem)
    assert named_bugs(diagnosis) == [f"{stage}-heads-permuted"]
    assert f"{stage}'s heads are in the order {' '.join(map(str, order))}" in str(diagnosis)


def test_exchanged_axes_of_a_square_batch():
    """Where tokens are as many as sequences, attention over the batch has weights of the expected
    shape, which are named.
    """
    case = Case("square", AttentionSpec(32, 4), "as many tokens as sequences", batch=5, seq_len=5)
    problem = make_problem(case, "float32")
    observed = observed_in(problem)
    q, k, v = (observed[name].swapaxes(0, 2) for name in "qkv")
    scores = case.spec.score_scale * q @ k.swapaxes(2, 3)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights = weights / weights.sum(axis=-1, keepdims=True)
    context = (weights @ v).swapaxes(0, 2)
    diagnosis = diagnose({"attn_weights": weights, "context": context}, problem)
    (finding,) = diagnosis.named
    assert finding.bugs == ("batch-as-tokens",)
    assert finding.stages == ("attn_weights", "context")


def test_lost_causality_hides_empty_slots():
    """A layer with a cache that hides nothing but empty slots has lost its causal mask."""
    case = CASES["decode"]
    problem = make_problem(case, "float32")
    mask = np.zeros(observed_in(problem)["step0.mask"].shape, bool)
    mask[..., case.chunks[0] :] = True
    (finding,) = diagnose({"step0.mask": mask}, problem).named
    assert finding.bugs == ("causal-ignored",)


# ---- Two and more --------------------------------------------------------------------------------


def stages_with(case, names):
    """Return the stages of torch with injected bugs, and the problem."""
    problem = make_problem(case, "float32", random_weights(case.spec, 1))
    with contextlib.ExitStack() as stack:
        changed = problem
        for name in names:
            changed = stack.enter_context(inject(name, changed, "torch"))
        return record("torch", Reference(problem), changed).accumulated, problem


@pytest.mark.costly("diagnoses ten pairs of bugs")
@pytest.mark.parametrize(
    "case",
    [
        "cross",
        # Each search with a cache is slow.
        pytest.param("cached", marks=pytest.mark.nightly),
    ],
)
def test_two_injected_bugs_are_named(case):
    """Among 10 random pairs of bugs, at least 80% of those that both show are named."""
    case = CASE_OF[case]
    # Lost precision is searched for on its own, and gradients are not among the stages.
    names = [name for name in bugs_in(case) if not name.startswith(("precision", "grad-"))]
    pairs = list(itertools.combinations(names, 2))
    random.Random(0).shuffle(pairs)
    alone = {}
    distinguishable = named = 0
    for pair in pairs[:10]:
        observed, problem = stages_with(case, pair)
        for name in pair:
            alone.setdefault(name, stages_with(case, [name])[0])
        if any(
            all(np.array_equal(x, alone[name][stage]) for stage, x in observed.items())
            for name in pair
        ):
            continue
        distinguishable += 1
        named += set(named_bugs(diagnose(observed, problem))) == set(pair)
    assert distinguishable >= 7
    assert named >= 0.8 * distinguishable


def test_bugs_at_three_stages_are_named():
    """Bugs of k, of the scores and of the output are all named, each at its stage."""
    case = CASE_OF["gqa-rope-causal"]
    problem = make_problem(case, "float32")
    names = ["rope-interleaved-k", "kv-heads-tiled", "heads-not-moved-back"]
    diagnosis = diagnose(observed_in(problem, [bug(case, name) for name in names]), problem)
    assert named_bugs(diagnosis) == names
    assert [finding.stage for finding in diagnosis.named] == [
        "k",
        "scores",
        "output",
    ]


def test_fused_path_bug_names_its_path(monkeypatch):
    """A mask that only the fused path ignores is named together with that path."""
    import mha_torch

    original = mha_torch.fused.attend

    def forgetful(query, key, value, mask, *inputs, **options):
        return original(query, key, value, replace(mask, mask=None), *inputs, **options)

    monkeypatch.setattr(mha_torch.fused, "attend", forgetful)
    expected = Reference(make_problem(CASES["causal"], "float32"))
    diagnosis = diagnose(record("torch", expected).accumulated, expected.problem)
    assert diagnosis.stage == "fused.output"
    assert diagnosis.named[0].bugs == ("mask-ignored",)
    assert diagnosis.named[0].about == "in the fused path: the mask is ignored"


def test_mask_wrong_only_in_later_calls():
    """A mask that is wrong only in later calls is one finding: the bug, with these calls; stages
    that were not computed from it follow.
    """
    problem = make_problem(CASE_OF["cached"], "float32")
    observed, wrong = (
        observed_in(problem),
        observed_in(problem, [bug(CASE_OF["cached"], "causal-excludes-self")]),
    )
    later = {
        name: wrong[name]
        for name in wrong
        if name.endswith("mask") and not name.startswith("step0")
    }
    observed |= later
    del observed["step2.output"]  # it agrees, so that nothing would be wrong
    diagnosis = diagnose(
        {name: x for name, x in observed.items() if not stage_named(name).path}, problem
    )
    assert not np.array_equal(observed["step0.mask"], wrong["step0.mask"])
    (finding,) = diagnosis.findings
    assert (diagnosis.kind, finding.bugs) == ("structure", ("causal-excludes-self",))
    assert finding.about.endswith(", in calls after the first")
    assert finding.stages == ("step1.mask", "step2.mask")
    assert finding.follows == ("step1.attn_weights", "step2.attn_weights")


def test_stages_follow_the_finding_they_read():
    """A stage that was not computed from wrong values follows the finding of these values, also if
    another bug is found between them.
    """
    problem = make_problem(CASE_OF["cached"], "float32")
    observed = observed_in(problem, [bug(CASE_OF["cached"], "out_proj-bias-missing")])
    observed = {name: x for name, x in observed.items() if not stage_named(name).path}
    caches = tuple(name for name in observed if name.endswith("cache.values"))
    for name in observed:
        if name.endswith(".v"):
            observed[name] = observed[name][:, ::-1].copy()
    of_values, of_output = diagnose(observed, problem).findings
    assert (of_values.bugs, of_values.follows) == (("v-heads-reversed",), caches)
    assert (of_output.bugs, of_output.follows) == (("out_proj-bias-missing",), ())


def test_stage_after_two_nan_stages_follows():
    """A stage that is right as a whole, after two that are not finite, is reported with the last of
    them: without either, it would still be NaN.
    """
    problem = make_problem(CASE_OF["cached"], "float32")
    observed = observed_in(problem)
    observed = {name: x for name, x in observed.items() if not stage_named(name).path}
    observed["step1.cache.values"] = np.full_like(observed["step1.cache.values"], np.nan)
    observed["step1.context"] = np.full_like(observed["step1.context"], np.inf)
    of_values, of_context = diagnose(observed, problem).findings
    assert (of_values.stage, of_context.stage) == ("step1.cache.values", "step1.context")
    assert of_context.follows == ("step1.output",)


def test_stage_reading_right_values_is_new():
    """A stage that is within the budget of the whole layer, but not within its own, follows from no
    stage that it does not read.
    """
    problem = make_problem("gqa-causal", "float32")
    observed = observed_in(problem)
    observed = {name: x for name, x in observed.items() if not stage_named(name).path}
    noise = np.random.default_rng(0).standard_normal(observed["context"].shape, np.float32)
    observed["context"] = observed["context"] * (1.0 + 6e-7 * noise).astype(np.float32)
    (alone,) = diagnose(observed, problem).findings
    assert (alone.stage, alone.is_explained) == ("context", False)
    observed["scores"] = observed["scores"] * np.float32(1.3)
    of_scores, of_context = diagnose(observed, problem).findings
    assert (of_scores.stage, of_scores.follows) == ("scores", ("attn_weights",))
    assert (of_context.stage, of_context.is_explained) == ("context", False)


def test_allowed_precision_follows_nothing():
    """Scores in an allowed precision are right, also if another stage is wrong."""
    problem = make_problem("gqa-causal", "bfloat16")
    observed = observed_in(problem, [bug(problem.case, "scores-float16")])
    observed = {name: x for name, x in observed.items() if not stage_named(name).path}
    assert diagnose(observed, problem).kind == "none"
    observed["v"] = (observed["v"].astype(np.float32) * 1.3).astype(observed["v"].dtype)
    (of_values,) = diagnose(observed, problem).findings
    assert (of_values.stage, of_values.follows) == ("v", ("context",))


def test_path_after_unknown_bug_is_reported():
    """If a pattern or nothing explains a stage, the paths of a module are not searched; their wrong
    stages are reported with it.
    """
    problem = make_problem("causal", "float32")
    observed = observed_in(problem)
    observed["q"] = observed["q"] * np.float32(1.37)
    observed["blocks.output"] = observed["blocks.output"] * np.float32(3.0) + np.float32(1.0)
    (finding,) = diagnose(observed, problem).findings
    assert (finding.stage, finding.follows) == ("q", ("scores", "blocks.output"))


@pytest.mark.costly("no known bug explains it, so that the search tries all")
@sample(1)
@pytest.mark.parametrize("wrong", ["noise", "NaN"])
def test_new_cause_in_later_call_is_found(wrong):
    """A pattern of one call hides no stage of a later one that it does not explain."""
    problem = make_problem(CASE_OF["cached"], "float32")
    observed = observed_in(problem)
    observed = {name: x for name, x in observed.items() if name.endswith("scores")}
    noise = np.random.default_rng(0).standard_normal(observed["step1.scores"].shape, np.float32)
    observed["step0.scores"] = observed["step0.scores"] * np.float32(1.37)
    observed["step1.scores"] = noise if wrong == "noise" else np.full_like(noise, np.nan)
    diagnosis = diagnose(observed, problem)
    factor, unknown = diagnosis.findings
    assert diagnosis.kind == "unknown"
    assert (factor.pattern.name, factor.follows) == ("factor", ())
    assert (unknown.stage, unknown.pattern) == ("step1.scores", None)


def test_two_bugs_need_observed_stages():
    """Two bugs are named from all stages, but are unknown from the output alone."""
    case = CASE_OF["mha"]
    problem = make_problem(case, "float32")
    made = [bug(case, name) for name in ("q_proj-transposed", "v-heads-reversed")]
    observed = observed_in(problem, made)
    assert set(named_bugs(diagnose(observed, problem))) == {"q_proj-transposed", "v-heads-reversed"}
    diagnosis = diagnose({"output": observed["output"]}, problem)
    assert (diagnosis.kind, named_bugs(diagnosis)) == ("unknown", [])


def test_swapped_weights_without_biases():
    """Exchanged weights of q and k are named, with the remark that their biases are not."""
    problem = make_problem(CASE_OF["mha"], "float32")
    weights = dict(problem.weights)
    weights |= {
        "q_proj.weight": weights["k_proj.weight"],
        "k_proj.weight": weights["q_proj.weight"],
    }
    observed = observed_in(replace(problem, weights=weights))
    for stages in (observed, {"output": observed["output"]}):
        diagnosis = diagnose(stages, problem)
        assert named_bugs(diagnosis) == ["q-k-swapped"]
        assert "the weights of q_proj and k_proj are exchanged, but not their biases" in str(
            diagnosis
        )


def test_written_out_scale_has_known_bugs():
    """A specification whose scale repeats the default one has the known bugs of that default."""
    yarn = Rope(
        rotary_dim=8,
        rotated="last",
        pairs="interleaved",
        scaling=YarnScaling(40.0, 64, mscale=1.0, mscale_all_dim=1.0),
    )
    latent = AttentionSpec(
        32, 4, head_dim=16, value_head_dim=12, latent=Latent(20, 8), qkv_bias=False, rope=yarn
    )
    for spec in (latent, AttentionSpec(32, 4)):
        written_out = replace(spec, scale=spec.score_scale)
        names = []
        for right in (spec, written_out):
            known = bugs_for(Case("scale", right, "", seq_len=9, is_causal=True))
            names.append([(edit.name, edit.about, edit.fix) for edit in known])
        assert names[0] == names[1]
    by_width = AttentionSpec(160, 2, scale=160**-0.5)  # not the inverse of math.sqrt(160)
    known = bugs_for(Case("scale", by_width, "", seq_len=9))
    assert not any("1 / sqrt(d_model)" in edit.about for edit in known)
    assert "latent-mscale-once" in {edit.name for edit in bugs_for(Case("", latent, "", seq_len=9))}


@pytest.mark.parametrize("stages", [("q", "k", "v"), ("output",)])
@pytest.mark.parametrize("order", ["kvq", "vqk"])
def test_rotated_thirds_are_one_bug(order, stages):
    """Three equal parts of a packed weight, each read as the next one, are one bug."""
    problem = make_problem(
        Case("thirds", AttentionSpec(32, 4), "", seq_len=9, is_causal=True), "float32"
    )
    weights = dict(problem.weights)
    for part, name in zip("qkv", order, strict=True):
        for leaf in ("weight", "bias"):
            weights[f"{name}_proj.{leaf}"] = problem.weights[f"{part}_proj.{leaf}"]
    observed = observed_in(replace(problem, weights=weights))
    (finding,) = diagnose({name: observed[name] for name in stages}, problem).findings
    assert finding.bugs == ("fused-qkv-rotated",)
    assert f"split in the order {', '.join(order)}" in finding.about


def test_earlier_call_limits_a_bug():
    """A bug of later calls that the first call contradicts is named for the later calls alone."""
    case = CASE_OF["cached"]
    problem = make_problem(case, "float32")
    empty = next(known for known in bugs_for(case) if known.about == "the mask is empty")
    observed = observed_in(problem, [empty])
    masks = {name: x for name, x in observed.items() if name.endswith("mask")}
    later = {name: x for name, x in masks.items() if name != "step0.mask"}
    assert named_bugs(diagnose(later, problem)) == ["mask-ignored"]
    mask = masks["step0.mask"].copy()
    mask[:, :, 2, 1] = True  # no known bug hides only this key
    diagnosis = diagnose({**later, "step0.mask": mask}, problem)
    ignored, unknown = diagnosis.findings
    assert (ignored.bugs, ignored.edits[0].when) == (("mask-ignored",), "in calls after the first")
    assert ignored.stages == ("step1.mask", "step2.mask")
    assert (unknown.stage, unknown.follows) == ("step0.mask", ())


def test_all_nan_weights_name_no_bugs():
    """Attention weights that are all NaN are unknown: no pair of bugs is named for them."""
    problem = make_problem(CASE_OF["empty-rows"], "float32")
    observed = observed_in(problem)
    observed["attn_weights"] = np.full_like(observed["attn_weights"], np.nan)
    diagnosis = diagnose(
        {name: observed[name] for name in ("mask", "q", "k", "v", "scores", "attn_weights")},
        problem,
    )
    assert (diagnosis.kind, named_bugs(diagnosis)) == ("unknown", [])


def test_rope_sin_cos_swap_is_named():
    """Exchanged sines and cosines are named, or from the output alone are a candidate."""
    case = CASE_OF["gqa-rope-causal"]
    problem = make_problem(case, "float32")
    observed = observed_in(problem, [bug(case, "rope-sin-cos-exchanged")])
    assert named_bugs(diagnose(observed, problem)) == ["rope-sin-cos-exchanged"]
    (finding,) = diagnose({"output": observed["output"]}, problem).named
    assert "RoPE's sines and cosines are exchanged" in (finding.about, *finding.others)


def test_rope_over_heads_is_named():
    """RoPE by head index is named, or from the output alone is a candidate."""
    case = replace(
        CASE_OF["gqa-rope-causal"], spec=replace(CASE_OF["gqa-rope-causal"].spec, num_kv_heads=6)
    )
    problem = make_problem(case, "float32")
    observed = observed_in(problem, [bug(case, "rope-over-heads")])
    assert named_bugs(diagnose(observed, problem)) == ["rope-over-heads"]
    (finding,) = diagnose({"output": observed["output"]}, problem).named
    assert "RoPE rotates heads by their index instead of tokens by their position" in (
        finding.about,
        *finding.others,
    )


# ---- No known bug --------------------------------------------------------------------------------


def test_unexplained_factor_is_a_pattern():
    """Factors on the context that no bug explains are an unexplained pattern at that stage."""
    problem = make_problem(CASES["causal"], "float32")
    observed = observed_in(problem)
    observed["context"] = observed["context"] * np.linspace(0.5, 2.0, 8, dtype=np.float32)
    del observed["output"]  # it agrees, so that nothing would be wrong
    diagnosis = diagnose(observed, problem)
    assert (diagnosis.kind, diagnosis.stage, diagnosis.unnamed[0].stage) == (
        "pattern",
        "context",
        "context",
    )
    assert diagnosis.unnamed[0].pattern.name == "factor"


def dropped(weights):
    return np.where(
        np.random.default_rng(0).random(weights.shape) < 0.1, 0.0, weights / 0.9
    ).astype(np.float32)


@pytest.mark.parametrize(
    ("change", "pattern", "number"),
    [
        (dropped, "dropout", 0.1),
        (lambda weights: weights.swapaxes(2, 3).copy(), "transposed", None),
    ],
)
def test_a_verified_pattern_is_the_headline(change, pattern, number):
    """A verified pattern is the cause: a bug with a page if its family has one, else a pattern."""
    problem = make_problem(CASES["causal"], "float32")
    override = {
        "attn_weights": lambda _, original, values: {
            "attn_weights": change(original(values)["attn_weights"])
        }
    }
    observed = observed_in(problem, [Edit(overrides=override)])
    stages = ("q", "k", "v", "scores", "attn_weights", "context", "output")
    diagnosis = diagnose({name: observed[name] for name in stages}, problem)
    kind, pages = ("pattern", []) if number is None else ("structure", ["dropout"])
    assert (diagnosis.kind, diagnosis.stage, named_bugs(diagnosis)) == (kind, "attn_weights", pages)
    best_pattern = (
        diagnosis.unnamed[0] if number is None else diagnosis.named[0]
    ).description.patterns[0]
    assert best_pattern.name == pattern
    assert number is None or best_pattern.fitted["p"] == pytest.approx(number, rel=1e-4)
    assert diagnosis.cause.endswith(best_pattern.about)
    assert "unknown" not in str(diagnosis)


def test_relative_bias_distance_is_fitted():
    """A max_distance of 128 instead of 40 is found with scores, or from the output alone."""
    bias = RelativeBias(32, 40, bidirectional=False)
    spec = AttentionSpec(32, 4, relative_bias=bias)
    problem = make_problem(
        Case("t5", spec, "a decoder of T5", seq_len=48, is_causal=True), "float32"
    )
    wrong = replace(
        problem.case, spec=replace(problem.spec, relative_bias=replace(bias, max_distance=128))
    )
    observed = observed_in(replace(problem, case=wrong))
    for stages in (("scores", "output"), ("output",)):
        diagnosis = diagnose({name: observed[name] for name in stages}, problem)
        (finding,) = diagnosis.named
        pattern = finding.description.patterns[0]
        assert (diagnosis.kind, finding.pages, pattern.name) == (
            "structure",
            ("relative-bias",),
            "max_distance",
        )
        assert pattern.fitted == {"value": 128, "expected": 40}
        assert finding.about == "the max_distance of the relative bias is 128 instead of 40"
        assert diagnosis.more == "mha-parity bugs relative-bias"


def test_equal_buckets_are_listed():
    """Buckets of equal width that a longer max_distance has as well are reported as either."""
    bias = RelativeBias(8, 12)
    spec = AttentionSpec(32, 4, scale=1.0, relative_bias=bias)
    problem = make_problem(Case("t5", spec, "an encoder of T5", seq_len=20), "float32")
    longer = replace(spec, relative_bias=replace(bias, max_distance=24))
    observed = observed_in(replace(problem, case=replace(problem.case, spec=longer)))
    (finding,) = diagnose({"scores": observed["scores"]}, problem).named
    assert finding.bugs == ("relative-bias-linear",)
    assert finding.about.endswith(", or max_distance is 24 instead of 12")


LLAMA = AttentionSpec(64, 4, num_kv_heads=2, rope=Rope(500000.0, scaling=Llama3Scaling(8.0, 64)))


def frequencies_times(*factors):
    """Return a change of RoPE's frequencies that no bug and no number of the specification
    explains.
    """

    def angles(_, original, positions):
        frequencies = original(positions)
        return (frequencies * np.array(factors)).astype(frequencies.dtype)

    return Edit(overrides={"angles": angles})


def llama_frequencies(ends, *, divides_first):
    """Return a change of the frequencies to Llama 3's with other ends of the ramp, by the condition
    that is tested first.
    """
    low, high = ends
    plain = 500000.0 ** -(np.arange(8) / 8)
    turns = plain * 64 / (2 * np.pi)
    share = (turns - low) / (high - low)
    between = (1 - share) * plain / 8.0 + share * plain
    if divides_first:
        frequencies = np.where(turns < low, plain / 8.0, np.where(turns > high, plain, between))
    else:
        frequencies = np.where(turns > high, plain, np.where(turns < low, plain / 8.0, between))

    def angles(_, original, positions):
        of_positions = positions[:, None, :, None] * frequencies
        return of_positions.astype(original(positions).dtype)

    return Edit(overrides={"angles": angles})


@pytest.mark.parametrize("stages", [("q", "k"), ("output",)])
@pytest.mark.parametrize(("divides_first", "words"), [(False, "not scaled"), (True, "divided by")])
def test_exchanged_ends_of_ramp_are_named(divides_first, words, stages):
    """Exchanged ends of Llama 3's ramp are named, whichever condition is tested first."""
    problem = make_problem(Case("llama", LLAMA, "", seq_len=20, is_causal=True), "float32")
    right = observed_in(problem, [llama_frequencies((1.0, 4.0), divides_first=divides_first)])
    assert diagnose({"q": right["q"]}, problem).kind == "none"
    wrong = observed_in(problem, [llama_frequencies((4.0, 1.0), divides_first=divides_first)])
    (finding,) = diagnose({name: wrong[name] for name in stages}, problem).named
    assert finding.bugs == ("rope-llama3-no-ramp",)
    assert f"ramp are {words}" in finding.about
    assert "low_freq_factor and high_freq_factor are exchanged" in finding.about


@pytest.mark.costly("a search for a pattern and two bugs")
def test_pattern_hides_no_later_bug():
    """After a pattern of frequencies, bugs of other stages and of later calls are still named."""
    case = Case("llama", LLAMA, "a prompt, then tokens", seq_len=13, chunks=(12, 1), capacity=14)
    problem = make_problem(case, "float32")
    names = ["kv-heads-tiled", "cache-position-off-by-one"]
    pattern = frequencies_times(1.0, 0.9, 1.0, 0.93, 1.0, 1.0, 1.0, 1.0)
    observed = observed_in(problem, [*(bug(case, name) for name in names[::-1]), pattern])
    diagnosis = diagnose({name: x for name, x in observed.items() if "module" not in name}, problem)
    (unknown,) = diagnosis.unnamed
    assert (diagnosis.kind, named_bugs(diagnosis)) == ("pattern", names)
    assert (unknown.pattern.name, unknown.stages) == ("rope frequencies", ("step0.q", "step0.k"))
    json.dumps(diagnosis.to_dict(), allow_nan=False)


@pytest.mark.costly("no known bug explains it, so that the search tries all")
def test_pattern_must_hold_in_earlier_calls():
    """New tokens rotated by their own factors, after a correct prompt, are one pattern: the pattern
    of the first wrong call.
    """
    spec = AttentionSpec(32, 4, num_kv_heads=2, rope=Rope(10000.0))
    case = Case("steps", spec, "a prompt, then tokens", seq_len=6, chunks=(4, 1, 1), capacity=8)
    factors = np.array([1.0, 1.0, 1.0, 1.0, 0.625, 0.5])
    turned = Edit(
        overrides={
            "turned": lambda _, f, name, x, positions: f(name, x, positions * factors[positions])
        }
    )
    problem = make_problem(case, "float32")
    names = [f"step{step}.q" for step in range(3)]
    observed = observed_in(problem, [turned])
    chosen = {name: observed[name] for name in names}
    chosen["step0.v"] = observed["step0.v"] * np.linspace(0.5, 2.0, 8, dtype=np.float32)
    of_values, of_queries = diagnose(chosen, problem).findings
    assert of_values.stage == "step0.v"
    assert (of_queries.stage, of_queries.follows) == (names[1], (names[2],))
    assert of_queries.pattern.fitted["value"] == 1.6


def test_chance_fit_of_rope_is_left_out():
    """One frequency times 0.9 has only the pattern of frequencies: no numbers fit by chance."""
    problem = make_problem(Case("llama", LLAMA, "a prompt", seq_len=12, is_causal=True), "float32")
    observed = observed_in(problem, [frequencies_times(1.0, 0.9, *[1.0] * 6)])
    (unknown,) = diagnose({"q": observed["q"]}, problem).unnamed
    assert [pattern.name for pattern in unknown.description.patterns] == ["rope frequencies"]
    assert unknown.pattern.fitted["used"][1] / unknown.pattern.fitted["right"][1] == pytest.approx(
        0.9, rel=1e-4
    )


@pytest.mark.thorough
def test_wrong_module_output_is_a_pattern():
    """Wrong values of module.output are an unexplained pattern, not a convention."""
    problem = make_problem(CASES["causal"], "float32")
    observed = observed_in(problem)
    observed["module.output"] = observed["module.output"] * np.linspace(
        0.5, 2.0, 32, dtype=np.float32
    )
    diagnosis = diagnose(observed, problem)
    assert (diagnosis.kind, diagnosis.unnamed[0].stage) == ("pattern", "module.output")


@pytest.mark.nightly
@pytest.mark.costly("the search tries all pairs of bugs before patterns")
def test_wrong_module_output_with_a_cache():
    """A module's output of a call with a cache that nothing explains is unknown, although edits of
    caches read stages that its own path does not have.
    """
    problem = make_problem(CASE_OF["cached"], "float32")
    observed = observed_in(problem)
    noise = np.random.default_rng(0).standard_normal(observed["step1.module.output"].shape)
    observed["step1.module.output"] = observed["step1.module.output"] + noise.astype(np.float32)
    (finding,) = diagnose(observed, problem).findings
    assert (finding.stage, finding.is_explained) == ("step1.module.output", False)


@pytest.mark.costly("the search tries all pairs of bugs before patterns")
def test_bug_before_a_pattern_is_named():
    """Missing RoPE is named as the cause, and a later offset of the output stays unexplained."""
    case = CASE_OF["mha"]  # of which few bugs are known, since pairs of them are tried
    problem = make_problem(case, "float32")
    observed = observed_in(problem, [bug(case, "scale-missing")])
    observed["output"] = observed["output"] + np.float32(0.25)
    diagnosis = diagnose({name: x for name, x in observed.items() if "." not in name}, problem)
    assert (diagnosis.kind, named_bugs(diagnosis), diagnosis.unnamed[0].stage) == (
        "pattern",
        ["scale-missing"],
        "output",
    )
    assert diagnosis.unnamed[0].pattern.name == "offset"
    assert diagnosis.cause.startswith("scale-missing: ")


def test_bug_is_not_named_for_noise():
    """Noise near the budget names no bug, though shifting all positions may fit it better."""
    problem = make_problem(CASES["rope-gqa"], "float64")
    right = observed_in(problem)["output"]
    rng, kinds = np.random.default_rng(0), []
    for size in (0.5, 2.0, 4.0):
        noise = np.abs(right).max() * 2.0**-52 * rng.standard_normal(right.shape)
        diagnosis = diagnose({"output": right + size * noise}, problem)
        kinds.append(diagnosis.kind)
        assert named_bugs(diagnosis) == []
    assert {*kinds} == {"none", "unknown"}


def test_error_over_budget_is_unknown():
    """An output error of 1 to 3 times its budget is unknown, and not called rounding."""
    problem = make_problem(CASES["full"], "float32")
    observed = observed_in(problem)
    noise = np.random.default_rng(0).standard_normal(observed["output"].shape)
    scale = np.abs(observed["output"]).max() * 2.0**-23
    observed["output"] = (observed["output"] + 3.0 * scale * noise).astype(np.float32)
    diagnosis = diagnose(observed, problem)
    assert (diagnosis.kind, diagnosis.stage) == ("unknown", "output")
    assert 1.0 < diagnosis.ratio <= 3.0
    assert str(diagnosis).startswith("Unexplained: no known bug explains output\nFirst wrong")
    assert "rounding" not in str(diagnosis)


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_nan_or_infinity_is_unknown(wrong):
    """One NaN or infinity in the context is unknown at that stage, and the JSON is valid."""
    problem = make_problem(CASES["full"], "float32")
    observed = observed_in(problem)
    observed["context"][0, 1, 2, 3] = wrong
    diagnosis = diagnose(observed, problem)
    assert (diagnosis.kind, diagnosis.stage) == ("unknown", "context")
    json.dumps(diagnosis.to_dict(), allow_nan=False)


@pytest.mark.parametrize(
    ("stage", "change", "words"),
    [
        ("output", lambda x: x[:, :1], "has shape (2, 1, 32) instead of (2, 5, 32)"),
        ("attn_weights", lambda x: x[:, 0], "has shape (2, 5, 5) instead of (2, 4, 5, 5)"),
        ("context", lambda x: x.astype(int), "has dtype int64 instead of a floating-point dtype"),
        ("mask", lambda x: x - np.float32(0.5), "has dtype float32 instead of bool"),
    ],
)
def test_malformed_stage_is_reported(stage, change, words):
    """A stage of a wrong shape or dtype is reported, and bugs of other stages are still named."""
    problem = make_problem(CASES["full"], "float32")
    observed = observed_in(problem)
    alone = diagnose({**observed, stage: change(observed[stage])}, problem)
    assert (alone.kind, alone.stage) == ("unknown", stage)
    assert f"First wrong stage: {stage}, which {words}" in str(alone)
    if stage != "output":
        observed = observed_in(problem, [bug(CASES["full"], "out_proj-transposed")])
        both = diagnose({**observed, stage: change(observed[stage])}, problem)
        assert named_bugs(both) == ["out_proj-transposed"]
        assert f"Not comparable: {stage} {words}" in str(both)


@pytest.mark.parametrize(
    ("case", "before"),
    [
        pytest.param("causal", [], marks=pytest.mark.thorough),
        # Each search with a cache is slow.
        pytest.param("ragged", ["causal"], marks=pytest.mark.nightly),
        pytest.param("decode", ["causal", "ragged"], marks=pytest.mark.nightly),
    ],
)
def test_outputs_never_blame_precision(case, before):
    """From outputs alone, no structural bug is called precision, which could fit most errors."""
    problem = make_problem(CASES[case], "float32")
    # Bugs of an earlier case are left out, and one that takes as long as all others together: it is
    # like -restarted-q, which pairs of bugs also explain.
    left_out = {known.name for case_name in before for known in bugs_for(CASES[case_name])} | {
        "cache-position-off-by-one-q"
    }
    blamed = []
    tried = [
        known for known in bugs_for(CASES[case]) if not known.is_loss and known.name not in left_out
    ]
    for made in tried:
        observed = observed_in(problem, [made])
        outputs = {
            name: x
            for name, x in observed.items()
            if name.removeprefix("step").lstrip("0123456789.") == "output"
        }
        if diagnose(outputs, problem).kind == "precision":
            blamed.append(made.name)
    assert blamed == []


@pytest.mark.costly("the search tries all bugs before patterns")
@sample(stage=["output"])
@pytest.mark.parametrize("stage", ["q", "output"])
def test_factor_is_not_precision(stage):
    """A factor of 1.0003 on q or the output is a pattern with a page of its own, alone or with all
    other stages.
    """
    problem = make_problem(CASES["rope-gqa"], "float32")
    wrong = {stage: observed_in(problem)[stage] * np.float32(1.0003)}
    diagnosis = diagnose(wrong, problem)
    assert (diagnosis.kind, diagnosis.named[0].pages) == ("structure", ("stray-factor",))
    whole = diagnose({**observed_in(problem), **wrong}, problem)
    assert (whole.kind, whole.stage) == ("structure", stage)
    assert whole.output_agrees == (stage != "output")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_equal_weights_in_each_dtype(dtype):
    """Equal weights in bfloat16, float16 and float32 have the kind `none`."""
    spec = AttentionSpec(64, 4, rope=Rope(10000.0))
    weights = {name: (8 * x).astype(dtype_named(dtype)) for name, x in random_weights(spec).items()}
    assert diagnose_weights(weights, spec, {**weights}, spec).kind == "none"


def test_torch_tensors_are_accepted():
    """A bfloat16 torch tensor with gradients can be diagnosed directly."""
    import torch

    problem = make_problem(CASES["full"], "bfloat16")
    observed = record("torch", Reference(problem)).accumulated["output"]
    tensor = torch.from_numpy(observed.astype(np.float32)).to(torch.bfloat16).requires_grad_()
    assert diagnose({"output": tensor}, problem).kind == "none"


def test_unknown_stage_names_raise():
    """Observed stages without a known name raise an error."""
    with rejects("observed", "['logits']", hint="did you mean scores?"):
        diagnose({"logits": np.ones(3)}, make_problem(CASES["full"], "float32"))
    with rejects("observed", "['oputput', 'queries']", hint="queries: did you mean q?"):
        diagnose(dict.fromkeys(("queries", "oputput"), np.ones(3)), make_problem("full", "float32"))
    with rejects("observed", "['step1.keys']", hint="did you mean step1.k?"):
        diagnose({"step1.keys": np.ones(3)}, make_problem("decode", "float32"))


# ---- Weights, functions, runs --------------------------------------------------------------------


def interleaved(weights, names):
    """Return the weights with rows of q and k in the order of interleaved RoPE pairs."""
    changed = dict(weights)
    for name in names:
        x = weights[name]
        changed[name] = np.ascontiguousarray(
            x.reshape(-1, 2, 4, *x.shape[1:]).swapaxes(1, 2)
        ).reshape(x.shape)
    return changed


def test_interleaved_weights_are_named():
    """Weights of q and k in the order of interleaved RoPE pairs are named."""
    weights = random_weights(SPEC)
    names = [f"{projection}_proj.{leaf}" for projection in "qk" for leaf in ("weight", "bias")]
    diagnosis = diagnose_weights(weights, SPEC, interleaved(weights, names), SPEC)
    assert named_bugs(diagnosis) == ["rope-weights-interleaved"]


@sample(3)
@pytest.mark.parametrize("names", [["q_proj.weight"], ["k_proj.weight", "out_proj.bias"], None])
@pytest.mark.parametrize(
    ("way", "name"),
    [("rounded to bfloat16", "weights-bfloat16"), ("rounded to float16", "weights-float16")],
)
def test_rounded_weights_are_named(way, name, names):
    """Weights rounded to bfloat16 or float16, all or some of them, are named as lost precision."""
    weights = {name: 8 * x for name, x in random_weights(SPEC).items()}
    rounded = {name: FEWER_BITS[way](x) for name, x in weights.items()}
    other = {
        name: rounded[name] if names is None or name in names else x for name, x in weights.items()
    }
    diagnosis = diagnose_weights(weights, SPEC, other, SPEC)
    assert (diagnosis.kind, named_bugs(diagnosis)) == ("precision", [name])
    assert f"the weights are {way}" in str(diagnosis)


def test_tf32_weights_are_named():
    """Weights rounded to TF32 are named; those with an additional factor are unknown."""
    weights = {
        name: np.float32(3e7) * x for name, x in random_weights(SPEC).items()
    }  # more than float16 holds
    other = {**weights, "v_proj.weight": FEWER_BITS["rounded to TF32"](weights["v_proj.weight"])}
    assert named_bugs(diagnose_weights(weights, SPEC, other, SPEC)) == ["weights-tf32"]
    other["v_proj.weight"] = other["v_proj.weight"] * np.float32(1 + 2.0**-12)
    assert diagnose_weights(weights, SPEC, other, SPEC).kind == "unknown"


def test_equal_weights_have_no_bug():
    """Equal weights have the kind `none`."""
    weights = random_weights(SPEC)
    assert diagnose_weights(weights, SPEC, {**weights}, SPEC).kind == "none"


PORT = """
import numpy as np, torch, mha_torch, parity

weights, spec = parity.load("layer.safetensors")
layer = mha_torch.MultiHeadAttention(spec).eval()
parity.load_into(layer, weights, spec)
wrong = mha_torch.MultiHeadAttention(spec).eval()
transposed = np.ascontiguousarray(weights["out_proj.weight"].T)
parity.load_into(wrong, {**weights, "out_proj.weight": transposed}, spec)


@torch.no_grad()
def right(x):
    return layer(x, mask=mha_torch.create_causal_mask(x.shape[1]))[0]


@torch.no_grad()
def transposed(x):
    return wrong(x, mask=mha_torch.create_causal_mask(x.shape[1]), need_weights=True)


def misnamed(x):
    return {"logits": x}


def unknown(x):
    return {"first": x}


def on_meta(x):
    return x.to("meta")


def coo(x):
    return x.to_sparse()


async def a_coroutine(x):
    return x


def of_coroutine(x):
    return a_coroutine(x)


def a_list(x):
    return [x]


def raises(x):
    raise KeyError("wo")
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return a working directory with a layer, a copy with one bug, and a module of functions."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    weights = random_weights(SPEC)
    parity.save("layer.safetensors", weights, SPEC)
    swapped = {**weights, **{f"k_proj.{x}": weights[f"v_proj.{x}"] for x in ("weight", "bias")}}
    parity.save(
        "swapped.safetensors",
        {**swapped, **{f"v_proj.{x}": weights[f"k_proj.{x}"] for x in ("weight", "bias")}},
        SPEC,
    )
    (tmp_path / "a_port.py").write_text(PORT)
    yield tmp_path
    import sys

    sys.modules.pop("a_port", None)


def test_two_weight_files_are_diagnosed(folder, capsys):
    """Exchanged k and v are named in the output and the JSON; equal files exit with 0."""
    assert main(["diagnose", "layer.safetensors", "swapped.safetensors", "--json", "out.json"]) == 1
    assert "k_proj and v_proj are exchanged" in capsys.readouterr().out
    content = json.loads((folder / "out.json").read_text())
    assert content["findings"][0]["bugs"] == ["k-v-swapped"]
    assert main(["diagnose", "layer.safetensors", "layer.safetensors"]) == 0


def test_verify_names_the_bug(folder, capsys):
    """compare exits with 1 and names the exchanged k and v."""
    assert main(["compare", "layer.safetensors", "swapped.safetensors"]) == 1
    assert "k_proj and v_proj are exchanged" in capsys.readouterr().out


def test_function_is_diagnosed(folder, capsys):
    """A correct function exits with 0; a transposed output projection exits with 1 and is named."""
    assert main(["diagnose", "a_port:right", "--weights", "layer.safetensors"]) == 0
    assert main(["diagnose", "a_port:transposed", "--weights", "layer.safetensors"]) == 1
    assert "out_proj's square kernel is transposed" in capsys.readouterr().out


def test_wrongly_causal_function_is_named(folder, capsys):
    """With --no-causal, a causal function exits with 1 and is reported as causal."""
    assert main(["diagnose", "a_port:right", "--weights", "layer.safetensors", "--no-causal"]) == 1
    assert "the layer is causal, although the problem is not" in capsys.readouterr().out


def test_declared_mask_is_not_an_assumption(folder, capsys):
    """The message reports that it assumes a causal layer, but not with --causal."""
    assert main(["diagnose", "a_port:transposed", "--weights", "layer.safetensors"]) == 1
    assert (
        "a_port:transposed is assumed to be causal; if it is not, pass --no-causal"
        in capsys.readouterr().out
    )
    assert (
        main(["diagnose", "a_port:transposed", "--weights", "layer.safetensors", "--causal"]) == 1
    )
    printed = capsys.readouterr().out
    assert "assumed" not in printed
    assert "out_proj's square kernel is transposed" in printed


@pytest.mark.parametrize(("name", "status"), [("right", 0), ("transposed", 1)])
def test_function_diagnosis_has_a_page(folder, name, status):
    """--html writes a page with the function, whether it agrees, and its bug."""
    arguments = [
        "diagnose",
        f"a_port:{name}",
        "--weights",
        "layer.safetensors",
        "--html",
        "page.html",
    ]
    assert main(arguments) == status
    page = (folder / "page.html").read_text("utf-8")
    assert f"a_port:{name}" in page
    verdict = "does NOT agree" if status else "agrees"
    assert f"a_port:{name} {verdict} with the float64 reference" in page
    assert "packages.numpy" in page.replace("<wbr>", "")  # its environment is not empty
    assert ("out_proj&#39;s square kernel is transposed" in page) == bool(status)


def test_weight_files_have_no_page(folder, capsys):
    """--html with two weight files exits with 2 and writes no page."""
    assert (
        main(["diagnose", "layer.safetensors", "swapped.safetensors", "--html", "page.html"]) == 2
    )
    assert rejects("--html").is_printed_in(capsys.readouterr().err)
    assert not (folder / "page.html").exists()


@pytest.mark.parametrize(
    ("arguments", "input_error"),
    [
        (
            ["a_port:right"],
            Misuse(
                "a_port:right requires --model or --weights, with the weights of the right layer"
            ),
        ),
        (
            ["a_port:none", "--weights", "layer.safetensors"],
            Misuse("module 'a_port' has no 'none'"),
        ),
        (
            ["no_such:right", "--weights", "layer.safetensors"],
            Misuse("cannot import 'no_such': No module named 'no_such'"),
        ),
        (
            ["a_port:misnamed", "--weights", "layer.safetensors"],
            rejects("the function's result", "['logits']", hint="did you mean scores?"),
        ),
        (
            ["a_port:unknown", "--weights", "layer.safetensors"],
            rejects("the function's result", "['first']", hint="its stages are mask, q, k, v, "),
        ),
        (
            ["a_port:on_meta", "--weights", "layer.safetensors"],
            rejects("the function's result['output']", "on the meta device"),
        ),
        (
            ["a_port:coo", "--weights", "layer.safetensors"],
            rejects("the function's result['output']", "torch.sparse_coo"),
        ),
        (
            ["a_port:a_coroutine", "--weights", "layer.safetensors"],
            rejects("the subject", "an async function for 'a_port:a_coroutine'"),
        ),
        (
            ["a_port:of_coroutine", "--weights", "layer.safetensors"],
            rejects("the function", "a coroutine of an async function"),
        ),
        (["."], rejects("INPUT", ".", hint="--model is the folder of its model")),
        (
            ["a_port:a_list", "--weights", "layer.safetensors"],
            rejects("the function", "output: list"),
        ),
        (
            ["no_such.safetensors", "--model", "layer.safetensors"],
            rejects("INPUT", "no_such.safetensors, which does not exist"),
        ),
        (
            ["a_port:raises", "--weights", "layer.safetensors"],
            rejects("the function", "KeyError: 'wo', in raises (a_port.py, line "),
        ),
        (["layer.safetensors"] * 3, rejects("INPUT", "layer.safetensors layer.safetensors")),
        (["layer.safetensors"], rejects("INPUT", "layer.safetensors")),
        (
            ["layer.safetensors", "swapped.safetensors", "--no-causal"],
            Misuse("--causal requires MODULE:FUNCTION"),
        ),
    ],
)
def test_invalid_inputs_exit_with_2(folder, capsys, arguments, input_error):
    """Inputs that cannot be diagnosed exit with 2 and one line that names the argument."""
    assert main(["diagnose", *arguments]) == 2
    error = capsys.readouterr().err
    assert input_error.is_printed_in(error)
    assert error.count("\n") == 1


OWN_LAYER = """
import torch
from torch.nn.functional import scaled_dot_product_attention


def rotated(x, first):
    angles = torch.outer(first + torch.arange(x.shape[2]), 1e4 ** -torch.arange(0, 1, 0.5))
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    half, other = x.chunk(2, -1)
    return x * cos + torch.cat([-other, half], -1) * sin


def attend(weights, x, cache, late=0):
    q, k, v = (
        (x @ weights[f"{name}_proj.weight"].T).unflatten(-1, (2, 4)).transpose(1, 2)
        for name in "qkv"
    )
    first = 0 if cache is None else cache[0].shape[2] + late
    q, k = rotated(q, first), rotated(k, first)
    if cache is not None:
        k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
    num_keys = k.shape[2]
    mask = torch.ones(x.shape[1], num_keys, dtype=torch.bool).tril(num_keys - x.shape[1])
    context = scaled_dot_product_attention(q, k, v, attn_mask=mask)
    out = "out_proj" if "out_proj.weight" in weights else "o_proj"
    return context.transpose(1, 2).flatten(2) @ weights[f"{out}.weight"].T, (k, v)


def layer(weights, x):
    return attend(weights, x, None)[0]


def of_kernels(weights, x):
    parts = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "out": "out_proj"}
    kernels = {}
    for name, part in parts.items():
        kernel = weights[f"{name}.kernel"]
        rows = (8, 8) if name != "out" else (-1, 8)
        kernels[f"{part}.weight"] = kernel.reshape(*rows).T
    return layer(kernels, x)


def transposed(weights, x):
    return layer({name: weight.T for name, weight in weights.items()}, x)


def step(weights, x, cotangent):
    x, weights = x.requires_grad_(), {name: w.requires_grad_() for name, w in weights.items()}
    output = layer(weights, x)
    grads = torch.autograd.grad(output, [x, *weights.values()], cotangent)
    names = ["query", *weights]
    named = {f"grad.{name}": grad for name, grad in zip(names, grads)}
    return {"output": output.detach(), **named}


def mean_loss(weights, x, cotangent):
    stages = step(weights, x, cotangent)
    return {name: x / (cotangent.numel() if "grad" in name else 1) for name, x in stages.items()}


def factory(weights):
    return lambda x: layer(weights, x)


def decode(weights, x, cache=None):
    return attend(weights, x, cache)


def late(weights, x, past=None):
    return attend(weights, x, past, late=1)


def without_cache(weights, x, cache=None):
    return attend(weights, x, cache)[0]


class Decoder(torch.nn.Module):
    def __init__(self, weights):
        super().__init__()
        self.weights, self.cache = weights, None

    def forward(self, x):
        output, self.cache = attend(self.weights, x, self.cache)
        return output


def stateful(weights):
    return Decoder(weights)
"""


@pytest.fixture
def own_layer(tmp_path, monkeypatch):
    """Return a working directory with a model folder, and a module of layers without weights."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    make_model(tmp_path / "model")
    (tmp_path / "an_own_layer.py").write_text(OWN_LAYER)
    rng = np.random.default_rng(0)
    np.save("x.npy", rng.standard_normal((7, 8)).astype(np.float32))
    np.save("y.npy", rng.standard_normal((7, 8)).astype(np.float32))
    np.save("short.npy", rng.standard_normal((5, 8)).astype(np.float32))
    yield tmp_path
    import sys

    sys.modules.pop("an_own_layer", None)


def test_own_layer_gets_weights_of_model(own_layer, capsys):
    """`diagnose --model --layer` calls a function with the weights of that layer, under canonical
    names, the file's names or a layout's, in one call or in chunks, and names its bug.
    """
    right = {
        "layer": "",
        "layer ": "--names model",
        "of_kernels": "--names flax.nnx",
        "factory": "--seq-len 30",
        "layer  ": "--input x.npy",
        "decode": "--chunks 6,1,2",
        "decode ": "--chunks 5,2 --input x.npy",
        "stateful": "--chunks 6,1,1",
        "step": "",
        "step ": "--input x.npy --cotangent y.npy",
    }
    for name, options in right.items():
        words = f"diagnose an_own_layer:{name.strip()} --model model --layer 1 {options}".split()
        assert main(words) == 0, words
        printed = capsys.readouterr()
        assert printed.out == "nothing differs by more than rounding\n", words
        assert printed.err == "", words
    wrong = {
        "transposed": ("", "transposed-kernel"),
        "late": ("--chunks 6,1,1 --seconds 1", "cache-position-off-by-one"),
        "mean_loss": ("--input x.npy --cotangent y.npy", "grad-factor"),
    }
    for name, (options, bug) in wrong.items():
        words = f"diagnose an_own_layer:{name} --model model --layer 1 {options}".split()
        assert main([*words, "--json", "d.json"]) == 1, words
        assert f"Likely bug: {bug}\n" in capsys.readouterr().out
        (finding,) = json.loads((own_layer / "d.json").read_text())["findings"]
        assert finding["bugs"] == [bug]


def test_own_layer_options_are_checked(own_layer, capsys):
    """Options that a layer of the user cannot have exit with 2 and one line that names them."""
    input_errors = {
        "layer --model model": "missing option --layer: model has layers 0 to 1;",
        "layer --model model --layer 2": "--layer",
        "layer --model model --layer 0 --names flax.nxn": "--names",
        "layer --model model --weights model/model.safetensors": "--weights cannot be combined",
        "layer --model model --layer 0 --chunks 0,1": "--chunks",
        "layer --model model --layer 0 --chunks 2,1 --input x.npy": "--chunks",
        "layer --model model --layer 0 --chunks 2,1 --no-causal": "--chunks",
        "layer --model model --layer 0 --chunks 2,1 --seq-len 3": "--seq-len",
        "layer --model model --layer 0 --seq-len 0": "--seq-len",
        "layer --model model --layer 0 --key-input x.npy": "--key-input",
        "step --model model --layer 0 --cotangent y.npy": "--cotangent",
        "step --model model --layer 0 --input x.npy --cotangent short.npy": "--cotangent",
        "layer --model model --layer 0 --input x.npy --cotangent y.npy": "--cotangent",
        "layer --model model --layer 0 --input x.txt": "x.txt",
        "layer --model model --layer 0 --seconds 0": "--seconds",
        "rotated --model model --layer 0 --names model": "--names",
        "without_cache --model model --layer 0 --chunks 2,1": "the function",
    }
    for words, argument in input_errors.items():
        assert main(["diagnose", *f"an_own_layer:{words}".split()]) == 2, words
        printed = capsys.readouterr()
        assert printed.err.startswith(f"mha-parity: error: {argument}"), words
        assert printed.err.count("\n") == 1, words
        assert printed.out == "", words
    for flag in ("--layer 0", "--names model", "--chunks 2,1", "--seq-len 3"):
        words = f"diagnose model/model.safetensors model/model.safetensors {flag}".split()
        assert main(words) == 2
        assert flag.split()[0] in capsys.readouterr().err


def test_observe_passes_shared_kv(folder):
    """`observe` passes x, and with shared_kv k and v; `attention_for` rejects shared_kv."""
    problem = make_problem(Case("probe", SPEC, "probe"), "float32")
    assert observe(lambda x: x, problem, "torch")["output"].shape == (2, 5, 32)
    sharing = make_problem(
        Case("probe", AttentionSpec(32, 4, num_kv_heads=2, shared_kv=True), "probe"), "float32"
    )
    assert observe(lambda x, k, v: {"k": k, "v": v}, sharing, "torch")["v"].shape == (2, 2, 5, 8)
    with rejects("shared_kv", shared_kv=True):
        attention_for(sharing.weights, sharing.spec, sharing.inputs["query"])


@pytest.mark.costly("JAX compiles every stage of a case")
def test_traces_are_diagnosed(tmp_path, capsys):
    """Traces are diagnosed alone and in pairs: the wrong backend, its stage and bug are named."""
    case = CASES["rope-gqa"]
    run_cases([case], ["jax"], traces=tmp_path / "jax")
    with inject("rope-missing", make_problem(case, "float32"), "torch"):
        run_cases([case], ["torch"], traces=tmp_path / "torch")
    right, wrong = (str(next((tmp_path / name).iterdir())) for name in ("jax", "torch"))
    assert main(["diagnose", right]) == 0
    assert main(["diagnose", wrong]) == 1
    assert "RoPE is missing" in capsys.readouterr().out
    for traces in [wrong], [right, wrong]:
        assert main(["diagnose", *traces, "-v"]) == 1
        out = capsys.readouterr().out
        assert "  worst  " in out
        # The diagnosis states how large the error is.
        assert "  allowed  " not in out
    assert main(["diagnose", right, wrong]) == 1
    out = capsys.readouterr().out
    assert "jax is right" in out
    assert "torch is wrong from q" in out
    assert "RoPE is missing" in out
    page = tmp_path / "page.html"
    assert main(["diagnose", right, wrong, "--html", str(page)]) == 1
    assert page.read_text("utf-8").count("RoPE is missing") > 1
    assert main(["compare", str(tmp_path / "jax"), "--quiet"]) == 0
    assert (
        capsys.readouterr()
        .out.splitlines()[-1]
        .startswith("jax agrees with the float64 reference: 1 case")
    )


def test_doubled_gradients_have_a_factor(tmp_path, capsys, monkeypatch):
    """Doubled gradients in a trace are 2 times right ones, first at grad.out_proj.weight."""
    original = driver.gradients
    doubled = lambda *problem: {name: 2 * gradient for name, gradient in original(*problem).items()}  # noqa: E731
    monkeypatch.setattr(driver, "gradients", doubled)
    run_cases([CASES["full"]], ["torch"], with_gradients=True, traces=tmp_path)
    assert main(["diagnose", str(next(tmp_path.iterdir()))]) == 1
    out = capsys.readouterr().out
    assert "all gradients are 2 times what they should be\nFirst wrong stage: grad.out_" in out
    assert "nothing differs" not in out


def test_traces_of_two_problems_exit_2(tmp_path, capsys):
    """Two traces of different cases exit with 2 and name the argument."""
    run_cases([CASES["full"], CASES["causal"]], ["torch"], traces=tmp_path)
    traces = [str(path) for path in sorted(tmp_path.iterdir())]
    assert main(["diagnose", *traces]) == 2
    assert rejects("traces", " ".join(traces)).is_printed_in(capsys.readouterr().err)


def test_failed_run_has_a_diagnosis(capsys, tmp_path):
    """A failed run prints its likely bug and writes the diagnosis to the JSON."""
    with inject("scale-missing", make_problem(CASES["full"], "float32"), "torch"):
        assert (
            main(
                [
                    "run",
                    "--backends",
                    "torch",
                    "--cases",
                    "full",
                    "--json",
                    str(tmp_path / "out.json"),
                ]
            )
            == 1
        )
    assert "Likely bug: scale-missing\n" in capsys.readouterr().out
    (diagnosis,) = json.loads((tmp_path / "out.json").read_text())["diagnoses"]
    assert (diagnosis["case"], diagnosis["backend"], diagnosis["kind"]) == (
        "full",
        "torch",
        "structure",
    )
    assert diagnosis["findings"][0]["bugs"] == ["scale-missing"]


PAIRED = (
    "sinks",
    "bias-causal",
    "alibi",
    "relative-bias",
    "gate",
    "temperature-rope",
    "latent-yarn",
    "norm-per-head",
)
"""Cases whose bugs are injected in pairs."""


MISFITS = {
    "bias-causal": {
        ("softmax-over-heads", "score-bias-after-softmax"),
        ("softmax-over-batch", "score-bias-after-softmax"),
    }
}
"""Pairs whose first bug leaves axes in an order to which the second cannot add its bias."""


@pytest.mark.costly("runs all pairs of bugs")
@sample(name=["bias-causal"])
@pytest.mark.parametrize("name", PAIRED)
def test_bugs_of_one_method_combine(name):
    """Any two bugs of one method can be computed together, except the pairs in `MISFITS`."""
    problem = make_problem(name, "float64")
    misfits = set()
    for pair in itertools.permutations(bugs_for(CASES[name]), 2):
        if pair[0].overrides.keys() & pair[1].overrides.keys():
            try:
                with np.errstate(all="ignore"):
                    run_steps(steps_of(edited_layer(problem, "float64", pair), CASES[name]))
            except ValueError:
                misfits.add((pair[0].name, pair[1].name))
    assert misfits == MISFITS.get(name, set())

"""Lost precision and rows without a key are named, from all stages or from the output alone; other
errors are not.
"""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from helpers.diagnoses import named_bugs
from helpers.samples import sample

from mha_spec import AttentionSpec
from parity import CASES, Case, diagnose, make_problem, random_weights
from parity.explain.diagnosis.bugs import bugs_for, edited_layer, low_products
from parity.measure.backends.record import record
from parity.measure.core.reference.arithmetic import MANTISSA
from parity.measure.core.stages import run_steps, stage_named
from parity.measure.core.trace import Reference
from parity.measure.core.weights import dtype_named
from parity_lab.injections import products_of
from parity_lab.selftest import SELFTEST_CASES, inject

CASE_OF = {case.name: case for case in SELFTEST_CASES}
LOSSES = {
    bug.name: case
    for case in ("cached", "cross", "gqa-rope-causal", "mha")
    for bug in bugs_for(CASE_OF[case])
    if bug.is_loss and not bug.backward
}


def exactly(problem, bugs=()):
    """Return the stages of the reference with bugs, computed in float64 and rounded to float32."""
    with np.errstate(all="ignore"):
        values = run_steps(edited_layer(problem, "float64", bugs).steps())
    return {
        name: x if stage_named(name).is_exact else x.astype(np.float32)
        for name, x in values.items()
    }


def outputs(stages):
    """Return only the outputs, of every call."""
    return {name: x for name, x in stages.items() if stage_named(name).kind == "output"}


def known(case, name):
    return next(bug for bug in bugs_for(case) if bug.name == name)


# ---- One part in a narrower dtype ----------------------------------------------------------------


@sample(12)
@pytest.mark.parametrize("name", LOSSES)
def test_rounding_is_named_from_output(name):
    """Each loss of precision is named from the output alone, or listed as an alternative."""
    case = CASE_OF[LOSSES[name]]
    problem = make_problem(case, "float32", random_weights(case.spec, 3))
    made = known(case, name)
    diagnosis = diagnose(outputs(exactly(problem, [made])), problem, seconds=60.0)
    (finding,) = diagnosis.named
    assert finding.bugs == (name,) or made.about in finding.others  # which explains as much
    assert diagnosis.kind == "precision"


@sample(3)
@pytest.mark.parametrize("only", [dict, outputs])
@pytest.mark.parametrize("projection", ["", "k_proj", "out_proj"])
def test_rounded_weights_are_named(projection, only):
    """Weights rounded to bfloat16 are named, with the remark that their biases are not rounded."""
    problem = make_problem(CASE_OF["gqa-rope-causal"], "float32")
    are_rounded = [
        name for name in problem.weights if name.startswith(projection) and name.endswith("weight")
    ]
    rounded = {
        name: problem.weights[name].astype(ml_dtypes.bfloat16).astype(np.float32)
        for name in are_rounded
    }
    diagnosis = diagnose(
        only(exactly(replace(problem, weights={**problem.weights, **rounded}))), problem
    )
    (finding,) = diagnosis.named
    assert finding.bugs == ("-".join(filter(None, [projection, "weights-bfloat16"])),)
    assert finding.about.endswith(
        f"rounded to bfloat16, but not {'its bias' if projection else 'the biases'}"
    )


@pytest.mark.parametrize("name", ["weights-bfloat16", "scores-float16"])
def test_precision_loss_with_other_bug(name):
    """Lost precision is named together with a wrong mask, and the kind is `structure`."""
    case = CASE_OF["gqa-rope-causal"]
    problem = make_problem(case, "float32")
    diagnosis = diagnose(
        exactly(problem, [known(case, "causal-off-by-one"), known(case, name)]), problem
    )
    assert sorted(named_bugs(diagnosis)) == sorted(["causal-off-by-one", name])
    assert diagnosis.kind == "structure"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_scores_in_problem_dtype_pass(dtype):
    """In a 16-bit problem, scores kept in the problem's dtype are not a bug."""
    problem = make_problem(CASES["rope-gqa"], dtype)
    stages = record("torch", Reference(problem)).accumulated
    narrow = {**stages, "scores": stages["scores"].astype(dtype_named(dtype))}
    stages_of_scores = {
        name: x for name, x in narrow.items() if name in ("mask", "q", "k", "v", "scores")
    }
    assert diagnose(stages_of_scores, problem).kind == "none"


@sample(3)
@pytest.mark.parametrize("kind", ["tf32", "bfloat16", "lofi"])
@pytest.mark.parametrize("case", ["full", "causal"])
def test_low_products_named_from_output(case, kind):
    """Products in TF32, bfloat16 or LoFi are named from the output alone, and explain its error."""
    problem = make_problem(CASES[case], "float32")
    with inject(products_of(MANTISSA[kind]), problem, "torch") as wrong:
        stages = record("torch", Reference(problem), wrong).accumulated
    diagnosis = diagnose({"output": stages["output"]}, problem)
    assert (diagnosis.kind, named_bugs(diagnosis)) == ("precision", [f"precision-{kind}"])
    assert diagnosis.named[0].ratio <= 1.0


SCALED = make_problem(CASES["causal"], "float32")
"""A layer with a head dimension of 8: scaling the queries or the products loses different bits."""

FORMS = list(low_products(SCALED.case))


@sample(6)
@pytest.mark.parametrize(
    "form", FORMS, ids=[f"{form.name}-{index % 4}" for index, form in enumerate(FORMS)]
)
def test_each_form_of_low_products_is_named(form):
    """Each form of low-precision products is named from all stages."""
    diagnosis = diagnose(exactly(SCALED, [form]), SCALED)
    assert (diagnosis.kind, named_bugs(diagnosis)) == ("precision", [form.name])


def test_products_of_scaled_queries_named():
    """Scores of queries that are scaled first, with keys and products in bfloat16, have the words
    of this order.
    """

    def rounded(x):
        return x.astype(ml_dtypes.bfloat16).astype(np.float32)

    stages = exactly(SCALED)
    q = rounded(np.float32(SCALED.spec.score_scale) * stages["q"])
    k = rounded(stages["k"])
    diagnosis = diagnose({"scores": rounded(q @ k.swapaxes(2, 3))}, SCALED)
    (finding,) = diagnosis.named
    words = "queries, after their scale, keys and their products are rounded to bfloat16"
    assert finding.bugs == ("scores-bfloat16",)
    assert finding.about == f"{words} in the scores"


@pytest.mark.parametrize("gain", [1.0003, 1.003, 1.01])
def test_output_gain_is_not_precision(gain):
    """A factor of 1.0003 to 1.01 on the output is a stray factor, not lost precision."""
    problem = make_problem(CASES["rope-gqa"], "float32")
    output = exactly(problem)["output"] * np.float32(gain)
    diagnosis = diagnose({"output": output}, problem)
    assert (diagnosis.kind, named_bugs(diagnosis)) == ("structure", ["stray-factor"])


# ---- The whole layer in a narrower dtype ---------------------------------------------------------


def narrow(problem, dtype):
    """The problem rounded to a narrower dtype."""

    def rounded(values):
        return {
            name: x if x.dtype == bool else x.astype(dtype_named(dtype))
            for name, x in values.items()
        }

    return replace(
        problem, dtype=dtype, weights=rounded(problem.weights), inputs=rounded(problem.inputs)
    )


@sample(4)
@pytest.mark.parametrize("only", [False, True], ids=["stages", "output"])
@pytest.mark.parametrize("is_cast", [False, True], ids=["as-it-is", "cast-back"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_layer_dtype_is_named(dtype, is_cast, only):
    """A 16-bit layer is named in a float32 problem, and uncast dtypes have a line."""
    problem = make_problem(CASES["causal"], "float32")
    stages = record("torch", Reference(narrow(problem, dtype))).accumulated
    if is_cast:
        stages = {
            name: x if stage_named(name).is_exact else x.astype(np.float32)
            for name, x in stages.items()
        }
    stages = {"output": stages["output"]} if only else stages
    diagnosis = diagnose(stages, problem)
    assert (diagnosis.kind, named_bugs(diagnosis)) == ("precision", [f"layer-in-{dtype}"])
    last = str(diagnosis).splitlines()[-1]
    if is_cast:
        assert "Dtype" not in last
    elif only:
        assert last == f"Dtype: output is {dtype} in a float32 problem"
    else:
        assert last == (
            f"Dtype: q, k, v and {len(diagnosis.dtypes) - 3} more are {dtype} in a float32 problem"
        )


def test_float32_layer_is_named():
    """A float32 layer is named in a float64 problem, although its output is cast to float64."""
    problem = make_problem(CASES["causal"], "float64")
    stages = record("torch", Reference(narrow(problem, "float32"))).accumulated
    assert named_bugs(diagnose({"output": stages["output"].astype(np.float64)}, problem)) == [
        "layer-in-float32"
    ]


def test_coarse_bug_is_not_precision():
    """A wrong bfloat16 output is unknown, not lost precision; the message has its dtype."""
    problem = make_problem(CASES["causal"], "float32")
    output = exactly(problem, [known(CASES["causal"], "mask-ignored")])["output"]
    coarse = (1.5 * output).astype(ml_dtypes.bfloat16)
    diagnosis = diagnose({"output": coarse}, problem)
    assert (diagnosis.kind, named_bugs(diagnosis)) == ("unknown", [])
    assert "Dtype: output is bfloat16 in a float32 problem" in str(diagnosis)


# ---- Rows without a key --------------------------------------------------------------------------

EMPTY = Case(
    "layer", AttentionSpec(32, 4), "an empty sequence", is_causal=True, key_padding_lengths=(0, 4)
)


@pytest.mark.parametrize("only", [False, True], ids=["stages", "output"])
@pytest.mark.parametrize("name", ["empty-row-nan", "empty-row-mean", "empty-row-unmasked"])
def test_rows_without_a_key_are_named(name, only):
    """Each bug of rows without a key is named, from all stages and from the output alone."""
    problem = make_problem(EMPTY, "float32")
    stages = exactly(problem, [known(EMPTY, name)])
    assert named_bugs(diagnose(outputs(stages) if only else stages, problem)) == [name]


@sample(3, case=["causal"])
@pytest.mark.parametrize("name", ["empty-row-nan", "empty-row-mean", "empty-row-unmasked"])
@pytest.mark.parametrize("mask", ["mask-flipped", "causal-excludes-self"])
@pytest.mark.parametrize("case", ["causal", "rope-gqa"])
def test_rows_emptied_by_mask_bug_are_named(case, mask, name):
    """If a wrong mask leaves rows without a key, its bug and the bug of these rows are named."""
    problem = make_problem(CASES[case], "float32")
    stages = exactly(problem, [known(CASES[case], mask), known(CASES[case], name)])
    diagnosis = diagnose(stages, problem, seconds=60.0)
    assert (diagnosis.kind, set(named_bugs(diagnosis))) == ("structure", {mask, name})


@sample(2)
@pytest.mark.parametrize("name", ["empty-row-nan", "empty-row-mean", "empty-row-unmasked"])
def test_two_bugs_named_if_output_has_nan(name):
    """From the output alone, a mask bug and its empty rows are named only if they are NaN."""
    problem = make_problem(CASES["causal"], "float32")
    stages = exactly(
        problem, [known(CASES["causal"], "mask-flipped"), known(CASES["causal"], name)]
    )
    diagnosis = diagnose(outputs(stages), problem)
    leaves_its_mark = name == "empty-row-nan"
    assert set(named_bugs(diagnosis)) == ({"mask-flipped", name} if leaves_its_mark else set())
    assert diagnosis.kind == ("structure" if leaves_its_mark else "unknown")


def test_unexplained_nan_is_located():
    """A single NaN in the context is unknown, and the message has its location."""
    problem = make_problem(CASES["causal"], "float32")
    stages = {
        name: x.copy()
        for name, x in exactly(problem).items()
        if name in ("mask", "q", "k", "v", "context")
    }
    stages["context"][1, 2, 3] = np.nan
    diagnosis = diagnose(stages, problem)
    assert (diagnosis.kind, diagnosis.unexplained[0].stage) == ("unknown", "context")
    text = str(diagnosis)
    assert all(words in text for words in ("NaN", "sequence 1", "head 2", "position 3"))

"""Correct layers that are recorded in other customary forms, or computed in other correct ways:
nothing is wrong.
"""

import json
import math
import warnings

import numpy as np
import pytest
from helpers.input_errors import rejects
from helpers.samples import sample

import parity
from mha_spec import AttentionSpec, Rope
from parity.explain.diagnosis.bugs import bugs_for, edited_layer
from parity.explain.diagnosis.bugs.record import Edit
from parity.explain.diagnosis.choices import AS_THE_REFERENCE, LOG_SUM_EXP, SCORES, SOFTMAX
from parity.explain.diagnosis.diagnose import diagnose
from parity.explain.diagnosis.readings import BEFORE_ROPE, BEFORE_SCALE
from parity.explain.diagnosis.trial import Trial, remembering
from parity.measure.core import reference
from parity.measure.core.cases import CASES, Case
from parity.measure.core.compare import MOST_OVER
from parity.measure.core.problem import make_problem
from parity.measure.core.stages import run_steps, stage_named
from parity.measure.core.weights import dtype_named, save_weights
from parity.use.cli.main import main
from parity.use.testing.assertion import compare_and_diagnose, compare_arrays, message

SPEC = AttentionSpec(32, 4, num_kv_heads=2, rope=Rope(10000.0))
GQA = Case(
    "readings",
    SPEC,
    "shared heads, RoPE, two masks",
    seq_len=6,
    is_causal=True,
    key_padding_lengths=(4, 6),
)
GAIN = Case("readings-gain", SPEC, "large logits", seq_len=24, gain=1000.0)
CACHED = Case(
    "readings-cached", SPEC, "a prompt, then tokens", seq_len=6, chunks=(4, 1, 1), capacity=9
)


def right(case, dtype="float32", *changes, arithmetic="ieee"):
    """Return a problem, and the stages of its layer in a dtype, with changes."""
    problem = make_problem(case, dtype)
    with np.errstate(all="ignore"):
        edits = [Edit(overrides=change.overrides) for change in changes]
        values = run_steps(edited_layer(problem, dtype, edits, arithmetic).steps())
    return problem, {name: x for name, x in values.items() if not stage_named(name).path}


def test_batch_and_heads_may_be_one_axis():
    """Scores, weights and context with one axis for batch and heads are a convention."""
    problem, values = right(GQA)
    for name in ("scores", "attn_weights", "context"):
        values[name] = values[name].reshape(-1, *values[name].shape[2:])
    diagnosis = diagnose(values, problem)
    assert diagnosis.kind == "convention"
    assert all(
        "B * N" in diagnosis.conventions[name] for name in ("scores", "attn_weights", "context")
    )


def test_axes_precede_the_recorded_form():
    """A stage with other axes and in another form has both in its words, the axes first."""
    problem, values = right(GQA)
    values["k"] = values["k"].repeat(2, axis=1).swapaxes(1, 2)
    words = "has axes (B, S, K, H) and is recorded after the repeat for the query heads"
    assert diagnose(values, problem).conventions == {"k": words}


def recorded_as(values, change):
    """Return the stages, some of them recorded in a different form."""
    return {**values, **change(values)}


RECORDED = {
    "(B, T, N, H)": lambda v: {name: v[name].swapaxes(1, 2) for name in ("q", "k", "v", "context")},
    "(B, T, N * H)": lambda v: {
        name: v[name].swapaxes(1, 2).reshape(2, 6, -1) for name in ("q", "k", "context")
    },
    "(B * N, T, H)": lambda v: {"q": v["q"].reshape(8, 6, 8)},
    "(T, B, E)": lambda v: {"output": v["output"].swapaxes(0, 1)},
    "after the repeat": lambda v: {name: v[name].repeat(2, axis=1) for name in "kv"},
    "True shows": lambda v: {"mask": ~v["mask"]},
    "1.0 shows": lambda v: {"mask": (~v["mask"]).astype(np.float32)},
    "additive": lambda v: {"mask": np.where(v["mask"], np.float32(-1e9), np.float32(0.0))},
    "additive -inf": lambda v: {"mask": np.where(v["mask"], -np.inf, 0.0).astype(np.float32)},
    "mask (B, T, S)": lambda v: {"mask": v["mask"][:, 0]},
    "masked scores": lambda v: {
        "scores": np.where(v["mask"], -np.inf, v["scores"]).astype(np.float32)
    },
    "scores of hidden keys": lambda v: {"scores": np.where(v["mask"], v["q"].max(), v["scores"])},
    "scores with a number a row": lambda v: {
        "scores": v["scores"] + np.arange(6, dtype=np.float32)[:, None]
    },
    "unscaled scores": lambda v: {"scores": (v["scores"] * np.sqrt(8.0)).astype(np.float32)},
    "scaled q": lambda v: {"q": (v["q"] / np.sqrt(8.0)).astype(np.float32)},
    "averaged weights": lambda v: {"attn_weights": v["attn_weights"].mean(axis=1)},
    "interleaved pairs": lambda v: {name: v[name][..., [0, 4, 1, 5, 2, 6, 3, 7]] for name in "qk"},
}


@sample(6)
@pytest.mark.parametrize("recorded", RECORDED)
def test_recorded_form_is_a_convention(recorded):
    """Each other form of correct stages is a convention that the diagnosis lists."""
    problem, values = right(GQA)
    diagnosis = diagnose(recorded_as(values, RECORDED[recorded]), problem)
    assert (diagnosis.kind, diagnosis.is_wrong) == ("convention", False), str(diagnosis)
    assert diagnosis.conventions.keys() >= RECORDED[recorded](values).keys()
    json.dumps(diagnosis.to_dict(), allow_nan=False)


@sample(6)
@pytest.mark.parametrize("recorded", RECORDED)
def test_bug_is_named_despite_conventions(recorded):
    """A transposed output projection is found with each form, and named except for (T, B, E)."""
    (made,) = (bug for bug in bugs_for(GQA) if bug.name == "out_proj-transposed")
    problem, values = right(GQA, "float32", made)
    diagnosis = diagnose(recorded_as(values, RECORDED[recorded]), problem)
    assert diagnosis.is_wrong
    if recorded != "(T, B, E)":  # the form of the wrong stage itself
        assert [finding.bugs for finding in diagnosis.named] == [("out_proj-transposed",)], str(
            diagnosis
        )


FILLS = {"-inf": -np.inf, "-1e9": -1e9, "-1e4": -1e4, "the least": float(np.finfo(np.float32).min)}


@sample(6)
@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("name", ["scale-by-d-model", "causal-off-by-one", "mask-flipped"])
def test_masked_scores_hide_no_bug(fill, name):
    """With recorded scores filled by a mask, bugs of the scores or of the mask are still named."""
    (made, *_) = (bug for bug in bugs_for(GQA) if bug.name == name)
    problem, values = right(GQA, "float32", made)
    shown = ~values["mask"] if name == "mask-flipped" else values["mask"]
    values["scores"] = np.where(shown, FILLS[fill], values["scores"]).astype(np.float32)
    diagnosis = diagnose(values, problem)
    assert [finding.bugs for finding in diagnosis.named] == [(name,)], str(diagnosis)
    assert not diagnosis.unnamed
    assert set(diagnosis.conventions) == {"scores"}
    assert all(finding.error_before < 1e6 for finding in diagnosis.named)


def test_penalty_in_scores_is_named():
    """A mask penalty of -10 is named, from recorded scores and from the output alone."""
    (made,) = (bug for bug in bugs_for(GQA) if bug.name == "mask-penalty-filled")
    problem, values = right(GQA, "float32", made)
    values["scores"] = np.where(values["mask"], np.float32(-10.0), values["scores"])
    for observed in (values, {"output": values["output"]}):
        assert [finding.bugs for finding in diagnose(observed, problem).named] == [
            ("mask-penalty-filled",)
        ]


def test_large_scores_are_not_masked():
    """Scores times 1e5 everywhere are explained by the scale, not taken for masked ones."""
    problem, values = right(GQA)
    values["scores"] = values["scores"] * np.float32(1e5)
    diagnosis = diagnose(values, problem)
    assert [(finding.stage, finding.pages) for finding in diagnosis.named] == [
        ("scores", ("scale",))
    ]


@sample(changed=["context"])
@pytest.mark.parametrize("changed", ["scores", "attn_weights", "context", "output"])
def test_convention_hides_no_later_error(changed):
    """With q and k recorded before RoPE, a factor of 1.01 on a later stage is still found."""
    problem, values = right(GQA)
    _, before = right(GQA, "float32", BEFORE_ROPE)
    values = {**values, "q": before["q"], "k": before["k"]}
    assert diagnose(values, problem).kind == "convention"
    wrong = {**values, changed: values[changed] * np.float32(1.01)}
    diagnosis = diagnose(wrong, problem, seconds=0.2)
    assert (diagnosis.is_wrong, diagnosis.stage) == (True, changed)
    assert diagnosis.output_agrees == (changed != "output")
    alone = diagnose({"q": before["q"]}, problem)
    assert [finding.bugs for finding in alone.named] == [("rope-missing",)]


def test_unscaled_scores_are_a_convention():
    """Scores recorded before the scale are a convention."""
    problem, values = right(GQA)
    _, before = right(GQA, "float32", BEFORE_SCALE)
    diagnosis = diagnose({**values, "scores": before["scores"]}, problem)
    assert diagnosis.conventions == {"scores": "is recorded before the scale"}


def test_scores_equal_in_a_softmax_are_right():
    """Scores that differ where keys are hidden, or by a number for each row, as in BLOOM, are a
    convention if the attention weights are right; otherwise the bug is named.
    """
    problem, values = right(GQA)
    (made,) = (bug for bug in bugs_for(GQA) if bug.name == "causal-off-by-one")
    _, wrong = right(GQA, "float32", made)
    for form in ("scores of hidden keys", "scores with a number a row"):
        diagnosis = diagnose(recorded_as(values, RECORDED[form]), problem)
        assert diagnosis.conventions.keys() == {"scores"}
        diagnosis = diagnose(recorded_as(wrong, RECORDED[form]), problem)
        assert [finding.bugs for finding in diagnosis.named] == [("causal-off-by-one",)]


UNUSED = [0.0, 7.0, np.nan]


@pytest.mark.parametrize("value", UNUSED)
def test_padding_is_not_compared(value):
    """Any values of padding pass; an error in the last real token is found at its position."""
    problem, values = right(GQA)
    is_padding = np.arange(6)[None, :] >= np.array([4, 6])[:, None]
    for name in ("q", "k", "v", "context", "output"):
        padding = is_padding[:, None, :, None] if values[name].ndim == 4 else is_padding[..., None]
        values[name] = np.where(padding, np.float32(value), values[name])
    values["attn_weights"] = np.where(
        is_padding[:, None, :, None], np.float32(value), values["attn_weights"]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parity.assert_parity(values, problem=problem)
    assert diagnose(values, problem).kind == "none"
    values["output"][0, 3, 0] += np.float32(0.01)  # the last real token
    assert diagnose(values, problem).stage == "output"
    with pytest.raises(AssertionError, match="t=3, e=0"):
        parity.assert_parity(values, problem=problem)


def test_pattern_is_found_with_padding():
    """A factor on head 3 of real tokens is found although the values of padding are garbage."""
    problem, values = right(GQA)
    is_padding = np.arange(6)[None, None, :, None] >= np.array([4, 6])[:, None, None, None]
    q = values["q"].copy()
    q[:, 3] *= np.float32(1.25)
    diagnosis = diagnose({"q": np.where(is_padding, np.float32(50.0), q)}, problem)
    (finding,) = diagnosis.findings
    assert finding.about.startswith("the values there are 1.25 ")
    assert "only head 3" in finding.where


def test_unused_cache_slots_are_ignored():
    """A growing cache or dirty unused slots are not wrong; stale cached values are."""
    problem, values = right(CACHED)
    grown, filled = {}, {0: 4, 1: 5, 2: 6}
    for name, x in values.items():
        stage = stage_named(name)
        if stage.quantity in ("cache.keys", "cache.values"):
            grown[name] = x[:, :, : filled[stage.step]]
        elif stage.quantity in ("mask", "scores", "attn_weights"):
            grown[name] = x[..., : filled[stage.step]]
        else:
            grown[name] = x
    assert diagnose(grown, problem).kind == "convention"
    dirty = dict(values)
    for step in range(3):
        for name in ("cache.keys", "cache.values"):
            x = dirty[f"step{step}.{name}"].copy()
            x[:, :, filled[step] :] = 7.0
            dirty[f"step{step}.{name}"] = x
    assert diagnose(dirty, problem).kind == "none"
    stale = dict(values)
    stale["step2.cache.values"] = stale["step1.cache.values"]
    assert diagnose(stale, problem).is_wrong


@sample(6)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("choice", [SCORES, SOFTMAX], ids=["scores", "softmax"])
@pytest.mark.parametrize("stages", ["all", "but scores", "output"])
def test_scores_in_16_bits_are_not_a_bug(dtype, choice, stages):
    """Scores or a softmax in 16 bits are not a bug, and hide no missing scale."""
    problem, values = right(GQA, dtype, choice, arithmetic=choice.arithmetic)
    values["scores"] = values["scores"].astype(dtype_named(dtype))
    observed = {
        name: x
        for name, x in values.items()
        if stages == "all" or ((stages == "output") == (name == "output") and name != "scores")
    }
    assert not diagnose(observed, problem).is_wrong
    (made,) = (bug for bug in bugs_for(GQA) if bug.name == "scale-missing")
    problem, wrong = right(GQA, dtype, made, choice, arithmetic=choice.arithmetic)
    diagnosis = diagnose(
        {"output": wrong["output"], "scores": wrong["scores"].astype(dtype_named(dtype))}, problem
    )
    assert [finding.bugs for finding in diagnosis.named] == [("scale-missing",)]


def test_log_sum_exp_softmax_is_right():
    """A softmax by log sum exp is not wrong, and the message mentions it."""
    problem, values = right(GAIN, "float32", LOG_SUM_EXP)
    diagnosis = diagnose(values, problem)
    assert not diagnosis.is_wrong
    assert "log sum exp" in str(diagnosis)


@sample(1)
@pytest.mark.parametrize("seed", range(3))
def test_weights_from_log_sum_exp_are_right(seed):
    """Weights from the log sum exp of a kernel's own scores are right; a wrong context is found."""
    problem, values = right(GAIN, "float32")
    rng, unit = np.random.default_rng(seed), np.float32(2.0**-23)
    recorded = np.where(values["mask"], -np.inf, values["scores"])
    own = recorded * (1.0 + unit * rng.choice([-1.0, 1.0], recorded.shape)).astype(np.float32)
    highest = own.max(axis=-1, keepdims=True)
    logarithm = highest + np.log(np.exp(own - highest).sum(axis=-1, keepdims=True))
    values["attn_weights"] = np.exp(recorded - logarithm)
    diagnosis = diagnose(values, problem)
    assert not diagnosis.is_wrong
    assert "log sum exp" in str(diagnosis)
    values["context"] *= np.float32(1.01)
    assert diagnose(values, problem, seconds=0.2).stage == "context"


def test_choice_keeps_float64_reference():
    """A different choice recomputes the float32 reference and keeps the float64 one."""
    problem = make_problem(GAIN, "float32")
    first, alone = (
        Trial(problem, {}, "ieee", choice) for choice in (AS_THE_REFERENCE, LOG_SUM_EXP)
    )
    before = {dtype: first.stage("attn_weights", (), dtype) for dtype in ("float32", "float64")}
    other = first.with_choice(LOG_SUM_EXP)
    assert other.stage("attn_weights", (), "float64") is before["float64"]
    weights = other.stage("attn_weights", (), "float32")
    assert np.array_equal(weights, alone.stage("attn_weights", (), "float32"))
    assert not np.array_equal(weights, before["float32"])


def test_replay_with_choice_is_independent():
    """A trial with a different choice has the verdict of a new one, even if noise is remeasured."""
    made = next(bug for bug in bugs_for(GAIN) if bug.name == "scale-missing")
    problem, values = right(GAIN, "float32", made)
    rng, alone = np.random.default_rng(0), Trial(problem, values, "ieee", LOG_SUM_EXP)
    noise = {name: rng.standard_normal(values[name].shape) for name in ("attn_weights", "output")}
    noise["attn_weights"] *= ~values["mask"]
    for share in (1.1, 1.5, 3.0):
        off = {name: share * alone.allowed(name, (made,))["rms"] * noise[name] for name in noise}
        observed = {
            **values,
            **{name: (values[name] + off[name]).astype(np.float32) for name in noise},
        }
        first, again = (
            Trial(problem, observed, "ieee", choice) for choice in (AS_THE_REFERENCE, LOG_SUM_EXP)
        )
        before = {name: first.deviation(name, (made,)) for name in noise}
        assert 1.0 < before["output"].ratio <= MOST_OVER
        verdict = first.with_choice(LOG_SUM_EXP).deviation("attn_weights", (made,))
        assert verdict == again.deviation("attn_weights", (made,))
        assert verdict.ratio < before["attn_weights"].ratio


def test_search_lists_untried_steps():
    """A search without time lists all its steps as untried; one without a limit lists none."""
    problem, values = right(GQA)
    observed = {
        "output": values["output"]
        + np.random.default_rng(0).standard_normal(values["output"].shape)
    }
    diagnosis = diagnose(observed, problem, seconds=0.0)
    untried = "single bugs, pairs of bugs, parameters and parts of the layer, the nearest bugs"
    assert (diagnosis.kind, diagnosis.untried) == ("unknown", untried)
    assert "Not tried: single bugs" in str(diagnosis)
    assert diagnose(observed, problem, seconds=math.inf).untried == ""


def test_bug_after_unknown_stage_is_named():
    """A transposed output projection is named after scores that no bug explains."""
    (made,) = (bug for bug in bugs_for(GQA) if bug.name == "out_proj-transposed")
    problem, values = right(GQA, "float32", made)
    values["scores"] = values["scores"] + np.random.default_rng(0).standard_normal(
        values["scores"].shape
    ).astype("f")
    with np.errstate(all="ignore"):
        layer = reference.Layer(problem, reference.Arithmetic(dtype_named("float32")))
        values |= layer.attn_weights(values)
        values |= layer.context(values)
        values |= edited_layer(problem, "float32", (made,)).output(values)
    diagnosis = diagnose(values, problem)
    assert [unknown.stage for unknown in diagnosis.unnamed] == ["scores"]
    assert [finding.bugs for finding in diagnosis.named] == [("out_proj-transposed",)]


def test_unexplained_q_has_a_location():
    """A factor of 1.25 on one head of q has its location and pattern, also in the JSON."""
    problem, values = right(GQA)
    q = values["q"].copy()
    q[:, 3] *= np.float32(1.25)
    diagnosis = diagnose({"q": q}, problem)
    (finding,) = diagnosis.findings
    assert (diagnosis.kind, finding.bugs) == ("structure", ("stray-factor",))
    assert "only head 3" in finding.where
    assert "1.25" in finding.about
    assert "1.25" in str(diagnosis)
    first_finding = json.loads(json.dumps(diagnosis.to_dict(), allow_nan=False))["findings"][0][
        "description"
    ]
    assert first_finding["location"]["heads"] == [3]


# ---- assert_parity and the command line ----------------------------------------------------------


def test_assert_parity_warns_of_convention():
    """q with other axes passes with a ConventionWarning, and fails with diagnose=False."""
    problem, values = right(GQA)
    recorded = RECORDED["(B, T, N, H)"](values)
    with pytest.warns(parity.ConventionWarning, match=r"q has axes \(B, T, N, H\)"):
        parity.assert_parity({**values, **recorded}, problem=problem)
    with pytest.raises(AssertionError, match="q: actual differs"):
        parity.assert_parity({**values, **recorded}, problem=problem, diagnose=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parity.assert_parity(values, problem=problem)


def test_first_of_two_bugs_is_the_headline():
    """The message begins with the first of two bugs, although stages have other axes."""
    names = ("fused-qkv-read-per-head", "out_proj-bias-missing")
    case = Case("ci", AttentionSpec(32, 4), "no groups", seq_len=6, is_causal=True)
    known = {bug.name: bug for bug in reversed(bugs_for(case))}
    problem, values = right(case, "float32", *map(known.get, names))
    values = recorded_as(
        values, lambda v: {name: v[name].swapaxes(1, 2) for name in ("q", "k", "v", "context")}
    )
    values["scores"] = np.where(values["mask"], -np.inf, values["scores"]).astype(np.float32)
    comparisons, diagnosis = compare_and_diagnose(values, problem=problem)
    assert [finding.bugs for finding in diagnosis.named] == [(name,) for name in names]
    assert all(math.isfinite(comparison.ratio) for comparison in comparisons)
    assert (
        message(comparisons, diagnosis).splitlines()[0]
        == f"Likely bug 1 of 2: {diagnosis.likely_bug}"
    )
    assert diagnosis.likely_bug == names[0]


def test_conventions_have_ratios_below_one():
    """Stages in a different form pass with a ratio of at most 1 and the form as the reason."""
    problem, values = right(GQA)
    _, before = right(GQA, "float32", BEFORE_ROPE)
    values = {
        **recorded_as(values, RECORDED["(B, T, N, H)"]),
        "q": before["q"],
        "scores": values["scores"],
    }
    values = recorded_as(values, RECORDED["masked scores"])
    with pytest.warns(parity.ConventionWarning):
        comparisons, diagnosis = compare_and_diagnose(values, problem=problem)
    assert diagnosis.kind == "convention"
    assert all(comparison.passed and comparison.ratio <= 1.0 for comparison in comparisons)
    assert {comparison.stage for comparison in comparisons if comparison.reason} == set(
        diagnosis.conventions
    )


def test_equal_conventions_share_a_line():
    """The same convention in all steps takes one line of the message."""
    problem, values = right(CACHED)
    turned = {
        name: x.swapaxes(1, 2)
        for name, x in values.items()
        if stage_named(name).quantity == "cache.values"
    }
    diagnosis = diagnose({**values, **turned}, problem)
    assert set(diagnosis.conventions) == set(turned)
    assert len(str(diagnosis).splitlines()) == 2


def test_message_names_eight_other_stages():
    """The line of stages that also differ names eight of them."""
    problem, values = right(CACHED)
    wrong = {name: x + 1 if x.dtype == np.float32 else x for name, x in values.items()}
    comparisons = compare_arrays(wrong, problem=problem)
    (line,) = (line for line in message(comparisons).splitlines() if "also differ" in line)
    assert sum(comparison.stage in line.replace(",", "").split() for comparison in comparisons) == 8


def test_assert_parity_without_diagnosis():
    """With diagnose=False, the message is a part of the full one, and the allowed error, which a
    diagnosis states as a ratio.
    """
    problem, values = right(GQA)
    with pytest.raises(AssertionError) as whole:
        parity.assert_parity(values["output"] * 1.5, problem=problem)
    with pytest.raises(AssertionError) as short:
        parity.assert_parity(values["output"] * 1.5, problem=problem, diagnose=False)
    lines = str(short.value).splitlines()
    (allowed,) = [line for line in lines if line.startswith("  allowed ")]
    lines.remove(allowed)
    assert "\n".join(lines) in str(whole.value)
    assert allowed not in str(whole.value)


PORT = """
import numpy as np
import torch

weights = {name: torch.from_numpy(x) for name, x in dict(np.load(__file__.replace("port.py", "w.npz"))).items()}

def encoder(query: torch.Tensor) -> torch.Tensor:
    q, k, v = (torch.nn.functional.linear(query, weights[f"{n}_proj.weight"], weights[f"{n}_proj.bias"]) for n in "qkv")
    q, k, v = (x.unflatten(-1, (4, 8)).transpose(1, 2) for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    return torch.nn.functional.linear(out, weights["out_proj.weight"], weights["out_proj.bias"])

class Encoder(torch.nn.Module):
    pass
"""


@pytest.mark.thorough
@pytest.mark.costly("a command searches for bugs, in two ways to call a function")
def test_command_reports_assumed_causality(tmp_path, monkeypatch, capsys):
    """The command reports that it assumes a causal function, and the result with --no-causal."""
    spec = AttentionSpec(32, 4)
    weights = parity.random_weights(spec)
    save_weights(tmp_path / "w.safetensors", weights, spec)
    np.savez(tmp_path / "w.npz", **weights)
    (tmp_path / "port.py").write_text(PORT)
    monkeypatch.syspath_prepend(str(tmp_path))
    arguments = [
        "diagnose",
        "port:encoder",
        "--framework",
        "torch",
        "--weights",
        str(tmp_path / "w.safetensors"),
    ]
    assert main(arguments) == 1
    out = capsys.readouterr().out
    assert "port:encoder is assumed to be causal; if it is not, pass --no-causal" in out
    assert "with --no-causal, nothing differs" in out
    assert main([*arguments, "--no-causal"]) == 0
    wrong = {
        "transposed": weights["out_proj.weight"].T.copy(),
        "other": weights["out_proj.weight"] ** 3,
    }
    for name, weight in wrong.items():
        save_weights(tmp_path / "w.safetensors", weights | {"out_proj.weight": weight}, spec)
        assert main(arguments) == 1
        words = "with --no-causal, known bugs explain every difference: out_proj-transposed"
        assert (words in capsys.readouterr().out) == (name == "transposed")
    assert main(["diagnose", "port:Encoder", *arguments[2:]]) == 2
    assert rejects("port:Encoder", "class").is_printed_in(capsys.readouterr().err)


@sample(name=["latent-yarn", "gate"])
@pytest.mark.parametrize(
    "name",
    ["rope-gqa", "latent-yarn", "gate", "fused-qkv-cross", "decode-gqa-rope"],
)
def test_remembered_projections_are_exact(name):
    """With remembered projections, the stages of each bug are exactly the same."""
    case = CASES[name]
    problem = make_problem(case, "float32")
    base = remembering()
    for bug in bugs_for(case):
        with np.errstate(all="ignore"):
            fresh = run_steps(edited_layer(problem, "float64", (bug,)).steps())
            again = run_steps(edited_layer(problem, "float64", (bug, base)).steps())
        assert all(np.array_equal(fresh[stage], again[stage], equal_nan=True) for stage in fresh), (
            bug.name
        )

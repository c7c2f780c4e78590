"""Right layers that are recorded in customary other ways, or computed in ways that are no bug: nothing is wrong."""

import json
import math
import warnings

import numpy as np
import pytest
from helpers.refusals import refuses
from helpers.samples import sample

import parity
from mha_spec import AttentionSpec, Rope
from parity.cli.main import main
from parity.core import reference
from parity.core.cases import CASES, Case
from parity.core.compare import MOST_OVER
from parity.core.problem import make_problem
from parity.core.stages import run_steps, stage_named
from parity.core.weights import dtype_named, save_weights
from parity.diagnosis.bugs import bugs_for, wrong_layer
from parity.diagnosis.choices import AS_THE_REFERENCE, LOG_SUM_EXP, SCORES, SOFTMAX
from parity.diagnosis.diagnose import diagnose
from parity.diagnosis.readings import BEFORE_ROPE, BEFORE_SCALE
from parity.diagnosis.replay import Replay, remembering
from parity.testing.assertion import compare_arrays, judge, message

SPEC = AttentionSpec(32, 4, num_kv_heads=2, rope=Rope(10000.0))
GQA = Case("readings", SPEC, "shared heads, RoPE, two masks", seq_len=6, is_causal=True, key_padding_lengths=(4, 6))
GAIN = Case("readings-gain", SPEC, "large logits", seq_len=24, gain=1000.0)
CACHED = Case("readings-cached", SPEC, "a prompt, then tokens", seq_len=6, chunks=(4, 1, 1), capacity=9)


def right(case, dtype="float32", *changes, arithmetic="ieee"):
    """What a layer gives that is right, recorded as the changes say."""
    problem = make_problem(case, dtype)
    with np.errstate(all="ignore"):
        values = run_steps(wrong_layer(problem, dtype, changes, arithmetic).steps())
    return problem, {name: x for name, x in values.items() if not stage_named(name).path}


def test_batch_and_heads_may_be_one_axis():
    problem, values = right(GQA)
    for name in ("scores", "attn_weights", "context"):
        values[name] = values[name].reshape(-1, *values[name].shape[2:])
    diagnosis = diagnose(values, problem)
    assert diagnosis.kind == "convention"
    assert all("B * N" in diagnosis.conventions[name] for name in ("scores", "attn_weights", "context"))


def kept(values, change):
    """Stages with one or some of them recorded otherwise."""
    return {**values, **change(values)}


RECORDED = {
    "(B, T, N, H)": lambda v: {name: v[name].swapaxes(1, 2) for name in ("q", "k", "v", "context")},
    "(B, T, N * H)": lambda v: {name: v[name].swapaxes(1, 2).reshape(2, 6, -1) for name in ("q", "k", "context")},
    "(B * N, T, H)": lambda v: {"q": v["q"].reshape(8, 6, 8)},
    "(T, B, E)": lambda v: {"output": v["output"].swapaxes(0, 1)},
    "after the repeat": lambda v: {name: v[name].repeat(2, axis=1) for name in "kv"},
    "True shows": lambda v: {"mask": ~v["mask"]},
    "1.0 shows": lambda v: {"mask": (~v["mask"]).astype(np.float32)},
    "additive": lambda v: {"mask": np.where(v["mask"], np.float32(-1e9), np.float32(0.0))},
    "additive -inf": lambda v: {"mask": np.where(v["mask"], -np.inf, 0.0).astype(np.float32)},
    "mask (B, T, S)": lambda v: {"mask": v["mask"][:, 0]},
    "masked scores": lambda v: {"scores": np.where(v["mask"], -np.inf, v["scores"]).astype(np.float32)},
    "unscaled scores": lambda v: {"scores": (v["scores"] * np.sqrt(8.0)).astype(np.float32)},
    "scaled q": lambda v: {"q": (v["q"] / np.sqrt(8.0)).astype(np.float32)},
    "averaged weights": lambda v: {"attn_weights": v["attn_weights"].mean(axis=1)},
    "interleaved pairs": lambda v: {name: v[name][..., [0, 4, 1, 5, 2, 6, 3, 7]] for name in "qk"},
}


@pytest.mark.parametrize("recorded", RECORDED)
def test_what_is_recorded_otherwise_is_a_convention(recorded):
    problem, values = right(GQA)
    diagnosis = diagnose(kept(values, RECORDED[recorded]), problem)
    assert (diagnosis.kind, diagnosis.is_wrong) == ("convention", False), str(diagnosis)
    assert diagnosis.conventions.keys() >= RECORDED[recorded](values).keys()
    json.dumps(diagnosis.to_dict(), allow_nan=False)


@pytest.mark.parametrize("recorded", RECORDED)
def test_a_bug_is_named_beside_what_is_recorded_otherwise(recorded):
    """Here in what follows: the output projection is transposed."""
    (made,) = (bug for bug in bugs_for(GQA) if bug.name == "out_proj-transposed")
    problem, values = right(GQA, "float32", made)
    diagnosis = diagnose(kept(values, RECORDED[recorded]), problem)
    assert diagnosis.is_wrong
    if recorded != "(T, B, E)":  # which is of the wrong stage itself
        assert [each.bugs for each in diagnosis.explanations] == [("out_proj-transposed",)], str(diagnosis)


FILLS = {"-inf": -np.inf, "-1e9": -1e9, "-1e4": -1e4, "the least": float(np.finfo(np.float32).min)}


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("name", ["scale-by-d-model", "causal-off-by-one", "mask-flipped"])
def test_scores_recorded_after_the_mask_hide_no_bug(fill, name):
    """Neither one of the scores themselves, nor one of the mask that fills them."""
    (made, *_) = (bug for bug in bugs_for(GQA) if bug.name == name)
    problem, values = right(GQA, "float32", made)
    shown = ~values["mask"] if name == "mask-flipped" else values["mask"]
    values["scores"] = np.where(shown, FILLS[fill], values["scores"]).astype(np.float32)
    diagnosis = diagnose(values, problem)
    assert [each.bugs for each in diagnosis.explanations] == [(name,)], str(diagnosis)
    assert not diagnosis.unknowns
    assert set(diagnosis.conventions) == {"scores"}
    assert all(each.error_before < 1e6 for each in diagnosis.explanations)


def test_a_penalty_in_recorded_scores_is_named_as_from_the_output_alone():
    (made,) = (bug for bug in bugs_for(GQA) if bug.name == "mask-penalty-filled")
    problem, values = right(GQA, "float32", made)
    values["scores"] = np.where(values["mask"], np.float32(-10.0), values["scores"])
    for observed in (values, {"output": values["output"]}):
        assert [each.bugs for each in diagnose(observed, problem).explanations] == [("mask-penalty-filled",)]


def test_scores_that_are_large_everywhere_are_not_masked():
    problem, values = right(GQA)
    values["scores"] = values["scores"] * np.float32(1e5)
    diagnosis = diagnose(values, problem)
    assert [(each.stage, each.docs) for each in diagnosis.explanations] == [("scores", ("scale",))]


@sample(changed=["context"])
@pytest.mark.parametrize("changed", ["scores", "attn_weights", "context", "output"])
def test_a_reading_hides_no_later_error(changed):
    """q is recorded before RoPE, and something after it is wrong, even if the output agrees."""
    problem, values = right(GQA)
    _, before = right(GQA, "float32", BEFORE_ROPE)
    values = {**values, "q": before["q"], "k": before["k"]}
    assert diagnose(values, problem).kind == "convention"
    diagnosis = diagnose({**values, changed: values[changed] * np.float32(1.01)}, problem)
    assert (diagnosis.is_wrong, diagnosis.stage) == (True, changed)
    assert diagnosis.agrees == (changed != "output")
    alone = diagnose({"q": before["q"]}, problem)
    assert [each.bugs for each in alone.explanations] == [("rope-missing",)]


def test_scores_may_be_recorded_before_the_scale():
    problem, values = right(GQA)
    _, before = right(GQA, "float32", BEFORE_SCALE)
    diagnosis = diagnose({**values, "scores": before["scores"]}, problem)
    assert diagnosis.conventions == {"scores": "is recorded before the scale"}


UNUSED = [0.0, 7.0, np.nan]


@pytest.mark.parametrize("value", UNUSED)
def test_padding_is_not_compared(value):
    problem, values = right(GQA)
    is_padding = np.arange(6)[None, :] >= np.array([4, 6])[:, None]
    for name in ("q", "k", "v", "context", "output"):
        padding = is_padding[:, None, :, None] if values[name].ndim == 4 else is_padding[..., None]
        values[name] = np.where(padding, np.float32(value), values[name])
    values["attn_weights"] = np.where(is_padding[:, None, :, None], np.float32(value), values["attn_weights"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parity.assert_parity(values, problem=problem)
    assert diagnose(values, problem).kind == "none"
    values["output"][0, 3, 0] += np.float32(0.01)  # the last real token
    assert diagnose(values, problem).stage == "output"
    with pytest.raises(AssertionError, match="t=3, e=0"):
        parity.assert_parity(values, problem=problem)


def test_a_pattern_is_found_beside_padding():
    """The values of padding are garbage, and head 3 of real tokens is scaled."""
    problem, values = right(GQA)
    is_padding = np.arange(6)[None, None, :, None] >= np.array([4, 6])[:, None, None, None]
    q = values["q"].copy()
    q[:, 3] *= np.float32(1.25)
    diagnosis = diagnose({"q": np.where(is_padding, np.float32(50.0), q)}, problem)
    assert diagnosis.unknowns[0].laws[0].startswith("the values there are 1.25 ")
    assert "only head 3" in diagnosis.unknowns[0].where


def test_a_cache_may_grow_and_hold_anything_in_unused_slots():
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


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("choice", [SCORES, SOFTMAX], ids=["scores", "softmax"])
@pytest.mark.parametrize("stages", ["all", "but scores", "output"])
def test_scores_in_16_bits_are_no_bug(dtype, choice, stages):
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
    diagnosis = diagnose({"output": wrong["output"], "scores": wrong["scores"].astype(dtype_named(dtype))}, problem)
    assert [each.bugs for each in diagnosis.explanations] == [("scale-missing",)]


def test_a_softmax_by_log_sum_exp_is_no_bug():
    problem, values = right(GAIN, "float32", LOG_SUM_EXP)
    diagnosis = diagnose(values, problem)
    assert not diagnosis.is_wrong
    assert "log sum exp" in str(diagnosis)


@pytest.mark.parametrize("seed", range(3))
def test_weights_computed_after_a_kernel_are_right(seed):
    """Its context has exact sums; its logarithm is that of its own scores, which round in another order."""
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
    assert diagnose(values, problem).stage == "context"


def test_the_reference_with_another_choice_is_computed_anew_but_for_float64():
    problem = make_problem(GAIN, "float32")
    first, alone = (Replay(problem, {}, "ieee", choice) for choice in (AS_THE_REFERENCE, LOG_SUM_EXP))
    before = {dtype: first.stage("attn_weights", (), dtype) for dtype in ("float32", "float64")}
    other = first.with_choice(LOG_SUM_EXP)
    assert other.stage("attn_weights", (), "float64") is before["float64"]
    found = other.stage("attn_weights", (), "float32")
    assert np.array_equal(found, alone.stage("attn_weights", (), "float32"))
    assert not np.array_equal(found, before["float32"])


def test_a_replay_with_another_choice_says_what_it_would_say_alone():
    """Also where the noise is measured again, just beyond the budget, as it was before for another stage."""
    made = next(bug for bug in bugs_for(GAIN) if bug.name == "scale-missing")
    problem, values = right(GAIN, "float32", made)
    rng, alone = np.random.default_rng(0), Replay(problem, values, "ieee", LOG_SUM_EXP)
    noise = {name: rng.standard_normal(values[name].shape) for name in ("attn_weights", "output")}
    noise["attn_weights"] *= ~values["mask"]
    for share in (1.1, 1.5, 3.0):
        off = {name: share * alone.allowed(name, (made,))["rms"] * noise[name] for name in noise}
        observed = {**values, **{name: (values[name] + off[name]).astype(np.float32) for name in noise}}
        first, again = (Replay(problem, observed, "ieee", choice) for choice in (AS_THE_REFERENCE, LOG_SUM_EXP))
        before = {name: first.judgement(name, (made,)) for name in noise}
        assert 1.0 < before["output"].ratio <= MOST_OVER
        verdict = first.with_choice(LOG_SUM_EXP).judgement("attn_weights", (made,))
        assert verdict == again.judgement("attn_weights", (made,))
        assert verdict.ratio < before["attn_weights"].ratio


def test_the_search_ends_in_time_and_says_what_it_did_not_try():
    problem, values = right(GQA)
    observed = {"output": values["output"] + np.random.default_rng(0).standard_normal(values["output"].shape)}
    diagnosis = diagnose(observed, problem, seconds=0.0)
    untried = "single bugs, pairs of bugs, numbers and parts of the layer, the nearest bugs"
    assert (diagnosis.kind, diagnosis.untried) == ("unknown", untried)
    assert "Not tried: single bugs" in str(diagnosis)
    assert diagnose(observed, problem, seconds=math.inf).untried == ""


def test_it_goes_on_after_a_stage_that_nothing_explains():
    (made,) = (bug for bug in bugs_for(GQA) if bug.name == "out_proj-transposed")
    problem, values = right(GQA, "float32", made)
    values["scores"] = values["scores"] + np.random.default_rng(0).standard_normal(values["scores"].shape).astype("f")
    with np.errstate(all="ignore"):
        layer = reference.Layer(problem, reference.Arithmetic(dtype_named("float32")))
        values |= layer.attn_weights(values)
        values |= layer.context(values)
        values |= wrong_layer(problem, "float32", (made,)).output(values)
    diagnosis = diagnose(values, problem)
    assert [unknown.stage for unknown in diagnosis.unknowns] == ["scores"]
    assert [each.bugs for each in diagnosis.explanations] == [("out_proj-transposed",)]


def test_what_nothing_explains_is_told_with_where_and_by_what_law():
    problem, values = right(GQA)
    q = values["q"].copy()
    q[:, 3] *= np.float32(1.25)
    diagnosis = diagnose({"q": q}, problem)
    assert diagnosis.kind == "law"
    assert "only head 3" in diagnosis.unknowns[0].where
    assert "1.25" in diagnosis.unknowns[0].laws[0]
    assert "1.25" in str(diagnosis)
    found = json.loads(json.dumps(diagnosis.to_dict(), allow_nan=False))["unknowns"][0]["findings"]
    assert found["place"]["heads"] == [3]


# ---- assert_parity and the command line ------------------------------------------------------------------------------


def test_assert_parity_warns_of_a_convention_and_passes():
    problem, values = right(GQA)
    told = RECORDED["(B, T, N, H)"](values)
    with pytest.warns(parity.ConventionWarning, match=r"q has axes \(B, T, N, H\)"):
        parity.assert_parity({**values, **told}, problem=problem)
    with pytest.raises(AssertionError, match="q: actual differs"):
        parity.assert_parity({**values, **told}, problem=problem, diagnose=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parity.assert_parity(values, problem=problem)


def test_the_first_of_two_bugs_leads_where_axes_differ_too():
    names = ("fused-qkv-read-per-head", "out_proj-bias-missing")
    case = Case("ci", AttentionSpec(32, 4), "no groups", seq_len=6, is_causal=True)
    known = {each.name: each for each in reversed(bugs_for(case))}
    problem, values = right(case, "float32", *map(known.get, names))
    values = kept(values, lambda v: {name: v[name].swapaxes(1, 2) for name in ("q", "k", "v", "context")})
    values["scores"] = np.where(values["mask"], -np.inf, values["scores"]).astype(np.float32)
    judged, diagnosis = judge(values, problem=problem)
    assert [each.bugs for each in diagnosis.explanations] == [(name,) for name in names]
    assert all(math.isfinite(each.ratio) for each in judged)
    assert message(judged, diagnosis).splitlines()[0] == f"Likely bug 1 of 2: {diagnosis.likely_bug}"
    assert diagnosis.likely_bug == names[0]


def test_what_passes_in_another_form_has_the_distance_of_ours():
    problem, values = right(GQA)
    _, before = right(GQA, "float32", BEFORE_ROPE)
    values = {**kept(values, RECORDED["(B, T, N, H)"]), "q": before["q"], "scores": values["scores"]}
    values = kept(values, RECORDED["masked scores"])
    with pytest.warns(parity.ConventionWarning):
        judged, diagnosis = judge(values, problem=problem)
    assert diagnosis.kind == "convention"
    assert all(each.passed and each.ratio <= 1.0 for each in judged)
    assert {each.stage for each in judged if each.reason} == set(diagnosis.conventions)


def test_what_is_recorded_alike_in_all_steps_is_a_line():
    problem, values = right(CACHED)
    turned = {name: x.swapaxes(1, 2) for name, x in values.items() if stage_named(name).quantity == "cache.values"}
    diagnosis = diagnose({**values, **turned}, problem)
    assert set(diagnosis.conventions) == set(turned)
    assert len(str(diagnosis).splitlines()) == 2


def test_a_message_names_some_stages_and_counts_the_others():
    problem, values = right(CACHED)
    wrong = {name: x + 1 if x.dtype == np.float32 else x for name, x in values.items()}
    comparisons = compare_arrays(wrong, problem=problem)
    (line,) = (line for line in message(comparisons).splitlines() if "also differ" in line)
    assert sum(each.stage in line.replace(",", "").split() for each in comparisons) == 8


def test_assert_parity_may_leave_the_diagnosis_out():
    problem, values = right(GQA)
    with pytest.raises(AssertionError) as whole:
        parity.assert_parity(values["output"] * 1.5, problem=problem)
    with pytest.raises(AssertionError) as short:
        parity.assert_parity(values["output"] * 1.5, problem=problem, diagnose=False)
    assert str(short.value) in str(whole.value)
    assert str(whole.value) != str(short.value)


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


def test_the_command_says_that_it_took_a_function_for_causal(tmp_path, monkeypatch, capsys):
    spec = AttentionSpec(32, 4)
    weights = parity.random_weights(spec)
    save_weights(tmp_path / "w.safetensors", weights, spec)
    np.savez(tmp_path / "w.npz", **weights)
    (tmp_path / "port.py").write_text(PORT)
    monkeypatch.syspath_prepend(str(tmp_path))
    told = ["diagnose", "port:encoder", "--framework", "torch", "--weights", str(tmp_path / "w.safetensors")]
    assert main(told) == 1
    out = capsys.readouterr().out
    assert "port:encoder is assumed to be causal; if it is not, pass --no-causal" in out
    assert "with --no-causal, nothing differs" in out
    assert main([*told, "--no-causal"]) == 0
    wrong = {"transposed": weights["out_proj.weight"].T.copy(), "other": weights["out_proj.weight"] ** 3}
    for name, weight in wrong.items():
        save_weights(tmp_path / "w.safetensors", weights | {"out_proj.weight": weight}, spec)
        assert main(told) == 1
        words = "with --no-causal, known bugs explain every difference: out_proj-transposed"
        assert (words in capsys.readouterr().out) == (name == "transposed")
    assert main(["diagnose", "port:Encoder", *told[2:]]) == 2
    assert refuses("port:Encoder", "class").is_printed_in(capsys.readouterr().err)


@sample(name=["rope-gqa", "latent-yarn", "gate"])
@pytest.mark.parametrize(
    "name",
    ["rope-gqa", "latent-yarn", "gate", "fused-qkv-cross", "decode-gqa-rope"],
)
def test_projections_that_are_remembered_are_those_of_each_layer(name):
    case = CASES[name]
    problem = make_problem(case, "float32")
    base = remembering()
    for bug in bugs_for(case):
        with np.errstate(all="ignore"):
            fresh = run_steps(wrong_layer(problem, "float64", (bug,)).steps())
            again = run_steps(wrong_layer(problem, "float64", (bug, base)).steps())
        assert all(np.array_equal(fresh[stage], again[stage], equal_nan=True) for stage in fresh), bug.name

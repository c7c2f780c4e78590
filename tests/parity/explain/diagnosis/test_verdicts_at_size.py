"""Verdicts on large layers in 16 bits: bugs that show only at distant tokens, small errors, and
hidden bugs.
"""

import re
from dataclasses import replace

import numpy as np
import pytest
from helpers.diagnoses import named_bugs
from helpers.samples import sample

import parity
from mha_spec import AttentionSpec, DynamicScaling, Latent, Llama3Scaling, Norm, Rope
from parity import Case, make_problem
from parity.explain.diagnosis.bugs import bugs_for, edited_layer
from parity.explain.diagnosis.fits.rotation import as_exponent
from parity.explain.diagnosis.fits.words import readable_apart
from parity.explain.diagnosis.sampling import is_large
from parity.measure.core.compare import dtype_of_stage, first_difference
from parity.measure.core.trace import Reference
from parity.use.testing.assertion import compare_arrays

LLAMA = AttentionSpec(
    256,
    4,
    num_kv_heads=2,
    head_dim=64,
    qkv_bias=False,
    out_bias=False,
    rope=Rope(500000.0, scaling=Llama3Scaling(8.0, 8192)),
)
FAR = Case(
    "far",
    LLAMA,
    "a layer whose scaling shows far from the first token",
    batch=1,
    seq_len=600,
    is_causal=True,
)


def stages_with(problem, name, stages):
    """Return some stages of the reference with a known bug, in the problem's dtype."""
    made = [bug for bug in bugs_for(problem.case) if bug.name == name][:1]
    assert made
    values = edited_layer(problem, problem.dtype, made).forward()
    return {stage: values[stage].astype(dtype_of_stage(stage, problem.dtype)) for stage in stages}


@pytest.fixture(scope="module")
def far():
    problem = make_problem(FAR, "bfloat16")
    assert is_large(problem)
    return problem


@sample(stages=[("q",)])
@pytest.mark.parametrize("stages", [("output",), ("q",), ("q", "k", "v", "output")], ids="+".join)
def test_scaling_bug_is_named_from_any_stage(far, stages):
    """Missing RoPE scaling is named from the output, from q and from several stages."""
    observed = stages_with(far, "rope-scaling-missing", stages)
    diagnosis = parity.diagnose(observed, far)
    assert named_bugs(diagnosis) == ["rope-scaling-missing"]
    assert diagnosis.stage == stages[0]


@pytest.mark.thorough
def test_message_has_one_ratio(far):
    """The only ratio of q in a message is the ratio of the whole stage, even after sampling."""
    observed = stages_with(far, "rope-scaling-missing", ("q", "k", "v", "output"))
    with pytest.raises(AssertionError) as raised:
        parity.assert_parity(observed, problem=far)
    text = str(raised.value)
    (ratio,) = map(float, re.findall(r"q, (\S+) times its budget", text))
    assert "allowed" not in text
    whole = first_difference(compare_arrays(observed, problem=far))
    assert whole is not None
    assert ratio == pytest.approx(whole.ratio, rel=0.1)


@pytest.mark.thorough
@pytest.mark.costly("two diagnoses of a layer of 600 tokens")
def test_output_note_is_of_whole_output(far):
    """A difference has the note that the output agrees only if the whole output does."""
    observed = stages_with(far, "rope-scaling-missing", ("q", "k", "v", "output"))
    reference = Reference(far, stages=frozenset(observed))
    right = reference.same_precision(local=False)["output"]
    wrong = parity.diagnose(observed, far, seconds=0.2)
    same_output = parity.diagnose({**observed, "output": right}, far, seconds=0.2)
    assert (wrong.output_agrees, same_output.output_agrees) == (False, True)
    assert "Note: the output agrees" in str(same_output)
    assert "Note" not in str(wrong)


@pytest.fixture(scope="module")
def plain():
    """Return a large problem with few known bugs, so that a complete search is short."""
    spec = AttentionSpec(256, 4, qkv_bias=False, out_bias=False)
    problem = make_problem(
        Case("plain", spec, "", batch=1, seq_len=200, is_causal=True), "bfloat16"
    )
    assert is_large(problem)
    return problem


@sample(1)
@pytest.mark.parametrize("stage", ["q", "output"])
def test_unknown_error_has_a_location(plain, stage):
    """One wrong element of q or the output is unknown, with its position and its size."""
    right = Reference(plain, stages=frozenset({"q", "output"})).same_precision(local=False)
    observed = {name: right[name].copy() for name in ("q", "output")}
    index = (0, 3, 187, 11) if stage == "q" else (0, 187, 11)
    observed[stage][index] += 1.0
    diagnosis = parity.diagnose(observed, plain)
    assert (diagnosis.kind, diagnosis.stage) == ("unknown", stage)
    assert "position 187" in diagnosis.unnamed[0].where
    assert "the error is at most" in diagnosis.evidence
    assert "rounding" not in str(diagnosis)


@pytest.mark.thorough
@pytest.mark.costly("a search in a layer of 200 tokens")
def test_error_over_budget_is_unknown(plain):
    """An output error of 1 to 3 times its budget is unknown: it is not rounding."""
    reference = Reference(plain, stages=frozenset({"output"}))
    expected = reference.accumulated["output"]
    noise = reference.same_precision(local=False)["output"].astype(np.float64) - expected
    observed = (expected + 6.0 * noise).astype(dtype_of_stage("output", "bfloat16"))
    with pytest.raises(AssertionError):
        parity.assert_parity(observed, problem=plain, diagnose=False)
    diagnosis = parity.diagnose({"output": observed}, plain)
    assert diagnosis.kind == "unknown"
    assert "Unexplained: " in str(diagnosis)
    assert 1.0 < diagnosis.ratio < 3.0


# ---- Lost precision ------------------------------------------------------------------------------

NORMED = AttentionSpec(
    64,
    4,
    num_kv_heads=2,
    head_dim=16,
    qkv_bias=False,
    out_bias=False,
    qk_norm=Norm(eps=1e-5),
    rope=Rope(500000.0),
)


@sample(2)
@pytest.mark.parametrize("stages", [("output",), ("q", "k", "v", "output")], ids="+".join)
@pytest.mark.parametrize("size", ["small", "large"])
def test_eps_outside_norm_is_named(size, stages):
    """An eps outside the root is named, though lost precision could have the same small size."""
    spec = NORMED if size == "small" else replace(NORMED, d_model=256, head_dim=64)
    case = Case("eps", spec, "", batch=1, seq_len=40 if size == "small" else 300, is_causal=True)
    problem = make_problem(case, "float32")
    assert is_large(problem) == (size == "large")
    diagnosis = parity.diagnose(stages_with(problem, "qk-norm-eps-outside", stages), problem)
    assert named_bugs(diagnosis) == ["qk-norm-eps-outside"]


@sample(1)
@pytest.mark.parametrize("size", [3e-6, 1e-4])
def test_noise_is_not_lost_precision(size):
    """Noise as large as in a 16-bit projection is unknown, not lost precision."""
    problem = make_problem(
        Case("noise", NORMED, "", batch=1, seq_len=16, is_causal=True), "float32"
    )
    expected = Reference(problem).accumulated["output"]
    noise = np.random.default_rng(0).standard_normal(expected.shape)
    observed = (expected + size * np.abs(expected).max() * noise).astype(np.float32)
    diagnosis = parity.diagnose({"output": observed}, problem)
    assert (diagnosis.kind, named_bugs(diagnosis)) == ("unknown", [])


# ---- RoPE's frequencies --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rounded_frequencies_are_named(dtype):
    """RoPE frequencies in bfloat16 are named, though the output agrees in bfloat16."""
    spec = AttentionSpec(
        64, 4, num_kv_heads=2, qkv_bias=False, out_bias=False, rope=Rope(1000000.0)
    )
    case = Case("rounded", spec, "", batch=1, seq_len=24, is_causal=True, first_position=4000)
    problem = make_problem(case, dtype)
    observed = stages_with(
        problem, "rope-frequencies-bfloat16", ("q", "k", "v", "context", "output")
    )
    diagnosis = parity.diagnose(observed, problem)
    assert named_bugs(diagnosis) == ["rope-frequencies-bfloat16"]
    assert diagnosis.output_agrees == (dtype == "bfloat16")
    with pytest.raises(AssertionError, match="rope-frequencies-bfloat16"):
        parity.assert_parity(observed, problem=problem)


def test_extra_rotation_is_wrong():
    """The same extra rotation of q and k is wrong at q, although the output agrees."""
    spec = AttentionSpec(32, 4, rope=Rope(10000.0))
    problem = make_problem(Case("turned", spec, "", batch=1, seq_len=12, is_causal=True), "float32")
    values = edited_layer(problem, "float32", ()).forward()
    angles = np.random.default_rng(0).uniform(0.0, 6.0, 4)
    cos, sin = np.cos(angles), np.sin(angles)
    for name in "qk":
        first, second = np.split(values[name].astype(np.float64), 2, axis=-1)
        turned = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
        values[name] = turned.astype(np.float32)
    observed = {name: values[name] for name in ("q", "k", "v", "output")}
    diagnosis = parity.diagnose(observed, problem, seconds=0.2)
    assert (diagnosis.is_wrong, diagnosis.stage, diagnosis.output_agrees) == (True, "q", True)


# ---- Hidden bugs ---------------------------------------------------------------------------------


@sample(1, size=["large"])
@pytest.mark.parametrize("size", ["small", "large"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bugs_hidden_by_dtype_are_listed(dtype, size):
    """A window one key too wide is named in float32, and listed as hidden in bfloat16."""
    width, tokens = (32, 400) if size == "small" else (256, 600)
    spec = AttentionSpec(width, 2, num_kv_heads=1, window_size=tokens - 10, rope=Rope(10000.0))
    problem = make_problem(Case("window", spec, "", batch=1, seq_len=tokens, is_causal=True), dtype)
    assert is_large(problem) == (size == "large")
    observed = stages_with(problem, "window-one-too-wide", ("output",))
    diagnosis = parity.diagnose(observed, problem)
    if dtype == "float32":
        assert (named_bugs(diagnosis), diagnosis.hidden) == (["window-one-too-wide"], ())
    else:
        assert diagnosis.kind == "none"
        assert "window-one-too-wide" in diagnosis.hidden
        assert "may not show in bfloat16: compare in float32 as well" in str(diagnosis)


# ---- Numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "right", "texts"),
    [
        (0.25000123, 0.25, ("0.250001", "0.25")),
        (0.2499, 0.25, ("0.2499", "0.25")),
        (0.35355, 0.3535533906, ("0.3535", "0.3536")),
        (0.353553, 0.3535533906, ("0.353553", "0.3535534")),
        (10000.0, 500000.0, ("10000", "500000")),
        (0.25, 0.25, ("0.25", "0.25")),
    ],
)
def test_printed_numbers_differ(number, right, texts):
    """A wrong number and the right one are printed with enough digits to differ."""
    assert readable_apart(number, right) == texts


@pytest.mark.parametrize(
    ("spec", "power", "form"),
    [
        (AttentionSpec(96, 2, head_dim=32, rope=Rope(10000.0)), 32 / 96, "2 i / d_model"),
        (AttentionSpec(96, 2, head_dim=32, rope=Rope(10000.0, rotary_dim=16)), 16 / 32, "i / d"),
        (
            AttentionSpec(96, 2, head_dim=32, rope=Rope(10000.0, rotary_dim=24)),
            24 / 32,
            "2 i / head_dim",
        ),
        (AttentionSpec(96, 2, head_dim=32, rope=Rope(10000.0)), 0.77, ""),
    ],
)
def test_theta_fits_other_exponent(spec, power, form):
    """A theta that is equivalent to a different exponent of RoPE has its formula; others have
    none.
    """
    expected = f", or the exponent {form} instead of 2 i / d" if form else ""
    assert as_exponent(10000.0**power, spec) == expected


@sample(1)
@pytest.mark.parametrize("stage", ["q", "output"])
def test_exponent_over_d_model_is_named(stage):
    """Exponents over d_model, which look like a theta of 21.54, have a fix for the exponents."""
    spec = AttentionSpec(48, 3, qkv_bias=False, out_bias=False, rope=Rope(10000.0))
    problem = make_problem(
        Case("exponent", spec, "", batch=1, seq_len=16, is_causal=True), "float32"
    )
    other = replace(spec, rope=Rope(10000.0 ** (16 / 48)))
    wrong = replace(problem, case=replace(problem.case, spec=other))
    observed = {stage: Reference(wrong).same_precision(local=False)[stage]}
    text = parity.diagnose(observed, problem).text
    assert "2 i / d_model" in text
    assert "use the exponent 2 i / R for pair i of R features, with theta = 10000" in text
    assert "set RoPE's theta" not in text


def test_odd_theta_has_no_fix():
    """A theta of 1234.56 is reported with its page but without a fix."""
    spec = AttentionSpec(32, 4, qkv_bias=False, out_bias=False, rope=Rope(10000.0))
    problem = make_problem(Case("odd", spec, "", batch=1, seq_len=16, is_causal=True), "float32")
    wrong = replace(problem, case=replace(problem.case, spec=replace(spec, rope=Rope(1234.56))))
    diagnosis = parity.diagnose({"q": Reference(wrong).same_precision(local=False)["q"]}, problem)
    assert "1235" in str(diagnosis)
    assert (diagnosis.fix, diagnosis.more) == ("", "mha-parity bugs rope-theta")


def test_scale_fix_has_the_right_number():
    """With latents and YaRN the scale is not 1 / sqrt(head_dim), and the fix has the right
    number.
    """
    from mha_spec import YarnScaling

    scaling = YarnScaling(factor=40.0, original_length=64, mscale=0.707, mscale_all_dim=0.707)
    rope = Rope(10000.0, rotary_dim=8, rotated="last", pairs="interleaved", scaling=scaling)
    spec = AttentionSpec(
        64,
        4,
        head_dim=24,
        value_head_dim=16,
        latent=Latent(20, 8),
        rope=rope,
        qkv_bias=False,
        out_bias=False,
    )
    problem = make_problem(Case("mla", spec, "", seq_len=9, is_causal=True), "float32")
    diagnosis = parity.diagnose(stages_with(problem, "scale-squared", ("output",)), problem)
    assert diagnosis.fix == f"multiply the scores by {spec.score_scale:g}, once"
    assert f"1 / sqrt(H) times {scaling.score_factor:.4g}" in diagnosis.named[0].about


def test_missing_dynamic_scaling_is_named():
    """Missing dynamic scaling, which depends on the length, is named in a large layer."""
    rope = Rope(10000.0, scaling=DynamicScaling(4.0, 128))
    case = replace(FAR, spec=replace(LLAMA, rope=rope), seq_len=300)
    problem = make_problem(case, "bfloat16")
    unscaled = replace(problem, case=replace(case, spec=replace(LLAMA, rope=Rope(10000.0))))
    observed = Reference(unscaled).same_precision(local=False)
    diagnosis = parity.diagnose(
        {name: observed[name] for name in ("q", "k", "v", "output")}, problem
    )
    assert named_bugs(diagnosis) == ["rope-scaling-missing"]


# ---- Serving -------------------------------------------------------------------------------------

RAGGED = AttentionSpec(64, 8, num_kv_heads=2, qkv_bias=False, out_bias=False, rope=Rope(10000.0))
SERVED = Case(
    "served",
    RAGGED,
    "a padded prompt, then steps",
    seq_len=9,
    is_causal=True,
    chunks=(6, 1, 1, 1),
    new_lengths=((6, 3), (1, 1), (1, 1), (1, 1)),
    capacity=10,
)


def served(problem, *, mask_of_longest=False):
    """Return the stages of a NumPy server that writes padding to its cache and overwrites it in the
    next steps.
    """
    case, width, group = problem.case, 8, 4
    weights = {name: x.astype(np.float64) for name, x in problem.weights.items()}
    frequencies = 10000.0 ** (-np.arange(0, width, 2) / width)
    keys, values = np.zeros((2, 2, case.capacity, width)), np.zeros((2, 2, case.capacity, width))
    lengths, stages = np.zeros(2, int), {}
    for step, count in enumerate(case.chunks):
        x = problem.step_input(step).astype(np.float64)
        positions = lengths[:, None] + np.arange(count)
        angles = (positions[..., None] * frequencies)[:, None]

        def turned(y, angles=angles):
            first, second = np.split(y, 2, axis=-1)
            rotated = (
                first * np.cos(angles) - second * np.sin(angles),
                second * np.cos(angles) + first * np.sin(angles),
            )
            return np.concatenate(rotated, axis=-1)

        def heads(name, number, x=x, count=count):
            return (
                (x @ weights[f"{name}_proj.weight"].T)
                .reshape(2, count, number, width)
                .swapaxes(1, 2)
            )

        q, k, v = turned(heads("q", 8)), turned(heads("k", 2)), heads("v", 2)
        for b in range(2):
            slots = slice(lengths[b], lengths[b] + count)
            keys[b, :, slots], values[b, :, slots] = k[b], v[b]
        last = np.full_like(positions, lengths.max()) if mask_of_longest and step else positions
        hidden = (np.arange(case.capacity) > last[..., None])[:, None]
        scores = np.where(
            hidden, -np.inf, q @ keys.repeat(group, 1).swapaxes(2, 3) / np.sqrt(width)
        )
        weighed = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weighed /= weighed.sum(axis=-1, keepdims=True)
        context = weighed @ values.repeat(group, 1)
        lengths = lengths + np.array(case.new_lengths[step])
        output = context.swapaxes(1, 2).reshape(2, count, -1) @ weights["out_proj.weight"].T
        stages_served = {
            "q": q,
            "k": k,
            "v": v,
            "attn_weights": weighed,
            "context": context,
            "output": output,
        }
        stages_served |= {"cache.keys": keys.copy(), "cache.values": values.copy()}
        stages |= {
            f"step{step}.{name}": array.astype(np.float32) for name, array in stages_served.items()
        }
        stages[f"step{step}.mask"] = np.broadcast_to(hidden, (2, 8, count, case.capacity))
        stages[f"step{step}.cache.lengths"] = lengths.astype(np.int32)
    return stages


@pytest.mark.parametrize("stages", ["all", "output"])
@pytest.mark.filterwarnings("error")
def test_cached_padding_is_right(stages):
    """A server that caches padding and overwrites it later passes without a warning."""
    problem = make_problem(SERVED, "float32")
    observed = served(problem)
    if stages == "output":
        observed = {name: x for name, x in observed.items() if name.endswith("output")}
    parity.assert_parity(observed, problem=problem)
    assert parity.diagnose(observed, problem).kind == "none"


def test_mask_of_longest_is_located():
    """Masks by the longest length are one bug, wrong from step 1 on."""
    problem = make_problem(SERVED, "float32")
    diagnosis = parity.diagnose(served(problem, mask_of_longest=True), problem)
    assert diagnosis.stage == "step1.mask"
    (first,) = diagnosis.findings
    assert first.stages == ("step1.mask", "step2.mask", "step3.mask")
    assert first.bugs == ("cache-mask-of-longest",)


# ---- Whole stages --------------------------------------------------------------------------------


def at_size(dtype="float32", **fields):
    """Return a large problem with grouped heads, and its correct stages in its dtype."""
    spec = AttentionSpec(256, 16, num_kv_heads=4, head_dim=16, **{"rope": Rope(10000.0), **fields})
    problem = make_problem(Case("whole", spec, "", batch=1, seq_len=TOKENS, is_causal=True), dtype)
    assert is_large(problem)
    values = edited_layer(problem, dtype, ()).forward()
    names = ("q", "k", "v", "scores", "context", "output")
    return problem, {name: values[name].astype(dtype_of_stage(name, dtype)) for name in names}


TOKENS = 200
"""More tokens than a sample has."""


@pytest.mark.parametrize(
    "cut", [np.s_[:, :150], np.s_[:0], np.s_[..., :128], np.s_[:, :-1]], ids=str
)
def test_wrong_shape_at_size_fails(cut):
    """A large output of a wrong shape fails, with the shape in the message."""
    problem, values = at_size()
    with pytest.raises(AssertionError, match="has shape"):
        parity.assert_parity(values["output"][cut], problem=problem)


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "position"), [("v", 191), ("q", 191), ("scores", 7)])
def test_convention_hides_no_wrong_token(name, position):
    """Repeated heads, flat heads and masked scores pass; one wrong token in them fails."""
    problem, values = at_size(rope=None)
    if name == "v":
        form = values["v"].repeat(4, axis=1)
    elif name == "q":
        form = values["q"].swapaxes(1, 2).reshape(1, TOKENS, 256)
    else:
        hidden = np.arange(TOKENS) > np.arange(TOKENS)[:, None]
        form = np.where(hidden, np.float32(-1e9), values["scores"])
    with pytest.warns(parity.ConventionWarning):
        parity.assert_parity({name: form, "output": values["output"]}, problem=problem)
    wrong = form.copy()
    index = (0, position) if name == "q" else (0, slice(None), position)
    wrong[index] = np.where(wrong[index] > -1e8, -3.0 * wrong[index], wrong[index])
    with pytest.raises(AssertionError):
        parity.assert_parity({name: wrong, "output": values["output"]}, problem=problem)


def test_q_k_before_rope_pass_at_size():
    """q and k of a large layer recorded before RoPE pass with a ConventionWarning."""
    problem, values = at_size()
    unrotated = edited_layer(
        problem, "float32", [b for b in bugs_for(problem.case) if b.name == "rope-missing"]
    ).qkv({})
    observed = {**values, "q": unrotated["q"], "k": unrotated["k"]}
    with pytest.warns(parity.ConventionWarning, match="is recorded before RoPE"):
        parity.assert_parity(observed, problem=problem)


def test_bfloat16_scores_pass_at_size():
    """Scores of a large layer kept in bfloat16 are a choice, not an error."""
    problem, values = at_size("bfloat16")
    observed = {**values, "scores": values["scores"].astype(values["q"].dtype)}
    diagnosis = parity.diagnose(observed, problem)
    assert (diagnosis.kind, diagnosis.choice) == ("none", "scores are kept in bfloat16")


def test_shared_kv_layer_is_sampled():
    """In a large layer with shared_kv, an output shifted by one token is wrong."""
    spec = AttentionSpec(256, 16, num_kv_heads=4, head_dim=16, rope=Rope(10000.0), shared_kv=True)
    problem = make_problem(
        Case("lent", spec, "", batch=1, seq_len=TOKENS, is_causal=True), "float32"
    )
    assert is_large(problem)
    output = edited_layer(problem, "float32", ()).forward()["output"]
    shifted = {"output": np.roll(output, 1, axis=1)}
    assert parity.diagnose(shifted, problem, seconds=0.2).is_wrong

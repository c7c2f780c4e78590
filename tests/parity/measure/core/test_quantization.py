"""Quantized caches: their record, the rounding of the reference, and what right ports may do."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from helpers.input_errors import rejects, rejects_type
from helpers.quantized import computed, problem_of
from helpers.samples import sample

import parity
from mha_spec import AttentionSpec, Latent, Rope
from parity.measure.core.case import Case
from parity.measure.core.quantization import LARGEST, SCALE_AXES, CacheQuantization
from parity.measure.core.reference.quantized import to_middle, to_nearest
from parity.use.running.run import run_cases

NAMES = {"float8_e4m3fn": ml_dtypes.float8_e4m3fn, "float8_e5m2": ml_dtypes.float8_e5m2}
EVERY = [(dtype, group) for dtype in LARGEST for group in SCALE_AXES]


@pytest.mark.parametrize("dtype", NAMES)
def test_floats_are_rounded_as_by_ml_dtypes(dtype):
    """All values of a float8, values around them and ties are rounded as by ml_dtypes."""
    every = np.arange(256, dtype=np.uint8).view(NAMES[dtype]).astype(np.float64)
    every = np.unique(every[np.isfinite(every)])
    middles = (every[1:] + every[:-1]) / 2
    x = np.concatenate([every, middles, middles * 1.001, middles * 0.999, -every / 3])
    x = x[np.abs(x) <= LARGEST[dtype]]
    assert len(x) > 500
    expected = x.astype(np.float32).astype(NAMES[dtype]).astype(np.float64)
    np.testing.assert_array_equal(to_nearest(x, dtype), expected)


def test_numbers_saturate_at_the_largest():
    """Values beyond the largest of a dtype become that one, of either sign."""
    for dtype, largest in LARGEST.items():
        x = np.array([1.0, 1.3, 1e6]) * largest
        assert to_nearest(x, dtype).tolist() == [largest] * 3
        assert to_nearest(-x, dtype).tolist() == [-largest] * 3


def test_integers_are_rounded_half_to_even():
    """Ties between integers go to the even one."""
    x = np.array([0.5, 1.5, 2.5, -0.5, -1.5])
    assert to_nearest(x, "int8").tolist() == [0.0, 2.0, 2.0, -0.0, -2.0]


def test_uncertain_numbers_are_in_the_middle():
    """The same-precision reference is between two stored values only if both are possible."""
    x = np.array([0.5, 0.5 + 1e-7, 0.51, 3.0], np.float32)
    assert to_middle(x, "int8", 1e-6).tolist() == [0.5, 0.5, 1.0, 3.0]
    assert to_middle(np.zeros(0, np.float32), "int8", 1e-6).size == 0


@sample(8)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("stored", "group"), EVERY)
@pytest.mark.parametrize("before_rope", [False, True])
def test_right_quantized_port_agrees(stored, group, before_rope, dtype):
    """A port that quantizes rightly agrees, with all stages and with its outputs alone."""
    quantization = CacheQuantization(stored, group, before_rope=before_rope)
    problem = problem_of(quantization, dtype)
    stages = computed(problem)
    parity.assert_parity(stages, problem=problem, diagnose=False)
    assert not parity.diagnose(stages, problem).is_wrong
    outputs = {name: x for name, x in stages.items() if name.endswith(".output")}
    parity.assert_parity(outputs, problem=problem, diagnose=False)


KIVI = CacheQuantization("int4", "channel", value_scale_per="token_head", zero_point="minimum")
OTHERS = {
    "keys by channel, values by token": KIVI,
    "a residual": KIVI.replace(scale_per="token_head", exact="new", residual_length=2),
    "integers": CacheQuantization("int8", "token", zero_point="integer", scale_dtype="bfloat16"),
    "before RoPE": CacheQuantization("int8", "head", zero_point="integer", before_rope=True),
    "an exact prompt": CacheQuantization("float8_e4m3fn", exact="first_call"),
    "exact and before RoPE": CacheQuantization("int8", "token", exact="new", before_rope=True),
}


@pytest.mark.thorough
@pytest.mark.costly("computes six caches with two roundings each")
def test_zero_points_and_exact_tokens_agree():
    """Zero points, other groups of values and calls that attend to exact tokens agree."""
    for name, quantization in OTHERS.items():
        lengths = () if quantization.scale_per == "channel" else ((4, 2), (1, 1), (2, 1))
        for dtype in ("bfloat16", "float32"):
            problem = problem_of(quantization, dtype, new_lengths=lengths)
            assert not parity.diagnose(computed(problem), problem).is_wrong, (name, dtype)
        exact = "new" if quantization.exact == "none" else "none"
        other = quantization.replace(exact=exact, residual_length=1)
        wrong = computed(problem, quantization=other)
        with pytest.raises(AssertionError, match="cache"):
            parity.assert_parity(wrong, problem=problem, diagnose=False)


def test_residual_is_rounded_when_it_is_full():
    """New tokens stay exact until they are as many as the residual; the prompt does not."""
    quantization = CacheQuantization("int4", "token", exact="new", residual_length=3)
    chunks = (5, 1, 1, 2, 1)
    exact = [quantization.exact_calls(chunks, call) for call in range(5)]
    assert exact == [(0,), (1,), (1, 2), (1, 2, 3), (4,)]
    first = quantization.replace(exact="first_call", residual_length=1)
    assert [first.exact_calls(chunks, call) for call in range(2)] == [(0,), ()]
    assert quantization.replace(exact="none", residual_length=1).exact_calls(chunks, 1) == ()


def test_calibrated_scales_are_used():
    """Scales of a case replace computed ones, also if keys saturate; in bfloat16 and padded."""
    spec = problem_of(CacheQuantization("int8")).spec
    heads = [0.005, 0.01]
    calibrated = CacheQuantization("int8", "head", key_scales=heads, value_scales=np.array(heads))
    for quantization in (calibrated, calibrated.replace(scale_dtype="bfloat16")):
        problem = problem_of(quantization, spec=spec, new_lengths=((4, 2), (1, 1), (2, 1)))
        stages = computed(problem)
        largest = np.abs(stages["step0.cache.keys"]).max(axis=(0, 2, 3))
        np.testing.assert_allclose(largest, 127 * np.array(heads), rtol=0.01)
        assert not parity.diagnose(stages, problem).is_wrong


def test_zeros_have_the_scale_one():
    """Keys of zeros stay zeros instead of NaN."""
    problem = problem_of(CacheQuantization("int8", "token_head"))
    problem.weights["k_proj.weight"][:] = 0.0
    stages = computed(problem)
    assert not stages["step0.cache.keys"].any()
    assert not parity.diagnose(stages, problem).is_wrong


@pytest.mark.costly("each stored number is changed by one step in turn")
def test_single_flips_are_within_the_budget():
    """A number in the middle of two stored ones may become either; others may not."""
    problem = problem_of(CacheQuantization("int4", key_scales=[0.25], value_scales=[0.25]))
    stages = computed(problem)
    keys = stages["step2.k"].astype(np.float64) / 0.25
    is_near = np.abs(keys - np.floor(keys) - 0.5) < 0.3
    assert is_near.any()
    index = tuple(np.argwhere(is_near)[0])
    # The same token in the cache: seven tokens, of which the last call has two.
    cached = (*index[:2], 5 + index[2], index[3])
    wrong = {name: x.copy() for name, x in stages.items()}
    read = wrong["step2.cache.keys"]
    read[cached] += 0.25 if keys[index] * 0.25 > read[cached] else -0.25
    diagnosis = parity.diagnose(wrong, problem, seconds=0.2)
    assert diagnosis.is_wrong
    # With the key in the middle, both are right.
    middle = 0.25 * (np.floor(keys[index]) + 0.5)
    wrong["step2.k"][index] = middle
    assert parity.diagnose(wrong, problem, seconds=0.2).stage != "step2.cache.keys"


def test_bad_quantization_has_a_clear_error():
    """Unknown names, scales that do not fit, and layers without such a cache raise errors."""
    with rejects("dtype", dtype="int2"):
        CacheQuantization("int2")  # pyright: ignore[reportArgumentType]
    with rejects("scale_per", scale_per="row"):
        CacheQuantization("int8", "row")  # pyright: ignore[reportArgumentType]
    with rejects_type("scale_dtype"):
        CacheQuantization("int8", scale_dtype=8)  # pyright: ignore[reportArgumentType]
    with rejects("zero_point", dtype="float8_e5m2"):
        CacheQuantization("float8_e5m2", zero_point="minimum")
    with rejects("residual_length", exact="none"):
        CacheQuantization("int8", residual_length=2)
    with rejects("key_scales", zero_point="integer"):
        CacheQuantization("int8", zero_point="integer", key_scales=[1.0], value_scales=[1.0])
    with rejects("key_scales", scale_per="token"):
        CacheQuantization("int8", "token", key_scales=(1.0,), value_scales=(1.0,))
    with rejects("key_scales", key_scales=(1.0,), value_scales=None):
        CacheQuantization("int8", key_scales=(1.0,))
    with rejects("value_scales", value_scales=[0.0]):
        CacheQuantization("int8", key_scales=[1.0], value_scales=[0.0])
    with rejects_type("key_scales"):
        CacheQuantization("int8", key_scales="a")  # pyright: ignore[reportArgumentType]
    with rejects("key_scales", len=1):
        problem_of(CacheQuantization("int8", "head", key_scales=(1.0,), value_scales=(1.0,)))
    with rejects("before_rope", before_rope=True):
        problem_of(CacheQuantization("int8", before_rope=True), spec=AttentionSpec(32, 4))
    with rejects("cache_quantization"):
        Case("", AttentionSpec(32, 4), "", cache_quantization=CacheQuantization("int8"))
    latent = AttentionSpec(
        32,
        4,
        head_dim=12,
        value_head_dim=8,
        qkv_bias=False,
        out_bias=False,
        latent=Latent(10, 4),
        rope=Rope(rotary_dim=4, rotated="last", pairs="interleaved"),
    )
    with rejects("cache_quantization"):
        problem_of(CacheQuantization("int8"), spec=latent)


def test_run_skips_quantized_caches():
    """Implementations have no quantized cache: a run of such a case alone raises an error."""
    case = problem_of(CacheQuantization("int8")).case
    with rejects("torch"):
        run_cases([case], backends=["torch"], dtypes=["float32"])
    report = run_cases([case, parity.CASES["full"]], backends=["torch"], dtypes=["float32"])
    (skipped,) = report.skipped_cases
    assert skipped.case == case.name
    assert "quantized" in skipped.reason

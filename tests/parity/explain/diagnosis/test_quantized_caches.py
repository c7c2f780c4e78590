"""Bugs of quantized caches: a port with one is wrong at its cache, and named."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.quantized import Quantizer, computed, problem_of, rightly
from helpers.samples import sample

import parity
from parity.measure.core.quantization import CacheQuantization
from parity.measure.core.stages import stage_named

OTHER = {"keys": "values", "values": "keys"}
INT8 = CacheQuantization("int8", key_scales=[0.02], value_scales=[0.01])
E4M3 = CacheQuantization("float8_e4m3fn", "head")
E5M2 = CacheQuantization("float8_e5m2", "token")
INT4 = CacheQuantization("int4", "token_head")
CHANNEL = CacheQuantization("int8", "channel", before_rope=True)
EVERY = {"int8": INT8, "e4m3": E4M3, "e5m2": E5M2, "int4": INT4, "channel": CHANNEL}


def one(cache: Quantizer, name: str, x: torch.Tensor) -> torch.Tensor:
    return cache.rounded(x)


def missing(cache: Quantizer, name: str, x: torch.Tensor) -> torch.Tensor:
    return cache.rounded(x / cache.scales(name, x))


def zero(cache: Quantizer, name: str, x: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(x)


def twice(cache: Quantizer, name: str, x: torch.Tensor) -> torch.Tensor:
    return rightly(cache, name, x) * cache.scales(name, x)


def unquantized(cache: Quantizer, name: str, x: torch.Tensor) -> torch.Tensor:
    return x


def truncated(cache: Quantizer, name: str, x: torch.Tensor) -> torch.Tensor:
    scales = cache.scales(name, x)
    return (x / scales).clamp(-127, 127).trunc() * scales


def per_channel(cache: Quantizer, name: str, x: torch.Tensor) -> torch.Tensor:
    scales = cache.of_first_call.setdefault(name, cache.computed(x, "channel"))
    return cache.rounded(x / scales) * scales


def of_values_alone(cache: Quantizer, name: str, x: torch.Tensor) -> torch.Tensor:
    return missing(cache, name, x) if name == "values" else rightly(cache, name, x)


BUGS = {
    "cache-scale-one": one,
    "cache-scale-missing": missing,
    "cache-scale-zero": zero,
    "cache-scale-twice": twice,
    "cache-not-quantized": unquantized,
}


# A cache of zeros has the longest search: other bugs also leave nothing of the values.
def is_short_search(bug: str, cache: str, dtype: str) -> bool:
    return bug != "cache-scale-zero" or (cache, dtype) == ("int8", "float32")


@sample(5, where=is_short_search)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("cache", EVERY)
@pytest.mark.parametrize("bug", BUGS)
def test_wrong_scales_are_named(bug, cache, dtype):
    """Wrong scales of keys and values are one finding, at the cache, with the right page."""
    problem = problem_of(EVERY[cache], dtype)
    diagnosis = parity.diagnose(computed(problem, BUGS[bug]), problem, seconds=1.0)
    (finding,) = diagnosis.findings
    assert (finding.bugs, stage_named(finding.stage).quantity) == ((bug,), "cache.keys")
    assert "keys and values" in finding.about
    assert diagnosis.more == "mha-parity bugs cache-quantization"


@sample(4)
@pytest.mark.parametrize("cache", EVERY)
@pytest.mark.parametrize("bug", BUGS)
def test_outputs_alone_name_wrong_scales(bug, cache):
    """In float32 the outputs of all calls tell the bug."""
    problem = problem_of(EVERY[cache])
    stages = computed(problem, BUGS[bug])
    outputs = {name: x for name, x in stages.items() if name.endswith(".output")}
    (finding,) = parity.diagnose(outputs, problem).findings
    assert finding.bugs == (bug,)


def test_values_alone_are_named_as_such():
    """If only values are read without their scales, the finding says so."""
    problem = problem_of(E4M3)
    (finding,) = parity.diagnose(computed(problem, of_values_alone), problem).findings
    assert finding.bugs == ("cache-scale-missing",)
    assert "cached values are read" in finding.about


@pytest.mark.parametrize("cache", ["int8", "int4"])
def test_truncation_to_integers_is_named(cache):
    """Values cut off instead of rounded are named, with and without calibrated scales."""
    problem = problem_of(EVERY[cache].replace(dtype="int8"))
    (finding,) = parity.diagnose(computed(problem, truncated), problem).findings
    assert finding.bugs == ("cache-rounded-toward-zero",)


@pytest.mark.parametrize("cache", ["int8", "e4m3", "e5m2", "int4"])
def test_scales_of_wrong_axis_are_named(cache):
    """A scale for each channel instead of a different group is named."""
    problem = problem_of(EVERY[cache])
    (finding,) = parity.diagnose(computed(problem, per_channel), problem).findings
    assert finding.bugs == ("cache-scale-axis",)
    assert "each feature of each head" in finding.about


@pytest.mark.parametrize("cache", ["int8", "e4m3", "channel"])
def test_order_of_rope_and_rounding_is_named(cache):
    """Keys quantized on the other side of RoPE are named."""
    problem = problem_of(EVERY[cache])
    other = EVERY[cache].replace(before_rope=not EVERY[cache].before_rope)
    (finding,) = parity.diagnose(computed(problem, quantization=other), problem).findings
    assert finding.bugs == ("cache-rope-order",)


def test_other_stored_dtype_is_named():
    """A cache of e5m2 instead of e4m3 is named."""
    problem = problem_of(E4M3)
    other = E4M3.replace(dtype="float8_e5m2")
    (finding,) = parity.diagnose(computed(problem, quantization=other), problem).findings
    assert finding.bugs == ("cache-other-dtype",)
    assert "float8_e5m2 instead of float8_e4m3fn" in finding.about


SCALE_DTYPES = (
    ("int8", "token_head", "none", "its scales in bfloat16"),
    ("float8_e4m3fn", "head", "none", "its scales in float16"),
    ("int4", "token", "minimum", "its scales and minima in bfloat16"),
)


@pytest.mark.parametrize(("stored", "group", "zero_point", "words"), SCALE_DTYPES)
def test_other_dtype_of_scales_is_named(stored, group, zero_point, words):
    """Scales in 16 bits instead of float32 are named, from all stages and from outputs."""
    quantization = CacheQuantization(stored, group, zero_point=zero_point)
    problem = problem_of(quantization)
    other = quantization.replace(scale_dtype=words.split()[-1])
    stages = computed(problem, quantization=other)
    outputs = {name: x for name, x in stages.items() if name.endswith(".output")}
    for observed in (stages, outputs):
        (finding,) = parity.diagnose(observed, problem).findings
        assert finding.bugs == ("cache-scale-dtype",)
        assert f"{words} instead of float32" in finding.about


def test_scales_without_minima_in_16_bits():
    """Scales in bfloat16 next to minima in float32 are named as such."""

    def narrow_scales(cache: Quantizer, name: str, x: torch.Tensor) -> torch.Tensor:
        scales, zeros = cache.scales(name, x).bfloat16().float(), cache.zeros(name, x)
        return cache.rounded((x - zeros) / scales) * scales + zeros

    problem = problem_of(CacheQuantization("int4", "token_head", zero_point="minimum"))
    (finding,) = parity.diagnose(computed(problem, narrow_scales), problem).findings
    assert finding.bugs == ("cache-scale-dtype",)
    assert "but not its minima" in finding.about


@pytest.mark.thorough
@pytest.mark.costly("a search that explains nothing tries everything")
def test_free_mixture_is_not_a_finding():
    """Halved keys and values in bfloat16 are no mixture of heads: its free numbers explain only the
    tokens from which they were fitted.
    """

    def halved(cache: Quantizer, name: str, x: torch.Tensor) -> torch.Tensor:
        return rightly(cache, name, x) / 2

    scales = {"key_scales": [0.02], "value_scales": [0.008]}
    problem = problem_of(CacheQuantization("float8_e4m3fn", **scales), "bfloat16")
    stages = computed(problem, halved)
    outputs = {name: x for name, x in stages.items() if name.endswith(".output")}
    diagnosis = parity.diagnose(outputs, problem)
    assert diagnosis.kind == "unknown"
    assert "uses other heads" not in str(diagnosis)


@pytest.mark.thorough
@pytest.mark.costly("a search that explains nothing tries everything")
def test_bugs_that_cancel_are_not_a_finding():
    """Scales of a transposed layout are not scales that are missing both when keys are stored and
    when they are read: these two nearly cancel each other, and leave other stages unexplained.
    """
    rng = np.random.default_rng(0)
    scales = {
        "key_scales": 0.01 * (0.6 + rng.random(16)),
        "value_scales": 0.008 * (0.6 + rng.random(16)),
    }
    transposed = {name: x.reshape(2, -1).T.ravel() for name, x in scales.items()}
    quantization = CacheQuantization("float8_e4m3fn", "channel", **scales)
    # Weights follow from the name. With most, the two bugs leave too much of the first stage.
    problem = problem_of(quantization, "bfloat16", name="a-e4m3chan-0")
    stages = computed(problem, quantization=quantization.replace(**transposed))
    diagnosis = parity.diagnose(stages, problem)
    assert diagnosis.named == []
    assert diagnosis.kind == "unknown"


@pytest.mark.parametrize("when_read", [False, True])
def test_exchanged_scales_are_named(when_read):
    """Scales of keys for values, and the opposite, are named, also if only reads are wrong."""

    def exchanged(cache: Quantizer, name: str, x: torch.Tensor) -> torch.Tensor:
        read = cache.scales(OTHER[name], x)
        stored = cache.scales(name, x) if when_read else read
        return cache.rounded(x / stored) * read

    problem = problem_of(INT8)
    (finding,) = parity.diagnose(computed(problem, exchanged), problem).findings
    assert finding.bugs == ("cache-scales-exchanged",)
    assert ("when they are read" in finding.about) == when_read


def without_zeros(cache: Quantizer, name: str, x: torch.Tensor) -> torch.Tensor:
    return rightly(cache, name, x) - cache.zeros(name, x)


def zeros_not_stored(cache: Quantizer, name: str, x: torch.Tensor) -> torch.Tensor:
    return cache.rounded(x / cache.scales(name, x)) * cache.scales(name, x) + cache.zeros(name, x)


def zeros_of_other_sign(cache: Quantizer, name: str, x: torch.Tensor) -> torch.Tensor:
    return rightly(cache, name, x) - 2 * cache.zeros(name, x)


def zeros_after_scales(cache: Quantizer, name: str, x: torch.Tensor) -> torch.Tensor:
    zeros = cache.zeros(name, x)
    return rightly(cache, name, x) - zeros + (zeros / cache.scales(name, x)).round()


def zeros_without_scales(cache: Quantizer, name: str, x: torch.Tensor) -> torch.Tensor:
    zeros = cache.zeros(name, x)
    return cache.rounded((x - zeros) / cache.scales(name, x)) + zeros


ZERO_POINTS = (
    ("cache-zero-point-missing", without_zeros),
    ("cache-zero-point-missing", zeros_not_stored),
    ("cache-zero-point-sign", zeros_of_other_sign),
    ("cache-zero-point-unscaled", zeros_after_scales),
    ("cache-scale-missing", zeros_without_scales),
    ("cache-not-quantized", unquantized),
)


def test_wrong_zero_points_are_named():
    """Wrong zero points are named, as are wrong scales next to right zero points."""
    cache = CacheQuantization("int8", "head", zero_point="integer")
    problem = problem_of(cache)
    for bug, through in ZERO_POINTS:
        (finding,) = parity.diagnose(computed(problem, through), problem).findings
        assert finding.bugs == (bug,), through
    other = cache.replace(scale_per="channel")
    (finding,) = parity.diagnose(computed(problem, quantization=other), problem).findings
    assert finding.bugs == ("cache-scale-axis",)


CALIBRATED = CacheQuantization(
    "float8_e4m3fn", "head", key_scales=[0.01, 0.02], value_scales=[0.02, 0.01]
)


@sample(2)
@pytest.mark.parametrize("quantization", [INT8, CALIBRATED], ids=["int8", "e4m3"])
@pytest.mark.parametrize("when_read", [False, True])
def test_scales_of_another_layer_are_fitted(quantization, when_read):
    """Unknown scales of keys are fitted, verified in all calls, and have the page."""

    def of_another(cache: Quantizer, name: str, x: torch.Tensor) -> torch.Tensor:
        read = cache.scales(name, x) * (1.3 if name == "keys" else 1.0)
        stored = cache.scales(name, x) if when_read else read
        return cache.rounded(x / stored) * read

    problem = problem_of(quantization)
    (finding,) = parity.diagnose(computed(problem, of_another), problem).findings
    assert finding.bugs == ("cache-quantization",)
    assert ("1.3 times" in finding.about) == when_read
    assert {"step0.cache.keys", "step1.cache.keys", "step2.cache.keys"} <= set(finding.stages)


@pytest.mark.nightly
@pytest.mark.costly("no known bug explains it, so that the search tries all")
def test_grids_are_alike_in_bfloat16():
    """In bfloat16, scales of another layer do not have the name of a different group."""

    def of_another(cache: Quantizer, name: str, x: torch.Tensor) -> torch.Tensor:
        scales = cache.scales(name, x) * 1.3
        return cache.rounded(x / scales) * scales

    problem = problem_of(CacheQuantization("int8"), "bfloat16")
    diagnosis = parity.diagnose(computed(problem, of_another), problem)
    assert all(
        name == "cache-quantization" for finding in diagnosis.findings for name in finding.bugs
    )

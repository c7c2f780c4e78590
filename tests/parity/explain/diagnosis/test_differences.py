"""Two sets of weights compared directly: the tensors that differ, their patterns, and reorderings
of the same function.
"""

import json
from dataclasses import replace

import gguf
import ml_dtypes
import numpy as np
import pytest
from helpers.input_errors import rejects
from helpers.samples import sample
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import parity
from mha_spec import Alibi, Gate, Latent, Norm, RelativeProducts, Rope
from parity import CASES, AttentionSpec, compare_weights, random_weights
from parity.explain.diagnosis.weights.roles import roles
from parity.measure.core import reference
from parity.measure.core.case import Case
from parity.measure.core.problem import make_problem
from parity.measure.core.stages import run_steps
from parity.measure.core.weights import dtype_named, save_tensors
from parity.use.cli.main import main

PLAIN = AttentionSpec(16, 4, head_dim=4)
ROPE = AttentionSpec(16, 4, num_kv_heads=2, head_dim=4, rope=Rope(500.0))
RICH = AttentionSpec(
    24,
    6,
    num_kv_heads=3,
    head_dim=6,
    value_head_dim=4,
    rope=Rope(500.0, rotary_dim=2),
    qk_norm=Norm(),
    v_norm=Norm(),
    gate=Gate(bias=True),
    sinks=True,
)
PER_HEAD = replace(
    RICH,
    qk_norm=Norm("layer", per_head=True, bias=True),
    v_norm=Norm(over="width"),
    gate=Gate(per_head=True),
)
LATENT = AttentionSpec(
    32,
    4,
    head_dim=8,
    latent=Latent(8, 4, q_rank=6),
    rope=Rope(rotary_dim=4, rotated="last"),
    qkv_bias=False,
)
SPECS = {"plain": PLAIN, "rope": ROPE, "rich": RICH, "per-head": PER_HEAD, "latent": LATENT}


def changed(weights, **others):
    return {
        **weights,
        **{name.replace("__", "."): np.ascontiguousarray(x) for name, x in others.items()},
    }


def compared(weights, other, spec=PLAIN):
    return compare_weights(weights, spec, other, spec)


def reordered(weights, spec, groups=None, heads=None, qk=None, v=None):
    """Return the same layer with its groups, heads and features in a different order, in all
    tensors.
    """
    num_groups, of_group = spec.num_kv_heads, spec.num_heads // spec.num_kv_heads
    groups = np.arange(num_groups) if groups is None else np.array(groups)
    heads = np.arange(of_group) if heads is None else np.array(heads)
    features = {"qk": qk, "v": v, "": None}
    reordered_weights = {}
    for name, x in weights.items():
        role = roles(spec).get(name)
        if role is None:
            reordered_weights[name] = x
            continue
        rows = x.reshape(-1) if role.axis is None else np.moveaxis(x, role.axis, 0)
        shape, order = rows.shape, features[role.features]
        if role.heads == "shared":
            rows = rows if order is None else rows[order]
        else:
            rows = rows.reshape(num_groups, of_group if role.heads == "q" else 1, -1, *shape[1:])[
                groups
            ]
            rows = rows[:, heads] if role.heads == "q" else rows
            rows = rows if order is None else rows[:, :, order]
        reordered_weights[name] = np.ascontiguousarray(
            np.moveaxis(rows.reshape(shape), 0, role.axis or 0)
        ).reshape(x.shape)
    return reordered_weights


def output_of(weights, spec):
    case = Case("layer", spec, "probe", seq_len=7, is_causal=True)
    return run_steps(reference.steps(make_problem(case, "float64", weights), "float64"))["output"]


# ---- The same values -----------------------------------------------------------------------------


def test_equal_weights_have_equal_bits():
    """Equal weights are the same bit for bit, without any difference."""
    weights = random_weights(PLAIN)
    comparison = compared(weights, {**weights})
    assert (comparison.kind, comparison.same, comparison.differences, comparison.how) == (
        "bits",
        True,
        (),
        "weights the same, bit for bit",
    )


def test_negative_zeros_are_equal_values():
    """Weights that differ only in the sign of zeros have the same values."""
    weights = changed(random_weights(PLAIN), q_proj__bias=np.zeros(16, np.float32))
    assert (
        compared(weights, changed(weights, q_proj__bias=-weights["q_proj.bias"])).kind == "values"
    )


def test_wider_dtype_is_not_rounding():
    """bfloat16 weights and their copy in float32 have the same values."""
    weights = {name: x.astype(ml_dtypes.bfloat16) for name, x in random_weights(PLAIN).items()}
    comparison = compared(weights, {name: x.astype(np.float32) for name, x in weights.items()})
    assert (comparison.kind, comparison.how) == (
        "values",
        "weights the same values, in bfloat16 and in float32",
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("is_first", [True, False])
def test_rounded_copy_names_both_dtypes(dtype, is_first):
    """A copy in 16 bits has both dtypes, its direction and at most 0.5 units of rounding."""
    weights = random_weights(PLAIN)
    pair = [weights, {name: x.astype(dtype_named(dtype)) for name, x in weights.items()}]
    comparison = compared(*(pair if is_first else pair[::-1]))
    assert comparison.kind == "copy"
    assert 0.25 < comparison.max_ulp <= 0.5
    assert comparison.how.startswith(f"weights the same up to rounding in {dtype}: ")
    which = "the second is the first" if is_first else "the first is the second"
    assert (
        f"{which}, float32 rounded to {dtype}, at most 0.5 units in the last place"
        in comparison.how
    )


def test_copy_counts_elements_that_become_0():
    """A copy in float16 has the number of elements that became 0."""
    weights = random_weights(PLAIN)
    weights["q_proj.weight"][0, :3] = 1e-9
    assert (
        "3 elements to 0"
        in compared(weights, {name: x.astype(np.float16) for name, x in weights.items()}).how
    )


def test_tensor_lost_in_copy_is_different():
    """A tensor that becomes 0 in a float16 copy is different, with the pattern of zeros."""
    weights = random_weights(PLAIN)
    weights["q_proj.weight"] *= np.float32(1e-9)
    comparison = compared(weights, {name: x.astype(np.float16) for name, x in weights.items()})
    assert comparison.kind == "different"
    assert {difference.name: difference.pattern.name for difference in comparison.differences}[
        "q_proj.weight"
    ] == "zeros"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("steps", "kind"), [(1, "rounding"), (4, "rounding"), (5, "different"), (100, "different")]
)
def test_up_to_four_ulps_are_rounding(dtype, steps, kind):
    """Up to 4 units in the last place are rounding; 5 or more are a difference with an index."""
    weights = {name: x.astype(dtype_named(dtype)) for name, x in random_weights(PLAIN).items()}
    other = {**weights, "v_proj.weight": weights["v_proj.weight"].copy()}
    for _ in range(steps):
        other["v_proj.weight"][2, 3] = np.nextafter(
            other["v_proj.weight"][2, 3], dtype_named(dtype).type(9)
        )
    comparison = compared(weights, other)
    assert comparison.kind == kind
    assert comparison.max_ulp == steps or (
        steps == 100 and comparison.max_ulp > 100
    )  # 100 steps pass a power of two
    if kind == "rounding":
        assert (
            f"at most {steps} units in the last place apart, in 1 of 1088 elements"
            in comparison.how
        )
    else:
        (difference,) = comparison.differences
        assert (difference.name, difference.differing, difference.pattern) == (
            "v_proj.weight",
            1,
            None,
        )
        assert (difference.rows, difference.columns, difference.heads, difference.num_heads) == (
            1,
            1,
            (0,),
            4,
        )
        assert difference.worst_index == (2, 3)
        assert difference.worst_values == tuple(
            float(x["v_proj.weight"][2, 3]) for x in (weights, other)
        )


# ---- Patterns ------------------------------------------------------------------------------------


def interleaved(x, heads):
    return x.reshape(heads, 2, -1, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)


def tf32(x):
    bits = x.view(np.uint32)
    return (
        (bits + np.uint32(0xFFF) + (bits >> 13 & 1).astype(np.uint32)) & np.uint32(0xFFFFE000)
    ).view(np.float32)


def through(dtype):
    return lambda x: x.astype(dtype).astype(np.float32)


RNG = np.random.default_rng(0)
MANY = RNG.permutation(16)
COLUMNS = RNG.uniform(0.5, 2.0, 16).astype(np.float32)

PATTERNS = {
    "zeros": ("v_proj.weight", np.zeros_like, "zeros", "zeros"),
    "bfloat16": (
        "v_proj.weight",
        through(ml_dtypes.bfloat16),
        "fewer-bits",
        "the first's, rounded to bfloat16",
    ),
    "float16": (
        "v_proj.weight",
        through(np.float16),
        "fewer-bits",
        "rounded to TF32 or rounded to float16",
    ),
    "e4m3": (
        "v_proj.weight",
        through(ml_dtypes.float8_e4m3fn),
        "fewer-bits",
        "the first's, rounded to float8 (e4m3)",
    ),
    "e5m2": (
        "v_proj.weight",
        through(ml_dtypes.float8_e5m2),
        "fewer-bits",
        "the first's, rounded to float8 (e5m2)",
    ),
    "tf32": ("v_proj.weight", tf32, "fewer-bits", "rounded to TF32"),
    "cut-off": (
        "v_proj.weight",
        lambda x: (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32),
        "fewer-bits",
        "the first's, cut off to bfloat16",
    ),
    "factor": (
        "v_proj.weight",
        lambda x: x * np.float32(1.001),
        "factor",
        "the first's, times 1.001",
    ),
    "negated": ("v_proj.weight", np.negative, "factor", "the first's, negated"),
    "scale": ("q_proj.weight", lambda x: x / 2, "factor", "1 / sqrt(H): a scale of the scores"),
    "by-head": (
        "q_proj.weight",
        lambda x: x * np.repeat([5, 2, 3, 4], 4)[:, None].astype(np.float32),
        "factors",
        "head",
    ),
    "by-row": (
        "out_proj.weight",
        lambda x: x * COLUMNS[:, None],
        "factors",
        "each row times a number",
    ),
    "by-column": ("q_proj.weight", lambda x: x * COLUMNS, "factors", "each column times a number"),
    "shift": (
        "out_proj.bias",
        lambda x: x + np.float32(0.25),
        "shift",
        "the first's, +0.25 everywhere",
    ),
    "transposed": ("q_proj.weight", np.transpose, "transposed", "transposed"),
    "heads": (
        "q_proj.weight",
        lambda x: np.roll(x, 4, axis=0),
        "permuted",
        "its heads in the order 3 0 1 2",
    ),
    "heads-of-columns": (
        "out_proj.weight",
        lambda x: np.roll(x, 4, axis=1),
        "permuted",
        "its heads in the order 3 0 1 2",
    ),
    "innermost": (
        "q_proj.weight",
        lambda x: x.reshape(4, 4, 16).swapaxes(0, 1).reshape(16, 16)[[0, 1, 2, 3, *range(4, 16)]],
        "permuted",
        "heads innermost",
    ),
    "rows": ("v_proj.weight", lambda x: x[MANY], "permuted", "its rows in a different order"),
    "within-heads": (
        "v_proj.weight",
        lambda x: x[[1, 0, *range(2, 16)]],
        "permuted",
        "a different order within their heads",
    ),
    "columns": (
        "q_proj.weight",
        lambda x: x[:, MANY],
        "permuted",
        "its columns in a different order",
    ),
    "pairs": (
        "q_proj.weight",
        lambda x: interleaved(x, 4),
        "permuted",
        "RoPE pairs interleaved instead of halves",
    ),
    "pairs-of-wrong-heads": (
        "q_proj.weight",
        lambda x: interleaved(x, 2),
        "permuted",
        "as if heads had 8 features",
    ),
}
"""By name: the tensor, its change, and the name and the words of the pattern."""


@sample(12)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_changed_tensor_has_a_pattern(pattern):
    """A changed tensor has its pattern, and none if one more element is wrong."""
    name, make, kind, words = PATTERNS[pattern]
    weights = random_weights(PLAIN)
    other = changed(weights, **{name: make(weights[name])})
    comparison = compared(weights, other)
    assert comparison.kind == "different"
    (difference,) = comparison.differences
    assert difference.name == name
    assert difference.pattern is not None
    assert difference.pattern.name == kind
    assert words in difference.pattern.words
    other[name] = other[name].copy()
    other[name].reshape(-1)[0] += np.float32(
        0.375
    )  # one more element is wrong, and the pattern no longer holds
    (difference,) = compared(weights, other).differences
    assert difference.pattern is None


def test_features_of_odd_heads_are_reordered():
    """Features of an odd number are not searched for pairs, and are in a different order."""
    spec = AttentionSpec(15, 3, head_dim=5, qkv_bias=False)
    weights = random_weights(spec)
    order = [1, 4, 0, 3, 2, 5, 7, 6, 9, 8, 14, 10, 13, 12, 11]
    other = changed(weights, q_proj__weight=weights["q_proj.weight"][order])
    (difference,) = compare_weights(weights, spec, other, spec).differences
    assert (
        difference.pattern.words == "the first's, its rows in a different order within their heads"
    )


def test_bias_has_the_order_of_its_weight():
    """A bias that fits several orders has the order of the rows of its weight."""
    weights = random_weights(PLAIN)
    weights["q_proj.bias"][:] = 0.5
    weights["q_proj.bias"][:4] = 0.25
    other = changed(weights, q_proj__weight=np.roll(weights["q_proj.weight"], 4, 0))
    other["q_proj.bias"] = np.roll(weights["q_proj.bias"], 4)
    patterns = {
        difference.name: difference.pattern.words
        for difference in compared(weights, other).differences
    }
    assert patterns == dict.fromkeys(
        ["q_proj.weight", "q_proj.bias"], "the first's, its heads in the order 3 0 1 2"
    )


@pytest.mark.parametrize("head", range(4))
def test_pattern_of_one_head_names_the_head(head):
    """A factor of 3 on one head is a pattern of that head."""
    weights, name = random_weights(PLAIN), "v_proj.weight"
    other = changed(weights, **{name: weights[name].copy()})
    other[name][4 * head : 4 * head + 4] *= 3
    (difference,) = compared(weights, other).differences
    assert (difference.heads, difference.pattern.heads, difference.pattern.words) == (
        (head,),
        (head,),
        "the first's, times 3",
    )


@pytest.mark.parametrize(
    ("indices", "words"),
    [
        ((slice(5, 7),), "in rows 5 6 the first's, times 1.5"),
        ((slice(5, 6),), "in row 5 the first's, times 1.5"),
        ((slice(None), slice(2, 3)), "in column 2 the first's, times 1.5"),
        ((slice(2, 12),), "in 10 of 16 rows the first's, times 1.5"),
    ],
)
def test_pattern_names_its_rows_or_columns(indices, words):
    """A factor on some rows or columns is a pattern of these; with noise there is no pattern."""
    weights, name = random_weights(PLAIN), "v_proj.weight"
    other = changed(weights, **{name: weights[name].copy()})
    other[name][indices] *= np.float32(1.5)
    comparison = compared(weights, other)
    assert f"  pattern   the second's is {words}\n" in f"{comparison}\n"
    other[name][indices] += np.random.default_rng(0).random(other[name][indices].shape, np.float32)
    (difference,) = compared(weights, other).differences
    assert difference.pattern is None


def test_exchange_differs_from_a_copy():
    """Exchanged weights of k and v have that pattern; a copy in only one has the pattern of a
    copy.
    """
    weights = random_weights(ROPE)
    k, v = weights["k_proj.weight"], weights["v_proj.weight"]
    both = compared(weights, changed(weights, k_proj__weight=v, v_proj__weight=k), ROPE)
    assert [difference.pattern.name for difference in both.differences] == [
        "exchanged",
        "exchanged",
    ]
    (one,) = compared(weights, changed(weights, k_proj__weight=v), ROPE).differences
    assert (one.pattern.name, one.pattern.words) == ("copied", "v_proj.weight of the first")
    assert one.pattern.page == "swapped-projections"


@pytest.mark.parametrize("is_first", [True, False])
def test_norm_of_one_plus_w_has_a_pattern(is_first):
    """Weights of a norm plus 1 have a pattern, in both directions."""
    weights = random_weights(RICH)
    pair = [weights, changed(weights, q_norm__weight=weights["q_norm.weight"] + 1)]
    (difference,) = compared(*(pair if is_first else pair[::-1]), RICH).differences
    assert difference.pattern.name == "one-plus"
    assert difference.pattern.words == (
        "1 + w, where the first has w" if is_first else "w, where the first has 1 + w"
    )


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_gguf_quantization_has_a_pattern(kind):
    """Weights quantized by GGUF have a pattern with their type, in both directions."""
    spec = AttentionSpec(64, 4)
    weights, kinds = random_weights(spec), gguf.GGMLQuantizationType[kind]
    rounded = gguf.quants.dequantize(gguf.quants.quantize(weights["k_proj.weight"], kinds), kinds)
    (difference,) = compared(weights, changed(weights, k_proj__weight=rounded), spec).differences
    assert difference.pattern.words == f"the first's, quantized as {kind}"
    (difference,) = compared(changed(weights, k_proj__weight=rounded), weights, spec).differences
    assert difference.pattern.words == f"the original of the first's, which is quantized as {kind}"


def test_float32_as_float64_has_a_pattern():
    """float64 weights rounded to float32 have that pattern."""
    weights = {name: x.astype(np.float64) + 1e-9 for name, x in random_weights(PLAIN).items()}
    other = {name: x.astype(np.float32).astype(np.float64) for name, x in weights.items()}
    assert {difference.pattern.words for difference in compared(weights, other).differences} == {
        "the first's, rounded to float32"
    }


# ---- The same function ---------------------------------------------------------------------------


def test_reordered_heads_are_same_function():
    """Heads in the same new order in all tensors are the same function, with that order."""
    weights = random_weights(PLAIN)
    comparison = compared(weights, reordered(weights, PLAIN, groups=[3, 2, 1, 0]))
    assert (comparison.kind, comparison.same) == ("function", True)
    assert comparison.how.endswith(
        "and out_proj.weight differ, and it is the same function: heads are in the order 3 2 1 0"
    )
    assert len(comparison.differences) == 7


@pytest.mark.parametrize(
    "left", ["q_proj.weight", "q_proj.bias", "k_proj.weight", "v_proj.bias", "out_proj.weight"]
)
def test_partly_reordered_heads_differ(left):
    """Heads in a new order in all tensors but one are different, with the pattern of the order."""
    weights = random_weights(PLAIN)
    other = {**reordered(weights, PLAIN, groups=[3, 2, 1, 0]), left: weights[left]}
    comparison = compared(weights, other)
    assert comparison.kind == "different"
    assert {difference.pattern.words for difference in comparison.differences} == {
        "the first's, its heads in the order 3 2 1 0"
    }


@pytest.mark.parametrize(
    "change", [{"alibi": Alibi()}, {"out_proj": False}], ids=["alibi", "no-out-proj"]
)
def test_alibi_or_no_out_proj_fixes_heads(change):
    """With ALiBi, or without an output projection, heads in a new order are different."""
    spec = replace(PLAIN, **change)
    weights = random_weights(spec)
    assert (
        compared(weights, reordered(weights, spec, groups=[3, 2, 1, 0]), spec).kind == "different"
    )


def test_shared_kv_fixes_keys_and_values():
    """With shared_kv, only query heads may move within their group without a difference."""
    spec = replace(PLAIN, num_kv_heads=2, shared_kv=True)
    weights = random_weights(spec)
    for moved in ({"groups": [1, 0]}, {"qk": [1, 0, 2, 3]}, {"v": [1, 0, 2, 3]}):
        assert compared(weights, reordered(weights, spec, **moved), spec).kind == "different"
    queries = {name: 2.0 * x if name.startswith("q_proj") else x for name, x in weights.items()}
    assert compared(weights, queries, spec).kind == "different"
    comparison = compared(weights, reordered(weights, spec, heads=[1, 0]), spec)
    assert comparison.how.endswith("it is the same function: query heads are in the order 1 0 3 2")


@pytest.mark.parametrize("per_head", [False, True])
def test_order_of_relative_key_features(per_head):
    """Reordered features of relative_keys are a pattern; with features of q and k, the same
    function.
    """
    spec = replace(PLAIN, relative_products=RelativeProducts(2, 1, per_head=per_head))
    weights = random_weights(spec)
    other = {**weights, "relative_keys": np.ascontiguousarray(weights["relative_keys"][..., ::-1])}
    (difference,) = compared(weights, other, spec).differences
    words = (
        "features in the order 3 2 1 0"
        if per_head
        else "columns in a different order within their heads"
    )
    assert difference.pattern.words == f"the first's, its {words}"
    moved = [3, 0, 1, 2]
    table = np.ascontiguousarray(weights.pop("relative_keys")[..., moved])
    other = {**reordered(weights, spec, qk=moved), "relative_keys": table}
    weights = random_weights(spec)
    assert compared(weights, other, spec).how.endswith(
        "it is the same function: features of q and k are in a different order"
    )


def test_rotated_features_are_fixed():
    """Reordered features of q and k are the same function only if RoPE does not rotate them."""
    weights = random_weights(RICH)
    rotated, unrotated = [1, 0, 2, 3, 4, 5], [0, 1, 3, 2, 5, 4]
    assert compared(weights, reordered(weights, RICH, qk=rotated), RICH).kind == "different"
    assert (
        "features of q and k are in a different order"
        in compared(weights, reordered(weights, RICH, qk=unrotated), RICH).how
    )


@pytest.mark.parametrize(
    ("times", "over", "words"),
    [
        ("q_proj", "k_proj", "q is multiplied by 0.3, and k divided"),
        ("v_proj", "out_proj", "v is multiplied by 0.3, and"),
    ],
)
def test_canceled_factor_is_same_function(times, over, words):
    """A factor on q divided out of k, or one on v out of out_proj, is the same function."""
    weights, factor = random_weights(PLAIN), np.float32(0.3)
    other = {**weights, f"{over}.weight": weights[f"{over}.weight"] / factor}
    other |= {name: weights[name] * factor for name in (f"{times}.weight", f"{times}.bias")}
    if over == "k_proj":
        assert compared(weights, other).kind == "different"  # its bias is not divided yet
        other["k_proj.bias"] = weights["k_proj.bias"] / factor
    comparison = compared(weights, other)
    assert comparison.kind == "function"
    assert words in comparison.how


def with_factors(factors):
    """Return weights with zeros in the first feature of each head of q and k, and the same with q
    multiplied and k divided by factors, one for each feature of a head.
    """
    weights = random_weights(PLAIN)
    other = dict(weights)
    for name in ("q_proj.weight", "q_proj.bias", "k_proj.weight", "k_proj.bias"):
        heads = weights[name].reshape(-1, PLAIN.head_dim, *weights[name].shape[1:]).copy()
        heads[:, 0] = 0.0
        scale = np.asarray(factors, np.float32).reshape(-1, *[1] * (heads.ndim - 2))
        scaled = heads * scale if name.startswith("q") else heads / scale
        other[name] = scaled.reshape(weights[name].shape)
        weights[name] = heads.reshape(weights[name].shape)
    return weights, other


def test_zeros_have_no_factor():
    """Features that are 0 in q and k do not count among the factors."""
    weights, other = with_factors([2.0] * PLAIN.head_dim)
    assert "q is multiplied by 2, and k divided" in compared(weights, other).how


def test_close_factors_are_both_shown():
    """The smallest and the largest factor of features are not printed as one number."""
    weights, other = with_factors(np.linspace(1.0001, 1.004, PLAIN.head_dim))
    numbers = compared(weights, other).how.partition("multiplied by ")[2].partition(",")[0]
    smallest, largest = map(float, numbers.split(" to "))
    assert smallest < largest == 1.004


def test_rope_pairs_share_a_factor():
    """Factors on q divided out of k must be equal for both features of a RoPE pair."""
    weights, spec = random_weights(ROPE), ROPE

    def scaled(factors):
        other = dict(weights)
        for leaf in ("weight", "bias"):
            q, k = weights[f"q_proj.{leaf}"], weights[f"k_proj.{leaf}"]
            factor = np.array(factors, np.float32).reshape(4, *[1] * (q.ndim - 1))
            other[f"q_proj.{leaf}"] = (
                q.reshape(4, *k.reshape(2, 4, -1).shape[1:2], *q.shape[1:]) * factor
            ).reshape(q.shape)
            other[f"k_proj.{leaf}"] = (k.reshape(2, 4, *k.shape[1:]) / factor).reshape(k.shape)
        return other

    assert compared(weights, scaled([2, 4, 2, 4]), spec).kind == "function"
    assert compared(weights, scaled([2, 2, 4, 4]), spec).kind == "different"


@pytest.mark.parametrize("change", [{"qk_norm": Norm()}, {"clip_qkv": 1.0}], ids=["norm", "clip"])
def test_norm_or_clip_prevents_canceling(change):
    """A factor on q divided out of k is different if the layer has a norm or clips q, k and v."""
    spec = replace(PLAIN, **change)
    weights = random_weights(spec)
    other = {name: x * 2 if name.startswith("q_proj") else x for name, x in weights.items()}
    other = {name: x / 2 if name.startswith("k_proj") else x for name, x in other.items()}
    assert compared(weights, other, spec).kind == "different"


@st.composite
def orders(draw):
    """Draw a layer, and an order of all its parts that does not change its output."""
    spec = SPECS[draw(st.sampled_from(sorted(SPECS)))]
    of_group = spec.num_heads // spec.num_kv_heads
    order = {"groups": draw(st.permutations(range(spec.num_kv_heads)))}
    order["heads"] = draw(st.permutations(range(of_group)))
    if spec.latent is None:
        order["v"] = draw(st.permutations(range(spec.value_head_dim)))
        fixed = 0 if spec.rope is None else spec.rope.rotated_features(spec.head_dim).stop
        order["qk"] = [*range(fixed), *draw(st.permutations(range(fixed, spec.head_dim)))]
    return spec, order, draw(st.integers(0, 2**16))


@given(orders(), st.booleans())
@settings(max_examples=60, deadline=None)
def test_valid_order_is_same_function(drawn, is_bfloat16):
    """Any valid order of all parts is the same function, and has the same output."""
    spec, order, seed = drawn
    weights = random_weights(spec, seed)
    if is_bfloat16:
        weights = {name: x.astype(ml_dtypes.bfloat16) for name, x in weights.items()}
    other = reordered(weights, spec, **order)
    comparison = compared(weights, other, spec)
    assert comparison.kind in ("bits", "function")
    one, two = output_of(weights, spec), output_of(other, spec)
    np.testing.assert_allclose(
        one, two, rtol=0, atol=1e-12 * np.abs(one).max()
    )  # sums in a different order, in float64


@sample(32)
@pytest.mark.parametrize(
    "name", [name for name, case in CASES.items() if case.spec.d_kv == case.spec.d_in]
)
def test_same_function_means_same_output(name):
    """Reversed groups are the same function if and only if the output is the same."""
    spec = CASES[name].spec
    weights = random_weights(spec)
    other = reordered(weights, spec, groups=np.arange(spec.num_kv_heads)[::-1])
    one, two = output_of(weights, spec), output_of(other, spec)
    is_same = np.allclose(one, two, rtol=0, atol=1e-12 * np.abs(one).max())
    assert compared(weights, other, spec).same == is_same


@given(orders(), st.data())
@settings(max_examples=60, deadline=None)
def test_one_changed_element_is_different(drawn, data):
    """One element changed by more than 8 units of rounding is a difference of its tensor."""
    spec, order, seed = drawn
    weights = random_weights(spec, seed)
    other = reordered(weights, spec, **order) if data.draw(st.booleans()) else {**weights}
    name = data.draw(st.sampled_from(sorted(weights)))
    other[name] = other[name].copy()
    index = data.draw(st.integers(0, other[name].size - 1))
    before = other[name].reshape(-1)[index]
    change = data.draw(st.sampled_from([1e-6, 1e-4, -1e-3, 0.5, -3.0]))
    other[name].reshape(-1)[index] = after = before + np.float32(change)
    assume(abs(after - before) > 8 * np.spacing(max(abs(before), abs(after))))
    comparison = compared(weights, other, spec)
    assert not comparison.same
    assert name in {difference.name for difference in comparison.differences}


# ---- Files ---------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path):
    """Return a function that saves weights in a layout and returns the path."""

    def save(weights, layout="canonical", spec=PLAIN, name="b"):
        path = tmp_path / f"{name}.safetensors"
        parity.save(path, weights, spec, layout=layout)
        return str(path)

    return save


@pytest.mark.parametrize(
    "layout",
    ["canonical", "qkv_proj", "flax.nnx", "torch.nn.MultiheadAttention", "transformers.GPT-NeoX"],
)
def test_commands_accept_reversed_heads(files, layout, capsys, tmp_path):
    """compare and diagnose exit with 0 for reversed heads, whatever the layout of the file."""
    weights = random_weights(PLAIN)
    other = reordered(weights, PLAIN, groups=[3, 2, 1, 0])
    paths = [files(weights, name="a"), files(other, layout)]
    assert main(["compare", *paths, "--json", str(tmp_path / "r.json")]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert f"{paths[0]} and {paths[1]} hold the same attention: q_proj.weight, " in out
    assert "differ, and it is the same function: heads are in the order 3 2 1 0" in out
    (layer,) = json.loads((tmp_path / "r.json").read_text())["layers"]
    assert (layer["same"], layer["same_bits"], layer["weights"]["kind"]) == (
        True,
        False,
        "function",
    )
    assert main(["diagnose", *paths]) == 0
    assert "it is the same function" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("by", [1e-6, 2e-6])
def test_one_element_is_never_rounding(files, by, capsys, tmp_path):
    """compare and diagnose report one element off by 1e-6 with its index, not as rounding."""
    weights = random_weights(PLAIN)
    other = changed(weights, q_proj__weight=weights["q_proj.weight"].copy())
    other["q_proj.weight"][3, 5] += np.float32(by)
    paths = [files(weights, name="a"), files(other, "flax.nnx")]
    for command in ("compare", "diagnose"):
        assert main([command, *paths, "--json", str(tmp_path / "r.json")]) == 1
        out = capsys.readouterr().out
        assert (
            "q_proj.weight differs in 1 of 256 elements: 1 of 16 rows, 1 of 16 columns, head 0"
            in out
        )
        assert "worst     at (3, 5): " in out
        assert "the same up to rounding" not in out
        # The size of an error is stated once: by the diagnosis, or with its budget.
        is_first_stage_shown = "verify/" in out
        has_budget = "  allowed " in out
        assert has_budget == (is_first_stage_shown and "times its budget" not in out)
    report = json.loads((tmp_path / "r.json").read_text())["weights"]
    assert (report["kind"], report["same"]) == ("different", False)
    assert report["differences"][0]["worst_index"] == [3, 5]


def test_float32_file_rounded_to_bfloat16(files, capsys):
    """diagnose reports rounded float32 weights as a pattern, and bfloat16 weights as a copy."""
    weights = random_weights(PLAIN)
    rounded = {name: x.astype(ml_dtypes.bfloat16).astype(np.float32) for name, x in weights.items()}
    paths = [files(weights, name="a"), files(rounded)]
    assert main(["diagnose", *paths]) == 1
    out = capsys.readouterr().out
    assert "pattern   in each, the second's is the first's, rounded to bfloat16" in out
    assert "unknown" not in out
    assert (
        main(
            [
                "diagnose",
                paths[0],
                files({name: x.astype(ml_dtypes.bfloat16) for name, x in weights.items()}),
            ]
        )
        == 0
    )
    assert "float32 rounded to bfloat16, at most 0.5 units in the last place" in " ".join(
        capsys.readouterr().out.split()
    )


def test_differing_layer_of_three_is_shown(tmp_path, capsys):
    """compare counts layers by agreement; verify and diagnose show the one that differs."""
    layers = [random_weights(PLAIN, seed) for seed in range(3)]
    others = [layers[0], reordered(layers[1], PLAIN, groups=[1, 0, 2, 3]), {**layers[2]}]
    others[2]["v_proj.weight"] = 3 * layers[2]["v_proj.weight"]
    paths = []
    for name, every in (("a", layers), ("b", others)):
        tensors = {
            f"h.{i}.{key}": x for i, weights in enumerate(every) for key, x in weights.items()
        }
        paths.append(str(tmp_path / f"{name}.safetensors"))
        save_tensors(paths[-1], tensors, {})
    arguments = [*paths, "--from", "canonical", "--prefix", "h.{i}", "--num-heads", "4"]
    assert main(["compare", *arguments]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "h.2 and h.2 differ first at v" in out
    assert "v_proj.weight differs in 256 of 256 elements" in out
    assert "the second's is the first's, times 3" in out
    assert (
        "1 the same, bit for bit; 1 the same function, written differently; 0 the same up to "
        "rounding; 1 different" in out
    )
    assert main(["diagnose", *arguments]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "h.2 and h.2 are the first of 3 layers that differ" in out
    assert "the second's is the first's, times 3" in out


def test_pattern_precedes_the_likely_bug(files, capsys):
    """diagnose prints the pattern of the weights before the likely bug and its page."""
    weights = random_weights(PLAIN)
    other = changed(weights, out_proj__weight=weights["out_proj.weight"].T)
    assert main(["diagnose", files(weights, name="a"), files(other)]) == 1
    out = capsys.readouterr().out
    pattern, bug = (
        out.index("the second's is the first's, transposed"),
        out.index("Likely bug: out_proj-transposed"),
    )
    assert pattern < bug
    assert "More: mha-parity bugs transposed-kernel" in out
    assert main(["compare", files(weights, name="a"), files(other)]) == 1
    out = capsys.readouterr().out
    assert out.count(" times its budget") == 1
    assert "  allowed " not in out


@pytest.mark.parametrize("is_first", [True, False])
def test_bias_in_one_file_has_a_pattern(files, is_first, capsys):
    """A bias that only one file has is a difference, but equal if its values are 0."""
    weights, bare = random_weights(PLAIN), replace(PLAIN, qkv_bias=(False, True, True))
    without = {name: x for name, x in weights.items() if name != "q_proj.bias"}
    paths = [files(weights, name="a"), files(without, spec=bare)]
    for command in ("compare", "diagnose"):
        assert main([command, *(paths if is_first else paths[::-1])]) == 1
        out = capsys.readouterr().out
        assert "q_proj.bias differs in 16 of 16 elements" in out
        words = (
            "missing, and nonzero in the first"
            if is_first
            else "a bias that the first does not have"
        )
        assert f"pattern   the second's is {words}" in out
    zeros = changed(weights, q_proj__bias=np.zeros(16, np.float32))
    pair = [(zeros, PLAIN), (without, bare)]
    comparison = compare_weights(*pair[not is_first], *pair[is_first])
    assert (comparison.kind, comparison.same) == ("values", True)
    assert main(["compare", paths[1], files(zeros, name="zeros")]) == 0


def test_comparing_other_layers_raises():
    """Weights of different specifications, or with a missing name, raise an error."""
    weights = random_weights(PLAIN)
    with rejects("the layers", "soft_cap=None and 3.0"):
        compare_weights(weights, PLAIN, weights, replace(PLAIN, soft_cap=3.0))
    with rejects("weights", missing=["q_proj.bias"], unexpected=[]):
        compare_weights(
            weights, PLAIN, {name: x for name, x in weights.items() if name != "q_proj.bias"}, PLAIN
        )


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize(("value", "other"), [(1e-310, 1e300), (-1e308, 1e308)])
def test_extreme_float64_has_no_warnings(value, other, tmp_path, capsys):
    """Weights near the limits of float64 are compared without warnings, and differ."""
    for name, number in (("a", value), ("b", other)):
        weights = {name: array.astype(np.float64) for name, array in random_weights(PLAIN).items()}
        weights["q_proj.weight"][0, 0] = number
        parity.save(tmp_path / f"{name}.npz", weights, PLAIN)
    assert main(["compare", str(tmp_path / "a.npz"), str(tmp_path / "b.npz")]) == 1
    assert "Warning" not in capsys.readouterr().err

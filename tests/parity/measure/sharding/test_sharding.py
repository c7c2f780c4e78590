"""Shards of a layer: the outputs of all ranks add up to the layer's, and the round trip is
exact.
"""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch
from helpers.divided_layers import EVERYTHING, LATENT
from helpers.input_errors import rejects, rejects_type
from helpers.samples import sample

import mha_torch
import parity
from mha_spec import Alibi, AttentionSpec, Norm, Rope
from mha_spec.attention import NORMS
from parity import CASES, ShardPlan, make_problem, random_weights, shard, unshard
from parity.measure.core import reference
from parity.measure.core.problem import Problem
from parity.measure.core.stages import run_steps
from parity.measure.core.trace import Reference
from parity.measure.core.weights import check_weights
from parity.measure.sharding.shard import local_heads
from parity.measure.sharding.stages import part_of

RANKS = (2, 4, 8)
OUT_BIAS = "out_proj.bias"


def rejected(spec, ranks):
    """Return the field that prevents the division of a layer, or None."""
    if spec.num_heads % ranks:
        return "num_heads"
    for name in NORMS:
        norm = getattr(spec, name)
        if norm is not None and norm.over == "width":
            return name
    return "alibi" if spec.alibi is not None else None


def heads(ranks, rank, spec):
    heads_of_rank = spec.num_heads // ranks
    return slice(rank * heads_of_rank, (rank + 1) * heads_of_rank)


def shards_of(weights, spec, ranks):
    return [shard(weights, spec, ShardPlan(ranks), rank) for rank in range(ranks)]


def outputs_of(problem, parts):
    """Return the outputs of each rank for a problem, on every path of the reference."""
    of_ranks = []
    for rank, (weights, spec) in enumerate(parts):
        own = heads(len(parts), rank, problem.spec)
        inputs = {
            name: x[:, own] if name in ("bias", "mask") else x for name, x in problem.inputs.items()
        }
        keys = local_heads(problem.spec, ShardPlan(len(parts)), rank).keys
        inputs |= {
            name: x[:, keys] for name, x in inputs.items() if name in ("k", "v")
        }  # of another layer's rank
        part = Problem(replace(problem.case, spec=spec), problem.dtype, weights, inputs)
        stages = run_steps(reference.steps(part, "float64"))
        of_ranks.append({name: stage for name, stage in stages.items() if name.endswith("output")})
    return of_ranks


def joined(of_ranks, spec):
    """Return the sum of the outputs of all ranks, or without out_proj their concatenation."""
    join = sum if spec.out_proj else lambda parts: np.concatenate(list(parts), axis=-1)
    return {name: join(part[name] for part in of_ranks) for name in of_ranks[0]}


def assert_bits_equal(actual, expected):
    assert list(actual) == list(expected)
    for name, array in expected.items():
        assert (actual[name].dtype, actual[name].shape) == (array.dtype, array.shape)
        assert actual[name].tobytes() == np.ascontiguousarray(array).tobytes(), name


@sample(48, ranks=[2, 8])
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", CASES)
def test_rank_outputs_add_up_to_layer(name, ranks):
    """Outputs of all ranks add up to the layer's within tolerance, and shards round-trip exactly;
    otherwise the field that prevents division raises an error.
    """
    problem = make_problem(CASES[name], "float64")
    spec = problem.spec
    if (field := rejected(spec, ranks)) is not None:
        with rejects(field):
            shard(problem.weights, spec, ShardPlan(ranks), 0)
        return
    parts = shards_of(problem.weights, spec, ranks)
    assert_bits_equal(
        unshard([weights for weights, _ in parts], spec, ShardPlan(ranks)), problem.weights
    )
    parity.assert_parity(joined(outputs_of(problem, parts), spec), problem=problem, diagnose=False)


def test_ranks_divide_enough_cases():
    """At least 100, 80 and 5 cases are divided by 2, 4 and 8 ranks."""
    divided = {
        ranks: [name for name in CASES if rejected(CASES[name].spec, ranks) is None]
        for ranks in RANKS
    }
    assert all(
        len(divided[ranks]) >= count for ranks, count in zip(RANKS, (100, 80, 5), strict=True)
    )


@sample(12)
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize(
    "spec", [EVERYTHING, LATENT, replace(EVERYTHING, num_kv_heads=2, fused_qkv=True)]
)
@pytest.mark.parametrize("ranks", [1, *RANKS])
def test_shard_round_trip_is_exact(spec, ranks, dtype):
    """Shards are valid, and `unshard` restores the weights bit
    for bit; one rank holds the layer itself.
    """
    weights = {name: weight.astype(dtype) for name, weight in random_weights(spec).items()}
    parts = shards_of(weights, spec, ranks)
    for share, own in parts:
        check_weights(share, own)
    assert_bits_equal(unshard([share for share, _ in parts], spec, ShardPlan(ranks)), weights)
    if ranks == 1:
        assert parts[0][1] == spec
        assert_bits_equal(parts[0][0], weights)


def test_shard_of_layer_with_all_features():
    """Rank 1 of 4 has the expected rows of each weight, the
    spec of 2 of 8 heads, and no output bias.
    """
    weights = random_weights(EVERYTHING)
    share, own = shard(weights, EVERYTHING, ShardPlan(4), 1)
    assert (own.num_heads, own.num_kv_heads, own.out_bias) == (2, 1, False)
    assert replace(own, num_heads=8, num_kv_heads=4, out_bias=True) == EVERYTHING
    query, key = slice(2, 4), slice(1, 2)
    expected = {
        **{f"q_proj.{leaf}": weights[f"q_proj.{leaf}"][12:24] for leaf in ("weight", "bias")},
        **{f"k_proj.{leaf}": weights[f"k_proj.{leaf}"][6:12] for leaf in ("weight", "bias")},
        **{f"v_proj.{leaf}": weights[f"v_proj.{leaf}"][10:20] for leaf in ("weight", "bias")},
        "out_proj.weight": weights["out_proj.weight"][:, 20:40],
        **{f"gate_proj.{leaf}": weights[f"gate_proj.{leaf}"][query] for leaf in ("weight", "bias")},
        **{f"q_norm.{leaf}": weights[f"q_norm.{leaf}"][query] for leaf in ("weight", "bias")},
        **{f"k_norm.{leaf}": weights[f"k_norm.{leaf}"][key] for leaf in ("weight", "bias")},
        "v_norm.weight": weights["v_norm.weight"],
        "sinks": weights["sinks"][query],
        "relative_bias": weights["relative_bias"][:, query],
    }
    assert_bits_equal(share, expected)


def test_shard_of_layer_with_latents():
    """Rank 3 of 4 has whole latent projections, and the expected rows of those per head."""
    weights = random_weights(LATENT)
    share, own = shard(weights, LATENT, ShardPlan(4), 3)
    assert own == replace(LATENT, num_heads=2, num_kv_heads=2, out_bias=False)
    copied = ("q_a_proj.weight", "q_a_proj.bias", "kv_a_proj.weight", "kv_a_proj.bias")
    expected = {
        **{name: weights[name] for name in (*copied, "q_a_norm.weight", "kv_a_norm.weight")},
        "q_b_proj.weight": weights["q_b_proj.weight"][48:],
        "kv_b_proj.weight": weights["kv_b_proj.weight"][
            60:
        ],  # 8 - 4 features of a key and 6 of a value for each head
        "out_proj.weight": weights["out_proj.weight"][:, 36:],
        "gate_proj.weight": weights["gate_proj.weight"][36:],
    }
    assert_bits_equal(share, {name: expected[name] for name in own.weight_shapes})


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "ranks", "expected"),
    [
        (8, 8, 4, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (8, 4, 2, [[0, 1], [2, 3]]),
        (8, 2, 4, [[0], [0], [1], [1]]),  # neighbors share one, not every other rank
        (8, 1, 2, [[0], [0]]),
        (12, 3, 2, [[0, 0, 1], [1, 2, 2]]),  # groups of four query heads, six of them on a rank
        (12, 6, 4, [[0, 0, 1], [1, 2, 2], [3, 3, 4], [4, 5, 5]]),
    ],
)
def test_key_value_heads_of_each_rank(num_heads, num_kv_heads, ranks, expected):
    """Each rank has the key/value heads of its query heads;
    outputs add up to the layer's within 1e-14.
    """
    spec = AttentionSpec(24, num_heads, num_kv_heads=num_kv_heads, head_dim=2)
    weights = random_weights(spec)
    weights["v_proj.bias"] = np.repeat(
        np.arange(num_kv_heads, dtype=np.float32), 2
    )  # each head's number
    parts = shards_of(weights, spec, ranks)
    assert [list(map(int, share["v_proj.bias"][::2])) for share, _ in parts] == expected
    assert_bits_equal(unshard([share for share, _ in parts], spec, ShardPlan(ranks)), weights)
    x = torch.randn(2, 5, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    whole = torch_output(x, weights, spec)
    total = sum(torch_output(x, *part) for part in parts)
    torch.testing.assert_close(
        total, whole, atol=1e-14, rtol=0
    )  # sums of 24 terms of size 1 in float64


def torch_output(x, weights, spec):
    weights = {name: torch.from_numpy(weight).double() for name, weight in weights.items()}
    return mha_torch.multi_head_attention(x, weights, spec)[0]


def test_out_proj_bias_is_on_first_rank():
    """Only the first rank has the output bias; with it on both ranks the output does not match."""
    problem = make_problem(CASES["full"], "float64")
    parts = shards_of(problem.weights, problem.spec, 2)
    assert [OUT_BIAS in share for share, _ in parts] == [True, False]
    assert parts[0][0][OUT_BIAS].tobytes() == problem.weights[OUT_BIAS].tobytes()
    twice = [
        (share | {OUT_BIAS: problem.weights[OUT_BIAS]}, replace(own, out_bias=True))
        for share, own in parts
    ]
    with pytest.raises(AssertionError, match="output"):
        parity.assert_parity(
            joined(outputs_of(problem, twice), problem.spec), problem=problem, diagnose=False
        )


def test_swapped_shards_raise():
    """Shards with replicated heads in the wrong order raise an error."""
    spec = AttentionSpec(16, 8, num_kv_heads=2, out_bias=False)
    parts = [share for share, _ in shards_of(random_weights(spec), spec, 4)]
    with rejects("k_proj.weight", "different values on rank 0"):
        unshard([parts[rank] for rank in (0, 2, 1, 3)], spec, ShardPlan(4))


@pytest.mark.parametrize("name", ["kv_a_proj.weight", "q_a_norm.weight"])
def test_different_copies_raise(name):
    """Replicated latent weights that differ between ranks raise an error."""
    parts = [share for share, _ in shards_of(random_weights(LATENT), LATENT, 2)]
    parts[0][name].flat[-1] += 1.0
    with rejects(name, "different values on rank 0"):
        unshard(parts, LATENT, ShardPlan(2))


# ---- Tokens that are also divided ----------------------------------------------------------------


@pytest.mark.parametrize("spec", [EVERYTHING, LATENT])
def test_context_ranks_have_equal_weights(spec):
    """Ranks that divide tokens have the weights of ranks
    that do not; a changed copy raises an error.
    """
    weights, plan = random_weights(spec), ShardPlan(2, context=3)
    parts = [shard(weights, spec, plan, rank) for rank in range(plan.num_ranks)]
    for rank, (share, own) in enumerate(parts):
        alike, same = shard(weights, spec, ShardPlan(2), rank % 2)
        assert own == same
        assert_bits_equal(share, alike)
    share = [shares for shares, _ in parts]
    assert_bits_equal(unshard(share, spec, plan), weights)
    name = next(iter(share[4]))
    share[4][name].flat[0] += 1.0
    with rejects(name):
        unshard(share, spec, plan)


def test_context_divides_any_layer():
    """Division of tokens alone leaves a layer with norms over the width and ALiBi whole."""
    spec = AttentionSpec(16, 4, qk_norm=Norm(over="width"), alibi=Alibi())
    weights = random_weights(spec)
    for rank in range(2):
        share, own = shard(weights, spec, ShardPlan(1, context=2), rank)
        assert own == spec
        assert_bits_equal(share, weights)


def test_stages_of_tokens_are_joined():
    """Stages of ranks that divide heads and tokens join to the whole ones, bit for bit; missing
    ranks and stages of a cache raise errors.
    """
    case, plan = replace(CASES["gqa-causal"], seq_len=6), ShardPlan(2, context=2)
    whole = Reference(make_problem(case, "float64")).accumulated
    whole = {
        name: x
        for name, x in whole.items()
        if name in ("mask", "q", "k", "v", "scores", "context", "output")
    }
    parts = []
    for rank in range(plan.num_ranks):
        tokens, heads = slice(rank // 2 * 3, rank // 2 * 3 + 3), local_heads(case.spec, plan, rank)
        own = {name: part_of(name, x, case.spec, heads) for name, x in whole.items()}
        parts.append(
            {name: x[:, tokens] if x.ndim == 3 else x[:, :, tokens] for name, x in own.items()}
        )
    joined = parity.unshard_stages(parts, case.spec, plan, summed=True)
    assert joined.keys() == whole.keys()
    assert_bits_equal(joined, whole)
    with rejects("shards", "3 of them and tensor=2 and context=2"):
        parity.unshard_stages(parts[:3], case.spec, plan)
    with rejects("stages", stages="cache.keys"):
        parity.unshard_stages([{"cache.keys": x["k"]} for x in parts], case.spec, plan)


def test_undivided_heads_raise_an_error():
    """6 heads on 4 ranks raise an error in `shard`, `unshard` and `unshard_stages`."""
    spec = AttentionSpec(12, 6)
    input_error = rejects("num_heads", num_heads=6, tensor=4)
    for alone in (True, False):
        with input_error:
            shard(random_weights(spec), spec, ShardPlan(4), 0, alone=alone)
    with input_error:
        unshard([random_weights(spec)] * 4, spec, ShardPlan(4))
    with input_error:
        parity.unshard_stages([{}] * 4, spec, ShardPlan(4))


GROUPED = AttentionSpec(32, 8, num_kv_heads=2)
OF_WIDTH = Norm("layer", over="width", bias=True)


@pytest.mark.parametrize(
    ("spec", "input_error"),
    [
        (replace(GROUPED, qk_norm=OF_WIDTH), rejects("qk_norm")),
        (replace(GROUPED, v_norm=OF_WIDTH), rejects("v_norm")),
        (replace(GROUPED, alibi=Alibi()), rejects("alibi")),
        (replace(GROUPED, output_dropout=0.1), rejects("output_dropout")),
    ],
)
def test_layer_not_computed_alone_raises(spec, input_error):
    """Norms over the width, ALiBi and output dropout raise an error on 4 ranks; with `alone=False`
    shards are valid and round-trip exactly.
    """
    weights = random_weights(spec)
    with input_error:
        shard(weights, spec, ShardPlan(4), 0)
    share, own = shard(weights, spec, ShardPlan(1), 0)
    assert own == spec
    assert_bits_equal(share, weights)
    parts = [shard(weights, spec, ShardPlan(4), rank, alone=False) for rank in range(4)]
    for share, own in parts:
        check_weights(share, own)
    assert_bits_equal(unshard([share for share, _ in parts], spec, ShardPlan(4)), weights)


def test_width_norm_weights_follow_heads():
    """Each rank has the weights of norms over the width that belong to its own heads."""
    spec = replace(GROUPED, qk_norm=OF_WIDTH)
    weights = random_weights(spec)
    for rank, key in enumerate((0, 0, 1, 1)):
        share, own = shard(weights, spec, ShardPlan(4), rank, alone=False)
        assert (own.num_heads, own.num_kv_heads, own.qk_norm) == (2, 1, OF_WIDTH)
        for leaf in ("weight", "bias"):
            whole = {name: weights[f"{name}_norm.{leaf}"] for name in "qk"}
            assert (
                share[f"q_norm.{leaf}"].tobytes() == whole["q"][rank * 8 : rank * 8 + 8].tobytes()
            )
            assert share[f"k_norm.{leaf}"].tobytes() == whole["k"][key * 4 : key * 4 + 4].tobytes()


@pytest.mark.parametrize("name", ["norm-width", "alibi"])
def test_stages_of_width_norms_are_joined(name):
    """Stages of layers with norms over the width or ALiBi join to the whole ones, bit for bit."""
    case, plan = CASES[name], ShardPlan(2)
    whole = Reference(make_problem(case, "float64")).accumulated
    whole = {
        name: whole[name]
        for name in ("mask", "q", "k", "v", "scores", "attn_weights", "context", "output")
    }
    heads = [local_heads(case.spec, plan, rank) for rank in range(2)]
    parts = [{name: part_of(name, x, case.spec, own) for name, x in whole.items()} for own in heads]
    assert_bits_equal(parity.unshard_stages(parts, case.spec, plan, summed=True), whole)


def test_invalid_shard_input_raises():
    """Invalid plans, ranks, shapes, and missing, swapped or mixed shards raise errors."""
    spec = AttentionSpec(8, 4)
    weights, plan = random_weights(spec), ShardPlan(2)
    parts = [share for share, _ in shards_of(weights, spec, 2)]
    for value, error in ((0, ValueError), (2.0, TypeError), (True, TypeError)):
        with rejects("tensor", tensor=value).of(error):
            ShardPlan(value)
        with rejects("context", context=value).of(error):
            ShardPlan(2, value)
    with rejects("rank", rank=6, plan=...):
        shard(weights, spec, ShardPlan(2, 3), 6)
    for rank in (2, -1):
        with rejects("rank", rank=rank):
            shard(weights, spec, plan, rank)
    with rejects_type("plan", plan=2):
        shard(weights, spec, 2, 0)
    with rejects_type("spec", spec=4):
        unshard(parts, 4, plan)
    with rejects("q_proj.weight", "q_proj.weight.shape=(4, 8)"):
        shard(weights | {"q_proj.weight": weights["q_proj.weight"][:4]}, spec, plan, 0)
    with rejects("shards", "1 of them and tensor=2"):
        unshard(parts[:1], spec, plan)
    with rejects("weights", missing=["out_proj.bias"], unexpected=[], where="rank 0"):
        unshard(parts[::-1], spec, plan)
    with rejects_type("shards", "['float16', 'float32']"):
        unshard(
            [parts[0], {name: part.astype(np.float16) for name, part in parts[1].items()}],
            spec,
            plan,
        )


def test_shard_with_whole_spec_raises(rng):
    """A shard with the specification of all heads raises an error
    in both functions of `mha_torch`.
    """
    spec = AttentionSpec(
        32, 8, num_kv_heads=4, head_dim=8, rope=Rope(), qkv_bias=False, out_bias=False
    )
    share, own = shard(random_weights(spec), spec, ShardPlan(2), 0)
    share = {name: parity.to_torch(weight) for name, weight in share.items()}
    x = torch.from_numpy(rng.standard_normal((1, 4, 32)).astype(np.float32))
    with rejects("q_proj.weight", {"q_proj.weight.shape": (32, 32)}):
        mha_torch.multi_head_attention(x, share, spec)
    project = mha_torch.project_with(share, own)
    assert [x.shape[1] for x in mha_torch.project_qkv(project, x, x, x, own)] == [4, 2, 2]
    with rejects("q_proj", "32 features"):
        mha_torch.project_qkv(project, x, x, x, spec)

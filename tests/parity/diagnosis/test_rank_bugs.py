"""Bugs in dividing a layer over ranks: injected in what each rank computes in torch, seen there, and named."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.ranks import SPEC, computed, cut, of_heads, of_tokens, problem_of
from helpers.refusals import refuses

import mha_torch
import parity
from mha_spec import AttentionSpec, Norm, Rope
from parity import ShardPlan
from parity.diagnosis.bugs.ranks import NAMES, rank_bugs

WIDTH = AttentionSpec(32, 8, num_kv_heads=4, qk_norm=Norm(over="width"))


def tiled(problem, size):
    def inject(rank, own, spec):
        head = rank % problem.spec.num_kv_heads
        for name in ("k_proj", "v_proj"):
            for leaf in ("weight", "bias"):
                whole = problem.weights[f"{name}.{leaf}"]
                own[f"{name}.{leaf}"] = whole.reshape(problem.spec.num_kv_heads, -1, *whole.shape[1:])[head]
        return own, spec

    return inject


def with_bias(problem):
    def inject(rank, own, spec):
        return own | {"out_proj.bias": problem.weights["out_proj.bias"]}, replace(spec, out_bias=True)

    return inject


HEADS = {
    "rank-kv-heads-tiled": (lambda problem: tiled(problem, 4), [1, 2], "k"),
    "rank-first-heads": (lambda problem: cut(problem, "q_proj", "k_proj", "v_proj"), [1, 2, 3], "q"),
    "rank-first-sinks": (lambda problem: cut(problem, "sinks"), [1, 2, 3], "attn_weights"),
    "rank-first-gate": (lambda problem: cut(problem, "gate_proj"), [1, 2, 3], "gate"),
    "rank-out-bias-on-each": (with_bias, [1, 2, 3], "output"),
}


def test_ranks_that_are_right_are_told_so_and_joined():
    problem = problem_of(SPEC)
    ranks = of_heads(problem, 4)
    assert not parity.diagnose_ranks(ranks, problem, tensor=4).is_wrong
    whole = parity.unshard_stages(ranks, SPEC, ShardPlan(4))
    assert whole.keys() == ranks[0].keys()
    parity.assert_parity(whole, problem=problem)


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("stages", ["all", "output"])
def test_a_bug_in_dividing_heads_is_named_with_its_ranks(name, stages):
    make, wrong, first = HEADS[name]
    problem = problem_of(SPEC)
    ranks = of_heads(problem, 4, make(problem))
    if stages == "output":
        ranks, first = [{"output": rank["output"]} for rank in ranks], "output"
    diagnosis = parity.diagnose_ranks(ranks, problem, tensor=4)
    assert list(diagnosis.wrong) == wrong
    assert {each.stage for each in diagnosis.wrong.values()} == {first}
    assert [bug.name for bug in diagnosis.bugs] == [name]
    assert (diagnosis.likely_bug, diagnosis.first_wrong_stage) == (name, first)
    assert f"First wrong stage of rank {wrong[0]}: {first}, " in str(diagnosis)


def test_a_norm_over_the_width_of_a_rank_is_named():
    problem = problem_of(WIDTH)
    apart = replace(WIDTH, qk_norm=Norm(per_head=True))
    weights = {name: problem.weights[name].reshape(shape) for name, shape in apart.weight_shapes.items()}
    ranks = []
    for rank in range(2):
        held, own = parity.shard(weights, apart, ShardPlan(2), rank)
        own = replace(own, qk_norm=WIDTH.qk_norm)
        held = {name: held[name].reshape(shape) for name, shape in own.weight_shapes.items()}
        ranks.append(computed(held, own, problem.inputs["query"]))
    diagnosis = parity.diagnose_ranks(ranks, problem, tensor=2)
    assert list(diagnosis.wrong) == [0, 1]
    assert [bug.name for bug in diagnosis.bugs] == ["rank-norm-over-own-width"]


def test_ranks_with_their_tokens_are_right():
    problem = problem_of(SPEC)
    ranks = of_tokens(computed(problem.weights, SPEC, problem.inputs["query"]), 4)
    assert not parity.diagnose_ranks(ranks, problem, tokens=4).is_wrong


def test_positions_of_a_ranks_own_are_named_with_its_ranks():
    problem = problem_of(SPEC)
    positions = torch.arange(8)[None] % 2
    ranks = of_tokens(computed(problem.weights, SPEC, problem.inputs["query"], positions), 4)
    diagnosis = parity.diagnose_ranks(ranks, problem, tokens=4)
    firsts = [diagnosis.wrong[rank].stage for rank in range(4)]
    assert firsts == ["scores", "q", "q", "q"]  # the first one counts rightly, and sees the keys of the others
    assert [bug.name for bug in diagnosis.bugs] == ["rank-local-positions"]


def test_tokens_left_in_zigzag_are_named_with_their_ranks():
    problem = problem_of(SPEC)
    stages = computed(problem.weights, SPEC, problem.inputs["query"])
    right, left = of_tokens(stages, 2), of_tokens(stages, 2, [[0, 1, 6, 7], [2, 3, 4, 5]])
    ranks = [
        own | {"output": moved["output"], "context": moved["context"]} for own, moved in zip(right, left, strict=True)
    ]
    diagnosis = parity.diagnose_ranks(ranks, problem, tokens=2)
    assert list(diagnosis.wrong) == [0, 1]
    assert {each.stage for each in diagnosis.wrong.values()} == {"context"}
    assert [bug.name for bug in diagnosis.bugs] == ["rank-zigzag-left"]


def gradients(problem, weigh):
    """The gradient of the input of a layer in torch, from attention weights that are made of scores and a mask."""
    weights = {name: torch.from_numpy(np.array(weight)) for name, weight in problem.weights.items()}
    spec, x = problem.spec, torch.from_numpy(np.array(problem.inputs["query"])).requires_grad_()
    q, k, v = mha_torch.project_qkv(mha_torch.project_with(weights, spec), x, x, x, spec)
    hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
    scores = mha_torch.attention_scores(q, k, None, spec).masked_fill(hidden, -torch.inf)
    context = mha_torch.attention_context(torch.softmax(scores, -1), v).detach()
    d_context = torch.from_numpy(np.array(problem.inputs["cotangent"])) @ weights["out_proj.weight"]
    d_context = mha_torch.split_heads(d_context, spec.num_heads)
    wrong = weigh(scores.detach())
    grouped = v.repeat_interleave(spec.num_heads // spec.num_kv_heads, 1)
    d_scores = wrong * (d_context @ grouped.detach().mT - (d_context * context).sum(-1, keepdim=True))
    found = (scores * d_scores).masked_fill(hidden, 0.0).sum() + (wrong @ grouped * d_context).sum()
    return torch.autograd.grad(found, x)[0]


@pytest.mark.parametrize("is_wrong", [False, True])
def test_a_gradient_from_local_sums_is_named(is_wrong):
    problem = problem_of(AttentionSpec(32, 8, num_kv_heads=2, rope=Rope()))

    def by_parts(scores):
        parts = scores.unflatten(-1, (4, 2))
        return torch.softmax(parts, -1).nan_to_num().flatten(-2)

    grad = gradients(problem, by_parts if is_wrong else lambda scores: torch.softmax(scores, -1))
    diagnosis = parity.diagnose_ranks([{"grad.query": part} for part in grad.chunk(4, 1)], problem, tokens=4)
    assert diagnosis.is_wrong == is_wrong
    assert [bug.name for bug in diagnosis.bugs] == ["rank-local-sums"] * is_wrong


def test_every_bug_of_ranks_is_listed():
    whole, width = problem_of(SPEC), problem_of(WIDTH)
    plain = problem_of(AttentionSpec(32, 8, rope=Rope()))
    asked = [(whole, 4, 1), (width, 4, 1), (plain, 1, 2)]
    found = {each.name for problem, tensor, tokens in asked for each in rank_bugs(problem, ShardPlan(tensor), tokens)}
    assert found == {*NAMES}


def test_what_nothing_explains_is_told_with_its_rank():
    problem = problem_of(SPEC)
    ranks = of_heads(problem, 4)
    ranks[2]["v"] = 1.1 * ranks[2]["v"]
    diagnosis = parity.diagnose_ranks(ranks, problem, tensor=4)
    assert list(diagnosis.wrong) == [2]
    assert diagnosis.bugs == ()
    assert diagnosis.likely_bug == ""
    assert str(diagnosis).startswith("Likely bug: unknown")


def test_heads_that_ranks_share_must_be_alike_to_be_joined():
    ranks = of_heads(problem_of(SPEC), 4)
    ranks[1]["k"] = ranks[1]["k"] + 1.0
    with refuses("k", "different values on rank 0"):
        parity.unshard_stages(ranks, SPEC, ShardPlan(4))


def test_ranks_that_are_missing_and_other_plans_are_refused():
    problem = problem_of(SPEC)
    ranks = of_heads(problem, 4)
    with refuses("observed", "3 of 4"):
        parity.diagnose_ranks(ranks[:3], problem, tensor=4)
    with refuses("either tensor or tokens", tensor=1, tokens=1):
        parity.diagnose_ranks(ranks, problem)
    with refuses("stages", stages="grad.query"):
        parity.unshard_stages([{"grad.query": np.ones(3)}] * 4, SPEC, ShardPlan(4))

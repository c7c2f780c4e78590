"""Bugs in sharding a layer over ranks: injected into each rank's computation in torch, located and
named.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.input_errors import rejects
from helpers.ranks import SPEC, computed, cut, of_heads, of_tokens, problem_of

import mha_torch
import parity
from mha_spec import AttentionSpec, Norm, Rope
from parity import ShardPlan
from parity.explain.diagnosis.bugs.ranks import NAMES, rank_bugs
from parity.explain.diagnosis.findings import Finding
from parity.explain.diagnosis.ranks import RankDiagnosis

WIDTH = AttentionSpec(32, 8, num_kv_heads=4, qk_norm=Norm(over="width"))


def tiled(problem, size):
    def inject(rank, own, spec):
        head = rank % problem.spec.num_kv_heads
        for name in ("k_proj", "v_proj"):
            for leaf in ("weight", "bias"):
                whole = problem.weights[f"{name}.{leaf}"]
                own[f"{name}.{leaf}"] = whole.reshape(
                    problem.spec.num_kv_heads, -1, *whole.shape[1:]
                )[head]
        return own, spec

    return inject


def with_bias(problem):
    def inject(rank, own, spec):
        return own | {"out_proj.bias": problem.weights["out_proj.bias"]}, replace(
            spec, out_bias=True
        )

    return inject


HEADS = {
    "rank-kv-heads-tiled": (lambda problem: tiled(problem, 4), [1, 2], "k"),
    "rank-first-heads": (
        lambda problem: cut(problem, "q_proj", "k_proj", "v_proj"),
        [1, 2, 3],
        "q",
    ),
    "rank-first-sinks": (lambda problem: cut(problem, "sinks"), [1, 2, 3], "attn_weights"),
    "rank-first-gate": (lambda problem: cut(problem, "gate_proj"), [1, 2, 3], "gate"),
    "rank-out-bias-on-each": (with_bias, [1, 2, 3], "output"),
}


def test_correct_ranks_pass_and_unshard():
    """Four correct ranks show no difference, and unsharding them restores the layer's stages."""
    problem = problem_of(SPEC)
    ranks = of_heads(problem, 4)
    assert not parity.diagnose_ranks(ranks, problem, tensor=4).is_wrong
    whole = parity.unshard_stages(ranks, SPEC, ShardPlan(4))
    assert whole.keys() == ranks[0].keys()
    parity.assert_parity(whole, problem=problem)


def names_in(diagnosis):
    """Return the names of the bugs of a diagnosis, which nothing else explains as well."""
    assert not any(finding.others for finding in diagnosis.findings)
    return [name for finding in diagnosis.findings for name in finding.bugs]


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("stages", ["all", "output"])
def test_head_sharding_bug_is_named(name, stages):
    """A bug in sharding heads is named, with the wrong ranks and their first wrong stage."""
    make, wrong, first = HEADS[name]
    problem = problem_of(SPEC)
    ranks = of_heads(problem, 4, make(problem))
    if stages == "output":
        ranks, first = [{"output": rank["output"]} for rank in ranks], "output"
    diagnosis = parity.diagnose_ranks(ranks, problem, tensor=4)
    assert list(diagnosis.wrong) == wrong
    assert {comparison.stage for comparison in diagnosis.wrong.values()} == {first}
    assert names_in(diagnosis) == [name]
    assert (diagnosis.likely_bug, diagnosis.first_wrong_stage) == (name, first)
    assert f"First wrong stage of rank {wrong[0]}: {first}, " in str(diagnosis)


def test_norm_over_rank_width_is_named():
    """A norm over the width of each rank instead of the whole width is named, for both ranks."""
    problem = problem_of(WIDTH)
    apart = replace(WIDTH, qk_norm=Norm(per_head=True))
    weights = {
        name: problem.weights[name].reshape(shape) for name, shape in apart.weight_shapes.items()
    }
    ranks = []
    for rank in range(2):
        share, own = parity.shard(weights, apart, ShardPlan(2), rank)
        own = replace(own, qk_norm=WIDTH.qk_norm)
        share = {name: share[name].reshape(shape) for name, shape in own.weight_shapes.items()}
        ranks.append(computed(share, own, problem.inputs["query"]))
    diagnosis = parity.diagnose_ranks(ranks, problem, tensor=2)
    assert list(diagnosis.wrong) == [0, 1]
    assert names_in(diagnosis) == ["rank-norm-over-own-width"]


def test_first_equal_explanation_is_printed():
    """The text has the first of other bugs that explain all ranks; with `verbose`, all of them."""
    finding = Finding("output", others=("second", "third"))
    diagnosis = RankDiagnosis({}, [finding])
    assert [text for _, text in diagnosis.lines() if text.startswith("  or ")] == [
        "  or second: the observed stages cannot distinguish them"
    ]
    assert "  or third: " in "\n".join(text for _, text in diagnosis.lines(verbose=True))


def test_token_sharded_ranks_are_right():
    """Four ranks that each have the stages of their own tokens show no difference."""
    problem = problem_of(SPEC)
    ranks = of_tokens(computed(problem.weights, SPEC, problem.inputs["query"]), 4)
    assert not parity.diagnose_ranks(ranks, problem, tokens=4).is_wrong


def test_rank_local_positions_are_named():
    """Positions that restart on each rank are named; rank 0 is first wrong at the scores."""
    problem = problem_of(SPEC)
    positions = torch.arange(8)[None] % 2
    ranks = of_tokens(computed(problem.weights, SPEC, problem.inputs["query"], positions), 4)
    diagnosis = parity.diagnose_ranks(ranks, problem, tokens=4)
    firsts = [diagnosis.wrong[rank].stage for rank in range(4)]
    assert firsts == [
        "scores",
        "q",
        "q",
        "q",
    ]  # rank 0 has right positions, but keys of the other ranks
    assert names_in(diagnosis) == ["rank-local-positions"]


def test_zigzag_token_order_is_named():
    """Context and output left in zigzag token order are named, and wrong on both ranks."""
    problem = problem_of(SPEC)
    stages = computed(problem.weights, SPEC, problem.inputs["query"])
    right, left = of_tokens(stages, 2), of_tokens(stages, 2, [[0, 1, 6, 7], [2, 3, 4, 5]])
    ranks = [
        own | {"output": moved["output"], "context": moved["context"]}
        for own, moved in zip(right, left, strict=True)
    ]
    diagnosis = parity.diagnose_ranks(ranks, problem, tokens=2)
    assert list(diagnosis.wrong) == [0, 1]
    assert {comparison.stage for comparison in diagnosis.wrong.values()} == {"context"}
    assert names_in(diagnosis) == ["rank-zigzag-left"]


def gradients(problem, weigh):
    """Return the input gradient of a torch layer whose backward pass has the attention weights
    `weigh(scores)`.
    """
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
    d_scores = wrong * (
        d_context @ grouped.detach().mT - (d_context * context).sum(-1, keepdim=True)
    )
    objective = (scores * d_scores).masked_fill(hidden, 0.0).sum() + (
        wrong @ grouped * d_context
    ).sum()
    return torch.autograd.grad(objective, x)[0]


@pytest.mark.parametrize("is_wrong", [False, True])
def test_gradient_of_local_sums_is_named(is_wrong):
    """An input gradient with softmax sums over local keys is named; a correct one passes."""
    problem = problem_of(AttentionSpec(32, 8, num_kv_heads=2, rope=Rope()))

    def by_parts(scores):
        parts = scores.unflatten(-1, (4, 2))
        return torch.softmax(parts, -1).nan_to_num().flatten(-2)

    grad = gradients(problem, by_parts if is_wrong else lambda scores: torch.softmax(scores, -1))
    diagnosis = parity.diagnose_ranks(
        [{"grad.query": part} for part in grad.chunk(4, 1)], problem, tokens=4
    )
    assert diagnosis.is_wrong == is_wrong
    assert names_in(diagnosis) == ["rank-local-sums"] * is_wrong


def test_rank_bugs_cover_all_names():
    """Over three problems, `rank_bugs` yields every name in `NAMES` and no other."""
    whole, width = problem_of(SPEC), problem_of(WIDTH)
    plain = problem_of(AttentionSpec(32, 8, rope=Rope()))
    layouts = [(whole, 4, 1), (width, 4, 1), (plain, 1, 2)]
    names = {
        bug.name
        for problem, tensor, tokens in layouts
        for bug in rank_bugs(problem, ShardPlan(tensor), tokens)
    }
    assert names == {*NAMES}


def test_unexplained_rank_error_is_unknown():
    """A factor of 1.1 on v of one rank, which no bug explains, is unknown on that rank."""
    problem = problem_of(SPEC)
    ranks = of_heads(problem, 4)
    ranks[2]["v"] = 1.1 * ranks[2]["v"]
    diagnosis = parity.diagnose_ranks(ranks, problem, tensor=4)
    assert list(diagnosis.wrong) == [2]
    assert names_in(diagnosis) == []
    assert diagnosis.likely_bug == ""
    assert str(diagnosis).startswith("Unexplained: ")


def test_unequal_shared_heads_raise():
    """Unsharding raises an error if ranks that share a key/value head differ in its k."""
    ranks = of_heads(problem_of(SPEC), 4)
    ranks[1]["k"] = ranks[1]["k"] + 1.0
    with rejects("k", "different values on rank 0"):
        parity.unshard_stages(ranks, SPEC, ShardPlan(4))


def test_invalid_rank_arguments_raise():
    """Missing ranks, a call without tensor or tokens, and unsharding of gradients raise errors."""
    problem = problem_of(SPEC)
    ranks = of_heads(problem, 4)
    with rejects("observed", "3 of 4"):
        parity.diagnose_ranks(ranks[:3], problem, tensor=4)
    with rejects("either tensor or tokens", tensor=1, tokens=1):
        parity.diagnose_ranks(ranks, problem)
    with rejects("stages", stages="grad.query"):
        parity.unshard_stages([{"grad.query": np.ones(3)}] * 4, SPEC, ShardPlan(4))

"""Results of each rank of a divided layer in torch, and bugs to inject there."""

import numpy as np
import torch

import mha_torch
import parity
from mha_spec import AttentionSpec, Gate, Rope
from parity import Case, ShardPlan

SPEC = AttentionSpec(32, 8, num_kv_heads=2, rope=Rope(), sinks=True, gate=Gate(per_head=True))


def problem_of(spec, seq_len=8, **options):
    return parity.make_problem(
        Case("ranks", spec, "", is_causal=True, seq_len=seq_len, **options), "float32"
    )


def computed(weights, spec, x, positions=None, q_norm=None):
    """Return the stages of a layer in torch, without its mask, for a rank or the whole layer."""
    weights = {name: torch.from_numpy(np.array(weight)) for name, weight in weights.items()}
    x, stages = torch.from_numpy(np.array(x)), {}
    project = mha_torch.project_with(weights, spec)
    named = (
        project
        if q_norm is None
        else lambda name, y: q_norm[name] if name in q_norm else project(name, y)
    )
    q, k, v = mha_torch.project_qkv(named, x, x, x, spec, positions)
    stages |= {"q": q, "k": k, "v": v}
    stages["scores"] = mha_torch.attention_scores(q, k, None, spec)
    hidden = torch.ones(stages["scores"].shape[2:], dtype=torch.bool).triu(1)
    stages["attn_weights"] = mha_torch.masked_softmax(
        stages["scores"], hidden, weights.get("sinks")
    )
    stages["context"] = mha_torch.attention_context(stages["attn_weights"], v)
    context = stages["context"]
    if spec.gate is not None:
        stages["gate"] = project("gate_proj", x)
        context = mha_torch.apply_gate(context, stages["gate"])
    output = mha_torch.combine_heads(context)
    return stages | {"output": project("out_proj", output) if spec.out_proj else output}


def of_heads(problem, size, inject=lambda rank, own, spec: (own, spec)):
    """Return the stages that each rank computes for its heads."""
    stages_of_ranks = []
    for rank in range(size):
        own, spec = parity.shard(problem.weights, problem.spec, ShardPlan(size), rank)
        stages_of_ranks.append(computed(*inject(rank, dict(own), spec), problem.inputs["query"]))
    return stages_of_ranks


def cut(problem, *names):
    """Return an injection that keeps only the first rows of weights that each rank holds whole."""

    def inject(rank, own, spec):
        return {
            name: problem.weights[name][: len(weight)]
            if name.partition(".")[0] in names
            else weight
            for name, weight in own.items()
        }, spec

    return inject


def of_tokens(stages, size, order=None):
    """Return the stages of a layer divided into the tokens of each rank."""
    rows = np.arange(stages["q"].shape[2]).reshape(size, -1) if order is None else order
    return [{name: x[..., own, :] for name, x in stages.items()} for own in rows]

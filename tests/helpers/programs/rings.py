"""Results of layers on torch processes, each with a part of the tokens, which tests check."""

from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import _context_parallel, context_parallel

import mha_torch
from mha_spec import Alibi, AttentionSpec, DynamicScaling, Rope
from mha_torch import parallel
from mha_torch.parallel import ring

BATCH, SEQ_LEN = 3, 16

WINDOW = AttentionSpec(32, 8, num_kv_heads=4, window_size=3, rope=Rope(), sinks=True)
"""A window within the part of one of four processes, so that parts are passed on only once."""


def inputs(spec, seq_len, dtype):
    generator = torch.Generator().manual_seed(7)
    x = torch.randn((BATCH, seq_len, spec.d_in), generator=generator)
    return x.to(dtype), torch.randn((BATCH, seq_len, spec.output_width), generator=generator).to(
        dtype
    )


def trained(
    layer,
    part=lambda x: x,
    whole=lambda x: x,
    *,
    seq_len=SEQ_LEN,
    dtype=torch.float32,
    summed=None,
    **options,
):
    """Return the output and all gradients of whole sequences."""
    x, cotangent = (part(tensor) for tensor in inputs(layer.full_spec, seq_len, dtype))
    x.requires_grad_()
    output = layer(x, **options)
    (output * cotangent).sum().backward()
    results = {"output": whole(output.detach()), "grad_x": whole(x.grad)}
    for name, parameter in layer.named_parameters():
        grad = (
            parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        )
        if summed is not None:
            dist.all_reduce(grad, group=summed)
        results[f"grad_{name}"] = grad.clone()
    return results


CAUSAL = {"is_causal": True, "key_padding_lengths": [16, 9, 3]}


RINGS = {
    "textbook": AttentionSpec(32, 8),
    "grouped": AttentionSpec(32, 8, num_kv_heads=2, rope=Rope(), qkv_bias=False),
    "window": WINDOW,
    "chunks": AttentionSpec(32, 8, chunk_size=6),
    "alibi": AttentionSpec(48, 12, num_kv_heads=4, alibi=Alibi()),
    "fused": AttentionSpec(32, 8, num_kv_heads=2, fused_qkv=True, soft_cap=2.0),
}
BOTH_WAYS = ("grouped", "window", "chunks", "everything")
"""Layers that are additionally called without causality and lengths."""


def calls(specs):
    """Return each call of a layer: its specification, the length of whole sequences, and the
    options.
    """
    calls_by_name = {f"{name}/causal": (spec, SEQ_LEN, CAUSAL) for name, spec in specs.items()}
    if len(specs) == 1:
        return calls_by_name
    calls_by_name |= {f"{name}/both ways": (specs[name], SEQ_LEN, {}) for name in BOTH_WAYS}
    # Parts with odd lengths stay in order.
    return calls_by_name | {
        "grouped/odd": (
            specs["grouped"],
            12,
            {"is_causal": True, "key_padding_lengths": [12, 7, 1]},
        )
    }


def local_positions(tokens, seq_len, device):
    """Return positions within the part of a process, instead of the whole sequence."""
    return torch.arange(seq_len, device=device)[None]


def left_in_zigzag(tokens, tensors, *, back=False, right=ring._to_zigzag):
    """Return halves without restoring their order."""
    return list(tensors) if back else right(tokens, tensors)


def average(context, logs, own, own_logs):
    """Join contexts of parts as if their sums were equal."""
    is_first = torch.isneginf(logs)
    joined = torch.where(
        is_first, own, torch.where(torch.isneginf(own_logs), context, (context + own) / 2)
    )
    return joined, torch.logaddexp(logs, own_logs)


def by_local_sums(part, table, spec, logs, *others, right=ring._block_backward):
    """Compute a gradient from the sums of each part separately."""
    _, own_logs, _ = ring._attended(part, table, spec)
    return right(part, table, spec, own_logs, *others)


BUGS = {
    "local positions": (ring.RingAttention, "positions", local_positions),
    "left in zigzag": (ring, "_to_zigzag", left_in_zigzag),
    "sums of parts not weighed": (ring, "_joined", average),
    "local sums backward": (ring, "_block_backward", by_local_sums),
}


def mistaken(mesh, make, spec):
    """Return the results of a layer with each bug in the ring."""
    results = {}
    for name, where in BUGS.items():
        with mock.patch.object(*where):
            results[name] = of_tokens(mesh, make, {"grouped": spec})["grouped/causal"]
    return results


def of_tokens(mesh, make, specs):
    """Return the results of every layer, with tokens divided by `parallel.shard`."""
    group, size, rank = mesh.get_group(), mesh.size(), mesh.get_local_rank()

    def part(x):
        return x.chunk(size, 1)[rank].clone()

    def whole(x):
        parts = [torch.empty_like(x) for _ in range(size)]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, 1)

    def computed(spec, **options):
        layer = parallel.shard(
            make(mha_torch.MultiHeadSelfAttention, spec), mesh, tokens=mesh.mesh_dim_names[0]
        )
        return trained(layer, part, whole, summed=group, **options)

    return {
        name: computed(spec, seq_len=seq_len, **options)
        for name, (spec, seq_len, options) in calls(specs).items()
    }


def counted(mesh, make):
    """Return how often each process passes parts on, and how many scores it computes, by layer and
    call.
    """
    counts = {}
    for name, spec in {"textbook": AttentionSpec(32, 8), "window": WINDOW}.items():
        for kind in ("causal", "both ways"):
            layer = make(mha_torch.MultiHeadSelfAttention, spec)
            parallel.shard(layer, mesh, tokens=mesh.mesh_dim_names[0])
            passed, scores = [], []

            def pass_on(*arguments, right=ring._send_next, to=passed):
                to.append(len(arguments[1]))
                return right(*arguments)

            def score(part, *arguments, right=ring._scores, to=scores):
                scores = right(part, *arguments)
                to.append(scores.shape[2] * scores.shape[3])
                return scores

            with mock.patch.multiple(ring, _send_next=pass_on, _scores=score), torch.no_grad():
                layer(torch.zeros(1, SEQ_LEN // mesh.size(), 32), is_causal=kind == "causal")
            every = [torch.zeros(2, dtype=torch.int64) for _ in range(mesh.size())]
            dist.all_gather(every, torch.tensor([len(passed), sum(scores)]), group=mesh.get_group())
            counts[f"{name}/{kind}"] = [pair.tolist() for pair in every]
    return counts


def with_heads(grid, make, spec):
    """Return results with tokens divided over one dimension of a mesh and heads over the other."""
    group, rank = grid["data"].get_group(), grid["data"].get_local_rank()

    def whole(x):
        parts = [torch.empty_like(x) for _ in range(2)]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, 1)

    layer = parallel.shard(
        make(mha_torch.MultiHeadSelfAttention, spec), grid, heads="heads", tokens="data"
    )
    return trained(layer, lambda x: x.chunk(2, 1)[rank].clone(), whole, summed=group, **CAUSAL)


def not_finite(mesh, make):
    """Return which output tokens are NaN if a visible input token and one of padding are, and
    whether all gradients are finite if only the latter is.
    """
    layer = make(mha_torch.MultiHeadSelfAttention, AttentionSpec(32, 8))
    parallel.shard(layer, mesh, tokens=mesh.mesh_dim_names[0])
    size, rank, group = mesh.size(), mesh.get_local_rank(), mesh.get_group()
    x, _ = inputs(layer.full_spec, SEQ_LEN, torch.float32)
    x[1, 12] = torch.nan  # padding
    own = x.chunk(size, 1)[rank].clone().requires_grad_()
    layer(own, **CAUSAL).sum().backward()
    are_finite = all(bool(torch.isfinite(parameter.grad).all()) for parameter in layer.parameters())
    x[0, 10] = torch.nan  # visible to later tokens
    output = layer(x.chunk(size, 1)[rank].clone(), **CAUSAL)
    marks = [torch.zeros(BATCH, SEQ_LEN // size, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(marks, torch.isnan(output.detach()).any(-1).long(), group=group)
    return torch.cat(marks, 1).tolist(), are_finite


# ---- torch's own ring ----------------------------------------------------------------------------


@contextmanager
def kernel_of_cpu():
    """Use torch's kernel for a CPU in torch's ring, whose table of kernels does not contain it."""
    attention = _context_parallel._attention
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

    def wrapped(mesh, *tensors):
        return tuple(DTensor.from_local(x, mesh, [Shard(2)], run_check=False) for x in tensors)

    def go(_, arguments, named):
        q, k, v = (x.to_local() for x in arguments[:3])
        dropout, causal = (*arguments[3:5], *(0.0, False)[len(arguments[3:5]) :])
        results = attention._templated_ring_attention(
            arguments[0].device_mesh.get_group(),
            2,
            forward,
            query=q,
            key=k,
            value=v,
            is_causal=named.get("is_causal", causal),
            dropout_p=named.get("dropout_p", dropout),
            scale=named.get("scale"),
        )
        return wrapped(arguments[0].device_mesh, *results)

    def back(_, arguments, named):
        grad, q, k, v, out, logs = (x.to_local() for x in arguments[:6])
        results = attention._templated_ring_attention_backward(
            arguments[0].device_mesh.get_group(),
            2,
            backward,
            grad_out=grad,
            grad_out_name="grad_out",
            query=q,
            key=k,
            value=v,
            out=out,
            logsumexp=logs,
            dropout_p=arguments[6],
            is_causal=arguments[7],
            scale=named.get("scale"),
        )
        return wrapped(arguments[0].device_mesh, *results)

    with mock.patch.object(
        attention, "custom_ops", attention.custom_ops | {forward: go, backward: back}
    ):
        yield


def by_torch(mesh, make):
    """Return the results of a layer in torch's own `context_parallel`, and the errors of
    unsupported options.
    """
    spec = AttentionSpec(32, 4, rope=Rope())
    layer = make(mha_torch.MultiHeadSelfAttention, spec)
    x, cotangent = inputs(spec, SEQ_LEN, torch.float32)
    positions, rejected, gradients = torch.arange(SEQ_LEN)[None].clone(), {}, {}
    options = {
        "positions": {"is_causal": True},
        "key_padding_lengths": {
            "positions": positions,
            "key_padding_lengths": CAUSAL["key_padding_lengths"],
        },
        "mask": {
            "positions": positions,
            "mask": torch.zeros(1, 1, SEQ_LEN, SEQ_LEN, dtype=torch.bool),
        },
    }
    with (
        kernel_of_cpu(),
        context_parallel(mesh, buffers=[x, cotangent, positions], buffer_seq_dims=[1, 1, 1]),
    ):
        own = x.detach().clone().requires_grad_()
        output = layer(own, is_causal=True, positions=positions)
        (output * cotangent).sum().backward()
        for name, parameter in layer.named_parameters():
            dist.all_reduce(parameter.grad, group=mesh.get_group())
            gradients[f"grad_{name}"] = parameter.grad.clone()
        for name, keywords in options.items():
            try:
                layer(own, **keywords)
                rejected[name] = ""
            except ValueError as error:
                rejected[name] = str(error)
    return gradients, rejected


def error_of(call):
    """Return the kind and the text of the error of a call, or an empty string."""
    try:
        call()
    except (TypeError, ValueError) as error:
        return f"{'TypeError' if isinstance(error, TypeError) else 'ValueError'}: {error}"
    return ""


def rejected(mesh, make):
    """Return the errors of layers whose tokens cannot be divided."""
    name = mesh.mesh_dim_names[0]
    x = torch.zeros(1, 2, 32)

    def made(spec=RINGS["textbook"], kind=mha_torch.MultiHeadAttention):
        return parallel.shard(make(kind, spec), mesh, tokens=name)

    hidden = torch.zeros(
        1, 1, 2 * mesh.size(), 2 * mesh.size(), dtype=torch.bool
    )  # for the whole sequence
    return {
        "no such dimension": error_of(
            lambda: parallel.shard(
                make(mha_torch.MultiHeadAttention, WINDOW), mesh, tokens="sequence"
            )
        ),
        "neither": error_of(
            lambda: parallel.shard(make(mha_torch.MultiHeadAttention, WINDOW), mesh)
        ),
        "no layer": error_of(lambda: parallel.shard(torch.nn.Linear(2, 2), mesh, tokens=name)),
        "cache": error_of(lambda: made(kind=mha_torch.MultiHeadAttentionWithCache)),
        "shared_kv": error_of(lambda: made(AttentionSpec(32, 8, shared_kv=True))),
        "rope": error_of(lambda: made(replace(WINDOW, rope=Rope(scaling=DynamicScaling(2.0, 8))))),
        "weights": error_of(lambda: made()(x, need_weights=True)),
        "mask": error_of(lambda: made()(x, mask=hidden)),
        "dropout": error_of(lambda: made(AttentionSpec(32, 8, dropout=0.5))(x)),
        "uneven": error_of(lambda: made()(x[:, : 1 + (mesh.get_local_rank() == 0)])),
        "uneven, lengths": error_of(  # lengths that fit only the first part
            lambda: made()(
                x[:, : 1 + (mesh.get_local_rank() == 0)], key_padding_lengths=[mesh.size() + 1]
            )
        ),
        "lengths": error_of(lambda: made()(x, key_padding_lengths=[2 * mesh.size() + 1])),
        "lengths of heads": error_of(
            lambda: parallel.ring_attention(
                *(x[:, None],) * 3, mesh.get_group(), key_padding_lengths=[-1]
            )
        ),
    }

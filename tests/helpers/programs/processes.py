"""A program: results of layers on four torch processes, written to found.pt in the given folder.

test_sharded.py of mha_torch checks the results, and imports the layers from here.
"""

import sys
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import mha_torch
import parity
from helpers.divided_layers import EVERYTHING, LATENT
from helpers.programs import rings
from helpers.programs.rings import error_of
from mha_spec import Alibi, AttentionSpec, Gate, Latent, Norm, Rope
from mha_torch import parallel
from mha_torch.kernels.nonfinite import contained

PROCESSES = 4
BATCH, SEQ_LEN, CAPACITY = 3, 6, 9
LENGTHS = [6, 4, 1]  # lengths of the sequences, ragged
STEPS = 3
SEED = 5

WIDE = Norm("layer", over="width", bias=True)
SPECS = {
    "textbook": AttentionSpec(32, 8),
    "grouped": AttentionSpec(
        32, 8, num_kv_heads=4, head_dim=8, rope=Rope(), qkv_bias=False, out_bias=False
    ),
    "shared-keys": AttentionSpec(32, 8, num_kv_heads=2, rope=Rope(), qk_norm=Norm(), v_norm=Norm()),
    "one-key": AttentionSpec(32, 8, num_kv_heads=1, head_dim=8),
    "parts-of-groups": AttentionSpec(48, 12, num_kv_heads=3, sinks=True),
    "everything": EVERYTHING,
    "alibi": AttentionSpec(48, 12, num_kv_heads=4, alibi=Alibi(scaled=True)),
    "width": AttentionSpec(
        32, 8, num_kv_heads=4, head_dim=6, rope=Rope(), qk_norm=Norm(over="width", weight="1+w")
    ),
    "width-shared-keys": AttentionSpec(
        32, 8, num_kv_heads=2, qk_norm=WIDE, v_norm=Norm(over="width", weight=None)
    ),
    "width-parts-of-groups": AttentionSpec(
        48, 12, num_kv_heads=3, clip_qkv=1.5, qk_norm=WIDE, v_norm=WIDE
    ),
    "capped": AttentionSpec(32, 8, soft_cap=2.0, window_size=3, clip_qkv=1.5),
    "no-out-proj": AttentionSpec(32, 8, num_kv_heads=4, out_proj=False),
    "latent": LATENT,
    "latent-rope": replace(LATENT, rope=Rope(rotary_dim=4, rotated="last"), latent=Latent(12, 4)),
}
SHARED = ("shared-keys", "one-key", "parts-of-groups", "width-shared-keys", "width-parts-of-groups")
DIVIDED = {
    2: [name for name in SPECS if name not in SHARED[:-2]],
    4: ["everything", *SHARED],
}
"""Layers by number of processes. Two suffice for most; with four, some processes share keys."""

RINGS = rings.RINGS | {name: SPECS[name] for name in ("everything", "latent-rope")}
"""Layers whose tokens are divided."""

FULLY_SHARDED = {
    name: SPECS[name] for name in ("shared-keys", "everything", "latent", "width-shared-keys")
}
FULLY_SHARDED["fused"] = AttentionSpec(32, 8, num_kv_heads=2, fused_qkv=True)


@dataclass(frozen=True)
class Here:
    """The part of a process: its rank and the size of a dimension of a mesh."""

    mesh: object = None
    size: int = 1
    rank: int = 0

    def of_heads(self, x, axis):
        """Return the part of the process's own heads."""
        return x.tensor_split(self.size, axis)[self.rank]

    def whole(self, x, axis):
        """Return the parts of all processes, joined along heads, or the full distributed tensor."""
        if hasattr(x, "full_tensor"):
            return x.full_tensor().clone()  # waits for pending communication
        if self.size == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous(), group=self.mesh.get_group())
        return torch.cat(parts, axis)


def make(kind, spec, dtype=torch.float32):
    """Return a layer with the same weights in every process, none of them 0 or 1."""
    torch.manual_seed(0)
    layer = kind(spec)
    with torch.no_grad():
        for weight in layer.parameters():
            weight += 0.1 * torch.randn(weight.shape)
    return layer.to(dtype)


def random(*shape, dtype=torch.float32, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def trained(layer, here=None, dtype=torch.float32, **options):
    """Return the output and all gradients of a forward and backward pass."""
    here, spec = here or Here(), layer.full_spec
    x = random(BATCH, SEQ_LEN, spec.d_in, dtype=dtype).requires_grad_()
    bias = random(1, spec.num_heads, SEQ_LEN, SEQ_LEN, dtype=dtype, seed=2)
    options = {
        "is_causal": True,
        "key_padding_lengths": LENGTHS,
        "bias": here.of_heads(bias, 1),
        **options,
    }
    output, attn_weights = layer(x, **options)
    cotangent = random(BATCH, SEQ_LEN, spec.output_width, dtype=dtype, seed=3)
    if not spec.out_proj:
        cotangent = here.of_heads(cotangent, -1)
    (output * cotangent).sum().backward()
    output = output.detach().clone()  # waits for pending communication
    results = {
        "output": output if spec.out_proj else here.whole(output, -1),
        "grad_x": x.grad.clone(),
    }
    if attn_weights is not None:
        results["attn_weights"] = here.whole(attn_weights.detach(), 1)
    return results | {
        f"grad_{name}": here.whole(parameter.grad, 0)
        for name, parameter in layer.named_parameters()
    }


@torch.no_grad()
def decoded(layer, here=None, dtype=torch.float32, cache=None):
    """Return the outputs of a ragged prompt and a few steps, and the shapes of the process's
    cache.
    """
    here, spec, results = here or Here(), layer.full_spec, {}
    x = random(BATCH, SEQ_LEN + STEPS, spec.d_in, dtype=dtype)
    cache = layer.init_cache(BATCH, CAPACITY) if cache is None else cache
    results["prompt"], cache = layer(x[:, :SEQ_LEN], cache, new_lengths=LENGTHS)
    for step in range(STEPS):
        results[f"step_{step}"], cache = layer(x[:, SEQ_LEN + step, None], cache)
    results = {
        name: output.clone() if spec.out_proj else here.whole(output, -1)
        for name, output in results.items()
    }
    return results, {name: tuple(x.shape) for name, x in cache.slots.items()}


def cached_kind(spec):
    return (
        mha_torch.MultiHeadAttentionWithCache
        if spec.latent is None
        else mha_torch.MultiHeadLatentAttention
    )


def usual_plan(spec, **options):
    """Return the plan of common tutorials, without parts that belong to heads."""
    plan = {name: ColwiseParallel(**options) for name in ("q_proj", "k_proj", "v_proj")}
    return plan | ({"out_proj": RowwiseParallel()} if spec.out_proj else {})


# ---- Results -------------------------------------------------------------------------------------


def by_shard(here):
    """Return the results of layers whose heads are divided by `parallel.shard`."""
    results = {}
    for name in DIVIDED[here.size]:
        spec = SPECS[name]
        layer = parallel.shard(make(mha_torch.MultiHeadAttention, spec), here.mesh, heads="heads")
        results[name] = (
            trained(layer, here),
            {name: tuple(x.to_local().shape) for name, x in layer.named_parameters()},
        )
        layer = parallel.shard(make(cached_kind(spec), spec), here.mesh, heads="heads")
        results[f"{name}/decoded"] = decoded(layer, here)
    layer = parallel.shard(make(mha_torch.MultiHeadAttention, EVERYTHING), here.mesh, heads="heads")
    return results | {"with weights": trained(layer, here, need_weights=True)}


def moved(here):
    """Return the number of calls of each collective, forward and backward."""
    counts = {}

    def counts_of(mode):
        return {
            str(name).rpartition(".")[2]: count for name, count in mode.get_comm_counts().items()
        }

    def counted(name, layer, x=None):
        x = random(BATCH, 8, 32).requires_grad_() if x is None else x
        with CommDebugMode() as forward:
            output, _ = layer(x)
        with CommDebugMode() as backward:
            output.sum().backward()
        x.grad.clone()  # waits for pending communication
        counts[name] = counts_of(forward), counts_of(backward)

    for name in ("textbook", "grouped", "everything", "latent", "no-out-proj", "width"):
        counted(
            name,
            parallel.shard(
                make(mha_torch.MultiHeadAttention, SPECS[name]), here.mesh, heads="heads"
            ),
        )
    spec = SPECS["textbook"]
    # As for a layer in a model: by default, FSDP keeps the weights of the outermost module.
    layer = fully_shard(
        make(mha_torch.MultiHeadAttention, spec), mesh=here.mesh, reshard_after_forward=True
    )
    counted("fully sharded", layer)
    layer = make(mha_torch.MultiHeadAttention, spec)
    counted("data parallel", DistributedDataParallel(layer, process_group=here.mesh.get_group()))
    layer = make(mha_torch.MultiHeadAttention, spec)
    plan = {
        **parallel.plan(layer),
        "out_proj": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    x = distribute_tensor(random(BATCH, 8, spec.d_in), here.mesh, [Shard(1)]).requires_grad_()
    counted("tokens divided outside", parallelize_module(layer, here.mesh, plan), x=x)
    layer = parallel.shard(
        make(mha_torch.MultiHeadAttentionWithCache, spec), here.mesh, heads="heads"
    )
    cache = layer.init_cache(BATCH, CAPACITY)
    with torch.no_grad(), CommDebugMode() as mode:
        layer(random(BATCH, 1, spec.d_in), cache)[0].clone()
    counts["a step"] = counts_of(mode), {}
    return counts


GIVEN = AttentionSpec(32, 8, num_kv_heads=4)
NORMED = replace(GIVEN, qk_norm=Norm(over="width"))


def with_inputs(layer, distribute=lambda x: x, dtype=torch.float32):
    """Return output and gradients of a layer with more inputs than tokens, each distributed by
    `distribute`.
    """
    mask = random(BATCH, 8, SEQ_LEN, SEQ_LEN, seed=1) > 1
    inputs = {
        "x": random(BATCH, SEQ_LEN, 32, dtype=dtype),
        "bias": random(8, SEQ_LEN, SEQ_LEN, seed=2, dtype=dtype),
    }
    leaves = {name: distribute(x).requires_grad_() for name, x in inputs.items()}
    lengths = distribute(torch.tensor(LENGTHS))
    output = layer(
        leaves["x"],
        bias=leaves["bias"],
        mask=distribute(mask),
        key_padding_lengths=lengths,
        is_causal=True,
    )
    output.square().sum().backward()
    grads = {
        name: x.grad.full_tensor() if hasattr(x.grad, "full_tensor") else x.grad
        for name, x in leaves.items()
    }
    return {
        "output": output.detach().clone(),
        **{f"grad_{name}": grad.clone() for name, grad in grads.items()},
    }


def rows_not_finite(layer, heads=slice(None)):
    """Return which output rows are non-finite if one token is, and only the first head attends to
    it, in a contained kernel.
    """
    x, hides = random(1, SEQ_LEN, 32), torch.zeros(1, 8, SEQ_LEN, SEQ_LEN, dtype=torch.bool)
    x[:, 2], hides[:, 1:, :, 2] = torch.nan, True
    kernel, layer.kernel = layer.kernel, contained(layer.kernel)
    output = layer(x, mask=hides[:, heads], is_causal=True)
    layer.kernel = kernel
    return (~output.isfinite()).any(-1)[0]


def padded(layer):
    """Return the output and the gradients of a layer with NaN in its padding."""
    x, is_real = random(BATCH, SEQ_LEN, 32), torch.arange(SEQ_LEN) < torch.tensor(LENGTHS)[:, None]
    x[~is_real] = torch.nan
    output = layer(x, key_padding_lengths=LENGTHS, is_causal=True)
    output[is_real].square().sum().backward()
    grads = [parameter.grad for parameter in layer.parameters()]
    layer.zero_grad()
    return [output[is_real].detach().clone(), *(Here().whole(grad, 0) for grad in grads)]


def beside(here):
    """Return results with inputs in addition to local tokens, and of compiled and distributed
    calls.
    """
    layer = parallel.shard(make(mha_torch.MultiHeadSelfAttention, GIVEN), here.mesh, heads="heads")
    results = {
        "given": with_inputs(layer, lambda x: distribute_tensor(x, here.mesh, [Replicate()]))
    }
    layer.zero_grad()
    count = 8 // here.size
    own = rows_not_finite(layer, slice(here.rank * count, (here.rank + 1) * count)).int()
    results["not finite"] = [torch.empty_like(own) for _ in range(here.size)]
    dist.all_gather(results["not finite"], own, group=here.mesh.get_group())
    results["padded"] = padded(layer)
    normed = parallel.shard(
        make(mha_torch.MultiHeadSelfAttention, NORMED), here.mesh, heads="heads"
    )
    x = random(BATCH, SEQ_LEN, 32)
    for name, module in {"compiled": layer, "compiled norms": normed}.items():
        results[name] = []
        for f in (torch.compile(module, backend="eager", fullgraph=True), module):
            leaf = x.clone().requires_grad_()
            output = f(leaf, is_causal=True)
            output.square().sum().backward()
            results[name] += [torch.cat([output.detach(), leaf.grad])]
    layer = make(mha_torch.MultiHeadAttentionWithCache, GIVEN)
    whole = layer(x, layer.init_cache(BATCH, CAPACITY), new_lengths=LENGTHS)[0]
    plan = parallel.plan(layer) | {"out_proj": RowwiseParallel(use_local_output=False)}
    layer = parallelize_module(layer, here.mesh, plan)
    output, _ = layer(x, layer.init_cache(BATCH, CAPACITY), new_lengths=LENGTHS)
    return results | {"ragged": [output.full_tensor().detach().clone(), whole.detach().clone()]}


def rejected(here):
    """Return the errors of layers that cannot be divided."""
    x = random(BATCH, SEQ_LEN, 32)

    def divided(name):
        return parallel.shard(
            make(mha_torch.MultiHeadAttention, SPECS[name]), here.mesh, heads="heads"
        )

    def error_of_division(spec, plan=None, **options):
        layer = make(mha_torch.MultiHeadAttention, spec)
        if plan is None:
            return error_of(lambda: parallel.shard(layer, here.mesh, heads="heads"))
        layer = parallelize_module(layer, here.mesh, plan(spec))
        return error_of(lambda: layer(x, **options))

    def packed(_):
        return {"qkv_proj": ColwiseParallel(), "out_proj": RowwiseParallel()}

    def one_left_out(name):
        return lambda spec: {key: style for key, style in usual_plan(spec).items() if key != name}

    def of_latents(_):
        return {name: ColwiseParallel() for name in ("q_proj", "kv_b_proj")} | {
            "out_proj": RowwiseParallel()
        }

    return {
        "uneven": error_of_division(AttentionSpec(32, 9, head_dim=4)),
        "fused_qkv": error_of_division(AttentionSpec(32, 8, fused_qkv=True)),
        "shared_kv": error_of_division(AttentionSpec(32, 8, shared_kv=True)),
        "shared keys with norms of their own": error_of_division(
            AttentionSpec(32, 8, num_kv_heads=1, qk_norm=Norm(per_head=True))
        ),
        "outputs dropped": error_of_division(AttentionSpec(32, 8, output_dropout=0.1)),
        "divided already": error_of(
            lambda: parallel.shard(divided("textbook"), here.mesh, heads="heads")
        ),
        "no such dimension": error_of(
            lambda: parallel.shard(
                make(mha_torch.MultiHeadAttention, SPECS["textbook"]), here.mesh, heads="tensor"
            )
        ),
        "no layer of ours": error_of(lambda: parallel.plan(nn.Linear(2, 2))),
        "by hand": error_of_division(SPECS["grouped"], usual_plan),
        "by hand, distributed": error_of_division(
            SPECS["grouped"], partial(usual_plan, use_local_output=False)
        ),
        "by hand, some projections": error_of_division(SPECS["grouped"], one_left_out("q_proj")),
        "by hand, whole output": error_of_division(
            SPECS["textbook"],
            lambda spec: {
                name: style
                for name, style in parallel.plan(mha_torch.MultiHeadAttention(spec)).items()
                if name != "out_proj"
            },
        ),
        "by hand, fused_qkv": error_of_division(AttentionSpec(32, 8, fused_qkv=True), packed),
        "norm over the width left out": error_of_division(
            SPECS["width"],
            lambda spec: {
                name: style
                for name, style in parallel.plan(mha_torch.MultiHeadAttention(spec)).items()
                if name != "k_norm"
            },
        ),
        "by hand, gate": error_of_division(
            AttentionSpec(32, 8, gate=Gate()),
            lambda _: {"gate_proj": ColwiseParallel(), "out_proj": RowwiseParallel()},
        ),
        "by hand, latent": error_of_division(
            replace(LATENT, latent=Latent(12, 4), gate=None), of_latents
        ),
        "its own style last": error_of(
            lambda: parallelize_module(
                layer := make(mha_torch.MultiHeadAttention, SPECS["textbook"]),
                here.mesh,
                dict(reversed(parallel.plan(layer).items())),
            )
        ),
        "distributed, to a function": error_of(
            lambda: mha_torch.multi_head_attention(
                x, dict(divided("textbook").named_parameters()), SPECS["textbook"]
            )
        ),
        "bias of all heads": error_of(
            lambda: divided("textbook")(x, bias=random(1, 8, SEQ_LEN, SEQ_LEN))
        ),
        "cache of all heads": error_of(
            lambda: parallel.shard(
                make(mha_torch.MultiHeadAttentionWithCache, SPECS["grouped"]),
                here.mesh,
                heads="heads",
            )(x, mha_torch.init_cache(BATCH, 4, CAPACITY, 8))
        ),
    }


def fully_sharded(grid, row):
    """Return the results of layers drawn from the meta device, with weights over all processes or a
    grid with heads.
    """
    results = {}
    for name, spec in FULLY_SHARDED.items():
        for is_grid in (False, True):
            if is_grid and spec.fused_qkv:
                continue
            with torch.device("meta"):
                layer = mha_torch.MultiHeadAttention(spec)
            here = None
            if is_grid:
                parallel.shard(layer, grid, heads="heads")
                here = Here(grid["heads"], 2, grid["heads"].get_local_rank())
            fully_shard(layer, mesh=grid["data"] if is_grid else row)
            layer.to_empty(device="cpu")
            torch.manual_seed(SEED + dist.get_rank())  # all processes use the draw of the first one
            layer.reset_parameters()
            drawn = {
                name: weight.full_tensor().clone() for name, weight in layer.state_dict().items()
            }
            results[f"{name}/grid" if is_grid else name] = drawn, trained(layer, here)
    return results


def narrowed(row):
    """Return the output of a layer whose projections are fully sharded separately, each casting its
    weights.
    """
    layer = make(mha_torch.MultiHeadAttention, SPECS["textbook"])
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    for projection in layer.children():
        fully_shard(projection, mesh=row, mp_policy=policy)
    with torch.no_grad():
        return layer(random(BATCH, SEQ_LEN, 32))[0].clone()


def carried(here):
    """Return weights read from a divided layer, and loaded into another one."""
    layer = parallel.shard(make(mha_torch.MultiHeadAttention, EVERYTHING), here.mesh, heads="heads")
    weights = parity.weights_of(layer)
    other = parallel.shard(mha_torch.MultiHeadAttention(EVERYTHING), here.mesh, heads="heads")
    parity.load_into(other, weights, EVERYTHING)
    return {name: parity.to_torch(weight) for name, weight in weights.items()}, {
        name: parameter.full_tensor().clone() for name, parameter in other.named_parameters()
    }


def stepped(here):
    """Return the weights after clipping gradients and a step of AdamW, and the norm."""
    layer = make(mha_torch.MultiHeadAttention, SPECS["shared-keys"])
    if here is not None:
        parallel.shard(layer, here.mesh, heads="heads")
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    trained(layer, here)
    norm = nn.utils.clip_grad_norm_(layer.parameters(), 0.5)
    optimizer.step()
    weights = {
        name: (here or Here()).whole(parameter.detach(), 0)
        for name, parameter in layer.named_parameters()
    }
    return {
        "norm": (norm.full_tensor() if here is not None else norm).reshape(1).clone(),
        **weights,
    }


def ringed(mesh):
    """Return the results of layers whose tokens are divided."""
    return {
        "layers": rings.of_tokens(mesh, make, RINGS),
        "mistaken": rings.mistaken(mesh, make, RINGS["grouped"]) if mesh.size() == 2 else {},
        "counted": rings.counted(mesh, make),
        "not finite": rings.not_finite(mesh, make),
        "rejected": rings.rejected(mesh, make),
        "torch": rings.by_torch(mesh, make),
    }


def run(rank, size, folder):
    """Run one process; the first one writes the results."""
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size
    )
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "heads"))
    row = init_device_mesh("cpu", (4,), mesh_dim_names=("heads",))
    of_row, two = Here(row, size, rank), grid["heads"]
    results = {"stepped": stepped(of_row), "carried": carried(of_row)}
    if rank < 2:  # the other two would compute the same
        here = Here(two, 2, rank)
        results |= {part.__name__: part(here) for part in (moved, rejected, beside)}
        results[2] = {"shard": by_shard(here), "ring": ringed(two)}
    results[4] = {"shard": by_shard(of_row), "ring": ringed(row)}
    results |= {"fully sharded": fully_sharded(grid, row), "narrowed": narrowed(row)}
    results["tokens and heads"] = rings.with_heads(grid, make, EVERYTHING)
    if rank == 0:
        torch.save(results, f"{folder}/found.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    # The processes are forks of this one, because imports take longest, including the imports of
    # the first call.
    layer = make(mha_torch.MultiHeadSelfAttention, GIVEN)
    torch.compile(layer, backend="eager")(random(BATCH, SEQ_LEN, 32))
    parity.weights_of(layer)
    torch.multiprocessing.start_processes(
        run, (PROCESSES, sys.argv[1]), PROCESSES, start_method="fork"
    )

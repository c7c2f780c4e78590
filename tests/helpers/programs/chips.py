"""A program: layers whose heads are divided over the chips of a mock board, each with its own
values.

It prints the results that test_parallel.py checks, as JSON. It runs in its own process, because a
process can use only one board.
"""

import json
import sys
from contextlib import ExitStack, contextmanager
from unittest import mock

import numpy as np
import torch
import ttnn

import mha_tt
import ttnn_mock
from mha_spec import Alibi, AttentionSpec, Norm, Rope
from mha_tt import parallel
from mha_tt.device import upload_parts
from mha_tt.parallel import local
from parity.measure.backends import tt as backend
from parity.measure.core.cases import CASES
from parity.measure.core.weights import random_weights
from parity_lab.mesh import tt as tt_mesh
from parity_lab.mesh.plan import MeshPlan
from parity_lab.mesh.run import run_on_mesh

COMPARED = {
    "n300": {
        ((1, 2), 1): {
            "bfloat16": [
                *(
                    "mqa",
                    "value-head-dim-fused-qkv",
                    "latent-window",
                    "relative-bias-padded",
                    "norm-per-head",
                    "gate",
                ),
                *("no-out-proj", "decode-sinks", "decode-latent-yarn", "ragged"),
            ],
            "float32": ["gqa-causal", "bias-causal", "padding", "decode-gqa-rope"],
        },
    },
    "t3000": {
        ((1, 8), 1): {
            "bfloat16": ["fused-qkv-gqa", "nan-visible-decode"],
            "float32": ["gqa-causal"],
        },
        ((2, 4), 1): {"bfloat16": ["gate-per-head"]},
        ((2, 4), 0): {"bfloat16": ["latent-yarn"]},
    },
}
"""Cases by their mesh, the dimension that divides their heads, and their dtype."""


@contextmanager
def on(mesh, axis):
    """Run the backend on a mesh, with heads over one of its dimensions."""
    here = mock.patch.object(backend, "open_device", return_value=mesh)
    with here, mock.patch.multiple(tt_mesh, HEADS=axis, check_devices=mock.DEFAULT):
        yield MeshPlan(tensor=tuple(mesh.shape)[axis])


def comparisons_of(plan, names, dtype="float32"):
    """Return the number of compared stages, those outside the undivided layer's budget, and the
    collectives.
    """
    report = run_on_mesh([CASES[name] for name in names], ["tt"], plan, [dtype])
    failed = {
        f"{comparison.case} {comparison.dtype} {comparison.stage}": comparison.reason
        for comparison in report.comparisons
        if not comparison.passed
    }
    sent = [
        (collective.case, collective.program, collective.counted, collective.ideal)
        for collective in report.collectives
    ]
    return len(report.comparisons), failed, sent


# ---- Controls ------------------------------------------------------------------------------------


def reversed_keys(spec, size, chip, right=local.local_heads):
    """Return the query heads of a chip and the key/value heads of another one."""
    return right(spec, size, chip)[0], right(spec, size, size - 1 - chip)[1]


def with_bias_on_all(weights, spec, size, chip, right=local.local_weights):
    """Return weights with the bias of out_proj on every chip, although it must be added once."""
    return right(weights, spec, size, chip) | {"out_proj.bias": weights["out_proj.bias"]}


def without_sum(x, axis):
    """Return the output of a chip's own heads."""
    return x


def twice(x, axis, right=local.all_reduce):
    """Return the sum, computed once more than necessary."""
    return (
        x
        if axis is None
        else right(ttnn.multiply(right(x, axis), 1 / x.device().shape[axis]), axis)
    )


CONTROLS = {
    "without all_reduce": [(local, "all_reduce", without_sum)],
    "key/value heads in the wrong order": [(local, "local_heads", reversed_keys)],
    "the bias of out_proj on every chip": [(local, "local_weights", with_bias_on_all)],
}


def controls(plan):
    """Return the failed stages with each bug, and the results with a redundant sum."""
    failures = {}
    for title, bugs in CONTROLS.items():
        with ExitStack() as stack:
            for where, what, wrong in bugs:
                stack.enter_context(mock.patch.object(where, what, wrong))
            failures[title] = comparisons_of(plan, ["gqa-causal"])[1]
    with mock.patch.object(local, "all_reduce", twice):
        failures["a sum too many"] = comparisons_of(plan, ["gqa-causal"])
    return failures


# ---- Behavior of ttnn on a mesh ------------------------------------------------------------------


def as_ttnn_says(mesh):
    """Return whether collectives along each dimension match ttnn's own golden functions on each
    chip.
    """
    shape, count = tuple(mesh.shape), mesh.get_num_devices()
    values = torch.arange(count * 64.0 * 256).reshape(count, 1, 64, 256)
    options = {"dtype": ttnn.float32, "layout": ttnn.TILE_LAYOUT, "device": mesh}
    x = ttnn.from_torch(values, mesh_mapper=ttnn.ShardTensorToMesh(mesh, dim=0), **options)
    composer = ttnn.ConcatMeshToTensor(mesh, dim=0)
    matches = {
        "a part each": np.array_equal(np.concatenate(mha_tt.download_parts(x)), values),
        "put together": bool((ttnn.to_torch(x, mesh_composer=composer) == values).all()),
        "one of them": bool((ttnn.to_torch(ttnn.get_device_tensors(x)[1]) == values[1]).all()),
    }
    for name in ("all_reduce", "all_gather", "reduce_scatter", "mesh_partition"):
        is_divided, dims = (
            name in ("reduce_scatter", "mesh_partition"),
            () if name == "all_reduce" else (3,),
        )
        for axis in (axis for axis in (0, 1) if shape[axis] > 1):
            parts = mha_tt.download_parts(getattr(ttnn, name)(x, *dims, cluster_axis=axis))
            golden = ttnn.get_golden_function(getattr(ttnn, name))
            of_mesh = {
                "_ttnn_golden_mesh_shape": shape,
                "_ttnn_golden_mesh_shard_dims": (None, 0) if axis == 0 else (0, None),
            }
            expected = golden([part[None] for part in values], *dims, cluster_axis=axis, **of_mesh)
            lines = [[parts[chip] for chip in line] for line in local.lines_of(shape, axis)]
            whole = np.concatenate(
                [np.concatenate(line, 3) if is_divided else line[0] for line in lines]
            )
            are_alike = is_divided or all(
                np.array_equal(line[0], part) for line in lines for part in line
            )
            matches[f"{name} along {axis}"] = are_alike and np.array_equal(whole, expected)
    return matches


def error_of(call):
    """Return the error of a call, or an empty string if it raises none."""
    try:
        call()
    except NotImplementedError as error:
        return f"NotImplementedError: {error}"
    except (TypeError, ValueError) as error:
        return f"{'TypeError' if isinstance(error, TypeError) else 'ValueError'}: {error}"
    return ""


def by_rows(mesh):
    """Return the errors of a product divided by rows, without and with a sum, and the error of
    reading it.
    """
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((32, 128)), rng.standard_normal((128, 64))
    count = mesh.get_num_devices()
    parts = [
        upload_parts(np.split(array, count, axis), axis=1, device=mesh, dtype=ttnn.float32)
        for array, axis in ((x, 1), (weight, 0))
    ]
    product = ttnn.linear(*parts)

    def error(y):
        return float(np.abs(y - x @ weight).max() / np.abs(x @ weight).max())

    return [
        min(error(part) for part in mha_tt.download_parts(product)),
        error(mha_tt.download(ttnn.all_reduce(product))),
        error_of(lambda: mha_tt.download(product)),
    ]


def rejected(mesh):
    """Return the errors of layers that cannot be divided, and of operations without known
    values.
    """

    def error_of_division(spec=None, heads=1, on=mesh, twice=False, layer=None):
        spec = AttentionSpec(64, 8) if spec is None else spec
        layer = mha_tt.MultiHeadAttention(spec, device=mesh) if layer is None else layer
        before = (layer.weights, layer.spec, layer.heads_axis)
        if twice:
            parallel.shard(layer, on, heads=heads)
        error = error_of(lambda: parallel.shard(layer, on, heads=heads))
        return (
            error
            if twice or before == (layer.weights, layer.spec, layer.heads_axis)
            else "it was changed"
        )

    def in_training():
        spec = AttentionSpec(64, 8, dropout=0.5)
        layer = parallel.shard(mha_tt.MultiHeadAttention(spec, device=mesh), mesh, heads=1)
        return layer(x)

    def with_bias_of_all_heads():
        layer = parallel.shard(
            mha_tt.MultiHeadAttention(AttentionSpec(64, 8), device=mesh), mesh, heads=1
        )
        return layer(x, bias=np.zeros((1, 8, 5, 5), np.float32))

    x = mha_tt.upload(np.ones((1, 5, 64)), device=mesh)
    return {
        "uneven": error_of_division(AttentionSpec(64, 9, head_dim=8)),
        "norm over the width": error_of_division(AttentionSpec(64, 8, qk_norm=Norm(over="width"))),
        "alibi": error_of_division(AttentionSpec(64, 8, alibi=Alibi())),
        "shared_kv": error_of_division(AttentionSpec(64, 8, shared_kv=True)),
        "no such dimension": error_of_division(heads=2),
        "a name": error_of_division(heads="tensor"),
        "twice": error_of_division(twice=True),
        "no layer": error_of(lambda: parallel.shard(object(), mesh, heads=1)),
        "training with dropout": error_of(in_training),
        "bias of all heads": error_of(with_bias_of_all_heads),
        "broadcast": error_of(lambda: ttnn.all_broadcast(x)),
    }


def carried(mesh):
    """Return whether weights are read from a divided layer, and loaded into it, bit for bit."""
    spec = AttentionSpec(
        64, 8, num_kv_heads=2, rope=Rope(), qk_norm=Norm(per_head=True), fused_qkv=True, sinks=True
    )
    weights = random_weights(spec)
    layer = mha_tt.MultiHeadSelfAttention(spec, device=mesh, dtype=ttnn.float32)
    parallel.shard(backend.load_into(layer, weights), mesh, heads=1)
    out = backend.weights_of(layer)
    other = mha_tt.MultiHeadSelfAttention(spec, device=mesh, dtype=ttnn.float32)
    again = backend.weights_of(backend.load_into(parallel.shard(other, mesh, heads=1), out))
    return [
        all(np.array_equal(tensors[name], weight) for name, weight in weights.items())
        for tensors in (out, again)
    ]


if __name__ == "__main__":
    board = sys.argv[1]
    ttnn_mock.use(board)
    results = {"compared": {}}
    for (shape, axis), names_of in COMPARED[board].items():
        with mha_tt.open_mesh(shape) as mesh, ttnn_mock.shadow():
            with on(mesh, axis) as plan:
                of_mesh = {
                    f"{shape} {axis} {dtype}": comparisons_of(plan, names, dtype)
                    for dtype, names in names_of.items()
                }
                results["compared"] |= of_mesh
                if board == "n300":
                    results["controls"] = controls(plan)
            if axis == 1:
                results[f"{shape} as ttnn says"] = as_ttnn_says(mesh)
            if board == "n300":
                results |= {
                    "by rows": by_rows(mesh),
                    "rejected": rejected(mesh),
                    "carried": carried(mesh),
                }
    print(json.dumps(results))

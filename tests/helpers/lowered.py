"""Programs lowered for absent accelerators, and counts of the arrays they create and their
synchronization points.
"""

from contextlib import contextmanager
from math import prod
from typing import NamedTuple
from unittest.mock import patch

import jax
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax._src.pallas.mosaic import tpu_info
from jax.extend.mlir import ir

import mha_jax

PLATFORMS = {
    "cuda": "gpu",
    "tpu": "tpu",
}  # JAX's names for the platform of a program and of an array
VIEWS = (  # operations that pass an array on or update part of it in place
    *("stablehlo.reshape", "stablehlo.optimization_barrier", "stablehlo.dynamic_update_slice"),
    *("func.call", "stablehlo.while", "stablehlo.case"),
)
TRANSFERS = ("stablehlo.infeed", "stablehlo.outfeed", "stablehlo.send", "stablehlo.recv")


class Counts(NamedTuple):
    """Counts of operations in a program before compiler fusion."""

    arrays: int = 0  # numeric arrays of at least the given size
    masks: int = 0  # boolean arrays of at least that size
    float64: int = 0  # float64 arrays of any size
    callbacks: int = 0  # host callbacks and transfers
    branches: int = (
        0  # control flow that depends on a device value, which a GPU first reports to the host
    )


@contextmanager
def on(platform):
    """Make arrays appear to be on a single device of this platform."""
    with (
        patch.object(mha_jax.fused, "platform_of", lambda *arrays: PLATFORMS[platform]),
        patch.object(cudnn, "check_cudnn_version", lambda: 91000),
        patch.object(tpu_info, "get_device_kind", lambda: "TPU v5 lite"),
        patch.object(tpu_info, "get_num_device_cores", lambda: 1),
        patch.object(jax, "device_count", lambda: 1),
    ):
        yield


def lowered(platform, function, *arrays):
    """Return the program of a function lowered for a platform; arrays may be shapes."""
    with on(platform):
        return jax.jit(function).trace(*arrays).lower(lowering_platforms=(platform,))


def counts(program, size):
    """Count the arrays of at least this size that a lowered program creates, without its arguments,
    and its waits.
    """
    totals = dict.fromkeys(Counts._fields, 0)

    def count(operation):
        name = operation.name
        if name == "stablehlo.custom_call":
            totals["callbacks"] += "callback" in str(operation.attributes["call_target_name"])
        totals["callbacks"] += name in TRANSFERS
        totals["branches"] += name in ("stablehlo.case", "stablehlo.if") or _is_open_loop(operation)
        for result in operation.results:
            if not isinstance(result.type, ir.RankedTensorType):
                continue
            element = str(result.type.element_type)
            totals["float64"] += element == "f64"
            if name not in VIEWS and prod(result.type.shape) >= size:
                totals["masks" if element == "i1" else "arrays"] += 1
        return ir.WalkResult.ADVANCE

    module = program.compiler_ir("stablehlo")
    with module.context:
        module.operation.walk(lambda operation: count(operation.operation))
    return Counts(**totals)


def _is_open_loop(operation):
    """Return True for a loop whose trip count is not a constant of the program."""
    if operation.name != "stablehlo.while":
        return False
    condition = [inner.operation.name for inner in operation.regions[0].blocks[0].operations]
    return condition != [
        "stablehlo.constant",
        "stablehlo.compare",
        "stablehlo.return",
    ]  # counter < constant

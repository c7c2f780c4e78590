"""Programs for an accelerator that is not there, and counts of what they would make and wait for."""

from contextlib import contextmanager
from math import prod
from typing import NamedTuple
from unittest.mock import patch

import jax
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax._src.pallas.mosaic import tpu_info
from jax.extend.mlir import ir

import mha_jax

PLATFORMS = {"cuda": "gpu", "tpu": "tpu"}  # what JAX calls the platform of a program, and of an array
VIEWS = (  # operations that pass an array on, or write a part of it in place
    *("stablehlo.reshape", "stablehlo.optimization_barrier", "stablehlo.dynamic_update_slice"),
    *("func.call", "stablehlo.while", "stablehlo.case"),
)
TRANSFERS = ("stablehlo.infeed", "stablehlo.outfeed", "stablehlo.send", "stablehlo.recv")


class Counts(NamedTuple):
    """Operations of a program, before a compiler fuses any."""

    arrays: int = 0  # that make an array of numbers of this size or larger
    masks: int = 0  # that make such a boolean array
    float64: int = 0  # that make a float64 array of any size
    callbacks: int = 0  # that ask the host, or wait for a transfer
    branches: int = 0  # that choose what runs next by a value on the device, which a GPU reports to the host first


@contextmanager
def on(platform):
    """Arrays seem to be on one device of this platform."""
    with (
        patch.object(mha_jax.fused, "platform_of", lambda *arrays: PLATFORMS[platform]),
        patch.object(cudnn, "check_cudnn_version", lambda: 91000),
        patch.object(tpu_info, "get_device_kind", lambda: "TPU v5 lite"),
        patch.object(tpu_info, "get_num_device_cores", lambda: 1),
        patch.object(jax, "device_count", lambda: 1),
    ):
        yield


def lowered(platform, function, *arrays):
    """The program of a function for a platform; arrays may be shapes."""
    with on(platform):
        return jax.jit(function).trace(*arrays).lower(lowering_platforms=(platform,))


def counts(program, size):
    """What a lowered program makes of this number of elements or more, beside its arguments, and what it waits for."""
    found = dict.fromkeys(Counts._fields, 0)

    def count(operation):
        name = operation.name
        if name == "stablehlo.custom_call":
            found["callbacks"] += "callback" in str(operation.attributes["call_target_name"])
        found["callbacks"] += name in TRANSFERS
        found["branches"] += name in ("stablehlo.case", "stablehlo.if") or _is_open_loop(operation)
        for result in operation.results:
            if not isinstance(result.type, ir.RankedTensorType):
                continue
            element = str(result.type.element_type)
            found["float64"] += element == "f64"
            if name not in VIEWS and prod(result.type.shape) >= size:
                found["masks" if element == "i1" else "arrays"] += 1
        return ir.WalkResult.ADVANCE

    module = program.compiler_ir("stablehlo")
    with module.context:
        module.operation.walk(lambda operation: count(operation.operation))
    return Counts(**found)


def _is_open_loop(operation):
    """True of a loop whose number of rounds is no constant of the program."""
    if operation.name != "stablehlo.while":
        return False
    condition = [each.operation.name for each in operation.regions[0].blocks[0].operations]
    return condition != ["stablehlo.constant", "stablehlo.compare", "stablehlo.return"]  # of a counter with a number

"""Meshes of devices: dimensions, and the cases that they divide evenly."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from mha_spec import InputError
from mha_spec.rules import as_count
from parity.measure.core.case import Case

AxisKind = Literal["automatic", "explicit"]
"""JAX's axis types of a mesh."""


@dataclass(frozen=True)
class MeshPlan:
    """Dimensions of a mesh.

    Attributes:
        data: number of devices that sequences are divided over.
        tensor: number of devices that heads are divided over.
        sequence: number of devices that tokens are divided over.
        axes: JAX's axis type of all dimensions.

    Raises:
        TypeError: if a size is not an integer.
        ValueError: if a size is below 1, or the axis type is unknown.
    """

    data: int = 1
    tensor: int = 1
    sequence: int = 1
    axes: AxisKind = "automatic"

    def __post_init__(self) -> None:
        for name in DIMENSIONS:
            as_count(name, getattr(self, name))
        if self.axes not in get_args(AxisKind):
            raise InputError("axes", f"be {' or '.join(get_args(AxisKind))}", axes=self.axes)

    @property
    def shape(self) -> dict[str, int]:
        """Sizes above 1 by name; all dimensions for a single device."""
        sizes = {name: getattr(self, name) for name in DIMENSIONS}
        divided = {name: size for name, size in sizes.items() if size > 1}
        # Frameworks make no mesh without a dimension.
        return divided if divided else sizes

    @property
    def size(self) -> int:
        """Number of devices."""
        return math.prod(self.shape.values())

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.shape.items())


MOST_VIRTUAL = 1024
"""The largest number of virtual devices of a CPU.

The number is a choice: each is a process of torch, or threads and buffers of JAX, so that many more
exhaust the memory; cases have fewer sequences, heads and tokens to divide.
"""


def advice_on_devices(plan: MeshPlan, verb: str) -> str:
    """Return how the missing devices of a mesh are made, if a CPU can be that many."""
    if plan.size > MOST_VIRTUAL:
        return f"--virtual-devices makes at most {MOST_VIRTUAL}"
    return f"--virtual-devices {plan.size} {verb} them"


DIMENSIONS = tuple(field.name for field in fields(MeshPlan) if field.name != "axes")


def parse_mesh(text: str, axes: AxisKind = "automatic") -> MeshPlan:
    """Return the mesh of a text such as `data=2,tensor=4`.

    Raises:
        ValueError: if the text has any other form.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = (word.strip() for word in part.partition("="))
        is_new = name in DIMENSIONS and name not in sizes
        if not is_new or not size.isdecimal() or int(size) == 0:
            rule = f"give {', '.join(DIMENSIONS)} a number of devices, each at most once"
            raise InputError("mesh", f"{rule}, such as data=2,tensor=4", mesh=text)
        sizes[name] = int(size)
    return MeshPlan(**sizes, axes=axes)


def why_rejected(check: Callable[..., None], *arguments: Any) -> str | None:
    """Return why a check of an implementation rejects arguments, or None if it does not."""
    try:
        check(*arguments)
    except InputError as error:
        return f"{error.argument} must {error.rule}"
    return None


def why_not_divided(case: Case, plan: MeshPlan) -> str | None:
    """Return why a mesh does not divide a case evenly, or None if it does."""
    spec = case.spec
    if case.batch % plan.data:
        return f"data={plan.data} does not divide {case.batch} sequences"
    if spec.num_heads % plan.tensor:
        return f"tensor={plan.tensor} does not divide {spec.num_heads} query heads"
    if plan.tensor > 1 and spec.fused_qkv:
        return "fused_qkv keeps q, k and v in one weight, whose heads are not consecutive"
    if spec.shared_kv:
        return "the keys and values of another layer are not divided"
    if plan.sequence == 1:
        return None
    if spec.relative_products is not None:
        return "relative products are computed for whole sequences only"
    if case.is_cached:
        return "tokens that arrive in steps cannot be divided"
    if case.seq_len % plan.sequence:
        return f"sequence={plan.sequence} does not divide {case.seq_len} query tokens"
    if case.key_len % plan.sequence:
        return f"sequence={plan.sequence} does not divide {case.key_len} key tokens"
    return None

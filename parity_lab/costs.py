"""Calculated costs of a layer on several devices: memory, operations and traffic of each, by the
plan of division.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal, NamedTuple, get_args

from mha_spec import AttentionSpec, InputError
from mha_spec.attention import check_spec
from mha_spec.rules import as_count

Plan = Literal["data", "fully sharded", "tensor", "heads for tokens", "ring"]
PLANS: tuple[Plan, ...] = get_args(Plan)

GRADIENT_BYTES = 4
"""Bytes of a number in gradients of keys and values in a ring, which are added up in float32."""


class Sent(NamedTuple):
    """A collective of a device.

    Attributes:
        kind: name of the operation in XLA.
        nbytes: bytes of its result on the device.
        times: number of operations.
    """

    kind: str
    nbytes: float
    times: int = 1

    def moved(self, devices: int) -> float:
        """Return the bytes that leave the device with the algorithm that sends least."""
        share = (devices - 1) / devices
        per_byte = {"all-reduce": 2 * share, "all-gather": share, "reduce-scatter": devices * share}
        return (
            self.times
            * self.nbytes
            * (per_byte | {"all-to-all": share, "collective-permute": 1.0})[self.kind]
        )


@dataclass(frozen=True)
class Cost:
    """Costs of a layer on each device.

    Attributes:
        devices: number of devices.
        weights: bytes of weights that a device keeps; gradients need as many, an optimizer more.
        forward: collectives of the forward pass.
        backward: collectives of the backward pass.
        operations: floating-point operations of the forward pass; a multiplication and an addition
            count as two.
    """

    devices: int
    weights: float
    forward: tuple[Sent, ...]
    backward: tuple[Sent, ...]
    operations: float

    @property
    def moved_forward(self) -> float:
        """Bytes that leave the device in the forward pass."""
        return sum(sent.moved(self.devices) for sent in self.forward)

    @property
    def moved_backward(self) -> float:
        """Bytes that leave the device in the backward pass."""
        return sum(sent.moved(self.devices) for sent in self.backward)

    @property
    def operations_per_byte(self) -> float:
        """Operations of both passes, about three times the forward ones, per byte that leaves the
        device.
        """
        moved = self.moved_forward + self.moved_backward
        return 3 * self.operations / moved if moved else float("inf")


def why_not(
    spec: AttentionSpec, plan: Plan, devices: int, *, batch: int, tokens: int
) -> str | None:
    """Return why a plan does not divide a layer over this number of devices, or None if it does."""
    counts = {"data": batch, "fully sharded": batch, "tensor": spec.num_heads, "ring": tokens}
    counts["heads for tokens"] = spec.num_kv_heads
    what = {
        "data": "sequences",
        "fully sharded": "sequences",
        "tensor": "query heads",
        "ring": "tokens",
    }
    what["heads for tokens"] = "key/value heads"
    return f"{counts[plan]} {what[plan]}" if counts[plan] % devices else None


def cost_of(
    spec: AttentionSpec, plan: Plan, devices: int, *, batch: int, tokens: int, itemsize: int = 2
) -> Cost:
    """Return the costs per device of a causal layer of q, k, v and out_proj.

    Args:
        spec: the layer, without latents and gates.
        plan: dimension that is divided. `data`: sequences, with all weights on each device; `fully
            sharded`: sequences and weights; `tensor`: heads; `heads for tokens` and `ring`: tokens,
            with all weights on each device.
        devices: number of devices.
        batch: number of sequences on all devices together.
        tokens: number of tokens of each sequence.
        itemsize: bytes of a number.

    Raises:
        TypeError: if spec is not an `AttentionSpec`, or a number not an integer.
        ValueError: if the plan does not exist, a number is below 1, or the plan does not divide the
            layer evenly.
    """
    check_spec(spec)
    if plan not in PLANS:
        raise InputError("plan", f"be one of {', '.join(PLANS)}", plan=plan)
    for name, count in {
        "devices": devices,
        "batch": batch,
        "tokens": tokens,
        "itemsize": itemsize,
    }.items():
        as_count(name, count)
    if what := why_not(spec, plan, devices, batch=batch, tokens=tokens):
        raise InputError(
            "devices", f"divide the dimension of {plan}", f"{what} and devices={devices}"
        )
    shapes = {name: prod(shape) for name, shape in spec.weight_shapes.items()}
    of_keys = sum(count for name, count in shapes.items() if name.startswith(("k_proj", "v_proj")))
    numbers = sum(shapes.values())
    weights, width = numbers * itemsize, spec.head_dim + spec.value_head_dim
    operations = 2 * batch * tokens * numbers + batch * spec.num_heads * tokens**2 * width
    held, forward, backward = float(weights), [], []
    if devices > 1 and plan == "tensor":
        whole = of_keys if spec.num_kv_heads % devices else 0
        held = itemsize * (
            (numbers - whole - _bias_of_output(shapes)) / devices + whole + _bias_of_output(shapes)
        )
        output = Sent("all-reduce", batch * tokens * spec.d_model * itemsize)
        forward, backward = [output], [output]
        backward += [Sent("all-reduce", whole * itemsize)] if whole else []
        operations += (
            2 * batch * tokens * whole * (devices - 1)
        )  # each device computes all of these
    elif devices > 1 and plan == "fully sharded":
        held = weights / devices
        forward = [Sent("all-gather", weights)]
        backward = [Sent("all-gather", weights), Sent("reduce-scatter", weights / devices)]
    elif devices > 1:
        backward = [Sent("all-reduce", weights)]
        exchanged = _of_tokens(spec, plan, devices, batch * tokens // devices, itemsize)
        forward, backward = [*exchanged[0]], [*exchanged[1], *backward]
    return Cost(devices, held, tuple(forward), tuple(backward), operations / devices)


def _bias_of_output(shapes: dict[str, int]) -> int:
    return shapes.get("out_proj.bias", 0)


def _of_tokens(
    spec: AttentionSpec, plan: Plan, devices: int, tokens: int, itemsize: int
) -> tuple[list[Sent], list[Sent]]:
    """Return the collectives of attention, forward and backward, for the tokens of a device in all
    its sequences.
    """
    head, value = spec.head_dim, spec.value_head_dim
    of_queries, of_context = (tokens * spec.num_heads * x * itemsize for x in (head, value))
    of_keys, of_values = (tokens * spec.num_kv_heads * x * itemsize for x in (head, value))
    if plan == "heads for tokens":
        exchanged = [Sent("all-to-all", x) for x in (of_queries, of_keys, of_values, of_context)]
        return exchanged, exchanged
    if plan != "ring":
        return [], []
    halves = [
        Sent("collective-permute", x / 2, 2) for x in (of_queries, of_keys, of_values, of_context)
    ]
    round_trip = [Sent("collective-permute", x, devices - 1) for x in (of_keys, of_values)]
    gathered = [
        Sent("collective-permute", x / itemsize * GRADIENT_BYTES, devices)
        for x in (of_keys, of_values)
    ]
    return [*halves, *round_trip], [*halves, *round_trip, *gathered]

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
        # A device keeps its own share, and sends or receives that of each other device.
        share = (devices - 1) / devices
        sent_per_byte = {
            "all-reduce": 2 * share,
            "all-gather": share,
            "reduce-scatter": devices * share,
            "all-to-all": share,
            "collective-permute": 1.0,
        }
        return self.times * self.nbytes * sent_per_byte[self.kind]


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
        if not moved:
            return float("inf")
        return 3 * self.operations / moved


def why_not(
    spec: AttentionSpec, plan: Plan, devices: int, *, batch: int, tokens: int
) -> str | None:
    """Return why a plan does not divide a layer over this number of devices, or None if it does."""
    if plan in ("data", "fully sharded"):
        count, what = batch, "sequences"
    elif plan == "tensor":
        count, what = spec.num_heads, "query heads"
    elif plan == "heads for tokens":
        count, what = spec.num_kv_heads, "key/value heads"
    else:
        count, what = tokens, "tokens"
    if count % devices == 0:
        return None
    return f"{count} {what}"


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
    counts = {"devices": devices, "batch": batch, "tokens": tokens, "itemsize": itemsize}
    for name, count in counts.items():
        as_count(name, count)
    undivided = why_not(spec, plan, devices, batch=batch, tokens=tokens)
    if undivided is not None:
        expected = f"divide the dimension of {plan}"
        raise InputError("devices", expected, f"{undivided} and devices={devices}")

    num_weights = sum(prod(shape) for shape in spec.weight_shapes.values())
    width = spec.head_dim + spec.value_head_dim
    # Attention: two operations for each pair of tokens and feature. The mask hides half the pairs.
    operations = 2 * batch * tokens * num_weights + batch * spec.num_heads * tokens**2 * width
    nbytes = num_weights * itemsize
    if devices == 1:
        return Cost(devices, float(nbytes), (), (), float(operations))
    if plan == "tensor":
        return _cost_of_tensor(spec, devices, batch * tokens, itemsize, operations)
    if plan == "fully sharded":
        gathered = Sent("all-gather", nbytes)
        scattered = Sent("reduce-scatter", nbytes / devices)
        share = operations / devices
        return Cost(devices, nbytes / devices, (gathered,), (gathered, scattered), share)
    # The other plans have all weights on each device, and add up their gradients.
    forward, backward = _exchanges(spec, plan, devices, batch * tokens // devices, itemsize)
    backward.append(Sent("all-reduce", nbytes))
    return Cost(devices, float(nbytes), tuple(forward), tuple(backward), operations / devices)


def _cost_of_tensor(
    spec: AttentionSpec, devices: int, num_tokens: int, itemsize: int, operations: int
) -> Cost:
    """Return the costs of heads that are divided over devices.

    Args:
        spec: the layer.
        devices: number of devices.
        num_tokens: number of tokens of all sequences together.
        itemsize: bytes of a number.
        operations: floating-point operations of the forward pass on one device.
    """
    counts = {name: prod(shape) for name, shape in spec.weight_shapes.items()}
    num_weights = sum(counts.values())
    bias_of_output = counts.get("out_proj.bias", 0)
    # Key/value heads that cannot be divided are on every device, which computes all of them.
    num_repeated = 0
    if spec.num_kv_heads % devices:
        for name, count in counts.items():
            if name.startswith(("k_proj", "v_proj")):
                num_repeated += count
    num_divided = num_weights - num_repeated - bias_of_output
    weights = itemsize * (num_divided / devices + num_repeated + bias_of_output)
    operations += 2 * num_tokens * num_repeated * (devices - 1)

    # The sum over heads: of the output, and backward of the gradient of the input.
    summed = Sent("all-reduce", num_tokens * spec.d_model * itemsize)
    backward = [summed]
    if num_repeated:
        backward.append(Sent("all-reduce", num_repeated * itemsize))
    return Cost(devices, weights, (summed,), tuple(backward), operations / devices)


def _exchanges(
    spec: AttentionSpec, plan: Plan, devices: int, num_tokens: int, itemsize: int
) -> tuple[list[Sent], list[Sent]]:
    """Return the collectives of attention, forward and backward, for the tokens of a device in all
    its sequences; none if each device has whole sequences.
    """
    of_queries = num_tokens * spec.num_heads * spec.head_dim * itemsize
    of_context = num_tokens * spec.num_heads * spec.value_head_dim * itemsize
    of_keys = num_tokens * spec.num_kv_heads * spec.head_dim * itemsize
    of_values = num_tokens * spec.num_kv_heads * spec.value_head_dim * itemsize
    if plan == "heads for tokens":
        # Heads for tokens, and after attention tokens for heads.
        sizes = (of_queries, of_keys, of_values, of_context)
        forward = [Sent("all-to-all", nbytes) for nbytes in sizes]
        return forward, list(forward)
    if plan != "ring":
        return [], []
    forward = []
    # Halves of the tokens change devices before the ring and after it, so that all devices have
    # equal work under a causal mask.
    for nbytes in (of_queries, of_keys, of_values, of_context):
        forward.append(Sent("collective-permute", nbytes / 2, 2))
    for nbytes in (of_keys, of_values):
        forward.append(Sent("collective-permute", nbytes, devices - 1))
    # Backward the same, and the gradients of keys and values travel around the whole ring.
    backward = list(forward)
    for nbytes in (of_keys, of_values):
        gradient_nbytes = nbytes / itemsize * GRADIENT_BYTES
        backward.append(Sent("collective-permute", gradient_nbytes, devices))
    return forward, backward

"""Bugs in RoPE by another base, for calls with the base, its frequencies, or cosines and sines."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from parity.explain.conformance.signatures import library_of
from parity.explain.mutating.calls import Call, Injection, Run
from parity.explain.mutating.carriers import replaced_in_torch
from parity.explain.mutating.compare import Unfit, is_traced

NAMED_SO = re.compile(r"rope|rotary|inv_?freq", re.IGNORECASE)
ROLES = ("theta", "positions", "cos", "position_embeddings")


def has_rope(call: Call) -> bool:
    """Return whether anything in a call is named like RoPE: an argument, or a part of its
    module.
    """
    if any(call.get(role) is not None for role in ROLES):
        return True
    owner = call.owner
    if owner is None:
        return False
    names = [*vars(owner), *getattr(type(owner), "__annotations__", ())]
    if library_of(owner) == "torch":
        names += [name for name, _ in [*owner.named_modules(), *owner.named_buffers()]]
    return any(NAMED_SO.search(str(name)) for name in names)


def _theta(theta: float) -> Callable[[Call], Run | None]:
    """Change the base of RoPE, by the base itself, its frequencies or its cosines and sines."""

    def make(call: Call) -> Run | None:
        given = call.get("theta")
        if isinstance(given, (int, float)):
            if given == theta:
                raise Unfit(f"its theta is {theta:g}")
            return lambda function: function(call.but(theta=type(given)(theta)))
        if call.owner is not None and library_of(call.owner) == "torch":
            buffers = {
                name: x for name, x in call.owner.named_buffers() if re.search(r"inv_?freq$", name)
            }
            changed = {name: _frequencies(x, theta) for name, x in buffers.items() if x.numel() > 1}
            if changed:
                return lambda function: replaced_in_torch(call, changed, function)
        turned = _turned(call, theta)
        return lambda function: function(turned)

    return make


def _frequencies(frequencies: Any, theta: float) -> Any:
    """Return frequencies theta ** (-2i / R) with the shape of others, which have R / 2 elements."""
    exponents = np.arange(len(frequencies)) / len(frequencies)
    found = frequencies.new_tensor(theta**-exponents)
    if bool((found - frequencies).abs().max() < 1e-6):
        raise Unfit(f"its theta is {theta:g}")
    return found


def _turned(call: Call, theta: float) -> Call:
    """Return the call with cosines and sines of another base; the call's own must belong to
    positions 0, 1, …

    Raises:
        Unfit: if none are passed, or they are of other positions.
    """
    pair = call.get("position_embeddings")
    cos, sin = (
        pair
        if isinstance(pair, (tuple, list)) and len(pair) == 2
        else (call.get("cos"), call.get("sin"))
    )
    if cos is None or sin is None:
        raise Unfit("its theta, frequencies, cosines and sines are all unknown")
    if is_traced(cos) or is_traced(sin):
        raise Unfit("its cosines and sines have no values yet while JAX traces")
    values = np.asarray(cos.detach().cpu().double() if hasattr(cos, "detach") else cos, np.float64)
    num_tokens, size = values.shape[-2:] if values.ndim >= 2 else (0, 0)
    query = call.get("query")
    if not num_tokens or num_tokens != query.shape[call.token_axis] or size % 2:
        raise Unfit(f"its cosines of shape {tuple(values.shape)} are not those of its tokens")
    if not np.allclose(values[..., 0], np.cos(np.arange(num_tokens)), atol=1e-2):
        raise Unfit("its cosines are not those of positions 0, 1, 2, …")
    half = values[..., : size // 2], values[..., size // 2 :]
    is_doubled = [np.array_equal(*half), np.array_equal(values[..., ::2], values[..., 1::2])]
    pairs = np.arange(size // 2 if any(is_doubled) else size)
    angles = np.arange(num_tokens)[:, None] * theta ** -(pairs / len(pairs))
    if any(is_doubled):
        angles = np.concatenate([angles, angles], -1) if is_doubled[0] else np.repeat(angles, 2, -1)
    if (
        np.abs(np.broadcast_to(np.cos(angles), values.shape) - values).max()
        < 1e-2 / max(1, num_tokens) ** 0.5
    ):
        raise Unfit(f"its theta is {theta:g}")
    made = [
        cos * 0 + call.array(np.asarray(f(angles), str(cos.dtype).split(".")[-1]), cos)
        for f in (np.cos, np.sin)
    ]
    if pair is not None:
        return call.but(position_embeddings=type(pair)(made))
    return call.but(cos=made[0], sin=made[1])


THETAS = (10000, 500000)
"""Bases; the one that a layer does not use is injected."""

ROPE = tuple(
    Injection(f"rope-theta-{theta}", ("rotation",), _theta(float(theta))) for theta in THETAS
)
"""Bugs in RoPE's frequencies."""

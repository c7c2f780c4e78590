"""Bugs in RoPE by a different base, for calls with the base, its frequencies, or cosines and
sines.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import numpy as np

from parity.explain.conformance.signatures import library_of
from parity.explain.mutating.calls import BuggyCall, Call, Injection
from parity.explain.mutating.carriers import ReplacedTensors
from parity.explain.mutating.compare import Unfit, is_traced
from parity.measure.core.arrays import to_numpy

NAMED_SO = re.compile(r"rope|rotary|inv_?freq", re.IGNORECASE)
FREQUENCIES = re.compile(r"inv_?freq$")
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
        names += [name for name, _ in owner.named_modules()]
        names += [name for name, _ in owner.named_buffers()]
    return any(NAMED_SO.search(str(name)) for name in names)


# ---- A different base ----------------------------------------------------------------------------


def _with_theta(call: Call, theta: float) -> BuggyCall:
    """Change the base of RoPE, by the base itself, its frequencies or its cosines and sines.

    Raises:
        Unfit: if none of them is known, or the base is that one already.
    """
    own_theta = call.get("theta")
    if isinstance(own_theta, (int, float)):
        if own_theta == theta:
            raise _same_theta(theta)
        return call.but(theta=type(own_theta)(theta))
    if call.owner is not None and library_of(call.owner) == "torch":
        changed = {}
        for name, frequencies in call.owner.named_buffers():
            if FREQUENCIES.search(name) and frequencies.numel() > 1:
                changed[name] = _other_frequencies(frequencies, theta)
        if changed:
            return ReplacedTensors(call, changed)
    return _with_tables_of(call, theta)


def _same_theta(theta: float) -> Unfit:
    return Unfit(f"its theta is {theta:g}")


def _other_frequencies(frequencies: Any, theta: float) -> Any:
    """Return frequencies theta ** (-2i / R) with the shape of others, which have R / 2 elements."""
    exponents = np.arange(len(frequencies)) / len(frequencies)
    others = frequencies.new_tensor(theta**-exponents)
    if bool((others - frequencies).abs().max() < 1e-6):
        raise _same_theta(theta)
    return others


# ---- Cosines and sines ---------------------------------------------------------------------------


def tables_of(call: Call) -> tuple[Any, Any] | None:
    """Return cosines and sines that are passed as a pair or separately; None if they are not."""
    pair = call.get("position_embeddings")
    if _is_pair(pair):
        return pair[0], pair[1]
    cos = call.get("cos")
    sin = call.get("sin")
    if cos is None or sin is None:
        return None
    return cos, sin


def with_tables(call: Call, cos: Any, sin: Any) -> Call:
    """Return a call with other cosines and sines, passed as its own are."""
    pair = call.get("position_embeddings")
    if not _is_pair(pair):
        return call.but(cos=cos, sin=sin)
    if isinstance(pair, list):
        return call.but(position_embeddings=[cos, sin])
    return call.but(position_embeddings=(cos, sin))


def _is_pair(x: Any) -> bool:
    return isinstance(x, (tuple, list)) and len(x) == 2


def _with_tables_of(call: Call, theta: float) -> Call:
    """Return the call with cosines and sines of a different base; the call's own must belong to
    positions 0, 1, …

    Raises:
        Unfit: if none are passed, they are of other positions, or of this base.
    """
    tables = tables_of(call)
    if tables is None:
        raise Unfit("its theta, frequencies, cosines and sines are all unknown")
    cos, sin = tables
    if is_traced(cos) or is_traced(sin):
        raise Unfit("its cosines and sines have no values yet while JAX traces")
    cosines = to_numpy(cos).astype(np.float64)
    _check_positions(call, cosines)
    angles = _angles_like(cosines, theta)
    num_tokens = len(angles)
    # Cosines of a different base differ by more than this, but cosines of one base in a narrow
    # dtype do not.
    largest_error = np.abs(np.broadcast_to(np.cos(angles), cosines.shape) - cosines).max()
    if largest_error < 1e-2 / num_tokens**0.5:
        raise _same_theta(theta)
    # Plus zero times the call's own, so that they have its shape.
    wrong_cos = cos * 0 + call.with_dtype_of(call.array(np.cos(angles), cos), cos)
    wrong_sin = cos * 0 + call.with_dtype_of(call.array(np.sin(angles), cos), cos)
    return with_tables(call, wrong_cos, wrong_sin)


def _check_positions(call: Call, cosines: np.ndarray) -> None:
    """Raise `Unfit` unless cosines (…, T, R) belong to tokens at positions 0, 1, …"""
    is_table = cosines.ndim >= 2 and cosines.shape[-1] % 2 == 0
    num_tokens = call.get("query").shape[call.token_axis]
    if not is_table or not num_tokens or cosines.shape[-2] != num_tokens:
        raise Unfit(f"its cosines of shape {cosines.shape} do not fit its tokens")
    # The first pair turns by 1 radian per token, whatever the base.
    if not np.allclose(cosines[..., 0], np.cos(np.arange(num_tokens)), atol=1e-2):
        raise Unfit("its cosines do not belong to positions 0, 1, 2, …")


def _angles_like(cosines: np.ndarray, theta: float) -> np.ndarray:
    """Return angles (T, R) of a base, with pairs at the features where cosines (…, T, R) have them:
    each pair once, or twice, in both halves or side by side.
    """
    num_tokens, size = cosines.shape[-2:]
    has_equal_halves = np.array_equal(cosines[..., : size // 2], cosines[..., size // 2 :])
    has_equal_neighbors = np.array_equal(cosines[..., ::2], cosines[..., 1::2])
    num_pairs = size
    if has_equal_halves or has_equal_neighbors:
        num_pairs = size // 2
    frequencies = theta ** -(np.arange(num_pairs) / num_pairs)
    angles = np.arange(num_tokens)[:, None] * frequencies
    if has_equal_halves:
        return np.concatenate([angles, angles], axis=-1)
    if has_equal_neighbors:
        return np.repeat(angles, 2, axis=-1)
    return angles


# ---- All -----------------------------------------------------------------------------------------

THETAS = (10000, 500000)
"""Bases; the one that a layer does not use is injected."""

ROPE = tuple(
    Injection(f"rope-theta-{theta}", ("rotation",), partial(_with_theta, theta=float(theta)))
    for theta in THETAS
)
"""Bugs in RoPE's frequencies."""

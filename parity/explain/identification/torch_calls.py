"""Other calls of a torch model: fresh inputs, other positions, and fewer tokens."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from mha_spec import InputError
from parity.explain.identification.fit import LEAST_TOKENS
from parity.explain.identification.fresh_inputs import METHODS, Method, fresh_arrays
from parity.explain.identification.observe import ObservedLayer, observe_layers
from parity.measure.core.arrays import to_numpy

if TYPE_CHECKING:
    import torch


@contextmanager
def unchanged(model: torch.nn.Module) -> Iterator[None]:
    """Restore attributes and buffers of modules on exit: some RoPE modules grow with the positions
    of a call.
    """
    before = {}
    for module in model.modules():
        before[module] = dict(vars(module)), dict(module._buffers)
    try:
        yield
    finally:
        for module, (attributes, buffers) in before.items():
            module.__dict__.clear()
            module.__dict__.update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)


def accepts(model: torch.nn.Module, name: str) -> bool:
    """Return whether a model has a parameter of that name."""
    return name in inspect.signature(model.forward).parameters


# ---- Fresh inputs --------------------------------------------------------------------------------


def observe_fresh(
    model: torch.nn.Module, inputs: Mapping[str, Any], layers: Any
) -> tuple[dict[str, Any], list[ObservedLayer]]:
    """Return fresh inputs that the model accepts, and its layers in a call with them.

    Raises:
        ValueError: if the model fails with each way to draw them.
    """
    last_error: Exception | None = None
    for method in METHODS:
        fresh = _fresh_inputs(inputs, method)
        try:
            return fresh, observe_layers(model, fresh, layers)
        except Exception as error:  # the model's own code may raise anything
            last_error = error
    rule = "run with other inputs of the same shapes"
    raise InputError("model", rule, f"{last_error!r:.200}") from last_error


def _fresh_inputs(inputs: Mapping[str, Any], method: Method) -> dict[str, Any]:
    """Return inputs of the same shapes with other tokens or values, on the same device."""
    import torch

    arrays = {}
    for name, x in inputs.items():
        if isinstance(x, torch.Tensor) and x.dtype != torch.bfloat16:
            arrays[name] = to_numpy(x)
    fresh = dict(inputs)
    for name, x in fresh_arrays(arrays, method).items():
        fresh[name] = torch.from_numpy(x).to(inputs[name].device)
    return fresh


# ---- Positions -----------------------------------------------------------------------------------


def with_positions_from(
    model: torch.nn.Module, inputs: Mapping[str, Any], first: int
) -> dict[str, Any] | None:
    """Return the inputs with positions from `first` on; None if the model accepts no positions.

    Large positions have a gap, and each sequence begins later than the previous one.
    """
    import torch

    tokens = inputs.get("input_ids")
    if not isinstance(tokens, torch.Tensor) or not accepts(model, "position_ids"):
        return None
    batch_size, num_tokens = tokens.shape
    indices = torch.arange(num_tokens, device=tokens.device)
    positions = inputs.get("position_ids")
    if positions is None:
        positions = indices[None].expand(tokens.shape)
    positions = first + positions - positions.min()
    if first == 0:
        return {**inputs, "position_ids": positions}
    later_sequences = 3 * torch.arange(batch_size, device=tokens.device)[:, None]
    gap = 5 * (indices >= num_tokens // 2)
    moved = dict(inputs)
    moved["position_ids"] = positions + later_sequences + gap
    # Without a mask, a gap starts a segment.
    if accepts(model, "attention_mask"):
        moved.setdefault("attention_mask", torch.ones_like(tokens))
    return moved


def with_different_axes(
    model: torch.nn.Module, inputs: Mapping[str, Any], observed: Sequence[ObservedLayer]
) -> dict[str, Any] | None:
    """Return the inputs with positions that differ between axes, if they have several equal axes.

    The positions belong to a video of 2 x 3 patches: time, row and column.
    """
    import torch

    positions = _positions_on_three_axes(observed)
    if positions is None or not accepts(model, "position_ids"):
        return None
    if (positions != positions[:1]).any():
        return None
    _, batch_size, num_tokens = positions.shape
    index = torch.arange(num_tokens)
    frame = index // 6
    on_axes = torch.stack([frame, frame + index % 6 // 3, frame + index % 3])
    device = next(model.parameters()).device
    return {**inputs, "position_ids": on_axes[:, None].repeat(1, batch_size, 1).to(device)}


def _positions_on_three_axes(observed: Sequence[ObservedLayer]) -> np.ndarray | None:
    """Return the positions (3, B, T) of the first layer that has such; None if none has."""
    for layer in observed:
        positions = layer.values.get("positions")
        if positions is not None and positions.ndim == 3 and len(positions) == 3:
            return positions
    return None


# ---- Fewer tokens --------------------------------------------------------------------------------


def with_fewer_tokens(inputs: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the inputs with about half of the tokens and without the last sequence; None if they
    cannot be cut.
    """
    import torch

    tensors = {}
    for name, x in inputs.items():
        if isinstance(x, torch.Tensor) and x.ndim > 1:
            tensors[name] = x
    tokens = _tokens_among(list(tensors.values()))
    if tokens is None or tokens.shape[1] < 2 * LEAST_TOKENS - 1:
        return None
    batch_size, num_tokens = tokens.shape[:2]
    num_sequences, num_kept = max(batch_size - 1, 1), num_tokens // 2 + 1
    cut = dict(inputs)
    for name, x in tensors.items():
        if x.shape[:2] == (batch_size, num_tokens):
            cut[name] = x[:num_sequences, :num_kept]
        elif x.ndim == 3 and x.shape[1:] == (batch_size, num_tokens):  # positions on axes
            cut[name] = x[:, :num_sequences, :num_kept]
        elif x.shape[0] == batch_size:
            cut[name] = x[:num_sequences]
    for name, x in tensors.items():
        # The cut may leave a sequence of padding alone.
        if name.endswith("mask") and x.ndim == 2 and not cut[name].any(-1).all():
            return None
    return cut


def _tokens_among(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return the first tensor of tokens, (B, T), or of their features, (B, T, features)."""
    for x in tensors:
        if x.is_floating_point() and x.ndim == 3:
            return x
        if not x.is_floating_point() and x.ndim == 2:
            return x
    return None

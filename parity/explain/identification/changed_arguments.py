"""Other values of an argument of a call: changed values, masks, and boundaries of segments."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from parity.explain.identification.call_masks import HIDES
from parity.measure.core.arrays import to_numpy

INTEGERS = ("torch.int32", "torch.int64")
"""Dtypes of torch that hold boundaries, lengths and numbers of segments, and positions."""

NUDGE = 0.1
"""Size of the change of values: large next to rounding, too small to hide a key."""

FACTOR = 1.25
"""Factor of a single number."""


class Boundaries(NamedTuple):
    """Boundaries of segments.

    Attributes:
        ends: the first token of each segment, 0 at first, and the one after the last.
        are_lengths: whether the argument holds lengths instead.
    """

    ends: np.ndarray
    are_lengths: bool


def segment_ids_of(x: Any, num_tokens: int) -> np.ndarray | None:
    """Return the segment of each token, (B or 1, T), by boundaries, lengths or numbers of segments;
    else None.
    """
    if not (_is_integer(x) or isinstance(x, np.ndarray)):
        return None
    numbers = _as_array(x)
    boundaries = _boundaries_of(numbers, num_tokens)
    if boundaries is not None:
        return np.searchsorted(boundaries.ends[1:], np.arange(num_tokens), "right")[None]
    if numbers.ndim not in (1, 2) or numbers.shape[-1] != num_tokens:
        return None
    if numbers.dtype.kind in "iu":
        return numbers.reshape(-1, num_tokens)
    return None


def _boundaries_of(numbers: np.ndarray, num_tokens: int) -> Boundaries | None:
    """Return the boundaries of segments by numbers that are boundaries or lengths; else None."""
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu":
        return None
    if not numbers.size or (numbers < 0).any():
        return None
    is_sorted = bool((np.diff(numbers) >= 0).all())
    if len(numbers) > 1 and numbers[0] == 0 and numbers[-1] >= num_tokens and is_sorted:
        return Boundaries(numbers, are_lengths=False)
    if numbers.sum() == num_tokens:
        return Boundaries(np.concatenate([[0], np.cumsum(numbers)]), are_lengths=True)
    return None


def changed_argument(x: Any, num_tokens: int) -> Any:
    """Return a different value of an argument; None if there is no experiment with it."""
    if type(x) is float:
        if x == 0.0:
            return None
        return FACTOR * x
    if type(x) in (list, tuple) and x and all(map(_is_tensor, x)):
        return type(x)(changed_argument(tensor, num_tokens) for tensor in x)
    if _is_integer(x):
        return _changed_integers(x, num_tokens)
    if _is_tensor(x):
        return _changed_numbers(x)
    return None


def _changed_numbers(x: Any) -> Any:
    """Return a tensor with other values."""
    import torch

    if not x.numel():
        return None
    if x.dtype == torch.bool:
        return _with_last_inverted(x)
    if x.numel() == 1:
        return FACTOR * x
    if x.is_complex():
        angles = torch.linspace(0.0, 1.0, x.numel()).reshape(x.shape)
        return x * torch.polar(torch.ones(x.shape), angles).to(x.dtype)
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(x)
    # Values that hide keys stay.
    return torch.where(x.abs() < abs(HIDES), x + NUDGE * noise, x)


def _with_last_inverted(x: Any) -> Any:
    """Return a tensor of booleans with the last one, or the first one of each last row,
    inverted.
    """
    changed = x.clone()
    if x.ndim < 2:
        inverted = changed.reshape(-1)[-1:]
    else:
        inverted = changed[..., -1, 0]
    inverted.logical_not_()  # a view of the clone
    return changed


def _changed_integers(x: Any, num_tokens: int) -> Any:
    """Return integers of the same kind: moved boundaries, other lengths, or larger numbers in the
    second half.
    """
    numbers = _as_array(x)
    if numbers.ndim == 0 or not numbers.size:
        return None
    boundaries = _boundaries_of(numbers, num_tokens)
    if boundaries is not None:
        changed = _moved(boundaries.ends, num_tokens)
        if boundaries.are_lengths:
            changed = np.diff(changed).astype(numbers.dtype)
    elif numbers.shape[-1] == num_tokens and np.isin(numbers, (0, 1)).all():
        # A mask of padding, or two segments.
        changed = numbers.copy()
        changed[..., -1] = 1 - changed[..., -1]
    else:
        changed = numbers.copy()
        changed.reshape(-1)[numbers.size // 2 :] += 1
    if not _is_tensor(x):
        return type(x)(changed.tolist())
    import torch

    return torch.as_tensor(changed, dtype=x.dtype, device=x.device)


def _moved(ends: np.ndarray, num_tokens: int) -> np.ndarray:
    """Return other boundaries of segments: one more if there is a single segment, else the first
    one elsewhere.
    """
    if len(ends) == 2:
        return np.array([ends[0], num_tokens // 2, ends[1]], ends.dtype)
    moved = ends.copy()
    half = (ends[2] - ends[0]) // 2
    if ends[1] == ends[0] + half:
        half += 1
    moved[1] = ends[0] + half
    return moved


# ---- Values of arguments -------------------------------------------------------------------------


def _is_tensor(x: Any) -> bool:
    return hasattr(x, "is_floating_point")


def _is_integer(x: Any) -> bool:
    """Return whether x is a tensor, list or tuple of integers."""
    if _is_tensor(x):
        return str(x.dtype) in INTEGERS
    return isinstance(x, (list, tuple)) and bool(x) and all(type(number) is int for number in x)


def _as_array(x: Any) -> np.ndarray:
    if _is_tensor(x):
        return np.asarray(to_numpy(x))
    return np.asarray(x)

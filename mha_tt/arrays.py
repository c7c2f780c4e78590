"""Checks of arrays, made before any work: `<what> must <rule>, got <name>=<value>`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import ttnn
from ttnn import Tensor

from mha_spec import Refusal, WrongType
from mha_spec.rules import as_count


def check_count(name: str, value: object, minimum: int = 1) -> None:
    """Refuse what is not an integer of at least `minimum`."""
    as_count(name, value, minimum)


def check_array(name: str, x: object) -> None:
    """Refuse what is not an array of the framework."""
    if not isinstance(x, Tensor):
        raise WrongType(name, "be a ttnn.Tensor", type(x).__name__)


def check_on_device(name: str, x: Tensor) -> None:
    """Refuse a tensor that lies on the host, which several operations answer with a crash."""
    check_array(name, x)
    if x.storage_type() != ttnn.StorageType.DEVICE:
        raise WrongType(name, "lie on a device (mha_tt.upload)", {f"{name}.storage_type()": x.storage_type()})


def check_dtype(name: str, dtype: object) -> None:
    """Refuse a dtype that this package does not compute in."""
    if dtype not in (ttnn.bfloat16, ttnn.bfloat8_b, ttnn.float32):
        raise WrongType(name, "be ttnn.bfloat16, ttnn.bfloat8_b or ttnn.float32", {name: dtype})


def check_input_dtype(name: str, x: Tensor, dtype: ttnn.DataType) -> None:
    """Refuse an input of another dtype than the module's."""
    check_on_device(name, x)
    if x.dtype != dtype:
        raise WrongType(name, "have the dtype of the module", {f"{name}.dtype": x.dtype, "dtype": dtype})


def check_head_dim(head_dim: int | None, padded: int) -> None:
    """Refuse a head_dim that does not fit into the features that a head has on the device."""
    if head_dim is None:
        return
    check_count("head_dim", head_dim)
    if head_dim > padded:
        raise Refusal("head_dim", f"be at most the {padded} features of a head", head_dim=head_dim)


def check_floating(name: str, x: Tensor, rank: int) -> None:
    """Refuse an array of another rank, or one that does not hold floating-point numbers."""
    check_on_device(name, x)
    if len(x.shape) != rank:
        raise Refusal(name, f"have {rank} axes", {f"{name}.shape": tuple(x.shape)})
    check_dtype(f"{name}.dtype", x.dtype)
    if x.layout != ttnn.TILE_LAYOUT:
        raise WrongType(name, "be in tiles (mha_tt.upload)", {f"{name}.layout": x.layout})


def check_broadcasts(name: str, shape: tuple[int, ...], scores_shape: tuple[int, ...]) -> None:
    """Refuse a shape that does not broadcast to the scores, or that would stretch them."""
    fits = len(shape) <= 4 and all(a in (1, b) for a, b in zip(reversed(shape), reversed(scores_shape), strict=False))
    if not fits:
        raise Refusal(name, f"broadcast to the scores (B, N, T, S) = {scores_shape}", {f"{name}.shape": shape})


def check_lengths(name: str, lengths: np.ndarray | Sequence[int], batch_size: int | None, maximum: int) -> None:
    """Refuse lengths that are not one integer in 0..maximum for each sequence."""
    lengths = np.asarray(lengths)
    if lengths.dtype.kind not in "iu" and lengths.shape != (0,):  # NumPy takes an empty list for float64
        raise WrongType(name, "be integers", {f"{name}.dtype": lengths.dtype})
    if lengths.ndim != 1 or (batch_size is not None and len(lengths) != batch_size):
        expected = "(B,)" if batch_size is None else f"(B,) = ({batch_size},)"
        raise Refusal(name, f"have shape {expected}", {f"{name}.shape": lengths.shape})
    if ((lengths < 0) | (lengths > maximum)).any():
        raise Refusal(name, f"lie in 0..{maximum}", {name: lengths.tolist()})

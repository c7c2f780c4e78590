"""Masks: boolean, True = masked (cannot attend); broadcast to the scores (B, N, T, S)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import ttnn
from jaxtyping import Bool, Float, Int
from ttnn import Tensor

from mha_spec import AttentionSpec
from mha_spec.heads import BareHeads
from mha_spec.rules import as_pair_of_segments, check_broadcasts
from mha_spec.span import Span, span_of
from mha_tt.arrays import as_dtype
from mha_tt.checks import check_count, check_integers, check_lengths, checked
from mha_tt.device import upload
from mha_tt.mask_arrays import create_sliding_window_mask

MASKED = -1e9
"""Stand-in for minus infinity on the device, where a row that is all -inf has no certain result:
`ttnn.softmax` returns equal weights (tt-metal#56056), and its golden function NaN. It is far below
any score, and a score or a bias can be added to it without overflow.
"""


def create_attention_mask(
    seq_len_q: int,
    seq_len_k: int | None = None,
    *,
    is_causal: bool = False,
    key_padding_lengths: Int[np.ndarray, " B"] | Sequence[int] | None = None,
    window_size: int | None = None,
    chunk_size: int | None = None,
    segment_ids: Int[np.ndarray, "B T"]
    | tuple[Int[np.ndarray, "B T"], Int[np.ndarray, "B S"]]
    | None = None,
) -> Bool[np.ndarray, "#B 1 T S"]:
    """Return a mask of the keys that any of the arguments hides from a query.

    Args:
        seq_len_q: number of queries, T.
        seq_len_k: number of keys, S; default: T.
        is_causal: hide keys after the query's own position, see `create_causal_mask`.
        key_padding_lengths: number of real keys of each sequence, (B,), see `create_padding_mask`.
        window_size: hide keys that are this many positions away or more, on either side.
        chunk_size: hide keys of other chunks; chunks are this many positions long.
        segment_ids: hide keys of other segments, see `Mask`.

    Returns:
        Mask of shape (B or 1, 1, T, S), on the host.

    Raises:
        TypeError: if the lengths or the ids are not integers.
        ValueError: if a length lies outside its range, the ids do not fit, or both a window and
            chunks are set.

    Example: create_attention_mask(2, is_causal=True, key_padding_lengths=[1])
        [[[[False, True],
           [False, True]]]]
    """
    seq_len_k = seq_len_q if seq_len_k is None else seq_len_k
    check_count("seq_len_q", seq_len_q)
    check_count("seq_len_k", seq_len_k)
    span = span_of(window_size, chunk_size)
    batch_size = None
    full_mask = Mask(None, is_causal, key_padding_lengths, segment_ids, span)
    if full_mask.segments is not None:
        batch_size = _batch_size_of(full_mask.segments)
        _check_segments(full_mask.segments, batch_size, seq_len_q, seq_len_k)
    if key_padding_lengths is not None:
        check_lengths("key_padding_lengths", key_padding_lengths, batch_size, seq_len_k)
    return full_mask.implicit_bool(seq_len_q, seq_len_k)


def _batch_size_of(segments: tuple[Any, ...]) -> int:
    """Return the batch size of ids, which are unchecked; 0 for anything without axes, which
    `_check_segments` then rejects.
    """
    shape = getattr(segments[0], "shape", ())
    if not shape:
        return 0
    return shape[0]


class DeviceMask:
    """Mask whose forms on the device are uploaded once, when first needed, for any number of calls.

    Attributes:
        mask: boolean mask on the host, with four axes, True = masked.
        is_causal: the mask is causal for T queries and T keys, with or without a sliding window;
            the fused kernel then needs no tensor.
        window_size: maximum number of keys per query in a sliding-window mask; otherwise None.
        device: device of the calls.
    """

    # Not set by `__init__`, which `CausalMask` does not call: it has no mask yet.
    _additive: Tensor | None = None
    _shown: Tensor | None = None

    @checked
    def __init__(self, mask: Bool[np.ndarray, "*#scores"], *, device: ttnn.MeshDevice) -> None:
        """Initialize a mask for a device.

        Args:
            mask: boolean, True = masked; broadcasts to (B, N, T, S).
            device: device of the calls.

        Raises:
            TypeError: if the mask is not boolean.
            ValueError: if the mask has more than 4 axes.
        """
        # Only the number of axes: any shape broadcasts to itself.
        check_broadcasts("mask", mask.shape, mask.shape)
        self.mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
        self.device = device
        self.is_causal, self.window_size = _causality_of(self.mask)

    @property
    def shape(self) -> tuple[int, ...]:
        """(B or 1, N or 1, T or 1, S or 1)."""
        return self.mask.shape

    @cached_property
    def hidden(self) -> Tensor:
        """1 for masked keys, else 0, in float32. Fully masked rows mask no key here;
        `rows_with_keys` sets them to 0.
        """
        return upload(self.mask & ~self._empty_rows, device=self.device, dtype=ttnn.float32)

    @cached_property
    def rows_with_keys(self) -> Tensor | None:
        """1 for rows with a visible key, 0 for fully masked rows, (…, T, 1); None if all rows have
        a key.
        """
        if not self._empty_rows.any():
            return None
        return upload(~self._empty_rows, device=self.device, dtype=ttnn.bfloat16)

    @cached_property
    def real_keys(self) -> Tensor | None:
        """0 for masked keys, else 1, (B or 1, 1, S or 1, 1), if all rows are equal; otherwise
        None.
        """
        first = self.mask[:, :1, :1]
        if not np.array_equal(self.mask, np.broadcast_to(first, self.shape)):
            return None
        return upload(~first.swapaxes(2, 3), device=self.device, dtype=ttnn.bfloat16)

    def shown(self, seq_len_q: int, seq_len_k: int) -> Tensor:
        """1 for visible keys, else 0, in bfloat16, (B or 1, N or 1, T, S)."""
        if self._shown is None or tuple(self._shown.shape)[2:] != (seq_len_q, seq_len_k):
            shown = np.broadcast_to(~self.mask, (*self.shape[:2], seq_len_q, seq_len_k))
            self._shown = upload(shown, device=self.device)
        return self._shown

    def additive(self, seq_len_q: int, seq_len_k: int) -> Tensor:
        """`MASKED` for masked keys, else 0, in bfloat16, (B or 1, N or 1, T, S), for the fused
        kernel.

        The kernel does not broadcast queries, and reads the padding of the last tiles, which is
        therefore also `MASKED` (tt-metal#54833).
        """
        if self._additive is None or tuple(self._additive.shape)[2:] != (seq_len_q, seq_len_k):
            hidden = np.broadcast_to(
                self.mask & ~self._empty_rows, (*self.shape[:2], seq_len_q, seq_len_k)
            )
            self._additive = upload(
                np.where(hidden, np.float32(MASKED), 0), device=self.device, pad_value=MASKED
            )
        return self._additive

    @cached_property
    def _empty_rows(self) -> np.ndarray:
        return np.asarray(self.mask.all(axis=-1, keepdims=True))


def _causality_of(mask: Bool[np.ndarray, "..."]) -> tuple[bool, int | None]:
    """Return whether the mask is causal for T queries and T keys, and the size of its sliding
    window, if any.
    """
    if mask.shape[:2] != (1, 1) or mask.shape[2] != mask.shape[3] or not mask.size:
        return False, None
    seq_len = mask.shape[2]
    # Keys that the last query attends to. A window has at least one.
    num_keys = max(1, seq_len - np.count_nonzero(mask[0, 0, -1]))
    if not np.array_equal(mask[0, 0], create_sliding_window_mask(seq_len, window_size=num_keys)):
        return False, None
    if num_keys < seq_len:
        return True, num_keys
    return True, None


class CausalMask(DeviceMask):
    """Causal mask with T = S, created on demand: the fused kernel does not need it."""

    def __init__(
        self, seq_len: int, window_size: int | None = None, *, device: ttnn.MeshDevice
    ) -> None:
        """Initialize a mask of T queries and keys, with a sliding window or None, for a device."""
        check_count("seq_len", seq_len, minimum=0)
        self.seq_len = seq_len
        self.device = device
        self.is_causal = True
        if window_size is not None and window_size < seq_len:
            self.window_size = window_size
        else:
            self.window_size = None

    def narrowed_to(self, window_size: int | None) -> CausalMask:
        """Return the mask with a narrower window, or itself if the window hides no more keys."""
        if (window_size or self.seq_len) >= (self.window_size or self.seq_len):
            return self
        return CausalMask(self.seq_len, window_size, device=self.device)

    @cached_property
    def mask(self) -> np.ndarray:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Boolean mask on the host, (1, 1, T, T)."""
        if not self.seq_len:
            return np.zeros((1, 1, 0, 0), bool)
        window_size = self.window_size or self.seq_len
        return create_sliding_window_mask(self.seq_len, window_size=window_size)[None, None]

    @property
    def shape(self) -> tuple[int, ...]:
        """(1, 1, T, T)."""
        return (1, 1, self.seq_len, self.seq_len)

    @cached_property
    def real_keys(self) -> Tensor | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """None: rows differ."""
        return None

    @cached_property
    def _empty_rows(self) -> np.ndarray:
        return np.zeros((1, 1, self.seq_len, 1), bool)


@dataclass(frozen=True, eq=False)  # comparing arrays yields no single truth value
class Mask:
    """Keys that each query cannot attend to, as an array or in implicit form; any attribute
    suffices to hide a key.

    Attributes:
        mask: boolean, True = masked; broadcasts to (B, N, T, S). The output of a fully masked row
            is 0.
        is_causal: hide keys after the query's own position, see `create_causal_mask`.
        key_padding_lengths: number of real keys of each sequence, (B,), on the host, see
            `create_padding_mask`.
        segment_ids: segment of each token, (B, T), on the host: hide keys whose id is not the
            query's. A pair if keys have different ids: (B, T) of the queries and (B, S) of the
            keys.
        span: attention span of the layer, a window or chunks; None for all keys.
        q_offset: position of the first query among the keys, for all sequences or each, (1,) or
            (B,); default: 0.
    """

    mask: Bool[np.ndarray, "*#scores"] | DeviceMask | None = None
    is_causal: bool = False
    key_padding_lengths: Int[np.ndarray, " B"] | Sequence[int] | None = None
    segment_ids: (
        Int[np.ndarray, "B T"] | tuple[Int[np.ndarray, "B T"], Int[np.ndarray, "B S"]] | None
    ) = None
    span: Span | None = None
    q_offset: Int[np.ndarray, " #B"] | None = None

    def check(self, scores_shape: tuple[int, ...]) -> None:
        """Reject a mask that does not fit the scores (B, N, T, S). `find_padding` checks
        lengths.
        """
        if self.mask is not None:
            check_broadcasts("mask", tuple(self.mask.shape), scores_shape)
        if self.segments is not None:
            _check_segments(self.segments, scores_shape[0], *scores_shape[2:])

    @property
    def segments(self) -> tuple[Int[np.ndarray, "B T"], Int[np.ndarray, "B S"]] | None:
        """Segments of the queries, (B, T), and of the keys, (B, S).

        Raises:
            ValueError: if `segment_ids` is a tuple that is not a pair.
        """
        if self.segment_ids is None:
            return None
        return as_pair_of_segments(self.segment_ids)

    def fields_beyond(self, *known: str) -> list[str]:
        """Return the names of other fields in use, so that kernels can reject fields they do not
        support.
        """
        names = []
        for name, x in vars(self).items():
            if x is not None and x is not False and name not in known:
                names.append(name)
        return names

    def has_only(self, *known: str) -> bool:
        """Return whether no other field is in use."""
        return not self.fields_beyond(*known)

    def within(self, spec: AttentionSpec | BareHeads) -> Mask:
        """Return the mask with the attention span of a layer."""
        if spec.span is None:
            return self
        return replace(self, span=spec.span)

    def with_bias(self, bias: Float[np.ndarray | Tensor, "*#scores"] | None) -> Mask:
        """Fold biases of -inf into the mask, so that rows of -inf count as fully masked."""
        if not isinstance(bias, np.ndarray):  # a bias on the device is not read back
            return self
        is_hidden = bias == -np.inf
        if not is_hidden.any():
            return self
        if self.mask is not None:
            is_hidden = is_hidden | on_host(self.mask)
        return replace(self, mask=is_hidden)

    def to_bool(self, seq_len_q: int, seq_len_k: int, device: ttnn.MeshDevice) -> DeviceMask | None:
        """Return the mask for a device, including all other fields; None if nothing is hidden."""
        if self.has_only("mask", "q_offset"):
            return on_device(self.mask, device)
        causal_mask = self._causal_mask(seq_len_q, seq_len_k, device)
        if causal_mask is not None:
            return causal_mask
        hidden = self.implicit_bool(seq_len_q, seq_len_k)
        if self.mask is not None:
            hidden = hidden | on_host(self.mask)
        return on_device(hidden, device)

    def _causal_mask(
        self, seq_len_q: int, seq_len_k: int, device: ttnn.MeshDevice
    ) -> CausalMask | None:
        """Return the mask as a `CausalMask`, for which the fused kernel needs no tensor; None if it
        is not one.
        """
        window_size, chunk_size = self.span or (None, None)
        if seq_len_q != seq_len_k or chunk_size is not None:
            return None
        if not self.has_only("mask", "is_causal", "span"):
            return None
        if self.is_causal and self.mask is None:
            return CausalMask(seq_len_q, window_size, device=device)
        if isinstance(self.mask, CausalMask) and self.mask.seq_len == seq_len_q:
            return self.mask.narrowed_to(window_size)
        return None

    def implicit_bool(self, seq_len_q: int, seq_len_k: int) -> Bool[np.ndarray, "#B 1 T S"]:
        """Return the boolean mask of causality, padding, span and segments, even of zero tokens."""
        first, stop = self.key_range(seq_len_q, seq_len_k)
        keys = np.arange(seq_len_k)
        hidden = keys >= stop[:, None, :, None]
        if self.span is not None:  # without a span one comparison and one mask in memory suffice
            hidden |= keys < first[:, None, :, None]
        if self.segments is None:
            return hidden
        query_ids, key_ids = self.segments
        return hidden | (query_ids[:, None, :, None] != key_ids[:, None, None, :])

    def key_range(
        self, seq_len_q: int, seq_len_k: int
    ) -> tuple[Int[np.ndarray, "#B T"], Int[np.ndarray, "#B T"]]:
        """Return each query's first key under causality, padding and span, and the one after its
        last.

        Both may lie outside 0..S. Clipped to it, a first key that is not before the end means a
        fully masked row. Segments may hide more keys in between.
        """
        positions = np.arange(seq_len_q)[None]  # (B or 1, T)
        if self.q_offset is not None:
            positions = np.asarray(self.q_offset)[:, None] + positions
        first = np.zeros_like(positions)
        if self.is_causal:
            stop = positions + 1
        else:
            stop = np.full_like(positions, seq_len_k)
        if self.key_padding_lengths is not None:
            stop = np.minimum(stop, np.asarray(self.key_padding_lengths)[:, None])
        if self.span is not None:
            first = self.span.first(positions)
            stop = np.minimum(stop, self.span.stop(positions))
        return first, stop


def block_of(
    x: Float[np.ndarray | Tensor, "..."] | Bool[np.ndarray, "..."] | DeviceMask | None,
    rows: slice,
    keys: slice,
) -> Any:
    """Return the block of some queries and keys of an array that broadcasts to the scores."""
    if x is None:
        return None
    *_, num_rows, num_keys = (1, 1, *tuple(x.shape))
    has_all_rows = num_rows == 1 or range(num_rows)[rows] == range(num_rows)
    has_all_keys = num_keys == 1 or range(num_keys)[keys] == range(num_keys)
    if has_all_rows and has_all_keys:
        return x  # unchanged, so that masks uploaded for many calls are not uploaded again
    if isinstance(x, DeviceMask):
        x = x.mask
    if has_all_rows:
        return x[..., keys]
    if has_all_keys:
        return x[..., rows, :]
    return x[..., rows, keys]


def on_host(mask: np.ndarray | DeviceMask) -> np.ndarray:
    """Return the boolean mask."""
    if isinstance(mask, DeviceMask):
        return mask.mask
    return mask


def on_device(mask: np.ndarray | DeviceMask | None, device: ttnn.MeshDevice) -> DeviceMask | None:
    """Return the mask as a `DeviceMask` (or itself if it is one); None if it hides nothing."""
    if mask is None or isinstance(mask, DeviceMask):
        return mask
    if mask.any():
        return DeviceMask(mask, device=device)
    return None


def zero_masked_rows(
    x: Float[Tensor, "B N T ..."], mask: DeviceMask | None
) -> Float[Tensor, "B N T ..."]:
    """Return x with 0 in fully masked rows."""
    if mask is None or mask.rows_with_keys is None:
        return x
    return ttnn.where(as_dtype(mask.rows_with_keys, x.dtype), x, 0.0)


def _check_segments(
    segments: tuple[np.ndarray, np.ndarray], batch_size: int, seq_len_q: int, seq_len_k: int
) -> None:
    """Reject segments that are not integers (B, T), or a pair (B, T) of queries and (B, S) of
    keys.
    """
    for ids, axes, seq_len in zip(
        segments, ("(B, T)", "(B, S)"), (seq_len_q, seq_len_k), strict=True
    ):
        shape = (batch_size, seq_len)
        check_integers("segment_ids", ids, [shape], f"{axes} = {shape}")

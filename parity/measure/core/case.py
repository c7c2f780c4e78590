"""Cases: a layer and its inputs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from mha_spec import AttentionSpec, InputError, InputTypeError
from mha_spec.rules import as_count, as_factor, as_one_of
from parity.measure.core.quantization import CacheQuantization

DTYPES = ("float32", "bfloat16", "float16", "float64")
"""Dtypes of cases."""


EMPTY = np.iinfo(np.int64).max // 2
"""Number of the token in an empty slot of a cache: later than all."""


@dataclass(frozen=True)
class Case:
    """A situation in which implementations must agree: a layer and its inputs.

    Arrays are drawn with a seed from the name (see `parity.measure.core.problem`), so they are the
    same in all environments.

    Attributes:
        name: name in the command line and reports.
        spec: layer.
        about: bug that a failure of this case indicates.
        batch: number of sequences, B.
        seq_len: number of query tokens, T; with a cache, of all steps together.
        seq_len_k: number of key tokens, S; None for self-attention.
        is_causal: hide keys after the query's own position.
        key_padding_lengths: number of real keys of each sequence.
        segment_ids: segment of each token of each sequence; hides other segments. Positions restart
            in each, unless `position_ids` are passed.
        window_size: hide all but the last `window_size` keys.
        random_mask: hide random keys, different for each head, and one whole row of each sequence.
        bias: add a random bias to the scores.
        gain: factor of the query and key projections; large ones lead to large logits.
        strided: inputs are not contiguous in memory.
        not_finite: NaN tokens: `visible`, one in the middle of the last sequence, must reach all
            rows that attend to it; `hidden`, all padding, must reach no other row.
        chunks: with a cache: number of tokens that each call appends.
        new_lengths: with a cache: number of real tokens for each call and sequence.
        capacity: with a cache: number of slots.
        first_position: position of the first token, for RoPE and a temperature.
        trained: name of the trained layer whose weights and inputs are used.
        dtype: only dtype of the case, if it is specific to one.
        mask: keys to hide (True) in addition to others, boolean, broadcast to (B, N, T, S): for a
            prefix that sees itself, padding on the left, packed sequences. With a cache, S is the
            number of slots, and T the number of tokens of all steps. A row without a visible key is
            not compared: it is padding.
        position_ids: position of each token, instead of 0, 1, …: (B or 1, T), or (axes, B or 1, T)
            with sections; T as for `mask`.
        cache_slots: with a cache: slot into which each token is written, instead of 0, 1, …, (B or
            1, T), T as for `mask`: a ring whose slots are reused. A call hides the tokens that
            are later than its own, in whichever slots they are.
        cache_quantization: with a cache: how it stores keys and values; None for their own dtype.

    Raises:
        ValueError: if lengths do not fit each other.

    Example:
        >>> spec = parity.AttentionSpec(64, 8, num_kv_heads=2, rope=parity.Rope())
        >>> case = parity.Case("mine", spec, "a layer of my model", seq_len=9, is_causal=True)
        >>> parity.make_problem(case, "float32").inputs["query"].shape
        (2, 9, 64)
    """

    name: str
    spec: AttentionSpec
    about: str
    batch: int = 2
    seq_len: int = 5
    seq_len_k: int | None = None
    is_causal: bool = False
    key_padding_lengths: tuple[int, ...] | None = None
    window_size: int | None = None
    random_mask: bool = False
    bias: bool = False
    gain: float = 1.0
    strided: bool = False
    not_finite: Literal["visible", "hidden"] | None = None
    chunks: tuple[int, ...] = ()
    new_lengths: tuple[tuple[int, ...], ...] = ()
    capacity: int = 0
    first_position: int = 0
    trained: str | None = None
    dtype: str | None = None
    segment_ids: tuple[tuple[int, ...], ...] | None = None
    cache_quantization: CacheQuantization | None = None
    mask: np.ndarray | None = field(default=None, repr=False, compare=False)
    position_ids: np.ndarray | None = field(default=None, repr=False, compare=False)
    cache_slots: np.ndarray | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._check_sizes()
        per_sequence = f"batch={self.batch}"
        if self.chunks:
            is_sum = self.seq_len == sum(self.chunks)
            self._require("seq_len", f"be the sum of chunks={self.chunks}", holds=is_sum)
        else:
            self._require("new_lengths", "be empty without chunks", holds=not self.new_lengths)
        for row in self.new_lengths:
            is_full = len(row) == self.batch
            self._require("new_lengths", f"have {per_sequence} numbers", holds=is_full)
        if self.new_lengths:
            has_all = len(self.new_lengths) == len(self.chunks)
            rule = f"have one entry per chunk of chunks={self.chunks}"
            self._require("new_lengths", rule, holds=has_all)
            for row, chunk in zip(self.new_lengths, self.chunks, strict=True):
                fits = min(row) >= 0 and max(row) <= chunk
                self._require("new_lengths", "be at least 0 and at most the chunk", holds=fits)
        if self.key_padding_lengths is not None:
            has_all = len(self.key_padding_lengths) == self.batch
            self._require("key_padding_lengths", f"have {per_sequence} numbers", holds=has_all)
            shortest, longest = min(self.key_padding_lengths), max(self.key_padding_lengths)
            fits = shortest >= 0 and longest <= self.key_len
            rule = f"be at least 0 and at most {self.key_len}, the number of keys"
            self._require("key_padding_lengths", rule, holds=fits)
        if self.segment_ids:
            has_all = [len(row) for row in self.segment_ids] == [self.seq_len] * self.batch
            rule = f"have {per_sequence} rows of seq_len={self.seq_len} ids"
            self._require("segment_ids", rule, holds=has_all)
            is_possible = not self.chunks and self.seq_len_k is None
            rule = "be None except for self-attention without a cache"
            self._require("segment_ids", rule, holds=is_possible)
        if self.cache_quantization is not None:
            self._require("cache_quantization", "be None without chunks", holds=self.is_cached)
            self.cache_quantization.check_layer(self.spec)
        if self.mask is not None:
            self._check_mask(self.mask)
        if self.position_ids is not None:
            self._check_position_ids(self.position_ids)
        if self.cache_slots is not None:
            self._check_cache_slots(self.cache_slots)
        if self.is_cached and self.cache_slots is None:
            needed = max(self.lengths_before(len(self.chunks)))
            rule = f"be at least {needed}, the number of tokens of a sequence"
            self._require("capacity", rule, holds=self.capacity >= needed)
        is_dtype = self.dtype is None or self.dtype in DTYPES
        self._require("dtype", f"be one of {', '.join(DTYPES)}, or None", holds=is_dtype)

    def _check_sizes(self) -> None:
        """Raise an error unless each number is in its range."""
        for name in ("batch", "seq_len", "seq_len_k", "window_size"):
            value = getattr(self, name)
            if value is not None:
                as_count(name, value)
        for chunk in self.chunks:
            as_count("chunks", chunk)
        as_count("first_position", self.first_position, minimum=0)
        as_count("capacity", self.capacity, minimum=0)
        as_factor("gain", self.gain)
        as_one_of("not_finite", self.not_finite, ("visible", "hidden", None))

    def _check_mask(self, mask: np.ndarray) -> None:
        """Raise an error unless a mask fits the case."""
        if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_:
            raise InputTypeError("mask", "be a boolean NumPy array", type(mask).__name__)
        if self.random_mask:
            raise InputError("mask", "be None with random_mask", random_mask=True)
        num_keys = self.capacity if self.is_cached else self.key_len
        shape = (self.batch, self.spec.num_heads, self.seq_len, num_keys)
        try:
            np.broadcast_to(mask, shape)
        except ValueError:
            raise InputError(
                "mask", f"be broadcast to {shape}", {"mask.shape": mask.shape}
            ) from None

    def _check_position_ids(self, position_ids: np.ndarray) -> None:
        """Raise an error unless positions fit the case."""
        name = "position_ids"
        is_array = isinstance(position_ids, np.ndarray)
        if not is_array or not np.issubdtype(position_ids.dtype, np.integer):
            raise InputTypeError(name, "be a NumPy array of integers", type(position_ids).__name__)
        if self.first_position:
            rule = "be None with first_position"
            raise InputError(name, rule, first_position=self.first_position)
        shape = (self.batch, self.seq_len)
        rope = self.spec.rope
        axes = () if rope is None or rope.sections is None else (len(rope.sections),)
        allowed = [(*axes, *shape), (*axes, 1, self.seq_len)]
        if position_ids.shape not in allowed:
            rule = f"have shape {allowed[0]} or {allowed[1]}"
            raise InputError(name, rule, {"position_ids.shape": position_ids.shape})
        if position_ids.min(initial=0) < 0:
            raise InputError(name, "be at least 0", {"position_ids.min()": position_ids.min()})

    def _check_cache_slots(self, cache_slots: np.ndarray) -> None:
        """Raise an error unless slots fit the case."""
        name, spec = "cache_slots", self.spec
        if not self.is_cached:
            raise InputError(name, "be None without chunks", chunks=self.chunks)
        is_array = isinstance(cache_slots, np.ndarray)
        if not is_array or not np.issubdtype(cache_slots.dtype, np.integer):
            raise InputTypeError(name, "be a NumPy array of integers", type(cache_slots).__name__)
        if cache_slots.shape not in ((self.batch, self.seq_len), (1, self.seq_len)):
            rule = f"have shape (B or 1, T) = ({self.batch} or 1, {self.seq_len})"
            raise InputError(name, rule, {"cache_slots.shape": cache_slots.shape})
        if cache_slots.min(initial=0) < 0 or cache_slots.max(initial=0) >= self.capacity:
            raise InputError(name, "be at least 0 and below capacity", capacity=self.capacity)
        if spec.alibi or spec.relative_bias or spec.relative_products:
            raise InputError(name, "be None for a layer whose scores depend on distances")
        for step in range(len(self.chunks)):
            for slots, count in zip(self.slots_of(step), self.added(step), strict=True):
                if len(set(slots[:count].tolist())) < count:
                    raise InputError(name, "differ within a call", step=step)

    def _require(self, name: str, rule: str, *, holds: bool) -> None:
        """Raise a ValueError about a field unless its rule holds."""
        if not holds:
            raise InputError(name, rule, {name: getattr(self, name)})

    @property
    def is_cached(self) -> bool:
        """Return whether tokens arrive in steps, with a cache."""
        return bool(self.chunks)

    @property
    def hides(self) -> dict[str, Any]:
        """Keywords of `create_attention_mask` of mha_torch, mha_jax and mha_tt."""
        ids = None if self.segment_ids is None else np.array(self.segment_ids, np.int32)
        return {
            "is_causal": self.is_causal,
            "key_padding_lengths": self.key_padding_lengths,
            "segment_ids": ids,
        }

    @property
    def has_mask(self) -> bool:
        """Return whether any key is hidden."""
        if self.is_causal or self.has_own_mask or self.segment_ids is not None:
            return True
        return bool(self.window_size) or bool(self.key_padding_lengths)

    @property
    def has_own_mask(self) -> bool:
        """Return whether a mask hides keys that follows from nothing else."""
        return self.random_mask or self.mask is not None

    @property
    def is_plain(self) -> bool:
        """Return whether the tutorial, `plain.py`, can express the case.

        Its layers are as in the paper: as many key/value heads as query heads, d_model //
        num_heads wide, and nothing that changes the scores but a mask. Sequences with a cache all
        have the same length.
        """
        spec = self.spec
        if spec.d_model % spec.num_heads != 0:
            return False
        if self.window_size is not None or self.segment_ids is not None:
            return False
        if self.bias or self.not_finite or self.new_lengths:
            return False
        if self.cache_quantization is not None or self.cache_slots is not None:
            return False
        if self.is_cached and self.mask is not None:
            return False
        bias = spec.out_bias
        of_paper = AttentionSpec(spec.d_model, spec.num_heads, qkv_bias=bias, out_bias=bias)
        # The same weights, packed into one array or not.
        return spec == of_paper.replace(fused_qkv=spec.fused_qkv)

    @property
    def has_gradients(self) -> bool:
        """Return whether gradients are compared.

        They are not with a cache, or with a visible NaN, which spreads to all of them.
        """
        return not self.is_cached and self.not_finite != "visible"

    @property
    def key_len(self) -> int:
        """Number of keys, S."""
        if self.seq_len_k is None:
            return self.seq_len
        return self.seq_len_k

    @property
    def has_positions(self) -> bool:
        """Return whether layers need explicit positions.

        They need none for 0, 1, …, nor for those after the cached tokens.
        """
        if self.spec.rope is not None and self.spec.rope.sections:
            return True
        starts_elsewhere = bool(self.first_position) or self.segment_ids is not None
        if self.position_ids is not None:
            starts_elsewhere = bool((self.positions_in_order() != self.position_ids).any())
        return self.spec.has_positions and starts_elsewhere

    def positions(self, step: int | None = None) -> np.ndarray:
        """Return the positions of all tokens, or of the tokens of one call: (B or 1, T).

        With sections they are (axes, B or 1, T): three axes are time, row and column of frames of 2
        x 3 patches; two are row and column of a picture three patches wide. Padding in a call has
        the position of the first token, so that it does not lengthen a sequence.
        """
        if self.position_ids is not None:
            start = 0 if step is None else sum(self.chunks[:step])
            count = self.seq_len if step is None else self.chunks[step]
            return self.position_ids[..., start : start + count]
        num_tokens = self.seq_len if step is None else self.chunks[step]
        tokens = np.arange(num_tokens)[None]
        if self.segment_ids is not None:  # number of earlier tokens of the same segment
            ids = np.array(self.segment_ids)
            tokens = np.tril(ids[:, :, None] == ids[:, None, :], -1).sum(axis=2)
        if step is not None:
            is_real = tokens < np.array(self.added(step))[:, None]
            tokens = np.array(self.lengths_before(step))[:, None] + np.where(is_real, tokens, 0)
        if self.spec.rope is None or self.spec.rope.sections is None:
            return self.first_position + tokens
        # Tokens are on a grid, in rows of three and, with three sections, frames of two rows: two
        # and three differ, so that swapped rows and columns show.
        if len(self.spec.rope.sections) == 2:
            return self.first_position + np.stack([tokens // 3, tokens % 3])
        frame, row, column = tokens // 6, tokens % 6 // 3, tokens % 3
        return self.first_position + np.stack([frame, frame + row, frame + column])

    def positions_in_order(self) -> np.ndarray:
        """Return the positions of all tokens without `position_ids`."""
        return replace(self, position_ids=None, mask=None).positions()

    def first_tokens(self, count: int) -> Case:
        """Return the case without a cache for only the first tokens."""
        lengths = None
        if self.key_padding_lengths is not None and min(self.key_padding_lengths) < count:
            lengths = tuple(min(length, count) for length in self.key_padding_lengths)
        ids = self.segment_ids
        if ids is not None:
            # If there are fewer tokens, the last segment goes on.
            ids = tuple((row + row[-1:] * count)[:count] for row in ids)
        mask, position_ids = self.mask, self.position_ids
        if mask is not None:
            mask = np.atleast_2d(mask)[..., :count, :count]
        if position_ids is not None:
            # If there are fewer tokens, the last position is repeated.
            position_ids = position_ids[..., np.minimum(np.arange(count), self.seq_len - 1)]
        return replace(
            self,
            seq_len=count,
            key_padding_lengths=lengths,
            segment_ids=ids,
            mask=mask,
            position_ids=position_ids,
        )

    def slots_of(self, step: int) -> np.ndarray:
        """Return the slots of the tokens of a call, (B, chunk), also of padding."""
        start, count = sum(self.chunks[:step]), self.chunks[step]
        if self.cache_slots is None:
            return np.array(self.lengths_before(step))[:, None] + np.arange(count)
        slots = self.cache_slots[:, start : start + count]
        return np.broadcast_to(slots, (self.batch, count))

    def tokens_in_slots(self, step: int) -> np.ndarray:
        """Return the number of the token in each slot after a call, (B, slots).

        It is a large number for an empty slot.
        """
        tokens = np.full((self.batch, self.capacity), EMPTY)
        for earlier_step in range(step + 1):
            slots, before = self.slots_of(earlier_step), self.lengths_before(earlier_step)
            for b, count in enumerate(self.added(earlier_step)):
                tokens[b, slots[b, :count]] = before[b] + np.arange(count)
        return tokens

    def lengths_before(self, step: int) -> tuple[int, ...]:
        """Return the number of cached tokens of each sequence before a call."""
        lengths = [0] * self.batch
        for earlier_step in range(step):
            for b, num_added in enumerate(self.added(earlier_step)):
                lengths[b] += num_added
        return tuple(lengths)

    def added(self, step: int) -> tuple[int, ...]:
        """Return the number of real tokens that a call appends to each sequence."""
        if self.new_lengths:
            return self.new_lengths[step]
        return (self.chunks[step],) * self.batch

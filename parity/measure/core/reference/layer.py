"""Attention stage by stage, directly from the formulas.

Each method is a step that a known bug may replace.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from mha_spec import (
    Alibi,
    GridBias,
    Latent,
    Norm,
    RelativeBias,
    RelativeProducts,
    Rope,
    SinusoidProducts,
    Temperature,
    YarnScaling,
)
from parity.measure.core.problem import Problem
from parity.measure.core.quantization import FIXED, SCALE_AXES, CacheQuantization
from parity.measure.core.reference import norms, quantized
from parity.measure.core.reference.arithmetic import Arithmetic
from parity.measure.core.reference.rope import amplitude, axes, frequencies, pair_slices
from parity.measure.core.stages import Step, Values, of_paths, steps_of


@dataclass(frozen=True)
class Layer:
    """Layer of a problem in some arithmetic.

    A search replaces methods, see `parity.explain.diagnosis.changed_layer`. So each part of a
    formula that an implementation may get wrong is a method of its own, called by its name.

    Attributes:
        problem: problem to compute.
        arithmetic: arithmetic of the computation.
        requested: which of q, k and v to compute.
    """

    problem: Problem
    arithmetic: Arithmetic
    requested: str = "qkv"

    def steps(self) -> Sequence[Step]:
        """Return the stages as functions: see `parity.measure.core.stages`."""
        return steps_of(self, self.problem.case)

    # ---- Stages ----------------------------------------------------------------------------------

    def mask(self, _: Values) -> dict[str, np.ndarray]:
        case = self.problem.case
        t, s = np.arange(case.seq_len)[:, None], np.arange(case.key_len)[None, :]
        shape = (case.batch, case.spec.num_heads, case.seq_len, case.key_len)
        # Only a mask of the inputs may differ between heads.
        num_masks = case.spec.num_heads if "mask" in self.problem.inputs else 1
        masked = np.zeros((case.batch, num_masks, case.seq_len, case.key_len), bool)
        if case.is_causal:
            masked |= self.is_later(t, s)
        if case.window_size is not None:
            masked |= self.is_later(t, s) | self.is_before_window(t, s, case.window_size)
        masked |= self.is_out_of_reach(t, s)
        if case.key_padding_lengths is not None:
            masked |= self.is_padding(s, np.array(case.key_padding_lengths)[:, None, None, None])
        if case.segment_ids is not None:
            masked |= self.is_in_another_segment(np.array(case.segment_ids)[:, None])
        if "mask" in self.problem.inputs:
            masked |= self.own_mask(self.problem.inputs["mask"])
        return {"mask": np.broadcast_to(self.hidden(masked), shape)}

    def qkv(self, _: Values) -> dict[str, np.ndarray]:
        problem = self.problem
        inputs = {name: problem.finite_in_padding(side) for name, side in problem.sides.items()}
        return self.project(inputs, problem.case.positions())

    def scores(
        self,
        values: Values,
        positions: np.ndarray | None = None,
        products: np.ndarray | None = None,
    ) -> dict[str, np.ndarray]:
        """Return the scores of queries at positions (B or 1, T), default 0, 1, …

        `products` are the products of queries and keys; default: computed from `values`.
        """
        spec, a = self.problem.spec, self.arithmetic
        keep = a.between_scores
        if products is None:
            products = self.products(values)
        scores, bias = self.capped(products), self.score_bias()
        query_positions = np.arange(scores.shape[2])[None] if positions is None else positions
        if spec.alibi is not None:
            penalty = self.lost_by_distance(self.distances(query_positions, scores.shape[3]))
            scores = keep(scores - keep(penalty))
        if spec.relative_bias is not None:
            scores = keep(
                scores + self.gained_by_distance(self.buckets(query_positions, scores.shape[3]))
            )
        if spec.relative_products is not None:
            for distance_products in self.relative_products(values, query_positions):
                scale = a.wide.type(self.scale_of_distances())
                scores = keep(scores + keep(keep(distance_products) / scale))
        if bias is not None:
            scores = keep(scores + a.widen(bias))
        return {"scores": scores}

    def products(self, values: Values) -> np.ndarray:
        """Return the scaled products of queries and keys."""
        a = self.arithmetic
        keep = a.between_scores
        products = self.by_group(a.widen(values["q"]), a.widen(values["k"]).swapaxes(2, 3))
        return keep(keep(products) / a.wide.type(self.scale()))

    def attn_weights(self, values: Values) -> dict[str, np.ndarray]:
        scores, mask = self.entering_softmax(values["scores"]), values["mask"]
        visible_scores, sinks = np.where(mask, -np.inf, scores), self.sinks()
        highest = visible_scores.max(axis=-1, keepdims=True, initial=-np.inf)
        if sinks is not None:
            highest = np.maximum(highest, sinks)
        highest = np.where(np.isfinite(highest), highest, 0.0).astype(scores.dtype)
        exponentials = self.entering_softmax(np.exp(visible_scores - highest))
        total = exponentials.sum(axis=-1, keepdims=True)
        if sinks is None:
            # Only rows whose keys are all hidden are fully masked. Non-finite scores remain 0 / 0 =
            # NaN.
            is_empty = np.all(self.hidden_keys(mask), axis=-1, keepdims=True)
            total = np.where(is_empty, 1.0, total)
        else:
            is_empty = np.zeros(total.shape, bool)
            of_sinks = np.exp(self.entering_softmax(sinks) - highest)
            total = total + self.entering_softmax(of_sinks)
        attn_weights = self.arithmetic.keep(exponentials / total.astype(exponentials.dtype))
        return {"attn_weights": self.of_empty_rows(attn_weights, scores, is_empty)}

    def entering_softmax(self, x: np.ndarray) -> np.ndarray:
        """Return wide scores or exponentials as the softmax takes them."""
        x = x.astype(self.arithmetic.wide, copy=False)
        # ttnn's softmax passes both through the matrix engine.
        if self.arithmetic.kind.startswith("tensix"):
            return self.arithmetic.enter(x)
        return x

    def hidden_keys(self, mask: np.ndarray) -> np.ndarray:
        """Return the keys that the mask or an infinite bias hides."""
        bias = self.score_bias()
        if bias is None or not np.isneginf(bias).any():
            return mask
        return mask | np.isneginf(bias)

    def context(self, values: Values) -> dict[str, np.ndarray]:
        """Return the weighted sums of visible values.

        Hidden values have no effect, whatever they contain.
        """
        v = values["v"]
        is_not_finite = ~np.isfinite(v)
        if not is_not_finite.any():
            return self.weighed(values)
        finite = np.where(is_not_finite, np.zeros_like(v), v)
        context = self.weighed({**values, "v": finite})["context"]
        is_bad_key = np.any(self.per_query_head(is_not_finite), axis=-1)[:, :, None, :]
        attends_to_bad = np.any(is_bad_key & ~values["mask"], axis=-1, keepdims=True)
        return {"context": np.where(attends_to_bad, np.full_like(context, np.nan), context)}

    def weighed(self, values: Values) -> dict[str, np.ndarray]:
        """Return the formula, in which 0 * NaN is NaN."""
        a = self.arithmetic
        sums = self.by_group(a.widen(values["attn_weights"]), a.widen(values["v"]))
        return {"context": a.keep(sums)}

    def output(self, values: Values) -> dict[str, np.ndarray]:
        output = self.combined(values)
        if self.problem.spec.out_proj:
            output = self.linear("out_proj", output)
        return {"output": output}

    def combined(self, values: Values) -> np.ndarray:
        """Return the concatenated context of all heads, (B, T, N * H).

        It is gated or normalized as the layer requires.
        """
        context, norm = self.combine_heads(self.gated(values)), self.norm("context")
        if norm is None:
            return context
        return self.normed("context", context, norm)

    def whole(self, _: Values) -> dict[str, np.ndarray]:
        return of_paths(self.forward())

    def forward(self) -> dict[str, np.ndarray]:
        """Return all stages except a module's paths."""
        values: dict[str, np.ndarray] = {}
        values |= self.mask(values)
        values |= self.qkv(values)
        values |= self.scores(values)
        values |= self.attn_weights(values)
        values |= self.context(values)
        values |= self.output(values)
        return values

    # ---- With a cache ----------------------------------------------------------------------------

    def call(self, index: int) -> CachedCall:
        """Run one call, which appends new tokens to the cache."""
        case = self.problem.case
        before, added = np.array(case.lengths_before(index)), np.array(case.added(index))
        return CachedCall(self, index, self.problem.step_input(index), before, added)

    def appended(
        self,
        cache: str,
        values: Values,
        new: dict[str, np.ndarray],
        before: np.ndarray,
        added: np.ndarray,
    ) -> dict[str, np.ndarray]:
        """Return the cache with the real new tokens in the slots from `before` on."""
        case, a, grown = self.problem.case, self.arithmetic, {}
        for name, x in new.items():
            shape = (case.batch, x.shape[1], case.capacity, x.shape[3])
            empty = np.zeros(shape, a.dtype)
            slots = a.keep(values.get(f"previous.{cache}{name}", empty)).copy()
            for b in range(case.batch):
                new_tokens = a.cached(x[b, :, : added[b]])
                end = before[b] + added[b]
                if case.cache_slots is None:
                    slots[b, :, before[b] : end] = new_tokens
                else:
                    written = self.slots_of_tokens(b, np.arange(before[b], end))
                    slots[b][:, written] = new_tokens
            grown[f"{cache}{name}"] = slots
        return {**grown, f"{cache}lengths": (before + added).astype(np.int32)}

    def slots_of_tokens(self, b: int, tokens: np.ndarray) -> np.ndarray:
        """Return the slots into which tokens of a sequence are written, by their numbers."""
        case = self.problem.case
        slots = np.zeros(case.seq_len, int)
        for step in range(len(case.chunks)):
            before, count = case.lengths_before(step)[b], case.added(step)[b]
            slots[before : before + count] = case.slots_of(step)[b, :count]
        # A bug may count too many tokens.
        return slots[np.minimum(tokens, case.seq_len - 1)]

    def tokens_in_slots(self, index: int) -> np.ndarray:
        """Return the number of the token in each slot after a call, (B or 1, slots).

        Without slots of the case's own, slot s has token s; an empty slot counts as a later token.
        """
        case = self.problem.case
        if case.cache_slots is None:
            return np.arange(case.capacity)[None]
        return case.tokens_in_slots(index)

    # ---- With a quantized cache ------------------------------------------------------------------

    def read_back(
        self, new: dict[str, np.ndarray], first: dict[str, np.ndarray], index: int
    ) -> dict[str, np.ndarray]:
        """Return new keys and values of a call as they are read from a quantized cache.

        Args:
            new: `keys` and `values` of the call, (B, K, T, H).
            first: the same of the first call, of which scales that all tokens share are computed.
            index: number of the call.
        """
        tokens = self.entering_cache(new, index)
        first_tokens = self.entering_cache(first, 0)
        positions = self.problem.case.positions(index)
        heads = {}
        for name in new:
            stored = self.quantized(name, tokens, first_tokens)
            heads[name] = self.leaving_cache(name, stored, positions)
        return heads

    def rounded_later(
        self, values: Values, cache: str, first: dict[str, np.ndarray], index: int
    ) -> dict[str, np.ndarray]:
        """Return the cache before a call, with the tokens rounded that earlier calls left exact.

        All earlier tokens are rounded with them, as transformers does. That changes those that are
        rounded already only by the rounding of the dtype.

        Args:
            values: stages before the call, with the previous cache.
            cache: the prefix of its stages.
            first: `keys` and `values` of the first call.
            index: number of the call.
        """
        case = self.problem.case
        before = {}
        for name in first:
            stage = f"previous.{cache}{name}"
            before[stage] = self.arithmetic.keep(values[stage]).copy()
        exact_now = self.exact_calls(index)
        if set(self.exact_calls(index - 1)) <= {*exact_now}:
            return before
        for call in range(index):
            if call in exact_now:
                continue
            tokens = {}
            for name in first:
                tokens[name] = self.tokens_of_call(before[f"previous.{cache}{name}"], call)
            for name, read in self.read_back(tokens, first, call).items():
                slots = before[f"previous.{cache}{name}"]
                for b, count in enumerate(case.added(call)):
                    slots[b][:, self.slots_of_call(b, call)] = read[b, :, :count]
        return before

    def exact_calls(self, index: int) -> tuple[int, ...]:
        """Return the calls whose tokens a call attends to before they are rounded."""
        return self.cache_quantization().exact_calls(self.problem.case.chunks, index)

    def tokens_of_call(self, slots: np.ndarray, call: int) -> np.ndarray:
        """Return the tokens that a call added to a cache (B, K, slots, H), and 0 in padding."""
        case = self.problem.case
        shape = (*slots.shape[:2], case.chunks[call], slots.shape[3])
        tokens = np.zeros(shape, slots.dtype)
        for b, count in enumerate(case.added(call)):
            tokens[b, :, :count] = slots[b][:, self.slots_of_call(b, call)]
        return tokens

    def slots_of_call(self, b: int, call: int) -> np.ndarray:
        """Return the slots of the real tokens that a call adds to a sequence."""
        case = self.problem.case
        return case.slots_of(call)[b, : case.added(call)[b]]

    def entering_cache(self, heads: dict[str, np.ndarray], index: int) -> dict[str, np.ndarray]:
        """Return keys and values of a call as they enter a quantized cache: wide.

        Padding repeats the first token of its sequence, so that it changes no scale.
        """
        a, case = self.arithmetic, self.problem.case
        chunk = np.arange(case.chunks[index])
        added = np.array(case.added(index))[:, None, None, None]
        is_real = chunk[:, None] < added
        zero = np.zeros((), a.wide)
        entering = {}
        for name, x in heads.items():
            if name == "keys" and self.caches_before_rope():
                x = self.rotate(x, case.positions(index), -1)
                # Both directions multiply by the factor of cosines and sines.
                x = a.widen(x) / a.wide.type(self.attention_factor() ** 2)
            x = a.widen(x)
            padding = np.where(added > 0, x[:, :, :1], zero)
            entering[name] = np.where(is_real, x, padding)
        return entering

    def leaving_cache(self, name: str, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return what was read from a quantized cache as it enters attention."""
        x = self.arithmetic.keep(x)
        if name == "keys" and self.caches_before_rope():
            return self.rotate(x, positions)
        return x

    def caches_before_rope(self) -> bool:
        """Return whether a quantized cache stores keys before RoPE."""
        return self.cache_quantization().before_rope

    def quantized(
        self, name: str, tokens: dict[str, np.ndarray], first: dict[str, np.ndarray]
    ) -> np.ndarray:
        """Return keys or values as they are read: stored values times scales, plus zeros."""
        stored = self.stored_numbers(self.before_rounding(name, tokens, first))
        return self.read(name, stored, tokens, first)

    def before_rounding(
        self, name: str, tokens: dict[str, np.ndarray], first: dict[str, np.ndarray]
    ) -> np.ndarray:
        """Return keys or values as multiples of their scales."""
        x = tokens[name]
        if self.cache_quantization().has_zero_point:
            x = self.arithmetic.between(x - self.cache_zeros(name, tokens, first))
        return self.arithmetic.between(x / self.cache_scales(name, tokens, first))

    def read(
        self,
        name: str,
        stored: np.ndarray,
        tokens: dict[str, np.ndarray],
        first: dict[str, np.ndarray],
    ) -> np.ndarray:
        """Return stored values as keys or values."""
        x = stored * self.scales_when_read(name, tokens, first)
        if self.cache_quantization().has_zero_point:
            x = self.arithmetic.between(x) + self.zeros_when_read(name, tokens, first)
        return x

    def cache_scales(
        self, name: str, tokens: dict[str, np.ndarray], first: dict[str, np.ndarray]
    ) -> np.ndarray:
        """Return the scales of keys or values, (1 or B, 1 or K, 1 or T, 1 or H)."""
        quantization = self.cache_quantization()
        scales = self.calibrated_scales(name)
        if scales is None:
            lowest, highest = self.cached_range(name, tokens, first)
            scales = quantized.scales_of_range(lowest, highest, quantization)
        return quantized.in_scale_dtype(scales, quantization)

    def calibrated_scales(self, name: str) -> np.ndarray | None:
        """Return the calibrated scales of keys or values; None if they are computed."""
        quantization, num_heads = self.cache_quantization(), self.problem.spec.num_kv_heads
        return quantized.calibrated_scales(quantization, name, num_heads, self.arithmetic.wide)

    def cache_zeros(
        self, name: str, tokens: dict[str, np.ndarray], first: dict[str, np.ndarray]
    ) -> np.ndarray:
        """Return the keys or values that are stored as 0, in the shape of their scales."""
        quantization = self.cache_quantization()
        lowest, _ = self.cached_range(name, tokens, first)
        if quantization.zero_point == "minimum":
            return quantized.in_scale_dtype(lowest, quantization)
        scales = self.cache_scales(name, tokens, first)
        return np.rint(lowest / scales) * scales

    def cached_range(
        self, name: str, tokens: dict[str, np.ndarray], first: dict[str, np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the lowest and highest key or value of each group with a scale."""
        group = self.scale_group(name)
        source = first if group in FIXED else tokens
        return quantized.range_of(source[name], SCALE_AXES[group], self.cache_quantization())

    def scale_group(self, name: str) -> str:
        """Return the group of keys or values that shares a scale."""
        return self.cache_quantization().scale_per_of(name)

    def scales_when_read(
        self, name: str, tokens: dict[str, np.ndarray], first: dict[str, np.ndarray]
    ) -> np.ndarray:
        """Return the scales by which stored keys or values are multiplied."""
        return self.cache_scales(name, tokens, first)

    def zeros_when_read(
        self, name: str, tokens: dict[str, np.ndarray], first: dict[str, np.ndarray]
    ) -> np.ndarray:
        """Return what is added to stored keys or values, times their scales."""
        return self.cache_zeros(name, tokens, first)

    def stored_numbers(self, x: np.ndarray) -> np.ndarray:
        """Return keys or values, divided by their scales, as the values that a cache stores."""
        quantization = self.cache_quantization()
        dtype, limits = quantization.dtype, quantization.limits
        if self.arithmetic.wide == np.float64:
            return quantized.to_nearest(x, dtype, limits)
        uncertainty = quantized.uncertainty_before_rounding(self.problem.spec.d_kv)
        return quantized.to_middle(x, dtype, uncertainty, limits)

    def cache_quantization(self) -> CacheQuantization:
        """Return the quantization of the cache, which the case must have."""
        return cast(CacheQuantization, self.problem.case.cache_quantization)

    # ---- Parts -----------------------------------------------------------------------------------

    def is_later(self, t: np.ndarray, s: np.ndarray) -> np.ndarray:
        """Return whether a key at position s is after a query at position t."""
        return s > t

    def is_before_window(self, t: np.ndarray, s: np.ndarray, size: int) -> np.ndarray:
        return s <= t - size

    def is_out_of_reach(self, t: np.ndarray, s: np.ndarray) -> np.ndarray:
        """Return whether a key at position s is outside the window or chunk of a query at t."""
        window_size, chunk_size = self.window_size(), self.chunk_size()
        if window_size is not None:
            is_before = self.is_before_window(t, s, window_size)
            return is_before | self.is_after_window(t, s, window_size)
        if chunk_size is not None:
            return self.is_in_another_chunk(t, s, chunk_size)
        return np.zeros(1, bool)

    def window_size(self) -> int | None:
        """Return the size of the layer's window, or None."""
        return self.problem.spec.window_size

    def chunk_size(self) -> int | None:
        """Return the size of the layer's chunks, or None."""
        return self.problem.spec.chunk_size

    def is_after_window(self, t: np.ndarray, s: np.ndarray, size: int) -> np.ndarray:
        return s >= t + size

    def is_in_another_chunk(self, t: np.ndarray, s: np.ndarray, size: int) -> np.ndarray:
        return t // size != s // size

    def is_padding(self, s: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        return s >= lengths

    def is_in_another_segment(self, ids: np.ndarray) -> np.ndarray:
        return ids[..., :, None] != ids[..., None, :]

    def own_mask(self, mask: np.ndarray) -> np.ndarray:
        """Return the keys that the mask of the inputs hides, (B, N, T, S)."""
        return mask

    def hidden(self, masked: np.ndarray) -> np.ndarray:
        """Return the mask, True for hidden keys."""
        return masked

    def of_empty_rows(
        self, attn_weights: np.ndarray, scores: np.ndarray, is_empty: np.ndarray
    ) -> np.ndarray:
        """Return the attention weights; in fully masked rows they are 0."""
        return attn_weights

    def score_bias(self) -> np.ndarray | None:
        """Return the bias of the scores, or None."""
        return self.problem.bias

    def distances(self, positions: np.ndarray, key_len: int) -> np.ndarray:
        """Return the distances between queries and keys, (B or 1, 1, T, S)."""
        return np.abs(positions[:, None, :, None] - np.arange(key_len))

    def lost_by_distance(self, distances: np.ndarray) -> np.ndarray:
        """Return the penalty of ALiBi on scores, (B or 1, N, T, S)."""
        wide = self.arithmetic.wide
        return self.slopes()[:, None, None].astype(wide) * distances.astype(wide)

    def slopes(self) -> np.ndarray:
        """Return ALiBi's slope of each head, (N,)."""
        alibi, num_heads = self.alibi(), self.problem.spec.num_heads
        n = np.arange(1, num_heads + 1)
        # The paper defines slopes for powers of two; other heads have those between them.
        largest = 2 ** int(np.log2(num_heads))
        of_rest = (2 * (n - largest) - 1) / (2 * largest)
        slopes = 2.0 ** (-alibi.max_bias * np.where(n <= largest, n / largest, of_rest))
        if alibi.scaled:
            return slopes / self.scale()
        return slopes

    def alibi(self) -> Alibi:
        """Return the ALiBi of the layer, which must have one."""
        return cast(Alibi, self.problem.spec.alibi)

    def gained_by_distance(self, buckets: np.ndarray) -> np.ndarray:
        """Return the relative bias of the scores, (B or 1, N, T, S).

        `buckets` are the buckets of distances, (B or 1, T, S).
        """
        return np.moveaxis(self.arithmetic.widen(self.relative_table())[buckets], -1, 1)

    def relative_table(self) -> np.ndarray:
        """Return the table of the relative bias, (num_buckets, N)."""
        return self.parameter("relative_bias")

    def buckets(self, positions: np.ndarray, key_len: int) -> np.ndarray:
        """Return the buckets of distances from queries to keys, (B or 1, T, S).

        On a grid, they are distances of the offsets.
        """
        grid = self.problem.spec.relative_bias
        if isinstance(grid, GridBias):
            return self.bucket_on(grid, positions[:, :, None], np.arange(key_len))
        return self.bucket(np.arange(key_len) - positions[:, :, None])

    def bucket_on(self, grid: GridBias, query: np.ndarray, key: np.ndarray) -> np.ndarray:
        """Return the bucket of a query and a key on a grid."""
        first = int(grid.class_token)
        query_row, query_column = np.divmod(query - first, grid.width)
        key_row, key_column = np.divmod(key - first, grid.width)
        row_offset = query_row - key_row + grid.height - 1
        column_offset = query_column - key_column + grid.width - 1
        of_patches = row_offset * (2 * grid.width - 1) + column_offset
        if not grid.class_token:
            return of_patches
        # The last three buckets: from the class token to patches, to it, and to itself.
        of_class_token = grid.num_buckets - np.where(query > 0, 2, np.where(key > 0, 3, 1))
        return np.where((query == 0) | (key == 0), of_class_token, of_patches)

    def bucket(self, distance: np.ndarray) -> np.ndarray:
        """Return the bucket of the distance from a query to a key, negative for an earlier key."""
        relative = self.relative_bias()
        if not relative.bidirectional:
            steps_back = np.where(distance < 0, -distance, 0)
            return self.bucket_of_direction(steps_back, relative.num_buckets)
        half = relative.num_buckets // 2
        return self.bucket_of_direction(np.abs(distance), half) + np.where(distance > 0, half, 0)

    def bucket_of_direction(self, away: np.ndarray, count: int) -> np.ndarray:
        """Return one of `count` buckets.

        The first half have one distance each, the others widen.
        """
        exact = count // 2
        steps = self.share_of_logarithm(np.maximum(away, exact), exact) * np.float32(count - exact)
        widening = np.minimum(exact + np.floor(steps).astype(np.int64), count - 1)
        return np.where(away < exact, away, widening)

    def share_of_logarithm(self, away: np.ndarray, exact: int) -> np.ndarray:
        """Return the logarithmic position of a distance, float32.

        It is 0 for the first inexact distance, and 1 for the largest.
        """
        largest = np.log(self.relative_bias().max_distance / exact)
        ratio = away.astype(np.float32) / np.float32(exact)
        return np.log(ratio.astype(np.float64)).astype(np.float32) / np.float32(largest)

    def relative_bias(self) -> RelativeBias:
        """Return the relative bias of the layer, which must have one."""
        return cast(RelativeBias, self.problem.spec.relative_bias)

    def relative_products(self, values: Values, positions: np.ndarray) -> list[np.ndarray]:
        """Return what is added to the products of queries and keys for distances, not scaled.

        Each is (B, N, T, S).
        """
        if isinstance(self.problem.spec.relative_products, SinusoidProducts):
            return self.sinusoid_products(values, positions)
        record, a = self.distance_record(), self.arithmetic
        q, k = a.widen(values["q"]), self.per_query_head(a.widen(values["k"]))
        buckets = self.distance_bucket(np.arange(k.shape[2]) - positions[:, :, None])
        buckets = np.broadcast_to(buckets[:, None], (*q.shape[:3], k.shape[2]))  # (B, N, T, S)
        products = []
        if record.of_queries:
            by_bucket = a.matmul(q, self.distance_vectors("relative_keys").swapaxes(1, 2))
            products.append(np.take_along_axis(by_bucket, buckets, axis=3))
        if record.of_keys:
            by_bucket = a.matmul(k, self.distance_vectors("relative_queries").swapaxes(1, 2))
            of_keys = np.take_along_axis(by_bucket, buckets.swapaxes(2, 3), axis=3)
            products.append(of_keys.swapaxes(2, 3))
        return products

    def distance_vectors(self, name: str) -> np.ndarray:
        """Return the vectors of all buckets, (N or 1, num_buckets, H)."""
        table = self.arithmetic.widen(self.parameter(name))
        # Its first axis holds the buckets: (num_buckets, N, H), or (num_buckets, H).
        if self.distance_record().per_head:
            return table.swapaxes(0, 1)
        return table[None]

    def distance_bucket(self, distance: np.ndarray) -> np.ndarray:
        """Return the bucket of a distance from a query to a key, below 0 for a key before it."""
        record = self.distance_record()
        away = np.abs(distance)
        steps = away
        if record.num_exact is not None:
            steps = np.where(away <= record.num_exact, away, self.logarithmic_step(away))
        offset = np.clip(np.sign(distance) * steps, -record.num_before, record.num_after)
        return offset + record.num_before

    def logarithmic_step(self, away: np.ndarray) -> np.ndarray:
        """Return the number of a bucket that far distances share, counted as near distances are."""
        record = self.distance_record()
        if record.num_exact is None or record.max_distance is None:
            return away
        exact = record.num_exact
        # float32, and in this order, as DeBERTa's code: a different rounding moves borders.
        largest = np.log(np.float32((record.max_distance - 1) / exact))
        ratio = (np.maximum(away, exact) / exact).astype(np.float32)
        share = np.log(ratio) / largest
        return exact + np.ceil(share * np.float32(exact - 1)).astype(np.int64)

    def scale_of_distances(self) -> float:
        """Return the divisor of products with vectors of distances."""
        return self.scale()

    def distance_record(self) -> RelativeProducts:
        """Return the record of products with vectors of distances, which the layer must have."""
        return cast(RelativeProducts, self.problem.spec.relative_products)

    def sinusoid_products(self, values: Values, positions: np.ndarray) -> list[np.ndarray]:
        """Return products of biased queries with projected sinusoids, and of keys with a bias.

        They are not scaled. Each is (B, N, T, S).
        """
        a = self.arithmetic
        q, k = a.widen(values["q"]), self.per_query_head(a.widen(values["k"]))
        distances = self.sinusoid_distance(positions[:, :, None] - np.arange(k.shape[2]))
        distinct, index = np.unique(distances, return_inverse=True)
        # The shape of the index differs between versions of NumPy.
        index = np.broadcast_to(index.reshape(distances.shape)[:, None], (*q.shape[:3], k.shape[2]))
        table = self.sinusoid_table()
        vectors = a.matmul(self.sinusoids(distinct), table.reshape(len(table), -1))
        vectors = vectors.reshape(-1, *table.shape[1:]).swapaxes(0, 1)  # (N, distances, H)
        by_distance = a.matmul(q + self.bias_of_heads("position_bias"), vectors.swapaxes(1, 2))
        of_content = a.matmul(self.bias_of_heads("content_bias"), k.swapaxes(2, 3))
        return [
            np.take_along_axis(by_distance, index, axis=3),
            np.broadcast_to(of_content, index.shape),
        ]

    def sinusoid_distance(self, distance: np.ndarray) -> np.ndarray:
        """Return the distance whose sinusoids a query and a key have: query - key."""
        return distance

    def sinusoids(self, distances: np.ndarray) -> np.ndarray:
        """Return the sinusoids of distances, (distances, d_in)."""
        spec, wide = self.problem.spec, self.arithmetic.wide
        # An edit of the record overrides this method, whichever kind of products a layer has.
        record = cast(SinusoidProducts, self.distance_record())
        pair = np.arange(spec.d_in // 2)
        frequencies = 1.0 / record.theta ** (2 * pair / spec.d_in)
        angles = distances[:, None] * frequencies
        return self.in_sinusoid_order(np.sin(angles), np.cos(angles)).astype(wide)

    def in_sinusoid_order(self, sines: np.ndarray, cosines: np.ndarray) -> np.ndarray:
        """Return sines and cosines of all frequencies in the order of the projection's inputs."""
        return np.stack([sines, cosines], axis=2).reshape(len(sines), -1)

    def sinusoid_table(self) -> np.ndarray:
        """Return the projection of sinusoids, (d_in, N, H)."""
        return self.arithmetic.widen(self.parameter("relative_sinusoids"))

    def bias_of_heads(self, name: str) -> np.ndarray:
        """Return a learned vector of each query head, (N, 1, H)."""
        return self.arithmetic.widen(self.parameter(name))[:, None]

    def scale(self) -> float:
        """Divisor of the products of queries and keys."""
        spec = self.problem.spec
        if spec.scale is not None:
            return 1.0 / spec.scale
        return np.sqrt(spec.head_dim) / self.mscale() ** 2

    def mscale(self) -> float:
        """Factor of queries and of keys in a layer with latents and YaRN."""
        spec = self.problem.spec
        if spec.latent is None or spec.rope is None:
            return 1.0
        scaling = spec.rope.scaling
        if not isinstance(scaling, YarnScaling) or scaling.mscale_all_dim is None:
            return 1.0
        # YaRN's factor: 0.1 ln(s) + 1, arXiv:2309.00071.
        return 1.0 + 0.1 * scaling.mscale_all_dim * np.log(max(scaling.factor, 1.0))

    def capped(self, scores: np.ndarray) -> np.ndarray:
        """Return the scores with the soft cap, if any."""
        cap, keep = self.soft_cap(), self.arithmetic.between_scores
        if cap is None:
            return scores
        return keep(cap * keep(np.tanh(keep(scores / cap))))

    def soft_cap(self) -> np.floating | None:
        """Bound of the scores, or None."""
        cap = self.problem.spec.soft_cap
        if cap is None:
            return None
        return self.arithmetic.wide.type(cap)

    def sinks(self) -> np.ndarray | None:
        """Attention sinks, (1, N, 1, 1), or None."""
        if not self.problem.spec.sinks:
            return None
        return self.arithmetic.widen(self.parameter("sinks")).reshape(1, -1, 1, 1)

    def has_bias(self, name: str) -> bool:
        """Return whether a projection has a bias."""
        return f"{name}.bias" in self.problem.weights

    def parameter(self, name: str) -> np.ndarray:
        """Return a weight by its canonical name."""
        return self.problem.weights[name]

    def linear(self, name: str, x: np.ndarray) -> np.ndarray:
        """Return a projection of features by its name."""
        bias = None
        if self.has_bias(name):
            bias = self.parameter(f"{name}.bias")
        return self.projected(x, self.parameter(f"{name}.weight"), bias)

    def projected(self, x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
        """Return the features that a weight (out, in) and a bias make of others."""
        a = self.arithmetic
        start = 0.0 if bias is None else a.widen(bias)
        return a.keep(a.matmul(a.widen(x), self.wide_weight(weight).T, start))

    def wide_weight(self, weight: np.ndarray) -> np.ndarray:
        """Return a weight (out, in) as stored, in the dtype of sums."""
        return self.arithmetic.weight(self.arithmetic.widen(weight))

    def project(
        self, inputs: Mapping[str, np.ndarray], positions: np.ndarray
    ) -> dict[str, np.ndarray]:
        """Return q, k and v by their inputs, as they enter attention, and the gate, if any."""
        query = inputs["q"]
        if self.problem.spec.latent is not None:
            latents = self.latents(query, positions)
            heads = {"q": self.latent_queries(query, positions), "latents": latents}
            heads |= self.expanded(latents)
        else:
            heads = self.heads(inputs, positions)
        if self.problem.spec.gate is not None:
            heads["gate"] = self.linear("gate_proj", query)
        return heads

    def heads(
        self, inputs: Mapping[str, np.ndarray], positions: np.ndarray
    ) -> dict[str, np.ndarray]:
        """Return the requested ones of q, k and v of a layer without latents."""
        own = "q" if self.problem.spec.shared_kv else "qkv"
        projected = {}
        for name in self.requested:
            if name in own:
                projected[name] = self.linear(f"{name}_proj", inputs[name])
        heads = {name: self.entering(name, x, positions) for name, x in projected.items()}
        for name in self.requested:
            if name not in own:
                heads[name] = self.received(name, inputs[name], positions)
        return heads

    def gated(self, values: Values) -> np.ndarray:
        """Return the context times the sigmoid of the gate."""
        a, context = self.arithmetic, values["context"]
        if self.problem.spec.gate is None:
            return context
        return a.keep(a.widen(context) * a.between(self.openness(values)))

    def openness(self, values: Values) -> np.ndarray:
        """Return the factor of the context, (B, N, T, H or 1), between 0 and 1."""
        gate = self.arithmetic.widen(values["gate"])
        gate = gate.reshape(*gate.shape[:2], self.problem.spec.num_heads, -1).swapaxes(1, 2)
        with np.errstate(over="ignore"):  # exp may be infinite, and the factor is then 0
            return 1.0 / (1.0 + np.exp(-gate))

    def entering(self, name: str, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return projected features as heads that enter attention.

        They are clipped, split, normalized and rotated.
        """
        norm, x = self.norm(name), self.clipped(name, x)
        if norm is not None and norm.over == "width":
            x = self.normed(name, x, norm)
        x = self.split_heads(x, self.num_heads(name))
        if norm is not None and norm.over == "head" and not norm.after_rope:
            x = self.normed(name, x, norm)
        x = self.turned(name, x, positions)
        if norm is not None and norm.after_rope:
            x = self.normed(name, x, norm)
        return self.tempered(name, x, positions)

    def received(self, name: str, heads: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """The keys or values of another layer, as they entered its attention."""
        return heads

    def latent_queries(self, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return the queries of a layer with latents."""
        if self.latent().q_rank:
            q = self.linear("q_b_proj", self.query_latents(x))
        else:
            q = self.linear("q_proj", x)
        q = self.split_heads(q, self.num_heads("q"))
        return self.tempered("q", self.turned("q", q, positions), positions)

    def query_latents(self, x: np.ndarray) -> np.ndarray:
        """Return the query latents, (B, T, q_rank)."""
        return self.normed_latent("q_a", self.linear("q_a_proj", x))

    def latents(self, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return the cached vector of each token, (B, 1, T, W).

        It consists of the latent and the shared features of keys.
        """
        latent, shared = np.split(self.linear("kv_a_proj", x), [self.latent().kv_rank], axis=-1)
        latents = np.concatenate([self.normed_latent("kv_a", latent), shared], axis=-1)
        return self.turned("k", latents[:, None], positions)

    def expanded(self, latents: np.ndarray) -> dict[str, np.ndarray]:
        """Return the keys and values of all heads, expanded from latents (B, 1, S, W)."""
        latent, shared = np.split(latents, [self.latent().kv_rank], axis=-1)
        own_features = self.problem.spec.head_dim - shared.shape[-1]
        kv = self.split_heads(self.linear("kv_b_proj", latent[:, 0]), self.num_heads("k"))
        shared = np.broadcast_to(shared, (*kv.shape[:3], shared.shape[-1]))
        return {
            "k": np.concatenate([kv[..., :own_features], shared], axis=-1),
            "v": kv[..., own_features:],
        }

    def latent(self) -> Latent:
        """Return the latents of keys and values, which the layer must have."""
        return cast(Latent, self.problem.spec.latent)

    def normed_latent(self, name: str, x: np.ndarray) -> np.ndarray:
        """Return a latent after its norm, times its factor."""
        normed = self.normed(name, x, cast(Norm, self.norm(name)))
        return self.arithmetic.keep(self.arithmetic.widen(normed) * self.latent_factor(name))

    def latent_factor(self, name: str) -> np.floating:
        """Return the factor of a latent after its norm."""
        return self.arithmetic.wide.type(self.latent().factors[f"{name}_norm"])

    def tempered(self, name: str, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return q times its temperature, if any; k and v unchanged."""
        if self.problem.spec.temperature is None or name != "q":
            return x
        return self.arithmetic.keep(self.arithmetic.widen(x) * self.factors(positions))

    def factors(self, positions: np.ndarray) -> np.ndarray:
        """Return the temperature of queries by position, (B or 1, 1, T, 1)."""
        temperature, wide = self.temperature(), self.arithmetic.wide
        of_call = positions + temperature.first_position
        lengths = self.lengths_passed(of_call, temperature.length).astype(wide)
        one, scale = wide.type(1.0), wide.type(temperature.scale)
        return (one + scale * np.log(one + lengths))[:, None, :, None]

    def temperature(self) -> Temperature:
        """Return the temperature of queries, which the layer must have."""
        return cast(Temperature, self.problem.spec.temperature)

    def lengths_passed(self, positions: np.ndarray, length: int) -> np.ndarray:
        """Return the number of whole lengths before a position."""
        return np.floor(positions / length)

    def clipped(self, name: str, x: np.ndarray) -> np.ndarray:
        """Return q, k or v, clipped."""
        a, limit = self.arithmetic, self.problem.spec.clip_qkv
        if limit is None:
            return x
        return a.keep(np.clip(a.widen(x), -limit, limit))

    def norm(self, name: str) -> Norm | None:
        """Return the norm of q, k, v or the context."""
        return self.problem.spec.norms.get(f"{name}_norm")

    def normed(self, name: str, x: np.ndarray, norm: Norm) -> np.ndarray:
        """Return q, k, v or the context, normalized over its last axis."""
        widen = self.arithmetic.widen
        y = self.arithmetic.between(self.standardised(name, widen(x), norm))
        if norm.weight is not None:
            weight = widen(self.parameter(f"{name}_norm.weight"))
            y = y * norms.broadcast(norms.factor(weight, norm), norm)
        if norm.bias:
            y = y + norms.broadcast(widen(self.parameter(f"{name}_norm.bias")), norm)
        return self.arithmetic.keep(y)

    def standardised(self, name: str, x: np.ndarray, norm: Norm) -> np.ndarray:
        """Return q, k, v or the context, divided by the root of its mean square."""
        return norms.standardised(x, norm)[0]

    def num_heads(self, name: str) -> int:
        """Return the number of heads of q, k or v."""
        if name == "q":
            return self.problem.spec.num_heads
        return self.problem.spec.num_kv_heads

    def split_heads(self, x: np.ndarray, num_heads: int) -> np.ndarray:
        """Return (B, T, N * H) as (B, N, T, H)."""
        return x.reshape(*x.shape[:2], num_heads, -1).swapaxes(1, 2)

    def combine_heads(self, x: np.ndarray) -> np.ndarray:
        """Return (B, N, T, H) as (B, T, N * H)."""
        return x.swapaxes(1, 2).reshape(x.shape[0], x.shape[2], -1)

    def turned(self, name: str, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return q or k, rotated by position if the layer has RoPE; v unchanged."""
        if self.problem.spec.rope is None or name == "v":
            return x
        return self.rotate(x, positions)

    def rotate(self, x: np.ndarray, positions: np.ndarray, direction: int = 1) -> np.ndarray:
        """Rotate the pairs of x by position; direction -1 is the inverse rotation."""
        first, second = pair_slices(self.rope(), x.shape[-1])
        cos, sin = self.tables(positions)
        sin = direction * sin
        keep, x = self.arithmetic.between, self.arithmetic.widen(x)
        rotated = x.copy()  # features outside pairs are unchanged
        rotated[..., first] = keep(x[..., first] * cos) - keep(x[..., second] * sin)
        rotated[..., second] = keep(x[..., second] * cos) + keep(x[..., first] * sin)
        return self.arithmetic.keep(rotated)

    def tables(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the cosines and sines of the rotations, (B or 1, 1, T, pairs) each."""
        angles, keep = self.angles(positions), self.arithmetic.between
        factor = self.arithmetic.wide.type(self.attention_factor())
        return keep(factor * np.cos(angles)), keep(factor * np.sin(angles))

    def rope(self) -> Rope:
        """Return the RoPE of the layer, which must have one."""
        return cast(Rope, self.problem.spec.rope)

    def attention_factor(self) -> float:
        """Factor of cosines and sines."""
        return amplitude(self.rope())

    def angles(self, positions: np.ndarray) -> np.ndarray:
        """Return the angle of each pair and token, (B or 1, 1, T, pairs)."""
        wide, rope, head_dim = self.arithmetic.wide, self.rope(), self.problem.spec.head_dim
        has_axes = positions.ndim == 3
        of_axes = positions if has_axes else positions[None]
        lengths = self.lengths(of_axes.max(axis=0))
        distinct_lengths, index = np.unique(lengths, return_inverse=True)
        tables = [frequencies(rope, head_dim, int(n), wide.type) for n in distinct_lengths]
        # (B or 1, T, pairs); the shape of the index differs between versions of NumPy.
        of_tokens = np.array(tables, np.float64)[index.reshape(lengths.shape)]
        axis_of_pairs = axes(rope, head_dim) if has_axes else [0] * of_tokens.shape[-1]
        of_pairs = np.moveaxis(of_axes[axis_of_pairs], 0, -1)
        return (of_pairs.astype(wide) * of_tokens.astype(wide))[:, None]

    def lengths(self, positions: np.ndarray) -> np.ndarray:
        """Return the length that frequencies depend on, by position (B or 1, T).

        It is the last position of a sequence, plus 1.
        """
        return np.broadcast_to(
            positions.max(axis=-1, keepdims=True, initial=0) + 1, positions.shape
        )

    def by_group(self, of_queries: np.ndarray, of_keys: np.ndarray) -> np.ndarray:
        """Return the products of query heads and their key/value heads, (B, N, T, …).

        Query heads are (B, N, T, …), key/value heads (B, K, …).
        """
        batch, heads, tokens, width = of_queries.shape
        if heads == of_keys.shape[1]:
            return self.arithmetic.matmul(of_queries, of_keys)
        # The same products as of repeated heads, without their copies.
        grouped = of_queries.reshape(batch, of_keys.shape[1], -1, tokens, width)
        products = self.arithmetic.matmul(grouped, of_keys[:, :, None])
        return products.reshape(batch, heads, tokens, -1)

    def per_query_head(self, x: np.ndarray) -> np.ndarray:
        """Return key/value heads (B, K, S, H) repeated for query heads.

        Query head n has key/value head n // (N // K).
        """
        group = self.problem.spec.num_heads // self.problem.spec.num_kv_heads
        if group == 1:
            return x
        return x.repeat(group, axis=1)


@dataclass(frozen=True)
class CachedCall:
    """One call with a cache: new tokens `x`.

    `added` of them are real; they follow `before` tokens of each sequence.
    """

    layer: Layer
    index: int
    x: np.ndarray
    before: np.ndarray
    added: np.ndarray

    @property
    def slots(self) -> np.ndarray:
        """Return the numbers of new tokens, which are also their slots by default, (B, T)."""
        return self.before[:, None] + np.arange(self.x.shape[1])

    def mask(self, _: Values) -> dict[str, np.ndarray]:
        case = self.layer.problem.case
        t = self.slots[:, None, :, None]
        s = self.layer.tokens_in_slots(self.index)[:, None, None]
        masked = self.layer.is_later(t, s) | self.layer.is_out_of_reach(t, s)
        if case.mask is not None:
            masked = masked | self.layer.own_mask(self.layer.problem.step_mask(self.index))
        shape = (case.batch, case.spec.num_heads, self.x.shape[1], case.capacity)
        return {"mask": self.layer.hidden(np.broadcast_to(masked, shape))}

    def qkv(self, _: Values) -> dict[str, np.ndarray]:
        problem = self.layer.problem
        inputs = {
            name: problem.step_input(self.index, side) for name, side in problem.sides.items()
        }
        return self.layer.project({**inputs, "q": self.x}, problem.case.positions(self.index))

    def scores(self, values: Values) -> dict[str, np.ndarray]:
        return self.layer.scores(values, self.slots)

    def cache(self, values: Values) -> dict[str, np.ndarray]:
        grown, kv = self.grown("cache.", values, values)
        return {**grown, "cache.keys": kv["k"], "cache.values": kv["v"]}

    def grown(
        self, cache: str, values: Values, own: Values
    ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Return the cache with the call's new tokens, and the keys and values to attend to."""
        layer = self.layer
        if layer.problem.spec.latent is not None:
            new = {"latents": own["latents"]}
            grown = layer.appended(cache, values, new, self.before, self.added)
            return grown, layer.expanded(grown[f"{cache}latents"])
        new = {"keys": own["k"], "values": own["v"]}
        if layer.problem.case.cache_quantization is not None:
            first = self.of_first_call(own)
            if self.index > 0 and layer.exact_calls(self.index - 1):
                rounded = layer.rounded_later(values, cache, first, self.index)
                # A copy would read every stage.
                values = ChainMap(rounded, cast(Any, values))
            if self.index not in layer.exact_calls(self.index):
                new = layer.read_back(new, first, self.index)
        grown = layer.appended(cache, values, new, self.before, self.added)
        return grown, {"k": grown[f"{cache}keys"], "v": grown[f"{cache}values"]}

    def of_first_call(self, own: Values) -> dict[str, np.ndarray]:
        """Return the new keys and values of the first call."""
        if self.index == 0:
            return {"keys": own["k"], "values": own["v"]}
        if "first.k" in own:
            return {"keys": own["first.k"], "values": own["first.v"]}
        # A module computes its first call from the inputs.
        heads = self.layer.call(0).qkv({})
        return {"keys": heads["k"], "values": heads["v"]}

    def whole(self, values: Values) -> dict[str, np.ndarray]:
        layer = self.layer
        own = {**self.mask(values), **self.qkv(values)}
        grown, kv = self.grown("module.cache.", values, own)
        own |= kv
        # An edit may read it, as it does in a call of functions.
        own["cache.lengths"] = grown["module.cache.lengths"]
        for stage in (self.scores, layer.attn_weights, layer.context, layer.output):
            own |= stage(own)
        is_real = np.arange(self.x.shape[1]) < self.added[:, None]
        # A plain 0.0 has no common dtype with bfloat16 in NumPy 1.
        zero = np.zeros((), layer.arithmetic.dtype)
        output = np.where(is_real[:, :, None], own["output"], zero)
        return {"module.output": output, "blocks.output": output, "plain.output": output, **grown}

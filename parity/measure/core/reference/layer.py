"""Attention stage by stage, directly from the formulas: each method is a step that a known bug may
replace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
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
    Temperature,
    YarnScaling,
)
from parity.measure.core.problem import Problem
from parity.measure.core.reference import norms
from parity.measure.core.reference.arithmetic import Arithmetic
from parity.measure.core.reference.rope import amplitude, axes, frequencies, pair_slices
from parity.measure.core.sample import of_paths, steps_of_sample
from parity.measure.core.stages import Step, Values, steps_of


@dataclass(frozen=True)
class Layer:
    """Layer of a problem in some arithmetic; known bugs override parts of it.

    Attributes:
        problem: problem to compute.
        arithmetic: arithmetic of the computation.
        asked: which of q, k and v to compute.
        overrides: functions that replace methods, by name; other methods have no overhead.
    """

    problem: Problem
    arithmetic: Arithmetic
    asked: str = "qkv"
    overrides: dict[str, Callable[..., Any]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def override(self, **methods: Callable[..., Any]) -> None:
        """Replace methods of this layer by functions."""
        self.overrides.update(methods)
        self.__dict__.update(methods)  # instance attributes hide methods of the class

    @contextmanager
    def overriding(self, **methods: Callable[..., Any]) -> Iterator[None]:
        """Replace methods of this layer by functions within the block."""
        before = {name: self.overrides[name] for name in methods if name in self.overrides}
        self.override(**methods)
        try:
            yield
        finally:
            for name in methods:
                del self.overrides[name], self.__dict__[name]
            self.override(**before)

    def asking(self, names: str) -> Layer:
        """Return a layer that computes only some of q, k and v."""
        other = replace(self, asked=names)
        other.override(**self.overrides)
        return other

    def steps(self) -> Sequence[Step]:
        """Return the stages as functions: see `parity.measure.core.stages`."""
        case, sample = self.problem.case, self.problem.sample
        return steps_of(self, case) if sample is None else steps_of_sample(self, sample, case)

    # ---- Stages ----------------------------------------------------------------------------------

    def mask(self, _: Values) -> dict[str, np.ndarray]:
        case = self.problem.case
        t, s = np.arange(case.seq_len)[:, None], np.arange(case.key_len)[None, :]
        shape = (case.batch, case.spec.num_heads, case.seq_len, case.key_len)
        masked = np.zeros(shape if case.random_mask else (case.batch, 1, *shape[2:]), bool)
        if case.is_causal:
            masked |= self.is_later(t, s)
        if case.window_size is not None:
            masked |= self.is_later(t, s) | self.is_before_window(t, s, case.window_size)
        masked |= self.is_out_of_reach(t, s)
        if case.key_padding_lengths is not None:
            masked |= self.is_padding(s, np.array(case.key_padding_lengths)[:, None, None, None])
        if case.segment_ids is not None:
            masked |= self.is_in_another_segment(np.array(case.segment_ids)[:, None])
        masked |= self.problem.inputs.get("mask", False)
        return {"mask": np.broadcast_to(self.hidden(masked), shape)}

    def qkv(self, _: Values) -> dict[str, np.ndarray]:
        entering = {
            name: self.problem.finite_in_padding(side) for name, side in self.problem.sides.items()
        }
        return self.project(entering, self.problem.case.positions())

    def scores(
        self, values: Values, places: np.ndarray | None = None, products: np.ndarray | None = None
    ) -> dict[str, np.ndarray]:
        """Return the scores of queries at positions (B or 1, T), default 0, 1, …; from their
        products, if given.
        """
        scores = self.capped(self.products(values) if products is None else products)
        bias, keep = self.score_bias(), self.arithmetic.between_scores
        places = np.arange(scores.shape[2])[None] if places is None else places
        if self.problem.spec.alibi is not None:
            scores = keep(
                scores - keep(self.lost_by_distance(self.distances(places, scores.shape[3])))
            )
        if self.problem.spec.relative_bias is not None:
            scores = keep(scores + self.gained_by_distance(self.buckets(places, scores.shape[3])))
        if self.problem.spec.relative_products is not None:
            for products in self.relative_products(values, places):
                scores = keep(
                    scores
                    + keep(keep(products) / self.arithmetic.wide.type(self.scale_of_distances()))
                )
        return {"scores": scores if bias is None else keep(scores + self.arithmetic.widen(bias))}

    def products(self, values: Values) -> np.ndarray:
        """Return the scaled products of queries and keys."""
        q, k = self.arithmetic.widen(values["q"]), self.arithmetic.widen(values["k"])
        keep = self.arithmetic.between_scores
        return keep(
            keep(self.by_group(q, k.swapaxes(2, 3))) / self.arithmetic.wide.type(self.scale())
        )

    def attn_weights(self, values: Values) -> dict[str, np.ndarray]:
        # ttnn's softmax passes scores and exponentials through the matrix engine.
        enter = self.arithmetic.enter if self.arithmetic.kind.startswith("tensix") else lambda x: x
        scores, mask = enter(values["scores"].astype(self.arithmetic.wide)), values["mask"]
        shown, sinks = np.where(mask, -np.inf, scores), self.sinks()
        highest = np.maximum(
            shown.max(axis=-1, keepdims=True, initial=-np.inf), -np.inf if sinks is None else sinks
        )
        highest = np.where(np.isfinite(highest), highest, 0.0).astype(scores.dtype)
        exponentials = enter(np.exp(shown - highest))
        bias = self.score_bias()
        is_hidden = (
            mask if bias is None or not np.isneginf(bias).any() else mask | np.isneginf(bias)
        )
        # Only rows whose keys are all hidden are fully masked. Non-finite scores remain 0 / 0 =
        # NaN.
        total = exponentials.sum(axis=-1, keepdims=True)
        is_empty = np.logical_and(is_hidden.all(axis=-1, keepdims=True), sinks is None)
        total = (
            np.where(is_empty, 1.0, total)
            if sinks is None
            else total + enter(np.exp(enter(sinks) - highest))
        )
        attn_weights = self.arithmetic.keep(exponentials / total.astype(exponentials.dtype))
        return {"attn_weights": self.of_empty_rows(attn_weights, scores, is_empty)}

    def context(self, values: Values) -> dict[str, np.ndarray]:
        """Return the weighted sums of visible values; hidden values have no effect, whatever they
        contain.
        """
        is_bad = ~np.isfinite(values["v"])
        if not is_bad.any():
            return self.weighed(values)
        finite = np.where(is_bad, np.zeros_like(values["v"]), values["v"])
        context = self.weighed({**values, "v": finite})["context"]
        is_bad = np.any(self.per_query_head(is_bad), axis=-1)[:, :, None, :]
        sees_bad = np.any(is_bad & ~values["mask"], axis=-1, keepdims=True)
        return {"context": np.where(sees_bad, np.full_like(context, np.nan), context)}

    def weighed(self, values: Values) -> dict[str, np.ndarray]:
        """Return the formula, in which 0 * NaN is NaN."""
        attn_weights, v = (
            self.arithmetic.widen(values["attn_weights"]),
            self.arithmetic.widen(values["v"]),
        )
        return {"context": self.arithmetic.keep(self.by_group(attn_weights, v))}

    def output(self, values: Values) -> dict[str, np.ndarray]:
        combined = self.combined(values)
        return {
            "output": self.linear("out_proj", combined) if self.problem.spec.out_proj else combined
        }

    def combined(self, values: Values) -> np.ndarray:
        """Return the concatenated context of all heads, (B, T, N * H), gated or normalized as the
        layer requires.
        """
        context, norm = self.combine_heads(self.gated(values)), self.norm("context")
        return context if norm is None else self.normed("context", context, norm)

    def whole(self, _: Values) -> dict[str, np.ndarray]:
        return of_paths(self.forward())

    def forward(self) -> dict[str, np.ndarray]:
        values = dict[str, np.ndarray]()
        for stage in (
            self.mask,
            self.qkv,
            self.scores,
            self.attn_weights,
            self.context,
            self.output,
        ):
            values |= stage(values)
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
        case, grown = self.problem.case, {}
        for name, x in new.items():
            shape = (case.batch, x.shape[1], case.capacity, x.shape[3])
            old = values.get(f"previous.{cache}{name}", np.zeros(shape, self.arithmetic.dtype))
            slots = self.arithmetic.keep(old).copy()
            for b in range(case.batch):
                slots[b, :, before[b] : before[b] + added[b]] = self.arithmetic.cached(
                    x[b, :, : added[b]]
                )
            grown[f"{cache}{name}"] = slots
        return {**grown, f"{cache}lengths": (before + added).astype(np.int32)}

    # ---- Parts -----------------------------------------------------------------------------------

    def is_later(self, t: np.ndarray, s: np.ndarray) -> np.ndarray:
        """Return whether a key at position s is after a query at position t."""
        return s > t

    def is_before_window(self, t: np.ndarray, s: np.ndarray, size: int) -> np.ndarray:
        return s <= t - size

    def is_out_of_reach(self, t: np.ndarray, s: np.ndarray) -> np.ndarray:
        """Return whether a key at position s is outside the window or chunk of a query at position
        t.
        """
        spec = self.problem.spec
        if spec.window_size is not None:
            return self.is_before_window(t, s, spec.window_size) | self.is_after_window(
                t, s, spec.window_size
            )
        return (
            np.zeros(1, bool)
            if spec.chunk_size is None
            else self.is_in_another_chunk(t, s, spec.chunk_size)
        )

    def is_after_window(self, t: np.ndarray, s: np.ndarray, size: int) -> np.ndarray:
        return s >= t + size

    def is_in_another_chunk(self, t: np.ndarray, s: np.ndarray, size: int) -> np.ndarray:
        return t // size != s // size

    def is_padding(self, s: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        return s >= lengths

    def is_in_another_segment(self, ids: np.ndarray) -> np.ndarray:
        return ids[..., :, None] != ids[..., None, :]

    def hidden(self, masked: np.ndarray) -> np.ndarray:
        """Return the mask, True for hidden keys."""
        return masked

    def of_empty_rows(
        self, attn_weights: np.ndarray, scores: np.ndarray, is_empty: np.ndarray
    ) -> np.ndarray:
        """Return the attention weights; those of fully masked rows are 0."""
        return attn_weights

    def score_bias(self) -> np.ndarray | None:
        """Return the bias of the scores, or None."""
        return self.problem.bias

    def distances(self, places: np.ndarray, key_len: int) -> np.ndarray:
        """Return the distances between queries and keys, (B or 1, 1, T, S)."""
        return np.abs(places[:, None, :, None] - np.arange(key_len))

    def lost_by_distance(self, distances: np.ndarray) -> np.ndarray:
        """Return the penalty of ALiBi on scores, (B or 1, N, T, S)."""
        return (
            self.slopes()[:, None, None].astype(wide := self.arithmetic.wide)
        ) * distances.astype(wide)

    def slopes(self) -> np.ndarray:
        """Return ALiBi's slope of each head, (N,)."""
        spec = self.problem.spec
        alibi = cast(Alibi, spec.alibi)  # only called if the layer has one
        n = np.arange(1, spec.num_heads + 1)
        largest = 2 ** int(np.log2(spec.num_heads))
        of_rest = (2 * (n - largest) - 1) / (2 * largest)
        slopes = 2.0 ** (-alibi.max_bias * np.where(n <= largest, n / largest, of_rest))
        return slopes / self.scale() if alibi.scaled else slopes

    def gained_by_distance(self, buckets: np.ndarray) -> np.ndarray:
        """Return the relative bias of the scores, (B or 1, N, T, S), by the buckets of distances (B
        or 1, T, S).
        """
        return np.moveaxis(self.arithmetic.widen(self.relative_table())[buckets], -1, 1)

    def relative_table(self) -> np.ndarray:
        """Return the table of the relative bias, (num_buckets, N)."""
        return self.parameter("relative_bias")

    def buckets(self, places: np.ndarray, key_len: int) -> np.ndarray:
        """Return the buckets of distances from queries to keys, or of their grid offsets, (B or 1,
        T, S).
        """
        grid = self.problem.spec.relative_bias
        if isinstance(grid, GridBias):
            return self.bucket_on(grid, places[:, :, None], np.arange(key_len))
        return self.bucket(np.arange(key_len) - places[:, :, None])

    def bucket_on(self, grid: GridBias, query: np.ndarray, key: np.ndarray) -> np.ndarray:
        """Return the bucket of a query and a key on a grid."""
        first = int(grid.class_token)
        (row, column), (key_row, key_column) = (
            np.divmod(place - first, grid.width) for place in (query, key)
        )
        rows, columns = row - key_row + grid.height - 1, column - key_column + grid.width - 1
        of_difference = rows * (2 * grid.width - 1) + columns
        of_class = grid.num_buckets - np.where(query > 0, 2, np.where(key > 0, 3, 1))
        return np.where(grid.class_token & ((query == 0) | (key == 0)), of_class, of_difference)

    def bucket(self, distance: np.ndarray) -> np.ndarray:
        """Return the bucket of the distance from a query to a key, negative for an earlier key."""
        relative = self.relative_bias()
        if not relative.bidirectional:
            return self.bucket_of_direction(
                np.where(distance < 0, -distance, 0), relative.num_buckets
            )
        half = relative.num_buckets // 2
        return self.bucket_of_direction(np.abs(distance), half) + np.where(distance > 0, half, 0)

    def bucket_of_direction(self, away: np.ndarray, count: int) -> np.ndarray:
        """Return one of `count` buckets: the first half have one distance each, the others
        widen.
        """
        exact = count // 2
        steps = self.share_of_logarithm(np.maximum(away, exact), exact) * np.float32(count - exact)
        return np.where(
            away < exact, away, np.minimum(exact + np.floor(steps).astype(np.int64), count - 1)
        )

    def share_of_logarithm(self, away: np.ndarray, exact: int) -> np.ndarray:
        """Return the logarithmic position of a distance from the first inexact one (0) to the
        largest (1); float32.
        """
        largest = np.log(self.relative_bias().max_distance / exact)
        ratio = away.astype(np.float32) / np.float32(exact)
        return np.log(ratio.astype(np.float64)).astype(np.float32) / np.float32(largest)

    def relative_bias(self) -> RelativeBias:
        """Relative bias of the layer."""
        return cast(
            RelativeBias, self.problem.spec.relative_bias
        )  # only called if the layer has one

    def relative_products(self, values: Values, places: np.ndarray) -> list[np.ndarray]:
        """Return products of queries and of keys with the vectors of distances, (B, N, T, S) each,
        not scaled.
        """
        held, a = self.distance_record(), self.arithmetic
        q, k = a.widen(values["q"]), self.per_query_head(a.widen(values["k"]))
        found, buckets = (
            [],
            self.distance_bucket(np.arange(k.shape[2]) - places[:, :, None])[:, None],
        )  # (B, 1, T, S)
        buckets = np.broadcast_to(buckets, (*q.shape[:3], k.shape[2]))
        if held.of_queries:
            by_bucket = a.matmul(q, self.distance_vectors("relative_keys").swapaxes(1, 2))
            found.append(np.take_along_axis(by_bucket, buckets, axis=3))
        if held.of_keys:
            by_bucket = a.matmul(k, self.distance_vectors("relative_queries").swapaxes(1, 2))
            found.append(
                np.take_along_axis(by_bucket, buckets.swapaxes(2, 3), axis=3).swapaxes(2, 3)
            )
        return found

    def distance_vectors(self, name: str) -> np.ndarray:
        """Return the vectors of all buckets, (N or 1, num_buckets, H)."""
        table = self.arithmetic.widen(self.parameter(name))
        return table.swapaxes(0, 1) if self.distance_record().per_head else table[None]

    def distance_bucket(self, distance: np.ndarray) -> np.ndarray:
        """Return the bucket of a distance from a query to a key, below 0 for a key before it."""
        held = self.distance_record()
        away = np.abs(distance)
        steps = np.where(away <= (held.num_exact or away), away, self.logarithmic_step(away))
        return (
            np.clip(np.sign(distance) * steps, -held.num_before, held.num_after) + held.num_before
        )

    def logarithmic_step(self, away: np.ndarray) -> np.ndarray:
        """Return the number of a bucket that far distances share, counted as near distances are."""
        held = self.distance_record()
        if held.num_exact is None or held.max_distance is None:
            return away
        exact, wide = held.num_exact, np.float32
        largest = np.log(wide((held.max_distance - 1) / exact))
        share = np.log((np.maximum(away, exact) / exact).astype(wide)) / largest
        return exact + np.ceil(share * wide(exact - 1)).astype(np.int64)

    def scale_of_distances(self) -> float:
        """Return the divisor of products with vectors of distances."""
        return self.scale()

    def distance_record(self) -> RelativeProducts:
        """Return the record of products with vectors of distances."""
        return cast(RelativeProducts, self.problem.spec.relative_products)  # which is there

    def scale(self) -> float:
        """Divisor of the products of queries and keys."""
        spec = self.problem.spec
        return (
            np.sqrt(spec.head_dim) / self.mscale() ** 2 if spec.scale is None else 1.0 / spec.scale
        )

    def mscale(self) -> float:
        """Factor of queries and of keys in a layer with latents and YaRN."""
        scaling = None if self.problem.spec.rope is None else self.problem.spec.rope.scaling
        if (
            self.problem.spec.latent is None
            or not isinstance(scaling, YarnScaling)
            or scaling.mscale_all_dim is None
        ):
            return 1.0
        return 1.0 + 0.1 * scaling.mscale_all_dim * np.log(max(scaling.factor, 1.0))

    def capped(self, scores: np.ndarray) -> np.ndarray:
        """Return the scores with the soft cap, if any."""
        cap, keep = self.soft_cap(), self.arithmetic.between_scores
        return scores if cap is None else keep(cap * keep(np.tanh(keep(scores / cap))))

    def soft_cap(self) -> np.floating | None:
        """Bound of the scores, or None."""
        return (
            None if (cap := self.problem.spec.soft_cap) is None else self.arithmetic.wide.type(cap)
        )

    def sinks(self) -> np.ndarray | None:
        """Attention sinks, (1, N, 1, 1), or None."""
        held = self.arithmetic.widen(self.parameter("sinks")) if self.problem.spec.sinks else None
        return None if held is None else held.reshape(1, -1, 1, 1)

    def has_bias(self, name: str) -> bool:
        """Return whether a projection has a bias."""
        return f"{name}.bias" in self.problem.weights

    def parameter(self, name: str) -> np.ndarray:
        """Return a weight by its canonical name."""
        return self.problem.weights[name]

    def linear(self, name: str, x: np.ndarray) -> np.ndarray:
        a, sample = self.arithmetic, self.problem.sample
        made = slice(None) if sample is None or name != "out_proj" else sample.features
        bias = a.widen(self.parameter(f"{name}.bias")[made]) if self.has_bias(name) else 0.0
        return a.keep(
            a.matmul(a.widen(x), a.weight(a.widen(self.parameter(f"{name}.weight")[made])).T, bias)
        )

    def project(
        self, given: Mapping[str, np.ndarray], positions: np.ndarray
    ) -> dict[str, np.ndarray]:
        query = given["q"]
        if self.problem.spec.latent is not None:
            latents = self.latents(query, positions)
            heads = {
                "q": self.latent_queries(query, positions),
                "latents": latents,
                **self.expanded(latents),
            }
        else:
            own = "q" if self.problem.spec.shared_kv else "qkv"
            projected = {
                name: self.linear(f"{name}_proj", given[name]) for name in self.asked if name in own
            }
            heads = {name: self.entering(name, x, positions) for name, x in projected.items()}
            received = (name for name in self.asked if name not in own)
            heads |= {name: self.received(name, given[name], positions) for name in received}
        return (
            heads
            if self.problem.spec.gate is None
            else {**heads, "gate": self.linear("gate_proj", query)}
        )

    def gated(self, values: Values) -> np.ndarray:
        """Return the context times the sigmoid of the gate."""
        context = values["context"]
        if self.problem.spec.gate is None:
            return context
        return self.arithmetic.keep(
            self.arithmetic.widen(context) * self.arithmetic.between(self.openness(values))
        )

    def openness(self, values: Values) -> np.ndarray:
        """Return the factor of the context, (B, N, T, H or 1), between 0 and 1."""
        gate = self.arithmetic.widen(values["gate"])
        gate = gate.reshape(*gate.shape[:2], self.problem.spec.num_heads, -1).swapaxes(1, 2)
        with np.errstate(over="ignore"):
            return 1.0 / (1.0 + np.exp(-gate))

    def entering(self, name: str, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return projected features as heads that enter attention: clipped, split, normalized and
        rotated.
        """
        norm, x = self.norm(name), self.clipped(name, x)
        if norm is not None and norm.over == "width":
            x = self.normed(name, x, norm)
        x = self.split_heads(x, self.num_heads(name))
        if norm is not None and norm.over == "head" and not norm.after_rope:
            x = self.normed(name, x, norm)
        x = self.turned(name, x, positions)
        x = self.normed(name, x, norm) if norm is not None and norm.after_rope else x
        return self.tempered(name, x, positions)

    def received(self, name: str, heads: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """The keys or values of another layer, as they entered its attention."""
        return heads

    def latent_queries(self, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return the queries of a layer with latents."""
        q = (
            self.linear("q_b_proj", self.query_latents(x))
            if self.latent().q_rank
            else self.linear("q_proj", x)
        )
        return self.tempered(
            "q", self.turned("q", self.split_heads(q, self.num_heads("q")), positions), positions
        )

    def query_latents(self, x: np.ndarray) -> np.ndarray:
        """Return the query latents, (B, T, q_rank)."""
        return self.normed_latent("q_a", self.linear("q_a_proj", x))

    def latents(self, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return the cached vector of each token: latent and shared features of keys, (B, 1, T,
        W).
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
        """Latents of keys and values."""
        return cast(Latent, self.problem.spec.latent)  # only called if the layer has one

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
        temperature, wide = cast(Temperature, self.problem.spec.temperature), self.arithmetic.wide
        lengths = self.lengths_passed(
            positions + temperature.first_position, temperature.length
        ).astype(wide)
        return (wide.type(1.0) + wide.type(temperature.scale) * np.log(wide.type(1.0) + lengths))[
            :, None, :, None
        ]

    def lengths_passed(self, positions: np.ndarray, length: int) -> np.ndarray:
        """Return the number of whole lengths before a position."""
        return np.floor(positions / length)

    def clipped(self, name: str, x: np.ndarray) -> np.ndarray:
        """Return q, k or v, clipped."""
        limit = self.problem.spec.clip_qkv
        return (
            x
            if limit is None
            else self.arithmetic.keep(np.clip(self.arithmetic.widen(x), -limit, limit))
        )

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
        return self.problem.spec.num_heads if name == "q" else self.problem.spec.num_kv_heads

    def split_heads(self, x: np.ndarray, num_heads: int) -> np.ndarray:
        """Return (B, T, N * H) as (B, N, T, H)."""
        return x.reshape(*x.shape[:2], num_heads, -1).swapaxes(1, 2)

    def combine_heads(self, x: np.ndarray) -> np.ndarray:
        """Return (B, N, T, H) as (B, T, N * H)."""
        return x.swapaxes(1, 2).reshape(x.shape[0], x.shape[2], -1)

    def turned(self, name: str, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return q or k, rotated by position if the layer has RoPE; v unchanged."""
        return x if self.problem.spec.rope is None or name == "v" else self.rotate(x, positions)

    def rotate(self, x: np.ndarray, positions: np.ndarray, direction: int = 1) -> np.ndarray:
        """Rotate the pairs of x by position; direction -1 is the inverse rotation."""
        first, second = pair_slices(self.rope(), x.shape[-1])
        (cos, sin), keep, x = (
            self.tables(positions),
            self.arithmetic.between,
            self.arithmetic.widen(x),
        )
        rotated, sin = x.copy(), direction * sin  # features outside pairs are unchanged
        rotated[..., first] = keep(x[..., first] * cos) - keep(x[..., second] * sin)
        rotated[..., second] = keep(x[..., second] * cos) + keep(x[..., first] * sin)
        return self.arithmetic.keep(rotated)

    def tables(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the cosines and sines of the rotations, (B or 1, 1, T, pairs) each."""
        angles, factor = self.angles(positions), self.arithmetic.wide.type(self.attention_factor())
        return self.arithmetic.between(factor * np.cos(angles)), self.arithmetic.between(
            factor * np.sin(angles)
        )

    def rope(self) -> Rope:
        """RoPE of the layer."""
        return cast(Rope, self.problem.spec.rope)  # only called if the layer has one

    def attention_factor(self) -> float:
        """Factor of cosines and sines."""
        return amplitude(self.rope())

    def angles(self, positions: np.ndarray) -> np.ndarray:
        """Return the angle of each pair and token, (B or 1, 1, T, pairs)."""
        wide = self.arithmetic.wide
        of_axes = positions if positions.ndim == 3 else positions[None]
        lengths, head_dim = self.lengths(of_axes.max(axis=0)), self.problem.spec.head_dim
        known, number = np.unique(lengths, return_inverse=True)
        tables = np.array(
            [frequencies(self.rope(), head_dim, int(n), wide.type) for n in known], np.float64
        )
        of_tokens = tables[number.reshape(lengths.shape)]  # (B or 1, T, pairs)
        which = axes(self.rope(), head_dim) if positions.ndim == 3 else [0] * of_tokens.shape[-1]
        angles = np.moveaxis(of_axes[which], 0, -1).astype(wide) * of_tokens.astype(wide)
        return angles[:, None]

    def lengths(self, positions: np.ndarray) -> np.ndarray:
        """Return the length that frequencies depend on, by position (B or 1, T): its sequence's
        last position + 1.
        """
        return np.broadcast_to(
            positions.max(axis=-1, keepdims=True, initial=0) + 1, positions.shape
        )

    def by_group(self, of_queries: np.ndarray, of_keys: np.ndarray) -> np.ndarray:
        """Return the products of query heads (B, N, T, …) and their key/value heads (B, K, …), (B,
        N, T, …).
        """
        per_query_head = self.per_query_head
        batch, heads, tokens, width = of_queries.shape
        if heads == of_keys.shape[1] or "per_query_head" in self.overrides:
            return self.arithmetic.matmul(of_queries, per_query_head(of_keys))
        # The same products as of repeated heads, without their copies.
        grouped = of_queries.reshape(batch, of_keys.shape[1], -1, tokens, width)
        found = self.arithmetic.matmul(grouped, of_keys[:, :, None])
        return found.reshape(batch, heads, tokens, -1)

    def per_query_head(self, x: np.ndarray) -> np.ndarray:
        """Return key/value heads (B, K, S, H) repeated for query heads: head n // (N // K) for head
        n.
        """
        group = self.problem.spec.num_heads // self.problem.spec.num_kv_heads
        return x if group == 1 else x.repeat(group, axis=1)


@dataclass(frozen=True)
class CachedCall:
    """One call with a cache: new tokens `x`, `added` of them real, after `before` tokens of each
    sequence.
    """

    layer: Layer
    index: int
    x: np.ndarray
    before: np.ndarray
    added: np.ndarray

    @property
    def slots(self) -> np.ndarray:
        """Return the slots of new tokens, (B, T)."""
        return self.before[:, None] + np.arange(self.x.shape[1])

    def mask(self, _: Values) -> dict[str, np.ndarray]:
        case = self.layer.problem.case
        t, s = self.slots[:, None, :, None], np.arange(case.capacity)
        masked = self.layer.is_later(t, s) | self.layer.is_out_of_reach(t, s)
        shape = (case.batch, case.spec.num_heads, self.x.shape[1], case.capacity)
        return {"mask": self.layer.hidden(np.broadcast_to(masked, shape))}

    def qkv(self, _: Values) -> dict[str, np.ndarray]:
        problem = self.layer.problem
        given = {name: problem.step_input(self.index, side) for name, side in problem.sides.items()}
        return self.layer.project({**given, "q": self.x}, problem.case.positions(self.index))

    def scores(self, values: Values) -> dict[str, np.ndarray]:
        return self.layer.scores(values, self.slots)

    def cache(self, values: Values) -> dict[str, np.ndarray]:
        grown, kv = self.grown("cache.", values, values)
        return {**grown, "cache.keys": kv["k"], "cache.values": kv["v"]}

    def grown(
        self, cache: str, values: Values, own: Values
    ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Return the cache with the call's new tokens, and the keys and values to attend to."""
        is_latent = self.layer.problem.spec.latent is not None
        new = {"latents": own["latents"]} if is_latent else {"keys": own["k"], "values": own["v"]}
        grown = self.layer.appended(cache, values, new, self.before, self.added)
        if is_latent:
            return grown, self.layer.expanded(grown[f"{cache}latents"])
        return grown, {"k": grown[f"{cache}keys"], "v": grown[f"{cache}values"]}

    def whole(self, values: Values) -> dict[str, np.ndarray]:
        layer = self.layer
        own = {**self.mask(values), **self.qkv(values)}
        grown, kv = self.grown("module.cache.", values, own)
        own |= kv
        for stage in (self.scores, layer.attn_weights, layer.context, layer.output):
            own |= stage(own)
        is_real = np.arange(self.x.shape[1]) < self.added[:, None]
        zero = np.zeros(
            (), layer.arithmetic.dtype
        )  # a plain 0.0 has no common dtype with bfloat16 in NumPy 1
        output = np.where(is_real[:, :, None], own["output"], zero)
        return {"module.output": output, "blocks.output": output, "plain.output": output, **grown}

"""Gradients of the reference by the chain rule, from the output to the inputs and weights."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mha_spec import Norm, SinusoidProducts
from parity.measure.core.reference import norms
from parity.measure.core.reference.arithmetic import Arithmetic
from parity.measure.core.reference.layer import Layer
from parity.measure.core.stages import Values

STAGES_BETWEEN = (
    "grad.gate",
    "grad.context",
    "grad.attn_weights",
    "grad.v",
    "grad.scores",
    "grad.q",
    "grad.k",
)
"""Gradients of stages, which no implementation has to return."""


@dataclass(frozen=True)
class Backward:
    """Gradients of sum(output * cotangent) of a layer.

    In its methods `d_x` is the gradient of x, and `a` the arithmetic: `a.widen` and `a.wide` are
    for sums, `a.keep` rounds what the layer would store.

    Attributes:
        layer: layer to differentiate.
        fused: recompute the scores, like fused kernels.
        magnitude: make all terms of all sums and differences positive.
    """

    layer: Layer
    fused: bool = False
    magnitude: bool = False

    @property
    def arithmetic(self) -> Arithmetic:
        """Arithmetic of the layer."""
        return self.layer.arithmetic

    def gradients(self, *, with_stages: bool = False) -> dict[str, np.ndarray]:
        """Return gradients of the inputs and weights: `grad.query`, `grad.q_proj.weight`, …

        They are in the order of the backward data flow, from the output to the inputs.

        Args:
            with_stages: also return the gradients of `STAGES_BETWEEN`.
        """
        problem, a = self.layer.problem, self.arithmetic
        cotangent, values = problem.inputs["cotangent"], self.layer.forward()
        query = self.entered("query")
        entered = {side: self.entered(side) for side in problem.sides.values()}
        slope = self.slope_of_cap(values)
        if problem.spec.sinks:
            values["sink_weights"] = self.sink_weights(values)
        if self.magnitude:
            # The gate is inside a sigmoid, so its absolute value is not the absolute value of a
            # term.
            gate = values.get("gate")
            values = {name: np.abs(x) for name, x in values.items()}
            if gate is not None:
                values["gate"] = gate
            cotangent, query = np.abs(cotangent), np.abs(query)
            entered = {side: np.abs(x) for side, x in entered.items()}
        grads: dict[str, np.ndarray] = {}
        cotangent = self.passed("output", cotangent)

        d_context, d_query = self.of_context(values, query, cotangent, grads)
        d_q, d_k, d_v = self.of_heads(values, d_context, slope, grads)

        d_inputs = {side: np.zeros(x.shape, a.wide) for side, x in entered.items()}
        d_inputs["query"] = d_query
        positions = problem.case.positions()
        if problem.spec.latent is not None:
            d_query += self.of_latent_queries(query, d_q, positions, grads)
            d_query = d_query + self.of_latents(query, d_k, d_v, positions, grads)
            grads["grad.query"] = a.keep(self.of_replaced("query", d_query))
            return self.requested(grads, with_stages=with_stages)
        for (name, side), d_heads in zip(problem.sides.items(), (d_q, d_k, d_v), strict=True):
            if name == side:  # the heads of another layer
                d_inputs[side] += d_heads
                continue
            d_projected = self.of_entering(name, a.keep(d_heads), positions, grads)
            d_projected = self.passed(f"{name}_proj", d_projected)
            d_input = self.of_linear(f"{name}_proj", entered[side], d_projected, grads)
            d_inputs[side] += self.passed(f"{name}_input", a.widen(d_input))
        for side, d_input in reversed(d_inputs.items()):
            grads[f"grad.{side}"] = a.keep(self.of_replaced(side, d_input))
        return self.requested(grads, with_stages=with_stages)

    def requested(
        self, grads: dict[str, np.ndarray], *, with_stages: bool
    ) -> dict[str, np.ndarray]:
        """Return the requested gradients."""
        if with_stages:
            return grads
        inputs = [f"grad.{side}" for side in self.layer.problem.inputs]
        return {
            name: x for name, x in grads.items() if name in inputs or name not in STAGES_BETWEEN
        }

    # ---- Sites of bugs ---------------------------------------------------------------------------

    def passed(self, name: str, d_x: np.ndarray) -> np.ndarray:
        """Return the gradient of a stage, a projection, its input or a bias, as it flows on.

        `before k` is where the gradient of k has been recorded.
        """
        return d_x

    def recorded(self, name: str, d_x: np.ndarray, grads: dict[str, np.ndarray]) -> np.ndarray:
        """Add the gradient of a stage to `grads`, and return it as it flows on."""
        d_x = self.passed(name, d_x)
        grads[f"grad.{name}"] = self.arithmetic.keep(d_x)
        return self.passed(f"before {name}", d_x)

    def dropped(self, use: str, x: np.ndarray) -> np.ndarray:
        """Return attention weights, or their gradient, after the dropout of the forward pass.

        The reference has none. `use` is `v` for weights that make the gradient of the values, else
        `attn_weights`.
        """
        return x

    def entered(self, side: str) -> np.ndarray:
        """Return an input as it enters the layer, with 0 for non-finite tokens."""
        return _without_bad_tokens(self.layer.problem.finite_in_padding(side))

    def of_replaced(self, side: str, d_input: np.ndarray) -> np.ndarray:
        """Return the gradient of an input, which is 0 where padding was replaced by 0."""
        x = self.layer.problem.inputs[side]
        if self.layer.problem.finite_in_padding(side) is x:
            return d_input
        return np.where(np.isfinite(x), d_input, np.zeros_like(d_input))

    # ---- Parts: gradient of the output in, gradient of the input out -----------------------------

    def of_context(
        self, values: Values, query: np.ndarray, d_output: np.ndarray, grads: dict[str, np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the gradients of the context (B, N, T, H), and of the query through the gate."""
        layer, a = self.layer, self.arithmetic
        if layer.problem.spec.out_proj:
            d_output = self.of_linear("out_proj", layer.combined(values), d_output, grads)
        combined = layer.combine_heads(layer.gated(values))
        d_output = self.of_norm("context", combined, d_output, grads)
        d_context = layer.split_heads(a.widen(d_output), layer.num_heads("q"))
        gate = layer.problem.spec.gate
        if gate is None:
            return self.recorded("context", d_context, grads), np.zeros(query.shape, a.wide)
        openness = layer.openness(values)
        d_gate = d_context * a.widen(values["context"]) * openness * (1.0 - openness)
        if gate.per_head:
            d_gate = d_gate.sum(axis=-1, keepdims=True)
        d_gate = self.recorded("gate", layer.combine_heads(d_gate), grads)
        d_query = self.of_linear("gate_proj", query, a.keep(d_gate), grads)
        d_query = self.passed("gate_input", a.widen(d_query))
        return self.recorded("context", d_context * openness, grads), d_query

    def of_entering(
        self, name: str, d_heads: np.ndarray, positions: np.ndarray, grads: dict[str, np.ndarray]
    ) -> np.ndarray:
        """Return the gradient of projected features, (B, T, width).

        `d_heads` is the gradient of the heads that enter attention.
        """
        layer, norm, a = self.layer, self.layer.norm(name), self.arithmetic
        x = self.entered(layer.problem.sides[name])
        limit, num_heads = layer.problem.spec.clip_qkv, layer.num_heads(name)
        unclipped = x
        if norm is not None or limit is not None:  # only these need the projected features
            unclipped = layer.linear(f"{name}_proj", x)
        projected = layer.clipped(name, unclipped)
        if name == "q" and layer.problem.spec.temperature is not None:
            d_heads = a.keep(a.widen(d_heads) * layer.factors(positions))
        if norm is not None and norm.after_rope:
            entered = layer.turned(name, layer.split_heads(projected, num_heads), positions)
            d_heads = self.of_norm(name, entered, d_heads, grads)
        if name != "v":
            d_heads = self.turned_back(d_heads, positions)
        if norm is not None and norm.over == "head" and not norm.after_rope:
            d_heads = self.of_norm(name, layer.split_heads(projected, num_heads), d_heads, grads)
        d_projected = layer.combine_heads(d_heads)
        if norm is not None and norm.over == "width":
            d_projected = self.of_norm(name, projected, d_projected, grads)
        if limit is not None:
            is_within = np.abs(a.widen(unclipped)) <= limit
            d_projected = np.where(is_within, a.widen(d_projected), a.wide.type(0.0))
        return a.keep(d_projected)

    def of_latent_queries(
        self, x: np.ndarray, d_q: np.ndarray, positions: np.ndarray, grads: dict[str, np.ndarray]
    ) -> np.ndarray:
        """Return the gradient of the input of a layer with latents, from the gradient of its
        queries.
        """
        layer, a = self.layer, self.arithmetic
        if layer.problem.spec.temperature is not None:
            d_q = d_q * layer.factors(positions)
        d_q = layer.combine_heads(self.turned_back(a.keep(d_q), positions))
        if layer.latent().q_rank is None:
            return a.widen(self.of_linear("q_proj", x, d_q, grads))
        entered = self.entered("query")
        d_latents = self.of_linear("q_b_proj", self.sized(layer.query_latents(entered)), d_q, grads)
        d_latents = self.of_latent_norm("q_a", layer.linear("q_a_proj", entered), d_latents, grads)
        return a.widen(self.of_linear("q_a_proj", x, d_latents, grads))

    def of_latents(
        self,
        x: np.ndarray,
        d_k: np.ndarray,
        d_v: np.ndarray,
        positions: np.ndarray,
        grads: dict[str, np.ndarray],
    ) -> np.ndarray:
        """Return the gradient of the input of a layer with latents.

        `d_k` and `d_v` are the gradients of its keys and values.
        """
        layer, a, rank = self.layer, self.arithmetic, self.layer.latent().kv_rank
        entered = self.entered("query")
        # Latents have an axis of one head, (B, 1, S, rank + rope_dim).
        latents = layer.latents(entered, positions)[:, 0]
        compressed = layer.linear("kv_a_proj", entered)
        own_features = layer.problem.spec.head_dim - (latents.shape[-1] - rank)
        d_shared = d_k[..., own_features:].sum(axis=1, keepdims=True)
        d_kv = layer.combine_heads(a.keep(np.concatenate([d_k[..., :own_features], d_v], axis=-1)))
        d_normed = self.of_linear("kv_b_proj", self.sized(latents[..., :rank]), d_kv, grads)
        d_latents = self.turned_back(
            np.concatenate([d_normed[:, None], a.keep(d_shared)], axis=-1), positions
        )[:, 0]
        d_normed = self.of_latent_norm("kv_a", compressed[..., :rank], d_latents[..., :rank], grads)
        d_compressed = np.concatenate([d_normed, d_latents[..., rank:]], axis=-1)
        return a.widen(self.of_linear("kv_a_proj", x, d_compressed, grads))

    def sized(self, x: np.ndarray) -> np.ndarray:
        """Return x, or its absolute values if all terms are made positive."""
        if self.magnitude:
            return np.abs(x)
        return x

    def turned_back(self, d_heads: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return the gradient of features before rotation, from that after it."""
        if self.layer.problem.spec.rope is None or self.magnitude:
            return d_heads
        return self.layer.rotate(d_heads, positions, direction=-1)

    def of_latent_norm(
        self, name: str, x: np.ndarray, d_y: np.ndarray, grads: dict[str, np.ndarray]
    ) -> np.ndarray:
        """Return the gradient of the input of a latent's norm.

        The output of the norm is multiplied by the latent's factor.
        """
        d_normed = self.arithmetic.keep(self.arithmetic.widen(d_y) * self.layer.latent_factor(name))
        return self.of_norm(name, x, d_normed, grads)

    def of_norm(
        self, name: str, x: np.ndarray, d_y: np.ndarray, grads: dict[str, np.ndarray]
    ) -> np.ndarray:
        """Return the gradient of the input of a norm.

        The gradients of its weight and bias are added to `grads`.
        """
        layer, norm, a = self.layer, self.layer.norm(name), self.arithmetic
        if norm is None:
            return d_y
        x_hat, s = norms.standardised(a.widen(x), norm)
        d_hat = a.widen(d_y)
        if norm.bias:
            grads[f"grad.{name}_norm.bias"] = a.keep(norms.summed(d_hat, norm))
        if norm.weight is not None:
            terms = d_hat * self.sized(x_hat)
            grads[f"grad.{name}_norm.weight"] = a.keep(norms.summed(terms, norm))
            weight = a.widen(layer.parameter(f"{name}_norm.weight"))
            factor = norms.broadcast(norms.factor(weight, norm), norm)
            d_hat = d_hat * self.sized(factor)
        return a.keep(self.of_standardised(name, d_hat, x_hat, s, norm))

    def of_standardised(
        self, name: str, d_hat: np.ndarray, x_hat: np.ndarray, s: np.ndarray, norm: Norm
    ) -> np.ndarray:
        """Return the gradient of the input of a norm, from the gradient of x̂: see `norms`."""
        return norms.back_through(d_hat, x_hat, s, norm, magnitude=self.magnitude)

    def of_heads(
        self,
        values: Values,
        d_context: np.ndarray,
        slope: np.ndarray | float,
        grads: dict[str, np.ndarray],
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the gradients of q (B, N, T, H), k and v (B, K, S, H)."""
        layer, a = self.layer, self.arithmetic
        q, k, v = (_without_bad_tokens(a.widen(values[name])) for name in "qkv")
        d_dropped = a.matmul(d_context, layer.per_query_head(v).swapaxes(2, 3))
        d_dropped = self.recorded("attn_weights", d_dropped, grads)
        d_attn_weights = self.dropped("attn_weights", d_dropped)
        attn_weights = self.attn_weights(values)
        if not self.fused:
            d_attn_weights = a.widen(d_attn_weights)
        weighed = self.weighed(values, d_context, attn_weights, d_attn_weights)
        d_v = a.matmul(self.dropped("v", attn_weights).swapaxes(2, 3), d_context)
        d_v = self.recorded("v", self.per_kv_head("v", d_v), grads)
        # All terms of a magnitude are positive, also those that are subtracted.
        sign = a.wide.type(1.0 if self.magnitude else -1.0)
        d_scores = self.of_softmax(attn_weights, d_attn_weights, sign * weighed)
        d_scores = self.recorded("scores", d_scores, grads)
        if "bias" in layer.problem.inputs:
            grads["grad.bias"] = a.keep(self.passed("bias", d_scores))
        if layer.problem.spec.sinks:  # of the sink's weight, whose value is 0
            d_sinks = sign * a.widen(values["sink_weights"]) * weighed
            grads["grad.sinks"] = a.keep(self.passed("sinks", d_sinks.sum(axis=(0, 2, 3))))
        if layer.problem.spec.relative_bias is not None:
            d_table = self.passed("relative_bias", self.of_relative_bias(d_scores))
            grads["grad.relative_bias"] = a.keep(d_table)
        d_scores, scale = d_scores * slope, a.wide.type(layer.scale())
        repeated_k = layer.per_query_head(k)
        d_q, d_k = self.of_products(d_scores, q, repeated_k)
        if layer.problem.spec.relative_products is not None:
            of_distances = self.of_relative_products
            if isinstance(layer.problem.spec.relative_products, SinusoidProducts):
                of_distances = self.of_sinusoid_products
            of_q, of_k = of_distances(d_scores, q, repeated_k, scale, grads)
            d_q, d_k = d_q + of_q, d_k + of_k
        d_q = self.recorded("q", d_q / scale, grads)
        d_k = self.recorded("k", self.per_kv_head("k", d_k / scale), grads)
        return d_q, d_k, d_v

    def attn_weights(self, values: Values) -> np.ndarray:
        """Return the attention weights that the backward pass uses: stored or recomputed ones."""
        if self.fused:
            return self.recomputed_attn_weights(values)
        return self.arithmetic.widen(values["attn_weights"])

    def weighed(
        self,
        values: Values,
        d_context: np.ndarray,
        attn_weights: np.ndarray,
        d_attn_weights: np.ndarray,
    ) -> np.ndarray:
        """Return the mean gradient of a row's weights, weighted by these, (B, N, T, 1)."""
        if self.fused:
            return self.weighed_by_output(values, d_context)
        return (attn_weights * d_attn_weights).sum(axis=-1, keepdims=True)

    def weighed_by_output(self, values: Values, d_context: np.ndarray) -> np.ndarray:
        """Return the same mean gradient from the context, as in FlashAttention, (B, N, T, 1)."""
        context = self.arithmetic.widen(values["context"])
        return (d_context * context).sum(axis=-1, keepdims=True)

    def of_softmax(
        self, attn_weights: np.ndarray, d_attn_weights: np.ndarray, subtracted: np.ndarray
    ) -> np.ndarray:
        """Return the gradient of the scores, (B, N, T, S).

        `subtracted` is the negative mean of the gradients of a row, (B, N, T, 1). The weight of a
        masked key is 0, and so is its gradient.
        """
        return attn_weights * (d_attn_weights + subtracted)

    def of_products(
        self, d_scores: np.ndarray, q: np.ndarray, k: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return gradients of q and k, (B, N, ·, H), through their products, not scaled."""
        a = self.arithmetic
        return a.matmul(d_scores, k), a.matmul(d_scores.swapaxes(2, 3), q)

    def of_relative_products(
        self,
        d_scores: np.ndarray,
        q: np.ndarray,
        k: np.ndarray,
        scale: np.floating,
        grads: dict[str, np.ndarray],
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return gradients of q and k, (B, N, ·, H), through products with vectors of distances.

        They are not scaled.
        """
        layer, a, record = self.layer, self.arithmetic, self.layer.distance_record()
        num_queries, num_keys = d_scores.shape[2:]
        buckets = layer.distance_bucket(np.arange(num_keys) - np.arange(num_queries)[:, None])
        is_in = buckets[..., None] == np.arange(record.num_buckets)  # (T, S, buckets)
        is_in = is_in.astype(a.wide)

        def of_side(name: str, x: np.ndarray, by_bucket: np.ndarray) -> np.ndarray:
            """Return the gradient of q or k, by the gradients of its products with each vector."""
            d_table = (by_bucket.swapaxes(2, 3) @ x).sum(axis=0) / scale  # (N, buckets, H)
            d_table = d_table.swapaxes(0, 1) if record.per_head else d_table.sum(axis=0)
            grads[f"grad.{name}"] = a.keep(d_table)
            return a.matmul(by_bucket, self.sized(layer.distance_vectors(name)))

        d_q, d_k = np.zeros_like(q), np.zeros_like(k)
        if record.of_queries:
            d_q = of_side("relative_keys", q, np.einsum("bnts,tsc->bntc", d_scores, is_in))
        if record.of_keys:
            d_k = of_side("relative_queries", k, np.einsum("bnts,tsc->bnsc", d_scores, is_in))
        return d_q, d_k

    def of_sinusoid_products(
        self,
        d_scores: np.ndarray,
        q: np.ndarray,
        k: np.ndarray,
        scale: np.floating,
        grads: dict[str, np.ndarray],
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return gradients of q and k, (B, N, ·, H), through products with projected sinusoids.

        They are not scaled.
        """
        layer, a = self.layer, self.arithmetic
        num_queries, num_keys = d_scores.shape[2:]
        distances = layer.sinusoid_distance(np.arange(num_queries)[:, None] - np.arange(num_keys))
        distinct = np.unique(distances)
        sinusoids, table = self.sized(layer.sinusoids(distinct)), self.sized(layer.sinusoid_table())
        vectors = np.einsum("ce,enh->nch", sinusoids, table)
        is_at = (distances[..., None] == distinct).astype(a.wide)  # (T, S, distances)
        by_distance = np.einsum("bnts,tsc->bntc", d_scores, is_at)
        d_biased_q = a.matmul(by_distance, vectors)
        biased_q = q + self.sized(layer.bias_of_heads("position_bias"))
        d_vectors = (by_distance.swapaxes(2, 3) @ biased_q).sum(axis=0) / scale  # (N, distances, H)
        d_table = np.einsum("ce,nch->enh", sinusoids, d_vectors)
        by_key = d_scores.sum(axis=2)  # (B, N, S)
        grads["grad.relative_sinusoids"] = a.keep(d_table)
        grads["grad.position_bias"] = a.keep(d_biased_q.sum(axis=(0, 2)) / scale)
        grads["grad.content_bias"] = a.keep(np.einsum("bns,bnsh->nh", by_key, k) / scale)
        d_k = by_key[..., None] * self.sized(layer.bias_of_heads("content_bias"))
        return d_biased_q, d_k

    def of_relative_bias(self, d_scores: np.ndarray) -> np.ndarray:
        """Return the gradient of the table, (num_buckets, N).

        It is the gradient of the scores, summed within buckets.
        """
        layer = self.layer
        (buckets,) = layer.buckets(np.arange(d_scores.shape[2])[None], d_scores.shape[3])
        by_pair_of_tokens = np.moveaxis(d_scores.sum(axis=0), 0, -1)  # (T, S, N)
        num_buckets = len(layer.relative_table())
        return np.stack([by_pair_of_tokens[buckets == i].sum(axis=0) for i in range(num_buckets)])

    def slope_of_cap(self, values: Values) -> np.ndarray | float:
        """Return the derivative of the capped scores by the scores, (B, N, T, S).

        It is 1 - tanh(s / cap) ** 2 for scores s.
        """
        cap = self.layer.soft_cap()
        if cap is None:
            return 1.0
        capped = self.layer.capped(self.layer.products(values))
        return 1.0 - np.square(capped / cap)

    def per_kv_head(self, name: str, x: np.ndarray) -> np.ndarray:
        """Return the gradient of k or v, from the gradient of each query head's copy of it.

        It is the gradient of `Layer.per_query_head`: the sum over a group's query heads.
        """
        batch, _, seq_len, head_dim = x.shape
        num_kv_heads = self.layer.problem.spec.num_kv_heads
        return x.reshape(batch, num_kv_heads, -1, seq_len, head_dim).sum(axis=2)

    def log_sum_exp(self, values: Values) -> np.ndarray:
        """Return the log-sum-exp of scores, (B, N, T, 1); 0 for a fully masked row."""
        visible_scores = np.where(values["mask"], -np.inf, values["scores"])
        sinks, dtype = self.layer.sinks(), visible_scores.dtype
        highest = visible_scores.max(axis=-1, keepdims=True, initial=-np.inf)
        if sinks is not None:
            highest = np.maximum(highest, sinks)
        highest = np.where(np.isfinite(highest), highest, 0.0).astype(dtype)
        total = np.exp(visible_scores - highest).sum(axis=-1, keepdims=True)
        if sinks is not None:
            total = total + np.exp(sinks - highest)
        return highest + np.log(np.where(total == 0.0, 1.0, total)).astype(dtype)

    def sink_weights(self, values: Values) -> np.ndarray:
        """Return the weight of the sink in each row, (B, N, T, 1)."""
        return np.exp(self.layer.sinks() - self.log_sum_exp(values))

    def recomputed_attn_weights(self, values: Values) -> np.ndarray:
        """Return exp(score - log sum exp) of recomputed scores.

        Queries are scaled, and products are summed from the last feature.
        """
        a, log_sum_exp = self.arithmetic, self.log_sum_exp(values)
        q = a.widen(values["q"]) / a.wide.type(self.layer.scale())
        k = self.layer.per_query_head(a.widen(values["k"]))
        products = a.matmul(q[..., ::-1], k[..., ::-1].swapaxes(2, 3))
        scores = self.layer.scores(values, products=products)["scores"]
        return np.exp(np.where(values["mask"], -np.inf, scores) - log_sum_exp)

    def of_linear(
        self, name: str, x: np.ndarray, d_y: np.ndarray, grads: dict[str, np.ndarray]
    ) -> np.ndarray:
        """Return the gradient of the input of a projection.

        The gradients of its weight and bias are added to `grads`.
        """
        layer, a = self.layer, self.arithmetic
        grads[f"grad.{name}.weight"] = a.keep(self.of_weight(a.widen(d_y), a.widen(x)))
        if layer.has_bias(name):
            d_bias = self.of_bias(a.widen(d_y))
            grads[f"grad.{name}.bias"] = a.keep(self.passed(f"{name}.bias", d_bias))
        weight = a.widen(layer.parameter(f"{name}.weight"))
        return a.keep(a.matmul(a.widen(d_y), self.sized(weight)))

    def of_bias(self, d_y: np.ndarray) -> np.ndarray:
        """Return the gradient of a bias, the sum of (B, T, out) over all tokens."""
        return d_y.reshape(-1, d_y.shape[-1]).sum(axis=0)

    def of_weight(self, d_y: np.ndarray, x: np.ndarray) -> np.ndarray:
        """Return the gradient of a weight (out, in), by the gradient of its products (B, T, out).

        It is a sum over all tokens.
        """
        flat_d_y, flat_x = d_y.reshape(-1, d_y.shape[-1]), x.reshape(-1, x.shape[-1])
        return self.arithmetic.matmul(flat_d_y.T, flat_x)


def _without_bad_tokens(x: np.ndarray) -> np.ndarray:
    """Return x with 0 for non-finite tokens: visible ones have already made all gradients NaN."""
    return np.where(np.isfinite(x).all(axis=-1, keepdims=True), x, np.zeros_like(x))

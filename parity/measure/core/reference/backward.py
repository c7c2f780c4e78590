"""Gradients of the reference by the chain rule, from the output to the inputs and weights."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from parity.measure.core.reference import norms
from parity.measure.core.reference.arithmetic import Arithmetic
from parity.measure.core.reference.layer import Layer
from parity.measure.core.stages import Values


@dataclass(frozen=True)
class Backward:
    """Gradients of sum(output * cotangent) of a layer.

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

    def gradients(self) -> dict[str, np.ndarray]:
        """Return gradients of the inputs and weights: `grad.query`, `grad.q_proj.weight`, …"""
        problem, a = self.layer.problem, self.arithmetic
        cotangent, values = problem.inputs["cotangent"], self.layer.forward()
        query = self.entered("query")
        entered = {side: self.entered(side) for side in problem.sides.values()}
        slope = self.slope_of_cap(values)
        if problem.spec.sinks:
            values["sink_weights"] = self.sink_weights(values)
        if self.magnitude:
            values = {
                name: value if name == "gate" else np.abs(value) for name, value in values.items()
            }
            cotangent, query = np.abs(cotangent), np.abs(query)
            entered = {side: np.abs(x) for side, x in entered.items()}
        grads: dict[str, np.ndarray] = {}

        d_context, d_query = self.of_context(values, query, cotangent, grads)
        d_q, d_k, d_v = self.of_heads(values, d_context, slope, grads)

        d_inputs = {
            **{side: np.zeros(x.shape, a.wide) for side, x in entered.items()},
            "query": d_query,
        }
        positions = problem.case.positions()
        if problem.spec.latent is not None:
            d_query += self.of_latent_queries(query, d_q, positions, grads)
            d_query = d_query + self.of_latents(query, d_k, d_v, positions, grads)
            return grads | {"grad.query": a.keep(self.of_replaced("query", d_query))}
        for (name, side), d_heads in zip(problem.sides.items(), (d_q, d_k, d_v), strict=True):
            if name == side:  # the heads of another layer
                d_inputs[side] += d_heads
                continue
            d_projected = self.of_entering(name, a.keep(d_heads), positions, grads)
            d_inputs[side] += a.widen(
                self.of_linear(f"{name}_proj", entered[side], d_projected, grads)
            )
        for side, d_input in reversed(d_inputs.items()):
            grads[f"grad.{side}"] = a.keep(self.of_replaced(side, d_input))
        return grads

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
        """Return the gradient of the context (B, N, T, H), and the gate's contribution to that of
        the query.
        """
        layer, a = self.layer, self.arithmetic
        if layer.problem.spec.out_proj:
            d_output = self.of_linear("out_proj", layer.combined(values), d_output, grads)
        d_output = self.of_norm(
            "context", layer.combine_heads(layer.gated(values)), d_output, grads
        )
        d_context, nothing = (
            layer.split_heads(a.widen(d_output), layer.num_heads("q")),
            np.zeros(query.shape, a.wide),
        )
        gate = layer.problem.spec.gate
        if gate is None:
            return d_context, nothing
        openness = layer.openness(values)
        d_gate = d_context * a.widen(values["context"]) * openness * (1.0 - openness)
        d_gate = layer.combine_heads(
            d_gate.sum(axis=-1, keepdims=True) if gate.per_head else d_gate
        )
        d_query = self.of_linear("gate_proj", query, a.keep(d_gate), grads)
        return d_context * openness, a.widen(d_query)

    def of_entering(
        self, name: str, d_heads: np.ndarray, positions: np.ndarray, grads: dict[str, np.ndarray]
    ) -> np.ndarray:
        """Return the gradient of projected features, (B, T, width), from that of the heads that
        enter attention.
        """
        layer, norm, a = self.layer, self.layer.norm(name), self.arithmetic
        x = self.entered(layer.problem.sides[name])
        limit = layer.problem.spec.clip_qkv
        found = x if norm is None and limit is None else layer.linear(f"{name}_proj", x)
        projected, num_heads = layer.clipped(name, found), layer.num_heads(name)
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
            d_projected = np.where(
                np.abs(a.widen(found)) <= limit, a.widen(d_projected), a.wide.type(0.0)
            )
        return a.keep(d_projected)

    def of_latent_queries(
        self, x: np.ndarray, d_q: np.ndarray, positions: np.ndarray, grads: dict[str, np.ndarray]
    ) -> np.ndarray:
        """Return the gradient of the input of a layer with latents, from that of its queries."""
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
        """Return the gradient of the input of a layer with latents, from those of its keys and
        values.
        """
        layer, a, rank = self.layer, self.arithmetic, self.layer.latent().kv_rank
        entered = self.entered("query")
        latents, compressed = (
            layer.latents(entered, positions)[:, 0],
            layer.linear("kv_a_proj", entered),
        )
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
        return np.abs(x) if self.magnitude else x

    def turned_back(self, d_heads: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return the gradient of features before rotation, from that after it."""
        if self.layer.problem.spec.rope is None or self.magnitude:
            return d_heads
        return self.layer.rotate(d_heads, positions, direction=-1)

    def of_latent_norm(
        self, name: str, x: np.ndarray, d_y: np.ndarray, grads: dict[str, np.ndarray]
    ) -> np.ndarray:
        """Return the gradient of the input of a latent's norm, whose output is multiplied by its
        factor.
        """
        d_normed = self.arithmetic.keep(self.arithmetic.widen(d_y) * self.layer.latent_factor(name))
        return self.of_norm(name, x, d_normed, grads)

    def of_norm(
        self, name: str, x: np.ndarray, d_y: np.ndarray, grads: dict[str, np.ndarray]
    ) -> np.ndarray:
        """Return the gradient of the input of a norm; those of its weight and bias are added to
        `grads`.
        """
        layer, norm, a = self.layer, self.layer.norm(name), self.arithmetic
        if norm is None:
            return d_y
        x_hat, s = norms.standardised(a.widen(x), norm)
        d_hat = a.widen(d_y)
        if norm.bias:
            grads[f"grad.{name}_norm.bias"] = a.keep(norms.summed(d_hat, norm))
        if norm.weight is not None:
            terms = d_hat * (np.abs(x_hat) if self.magnitude else x_hat)
            grads[f"grad.{name}_norm.weight"] = a.keep(norms.summed(terms, norm))
            factor = norms.broadcast(
                norms.factor(a.widen(layer.parameter(f"{name}_norm.weight")), norm), norm
            )
            d_hat = d_hat * (np.abs(factor) if self.magnitude else factor)
        return a.keep(norms.back_through(d_hat, x_hat, s, norm, magnitude=self.magnitude))

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
        d_attn_weights = a.matmul(d_context, layer.per_query_head(v).swapaxes(2, 3))
        if self.fused:
            attn_weights = self.recomputed_attn_weights(values)
            weighed = (d_context * a.widen(values["context"])).sum(axis=-1, keepdims=True)
        else:
            attn_weights, d_attn_weights = a.widen(values["attn_weights"]), a.widen(d_attn_weights)
            weighed = (attn_weights * d_attn_weights).sum(axis=-1, keepdims=True)
        d_v = self.per_kv_head(a.matmul(attn_weights.swapaxes(2, 3), d_context))
        difference = d_attn_weights + weighed if self.magnitude else d_attn_weights - weighed
        d_scores = attn_weights * difference  # a masked weight is 0, and so is its gradient
        if "bias" in layer.problem.inputs:
            grads["grad.bias"] = a.keep(d_scores)
        if layer.problem.spec.sinks:  # of the sink's weight, whose value is 0
            passed_on = a.widen(values["sink_weights"]) * weighed
            grads["grad.sinks"] = a.keep(
                (passed_on if self.magnitude else -passed_on).sum(axis=(0, 2, 3))
            )
        if layer.problem.spec.relative_bias is not None:
            grads["grad.relative_bias"] = a.keep(self.of_relative_bias(d_scores))
        d_scores, scale = d_scores * slope, a.wide.type(layer.scale())
        d_q, d_k = a.matmul(d_scores, layer.per_query_head(k)), a.matmul(d_scores.swapaxes(2, 3), q)
        if layer.problem.spec.relative_products is not None:
            of_q, of_k = self.of_relative_products(
                d_scores, q, layer.per_query_head(k), scale, grads
            )
            d_q, d_k = d_q + of_q, d_k + of_k
        return d_q / scale, self.per_kv_head(d_k / scale), d_v

    def of_relative_products(
        self,
        d_scores: np.ndarray,
        q: np.ndarray,
        k: np.ndarray,
        scale: np.floating,
        grads: dict[str, np.ndarray],
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return gradients of q and k, (B, N, ·, H), through products with vectors of distances,
        not scaled.
        """
        layer, a, held = self.layer, self.arithmetic, self.layer.distance_record()
        num_queries, num_keys = d_scores.shape[2:]
        buckets = layer.distance_bucket(np.arange(num_keys) - np.arange(num_queries)[:, None])
        is_in = (buckets[..., None] == np.arange(held.num_buckets)).astype(
            a.wide
        )  # (T, S, buckets)
        sides = {"relative_keys": (held.of_queries, q, "bnts,tsc->bntc")}
        sides["relative_queries"] = (held.of_keys, k, "bnts,tsc->bnsc")
        found = []
        for name, (is_there, x, sums) in sides.items():
            if not is_there:
                found.append(np.zeros_like(x))
                continue
            by_bucket = np.einsum(sums, d_scores, is_in)
            found.append(a.matmul(by_bucket, self.sized(layer.distance_vectors(name))))
            d_table = (by_bucket.swapaxes(2, 3) @ x).sum(axis=0) / scale  # (N, buckets, H)
            grads[f"grad.{name}"] = a.keep(
                d_table.swapaxes(0, 1) if held.per_head else d_table.sum(axis=0)
            )
        return found[0], found[1]

    def of_relative_bias(self, d_scores: np.ndarray) -> np.ndarray:
        """Return the gradient of the table, (num_buckets, N): that of the scores, summed within
        buckets.
        """
        layer = self.layer
        (buckets,) = layer.buckets(np.arange(d_scores.shape[2])[None], d_scores.shape[3])
        by_place = np.moveaxis(d_scores.sum(axis=0), 0, -1)  # (T, S, N)
        return np.stack(
            [by_place[buckets == i].sum(axis=0) for i in range(len(layer.relative_table()))]
        )

    def slope_of_cap(self, values: Values) -> np.ndarray | float:
        """Return the derivative of the capped scores by the scores, (B, N, T, S): 1 - tanh(s / cap)
        ** 2.
        """
        cap = self.layer.soft_cap()
        return (
            1.0
            if cap is None
            else 1.0 - np.square(self.layer.capped(self.layer.products(values)) / cap)
        )

    def per_kv_head(self, x: np.ndarray) -> np.ndarray:
        """Return the gradient of `Layer.per_query_head`: the sum over the query heads of a
        group.
        """
        batch, _, seq_len, head_dim = x.shape
        return x.reshape(batch, self.layer.problem.spec.num_kv_heads, -1, seq_len, head_dim).sum(
            axis=2
        )

    def log_sum_exp(self, values: Values) -> np.ndarray:
        """Return the log-sum-exp of scores, (B, N, T, 1); 0 for a fully masked row."""
        shown, sinks = np.where(values["mask"], -np.inf, values["scores"]), self.layer.sinks()
        highest = np.maximum(
            shown.max(axis=-1, keepdims=True, initial=-np.inf), -np.inf if sinks is None else sinks
        )
        highest = np.where(np.isfinite(highest), highest, 0.0).astype(shown.dtype)
        total = np.exp(shown - highest).sum(axis=-1, keepdims=True)
        total = total if sinks is None else total + np.exp(sinks - highest)
        return highest + np.log(np.where(total == 0.0, 1.0, total)).astype(shown.dtype)

    def sink_weights(self, values: Values) -> np.ndarray:
        """Return the weight of the sink in each row, (B, N, T, 1)."""
        return np.exp(self.layer.sinks() - self.log_sum_exp(values))

    def recomputed_attn_weights(self, values: Values) -> np.ndarray:
        """Return exp(score - log sum exp) of recomputed scores: scaled queries, summed from the
        last feature.
        """
        a, log_sum_exp = self.arithmetic, self.log_sum_exp(values)
        q, k = (
            a.widen(values["q"]) / a.wide.type(self.layer.scale()),
            self.layer.per_query_head(a.widen(values["k"])),
        )
        products = a.matmul(q[..., ::-1], k[..., ::-1].swapaxes(2, 3))
        again = self.layer.scores(values, products=products)["scores"]
        return np.exp(np.where(values["mask"], -np.inf, again) - log_sum_exp)

    def of_linear(
        self, name: str, x: np.ndarray, d_y: np.ndarray, grads: dict[str, np.ndarray]
    ) -> np.ndarray:
        """Return the gradient of the input of a projection; those of its weight and bias are added
        to `grads`.
        """
        a, weights = self.arithmetic, self.layer.problem.weights
        flat_x, flat_d_y = (a.widen(array).reshape(-1, array.shape[-1]) for array in (x, d_y))
        grads[f"grad.{name}.weight"] = a.keep(a.matmul(flat_d_y.T, flat_x))
        if f"{name}.bias" in weights:
            grads[f"grad.{name}.bias"] = a.keep(flat_d_y.sum(axis=0))
        weight = a.widen(weights[f"{name}.weight"])
        return a.keep(a.matmul(a.widen(d_y), np.abs(weight) if self.magnitude else weight))


def _without_bad_tokens(x: np.ndarray) -> np.ndarray:
    """Return x with 0 for non-finite tokens: visible ones have already made all gradients NaN."""
    return np.where(np.isfinite(x).all(axis=-1, keepdims=True), x, np.zeros_like(x))

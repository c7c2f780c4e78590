"""The specification itself: attention in NumPy, written straight from the formulas, in float64.

It shares no code with the siblings. The same lines run in float32, bfloat16 and float16, with sums in float32, and in
the arithmetic of the hardware: that is the same-precision reference, whose error against float64 says how much rounding
a correct implementation may show.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from parity.problem import Problem
from parity.weights import dtype_named

Values = Mapping[str, np.ndarray]
Step = Callable[[Values], dict[str, np.ndarray]]
"""Computes one or more stages from the stages before them, all by name."""


ARITHMETICS = ("ieee", "tensix")
"""How hardware computes: as IEEE 754 says, or as Tenstorrent's matrix engine does, where float32 enters as TF32."""


@dataclass(frozen=True)
class Arithmetic:
    """How numbers are kept and how they are summed: `dtype` in memory, `wide` inside a stage, `kind` of hardware."""

    dtype: np.dtype
    kind: str = "ieee"

    def __post_init__(self) -> None:
        if self.kind not in ARITHMETICS:
            raise ValueError(f"arithmetic must be one of {list(ARITHMETICS)}, got arithmetic={self.kind!r}")

    @property
    def wide(self) -> np.dtype:
        """float64 for float64, float32 for everything narrower."""
        return np.promote_types(np.float32, self.dtype) if self.dtype.kind == "f" else np.dtype(np.float32)

    def widen(self, x: np.ndarray) -> np.ndarray:
        """x for a sum, after it was kept in memory."""
        return x.astype(self.dtype).astype(self.wide)

    def keep(self, x: np.ndarray) -> np.ndarray:
        """x, rounded as it is kept in memory."""
        return x.astype(self.dtype)

    def enter(self, x: np.ndarray) -> np.ndarray:
        """x, wide, as it enters the matrix engine: whole, or as TF32 with 10 explicit mantissa bits, the rest cut off.

        bfloat16 has 7 and float16 10, so that only float32 loses any.
        """
        if self.kind == "ieee":
            return x
        return (x.astype(np.float32).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)

    def matmul(self, a: np.ndarray, b: np.ndarray, start: np.ndarray | float = 0.0) -> np.ndarray:
        """The product of wide matrices, (…, m, k) and (…, k, n), added to `start` one term after the other.

        An implementation may sum in any order. This is the plainest, and of the common ones the one with the largest
        error (matrix libraries begin with the bias, too): a cleverer order here would ask every implementation to be as
        clever. float64 may take any.
        """
        if self.wide == np.float64:
            return a @ b + start
        a, b = self.enter(a), self.enter(b)
        total = np.zeros((*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1]), self.wide)
        total += start
        term = np.empty_like(total)
        for k in range(a.shape[-1]):
            np.multiply(a[..., :, k, None], b[..., None, k, :], out=term)
            total += term
        return total


def steps(problem: Problem, dtype: str, arithmetic: str = "ieee") -> list[Step]:
    """The stages of a problem as functions, in the order of the data flow, computed in a dtype and an arithmetic.

    Each takes the values of the stages before it by name, so that it can run on its own implementation's values
    (accumulated) or on somebody else's (local).
    """
    layer = _Layer(problem, Arithmetic(dtype_named(dtype), arithmetic))
    if not problem.case.is_cached:
        return [layer.mask, layer.qkv, layer.scores, layer.attn_weights, layer.context, layer.output, layer.whole]
    return [in_step(index, step) for index in range(len(problem.case.chunks)) for step in layer.cached_steps(index)]


def gradients(problem: Problem, dtype: str, *, fused: bool = False) -> dict[str, np.ndarray]:
    """Gradients of sum(output * cotangent) by the chain rule: `grad.query`, `grad.q_proj.weight`, …

    Args:
        problem: what to differentiate.
        dtype: what to compute in.
        fused: recompute the scores, summed in another order, and from them the attention weights as exp(score - log sum
            exp), as fused kernels do because they never store them. In float64 that is the same. In float32 the two
            roundings of a score no longer cancel: where logits reach 70 000 a weight of 1 becomes 1 +- 0.02.
    """
    return _Layer(problem, Arithmetic(dtype_named(dtype))).backward(fused=fused)


def gradient_magnitudes(problem: Problem) -> dict[str, np.ndarray]:
    """The gradients with every term of every sum and difference taken as positive.

    Rounding is relative to these, not to the gradients: the gradient of a key's bias, for one, is 0 whatever the input,
    because its terms cancel, and what an implementation gives in its place is the rounding of those terms.
    """
    return _Layer(problem, Arithmetic(np.dtype(np.float64))).backward(fused=False, magnitude=True)


@dataclass(frozen=True)
class _Layer:
    problem: Problem
    arithmetic: Arithmetic

    # ---- One stage each ----------------------------------------------------------------------------------------------

    def mask(self, _: Values) -> dict[str, np.ndarray]:
        case = self.problem.case
        t, s = np.arange(case.seq_len)[:, None], np.arange(case.key_len)[None, :]
        masked = np.zeros((case.batch, case.spec.num_heads, case.seq_len, case.key_len), bool)
        if case.is_causal:
            masked |= s > t
        if case.window_size is not None:
            masked |= (s > t) | (s <= t - case.window_size)
        if case.key_padding_lengths is not None:
            masked |= s >= np.array(case.key_padding_lengths)[:, None, None, None]
        if case.random_mask:
            masked |= self.problem.inputs["mask"]
        return {"mask": masked}

    def qkv(self, _: Values) -> dict[str, np.ndarray]:
        query = self.problem.inputs["query"]
        key = self.problem.inputs.get("key", query)
        return self.project(query, key, np.arange(query.shape[1])[None])

    def scores(self, values: Values) -> dict[str, np.ndarray]:
        q, k = self.arithmetic.widen(values["q"]), self.per_query_head(self.arithmetic.widen(values["k"]))
        scores = self.arithmetic.matmul(q, k.swapaxes(2, 3)) / self.arithmetic.wide.type(
            np.sqrt(self.problem.spec.head_dim)
        )
        if "bias" in self.problem.inputs:
            scores = scores + self.arithmetic.widen(self.problem.inputs["bias"])
        return {"scores": scores}

    def attn_weights(self, values: Values) -> dict[str, np.ndarray]:
        enter = self.arithmetic.enter  # ttnn's softmax takes scores and exponentials through the matrix engine
        scores, mask = enter(values["scores"].astype(self.arithmetic.wide)), values["mask"]
        shown = np.where(mask, -np.inf, scores)
        highest = shown.max(axis=-1, keepdims=True, initial=-np.inf)
        exponentials = enter(np.exp(shown - np.where(np.isfinite(highest), highest, 0.0).astype(scores.dtype)))
        total = exponentials.sum(axis=-1, keepdims=True)
        return {"attn_weights": self.arithmetic.keep(exponentials / np.where(total == 0.0, 1.0, total))}

    def context(self, values: Values) -> dict[str, np.ndarray]:
        attn_weights, v = self.arithmetic.widen(values["attn_weights"]), self.arithmetic.widen(values["v"])
        return {"context": self.arithmetic.keep(self.arithmetic.matmul(attn_weights, self.per_query_head(v)))}

    def output(self, values: Values) -> dict[str, np.ndarray]:
        context = values["context"]
        batch, _, seq_len, _ = context.shape
        combined = context.swapaxes(1, 2).reshape(batch, seq_len, -1)
        return {"output": self.linear("out_proj", combined) if self.problem.spec.out_proj else combined}

    def whole(self, _: Values) -> dict[str, np.ndarray]:
        """What the module gives for the inputs, whichever path it takes."""
        values = self.forward()
        output = values["output"]
        return {"module.attn_weights": values["attn_weights"], "module.output": output, "fused.output": output}

    def forward(self) -> dict[str, np.ndarray]:
        values: dict[str, np.ndarray] = {}
        for stage in (self.mask, self.qkv, self.scores, self.attn_weights, self.context, self.output):
            values |= stage(values)
        return values

    # ---- With a cache ------------------------------------------------------------------------------------------------

    def cached_steps(self, index: int) -> list[Step]:
        """The stages of one call: new tokens in, cache grown, everything up to each token attended to."""
        case = self.problem.case
        x = self.problem.step_input(index)
        before, added = np.array(case.lengths_before(index)), np.array(case.added(index))
        positions = before[:, None] + np.arange(case.chunks[index])

        def mask(_: Values) -> dict[str, np.ndarray]:
            masked = np.arange(case.capacity) > positions[:, None, :, None]
            shape = (case.batch, case.spec.num_heads, case.chunks[index], case.capacity)
            return {"mask": np.broadcast_to(masked, shape)}

        def qkv(_: Values) -> dict[str, np.ndarray]:
            return self.project(x, x, positions)

        def cache(values: Values) -> dict[str, np.ndarray]:
            return self.appended("cache.", values, values["k"], values["v"], before, added)

        def whole(values: Values) -> dict[str, np.ndarray]:
            own = {**mask(values), **qkv(values)}
            grown = self.appended("module.cache.", values, own["k"], own["v"], before, added)
            own |= {"k": grown["module.cache.keys"], "v": grown["module.cache.values"]}
            for stage in (self.scores, self.attn_weights, self.context, self.output):
                own |= stage(own)
            is_real = np.arange(case.chunks[index]) < added[:, None]
            zero = np.zeros((), self.arithmetic.dtype)  # a plain 0.0 has no common dtype with bfloat16 in NumPy 1
            return {"module.output": np.where(is_real[:, :, None], own["output"], zero), **grown}

        def of_cache(stage: Step) -> Step:
            return lambda values: stage({**values, "k": values["cache.keys"], "v": values["cache.values"]})

        return [mask, qkv, cache, of_cache(self.scores), self.attn_weights, of_cache(self.context), self.output, whole]

    def appended(
        self, cache: str, values: Values, k: np.ndarray, v: np.ndarray, before: np.ndarray, added: np.ndarray
    ) -> dict[str, np.ndarray]:
        """The cache after the real tokens were put into the slots from `before` on."""
        case = self.problem.case
        shape = (case.batch, case.spec.num_kv_heads, case.capacity, case.spec.head_dim)
        grown = {}
        for name, new in (("keys", k), ("values", v)):
            old = values.get(f"previous.{cache}{name}", np.zeros(shape, self.arithmetic.dtype))
            slots = self.arithmetic.keep(old).copy()
            for b in range(case.batch):
                slots[b, :, before[b] : before[b] + added[b]] = new[b, :, : added[b]]
            grown[f"{cache}{name}"] = slots
        return {**grown, f"{cache}lengths": (before + added).astype(np.int32)}

    # ---- Parts -------------------------------------------------------------------------------------------------------

    def linear(self, name: str, x: np.ndarray) -> np.ndarray:
        weights, widen = self.problem.weights, self.arithmetic.widen
        bias = widen(weights[f"{name}.bias"]) if f"{name}.bias" in weights else 0.0
        return self.arithmetic.keep(self.arithmetic.matmul(widen(x), widen(weights[f"{name}.weight"]).T, bias))

    def project(self, query: np.ndarray, key: np.ndarray, positions: np.ndarray) -> dict[str, np.ndarray]:
        projected = {"q": self.linear("q_proj", query), "k": self.linear("k_proj", key)}
        projected["v"] = self.linear("v_proj", key)
        for name, x in projected.items():
            batch, seq_len, width = x.shape
            head_dim = self.problem.spec.head_dim
            x = x.reshape(batch, seq_len, width // head_dim, head_dim).swapaxes(1, 2)
            if self.problem.spec.rope_theta is not None and name != "v":
                x = self.rotate(x, positions)
            projected[name] = x
        return projected

    def rotate(self, x: np.ndarray, positions: np.ndarray, direction: int = 1) -> np.ndarray:
        """Turn the pairs (i, i + H/2) of x by their positions; direction -1 turns them back."""
        half = self.problem.spec.head_dim // 2
        frequencies = np.float64(self.problem.spec.rope_theta) ** (-np.arange(half) / half)
        angles = positions[:, None, :, None].astype(self.arithmetic.wide) * frequencies.astype(self.arithmetic.wide)
        cos, sin = np.cos(angles), direction * np.sin(angles)
        first, second = self.arithmetic.widen(x[..., :half]), self.arithmetic.widen(x[..., half:])
        return self.arithmetic.keep(np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1))

    def per_query_head(self, x: np.ndarray) -> np.ndarray:
        """Key/value heads (B, K, S, H), each repeated for its query heads: head n // (N // K) for head n."""
        spec = self.problem.spec
        return x[:, np.arange(spec.num_heads) // (spec.num_heads // spec.num_kv_heads)]

    def per_kv_head(self, x: np.ndarray) -> np.ndarray:
        """Gradients of `per_query_head`: those of a group's query heads, summed."""
        batch, _, seq_len, head_dim = x.shape
        return x.reshape(batch, self.problem.spec.num_kv_heads, -1, seq_len, head_dim).sum(axis=2)

    # ---- Backward ----------------------------------------------------------------------------------------------------

    def backward(self, *, fused: bool, magnitude: bool = False) -> dict[str, np.ndarray]:
        spec, inputs, a = self.problem.spec, self.problem.inputs, self.arithmetic
        values = self.forward()
        if magnitude:
            values = {name: np.abs(value) for name, value in values.items()}
            inputs = {name: np.abs(value) for name, value in inputs.items()}
        query = inputs["query"]
        key = inputs.get("key", query)
        batch, seq_len, _ = query.shape
        grads: dict[str, np.ndarray] = {}

        d_output = inputs["cotangent"]
        if spec.out_proj:
            combined = values["context"].swapaxes(1, 2).reshape(batch, seq_len, -1)
            d_output = self.linear_backward("out_proj", combined, d_output, grads, magnitude)
        d_context = a.widen(d_output).reshape(batch, seq_len, spec.num_heads, -1).swapaxes(1, 2)

        q, k, v = (a.widen(values[name]) for name in "qkv")
        d_attn_weights = a.matmul(d_context, self.per_query_head(v).swapaxes(2, 3))
        if fused:
            attn_weights = self.recomputed_attn_weights(values)
            weighed = (d_context * a.widen(values["context"])).sum(axis=-1, keepdims=True)
        else:
            attn_weights, d_attn_weights = a.widen(values["attn_weights"]), a.widen(d_attn_weights)
            weighed = (attn_weights * d_attn_weights).sum(axis=-1, keepdims=True)
        d_v = self.per_kv_head(a.matmul(attn_weights.swapaxes(2, 3), d_context))
        difference = d_attn_weights + weighed if magnitude else d_attn_weights - weighed
        d_scores = attn_weights * difference  # a masked weight is 0, and so is what it passes on
        if "bias" in inputs:
            grads["grad.bias"] = a.keep(d_scores)
        scale = a.wide.type(np.sqrt(spec.head_dim))
        d_q = a.matmul(d_scores, self.per_query_head(k)) / scale
        d_k = self.per_kv_head(a.matmul(d_scores.swapaxes(2, 3), q) / scale)

        d_inputs = {"query": np.zeros(query.shape, a.wide), "key": np.zeros(key.shape, a.wide)}
        positions = np.arange(seq_len)[None]
        for name, x, side, d_heads in (("q", query, "query", d_q), ("k", key, "key", d_k), ("v", key, "key", d_v)):
            d_heads = a.keep(d_heads)
            if spec.rope_theta is not None and name != "v" and not magnitude:
                d_heads = self.rotate(d_heads, positions, direction=-1)
            d_projected = d_heads.swapaxes(1, 2).reshape(batch, x.shape[1], -1)
            d_inputs[side] += a.widen(self.linear_backward(f"{name}_proj", x, d_projected, grads, magnitude))
        if "key" in inputs:
            grads["grad.key"] = a.keep(d_inputs["key"])
        else:
            d_inputs["query"] += d_inputs["key"]
        grads["grad.query"] = a.keep(d_inputs["query"])
        return grads

    def recomputed_attn_weights(self, values: Values) -> np.ndarray:
        """exp(score - log sum exp), the score summed again from its last feature to its first."""
        shown = np.where(values["mask"], -np.inf, values["scores"])
        highest = shown.max(axis=-1, keepdims=True, initial=-np.inf)
        highest = np.where(np.isfinite(highest), highest, 0.0).astype(shown.dtype)
        total = np.exp(shown - highest).sum(axis=-1, keepdims=True)
        log_sum_exp = highest + np.log(np.where(total == 0.0, 1.0, total)).astype(shown.dtype)
        again = self.scores({name: values[name][..., ::-1] for name in "qk"})["scores"]
        return np.exp(np.where(values["mask"], -np.inf, again) - log_sum_exp)

    def linear_backward(
        self, name: str, x: np.ndarray, d_y: np.ndarray, grads: dict[str, np.ndarray], magnitude: bool
    ) -> np.ndarray:
        a = self.arithmetic
        flat_x, flat_d_y = (a.widen(array).reshape(-1, array.shape[-1]) for array in (x, d_y))
        grads[f"grad.{name}.weight"] = a.keep(a.matmul(flat_d_y.T, flat_x))
        if f"{name}.bias" in self.problem.weights:
            grads[f"grad.{name}.bias"] = a.keep(flat_d_y.sum(axis=0))
        weight = a.widen(self.problem.weights[f"{name}.weight"])
        return a.keep(a.matmul(a.widen(d_y), np.abs(weight) if magnitude else weight))


def in_step(index: int, step: Step) -> Step:
    """A step of one call with a cache, among the values of all calls.

    Within the step its own call's values go by their plain names, `scores`, and those of the call before by
    `previous.scores`; outside by `step3.scores` and `step2.scores`.
    """
    prefix, previous = f"step{index}.", f"step{index - 1}."

    def run(values: Values) -> dict[str, np.ndarray]:
        own = {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}
        for name, value in values.items():
            if name.startswith(previous):
                own[f"previous.{name.removeprefix(previous)}"] = value
        return {prefix + name: value for name, value in step(own).items()}

    return run

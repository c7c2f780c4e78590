"""The specification itself: attention in NumPy, written straight from the formulas, in float64.

It shares no code with the siblings. The same lines run in float32, bfloat16 and float16, with sums in float32, and in
the arithmetic of the hardware: that is the same-precision reference, whose error against float64 says how much rounding
a correct implementation may show.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from parity.core.problem import Problem
from parity.core.stages import PATHS, Step, Values, steps_of
from parity.core.weights import dtype_named

MANTISSA = {"ieee": 23, "tensix": 10, "tf32": 10, "bfloat16": 7, "lofi": 4}
"""How many explicit bits of a float32 mantissa enter a matrix product, by kind of hardware and its settings."""

ARITHMETICS = ("ieee", "tensix")
"""How the hardware of a backend computes: as IEEE 754 says, or as Tenstorrent's matrix engine does, where float32
enters as TF32, also in the softmax. The others of `MANTISSA` are products that somebody let lose more than they should.
"""


@dataclass(frozen=True)
class Arithmetic:
    """How numbers are kept and how they are summed: `dtype` in memory, `wide` inside a stage, `kind` of hardware."""

    dtype: np.dtype
    kind: str = "ieee"

    def __post_init__(self) -> None:
        if self.kind not in MANTISSA:
            raise ValueError(f"arithmetic must be one of {list(MANTISSA)}, got arithmetic={self.kind!r}")

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
        """x, wide, as it enters a matrix product: whole, or with some of its mantissa bits, the rest cut off."""
        lost = 23 - MANTISSA[self.kind]
        return (x.astype(np.float32).view(np.uint32) >> lost << lost).view(np.float32) if lost else x

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
    """The stages of a problem as functions, in the order of the data flow, computed in a dtype and an arithmetic."""
    return Layer(problem, Arithmetic(dtype_named(dtype), arithmetic)).steps()


def gradients(problem: Problem, dtype: str, *, fused: bool = False) -> dict[str, np.ndarray]:
    """Gradients of sum(output * cotangent) by the chain rule: `grad.query`, `grad.q_proj.weight`, …

    Args:
        problem: what to differentiate.
        dtype: what to compute in.
        fused: recompute the scores, summed in another order, and from them the attention weights as exp(score - log sum
            exp), as fused kernels do because they never store them. In float64 that is the same. In float32 the two
            roundings of a score no longer cancel: where logits reach 70 000 a weight of 1 becomes 1 +- 0.02.
    """
    return Layer(problem, Arithmetic(dtype_named(dtype))).backward(fused=fused)


def gradient_magnitudes(problem: Problem) -> dict[str, np.ndarray]:
    """The gradients with every term of every sum and difference taken as positive.

    Rounding is relative to these, not to the gradients: the gradient of a key's bias, for one, is 0 whatever the input,
    because its terms cancel, and what an implementation gives in its place is the rounding of those terms.
    """
    return Layer(problem, Arithmetic(np.dtype(np.float64))).backward(fused=False, magnitude=True)


@dataclass(frozen=True)
class Layer:
    """The layer of a problem, computed in some arithmetic; each known mistake overrides a part."""

    problem: Problem
    arithmetic: Arithmetic

    def steps(self) -> list[Step]:
        """The stages as functions: see `parity.core.stages`."""
        return steps_of(self, self.problem.case)

    # ---- One stage each ----------------------------------------------------------------------------------------------

    def mask(self, _: Values) -> dict[str, np.ndarray]:
        case = self.problem.case
        t, s = np.arange(case.seq_len)[:, None], np.arange(case.key_len)[None, :]
        masked = np.zeros((case.batch, case.spec.num_heads, case.seq_len, case.key_len), bool)
        if case.is_causal:
            masked |= self.is_later(t, s)
        if case.window_size is not None:
            masked |= self.is_later(t, s) | self.is_before_window(t, s, case.window_size)
        if case.key_padding_lengths is not None:
            masked |= self.is_padding(s, np.array(case.key_padding_lengths)[:, None, None, None])
        if case.random_mask:
            masked |= self.problem.inputs["mask"]
        return {"mask": self.hidden(masked)}

    def qkv(self, _: Values) -> dict[str, np.ndarray]:
        query = self.problem.inputs["query"]
        key = self.problem.inputs.get("key", query)
        return self.project(query, key, np.arange(query.shape[1])[None])

    def scores(self, values: Values) -> dict[str, np.ndarray]:
        q, k = self.arithmetic.widen(values["q"]), self.per_query_head(self.arithmetic.widen(values["k"]))
        scores = self.arithmetic.matmul(q, k.swapaxes(2, 3)) / self.arithmetic.wide.type(self.scale())
        bias = self.score_bias()
        return {"scores": scores if bias is None else scores + self.arithmetic.widen(bias)}

    def attn_weights(self, values: Values) -> dict[str, np.ndarray]:
        # ttnn's softmax takes scores and exponentials through the matrix engine.
        enter = self.arithmetic.enter if self.arithmetic.kind == "tensix" else lambda x: x
        scores, mask = enter(values["scores"].astype(self.arithmetic.wide)), values["mask"]
        shown = np.where(mask, -np.inf, scores)
        highest = shown.max(axis=-1, keepdims=True, initial=-np.inf)
        exponentials = enter(np.exp(shown - np.where(np.isfinite(highest), highest, 0.0).astype(scores.dtype)))
        bias = self.score_bias()
        is_hidden = mask if bias is None or not np.isneginf(bias).any() else mask | np.isneginf(bias)
        # A row is empty because every key is hidden, never because its scores are not finite: 0 / 0 is NaN there.
        total = np.where(is_hidden.all(axis=-1, keepdims=True), 1.0, exponentials.sum(axis=-1, keepdims=True))
        return {"attn_weights": self.arithmetic.keep(exponentials / total.astype(exponentials.dtype))}

    def context(self, values: Values) -> dict[str, np.ndarray]:
        """The weighed values of the keys that a row may see: of others nothing, whatever they hold."""
        is_bad = ~np.isfinite(values["v"])
        if not is_bad.any():
            return self.weighed(values)
        finite = np.where(is_bad, np.zeros_like(values["v"]), values["v"])
        context = self.weighed({**values, "v": finite})["context"]
        is_bad = np.any(self.per_query_head(is_bad), axis=-1)[:, :, None, :]
        sees_bad = np.any(is_bad & ~values["mask"], axis=-1, keepdims=True)
        return {"context": np.where(sees_bad, np.full_like(context, np.nan), context)}

    def weighed(self, values: Values) -> dict[str, np.ndarray]:
        """The formula, for which 0 * NaN is NaN."""
        attn_weights, v = self.arithmetic.widen(values["attn_weights"]), self.arithmetic.widen(values["v"])
        return {"context": self.arithmetic.keep(self.arithmetic.matmul(attn_weights, self.per_query_head(v)))}

    def output(self, values: Values) -> dict[str, np.ndarray]:
        combined = self.combine_heads(values["context"])
        return {"output": self.linear("out_proj", combined) if self.problem.spec.out_proj else combined}

    def whole(self, _: Values) -> dict[str, np.ndarray]:
        """What the module gives for the inputs, whichever path it takes."""
        values = self.forward()
        outputs = {f"{path}.output": values["output"] for path in PATHS}
        return {"module.attn_weights": values["attn_weights"], **outputs}

    def forward(self) -> dict[str, np.ndarray]:
        values: dict[str, np.ndarray] = {}
        for stage in (self.mask, self.qkv, self.scores, self.attn_weights, self.context, self.output):
            values |= stage(values)
        return values

    # ---- With a cache ------------------------------------------------------------------------------------------------

    def call(self, index: int) -> Call:
        """One call: new tokens in, cache grown."""
        case = self.problem.case
        before, added = np.array(case.lengths_before(index)), np.array(case.added(index))
        return Call(self, self.problem.step_input(index), before, added)

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

    def is_later(self, t: np.ndarray, s: np.ndarray) -> np.ndarray:
        """Whether a key at position s lies after a query at position t."""
        return s > t

    def is_before_window(self, t: np.ndarray, s: np.ndarray, size: int) -> np.ndarray:
        return s <= t - size

    def is_padding(self, s: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        return s >= lengths

    def hidden(self, masked: np.ndarray) -> np.ndarray:
        """The mask as it is used: True where a key is hidden."""
        return masked

    def score_bias(self) -> np.ndarray | None:
        """What is added to the scores, or None."""
        return self.problem.inputs.get("bias")

    def scale(self) -> float:
        """What products of queries and keys are divided by."""
        spec = self.problem.spec
        return np.sqrt(spec.head_dim) if spec.scale is None else 1.0 / spec.scale

    def has_bias(self, name: str) -> bool:
        """Whether a projection has one."""
        return f"{name}.bias" in self.problem.weights

    def parameter(self, name: str) -> np.ndarray:
        """A weight by its canonical name."""
        return self.problem.weights[name]

    def linear(self, name: str, x: np.ndarray) -> np.ndarray:
        widen = self.arithmetic.widen
        bias = widen(self.parameter(f"{name}.bias")) if self.has_bias(name) else 0.0
        return self.arithmetic.keep(self.arithmetic.matmul(widen(x), widen(self.parameter(f"{name}.weight")).T, bias))

    def project(self, query: np.ndarray, key: np.ndarray, positions: np.ndarray) -> dict[str, np.ndarray]:
        projected = {name: self.linear(f"{name}_proj", query if name == "q" else key) for name in "qkv"}
        return {name: self.turned(name, self.split_heads(x), positions) for name, x in projected.items()}

    def split_heads(self, x: np.ndarray) -> np.ndarray:
        """(B, T, N * H) as (B, N, T, H)."""
        batch, seq_len, width = x.shape
        head_dim = self.problem.spec.head_dim
        return x.reshape(batch, seq_len, width // head_dim, head_dim).swapaxes(1, 2)

    def combine_heads(self, x: np.ndarray) -> np.ndarray:
        """(B, N, T, H) as (B, T, N * H)."""
        return x.swapaxes(1, 2).reshape(x.shape[0], x.shape[2], -1)

    def turned(self, name: str, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """q or k, turned by its positions if there is RoPE; v as it is."""
        return x if self.problem.spec.rope is None or name == "v" else self.rotate(x, positions)

    def rotate(self, x: np.ndarray, positions: np.ndarray, direction: int = 1) -> np.ndarray:
        """Turn the pairs (i, i + H/2) of x by their positions; direction -1 turns them back."""
        half = self.problem.spec.head_dim // 2
        frequencies = np.float64(self.theta()) ** (-np.arange(half) / half)
        angles = positions[:, None, :, None].astype(self.arithmetic.wide) * frequencies.astype(self.arithmetic.wide)
        cos, sin = np.cos(angles), direction * np.sin(angles)
        first, second = self.arithmetic.widen(x[..., :half]), self.arithmetic.widen(x[..., half:])
        return self.arithmetic.keep(np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1))

    def theta(self) -> float:
        """The base of the RoPE frequencies."""
        rope = self.problem.spec.rope
        return 1.0 if rope is None else rope.theta

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
        query = self.without_bad_tokens(inputs["query"])
        key = self.without_bad_tokens(inputs["key"]) if "key" in inputs else query
        batch, seq_len, _ = query.shape
        grads: dict[str, np.ndarray] = {}

        d_output = inputs["cotangent"]
        if spec.out_proj:
            combined = values["context"].swapaxes(1, 2).reshape(batch, seq_len, -1)
            d_output = self.linear_backward("out_proj", combined, d_output, grads, magnitude)
        d_context = a.widen(d_output).reshape(batch, seq_len, spec.num_heads, -1).swapaxes(1, 2)

        q, k, v = (self.without_bad_tokens(a.widen(values[name])) for name in "qkv")
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
        scale = a.wide.type(self.scale())
        d_q = a.matmul(d_scores, self.per_query_head(k)) / scale
        d_k = self.per_kv_head(a.matmul(d_scores.swapaxes(2, 3), q) / scale)

        d_inputs = {"query": np.zeros(query.shape, a.wide), "key": np.zeros(key.shape, a.wide)}
        positions = np.arange(seq_len)[None]
        for name, x, side, d_heads in (("q", query, "query", d_q), ("k", key, "key", d_k), ("v", key, "key", d_v)):
            d_heads = a.keep(d_heads)
            if spec.rope is not None and name != "v" and not magnitude:
                d_heads = self.rotate(d_heads, positions, direction=-1)
            d_projected = d_heads.swapaxes(1, 2).reshape(batch, x.shape[1], -1)
            d_inputs[side] += a.widen(self.linear_backward(f"{name}_proj", x, d_projected, grads, magnitude))
        if "key" in inputs:
            grads["grad.key"] = a.keep(d_inputs["key"])
        else:
            d_inputs["query"] += d_inputs["key"]
        grads["grad.query"] = a.keep(d_inputs["query"])
        return grads

    def without_bad_tokens(self, x: np.ndarray) -> np.ndarray:
        """x, and 0 for a token that is not finite: hidden, it passes nothing on. Visible, it has made rows of the
        attention weights NaN, and through them all gradients."""
        return np.where(np.isfinite(x).all(axis=-1, keepdims=True), x, np.zeros_like(x))

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


@dataclass(frozen=True)
class Call:
    """One call with a cache: of new tokens `x`, of which `added` are real, after the `before` ones of each sequence."""

    layer: Layer
    x: np.ndarray
    before: np.ndarray
    added: np.ndarray

    @property
    def positions(self) -> np.ndarray:
        """Of the new tokens, (B, T)."""
        return self.before[:, None] + np.arange(self.x.shape[1])

    def mask(self, _: Values) -> dict[str, np.ndarray]:
        case = self.layer.problem.case
        masked = self.layer.is_later(self.positions[:, None, :, None], np.arange(case.capacity))
        shape = (case.batch, case.spec.num_heads, self.x.shape[1], case.capacity)
        return {"mask": self.layer.hidden(np.broadcast_to(masked, shape))}

    def qkv(self, _: Values) -> dict[str, np.ndarray]:
        return self.layer.project(self.x, self.x, self.positions)

    def cache(self, values: Values) -> dict[str, np.ndarray]:
        return self.layer.appended("cache.", values, values["k"], values["v"], self.before, self.added)

    def whole(self, values: Values) -> dict[str, np.ndarray]:
        layer = self.layer
        own = {**self.mask(values), **self.qkv(values)}
        grown = layer.appended("module.cache.", values, own["k"], own["v"], self.before, self.added)
        own |= {"k": grown["module.cache.keys"], "v": grown["module.cache.values"]}
        for stage in (layer.scores, layer.attn_weights, layer.context, layer.output):
            own |= stage(own)
        is_real = np.arange(self.x.shape[1]) < self.added[:, None]
        zero = np.zeros((), layer.arithmetic.dtype)  # a plain 0.0 has no common dtype with bfloat16 in NumPy 1
        output = np.where(is_real[:, :, None], own["output"], zero)
        return {"module.output": output, "blocks.output": output, **grown}

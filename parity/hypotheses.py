"""What may be wrong with an attention layer, each as the reference with that one mistake in it.

A hypothesis overrides a part of `reference.Layer`, so that two of them can be in one layer. `parity.diagnose` asks
which of them gives what an implementation gave.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from parity.problem import Problem
from parity.reference import Arithmetic, Layer, Values
from parity.spec import AttentionSpec, Case
from parity.weights import dtype_named

THETAS = (1e2, 1e3, 1e4, 1e5, 5e5, 1e6, 1e7)  # bases that are in use


@dataclass(frozen=True)
class Hypothesis:
    """A mistake.

    Attributes:
        name: what reports and the command line call it.
        about: what would be the case, so that "it matches the reference if" may stand before it.
        fix: what to do about it.
        docs: the page of parity/bugs that tells more.
        part: the reference with this mistake.
    """

    name: str
    about: str
    fix: str
    docs: str
    part: type[Layer]


def wrong_layer(problem: Problem, dtype: str, hypotheses: Sequence[Hypothesis], arithmetic: str = "ieee") -> Layer:
    """The reference with mistakes in it, computed in a dtype and an arithmetic."""
    kind = type("WrongLayer", (*(hypothesis.part for hypothesis in hypotheses), Layer), {}) if hypotheses else Layer
    return kind(problem, Arithmetic(dtype_named(dtype), arithmetic))


def instead(method: str, function: Callable[..., Any]) -> type[Layer]:
    """The reference with another function in place of a method; it takes what the method takes, but not the layer."""
    return type("Instead", (Layer,), {method: lambda self, *inputs: function(*inputs)})


def permuted_heads(expected: Values, observed: Values) -> list[Hypothesis]:
    """The heads of q, k or v in whatever order they were observed in, where that is an order at all.

    Args:
        expected, observed: stages by name; of steps with a cache the first is looked at.
    """
    found = []
    for name in "qkv":
        stage = next((stage for stage in (name, f"step0.{name}") if stage in observed), None)
        if stage is None or expected[stage].shape[1] < 3:  # of two heads the one other order is known by name
            continue
        right, seen = (values[stage].astype(np.float64).swapaxes(0, 1) for values in (expected, observed))
        order = np.array([int(((right - head) ** 2).sum(axis=(1, 2, 3)).argmin()) for head in seen])
        known = (np.arange(len(order)), np.arange(len(order))[::-1], np.roll(np.arange(len(order)), 1))
        if len(set(order)) == len(order) and not any(np.array_equal(order, each) for each in known):
            found.append(_of_heads(name, "permuted", f"in the order {' '.join(map(str, order))}", order))
    return found


def hypotheses_for(case: Case) -> list[Hypothesis]:
    """Every mistake that could be in a case, in an order in which the more usual come first."""
    return [hypothesis for group in GROUPS for hypothesis in group(case.spec, case)]


# ---- Weights ---------------------------------------------------------------------------------------------------------


def _transposed(spec: AttentionSpec, _: Case) -> Iterator[Hypothesis]:
    def layer(projection: str) -> type[Layer]:
        class Transposed(Layer):
            def parameter(self, name: str) -> np.ndarray:
                found = super().parameter(name)
                return found.T if name == f"{projection}.weight" else found

        return Transposed

    square = {
        "q_proj": spec.q_width == spec.d_in,
        "k_proj": spec.kv_width == spec.d_kv,
        "v_proj": spec.kv_width == spec.d_kv,
        "out_proj": spec.out_proj and spec.q_width == spec.d_model,
    }
    for name in (name for name, holds in square.items() if holds):
        yield Hypothesis(
            f"{name}-transposed",
            f"{name}'s square kernel is transposed",
            f"transpose {name}.weight: canonical kernels are (out, in), Flax's and GPT-2's Conv1D are (in, out)",
            "transposed-kernel",
            layer(name),
        )


def _swapped(spec: AttentionSpec, _: Case) -> Iterator[Hypothesis]:
    def layer(one: str, other: str) -> type[Layer]:
        names = {f"{one}_proj": f"{other}_proj", f"{other}_proj": f"{one}_proj"}

        class Swapped(Layer):
            def has_bias(self, name: str) -> bool:
                return super().has_bias(names.get(name, name))

            def parameter(self, name: str) -> np.ndarray:
                projection, _, leaf = name.partition(".")
                return super().parameter(f"{names.get(projection, projection)}.{leaf}")

        return Swapped

    alike = {("k", "v"): True}
    alike[("q", "k")] = alike[("q", "v")] = spec.num_heads == spec.num_kv_heads and spec.d_in == spec.d_kv
    for one, other in (pair for pair, holds in alike.items() if holds):
        yield Hypothesis(
            f"{one}-{other}-swapped",
            f"{one}_proj and {other}_proj are exchanged",
            f"exchange {one}_proj and {other}_proj, or the order in which a packed projection is split",
            "swapped-projections",
            layer(one, other),
        )

    class SwappedHeads(Layer):
        def project(self, query: np.ndarray, key: np.ndarray, positions: np.ndarray) -> dict[str, np.ndarray]:
            projected = super().project(query, key, positions)
            return {"q": projected["q"], "k": projected["v"], "v": projected["k"]}

    if spec.rope_theta is not None:  # without RoPE it is the same as k-v-swapped
        yield Hypothesis(
            "k-v-swapped",
            "k and v are exchanged after RoPE",
            "exchange k and v where the heads are returned or cached",
            "swapped-projections",
            SwappedHeads,
        )


def _missing_biases(spec: AttentionSpec, _: Case) -> Iterator[Hypothesis]:
    def layer(names: tuple[str, ...]) -> type[Layer]:
        class Missing(Layer):
            def has_bias(self, name: str) -> bool:
                return name not in names and super().has_bias(name)

        return Missing

    groups = [("q_proj",), ("k_proj",), ("v_proj",), ("q_proj", "k_proj", "v_proj")] if spec.qkv_bias else []
    if spec.out_proj and spec.out_bias:
        groups += [("out_proj",)]
        groups += [("q_proj", "k_proj", "v_proj", "out_proj")] if spec.qkv_bias else []
    for names in groups:
        words = "every projection" if len(names) == 4 else ", ".join(names)
        yield Hypothesis(
            f"{'all' if len(names) == 4 else 'qkv' if len(names) == 3 else names[0]}-bias-missing",
            f"the bias of {words} is missing",
            f"load and add the bias of {words}",
            "missing-bias",
            layer(names),
        )


def _fused_qkv(spec: AttentionSpec, _: Case) -> Iterator[Hypothesis]:
    """One packed weight, its heads in the order q … k … v, or for each key/value head q … k v."""
    sizes = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
    groups = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])  # the heads of q, of k, of v
    grouped = np.concatenate([part.reshape(spec.num_kv_heads, -1) for part in groups], axis=1).reshape(-1)

    def layer(order: np.ndarray) -> type[Layer]:
        class Mixed(Layer):
            def parameter(self, name: str) -> np.ndarray:
                projection, _, leaf = name.partition(".")
                if projection == "out_proj":
                    return super().parameter(name)
                parts = [super(Mixed, self).parameter(f"{each}_proj.{leaf}") for each in "qkv"]
                heads = np.concatenate([part.reshape(-1, spec.head_dim, *part.shape[1:]) for part in parts])
                mixed = np.split(heads[order], np.cumsum(sizes)[:-1])["qkv".index(projection[0])]
                return mixed.reshape(-1, *mixed.shape[2:])

        return Mixed

    if spec.d_in == spec.d_kv and spec.num_kv_heads > 1:
        yield Hypothesis(
            "fused-qkv-read-per-head",
            "a fused QKV weight that holds all q, all k, all v is read head by head (or group by group)",
            "split the fused weight into q, k and v first, then into heads",
            "fused-qkv",
            layer(np.argsort(grouped)),
        )
        yield Hypothesis(
            "fused-qkv-read-as-thirds",
            "a fused QKV weight that holds q, k, v head by head (or group by group) is read as all q, all k, all v",
            "split the fused weight into heads (or groups) first, as GPT-NeoX and Falcon keep it",
            "fused-qkv",
            layer(grouped),
        )


# ---- RoPE ------------------------------------------------------------------------------------------------------------


def _rope(spec: AttentionSpec, case: Case) -> Iterator[Hypothesis]:
    if spec.rope_theta is None:
        return
    order = np.arange(spec.head_dim).reshape(2, -1).T.reshape(-1)  # 0, H/2, 1, H/2 + 1, …

    def turning(names: str, change: Callable[[Layer, np.ndarray, np.ndarray], np.ndarray]) -> type[Layer]:
        """Heads that are turned in another way; those of the other names as they should be."""

        class Turned(Layer):
            def turned(self, name: str, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
                return change(self, x, positions) if name in names else super().turned(name, x, positions)

        return Turned

    def permuting(names: str, rows: np.ndarray) -> type[Layer]:
        """Weights whose features are in another order."""

        class Permuted(Layer):
            def parameter(self, name: str) -> np.ndarray:
                found = super().parameter(name)
                if name[0] not in names or not name.startswith(("q_proj", "k_proj")):
                    return found
                return found.reshape(-1, spec.head_dim, *found.shape[1:])[:, rows].reshape(found.shape)

        return Permuted

    for names in ("qk", "q", "k"):
        whose = {"qk": "the", "q": "q's", "k": "k's"}[names]
        suffix = "" if names == "qk" else f"-{names}"
        yield Hypothesis(
            f"rope-interleaved{suffix}",
            f"{whose} RoPE pairs are interleaved, (2 i, 2 i + 1), and not (i, i + H/2)",
            "turn the pairs (i, i + H/2), or interleave the rows of the weights when they are loaded",
            "rope-pairs",
            turning(names, lambda self, x, p: self.rotate(x[..., np.argsort(order)], p)[..., order]),
        )
        yield Hypothesis(
            f"rope-weights-interleaved{suffix}",
            f"{whose} weights are in the order of interleaved RoPE pairs (Meta's, GGUF's)",
            "undo the interleaving of q_proj's and k_proj's rows, each with its own number of heads",
            "rope-pairs",
            permuting(names, order),
        )
        yield Hypothesis(
            f"rope-weights-deinterleaved{suffix}",
            f"{whose} weights were un-interleaved, though their RoPE pairs are (i, i + H/2) already",
            "leave the rows of q_proj and k_proj as they are",
            "rope-pairs",
            permuting(names, np.argsort(order)),
        )
        yield Hypothesis(
            f"rope-missing{suffix}",
            "RoPE is missing" if names == "qk" else f"RoPE is missing on {names}",
            "turn queries and keys by their positions, both",
            "rope-positions",
            turning(names, lambda _, x, positions: x),
        )
        yield Hypothesis(
            f"rope-reversed{suffix}",
            f"{whose} RoPE turns the other way",
            "turn (x, y) to (x cos - y sin, y cos + x sin)",
            "rope-positions",
            turning(names, lambda self, x, positions: self.rotate(x, -positions)),
        )
        for step in (1, -1):
            yield Hypothesis(
                f"rope-off-by-{'one' if step > 0 else 'minus-one'}{suffix}",
                f"{whose} RoPE positions are one too {'high' if step > 0 else 'low'}",
                "the first token is at position 0, a new one at the number of those cached",
                "rope-positions",
                turning(names, lambda self, x, positions, step=step: self.rotate(x, positions + step)),
            )
        if case.is_cached:
            yield Hypothesis(
                f"cache-position-off-by-one{suffix}",
                f"{whose} RoPE positions after the first call are one too high",
                "a new token's position is the number of tokens cached before it",
                "cache-positions",
                turning(names, lambda self, x, positions: self.rotate(x, positions + (positions[:, :1] > 0))),
            )
            yield Hypothesis(
                f"cache-position-restarted{suffix}",
                f"{whose} RoPE positions begin at 0 in every call",
                "a new token's position is the number of tokens cached before it",
                "cache-positions",
                turning(names, lambda self, x, positions: self.rotate(x, positions - positions[:, :1])),
            )

    for base in (base for base in THETAS if base != spec.rope_theta):
        yield Hypothesis(
            f"rope-theta-{base:.0f}",
            f"RoPE's theta is {base:g} and not {spec.rope_theta:g}",
            f"set rope_theta to {spec.rope_theta:g}",
            "rope-theta",
            instead("theta", lambda base=base: base),
        )


# ---- Heads -----------------------------------------------------------------------------------------------------------


def _heads(spec: AttentionSpec, _: Case) -> Iterator[Hypothesis]:
    if 1 < spec.num_kv_heads < spec.num_heads:
        yield Hypothesis(
            "kv-heads-tiled",
            "key/value heads are tiled (0 1 0 1) and not repeated (0 0 1 1)",
            "let query head n use key/value head n // (N // K): repeat, not tile",
            "grouped-heads",
            instead("per_query_head", lambda x: x[:, np.arange(spec.num_heads) % spec.num_kv_heads]),
        )
    if spec.num_heads == 1:
        return
    yield Hypothesis(
        "heads-innermost",
        "the width is split into (H, N) and not (N, H)",
        "split heads outermost: reshape to (B, T, N, H), then move N before T",
        "head-order",
        instead("split_heads", lambda x: x.reshape(*x.shape[:2], spec.head_dim, -1).transpose(0, 3, 1, 2)),
    )
    yield Hypothesis(
        "heads-not-moved",
        "heads are split by a reshape to (B, N, T, H) that does not move them before the tokens",
        "reshape to (B, T, N, H), then exchange the middle axes",
        "head-order",
        instead("split_heads", lambda x: x.reshape(x.shape[0], -1, x.shape[1], spec.head_dim)),
    )
    yield Hypothesis(
        "heads-combined-innermost",
        "the heads are combined as (H, N) and not (N, H)",
        "combine heads outermost: move N behind T, then reshape to (B, T, N * H)",
        "head-order",
        instead("combine_heads", lambda x: x.transpose(0, 2, 3, 1).reshape(x.shape[0], x.shape[2], -1)),
    )
    yield Hypothesis(
        "heads-not-moved-back",
        "heads are combined by a reshape that does not move them behind the tokens",
        "exchange the middle axes, then reshape to (B, T, N * H)",
        "head-order",
        instead("combine_heads", lambda x: x.reshape(x.shape[0], x.shape[2], -1)),
    )
    for name, count in (("q", spec.num_heads), ("k", spec.num_kv_heads), ("v", spec.num_kv_heads)):
        orders = {"reversed": np.arange(count)[::-1], "rolled": np.roll(np.arange(count), 1)}
        for word, order in orders.items() if count > 1 else ():
            if word == "rolled" and count == 2:
                continue  # the same as reversed
            yield _of_heads(name, word, word, order)


def _of_heads(name: str, word: str, about: str, order: np.ndarray) -> Hypothesis:
    """The heads of q, k or v in another order."""

    class Permuted(Layer):
        def project(self, query: np.ndarray, key: np.ndarray, positions: np.ndarray) -> dict[str, np.ndarray]:
            projected = super().project(query, key, positions)
            return {**projected, name: projected[name][:, order]}

    return Hypothesis(
        f"{name}-heads-{word}",
        f"{name}'s heads are {about}",
        f"keep the heads of {name} in the order in which the weights hold them",
        "head-order",
        Permuted,
    )


# ---- Masks -----------------------------------------------------------------------------------------------------------


def _masks(spec: AttentionSpec, case: Case) -> Iterator[Hypothesis]:
    def masking(change: Callable[[np.ndarray], np.ndarray]) -> type[Layer]:
        """A mask that is made otherwise."""

        class Masked(Layer):
            def hidden(self, masked: np.ndarray) -> np.ndarray:
                return change(super().hidden(masked))

        return Masked

    def using(change: Callable[[np.ndarray], np.ndarray]) -> type[Layer]:
        """A mask that is made as it should be, and used otherwise."""

        class Used(Layer):
            def attn_weights(self, values: Values) -> dict[str, np.ndarray]:
                return super().attn_weights({**values, "mask": change(values["mask"])})

        return Used

    later, padding, window = (partial(instead, name) for name in ("is_later", "is_padding", "is_before_window"))

    is_causal = case.is_causal or case.is_cached or case.window_size is not None
    if case.has_mask or case.is_cached:
        for where, how in (("used", using), ("made", masking)):  # the first is the more usual
            yield Hypothesis(
                "mask-flipped",
                f"the mask is {where} with the other polarity",
                "True hides a key here; PyTorch's SDPA, JAX and Flax show it: use ~mask at the one edge between them",
                "mask-polarity",
                how(np.logical_not),
            )
            yield Hypothesis(
                "mask-ignored",
                "the mask is ignored" if where == "used" else "the mask is empty",
                "pass the mask on, on every path (with weights, without, cached)",
                "mask-ignored",
                how(np.zeros_like),
            )
    if is_causal:
        yield Hypothesis(
            "causal-off-by-one",
            "each token sees the next one, too: the causal mask is one late",
            "hide every key whose position is greater than the query's: s > t",
            "causal-alignment",
            later(lambda t, s: s > t + 1),
        )
        yield Hypothesis(
            "causal-excludes-self",
            "no token sees itself: the causal mask is one early",
            "hide every key whose position is greater than the query's: s > t, not s >= t",
            "causal-alignment",
            later(lambda t, s: s >= t),
        )
    if case.is_cached:
        yield Hypothesis(
            "causal-top-left",
            "the causal mask of new tokens is aligned to the first cached key, and not to their own positions",
            "let a new token see every key up to its own position: those cached before it, too",
            "causal-alignment",
            later(lambda t, s: s > t - t[:, :, :1]),
        )
    if case.is_causal and case.key_len != case.seq_len:
        yield Hypothesis(
            "causal-bottom-right",
            "the causal mask is aligned to the last key, and not to the first",
            "count positions from the first key: query i sees keys 0 … i",
            "causal-alignment",
            later(lambda t, s: s > t + case.key_len - case.seq_len),
        )
    if case.is_causal and (case.key_padding_lengths or case.random_mask):
        yield Hypothesis(
            "causal-ignored",
            "the causal mask is missing from the others",
            "hide what any of the masks hides",
            "mask-ignored",
            later(lambda t, s: np.zeros(np.broadcast_shapes(t.shape, s.shape), bool)),
        )
    if not (is_causal or case.random_mask) and case.seq_len > 1:

        class Causal(Layer):
            def hidden(self, masked: np.ndarray) -> np.ndarray:
                t, s = np.arange(masked.shape[2])[:, None], np.arange(masked.shape[3])
                return super().hidden(masked | (s > t))

        yield Hypothesis(
            "causal-unasked",
            "a causal mask is used that nobody asked for",
            "leave the causal mask away: every token may see every other",
            "causal-alignment",
            Causal,
        )
    if case.key_padding_lengths is not None:
        if case.is_causal or case.random_mask or case.window_size is not None:
            yield Hypothesis(
                "padding-ignored",
                "padding is not hidden",
                "hide the keys from each sequence's own length on",
                "padding",
                padding(lambda s, lengths: np.zeros(np.broadcast_shapes(s.shape, lengths.shape), bool)),
            )
        yield Hypothesis(
            "padding-on-the-left",
            "padding is hidden on the left, and lies on the right",
            "hide the keys from each sequence's own length on, or move the tokens to the other end",
            "padding",
            padding(lambda s, lengths: s < case.key_len - lengths),
        )
        for step, words in ((1, "shows one padding key"), (-1, "hides one real key")):
            yield Hypothesis(
                f"padding-off-by-{'one' if step > 0 else 'minus-one'}",
                f"the padding mask {words}",
                "hide the keys from the length on: s >= length",
                "padding",
                padding(lambda s, lengths, step=step: s >= lengths + step),
            )
    if case.window_size is not None:
        for step, word in ((1, "wide"), (-1, "narrow")):
            yield Hypothesis(
                f"window-one-too-{word}",
                f"the sliding window is one too {word}",
                "hide the keys at t - window_size and before: a query sees window_size keys, itself among them",
                "sliding-window",
                window(lambda t, s, size, step=step: s <= t - size - step),
            )
        yield Hypothesis(
            "window-ignored",
            "the window is ignored, only later keys are hidden",
            "hide the keys at t - window_size and before",
            "sliding-window",
            window(lambda t, s, size: np.zeros(np.broadcast_shapes(t.shape, s.shape), bool)),
        )


# ---- Scores and weights ----------------------------------------------------------------------------------------------


def _scores(spec: AttentionSpec, case: Case) -> Iterator[Hypothesis]:
    scales = {
        "missing": ("is missing", 1.0),
        "squared": ("is 1 / H", float(spec.head_dim)),
        "by-d-model": ("is 1 / sqrt(d_model)", float(np.sqrt(spec.d_model))),
    }
    right, seen = float(np.sqrt(spec.head_dim)), {float(np.sqrt(spec.head_dim))}
    for name, (words, divisor) in scales.items():
        if divisor in seen:
            continue
        seen.add(divisor)
        yield Hypothesis(
            f"scale-{name}",
            f"the scale of the scores {words}, and not 1 / sqrt(H)",
            f"divide the scores by sqrt(head_dim) = {right:g}, once",
            "scale",
            instead("scale", lambda divisor=divisor: divisor),
        )

    class LateScale(Layer):
        def scale(self) -> float:
            return 1.0

        def attn_weights(self, values: Values) -> dict[str, np.ndarray]:
            found, a = super().attn_weights(values)["attn_weights"], self.arithmetic
            return {"attn_weights": a.keep(a.widen(found) / a.wide.type(right))}

    if right != 1.0:
        yield Hypothesis(
            "scale-after-softmax",
            "the scale is applied after the softmax, and not to the scores",
            f"divide the scores by sqrt(head_dim) = {right:g}, before the softmax",
            "scale",
            LateScale,
        )

    class ScaledBias(Layer):
        def score_bias(self) -> np.ndarray | None:
            bias = super().score_bias()
            return None if bias is None else self.arithmetic.widen(bias) / self.arithmetic.wide.type(self.scale())

    class LateBias(Layer):
        def score_bias(self) -> np.ndarray | None:
            return None

        def attn_weights(self, values: Values) -> dict[str, np.ndarray]:
            found, a = super().attn_weights(values)["attn_weights"], self.arithmetic
            return {"attn_weights": a.keep(a.widen(found) + a.widen(self.problem.inputs["bias"]))}

    if case.bias:
        yield Hypothesis(
            "score-bias-missing",
            "the bias of the scores is missing",
            "add the bias to the scores, before the softmax",
            "score-bias",
            instead("score_bias", lambda: None),
        )
        yield Hypothesis(
            "score-bias-scaled",
            "the bias is added before the scores are scaled, and scaled with them",
            "scale the scores, then add the bias",
            "score-bias",
            ScaledBias,
        )
        yield Hypothesis(
            "score-bias-after-softmax",
            "the bias is added after the softmax",
            "add the bias to the scores, before the softmax",
            "score-bias",
            LateBias,
        )

    def over(axis: int) -> type[Layer]:
        class OtherAxis(Layer):
            def attn_weights(self, values: Values) -> dict[str, np.ndarray]:
                turned = {name: values[name].swapaxes(axis, 3) for name in ("scores", "mask")}
                return {"attn_weights": super().attn_weights(turned)["attn_weights"].swapaxes(axis, 3)}

        return OtherAxis

    for axis, words in ((2, "queries"), (1, "heads"), (0, "batch")):
        if (case.batch, spec.num_heads, case.seq_len)[axis] > 1:
            yield Hypothesis(
                f"softmax-over-{words}",
                f"the softmax is over the {words}, and not over the keys",
                "take the softmax over the last axis of (B, N, T, S)",
                "softmax-axis",
                over(axis),
            )

    class MaskedAfterwards(Layer):
        def attn_weights(self, values: Values) -> dict[str, np.ndarray]:
            found = super().attn_weights({**values, "mask": np.zeros_like(values["mask"])})["attn_weights"]
            return {"attn_weights": np.where(values["mask"], np.zeros((), found.dtype), found)}

    if case.has_mask or case.is_cached:
        yield Hypothesis(
            "mask-after-softmax",
            "the mask is applied after the softmax, so that rows do not sum to 1",
            "hide keys before the softmax",
            "mask-ignored",
            MaskedAfterwards,
        )

    class NoOutProj(Layer):
        def output(self, values: Values) -> dict[str, np.ndarray]:
            return {"output": self.combine_heads(values["context"])}

    if spec.out_proj and spec.q_width == spec.d_model:
        yield Hypothesis(
            "out-proj-missing",
            "out_proj is missing",
            "project the combined heads with out_proj",
            "missing-out-proj",
            NoOutProj,
        )


# ---- NaN -------------------------------------------------------------------------------------------------------------


def _not_finite(_: AttentionSpec, case: Case) -> Iterator[Hypothesis]:
    def without_nan(x: np.ndarray) -> np.ndarray:
        return np.where(np.isnan(x), np.zeros_like(x), x)

    class Swallowed(Layer):
        def attn_weights(self, values: Values) -> dict[str, np.ndarray]:
            return {"attn_weights": without_nan(super().attn_weights(values)["attn_weights"])}

        def context(self, values: Values) -> dict[str, np.ndarray]:
            return {"context": without_nan(super().context(values)["context"])}

    class Leaking(Layer):
        def context(self, values: Values) -> dict[str, np.ndarray]:
            return self.weighed(values)

    if case.not_finite == "visible" or (case.not_finite and not case.is_cached and case.seq_len_k is None):
        yield Hypothesis(
            "nan-swallowed",
            "a row whose scores are NaN is 0, as if every key were hidden",
            "let a row be empty because every key is masked, never because of its scores",
            "not-finite",
            Swallowed,
        )
    if case.not_finite and case.has_mask:
        yield Hypothesis(
            "nan-leaks",
            "a NaN in a value that is hidden reaches the rows that may not see it: 0 * NaN is NaN",
            "put 0 in the place of hidden values before they are weighed",
            "not-finite",
            Leaking,
        )


# ---- Caches ----------------------------------------------------------------------------------------------------------


def _caches(spec: AttentionSpec, case: Case) -> Iterator[Hypothesis]:
    if not case.is_cached:
        return

    def appending(change: Callable[..., tuple[np.ndarray, np.ndarray]]) -> type[Layer]:
        class Appended(Layer):
            def appended(
                self, cache: str, values: Values, k: np.ndarray, v: np.ndarray, before: np.ndarray, added: np.ndarray
            ) -> dict[str, np.ndarray]:
                return super().appended(cache, values, *change(k, v), before, added)

        return Appended

    class Late(Layer):
        def appended(
            self, cache: str, values: Values, k: np.ndarray, v: np.ndarray, before: np.ndarray, added: np.ndarray
        ) -> dict[str, np.ndarray]:
            late = np.minimum(before + (before > 0), case.capacity - added)
            grown = super().appended(cache, values, k, v, late, added)
            return {**grown, f"{cache}lengths": (before + added).astype(np.int32)}

    class Stale(Layer):
        def appended(
            self, cache: str, values: Values, k: np.ndarray, v: np.ndarray, before: np.ndarray, added: np.ndarray
        ) -> dict[str, np.ndarray]:
            grown = super().appended(cache, values, k, v, before, np.maximum(added - 1, 0))
            return {**grown, f"{cache}lengths": (before + added).astype(np.int32)}

    class PaddingToo(Layer):
        def appended(
            self, cache: str, values: Values, k: np.ndarray, v: np.ndarray, before: np.ndarray, added: np.ndarray
        ) -> dict[str, np.ndarray]:
            every = np.minimum(k.shape[2], case.capacity - before)
            grown = super().appended(cache, values, k, v, before, every)
            return {**grown, f"{cache}lengths": (before + added).astype(np.int32)}

    yield Hypothesis(
        "cache-keys-as-values",
        "the cache of values holds keys",
        "append keys to keys and values to values",
        "cache-slots",
        appending(lambda k, v: (k, k)),
    )
    yield Hypothesis(
        "cache-keys-rolled",
        "the new keys are cached in the order last, first, second, …",
        "write new token i into slot length + i",
        "cache-slots",
        appending(lambda k, v: (np.roll(k, 1, axis=2), v)),
    )
    yield Hypothesis(
        "cache-slot-late",
        "after the first call tokens are cached one slot too late",
        "write new token i into slot length + i",
        "cache-slots",
        Late,
    )
    yield Hypothesis(
        "cache-slot-stale",
        "the last token of each call is not cached: its slot is stale",
        "write all new tokens, then attend",
        "cache-slots",
        Stale,
    )
    if case.new_lengths:
        yield Hypothesis(
            "cache-holds-padding",
            "padding is cached with the real tokens",
            "append only the first new_lengths tokens of each sequence",
            "cache-slots",
            PaddingToo,
        )


GROUPS = (_not_finite, _transposed, _swapped, _rope, _fused_qkv, _heads, _masks, _scores, _missing_biases, _caches)

PRECISIONS = {
    "tf32": ("matrix products take their inputs as TF32, with 10 bits", "set the float32 matmul precision to highest"),
    "bfloat16": ("matrix products take their inputs as bfloat16", "compute products of float32 in float32"),
    "lofi": ("matrix products take 4 bits of each input (LoFi)", "raise the math fidelity to HiFi4"),
}
"""Arithmetics that explain a difference that is everywhere and small, the finest first: what would be the case, and the
fix."""

"""Mistakes that lie in the weights or in how they are read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mha_spec import AttentionSpec
from parity.core.case import Case
from parity.core.reference import Layer
from parity.core.stages import Values
from parity.core.weights import QKV
from parity.diagnosis.mistakes.record import Mistake

STAGES = {"q_proj": ("q", "k"), "k_proj": ("k",), "v_proj": ("v",), "out_proj": ("output",)}
"""Where a mistake in a projection is seen first."""


# ---- Transposed ------------------------------------------------------------------------------------------------------


def transposed(case: Case) -> Iterator[Mistake]:
    spec = case.spec
    square = {
        "q_proj": spec.q_width == spec.d_in,
        "k_proj": spec.k_width == spec.d_kv,
        "v_proj": spec.v_width == spec.d_kv,
        "out_proj": spec.out_proj and spec.context_width == spec.d_model,
    }
    return (_transposed(projection) for projection, holds in square.items() if holds)


def _transposed(projection: str) -> Mistake:
    kernel = f"{projection}.weight"

    def parameter(_: Layer, original: Any, name: str) -> np.ndarray:
        return original(name).T if name == kernel else original(name)

    return Mistake(
        f"{projection}-transposed",
        f"{projection}'s square kernel is transposed",
        f"transpose {kernel}: canonical kernels are (out, in), Flax's and GPT-2's Conv1D are (in, out)",
        "transposed-kernel",
        STAGES[projection],
        {"parameter": parameter},
    )


# ---- Exchanged -------------------------------------------------------------------------------------------------------


def swapped(case: Case) -> Iterator[Mistake]:
    spec = case.spec
    q, k, v = spec.qkv_biases  # one that only one of two has would not be loaded into the other
    has_one_width = spec.value_head_dim == spec.head_dim
    pairs = [("k", "v", k == v)] if has_one_width else []
    if spec.num_heads == spec.num_kv_heads and spec.d_in == spec.d_kv:
        pairs += [("q", "k", q == k), *([("q", "v", q == v)] if has_one_width else [])]
    for one, other, have_both in pairs:
        if have_both:
            yield _swapped(one, other)
    has_bias = dict(zip("qkv", (q, k, v), strict=True))
    yield from (_swapped(one, other, is_alone=True) for one, other, _ in pairs if has_bias[one] or has_bias[other])
    if spec.rope is not None and has_one_width:  # without it the same as the first
        yield _swapped_after_rope()


def _swapped(one: str, other: str, *, is_alone: bool = False) -> Mistake:
    """Two projections exchanged; or their weights alone, which are loaded by themselves: that is only searched for."""
    names = {f"{one}_proj": f"{other}_proj", f"{other}_proj": f"{one}_proj"}

    def has_bias(_: Layer, original: Any, name: str) -> bool:
        return original(name if is_alone else names.get(name, name))

    def parameter(_: Layer, original: Any, name: str) -> np.ndarray:
        projection, dot, leaf = name.partition(".")
        is_in_place = is_alone and leaf == "bias"
        return original(name if is_in_place else names.get(projection, projection) + dot + leaf)

    return Mistake(
        f"{one}-{other}-swapped",
        f"the weights of {one}_proj and {other}_proj are exchanged, and not their biases"
        if is_alone
        else f"{one}_proj and {other}_proj are exchanged",
        f"exchange {one}_proj and {other}_proj, or the order in which a packed projection is split",
        "swapped-projections",
        (one,),
        {"has_bias": has_bias, "parameter": parameter},
    )


def _swapped_after_rope() -> Mistake:
    def project(_: Layer, original: Any, *inputs: np.ndarray) -> dict[str, np.ndarray]:
        projected = original(*inputs)
        return {**projected, "k": projected["v"], "v": projected["k"]}

    return Mistake(
        "k-v-swapped",
        "k and v are exchanged after RoPE",
        "exchange k and v where the heads are returned or cached",
        "swapped-projections",
        ("k",),
        {"project": project},
    )


# ---- Packed ----------------------------------------------------------------------------------------------------------


def fused_qkv(case: Case) -> Iterator[Mistake]:
    """One packed weight, its heads in the order q … k … v, or for each key/value head q … k v."""
    spec = case.spec
    if spec.num_kv_heads == 1 or isinstance(spec.qkv_bias, tuple):
        return
    if spec.value_head_dim != spec.head_dim:
        yield _kv_read_as_halves(spec)
        return
    if spec.d_in != spec.d_kv:
        return
    sizes = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
    groups = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])  # the heads of q, of k, of v
    grouped = np.concatenate([part.reshape(spec.num_kv_heads, -1) for part in groups], axis=1).reshape(-1)

    def parameter_in(order: np.ndarray, leaves: Sequence[str] = ("weight", "bias")) -> Any:
        def parameter(_: Layer, original: Any, name: str) -> np.ndarray:
            projection, __, leaf = name.partition(".")
            if projection not in QKV or leaf not in leaves:
                return original(name)
            parts = [original(f"{each}_proj.{leaf}") for each in "qkv"]
            heads = [head for part in parts for head in part.reshape(-1, spec.head_dim, *part.shape[1:])]
            mixed = np.split(order, np.cumsum(sizes)[:-1])["qkv".index(projection[0])]
            return np.concatenate([heads[place] for place in mixed])

        return parameter

    for name, about, fix, order in (
        (
            "fused-qkv-read-per-head",
            "a fused QKV weight that holds all q, all k, all v is read head by head (or group by group)",
            "split the fused weight into q, k and v first, then into heads",
            np.argsort(grouped),
        ),
        (
            "fused-qkv-read-as-thirds",
            "a fused QKV weight that holds q, k, v head by head (or group by group) is read as all q, all k, all v",
            "split the fused weight into heads (or groups) first, as GPT-NeoX and Falcon keep it",
            grouped,
        ),
    ):
        changed = {"parameter": parameter_in(order)}
        yield Mistake(name, about, fix, "fused-qkv", ("q", "k"), changed)
        if any(spec.qkv_biases):  # which are loaded by themselves: only searched for
            about, changed = f"{about}, and not its bias", {"parameter": parameter_in(order, ("weight",))}
            yield Mistake(name, about, fix, "fused-qkv", ("q", "k"), changed)


def _kv_read_as_halves(spec: AttentionSpec) -> Mistake:
    """Packed head by head, [k v] [k v], and read as all k, then all v."""

    def parameter(_: Layer, original: Any, name: str) -> np.ndarray:
        if not name.startswith(("k_proj.", "v_proj.")):
            return original(name)
        parts = [original(f"{part}_proj.{name.partition('.')[2]}") for part in "kv"]
        heads = [part.reshape(spec.num_kv_heads, -1, *part.shape[1:]) for part in parts]
        packed = np.concatenate(heads, axis=1).reshape(-1, *parts[0].shape[1:])
        return packed[: spec.k_width] if name.startswith("k") else packed[spec.k_width :]

    return Mistake(
        "kv-read-as-halves",
        "a weight that holds keys and values head by head is read as all keys, then all values",
        "split the packed weight into heads first, and each head into head_dim keys and value_head_dim values",
        "value-head-dim",
        ("k",),
        {"parameter": parameter},
    )


# ---- Missing ---------------------------------------------------------------------------------------------------------


def missing_biases(case: Case) -> Iterator[Mistake]:
    spec, qkv, out = case.spec, ("q_proj", "k_proj", "v_proj"), ("out_proj",)
    has_out_bias = spec.out_proj and spec.out_bias
    held = tuple(name for name, has_bias in zip(qkv, spec.qkv_biases, strict=True) if has_bias)
    for name in held:
        yield _missing_bias(name, name, (name,), STAGES[name])
    if len(held) > 1:
        yield _missing_bias("qkv", ", ".join(held), held, STAGES[held[0]])
    if spec.qkv_biases[1:] == (False, True):
        yield _bias_on_k()
    if has_out_bias:
        yield _missing_bias("out_proj", "out_proj", out, STAGES["out_proj"])
    if held and has_out_bias:
        yield _missing_bias("all", "every projection", held + out, STAGES[held[0]])
    if has_out_bias and spec.num_heads > 1:
        yield _out_bias_per_head(spec.num_heads)
    widths = {"q": spec.q_width, "k": spec.k_width, "v": spec.v_width}
    for one, other in (("k", "q"), ("v", "k")):
        if {f"{one}_proj", f"{other}_proj"} <= {*held} and widths[one] == widths[other]:
            yield _bias_of_another(one, other)


def _out_bias_per_head(num_heads: int) -> Mistake:
    def parameter(_: Layer, original: Any, name: str) -> np.ndarray:
        return original(name) * original(name).dtype.type(num_heads) if name == "out_proj.bias" else original(name)

    return Mistake(
        "out_proj-bias-per-head",
        f"the bias of out_proj is added once for each of {num_heads} heads",
        "add the bias of out_proj once, after what heads (or ranks) give has been summed",
        "missing-bias",
        STAGES["out_proj"],
        {"parameter": parameter},
    )


def _bias_of_another(one: str, other: str) -> Mistake:
    wrong = f"{one}_proj.bias"

    def parameter(_: Layer, original: Any, name: str) -> np.ndarray:
        return original(f"{other}_proj.bias" if name == wrong else name)

    return Mistake(
        f"{one}-bias-from-{other}",
        f"the bias of {one}_proj is that of {other}_proj",
        f"load the bias of {one}_proj under its own name",
        "missing-bias",
        STAGES[f"{one}_proj"],
        {"parameter": parameter},
    )


def _missing_bias(name: str, whose: str, projections: Sequence[str], stages: tuple[str, ...]) -> Mistake:
    def has_bias(_: Layer, original: Any, projection: str) -> bool:
        return projection not in projections and original(projection)

    return Mistake(
        f"{name}-bias-missing",
        f"the bias of {whose} is missing",
        f"load and add the bias of {whose}",
        "missing-bias",
        stages,
        {"has_bias": has_bias},
    )


def _bias_on_k() -> Mistake:
    def has_bias(_: Layer, original: Any, projection: str) -> bool:
        return original({"k_proj": "v_proj", "v_proj": "k_proj"}.get(projection, projection))

    def parameter(_: Layer, original: Any, name: str) -> np.ndarray:
        return original("v_proj.bias" if name == "k_proj.bias" else name)

    return Mistake(
        "v-bias-on-k",
        "the bias of v_proj is added to the keys, and not to the values",
        "give v_proj its bias and k_proj none: where biases are packed, with zeros in the place of k's",
        "missing-bias",
        ("k",),
        {"has_bias": has_bias, "parameter": parameter},
    )


# ---- Limits ----------------------------------------------------------------------------------------------------------


def not_clipped(case: Case) -> Iterator[Mistake]:
    if case.spec.clip_qkv is None:
        return
    for of in ("qkv", "v"):
        yield _not_clipped(of)


def _not_clipped(of: str) -> Mistake:
    def clipped(_: Layer, original: Any, name: str, x: np.ndarray) -> np.ndarray:
        return x if name in of else original(name, x)

    return Mistake(
        "clip-qkv-missing" if of == "qkv" else f"clip-qkv-missing-{of}",
        "what the projections give is not clipped" if of == "qkv" else f"what {of}_proj gives is not clipped",
        "clip what q_proj, k_proj and v_proj give to [-clip_qkv, clip_qkv]",
        "clip-qkv",
        STAGES["v_proj"] if of == "v" else STAGES["q_proj"],
        {"clipped": clipped},
    )


def no_out_proj(case: Case) -> Iterator[Mistake]:
    def output(layer: Layer, _: Any, values: Values) -> dict[str, np.ndarray]:
        return {"output": layer.combine_heads(layer.gated(values))}

    if case.spec.out_proj and case.spec.context_width == case.spec.d_model:
        yield Mistake(
            "out-proj-missing",
            "out_proj is missing",
            "project the combined heads with out_proj",
            "missing-out-proj",
            ("output",),
            {"output": output},
        )


def out_columns(case: Case) -> Iterator[Mistake]:
    """The columns of out_proj in another order of heads than the context has."""
    spec = case.spec
    num_heads, size = spec.num_heads, spec.value_head_dim
    if not spec.out_proj or num_heads == 1 or size == 1 or num_heads == size:  # then it is heads-combined-innermost
        return

    def parameter(_: Layer, original: Any, name: str) -> np.ndarray:
        found = original(name)
        if name != "out_proj.weight":
            return found
        return found.reshape(-1, num_heads, size).swapaxes(1, 2).reshape(found.shape)

    yield Mistake(
        "out_proj-heads-innermost",
        "the columns of out_proj are in the order (H, N) and not (N, H)",
        "reshape the columns of out_proj.weight to (N, H), heads outermost, as they are combined",
        "head-order",
        STAGES["out_proj"],
        {"parameter": parameter},
    )


def residual(case: Case) -> Iterator[Mistake]:
    """What a block adds to the output of its attention, added by the attention."""
    spec = case.spec
    if not spec.out_proj or spec.d_in != spec.d_model or case.is_cached or case.not_finite:
        return

    def output(layer: Layer, original: Any, values: Values) -> dict[str, np.ndarray]:
        a = layer.arithmetic
        return {"output": a.keep(a.widen(original(values)["output"]) + a.widen(layer.problem.residual))}

    yield Mistake(
        "residual-added",
        "the input is added to the output",
        "compare attention without the residual connection of its block, or give it without",
        "residual",
        STAGES["out_proj"],
        {"output": output},
    )

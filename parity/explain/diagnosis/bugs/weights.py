"""Bugs in the weights, or in how they are read."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from parity.explain.diagnosis.bugs.families import BIAS, HEAD_ORDER, SWAPPED, TRANSPOSED
from parity.explain.diagnosis.bugs.record import Edit, Override, known_bug
from parity.explain.diagnosis.bugs.sites import Overrides, packed, projected, read_as, weights
from parity.explain.diagnosis.sample import residual_of
from parity.measure.core.case import Case
from parity.measure.core.orders import heads_innermost, reordered
from parity.measure.core.reference import Layer
from parity.measure.core.stages import Values
from parity.measure.core.weights import QKV
from parity.measure.text import and_listed

STAGES = {"q_proj": ("q", "k"), "k_proj": ("k",), "v_proj": ("v",), "out_proj": ("output",)}
"""Stages that show a bug in a projection first."""


def transposed(case: Case) -> Iterator[Edit]:
    spec = case.spec
    square = {
        "q_proj": spec.q_width == spec.d_in,
        "k_proj": spec.k_width == spec.d_kv,
        "v_proj": spec.v_width == spec.d_kv,
        "out_proj": spec.out_proj and spec.context_width == spec.d_model,
    }
    for projection in (name for name, holds in square.items() if holds):
        yield TRANSPOSED.seen_in(*STAGES[projection])(
            f"{projection}-transposed",
            f"{projection}'s square kernel is transposed",
            weights(np.transpose, [f"{projection}.weight"]),
            fix=f"transpose {projection}.weight: {TRANSPOSED.fix}",
        )


def swapped(case: Case) -> Iterator[Edit]:
    """Two projections are exchanged, or their weights alone. The latter are only searched for:
    loaders load each by itself.
    """
    spec = case.spec
    q, k, v = spec.qkv_biases  # a bias that only one of two has would not be loaded into the other
    has_one_width = spec.value_head_dim == spec.head_dim
    pairs = [("k", "v", k, v)] if has_one_width else []
    if spec.num_heads == spec.num_kv_heads and spec.d_in == spec.d_kv:
        pairs += [("q", "k", q, k), *([("q", "v", q, v)] if has_one_width else [])]

    def bug(one: str, other: str, about: str, overrides: Overrides) -> Edit:
        return SWAPPED.seen_in(one)(
            f"{one}-{other}-swapped",
            about,
            overrides,
            fix=(
                f"exchange {one}_proj and {other}_proj, or the order in which a packed "
                f"projection is split"
            ),
        )

    for one, other, *biases in pairs:
        if biases[0] == biases[1]:
            names = {f"{one}_proj": f"{other}_proj", f"{other}_proj": f"{one}_proj"}
            about = f"{one}_proj and {other}_proj are exchanged"
            yield bug(
                one, other, about, {"has_bias": _of_others(names), "parameter": read_as(names)}
            )
    for one, other, *biases in pairs:
        if any(biases):
            names = {
                f"{one}_proj.weight": f"{other}_proj.weight",
                f"{other}_proj.weight": f"{one}_proj.weight",
            }
            about = (
                f"the weights of {one}_proj and {other}_proj are exchanged, but not their biases"
            )
            yield bug(one, other, about, {"parameter": read_as(names)})
    if spec.rope is not None and has_one_width:  # without it the same as the first
        yield SWAPPED.seen_in("k")(
            "k-v-swapped",
            "k and v are exchanged after RoPE",
            projected(lambda heads: {"k": heads["v"], "v": heads["k"]}),
            fix="exchange k and v where the heads are returned or cached",
        )


def _of_others(names: dict[str, str]) -> Override:
    """Return an override of `has_bias`: projections have the biases of others."""
    return lambda _, original, name: original(names.get(name, name))


def fused_qkv(case: Case) -> Iterator[Edit]:
    """One packed weight, its heads in the order q … k … v, or for each key/value head q … k v."""
    spec = case.spec
    if spec.num_kv_heads == 1 or isinstance(spec.qkv_bias, tuple):
        return
    if spec.value_head_dim != spec.head_dim:
        yield known_bug(
            "kv-read-as-halves",
            "a weight with keys and values per head is read as all keys, then all values",
            packed(QKV[1:], spec.num_kv_heads, ("weight", "bias"), by_head=True),
            fix=(
                "split the packed weight into heads first, and each head into head_dim keys and "
                "value_head_dim values"
            ),
            page="value-head-dim",
            stages=("k",),
        )
    elif spec.d_in == spec.d_kv:
        for name, about, fix, by_head in (
            (
                "fused-qkv-read-per-head",
                "a fused QKV weight with all q, all k, all v is read per head (or per group)",
                "split the fused weight into q, k and v first, then into heads",
                False,
            ),
            (
                "fused-qkv-read-as-thirds",
                "a fused QKV weight with q, k, v per head (or per group) is read as all q, all "
                "k, all v",
                "split the fused weight into heads (or groups) first, as in GPT-NeoX and Falcon",
                True,
            ),
        ):
            bug = partial(known_bug, name, fix=fix, page="fused-qkv", stages=("q", "k"))
            read = partial(packed, QKV, spec.num_kv_heads, by_head=by_head)
            yield bug(about, read(leaves=("weight", "bias")))
            if any(spec.qkv_biases):  # loaded by themselves: only searched for
                yield bug(f"{about}, but not its bias", read(leaves=("weight",)))


def missing_biases(case: Case) -> Iterator[Edit]:
    spec = case.spec
    held = tuple(name for name, has_bias in zip(QKV, spec.qkv_biases, strict=True) if has_bias)
    out = ("out_proj",) if spec.out_proj and spec.out_bias else ()

    def missing(name: str, projections: tuple[str, ...], whose: str = "") -> Edit:
        whose = whose or and_listed(projections)
        return BIAS.seen_in(*STAGES[projections[0]])(
            f"{name}-bias-missing",
            f"the bias of {whose} is missing",
            {"has_bias": lambda _, original, name: name not in projections and original(name)},
            fix=f"load and add the bias of {whose}",
        )

    for name in held:
        yield missing(name, (name,))
    if len(held) > 1:
        yield missing("qkv", held)
    if spec.qkv_biases[1:] == (False, True):
        exchanged = _of_others({"k_proj": "v_proj", "v_proj": "k_proj"})
        yield BIAS.seen_in("k")(
            "v-bias-on-k",
            "the bias of v_proj is added to the keys instead of the values",
            {"has_bias": exchanged, "parameter": read_as({"k_proj.bias": "v_proj.bias"})},
            fix=(
                "load the bias of v_proj for v_proj, and none for k_proj (in packed biases, "
                "zeros for k)"
            ),
        )
    if out:
        yield missing("out_proj", out)
    if held and out:
        yield missing("all", held + out, "every projection")
    if out and spec.num_heads > 1:
        yield BIAS.seen_in(*STAGES["out_proj"])(
            "out_proj-bias-per-head",
            f"the bias of out_proj is added once for each of {spec.num_heads} heads",
            weights(lambda bias: bias * bias.dtype.type(spec.num_heads), ["out_proj.bias"]),
            fix="add the bias of out_proj once, after the sum over heads (or ranks)",
        )
    for one, other, have_one_width in (
        ("k_proj", "q_proj", spec.k_width == spec.q_width),
        ("v_proj", "k_proj", spec.v_width == spec.k_width),
    ):
        if have_one_width and {one, other} <= {*held}:
            yield BIAS.seen_in(*STAGES[one])(
                f"{one[0]}-bias-from-{other[0]}",
                f"the bias of {one} is that of {other}",
                {"parameter": read_as({f"{one}.bias": f"{other}.bias"})},
                fix=f"load the bias of {one} under its own name",
            )


def not_clipped(case: Case) -> Iterator[Edit]:
    for of, whose in (("qkv", "q, k and v are"), ("v", "v is")) if case.spec.clip_qkv else ():
        yield known_bug(
            "clip-qkv-missing" if of == "qkv" else f"clip-qkv-missing-{of}",
            f"{whose} not clipped",
            {"clipped": lambda _, original, name, x, of=of: x if name in of else original(name, x)},
            fix="clip the outputs of q_proj, k_proj and v_proj to [-clip_qkv, clip_qkv]",
            page="clip-qkv",
            stages=STAGES["v_proj"] if of == "v" else STAGES["q_proj"],
        )


def no_out_proj(case: Case) -> Iterator[Edit]:
    def output(layer: Layer, _: object, values: Values) -> dict[str, np.ndarray]:
        return {"output": layer.combine_heads(layer.gated(values))}

    if case.spec.out_proj and case.spec.context_width == case.spec.d_model:
        yield known_bug(
            "out-proj-missing",
            "out_proj is missing",
            {"output": output},
            fix="project the combined heads with out_proj",
            page="missing-out-proj",
            stages=("output",),
        )


def out_columns(case: Case) -> Iterator[Edit]:
    """The columns of out_proj are in another order of heads than the context."""
    num_heads = case.spec.num_heads
    size = case.spec.value_head_dim
    # Otherwise it is heads-combined-innermost.
    if case.spec.out_proj and 1 not in (num_heads, size) and num_heads != size:
        innermost = heads_innermost(num_heads, size)
        yield HEAD_ORDER.seen_in("output")(
            "out_proj-heads-innermost",
            "the columns of out_proj are in the order (H, N) instead of (N, H)",
            weights(partial(reordered, order=innermost, axis=1), ["out_proj.weight"]),
            fix=(
                "reshape the columns of out_proj.weight to (N, H), heads outermost, as they are "
                "combined"
            ),
        )


def residual(case: Case) -> Iterator[Edit]:
    """The residual connection of a block is added by its attention."""
    spec = case.spec

    def output(layer: Layer, original: Override, values: Values) -> dict[str, np.ndarray]:
        a = layer.arithmetic
        output = a.widen(original(values)["output"])
        return {"output": a.keep(output + a.widen(residual_of(layer.problem)))}

    if spec.out_proj and spec.d_in == spec.d_model and not case.is_cached and not case.not_finite:
        yield known_bug(
            "residual-added",
            "the input is added to the output",
            {"output": output},
            fix="compare attention without the residual connection of its block",
            page="residual",
            stages=STAGES["out_proj"],
        )

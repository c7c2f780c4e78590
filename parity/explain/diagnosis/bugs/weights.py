"""Bugs in the weights, or in how they are read."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from parity.explain.diagnosis.bugs.families import (
    BIAS,
    FUSED_QKV,
    HEAD_ORDER,
    SWAPPED,
    TRANSPOSED,
)
from parity.explain.diagnosis.bugs.record import Edit, Override, known_bug
from parity.explain.diagnosis.bugs.sites import (
    Overrides,
    always,
    features_unchanged,
    for_names,
    named_as,
    packed,
    projected,
    read_as,
    weights,
)
from parity.explain.diagnosis.bugs.specs import of_spec
from parity.explain.diagnosis.sample import residual_of
from parity.measure.core.case import Case
from parity.measure.core.orders import heads_innermost, reordered
from parity.measure.core.reference import Layer
from parity.measure.core.stages import Values
from parity.measure.core.weights import QKV
from parity.measure.text import and_listed

STAGES = {"q_proj": ("q", "k"), "k_proj": ("k",), "v_proj": ("v",), "out_proj": ("output",)}
"""Stages that show a bug in a projection first."""

MISREAD = "fused-qkv-misread"
"""The name of a bug that reads a packed weight in any other order than known bugs do."""


def transposed(case: Case) -> Iterator[Edit]:
    spec = case.spec
    is_square = {
        "q_proj": spec.q_width == spec.d_in,
        "k_proj": spec.k_width == spec.d_kv,
        "v_proj": spec.v_width == spec.d_kv,
        "out_proj": spec.out_proj and spec.context_width == spec.d_model,
    }
    for projection in is_square:
        if not is_square[projection]:
            continue
        yield TRANSPOSED.shown_in(*STAGES[projection])(
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
    pairs = []
    if has_one_width:
        pairs.append(("k", "v", k, v))
    if spec.num_heads == spec.num_kv_heads and spec.d_in == spec.d_kv:
        pairs.append(("q", "k", q, k))
        if has_one_width:
            pairs.append(("q", "v", q, v))
    for one, other, has_bias, other_has_bias in pairs:
        if has_bias == other_has_bias:
            names = {f"{one}_proj": f"{other}_proj", f"{other}_proj": f"{one}_proj"}
            about = f"{one}_proj and {other}_proj are exchanged"
            overrides = {"has_bias": named_as(names), "parameter": read_as(names)}
            yield _swapped(one, other, about, overrides)
    for one, other, has_bias, other_has_bias in pairs:
        if has_bias or other_has_bias:
            names = {
                f"{one}_proj.weight": f"{other}_proj.weight",
                f"{other}_proj.weight": f"{one}_proj.weight",
            }
            about = (
                f"the weights of {one}_proj and {other}_proj are exchanged, but not their biases"
            )
            yield _swapped(one, other, about, {"parameter": read_as(names)})
    if spec.rope is not None and has_one_width:  # without it the same as the first
        yield SWAPPED.shown_in("k")(
            "k-v-swapped",
            "k and v are exchanged after RoPE",
            projected(_keys_and_values_exchanged),
            fix="exchange k and v where the heads are returned or cached",
        )


def _swapped(one: str, other: str, about: str, overrides: Overrides) -> Edit:
    return SWAPPED.shown_in(one)(
        f"{one}-{other}-swapped",
        about,
        overrides,
        fix=(
            f"exchange {one}_proj and {other}_proj, or the order in which a packed projection is "
            f"split"
        ),
    )


def _keys_and_values_exchanged(heads: Values) -> dict[str, np.ndarray]:
    return {"k": heads["v"], "v": heads["k"]}


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
            bug = partial(FUSED_QKV.shown_in("q", "k"), name, fix=fix)
            read = partial(packed, QKV, spec.num_kv_heads, by_head=by_head)
            yield bug(about, read(leaves=("weight", "bias")))
            if any(spec.qkv_biases):  # loaded by themselves: only searched for
                yield bug(f"{about}, but not its bias", read(leaves=("weight",)))


def rotated_qkv(case: Case) -> Iterator[Edit]:
    """The three parts of a packed weight are each read as the next one, or as the one before."""
    spec = case.spec
    is_in_thirds = (
        spec.num_heads == spec.num_kv_heads
        and spec.value_head_dim == spec.head_dim
        and spec.d_in == spec.d_kv
    )
    if not is_in_thirds or isinstance(spec.qkv_bias, tuple):
        return
    for read_order, packed_order in (("k, v, q", "v, q, k"), ("v, q, k", "k, v, q")):
        bug = partial(FUSED_QKV.shown_in("q", "k"), "fused-qkv-rotated", fix=FUSED_QKV.fix)
        about = (
            f"a fused weight of q, k, v is split in the order {read_order}, or one of "
            f"{packed_order} in the order q, k, v"
        )
        packed_as = dict(zip(read_order.split(", "), "qkv", strict=True))
        projections = {f"{name}_proj": f"{part}_proj" for name, part in packed_as.items()}
        yield bug(about, {"has_bias": named_as(projections), "parameter": read_as(projections)})
        if any(spec.qkv_biases):  # loaded by themselves: only searched for
            weights_alone = {
                f"{name}.weight": f"{part}.weight" for name, part in projections.items()
            }
            yield bug(f"{about}, but not its bias", {"parameter": read_as(weights_alone)})


def misread(name: str, order: np.ndarray, names: tuple[str, ...], about: str, fix: str) -> Edit:
    """Return a packed weight that was read in a different order than it was packed in.

    Args:
        name: name of the bug.
        order: the row of the right projections, one after the other, that each row of the wrong
            ones is.
        names: canonical names of the weights, and of the biases that are packed alike, in the order
            of the projections.
        about: a description, with both orders.
        fix: an instruction.
    """
    return FUSED_QKV.shown_in("q", "k")(name, about, rows_in_order(order, names), fix=fix)


def rows_in_order(order: np.ndarray, names: tuple[str, ...]) -> Overrides:
    """Let the rows of several weights together be in a different order; see `misread`."""
    return {"parameter": for_names(names, partial(_in_rows_of_others, order, names))}


def _in_rows_of_others(
    order: np.ndarray, names: tuple[str, ...], _: Layer, original: Override, name: str
) -> np.ndarray:
    """Return the rows that a weight has if the rows of several weights are in a different order."""
    leaf = name.partition(".")[2]
    packed_names = [other for other in names if other.endswith(f".{leaf}")]
    parts = [original(other) for other in packed_names]
    ends = np.cumsum([len(part) for part in parts])
    index = packed_names.index(name)
    rows = order[ends[index] - len(parts[index]) : ends[index]]
    return np.concatenate(parts)[rows]


def missing_biases(case: Case) -> Iterator[Edit]:
    spec = case.spec
    biased = tuple(name for name, has_bias in zip(QKV, spec.qkv_biases, strict=True) if has_bias)
    out_has_bias = spec.out_proj and spec.out_bias
    for name in biased:
        yield _bias_missing(name, (name,))
    if len(biased) > 1:
        yield _bias_missing("qkv", biased)
    if spec.qkv_biases[1:] == (False, True):
        exchanged = named_as({"k_proj": "v_proj", "v_proj": "k_proj"})
        yield BIAS.shown_in("k")(
            "v-bias-on-k",
            "the bias of v_proj is added to the keys instead of the values",
            {"has_bias": exchanged, "parameter": read_as({"k_proj.bias": "v_proj.bias"})},
            fix=(
                "load the bias of v_proj for v_proj, and none for k_proj (in packed biases, "
                "zeros for k)"
            ),
        )
    if out_has_bias:
        yield _bias_missing("out_proj", ("out_proj",))
    if biased and out_has_bias:
        yield _bias_missing("all", (*biased, "out_proj"), "every projection")
    if out_has_bias and spec.num_heads > 1:
        yield BIAS.shown_in(*STAGES["out_proj"])(
            "out_proj-bias-per-head",
            f"the bias of out_proj is added once for each of {spec.num_heads} heads",
            weights(partial(_times, spec.num_heads), ["out_proj.bias"]),
            fix="add the bias of out_proj once, after the sum over heads (or ranks)",
        )
    for one, other, have_one_width in (
        ("k_proj", "q_proj", spec.k_width == spec.q_width),
        ("v_proj", "k_proj", spec.v_width == spec.k_width),
    ):
        if have_one_width and one in biased and other in biased:
            yield BIAS.shown_in(*STAGES[one])(
                f"{one[0]}-bias-from-{other[0]}",
                f"the bias of {one} is the bias of {other}",
                {"parameter": read_as({f"{one}.bias": f"{other}.bias"})},
                fix=f"load the bias of {one} under its own name",
            )


def _bias_missing(name: str, projections: tuple[str, ...], whose: str = "") -> Edit:
    if not whose:
        whose = and_listed(projections)
    return BIAS.shown_in(*STAGES[projections[0]])(
        f"{name}-bias-missing",
        f"the bias of {whose} is missing",
        {"has_bias": for_names(projections, always(False))},
        fix=f"load and add the bias of {whose}",
    )


def _times(factor: int, bias: np.ndarray) -> np.ndarray:
    return bias * bias.dtype.type(factor)


def not_clipped(case: Case) -> Iterator[Edit]:
    if not case.spec.clip_qkv:
        return
    bug = partial(
        known_bug,
        fix="clip the outputs of q_proj, k_proj and v_proj to [-clip_qkv, clip_qkv]",
        page="clip-qkv",
    )
    yield bug(
        "clip-qkv-missing",
        "q, k and v are not clipped",
        of_spec(case.spec, clip_qkv=None),
        stages=STAGES["q_proj"],
    )
    yield bug(
        "clip-qkv-missing-v",
        "v is not clipped",
        {"clipped": for_names("v", features_unchanged)},
        stages=STAGES["v_proj"],
    )


def no_out_proj(case: Case) -> Iterator[Edit]:
    if case.spec.out_proj and case.spec.context_width == case.spec.d_model:
        yield known_bug(
            "out-proj-missing",
            "out_proj is missing",
            {"output": _not_projected},
            fix="project the combined heads with out_proj",
            page="missing-out-proj",
            stages=("output",),
        )


def _not_projected(layer: Layer, _: Override, values: Values) -> dict[str, np.ndarray]:
    return {"output": layer.combine_heads(layer.gated(values))}


def out_columns(case: Case) -> Iterator[Edit]:
    """The columns of out_proj are in a different order of heads than the context."""
    num_heads = case.spec.num_heads
    size = case.spec.value_head_dim
    # Otherwise it is heads-combined-innermost.
    if case.spec.out_proj and 1 not in (num_heads, size) and num_heads != size:
        innermost = heads_innermost(num_heads, size)
        yield HEAD_ORDER.shown_in("output")(
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
    if spec.out_proj and spec.d_in == spec.d_model and not case.is_cached and not case.not_finite:
        yield known_bug(
            "residual-added",
            "the input is added to the output",
            {"output": _with_residual},
            fix="compare attention without the residual connection of its block",
            page="residual",
            stages=STAGES["out_proj"],
        )


def _with_residual(layer: Layer, original: Override, values: Values) -> dict[str, np.ndarray]:
    a = layer.arithmetic
    output = a.widen(original(values)["output"])
    return {"output": a.keep(output + a.widen(residual_of(layer.problem)))}

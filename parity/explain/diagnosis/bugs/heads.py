"""Bugs in the split, sharing, order and combination of heads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from parity.explain.diagnosis.bugs.families import GROUPED, HEAD_ORDER
from parity.explain.diagnosis.bugs.record import Edit, Override, instead, known_bug
from parity.explain.diagnosis.bugs.sites import Overrides, before, projected
from parity.measure.core.case import Case
from parity.measure.core.orders import HEAD_ORDERS
from parity.measure.core.reference import Layer
from parity.measure.core.stages import Values


def shared(case: Case) -> Iterator[Edit]:
    num_heads, num_kv_heads = case.spec.num_heads, case.spec.num_kv_heads
    if num_heads == num_kv_heads:
        return
    bug = GROUPED.shown_in("scores")
    if num_kv_heads > 1:
        yield bug(
            "kv-heads-tiled",
            "key/value heads are tiled (0 1 0 1) instead of repeated (0 0 1 1)",
            {"per_query_head": instead(partial(_tiled, num_heads))},
        )
    about = (
        "key/value heads are repeated along an axis after the tokens, (B, K, S, N/K, H), instead "
        "of before them, (B, K, N/K, S, H)"
    )
    fix = "insert the axis of copies before the tokens: k[:, :, None], not k[:, :, :, None]"
    copies = partial(_copies_after_tokens, num_heads)
    yield bug(COPIES_AFTER_TOKENS, about, _repeating(copies), fix=fix)
    if case.is_cached and not case.new_lengths:
        of_filled = partial(_copies_of_filled_slots, num_heads)
        yield bug(
            COPIES_AFTER_TOKENS,
            f"{about}, in a cache that has no empty slots",
            _repeating(of_filled),
            fix=fix,
        )


COPIES_AFTER_TOKENS = "kv-copies-after-tokens"
"""The name of a bug that repeats key/value heads along the wrong axis."""


def _tiled(num_heads: int, x: np.ndarray) -> np.ndarray:
    """Return key/value heads (B, K, S, H) for query heads: n has key/value head n % K."""
    return x[:, np.arange(num_heads) % x.shape[1]]


Repeat = Callable[[Values, np.ndarray], np.ndarray]
"""Repeats key/value heads (B, K, S, H) for query heads, among the values of a call."""


def _repeating(repeat: Repeat) -> Overrides:
    """Repeat the keys and values that enter the two products differently."""

    def of_keys(values: Values) -> tuple[Values]:
        return ({**values, "k": repeat(values, values["k"])},)

    def of_values(values: Values) -> tuple[Values]:
        return ({**values, "v": repeat(values, values["v"])},)

    return {"products": before(of_keys), "weighed": before(of_values)}


def _copies_after_tokens(num_heads: int, _: Values, x: np.ndarray) -> np.ndarray:
    """Return (B, K, S, H) as (B, N, S, H), by way of (B, K, S, N // K, H)."""
    batch, num_kv_heads, num_tokens, width = x.shape
    copies = np.repeat(x, num_heads // num_kv_heads, axis=2)
    return copies.reshape(batch, num_heads, num_tokens, width)


def _copies_of_filled_slots(num_heads: int, values: Values, x: np.ndarray) -> np.ndarray:
    """Return the same for the filled slots of a cache alone."""
    num_filled = int(np.max(values["cache.lengths"]))
    copies = _copies_after_tokens(num_heads, values, x[:, :, :num_filled])
    empty = np.zeros((*copies.shape[:2], x.shape[2] - num_filled, x.shape[3]), x.dtype)
    return np.concatenate([copies, empty], axis=2)


def split_or_combined(case: Case) -> Iterator[Edit]:
    if case.spec.num_heads == 1:
        return
    split, combined = HEAD_ORDER.shown_in("q", "k"), HEAD_ORDER.shown_in("output")
    yield split(
        "heads-innermost",
        "the width is split into (H, N) instead of (N, H)",
        {"split_heads": instead(_split_innermost)},
        fix="split heads outermost: reshape to (B, T, N, H), then move N before T",
    )
    yield split(
        "heads-not-moved",
        "heads are split by a reshape to (B, N, T, H), without moving them before the tokens",
        {"split_heads": instead(_split_by_a_reshape)},
        fix="reshape to (B, T, N, H), then swap the middle axes",
    )
    yield combined(
        "heads-combined-innermost",
        "the heads are combined as (H, N) instead of (N, H)",
        {"combine_heads": instead(_combined_innermost)},
        fix="combine heads outermost: move N after T, then reshape to (B, T, N * H)",
    )
    yield combined(
        "heads-not-moved-back",
        "heads are combined by a reshape, without moving them after the tokens",
        {"combine_heads": instead(_combined_by_a_reshape)},
        fix="swap the middle axes, then reshape to (B, T, N * H)",
    )


def _split_innermost(x: np.ndarray, num_heads: int) -> np.ndarray:
    """Return (B, T, H * N) as (B, N, T, H)."""
    return x.reshape(*x.shape[:2], -1, num_heads).transpose(0, 3, 1, 2)


def _split_by_a_reshape(x: np.ndarray, num_heads: int) -> np.ndarray:
    """Return the width of tokens, (B, T, N * H), in the shape (B, N, T, H)."""
    return x.reshape(x.shape[0], num_heads, x.shape[1], -1)


def _combined_innermost(x: np.ndarray) -> np.ndarray:
    """Return (B, N, T, H) as (B, T, H * N)."""
    return x.transpose(0, 2, 3, 1).reshape(x.shape[0], x.shape[2], -1)


def _combined_by_a_reshape(x: np.ndarray) -> np.ndarray:
    """Return heads, (B, N, T, H), in the shape (B, T, N * H)."""
    return x.reshape(x.shape[0], x.shape[2], -1)


def padded(case: Case) -> Iterator[Edit]:
    """Values narrower than keys are padded for a kernel of one width, and cut too late."""
    spec = case.spec
    if spec.value_head_dim < spec.head_dim and spec.num_heads > 1:
        yield known_bug(
            "value-padding-combined",
            "values are padded to head_dim, but the context is cut to value_head_dim after its "
            "heads are combined",
            {"combine_heads": partial(_cut_after_combining, spec.head_dim)},
            fix="cut each head of the context to value_head_dim, then combine the heads",
            page="value-head-dim",
            stages=("output",),
        )


def _cut_after_combining(head_dim: int, _: Layer, original: Override, x: np.ndarray) -> np.ndarray:
    num_heads, features = x.shape[1], x.shape[3]
    padded = np.pad(x, [(0, 0)] * 3 + [(0, head_dim - features)])
    return original(padded)[..., : num_heads * features]


def reordered(case: Case) -> Iterator[Edit]:
    spec = case.spec
    if spec.num_heads == 1:
        return
    for name, count in (("q", spec.num_heads), ("k", spec.num_kv_heads), ("v", spec.num_kv_heads)):
        for wrong in HEAD_ORDERS:
            if count >= wrong.fewest:
                yield _reordered(name, wrong.word, wrong.word, wrong.order(count))


def permuted_heads(expected: Values, observed: Values) -> list[Edit]:
    """Return the heads of q, k or v in their observed order, if it differs from the expected one.

    Args:
        expected, observed: stages by name; with a cache, the first step decides.
    """
    bugs = []
    for name in "qkv":
        stage = name
        if stage not in observed:
            stage = f"step0.{name}"
        if stage not in observed:
            continue
        num_heads = expected[stage].shape[1]
        if num_heads < 3:  # with two heads the other order is a known bug
            continue
        order = _nearest_heads(expected[stage], observed[stage])
        original_order = np.arange(num_heads)
        known_orders = [original_order, *(wrong.order(num_heads) for wrong in HEAD_ORDERS)]
        is_known = any(np.array_equal(order, known) for known in known_orders)
        if len(set(order)) == num_heads and not is_known:
            bugs.append(permuted(name, order))
    return bugs


def _nearest_heads(expected: np.ndarray, observed: np.ndarray) -> np.ndarray:
    """Return the index of the nearest expected head for each observed one, (B, N, T, H)."""
    expected_heads = expected.astype(np.float64).swapaxes(0, 1)
    observed_heads = observed.astype(np.float64).swapaxes(0, 1)
    order = []
    for head in observed_heads:
        distances = ((expected_heads - head) ** 2).sum(axis=(1, 2, 3))
        order.append(int(distances.argmin()))
    return np.array(order)


def permuted(name: str, order: np.ndarray) -> Edit:
    """Return the heads of q, k or v in any order."""
    return _reordered(name, "permuted", f"in the order {' '.join(map(str, order))}", order)


def _reordered(name: str, word: str, about: str, order: np.ndarray) -> Edit:
    stages = (name,)
    if name == "q":
        stages = ("q", "k")
    return HEAD_ORDER.shown_in(*stages)(
        f"{name}-heads-{word}",
        f"{name}'s heads are {about}",
        projected(partial(_in_order, name, order)),
        fix=f"keep the heads of {name} in the order of the weights",
    )


def _in_order(name: str, order: np.ndarray, heads: Values) -> dict[str, np.ndarray]:
    return {name: heads[name][:, order]}

"""Bugs in the split, sharing, order and combination of heads."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from parity.explain.diagnosis.bugs.families import GROUPED, HEAD_ORDER
from parity.explain.diagnosis.bugs.record import Edit, Override, instead, known_bug
from parity.explain.diagnosis.bugs.sites import projected
from parity.measure.core.case import Case
from parity.measure.core.stages import Values


def shared(case: Case) -> Iterator[Edit]:
    num_heads, num_kv_heads = case.spec.num_heads, case.spec.num_kv_heads
    if 1 < num_kv_heads < num_heads:
        yield GROUPED.seen_in("scores")(
            "kv-heads-tiled",
            "key/value heads are tiled (0 1 0 1) instead of repeated (0 0 1 1)",
            {"per_query_head": instead(lambda x: x[:, np.arange(num_heads) % num_kv_heads])},
        )


def split_or_combined(case: Case) -> Iterator[Edit]:
    if case.spec.num_heads == 1:
        return
    split, combined = HEAD_ORDER.seen_in("q", "k"), HEAD_ORDER.seen_in("output")
    yield split(
        "heads-innermost",
        "the width is split into (H, N) instead of (N, H)",
        {"split_heads": instead(lambda x, n: x.reshape(*x.shape[:2], -1, n).transpose(0, 3, 1, 2))},
        fix="split heads outermost: reshape to (B, T, N, H), then move N before T",
    )
    yield split(
        "heads-not-moved",
        "heads are split by a reshape to (B, N, T, H), without moving them before the tokens",
        {"split_heads": instead(lambda x, n: x.reshape(x.shape[0], n, x.shape[1], -1))},
        fix="reshape to (B, T, N, H), then swap the middle axes",
    )
    yield combined(
        "heads-combined-innermost",
        "the heads are combined as (H, N) instead of (N, H)",
        {
            "combine_heads": instead(
                lambda x: x.transpose(0, 2, 3, 1).reshape(x.shape[0], x.shape[2], -1)
            )
        },
        fix="combine heads outermost: move N after T, then reshape to (B, T, N * H)",
    )
    yield combined(
        "heads-not-moved-back",
        "heads are combined by a reshape, without moving them after the tokens",
        {"combine_heads": instead(lambda x: x.reshape(x.shape[0], x.shape[2], -1))},
        fix="swap the middle axes, then reshape to (B, T, N * H)",
    )


def padded(case: Case) -> Iterator[Edit]:
    """Values narrower than keys are padded for a kernel of one width, and cut too late."""
    spec = case.spec
    features, missing = spec.value_head_dim, spec.head_dim - spec.value_head_dim

    def combine_heads(_: object, original: Override, x: np.ndarray) -> np.ndarray:
        wide = np.pad(x, [(0, 0)] * 3 + [(0, missing)])
        return original(wide)[..., : x.shape[1] * features]

    if missing > 0 and spec.num_heads > 1:
        yield known_bug(
            "value-padding-combined",
            "values are padded to head_dim, but the context is cut to value_head_dim after its "
            "heads are combined",
            {"combine_heads": combine_heads},
            fix="cut each head of the context to value_head_dim, then combine the heads",
            page="value-head-dim",
            stages=("output",),
        )


def reordered(case: Case) -> Iterator[Edit]:
    spec = case.spec
    if spec.num_heads == 1:
        return
    for name, count in (("q", spec.num_heads), ("k", spec.num_kv_heads), ("v", spec.num_kv_heads)):
        heads = np.arange(count)
        if count > 1:
            yield _reordered(name, "reversed", "reversed", heads[::-1])
        if count > 2:  # with two heads it equals reversed
            yield _reordered(name, "rolled", "rolled", np.roll(heads, 1))


def permuted_heads(expected: Values, observed: Values) -> list[Edit]:
    """Return the heads of q, k or v in their observed order, if they are in another order.

    Args:
        expected, observed: stages by name; with a cache, the first step decides.
    """
    found = []
    for name in "qkv":
        stage = next((stage for stage in (name, f"step0.{name}") if stage in observed), None)
        if (
            stage is None or expected[stage].shape[1] < 3
        ):  # with two heads the other order is a known bug
            continue
        right, seen = (
            values[stage].astype(np.float64).swapaxes(0, 1) for values in (expected, observed)
        )
        order = np.array([int(((right - head) ** 2).sum(axis=(1, 2, 3)).argmin()) for head in seen])
        known = (
            np.arange(len(order)),
            np.arange(len(order))[::-1],
            np.roll(np.arange(len(order)), 1),
        )
        if len(set(order)) == len(order) and not any(np.array_equal(order, each) for each in known):
            found.append(permuted(name, order))
    return found


def permuted(name: str, order: np.ndarray) -> Edit:
    """Return the heads of q, k or v in any order."""
    return _reordered(name, "permuted", f"in the order {' '.join(map(str, order))}", order)


def _reordered(name: str, word: str, about: str, order: np.ndarray) -> Edit:
    stages = ("q", "k") if name == "q" else (name,)
    return HEAD_ORDER.seen_in(*stages)(
        f"{name}-heads-{word}",
        f"{name}'s heads are {about}",
        projected(lambda heads: {name: heads[name][:, order]}),
        fix=f"keep the heads of {name} in the order of the weights",
    )

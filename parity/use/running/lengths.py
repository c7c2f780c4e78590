"""Features of a layer that a run on short sequences does not exercise."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from mha_spec import (
    AttentionSpec,
    DynamicScaling,
    GridBias,
    InputError,
    LongRopeScaling,
    RelativeBias,
    RelativeProducts,
)
from parity.measure.core.compare import unit_of_rounding
from parity.measure.core.records import JsonRecord

SCORES = 24
"""Arrays of scores in float64 that a comparison of all stages has in memory at its peak; measured
with 1024 tokens.
"""

GIB = 1 << 30
"""Bytes of a GiB."""


def gib_of(spec: AttentionSpec, num_tokens: int, batch: int = 2) -> float:
    """Return roughly how much memory a comparison of a layer needs, in GiB; its scores dominate."""
    # A float64 has 8 bytes.
    return SCORES * 8.0 * batch * spec.num_heads * num_tokens**2 / GIB


def check_memory(spec: AttentionSpec, num_tokens: int) -> None:
    """Reject a number of tokens whose scores exceed the memory of this machine.

    Raises:
        ValueError: if they do.
    """
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    except (AttributeError, OSError, ValueError):  # unknown on this system
        return
    needed = gib_of(spec, num_tokens)
    if needed > memory:
        rule = f"be small enough for {memory:.0f} GiB of memory"
        raise InputError("seq_len", rule, f"{num_tokens}, which needs about {needed:.0f} GiB")


@dataclass(frozen=True)
class NotExercised(JsonRecord):
    """A feature of layers that a run could not have shown to be right or wrong.

    Attributes:
        what: the feature in words.
        num_tokens: number of tokens of the run.
        needed: smallest number of tokens that exercises it.
        gib: rough memory of a run with that many, in GiB.
        layers: names of the layers.
    """

    what: str
    num_tokens: int
    needed: int
    gib: float
    layers: list[str] = field(default_factory=list, compare=False)


def not_exercised(
    specs: Iterable[tuple[str, AttentionSpec]], num_tokens: int, dtypes: Iterable[str]
) -> list[NotExercised]:
    """Return the features of layers that sequences of a length cannot show, each once with its
    layers.

    Args:
        specs: name and specification of each layer that ran.
        num_tokens: number of tokens of the run, from position 0.
        dtypes: names of the dtypes of the run.
    """
    # The finest dtype of the run shows the most.
    rounding = min(map(unit_of_rounding, dtypes))
    # Equal features of several layers are one, because their layers do not count.
    features: dict[NotExercised, NotExercised] = {}
    for name, spec in specs:
        for what, needed in _lengths(spec, rounding):
            if num_tokens < needed:
                feature = NotExercised(what, num_tokens, needed, round(gib_of(spec, needed), 2))
                features.setdefault(feature, feature).layers.append(name)
    return list(features.values())


def _lengths(spec: AttentionSpec, rounding: float) -> Iterator[tuple[str, int]]:
    """Yield the features that depend on the length, and the smallest number of tokens that
    exercises each.
    """
    if spec.window_size is not None:
        yield f"a window of {spec.window_size}", spec.window_size + 1
    if spec.chunk_size is not None:
        yield f"chunks of {spec.chunk_size}", spec.chunk_size + 1
    if spec.temperature is not None:
        # The factor is 1 until the position + first_position reaches the length.
        first = max(0, spec.temperature.length - spec.temperature.first_position)
        yield f"a temperature that grows every {spec.temperature.length} tokens", first + 1
    bias = spec.relative_bias
    if isinstance(bias, RelativeBias):
        yield f"all {bias.num_buckets} relative biases", _length_of_all_buckets(bias.buckets())
    if isinstance(bias, GridBias):
        yield f"all offsets on a grid of {bias.height} x {bias.width}", bias.num_tokens
    products = spec.relative_products
    if isinstance(products, RelativeProducts):
        needed = _length_of_all_buckets(products.buckets())
        yield f"all {products.num_buckets} relative vectors", needed
    yield from _lengths_of_rope(spec, rounding)


def _length_of_all_buckets(buckets: np.ndarray) -> int:
    """Return the number of tokens with which all buckets occur.

    Args:
        buckets: bucket of each distance from -farthest to farthest.
    """
    farthest = len(buckets) // 2
    distances = np.abs(np.arange(-farthest, farthest + 1))
    nearest = [distances[buckets == bucket].min() for bucket in np.unique(buckets)]
    return int(max(nearest)) + 1


def _lengths_of_rope(spec: AttentionSpec, rounding: float) -> Iterator[tuple[str, int]]:
    """Yield the scaling of RoPE, if it has an effect only from some number of tokens on."""
    if spec.rope is None or spec.rope.scaling is None:
        return
    scaling = spec.rope.scaling
    if isinstance(scaling, LongRopeScaling):
        if scaling.long_factors != scaling.short_factors:
            yield "the long factors of LongRoPE", scaling.original_length + 1
        return
    if isinstance(scaling, DynamicScaling):
        what = f"dynamic scaling of RoPE beyond {scaling.original_length} tokens"
        yield what, scaling.original_length + 1
        return
    scaled = spec.rope.frequencies(spec.head_dim)
    unscaled = replace(spec.rope, scaling=None).frequencies(spec.head_dim)
    change = np.abs(scaled - unscaled).max()
    if change > 0.0:
        # With fewer tokens no angle changes by a unit of rounding. More may be needed: this is only
        # what is certain.
        yield f"the {scaling.kind} scaling of RoPE", int(np.ceil(rounding / change)) + 1

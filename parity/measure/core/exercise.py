"""Features of a layer that short sequences do not exercise, and cases that exercise them.

Some features of a layer show only in a sequence that is long enough, such as a window, or only at
positions that are far enough from 0, such as the long factors of LongRoPE. Few tokens far from 0
cost no more than few tokens at 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from mha_spec import (
    AttentionSpec,
    DynamicScaling,
    GridBias,
    LongRopeScaling,
    RelativeBias,
    RelativeProducts,
)
from parity.measure.core.case import Case
from parity.measure.core.compare import unit_of_rounding
from parity.measure.text import and_listed

MOST_SCORES = 1_200_000
"""The most scores of a sequence in all heads for which a longer case is chosen: it takes a few
seconds. 64 heads with a window of 128, as in gpt-oss, need 1.1 million.
"""

MORE_TOKENS = 4
"""Tokens of a longer case beyond the smallest number, so that not only its last token differs."""

CALLS = (6, 1, 1, 3)
"""Tokens of the calls that are chosen for a layer: a prompt, two steps, and a call of several
tokens, which a cache that is full must serve as well.
"""


@dataclass(frozen=True)
class Feature:
    """A feature of a layer that needs a long sequence, or a far position.

    Attributes:
        what: the feature in words.
        needed: the smallest number of tokens from position 0 that exercises it.
        is_by_position: True if tokens up to position `needed - 1` exercise it, however few.
    """

    what: str
    needed: int
    is_by_position: bool = False

    @property
    def words(self) -> str:
        """The feature, and what it needs."""
        if self.is_by_position:
            return f"{self.what}, from position {self.needed - 1} on"
        return f"{self.what}, with at least {self.needed} tokens"

    def is_exercised_by(self, case: Case) -> bool:
        """Return True if a case exercises it."""
        if self.is_by_position:
            return _num_positions(case) >= self.needed
        return _num_tokens(case) >= self.needed


def features_of(spec: AttentionSpec, dtypes: Iterable[str]) -> list[Feature]:
    """Return the features of a layer that need a long sequence or a far position.

    Args:
        spec: the layer.
        dtypes: dtypes, of which the finest shows the most.
    """
    return list(_features(spec, min(map(unit_of_rounding, dtypes))))


def not_exercised_by(case: Case, dtype: str) -> list[Feature]:
    """Return the features of its layer that a case cannot show to be wrong in a dtype."""
    features = features_of(case.spec, [dtype])
    if case.window_size is not None:
        features.append(Feature(f"a window of {case.window_size}", case.window_size + 1))
    return [feature for feature in features if not feature.is_exercised_by(case)]


# ---- Cases ---------------------------------------------------------------------------------------


def exercising_case(spec: AttentionSpec, dtype: str) -> Case:
    """Return a case whose lengths, calls and positions exercise a layer.

    It has a cache, and is long enough for a window, chunks and all relative biases, unless they
    need more than `MOST_SCORES` scores. Its second call passes the farthest position from which on
    a feature of RoPE or a temperature acts. `about` has the choice in words. Cross-attention, and a
    grid of biases, have no cache.

    Args:
        spec: the layer.
        dtype: dtype of the problem.
    """
    name = "exercising"
    bias = spec.relative_bias
    if isinstance(bias, GridBias):
        return Case(name, spec, "all tokens of the grid of biases", seq_len=bias.num_tokens)
    if spec.d_kv != spec.d_in:
        return Case(name, spec, "queries and keys of other sequences", seq_len=6, seq_len_k=9)
    num_tokens = sum(CALLS)
    case = Case(name, spec, "", seq_len=num_tokens, chunks=CALLS, capacity=num_tokens + 1)
    missing = not_exercised_by(case, dtype)
    longer = longer_case(case, missing)
    if longer is not None:
        case = longer
    farther = _farther(case, missing)
    if farther:
        # All nearer positions are passed as well.
        case = farther[-1]
    calls = and_listed([str(chunk) for chunk in case.chunks])
    about = f"calls of {calls} tokens from position {case.first_position} on"
    features = features_of(spec, [dtype])
    exercised = [feature.what for feature in features if feature.is_exercised_by(case)]
    if exercised:
        about += f", for {and_listed(exercised)}"
    return replace(case, name=name, about=about)


def longer_case(case: Case, missing: Iterable[Feature]) -> Case | None:
    """Return a case with enough tokens for as many features as a few seconds allow; None if they
    allow none.

    Args:
        case: a case without masks, lengths and positions of its own.
        missing: features that it does not exercise, of `not_exercised_by`.
    """
    needed = 0
    names = []
    for feature in missing:
        num_scores = case.spec.num_heads * (feature.needed + MORE_TOKENS) ** 2
        if not feature.is_by_position and num_scores <= MOST_SCORES:
            needed = max(needed, feature.needed)
            names.append(feature.what)
    if not needed or case.seq_len_k is not None or isinstance(case.spec.relative_bias, GridBias):
        return None
    num_tokens = needed + MORE_TOKENS
    more = num_tokens - case.seq_len
    chunks = case.chunks
    if chunks:
        chunks = (chunks[0] + more, *chunks[1:])
    return replace(
        case,
        name=f"{case.name}-{num_tokens}-tokens",
        about=f"{num_tokens} tokens, for {and_listed(names)}",
        seq_len=num_tokens,
        chunks=chunks,
        capacity=case.capacity + more if chunks else 0,
    )


def more_cases(case: Case, dtypes: Iterable[str], *, with_more_tokens: bool = True) -> list[Case]:
    """Return further cases of the same kind, which exercise what a case does not.

    Args:
        case: a case without masks, lengths and positions of its own.
        dtypes: dtypes of the run.
        with_more_tokens: False if the number of tokens is fixed.
    """
    features = features_of(case.spec, dtypes)
    missing = [feature for feature in features if not feature.is_exercised_by(case)]
    cases = _farther(case, missing)
    longer = None
    if with_more_tokens:
        longer = longer_case(case, missing)
    if longer is not None:
        cases.append(longer)
    return cases


def _farther(case: Case, missing: Iterable[Feature]) -> list[Case]:
    """Return a case for each position from which on features act, the nearest first. Its tokens
    begin before that position, and pass it after the first call, or in the middle.
    """
    names_by_position: dict[int, list[str]] = {}
    for feature in missing:
        if feature.is_by_position:
            names_by_position.setdefault(feature.needed - 1, []).append(feature.what)
    num_before = case.chunks[0] if case.chunks else case.seq_len // 2
    cases = []
    for position in sorted(names_by_position):
        first = max(0, position - num_before)
        cases.append(
            replace(
                case,
                name=f"{case.name}-from-{first}",
                about=f"from position {first} on, for {and_listed(names_by_position[position])}",
                first_position=first,
            )
        )
    return cases


# ---- How far a case reaches ----------------------------------------------------------------------


def _num_tokens(case: Case) -> int:
    """Return the number of real tokens of the longest sequence."""
    if case.is_cached:
        last = len(case.chunks) - 1
        return int(np.add(case.lengths_before(last), case.added(last)).max())
    if case.key_padding_lengths is not None:
        return max(case.key_padding_lengths)
    if case.segment_ids is not None:
        # A token attends to its own segment alone.
        return int(case.positions().max()) - case.first_position + 1
    return case.key_len


def _num_positions(case: Case) -> int:
    """Return one more than the farthest position."""
    if case.position_ids is not None:
        return int(case.position_ids.max()) + 1
    return case.first_position + _num_tokens(case)


# ---- Features ------------------------------------------------------------------------------------


def _features(spec: AttentionSpec, rounding: float) -> Iterator[Feature]:
    """Yield the features that depend on the length or the position."""
    if spec.window_size is not None:
        yield Feature(f"a window of {spec.window_size}", spec.window_size + 1)
    if spec.chunk_size is not None:
        yield Feature(f"chunks of {spec.chunk_size}", spec.chunk_size + 1)
    if spec.temperature is not None:
        # The factor is 1 until the position + first_position reaches the length.
        first = max(0, spec.temperature.length - spec.temperature.first_position)
        what = f"a temperature that grows every {spec.temperature.length} tokens"
        yield Feature(what, first + 1, is_by_position=True)
    bias = spec.relative_bias
    if isinstance(bias, RelativeBias):
        needed = _length_of_all_buckets(bias.buckets())
        yield Feature(f"all {bias.num_buckets} relative biases", needed)
    if isinstance(bias, GridBias):
        what = f"all offsets on a grid of {bias.height} x {bias.width}"
        yield Feature(what, bias.num_tokens)
    products = spec.relative_products
    if isinstance(products, RelativeProducts):
        needed = _length_of_all_buckets(products.buckets())
        yield Feature(f"all {products.num_buckets} relative vectors", needed)
    yield from _features_of_rope(spec, rounding)


def _length_of_all_buckets(buckets: np.ndarray) -> int:
    """Return the number of tokens with which all buckets occur.

    Args:
        buckets: bucket of each distance from -farthest to farthest.
    """
    farthest = len(buckets) // 2
    distances = np.abs(np.arange(-farthest, farthest + 1))
    nearest = [distances[buckets == bucket].min() for bucket in np.unique(buckets)]
    return int(max(nearest)) + 1


def _features_of_rope(spec: AttentionSpec, rounding: float) -> Iterator[Feature]:
    """Yield the scaling of RoPE, if it has an effect only from some number of tokens on."""
    if spec.rope is None or spec.rope.scaling is None:
        return
    scaling = spec.rope.scaling
    if isinstance(scaling, LongRopeScaling):
        if scaling.long_factors != scaling.short_factors:
            what = "the long factors of LongRoPE"
            yield Feature(what, scaling.original_length + 1, is_by_position=True)
        return
    if isinstance(scaling, DynamicScaling):
        what = f"dynamic scaling of RoPE beyond {scaling.original_length} tokens"
        yield Feature(what, scaling.original_length + 1, is_by_position=True)
        return
    scaled = spec.rope.frequencies(spec.head_dim)
    unscaled = replace(spec.rope, scaling=None).frequencies(spec.head_dim)
    change = np.abs(scaled - unscaled).max()
    if change > 0.0:
        # With fewer tokens no angle changes by a unit of rounding. More may be needed: this is only
        # what is certain. A far position changes no distance, so it does not help the scores.
        yield Feature(f"the {scaling.kind} scaling of RoPE", int(np.ceil(rounding / change)) + 1)

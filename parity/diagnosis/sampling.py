"""Samples of a large problem: small ones in which its mistakes show as they do in all of it.

A mistake is tried in a sample, which takes the same time whatever the size of the layer, and confirmed in another one.
There are two kinds. The first tokens of a causal layer are a small layer by themselves: what comes later does not reach
them. And some rows of queries, with all keys, are computed as they are in the whole. Of the output some features are
enough.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mha_spec import DynamicScaling, LongRopeScaling
from parity.core.problem import Problem
from parity.core.reference import Remembered
from parity.core.sample import Sample
from parity.core.stages import STAGES, stage_named
from parity.diagnosis.readings import orders

LARGE = 2**25
"""Multiplications of a layer above which a sample is searched: below, all of it takes some hundredths of a second."""

TOKENS, ROWS, FEATURES = 32, 4, 128
"""The first tokens in a sample of them, of all sequences together; the rows in one of rows; the features of both."""

CONFIRMED = 4
"""How many times as many tokens a sample has that confirms what was found."""

AFFORDABLE = 2**34
"""Multiplications that a sample may take beyond the projections of the right layer: a second, about."""


@dataclass(frozen=True)
class Part:
    """A sample of a problem, and of what was observed of it.

    Attributes:
        problem: the sampled problem.
        observed: the stages of the sample; those whose axes are not understood are left out.
        remembered: projections that are known already.
        words: what is in it.
        judged: the stages that it can judge; all when absent.
    """

    problem: Problem
    observed: dict[str, np.ndarray]
    remembered: Remembered
    words: str
    judged: frozenset[str] | None = None


OF_TOKENS = frozenset({"q", "k", "v", "gate", "latents"})
"""The stages that are made of each token by itself."""

OF_PAIRS = OF_TOKENS | {"mask", "scores"}
"""The stages that are made of each query and each key by itself."""


def multiplications(problem: Problem) -> int:
    """Those of the whole layer, about."""
    case, spec = problem.case, problem.spec
    queries = case.seq_len * (spec.d_in * spec.q_width + spec.context_width * spec.output_width)
    keys = case.key_len * spec.d_kv * (spec.k_width + spec.v_width)
    products = spec.num_heads * case.seq_len * case.key_len * (spec.head_dim + spec.value_head_dim)
    return case.batch * (queries + keys + products)


def is_large(problem: Problem) -> bool:
    """Whether samples are searched and not the whole layer; one with a cache has no samples."""
    return not problem.case.is_cached and problem.sample is None and multiplications(problem) > LARGE


def parts(
    problem: Problem, observed: Mapping[str, np.ndarray], remembered: Remembered, worst: Mapping[str, int] | None = None
) -> Iterator[Part]:
    """Samples to search, the cheaper first.

    Args:
        problem: the whole problem.
        observed: its stages.
        remembered: projections of its inputs, which samples of rows share.
        worst: a row "T", a feature "E" that a sample must have.
    """
    case, worst = problem.case, worst or {}
    tokens = max(TOKENS // case.batch, 8)
    features = _features(problem, 0, worst.get("E"))
    if tokens < case.seq_len and not is_by_length(problem) and (is_causal(problem) or OF_TOKENS & observed.keys()):
        yield _of_tokens(problem, observed, remembered, tokens, np.arange(tokens), features)
    yield _of_rows(problem, observed, remembered, _rows(case.seq_len, ROWS, worst.get("T")), features)


def confirming(problem: Problem, observed: Mapping[str, np.ndarray], remembered: Remembered) -> list[Part]:
    """Independent samples, of other features, each of which may confirm what was found in the others.

    Rows from everywhere, if their keys do not take too long; and more of the first tokens of a causal layer.
    """
    case, spec = problem.case, problem.spec
    features = _features(problem, 1, None)
    of_keys = case.batch * case.key_len * spec.d_kv * max(spec.k_width, spec.v_width)
    tokens, found = CONFIRMED * max(TOKENS // case.batch, 8), []
    is_alone = is_causal(problem) and not is_by_length(problem) and tokens < case.seq_len
    if not is_alone or of_keys <= AFFORDABLE:
        rows = _rows(case.seq_len, 2 * ROWS + 1, None)[1:]
        found.append(_of_rows(problem, observed, remembered, rows, features))
    if is_alone:
        found.append(_of_tokens(problem, observed, remembered, tokens, np.arange(tokens), features))
    return found


def mixing(problem: Problem, observed: Mapping[str, np.ndarray], remembered: Remembered) -> Part | None:
    """A sample for mistakes that take other rows into each: all queries of a causal layer, and its first keys.

    In the first rows a softmax over the queries takes all of them, and each key that they see is there. In the first
    rows of a context whose heads were not moved back there are the first tokens of its first head.
    """
    case, heads = problem.case, problem.spec.num_heads
    first, features = max(TOKENS, heads), _features(problem, 0, None)
    if is_by_length(problem) or first >= case.seq_len:
        return None
    rows_out = np.arange(first // heads)
    if is_causal(problem):
        sample = Sample(np.arange(case.seq_len), features, first, first, rows_out)
    else:
        sample = Sample(np.arange(first), features, None, None, rows_out)
    part = replace(problem, sample=sample)
    judged = frozenset({"attn_weights"} if "attn_weights" in observed and is_causal(problem) else {"output"})
    words = f"the first {first} of {case.seq_len} keys"
    return Part(part, _cut(problem, part, observed), remembered, words, judged | {"output"})


def complete(problem: Problem, observed: Mapping[str, np.ndarray], remembered: Remembered) -> Part | None:
    """The first tokens as a small problem, with every row and feature; None of a layer that is not causal."""
    tokens = max(TOKENS // problem.case.batch, 8)
    if not is_causal(problem) or is_by_length(problem) or tokens >= problem.case.seq_len:
        return None
    part = _of_tokens(problem, observed, remembered, tokens, np.arange(tokens), np.arange(problem.spec.output_width))
    return replace(part, problem=replace(part.problem, sample=None))


def is_causal(problem: Problem) -> bool:
    """Whether the first tokens of a layer attend to nothing that comes later."""
    return problem.case.seq_len_k is None and (problem.case.is_causal or problem.case.window_size is not None)


def is_by_length(problem: Problem) -> bool:
    """Whether the first tokens of a layer are others in a longer sequence, or there are several sequences of keys."""
    scaling = None if problem.spec.rope is None else problem.spec.rope.scaling
    is_stretched = isinstance(scaling, (DynamicScaling, LongRopeScaling))
    return is_stretched or problem.case.seq_len_k is not None or problem.case.not_finite is not None


def _features(problem: Problem, turn: int, worst: int | None) -> np.ndarray:
    """Some features of the output: the first ones, or those after them, and the worst."""
    width = problem.spec.output_width
    found = np.arange(min(FEATURES, width)) + turn * min(FEATURES, max(width - FEATURES, 0))
    return found if worst is None else np.union1d(found, [worst])


def _rows(seq_len: int, count: int, worst: int | None) -> np.ndarray:
    """Some rows of so many, evenly, the first and the last among them, and the worst."""
    found = np.unique(np.linspace(min(1, seq_len - 1), seq_len - 1, count, dtype=int))
    return found if worst is None else np.union1d(found, [worst])


def _of_rows(
    problem: Problem,
    observed: Mapping[str, np.ndarray],
    remembered: Remembered,
    rows: np.ndarray,
    features: np.ndarray,
) -> Part:
    part = replace(problem, sample=Sample(rows, features))
    words = f"{len(rows)} of {problem.case.seq_len} query tokens"
    cut = _cut(problem, part, observed)
    by_tokens = not is_by_length(problem) and OF_TOKENS & observed.keys()  # which the first tokens judge
    return Part(part, cut, remembered, words, frozenset(cut.keys() - OF_TOKENS) if by_tokens else None)


def _of_tokens(
    problem: Problem,
    observed: Mapping[str, np.ndarray],
    remembered: Remembered,
    tokens: int,
    rows: np.ndarray,
    features: np.ndarray,
) -> Part:
    case, first = problem.case, slice(tokens)
    inputs = {"query": np.ascontiguousarray(problem.inputs["query"][:, first])}
    inputs |= {name: problem.inputs[name][:, :, first, first] for name in ("bias", "mask") if name in problem.inputs}
    part = Problem(
        case.first_tokens(tokens),
        problem.dtype,
        problem.weights,
        inputs,
        Sample(rows, features),
    )
    cut = _cut(problem, part, observed)
    words = f"the first {tokens} of {case.seq_len} tokens"
    judged = None if is_causal(problem) else OF_PAIRS
    return Part(part, cut, Remembered(remembered, tokens), words, judged)


# ---- What was observed of it -----------------------------------------------------------------------------------------


def _cut(problem: Problem, part: Problem, observed: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The stages of a sample, in whatever order of axes they were recorded."""
    found, sample = {}, part.sample
    for name, x in observed.items():
        stage = stage_named(name)
        if sample is None or stage.kind not in STAGES or stage.is_gradient:
            continue
        if axes := _axes_of(problem, name, x.shape):
            keys = np.arange(part.case.key_len)[: sample.keys]
            picked = {"T": sample.rows_of(stage.quantity), "S": keys, "E": sample.features}
            found[name] = _taken(x, axes, picked)
    return found


def in_order(problem: Problem, name: str, x: np.ndarray) -> np.ndarray:
    """A stage with the reference's axes in their order; as it is where its shape fits in no way."""
    stage = stage_named(name)
    if stage.kind not in STAGES or stage.is_gradient:
        return x
    flat = [part for group in _axes_of(problem, name, x.shape) for part in group]
    letters = [letter for letter, _ in flat]
    if not {*STAGES[stage.kind]} - {"B"} <= {*letters}:  # averaged over heads, or the same for all of them
        return x
    split = x.reshape([size for _, size in flat])
    found = split.transpose([letters.index(letter) for letter in STAGES[stage.kind] if letter in letters])
    return found if "B" in letters or "B" not in STAGES[stage.kind] else found[None]


def _taken(x: np.ndarray, axes: Sequence[tuple[tuple[str, int], ...]], picked: Mapping[str, np.ndarray]) -> np.ndarray:
    """An array with what was picked of some axes, each of which is one or several in a row."""
    split = x.reshape([size for group in axes for _, size in group])
    flat = [letter for group in axes for letter, _ in group]
    for axis, letter in enumerate(flat):
        if letter in picked and split.shape[axis] > 1:
            split = split.take(picked[letter], axis=axis)
    sizes = iter(split.shape)
    return split.reshape([math.prod(next(sizes) for _ in group) for group in axes])


def _axes_of(problem: Problem, name: str, shape: tuple[int, ...]) -> list[tuple[tuple[str, int], ...]]:
    """Which letters of a stage each axis of an array holds, and their sizes; nothing if its shape fits in no way."""
    case, spec, stage = problem.case, problem.spec, stage_named(name)
    sizes = {"B": case.batch, "N": spec.num_heads, "K": spec.num_kv_heads, "T": case.seq_len, "S": case.key_len}
    sizes |= {"E": spec.output_width}
    sizes["H"] = spec.value_head_dim if stage.quantity in ("v", "context") else spec.head_dim
    letters = STAGES[stage.kind]
    of_heads = [{}, {"K": spec.num_heads}] if "K" in letters else [{}]
    columns = [{}, {"S": case.key_len + 1}] if spec.sinks and stage.kind in ("scores", "attn_weights") else [{}]
    for other, wider in itertools.product(of_heads, columns):
        known = {**sizes, **other, **wider}
        for groups in _groups(letters, may_lack=stage.is_exact or stage.is_attn_weights or case.batch == 1):
            if len(groups) == len(shape) and all(
                _fits(group, size, known, may_be_one=stage.is_exact) for group, size in zip(groups, shape, strict=True)
            ):
                return [
                    tuple((letter, known.get(letter, size) if size > 1 or len(group) > 1 else 1) for letter in group)
                    for group, size in zip(groups, shape, strict=True)
                ]
    return []


def _fits(group: tuple[str, ...], size: int, sizes: Mapping[str, int], *, may_be_one: bool) -> bool:
    """Whether an axis of that size holds the letters; the size of a letter that is not known is any."""
    if len(group) == 1 and (group[0] not in sizes or (may_be_one and size == 1)):
        return True
    return all(letter in sizes for letter in group) and math.prod(sizes[letter] for letter in group) == size


def _groups(letters: tuple[str, ...], *, may_lack: bool) -> Iterator[tuple[tuple[str, ...], ...]]:
    """Letters in every order, the more usual first, each alone, or two neighbors as one, or some left out."""
    for order in orders(letters):
        yield tuple((letters[axis],) for axis in order)
    for order in orders(letters):
        named = tuple((letters[axis],) for axis in order)
        for first in range(len(named) - 1):
            yield (*named[:first], named[first] + named[first + 1], *named[first + 2 :])
    if may_lack:
        for count in range(len(letters) - 1, 0, -1):
            for kept in sorted(itertools.combinations(range(len(letters)), count), reverse=True):
                yield tuple((letters[axis],) for axis in kept)

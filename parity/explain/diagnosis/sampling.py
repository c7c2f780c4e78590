"""Samples of a large problem: small problems that show its bugs as the whole layer does.

A bug is tried in a sample, which takes the same time at every size of the layer, and confirmed in
another one. Samples have tokens at which the observed stages differ most, because a bug may not
show elsewhere: RoPE's scaling, for example, only far from the first token. There are three kinds.
Single tokens show errors of q, k, v and the gate, in which tokens do not depend on each other. Some
rows of queries, with all keys, have the same values as in the whole layer. The first tokens of a
causal layer are a small layer by themselves. A few output features are enough.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mha_spec import DynamicScaling, LongRopeScaling
from parity.explain.diagnosis.changed_layer import ChangedLayer
from parity.explain.diagnosis.readings import orders
from parity.explain.diagnosis.remembered import Remembered
from parity.explain.diagnosis.sample import Sample, SampledProblem, rows_of_query, sample_of
from parity.explain.diagnosis.whole import WholeStages
from parity.explain.diagnosis.work import CountedArithmetic, uncounted
from parity.measure.core.problem import Problem
from parity.measure.core.reference import BLOCK
from parity.measure.core.stages import STAGES, stage_named

LARGE = 2**25
"""Multiplications of a layer above which samples are searched: below, the whole layer takes a few
hundredths of a second.
"""

TOKENS, ROWS, FEATURES = 32, 4, 128
"""The number of first tokens in a sample, over all sequences; of rows in a sample of rows; of
features in both.
"""

CONFIRMED = 4
"""The factor by which a confirming sample has more tokens."""

OUTSTANDING = 3.0
"""The least error of a token that is chosen because of it, relative to the median of all tokens
that differ.
"""


@dataclass(frozen=True)
class Part:
    """A sample of a problem and of its observed stages.

    Attributes:
        problem: the sampled problem.
        observed: the stages of the sample, without those of unknown axes.
        remembered: known projections.
        words: a description of the sample.
        judged: the stages to compare; all by default.
    """

    problem: Problem
    observed: dict[str, np.ndarray]
    remembered: Remembered
    words: str
    judged: frozenset[str] | None = None


OF_TOKENS = frozenset({"q", "k", "v", "gate", "latents"})
"""The stages in which tokens do not depend on each other."""

FIRST_CALL = "step0."
"""The prefix of stage names of the first call with a cache."""


def multiplications(problem: Problem) -> int:
    """Return the approximate number of multiplications of the whole layer."""
    case, spec = problem.case, problem.spec
    queries = case.seq_len * (spec.d_in * spec.q_width + spec.context_width * spec.output_width)
    keys = case.key_len * spec.d_kv * (spec.k_width + spec.v_width)
    products = spec.num_heads * case.seq_len * case.key_len * (spec.head_dim + spec.value_head_dim)
    return case.batch * (queries + keys + products)


def is_large(problem: Problem) -> bool:
    """Return True if samples are searched instead of the whole layer."""
    return sample_of(problem) is None and multiplications(problem) > LARGE


@dataclass(frozen=True)
class Whole:
    """A large problem, its observed stages, and their comparison with the reference.

    Attributes:
        problem: the problem.
        observed: its stages.
        compared: those in the reference's shape, compared as a whole.
        remembered: projections of its inputs, which samples share.
        unlike: number of last rows that samples leave out, because they attend to more than the
            problem has.
    """

    problem: Problem
    observed: Mapping[str, np.ndarray]
    compared: WholeStages
    remembered: Remembered
    unlike: int = 0

    @property
    def stages_of_tokens(self) -> frozenset[str]:
        """The observed stages that samples of single tokens show."""
        return frozenset() if is_by_length(self.problem) else OF_TOKENS & self.observed.keys()

    @property
    def other_stages(self) -> frozenset[str]:
        """The observed stages that only samples of rows, with all keys, show."""
        return frozenset(self.observed.keys() - self.stages_of_tokens)

    @property
    def num_tokens(self) -> int:
        """The number of tokens of each sequence in a sample."""
        return max(TOKENS // self.problem.case.batch, 8)

    @property
    def num_rows(self) -> int:
        """The number of query rows that may be sampled."""
        return self.problem.case.seq_len - self.unlike

    def worst(self, stages: Collection[str], size: int, turn: int) -> np.ndarray:
        """Return tokens at which one of some stages differs most: every second one, from the first
        or the second on.

        A stage differs most where the error is largest in comparison with the noise of the same
        token. Tokens that hardly exceed the others are not chosen: among equals, the largest error
        is that with the largest rounding.
        """
        size_of_errors = np.zeros(size)
        for name in {*stages} & self.compared.keys():
            by_token = self.compared[name].by_token[:size]
            differing = by_token[by_token > 0.0]
            typical = float(np.median(differing)) if differing.size else 0.0
            above = np.where(by_token > OUTSTANDING * typical, by_token, 0.0)
            size_of_errors[: len(above)] = np.maximum(size_of_errors[: len(above)], above)
        order = np.argsort(-size_of_errors, kind="stable")
        return order[size_of_errors[order] > 0.0][turn::2]

    def features(self, turn: int) -> np.ndarray:
        """Return some features of the output: the first ones and the worst, or those after them."""
        width = self.problem.spec.output_width
        found = np.arange(min(FEATURES, width)) + turn * min(FEATURES, max(width - FEATURES, 0))
        outputs = [
            self.compared[name] for name in self.compared if stage_named(name).quantity == "output"
        ]
        worst = [
            each.worst_feature
            for each in outputs
            if not each.passed and each.worst_feature is not None
        ]
        return np.union1d(found, worst[:1]).astype(int)

    # ---- Samples ---------------------------------------------------------------------------------

    def of_tokens(self, turn: int) -> Part:
        """Return single tokens: those that differ most, the last one, and others from
        everywhere.
        """
        size, count = self.problem.case.seq_len, self.num_tokens
        worst = self.worst(self.stages_of_tokens, size, turn)[: count // 2]
        tokens = np.union1d(_spread(size, count - len(worst), turn), worst)
        return self.of_these_tokens(tokens, f"{len(tokens)} of {size} tokens")

    def of_these_tokens(self, tokens: np.ndarray, words: str) -> Part:
        """Return a sample of the stages of single tokens."""
        problem = self.problem
        sample = Sample(tokens, np.arange(problem.spec.output_width), tokens=tokens)
        inputs = {
            name: np.ascontiguousarray(x[:, :, tokens] if name in ("k", "v") else x[:, tokens])
            for name, x in problem.inputs.items()
            if name in {*problem.sides.values()}
        }
        part = SampledProblem.of(replace(problem, inputs=inputs), sample)
        remembered = Remembered(self.remembered, tokens)
        return Part(
            part, self._cut(part, self.stages_of_tokens), remembered, words, self.stages_of_tokens
        )

    def of_rows(self, turn: int, count: int, judged: frozenset[str] | None) -> Part:
        """Return rows with all keys: those that differ most, the last one, and others from
        everywhere.
        """
        compared = self.observed.keys() if judged is None else judged
        of_queries = [name for name in compared if "T" in stage_named(name).axes]
        worst = self.worst(of_queries, self.num_rows, turn)[:count]
        rows = np.union1d(_spread(self.num_rows, count, turn), worst)
        features = self.features(turn)
        absorbs = not {"k", "v"} & self.observed.keys()
        some = {rows_of_query(rows): np.ascontiguousarray(self.problem.inputs["query"][:, rows])}
        with_rows = replace(self.problem, inputs=self.problem.inputs | some)
        part = SampledProblem.of(with_rows, Sample(rows, features, absorbs=absorbs))
        words = f"{len(rows)} of {self.problem.case.seq_len} query tokens"
        return Part(part, self._cut(part), self.remembered, words, judged)

    def of_first_tokens(self, tokens: int, turn: int, judged: frozenset[str] | None) -> Part:
        """Return the first tokens of a causal layer, which are a small layer by themselves."""
        problem, case, first = self.problem, self.problem.case, slice(tokens)
        inputs = {"query": np.ascontiguousarray(problem.inputs["query"][:, first])}
        inputs |= {
            name: problem.inputs[name][:, :, first, first]
            for name in ("bias", "mask")
            if name in problem.inputs
        }
        # Heads of another layer, or another input of the values.
        inputs |= {
            name: problem.inputs[name][:, :, first] for name in ("k", "v") if name in problem.inputs
        }
        inputs |= {
            name: problem.inputs[name][:, first] for name in ("value",) if name in problem.inputs
        }
        sample = Sample(np.arange(tokens), self.features(turn))
        part = SampledProblem(
            case.first_tokens(tokens), problem.dtype, problem.weights, inputs, sample
        )
        words = f"the first {tokens} of {case.seq_len} tokens"
        return Part(part, self._cut(part), Remembered(self.remembered, first), words, judged)

    def complete(self, judged: frozenset[str] | None) -> Part | None:
        """Return the first tokens as a small problem, with every row and feature; None if the layer
        is not causal.
        """
        if (
            not is_causal(self.problem)
            or is_by_length(self.problem)
            or self.num_tokens >= self.problem.case.seq_len
        ):
            return None
        part = self.of_first_tokens(self.num_tokens, 0, judged)
        every_feature = Sample(
            np.arange(self.num_tokens), np.arange(self.problem.spec.output_width)
        )
        whole = part.problem.whole if isinstance(part.problem, SampledProblem) else part.problem
        observed = self._cut(SampledProblem.of(whole, every_feature))
        return replace(part, problem=whole, observed=observed)

    def mixing(self) -> Iterator[Part]:
        """Yield samples for bugs that mix rows.

        If heads were not moved back, the first rows of a context are the first tokens of its first
        head. If the first rows attend to the first keys alone, or attention weights were recorded,
        a softmax over the queries shows in all queries of these keys. Otherwise the other queries
        are one row for it.
        """
        case, heads = self.problem.case, self.problem.spec.num_heads
        first, features = max(TOKENS, heads), self.features(0)
        if first >= case.seq_len or case.not_finite is not None:
            return
        rows_out, words = np.arange(first // heads), f"the first {first} of {case.seq_len} keys"
        of_first_keys = Sample(np.arange(case.seq_len), features, first, first, rows_out)
        if is_causal(self.problem) and not is_by_length(self.problem):
            judged = frozenset({"attn_weights"} & self.observed.keys() or {"output"})
            yield self._mixing(of_first_keys, judged | {"output"}, words)
            return
        if "attn_weights" in self.observed:
            yield self._mixing(
                replace(of_first_keys, num_continuing=None), frozenset({"attn_weights"}), words
            )
        elif "bias" not in self.problem.inputs:  # the logarithm of the other queries is not a row
            rows = _spread(self.num_rows, ROWS, 0)
            sample = Sample(
                rows, features, num_continuing=len(rows), other_rows=self._other_rows(rows)
            )
            judged = frozenset(self.observed.keys() & {"context", "output"})
            yield self._mixing(
                sample,
                judged,
                f"{len(rows)} of {case.seq_len} query tokens, and the sum of the others",
            )
        words = f"the first {first} of {case.seq_len} query tokens"
        yield self._mixing(
            Sample(np.arange(first), features, None, None, rows_out), frozenset({"output"}), words
        )

    def _mixing(self, sample: Sample, judged: frozenset[str], words: str) -> Part:
        part = SampledProblem.of(self.problem, sample)
        cut = self._cut(part)
        if sample.other_rows is not None:
            cut = {
                name: x
                for name, x in cut.items()
                if stage_named(name).quantity not in ("mask", "scores")
            }
        return Part(part, cut, self.remembered, words, judged)

    def _other_rows(self, rows: np.ndarray) -> np.ndarray:
        """Return the log-sum-exp of the scores of each key over all queries except some, (B, N, 1,
        S).
        """
        case, spec = self.problem.case, self.problem.spec
        # Right layers also compute all scores: their work is not counted.
        layer = self.remembered.serve(
            ChangedLayer(self.problem, CountedArithmetic(np.dtype(np.float64)))
        )
        values = {**layer.mask({}), **layer.qkv({})}
        values |= {
            name: in_order(self.problem, name, self.observed[name])
            for name in {"q", "k"} & self.observed.keys()
        }
        found = np.full((case.batch, spec.num_heads, 1, case.key_len), -np.inf)
        others = np.setdiff1d(np.arange(case.seq_len), rows)
        for some in np.array_split(others, -(-found.size * len(others) // BLOCK)):
            with uncounted():
                scores = layer.scores({**values, "q": values["q"][:, :, some]}, some[None])[
                    "scores"
                ]
            shown = np.where(values["mask"][:, :, some], -np.inf, scores)
            highest = np.maximum(found, shown.max(axis=2, keepdims=True))
            highest = np.where(np.isfinite(highest), highest, 0.0)
            total = np.exp(found - highest) + np.exp(shown - highest).sum(axis=2, keepdims=True)
            with np.errstate(divide="ignore"):  # a key without a query
                found = highest + np.log(total)
        return found

    def _cut(self, part: Problem, names: Collection[str] | None = None) -> dict[str, np.ndarray]:
        """Return some stages of a sample, in any recorded order of axes; all of them by default."""
        found, sample = {}, sample_of(part)
        for name, x in self.observed.items():
            stage = stage_named(name)
            if sample is None or stage.kind not in STAGES or stage.is_gradient:
                continue
            if names is not None and name not in names:
                continue
            if axes := _axes_of(self.problem, name, x.shape):
                picked = {"T": sample.rows_of(stage.quantity), "E": sample.features}
                picked["S"] = (
                    np.arange(part.case.key_len)[: sample.keys]
                    if sample.tokens is None
                    else sample.tokens
                )
                found[name] = _taken(x, axes, picked)
        return found


def first_call(
    problem: Problem, observed: Mapping[str, np.ndarray], compared: WholeStages
) -> Whole | None:
    """Return the first call with a cache as a layer without one; None if it is short or differs
    from one.

    Scores and attention weights are omitted, because others have slots instead of keys. The last
    row is also omitted, because an empty slot follows it.
    """
    case, spec = problem.case, problem.spec
    tokens = case.chunks[0]
    is_by_length = spec.rope is not None and spec.rope.depends_on_length
    is_other = is_by_length or case.not_finite is not None or {*case.added(0)} != {tokens}
    if tokens <= TOKENS or is_other or problem.inputs.keys() - {"query", "cotangent"}:
        return None
    own = replace(case, seq_len=tokens, chunks=(), new_lengths=(), capacity=0, is_causal=True)
    inputs = {"query": np.ascontiguousarray(problem.inputs["query"][:, :tokens])}
    names = {f"{FIRST_CALL}{name}": name for name in OF_TOKENS | {"context", "output"}}
    stages = {names[name]: x for name, x in observed.items() if name in names}
    if not stages:
        return None
    layer = Problem(own, problem.dtype, problem.weights, inputs)
    return Whole(layer, stages, compared, Remembered(), unlike=1)


def is_causal(problem: Problem) -> bool:
    """Return True if the first tokens of a layer attend to no later token."""
    return problem.case.seq_len_k is None and (
        problem.case.is_causal or problem.case.window_size is not None
    )


def is_by_length(problem: Problem) -> bool:
    """Return True if the first tokens of a layer change in a longer sequence, or keys are of
    several sequences.
    """
    scaling = None if problem.spec.rope is None else problem.spec.rope.scaling
    is_stretched = isinstance(scaling, (DynamicScaling, LongRopeScaling))
    return is_stretched or problem.case.seq_len_k is not None or problem.case.not_finite is not None


def _spread(size: int, count: int, turn: int) -> np.ndarray:
    """Return some of a number of tokens, evenly spaced up to the last one, others in each turn."""
    first = min(1, size - 1)
    if turn:
        return np.unique(np.linspace(first, size - 1, 2 * count + 1, dtype=int))[1:]
    return np.unique(np.linspace(first, size - 1, count, dtype=int))


# ---- Observed stages -----------------------------------------------------------------------------


def in_order(problem: Problem, name: str, x: np.ndarray) -> np.ndarray:
    """Return a stage with its axes in the reference's order; unchanged if no order fits its
    shape.
    """
    stage = stage_named(name)
    if stage.kind not in STAGES or stage.is_gradient:
        return x
    flat = [part for group in _axes_of(problem, name, x.shape) for part in group]
    letters = [letter for letter, _ in flat]
    if not {*STAGES[stage.kind]} - {"B"} <= {
        *letters
    }:  # averaged over heads, or equal for all of them
        return x
    split = x.reshape([size for _, size in flat])
    found = split.transpose(
        [letters.index(letter) for letter in STAGES[stage.kind] if letter in letters]
    )
    return found if "B" in letters or "B" not in STAGES[stage.kind] else found[None]


def _taken(
    x: np.ndarray, axes: Sequence[tuple[tuple[str, int], ...]], picked: Mapping[str, np.ndarray]
) -> np.ndarray:
    """Return an array with the chosen indices of some axes, each of which combines one or several
    letters.
    """
    split = x.reshape([size for group in axes for _, size in group])
    flat = [letter for group in axes for letter, _ in group]
    for axis, letter in enumerate(flat):
        if letter in picked and split.shape[axis] > 1:
            split = split.take(picked[letter], axis=axis)
    sizes = iter(split.shape)
    return split.reshape([math.prod(next(sizes) for _ in group) for group in axes])


def _axes_of(
    problem: Problem, name: str, shape: tuple[int, ...]
) -> list[tuple[tuple[str, int], ...]]:
    """Return the letters of each axis of an array, and their sizes; empty if no order fits its
    shape.
    """
    case, spec, stage = problem.case, problem.spec, stage_named(name)
    sizes = {
        "B": case.batch,
        "N": spec.num_heads,
        "K": spec.num_kv_heads,
        "T": case.seq_len,
        "S": case.key_len,
    }
    sizes |= {"E": spec.output_width}
    sizes["H"] = spec.value_head_dim if stage.quantity in ("v", "context") else spec.head_dim
    letters = STAGES[stage.kind]
    of_heads = [{}, {"K": spec.num_heads}] if "K" in letters else [{}]
    columns = (
        [{}, {"S": case.key_len + 1}]
        if spec.sinks and stage.kind in ("scores", "attn_weights")
        else [{}]
    )
    for other, wider in itertools.product(of_heads, columns):
        known = {**sizes, **other, **wider}
        for groups in _groups(
            letters, may_lack=stage.is_exact or stage.is_attn_weights or case.batch == 1
        ):
            if len(groups) == len(shape) and all(
                _fits(group, size, known, may_be_one=stage.is_exact)
                for group, size in zip(groups, shape, strict=True)
            ):
                return [
                    tuple(
                        (letter, known.get(letter, size) if size > 1 or len(group) > 1 else 1)
                        for letter in group
                    )
                    for group, size in zip(groups, shape, strict=True)
                ]
    return []


def _fits(group: tuple[str, ...], size: int, sizes: Mapping[str, int], *, may_be_one: bool) -> bool:
    """Return True if an axis of a size can hold letters; unknown letters may have any size."""
    if len(group) == 1 and (group[0] not in sizes or (may_be_one and size == 1)):
        return True
    return (
        all(letter in sizes for letter in group)
        and math.prod(sizes[letter] for letter in group) == size
    )


def _groups(letters: tuple[str, ...], *, may_lack: bool) -> Iterator[tuple[tuple[str, ...], ...]]:
    """Yield letters in every order, usual ones first: each alone, two neighbors joined, or some
    left out.
    """
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

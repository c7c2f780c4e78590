"""Samples of a large problem: small problems that show its bugs as the whole layer does.

A bug is tried in a sample, which takes the same time at every size of the layer, and confirmed in
another one. Samples have tokens at which the observed stages differ most, because a bug may not
show elsewhere: RoPE's scaling, for example, only far from the first token. There are three kinds.
Single tokens show errors of q, k, v and the gate, in which tokens do not depend on each other. Some
rows of queries, with all keys, have the same values as in the whole layer. The first tokens of a
causal layer are a small layer by themselves. A few output features are enough.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from mha_spec import DynamicScaling, LongRopeScaling
from parity.explain.diagnosis.changed_layer import ChangedLayer
from parity.explain.diagnosis.readings import in_axes
from parity.explain.diagnosis.remembered import Remembered, remembered_of
from parity.explain.diagnosis.sample import Sample, SampledProblem, rows_of_query, sample_of
from parity.explain.diagnosis.whole import WholeStages
from parity.explain.diagnosis.work import CountedArithmetic, uncounted
from parity.measure.core.problem import Problem
from parity.measure.core.reference import BLOCK
from parity.measure.core.stages import STAGES, Stage, stage_named
from parity.measure.core.trace import Reference

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
    """A problem and its observed stages, or a sample of both, which is searched at once.

    Attributes:
        problem: the problem, or the sampled one.
        observed: its stages; for a sample without the ones of unknown axes.
        remembered: known projections.
        words: a description of the sample; empty for a whole problem.
        compared_stages: the stages to compare; all by default.
        reference: reference of a whole problem, whose stages are not computed again.
    """

    problem: Problem
    observed: Mapping[str, np.ndarray]
    remembered: Remembered
    words: str = ""
    compared_stages: frozenset[str] | None = None
    reference: Reference | None = None

    @classmethod
    def of_all(cls, observed: Mapping[str, np.ndarray], reference: Reference) -> Part:
        """Return the whole problem of a reference."""
        return cls(reference.problem, observed, remembered_of(reference), reference=reference)


OF_TOKENS = frozenset({"q", "k", "v", "gate", "latents"})
"""The stages in which tokens do not depend on each other."""

SOFTMAX_OVER_QUERIES = frozenset({"softmax-over-queries"})
HEADS_NOT_MOVED_BACK = frozenset({"heads-not-moved-back"})
MIXING = SOFTMAX_OVER_QUERIES | HEADS_NOT_MOVED_BACK
"""Bugs that mix rows, so a sample of some rows does not show them."""

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
    def stages_of_paths(self) -> frozenset[str]:
        """The observed stages of a module's paths, which contain what the stage functions do."""
        return frozenset(name for name in self.observed if stage_named(name).path)

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
        largest = np.zeros(size)
        for name in {*stages} & self.compared.keys():
            by_token = self.compared.by_token(name)[:size]
            differing = by_token[by_token > 0.0]
            typical = 0.0
            if differing.size:
                typical = float(np.median(differing))
            outstanding = np.where(by_token > OUTSTANDING * typical, by_token, 0.0)
            largest[: len(outstanding)] = np.maximum(largest[: len(outstanding)], outstanding)
        order = np.argsort(-largest, kind="stable")
        return order[largest[order] > 0.0][turn::2]

    def features(self, turn: int) -> np.ndarray:
        """Return some features of the output: the first ones and the worst, or those after them."""
        width = self.problem.spec.output_width
        first = turn * min(FEATURES, max(width - FEATURES, 0))
        features = first + np.arange(min(FEATURES, width))
        for name in self.compared:
            if stage_named(name).quantity != "output":
                continue
            comparison = self.compared[name]
            if not comparison.passed and "E" in comparison.worst_index:
                return np.union1d(features, comparison.worst_index["E"])
        return features

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
        inputs = {}
        for name in {*problem.sides.values()}:
            x = problem.inputs[name]
            inputs[name] = np.ascontiguousarray(np.take(x, tokens, _token_axis(name)))
        every_feature = np.arange(problem.spec.output_width)
        sample = Sample(tokens, every_feature, tokens=tokens)
        part = SampledProblem.of(replace(problem, inputs=inputs), sample)
        observed = self._cut(part, self.stages_of_tokens)
        remembered = Remembered(self.remembered, tokens)
        return Part(part, observed, remembered, words, self.stages_of_tokens)

    def of_rows(self, turn: int, count: int, compared_stages: frozenset[str] | None) -> Part:
        """Return rows with all keys: those that differ most, the last one, and others from
        everywhere.
        """
        names = compared_stages
        if names is None:
            names = frozenset(self.observed)
        of_queries = [name for name in names if "T" in stage_named(name).axes]
        worst = self.worst(of_queries, self.num_rows, turn)[:count]
        rows = np.union1d(_spread(self.num_rows, count, turn), worst)
        absorbs = not {"k", "v"} & self.observed.keys()
        some = {rows_of_query(rows): np.ascontiguousarray(self.problem.inputs["query"][:, rows])}
        with_rows = replace(self.problem, inputs=self.problem.inputs | some)
        part = SampledProblem.of(with_rows, Sample(rows, self.features(turn), absorbs=absorbs))
        words = f"{len(rows)} of {self.problem.case.seq_len} query tokens"
        return Part(part, self._cut(part), self.remembered, words, compared_stages)

    def of_first_tokens(
        self, tokens: int, turn: int, compared_stages: frozenset[str] | None
    ) -> Part:
        """Return the first tokens of a causal layer, which are a small layer by themselves."""
        problem, case, first = self.problem, self.problem.case, slice(tokens)
        inputs = {}
        for name, x in problem.inputs.items():
            if name in ("bias", "mask"):
                inputs[name] = x[:, :, first, first]
            elif name in ("k", "v"):
                inputs[name] = x[:, :, first]
            elif name == "value":
                inputs[name] = x[:, first]
            elif name == "query":
                inputs[name] = np.ascontiguousarray(x[:, first])
        sample = Sample(np.arange(tokens), self.features(turn))
        part = SampledProblem(
            case.first_tokens(tokens), problem.dtype, problem.weights, inputs, sample
        )
        words = f"the first {tokens} of {case.seq_len} tokens"
        return Part(
            part, self._cut(part), Remembered(self.remembered, first), words, compared_stages
        )

    def complete(self, compared_stages: frozenset[str] | None) -> Part | None:
        """Return the first tokens as a small problem, with every row and feature; None if the layer
        is not causal.
        """
        if not self.begins_with_a_layer(self.num_tokens):
            return None
        part = self.of_first_tokens(self.num_tokens, 0, compared_stages)
        problem = part.problem
        if isinstance(problem, SampledProblem):
            problem = problem.whole
        every_feature = np.arange(problem.spec.output_width)
        sample = Sample(np.arange(self.num_tokens), every_feature)
        observed = self._cut(SampledProblem.of(problem, sample))
        return replace(part, problem=problem, observed=observed)

    def begins_with_a_layer(self, tokens: int) -> bool:
        """Return True if a number of first tokens are a layer by themselves, instead of the whole
        one.
        """
        problem = self.problem
        return is_causal(problem) and not is_by_length(problem) and tokens < problem.case.seq_len

    def mixing(self) -> Iterator[tuple[Part, frozenset[str]]]:
        """Yield samples for bugs that mix rows, and the names of the bugs that each shows.

        If heads were not moved back, the first rows of a context are the first tokens of its first
        head. If the first rows attend to the first keys alone, or attention weights were recorded,
        a softmax over the queries shows in all queries of these keys. Otherwise the other queries
        are one row for it.
        """
        case, heads = self.problem.case, self.problem.spec.num_heads
        first, features = max(TOKENS, heads), self.features(0)
        if first >= case.seq_len or case.not_finite is not None:
            return
        of_first_head = np.arange(first // heads)
        words = f"the first {first} of {case.seq_len} keys"
        of_first_keys = Sample(np.arange(case.seq_len), features, first, first, of_first_head)
        if is_causal(self.problem) and not is_by_length(self.problem):
            compared_stages = {"output"}
            if "attn_weights" in self.observed:
                compared_stages.add("attn_weights")
            yield self._mixing(of_first_keys, compared_stages, words), MIXING
            return
        if "attn_weights" in self.observed:
            of_all_queries = replace(of_first_keys, num_continuing=None)
            part = self._mixing(of_all_queries, {"attn_weights"}, words)
            yield part, SOFTMAX_OVER_QUERIES
        elif "bias" not in self.problem.inputs:  # the logarithm of the other queries is not a row
            rows = _spread(self.num_rows, ROWS, 0)
            sample = Sample(
                rows, features, num_continuing=len(rows), other_rows=self._other_rows(rows)
            )
            words = f"{len(rows)} of {case.seq_len} query tokens, and the sum of the others"
            compared_stages = {"context", "output"} & self.observed.keys()
            yield self._mixing(sample, compared_stages, words), SOFTMAX_OVER_QUERIES
        sample = Sample(np.arange(first), features, rows_out=of_first_head)
        words = f"the first {first} of {case.seq_len} query tokens"
        yield self._mixing(sample, {"output"}, words), HEADS_NOT_MOVED_BACK

    def _mixing(self, sample: Sample, compared_stages: Collection[str], words: str) -> Part:
        part = SampledProblem.of(self.problem, sample)
        observed = self._cut(part)
        if sample.other_rows is not None:
            # The sum of the other queries was not recorded.
            observed = {
                name: x
                for name, x in observed.items()
                if stage_named(name).quantity not in ("mask", "scores")
            }
        return Part(part, observed, self.remembered, words, frozenset(compared_stages))

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
        for name in ("q", "k"):
            if name in self.observed:
                values[name] = self.observed[name]
        log_sum = np.full((case.batch, spec.num_heads, 1, case.key_len), -np.inf)
        other_rows = np.setdiff1d(np.arange(case.seq_len), rows)
        num_blocks = -(-log_sum.size * len(other_rows) // BLOCK)
        for block in np.array_split(other_rows, num_blocks):
            of_block = {**values, "q": values["q"][:, :, block]}
            with uncounted():
                scores = layer.scores(of_block, block[None])["scores"]
            scores = np.where(values["mask"][:, :, block], -np.inf, scores)
            highest = np.maximum(log_sum, scores.max(axis=2, keepdims=True))
            highest = np.where(np.isfinite(highest), highest, 0.0)
            total = np.exp(log_sum - highest)
            total = total + np.exp(scores - highest).sum(axis=2, keepdims=True)
            with np.errstate(divide="ignore"):  # a key without a query
                log_sum = highest + np.log(total)
        return log_sum

    def _cut(self, part: Problem, names: Collection[str] | None = None) -> dict[str, np.ndarray]:
        """Return some stages of a sample, in any recorded order of axes; all of them by default."""
        sample = sample_of(part)
        if sample is None:
            return {}
        if names is None:
            names = self.observed.keys()
        cut = {}
        for name, x in self.observed.items():
            stage = stage_named(name)
            x = in_order(self.problem, name, x)
            if name not in names or x.shape not in _shapes_of(self.problem, stage):
                continue
            indices = {"T": sample.rows_of(stage.quantity), "E": sample.features}
            if sample.tokens is None:
                indices["S"] = np.arange(part.case.key_len)[: sample.keys]
            else:
                indices["S"] = sample.tokens
            for axis, letter in enumerate(stage.axes):
                if letter in indices:
                    x = np.take(x, indices[letter], axis)
            cut[name] = x
        return cut


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
    # A quantized cache also changes the keys and values of the first call.
    is_other = is_other or case.cache_quantization is not None or case.cache_slots is not None
    if tokens <= TOKENS or is_other or problem.inputs.keys() - {"query", "cotangent"}:
        return None
    own = replace(
        case,
        seq_len=tokens,
        chunks=(),
        new_lengths=(),
        capacity=0,
        is_causal=True,
        position_ids=None if case.position_ids is None else case.position_ids[..., :tokens],
    )
    inputs = {"query": np.ascontiguousarray(problem.inputs["query"][:, :tokens])}
    layer = Problem(own, problem.dtype, problem.weights, inputs)
    stages = {}
    for name in (*OF_TOKENS, "context", "output"):
        x = observed.get(FIRST_CALL + name)
        if x is not None:
            stages[name] = x
    if not stages:
        return None
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


def _token_axis(name: str) -> int:
    """Return the axis of the tokens of an input: heads of another layer come before them."""
    if name in ("k", "v"):
        return 2
    return 1


# ---- Observed stages -----------------------------------------------------------------------------


def in_order(problem: Problem, name: str, x: np.ndarray) -> np.ndarray:
    """Return a stage with its axes in the reference's order; unchanged if no order fits its
    shape.
    """
    stage = stage_named(name)
    for shape in _shapes_of(problem, stage):
        # The first way is the most usual one.
        for _, ordered in in_axes(x, shape, stage.axes, may_broadcast=stage.is_exact):
            return ordered
    return x


def _shapes_of(problem: Problem, stage: Stage) -> list[tuple[int, ...]]:
    """Return the shapes of a stage: in the reference, and after the repeat of keys and
    values for the query heads. Empty for gradients and unknown stages.
    """
    case, spec = problem.case, problem.spec
    if stage.kind not in STAGES or stage.is_gradient:
        return []
    if stage.step is not None and stage.step >= len(case.chunks):
        return []
    sizes = {
        "B": case.batch,
        "N": spec.num_heads,
        "K": spec.num_kv_heads,
        "T": case.seq_len,
        "S": case.key_len,
        "E": spec.output_width,
        "H": spec.head_dim,
    }
    if stage.step is not None:
        sizes["T"] = case.chunks[stage.step]
        sizes["S"] = case.capacity
        if stage.quantity in ("k", "v", "latents"):
            sizes["S"] = case.chunks[stage.step]
    if stage.quantity in ("v", "context"):
        sizes["H"] = spec.value_head_dim
    if stage.quantity == "gate":
        sizes["G"] = len(problem.weights["gate_proj.weight"])
    if stage.quantity in ("latents", "cache.latents"):
        # All heads share the latents.
        sizes["K"] = 1
        sizes["W"] = len(problem.weights["kv_a_proj.weight"])
    shape = tuple([sizes[letter] for letter in stage.axes])
    if stage.quantity not in ("k", "v"):
        return [shape]
    sizes["K"] = spec.num_heads
    repeated = tuple([sizes[letter] for letter in stage.axes])
    return [shape, repeated]

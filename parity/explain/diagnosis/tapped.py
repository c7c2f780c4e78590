"""The calls of a tapped layer as one: prompt and steps joined, padding left out, stages by their
names.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import numpy as np

from mha_spec import AttentionSpec, DynamicScaling, InputError, LongRopeScaling, Rope
from parity.measure.core.case import Case
from parity.measure.core.problem import Problem
from parity.measure.core.quantization import FIXED, NAMES, SCALE_AXES, CacheQuantization
from parity.measure.core.reference.quantized import range_of, scales_of_range
from parity.measure.core.trace import Reference
from parity.measure.core.weights import Weights, dtype_named
from parity.port.tapping.record import VALUES, TappedCall, TappedLayer, is_hidden

TOKENS = {
    "input": 1,
    "value_input": 1,
    "q": 2,
    "k": 2,
    "v": 2,
    "context": 2,
    "output": 1,
    "segment_ids": 1,
    "grad.input": 1,
    "grad.output": 1,
    "grad.context": 2,
    "grad.q": 2,
    "grad.k": 2,
    "grad.v": 2,
}
"""The token axis along which values are joined."""

OF_KEYS = ("key_input", "value_input", "key_is_real", "k", "v")
"""Values without query tokens if keys come from another sequence: the values of the first call
apply to all.
"""

CACHED_PARTS = {"k": "keys", "v": "values"}
"""The part of a cache that contains the keys or values of all calls."""

NO_STAGES = (
    "input",
    "positions",
    "segment_ids",
    "key_input",
    "value_input",
    "key_is_real",
    "call_mask",
)
"""Inputs of the reference, which it does not compute."""

COUNTING = ("window_size", "chunk_size", "alibi", "relative_bias", "relative_products")
"""Fields of a specification that depend on the number of tokens between a query and a key."""


@dataclass(frozen=True)
class Sequences:
    """The recorded values of sequences with the same padding, from their first token.

    Attributes:
        rows: indices of the sequences in the batch.
        tokens: indices of the real tokens in the calls.
        chunks: number of real tokens of each call.
        values: recorded values of real tokens, joined over the calls, by the names of `VALUES`.
        caches: by call and name, the attended keys and values, if they differ from the calls' own.
        caches_in_rows: by call and name, the keys and values of a cache that keeps the rows of its
            sequences where beam search continues others; empty if it continues none.
        first_call: `keys` and `values` of the first call: of all sequences of the batch, padding
            included, as a quantized cache computes its scales.
        quantization: quantization of the cache; None if it stores keys and values as they are.
        with_padding: returns the same sequences with their padding, which only a wrong layer needs;
            None if they have none.
        is_padding: the tokens that are padding, in sequences with their padding.
    """

    rows: np.ndarray
    tokens: np.ndarray
    chunks: tuple[int, ...]
    values: dict[str, np.ndarray]
    caches: dict[tuple[int, str], np.ndarray]
    caches_in_rows: dict[tuple[int, str], np.ndarray]
    first_call: dict[str, np.ndarray]
    quantization: CacheQuantization | None = None
    with_padding: Callable[[], Sequences] | None = None
    is_padding: np.ndarray | None = None

    @property
    def is_cross(self) -> bool:
        """True if keys come from another sequence."""
        return "key_input" in self.values

    @property
    def token_positions(self) -> np.ndarray:
        """The positions of the tokens of each sequence, (rows, T); 0, 1, … if they were not
        recorded.
        """
        shape = (len(self.rows), len(self.tokens))
        positions = self.values.get("positions")
        if positions is not None and positions.ndim == 2 and _are_distinct(positions):
            return np.broadcast_to(positions, shape)
        return np.broadcast_to(np.arange(len(self.tokens)), shape)

    def counting_gaps(self, spec: AttentionSpec) -> str:
        """Return the fields of a specification that count tokens, if padding lies between real
        ones; else "".

        Removed padding brings the tokens around it together. Recorded positions show if a model
        counts padding, but a window, chunks or a bias by distance do not.
        """
        if self.tokens[-1] - self.tokens[0] + 1 == len(self.tokens):
            return ""
        fields = [name for name in COUNTING if getattr(spec, name) is not None]
        if spec.has_positions and "positions" not in self.values:
            fields.append("its positions")
        return " and ".join(fields)

    @property
    def stages(self) -> dict[str, np.ndarray]:
        """The stages that the reference also computes, as if all tokens had come at once."""
        stages = {name: x for name, x in self.values.items() if name not in NO_STAGES}
        return {name: x for name, x in stages.items() if not name.startswith("grad.")}

    @property
    def gradients(self) -> dict[str, np.ndarray]:
        """The gradients of stages and of the query, if the gradient of the output was recorded."""
        if "grad.output" not in self.values:
            return {}
        gradients = {name: x for name, x in self.values.items() if name.startswith("grad.")}
        del gradients["grad.output"]
        if "grad.input" in gradients:
            gradients["grad.query"] = gradients.pop("grad.input")
        return gradients

    @property
    def stages_by_step(self) -> dict[str, np.ndarray]:
        """The stages call by call, as the reference names them with a cache, and the cached
        values.
        """
        stages: dict[str, np.ndarray] = {}
        stop = 0
        for step, chunk in enumerate(self.chunks):
            start, stop = stop, stop + chunk
            for name, x in self.stages.items():
                axis = TOKENS.get(name, 2)
                stages[f"step{step}.{name}"] = np.take(x, np.arange(start, stop), axis)
            for name, part in CACHED_PARTS.items():
                if name in self.values:
                    cached = self.caches.get((step, part), self.values[name][:, :, :stop])
                    stages[f"step{step}.cache.{part}"] = self._with_empty_slots(cached)
        return stages

    def _with_empty_slots(self, cached: np.ndarray) -> np.ndarray:
        """Return keys or values in a cache with a slot for each token, as the reference has it."""
        batch, heads, filled, width = cached.shape
        empty = np.zeros((batch, heads, len(self.tokens) - filled, width), cached.dtype)
        return np.concatenate([cached, empty], axis=2)

    def in_our_order(self, reference: Reference) -> Sequences:
        """Return the sequences with features of queries and keys in the order of the reference.

        Layers with latents that rotate interleaved pairs may leave them in halves. Scores are
        equal, because queries and keys have the same order.
        """
        spec, expected = reference.problem.spec, reference.accumulated["k"]
        q, k = self.values.get("q"), self.values.get("k")
        if spec.latent is None or spec.rope is None or spec.rope.pairs != "interleaved":
            return self
        if q is None or k is None or q.shape[-1] != spec.head_dim or k.shape != expected.shape:
            return self
        halves = Rope(rotary_dim=spec.latent.rope_dim, rotated="last")
        to_pairs = halves.pair_order(spec.head_dim)
        error_as_pairs = np.abs(k - expected).sum()
        error_as_halves = np.abs(k[..., to_pairs] - expected).sum()
        if error_as_pairs <= error_as_halves:
            return self
        values = {**self.values, "q": q[..., to_pairs], "k": k[..., to_pairs]}
        return replace(
            self,
            values=values,
            caches=_with_features_of_keys(self.caches, to_pairs),
            caches_in_rows=_with_features_of_keys(self.caches_in_rows, to_pairs),
        )

    def unscaled(self, reference: Reference) -> Sequences:
        """Return the sequences with unscaled queries, if that is closer in size to the reference.

        Layers may scale them before the attention function. Whisper's do, and pass a scale of 1.
        """
        spec, expected = reference.problem.spec, reference.accumulated["q"]
        scale = spec.scale
        if scale is None:
            scale = spec.head_dim**-0.5
        q = self.values.get("q")
        if q is None or not q.any():
            return self
        # Unscaled queries have the size of the reference's, scaled ones that times the scale.
        wide = q.astype(np.float64)
        ratio = np.sqrt(np.mean(wide**2) / np.mean(expected**2))
        if abs(np.log(ratio / scale)) >= abs(np.log(ratio)):
            return self
        return replace(self, values={**self.values, "q": (wide / scale).astype(q.dtype)})

    def problem(
        self,
        name: str,
        spec: AttentionSpec,
        weights: Weights,
        *,
        is_causal: bool,
        source: Sequences | None = None,
    ) -> Problem:
        """Return the problem of the layer's own input, all tokens at once.

        With `shared_kv` its keys and values come from `source`, or the recorded ones.
        """
        x, inputs = self.values["input"], self._inputs(spec)
        if spec.shared_kv:
            inputs["k"] = (source or self).values["k"]
            inputs["v"] = (source or self).values["v"]
        seq_len_k = None
        if self.is_cross:
            seq_len_k = inputs["key"].shape[1]
        segment_ids = None
        if "segment_ids" in self.values:
            segment_ids = tuple(map(tuple, self.values["segment_ids"].tolist()))
        dtype = x.dtype.name
        case = Case(
            name,
            replace(spec, dropout=0.0, output_dropout=0.0),
            "recorded",
            batch=x.shape[0],
            seq_len=x.shape[1],
            seq_len_k=seq_len_k,
            is_causal=is_causal,
            random_mask="mask" in inputs,
            position_ids=self._position_ids(spec),
            segment_ids=segment_ids,
        )
        in_dtype = {name: weight.astype(dtype_named(dtype)) for name, weight in weights.items()}
        return Problem(case, dtype, in_dtype, inputs)

    def _position_ids(self, spec: AttentionSpec) -> np.ndarray | None:
        """Return the recorded positions; by default the positions of a text, also on several
        axes.
        """
        in_order = np.arange(self.values["input"].shape[1])[None]
        positions = self.values.get("positions")
        # In cross-attention, the positions of another call may have been recorded.
        if positions is not None and positions.shape[-1] == in_order.shape[-1]:
            return positions
        if spec.rope is None or spec.rope.sections is None:
            return in_order
        return np.stack([in_order] * len(spec.rope.sections))

    def _inputs(self, spec: AttentionSpec) -> dict[str, np.ndarray]:
        inputs = {"query": self.values["input"]}
        if self.is_cross:
            inputs["key"] = self.values["key_input"]
        if "value_input" in self.values:
            inputs["value"] = self.values["value_input"]
        if "key_is_real" in self.values:
            is_padding = ~self.values["key_is_real"][:, None, None]
            shape = (len(self.rows), spec.num_heads, len(self.tokens), is_padding.shape[-1])
            inputs["mask"] = np.broadcast_to(is_padding, shape)
        if "call_mask" in self.values:
            mask = self.values["call_mask"]
            shape = (len(self.rows), spec.num_heads, *mask.shape[2:])
            inputs["mask"] = np.broadcast_to(mask, shape)
        return inputs

    def problem_of_its_own(self, problem: Problem) -> Problem:
        """Return the sequences without other tokens."""
        length = len(self.tokens)
        position_ids = self._position_ids(problem.spec)
        case = replace(problem.case, seq_len=length, position_ids=position_ids)
        return replace(problem, case=case, inputs={"query": problem.inputs["query"][:, :length]})

    def problem_of_padded(self, problem: Problem) -> Problem:
        """Return the problem of sequences with their padding, which a mask hides; call by call if
        there are several.

        Args:
            problem: of the same sequences without it.
        """
        if self.is_padding is None:
            raise ValueError("there must be padding")
        length = len(self.tokens)
        mask = self.is_padding[None, None, None]
        case = replace(
            problem.case,
            seq_len=length,
            position_ids=self._position_ids(problem.spec),
            mask=mask,
        )
        shape = (len(self.rows), problem.spec.num_heads, length, length)
        inputs = {"query": self.values["input"], "mask": np.broadcast_to(mask, shape)}
        padded = replace(problem, case=case, inputs=inputs)
        if len(self.chunks) == 1:
            return padded
        return self.problem_by_step(padded)

    def problem_by_step(self, problem: Problem) -> Problem:
        """Return the problem call by call, with a cache."""
        case = replace(
            problem.case,
            is_causal=False,
            chunks=self.chunks,
            capacity=len(self.tokens),
            cache_quantization=self.quantization,
        )
        return replace(problem, case=case)

    def rounded_by(self, quantization: CacheQuantization) -> Sequences | None:
        """Return the sequences with the quantization of their cache.

        None if its scales also depend on other sequences or on padding, in a way that the recorded
        keys and values do not show.
        """
        with_fixed_scales = [name for name in NAMES if quantization.scale_per_of(name) in FIXED]
        is_calibrated = quantization.key_scales is not None
        if is_calibrated or not with_fixed_scales or self._is_whole_batch:
            return replace(self, quantization=quantization)
        has_other_scales = len(with_fixed_scales) < len(NAMES) or quantization.has_zero_point
        if has_other_scales or quantization.before_rope or not self.first_call:
            return None
        scales = {}
        for name, x in self.first_call.items():
            axes = SCALE_AXES[quantization.scale_per_of(name)]
            lowest, highest = range_of(x.astype(np.float32), axes, quantization)
            scales[name] = scales_of_range(lowest, highest, quantization).ravel()
        calibrated = quantization.replace(key_scales=scales["keys"], value_scales=scales["values"])
        return replace(self, quantization=calibrated)

    @property
    def _is_whole_batch(self) -> bool:
        """Return whether the first call had these sequences alone, without padding."""
        for x in self.first_call.values():
            if x.shape[0] != len(self.rows) or x.shape[2] != self.chunks[0]:
                return False
        return True

    @property
    def is_rounded_at_once(self) -> bool:
        """Return whether a call also attends to its own tokens as a quantized cache has them."""
        return self.quantization is not None and self.quantization.exact == "none"

    def without(self, name: str) -> Sequences:
        """Return the sequences without one of the values."""
        values = dict(self.values)
        values.pop(name, None)
        return replace(self, values=values)

    def ends_with_context(self, spec: AttentionSpec) -> bool:
        """Return whether the output may be the context of all heads, which nothing follows."""
        output = self.values.get("output")
        if output is None or spec.gate is not None or spec.context_norm is not None:
            return False
        return output.shape[-1] == spec.context_width

    @property
    def prompt(self) -> Sequences:
        """The first call alone."""
        tokens = np.arange(self.chunks[0])
        rows = np.arange(len(self.rows))
        values = {}
        for name, x in self.values.items():
            values[name] = _taken(name, x, rows, tokens, is_cross=self.is_cross)
        of_prompt = replace(self, tokens=self.tokens[tokens], chunks=self.chunks[:1])
        return replace(of_prompt, values=values, caches={}, caches_in_rows={}, quantization=None)

    def must_be_stepped(self, spec: AttentionSpec) -> bool:
        """Return True if all tokens at once give other results than call by call."""
        if self.is_cross:
            return False
        is_rounded = self.quantization is not None and len(self.chunks) > 1
        if self.caches or is_rounded or self.is_rounded_at_once:
            return True
        if spec.rope is None:
            return False
        return isinstance(spec.rope.scaling, DynamicScaling | LongRopeScaling)


def _with_features_of_keys(
    caches: Mapping[tuple[int, str], np.ndarray], order: np.ndarray
) -> dict[tuple[int, str], np.ndarray]:
    """Return cached keys with their features in an order, and cached values."""
    reordered = dict(caches)
    for (step, part), x in caches.items():
        if part == "keys":
            reordered[step, part] = x[..., order]
    return reordered


def _are_distinct(positions: np.ndarray) -> bool:
    """Return whether no sequence has two tokens at one position, (rows, T)."""
    in_order = np.sort(positions, axis=1)
    return bool((np.diff(in_order, axis=1) != 0).all())


def sequences_of(layer: TappedLayer) -> list[Sequences]:
    """Return the recorded sequences of a layer, prompt by prompt; those with the same padding
    together.

    Raises:
        ValueError: if a call does not follow the one before it, or nothing can be compared.
    """
    if not any({"input", "output"} <= call.values.keys() for call in layer.calls):
        raise InputError(
            layer.name, "be called while it is tapped", f"{len(layer.calls)} calls with an output"
        )
    sequences = []
    for of_prompt in sequences_by_prompt(layer):
        sequences += of_prompt
    return sequences


def sequences_by_prompt(layer: TappedLayer) -> list[list[Sequences]]:
    """Return the recorded sequences, each prompt and its steps together: all sequences of
    a batch.

    Raises:
        ValueError: if a call does not follow the one before it.
    """
    return [_by_padding(calls) for calls in _runs(layer)]


def _runs(layer: TappedLayer) -> list[list[TappedCall]]:
    """Return the calls of each prompt and its steps, of the sequences that its last call
    continues.
    """
    runs: list[list[TappedCall]] = []
    for call in layer.calls:
        if call.past is None:
            raise InputError(layer.name, "record how many tokens its cache holds")
        if not call.past:
            runs.append([])
        elif not runs:
            raise InputError(
                layer.name, "be tapped from the first token on", f"a cache of {call.past} tokens"
            )
        runs[-1].append(call)
    for calls in runs:
        for before, after in pairwise(calls):
            expected = (before.past or 0) + before.values["input"].shape[1]
            if after.past != expected or len(after.values["input"]) != len(before.values["input"]):
                raise InputError(
                    layer.name,
                    "be called with one token after the other",
                    f"a cache of {after.past} tokens after {expected}",
                )
            if "key_input" in after.values:
                raise InputError(
                    layer.name, "attend to one sequence from the first token on", "a different one"
                )
    return [_continued(calls) for calls in runs]


IN_ROWS = "in_rows."
"""The prefix of the keys and values of calls so far in the rows of one call: of the sequences that
were in these rows, and not of those that beam search continues there.
"""


def _continued(calls: list[TappedCall]) -> list[TappedCall]:
    """Return the calls of the sequences that the last call continues, each in its row there.

    Beam search copies some sequences between two calls, and drops others.
    """
    if all(call.continued_rows is None for call in calls):
        return calls
    rows = np.arange(len(calls[-1].values["input"]))
    continued = []
    for step in reversed(range(len(calls))):
        call = calls[step]
        values = {name: _rows_of(name, x, rows) for name, x in call.values.items()}
        for name, part in CACHED_PARTS.items():
            so_far = calls[: step + 1]
            if f"cache.{part}" in call.values and all(name in earlier.values for earlier in so_far):
                in_rows = [earlier.values[name][rows] for earlier in so_far]
                values[IN_ROWS + part] = np.concatenate(in_rows, axis=2)
        continued.append(replace(call, values=values))
        if call.continued_rows is not None:
            rows = np.array(call.continued_rows)[rows]
    return continued[::-1]


def _rows_of(name: str, x: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return the values of some sequences; what all sequences share has one row."""
    axis = 0
    if name in VALUES:
        # Positions may have a leading axis, for rows and columns.
        axis = x.ndim - len(VALUES[name])
    if x.shape[axis] == 1:
        return x
    return np.take(x, rows, axis=axis)


def _by_padding(calls: list[TappedCall]) -> list[Sequences]:
    """Return the sequences of the calls of a prompt, those with the same padding together."""
    lengths = [call.values["input"].shape[1] for call in calls]
    joined = _joined_values(calls, sum(lengths))
    is_cross = "key_input" in joined
    caches = {}
    caches_in_rows = {}
    for step, call in enumerate(calls):
        for name, part in CACHED_PARTS.items():
            if f"cache.{part}" in call.values:
                caches[step, part] = _cache(call, joined, name)
            if IN_ROWS + part in call.values:
                caches_in_rows[step, part] = call.values[IN_ROWS + part]
    first_call = {}
    if {"k", "v"} <= calls[0].values.keys():
        first_call = {part: calls[0].values[name] for name, part in CACHED_PARTS.items()}
    patterns, pattern_of_row = np.unique(_is_real(calls), axis=0, return_inverse=True)
    # Sequences without padding show more, and come first.
    most_tokens_first = np.argsort(-patterns.sum(axis=1), kind="stable")
    stops = np.cumsum([0, *lengths])
    sequences = []
    for number in most_tokens_first:
        is_real = patterns[number]
        if not is_real.any():
            continue
        rows = np.flatnonzero(pattern_of_row.reshape(-1) == number)
        tokens = np.flatnonzero(is_real)
        chunks = tuple([int(is_real[start:stop].sum()) for start, stop in pairwise(stops)])
        values = {}
        for name, x in joined.items():
            # The gradients of real tokens may depend on padding, which is removed.
            if is_real.all() or not name.startswith("grad."):
                values[name] = _taken(name, x, rows, tokens, is_cross=is_cross)
        taken_caches = _taken_caches(caches, rows, tokens, is_cross=is_cross)
        taken_in_rows = _taken_caches(caches_in_rows, rows, tokens, is_cross=is_cross)
        of_rows = Sequences(rows, tokens, chunks, values, taken_caches, taken_in_rows, first_call)
        if not is_real.all() and not is_cross:
            padded = partial(_padded, of_rows, tuple(lengths), ~is_real, joined, caches)
            of_rows = replace(of_rows, with_padding=padded)
        sequences.append(of_rows)
    return sequences


def _padded(
    sequences: Sequences,
    lengths: tuple[int, ...],
    is_padding: np.ndarray,
    joined: Mapping[str, np.ndarray],
    caches: Mapping[tuple[int, str], np.ndarray],
) -> Sequences:
    """Return sequences with their padding.

    Args:
        sequences: these sequences without it.
        lengths: number of tokens of each call.
        is_padding: which of these tokens are padding.
        joined: recorded values of all sequences, joined over the calls.
        caches: recorded caches of all sequences.
    """
    rows, tokens = sequences.rows, np.arange(len(is_padding))
    values = {}
    for name, x in joined.items():
        if not name.startswith("grad."):
            values[name] = _taken(name, x, rows, tokens, is_cross=False)
    return replace(
        sequences,
        tokens=tokens,
        chunks=lengths,
        values=values,
        caches=_taken_caches(caches, rows, tokens, is_cross=False),
        caches_in_rows={},
        is_padding=is_padding,
    )


def _is_real(calls: list[TappedCall]) -> np.ndarray:
    """Return which tokens of all calls are no padding, (B, T)."""
    parts = []
    for call in calls:
        every_token = np.ones(call.values["input"].shape[:2], bool)
        parts.append(call.values.get("is_real", every_token))
    return np.concatenate(parts, axis=1)


def _joined_values(calls: list[TappedCall], total: int) -> dict[str, np.ndarray]:
    """Return the values of all calls, as one array each; values of keys and queries have an entry
    for every token.
    """
    first = calls[0].values
    is_cross = "key_input" in first
    # Values that only some calls have are left out.
    in_all = set(first)
    for call in calls:
        in_all &= call.values.keys()
    joined = {}
    for name, axis in TOKENS.items():
        if name in in_all and not (is_cross and name in OF_KEYS):
            joined[name] = np.concatenate([call.values[name] for call in calls], axis=axis)
    if "positions" in in_all:
        joined["positions"] = _joined_positions(calls)
    if is_cross:
        return {**joined, **_joined_of_keys(calls, in_all)}
    if len(calls) == 1 and "call_mask" in in_all:
        joined["call_mask"] = first["call_mask"]
    if "attn_weights" in in_all:
        joined["attn_weights"] = _joined_over_calls(calls, "attn_weights", total, 0)
    # A call of one token may have no mask, because it attends to all keys.
    have_masks = all("mask" in call.values or call.values["input"].shape[1] == 1 for call in calls)
    if have_masks and "q" in in_all:
        joined["mask"] = _joined_over_calls(calls, "mask", total, True)
    return joined


def _joined_positions(calls: list[TappedCall]) -> np.ndarray:
    """Return the positions of all calls, some of which may have one row for all sequences."""
    positions = [call.values["positions"] for call in calls]
    batch = max([x.shape[-2] for x in positions])
    with_batch = [np.broadcast_to(x, (*x.shape[:-2], batch, x.shape[-1])) for x in positions]
    return np.concatenate(with_batch, axis=-1)


def _joined_of_keys(calls: list[TappedCall], in_all: Collection[str]) -> dict[str, np.ndarray]:
    """Return the values of a layer whose keys come from another sequence, once."""
    first = calls[0].values
    joined = {name: first[name] for name in OF_KEYS if name in first}
    if "attn_weights" in in_all:
        attn_weights = [call.values["attn_weights"] for call in calls]
        joined["attn_weights"] = np.concatenate(attn_weights, axis=2)
    if "mask" in in_all and "q" in in_all:
        masks = []
        for call in calls:
            mask = is_hidden(call.values["mask"])
            masks.append(np.broadcast_to(mask, (*call.values["q"].shape[:3], mask.shape[3])))
        joined["mask"] = np.concatenate(masks, axis=2)
    return joined


def _joined_over_calls(calls: list[TappedCall], name: str, total: int, fill: float) -> np.ndarray:
    """Join the values of queries and keys over calls; `fill` for keys that a call did not have."""
    first = calls[0].values
    dtype = np.dtype(bool)
    if name != "mask":
        dtype = first[name].dtype
    with_heads = name
    if "q" in first:
        with_heads = "q"  # a mask may be the same for all heads
    batch, heads = first[with_heads].shape[:2]
    joined = np.full((batch, heads, total, total), fill, dtype)
    for call in calls:
        start = call.past or 0
        stop = start + call.values["input"].shape[1]
        x = call.values.get(name)
        if x is None:  # one token without a mask, which attends to all keys
            joined[:, :, start:stop, call.first_key : stop] = False
            continue
        if name == "mask":
            x = is_hidden(x)
        joined[:, :, start:stop, call.first_key : stop] = x[..., : stop - call.first_key]
    return joined


def _cache(call: TappedCall, joined: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    """Return all keys or values that a call attended to; those that its cache dropped are
    unchanged.
    """
    cached = call.values[f"cache.{CACHED_PARTS[name]}"]
    if not call.first_key:
        return cached
    dropped = joined[name][:, :, : call.first_key].astype(cached.dtype)
    return np.concatenate([dropped, cached], axis=2)


def _taken(
    name: str, x: np.ndarray, rows: np.ndarray, tokens: np.ndarray, *, is_cross: bool
) -> np.ndarray:
    """Return some sequences and tokens of joined values."""
    if is_cross and name in OF_KEYS:
        return x[rows]
    if name == "positions":
        return _taken_positions(x, rows, tokens)
    x = np.take(x[rows], tokens, axis=TOKENS.get(name, 2))
    if name in ("attn_weights", "mask", "call_mask") and not is_cross:
        x = np.take(x, tokens, axis=3)
    return x


def _taken_caches(
    caches: Mapping[tuple[int, str], np.ndarray],
    rows: np.ndarray,
    tokens: np.ndarray,
    *,
    is_cross: bool,
) -> dict[tuple[int, str], np.ndarray]:
    """Return some sequences of cached keys and values, and of the tokens that each cache has."""
    taken = {}
    for step_and_part, cached in caches.items():
        of_rows = cached[rows]
        if not is_cross:
            of_rows = of_rows[:, :, tokens[tokens < cached.shape[2]]]
        taken[step_and_part] = of_rows
    return taken


def _taken_positions(x: np.ndarray, rows: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Return some sequences and tokens of positions, (B or 1, T) or (axes, B or 1, T)."""
    if x.shape[-2] > 1:
        x = np.take(x, rows, axis=-2)
    x = x[..., tokens]
    if x.ndim == 3 and len(x) == 1:
        return x[0]
    return x

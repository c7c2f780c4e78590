"""The calls of a tapped layer as one: prompt and steps joined, padding left out, stages by their
names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from mha_spec import AttentionSpec, DynamicScaling, InputError, LongRopeScaling, Rope
from parity.measure.core.case import Case
from parity.measure.core.problem import Problem
from parity.measure.core.trace import Reference
from parity.measure.core.weights import Weights, dtype_named
from parity.port.tapping.record import TappedCall, TappedLayer, is_hidden

TOKENS = {
    "input": 1,
    "value_input": 1,
    "q": 2,
    "k": 2,
    "v": 2,
    "context": 2,
    "output": 1,
    "segment_ids": 1,
}
"""The token axis along which values are joined."""

OF_KEYS = ("key_input", "value_input", "key_is_real", "k", "v")
"""Values without query tokens if keys come from another sequence: those of the first call apply to
all.
"""

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
class TappedCase(Case):
    """A case whose tokens have the positions of a recording.

    Attributes:
        places: positions of all tokens, (B or 1, T), or (axes, B or 1, T) with sections; by default
            0, 1, …
    """

    places: np.ndarray | None = field(default=None, compare=False)

    def first_tokens(self, count: int) -> Case:
        """Return the case with the first tokens only."""
        places = None if self.places is None else self.places[..., :count]
        return replace(super().first_tokens(count), places=places)

    def positions(self, step: int | None = None) -> np.ndarray:
        """Return the positions of all tokens, or of those of one call."""
        if self.places is None:
            places = np.arange(self.seq_len)[None]
            sections = None if self.spec.rope is None else self.spec.rope.sections
            places = places if sections is None else np.stack([places] * len(sections))
        else:
            places = self.places
        if step is None:
            return places
        start = sum(self.chunks[:step])
        return places[..., start : start + self.chunks[step]]


@dataclass(frozen=True)
class Sequences:
    """The recorded values of sequences with the same padding, from their first token.

    Attributes:
        rows: indices of the sequences in the batch.
        tokens: indices of the real tokens in the calls.
        chunks: number of real tokens of each call.
        values: recorded values of real tokens, joined over the calls, by the names of `VALUES`.
        caches: by call and name, the attended keys and values, if they differ from those of the
            calls.
    """

    rows: np.ndarray
    tokens: np.ndarray
    chunks: tuple[int, ...]
    values: dict[str, np.ndarray]
    caches: dict[tuple[int, str], np.ndarray]

    @property
    def is_cross(self) -> bool:
        """True if keys come from another sequence."""
        return "key_input" in self.values

    @property
    def places(self) -> np.ndarray:
        """The positions of the tokens of each sequence, (rows, T); 0, 1, … if they were not
        recorded.
        """
        positions = self.values.get("positions")
        if (
            positions is None
            or positions.ndim != 2
            or any(len(set(row)) < len(row) for row in positions.tolist())
        ):
            positions = np.arange(len(self.tokens))[None]
        return np.broadcast_to(positions, (len(self.rows), len(self.tokens)))

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
        return {name: x for name, x in self.values.items() if name not in NO_STAGES}

    @property
    def stages_by_step(self) -> dict[str, np.ndarray]:
        """The stages call by call, as the reference names them with a cache, and the cached
        values.
        """
        found: dict[str, np.ndarray] = {}
        length, stop = len(self.tokens), 0
        for step, chunk in enumerate(self.chunks):
            start, stop = stop, stop + chunk
            for name, x in self.stages.items():
                axis = TOKENS.get(name, 2)
                found[f"step{step}.{name}"] = np.take(x, np.arange(start, stop), axis)
            for name, part in (("k", "keys"), ("v", "values")):
                if name in self.values:
                    cached = self.caches.get((step, part), self.values[name][:, :, :stop])
                    shape = (*cached.shape[:2], length - cached.shape[2], cached.shape[3])
                    found[f"step{step}.cache.{part}"] = np.concatenate(
                        [cached, np.zeros(shape, cached.dtype)], 2
                    )
        return found

    def in_our_order(self, reference: Reference) -> Sequences:
        """Return the sequences with features of queries and keys in the order of the reference.

        Layers with latents that rotate interleaved pairs may leave them in halves. Scores are
        equal, because queries and keys have the same order.
        """
        spec, expected = reference.problem.spec, reference.accumulated["k"]
        q, k = (self.values.get(name) for name in "qk")
        if (
            spec.latent is None
            or spec.rope is None
            or spec.rope.pairs != "interleaved"
            or q is None
            or k is None
        ):
            return self
        if q.shape[-1] != spec.head_dim or k.shape != expected.shape:
            return self
        halves = Rope(rotary_dim=spec.latent.rope_dim, rotated="last")
        order = halves.pair_order(spec.head_dim)
        as_halves, as_pairs = (np.abs(x - expected).sum() for x in (k[..., order], k))
        if as_pairs <= as_halves:
            return self
        caches = {key: x[..., order] if key[1] == "keys" else x for key, x in self.caches.items()}
        return replace(
            self, values={**self.values, "q": q[..., order], "k": k[..., order]}, caches=caches
        )

    def unscaled(self, reference: Reference) -> Sequences:
        """Return the sequences with unscaled queries, if that is closer in size to the reference.

        Layers may scale them before the attention function. Whisper's do, and pass a scale of 1.
        """
        spec, expected, q = reference.problem.spec, reference.accumulated["q"], self.values.get("q")
        scale = spec.head_dim**-0.5 if spec.scale is None else spec.scale
        if q is None or not q.any():
            return self
        ratio = np.sqrt(np.mean(q.astype(np.float64) ** 2) / np.mean(expected**2))
        if abs(np.log(ratio / scale)) >= abs(np.log(ratio)):
            return self
        return replace(
            self, values={**self.values, "q": (q.astype(np.float64) / scale).astype(q.dtype)}
        )

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

        With `shared_kv` its keys and values are those of `source`, or the recorded ones.
        """
        x, inputs, segments = (
            self.values["input"],
            self._inputs(spec),
            self.values.get("segment_ids"),
        )
        if spec.shared_kv:
            inputs |= {name: (source or self).values[name] for name in ("k", "v")}
        dtype = x.dtype.name
        case = TappedCase(
            name,
            replace(spec, dropout=0.0, output_dropout=0.0),
            "recorded",
            batch=x.shape[0],
            seq_len=x.shape[1],
            seq_len_k=inputs["key"].shape[1] if self.is_cross else None,
            is_causal=is_causal,
            random_mask="mask" in inputs,
            places=self.values.get("positions"),
            segment_ids=None if segments is None else tuple(map(tuple, segments.tolist())),
        )
        held = {name: weight.astype(dtype_named(dtype)) for name, weight in weights.items()}
        return Problem(case, dtype, held, inputs)

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
            inputs["mask"] = np.broadcast_to(
                mask, (len(self.rows), spec.num_heads, *mask.shape[2:])
            )
        return inputs

    def problem_of_its_own(self, problem: Problem) -> Problem:
        """Return the sequences without other tokens."""
        length = len(self.tokens)
        case = replace(problem.case, seq_len=length, places=self.values.get("positions"))
        return replace(problem, case=case, inputs={"query": problem.inputs["query"][:, :length]})

    def problem_by_step(self, problem: Problem) -> Problem:
        """Return the problem call by call, with a cache."""
        case = replace(problem.case, is_causal=False, chunks=self.chunks, capacity=len(self.tokens))
        return replace(problem, case=case)

    def without(self, name: str) -> Sequences:
        """Return the sequences without one of the values."""
        return replace(self, values={each: x for each, x in self.values.items() if each != name})

    @property
    def prompt(self) -> Sequences:
        """The first call alone."""
        tokens = np.arange(self.chunks[0])
        rows = np.arange(len(self.rows))
        values = {
            name: _taken(name, x, rows, tokens, is_cross=self.is_cross)
            for name, x in self.values.items()
        }
        return Sequences(self.rows, self.tokens[tokens], self.chunks[:1], values, {})

    def must_be_stepped(self, spec: AttentionSpec) -> bool:
        """Return True if all tokens at once give other results than call by call."""
        if self.is_cross:
            return False
        scaling = None if spec.rope is None else spec.rope.scaling
        return bool(self.caches) or isinstance(scaling, DynamicScaling | LongRopeScaling)


def sequences_of(layer: TappedLayer) -> list[Sequences]:
    """Return the recorded sequences of a layer, prompt by prompt; those with the same padding
    together.

    Raises:
        ValueError: if a call does not follow the one before it, or nothing can be compared.
    """
    if not any("input" in call.values and "output" in call.values for call in layer.calls):
        raise InputError(
            layer.name, "be called while it is tapped", f"{len(layer.calls)} calls with an output"
        )
    return [each for of_prompt in sequences_by_prompt(layer) for each in of_prompt]


def sequences_by_prompt(layer: TappedLayer) -> list[list[Sequences]]:
    """Return the recorded sequences, those of each prompt and its steps together: all sequences of
    a batch.

    Raises:
        ValueError: if a call does not follow the one before it.
    """
    return [list(_by_padding(calls)) for calls in _runs(layer)]


def _runs(layer: TappedLayer) -> list[list[TappedCall]]:
    """Return the calls of each prompt and its steps."""
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
                    layer.name, "attend to one sequence from the first token on", "another one"
                )
    return runs


def _by_padding(calls: list[TappedCall]) -> Iterator[Sequences]:
    batch = calls[0].values["input"].shape[0]
    lengths = [call.values["input"].shape[1] for call in calls]
    is_real = np.concatenate(
        [
            call.values.get("is_real", np.ones((batch, length), bool))
            for call, length in zip(calls, lengths, strict=True)
        ],
        axis=1,
    )
    joined = dict(_joined(calls, sum(lengths)))
    caches = {
        (step, part): _cache(call, joined, name)
        for step, call in enumerate(calls)
        for name, part in (("k", "keys"), ("v", "values"))
        if f"cache.{part}" in call.values
    }
    patterns, which = np.unique(is_real, axis=0, return_inverse=True)
    for number in np.argsort(
        -patterns.sum(axis=1), kind="stable"
    ):  # those without padding show more, and come first
        pattern = patterns[number]
        rows, tokens = np.flatnonzero(which.reshape(-1) == number), np.flatnonzero(pattern)
        if not tokens.size:
            continue
        stops = np.cumsum([0, *lengths])
        chunks = tuple(int(pattern[start:stop].sum()) for start, stop in pairwise(stops))
        is_cross = "key_input" in joined
        values = {
            name: _taken(name, x, rows, tokens, is_cross=is_cross) for name, x in joined.items()
        }
        own = {
            key: x[rows] if is_cross else x[rows][:, :, tokens[tokens < x.shape[2]]]
            for key, x in caches.items()
        }
        yield Sequences(rows, tokens, chunks, values, own)


def _joined(calls: list[TappedCall], total: int) -> Iterator[tuple[str, np.ndarray]]:
    """Return the values of all calls, as one array each; values of keys and queries have a place
    for every token.
    """
    is_cross = "key_input" in calls[0].values

    def in_all(name: str) -> bool:
        return all(name in call.values for call in calls)

    for name, axis in TOKENS.items():
        if in_all(name) and not (is_cross and name in OF_KEYS):
            yield name, np.concatenate([call.values[name] for call in calls], axis=axis)
    if in_all("positions"):
        batch = max(call.values["positions"].shape[-2] for call in calls)
        parts = [call.values["positions"] for call in calls]
        parts = [np.broadcast_to(x, (*x.shape[:-2], batch, x.shape[-1])) for x in parts]
        yield "positions", np.concatenate(parts, axis=-1)
    if is_cross:
        yield from _joined_of_keys(calls)
        return
    if len(calls) == 1 and in_all("call_mask"):
        yield "call_mask", calls[0].values["call_mask"]
    if in_all("attn_weights"):
        yield "attn_weights", _placed(calls, "attn_weights", total, 0)
    if all(
        "mask" in call.values or call.values["input"].shape[1] == 1 for call in calls
    ) and in_all("q"):
        yield "mask", _placed(calls, "mask", total, True)


def _joined_of_keys(calls: list[TappedCall]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the values of a layer whose keys come from another sequence, once."""
    first = calls[0].values
    yield from ((name, first[name]) for name in OF_KEYS if name in first)
    if all("attn_weights" in call.values for call in calls):
        yield (
            "attn_weights",
            np.concatenate([call.values["attn_weights"] for call in calls], axis=2),
        )
    if all("mask" in call.values and "q" in call.values for call in calls):
        masks = [is_hidden(call.values["mask"]) for call in calls]
        shapes = [
            (*call.values["q"].shape[:3], mask.shape[3])
            for call, mask in zip(calls, masks, strict=True)
        ]
        yield "mask", np.concatenate(list(map(np.broadcast_to, masks, shapes)), axis=2)


def _placed(calls: list[TappedCall], name: str, total: int, fill: float) -> np.ndarray:
    """Join the values of queries and keys over calls; `fill` for keys that a call did not have."""
    first = calls[0].values
    batch, heads = first["q" if "q" in first else name].shape[:2]
    dtype = np.dtype(bool) if name == "mask" else first[name].dtype
    found = np.full((batch, heads, total, total), fill, dtype)
    for call in calls:
        start = call.past or 0
        stop = start + call.values["input"].shape[1]
        x = call.values.get(name)
        if x is None:  # one token without a mask, which attends to all keys
            found[:, :, start:stop, call.first_key : stop] = False
            continue
        x = is_hidden(x) if name == "mask" else x
        found[:, :, start:stop, call.first_key : stop] = x[..., : stop - call.first_key]
    return found


def _cache(call: TappedCall, joined: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    """Return all keys or values that a call attended to; those that its cache dropped are
    unchanged.
    """
    cached = call.values["cache.keys" if name == "k" else "cache.values"]
    if not call.first_key:
        return cached
    return np.concatenate(
        [joined[name][:, :, : call.first_key].astype(cached.dtype), cached], axis=2
    )


def _taken(
    name: str, x: np.ndarray, rows: np.ndarray, tokens: np.ndarray, *, is_cross: bool
) -> np.ndarray:
    """Return some sequences and tokens of joined values."""
    if is_cross and name in OF_KEYS:
        return x[rows]
    if name == "positions":
        x = x if x.shape[-2] == 1 else np.take(x, rows, axis=-2)
        x = x[..., tokens]
        return x[0] if x.ndim == 3 and len(x) == 1 else x
    x = np.take(x[rows], tokens, axis=TOKENS.get(name, 2))
    return (
        np.take(x, tokens, axis=3)
        if name in ("attn_weights", "mask", "call_mask") and not is_cross
        else x
    )

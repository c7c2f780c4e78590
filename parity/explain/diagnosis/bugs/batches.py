"""Bugs in the batch axis: attention across sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from parity.explain.diagnosis.bugs.families import SEQUENCES
from parity.explain.diagnosis.bugs.record import Edit, Override
from parity.explain.diagnosis.sample import sample_of
from parity.measure.core.case import Case
from parity.measure.core.reference import Layer
from parity.measure.core.stages import Values


def batches(case: Case) -> Iterator[Edit]:
    """Compute the context of the wrong tokens; weights of the expected shape are right."""
    spec = case.spec
    bug = SEQUENCES.seen_in("context", "module.output")
    is_by_place = spec.has_distance_bias or spec.window_size or spec.chunk_size or case.window_size
    if case.is_cached or case.not_finite or case.bias or case.has_own_mask or is_by_place:
        return
    is_square = case.key_len == case.seq_len
    # With as many sequences as tokens, even a padding mask fits.
    fits = case.key_padding_lengths is None or (
        case.batch == case.seq_len and max(case.key_padding_lengths) == case.seq_len
    )
    if is_square and fits and spec.rope is None and case.seq_len > 1:
        yield bug(
            "batch-as-tokens",
            "batch and tokens are exchanged: each token attends to the tokens at its position in "
            "the other sequences",
            {"context": _exchanged()},
        )
        if case.batch == case.seq_len:
            yield replace(
                bug(
                    "batch-as-tokens",
                    "batch and tokens are exchanged, also in the attention weights",
                    {"attn_weights": _weights_exchanged, "context": _context_exchanged},
                ),
                stages=("attn_weights",),
            )
    if case.batch > 1 and (is_square or not case.is_causal):
        yield bug(
            "sequences-flattened",
            "the sequences of a batch are joined: tokens attend to other sequences",
            {"context": _flattened(case)},
        )


def _attending(
    entered: Callable[[Layer, np.ndarray], np.ndarray],
    left: Callable[[np.ndarray, tuple[int, ...]], np.ndarray],
    mask: Callable[[Layer], np.ndarray],
) -> Override:
    """Attend in other axes: `entered` moves heads into them, `left` moves the context back."""

    def context(layer: Layer, _: Override, values: Values) -> dict[str, np.ndarray]:
        stages = {name: entered(layer, values[name]) for name in "qkv"}
        stages |= layer.scores(stages)
        stages["mask"] = np.zeros(stages["scores"].shape, bool) | mask(layer)
        stages |= layer.attn_weights(stages)
        return {"context": left(layer.weighed(stages)["context"], values["q"].shape)}

    return context


def _as_sequences(layer: Layer, x: np.ndarray) -> np.ndarray:
    """Return the attending tokens as sequences."""
    sample = sample_of(layer.problem)
    rows = slice(None) if sample is None else sample.rows
    return (x[:, :, rows] if x.shape[2] == layer.problem.case.seq_len else x).swapaxes(0, 2)


def _mask_of_sequences(layer: Layer) -> np.ndarray:
    """Return the mask of sequences that are taken for tokens, (T or 1, 1, B or 1, B)."""
    case, b = layer.problem.case, np.arange(layer.problem.case.batch)
    hidden = np.zeros((1, 1, 1, case.batch), bool)
    if case.is_causal:
        hidden = hidden | layer.is_later(b[:, None], b)
    if case.key_padding_lengths is not None:
        hidden = hidden | layer.is_padding(
            b, np.array(case.key_padding_lengths)[:, None, None, None]
        )
    return hidden


def _exchanged() -> Override:
    return _attending(_as_sequences, lambda x, _: x.swapaxes(0, 2), _mask_of_sequences)


def _weights_exchanged(layer: Any, _: Override, values: Values) -> dict[str, np.ndarray]:
    """Return the weights of tokens as sequences, (T, N, B, B), where B and T are equal."""
    if "q" not in values or "k" not in values:
        raise ValueError("another bug in the softmax passes scores alone")
    stages = {name: _as_sequences(layer, values[name]) for name in "qk"}
    stages |= layer.scores(stages)
    stages["mask"] = np.zeros(stages["scores"].shape, bool) | _mask_of_sequences(layer)
    with layer.overriding(attn_weights=partial(Layer.attn_weights, layer)):
        return layer.attn_weights(stages)


def _context_exchanged(layer: Any, original: Override, values: Values) -> dict[str, np.ndarray]:
    """Return the context of exchanged axes, whose weights are not exchanged again."""
    with layer.overriding(attn_weights=partial(Layer.attn_weights, layer)):
        return _exchanged()(layer, original, values)


def _flattened(case: Case) -> Override:
    count, lengths = case.batch * case.key_len, case.key_padding_lengths

    def in_a_row(_: Layer, x: np.ndarray) -> np.ndarray:
        return x.transpose(1, 0, 2, 3).reshape(1, x.shape[1], -1, x.shape[3])

    def in_sequences(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        return x.reshape(shape[1], shape[0], shape[2], -1).transpose(1, 0, 2, 3)

    def mask(layer: Layer) -> np.ndarray:
        places, hidden = np.arange(count), np.zeros((1, count), bool)
        if lengths is not None:
            hidden = layer.is_padding(places % case.key_len, np.repeat(lengths, case.key_len))[None]
        sample = sample_of(layer.problem)
        rows = (
            places
            if sample is None
            else (np.arange(case.batch)[:, None] * case.seq_len + sample.rows).ravel()
        )
        return hidden | layer.is_later(rows[:, None], places) if case.is_causal else hidden

    return _attending(in_a_row, in_sequences, mask)

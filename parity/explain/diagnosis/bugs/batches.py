"""Bugs in the batch axis: attention across sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
    if case.is_cached or case.not_finite or case.bias or case.has_own_mask or _has_distances(case):
        return
    bug = SEQUENCES.shown_in("context", "module.output")
    is_square = case.key_len == case.seq_len
    has_positions = case.spec.rope is not None
    if is_square and _padding_fits_exchanged(case) and not has_positions and case.seq_len > 1:
        yield bug(
            "batch-as-tokens",
            "batch and tokens are exchanged: each token attends to the tokens at its position in "
            "the other sequences",
            {"context": partial(_attended, EXCHANGED)},
        )
        if case.batch == case.seq_len:
            yield SEQUENCES.shown_in("attn_weights")(
                "batch-as-tokens",
                "batch and tokens are exchanged, also in the attention weights",
                {"attn_weights": _weights_exchanged, "context": _context_exchanged},
            )
    if case.batch > 1 and (is_square or not case.is_causal):
        yield bug(
            "sequences-flattened",
            "the sequences of a batch are joined: tokens attend to other sequences",
            {"context": partial(_attended, JOINED)},
        )


def _has_distances(case: Case) -> bool:
    """Return True if scores or masks depend on the distance of tokens."""
    spec = case.spec
    has_reach = bool(spec.window_size or spec.chunk_size or case.window_size)
    return has_reach or spec.has_distance_bias


def _padding_fits_exchanged(case: Case) -> bool:
    """Return True if a padding mask has the shape for exchanged axes, or there is none."""
    if case.key_padding_lengths is None:
        return True
    # With as many sequences as tokens, even a padding mask fits.
    return case.batch == case.seq_len and max(case.key_padding_lengths) == case.seq_len


@dataclass(frozen=True)
class _WrongAxes:
    """Axes in which tokens attend wrongly.

    Attributes:
        enter: moves heads (B, N, T, H) of a layer into them.
        leave: moves the context back, to a shape (B, N, T, H).
        mask: returns the hidden cells of a layer in them.
    """

    enter: Callable[[Layer, np.ndarray], np.ndarray]
    leave: Callable[[np.ndarray, tuple[int, ...]], np.ndarray]
    mask: Callable[[Layer], np.ndarray]


def _attended(axes: _WrongAxes, layer: Layer, _: Override, values: Values) -> dict[str, np.ndarray]:
    """Attend in other axes."""
    stages = {name: axes.enter(layer, values[name]) for name in "qkv"}
    stages |= layer.scores(stages)
    stages["mask"] = np.zeros(stages["scores"].shape, bool) | axes.mask(layer)
    stages |= layer.attn_weights(stages)
    return {"context": axes.leave(layer.weighed(stages)["context"], values["q"].shape)}


# ---- Batch and tokens exchanged ------------------------------------------------------------------


def _as_sequences(layer: Layer, x: np.ndarray) -> np.ndarray:
    """Return the attending tokens as sequences."""
    sample = sample_of(layer.problem)
    has_all_tokens = x.shape[2] == layer.problem.case.seq_len
    if sample is not None and has_all_tokens:
        x = x[:, :, sample.rows]
    return x.swapaxes(0, 2)


def _as_tokens(x: np.ndarray, _: tuple[int, ...]) -> np.ndarray:
    return x.swapaxes(0, 2)


def _mask_of_sequences(layer: Layer) -> np.ndarray:
    """Return the mask of sequences that are taken for tokens, (T or 1, 1, B or 1, B)."""
    case = layer.problem.case
    sequences = np.arange(case.batch)
    hidden = np.zeros((1, 1, 1, case.batch), bool)
    if case.is_causal:
        hidden = hidden | layer.is_later(sequences[:, None], sequences)
    if case.key_padding_lengths is not None:
        lengths = np.array(case.key_padding_lengths)[:, None, None, None]
        hidden = hidden | layer.is_padding(sequences, lengths)
    return hidden


EXCHANGED = _WrongAxes(_as_sequences, _as_tokens, _mask_of_sequences)


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
        return _attended(EXCHANGED, layer, original, values)


# ---- Sequences joined ----------------------------------------------------------------------------


def _in_a_row(_: Layer, x: np.ndarray) -> np.ndarray:
    """Return the tokens of all sequences as one sequence, (1, N, B * T, H)."""
    return x.transpose(1, 0, 2, 3).reshape(1, x.shape[1], -1, x.shape[3])


def _in_sequences(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    batch, num_heads, num_tokens, _ = shape
    return x.reshape(num_heads, batch, num_tokens, -1).transpose(1, 0, 2, 3)


def _mask_of_row(layer: Layer) -> np.ndarray:
    """Return the mask of joined sequences, (1 or B * T, B * S)."""
    case = layer.problem.case
    keys = np.arange(case.batch * case.key_len)
    hidden = np.zeros((1, len(keys)), bool)
    if case.key_padding_lengths is not None:
        lengths = np.repeat(case.key_padding_lengths, case.key_len)
        hidden = layer.is_padding(keys % case.key_len, lengths)[None]
    if not case.is_causal:
        return hidden
    queries = keys
    sample = sample_of(layer.problem)
    if sample is not None:
        first_tokens = np.arange(case.batch)[:, None] * case.seq_len
        queries = (first_tokens + sample.rows).ravel()
    return hidden | layer.is_later(queries[:, None], keys)


JOINED = _WrongAxes(_in_a_row, _in_sequences, _mask_of_row)

"""Two recordings compared with each other: the distance of the same tokens, layer by layer, and
where it begins to grow.

Without weights there is no reference and no budget, so no tolerance is known. But a layer whose
inputs nearly agree and whose outputs do not explains what follows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from mha_spec import InputError
from parity.explain.diagnosis.tapped import OF_KEYS, Sequences, sequences_by_prompt
from parity.measure.core.compare import norms_of, unit_of_rounding
from parity.measure.core.records import JsonRecord
from parity.port.tapping.record import Tapped, TappedLayer

GROWTH = 8.0
"""The factor by which the outputs of a layer may be further apart than its inputs, or than a unit
of rounding if that is more.

Between equivalent models, seven families with random weights, it was 2.7 at most: a prompt at once
and in steps, eager attention and torch's, float32 and bfloat16.
"""

INPUTS = ("input", "key_input")
"""The inputs of a layer."""

STAGES = ("mask", "q", "k", "v", "attn_weights", "context", "output")


@dataclass(frozen=True)
class LayerDifference(JsonRecord):
    """The distance of two recordings of a layer.

    Attributes:
        layer: a title, `layer 17 (sliding_attention)`.
        names: names of the module in both recordings.
        tokens: number of tokens, over all sequences, that both have.
        errors: by stage, and for `input` and `key_input`: root mean square of the difference,
            relative to the root mean square of the first. Infinite if shapes differ.
        grows: the stages that are further apart than the input explains, in order.
    """

    layer: str
    names: tuple[str, str]
    tokens: int
    errors: dict[str, float]
    grows: tuple[str, ...]

    IN_JSON = ("*", "stage")

    @property
    def is_culprit(self) -> bool:
        """True if the outputs differ for nearly equal inputs, or other keys are hidden."""
        return "output" in self.grows or "mask" in self.grows

    @property
    def stage(self) -> str:
        """The first such stage; empty if there is none."""
        if not self.is_culprit:
            return ""
        return self.grows[0]

    def __str__(self) -> str:
        errors = ", ".join(f"{name} {error:.1e}" for name, error in self.errors.items())
        return f"{self.layer}: {errors}"


@dataclass(frozen=True)
class TapDifference(JsonRecord):
    """Two recordings, compared with each other.

    Attributes:
        layers: the layers of both, in the order of the first.
        alone: names of the modules that one recording lacks, or never called.
        unit: unit of rounding of the coarser of their dtypes.
        left_out: number of common tokens that were not compared, because the recordings generated
            different tokens before them.
    """

    layers: list[LayerDifference]
    alone: list[str]
    unit: float
    left_out: int = 0

    IN_JSON = ("agrees", "alone", "left_out", "layers")

    @property
    def differs_before(self) -> bool:
        """True if the inputs of the first layer already differ."""
        return bool(self.layers) and self.layers[0].errors["input"] > GROWTH * self.unit

    @property
    def first(self) -> LayerDifference | None:
        """The first layer that explains the difference."""
        for layer in self.layers:
            if layer.is_culprit:
                return layer
        return None

    @property
    def agrees(self) -> bool:
        """True if the inputs agree and no layer makes a difference grow."""
        if not self.layers or self.left_out:
            return False
        return self.first is None and not self.differs_before

    def __str__(self) -> str:
        lines = []
        if self.alone:
            lines.append(f"only one of them called {', '.join(self.alone)}")
        if self.left_out:
            lines.append(
                f"{self.left_out} tokens were not compared: from there on, the recordings have "
                f"different tokens"
            )
        if self.differs_before:
            error = self.layers[0].errors["input"]
            lines.append(
                f"the input of {self.layers[0].layer} already differs ({error:.1e}): the cause "
                f"lies before it"
            )
        first = self.first
        if first is not None:
            lines.append(
                f"{first.layer}, stage {first.stage}: {first.errors[first.stage]:.1e} apart, where "
                f"its input is {first.errors['input']:.1e} apart"
            )
        elif not self.differs_before:
            lines.append(f"none of the {len(self.layers)} layers increases the difference")
        return "\n".join(lines)


def compare_taps(one: Tapped, other: Tapped) -> TapDifference:
    """Compare two recordings, layer by layer, each token with the token of the other at the same
    position.

    A prompt in one call may be compared with the same prompt in steps. Layers are matched by their
    index, prompts by their order.

    Args:
        one, other: recordings of the same tokens.

    Raises:
        ValueError: if they have no layer or no token in common, batches differ, or the calls of a
            layer do not follow each other.

    Example:
        >>> from transformers import LlamaConfig, LlamaModel
        >>> sizes = {"vocab_size": 16, "hidden_size": 32, "intermediate_size": 16}
        >>> heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1}
        >>> model = LlamaModel(LlamaConfig(**sizes, **heads)).eval()
        >>> with torch.no_grad(), parity.tap(model) as tapped:
        ...     _ = model(torch.arange(10).reshape(2, 5))
        >>> parity.compare_taps(tapped, tapped).agrees
        True
    """
    pairs, alone = _pairs(one, other)
    if not pairs:
        raise InputError("taps", "have layers in common that both called", "none")
    units = []
    for pair in pairs:
        for layer in pair:
            units.append(unit_of_rounding(layer.calls[0].values["input"].dtype.name))
    unit = max(units)
    num_common, left_out = _num_common_tokens(*pairs[0], GROWTH * unit)
    differences = [_difference(*pair, unit, num_common) for pair in pairs]
    return TapDifference(differences, alone, unit, left_out)


def _pairs(one: Tapped, other: Tapped) -> tuple[list[tuple[TappedLayer, TappedLayer]], list[str]]:
    """Return the layers that both called, and the names of those that only one of them called."""
    first, second = _called_layers(one), _called_layers(other)
    pairs = []
    alone = []
    for number, layer in first.items():
        if number in second:
            pairs.append((layer, second[number]))
        else:
            alone.append(layer.name)
    for number, layer in second.items():
        if number not in first:
            alone.append(layer.name)
    return pairs, alone


def _called_layers(tapped: Tapped) -> dict[tuple[int, int], TappedLayer]:
    """Return the layers that were called, by their index and their number among the layers of one
    index: encoders and decoders may have the same.
    """
    layers: dict[tuple[int, int], TappedLayer] = {}
    counts: Counter[int] = Counter()
    for layer in tapped.layers:
        number = (layer.index, counts[layer.index])
        counts[layer.index] += 1
        if any({"input", "output"} <= call.values.keys() for call in layer.calls):
            layers[number] = layer
    return layers


SequenceKey = tuple[int, int]
"""A prompt, and a sequence of its batch."""


def _num_common_tokens(
    one: TappedLayer, other: TappedLayer, allowed: float
) -> tuple[dict[SequenceKey, int], int]:
    """Return the number of common tokens of each sequence in the first layer, and of the tokens
    after a different one.

    All are compared if the first one already differs, because then nothing can be learned from
    leaving some out.
    """
    num_common: dict[SequenceKey, int] = {}
    left_out = 0
    for pair in _common_sequences(one, other):
        x, y = pair.tokens("input")
        x, y = x.astype(np.float64), y.astype(np.float64)
        if x.shape != y.shape or not x.size:
            continue
        distance = np.sqrt(np.mean((x - y) ** 2, axis=1))
        is_other = distance > allowed * np.sqrt(np.mean(x**2))
        if is_other.any() and not is_other[0]:
            first_other = int(is_other.argmax())
            num_common[pair.key] = first_other
            left_out += len(is_other) - first_other
    return num_common, left_out


def _difference(
    one: TappedLayer, other: TappedLayer, unit: float, num_common: dict[SequenceKey, int]
) -> LayerDifference:
    squares: dict[str, list[_Squares]] = {}
    num_tokens = 0
    for whole_pair in _common_sequences(one, other):
        pair = whole_pair.first_tokens(num_common.get(whole_pair.key))
        if not len(pair.positions_in_one):
            continue
        num_tokens += len(pair.positions_in_one)
        for name in (*INPUTS, *STAGES):
            if name in pair.one.values and name in pair.other.values:
                squares.setdefault(name, []).append(_squares(*pair.tokens(name)))
    if not num_tokens:
        raise InputError("taps", "have tokens at the same positions", f"none of {one.name}")
    errors = {name: _relative_error(of_name) for name, of_name in squares.items()}
    allowed = unit
    for name in INPUTS:
        allowed = max(allowed, errors.get(name, 0.0))
    grows = []
    for name, error in errors.items():
        limit = GROWTH * allowed
        if name == "mask":
            limit = 0.0  # no other key may be hidden
        if name not in INPUTS and error > limit:
            grows.append(name)
    return LayerDifference(one.title, (one.name, other.name), num_tokens, errors, tuple(grows))


@dataclass(frozen=True)
class _Row:
    """One of the sequences that were recorded together."""

    sequences: Sequences
    row: int

    @property
    def values(self) -> dict[str, np.ndarray]:
        return self.sequences.values

    @property
    def positions(self) -> np.ndarray:
        return self.sequences.token_positions[self.row]

    def tokens(self, name: str, positions: np.ndarray) -> np.ndarray:
        """Some of its tokens."""
        x = self.values[name][self.row]
        if self.sequences.is_cross and name in OF_KEYS:
            return x
        if name in ("mask", "attn_weights"):
            x = x[:, positions]
            if self.sequences.is_cross:
                return x
            return x[:, :, positions]
        if x.ndim == 3:
            return np.take(x, positions, axis=1)
        return np.take(x, positions, axis=0)


@dataclass(frozen=True)
class _CommonSequence:
    """A sequence that both recordings have.

    Attributes:
        key: its prompt and its number in the batch.
        one, other: the sequence in each recording.
        positions_in_one, positions_in_other: the positions of the common tokens in each.
    """

    key: SequenceKey
    one: _Row
    other: _Row
    positions_in_one: np.ndarray
    positions_in_other: np.ndarray

    def tokens(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the values of the common tokens in both."""
        return (
            self.one.tokens(name, self.positions_in_one),
            self.other.tokens(name, self.positions_in_other),
        )

    def first_tokens(self, count: int | None) -> _CommonSequence:
        """Return the sequence with the first of the common tokens; with all by default."""
        return replace(
            self,
            positions_in_one=self.positions_in_one[:count],
            positions_in_other=self.positions_in_other[:count],
        )


def _common_sequences(one: TappedLayer, other: TappedLayer) -> Iterator[_CommonSequence]:
    """Yield each sequence that both have."""
    prompts = zip(sequences_by_prompt(one), sequences_by_prompt(other), strict=False)
    for prompt, (of_one, of_other) in enumerate(prompts):
        rows_of_one, rows_of_other = _rows(of_one), _rows(of_other)
        if rows_of_one.keys() != rows_of_other.keys():
            sizes = f"{len(rows_of_one)} and {len(rows_of_other)}"
            raise InputError("taps", "have batches of one size", sizes)
        for number, row in rows_of_one.items():
            other_row = rows_of_other[number]
            _, positions, other_positions = np.intersect1d(
                row.positions, other_row.positions, return_indices=True
            )
            yield _CommonSequence((prompt, number), row, other_row, positions, other_positions)


def _rows(sequences: list[Sequences]) -> dict[int, _Row]:
    """Return the sequences of a prompt by their number in the batch."""
    rows = {}
    for with_same_padding in sequences:
        for index, number in enumerate(with_same_padding.rows):
            rows[int(number)] = _Row(with_same_padding, index)
    return rows


@dataclass(frozen=True)
class _Squares:
    """Mean squares of a difference, and of the first of the two, over a number of values."""

    difference: float
    size: float
    num_values: int


def _squares(x: np.ndarray, y: np.ndarray) -> _Squares:
    if x.shape != y.shape:
        return _Squares(np.inf, 1.0, 1)
    x, y = x.astype(np.float64), y.astype(np.float64)
    every_value = np.ones(x.shape, bool)
    with np.errstate(invalid="ignore"):
        difference = np.where(np.isnan(x) & np.isnan(y), 0.0, x - y)
    difference_rms = norms_of(np.nan_to_num(difference, nan=np.inf), every_value)["rms"]
    size_rms = norms_of(np.nan_to_num(x), every_value)["rms"]
    return _Squares(difference_rms**2, size_rms**2, x.size)


def _relative_error(parts: list[_Squares]) -> float:
    """Return the root mean square of a difference over the root mean square of the first of the
    two.
    """
    difference, size = 0.0, 0.0
    for part in parts:
        difference += part.difference * part.num_values
        size += part.size * part.num_values
    if difference == 0.0:
        return 0.0
    if size == 0.0:
        return float("inf")
    return float(np.sqrt(difference / size))

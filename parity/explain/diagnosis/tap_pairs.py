"""Two recordings compared with each other: the distance of the same tokens, layer by layer, and
where it begins to grow.

Without weights there is no reference and no budget, so no tolerance is known. But a layer whose
inputs nearly agree and whose outputs do not explains what follows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

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

GIVEN = ("input", "key_input")
"""The inputs of a layer."""

STAGES = ("mask", "q", "k", "v", "attn_weights", "context", "output")


@dataclass(frozen=True)
class LayerDifference(JsonRecord):
    """The distance of two recordings of a layer.

    Attributes:
        layer: a title, `layer 17 (sliding_attention)`.
        names: of the modules.
        tokens: number of tokens, over all sequences, that both have.
        errors: by stage, and for `input` and `key_input`: root mean square of the difference,
            relative to that of the first. Infinite if shapes differ.
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
        return self.grows[0] if self.is_culprit else ""

    def __str__(self) -> str:
        errors = ", ".join(f"{name} {error:.1e}" for name, error in self.errors.items())
        return f"{self.layer}: {errors}"


@dataclass(frozen=True)
class TapDifference(JsonRecord):
    """Two recordings, compared with each other.

    Attributes:
        layers: the layers of both, in the order of the first.
        alone: names of the modules that one recording lacks, or never called.
        unit: of rounding, of the coarser of their dtypes.
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
        return next((layer for layer in self.layers if layer.is_culprit), None)

    @property
    def agrees(self) -> bool:
        """True if the inputs agree and no layer makes a difference grow."""
        return (
            bool(self.layers)
            and self.first is None
            and not self.differs_before
            and not self.left_out
        )

    def __str__(self) -> str:
        lines = [f"only one of them called {', '.join(self.alone)}"] if self.alone else []
        if self.left_out:
            lines.append(
                f"{self.left_out} tokens were left out: from there on the two were given other "
                f"tokens"
            )
        if self.differs_before:
            error = self.layers[0].errors["input"]
            lines.append(
                f"what {self.layers[0].layer} is given differs already ({error:.1e}): the cause "
                f"lies before it"
            )
        if self.first is not None:
            error, given = self.first.errors[self.first.stage], self.first.errors["input"]
            lines.append(
                f"{self.first.layer}, stage {self.first.stage}: {error:.1e} apart, where its "
                f"input is {given:.1e} apart"
            )
        elif not self.differs_before:
            lines.append(
                f"{len(self.layers)} layers leave nothing further apart than they were given it"
            )
        return "\n".join(lines)


def compare_taps(one: Tapped, other: Tapped) -> TapDifference:
    """Compare two recordings, layer by layer, each token with the token of the other at the same
    position.

    A prompt at once may be compared with a prompt in steps. Layers are matched by their index,
    prompts by their order.

    Args:
        one, other: recordings of the same tokens.

    Raises:
        ValueError: if they have no layer or no token in common, batches differ, or the calls of a
            layer do not follow each other.
    """
    pairs, alone = _pairs(one, other)
    if not pairs:
        raise InputError("taps", "have layers in common that both called", "none")
    dtypes = {each.calls[0].values["input"].dtype.name for pair in pairs for each in pair}
    unit = max(map(unit_of_rounding, dtypes))
    same, left_out = _same_tokens(*pairs[0], GROWTH * unit)
    return TapDifference([_difference(*pair, unit, same) for pair in pairs], alone, unit, left_out)


def _pairs(one: Tapped, other: Tapped) -> tuple[list[tuple[TappedLayer, TappedLayer]], list[str]]:
    """Return the layers of the same index; if several have one index, as in encoders and decoders,
    in their order.
    """
    keyed: list[dict[tuple[int, int], TappedLayer]] = []
    for tapped in (one, other):
        found: dict[tuple[int, int], TappedLayer] = {}
        counts: dict[int, int] = {}
        for layer in tapped.layers:
            number = counts[layer.index] = counts.get(layer.index, -1) + 1
            found[layer.index, number] = layer
        keyed.append(found)
    first, second = ({key: x for key, x in each.items() if _was_called(x)} for each in keyed)
    alone = [
        each[key].name
        for each in (first, second)
        for key in each
        if key not in first or key not in second
    ]
    return [(layer, second[key]) for key, layer in first.items() if key in second], alone


def _was_called(layer: TappedLayer) -> bool:
    return any({"input", "output"} <= call.values.keys() for call in layer.calls)


Which = tuple[int, int]
"""A prompt, and a sequence of its batch."""


def _same_tokens(
    one: TappedLayer, other: TappedLayer, allowed: float
) -> tuple[dict[Which, int], int]:
    """Return the number of common tokens of each sequence in the first layer, and of the tokens
    after a different one.

    All are compared if the first one already differs, because then nothing can be learned from
    leaving some out.
    """
    counts: dict[Which, int] = {}
    left_out = 0
    for which, a, b, places_a, places_b in _common(one, other):
        x, y = (
            a.tokens("input", places_a).astype(np.float64),
            b.tokens("input", places_b).astype(np.float64),
        )
        if x.shape == y.shape and x.size:
            away = np.sqrt(np.mean((x - y) ** 2, axis=1)) > allowed * np.sqrt(np.mean(x**2))
            if away.any() and not away[0]:
                counts[which] = int(away.argmax())
                left_out += len(away) - counts[which]
    return counts, left_out


def _difference(
    one: TappedLayer, other: TappedLayer, unit: float, same: dict[Which, int]
) -> LayerDifference:
    squares: dict[str, list[tuple[float, float, int]]] = {}
    count = 0
    for which, a, b, places_a, places_b in _common(one, other):
        places_a, places_b = places_a[: same.get(which)], places_b[: same.get(which)]
        count += len(places_a)
        for name in (*GIVEN, *STAGES):
            if name in a.values and name in b.values and len(places_a):
                found = _squares(a.tokens(name, places_a), b.tokens(name, places_b))
                squares.setdefault(name, []).append(found)
    if not count:
        raise InputError("taps", "have tokens at the same positions", f"none of {one.name}")
    errors = {name: _share(found) for name, found in squares.items()}
    allowed = GROWTH * max(*(errors.get(name, 0.0) for name in GIVEN), unit)
    grows = tuple(
        name
        for name in errors
        if name not in GIVEN and errors[name] > (0.0 if name == "mask" else allowed)
    )
    return LayerDifference(one.title, (one.name, other.name), count, errors, grows)


@dataclass(frozen=True)
class _Row:
    """One of the sequences that were recorded together."""

    sequences: Sequences
    row: int

    @property
    def values(self) -> dict[str, np.ndarray]:
        return self.sequences.values

    @property
    def places(self) -> np.ndarray:
        return self.sequences.places[self.row]

    def tokens(self, name: str, places: np.ndarray) -> np.ndarray:
        """Some of its tokens."""
        x = self.values[name][self.row]
        if self.sequences.is_cross and name in OF_KEYS:
            return x
        if name in ("mask", "attn_weights"):
            return x[:, places] if self.sequences.is_cross else x[:, places][:, :, places]
        return np.take(x, places, axis=1 if x.ndim == 3 else 0)


def _common(
    one: TappedLayer, other: TappedLayer
) -> Iterator[tuple[Which, _Row, _Row, np.ndarray, np.ndarray]]:
    """Yield each sequence that both have: its key, its place in each, and the places of the common
    tokens.
    """
    prompts = zip(sequences_by_prompt(one), sequences_by_prompt(other), strict=False)
    for prompt, both in enumerate(prompts):
        rows, others = (
            {int(row): _Row(each, place) for each in found for place, row in enumerate(each.rows)}
            for found in both
        )
        if rows.keys() != others.keys():
            raise InputError("taps", "have batches of one size", f"{len(rows)} and {len(others)}")
        for number, a in rows.items():
            b = others[number]
            _, places_a, places_b = np.intersect1d(a.places, b.places, return_indices=True)
            yield (prompt, number), a, b, places_a, places_b


def _squares(x: np.ndarray, y: np.ndarray) -> tuple[float, float, int]:
    """Return mean squares of a difference and of the first, and the number of values."""
    if x.shape != y.shape:
        return np.inf, 1.0, 1
    x, y = x.astype(np.float64), y.astype(np.float64)
    every = np.ones(x.shape, bool)
    with np.errstate(invalid="ignore"):
        away = np.where(np.isnan(x) & np.isnan(y), 0.0, x - y)
    return (
        norms_of(np.nan_to_num(away, nan=np.inf), every)["rms"] ** 2,
        norms_of(np.nan_to_num(x), every)["rms"] ** 2,
        x.size,
    )


def _share(found: list[tuple[float, float, int]]) -> float:
    away, size = (sum(each[part] * each[2] for each in found) for part in (0, 1))
    if away == 0.0:
        return 0.0
    return float(np.sqrt(away / size)) if size else float("inf")

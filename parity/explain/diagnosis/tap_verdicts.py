"""Verdicts on the layers of a recorded model, each compared by itself with the reference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from parity.explain.diagnosis.diagnose import Diagnosis
from parity.explain.diagnosis.findings import Line, excess, text_of
from parity.measure.core.compare import Comparison, first_difference
from parity.measure.core.records import JsonRecord
from parity.measure.core.stages import stage_named


@dataclass(frozen=True)
class LayerVerdict(JsonRecord):
    """The verdict on one layer: its outputs for its own inputs, compared with the float64
    reference.

    Attributes:
        layer: a title, such as `layer 17 (sliding_attention)` or `decoder layer 5
            (cross_attention)`.
        name: the name of its module.
        index: its number.
        comparisons: one for each recorded stage.
        diagnosis: diagnosis of a layer that differs.
        not_compared: the reason if the layer was not compared; empty if it was.
        left_out: the sequences that were not compared although others were, and why; empty if all
            were.
    """

    layer: str
    name: str
    index: int
    comparisons: list[Comparison] = field(default_factory=list)
    diagnosis: Diagnosis | None = None
    not_compared: str = ""
    left_out: str = ""

    IN_JSON = (
        "layer",
        "name",
        "index",
        "passed",
        "not_compared",
        "left_out",
        "comparisons",
        "diagnosis",
    )

    @property
    def difference(self) -> Comparison | None:
        """The first stage that differs, if one does."""
        return first_difference(self.comparisons)

    @property
    def passed(self) -> bool:
        """True if the layer was compared and every stage is within its budget."""
        return not self.not_compared and self.difference is None

    @property
    def has_gradients(self) -> bool:
        """True if gradients were compared."""
        return any(stage_named(comparison.stage).is_gradient for comparison in self.comparisons)

    def __str__(self) -> str:
        return text_of(self.lines())

    def lines(self, *, verbose: bool = False) -> Iterator[Line]:
        """Yield labels and texts, as `Diagnosis.lines` does."""
        difference = self.difference
        if self.not_compared:
            yield "Not compared", f"{self.layer}, because {self.not_compared}"
        elif difference is None:
            yield "", f"{self.layer}: ok"
        else:
            yield "First wrong layer", self.layer
            if self.diagnosis is None:
                yield (
                    "First wrong stage",
                    excess(difference.stage, difference.error, difference.worse_ratio),
                )
            else:
                yield from self.diagnosis.lines(verbose=verbose)


@dataclass(frozen=True)
class TapVerdict(JsonRecord):
    """The verdicts on all layers of a recording, each by itself."""

    layers: list[LayerVerdict]

    IN_JSON = ("passed", "layers")

    @property
    def wrong(self) -> list[LayerVerdict]:
        """The layers that are wrong by themselves."""
        return [layer for layer in self.layers if layer.difference is not None]

    @property
    def first(self) -> LayerVerdict | None:
        """The first of them."""
        return next(iter(self.wrong), None)

    @property
    def passed(self) -> bool:
        """True if some layer was compared and none is wrong."""
        return self.first is None and any(layer.passed for layer in self.layers)

    def __str__(self) -> str:
        return text_of(self.lines())

    def lines(self, *, verbose: bool = False) -> Iterator[Line]:
        """Yield labels and texts, as `Diagnosis.lines` does."""
        wrong = self.wrong
        for reason, layers in self._not_compared().items():
            yield "Not compared", f"{', '.join(layers)}, because {reason}"
        if wrong:
            yield from wrong[0].lines(verbose=verbose)
        if wrong[1:]:
            yield "Other wrong layers", ", ".join(layer.layer for layer in wrong[1:])
        compared = sum(not layer.not_compared for layer in self.layers)
        if not compared:
            yield "", "no layer was compared"
        elif not wrong:
            subject = "1 layer agrees" if compared == 1 else f"{compared} layers agree"
            yield "", f"{subject} with the reference, each for its own input{self._of_gradients()}"

    def _of_gradients(self) -> str:
        """Return words about the gradients of the compared layers; empty without any."""
        compared = [layer for layer in self.layers if not layer.not_compared]
        with_gradients = [layer for layer in compared if layer.has_gradients]
        if not with_gradients:
            return ""
        if len(with_gradients) == len(compared):
            return ", and so do gradients"
        return f"; gradients of {len(with_gradients)} were compared"

    def _not_compared(self) -> dict[str, list[str]]:
        """Return the titles of the layers that were not compared, or not with every sequence, by
        the reason.
        """
        titles: dict[str, list[str]] = {}
        for layer in self.layers:
            reason = layer.not_compared or layer.left_out
            if reason:
                titles.setdefault(reason, []).append(layer.layer)
        return titles

"""The ways to read observed stages: by their shapes alone, and in the conventions in which they
agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from mha_spec import InputError
from parity.explain.diagnosis.choices import Choice, choices_for
from parity.explain.diagnosis.findings import Diagnosis
from parity.explain.diagnosis.readings import Reading, StageReadings, read
from parity.explain.diagnosis.search import SearchResult
from parity.explain.diagnosis.trial import Trial, WholeTrial
from parity.measure.core.compare import NOT_MEASURED, Deviation, deviation_of
from parity.measure.core.stages import STAGES, stage_named
from parity.measure.core.weights import is_floating

FAR_FROM_CHOICE = 16.0
"""The ratio of a stage above which a different choice of precision does not make it right, unless
it is one of the scores or attention weights.
"""

AllReadings = Mapping[str, StageReadings]
"""All readings of each stage."""

ChosenReadings = dict[str, Reading]
"""One reading of each stage."""


# ---- A layer ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StageView:
    """Observed stages in one reading.

    Attributes:
        trial: the reference, and the stages.
        before: the error of each stage, computed from the stages before it.
        conventions: descriptions of stages that are recorded in a different convention.
        malformed: stages that cannot be compared, and why.
    """

    trial: Trial
    before: dict[str, Deviation]
    conventions: dict[str, str]
    malformed: dict[str, str]

    @cached_property
    def wrong(self) -> list[str]:
        """The stages that differ by themselves."""
        return [stage for stage, deviation in self.before.items() if deviation.ratio > 1.0]

    def may_be_right_with(self, choice: Choice) -> bool:
        """Return True if a stage that differs may be right with a different choice.

        A choice for the softmax alone changes attention weights. The stages after them become only
        a little less exact.
        """
        if choice.arithmetic:
            return True
        for stage in self.wrong:
            if stage_named(stage).is_attn_weights or self.before[stage].ratio <= FAR_FROM_CHOICE:
                return True
        return False

    @property
    def agrees_in_the_end(self) -> bool | None:
        """True if the end of every call agrees with the stages before it; None if one was not
        recorded.

        A wrong cache shows in later calls only, and nothing follows the outputs of a module's own
        paths, so these must also agree.
        """
        trial = self.trial
        ends: list[str] = []
        for name in trial.values:
            if stage_named(name).kind == "output":
                if name not in trial.observed:
                    return None
                ends.append(name)
            elif name in trial.stages and ("cache" in name or name.endswith(".output")):
                ends.append(name)
        return all(trial.right.agrees(name, trial.observed[name]) for name in ends)

    def diagnosis(self, result: SearchResult | None = None, untried: str = "") -> Diagnosis:
        """Return the diagnosis of this reading.

        Args:
            result: result of the search; None if nothing was searched.
            untried: the parts of the search that exceeded the time limit.
        """
        wrong = self.wrong
        first = wrong[0] if wrong else next(iter(self.malformed), "")
        deviation = Deviation(0.0, 0.0)
        if first:
            deviation = self.before.get(first, NOT_MEASURED)
        trial = self.trial
        taken = {name: x for name, x in trial.observed.items() if name in self.conventions}
        diagnosis = Diagnosis(
            first,
            deviation.error,
            deviation.ratio,
            has_stages=len(trial.stages) > 1,
            malformed=self.malformed,
            conventions=self.conventions,
            choice=trial.choice.about.format(dtype=trial.problem.dtype),
            output_agrees=self.agrees_in_the_end,
            taken=taken,
        )
        if result is None:
            return diagnosis
        return replace(
            diagnosis,
            findings=result.findings,
            untried="" if result.is_complete else untried,
        )


def views_of(stages: Mapping[str, np.ndarray], right: Trial) -> list[StageView]:
    """Return the readings of observed stages: by their shapes alone, and in the conventions in
    which they agree.
    """
    all_readings = read(stages, right)
    if not all_readings:
        return []
    plain = _plain(all_readings)
    agreeing = confirmed_readings(all_readings)
    views = [_view(right, all_readings, plain)]
    is_other = any(
        reading is not plain.get(name) and reading.words for name, reading in agreeing.items()
    )
    if is_other:
        views.append(_view(right, all_readings, {**plain, **agreeing}))
    return views


def _view(right: Trial, all_readings: AllReadings, readings: ChosenReadings) -> StageView:
    """Return the stages in one reading of each."""
    values: dict[str, np.ndarray] = {}
    masked: dict[str, np.ndarray] = {}
    conventions: dict[str, str] = {}
    for name, reading in readings.items():
        if reading.values is not None:
            values[name] = reading.values
        if reading.masked is not None:
            masked[name] = reading.masked
        if reading.words:
            conventions[name] = reading.words
    trial = right.observing(values, masked)
    before = {stage: trial.deviation(stage, ()) for stage in trial.stages}
    return StageView(trial, before, conventions, _malformed(all_readings, readings))


def _plain(all_readings: AllReadings) -> ChosenReadings:
    """Return the readings by shapes alone, of the stages that have one."""
    return {name: stage.plain for name, stage in all_readings.items() if stage.plain is not None}


def _malformed(all_readings: AllReadings, readings: ChosenReadings) -> dict[str, str]:
    """Return the stages without a reading, and why."""
    return {name: stage.reason for name, stage in all_readings.items() if name not in readings}


def confirmed_readings(all_readings: AllReadings) -> ChosenReadings:
    """Return the readings in which stages agree, if a later stage confirms them where that is
    necessary.
    """
    return {
        name: stage.agreed
        for name, stage in all_readings.items()
        if stage.agreed is not None and _is_confirmed(name, all_readings)
    }


def _is_confirmed(name: str, all_readings: AllReadings) -> bool:
    """Return True if a stage that depends on this one was also recorded in its step and can be
    compared.
    """
    reading = all_readings[name].agreed
    if reading is None or reading.is_certain or not reading.words:
        return True
    order = list(STAGES)
    stage = stage_named(name)
    first = max(order.index("scores"), order.index(stage.kind) + 1)
    for other_name, other in all_readings.items():
        other_stage = stage_named(other_name)
        is_later = order.index(other_stage.kind) >= first and other_stage.step == stage.step
        if is_later and (other.agreed is None or other.agreed.values is not None):
            return True
    return False


# ---- A large layer as a whole --------------------------------------------------------------------


@dataclass(frozen=True)
class WholeStageView:
    """The stages of a large layer in one reading.

    Attributes:
        values: stages in the reference's convention, without those that cannot be converted.
        agreed: the stages that are right as a whole, some of them in a different convention.
        conventions: descriptions of how stages are recorded.
        malformed: stages that cannot be compared, and why.
        choice: how the layer computes differently.
    """

    values: dict[str, np.ndarray]
    agreed: frozenset[str]
    conventions: dict[str, str]
    malformed: dict[str, str]
    choice: Choice

    def completed(self, diagnosis: Diagnosis) -> Diagnosis:
        """Return a diagnosis of the values with the conventions and faults of all stages."""
        stage = diagnosis.stage
        if not diagnosis.is_wrong:
            stage = next(iter(self.malformed), "")
        dtype = next((x.dtype.name for x in self.values.values() if is_floating(x.dtype)), "")
        return replace(
            diagnosis,
            stage=stage,
            conventions={**diagnosis.conventions, **self.conventions},
            malformed={**diagnosis.malformed, **self.malformed},
            choice=self.choice.about.format(dtype=dtype) or diagnosis.choice,
            taken={name: self.values[name] for name in self.conventions if name in self.values},
        )


def whole_views(stages: Mapping[str, np.ndarray], right: WholeTrial) -> list[WholeStageView]:
    """Return the readings of whole stages: by their shapes alone, and in the conventions in which
    they agree.
    """
    # Choices that override a method would need the scores of all rows.
    choices = choices_for(right.problem.dtype, stages)
    choice, *other_choices = [choice for choice in choices if not choice.overrides]
    all_readings = read(stages, right.with_choice(choice))
    if not all_readings:
        raise InputError("observed", "have stages of the problem", str(sorted(stages)))
    agreeing = confirmed_readings(all_readings)
    for other in other_choices:
        if len(agreeing) == len(all_readings):
            break
        if not _may_be_a_choice(all_readings, agreeing, right.with_choice(choice)):
            break
        if _number_agreeing(all_readings, right.with_choice(other)) > len(agreeing):
            choice = other
            all_readings = read(stages, right.with_choice(other))
            agreeing = confirmed_readings(all_readings)
    plain = _plain(all_readings)
    as_recorded = {name: reading for name, reading in agreeing.items() if not reading.words}
    view = _whole_view(all_readings, {**plain, **as_recorded}, frozenset(as_recorded), choice)
    if len(as_recorded) == len(agreeing):
        return [view]
    converted = _whole_view(all_readings, {**plain, **agreeing}, frozenset(agreeing), choice)
    return [converted] if len(agreeing) == len(all_readings) else [view, converted]


def _may_be_a_choice(all_readings: AllReadings, agreeing: ChosenReadings, right: Trial) -> bool:
    """Return True if stages that differ may do so because the layer computes in a different but
    valid way.

    The noise of all stages but scores and attention weights grows by a small factor only.
    """
    for name, reading in _plain(all_readings).items():
        if name in agreeing or reading.values is None:
            continue
        if stage_named(name).quantity in ("scores", "attn_weights"):
            return True
        deviation = deviation_of(reading.values, right.stage(name), right.allowed(name, ()), name)
        if deviation.ratio > FAR_FROM_CHOICE:
            return False
    return True


def _number_agreeing(all_readings: AllReadings, right: Trial) -> int:
    """Return the number of stages that agree by their shapes alone."""
    number = 0
    for name, reading in _plain(all_readings).items():
        if reading.values is not None and right.agrees(name, reading.values, unused=reading.masked):
            number += 1
    return number


def _whole_view(
    all_readings: AllReadings, readings: ChosenReadings, agreed: frozenset[str], choice: Choice
) -> WholeStageView:
    values: dict[str, np.ndarray] = {}
    conventions: dict[str, str] = {}
    for name, reading in readings.items():
        if reading.values is not None:
            values[name] = reading.values
        if reading.words:
            conventions[name] = reading.words
    return WholeStageView(values, agreed, conventions, _malformed(all_readings, readings), choice)

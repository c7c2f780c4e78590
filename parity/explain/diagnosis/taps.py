"""The diagnosis of a tapped model: the wrong layer, its first wrong stage and its bug, compared
with the reference.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mha_spec import AttentionSpec
from parity.explain.diagnosis.bugs.record import Edit, Edits
from parity.explain.diagnosis.bugs.serving import unordered_rows
from parity.explain.diagnosis.diagnose import SECONDS, Diagnosis, diagnose
from parity.explain.diagnosis.findings import Finding
from parity.explain.diagnosis.sampling import is_large
from parity.explain.diagnosis.search import search
from parity.explain.diagnosis.tap_gradients import compared_gradients
from parity.explain.diagnosis.tap_layers import (
    LayerWeights,
    PlainSpecs,
    PlainWeights,
    Specs,
    before_out_proj,
    layers_of_model,
    other_specs,
    sources_of,
    specs_of_layers,
    title_of,
    weights_of_layer,
    weights_of_layers,
    why_not_compared,
    with_kind_of,
)
from parity.explain.diagnosis.tap_verdicts import LayerVerdict, TapVerdict
from parity.explain.diagnosis.tapped import Sequences, sequences_of
from parity.explain.diagnosis.trial import Scope, Trial
from parity.explain.diagnosis.work import Work
from parity.measure.core.compare import Comparison, Label, first_difference
from parity.measure.core.problem import Problem
from parity.measure.core.quantization import CacheQuantization
from parity.measure.core.reference import UNFUSED
from parity.measure.core.stages import stage_named
from parity.measure.core.trace import Reference
from parity.measure.core.weights import Weights, check_weights, weight_shapes
from parity.port.models.specs import ModelLayer
from parity.port.tapping.record import Tapped, TappedLayer

__all__ = ["LayerVerdict", "TapVerdict", "check_tap"]

OTHER_LAYER = "configuration-of-another-layer"
"""The name of the bug that a layer is computed with the specification of a different one."""

GAP = "padding lies between its real tokens, and it is unknown whether {fields} counts padding"
"""Reason why sequences are not compared."""

ROUNDING = "how its cache rounds is not known, later calls were left out: pass cache_quantization"
"""Reason why only the first call is compared, in which transformers attends to exact tokens."""

QUANTIZED_CACHES = {
    "Fp8QuantizedLayer": CacheQuantization("float8_e4m3fn", exact="first_call"),
}
"""Quantization of the caches of transformers that always round in the same way."""


def check_tap(
    tapped: Tapped,
    specs: Specs | PlainSpecs,
    weights: LayerWeights | PlainWeights,
    *,
    is_causal: bool | None = None,
    cache_quantization: CacheQuantization | None = None,
    diagnoses: bool = True,
) -> TapVerdict:
    """Compare each layer of a recording, on its own, with the float64 reference for the layer's own
    input.

    A prompt and its steps are joined, and padding is left out. If several layers are wrong, the
    findings of the first are tried before a new search.

    Args:
        tapped: the recording.
        specs: the specification of each layer, by its index, or from `parity.specs_of`; or a list
            with one `AttentionSpec` for each tapped layer.
        weights: the canonical weights of each layer, by its index, or by the name of its module,
            which models with an encoder and a decoder need; or a list with the weights of each
            tapped layer.
        is_causal: True if tokens do not attend to later ones; by default as in `specs`, else True.
        cache_quantization: how caches of 8 or 4 bits round, if the recording does not show it.
        diagnoses: False to skip the search for bugs.

    Returns:
        A verdict on each tapped layer, in order.

    Raises:
        TypeError, ValueError: if weights do not fit their spec, or the calls of a layer do not
            follow each other.

    Example:
        >>> from transformers import LlamaConfig, LlamaModel
        >>> sizes = {"vocab_size": 16, "hidden_size": 32, "intermediate_size": 16}
        >>> heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1}
        >>> model = LlamaModel(LlamaConfig(**sizes, **heads)).eval()
        >>> with torch.no_grad(), parity.tap(model) as tapped:
        ...     _ = model(torch.arange(10).reshape(2, 5))
        >>> spec, weights = parity.from_transformers(model.layers[0].self_attn)
        >>> parity.check_tap(tapped, [spec], [weights]).passed
        True
    """
    check = _TapCheck(
        tapped,
        specs_of_layers(specs, tapped.layers),
        weights_of_layers(weights, tapped.layers),
        is_causal,
        cache_quantization,
        diagnoses=diagnoses,
    )
    return TapVerdict([check.verdict(layer) for layer in tapped.layers])


# ---- A layer -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _TapWay:
    """Stages of a layer as one of the problems that they may be of: all tokens at once, call by
    call, or the prompt.

    Attributes:
        name: its name.
        stages: the stages.
        problem: the problem.
        candidates: edits that the recording shows, and the stages alone do not.
    """

    name: str
    stages: dict[str, np.ndarray]
    problem: Problem
    candidates: Edits = ()


@dataclass(frozen=True)
class _Explained:
    """The diagnosis of a layer, and the name of the way in which it was found."""

    way: str
    diagnosis: Diagnosis


class _TapCheck:
    """Compares the layers of a recording, and tries the findings of one in the next.

    Args:
        tapped: the recording.
        specs: the specifications.
        weights: the weights.
        is_causal, cache_quantization: as in `check_tap`.
        diagnoses: whether to search for bugs.
    """

    def __init__(
        self,
        tapped: Tapped,
        specs: Specs,
        weights: LayerWeights,
        is_causal: bool | None,
        cache_quantization: CacheQuantization | None,
        *,
        diagnoses: bool,
    ) -> None:
        self.layers = tapped.layers
        self.specs = specs
        self.weights = weights
        self.is_causal = is_causal
        self.cache_quantization = cache_quantization
        self.diagnoses = diagnoses
        self.is_transformers = bool(tapped.config)
        self.explained: list[_Explained] = []
        # The number of unexplained layers by their first wrong stage.
        self.unexplained: Counter[str] = Counter()

    def verdict(self, layer: TappedLayer) -> LayerVerdict:
        """Compare one layer."""
        of_model = layers_of_model(layer, self.specs)
        verdict = LayerVerdict(layer.title, layer.name, layer.index)
        if len(of_model) > 1:
            reason = f"it may be any of {len(of_model)} layers of the model, by its name"
            return replace(verdict, not_compared=reason)
        known = of_model[0] if of_model else ModelLayer(layer.index, "", None, {})
        verdict = replace(verdict, layer=title_of(with_kind_of(layer, known)))
        weights = weights_of_layer(layer, self.weights)
        reason = why_not_compared(layer, known, has_weights=weights is not None)
        if reason or known.spec is None:
            return replace(verdict, not_compared=reason)
        checked = check_weights(weights or {}, known.spec)
        return self._compared(layer, known, known.spec, checked, verdict)

    def _compared(
        self,
        layer: TappedLayer,
        known: ModelLayer,
        spec: AttentionSpec,
        weights: Weights,
        verdict: LayerVerdict,
    ) -> LayerVerdict:
        """Return the verdict on a layer that can be compared: on each group of its sequences."""
        is_causal = known.is_causal if self.is_causal is None else self.is_causal
        is_part = bool(known.path) and self.is_transformers and not known.is_at(layer.name)
        if is_part:
            # As in BERT, the projection of the output is in another module.
            spec = before_out_proj(spec)
            weights = {name: weights[name] for name in spec.weight_shapes}
        problems: list[tuple[Sequences, Problem]] = []
        rows_left_out: list[int] = []
        calls_left_out = ""
        groups = sequences_of(layer)
        sources = sources_of(layer, known, self.layers, len(groups))
        for sequences, source in zip(groups, sources, strict=True):
            counting_gaps = sequences.counting_gaps(spec)
            if counting_gaps:
                rows_left_out += sequences.rows.tolist()
                verdict = replace(verdict, left_out=GAP.format(fields=counting_gaps))
                continue
            if is_part and not sequences.ends_with_context(spec):
                sequences = sequences.without("output").without("grad.output")
            rounded = self._with_quantization(sequences, layer, spec)
            if rounded is None:
                calls_left_out = ROUNDING
                rounded = sequences.prompt
            sequences = rounded
            problem = sequences.problem(
                verdict.layer, spec, weights, is_causal=is_causal, source=source
            )
            problems.append((sequences, problem))
            verdict = self._with_group(verdict, sequences, problem, layer)
        if not problems and rows_left_out:
            return replace(verdict, not_compared=verdict.left_out, left_out="")
        if not verdict.comparisons:
            return replace(verdict, not_compared="only its input was recorded")
        if rows_left_out:
            rows = ", ".join(map(str, rows_left_out))
            verdict = replace(
                verdict, left_out=f"in sequence {rows} of its batch {verdict.left_out}"
            )
        elif calls_left_out:
            verdict = replace(verdict, left_out=calls_left_out)
        if verdict.difference is None:
            gradients, diagnosis = compared_gradients(
                problems,
                layer.module,
                _arithmetic_of(layer),
                scales_queries=layer.scale == 1.0,
                diagnoses=self.diagnoses,
            )
            compared = [*verdict.comparisons, *gradients]
            return replace(verdict, comparisons=compared, diagnosis=diagnosis)
        if verdict.diagnosis is None or verdict.diagnosis.is_known:
            return verdict
        others = other_specs(known, self.specs)
        if is_part:
            others = {title: before_out_proj(other) for title, other in others.items()}
        edit = _edit_as_in_another(layer, problems, others)
        if edit is None:
            return verdict
        return replace(verdict, diagnosis=_with_cause(verdict.diagnosis, edit))

    def _with_quantization(
        self, sequences: Sequences, layer: TappedLayer, spec: AttentionSpec
    ) -> Sequences | None:
        """Return sequences with the quantization of their cache; None if it is not known."""
        quantization = self.cache_quantization or QUANTIZED_CACHES.get(layer.cache)
        if quantization is None:
            is_exact = not layer.cache or len(sequences.chunks) == 1
            return sequences if is_exact else None
        # The reference has no quantized latents, and keys of another sequence are stored once.
        if spec.latent is not None or sequences.is_cross:
            return None
        quantization.check_layer(spec)
        return sequences.rounded_by(quantization)

    def _with_group(
        self, verdict: LayerVerdict, sequences: Sequences, problem: Problem, layer: TappedLayer
    ) -> LayerVerdict:
        """Return a verdict with the comparisons of more sequences, and their diagnosis if it
        explains more than the one before.
        """
        before = verdict.diagnosis
        comparisons, ways = _compared_stages(sequences, problem, layer)
        verdict = replace(verdict, comparisons=[*verdict.comparisons, *comparisons])
        if ways is None or not self.diagnoses or (before is not None and before.is_known):
            return verdict
        if isinstance(ways, Diagnosis):
            diagnosis = ways
        else:
            difference = first_difference(comparisons)
            stage = "" if difference is None else difference.stage
            diagnosis = self._diagnosed(ways, stage, _arithmetic_of(layer))
        if before is not None and not diagnosis.is_known:
            diagnosis = before  # the first one if none is explained
        return replace(verdict, diagnosis=diagnosis)

    def _diagnosed(self, ways: Sequence[_TapWay], stage: str, arithmetic: str) -> Diagnosis:
        """Diagnose a layer, first by the findings of earlier layers.

        Args:
            ways: to read its stages.
            stage: its first wrong stage.
            arithmetic: of a right layer.
        """
        by_name = {way.name: way for way in ways}
        for way in ways:
            by_recording = _explained_by_candidates(way, arithmetic)
            if by_recording is not None:
                return by_recording
        for explained in self.explained:
            way = by_name.get(explained.way)
            if way is None:
                continue
            again = _explained_again(way, explained.diagnosis, arithmetic)
            if again is not None:
                return again
        # Layers that are wrong at the same stage probably have one cause. If no known bug explains
        # one of them, the next is searched less: all layers together take no longer than two.
        num_unexplained = self.unexplained[stage]
        seconds = SECONDS / (1 + num_unexplained) ** 2
        diagnosis, way = _searched(ways, arithmetic, seconds)
        if diagnosis.cause:
            self.explained.append(_Explained(way.name, diagnosis))
        if not diagnosis.is_known:
            self.unexplained[stage] += 1
        return diagnosis


# ---- The comparison ------------------------------------------------------------------------------


def _compared_stages(
    sequences: Sequences, problem: Problem, layer: TappedLayer
) -> tuple[list[Comparison], list[_TapWay] | Diagnosis | None]:
    """Return the comparisons of the stages of some sequences, and the ways to diagnose them, or the
    diagnosis.

    There is nothing to diagnose if no stage differs.
    """
    reference = Reference(problem)
    sequences = sequences.in_our_order(reference)
    if layer.scale == 1.0:
        sequences = sequences.unscaled(reference)
    observed = sequences.stages
    is_stepped = sequences.must_be_stepped(problem.spec)
    if is_stepped:
        observed = sequences.stages_by_step
        reference = Reference(sequences.problem_by_step(problem))
    arithmetic = _arithmetic_of(layer)
    comparisons = _compared(observed, reference, layer.module, arithmetic)
    stale = _of_other_keys(sequences, reference, layer.module, arithmetic)
    if stale:
        first = stale[0]
        about = (first.stage, first.error, first.ratio)
        before = sum(each.stage in ("mask", "q", "k", "v") for each in comparisons)
        with_stale = [*comparisons[:before], *stale, *comparisons[before:]]
        return with_stale, Diagnosis(*about, findings=[Finding(*about)])
    if first_difference(comparisons) is None:
        return comparisons, None
    ways: list[_TapWay] = []
    if is_stepped:
        candidates = tuple(unordered_rows(reference.problem.case, sequences.caches_in_rows))
        ways += _with_and_without_mask("by call", observed, reference.problem, candidates)
    else:
        ways += _with_and_without_mask("at once", observed, reference.problem)
    has_steps = len(sequences.chunks) > 1 and not sequences.is_cross
    if has_steps and not sequences.is_rounded_at_once:
        if not is_stepped:
            by_step = sequences.problem_by_step(problem)
            ways += _with_and_without_mask("by call", sequences.stages_by_step, by_step)
        prompt = sequences.prompt
        of_prompt = prompt.problem_of_its_own(problem)
        ways += _with_and_without_mask("prompt", prompt.stages, of_prompt)
    if sequences.with_padding is not None and sequences.quantization is None:
        ways += _ways_with_padding(sequences.with_padding(), problem, layer)
    return comparisons, ways


def _ways_with_padding(
    padded: Sequences, problem: Problem, layer: TappedLayer
) -> Iterator[_TapWay]:
    """Yield ways to diagnose sequences with their padding, which a wrong layer may attend to.

    Args:
        padded: the sequences.
        problem: of the same sequences without padding.
        layer: the recording.
    """
    of_padded = padded.problem_of_padded(problem)
    if layer.scale == 1.0 and len(padded.chunks) == 1:
        padded = padded.unscaled(Reference(of_padded))
    stages = padded.stages
    if len(padded.chunks) > 1:
        stages = padded.stages_by_step
    yield from _with_and_without_mask("with padding", stages, of_padded)


def _with_and_without_mask(
    name: str, stages: dict[str, np.ndarray], problem: Problem, candidates: Edits = ()
) -> Iterator[_TapWay]:
    """Yield a way to diagnose stages, and one without their mask.

    If the attention function behaves as with a wrong mask although the recorded mask is right, no
    bug in the mask explains it. So an unexplained difference is searched again without the mask.
    """
    yield _TapWay(name, stages, problem, candidates)
    without = {stage: x for stage, x in stages.items() if stage_named(stage).quantity != "mask"}
    if len(without) < len(stages):
        yield _TapWay(f"{name}, without the mask", without, problem)


def _compared(
    observed: Mapping[str, np.ndarray], reference: Reference, backend: str, arithmetic: str
) -> list[Comparison]:
    """Compare each stage with the reference: from the layer's input, and from the recorded stages
    before it.
    """
    trial = Trial(reference.problem, observed, arithmetic)
    comparisons: list[Comparison] = []
    for stage in reference.accumulated:
        if stage not in observed:
            continue
        label = Label(reference.problem.case.name, backend, reference.problem.dtype, stage)
        comparison = reference.compare(observed[stage], label, arithmetic)
        comparison = reference.compare_noise(comparison, observed[stage], label, arithmetic)
        local_ratio = trial.deviation(stage, ()).ratio
        comparisons.append(comparison.with_step(local_ratio, "wrong for its recorded inputs"))
    return comparisons


def _of_other_keys(
    sequences: Sequences, reference: Reference, backend: str, arithmetic: str
) -> list[Comparison]:
    """Return the keys and values of another sequence in later calls that differ from the first
    call's.
    """
    if not sequences.is_cross:
        return []
    problem = reference.problem
    differing: list[Comparison] = []
    for (step, part), cached in sequences.caches.items():
        label = Label(problem.case.name, backend, problem.dtype, part[0])
        comparison = reference.compare(cached, label, arithmetic)
        if not comparison.passed:
            differing.append(replace(comparison, stage=f"step{step}.cache.{part}"))
    return differing


def _arithmetic_of(layer: TappedLayer) -> str:
    """Return the rounding of a right layer."""
    if not layer.attention:
        return "ieee"
    every_operation, with_scores = UNFUSED
    return with_scores if layer.attention == "eager" else every_operation


# ---- The diagnosis -------------------------------------------------------------------------------


def _diagnosed_as(way: _TapWay, arithmetic: str, seconds: float = SECONDS) -> Diagnosis:
    with np.errstate(all="ignore"):
        return diagnose(way.stages, way.problem, arithmetic=arithmetic, seconds=seconds)


def _searched(
    ways: Sequence[_TapWay], arithmetic: str, seconds: float
) -> tuple[Diagnosis, _TapWay]:
    """Return the diagnosis in the first way in which known bugs explain everything, otherwise in
    the first way.

    A wrong mask of the prompt does not affect later tokens, as a wrong mask of all tokens at once
    would.
    """
    first: tuple[Diagnosis, _TapWay] | None = None
    for way in ways:
        diagnosis = _diagnosed_as(way, arithmetic, seconds)
        if diagnosis.is_known and diagnosis.kind != "none":
            return diagnosis, way
        if first is None:
            first = diagnosis, way
    if first is None:
        raise ValueError("there must be a way to diagnose a layer")
    return first


def _explained_again(way: _TapWay, before: Diagnosis, arithmetic: str) -> Diagnosis | None:
    """Return the diagnosis of a layer by the findings of another; None if these do not explain it.

    Only the bugs of that diagnosis are tried, and a pattern must have the same description.
    """
    if is_large(way.problem):  # which is searched in samples
        again = _diagnosed_as(way, arithmetic)
        return again if _signature(again) == _signature(before) else None
    names: set[str] = set()
    for finding in before.known:
        names |= {*finding.bugs, *finding.others}
    again = _explained_by(way, Scope(only=frozenset(names)), arithmetic)
    return again if again is not None and _signature(again) == _signature(before) else None


def _explained_by_candidates(way: _TapWay, arithmetic: str) -> Diagnosis | None:
    """Return the diagnosis of a layer by an edit that the recording shows; None if it does not
    explain everything.
    """
    if not way.candidates:
        return None
    abouts = frozenset(edit.about for edit in way.candidates)
    diagnosis = _explained_by(way, Scope(only=abouts, is_one_by_one=True), arithmetic)
    if diagnosis is None or diagnosis.leftover:
        return None
    return diagnosis


def _explained_by(way: _TapWay, scope: Scope, arithmetic: str) -> Diagnosis | None:
    """Return the diagnosis of a layer by the bugs of a scope alone; None if no stage is wrong."""
    trial = Trial(way.problem, way.stages, arithmetic, scope=scope, candidates=way.candidates)
    work = Work(SECONDS)
    with np.errstate(all="ignore"), work.counted():
        wrong = trial.wrong(trial.stages, ())
        if not wrong:
            return None
        result = search(trial, work)
    deviation = trial.deviation(wrong[0], ())
    return Diagnosis(
        wrong[0],
        deviation.error,
        deviation.ratio,
        result.findings,
        has_stages=len(trial.stages) > 1,
        dtype=way.problem.dtype,
    )


def _signature(diagnosis: Diagnosis) -> tuple[Any, ...]:
    """Return what two equal diagnoses have in common: the first wrong stage, the bugs and the
    patterns.
    """
    findings = [(finding.stage, finding.bugs, finding.about) for finding in diagnosis.findings]
    return diagnosis.stage, findings


def _edit_as_in_another(
    layer: TappedLayer,
    problems: Sequence[tuple[Sequences, Problem]],
    others: Mapping[str, AttentionSpec],
) -> Edit | None:
    """Return the edit that every stage is right with fields of another layer's specification, one
    or all; None if there is no such layer.
    """
    spec = problems[0][1].spec
    for title, other in others.items():
        for names in _fields_to_take(spec, other):
            values = {name: getattr(other, name) for name in names}
            try:
                changed = replace(spec, **values)
            except (TypeError, ValueError):  # a field that depends on another one
                continue
            if weight_shapes(changed) != weight_shapes(spec):
                continue
            if all(_is_right(layer, *problem, changed) for problem in problems):
                fields = ", ".join(f"{name}={value}" for name, value in values.items())
                return Edit(
                    OTHER_LAYER,
                    f"it computes as with the configuration of {title}: {fields}",
                    fixes=("use this layer's own configuration",),
                )
    return None


def _fields_to_take(spec: AttentionSpec, other: AttentionSpec) -> list[list[str]]:
    """Return the fields to take from a different specification: each that differs, then all."""
    own = spec.values()
    differing: list[str] = []
    for name, value in other.values().items():
        if value != own[name] and "dropout" not in name:
            differing.append(name)
    return [*([name] for name in differing), differing]


def _is_right(
    layer: TappedLayer, sequences: Sequences, problem: Problem, spec: AttentionSpec
) -> bool:
    """Return True if every stage is right with a different specification."""
    problem = replace(problem, case=replace(problem.case, spec=spec))
    return first_difference(_compared_stages(sequences, problem, layer)[0]) is None


def _with_cause(diagnosis: Diagnosis, edit: Edit) -> Diagnosis:
    """Return the diagnosis of a layer whose one cause is an edit."""
    stages: tuple[str, ...] = ()
    for finding in diagnosis.findings:
        stages += finding.explained_stages
    finding = Finding(diagnosis.stage, diagnosis.error, diagnosis.ratio, (edit,), stages=stages)
    return replace(diagnosis, findings=[finding], untried="")

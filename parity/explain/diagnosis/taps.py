"""The diagnosis of a tapped model: the wrong layer, its first wrong stage and its bug, compared
with the reference.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mha_spec import AttentionSpec, InputError, InputTypeError
from parity.explain.diagnosis.bugs.record import Edit
from parity.explain.diagnosis.diagnose import SECONDS, Diagnosis, diagnose
from parity.explain.diagnosis.findings import Finding, Line, excess, text_of
from parity.explain.diagnosis.sampling import is_large
from parity.explain.diagnosis.search import search
from parity.explain.diagnosis.tapped import Sequences, sequences_of
from parity.explain.diagnosis.trial import Scope, Trial
from parity.explain.diagnosis.work import Work
from parity.measure.core.compare import Comparison, Label, first_difference
from parity.measure.core.problem import Problem
from parity.measure.core.records import JsonRecord
from parity.measure.core.reference import UNFUSED
from parity.measure.core.stages import stage_named
from parity.measure.core.trace import Reference
from parity.measure.core.weights import Weights, check_weights, weight_shapes
from parity.port.models.specs import ModelLayer
from parity.port.tapping.record import Tapped, TappedLayer


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
        diagnosis: of a layer that differs.
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
            yield "", f"{subject} with the reference, each for its own input"

    def _not_compared(self) -> dict[str, list[str]]:
        """Return the titles of the layers that were not compared, or not with every sequence, by
        the reason.
        """
        found: dict[str, list[str]] = {}
        for layer in self.layers:
            if reason := layer.not_compared or layer.left_out:
                found.setdefault(reason, []).append(layer.layer)
        return found


OTHER_LAYER = "configuration-of-another-layer"
"""The name of the bug that a layer is computed with the specification of another one."""

CROSS = "cross_attention"
"""The kind of layers that attend to another sequence."""

Specs = Sequence[ModelLayer] | Mapping[int, AttentionSpec | None]
LayerWeights = Mapping[int, Mapping[str, Any]] | Mapping[str, Mapping[str, Any]]
PlainSpecs = Sequence[AttentionSpec | None]
PlainWeights = Sequence[Mapping[str, Any]]
"""A specification, or weights, for each tapped layer, in their order."""


def check_tap(
    tapped: Tapped,
    specs: Specs | PlainSpecs,
    weights: LayerWeights | PlainWeights,
    *,
    is_causal: bool | None = None,
    diagnoses: bool = True,
) -> TapVerdict:
    """Compare each layer of a recording by itself with the float64 reference for the layer's own
    input.

    Prompt and steps are joined, padding is left out. If several layers are wrong, the explanation
    of the first is tried before a new search.

    Args:
        tapped: the recording.
        specs: the specification of each layer, by its index, or from `parity.specs_of`; or a list
            with one `AttentionSpec` for each tapped layer.
        weights: the canonical weights of each layer, by its index, or by the name of its module,
            which models with an encoder and a decoder need; or a list with those of each tapped
            layer.
        is_causal: True if tokens do not attend to later ones; by default as in `specs`, else True.
        diagnoses: False to skip the search for bugs.

    Returns:
        A verdict on each tapped layer, in order.

    Raises:
        TypeError, ValueError: if weights do not fit their spec, or the calls of a layer do not
            follow each other.
    """
    judge = _TapJudge(
        tapped,
        _specs_of_layers(specs, tapped.layers),
        _weights_of_layers(weights, tapped.layers),
        is_causal,
        diagnoses=diagnoses,
    )
    return TapVerdict([judge.verdict(layer) for layer in tapped.layers])


def _specs_of_layers(specs: Specs | PlainSpecs, layers: Sequence[TappedLayer]) -> Specs:
    """Return specifications by index, or from `specs_of`.

    Raises:
        TypeError: if they are anything else.
        ValueError: if a list of plain specifications has another length than the tapped layers.
    """
    rule = "be AttentionSpecs by index, one for each tapped layer, or from parity.specs_of"
    if isinstance(specs, Mapping):
        for spec in specs.values():
            if spec is not None and not isinstance(spec, AttentionSpec):
                raise InputTypeError("specs", rule, type(spec).__name__)
        return specs
    if isinstance(specs, (str, AttentionSpec)) or not isinstance(specs, Sequence):
        raise InputTypeError("specs", rule, type(specs).__name__)
    of_models, plain = list[ModelLayer](), list[AttentionSpec | None]()
    for spec in specs:
        if isinstance(spec, ModelLayer):
            of_models.append(spec)
        elif spec is None or isinstance(spec, AttentionSpec):
            plain.append(spec)
        else:
            raise InputTypeError("specs", rule, type(spec).__name__)
    if not plain:
        return of_models
    if of_models:
        raise InputTypeError("specs", rule, "some of both")
    return dict(zip(_indices("specs", len(plain), layers), plain, strict=True))


def _weights_of_layers(
    weights: LayerWeights | PlainWeights, layers: Sequence[TappedLayer]
) -> LayerWeights:
    """Return weights by index or by name.

    Raises:
        TypeError: if they are anything else.
        ValueError: if a list of weights has another length than the tapped layers.
    """
    rule = "be the weights of each layer, by index, by name, or one mapping for each tapped layer"
    if isinstance(weights, str) or not isinstance(weights, (Mapping, Sequence)):
        raise InputTypeError("weights", rule, type(weights).__name__)
    of_layers = list(weights.values()) if isinstance(weights, Mapping) else list(weights)
    for each in of_layers:
        if not isinstance(each, Mapping):
            raise InputTypeError("weights", rule, f"one that is {type(each).__name__}")
    if isinstance(weights, Mapping):
        return weights
    return dict(zip(_indices("weights", len(of_layers), layers), of_layers, strict=True))


def _indices(what: str, count: int, layers: Sequence[TappedLayer]) -> list[int]:
    """Return the index of each tapped layer, which a list has one entry for.

    Raises:
        ValueError: if the list has another length, or two layers have one index.
    """
    indices = [layer.index for layer in layers]
    if count != len(indices):
        raise InputError(
            what,
            f"be a list of {len(indices)}, one for each tapped layer, or by index",
            f"{count} of them",
        )
    if len(set(indices)) < len(indices):
        raise InputError(
            what, "be passed by the names of modules, because layers share an index", str(indices)
        )
    return indices


GAP = "padding lies between its real tokens, and it is unknown whether {fields} counts padding"
"""Reason why sequences are not compared."""


class _TapJudge:
    """Compares the layers of a recording, and tries the explanation of one in the next.

    Args:
        tapped: the recording.
        specs: the specifications.
        weights: the weights.
        is_causal: as in `check_tap`.
        diagnoses: whether to search for bugs.
    """

    def __init__(
        self,
        tapped: Tapped,
        specs: Specs,
        weights: LayerWeights,
        is_causal: bool | None,
        *,
        diagnoses: bool,
    ) -> None:
        self.layers, self.specs, self.weights = tapped.layers, specs, weights
        self.is_causal, self.diagnoses = is_causal, diagnoses
        self.is_transformers = bool(tapped.config)
        self.explained: list[_Explained] = []

    def verdict(self, layer: TappedLayer) -> LayerVerdict:
        """Compare one layer."""
        found = _known(layer, self.specs)
        verdict = LayerVerdict(layer.title, layer.name, layer.index)
        if len(found) > 1:
            return replace(
                verdict,
                not_compared=f"it may be any of {len(found)} layers of the model, by its name",
            )
        known = found[0] if found else ModelLayer(layer.index, "", None, {})
        verdict = replace(verdict, layer=_title(replace(known, kind=known.kind or layer.kind)))
        if known.spec is None:
            return replace(verdict, not_compared="it has no attention over keys, or no spec")
        held = _held(layer, self.weights)
        if reason := _why_not(layer, known, has_weights=held is not None):
            return replace(verdict, not_compared=reason)
        return self._compared(
            layer, known, known.spec, check_weights(held or {}, known.spec), verdict
        )

    def _compared(
        self,
        layer: TappedLayer,
        known: ModelLayer,
        spec: AttentionSpec,
        weights: Weights,
        verdict: LayerVerdict,
    ) -> LayerVerdict:
        """Return the verdict on a layer that can be compared."""
        causal = known.is_causal if self.is_causal is None else self.is_causal
        problems: list[tuple[Sequences, Problem]] = []
        left_out: list[int] = []
        seen = sequences_of(layer)
        for sequences, source in zip(
            seen, _sources(layer, known, self.layers, len(seen)), strict=True
        ):
            if counting := sequences.counting_gaps(spec):
                left_out += sequences.rows.tolist()
                verdict = replace(verdict, left_out=GAP.format(fields=counting))
                continue
            if known.path and self.is_transformers and not known.is_at(layer.name):
                sequences = sequences.without(
                    "output"
                )  # the module is only a part of the layer, as in BERT
            problem = sequences.problem(
                verdict.layer, spec, weights, is_causal=causal, source=source
            )
            problems.append((sequences, problem))
            is_explained = verdict.diagnosis is not None and verdict.diagnosis.is_known
            comparisons, diagnosis = self._judge(
                sequences, problem, layer, diagnoses=not is_explained
            )
            if verdict.diagnosis is not None and (diagnosis is None or not diagnosis.is_known):
                diagnosis = verdict.diagnosis  # the first one if none is explained
            verdict = replace(
                verdict, comparisons=[*verdict.comparisons, *comparisons], diagnosis=diagnosis
            )
        if not problems and left_out:
            return replace(verdict, not_compared=verdict.left_out, left_out="")
        if not verdict.comparisons:
            return replace(verdict, not_compared="nothing was seen of it but its input")
        if left_out:
            rows = ", ".join(map(str, left_out))
            verdict = replace(
                verdict, left_out=f"in sequence {rows} of its batch {verdict.left_out}"
            )
        unknown = verdict.diagnosis
        if unknown is None or unknown.is_known:
            return verdict
        like = _like_another(layer, problems, _others(known, self.specs))
        if like is None:
            return verdict
        finding = Finding(
            unknown.stage,
            unknown.error,
            unknown.ratio,
            (like,),
            stages=tuple(unknown.findings[0].explained_stages) if unknown.findings else (),
        )
        return replace(verdict, diagnosis=replace(unknown, findings=[finding], untried=""))

    def _judge(
        self, sequences: Sequences, problem: Problem, layer: TappedLayer, *, diagnoses: bool
    ) -> tuple[list[Comparison], Diagnosis | None]:
        """Return the comparisons of some sequences, and the diagnosis if it is requested."""
        comparisons, ways = _compared_stages(sequences, problem, layer)
        if ways is None or not (diagnoses and self.diagnoses):
            return comparisons, None
        if isinstance(ways, Diagnosis):
            return comparisons, ways
        return comparisons, self._diagnosed(ways, _arithmetic_of(layer))

    def _diagnosed(self, ways: Sequence[_TapWay], arithmetic: str) -> Diagnosis:
        """Diagnose a layer, first by the explanations of earlier layers."""
        by_name = {way.name: way for way in ways}
        for explained in self.explained:
            way = by_name.get(explained.way)
            again = None if way is None else _explained_again(way, explained.diagnosis, arithmetic)
            if again is not None:
                return again
        diagnosis, way = _searched(ways, arithmetic)
        if diagnosis.cause:
            self.explained.append(_Explained(way.name, diagnosis))
        return diagnosis


@dataclass(frozen=True)
class _TapWay:
    """Stages of a layer as one of the problems that they may be of: all tokens at once, call by
    call, or the prompt.

    Attributes:
        name: its name.
        stages: the stages.
        problem: the problem.
    """

    name: str
    stages: dict[str, np.ndarray]
    problem: Problem


@dataclass(frozen=True)
class _Explained:
    """The diagnosis of a layer, and the name of the way in which it was found."""

    way: str
    diagnosis: Diagnosis


def _explained_again(way: _TapWay, before: Diagnosis, arithmetic: str) -> Diagnosis | None:
    """Return the diagnosis of a layer by the explanation of another; None if that does not explain
    it.

    Only the bugs of that diagnosis are tried, and a pattern must have the same words.
    """
    if is_large(way.problem):  # which is searched in samples
        found = _diagnosed_as(way, arithmetic)
        return found if _signature(found) == _signature(before) else None
    names: set[str] = set()
    for finding in before.known:
        names |= {*finding.bugs, *finding.others}
    trial = Trial(way.problem, way.stages, arithmetic, scope=Scope(only=frozenset(names)))
    work = Work(SECONDS)
    with np.errstate(all="ignore"), work.counted():
        first_wrong = next(iter(trial.wrong(trial.stages, ())), "")
        if not first_wrong:
            return None
        result = search(trial, work)
    about = trial.judgement(first_wrong, ())
    found = Diagnosis(
        first_wrong,
        about.error,
        about.ratio,
        result.findings,
        has_stages=len(trial.stages) > 1,
        dtype=way.problem.dtype,
    )
    return found if _signature(found) == _signature(before) else None


def _signature(diagnosis: Diagnosis) -> tuple[Any, ...]:
    """Return what two equal diagnoses have in common: the first wrong stage, the bugs and the
    patterns.
    """
    return diagnosis.stage, [
        (finding.stage, finding.bugs, finding.about) for finding in diagnosis.findings
    ]


def _sources(
    layer: TappedLayer, known: ModelLayer, layers: Sequence[TappedLayer], count: int
) -> Sequence[Sequences | None]:
    """The same sequences of the layer whose keys and values a layer shares; None if it was not
    tapped.
    """
    name = re.sub(r"\d+", str(known.kv_source), layer.name) if known.path == layer.name else ""
    found = [
        each for each in layers if known.kv_source is not None and each.index == known.kv_source
    ]
    found = [each for each in found if each.name == name] or found
    return sequences_of(found[0]) if found else [None] * count


def _title(layer: ModelLayer) -> str:
    """Return the title of a layer in reports."""
    return f"{layer.part} {TappedLayer('', layer.index, '', layer.kind).title}".strip()


def _others(known: ModelLayer, specs: Specs) -> dict[str, AttentionSpec]:
    """Return the specifications of the other layers, each once, by the first layer that has it."""
    layers = (
        specs
        if isinstance(specs, Sequence)
        else [ModelLayer(i, "", spec, {}) for i, spec in specs.items()]
    )
    found: dict[AttentionSpec, str] = {}
    for layer in layers:
        if layer.spec is not None and layer.spec != known.spec:
            found.setdefault(layer.spec, _title(layer))
    return {title: spec for spec, title in found.items()}


def _like_another(
    layer: TappedLayer,
    problems: Sequence[tuple[Sequences, Problem]],
    others: Mapping[str, AttentionSpec],
) -> Edit | None:
    """Return the specification of another layer, one field or all, that makes every stage right;
    None if there is none.
    """
    spec = problems[0][1].spec
    own = spec.values()
    for title, other in others.items():
        differ = [
            name
            for name, value in other.values().items()
            if value != own[name] and "dropout" not in name
        ]
        for names in [*([name] for name in differ), differ]:
            try:
                like = replace(spec, **{name: getattr(other, name) for name in names})
            except (TypeError, ValueError):  # a field that depends on another one
                continue
            if weight_shapes(like) == weight_shapes(spec) and all(
                _is_right(layer, *each, like) for each in problems
            ):
                fields = ", ".join(f"{name}={getattr(other, name)}" for name in names)
                return Edit(
                    OTHER_LAYER,
                    f"it computes as with the configuration of {title}: {fields}",
                    fixes=("use this layer's own configuration",),
                )
    return None


def _is_right(
    layer: TappedLayer, sequences: Sequences, problem: Problem, spec: AttentionSpec
) -> bool:
    """Return True if every stage is right with another specification."""
    problem = replace(problem, case=replace(problem.case, spec=spec))
    return first_difference(_compared_stages(sequences, problem, layer)[0]) is None


def _known(layer: TappedLayer, specs: Specs) -> list[ModelLayer]:
    """Return the specification of a layer, by the longest match of its name or by its index;
    several if it is ambiguous.

    Parts of a model may have layers of the same path: then the part in the layer's name decides.
    """
    if isinstance(specs, Mapping):
        return [
            ModelLayer(layer.index, "", specs.get(layer.index), {}, is_causal=not layer.is_cross)
        ]
    at = [each for each in specs if _is_at(layer.name, each.path)]
    longest = max((len(each.path) for each in at), default=0)
    found = [each for each in at if len(each.path) == longest]
    found = [each for each in found or specs if each.index == layer.index] or found
    words = layer.name.split(".")
    of_part = [
        each for each in found if each.part and any(word.startswith(each.part) for word in words)
    ]
    return list({(each.spec, each.is_causal): each for each in of_part or found}.values())


def _held(layer: TappedLayer, weights: LayerWeights) -> Mapping[str, Any] | None:
    """Return the weights of a layer, by its name, which may lack its beginning or its end, or by
    its index.

    Modules of another library have other names; there the number in the name decides if it is
    unique.
    """
    named = {name: each for name, each in weights.items() if isinstance(name, str)}
    if layer.name in named:
        return named[layer.name]
    if not layer.name and layer.module in named:  # a whole Flax model is called by its class
        return named[layer.module]
    found = [each for name, each in named.items() if _is_at(layer.name, name)]
    found = found or [
        each for name, each in named.items() if str(layer.index) in re.split(r"[.\[\]]", name)
    ]
    return found[0] if len(found) == 1 else dict(weights.items()).get(layer.index)  # pyright: ignore[reportArgumentType, reportCallIssue]


def _is_at(name: str, other: str) -> bool:
    """Return True if one name contains all parts of the other, in sequence."""
    return bool(other) and (f".{other}." in f".{name}." or f".{name}." in f".{other}.")


def _why_not(layer: TappedLayer, known: ModelLayer, *, has_weights: bool) -> str:
    if not any("output" in call.values for call in layer.calls):
        return "it was not called"
    if reason := _why_not_cross(layer, known):
        return reason
    if not has_weights:
        return "it has no weights"
    if (
        known.spec is not None
        and known.spec.shared_kv
        and not all({"k", "v"} <= each.values.keys() for each in layer.calls)
    ):
        return "the keys and values of another layer, to which it attends, were not seen"
    if known.spec is not None and known.spec.shared_kv and layer.calls[0].past:
        return "it received only the last tokens of the prompt"
    if (
        layer.training
        and known.spec is not None
        and (known.spec.dropout or known.spec.output_dropout)
    ):
        return "it was called in training mode, with dropout"
    return ""


def _why_not_cross(layer: TappedLayer, known: ModelLayer) -> str:
    """Return the reason why a layer with another sequence of keys, or without one, cannot be
    compared.
    """
    should = known.kind == CROSS
    if not layer.is_cross:
        return "the sequence that it attends to was not seen" if should else ""
    if known.kind and not should:
        return "it attends to another sequence, and should not"
    if any(call.past is None for call in layer.calls):
        return (
            "it attends to another sequence, with a cache that does not say how many tokens came "
            "before"
        )
    if known.spec is not None and (
        known.spec.has_positions or known.spec.has_distance_bias or known.spec.window_size
    ):
        return "it attends to another sequence, whose positions are not known"
    return ""


def _compared_stages(
    sequences: Sequences, problem: Problem, layer: TappedLayer
) -> tuple[list[Comparison], list[_TapWay] | Diagnosis | None]:
    """Return the comparisons of the stages of some sequences, and the ways to diagnose them, or the
    diagnosis.

    There is nothing to diagnose if no stage differs.
    """
    reference = Reference(problem)
    sequences = sequences.in_our_order(reference)
    sequences = sequences.unscaled(reference) if layer.scale == 1.0 else sequences
    observed, stepped = sequences.stages, sequences.must_be_stepped(problem.spec)
    if stepped:
        observed, reference = (
            sequences.stages_by_step,
            Reference(sequences.problem_by_step(problem)),
        )
    arithmetic = _arithmetic_of(layer)
    comparisons = _compared(observed, reference, layer.module, arithmetic)
    if stale := _of_other_keys(sequences, reference, layer.module, arithmetic):
        first = stale[0]
        about = (first.stage, first.error, first.ratio)
        unknown = Diagnosis(*about, findings=[Finding(*about)])
        before = sum(each.stage in ("mask", "q", "k", "v") for each in comparisons)
        return [*comparisons[:before], *stale, *comparisons[before:]], unknown
    if first_difference(comparisons) is None:
        return comparisons, None
    problems = {"by call" if stepped else "at once": (observed, reference.problem)}
    if len(sequences.chunks) > 1 and not sequences.is_cross:
        if not stepped:
            problems["by call"] = (sequences.stages_by_step, sequences.problem_by_step(problem))
        prompt = sequences.prompt
        problems["prompt"] = (prompt.stages, prompt.problem_of_its_own(problem))
    ways: list[_TapWay] = []
    for name, (stages, of_stages) in problems.items():
        ways.append(_TapWay(name, stages, of_stages))
        # If the attention function behaves as with a wrong mask although the recorded mask is
        # right, no bug in the mask explains it. So an unexplained difference is searched again
        # without the mask.
        others = {each: x for each, x in stages.items() if stage_named(each).quantity != "mask"}
        if len(others) < len(stages):
            ways.append(_TapWay(f"{name}, without the mask", others, of_stages))
    return comparisons, ways


def _of_other_keys(
    sequences: Sequences, reference: Reference, backend: str, arithmetic: str
) -> list[Comparison]:
    """Return the keys and values of another sequence in later calls that differ from those of the
    first call.
    """
    problem, found = reference.problem, list[Comparison]()
    for (step, part), cached in sequences.caches.items() if sequences.is_cross else ():
        label = Label(problem.case.name, backend, problem.dtype, part[0])
        comparison = reference.compare(cached, label, arithmetic)
        found += (
            [] if comparison.passed else [replace(comparison, stage=f"step{step}.cache.{part}")]
        )
    return found


def _arithmetic_of(layer: TappedLayer) -> str:
    """Return the rounding of a right layer."""
    each, with_scores = UNFUSED
    return "ieee" if not layer.attention else with_scores if layer.attention == "eager" else each


def _diagnosed_as(way: _TapWay, arithmetic: str) -> Diagnosis:
    with np.errstate(all="ignore"):
        return diagnose(way.stages, way.problem, arithmetic=arithmetic)


def _searched(ways: Sequence[_TapWay], arithmetic: str) -> tuple[Diagnosis, _TapWay]:
    """Return the diagnosis in the first way in which known bugs explain everything, otherwise in
    the first way.

    A wrong mask of the prompt does not affect later tokens, as a wrong mask of all tokens at once
    would.
    """
    first: tuple[Diagnosis, _TapWay] | None = None
    for way in ways:
        found = _diagnosed_as(way, arithmetic)
        if found.is_known and found.kind != "none":
            return found, way
        first = first or (found, way)
    if first is None:
        raise ValueError("there must be a way to diagnose a layer")
    return first


def _compared(
    observed: Mapping[str, np.ndarray], reference: Reference, backend: str, arithmetic: str
) -> list[Comparison]:
    """Compare each stage with the reference: from the layer's input, and from the recorded stages
    before it.
    """
    trial = Trial(reference.problem, observed, arithmetic)
    found = []
    for stage in (stage for stage in reference.accumulated if stage in observed):
        label = Label(reference.problem.case.name, backend, reference.problem.dtype, stage)
        comparison = reference.compare(observed[stage], label, arithmetic)
        comparison = reference.compare_noise(comparison, observed[stage], label, arithmetic)
        found.append(
            comparison.with_step(trial.judgement(stage, ()).ratio, "wrong for its recorded inputs")
        )
    return found

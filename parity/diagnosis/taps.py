"""Which layer of a tapped model goes wrong, at which stage, and why: against the reference, or beside another tap."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mha_spec import AttentionSpec
from parity.core.compare import Comparison, Label, first_difference
from parity.core.problem import Problem
from parity.core.records import JsonRecord
from parity.core.reference import UNFUSED
from parity.core.stages import stage_named
from parity.core.trace import Reference
from parity.core.weights import check_weights, weight_shapes
from parity.diagnosis.diagnose import Diagnosis, Unknown, diagnose
from parity.diagnosis.replay import Replay
from parity.diagnosis.tapped import Sequences, sequences_of
from parity.models.specs import ModelLayer
from parity.tapping.record import Tapped, TappedLayer


@dataclass(frozen=True)
class LikeAnother(Diagnosis):
    """Of a layer that no mistake explains, and that is right as another one of its model.

    Attributes:
        like: what it has of which other layer, in words.
    """

    like: str = ""

    @property
    def cause(self) -> str:
        """What it has of the other layer."""
        return self.like

    def __str__(self) -> str:
        return f"{self.stage} is {self.ratio:.2g} times its budget\n{self.like}"


@dataclass(frozen=True)
class LayerVerdict(JsonRecord):
    """A layer alone: what it gave for what it got, against the float64 reference.

    Attributes:
        layer: `layer 17 (sliding_attention)`, or `decoder layer 5 (cross_attention)`.
        name: of the module.
        index: which layer it is.
        comparisons: of each stage that was seen.
        diagnosis: of a layer that differs.
        not_judged: why it was not judged; empty if it was.
    """

    layer: str
    name: str
    index: int
    comparisons: list[Comparison] = field(default_factory=list)
    diagnosis: Diagnosis | None = None
    not_judged: str = ""

    IN_JSON = ("layer", "name", "index", "passed", "not_judged", "comparisons", "diagnosis", "like")

    @property
    def difference(self) -> Comparison | None:
        """Where it goes wrong, if it does."""
        return first_difference(self.comparisons)

    @property
    def passed(self) -> bool:
        """Whether it was judged, and every stage is within its budget."""
        return not self.not_judged and self.difference is None

    @property
    def like(self) -> str:
        """What it has of another layer of the model, which explains it where no mistake does; empty otherwise."""
        return self.diagnosis.like if isinstance(self.diagnosis, LikeAnother) else ""

    @property
    def is_rounding(self) -> bool:
        """Whether it is just beyond its budget, and no mistake explains that."""
        return self.diagnosis is not None and self.diagnosis.kind == "rounding"

    def __str__(self) -> str:
        difference = self.difference
        if self.not_judged:
            return f"{self.layer}: not judged, {self.not_judged}"
        if difference is None:
            return f"{self.layer}: ok"
        told = f"\n{self.like or self.diagnosis}" if self.diagnosis else ""
        return f"{self.layer}, stage {difference.stage}: {difference.worse_ratio:.2g} times its budget{told}"


@dataclass(frozen=True)
class TapVerdict(JsonRecord):
    """Every layer of a recording, each alone."""

    layers: list[LayerVerdict]

    IN_JSON = ("passed", "layers")

    @property
    def wrong(self) -> list[LayerVerdict]:
        """The layers that go wrong by themselves, those last that only round more than they should."""
        return sorted((layer for layer in self.layers if layer.difference is not None), key=lambda x: x.is_rounding)

    @property
    def first(self) -> LayerVerdict | None:
        """The first of them: where to begin."""
        return next(iter(self.wrong), None)

    @property
    def passed(self) -> bool:
        """Whether some layer was judged, and none goes wrong."""
        return self.first is None and any(layer.passed for layer in self.layers)

    def __str__(self) -> str:
        wrong = self.wrong
        lines = [str(layer) for layer in self.layers if layer.not_judged]
        lines += [str(wrong[0])] if wrong else []
        lines += [f"and {len(wrong) - 1} more: {', '.join(layer.layer for layer in wrong[1:])}"] if wrong[1:] else []
        judged = sum(not layer.not_judged for layer in self.layers)
        told = f"{judged} layers agree with the reference, each for its own input" if judged else "no layer was judged"
        lines += [] if wrong else [told]
        return "\n".join(lines)


CROSS = "cross_attention"
"""The kind of layers that attend to another sequence."""

Specs = Sequence[ModelLayer] | Mapping[int, AttentionSpec | None]
LayerWeights = Mapping[int, Mapping[str, Any]] | Mapping[str, Mapping[str, Any]]


def judge_tap(
    tapped: Tapped, specs: Specs, weights: LayerWeights, *, is_causal: bool | None = None, diagnoses: bool = True
) -> TapVerdict:
    """Judge each layer of a recording alone, by what the float64 reference gives for the layer's own input.

    Prompt and steps are joined, padding is left out.

    Args:
        tapped: the recording.
        specs: what each layer should be, by its index, or as `parity.specs_of` gives them.
        weights: the canonical weights that each layer should have, by its index, or by the name of its module, as
            models with an encoder and a decoder need it.
        is_causal: whether tokens should not see later ones; as `specs` say when absent, else true.
        diagnoses: whether a layer that differs is diagnosed.

    Returns:
        A verdict on each layer that was tapped, in order.

    Raises:
        TypeError, ValueError: if weights are not those of their spec, or the calls of a layer do not follow each other.
    """
    is_transformers = bool(tapped.config)
    asked = {"is_named_so": is_transformers, "diagnoses": diagnoses}
    layers = tapped.layers
    return TapVerdict([_judge_layer(layer, layers, specs, weights, is_causal, **asked) for layer in layers])


def _judge_layer(
    layer: TappedLayer,
    layers: Sequence[TappedLayer],
    specs: Specs,
    weights: LayerWeights,
    is_causal: bool | None,
    *,
    is_named_so: bool,
    diagnoses: bool,
) -> LayerVerdict:
    found = _known(layer, specs)
    verdict = LayerVerdict(layer.title, layer.name, layer.index)
    if len(found) > 1:
        return replace(verdict, not_judged=f"it may be any of {len(found)} layers of the model, by its name")
    known = found[0] if found else ModelLayer(layer.index, "", None, {})
    verdict = replace(verdict, layer=_title(replace(known, kind=known.kind or layer.kind)))
    if known.spec is None:
        return replace(verdict, not_judged="it has no attention over keys, or no spec")
    held = _held(layer, weights)
    if reason := _why_not(layer, known, has_weights=held is not None):
        return replace(verdict, not_judged=reason)
    checked = check_weights(held or {}, known.spec)
    causal = known.is_causal if is_causal is None else is_causal
    problems: list[tuple[Sequences, Problem]] = []
    seen = sequences_of(layer)
    for sequences, source in zip(seen, _sources(layer, known, layers, len(seen)), strict=True):
        if known.path and is_named_so and not known.is_at(layer.name):
            sequences = sequences.without("output")  # the module is a part of the layer, as of BERT's
        problem = sequences.problem(verdict.layer, known.spec, checked, is_causal=causal, source=source)
        problems.append((sequences, problem))
        is_explained = verdict.diagnosis is not None and verdict.diagnosis.is_known
        comparisons, diagnosis = _judge(sequences, problem, layer, diagnoses=diagnoses and not is_explained)
        if verdict.diagnosis is not None and (diagnosis is None or not diagnosis.is_known):
            diagnosis = verdict.diagnosis  # that of the first that differ, if none is explained
        verdict = replace(verdict, comparisons=[*verdict.comparisons, *comparisons], diagnosis=diagnosis)
    if not verdict.comparisons:
        return replace(verdict, not_judged="nothing was seen of it but its input")
    unknown = verdict.diagnosis
    if unknown is None or unknown.is_known:
        return verdict
    like = _like_another(layer, problems, _others(known, specs))
    told = LikeAnother(**{**vars(unknown), "kind": "like", "like": like}) if like else unknown
    return replace(verdict, diagnosis=told)


def _sources(
    layer: TappedLayer, known: ModelLayer, layers: Sequence[TappedLayer], count: int
) -> Sequence[Sequences | None]:
    """The same sequences of the layer whose keys and values a layer shares; None if it was not tapped."""
    name = re.sub(r"\d+", str(known.kv_source), layer.name) if known.path == layer.name else ""
    found = [each for each in layers if known.kv_source is not None and each.index == known.kv_source]
    found = [each for each in found if each.name == name] or found
    return sequences_of(found[0]) if found else [None] * count


def _title(layer: ModelLayer) -> str:
    """What reports call it."""
    return f"{layer.part} {TappedLayer('', layer.index, '', layer.kind).title}".strip()


def _others(known: ModelLayer, specs: Specs) -> dict[str, AttentionSpec]:
    """The specifications of the other layers, each once, by the first that has it."""
    layers = specs if isinstance(specs, Sequence) else [ModelLayer(i, "", spec, {}) for i, spec in specs.items()]
    found: dict[AttentionSpec, str] = {}
    for layer in layers:
        if layer.spec is not None and layer.spec != known.spec:
            found.setdefault(layer.spec, _title(layer))
    return {title: spec for spec, title in found.items()}


def _like_another(
    layer: TappedLayer, problems: Sequence[tuple[Sequences, Problem]], others: Mapping[str, AttentionSpec]
) -> str:
    """What a layer has of another one, one field or all, and then is right."""
    spec = problems[0][1].spec
    own = spec.values()
    for title, other in others.items():
        differ = [name for name, value in other.values().items() if value != own[name] and "dropout" not in name]
        for names in [*([name] for name in differ), differ]:
            try:
                like = replace(spec, **{name: getattr(other, name) for name in names})
            except (TypeError, ValueError):  # a field that goes with another one
                continue
            if weight_shapes(like) == weight_shapes(spec) and all(_is_right(layer, *each, like) for each in problems):
                fields = ", ".join(f"{name}={getattr(other, name)}" for name in names)
                return f"it matches the reference with what {title} should have: {fields}"
    return ""


def _is_right(layer: TappedLayer, sequences: Sequences, problem: Problem, spec: AttentionSpec) -> bool:
    """Whether every stage is right if the layer is another one."""
    problem = replace(problem, case=replace(problem.case, spec=spec))
    return first_difference(_judge(sequences, problem, layer, diagnoses=False)[0]) is None


def _known(layer: TappedLayer, specs: Specs) -> list[ModelLayer]:
    """What a layer should be: those at the longest part of its name, or with its index; several if that cannot be told.

    Parts of a model may have layers of the same path: of these it is that of the part in the layer's name.
    """
    if isinstance(specs, Mapping):
        return [ModelLayer(layer.index, "", specs.get(layer.index), {}, is_causal=not layer.is_cross)]
    at = [each for each in specs if _is_at(layer.name, each.path)]
    longest = max((len(each.path) for each in at), default=0)
    found = [each for each in at if len(each.path) == longest]
    found = [each for each in found or specs if each.index == layer.index] or found
    words = layer.name.split(".")
    of_part = [each for each in found if each.part and any(word.startswith(each.part) for word in words)]
    return list({(each.spec, each.is_causal): each for each in of_part or found}.values())


def _held(layer: TappedLayer, weights: LayerWeights) -> Mapping[str, Any] | None:
    """The weights of a layer, by its name, which may lack its beginning or its end, or by its index.

    Modules of another library have other names; there it is the number in the name, where only one has it.
    """
    named = {name: each for name, each in weights.items() if isinstance(name, str)}
    found = [each for name, each in named.items() if _is_at(layer.name, name)]
    found = found or [each for name, each in named.items() if str(layer.index) in re.split(r"[.\[\]]", name)]
    return found[0] if len(found) == 1 else dict(weights.items()).get(layer.index)  # pyright: ignore[reportArgumentType, reportCallIssue]


def _is_at(name: str, other: str) -> bool:
    """Whether one name has all parts of the other, one after the other."""
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
    if layer.training and known.spec is not None and (known.spec.dropout or known.spec.output_dropout):
        return "it was called in training mode, with dropout"
    return ""


def _why_not_cross(layer: TappedLayer, known: ModelLayer) -> str:
    """Why the other sequence that a layer attends to, or should, keeps it from being judged."""
    should = known.kind == CROSS
    if not layer.is_cross:
        return "the sequence that it attends to was not seen" if should else ""
    if known.kind and not should:
        return "it attends to another sequence, and should not"
    if any(call.past is None for call in layer.calls):
        return "it attends to another sequence, with a cache that does not say how many tokens came before"
    if known.spec is not None and (known.spec.has_positions or known.spec.has_distance_bias or known.spec.window_size):
        return "it attends to another sequence, whose positions are not known"
    return ""


def _judge(
    sequences: Sequences, problem: Problem, layer: TappedLayer, *, diagnoses: bool
) -> tuple[list[Comparison], Diagnosis | None]:
    """The stages of some sequences, and, if that is asked, what explains what differs."""
    reference = Reference(problem)
    sequences = sequences.in_our_order(reference)
    sequences = sequences.unscaled(reference) if layer.scale == 1.0 else sequences
    observed, stepped = sequences.stages, sequences.must_be_stepped(problem.spec)
    if stepped:
        observed, reference = sequences.stages_by_step, Reference(sequences.problem_by_step(problem))
    arithmetic = _arithmetic_of(layer)
    comparisons = _compared(observed, reference, layer.module, arithmetic)
    if stale := _of_other_keys(sequences, reference, layer.module, arithmetic):
        first = stale[0]
        about = (first.stage, first.error, first.ratio)
        unknown = Diagnosis("unknown", *about, unknowns=[Unknown(*about)])
        before = sum(each.stage in ("mask", "q", "k", "v") for each in comparisons)
        return [*comparisons[:before], *stale, *comparisons[before:]], unknown if diagnoses else None
    if first_difference(comparisons) is None or not diagnoses:
        return comparisons, None
    ways = [(observed, reference.problem)]
    if len(sequences.chunks) > 1 and not sequences.is_cross:
        prompt = sequences.prompt
        ways += [] if stepped else [(sequences.stages_by_step, sequences.problem_by_step(problem))]
        ways += [(prompt.stages, prompt.problem_of_its_own(problem))]
    return comparisons, _diagnosed(ways, arithmetic)


def _of_other_keys(sequences: Sequences, reference: Reference, backend: str, arithmetic: str) -> list[Comparison]:
    """What later calls have as keys and values of another sequence, where it is not what the first one had."""
    problem, found = reference.problem, list[Comparison]()
    for (step, part), cached in sequences.caches.items() if sequences.is_cross else ():
        label = Label(problem.case.name, backend, problem.dtype, part[0])
        comparison = reference.compare(cached, label, arithmetic)
        found += [] if comparison.passed else [replace(comparison, stage=f"step{step}.cache.{part}")]
    return found


def _arithmetic_of(layer: TappedLayer) -> str:
    """How a layer that is right rounds."""
    each, with_scores = UNFUSED
    return "ieee" if not layer.attention else with_scores if layer.attention == "eager" else each


def _diagnosed(ways: list[tuple[dict[str, np.ndarray], Problem]], arithmetic: str) -> Diagnosis:
    """What explains some stages: of all tokens at once, call by call, or of the prompt alone.

    A wrong mask of the prompt does not show the tokens after it, as that of all tokens at once would.

    What a layer does within its attention function with the right mask, as if it had a wrong one, no mistake in the
    mask explains while the right one is among the stages; so what stays unknown is asked again without it.
    """
    first = None
    for stages, problem in ways:
        for left_out in ((), ("mask",)):
            seen = {name: x for name, x in stages.items() if stage_named(name).quantity not in left_out}
            if left_out and len(seen) == len(stages):
                continue
            with np.errstate(all="ignore"):
                found = diagnose(seen, problem, arithmetic=arithmetic)
            if found.is_known and found.kind != "none":
                return found
            first = first or found
    return first or Diagnosis("none")


def _compared(
    observed: Mapping[str, np.ndarray], reference: Reference, backend: str, arithmetic: str
) -> list[Comparison]:
    """Each stage against the reference: from the layer's input, and from the stages that were seen before it."""
    replay = Replay(reference.problem, observed, arithmetic)
    found = []
    for stage in (stage for stage in reference.accumulated if stage in observed):
        label = Label(reference.problem.case.name, backend, reference.problem.dtype, stage)
        comparison = reference.compare(observed[stage], label, arithmetic)
        comparison = reference.compare_noise(comparison, observed[stage], label, arithmetic)
        found.append(comparison.with_step(replay.judgement(stage, ()).ratio, "wrong for what it was made of"))
    return found

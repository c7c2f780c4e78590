"""Everything that other programs read: JSON of each command, metadata of files, and JUnit XML.

The JSON of a command is a typed record: a `TypedDict`, whose annotations have the type and the
meaning of each key. Tests make a JSON Schema of each record (docs/data/schemas), and validate the
commands' output with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple, TypedDict, get_type_hints

Record = dict[str, Any]
"""A record whose keys a specification, a configuration or a library determines."""

Number = float | None
"""A number; null for infinity and NaN, which JSON does not have."""


class Schema(NamedTuple):
    """The JSON that a command writes.

    Attributes:
        version: increases if a key appears, disappears, or changes its meaning.
        forms: the record of the result in each form of the command.
    """

    version: int
    forms: Mapping[str, type]

    @property
    def keys(self) -> dict[str, str]:
        """The keys of all forms, with their meanings."""
        keys_of_all: dict[str, str] = {}
        for record in self.forms.values():
            keys_of_all.update(meanings_of(record))
        return keys_of_all


def meanings_of(record: type) -> dict[str, str]:
    """Return the keys of a record, and the meaning of each."""
    meanings = {}
    for key, annotation in get_type_hints(record, include_extras=True).items():
        (meanings[key],) = annotation.__metadata__
    return meanings


# ---- Comparisons ---------------------------------------------------------------------------------


class StageWithoutResult(TypedDict):
    """A stage, a case or a backend, and why it has no result."""

    case: Annotated[str | None, "name of the case"]
    backend: Annotated[str, "implementation"]
    dtype: Annotated[str | None, "dtype of the inputs"]
    stage: Annotated[str | None, "name of the stage"]
    status: Annotated[Literal["passed", "failed", "skipped", "missing"], "verdict"]
    reason: Annotated[str, "why it failed, or has no result"]


class ComparedStage(StageWithoutResult, total=False):
    """A stage, compared with the expected values; without a result it lacks these keys."""

    error: Annotated[Number, "distance from the expected values, in the norm"]
    budget: Annotated[Number, "tolerance of this distance"]
    ratio: Annotated[Number, "error / budget; at most 1 passes"]
    norm: Annotated[str, "norm that decides: rms, max, slope or zeros"]
    max_abs: Annotated[Number, "largest absolute error"]
    max_ulp: Annotated[Number, "largest error in units in the last place"]
    pcc: Annotated[Number, "Pearson correlation"]
    worst_index: Annotated[dict[str, int], "index of the largest error, by axis"]
    worst_values: Annotated[list[Number] | None, "actual and expected value there"]
    mismatched: Annotated[int, "number of elements beyond the budget"]
    size: Annotated[int, "number of elements"]
    shape: Annotated[list[int], "shape of the expected values"]
    local_ratio: Annotated[Number, "error / budget of the stage's own computation"]
    against: Annotated[str, "the reference, or expected"]


class StageOfRank(ComparedStage):
    """The first wrong stage of a rank."""

    rank: Annotated[int, "number of the rank"]


class Gap(TypedDict):
    """Something that was not compared."""

    what: Annotated[str, "what was not compared"]
    reason: Annotated[str, "why"]
    labels: Annotated[list[str], "cases or layers"]
    is_open: Annotated[bool, "true if it was requested"]


class UntestedFeature(TypedDict):
    """A feature of layers of a model that more tokens would test."""

    what: Annotated[str, "the feature"]
    num_tokens: Annotated[int, "largest number of tokens of the run"]
    needed: Annotated[int, "smallest number of tokens that tests it"]
    gib: Annotated[float, "rough memory of a run with that many, in GiB"]
    layers: Annotated[list[str], "names of the layers"]


class CollectivesOfProgram(TypedDict):
    """What the devices of a program send."""

    case: Annotated[str, "name of the case"]
    dtype: Annotated[str, "dtype of the inputs"]
    backend: Annotated[str, "implementation"]
    program: Annotated[str, "forward, gradient, prompt or step, after its path"]
    passed: Annotated[bool, "true if all collectives are necessary or have an excuse"]
    counted: Annotated[dict[str, int], "collectives of the program, by kind"]
    ideal: Annotated[dict[str, int], "necessary collectives, by kind"]
    excuse: Annotated[str, "reason for additional ones; empty if there must be none"]


class PatternOfTensors(TypedDict):
    """The relation of two tensors of one name."""

    name: Annotated[str, "name of the relation"]
    words: Annotated[str, "second tensor in terms of the first"]
    page: Annotated[str, "page about it; empty if there is none"]
    fix: Annotated[str, "how to fix it; empty if it is unknown"]
    heads: Annotated[list[int], "heads that differ, if not all do"]
    rows: Annotated[list[int], "rows that differ, if not all do"]
    columns: Annotated[list[int], "columns that differ, if not all do"]


class DifferentTensor(TypedDict):
    """A tensor that differs between two files."""

    name: Annotated[str, "its canonical name"]
    shape: Annotated[list[int], "shape of the canonical tensor"]
    differing: Annotated[int, "number of elements that differ; 0 if only the dtypes differ"]
    rows: Annotated[int, "number of rows that differ"]
    columns: Annotated[int | None, "number of columns that differ; null without columns"]
    heads: Annotated[list[int], "heads that differ, if the tensor has heads"]
    num_heads: Annotated[int, "number of its heads; 0 if it has none"]
    worst_index: Annotated[list[int], "index of the largest difference"]
    worst_values: Annotated[list[Number], "value of the first and of the second file there"]
    max_abs: Annotated[Number, "largest absolute difference"]
    max_ulp: Annotated[Number, "largest difference in units in the last place"]
    pattern: Annotated[PatternOfTensors | None, "relation of the tensors; null if none is known"]


class ComparedWeights(TypedDict):
    """Two sets of weights, compared tensor by tensor."""

    kind: Annotated[
        Literal["bits", "values", "copy", "rounding", "function", "different"],
        "bits, values, copy, rounding, function (other tensors of the same function) or different",
    ]
    dtypes: Annotated[list[str], "dtypes of the first and of the second set"]
    max_ulp: Annotated[Number, "largest difference in units in the last place"]
    differences: Annotated[list[DifferentTensor], "tensors that differ"]
    how: Annotated[str, "description of the relation; empty if they are different"]
    same: Annotated[bool, "true if both compute the same attention up to rounding"]


class TensorsOfOneFile(TypedDict):
    """Tensors that only one of two files has."""

    file: Annotated[str, "path of the file that has them"]
    other: Annotated[str, "path of the file that lacks them"]
    names: Annotated[list[str], "their names"]
    copy_of: Annotated[
        str,
        "tensor of the same file that they repeat, which layers of the other file share; empty if "
        "they belong to no layer, and were not compared",
    ]


class DistanceOfLayer(TypedDict):
    """The distance of two recordings at a layer."""

    layer: Annotated[str, "name of the layer"]
    names: Annotated[list[str], "names of its module in both recordings"]
    errors: Annotated[dict[str, Number], "distance of each stage"]
    stage: Annotated[str, "the first of them; empty if the layer adds no difference"]
    grows: Annotated[list[str], "stages that differ by more than the input explains"]
    tokens: Annotated[int, "number of compared tokens"]


# ---- Diagnoses -----------------------------------------------------------------------------------

WrongField = TypedDict(
    "WrongField",
    {
        "field": Annotated[str, "field of AttentionSpec, such as `rope.theta`"],
        "is": Annotated[Any, "the value that the implementation uses"],
        "should_be": Annotated[Any, "the value that it should use"],
    },
)
"""A fix as data."""


class FirstFinding(TypedDict):
    """The parts of a finding."""

    likely_bug: Annotated[str, "names of the bugs, joined by commas"]
    first_wrong_stage: Annotated[str, "first wrong stage"]
    where: Annotated[str, "part of that stage that differs, or the wrong ranks"]
    evidence: Annotated[str, "error with and without the bugs"]
    fix: Annotated[str, "how to fix them"]
    wrong_fields: Annotated[list[WrongField], "the fix as data: fields with a wrong value"]
    more: Annotated[str, "command that prints more"]


class LocationOfError(TypedDict):
    """The part of a stage that is wrong; indices are null if the stage has no such axis."""

    words: Annotated[str, "its description"]
    sequences: Annotated[list[int] | None, "wrong sequences"]
    heads: Annotated[list[int] | None, "wrong heads"]
    positions: Annotated[list[int] | None, "wrong query tokens; key tokens without queries"]
    keys: Annotated[list[int] | None, "wrong keys"]
    features: Annotated[list[int] | None, "wrong features"]
    cells: Annotated[str, "common property of wrong cells, such as `hidden`; empty without one"]
    wrong: Annotated[int, "number of wrong elements"]
    size: Annotated[int, "number of elements"]


class PatternOfError(TypedDict):
    """A pattern that explains a wrong stage."""

    name: Annotated[str, "its name"]
    about: Annotated[str, "the error in a line"]
    fitted: Annotated[Record, "its fitted parameters by name"]
    parameters: Annotated[int, "number of fitted parameters"]
    pages: Annotated[list[str], "pages about it"]
    fixes: Annotated[list[str], "how to fix it"]


class DescribedError(TypedDict):
    """A wrong stage that no known bug explains."""

    location: Annotated[LocationOfError, "where it is wrong"]
    patterns: Annotated[list[PatternOfError], "patterns that explain it, the simplest first"]
    signs: Annotated[list[str], "unexpected properties, which explain nothing by themselves"]


class FindingRecord(FirstFinding):
    """One cause of a difference."""

    bugs: Annotated[list[str], "names of the bugs; empty for a pattern or an unexplained stage"]
    about: Annotated[str, "the error in a line"]
    fixes: Annotated[list[str], "an instruction for each bug"]
    pages: Annotated[list[str], "pages about the bugs"]
    stages: Annotated[list[str], "stages that it explains"]
    follows: Annotated[list[str], "later stages that differ for the same reason"]
    error_before: Annotated[Number, "error of the first wrong stage"]
    ratio_before: Annotated[Number, "that error / budget"]
    error: Annotated[Number, "error with the bugs in the reference"]
    ratio: Annotated[Number, "that error / budget"]
    others: Annotated[list[str], "other explanations that the stages cannot distinguish"]
    description: Annotated[
        DescribedError | None, "location, patterns and signs; null for a known bug"
    ]
    nearest: Annotated[list[list[Any]], "bugs that reduce the error most, and the error left"]
    num_tried: Annotated[int, "number of known bugs that were tried on an unexplained stage"]


class FunctionDiagnosis(FirstFinding):
    """The diagnosis of a function, of traces or of weights."""

    kind: Annotated[
        Literal["none", "convention", "precision", "structure", "pattern", "unknown"],
        "none, convention, precision, structure, pattern or unknown",
    ]
    stage: Annotated[str, "first stage that differs"]
    error: Annotated[Number, "its error, root mean square"]
    ratio: Annotated[Number, "its error / budget"]
    findings: Annotated[
        list[FindingRecord],
        "one for each cause: known bugs, then patterns, then unexplained stages",
    ]
    has_stages: Annotated[bool, "true if more than the output was observed"]
    malformed: Annotated[dict[str, str], "stages that cannot be compared, and why"]
    conventions: Annotated[dict[str, str], "stages in a different convention, and which"]
    choice: Annotated[str, "difference in the computation that is not a bug"]
    untried: Annotated[str, "parts of the search that exceeded the time limit"]
    output_agrees: Annotated[
        bool | None,
        "whether the output agrees, also if an earlier stage is wrong; null if it was not compared",
    ]
    dtypes: Annotated[dict[str, str], "stages with a dtype that differs from the problem's"]
    dtype: Annotated[str, "dtype of the problem"]
    sample: Annotated[str, "part of a large layer that was searched"]
    hidden: Annotated[
        list[str], "known bugs that these stages would show in float32 only, if nothing differs"
    ]
    not_exercised: Annotated[
        list[str], "features of the layer that the case cannot show, if nothing differs"
    ]
    headline: Annotated[str, "diagnosis in a line"]
    text: Annotated[str, "diagnosis as it is printed"]


class CaseDiagnosis(FunctionDiagnosis):
    """The diagnosis of a failed case."""

    case: Annotated[str, "name of the case"]
    backend: Annotated[str, "implementation"]


class WeightsDiagnosis(FunctionDiagnosis):
    """The diagnosis of two files of weights."""

    weights: Annotated[ComparedWeights, "tensors that differ"]
    not_compared: Annotated[list[Gap], "layers that were not compared, and why"]


class DiagnosisOfRanks(FirstFinding):
    """The diagnosis of the ranks of a divided layer."""

    is_wrong: Annotated[bool, "true if a rank differs by more than rounding"]
    wrong: Annotated[list[StageOfRank], "first wrong stage of each wrong rank"]
    findings: Annotated[
        list[FindingRecord], "the bug that explains all ranks, or the first wrong stage"
    ]


# ---- Commands ------------------------------------------------------------------------------------


class Summary(TypedDict):
    """Numbers of stages, backends and cases."""

    passed: Annotated[int, "stages that passed"]
    failed: Annotated[int, "stages that failed"]
    skipped: Annotated[int, "backends and cases that were skipped"]
    missing: Annotated[int, "traces that are missing"]


class CasesReport(TypedDict):
    """Cases or layers, compared with the reference."""

    environment: Annotated[Record, "versions, processors and settings of the run"]
    warnings: Annotated[list[str], "circumstances that make results less comparable"]
    summary: Annotated[
        Summary,
        "numbers of stages that passed and failed, of skipped backends and cases, and of missing "
        "traces",
    ]
    results: Annotated[
        list[ComparedStage],
        "a record for each stage of each case, dtype and backend; those without a result have a "
        "`reason`",
    ]
    not_compared: Annotated[
        list[Gap],
        "gaps in the comparison, by reason; `is_open` if requested, so that the exit status is 2",
    ]
    exercised: Annotated[
        list[str], "further cases that test features of layers of a model, and which"
    ]
    not_exercised: Annotated[
        list[UntestedFeature],
        "features of layers of a model that more tokens would test, and how many",
    ]
    diagnoses: Annotated[list[CaseDiagnosis], "a diagnosis for each of the first failed cases"]


class MeshReport(CasesReport):
    """Cases on meshes of devices."""

    collectives: Annotated[list[CollectivesOfProgram], "what the devices of each program send"]


class TwoRecordings(TypedDict):
    """The distance of two recordings."""

    agrees: Annotated[bool, "true if no layer adds a difference of its own"]
    alone: Annotated[list[str], "layers that one recording has alone"]
    left_out: Annotated[
        int, "tokens that were not compared, because the recordings generated different ones"
    ]
    layers: Annotated[list[DistanceOfLayer], "difference of each layer at each stage"]


class RecordedLayer(TypedDict):
    """The verdict on a layer of a recording."""

    layer: Annotated[str, "its number and kind"]
    name: Annotated[str, "name of its module"]
    index: Annotated[int, "its number"]
    passed: Annotated[bool, "true if it was compared and every stage agrees"]
    not_compared: Annotated[str, "why it was not compared; empty if it was"]
    left_out: Annotated[str, "sequences that were not compared, and why; empty if all were"]
    comparisons: Annotated[list[ComparedStage], "a record for each stage"]
    diagnosis: Annotated[FunctionDiagnosis | None, "diagnosis of a layer that differs"]


class VerdictOnRecording(TypedDict):
    """The verdict on a recording."""

    recording: Annotated[str, "path of the recording"]
    passed: Annotated[bool, "true if a layer was compared and none is wrong"]
    layers: Annotated[list[RecordedLayer], "verdict on each layer"]


class Recordings(TypedDict):
    """Recordings, compared with the reference."""

    recordings: Annotated[list[VerdictOnRecording], "verdict on each layer, by recording"]


class AnswerOfSubject(TypedDict):
    """The answer of an implementation to a question."""

    question: Annotated[str, "name of the question"]
    status: Annotated[
        Literal["absent", "ok", "note", "differs", "broken"],
        "absent, ok, note, differs or broken; the last two are broken promises",
    ]
    words: Annotated[str, "answer in words"]
    example: Annotated[str, "for a broken promise: shapes, seed, path and values"]
    by_path: Annotated[dict[str, str], "answer of each path"]
    rejection: Annotated[str, "first path that rejects the question, and why; empty if none does"]


class SubjectOfQuestions(TypedDict):
    """The answers of an implementation."""

    name: Annotated[str, "the implementation"]
    framework: Annotated[str, "its framework"]
    version: Annotated[str, "version of its library"]
    missing: Annotated[str, "why it could not be examined; empty if it was"]
    answers: Annotated[list[AnswerOfSubject], "an answer to each question"]


class ConformanceReport(TypedDict):
    """Answers about implementations."""

    packages: Annotated[dict[str, str], "versions of packages"]
    subjects: Annotated[list[SubjectOfQuestions], "answers of each implementation"]
    not_examined: Annotated[
        dict[str, list[str]], "requested dtypes that no check examined, by implementation"
    ]


class InjectedBug(TypedDict):
    """The result of a bug that was injected into a callable while its tests ran."""

    bug: Annotated[str, "its name"]
    about: Annotated[str, "its description"]
    page: Annotated[str, "page about it"]
    status: Annotated[
        Literal[
            "noticed",
            "rejected",
            "not noticed",
            "changed nothing",
            "not reached",
            "timed out",
            "not injected",
        ],
        "noticed, rejected, not noticed, changed nothing, not reached, timed out or not injected",
    ]
    by: Annotated[str, "first failing test, or the exit status; if not noticed, a known reason"]
    seconds: Annotated[float, "duration of the tests"]
    is_caught: Annotated[bool, "true if no further test is needed for it"]


class InjectedBugs(TypedDict):
    """Bugs that were injected into a callable while its tests ran."""

    subject: Annotated[str, "the callable"]
    not_examined: Annotated[str, "why some properties of the callable are unknown"]
    outcomes: Annotated[list[InjectedBug], "result of each injected bug"]
    not_injected: Annotated[dict[str, str], "bugs that the callable does not allow, and why"]


class VerdictOnLayers(TypedDict):
    """The verdict on a pair of layers."""

    layers: Annotated[list[str], "names of both"]
    same: Annotated[bool, "true if they compute the same up to rounding"]
    same_bits: Annotated[bool, "true if their weights are the same, bit for bit"]
    weights: Annotated[ComparedWeights, "tensors that differ"]


class VerifiedFiles(TypedDict):
    """The layers of two files, compared."""

    results: Annotated[list[ComparedStage], "a record for each stage of each pair of layers"]
    layers: Annotated[list[VerdictOnLayers], "verdict on each pair of layers"]
    diagnosis: Annotated[FunctionDiagnosis | None, "diagnosis of the first pair that differs"]
    not_compared: Annotated[list[Gap], "layers that were not compared, and why"]
    only_in_one: Annotated[list[TensorsOfOneFile], "tensors that only one of the files has"]


class ListOfPages(TypedDict):
    """The pages about known bugs."""

    list: Annotated[dict[str, str], "each page, with its bug in a line"]


class ListOfBugs(TypedDict):
    """All known bugs."""

    bugs: Annotated[dict[str, str], "each bug, with its page"]


class Pages(TypedDict):
    """Pages about known bugs."""

    pages: Annotated[dict[str, str], "text of each page"]


class PlottedAttention(TypedDict):
    """A picture of attention weights."""

    stage: Annotated[str, "drawn stage"]
    sequence: Annotated[int, "drawn sequence"]
    heads: Annotated[list[int], "drawn heads"]
    shape: Annotated[list[int], "shape of the attention weights"]
    target: Annotated[str, "path of the image"]


class LayerOfFolder(TypedDict):
    """A layer of a model's configuration."""

    index: Annotated[int, "number of the layer, from 0"]
    kind: Annotated[str, "its kind in the configuration, such as full_attention"]
    spec: Annotated[Record | None, "its specification; null if it is not attention over keys"]
    origins: Annotated[dict[str, str], "source of each field of the specification"]
    part: Annotated[str, "part of the model, such as encoder, if it has several stacks"]
    is_causal: Annotated[bool, "true if queries attend to no later key"]
    path: Annotated[str, "prefix of its weights"]
    layout: Annotated[str, "layout of its weights"]
    shared: Annotated[dict[str, str], "weights that it shares with another layer, each by its path"]
    ignored: Annotated[list[str], "irrelevant entries in checkpoints"]
    keys_are_values: Annotated[bool, "true if values use the projection of keys"]
    kv_source: Annotated[int | None, "layer whose keys and values it uses; null if it has its own"]
    section: Annotated[str, "part of the configuration; empty without parts"]


class LayersOfFolder(TypedDict):
    """The layers of a model's folder."""

    layers: Annotated[list[LayerOfFolder], "specification of each layer"]
    not_read: Annotated[dict[str, str], "parts that are not read, and why"]


class EvidenceOfField(TypedDict):
    """The evidence for a field of a specification."""

    field: Annotated[str, "its name"]
    value: Annotated[Any, "its value"]
    how: Annotated[str, "how it was found"]
    up_to: Annotated[
        int | None, "number of tokens up to which it was observed; null if it depends on none"
    ]
    is_observed: Annotated[bool, "false if an attribute or a configuration alone has it"]


class LayerByObservation(TypedDict):
    """What observation of a layer of a live model shows."""

    name: Annotated[str, "name of its module"]
    spec: Annotated[Record | None, "its specification; null if no specification computes it"]
    names: Annotated[dict[str, str], "parameter that has each weight"]
    rows: Annotated[dict[str, list[int]], "rows of a parameter that has more than the weight"]
    inputs: Annotated[dict[str, str], "inputs of its projections"]
    output: Annotated[str, "path of its output through the module"]
    from_call: Annotated[dict[str, str], "further arguments that each call must pass"]
    is_causal: Annotated[bool | None, "true if queries attend to no later key"]
    evidence: Annotated[list[EvidenceOfField], "how each field was found"]
    num_tokens: Annotated[int, "largest number of tokens that it was verified with"]
    fewest_tokens: Annotated[int, "smallest number of tokens that it was verified with"]
    positions: Annotated[
        list[list[int]], "first and last position of each verified run of positions"
    ]
    share: Annotated[Number, "error on fresh inputs / budget"]
    reason: Annotated[str, "first stage that no field explains; empty if there is none"]


class LayerOfLiveModel(TypedDict):
    """A layer of a live model, described by rules, by observation, or by both."""

    name: Annotated[str, "name of its module"]
    spec: Annotated[Record | None, "its verified specification; null if there is none"]
    is_causal: Annotated[bool | None, "true if queries attend to no later key"]
    source: Annotated[
        Literal["", "rules", "observation", "both"],
        "origin of the specification: rules, observation or both; empty if there is none",
    ]
    share: Annotated[Number, "error of its recorded outputs / budget"]
    no_rules_reason: Annotated[str, "why no rules describe it; empty if rules do"]
    reason: Annotated[str, "why it has no specification; empty if it has one"]
    identification: Annotated[LayerByObservation, "result of observation alone"]


class LiveLayers(TypedDict):
    """The layers of a live model."""

    layers: Annotated[list[LayerOfLiveModel], "specification of each layer, and its evidence"]


class Families(TypedDict):
    """Families of models."""

    families: Annotated[list[str], "names of families"]


class TensorOfFile(TypedDict):
    """A tensor of a file."""

    shape: Annotated[list[int], "its shape"]
    dtype: Annotated[str, "its dtype"]


class InspectedTensor(TensorOfFile, total=False):
    """A tensor of a file, which may be quantized; if it is not, it lacks this key."""

    quantized: Annotated[str, "how it is quantized"]


class GroupOfLayers(TypedDict):
    """Layers of a file with one layout."""

    prefix: Annotated[str, "prefix of their tensors; {i} stands for a number"]
    layers: Annotated[int, "number of layers"]
    layout: Annotated[str, "their layout"]
    heads: Annotated[str, "their heads, or why these are unknown"]
    dtype: Annotated[str, "dtype of their tensors"]
    is_stacked: Annotated[bool, "true if they are stacked on an axis"]
    packing: Annotated[str, "order of heads in packed tensors, which shapes do not show"]
    unread: Annotated[list[str], "keys about attention that no specification contains"]


class InspectedFile(TypedDict):
    """The content of a file of weights."""

    file_format: Annotated[str, "format of the file"]
    metadata: Annotated[dict[str, str], "metadata of the file"]
    tensors: Annotated[dict[str, InspectedTensor], "shape and dtype of each tensor"]
    layers: Annotated[list[GroupOfLayers], "groups of layers, with their layout"]
    proposed_layout: Annotated[str, "table of a layout that may fit, if none does"]


class LayerToConvert(TypedDict):
    """A layer of a planned conversion."""

    label: Annotated[str, "its prefix in the source"]
    to: Annotated[str, "its prefix in the target"]
    layout: Annotated[str, "its layout in the source"]
    layout_from: Annotated[str, "source of the layout"]
    spec: Annotated[Record, "its specification"]
    hints: Annotated[dict[str, str], "source of each field that is not a default"]


class PlannedConversion(TypedDict):
    """What a conversion would write."""

    layers: Annotated[list[LayerToConvert], "layers to convert"]
    tensors: Annotated[dict[str, list[str]], "tensors of the target, each with its sources"]
    size: Annotated[int, "bytes of the target's tensors"]
    left_out: Annotated[list[str], "features of layers that the target loses"]


class Conversion(TypedDict):
    """A conversion, or its plan."""

    source: Annotated[str, "layout of the source"]
    layers: Annotated[list[str], "prefixes of the converted layers"]
    spec: Annotated[Record | None, "specification of the layers, if all have the same"]
    copied: Annotated[list[str], "other tensors that were copied"]
    dropped: Annotated[list[str], "other tensors that were left out"]
    heads_from: Annotated[str, "file that specified the heads, if it was not the source"]
    left_out: Annotated[list[str], "entries that are not tensors"]
    unconverted: Annotated[list[str], "other layers, which keep the layout of the source"]
    optimizer_state: Annotated[
        list[str], "optimizer tensors of the layers, which keep the old layout"
    ]
    ignored_settings: Annotated[list[str], "attention settings that are not read"]
    path: Annotated[str, "written file, or the index of its shards"]
    missing: Annotated[list[str], "layers that the configuration requires and the file lacks"]
    dequantized: Annotated[
        list[str], "quantized tensors that were written as the values that they represent"
    ]
    joined: Annotated[list[str], "norms over the width of all heads in files of ranks"]
    metadata_left_out: Annotated[list[str], "metadata of the source that the target does not hold"]
    plan: Annotated[PlannedConversion | None, "the plan, with `--dry-run`"]


class TensorOfLayout(TypedDict):
    """A tensor of a layout."""

    name: Annotated[str, "its name after the prefix of the layer; {n} stands for a head"]
    holds: Annotated[str, "projections in it, in order; for a single weight, its canonical name"]
    kind: Annotated[Literal["weight", "bias", "whole"], "weight, bias, or whole: without heads"]
    axes: Annotated[str, "its axes in the notation of einops"]
    is_shared: Annotated[bool, "true if its projections share one weight"]


class RanksOfLayout(TypedDict):
    """How a layout stores layers that are divided over ranks."""

    file: Annotated[str, "path of the file of a rank; {rank} stands for its number"]
    rows: Annotated[list[str], "tensors that are divided on the first axis"]
    columns: Annotated[list[str], "tensors that are divided on the last axis"]
    gated: Annotated[list[list[str]], "tensors that may hold a gate, each with the next weight"]
    embeddings: Annotated[str, "tensors that are divided on either axis"]
    copied: Annotated[list[str], "tensors that all ranks have"]


class DescribedLayout(TypedDict):
    """A layout of weights."""

    name: Annotated[str, "its name"]
    about: Annotated[str, "its description"]
    source: Annotated[str, "code or document that defines it"]
    forms: Annotated[list[list[TensorOfLayout]], "alternative sets of tensors"]
    others: Annotated[list[TensorOfLayout], "tensors that only some layers have"]
    grouped: Annotated[bool, "true if each key/value head follows its query heads"]
    blocks: Annotated[int, "blocks of a packed tensor, each with a share of the heads"]
    rope: Annotated[Literal["half", "interleaved"], "pairs of rotated features"]
    padded: Annotated[bool, "true if heads are padded to whole tiles"]
    rules: Annotated[list[str], "requirements on a layer"]
    ignored: Annotated[list[str], "names of tensors that are not attention weights"]
    grid_biases: Annotated[list[str], "names of biases on a grid"]
    prefixes: Annotated[list[str], "prefixes of such layers; {i} stands for a number"]
    prefix: Annotated[str, "the only prefix of its layers; empty if there is none"]
    needs_spec: Annotated[bool, "true if shapes alone never identify such a layer"]
    carries: Annotated[list[str], "features that weights do not show"]
    shares: Annotated[list[str], "weights that several layers may share"]
    stack_axis: Annotated[int, "axis on which layers are stacked"]
    ranks: Annotated[RanksOfLayout | None, "storage of divided layers; null if there is none"]


class Layouts(TypedDict):
    """Layouts of weights."""

    layouts: Annotated[list[DescribedLayout], "layouts, with the tensors of their forms"]


class WrittenLayer(TypedDict):
    """The code of a layer."""

    layer: Annotated[str, "name of the layer"]
    source: Annotated[str, "code of the layer"]
    files: Annotated[list[str], "written files; empty without `--output`"]


class CacheSize(TypedDict):
    """The memory of a cache."""

    nbytes: Annotated[int, "bytes of the cache"]


class ListedCase(TypedDict):
    """A case."""

    covers: Annotated[str, "its settings in words"]
    name: Annotated[str, "its name"]
    spec: Annotated[Record, "specification of its layer"]
    about: Annotated[str, "the feature that fails with it"]
    batch: Annotated[int, "number of sequences"]
    seq_len: Annotated[int, "number of tokens"]
    seq_len_k: Annotated[int | None, "number of keys in cross-attention"]
    is_causal: Annotated[bool, "true if queries attend to no later key"]
    key_padding_lengths: Annotated[list[int] | None, "number of real keys of each sequence"]
    window_size: Annotated[int | None, "window of the mask"]
    random_mask: Annotated[bool, "true if a random mask hides keys"]
    bias: Annotated[bool, "true if a random bias is added to the scores"]
    gain: Annotated[float, "factor of the weights of q and k"]
    strided: Annotated[bool, "true if the inputs are not contiguous"]
    not_finite: Annotated[
        Literal["visible", "hidden"] | None, "visible or hidden NaN in the inputs; null without NaN"
    ]
    chunks: Annotated[list[int], "tokens of each call with a cache; empty without one"]
    new_lengths: Annotated[list[list[int]], "real tokens of each call and sequence, if they differ"]
    capacity: Annotated[int, "slots of the cache"]
    first_position: Annotated[int, "position of the first token"]
    trained: Annotated[str | None, "trained layer that it uses"]
    dtype: Annotated[str | None, "the only dtype in which it runs"]
    segment_ids: Annotated[list[list[int]] | None, "segment of each token"]
    cache_quantization: Annotated[Record | None, "how its cache stores keys and values"]
    mask: Annotated[list[Any] | None, "its own mask"]
    position_ids: Annotated[list[Any] | None, "positions of its tokens"]
    cache_slots: Annotated[list[Any] | None, "cache slot of each token"]


class Cases(TypedDict):
    """Cases."""

    cases: Annotated[list[ListedCase], "fields of each case"]


class Installation(TypedDict):
    """The environment, and the packages that are missing."""

    environment: Annotated[Record, "versions, processors and settings"]
    missing: Annotated[dict[str, str], "backends that cannot run, and why"]
    optional: Annotated[
        dict[str, str | None], "versions of optional packages; null if one is not installed"
    ]


class DetectedBug(TypedDict):
    """The result of a known bug that was injected into an implementation."""

    bug: Annotated[str, "its name; empty if none was injected"]
    case: Annotated[str, "name of the case"]
    backend: Annotated[str, "implementation"]
    seed: Annotated[int, "seed of the weights"]
    expected: Annotated[list[str], "stages at one of which the first difference must be"]
    stage: Annotated[str, "stage of the first difference; empty if there is none"]
    named: Annotated[list[str], "bugs that the diagnosis names"]
    others: Annotated[list[str], "bugs that it cannot distinguish from them"]
    kind: Annotated[str, "kind of the diagnosis"]
    is_caught: Annotated[bool, "true if the bug was detected at its stage"]
    is_named: Annotated[bool, "true if the diagnosis names the bug and no other"]


class DetectedBugs(TypedDict):
    """Known bugs that were injected into the implementations."""

    outcomes: Annotated[list[DetectedBug], "result of each injected bug"]


class CountedOperations(TypedDict):
    """Counts of one run."""

    kernels: Annotated[dict[str, int], "number of calls of each kernel"]
    copies: Annotated[int, "tensors that are copied to another layout, dtype or device"]
    syncs: Annotated[int, "points at which the host waits for the device"]


class MeasuredWork(TypedDict):
    """Times and memory of a piece of work in a framework; times are medians in milliseconds."""

    what: Annotated[str, "the work"]
    framework: Annotated[str, "its framework"]
    shape: Annotated[list[int], "its shape"]
    dtype: Annotated[str, "its dtype"]
    ours_ms: Annotated[Number, "our time"]
    peers: Annotated[dict[str, float], "times of other libraries"]
    best_peer: Annotated[str | None, "the fastest of them; null if there is none"]
    ratio: Annotated[Number, "its time / ours"]
    limit_ms: Annotated[Number, "time of the same matrix products, or of reading the same bytes"]
    limit_ratio: Annotated[Number, "our time / the limit"]
    peak_bytes: Annotated[int | None, "our memory beyond inputs and results"]
    group: Annotated[str, "group of the benchmark"]
    axes: Annotated[str, "letters of the shape"]
    peers_peak_bytes: Annotated[dict[str, int], "memory of other libraries"]
    not_counted: Annotated[list[str], "libraries that `best_peer` leaves out"]
    range_ms: Annotated[list[float] | None, "our fastest and slowest run"]
    rounds: Annotated[int, "number of runs of each"]
    left_out: Annotated[dict[str, str], "libraries that were not measured, and why"]
    extra_ms: Annotated[Number, "for an import, our time after the import of the framework"]
    operations: Annotated[dict[str, CountedOperations], "counts of a run of each contender"]


class GrowthOfWork(TypedDict):
    """The growth of time or memory with an axis."""

    what: Annotated[str, "the work"]
    framework: Annotated[str, "its framework"]
    dtype: Annotated[str, "its dtype"]
    name: Annotated[str, "the contender"]
    of: Annotated[Literal["time", "memory"], "time or memory"]
    over: Annotated[Literal["S", "B"], "axis that grows: S tokens or B sequences"]
    exponent: Annotated[Number, "exponent of the growth"]


class ContenderLeftOut(TypedDict):
    """A contender that was not measured."""

    framework: Annotated[str, "its framework"]
    name: Annotated[str, "its name"]
    reason: Annotated[str, "why"]
    rows: Annotated[int, "number of rows without it"]


class Benchmark(TypedDict):
    """Times and memory."""

    environment: Annotated[Record, "versions, processors and settings of the run"]
    rows: Annotated[list[MeasuredWork], "times and memory of each piece of work"]
    growth: Annotated[list[GrowthOfWork], "growth of time and memory with sequence length"]
    left_out: Annotated[list[ContenderLeftOut], "contenders that were not measured, and why"]
    names: Annotated[dict[str, dict[str, str]], "descriptions of the contenders"]


SCHEMAS = {
    "run": Schema(8, {"": CasesReport, "`--list`": Cases}),
    "compare": Schema(
        8,
        {
            "traces, or recordings with `--model`": CasesReport,
            "two recordings without `--model`": TwoRecordings,
            "two files of weights": VerifiedFiles,
        },
    ),
    "conformance": Schema(4, {"": ConformanceReport}),
    "mutate": Schema(4, {"": InjectedBugs}),
    "diagnose": Schema(
        8,
        {
            "a function, or traces": FunctionDiagnosis,
            "two weight files": WeightsDiagnosis,
            "recordings with `--model`": Recordings,
            "two recordings without `--model`": TwoRecordings,
            "ranks, with `--mesh`": DiagnosisOfRanks,
        },
    ),
    "bugs": Schema(1, {"": ListOfPages, "`--all`": ListOfBugs, "NAME": Pages}),
    "plot": Schema(1, {"": PlottedAttention}),
    "spec": Schema(3, {"FOLDER": LayersOfFolder, "`--live`": LiveLayers, "`--families`": Families}),
    "inspect": Schema(5, {"`--layouts`, or a layout": Layouts, "": InspectedFile}),
    "convert": Schema(4, {"": Conversion}),
    "write": Schema(1, {"": WrittenLayer}),
    "cache-size": Schema(1, {"": CacheSize}),
    "doctor": Schema(1, {"": Installation}),
    "selftest": Schema(4, {"": DetectedBugs}),
    "mesh": Schema(5, {"": MeshReport}),
    "bench": Schema(1, {"": Benchmark}),
}
"""The JSON of each command."""


FILES = {
    "weights": {"format": "version of the format", "spec": "specification of the layer"},
    "cache": {"format": "version of the format", "kind": "`cache`"},
    "trace": {
        "format": "version of the format",
        "kind": "`trace`",
        "case": "name of the case",
        "spec": "specification of the layer",
        "dtype": "dtype of the run",
        "backend": "implementation",
        "digest": "hash of weights and inputs",
        "environment": "versions, processors and settings",
        "skipped": "why the backend did not run the case",
        "error": "error of the backend",
    },
    "recording": {
        "format": "version of the format",
        "kind": "`tap`",
        "tap": "layers, their calls, and the configuration of the model",
    },
}
"""Keys in the metadata of each kind of safetensors file."""

JUNIT = {
    "testsuites": ("name", "tests", "failures", "errors"),
    "testsuite": ("name", "tests", "failures", "errors", "skipped"),
    "properties": (),
    "property": ("name", "value"),
    "testcase": ("classname", "name"),
    "failure": ("message", "type"),
    "error": ("message", "type"),
    "skipped": ("message",),
    "system-out": (),
}
"""Attributes of each element of a JUnit report."""


def headed(command: str, content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON of a command, which begins with its schema and version."""
    return {"schema": f"mha-parity/{command}", "version": SCHEMAS[command].version, **content}

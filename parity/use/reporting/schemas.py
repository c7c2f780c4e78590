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
    description: Annotated[Record | None, "place, patterns and signs; null for a known bug"]
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
    agrees: Annotated[bool, "true if the output agrees all the same"]
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

    weights: Annotated[Record, "tensors that differ"]
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
        list[Record], "features of layers of a model that more tokens would test, and how many"
    ]
    diagnoses: Annotated[list[CaseDiagnosis], "a diagnosis for each of the first failed cases"]


class MeshReport(CasesReport):
    """Cases on meshes of devices."""

    collectives: Annotated[list[Record], "what the devices of each program send"]


class TwoRecordings(TypedDict):
    """The distance of two recordings."""

    agrees: Annotated[bool, "true if no layer adds a difference of its own"]
    alone: Annotated[list[str], "layers that one recording has alone"]
    left_out: Annotated[
        int, "tokens that were not compared, because the recordings generated different ones"
    ]
    layers: Annotated[list[DistanceOfLayer], "difference of each layer at each stage"]


class Recordings(TypedDict):
    """Recordings, compared with the reference."""

    recordings: Annotated[list[Record], "verdict on each layer, by recording"]


class ConformanceReport(TypedDict):
    """Answers about implementations."""

    packages: Annotated[dict[str, str], "versions of packages"]
    subjects: Annotated[list[Record], "answers of each implementation"]
    not_examined: Annotated[
        dict[str, list[str]], "requested dtypes that no check examined, by implementation"
    ]


class InjectedBugs(TypedDict):
    """Bugs that were injected into a callable while its tests ran."""

    subject: Annotated[str, "the callable"]
    not_examined: Annotated[str, "why some properties of the callable are unknown"]
    outcomes: Annotated[list[Record], "result of each injected bug"]
    not_injected: Annotated[dict[str, str], "bugs that the callable does not allow, and why"]


class VerdictOnLayers(TypedDict):
    """The verdict on a pair of layers."""

    layers: Annotated[list[str], "names of both"]
    same: Annotated[bool, "true if they compute the same up to rounding"]
    same_bits: Annotated[bool, "true if their weights are the same, bit for bit"]
    weights: Annotated[Record, "tensors that differ"]


class VerifiedFiles(TypedDict):
    """The layers of two files, compared."""

    results: Annotated[list[ComparedStage], "a record for each stage of each pair of layers"]
    layers: Annotated[list[VerdictOnLayers], "verdict on each pair of layers"]
    diagnosis: Annotated[FunctionDiagnosis | None, "diagnosis of the first pair that differs"]
    not_compared: Annotated[list[Gap], "layers that were not compared, and why"]
    only_in_one: Annotated[list[Record], "tensors that only one of the files has"]


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


class LayersOfFolder(TypedDict):
    """The layers of a model's folder."""

    layers: Annotated[list[Record], "specification of each layer"]
    not_read: Annotated[dict[str, str], "parts that are not read, and why"]


class LiveLayers(TypedDict):
    """The layers of a live model."""

    layers: Annotated[list[Record], "specification of each layer, and its evidence"]


class Families(TypedDict):
    """Families of models."""

    families: Annotated[list[str], "names of families"]


class InspectedFile(TypedDict):
    """The content of a file of weights."""

    file_format: Annotated[str, "format of the file"]
    metadata: Annotated[dict[str, str], "metadata of the file"]
    tensors: Annotated[dict[str, Record], "shape and dtype of each tensor"]
    layers: Annotated[list[Record], "groups of layers, with their layout"]
    proposed_layout: Annotated[str, "table of a layout that may fit, if none does"]


class Conversion(TypedDict):
    """A conversion, or its plan."""

    source: Annotated[str, "layout of the source"]
    layers: Annotated[list[str], "prefixes of the converted layers"]
    spec: Annotated[Record | None, "specification of the layers, if all have the same"]
    kept: Annotated[list[str], "other tensors that were copied"]
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
    plan: Annotated[Record | None, "the plan, with `--dry-run`"]


class Layouts(TypedDict):
    """Layouts of weights."""

    layouts: Annotated[list[Record], "layouts, with the tensors of their forms"]


class WrittenLayer(TypedDict):
    """The code of a layer."""

    layer: Annotated[str, "name of the layer"]
    source: Annotated[str, "code of the layer"]
    files: Annotated[list[str], "written files; empty without `--output`"]


class CacheSize(TypedDict):
    """The memory of a cache."""

    nbytes: Annotated[int, "bytes of the cache"]


class Cases(TypedDict):
    """Cases."""

    cases: Annotated[list[Record], "fields of each case"]


class Installation(TypedDict):
    """The environment, and the packages that are missing."""

    environment: Annotated[Record, "versions, processors and settings"]
    missing: Annotated[dict[str, str], "backends that cannot run, and why"]
    optional: Annotated[
        dict[str, str | None], "versions of optional packages; null if one is not installed"
    ]


class DetectedBugs(TypedDict):
    """Known bugs that were injected into the implementations."""

    outcomes: Annotated[list[Record], "result of each injected bug"]


class Benchmark(TypedDict):
    """Times and memory."""

    environment: Annotated[Record, "versions, processors and settings of the run"]
    rows: Annotated[list[Record], "times and memory of each piece of work"]
    growth: Annotated[list[Record], "growth of time and memory with sequence length"]
    left_out: Annotated[list[Record], "contenders that were not measured, and why"]
    names: Annotated[dict[str, dict[str, str]], "descriptions of the contenders"]


SCHEMAS = {
    "run": Schema(6, {"": CasesReport, "`--list`": Cases}),
    "compare": Schema(
        6,
        {
            "traces, or recordings with `--model`": CasesReport,
            "two recordings without `--model`": TwoRecordings,
            "two files of weights": VerifiedFiles,
        },
    ),
    "conformance": Schema(2, {"": ConformanceReport}),
    "mutate": Schema(3, {"": InjectedBugs}),
    "diagnose": Schema(
        6,
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
    "spec": Schema(1, {"FOLDER": LayersOfFolder, "`--live`": LiveLayers, "`--families`": Families}),
    "inspect": Schema(3, {"`--layouts`, or a layout": Layouts, "": InspectedFile}),
    "convert": Schema(2, {"": Conversion}),
    "write": Schema(1, {"": WrittenLayer}),
    "cache-size": Schema(1, {"": CacheSize}),
    "doctor": Schema(1, {"": Installation}),
    "selftest": Schema(3, {"": DetectedBugs}),
    "mesh": Schema(3, {"": MeshReport}),
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

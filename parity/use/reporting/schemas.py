"""Keys of everything that other programs read: JSON of each command, metadata of files, and JUnit
XML.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

Keys = Mapping[str, str]
"""Keys, and the meaning of each."""


class Schema(NamedTuple):
    """The JSON that a command writes.

    Attributes:
        version: increases if a key appears, disappears, or changes its meaning.
        forms: keys of the result in each form of the command.
    """

    version: int
    forms: Mapping[str, Keys]

    @property
    def keys(self) -> Keys:
        """The keys of all forms."""
        keys_of_all: dict[str, str] = {}
        for keys in self.forms.values():
            keys_of_all.update(keys)
        return keys_of_all


REPORT = {
    "environment": "versions, processors and settings of the run",
    "warnings": "circumstances that make results less comparable",
    "summary": (
        "numbers of stages that passed and failed, of skipped backends and cases, and of missing "
        "traces"
    ),
    "results": (
        "a record for each stage of each case, dtype and backend; those without a result have a "
        "`reason`"
    ),
    "not_compared": (
        "gaps in the comparison, by reason; `is_open` if requested, so that the exit status is 2"
    ),
    "exercised": "further cases that test features of layers of a model, and which",
    "not_exercised": "features of layers of a model that more tokens would test, and how many",
    "diagnoses": "a diagnosis for each of the first failed cases",
}

TWO_RECORDINGS = {
    "agrees": "true if no layer adds a difference of its own",
    "alone": "layers that one recording has alone",
    "left_out": "layers that cannot be compared, and why",
    "layers": "difference of each layer at each stage",
}

DIAGNOSIS = {
    "kind": "none, convention, precision, structure, pattern or unknown",
    "stage": "first stage that differs",
    "error": "its error, root mean square",
    "ratio": "its error / budget",
    "findings": "one for each cause: known bugs, then patterns, then unexplained stages",
    "has_stages": "true if more than the output was observed",
    "malformed": "stages that cannot be compared, and why",
    "conventions": "stages in another convention, and which",
    "choice": "difference in the computation that is not a bug",
    "untried": "parts of the search that exceeded the time limit",
    "agrees": "true if the output agrees all the same",
    "dtypes": "stages in another dtype than the problem's",
    "dtype": "dtype of the problem",
    "sample": "part of a large layer that was searched",
    "hidden": "known bugs that these stages would show in float32 only, if nothing differs",
    "not_exercised": "features of the layer that the case cannot show, if nothing differs",
    "headline": "diagnosis in a line",
    "text": "diagnosis as it is printed",
}

FINDING = {
    "likely_bug": "names of the bugs, joined by commas",
    "first_wrong_stage": "first wrong stage",
    "where": "part of that stage that differs, or the wrong ranks",
    "evidence": "error with and without the bugs",
    "fix": "how to fix them",
    "more": "command that prints more",
}

SCHEMAS = {
    "run": Schema(6, {"": REPORT}),
    "compare": Schema(
        6,
        {
            "traces, or recordings with `--model`": REPORT,
            "two recordings without `--model`": TWO_RECORDINGS,
        },
    ),
    "conformance": Schema(
        2,
        {
            "": {
                "packages": "versions of packages",
                "subjects": "answers of each implementation",
                "not_examined": "requested dtypes that no check examined, by implementation",
            }
        },
    ),
    "mutate": Schema(
        3,
        {
            "": {
                "subject": "the callable",
                "not_examined": "why some properties of the callable are unknown",
                "outcomes": "result of each injected bug",
                "not_injected": "bugs that the callable does not allow, and why",
            }
        },
    ),
    "verify": Schema(
        5,
        {
            "": {
                "results": "a record for each stage of each pair of layers",
                "layers": "verdict on each pair of layers",
                "diagnosis": "diagnosis of the first pair that differs",
                "not_compared": "layers that were not compared, and why",
                "only_in_one": "tensors that only one of the files has",
            }
        },
    ),
    "diagnose": Schema(
        6,
        {
            "a function, or traces": DIAGNOSIS | FINDING,
            "two weight files": DIAGNOSIS
            | FINDING
            | {
                "weights": "tensors that differ",
                "not_compared": "layers that were not compared, and why",
            },
            "recordings with `--model`": {"recordings": "verdict on each layer, by recording"},
            "two recordings without `--model`": TWO_RECORDINGS,
            "ranks, with `--mesh`": {
                "is_wrong": "true if a rank differs by more than rounding",
                "wrong": "first wrong stage of each wrong rank",
                "findings": "the bug that explains all ranks, or the first wrong stage",
                **FINDING,
            },
        },
    ),
    "bugs": Schema(
        1,
        {
            "": {"list": "each page, with its bug in a line"},
            "`--all`": {"bugs": "each bug, with its page"},
            "NAME": {"pages": "text of each page"},
        },
    ),
    "plot": Schema(
        1,
        {
            "": {
                "stage": "drawn stage",
                "sequence": "drawn sequence",
                "heads": "drawn heads",
                "shape": "shape of the attention weights",
                "target": "path of the image",
            }
        },
    ),
    "spec": Schema(
        1,
        {
            "FOLDER": {
                "layers": "specification of each layer",
                "not_read": "parts that are not read, and why",
            },
            "`--live`": {"layers": "specification of each layer, and its evidence"},
            "`--families`": {"families": "names of families"},
        },
    ),
    "inspect": Schema(
        2,
        {
            "": {
                "file_format": "format of the file",
                "metadata": "metadata of the file",
                "tensors": "shape and dtype of each tensor",
                "layers": "groups of layers, with their layout",
                "proposed_layout": "table of a layout that may fit, if none does",
            }
        },
    ),
    "convert": Schema(
        1,
        {
            "": {
                "source": "layout of the source",
                "layers": "prefixes of the converted layers",
                "spec": "specification of the layers, if all have the same",
                "kept": "other tensors that were copied",
                "dropped": "other tensors that were left out",
                "heads_from": "file that specified the heads, if it was not the source",
                "left_out": "entries that are not tensors",
                "unconverted": "other layers, which keep the layout of the source",
                "optimizer_state": "optimizer tensors of the layers, which keep the old layout",
                "not_carried": "attention settings that are not read",
                "path": "written file, or the index of its shards",
                "missing": "layers that the configuration requires and the file lacks",
                "dequantised": (
                    "quantized tensors that were written as the values that they represent"
                ),
                "joined": "norms over the width of all heads in files of ranks",
                "metadata_left_out": "metadata of the source that the target does not hold",
                "plan": "the plan, with `--dry-run`",
            }
        },
    ),
    "layouts": Schema(3, {"": {"layouts": "layouts, with the tensors of their forms"}}),
    "write": Schema(
        1,
        {
            "": {
                "layer": "name of the layer",
                "source": "code of the layer",
                "files": "written files; empty without `--output`",
            }
        },
    ),
    "cache-size": Schema(1, {"": {"nbytes": "bytes of the cache"}}),
    "cases": Schema(2, {"": {"cases": "fields of each case"}}),
    "doctor": Schema(
        1,
        {
            "": {
                "environment": "versions, processors and settings",
                "missing": "backends that cannot run, and why",
                "optional": "versions of optional packages; null if one is not installed",
            }
        },
    ),
    "selftest": Schema(3, {"": {"outcomes": "result of each injected bug"}}),
    "mesh": Schema(3, {"": REPORT | {"collectives": "what the devices of each program send"}}),
    "bench": Schema(
        1,
        {
            "": {
                "environment": "versions, processors and settings of the run",
                "rows": "times and memory of each piece of work",
                "growth": "growth of time and memory with sequence length",
                "left_out": "contenders that were not measured, and why",
                "names": "descriptions of the contenders",
            }
        },
    ),
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

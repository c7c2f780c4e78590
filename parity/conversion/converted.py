"""The record of a conversion."""

from __future__ import annotations

from dataclasses import dataclass, field

from mha_spec import AttentionSpec
from parity.core.records import JsonRecord


@dataclass(frozen=True)
class PlannedLayer(JsonRecord):
    """A layer that would be converted.

    Attributes:
        label, to: its prefix in the source and in the target, with its index if it is in a stack.
        layout: its layout in the source.
        layout_from: the source of that: the caller, the file's metadata, `config.json` or `GGUF`.
        spec: what it computes.
        hints: the source of each field that is a number of heads or not the default: those, or the shapes.
    """

    label: str
    to: str
    layout: str
    layout_from: str
    spec: AttentionSpec
    hints: dict[str, str]


@dataclass(frozen=True)
class ConversionPlan(JsonRecord):
    """Record of a conversion that `convert_file` would write.

    Attributes:
        layers: to be converted.
        tensors: names in the target, each with those in the source that it is made of.
        size: bytes of all tensors of the target.
        left_out: what layers compute that the target does not say.
    """

    layers: list[PlannedLayer]
    tensors: dict[str, list[str]]
    size: int
    left_out: list[str]


@dataclass(frozen=True)
class Converted(JsonRecord):
    """What `convert_file` did.

    Attributes:
        source: name of the layout that the layers were in.
        layers: prefixes of the layers that were converted, those of a stack with an index in brackets.
        spec: theirs, if they have the same.
        kept, dropped: names of the other tensors.
        heads_from: the file that the heads come from, if it was neither the caller nor the source itself.
        left_out: names of what is not a tensor, such as numbers and text, and is not in the target.
        unconverted: prefixes of other layers in the source's layout, which are in the target as they were.
        optimizer_state: names of an optimizer's tensors for the layers, which are in the target in the old layout.
        not_carried: what the source says of attention that is not read from it; if it is of RoPE, the specification
            has none.
        path: what was written: the file, or the index of its shards.
        missing: paths of attention layers that the model has, by its configuration, and the file has not; of models
            with several parts with the part.
        dequantised: names of the source's tensors that are quantised there, and written as what they stand for.
        joined: names of norms over the width of all heads in files of ranks, each of which has the weights of its own:
            their mean squares are those of all ranks.
        metadata_left_out: names in the metadata of the source whose values are not in the target's.
        plan: what would be written, if nothing was: with `dry_run`.
    """

    source: str
    layers: list[str]
    spec: AttentionSpec | None
    kept: list[str]
    dropped: list[str]
    heads_from: str = ""
    left_out: list[str] = field(default_factory=list)
    unconverted: list[str] = field(default_factory=list)
    optimizer_state: list[str] = field(default_factory=list)
    not_carried: list[str] = field(default_factory=list)
    path: str = ""
    missing: list[str] = field(default_factory=list)
    dequantised: list[str] = field(default_factory=list)
    joined: list[str] = field(default_factory=list)
    metadata_left_out: list[str] = field(default_factory=list)
    plan: ConversionPlan | None = None

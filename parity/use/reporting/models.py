"""Specifications of the layers of a model, and the keys of its configuration that determine
them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Column
from rich.text import Text

from parity.use.reporting.console import print_table
from parity.use.reporting.grouping import grouped

if TYPE_CHECKING:
    from mha_spec import AttentionSpec
    from parity.port.models.specs import ModelLayer

LINES = 10
"""Width of the lines and spaces around three columns of a terminal, in characters."""

LEAST = 24
"""Least width of the values of a table in characters, an arbitrary number: in narrower columns they
cannot be read.
"""


def print_heading(part: str, out: Console, *words: str) -> None:
    """Print which part of a model follows, and more words about it."""
    out.print(Text(part, style="bold underline"), *map(Text, words), sep="\n")


def print_layers(model_type: str, layers: Sequence[ModelLayer], out: Console) -> None:
    """Print a table for all layers that are the same: fields, values, and where they come from."""
    num_layers: Counter[str] = Counter()
    for layer in layers:
        # The cross-attention of a decoder is in the same layers as its self-attention.
        if layer.kind != "cross_attention":
            num_layers[layer.part] += 1
    for same in grouped(layers, _look).values():
        first = same[0]
        part = ""
        if first.part:
            part = f", {first.part}"
        numbers = _numbers(layer.index for layer in same)
        title = f"{model_type}{part}, {numbers} of {num_layers[first.part]}: {first.kind}"
        if not first.is_causal and first.kind != "cross_attention":
            title += ", not causal"
        if first.spec is None:
            out.print(Text(f"{title}, which is not attention over keys", style="bold"))
        else:
            _print_spec(title, first.spec, first.origins, out)


def _look(layer: ModelLayer) -> tuple[object, ...]:
    """Return the properties that a table shows, without the number of the layer."""
    return layer.part, layer.kind, layer.is_causal, layer.spec


def _print_spec(title: str, spec: AttentionSpec, origins: Mapping[str, str], out: Console) -> None:
    """Print a table of the fields that the configuration, or the family, determines."""
    rows = []
    widest_name = 0
    widest_key = 0
    for field in fields(spec):
        origin = origins.get(field.name)
        if origin is None:
            continue
        rows.append((field.name, Text(repr(getattr(spec, field.name))), Text(origin)))
        widest_name = max(widest_name, len(field.name))
        widest_key = max([widest_key, *map(len, origin.split())])
    # Values leave room for the other columns, because keys of a configuration are not folded.
    room = max(out.width - widest_name - widest_key - LINES, LEAST)
    columns = ("field", Column("value", overflow="fold", max_width=room), "from")
    print_table(out, title, columns, rows)


def _numbers(indices: Iterable[int]) -> str:
    """Return numbers in words: layer 3, or layers 0 to 4, 6, 8 to 9."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    words = []
    for run in runs:
        if len(run) == 1:
            words.append(f"{run[0]}")
        else:
            words.append(f"{run[0]} to {run[-1]}")
    noun = "layers"
    if len(runs) == 1 and len(runs[0]) == 1:
        noun = "layer"
    return f"{noun} {', '.join(words)}"

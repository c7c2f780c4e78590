"""Specifications of the layers of a model, and the keys of its configuration that determine
them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Column
from rich.text import Text

from parity.use.reporting.console import print_table

if TYPE_CHECKING:
    from parity.port.models.specs import ModelLayer

LINES = 10
"""Width of the lines and spaces between three columns, in characters."""

LEAST = 24
"""Least width of the values of a table, in characters."""


def print_heading(part: str, out: Console, *words: str) -> None:
    """Print which part of a model follows, and more words about it."""
    out.print(Text(part, style="bold underline"), *(Text(each) for each in words), sep="\n")


def print_layers(model_type: str, layers: Sequence[ModelLayer], out: Console) -> None:
    """Print a table for all layers that are the same: fields, values, and where they come from."""
    alike: dict[object, list[ModelLayer]] = {}
    for layer in layers:
        alike.setdefault((layer.part, layer.kind, layer.is_causal, layer.spec), []).append(layer)
    counts = Counter(layer.part for layer in layers if layer.kind != "cross_attention")
    for same in alike.values():
        first = same[0]
        where = f"{model_type}, {first.part}, " if first.part else f"{model_type}, "
        title = (
            f"{where}{_numbers(layer.index for layer in same)} of {counts[first.part]}: "
            f"{first.kind}"
        )
        title += "" if first.is_causal or first.kind == "cross_attention" else ", not causal"
        if first.spec is None:
            out.print(Text(f"{title}, which is not attention over keys", style="bold"))
            continue
        names = [field.name for field in fields(first.spec) if field.name in first.origins]
        # Values leave room for the other columns, because keys of a configuration are not folded.
        keys = max(len(word) for name in names for word in first.origins[name].split())
        room = out.width - max(map(len, names)) - keys - LINES
        columns = ("field", Column("value", overflow="fold", max_width=max(room, LEAST)), "from")
        rows = [
            (name, Text(repr(getattr(first.spec, name))), Text(first.origins[name]))
            for name in names
        ]
        print_table(out, title, columns, rows)


def _numbers(indices: Iterable[int]) -> str:
    """Return numbers in words: layer 3, or layers 0 to 4, 6, 8 to 9."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    said = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)
    return f"layer {said}" if len(runs) == 1 and len(runs[0]) == 1 else f"layers {said}"

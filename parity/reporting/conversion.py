"""Layouts, what a file of weights holds, what was converted, and whether two files hold the same attention."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from parity.core.compare import Comparison, first_difference
from parity.reporting.console import begin_table, short_ratio
from parity.reporting.diagnosis import print_explanation
from parity.text import counted

if TYPE_CHECKING:
    from parity.conversion.convert import Converted
    from parity.conversion.differences import WeightsComparison
    from parity.conversion.inspect import Found
    from parity.conversion.layouts import Layout
    from parity.conversion.not_compared import NotCompared
    from parity.diagnosis.diagnose import Diagnosis
    from parity.files import TensorFile


def print_layouts(layouts: Iterable[Layout], out: Console) -> None:
    """Print a table of layouts, one in each row."""
    table = begin_table(out, "Layouts")
    for column in ("layout", "what it is", "RoPE pairs"):
        table.add_column(column, overflow="fold")
    for layout in layouts:
        table.add_row(layout.name, layout.about, layout.rope)
    out.print(table)


def print_layout(layout: Layout, out: Console) -> None:
    """Print the tensors of a layout, and of each its axes, outermost first."""
    from parity.conversion.layouts.layout import CARRIED, RULES, UNSAID

    letters = {"p": "projections", "n": "heads", "h": "head_dim", "d": "input", "e": "output"}
    out.print(Text(f"{layout.about} ({layout.source})"), soft_wrap=True)
    for number, form in enumerate(layout.forms):
        table = begin_table(out, layout.name if number == 0 else "or")
        for column in ("tensor", "holds", "axes"):
            table.add_column(column, overflow="fold")
        for tensor in form:
            axes = [" x ".join(letters[letter] for letter in group) or "1" for group in tensor.groups()]
            table.add_row(tensor.name, ", ".join(tensor.parts), f"[{' | '.join(axes)}]")
        out.print(table)
    if layout.others:
        table = begin_table(out, "where a layer has them")
        for column in ("tensor", "holds", "axes"):
            table.add_column(column, overflow="fold")
        for tensor in layout.others:
            words = {"...": "as they are", "d e": "transposed", "d n h": "transposed, heads as an axis"}[tensor.axes]
            table.add_row(tensor.name, tensor.holds, words)
        out.print(table)
    if shared := [tensor.name for tensor in layout.tensors if tensor.is_shared]:
        out.print(f"one projection for keys and values: {', '.join(shared)}, where both are made alike")
    for order in filter(None, layout.packing.split("; ")):
        out.print(f"heads in a packed tensor: {order}")
    out.print(f"RoPE pairs: {'(i, i + H/2)' if layout.rope == 'half' else '(2 i, 2 i + 1)'}")
    for rule in layout.rules:
        out.print(f"rule: {RULES[rule].words}")
    lost = [name for name in CARRIED if name not in layout.carries]
    out.print(f"not carried: {', '.join(lost)}" if lost else "carried: all that a specification says", soft_wrap=True)
    if layout.unsaid:
        out.print(f"not said: {', '.join(layout.unsaid)}; drop {UNSAID} leaves it out", soft_wrap=True)
    for prefix in layout.prefixes:
        out.print(Text(f"prefix: {prefix}"))
    if layout.ranks is not None:
        out.print(Text(f"files of ranks: {layout.ranks.file}"))


def print_inspection(path: str, file: TensorFile, found: list[Found], out: Console) -> None:
    """Print what a file holds: its tensors, those of numbered layers together, and which layouts fit."""
    grouped: dict[tuple[str, str, str], int] = {}
    for name, info in file.infos.items():
        pattern = re.sub(r"(?<![^.])\d+(?![^.])", "{i}", name)
        dtype = f"{file.quantised[name]}, read as {info.dtype}" if name in file.quantised else info.dtype.name
        key = (pattern, " x ".join(map(str, info.shape)) or "scalar", dtype)
        grouped[key] = grouped.get(key, 0) + 1
    table = begin_table(out, f"{path}: {file.format}, {len(file.infos)} tensors")
    for column in ("tensor", "shape", "dtype", "how many"):
        table.add_column(column, overflow="fold")
    for (pattern, shape, dtype), count in grouped.items():
        table.add_row(Text(pattern), shape, dtype, str(count))
    out.print(table)
    table = begin_table(out, "Attention layers" if found else "No attention layer that a layout fits")
    for column in ("prefix", "layers", "layout", "heads"):
        table.add_column(column, overflow="fold", no_wrap=column == "prefix")  # one copies it from here
    for layer in found:
        count = f"{layer.layers}, stacked" if layer.is_stacked else str(layer.layers)
        words = layer.heads + (f"; packed: {layer.packing}" if layer.packing else "")
        words += f"; not understood: {', '.join(layer.unread)}" if layer.unread else ""
        table.add_row(Text(layer.prefix), count, layer.layout, Text(words))
    if found:
        out.print(table)


def print_conversion(converted: Converted, layout: str, out: Console) -> None:
    """Print what became of a file's tensors.

    Args:
        converted: what was done.
        layout: the one that it was converted to.
        out: where to.
    """
    layers, spec = converted.layers, converted.spec
    heads = f", {spec.num_heads} x {spec.head_dim}, key/value {spec.num_kv_heads}" if spec else ""
    if converted.heads_from:
        theta = f", RoPE theta {spec.rope.theta:g}" if spec and spec.rope is not None else ""
        heads += f" (from {converted.heads_from}{theta})"
    out.print(
        f"{counted(len(layers), 'attention layer')}{heads}: {converted.source} -> {layout}; "
        f"other tensors: {len(converted.kept)} kept, {len(converted.dropped)} dropped; wrote {converted.path}",
        soft_wrap=True,
    )


@dataclass(frozen=True)
class Verdict:
    """Whether two layers hold the same attention.

    Attributes:
        one, other: their names in both files.
        weights: what their tensors say, which decides.
        stages: what is computed with them on probe inputs.
    """

    one: str
    other: str
    weights: WeightsComparison
    stages: list[Comparison]

    def to_dict(self) -> dict[str, Any]:
        """The verdict as JSON takes it, without the stages."""
        told = {"same": self.weights.same, "same_bits": self.weights.kind == "bits"}
        return {"layers": [self.one, self.other], **told, "weights": self.weights.to_dict()}

    def __str__(self) -> str:
        wrong = first_difference(self.stages)
        names = ", ".join(each.name for each in self.weights.differences)
        where = f"differ first at {wrong.stage}" if wrong else f"differ in {names}, and at no stage beyond rounding"
        return f"{self.one} and {self.other} {where}"


def print_verdicts(
    verdicts: list[Verdict],
    diagnosis: Diagnosis,
    files: list[str],
    out: Console,
    not_compared: list[NotCompared],
) -> None:
    """Print whether two files hold the same attention, in full for one layer, and of many for the first that differs.

    Args:
        verdicts: of each layer.
        diagnosis: of the first layer that differs.
        files: their names.
        out: where to.
        not_compared: what the comparison leaves out.
    """
    if len(verdicts) == 1:
        _print_verdict(verdicts[0], diagnosis, files, out, not_compared)
        return
    wrong = [verdict for verdict in verdicts if not verdict.weights.same]
    for verdict in wrong:
        out.print(Text(str(verdict), style="red"), soft_wrap=True)
    if wrong:
        _print_difference(wrong[0], diagnosis, out)
    kinds = Counter(verdict.weights.kind for verdict in verdicts)
    others = {"values": "the same values", "function": "the same function in other words"}
    counts = [f"{kinds['bits']} the same, bit for bit"]
    counts += [f"{kinds[kind]} {words}" for kind, words in others.items() if kinds[kind]]
    counts += [f"{kinds['copy'] + kinds['rounding']} the same up to rounding", f"{len(wrong)} different"]
    claim, style = _claim(not wrong, not_compared)
    told = f"{files[0]} and {files[1]} {claim} in all {len(verdicts)} layers: {'; '.join(counts)}"
    out.print(Text(f"{told}{_left_out(not_compared)}", style=style), soft_wrap=True)
    for verdict in (each for each in verdicts if each.weights.kind == "function"):
        out.print(Text(f"{verdict.one}: {verdict.weights.how}"), soft_wrap=True)


def _print_verdict(
    verdict: Verdict, diagnosis: Diagnosis, files: list[str], out: Console, not_compared: list[NotCompared]
) -> None:
    """Print whether two files hold the same attention, and if they do not, why."""
    same = verdict.weights.same
    if same:
        _print_stages(verdict.stages, out)
    else:
        _print_difference(verdict, diagnosis, out)
    claim, style = _claim(same, not_compared)
    told = f"{files[0]} and {files[1]} {claim}{f': {verdict.weights.how}' if same else ''}{_left_out(not_compared)}"
    out.print(Text(told, style=style), soft_wrap=True)


def _claim(same: bool, not_compared: list[NotCompared]) -> tuple[str, str]:
    """How much a comparison shows, and the style in which it is printed."""
    if not same:
        return "do NOT hold the same attention", "bold red"
    if any(each.is_open for each in not_compared):
        return "hold the same weights", "bold yellow"
    return "hold the same attention", "bold green"


def _left_out(not_compared: list[NotCompared]) -> str:
    from parity.conversion.not_compared import by_reason

    return f"; not compared: {', '.join(by_reason(not_compared))}" if not_compared else ""


def _print_difference(verdict: Verdict, diagnosis: Diagnosis, out: Console) -> None:
    """Print which tensors differ, at which stages that is seen, and what explains it."""
    out.print(Text(str(verdict.weights)), soft_wrap=True)
    _print_stages(verdict.stages, out)
    wrong = first_difference(verdict.stages)
    if wrong is not None:
        out.print(Text(str(wrong), style="red"))
    print_explanation(verdict.weights, diagnosis, out)


def _print_stages(comparisons: list[Comparison], out: Console) -> None:
    table = begin_table(out, "Error of the second file on probe inputs, as a share of what rounding explains")
    for column in ("stage", "share", "max abs"):
        table.add_column(column, justify="left" if column == "stage" else "right")
    for comparison in comparisons:
        style = "" if comparison.passed else "red"
        table.add_row(comparison.stage, short_ratio(comparison.ratio), f"{comparison.max_abs:.1e}", style=style)
    out.print(table)

"""Layouts, the content of weight files, conversions, and comparisons of two files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Column
from rich.text import Text

from parity.measure.core.compare import Comparison, first_difference
from parity.measure.text import counted, some_of
from parity.port.conversion.not_compared import by_reason
from parity.port.conversion.prefixes import numbered
from parity.use.reporting.console import print_table, short_ratio
from parity.use.reporting.diagnosis import print_explanation

if TYPE_CHECKING:
    from parity.explain.diagnosis.diagnose import Diagnosis
    from parity.measure.files import TensorFile
    from parity.port.conversion.differences import WeightsComparison
    from parity.port.conversion.inspect import Found
    from parity.port.conversion.layouts import Layout
    from parity.port.conversion.not_compared import NotCompared
    from parity.port.conversion.plan import ConversionPlan, Converted


def print_layouts(layouts: Iterable[Layout], out: Console) -> None:
    """Print a table of layouts, one in each row."""
    rows = [(layout.name, layout.about, layout.rope) for layout in layouts]
    print_table(out, "Layouts", ("layout", "model or library", "RoPE pairs"), rows)


def print_layout(layout: Layout, out: Console) -> None:
    """Print the tensors of a layout with their axes, outermost first."""
    from parity.port.conversion.layouts.layout import CARRIED, GRID_BIAS, RULES

    letters = {"p": "projections", "n": "heads", "h": "head_dim", "d": "input", "e": "output"}
    out.print(Text(f"{layout.about} ({layout.source})"), soft_wrap=True)
    columns = ("tensor", "holds", "axes")
    for number, form in enumerate(layout.forms):
        rows = []
        for tensor in form:
            axes = [
                " x ".join(letters[letter] for letter in group) or "1" for group in tensor.groups
            ]
            rows.append((tensor.name, ", ".join(tensor.parts), f"[{' | '.join(axes)}]"))
        print_table(out, layout.name if number == 0 else "or", columns, rows)
    if layout.others:
        words = {"...": "as they are", "d e": "transposed", "d n h": "transposed, heads as an axis"}
        rows = [(tensor.name, tensor.holds, words[tensor.axes]) for tensor in layout.others]
        print_table(out, "only in some layers", columns, rows)
    if shared := [tensor.name for tensor in layout.tensors if tensor.is_shared]:
        out.print(f"one projection for keys and values: {', '.join(shared)}, if both are the same")
    for order in filter(None, layout.packing.split("; ")):
        out.print(f"heads in a packed tensor: {order}")
    out.print(f"RoPE pairs: {'(i, i + H/2)' if layout.rope == 'half' else '(2 i, 2 i + 1)'}")
    for rule in layout.rules:
        out.print(f"rule: {RULES[rule].words}")
    lost = [name for name in CARRIED if name not in layout.carries]
    out.print(
        f"not carried: {', '.join(lost)}" if lost else "carried: all that a specification says",
        soft_wrap=True,
    )
    if layout.shares:
        out.print(
            f"once in a file if layers share them: {', '.join(layout.shares)}", soft_wrap=True
        )
    if layout.grid_biases:
        out.print(
            f"not said: {', '.join(layout.grid_biases)}; drop {GRID_BIAS} leaves it out",
            soft_wrap=True,
        )
    for prefix in layout.prefixes or filter(None, [layout.prefix]):
        out.print(Text(f"prefix: {prefix}"))
    if layout.ranks is not None:
        out.print(Text(f"files of ranks: {layout.ranks.file}"))


def print_inspection(
    path: str, file: TensorFile, found: list[Found], out: Console, proposal: str = ""
) -> None:
    """Print the tensors of a file, with those of numbered layers in one row, and the layouts that
    fit.

    Args:
        path: of the file.
        file: the open file.
        found: its attention layers.
        out: where to print.
        proposal: the table of a layout that is proposed if there are none, as TOML.
    """
    counts = Counter(
        (numbered(name), info.shape, info.dtype, file.quantised.get(name))
        for name, info in file.infos.items()
    )
    dtypes = {
        dtype: dtype.name for dtype in {info.dtype for info in file.infos.values()}
    }  # NumPy names them slowly
    rows: list[Sequence[str | Text]] = []
    for (pattern, shape, dtype, quantised), count in counts.items():
        kind = dtypes[dtype] if quantised is None else f"{quantised}, read as {dtypes[dtype]}"
        rows.append((pattern, " x ".join(map(str, shape)) or "scalar", kind, str(count)))
    title = f"{path}: {file.format}, {len(file.infos)} tensors"
    print_table(out, title, ("tensor", "shape", "dtype", "how many"), rows)
    if not found:
        from parity.port.conversion.metadata import NOT_LISTED

        out.print(Text("No attention layer that a layout fits", style="bold"))
        out.print(Text(f"If it has attention, {NOT_LISTED}"), soft_wrap=True)
        if proposal:
            out.print(Text(f"A table that fits:\n\n{proposal.rstrip()}"), soft_wrap=True)
        return
    rows = []
    for layer in found:
        count = f"{layer.layers}, stacked" if layer.is_stacked else str(layer.layers)
        words = layer.heads + (f"; packed: {layer.packing}" if layer.packing else "")
        words += f"; not understood: {', '.join(layer.unread)}" if layer.unread else ""
        rows.append((Text(layer.prefix), count, layer.layout, Text(words)))
    print_table(out, "Attention layers", (_prefix_column(), "layers", "layout", "heads"), rows)


def _prefix_column() -> Column:
    """Return the column of prefixes, which users copy from there."""
    return Column("prefix", overflow="fold", no_wrap=True)


def print_conversion(converted: Converted, layout: str, out: Console) -> None:
    """Print the result for the tensors of a file that was converted to a layout."""
    layers, spec = converted.layers, converted.spec
    heads = f", {spec.num_heads} x {spec.head_dim}, key/value {spec.num_kv_heads}" if spec else ""
    if converted.heads_from:
        theta = f", RoPE theta {spec.rope.theta:g}" if spec and spec.rope is not None else ""
        heads += f" (from {converted.heads_from}{theta})"
    out.print(
        f"{counted(len(layers), 'attention layer')}{heads}: {converted.source} -> {layout}; "
        f"other tensors: {len(converted.kept)} kept, {len(converted.dropped)} dropped; "
        f"{'would write' if converted.plan else 'wrote'} {converted.path}",
        soft_wrap=True,
    )
    if converted.plan is not None:
        _print_plan(converted.plan, converted.dropped, out)


def _print_plan(plan: ConversionPlan, dropped: Sequence[str], out: Console) -> None:
    """Print the plan: layers, or tensors, that differ only in their numbers are in one row."""
    layers: Counter[tuple[str, ...]] = Counter()
    for layer in plan.layers:
        hints = (
            f"{name} {layer.spec.values()[name]}: {origin}" for name, origin in layer.hints.items()
        )
        layers[numbered(layer.label), f"{layer.layout}: {layer.layout_from}", "; ".join(hints)] += 1
    rows = [
        (Text(label), str(count), layout, Text(hints))
        for (label, layout, hints), count in layers.items()
    ]
    print_table(out, "Layers", (_prefix_column(), "layers", "layout", "hints"), rows)
    tensors = Counter(
        (", ".join(dict.fromkeys(map(numbered, names))), numbered(to))
        for to, names in plan.tensors.items()
    )
    rows = [(Text(names), Text(to), str(count)) for (names, to), count in tensors.items()]
    print_table(out, f"Tensors, {plan.size} bytes", ("from", "to", "how many"), rows)
    for what, names in (("dropped", dropped), ("not said by the target", plan.left_out)):
        if names:
            out.print(Text(f"{what}: {some_of(names)}"), soft_wrap=True)


@dataclass(frozen=True)
class Verdict:
    """Verdict on two layers, by name: their weights decide, the stages of probe inputs show the
    difference.
    """

    one: str
    other: str
    weights: WeightsComparison
    stages: list[Comparison]

    def to_dict(self) -> dict[str, Any]:
        """Return the verdict for JSON, without the stages."""
        told = {"same": self.weights.same, "same_bits": self.weights.kind == "bits"}
        return {"layers": [self.one, self.other], **told, "weights": self.weights.to_dict()}

    def __str__(self) -> str:
        wrong = first_difference(self.stages)
        names = ", ".join(each.name for each in self.weights.differences)
        where = (
            f"differ first at {wrong.stage}"
            if wrong
            else f"differ in {names}, and at no stage beyond rounding"
        )
        return f"{self.one} and {self.other} {where}"


def print_verdicts(
    verdicts: list[Verdict],
    diagnosis: Diagnosis,
    files: list[str],
    out: Console,
    not_compared: list[NotCompared],
) -> None:
    """Print if two files hold the same attention: all stages of one layer, or the first of many
    that differs.

    The diagnosis is that of the first layer that differs.
    """
    wrong = [verdict for verdict in verdicts if not verdict.weights.same]
    alone = len(verdicts) == 1
    for verdict in [] if alone else wrong:
        out.print(Text(str(verdict), style="red"), soft_wrap=True)
    if wrong:
        _print_difference(wrong[0], diagnosis, out)
    elif alone:
        _print_stages(verdicts[0].stages, out)
    if wrong:
        claim, style = "do NOT hold the same attention", "bold red"
    elif any(each.is_open for each in not_compared):
        claim, style = "hold the same weights", "bold yellow"
    else:
        claim, style = "hold the same attention", "bold green"
    if not alone:
        claim += f" in all {len(verdicts)} layers: {_counts(verdicts)}"
    elif not wrong:
        claim += f": {verdicts[0].weights.how}"
    left_out = f"; not compared: {', '.join(by_reason(not_compared))}" if not_compared else ""
    out.print(Text(f"{files[0]} and {files[1]} {claim}{left_out}", style=style), soft_wrap=True)
    for verdict in verdicts:
        if verdict.weights.kind == "function" and not alone:
            out.print(Text(f"{verdict.one}: {verdict.weights.how}"), soft_wrap=True)


def _counts(verdicts: list[Verdict]) -> str:
    """Count the layers that are the same in each sense, and those that differ."""
    kinds = Counter(verdict.weights.kind for verdict in verdicts)
    counts = [f"{kinds['bits']} the same, bit for bit"]
    counts += [f"{kinds['values']} the same values"] if kinds["values"] else []
    counts += (
        [f"{kinds['function']} the same function, written differently"] if kinds["function"] else []
    )
    rounded = kinds["copy"] + kinds["rounding"]
    return "; ".join(
        [*counts, f"{rounded} the same up to rounding", f"{kinds['different']} different"]
    )


def _print_difference(verdict: Verdict, diagnosis: Diagnosis, out: Console) -> None:
    """Print which tensors differ, which stages show it, and the explanation."""
    out.print(Text(str(verdict.weights)), soft_wrap=True)
    _print_stages(verdict.stages, out)
    wrong = first_difference(verdict.stages)
    if wrong is not None:
        out.print(Text(str(wrong), style="red"))
    print_explanation(verdict.weights, diagnosis, out)


def _print_stages(comparisons: list[Comparison], out: Console) -> None:
    title = "Error of the second file on probe inputs, as a share of the rounding error"
    columns = ["stage", *(Column(name, justify="right") for name in ("share", "max abs"))]
    rows = [(each.stage, short_ratio(each.ratio), f"{each.max_abs:.1e}") for each in comparisons]
    print_table(out, title, columns, rows, ["" if each.passed else "red" for each in comparisons])

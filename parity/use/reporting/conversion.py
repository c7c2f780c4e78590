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
from parity.use.reporting.console import Row, print_line, print_table, short_ratio

if TYPE_CHECKING:
    from parity.explain.diagnosis.diagnose import Diagnosis
    from parity.explain.diagnosis.weights.differences import WeightsComparison
    from parity.measure.files import TensorFile
    from parity.port.conversion.inspect import InspectedLayers
    from parity.port.conversion.layouts import Layout
    from parity.port.conversion.not_compared import NotCompared
    from parity.port.conversion.plan import ConversionPlan, Converted, PlannedLayer

# ---- Layouts -------------------------------------------------------------------------------------

AXES = {"p": "projections", "n": "heads", "h": "head_dim", "d": "input", "e": "output"}
"""The axes of a tensor, by their letters in a layout."""

AXES_OF_OTHERS = {
    "...": "as they are",
    "d e": "transposed",
    "d n h": "transposed, heads as an axis",
    "(n h) d": "transposed, rows of heads",
}
"""The axes of tensors that only some layers have, by their letters in a layout."""


def print_layouts(layouts: Iterable[Layout], out: Console) -> None:
    """Print a table of layouts, one in each row."""
    rows = [(layout.name, layout.about, layout.rope) for layout in layouts]
    print_table(out, "Layouts", ("layout", "model or library", "RoPE pairs"), rows)


def print_layout(layout: Layout, out: Console) -> None:
    """Print the tensors of a layout with their axes, outermost first, and its properties."""
    print_line(out, f"{layout.about} ({layout.source})")
    columns = ("tensor", "holds", "axes")
    title = layout.name
    for form in layout.forms:
        rows = []
        for tensor in form:
            axes = " | ".join(map(_axis_in_words, tensor.groups))
            rows.append((tensor.name, ", ".join(tensor.parts), f"[{axes}]"))
        print_table(out, title, columns, rows)
        title = "or"  # a different form of the same layout
    if layout.others:
        rows = []
        for tensor in layout.others:
            rows.append((tensor.name, tensor.holds, AXES_OF_OTHERS[tensor.axes]))
        print_table(out, "only in some layers", columns, rows)
    for line in _properties(layout):
        print_line(out, line)


def _axis_in_words(group: Iterable[str]) -> str:
    """Return an axis of a tensor, which joins the axes with these letters; none has size 1."""
    return " x ".join(AXES[letter] for letter in group) or "1"


def _properties(layout: Layout) -> list[str]:
    """Return what a layout does with its tensors, a line for each property."""
    from parity.port.conversion.layouts.layout import CARRIED, GRID_BIAS, RULES

    lines = []
    shared = [tensor.name for tensor in layout.tensors if tensor.is_shared]
    if shared:
        names = ", ".join(shared)
        lines.append(f"one projection for keys and values: {names}, if both are the same")
    if layout.packing:
        for order in layout.packing.split("; "):
            lines.append(f"heads in a packed tensor: {order}")
    pairs = "(i, i + H/2)" if layout.rope == "half" else "(2 i, 2 i + 1)"
    lines.append(f"RoPE pairs: {pairs}")
    for rule in layout.rules:
        lines.append(f"rule: {RULES[rule].words}")
    not_stored = [name for name in CARRIED if name not in layout.carries]
    if not_stored:
        lines.append(f"not stored, so pass them yourself: {', '.join(not_stored)}")
    else:
        lines.append("stores every setting of a specification")
    if layout.shares:
        lines.append(f"once in a file if layers share them: {', '.join(layout.shares)}")
    if layout.grid_biases:
        names = ", ".join(layout.grid_biases)
        lines.append(f"not determined by shapes: {names}; --drop {GRID_BIAS} leaves it out")
    # A layout of a user has the prefix of its own files alone.
    for prefix in layout.prefixes or filter(None, [layout.prefix]):
        lines.append(f"prefix: {prefix}")
    if layout.ranks is not None:
        lines.append(f"files of ranks: {layout.ranks.file}")
    return lines


# ---- Contents of a file --------------------------------------------------------------------------


def print_inspection(
    path: str,
    file: TensorFile,
    layers_by_kind: list[InspectedLayers],
    out: Console,
    proposal: str = "",
) -> None:
    """Print the tensors of a file, with tensors of numbered layers in one row, and the layouts that
    fit.

    Args:
        path: path of the file.
        file: the open file.
        layers_by_kind: its attention layers.
        out: where to print.
        proposal: the table of a layout that is proposed if there are none, as TOML.
    """
    title = f"{path}: {file.format}, {len(file.infos)} tensors"
    print_table(out, title, ("tensor", "shape", "dtype", "count"), _tensor_rows(file))
    if not layers_by_kind:
        from parity.port.conversion.file_hints import NOT_LISTED

        out.print(Text("No attention layer that a layout fits", style="bold"))
        print_line(out, f"If it has attention, {NOT_LISTED}")
        if proposal:
            out.print(Text(f"A table that fits:\n\n{proposal.rstrip()}"), soft_wrap=True)
        return
    rows = []
    for layers in layers_by_kind:
        count = str(layers.layers)
        if layers.is_stacked:
            count += ", stacked"
        words = layers.heads
        if layers.packing:
            words += f"; packed: {layers.packing}"
        if layers.unread:
            words += f"; not understood: {', '.join(layers.unread)}"
        rows.append((Text(layers.prefix), count, layers.layout, Text(words)))
    print_table(out, "Attention layers", (_prefix_column(), "layers", "layout", "heads"), rows)


def _tensor_rows(file: TensorFile) -> list[Row]:
    """Return a row for tensors that are alike: pattern of the name, shape, dtype, count."""
    counts = Counter(
        (numbered(name), info.shape, info.dtype, file.quantized.get(name))
        for name, info in file.infos.items()
    )
    # NumPy takes long to name a dtype, and a file has few dtypes and many tensors.
    names_of_dtypes = {dtype: dtype.name for _, _, dtype, _ in counts}
    rows: list[Row] = []
    for (pattern, shape, dtype, quantized), count in counts.items():
        kind = names_of_dtypes[dtype]
        if quantized is not None:
            kind = f"{quantized}, read as {kind}"
        sizes = " x ".join(map(str, shape)) or "scalar"
        rows.append((pattern, sizes, kind, str(count)))
    return rows


def _prefix_column() -> Column:
    """Return the column of prefixes, which users copy from there."""
    return Column("prefix", overflow="fold", no_wrap=True)


# ---- Conversions ---------------------------------------------------------------------------------


def print_conversion(converted: Converted, layout: str, out: Console) -> None:
    """Print the result for the tensors of a file that was converted to a layout, or its plan."""
    if converted.plan is None:
        convert, copy, drop, write = "converted", "copied", "dropped", "wrote"
    else:
        convert, copy, drop, write = "would convert", "would copy", "drop", "would write"
    layers = f"{counted(len(converted.layers), 'attention layer')}{_heads_in_words(converted)}"
    tensors = f"{copy} {counted(len(converted.copied), 'other tensor')}"
    if converted.dropped:
        tensors += f" and {drop} {len(converted.dropped)}"
    print_line(
        out,
        f"{convert} {layers} from {converted.source} to {layout}; {tensors}; "
        f"{write} {converted.path}",
    )
    if converted.plan is not None:
        _print_plan(converted.plan, converted.dropped, out)


def _heads_in_words(converted: Converted) -> str:
    """Return the heads of all layers and the file that specified them; empty if the layers differ,
    unless such a file did.
    """
    words = []
    spec = converted.spec
    if spec is not None:
        words.append(f"{counted(spec.num_heads, 'head')} x {spec.head_dim}")
        words.append(counted(spec.num_kv_heads, "key/value head"))
        if converted.heads_from and spec.rope is not None:
            words.append(f"RoPE theta {spec.rope.theta:g}")
    if converted.heads_from:
        words.append(f"from {converted.heads_from}")
    if not words:
        return ""
    return f" ({', '.join(words)})"


def _print_plan(plan: ConversionPlan, dropped: Sequence[str], out: Console) -> None:
    """Print the plan: layers, or tensors, that differ only in their numbers are in one row."""
    num_layers: Counter[tuple[str, ...]] = Counter(map(_without_number, plan.layers))
    rows: list[Row] = []
    for (label, layout, hints), count in num_layers.items():
        rows.append((Text(label), str(count), layout, Text(hints)))
    print_table(out, "Layers", (_prefix_column(), "layers", "layout", "hints"), rows)
    num_tensors: Counter[tuple[str, str]] = Counter()
    for target, sources in plan.tensors.items():
        patterns = dict.fromkeys(map(numbered, sources))
        num_tensors[", ".join(patterns), numbered(target)] += 1
    rows = []
    for (patterns_of_sources, pattern), count in num_tensors.items():
        rows.append((Text(patterns_of_sources), Text(pattern), str(count)))
    print_table(out, f"Tensors, {plan.size} bytes", ("from", "to", "count"), rows)
    if dropped:
        print_line(out, f"dropped: {some_of(dropped)}")
    if plan.left_out:
        print_line(out, f"lost in the target: {some_of(plan.left_out)}")


def _without_number(layer: PlannedLayer) -> tuple[str, str, str]:
    """Return the pattern of a layer's prefix, its layout and its hints, each with its source."""
    values = layer.spec.values()
    hints = [f"{name} {values[name]}: {source}" for name, source in layer.hints.items()]
    return numbered(layer.label), f"{layer.layout}: {layer.layout_from}", "; ".join(hints)


# ---- Comparisons of two files --------------------------------------------------------------------


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
        return {
            "layers": [self.one, self.other],
            "same": self.weights.same,
            "same_bits": self.weights.kind == "bits",
            "weights": self.weights.to_dict(),
        }

    def __str__(self) -> str:
        first_wrong = first_difference(self.stages)
        if first_wrong is not None:
            return f"{self.one} and {self.other} differ first at {first_wrong.stage}"
        names = ", ".join(difference.name for difference in self.weights.differences)
        return f"{self.one} and {self.other} differ in {names}, and at no stage beyond rounding"


def print_verdicts(
    verdicts: list[Verdict],
    diagnosis: Diagnosis,
    files: list[str],
    out: Console,
    not_compared: list[NotCompared],
) -> None:
    """Print whether two files hold the same attention: all stages of one layer, or the first of
    many that differs.

    The diagnosis describes the first layer that differs.
    """
    wrong = [verdict for verdict in verdicts if not verdict.weights.same]
    is_alone = len(verdicts) == 1
    if not is_alone:
        for verdict in wrong:
            print_line(out, str(verdict), "red")
    if wrong:
        _print_difference(wrong[0], diagnosis, out)
    elif is_alone:
        _print_stages(verdicts[0].stages, out)

    if wrong:
        claim, style = "do NOT hold the same attention", "bold red"
    elif any(gap.is_open for gap in not_compared):
        claim, style = "hold the same weights", "bold yellow"
    else:
        claim, style = "hold the same attention", "bold green"
    if not is_alone:
        claim += f" in all {len(verdicts)} layers: {_counts(verdicts)}"
    elif not wrong:
        claim += f": {verdicts[0].weights.how}"
    if not_compared:
        claim += f"; not compared: {', '.join(by_reason(not_compared))}"
    print_line(out, f"{files[0]} and {files[1]} {claim}", style)
    if not is_alone:
        for verdict in verdicts:
            if verdict.weights.kind == "function":
                print_line(out, f"{verdict.one}: {verdict.weights.how}")


def _counts(verdicts: list[Verdict]) -> str:
    """Count the layers that are the same in each sense, and those that differ."""
    kinds = Counter(verdict.weights.kind for verdict in verdicts)
    counts = [f"{kinds['bits']} the same, bit for bit"]
    if kinds["values"]:
        counts.append(f"{kinds['values']} the same values")
    if kinds["function"]:
        counts.append(f"{kinds['function']} the same function, written differently")
    counts.append(f"{kinds['copy'] + kinds['rounding']} the same up to rounding")
    counts.append(f"{kinds['different']} different")
    return "; ".join(counts)


def _print_difference(verdict: Verdict, diagnosis: Diagnosis, out: Console) -> None:
    """Print which tensors differ, which stages show it, and the explanation."""
    print_line(out, str(verdict.weights))
    _print_stages(verdict.stages, out)
    # Imported here, because conversions, which this module also prints, need no diagnosis.
    from parity.use.reporting.diagnosis import adds_to_patterns, print_explanation

    first_wrong = first_difference(verdict.stages)
    if first_wrong is not None:
        has_diagnosis = diagnosis.is_wrong and adds_to_patterns(diagnosis, verdict.weights)
        # A diagnosis states how large the error is.
        print_line(out, first_wrong.as_text(with_budget=not has_diagnosis), "red")
    print_explanation(verdict.weights, diagnosis, out)


def _print_stages(comparisons: list[Comparison], out: Console) -> None:
    """Print the error of each stage in a row."""
    share, max_abs = (Column(name, justify="right") for name in ("share", "max abs"))
    rows = []
    styles = []
    for comparison in comparisons:
        style = "" if comparison.passed else "red"
        rows.append((comparison.stage, short_ratio(comparison.ratio), f"{comparison.max_abs:.1e}"))
        styles.append(style)
    title = "Error of the second file on probe inputs, as a share of the rounding error"
    print_table(out, title, ["stage", share, max_abs], rows, styles)

"""Results for people and for machines: tables on a terminal, plain lines in a pipe, JSON in a file."""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import resources
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.markdown import Markdown
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from parity.core.compare import Comparison, first_difference
from parity.core.spec import find_case, stage_kind
from parity.files.target import write_whole

if TYPE_CHECKING:
    from parity.conversion.inspect import Found
    from parity.conversion.layouts import Layout
    from parity.core.spec import Case
    from parity.diagnosis.diagnose import Diagnosis
    from parity.diagnosis.selftest import Outcome
    from parity.files import TensorFile
    from parity.running.report import Report

DETAILED_FAILURES = 5  # shown whole on the terminal; all are in the JSON
PIPE_WIDTH = 100
NARROWEST = 9  # columns for a verdict in a table: `FAIL 1.03`


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Go on in silence when the reader of a pipe has seen enough: the exit status is still that of the work."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def console() -> Console:
    """Standard output: colour and tables on a terminal, plain lines in a pipe."""
    terminal = _Console(highlight=False)
    return terminal if terminal.is_terminal else _Console(highlight=False, width=PIPE_WIDTH)


def begin_table(out: Console, title: str, **options: Any) -> Table:
    """Print a title and begin a table: with lines on a terminal, columns of plain text elsewhere."""
    out.print(Text(title, style="bold"))
    return Table(box=box.ROUNDED if out.is_terminal else None, padding=(0, 1), **options)


@contextmanager
def progress_bar(total: int) -> Iterator[Any]:
    """A bar on standard error that shows what runs now; only on a terminal.

    Yields:
        A function to call before each item, with what it is.
    """
    errors = Console(stderr=True)
    columns = (
        TextColumn("{task.description:<46}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as progress:
        task = progress.add_task("", total=total)
        started = False

        def begin(*what: str) -> None:
            nonlocal started
            progress.update(task, description=" ".join(what), advance=1 if started else 0)
            started = True

        yield begin


def print_report(report: Report, out: Console, *, verbose: bool = False, quiet: bool = False) -> None:
    """Print a report: cases, stages, what is wrong and where, what was skipped and why, and a last line.

    Args:
        report: what to print.
        out: where to.
        verbose: also print every comparison.
        quiet: print only what is wrong and the last line.
    """
    if verbose:
        _print_comparisons(report, out)
    if not quiet:
        _print_cases_of(report, out)
        _print_stages(report, out)
    differences = report.first_differences()
    for comparison in differences[:DETAILED_FAILURES]:
        out.print()
        out.print(Text(str(comparison), style="red"))
        if diagnosis := report.diagnoses.get((comparison.case, comparison.dtype, comparison.backend)):
            print_diagnosis(diagnosis, out)
        print_reproduction(comparison, out)
    if len(differences) > DETAILED_FAILURES:
        out.print(f"\n… and {len(differences) - DETAILED_FAILURES} more; --json holds them all")
    if differences or not quiet:
        out.print()
    if not quiet:
        for warning in report.warnings:
            out.print(Text(f"warning: {warning}", style="yellow"), soft_wrap=True)
        for reason in skipped_reasons(report):
            out.print(Text(f"skipped: {reason}", style="yellow"), soft_wrap=True)
    out.print(summary_line(report), soft_wrap=True)


def skipped_reasons(report: Report) -> list[str]:
    """Each reason for which something was skipped, once."""
    reasons = Counter((skipped.backend, skipped.dtype, skipped.reason) for skipped in report.skipped_cases)
    return [
        *report.skipped.values(),
        *(f"{backend}, {dtype}: {why} ({_counted(n, 'case')})" for (backend, dtype, why), n in reasons.items()),
    ]


def print_diagnosis(diagnosis: Diagnosis, out: Console) -> None:
    """Print what is wrong, as far as it was found."""
    style = {"none": "bold green", "structure": "bold", "precision": "bold"}.get(diagnosis.kind, "")
    out.print(Text(str(diagnosis), style=style), soft_wrap=True)


def print_reproduction(comparison: Comparison, out: Console) -> None:
    """Print the command that runs a comparison's case again, if its name is enough."""
    if command := reproduction(comparison):
        out.print(f"  again       {command}", soft_wrap=True)


def reproduction(comparison: Comparison) -> str:
    """The command that runs a comparison's case again; empty if its name is not enough."""
    if find_case(comparison.case) is None:
        return ""
    backend = comparison.backend.split(" ")[0]
    command = f"mha-parity run --backends {backend} --cases {comparison.case} --dtypes {comparison.dtype}"
    return f"{command}{' --grad' if 'grad.' in comparison.stage else ''}"


def summary_line(report: Report) -> Text:
    """One line: how many stages agree, how many do not, and what did not run."""
    summary, groups = report.summary, report.groups()
    if not groups:
        return Text("nothing was compared", style="bold yellow")
    backends = sorted({backend for _, _, backend in groups})
    count = len({case for case, _, _ in groups})
    one = len(backends) == 1
    verdict = ("agrees" if one else "agree") if not summary["failed"] else ("does" if one else "do") + " NOT agree"
    counts = f"{summary['passed']} stages passed, {summary['failed']} failed"
    numbers = {"backend": len(report.skipped), "case": len(report.skipped_cases)}
    skipped = " and ".join(_counted(number, what) for what, number in numbers.items() if number)
    counts += f", {skipped} skipped" if skipped else ""
    counts += f", {_counted(len(report.missing), 'trace')} missing" if report.missing else ""
    names = " and ".join(filter(None, (", ".join(backends[:-1]), backends[-1])))
    against = {comparison.against for comparison in report.comparisons}
    expected = "the float64 reference" if against == {"the reference"} else "what was expected"
    return Text(
        f"{names} {verdict} with {expected}: {_counted(count, 'case')}, {counts}",
        style="bold red" if report.status else "bold green",
    )


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number != 1 else ''}"


def write_json(path: str | os.PathLike[str], content: Mapping[str, Any]) -> None:
    """Write JSON to a file, whole or not at all.

    Raises:
        OSError: if the file cannot be written.
        ValueError: if a number is NaN or infinite, which JSON does not have.
    """
    write_whole(path, f"{json.dumps(content, indent=1, allow_nan=False)}\n".encode())


def _print_cases_of(report: Report, out: Console) -> None:
    """One row a case and dtype, one column a backend: the worst stage and how much of its budget it uses."""
    skipped = {(skipped.case, skipped.dtype, skipped.backend) for skipped in report.skipped_cases}
    groups = {**report.groups(), **{key: [] for key in sorted(skipped)}}
    backends = list(dict.fromkeys(backend for _, _, backend in groups))
    # A case that has one dtype of its own has it in its name.
    dtypes = {dtype for case, dtype, _ in groups if (known := find_case(case)) is None or known.dtype is None}
    longest = max(len(case) for case, _, _ in groups)
    pairs = list(dict.fromkeys((case, dtype) for case, dtype, _ in groups))
    between = 3 if out.is_terminal else 2  # columns
    taken = longest + 6 + 2 * between + (8 + between if len(dtypes) > 1 else 0)
    width = (out.width - taken - 1) // max(len(backends), 1) - between
    title = "Worst error / budget of each case (1.00 is the limit)"
    if width < NARROWEST:  # no room for columns: a line for each verdict
        out.print(Text(title, style="bold"))
        for case, dtype in pairs:
            out.print(Text(f"{case}, {dtype}" if len(dtypes) > 1 else case, overflow="fold"))
            for backend in backends:
                out.print(Text(f"  {backend}: ", overflow="fold") + _verdict(groups.get((case, dtype, backend))))
        return
    table = begin_table(out, title)
    table.add_column("case", no_wrap=True, min_width=longest)
    if len(dtypes) > 1:
        table.add_column("dtype", no_wrap=True, min_width=8)
    table.add_column("stages", justify="right", no_wrap=True, min_width=6)
    for backend in backends:
        table.add_column(Text(backend, no_wrap=True, overflow="ellipsis"), min_width=NARROWEST, max_width=width)
    for case, dtype in pairs:
        of_backends = [groups.get((case, dtype, backend)) for backend in backends]
        row = [case, *([dtype] if len(dtypes) > 1 else []), str(max(len(group or []) for group in of_backends))]
        table.add_row(*row, *(_verdict(comparisons) for comparisons in of_backends))
    out.print(table)


def _verdict(comparisons: list[Comparison] | None) -> Text:
    """What a cell says; the stage of what passed may be cut off, that of what failed goes on in the next line."""
    if not comparisons:
        return Text("—" if comparisons is None else "skipped", style="dim")
    difference = first_difference(comparisons)
    if difference is not None:
        words = f"FAIL {_short(difference.worse_ratio)} {difference.stage}"
        return Text(words, style="bold red", overflow="fold")
    worst = max(comparisons, key=lambda comparison: comparison.worse_ratio)
    return Text(f"ok {_short(worst.ratio)} {worst.stage}", style="green", no_wrap=True, overflow="ellipsis")


def _print_stages(report: Report, out: Console) -> None:
    """One row a stage: over all cases, the worst error / budget and largest absolute error of each backend."""
    backends = list(dict.fromkeys(comparison.backend for comparison in report.comparisons))
    kinds: dict[str, list[Comparison]] = {}
    for comparison in report.comparisons:
        kinds.setdefault(stage_kind(comparison.stage), []).append(comparison)
    longest = max(map(len, kinds), default=0)
    widths = [min(max(len(backend), 5), NARROWEST) for backend in backends]
    room = out.width - longest - 4 - sum(width + 3 for width in widths)  # for all but the stage and the ratios
    room_for_sizes = room >= 10 * len(backends)
    room_for_cases = room - 10 * len(backends) >= 20

    def ratio(comparisons: list[Comparison]) -> Text:
        if not comparisons:
            return Text("—")
        style = "" if all(comparison.passed for comparison in comparisons) else "bold red"
        return Text(_short(max(comparison.worse_ratio for comparison in comparisons)), style=style)

    title = "Stage by stage: worst error / budget"
    if room < 0:  # no room for columns: a line for each stage
        out.print(Text(title, style="bold"))
        for kind, comparisons in kinds.items():
            ratios = (Text(f"{backend} ") + ratio(_of(backend, comparisons)) for backend in backends)
            out.print(Text(f"{kind}: ", overflow="fold") + Text(", ").join(ratios))
        return
    table = begin_table(out, f"{title}, and largest absolute error" if room_for_sizes else title)
    table.add_column("stage", no_wrap=True)
    for backend, width in zip(backends, widths, strict=True):
        table.add_column(backend, justify="right", no_wrap=True, min_width=width, max_width=width)
        if room_for_sizes:
            table.add_column("max abs", justify="right", no_wrap=True, min_width=7)
    if room_for_cases:
        table.add_column("worst in", no_wrap=True, style="dim", max_width=room - 10 * len(backends) - 3)
    for kind, comparisons in kinds.items():
        row: list[str | Text] = [kind]
        for backend in backends:
            of_backend = _of(backend, comparisons)
            row.append(ratio(of_backend))
            if room_for_sizes:
                row.append(f"{max(comparison.max_abs for comparison in of_backend):.1e}" if of_backend else "—")
        worst = max(comparisons, key=lambda comparison: comparison.worse_ratio)
        place = f"{worst.case} ({worst.backend})" if worst.worse_ratio else ""
        table.add_row(*row, *([place] if room_for_cases else []))
    out.print(table)


def _of(backend: str, comparisons: list[Comparison]) -> list[Comparison]:
    return [comparison for comparison in comparisons if comparison.backend == backend]


def _print_comparisons(report: Report, out: Console) -> None:
    """One row a comparison; where there is no room for columns, a line with its ratio."""
    if out.width < 80:
        out.print(Text("Every comparison: error / budget", style="bold"))
        for comparison in report.comparisons:
            names = f"{comparison.case} {comparison.stage} {comparison.dtype} {comparison.backend}"
            style = "" if comparison.passed else "red"
            out.print(Text(f"{names} {_short(comparison.worse_ratio)}", style=style, overflow="fold"))
        return
    table = begin_table(out, "Every comparison")
    for name in ("case", "stage"):
        table.add_column(name, overflow="fold")
    table.add_column("dtype")
    table.add_column("backend")
    for name in ("error", "budget", "ratio", "local", "max abs", "max ulp"):
        table.add_column(name, justify="right")
    for comparison in report.comparisons:
        local = "—" if comparison.local_ratio is None else _short(comparison.local_ratio)
        numbers = (f"{comparison.error:.0e}", f"{comparison.budget:.0e}", _short(comparison.ratio), local)
        sizes = (f"{comparison.max_abs:.0e}", f"{comparison.max_ulp:.0f}")
        style = "" if comparison.passed else "red"
        table.add_row(
            comparison.case, comparison.stage, comparison.dtype, comparison.backend, *numbers, *sizes, style=style
        )
    out.print(table)


def _short(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < 100 else f"{ratio:.0e}"


# ---- Cases and pages -------------------------------------------------------------------------------------------------


def covers(case: Case) -> str:
    """What a case covers, of its own fields: heads and tokens, then whatever is not the plain thing."""
    spec = case.spec
    heads = f"{spec.num_heads}" if spec.num_kv_heads == spec.num_heads else f"{spec.num_heads}/{spec.num_kv_heads}"
    tokens = "+".join(map(str, case.chunks)) or str(case.seq_len)
    across = f" over {case.seq_len_k}" if case.seq_len_k is not None else ""
    said = {
        "causal": case.is_causal,
        "padding": case.key_padding_lengths is not None,
        f"window {case.window_size}": case.window_size is not None,
        "random mask": case.random_mask,
        "bias": case.bias,
        "RoPE": spec.rope is not None,
        f"cache of {case.capacity} slots": case.is_cached,
        "ragged": bool(case.new_lengths),
        "fused qkv": spec.fused_qkv,
        "no biases": not (spec.qkv_bias or spec.out_bias),
        "no out_proj": not spec.out_proj,
        "strided": case.strided,
        "large logits": case.gain > 1.0,
        f"NaN {case.not_finite}": case.not_finite is not None,
        "trained": case.trained is not None,
        f"{case.dtype} only": case.dtype is not None,
    }
    sizes = f"heads {heads} x {spec.head_dim}, tokens {case.batch} x {tokens}{across}"
    return ", ".join([sizes, *(words for words, holds in said.items() if holds)])


def print_cases(cases: list[Case], out: Console) -> None:
    """Print cases, one a line: the name, what fails when it fails, and what it covers."""
    name_width = max(len(case.name) for case in cases)
    about_width = max(len(case.about) for case in cases)
    for case in cases:
        line = f"{case.name:<{name_width}}  {case.about:<{about_width}}  {covers(case)}"
        out.print(Text(line), soft_wrap=True)


def bug_page(name: str) -> str:
    """The page of a class of mistakes, by its name or that of one of its mistakes.

    Raises:
        ValueError: if there is none.
    """
    folder = resources.files("parity") / "bugs"
    pages = {page.name.removesuffix(".md"): page.read_text("utf-8") for page in folder.iterdir()}
    if name in pages:
        return pages[name]
    for text in pages.values():
        if f"`{name}`" in text.partition("The hypotheses of this class:")[2]:
            return text
    known = ", ".join(sorted(pages.keys() - {"README"}))
    raise ValueError(f"NAME must be that of a page or of a mistake, got {name!r}; the pages are {known}")


def print_pages(pages: Iterable[str], out: Console) -> None:
    """Print pages of Markdown: laid out on a terminal, as they are elsewhere."""
    for page in pages:
        out.print(Markdown(page) if out.is_terminal else Text(page.rstrip()), soft_wrap=not out.is_terminal)


# ---- Weights ---------------------------------------------------------------------------------------------------------


def print_layout(layout: Layout, out: Console) -> None:
    """Print the tensors of a layout, and of each its axes, outermost first."""
    from parity.conversion.layouts.layout import RULES

    letters = {"n": "heads", "h": "head_dim", "d": "input", "e": "output"}
    out.print(Text(f"{layout.about} ({layout.source})"), soft_wrap=True)
    for number, form in enumerate(layout.forms):
        table = begin_table(out, layout.name if number == 0 else "or")
        for column in ("tensor", "holds", "axes"):
            table.add_column(column, overflow="fold")
        for tensor in form:
            axes = [" x ".join(letters[letter] for letter in group) or "1" for group in tensor.groups()]
            table.add_row(tensor.name, ", ".join(tensor.parts), f"[{' | '.join(axes)}]".replace("[", "\\["))
        out.print(table)
    of_group = {"q": "queries", "k": "key", "v": "value"}
    for holds in dict.fromkeys(tensor.holds for tensor in layout.tensors if len(tensor.parts) > 1):
        by_group = "each group's " + ", then its ".join(of_group[projection] for projection in holds)
        by_projection = "all " + ", then all ".join(holds)
        out.print(f"heads in a packed tensor: {by_group if layout.grouped else by_projection}")
    out.print(f"RoPE pairs: {'(i, i + H/2)' if layout.rope == 'half' else '(2 i, 2 i + 1)'}")
    for rule in layout.rules:
        out.print(f"rule: {RULES[rule].words}")
    for prefix in layout.prefixes:
        out.print(Text(f"prefix: {prefix}"))


def print_inspection(path: str, file: TensorFile, found: list[Found], out: Console) -> None:
    """Print what a file holds: its tensors, those of numbered layers together, and which layouts fit."""
    grouped: dict[tuple[str, str, str], int] = {}
    for name, info in file.infos.items():
        pattern = re.sub(r"(?<![^.])\d+(?![^.])", "{i}", name)
        key = (pattern, " x ".join(map(str, info.shape)) or "scalar", info.dtype.name)
        grouped[key] = grouped.get(key, 0) + 1
    table = begin_table(out, f"{path}: {file.format}, {len(file.infos)} tensors")
    for column in ("tensor", "shape", "dtype", "how many"):
        table.add_column(column, overflow="fold")
    for (pattern, shape, dtype), count in grouped.items():
        table.add_row(Text(pattern), shape, dtype, str(count))
    out.print(table)
    table = begin_table(out, "Attention layers" if found else "No attention layer that a layout fits")
    for column in ("prefix", "layers", "layout", "heads"):
        table.add_column(column, overflow="fold")
    for layer in found:
        count = f"{layer.layers}, stacked" if layer.is_stacked else str(layer.layers)
        table.add_row(Text(layer.prefix), count, layer.layout, Text(layer.heads))
    if found:
        out.print(table)


def print_verdict(
    comparisons: list[Comparison], diagnosis: Diagnosis, same_bits: bool, files: list[str], out: Console
) -> None:
    """Print whether two files hold the same attention, stage by stage, and if they do not, what explains it."""
    table = begin_table(out, "Error of the second file, as a share of what rounding explains")
    for column in ("stage", "share", "max abs"):
        table.add_column(column, justify="left" if column == "stage" else "right")
    for comparison in comparisons:
        style = "" if comparison.passed else "red"
        table.add_row(comparison.stage, _short(comparison.ratio), f"{comparison.max_abs:.1e}", style=style)
    out.print(table)
    wrong = first_difference(comparisons)
    if wrong is not None:
        out.print(Text(str(wrong), style="red"))
        print_diagnosis(diagnosis, out)
        out.print(Text(f"{files[0]} and {files[1]} do NOT hold the same attention", style="bold red"), soft_wrap=True)
        return
    how = "the same, bit for bit" if same_bits else f"the same up to rounding in {comparisons[0].dtype}"
    out.print(
        Text(f"{files[0]} and {files[1]} hold the same attention: weights {how}", style="bold green"), soft_wrap=True
    )


def print_verdicts(
    verdicts: list[tuple[str, str, list[Comparison], bool]], diagnosis: Diagnosis, files: list[str], out: Console
) -> None:
    """Print whether two files hold the same attention, in full for one layer, and of many for the first that differs.

    Args:
        verdicts: of each layer its name in both files, the comparisons, and whether its weights are the same bits.
        diagnosis: of the first layer that differs, or of one that does not.
        files: their names.
        out: where to.
    """
    if len(verdicts) == 1:
        _, _, comparisons, same_bits = verdicts[0]
        print_verdict(comparisons, diagnosis, same_bits, files, out)
        return
    wrong = [(one, other, first) for one, other, each, _ in verdicts if (first := first_difference(each)) is not None]
    for one, other, first in wrong:
        out.print(Text(f"{one} and {other} differ first at {first.stage}", style="red"), soft_wrap=True)
    same = sum(same_bits for *_, same_bits in verdicts)
    rounded = len(verdicts) - len(wrong) - same
    counts = f"{same} the same, bit for bit; {rounded} the same up to rounding; {len(wrong)} different"
    if wrong:
        out.print(Text(str(wrong[0][2]), style="red"))
        print_diagnosis(diagnosis, out)
    verb, style = ("do NOT hold", "bold red") if wrong else ("hold", "bold green")
    told = f"{files[0]} and {files[1]} {verb} the same attention in all {len(verdicts)} layers: {counts}"
    out.print(Text(told, style=style), soft_wrap=True)


# ---- Diagnosis -------------------------------------------------------------------------------------------------------


def print_divergence(sides: list[list[Comparison]], distances: dict[str, float], out: Console) -> None:
    """Print, stage by stage, how far two traces are from the reference and from each other, and where they part.

    Args:
        sides: the comparisons of each with the reference.
        distances: by stage, the largest difference between the two.
        out: where to.
    """
    names = [side[0].backend for side in sides]
    title = "Error / budget of each against the reference, and their difference"
    by_stage = [{comparison.stage: comparison for comparison in side} for side in sides]
    rows = []
    for stage, distance in distances.items():
        found = [side.get(stage) for side in by_stage]
        ratios = ("—" if each is None else _short(each.worse_ratio) for each in found)
        style = "" if all(each is None or each.passed for each in found) else "red"
        rows.append((stage, [*ratios, f"{distance:.1e}"], style))
    columns = (*names, "difference")
    if out.width < 80:  # no room for columns
        out.print(Text(title, style="bold"))
        for stage, numbers, style in rows:
            said = ", ".join(map(" ".join, zip(columns, numbers, strict=True)))
            out.print(Text(f"{stage}: {said}", style=style, overflow="fold"))
    else:
        table = begin_table(out, title)
        table.add_column("stage", no_wrap=True)
        for column in columns:
            table.add_column(column, justify="right")
        for stage, numbers, style in rows:
            table.add_row(stage, *numbers, style=style)
        out.print(table)
    for side in sides:
        wrong = first_difference(side)
        words = "is right" if wrong is None else f"goes wrong at {wrong.stage}"
        out.print(Text(f"{side[0].backend} {words}", style="green" if wrong is None else "red"), soft_wrap=True)
        if wrong is not None:
            out.print(Text(str(wrong), style="red"))


def print_selftest(outcomes: list[Outcome], out: Console) -> None:
    """Print what became of the mistakes that were planted: a row for each kind, what was not as it should be, a sum."""
    table = begin_table(out, "Planted mistakes: seen at their stage, and named by the diagnosis")
    is_narrow = out.width < 80
    table.add_column("mistake", overflow="fold", no_wrap=not is_narrow)
    table.add_column("stage", overflow="fold", no_wrap=not is_narrow)
    for column in ("planted", "seen", "named"):
        table.add_column(column, justify="right", no_wrap=True)
    kinds: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        kinds.setdefault(outcome.hypothesis or "(none)", []).append(outcome)
    for kind, of_kind in kinds.items():
        seen, named = (sum(getattr(outcome, what) for outcome in of_kind) for what in ("is_caught", "is_named"))
        style = "" if seen == named == len(of_kind) else "red"
        stages = ", ".join(dict.fromkeys(outcome.stage for outcome in of_kind if outcome.stage)) or "—"
        table.add_row(kind, stages, str(len(of_kind)), str(seen), str(named), style=style)
    out.print(table)
    for outcome in outcomes:
        where = f"{outcome.hypothesis or 'nothing'} in {outcome.case} on {outcome.backend}"
        if not outcome.is_caught:
            out.print(
                Text(f"NOT SEEN: {where}: {outcome.stage or 'all stages passed'}", style="bold red"), soft_wrap=True
            )
        elif not outcome.is_named:
            named = ", ".join(outcome.named) or "nothing"
            out.print(Text(f"not named: {where}: the diagnosis says {named}", style="yellow"), soft_wrap=True)
    seen, named = (sum(getattr(outcome, what) for outcome in outcomes) for what in ("is_caught", "is_named"))
    style = "bold green" if seen == len(outcomes) else "bold red"
    out.print(Text(f"{len(outcomes)} planted, {seen} seen at their stage, {named} named", style=style))

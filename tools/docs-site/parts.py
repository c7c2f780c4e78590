"""Generated parts of pages, which the pages include: tables from the code and from docs/data, and a
terminal.

`measure.py` writes docs/data.
"""

import html
import io
import json
import re
import sys
from collections import Counter
from pathlib import Path

from pictures import searched_layer
from reference import table
from rich.console import Console
from rich.terminal_theme import TerminalTheme

import parity
from parity.explain.diagnosis.bugs import FIDELITIES, PRECISIONS, bugs_for, page_by_bug
from parity.use.reporting.diagnosis import print_diagnosis
from parity_lab.injections import INJECTIONS
from parity_lab.selftest import SELFTEST_CASES

DATA = Path(__file__).parents[2] / "docs" / "data"
BUGS = Path(__file__).parents[2] / "parity" / "bugs"
TUTORIALS = Path(__file__).parents[2] / "docs" / "tutorials"
sys.path.append(str(TUTORIALS))


def parts() -> dict[str, str]:
    """The text of each part, by its name."""
    return {
        "conventions": conventions(),
        "diagnosis": terminal(),
        "diagnosis-rates": diagnosis_rates(),
        "injected-bugs": injected_bugs(),
        "margins": margins(),
        "wrong-answers": wrong_answers(),
    }


def measured(name: str) -> dict:
    """The results of a command, with its text and the versions of packages."""
    return json.loads((DATA / f"{name}.json").read_text("utf-8"))


def source(measurement: dict) -> str:
    """The command and the packages of results."""
    packages = ", ".join(f"{name} {version}" for name, version in measurement["packages"].items())
    return f"Measured by `{measurement['command']}`{f' with {packages}' * bool(packages)}."


# ---- Conformance ---------------------------------------------------------------------------------

MARKS = {"broken": "✗", "differs": "✗", "note": "•", "absent": "–"}
"""Marks of answers, because color alone is not enough."""

OURS = "mha_torch, mha_jax"


def conventions() -> str:
    """The answers of every library, a row for each check; the classes of this project share a
    column.
    """
    from parity.explain.conformance.questions import QUESTIONS

    measurement = measured("conformance")
    others = [
        subject for subject in measurement["subjects"] if not subject["name"].startswith("mha_")
    ]
    ours = [subject for subject in measurement["subjects"] if subject["name"].startswith("mha_")]
    names = [subject["name"] for subject in others] + [OURS]
    head = "".join(
        f'<th scope="col"><code>{html.escape(name).replace(".", ".<wbr>")}</code></th>'
        for name in names
    )
    rows = []
    for name, question in QUESTIONS.items():
        answers = [subject["answers"][name] for subject in others] + [shared_answer(ours, name)]
        cells = "".join(cell(*answer) for answer in answers)
        rows.append(
            f'<tr><th scope="row" title="{html.escape(question.asks)}">{name}</th>{cells}</tr>'
        )
    checks = table(("check", "question"), ((name, check.asks) for name, check in QUESTIONS.items()))
    body = "\n".join(rows)
    return (
        f'<div class="table-wrapper conventions" tabindex="0" role="region" '
        f'aria-label="Conventions">\n<table>\n'
        f"<thead><tr><th>check</th>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>\n</div>\n\n"
        f"{source(measurement)}\n\n{checks}\n"
    )


def cell(status: str, words: str) -> str:
    """A cell with the mark and the color of an answer."""
    mark = MARKS.get(status, "")
    text = mark if words == "—" else f"{mark} {words}".strip()
    return f'<td class="{status}">{html.escape(text)}</td>'


def shared_answer(subjects: list[dict], question: str) -> tuple[str, str]:
    """The answer of most subjects that support it, and each other one with the classes that answer
    so.
    """
    answers = [
        (subject["name"].partition(".")[2], *subject["answers"][question]) for subject in subjects
    ]
    supported = [answer for answer in answers if answer[1] != "absent"] or answers
    (usual, _), *rest = Counter(words for _, _, words in supported).most_common()
    texts = [usual]
    for words, _ in rest:
        classes = dict.fromkeys(name for name, _, other in supported if other == words)
        texts.append(f"{', '.join(classes)}: {words}")
    worst = next(
        (
            status
            for status in ("broken", "differs", "note")
            if status in {answer[1] for answer in supported}
        ),
        supported[0][1],
    )
    return worst, "; ".join(texts)


# ---- Diagnosis -----------------------------------------------------------------------------------

DARK = TerminalTheme(
    background=(13, 17, 23),
    foreground=(230, 237, 243),
    normal=[
        *((139, 148, 158), (255, 123, 114), (63, 185, 80), (210, 153, 34)),
        *((88, 166, 255), (188, 140, 255), (57, 197, 207), (230, 237, 243)),
    ],
)
"""Colors whose contrast with the background is above 4.5, in the light and in the dark site."""


def terminal() -> str:
    """A diagnosis as the terminal shows it."""
    problem, observed = searched_layer("kv-heads-tiled")
    console = Console(record=True, force_terminal=True, width=100, file=io.StringIO())
    print_diagnosis(parity.diagnose(observed, problem), console, is_right=False)
    shown = console.export_html(theme=DARK, inline_styles=True, code_format="{code}").rstrip()
    return (
        f'<pre class="terminal" tabindex="0" role="region" aria-label="A diagnosis in the '
        f'terminal">{shown}</pre>\n'
    )


def known_by_page() -> dict[str, set[str]]:
    """The names of the known bugs of a layer, by their page."""
    bugs_of_page: dict[str, set[str]] = {}
    for bugs in (PRECISIONS.values(), FIDELITIES.values(), *map(bugs_for, SELFTEST_CASES)):
        for bug in bugs:
            bugs_of_page.setdefault(bug.page, set()).add(bug.name)
    return bugs_of_page


def injected_bugs() -> str:
    """The bugs that the self-test injects, a row for each class, and how often they were detected
    and identified.
    """
    measurement = measured("selftest")
    counts = measurement["bugs"]
    rows = [("(no bug injected)", "", "", *counts[""])]
    for page, names in sorted(known_by_page().items()):
        for name in sorted(names & {*INJECTIONS}):
            rows.append((f"[{page}](../bugs/{page}.md)", len(names), f"`{name}`", *counts[name]))
    rows.append(
        (
            "all",
            sum(map(len, known_by_page().values())),
            len(INJECTIONS),
            *map(sum, zip(*counts.values(), strict=True)),
        )
    )
    heads = ("class", "known bugs", "injected bug", "runs", "detected", "identified")
    return f"{source(measurement)}\n\n{table(heads, rows)}\n"


RATES = {
    "correct ports": "rights",
    "reported as wrong": "false_alarms",
    "bugs": "bugs",
    "detected": "caught",
    "first wrong stage reported first": "first",
    "identified, with a page": "named",
    "… rightly, as one of several, wrongly": "graded",
    "identified, or its position or pattern found": "located",
    "**from the output alone:** bugs that change it": "output_bugs",
    "detected from the output": "output_caught",
    "identified from the output": "output_named",
    "… rightly, as one of several, wrongly, from the output": "output_graded",
    "identified, or its position or pattern found, from the output": "output_located",
}
"""Rows of the table of rates, and their names in the data."""


def diagnosis_rates() -> str:
    """The rates on independent code, a column for each half."""
    measurement = measured("diagnosis-rates")
    halves = measurement["halves"]
    rows = [
        (words, *(rate(halves[half], name) for half in halves)) for words, name in RATES.items()
    ]
    return f"{source(measurement)}\n\n{table(('', *(f'`{half}`' for half in halves)), rows)}\n"


def rate(half: dict, name: str) -> str:
    """A number of a half, with its share of the bugs."""
    value = half[name]
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if name.endswith(("bugs", "rights", "false_alarms")):
        return str(value)
    whole = half["output_bugs" if name.startswith("output") else "bugs"]
    return f"{value} ({100 * value / whole:.0f}%)"


# ---- Margins -------------------------------------------------------------------------------------


def margins() -> str:
    """How much of their budget correct implementations use, a row for each backend and dtype."""
    measurement = measured("margins")
    rows = [
        (
            row["backend"],
            row["dtype"],
            f"{row['stages']:,}",
            f"{row['half']:.2f}",
            f"{row['most']:.2f}",
            f"{row['worst']:.2f}",
            f"`{row['stage']}` of `{row['case']}`",
        )
        for row in measurement["rows"]
    ]
    heads = (
        "backend",
        "dtype",
        "stages",
        "half use at most",
        "99% use at most",
        "all use at most",
        "the worst",
    )
    count = len(measurement["cases"])
    return (
        f"{source(measurement)} It runs {count} cases. A stage counts as it ran, or its own step if "
        f"that uses more of its budget:\n\n"
        f"{table(heads, rows)}\n\n"
        f"Where the slope decides, stages use at most {measurement['slope']:.2f}.\n"
    )


# ---- Exercises -----------------------------------------------------------------------------------


def wrong_answers() -> str:
    """Typical wrong answers to each exercise of the notebooks, and what its check says to them."""
    from wrong_answers import WRONG_ANSWERS, exercises_of

    texts = []
    for notebook in WRONG_ANSWERS:
        page = (TUTORIALS / f"{notebook}.md").read_text("utf-8")
        title = re.findall("^# (.+)$", page, flags=re.MULTILINE)[0]
        texts.append(f"## {title}\n")
        for number, exercise in exercises_of(notebook).items():
            heading = f"{number}. {exercise.title}"
            anchor = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
            texts.append(f"**[{heading}]({notebook}.md#{anchor})**\n")
            rows = [
                (shown_answer(wrong_answer), shown_message(wrong_answer))
                for wrong_answer in exercise.wrong_answers
            ]
            answers = table(("wrong answer", "what the check says"), rows)
            texts.append(f"```{{table}}\n:class: wrong-answers\n{answers}\n```\n")
    return "\n".join(texts)


def shown_answer(wrong) -> str:
    """A wrong answer in words, with its code if that is one line."""
    if "\n" in wrong.by:
        return wrong.answer
    return f"{wrong.answer}: `{wrong.by}`"


def shown_message(wrong) -> str:
    """What a check says, with a link to the page of each bug."""
    pages = page_by_bug()
    lines = []
    for line in wrong.says.splitlines():
        title, mark, names = line.partition(": ")
        if title.startswith("Likely bug"):
            links = []
            for name in names.split(", "):
                page = pages.get(name, name)
                if not (BUGS / f"{page}.md").exists():
                    links.append(name)
                else:
                    links.append(f"[{name}](../bugs/{page}.md)")
            line = f"{title}{mark}{', '.join(links)}"
        lines.append(line.strip())
    return "<br>".join(lines)

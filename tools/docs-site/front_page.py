"""The picture at the top of README.md and of the site: a diagnosis in a light and a dark terminal.

    python tools/docs-site/front_page.py

draws the session of docs/how-to/own-layer.md, whose output a test compares with the command's, and
writes docs/_static/diagnosis-light.svg and -dark.svg. Another test compares these with the page.

rich can export SVG as well, but its pictures load their font from a server.
"""

import html
import re
import textwrap
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = DOCS / "how-to" / "own-layer.md"

COLUMNS = 72
FONT_SIZE, LINE_HEIGHT, MARGIN = 14, 21, 20
CHARACTER = 0.6 * FONT_SIZE
"""Width of a character, which holds for any font because each line states its length."""

FONT = "ui-monospace, SFMono-Regular, Menlo, Consolas, monospace"
TITLE = "The output of mha-parity diagnose"

THEMES = {
    "light": {
        "background": "#ffffff",
        "border": "#d0d7de",
        "text": "#1f2328",
        "prompt": "#656d76",
        "bug": "#b3261e",
    },
    "dark": {
        "background": "#0d1117",
        "border": "#30363d",
        "text": "#e6edf3",
        "prompt": "#8b949e",
        "bug": "#ff7b72",
    },
}
"""Colors of the two terminals."""


def session() -> list[str]:
    """The lines of the first session on the page: a command and its output."""
    match = re.search(
        r"^```\n(\$ mha-parity diagnose .*?)^```$", PAGE.read_text("utf-8"), re.M | re.S
    )
    if match is None:
        raise ValueError(f"{PAGE} must have a session of mha-parity diagnose")
    return match[1].splitlines()


def folded(line: str) -> list[str]:
    """A line as a terminal of this width shows it, with an indent after each break."""
    return textwrap.wrap(line, COLUMNS, subsequent_indent="    ", drop_whitespace=False) or [""]


def spans(line: str) -> list[tuple[str, str]]:
    """The parts of a line, each with its class: a bold label, a red bug, or text."""
    if line.startswith("$ "):
        return [("prompt", "$ "), ("bold", line[2:])]
    label, colon, text = line.partition(": ")
    if not colon or not re.fullmatch(r"[A-Z][a-z ]+", label):
        return [("text", line)]
    return [("bold", label + colon), ("bug" if label == "Likely bug" else "text", text)]


def terminal(lines: list[str], theme: str) -> str:
    """A terminal with these lines, as SVG."""
    shown = [part for line in lines for part in folded(line)]
    width = COLUMNS * CHARACTER + 2 * MARGIN
    height = len(shown) * LINE_HEIGHT + 2 * MARGIN
    colors = THEMES[theme]
    rows = []
    for i, line in enumerate(shown):
        y = MARGIN + (i + 0.75) * LINE_HEIGHT
        parts = "".join(
            f'<tspan class="{kind}">{html.escape(text)}</tspan>' for kind, text in spans(line)
        )
        length = f"{len(line) * CHARACTER:.1f}"
        rows.append(f'<text x="{MARGIN}" y="{y:.2f}" textLength="{length}">{parts}</text>')
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" xml:space="preserve" viewBox="0 0 {width:.0f} {height:.0f}" '
            f'width="{width:.0f}" height="{height:.0f}" role="img">',
            f"<title>{TITLE}</title>",
            "<style>",
            f"text {{ font: {FONT_SIZE}px {FONT}; fill: {colors['text']}; white-space: pre; }}",
            ".bold, .bug { font-weight: bold; }",
            f".prompt {{ fill: {colors['prompt']}; }}",
            f".bug {{ fill: {colors['bug']}; }}",
            "</style>",
            f'<rect x="0.5" y="0.5" width="{width - 1:.0f}" height="{height - 1:.0f}" rx="6" '
            f'fill="{colors["background"]}" stroke="{colors["border"]}"/>',
            *rows,
            "</svg>",
            "",
        ]
    )


def pictures() -> dict[Path, str]:
    """Both pictures, by their path."""
    lines = session()
    return {DOCS / "_static" / f"diagnosis-{theme}.svg": terminal(lines, theme) for theme in THEMES}


if __name__ == "__main__":
    for path, picture in pictures().items():
        path.write_text(picture, "utf-8")

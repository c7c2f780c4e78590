"""Fills a folder with the pages of the site, from which Sphinx builds it: what `make docs` runs
first.

    python tools/docs-site/stage.py FOLDER [PYTHON_TT]

The folder holds the pages of docs/, copies of pages that lie elsewhere in the repository, the
generated reference, parts and pictures, and a page for each file of the source that a page links
to. Links between them are adapted. PYTHON_TT is the Python that runs the notebook about TTNN.
Without it that notebook has no results, and says so.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

ELSEWHERE = {
    "CONTRIBUTING.md": "contributing/guide",
    "CHANGELOG.md": "contributing/changelog",
    "README.md": "README",
    "examples/README.md": "how-to/port",
    "benchmarks/README.md": "evidence/measure",
    "parity/measure/pretrained/PROVENANCE.md": "evidence/trained-layers",
    "tests/wild/README.md": "evidence/ports",
}
"""Pages of the repository outside of docs/, and their names in the site."""

REPLACED = {"docs/README.md": "index", "benchmarks/results": "evidence/benchmarks"}
"""Pages and folders that the site has in a different form."""

STYLE = ROOT / "docs" / "tutorials" / "site.mplstyle"
"""Colors of pictures, which fit the light and the dark site."""

OF_TT = DOCS / "tutorials" / "ttnn.md"
NOT_EXECUTED = """
:::{attention}
This notebook was not executed when the site was built, because there was no environment with ttnn. `make docs` executes
it if it finds CPython 3.12.
:::
"""

FENCE = re.compile(r"^(`{3,}|:{3,})[^\n]*\n.*?^\1$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<=\]\()([^()\s]+)(?=\))")
LANGUAGES = {".py": "python", ".toml": "toml", ".sh": "bash", ".json": "json", ".mjs": "javascript"}


def pages() -> dict[Path, str]:
    """Every page that is copied, and its name in the site."""
    names = {path: str(path.relative_to(DOCS).with_suffix("")) for path in DOCS.rglob("*.md")}
    names |= {path: f"bugs/{path.stem}" for path in (ROOT / "parity" / "bugs").glob("*.md")}
    names[ROOT / "parity" / "bugs" / "README.md"] = "bugs/index"
    names |= {ROOT / path: name for path, name in ELSEWHERE.items()}
    return names | {ROOT / path: name for path, name in REPLACED.items()}


class Site:
    """A folder of pages.

    Attributes:
        folder: where they are written.
        names: the name in the site of each page of the repository.
        viewed: files and folders of the source that pages link to.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names = pages()
        self.viewed: set[Path] = set()

    def write(self, name: str, text: str) -> None:
        """Write a page, or a part that a page includes; a name without a suffix is a page of
        Markdown.
        """
        path = self.folder / (name if name.endswith((".rst", ".inc")) else f"{name}.md")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")

    def copy(self, source: Path) -> None:
        """Copy a page, with links that lead to other pages of the site."""
        name, text = self.names[source], source.read_text("utf-8")
        parts, end = [], 0
        for fence in FENCE.finditer(text):
            parts += [self._linked(text[end : fence.start()], source, name), fence[0]]
            end = fence.end()
        self.write(name, "".join([*parts, self._linked(text[end:], source, name)]))

    def _linked(self, text: str, source: Path, name: str) -> str:
        return LINK.sub(lambda link: self._target(link[0], source, name), text)

    def _target(self, link: str, source: Path, name: str) -> str:
        """Return the link of a page, or where it leads in the site."""
        target, mark, anchor = link.partition("#")
        path = (source.parent / target).resolve()
        if ":" in link or not target or path.suffix in {".png", ".svg"} or not path.exists():
            return link
        if path not in self.names:
            self.viewed.add(path)
        target = self.names.get(path) or view_of(path)
        if str(path.relative_to(ROOT)) in REPLACED:
            mark = anchor = ""
        return f"{os.path.relpath(target, Path(name).parent)}.md{mark}{anchor}"

    def view(self, path: Path) -> None:
        """Write the page of a file of the source, or of a folder: the list of its files."""
        name = view_of(path)
        # A search for a word should find pages about it, not sources with it.
        head = f"---\norphan: true\nnosearch: true\n---\n\n# {path.relative_to(ROOT)}\n\n"
        if path.is_file():
            language = LANGUAGES.get(path.suffix, "text")
            self.write(name, f"{head}`````{language}\n{path.read_text('utf-8').rstrip()}\n`````\n")
            return
        files = sorted(
            file for file in path.iterdir() if file.suffix in {".py", ".txt", ".md", ".json"}
        )
        for file in files:
            self.view(file)
        links = [
            f"- [{file.name}]({os.path.relpath(view_of(file), Path(name).parent)}.md)"
            for file in files
        ]
        self.write(name, head + "\n".join(links) + "\n")


def view_of(path: Path) -> str:
    """The name of the page that shows a file of the source."""
    return f"source/{path.relative_to(ROOT)}"


def table_of_tools(folder: Path) -> str:
    """The table of a staged page, with links as they lead from the first page of the site."""
    page = (folder / "how-to" / "which-tool.md").read_text("utf-8")
    rows = [line for line in page.splitlines() if line.startswith("|")]
    return LINK.sub(lambda link: os.path.normpath(f"how-to/{link[0]}"), "\n".join(rows)) + "\n"


SEND_AT_ONCE = "import sys; sys.stdout.flush_interval = 600"
"""A kernel sends what a cell prints every 0.2 seconds, and myst-nb begins a new line at each part:
within a line, if a cell prints it slowly.
"""


def write_kernel(folder: Path, name: str, python: Path) -> None:
    """Write a kernel of notebooks next to the pages.

    Without these settings, pages and the output of the build would have logs or not, depending on
    when they arrive.
    """
    kernel = folder.with_name("jupyter") / "kernels" / name / "kernel.json"
    kernel.parent.mkdir(parents=True, exist_ok=True)
    command = [
        str(python.absolute()),
        "-m",
        "ipykernel_launcher",
        "--log-level=ERROR",
        f"--IPKernelApp.exec_lines={SEND_AT_ONCE}",
        "-f",
        "{connection_file}",
    ]
    content = {
        "argv": command,
        "display_name": name,
        "language": "python",
        "env": {"TT_METAL_LOGGER_LEVEL": "off", "MATPLOTLIBRC": str(STYLE)},
    }
    kernel.write_text(json.dumps(content), "utf-8")


def can_run_tt(python: Path) -> bool:
    """Return if a Python can run the notebook about TTNN."""
    command = [str(python), "-c", "import ipykernel, matplotlib, ttnn"]
    return python.exists() and subprocess.run(command, capture_output=True).returncode == 0


def main(folder: Path, python_tt: Path | None = None) -> None:
    """Fill the folder, which is emptied first."""
    import measurements
    import reference
    from parts import parts
    from pictures import pictures

    for target in (folder, folder.with_name("jupyter")):
        shutil.rmtree(target, ignore_errors=True)
    site = Site(folder)
    for source in site.names:
        if str(source.relative_to(ROOT)) not in REPLACED:
            site.copy(source)
    bugs = folder / "bugs" / "index.md"
    bugs.write_text(
        f"{bugs.read_text('utf-8')}\n```{{toctree}}\n:hidden:\n:glob:\n\n*\n```\n", "utf-8"
    )
    for picture in [*DOCS.rglob("*.png"), *DOCS.rglob("*.svg")]:
        copied = folder / picture.relative_to(DOCS)
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(picture, copied)
    write_kernel(folder, "python3", Path(sys.executable))
    if python_tt is not None and can_run_tt(python_tt):
        write_kernel(folder, "ttnn", python_tt)
    else:
        print(
            "docs: LEFT OUT, the results of the notebook about TTNN: no environment with ttnn "
            "and ipykernel"
        )
        copied = folder / OF_TT.relative_to(DOCS)
        head, title, rest = re.split(
            r"^(# .*\n)", copied.read_text("utf-8"), maxsplit=1, flags=re.MULTILINE
        )
        copied.write_text(f"{head}{title}{NOT_EXECUTED}{rest}", "utf-8")
    for path in sorted(site.viewed):
        site.view(path)
    for name, text in {**reference.pages(), **measurements.pages()}.items():
        site.write(name, text)
    for name, text in reference.endings().items():
        path = folder / f"{name}.md"
        path.write_text(f"{path.read_text('utf-8')}\n{text}", "utf-8")
    for name, text in {**parts(), "which-tool": table_of_tools(folder)}.items():
        site.write(f"parts/{name}", text)
    for name, picture in pictures().items():
        path = folder / "pictures" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(picture)


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    main(*map(Path, sys.argv[1:]))

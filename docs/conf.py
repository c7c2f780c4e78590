"""Settings of the site, for Sphinx. `make docs` builds it from the folder that
tools/docs-site/stage.py fills.
"""

import logging
import os
import re
import sys
import tomllib
from pathlib import Path

from docutils import nodes
from sphinx.addnodes import download_reference

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools" / "docs-site")]

import absent_ttnn  # noqa: E402

absent_ttnn.install()

KERNELS = ROOT / "build" / "docs" / "jupyter"

project = "mha-parity"
author = "the authors of mha-parity"
copyright = author
release = version = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"][
    "version"
]

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["README.md", "parts"]
suppress_warnings = ["misc.highlighting_failure"]  # … stands for code that is left out
highlight_language = "text"  # a block without a language is a command or its output
smartquotes = False  # options and quoted patterns are copied into a shell

# ---- Pages ---------------------------------------------------------------------------------------

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4

nb_execution_mode = "force"  # the library changes, and a cache would not notice
nb_execution_timeout = 180  # of a cell
nb_execution_raise_on_error = True
nb_merge_streams = True  # or lines that a cell prints slowly are in boxes of their own
nb_execution_excludepatterns = (
    [] if (KERNELS / "kernels" / "ttnn").exists() else ["tutorials/ttnn.md"]
)
os.environ["JUPYTER_PATH"] = str(KERNELS)
logging.getLogger("traitlets").setLevel(logging.WARNING)  # or each notebook is announced


def add_download(app, doctree) -> None:
    """Link a notebook below its title. A link in the page's text would be in the downloaded
    notebook also.
    """
    path = Path(app.env.mystnb_config.output_folder, f"{app.env.docname}.ipynb")
    if path.exists():
        link = download_reference(reftarget=f"/{os.path.relpath(path, app.srcdir)}")
        link += nodes.inline(text="Download this notebook with its results")
        title = next(doctree.findall(nodes.title))
        title.parent.insert(1, nodes.paragraph("", "", link))


def add_dashes(app, doctree) -> None:
    """Show a dash between an argument and its meaning, where Sphinx writes two hyphens."""
    for text in list(doctree.findall(nodes.Text)):
        if text == " -- ":
            text.parent.replace(text, nodes.Text(" – "))


def print_seconds(app, env) -> None:
    """Print how long each notebook ran."""
    for name, found in sorted(env.nb_metadata.items()):
        if "exec_data" in found:
            print(f"docs: {name} ran in {found['exec_data']['runtime']:.1f} s")


# ---- Docstrings ----------------------------------------------------------------------------------

nitpick_ignore_regex = [
    ("py:class", ".*")
]  # types of other libraries, and of modules that are not public
default_role = "literal"  # one backtick, as in Markdown
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # docstrings have shapes and dtypes
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Attributes", "params_style")]  # a line may have several names
napoleon_use_rtype = False


def as_restructured_text(app, what, name, obj, options, lines) -> None:
    """Adapt a docstring, before napoleon reads it."""
    for i, (line, blank, code) in enumerate(zip(lines, lines[1:], lines[2:], strict=False)):
        if (
            line.endswith(":")
            and not blank
            and code.startswith("    ")
            and not line.startswith(" ")
        ):
            lines[i] += ":"  # the block of code that follows is indented
    if what == "class" and name.rpartition(".")[2].startswith("MultiHead"):
        # The base class has no page of its own.
        text = re.sub(r"see\s+`AttentionLayer`", "see the table below", "\n".join(lines))
        lines[:] = text.splitlines()
    if what in {"attribute", "property", "data"}:
        lines.insert(0, "")  # or the words before a colon in the first line would be its type


def setup(app) -> None:
    """Sphinx calls this."""
    app.connect("doctree-read", add_download, priority=100)  # before downloads are collected
    app.connect("doctree-read", add_dashes)
    app.connect("env-updated", print_seconds)
    app.connect("autodoc-process-docstring", as_restructured_text, priority=1)


# ---- Appearance ----------------------------------------------------------------------------------

html_theme = "furo"
pygments_dark_style = "a11y-high-contrast-dark"  # the theme's own underlines modules like links
html_title = f"{project} {release}"
html_static_path = [str(Path(__file__).parent / "_static")]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_search_scorer = str(Path(__file__).parent / "search-scorer.js")
html_copy_source = False
html_show_sphinx = False
copybutton_prompt_text = "$ "
copybutton_only_copy_prompt_lines = False

"""The generated pages of the reference: public names, commands, families, layouts, cases, bugs,
fields and support.
"""

import argparse
import importlib
import importlib.util
import inspect
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import absent_ttnn
from support import ARGUMENTS, FEATURES, NO_ARGUMENT, PATHS, YES, Feature, recorded

import mha_spec

PACKAGES = {
    "parity": "Compares, converts and diagnoses attention layers.",
    "mha_spec": "The specification of a layer, shared by all implementations.",
    "mha_torch": "Multi-head attention in PyTorch.",
    "mha_jax": "Multi-head attention in JAX and Flax.",
    "mha_tt": "Multi-head attention in TTNN.",
    "ttnn_mock": "TTNN without hardware, for any TTNN code.",
}


def pages() -> dict[str, str]:
    """The text of every generated page, by its name in the site."""
    absent_ttnn.install()
    return {
        **api_pages(),
        **command_pages(),
        "reference/families": families_page(),
        "reference/layouts": layouts_page(),
        "reference/cases": cases_page(),
        "reference/bugs": bugs_page(),
        "reference/schemas": schemas_page(),
        "reference/attention-spec": attention_spec_page(),
        "reference/support-matrix": support_page({name: recorded(name) for name in NAMES}),
    }


def endings() -> dict[str, str]:
    """Tables at the end of pages that are written by hand, by the name of the page in the site."""
    return {"evidence/ttnn-cases": simulated_tables()}


def table(head: tuple[str, ...], rows: Iterable[tuple[object, ...]]) -> str:
    """A table of Markdown."""
    lines = [
        " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in row) for row in rows
    ]
    return "\n".join(
        f"| {line} |" for line in (" | ".join(head), " | ".join("---" for _ in head), *lines)
    )


def toctree(names: Iterable[str]) -> str:
    """A list of pages for the sidebar, which the page itself does not show."""
    return "\n".join(["```{toctree}", ":hidden:", "", *names, "```"])


# ---- Public names --------------------------------------------------------------------------------


RESULTS = (
    "parity.measure.core.problem.Problem",
    "parity.measure.core.compare.Comparison",
    "parity.use.running.report.Report",
    "parity.explain.diagnosis.ranks.RankDiagnosis",
    "parity.explain.diagnosis.taps.TapVerdict",
    "parity.explain.diagnosis.tap_pairs.TapDifference",
    "parity.explain.identification.Identification",
    "parity.explain.identification.layers.LiveLayer",
    "parity.explain.conformance.answers.Conformance",
    "parity.explain.diagnosis.weights.differences.WeightsComparison",
    "parity.port.conversion.layouts.layout.Layout",
    "parity.port.models.specs.ModelLayer",
    "parity.port.tapping.record.Tapped",
)
"""Classes that public functions return. Nobody has to import them, so they have no public names."""


def api_pages() -> dict[str, str]:
    """A page for each package, of its public names by the module that defines them."""
    index = [
        "# Public names",
        "Whatever is not listed here may change from one version to the next.",
        "`mha_torch`, `mha_jax` and `mha_tt` have the same names, with the same meaning.",
        table(
            ("package", "content"),
            ((f"[`{name}`]({name}.rst)", about) for name, about in PACKAGES.items()),
        ),
        toctree(PACKAGES),
    ]
    return {
        "reference/api/index": "\n\n".join(index) + "\n",
        **{f"reference/api/{name}.rst": api_page(name, about) for name, about in PACKAGES.items()},
    }


def api_page(package: str, about: str) -> str:
    """The page of a package, in reStructuredText."""
    module = importlib.import_module(package)
    parts = [title(package, "="), about]
    for name in (each for each in module.__all__ if not inspect.ismodule(getattr(module, each))):
        home = getattr(getattr(module, name), "__module__", package).partition(".")[0]
        parts.append(
            entry(module, name)
            if home == package or home not in PACKAGES
            else alias(home, package, name)
        )
    if package == "parity":
        parts += [title("Results", "-"), "Classes that these functions return."]
        parts += [f".. autoclass:: {path}\n   :members:" for path in RESULTS]
    for name in (each for each in module.__all__ if inspect.ismodule(getattr(module, each))):
        parts += [title(f"{package}.{name}", "-"), *entries(getattr(module, name))]
    if importlib.util.find_spec(f"{package}.parallel"):
        parts += [
            title(f"{package}.parallel", "-"),
            *entries(importlib.import_module(f"{package}.parallel")),
        ]
    return "\n\n".join(parts) + "\n"


def entries(module: ModuleType) -> Iterator[str]:
    """The docstring of a module, and its public functions and classes."""
    yield f".. automodule:: {module.__name__}\n   :no-members:"
    for name in getattr(
        module, "__all__", [name for name in vars(module) if not name.startswith("_")]
    ):
        value = getattr(module, name)
        if getattr(value, "__module__", "").startswith(module.__name__) and callable(value):
            yield entry(module, name)


def title(text: str, line: str) -> str:
    """A heading."""
    return f"{text}\n{line * len(text)}"


def entry(module: ModuleType, name: str) -> str:
    """The directive that documents a public name."""
    value = getattr(module, name)
    if inspect.isclass(value):
        return f".. autoclass:: {module.__name__}.{name}\n   :members:"
    if callable(value):
        return f".. autofunction:: {module.__name__}.{name}"
    about = "\n".join(f"   {line}" for line in docstring_of(module, name))
    return f".. py:data:: {module.__name__}.{name}\n\n{about}"


def alias(home: str, package: str, name: str) -> str:
    """The line of a name of another package."""
    return f"`{package}.{name}` is :py:obj:`{home}.{name}`."


def docstring_of(module: ModuleType, name: str) -> list[str]:
    """The text below the definition of a table, in the first module of the package that defines
    it.
    """
    from sphinx.pycode import ModuleAnalyzer

    for path in (
        "parity.measure.core.cases",
        "parity.measure.core.stages",
        "parity.port.conversion.layouts.tables",
        "ttnn_mock.boards",
        module.__name__,
    ):
        documented = ModuleAnalyzer.for_module(path).find_attr_docs()
        if ("", name) in documented:
            return documented["", name]
    raise ValueError(f"{name} must have a docstring below it")


# ---- Commands ------------------------------------------------------------------------------------


def command_pages() -> dict[str, str]:
    """A page for each command, and their list."""
    from parity.use.cli.main import COMMANDS, GROUPS, command_named, make_parser

    (commands,) = (
        action
        for action in make_parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    rows, names = [], []
    for group, members in GROUPS.items():
        rows.append((f"**{group.capitalize()}**", ""))
        for name in (each for each in members if each in COMMANDS):
            rows.append((f"[`{name}`]({name}.md)", command_named(name).PAGE.line))
            names.append(name)
    more = "[Exit statuses and common options](../commands.md) hold for all of them."
    index = ["# Commands", table(("command", "result"), rows), more, toctree(names)]
    return {
        "reference/cli/index": "\n\n".join(index) + "\n",
        **{
            f"reference/cli/{name}": command_page(
                name, command_named(name).PAGE, commands.choices[name]
            )
            for name in names
        },
    }


def command_page(name: str, page, parser: argparse.ArgumentParser) -> str:
    """The page of a command: what its `--help` prints."""
    first, *rest = parser.format_usage().removeprefix("usage: ").splitlines()
    usage = "\n".join([first, *(f"    {line.strip()}" for line in rest)])
    parts = [
        f"# {name}",
        page.about,
        f"```text\n{usage.rstrip()}\n```",
        f"Example:\n\n```text\n{page.example}\n```",
    ]
    if page.forms:
        parts += [
            "## Forms",
            table(
                ("arguments", "meaning"), ((f"`{form}`", meaning) for form, meaning in page.forms)
            ),
        ]
    for group in sorted(
        parser._action_groups, key=lambda group: group.title == "options"
    ):  # which all commands have
        shown = [action for action in group._group_actions if action.help != argparse.SUPPRESS]
        if shown and group.title:
            rows = [(f"`{invocation(action)}`", action.help or "") for action in shown]
            parts += [f"## {group.title.capitalize()}", table(("option", "meaning"), rows)]
    wrong = f"\n- 1: {page.wrong}" if page.wrong else ""
    parts.append(
        f"## Exit status\n\n- 0: {page.well}{wrong}\n- 2: bad usage, or something is missing"
    )
    return "\n\n".join(parts) + "\n"


def invocation(action: argparse.Action) -> str:
    """An option as it is typed."""
    value = action.metavar or (
        "{" + ",".join(map(str, action.choices)) + "}" if action.choices else action.dest
    )
    value = " ".join(value) if isinstance(value, tuple) else value
    if not action.option_strings:
        return str(value)
    return ", ".join(action.option_strings) + ("" if action.nargs == 0 else f" {value}")


# ---- Tables --------------------------------------------------------------------------------------


BY_CONFIG = "by the configuration"


def families_page() -> str:
    """Every `model_type` of transformers: its stacks of layers, or why it is not read."""
    from parity.port.models.families import FAMILIES
    from parity.port.models.families.not_covered import NOT_COVERED

    rows = []
    for name, family in sorted(FAMILIES.items()):
        for stack in family.stacks:
            causal = (
                {True: "yes", False: "no"}[stack.is_causal]
                if isinstance(stack.is_causal, bool)
                else BY_CONFIG
            )
            path = f"`{stack.path}`" if isinstance(stack.path, str) else BY_CONFIG
            layout = f"`{stack.layout}`" if isinstance(stack.layout, str) else BY_CONFIG
            rows.append((f"`{name}`", stack.part, causal, path, layout))
    others = [(f"`{name}`", reason) for name, reason in sorted(NOT_COVERED.items())]
    return "\n\n".join(
        [
            "# Families of models",
            f"`mha-parity spec` and `parity.specs_of` read {len(FAMILIES)} families, by the "
            f"`model_type` of a "
            "config.json. [Read a model's configuration](../how-to/configurations.md) explains "
            "how.",
            table(("family", "part", "causal", "path of a layer", "layout"), rows),
            "## Families that are not read",
            table(("family", "its attention"), others) + "\n",
        ]
    )


def layouts_page() -> str:
    """Every layout and its tensors."""
    from parity.port.conversion.layouts import LAYOUTS

    rows = [(f"[`{name}`](#{anchor(name)})", layout.about) for name, layout in LAYOUTS.items()]
    parts = [
        "# Layouts of weights",
        "A layout describes the names, axes and packing of one layer's tensors in a checkpoint. "
        "Axes are outermost "
        "first: n heads, h features of a head, d input width, e output width.",
        table(("layout", "tensors and libraries"), rows),
    ]
    for name, layout in LAYOUTS.items():
        tensors = dict.fromkeys(tensor for form in layout.forms for tensor in form)
        tensors |= dict.fromkeys(layout.others)
        rows = [
            (f"`{each.name}`", f"`{each.holds}`", each.kind, f"`{each.axes}`") for each in tensors
        ]
        parts += [
            f"## {name}",
            f"{layout.about}.",
            table(("tensor", "holds", "kind", "axes"), rows),
        ]
    return "\n\n".join(parts) + "\n"


def anchor(heading: str) -> str:
    """The anchor of a heading."""
    return "".join(
        letter for letter in heading.lower() if letter.isalnum() or letter in "-_ "
    ).replace(" ", "-")


def cases_page() -> str:
    """Every test case."""
    from parity.measure.core.cases import CASES
    from parity.use.reporting.cases import covers

    rows = [(f"`{name}`", case.about, covers(case)) for name, case in CASES.items()]
    about = (
        f"`mha-parity run --cases all` runs these {len(CASES)} cases; without `--cases` it runs "
        f"each feature once."
    )
    return (
        "\n\n".join(
            ["# Test cases", about, table(("case", "feature that fails with it", "covers"), rows)]
        )
        + "\n"
    )


def bugs_page() -> str:
    """Every known bug, by its page."""
    from parity.explain.diagnosis.bugs import bug_by_name

    by_page = {}
    for name, bug in bug_by_name().items():
        by_page.setdefault(bug.page, []).append(
            (f"`{name}`", ", ".join(f"`{stage}`" for stage in bug.stages), bug)
        )
    rows = [
        (f"[{page}](../bugs/{page}.md)", name, stages, bug.about, bug.fix)
        for page, bugs in by_page.items()
        for name, stages, bug in bugs
    ]
    return "\n\n".join(
        [
            "# Diagnosis table",
            f"`mha-parity diagnose` can inject {len(rows)} bugs into the reference. A result "
            f"that the reference with a "
            "bug reproduces is explained by that bug. The stage is the first one that can differ.",
            table(
                ("class", "bug", "first stage", "the result matches the reference if", "fix"), rows
            )
            + "\n",
        ]
    )


# ---- A simulated card ----------------------------------------------------------------------------

DTYPES = ("bfloat16", "float32")


def simulated() -> dict[str, Any]:
    """The shares of the budget that a simulator showed."""
    path = Path(__file__).parents[2] / "benchmarks" / "simulated-blackhole.json"
    return json.loads(path.read_text("utf-8"))


def simulated_tables() -> str:
    """Shares of the budget in a simulator: of every case, of other shapes, and of other
    settings.
    """
    from parity.measure.core.cases import CASES

    shown = simulated()

    def cells(shares: dict[str, float | None]) -> list[str]:
        return [share_text(shares[dtype]) if dtype in shares else "" for dtype in DTYPES]

    cases = [(f"`{name}`", *cells(shares)) for name, shares in shown["cases"].items()]
    possible = [name for name, case in CASES.items() if case.dtype != "float16"]
    not_run = [f"`{name}`" for name in possible if name not in shown["cases"]]
    shapes = [
        (each["shape"], *cells(each["prompt"]), *cells(each["steps"])) for each in shown["shapes"]
    ]
    settings = [
        (
            f"`{each['case']}`",
            each["setting"],
            f"{each['error']:.4f}",
            share_text(each["accurate"]),
            share_text(each["own"]) if each["own"] else "",
        )
        for each in shown["settings"]
    ]
    return "\n\n".join(
        [
            f":::{{dropdown}} {len(cases)} cases",
            table(("case", *DTYPES), cases),
            ":::",
            *(
                [f"These {len(not_run)} cases have not run in the simulator: {', '.join(not_run)}."]
                if not_run
                else []
            ),
            "## Other shapes",
            "Shapes that no case has: a prompt, and a prompt with two steps.",
            table(("shape", *DTYPES, *(f"steps, {dtype}" for dtype in DTYPES)), shapes),
            "## Lower fidelities",
            "Whole layers with other settings and float32 sums: relative L2 error of the output, "
            "its share of the "
            "budget of `accurate_config`, and of the setting's own. LoFi has no budget. For "
            "`decode`, a prompt and "
            "three steps, these are the worst outputs.",
            table(("case", "setting", "relative L2", "share", "share of its own"), settings) + "\n",
        ]
    )


def share_text(share: float | None) -> str:
    """A share of the budget, bold beyond the limit."""
    if share is None:
        return "**beyond**"
    return f"{share:.2f}" if share <= 1 else f"**{share:.2f}**"


# ---- Files for other programs --------------------------------------------------------------------


def schemas_page() -> str:
    """The keys of JSON, of the metadata of files, and the elements of JUnit XML."""
    from parity.measure.core.weights import FORMAT
    from parity.use.reporting.schemas import FILES, JUNIT, SCHEMAS, meanings_of

    parts = [
        "# Schemas",
        "## JSON of a command",
        "`--json PATH` writes one object. `schema` and `version` are its first keys. The version "
        "increases if a key "
        "appears, disappears or changes its meaning, so check both before you read the rest. "
        "Infinity and NaN are "
        "null. `pytest --parity-report PATH.json` writes the schema of `run`.",
        f'```json\n{{"schema": "mha-parity/run", "version": {SCHEMAS["run"].version}, '
        f'"environment": {{…}}, …}}\n```',
    ]
    for command, schema in SCHEMAS.items():
        name = f"{command}-{schema.version}.json"
        parts.append(
            f"### {command}\n\n`mha-parity/{command}`, version {schema.version}: "
            f"JSON Schema `docs/data/schemas/{name}` in the repository"
        )
        for form, record in schema.forms.items():
            parts += [f"With {form}:"] if form else []
            parts.append(
                table(
                    ("key", "value"),
                    ((f"`{key}`", about) for key, about in meanings_of(record).items()),
                )
            )
    parts += [
        "## Metadata of files",
        "mha-parity's own files are safetensors files with text in their metadata. Readers "
        "reject another `format` "
        f"than {FORMAT}. Converted checkpoints have the names of their layout, and `mha_parity` "
        f"is their format.",
    ]
    for kind, keys in FILES.items():
        rows = ((f"`{name}`", about) for name, about in keys.items())
        parts += [f"### {kind.capitalize()}", table(("key", "value"), rows)]
    rows = ((f"`{tag}`", ", ".join(f"`{name}`" for name in names)) for tag, names in JUNIT.items())
    parts += [
        "## JUnit XML",
        "`--junit PATH` and `pytest --parity-report PATH.xml` write a suite for each backend and "
        "dtype, with a test "
        "for each case.",
        table(("element", "attributes"), rows),
    ]
    return "\n\n".join(parts) + "\n"


# ---- Fields and their support --------------------------------------------------------------------

MODELS = Path(__file__).resolve().parents[2] / "docs" / "reference" / "models.md"
MOST_MODELS = 4


def attention_spec_page() -> str:
    """Every field of `AttentionSpec` and its parts: default and meaning; and models with it."""
    spec, models = mha_spec.AttentionSpec, models_by_field()
    told = [
        (*row, ", ".join(models.get(row[0].strip("`"), [])[:MOST_MODELS]) or "—")
        for row in rows_of(spec)
    ]
    parts = [
        "# Fields of `AttentionSpec`",
        "[Formula and shapes](../explanation/attention.md) has the letters, the [support "
        "matrix](support-matrix.md) "
        f"frameworks and paths. At most {MOST_MODELS} models of transformers are named; "
        f"[all](models.md).",
        table(("field", "default", "meaning", "models"), told),
    ]
    for name in mha_spec.__all__:
        record: Any = getattr(mha_spec, name)
        if is_dataclass(record) and record is not spec and meanings_of(record):
            about = str(inspect.getdoc(record)).partition("\n\nAttributes:")[0]
            parts += [f"## {name}", about, table(("field", "default", "meaning"), rows_of(record))]
    return "\n\n".join(parts) + "\n"


DERIVED = ("num_kv_heads", "head_dim", "d_in", "d_kv", "value_head_dim")
"""Fields whose default depends on others."""


def rows_of(record: Any) -> Iterator[tuple[str, str, str]]:
    """Each field of a record, its default and its meaning."""
    meanings = meanings_of(record)
    for field in (each for each in fields(record) if each.init):
        default = "—" if field.default is MISSING else f"`{field.default!r}`"
        yield (
            f"`{field.name}`",
            "derived" if field.name in DERIVED else default,
            meanings[field.name],
        )


def meanings_of(record: Any) -> dict[str, str]:
    """The lines about each attribute in the docstring of a class."""
    _, _, text = (inspect.getdoc(record) or "").partition("Attributes:\n")
    entries = re.findall(
        r"^    ([\w, ]+): (.*(?:\n {8}.*)*)", text.partition("\n\n")[0], re.MULTILINE
    )
    return {name: " ".join(words.split()) for names, words in entries for name in names.split(", ")}


def models_by_field() -> dict[str, list[str]]:
    """The transformers models of models.md with each field, each model once."""
    found: dict[str, list[str]] = {}
    rows = re.findall(
        r"^\| .+? \| `(\w+)`, .+? \| `(.*)` \|$", MODELS.read_text("utf-8"), re.MULTILINE
    )
    for family, shown in rows:
        text = shown
        while (outer := re.sub(r"\([^()]*\)", "", text)) != text:  # without the fields of parts
            text = outer
        for name in re.findall(r"(\w+)=", text):
            known = found.setdefault(name, [])
            if family not in known:
                known.append(family)
    return found


NAMES = {"jax": "JAX", "torch": "PyTorch", "tt": "TTNN"}
COLUMNS = ("with weights", "without weights", "cache", "divided heads", "divided tokens")
"""Heads of the columns of `PATHS`."""

ABOUT = """\
Each cell names the frameworks that ran a small layer with the feature. A number leads to the error of one that rejected
it. "—": calls of this kind have no such argument. TTNN cannot divide tokens.

JAX is traced, as under `jax.jit`. Heads and tokens are divided over two devices. Answers are recorded by
`tools/docs-site/support.py`, and tests compare them with the layers."""

KERNELS = """\
Without attention weights a layer chooses a kernel. "plain" means that it computes the definition, which stores all
scores. A feature that is not in the table has a kernel everywhere."""


def support_page(found: dict[str, dict[str, dict[str, str]]]) -> str:
    """Features by framework and path, from the answers of each framework."""
    notes: dict[str, int] = {}

    def rows(features: list[Feature]) -> Iterator[tuple[str, ...]]:
        for feature in features:
            by_path = (
                {name: answers[feature.key][path] for name, answers in found.items()}
                for path in PATHS
            )
            yield feature.title, *(cell(answers, notes) for answers in by_path)

    def kernels() -> Iterator[tuple[str, ...]]:
        for feature in (*FEATURES, *ARGUMENTS):
            chosen = [answers[feature.key].get(name, "—") for answers, name in columns]
            if "plain" in chosen:
                yield feature.title, *chosen

    columns = [
        (answers, name)
        for answers in found.values()
        for name in answers[FEATURES[0].key]
        if name not in PATHS
    ]
    parts = ["# Support matrix", ABOUT]
    parts += ["## Fields of `AttentionSpec`", table(("feature", *COLUMNS), rows(FEATURES))]
    parts += ["## Arguments and dtypes", table(("argument", *COLUMNS), rows(ARGUMENTS))]
    parts += ["## Kernels", KERNELS, table(("feature", *(name for _, name in columns)), kernels())]
    return (
        "\n\n".join([*parts, *(f"[^{number}]: {note}." for note, number in notes.items())]) + "\n"
    )


def cell(answers: Mapping[str, str], notes: dict[str, int]) -> str:
    """The frameworks that support a feature on a path, and the numbers of the notes about
    others.
    """
    supported = [NAMES[name] for name, answer in answers.items() if answer == YES]
    refused: dict[str, list[str]] = {}
    for name, answer in answers.items():
        if answer not in (YES, NO_ARGUMENT):
            refused.setdefault(answer, []).append(NAMES[name])
    told = [f"{', '.join(names)}: {rule}" for rule, names in refused.items()]
    numbers = "".join(f" [^{notes.setdefault(note, len(notes) + 1)}]" for note in told)
    return ("all" if len(supported) == len(answers) else ", ".join(supported) or "—") + numbers

"""The house stands: who may import whom, and how large a module, a function, a signature may grow.

The packages are read as source. An import counts wherever it stands: at the top, in a function, under `TYPE_CHECKING`,
or as a module's whole name in a string, for `importlib`.
"""

import ast
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# ---- The plan of the house -------------------------------------------------------------------------------------------

PACKAGES = [["mha_spec"], ["mha_jax", "mha_torch", "mha_tt"], ["parity"], ["parity_lab"]]
"""From the bottom. Arrows point downward only; those of one line know nothing of each other. The last one is in
no wheel: `parity.cli.clone` looks for its commands by their names."""

ROOMS = [
    ["text"],
    ["files", "pretrained"],
    ["core"],
    ["sharding"],
    ["models"],
    ["tapping"],
    ["backends"],
    ["conversion"],
    ["foreign"],
    ["diagnosis"],
    ["running"],
    ["conformance"],
    ["mutating"],
    ["reporting"],
    ["testing"],
    ["cli"],
    ["", "__main__"],
]
"""The same within `parity`, whose own `__init__.py` is the door, "": nothing inside may come in through it, and what
stands in its list of public names, `__init__.pyi`, is no arrow."""

DOOR = "parity"

MOST_LINES = {"module": 500, "function": 60}  # of a function's body, without its docstring
MOST_PARAMETERS = 10

LONG: dict[str, str] = {}
"""What may be longer than that, and why."""

NOT_YET: dict[str, set[str]] = {
    "no circles": set(),
    "arrows point downward": set(),
    "not too long": set(),
    "few parameters": set(),
    "private names stay at home": set(),
    "one class of a name": {"Law", "Layer", "Ranks"},
}
"""What breaks a rule until it is mended; a line that is mended, or that something else breaks now, must go."""


# ---- Reading it ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Module:
    """A module as source."""

    name: str
    source: str
    is_package: bool

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source)


House = dict[str, Module]
Arrow = tuple[str, str]


@cache
def read_house(root: Path) -> House:
    """Every module of the packages in a folder, by its dotted name."""
    house = {}
    for package in (name for line in PACKAGES for name in line):
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            is_package = parts[-1] == "__init__"
            name = ".".join(parts[:-1] if is_package else parts)
            house[name] = Module(name, path.read_text(), is_package)
    return house


def imports(house: House, module: Module) -> Iterator[tuple[str, str, str]]:
    """What a module imports of the house: the module, what of it ("" for itself), and under which name."""
    package = module.name if module.is_package else module.name.rpartition(".")[0]
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if target := _module_of(house, alias.name):
                    yield target, "", alias.asname or alias.name
        elif isinstance(node, ast.ImportFrom):
            above = package.rsplit(".", node.level - 1)[0] if node.level else ""
            origin = ".".join(filter(None, [above, node.module]))
            for alias in node.names:
                bound = alias.asname or alias.name
                if (whole := f"{origin}.{alias.name}") in house:
                    yield whole, "", bound
                elif origin in house:
                    yield origin, alias.name, bound
        elif isinstance(node, ast.Constant) and "." in str(node.value) and node.value in house:
            yield str(node.value), "", str(node.value)


def _module_of(house: House, name: str) -> str:
    """The module of the house that `import name` is about; nothing if it is of none."""
    while name and name not in house:
        name = name.rpartition(".")[0]
    return name


def arrows(house: House) -> list[Arrow]:
    """Who imports whom."""
    return sorted(
        {
            (module.name, target)
            for module in house.values()
            if module.name != DOOR
            for target, _, _ in imports(house, module)
            if target != module.name
        }
    )


# ---- The rules: each gives what breaks it, and more about it ---------------------------------------------------------

Broken = dict[str, str]


def circles(house: House) -> Broken:
    """Modules that import each other, however far around, and the arrows between them."""
    targets: dict[str, set[str]] = {}
    for importer, imported in arrows(house):
        targets.setdefault(importer, set()).add(imported)

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        ahead = [start]
        while ahead:
            new = targets.get(ahead.pop(), set()) - seen
            seen |= new
            ahead += new
        return seen

    beyond = {name: reached(name) for name in house}
    found = {frozenset(other for other in beyond[name] if name in beyond[other]) for name in house}
    return {
        ", ".join(sorted(circle)): ", ".join(f"{a} -> {b}" for a, b in arrows(house) if {a, b} <= circle)
        for circle in found
        if circle
    }


def upward(house: House) -> Broken:
    """Arrows that do not point downward, between packages and between rooms."""
    return {
        f"{importer} -> {imported}": "not downward"
        for importer, imported in arrows(house)
        if place(importer)[1] != place(imported)[1] and place(importer)[0] <= place(imported)[0]
    }


def place(module: str) -> tuple[tuple[int, int], str]:
    """How high a module lies, by package and room, and the name of that."""
    package, _, inside = module.partition(".")
    floor = next(floor for floor, line in enumerate(PACKAGES) if package in line)
    if package != DOOR:
        return (floor, 0), package
    room = inside.partition(".")[0]
    level = next((level for level, line in enumerate(ROOMS) if room in line), None)
    if level is None:
        raise ValueError(f"a module of parity must lie in one of its rooms, got {module}")
    return (floor, level), f"{package}.{room}"


def too_long(house: House) -> Broken:
    """Modules and functions with more lines than they should have."""
    found = {name: len(module.source.splitlines()) for name, module in house.items()}
    found = {name: lines for name, lines in found.items() if lines > MOST_LINES["module"]}
    for module in house.values():
        for name, function in functions(module):
            body = function.body[1:] if ast.get_docstring(function) is not None else function.body
            lines = (function.end_lineno or 0) - body[0].lineno + 1 if body else 0
            if lines > MOST_LINES["function"]:
                found[name] = lines
    return {name: f"{lines} lines" for name, lines in found.items()}


def many_parameters(house: House) -> Broken:
    """Private functions and methods that take too many parameters."""
    found = {}
    for name, function in (each for module in house.values() for each in functions(module)):
        takes = function.args
        every = [*takes.posonlyargs, *takes.args, *takes.kwonlyargs, takes.vararg, takes.kwarg]
        count = sum(each is not None and each.arg not in ("self", "cls") for each in every)
        if is_private(function.name) and count > MOST_PARAMETERS:
            found[name] = f"{count} parameters"
    return found


def private_names(house: House) -> Broken:
    """Private names of a module that another one imports, or reaches through what it imports."""
    found = {}
    for module in house.values():
        of_others = [each for each in imports(house, module) if each[0] != module.name]
        bound = {alias: f"{target}.{name}".removesuffix(".") for target, name, alias in of_others}
        for target, name, _ in of_others:
            if is_private(name):
                found[f"{module.name} -> {target}.{name}"] = "imported"
        reached = (node for node in ast.walk(module.tree) if isinstance(node, ast.Attribute) and is_private(node.attr))
        for node in reached:
            if (whose := bound.get(ast.unparse(node.value))) is not None:
                found[f"{module.name} -> {whose}.{node.attr}"] = "reached"
    return found


def classes_of_a_name(house: House) -> Broken:
    """Names that several classes of `parity` have."""
    modules = [module for name, module in house.items() if name.partition(".")[0] == "parity"]
    nodes = [(module.name, node) for module in modules for node in ast.walk(module.tree)]
    homes: dict[str, list[str]] = {}
    for module, node in nodes:
        if isinstance(node, ast.ClassDef):
            homes.setdefault(node.name, []).append(module)
    return {name: " and ".join(found) for name, found in homes.items() if len(found) > 1}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def functions(module: Module) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function and method, nested ones too, by its dotted name."""

    def visit(prefix: str, node: ast.AST) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
        for child in ast.iter_child_nodes(node):
            name = prefix
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                name = f"{prefix}.{child.name}"
                if not isinstance(child, ast.ClassDef):
                    yield name, child
            yield from visit(name, child)

    return visit(module.name, module.tree)


RULES = {
    "no circles": circles,
    "arrows point downward": upward,
    "not too long": too_long,
    "few parameters": many_parameters,
    "private names stay at home": private_names,
    "one class of a name": classes_of_a_name,
}


def complaints(rule: str, house: House, excused: Collection[str]) -> list[str]:
    """What breaks a rule without being excused, and what is excused without breaking it."""
    broken = RULES[rule](house)
    new = [f"{name} ({more})" for name, more in sorted(broken.items()) if name not in excused]
    return [*new, *(f"{name} is excused, and breaks nothing" for name in sorted(excused) if name not in broken)]


# ---- The house keeps them --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
def test_the_house_keeps(rule):
    excused = [*NOT_YET.get(rule, ()), *(LONG if rule == "not too long" else ())]
    assert len(excused) == len({*excused}), "what may be long is not to be mended"
    found = complaints(rule, read_house(ROOT), excused)
    assert not found, "\n".join(found)


def test_the_mock_of_ttnn_knows_nothing_of_attention():
    """The mock serves any TTNN code: of the rest of the house it takes one class of errors."""
    house = read_house(ROOT)
    room = {name for name in house if f"{name}.".startswith("mha_tt.mock.")}
    taken = {(target, name) for inside in room for target, name, _ in imports(house, house[inside])}
    assert {(target, name) for target, name in taken if target not in room} == {("mha_spec", "Refusal")}


def test_only_known_rules_are_excused_from():
    assert NOT_YET.keys() <= RULES.keys()


# ---- Each rule can be broken -----------------------------------------------------------------------------------------


def built(tmp_path, sources):
    """A house of these sources, by the names of their modules; packages are made around them."""
    for name, source in sources.items():
        path = tmp_path.joinpath(*name.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        for folder in path.relative_to(tmp_path).parents[:-1]:
            (tmp_path / folder / "__init__.py").touch()
        path.write_text(source)
    return read_house(tmp_path)


@pytest.mark.parametrize(
    "source",
    [
        "import parity.core.b",
        "import parity.core.b as other",
        "from parity.core import b",
        "from parity.core import b as other",
        "from parity.core.b import f",
        "from .b import f",
        "from . import b",
        "from ..core import b",
        "def g():\n    from parity.core import b",
        "if TYPE_CHECKING:\n    from parity.core.b import f",
        'importlib.import_module("parity.core.b")',
    ],
)
def test_an_import_is_an_arrow_however_it_is_written(source, tmp_path):
    house = built(tmp_path, {"parity.core.a": source, "parity.core.b": ""})
    assert arrows(house) == [("parity.core.a", "parity.core.b")]


def test_neither_the_door_nor_what_others_wrote_gives_arrows(tmp_path):
    built(
        tmp_path,
        {"parity.core.a": "import os\nfrom numpy import ndarray\nimport parity_of_others\n'see parity.core.a'"},
    )
    (tmp_path / "parity" / "__init__.py").write_text("from parity.core import a")
    assert arrows(read_house(tmp_path)) == []


def test_a_circle_is_seen_with_its_arrows(tmp_path):
    house = built(
        tmp_path,
        {
            "mha_jax.a": "from mha_jax import b",
            "mha_jax.b": "def f():\n    import mha_jax.c",
            "mha_jax.c": "if TYPE_CHECKING:\n    from .a import f",
            "mha_jax.d": "from mha_jax import a",
        },
    )
    around = "mha_jax.a -> mha_jax.b, mha_jax.b -> mha_jax.c, mha_jax.c -> mha_jax.a"
    assert circles(house) == {"mha_jax.a, mha_jax.b, mha_jax.c": around}


@pytest.mark.parametrize(
    ("importer", "imported", "is_downward"),
    [
        ("parity.core.a", "parity.files.b", True),
        ("parity.core.a", "parity.core.b", True),
        ("parity.core.a", "mha_jax.mha", True),
        ("parity.core.a", "mha_spec.rope", True),
        ("mha_jax.mha", "mha_spec.rope", True),
        ("mha_jax.mha", "mha_jax.rope", True),
        ("mha_jax.mha", "mha_torch.mha", False),
        ("mha_jax.mha", "parity.files.b", False),
        ("mha_spec.rope", "mha_jax.mha", False),
        ("parity.core.a", "parity.cli.b", False),
        ("parity.files.a", "parity.pretrained.b", False),
        ("parity.cli.a", "parity", False),
        ("parity_lab.a", "parity.cli.b", True),
        ("parity.cli.a", "parity_lab.b", False),
    ],
)
def test_only_arrows_downward_are_allowed(importer, imported, is_downward, tmp_path):
    sources = {importer: f"import {imported}"} | ({imported: ""} if "." in imported else {})
    assert list(upward(built(tmp_path, sources))) == ([] if is_downward else [f"{importer} -> {imported}"])


def test_a_module_outside_all_rooms_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"got parity\.attic\.a"):
        upward(built(tmp_path, {"parity.attic.a": "from parity.core import b", "parity.core.b": ""}))


def test_lines_are_counted_without_signature_and_docstring(tmp_path):
    head = 'def f(\n    a,\n    b,\n):\n    """About\n\n    it.\n    """\n'
    short, long = (head + "    a\n" * lines for lines in (60, 61))
    method = "class C:\n" + "".join(f"    {line}\n" for line in long.splitlines())
    house = built(tmp_path, {"mha_jax.a": short, "mha_jax.b": long, "mha_jax.c": method})
    assert too_long(house) == {"mha_jax.b.f": "61 lines", "mha_jax.c.C.f": "61 lines"}


def test_lines_of_a_module_are_counted(tmp_path):
    house = built(tmp_path, {"mha_jax.a": "a\n" * 500, "mha_jax.b": "a\n" * 501})
    assert too_long(house) == {"mha_jax.b": "501 lines"}


def test_parameters_of_what_is_private_are_counted(tmp_path):
    ten = "a, b, /, c, d, e, *f, g, h, i, **j"
    sources = {
        "mha_jax.a": f"class C:\n    def _g(self, {ten}): ...\n    def __init__(self, k, {ten}): ...",
        "mha_jax.b": f"def _f(k, {ten}): ...\ndef f(k, {ten}):\n    def _g(k, {ten}): ...",
    }
    found = dict.fromkeys(("mha_jax.b._f", "mha_jax.b.f._g"), "11 parameters")
    assert many_parameters(built(tmp_path, sources)) == found


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from mha_jax.b import _f", "mha_jax.b._f"),
        ("from mha_jax import b\nb._f()", "mha_jax.b._f"),
        ("import mha_jax.b\nmha_jax.b._f()", "mha_jax.b._f"),
        ("import mha_jax.b as other\nother._f()", "mha_jax.b._f"),
        ("from mha_jax.b import C\nC._f()", "mha_jax.b.C._f"),
        ("from mha_jax.b import f\nf.__name__", None),
        ("import numpy as np\nnp._f()", None),
        ("from mha_jax.a import _f\nself._f", None),
    ],
)
def test_private_names_are_seen_where_they_do_not_belong(source, found, tmp_path):
    house = built(tmp_path, {"mha_jax.a": source, "mha_jax.b": ""})
    assert list(private_names(house)) == ([f"mha_jax.a -> {found}"] if found else [])


def test_a_name_of_two_classes_is_seen(tmp_path):
    sources = {"parity.core.a": "class C:\n    class D: ...", "parity.core.b": "class C: ...\nclass E: ..."}
    house = built(tmp_path, {**sources, "mha_jax.a": "class E: ..."})
    assert classes_of_a_name(house) == {"C": "parity.core.a and parity.core.b"}


def test_an_excuse_that_is_no_longer_needed_is_seen(tmp_path):
    house = built(tmp_path, {"mha_jax.a": "a\n" * 501})
    assert complaints("not too long", house, []) == ["mha_jax.a (501 lines)"]
    assert complaints("not too long", house, ["mha_jax.a"]) == []
    stale = "mha_jax.b is excused, and breaks nothing"
    assert complaints("not too long", house, ["mha_jax.a", "mha_jax.b"]) == [stale]


# ---- Tests pin no prose ----------------------------------------------------------------------------------------------

EXCEPT = {"refusals.py", "test_refusal.py", "test_refusals.py", "test_house.py"}
"""They print refusals, or rules."""


def sentences(source: str) -> list[str]:
    """Strings of a test with the word that begins a rule. Docstrings do not count."""
    if "must" not in source:
        return []
    nodes = list(ast.walk(ast.parse(source)))
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    constants = (node for node in nodes if isinstance(node, ast.Constant) and id(node) not in docstrings)
    strings = (node.value for node in constants if isinstance(node.value, str))
    return [text for text in strings if re.search(r"\bmust\b", text)]


def test_no_test_pins_the_words_of_a_refusal():
    paths = [path for path in (ROOT / "tests").rglob("*.py") if path.name not in EXCEPT]
    assert len(paths) > 100
    found = [(str(path.relative_to(ROOT)), sentences(path.read_text(encoding="utf-8"))) for path in paths]
    assert [(path, strings) for path, strings in found if strings] == []


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ('match = "--heads must be odd"', 1),
        ('words = f"{name} must be {rule}"', 1),
        ('"""A docstring must not count."""', 0),
        ('name = "mustard"  # must', 0),
    ],
)
def test_strings_with_rules_are_counted(source, count):
    assert len(sentences(source)) == count

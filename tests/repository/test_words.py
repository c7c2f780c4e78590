"""Pages, docstrings, comments and messages contain no idioms of translated English."""

import re
from typing import is_typeddict

import pytest
from helpers import ROOT

from parity.use.reporting import schemas

FOLDERS = (
    "parity",
    "parity_lab",
    "mha_spec",
    "mha_jax",
    "mha_torch",
    "mha_tt",
    "ttnn_mock",
    "benchmarks",
    "examples",
    "tools",
)
GENERATED = {"models.md"}
"""Pages that tools generate from docstrings and tests."""
GENERATED_BELOW = "<!-- The rest of this page is generated"
"""The beginning of a line below which a page is generated from docstrings."""
RECORDED = {"cut-pretrained"}
"""Programs with words that files repeat bit for bit."""

NOUN = r"(?:a|an|the|each|every|no|any|its|one|another)"

IDIOMS = {
    "Of": (
        r"(?:^[ #>*-]*|[.!?:;] |\| )(?:Whether|Of|Those of|That of)\b",
        "a sentence or heading that begins with a noun or a verb, or 'For' for 'Of'",
    ),
    ", for": (
        rf", for (?:(?:it|they|there|nobody|nothing|none) \w|(?:{NOUN}|this|that|these|those) \w+ "
        r"(?:is|are|has|have|was|were|do|does|can|cannot|may|would|wants?|needs?)\b)",
        "'because' or 'since'",
    ),
    "in place of": (
        r"\bin (?:place of|(?:its|their) (?:place|stead))\b",
        "'instead of', 'instead'",
    ),
    "beside": (r"\bbeside\b", "'next to', 'in addition to', 'compared with'"),
    "refused": (
        r"\b[Rr]efus(?:e|es|ed|ing)\b",
        "'raises an error', 'rejects', 'is not supported'",
    ),
    "told": (
        r"\b(?:(?:is|are|be|been|was|were|unless|if|when|as) (?:told|said)|told "
        r"(?:by|apart|otherwise))\b",
        "'specified', 'reported', 'distinguished', 'by default'",
    ),
    "asked": (
        r"\b(?:is|are|be|was|were) asked\b",
        "'checks', 'requests', 'requires', 'expects'",
    ),
    "judged": (r"\b(?:judges?|judged|judging)\b", "'compares', 'checks'"),
    "gives": (
        r"\b(?:functions?|layers?|kernels?|modules?|calls?|paths?|methods?|models?|callables?)"
        r" g(?:ives?|ave)\b",
        "'returns', 'produces'",
    ),
    "hypothesis": (r"\bhypothes[ei]s\b", "'candidate bug'"),
    "planted": (r"\b(?:plant(?:s|ed|ing)?|(?:made )?on purpose)\b", "'injected', 'deliberately'"),
    "sibling": (r"\bsiblings?\b", "'implementation', or the names of the packages"),
    "peer": (r"\bpeers?\b", "'other library'"),
    "whoever": (r"\b(?:whoever|one's own)\b", "'you', 'your own'"),
    "without a word": (r"\bwithout a word\b", "'silently'"),
    "as ever": (
        r"\bas (?:ever|users have it|(?:it was|they were)(?=[.,;:)]))\b",
        "'as usual', 'unchanged', 'with default settings'",
    ),
    "anew": (
        r"\b(?:mended|anew|there and back|be had)\b",
        "'fixed', 'regenerated', 'round trip', 'available'",
    ),
    "so many": (
        r"\b(?:so many(?!(?: \w+){1,3} that)|of equally many|each its own)\b",
        "'that many', 'the same number of', 'one per'",
    ),
    "is no": (
        r"(?<![Tt]here )\bis (?:none|another one|no (?!longer|more|different|need))\b",
        "'is not a', 'does not exist', 'differs'",
    ),
    "looked for": (
        r"\b(?:is|are|was|were) looked for\b",
        "'searches for', 'tries', with a subject",
    ),
    "must": (
        r"\bmust be (?:of|that of|those of|told)\b|\bmust (?:come with|name)\b",
        "'must be one of', 'requires', 'must be a path to'",
    ),
    "another way": (r"\bin another way\b", "'differently', 'wrongly'"),
    "another theta": (
        r"\b[Aa]nother (?:theta|base|eps|scale|order|dtype|width|shape|length|axis|alignment"
        r"|pattern|digest|rounding|convention|effect|exit status|number of|kind of|size of"
        r"|(?!layer\b)\w+ than)\b",
        "'a different' or 'the wrong'; 'another' is one more",
    ),
    "are those of": (
        r"\b(?:(?:is|are|be|was|were|default:) (?:those|that)|equals? those) of\b",
        "the noun itself, a possessive, 'belongs to', 'matches'",
    ),
    "place": (
        r"(?<!in )\bplaces? (?:later|away|too (?:late|early))\b"
        r"|\b(?:at|by) (?:(?:the|its|their|some|other|shuffled) )?places?\b",
        "'position', 'index', 'location'",
    ),
    "numbers": (
        r"\bnumbers (?:added to|that are added)|\b[Ff]itted numbers\b|\b[Ss]tored numbers\b"
        r"|\bmasks? of numbers\b",
        "'values', 'elements', 'parameters', 'floats'",
    ),
    "4 %": (
        r"\d %|(?<![\d.,^\[])\b\d{1,3} \d{3}\b(?! ?[\dx×])|\bsome \d",
        "'4%', '70,000', 'about 30'",
    ),
    "normalise": (
        r"(?:normal|quant|optim|initial|recogn|general|special|serial|parallel|organ|summar|util|minim|maxim)is"
        r"(?:e[drs]?|ing|ations?)\b|(?:neighb|behavi|col|fav|hon)our|licence|centre",
        "American spelling",
    ),
}
"""Patterns of idioms and their replacements."""

PAGE_IDIOMS = {
    "those of": (r"\b[Tt]hose of\b", "the noun itself, or a possessive"),
}
"""Idioms that pages do not contain, in addition to `IDIOMS`."""

SHORT_IDIOMS = {
    "law": (r"\blaws?\b", "'pattern'"),
    "place": (r"\bplaces?\b", "'location', 'position', 'index'"),
    "apart": (r"\bapart\b", "'independent', 'different', 'held-out'"),
    "asked": (r"\basked\b", "'checked', 'requested'"),
    "judged": (r"\bjudge(?:d|s|ment|ments)?\b", "'compared', 'checked'"),
    "kept": (r"\bkept\b", "'copied', 'unchanged', or what is kept"),
    "seen": (r"\bseen\b", "'observed'"),
    "told": (r"\b(?:told|said|given|held)\b", "'passed', 'reported', 'stored'"),
    "refused": (r"\brefus(?:ed|es|als?)\b", "'rejected', 'reason', 'input errors'"),
    "normalise": IDIOMS["normalise"],
}
"""Dialect in texts of one or two words: labels, JSON keys and names of files."""

PATTERNS = {
    name: re.compile(pattern, re.MULTILINE)
    for name, (pattern, _) in {**IDIOMS, **PAGE_IDIOMS}.items()
}

SHORT_PATTERNS = {
    name: re.compile(pattern, re.IGNORECASE) for name, (pattern, _) in SHORT_IDIOMS.items()
}

CODE_CELL = re.compile(r"^( *)```(?:python|\{code-cell\})\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
"""A cell or block of Python in a page."""

SHORT = re.compile(r"[A-Za-z]+(?: [A-Za-z]+)?")
"""A text of one or two words, unlike paths, names of bugs and codes."""

LEXEME = re.compile(
    r'(?P<docstring>^[ \t]*"""(?:[^\\]|\\.)*?""")'
    r'|(?P<string>"""(?:[^\\]|\\.)*?"""|"(?:[^"\\\n]|\\.)*"|\'(?:[^\'\\\n]|\\.)*\')'
    r"|(?P<comment>#[^\n]*)",
    re.MULTILINE | re.DOTALL,
)


def prose(page: str) -> str:
    """Return the paragraphs of a page, one per line, without code blocks, inline code and link
    targets.
    """
    page = re.sub(r"^ *```.*?^ *```$", "", page, flags=re.MULTILINE | re.DOTALL)
    page = re.sub(r"`[^`\n]*`", "``", re.sub(r"\]\([^)\s]*\)", "]", page))
    return re.sub(r"(?<=\S)[ \t]*\n[ \t]*(?=[^\s|#>*-])", " ", page)


def lexemes(source: str) -> dict[str, str]:
    """Return the docstrings with comments of a module, and its strings of at least three words."""
    texts: dict[str, list[str]] = {"docstrings": [], "messages": []}
    for match in LEXEME.finditer(source):
        text = match[0].strip().strip("\"'# \t")
        if match.lastgroup != "string":
            texts["docstrings"].append(
                re.sub(r"^ +[*\w]+(, [*\w]+)*: ", "    ", text, flags=re.MULTILINE)
            )  # names
            continue
        text = re.sub(r"\{[^{}]*\}", "{}", text)  # values of f-strings
        if len(text.split()) > 2:
            texts["messages"].append(text)
    return {kind: prose("\n\n".join(pieces)) for kind, pieces in texts.items()}


def labels(source: str) -> str:
    """Return the strings of one or two words in a module, one per line."""
    short_texts = []
    for lexeme in LEXEME.finditer(source):
        if lexeme.lastgroup == "string":
            text = re.sub(r"\{[^{}]*\}", "", lexeme[0])  # values of f-strings
            short_texts.append(text.strip("\"' :"))
    return "\n".join(text for text in short_texts if SHORT.fullmatch(text))


def code_in(page: str) -> str:
    """Return the Python code of a page."""
    return "\n\n".join(cell[2] for cell in CODE_CELL.finditer(page))


def pages() -> dict[str, str]:
    """Return the part of each page that is written by hand, by path."""
    names = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "examples/README.md")
    paths = [ROOT / name for name in names]
    paths += [*(ROOT / "docs").rglob("*.md"), *(ROOT / "parity" / "bugs").glob("*.md")]
    by_hand = {}
    for path in paths:
        if path.name not in GENERATED:
            text, _, _ = path.read_text("utf-8").partition(GENERATED_BELOW)
            by_hand[str(path.relative_to(ROOT))] = text
    return by_hand


def modules() -> dict[str, str]:
    """Return the source of each module and program outside of tests, by path."""
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    for path in (ROOT / "tools").iterdir():
        if path.is_file() and not path.suffix and path.name not in RECORDED:
            paths.append(path)
    paths += [ROOT / "Makefile", ROOT / ".ci" / "run"]
    return {str(path.relative_to(ROOT)): path.read_text("utf-8") for path in paths}


def texts() -> dict[str, str]:
    """Return the prose of each page with its code cells, and the docstrings, comments and messages
    of each module, by path.
    """
    texts_by_path = {}
    for path, page in pages().items():
        in_code = "\n\n".join(lexemes(code_in(page)).values())
        texts_by_path[path] = f"{prose(page)}\n\n{in_code}"
    for path, source in modules().items():
        texts_by_path[path] = "\n\n".join(lexemes(source).values())
    return texts_by_path


def short_texts() -> dict[str, str]:
    """Return the labels of each module and of the code of each page, the keys of JSON and the names
    of files, one per line, by what they belong to.
    """
    texts_by_path = {path: labels(source) for path, source in modules().items()}
    for path, page in pages().items():
        texts_by_path[path] = labels(code_in(page))
    for name, record in vars(schemas).items():
        if is_typeddict(record):
            keys = [key.replace("_", " ") for key in record.__annotations__]
            texts_by_path[f"keys of {name}"] = "\n".join(keys)
    names = []
    for folder in (*FOLDERS, "docs", "tests"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".md") or path.parent == ROOT / "tools":
                names.append(re.sub(r"[-_]", " ", path.stem))
    texts_by_path["names of files"] = "\n".join(names)
    return texts_by_path


def idioms_in(texts_by_path: dict[str, str]) -> list[str]:
    """Return a line for each idiom, with its position and its replacement."""
    lines = []
    for path, text in texts_by_path.items():
        idioms = {**IDIOMS, **PAGE_IDIOMS} if path.endswith(".md") else IDIOMS
        for name, (_, replacement) in idioms.items():
            for hit in PATTERNS[name].finditer(text):
                around = " ".join(text[max(0, hit.start() - 40) : hit.end() + 30].split())
                lines.append(f"{path}: …{around}…: write {replacement}")
    return lines


def short_idioms_in(texts_by_path: dict[str, str]) -> list[str]:
    """Return a line for each short text in dialect, with its replacement."""
    lines = []
    for path, text in texts_by_path.items():
        for name, (_, replacement) in SHORT_IDIOMS.items():
            for line in text.splitlines():
                if SHORT_PATTERNS[name].search(line):
                    lines.append(f"{path}: {line!r}: write {replacement}")
    return lines


def test_prose_has_no_idioms():
    """No page, docstring, comment or message outside of tests has an idiom of IDIOMS."""
    hits = idioms_in(texts())
    assert not hits, "\n".join(hits)


def test_short_texts_have_no_dialect():
    """No label, JSON key or name of a file has a word of SHORT_IDIOMS."""
    hits = short_idioms_in(short_texts())
    assert not hits, "\n".join(hits)


def names_of_tests(source: str) -> str:
    """Return the names of a module's tests as words, one name per line."""
    names = re.findall(r"^ *def test_(\w+)", source, re.MULTILINE)
    return "\n".join(name.replace("_", " ") for name in names)


def test_prose_of_tests_has_no_idioms():
    """Docstrings, comments and names of tests contain none of the idioms; their strings may."""
    texts_by_path = {}
    for path in (ROOT / "tests").rglob("*.py"):
        source = path.read_text("utf-8")
        text = lexemes(source)["docstrings"] + "\n\n" + names_of_tests(source)
        texts_by_path[str(path.relative_to(ROOT))] = text
    hits = idioms_in(texts_by_path)
    assert not hits, "\n".join(hits)


@pytest.mark.parametrize(
    ("name", "wrong", "right"),
    [
        ("Of", "Done. Of a layer it says", "one of a kind; What it looks like"),
        ("in place of", "tiled in\nplace of repeated", "updated in place"),
        (", for", "hidden, for it is padding", "a mask, for example; and a scale, for it"),
        ("refused", "Refuse a mask, or it is refused", "raises an error; a refusal is recorded"),
        ("told", "unless told otherwise", "as we told you"),
        ("is no", "that is no power of two", "there is no mask; it is no longer"),
        ("another way", "split in another\nway", "split in any other way, or another one"),
        ("another theta", "# RoPE: another theta", "another bug; another reader of one order"),
        (
            "another theta",
            "another input than keys",
            "another layer than queries; more than another",
        ),
        ("are those of", "its names are those of\na model", "names like those of a model"),
        ("those of", "names like those of a model", "of those, one of a kind"),
        ("place", "one place later, at its place", "in the wrong place; updated in place later"),
        ("numbers", "numbers added to scores", "the numbers of heads; numbers add up"),
        ("gives", "the kernel gives zeros", "which gives 0.5"),
        ("so many", "cut into so many parts", "so many names that two are equal"),
        ("4 %", "off by 4 %, or 70 000", "4%, 70,000, 2 x 4096"),
        ("normalise", "neighbours are normalised", "neighbors are normalized, and precise"),
    ],
)
def test_patterns_find_only_idioms(name, wrong, right):
    """A pattern finds its idiom, also across a line break, and accepts similar correct English."""
    assert PATTERNS[name].search(prose(wrong))
    assert not PATTERNS[name].search(prose(right))


def test_code_is_not_prose():
    """Docstrings, comments and messages of three words are read; shorter strings, code blocks
    and inline code are not.
    """
    source = '"""A licence."""\nx = "licence"  # a `licence`\ny = f"this is a licence {x}"\n'
    read = lexemes(source)
    spelling = PATTERNS["normalise"]
    assert spelling.findall(read["docstrings"]) == ["licence"]
    assert spelling.findall(read["messages"]) == ["licence"]
    assert not spelling.search(prose("```\na licence\n```\n`licence` [a](licence.md)"))


def test_code_cells_are_read():
    """Comments, docstrings and messages in the Python of a page are read, and its labels; blocks
    of output are not.
    """
    page = "A page.\n\n```python\nx = 'law'  # a licence\n```\n\n```\na licence\n```\n"
    code = code_in(page)
    assert PATTERNS["normalise"].findall(lexemes(code)["docstrings"]) == ["licence"]
    assert labels(code) == "law"


def test_labels_are_short_strings():
    """A label is a string of one or two words, also before a value and with padding; paths, names
    of bugs and sentences are not labels.
    """
    source = 'f"  law       {x}", "as seen", "mean-kept", "a.law", "it is the law", "Kept:"'
    assert labels(source).splitlines() == ["law", "as seen", "Kept"]
    assert len(short_idioms_in({"m.py": labels(source)})) == 3
    assert not short_idioms_in({"m.py": "placement\nlawful\nunchanged"})

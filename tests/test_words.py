"""Idioms of translated English are counted, and a count may only fall.

`tests/words.json` has the allowed counts of each group of texts. If a test fails because a count fell, run

    python tests/test_words.py

and commit the file with the text. It refuses to raise a count.
"""

import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ALLOWED = ROOT / "tests" / "words.json"
PACKAGES = ("parity", "mha_spec", "mha_jax", "mha_torch", "mha_tt")
GENERATED = {"api.md", "models.md"}
"""Pages that tools write, from docstrings and tests."""

NOUN = r"(?:a|an|the|each|every|no|any|its|one|another)"

IDIOMS = {
    "what": (
        r"\b(?:of|for|from|with|in|by|to|than|at|on|into|over|like|as|beside|returns?|holds?|has|have|keeps?|adds?|hides?"
        r"|compares?|counts?) what\b(?! you)",
        "a noun, such as 'the result', 'the tolerance', 'the difference'",
    ),
    "Of": (
        r"(?:^[ #>*-]*|[.!?:;] |\| )(?:What(?! it looks like)|Whether|Of|Those of|That of)\b",
        "a sentence or heading that begins with a noun or a verb, or 'For' for 'Of'",
    ),
    "where": (
        r"\bwhere (?:there (?:is|are)|nothing|something|no \w+ (?:is|has)|one is)\b",
        "'if' or 'when'; 'where' is for places",
    ),
    ", for": (
        rf", for (?:(?:it|they|there|nobody|nothing|none) \w|(?:{NOUN}|this|that|these|those) \w+ "
        r"(?:is|are|has|have|was|were|do|does|can|cannot|may|would|wants?|needs?)\b)",
        "'because' or 'since'",
    ),
    ", too": (r", too(?=[.,;:)]|$)", "'also' before the verb, or nothing"),
    "in place of": (r"\bin (?:place of|(?:its|their) (?:place|stead))\b", "'instead of', 'instead'"),
    "and not": (rf"\band not (?:by|of|in|on|from|to|for|as|at|{NOUN})\b", "'instead of', or ', not'"),
    "beside": (r"\bbeside\b", "'next to', 'in addition to', 'compared with'"),
    "refused": (
        r"\b(?:(?:is|are|be|been|was|were) refused|refused by name|refuses?|refusing)\b",
        "'raises an error', 'rejects', 'is not supported'",
    ),
    "told": (
        r"\b(?:(?:is|are|be|been|was|were|unless|if|when|as) (?:told|said)|told (?:by|apart|otherwise))\b",
        "'specified', 'reported', 'distinguished', 'by default'",
    ),
    "asked": (
        r"\b(?:(?:is|are|be|was|were) asked|asks (?:for|what|whether|the|a|it)|wants)\b",
        "'checks', 'requests', 'requires', 'expects'",
    ),
    "judged": (r"\b(?:judges?|judged|judging)\b", "'compares', 'checks'"),
    "sees": (
        r"\b(?:quer(?:y|ies)|rows?|tokens?|heads?|layers?|kernels?|tools?|functions?) (?:sees?|knows?|saw|knew)\b",
        "queries 'attend to' keys, tools 'detect', functions 'support'",
    ),
    "gives": (
        r"\b(?:functions?|layers?|kernels?|modules?|calls?|paths?|methods?|models?|callables?|it|they|which|that)"
        r" g(?:ives?|ave)\b",
        "'returns', 'produces'",
    ),
    "takes": (
        r"\b(?:takes|took) (?:a mask|a function|a layer|arrays|tensors|masks|weights"
        r"|the (?:plain|fused|fast|same) path)\b",
        "'accepts', 'uses'",
    ),
    "mistake": (r"\bmistakes?\b", "'bug'"),
    "hypothesis": (r"\bhypothes[ei]s\b", "'candidate bug'"),
    "planted": (r"\b(?:plant(?:s|ed|ing)?|(?:made )?on purpose)\b", "'injected', 'deliberately'"),
    "sibling": (r"\bsiblings?\b", "'implementation', or the names of the packages"),
    "peer": (r"\bpeers?\b", "'other library'"),
    "nobody": (r"\b(?:nobody|somebody|whoever|one's own)\b", "'no one', 'you', 'your own'"),
    "without a word": (r"\bwithout a word\b", "'silently'"),
    "as ever": (
        r"\bas (?:ever|users have it|(?:it was|they were)(?=[.,;:)]))\b",
        "'as usual', 'unchanged', 'with default settings'",
    ),
    "anew": (
        r"\b(?:mended|anew|there and back|be had|put back|at hand)\b",
        "'fixed', 'regenerated', 'round trip', 'available', 'restored'",
    ),
    "so many": (r"\b(?:so many|of equally many|each its own)\b", "'that many', 'the same number of', 'one per'"),
    "is no": (
        r"(?<![Tt]here )\bis (?:none|another one|no (?!longer|more|different|need))\b",
        "'is not a', 'does not exist', 'differs'",
    ),
    "looked for": (r"\b(?:is|are|was|were) looked for\b", "'searches for', 'tries', with a subject"),
    "must": (
        r"\bmust be (?:of|that of|those of|told)\b|\bmust (?:come with|name)\b",
        "'must be one of', 'requires', 'must be a path to'",
    ),
    "4 %": (
        r"\d %|(?<![\d.,^])\b\d{1,3} \d{3}\b(?! ?[\dx×])|\bsome \d",
        "'4%', '70,000', 'about 30'",
    ),
    "normalise": (
        r"(?:normal|quant|optim|initial|recogn|general|special|serial|parallel|organ|summar|util|minim|maxim)is"
        r"(?:e[drs]?|ing|ations?)\b|(?:neighb|behavi|col|fav|hon)our|licence|centre",
        "American spelling",
    ),
}
"""Each pattern of an idiom, and what to write instead."""

PATTERNS = {name: re.compile(pattern, re.MULTILINE) for name, (pattern, _) in IDIOMS.items()}

LEXEME = re.compile(
    r'(?P<docstring>^[ \t]*"""(?:[^\\]|\\.)*?""")'
    r'|(?P<string>"""(?:[^\\]|\\.)*?"""|"(?:[^"\\\n]|\\.)*"|\'(?:[^\'\\\n]|\\.)*\')'
    r"|(?P<comment>#[^\n]*)",
    re.MULTILINE | re.DOTALL,
)


def prose(page: str) -> str:
    """The paragraphs of a page, a line each, without blocks of code, inline code and the targets of links."""
    page = re.sub(r"^ *```.*?^ *```$", "", page, flags=re.MULTILINE | re.DOTALL)
    page = re.sub(r"`[^`\n]*`", "``", re.sub(r"\]\([^)\s]*\)", "]", page))
    return re.sub(r"(?<=\S)[ \t]*\n[ \t]*(?=[^\s|#>*-])", " ", page)


def lexemes(source: str) -> dict[str, str]:
    """Docstrings with comments, and strings of three words at least, of a module."""
    texts: dict[str, list[str]] = {"docstrings": [], "messages": []}
    for found in LEXEME.finditer(source):
        text = found[0].strip().strip("\"'# \t")
        if found.lastgroup != "string":
            texts["docstrings"].append(text)
        elif len(text.split()) > 2:
            texts["messages"].append(text)
    return {kind: prose("\n\n".join(found)) for kind, found in texts.items()}


def texts() -> dict[str, dict[Path, str]]:
    """The texts of each group, by their files."""
    contributing = {ROOT / "CONTRIBUTING.md", ROOT / "docs" / "extending.md"}
    site = [ROOT / "docs" / "index.md", *(ROOT / "docs").glob("*/*.md")]
    pages = [ROOT / "README.md", *{*(ROOT / "docs").glob("*.md")} - {*site}, ROOT / "examples" / "README.md"]
    pages += (ROOT / "parity" / "bugs").glob("*.md")
    groups = {
        "pages": [page for page in pages if page.name not in GENERATED and page not in contributing],
        "site": site,
        "contributing": contributing,
        "changelog": [ROOT / "CHANGELOG.md"],
    }
    found = {name: {path: prose(path.read_text("utf-8")) for path in sorted(paths)} for name, paths in groups.items()}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for kind, text in lexemes(path.read_text("utf-8")).items():
                found.setdefault(f"{kind} of {package}", {})[path] = text
    return found


def counts(found: dict[str, dict[Path, str]]) -> dict[str, dict[str, int]]:
    """How often each idiom occurs in each group."""
    joined = {group: "\n\n".join(files.values()) for group, files in found.items()}
    counted = {
        group: {name: sum(1 for _ in pattern.finditer(text)) for name, pattern in PATTERNS.items()}
        for group, text in joined.items()
    }
    return {group: {name: count for name, count in of.items() if count} for group, of in counted.items()}


def places(files: dict[Path, str], name: str) -> list[str]:
    """Where an idiom occurs: the file and the words around it."""
    return [
        f"{path.relative_to(ROOT)}: {' '.join(text[max(0, match.start() - 40) : match.end() + 30].split())}"
        for path, text in files.items()
        for match in PATTERNS[name].finditer(text)
    ]


@pytest.fixture(scope="module")
def found():
    return texts()


def test_no_idiom_is_added_and_the_counts_follow_when_one_goes(found):
    allowed = json.loads(ALLOWED.read_text("utf-8"))
    lines = []
    for group, now in counts(found).items():
        before = allowed.get(group, {})
        for name in IDIOMS:
            count, limit = now.get(name, 0), before.get(name, 0)
            if count > limit:
                lines += [f"{group}: {name!r} {count} times, {limit} allowed; write {IDIOMS[name][1]}"]
                lines += places(found[group], name) if limit < 10 else []
            elif count < limit:
                lines.append(f"{group}: {name!r} fell from {limit} to {count}: run `python tests/test_words.py`")
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize(
    ("name", "wrong", "right"),
    [
        ("what", "more than what is allowed", "It explains what is compared."),
        ("Of", "Done. Of a layer it says", "one of a kind; What it looks like"),
        ("where", "where there is a mask", "the stage where they begin"),
        ("in place of", "tiled in\nplace of repeated", "updated in place"),
        (", for", "hidden, for it is padding", "a mask, for example; and a scale, for it"),
        (", too", "and biases, too.", "a loose tolerance, too loose here"),
        ("and not", "repeated and not the tiled one", "and notes"),
        ("refused", "it is refused by name", "floats refused"),
        ("told", "unless told otherwise", "as we told you"),
        ("sees", "the query sees a key", "as the reader sees"),
        ("is no", "that is no power of two", "there is no mask; it is no longer"),
        ("4 %", "off by 4 %, or 70 000", "4%, 70,000, 2 x 4096"),
        ("normalise", "neighbours are normalised", "neighbors are normalized, and precise"),
    ],
)
def test_patterns_find_the_idiom_and_let_correct_english_pass(name, wrong, right):
    assert PATTERNS[name].search(prose(wrong))
    assert not PATTERNS[name].search(prose(right))


def test_code_and_short_strings_are_no_prose():
    source = '"""A mistake."""\nx = "mistake"  # a `mistake`\ny = f"this is a mistake {x}"\n'
    read = lexemes(source)
    assert PATTERNS["mistake"].findall(read["docstrings"]) == ["mistake"]
    assert PATTERNS["mistake"].findall(read["messages"]) == ["mistake"]
    assert not PATTERNS["mistake"].search(prose("```\na mistake\n```\n`mistake` [a](mistake.md)"))


def lower() -> None:
    """Write the counts of today, unless one of them is higher than allowed."""
    now = counts(texts())
    allowed = json.loads(ALLOWED.read_text("utf-8")) if ALLOWED.exists() else now
    higher = [
        f"{group}: {name} {count}, {allowed.get(group, {}).get(name, 0)} allowed"
        for group, of in now.items()
        for name, count in of.items()
        if count > allowed.get(group, {}).get(name, 0)
    ]
    if higher:
        sys.exit("\n".join(higher))
    ALLOWED.write_text(json.dumps(now, indent=1, sort_keys=True) + "\n", "utf-8")


if __name__ == "__main__":
    lower()

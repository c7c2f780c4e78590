"""Former names of options: they work for one more release, and a line on standard error names the
new ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from parity.use.cli.messages import warn

FORMER_NAMES = {
    "compare": {"--weights": "--model"},
    "diagnose": {"--ranks": "--mesh", "--not-causal": "--no-causal"},
    "conformance": {
        "--peers": "--libraries",
        "--questions": "--checks",
        "--causal": "--causal-alignment",
    },
    "mutate": {"--causal": "--causal-alignment"},
    "plot": {
        "--layout": "--from",
        "--tokens": "--labels",
        "--tokens-file": "--labels-file",
        "--query-tokens": "--query-labels",
    },
    "cache-size": {"--batch": "--batch-size", "--seq-len": "--capacity"},
    "bench": {"--what": "--suites", "--frameworks": "--backends"},
}
"""By command, the former name of each option and its name."""


def with_new_names(words: Sequence[str]) -> list[str]:
    """Return the words of a command line with the new names of options, and warn of each former
    one.
    """
    return list(_renamed(words)) if words and words[0] in FORMER_NAMES else list(words)


def _renamed(words: Sequence[str]) -> Iterator[str]:
    names = FORMER_NAMES[words[0]]
    end = words.index("--") if "--" in words else len(words)  # the command of `mutate` follows
    for word in words[:end]:
        flag, equals, value = word.partition("=")
        if flag in names:
            warn_of_former(flag, names[flag])
        yield f"{names.get(flag, flag)}{equals}{value}"
    yield from words[end:]


def warn_of_former(flag: str, name: str) -> None:
    """Warn that an option has another name now."""
    warn(f"{flag} is deprecated, and the next release does not accept it: use {name}")

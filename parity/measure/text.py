"""Text of files and errors made fit to show, and lists in words."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

MAX_SHOWN = 500  # characters

COMMAND = re.compile(r"^([^\S\n]*):(?=:)", re.MULTILINE)
"""The begin of a line that a GitHub workflow would obey, such as `::error::`, also after spaces."""


def printable(text: str, *, keep: str = "\n") -> str:
    r"""Escape what a terminal or a GitHub workflow obeys, and characters that cannot be shown.

    The characters are controls, directions of text, and half characters. A line that begins with
    `::` is a command in the log of a workflow: its first colon is escaped.

    Args:
        text: any text.
        keep: characters to keep as they are.

    Returns:
        The text with `\x1b` instead of an escape character.
    """
    if not text.isprintable():
        characters = []
        for character in text:
            if not character.isprintable() and character not in keep:
                character = character.encode("unicode_escape", "surrogatepass").decode()
            characters.append(character)
        text = "".join(characters)
    if "::" in text:
        text = COMMAND.sub(r"\1\\x3a", text)
    return text


def in_line(text: str, most: int = MAX_SHOWN) -> str:
    """Return text as one line that can be shown.

    Lines are joined, characters escaped, and the middle is cut if there are more than `most`.
    """
    half = most // 2
    if len(text) > most:  # before the rest, which takes time for each character
        text = f"{text[:half]} … {len(text) - 2 * half} characters … {text[-half:]}"
    lines = [line.strip() for line in text.splitlines()]
    return printable("; ".join(line for line in lines if line), keep="")


def some_of(names: Iterable[str], most: int = 8) -> str:
    """Return names in a line, and how many there are beyond some."""
    names = list(names)
    text = ", ".join(names[:most])
    if len(names) > most:
        text += f" and {len(names) - most} more"
    return text


def did_you_mean(name: str, choices: Iterable[str], most: int = 3) -> str:
    """Return a question about the nearest names: `did you mean torch?`; empty if none is near.

    Names that begin with a word, or contain it, follow those that are spelled like it.
    """
    choice_of = {choice.lower(): choice for choice in choices}
    near = get_close_matches(name.lower(), choice_of, most)
    word = name.lower().strip("*")
    if len(word) > 2:  # shorter ones are in too many names
        near += [lowercase for lowercase in choice_of if lowercase.startswith(word)]
        near += [lowercase for lowercase in choice_of if word in lowercase]
    if not near:
        return ""
    nearest = [choice_of[lowercase] for lowercase in dict.fromkeys(near)]
    return f"did you mean {' or '.join(nearest[:most])}?"


def and_listed(items: Iterable[Any], most: int | None = None) -> str:
    """Join items, at least one, with commas and `and`: `0, 2 and 5`; of more than `most`, the first
    and the number of the others: `0, 2 and 7 more`.
    """
    texts = [str(item) for item in items]
    if most is not None and len(texts) > most:
        texts = [*texts[:most], f"{len(texts) - most} more"]
    *first_items, last = texts
    if not first_items:
        return last
    return f"{', '.join(first_items)} and {last}"


def counted(number: int, what: str) -> str:
    """Return a number with its noun: `1 case`, `2 cases`."""
    if number == 1:
        return f"1 {what}"
    return f"{number} {what}s"

"""Text of files and errors made fit to show, and lists in words."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

MAX_SHOWN = 500  # characters


def printable(text: str, *, keep: str = "\n") -> str:
    r"""Escape characters that a terminal obeys or cannot show: controls, directions of text, half
    characters.

    Args:
        text: any text.
        keep: characters to keep as they are.

    Returns:
        The text with `\x1b` instead of an escape character.
    """
    if text.isprintable():
        return text
    return "".join(
        character
        if character.isprintable() or character in keep
        else character.encode("unicode_escape", "surrogatepass").decode()
        for character in text
    )


def in_line(text: str, most: int = MAX_SHOWN) -> str:
    """Make text one line that can be shown: join its lines, escape characters, cut its middle
    beyond `most`.
    """
    half = most // 2
    if len(text) > most:  # before the rest, which takes time for each character
        text = f"{text[:half]} … {len(text) - 2 * half} characters … {text[-half:]}"
    return printable("; ".join(filter(None, map(str.strip, text.splitlines()))), keep="")


def some_of(names: Iterable[str], most: int = 8) -> str:
    """Names in a line, and how many there are beyond some."""
    names = list(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def did_you_mean(name: str, known: Iterable[str], most: int = 3) -> str:
    """Return a question about the nearest known names, `did you mean torch?`; empty if none is
    near.

    Names that begin with a word, or contain it, follow those that are spelled like it.
    """
    by_letters, word = {each.lower(): each for each in known}, name.lower().strip("*")
    near = get_close_matches(name.lower(), by_letters, most)
    if len(word) > 2:
        near += [each for each in by_letters if each.startswith(word)] + [
            each for each in by_letters if word in each
        ]
    near = [by_letters[each] for each in dict.fromkeys(near)][:most]
    return f"did you mean {' or '.join(near)}?" if near else ""


def and_listed(items: Iterable[Any]) -> str:
    """Join items, at least one, with commas and `and`: `0, 2 and 5`."""
    *most, last = map(str, items)
    return f"{', '.join(most)} and {last}" if most else last


def counted(number: int, what: str) -> str:
    """Return a number with its noun: `1 case`, `2 cases`."""
    return f"{number} {what}{'s' if number != 1 else ''}"

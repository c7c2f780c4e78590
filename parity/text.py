"""Text of files and errors, made fit to show."""

from __future__ import annotations

MAX_SHOWN = 500  # characters


def printable(text: str, *, keep: str = "\n") -> str:
    r"""Escape characters that a terminal obeys or cannot show: controls, directions of text, half characters.

    Args:
        text: any text.
        keep: characters to keep as they are.

    Returns:
        The text with `\x1b` in place of an escape character.
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
    """Make text one line that can be shown: join its lines, escape characters, cut its middle beyond `most`."""
    half = most // 2
    if len(text) > most:  # before the rest, which takes time for each character
        text = f"{text[:half]} … {len(text) - 2 * half} characters … {text[-half:]}"
    return printable("; ".join(filter(None, map(str.strip, text.splitlines()))), keep="")

"""Sessions in pages: commands and what they print, compared up to numbers, and updated."""

import re


def commands_of(block):
    """Return the commands of a block, and the lines that it shows below them."""
    lines = block.splitlines()
    commands = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    return commands, lines[len(commands) :]


def without_numbers(text):
    """Return the lines of a text, with a mark for every number and without trailing blanks."""
    return [re.sub(r"-?\d[\d.]*(e[-+]\d+)?", "#", line).rstrip() for line in text.splitlines()]


def shows(lines, printed):
    """Return if lines of a page are what was printed, up to numbers; … stands for any lines, or any part of one."""
    expected = without_numbers("\n".join(lines))
    pattern = "\n".join(".*" if line == "…" else re.escape(line).replace("…", ".*") for line in expected)
    return re.fullmatch(pattern, "\n".join(without_numbers(printed)), re.DOTALL)


def updated(block, printed):
    """Return a block with what its commands print.

    If it shows the end only, below `…`, it still begins with the line that begins as its first one did.
    """
    commands, shown = commands_of(block)
    lines = printed.splitlines()
    if shown and shown[0] == "…":
        label = shown[1].partition(":")[0]
        begin = next(place for place, line in enumerate(lines) if line.startswith(label))
        lines = ["…", *lines[begin:]]
    if "…" in shown[1:]:
        raise NotImplementedError(f"update this block by hand:\n{printed}")
    return "\n".join([*(f"$ {command}" for command in commands), *lines, ""])

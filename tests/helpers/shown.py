"""Sessions in pages: commands and their output, compared except for numbers, and updated."""

import re


def commands_of(block):
    """Return the commands of a block, and the lines of output below them."""
    lines = block.splitlines()
    commands = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    return commands, lines[len(commands) :]


def without_numbers(text):
    """Return the lines of a text, with a mark for each number and without trailing spaces."""
    return [re.sub(r"-?\d[\d.]*(e[-+]\d+)?", "#", line).rstrip() for line in text.splitlines()]


def shows(lines, printed):
    """Return whether lines of a page match the output, except for numbers; … stands for any lines,
    or part of one.
    """
    expected = without_numbers("\n".join(lines))
    pattern = "\n".join(
        ".*" if line == "…" else re.escape(line).replace("…", ".*") for line in expected
    )
    return re.fullmatch(pattern, "\n".join(without_numbers(printed)), re.DOTALL)


def updated(block, printed):
    """Return a block with the current output of its commands.

    If it shows only the end, after `…`, the new output begins at the line with the same label as
    its first line.
    """
    commands, shown = commands_of(block)
    lines = printed.splitlines()
    if shown and shown[0] == "…":
        label = shown[1].partition(":")[0]
        begin = next(index for index, line in enumerate(lines) if line.startswith(label))
        lines = ["…", *lines[begin:]]
    if "…" in shown[1:]:
        raise NotImplementedError(f"update this block by hand:\n{printed}")
    return "\n".join([*(f"$ {command}" for command in commands), *lines, ""])

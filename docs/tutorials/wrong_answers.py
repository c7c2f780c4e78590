"""Typical wrong answers to the exercises of the notebooks, and what their checks say.

Each row of wrong_answers.toml replaces a part of a solution by what a reader may write instead. A
hidden cell below each exercise runs its rows in the notebook. So the site is not built if a check
accepts a wrong answer, or says something other than the row.
"""

import io
import re
import tomllib
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
CELL = re.compile(r"^```\{code-cell\}\n(.*?)^```$", re.MULTILINE | re.DOTALL)
WRONG_ANSWERS = tomllib.loads((FOLDER / "wrong_answers.toml").read_text("utf-8"))
OPTIONS = re.compile(r"\A---\n.*?^---\n", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class WrongAnswer:
    """A solution with a mistake.

    Attributes:
        answer: the mistake in words.
        replace: the part of the solution that it changes.
        by: what it writes instead.
        says: the first line of what the check says, or several if the first says too little.
    """

    answer: str
    replace: str
    by: str
    says: str

    def code(self, solution: str) -> str:
        """Return the solution with the mistake."""
        if solution.count(self.replace) != 1:
            raise ValueError(f"the solution must have this part once: {self.replace}")
        return solution.replace(self.replace, self.by)


@dataclass(frozen=True)
class Exercise:
    """An exercise of a notebook.

    Attributes:
        title: its heading without the number.
        solution: the code of its folded cells.
        wrong_answers: typical ones.
    """

    title: str
    solution: str
    wrong_answers: tuple[WrongAnswer, ...]

    def try_wrong_answers(self, names: dict[str, Any]) -> None:
        """Raise an AssertionError unless the check says to each answer what its row expects."""
        for wrong in self.wrong_answers:
            message = said_to(wrong.code(self.solution), names)
            if not message:
                raise AssertionError(f"the check accepts a wrong answer: {wrong.answer}")
            if first_lines(message, like=wrong.says) != wrong.says:
                raise AssertionError(f"expected to {wrong.answer}: {wrong.says}\ngot: {message}")


def first_lines(message: str, *, like: str) -> str:
    """Return as many lines of a message as another text has."""
    return "\n".join(message.splitlines()[: len(like.splitlines())])


def said_to(code: str, names: dict[str, Any]) -> str:
    """Return what a check says to an answer, or nothing if it accepts it.

    The answer gets a copy of the names, so that the notebook keeps its own.
    """
    try:
        with redirect_stdout(io.StringIO()):
            exec(compile(code, "wrong answer", "exec"), {**names})
    except AssertionError as error:
        return str(error)
    return ""


def exercises_of(notebook: str) -> dict[int, Exercise]:
    """Return the exercises of a notebook by number."""
    text = (FOLDER / f"{notebook}.md").read_text("utf-8")
    _, _, section = text.partition("\n## Exercises\n")
    headings = re.split(r"^### (\d+)\. (.+)$", section, flags=re.MULTILINE)
    exercises = {}
    for number, title, body in zip(headings[1::3], headings[2::3], headings[3::3], strict=True):
        folded = [cell for cell in CELL.findall(body) if "hide-cell" in cell]
        solution = "\n\n".join(OPTIONS.sub("", cell) for cell in folded)
        rows = WRONG_ANSWERS[notebook][number]
        wrong_answers = tuple(WrongAnswer(**row) for row in rows)
        exercises[int(number)] = Exercise(title, solution, wrong_answers)
    return exercises

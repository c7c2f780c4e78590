"""What a right port and a bug are, how they are run, and which half of the set each is of."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np

import parity
from parity.core.problem import Problem
from wild.cases import problem_of
from wild.how import How
from wild.recordings import RECORDINGS, canonical

PORTS = Path(__file__).parent / "ports"

STYLES = tuple(sorted(path.stem for path in PORTS.glob("*.py") if path.stem != "__init__"))

Recorded = dict[str, np.ndarray]


@dataclass(frozen=True)
class Right:
    """A port that is right, and how it was run and recorded.

    Attributes:
        style: the module of the port.
        case: the layer, by its name in `cases.LAYERS`.
        seed: of the arrays.
        dtype: of weights and inputs.
        how: choices inside the port.
        recording: what is handed on, and in which form: a name of `RECORDINGS`.
    """

    style: str
    case: str
    seed: int
    dtype: str
    how: How
    recording: str

    @property
    def id(self) -> str:
        """All that it is, in a word."""
        how = f"{self.how.mode}-{'wide' if self.how.wide else 'narrow'}-{self.how.penalty}"
        return f"{self.style}/{self.case}-{self.seed}/{self.dtype}/{how}/{self.recording}"

    @property
    def kind(self) -> str:
        """What tables call it."""
        return self.recording

    @property
    def problem(self) -> Problem:
        """What the port was given."""
        return problem_of(self.case, self.seed, self.dtype)

    def recorded(self) -> Recorded:
        """All that the port noted, in the canonical form."""
        return dict(_right_run(self.style, self.case, self.seed, self.dtype, self.how))

    def observed(self) -> Recorded:
        """What is handed on."""
        return RECORDINGS[self.recording](self.recorded(), self.problem)


@dataclass(frozen=True)
class Bug:
    """A port with one edit that makes it wrong.

    Attributes:
        id: its name.
        style: the module of the port.
        case: the layer.
        kind: what sort of bug: `axes`, `heads`, `rope`, `scale`, `mask`, `softmax`, `bias`, `norm`, `cap`, `sinks`,
            `window`, `alibi`, `precision`, `cache`, `weights`, `gain`, `exotic`.
        edit: the text that is replaced, which stands once in the port, and what replaces it.
        says: what is wrong, in a sentence.
        stage: the first stage that is wrong, of those that are recorded.
        limited: where that stage is wrong, if it is only in some places: indices by the letter of the axis.
        law: what maps the right values to the wrong ones, if that can be said in a few words.
        in_output: whether the output is wrong at all.
        dtype: of weights and inputs.
        recording: what is handed on besides the output alone.
    """

    id: str
    style: str
    case: str
    kind: str
    edit: tuple[str, str]
    says: str
    stage: str
    limited: Mapping[str, tuple[int, ...]]
    law: str
    in_output: bool
    dtype: str
    recording: str

    @property
    def problem(self) -> Problem:
        """What the port was given."""
        return problem_of(self.case, 0, self.dtype)

    def recorded(self) -> Recorded:
        """All that the port noted, in the canonical form."""
        return dict(_wrong_run(self.style, self.case, self.dtype, self.edit))

    def right(self) -> Recorded:
        """What the port notes without the edit."""
        return dict(_right_run(self.style, self.case, 0, self.dtype, How()))

    def observed(self, *, output_only: bool = False) -> Recorded:
        """What is handed on."""
        return RECORDINGS["output" if output_only else self.recording](self.recorded(), self.problem)


def half(name: str) -> str:
    """`known`, which may be looked at while the diagnosis is improved, or `apart`, of which only rates may."""
    return "known" if zlib.crc32(f"wild {name}".encode()) % 2 else "apart"


def port_of(style: str, edit: tuple[str, str] | None = None) -> Callable[[Problem, How], Mapping[str, Any]]:
    """The port, with one edit of its source.

    Raises:
        ValueError: if the text to replace does not stand in it once.
    """
    path = PORTS / f"{style}.py"
    source = path.read_text()
    if edit is not None:
        if (count := source.count(edit[0])) != 1:
            raise ValueError(f"{path.name} does not have the text of an edit once, got count={count}: {edit[0]!r}")
        source = source.replace(*edit)
    module = ModuleType(f"wild.ports.{style}")
    exec(compile(source, str(path), "exec"), module.__dict__)
    return module.port


@cache
def _right_port(style: str) -> Callable[[Problem, How], Mapping[str, Any]]:
    return port_of(style)


@lru_cache(maxsize=1024)
def _right_run(style: str, case: str, seed: int, dtype: str, how: How) -> Recorded:
    """What a right port notes: recorded in several ways, it runs once."""
    return run(style, problem_of(case, seed, dtype), how)


@lru_cache(maxsize=1024)
def _wrong_run(style: str, case: str, dtype: str, edit: tuple[str, str]) -> Recorded:
    """What a port with a bug notes: measured and diagnosed, it runs once."""
    return run(style, problem_of(case, 0, dtype), How(), edit)


def run(style: str, problem: Problem, how: How, edit: tuple[str, str] | None = None) -> Recorded:
    """What a port notes for a problem: NumPy's arrays, stages in their canonical form."""
    port = _right_port(style) if edit is None else port_of(style, edit)
    # As users have JAX: the tests are stricter.
    promotions = jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard")
    with promotions[0], promotions[1], np.errstate(all="ignore"):
        noted = port(problem, how)
    return canonical({name: parity.to_numpy(value) for name, value in noted.items()}, problem)

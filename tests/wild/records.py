"""The records of right ports and of bugs, how they run, and the half of the set to which each belongs."""

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
from parity.measure.core.problem import Problem
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
        recording: the stages that are diagnosed, and their form: a name of `RECORDINGS`.
    """

    style: str
    case: str
    seed: int
    dtype: str
    how: How
    recording: str

    @property
    def id(self) -> str:
        """All of its attributes, in one word."""
        how = f"{self.how.mode}-{'wide' if self.how.wide else 'narrow'}-{self.how.penalty}"
        return f"{self.style}/{self.case}-{self.seed}/{self.dtype}/{how}/{self.recording}"

    @property
    def kind(self) -> str:
        """Its name in tables."""
        return self.recording

    @property
    def problem(self) -> Problem:
        """The problem that the port computes."""
        return problem_of(self.case, self.seed, self.dtype)

    def recorded(self) -> Recorded:
        """All that the port noted, in the canonical form."""
        return dict(_right_run(self.style, self.case, self.seed, self.dtype, self.how))

    def observed(self) -> Recorded:
        """The stages that are diagnosed."""
        return RECORDINGS[self.recording](self.recorded(), self.problem)


@dataclass(frozen=True)
class Bug:
    """A port with one edit that makes it wrong.

    Attributes:
        id: its name.
        style: the module of the port.
        case: the layer.
        kind: what sort of bug: `axes`, `heads`, `rope`, `scale`, `mask`, `softmax`, `bias`, `norm`, `cap`, `sinks`,
            `window`, `alibi`, `precision`, `cache`, `weights`, `gain`, `gradient`, `exotic`.
        edit: the text that is replaced, which stands once in the port, and what replaces it.
        says: what is wrong, in a sentence.
        stage: the first stage that is wrong, of those that are recorded.
        limited: where that stage is wrong, if it is only in a part: indices by the letter of the axis.
        pattern: the map from the right values to the wrong ones, if a few words describe it.
        in_output: whether the output is wrong at all.
        dtype: of weights and inputs.
        recording: the stages that are diagnosed, in addition to the output alone.
    """

    id: str
    style: str
    case: str
    kind: str
    edit: tuple[str, str]
    says: str
    stage: str
    limited: Mapping[str, tuple[int, ...]]
    pattern: str
    in_output: bool
    dtype: str
    recording: str

    @property
    def problem(self) -> Problem:
        """The problem that the port computes."""
        return problem_of(self.case, 0, self.dtype)

    def recorded(self) -> Recorded:
        """All that the port noted, in the canonical form."""
        return dict(_wrong_run(self.style, self.case, self.dtype, self.edit))

    def right(self) -> Recorded:
        """The stages that the port notes without the edit."""
        return dict(_right_run(self.style, self.case, 0, self.dtype, How()))

    def observed(self, *, output_only: bool = False) -> Recorded:
        """The stages that are diagnosed."""
        return RECORDINGS["output" if output_only else self.recording](self.recorded(), self.problem)


WITH_THE_CATALOGUE = ("serve", "ring", "left", "packed", "quantized")
"""Styles that were written together with the bugs of the catalogue that name theirs."""


def half(name: str) -> str:
    """`known`, which may be looked at while the diagnosis is improved, or `held-out`, of which only rates may."""
    if name.startswith(WITH_THE_CATALOGUE):
        return "known"
    return "known" if zlib.crc32(f"wild {name}".encode()) % 2 else "held-out"


def port_of(style: str, edit: tuple[str, str] | None = None) -> Callable[[Problem, How], Mapping[str, Any]]:
    """The port, with one edit of its source.

    Raises:
        ValueError: if the text to replace does not occur in it exactly once.
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
    """Return the stages that a right port notes: recorded in several forms, it runs only once."""
    return run(style, problem_of(case, seed, dtype), how)


@lru_cache(maxsize=1024)
def _wrong_run(style: str, case: str, dtype: str, edit: tuple[str, str]) -> Recorded:
    """Return the stages that a port with a bug notes: measured and diagnosed, it runs only once."""
    return run(style, problem_of(case, 0, dtype), How(), edit)


def run(style: str, problem: Problem, how: How, edit: tuple[str, str] | None = None) -> Recorded:
    """Return the stages that a port notes for a problem, as NumPy arrays in canonical form."""
    port = _right_port(style) if edit is None else port_of(style, edit)
    # The default settings of JAX: the tests are stricter.
    promotions = jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard")
    with promotions[0], promotions[1], np.errstate(all="ignore"):
        noted = port(problem, how)
    return canonical({name: parity.to_numpy(value) for name, value in noted.items()}, problem)

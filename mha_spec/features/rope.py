"""Rotary position embedding (RoPE): pairs of features and their frequencies."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

import numpy as np

from mha_spec.errors import InputError, InputTypeError
from mha_spec.features.scaling import (
    DynamicScaling,
    LongRopeScaling,
    ProportionalScaling,
    Scaling,
    exponents,
    powers,
)
from mha_spec.record import Record
from mha_spec.rules import as_count, as_factor, as_one_of

CHOICES = {
    "rotated": ("first", "last"),
    "pairs": ("half", "interleaved"),
    "section_order": ("contiguous", "interleaved"),
    "section_frequencies": ("shared", "own", "strided"),
}


@dataclass(frozen=True, repr=False)
class Rope(Record):
    """Rotary position embedding of queries and keys: pairs of features are rotated by position *
    frequency.

    By default pair i is (i, i + H/2), with frequency theta ** (-2 i / H). Below, R is the number of
    rotated features, `rotary_dim` or H.

    Attributes:
        theta: base of the frequencies, 10000 in the paper.
        scaling: scaling of the frequencies for long contexts, or None.
        rotary_dim: R, if only some features of a head are rotated; the others are unchanged. The
            frequencies are theta ** (-2 i / R).
        rotated: rotate the `first` or the `last` R features of a head.
        pairs: features of pair i: `half`, (i, i + R/2), or `interleaved`, (2 i, 2 i + 1).
        sections: number of pairs of each position axis, R/2 in all, for positions on several axes
            (M-RoPE: time, row, column).
        section_order: pairs of an axis are `contiguous` (Qwen2-VL) or `interleaved` (Qwen3-VL).
            Interleaved, pair i belongs to axis i % axes, or to axis 0 once that axis has all its
            pairs.
        section_frequencies: series of the frequencies of sections. `shared` (Qwen2-VL's text): pair
            i has frequency i of one series, regardless of its axis. `own` (Qwen2-VL's images): pair
            j of an axis with n pairs has theta ** (-j / n). `strided` (Pixtral): pair j of axis a
            has frequency j * axes + a of one series.

    Raises:
        TypeError: if theta is not a number, scaling not a scaling, rotary_dim or a section not an
            integer.
        ValueError: if theta is not positive and finite, rotary_dim is odd, a word is unknown, or
            the fields do not fit each other.

    Source: RoFormer, arXiv:2104.09864, section 3.2.2; half-split pairs and rotary_dim as in
    GPT-NeoX; sections as in Qwen2-VL, arXiv:2409.12191, section 2.1.

    Example:
        >>> from mha_spec import Rope
        >>> Rope(theta=500_000.0).pairs
        'half'
    """

    theta: float = 10000.0
    _: KW_ONLY
    scaling: Scaling | None = None
    rotary_dim: int | None = None
    rotated: Literal["first", "last"] = "first"
    pairs: Literal["half", "interleaved"] = "half"
    sections: tuple[int, ...] | None = None
    section_order: Literal["contiguous", "interleaved"] = "contiguous"
    section_frequencies: Literal["shared", "own", "strided"] = "shared"

    def __post_init__(self) -> None:
        object.__setattr__(self, "theta", as_factor("theta", self.theta))
        if self.scaling is not None and not isinstance(self.scaling, Scaling):
            raise InputTypeError(
                "scaling", "be a scaling of mha_spec or None", scaling=self.scaling
            )
        for name, choices in CHOICES.items():
            as_one_of(name, getattr(self, name), choices)
        if self.rotary_dim is not None:
            object.__setattr__(self, "rotary_dim", as_count("rotary_dim", self.rotary_dim))
            if self.rotary_dim % 2:
                raise InputError("rotary_dim", "be even", rotary_dim=self.rotary_dim)
            if isinstance(self.scaling, ProportionalScaling):
                raise InputError(
                    "rotary_dim",
                    "be left out with ProportionalScaling, "
                    "whose frequencies are computed for the whole head",
                    rotary_dim=self.rotary_dim,
                )
        if self.sections is not None:
            self._check_sections()
        if self.section_frequencies != "shared":
            self._check_section_frequencies()

    def given(self) -> dict[str, Any]:
        """Arguments by name that make an equal record: theta, and the fields that differ from their
        defaults.
        """
        # So that messages about differing layers include theta.
        return {"theta": self.theta} | super().given()

    def _check_sections(self) -> None:
        if isinstance(self.sections, (str, bytes)) or not np.iterable(self.sections):
            raise InputTypeError(
                "sections", "be integers, one for each axis", sections=self.sections
            )
        sections = tuple(as_count("sections", section) for section in self.sections)
        object.__setattr__(self, "sections", sections)
        if len(sections) < 2:
            raise InputError("sections", "be two or more", sections=sections)

    def _check_section_frequencies(self) -> None:
        if self.sections is None or (
            self.section_frequencies == "strided" and len(set(self.sections)) > 1
        ):
            if self.sections is None:
                rule = "be set"
            else:
                rule = "be equal"
            raise InputError(
                "sections",
                f"{rule} with {self.section_frequencies} frequencies",
                sections=self.sections,
            )
        if self.scaling is not None:
            raise InputError(
                "scaling",
                f"be None with {self.section_frequencies} frequencies",
                scaling=self.scaling,
            )

    @property
    def attention_factor(self) -> float:
        """Factor of cosines and sines: 1 except for some scalings."""
        if self.scaling is None:
            return 1.0
        return self.scaling.amplitude()

    @property
    def depends_on_length(self) -> bool:
        """True if the frequencies of a call depend on its last position."""
        return isinstance(self.scaling, (DynamicScaling, LongRopeScaling))

    def rotated_features(self, head_dim: int) -> slice:
        """Return the rotated features of a head, as a slice of H.

        Raises:
            TypeError: if head_dim is not an integer.
            ValueError: if heads of this width cannot be rotated.
        """
        check_rotated(head_dim, self)
        count = head_dim if self.rotary_dim is None else self.rotary_dim
        if self.rotated == "first":
            return slice(0, count)
        return slice(head_dim - count, head_dim)

    def pair_features(self, head_dim: int) -> np.ndarray:
        """Return the two features of each rotated pair, as indices of H: int, (2, R/2).

        The first row has the first feature of each pair, the second row the second one.

        Raises:
            TypeError: if head_dim is not an integer.
            ValueError: if heads of this width cannot be rotated.
        """
        rotated = self.rotated_features(head_dim)
        features = np.arange(rotated.start, rotated.stop)
        if self.pairs == "interleaved":
            return features.reshape(-1, 2).T
        return features.reshape(2, -1)

    def pair_order(self, head_dim: int) -> np.ndarray:
        """Return the features of a head with the two of each pair next to each other: int, (H,).

        Other features stay in place. Interleaved pairs are in this order already.

        Raises:
            TypeError: if head_dim is not an integer.
            ValueError: if heads of this width cannot be rotated.
        """
        order = np.arange(head_dim)
        order[self.rotated_features(head_dim)] = self.pair_features(head_dim).T.reshape(-1)
        return order

    def frequencies(self, head_dim: int, length: int = 0) -> np.ndarray:
        """Return the angle, in radians per token, of each pair of features: float32, (R/2,).

        Args:
            head_dim: features of a head, H.
            length: last position of the call + 1. Only `DynamicScaling` and `LongRopeScaling`
                depend on it; 0 means a call within the original length.

        Raises:
            TypeError: if head_dim is not an integer.
            ValueError: if heads of this width cannot be rotated.
        """
        rotated = self.rotated_features(head_dim)
        count = rotated.stop - rotated.start
        if self.scaling is None:
            return 1.0 / powers(self.theta, self.exponents(head_dim))
        return self.scaling.frequencies(self.theta, count, length)

    def exponents(self, head_dim: int) -> np.ndarray:
        """Return -log of each pair's unscaled frequency to the base theta: float32, (R/2,).

        Raises:
            TypeError: if head_dim is not an integer.
            ValueError: if heads of this width cannot be rotated.
        """
        rotated = self.rotated_features(head_dim)
        pairs = (rotated.stop - rotated.start) // 2
        if self.sections is None or self.section_frequencies == "shared":
            return exponents(pairs, 2 * pairs)
        axes = _axes(pairs, self.sections, self.section_order)
        num_axes = len(self.sections)
        # Index of each pair within its axis.
        own = [axes[:pair].count(axis) for pair, axis in enumerate(axes)]
        if self.section_frequencies == "own":
            return np.array(own, np.float32) / np.array(
                [self.sections[axis] for axis in axes], np.float32
            )
        return exponents(pairs, 2 * pairs)[
            [num_axes * index + axis for index, axis in zip(own, axes, strict=True)]
        ]

    def axes(self, head_dim: int) -> np.ndarray:
        """Return the position axis of each pair of features: int, (R/2,).

        Raises:
            TypeError: if head_dim is not an integer.
            ValueError: if heads of this width cannot be rotated.
        """
        rotated = self.rotated_features(head_dim)
        pairs = (rotated.stop - rotated.start) // 2
        return np.array(_axes(pairs, self.sections or (pairs,), self.section_order), np.int64)


def _axes(pairs: int, sections: tuple[int, ...], order: str) -> list[int]:
    """Return the axis of each pair, in plain Python: torch.compile does not know the values of
    NumPy's scalars.
    """
    if order == "contiguous":
        return [axis for axis, section in enumerate(sections) for _ in range(section)]
    turns = [divmod(pair, len(sections)) for pair in range(pairs)]
    return [axis if turn < sections[axis] else 0 for turn, axis in turns]


def check_rotated(head_dim: int, rope: Rope) -> None:
    """Reject heads that cannot be rotated."""
    as_count("head_dim", head_dim)
    if rope.rotary_dim is None and head_dim % 2:
        raise InputError("head_dim", "be even for RoPE", head_dim=head_dim)
    if rope.rotary_dim is not None and rope.rotary_dim > head_dim:
        raise InputError(
            "rotary_dim", "be at most head_dim", rotary_dim=rope.rotary_dim, head_dim=head_dim
        )
    count = head_dim if rope.rotary_dim is None else rope.rotary_dim
    if rope.scaling is not None:
        rope.scaling.check(rope.theta, count)
    if rope.sections is None:
        return
    if sum(rope.sections) != count // 2:
        raise InputError(
            "sections", f"be {count // 2} rotated pairs in all", sections=rope.sections
        )
    axes = _axes(count // 2, rope.sections, rope.section_order)
    available = tuple(axes.count(axis) for axis in range(len(rope.sections)))
    if available != rope.sections:
        raise InputError(
            "interleaved sections",
            f"fit {count // 2} pairs",
            f"sections={rope.sections}, which would have {available}",
        )


def check_rope(rope: object) -> None:
    """Reject anything but a `Rope`, such as a bare theta.

    Raises:
        TypeError: if it is anything else.
    """
    if not isinstance(rope, Rope):
        raise InputTypeError("rope", "be a Rope", rope=rope)


def position_shapes(batch_size: int, seq_len: int, rope: Rope | None) -> str:
    """Return the permitted shapes of positions, as text."""
    plain = f"(B or 1, T) = ({batch_size} or 1, {seq_len})"
    if rope is None or rope.sections is None:
        return plain
    return f"{plain} or (axes, B or 1, T) = ({len(rope.sections)}, {batch_size} or 1, {seq_len})"

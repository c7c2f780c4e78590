"""Learned relative position biases."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mha_spec.errors import InputError
from mha_spec.record import Record
from mha_spec.rules import as_boolean, as_count


@dataclass(frozen=True, repr=False)
class RelativeBias(Record):
    """Learned bias for each head and bucket of distances.

    Half of the buckets, rounded down, hold one distance each: 0, 1, …. The others widen
    logarithmically, and the last one holds all distances of at least `max_distance` tokens.

    Attributes:
        num_buckets: number of buckets.
        max_distance: distance from which all keys share the last bucket.
        bidirectional: use the second half of the buckets for keys after the query, each half
            divided as above; otherwise these keys share the bucket of distance 0.

    Raises:
        TypeError: if a number is not an integer, or bidirectional not a boolean.
        ValueError: if a direction has fewer than two buckets, two directions have an odd number, or
            max_distance is not above the distances with their own bucket.

    Source: Exploring the Limits of Transfer Learning, arXiv:1910.10683, section 2.1, and the code
    of T5.
    """

    num_buckets: int = 32
    max_distance: int = 128
    bidirectional: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "bidirectional", as_boolean("bidirectional", self.bidirectional))
        if self.bidirectional:
            num_directions = 2
        else:
            num_directions = 1
        object.__setattr__(
            self, "num_buckets", as_count("num_buckets", self.num_buckets, 2 * num_directions)
        )
        if self.num_buckets % num_directions:
            raise InputError(
                "num_buckets", "be even if bidirectional", num_buckets=self.num_buckets
            )
        object.__setattr__(self, "max_distance", as_count("max_distance", self.max_distance))
        num_exact = self.num_buckets // num_directions // 2
        if self.max_distance <= num_exact:
            raise InputError(
                "max_distance",
                f"be above the {num_exact} distances that have a bucket each",
                max_distance=self.max_distance,
                num_buckets=self.num_buckets,
            )

    def buckets(self) -> np.ndarray:
        """Return the bucket of each distance, key - query, from -max_distance to max_distance.

        The result is int, (2 * max_distance + 1,). Larger distances share the bucket of the nearer
        end.
        """
        distances = np.arange(-self.max_distance, self.max_distance + 1)
        if self.bidirectional:
            count = self.num_buckets // 2
            away = np.abs(distances)
            first = count * (distances > 0)
        else:
            count = self.num_buckets
            away = np.maximum(-distances, 0)
            first = 0
        num_exact = count // 2
        # T5 rounds each step to float32, which decides where buckets begin. (T5 itself may differ
        # at a few distances for unusual settings: the last bit of torch's logarithm depends on the
        # processor.)
        ratios = (np.maximum(away, num_exact) / num_exact).astype(np.float32)
        logarithms = np.log(ratios, dtype=np.float64).astype(np.float32)
        steps = (
            logarithms
            / np.float32(math.log(self.max_distance / num_exact))
            * np.float32(count - num_exact)
        )
        shared = np.minimum(num_exact + steps.astype(np.int64), count - 1)
        return first + np.where(away < num_exact, away, shared)


@dataclass(frozen=True, repr=False)
class GridBias(Record):
    """Learned bias for each head and 2D offset between query and key on a grid.

    The tokens of a call are the first ones of a grid in row-major order: token i is in row i //
    width, column i % width. Pairs of query and key share a bucket if their row and column
    differences are equal.

    Attributes:
        height: number of rows.
        width: number of tokens in a row.
        class_token: a token without grid coordinates comes first. Three more buckets, the last
            ones, are for the class token as the query, as the key, and as both.

    Raises:
        TypeError: if a size is not an integer, or class_token not a boolean.
        ValueError: if a size is not positive.

    Source: Swin Transformer, arXiv:2103.14030, section 3.2; the class token: BEiT,
    arXiv:2106.08254.
    """

    height: int
    width: int
    class_token: bool = False

    _positional: ClassVar[tuple[str, ...]] = ("height", "width")

    def __post_init__(self) -> None:
        for name in ("height", "width"):
            object.__setattr__(self, name, as_count(name, getattr(self, name)))
        object.__setattr__(self, "class_token", as_boolean("class_token", self.class_token))

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the grid, including the class token."""
        return self.height * self.width + self.class_token

    @property
    def num_buckets(self) -> int:
        """Number of buckets: row and column differences, and three for a class token."""
        return (2 * self.height - 1) * (2 * self.width - 1) + 3 * self.class_token

    def buckets(self) -> np.ndarray:
        """Return the bucket of each query and key, int, (num_tokens, num_tokens)."""
        row, column = np.divmod(np.arange(self.height * self.width), self.width)
        rows = row[:, None] - row + self.height - 1
        columns = column[:, None] - column + self.width - 1
        buckets = rows * (2 * self.width - 1) + columns
        if not self.class_token:
            return buckets
        buckets = np.pad(buckets, ((1, 0), (1, 0)))
        buckets[0, 1:], buckets[1:, 0], buckets[0, 0] = range(
            self.num_buckets - 3, self.num_buckets
        )
        return buckets


def check_grid(
    relative_bias: RelativeBias | GridBias | None, scores_shape: tuple[int, ...]
) -> None:
    """Reject scores (B, N, T, S) of more tokens than the grid of the relative bias has, if it has
    one.

    Raises:
        ValueError: if there are more queries or keys.
    """
    if isinstance(relative_bias, GridBias) and max(scores_shape[2:]) > relative_bias.num_tokens:
        raise InputError(
            "tokens",
            f"be at most the {relative_bias.num_tokens} of the grid",
            {"(T, S)": scores_shape[2:]},
        )

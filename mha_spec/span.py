"""Local attention span (sliding window or chunks), independent of causality."""

from __future__ import annotations

from typing import Any, NamedTuple

from mha_spec.errors import InputError
from mha_spec.rules import as_count


class Span(NamedTuple):
    """Keys that a query may attend to, by position.

    Exactly one of the two is set: see `span_of`.

    Attributes:
        window_size: queries attend to keys less than this many positions away; or None.
        chunk_size: queries attend to keys of their own chunk of this many positions; or None.

    Source: windows as in Longformer, arXiv:2004.05150, section 3.1, and Mistral 7B,
    arXiv:2310.06825, section 2; chunks as in Llama 4.
    """

    window_size: int | None = None
    chunk_size: int | None = None

    def first(self, positions: Any) -> Any:
        """Return the first key that a query at a position attends to, possibly below 0.

        Positions are integers or arrays of them.
        """
        if self.chunk_size is not None:
            return positions // self.chunk_size * self.chunk_size
        # `or 0` is for type checkers: without chunks there is a window.
        return positions - (self.window_size or 0) + 1

    def stop(self, positions: Any) -> Any:
        """Return the key after the last that a query at a position attends to, possibly beyond the
        last key.
        """
        if self.chunk_size is not None:
            return self.first(positions) + self.chunk_size
        return positions + (self.window_size or 0)


def span_of(window_size: int | None, chunk_size: int | None) -> Span | None:
    """Return the attention span, or None for all keys.

    Raises:
        TypeError: if a size is not an integer.
        ValueError: if a size is below 1, or both are set.
    """
    for name, size in (("window_size", window_size), ("chunk_size", chunk_size)):
        if size is not None:
            as_count(name, size)
    if window_size is not None and chunk_size is not None:
        raise InputError(
            "window_size", "be None with chunk_size", window_size=window_size, chunk_size=chunk_size
        )
    if window_size is None and chunk_size is None:
        return None
    return Span(window_size, chunk_size)

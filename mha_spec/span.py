"""How far a query sees: a sliding window, or a chunk. What of the keys it may see by causality is another matter."""

from __future__ import annotations

from typing import Any, NamedTuple

from mha_spec.refusal import Refusal
from mha_spec.rules import as_count


class Span(NamedTuple):
    """The places, among the keys, that a query may see by its own.

    Attributes:
        window_size: a query sees keys less than this many places away, so many up to its own place; or None.
        chunk_size: a query sees the keys of its own chunk, the chunks being so many places long; or None.

    Source: windows as in Longformer, arXiv:2004.05150, section 3.1, and Mistral 7B, arXiv:2310.06825, section 2; chunks
    as in Llama 4.
    """

    window_size: int | None = None
    chunk_size: int | None = None

    def first(self, places: Any) -> Any:
        """The first key that is seen from a place, perhaps before the first that there is; of integers or arrays."""
        if self.chunk_size is not None:
            return places // self.chunk_size * self.chunk_size
        return places - (self.window_size or 0) + 1

    def stop(self, places: Any) -> Any:
        """The key after the last that is seen from a place, perhaps beyond the last that there is."""
        if self.chunk_size is not None:
            return self.first(places) + self.chunk_size
        return places + (self.window_size or 0)


def span_of(window_size: int | None, chunk_size: int | None) -> Span | None:
    """How far a query sees; None where that is everything.

    Raises:
        TypeError: if a size is not an integer.
        ValueError: if a size is below 1, or there are both.
    """
    for name, size in (("window_size", window_size), ("chunk_size", chunk_size)):
        if size is not None:
            as_count(name, size)
    if window_size is not None and chunk_size is not None:
        raise Refusal("window_size", "be None with chunk_size", window_size=window_size, chunk_size=chunk_size)
    return None if window_size is None and chunk_size is None else Span(window_size, chunk_size)

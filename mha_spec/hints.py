"""Advice at the end of errors that several implementations raise."""

from __future__ import annotations

OF_NUMBERS = "if 1 means attend, pass mask == 0; if it is added to the scores, pass it as bias"
"""About a mask of floats. Passed as a bias, a mask of ones and zeros would run, and hide
nothing.
"""

NEW_CACHE = "layer.init_cache(batch_size, capacity) returns an empty one"
"""About a cache that is missing, or something else."""

WRITTEN_OVER = (
    "use the cache that the step returned; cache.copy() before the step has its own storage, "
    "and checkpoint(…, use_reentrant=False) repeats no step"
)
"""About a cache whose storage a step has written to."""


def missing_axes(name: str, shape: tuple[int, ...], scores_shape: tuple[int, ...]) -> str:
    """Return how to broadcast an array (B, T, S) or (B, S) to the scores, or "" if its shape is
    neither.
    """
    if len(scores_shape) != 4:
        return ""
    batch_size, _, seq_len_q, seq_len_k = scores_shape
    if tuple(shape) == (batch_size, seq_len_q, seq_len_k):
        return f"pass {name}[:, None] for an array (B, T, S)"
    if tuple(shape) != (batch_size, seq_len_k):
        return ""
    hint = f"pass {name}[:, None, None] for an array (B, S)"
    if name == "mask":
        hint += ", or the lengths of sequences: key_padding_lengths, with a cache new_lengths"
    return hint

"""Core of a run: cases and stages, weights, the reference, comparison, traces."""

"""Tools for those who work on `parity`, in a clone of the repository only: benchmarks, the
self-test, recordings.
"""

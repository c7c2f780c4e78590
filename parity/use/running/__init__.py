"""Cases x backends -> report, recorded here or read from traces.

- `Report` (`report`): the comparisons of a run, and where it ran.

Start at `run.run_cases`; `jobs` runs parts in other processes and `elsewhere` with another Python.
"""

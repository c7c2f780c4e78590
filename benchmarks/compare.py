"""Compare two runs of `mha-parity bench --json` row by row: how much faster or slower is the
second?

    python benchmarks/compare.py BEFORE.json AFTER.json [--allow 0.1] [--relative]

Exit status 1 if the time or the memory of a row grew by more than --allow; 2 if a file has a
different format.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SCHEMA = {"schema": "mha-parity/bench", "version": 1}
KEY = ("what", "framework", "shape", "dtype")


def read_rows(path: str) -> dict[str, dict[str, Any]]:
    """Return the rows in a file, by the name of their measurement.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if it is not a benchmark file.
    """
    content = json.loads(Path(path).read_text("utf-8"))
    has_schema = isinstance(content, dict) and SCHEMA.items() <= content.items()
    if not has_schema or "rows" not in content:
        raise ValueError(
            f"{path} must be written by mha-parity bench --json, in version {SCHEMA['version']}"
        )
    return {name_of(row): row for row in content["rows"]}


def name_of(row: dict[str, Any]) -> str:
    """Return the name of the measurement of a row: `decode jax 1x4096x1024 float32`."""
    words = []
    for key in KEY:
        value = row[key]
        if not value:
            continue
        if isinstance(value, list):
            value = "x".join(str(size) for size in value)
        words.append(str(value))
    return " ".join(words)


def value_of(row: dict[str, Any], *, relative: bool) -> float | None:
    """Return the compared value of a row: our time in ms, or its ratio to the limit; memory in
    bytes if no time was measured.
    """
    if row["ours_ms"] is None:
        return row["peak_bytes"]
    if relative:
        return row["limit_ratio"]
    return row["ours_ms"]


def compare(
    before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]], *, relative: bool = False
) -> list[tuple[str, float, float, float]]:
    """Return (row, before, after, after / before) for all common rows, the worst one first."""
    compared = []
    for name in before.keys() & after.keys():
        old = value_of(before[name], relative=relative)
        new = value_of(after[name], relative=relative)
        if old and new is not None:
            compared.append((name, old, new, new / old))
    # Names decide between equal ratios, so that the order does not depend on the set.
    return sorted(compared, key=lambda row: (-row[3], row[0]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare and print.

    Args:
        arguments: command-line arguments; default: the arguments of the process.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("before", metavar="BEFORE")
    parser.add_argument("after", metavar="AFTER")
    parser.add_argument(
        "--allow", type=float, default=0.1, metavar="SHARE", help="how much slower; 0.1 by default"
    )
    parser.add_argument(
        "--relative", action="store_true", help="compare times as shares of each run's own limit"
    )
    options = parser.parse_args(arguments)
    try:
        if options.allow < 0:
            raise ValueError(f"--allow must be at least 0, got {options.allow}")
        before, after = read_rows(options.before), read_rows(options.after)
        rows = compare(before, after, relative=options.relative)
        if not rows:
            raise ValueError(
                f"both files must have a row in common, got {options.before} and {options.after}"
            )
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"compare: {error}", file=sys.stderr)
        return 2
    width = max(len(name) for name, *_ in rows)
    print(f"{'row':{width}} {'before':>10} {'after':>10} {'after / before':>15}")
    num_worse = 0
    for name, old, new, ratio in rows:
        if after[name]["ours_ms"] is not None:
            unit = 1.0
            if_worse = "slower"
        else:
            unit = 1e-6  # bytes are printed in MB
            if_worse = "larger"
        remark = ""
        if ratio > 1 + options.allow:
            num_worse += 1
            remark = f"  {if_worse}"
        print(f"{name:{width}} {old * unit:10.4g} {new * unit:10.4g} {ratio:15.3f}{remark}")
    print_missing(options.before, before.keys() - after.keys())
    print_missing(options.after, after.keys() - before.keys())
    print(
        f"{len(rows)} rows compared, {num_worse} worse by more than {options.allow:.0%}; times in "
        f"ms, memory in MB"
    )
    return 1 if num_worse else 0


def print_missing(path: str, names: set[str]) -> None:
    """Print how many rows only one of the files has, with an example."""
    if names:
        print(f"only in {path}: {len(names)} rows, such as {min(names)}")


if __name__ == "__main__":
    sys.exit(main())

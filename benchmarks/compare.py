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
    if (
        not isinstance(content, dict)
        or not SCHEMA.items() <= content.items()
        or "rows" not in content
    ):
        raise ValueError(
            f"{path} must be written by mha-parity bench --json, in version {SCHEMA['version']}"
        )
    return {" ".join(_word(row[name]) for name in KEY if row[name]): row for row in content["rows"]}


def _word(value: Any) -> str:
    return "x".join(map(str, value)) if isinstance(value, list) else str(value)


def value_of(row: dict[str, Any], *, relative: bool) -> float | None:
    """Return the compared value of a row: our time, or its share of the limit; memory if no time
    was measured.
    """
    if row["ours_ms"] is None:
        return row["peak_bytes"]
    return row["limit_ratio"] if relative else row["ours_ms"]


def compare(
    before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]], *, relative: bool = False
) -> list[tuple[str, float, float, float]]:
    """Return (row, before, after, after / before) for all common rows, the worst one first."""
    found = []
    for name in before.keys() & after.keys():
        old, new = (value_of(rows[name], relative=relative) for rows in (before, after))
        if old and new is not None:
            found.append((name, old, new, new / old))
    return sorted(found, key=lambda row: (-row[3], row[0]))


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
    for name, old, new, ratio in rows:
        unit = 1.0 if after[name]["ours_ms"] is not None else 1e-6
        slower = (
            "  slower"
            if ratio > 1 + options.allow and unit == 1.0
            else "  larger"
            if ratio > 1 + options.allow
            else ""
        )
        print(f"{name:{width}} {old * unit:10.4g} {new * unit:10.4g} {ratio:15.3f}{slower}")
    for path, own, other in ((options.before, before, after), (options.after, after, before)):
        if only := sorted(own.keys() - other.keys()):
            print(f"only in {path}: {len(only)} rows, such as {only[0]}")
    worse = sum(ratio > 1 + options.allow for *_, ratio in rows)
    print(
        f"{len(rows)} rows compared, {worse} worse by more than {options.allow:.0%}; times in "
        f"ms, memory in MB"
    )
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())

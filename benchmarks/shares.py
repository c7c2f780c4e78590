"""Write the worst share of the budget of each case of a run into simulated-blackhole.json.

    python benchmarks/shares.py REPORT.json

REPORT.json comes from the command in that file, on a simulator. Cases that it lacks keep their
share.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

SHARES = Path(__file__).parent / "simulated-blackhole.json"


def shares_of(report: dict[str, Any]) -> dict[str, dict[str, float | None]]:
    """Return the worst error / budget over all stages of each case, by dtype; None if it has no
    finite share.

    Raises:
        ValueError: if the run was not on a simulator.
    """
    device = report["environment"]["backends"].get("tt", {}).get("device", "no tt")
    if not device.startswith("simulator"):
        raise ValueError(f"the run must be on a simulator, got {device}")
    found: dict[str, dict[str, float | None]] = {}
    for result in report["results"]:
        if result["status"] in ("passed", "failed"):
            of_case, dtype = found.setdefault(result["case"], {}), result["dtype"]
            before, ratio = of_case.get(dtype, 0.0), result["ratio"]
            is_finite = before is not None and ratio is not None
            of_case[dtype] = (
                round(max(before, ratio, result["local_ratio"] or 0.0), 2) if is_finite else None
            )
    return found


def main(path: str) -> None:
    """Update the file."""
    content = json.loads(SHARES.read_text("utf-8"))
    content["cases"] |= shares_of(json.loads(Path(path).read_text("utf-8")))
    SHARES.write_text(json.dumps(content, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])

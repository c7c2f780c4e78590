"""Measure the results that pages show, and write them to docs/data.

python tools/docs-site/measure.py conformance      # `mha-parity conformance --libraries`; minutes
python tools/docs-site/measure.py selftest         # `mha-parity selftest`; minutes
python tools/docs-site/measure.py diagnosis-rates  # `tools/diagnosis-rates`; 16 minutes of one core
python tools/docs-site/measure.py margins          # `mha-parity run` with every case; 10 minutes
python tools/docs-site/measure.py selftest --from FILE   # which the command wrote with --json
"""

import argparse
import json
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
MARGIN_DTYPES = ("float32", "bfloat16", "float16", "float64")
COMMANDS = {
    "conformance": "mha-parity conformance --libraries",
    "selftest": "mha-parity selftest",
    "diagnosis-rates": "tools/diagnosis-rates",
    "margins": (
        f"mha-parity run --backends jax,torch --cases all --dtypes {','.join(MARGIN_DTYPES)} "
        "--grad --jobs 2"
    ),
}
PACKAGES = {
    "conformance": ("torch", "jax", "flax", "keras", "equinox"),
    "selftest": ("torch", "jax"),
    "diagnosis-rates": ("numpy", "torch", "jax"),
    "margins": ("numpy", "torch", "jax"),
}


def of_conformance(report: dict) -> dict:
    """The words and the status of each answer."""
    subjects = [subject for subject in report["subjects"] if not subject["missing"]]
    return {
        "subjects": [
            {
                "name": subject["name"],
                "answers": {
                    one["question"]: [one["status"], one["words"]] for one in subject["answers"]
                },
            }
            for subject in subjects
        ]
    }


def of_selftest(report: dict) -> dict:
    """How often each bug was injected, detected and identified; the name without a bug is empty."""
    bugs = {}
    for outcome in report["outcomes"]:
        counts = bugs.setdefault(outcome["bug"], [0, 0, 0])
        for i, holds in enumerate((True, outcome["is_caught"], outcome["is_named"])):
            counts[i] += holds
    return {"bugs": dict(sorted(bugs.items()))}


def of_diagnosis_rates(verdicts: list) -> dict:
    """The counts of each half."""
    from wild.rates import GRADES, grade_of, is_caught, is_clean, is_located

    halves = {}
    for half in ("known", "held-out"):
        rights = [
            verdict for verdict in verdicts if verdict["half"] == half and verdict["is_right"]
        ]
        counts = {
            "rights": len(rights),
            "false_alarms": sum(not is_clean(verdict) for verdict in rights),
        }
        for prefix, output_only in (("", False), ("output_", True)):
            bugs = [
                verdict
                for verdict in verdicts
                if verdict["half"] == half and not verdict["is_right"]
            ]
            bugs = [verdict for verdict in bugs if verdict["output_only"] == output_only]
            bugs = [verdict for verdict in bugs if verdict["in_output"] or not output_only]
            names_graded = [grade_of(verdict) for verdict in bugs]
            counts |= {
                f"{prefix}bugs": len(bugs),
                f"{prefix}caught": sum(map(is_caught, bugs)),
                f"{prefix}named": sum(bool(verdict["names"]) for verdict in bugs),
                f"{prefix}graded": [names_graded.count(name) for name in GRADES[:3]],
                f"{prefix}located": sum(map(is_located, bugs)),
            }
            if not output_only:
                counts["first"] = sum(verdict.get("first") == verdict["stage"] for verdict in bugs)
        halves[half] = counts
    return {"halves": halves}


def of_margins(report: dict) -> dict:
    """How much of their budget the stages use, by backend and dtype, and the cases."""
    passed = [result for result in report["results"] if result["status"] == "passed"]
    # Masks and lengths must agree exactly: they have no budget.
    measured = [result for result in passed if result["budget"]]
    rows = []
    for backend in ("torch", "jax"):
        for dtype in MARGIN_DTYPES:
            of_row = [
                result
                for result in measured
                if (result["backend"], result["dtype"]) == (backend, dtype)
            ]
            by_use = sorted(of_row, key=used)
            worst = by_use[-1]
            rows.append(
                {
                    "backend": backend,
                    "dtype": dtype,
                    "stages": len(by_use),
                    "half": round(used(by_use[len(by_use) // 2]), 2),
                    "most": round(used(by_use[len(by_use) * 99 // 100]), 2),
                    "worst": round(used(worst), 2),
                    "case": worst["case"],
                    "stage": worst["stage"],
                }
            )
    of_slope = [used(result) for result in measured if result["norm"] == "slope"]
    return {
        "failed": report["summary"]["failed"],
        "cases": list(dict.fromkeys(result["case"] for result in passed)),
        "slope": round(max(of_slope), 2),
        "rows": rows,
    }


def used(result: dict) -> float:
    """The share of its budget that a stage uses: as it ran, or of its own step."""
    return max(result["ratio"], result["local_ratio"] or 0.0)


SUMMARIES = {
    "conformance": of_conformance,
    "selftest": of_selftest,
    "diagnosis-rates": of_diagnosis_rates,
    "margins": of_margins,
}


def main() -> None:
    """Run the command, unless its results are in a file, and keep the part that pages show."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=COMMANDS)
    parser.add_argument(
        "--from", dest="results", type=Path, metavar="FILE", help="results of the command"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = options.results or Path(folder) / "results.json"
        if options.results is None:
            words = (
                COMMANDS[options.name].replace("mha-parity", f"{sys.executable} -m parity").split()
            )
            words = [sys.executable, *words] if words[0].startswith("tools/") else words
            status = subprocess.run([*words, "--json", str(results)], cwd=ROOT).returncode
            if not results.exists():
                sys.exit(status or 1)
        report = json.loads(results.read_text("utf-8"))
    packages = {name: metadata.version(name).partition("+")[0] for name in PACKAGES[options.name]}
    summary = {
        "command": COMMANDS[options.name],
        "packages": packages,
        **SUMMARIES[options.name](report),
    }
    path = ROOT / "docs" / "data" / f"{options.name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(summary, indent=1, ensure_ascii=False) + "\n", "utf-8")
    print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()

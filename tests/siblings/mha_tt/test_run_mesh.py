"""`mha-parity mesh` on mock boards of several chips, and its errors; test_parallel.py checks
the results.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from helpers import ROOT
from helpers.input_errors import rejects

from mha_spec import AttentionSpec, Norm
from parity import CASES
from parity.use.cli.main import main
from parity_lab.mesh import tt as tt_mesh
from parity_lab.mesh.plan import MeshPlan

pytestmark = pytest.mark.usefixtures("only_mock")


RUNS = """
import os, sys
import torch, ttnn
from parity.use.cli.main import main

what = ["--backends", "tt", "--cases", "*qa-causal"]
# Each is a fork, for a process opens chips or a mesh of them, and imports take longest.
for command in (["run"], ["mesh", "tensor=2", *sys.argv[1:]]):
    if not os.fork():
        code = main([*command, *what])
        sys.stdout.flush()
        os._exit(code)
    if os.wait()[1]:
        sys.exit(1)
    print("====", flush=True)
"""


@pytest.mark.costly("a process has one board for good")
@pytest.mark.thorough
def test_mesh_run_reports_stages_and_traffic(tmp_path):
    """Runs on one chip and on both report passed stages; only the latter reports traffic, one all-
    reduce for each program.
    """
    path = tmp_path / "report.json"
    variables = {
        name: value for name, value in os.environ.items() if not name.startswith("TT_METAL")
    }
    variables |= {"MHA_TT_MOCK": "n300", "PYTHONPATH": str(ROOT)}
    options = {
        "env": variables,
        "cwd": tmp_path,
        "capture_output": True,
        "text": True,
        "timeout": 300,
    }
    program = [sys.executable, "-c", RUNS, "--json", str(path)]
    done = subprocess.run(program, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    alone, printed, _ = done.stdout.split("====\n")
    assert "tt agrees with the float64 reference: 1 case, 11 stages passed" in alone
    assert "Traffic between devices" not in alone
    assert "tt fused.forward: 1 all-reduce: 1" in printed
    report = json.loads(path.read_text())
    stages = {result["stage"] for result in report["results"] if result["status"] == "passed"}
    assert {"q", "k", "v", "scores", "attn_weights", "context", "output", "fused.output"} <= stages
    assert len(report["environment"]["backends"]["tt"]["devices"]) == 2
    assert report["environment"]["mesh"] == "tensor=2"
    programs = [collective["program"] for collective in report["collectives"]]
    assert programs == ["forward", "fused.forward"]
    assert all(collective["counted"] == collective["ideal"] for collective in report["collectives"])


def test_indivisible_cases_are_skipped():
    """Cases that tensor parallelism cannot divide are skipped with the reason."""
    plan = MeshPlan(tensor=2)
    width = replace(CASES["gqa"], spec=AttentionSpec(32, 8, qk_norm=Norm(over="width")))
    assert rejects("q_norm").is_printed_in(tt_mesh.why_skipped(width, "float32", plan))
    assert rejects("alibi").is_printed_in(tt_mesh.why_skipped(CASES["alibi"], "float32", plan))
    assert (
        tt_mesh.why_skipped(CASES["gqa"], "float32", MeshPlan(tensor=3))
        == "tensor=3 does not divide 8 query heads"
    )
    assert tt_mesh.why_skipped(CASES["random-mask"], "float32", plan).startswith(
        "a mask per head would differ"
    )
    assert tt_mesh.why_skipped(CASES["fused-qkv"], "float32", plan) is None


@pytest.mark.parametrize(
    ("arguments", "input_error"),
    [
        (["data=2"], rejects("mesh", "data=2")),
        (["sequence=2,tensor=2"], rejects("mesh", "tensor=2,sequence=2")),
        (["tensor=16"], rejects("mesh", "tensor=16")),
        (["tensor=2", "--virtual-devices", "2"], rejects("--virtual-devices", "tt")),
    ],
)
def test_unsupported_meshes_fail_in_one_line(arguments, input_error, capsys):
    """A mesh that chips do not support exits with 2 and prints one line that names the mesh."""
    assert main(["mesh", *arguments, "--backends", "tt", "--cases", "causal"]) == 2
    printed = capsys.readouterr().err
    assert input_error.is_printed_in(printed)
    assert printed.count("\n") == 1

"""`mha-parity run --mesh` on mock boards of several chips, and its errors; test_parallel.py checks
the results.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from helpers import ROOT
from helpers.refusals import refuses

from mha_spec import AttentionSpec, Norm
from parity import CASES
from parity.measure.backends import tt_mesh
from parity.measure.sharding.mesh import MeshPlan, collectives_of
from parity.use.cli.main import main
from parity.use.running.traces import load_trace

pytestmark = pytest.mark.usefixtures("only_mock")


RUNS = """
import os, sys
import torch, ttnn
from parity.use.cli.main import main

run = ["run", "--backends", "tt", "--cases", "*qa-causal"]
for more in ([], sys.argv[1:]):  # each a fork, for a process opens chips or a mesh of them, and imports take longest
    if not os.fork():
        code = main([*run, *more])
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
    reduce, and saves it in its trace.
    """
    report = tmp_path / "report.json"
    mesh = ["--mesh", "tensor=2", "--json", str(report), "--save-traces", str(tmp_path)]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TT_METAL")}
    kept |= {"MHA_TT_MOCK": "n300", "PYTHONPATH": str(ROOT)}
    options = {"env": kept, "cwd": tmp_path, "capture_output": True, "text": True, "timeout": 300}
    done = subprocess.run([sys.executable, "-c", RUNS, *mesh], check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    alone, printed, _ = done.stdout.split("====\n")
    assert "tt agrees with the float64 reference: 1 case, 11 stages passed" in alone
    assert "Traffic between devices" not in alone
    assert "tt fused.forward: 1 all-reduce: 1" in printed
    held = json.loads(report.read_text())
    stages = {each["stage"] for each in held["results"] if each["status"] == "passed"}
    assert {"q", "k", "v", "scores", "attn_weights", "context", "output", "fused.output"} <= stages
    assert len(held["environment"]["backends"]["tt"]["devices"]) == 2
    trace = load_trace(tmp_path / "gqa-causal-float32-tt.safetensors")
    assert trace.numerics["mesh"] == "tensor=2"
    assert [(each.program, each.is_ideal) for each in collectives_of(trace)] == [
        ("forward", True),
        ("fused.forward", True),
    ]


def test_indivisible_cases_are_skipped():
    """Cases that tensor parallelism cannot divide are skipped with the reason."""
    plan = MeshPlan(tensor=2)
    width = replace(CASES["gqa"], spec=AttentionSpec(32, 8, qk_norm=Norm(over="width")))
    assert refuses("q_norm").is_printed_in(tt_mesh.why_skipped(width, "float32", plan))
    assert refuses("alibi").is_printed_in(tt_mesh.why_skipped(CASES["alibi"], "float32", plan))
    assert (
        tt_mesh.why_skipped(CASES["gqa"], "float32", MeshPlan(tensor=3))
        == "tensor=3 does not divide 8 query heads"
    )
    assert tt_mesh.why_skipped(CASES["random-mask"], "float32", plan).startswith(
        "a mask per head would differ"
    )
    assert tt_mesh.why_skipped(CASES["fused-qkv"], "float32", plan) is None


@pytest.mark.parametrize(
    ("arguments", "refusal"),
    [
        (["--mesh", "data=2"], refuses("mesh", "data=2")),
        (["--mesh", "sequence=2,tensor=2"], refuses("mesh", "tensor=2,sequence=2")),
        (["--mesh", "tensor=16"], refuses("mesh", "tensor=16")),
        (["--mesh", "tensor=2", "--virtual-devices", "2"], refuses("--virtual-devices", "tt")),
    ],
)
def test_unsupported_meshes_fail_in_one_line(arguments, refusal, capsys):
    """`run` with a mesh that chips do not support exits with 2 and prints one line that names the
    mesh.
    """
    assert main(["run", "--backends", "tt", "--cases", "causal", *arguments]) == 2
    said = capsys.readouterr().err
    assert refusal.is_printed_in(said)
    assert said.count("\n") == 1

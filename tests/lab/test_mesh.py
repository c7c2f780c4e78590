"""`mha-parity mesh`: cases divided over virtual devices, their collectives, and invalid meshes."""

import io
import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from helpers.input_errors import rejects
from rich.console import Console

from mha_spec import Norm
from parity import AttentionSpec, Case, Rope, run_cases
from parity.measure.core.cases import CASES
from parity.measure.core.compare import Label, failure
from parity.use.cli.main import main
from parity_lab.mesh import backend as mesh_backend
from parity_lab.mesh.collectives import Collectives, excuse_of, ideal_collectives
from parity_lab.mesh.plan import MeshPlan, advice_on_devices, parse_mesh, why_not_divided
from parity_lab.mesh.printing import print_mesh_report
from parity_lab.mesh.run import MeshReport, run_on_mesh


def command(*arguments, status=0):
    """Return the output of the command, run in a new process because JAX keeps its number of
    devices.
    """
    program = [sys.executable, "-m", "parity", "mesh", *arguments, "--backends", "jax"]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    return " ".join((done.stdout + done.stderr).split())


# ---- The command ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Run `causal` and `textbook` on eight devices; return the output and the JSON report."""
    path = tmp_path_factory.mktemp("mesh") / "report.json"
    printed = command(
        "data=2,tensor=4",
        "--virtual-devices",
        "8",
        "--grad",
        "--allow-skipped",
        "--cases",
        "[ct][ae][ux][st][ab]*[lk]",
        "--json",
        str(path),
    )
    return printed, json.loads(path.read_text())


@pytest.mark.costly("a process in which JAX has more devices")
def test_mesh_run_counts_collectives(ran):
    """On a 2x4 mesh no stage fails, and each fused forward
    pass sends exactly the ideal collectives.
    """
    printed, report = ran
    assert report["summary"]["failed"] == 0
    assert report["summary"]["passed"] > 30
    stages = {result["stage"] for result in report["results"] if result["status"] == "passed"}
    assert {"scores", "fused.output", "blocks.grad.q_proj.weight"} <= stages
    forward = [
        collective
        for collective in report["collectives"]
        if collective["program"] == "fused.forward"
    ]
    assert forward
    assert all(
        collective["counted"] == collective["ideal"] == {"all-reduce": 1} for collective in forward
    )
    assert all(collective["passed"] for collective in report["collectives"])
    assert (
        "Traffic between devices: program, operations, number of cases jax blocks.forward: 1 "
        "all-reduce:" in printed
    )
    assert "jax fused.gradient: 2 all-reduce:" in printed


@pytest.mark.costly("a process in which JAX has more devices")
def test_undivided_cases_are_skipped(ran):
    """Cases that the mesh does not divide are skipped with
    this reason, and their number is printed.
    """
    printed, report = ran
    reasons = {
        result["case"]: result["reason"]
        for result in report["results"]
        if result["status"] == "skipped"
    }
    assert reasons
    assert all("does not divide" in reason for reason in reasons.values())
    assert f"{len(reasons)} case" in printed


@pytest.mark.costly("a process in which JAX has more devices")
def test_report_records_its_mesh(ran):
    """A report records its mesh and its kind of axes."""
    _, report = ran
    assert report["environment"]["mesh"] == "data=2,tensor=4"
    assert report["environment"]["axes"] == "automatic"


DIVIDED = """
import json
import sys
from dataclasses import replace
from parity import CASES
from parity_lab.mesh import jax as jax_mesh
from parity_lab.mesh.plan import MeshPlan, advice_on_devices
from parity_lab.mesh.run import run_on_mesh

jax_mesh.make_devices(2)
CASES["nan"] = replace(CASES["nan-visible-causal"], name="nan", seq_len=8)
cases = [CASES[name] for name in sys.argv[1:]]
report = run_on_mesh(cases, ["jax"], MeshPlan(sequence=2), with_gradients=True)
print(json.dumps([[*map(str, report.failed)], len(report.comparisons), [*map(str, report.needless)]]))
"""


# A ring; heads exchanged for tokens on the plain path, in parts, with a distance bias, and with
# infinite values.
OF_TOKENS = ["alibi-both-ways", "textbook", "relative-bias-padded", "nan"]


@pytest.mark.costly("a process in which JAX has more devices")
@pytest.mark.thorough
def test_sequence_mesh_divides_tokens():
    """Four cases agree on two devices that divide the sequence, without needless collectives."""
    program = [sys.executable, "-c", DIVIDED, *OF_TOKENS]
    done = subprocess.run(program, capture_output=True, text=True, check=True)
    differences, count, needless = json.loads(done.stdout)
    assert (differences, needless) == ([], [])
    assert count > 25 * len(OF_TOKENS)


@pytest.mark.thorough
@pytest.mark.costly("a process in which JAX has more devices")
def test_too_large_mesh_fails(capsys):
    """A mesh larger than the number of devices exits with 2 and names `--virtual-devices`."""
    printed = command("data=4", "--virtual-devices", "2", "--cases", "causal", status=2)
    assert rejects("--virtual-devices", {"--virtual-devices": 2}).is_printed_in(printed)
    assert main(["mesh", "data=2,tensor=4", "--backends", "jax", "--cases", "causal"]) == 2
    input_error = rejects("mesh", "data=2,tensor=4 and 1", hint="--virtual-devices 8")
    assert input_error.is_printed_in(capsys.readouterr().err)


def test_impossible_mesh_gets_no_hint(capsys):
    """No hint promises more virtual devices than a CPU can be, and the option rejects them."""
    wanted = 99_999_999_999
    plan = MeshPlan(tensor=wanted)
    assert advice_on_devices(plan, "makes") == "--virtual-devices makes at most 1024"
    words = ["mesh", f"tensor={wanted}", "--cases", "causal", "--backends", "jax"]
    assert main([*words, "--virtual-devices", str(wanted)]) == 2
    flag = "--virtual-devices"
    assert rejects(flag, {flag: wanted}).is_printed_in(capsys.readouterr().err)


@pytest.mark.parametrize("mesh", ["heads=2", "data=2,data=2", "data=0", "data"])
def test_invalid_mesh_fails(mesh, capsys):
    """A mesh with an unknown, repeated, zero or missing size exits with 2."""
    assert main(["mesh", mesh, "--backends", "jax", "--cases", "causal"]) == 2
    assert rejects("mesh", mesh=mesh).is_printed_in(capsys.readouterr().err)


def test_mesh_with_one_device_backend_fails(capsys, monkeypatch):
    """A mesh with a backend that runs on one device exits with 2 and names the backend."""
    monkeypatch.setattr(mesh_backend, "BACKENDS_ON_MESH", ("jax",))
    assert main(["mesh", "data=2", "--backends", "torch", "--cases", "causal"]) == 2
    assert rejects("mesh", backend="torch").is_printed_in(capsys.readouterr().err)


def test_mesh_that_divides_no_case_fails():
    """A run whose cases are all skipped is an error with the reasons."""
    case = Case("a", AttentionSpec(32, 4, shared_kv=True), "")
    with rejects("mesh", "the keys and values of another layer"):
        run_on_mesh([case], ["jax"], MeshPlan())


# ---- Division and necessary collectives ----------------------------------------------------------


def test_mesh_is_parsed_and_printed():
    """A mesh is parsed in any order and printed as
    `data=2,tensor=4`; its size is the product of its axes.
    """
    assert parse_mesh("tensor=4, data=2") == MeshPlan(data=2, tensor=4)
    assert str(MeshPlan(data=2, tensor=4)) == "data=2,tensor=4"
    assert (MeshPlan(data=2, tensor=4).size, MeshPlan().size) == (8, 1)
    with rejects("axes", axes="auto"):
        MeshPlan(axes="auto")


@pytest.mark.parametrize(
    ("case", "plan", "reason"),
    [
        (
            Case("a", AttentionSpec(32, 4), "", batch=3),
            MeshPlan(data=2),
            "data=2 does not divide 3 sequences",
        ),
        (
            Case("a", AttentionSpec(36, 6), ""),
            MeshPlan(tensor=4),
            "tensor=4 does not divide 6 query heads",
        ),
        (
            Case("a", AttentionSpec(32, 4, fused_qkv=True), ""),
            MeshPlan(tensor=2),
            "fused_qkv keeps q, k and v in one",
        ),
        (
            Case("a", AttentionSpec(32, 4), "", seq_len_k=7),
            MeshPlan(sequence=5),
            "sequence=5 does not divide 7 key tok",
        ),
        (
            Case("a", AttentionSpec(32, 4), "", chunks=(4, 1), capacity=8),
            MeshPlan(sequence=5),
            "tokens that arrive in",
        ),
        (Case("a", AttentionSpec(32, 4, fused_qkv=True), ""), MeshPlan(data=2), None),
    ],
)
def test_undivided_case_has_a_reason(case, plan, reason):
    """The reason names the size that the mesh does not divide, and
    is None if it divides the case.
    """
    why = why_not_divided(case, plan)
    assert why is None if reason is None else why.startswith(reason)


FULL = Case("full", AttentionSpec(32, 4), "")
SHARED = Case("shared", AttentionSpec(32, 4, num_kv_heads=2, rope=Rope(10000.0)), "")


def test_ideal_collectives_by_mesh():
    """Necessary collectives are exact numbers per mesh; only gradients and forward passes of
    devices that share key/value heads are excused.
    """
    plan = MeshPlan(data=2, tensor=4)
    assert ideal_collectives(FULL, plan, "fused.forward") == {"all-reduce": 1}
    assert ideal_collectives(FULL, plan, "gradient") == {"all-reduce": 2}
    assert ideal_collectives(FULL, MeshPlan(data=8), "fused.forward") == {}
    assert ideal_collectives(FULL, MeshPlan(data=8), "gradient") == {"all-reduce": 1}
    assert ideal_collectives(FULL, MeshPlan(sequence=4), "fused.forward") == {"all-to-all": 4}
    five = ideal_collectives(SHARED, MeshPlan(sequence=5), "blocks.gradient")
    assert five == {"all-reduce": 1, "collective-permute": 26}
    windowed = Case(
        "windowed",
        AttentionSpec(32, 4, num_kv_heads=1, window_size=3),
        "",
        seq_len=12,
        is_causal=True,
    )
    both_ways, one_way = (
        ideal_collectives(windowed, MeshPlan(sequence=4), "fused.forward", name)
        for name in ("jax", "torch")
    )
    assert (both_ways, one_way) == ({"collective-permute": 4}, {"collective-permute": 2})
    assert not excuse_of(FULL, plan, "gradient")
    assert excuse_of(SHARED, plan, "gradient").startswith("devices share key/value heads")
    assert not excuse_of(SHARED, MeshPlan(tensor=2), "gradient")
    assert not excuse_of(SHARED, plan, "blocks.forward")
    assert not excuse_of(FULL, MeshPlan(sequence=4), "fused.forward")
    excuse_of_weights = excuse_of(FULL, MeshPlan(sequence=4), "forward")
    assert excuse_of_weights.startswith("attention weights are rows over all keys")
    astride = replace(
        FULL, spec=AttentionSpec(48, 6, num_kv_heads=3)
    )  # a device has one group and half of another
    assert excuse_of(astride, MeshPlan(tensor=2), "blocks.forward").startswith(
        "devices share key/value heads"
    )


def test_collectives_by_heads_per_device():
    """If heads and tokens are divided by 2, 4 key/value
    heads need all-to-all, 1 or 2 a permutation.
    """
    plan = MeshPlan(tensor=2, sequence=2)
    for count, expected in (
        (2, "collective-permute"),
        (4, "all-to-all"),
        (1, "collective-permute"),
    ):
        case = replace(FULL, spec=AttentionSpec(32, 4, num_kv_heads=count), seq_len=8)
        assert expected in ideal_collectives(case, plan, "fused.forward")


def test_width_norms_need_all_reduces():
    """Norms over the width of three projections add all-reduces on
    a mesh of heads, and none on one of data.
    """
    norms = {"qk_norm": Norm(over="width"), "v_norm": Norm("layer", over="width")}
    case, plan = replace(FULL, spec=AttentionSpec(32, 4, **norms)), MeshPlan(tensor=4)
    assert ideal_collectives(case, plan, "step", "torch") == {
        "all-reduce": 1 + 4
    }  # two for a layer norm
    assert ideal_collectives(case, plan, "gradient", "torch") == {"all-reduce": 1 + 4}
    assert ideal_collectives(case, plan, "step") == {"all-reduce": 1 + 4}
    assert ideal_collectives(case, plan, "gradient") == {"all-reduce": 1 + 8}
    assert ideal_collectives(case, MeshPlan(data=2), "gradient") == {"all-reduce": 1}


def test_needless_collectives_fail():
    """Needless collectives fail the report, which names the program and the case, unless they have
    an excuse.
    """
    needed = Collectives("full", "float32", "jax", "forward", {"all-reduce": 1}, {"all-reduce": 1})
    gathered = replace(needed, counted={"all-reduce": 1, "all-gather": 2})
    excused = replace(gathered, program="gradient", excuse="for a reason")
    assert (needed.passed, gathered.passed, excused.passed) == (True, False, True)
    stages = run_cases([CASES["textbook"]], ["torch"]).comparisons
    report = MeshReport(stages, {}, {})
    wasteful = replace(report, collectives=[needed, excused, gathered])
    assert (wasteful.status, wasteful.needless) == (1, [gathered])
    assert replace(report, collectives=[needed, excused]).status == 0
    printed = shown(wasteful)
    assert "jax forward: 1 all-reduce: 1\n" in printed
    assert (
        "jax gradient: 1 all-reduce, 2 all-gather, needed 1 all-reduce: for a reason: 1 (full)\n"
        "jax forward: 1 all-reduce, 2 all-gather, needed 1 all-reduce: 1 (full)\n" in printed
    )
    assert printed.endswith("1 program sent more than needed\n")
    assert "sent more than needed" not in shown(report)


def test_failed_stage_fails_mesh_report():
    """A failed stage has exit status 1 on a mesh also."""
    lost = failure(np.ones(1), "reason", Label("full", "jax", "float32", "q"))
    assert MeshReport([lost], {}, {}).status == 1


def shown(report):
    """Return what the command prints about a report."""
    out = Console(width=200, file=io.StringIO())
    print_mesh_report(report, out, verbose=False, quiet=True)
    return out.file.getvalue()

"""`mha-parity run --mesh`: cases divided over virtual devices, what these send, and what is refused."""

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from helpers.refusals import refuses

from parity import AttentionSpec, Case, Norm, Rope, make_problem
from parity.backends import BACKENDS
from parity.cli.main import main
from parity.core.cases import CASES
from parity.core.trace import Trace
from parity.reporting.junit import junit_xml
from parity.running.report import Report
from parity.running.traces import load_trace, save_trace
from parity.sharding.mesh import (
    Collectives,
    MeshPlan,
    collectives_of,
    excuse_of,
    ideal_collectives,
    parse_mesh,
    why_not_divided,
)


def command(*arguments, status=0):
    """What the command prints, in a process of its own: JAX has as many devices as it started with."""
    program = [sys.executable, "-m", "parity", "run", "--backends", "jax", *arguments]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    return " ".join((done.stdout + done.stderr).split())


# ---- The command -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """A run of `causal` and `textbook` on eight devices: what it printed, its JSON and its traces."""
    folder = tmp_path_factory.mktemp("mesh")
    report = folder / "report.json"
    mesh = ["--virtual-devices", "8", "--mesh", "data=2,tensor=4", "--grad", "--allow-skipped"]
    printed = command(
        *mesh, "--cases", "[ct][ae][ux][st][ab]*[lk]", "--json", str(report), "--save-traces", str(folder)
    )
    return printed, json.loads(report.read_text()), folder


@pytest.mark.costly("a process in which JAX has more devices")
def test_cases_are_judged_and_collectives_counted(ran):
    printed, report, _ = ran
    assert report["summary"]["failed"] == 0
    assert report["summary"]["passed"] > 30
    stages = {each["stage"] for each in report["results"] if each["status"] == "passed"}
    assert {"scores", "fused.output", "blocks.grad.q_proj.weight"} <= stages
    forward = [each for each in report["collectives"] if each["program"] == "fused.forward"]
    assert forward
    assert all(each["counted"] == each["ideal"] for each in forward)
    assert all(each["passed"] for each in report["collectives"])
    assert (
        "Traffic between devices: program, operations, number of cases "
        "jax blocks.forward: 1 all-reduce, 1 all-reduce of flags:" in printed
    )
    assert "jax fused.gradient: 2 all-reduce, 1 all-reduce of flags:" in printed


@pytest.mark.costly("a process in which JAX has more devices")
def test_cases_that_a_mesh_does_not_divide_are_named_with_the_reason(ran):
    printed, report, _ = ran
    reasons = {each["case"]: each["reason"] for each in report["results"] if each["status"] == "skipped"}
    assert reasons
    assert all("does not divide" in reason for reason in reasons.values())
    assert f"{len(reasons)} case" in printed


@pytest.mark.costly("a process in which JAX has more devices")
def test_traces_carry_the_mesh(ran):
    _, _, folder = ran
    trace = load_trace(folder / "causal-float32-jax.safetensors")
    assert trace.numerics["mesh"] == "data=2,tensor=4"
    assert trace.numerics["axes"] == "automatic"
    assert trace.collectives["fused.forward"] == {"all-reduce": 1, "all-reduce of flags": 1}
    assert all(each.passed for each in collectives_of(trace))


DIVIDED = """
import json
import sys
from dataclasses import replace
from parity import CASES, run_cases
from parity.backends import jax_mesh
from parity.sharding.mesh import MeshPlan

jax_mesh.make_devices(2)
CASES["nan"] = replace(CASES["nan-visible-causal"], name="nan", seq_len=8)
cases = [CASES[name] for name in sys.argv[1:]]
report = run_cases(cases, ["jax"], mesh=MeshPlan(sequence=2), with_gradients=True)
print(json.dumps([[*map(str, report.failed)], len(report.comparisons), [*map(str, report.needless)]]))
"""


# In a ring; heads for tokens on the plain path, in parts, with the bias of distances, and with what is not finite.
OF_TOKENS = ["alibi-both-ways", "textbook", "relative-bias-padded", "nan"]


@pytest.mark.costly("a process in which JAX has more devices")
@pytest.mark.thorough
def test_tokens_are_divided_along_the_only_dimension_of_a_mesh():
    program = [sys.executable, "-c", DIVIDED, *OF_TOKENS]
    done = subprocess.run(program, capture_output=True, text=True, check=True)
    differences, count, needless = json.loads(done.stdout)
    assert (differences, needless) == ([], [])
    assert count > 25 * len(OF_TOKENS)


@pytest.mark.costly("a process in which JAX has more devices")
def test_more_devices_than_there_are_is_refused_by_name(capsys):
    said = command("--virtual-devices", "2", "--mesh", "data=4", "--cases", "causal", status=2)
    assert refuses("--virtual-devices", {"--virtual-devices": 2}).is_printed_in(said)
    assert main(["run", "--backends", "jax", "--mesh", "data=2,tensor=4", "--cases", "causal"]) == 2
    refusal = refuses("mesh", "data=2,tensor=4 and 1", hint="--virtual-devices 8")
    assert refusal.is_printed_in(capsys.readouterr().err)


@pytest.mark.parametrize(
    ("arguments", "refusal"),
    [
        (["--virtual-devices", "8"], refuses("--virtual-devices")),
        (["--axis-types", "explicit", "--virtual-devices", "2"], refuses("--virtual-devices and --axis-types")),
        *((["--mesh", mesh], refuses("mesh", mesh=mesh)) for mesh in ("heads=2", "data=2,data=2", "data=0", "data")),
    ],
)
def test_what_is_not_a_mesh_is_refused(arguments, refusal, capsys):
    assert main(["run", "--backends", "jax", "--cases", "causal", *arguments]) == 2
    assert refusal.is_printed_in(capsys.readouterr().err)


def test_a_backend_of_one_device_is_refused_by_name(capsys, monkeypatch):
    monkeypatch.setitem(BACKENDS, "torch", BACKENDS["torch"]._replace(divided=""))
    assert main(["run", "--backends", "torch", "--cases", "causal", "--mesh", "data=2"]) == 2
    assert "torch runs on one device here, not on a mesh" in capsys.readouterr().err


# ---- What divides, and what is needed --------------------------------------------------------------------------------


def test_meshes_are_written_as_they_are_typed():
    assert parse_mesh("tensor=4, data=2") == MeshPlan(data=2, tensor=4)
    assert str(MeshPlan(data=2, tensor=4)) == "data=2,tensor=4"
    assert (MeshPlan(data=2, tensor=4).size, MeshPlan().size) == (8, 1)
    with refuses("axes", axes="auto"):
        MeshPlan(axes="auto")


@pytest.mark.parametrize(
    ("case", "plan", "reason"),
    [
        (Case("a", AttentionSpec(32, 4), "", batch=3), MeshPlan(data=2), "data=2 does not divide 3 sequences"),
        (Case("a", AttentionSpec(36, 6), ""), MeshPlan(tensor=4), "tensor=4 does not divide 6 query heads"),
        (Case("a", AttentionSpec(32, 4, fused_qkv=True), ""), MeshPlan(tensor=2), "fused_qkv keeps q, k and v in one"),
        (
            Case("a", AttentionSpec(32, 4), "", seq_len_k=7),
            MeshPlan(sequence=5),
            "sequence=5 does not divide 7 key tok",
        ),
        (Case("a", AttentionSpec(32, 4), "", chunks=(4, 1), capacity=8), MeshPlan(sequence=5), "tokens that arrive in"),
        (Case("a", AttentionSpec(32, 4, fused_qkv=True), ""), MeshPlan(data=2), None),
    ],
)
def test_what_does_not_divide_says_why(case, plan, reason):
    said = why_not_divided(case, plan)
    assert said is None if reason is None else said.startswith(reason)


FULL = Case("full", AttentionSpec(32, 4), "")
SHARED = Case("shared", AttentionSpec(32, 4, num_kv_heads=2, rope=Rope(10000.0)), "")


def test_what_is_needed():
    plan = MeshPlan(data=2, tensor=4)
    assert ideal_collectives(FULL, plan, "fused.forward") == {"all-reduce": 1, "all-reduce of flags": 1}
    assert ideal_collectives(FULL, plan, "gradient") == {"all-reduce": 2, "all-reduce of flags": 1}
    assert ideal_collectives(FULL, MeshPlan(data=8), "fused.forward") == {}
    assert ideal_collectives(FULL, MeshPlan(data=8), "gradient") == {"all-reduce": 1}
    assert ideal_collectives(FULL, MeshPlan(sequence=4), "fused.forward") == {"all-to-all": 4}
    five = ideal_collectives(SHARED, MeshPlan(sequence=5), "blocks.gradient")
    assert five == {"all-reduce": 1, "collective-permute": 26}
    windowed = Case("windowed", AttentionSpec(32, 4, num_kv_heads=1, window_size=3), "", seq_len=12, is_causal=True)
    both_ways, one_way = (
        ideal_collectives(windowed, MeshPlan(sequence=4), "fused.forward", name) for name in ("jax", "torch")
    )
    assert (both_ways, one_way) == ({"collective-permute": 4}, {"collective-permute": 2})
    assert not excuse_of(FULL, plan, "gradient")
    assert excuse_of(SHARED, plan, "gradient").startswith("devices share key/value heads")
    assert not excuse_of(SHARED, MeshPlan(tensor=2), "gradient")
    assert not excuse_of(SHARED, plan, "blocks.forward")
    astride = replace(FULL, spec=AttentionSpec(48, 6, num_kv_heads=3))  # a device has one group and half of another
    assert excuse_of(astride, MeshPlan(tensor=2), "blocks.forward").startswith("devices share key/value heads")


def test_heads_and_tokens_that_are_divided_leave_heads_to_share_or_keys_to_pass_on():
    plan = MeshPlan(tensor=2, sequence=2)
    for count, expected in ((2, "collective-permute"), (4, "all-to-all"), (1, "collective-permute")):
        case = replace(FULL, spec=AttentionSpec(32, 4, num_kv_heads=count), seq_len=8)
        assert expected in ideal_collectives(case, plan, "fused.forward")


def test_what_norms_over_the_width_need():
    norms = {"qk_norm": Norm(over="width"), "v_norm": Norm("layer", over="width")}
    case, plan = replace(FULL, spec=AttentionSpec(32, 4, **norms)), MeshPlan(tensor=4)
    assert ideal_collectives(case, plan, "step", "torch") == {"all-reduce": 1 + 4}  # of a layer norm two
    assert ideal_collectives(case, plan, "gradient", "torch") == {"all-reduce": 1 + 4}
    assert ideal_collectives(case, plan, "step") == {"all-reduce": 1 + 4, "all-reduce of flags": 1 + 3}
    assert ideal_collectives(case, plan, "gradient") == {"all-reduce": 1 + 8, "all-reduce of flags": 1 + 3}
    assert ideal_collectives(case, MeshPlan(data=2), "gradient") == {"all-reduce": 1}


def test_more_than_needed_is_a_failure():
    needed = Collectives("full", "float32", "jax", "forward", {"all-reduce": 1}, {"all-reduce": 1})
    gathered = replace(needed, counted={"all-reduce": 1, "all-gather": 2})
    assert (needed.passed, gathered.passed) == (True, False)
    assert replace(gathered, excuse="for a reason").passed
    report = Report([], {}, {}, collectives=[needed, gathered])
    assert (report.status, report.needless) == (1, [gathered])
    assert Report([], {}, {}, collectives=[needed]).status == 0
    xml = junit_xml(report).decode()
    assert 'failures="1"' in xml
    assert 'message="devices send 1 all-reduce, 2 all-gather, needed 1 all-reduce"' in xml


def test_collectives_of_a_trace_are_kept_in_its_file(tmp_path):
    problem = make_problem(CASES["causal"], "float32")
    where = {"backends": {"jax": {"numerics": {"mesh": "tensor=2", "axes": "explicit"}}}}
    sent = {"fused.forward": {"all-gather": 3}}
    stages = {"output": np.zeros(1, np.float32)}
    trace = Trace(problem, "jax", stages, {}, environment=where, collectives=sent)
    read = load_trace(save_trace(tmp_path, trace))
    assert read.collectives == sent
    (found,) = collectives_of(read)
    assert not found.passed

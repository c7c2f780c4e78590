"""Cases on a mesh of torch processes, as in `mha-parity mesh`: stages are gathered, and
communication is counted.
"""

from dataclasses import replace

import pytest
from helpers.input_errors import rejects
from helpers.samples import sample

from mha_spec import AttentionSpec, Norm, Rope
from mha_torch.masks import Mask
from mha_torch.parallel.ring import check_ring_supports
from mha_torch.scores import Scores
from parity import CASES
from parity.measure.core.cases import random_case
from parity_lab.mesh import torch as torch_mesh
from parity_lab.mesh.plan import MeshPlan
from parity_lab.mesh.run import run_on_mesh

HEADS = [  # features of heads, whole outputs, caches; WIDTHS has projections
    *(CASES[name] for name in ("norm-per-head", "decode-sinks", "decode-latent")),
    *(
        CASES[name] for name in ("relative-products", "relative-products-of-keys")
    ),  # shared by heads, and per head
    replace(CASES["alibi"], spec=replace(CASES["alibi"].spec, out_proj=False)),
    random_case(
        35
    ),  # relative biases; 12 query heads and 3 key/value heads, one of which two processes share
]
WIDTHS = {  # norms over the width of all heads
    name: replace(
        CASES[name], name=f"width/{name}", spec=replace(CASES[name].spec, **norms, fused_qkv=False)
    )
    for name, norms in {
        "gqa-causal": {"v_norm": Norm("layer", over="width", bias=True)},
        "mqa": {"qk_norm": Norm("layer", over="width")},
        "decode-norm-width": {},
    }.items()
}
TOKENS = [  # lengths that two processes divide into even or odd parts
    replace(CASES["gqa-causal"], seq_len=8, key_padding_lengths=(8, 3)),
    replace(CASES["window"], seq_len=12, spec=replace(CASES["window"].spec, rope=Rope())),
    replace(WIDTHS["gqa-causal"], seq_len=6),
]
CASES_OF = {"heads": [*HEADS, *WIDTHS.values()], "tokens": TOKENS}
PLANS = {
    (2, "heads"): MeshPlan(tensor=2),
    (2, "tokens"): MeshPlan(sequence=2),
    (4, "heads"): MeshPlan(data=2, tensor=2),
    (4, "tokens"): MeshPlan(sequence=2, tensor=2),
}


@pytest.fixture(scope="module")
def devices(request):
    """Start that many processes."""
    torch_mesh.make_devices(request.param)
    yield request.param
    torch_mesh.end()


two_devices = pytest.mark.parametrize("devices", [2], indirect=True)


@pytest.mark.costly("a device of torch is a process")
@sample(where=lambda devices: devices == 2)
@pytest.mark.parametrize(("devices", "kind"), PLANS, indirect=["devices"])
def test_divided_cases_match_without_waste(devices, kind):
    """All stages and gradients of cases on a mesh are within tolerance, and no collective is
    needless.
    """
    cases = CASES_OF[kind]
    report = run_on_mesh(cases, ["torch"], PLANS[devices, kind], with_gradients=True)
    assert {comparison.case for comparison in report.comparisons} == {case.name for case in cases}
    assert report.failed == [], "\n".join(map(str, report.first_differences()))
    assert report.needless == []
    sent = {"heads": "all-reduce", "tokens": "collective-permute"}[kind]
    needed = [collective for collective in report.collectives if sent in collective.ideal]
    assert needed
    assert all(collective.counted.get(sent) for collective in needed)


def test_indivisible_cases_are_skipped():
    """Cases with output dropout, masks or biases that a mesh does not divide are skipped with the
    reason.
    """
    plan = MeshPlan(tensor=2)
    dropped = replace(CASES["gqa"], spec=AttentionSpec(32, 8, output_dropout=0.1))
    assert rejects("output_dropout").is_printed_in(torch_mesh.why_skipped(dropped, "float32", plan))
    assert torch_mesh.why_skipped(CASES["gqa"], "float32", plan) is None
    masks = "masks and biases would have to circulate with the keys"
    assert torch_mesh.why_skipped(CASES["bias"], "float32", MeshPlan(sequence=1)) is None
    reasons = {
        torch_mesh.why_skipped(case, "float32", MeshPlan(sequence=2)) for case in CASES.values()
    }
    assert masks in reasons


def test_ring_rejects_relative_products():
    """A ring raises an error for relative products, and their case is skipped with the reason."""
    scores = Scores(CASES["relative-products"].spec)
    with rejects("relative_products", relative_products=...):
        check_ring_supports(Mask(), scores)
    reason = torch_mesh.why_skipped(CASES["relative-products"], "float32", MeshPlan(sequence=3))
    assert reason == "relative products are computed for whole sequences only"


@two_devices
def test_too_many_mesh_devices_raise(devices):
    """A mesh of 8 devices over two processes raises an error."""
    with rejects("mesh", f"data=8 and {devices}"):
        run_on_mesh([CASES["gqa"]], ["torch"], MeshPlan(data=8))


@pytest.mark.costly("a device of torch is a process")
@two_devices
@pytest.mark.usefixtures("devices")
def test_process_error_fails_only_its_case(monkeypatch):
    """An error in a process is reported as the failed stage "run", and the next case passes."""
    plan = MeshPlan(tensor=2)
    real = torch_mesh.ProblemPart
    # Without the inputs of stages.
    monkeypatch.setattr(torch_mesh, "ProblemPart", lambda *fields: real(*fields[:2], {}))
    report = run_on_mesh([CASES["gqa"]], ["torch"], plan)
    assert [failure.stage for failure in report.failed] == ["run"]
    assert "process" in report.failed[0].reason
    monkeypatch.undo()
    report = run_on_mesh([CASES["gqa"]], ["torch"], plan)
    assert report.comparisons
    assert report.failed == []

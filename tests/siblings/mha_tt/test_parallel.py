"""Heads divided over the chips of mock boards: they match the undivided layer, and injected bugs
are detected.

helpers/programs/chips.py computes the results, in one process for each board.
"""

import json
import os
import subprocess
import sys

import pytest
from filelock import FileLock
from helpers import PYTHONPATH, ROOT
from helpers.input_errors import rejects, rejects_type
from helpers.programs.chips import COMPARED
from helpers.samples import sample

pytestmark = [
    pytest.mark.usefixtures("only_mock"),
    pytest.mark.costly("a process has one board for good"),
]

every_board = pytest.mark.parametrize("board", COMPARED)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Return a function of the results of a board's process, which one worker starts for all."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder

    def of_board(board):
        path = folder / f"{board}.json"
        with FileLock(folder / f"{board}.lock"):
            if not path.exists():
                program = [sys.executable, "-m", "helpers.programs.chips", board]
                variables = {
                    name: value
                    for name, value in os.environ.items()
                    if not name.startswith("TT_METAL")
                }
                variables["PYTHONPATH"] = PYTHONPATH
                result = subprocess.run(
                    program, env=variables, cwd=ROOT, capture_output=True, text=True, timeout=600
                )
                assert result.returncode == 0, result.stderr
                path.write_text(result.stdout)
        return json.loads(path.read_text())

    return of_board


@sample(board=["n300"])
@every_board
def test_divided_heads_match_undivided_layer(results, board):
    """All stages of layers with divided heads are within the budget of the undivided layer."""
    compared = results(board)["compared"]
    assert len(compared) == sum(map(len, COMPARED[board].values()))
    for stages, failed, _ in compared.values():
        assert stages
        assert failed == {}


@sample(board=["n300"])
@every_board
def test_chips_send_exactly_one_sum(results, board):
    """Each program sends one all-reduce, and none without an output projection."""
    sent = [sums for _, _, of_cases in results(board)["compared"].values() for sums in of_cases]
    assert {program for _, program, *_ in sent} > {"fused.forward", "step"}
    assert all(counted == ideal for *_, counted, ideal in sent)
    assert all(
        counted == ({} if case == "no-out-proj" else {"all-reduce": 1})
        for case, _, counted, _ in sent
    )


@pytest.mark.parametrize(
    ("bug", "first", "reason"),
    [
        ("without all_reduce", "run", "ValueError: tensor "),
        ("key/value heads in the wrong order", "k", ""),
        ("the bias of out_proj on every chip", "output", ""),
    ],
)
def test_wrong_division_fails_at_its_stage(
    results, bug, first, reason
):  # the control of the tests above
    """Control: each injected bug of dividing heads fails first at its stage."""
    failed = results("n300")["controls"][bug]
    stage, reasons = next(iter(failed.items()))
    assert stage.split()[-1] == first
    assert reasons.startswith(reason)


def test_redundant_sum_is_counted(results):
    """Control: an additional all-reduce leaves results correct, and is counted."""
    _, failed, sent = results("n300")["controls"]["a sum too many"]
    assert failed == {}
    assert [counted for _, _, counted, _ in sent] == [{"all-reduce": 2}] * 2


@sample(board=["n300"])
@every_board
def test_collectives_match_golden_functions(results, board):
    """Collectives on each chip return the values of ttnn's own golden functions."""
    checks = {
        name: facts for name, facts in results(board).items() if name.endswith("as ttnn says")
    }
    assert checks
    for facts in checks.values():
        assert len(facts) >= 7
        assert all(facts.values()), facts


def test_row_parallel_product_needs_its_sum(results):
    """A product with divided rows is off by more than 0.1 without its sum, and by less than 1e-6
    with it.
    """
    without, summed, message = results("n300")["by rows"]
    assert without > 0.1
    assert summed < 1e-6
    assert rejects("tensor", where="ValueError").is_printed_in(message)


def test_divided_weights_round_trip(results):
    """Weights are read from divided layers and loaded into them bit for bit."""
    assert results("n300")["carried"] == [True, True]


@pytest.mark.parametrize(
    ("name", "input_error"),
    [
        ("uneven", rejects("num_heads", "num_heads=9 and 2 chips")),
        ("norm over the width", rejects("q_norm")),
        ("alibi", rejects("alibi")),
        ("shared_kv", rejects("shared_kv", shared_kv=True)),
        ("no such dimension", rejects("heads", heads=2)),
        ("a name", rejects_type("heads", heads="tensor")),
        ("twice", rejects("layer", "along dimension 1")),
        ("no layer", rejects_type("layer", "object")),
        ("training with dropout", rejects("the module")),
        ("bias of all heads", rejects("bias", {"bias.shape": (1, 8, 5, 5)})),
    ],
)
def test_unsupported_divisions_raise_by_name(results, name, input_error):
    """Layers and calls that cannot be divided raise an error that names the argument."""
    kind, _, message = results("n300")["rejected"][name].partition(": ")
    assert input_error.is_printed_in(message)
    assert kind == input_error.kind.__name__


def test_unknown_mesh_operation_raises(results):
    """ttnn.all_broadcast, which has no values on a mesh, raises NotImplementedError with its
    name.
    """
    assert results("n300")["rejected"]["broadcast"].startswith(
        "NotImplementedError: ttnn.all_broadcast "
    )

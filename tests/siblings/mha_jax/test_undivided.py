"""Undivided layers of mha_jax: their programs contain no mesh, even if the process has created one
before.
"""

import re

import pytest
from helpers.shell import results_of_program

pytestmark = [pytest.mark.thorough, pytest.mark.costly("a process in which JAX has more devices")]


OF_MESHES = (
    *("sharding_constraint", "reshard", "shard_map", "mesh_cast", "pvary", "pcast", "axis_index"),
    *(
        "psum",
        "all_gather",
        "all_to_all",
        "ppermute",
        "pbroadcast",
        "reduce_scatter",
        "psum_scatter",
    ),
)
"""Names of JAX operations on a mesh."""


def signs_of_a_mesh(jaxpr, lowered):
    """Return the mesh operations and the placements of arrays in a program."""
    operations = {name for name in OF_MESHES if re.search(rf"\b{name}(_p|_invariant)?\b", jaxpr)}
    placements = re.findall(r"sharding=(?!None\b)\S+", jaxpr)
    of_xla = re.findall(
        r"sdy\.\w+|mhlo\.sharding|stablehlo\.(?:all_|collective_|reduce_scatter|partition_id)\w*",
        lowered,
    )
    return operations | {*placements} | {*of_xla}


@pytest.fixture(scope="module")
def results():
    """Return the results of tests/helpers/programs/undivided.py, run in one process."""
    return results_of_program("undivided")


def test_undivided_layer_has_no_mesh(results):
    """Programs of nine undivided layers contain no operation or placement of a mesh."""
    assert len(results["before"]) == 9
    assert {
        name: signs
        for name, program in results["before"].items()
        if (signs := signs_of_a_mesh(*program))
    } == {}


def test_program_ignores_earlier_divisions(results):
    """Programs of undivided layers are the same after the process has divided other layers."""
    assert results["after"].keys() == results["before"].keys()
    assert [
        name for name, program in results["after"].items() if program != results["before"][name]
    ] == []


def test_divided_layer_has_mesh_operations(results):  # the control of the tests above
    """Control: programs of layers with divided tokens and heads contain operations of a mesh."""
    tokens, heads = (signs_of_a_mesh(*results["divided"][what]) for what in ("tokens", "heads"))
    assert {"shard_map", "axis_index", "sharding_constraint", "sdy.manual_computation"} <= tokens
    assert {"reshard", "sdy.sharding"} <= heads

"""Layers of mha_jax that shard nothing: their programs know of no mesh, whether or not the process made one before."""

import re

import pytest
from helpers.shell import found_by

pytestmark = [pytest.mark.thorough, pytest.mark.costly("a process in which JAX has more devices")]


OF_MESHES = (
    *("sharding_constraint", "reshard", "shard_map", "mesh_cast", "pvary", "pcast", "axis_index"),
    *("psum", "all_gather", "all_to_all", "ppermute", "pbroadcast", "reduce_scatter", "psum_scatter"),
)
"""What JAX calls operations on a mesh."""


def signs_of_a_mesh(jaxpr, lowered):
    """What a program says of a mesh: its operations there, and the placements of arrays."""
    operations = {name for name in OF_MESHES if re.search(rf"\b{name}(_p|_invariant)?\b", jaxpr)}
    placements = re.findall(r"sharding=(?!None\b)\S+", jaxpr)
    of_xla = re.findall(
        r"sdy\.\w+|mhlo\.sharding|stablehlo\.(?:all_|collective_|reduce_scatter|partition_id)\w*", lowered
    )
    return operations | {*placements} | {*of_xla}


@pytest.fixture(scope="module")
def found():
    """What tests/helpers/programs/undivided.py found, in one process."""
    return found_by("undivided")


def test_an_undivided_layer_has_no_operation_of_a_mesh(found):
    assert len(found["before"]) == 9
    assert {name: signs for name, program in found["before"].items() if (signs := signs_of_a_mesh(*program))} == {}


def test_its_program_is_the_same_when_the_process_has_divided_others(found):
    assert found["after"].keys() == found["before"].keys()
    assert [name for name, program in found["after"].items() if program != found["before"][name]] == []


def test_a_divided_layer_has_them(found):  # the control of the tests above
    tokens, heads = (signs_of_a_mesh(*found["divided"][what]) for what in ("tokens", "heads"))
    assert {"shard_map", "axis_index", "sharding_constraint", "sdy.manual_computation"} <= tokens
    assert {"reshard", "sdy.sharding"} <= heads

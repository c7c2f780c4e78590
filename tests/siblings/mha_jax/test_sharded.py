"""Layers of mha_jax on eight virtual devices: what they compute is judged as ever, and what devices send is counted."""

import re

import pytest
from helpers.shell import found_by

pytestmark = [pytest.mark.thorough, pytest.mark.costly("a process in which JAX has more devices")]

KINDS = ["automatic", "explicit"]
A_SUM = {"all-reduce f32": 1}  # of the outputs of all devices
A_FLAG = {"all-reduce pred": 1}  # of each token, whether it is finite: that out_proj may empty it on every device


@pytest.fixture(scope="module")
def found():
    """What tests/helpers/programs/sharded.py found, in one process."""
    return found_by("sharded")


# ---- What is computed ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_every_stage_and_gradient_is_within_the_budget(found, kind):
    stages, wrong = found["judged"][kind]
    assert wrong == []
    assert len(stages) == (4 if kind == "explicit" else 1)
    assert min(stages.values()) > 30


def test_a_ragged_prompt_and_32_steps(found):  # explicit axes: a case of caches above
    assert found["generated"] is None


def test_the_users_own_shard_map(found):
    difference, collectives = found["mapped"]
    assert difference < 1e-5  # of outputs around 1: a few units of rounding
    assert collectives == {**A_SUM, "in loops": 0}


# ---- What devices send: with explicit axes, the cases above count it -------------------------------------------------


def of(found, pattern):
    programs = {name: counts for name, counts in found["programs"].items() if re.fullmatch(pattern, name)}
    assert programs
    return programs


def test_sequences_need_nothing_of_each_other(found):
    for name, collectives in of(found, "data (forward|prompt|step) .*").items():
        assert collectives == {"in loops": 0}, name


def test_gradients_of_weights_are_summed_once(found):
    for name, collectives in of(found, "data gradient .*").items():
        assert collectives == {**A_SUM, "in loops": 0}, name


def test_outputs_of_heads_are_summed_once(found):
    for name, collectives in of(found, "heads (forward|prompt|step) .*").items():
        assert collectives == {**A_SUM, **A_FLAG, "in loops": 0}, name


def test_so_are_gradients_of_the_input(found):
    for name, collectives in of(found, "heads gradient .*").items():
        assert collectives == {"all-reduce f32": 2, **A_FLAG, "in loops": 0}, name

"""Layers of mha_jax on eight virtual devices: results are compared as usual, and communication is
counted.
"""

import re

import pytest
from helpers.shell import results_of_program

pytestmark = [pytest.mark.thorough, pytest.mark.costly("a process in which JAX has more devices")]

KINDS = ["automatic", "explicit"]
A_SUM = {"all-reduce f32": 1}  # of the outputs of all devices


@pytest.fixture(scope="module")
def measured():
    """Return the results of tests/helpers/programs/sharded.py, run in one process."""
    return results_of_program("sharded")


# ---- Results -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_stages_and_gradients_are_accurate(measured, kind):
    """All stages and gradients of layers on eight devices are within their budget."""
    stages, wrong = measured["compared"][kind]
    assert wrong == []
    assert len(stages) == (4 if kind == "explicit" else 1)
    assert min(stages.values()) > 30


def test_ragged_prompt_and_32_steps_match(measured):  # explicit axes: a case of caches above
    """A ragged prompt and 32 steps on automatic axes match one device.

    The cases above test caches on explicit axes.
    """
    assert measured["generated"] is None


def test_custom_shard_map_matches(measured):
    """A layer in a user's own shard_map differs by less than 1e-5 and sends one sum."""
    difference, collectives = measured["mapped"]
    assert difference < 1e-5  # a few rounding errors for outputs around 1
    assert collectives == {**A_SUM, "in loops": 0}


# ---- Communication; the cases above count it for explicit axes
# -------------------------------------------------------


def of(collectives, pattern):
    programs = {
        name: counts
        for name, counts in collectives["programs"].items()
        if re.fullmatch(pattern, name)
    }
    assert programs
    return programs


def test_data_parallelism_sends_nothing(measured):
    """With divided sequences, forward passes, prompts and steps send nothing."""
    for name, collectives in of(measured, "data (forward|prompt|step) .*").items():
        assert collectives == {"in loops": 0}, name


def test_weight_gradients_are_summed_once(measured):
    """With divided sequences, gradients of weights need exactly one sum."""
    for name, collectives in of(measured, "data gradient .*").items():
        assert collectives == {**A_SUM, "in loops": 0}, name


def test_outputs_of_heads_are_summed_once(measured):
    """With divided heads, forward passes, prompts and steps send one sum."""
    for name, collectives in of(measured, "heads (forward|prompt|step) .*").items():
        assert collectives == {**A_SUM, "in loops": 0}, name


def test_input_gradients_are_summed_once(measured):
    """With divided heads, gradients send two sums, one for the output and one for the input."""
    for name, collectives in of(measured, "heads gradient .*").items():
        assert collectives == {"all-reduce f32": 2, "in loops": 0}, name

"""mha_jax attention with tokens sharded over virtual devices: results, communication and memory."""

import pytest
from helpers.input_errors import rejects
from helpers.shell import results_of_program

pytestmark = [pytest.mark.thorough, pytest.mark.costly("a process in which JAX has more devices")]

SENT = {  # forward; with gradients: keys and values move n - 1 times, and halves add 8 transfers
    "heads for tokens": ({"all-to-all": 4}, {"all-to-all": 8}),
    "heads for tokens, all that hides": ({"all-to-all": 6}, {"all-to-all": 11, "all-gather": 4}),
    "ring, causal": ({"collective-permute": 14}, {"collective-permute": 36}),
    "ring, eight": ({"collective-permute": 14}, {"collective-permute": 44}),
    "ring, two": ({"collective-permute": 10}, {"collective-permute": 24}),
    "ring, window, both ways": ({"collective-permute": 4}, {"collective-permute": 16}),
    "ring, chunks": ({}, {}),
    "ring, mask and bias": ({"collective-permute": 6}, {"collective-permute": 20, "all-gather": 1}),
}
"""Upper bounds, because XLA drops unused transfers. Biases and their gradients are replicated on
each device.
"""

SUMS = {"all-reduce", "all-reduce of flags"}
"""Gradients of replicated arrays (sinks and biases), and checks of the contents of mask and
bias.
"""


@pytest.fixture(scope="module")
def results():
    """Results of tests/helpers/programs/sharded_tokens.py, run in one process."""
    return results_of_program("sharded_tokens")


# ---- Results -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SENT)
def test_outputs_and_gradients_match(results, name):
    """Outputs and gradients of divided tokens match one device."""
    wrong, _, _, _ = results["attended"][name]
    assert wrong is None


@pytest.mark.parametrize("name", SENT)
def test_keys_on_wrong_device_are_detected(results, name):
    """Control: keys moved to the wrong device change the output."""
    *_, swapped = results["attended"][name]
    assert "output" in swapped


def test_all_stages_are_within_tolerance(results):
    """All stages and gradients of both plans, more than 25 each, are within tolerance."""
    assert len(results["compared"]) == 2
    for plan, (passed, wrong) in results["compared"].items():
        assert (wrong, passed > 25) == ([], True), plan


@pytest.mark.parametrize("kind", ["automatic", "explicit"])
def test_ragged_prompt_and_steps_match(results, kind):
    """A ragged prompt and 32 steps over sharded slots match one device and send two reductions
    each.
    """
    wrong, prompt, step = results["generated"][kind]
    assert wrong is None
    assert prompt == step == {"all-reduce": 2}  # maximum scores; sums of exponentials and values


def test_custom_shard_map_matches(results):
    """Attention in a user's own shard_map, with NaN in padding, differs by less than 1e-5."""
    assert results["mapped"] < 1e-5  # a few rounding errors for outputs around 1


@pytest.mark.parametrize("kind", ["automatic", "explicit"])
def test_nan_padding_of_divided_tokens(results, kind):
    """Gradients of a layer with divided tokens and NaN in padding differ by less than 1e-5."""
    assert results["padded"][kind] < 1e-5


# ---- Communication and memory --------------------------------------------------------------------


@pytest.mark.parametrize("name", SENT)
def test_devices_send_only_necessary_data(results, name):
    """The kinds and numbers of collectives, forward and with gradients, are within the upper
    bounds.
    """
    _, forward, everything, _ = results["attended"][name]
    for counted, needed in zip((forward, everything), SENT[name], strict=True):
        assert {kind for kind in counted if kind not in SUMS} <= needed.keys()
        assert all(counted.get(kind, 0) <= count for kind, count in needed.items())
    assert forward.keys() - SUMS == SENT[name][0].keys()


@pytest.mark.parametrize("name", ["data", "tensor", "heads for tokens", "ring"])
def test_bytes_sent_match_formula(results, name):
    """The number of bytes sent equals the formula for two and eight devices."""
    assert results["grown"][name]
    for _, sent, expected in results["grown"][name]:
        assert sent == expected


@pytest.mark.parametrize("name", ["data", "tensor", "heads for tokens", "ring"])
def test_temporary_memory_shrinks(results, name):
    """Eight devices need at most 31% of the temporary memory of two."""
    (two, _, _), (eight, _, _) = results["grown"][name]
    assert eight <= two / 4 * 1.24


# ---- Errors --------------------------------------------------------------------------------------


def test_unshardable_tokens_raise_by_name(results):
    """Tokens that the mesh does not divide raise an error that names the argument."""
    for name, input_error in {
        "uneven": rejects("keys", "30 and 4"),
        "unknown": rejects("tokens", {"axis": "tokens", "mesh.axis_names": ("sequence",)}),
        "undivided": rejects("tokens", {"axis": "sequence", "mesh.axis_names": ()}),
    }.items():
        assert input_error.is_printed_in(results["rejected"].pop(name))
    assert results["rejected"] == {}

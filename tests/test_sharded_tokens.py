"""Attention of mha_jax whose tokens are divided over virtual devices: what it gives, and what these send and hold."""

import pytest
from refusals import refuses
from shell import found_by

pytestmark = pytest.mark.thorough

SENT = {  # forward, and with gradients: keys and values go on n - 1 times; with halves, to and from these, 8 more
    "heads for tokens": ({"all-to-all": 4}, {"all-to-all": 8}),
    "heads for tokens, all that hides": ({"all-to-all": 6}, {"all-to-all": 11, "all-gather": 4}),
    "ring, causal": ({"collective-permute": 14}, {"collective-permute": 36}),
    "ring, eight": ({"collective-permute": 14}, {"collective-permute": 44}),
    "ring, two": ({"collective-permute": 10}, {"collective-permute": 24}),
    "ring, window, both ways": ({"collective-permute": 4}, {"collective-permute": 16}),
    "ring, chunks": ({}, {}),
    "ring, mask and bias": ({"collective-permute": 6}, {"collective-permute": 20, "all-gather": 1}),
}
"""At most: XLA leaves out what is sent and not used. A bias is whole on each device, and so is its gradient."""

SUMS = {"all-reduce", "all-reduce of flags"}
"""Gradients of what is whole on each device: sinks, biases; and where mask and bias are looked through."""


@pytest.fixture(scope="module")
def found():
    """What tests/sharded_tokens.py found, in one process."""
    return found_by("sharded_tokens.py")


# ---- What is computed ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SENT)
def test_output_and_gradients_are_those_of_one_device(found, name):
    wrong, _, _, _ = found["attended"][name]
    assert wrong is None


@pytest.mark.parametrize("name", SENT)
def test_tokens_in_each_others_place_are_seen(found, name):
    *_, swapped = found["attended"][name]
    assert "output" in swapped


def test_every_stage_and_gradient_of_cases_is_within_the_budget(found):
    assert len(found["judged"]) == 2
    for plan, (passed, wrong) in found["judged"].items():
        assert (wrong, passed > 25) == ([], True), plan


@pytest.mark.parametrize("kind", ["automatic", "explicit"])
def test_a_ragged_prompt_and_32_steps_over_divided_slots(found, kind):
    wrong, prompt, step = found["generated"][kind]
    assert wrong is None
    assert prompt == step == {"all-reduce": 2}  # the largest scores; the sums of exponentials, and of values


def test_the_users_own_shard_map(found):
    assert found["mapped"] < 1e-5  # of outputs around 1: a few units of rounding


# ---- What devices send and hold --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SENT)
def test_devices_send_what_they_need(found, name):
    _, forward, everything, _ = found["attended"][name]
    for counted, needed in zip((forward, everything), SENT[name], strict=True):
        assert {kind for kind in counted if kind not in SUMS} <= needed.keys()
        assert all(counted.get(kind, 0) <= count for kind, count in needed.items())
    assert forward.keys() - SUMS == SENT[name][0].keys()


@pytest.mark.parametrize("name", ["data", "tensor", "heads for tokens", "ring"])
def test_bytes_are_those_on_paper(found, name):
    for _, sent, expected in found["grown"][name]:
        assert sent == expected


@pytest.mark.parametrize("name", ["data", "tensor", "heads for tokens", "ring"])
def test_temporary_memory_falls_as_devices_rise(found, name):
    (two, _, _), (eight, _, _) = found["grown"][name]
    assert eight <= two / 4 * 1.2


# ---- What is refused -------------------------------------------------------------------------------------------------


def test_tokens_that_cannot_be_divided_are_refused_by_name(found):
    for name, refusal in {
        "uneven": refuses("keys", "30 and 4"),
        "unknown": refuses("tokens", {"axis": "tokens", "mesh.axis_names": ("sequence",)}),
        "undivided": refuses("tokens", {"axis": "sequence", "mesh.axis_names": ()}),
    }.items():
        assert refusal.is_printed_in(found["refused"].pop(name))
    assert found["refused"] == {}

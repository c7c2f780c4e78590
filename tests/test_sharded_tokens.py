"""Attention of mha_jax whose tokens are divided over virtual devices: what it gives, and what these send and hold."""

import pytest
from refusals import refuses
from shell import found_by

from mha_spec import AttentionSpec
from parity.sharding.costs import PLANS, cost_of
from parity.sharding.hlo import Collective, collectives_in, counts_of, nbytes_of

pytestmark = pytest.mark.thorough

SENT = {  # forward, and with gradients: keys and values go on n - 1 times; with halves, to and from these, 8 more
    "heads for tokens": ({"all-to-all": 4}, {"all-to-all": 8}),
    "heads for tokens, all that hides": ({"all-to-all": 6}, {"all-to-all": 11, "all-gather": 4}),
    "ring, causal": ({"collective-permute": 14}, {"collective-permute": 36}),
    "ring, eight": ({"collective-permute": 14}, {"collective-permute": 44}),
    "ring, two": ({"collective-permute": 10}, {"collective-permute": 24}),
    "ring, window": ({"collective-permute": 2}, {"collective-permute": 8}),
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


# ---- On paper --------------------------------------------------------------------------------------------------------

LLAMA_70B = AttentionSpec(8192, 64, num_kv_heads=8, qkv_bias=False, out_bias=False)


def test_what_a_device_holds_of_weights():
    whole = 2 * (2 * 8192 * 8192 + 2 * 8192 * 1024)  # bfloat16
    costs = {plan: cost_of(LLAMA_70B, plan, 8, batch=64, tokens=8192) for plan in PLANS}
    held = {plan: cost.weights / whole for plan, cost in costs.items()}
    assert held == {"data": 1, "fully sharded": 1 / 8, "tensor": 1 / 8, "heads for tokens": 1, "ring": 1}
    of_64 = cost_of(LLAMA_70B, "tensor", 64, batch=64, tokens=8192)
    assert of_64.weights == 2 * (2 * 8192 * 8192 / 64 + 2 * 8192 * 1024)  # keys and values whole
    assert [sent.kind for sent in of_64.backward] == ["all-reduce", "all-reduce"]


def test_one_device_sends_nothing_and_computes_all():
    one, eight = (cost_of(LLAMA_70B, "data", devices, batch=64, tokens=8192) for devices in (1, 8))
    assert (one.moved_forward, one.moved_backward, one.operations_per_byte) == (0, 0, float("inf"))
    assert eight.operations == one.operations / 8
    assert eight.moved_backward == 2 * 7 / 8 * one.weights


def test_a_ring_sends_more_than_heads_for_tokens_where_there_are_many_devices():
    ring, heads = (cost_of(LLAMA_70B, plan, 8, batch=1, tokens=131072) for plan in ("ring", "heads for tokens"))
    assert ring.moved_forward > 2 * heads.moved_forward


@pytest.mark.parametrize(
    ("plan", "devices", "refusal"),
    [
        ("tensor", 128, refuses("devices", "64 query heads and devices=128")),
        ("heads for tokens", 16, refuses("devices", "8 key/value heads and devices=16")),
        ("data", 3, refuses("devices", "64 sequences and devices=3")),
        ("pipeline", 2, refuses("plan", plan="pipeline")),
        ("data", 0, refuses("devices", devices=0)),
    ],
)
def test_what_cannot_be_divided_has_no_cost(plan, devices, refusal):
    with refusal:
        cost_of(LLAMA_70B, plan, devices, batch=64, tokens=8192)


# ---- Compiled programs, read -----------------------------------------------------------------------------------------

PROGRAM = """HloModule m

%body (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %permute = f32[4]{0} collective-permute(%p), source_target_pairs={{0,1}}
}

%never (p: f32[4]) -> f32[4] {
  ROOT %gather = f32[4]{0} all-gather(%p), dimensions={0}
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %flags = pred[2,3]{1,0} all-reduce(%x), to_apply=%and
  %sums = (bf16[8]{0}, /*index=1*/f32[2,2]{1,0}) all-reduce-start(%x, %x), to_apply=%add
  %done = f32[4]{0} all-reduce-done(%sums)
  ROOT %loop = f32[4]{0} while(%x), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"7"}}
}
"""


def test_collectives_of_a_program_are_counted_with_their_loops():
    found = collectives_in(PROGRAM)
    permute, sums = Collective("collective-permute", False, 16, 7), Collective("all-reduce", False, 32, 1)
    assert found == [Collective("all-reduce", True, 6, 1), sums, permute]
    assert counts_of(found) == {"all-reduce": 1, "all-reduce of flags": 1, "collective-permute": 7}
    assert nbytes_of(found) == 6 + 32 + 7 * 16


# ---- What is refused -------------------------------------------------------------------------------------------------


def test_tokens_that_cannot_be_divided_are_refused_by_name(found):
    for name, refusal in {
        "uneven": refuses("keys", "30 and 4"),
        "unknown": refuses("tokens", {"axis": "tokens", "mesh.axis_names": ("sequence",)}),
        "undivided": refuses("tokens", {"axis": "sequence", "mesh.axis_names": ()}),
    }.items():
        assert refusal.is_printed_in(found["refused"].pop(name))
    assert found["refused"] == {}

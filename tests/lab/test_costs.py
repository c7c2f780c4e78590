"""Tests of computed memory and traffic of devices, and of collectives in programs."""

import pytest
from helpers.input_errors import rejects

from mha_spec import AttentionSpec
from parity_lab.costs import PLANS, cost_of
from parity_lab.mesh.hlo import Collective, collectives_in, counts_of, nbytes_of

LLAMA_70B = AttentionSpec(8192, 64, num_kv_heads=8, qkv_bias=False, out_bias=False)


def test_weights_per_device_match_plan():
    """Each of 8 devices has its plan's share of the attention weights of Llama 70B; each of
    64 has whole keys and values.
    """
    whole = 2 * (2 * 8192 * 8192 + 2 * 8192 * 1024)  # bfloat16
    costs = {plan: cost_of(LLAMA_70B, plan, 8, batch=64, tokens=8192) for plan in PLANS}
    shares = {plan: cost.weights / whole for plan, cost in costs.items()}
    assert shares == {
        "data": 1,
        "fully sharded": 1 / 8,
        "tensor": 1 / 8,
        "heads for tokens": 1,
        "ring": 1,
    }
    of_64 = cost_of(LLAMA_70B, "tensor", 64, batch=64, tokens=8192)
    assert of_64.weights == 2 * (
        2 * 8192 * 8192 / 64 + 2 * 8192 * 1024
    )  # keys and values are whole
    assert [sent.kind for sent in of_64.backward] == ["all-reduce", "all-reduce"]


def test_one_device_sends_nothing():
    """One device sends nothing; each of 8 computes an eighth and sends 2 * 7/8 of the weights
    for gradients.
    """
    one, eight = (cost_of(LLAMA_70B, "data", devices, batch=64, tokens=8192) for devices in (1, 8))
    assert (one.moved_forward, one.moved_backward, one.operations_per_byte) == (0, 0, float("inf"))
    assert eight.operations == one.operations / 8
    assert eight.moved_backward == 2 * 7 / 8 * one.weights


def test_ring_sends_more_than_heads_plan():
    """On 8 devices, a ring sends more than twice as many bytes as heads for tokens."""
    ring, heads = (
        cost_of(LLAMA_70B, plan, 8, batch=1, tokens=131072) for plan in ("ring", "heads for tokens")
    )
    assert ring.moved_forward > 2 * heads.moved_forward


@pytest.mark.parametrize(
    ("plan", "devices", "input_error"),
    [
        ("tensor", 128, rejects("devices", "64 query heads and devices=128")),
        ("heads for tokens", 16, rejects("devices", "8 key/value heads and devices=16")),
        ("data", 3, rejects("devices", "64 sequences and devices=3")),
        ("pipeline", 2, rejects("plan", plan="pipeline")),
        ("data", 0, rejects("devices", devices=0)),
    ],
)
def test_indivisible_plan_has_no_cost(plan, devices, input_error):
    """A number of devices that does not divide heads or sequences, zero devices, or an
    unknown plan raises an error.
    """
    with input_error:
        cost_of(LLAMA_70B, plan, devices, batch=64, tokens=8192)


# ---- Compiled programs ---------------------------------------------------------------------------

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


def test_collectives_in_loops_are_counted():
    """Collectives of a program are counted with the trips of their loop, flags apart;
    computations that never run do not count.
    """
    collectives = collectives_in(PROGRAM)
    permute, sums = (
        Collective("collective-permute", False, 16, 7),
        Collective("all-reduce", False, 32, 1),
    )
    assert collectives == [Collective("all-reduce", True, 6, 1), sums, permute]
    assert counts_of(collectives) == {
        "all-reduce": 1,
        "all-reduce of flags": 1,
        "collective-permute": 7,
    }
    assert nbytes_of(collectives) == 6 + 32 + 7 * 16

"""Heads divided over processes, and weights: equal to one process, with no more moved than has to be.

The processes are started once, and compute everything that is judged here: see processes.py.
"""

import fcntl
import os
import subprocess
import sys

import pytest
import torch
from helpers import PYTHONPATH
from helpers.programs import processes, rings
from helpers.programs.processes import (
    DIVIDED,
    EVERYTHING,
    FULLY_SHARDED,
    RINGS,
    SPECS,
    cached_kind,
    decoded,
    make,
    stepped,
    trained,
)
from helpers.refusals import refuses, refuses_type
from helpers.shell import environment

import mha_torch
import parity
from mha_spec import AttentionSpec, Rope
from parity import ShardPlan

pytestmark = [pytest.mark.thorough, pytest.mark.costly("a device of torch is a process")]

SIZES = [2, 4]
ONE = {"all_reduce": 1}

every_size = pytest.mark.parametrize("size", SIZES)
every_layer = pytest.mark.parametrize(("size", "name"), [(size, name) for size in SIZES for name in DIVIDED[size]])


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What the processes found, which one worker starts for all."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    with open(folder / "processes.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "found.pt").exists():
            program = [sys.executable, "-m", "helpers.programs.processes", str(folder)]
            subprocess.run(program, env=environment() | {"PYTHONPATH": PYTHONPATH}, check=True)
    return torch.load(folder / "found.pt")


def assert_as_one(found, kind, spec, compute):
    """What processes computed is what one computes, up to rounding."""
    exact = compute(make(kind, spec, torch.float64), dtype=torch.float64)
    parity.assert_parity(found, exact, same_precision=compute(make(kind, spec)))


def outputs_of(layer, **options):
    return decoded(layer, **options)[0]


# ---- parallel.shard --------------------------------------------------------------------------------------------------


@every_layer
def test_divided_heads_give_output_and_gradients_of_one_process(found, size, name):
    computed, _ = found[size]["shard"][name]
    assert_as_one(computed, mha_torch.MultiHeadAttention, SPECS[name], trained)


@every_size
def test_divided_heads_give_their_attention_weights(found, size):
    def with_weights(layer, **options):
        return trained(layer, need_weights=True, **options)

    computed = found[size]["shard"]["with weights"]
    assert "attn_weights" in computed
    assert_as_one(computed, mha_torch.MultiHeadAttention, SPECS["everything"], with_weights)


@every_layer
def test_divided_caches_give_ragged_prompts_and_steps_of_one_process(found, size, name):
    computed, _ = found[size]["shard"][f"{name}/decoded"]
    assert_as_one(computed, cached_kind(SPECS[name]), SPECS[name], outputs_of)


@every_layer
def test_a_process_holds_what_a_rank_must_hold(found, size, name):
    spec = SPECS[name]
    weights = {key: weight.numpy() for key, weight in make(mha_torch.MultiHeadAttention, spec).state_dict().items()}
    expected, own = parity.shard(weights, spec, ShardPlan(size), 0, alone=False)
    expected = {key: weight.shape for key, weight in expected.items()}
    if spec.num_kv_heads % size:  # these are whole, so that they can be trained
        of_width = tuple(name for name, norm in spec.norms.items() if norm.over == "width" and name != "q_norm")
        whole = [key for key in weights if key.startswith(("k_proj", "v_proj", *of_width))]
        expected |= {key: weights[key].shape for key in whole}
    assert found[size]["shard"][name][1] == expected
    slots = found[size]["shard"][f"{name}/decoded"][1]
    if spec.latent is None:
        heads = (processes.BATCH, own.num_kv_heads, processes.CAPACITY)
        assert slots == {"keys": (*heads, spec.head_dim), "values": (*heads, spec.value_head_dim)}
    else:
        assert slots == {"latents": (processes.BATCH, 1, processes.CAPACITY, spec.latent.width)}


def test_clipped_gradients_and_a_step_of_an_optimizer_are_those_of_one_process(found):
    parity.assert_parity(found["stepped"], stepped(None))


def test_weights_come_out_of_divided_layers_and_go_into_them_bit_for_bit(found):
    right = make(mha_torch.MultiHeadAttention, SPECS["everything"]).state_dict()
    for carried in found["carried"]:
        assert carried.keys() == right.keys()
        assert all(torch.equal(weight, carried[name]) for name, weight in right.items())


# ---- What goes with heads --------------------------------------------------------------------------------------------


def test_masks_biases_and_lengths_may_be_distributed_as_tokens_are(found):
    assert_as_one(found["beside"]["given"], mha_torch.MultiHeadSelfAttention, processes.GIVEN, processes.given)


def test_what_one_head_makes_not_finite_is_so_on_every_process(found):
    rows = processes.rows_not_finite(make(mha_torch.MultiHeadSelfAttention, processes.GIVEN)).int()
    assert rows.tolist() == [0, 0, 1, 1, 1, 1]
    assert all(torch.equal(own, rows) for own in found["beside"]["not finite"])


def test_what_one_key_head_makes_not_finite_is_so_in_all_that_share_its_norm(found):
    rows = processes.rows_out_of_range()
    assert rows.tolist() == [0, 0, 1, 1, 1, 1]
    assert all(torch.equal(own, rows) for own in found["beside"]["out of range"])


@pytest.mark.parametrize("name", ["compiled", "compiled norms", "ragged"])
def test_divided_layers_may_be_compiled_and_outputs_stay_distributed(found, name):
    computed, expected = found["beside"][name]
    parity.assert_parity(computed, expected)


# ---- What moves ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "forward", "backward"),
    [
        ("textbook", ONE, ONE),
        ("grouped", ONE, ONE),
        ("everything", ONE, ONE),
        ("latent", ONE, ONE),
        ("no-out-proj", {}, ONE),
        ("width", {"all_reduce": 3}, {"all_reduce": 3}),  # of queries, and of keys, a number for each token
        ("a step", ONE, {}),
        ("fully sharded", {"_allgather_base_": 1}, {"_allgather_base_": 1, "_reduce_scatter_base_": 1}),
        ("data parallel", {}, {"allreduce_": 1}),
        (
            "tokens divided outside",
            {"all_gather_into_tensor": 1, "reduce_scatter_tensor": 1},
            {"reduce_scatter_tensor": 1},  # the gradient of a sum is everywhere
        ),
    ],
)
def test_no_more_is_moved_than_has_to_be(found, name, forward, backward):
    assert found["moved"][name] == (forward, backward)


# ---- What is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "refusal"),
    [
        ("uneven", refuses("num_heads", num_heads=9, size=...)),
        ("fused_qkv", refuses("fused_qkv", fused_qkv=True)),
        ("shared_kv", refuses("shared_kv", shared_kv=True)),
        ("shared keys with norms of their own", refuses("k_norm", num_kv_heads=1, size=...)),
        ("outputs dropped", refuses("output_dropout", output_dropout=0.1)),
        ("norm over the width left out", refuses("a norm over the width")),
        ("divided already", refuses("layer", "DTensors")),
        ("its own style last", refuses("layer", "DTensors")),
        ("distributed, to a function", refuses_type("q_proj.weight", "DTensor")),
        ("no such dimension", refuses("heads", heads="tensor", names=("heads",))),
        ("no layer of ours", refuses_type("layer", "Linear")),
        ("by hand", refuses("q_proj", "features")),
        ("by hand, distributed", refuses("q_proj", "DTensor")),
        ("by hand, some projections", refuses("k_proj", "features")),
        ("by hand, whole output", refuses("the input of out_proj", shape=...)),
        ("by hand, fused_qkv", refuses("qkv_proj", "features")),
        ("by hand, gate", refuses("gate_proj", "features")),
        ("by hand, latent", refuses("q_proj", "features")),
        ("bias of all heads", refuses("bias", {"bias.shape": (1, 8, 6, 6)})),
        ("cache of all heads", refuses("cache.keys", {"cache.keys.shape": (3, 4, 9, 8)})),
    ],
)
def test_what_would_be_wrong_is_refused_by_name(found, name, refusal):
    kind, _, said = found["refused"][name].partition(": ")
    assert refusal.is_printed_in(said)
    assert kind == refusal.kind.__name__


# ---- Tokens ----------------------------------------------------------------------------------------------------------


def assert_as_whole(found, spec, seq_len, options):
    """What processes computed of their tokens is what one computes of all."""

    def compute(layer, dtype=torch.float32):
        return rings.trained(layer, seq_len=seq_len, dtype=dtype, **options)

    assert_as_one(found, mha_torch.MultiHeadSelfAttention, spec, compute)


@every_size
@pytest.mark.parametrize("name", rings.calls(RINGS))
def test_divided_tokens_give_output_and_gradients_of_one_process(found, size, name):
    assert_as_whole(found[size]["ring"]["layers"][name], *rings.calls(RINGS)[name])


@pytest.mark.parametrize("bug", rings.BUGS)
def test_a_bug_of_dividing_tokens_fails(found, bug):  # the control of the test above
    with pytest.raises(AssertionError, match="grad_" if bug == "local sums backward" else "output"):
        assert_as_whole(found[2]["ring"]["mistaken"][bug], *rings.calls(RINGS)["grouped/causal"])


def test_tokens_are_divided_beside_heads(found):
    assert_as_whole(found["tokens and heads"], EVERYTHING, rings.SEQ_LEN, rings.CAUSAL)


@pytest.mark.parametrize(
    ("size", "name", "passed", "scores"),
    [
        (2, "textbook/causal", 1, [80, 80]),  # of 16 x 16, half and the diagonal: as much on each
        (4, "textbook/causal", 3, [36, 36, 36, 36]),
        (4, "textbook/both ways", 3, [64, 64, 64, 64]),
        (4, "window/causal", 1, [16, 32, 32, 32]),  # its own part and the one before
        (4, "window/both ways", 3, [32, 48, 48, 32]),  # passed on in one direction only
    ],
)
def test_no_more_is_passed_on_and_multiplied_than_is_seen(found, size, name, passed, scores):
    assert found[size]["ring"]["counted"][name] == [[passed, each] for each in scores]


@every_size
def test_a_token_that_is_not_finite_spoils_what_sees_it_and_no_gradient(found, size):
    marks, are_finite = found[size]["ring"]["not finite"]
    seen, hidden, clean = marks
    assert seen == [0] * 10 + [1] * 6
    assert hidden == [0] * 12 + [1] + [0] * 3  # its own row
    assert clean == [0] * 16
    assert are_finite


@every_size
@pytest.mark.parametrize(
    ("name", "refusal"),
    [
        ("no such dimension", refuses("tokens", tokens="sequence", names=("heads",))),
        ("neither", refuses("heads or tokens", "neither")),
        ("no layer", refuses_type("layer", "Linear")),
        ("cache", refuses("layer", "MultiHeadAttentionWithCache")),
        ("shared_kv", refuses("shared_kv", shared_kv=True)),
        ("rope", refuses("rope", rope=...)),
        ("weights", refuses("need_weights", need_weights=True)),
        ("mask", refuses("mask", {"mask.shape": ...})),
        ("dropout", refuses("dropout", dropout=0.5)),
        ("lengths", refuses("key_padding_lengths", key_padding_lengths=...)),
        ("lengths of heads", refuses("key_padding_lengths", key_padding_lengths=[-1])),
        ("uneven", refuses("queries", "queries=[2, 1")),
        ("uneven, lengths", refuses("queries", "queries=[2, 1")),
    ],
)
def test_what_divided_tokens_cannot_have_is_refused_by_name(found, size, name, refusal):
    kind, _, said = found[size]["ring"]["refused"][name].partition(": ")
    assert refusal.is_printed_in(said)
    assert kind == refusal.kind.__name__


@every_size
def test_torchs_own_context_parallel_is_right_with_positions_and_refused_without(found, size):
    computed, said = found[size]["ring"]["torch"]
    spec = AttentionSpec(32, 4, rope=Rope())

    def gradients(layer, dtype=torch.float32):
        whole = rings.trained(layer, dtype=dtype, is_causal=True)
        return {name: whole[name] for name in computed}

    assert_as_one(computed, mha_torch.MultiHeadSelfAttention, spec, gradients)
    assert refuses("positions", positions=None).is_printed_in(said["positions"])
    assert refuses("mask").is_printed_in(said["mask"])
    assert refuses("key_padding_lengths").is_printed_in(said["key_padding_lengths"])


# ---- Fully sharded ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [*FULLY_SHARDED, *(f"{name}/grid" for name, spec in FULLY_SHARDED.items() if not spec.fused_qkv)]
)
def test_weights_sharded_on_the_meta_device_are_drawn_as_in_one_process(found, name):
    drawn, computed = found["fully sharded"][name]
    spec = FULLY_SHARDED[name.partition("/")[0]]

    def redrawn(kind, spec, dtype=torch.float32):
        layer = kind(spec)
        torch.manual_seed(processes.SEED)
        layer.reset_parameters()
        return layer.to(dtype)

    layer = redrawn(mha_torch.MultiHeadAttention, spec)
    assert drawn.keys() == layer.state_dict().keys()
    assert all(torch.equal(weight, drawn[key]) for key, weight in layer.state_dict().items())
    exact = trained(redrawn(mha_torch.MultiHeadAttention, spec, torch.float64), dtype=torch.float64)
    parity.assert_parity(computed, exact, same_precision=trained(layer))


def test_projections_that_are_sharded_by_themselves_may_cast_their_weights(found):
    layer = make(mha_torch.MultiHeadAttention, SPECS["textbook"])
    x = processes.random(processes.BATCH, processes.SEQ_LEN, 32)
    exact, _ = make(mha_torch.MultiHeadAttention, SPECS["textbook"], torch.float64)(x.double())
    narrow, _ = layer.to(torch.bfloat16)(x.bfloat16())
    parity.assert_parity(found["narrowed"], exact, same_precision=narrow.float(), dtype="bfloat16")

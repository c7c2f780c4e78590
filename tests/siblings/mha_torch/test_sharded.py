"""Heads, tokens and weights divided over processes: results match one process, with minimal
communication.

The processes start once and compute all results: see processes.py.
"""

import os
import subprocess
import sys

import pytest
import torch
from filelock import FileLock
from helpers import PYTHONPATH
from helpers.input_errors import rejects, rejects_type
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
from helpers.shell import environment

import mha_torch
import parity
from mha_spec import AttentionSpec, Rope
from parity import ShardPlan

pytestmark = [pytest.mark.thorough, pytest.mark.costly("a device of torch is a process")]

SIZES = [2, 4]
ONE = {"all_reduce": 1}

every_size = pytest.mark.parametrize("size", SIZES)
every_layer = pytest.mark.parametrize(
    ("size", "name"), [(size, name) for size in SIZES for name in DIVIDED[size]]
)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Return the results of the processes, which one worker starts for all."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    with FileLock(folder / "processes.lock"):
        if not (folder / "found.pt").exists():
            program = [sys.executable, "-m", "helpers.programs.processes", str(folder)]
            subprocess.run(program, env=environment() | {"PYTHONPATH": PYTHONPATH}, check=True)
    return torch.load(folder / "found.pt")


def assert_as_one(results, kind, spec, compute):
    """Check that results of processes match the results of one process, within rounding."""
    exact = compute(make(kind, spec, torch.float64), dtype=torch.float64)
    parity.assert_parity(results, exact, same_precision=compute(make(kind, spec)))


def outputs_of(layer, **options):
    return decoded(layer, **options)[0]


# ---- parallel.shard ------------------------------------------------------------------------------


@every_layer
def test_divided_heads_match_one_process(results, size, name):
    """Outputs and gradients of divided heads match one process."""
    computed, _ = results[size]["shard"][name]
    assert_as_one(computed, mha_torch.MultiHeadAttention, SPECS[name], trained)


@every_size
def test_divided_attention_weights_match(results, size):
    """Attention weights of divided heads match one process."""

    def with_weights(layer, **options):
        return trained(layer, need_weights=True, **options)

    computed = results[size]["shard"]["with weights"]
    assert "attn_weights" in computed
    assert_as_one(computed, mha_torch.MultiHeadAttention, SPECS["everything"], with_weights)


@every_layer
def test_divided_caches_match_one_process(results, size, name):
    """A ragged prompt and steps over divided caches match one process."""
    computed, _ = results[size]["shard"][f"{name}/decoded"]
    assert_as_one(computed, cached_kind(SPECS[name]), SPECS[name], outputs_of)


@every_layer
def test_process_holds_only_its_part(results, size, name):
    """Weights and cache slots of a process have the shapes of a rank's part; indivisible key heads
    are whole.
    """
    spec = SPECS[name]
    weights = {
        key: weight.numpy()
        for key, weight in make(mha_torch.MultiHeadAttention, spec).state_dict().items()
    }
    expected, own = parity.shard(weights, spec, ShardPlan(size), 0, alone=False)
    expected = {key: weight.shape for key, weight in expected.items()}
    if spec.num_kv_heads % size:  # these are whole, so that they can be trained
        of_width = tuple(
            name for name, norm in spec.norms.items() if norm.over == "width" and name != "q_norm"
        )
        whole = [key for key in weights if key.startswith(("k_proj", "v_proj", *of_width))]
        expected |= {key: weights[key].shape for key in whole}
    assert results[size]["shard"][name][1] == expected
    slots = results[size]["shard"][f"{name}/decoded"][1]
    if spec.latent is None:
        heads = (processes.BATCH, own.num_kv_heads, processes.CAPACITY)
        assert slots == {"keys": (*heads, spec.head_dim), "values": (*heads, spec.value_head_dim)}
    else:
        assert slots == {"latents": (processes.BATCH, 1, processes.CAPACITY, spec.latent.width)}


def test_optimizer_step_matches_one_process(results):
    """Gradient clipping and a step of an optimizer on divided weights match one process."""
    parity.assert_parity(results["stepped"], stepped(None))


def test_divided_weights_round_trip(results):
    """Weights are read from divided layers and loaded into them bit for bit."""
    right = make(mha_torch.MultiHeadAttention, SPECS["everything"]).state_dict()
    for carried in results["carried"]:
        assert carried.keys() == right.keys()
        assert all(torch.equal(weight, carried[name]) for name, weight in right.items())


# ---- Masks and non-finite values -----------------------------------------------------------------


def test_masks_may_be_distributed_as_tokens(results):
    """Masks, biases and lengths distributed like the tokens match one process."""
    assert_as_one(
        results["beside"]["given"],
        mha_torch.MultiHeadSelfAttention,
        processes.GIVEN,
        processes.with_inputs,
    )


def test_non_finite_head_spoils_every_rank(results):
    """With a contained kernel, rows that one head makes non-finite are non-finite on every
    process.
    """
    rows = processes.rows_not_finite(make(mha_torch.MultiHeadSelfAttention, processes.GIVEN)).int()
    assert rows.tolist() == [0, 0, 1, 1, 1, 1]
    assert all(torch.equal(own, rows) for own in results["beside"]["not finite"])


def test_nan_padding_of_divided_heads(results):
    """With NaN in padding, outputs of real tokens and gradients match one process."""
    output, *grads = processes.padded(make(mha_torch.MultiHeadSelfAttention, processes.GIVEN))
    own_output, *own_grads = results["beside"]["padded"]
    assert all(x.isfinite().all() for x in (output, *grads))
    torch.testing.assert_close(own_output, output, rtol=1e-4, atol=1e-5)
    # The gradient of the keys' bias is 0 but for rounding of terms as large as other gradients.
    largest = max(float(grad.abs().max()) for grad in grads)
    torch.testing.assert_close(own_grads, grads, rtol=1e-4, atol=1e-6 * largest)


@pytest.mark.parametrize("name", ["compiled", "compiled norms", "ragged"])
def test_divided_layers_can_be_compiled(results, name):
    """Compiled and ragged layers on distributed tensors match uncompiled ones."""
    computed, expected = results["beside"][name]
    parity.assert_parity(computed, expected)


# ---- Communication -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "forward", "backward"),
    [
        ("textbook", ONE, ONE),
        ("grouped", ONE, ONE),
        ("everything", ONE, ONE),
        ("latent", ONE, ONE),
        ("no-out-proj", {}, ONE),
        (
            "width",
            {"all_reduce": 3},
            {"all_reduce": 3},
        ),  # for queries and keys, one number for each token
        ("a step", ONE, {}),
        (
            "fully sharded",
            {"_allgather_base_": 1},
            {"_allgather_base_": 1, "_reduce_scatter_base_": 1},
        ),
        ("data parallel", {}, {"allreduce_": 1}),
        (
            "tokens divided outside",
            {"all_gather_into_tensor": 1, "reduce_scatter_tensor": 1},
            {"reduce_scatter_tensor": 1},  # all processes have the gradient of a sum
        ),
    ],
)
def test_collectives_are_minimal(results, name, forward, backward):
    """The kinds and numbers of collectives, forward and backward, are exactly those needed."""
    assert results["moved"][name] == (forward, backward)


# ---- Errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "input_error"),
    [
        ("uneven", rejects("num_heads", num_heads=9, size=...)),
        ("fused_qkv", rejects("fused_qkv", fused_qkv=True)),
        ("shared_kv", rejects("shared_kv", shared_kv=True)),
        ("shared keys with norms of their own", rejects("k_norm", num_kv_heads=1, size=...)),
        ("outputs dropped", rejects("output_dropout", output_dropout=0.1)),
        ("norm over the width left out", rejects("a norm over the width")),
        ("divided already", rejects("layer", "DTensors")),
        ("its own style last", rejects("layer", "DTensors")),
        ("distributed, to a function", rejects_type("q_proj.weight", "DTensor")),
        ("no such dimension", rejects("heads", heads="tensor", names=("heads",))),
        ("no layer of ours", rejects_type("layer", "Linear")),
        ("by hand", rejects("q_proj", "features")),
        ("by hand, distributed", rejects("q_proj", "DTensor")),
        ("by hand, some projections", rejects("k_proj", "features")),
        ("by hand, whole output", rejects("the input of out_proj", shape=...)),
        ("by hand, fused_qkv", rejects("qkv_proj", "features")),
        ("by hand, gate", rejects("gate_proj", "features")),
        ("by hand, latent", rejects("q_proj", "features")),
        ("bias of all heads", rejects("bias", {"bias.shape": (1, 8, 6, 6)})),
        ("cache of all heads", rejects("cache.keys", {"cache.keys.shape": (3, 4, 9, 8)})),
    ],
)
def test_unsupported_divisions_raise(results, name, input_error):
    """Layers, weights and calls that cannot be divided raise an error that names the argument."""
    kind, _, message = results["rejected"][name].partition(": ")
    assert input_error.is_printed_in(message)
    assert kind == input_error.kind.__name__


# ---- Tokens --------------------------------------------------------------------------------------


def assert_as_whole(results, spec, seq_len, options):
    """Check that results of processes for their tokens match the results of one process for all
    tokens.
    """

    def compute(layer, dtype=torch.float32):
        return rings.trained(layer, seq_len=seq_len, dtype=dtype, **options)

    assert_as_one(results, mha_torch.MultiHeadSelfAttention, spec, compute)


@every_size
@pytest.mark.parametrize("name", rings.calls(RINGS))
def test_divided_tokens_match_one_process(results, size, name):
    """Outputs and gradients of divided tokens match one process."""
    assert_as_whole(results[size]["ring"]["layers"][name], *rings.calls(RINGS)[name])


@pytest.mark.parametrize("bug", rings.BUGS)
def test_wrong_token_division_fails(results, bug):  # the control of the test above
    """Control: each injected bug of dividing tokens changes outputs or gradients."""
    with pytest.raises(AssertionError, match="grad_" if bug == "local sums backward" else "output"):
        assert_as_whole(results[2]["ring"]["mistaken"][bug], *rings.calls(RINGS)["grouped/causal"])


def test_tokens_and_heads_divide_together(results):
    """Tokens and heads divided at once match one process."""
    assert_as_whole(results["tokens and heads"], EVERYTHING, rings.SEQ_LEN, rings.CAUSAL)


@pytest.mark.parametrize(
    ("size", "name", "passed", "scores"),
    [
        (2, "textbook/causal", 1, [80, 80]),  # half of 16 x 16 and the diagonal, evenly divided
        (4, "textbook/causal", 3, [36, 36, 36, 36]),
        (4, "textbook/both ways", 3, [64, 64, 64, 64]),
        (4, "window/causal", 1, [16, 32, 32, 32]),  # its own part and the previous one
        (4, "window/both ways", 3, [32, 48, 48, 32]),  # passed on in one direction only
    ],
)
def test_ring_passes_and_multiplies_minimum(results, size, name, passed, scores):
    """Each process passes on keys and multiplies scores no more often than their visibility
    requires.
    """
    assert results[size]["ring"]["counted"][name] == [[passed, count] for count in scores]


@every_size
def test_non_finite_token_spoils_its_rows(results, size):
    """A NaN token spoils the rows that attend to it; one of padding spoils no row and no
    gradient.
    """
    marks, are_finite = results[size]["ring"]["not finite"]
    visible, hidden, clean = marks
    assert visible == [0] * 10 + [1] * 6
    assert hidden == [0] * 16
    assert clean == [0] * 16
    assert are_finite


@every_size
@pytest.mark.parametrize(
    ("name", "input_error"),
    [
        ("no such dimension", rejects("tokens", tokens="sequence", names=("heads",))),
        ("neither", rejects("heads or tokens", "neither")),
        ("no layer", rejects_type("layer", "Linear")),
        ("cache", rejects("layer", "MultiHeadAttentionWithCache")),
        ("shared_kv", rejects("shared_kv", shared_kv=True)),
        ("rope", rejects("rope", rope=...)),
        ("weights", rejects("need_weights", need_weights=True)),
        ("mask", rejects("mask", {"mask.shape": ...})),
        ("dropout", rejects("dropout", dropout=0.5)),
        ("lengths", rejects("key_padding_lengths", key_padding_lengths=...)),
        ("lengths of heads", rejects("key_padding_lengths", key_padding_lengths=[-1])),
        ("uneven", rejects("queries", "[2, 1")),
        ("uneven, lengths", rejects("queries", "[2, 1")),
    ],
)
def test_unsupported_token_divisions_raise(results, size, name, input_error):
    """Layers and calls whose tokens cannot be divided raise an error that names the argument."""
    kind, _, message = results[size]["ring"]["rejected"][name].partition(": ")
    assert input_error.is_printed_in(message)
    assert kind == input_error.kind.__name__


@every_size
def test_context_parallel_needs_positions(results, size):
    """A layer in torch's context_parallel matches one process; without positions, or with masks, it
    raises an error.
    """
    computed, messages = results[size]["ring"]["torch"]
    spec = AttentionSpec(32, 4, rope=Rope())

    def gradients(layer, dtype=torch.float32):
        whole = rings.trained(layer, dtype=dtype, is_causal=True)
        return {name: whole[name] for name in computed}

    assert_as_one(computed, mha_torch.MultiHeadSelfAttention, spec, gradients)
    assert rejects("positions", positions=None).is_printed_in(messages["positions"])
    assert rejects("mask").is_printed_in(messages["mask"])
    assert rejects("key_padding_lengths").is_printed_in(messages["key_padding_lengths"])


# ---- Fully sharded -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        *FULLY_SHARDED,
        *(f"{name}/grid" for name, spec in FULLY_SHARDED.items() if not spec.fused_qkv),
    ],
)
def test_meta_weights_match_one_process(results, name):
    """Fully sharded weights on the meta device are drawn as in one process, and outputs and
    gradients match.
    """
    drawn, computed = results["fully sharded"][name]
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


def test_sharded_projections_cast_weights(results):
    """Projections sharded separately with bfloat16 weights match a bfloat16 layer."""
    layer = make(mha_torch.MultiHeadAttention, SPECS["textbook"])
    x = processes.random(processes.BATCH, processes.SEQ_LEN, 32)
    exact, _ = make(mha_torch.MultiHeadAttention, SPECS["textbook"], torch.float64)(x.double())
    narrow, _ = layer.to(torch.bfloat16)(x.bfloat16())
    parity.assert_parity(
        results["narrowed"], exact, same_precision=narrow.float(), dtype="bfloat16"
    )

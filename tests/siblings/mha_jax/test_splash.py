"""JAX's splash attention as a kernel: interpreted on a CPU and lowered for an absent TPU."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.heads import fused_attention
from helpers.samples import sample
from jax.sharding import PartitionSpec as P

import mha_jax
from mha_jax import stages
from mha_jax.kernels import splash
from mha_jax.kernels.nonfinite import contained
from mha_jax.masks import Mask
from mha_jax.scores import Scores
from mha_spec import Alibi, AttentionSpec
from mha_spec.heads import BareHeads

NUM_HEADS, HEAD_DIM = 4, 16
EPS = float(np.finfo(np.float32).eps)
LENGTHS = {"key_padding_lengths": [0, 50]}

CASES = {  # number of queries, number of keys, mask options, layer fields
    "causal-padding": (140, 140, {"is_causal": True, **LENGTHS}, {"num_kv_heads": 2}),
    "window-soft-cap": (130, 260, {}, {"num_kv_heads": 1, "window_size": 30, "soft_cap": 2.0}),
    "nothing": (128, 128, {}, {}),
    "more-queries": (300, 140, {"is_causal": True}, {"num_kv_heads": 2}),
    "more-keys": (140, 400, {"is_causal": True}, {"value_head_dim": 24}),
    "window-padding": (
        300,
        140,
        {"is_causal": True, **LENGTHS},
        {"num_kv_heads": 2, "window_size": 30},
    ),
    "both-ways-padding": (160, 300, LENGTHS, {"window_size": 30, "scale": 0.3}),
    "chunks-sinks": (
        260,
        260,
        {"is_causal": True, **LENGTHS},
        {"num_kv_heads": 2, "chunk_size": 30, "sinks": True},
    ),
}
QUICK = ("causal-padding", "window-soft-cap")


def problem(name, dtype=np.float32):
    """Return the mask, the specification and the arrays (heads, sinks and a cotangent) of a
    case.
    """
    num_queries, num_keys, hides, fields = CASES[name]
    spec = AttentionSpec(NUM_HEADS * HEAD_DIM, NUM_HEADS, **fields)
    rng = np.random.default_rng(7)
    shapes = {
        "query": (2, NUM_HEADS, num_queries, HEAD_DIM),
        "key": (2, spec.num_kv_heads, num_keys, HEAD_DIM),
        "value": (2, spec.num_kv_heads, num_keys, spec.value_head_dim),
        "cotangent": (2, NUM_HEADS, num_queries, spec.value_head_dim),
    }
    shapes |= {"sinks": (NUM_HEADS,)} if spec.sinks else {}
    arrays = {
        name: jnp.asarray(rng.standard_normal(shape), dtype) for name, shape in shapes.items()
    }
    return Mask(**hides).within(spec).as_arrays(), spec, arrays


def results(attend, mask, spec, arrays):
    """Return the context and the gradients."""
    inputs = {name: x for name, x in arrays.items() if name != "cotangent"}

    def function(inputs):
        learned = {"sinks": inputs["sinks"]} if spec.sinks else {}
        scores = Scores(spec, learned=learned)
        return attend(inputs["query"], inputs["key"], inputs["value"], mask, scores)

    context, pull_back = jax.vjp(function, inputs)
    return {"context": context, **pull_back(arrays["cotangent"])[0]}


interpreted = partial(splash.attend, interpret=True)


@sample(1, name=QUICK)
@pytest.mark.parametrize("name", CASES)
def test_context_and_gradients_match(name):
    """Context and gradients match the plain path within 16 rounding errors, and are 0 in rows
    without a key.
    """
    mask, spec, arrays = problem(name)
    actual = results(interpreted, mask, spec, arrays)
    expected = results(stages.attend_without_weights, mask, spec, arrays)
    for key, x in expected.items():  # each sums a few hundred values in a different order
        np.testing.assert_allclose(
            actual[key], x, rtol=0, atol=16 * EPS * float(abs(x).max()), err_msg=key
        )
    hidden = mask.to_bool(*CASES[name][:2])
    if hidden is not None:
        is_empty = np.broadcast_to(hidden.all(axis=-1), actual["query"].shape[:3])
        assert is_empty.any() == ("padding" in name or "sinks" in name)
        assert not actual["context"][is_empty].any()
        assert not actual["query"][is_empty].any()


@pytest.mark.thorough
def test_bfloat16_differs_only_by_rounding():
    """In bfloat16, context and gradients differ from the plain path by at most 2^-6 of the largest
    value.
    """
    mask, spec, arrays = problem("causal-padding", jnp.bfloat16)
    actual = results(interpreted, mask, spec, arrays)
    expected = results(stages.attend_without_weights, mask, spec, arrays)
    for key, x in expected.items():
        assert actual[key].dtype == jnp.bfloat16
        difference = abs(actual[key].astype(np.float32) - x.astype(np.float32))
        assert difference.max() <= 2**-6 * abs(x.astype(np.float32)).max(), key


def test_nan_reaches_only_attending_rows():
    """In the contained kernel, NaN in keys spoils only rows that attend to it; all other contexts
    and gradients keep their bits.
    """
    mask, spec, arrays = problem("causal-padding")
    kernel = contained(interpreted)
    expected = results(kernel, mask, spec, arrays)
    spoilt = dict(arrays)
    spoilt["key"] = (
        arrays["key"].at[1, 0, 40].set(np.nan).at[1, 1, 60].set(np.nan)
    )  # the second is padding
    spoilt["value"] = arrays["value"].at[0].set(np.nan)  # a sequence of padding only
    actual = results(kernel, mask, spec, spoilt)
    is_nan = np.isnan(actual["context"]).any(axis=-1)
    sees_it = np.zeros_like(is_nan)
    sees_it[1, :2, 40:] = True  # the two heads that share the key head
    np.testing.assert_array_equal(is_nan, sees_it)
    np.testing.assert_array_equal(actual["context"][~is_nan], expected["context"][~is_nan])
    for name in ("query", "key", "value"):
        np.testing.assert_array_equal(actual[name][0], expected[name][0], err_msg=name)
        heads = slice(2, None) if name == "query" else slice(1, None)
        np.testing.assert_array_equal(
            actual[name][1, heads], expected[name][1, heads], err_msg=name
        )


# ---- Kernel selection ----------------------------------------------------------------------------


@pytest.fixture
def on_a_tpu(monkeypatch):
    monkeypatch.setattr(mha_jax.fused, "platform_of", lambda *arrays: "tpu")
    monkeypatch.setattr(jax, "device_count", lambda: 1)


def lowered(function, *arrays):
    """Return the program lowered for a TPU, as text."""
    return jax.jit(function).trace(*arrays).lower(lowering_platforms=("tpu",)).as_text()


def fused(x, spec=None, **keywords):
    return fused_attention(mha_jax)(x, x, x, spec, **keywords)[0]


def heads(seq_len=130, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct((2, NUM_HEADS, seq_len, HEAD_DIM), dtype)


def test_splash_is_used_on_tpu(on_a_tpu):
    """On a TPU, attention and its gradient call the three kernels of splash attention."""

    def loss(x, lengths):
        return fused(x, is_causal=True, key_padding_lengths=lengths).astype(np.float32).sum()

    text = lowered(jax.grad(loss), heads(), jax.ShapeDtypeStruct((2,), np.int32))
    assert text.count("@tpu_custom_call") == 3  # forward, query gradient and key gradient


def of_layer(**fields):
    return AttentionSpec(NUM_HEADS * HEAD_DIM, NUM_HEADS, **fields)


@pytest.mark.parametrize(
    ("x", "keywords"),
    [
        (heads(seq_len=20), {}),
        (heads(dtype=np.float16), {}),
        (heads(), {"mask": np.zeros((130, 130), bool)}),
        (heads(), {"bias": np.zeros((130, 130), jnp.bfloat16)}),
        (heads(), {"spec": of_layer(alibi=Alibi())}),
        (heads(), {"spec": of_layer(chunk_size=20)}),
    ],
    ids=["few-tokens", "float16", "mask", "bias", "alibi", "chunks-both-ways"],
)
def test_unsupported_calls_do_not_use_splash(on_a_tpu, x, keywords):
    """Calls that splash attention does not support are lowered without it."""
    assert "@tpu_custom_call" not in lowered(partial(fused, **keywords), x)


def test_splash_needs_a_single_device(on_a_tpu, monkeypatch):
    """Splash is used on one device or inside a manual shard_map without VMA checks, and not
    otherwise.
    """
    mesh = jax.make_mesh((1,), ("devices",))
    is_taken = []

    def note(x):
        is_taken.append(splash.supports(x, x, Mask(), Scores(BareHeads(HEAD_DIM))))
        return x

    x = jnp.zeros((1, 1, splash.LANES, HEAD_DIM))
    for checks in (False, True):
        jax.shard_map(note, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=checks)(x)
    jax.jit(note)(x)
    monkeypatch.setattr(jax, "device_count", lambda: 8)
    jax.jit(lambda x: note(x))(x)
    note(x)
    assert is_taken == [True, False, True, False, True]

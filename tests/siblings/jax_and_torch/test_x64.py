"""JAX with 64-bit integers and floats: every kernel of mha_jax supports them, forward and backward.

In this mode Python integers have 64 bits, while positions and lengths have 32; JAX compares the
widths during tracing.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from helpers.heads import fused_attention, plain_attention
from helpers.samples import sample
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import mha_jax
import mha_torch
import parity
from mha_jax.kernels.cpu import blockwise
from mha_jax.kernels.fused import FusedAttention
from mha_jax.masks import Mask
from mha_jax.parallel import ContextParallel, tokens
from mha_jax.parallel.ring import attend_to_visitors
from mha_jax.scores import Scores
from mha_spec import Alibi, AttentionSpec, Latent, RelativeBias, RelativeProducts, Rope

BLOCKS = FusedAttention(few_scores=0, queries=16, keys=16, last_keys=4)
SEGMENTS = np.arange(300, dtype=np.int32)[None].repeat(2, axis=0) // 70
LENGTHS = {"key_padding_lengths": np.array([300, 7], np.int32)}
CAUSAL = {"is_causal": True}

# Fields of the layer and options that hide keys, with more queries than in one window and more than
# eight blocks.
CALLS = {
    "nothing": ({}, {}),
    "causal": ({}, CAUSAL),
    "lengths": ({"sinks": True}, CAUSAL | LENGTHS),
    "segments": ({"soft_cap": 3.0}, CAUSAL | {"segment_ids": SEGMENTS}),
    "window": ({"window_size": 20}, CAUSAL),
    "window-both-ways": ({"window_size": 20, "sinks": True}, LENGTHS),
    "window-mask": ({"window_size": 20}, {"mask": np.arange(300) % 7 == 0}),
    "window-segments": ({"window_size": 20}, CAUSAL | {"segment_ids": SEGMENTS}),
    "chunks": ({"chunk_size": 64}, CAUSAL),
    "chunks-alibi": ({"chunk_size": 100, "alibi": Alibi()}, LENGTHS),
    "relative-bias": ({"window_size": 20, "relative_bias": RelativeBias(8, 8)}, CAUSAL),
    "relative-products": ({"relative_products": RelativeProducts(3, 2, of_keys=True)}, CAUSAL),
}
KERNELS = {
    "default": ("cpu", FusedAttention()),
    "blocks": ("cpu", BLOCKS),
    "library": ("metal", FusedAttention()),
    "blocks at once": ("metal", FusedAttention(most_scores=0, queries=100, keys=100)),
}
"""Kernels of calls, with a platform that uses them."""

OFTEN = {
    "default": CALLS.keys(),
    "blocks": {
        "causal",
        "lengths",
        "segments",
        "window-both-ways",
        "chunks-alibi",
        "relative-products",
    },
    "library": {"lengths", "window-mask", "chunks"},
    "blocks at once": {"segments", "window", "relative-bias"},
}
"""Calls in float64: all for the default kernel, and those that each other kernel has code for; in
float32, all.
"""

both_dtypes = pytest.mark.parametrize("dtype", [np.float64, np.float32])


@pytest.fixture
def _wide_integers():
    with jax.enable_x64(True):
        yield


pytestmark = pytest.mark.usefixtures("_wide_integers")


def arrays_of(spec, dtype, seq_len=300):
    rng = np.random.default_rng(0)
    shapes = {
        "query": (2, spec.num_heads, seq_len, spec.head_dim),
        "key": (2, spec.num_kv_heads, seq_len, spec.head_dim),
        "value": (2, spec.num_kv_heads, seq_len, spec.head_dim),
    }
    shapes |= spec.score_shapes
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


def with_gradients(function, arrays):
    context, pull_back = jax.vjp(lambda arrays: function(**arrays)[0], arrays)
    return {"context": context} | {f"grad.{name}": x for name, x in pull_back(context)[0].items()}


def of_call(name, kernel):
    fields, masks = CALLS[name]
    spec = AttentionSpec(32, 4, num_kv_heads=2, **fields)
    masks = {key: jnp.asarray(x) if isinstance(x, np.ndarray) else x for key, x in masks.items()}
    return spec, functools.partial(fused_attention(mha_jax), spec=spec, **masks, kernel=kernel)


def traced_dtypes(function, *arguments):
    """Return the dtypes of the floating-point results of a function, which is traced, not
    computed.
    """
    results = jax.tree.leaves(jax.eval_shape(function, *arguments))
    return {x.dtype for x in results if jnp.issubdtype(x.dtype, jnp.floating)}


@sample(2, dtype=[np.float64])
@both_dtypes
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_accept_wide_integers(monkeypatch, dtype, kernel):
    """Every kernel can be traced with gradients if JAX has 64-bit integers, and keeps the dtype of
    its inputs.
    """
    platform, attention = KERNELS[kernel]
    monkeypatch.setattr(mha_jax.fused, "platform_of", lambda *arrays: platform)
    for name in OFTEN[kernel] if dtype == np.float64 else CALLS:
        spec, attend = of_call(name, attention)
        arrays = jax.tree.map(jnp.asarray, arrays_of(spec, dtype))
        with jax.numpy_dtype_promotion(
            "standard" if kernel == "library" else "strict"
        ):  # as JAX's own function needs
            dtypes = traced_dtypes(functools.partial(with_gradients, attend), arrays)
        assert dtypes == {np.dtype(dtype)}, name


@sample(dtype=[np.float64])
@both_dtypes
def test_window_matches_torch_in_64_bit_mode(dtype):
    """Context and gradients of a window, in 64-bit mode, match torch."""
    spec, attend = of_call("window", FusedAttention())
    arrays = arrays_of(spec, dtype)
    actual = jax.jit(functools.partial(with_gradients, attend))(jax.tree.map(jnp.asarray, arrays))

    def computed_by_torch(dtype):
        leaves = {
            name: torch.from_numpy(x.astype(dtype)).requires_grad_() for name, x in arrays.items()
        }
        context, _ = plain_attention(mha_torch)(**leaves, spec=spec, is_causal=True)
        gradients = torch.autograd.grad(context, list(leaves.values()), context)
        return {"context": context} | {
            f"grad.{name}": x for name, x in zip(leaves, gradients, strict=True)
        }

    expected, same = computed_by_torch(np.float64), computed_by_torch(dtype)
    if dtype == np.float64:
        parity.assert_parity(actual, expected)
    else:
        parity.assert_parity(actual, expected, same_precision=same)


# ---- Caches --------------------------------------------------------------------------------------

ROPE = Rope(100.0, rotary_dim=8, rotated="last")
LATENT = AttentionSpec(32, 4, head_dim=16, value_head_dim=8, latent=Latent(32, 8), rope=ROPE)
CACHED = {
    "plain": ("MultiHeadAttentionWithCache", AttentionSpec(32, 4, num_kv_heads=2, rope=Rope())),
    "window": ("MultiHeadAttentionWithCache", AttentionSpec(32, 4, window_size=20, sinks=True)),
    "latent": ("MultiHeadLatentAttention", LATENT),
}


@sample(dtype=[np.float64])
@both_dtypes
@pytest.mark.parametrize("name", CACHED)
def test_caches_accept_wide_integers(dtype, name):
    """Prompts and steps over caches can be traced in 64-bit mode, and keep the dtype of the
    layer.
    """
    kind, spec = CACHED[name]
    module = getattr(mha_jax, kind)(spec, param_dtype=dtype, rngs=nnx.Rngs(0))
    module.kernel = BLOCKS
    graph, state = nnx.split(module)

    def prompt_and_step(state, prompt, token, lengths):
        module = nnx.merge(graph, state)
        output, cache = module(prompt, module.init_cache(2, 300), new_lengths=lengths)
        step, cache = module(token, cache.crop(lengths))
        return output, step, cache

    prompt, token = (jnp.zeros((2, seq_len, 32), dtype) for seq_len in (200, 1))
    dtypes = traced_dtypes(prompt_and_step, state, prompt, token, jnp.array([200, 3], jnp.int32))
    assert dtypes == {np.dtype(dtype)}


@sample(dtype=[np.float64])
@both_dtypes
@pytest.mark.parametrize("platform", ["cpu", "metal"])
@pytest.mark.parametrize("window_size", [None, 20])
def test_step_kernel_accepts_wide_integers(dtype, platform, window_size):
    """The kernel of steps can be traced with gradients in 64-bit mode, and keeps its dtype."""
    spec = AttentionSpec(32, 4, num_kv_heads=2, window_size=window_size, alibi=Alibi())
    query, cached = jnp.zeros((2, 4, 1, 8), dtype), jnp.zeros((2, 2, 300, 8), dtype)
    mask = Mask(is_causal=True, span=spec.span, q_offset=jnp.array([250, 3], jnp.int32))

    def attend(query, key, value):
        scores = Scores(spec)
        return (
            blockwise.attend_to_cache(
                query, key, value, mask, scores, sizes=BLOCKS, platform=platform
            ),
        )

    arrays = {"query": query, "key": cached, "value": cached}
    assert traced_dtypes(functools.partial(with_gradients, attend), arrays) == {np.dtype(dtype)}


# ---- Divided tokens ------------------------------------------------------------------------------


@sample(2, dtype=[np.float64])
@both_dtypes
@pytest.mark.parametrize(
    ("passes_keys", "name"),
    [
        *((True, name) for name in ("causal", "lengths", "window", "window-mask", "chunks")),
        *(
            (False, name) for name in ("lengths", "window-mask")
        ),  # heads are exchanged, and the kernel is the usual one
    ],
)
def test_divided_tokens_accept_wide_integers(monkeypatch, dtype, passes_keys, name):
    """Attention over divided tokens can be traced with gradients in 64-bit mode, with a ring if it
    passes keys.
    """
    mesh = AbstractMesh((2,), ("sequence",), axis_types=(AxisType.Auto,))
    spec, attend = of_call(name, ContextParallel("sequence", BLOCKS, passes_keys=passes_keys))
    sharding = NamedSharding(mesh, PartitionSpec(None, None, "sequence"))
    arrays = {
        key: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding if x.ndim == 4 else None)
        for key, x in arrays_of(spec, dtype).items()
    }
    rings = []
    monkeypatch.setattr(
        tokens, "attend_to_visitors", lambda *args: rings.append(1) or attend_to_visitors(*args)
    )
    with jax.sharding.use_abstract_mesh(mesh):
        assert traced_dtypes(functools.partial(with_gradients, attend), arrays) == {np.dtype(dtype)}
    assert bool(rings) == passes_keys

"""The kernel of a layer: a custom kernel replaces it in all calls without attention weights, with
its own arithmetic.

The default kernel passes what it does not support on to the plain path.
"""

from dataclasses import replace

import numpy as np
import pytest
import ttnn
from helpers.tt.formulas import assert_close, module_of, rounded

import mha_tt
import parity
from mha_spec import Alibi, Latent
from mha_spec.heads import BareHeads
from mha_tt import stages
from mha_tt.kernels import fused
from mha_tt.masks import Mask
from mha_tt.scores import Scores

SPEC = parity.AttentionSpec(64, 4, num_kv_heads=2, sinks=True)
LATENT = parity.AttentionSpec(
    64,
    4,
    head_dim=48,
    rope=parity.Rope(rotary_dim=16, rotated="last"),
    latent=Latent(32, rope_dim=16),
)
KERNEL, KERNEL_OF_STEP = (
    f"ttnn.transformer.scaled_dot_product_attention{suffix}" for suffix in ("", "_decode")
)


def tokens(seq_len, seed=1):
    return rounded(np.random.default_rng(seed).standard_normal((2, seq_len, 64)), ttnn.bfloat16)


class Noted:
    """The plain path as a kernel that records the shapes of its inputs."""

    def __init__(self):
        self.shapes = []

    def __call__(self, query, key, value, mask, scores):
        self.shapes.append((tuple(query.shape), tuple(key.shape), tuple(value.shape)))
        return stages.attend(query, key, value, mask, scores)[0]


def by_module(device, kernel):
    module = module_of("MultiHeadAttention", SPEC, device)
    module.kernel = kernel or module.kernel
    return [module(mha_tt.upload(tokens(5), device=device), is_causal=True)[0]]


def in_chunks(kind, spec):
    def run(device, kernel):
        module, outputs = module_of(kind, spec, device), []
        module.kernel, cache = kernel or module.kernel, module.init_cache(2, 40)
        for seed, seq_len in enumerate((5, 2, 1)):
            output, cache = module(mha_tt.upload(tokens(seq_len, seed), device=device), cache)
            outputs.append(output)
        return outputs

    return run


def by_function(function, *cache):
    def run(device, kernel):
        spec = LATENT if function is mha_tt.multi_head_latent_attention else SPEC
        weights = mha_tt.upload_weights(parity.random_weights(spec), spec, device=device)
        slots = [make(device) for make in cache]
        options = {} if kernel is None else {"kernel": kernel}
        return [
            function(mha_tt.upload(tokens(5), device=device), weights, spec, *slots, **options)[0]
        ]

    return run


WAYS = {
    "module": by_module,
    "cache": in_chunks("MultiHeadAttentionWithCache", SPEC),
    "latents": in_chunks("MultiHeadLatentAttention", LATENT),
    "function": by_function(mha_tt.multi_head_attention),
    "function of a cache": by_function(
        mha_tt.multi_head_attention_with_cache,
        lambda device: mha_tt.init_cache(2, 2, 40, 32, device=device),
    ),
    "function of latents": by_function(
        mha_tt.multi_head_latent_attention,
        lambda device: mha_tt.init_latent_cache(2, 40, 32, 16, device=device),
    ),
}


@pytest.mark.parametrize(
    "way", list(WAYS)
)  # a mark would keep its arguments alive after ttnn exits
def test_custom_kernel_replaces_default(device, calls, way):
    """A custom kernel is called once per output in every layer and function, instead of ttnn's
    kernels, and outputs match the default's.
    """
    kernel, run = Noted(), WAYS[way]
    actual = run(device, kernel)
    assert len(kernel.shapes) == len(actual)
    assert not {KERNEL, KERNEL_OF_STEP} & {call.name for call in calls}
    for output, expected in zip(actual, run(device, None), strict=True):
        assert_close(mha_tt.download(output), mha_tt.download(expected), ttnn.bfloat16)
    assert {KERNEL, KERNEL_OF_STEP} & {call.name for call in calls}


def test_kernel_gets_latents_as_keys(device):
    """In a step, a kernel receives the cached latents, 96 wide and with one head, as keys and
    values.
    """
    kernel = Noted()
    WAYS["latents"](device, kernel)
    assert kernel.shapes[-1] == ((2, 4, 1, 96), (2, 1, 32, 96), (2, 1, 32, 96))


def test_attention_weights_skip_the_kernel(device):
    """With need_weights, the plain path runs and the kernel of the module is not called."""
    module, kernel = module_of("MultiHeadAttention", SPEC, device), Noted()
    module.kernel = kernel
    _, attn_weights = module(mha_tt.upload(tokens(5), device=device), need_weights=True)
    assert (tuple(attn_weights.shape), kernel.shapes) == ((2, 4, 5, 5), [])


def test_kernel_has_its_own_arithmetic(device, calls):
    """Attention runs with the arithmetic of the kernel, and projections with the module's."""
    fast, accurate = mha_tt.fast_config(device), mha_tt.accurate_config(device)
    WAYS["cache"](device, fused.FusedAttention(fast))
    configs = {
        name: {
            mha_tt.describe_config(call.keywords["compute_kernel_config"])
            for call in calls
            if call.name == name
        }
        for name in (KERNEL, KERNEL_OF_STEP, "ttnn.linear")
    }
    fast_only = {mha_tt.describe_config(fast)}
    assert configs == {
        KERNEL: fast_only,
        KERNEL_OF_STEP: fast_only,
        "ttnn.linear": {mha_tt.describe_config(accurate)},
    }


UNSUPPORTED = {
    # name: (dtype, features of keys and of values, changes to the scores)
    "float32": (ttnn.float32, 32, 32, {}),
    "bare heads": (ttnn.bfloat16, 20, 20, {}),
    "wide values": (ttnn.bfloat16, 32, 64, {}),
    "soft cap": (ttnn.bfloat16, 32, 32, {"spec": parity.AttentionSpec(128, 4, soft_cap=5.0)}),
    "ALiBi": (ttnn.bfloat16, 32, 32, {"spec": parity.AttentionSpec(128, 4, alibi=Alibi())}),
    "dropout": (ttnn.bfloat16, 32, 32, {"dropout": 0.5, "seed": 3}),
    "a given dropout": (
        ttnn.bfloat16,
        32,
        32,
        {"dropout": 0.5, "dropout_keep": np.arange(7) % 2 == 0},
    ),
}


@pytest.mark.parametrize("name", list(UNSUPPORTED))
def test_unsupported_calls_use_plain_path(device, calls, rng, name):
    """Calls that the default kernel does not support return the bits of the plain path."""
    dtype, *features, changes = UNSUPPORTED[name]
    shapes = [(2, 4, 5, features[0]), (2, 2, 7, features[0]), (2, 2, 7, features[1])]
    q, k, v = (
        mha_tt.upload(rng.standard_normal(shape), device=device, dtype=dtype) for shape in shapes
    )
    visible, scores = (
        Mask(key_padding_lengths=[4, 7]),
        replace(Scores(BareHeads(features[0])), **changes),
    )
    actual = mha_tt.download(fused.attend(q, k, v, visible, scores))
    assert KERNEL not in {call.name for call in calls}
    assert np.array_equal(actual, mha_tt.download(stages.attend(q, k, v, visible, scores)[0]))

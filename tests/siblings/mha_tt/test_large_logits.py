"""Very large logits: the prompt kernel loses rows with float32 sums, but the fused path loses none.

On a mock board, the golden function loses the same rows as a simulator
(docs/evidence/upstream-ttnn.md).
"""

import numpy as np
import pytest
import ttnn
from helpers.heads import fused_attention
from helpers.tt.formulas import attend, rounded

import mha_tt
from mha_tt.device import accurate_config, fast_config, with_bfloat16_sums

pytestmark = pytest.mark.board

T, H = 40, 64
KERNEL = "ttnn.transformer.scaled_dot_product_attention"
WINDOW = mha_tt.create_sliding_window_mask(T, window_size=16)
HIDDEN = np.random.default_rng(3).random((T, T)) < 0.3
HIDDEN[:, 0] = False
BIAS = np.random.default_rng(4).standard_normal((T, T)).astype(np.float32)

OPTIONS = {
    # name: (options, equivalent mask, bias)
    "nothing": ({}, np.zeros((1, 1), bool), 0.0),
    "causal": ({"is_causal": True}, mha_tt.create_causal_mask(T), 0.0),
    "window": ({"mask": WINDOW}, WINDOW, 0.0),
    "mask": ({"mask": HIDDEN}, HIDDEN, 0.0),
    "bias": ({"bias": BIAS}, np.zeros((1, 1), bool), BIAS),
}
every_option = pytest.mark.parametrize(("options", "mask", "bias"), OPTIONS.values(), ids=OPTIONS)


def heads(gain, seed=0):
    """Return queries, keys and values (1, heads, T, H) whose logits are about gain^2."""
    rng = np.random.default_rng(seed)
    sizes = {"query": (4, gain), "key": (2, gain), "value": (2, 1.0)}
    return {
        name: rounded(size * rng.standard_normal((1, num_heads, T, H)), ttnn.bfloat16)
        for name, (num_heads, size) in sizes.items()
    }


def uploaded(device, inputs):
    return [mha_tt.upload(x, device=device) for x in inputs.values()]


def kernel(device, inputs, config, **options):
    """Call the operation directly, as the fused path does."""
    program_config = ttnn.SDPAProgramConfig(
        compute_with_storage_grid_size=device.compute_with_storage_grid_size(),
        q_chunk_size=64,
        k_chunk_size=64,
        exp_approx_mode=config.math_approx_mode,
    )
    options = {
        "is_causal": True,
        "program_config": program_config,
        "compute_kernel_config": config,
        **options,
    }
    return mha_tt.download(
        ttnn.transformer.scaled_dot_product_attention(*uploaded(device, inputs), **options)
    )


def lost(context):
    """Return the number of rows that are 0."""
    return int((context == 0).all(axis=3).sum())


def test_kernel_loses_rows_with_float32_sums(device):  # otherwise the fused path need not check
    """For logits around 128^2, the prompt kernel loses rows with float32 sums, but none with
    bfloat16 sums; for logits around 8^2 it loses none.
    """
    accurate, inputs = accurate_config(device), heads(128.0)
    assert 20 < lost(kernel(device, inputs, accurate)) < 120
    assert lost(kernel(device, inputs, with_bfloat16_sums(accurate, device))) == 0
    assert lost(kernel(device, inputs, fast_config(device))) == 0
    assert lost(kernel(device, heads(8.0), accurate)) == 0


@every_option
@pytest.mark.parametrize("gain", [1.0, 128.0, 4096.0])
def test_fused_path_loses_no_rows(device, gain, options, mask, bias):
    """The fused path loses no row, and at most 3% of rows are off by more than 5%, none for small
    logits.
    """
    inputs = heads(gain)
    context, _ = fused_attention(mha_tt)(*uploaded(device, inputs), **options)
    expected, _ = attend(*inputs.values(), mask=mask, bias=bias)
    context = mha_tt.download(context)
    assert lost(context) == 0
    # 8-bit scores cannot distinguish keys with close scores, which changes the output of about one
    # row in a hundred.
    wrong = np.linalg.norm(context - expected, axis=3) > 0.05 * np.linalg.norm(expected, axis=3)
    assert wrong.mean() <= (0.0 if gain == 1.0 else 0.03)


def test_kept_rows_are_bit_identical(device):
    """Rows that the kernel does not lose are returned by the fused path bit for bit."""
    inputs = heads(128.0)
    alone = kernel(device, inputs, accurate_config(device))
    context, _ = fused_attention(mha_tt)(*uploaded(device, inputs), is_causal=True)
    is_not_lost = (alone != 0).any(axis=3)
    assert is_not_lost.any()
    assert np.array_equal(mha_tt.download(context)[is_not_lost], alone[is_not_lost])


def test_hidden_key_does_not_affect_output(device):
    """A hidden key of 1e4 changes no bit of the rows that cannot attend to it."""
    inputs = heads(1.0)
    huge = {**inputs, "key": inputs["key"].copy()}
    huge["key"][:, :, -1] = 1e4
    before, after = (
        fused_attention(mha_tt)(*uploaded(device, x), is_causal=True)[0] for x in (inputs, huge)
    )
    assert np.array_equal(mha_tt.download(before)[:, :, :-1], mha_tt.download(after)[:, :, :-1])


@pytest.mark.parametrize(
    ("config_of", "times"), [(accurate_config, 2), (fast_config, 1)], ids=["accurate", "fast"]
)
def test_kernel_reruns_if_rows_may_be_lost(device, calls, config_of, times):
    """The kernel runs twice with accurate arithmetic, with the same options but bfloat16 sums, and
    once with fast arithmetic.
    """
    tensors = uploaded(device, heads(1.0))
    fused_attention(mha_tt)(
        *tensors, is_causal=True, kernel=mha_tt.fused.FusedAttention(config_of(device))
    )
    kernel_keywords = [dict(call.keywords) for call in calls if call.name == KERNEL]
    sums = [keywords.pop("compute_kernel_config").fp32_dest_acc_en for keywords in kernel_keywords]
    assert sums == [True, False][-times:]
    assert all(keywords == kernel_keywords[0] for keywords in kernel_keywords)

"""The tutorial, `plain.py` of every implementation: its masks on paper, and its layers against the
large ones.
"""

import ast
import sys

import numpy as np
import pytest
from helpers import ROOT
from helpers.textbook import TEXTBOOK_OUTPUT

from mha_spec import AttentionSpec
from parity.measure.core.case import Case
from parity.measure.core.problem import TEXTBOOK_INPUT, TEXTBOOK_WEIGHTS, make_problem

SPEC = AttentionSpec(8, 2)
SELF = make_problem(Case("self", SPEC, "", seq_len=4), "float32")
CROSS = make_problem(Case("cross", SPEC, "", seq_len=3, seq_len_k=4), "float32")
CACHED = make_problem(Case("cached", SPEC, "", seq_len=8, chunks=(4, 1, 3), capacity=8), "float32")

# Query 1 of the first sequence attends to no key, and no query attends to key 3.
MASK = np.array(
    [
        [[[0, 0, 0, 1], [1, 1, 1, 1], [0, 1, 0, 1]]],
        [[[0, 0, 0, 1], [0, 0, 1, 1], [1, 0, 0, 1]]],
    ],
    bool,
)

# 1 = masked. Every table was written down by hand, from the words of the docstring.
TABLES = {
    "causal": ("create_causal_mask", (2, 3), {}, [[0, 1, 1], [0, 0, 1]]),
    "padding": ("create_padding_mask", ([0, 2], 3), {}, [[[[1, 1, 1]]], [[[0, 0, 1]]]]),
    "nothing": ("create_attention_mask", (1, 2), {}, [[[[0, 0]]]]),
    "both": (
        "create_attention_mask",
        (2,),
        {"is_causal": True, "key_padding_lengths": [0, 2]},
        [[[[1, 1], [1, 1]]], [[[0, 1], [0, 0]]]],
    ),
    "cached": ("create_causal_mask_with_cache", (2, 5, 3), {}, [[0, 0, 0, 0, 1], [0, 0, 0, 0, 0]]),
}


def attended(sibling, layer, *inputs, **options):
    """Return the results of a layer as NumPy arrays."""
    options = {name: sibling.option(x) for name, x in options.items()}
    results = sibling.call(layer, *map(sibling.array, inputs), **options)
    return [sibling.numpy(x) for x in results]


# ---- Masks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "arguments", "keywords", "expected"), TABLES.values(), ids=TABLES)
def test_tutorial_masks_hide_keys(sibling, name, arguments, keywords, expected):
    """A mask of the tutorial is boolean and equals its table; test_masks.py has tables of the large
    functions.
    """
    mask = sibling.numpy(getattr(sibling.package.plain, name)(*arguments, **keywords))
    assert mask.dtype == bool
    assert np.array_equal(mask, np.array(expected, bool))


# ---- Layers --------------------------------------------------------------------------------------


def test_tutorial_equals_large_layer(sibling):
    """With the same weights and a mask, the tutorial's layer for two inputs returns the output and
    the attention weights of the large one.
    """
    layer, large = (
        sibling.backend.tutorial(CROSS),
        sibling.filled("MultiHeadAttention", SPEC, CROSS.weights),
    )
    inputs = [CROSS.inputs[name] for name in ("query", "key")]
    output, attn_weights = attended(sibling, layer, *inputs, mask=MASK, need_weights=True)
    expected, expected_weights = attended(sibling, large, *inputs, mask=MASK, need_weights=True)
    sibling.assert_close(output, expected, within=1e-6)
    sibling.assert_close(attn_weights, expected_weights, within=1e-6)
    assert np.array_equal(attn_weights == 0.0, np.broadcast_to(MASK, attn_weights.shape))


def test_tutorial_attends_to_itself(sibling):
    """The tutorial's layer for one input returns the output of the large one."""
    layer, large = (
        sibling.backend.tutorial(SELF),
        sibling.filled("MultiHeadSelfAttention", SPEC, SELF.weights),
    )
    x = sibling.array(SELF.inputs["query"])
    output, expected = (sibling.numpy(sibling.call(module, x)) for module in (layer, large))
    sibling.assert_close(output, expected, within=1e-6)


def test_tutorial_rows_without_keys_are_zero(sibling):
    """In a row in which all keys are masked, the core returns an output and attention weights of
    exactly 0.
    """
    query, key = (sibling.array(CROSS.inputs[name]) for name in ("query", "key"))
    core = sibling.package.plain.multi_head_attention_core
    output, attn_weights = map(sibling.numpy, core(query, key, key, 2, sibling.option(MASK)))
    is_empty = MASK.all(axis=-1)
    assert np.array_equal(np.all(output == 0.0, axis=-1), is_empty[:, 0])
    assert np.array_equal(
        np.all(attn_weights == 0.0, axis=-1), np.broadcast_to(is_empty, (2, 2, 3))
    )


def test_tutorial_core_is_textbook_example(sibling):
    """The core computes the output printed in a book, to its four decimals, from projected
    inputs.
    """
    tokens = np.array([TEXTBOOK_INPUT], np.float32)
    weights = [np.array(TEXTBOOK_WEIGHTS[f"{name}_proj.weight"], np.float32) for name in "qkv"]
    q, k, v = (sibling.array(tokens @ weight.T) for weight in weights)
    plain = sibling.package.plain
    output, _ = plain.multi_head_attention_core(q, k, v, 2, plain.create_causal_mask(6))
    half_of_last_digit = 0.5e-4 + 1e-6  # and float32's own rounding
    assert (
        np.abs(sibling.numpy(output) - TEXTBOOK_OUTPUT).max()
        <= half_of_last_digit + sibling.rounding
    )


def test_tutorial_cache_equals_one_pass(sibling):
    """A prompt, a token and a chunk through a cache give the outputs and the heads of one causal
    pass.
    """
    layer, large = (
        sibling.backend.tutorial(CACHED),
        sibling.filled("MultiHeadSelfAttention", SPEC, CACHED.weights),
    )
    x = CACHED.inputs["query"]
    outputs, cache_k, cache_v = [], None, None
    for chunk in np.split(x, [4, 5], axis=1):
        output, cache_k, cache_v = sibling.call(layer, sibling.array(chunk), cache_k, cache_v)
        outputs.append(sibling.numpy(output))
    expected = sibling.numpy(sibling.call(large, sibling.array(x), is_causal=True))
    sibling.assert_close(np.concatenate(outputs, axis=1), expected, within=1e-6)
    for name, cache in (("k", cache_k), ("v", cache_v)):
        projected = (
            x @ CACHED.weights[f"{name}_proj.weight"].T + CACHED.weights[f"{name}_proj.bias"]
        )
        sibling.assert_close(
            sibling.numpy(cache), projected.reshape(2, 8, 2, 4).swapaxes(1, 2), within=1e-6
        )


def test_tutorial_drops_in_training_only(sibling):
    """With dropout, two calls in training differ and two in evaluation do not."""
    layer = sibling.package.plain.MultiHeadSelfAttention(8, 2, dropout=0.5, **sibling.required)
    x = sibling.array(SELF.inputs["query"].astype(sibling.kernel_dtype))
    first, second = (sibling.numpy(layer(x)) for _ in range(2))
    assert not np.array_equal(first, second)
    layer.eval()
    first, second = (sibling.numpy(layer(x)) for _ in range(2))
    assert np.array_equal(first, second)


def test_tutorial_head_count_is_checked(sibling):
    """A width that the number of heads does not divide raises an error with both numbers."""
    with pytest.raises(ValueError, match="d_model=8 and num_heads=3"):
        sibling.package.plain.MultiHeadAttention(8, 3, **sibling.required)


# ---- The text ------------------------------------------------------------------------------------

FRAMEWORKS = {"jax": {"jax", "flax"}, "torch": {"torch"}, "tt": {"ttnn"}}


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_tutorial_imports_nothing_of_ours(name):
    """The tutorial imports its framework, NumPy and the standard library only."""
    tree = ast.parse((ROOT / f"mha_{name}" / "plain.py").read_text())
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            imported.add(node.module.partition(".")[0])
    assert FRAMEWORKS[name] <= imported <= FRAMEWORKS[name] | {"numpy", *sys.stdlib_module_names}

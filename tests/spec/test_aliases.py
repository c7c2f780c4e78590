"""Errors about unknown arguments name the argument to use."""

from dataclasses import fields

import pytest

from mha_spec import AttentionSpec, InputTypeError
from mha_spec.aliases import OF_CALLS, OF_MODULES, unknown_argument

FIELDS = [field.name for field in fields(AttentionSpec)]
CALL = [
    "query",
    "key",
    "value",
    "mask",
    "is_causal",
    "key_padding_lengths",
    "segment_ids",
    "bias",
    "need_weights",
]
CALL += ["positions", "capacity"]

OF_A_MODULE = {
    "embed_dim": "did you mean d_model?",
    "hidden_size": "did you mean d_model?",
    "in_features": "did you mean d_in?",
    "qkv_features": "did you mean head_dim?",
    "n_heads": "did you mean num_heads?",
    "num_attention_heads": "did you mean num_heads?",
    "kdim": "did you mean d_kv?",
    "vdim": "did you mean d_kv?",
    "bias": "did you mean qkv_bias and out_bias?",
    "dropout_rate": "did you mean dropout?",
    "dropout_p": "did you mean dropout?",
    "batch_first": "(batch, tokens, features)",
    "deterministic": "eval()",
    "causal": "an argument of the call",
    "normalize_qk": "Norm()",
    "attn_mask": "for the call, did you mean mask?",
    "window_sise": "did you mean window_size?",
    "colour": "",
}
OF_A_CALL = {
    "attn_mask": "pass ~attn_mask",
    "attention_mask": "attention_mask == 0",
    "key_padding_mask": "key_padding_mask[:, None, None]",
    "scale": "a field of the module",
    "dropout_p": "a field of the module",
    "causal": "did you mean is_causal?",
    "position_ids": "did you mean positions?",
    "embed_dim": "for the module, did you mean d_model?",
    "need_weight": "did you mean need_weights?",
    "colour": "",
}


@pytest.mark.parametrize(
    ("known", "expected"), [(FIELDS, OF_A_MODULE), (CALL, OF_A_CALL)], ids=["module", "call"]
)
def test_unknown_argument_names_ours(known, expected):
    """An argument of another library, or a near miss, leads to the argument of this one."""
    for name, advice in expected.items():
        error = unknown_argument(name, known)
        assert type(error) is InputTypeError, name
        assert error.argument == name
        assert advice in error.hint, name
        assert advice or not error.hint, name


def test_short_list_of_arguments_is_shown():
    """If nothing resembles an unknown argument, a function with few arguments lists them."""
    assert unknown_argument("colour", ["x", "cache"]).hint == "known are x, cache"
    assert "MultiHeadAttention" in unknown_argument("need_weights", ["x", "mask"]).hint


def test_table_names_real_arguments():
    """Every argument in the table exists, and no name of another library is an argument here."""
    for table, known in ((OF_MODULES, FIELDS), (OF_CALLS, CALL)):
        for name, alias in table.items():
            assert set(alias.ours) <= set(known), name
            assert name not in known or name == "need_weights", (
                name
            )  # which self-attention does not have
            assert alias.ours or alias.note, name

"""Names that other libraries have for arguments of this one, for errors about unknown arguments."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches

from mha_spec.errors import InputTypeError
from mha_spec.score_weights import SCORE_WEIGHTS

UNKNOWN_ARGUMENT = "be a known argument"
"""Rule of every error about an unknown argument."""

MOST_LISTED = 8
"""If nothing resembles an unknown name, a function with at most this many arguments lists them."""


@dataclass(frozen=True)
class Alias:
    """An argument of another library, in terms of this one.

    Attributes:
        ours: names of the arguments here that mean the same; several if one there sets several
            here.
        note: how to use them where that differs; or, without `ours`, all that there is to say.
    """

    ours: tuple[str, ...]
    note: str = ""


def _all_mean(ours: str, *names: str, note: str = "") -> dict[str, Alias]:
    return {name: Alias((ours,), note) for name in names}


_HEADS_NOTE = "head_dim is the width of one head, qkv_features // num_heads"
_ONE_WIDTH = "keys and values have one width"
_TWO_DROPOUTS = "dropout drops attention weights, output_dropout the output"
_TRUE_IS_MASKED = "True means masked here"
_ONE_ATTENDS = "there 1 means attend, here True means masked: pass mask=attention_mask == 0"

# Sources: torch.nn.MultiheadAttention, nnx.MultiHeadAttention, MultiHeadAttention of Keras,
# transformers, x-transformers, flash-attn.
OF_MODULES: dict[str, Alias] = {
    **_all_mean(
        "d_model",
        "embed_dim",
        "hidden_size",
        "hidden_dim",
        "model_dim",
        "n_embd",
        "dim",
        "out_features",
    ),
    "in_features": Alias(("d_in",), "d_model is the width of the output, and the default of d_in"),
    "qkv_features": Alias(("head_dim",), _HEADS_NOTE),
    **_all_mean(
        "num_heads", "heads", "n_heads", "n_head", "nhead", "num_attention_heads", "num_q_heads"
    ),
    **_all_mean(
        "num_kv_heads", "kv_heads", "n_kv_heads", "num_key_value_heads", "num_query_groups"
    ),
    **_all_mean("head_dim", "dim_head", "d_head", "d_k", "head_size", "key_dim", "qk_head_dim"),
    **_all_mean("value_head_dim", "d_v", "value_dim", "v_head_dim"),
    **_all_mean("d_kv", "kdim", "vdim", "dim_context", note=_ONE_WIDTH),
    **{
        name: Alias(("qkv_bias", "out_bias"))
        for name in ("bias", "use_bias", "attention_bias", "attn_bias")
    },
    "add_zero_attn": Alias(("sinks",), "a learned logit of each head, 0 in a new layer"),
    "add_bias_kv": Alias((), "learned keys and values are not supported"),
    **_all_mean("dropout", "dropout_p", "attn_dropout", "attention_dropout", "attn_pdrop"),
    "dropout_rate": Alias(("dropout",), _TWO_DROPOUTS),
    **_all_mean("output_dropout", "proj_drop", "resid_pdrop", "residual_dropout"),
    **_all_mean("scale", "softmax_scale", "query_scale", "attn_scale"),
    **_all_mean("soft_cap", "softcap", "logit_cap", "attn_logit_softcapping", "logits_soft_cap"),
    **_all_mean("window_size", "sliding_window", "window", "local_window_size"),
    **_all_mean(
        "qk_norm", "normalize_qk", "use_qk_norm", "attn_qk_norm", note="a Norm, such as Norm()"
    ),
    **_all_mean(
        "rope",
        "use_rope",
        "rotary",
        "rotary_emb_dim",
        "rotary_pos_emb",
        note="a Rope, such as Rope()",
    ),
    "rope_theta": Alias(("rope",), "pass Rope(theta=…)"),
    **_all_mean(
        "alibi", "use_alibi", "alibi_pos_bias", "alibi_slopes", note="an Alibi, such as Alibi()"
    ),
    **_all_mean("fused_qkv", "qkv_fused", "packed_qkv"),
    "batch_first": Alias((), "axes are always (batch, tokens, features)"),
    "deterministic": Alias((), "dropout is off after eval() and on after train()"),
    **{
        name: Alias((), "is_causal is an argument of the call")
        for name in ("causal", "is_causal", "use_causal_mask")
    },
    **{
        name: Alias((), "a cached layer makes its cache with init_cache")
        for name in ("decode", "use_cache")
    },
    "param_dtype": Alias((), "dtype is the dtype of the weights"),
}
"""Arguments of constructors."""

_OF_THE_MODULE = "is a field of the module, not of the call"

FIRST_INPUTS = ("query", "x", "hidden_states", "inputs", "inputs_q", "input", "src", "q")
"""Names of the tokens that attend: x in self-attention, query elsewhere."""

OF_CALLS: dict[str, Alias] = {
    "attn_mask": Alias(
        ("mask",),
        f"{_TRUE_IS_MASKED}, as in torch.nn.MultiheadAttention; in F.scaled_dot_product_attention "
        "True means attend: pass ~attn_mask; a floating-point one is a bias",
    ),
    "attention_mask": Alias(("mask",), f"{_ONE_ATTENDS}, with axes that broadcast to (B, N, T, S)"),
    "key_padding_mask": Alias(
        ("mask",),
        "where True means padding, pass mask=key_padding_mask[:, None, None]; "
        "key_padding_lengths has real tokens",
    ),
    "src_key_padding_mask": Alias(("mask",), "pass mask=src_key_padding_mask[:, None, None]"),
    "src_mask": Alias(("mask",), _TRUE_IS_MASKED),
    **_all_mean("is_causal", "causal", "use_causal_mask"),
    **_all_mean(
        "bias",
        "attn_bias",
        "attention_bias",
        "position_bias",
        "rel_pos",
        note="added to the scores",
    ),
    **_all_mean("key_padding_lengths", "seq_lens", "lengths", "key_value_seq_lengths", "seqlens_k"),
    **_all_mean("segment_ids", "cu_seqlens", "cu_seqlens_q", note="the segment of each token"),
    **_all_mean("positions", "position_ids", "input_pos", "pos"),
    **_all_mean("need_weights", "output_attentions", "return_attention_scores", "sow_weights"),
    # For self-attention, which does not have it.
    "need_weights": Alias((), "MultiHeadAttention and functions return attention weights"),
    "average_attn_weights": Alias((), "weights are of each head: average them over axis 1"),
    **_all_mean("key", "inputs_k", "k", "memory", "context", "encoder_hidden_states"),
    **_all_mean("value", "inputs_v", "v"),
    **{name: Alias((), f"scale {_OF_THE_MODULE}") for name in ("scale", "softmax_scale")},
    **{
        name: Alias((), f"dropout {_OF_THE_MODULE}; eval() switches it off")
        for name in ("dropout", "dropout_p", "dropout_rate")
    },
    "deterministic": Alias((), "eval() switches dropout off, train() on; functions have training="),
    **{
        name: Alias((), f"window_size {_OF_THE_MODULE}")
        for name in ("window_size", "sliding_window", "local_window_size")
    },
    "enable_gqa": Alias((), "num_kv_heads of the module is enough"),
    "rngs": Alias((), "the module draws from the dropout stream that it was made with"),
    **{
        name: Alias((), "MultiHeadAttentionWithCache takes a cache of its init_cache")
        for name in (
            "past_key_value",
            "past_key_values",
            "layer_past",
            "kv_cache",
            "cache",
            "use_cache",
            "decode",
        )
    },
    **{
        name: Alias((), "capacity is an argument of init_cache")
        for name in ("max_length", "max_len", "max_seq_len", "cache_len", "max_cache_len")
    },
}
"""Arguments of calls and of other functions."""


def unknown_argument(name: str, known_names: Iterable[str]) -> InputTypeError:
    """Return the error for an argument that a function does not have, with the name to use instead.

    Args:
        name: the unknown argument.
        known_names: arguments of the function.
    """
    known = list(known_names)
    return InputTypeError(name, UNKNOWN_ARGUMENT, hint=_advice(name, known))


def _advice(name: str, known: list[str]) -> str:
    # Names of constructors such as `bias` mean something else in a call.
    if "d_model" in known:
        table = OF_MODULES
        other_table = OF_CALLS
        other_owner = "the call"
    else:
        table = OF_CALLS
        other_table = OF_MODULES
        other_owner = "the module"
    if name in SCORE_WEIGHTS and "learned" in known:
        return f"pass learned={{{name!r}: …}}"
    alias = table.get(name)
    if alias is not None and not alias.ours:
        # A field of modules may be an argument of a function: `dropout` of split heads.
        other_alias = other_table.get(name)
        if other_alias is not None and len(other_alias.ours) == 1 and other_alias.ours[0] in known:
            return f"did you mean {_described(other_alias)}"
        return alias.note
    if name in FIRST_INPUTS and "x" in known:
        return "did you mean x?"
    if name in FIRST_INPUTS and "query" in known:
        return "did you mean query?"
    if alias is not None and set(alias.ours) <= set(known):
        return f"did you mean {_described(alias)}"
    similar = get_close_matches(name, known)
    if similar:
        return f"did you mean {' or '.join(similar)}?"
    alias = other_table.get(name)
    if alias is not None and alias.ours:
        return f"for {other_owner}, did you mean {_described(alias)}"
    if 0 < len(known) <= MOST_LISTED:
        return f"known are {', '.join(known)}"
    return ""


def _described(alias: Alias) -> str:
    if alias.note:
        note = f" ({alias.note})"
    else:
        note = ""
    return f"{' and '.join(alias.ours)}?{note}"

"""Kinds of values that keys of configurations have, checked wherever a rule reads a key."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mha_spec import InputError, InputTypeError
from mha_spec.rules import as_boolean, as_count, as_factor, as_number, as_rate

LARGEST_COUNT = 2**63 - 1
"""Larger integers, which JSON may hold, are beyond every size, and some are beyond floats."""

Check = Callable[[str, Any], object]
"""Raises an error if the value of a key, by its name, has the wrong type."""


def _integer(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise InputTypeError(name, "be an integer", {name: value})
    if abs(value) > LARGEST_COUNT:
        raise InputError(name, f"be at most {LARGEST_COUNT}", {name: value})


def _count(name: str, value: Any) -> None:
    _integer(name, value)
    as_count(name, value)


def _number(name: str, value: Any) -> None:
    if not math.isfinite(as_number(name, value)):
        raise InputError(name, "be finite", {name: value})


def _not_negative(name: str, value: Any) -> None:
    _number(name, value)
    if value < 0:
        raise InputError(name, "be at least 0", {name: value})


def _fraction(name: str, value: Any) -> None:
    if as_factor(name, value) > 1.0:
        raise InputError(name, "be at most 1", {name: value})


def _text(name: str, value: Any) -> None:
    if not isinstance(value, str):
        raise InputTypeError(name, "be text", {name: value})


def _list(name: str, value: Any) -> None:
    if not isinstance(value, list | tuple):
        raise InputError(name, "be a list", {name: value})


def _section(name: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise InputError(name, "hold values by name", {name: value})


def _list_of(check: Check) -> Check:
    """Return a check for lists of values that pass a check."""

    def check_list(name: str, value: Any) -> None:
        _list(name, value)
        for index, item in enumerate(value):
            check(f"{name}[{index}]", item)

    return check_list


def _size(name: str, value: Any) -> None:
    """Check one size of an image, or its height and width."""
    if not isinstance(value, list | tuple):
        _count(name, value)
        return
    if len(value) != 2:
        raise InputError(name, "be one size, or a height and a width", {name: value})
    _list_of(_count)(name, value)


MOST_LAYERS = 10_000
"""Layers of the largest model, stack or list of patterns. An arbitrary number, about eighty times
the layers of a large model: a small file must not fill the memory.
"""


def _patterns(name: str, value: Any) -> None:
    """Check a list of patterns, each with its repetitions: `[[["global", "local"], 12]]`."""
    _list(name, value)
    num_layers = 0
    for index, pattern in enumerate(value):
        at = f"{name}[{index}]"
        if not isinstance(pattern, list | tuple) or len(pattern) != 2:
            raise InputError(at, "be a list of kinds and a number of repetitions", {at: pattern})
        kinds, repetitions = pattern
        _list_of(_text)(f"{at}[0]", kinds)
        _count(f"{at}[1]", repetitions)
        num_layers += len(kinds) * repetitions
        if num_layers > MOST_LAYERS:
            rule = f"describe at most {MOST_LAYERS} layers"
            raise InputError(name, rule, f"{num_layers} up to {at}")


def _checks(check: Check, names: str) -> dict[str, Check]:
    """Return the check of several keys, whose names are separated by spaces."""
    return dict.fromkeys(names.split(), check)


KINDS: Mapping[str, Check] = {
    # ---- Sizes -----------------------------------------------------------------------------------
    **_checks(
        _count,
        "d_model dim embed_dim hidden_size n_embd n_embed d_kv head_dim attention_head_dim "
        "global_head_dim v_head_dim qk_nope_head_dim qk_rope_head_dim rotary_dim kv_lora_rank "
        "q_lora_rank num_attention_heads attention_heads num_heads n_head n_heads "
        "encoder_attention_heads decoder_attention_heads encoder_num_attention_heads "
        "decoder_num_attention_heads num_key_value_heads num_kv_heads kv_n_heads "
        "num_global_key_value_heads encoder_num_key_value_heads decoder_num_key_value_heads "
        "num_hidden_layers num_layers n_layer n_layers layers encoder_layers decoder_layers "
        "num_decoder_layers encoder_num_hidden_layers decoder_num_hidden_layers num_hidden_groups "
        "inner_group_num max_position_embeddings original_max_position_embeddings floor_scale "
        "relative_attention_num_buckets relative_attention_max_distance sliding_window_pattern "
        "_sliding_window_pattern prefix_dense_sliding_window_pattern attn_layer_period "
        "full_attention_interval global_attn_every_n_layers no_rope_layer_interval",
    ),
    # Some configurations mark an unused window by 0 or -1; one that is used must be a count in
    # AttentionSpec.
    **_checks(
        _integer,
        "sliding_window sliding_window_size attention_window_size window_size attention_chunk_size "
        "local_attention num_kv_shared_layers max_window_layers first_k_dense_replace "
        "attn_layer_offset full_attn_mod",
    ),
    **_checks(_size, "image_size patch_size"),
    # ---- Numbers ---------------------------------------------------------------------------------
    **_checks(
        as_factor,
        "rope_theta theta rotary_emb_base rope_local_base_freq global_rope_theta local_rope_theta "
        "factor alpha low_freq_factor high_freq_factor attention_factor rms_norm_eps "
        "layer_norm_eps layer_norm_epsilon layernorm_epsilon norm_eps norm_epsilon "
        "query_pre_attn_scalar attn_logit_softcapping clip_qkv",
    ),
    **_checks(
        _number,
        "beta_fast beta_slow short_mscale long_mscale attn_scale llama_4_scaling_beta "
        "attention_multiplier key_multiplier softmax_scale alibi_bias_max attention_value_scale",
    ),
    **_checks(_not_negative, "mscale mscale_all_dim"),
    **_checks(_fraction, "partial_rotary_factor rotary_pct"),
    **_checks(
        as_rate,
        "attention_dropout attention_probs_dropout_prob attn_pdrop dropout_rate "
        "hidden_dropout_prob resid_dropout resid_pdrop residual_dropout dropout hidden_dropout",
    ),
    # ---- Choices ---------------------------------------------------------------------------------
    **_checks(
        as_boolean,
        "alibi attention_bias attention_out_bias attention_k_eq_v attn_temperature_tuning bias "
        "enable_bias is_decoder is_encoder_decoder mrope_interleaved multi_query "
        "new_decoder_architecture qk_layernorm qkv_bias rope_interleave "
        "scale_attn_by_inverse_layer_idx scale_attn_weights truncate use_bias use_qk_norm "
        "use_qkv_bias use_relative_position_bias use_shared_relative_position_bias "
        "use_sliding_window",
    ),
    **_checks(_text, "position_embedding_type rope_type type hybrid_override_pattern"),
    # ---- Lists and sections ----------------------------------------------------------------------
    **_checks(
        _list,
        "architectures attention_layers attn_layer_indices attn_type_list block_types "
        "full_attn_idxs full_attn_layers kda_layers layer_types layers_block_type mlp_layer_types "
        "no_rope_layers",
    ),
    **_checks(_list_of(as_factor), "short_factor long_factor"),
    **_checks(_list_of(_number), "layer_rope_theta"),
    **_checks(_list_of(_count), "mrope_section"),
    **_checks(_patterns, "attention_types"),
    **_checks(
        _section, "attn_config linear_attn_config per_layer_config rope_parameters rope_scaling"
    ),
}
"""Checks of keys that rules read, by name. Keys with one supported value need no check of their
kind.
"""


def check_kind(name: str, value: Any, where: str = "") -> None:
    """Check the value of a key.

    Args:
        name: name of the key.
        value: its value, which is not None.
        where: prefix of the name in messages.

    Raises:
        ValueError: if its value is of the kind, but out of its range.
        TypeError: if it is of a wrong kind.
    """
    check = KINDS.get(name)
    if check is not None:
        check(f"{where}{name}", value)

"""Multi-head attention in JAX: masks, plain and fused attention, and a key/value cache."""

# Imported first: modules imported below import modules of `parallel`, whose public names depend on those imports.
import mha_jax.parallel as parallel  # noqa: F401
from mha_jax.cache import KVCache, append_to_cache, create_cache_mask, init_cache, kv_cache_nbytes
from mha_jax.cache_mha import (
    MultiHeadAttentionWithCache,
    multi_head_attention_with_cache,
)
from mha_jax.checks import checked
from mha_jax.features.latent import (
    LatentCache,
    absorb_keys,
    absorb_values,
    append_to_latent_cache,
    expand_latents,
    init_latent_cache,
    project_latents,
)
from mha_jax.features.latent_mha import MultiHeadLatentAttention, multi_head_latent_attention
from mha_jax.features.norms import apply_norm
from mha_jax.features.rope import apply_rope
from mha_jax.features.temperature import apply_temperature
from mha_jax.functional import multi_head_attention
from mha_jax.heads import combine_heads, repeat_kv_heads, split_heads
from mha_jax.kernels import fused
from mha_jax.kernels.nonfinite import contained
from mha_jax.mask_arrays import (
    create_causal_mask,
    create_causal_mask_with_cache,
    create_padding_mask,
    create_sliding_window_mask,
)
from mha_jax.masks import create_attention_mask
from mha_jax.mha import MultiHeadAttention, MultiHeadSelfAttention
from mha_jax.projections import apply_gate, project_output, project_qkv
from mha_jax.stages import (
    apply_dropout,
    attention_context,
    attention_scores,
    masked_softmax,
    scaled_dot_product_attention,
)
from mha_jax.weights import project_with

__all__ = [
    "KVCache",
    "LatentCache",
    "MultiHeadAttention",
    "MultiHeadAttentionWithCache",
    "MultiHeadLatentAttention",
    "MultiHeadSelfAttention",
    "absorb_keys",
    "absorb_values",
    "append_to_cache",
    "append_to_latent_cache",
    "apply_dropout",
    "apply_gate",
    "apply_norm",
    "apply_rope",
    "apply_temperature",
    "attention_context",
    "attention_scores",
    "combine_heads",
    "contained",
    "create_attention_mask",
    "create_cache_mask",
    "create_causal_mask",
    "create_causal_mask_with_cache",
    "create_padding_mask",
    "create_sliding_window_mask",
    "expand_latents",
    "fused",
    "init_cache",
    "init_latent_cache",
    "kv_cache_nbytes",
    "masked_softmax",
    "multi_head_attention",
    "multi_head_attention_with_cache",
    "multi_head_latent_attention",
    "project_latents",
    "project_output",
    "project_qkv",
    "project_with",
    "repeat_kv_heads",
    "scaled_dot_product_attention",
    "split_heads",
]

# Annotations of public functions are the checks of their arguments. Functions of the package call each other unchecked.
absorb_keys = checked(absorb_keys)
absorb_values = checked(absorb_values)
append_to_cache = checked(append_to_cache)
append_to_latent_cache = checked(append_to_latent_cache)
apply_dropout = checked(apply_dropout)
apply_gate = checked(apply_gate)
apply_norm = checked(apply_norm)
apply_rope = checked(apply_rope)
apply_temperature = checked(apply_temperature)
attention_context = checked(attention_context)
attention_scores = checked(attention_scores)
combine_heads = checked(combine_heads)
create_attention_mask = checked(create_attention_mask)
create_cache_mask = checked(create_cache_mask)
create_padding_mask = checked(create_padding_mask)
expand_latents = checked(expand_latents)
masked_softmax = checked(masked_softmax)
multi_head_attention = checked(multi_head_attention)
multi_head_attention_with_cache = checked(multi_head_attention_with_cache)
multi_head_latent_attention = checked(multi_head_latent_attention)
project_latents = checked(project_latents)
project_output = checked(project_output)
project_qkv = checked(project_qkv)
repeat_kv_heads = checked(repeat_kv_heads)
scaled_dot_product_attention = checked(scaled_dot_product_attention)
split_heads = checked(split_heads)

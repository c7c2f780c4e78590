"""Multi-head attention in TTNN: masks, plain and fused attention, and a key/value cache."""

import importlib.util
import platform

if importlib.util.find_spec("ttnn") is None:
    raise ImportError(
        "mha_tt needs ttnn (pip install ttnn), which has wheels for CPython 3.10 and 3.12 on "
        f"x86-64 Linux; this is {platform.python_implementation()} {platform.python_version()} "
        f"on {platform.machine()}"
    )

from mha_tt.cache import KVCache, append_to_cache, create_cache_mask, init_cache, kv_cache_nbytes
from mha_tt.cache_mha import (
    MultiHeadAttentionWithCache,
    multi_head_attention_with_cache,
)
from mha_tt.checks import check_apply_dropout as _check_apply_dropout
from mha_tt.checks import check_attention_scores as _check_attention_scores
from mha_tt.checks import check_masked_softmax as _check_masked_softmax
from mha_tt.checks import check_project_qkv as _check_project_qkv
from mha_tt.checks import checked as _checked
from mha_tt.decode.pages import PagedKVCache
from mha_tt.device import (
    accurate_config,
    describe_config,
    describe_target,
    download,
    download_parts,
    fast_config,
    open_device,
    open_mesh,
    target,
    upload,
)
from mha_tt.features.latent import (
    HeadWeights,
    LatentCache,
    absorb_keys,
    absorb_values,
    append_to_latent_cache,
    expand_latents,
    init_latent_cache,
    project_latents,
    weights_of_heads,
)
from mha_tt.features.latent_mha import MultiHeadLatentAttention, multi_head_latent_attention
from mha_tt.features.norms import apply_norm
from mha_tt.features.rope import Rotation, apply_rope
from mha_tt.features.temperature import apply_temperature
from mha_tt.functional import multi_head_attention
from mha_tt.heads import combine_heads, repeat_kv_heads, split_heads
from mha_tt.kernels import Kernel, fused
from mha_tt.kernels.nonfinite import contained
from mha_tt.layout import feature_indices, padded_head_dim
from mha_tt.mask_arrays import (
    create_causal_mask,
    create_causal_mask_with_cache,
    create_padding_mask,
    create_sliding_window_mask,
)
from mha_tt.masks import DeviceMask, Mask, create_attention_mask
from mha_tt.mha import MultiHeadAttention, MultiHeadSelfAttention
from mha_tt.projections import apply_gate, project_output, project_qkv
from mha_tt.scores import Scores
from mha_tt.stages import (
    apply_dropout,
    attention_context,
    attention_scores,
    masked_softmax,
    scaled_dot_product_attention,
)
from mha_tt.weights import download_weights, project_with, upload_weights

__all__ = [
    "DeviceMask",
    "HeadWeights",
    "KVCache",
    "Kernel",
    "LatentCache",
    "Mask",
    "MultiHeadAttention",
    "MultiHeadAttentionWithCache",
    "MultiHeadLatentAttention",
    "MultiHeadSelfAttention",
    "PagedKVCache",
    "Rotation",
    "Scores",
    "absorb_keys",
    "absorb_values",
    "accurate_config",
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
    "describe_config",
    "describe_target",
    "download",
    "download_parts",
    "download_weights",
    "expand_latents",
    "fast_config",
    "feature_indices",
    "fused",
    "init_cache",
    "init_latent_cache",
    "kv_cache_nbytes",
    "masked_softmax",
    "multi_head_attention",
    "multi_head_attention_with_cache",
    "multi_head_latent_attention",
    "open_device",
    "open_mesh",
    "padded_head_dim",
    "project_latents",
    "project_output",
    "project_qkv",
    "project_with",
    "repeat_kv_heads",
    "scaled_dot_product_attention",
    "split_heads",
    "target",
    "upload",
    "upload_weights",
    "weights_of_heads",
]

# Annotations of public functions are the checks of their arguments. Functions of the package call
# each other unchecked.
absorb_keys = _checked(absorb_keys)
absorb_values = _checked(absorb_values)
append_to_cache = _checked(append_to_cache)
append_to_latent_cache = _checked(append_to_latent_cache)
apply_dropout = _checked(apply_dropout, _check_apply_dropout)
apply_gate = _checked(apply_gate)
apply_norm = _checked(apply_norm)
apply_rope = _checked(apply_rope)
apply_temperature = _checked(apply_temperature)
attention_context = _checked(attention_context)
attention_scores = _checked(attention_scores, _check_attention_scores)
combine_heads = _checked(combine_heads)
create_attention_mask = _checked(create_attention_mask)
create_cache_mask = _checked(create_cache_mask)
create_padding_mask = _checked(create_padding_mask)
expand_latents = _checked(expand_latents)
masked_softmax = _checked(masked_softmax, _check_masked_softmax)
multi_head_attention = _checked(multi_head_attention)
multi_head_attention_with_cache = _checked(multi_head_attention_with_cache)
multi_head_latent_attention = _checked(multi_head_latent_attention)
project_latents = _checked(project_latents)
project_output = _checked(project_output)
project_qkv = _checked(project_qkv, _check_project_qkv)
repeat_kv_heads = _checked(repeat_kv_heads)
scaled_dot_product_attention = _checked(scaled_dot_product_attention)
split_heads = _checked(split_heads)
weights_of_heads = _checked(weights_of_heads)

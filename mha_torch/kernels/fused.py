"""Fast path: attention without attention weights.

Wraps PyTorch's scaled_dot_product_attention with this package's semantics of masks and fully masked rows. A NaN that is
not padding does what PyTorch does with it: see `contained` for kernels in which it reaches only the rows that attend to
it. On CUDA, FlexAttention serves calls that PyTorch's function does not support.
"""

from typing import Any, Unpack

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd import forward_ad

from mha_spec import AttentionSpec, Refusal
from mha_torch import stages
from mha_torch.kernels import flex, sdpa, windows
from mha_torch.masks import Mask, MaskKeywords
from mha_torch.padding import zero_heads_in_padding
from mha_torch.scores import Scores
from mha_torch.stages import check_attention


def scaled_dot_product_attention(
    query: Float[Tensor, "B N T H"],
    key: Float[Tensor, "B K S H"],
    value: Float[Tensor, "B K S Hv"],
    spec: AttentionSpec | None = None,
    *,
    bias: Float[Tensor, "..."] | None = None,
    need_weights: bool = False,
    dropout: float = 0.0,
    dropout_keep: Bool[Tensor, "B N T S"] | None = None,
    sinks: Float[Tensor, "..."] | None = None,
    relative_bias: Float[Tensor, "..."] | None = None,
    relative_keys: Float[Tensor, "..."] | None = None,
    relative_queries: Float[Tensor, "..."] | None = None,
    **masks: Unpack[MaskKeywords],
) -> tuple[Float[Tensor, "B N T Hv"], None]:
    """Fastest form of `stages.scaled_dot_product_attention`, without attention weights.

    A soft cap uses the plain path, because the kernel has none, or FlexAttention in large calls on CUDA. Forward mode
    (`jvp`, `jacfwd`, `hessian`) also uses the plain path: the CPU kernel has no forward derivative. It has no second
    derivative in reverse mode either (`create_graph=True`); call the plain path for that.

    Other arguments are those of `stages.scaled_dot_product_attention`.

    Args:
        need_weights: must be False; weights are never stored here.
        dropout_keep: must be None; a fused kernel draws its own.

    Returns:
        Context (B, N, T, Hv), in the dtype of query, and None.

    Raises:
        TypeError: if an input is not floating point, the dtypes differ, or the mask is not boolean.
        ValueError: if the shapes do not fit, or need_weights or dropout_keep is set.

    Source: torch.nn.functional.scaled_dot_product_attention.
    """
    if need_weights or dropout_keep is not None:
        raise Refusal("need_weights and dropout_keep", "be left out on the fused path, which stores no weights")
    visible = Mask.of(masks).within(spec)
    products: Any = {"relative_keys": relative_keys, "relative_queries": relative_queries}
    scores = Scores(spec, bias, sinks, relative_bias, dropout, **products)
    check_attention(query, key, value, visible, scores)
    visible, key, value = zero_heads_in_padding(visible, key, value)
    return attend(query, key, value, visible, scores), None


def attend(
    query: Float[Tensor, "B N T H"],
    key: Float[Tensor, "B K S H"],
    value: Float[Tensor, "B K S Hv"],
    mask: Mask,
    scores: Scores,
) -> Float[Tensor, "B N T Hv"]:
    """Return the context from the fastest kernel that supports the call: the default kernel of layers."""
    is_forward_mode = _is_forward_mode()
    if not is_forward_mode and flex.supports(query, key, value, mask, scores):
        return flex.attend(query, key, value, mask, scores)
    if is_forward_mode or not sdpa.supports(scores):
        return stages.attend(query, key, value, mask, scores)[0]
    if windows.supports(query, key, value, mask):
        return windows.attend(query, key, value, mask, scores)
    return sdpa.attend(query, key, value, mask, scores)


def _is_forward_mode() -> bool:
    """Return whether forward-mode differentiation is active. Tangents may be hidden below other transforms."""
    return not torch.compiler.is_compiling() and forward_ad._current_level >= 0

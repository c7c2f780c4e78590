"""Fast path: attention without attention weights.

Wraps PyTorch's scaled_dot_product_attention with this package's semantics of masks and fully masked
rows. A NaN outside of padding spreads as in PyTorch; see `contained` for kernels in which it
reaches only the rows that attend to it. On CUDA, FlexAttention serves calls that PyTorch's function
does not support.
"""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd import forward_ad

from mha_torch import stages
from mha_torch.kernels import flex, sdpa, windows
from mha_torch.masks import Mask
from mha_torch.scores import Scores


def attend(
    query: Float[Tensor, "B N T H"],
    key: Float[Tensor, "B K S H"],
    value: Float[Tensor, "B K S Hv"],
    mask: Mask,
    scores: Scores,
) -> Float[Tensor, "B N T Hv"]:
    """Return the context from the fastest kernel that supports the call: the default kernel of
    layers.

    A soft cap uses the plain path, because PyTorch's kernel has none, or FlexAttention in large
    calls on CUDA. Forward mode (`jvp`, `jacfwd`, `hessian`) also uses the plain path: the CPU
    kernel has no forward derivative. It has no second derivative in reverse mode either
    (`create_graph=True`); `stages.scaled_dot_product_attention` has one.

    Source: torch.nn.functional.scaled_dot_product_attention.
    """
    # Tangents may be hidden below other transforms.
    is_forward_mode = forward_ad._current_level >= 0 and not torch.compiler.is_compiling()
    can_be_flex = flex.is_on_device(query) and not is_forward_mode
    if can_be_flex and flex.supports(query, key, value, mask, scores):
        return flex.attend(query, key, value, mask, scores)
    if is_forward_mode or not sdpa.supports(scores):
        return stages.attend(query, key, value, mask, scores)[0]
    if mask.span is not None and windows.supports(query, key, value, mask):
        return windows.attend(query, key, value, mask, scores)
    return sdpa.attend(query, key, value, mask, scores)

"""Kernels of JAX and PyTorch, called by themselves: without the checks of functions, and padding
stays as it is.
"""

from typing import Any

import torch

import mha_jax
import mha_torch
from mha_jax.kernels.nonfinite import contained as contained_in_jax
from mha_spec.heads import BareHeads
from mha_torch.kernels.nonfinite import contained as contained_in_torch

contained = {"jax": contained_in_jax, "torch": contained_in_torch}
"""The function of each implementation that contains NaN in a kernel."""


def attend_with(
    kernel: Any,
    query: Any,
    key: Any,
    value: Any,
    spec: Any = None,
    *,
    bias: Any = None,
    sinks: Any = None,
    **masks: Any,
) -> Any:
    """Return the context of a kernel, with the keywords of `scaled_dot_product_attention`."""
    layer = BareHeads(query.shape[3]) if spec is None else spec
    learned = {} if sinks is None else {"sinks": sinks}
    if isinstance(query, torch.Tensor):
        mask = mha_torch.masks.Mask(**masks).within(layer)
        return kernel(query, key, value, mask, mha_torch.scores.Scores(layer, bias, learned))
    mask = mha_jax.masks.Mask(**masks).within(layer).as_arrays()
    return kernel(query, key, value, mask, mha_jax.scores.Scores(layer, bias, learned))

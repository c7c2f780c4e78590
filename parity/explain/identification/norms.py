"""Fit norms of queries, keys, values and latents from their inputs and outputs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import Literal

import numpy as np

from mha_spec import InputError, Norm
from parity.explain.identification.observe import Submodule
from parity.explain.identification.trace import Traced, is_close, tokens_of
from parity.measure.core.arrays import to_numpy
from parity.measure.core.weights import Weights

KINDS: tuple[Literal["rms", "layer"], ...] = ("rms", "layer")

EPS = (1e-6, 1e-5)
"""Values of eps to try if the module holds none."""


def fit_norm(part: str, traced: Traced) -> tuple[Norm, Weights, np.ndarray]:
    """Fit the norm that returned heads.

    Args:
        part: q, k or v, for messages.
        traced: the heads, and the norms that returned them.

    Returns:
        The norm, its parameters, and the heads that it received.

    Raises:
        ValueError: if they are not one norm, over heads or the width.
    """
    batch_size, num_heads, num_tokens, head_dim = traced.heads.shape
    if len(traced.modules) == 1:
        norm, weights = _one_norm(part, traced)
    else:
        norm, weights = _norm_of_each_head(part, traced)
    columns = []
    for source, index in zip(traced.sources, traced.indices, strict=True):
        columns.append(_input_feature(source, index, batch_size, num_tokens))
    features = np.stack(columns, axis=-1).reshape(batch_size, num_tokens, num_heads, head_dim)
    return norm, weights, features.transpose(0, 2, 1, 3)


def _one_norm(part: str, traced: Traced) -> tuple[Norm, Weights]:
    """Fit one norm for all heads."""
    batch_size, num_heads, num_tokens, head_dim = traced.heads.shape
    (module,) = traced.modules
    is_wide = num_heads > 1 and module.output.shape[-1] == num_heads * head_dim
    if is_wide:
        norm, weights = norm_of(module, "width")
    else:
        norm, weights = norm_of(module, "head")
    if is_wide or norm.per_head:
        # The weights belong to features in their order.
        x = tokens_of(module.input, batch_size, num_tokens)
        if x is None or not np.array_equal(traced.indices, np.arange(x.shape[-1])):
            raise InputError(f"{part}_norm", "return the heads in their order", "a different order")
    return norm, weights


def _norm_of_each_head(part: str, traced: Traced) -> tuple[Norm, Weights]:
    """Fit one norm per head."""
    num_heads, head_dim = traced.heads.shape[1], traced.heads.shape[3]
    norms: list[Norm] = []
    weights_of_heads: list[Weights] = []
    for head in range(num_heads):
        features = slice(head * head_dim, (head + 1) * head_dim)
        sources, indices = traced.sources[features], traced.indices[features]
        has_one_source = all(source is sources[0] for source in sources)
        if not has_one_source or not np.array_equal(indices, np.arange(head_dim)):
            rule = "be one norm, or one for each head"
            raise InputError(f"{part}_norm", rule, "features of several")
        norm, weights = norm_of(sources[0], "head")
        norms.append(norm)
        weights_of_heads.append(weights)
    if any(norm != norms[0] for norm in norms):
        raise InputError(f"{part}_norm", "be of one kind for all heads", "several")
    stacked = {}
    for leaf in weights_of_heads[0]:
        stacked[leaf] = np.stack([weights[leaf] for weights in weights_of_heads])
    return norms[0].replace(per_head=bool(stacked)), stacked


def _input_feature(source: Submodule, index: int, batch_size: int, num_tokens: int) -> np.ndarray:
    """Return the input feature (B, T) at an index of the output of a norm."""
    x = tokens_of(source.input, batch_size, num_tokens)
    if x is None:
        raise InputError(source.name, "receive tokens or heads", f"{source.input.shape}")
    return x[..., index]


def norm_of(submodule: Submodule, over: Literal["head", "width"]) -> tuple[Norm, Weights]:
    """Return the norm that recomputes the output of a submodule, and its parameters.

    Raises:
        ValueError: if it is neither an RMS nor a layer norm.
    """
    module = submodule.module
    parameters = {name: to_numpy(x) for name, x in module.named_parameters()}
    leaves = {}
    if "weight" in parameters:
        leaves = {name: parameters[name] for name in ("weight", "bias") if name in parameters}
    per_head = "weight" in leaves and leaves["weight"].squeeze().ndim == 2
    fitted = None
    if _may_be_norm(submodule, parameters, per_head=per_head):
        every_eps = _candidate_eps(submodule)
        fitted = norm_between(submodule.input, submodule.output, every_eps, [leaves])
    if fitted is None:
        rule = "be an RMS or a layer norm"
        raise InputError(submodule.name, rule, type(module).__name__)
    norm, _ = fitted
    for name, leaf in leaves.items():
        if leaf.ndim > 2:
            leaves[name] = np.squeeze(leaf)
    return norm.replace(over=over, per_head=per_head), leaves


def _may_be_norm(submodule: Submodule, parameters: Weights, *, per_head: bool) -> bool:
    """Return whether parameters have the shapes of a norm's."""
    width = submodule.input.shape[-1:]
    if any(x.shape[-1:] != width for x in parameters.values()):
        return False
    # Without an axis of heads the weight is a matrix, instead of one for each head.
    return not per_head or submodule.input.ndim >= 4


def norm_between(
    before: np.ndarray,
    after: np.ndarray,
    every_eps: Iterable[float],
    parameters: Sequence[Weights],
) -> tuple[Norm, int] | None:
    """Return the norm over the last axis that makes one array of another, and the index of its
    parameters.

    Args:
        before: the input of the norm.
        after: its output.
        every_eps: candidates for its eps.
        parameters: candidates for its weight and its bias.

    Returns:
        None if there is none.
    """
    x = before.astype(np.float64)
    for eps, kind in product(every_eps, KINDS):
        centered = x
        if kind == "layer":
            centered = x - x.mean(-1, keepdims=True)
        normed = centered / np.sqrt((centered**2).mean(-1, keepdims=True) + eps)
        for index, leaves in enumerate(parameters):
            has_bias = leaves.get("bias") is not None
            for word, expected in _with_parameters(normed, leaves):
                if is_close(expected, after):
                    return Norm(kind=kind, weight=word, bias=has_bias, eps=eps), index
    return None


def _with_parameters(
    normed: np.ndarray, leaves: Weights
) -> Iterator[tuple[Literal["w", "1+w"] | None, np.ndarray]]:
    """Yield a normalized array with a weight and a bias, by the use of the weight in `Norm`."""
    weight, bias = leaves.get("weight"), leaves.get("bias")
    if bias is None:
        bias = np.zeros(1)
    if weight is None:
        yield None, normed + bias
        return
    yield "w", normed * weight + bias
    yield "1+w", normed * (1.0 + weight) + bias


def _candidate_eps(submodule: Submodule) -> list[float]:
    """Return candidates for eps: small constants of the module, or torch's default if it holds
    None.
    """
    candidates = []
    for name, value in vars(submodule.module).items():
        if type(value) is float and 0.0 < value < 1e-2:
            candidates.append(value)
        elif value is None and "eps" in name:
            candidates.append(float(np.finfo(np.float32).eps))
    return candidates or list(EPS)

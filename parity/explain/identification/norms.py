"""Fit norms of queries, keys, values and latents from their inputs and outputs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any, Literal

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
    modules = traced.modules
    if len(modules) == 1:
        (module,) = modules
        given = tokens_of(module.given, batch_size, num_tokens)
        is_wide = num_heads > 1 and module.result.shape[-1] == num_heads * head_dim
        norm, weights = norm_of(module, "width" if is_wide else "head")
        is_whole = given is not None and np.array_equal(traced.places, np.arange(given.shape[-1]))
        if not is_whole and (is_wide or norm.per_head):
            raise InputError(f"{part}_norm", "return the heads in their order", "another order")
    else:
        norm, weights = _of_each_head(part, traced)
    columns = [
        _column_given(*each, batch_size, num_tokens)
        for each in zip(traced.sources, traced.places, strict=True)
    ]
    given = np.stack(columns, axis=-1).reshape(batch_size, num_tokens, num_heads, head_dim)
    return norm, weights, given.transpose(0, 2, 1, 3)


def _column_given(source: Submodule, place: int, batch_size: int, num_tokens: int) -> np.ndarray:
    """Return the input feature (B, T) at a place of the output of a norm."""
    given = tokens_of(source.given, batch_size, num_tokens)
    if given is None:
        raise InputError(source.name, "receive tokens or heads", f"{source.given.shape}")
    return given[..., place]


def _of_each_head(part: str, traced: Traced) -> tuple[Norm, Weights]:
    """Fit one norm per head."""
    num_heads, head_dim = traced.heads.shape[1], traced.heads.shape[3]
    found = []
    for head in range(num_heads):
        features = slice(head * head_dim, (head + 1) * head_dim)
        sources, places = traced.sources[features], traced.places[features]
        if any(each is not sources[0] for each in sources) or not np.array_equal(
            places, np.arange(head_dim)
        ):
            raise InputError(
                f"{part}_norm", "be one norm, or one for each head", "features of several"
            )
        found.append(norm_of(sources[0], "head"))
    norm = found[0][0]
    if any(each != norm for each, _ in found):
        raise InputError(f"{part}_norm", "be of one kind for all heads", "several")
    weights = {leaf: np.stack([each[leaf] for _, each in found]) for leaf in found[0][1]}
    return norm.replace(per_head=bool(weights)), weights


def norm_of(each: Submodule, over: Literal["head", "width"]) -> tuple[Norm, Weights]:
    """Return the norm that recomputes the output of a submodule, and its parameters.

    Raises:
        ValueError: if it is neither an RMS nor a layer norm.
    """
    parameters = {name: to_numpy(x) for name, x in each.module.named_parameters()}
    weight, bias = parameters.get("weight"), parameters.get("bias")
    if any(x.shape[-1:] != each.given.shape[-1:] for x in parameters.values()):
        raise InputError(each.name, "be an RMS or a layer norm", type(each.module).__name__)
    if (
        weight is not None and weight.squeeze().ndim == 2 and each.given.ndim < 4
    ):  # a matrix, not a weight per head
        raise InputError(each.name, "be an RMS or a layer norm", type(each.module).__name__)
    leaves = {} if weight is None else {"weight": weight} | ({} if bias is None else {"bias": bias})
    found = norm_between(each.given, each.result, _candidates(each), [leaves])
    if found is None:
        raise InputError(each.name, "be an RMS or a layer norm", type(each.module).__name__)
    leaves = {name: np.squeeze(leaf) if leaf.ndim > 2 else leaf for name, leaf in leaves.items()}
    return found[0].replace(
        over=over, per_head=weight is not None and weight.squeeze().ndim == 2
    ), leaves


def norm_between(
    given: np.ndarray, result: np.ndarray, every_eps: Iterable[float], parameters: Sequence[Weights]
) -> tuple[Norm, int] | None:
    """Return the norm over the last axis that makes one array of another, and the place of its
    parameters.

    Args:
        given: what it receives.
        result: what it returns.
        every_eps: candidates for its eps.
        parameters: candidates for its weight and its bias.

    Returns:
        None if there is none.
    """
    x = given.astype(np.float64)
    for eps, kind in product(every_eps, KINDS):
        centered = x - x.mean(-1, keepdims=True) if kind == "layer" else x
        normed = centered / np.sqrt((centered**2).mean(-1, keepdims=True) + eps)
        for place, leaves in enumerate(parameters):
            weight, bias = leaves.get("weight"), leaves.get("bias")
            factors: dict[Any, Any] = (
                {None: 1.0} if weight is None else {"w": weight, "1+w": 1.0 + weight}
            )
            for word, factor in factors.items():
                if is_close(normed * factor + (0.0 if bias is None else bias), result):
                    return Norm(kind=kind, weight=word, bias=bias is not None, eps=eps), place
    return None


def _candidates(each: Submodule) -> list[float]:
    """Return candidates for eps: small numbers of the module, or torch's default if it holds
    None.
    """
    held = vars(each.module)
    found = [x for x in held.values() if type(x) is float and 0.0 < x < 1e-2]
    if any("eps" in name and x is None for name, x in held.items()):
        found.append(float(np.finfo(np.float32).eps))
    return found or list(EPS)

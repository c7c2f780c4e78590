"""NaN and infinity: kept from the rows that may not see them, and never lost to those that do.

0 * NaN is NaN. So a token that holds one is emptied before it is multiplied, forward and backward, and what depends on
it is made NaN afterwards. Where everything is finite, nothing changes.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import wraps

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mha_torch.arrays import replicate_like, values_of
from mha_torch.kernels import Kernel
from mha_torch.masks import Mask, as_lengths
from mha_torch.scores import Scores


def not_finite(x: Float[Tensor, "*tokens H"]) -> Bool[Tensor, "*tokens 1"]:
    """True for each token that holds a NaN or an infinity."""
    sizes = torch.linalg.vector_norm(x.detach(), torch.inf, dim=-1, keepdim=True)  # x is read once, and not copied
    return ~torch.isfinite(sizes)


def may_hold(x: Bool[Tensor, "..."]) -> bool:
    """Whether any of x is True; yes where values are not known."""
    return torch.compiler.is_compiling() or values_of(x.any()) is not False


def emptied(x: Float[Tensor, "..."], where: Bool[Tensor, "..."]) -> Float[Tensor, "..."]:
    """x, and 0 where asked; there it takes no gradient."""
    return x.masked_fill(replicate_like(where, x), 0.0)


def spoilt(x: Float[Tensor, "..."], where: Bool[Tensor, "..."]) -> Float[Tensor, "..."]:
    """x, and NaN where asked; its gradient passes, so that it is NaN if what comes back is, and 0 if that is 0."""
    return x + replicate_like(torch.where(where, torch.nan, 0.0).to(x.dtype), x)


def sees_any(marked: Bool[Tensor, "B N S"], seq_len_q: int, mask: Mask) -> Bool[Tensor, "B N #T 1"]:
    """Return whether a query attends to any of the marked keys; T and S are not 0."""
    seq_len_k, device = marked.shape[2], marked.device
    is_plain = mask.mask is None and mask.reach is None and mask.offsets is None
    hidden = None if is_plain else mask.to_bool(seq_len_q, seq_len_k, device)
    if hidden is not None:
        hidden = hidden[(None,) * (4 - hidden.ndim)]
        return torch.einsum("bns,bnts->bnt", marked.float(), (~hidden).float())[..., None] > 0  # no array of N x T x S
    if mask.key_padding_lengths is not None:
        lengths = as_lengths(mask.key_padding_lengths, device)
        marked = marked & (torch.arange(seq_len_k, device=device) < lengths[:, None, None])
    if not mask.is_causal:
        return marked.any(dim=-1, keepdim=True)[..., None]
    last_seen = torch.arange(seq_len_q, device=device).clamp(max=seq_len_k - 1)
    return (marked.cumsum(dim=-1) > 0)[..., last_seen, None]


def by_finite_tokens(
    project: Callable[[str, Tensor], Tensor], find: Callable[[str, Tensor], Tensor] | None = None
) -> Callable[[str, Tensor], Tensor]:
    """Wrap projections, so that a non-finite token gives NaN, and no NaN in a gradient if nobody attends to it.

    Args:
        project: applies a projection by its name.
        find: returns the non-finite tokens of its input; default `not_finite`.
    """
    if not torch.is_grad_enabled():  # forward, a token spoils nothing but itself
        return project

    def project_finite(name: str, x: Tensor) -> Tensor:
        wrong = not_finite(x) if find is None else find(name, x)
        return spoilt(project(name, emptied(x, wrong)), wrong) if may_hold(wrong) else project(name, x)

    return project_finite


# ---- Kernels ---------------------------------------------------------------------------------------------------------


def contained(kernel: Kernel) -> Kernel:
    """Wrap a kernel for finite inputs, so that it keeps the rules for non-finite ones.

    Non-finite tokens are 0 to the kernel, and rows that attend to one are NaN afterwards. On a CPU, where a look at
    values costs little, that is left out if nothing calls for it.
    """

    @wraps(kernel)
    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Mask, scores: Scores) -> Tensor:
        if query.device.type == "cpu" and not torch.compiler.is_compiling():
            # In a gradient a masked key is multiplied by 0, so that it must be finite beforehand.
            if torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)):
                if _are_moderate(query, key, value, scores):
                    return kernel(query, key, value, mask, scores)
            else:
                context = kernel(query, key, value, mask, scores)
                if _is_sound(context) or _are_moderate(query, key, value, scores):
                    return context
        return _contained(kernel, query, key, value, mask, scores)

    return attend


def _contained(kernel: Kernel, query: Tensor, key: Tensor, value: Tensor, mask: Mask, scores: Scores) -> Tensor:
    if query.numel() == 0 or key.numel() == 0:
        return kernel(query, key, value, mask, scores)
    num_groups, seq_len_q = query.shape[1] // key.shape[1], query.shape[2]
    wrong_rows, wrong_keys = not_finite(query), not_finite(key) | not_finite(value)
    query, key, value = emptied(query, wrong_rows), emptied(key, wrong_keys), emptied(value, wrong_keys)
    wrong_keys = wrong_keys[..., 0].repeat_interleave(num_groups, dim=1)
    hidden = mask.with_bias(scores.bias)
    wrong_rows = wrong_rows | sees_any(wrong_keys, seq_len_q, hidden)
    if scores.bias is not None:
        wrong_bias = torch.isnan(scores.bias) | torch.isposinf(scores.bias)
        scores = replace(scores, bias=emptied(scores.bias, wrong_bias))
        as_bool = hidden.to_bool(seq_len_q, key.shape[2], query.device)
        wrong_rows = wrong_rows | (wrong_bias if as_bool is None else wrong_bias & ~as_bool).any(dim=-1, keepdim=True)
    context = kernel(query, key, value, mask, scores)
    if scores.sinks is None:  # which have the weight of a row whose scores are all -inf
        # Where every score of a row overflows to -inf, the kernel gives 0.
        may_overflow = _may_overflow(query, key, scores.scale)
        wrong_rows = wrong_rows | (may_overflow & (context == 0).all(dim=-1, keepdim=True))
    return spoilt(context, wrong_rows & sees_any(torch.ones_like(wrong_keys), seq_len_q, hidden))


def _may_overflow(query: Tensor, key: Tensor, scale: float | None) -> Bool[Tensor, "B N T 1"]:
    """Return whether a score of a row may lie beyond float32, by the largest features of finite queries and keys."""
    # Sums of logarithms: the product itself may lie beyond float32.
    of_query, of_key = (torch.linalg.vector_norm(x.detach(), torch.inf, dim=-1, keepdim=True) for x in (query, key))
    of_key = of_key.amax(dim=2, keepdim=True).repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    factor = query.shape[3] * max(scale or 1.0, 1.0)
    return of_query.float().log2() + of_key.float().log2() + math.log2(factor) > 128.0


def _is_sound(context: Tensor) -> bool:
    """Return whether no row is NaN, infinite or 0, as the kernel makes rows of NaN; False if unknown."""
    sizes = torch.linalg.vector_norm(context, dim=-1)
    total = values_of(sizes.div_(sizes).sum())  # NaN if a size is 0, infinite or NaN
    return total is not None and total == total


def _are_moderate(query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> bool:
    """Return whether all inputs and all scores are finite; False if unknown."""
    dtype = torch.promote_types(query.dtype, torch.float32)  # float64 would be read 20 times as slowly
    sizes = [values_of(torch.linalg.vector_norm(x.detach(), dtype=dtype)) for x in (query, key, value)]
    if scores.bias is not None and scores.bias.numel():
        sizes.append(values_of(scores.bias.detach().amax()))  # -inf hides a key
    if any(size is None for size in sizes):
        return False
    bounds = (sizes[0] * sizes[1] * max(scores.scale or 1.0, 1.0), *sizes[2:])
    return all(bound < torch.finfo(torch.float32).max for bound in bounds)


def contained_with_weights(attend: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Wrap `stages.attend` for finite inputs as `contained` wraps a kernel; attention weights follow the same rules."""

    @wraps(attend)
    def contained(query: Tensor, key: Tensor, value: Tensor, mask: Mask, scores: Scores) -> tuple[Tensor, Tensor]:
        if mask.is_trivial and scores.bias is None:  # every row attends to everything: NaN spreads by itself
            return attend(query, key, value, mask, scores)
        wrong = [not_finite(x) for x in (query, key, value)]
        if not key.numel() or not any(may_hold(of_one) for of_one in wrong):
            return attend(query, key, value, mask, scores)
        query, key, value = (emptied(x, where) for x, where in zip((query, key, value), wrong, strict=True))
        context, attn_weights = attend(query, key, value, mask, scores)
        wrong_key, wrong_value = (
            where[..., 0].repeat_interleave(query.shape[1] // key.shape[1], dim=1) for where in wrong[1:]
        )
        hidden = mask.with_bias(scores.bias).to_bool(query.shape[2], key.shape[2], query.device)
        seen, has_key = Mask(hidden), True if hidden is None else ~hidden.all(dim=-1, keepdim=True)
        wrong_scores = wrong[0] | sees_any(wrong_key, query.shape[2], seen)
        wrong_rows = wrong_scores | sees_any(wrong_value, query.shape[2], seen)
        return spoilt(context, wrong_rows & has_key), spoilt(attn_weights, wrong_scores & has_key)

    return contained

"""Containment of NaN and infinity: rows that mask a non-finite token stay finite, rows that attend to it become NaN.

0 * NaN is NaN. Non-finite tokens are therefore set to 0 before each product, forward and backward, and dependent
outputs to NaN afterwards. Finite inputs are unaffected.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial, wraps
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mha_torch.arrays import is_distributed, is_graph, is_transformed, needs_gradient, replicate_like, values_of
from mha_torch.kernels import Kernel
from mha_torch.masks import Mask, as_lengths
from mha_torch.scores import Scores


def nonfinite_tokens(x: Float[Tensor, "*tokens H"]) -> Bool[Tensor, "*tokens 1"]:
    """Return True for each token that contains a NaN or an infinity."""
    return ~torch.isfinite(_largest_features(x))


def _largest_features(x: Float[Tensor, "*tokens H"]) -> Float[Tensor, "*tokens 1"]:
    """Return the size of the largest feature of each token."""
    return torch.linalg.vector_norm(x.detach(), torch.inf, dim=-1, keepdim=True)  # reads x once, without a copy


def maybe_any(x: Bool[Tensor, "..."]) -> bool:
    """Return whether any of x is True; True if values are unavailable."""
    return is_graph() or values_of(x.any()) is not False


def zero_where(x: Float[Tensor, "..."], where: Bool[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Return x with 0 at `where`, which blocks the gradient."""
    return x.masked_fill(replicate_like(where, x), 0.0)


def nan_where(x: Float[Tensor, "..."], where: Bool[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Return x with NaN at `where`; the gradient is that of the identity, NaN only if the incoming one is NaN."""
    return x + replicate_like(torch.where(where, torch.nan, 0.0).to(x.dtype), x)


def attends_to_any(marked: Bool[Tensor, "B N S"], seq_len_q: int, mask: Mask) -> Bool[Tensor, "B N #T 1"]:
    """Return whether each query attends to any of the marked keys; T and S are not 0."""
    seq_len_k, device = marked.shape[2], marked.device
    if mask.span is not None and mask.has_only("is_causal", "key_padding_lengths", "span", "q_offset"):
        first, stop = (x.clamp(0, seq_len_k) for x in mask.key_range(seq_len_q, seq_len_k, device))
        return sees_any_between(marked, first, stop)
    is_plain = mask.has_only("is_causal", "key_padding_lengths")
    hidden = None if is_plain else mask.to_bool(seq_len_q, seq_len_k, device)
    if hidden is not None:
        hidden = hidden[(None,) * (4 - hidden.ndim)]
        return torch.einsum("bns,bnts->bnt", marked.float(), (~hidden).float())[..., None] > 0  # no N x T x S array
    if mask.key_padding_lengths is not None:
        lengths = as_lengths(mask.key_padding_lengths, device)
        marked = marked & (torch.arange(seq_len_k, device=device) < lengths[:, None, None])
    if not mask.is_causal:
        return marked.any(dim=-1, keepdim=True)[..., None]
    last_seen = torch.arange(seq_len_q, device=device).clamp(max=seq_len_k - 1)
    return (marked.cumsum(dim=-1) > 0)[..., last_seen, None]


def sees_any_between(
    marked: Bool[Tensor, "B N S"], first: Int[Tensor, "#B T"], stop: Int[Tensor, "#B T"]
) -> Bool[Tensor, "B N T 1"]:
    """Return whether any key is marked from the first of each query to the one before its stop, both within 0..S."""
    counts = F.pad(marked.cumsum(dim=2), (1, 0))  # up to each key
    shape = (*marked.shape[:2], first.shape[1])
    before, within = (counts.gather(2, places.long()[:, None].expand(shape)) for places in (first, stop))
    return (within > before)[..., None]


def contained_projection(
    project: Callable[[str, Tensor], Tensor], find: Callable[[str, Tensor], Tensor] | None = None
) -> Callable[[str, Tensor], Tensor]:
    """Wrap projections: non-finite tokens yield NaN, but none in weight gradients if no query attends to them.

    Args:
        project: applies a projection by its name.
        find: returns the non-finite tokens of its input; default `nonfinite_tokens`.
    """
    if not torch.is_grad_enabled():  # in the forward pass a token affects only itself
        return project

    def project_finite(name: str, x: Tensor) -> Tensor:
        wrong = nonfinite_tokens(x) if find is None else find(name, x)
        return nan_where(project(name, zero_where(x, wrong)), wrong) if maybe_any(wrong) else project(name, x)

    return project_finite


# ---- Kernels ---------------------------------------------------------------------------------------------------------


def contained(kernel: Kernel, with_rules: Kernel | None = None) -> Kernel:
    """Wrap a kernel for finite inputs so that it follows the rules for non-finite ones.

    The kernel gets non-finite tokens as 0, and rows that attend to one become NaN afterwards. Both are skipped if the
    values show that all are finite. On a GPU reading values synchronizes, which costs a tenth of the thirty small
    kernels that it saves. Compiled or captured graphs have no values to read.

    Args:
        kernel: called with finite inputs.
        with_rules: called with non-finite inputs; default: `kernel` with the rules around it.
    """
    with_rules = partial(_with_rules, kernel) if with_rules is None else with_rules

    @wraps(kernel)
    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Mask, scores: Scores) -> Tensor:
        if is_graph() or is_transformed():  # values are unavailable
            return with_rules(query, key, value, mask, scores)
        # In the gradient a masked key is multiplied by 0, so it must be finite beforehand. Dropout draws only once.
        if needs_gradient(query, key, value) or scores.dropout:
            attend = kernel if _are_moderate(query, key, value, scores) else with_rules
            return attend(query, key, value, mask, scores)
        context = kernel(query, key, value, mask, scores)
        if _is_sound(context, key) or _are_moderate(query, key, value, scores):
            return context
        return with_rules(query, key, value, mask, scores)

    return attend


def _with_rules(kernel: Kernel, query: Tensor, key: Tensor, value: Tensor, mask: Mask, scores: Scores) -> Tensor:
    if query.numel() == 0 or key.numel() == 0:
        return kernel(query, key, value, mask, scores)
    num_groups, seq_len_q = query.shape[1] // key.shape[1], query.shape[2]
    of_query, of_key = _largest_features(query), _largest_features(key)
    nonfinite_rows, nonfinite_keys = ~torch.isfinite(of_query), ~torch.isfinite(of_key) | nonfinite_tokens(value)
    query, of_query = (zero_where(x, nonfinite_rows) for x in (query, of_query))
    key, value, of_key = (zero_where(x, nonfinite_keys) for x in (key, value, of_key))
    nonfinite_keys = nonfinite_keys[..., 0].repeat_interleave(num_groups, dim=1)
    hidden = mask.with_bias(scores.bias)
    nonfinite_rows = nonfinite_rows | attends_to_any(nonfinite_keys, seq_len_q, hidden)
    if scores.bias is not None:
        nonfinite_bias = torch.isnan(scores.bias) | torch.isposinf(scores.bias)
        scores = replace(scores, bias=zero_where(scores.bias, nonfinite_bias))
        as_bool = hidden.to_bool(seq_len_q, key.shape[2], query.device)
        nonfinite_rows = nonfinite_rows | (nonfinite_bias if as_bool is None else nonfinite_bias & ~as_bool).any(
            dim=-1, keepdim=True
        )
    context = kernel(query, key, value, mask, scores)
    if scores.sinks is None:  # sinks take the whole weight of a row whose scores are all -inf
        # If all scores of a row overflow to -inf, the kernel returns 0.
        may_overflow = _may_overflow(of_query, of_key, query.shape[3] * max(scores.scale or 1.0, 1.0))
        nonfinite_rows = nonfinite_rows | (may_overflow & (context == 0).all(dim=-1, keepdim=True))
    return nan_where(context, nonfinite_rows & attends_to_any(torch.ones_like(nonfinite_keys), seq_len_q, hidden))


def _may_overflow(
    of_query: Float[Tensor, "B N T 1"], of_key: Float[Tensor, "B K S 1"], factor: float
) -> Bool[Tensor, "B N T 1"]:
    """Return whether the largest feature of a row times that of any key times a factor exceeds float32."""
    # Each is scaled by 2**-64, because the product itself may overflow.
    of_query, of_key = (x.float() * 2.0**-64 for x in (of_query, of_key))
    num_groups = of_query.shape[1] // of_key.shape[1]
    return of_query * of_key.amax(dim=2, keepdim=True).repeat_interleave(num_groups, dim=1) * factor >= 0.99


def _is_sound(context: Tensor, key: Tensor) -> bool:
    """Return whether all rows and keys are finite and no row is 0, as the kernel returns for NaN; False if unknown.

    An infinite key may have a score of -inf, which does not show in the context.
    """
    sizes = torch.linalg.vector_norm(context, dim=-1)
    # NaN if a size is 0, infinite or NaN, or if the sum of the keys is (added times 0).
    total = values_of(torch.add(sizes.div_(sizes).sum(), key.sum(), alpha=0.0))
    return total is not None and total == total


def _are_moderate(query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> bool:
    """Return whether all inputs and all scores are finite; False if unknown."""
    dtype = torch.promote_types(query.dtype, torch.float32)  # reading float64 is 20 times slower
    sizes = [torch.linalg.vector_norm(x.detach(), dtype=dtype) for x in (query, key, value)]
    if scores.bias is not None and scores.bias.numel():
        sizes.append(scores.bias.detach().amax().to(dtype))  # -inf hides a key
    # Synchronize once. A bias may be a plain tensor while others are distributed.
    known = [values_of(size) for size in sizes] if is_distributed(query) else values_of(torch.stack(sizes))
    if known is None or None in known:
        return False
    bounds = (known[0] * known[1] * max(scores.scale or 1.0, 1.0), *known[2:])
    return all(bound < torch.finfo(torch.float32).max for bound in bounds)


def contained_with_weights(attend: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Wrap `stages.attend` as `contained` wraps a kernel; attention weights follow the same rules."""

    @wraps(attend)
    def contained(query: Tensor, key: Tensor, value: Tensor, mask: Mask, scores: Scores) -> tuple[Tensor, Tensor]:
        if mask.is_trivial and scores.bias is None:  # all rows attend to all keys: NaN spreads by itself
            return attend(query, key, value, mask, scores)
        # One number of each tensor shows that all are finite; to look at each token takes ten times as long.
        if not key.numel() or (not is_graph() and _are_moderate(query, key, value, scores)):
            return attend(query, key, value, mask, scores)
        wrong = [nonfinite_tokens(x) for x in (query, key, value)]
        if not any(maybe_any(of_one) for of_one in wrong):
            return attend(query, key, value, mask, scores)
        query, key, value = (zero_where(x, where) for x, where in zip((query, key, value), wrong, strict=True))
        context, attn_weights = attend(query, key, value, mask, scores)
        nonfinite_key, nonfinite_value = (
            where[..., 0].repeat_interleave(query.shape[1] // key.shape[1], dim=1) for where in wrong[1:]
        )
        hidden: Any = mask.with_bias(scores.bias).to_bool(query.shape[2], key.shape[2], query.device)
        seen, has_key = Mask(hidden), ~hidden.all(dim=-1, keepdim=True)
        nonfinite_scores = wrong[0] | attends_to_any(nonfinite_key, query.shape[2], seen)
        nonfinite_rows = nonfinite_scores | attends_to_any(nonfinite_value, query.shape[2], seen)
        return nan_where(context, nonfinite_rows & has_key), nan_where(attn_weights, nonfinite_scores & has_key)

    return contained

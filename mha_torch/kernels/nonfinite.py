"""NaN and infinity, contained: `contained` makes them reach exactly the rows that attend to them.

By default a NaN does what it does in PyTorch. The weight of a masked key is 0, and 0 * NaN is NaN,
so it may reach rows that mask it. In a contained kernel non-finite tokens are set to 0 before the
products, forward and backward, and the rows that attend to them become NaN afterwards. Finite
inputs give the same values, bit for bit.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mha_spec import InputError
from mha_torch.arrays import (
    is_distributed,
    is_graph,
    is_transformed,
    nan_where,
    needs_gradient,
    values_of,
    zero_where,
)
from mha_torch.checks import check_kernel
from mha_torch.kernels import Kernel
from mha_torch.masks import Mask, as_lengths
from mha_torch.scores import Scores


def contained(kernel: Kernel) -> Kernel:
    """Return a kernel in which NaN and infinity reach exactly the rows that attend to them, forward
    and backward.

    For a layer: `layer.kernel = contained(fused.attend)`. It covers calls without attention
    weights.

    - A row is NaN if its query is not finite, or a key, value or bias that it attends to, or if all
      its scores overflow to -inf.
    - All other rows have the values that they would have without the NaN, bit for bit.
    - Tokens that no row attends to affect no gradient, and have a gradient of 0.

    The kernel itself is called unchanged if all values are known to be finite. On a GPU, reading
    them waits for the device, once for each call. Compiled and captured graphs have no values to
    read, and always follow the rules.

    Args:
        kernel: computes the context, (B, N, T, Hv), of finite inputs.

    Raises:
        TypeError: if the kernel cannot be called.
        ValueError: if it is one for divided tokens: a NaN of another process would not show in the
            rows of this one.
    """
    check_kernel(kernel)
    if hasattr(kernel, "find_padding"):
        raise InputError(
            "kernel", "have all tokens of a sequence to be contained", type(kernel).__name__
        )
    return Contained(kernel)


@dataclass(frozen=True)
class Contained:
    """A kernel as `contained` returns it. Unlike a closure it can be pickled.

    Attributes:
        kernel: computes the context of finite inputs.
    """

    kernel: Kernel

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Mask, scores: Scores
    ) -> Tensor:
        """Return the context, (B, N, T, Hv)."""
        if is_graph() or is_transformed():
            return _contain(self.kernel, query, key, value, mask, scores)
        if needs_gradient(query, key, value) or scores.dropout:
            # In the gradient a masked key is multiplied by 0, so it must be finite beforehand.
            # Dropout draws only once.
            if _cannot_overflow(query, key, value, scores):
                return self.kernel(query, key, value, mask, scores)
            return _contain(self.kernel, query, key, value, mask, scores)
        # Reading the smaller context first is faster than reading all inputs.
        context = self.kernel(query, key, value, mask, scores)
        if _has_sound_rows(context, key) or _cannot_overflow(query, key, value, scores):
            return context
        return _contain(self.kernel, query, key, value, mask, scores)

    def check(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask, scores: Scores) -> None:
        """Check a call as the kernel does."""
        check = getattr(self.kernel, "check", None)
        if check is not None:
            check(query, key, value, mask, scores)


def _contain(
    kernel: Kernel, query: Tensor, key: Tensor, value: Tensor, mask: Mask, scores: Scores
) -> Tensor:
    """Call a kernel with non-finite tokens as 0, and set rows that attend to one to NaN."""
    if query.numel() == 0 or key.numel() == 0:
        return kernel(query, key, value, mask, scores)
    num_groups = query.shape[1] // key.shape[1]
    seq_len_q = query.shape[2]
    largest_in_query = _largest_features(query)
    largest_in_key = _largest_features(key)
    nan_rows = ~torch.isfinite(largest_in_query)
    nonfinite_keys = ~torch.isfinite(largest_in_key) | nonfinite_tokens(value)
    largest_in_query = zero_where(largest_in_query, nan_rows)
    largest_in_key = zero_where(largest_in_key, nonfinite_keys)
    query = zero_where(query, nan_rows)
    key = zero_where(key, nonfinite_keys)
    value = zero_where(value, nonfinite_keys)
    nonfinite_keys = nonfinite_keys[..., 0].repeat_interleave(num_groups, dim=1)
    full_mask = mask.with_bias(scores.bias)
    nan_rows = nan_rows | attends_to_any(nonfinite_keys, seq_len_q, full_mask)
    if scores.bias is not None:
        nonfinite_bias = torch.isnan(scores.bias) | torch.isposinf(scores.bias)
        scores = replace(scores, bias=zero_where(scores.bias, nonfinite_bias))
        hidden = full_mask.to_bool(seq_len_q, key.shape[2], query.device)
        if hidden is not None:
            nonfinite_bias = nonfinite_bias & ~hidden
        nan_rows = nan_rows | nonfinite_bias.any(dim=-1, keepdim=True)
    context = kernel(query, key, value, mask, scores)
    # Sinks take the whole weight of a row whose scores are all -inf.
    if "sinks" not in scores.learned:
        # If all scores of a row overflow to -inf, the kernel returns 0.
        factor = query.shape[3] * max(scores.spec.score_scale, 1.0)
        is_zero = (context == 0).all(dim=-1, keepdim=True)
        nan_rows = nan_rows | (is_zero & _may_overflow(largest_in_query, largest_in_key, factor))
    has_key = attends_to_any(torch.ones_like(nonfinite_keys), seq_len_q, full_mask)
    return nan_where(context, nan_rows & has_key)


def nonfinite_tokens(x: Float[Tensor, "*tokens H"]) -> Bool[Tensor, "*tokens 1"]:
    """Return True for each token that contains a NaN or an infinity."""
    return ~torch.isfinite(_largest_features(x))


def _largest_features(x: Float[Tensor, "*tokens H"]) -> Float[Tensor, "*tokens 1"]:
    """Return the size of the largest feature of each token."""
    # Reads x once, without a copy.
    return torch.linalg.vector_norm(x.detach(), torch.inf, dim=-1, keepdim=True)


def attends_to_any(
    marked: Bool[Tensor, "B N S"], seq_len_q: int, mask: Mask
) -> Bool[Tensor, "B N #T 1"]:
    """Return whether each query attends to any of the marked keys; T and S are not 0."""
    seq_len_k = marked.shape[2]
    device = marked.device
    if mask.span is not None and mask.has_only(
        "is_causal", "key_padding_lengths", "span", "q_offset"
    ):
        first, stop = (x.clamp(0, seq_len_k) for x in mask.key_range(seq_len_q, seq_len_k, device))
        return sees_any_between(marked, first, stop)
    is_plain = mask.has_only("is_causal", "key_padding_lengths")
    if is_plain:
        hidden = None
    else:
        hidden = mask.to_bool(seq_len_q, seq_len_k, device)
    if hidden is not None:
        hidden = hidden[(None,) * (4 - hidden.ndim)]
        # No N x T x S array.
        return torch.einsum("bns,bnts->bnt", marked.float(), (~hidden).float())[..., None] > 0
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
    """Return whether any key is marked from the first of each query to the one before its stop,
    both within 0..S.
    """
    counts = F.pad(marked.cumsum(dim=2), (1, 0))  # up to each key
    shape = (*marked.shape[:2], first.shape[1])
    before, within = (
        counts.gather(2, bound.long()[:, None].expand(shape)) for bound in (first, stop)
    )
    return (within > before)[..., None]


def _may_overflow(
    of_query: Float[Tensor, "B N T 1"], of_key: Float[Tensor, "B K S 1"], factor: float
) -> Bool[Tensor, "B N T 1"]:
    """Return whether the largest feature of a row times the largest feature of any key times a
    factor exceeds float32.
    """
    # Each is scaled by 2**-64, because the product itself may overflow; float32 ends at 2**128, and
    # 0.99 instead of 1 allows for the rounding of these products.
    of_query, of_key = (x.float() * 2.0**-64 for x in (of_query, of_key))
    num_groups = of_query.shape[1] // of_key.shape[1]
    return (
        of_query * of_key.amax(dim=2, keepdim=True).repeat_interleave(num_groups, dim=1) * factor
        >= 0.99
    )


def _has_sound_rows(context: Tensor, key: Tensor) -> bool:
    """Return whether all rows and keys are finite and no row is 0, as the kernel returns for NaN;
    False if unknown.

    An infinite key may have a score of -inf, which does not show in the context.
    """
    sizes = torch.linalg.vector_norm(context, dim=-1)
    # NaN if a size is 0, infinite or NaN, or if the sum of the keys is (added times 0).
    total = values_of(torch.add(sizes.div_(sizes).sum(), key.sum(), alpha=0.0))
    return total is not None and total == total


def _cannot_overflow(query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> bool:
    """Return whether all inputs and all scores are finite; False if unknown."""
    dtype = torch.promote_types(query.dtype, torch.float32)  # reading float64 is 20 times slower
    sizes = [torch.linalg.vector_norm(x.detach(), dtype=dtype) for x in (query, key, value)]
    if scores.bias is not None and scores.bias.numel():
        sizes.append(scores.bias.detach().amax().to(dtype))  # -inf hides a key
    # Synchronize once. A bias may be a plain tensor while others are distributed.
    if is_distributed(query):
        known = [values_of(size) for size in sizes]
    else:
        known = values_of(torch.stack(sizes))
    if known is None or None in known:
        return False
    bounds = (known[0] * known[1] * max(scores.spec.score_scale, 1.0), *known[2:])
    return all(bound < torch.finfo(torch.float32).max for bound in bounds)

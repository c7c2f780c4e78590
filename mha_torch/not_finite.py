"""NaN and infinity: kept from the rows that may not see them, and never lost to those that do.

0 * NaN is NaN. So a token that holds one is emptied before it is multiplied, forward and backward, and what depends on
it is made NaN afterwards. Where everything is finite, nothing changes.
"""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mha_torch.arrays import values_of
from mha_torch.masks import Masking, as_lengths
from mha_torch.shards import beside, out_weight_of, own_part, raised_by_any, width_of


def not_finite(x: Float[Tensor, "*tokens H"]) -> Bool[Tensor, "*tokens 1"]:
    """True for each token that holds a NaN or an infinity."""
    sizes = torch.linalg.vector_norm(x.detach(), torch.inf, dim=-1, keepdim=True)  # x is read once, and not copied
    return ~torch.isfinite(sizes)


def may_hold(x: Bool[Tensor, "..."]) -> bool:
    """Whether any of x is True; yes where values are not known."""
    return torch.compiler.is_compiling() or values_of(x.any()) is not False


def emptied(x: Float[Tensor, "..."], where: Bool[Tensor, "..."]) -> Float[Tensor, "..."]:
    """x, and 0 where asked; there it takes no gradient."""
    return x.masked_fill(beside(where, x), 0.0)


def spoilt(x: Float[Tensor, "..."], where: Bool[Tensor, "..."]) -> Float[Tensor, "..."]:
    """x, and NaN where asked; its gradient passes, so that it is NaN if what comes back is, and 0 if that is 0."""
    return x + beside(torch.where(where, torch.nan, 0.0).to(x.dtype), x)


def sees_any(marked: Bool[Tensor, "B N S"], seq_len_q: int, masking: Masking) -> Bool[Tensor, "B N #T 1"]:
    """Whether a query sees any of the keys that are marked; the bias hides nothing here, and T and S are not 0."""
    seq_len_k, device = marked.shape[2], marked.device
    is_plain = masking.mask is None and masking.reach is None and masking.offsets is None
    mask = None if is_plain else masking.joined(seq_len_q, seq_len_k, device)
    if mask is not None:
        mask = mask[(None,) * (4 - mask.ndim)]
        return torch.einsum("bns,bnts->bnt", marked.float(), (~mask).float())[..., None] > 0  # no array of N x T x S
    if masking.key_padding_lengths is not None:
        lengths = as_lengths(masking.key_padding_lengths, device)
        marked = marked & (torch.arange(seq_len_k, device=device) < lengths[:, None, None])
    if not masking.is_causal:
        return marked.any(dim=-1, keepdim=True)[..., None]
    last_seen = torch.arange(seq_len_q, device=device).clamp(max=seq_len_k - 1)
    return (marked.cumsum(dim=-1) > 0)[..., last_seen, None]


def by_finite_tokens(project: Callable[[str, Tensor], Tensor]) -> Callable[[str, Tensor], Tensor]:
    """Projections through which a token that is not finite gives NaN, and spoils no gradient if nobody sees it."""
    if not torch.is_grad_enabled():  # forward, a token spoils nothing but itself
        return project

    def project_finite(name: str, x: Tensor) -> Tensor:
        wrong = not_finite(own_part(x))
        if name == "out_proj":  # whose output all processes have that share its columns
            wrong = raised_by_any(wrong, x, out_weight_of(project))
        elif (width := width_of(project, name)) is not None:  # all heads are divided by one mean square
            wrong = width.raised_by_any(wrong)
        return spoilt(project(name, emptied(own_part(x), wrong)), wrong) if may_hold(wrong) else project(name, x)

    return project_finite

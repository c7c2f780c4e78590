"""Multi-head attention: the functions made of the stages, and the modules that hold weights.

Axes: B batch, T query tokens, S key tokens, N query heads, K key/value heads, H head_dim, E d_model.
A mask is boolean and True where a query may not see a key; an additive term is a bias.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from mha_torch import fused
from mha_torch.checks import (
    check_config,
    check_floating,
    check_layer_inputs,
    check_lengths,
    check_projected,
    check_weights,
)
from mha_torch.not_finite import by_finite_tokens
from mha_torch.stages import Project, combine_heads, project_qkv, scaled_dot_product_attention, split_heads

# ---- Functions -------------------------------------------------------------------------------------------------------


def multi_head_attention_core(
    query: Float[Tensor, "B T E"],
    key: Float[Tensor, "B S E"],
    value: Float[Tensor, "B S E"],
    num_heads: int,
    mask: Bool[Tensor, "..."] | None = None,
) -> tuple[Float[Tensor, "B T E"], Float[Tensor, "B N T S"] | None]:
    """Multi-head attention of inputs that are projected already: split, attend, combine.

    Args:
        query: (B, T, E).
        key, value: (B, S, E).
        num_heads: number of heads, N, a divisor of E.
        mask: boolean, True = masked; broadcasts to (B, N, T, S).

    Returns:
        The output (B, T, E), before any output projection, and the attention weights (B, N, T, S).

    Raises:
        TypeError: if an input is not floating point or the mask is not boolean.
        ValueError: if the shapes do not fit.
    """
    q, k, v = (split_heads(x, num_heads) for x in (query, key, value))
    context, attn_weights = scaled_dot_product_attention(q, k, v, mask=mask, need_weights=True)
    return combine_heads(context), attn_weights


def multi_head_attention(
    query: Float[Tensor, "B T d_in"],
    weights: Mapping[str, Tensor],
    key: Float[Tensor, "B S d_kv"] | None = None,
    value: Float[Tensor, "B S d_kv"] | None = None,
    *,
    num_heads: int,
    num_kv_heads: int | None = None,
    mask: Bool[Tensor, "..."] | None = None,
    bias: Float[Tensor, "..."] | None = None,
    is_causal: bool = False,
    key_padding_lengths: Int[Tensor, " B"] | Sequence[int] | None = None,
    need_weights: bool = False,
    positions: Int[Tensor, "#B T"] | None = None,
    rope_theta: float | None = None,
    dropout: float = 0.0,
    dropout_keep: Bool[Tensor, "B N T S"] | None = None,
) -> tuple[Float[Tensor, "B T E"], Float[Tensor, "B N T S"] | None]:
    """Multi-head attention with weights from outside: project, split, attend, combine, project.

    Args:
        query: (B, T, d_in).
        weights: `q_proj`, `k_proj`, `v_proj` (or one `qkv_proj`) and, where there is one, `out_proj`: the state dict of
            `MultiHeadAttention`, `<name>.weight` (out, in) and `<name>.bias` (out,); every bias may be absent.
        key: (B, S, d_kv); absent for self-attention.
        value: (B, S, d_kv); the key when absent.
        num_heads: number of query heads, N.
        num_kv_heads: number of key/value heads, K, a divisor of N; N when absent.
        mask: boolean, True = masked; broadcasts to (B, N, T, S). A row in which every key is masked gives 0.
        bias: added to the scores; broadcasts to (B, N, T, S). -inf masks a key.
        is_causal: hide every key after the query's own position, as `create_causal_mask`.
        key_padding_lengths: number of real keys of each sequence, (B,), as `create_padding_mask`.
        need_weights: also return the attention weights, which takes the plain path.
        positions: place of each token for RoPE, (B or 1, T); 0, 1, … when absent.
        rope_theta: base of the RoPE frequencies, or None for no RoPE.
        dropout: rate at which attention weights are dropped; 0 outside training.
        dropout_keep: True where a weight is kept, in place of a random draw; takes the plain path.

    Returns:
        The output (B, T, E), or (B, T, N * H) without `out_proj`, and the attention weights (B, N, T, S) or None.

    Raises:
        TypeError: if an input is not floating point, dtypes differ, the mask is not boolean or the lengths are not
            integers.
        ValueError: if names or shapes of the weights, or the shapes of the inputs, do not fit, devices differ, a length
            lies outside 0..S, or a weight is not finite (where values are known: not in a compiled graph or under
            vmap).

    Source: Attention Is All You Need, arXiv:1706.03762, section 3.2.2.
    """
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    check_weights(weights, num_heads, num_kv_heads)
    return _attention_layer(
        project_with(weights),
        query,
        key,
        value,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        fused_qkv="qkv_proj.weight" in weights,
        out_proj="out_proj.weight" in weights,
        mask=mask,
        bias=bias,
        is_causal=is_causal,
        key_padding_lengths=key_padding_lengths,
        need_weights=need_weights,
        positions=positions,
        rope_theta=rope_theta,
        dropout=dropout,
        dropout_keep=dropout_keep,
    )


def project_with(weights: Mapping[str, Tensor]) -> Project:
    """Projections whose weights lie in the container that `multi_head_attention` takes."""

    def project(name: str, x: Tensor) -> Tensor:
        weight = weights[f"{name}.weight"]
        check_projected(name, x, weight)
        return F.linear(x, weight, weights.get(f"{name}.bias"))

    return project


def _attention_layer(
    project: Project,
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    *,
    num_heads: int,
    num_kv_heads: int,
    fused_qkv: bool,
    out_proj: bool,
    mask: Tensor | None,
    bias: Tensor | None,
    is_causal: bool = False,
    key_padding_lengths: Tensor | Sequence[int] | None = None,
    need_weights: bool,
    positions: Tensor | None,
    rope_theta: float | None,
    dropout: float,
    dropout_keep: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    check_layer_inputs(query, key, value, positions, rope_theta)
    key = query if key is None else key
    value = key if value is None else value
    if mask is not None or bias is not None or is_causal or key_padding_lengths is not None:
        project = by_finite_tokens(project)
    q, k, v = project_qkv(
        project,
        query,
        key,
        value,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        fused_qkv=fused_qkv,
        positions=positions,
        rope_theta=rope_theta,
    )
    attention = scaled_dot_product_attention
    if not need_weights and dropout_keep is None:
        attention = fused.scaled_dot_product_attention
    context, attn_weights = attention(
        q,
        k,
        v,
        mask=mask,
        bias=bias,
        is_causal=is_causal,
        key_padding_lengths=key_padding_lengths,
        need_weights=need_weights,
        dropout=dropout,
        dropout_keep=dropout_keep,
    )
    output = combine_heads(context)
    return project("out_proj", output) if out_proj else output, attn_weights


# ---- Modules ---------------------------------------------------------------------------------------------------------


class AttentionLayer(nn.Module):
    """The configuration and the projections that every attention module of this package holds.

    Args:
        d_model: width of the output, E.
        num_heads: number of query heads, N.
        num_kv_heads: number of key/value heads, K, a divisor of N; N when absent.
        head_dim: features of a head, H; d_model // num_heads when absent.
        d_in: width of the query input; d_model when absent.
        d_kv: width of the key and value input; d_in when absent.
        qkv_bias: give q_proj, k_proj and v_proj a bias.
        out_bias: give out_proj a bias.
        out_proj: project the combined heads, N * H wide, to d_model; without it they are the output.
        fused_qkv: hold one qkv_proj, its rows q, then k, then v, in place of three projections; the results are equal.
        rope_theta: base of the RoPE frequencies, or None for no RoPE.
        dropout: rate at which attention weights are dropped in training.
        output_dropout: rate at which outputs are dropped in training.
        device, dtype: where and how the weights are kept.

    Raises:
        TypeError: if a width or a number of heads is not an integer, rope_theta or a rate not a number, what the layer
            has or has not not a boolean, or the dtype not floating point.
        ValueError: if the widths, heads or rates do not fit.
    """

    _is_self_attention = False  # keys and values come from the input of the queries, always

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        d_in: int | None = None,
        d_kv: int | None = None,
        qkv_bias: bool = True,
        out_bias: bool = True,
        out_proj: bool = True,
        fused_qkv: bool = False,
        rope_theta: float | None = None,
        dropout: float = 0.0,
        output_dropout: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_config(
            d_model=d_model,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            d_in=d_in,
            d_kv=d_kv,
            qkv_bias=qkv_bias,
            out_bias=out_bias,
            out_proj=out_proj,
            fused_qkv=fused_qkv,
            rope_theta=rope_theta,
            dropout=dropout,
            output_dropout=output_dropout,
            dtype=dtype,
            is_self_attention=self._is_self_attention,
        )
        self.d_model = d_model
        self.num_heads = num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.head_dim = d_model // num_heads if head_dim is None else head_dim
        self.d_in = d_model if d_in is None else d_in
        self.d_kv = self.d_in if d_kv is None else d_kv
        self.qkv_bias = qkv_bias
        self.out_bias = out_bias
        self.fused_qkv = fused_qkv
        self.rope_theta = rope_theta
        self.dropout = dropout
        self.output_dropout = output_dropout
        q_width, kv_width = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        factory = {"device": device, "dtype": dtype}
        if fused_qkv:
            self.qkv_proj = nn.Linear(self.d_in, q_width + 2 * kv_width, bias=qkv_bias, **factory)
        else:
            self.q_proj = nn.Linear(self.d_in, q_width, bias=qkv_bias, **factory)
            self.k_proj = nn.Linear(self.d_kv, kv_width, bias=qkv_bias, **factory)
            self.v_proj = nn.Linear(self.d_kv, kv_width, bias=qkv_bias, **factory)
        self.out_proj = nn.Linear(q_width, d_model, bias=out_bias, **factory) if out_proj else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw Xavier-uniform weights, those of q, k and v each on their own, and set the biases to 0."""
        widths = [self.num_heads * self.head_dim, *2 * [self.num_kv_heads * self.head_dim]]
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            else:
                for part in parameter.detach().split(widths) if name == "qkv_proj.weight" else [parameter]:
                    nn.init.xavier_uniform_(part)

    @property
    def config(self) -> dict[str, Any]:
        """The keywords that make a module like this one, all of them resolved."""
        return {
            "d_model": self.d_model,
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "d_in": self.d_in,
            "d_kv": self.d_kv,
            "qkv_bias": self.qkv_bias,
            "out_bias": self.out_bias,
            "out_proj": self.out_proj is not None,
            "fused_qkv": self.fused_qkv,
            "rope_theta": self.rope_theta,
            "dropout": self.dropout,
            "output_dropout": self.output_dropout,
        }

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.config.items())

    def project(self, name: str, x: Float[Tensor, "B T d_in"]) -> Float[Tensor, "B T d_out"]:
        """Apply the projection of that name, as a module, so that replaced layers take part."""
        linear: nn.Linear = getattr(self, name)
        if isinstance(getattr(linear, "weight", None), Tensor):  # a replaced layer may keep its weights elsewhere
            check_projected(name, x, linear.weight)
        return linear(x)

    def attend(
        self,
        query: Float[Tensor, "B T d_in"],
        key: Float[Tensor, "B S d_kv"] | None = None,
        value: Float[Tensor, "B S d_kv"] | None = None,
        *,
        mask: Bool[Tensor, "..."] | None = None,
        bias: Float[Tensor, "..."] | None = None,
        is_causal: bool = False,
        key_padding_lengths: Int[Tensor, " B"] | Sequence[int] | None = None,
        need_weights: bool = False,
        positions: Int[Tensor, "#B T"] | None = None,
    ) -> tuple[Float[Tensor, "B T E"], Float[Tensor, "B N T S"] | None]:
        """`multi_head_attention` with the weights and the configuration of this module."""
        output, attn_weights = _attention_layer(
            self.project,
            query,
            key,
            value,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            fused_qkv=self.fused_qkv,
            out_proj=self.out_proj is not None,
            mask=mask,
            bias=bias,
            is_causal=is_causal,
            key_padding_lengths=key_padding_lengths,
            need_weights=need_weights,
            positions=positions,
            rope_theta=self.rope_theta,
            dropout=self.dropout if self.training else 0.0,
        )
        return F.dropout(output, self.output_dropout, self.training), attn_weights


class MultiHeadAttention(AttentionLayer):
    """Multi-head attention of any queries over any keys and values; keywords as in `AttentionLayer`."""

    def forward(
        self,
        query: Float[Tensor, "B T d_in"],
        key: Float[Tensor, "B S d_kv"] | None = None,
        value: Float[Tensor, "B S d_kv"] | None = None,
        *,
        mask: Bool[Tensor, "..."] | None = None,
        bias: Float[Tensor, "..."] | None = None,
        is_causal: bool = False,
        key_padding_lengths: Int[Tensor, " B"] | Sequence[int] | None = None,
        need_weights: bool = False,
        positions: Int[Tensor, "#B T"] | None = None,
    ) -> tuple[Float[Tensor, "B T E"], Float[Tensor, "B N T S"] | None]:
        """Attend from each query token to the key tokens.

        Args:
            query: (B, T, d_in).
            key: (B, S, d_kv); absent for self-attention.
            value: (B, S, d_kv); the key when absent.
            mask: boolean, True = masked; broadcasts to (B, N, T, S). A row in which every key is masked gives 0.
            bias: added to the scores, in the dtype of query; broadcasts to (B, N, T, S). -inf masks a key.
            is_causal: hide every key after the query's own position, as `create_causal_mask`.
            key_padding_lengths: number of real keys of each sequence, (B,), as `create_padding_mask`.
            need_weights: also return the attention weights, which takes the plain path.
            positions: place of each token for RoPE, (B or 1, T); 0, 1, … when absent.

        Returns:
            The output (B, T, E), and the attention weights before dropout (B, N, T, S) or None.

        Raises:
            TypeError: if an input is not floating point, dtypes differ, the mask is not boolean or the lengths are not
                integers.
            ValueError: if the shapes do not fit, devices differ, or a length lies outside 0..S.
        """
        return self.attend(
            query,
            key,
            value,
            mask=mask,
            bias=bias,
            is_causal=is_causal,
            key_padding_lengths=key_padding_lengths,
            need_weights=need_weights,
            positions=positions,
        )


class MultiHeadSelfAttention(AttentionLayer):
    """Multi-head attention of a sequence over itself, causal or not; keywords as in `AttentionLayer`."""

    _is_self_attention = True

    def forward(
        self,
        x: Float[Tensor, "B T d_in"],
        *,
        mask: Bool[Tensor, "..."] | None = None,
        bias: Float[Tensor, "..."] | None = None,
        is_causal: bool = False,
        key_padding_lengths: Int[Tensor, " B"] | Sequence[int] | None = None,
        positions: Int[Tensor, "#B T"] | None = None,
    ) -> Float[Tensor, "B T E"]:
        """Attend from each token to the tokens of its own sequence.

        Args:
            x: (B, T, d_in).
            mask: boolean, True = masked; broadcasts to (B, N, T, T). A row in which every key is masked gives 0.
            bias: added to the scores, in the dtype of x; broadcasts to (B, N, T, T). -inf masks a key.
            is_causal: hide every token after the query's own position.
            key_padding_lengths: number of real tokens of each sequence, (B,); the padding is on the right.
            positions: place of each token for RoPE, (B or 1, T); 0, 1, … when absent.

        Returns:
            The output (B, T, E); at padded positions it is the attention of the padding over the real tokens.

        Raises:
            TypeError: if x is not floating point, the mask is not boolean or the lengths are not integers.
            ValueError: if the shapes do not fit, devices differ, or a length lies outside 0..T.
        """
        check_floating("x", x, rank=3)
        if key_padding_lengths is not None:
            check_lengths("key_padding_lengths", key_padding_lengths, x.shape[0], x.shape[1])
        output, _ = self.attend(
            x,
            mask=mask,
            bias=bias,
            is_causal=is_causal,
            key_padding_lengths=key_padding_lengths,
            positions=positions,
        )
        return output

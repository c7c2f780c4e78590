"""Multi-head attention: the functions made of the stages, and the modules that hold weights.

Axes: B batch, T query tokens, S key tokens, N query heads, K key/value heads, H head_dim, E d_model.
A mask is boolean and True where a query may not see a key; an additive term is a bias.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from mha_jax import fused
from mha_jax.blockwise import BLOCK_SIZES, BlockSizes
from mha_jax.checks import (
    check_config,
    check_floating,
    check_layer_inputs,
    check_lengths,
    check_projected,
    check_weights,
)
from mha_jax.not_finite import by_finite_tokens
from mha_jax.rope import at_least_float32
from mha_jax.stages import Project, apply_dropout, combine_heads, project_qkv, scaled_dot_product_attention, split_heads

# ---- Functions -------------------------------------------------------------------------------------------------------


def multi_head_attention_core(
    query: Float[Array, "B T E"],
    key: Float[Array, "B S E"],
    value: Float[Array, "B S E"],
    num_heads: int,
    mask: Bool[Array, "..."] | None = None,
) -> tuple[Float[Array, "B T E"], Float[Array, "B N T S"] | None]:
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
    query: Float[Array, "B T d_in"],
    weights: Mapping[str, Mapping[str, Array]],
    key: Float[Array, "B S d_kv"] | None = None,
    value: Float[Array, "B S d_kv"] | None = None,
    *,
    num_heads: int,
    num_kv_heads: int | None = None,
    mask: Bool[Array, "..."] | None = None,
    bias: Float[Array, "..."] | None = None,
    is_causal: bool = False,
    key_padding_lengths: Int[Array, " B"] | Sequence[int] | None = None,
    need_weights: bool = False,
    positions: Int[Array, "#B T"] | None = None,
    rope_theta: float | None = None,
    dropout: float = 0.0,
    dropout_keep: Bool[Array, "B N T S"] | None = None,
    dropout_rng: jax.Array | None = None,
) -> tuple[Float[Array, "B T E"], Float[Array, "B N T S"] | None]:
    """Multi-head attention with weights from outside: project, split, attend, combine, project.

    Args:
        query: (B, T, d_in).
        weights: `q_proj`, `k_proj`, `v_proj` (or one `qkv_proj`) and, where there is one, `out_proj`: the parameters of
            `MultiHeadAttention`, each a `kernel` (in, out) and a `bias` (out,); every bias may be absent.
        key: (B, S, d_kv); absent for self-attention.
        value: (B, S, d_kv); the key when absent.
        num_heads: number of query heads, N.
        num_kv_heads: number of key/value heads, K, a divisor of N; N when absent.
        mask: boolean, True = masked; broadcasts to (B, N, T, S). A row in which every key is masked gives 0.
        bias: added to the scores, in the dtype of query; broadcasts to (B, N, T, S). -inf masks a key.
        is_causal: hide every key after the query's own position, as `create_causal_mask`.
        key_padding_lengths: number of real keys of each sequence, (B,), as `create_padding_mask`.
        need_weights: also return the attention weights, which takes the plain path.
        positions: place of each token for RoPE, (B or 1, T); 0, 1, … when absent.
        rope_theta: base of the RoPE frequencies, or None for no RoPE.
        dropout: rate at which attention weights are dropped; 0 outside training.
        dropout_keep: True where a weight is kept, in place of a random draw; takes the plain path.
        dropout_rng: random key to draw what is dropped from.

    Returns:
        The output (B, T, E), or (B, T, N * H) without `out_proj`, and the attention weights (B, N, T, S) or None.

    Raises:
        TypeError: if an input is not floating point, dtypes differ, or the mask is not boolean.
        ValueError: if names or shapes of the weights, or the shapes of the inputs, do not fit, or a weight is not
            finite (where values are known: not under jit).

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
        fused_qkv="qkv_proj" in weights,
        out_proj="out_proj" in weights,
        mask=mask,
        bias=bias,
        is_causal=is_causal,
        key_padding_lengths=key_padding_lengths,
        need_weights=need_weights,
        positions=positions,
        rope_theta=rope_theta,
        dropout=dropout,
        dropout_keep=dropout_keep,
        dropout_rng=dropout_rng,
    )


def project_with(weights: Mapping[str, Mapping[str, Array]]) -> Project:
    """Projections whose weights lie in the container that `multi_head_attention` takes."""

    def project(name: str, x: Array) -> Array:
        leaves = weights[name]
        check_projected(name, x, leaves["kernel"])
        return _linear(x, leaves["kernel"], leaves.get("bias"))

    return project


def _linear(x: Array, kernel: Array, bias: Array | None) -> Array:
    # The sum stays in float32 until the bias is added: its gradient is then summed in float32 too.
    projected = jnp.einsum("bti,io->bto", x, kernel, preferred_element_type=at_least_float32(x).dtype)
    projected = projected if bias is None else projected + at_least_float32(bias)[None, None]
    return projected.astype(x.dtype)


def _attention_layer(
    project: Project,
    query: Array,
    key: Array | None,
    value: Array | None,
    *,
    num_heads: int,
    num_kv_heads: int,
    fused_qkv: bool,
    out_proj: bool,
    mask: Array | None,
    bias: Array | None,
    is_causal: bool,
    key_padding_lengths: Array | Sequence[int] | None,
    need_weights: bool,
    positions: Array | None,
    rope_theta: float | None,
    dropout: float,
    dropout_keep: Array | None = None,
    dropout_rng: jax.Array | None = None,
    block_sizes: BlockSizes = BLOCK_SIZES,
) -> tuple[Array, Array | None]:
    check_layer_inputs(query, key, value, positions, rope_theta)
    key = query if key is None else key
    value = key if value is None else value
    if key_padding_lengths is not None:
        check_lengths("key_padding_lengths", key_padding_lengths, key.shape[0], key.shape[1])
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
        attention = partial(fused.scaled_dot_product_attention, block_sizes=block_sizes)
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
        dropout_rng=dropout_rng,
    )
    output = combine_heads(context)
    return project("out_proj", output) if out_proj else output, attn_weights


# ---- Modules ---------------------------------------------------------------------------------------------------------


class Projection(nnx.Linear):
    """x @ kernel + bias, summed in at least float32. Xavier-uniform weights, each part on its own, and a bias of 0."""

    def __init__(self, d_in: int, widths: list[int], *, use_bias: bool, param_dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        xavier = nnx.initializers.xavier_uniform()

        def kernel_init(rng: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
            part_rngs = jax.random.split(rng, len(widths))
            parts = [xavier(part, (shape[0], width), dtype) for part, width in zip(part_rngs, widths, strict=True)]
            return jnp.concatenate(parts, axis=1)

        super().__init__(
            d_in, sum(widths), use_bias=use_bias, kernel_init=kernel_init, param_dtype=param_dtype, rngs=rngs
        )

    def __call__(self, inputs: Float[Array, "B T d_in"], out_sharding: Any = None) -> Float[Array, "B T d_out"]:
        """x @ kernel + bias, in the dtype of x."""
        del out_sharding  # of nnx.Linear; the placement follows from the inputs
        return _linear(inputs, self.kernel[...], None if self.bias is None else self.bias[...])


class AttentionLayer(nnx.Module):
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
        param_dtype: dtype of the weights.
        rngs: draws the weights from `params` and, in training, what is dropped from `dropout`.

    Raises:
        TypeError: if a width or a number of heads is not an integer, rope_theta or a rate not a number, what the layer
            has or has not not a boolean, or the dtype not floating point.
        ValueError: if the widths, heads or rates do not fit.
    """

    _is_self_attention = False  # keys and values come from the input of the queries, always
    block_sizes = BLOCK_SIZES  # of the fast path on a CPU

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
        param_dtype: jnp.dtype = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
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
            param_dtype=param_dtype,
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
        factory = {"param_dtype": param_dtype, "rngs": rngs}
        if fused_qkv:
            self.qkv_proj = Projection(self.d_in, [q_width, kv_width, kv_width], use_bias=qkv_bias, **factory)
        else:
            self.q_proj = Projection(self.d_in, [q_width], use_bias=qkv_bias, **factory)
            self.k_proj = Projection(self.d_kv, [kv_width], use_bias=qkv_bias, **factory)
            self.v_proj = Projection(self.d_kv, [kv_width], use_bias=qkv_bias, **factory)
        self.out_proj = Projection(q_width, [d_model], use_bias=out_bias, **factory) if out_proj else None
        self.deterministic = False  # as `train()` and `eval()` of nnx set it
        self.dropout_rngs = rngs["dropout"].fork() if dropout or output_dropout else None

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

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.config.items())})"

    def project(self, name: str, x: Float[Array, "B T d_in"]) -> Float[Array, "B T d_out"]:
        """Apply the projection of that name, as a module, so that replaced layers take part."""
        linear: Projection = getattr(self, name)
        if isinstance(getattr(linear, "kernel", None), nnx.Param):  # a replaced layer may keep its weights elsewhere
            check_projected(name, x, linear.kernel[...])
        return linear(x)

    def attend(
        self,
        query: Float[Array, "B T d_in"],
        key: Float[Array, "B S d_kv"] | None = None,
        value: Float[Array, "B S d_kv"] | None = None,
        *,
        mask: Bool[Array, "..."] | None = None,
        bias: Float[Array, "..."] | None = None,
        is_causal: bool = False,
        key_padding_lengths: Int[Array, " B"] | Sequence[int] | None = None,
        need_weights: bool = False,
        positions: Int[Array, "#B T"] | None = None,
    ) -> tuple[Float[Array, "B T E"], Float[Array, "B N T S"] | None]:
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
            dropout=0.0 if self.deterministic else self.dropout,
            dropout_rng=self.dropout_rng(self.dropout),
            block_sizes=self.block_sizes,
        )
        return self.drop_output(output), attn_weights

    def dropout_rng(self, rate: float) -> jax.Array | None:
        """A fresh random key where something is dropped, in training and at a rate above 0."""
        return self.dropout_rngs() if rate and not self.deterministic and self.dropout_rngs is not None else None

    def drop_output(self, output: Float[Array, "B T E"]) -> Float[Array, "B T E"]:
        """The output with some of it dropped, in training and at a rate above 0."""
        rng = self.dropout_rng(self.output_dropout)
        return output if rng is None else apply_dropout(output, self.output_dropout, rng=rng)


class MultiHeadAttention(AttentionLayer):
    """Multi-head attention of any queries over any keys and values; keywords as in `AttentionLayer`."""

    def __call__(
        self,
        query: Float[Array, "B T d_in"],
        key: Float[Array, "B S d_kv"] | None = None,
        value: Float[Array, "B S d_kv"] | None = None,
        *,
        mask: Bool[Array, "..."] | None = None,
        bias: Float[Array, "..."] | None = None,
        is_causal: bool = False,
        key_padding_lengths: Int[Array, " B"] | Sequence[int] | None = None,
        need_weights: bool = False,
        positions: Int[Array, "#B T"] | None = None,
    ) -> tuple[Float[Array, "B T E"], Float[Array, "B N T S"] | None]:
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
            TypeError: if an input is not floating point, dtypes differ, or the mask is not boolean.
            ValueError: if the shapes do not fit.
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

    def __call__(
        self,
        x: Float[Array, "B T d_in"],
        *,
        mask: Bool[Array, "..."] | None = None,
        bias: Float[Array, "..."] | None = None,
        is_causal: bool = False,
        key_padding_lengths: Int[Array, " B"] | Sequence[int] | None = None,
        positions: Int[Array, "#B T"] | None = None,
    ) -> Float[Array, "B T E"]:
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
            ValueError: if the shapes do not fit or a length lies outside 0..T.
        """
        check_floating("x", x, rank=3)
        output, _ = self.attend(
            x, mask=mask, bias=bias, is_causal=is_causal, key_padding_lengths=key_padding_lengths, positions=positions
        )
        return output

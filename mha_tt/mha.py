"""Multi-head attention: the functions made of the stages, and the modules that hold weights.

Axes: B batch, T query tokens, S key tokens, N query heads, K key/value heads, H head_dim, E d_model.
A mask is boolean and True where a query may not see a key; an additive term is a bias.

On the device H is the padded head_dim: see `mha_tt.upload_weights`. Wherever the true one matters, it is a keyword.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import ttnn
from jaxtyping import Bool, Float, Int
from ttnn import Tensor

from mha_tt import fused
from mha_tt.checks import (
    check_bias,
    check_config,
    check_dtype,
    check_floating,
    check_input_dtype,
    check_layer_inputs,
    check_lengths,
    check_mask,
    check_projected,
    check_weights,
)
from mha_tt.device import (
    accurate_config,
    describe_config,
    padded_head_dim,
    upload_weights,
)
from mha_tt.masks import (
    CausalMask,
    DeviceMask,
)
from mha_tt.rope import Rotation
from mha_tt.stages import Project, _drop, combine_heads, project_qkv, scaled_dot_product_attention, split_heads

# ---- Functions -------------------------------------------------------------------------------------------------------


def multi_head_attention_core(
    query: Float[Tensor, "B T E"],
    key: Float[Tensor, "B S E"],
    value: Float[Tensor, "B S E"],
    num_heads: int,
    mask: Bool[np.ndarray, "..."] | DeviceMask | None = None,
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
    mask: Bool[np.ndarray, "..."] | DeviceMask | None = None,
    bias: Float[np.ndarray, "..."] | Tensor | None = None,
    is_causal: bool = False,
    key_padding_lengths: Int[np.ndarray, " B"] | Sequence[int] | None = None,
    need_weights: bool = False,
    positions: Int[np.ndarray, "#B T"] | None = None,
    rope_theta: float | None = None,
    dropout: float = 0.0,
    dropout_keep: Bool[np.ndarray, "B N T S"] | None = None,
    seed: int = 0,
    head_dim: int,
    compute_kernel_config: ttnn.DeviceComputeKernelConfig | None = None,
) -> tuple[Float[Tensor, "B T E"], Float[Tensor, "B N T S"] | None]:
    """Multi-head attention with weights from outside: project, split, attend, combine, project.

    Args:
        query: (B, T, d_in).
        weights: `q_proj`, `k_proj`, `v_proj` (or one `qkv_proj`) and, where there is one, `out_proj`, as
            `upload_weights` gives them; every bias may be absent.
        key: (B, S, d_kv); absent for self-attention.
        value: (B, S, d_kv); the key when absent.
        num_heads: number of query heads, N.
        num_kv_heads: number of key/value heads, K, a divisor of N; N when absent.
        mask: boolean, True = masked; broadcasts to (B, N, T, S). A row in which every key is masked gives 0. A
            `DeviceMask` made of it is uploaded once for many calls.
        bias: added to the scores; broadcasts to (B, N, T, S). -inf masks a key.
        is_causal: hide every key after the query's own position, as `create_causal_mask`.
        key_padding_lengths: number of real keys of each sequence, (B,), on the host, as `create_padding_mask`.
        need_weights: also return the attention weights, which takes the plain path.
        positions: place of each token for RoPE, (B or 1, T); 0, 1, … when absent.
        rope_theta: base of the RoPE frequencies, or None for no RoPE.
        dropout: rate at which attention weights are dropped, which takes the plain path; 0 outside training.
        dropout_keep: True where a weight is kept, in place of a random draw; takes the plain path.
        seed: of that draw.
        head_dim: features of a head, H, before padding: the weights do not tell.
        compute_kernel_config: arithmetic of the device; `accurate_config` when absent.

    Returns:
        The output (B, T, E), or (B, T, N * H) without `out_proj`, and the attention weights (B, N, T, S) or None.

    Raises:
        TypeError: if an input is not floating point, dtypes differ, the mask is not boolean or the lengths are not
            integers.
        ValueError: if names or shapes of the weights, or the shapes of the inputs, do not fit, or a length lies outside
            0..S.

    Source: Attention Is All You Need, arXiv:1706.03762, section 3.2.2.
    """
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    check_weights(weights, num_heads, num_kv_heads)
    return _attention_layer(
        project_with(weights, compute_kernel_config=compute_kernel_config),
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
        seed=seed,
        head_dim=head_dim,
        compute_kernel_config=compute_kernel_config,
    )


def project_with(
    weights: Mapping[str, Tensor], *, compute_kernel_config: ttnn.DeviceComputeKernelConfig | None = None
) -> Project:
    """Projections whose weights lie in the container that `multi_head_attention` takes."""

    def project(name: str, x: Tensor) -> Tensor:
        weight = weights[f"{name}.weight"]
        check_projected(name, x, weight)
        return ttnn.linear(
            x,
            weight,
            bias=weights.get(f"{name}.bias"),
            dtype=x.dtype,
            compute_kernel_config=compute_kernel_config or accurate_config(x.device()),
        )

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
    mask: np.ndarray | DeviceMask | None,
    bias: np.ndarray | Tensor | None,
    is_causal: bool,
    key_padding_lengths: np.ndarray | Sequence[int] | None,
    need_weights: bool,
    positions: np.ndarray | Rotation | None,
    rope_theta: float | None,
    dropout: float,
    dropout_keep: np.ndarray | None = None,
    seed: int,
    head_dim: int | None,
    compute_kernel_config: ttnn.DeviceComputeKernelConfig | None,
) -> tuple[Tensor, Tensor | None]:
    check_layer_inputs(query, key, value, positions, rope_theta)
    batch_size, seq_len_q, seq_len_k = query.shape[0], query.shape[1], (query if key is None else key).shape[1]
    check_mask(mask, (batch_size, num_heads, seq_len_q, seq_len_k))
    check_bias(bias, (batch_size, num_heads, seq_len_q, seq_len_k))
    if key_padding_lengths is not None:
        check_lengths("key_padding_lengths", key_padding_lengths, batch_size, seq_len_k)
    key = query if key is None else key
    value = key if value is None else value
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
        head_dim=head_dim,
    )
    hidden: Any = {"mask": mask, "is_causal": is_causal, "key_padding_lengths": key_padding_lengths}
    arithmetic: Any = {"head_dim": head_dim, "compute_kernel_config": compute_kernel_config}
    if need_weights or dropout or dropout_keep is not None or q.dtype == ttnn.float32:  # what the kernel does not offer
        context, attn_weights = scaled_dot_product_attention(
            q,
            k,
            v,
            **hidden,
            bias=bias,
            need_weights=need_weights,
            dropout=dropout,
            dropout_keep=dropout_keep,
            seed=seed,
            **arithmetic,
        )
    else:
        context, attn_weights = fused.scaled_dot_product_attention(q, k, v, **hidden, bias=bias, **arithmetic)
    output = combine_heads(context)
    return project("out_proj", output) if out_proj else output, attn_weights


# ---- Modules ---------------------------------------------------------------------------------------------------------


class AttentionLayer:
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
        fused_qkv: hold one qkv_proj, its rows q, then k, then v, in place of three projections; the results are equal,
            and one product takes less time than three.
        rope_theta: base of the RoPE frequencies, or None for no RoPE.
        dropout: rate at which attention weights are dropped in training.
        output_dropout: rate at which outputs are dropped in training.
        device: where the weights are kept.
        dtype: of inputs and outputs: `ttnn.bfloat16` or `ttnn.bfloat8_b`, which take the fused kernel, or
            `ttnn.float32`, which takes the plain path.
        weight_dtype: of the weights; dtype when absent.
        compute_kernel_config: arithmetic of the device; `accurate_config` when absent. `fast_config` gives accuracy
            away for speed.
        rng: draws the weights, and the seeds of dropout.

    Raises:
        TypeError: if a width or a number of heads is not an integer, rope_theta or a rate not a number, what the layer
            has or has not not a boolean, or a dtype is another.
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
        device: ttnn.MeshDevice,
        dtype: ttnn.DataType = ttnn.bfloat16,
        weight_dtype: ttnn.DataType | None = None,
        compute_kernel_config: ttnn.DeviceComputeKernelConfig | None = None,
        rng: np.random.Generator | None = None,
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
            is_self_attention=self._is_self_attention,
        )
        check_dtype("dtype", dtype)
        check_dtype("weight_dtype", dtype if weight_dtype is None else weight_dtype)
        self.d_model = d_model
        self.num_heads = num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.head_dim = d_model // num_heads if head_dim is None else head_dim
        self.d_in = d_model if d_in is None else d_in
        self.d_kv = self.d_in if d_kv is None else d_kv
        self.qkv_bias = qkv_bias
        self.out_bias = out_bias
        self.out_proj = out_proj
        self.fused_qkv = fused_qkv
        self.rope_theta = rope_theta
        self.dropout = dropout
        self.output_dropout = output_dropout
        self.device = device
        self.dtype = dtype
        self.weight_dtype = dtype if weight_dtype is None else weight_dtype
        self.compute_kernel_config = compute_kernel_config or accurate_config(device)
        self.rng = np.random.default_rng() if rng is None else rng
        self.training = True
        self._rotation: Rotation | None = None
        self._causal_mask: DeviceMask | None = None
        self.load_weights(self._draw_weights())

    def _weight_shapes(self) -> dict[str, tuple[int, ...]]:
        q_width, kv_width = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        widths = {"q_proj": (q_width, self.d_in), "k_proj": (kv_width, self.d_kv), "v_proj": (kv_width, self.d_kv)}
        if self.out_proj:
            widths["out_proj"] = (self.d_model, q_width)
        shapes: dict[str, tuple[int, ...]] = {}
        for name, shape in widths.items():
            shapes[f"{name}.weight"] = shape
            if self.out_bias if name == "out_proj" else self.qkv_bias:
                shapes[f"{name}.bias"] = shape[:1]
        return shapes

    def _draw_weights(self) -> dict[str, np.ndarray]:
        """Xavier-uniform weights, those of q, k and v each on their own, and biases of 0."""
        limits = {name: (6.0 / sum(shape)) ** 0.5 * (len(shape) == 2) for name, shape in self._weight_shapes().items()}
        return {
            name: self.rng.uniform(-limits[name], limits[name], shape) for name, shape in self._weight_shapes().items()
        }

    def load_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        """Upload canonical weights in the place of those held now.

        Args:
            weights: arrays by name: `q_proj.weight` (N * H, d_in), `q_proj.bias` (N * H,), …, `out_proj.weight`
                (E, N * H); also for a layer that holds one qkv_proj.

        Raises:
            ValueError: if names or shapes do not fit the layer, or a value is not finite; nothing is changed then.
        """
        shapes = {name: np.shape(weight) for name, weight in weights.items()}
        if shapes != self._weight_shapes():
            raise ValueError(f"weights must have the names and shapes {self._weight_shapes()}, got {shapes}")
        weights = dict(weights)
        for kind in ("weight", "bias"):
            if self.fused_qkv and f"q_proj.{kind}" in weights:
                parts = [weights.pop(f"{part}_proj.{kind}") for part in "qkv"]
                weights[f"qkv_proj.{kind}"] = np.concatenate(parts)
        self.weights = upload_weights(
            weights,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            rope=self.rope_theta is not None,
            device=self.device,
            dtype=self.weight_dtype,
        )

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
            "out_proj": self.out_proj,
            "fused_qkv": self.fused_qkv,
            "rope_theta": self.rope_theta,
            "dropout": self.dropout,
            "output_dropout": self.output_dropout,
        }

    def train(self, mode: bool = True) -> AttentionLayer:
        """Switch dropout on, or off, and return the module."""
        self.training = mode
        return self

    def eval(self) -> AttentionLayer:
        """Switch dropout off, and return the module."""
        return self.train(False)

    def __repr__(self) -> str:
        dtypes = {"dtype": self.dtype, "weight_dtype": self.weight_dtype}
        words = [f"{name}={value!r}" for name, value in self.config.items()]
        words += [f"{name}={str(dtype).rpartition('.')[2].lower()}" for name, dtype in dtypes.items()]
        words.append(f"compute_kernel_config=({describe_config(self.compute_kernel_config)})")
        return f"{type(self).__name__}({', '.join(words)})"

    def project(self, name: str, x: Float[Tensor, "B T d_in"]) -> Float[Tensor, "B T d_out"]:
        """Apply the projection of that name, as a module, so that replaced layers take part."""
        return project_with(self.weights, compute_kernel_config=self.compute_kernel_config)(name, x)

    def attend(
        self,
        query: Float[Tensor, "B T d_in"],
        key: Float[Tensor, "B S d_kv"] | None = None,
        value: Float[Tensor, "B S d_kv"] | None = None,
        *,
        mask: Bool[np.ndarray, "..."] | DeviceMask | None = None,
        bias: Float[np.ndarray, "..."] | Tensor | None = None,
        is_causal: bool = False,
        key_padding_lengths: Int[np.ndarray, " B"] | Sequence[int] | None = None,
        need_weights: bool = False,
        positions: Int[np.ndarray, "#B T"] | None = None,
    ) -> tuple[Float[Tensor, "B T E"], Float[Tensor, "B N T S"] | None]:
        """`multi_head_attention` with the weights and the configuration of this module."""
        check_floating("query", query, rank=3)
        check_input_dtype("query", query, self.dtype)
        self._check_dropout()
        if is_causal and mask is None and key is None and key_padding_lengths is None:
            mask, is_causal = self._causal(query.shape[1]), False
        output, attn_weights = _attention_layer(
            self.project,
            query,
            key,
            value,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            fused_qkv=self.fused_qkv,
            out_proj=self.out_proj,
            mask=mask,
            bias=bias,
            is_causal=is_causal,
            key_padding_lengths=key_padding_lengths,
            need_weights=need_weights,
            positions=self._first_rotation(query.shape[1]) if positions is None else positions,
            rope_theta=self.rope_theta,
            dropout=self.dropout if self.training else 0.0,
            seed=self._draw_seed(),
            head_dim=self.head_dim,
            compute_kernel_config=self.compute_kernel_config,
        )
        return self._drop_output(output), attn_weights

    def _first_rotation(self, seq_len: int) -> Rotation | None:
        """The turns of positions 0, 1, …, kept for the next call of as many tokens."""
        if self.rope_theta is None or not seq_len:
            return None
        if self._rotation is None or self._rotation.cos.shape[2] != seq_len:
            padded = padded_head_dim(self.head_dim, rope=True)
            positions = np.arange(seq_len)[None]
            self._rotation = Rotation(
                positions, self.rope_theta, head_dim=self.head_dim, padded=padded, device=self.device
            )
        return self._rotation

    def _causal(self, seq_len: int) -> DeviceMask:
        """The causal mask, kept for the next call of as many tokens."""
        if self._causal_mask is None or self._causal_mask.shape[2] != seq_len:
            self._causal_mask = CausalMask(seq_len, device=self.device)
        return self._causal_mask

    def _drop_output(self, output: Tensor) -> Tensor:
        return _drop("output", output, self.output_dropout if self.training else 0.0, self._draw_seed())

    def _check_dropout(self) -> None:
        """Refuse, before any work, to drop at random what ttnn cannot."""
        if self.training and (self.dropout or self.output_dropout) and self.dtype != ttnn.bfloat16:
            raise TypeError(
                f"the module must be bfloat16 to drop at random in training (eval() switches that off), "
                f"got dtype={self.dtype}"
            )

    def _draw_seed(self) -> int:
        return int(self.rng.integers(2**31)) if self.training and (self.dropout or self.output_dropout) else 0


class MultiHeadAttention(AttentionLayer):
    """Multi-head attention of any queries over any keys and values; keywords as in `AttentionLayer`."""

    def __call__(
        self,
        query: Float[Tensor, "B T d_in"],
        key: Float[Tensor, "B S d_kv"] | None = None,
        value: Float[Tensor, "B S d_kv"] | None = None,
        *,
        mask: Bool[np.ndarray, "..."] | DeviceMask | None = None,
        bias: Float[np.ndarray, "..."] | Tensor | None = None,
        is_causal: bool = False,
        key_padding_lengths: Int[np.ndarray, " B"] | Sequence[int] | None = None,
        need_weights: bool = False,
        positions: Int[np.ndarray, "#B T"] | None = None,
    ) -> tuple[Float[Tensor, "B T E"], Float[Tensor, "B N T S"] | None]:
        """Attend from each query token to the key tokens.

        Args:
            query: (B, T, d_in), on the device, in the dtype of the module.
            key: (B, S, d_kv); absent for self-attention.
            value: (B, S, d_kv); the key when absent.
            mask: boolean, True = masked; broadcasts to (B, N, T, S). A row in which every key is masked gives 0. A
                `DeviceMask` made of it is uploaded once for many calls.
            bias: added to the scores; broadcasts to (B, N, T, S). -inf masks a key; on the device it is not read: there
                a row of nothing but -inf gives the mean of the values.
            is_causal: hide every key after the query's own position, as `create_causal_mask`.
            key_padding_lengths: number of real keys of each sequence, (B,), on the host, as `create_padding_mask`.
            need_weights: also return the attention weights, which takes the plain path.
            positions: place of each token for RoPE, (B or 1, T), on the host; 0, 1, … when absent.

        Returns:
            The output (B, T, E), and the attention weights before dropout (B, N, T, S) or None.

        Raises:
            TypeError: if an input is not on the device, not of the dtype, the mask is not boolean or the lengths are
                not integers.
            ValueError: if the shapes do not fit, or a length lies outside 0..S.
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
        x: Float[Tensor, "B T d_in"],
        *,
        mask: Bool[np.ndarray, "..."] | DeviceMask | None = None,
        bias: Float[np.ndarray, "..."] | Tensor | None = None,
        is_causal: bool = False,
        key_padding_lengths: Int[np.ndarray, " B"] | Sequence[int] | None = None,
        positions: Int[np.ndarray, "#B T"] | None = None,
    ) -> Float[Tensor, "B T E"]:
        """Attend from each token to the tokens of its own sequence.

        Args:
            x: (B, T, d_in), on the device, in the dtype of the module.
            mask: boolean, True = masked; broadcasts to (B, N, T, T). A row in which every key is masked gives 0. A
                `DeviceMask` made of it is uploaded once for many calls.
            bias: added to the scores; broadcasts to (B, N, T, T). -inf masks a key; on the device it is not read: there
                a row of nothing but -inf gives the mean of the values.
            is_causal: hide every token after the query's own position.
            key_padding_lengths: number of real tokens of each sequence, (B,); the padding is on the right.
            positions: place of each token for RoPE, (B or 1, T), on the host; 0, 1, … when absent.

        Returns:
            The output (B, T, E); at padded positions it is the attention of the padding over the real tokens.

        Raises:
            TypeError: if x is not on the device, not of the dtype, the mask is not boolean or the lengths are not
                integers.
            ValueError: if the shapes do not fit or a length lies outside 0..T.
        """
        check_floating("x", x, rank=3)
        output, _ = self.attend(
            x, mask=mask, bias=bias, is_causal=is_causal, key_padding_lengths=key_padding_lengths, positions=positions
        )
        return output

"""Multi-head attention layers.

Axes: B batch, T query tokens, S key tokens, N query heads, K key/value heads, H head_dim, Hv
value_head_dim, E d_model. Layers accept any number of batch axes instead of B, or none: see `axes`.
A mask is boolean, True = masked (the query may not attend to the key); an additive term is a bias.

On the device H is the padded head_dim: see `mha_tt.upload_weights`. The spec has the true one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import numpy as np
import ttnn
from jaxtyping import Bool, Float, Int
from ttnn import Tensor

from mha_spec import AttentionSpec, InputError, InputTypeError
from mha_spec.attention import check_spec, spec_from
from mha_tt import stages
from mha_tt.axes import with_one_batch_axis
from mha_tt.checks import (
    check_dtype,
    check_input_dtype,
    check_is_device,
    check_kernel,
    check_layer_inputs,
    check_tiles,
    checked,
)
from mha_tt.decode.positions import PreparedWeights
from mha_tt.device import accurate_config, describe_config
from mha_tt.features.rope import Rotation, rotation_of
from mha_tt.kernels import Kernel, fused
from mha_tt.masks import CausalMask, DeviceMask, Mask
from mha_tt.padding import find_padding, finite_inputs, zero_padding
from mha_tt.projections import project_output, project_qkv
from mha_tt.scores import Scores
from mha_tt.stages import drop
from mha_tt.weights import project_with, upload_weights

# ---- Functions -----------------------------------------------------------------------------------


@with_one_batch_axis
def attention_layer(
    layer: AttentionLayer | FunctionalLayer,
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    mask: Mask,
    *,
    bias: np.ndarray | Tensor | None,
    need_weights: bool,
    positions: np.ndarray | Rotation | None,
) -> tuple[Tensor, Tensor | None]:
    """Return a layer's output and attention weights (or None): check, project, attend, project."""
    spec = layer.spec
    check_kernel(layer.kernel)
    check_layer_inputs(query, key, value, positions, spec)
    key = query if key is None else key
    value = key if value is None else value
    scores = layer.scores(bias)
    mask = mask.within(spec)
    seq_len_k = key.shape[-2]  # pyright: ignore[reportOptionalMemberAccess]
    scores_shape = (query.shape[0], spec.num_heads, query.shape[1], seq_len_k)
    mask.check(scores_shape)
    scores.check_arguments(scores_shape, query)
    is_padding = None
    if mask.key_padding_lengths is not None:
        is_padding = find_padding(mask, query.shape[0], seq_len_k)

    if is_padding is not None and not spec.shared_kv:
        query, key, value = finite_inputs(query, key, value, is_padding)
    q, k, v = project_qkv(layer.project, query, key, value, spec, positions)
    if is_padding is not None:
        k = zero_padding(k, is_padding)
        v = zero_padding(v, is_padding)
    if need_weights:
        context, attn_weights = stages.attend(q, k, v, mask, scores, layer.compute_kernel_config)
    else:
        context = layer.kernel(q, k, v, mask, scores)
        attn_weights = None
    return project_output(layer.project, context, query, spec), attn_weights


@dataclass(frozen=True, eq=False)
class FunctionalLayer:
    """Functional counterpart of `AttentionLayer`, with weights from outside."""

    weights: Mapping[str, Tensor]
    spec: AttentionSpec
    kernel: Kernel = fused.attend
    training: bool = False
    dropout_keep: Bool[np.ndarray, "*#scores"] | None = None
    seed: int = 0
    compute_kernel_config: ttnn.DeviceComputeKernelConfig | None = None
    prepared: PreparedWeights | None = None

    def __post_init__(self) -> None:
        """Give the default kernel the arithmetic of this layer."""
        if self.kernel is fused.attend:
            object.__setattr__(self, "kernel", fused.FusedAttention(self.compute_kernel_config))

    def project(self, name: str, x: Float[Tensor, "B T d_in"]) -> Float[Tensor, "B T d_out"]:
        """Apply the projection or norm `name`."""
        return project_with(
            self.weights, self.spec, compute_kernel_config=self.compute_kernel_config
        )(name, x)

    def scores(self, bias: Float[np.ndarray | Tensor, "*#scores"] | None) -> Scores:
        """Return the scores of a call: bias, learned weights, and dropout in training."""
        learned = {name: self.weights[name] for name in self.spec.score_shapes}
        dropout = self.spec.dropout if self.training else 0.0
        return Scores(self.spec, bias, learned, dropout, self.dropout_keep, self.seed)

    @property
    def plain_weights(self) -> Mapping[str, Tensor]:
        """Weights that `project` applies without any other change."""
        return self.weights


# ---- Modules -------------------------------------------------------------------------------------


class AttentionLayer:
    """Base class of attention modules: their specification, projections and norms.

    Args:
        spec: specification of the layer; or d_model instead.
        num_heads: number of query heads, with d_model.
        device: device of the weights.
        dtype: dtype of inputs and outputs: `ttnn.bfloat16` or `ttnn.bfloat8_b`, which use the fused
            kernel, or `ttnn.float32`, which uses the plain path.
        weight_dtype: dtype of the weights; default: `dtype`.
        compute_kernel_config: arithmetic of the device; default: `accurate_config`. `fast_config`
            trades accuracy for speed.
        rng: random generator of weights and of dropout seeds.
        fields: other fields of `AttentionSpec` by name, with d_model.

    Attributes:
        spec: local specification of each chip: the layer, or some of its heads after
            `parallel.shard`.
        full_spec: the layer.
        heads_axis: mesh dimension that heads are divided over, or None.
        kernel: computes the context, unless need_weights is set; can be replaced, which also
            affects steps.
        prepared: tensors shared by the steps of the layer.

    Raises:
        TypeError: if spec is neither an `AttentionSpec` nor an integer, a field is unknown, a dtype
            is unsupported, or device or rng is something else.
        ValueError: if fields accompany a spec or do not fit, or the keys of self-attention have a
            different width.
    """

    _is_self_attention = False  # True: accepts no separate keys and values

    def __init__(
        self,
        spec: AttentionSpec | int | None = None,
        num_heads: int | None = None,
        *,
        device: ttnn.MeshDevice,
        dtype: ttnn.DataType = ttnn.bfloat16,
        weight_dtype: ttnn.DataType | None = None,
        compute_kernel_config: ttnn.DeviceComputeKernelConfig | None = None,
        rng: np.random.Generator | None = None,
        **fields: Any,
    ) -> None:
        spec = spec_from(spec, num_heads, fields)
        check_spec(spec, is_self_attention=self._is_self_attention)
        check_is_device(device)
        check_dtype("dtype", dtype)
        check_dtype("weight_dtype", dtype if weight_dtype is None else weight_dtype)
        rng = np.random.default_rng() if rng is None else rng
        if not isinstance(rng, np.random.Generator):
            hint = "np.random.default_rng(0)"
            raise InputTypeError("rng", "be a NumPy generator", type(rng).__name__, hint=hint)
        self.spec = self.full_spec = spec
        self.heads_axis: int | None = None
        self.device = device
        self.dtype = dtype
        self.weight_dtype = dtype if weight_dtype is None else weight_dtype
        self.compute_kernel_config = compute_kernel_config or accurate_config(device)
        self.rng = rng
        self.training = True
        self.kernel: Kernel = fused.FusedAttention(self.compute_kernel_config)
        self.prepared = PreparedWeights()
        self._rotation: Rotation | None = None
        self._causal_mask: CausalMask | None = None
        self.load_weights(self._draw_weights())

    def _draw_weights(self) -> dict[str, np.ndarray]:
        """Draw Xavier-uniform weights, separately for q, k and v; biases and weights that change
        scores are 0, factors of norms 1.
        """
        shapes = self.full_spec.weight_shapes
        norms = self.full_spec.norms
        weights = {name: np.zeros(shape) for name, shape in shapes.items()}
        for name, shape in shapes.items():
            part, _, kind = name.partition(".")
            if part in norms and kind == "weight":
                weights[name] += norms[part].initial_weight
            elif kind == "weight":
                limit = (6.0 / sum(shape)) ** 0.5
                weights[name] = self.rng.uniform(-limit, limit, shape)
        return weights

    def load_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        """Replace the weights by canonical weights.

        Args:
            weights: arrays by name: `q_proj.weight` (N * H, d_in), `q_proj.bias` (N * H,), …,
                `out_proj.weight` (E, N * H); also for a layer with one qkv_proj.

        Raises:
            ValueError: if names or shapes do not fit the layer, or a value is not finite; nothing
                is then changed.
        """
        self.weights = upload_weights(
            weights,
            self.full_spec,
            device=self.device,
            dtype=self.weight_dtype,
            heads_axis=self.heads_axis,
        )

    def train(self, mode: bool = True) -> AttentionLayer:
        """Switch dropout on or off, and return the module."""
        self.training = mode
        return self

    def eval(self) -> AttentionLayer:
        """Switch dropout off, and return the module."""
        return self.train(False)

    def __repr__(self) -> str:
        dtypes = {"dtype": self.dtype, "weight_dtype": self.weight_dtype}
        words = [repr(self.full_spec)]
        words += [
            f"{name}={str(dtype).rpartition('.')[2].lower()}" for name, dtype in dtypes.items()
        ]
        words.append(f"compute_kernel_config=({describe_config(self.compute_kernel_config)})")
        return f"{type(self).__name__}({', '.join(words)})"

    def project(self, name: str, x: Float[Tensor, "B T d_in"]) -> Float[Tensor, "B T d_out"]:
        """Apply the projection or norm `name`.

        Subclasses may override it (LoRA, quantized weights). With divided heads, the outputs of
        out_proj are summed over the chips.
        """
        project = project_with(
            self.weights, self.spec, compute_kernel_config=self.compute_kernel_config
        )
        output = project(name, x)
        if name == "out_proj" and self.heads_axis is not None:
            # Imported only if heads are divided.
            from mha_tt.parallel.local import all_reduce

            output = all_reduce(output, self.heads_axis)
        return output

    def scores(self, bias: Float[np.ndarray | Tensor, "*#scores"] | None) -> Scores:
        """Return the scores of a call: bias, learned weights, and dropout in training."""
        learned = {name: self.weights[name] for name in self.spec.score_shapes}
        dropout = self.spec.dropout if self.training else 0.0
        return Scores(self.spec, bias, learned, dropout, seed=self._draw_seed())

    def drop_output(self, output: Float[Tensor, "B T E"]) -> Float[Tensor, "B T E"]:
        """Apply output dropout, in training and at a rate above 0."""
        if not self._drops:
            return output
        return drop("output", output, self.spec.output_dropout, self._draw_seed())

    @property
    def plain_weights(self) -> Mapping[str, Tensor] | None:
        """Weights, if `project` applies them without any other change, else None."""
        if self.project == MethodType(AttentionLayer.project, self):
            return self.weights
        return None

    def _uploaded_once(
        self, seq_len: int, mask: Mask, positions: np.ndarray | Rotation | None
    ) -> tuple[Mask, np.ndarray | Rotation | None]:
        """Return mask and positions of self-attention; causal masks (of layers without chunks) and
        default rotations are uploaded once for many calls of one length.
        """
        if mask.is_causal and mask.has_only("is_causal"):
            if self._causal_mask is None or self._causal_mask.seq_len != seq_len:
                # With the window, so that `Mask.to_bool` returns this mask instead of a new one.
                self._causal_mask = CausalMask(seq_len, self.spec.window_size, device=self.device)
            mask = Mask(self._causal_mask)
        if positions is not None or self.spec.rope is None or not seq_len:
            return mask, positions
        if self._rotation is None or self._rotation.cos.shape[2] != seq_len:
            self._rotation = rotation_of(np.arange(seq_len)[None], self.spec, device=self.device)
        return mask, self._rotation

    def check_input(self, name: str, x: Tensor) -> None:
        """Reject an input that is not in tiles on the device or has the wrong dtype, and random
        dropout that ttnn does not support.
        """
        check_tiles(name, x)
        check_input_dtype(name, x, self.dtype)
        if self._drops and self.heads_axis is not None:
            raise InputError(
                "the module",
                "have no dropout in training if its heads are divided (eval() switches it off): "
                "what each chip would drop is unknown",
                heads_axis=self.heads_axis,
            )
        if self._drops and self.dtype != ttnn.bfloat16:
            raise InputTypeError(
                "the module",
                "be bfloat16 to drop at random in training (eval() switches that off)",
                dtype=self.dtype,
            )

    @property
    def _drops(self) -> bool:
        return self.training and bool(self.spec.dropout or self.spec.output_dropout)

    def _draw_seed(self) -> int:
        if self._drops:
            return int(self.rng.integers(2**31))
        return 0


class MultiHeadAttention(AttentionLayer):
    """Multi-head attention of queries over keys and values.

    A call returns a pair: the output, and the attention weights or None. `MultiHeadSelfAttention`
    returns only the output, for sequences of modules. Sizes are fields of the specification:
    `layer.spec.num_heads`. Constructor arguments: see `AttentionLayer`.
    """

    @checked
    def __call__(
        self,
        query: Float[Tensor, "*B T d_in"],
        key: Float[Tensor, "*B S d_kv"] | Float[Tensor, "*B K S H"] | None = None,
        value: Float[Tensor, "*B S d_kv"] | Float[Tensor, "*B K S Hv"] | None = None,
        *,
        bias: Float[np.ndarray | Tensor, "*#scores"] | None = None,
        need_weights: bool = False,
        positions: Int[np.ndarray, "*axes T"] | Rotation | None = None,
        mask: Bool[np.ndarray, "*#scores"] | DeviceMask | None = None,
        is_causal: bool = False,
        key_padding_lengths: Int[np.ndarray, "*B"] | Sequence[int] | None = None,
        segment_ids: Int[np.ndarray, "*B T"]
        | tuple[Int[np.ndarray, "*B T"], Int[np.ndarray, "*B S"]]
        | None = None,
    ) -> tuple[Float[Tensor, "*B T E"], Float[Tensor, "*B N T S"] | None]:
        """Attend from each query token to the key tokens.

        Args:
            query: (B, T, d_in), on the device, in the dtype of the module.
            key: (B, S, d_kv); default: self-attention. With `shared_kv` the keys of another layer,
                (B, K, S, H), as `project_qkv` returns them.
            value: (B, S, d_kv); default: the key. With `shared_kv` the values of that layer,
                (B, K, S, Hv).
            bias: added to the scores; broadcasts to (B, N, T, S). -inf masks a key. On the device
                it has the dtype of query (for bfloat8_b also bfloat16) and is not read: a row that
                is all -inf returns the mean of the values.
            need_weights: also return the attention weights; uses the plain path.
            positions: position of each token, (B or 1, T), or with sections (axes, B or 1, T), on
                the host; default: 0, 1, …. A `Rotation` of them is uploaded once for many calls.
            mask, is_causal, key_padding_lengths, segment_ids: hide keys, see `Mask`.

        Returns:
            Output (B, T, E), or (B, T, N * Hv) without `out_proj`, and the attention weights before
            dropout (B, N, T, S) or None.

        Raises:
            TypeError: if an input is not on the device or has the wrong dtype, the mask is not
                boolean or the lengths are not integers.
            ValueError: if the shapes do not fit, or a length lies outside 0..S.
        """
        self.check_input("query", query)
        full_mask = Mask(mask, is_causal, key_padding_lengths, segment_ids)
        if key is None:
            full_mask, positions = self._uploaded_once(query.shape[-2], full_mask, positions)
        output, attn_weights = attention_layer(
            self,
            query,
            key,
            value,
            full_mask,
            bias=bias,
            need_weights=need_weights,
            positions=positions,
        )
        return self.drop_output(output), attn_weights


class MultiHeadSelfAttention(AttentionLayer):
    """Multi-head attention of a sequence over itself.

    Constructor arguments: see `AttentionLayer`.
    """

    _is_self_attention = True

    @checked
    def __call__(
        self,
        x: Float[Tensor, "*B T d_in"],
        *,
        bias: Float[np.ndarray | Tensor, "*#scores"] | None = None,
        positions: Int[np.ndarray, "*axes T"] | Rotation | None = None,
        mask: Bool[np.ndarray, "*#scores"] | DeviceMask | None = None,
        is_causal: bool = False,
        key_padding_lengths: Int[np.ndarray, "*B"] | Sequence[int] | None = None,
        segment_ids: Int[np.ndarray, "*B T"]
        | tuple[Int[np.ndarray, "*B T"], Int[np.ndarray, "*B S"]]
        | None = None,
    ) -> Float[Tensor, "*B T E"]:
        """Attend from each token to the tokens of its own sequence.

        Errors and other arguments are as in `MultiHeadAttention`, with x as query, key and
        value.

        Args:
            x: (B, T, d_in), on the device, in the dtype of the module.

        Returns:
            Output (B, T, E). At padded positions, it is the attention of the padding over the real
            tokens.
        """
        self.check_input("x", x)
        full_mask = Mask(mask, is_causal, key_padding_lengths, segment_ids)
        full_mask, positions = self._uploaded_once(x.shape[-2], full_mask, positions)
        output, _ = attention_layer(
            self, x, None, None, full_mask, bias=bias, need_weights=False, positions=positions
        )
        return self.drop_output(output)

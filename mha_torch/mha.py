"""Multi-head attention layers.

Axes: B batch, T query tokens, S key tokens, N query heads, K key/value heads, H head_dim, Hv
value_head_dim, E d_model. Layers accept any number of batch axes instead of B, or none: see `axes`.
A mask is boolean, True = masked (the query may not attend to the key); an additive term is a bias.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from mha_spec import AttentionSpec, InputTypeError
from mha_spec.attention import check_spec, spec_from
from mha_torch import stages
from mha_torch.arrays import is_distributed
from mha_torch.axes import with_one_batch_axis
from mha_torch.checks import check_kernel, check_layer_inputs, check_projected, checked
from mha_torch.features.norms import NormLayer
from mha_torch.kernels import Kernel, fused
from mha_torch.kernels.sdpa import check_context_parallel
from mha_torch.masks import Mask
from mha_torch.padding import find_padding, finite_inputs, zero_padding
from mha_torch.projections import project_output, project_qkv
from mha_torch.scores import Scores
from mha_torch.weights import project_with

# ---- Functions -----------------------------------------------------------------------------------


@with_one_batch_axis
def attention_layer(
    layer: "AttentionLayer | FunctionalLayer",
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    mask: Mask,
    *,
    bias: Tensor | None,
    need_weights: bool,
    positions: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Return a layer's output and attention weights (or None): check, project, attend, project."""
    spec = layer.spec
    check_kernel(layer.kernel)
    check_layer_inputs(query, key, value, positions, spec)
    key = query if key is None else key
    value = key if value is None else value
    scores = layer.scores(bias)
    mask = mask.within(spec)
    check_context_parallel(mask, scores, positions, need_weights=need_weights)
    scores_shape = (query.shape[0], spec.num_heads, query.shape[1], key.shape[-2])
    mask.check(scores_shape, query)
    scores.check_arguments(scores_shape, query)
    is_padding = None
    if mask.key_padding_lengths is not None:
        # Where tokens are divided, the kernel finds the padding of the local ones.
        find = getattr(layer.kernel, "find_padding", find_padding)
        mask, is_padding = find(mask, query.shape[0], key.shape[-2], query.device)

    if is_padding is not None and not spec.shared_kv:
        query, key, value = finite_inputs(query, key, value, is_padding)
    q, k, v = project_qkv(layer.project, query, key, value, spec, positions)
    check = getattr(layer.kernel, "check", None)
    if check is not None:
        check(q, k, v, mask, scores)
    if is_padding is not None:
        k = zero_padding(k, is_padding)
        v = zero_padding(v, is_padding)
    if need_weights:
        context, attn_weights = stages.attend(q, k, v, mask, scores)
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
    dropout_keep: Bool[Tensor, "*#scores"] | None = None

    def project(self, name: str, x: Float[Tensor, "B T d_in"]) -> Float[Tensor, "B T d_out"]:
        """Apply the projection or norm `name`."""
        return project_with(self.weights, self.spec)(name, x)

    def scores(self, bias: Float[Tensor, "*#scores"] | None) -> Scores:
        """Return the scores of a call: bias, learned weights, and dropout in training."""
        learned = {name: self.weights[name] for name in self.spec.score_shapes}
        dropout = self.spec.dropout if self.training else 0.0
        return Scores(self.spec, bias, learned, dropout, self.dropout_keep)


# ---- Modules -------------------------------------------------------------------------------------


class AttentionLayer(nn.Module):
    """Base class of attention modules: their specification, projections and norms.

    Args:
        spec: specification of the layer; or d_model instead.
        num_heads: number of query heads, with d_model.
        device, dtype: device and dtype of the weights.
        fields: other fields of `AttentionSpec` by name, with d_model.

    Attributes:
        spec: local specification: the layer, or this rank's heads after `parallel.shard`.
        full_spec: the layer.
        kernel: computes the context, unless need_weights is set; can be replaced.

    Raises:
        TypeError: if spec is neither an `AttentionSpec` nor an integer, a field is unknown, or the
            dtype not floating point.
        ValueError: if fields accompany a spec or do not fit, or the keys of self-attention have a
            different width.
    """

    # The specification decides which of these a layer has: `projections` and `norms`. Weights that
    # change scores are parameters by the names of `score_shapes`.
    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    qkv_proj: nn.Linear
    q_a_proj: nn.Linear
    q_b_proj: nn.Linear
    kv_a_proj: nn.Linear
    kv_b_proj: nn.Linear
    gate_proj: nn.Linear
    out_proj: nn.Linear
    q_norm: NormLayer
    k_norm: NormLayer
    v_norm: NormLayer
    q_a_norm: NormLayer
    kv_a_norm: NormLayer
    context_norm: NormLayer

    _is_self_attention = False  # True: accepts no separate keys and values

    def __init__(
        self,
        spec: AttentionSpec | int | None = None,
        num_heads: int | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **fields: Any,
    ) -> None:
        super().__init__()
        spec = spec_from(spec, num_heads, fields)
        check_spec(spec, is_self_attention=self._is_self_attention)
        is_floating = isinstance(dtype, torch.dtype) and dtype.is_floating_point
        if dtype is not None and not is_floating:
            raise InputTypeError("dtype", "be floating point", dtype=dtype)
        self.spec = self.full_spec = spec
        self.kernel: Kernel = fused.attend
        for name, projection in spec.projections.items():
            linear = nn.Linear(
                projection.d_in,
                projection.d_out,
                bias=projection.has_bias,
                device=device,
                dtype=dtype,
            )
            self.add_module(name, linear)
        for name, norm in spec.norms.items():
            self.add_module(
                name, NormLayer(norm, spec.norm_shapes(name), device=device, dtype=dtype)
            )

        for name, shape in spec.score_shapes.items():
            self.register_parameter(
                name, nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
            )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize Xavier-uniform weights, separately for q, k and v; biases and weights that
        change scores are 0, factors of norms 1.
        """
        for name, projection in self.full_spec.projections.items():
            linear: nn.Linear = getattr(self, name)
            _draw(linear.weight.detach(), projection.widths)
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)
        for name in self.full_spec.norms:
            norm: NormLayer = getattr(self, name)
            norm.reset_parameters()
        for name in self.full_spec.score_shapes:
            nn.init.zeros_(getattr(self, name))

    def extra_repr(self) -> str:
        return repr(self.full_spec)

    def project(self, name: str, x: Float[Tensor, "B T d_in"]) -> Float[Tensor, "B T d_out"]:
        """Call the projection or norm `name` as a module, so that replaced layers (LoRA, quantized)
        are used.
        """
        module: nn.Module = getattr(self, name)
        try:
            return module(x)
        except RuntimeError:
            # Say it in terms of the layer. A replaced projection may store its weights elsewhere.
            weight = getattr(module, "weight", None)
            if name.endswith("_proj") and isinstance(weight, Tensor):
                check_projected(name, x, weight)
            raise

    def scores(self, bias: Float[Tensor, "*#scores"] | None) -> Scores:
        """Return the scores of a call: bias, learned weights, and dropout in training."""
        learned = {name: getattr(self, name) for name in self.spec.score_shapes}
        dropout = self.spec.dropout if self.training else 0.0
        return Scores(self.spec, bias, learned, dropout)

    def drop_output(self, output: Float[Tensor, "B T E"]) -> Float[Tensor, "B T E"]:
        """Apply output dropout, in training and at a rate above 0."""
        if self.training and self.spec.output_dropout:
            return F.dropout(output, self.spec.output_dropout)
        return output


def _draw(weight: Tensor, widths: tuple[int, ...]) -> None:
    """Initialize each part of a projection; a distributed one is drawn whole, and each rank keeps
    its part.
    """
    if is_distributed(weight):
        whole = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
    else:
        whole = weight
    for part in whole.split(widths):
        nn.init.xavier_uniform_(part)
    if whole is not weight:
        # Imported only if something is distributed.
        from mha_torch.parallel.local import copy_from_full

        copy_from_full(weight, whole)


class MultiHeadAttention(AttentionLayer):
    """Multi-head attention of queries over keys and values.

    A call returns a pair: the output, and the attention weights or None. `MultiHeadSelfAttention`
    returns only the output, for sequences of modules. Sizes are fields of the specification:
    `layer.spec.num_heads`. Constructor arguments: see `AttentionLayer`.
    """

    @checked
    def forward(
        self,
        query: Float[Tensor, "*B T d_in"],
        key: Float[Tensor, "*B S d_kv"] | Float[Tensor, "*B K S H"] | None = None,
        value: Float[Tensor, "*B S d_kv"] | Float[Tensor, "*B K S Hv"] | None = None,
        *,
        bias: Float[Tensor, "*#scores"] | None = None,
        need_weights: bool = False,
        positions: Int[Tensor, "*axes T"] | None = None,
        mask: Bool[Tensor, "*#scores"] | None = None,
        is_causal: bool = False,
        key_padding_lengths: Int[Tensor, "*B"] | Sequence[int] | None = None,
        segment_ids: Int[Tensor, "*B T"]
        | tuple[Int[Tensor, "*B T"], Int[Tensor, "*B S"]]
        | None = None,
    ) -> tuple[Float[Tensor, "*B T E"], Float[Tensor, "*B N T S"] | None]:
        """Attend from each query token to the key tokens.

        Args:
            query: (B, T, d_in).
            key: (B, S, d_kv); default: self-attention. With `shared_kv` the keys of another layer,
                (B, K, S, H), as `project_qkv` returns them.
            value: (B, S, d_kv); default: the key. With `shared_kv` the values of that layer,
                (B, K, S, Hv).
            bias: added to the scores, in the dtype of query; broadcasts to (B, N, T, S). -inf masks
                a key.
            need_weights: also return the attention weights; uses the plain path.
            positions: position of each token, (B or 1, T), or with sections (axes, B or 1, T);
                default: 0, 1, ….
            mask, is_causal, key_padding_lengths, segment_ids: hide keys, see `Mask`.

        Returns:
            Output (B, T, E), or (B, T, N * Hv) without `out_proj`, and the attention weights before
            dropout (B, N, T, S) or None.

        Raises:
            TypeError: if an input is not floating point, dtypes differ, the mask is not boolean or
                the lengths are not integers.
            ValueError: if the shapes do not fit, devices differ, or a length lies outside 0..S.
        """
        full_mask = Mask(mask, is_causal, key_padding_lengths, segment_ids)
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
    def forward(
        self,
        x: Float[Tensor, "*B T d_in"],
        *,
        bias: Float[Tensor, "*#scores"] | None = None,
        positions: Int[Tensor, "*axes T"] | None = None,
        mask: Bool[Tensor, "*#scores"] | None = None,
        is_causal: bool = False,
        key_padding_lengths: Int[Tensor, "*B"] | Sequence[int] | None = None,
        segment_ids: Int[Tensor, "*B T"]
        | tuple[Int[Tensor, "*B T"], Int[Tensor, "*B S"]]
        | None = None,
    ) -> Float[Tensor, "*B T E"]:
        """Attend from each token to the tokens of its own sequence.

        Errors and other arguments are as in `MultiHeadAttention`, with x as query, key and
        value.

        Args:
            x: (B, T, d_in).

        Returns:
            Output (B, T, E). At padded positions, it is the attention of the padding over the real
            tokens.
        """
        full_mask = Mask(mask, is_causal, key_padding_lengths, segment_ids)
        output, _ = attention_layer(
            self, x, None, None, full_mask, bias=bias, need_weights=False, positions=positions
        )
        return self.drop_output(output)

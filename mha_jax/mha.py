"""Multi-head attention layers.

Axes: B batch, T query tokens, S key tokens, N query heads, K key/value heads, H head_dim, Hv
value_head_dim, E d_model. Layers accept any number of batch axes instead of B, or none: see `axes`.
A mask is boolean, True = masked (the query may not attend to the key); an additive term is a bias.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Bool, Float, Int

import mha_spec
from mha_jax import stages
from mha_jax.arrays import Array, array_of, cast
from mha_jax.axes import with_one_batch_axis
from mha_jax.checks import check_kernel, check_layer_inputs, check_projected, checked
from mha_jax.features.norms import NormLayer
from mha_jax.kernels import Kernel, fused
from mha_jax.masks import Mask
from mha_jax.padding import find_padding, finite_inputs, zero_padding
from mha_jax.projections import project_output, project_qkv
from mha_jax.scores import Scores
from mha_jax.stages import apply_dropout
from mha_jax.weights import linear, project_with
from mha_spec import AttentionSpec, InputError, InputTypeError
from mha_spec.attention import check_spec, spec_from
from mha_spec.record import Record

for _name in mha_spec.__all__:
    _kind = getattr(mha_spec, _name)
    if isinstance(_kind, type) and issubclass(_kind, Record):
        jax.tree_util.register_static(_kind)  # lets jitted functions accept it

# ---- Functions -----------------------------------------------------------------------------------


@with_one_batch_axis
def attention_layer(
    layer: "AttentionLayer | FunctionalLayer",
    query: Array,
    key: Array | None,
    value: Array | None,
    mask: Mask,
    *,
    bias: Array | None,
    need_weights: bool,
    positions: Array | None,
) -> tuple[Array, Array | None]:
    """Return a layer's output and attention weights (or None): check, project, attend, project."""
    spec = layer.spec
    check_kernel(layer.kernel)
    check_layer_inputs(query, key, value, positions, spec)
    key = query if key is None else key
    value = key if value is None else value
    scores = layer.scores(bias)
    mask = mask.within(spec)
    scores_shape = (query.shape[0], spec.num_heads, query.shape[1], key.shape[-2])
    mask.check(scores_shape)
    scores.check_arguments(scores_shape, query)
    is_padding = None
    if mask.key_padding_lengths is not None:
        # Where tokens are divided, the kernel finds the padding of the local ones.
        find = getattr(layer.kernel, "find_padding", find_padding)
        mask, is_padding = find(mask, query.shape[0], key.shape[-2])

    if is_padding is not None and not spec.shared_kv:
        query, key, value = finite_inputs(query, key, value, is_padding)
    q, k, v = project_qkv(layer.project, query, key, value, spec, positions)
    if is_padding is not None:
        k = zero_padding(k, is_padding)
        v = zero_padding(v, is_padding)
    mask = mask.as_arrays()
    if need_weights:
        context, attn_weights = stages.attend(q, k, v, mask, scores)
    else:
        context = layer.kernel(q, k, v, mask, scores)
        attn_weights = None
    return project_output(layer.project, context, query, spec), attn_weights


@dataclass(frozen=True, eq=False)
class FunctionalLayer:
    """Functional counterpart of `AttentionLayer`, with weights from outside."""

    weights: Mapping[str, Any]
    spec: AttentionSpec
    kernel: Kernel = fused.attend
    training: bool = False
    dropout_keep: Bool[Array, "*#scores"] | None = None
    dropout_rng: jax.Array | None = None

    def project(self, name: str, x: Float[Array, "B T d_in"]) -> Float[Array, "B T d_out"]:
        """Apply the projection or norm `name`."""
        return project_with(self.weights, self.spec)(name, x)

    def scores(self, bias: Float[Array, "*#scores"] | None) -> Scores:
        """Return the scores of a call: bias, learned weights, and dropout in training."""
        learned = {name: array_of(self.weights[name]) for name in self.spec.score_shapes}
        dropout = self.spec.dropout if self.training else 0.0
        return Scores(self.spec, bias, learned, dropout, self.dropout_keep, self.dropout_rng)


# ---- Modules -------------------------------------------------------------------------------------


class Projection(nnx.Linear):
    """Linear layer that accumulates in at least float32. Xavier-uniform weights, separately for
    each part; biases 0.
    """

    def __init__(
        self,
        d_in: int,
        widths: tuple[int, ...],
        *,
        use_bias: bool,
        dtype: jnp.dtype | None = None,
        param_dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ) -> None:
        xavier = nnx.initializers.xavier_uniform()

        def kernel_init(rng: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
            part_rngs = jax.random.split(rng, len(widths))
            parts = [
                xavier(part, (shape[0], width), dtype)
                for part, width in zip(part_rngs, widths, strict=True)
            ]
            return jnp.concatenate(parts, axis=1)

        super().__init__(
            d_in,
            sum(widths),
            use_bias=use_bias,
            kernel_init=kernel_init,
            dtype=dtype,
            param_dtype=param_dtype,
            rngs=rngs,
        )

    def __call__(
        self, inputs: Float[Array, "B T d_in"], out_sharding: Any = None
    ) -> Float[Array, "B T d_out"]:
        """Return x @ kernel + bias, in `dtype`; default: the dtype of x."""
        del out_sharding  # argument of nnx.Linear; here the sharding follows from the inputs
        bias = None if self.bias is None else self.bias[...]
        inputs, kernel, bias = cast((inputs, self.kernel[...], bias), self.dtype)
        return linear(inputs, kernel, bias)


class AttentionLayer(nnx.Module):
    """Base class of attention modules: their specification, projections and norms.

    Args:
        spec: specification of the layer; or d_model instead.
        num_heads: number of query heads, with d_model.
        dtype: floating-point dtype that inputs and weights are cast to; default: their own, which
            must agree.
        param_dtype: dtype of the weights.
        rngs: random streams: `params` for weights and, in training, `dropout`.
        fields: other fields of `AttentionSpec` by name, with d_model.

    Attributes:
        spec: the layer.
        dtype: dtype that inputs and weights are cast to, or None.
        kernel: computes the context, unless need_weights is set; can be replaced.

    Raises:
        TypeError: if spec is neither an `AttentionSpec` nor an integer, a field is unknown, or a
            dtype not floating point.
        ValueError: if fields accompany a spec or do not fit, or the keys of self-attention have a
            different width.
    """

    # The specification decides which of these a layer has: `projections` and `norms`. Weights that
    # change scores are parameters by the names of `score_shapes`.
    q_proj: Projection
    k_proj: Projection
    v_proj: Projection
    qkv_proj: Projection
    q_a_proj: Projection
    q_b_proj: Projection
    kv_a_proj: Projection
    kv_b_proj: Projection
    gate_proj: Projection
    out_proj: Projection
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
        dtype: jnp.dtype | None = None,
        param_dtype: jnp.dtype = jnp.float32,
        rngs: nnx.Rngs,
        **fields: Any,
    ) -> None:
        spec = spec_from(spec, num_heads, fields)
        check_spec(spec, is_self_attention=self._is_self_attention)
        if dtype is not None:
            dtype = jnp.dtype(dtype)
        dtypes: Any = {"dtype": dtype, "param_dtype": param_dtype}
        for name, option in dtypes.items():
            if option is not None and not jnp.issubdtype(jnp.dtype(option), jnp.floating):
                raise InputTypeError(name, "be floating point", {name: jnp.dtype(option)})
        _check_streams(rngs, spec)
        self.spec = spec
        self.dtype = dtype
        self.kernel: Kernel = fused.attend
        for name, projection in spec.projections.items():
            linear = Projection(
                projection.d_in,
                projection.widths,
                use_bias=projection.has_bias,
                **dtypes,
                rngs=rngs,
            )
            setattr(self, name, linear)
        for name, norm in spec.norms.items():
            setattr(self, name, NormLayer(norm, spec.norm_shapes(name), **dtypes))

        for name, shape in spec.score_shapes.items():
            setattr(self, name, nnx.Param(jnp.zeros(shape, param_dtype)))
        self.deterministic = False  # set by `train()` and `eval()` of nnx
        if spec.dropout or spec.output_dropout:
            self.dropout_rngs = rngs["dropout"].fork()
        else:
            self.dropout_rngs = None

    def __repr__(self) -> str:
        if self.dtype is None:
            dtype = ""
        else:
            dtype = f", dtype={self.dtype}"
        return f"{type(self).__name__}({self.spec!r}{dtype})"

    def project(self, name: str, x: Float[Array, "B T d_in"]) -> Float[Array, "B T d_out"]:
        """Call the projection or norm `name` as a module, so that replaced layers (LoRA, quantized)
        are used.
        """
        if name in self.spec.norms:
            norm: NormLayer = getattr(self, name)
            return cast(norm(x), self.dtype)
        projection: Projection = getattr(self, name)
        kernel: Any = getattr(projection, "kernel", None)
        if isinstance(kernel, nnx.Param):  # a replaced projection may store its weights elsewhere
            # JAX would promote mixed dtypes without an error. A layer with a dtype casts its
            # kernel.
            if self.dtype is None:
                dtype = kernel.dtype
            else:
                dtype = x.dtype
            if (x.shape[-1], x.dtype) != (kernel.shape[0], dtype):
                expected: Any = jax.ShapeDtypeStruct(kernel.shape, dtype)
                check_projected(name, x, expected)
        return cast(projection(x), self.dtype)

    def scores(self, bias: Float[Array, "*#scores"] | None) -> Scores:
        """Return the scores of a call: bias, learned weights, and dropout in training."""
        learned = {
            name: cast(getattr(self, name)[...], self.dtype) for name in self.spec.score_shapes
        }
        dropout = 0.0 if self.deterministic else self.spec.dropout
        dropout_rng = self.dropout_rng(self.spec.dropout)
        return Scores(self.spec, bias, learned, dropout, dropout_rng=dropout_rng)

    def dropout_rng(self, rate: float) -> jax.Array | None:
        """Return a new random key if dropout applies: in training, at a rate above 0."""
        if rate and not self.deterministic and self.dropout_rngs is not None:
            return self.dropout_rngs()
        return None

    def drop_output(self, output: Float[Array, "B T E"]) -> Float[Array, "B T E"]:
        """Apply output dropout, in training and at a rate above 0."""
        rng = self.dropout_rng(self.spec.output_dropout)
        if rng is None:
            return output
        return apply_dropout(output, self.spec.output_dropout, rng=rng)


def _check_streams(rngs: nnx.Rngs, spec: AttentionSpec) -> None:
    """Reject random streams without the ones that the layer draws from. A default stream serves as
    any.
    """
    if not isinstance(rngs, nnx.Rngs):
        raise InputTypeError("rngs", "be nnx.Rngs", type(rngs).__name__, hint="nnx.Rngs(0)")
    names = ["params"]
    if spec.dropout or spec.output_dropout:
        names.append("dropout")
    for name in names:
        if name not in rngs and "default" not in rngs:
            rule = f"have the stream {name!r}"
            raise InputError(
                "rngs",
                rule,
                streams=list(rngs),
                hint="nnx.Rngs(params=0, dropout=1) has both streams",
            )


class MultiHeadAttention(AttentionLayer):
    """Multi-head attention of queries over keys and values.

    A call returns a pair: the output, and the attention weights or None. `MultiHeadSelfAttention`
    returns only the output, for sequences of modules. Sizes are fields of the specification:
    `layer.spec.num_heads`. Constructor arguments: see `AttentionLayer`.
    """

    @checked
    def __call__(
        self,
        query: Float[Array, "*B T d_in"],
        key: Float[Array, "*B S d_kv"] | Float[Array, "*B K S H"] | None = None,
        value: Float[Array, "*B S d_kv"] | Float[Array, "*B K S Hv"] | None = None,
        *,
        bias: Float[Array, "*#scores"] | None = None,
        need_weights: bool = False,
        positions: Int[Array, "*axes T"] | None = None,
        mask: Bool[Array, "*#scores"] | None = None,
        is_causal: bool = False,
        key_padding_lengths: Int[Array, "*B"] | Sequence[int] | None = None,
        segment_ids: Int[Array, "*B T"]
        | tuple[Int[Array, "*B T"], Int[Array, "*B S"]]
        | None = None,
    ) -> tuple[Float[Array, "*B T E"], Float[Array, "*B N T S"] | None]:
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
            ValueError: if the shapes do not fit, or a known length lies outside 0..S.
        """
        query, key, value, bias = cast((query, key, value, bias), self.dtype)
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
    def __call__(
        self,
        x: Float[Array, "*B T d_in"],
        *,
        bias: Float[Array, "*#scores"] | None = None,
        positions: Int[Array, "*axes T"] | None = None,
        mask: Bool[Array, "*#scores"] | None = None,
        is_causal: bool = False,
        key_padding_lengths: Int[Array, "*B"] | Sequence[int] | None = None,
        segment_ids: Int[Array, "*B T"]
        | tuple[Int[Array, "*B T"], Int[Array, "*B S"]]
        | None = None,
    ) -> Float[Array, "*B T E"]:
        """Attend from each token to the tokens of its own sequence.

        Errors and other arguments are as in `MultiHeadAttention`, with x as query, key and
        value.

        Args:
            x: (B, T, d_in).

        Returns:
            Output (B, T, E). At padded positions, it is the attention of the padding over the real
            tokens.
        """
        x, bias = cast((x, bias), self.dtype)
        full_mask = Mask(mask, is_causal, key_padding_lengths, segment_ids)
        output, _ = attention_layer(
            self, x, None, None, full_mask, bias=bias, need_weights=False, positions=positions
        )
        return self.drop_output(output)

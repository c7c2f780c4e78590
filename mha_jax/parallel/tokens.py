"""Context parallelism: attention over tokens that are divided among devices.

With enough key/value heads, devices exchange tokens for heads, attend with some heads over all
tokens, and exchange them back: four all-to-alls. Otherwise, or on request, keys and values
circulate: see `ring`.

Source: DeepSpeed Ulysses, arXiv:2309.14509.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Bool

from mha_jax.arrays import Array
from mha_jax.checks import check_lengths
from mha_jax.compiled import compiled
from mha_jax.kernels import Kernel, step_of
from mha_jax.kernels.cpu.blocks import BlockSizes
from mha_jax.kernels.cpu.blockwise import with_relative_bias
from mha_jax.masks import Mask, to_scores_rank
from mha_jax.padding import find_padding, padding_after
from mha_jax.parallel.ring import attend_to_visitors
from mha_jax.scores import Scores
from mha_jax.sharding import (
    head_sharding,
    is_explicit,
    is_manual,
    sharding_on_mesh_of,
    spec_of,
    token_axis,
    varying,
    with_auto_axes,
)
from mha_spec import InputError
from mha_spec.heads import BareHeads


@jax.tree_util.register_static
@dataclass(frozen=True)
class ContextParallel:
    """Kernel for tokens, or cache slots, that are divided along a mesh dimension.

    Attributes:
        axis: mesh dimension; unnecessary if explicit, because types contain it.
        kernel: attends with some heads over all tokens; a ring uses its block sizes, if any.
        passes_keys: use a ring even if all-to-all is possible.
    """

    axis: str | None
    kernel: Kernel
    passes_keys: bool = False

    def __call__(self, query: Array, key: Array, value: Array, mask: Mask, scores: Scores) -> Array:
        """Return the context, sharded like the queries."""
        axis = token_axis(query, key, mask, self.axis)
        if axis is None:
            return self.kernel(query, key, value, mask, scores)
        unsupported = mask.fields_beyond(
            "mask", "is_causal", "key_padding_lengths", "span", "q_offset"
        )
        if unsupported:
            rule = "be None where tokens are divided"
            raise InputError(unsupported[0], rule, {"axis": axis})
        products = scores.spec.relative_products
        if products is not None:
            rule = "be None where tokens are divided"
            raise InputError("relative_products", rule, relative_products=products)
        passes_keys = self.passes_keys or _cannot_share(key, axis)
        attend = with_auto_axes(head_sharding)(
            replace(self, axis=axis, passes_keys=passes_keys)._attend
        )
        return attend(query, key, value, mask, scores)

    def find_padding(
        self, mask: Mask, batch_size: int, seq_len: int
    ) -> tuple[Mask, Bool[Array, "B S"] | None]:
        """Return the mask, and which tokens are padding, as `padding.find_padding` does.

        Lengths are of whole sequences. In a `shard_map` of the user, tokens are local.
        """
        mesh = jax.sharding.get_abstract_mesh()
        is_local = self.axis in mesh.axis_names and is_manual(mesh, self.axis)
        if not is_local or mask.key_padding_lengths is None:
            return find_padding(mask, batch_size, seq_len)
        lengths = mask.key_padding_lengths
        check_lengths("key_padding_lengths", lengths, batch_size, mesh.shape[self.axis] * seq_len)
        first = lax.axis_index(self.axis) * seq_len
        return mask, padding_after(jnp.asarray(lengths, jnp.int32) - first, seq_len)

    def step(self, query: Array, key: Array, value: Array, mask: Mask, scores: Scores) -> Array:
        """Return the context of one new token of each sequence over a cache."""
        if token_axis(query, key, mask, self.axis) is None:
            attend = step_of(self.kernel)
        else:
            attend = self
        return attend(query, key, value, mask, scores)

    def _attend(self, query: Array, key: Array, value: Array, mask: Mask, scores: Scores) -> Array:
        if scores.has_dropout or not query.size:
            return self.kernel(query, key, value, mask, scores)
        scores = replace(with_relative_bias(mask, scores, query, key), dropout_rng=None)
        return _attend_to_tokens(query, key, value, mask, scores, parallel=self)


def _cannot_share(key: Array, axis: str) -> bool:
    """Return whether the heads on a device are no multiple of the devices along `axis`.

    All-to-all needs that. On an automatic mesh types do not contain the sharding; `parallel.shard`
    records the answer.
    """
    if not is_explicit(key):
        return False
    mesh = jax.typeof(key).sharding.mesh
    head_dims = spec_of(key)[1] or ()
    if isinstance(head_dims, str):
        head_dims = (head_dims,)
    num_local = key.shape[1] // math.prod(mesh.shape[name] for name in head_dims)
    return num_local % mesh.shape[axis] != 0


@compiled("parallel")
def _attend_to_tokens(
    query: Array, key: Array, value: Array, mask: Mask, scores: Scores, *, parallel: ContextParallel
) -> Array:
    """Attend over divided tokens, in the dtype of query.

    Args:
        query, key, value: tokens divided along an automatic mesh dimension; or local, if it is
            manual.
        mask, scores: rows are sharded like queries; without a table of a relative bias.
        parallel: kernel with the mesh dimension.
    """
    axis: Any = parallel.axis
    mesh = jax.typeof(query).sharding.mesh
    size = mesh.shape[axis]
    is_cached = mask.q_offset is not None
    is_local = is_manual(mesh, axis)
    mask, scores = _with_changed(mask, scores, lambda x: None if x is None else to_scores_rank(x))
    passes_keys = is_cached or parallel.passes_keys or scores.spec.alibi_slopes is not None
    if key.shape[1] % size == 0 and not passes_keys:
        heads = _Heads(axis, size, query.shape[1], key.shape[1])
        share: Any = _share_heads if is_local else _share_heads_by_constraint
        return share(heads, parallel.kernel, query, key, value, mask, scores)
    if isinstance(parallel.kernel, BlockSizes):
        sizes = parallel.kernel
    else:
        sizes = BlockSizes()
    work = partial(attend_to_visitors, axis, size, sizes)
    if is_local:
        return work(query, key, value, mask, scores)
    tokens = PartitionSpec(None, None, axis)
    replicated = PartitionSpec()

    def divided(x: Array) -> PartitionSpec:
        """Return the partition by query rows, or by columns (cache slots); arrays without this axis
        are replicated.
        """
        if x.ndim != 4:
            return replicated
        if is_cached:
            if x.shape[3] > 1:
                return PartitionSpec(None, None, None, axis)
            return replicated
        if x.shape[2] > 1:
            return tokens
        return replicated

    if is_cached:
        query_partition = replicated
    else:
        query_partition = tokens
    specs = (query_partition, tokens, tokens, *jax.tree.map(divided, (mask, scores)))
    mapped = jax.shard_map(
        work, mesh=mesh, in_specs=specs, out_specs=query_partition, axis_names={axis}
    )
    return mapped(query, key, value, mask, scores)


def _with_changed(mask: Mask, scores: Scores, change: Callable[[Any], Any]) -> tuple[Mask, Scores]:
    """Return mask and scores with their boolean mask and bias changed by a function, which gets
    None for either if there is none.
    """
    return replace(mask, mask=change(mask.mask)), replace(scores, bias=change(scores.bias))


# ---- All-to-all ----------------------------------------------------------------------------------


class _Heads(NamedTuple):
    """Assignment of key/value heads: device i has heads i, n + i, … with their queries.

    Heads that are also divided among other devices thus stay in place. Exchanged arrays are (B, K /
    n, n, G, tokens, ·).
    """

    axis: str
    size: int
    num_heads: int
    num_kv_heads: int

    def split(self, x: Array, at: int = 1) -> Array:
        """Split the axis of heads into three: heads of a device, devices, and heads of a group."""
        heads = (self.num_kv_heads // self.size, self.size, -1)
        return x.reshape(*x.shape[:at], *heads, *x.shape[at + 1 :])

    def local(self, x: Array | None, at: int = 1) -> Array | None:
        """Return the local heads of a replicated array."""
        if x is None or x.shape[at] != self.num_heads or self.num_heads == 1:
            return x
        mine = lax.dynamic_index_in_dim(
            self.split(x, at), lax.axis_index(self.axis), at + 1, keepdims=False
        )
        return mine.reshape(*x.shape[:at], -1, *x.shape[at + 2 :])

    def local_scores(self, scores: Scores) -> Scores:
        """Return scores with the specification and the sinks of local heads."""
        spec = scores.spec
        if not isinstance(spec, BareHeads):
            num_heads = self.num_heads // self.size
            num_kv_heads = self.num_kv_heads // self.size
            spec = replace(spec, num_heads=num_heads, num_kv_heads=num_kv_heads)
        learned = {name: self.local(sinks, 0) for name, sinks in scores.learned.items()}
        return replace(scores, spec=spec, learned=learned)

    def joined(self, x: Array) -> Array:
        """Return (B, heads / n, tokens, ·) from an exchanged array."""
        return x.reshape(x.shape[0], -1, *x.shape[4:])

    def exchange(self, x: Array) -> Array:
        """Exchange local tokens of all heads for all tokens of local heads."""
        return self.joined(
            lax.all_to_all(self.split(x), self.axis, split_axis=2, concat_axis=4, tiled=True)
        )

    def exchange_back(self, x: Array) -> Array:
        """Undo `exchange`."""
        x = x.reshape(x.shape[0], self.num_kv_heads // self.size, 1, -1, *x.shape[2:])
        return self.joined(lax.all_to_all(x, self.axis, split_axis=4, concat_axis=2, tiled=True))

    def constrained(self, x: Array, *, by_heads: bool) -> Array:
        """Exchange split heads, (B, heads of a device, devices, heads of a group, T, ·), by a
        sharding constraint, if XLA partitions the work: by heads it divides the third axis,
        otherwise the tokens.
        """
        free = PartitionSpec.UNCONSTRAINED
        if by_heads:
            spec = (free, free, self.axis, free, None, None)
        else:
            spec = (free, free, None, free, self.axis, None)
        return lax.with_sharding_constraint(x, sharding_on_mesh_of(x, PartitionSpec(*spec)))


def _share_heads(
    heads: _Heads,
    kernel: Kernel,
    query: Array,
    key: Array,
    value: Array,
    mask: Mask,
    scores: Scores,
) -> Array:
    """Exchange tokens for heads in the user's `shard_map`, whose dimensions are all manual."""
    mask, scores = varying((mask, scores), heads.axis)

    def local_part(x: Array | None) -> Array | None:
        """Return the part of a mask or bias for all tokens and local heads."""
        if x is None:
            return None
        has_rows = x.shape[2] == query.shape[2] > 1
        if has_rows and x.shape[1] == heads.num_heads:
            return heads.exchange(x)
        if has_rows:
            x = lax.all_gather(x, heads.axis, axis=2, tiled=True)
        return heads.local(x)

    mask, scores = _with_changed(mask, scores, local_part)
    scores = heads.local_scores(scores)
    q, k, v = (heads.exchange(x) for x in (query, key, value))
    return heads.exchange_back(kernel(q, k, v, mask, scores))


def _share_heads_by_constraint(
    heads: _Heads,
    kernel: Kernel,
    query: Array,
    key: Array,
    value: Array,
    mask: Mask,
    scores: Scores,
) -> Array:
    """Exchange tokens for heads if XLA partitions the work. It would gather manual exchanges along
    other dimensions.
    """
    by_heads = PartitionSpec(None, None, heads.axis)
    replicated = PartitionSpec()

    def exchanged(x: Array) -> Array:
        return heads.constrained(heads.constrained(heads.split(x), by_heads=False), by_heads=True)

    def has_heads_and_rows(x: Array | None) -> bool:
        return x is not None and x.shape[1] == heads.num_heads and x.shape[2] == query.shape[2] > 1

    mask, scores = _with_changed(
        mask, scores, lambda x: exchanged(x) if has_heads_and_rows(x) else x
    )

    def local_part(x: Array | None) -> Array | None:
        # Six axes if it was exchanged.
        if x is not None and x.ndim == 6:
            return heads.joined(x)
        return heads.local(x)

    def attend_locally(query: Array, key: Array, value: Array, mask: Mask, scores: Scores) -> Array:
        mask, scores = varying((mask, scores), heads.axis)
        mask, scores = _with_changed(mask, scores, local_part)
        scores = heads.local_scores(scores)
        q, k, v = (heads.joined(x) for x in (query, key, value))
        context = kernel(q, k, v, mask, scores)
        return context.reshape(*query.shape[:-1], context.shape[-1])

    specs = jax.tree.map(lambda x: by_heads if x.ndim == 6 else replicated, (mask, scores))
    mapped: Any = jax.shard_map(
        attend_locally,
        mesh=jax.typeof(query).sharding.mesh,
        in_specs=(*(by_heads,) * 3, *specs),
        out_specs=by_heads,
        axis_names={heads.axis},
    )
    context = mapped(*(exchanged(x) for x in (query, key, value)), mask, scores)
    context = heads.constrained(heads.constrained(context, by_heads=True), by_heads=False)
    return context.reshape(*query.shape[:3], value.shape[3])

"""Attention where the tokens of a sequence are divided among devices: context parallelism.

Where the key/value heads can be shared out, devices exchange tokens for heads, each attends with some heads over all
tokens, and they exchange them back: four all-to-alls. Elsewhere, and where the caller asks for it, keys and values go
from device to device: `ring`.

Source: DeepSpeed Ulysses, arXiv:2309.14509.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Array

from mha_jax.compiled import compiled
from mha_jax.kernels import Kernel, step_of
from mha_jax.kernels.blocks import BlockSizes
from mha_jax.kernels.blockwise import with_relative_bias
from mha_jax.masks import Mask, to_scores_rank
from mha_jax.parallel.ring import attend_to_visitors
from mha_jax.parallel.sharding import head_sharding, is_explicit, placed, spec_of, varying, with_auto_axes
from mha_jax.scores import Scores
from mha_spec import Refusal


@jax.tree_util.register_static
@dataclass(frozen=True)
class ContextParallel:
    """Kernel for tokens, or slots of a cache, that are divided along a dimension of a mesh.

    Attributes:
        axis: the dimension; types say it where it is explicit.
        kernel: attends with some of the heads over all tokens; a ring takes its block sizes, if it has any.
        passes_keys: pass keys and values on, also where devices could share the heads instead.
    """

    axis: str | None
    kernel: Kernel
    passes_keys: bool = False

    def __call__(self, query: Array, key: Array, value: Array, mask: Mask, scores: Scores) -> Array:
        """Return the context, divided as the queries are."""
        axis = token_axis(query, key, mask, self.axis)
        if axis is None:
            return self.kernel(query, key, value, mask, scores)
        for name in mask.fields_beyond("mask", "is_causal", "key_padding_lengths", "span", "q_offset"):
            raise Refusal(name, "be None where tokens are divided", {"axis": axis})
        if scores.products is not None:
            rule = "be None where tokens are divided"
            raise Refusal("relative_products", rule, relative_products=scores.products)
        passes_keys = self.passes_keys or _cannot_share(key, axis)
        attend = with_auto_axes(head_sharding)(replace(self, axis=axis, passes_keys=passes_keys)._attend)
        return attend(query, key, value, mask, scores)

    def step(self, query: Array, key: Array, value: Array, mask: Mask, scores: Scores) -> Array:
        """Return the context of one new token of each sequence over a cache."""
        is_whole = token_axis(query, key, mask, self.axis) is None
        return (step_of(self.kernel) if is_whole else self)(query, key, value, mask, scores)

    def _attend(self, query: Array, key: Array, value: Array, mask: Mask, scores: Scores) -> Array:
        if scores.has_dropout or not query.size:
            return self.kernel(query, key, value, mask, scores)
        scores = replace(with_relative_bias(mask, scores, query, key), dropout_rng=None)
        return _attend_to_tokens(query, key, value, mask, scores, how=self)


def token_axis(query: Array, key: Array, mask: Mask, axis: Any = None) -> str | None:
    """Return the dimension of a mesh that the tokens, or the slots of a cache, are divided along; None if none is.

    Raises:
        ValueError: if it is not one of the mesh that queries lie on, it does not divide the tokens evenly, or there are
            several.
    """
    mesh = jax.typeof(query).sharding.mesh
    if is_explicit(query):
        told: Any = spec_of(query)[2] if mask.q_offset is None else spec_of(key)[2]
        axis = told[0] if isinstance(told, tuple) and len(told) == 1 else told
    if axis is None:
        return None
    if axis not in mesh.axis_names:
        raise Refusal(
            "tokens",
            "be divided along one dimension of the mesh that queries lie on",
            {"axis": axis, "mesh.axis_names": mesh.axis_names},
        )
    size = mesh.shape[axis]
    is_manual = mesh.axis_types[mesh.axis_names.index(axis)] == AxisType.Manual
    divided = {"keys": key.shape[2]} | ({} if mask.q_offset is not None else {"queries": query.shape[2]})
    for name, count in divided.items():
        if count % size and not is_manual:
            raise Refusal(name, f"be a multiple of the devices along {axis}", f"{count} and {size}")
    return axis if size > 1 else None


def _cannot_share(key: Array, axis: str) -> bool:
    """Return whether other devices have left each too few heads to share.

    Of an automatic mesh no type says what other devices have: `parallel.shard` does.
    """
    if not is_explicit(key):
        return False
    mesh, over = jax.typeof(key).sharding.mesh, spec_of(key)[1] or ()
    own = key.shape[1] // math.prod(mesh.shape[name] for name in ((over,) if isinstance(over, str) else over))
    return own % mesh.shape[axis] != 0


@compiled("how")
def _attend_to_tokens(
    query: Array, key: Array, value: Array, mask: Mask, scores: Scores, *, how: ContextParallel
) -> Array:
    """Attention of split heads whose tokens are divided, in the dtype of query.

    Args:
        query, key, value: divided by tokens along an automatic dimension of their mesh; or a device's own, where it is
            manual.
        mask, scores: what has rows of queries is divided as they are; there is no table of a relative bias.
        how: the kernel, which knows the dimension.
    """
    axis: Any = how.axis
    mesh = jax.typeof(query).sharding.mesh
    size, is_cached = mesh.shape[axis], mask.q_offset is not None
    is_manual = mesh.axis_types[mesh.axis_names.index(axis)] == AxisType.Manual
    mask, scores = _with(mask, scores, lambda x: None if x is None else to_scores_rank(x))
    if key.shape[1] % size == 0 and not (is_cached or how.passes_keys or scores.slopes):
        heads = _Heads(axis, size, query.shape[1], key.shape[1])
        share: Any = _share_heads if is_manual else _share_heads_by_constraint
        return share(heads, how.kernel, query, key, value, mask, scores)
    sizes = how.kernel if isinstance(how.kernel, BlockSizes) else BlockSizes()
    work = partial(attend_to_visitors, axis, size, sizes)
    if is_manual:
        return work(query, key, value, mask, scores)
    tokens, whole = PartitionSpec(None, None, axis), PartitionSpec()

    def divided(x: Array) -> PartitionSpec:
        """By rows of the queries, or by columns, the slots of a cache; what has no such axis is whole."""
        if x.ndim != 4:
            return whole
        if is_cached:
            return PartitionSpec(None, None, None, axis) if x.shape[3] > 1 else whole
        return tokens if x.shape[2] > 1 else whole

    of_query = whole if is_cached else tokens
    specs = (of_query, tokens, tokens, *jax.tree.map(divided, (mask, scores)))
    mapped = jax.shard_map(work, mesh=mesh, in_specs=specs, out_specs=of_query, axis_names={axis})
    return mapped(query, key, value, mask, scores)


def _with(mask: Mask, scores: Scores, change: Callable[[Any], Any]) -> tuple[Mask, Scores]:
    """Return both with a change of the boolean mask and of the bias, which may be None."""
    return replace(mask, mask=change(mask.mask)), replace(scores, bias=change(scores.bias))


# ---- Heads for tokens ------------------------------------------------------------------------------------------------


class _Heads(NamedTuple):
    """How key/value heads are shared out: device i has heads i, n + i, … with their queries.

    So heads that are divided among other devices, too, stay where they are. Arrays that are exchanged have the axes
    (B, K / n, n, G, tokens, ·).
    """

    axis: str
    size: int
    num_heads: int
    num_kv_heads: int

    def split(self, x: Array, at: int = 1) -> Array:
        """The heads on an axis, on three: those of a device, the devices, and those of a group."""
        heads = (self.num_kv_heads // self.size, self.size, -1)
        return x.reshape(*x.shape[:at], *heads, *x.shape[at + 1 :])

    def own(self, x: Array | None, at: int = 1) -> Array | None:
        """Those of a device, of an array that it has all of."""
        if x is None or x.shape[at] != self.num_heads or self.num_heads == 1:
            return x
        mine = lax.dynamic_index_in_dim(self.split(x, at), lax.axis_index(self.axis), at + 1, keepdims=False)
        return mine.reshape(*x.shape[:at], -1, *x.shape[at + 2 :])

    def joined(self, x: Array) -> Array:
        """(B, heads / n, tokens, ·) of what was exchanged."""
        return x.reshape(x.shape[0], -1, *x.shape[4:])

    def exchange(self, x: Array) -> Array:
        """A device's own tokens of all heads for all tokens of its own heads."""
        return self.joined(lax.all_to_all(self.split(x), self.axis, split_axis=2, concat_axis=4, tiled=True))

    def exchange_back(self, x: Array) -> Array:
        """The way back."""
        x = x.reshape(x.shape[0], self.num_kv_heads // self.size, 1, -1, *x.shape[2:])
        return self.joined(lax.all_to_all(x, self.axis, split_axis=4, concat_axis=2, tiled=True))

    def constrained(self, x: Array, *, by_heads: bool) -> Array:
        """The same where XLA divides the work: it is told where the array is to lie, and makes one of it."""
        free = PartitionSpec.UNCONSTRAINED
        spec = (free, free, self.axis, free, None, None) if by_heads else (free, free, None, free, self.axis, None)
        return lax.with_sharding_constraint(x, placed(x, PartitionSpec(*spec)))


def _share_heads(
    heads: _Heads, kernel: Kernel, query: Array, key: Array, value: Array, mask: Mask, scores: Scores
) -> Array:
    """In the user's own `shard_map`, whose dimensions are all manual."""
    mask, scores = varying((mask, scores), heads.axis)

    def of_scores(x: Array | None) -> Array | None:
        if x is not None and x.shape[1] == heads.num_heads and x.shape[2] == query.shape[2] > 1:
            return heads.exchange(x)
        is_by_rows = x is not None and x.shape[2] == query.shape[2] > 1
        return heads.own(lax.all_gather(x, heads.axis, axis=2, tiled=True) if is_by_rows else x)

    mask, scores = _with(mask, scores, of_scores)
    scores = replace(scores, sinks=heads.own(scores.sinks, 0))
    q, k, v = (heads.exchange(x) for x in (query, key, value))
    return heads.exchange_back(kernel(q, k, v, mask, scores))


def _share_heads_by_constraint(
    heads: _Heads, kernel: Kernel, query: Array, key: Array, value: Array, mask: Mask, scores: Scores
) -> Array:
    """Where XLA divides the work; what is exchanged by hand, it would gather along all other dimensions first."""
    by_heads, whole = PartitionSpec(None, None, heads.axis), PartitionSpec()

    def exchanged(x: Array) -> Array:
        return heads.constrained(heads.constrained(heads.split(x), by_heads=False), by_heads=True)

    def is_by_both(x: Array | None) -> bool:
        return x is not None and x.shape[1] == heads.num_heads and x.shape[2] == query.shape[2] > 1

    mask, scores = _with(mask, scores, lambda x: exchanged(x) if is_by_both(x) else x)

    def own(x: Array | None) -> Array | None:
        return heads.joined(x) if x is not None and x.ndim == 6 else heads.own(x)  # six axes if it was exchanged

    def attend_with_own(query: Array, key: Array, value: Array, mask: Mask, scores: Scores) -> Array:
        mask, scores = varying((mask, scores), heads.axis)
        mask, scores = _with(mask, scores, own)
        scores = replace(scores, sinks=heads.own(scores.sinks, 0))
        q, k, v = (heads.joined(x) for x in (query, key, value))
        context = kernel(q, k, v, mask, scores)
        return context.reshape(*query.shape[:-1], context.shape[-1])

    specs = jax.tree.map(lambda x: by_heads if x.ndim == 6 else whole, (mask, scores))
    mapped: Any = jax.shard_map(
        attend_with_own,
        mesh=jax.typeof(query).sharding.mesh,
        in_specs=(*(by_heads,) * 3, *specs),
        out_specs=by_heads,
        axis_names={heads.axis},
    )
    context = mapped(*(exchanged(x) for x in (query, key, value)), mask, scores)
    context = heads.constrained(heads.constrained(context, by_heads=True), by_heads=False)
    return context.reshape(*query.shape[:3], value.shape[3])

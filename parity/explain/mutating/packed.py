"""Find the rows of queries, keys and values in a packed projection by calling it.

Only calls show whether q, k and v are concatenated or interleaved head by head. So parts of the
projection are set to 0: zero queries and zero keys both make all scores 0, and with zero values
nothing depends on queries and keys.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from parity.explain.conformance.calls import fresh_copies
from parity.explain.conformance.signatures import library_of
from parity.explain.mutating.calls import Call, Function, taken
from parity.explain.mutating.compare import Unfit, is_traced, outputs_in, same
from parity.explain.mutating.held import PACKED_PROJECTION, Arrays, Held, held_in
from parity.measure.core.user_code import user_code

Parts = dict[str, np.ndarray]
"""The indices of `q_proj`, `k_proj` and `v_proj` in a packed projection."""

WEIGHT, BIAS = f"{PACKED_PROJECTION}.weight", f"{PACKED_PROJECTION}.bias"
_found: dict[tuple[Any, ...], tuple[Parts, Any]] = {}
"""Results by module, which is kept alive so that its id stays unique, and by shapes."""


def unpacked(held: Held, parts: Parts) -> Held:
    """Return the projections of a call with the packed one split.

    Args:
        held: projections, one of them packed.
        parts: parts of the packed one, see `parts_of`.
    """
    (kernel, axis), bias = _as_matrix(held), held.arrays.get(BIAS)
    back = np.argsort(np.concatenate([*parts.values()]))
    xp = importlib.import_module("torch" if hasattr(kernel, "detach") else "jax.numpy")
    apart: Arrays = {name: x for name, x in held.arrays.items() if name not in (WEIGHT, BIAS)}
    for name, places in parts.items():
        apart[f"{name}.weight"] = taken(kernel, places, axis)
        if bias is not None:
            apart[f"{name}.bias"] = bias.reshape(-1)[places]

    def run(function: Function, changed: Arrays) -> Any:
        whole = {name: x for name, x in changed.items() if name in held.arrays}
        for leaf, packed, along in (("weight", WEIGHT, axis), ("bias", BIAS, 0)):
            if any(f"{name}.{leaf}" in changed for name in parts):
                given = [changed.get(f"{name}.{leaf}", apart[f"{name}.{leaf}"]) for name in parts]
                joined = taken(xp.concatenate(given, along), back, along)
                whole[packed] = joined.reshape(tuple(held.arrays[packed].shape))
        return held.run(function, whole)

    names = frozenset(f"{name}.weight" for name in parts)
    out_first, in_first = (names, frozenset()) if axis == 0 else (frozenset(), names)
    return Held(apart, held.out_first | out_first, held.in_first | in_first, held.owners, run)


def _as_matrix(held: Held) -> tuple[Any, int]:
    """Return the packed kernel as a matrix, and its axis of q, k and v.

    Raises:
        Unfit: if the axis is ambiguous.
    """
    kernel, bias = held.arrays[WEIGHT], held.arrays.get(BIAS)
    shape = tuple(kernel.shape)
    if len(shape) < 2:
        raise Unfit(f"its packed projection has {len(shape)} axes")
    matrix = kernel.reshape(shape[0], -1)
    rows, columns = matrix.shape
    size = None if bias is None else int(np.prod(bias.shape))
    if len(shape) > 2 or WEIGHT in held.in_first:
        axis = 1
    elif WEIGHT in held.out_first:
        axis = 0
    elif rows == columns:
        raise Unfit(f"its packed projection is square, {shape}")
    else:
        axis = (rows, columns).index(size) if size in (rows, columns) else int(columns > rows)
    return matrix, axis


def parts_of(
    call: Call, function: Function, held: Held, heads: tuple[int | None, int | None]
) -> Parts:
    """Return the indices of q, k and v in the packed projection of a call, cached per module.

    Args:
        call: the call, made on copies.
        function: the attention.
        held: its projections.
        heads: numbers of query heads and of key/value heads, if known.

    Raises:
        Unfit: if the call uses none of the usual orders.
    """
    key = (id(call.owner), heads, *(tuple(x.shape) for x in held.arrays.values()))
    if key in _found:
        return _found[key][0]
    parts = next(
        (parts for parts in candidates(held, heads) if _is_right(call, function, parts)), None
    )
    if parts is None:
        raise Unfit(
            f"the order of q, k and v in its packed projection "
            f"{tuple(held.arrays[WEIGHT].shape)} cannot be detected: "
            "neither concatenated nor head by head"
            + ("" if heads[0] else ", and the number of heads is unknown")
        )
    if call.owner is None or library_of(call.owner) in (
        "torch",
        "nnx",
    ):  # other modules are recreated for every call
        _found[key] = parts, call.owner
    return parts


def candidates(held: Held, heads: tuple[int | None, int | None]) -> Iterator[Parts]:
    """Yield the usual orders: q, k and v concatenated, head by head, or by groups of query
    heads.
    """
    matrix, axis = _as_matrix(held)
    size = matrix.shape[axis]
    num_heads, num_kv_heads = heads
    every = np.arange(size)
    if (
        num_heads
        and num_kv_heads
        and num_heads % num_kv_heads == 0
        and size % (num_heads + 2 * num_kv_heads) == 0
    ):
        head_dim, group = size // (num_heads + 2 * num_kv_heads), num_heads // num_kv_heads
        ends = [num_heads * head_dim, (num_heads + num_kv_heads) * head_dim]
        yield _named(*np.split(every, ends))
        by_group = every.reshape(num_kv_heads, group + 2, head_dim)
        yield _named(
            *(
                each.ravel()
                for each in (by_group[:, :group], by_group[:, group], by_group[:, group + 1])
            )
        )
    elif size % 3 == 0:
        yield _named(*np.split(every, 3))


def _named(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Parts:
    return {"q_proj": q, "k_proj": k, "v_proj": v}


def _is_right(call: Call, function: Function, parts: Parts) -> bool:
    def output(*without: str) -> Any:
        with _quietly(call), user_code("the attention"):
            other = aside(call)
            held = unpacked(held_in(other), parts)
            changed = {
                leaf: x * 0 for leaf, x in held.arrays.items() if leaf.split(".")[0] in without
            }
            return outputs_in(held.run(function, changed))[0]

    try:
        right, without_values = output(), output("v_proj")
        return (
            same(output("q_proj"), output("k_proj"))
            and same(without_values, output("v_proj", "q_proj"))
            and not same(without_values, right)
        )
    except Exception as error:  # copies and such calls may raise anything
        raise Unfit(
            f"its packed projection cannot be examined: {type(error).__name__}: {error}"
        ) from error


@contextmanager
def _quietly(call: Call) -> Iterator[None]:
    """Call without side effects: random states are restored, and nothing is compiled."""
    if call.view.framework == "torch":
        import torch

        with torch.no_grad(), torch.random.fork_rng():
            yield
    else:
        import jax

        with jax.ensure_compile_time_eval():
            yield


def aside(call: Call) -> Call:
    """Return the call with copies of everything; arrays that JAX traces get values."""
    if call.view.framework == "torch":
        return call.copied()
    import jax

    rng, owner = np.random.default_rng(0), call.owner

    def concrete(x: Any) -> Any:
        return _drawn(rng, x) if is_traced(x) else x

    args, kwargs = jax.tree.map(concrete, (call.args, dict(call.kwargs)))
    library = library_of(owner)
    if library == "linen":
        variables = jax.tree.map(concrete, owner.variables)
        rngs = {name: jax.random.key(0) for name in owner.scope.rngs}
        owner = owner.clone(parent=None).bind(
            variables, rngs=rngs, mutable=[n for n in variables if n != "params"]
        )
    else:
        owner = (
            fresh_copies(owner, concrete)() if library == "nnx" else jax.tree.map(concrete, owner)
        )
    return Call(call.view, args, kwargs, owner)


def _drawn(rng: np.random.Generator, x: Any) -> Any:
    """Return values for a traced array: masks are mixed, and lengths are not 0."""
    import jax
    import jax.numpy as jnp

    with jax.ensure_compile_time_eval():
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.split(jax.random.key(0), x.shape)
        if x.dtype == bool:
            return jnp.asarray(np.indices(x.shape).sum(0) % 2 == 0)
        if jnp.issubdtype(x.dtype, jnp.floating):
            return jnp.asarray(rng.standard_normal(x.shape), x.dtype)
        return jnp.ones(x.shape, x.dtype)

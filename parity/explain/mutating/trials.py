"""Find the order of a layer's weights by calling it.

Names and shapes do not always show whether kernels are (out, in) or (in, out), and whether packed
queries, keys and values are concatenated or lie head by head. Calls do: if the queries of a
key/value head's group are 0, nothing depends on the keys of that head; if its values are 0, nothing
depends on the columns of the output projection that multiply them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from parity.explain.conformance.calls import fresh_copies
from parity.explain.conformance.signatures import library_of
from parity.explain.mutating.calls import Call, Function
from parity.explain.mutating.carriers import carrier_of
from parity.explain.mutating.compare import Unfit, is_traced, outputs_in, same
from parity.explain.mutating.weights import Order, Projections, heads_of
from parity.measure.core.user_code import user_code

_tried: dict[tuple[Any, ...], tuple[Order, Any]] = {}
"""Results by module, which is kept alive so that its id stays unique, and by heads and shapes. A
process injects into one callable, so that a function without a module needs no name here.
"""


def with_order_tried(function: Function, candidates: list[Projections]) -> Projections:
    """Return the projections in the order with which the attention computes; cached per module.

    Args:
        function: the attention.
        candidates: the projections of a call, once for each order that fits them.

    Raises:
        Unfit: if it computes with none of them.
    """
    if len(candidates) == 1:
        return candidates[0]
    first = candidates[0]
    call = first.call
    shapes = [tuple(first.carrier.leaves[path].shape) for path in first.named.paths.values()]
    key = (id(call.owner), heads_of(call, first.named), *shapes)
    if key in _tried:
        order, _ = _tried[key]
        return next(each for each in candidates if each.order.is_same(order))
    for candidate in candidates:
        if _is_right(candidate, function):
            # Each call has a new module of the other libraries.
            if call.owner is None or library_of(call.owner) in ("torch", "nnx"):
                _tried[key] = candidate.order, call.owner
            return candidate
    listed = ", ".join(
        f"{role} {shape}" for role, shape in zip(first.named.paths, shapes, strict=True)
    )
    hint = "" if first.order.heads_are_known else ", and the number of heads is unknown"
    raise Unfit(
        f"the order of features in its projections cannot be detected by calling it{hint}: {listed}"
    )


def _is_right(candidate: Projections, function: Function) -> bool:
    """Return whether the attention computes with projections in their order."""

    def output(*zeros: str, first_group_alone: bool) -> Any:
        """Return the output if some projections are 0."""
        with _without_side_effects(candidate.call), user_code("the attention"):
            call = concrete_copy(candidate.call)
            # The names and the order are those of the call that was copied.
            projections = replace(candidate, call=call, carrier=carrier_of(call))
            changed = {}
            for name in projections.order.places:
                # The bias of the output does not depend on values.
                if name.partition(".")[0] in zeros and name != "out_proj.bias":
                    weight = projections[name]
                    kept = _outside_of_first_group(name, weight, projections) * first_group_alone
                    changed[name] = weight * call.array(kept, like=weight)
            return outputs_in(projections.run(function, changed))[0]

    try:
        right = output(first_group_alone=False)
        for first_group_alone in (False, True):
            without_queries = output("q_proj", first_group_alone=first_group_alone)
            without_both = output("q_proj", "k_proj", first_group_alone=first_group_alone)
            # Zeros in either make the same scores 0.
            without_keys = output("k_proj", first_group_alone=first_group_alone)
            if not same(without_queries, without_both) or not same(without_queries, without_keys):
                return False
            without_values = output("v_proj", first_group_alone=first_group_alone)
            without_output = output("v_proj", "out_proj", first_group_alone=first_group_alone)
            if same(without_values, right) or not same(without_values, without_output):
                return False
        return True
    except Exception as error:  # copies and such calls may raise anything
        raise Unfit(
            f"the order of its projections cannot be examined: {type(error).__name__}: {error}"
        ) from error


def _outside_of_first_group(name: str, weight: Any, projections: Projections) -> np.ndarray:
    """Return 0 at the features of the first key/value head or its queries, and 1 elsewhere, in the
    shape of a canonical weight.
    """
    spec = projections.order.spec
    sizes = {
        "q_proj": spec.num_heads // spec.num_kv_heads * spec.head_dim,
        "k_proj": spec.head_dim,
        "v_proj": spec.value_head_dim,
        "out_proj": spec.num_heads // spec.num_kv_heads * spec.value_head_dim,
    }
    projection = name.partition(".")[0]
    outside = np.ones(tuple(weight.shape), np.float32)
    if name == "out_proj.weight":
        outside[:, : sizes[projection]] = 0
    else:
        outside[: sizes[projection]] = 0
    return outside


@contextmanager
def _without_side_effects(call: Call) -> Iterator[None]:
    """Restore random states, and compile nothing."""
    if call.view.framework == "torch":
        import torch

        with torch.no_grad(), torch.random.fork_rng():
            yield
    else:
        import jax

        with jax.ensure_compile_time_eval():
            yield


def concrete_copy(call: Call) -> Call:
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
        mutable = [name for name in variables if name != "params"]
        owner = owner.clone(parent=None).bind(variables, rngs=rngs, mutable=mutable)
    elif library == "nnx":
        owner = fresh_copies(owner, concrete)()
    else:
        owner = jax.tree.map(concrete, owner)
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

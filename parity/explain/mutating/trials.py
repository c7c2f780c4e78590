"""Find the order of a layer's weights by calling it.

Names and shapes do not always show whether kernels are (out, in) or (in, out), and whether packed
queries, keys and values are concatenated or lie head by head. Calls do: if the queries of a
key/value head's group are 0, nothing depends on the keys of that head; if its values are 0, nothing
depends on the columns of the output projection that multiply them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
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
    first = candidates[0]
    if len(candidates) == 1:
        return first
    owner = first.call.owner
    shapes = first.shapes()
    key = (id(owner), heads_of(first.call, first.named), *shapes.values())
    if key in _tried:
        order, _ = _tried[key]
        for candidate in candidates:
            if candidate.order.is_same(order):
                return candidate
    for candidate in candidates:
        if _is_right(candidate, function):
            # Modules of other libraries are new in each call, so an id would identify the wrong
            # one.
            if owner is None or library_of(owner) in ("torch", "nnx"):
                _tried[key] = candidate.order, owner
            return candidate
    listed = [f"{role} {shape}" for role, shape in shapes.items()]
    reason = "the order of features in its projections cannot be detected by calling it"
    if not first.order.heads_are_known:
        reason += ", and the number of heads is unknown"
    raise Unfit(f"{reason}: {', '.join(listed)}")


def _is_right(candidate: Projections, function: Function) -> bool:
    """Return whether the attention computes with projections in their order.

    Raises:
        Unfit: if it cannot be called with copies of its arguments.
    """
    zeros_everywhere = OrderTrial(candidate, function, only_first_group=False)
    zeros_in_first_group = OrderTrial(candidate, function, only_first_group=True)
    try:
        right = zeros_everywhere.output()
        if not zeros_everywhere.shows_attention(right):
            return False
        return zeros_in_first_group.shows_attention(right)
    except Exception as error:  # copies and such calls may raise anything
        raise Unfit(
            f"the order of its projections cannot be examined: {type(error).__name__}: {error}"
        ) from error


@dataclass(frozen=True)
class OrderTrial:
    """Calls of an attention with some of its projections 0.

    Attributes:
        candidate: the projections, in an order that fits their names and shapes.
        function: the attention.
        only_first_group: whether they are 0 only for the first key/value head and its queries.
    """

    candidate: Projections
    function: Function
    only_first_group: bool

    def shows_attention(self, right: Any) -> bool:
        """Return whether the output depends on the projections as the output of attention does.

        Args:
            right: the output without zeros.
        """
        # Zeros in queries, in keys or in both make the same scores 0.
        without_queries = self.output("q_proj")
        if not same(without_queries, self.output("q_proj", "k_proj")):
            return False
        if not same(without_queries, self.output("k_proj")):
            return False
        # The output depends on values, and only by the columns of out_proj that multiply them.
        without_values = self.output("v_proj")
        if same(without_values, right):
            return False
        return same(without_values, self.output("v_proj", "out_proj"))

    def output(self, *zeros: str) -> Any:
        """Return the output with some projections 0."""
        with _without_side_effects(self.candidate.call), user_code("the attention"):
            call = concrete_copy(self.candidate.call)
            # The names and the order come from the call that was copied.
            projections = replace(self.candidate, call=call, carrier=carrier_of(call))
            changed = {}
            for name in projections.order.arrays:
                # The bias of the output does not depend on values.
                if name.partition(".")[0] not in zeros or name == "out_proj.bias":
                    continue
                weight = projections[name]
                factors = np.zeros(tuple(weight.shape), np.float32)
                if self.only_first_group:
                    factors = _outside_of_first_group(name, factors.shape, projections)
                changed[name] = weight * call.array(factors, like=weight)
            return outputs_in(projections.run(self.function, changed))[0]


def _outside_of_first_group(
    name: str, shape: tuple[int, ...], projections: Projections
) -> np.ndarray:
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
    num_features = sizes[name.partition(".")[0]]
    outside = np.ones(shape, np.float32)
    if name == "out_proj.weight":
        outside[:, :num_features] = 0
    else:
        outside[:num_features] = 0
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

    with_values = WithValues()
    args, kwargs = jax.tree.map(with_values, (call.args, dict(call.kwargs)))
    return Call(call.view, args, kwargs, _concrete_owner(call.owner, with_values))


def _concrete_owner(owner: Any, with_values: WithValues) -> Any:
    """Return a copy of a module whose arrays have values; None for none."""
    import jax

    library = library_of(owner)
    if library == "nnx":
        return fresh_copies(owner, with_values)()
    if library != "linen":
        return jax.tree.map(with_values, owner)
    variables = jax.tree.map(with_values, owner.variables)
    rngs = {name: jax.random.key(0) for name in owner.scope.rngs}
    mutable = [name for name in variables if name != "params"]
    return owner.clone(parent=None).bind(variables, rngs=rngs, mutable=mutable)


class WithValues:
    """Gives values to arrays that JAX traces, and returns all else as it is."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def __call__(self, x: Any) -> Any:
        """Return an array with values: masks are mixed, and lengths are not 0."""
        if not is_traced(x):
            return x
        import jax
        import jax.numpy as jnp

        with jax.ensure_compile_time_eval():
            if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
                return jax.random.split(jax.random.key(0), x.shape)
            if x.dtype == bool:
                return jnp.asarray(np.indices(x.shape).sum(0) % 2 == 0)
            if jnp.issubdtype(x.dtype, jnp.floating):
                return jnp.asarray(self.rng.standard_normal(x.shape), x.dtype)
            return jnp.ones(x.shape, x.dtype)

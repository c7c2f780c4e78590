"""A user's callable behind the common call of a `Subject`."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from parity.explain.conformance.calls import fresh_copies
from parity.explain.conformance.functional import WithParams, cast_in_jax
from parity.explain.conformance.subjects import Call, Path

OF_MASKS = {"torch": "torch", "jax": "jax.numpy", "ttnn": "numpy"}
"""Modules of the arrays that masks consist of."""


@dataclass
class UserAttention:
    """A user's callable, which gets its arguments by the names of its parameters.

    Attributes:
        target: the function or module.
        library: library of a module, see `library_of`; empty for a function.
        framework: framework of its arrays.
        roles: names of its parameters, by role.
        is_opaque: whether its parameters are unknown, so that inputs are passed by position.
        num_heads: number of query heads, for a mask (B * N, T, S); None if unknown.
        mask_axes: shape that precedes (T, S) in its masks; None until a call has worked.
        is_batched: whether a layer of Equinox accepts a batch; None until a call has shown it.
    """

    target: Any
    library: str
    framework: str
    roles: Mapping[str, str]
    is_opaque: bool
    num_heads: int | None
    mask_axes: tuple[int, ...] | None = None
    is_batched: bool | None = None

    def on_path(self, path: Path) -> Call:
        """Return the callable in the dtype and mode of the path."""
        return partial(self._attend, self._target_on(path), self._modes_of(path))

    def _target_on(self, path: Path) -> Callable[..., Any]:
        """Return the function or module in the dtype and mode of a path."""
        cast = partial(cast_in_jax, dtype=path.dtype)
        if self.library == "torch":
            import torch

            module = copy.deepcopy(self.target)
            return module.to(getattr(torch, path.dtype)).train(path.train)
        if self.library == "equinox":
            import jax

            return jax.tree.map(cast, self.target)
        if self.library == "nnx":
            fresh_copy = fresh_copies(self.target, cast)

            def call_fresh_copy(*args: Any, **named: Any) -> Any:
                return fresh_copy()(*args, **named)

            return call_fresh_copy
        if isinstance(self.target, WithParams):
            return self.target.in_dtype(path.dtype, self.framework)
        return self.target

    def _modes_of(self, path: Path) -> dict[str, Any]:
        """Return the arguments that select the mode of a path."""
        # Some return attention weights by default. The options of a call come later.
        by_role: dict[str, Any] = {"need_weights": False}
        by_role["training"] = path.train
        by_role["deterministic"] = not path.train
        has_flag = "training" in self.roles or "deterministic" in self.roles
        # If a flag selects the mode, the rate is passed in evaluation also.
        if path.drops or (path.dropout and has_flag):
            by_role["dropout"] = path.dropout
        if path.drops and self.framework == "jax":
            import jax

            by_role["rng"] = jax.random.key(0)
        return {self.roles[role]: value for role, value in by_role.items() if role in self.roles}

    def _attend(
        self,
        function: Callable[..., Any],
        modes: Mapping[str, Any],
        query: Any,
        key: Any,
        value: Any,
        *,
        mask: Any = None,
        **options: Any,
    ) -> tuple[Any, Any]:
        """Return output and attention weights: the call of a `Subject`."""
        if "padding" in options and "padding" not in self.roles:
            options["lengths"] = options.pop("padding")
        arguments = dict(modes)
        for role, option in options.items():
            arguments[self.roles[role]] = option
        inputs = (query, key, value)
        if mask is None:
            return _outputs_in(self._result(function, inputs, arguments))
        return self._attend_with_mask(function, inputs, arguments, mask[0, 0])

    def _attend_with_mask(
        self,
        function: Callable[..., Any],
        inputs: tuple[Any, Any, Any],
        arguments: dict[str, Any],
        mask: Any,
    ) -> tuple[Any, Any]:
        """Call it with a mask (T, S), in the first shape that it accepts.

        Raises:
            Exception: the error for the first shape, if it accepts none.
        """
        broadcast_to = importlib.import_module(OF_MASKS[self.framework]).broadcast_to
        query = inputs[0]
        candidates = self._possible_mask_axes(query.shape[0])
        if self.mask_axes is not None:
            candidates = [self.mask_axes]
        errors: list[Exception] = []
        for axes in candidates:
            try:
                arguments[self.roles["mask"]] = broadcast_to(mask, (*axes, *mask.shape))
                output, attn_weights = _outputs_in(self._result(function, inputs, arguments))
            except Exception as error:  # the next shape may work
                errors.append(error)
                continue
            # A mask of a wrong shape may also broadcast the output.
            if tuple(output.shape)[:-1] == tuple(query.shape)[:-1]:
                self.mask_axes = axes
                return output, attn_weights
        if errors:
            raise errors[0]
        raise ValueError("the mask is not accepted in any shape")

    def _possible_mask_axes(self, batch: int) -> list[tuple[int, ...]]:
        """Return shapes that may precede (T, S) in a mask, the usual ones first."""
        shapes: list[tuple[int, ...]] = [(batch, 1), (), (batch,)]
        if self.library == "equinox":
            shapes = [()]
        if self.num_heads is not None:
            shapes.append((batch * self.num_heads,))
        return shapes

    def _result(
        self,
        function: Callable[..., Any],
        inputs: tuple[Any, Any, Any],
        arguments: Mapping[str, Any],
    ) -> Any:
        """Call it, one sequence at a time if it is a layer of Equinox that accepts no batch."""
        attend = partial(self._call_by_name, function, arguments)
        if self.library != "equinox":
            return attend(*inputs)
        import jax

        if self.is_batched is None:
            try:
                jax.eval_shape(attend, *inputs)
                self.is_batched = True
            except Exception:  # the layer may raise anything
                self.is_batched = False
        if self.is_batched:
            return attend(*inputs)
        return jax.vmap(attend)(*inputs)

    def _call_by_name(
        self,
        function: Callable[..., Any],
        arguments: Mapping[str, Any],
        query: Any,
        key: Any,
        value: Any,
    ) -> Any:
        """Call it with key and value by name, because the second argument is not always the key."""
        if self.is_opaque:
            return function(query, key, value, **arguments)
        by_name: dict[str, Any] = {}
        if "key" in self.roles:
            by_name[self.roles["key"]] = key
        if "value" in self.roles:
            by_name[self.roles["value"]] = value
        return function(query, **by_name, **arguments)


def _outputs_in(result: Any) -> tuple[Any, Any]:
    """Return the output in a result, and attention weights if they are next to it."""
    if not isinstance(result, (tuple, list)):
        return result, None
    output, *others = result
    if others and len(getattr(others[0], "shape", ())) >= 3:
        return output, others[0]
    return output, None

"""Values that a mock board would compute, according to golden functions.

`shadow` stores the values of each tensor, computed by ttnn's golden (torch) functions. It is
independent of attention and serves any TTNN code.

Golden functions do not model the padding of tiles, rounding inside kernels, and writes outside a
tensor. The worst of these pitfalls are checked here (`Shadow._check_filling`) and in
`ttnn_mock.goldens`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
import ttnn

from ttnn_mock.goldens import COLLECTIVES, GOLDENS, TILE, collective, is_collective
from ttnn_mock.hooks import observers, readers

if TYPE_CHECKING:
    import torch

LARGEST_HIDING = -1e4
"""Largest value in a mask of logits that hides a key."""

PARTS_HINT = "ttnn.get_device_tensors returns the part of each chip"


class Shadow:
    """Values of tensors, computed by golden functions, and the operations that ran.

    Each chip of a mesh has its own values. Golden functions compute one chip at a time, except
    collectives such as `ttnn.all_reduce`.

    Values are stored by `tensor_id`, which is never reused, and is the same for a cache and the
    result of its in-place update. They are kept until the block ends or `ttnn.deallocate` is
    called; use a block per iteration in long loops.

    Attributes:
        operations: full names of the operations, in execution order.
    """

    def __init__(self) -> None:
        self.operations: list[str] = []
        self._values: dict[int, list[torch.Tensor]] = {}  # of each chip, in row-major order
        self._hosts: dict[int, ttnn.Tensor] = {}  # moved to a device, and not read yet
        self._filling: dict[int, float] = {}  # padding of a tensor's last tiles, if known

    def __getitem__(self, tensor: ttnn.Tensor) -> torch.Tensor:
        """Return the value of a tensor, in float32.

        Raises:
            KeyError: if the tensor was created outside the shadow.
            ValueError: if the chips of a mesh have different values.
        """
        first, *others = self.parts(tensor)
        for chip, other in enumerate(others, 1):
            if not _are_equal(first, other):
                raise ValueError(
                    "tensor must be the same on all chips to be read as one, got a different "
                    f"value on chip {chip} and shape={tuple(tensor.shape)}; {PARTS_HINT}"
                )
        return first

    def parts(self, tensor: ttnn.Tensor) -> list[torch.Tensor]:
        """Return the value of a tensor on each chip, in float32, in row-major order.

        Raises:
            KeyError: if the tensor was created outside the shadow.
        """
        host = self._hosts.pop(tensor.tensor_id, None)
        if host is not None:
            if self.has(host):
                value = self[host]
            else:
                value = _value_of_host(host)
            self._set(tensor, [value] * _num_chips(tensor))
        if tensor.tensor_id not in self._values:
            raise KeyError(
                f"tensor must have been made while the shadow is on, got one of shape "
                f"{tuple(tensor.shape)}"
            )
        return self._values[tensor.tensor_id]

    def has(self, tensor: ttnn.Tensor) -> bool:
        """Return whether the value of a tensor is known."""
        return tensor.tensor_id in self._values or tensor.tensor_id in self._hosts

    def _set(self, tensor: ttnn.Tensor, values: Sequence[torch.Tensor]) -> None:
        """Store the values of a tensor, one for each chip, rounded to its dtype."""
        # A value that several chips share is rounded once, and stays shared.
        rounded = {id(value): _rounded(value, tensor) for value in values}
        self._values[tensor.tensor_id] = [rounded[id(value)] for value in values]

    def uploaded(
        self, tensor: ttnn.Tensor, array: np.ndarray | list[np.ndarray], pad_value: float
    ) -> None:
        """Record an uploaded array, or one per chip."""
        import torch

        if isinstance(array, list):
            values = [torch.from_numpy(part.copy()) for part in array]
        else:
            values = [torch.from_numpy(array.copy())] * _num_chips(tensor)
        self._hosts.pop(tensor.tensor_id, None)
        self._set(tensor, values)
        self._filling[tensor.tensor_id] = pad_value

    def download(self, tensor: ttnn.Tensor) -> np.ndarray:
        """Return the value of a tensor as a new array."""
        return self[tensor].numpy().copy()

    def taken_apart(self, tensor: ttnn.Tensor, parts: list[ttnn.Tensor]) -> None:
        """Record tensors that are the per-chip parts of another."""
        if not self.has(tensor):
            return
        # A value that all chips share, such as one of the host, may be there once.
        for part, value in zip(parts, self.parts(tensor), strict=False):
            self._values[part.tensor_id] = [value]

    def __call__(
        self, operation: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], result: Any
    ) -> None:
        """Compute the results of an operation; ttnn calls this hook after each."""
        name = operation.python_fully_qualified_name
        self.operations.append(name)
        if name == "ttnn.to_device":
            # Its value is taken from the host when it is first read.
            self._hosts[result.tensor_id] = arguments[0]
        elif name == "ttnn.deallocate":
            self._values.pop(arguments[0].tensor_id, None)
            self._hosts.pop(arguments[0].tensor_id, None)
        elif name == "ttnn.synchronize_device":
            pass
        elif name in ("ttnn.from_torch", "ttnn.as_tensor"):
            self._set(result, _divided(arguments[0].detach().clone(), result))
            self._filling[result.tensor_id] = keywords.get("pad_value") or 0.0
        elif name == "ttnn.to_torch":
            # ttnn has made a tensor of torch without values: they are written into it.
            if keywords.get("mesh_composer"):
                whole = _joined(self.parts(arguments[0]), result)
            else:
                whole = self[arguments[0]]
            result.copy_(whole.reshape(result.shape))
        else:
            self._compute(operation, arguments, keywords, result)

    def _compute(
        self, operation: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], result: Any
    ) -> None:
        """Compute the results of an operation by its golden function, and store them."""
        name = operation.python_fully_qualified_name
        if name == "ttnn.transformer.scaled_dot_product_attention":
            self._check_filling(**keywords)
        tensors: Any = result if isinstance(result, list | tuple) else [result]
        golden_function = operation.golden_function
        num_chips = _num_chips(tensors[0])
        values = self._computed(name, golden_function, arguments, keywords, num_chips)
        for tensor, parts in zip(tensors, values, strict=True):
            for part in parts:
                if tuple(tensor.shape) != tuple(part.shape):
                    raise AssertionError(
                        f"{name} gives {tuple(tensor.shape)}, its golden function "
                        f"{tuple(part.shape)}"
                    )
            self._set(tensor, parts)
        if name == "ttnn.fill_implicit_tile_padding":
            self._filling[tensors[0].tensor_id] = arguments[1]

    def _computed(
        self,
        name: str,
        golden_function: Any,
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
        num_chips: int,
    ) -> list[list[torch.Tensor]]:
        """Return the results of an operation, each with its value on each chip."""
        if num_chips > 1 and name in COLLECTIVES:
            tensor, *others = arguments
            mesh = tuple(tensor.device().shape)
            return [collective(name, self.parts(tensor), mesh, *others, **keywords)]
        function = GOLDENS.get(name, golden_function)
        hint = f"ttnn_mock.golden({name!r}) takes one"
        if function is None:
            raise NotImplementedError(f"{name} has no golden function; {hint}")
        if num_chips > 1 and is_collective(name, function):
            raise NotImplementedError(f"{name} has no golden function among chips; {hint}")

        results_of_chips = []
        # Chips with equal inputs share results.
        results_by_inputs: dict[tuple[int, ...], Sequence[torch.Tensor]] = {}
        for chip in range(num_chips):
            values = self._values_of(arguments, chip)
            named_values = self._values_of(keywords, chip)
            inputs = tuple(id(x) for x in _tensors_in((values, named_values)))
            if inputs not in results_by_inputs:
                result = function(*values, **named_values)
                if not isinstance(result, list | tuple):
                    result = [result]
                results_by_inputs[inputs] = result
            results_of_chips.append(results_by_inputs[inputs])
        return [list(parts) for parts in zip(*results_of_chips, strict=True)]

    def _values_of(self, argument: Any, chip: int) -> Any:
        """Return an argument of an operation with the values of a chip for each tensor in it."""
        if isinstance(argument, dict):
            return {key: self._values_of(x, chip) for key, x in argument.items()}
        if isinstance(argument, list | tuple):
            return type(argument)(self._values_of(x, chip) for x in argument)
        if not isinstance(argument, ttnn.Tensor):
            return argument
        parts = self.parts(argument)
        # A tensor on the host has one value, for all chips.
        if len(parts) == 1:
            return parts[0]
        return parts[chip]

    def _check_filling(self, *, attn_mask: ttnn.Tensor | None = None, **_: Any) -> None:
        """Reject a mask with wrong padding: kernels read it, unlike golden functions
        (tt-metal#54833).
        """
        if attn_mask is None or attn_mask.shape[3] % TILE == 0:
            return
        filling = self._filling.get(attn_mask.tensor_id, 0.0)
        if filling > LARGEST_HIDING:
            raise AssertionError(
                f"the mask's last tiles must hide the keys beyond the last one, got {filling} in "
                f"them and attn_mask.shape={tuple(attn_mask.shape)}"
            )


def _are_equal(first: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two values are equal, also in their NaN."""
    if other is first:
        return True
    is_equal = (other == first) | (other.isnan() & first.isnan())
    return bool(is_equal.all())


def _value_of_host(host: ttnn.Tensor) -> torch.Tensor:
    """Return the value of a tensor on the host, in float32; integers unchanged."""
    import torch

    if host.dtype not in _INTEGERS:
        host = _to_float32(host)
    return torch.from_numpy(np.array(host.to_numpy()))


def _to_float32(host: ttnn.Tensor) -> ttnn.Tensor:
    """Return a tensor on the host in float32, below the hooks, which would note an operation."""
    return ttnn._ttnn.operations.core.to_dtype(host, ttnn.float32)


def _tensors_in(argument: Any) -> Iterator[torch.Tensor]:
    """Return the torch tensors among arguments."""
    if isinstance(argument, dict):
        argument = list(argument.values())
    if isinstance(argument, list | tuple):
        for x in argument:
            yield from _tensors_in(x)
    elif hasattr(argument, "untyped_storage"):
        yield argument


def _num_chips(tensor: Any) -> int:
    """Return the number of chips of a tensor; 1 for one of the host."""
    if isinstance(tensor, ttnn.Tensor) and ttnn.is_tensor_storage_on_device(tensor):
        return tensor.device().get_num_devices()
    return 1


def _divided(value: torch.Tensor, tensor: ttnn.Tensor) -> list[torch.Tensor]:
    """Return each chip's part of a value that a mapper distributed over a mesh, according to the
    tensor.
    """
    parts = [value]
    if _num_chips(tensor) == 1:
        return parts
    topology = tensor.tensor_topology()
    sizes_and_placements = zip(topology.distribution_shape(), topology.placements(), strict=True)
    # Each axis of the mesh divides, or repeats, the parts of the axes before it.
    for size, placement in sizes_and_placements:
        pieces: list[torch.Tensor] = []
        for part in parts:
            if isinstance(placement, ttnn.PlacementShard):
                pieces += part.chunk(size, placement.dim)
            else:
                pieces += [part] * size
        parts = pieces
    return parts


def _joined(parts: list[torch.Tensor], result: torch.Tensor) -> torch.Tensor:
    """Return the composition of the parts of all chips, inferred from the shape of the result."""
    import torch

    shape = tuple(parts[0].shape)
    if len(shape) == result.ndim:
        for axis in range(result.ndim):
            joined_shape = (*shape[:axis], len(parts) * shape[axis], *shape[axis + 1 :])
            if joined_shape == tuple(result.shape):
                return torch.cat(parts, axis)
    raise NotImplementedError(
        f"a mesh_composer must put the parts of all chips side by side on one axis, got "
        f"{tuple(result.shape)} of {len(parts)} parts of {shape}; {PARTS_HINT}"
    )


def value_of(tensor: ttnn.Tensor) -> np.ndarray | None:
    """Return the value of a tensor, on host or device, if an active shadow has it."""
    if _active and _active[-1].has(tensor):
        return _active[-1].download(tensor)
    return None


_INTEGERS = (ttnn.int32, ttnn.uint8, ttnn.uint16, ttnn.uint32)
_active: list[Shadow] = []


@contextmanager
def shadow() -> Iterator[Shadow]:
    """Compute the values that a mock board does not, for a `with` block.

    `ttnn.to_torch`, and a library that asks `ttnn_mock.hooks`, then return these values, so that
    the same code runs with and without hardware. Nested blocks share values.

    Yields:
        Values, by tensor.

    Raises:
        ModuleNotFoundError: if torch, which golden functions use, is not installed.
    """
    if _active:
        yield _active[-1]
        return
    if importlib.util.find_spec("torch") is None:
        raise ModuleNotFoundError(
            "ttnn_mock needs torch for values, ttnn's golden functions being written in it"
        )
    state = Shadow()
    _active.append(state)
    try:
        with observed(state), _taking_apart(state):
            yield state
    finally:
        _active.remove(state)


@contextmanager
def _taking_apart(state: Shadow) -> Iterator[None]:
    """Notify a shadow of tensors that are split by chip, for which ttnn calls no hook."""
    get_device_tensors = ttnn.get_device_tensors

    def get_and_notify(tensor: ttnn.Tensor) -> list[ttnn.Tensor]:
        parts = get_device_tensors(tensor)
        state.taken_apart(tensor, parts)
        return parts

    with patch.object(ttnn, "get_device_tensors", get_and_notify):
        yield


@contextmanager
def observed(state: Any) -> Iterator[None]:
    """Notify a state of uploads (`uploaded`) and operations (`__call__`), and read arrays from it
    (`download`).
    """
    was_fast = ttnn.CONFIG.enable_fast_runtime_mode
    ttnn.CONFIG.enable_fast_runtime_mode = False  # ttnn calls hooks only outside the fast mode
    observers.append(state.uploaded)
    readers.append(state.download)
    try:
        with ttnn.register_post_operation_hook(state), _without_graphs():
            yield
    finally:
        readers.remove(state.download)
        observers.remove(state.uploaded)
        ttnn.CONFIG.enable_fast_runtime_mode = was_fast


@contextmanager
def _without_graphs() -> Iterator[None]:
    """Disable the graphs that ttnn captures for reports outside its fast mode, which take half of
    the time.
    """
    begin, end = ttnn.graph.begin_graph_capture, ttnn.graph.end_graph_capture
    # One entry for each open capture, the innermost last: has it begun?
    has_begun: list[bool] = []

    def begin_if_asked(*arguments: Any, _internal: bool = False) -> None:
        # ttnn's own captures take part only in one that the user has begun.
        is_asked = not _internal or ttnn.graph.is_graph_capture_active()
        has_begun.append(is_asked)
        if is_asked:
            begin(*arguments, _internal=_internal)

    def end_if_begun() -> Any:
        # A capture may also have begun before this block.
        if not has_begun or has_begun.pop():
            return end()
        return []

    with patch.multiple(
        ttnn.graph, begin_graph_capture=begin_if_asked, end_graph_capture=end_if_begun
    ):
        yield


def _rounded(value: torch.Tensor, tensor: ttnn.Tensor) -> torch.Tensor:
    """Return a value rounded to the dtype of a tensor, in float32."""
    import torch

    if not value.is_floating_point():
        # Results of comparisons have the dtype of their operands.
        return value if tensor.dtype in _INTEGERS else value.float()
    if tensor.dtype == ttnn.bfloat16:
        return value.to(torch.bfloat16).float()
    if tensor.dtype in (ttnn.bfloat8_b, ttnn.bfloat4_b):
        # torch has no block formats: ttnn's conversion on the host rounds to them.
        array = np.array(value.float().numpy(), order="C")
        host = ttnn.Tensor(array, tensor.dtype, None, ttnn.TILE_LAYOUT)
        return torch.from_numpy(np.array(_to_float32(host).to_numpy()))
    return value.float()

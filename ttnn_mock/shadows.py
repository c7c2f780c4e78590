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
            if (
                other is not first
                and not ((other == first) | (other.isnan() & first.isnan())).all()
            ):
                raise ValueError(
                    f"tensor must be the same on all chips to be read as one, got a different "
                    f"value on chip {chip} and "
                    f"shape={tuple(tensor.shape)}; {PARTS_HINT}"
                )
        return first

    def parts(self, tensor: ttnn.Tensor) -> list[torch.Tensor]:
        """Return the value of a tensor on each chip, in float32, in row-major order.

        Raises:
            KeyError: if the tensor was created outside the shadow.
        """
        host = self._hosts.pop(tensor.tensor_id, None)
        if host is not None:
            value = self[host] if self.has(host) else _value_of_host(host)
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
        rounded = {id(value): _rounded(value, tensor) for value in values}  # replicated values once
        self._values[tensor.tensor_id] = [rounded[id(value)] for value in values]

    def uploaded(
        self, tensor: ttnn.Tensor, array: np.ndarray | list[np.ndarray], pad_value: float
    ) -> None:
        """Record an uploaded array, or one per chip."""
        import torch

        arrays = array if isinstance(array, list) else [array]
        values = [torch.from_numpy(each.copy()) for each in arrays]
        self._hosts.pop(tensor.tensor_id, None)
        self._set(tensor, values if isinstance(array, list) else values * _num_chips(tensor))
        self._filling[tensor.tensor_id] = pad_value

    def download(self, tensor: ttnn.Tensor) -> np.ndarray:
        """Return the value of a tensor as a new array."""
        return self[tensor].numpy().copy()

    def taken_apart(self, tensor: ttnn.Tensor, parts: list[ttnn.Tensor]) -> None:
        """Record tensors that are the per-chip parts of another."""
        values = self.parts(tensor) if self.has(tensor) else []
        for part, value in zip(parts, values, strict=False):
            self._values[part.tensor_id] = [value]

    def __call__(
        self, operation: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], result: Any
    ) -> None:
        """Compute the results of an operation; ttnn calls this hook after each."""
        name = operation.python_fully_qualified_name
        self.operations.append(name)
        if name == "ttnn.to_device":
            self._hosts[result.tensor_id] = arguments[0]
        if name == "ttnn.deallocate":
            self._values.pop(arguments[0].tensor_id, None)
            self._hosts.pop(arguments[0].tensor_id, None)
        if name in ("ttnn.to_device", "ttnn.deallocate", "ttnn.synchronize_device"):
            return
        if name in ("ttnn.from_torch", "ttnn.as_tensor"):
            self._set(result, _divided(arguments[0].detach().clone(), result))
            self._filling[result.tensor_id] = keywords.get("pad_value") or 0.0
            return
        if name == "ttnn.to_torch":
            whole = (
                _joined(self.parts(arguments[0]), result)
                if keywords.get("mesh_composer")
                else self[arguments[0]]
            )
            result.copy_(whole.reshape(result.shape))
            return
        if name == "ttnn.transformer.scaled_dot_product_attention":
            self._check_filling(**keywords)
        tensors: Any = result if isinstance(result, list | tuple) else [result]
        values = self._computed(
            name, operation.golden_function, arguments, keywords, _num_chips(tensors[0])
        )
        for tensor, value in zip(tensors, values, strict=True):
            for part in value:
                if tuple(tensor.shape) != tuple(part.shape):
                    raise AssertionError(
                        f"{name} gives {tuple(tensor.shape)}, its golden function "
                        f"{tuple(part.shape)}"
                    )
            self._set(tensor, value)
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
            first, *others = arguments
            mesh, parts = tuple(first.device().shape), self.parts(first)
            return [collective(name, parts, mesh, *others, **keywords)]
        function = GOLDENS.get(name, golden_function)
        if function is None or (num_chips > 1 and is_collective(name, function)):
            among = " among chips" if function is not None else ""
            raise NotImplementedError(
                f"{name} has no golden function{among}; ttnn_mock.golden({name!r}) takes one"
            )
        known: dict[
            tuple[int, ...], Sequence[torch.Tensor]
        ] = {}  # chips with equal inputs share results
        each = []
        for chip in range(num_chips):
            given, named = (self._values_of(x, chip) for x in (arguments, keywords))
            key = tuple(id(x) for x in _tensors_in((given, named)))
            if key not in known:
                value = function(*given, **named)
                known[key] = value if isinstance(value, list | tuple) else [value]
            each.append(known[key])
        return [list(parts) for parts in zip(*each, strict=True)]

    def _values_of(self, argument: Any, chip: int) -> Any:
        if isinstance(argument, dict):
            return {key: self._values_of(x, chip) for key, x in argument.items()}
        if isinstance(argument, list | tuple):
            return type(argument)(self._values_of(x, chip) for x in argument)
        if not isinstance(argument, ttnn.Tensor):
            return argument
        parts = self.parts(argument)
        return parts[chip if len(parts) > 1 else 0]

    def _check_filling(self, *, attn_mask: ttnn.Tensor | None = None, **_: Any) -> None:
        """Reject a mask with wrong padding: kernels read it, unlike golden functions
        (tt-metal#54833).
        """
        if attn_mask is not None and attn_mask.shape[3] % TILE:
            filling = self._filling.get(attn_mask.tensor_id, 0.0)
            if filling > -1e4:
                raise AssertionError(
                    f"the mask's last tiles must hide the keys beyond the last one, got "
                    f"{filling} in them "
                    f"and attn_mask.shape={tuple(attn_mask.shape)}"
                )


def _value_of_host(host: ttnn.Tensor) -> torch.Tensor:
    """Return the value of a tensor on the host, in float32; integers unchanged."""
    import torch

    if host.dtype not in _INTEGERS:
        host = ttnn._ttnn.operations.core.to_dtype(host, ttnn.float32)  # below the hooks
    return torch.from_numpy(np.array(host.to_numpy()))


def _tensors_in(argument: Any) -> Iterator[torch.Tensor]:
    """Return the torch tensors among arguments."""
    if isinstance(argument, dict | list | tuple):
        for each in argument.values() if isinstance(argument, dict) else argument:
            yield from _tensors_in(each)
    elif hasattr(argument, "untyped_storage"):
        yield argument


def _num_chips(tensor: Any) -> int:
    """Return the number of chips of a tensor."""
    is_on_device = isinstance(tensor, ttnn.Tensor) and ttnn.is_tensor_storage_on_device(tensor)
    return tensor.device().get_num_devices() if is_on_device else 1


def _divided(value: torch.Tensor, tensor: ttnn.Tensor) -> list[torch.Tensor]:
    """Return each chip's part of a value that a mapper distributed over a mesh, according to the
    tensor.
    """
    parts = [value]
    if _num_chips(tensor) > 1:
        topology = tensor.tensor_topology()
        for count, placement in zip(
            topology.distribution_shape(), topology.placements(), strict=True
        ):
            if isinstance(placement, ttnn.PlacementShard):
                parts = [piece for part in parts for piece in part.chunk(count, placement.dim)]
            else:
                parts = [part for part in parts for _ in range(count)]
    return parts


def _joined(parts: list[torch.Tensor], result: torch.Tensor) -> torch.Tensor:
    """Return the composition of the parts of all chips, inferred from the shape of the result."""
    import torch

    for axis in range(result.ndim):
        if parts[0].ndim == result.ndim and len(parts) * parts[0].shape[axis] == result.shape[axis]:
            whole = torch.cat(parts, axis)
            if whole.shape == result.shape:
                return whole
    raise NotImplementedError(
        f"a mesh_composer must put the parts of all chips side by side on one axis, got "
        f"{tuple(result.shape)} of "
        f"{len(parts)} parts of {tuple(parts[0].shape)}; {PARTS_HINT}"
    )


def value_of(tensor: ttnn.Tensor) -> np.ndarray | None:
    """Return the value of a tensor, on host or device, if an active shadow has it."""
    return _active[-1].download(tensor) if _active and _active[-1].has(tensor) else None


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

    def get_and_tell(tensor: ttnn.Tensor) -> list[ttnn.Tensor]:
        parts = get_device_tensors(tensor)
        state.taken_apart(tensor, parts)
        return parts

    with patch.object(ttnn, "get_device_tensors", get_and_tell):
        yield


@contextmanager
def observed(state: Any) -> Iterator[None]:
    """Notify a state of uploads (`uploaded`) and operations (`__call__`), and read arrays from it
    (`download`).
    """
    fast = ttnn.CONFIG.enable_fast_runtime_mode
    ttnn.CONFIG.enable_fast_runtime_mode = False  # ttnn calls hooks only outside the fast mode
    observers.append(state.uploaded)
    readers.append(state.download)
    try:
        with ttnn.register_post_operation_hook(state), _without_graphs():
            yield
    finally:
        readers.remove(state.download)
        observers.remove(state.uploaded)
        ttnn.CONFIG.enable_fast_runtime_mode = fast


@contextmanager
def _without_graphs() -> Iterator[None]:
    """Disable the graphs that ttnn captures for reports outside its fast mode, which take half of
    the time.
    """
    begin, end = ttnn.graph.begin_graph_capture, ttnn.graph.end_graph_capture
    captured: list[bool] = []

    def begin_if_asked(*arguments: Any, _internal: bool = False) -> None:
        captured.append(not _internal or ttnn.graph.is_graph_capture_active())
        if captured[-1]:
            begin(*arguments, _internal=_internal)

    def end_if_begun() -> Any:
        return end() if not captured or captured.pop() else []

    with patch.multiple(
        ttnn.graph, begin_graph_capture=begin_if_asked, end_graph_capture=end_if_begun
    ):
        yield


def _rounded(value: torch.Tensor, tensor: ttnn.Tensor) -> torch.Tensor:
    """Return a value rounded to the dtype of a tensor, in float32."""
    import torch

    if not value.is_floating_point():  # results of comparisons have the dtype of their operands
        return value if tensor.dtype in _INTEGERS else value.float()
    if tensor.dtype == ttnn.bfloat16:
        return value.to(torch.bfloat16).float()
    if tensor.dtype in (
        ttnn.bfloat8_b,
        ttnn.bfloat4_b,
    ):  # the host's conversion supports block formats
        host = ttnn.Tensor(
            np.array(value.float().numpy(), order="C"), tensor.dtype, None, ttnn.TILE_LAYOUT
        )
        rounded = ttnn._ttnn.operations.core.to_dtype(
            host, ttnn.float32
        ).to_numpy()  # below the hooks
        return torch.from_numpy(np.array(rounded))
    return value.float()

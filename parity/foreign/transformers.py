"""Run one attention layer of a transformers model by its own module."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mha_spec import Refusal
from parity.conversion.layouts import LAYOUTS
from parity.models.specs import ModelLayer


class Ran(NamedTuple):
    """Input (B, T, d_in) and output (B, T, E) of an attention module, float32."""

    given: np.ndarray
    output: np.ndarray


class ModuleCall(NamedTuple):
    """An attention module with its weights, and the arguments that its model calls it with.

    Attributes:
        module: the transformers module.
        args, kwargs: states, angles, mask, and further arguments of the family's modules.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _Done(Exception):
    """Ends a forward pass after the attention module has run."""


class Skeleton:
    """A model without weights, in which one attention layer at a time is loaded, and run as the model runs it."""

    def __init__(self, config: Any, attn_implementation: str = "eager") -> None:
        """Create the model on torch's meta device.

        Args:
            config: transformers configuration, as `AutoConfig.from_pretrained` returns it.
            attn_implementation: attention implementation, as transformers names it.

        Raises:
            ValueError: if transformers does not support such a model.
        """
        from transformers import AutoModel

        try:
            with torch.device("meta"):
                self._model = AutoModel.from_config(config, attn_implementation=attn_implementation).eval()
        except ValueError as error:  # its text lists all supported models
            if "Unrecognized configuration class" not in str(error):
                raise
            raise Refusal("transformers", f"support {type(config).__name__}, but does not") from None

    def run(
        self,
        layer: ModelLayer,
        label: str,
        tensors: Mapping[str, Any],
        x: np.ndarray,
        *,
        keys: np.ndarray | None = None,
        positions: np.ndarray | None = None,
    ) -> Ran:
        """Run a layer's own module.

        Args:
            layer: the layer.
            label: prefix of the names of its weights.
            tensors: its weights by their names in the checkpoint.
            x: (B, T, d_model), output of the previous layer.
            keys: (B, S, d_kv), output of the encoder, for cross-attention.
            positions: (3, B, T), if they are not 0, 1, …

        Returns:
            The input of the module, after any norm before it, and its output.

        Raises:
            RuntimeError: if the model cannot be run in this way.
        """
        root, at = self._find(layer, label)
        attention = self._loaded(root, at, layer, tensors)
        extra = {"position_ids": torch.from_numpy(positions)} if positions is not None else {}
        extra |= {"encoder_hidden_states": torch.from_numpy(keys)} if keys is not None else {}
        got: list[Tensor] = []
        gave: list[Tensor] = []

        def begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            states = args[0] if args else kwargs["hidden_states"]
            got[:] = [states.detach().clone()]

        def stop(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
            gave[:] = [output.detach().clone()]
            raise _Done

        hooks = [
            _part_of(attention, layer, "q").register_forward_pre_hook(begin, with_kwargs=True),
            _part_of(attention, layer, "out").register_forward_hook(stop),
        ]
        try:
            self._forward(root, at, x, extra, lambda: got[0].shape == x.shape)
        finally:
            for hook in hooks:
                hook.remove()
            attention.to("meta")
        return Ran(got[0].numpy(), gave[0].reshape(*x.shape[:-1], -1).numpy())

    def call(self, layer: ModelLayer, label: str, tensors: Mapping[str, Any], x: np.ndarray) -> ModuleCall:
        """Return a layer's own module with the arguments that the model passes, to be called repeatedly.

        Args:
            layer, label, tensors, x: as in `run`.

        Raises:
            RuntimeError: if the model cannot be run in this way.
        """
        root, at = self._find(layer, label)
        attention = self._loaded(root, at, layer, tensors)
        found: list[ModuleCall] = []

        def stop(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            found[:] = [ModuleCall(module, args, kwargs)]
            raise _Done

        hook = attention.register_forward_pre_hook(stop, with_kwargs=True)
        try:
            self._forward(root, at, x, {}, lambda: True)
        finally:
            hook.remove()
        return found[0]

    def _loaded(self, root: nn.Module, at: str, layer: ModelLayer, tensors: Mapping[str, Any]) -> nn.Module:
        """Load the weights of an attention module, allocate the modules that run before it, and return it."""
        attention = root.get_submodule(at)
        self._fill(root, at)
        attention.load_state_dict({each: torch.from_numpy(value) for each, value in tensors.items()}, strict=False)
        for short, path in layer.shared.items():  # held by other modules
            for name, parameter in self._model.named_parameters():
                if short in tensors and f".{name}".endswith(f".{path}") and not parameter.is_meta:
                    parameter.data.copy_(torch.from_numpy(tensors[short]))
        return attention

    def _forward(
        self, root: nn.Module, at: str, x: np.ndarray, extra: Mapping[str, Any], is_right: Callable[[], bool]
    ) -> None:
        """Run a part of the model on embeddings, until a hook ends it; `is_right` must then hold."""
        width = getattr(self._model.get_input_embeddings(), "embedding_dim", x.shape[-1])  # narrower in ALBERT
        given = {"inputs_embeds": torch.from_numpy(x[..., :width].copy()), "use_cache": False, **extra}
        error: Exception | None = None
        for as_tuple in (False, True):  # the type of a layer's output depends on the family
            with _passed_through(root, at, as_tuple=as_tuple), torch.no_grad():
                try:
                    root(**given)
                except _Done:
                    if is_right():
                        return
                except Exception as wrong:
                    error = wrong
        raise RuntimeError(f"transformers must run {at} by itself: {error or 'it was not called'}") from error

    def _find(self, layer: ModelLayer, label: str) -> tuple[nn.Module, str]:
        """Return the smallest part of the model that accepts embeddings and has the layer, and its path there."""
        path = layer.path
        if layer.kv_source is not None:
            raise RuntimeError(f"{path} must run by itself, and attends to keys and values of layer {layer.kv_source}")
        found = [name for name, _ in self._model.named_modules() if layer.is_at(name)]
        if len(found) > 1:  # also in another part of the model
            found = [name for name in found if f".{label}".endswith(f".{name}")] or [
                name for name in found if name.split(".")[0] in label.split(".")
            ]
        if len(found) != 1:
            count = "several" if found else "none"
            raise RuntimeError(f"transformers must have a module {path}, but {type(self._model).__name__} has {count}")
        words = found[0].split(".")
        for count in range(len(words) - 1, -1, -1):
            root = self._model.get_submodule(".".join(words[:count]))
            makes_mask = isinstance(root, PreTrainedModel) or not layer.is_causal  # CLIP's encoder receives one
            if makes_mask and "inputs_embeds" in inspect.signature(root.forward).parameters:
                return root, ".".join(words[count:])
        raise RuntimeError(f"transformers must run {path} on embeddings, but {type(self._model).__name__} accepts none")

    def _fill(self, root: nn.Module, at: str) -> None:
        """Allocate the modules that run before an attention module is done, except word embeddings and other layers."""
        layers, block = _layers_and_block(at)
        embeddings = self._model.get_input_embeddings()
        has_come = False
        for name, module in root.named_modules():
            is_inside = f"{name}.".startswith(f"{at}.")
            is_before = "norm" in type(module).__name__.lower() or is_inside or not has_come
            has_come |= is_inside
            is_needed = is_before if f"{name}.".startswith(f"{block}.") else not f"{name}.".startswith(f"{layers}.")
            own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
            if is_needed and module is not embeddings and any(each.is_meta for each in own):
                module.to_empty(device="cpu", recurse=False)
                self._model._init_weights(module)


def _part_of(attention: nn.Module, layer: ModelLayer, what: str) -> nn.Module:
    """Return the submodule that projects queries or the output, otherwise the attention module.

    A norm may precede the query projection.
    """
    names = [tensor.name for tensor in LAYOUTS[layer.layout].tensors if tensor.holds == what or what == tensor.holds[0]]
    modules = dict(attention.named_modules())
    return next((modules[path] for name in names if (path := name.rpartition(".")[0]) in modules), attention)


def _layers_and_block(at: str) -> tuple[str, str]:
    """Return the path of all layers, and that of the layer that contains an attention module."""
    words = at.split(".")
    number = next(index for index, word in enumerate(words) if word.isdigit())
    return ".".join(words[:number]), ".".join(words[: number + 1])


class _Passes(nn.Module):
    """A layer that returns its input."""

    def __init__(self, layer: nn.Module, *, as_tuple: bool) -> None:
        super().__init__()
        self.as_tuple = as_tuple
        for name in ("attention_type", "layer_type", "is_sliding", "layer_idx"):
            if hasattr(layer, name):
                setattr(self, name, getattr(layer, name))

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor | tuple[Tensor]:
        """Return the input unchanged."""
        return (hidden_states,) if self.as_tuple else hidden_states


@contextmanager
def _passed_through(root: nn.Module, at: str, *, as_tuple: bool) -> Iterator[None]:
    """Replace the layers before that of an attention module by the identity."""
    path, block = _layers_and_block(at)
    layers: Any = root.get_submodule(path)
    before = list(layers[: int(block.rpartition(".")[2])])
    for index, layer in enumerate(before):
        layers[index] = _Passes(layer, as_tuple=as_tuple)
    try:
        yield
    finally:
        for index, layer in enumerate(before):
            layers[index] = layer

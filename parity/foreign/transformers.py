"""One attention layer of a model of transformers, run by its own module."""

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
    """What an attention module got and gave, (B, T, d_in) and (B, T, E), float32."""

    given: np.ndarray
    output: np.ndarray


class ModuleCall(NamedTuple):
    """An attention module that has its weights, and what its model calls it with.

    Attributes:
        module: that of transformers.
        args, kwargs: states, angles, mask and whatever else the family's modules take.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _Done(Exception):
    """What ends a forward pass once the module that it is about has run."""


class Skeleton:
    """A model without weights, of which one attention layer at a time has some, and is run as the model runs it."""

    def __init__(self, config: Any, attn_implementation: str = "eager") -> None:
        """Make it on torch's meta device.

        Args:
            config: of transformers, as `AutoConfig.from_pretrained` gives it.
            attn_implementation: how its modules attend, in the words of transformers.

        Raises:
            ValueError: if transformers has no model of it.
        """
        from transformers import AutoModel

        try:
            with torch.device("meta"):
                self._model = AutoModel.from_config(config, attn_implementation=attn_implementation).eval()
        except ValueError as error:  # which lists all that there are
            if "Unrecognized configuration class" not in str(error):
                raise
            raise Refusal("transformers", f"have a model of {type(config).__name__}, and has none") from None

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
            layer: which.
            label: what the names of its weights begin with.
            tensors: its weights by their names in the checkpoint.
            x: (B, T, d_model), what the layers before it give.
            keys: (B, S, d_kv), what the encoder gives, of a layer that attends to it.
            positions: (3, B, T), where they are not 0, 1, …

        Returns:
            What the module got, which norms before it have changed, and what it gave.

        Raises:
            RuntimeError: if the model cannot be run so.
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
        """A layer's own module, and what the model calls it with, to be run again and again.

        Args:
            layer, label, tensors, x: as `run` takes them.

        Raises:
            RuntimeError: if the model cannot be run so.
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
        """The attention module with its weights, and all that runs before it with memory."""
        attention = root.get_submodule(at)
        self._fill(root, at)
        attention.load_state_dict({each: torch.from_numpy(value) for each, value in tensors.items()}, strict=False)
        for short, path in layer.shared.items():  # which other modules hold
            for name, parameter in self._model.named_parameters():
                if short in tensors and f".{name}".endswith(f".{path}") and not parameter.is_meta:
                    parameter.data.copy_(torch.from_numpy(tensors[short]))
        return attention

    def _forward(
        self, root: nn.Module, at: str, x: np.ndarray, extra: Mapping[str, Any], is_right: Callable[[], bool]
    ) -> None:
        """Run a part of the model on embeddings, up to the hook that ends it and finds that all is right."""
        width = getattr(self._model.get_input_embeddings(), "embedding_dim", x.shape[-1])  # ALBERT's are narrower
        given = {"inputs_embeds": torch.from_numpy(x[..., :width].copy()), "use_cache": False, **extra}
        error: Exception | None = None
        for as_tuple in (False, True):  # what layers give depends on the family
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
        """The part of the model that has a layer and takes embeddings, the smallest one; and the layer's path there."""
        path = layer.path
        if layer.kv_source is not None:
            raise RuntimeError(f"{path} must run by itself, and attends to keys and values of layer {layer.kv_source}")
        found = [name for name, _ in self._model.named_modules() if layer.is_at(name)]
        if len(found) > 1:  # in another part of the model
            found = [name for name in found if f".{label}".endswith(f".{name}")] or [
                name for name in found if name.split(".")[0] in label.split(".")
            ]
        if len(found) != 1:
            count = "several" if found else "none"
            raise RuntimeError(f"transformers must have a module {path}, and {type(self._model).__name__} has {count}")
        words = found[0].split(".")
        for count in range(len(words) - 1, -1, -1):
            root = self._model.get_submodule(".".join(words[:count]))
            makes_mask = isinstance(root, PreTrainedModel) or not layer.is_causal  # CLIP's encoder is given one
            if makes_mask and "inputs_embeds" in inspect.signature(root.forward).parameters:
                return root, ".".join(words[count:])
        raise RuntimeError(f"transformers must run {path} on embeddings, and {type(self._model).__name__} takes none")

    def _fill(self, root: nn.Module, at: str) -> None:
        """Give memory to what runs before an attention module is done: all but embeddings of words and other layers."""
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
    """What projects queries, which norms may come before, or the output; else all of the attention module."""
    names = [tensor.name for tensor in LAYOUTS[layer.layout].tensors if tensor.holds == what or what == tensor.holds[0]]
    modules = dict(attention.named_modules())
    return next((modules[path] for name in names if (path := name.rpartition(".")[0]) in modules), attention)


def _layers_and_block(at: str) -> tuple[str, str]:
    """Where all layers lie, and the one that an attention module is in: its path up to its number, and with it."""
    words = at.split(".")
    number = next(index for index, word in enumerate(words) if word.isdigit())
    return ".".join(words[:number]), ".".join(words[: number + 1])


class _Passes(nn.Module):
    """A layer that gives what it gets."""

    def __init__(self, layer: nn.Module, *, as_tuple: bool) -> None:
        super().__init__()
        self.as_tuple = as_tuple
        for name in ("attention_type", "layer_type", "is_sliding", "layer_idx"):
            if hasattr(layer, name):
                setattr(self, name, getattr(layer, name))

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor | tuple[Tensor]:
        """The same."""
        return (hidden_states,) if self.as_tuple else hidden_states


@contextmanager
def _passed_through(root: nn.Module, at: str, *, as_tuple: bool) -> Iterator[None]:
    """The layers before that of an attention module give what they get."""
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

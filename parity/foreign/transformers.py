"""Attention layers of transformers: the specification and canonical weights of one, and one of a model made to run."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from mha_spec import AttentionSpec
from parity.conversion.layouts import LAYOUTS, to_canonical
from parity.conversion.layouts.detection import DoesNotFit
from parity.core.weights import Weights
from parity.models.specs import ModelLayer, known_parts, specs_of


def from_transformers(
    module: nn.Module, config: Any, layer_idx: int | None = None, *, path: str | None = None
) -> tuple[AttentionSpec, Weights]:
    """The specification and canonical weights of an attention module of transformers, bit for bit.

    Args:
        module: of one layer: `model.model.layers[3].self_attn`.
        config: of the model: its `config`, or the values of one by name.
        layer_idx: which layer it is, from 0; `module.layer_idx` when absent.
        path: where it lies, in models in which several modules of one number fit: `decoder.layers.3.encoder_attn`.

    Returns:
        What it computes, by the configuration alone; and its weights by their canonical names, (out, in).

    Raises:
        TypeError: if the number of the layer is not known.
        ValueError: if the configuration is not understood, has no such layer, or the module holds other weights than
            that layer.
    """
    values: Mapping[str, Any] = config if isinstance(config, Mapping) else config.to_dict()
    index = getattr(module, "layer_idx", None) if layer_idx is None else layer_idx
    if isinstance(index, bool) or not isinstance(index, int):
        raise TypeError(f"layer_idx must be the number of a layer, got layer_idx={index!r}")
    layers = [layer for part in known_parts(values) or [values] for layer in specs_of(part)]
    of_index = [layer for layer in layers if layer.index == index and (path is None or _ends(path, layer))]
    tensors = module.state_dict()
    found: dict[AttentionSpec, Weights] = {}
    refusals = [f"the model has no layer {index}{'' if path is None else f' at {path}'}"] if not of_index else []
    for layer in of_index:
        if layer.spec is None:
            refusals.append(f"layer {index} is {layer.kind}, which is not attention over keys")
            continue
        try:
            found[layer.spec], _ = to_canonical(tensors, LAYOUTS[layer.layout], spec=layer.spec)
        except DoesNotFit as error:
            refusals.append(str(error))
    if len(found) != 1:
        which = "; path=… tells which" if found else ""
        reasons = [str(spec) for spec in found] if found else refusals
        raise ValueError(f"module must be one layer of the model, got {' or '.join(reasons)}{which}")
    return next(iter(found.items()))


def _ends(path: str, layer: ModelLayer) -> bool:
    return bool(layer.path) and f".{path}".endswith(f".{layer.path}")


# ---- One layer of a model, run ---------------------------------------------------------------------------------------


class Ran(NamedTuple):
    """What an attention module got and gave, (B, T, d_in) and (B, T, E), float32."""

    given: np.ndarray
    output: np.ndarray


class _Done(Exception):
    """What ends a forward pass once the module that it is about has run."""


class Skeleton:
    """A model without weights, of which one attention layer at a time has some, and is run as the model runs it."""

    def __init__(self, config: Any) -> None:
        """Make it on torch's meta device.

        Args:
            config: of transformers, as `AutoConfig.from_pretrained` gives it.

        Raises:
            ValueError: if transformers has no model of it.
        """
        from transformers import AutoModel

        with torch.device("meta"):
            self._model = AutoModel.from_config(config, attn_implementation="eager").eval()

    def run(self, layer: ModelLayer, tensors: Mapping[str, Any], x: np.ndarray, positions: np.ndarray | None) -> Ran:
        """Run a layer's own module.

        Args:
            layer: which.
            tensors: its weights by their names in the checkpoint.
            x: (B, T, d_model), what the layers before it give.
            positions: (3, B, T), where they are not 0, 1, …

        Returns:
            What the module got, which norms before it have changed, and what it gave.

        Raises:
            RuntimeError: if the model cannot be run so.
        """
        root, attention = self._find(layer.path)
        block, _, name = layer.path.rpartition(".")
        given = {"position_ids": torch.from_numpy(positions)} if positions is not None else {}
        self._fill(root, root.get_submodule(block), name)
        attention.load_state_dict({each: torch.from_numpy(value) for each, value in tensors.items()}, strict=False)
        found: list[Ran] = []

        def stop(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            bound = inspect.signature(module.forward).bind(*args, **kwargs).arguments
            states, result = bound["hidden_states"], output[0] if isinstance(output, tuple) else output
            if "residual" in bound:  # which BLOOM adds here, and others to what the module gives
                result = result - bound["residual"]
            found.append(Ran(states.detach().numpy().copy(), result.detach().numpy().copy()))
            raise _Done

        hook = attention.register_forward_hook(stop, with_kwargs=True)
        error: Exception | None = None
        try:
            for as_tuple in (False, True):  # what layers give depends on the family
                with _passed_through(root, block, as_tuple=as_tuple), torch.no_grad(), suppress(_Done):
                    try:
                        root(inputs_embeds=torch.from_numpy(x), use_cache=False, **given)
                    except _Done:
                        raise
                    except Exception as wrong:
                        error = wrong
                if found and found[-1].given.shape == x.shape:
                    return found[-1]
        finally:
            hook.remove()
            attention.to("meta")
        raise RuntimeError(f"transformers must run {layer.path} by itself: {error or 'it was not called'}") from error

    def _find(self, path: str) -> tuple[nn.Module, nn.Module]:
        """The model that has a layer at a path, and the layer's attention module."""
        for root in self._model.modules():
            try:
                return root, root.get_submodule(path)
            except AttributeError:
                continue
        raise RuntimeError(f"transformers has no module {path} in {type(self._model).__name__}")

    def _fill(self, root: nn.Module, block: nn.Module, name: str) -> None:
        """Give memory to what runs before the attention of a block is done: all but embeddings and other layers."""
        embeddings = self._model.get_input_embeddings()
        outside = [
            child for child in root.children() if not isinstance(child, nn.ModuleList) and child is not embeddings
        ]
        inside = [child for at, child in block.named_children() if at == name or "norm" in type(child).__name__.lower()]
        for module in (*outside, *inside):
            if any(each.is_meta for each in (*module.parameters(), *module.buffers())):
                module.to_empty(device="cpu")
                for each in module.modules():
                    self._model._init_weights(each)


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
def _passed_through(root: nn.Module, block: str, *, as_tuple: bool) -> Iterator[None]:
    """The layers before a block give what they get."""
    path, _, number = block.rpartition(".")
    layers: Any = root.get_submodule(path)
    before = list(layers[: int(number)])
    for index, layer in enumerate(before):
        layers[index] = _Passes(layer, as_tuple=as_tuple)
    try:
        yield
    finally:
        for index, layer in enumerate(before):
            layers[index] = layer

"""The tensors of a conversion's target: how each is made when it is written, and its sources."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from parity.measure.files import FileTensor
from parity.port.conversion.layers import FileLayer, TensorCache
from parity.port.conversion.layouts.placement import Placement


@dataclass(frozen=True)
class CopiedTensor:
    """A tensor of no layer, which is copied piece by piece.

    Attributes:
        file: the tensors of the source.
        name: its name there.
    """

    file: TensorCache
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Return its shape."""
        return self.file.infos[self.name].shape

    @property
    def dtype(self) -> np.dtype:
        """Return its dtype."""
        return self.file.infos[self.name].dtype

    @property
    def sources(self) -> list[str]:
        """Return the names of its source tensors."""
        return [self.name]

    def make(self) -> FileTensor:
        """Return the tensor, which is read when its values are needed."""
        return self.file.tensor(self.name)


@dataclass(frozen=True)
class LayerTensor:
    """A tensor of one layer, or of a stack of them.

    Attributes:
        layers: the layers; a single one unless they are stacked.
        name: name of the tensor after the prefix.
        placement: locations of the weights of each layer in tensors.
        is_stacked: whether the tensor has an axis of layers.
    """

    layers: list[FileLayer]
    name: str
    placement: Placement
    is_stacked: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """Return its shape."""
        shape = self.placement.shapes[self.name]
        if not self.is_stacked:
            return shape
        axis = self.placement.layout.stack_axis
        return (*shape[:axis], len(self.layers), *shape[axis:])

    @property
    def dtype(self) -> np.dtype:
        """Return its dtype."""
        return self.layers[0].dtype

    @property
    def sources(self) -> list[str]:
        """Return the names of its source tensors."""
        parts = {*self.placement.holders[self.name].parts}
        sources: list[str] = []
        for layer in self.layers:
            holders = layer.placement.holders
            for short, full_name in layer.sources.items():
                if short in holders and parts & {*holders[short].parts}:
                    sources.append(full_name)
        return sources

    def make(self) -> np.ndarray:
        """Return the tensor, made of weights of the source."""
        if not self.is_stacked:
            return self.placement.lay_out(self.name, self.layers[0].read_written)
        stack = np.empty(self.shape, self.dtype)
        entries = np.moveaxis(stack, self.placement.layout.stack_axis, 0)  # a view
        for index, layer in enumerate(self.layers):
            entries[index] = self.placement.lay_out(self.name, layer.read_written)
        return stack


@dataclass(frozen=True)
class SharedTensor:
    """A tensor outside of the layers, which holds a weight that they share; the source has a copy
    in each layer.

    Attributes:
        layer: the layer whose copy it becomes.
        weight: canonical name of the weight.
    """

    layer: FileLayer
    weight: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Return its shape."""
        return self.layer.placement.weights[self.weight]

    @property
    def dtype(self) -> np.dtype:
        """Return its dtype."""
        return self.layer.dtype

    @property
    def sources(self) -> list[str]:
        """Return the names of its source tensors."""
        return [self.layer.sources[str(self.layer.layout.name_of(self.weight))]]

    def make(self) -> np.ndarray:
        """Return the tensor."""
        return self.layer.read(self.weight)


TargetTensor = CopiedTensor | LayerTensor | SharedTensor

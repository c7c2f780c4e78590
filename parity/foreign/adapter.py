"""What the adapters of other libraries' layers share: which layers can be made, and which weights fit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from mha_spec import AttentionSpec, Refusal, WrongType
from parity.conversion.hints import LayerHints
from parity.conversion.layouts import LAYOUTS, from_canonical, to_canonical
from parity.conversion.layouts.canonical import shapes_in
from parity.conversion.layouts.detection import find_spec
from parity.core.arrays import to_numpy_by_name
from parity.core.weights import Weights

HELD = frozenset(
    {
        *("d_model", "num_heads", "num_kv_heads", "head_dim", "d_in", "d_kv", "qkv_bias", "out_bias", "out_proj"),
        *("value_head_dim", "fused_qkv", "dropout"),
    }
)
"""The fields of a specification that other libraries' layers have, as far as their layouts take them. (`fused_qkv` says
how a module of ours holds the same weights.) Whatever else a layer may compute, these do not."""


class Adapter(ABC):
    """One kind of layer of another library: made, filled, read and called.

    Attributes:
        name: of the layer, as its users write it.
        layout: the name of the layout that its weights are in.
        mask_true: what True in its mask does to a key.
    """

    name: str
    layout: str
    mask_true: Literal["hides", "shows"]

    @abstractmethod
    def make(self, spec: AttentionSpec, dtype: str = "float32", **options: Any) -> Any:
        """A layer of that specification, with the library's own initial weights.

        Args:
            spec: the layer.
            dtype: of its weights, and of what it computes.
            options: further keywords of the library's class.

        Raises:
            ValueError: if the library's layer cannot be such a layer.
        """

    @abstractmethod
    def tensors(self, module: Any) -> Mapping[str, Any]:
        """The module's weights by the names of the layout, as arrays of the library."""

    @abstractmethod
    def write(self, module: Any, tensors: Weights) -> Any:
        """Put weights that fit in the place of the module's own; the module, or a new one where it cannot change."""

    @abstractmethod
    def known(self, module: Any) -> dict[str, Any]:
        """What the shapes of the weights may leave open: the heads and `dropout`, by the fields of a specification.

        Raises:
            ValueError: if the module computes what no specification says.
        """

    @abstractmethod
    def call(
        self, module: Any, query: Any, key: Any, value: Any, *, mask: Any = None, train: bool = False
    ) -> tuple[Any, Any]:
        """Call the layer with its library's arrays; one has further options, as its library has.

        Args:
            module: the layer.
            query, key, value: (B, T, d_in), (B, S, d_kv) and (B, S, d_kv).
            mask: (B or 1, N or 1, T, S), where True does what `mask_true` says.
            train: drop out, with a fixed seed in JAX, and in torch with its own random numbers.

        Returns:
            The output, and the attention weights (B, N, T, S) where they were asked for and are given, else None.
        """

    def read(self, module: Any) -> Weights:
        """The module's weights by the names of the layout."""
        return to_numpy_by_name(self.tensors(module))

    def spec_of(self, module: Any) -> AttentionSpec:
        """The specification of a module.

        Raises:
            ValueError: if it holds other weights than those of its layout, or computes what no specification says.
        """
        known = self.known(module)
        dropout = float(known.pop("dropout"))
        shapes = {name: tuple(tensor.shape) for name, tensor in self.tensors(module).items()}
        return replace(find_spec(shapes, LAYOUTS[self.layout], LayerHints(**known)), dropout=dropout)

    def load_into(self, module: Any, weights: Mapping[str, Any]) -> Any:
        """The module with canonical weights, bit for bit; or an error, and the module as it was."""
        tensors = from_canonical(weights, self.spec_of(module), LAYOUTS[self.layout])
        fitting = {name: _shape_and_dtype(tensor) for name, tensor in tensors.items()}
        wanted = {name: _shape_and_dtype(tensor) for name, tensor in self.tensors(module).items()}
        if fitting != wanted:
            name = min(name for name in {*fitting, *wanted} if fitting.get(name) != wanted.get(name))
            raise WrongType(
                name,
                f"have the shape and dtype of the module's, {wanted.get(name, 'none')}",
                str(fitting.get(name, "none")),
            )
        return self.write(module, tensors)

    def weights_of(self, module: Any) -> Weights:
        """The canonical weights of a module, bit for bit."""
        spec = self.spec_of(module)
        weights, _ = to_canonical(
            self.read(module),
            LAYOUTS[self.layout],
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
        )
        return weights

    def check_can_be(self, spec: AttentionSpec) -> None:
        """Refuse a layer that the library's layer cannot be.

        Raises:
            ValueError: naming what it cannot hold or compute.
        """
        shapes_in(LAYOUTS[self.layout], spec)
        others = {name: value for name, value in spec.given().items() if name not in HELD}
        if others:
            raise Refusal(f"the spec of a {self.name}", f"have no {' or '.join(others)}", others)


def _shape_and_dtype(tensor: Any) -> str:
    """As words, the same for the arrays of all libraries."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def refuse_where(computes: Mapping[str, Any], what: str) -> None:
    """Refuse a module that computes what no specification says.

    Args:
        computes: options of the module by name, which must all be None or false.
        what: the name of the layer.

    Raises:
        ValueError: naming the options that are not.
    """
    others = {name: value for name, value in computes.items() if value is not None and value is not False}
    if others:
        raise Refusal(f"a {what}", f"have no {' or '.join(others)}", others)

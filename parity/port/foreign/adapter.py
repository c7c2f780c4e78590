"""Base class of the adapters of other libraries' layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from mha_spec import AttentionSpec, InputError, InputTypeError
from parity.measure.core.arrays import to_numpy_by_name
from parity.measure.core.weights import Weights
from parity.port.conversion.hints import LayerHints
from parity.port.conversion.layouts import LAYOUTS, from_canonical, to_canonical
from parity.port.conversion.layouts.canonical import shapes_in
from parity.port.conversion.layouts.detection import find_spec

SUPPORTED_FIELDS = frozenset(
    (
        "d_model",
        "num_heads",
        "num_kv_heads",
        "head_dim",
        "d_in",
        "d_kv",
        "qkv_bias",
        "out_bias",
        "out_proj",
        "value_head_dim",
        "fused_qkv",
        "dropout",
    )
)
"""Fields of a specification that other libraries' layers support, as far as their layouts allow.
(`fused_qkv` only concerns how our modules store the same weights.) No other field is supported.
"""


class Adapter(ABC):
    """Make, fill, read and call one kind of layer of another library.

    Attributes:
        name: usual name of the layer.
        layout: name of the layout of its weights.
        mask_true: effect of True in its mask on a key.
    """

    name: str
    layout: str
    mask_true: Literal["hides", "shows"]

    @abstractmethod
    def make(self, spec: AttentionSpec, dtype: str = "float32", **options: Any) -> Any:
        """Make a layer of a specification, with the library's own initial weights.

        Args:
            spec: the layer.
            dtype: dtype of its weights and its computation.
            options: further keyword arguments of the library's class.

        Raises:
            ValueError: if the library's layer does not support the specification.
        """

    @abstractmethod
    def tensors(self, module: Any) -> Mapping[str, Any]:
        """Return the module's weights by the names of the layout, as arrays of the library."""

    @abstractmethod
    def write(self, module: Any, tensors: Weights) -> Any:
        """Replace the module's weights by fitting ones.

        Returns:
            The module, or a new one if it is immutable.
        """

    @abstractmethod
    def open_fields(self, module: Any) -> dict[str, Any]:
        """Return fields that the shapes of the weights may leave open: the heads and `dropout`.

        Raises:
            ValueError: if the module computes something that no specification expresses.
        """

    @abstractmethod
    def call(
        self,
        module: Any,
        query: Any,
        key: Any,
        value: Any,
        *,
        mask: Any = None,
        train: bool = False,
    ) -> tuple[Any, Any]:
        """Call the layer with its library's arrays.

        Subclasses accept further options of their library.

        Args:
            module: the layer.
            query, key, value: (B, T, d_in), (B, S, d_kv) and (B, S, d_kv).
            mask: (B or 1, N or 1, T, S); `mask_true` defines the effect of True.
            train: apply dropout, with a fixed seed in JAX, and with torch's global random state.

        Returns:
            The output, and the attention weights (B, N, T, S) if requested and available, otherwise
            None.
        """

    def read(self, module: Any) -> Weights:
        """Return the module's weights by the names of the layout."""
        return to_numpy_by_name(self.tensors(module))

    def spec_of(self, module: Any) -> AttentionSpec:
        """Return the specification of a module.

        Raises:
            ValueError: if it holds weights outside its layout, or computes something that no
                specification expresses.
        """
        fields = self.open_fields(module)
        dropout = float(fields.pop("dropout"))
        shapes = {name: tuple(tensor.shape) for name, tensor in self.tensors(module).items()}
        spec = find_spec(shapes, LAYOUTS[self.layout], LayerHints(**fields))
        return replace(spec, dropout=dropout)

    def load_into(self, module: Any, weights: Mapping[str, Any]) -> Any:
        """Load canonical weights into a module, bit for bit; on error it stays unchanged.

        Returns:
            The module, or a new one if it is immutable.
        """
        tensors = from_canonical(weights, self.spec_of(module), LAYOUTS[self.layout])
        passed = {name: _shape_and_dtype(tensor) for name, tensor in tensors.items()}
        expected = {name: _shape_and_dtype(tensor) for name, tensor in self.tensors(module).items()}
        for name in sorted({*passed, *expected}):
            if passed.get(name) != expected.get(name):
                raise InputTypeError(
                    name,
                    f"have the shape and dtype of the module's, {expected.get(name, 'none')}",
                    str(passed.get(name, "none")),
                )
        return self.write(module, tensors)

    def weights_of(self, module: Any) -> Weights:
        """Return the canonical weights of a module, bit for bit."""
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
        """Reject a specification that the library's layer does not support.

        Raises:
            ValueError: if there are unsupported fields; it names them.
        """
        shapes_in(LAYOUTS[self.layout], spec)
        unsupported = {
            name: value for name, value in spec.given().items() if name not in SUPPORTED_FIELDS
        }
        if unsupported:
            rule = f"have no {' or '.join(unsupported)}"
            raise InputError(f"the spec of a {self.name}", rule, unsupported)


def _shape_and_dtype(tensor: Any) -> str:
    """Describe a tensor in the same way for all libraries."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def reject_options(options: Mapping[str, Any], layer: str) -> None:
    """Reject a module with options that no specification expresses.

    Args:
        options: options of the module by name; all must be None or false.
        layer: name of the layer.

    Raises:
        ValueError: if an option is set; it names the options.
    """
    set_options = {
        name: value for name, value in options.items() if value is not None and value is not False
    }
    if set_options:
        raise InputError(f"a {layer}", f"have no {' or '.join(set_options)}", set_options)

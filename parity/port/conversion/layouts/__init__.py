"""Layouts of attention weights in checkpoints: the name, content and axes of each tensor.

A `Layout` is a declaration, tensor by tensor (`layout`). This package lists many, in `tables`,
`of_transformers` and `of_others`; users describe others in TOML files (`custom`); all are in
`registry`. `detection` finds which form of a layout a file has, and the specification that fits its
shapes; `propose` a table for a file that no layout fits. A `Placement` (`placement`) is a layer in
a layout, and converts in both directions; `losses` says what a layout cannot hold. Begin with
`layout.Tensor`.
"""

from parity.port.conversion.layouts.canonical import from_canonical, to_canonical
from parity.port.conversion.layouts.detection import find_spec
from parity.port.conversion.layouts.layout import Layout, Tensor
from parity.port.conversion.layouts.registry import (
    find_layout,
    register_layout,
    register_packages,
)
from parity.port.conversion.layouts.tables import LAYOUTS

__all__ = [
    "LAYOUTS",
    "Layout",
    "Tensor",
    "find_layout",
    "find_spec",
    "from_canonical",
    "register_layout",
    "register_packages",
    "to_canonical",
]

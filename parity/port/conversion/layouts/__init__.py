"""Layouts of attention weights in checkpoints: the name, content and axes of each tensor."""

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

"""Registry of libraries whose arrays a backend reads: `parity.measure.core` imports no backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

LIBRARIES: dict[str, Callable[[], Any]] = {}
"""Loaders by package. Each imports a module with `to_numpy(x)`, and `arithmetic()` of the arrays'
device.
"""

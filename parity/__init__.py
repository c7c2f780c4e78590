"""Copies attention weights between JAX, PyTorch and TTNN, and proves that they agree or says where
they do not.

Four wings, each of which imports those before it: `measure` computes and compares, `port` carries
weights, `explain` says why a result is wrong, and `use` is what people and CI jobs call. `bugs` has
a page for each kind of bug. `__init__.pyi` lists the public names.
"""

import ast
import importlib
import sys
from functools import partial
from pathlib import Path
from typing import Any

from parity.measure.core.libraries import LIBRARIES


def _modules_of_names() -> dict[str, str]:
    """Return the module of each public name, as `__init__.pyi` lists them."""
    stub = ast.parse(Path(__file__).with_name("__init__.pyi").read_bytes())
    modules = {}
    for statement in stub.body:
        if isinstance(statement, ast.ImportFrom) and statement.module:
            for alias in statement.names:
                modules[alias.name] = statement.module
    return modules


# A public name is written once, in __init__.pyi, and imported when it is first asked for:
# `mha-parity --help`, and every pytest run where this package is installed, import `parity` and
# need nothing of it.
_MODULE_OF = _modules_of_names()
__all__ = sorted(_MODULE_OF)  # pyright: ignore[reportUnsupportedDunderAll]

# NumPy takes no tensors of ttnn: its backend reads them, and is imported for the first one.
LIBRARIES["ttnn"] = partial(importlib.import_module, "parity.measure.backends.tt")


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}", name=name, obj=sys.modules[__name__]
        )
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    # Completion offers the public names, not the modules that this one imports.
    return __all__

"""Commands that only a clone of the repository has: their modules lie in `parity_lab`, which is in
no wheel.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType

FROM_A_CLONE = ("selftest", "bench", "mesh")


def commands_of_a_clone() -> Iterator[tuple[str, ModuleType]]:
    """Import the commands if `parity_lab` is next to `parity`; an editable install does not list
    it.
    """
    if "parity_lab" not in sys.modules:
        spec = PathFinder.find_spec("parity_lab", [str(Path(__file__).parents[3])])
        if spec is None or spec.loader is None:
            return
        sys.modules["parity_lab"] = package = module_from_spec(spec)
        spec.loader.exec_module(package)
    for name in FROM_A_CLONE:
        yield name, importlib.import_module(f"parity_lab.commands.{name}")

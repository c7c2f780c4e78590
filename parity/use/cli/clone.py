"""Commands that only a clone of the repository has: their modules lie in `parity_lab`, which is in
no wheel.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from types import MappingProxyType

FROM_A_CLONE: Mapping[str, str] = MappingProxyType(
    {
        "selftest": "parity_lab.commands.selftest",
        "bench": "parity_lab.commands.bench",
        "mesh": "parity_lab.commands.mesh",
    }
)
"""The module of each command."""


def commands_of_a_clone() -> Mapping[str, str]:
    """Return the modules of these commands, which can then be imported; none in a wheel.

    An editable install does not put `parity_lab` on the path, so this searches next to `parity`.
    """
    if "parity_lab" not in sys.modules:
        spec = PathFinder.find_spec("parity_lab", [str(Path(__file__).parents[3])])
        if spec is None or spec.loader is None:
            return {}
        package = module_from_spec(spec)
        sys.modules["parity_lab"] = package
        spec.loader.exec_module(package)
    return FROM_A_CLONE

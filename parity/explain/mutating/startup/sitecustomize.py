"""Injects a bug as soon as the module with the user's attention is imported.

Until then, nothing of parity is imported: pytest cannot rewrite the assertions of a plugin that is
imported too early.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any


class Finder(importlib.abc.MetaPathFinder):
    """Finds one module with the other finders, and injects the bug after the module has run."""

    def __init__(self, module: str) -> None:
        self.module = module

    def find_spec(
        self, fullname: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec from the other finders, with a loader that injects the bug afterwards."""
        if fullname != self.module:
            return None
        others = [
            finder
            for finder in sys.meta_path
            if finder is not self and hasattr(finder, "find_spec")
        ]
        spec = next(
            (spec for other in others if (spec := other.find_spec(fullname, path, target))), None
        )
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            from parity.explain.mutating.inject import inject

            inject(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _go_on() -> None:
    """Run the `sitecustomize` that this one hides."""
    here = Path(__file__).resolve().parent
    places = [place for place in sys.path if Path(place or ".").resolve() != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", places)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if "MHA_PARITY_MUTATE" in os.environ:
    sys.meta_path.insert(0, Finder(json.loads(os.environ["MHA_PARITY_MUTATE"])["module"]))
_go_on()

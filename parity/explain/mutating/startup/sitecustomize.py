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
from collections.abc import Callable
from functools import partial
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
        spec = self._spec_of_others(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader
        loader.exec_module = partial(_execute_and_inject, loader.exec_module)
        return spec

    def _spec_of_others(
        self, fullname: str, path: Any, target: Any
    ) -> importlib.machinery.ModuleSpec | None:
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                return spec
        return None


def _execute_and_inject(execute: Callable[[Any], None], module: Any) -> None:
    """Run the code of the module, then replace its attention."""
    execute(module)
    from parity.explain.mutating.inject import inject

    inject(module)


def _go_on() -> None:
    """Run the `sitecustomize` that this one hides."""
    own_folder = Path(__file__).resolve().parent
    folders = [folder for folder in sys.path if Path(folder or ".").resolve() != own_folder]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", folders)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if "MHA_PARITY_MUTATE" in os.environ:
    sys.meta_path.insert(0, Finder(json.loads(os.environ["MHA_PARITY_MUTATE"])["module"]))
_go_on()

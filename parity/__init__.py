"""Copies attention weights between JAX, PyTorch and TTNN, and proves that they agree or says where they do not."""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parity.arrays import to_jax, to_numpy, to_torch
    from parity.assertion import assert_parity
    from parity.backends import load_into, spec_of, weights_of
    from parity.caches import load_cache, save_cache
    from parity.compare import Comparison, first_difference
    from parity.conformance import Conformance, examine
    from parity.convert import convert, convert_file, load, save
    from parity.diagnose import Diagnosis, diagnose
    from parity.layouts import LAYOUTS, Layout
    from parity.not_carried import NotCarriedWarning
    from parity.numerics import numerics_lock
    from parity.problem import Problem, make_problem
    from parity.run import Report, run_cases
    from parity.spec import CASES, STAGES, AttentionSpec, Case, random_case
    from parity.verify import verify
    from parity.weights import (
        check_weights,
        load_tensors,
        load_weights,
        random_weights,
        save_tensors,
        save_weights,
        weight_shapes,
    )

__all__ = [
    "CASES",
    "LAYOUTS",
    "STAGES",
    "AttentionSpec",
    "Case",
    "Comparison",
    "Conformance",
    "Diagnosis",
    "Layout",
    "NotCarriedWarning",
    "Problem",
    "Report",
    "assert_parity",
    "check_weights",
    "convert",
    "convert_file",
    "diagnose",
    "examine",
    "first_difference",
    "load",
    "load_cache",
    "load_into",
    "load_tensors",
    "load_weights",
    "make_problem",
    "numerics_lock",
    "random_case",
    "random_weights",
    "run_cases",
    "save",
    "save_cache",
    "save_tensors",
    "save_weights",
    "spec_of",
    "to_jax",
    "to_numpy",
    "to_torch",
    "verify",
    "weight_shapes",
    "weights_of",
]

# The names are imported when they are first asked for: `mha-parity --help`, and every pytest run where this package is
# installed, import `parity` and need nothing of it.
_MODULES = {
    "arrays": ["to_jax", "to_numpy", "to_torch"],
    "assertion": ["assert_parity"],
    "backends": ["load_into", "spec_of", "weights_of"],
    "caches": ["load_cache", "save_cache"],
    "compare": ["Comparison", "first_difference"],
    "conformance": ["Conformance", "examine"],
    "convert": ["convert", "convert_file", "load", "save"],
    "diagnose": ["Diagnosis", "diagnose"],
    "layouts": ["LAYOUTS", "Layout"],
    "not_carried": ["NotCarriedWarning"],
    "numerics": ["numerics_lock"],
    "problem": ["Problem", "make_problem"],
    "run": ["Report", "run_cases"],
    "spec": ["CASES", "STAGES", "AttentionSpec", "Case", "random_case"],
    "verify": ["verify"],
    "weights": [
        "check_weights",
        "load_tensors",
        "load_weights",
        "random_weights",
        "save_tensors",
        "save_weights",
        "weight_shapes",
    ],
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=sys.modules[__name__])
    value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """A package in which `convert` and `verify` stay the functions when the modules of these names are imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _MODULE_OF and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package

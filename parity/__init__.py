"""Copies attention weights between JAX, PyTorch and TTNN, and proves that they agree or says where they do not."""

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mha_spec import Alibi, AttentionSpec, Gate, Latent, Norm, RelativeBias, Rope, Temperature
    from parity.backends.caches import load_cache, save_cache
    from parity.backends.numerics import numerics_lock
    from parity.conformance.answers import Conformance
    from parity.conformance.examine import examine
    from parity.conversion.convert import convert, convert_file, load
    from parity.conversion.differences import WeightsComparison, compare_weights
    from parity.conversion.layouts import LAYOUTS, Layout
    from parity.conversion.not_carried import NotCarriedWarning
    from parity.conversion.verify import verify
    from parity.core.arrays import to_jax, to_numpy, to_torch
    from parity.core.cases import CASES, Case, random_case
    from parity.core.compare import Comparison, first_difference
    from parity.core.problem import Problem, make_problem
    from parity.core.stages import STAGES
    from parity.core.weights import (
        check_weights,
        load_tensors,
        load_weights,
        random_weights,
        save_tensors,
        save_weights,
        weight_shapes,
    )
    from parity.diagnosis.diagnose import Diagnosis, diagnose
    from parity.diagnosis.tap_pairs import TapDifference, judge_taps
    from parity.diagnosis.taps import TapVerdict, judge_tap
    from parity.foreign import from_module, load_into, save, spec_of, weights_of
    from parity.foreign.live import from_transformers
    from parity.models.specs import ModelLayer, specs_of
    from parity.running.models import run_model
    from parity.running.report import Report
    from parity.running.run import run_cases
    from parity.sharding.shard import ShardPlan, shard, unshard
    from parity.tapping import tap
    from parity.tapping.record import Tapped, load_tap
    from parity.testing.assertion import ConventionWarning, assert_parity

__all__ = [
    "CASES",
    "LAYOUTS",
    "STAGES",
    "Alibi",
    "AttentionSpec",
    "Case",
    "Comparison",
    "Conformance",
    "ConventionWarning",
    "Diagnosis",
    "Gate",
    "Latent",
    "Layout",
    "ModelLayer",
    "Norm",
    "NotCarriedWarning",
    "Problem",
    "RelativeBias",
    "Report",
    "Rope",
    "ShardPlan",
    "TapDifference",
    "TapVerdict",
    "Tapped",
    "Temperature",
    "WeightsComparison",
    "assert_parity",
    "check_weights",
    "compare_weights",
    "convert",
    "convert_file",
    "diagnose",
    "examine",
    "first_difference",
    "from_module",
    "from_transformers",
    "judge_tap",
    "judge_taps",
    "load",
    "load_cache",
    "load_into",
    "load_tap",
    "load_tensors",
    "load_weights",
    "make_problem",
    "numerics_lock",
    "random_case",
    "random_weights",
    "run_cases",
    "run_model",
    "save",
    "save_cache",
    "save_tensors",
    "save_weights",
    "shard",
    "spec_of",
    "specs_of",
    "tap",
    "to_jax",
    "to_numpy",
    "to_torch",
    "unshard",
    "verify",
    "weight_shapes",
    "weights_of",
]

# The names are imported when they are first asked for: `mha-parity --help`, and every pytest run where this package is
# installed, import `parity` and need nothing of it.
_MODULES = {
    "mha_spec": ["Alibi", "AttentionSpec", "Gate", "Latent", "Norm", "RelativeBias", "Rope", "Temperature"],
    "parity.core.arrays": ["to_jax", "to_numpy", "to_torch"],
    "parity.testing.assertion": ["ConventionWarning", "assert_parity"],
    "parity.backends.caches": ["load_cache", "save_cache"],
    "parity.core.compare": ["Comparison", "first_difference"],
    "parity.conformance.answers": ["Conformance"],
    "parity.conformance.examine": ["examine"],
    "parity.conversion.convert": ["convert", "convert_file", "load"],
    "parity.conversion.differences": ["WeightsComparison", "compare_weights"],
    "parity.diagnosis.diagnose": ["Diagnosis", "diagnose"],
    "parity.diagnosis.tap_pairs": ["TapDifference", "judge_taps"],
    "parity.diagnosis.taps": ["TapVerdict", "judge_tap"],
    "parity.foreign": ["from_module", "load_into", "save", "spec_of", "weights_of"],
    "parity.foreign.live": ["from_transformers"],
    "parity.conversion.layouts": ["LAYOUTS", "Layout"],
    "parity.conversion.not_carried": ["NotCarriedWarning"],
    "parity.models.specs": ["ModelLayer", "specs_of"],
    "parity.backends.numerics": ["numerics_lock"],
    "parity.core.problem": ["Problem", "make_problem"],
    "parity.running.report": ["Report"],
    "parity.running.models": ["run_model"],
    "parity.running.run": ["run_cases"],
    "parity.sharding.shard": ["ShardPlan", "shard", "unshard"],
    "parity.tapping": ["tap"],
    "parity.tapping.record": ["Tapped", "load_tap"],
    "parity.core.cases": ["CASES", "Case", "random_case"],
    "parity.core.stages": ["STAGES"],
    "parity.conversion.verify": ["verify"],
    "parity.core.weights": [
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
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

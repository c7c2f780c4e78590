"""Public names and the modules that define them, for type checkers, editors, and `__init__.py`,
which reads them.
"""

# What a layer computes; records of other features are in mha_spec
from mha_spec import AttentionSpec as AttentionSpec, Rope as Rope

# Cases, weights and arrays
from parity.measure.core.arrays import to_jax as to_jax, to_numpy as to_numpy, to_torch as to_torch
from parity.measure.core.case import Case as Case
from parity.measure.core.cases import CASES as CASES
from parity.measure.core.problem import make_problem as make_problem
from parity.measure.core.quantization import CacheQuantization as CacheQuantization
from parity.measure.core.weights import random_weights as random_weights
from parity.measure.backends.caches import load_cache as load_cache, save_cache as save_cache
from parity.measure.backends.numerics import numerics_lock as numerics_lock

# Comparing
from parity.use.running.run import run_cases as run_cases
from parity.use.testing.assertion import (
    ConventionWarning as ConventionWarning,
    assert_parity as assert_parity,
)
from parity.use.testing.operations import assert_operations as assert_operations
from parity.use.testing.pcc import assert_with_pcc as assert_with_pcc

# Explaining a difference
from parity.explain.diagnosis.attention import attention_of as attention_of
from parity.explain.diagnosis.own_bugs import register_bug as register_bug
from parity.explain.diagnosis.diagnose import (
    Diagnosis as Diagnosis,
    diagnose as diagnose,
    observe as observe,
)
from parity.explain.diagnosis.ranks import diagnose_ranks as diagnose_ranks
from parity.explain.diagnosis.weights.diagnose import diagnose_weights as diagnose_weights
from parity.explain.conformance.examine import examine as examine
from parity.explain.conformance.subjects import Subject as Subject
from parity.use.reporting.plot import plot_attention as plot_attention

# Weights of live modules
from parity.port.foreign import (
    from_module as from_module,
    load_into as load_into,
    save as save,
    spec_of as spec_of,
    weights_of as weights_of,
)
from parity.port.foreign.live import from_transformers as from_transformers

# Checkpoints
from parity.port.conversion.convert import (
    convert as convert,
    convert_file as convert_file,
    load as load,
)
from parity.explain.diagnosis.weights.differences import compare_weights as compare_weights
from parity.port.conversion.layouts import register_layout as register_layout
from parity.port.conversion.ignored_settings import IgnoredSettingsWarning as IgnoredSettingsWarning
from parity.port.models.specs import specs_of as specs_of

# Layers of a running model
from parity.explain.diagnosis.tap_pairs import compare_taps as compare_taps
from parity.explain.diagnosis.taps import check_tap as check_tap
from parity.explain.identification import identify as identify
from parity.explain.identification.layers import layers_of as layers_of
from parity.explain.writing import source_of as source_of
from parity.port.tapping import tap as tap
from parity.port.tapping.record import load_tap as load_tap

# Ranks
from parity.measure.sharding.shard import ShardPlan as ShardPlan, shard as shard, unshard as unshard
from parity.measure.sharding.stages import unshard_stages as unshard_stages

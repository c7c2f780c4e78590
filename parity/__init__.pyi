"""Public names and the modules that define them, for type checkers, editors, and `__init__.py`,
which reads them.
"""

from mha_spec import (
    Alibi as Alibi,
    AttentionSpec as AttentionSpec,
    Gate as Gate,
    GridBias as GridBias,
    Latent as Latent,
    Norm as Norm,
    RelativeBias as RelativeBias,
    RelativeProducts as RelativeProducts,
    Rope as Rope,
    Temperature as Temperature,
)
from parity.measure.backends.caches import load_cache as load_cache, save_cache as save_cache
from parity.measure.backends.numerics import numerics_lock as numerics_lock
from parity.explain.conformance.answers import Conformance as Conformance
from parity.explain.conformance.examine import examine as examine
from parity.explain.conformance.subjects import Subject as Subject
from parity.port.conversion.convert import (
    convert as convert,
    convert_file as convert_file,
    load as load,
)
from parity.port.conversion.differences import (
    WeightsComparison as WeightsComparison,
    compare_weights as compare_weights,
)
from parity.port.conversion.layouts import (
    LAYOUTS as LAYOUTS,
    Layout as Layout,
    register_layout as register_layout,
)
from parity.port.conversion.not_carried import NotCarriedWarning as NotCarriedWarning
from parity.port.conversion.verify import verify as verify
from parity.measure.core.arrays import to_jax as to_jax, to_numpy as to_numpy, to_torch as to_torch
from parity.measure.core.case import Case as Case
from parity.measure.core.cases import CASES as CASES, random_case as random_case
from parity.measure.core.compare import (
    Comparison as Comparison,
    first_difference as first_difference,
)
from parity.measure.core.problem import Problem as Problem, make_problem as make_problem
from parity.measure.core.stages import STAGES as STAGES
from parity.measure.core.weights import (
    check_weights as check_weights,
    load_tensors as load_tensors,
    load_weights as load_weights,
    random_weights as random_weights,
    save_tensors as save_tensors,
    save_weights as save_weights,
    weight_shapes as weight_shapes,
)
from parity.explain.diagnosis.attention import attention_of as attention_of
from parity.explain.diagnosis.diagnose import (
    Diagnosis as Diagnosis,
    diagnose as diagnose,
    observe as observe,
)
from parity.explain.diagnosis.ranks import (
    RankDiagnosis as RankDiagnosis,
    diagnose_ranks as diagnose_ranks,
)
from parity.explain.diagnosis.tap_pairs import (
    TapDifference as TapDifference,
    judge_taps as judge_taps,
)
from parity.explain.diagnosis.taps import TapVerdict as TapVerdict, judge_tap as judge_tap
from parity.explain.diagnosis.weights import diagnose_weights as diagnose_weights
from parity.port.foreign import (
    from_module as from_module,
    load_into as load_into,
    save as save,
    spec_of as spec_of,
    weights_of as weights_of,
)
from parity.port.foreign.live import from_transformers as from_transformers
from parity.explain.identification import Identification as Identification, identify as identify
from parity.explain.identification.layers import LiveLayer as LiveLayer, layers_of as layers_of
from parity.port.models.specs import ModelLayer as ModelLayer, specs_of as specs_of
from parity.use.reporting.plot import plot_attention as plot_attention
from parity.use.running.models import run_model as run_model
from parity.use.running.report import Report as Report
from parity.use.running.run import run_cases as run_cases
from parity.measure.sharding.shard import ShardPlan as ShardPlan, shard as shard, unshard as unshard
from parity.measure.sharding.stages import unshard_stages as unshard_stages
from parity.port.tapping import tap as tap
from parity.port.tapping.record import Tapped as Tapped, load_tap as load_tap
from parity.use.testing.assertion import (
    ConventionWarning as ConventionWarning,
    assert_parity as assert_parity,
)
from parity.use.testing.operations import assert_operations as assert_operations
from parity.use.testing.pcc import assert_with_pcc as assert_with_pcc
from parity.explain.writing import source_of as source_of

"""Every feature of a case affects its output: without the feature, the case fails.

Therefore learned parameters are drawn away from 0 and 1, and cases have enough tokens for a window
to hide some.
"""

from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass, replace
from typing import Any

import numpy as np
import pytest
from helpers.input_errors import rejects, rejects_type
from helpers.samples import sample

from mha_spec import AttentionSpec
from parity import CASES, Case
from parity.measure.core import reference
from parity.measure.core.cases import QUICK
from parity.measure.core.problem import make_problem
from parity.measure.core.stages import run_steps

CASES_AND_QUICK = (CASES.values(), QUICK.values())
SIZES = ("num_kv_heads", "head_dim", "d_in", "d_kv")  # filled in if omitted
OF_OTHERS = {"value_head_dim": "head_dim"}  # a feature only if it differs from this field


def switched_off(record: Any) -> Iterator[tuple[str, Any]]:
    """Yield the name of each non-default field and a copy of the record with only that field reset
    to its default.
    """
    for field in fields(record):
        value = getattr(record, field.name)
        default = (
            getattr(record, OF_OTHERS[field.name]) if field.name in OF_OTHERS else field.default
        )
        if field.default is MISSING or field.name in SIZES or value == default:
            continue
        yield field.name, replace_or_none(record, field.name, default)
        if is_dataclass(value):
            yield from (
                (f"{field.name}.{name}", without and replace_or_none(record, field.name, without))
                for name, without in switched_off(value)
            )


def replace_or_none(record: Any, name: str, value: Any) -> Any:
    """Return the record with a different value, or None if that value is invalid."""
    try:
        return replace(record, **{name: value})
    except ValueError:
        return None


def outputs(case: Any, weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    values = run_steps(reference.steps(make_problem(case, "float64", weights), "float64"))
    return {name: value for name, value in values.items() if name.endswith("module.output")}


KEPT = ("fused_qkv", "out_proj")  # a different layout of the same layer; a different output width
COMMUTE = (
    "decode-l2-norm",
    "qk_norm.after_rope",
)  # rotation does not change a norm without a weight
WITHOUT = [
    pytest.param(case, spec, id=f"{case.name}-{name}")
    for case in CASES.values()
    if case.trained is None and not case.name.startswith("random-")
    for name, spec in switched_off(case.spec)
    if spec is not None
    and name not in KEPT
    and not name.endswith("bias")
    and (case.name, name) != COMMUTE
]


def test_every_feature_has_a_case():
    """Each optional field of `AttentionSpec` has a case that sets it."""
    features = {field.name for field in fields(AttentionSpec) if field.default is None} - set(SIZES)
    assert features <= {name for case in CASES.values() for name, _ in switched_off(case.spec)}


def test_quick_cases_cover_every_feature():
    """The quick cases set every field of `AttentionSpec` that any case sets."""
    of_all, of_quick = (
        {name for case in of for name, _ in switched_off(case.spec)} for of in CASES_AND_QUICK
    )
    assert {name for name in of_all if "." not in name} <= of_quick


@sample(48)
@pytest.mark.parametrize(("case", "spec"), WITHOUT)
def test_case_fails_without_its_feature(case, spec):
    """Without any one feature, the output differs by more than 1e-4 of its largest value."""
    problem = make_problem(case, "float64")
    shapes = spec.weight_shapes
    weights = {name: weight for name, weight in problem.weights.items() if name in shapes}
    if {name: weight.shape for name, weight in weights.items()} != shapes:
        others = {
            name: np.linspace(0.7, 1.9, np.prod(shape))
            for name, shape in shapes.items()
            if name not in weights
        }
        weights |= others
        weights = {name: np.resize(weights[name], shape) for name, shape in shapes.items()}
    expected, actual = outputs(case, problem.weights), outputs(replace(case, spec=spec), weights)
    largest = max(np.nanmax(np.abs(value), initial=0.0) for value in expected.values())
    apart = max(
        np.nanmax(np.abs(actual[name] - value), initial=0.0) for name, value in expected.items()
    )
    assert apart > 1e-4 * largest, f"{apart:.1e} of {largest:.1e}"


INVALID_CASES = [
    ({"chunks": (3, 1)}, rejects("seq_len", seq_len=5)),
    ({"new_lengths": ((1, 2),)}, rejects("new_lengths")),
    ({"key_padding_lengths": (1,)}, rejects("key_padding_lengths")),
    ({"seq_len": 4, "chunks": (3, 1), "new_lengths": ((3, 1),)}, rejects("new_lengths")),
    ({"dtype": "f32"}, rejects("dtype", dtype="f32")),
    ({"batch": 0}, rejects("batch", batch=0)),
    ({"seq_len": -1}, rejects("seq_len", seq_len=-1)),
    ({"seq_len": 2.0}, rejects_type("seq_len", seq_len=2.0)),
    ({"seq_len_k": 0}, rejects("seq_len_k", seq_len_k=0)),
    ({"window_size": 0}, rejects("window_size", window_size=0)),
    ({"first_position": -1}, rejects("first_position", first_position=-1)),
    ({"key_padding_lengths": (0, 6)}, rejects("key_padding_lengths")),
    ({"chunks": (5, 0), "capacity": 5}, rejects("chunks", chunks=0)),
    ({"chunks": (3, 2), "capacity": 4}, rejects("capacity", capacity=4)),
    (
        {"chunks": (3, 2), "capacity": 8, "new_lengths": ((3, 4), (1, 1))},
        rejects("new_lengths"),
    ),
    ({"gain": float("nan")}, rejects("gain")),
    ({"not_finite": "inf"}, rejects("not_finite", not_finite="inf")),
]


def test_invalid_case_raises(subtests):
    """Inconsistent lengths, impossible sizes and unknown values raise an error that names the field."""
    for case_fields, input_error in INVALID_CASES:
        with subtests.test(str(input_error), fields=case_fields), input_error:
            Case("own", AttentionSpec(8, 2), "", **case_fields)

"""A bug that is a different specification is the layer of that specification."""

from dataclasses import replace

import numpy as np
import pytest
from helpers.samples import sample

from mha_spec import (
    Alibi,
    AttentionSpec,
    Latent,
    LinearScaling,
    Norm,
    RelativeBias,
    RelativeProducts,
    Rope,
    SinusoidProducts,
    Temperature,
)
from parity import CASES, Case, make_problem
from parity.explain.diagnosis.bugs import edited_layer, known_bugs, specs
from parity.explain.diagnosis.bugs.record import Edit, with_spec
from parity.explain.diagnosis.bugs.specs import of_spec, spec_edit, with_rope
from parity.measure.core.stages import run_steps
from parity_lab.selftest import SELFTEST_CASES

ALL_CASES = {case.name: case for case in (*SELFTEST_CASES, *CASES.values())}
ROPE = Rope(10000.0)
SPEC = AttentionSpec(
    32,
    4,
    num_kv_heads=2,
    rope=ROPE,
    qk_norm=Norm(),
    v_norm=Norm(weight=None),
    clip_qkv=1.0,
    soft_cap=5.0,
    temperature=Temperature(length=4, scale=0.5),
    relative_bias=RelativeBias(8, 16, bidirectional=True),
)


def stages_with(problem, *edits, dtype="float32"):
    """Return the stages of the reference with edits."""
    with np.errstate(all="ignore"):
        return run_steps(edited_layer(problem, dtype, edits).steps())


def assert_same_stages(stages, others):
    assert stages.keys() == others.keys()
    for name, x in stages.items():
        np.testing.assert_array_equal(x, others[name], err_msg=name, strict=True)


def edits_of(case, monkeypatch):
    """Return the specifications that the bugs of a case are, each with its overrides."""
    made = []
    overrides_of = specs.overrides_of

    def recording(right, wrong):
        overrides = overrides_of(right, wrong)
        made.append((wrong, overrides))
        return overrides

    monkeypatch.setattr(specs, "overrides_of", recording)
    known_bugs(case)
    return made


def test_many_bugs_are_specifications(monkeypatch):
    """The table has such bugs: otherwise the next test would show nothing."""
    numbers = {name: len(edits_of(case, monkeypatch)) for name, case in ALL_CASES.items()}
    assert sum(number > 0 for number in numbers.values()) > len(numbers) // 2


@sample(28)
@pytest.mark.parametrize("name", ALL_CASES)
def test_bug_is_its_specification(monkeypatch, name):
    """Each bug that is a different specification has every stage of that layer, bit for bit."""
    case = ALL_CASES[name]
    problem = make_problem(case, "float32")
    for wrong, overrides in edits_of(case, monkeypatch):
        of_layer = stages_with(problem, with_spec(wrong))
        assert_same_stages(stages_with(problem, Edit(overrides=overrides)), of_layer)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope": None},
        {"rope": Rope(500.0)},
        {"rope": Rope(10000.0, scaling=LinearScaling(4.0))},
        {"temperature": None},
        {"temperature": Temperature(length=2, scale=0.25, first_position=1)},
        {"clip_qkv": None},
        {"soft_cap": None},
        {"soft_cap": 2.0},
        {"qk_norm": None},
        {"qk_norm": Norm(eps=0.1), "v_norm": None},
        {"v_norm": Norm(kind="layer", weight=None)},
        {"window_size": 3},
        {"chunk_size": 4},
        {"scale": 0.3},
        {"relative_bias": RelativeBias(8, 12, bidirectional=False)},
        {"rope": Rope(500.0), "scale": 0.3, "soft_cap": None, "temperature": None},
    ],
)
def test_edit_overrides_single_methods(changes):
    """Fields that few methods read are overridden there: the layer computes the specification."""
    problem = make_problem(Case("edited", SPEC, "many records", batch=2, seq_len=9), "float32")
    wrong = replace(SPEC, **changes)
    edit = spec_edit(SPEC, wrong)
    assert edit.spec is None
    assert len(edit.overrides) <= len(changes)
    assert_same_stages(stages_with(problem, edit), stages_with(problem, with_spec(wrong)))


@pytest.mark.parametrize(
    "changes",
    [
        {"sinks": True},
        {"clip_qkv": 0.5},
        {"relative_bias": None},
        {"temperature": None, "rope": Rope(10000.0, sections=(2, 1, 1))},
    ],
)
def test_edit_is_whole_layer_otherwise(changes):
    """Fields that other methods read too need the whole layer: `of_spec` raises an error."""
    wrong = replace(SPEC, **changes)
    edit = spec_edit(SPEC, wrong)
    assert edit.spec == wrong
    assert not edit.overrides
    with pytest.raises(ValueError, match="read these fields alone"):
        of_spec(SPEC, **changes)


@pytest.mark.parametrize(
    ("spec", "changes"),
    [
        (
            AttentionSpec(32, 4, latent=Latent(8, 4, q_rank=12)),
            {"latent": Latent(8, 4, q_rank=12, eps=0.1, kv_factor=2.0)},
        ),
        (AttentionSpec(32, 4, alibi=Alibi()), {"alibi": Alibi(max_bias=4.0)}),
        (AttentionSpec(32, 4, alibi=Alibi(), scale=0.5), {"alibi": Alibi(scaled=True)}),
        (
            AttentionSpec(32, 4, relative_products=RelativeProducts(4, 4)),
            {"relative_products": RelativeProducts(2, 6)},
        ),
        (
            AttentionSpec(32, 4, relative_products=SinusoidProducts()),
            {"relative_products": SinusoidProducts(100.0)},
        ),
        (AttentionSpec(32, 4, window_size=3), {"window_size": 5}),
        (AttentionSpec(32, 4, window_size=3), {"window_size": None, "chunk_size": 3}),
    ],
)
def test_edit_of_another_layer(spec, changes):
    """Records that exclude others are overridden in the same way."""
    problem = make_problem(Case("edited", spec, "one record", batch=2, seq_len=9), "float32")
    wrong = replace(spec, **changes)
    edit = spec_edit(spec, wrong)
    assert edit.spec is None
    assert_same_stages(stages_with(problem, edit), stages_with(problem, with_spec(wrong)))


def test_edits_of_one_record_come_together():
    """Two edits of different fields of RoPE, or of a norm, are both in the layer, in any order."""
    problem = make_problem(Case("edited", SPEC, "many records", batch=2, seq_len=9), "float32")
    theta = Edit(overrides=with_rope(SPEC, replace(ROPE, theta=500.0)))
    scaled = Edit(overrides=with_rope(SPEC, replace(ROPE, scaling=LinearScaling(4.0))))
    eps = Edit(overrides=of_spec(SPEC, qk_norm=Norm(eps=0.1)))
    kind = Edit(overrides=of_spec(SPEC, qk_norm=Norm(kind="layer")))
    both = replace(
        SPEC,
        rope=Rope(500.0, scaling=LinearScaling(4.0)),
        qk_norm=Norm(eps=0.1, kind="layer"),
    )
    of_layer = stages_with(problem, with_spec(both))
    assert_same_stages(stages_with(problem, theta, scaled, eps, kind), of_layer)
    assert_same_stages(stages_with(problem, kind, eps, scaled, theta), of_layer)

"""Tests of the layer specification, the list of cases and the stage names."""

import copy
import itertools
import json
import math
import pickle
from dataclasses import fields, replace

import numpy as np
import pytest
from helpers.input_errors import rejects, rejects_type

import mha_spec
from mha_spec import (
    Alibi,
    DynamicScaling,
    Gate,
    GridBias,
    InputError,
    Latent,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    Norm,
    ProportionalScaling,
    RelativeBias,
    RelativeProducts,
    Rope,
    SinusoidProducts,
    Temperature,
    YarnScaling,
)
from mha_spec.features.scaling import SCALINGS
from parity import CASES, AttentionSpec
from parity.measure import pretrained
from parity.measure.core import reference
from parity.measure.core.case import Case
from parity.measure.core.cases import case_named, random_case
from parity.measure.core.problem import make_problem
from parity.measure.core.stages import STAGES, Stage, run_steps, stage_named
from parity.measure.core.weights import load_tensors, weight_shapes
from parity.use.cli.run import MOST_RANDOM


def test_spec_derives_omitted_sizes():
    """Omitted sizes are derived from `d_model` and `num_heads`; values are as wide as heads."""
    spec = AttentionSpec(32, 4)
    assert (spec.num_kv_heads, spec.head_dim, spec.d_in, spec.d_kv, spec.value_head_dim) == (
        4,
        8,
        32,
        32,
        8,
    )
    assert AttentionSpec(32, 4, head_dim=12).value_head_dim == 12


def test_key_width_defaults_to_query_width():
    """Omitted `d_kv` equals `d_in`."""
    assert AttentionSpec(32, 4, d_in=24).d_kv == 24


def test_spec_stores_plain_numbers():
    """NumPy scalars are stored as Python's: specifications and their JSON are equal."""
    numbers = {
        "window_size": np.int64(4),
        "scale": np.float32(0.5),
        "rope": Rope(sections=np.array([2, 1, 1])),
    }
    spec = AttentionSpec(np.int64(32), 4, sinks=np.bool_(True), **numbers)
    same = AttentionSpec(32, 4, window_size=4, scale=0.5, rope=Rope(sections=(2, 1, 1)), sinks=True)
    assert (spec, spec.to_json()) == (same, same.to_json())
    assert (
        AttentionSpec(32, 4, chunk_size=np.int32(3)).to_json()
        == AttentionSpec(32, 4, chunk_size=3).to_json()
    )


def test_replace_rederives_omitted_sizes():
    """`replace` derives omitted sizes again from the new ones."""
    spec = AttentionSpec(512, 8)
    assert spec.replace(d_model=1024) == AttentionSpec(1024, 8)
    assert spec.replace(num_heads=4) == AttentionSpec(512, 4)
    assert spec.replace(d_in=256) == AttentionSpec(512, 8, d_in=256, d_kv=256)
    assert spec.replace(head_dim=32) == AttentionSpec(512, 8, head_dim=32, value_head_dim=32)
    assert spec.replace(d_model=30, head_dim=12).q_width == 96


def test_shared_kv_has_no_key_value_weights():
    """A layer that shares keys has weights of queries and output alone, and survives JSON."""
    spec = AttentionSpec(8, 2, num_kv_heads=1, shared_kv=True, qk_norm=Norm(), rope=Rope())
    assert list(spec.weight_shapes) == [
        "q_proj.weight",
        "q_proj.bias",
        "out_proj.weight",
        "out_proj.bias",
        "q_norm.weight",
    ]
    assert AttentionSpec.from_json(spec.to_json()) == spec
    assert not AttentionSpec.from_json('{"d_model": 8, "num_heads": 2}').shared_kv


def test_replace_keeps_given_fields():
    """`replace` keeps fields that were given, and derives those set to None again."""
    sizes = {"num_kv_heads": 2, "head_dim": 32, "d_in": 256, "d_kv": 128, "value_head_dim": 16}
    spec = AttentionSpec(512, 8, **sizes, dropout=0.1, gate=Gate())
    assert spec.replace(d_model=1024, num_heads=16) == AttentionSpec(
        1024, 16, **sizes, dropout=0.1, gate=Gate()
    )
    assert spec.replace(gate=None, dropout=0.0) == AttentionSpec(512, 8, **sizes)
    assert spec.replace(**dict.fromkeys(sizes)) == AttentionSpec(512, 8, dropout=0.1, gate=Gate())


COPIES = {
    "JSON": lambda spec: AttentionSpec.from_json(spec.to_json()),
    "pickle": lambda spec: pickle.loads(pickle.dumps(spec)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "replace": lambda spec: spec.replace(),
    "dataclasses.replace": replace,
    "all sizes given": lambda spec: AttentionSpec(
        512, 8, num_kv_heads=8, head_dim=64, d_in=512, d_kv=512
    ),
}


@pytest.mark.parametrize("name", COPIES)
def test_copy_of_a_spec_behaves_the_same(name):
    """A copy is equal, with the same hash and repr, and derives sizes in `replace` alike: sizes
    count as omitted by value.
    """
    spec = AttentionSpec(512, 8)
    again = COPIES[name](spec)
    assert (again, hash(again), repr(again)) == (spec, hash(spec), "AttentionSpec(512, 8)")
    assert again.replace(d_model=1024) == spec.replace(d_model=1024) == AttentionSpec(1024, 8)


def test_replace_without_arguments_is_equal():
    """`replace()` of each case's specification returns an equal one with the same hash."""
    specs = [case.spec for case in CASES.values()]
    assert [spec.replace() for spec in specs] == specs
    assert [hash(spec.replace()) for spec in specs] == [hash(spec) for spec in specs]


def test_records_have_replace():
    """RoPE, scalings and norms have `replace`."""
    rope = Rope(500.0, scaling=LinearScaling(8.0))
    assert rope.replace(theta=1e4) == Rope(scaling=LinearScaling(8.0))
    assert rope.scaling.replace(factor=2) == LinearScaling(2.0)
    assert Norm("layer").replace(bias=True) == Norm("layer", bias=True)


@pytest.mark.parametrize(
    ("changes", "input_error"),
    [
        ({"num_heads": 3}, rejects("d_model")),
        ({"num_kv_heads": 3}, rejects("num_heads", num_heads=8, num_kv_heads=3)),
        ({"d_model": None}, rejects_type("d_model", d_model=None)),
        ({"heads": 4}, pytest.raises(TypeError, match="'heads'")),
    ],
)
def test_invalid_replace_raises(changes, input_error):
    """`replace` with sizes that do not fit, None or an unknown name raises an error."""
    with input_error:
        AttentionSpec(512, 8).replace(**changes)


def test_repr_round_trips():
    """The repr of each case's and of 100 random specifications evaluates to an equal one."""
    specs = [case.spec for case in CASES.values()] + [random_case(seed).spec for seed in range(100)]
    specs += [AttentionSpec(16, 2, rope=rope) for rope in ROPES]
    assert [spec for spec in specs if eval(repr(spec), {**vars(mha_spec)}) != spec] == []


@pytest.mark.parametrize(
    ("record", "text"),
    [
        (AttentionSpec(512, 8), "AttentionSpec(512, 8)"),
        (
            AttentionSpec(512, 8, num_kv_heads=8, head_dim=64, value_head_dim=64, d_kv=512),
            "AttentionSpec(512, 8)",
        ),
        (AttentionSpec(500, 8, head_dim=62), "AttentionSpec(500, 8, head_dim=62)"),
        (
            AttentionSpec(512, 8, num_kv_heads=2, rope=Rope(), qkv_bias=False, dropout=0.5),
            "AttentionSpec(512, 8, num_kv_heads=2, qkv_bias=False, rope=Rope(theta=10000.0), "
            "dropout=0.5)",
        ),
        (
            AttentionSpec(512, 8, d_in=256, qk_norm=Norm()),
            "AttentionSpec(512, 8, d_in=256, qk_norm=Norm())",
        ),
        (AttentionSpec(512, 8, d_in=256, d_kv=512), "AttentionSpec(512, 8, d_in=256, d_kv=512)"),
        (Norm("layer", weight=None), "Norm(kind='layer', weight=None)"),
        (Latent(12, 8), "Latent(kv_rank=12, rope_dim=8)"),
        (Gate(), "Gate()"),
        (Alibi(scaled=True), "Alibi(scaled=True)"),
        (RelativeBias(max_distance=64), "RelativeBias(max_distance=64)"),
        (GridBias(7, 4, class_token=True), "GridBias(7, 4, class_token=True)"),
        (RelativeProducts(64, 8, of_keys=True), "RelativeProducts(64, 8, of_keys=True)"),
        (Temperature(8192), "Temperature(length=8192)"),
        (
            YarnScaling(4, 32, truncate=False),
            "YarnScaling(factor=4.0, original_length=32, truncate=False)",
        ),
    ],
    ids=str,
)
def test_repr_shows_given_fields(record, text):
    """The repr of a record shows the fields that differ from their defaults."""
    assert repr(record) == text


def test_given_head_dim_is_kept():
    """A given `head_dim` of 12 with 4 heads has projections of width 48."""
    assert AttentionSpec(30, 4, head_dim=12).q_width == 48


def test_value_head_dim_sets_value_widths():
    """A different `value_head_dim` sets the widths of
    values, context, output, gate, norm and cache.
    """
    spec = AttentionSpec(32, 4, num_kv_heads=2, value_head_dim=12, v_norm=Norm(), gate=Gate())
    assert (spec.q_width, spec.k_width, spec.v_width, spec.context_width, spec.output_width) == (
        32,
        16,
        24,
        48,
        32,
    )
    assert weight_shapes(spec) | {"v_norm.weight": (12,)} == weight_shapes(spec)
    shapes = {
        name: weight_shapes(spec)[f"{name}_proj.weight"] for name in ("q", "k", "v", "out", "gate")
    }
    assert shapes == {
        "q": (32, 32),
        "k": (16, 32),
        "v": (24, 32),
        "out": (32, 48),
        "gate": (48, 32),
    }
    assert replace(spec, fused_qkv=True).stored_shapes["qkv_proj.weight"] == (72, 32)
    assert replace(spec, out_proj=False).output_width == 48
    assert spec.cache_nbytes(2, 5, np.dtype(np.float32)) == 2 * 5 * (16 + 24) * 4
    assert AttentionSpec.from_json(spec.to_json()) == spec


SHARED = {"d_model": 8, "num_heads": 2, "shared_kv": True}
LATENT = {"d_model": 8, "num_heads": 2, "latent": Latent(6, 2)}


INVALID_SPECS = [
    (
        {"d_model": 10, "num_heads": 4},
        rejects("d_model", "d_model=10 and num_heads=4 without head_dim"),
    ),
    ({"d_model": 0, "num_heads": 4}, rejects("d_model", d_model=0)),
    ({"d_model": 8.0, "num_heads": 4}, rejects_type("d_model", d_model=8.0)),
    ({"d_model": 8, "num_heads": True}, rejects_type("num_heads", num_heads=True)),
    (
        {"d_model": 8, "num_heads": 4, "num_kv_heads": 3},
        rejects("num_heads", num_heads=4, num_kv_heads=3),
    ),
    ({"d_model": 8, "num_heads": 4, "head_dim": -1}, rejects("head_dim", head_dim=-1)),
    (
        {"d_model": 8, "num_heads": 4, "value_head_dim": 0},
        rejects("value_head_dim", value_head_dim=0),
    ),
    (
        {"d_model": 8, "num_heads": 4, "value_head_dim": 2.0},
        rejects_type("value_head_dim", value_head_dim=2.0),
    ),
    ({"d_model": 6, "num_heads": 2, "rope": Rope()}, rejects("head_dim", head_dim=3)),
    ({"d_model": 8, "num_heads": 2, "rope": 1e4}, rejects_type("rope", rope=10000.0)),
    ({"d_model": 8, "num_heads": 2, "dropout": math.nan}, rejects("dropout", dropout=math.nan)),
    ({"d_model": 8, "num_heads": 2, "dropout": "0.5"}, rejects_type("dropout", dropout="0.5")),
    (
        {"d_model": 8, "num_heads": 2, "output_dropout": False},
        rejects_type("output_dropout", output_dropout=False),
    ),
    (
        {"d_model": 8, "num_heads": 2, "qkv_bias": (True, False)},
        rejects("qkv_bias", qkv_bias=(True, False)),
    ),
    (
        {"d_model": 8, "num_heads": 2, "qkv_bias": (1, 0, 1)},
        rejects_type("qkv_bias", qkv_bias=1),
    ),
    (
        {"d_model": 8, "num_heads": 2, "qkv_bias": (True, False, True), "fused_qkv": True},
        rejects("qkv_bias", qkv_bias=(True, False, True)),
    ),
    ({"d_model": 8, "num_heads": 2, "qkv_bias": "no"}, rejects_type("qkv_bias", qkv_bias="no")),
    ({"d_model": 8, "num_heads": 2, "out_bias": 1}, rejects_type("out_bias", out_bias=1)),
    ({"d_model": 8, "num_heads": 2, "out_proj": None}, rejects_type("out_proj", out_proj=None)),
    (
        {"d_model": 8, "num_heads": 2, "fused_qkv": "x"},
        rejects_type("fused_qkv", fused_qkv="x"),
    ),
    (
        {"d_model": 8, "num_heads": 2, "d_kv": 4, "rope": Rope()},
        rejects("d_kv", d_kv=4, d_in=8),
    ),
    ({"d_model": 8, "num_heads": 2, "dropout": 1.0}, rejects("dropout", dropout=1.0)),
    (
        {"d_model": 8, "num_heads": 2, "d_kv": 4, "fused_qkv": True},
        rejects("d_kv", d_kv=4, d_in=8),
    ),
    ({"d_model": 8, "num_heads": 2, "qk_norm": "rms"}, rejects_type("qk_norm", qk_norm="rms")),
    ({"d_model": 8, "num_heads": 2, "gate": True}, rejects_type("gate", gate=True)),
    (
        {"d_model": 8, "num_heads": 2, "temperature": 8192},
        rejects_type("temperature", temperature=8192),
    ),
    (
        {
            "d_model": 8,
            "num_heads": 1,
            "temperature": Temperature(4),
            "rope": Rope(sections=(2, 1, 1)),
        },
        rejects("temperature", temperature=..., sections=(2, 1, 1)),
    ),
    (LATENT | {"latent": 16}, rejects_type("latent", latent=16)),
    (
        LATENT | {"num_kv_heads": 1},
        rejects("num_kv_heads", num_kv_heads=1, latent=...),
    ),
    (LATENT | {"d_kv": 4}, rejects("d_kv", d_kv=4, latent=...)),
    (LATENT | {"fused_qkv": True}, rejects("fused_qkv", fused_qkv=True, latent=...)),
    (LATENT | {"qk_norm": Norm()}, rejects("qk_norm", qk_norm=..., latent=...)),
    (LATENT | {"v_norm": Norm()}, rejects("v_norm", v_norm=..., latent=...)),
    (LATENT | {"clip_qkv": 1.0}, rejects("clip_qkv", clip_qkv=1.0, latent=...)),
    (LATENT | {"head_dim": 2}, rejects("rope_dim", rope_dim=2, head_dim=2)),
    (
        LATENT | {"qkv_bias": (True, True, False)},
        rejects("qkv_bias", qkv_bias=(True, True, False)),
    ),
    (LATENT | {"rope": Rope()}, rejects("rope", rope=..., latent=...)),
    (LATENT | {"rope": Rope(rotary_dim=2)}, rejects("rope", rope=..., latent=...)),
    (SHARED | {"d_kv": 4}, rejects("d_kv", d_kv=4)),
    (SHARED | {"fused_qkv": True}, rejects("fused_qkv", fused_qkv=True)),
    (SHARED | {"v_norm": Norm()}, rejects("v_norm", v_norm=...)),
    (
        SHARED | {"qkv_bias": (True, False, True)},
        rejects("qkv_bias", qkv_bias=(True, False, True)),
    ),
    (LATENT | {"shared_kv": True}, rejects("latent", latent=...)),
    (SHARED | {"shared_kv": 1}, rejects_type("shared_kv", shared_kv=1)),
    (
        {"d_model": 8, "num_heads": 2, "context_norm": Norm()},
        rejects("context_norm", context_norm=...),
    ),
    (
        {"d_model": 8, "num_heads": 2, "context_norm": Norm(over="width"), "gate": Gate()},
        rejects("gate", gate=..., context_norm=...),
    ),
    (
        LATENT | {"context_norm": Norm(over="width")},
        rejects("context_norm", context_norm=..., latent=...),
    ),
    ({"d_model": 8, "num_heads": 2, "alibi": True}, rejects_type("alibi", alibi=True)),
    (
        {"d_model": 8, "num_heads": 2, "relative_bias": 32},
        rejects_type("relative_bias", relative_bias=32),
    ),
    (
        {"d_model": 8, "num_heads": 2, "alibi": Alibi(), "relative_bias": RelativeBias()},
        rejects("alibi", alibi=..., relative_bias=...),
    ),
    (
        {"d_model": 8, "num_heads": 2, "relative_bias": GridBias(2, 2), "window_size": 2},
        rejects("window_size", window_size=2, grid=...),
    ),
    (
        {"d_model": 8, "num_heads": 2, "relative_products": RelativeBias()},
        rejects_type("relative_products", relative_products=...),
    ),
    (
        {
            "d_model": 8,
            "num_heads": 2,
            "relative_products": RelativeProducts(2, 2),
            "soft_cap": 2.0,
        },
        rejects("soft_cap", soft_cap=2.0),
    ),
    (
        LATENT | {"relative_products": RelativeProducts(2, 2)},
        rejects("relative_products", relative_products=..., latent=...),
    ),
    ({"d_model": 8, "num_heads": 2, "sinks": 1}, rejects_type("sinks", sinks=1)),
    ({"d_model": 8, "num_heads": 2, "clip_qkv": 0.0}, rejects("clip_qkv", clip_qkv=0.0)),
    (
        {"d_model": 8, "num_heads": 2, "clip_qkv": math.nan},
        rejects("clip_qkv", clip_qkv=math.nan),
    ),
    ({"d_model": 8, "num_heads": 2, "clip_qkv": True}, rejects_type("clip_qkv", clip_qkv=True)),
    ({"d_model": 8, "num_heads": 2, "v_norm": True}, rejects_type("v_norm", v_norm=True)),
    (
        {"d_model": 8, "num_heads": 2, "qk_norm": Norm(after_rope=True)},
        rejects("qk_norm.after_rope", after_rope=True, rope=None),
    ),
    (
        {"d_model": 8, "num_heads": 2, "v_norm": Norm(after_rope=True)},
        rejects("v_norm", after_rope=True),
    ),
]


def test_invalid_spec_raises(subtests):
    """Invalid fields and combinations raise an error that names them."""
    for keywords, input_error in INVALID_SPECS:
        with subtests.test(str(input_error), keywords=keywords), input_error:
            AttentionSpec(**keywords)


INVALID_NORMS = [
    ({"kind": "batch"}, rejects("kind", kind="batch")),
    ({"over": "tokens"}, rejects("over", over="tokens")),
    ({"weight": True}, rejects("weight", weight=True)),
    ({"kind": np.array(["rms", "layer"])}, rejects("kind", kind=...)),
    ({"eps": 0}, rejects("eps", eps=0.0)),
    ({"eps": "small"}, rejects_type("eps", eps="small")),
    ({"bias": 1}, rejects_type("bias", bias=1)),
    ({"bias": True, "weight": None}, rejects("bias", bias=True, weight=None)),
    ({"per_head": True, "weight": None}, rejects("per_head", per_head=True, weight=None)),
    ({"per_head": True, "over": "width"}, rejects("per_head", per_head=True, over="width")),
    (
        {"after_rope": True, "over": "width"},
        rejects("after_rope", after_rope=True, over="width"),
    ),
]


def test_invalid_norm_raises(subtests):
    """Invalid fields and combinations of `Norm` raise an error that names them."""
    for keywords, input_error in INVALID_NORMS:
        with subtests.test(str(input_error), keywords=keywords), input_error:
            Norm(**keywords)


def test_norms_have_their_parameters():
    """Norms add weights and biases of the right shapes, after
    all projections, and none without a weight.
    """
    norm = Norm("layer", per_head=True, bias=True)
    spec = AttentionSpec(48, 6, num_kv_heads=2, qk_norm=norm, v_norm=Norm(over="width"))
    assert spec.parameters == {
        "q_norm.weight": (6, 8),
        "q_norm.bias": (6, 8),
        "k_norm.weight": (2, 8),
        "k_norm.bias": (2, 8),
        "v_norm.weight": (16,),
    }
    assert list(weight_shapes(spec))[-5:] == list(spec.parameters)
    assert AttentionSpec(8, 2, qk_norm=Norm(weight=None), v_norm=Norm(weight=None)).parameters == {}


@pytest.mark.parametrize(
    ("keywords", "input_error"),
    [
        ({"length": 0}, rejects("length", length=0)),
        ({"length": 8192.0}, rejects_type("length", length=8192.0)),
        ({"length": 4, "scale": 0.0}, rejects("scale", scale=0.0)),
        ({"length": 4, "first_position": -1}, rejects("first_position", first_position=-1)),
    ],
)
def test_invalid_temperature_raises(keywords, input_error):
    """Invalid fields of `Temperature` raise an error that names them."""
    with input_error:
        Temperature(**keywords)


def test_temperature_survives_json():
    """A specification with a temperature survives JSON and depends on positions."""
    spec = AttentionSpec(8, 2, temperature=Temperature(4, 0.5, first_position=1))
    assert AttentionSpec.from_json(spec.to_json()) == spec
    assert spec.has_positions
    assert not AttentionSpec(8, 2).has_positions


def test_gate_adds_a_projection():
    """A gate adds a projection, per feature or per head, with an
    optional bias, and survives JSON.
    """
    spec = AttentionSpec(8, 2, num_kv_heads=1, d_in=6, gate=Gate(bias=True))
    assert weight_shapes(spec)["gate_proj.weight"] == (8, 6)
    assert weight_shapes(spec)["gate_proj.bias"] == (8,)
    assert weight_shapes(AttentionSpec(8, 2, gate=Gate(per_head=True)))["gate_proj.weight"] == (
        2,
        8,
    )
    assert AttentionSpec.from_json(spec.to_json()) == spec
    with rejects_type("per_head", per_head=1):
        Gate(per_head=1)


def test_sinks_are_one_per_query_head():
    """Sinks add one number per query head, and survive JSON."""
    spec = AttentionSpec(8, 4, num_kv_heads=2, qk_norm=Norm(), sinks=True)
    assert list(spec.parameters.items())[-1] == ("sinks", (4,))
    assert AttentionSpec.from_json(spec.to_json()) == spec
    assert "sinks" not in weight_shapes(AttentionSpec(8, 4))


def test_latents_have_projections_and_norms():
    """Latents have their own projections and norms, a scale with
    `mscale_all_dim`, and a small cache, and survive JSON.
    """
    spec = AttentionSpec(
        *(16, 2),
        head_dim=6,
        value_head_dim=5,
        qkv_bias=(True, False, False),
        out_bias=False,
        latent=Latent(7, 2, q_rank=9, eps=1e-5, q_factor=1.5, kv_factor=2),
        rope=Rope(
            rotary_dim=2,
            rotated="last",
            scaling=YarnScaling(4.0, 64, mscale=1.0, mscale_all_dim=0.5),
        ),
    )
    assert spec.weight_shapes == {
        "q_a_proj.weight": (9, 16),
        "q_a_proj.bias": (9,),
        "q_b_proj.weight": (12, 9),
        "kv_a_proj.weight": (9, 16),
        "kv_b_proj.weight": (18, 7),
        "out_proj.weight": (16, 10),
        "q_a_norm.weight": (9,),
        "kv_a_norm.weight": (7,),
    }
    assert spec.norms == dict.fromkeys(("q_a_norm", "kv_a_norm"), Norm(over="width", eps=1e-5))
    assert spec.score_scale == pytest.approx((0.1 * 0.5 * math.log(4) + 1) ** 2 / 6**0.5, rel=1e-15)
    assert replace(spec, scale=0.5).score_scale == 0.5
    assert spec.cache_nbytes(2, 10, np.dtype(np.float16), num_layers=3) == 2 * 10 * (7 + 2) * 2 * 3
    assert AttentionSpec.from_json(spec.to_json()) == spec


@pytest.mark.parametrize(
    ("keywords", "input_error"),
    [
        ({"q_rank": 3, "q_factor": 0.0}, rejects("q_factor", q_factor=0.0)),
        ({"kv_factor": math.inf}, rejects("kv_factor", kv_factor=math.inf)),
        ({"kv_factor": "2"}, rejects_type("kv_factor", kv_factor="2")),
        ({"q_factor": 2.0}, rejects("q_factor", q_factor=2.0)),
    ],
)
def test_invalid_latent_factors_raise(keywords, input_error):
    """Invalid factors of latents, and a query factor without a query rank, raise an error."""
    with input_error:
        Latent(6, 2, **keywords)


def test_absorbed_is_attention_over_latents():
    """The absorbed specification is one key/value head over the
    latents; without latents it raises an error.
    """
    spec = AttentionSpec(
        16, 2, head_dim=6, value_head_dim=5, latent=Latent(7, 2), sinks=True, window_size=4
    )
    widths = {"num_kv_heads": 1, "head_dim": 9, "value_head_dim": 7}
    assert spec.absorbed == replace(spec, latent=None, scale=spec.score_scale, **widths)
    with rejects("spec", spec=...):
        AttentionSpec(16, 2).absorbed  # noqa: B018


def test_latents_are_absorbed_if_cheaper():
    """DeepSeek's latents are absorbed for at most 170 tokens,
    or for 2048 with 32768 keys, but not 4096.
    """
    deepseek = AttentionSpec(
        7168, 128, head_dim=192, value_head_dim=128, latent=Latent(512, 64, q_rank=1536)
    )
    assert deepseek.absorbs(1)
    assert deepseek.absorbs(170)
    assert not deepseek.absorbs(171)
    assert deepseek.absorbs(171, 172)  # one slot of the cache may be empty
    assert deepseek.absorbs(2048, 32768)
    assert not deepseek.absorbs(4096, 32768)


def test_alibi_slopes_match_the_paper():
    """ALiBi's slopes match the paper for 8, 6 and 1 heads,
    can be scaled, and survive JSON.
    """
    assert Alibi().slopes(8) == tuple(2.0**-n for n in range(1, 9))
    assert Alibi().slopes(6) == tuple(2.0**-n for n in (2, 4, 6, 8, 1, 3))
    assert Alibi().slopes(1) == (2.0**-8,)
    spec = AttentionSpec(32, 2, alibi=Alibi(max_bias=4, scaled=True))
    assert spec.alibi_slopes == (0.25 * 2.0**-2, 0.25 * 2.0**-4)
    assert AttentionSpec.from_json(spec.to_json()) == spec
    assert AttentionSpec(32, 2).alibi_slopes is None


@pytest.mark.parametrize(
    ("keywords", "input_error"),
    [
        ({"max_bias": 0.0}, rejects("max_bias", max_bias=0.0)),
        ({"max_bias": "8"}, rejects_type("max_bias", max_bias="8")),
        ({"scaled": 1}, rejects_type("scaled", scaled=1)),
    ],
)
def test_invalid_alibi_raises(keywords, input_error):
    """Invalid fields of `Alibi` raise an error that names them."""
    with input_error:
        Alibi(**keywords)


def test_relative_bias_per_bucket_and_head():
    """A relative bias adds one number per bucket and query head, and survives JSON."""
    spec = AttentionSpec(
        8, 4, num_kv_heads=2, sinks=True, relative_bias=RelativeBias(6, 5, bidirectional=False)
    )
    assert list(spec.parameters.items()) == [("sinks", (4,)), ("relative_bias", (6, 4))]
    assert AttentionSpec.from_json(spec.to_json()) == spec
    assert hash(AttentionSpec.from_json(spec.to_json())) == hash(spec)
    assert spec.has_distance_bias
    assert not AttentionSpec(8, 4).has_distance_bias
    assert {name for name in weight_shapes(AttentionSpec(8, 4)) if "relative" in name} == set()


def test_grid_bias_has_one_number_per_offset():
    """A grid bias adds one number per offset and head, with
    the expected buckets, and survives JSON.
    """
    spec = AttentionSpec(8, 4, relative_bias=GridBias(2, 3))
    assert list(spec.parameters.items()) == [("relative_bias", (15, 4))]
    assert AttentionSpec.from_json(spec.to_json()) == spec
    assert GridBias(1, 3).buckets().tolist() == [[2, 1, 0], [3, 2, 1], [4, 3, 2]]
    assert GridBias(3, 1).buckets().tolist() == GridBias(1, 3).buckets().tolist()
    assert GridBias(2, 2).buckets().tolist() == [
        [4, 3, 1, 0],
        [5, 4, 2, 1],
        [7, 6, 4, 3],
        [8, 7, 5, 4],
    ]
    assert GridBias(1, 2, class_token=True).buckets().tolist() == [[5, 3, 3], [4, 1, 0], [4, 2, 1]]


@pytest.mark.parametrize(
    ("keywords", "input_error"),
    [
        ({"height": 0, "width": 2}, rejects("height", height=0)),
        ({"height": 2, "width": 2.0}, rejects_type("width", width=2.0)),
        ({"height": 2, "width": 2, "class_token": 1}, rejects_type("class_token", class_token=1)),
    ],
)
def test_invalid_grid_bias_raises(keywords, input_error):
    """Invalid fields of `GridBias` raise an error that names them."""
    with input_error:
        GridBias(**keywords)


def test_relative_products_per_bucket():
    """Relative products add one vector per distance bucket, shared
    or per head, and survive JSON.
    """
    spec = AttentionSpec(8, 4, relative_products=RelativeProducts(2, 1))
    assert list(spec.parameters.items()) == [("relative_keys", (4, 2))]
    assert AttentionSpec.from_json(spec.to_json()) == spec
    assert spec.has_distance_bias
    record = RelativeProducts(2, 1, of_queries=False, of_keys=True, per_head=True)
    assert AttentionSpec(8, 4, relative_products=record).parameters == {
        "relative_queries": (4, 4, 2)
    }
    assert RelativeProducts(2, 1).buckets().tolist() == [0, 1, 2, 3, 3]
    assert RelativeProducts(0, 2).buckets().tolist() == [0, 0, 0, 1, 2]


def test_logarithmic_buckets():
    """Distances below 4 have buckets of their own; from 4 on, 3 steps of factor (9 / 4) ** (1 / 3)
    = 1.31 end at 5.2, 6.9 and 9.
    """
    buckets = RelativeProducts(7, 8, num_exact=4, max_distance=10).buckets() - 7
    assert buckets[10:].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 7, 7, 8]
    assert buckets[:10].tolist() == [-7, -7, -7, -7, -6, -5, -4, -3, -2, -1]


@pytest.mark.parametrize(
    ("keywords", "input_error"),
    [
        ({"num_before": -1, "num_after": 2}, rejects("num_before", num_before=-1)),
        ({"num_before": 1, "num_after": 2.0}, rejects_type("num_after", num_after=2.0)),
        ({"num_before": 1, "num_after": 2, "per_head": 1}, rejects_type("per_head", per_head=1)),
        (
            {"num_before": 1, "num_after": 2, "of_queries": False},
            rejects("of_queries or of_keys", of_queries=False, of_keys=False),
        ),
        (
            {"num_before": 1, "num_after": 2, "num_exact": 4},
            rejects("max_distance", num_exact=4, max_distance=None),
        ),
        (
            {"num_before": 1, "num_after": 2, "num_exact": 4, "max_distance": 5},
            rejects("max_distance", max_distance=5, num_exact=4),
        ),
        (
            {"num_before": 9, "num_after": 2, "num_exact": 4, "max_distance": 16},
            rejects("num_before", num_before=9, num_exact=4),
        ),
    ],
)
def test_invalid_relative_products_raise(keywords, input_error):
    """Invalid fields and combinations of `RelativeProducts` raise an error that names them."""
    with input_error:
        RelativeProducts(**keywords)


def test_sinusoid_products():
    """Sinusoids of query - key, sine and cosine in turn, are projected; odd widths have none."""
    spec = AttentionSpec(8, 4, d_in=6, relative_products=SinusoidProducts(100.0))
    biases = {"content_bias": (4, 2), "position_bias": (4, 2)}
    assert spec.parameters == {"relative_sinusoids": (6, 4, 2), **biases}
    assert AttentionSpec.from_json(spec.to_json()) == spec
    assert spec.has_distance_bias
    before, same, after = SinusoidProducts(100.0).sinusoids(1, 4)
    assert same.tolist() == [0, 1, 0, 1]
    assert before.dtype == np.float64
    assert before == pytest.approx([np.sin(1), np.cos(1), np.sin(0.1), np.cos(0.1)])
    assert after == pytest.approx([-np.sin(1), np.cos(1), -np.sin(0.1), np.cos(0.1)])
    with rejects("d_in", d_in=5):
        AttentionSpec(8, 4, d_in=5, relative_products=SinusoidProducts())
    with rejects("theta", theta=0.0):
        SinusoidProducts(0)


def test_relative_bias_buckets():
    """With 4 buckets per direction: 0, 1, then 2 from distance 2 and 3 from 4 = sqrt(2 * 8)."""
    before = [3, 3, 3, 3, 3, 2, 2, 1, 0]
    assert RelativeBias(4, 8, bidirectional=False).buckets().tolist() == [*before, *[0] * 8]
    assert RelativeBias(8, 8).buckets().tolist() == [*before, 5, 6, 6, 7, 7, 7, 7, 7]


@pytest.mark.parametrize(
    ("keywords", "input_error"),
    [
        ({"num_buckets": 31}, rejects("num_buckets", num_buckets=31)),
        ({"num_buckets": 2}, rejects("num_buckets", num_buckets=2)),
        ({"num_buckets": 1, "bidirectional": False}, rejects("num_buckets", num_buckets=1)),
        ({"num_buckets": 32.0}, rejects_type("num_buckets", num_buckets=32.0)),
        ({"max_distance": 8}, rejects("max_distance", max_distance=8, num_buckets=32)),
        (
            {"max_distance": 16, "bidirectional": False},
            rejects("max_distance", max_distance=16, num_buckets=32),
        ),
        ({"bidirectional": 1}, rejects_type("bidirectional", bidirectional=1)),
    ],
)
def test_invalid_relative_bias_raises(keywords, input_error):
    """Invalid fields and combinations of `RelativeBias` raise an error that names them."""
    with input_error:
        RelativeBias(**keywords)


def test_boolean_instead_of_a_record_raises():
    """True where a record belongs raises an error with the call that makes one; False, that it is
    None.
    """
    calls = {
        "rope": "Rope()",
        "qk_norm": "Norm()",
        "v_norm": "Norm()",
        "context_norm": "Norm()",
        "gate": "Gate()",
    }
    calls |= {
        "alibi": "Alibi()",
        "relative_bias": "GridBias(height=…, width=…)",
        "temperature": "Temperature(length=…)",
    }
    calls |= {"relative_products": "RelativeProducts(", "latent": "Latent(kv_rank=…, rope_dim=…)"}
    for name, call in calls.items():
        with rejects_type(name, {name: True}, hint=call):
            AttentionSpec(8, 2, **{name: True})
        with rejects_type(name, {name: False}, hint="None switches it off"):
            AttentionSpec(8, 2, **{name: False})


def test_equal_qkv_biases_are_stored_as_one():
    """Three equal flags for biases of q, k and v are stored as one; unequal ones survive JSON."""
    assert AttentionSpec(8, 2, qkv_bias=(True, True, True)) == AttentionSpec(8, 2)
    assert AttentionSpec(8, 2, qkv_bias=(False, False, False)).qkv_bias is False
    spec = AttentionSpec(8, 2, qkv_bias=(True, False, True))
    assert [name for name in weight_shapes(spec) if name.endswith("bias")] == [
        "q_proj.bias",
        "v_proj.bias",
        "out_proj.bias",
    ]
    assert AttentionSpec.from_json(spec.to_json()) == spec
    assert hash(AttentionSpec.from_json(spec.to_json())) == hash(spec)


def test_spec_with_norms_survives_json():
    """A specification with norms survives JSON with its hash."""
    spec = AttentionSpec(
        48, 6, rope=Rope(), qk_norm=Norm(weight="1+w", after_rope=True), v_norm=Norm(weight=None)
    )
    assert AttentionSpec.from_json(spec.to_json()) == spec
    assert hash(AttentionSpec.from_json(spec.to_json())) == hash(spec)


def test_spec_survives_json():
    """A specification with RoPE and its own sizes survives JSON."""
    spec = AttentionSpec(48, 6, num_kv_heads=2, head_dim=16, rope=Rope(10000.0), out_bias=False)
    assert AttentionSpec.from_json(spec.to_json()) == spec


def test_spec_of_numpy_scalars_survives_json():
    """A specification of NumPy scalars has values of plain types, and survives JSON."""
    numbers = {
        "rope": Rope(np.float32(1e4)),
        "dropout": np.float64(0.5),
        "output_dropout": np.int64(0),
    }
    spec = AttentionSpec(np.int64(8), np.int32(2), qkv_bias=np.False_, out_proj=np.True_, **numbers)
    assert spec == AttentionSpec(8, 2, qkv_bias=False, rope=Rope(1e4), dropout=0.5)
    assert AttentionSpec.from_json(spec.to_json()) == spec
    assert all(
        type(value) in (int, bool, float, Rope, type(None)) for value in spec.values().values()
    )
    assert type(spec.rope.theta) is float


def test_features_of_rope_pairs_are_listed():
    """`pair_features` lists the features of each pair, `pair_order` puts them side by side."""
    half, interleaved = Rope(), Rope(pairs="interleaved")
    last = Rope(rotary_dim=4, rotated="last")
    assert half.pair_features(6).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert interleaved.pair_features(6).tolist() == [[0, 2, 4], [1, 3, 5]]
    assert last.pair_features(6).tolist() == [[2, 3], [4, 5]]
    assert half.pair_order(6).tolist() == [0, 3, 1, 4, 2, 5]
    assert interleaved.pair_order(6).tolist() == [0, 1, 2, 3, 4, 5]
    assert last.pair_order(6).tolist() == [0, 1, 2, 4, 3, 5]


def test_spec_reads_json_from_before_rope():
    """The former key `rope_theta` is read as RoPE with this base, or without RoPE if null."""
    old = '{"d_model": 8, "num_heads": 2, "rope_theta": %s}'
    assert AttentionSpec.from_json(old % "500.0") == AttentionSpec(8, 2, rope=Rope(500.0))
    assert AttentionSpec.from_json(old % "null") == AttentionSpec(8, 2)


def test_spec_is_hashable_and_equal_by_value():
    """Equal specifications have the same hash, whether sizes are given or derived."""
    spec = AttentionSpec(8, 2, rope=Rope(500.0))
    assert {spec: 1}[AttentionSpec(8, 2, num_kv_heads=2, head_dim=4, rope=Rope(500))] == 1


@pytest.mark.parametrize(
    ("text", "input_error"),
    [
        ("[]", rejects("a specification", "'[]'")),
        ('{"d_model": 8}', rejects("a specification", missing=["num_heads"])),
        (
            '{"d_model": 8, "num_heads": 2, "colour": 1}',
            rejects("a specification", unexpected=["colour"]),
        ),
        ("null", rejects("a specification", "'null'")),
        (
            '{"d_model": 8, "num_heads": 2, "rope": {"base": 1}}',
            rejects("rope", unexpected=["base"]),
        ),
    ],
)
def test_json_of_invalid_spec_raises(text, input_error):
    """JSON that is not an object, or has missing or
    unexpected keys, raises an error that names them.
    """
    with input_error:
        AttentionSpec.from_json(text)


def test_invalid_json_raises():
    """Malformed JSON raises `JSONDecodeError`."""
    with pytest.raises(json.JSONDecodeError):
        AttentionSpec.from_json("{")


LONGROPE = LongRopeScaling(4.0, 8, (1.0, 2.0), (3, 4), attention_factor=1.5)
ROPES = [
    Rope(scaling=LinearScaling(4)),
    Rope(scaling=DynamicScaling(4.0, 8), rotary_dim=4, rotated="last", pairs="interleaved"),
    Rope(scaling=Llama3Scaling(8.0, 8192, 1.0, 4.0)),
    Rope(
        scaling=YarnScaling(
            4.0, 32, 16.0, 2.0, truncate=False, mscale=1, mscale_all_dim=np.float32(0.5)
        )
    ),
    Rope(scaling=LONGROPE, rotary_dim=np.int64(4)),
    Rope(scaling=ProportionalScaling(0.25, 2.0)),
    Rope(sections=[2, 1, 1], section_order="interleaved"),
    Rope(sections=(2, 2), section_frequencies="strided"),
]


@pytest.mark.parametrize("rope", ROPES, ids=str)
def test_spec_with_each_rope_survives_json(rope):
    """A specification with each kind of RoPE survives JSON with
    its hash, and sections are tuples.
    """
    spec = AttentionSpec(16, 2, rope=rope)
    again = AttentionSpec.from_json(spec.to_json())
    assert (again, hash(again)) == (spec, hash(spec))
    assert {type(sections) for sections in (again.rope.sections, spec.rope.sections)} <= {
        tuple,
        type(None),
    }


def test_yarn_ramp_ends_at_the_features():
    """The ramp of YaRN ends at the last feature, not at the last pair, as in transformers."""
    scaling = YarnScaling(4.0, 64, beta_slow=1e-9)
    assert scaling.ramp(10000.0, 8) == (0, 7)


def test_llama3_scaling_of_a_large_theta():
    """A scaling of Llama 3 accepts a theta of 1e20, whose frequencies float32 can represent."""
    rope = Rope(1e20, scaling=Llama3Scaling(4.0, 64))
    AttentionSpec(16, 2, rope=rope)
    assert rope.frequencies(8).max() == 1.0


def test_llama3_ramp_depends_on_turns():
    """A pair of Llama 3 with 16 / 2 pi turns in the original context is scaled by the share of the
    way from 1 turn, where all is scaled, to 4, where nothing is.
    """
    (frequency,) = Rope(scaling=Llama3Scaling(8.0, 16)).frequencies(2)
    share = (16 / (2 * math.pi) - 1) / 3
    assert frequency == pytest.approx(share + (1 - share) / 8)


def test_overflowing_wavelength_raises():
    """A theta of 1e38 raises with a scaling of Llama 3: float32 has no wavelength of 2 pi 1e38."""
    scaling = Llama3Scaling(1.0, 64)
    AttentionSpec(16, 2, rope=Rope(1e38, scaling=LinearScaling(1.0)))
    with rejects("scaling", scaling=scaling, theta=1e38):
        AttentionSpec(16, 2, rope=Rope(1e38, scaling=scaling))


def test_factor_below_1_may_overflow():
    """A factor below 1 of Llama 3 divides frequencies, which float32 must be able to represent."""
    scaling = Llama3Scaling(0.1, 64)
    AttentionSpec(16, 2, rope=Rope(1e-18, scaling=replace(scaling, factor=1.0)))
    with rejects("scaling", scaling=scaling, theta=1e-18):
        AttentionSpec(16, 2, rope=Rope(1e-18, scaling=scaling))


def test_narrow_llama3_ramp_raises():
    """A ramp of Llama 3 whose width float32 cannot divide by raises."""
    scaling = Llama3Scaling(1.0, 1, 2e-38, 2.5e-38)
    AttentionSpec(16, 2, rope=Rope(scaling=replace(scaling, high_freq_factor=4e-38)))
    with rejects("scaling", scaling=scaling, theta=10000.0):
        AttentionSpec(16, 2, rope=Rope(scaling=scaling))


def test_rope_repr_shows_theta_and_fields():
    """The repr of RoPE shows its base and fields that differ from their defaults."""
    assert repr(Rope(500)) == "Rope(theta=500.0)"
    rope = Rope(scaling=LinearScaling(8.0), rotary_dim=4, pairs="interleaved")
    assert repr(rope) == (
        "Rope(theta=10000.0, scaling=LinearScaling(factor=8.0), rotary_dim=4, pairs='interleaved')"
    )


def test_every_kind_of_scaling_survives_json():
    """ROPES includes every kind of scaling."""
    assert {rope.scaling.kind for rope in ROPES if rope.scaling} == SCALINGS.keys()


@pytest.mark.parametrize(
    ("scaling", "input_error"),
    [
        ('{"kind": "ntk", "factor": 2}', rejects("scaling", scaling=...)),
        ('{"factor": 2}', rejects("scaling", scaling=...)),
        ("2", rejects("scaling", scaling=2)),
        ('{"kind": "linear"}', rejects("scaling", missing=...)),
        ('{"kind": "linear", "factor": 2, "beta": 1}', rejects("scaling", unexpected=...)),
    ],
)
def test_json_of_invalid_scaling_raises(scaling, input_error):
    """JSON of a scaling with an unknown or missing kind, or with wrong keys, raises an error."""
    with input_error:
        AttentionSpec.from_json(
            f'{{"d_model": 8, "num_heads": 2, "rope": {{"theta": 1e4, "scaling": {scaling}}}}}'
        )


INVALID_ROPES = [
    (lambda: Rope(scaling=8.0), rejects_type("scaling", scaling=8.0)),
    (lambda: Rope(rotary_dim=3), rejects("rotary_dim", rotary_dim=3)),
    (lambda: Rope(rotary_dim=4.0), rejects_type("rotary_dim", rotary_dim=4.0)),
    (lambda: Rope(rotated="middle"), rejects("rotated", rotated="middle")),
    (lambda: Rope(pairs="odd"), rejects("pairs", pairs="odd")),
    (lambda: Rope(section_order="x"), rejects("section_order", section_order="x")),
    (
        lambda: Rope(section_frequencies="x"),
        rejects("section_frequencies", section_frequencies="x"),
    ),
    (lambda: Rope(section_frequencies="own"), rejects("sections", sections=None)),
    (
        lambda: Rope(sections=(3, 1), section_frequencies="strided"),
        rejects("sections", sections=(3, 1)),
    ),
    (
        lambda: Rope(scaling=LinearScaling(4.0), sections=(2, 2), section_frequencies="own"),
        rejects("scaling", scaling=LinearScaling(4.0)),
    ),
    (lambda: Rope(pairs=np.array([1, 2])), rejects("pairs", pairs=...)),
    (lambda: Rope(10**400), rejects("theta", theta=...)),
    (lambda: Rope(sections=3), rejects_type("sections", sections=3)),
    (lambda: Rope(sections=(4,)), rejects("sections", sections=(4,))),
    (lambda: Rope(sections=(2, 0)), rejects("sections", sections=0)),
    (
        lambda: Rope(rotary_dim=4, scaling=ProportionalScaling(0.5)),
        rejects("rotary_dim", rotary_dim=4),
    ),
    (lambda: LinearScaling(0.0), rejects("factor", factor=0.0)),
    (lambda: LinearScaling("2"), rejects_type("factor", factor="2")),
    (lambda: DynamicScaling(2.0, 8.0), rejects_type("original_length", original_length=8.0)),
    (
        lambda: Llama3Scaling(8.0, 64, 4.0, 4.0),
        rejects("high_freq_factor", high_freq_factor=4.0, low_freq_factor=4.0),
    ),
    (
        lambda: YarnScaling(4.0, 64, 1.0, 1.0),
        rejects("beta_fast", beta_fast=1.0, beta_slow=1.0),
    ),
    (
        lambda: YarnScaling(4.0, 64, mscale=1.0),
        rejects("mscale and mscale_all_dim", mscale=1.0, mscale_all_dim=None),
    ),
    (
        lambda: YarnScaling(4.0, 64, attention_factor=1.0, mscale=1.0, mscale_all_dim=1.0),
        rejects("attention_factor", attention_factor=1.0, mscale=1.0),
    ),
    (lambda: YarnScaling(4.0, 64, truncate=1), rejects_type("truncate", truncate=1)),
    (lambda: LongRopeScaling(4.0, 8, (1.0,), (1.0, 2.0)), rejects("short_factors", "1 and 2")),
    (
        lambda: LongRopeScaling(4.0, 8, 1.0, (1.0,)),
        rejects_type("short_factors", short_factors=1.0),
    ),
    (
        lambda: LongRopeScaling(4.0, 8, (-1.0,), (1.0,)),
        rejects("short_factors", short_factors=-1.0),
    ),
    (
        lambda: LongRopeScaling(4.0, 1, (1.0,), (1.0,)),
        rejects("original_length", original_length=1),
    ),
    (lambda: ProportionalScaling(1.5), rejects("fraction", fraction=1.5)),
]


def test_invalid_rope_raises(subtests):
    """Invalid fields and combinations of RoPE and its scalings raise an error that names them."""
    for make, input_error in INVALID_ROPES:
        with subtests.test(str(input_error)), input_error:
            make()


@pytest.mark.parametrize(
    ("rope", "input_error"),
    [
        (Rope(rotary_dim=10), rejects("rotary_dim", rotary_dim=10, head_dim=8)),
        (Rope(rotary_dim=2, scaling=DynamicScaling(2.0, 8)), rejects("rotated features", "2")),
        (Rope(0.5, scaling=YarnScaling(4.0, 64)), rejects("theta", theta=0.5)),
        (Rope(scaling=LONGROPE), rejects("short_factors and long_factors", "2")),
        (Rope(sections=(2, 1)), rejects("sections", sections=(2, 1))),
        (
            Rope(sections=(1, 1, 2), section_order="interleaved"),
            rejects("interleaved sections", "sections=(1, 1, 2), which would have (2, 1, 1)"),
        ),
    ],
)
def test_rope_that_does_not_fit_heads_raises(rope, input_error):
    """RoPE whose features, sections or factors do not fit heads of 8 raises an error."""
    with input_error:
        AttentionSpec(16, 2, rope=rope)


ROUGH = (5e-324, 1e-300, 1e300, math.inf, math.nan, -1.0, 0.0, 10**39, 1.2e-38, 3.4e38, 1e-20, 1e20)
MAKES = {
    "theta": lambda x: {"rope": Rope(x)},
    "linear": lambda x, theta: {"rope": Rope(theta, scaling=LinearScaling(x))},
    "dynamic": lambda x, theta: {"rope": Rope(theta, scaling=DynamicScaling(x, 8))},
    "llama3": lambda x, y, theta: {"rope": Rope(theta, scaling=Llama3Scaling(4.0, 64, x, y))},
    "llama3 factor": lambda x, theta: {"rope": Rope(theta, scaling=Llama3Scaling(x, 64))},
    "yarn": lambda x, y, theta: {"rope": Rope(theta, scaling=YarnScaling(4.0, 64, x, y))},
    "yarn slow": lambda x: {"rope": Rope(scaling=YarnScaling(4.0, 64, beta_slow=x))},
    "yarn fast": lambda x, truncate: {
        "rope": Rope(scaling=YarnScaling(4.0, 64, x, truncate=truncate > 1.0))
    },
    "yarn factor": lambda x, y: {"rope": Rope(scaling=YarnScaling(x, 64, attention_factor=y))},
    "yarn mscale": lambda x, y: {
        "rope": Rope(scaling=YarnScaling(4.0, 64, mscale=x, mscale_all_dim=y))
    },
    "longrope": lambda x, y, theta: {
        "rope": Rope(theta, scaling=LongRopeScaling(4.0, 8, (1.0, x), (1.0, y)))
    },
    "longrope factor": lambda x, y: {
        "rope": Rope(scaling=LongRopeScaling(x, 8, (1.0,) * 2, (1.0,) * 2, y))
    },
    "proportional": lambda x, y: {"rope": Rope(scaling=ProportionalScaling(x, y))},
    "alibi": lambda x: {"alibi": Alibi(x), "scale": x},
    "norm": lambda x: {"qk_norm": Norm(eps=x)},
    "temperature": lambda x: {"temperature": Temperature(8, x)},
    "latent": lambda x, y: {"latent": Latent(4, 2, q_rank=4, q_factor=x, kv_factor=y)},
    "latent eps": lambda x: {"latent": Latent(4, 2, eps=x)},
    "scale": lambda x: {"scale": x},
    "soft cap": lambda x, y: {"soft_cap": x, "scale": y},
    "clip": lambda x: {"clip_qkv": x},
    "dropout": lambda x: {"dropout": x, "output_dropout": x},
}
COUNTS = {
    "original length": lambda x: {"rope": Rope(scaling=Llama3Scaling(4.0, x))},
    "length": lambda x: {"temperature": Temperature(x)},
    "window": lambda x: {"window_size": x},
    "chunk": lambda x: {"chunk_size": x},
}


def reference_of(fields):
    """Compute a small layer by the reference, in float64; infinity and NaN are results."""
    case = Case("rough", AttentionSpec(8, 2, **fields), "", batch=2, seq_len=9, is_causal=True)
    with np.errstate(all="ignore"):
        return run_steps(reference.steps(make_problem(case, "float32"), "float64"))["output"]


@pytest.mark.parametrize("name", MAKES)
def test_rough_numbers_raise_or_are_computed(name):
    """Extreme values raise an error, or have finite frequencies and scales and can be computed."""
    make = MAKES[name]
    num_rejected = 0
    accepted = []
    for numbers in itertools.product(ROUGH, repeat=make.__code__.co_argcount):
        try:
            fields = make(*numbers)
            spec = AttentionSpec(8, 2, **fields)
        except InputError:
            num_rejected += 1
            continue
        accepted.append(fields)
        if spec.rope is not None:  # warnings of overflow would be errors here
            lengths = (0, 9, 2**31)
            assert all(np.isfinite(spec.rope.frequencies(4, length)).all() for length in lengths), (
                spec
            )
            assert np.isfinite(np.float32(spec.rope.attention_factor)), spec
        assert math.isfinite(np.float32(spec.score_scale)), spec
    assert num_rejected >= len(ROUGH) // 2
    assert accepted
    for fields in accepted[:: -(-len(accepted) // 4)]:  # at most four of them
        assert reference_of(fields).shape == (2, 9, 8)


@pytest.mark.parametrize("name", COUNTS)
def test_counts_beyond_64_bits_raise(name):
    """A count beyond 64 bits raises an error; 2^31 - 1 has a finite output."""
    with pytest.raises(InputError, match="at most 9223372036854775807"):
        AttentionSpec(8, 2, **COUNTS[name](10**39))
    assert np.isfinite(reference_of(COUNTS[name](2**31 - 1))).all()


def test_yarn_json_with_tiny_beta_raises():
    """A denormal `beta_slow` in JSON raises an error."""
    text = AttentionSpec(8, 2, rope=Rope(scaling=YarnScaling(4.0, 16))).to_json()
    with rejects("beta_slow", beta_slow=5e-324):
        AttentionSpec.from_json(text.replace('"beta_slow": 1.0', '"beta_slow": 5e-324'))


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.trained])
def test_trained_case_matches_its_file(name):
    """A trained case has the specification, sizes, lengths and causality of its file."""
    case = CASES[name]
    assert case.trained is not None
    tensors, metadata = load_tensors(pretrained.path(case.trained))
    assert case.spec == AttentionSpec.from_json(metadata["spec"])
    assert tensors["inputs.query"].shape == (case.batch, case.seq_len, case.spec.d_in)
    lengths = json.loads(metadata["key_padding_lengths"])
    assert case.key_padding_lengths == (None if lengths is None else tuple(lengths))
    assert case.is_cached or case.is_causal == (metadata["is_causal"] == "true")


def test_cached_cases_fit_their_capacity():
    """Chunks of cases with a cache add up to their tokens and fit its capacity."""
    cached = [case for case in CASES.values() if case.is_cached]
    assert cached
    assert all(sum(case.chunks) == case.seq_len for case in cached)
    assert all(max(case.lengths_before(len(case.chunks))) <= case.capacity for case in cached)


def test_random_case_is_deterministic():
    """A seed always draws the same random case, and another seed a different one."""
    assert random_case(3) == random_case(3)
    assert random_case(3) != random_case(4)


@pytest.mark.nightly
def test_random_cases_are_valid_and_unique():
    """All random cases that `run --random` accepts are valid, with different names."""
    assert len({random_case(seed).name for seed in range(MOST_RANDOM)}) == MOST_RANDOM


def test_random_cases_draw_every_feature():
    """The first six random cases, which are among the cases,
    stay plain; later ones vary every feature.
    """
    features = {field.name for field in fields(AttentionSpec)} - {
        "d_model",
        "dropout",
        "output_dropout",
    }
    plain, drawn = (
        [random_case(seed).spec for seed in seeds] for seeds in (range(6), range(6, 80))
    )
    assert {
        name for name in features if len({getattr(spec, name) for spec in drawn}) > 1
    } == features
    assert {spec.value_head_dim == spec.head_dim for spec in plain} == {True}
    assert {(spec.qk_norm, spec.gate, spec.temperature, spec.window_size) for spec in plain} == {
        (None,) * 4
    }


def test_case_is_found_by_name():
    """`case_named` finds cases of the list, and random cases by their seed."""
    assert case_named("rope-gqa") is CASES["rope-gqa"]
    assert case_named("random-7") == random_case(7)


def test_unknown_case_raises_an_error():
    """An unknown case raises an error with the name."""
    with rejects("case", case="ropegqa", hint="rope-gqa"):
        case_named("ropegqa")


def has_scaling(case):
    return case.spec.rope is not None and case.spec.rope.scaling is not None


def test_cases_cover_all_attention_features():
    """The list of cases covers every feature of attention."""
    cases = CASES.values()
    covered = {
        "causal": any(case.is_causal for case in cases),
        "empty row": any(0 in (case.key_padding_lengths or ()) for case in cases),
        "cross": any(case.spec.d_kv != case.spec.d_in for case in cases),
        "grouped": any(1 < case.spec.num_kv_heads < case.spec.num_heads for case in cases),
        "single key/value head": any(
            case.spec.num_kv_heads == 1 < case.spec.num_heads for case in cases
        ),
        "groups that differ from heads": any(
            len(
                {
                    case.spec.num_heads,
                    case.spec.num_kv_heads,
                    case.spec.num_heads // case.spec.num_kv_heads,
                }
            )
            == 3
            for case in cases
        ),
        "free head_dim": any(case.spec.q_width != case.spec.d_model for case in cases),
        "narrow values": any(case.spec.value_head_dim < case.spec.head_dim for case in cases),
        "wide values": any(case.spec.value_head_dim > case.spec.head_dim for case in cases),
        "narrow values with a cache": any(
            case.spec.value_head_dim < case.spec.head_dim for case in cases if case.is_cached
        ),
        "one query": any(case.seq_len == 1 for case in cases),
        "one key": any(case.seq_len_k == 1 for case in cases),
        "ragged": any(case.new_lengths for case in cases),
        **{
            f"norm {kind}, {over}, weight {weight}": any(
                (norm.kind, norm.over, norm.weight) == (kind, over, weight)
                for case in cases
                for norm in case.spec.norms.values()
            )
            for kind, over, weight in (
                ("rms", "head", "w"),
                ("rms", "head", "1+w"),
                ("rms", "width", "w"),
            )
        },
        "norm without a weight": any(
            norm.weight is None for case in cases for norm in case.spec.norms.values()
        ),
        "layer norm for each head": any(
            norm.kind == "layer" and norm.per_head
            for case in cases
            for norm in case.spec.norms.values()
        ),
        "norm after RoPE": any(
            norm.after_rope for case in cases for norm in case.spec.norms.values()
        ),
        "biases of some": any(isinstance(case.spec.qkv_bias, tuple) for case in cases),
        "gate": any(case.spec.gate and not case.spec.gate.per_head for case in cases),
        "gate of each head": any(case.spec.gate and case.spec.gate.per_head for case in cases),
        "gate with a cache": any(case.spec.gate for case in cases if case.is_cached),
        "temperature without RoPE": any(
            case.spec.temperature and not case.spec.rope for case in cases
        ),
        "temperature after RoPE": any(case.spec.temperature and case.spec.rope for case in cases),
        "temperature with a cache": any(case.spec.temperature for case in cases if case.is_cached),
        "latents": any(
            case.spec.latent and case.spec.latent.q_rank for case in cases if not case.is_cached
        ),
        "latents of keys and values alone": any(
            case.spec.latent and not case.spec.latent.q_rank for case in cases
        ),
        "latents with a cache": any(case.spec.latent for case in cases if case.is_cached),
        "latents without RoPE": any(case.spec.latent and not case.spec.rope for case in cases),
        "clipped": any(case.spec.clip_qkv for case in cases if not case.is_cached),
        "clipped with a cache": any(case.spec.clip_qkv for case in cases if case.is_cached),
        "sinks": any(case.spec.sinks for case in cases if not case.is_cached),
        "ALiBi": any(case.spec.alibi for case in cases if not case.is_cached),
        "ALiBi with a cache": any(case.spec.alibi for case in cases if case.is_cached),
        **{
            f"{kind.__name__}, {'with' if cached else 'without'} a cache": any(
                isinstance(case.spec.relative_bias, kind) and case.is_cached == cached
                for case in cases
            )
            for kind in (RelativeBias, GridBias)
            for cached in (False, True)
        },
        **{
            f"relative products of {side}, {'with' if cached else 'without'} a cache": any(
                getattr(case.spec.relative_products, side, False) and case.is_cached == cached
                for case in cases
            )
            for side in ("of_queries", "of_keys")
            for cached in (False, True)
        },
        "steps of the logarithm": any(
            getattr(case.spec.relative_products, "num_exact", None) for case in cases
        ),
        "sinks with a cache": any(case.spec.sinks for case in cases if case.is_cached),
        "norm of values": any(case.spec.v_norm for case in cases),
        "shared keys and values": any(case.spec.shared_kv for case in cases if not case.is_cached),
        "shared keys and values with a cache": any(
            case.spec.shared_kv for case in cases if case.is_cached
        ),
        "norm of the context": any(case.spec.context_norm for case in cases if not case.is_cached),
        "norm of the context with a cache": any(
            case.spec.context_norm for case in cases if case.is_cached
        ),
        "norm with a cache": any(case.spec.norms for case in cases if case.is_cached),
        **{
            f"{kind} NaN, {'with' if cached else 'without'} a cache": any(
                (case.not_finite, case.is_cached) == (kind, cached) for case in cases
            )
            for kind in ("visible", "hidden")
            for cached in (False, True)
        },
        "gradients beside NaN": any(case.not_finite and case.has_gradients for case in cases),
        **{
            f"RoPE with {name}": any(holds(case.spec.rope) for case in cases if case.spec.rope)
            for name, holds in {
                "rotary_dim": lambda rope: rope.rotary_dim,
                "the last features": lambda rope: rope.rotated == "last",
                "neighbours": lambda rope: rope.pairs == "interleaved",
                "sections": lambda rope: rope.sections and rope.section_order == "contiguous",
                "interleaved sections": lambda rope: (
                    rope.sections and rope.section_order == "interleaved"
                ),
                "a series for each axis": lambda rope: rope.section_frequencies == "own",
                "a series that is strided": lambda rope: rope.section_frequencies == "strided",
                **{
                    kind: lambda rope, kind=kind: rope.scaling and rope.scaling.kind == kind
                    for kind in SCALINGS
                },
            }.items()
        },
        "scaled RoPE and a cache": {
            case.spec.rope.scaling.kind for case in cases if case.is_cached and has_scaling(case)
        }
        >= {"dynamic", "longrope", "yarn"},
        "positions far out": any(case.first_position > 40000 for case in cases),
        "positions across the original length": any(
            case.first_position and case.is_cached for case in cases
        ),
        "trained": sum(case.trained is not None for case in cases) >= 5,
    }
    assert [name for name, is_covered in covered.items() if not is_covered] == []


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        ("scores", Stage("scores")),
        ("step12.scores", Stage("scores", step=12)),
        ("step3.module.cache.keys", Stage("cache.keys", "module", step=3)),
        ("grad.q_proj.weight", Stage("q_proj.weight", is_gradient=True)),
        ("blocks.grad.bias", Stage("bias", "blocks", is_gradient=True)),
        ("stepwise.scores", Stage("stepwise.scores")),
        ("stepwise", Stage("stepwise")),
        ("degrad.x", Stage("degrad.x")),
        ("fused_output", Stage("fused_output")),
        ("", Stage("")),
    ],
)
def test_stage_name_round_trips(name, stage):
    """A name of a stage is parsed into its parts and printed unchanged."""
    assert stage_named(name) == stage
    assert str(stage) == name


def test_exact_stages_are_mask_and_lengths():
    """Only the mask and the lengths of the cache are compared exactly."""
    exact = [name for name in STAGES if stage_named(name).is_exact]
    assert exact == ["mask", "cache.lengths", "module.cache.lengths"]


def test_stage_name_determines_kind_and_axes():
    """The name of a stage determines its kind and its axes."""
    assert stage_named("step12.cache.keys").kind == "cache.keys"
    assert stage_named("step12.cache.keys").axes == STAGES["cache.keys"]
    assert stage_named("fused.grad.q_proj.weight").axes == ("out", "in")
    assert stage_named("grad.q_proj.bias").axes == ("out",)
    assert (
        stage_named("fused.grad.query").axes
        == stage_named("blocks.grad.query").axes
        == ("B", "T", "d_in")
    )


def test_stage_name_includes_its_path():
    """The name of a stage includes its path, which is empty for stages without one."""
    assert (
        stage_named("blocks.grad.q_proj.weight").path
        == stage_named("step3.blocks.output").path
        == "blocks"
    )
    assert stage_named("step3.module.cache.keys").path == "module"
    assert (
        stage_named("cache.keys").path
        == stage_named("grad.query").path
        == stage_named("step3.scores").path
        == ""
    )


def test_weight_shapes_are_in_torch_order():
    """Weights have torch's order (out, in), with separate widths of queries, keys and output."""
    spec = AttentionSpec(10, 6, num_kv_heads=2, head_dim=4, d_in=7, d_kv=9)
    assert weight_shapes(spec) == {
        "q_proj.weight": (24, 7),
        "q_proj.bias": (24,),
        "k_proj.weight": (8, 9),
        "k_proj.bias": (8,),
        "v_proj.weight": (8, 9),
        "v_proj.bias": (8,),
        "out_proj.weight": (10, 24),
        "out_proj.bias": (10,),
    }


def test_cache_of_80_layers_is_20_gib():
    """A cache of 8192 tokens in float16, with 64 heads of 128 and 80 layers, has 20 GiB."""
    spec = AttentionSpec(64 * 128, 64)
    assert spec.cache_nbytes(1, 8192, np.dtype(np.float16), num_layers=80) == 20 * 2**30


def test_frequencies_are_powers_of_theta():
    """For a theta of 1000 and 6 features, the frequencies are 1, 0.1 and 0.01."""
    # theta ** (-2 i / H) for i = 0, 1, 2 and H = 6: 1, 1000 ** (-1/3), 1000 ** (-2/3). In float32,
    # rounding affects the exponents (multiplied by ln(1000) < 7), the powers and their reciprocals.
    assert Rope(1000.0).frequencies(6) == pytest.approx(
        [1.0, 0.1, 0.01], rel=4.5 * float(np.finfo(np.float32).eps)
    )

"""The specification of a layer, and the list of cases."""

import json
import math
from dataclasses import fields, replace

import numpy as np
import pytest

from mha_spec import (
    Alibi,
    DynamicScaling,
    Gate,
    Latent,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    Norm,
    ProportionalScaling,
    RelativeBias,
    Rope,
    Temperature,
    YarnScaling,
)
from mha_spec.scaling import SCALINGS
from parity import CASES, AttentionSpec, pretrained, random_case
from parity.cli.run import MOST_RANDOM
from parity.core.cases import case_named
from parity.core.stages import STAGES, Stage, stage_named
from parity.core.weights import load_tensors, weight_shapes


def test_spec_fills_in_the_sizes_left_out():
    spec = AttentionSpec(32, 4)
    assert (spec.num_kv_heads, spec.head_dim, spec.d_in, spec.d_kv, spec.value_head_dim) == (4, 8, 32, 32, 8)
    assert AttentionSpec(32, 4, head_dim=12).value_head_dim == 12


def test_spec_takes_the_key_width_from_the_query_width():
    assert AttentionSpec(32, 4, d_in=24).d_kv == 24


def test_spec_keeps_plain_numbers():
    numbers = {"window_size": np.int64(4), "scale": np.float32(0.5), "rope": Rope(sections=np.array([2, 1, 1]))}
    spec = AttentionSpec(np.int64(32), 4, sinks=np.bool_(True), **numbers)
    same = AttentionSpec(32, 4, window_size=4, scale=0.5, rope=Rope(sections=(2, 1, 1)), sinks=True)
    assert (spec, spec.to_json()) == (same, same.to_json())
    assert AttentionSpec(32, 4, chunk_size=np.int32(3)).to_json() == AttentionSpec(32, 4, chunk_size=3).to_json()


def test_spec_never_derives_a_head_dim_that_is_given():
    assert AttentionSpec(30, 4, head_dim=12).q_width == 48


def test_values_of_another_width_have_projections_of_their_own_width():
    spec = AttentionSpec(32, 4, num_kv_heads=2, value_head_dim=12, v_norm=Norm(), gate=Gate())
    assert (spec.q_width, spec.k_width, spec.v_width, spec.context_width, spec.output_width) == (32, 16, 24, 48, 32)
    assert weight_shapes(spec) | {"v_norm.weight": (12,)} == weight_shapes(spec)
    shapes = {name: weight_shapes(spec)[f"{name}_proj.weight"] for name in ("q", "k", "v", "out", "gate")}
    assert shapes == {"q": (32, 32), "k": (16, 32), "v": (24, 32), "out": (32, 48), "gate": (48, 32)}
    assert replace(spec, fused_qkv=True).held_shapes["qkv_proj.weight"] == (72, 32)
    assert replace(spec, out_proj=False).output_width == 48
    assert spec.cache_nbytes(2, 5, np.dtype(np.float32)) == 2 * 5 * (16 + 24) * 4
    assert AttentionSpec.from_json(spec.to_json()) == spec


LATENT = {"d_model": 8, "num_heads": 2, "latent": Latent(6, 2)}


@pytest.mark.parametrize(
    ("keywords", "error", "message"),
    [
        ({"d_model": 10, "num_heads": 4}, ValueError, "d_model must be a multiple of num_heads, got d_model=10"),
        ({"d_model": 0, "num_heads": 4}, ValueError, "d_model must be at least 1"),
        ({"d_model": 8.0, "num_heads": 4}, TypeError, "d_model must be an integer"),
        ({"d_model": 8, "num_heads": True}, TypeError, "num_heads must be an integer"),
        ({"d_model": 8, "num_heads": 4, "num_kv_heads": 3}, ValueError, "num_heads must be a multiple"),
        ({"d_model": 8, "num_heads": 4, "head_dim": -1}, ValueError, "head_dim must be at least 1"),
        ({"d_model": 8, "num_heads": 4, "value_head_dim": 0}, ValueError, "value_head_dim must be at least 1"),
        ({"d_model": 8, "num_heads": 4, "value_head_dim": 2.0}, TypeError, "value_head_dim must be an integer"),
        ({"d_model": 6, "num_heads": 2, "rope": Rope()}, ValueError, "head_dim must be even for RoPE"),
        ({"d_model": 8, "num_heads": 2, "rope": 1e4}, TypeError, "rope must be a Rope or None"),
        ({"d_model": 8, "num_heads": 2, "dropout": math.nan}, ValueError, "dropout must be at least 0 and below 1"),
        ({"d_model": 8, "num_heads": 2, "dropout": "0.5"}, TypeError, "dropout must be a number, got dropout='0.5'"),
        ({"d_model": 8, "num_heads": 2, "output_dropout": False}, TypeError, "output_dropout must be a number"),
        (
            {"d_model": 8, "num_heads": 2, "qkv_bias": (True, False)},
            ValueError,
            "qkv_bias must be one boolean, or three",
        ),
        (
            {"d_model": 8, "num_heads": 2, "qkv_bias": (1, 0, 1)},
            TypeError,
            "qkv_bias must be a boolean, got qkv_bias=1",
        ),
        (
            {"d_model": 8, "num_heads": 2, "qkv_bias": (True, False, True), "fused_qkv": True},
            ValueError,
            "qkv_bias must be one boolean with fused_qkv",
        ),
        ({"d_model": 8, "num_heads": 2, "qkv_bias": "no"}, TypeError, "qkv_bias must be a boolean, got qkv_bias='no'"),
        ({"d_model": 8, "num_heads": 2, "out_bias": 1}, TypeError, "out_bias must be a boolean, got out_bias=1"),
        ({"d_model": 8, "num_heads": 2, "out_proj": None}, TypeError, "out_proj must be a boolean"),
        ({"d_model": 8, "num_heads": 2, "fused_qkv": "x"}, TypeError, "fused_qkv must be a boolean"),
        ({"d_model": 8, "num_heads": 2, "d_kv": 4, "rope": Rope()}, ValueError, "d_kv must equal d_in with RoPE"),
        ({"d_model": 8, "num_heads": 2, "dropout": 1.0}, ValueError, "dropout must be at least 0 and below 1"),
        ({"d_model": 8, "num_heads": 2, "d_kv": 4, "fused_qkv": True}, ValueError, "d_kv must equal d_in"),
        ({"d_model": 8, "num_heads": 2, "qk_norm": "rms"}, TypeError, "qk_norm must be a Norm or None"),
        ({"d_model": 8, "num_heads": 2, "gate": True}, TypeError, "gate must be a Gate or None, got gate=True"),
        ({"d_model": 8, "num_heads": 2, "temperature": 8192}, TypeError, "temperature must be a Temperature"),
        (
            {"d_model": 8, "num_heads": 1, "temperature": Temperature(4), "rope": Rope(sections=(2, 1, 1))},
            ValueError,
            "temperature must be None with positions on several axes",
        ),
        (LATENT | {"latent": 16}, TypeError, "latent must be a Latent or None, got latent=16"),
        (
            LATENT | {"num_kv_heads": 1},
            ValueError,
            "num_kv_heads must be 2 with latent, got num_kv_heads=1 and latent=",
        ),
        (LATENT | {"d_kv": 4}, ValueError, "d_kv must be 8 with latent, got d_kv=4"),
        (LATENT | {"fused_qkv": True}, ValueError, "fused_qkv must be False with latent, got fused_qkv=True"),
        (LATENT | {"qk_norm": Norm()}, ValueError, "qk_norm must be None with latent, got qk_norm=Norm"),
        (LATENT | {"v_norm": Norm()}, ValueError, "v_norm must be None with latent, got v_norm=Norm"),
        (LATENT | {"clip_qkv": 1.0}, ValueError, "clip_qkv must be None with latent, got clip_qkv=1.0"),
        (LATENT | {"head_dim": 2}, ValueError, "rope_dim must be less than head_dim, got rope_dim=2 and head_dim=2"),
        (LATENT | {"qkv_bias": (True, True, False)}, ValueError, "qkv_bias must be the same for k and v with latent"),
        (LATENT | {"rope": Rope()}, ValueError, "rope must rotate the last rope_dim features with latent"),
        (LATENT | {"rope": Rope(rotary_dim=2)}, ValueError, r"rotary_dim=2, rotated='last'\), got rope=Rope\("),
        ({"d_model": 8, "num_heads": 2, "alibi": True}, TypeError, "alibi must be an Alibi or None, got alibi=True"),
        (
            {"d_model": 8, "num_heads": 2, "relative_bias": 32},
            TypeError,
            "relative_bias must be a RelativeBias or None",
        ),
        (
            {"d_model": 8, "num_heads": 2, "alibi": Alibi(), "relative_bias": RelativeBias()},
            ValueError,
            r"alibi must be None with a relative_bias, got alibi=Alibi\(.*\) and relative_bias=RelativeBias\(",
        ),
        ({"d_model": 8, "num_heads": 2, "sinks": 1}, TypeError, "sinks must be a boolean, got sinks=1"),
        ({"d_model": 8, "num_heads": 2, "clip_qkv": 0.0}, ValueError, "clip_qkv must be positive and finite"),
        ({"d_model": 8, "num_heads": 2, "clip_qkv": math.nan}, ValueError, "clip_qkv must be positive and finite"),
        ({"d_model": 8, "num_heads": 2, "clip_qkv": True}, TypeError, "clip_qkv must be a number"),
        ({"d_model": 8, "num_heads": 2, "v_norm": True}, TypeError, "v_norm must be a Norm or None"),
        ({"d_model": 8, "num_heads": 2, "qk_norm": Norm(after_rope=True)}, ValueError, "qk_norm must come with RoPE"),
        (
            {"d_model": 8, "num_heads": 2, "v_norm": Norm(after_rope=True)},
            ValueError,
            "v_norm must not come after RoPE",
        ),
    ],
)
def test_spec_refuses_what_does_not_fit(keywords, error, message):
    with pytest.raises(error, match=message):
        AttentionSpec(**keywords)


@pytest.mark.parametrize(
    ("keywords", "error", "message"),
    [
        ({"kind": "batch"}, ValueError, "kind must be one of"),
        ({"over": "tokens"}, ValueError, "over must be one of"),
        ({"weight": True}, ValueError, "weight must be one of"),
        ({"kind": np.array(["rms", "layer"])}, ValueError, "kind must be one of"),
        ({"eps": 0}, ValueError, "eps must be positive and finite, got eps=0.0"),
        ({"eps": "small"}, TypeError, "eps must be a number"),
        ({"bias": 1}, TypeError, "bias must be a boolean"),
        ({"bias": True, "weight": None}, ValueError, "bias must come with a weight, got bias=True and weight=None"),
        ({"per_head": True, "weight": None}, ValueError, "per_head must come with a weight"),
        ({"per_head": True, "over": "width"}, ValueError, "per_head must come with over='head'"),
        ({"after_rope": True, "over": "width"}, ValueError, "after_rope must come with over='head'"),
    ],
)
def test_a_norm_refuses_what_contradicts_itself(keywords, error, message):
    with pytest.raises(error, match=message):
        Norm(**keywords)


def test_norms_have_the_parameters_that_they_ask_for():
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
    ("keywords", "error", "message"),
    [
        ({"length": 0}, ValueError, "length must be at least 1"),
        ({"length": 8192.0}, TypeError, "length must be an integer"),
        ({"length": 4, "scale": 0.0}, ValueError, "scale must be positive and finite"),
        ({"length": 4, "first_position": -1}, ValueError, "first_position must be at least 0"),
    ],
)
def test_a_temperature_refuses_what_is_none(keywords, error, message):
    with pytest.raises(error, match=message):
        Temperature(**keywords)


def test_a_temperature_is_kept_in_json():
    spec = AttentionSpec(8, 2, temperature=Temperature(4, 0.5, first_position=1))
    assert AttentionSpec.from_json(spec.to_json()) == spec
    assert spec.has_positions
    assert not AttentionSpec(8, 2).has_positions


def test_a_gate_adds_a_projection():
    spec = AttentionSpec(8, 2, num_kv_heads=1, d_in=6, gate=Gate(bias=True))
    assert weight_shapes(spec)["gate_proj.weight"] == (8, 6)
    assert weight_shapes(spec)["gate_proj.bias"] == (8,)
    assert weight_shapes(AttentionSpec(8, 2, gate=Gate(per_head=True)))["gate_proj.weight"] == (2, 8)
    assert AttentionSpec.from_json(spec.to_json()) == spec
    with pytest.raises(TypeError, match="per_head must be a boolean, got per_head=1"):
        Gate(per_head=1)


def test_sinks_are_a_number_for_each_query_head():
    spec = AttentionSpec(8, 4, num_kv_heads=2, qk_norm=Norm(), sinks=True)
    assert list(spec.parameters.items())[-1] == ("sinks", (4,))
    assert AttentionSpec.from_json(spec.to_json()) == spec
    assert "sinks" not in weight_shapes(AttentionSpec(8, 4))


def test_latents_have_projections_and_norms_of_their_own():
    spec = AttentionSpec(
        *(16, 2),
        head_dim=6,
        value_head_dim=5,
        qkv_bias=(True, False, False),
        out_bias=False,
        latent=Latent(7, 2, q_rank=9, eps=1e-5, q_factor=1.5, kv_factor=2),
        rope=Rope(rotary_dim=2, rotated="last", scaling=YarnScaling(4.0, 64, mscale=1.0, mscale_all_dim=0.5)),
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
    ("keywords", "error", "message"),
    [
        ({"q_rank": 3, "q_factor": 0.0}, ValueError, "q_factor must be positive and finite, got q_factor=0.0"),
        ({"kv_factor": math.inf}, ValueError, "kv_factor must be positive and finite, got kv_factor=inf"),
        ({"kv_factor": "2"}, TypeError, "kv_factor must be a number, got kv_factor='2'"),
        ({"q_factor": 2.0}, ValueError, "q_factor must be 1 without q_rank, got q_factor=2.0"),
    ],
)
def test_factors_of_latents_that_are_none_are_refused(keywords, error, message):
    with pytest.raises(error, match=message):
        Latent(6, 2, **keywords)


def test_absorbed_is_attention_over_latents():
    spec = AttentionSpec(16, 2, head_dim=6, value_head_dim=5, latent=Latent(7, 2), sinks=True, window_size=4)
    widths = {"num_kv_heads": 1, "head_dim": 9, "value_head_dim": 7}
    assert spec.absorbed == replace(spec, latent=None, scale=spec.score_scale, **widths)
    with pytest.raises(ValueError, match="spec must have latents, got spec=AttentionSpec"):
        AttentionSpec(16, 2).absorbed  # noqa: B018


def test_latents_are_absorbed_where_that_costs_less():
    deepseek = AttentionSpec(7168, 128, head_dim=192, value_head_dim=128, latent=Latent(512, 64, q_rank=1536))
    assert deepseek.absorbs(1)
    assert deepseek.absorbs(170)
    assert not deepseek.absorbs(171)
    assert deepseek.absorbs(171, 172)  # of which one slot is empty, for all that is known
    assert deepseek.absorbs(2048, 32768)
    assert not deepseek.absorbs(4096, 32768)


def test_slopes_of_alibi_are_those_of_the_paper():
    assert Alibi().slopes(8) == tuple(2.0**-n for n in range(1, 9))
    assert Alibi().slopes(6) == tuple(2.0**-n for n in (2, 4, 6, 8, 1, 3))
    assert Alibi().slopes(1) == (2.0**-8,)
    spec = AttentionSpec(32, 2, alibi=Alibi(max_bias=4, scaled=True))
    assert spec.alibi_slopes == (0.25 * 2.0**-2, 0.25 * 2.0**-4)
    assert AttentionSpec.from_json(spec.to_json()) == spec
    assert AttentionSpec(32, 2).alibi_slopes is None


@pytest.mark.parametrize(
    ("keywords", "error", "message"),
    [
        ({"max_bias": 0.0}, ValueError, "max_bias must be positive and finite"),
        ({"max_bias": "8"}, TypeError, "max_bias must be a number"),
        ({"scaled": 1}, TypeError, "scaled must be a boolean, got scaled=1"),
    ],
)
def test_alibi_refuses_what_does_not_fit(keywords, error, message):
    with pytest.raises(error, match=message):
        Alibi(**keywords)


def test_a_relative_bias_has_a_number_for_each_bucket_and_head():
    spec = AttentionSpec(8, 4, num_kv_heads=2, sinks=True, relative_bias=RelativeBias(6, 5, bidirectional=False))
    assert list(spec.parameters.items()) == [("sinks", (4,)), ("relative_bias", (6, 4))]
    assert AttentionSpec.from_json(spec.to_json()) == spec
    assert hash(AttentionSpec.from_json(spec.to_json())) == hash(spec)
    assert spec.has_distance_bias
    assert not AttentionSpec(8, 4).has_distance_bias
    assert {name for name in weight_shapes(AttentionSpec(8, 4)) if "relative" in name} == set()


def test_buckets_grow_with_the_logarithm_of_the_distance():
    """Of 4 in a direction: 0, 1, then 2 from 2 and 3 from 4 = sqrt(2 * 8) on."""
    before = [3, 3, 3, 3, 3, 2, 2, 1, 0]
    assert RelativeBias(4, 8, bidirectional=False).buckets().tolist() == [*before, *[0] * 8]
    assert RelativeBias(8, 8).buckets().tolist() == [*before, 5, 6, 6, 7, 7, 7, 7, 7]


@pytest.mark.parametrize(
    ("keywords", "error", "message"),
    [
        ({"num_buckets": 31}, ValueError, "num_buckets must be even if bidirectional, got num_buckets=31"),
        ({"num_buckets": 2}, ValueError, "num_buckets must be at least 4, got num_buckets=2"),
        ({"num_buckets": 1, "bidirectional": False}, ValueError, "num_buckets must be at least 2, got num_buckets=1"),
        ({"num_buckets": 32.0}, TypeError, "num_buckets must be an integer"),
        ({"max_distance": 8}, ValueError, "max_distance must be above the 8 distances .*, got max_distance=8"),
        (
            {"max_distance": 16, "bidirectional": False},
            ValueError,
            "max_distance must be above the 16 distances .*, got max_distance=16 and num_buckets=32",
        ),
        ({"bidirectional": 1}, TypeError, "bidirectional must be a boolean, got bidirectional=1"),
    ],
)
def test_a_relative_bias_refuses_what_does_not_fit(keywords, error, message):
    with pytest.raises(error, match=message):
        RelativeBias(**keywords)


def test_three_biases_are_kept_as_one_where_they_are_equal():
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
    spec = AttentionSpec(48, 6, rope=Rope(), qk_norm=Norm(weight="1+w", after_rope=True), v_norm=Norm(weight=None))
    assert AttentionSpec.from_json(spec.to_json()) == spec
    assert hash(AttentionSpec.from_json(spec.to_json())) == hash(spec)


def test_spec_survives_json():
    spec = AttentionSpec(48, 6, num_kv_heads=2, head_dim=16, rope=Rope(10000.0), out_bias=False)
    assert AttentionSpec.from_json(spec.to_json()) == spec


def test_spec_of_numpy_scalars_survives_json():
    numbers = {"rope": Rope(np.float32(1e4)), "dropout": np.float64(0.5), "output_dropout": np.int64(0)}
    spec = AttentionSpec(np.int64(8), np.int32(2), qkv_bias=np.False_, out_proj=np.True_, **numbers)
    assert spec == AttentionSpec(8, 2, qkv_bias=False, rope=Rope(1e4), dropout=0.5)
    assert AttentionSpec.from_json(spec.to_json()) == spec
    assert all(type(value) in (int, bool, float, Rope, type(None)) for value in vars(spec).values())
    assert type(spec.rope.theta) is float


def test_spec_reads_the_json_of_files_from_before_rope():
    old = '{"d_model": 8, "num_heads": 2, "rope_theta": %s}'
    assert AttentionSpec.from_json(old % "500.0") == AttentionSpec(8, 2, rope=Rope(500.0))
    assert AttentionSpec.from_json(old % "null") == AttentionSpec(8, 2)


def test_spec_is_hashable_and_equal_by_value():
    spec = AttentionSpec(8, 2, rope=Rope(500.0))
    assert {spec: 1}[AttentionSpec(8, 2, num_kv_heads=2, head_dim=4, rope=Rope(500))] == 1


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        '{"d_model": 8}',
        '{"d_model": 8, "num_heads": 2, "colour": 1}',
        "{",
        "null",
        '{"d_model": 8, "num_heads": 2, "rope": {"base": 1}}',
    ],
)
def test_spec_refuses_json_that_is_no_spec(text):
    with pytest.raises(ValueError, match=r"specification|Expecting|rope must have the fields of Rope"):
        AttentionSpec.from_json(text)


LONGROPE = LongRopeScaling(4.0, 8, (1.0, 2.0), (3, 4), attention_factor=1.5)
ROPES = [
    Rope(scaling=LinearScaling(4)),
    Rope(scaling=DynamicScaling(4.0, 8), rotary_dim=4, rotated="last", pairs="interleaved"),
    Rope(scaling=Llama3Scaling(8.0, 8192, 1.0, 4.0)),
    Rope(scaling=YarnScaling(4.0, 32, 16.0, 2.0, truncate=False, mscale=1, mscale_all_dim=np.float32(0.5))),
    Rope(scaling=LONGROPE, rotary_dim=np.int64(4)),
    Rope(scaling=ProportionalScaling(0.25, 2.0)),
    Rope(sections=[2, 1, 1], section_order="interleaved"),
]


@pytest.mark.parametrize("rope", ROPES, ids=str)
def test_spec_with_a_kind_of_rope_survives_json_and_is_hashable(rope):
    spec = AttentionSpec(16, 2, rope=rope)
    again = AttentionSpec.from_json(spec.to_json())
    assert (again, hash(again)) == (spec, hash(spec))
    assert {type(each) for each in (again.rope.sections, spec.rope.sections)} <= {tuple, type(None)}


def test_a_rope_shows_its_base_and_what_is_not_the_default():
    assert repr(Rope(500)) == "Rope(theta=500.0)"
    rope = Rope(scaling=LinearScaling(8.0), rotary_dim=4, pairs="interleaved")
    assert repr(rope) == "Rope(theta=10000.0, scaling=LinearScaling(factor=8.0), rotary_dim=4, pairs='interleaved')"


def test_every_kind_of_scaling_survives_json():
    assert {rope.scaling.kind for rope in ROPES if rope.scaling} == SCALINGS.keys()


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ('{"kind": "ntk", "factor": 2}', "scaling must be a JSON object whose kind is one of"),
        ('{"factor": 2}', "scaling must be a JSON object whose kind is one of"),
        ("2", "scaling must be a JSON object whose kind is one of"),
        ('{"kind": "linear"}', "scaling must have the fields of LinearScaling, missing"),
        ('{"kind": "linear", "factor": 2, "beta": 1}', "scaling must have the fields of LinearScaling, unexpected"),
    ],
)
def test_spec_refuses_json_of_no_scaling(scaling, message):
    with pytest.raises(ValueError, match=message):
        AttentionSpec.from_json(f'{{"d_model": 8, "num_heads": 2, "rope": {{"theta": 1e4, "scaling": {scaling}}}}}')


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Rope(scaling=8.0), TypeError, r"scaling must be a scaling of mha_spec or None, got scaling=8\.0"),
        (lambda: Rope(rotary_dim=3), ValueError, "rotary_dim must be even, got rotary_dim=3"),
        (lambda: Rope(rotary_dim=4.0), TypeError, "rotary_dim must be an integer"),
        (lambda: Rope(rotated="middle"), ValueError, "rotated must be one of .*, got rotated='middle'"),
        (lambda: Rope(pairs="odd"), ValueError, "pairs must be one of .*, got pairs='odd'"),
        (lambda: Rope(section_order="x"), ValueError, "section_order must be one of .*, got section_order='x'"),
        (lambda: Rope(pairs=np.array([1, 2])), ValueError, "pairs must be one of .*, got pairs="),
        (lambda: Rope(10**400), ValueError, "theta must be at most 1.8e.308, got theta=1000"),
        (lambda: Rope(sections=3), TypeError, "sections must be integers, one for each axis, got sections=3"),
        (lambda: Rope(sections=(4,)), ValueError, r"sections must be two or more, got sections=\(4,\)"),
        (lambda: Rope(sections=(2, 0)), ValueError, "sections must be at least 1"),
        (
            lambda: Rope(rotary_dim=4, scaling=ProportionalScaling(0.5)),
            ValueError,
            "rotary_dim must be left out with ProportionalScaling",
        ),
        (lambda: LinearScaling(0.0), ValueError, r"factor must be positive and finite, got factor=0\.0"),
        (lambda: LinearScaling("2"), TypeError, "factor must be a number"),
        (lambda: DynamicScaling(2.0, 8.0), TypeError, "original_length must be an integer"),
        (lambda: Llama3Scaling(8.0, 64, 4.0, 4.0), ValueError, "high_freq_factor must be above low_freq_factor"),
        (lambda: YarnScaling(4.0, 64, 1.0, 1.0), ValueError, "beta_fast must be above beta_slow"),
        (lambda: YarnScaling(4.0, 64, mscale=1.0), ValueError, "mscale and mscale_all_dim must be given together"),
        (
            lambda: YarnScaling(4.0, 64, attention_factor=1.0, mscale=1.0, mscale_all_dim=1.0),
            ValueError,
            "attention_factor must be left out with mscale",
        ),
        (lambda: YarnScaling(4.0, 64, truncate=1), TypeError, "truncate must be a boolean"),
        (lambda: LongRopeScaling(4.0, 8, (1.0,), (1.0, 2.0)), ValueError, "short_factors must be as many as"),
        (lambda: LongRopeScaling(4.0, 8, 1.0, (1.0,)), TypeError, "short_factors must be numbers"),
        (lambda: LongRopeScaling(4.0, 8, (-1.0,), (1.0,)), ValueError, "short_factors must be positive"),
        (lambda: LongRopeScaling(4.0, 1, (1.0,), (1.0,)), ValueError, "original_length must be at least 2"),
        (lambda: ProportionalScaling(1.5), ValueError, r"fraction must be at most 1, got fraction=1\.5"),
    ],
)
def test_a_kind_of_rope_refuses_what_does_not_fit(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        (Rope(rotary_dim=10), "rotary_dim must be at most head_dim, got rotary_dim=10 and head_dim=8"),
        (Rope(rotary_dim=2, scaling=DynamicScaling(2.0, 8)), "rotated features must be at least 4 with DynamicScaling"),
        (Rope(0.5, scaling=YarnScaling(4.0, 64)), r"theta must be above 1 with YarnScaling, got theta=0\.5"),
        (Rope(scaling=LONGROPE), "must be one for each of 4 rotated pairs, got 2"),
        (Rope(sections=(2, 1)), r"sections must be 4 rotated pairs in all, got sections=\(2, 1\)"),
        (Rope(sections=(1, 1, 2), section_order="interleaved"), "interleaved sections must find their pairs among 4"),
    ],
)
def test_spec_refuses_a_rope_that_its_heads_do_not_fit(rope, message):
    with pytest.raises(ValueError, match=message):
        AttentionSpec(16, 2, rope=rope)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.trained])
def test_trained_case_has_the_spec_of_its_file(name):
    case = CASES[name]
    assert case.trained is not None
    tensors, metadata = load_tensors(pretrained.path(case.trained))
    assert case.spec == AttentionSpec.from_json(metadata["spec"])
    assert tensors["inputs.query"].shape == (case.batch, case.seq_len, case.spec.d_in)
    lengths = json.loads(metadata["key_padding_lengths"])
    assert case.key_padding_lengths == (None if lengths is None else tuple(lengths))
    assert case.is_cached or case.is_causal == (metadata["is_causal"] == "true")


def test_every_cached_case_uses_all_its_tokens_and_fits():
    cached = [case for case in CASES.values() if case.is_cached]
    assert cached
    assert all(sum(case.chunks) == case.seq_len for case in cached)
    assert all(max(case.lengths_before(len(case.chunks))) <= case.capacity for case in cached)


def test_random_case_is_the_same_every_time():
    assert random_case(3) == random_case(3)
    assert random_case(3) != random_case(4)


def test_every_random_case_is_one():
    """As many as `run --random` takes: what a draw puts together must fit."""
    assert len({random_case(seed).name for seed in range(MOST_RANDOM)}) == MOST_RANDOM


def test_random_cases_draw_every_feature():
    """Those after the first six, which are among the cases and stay what they were."""
    features = {field.name for field in fields(AttentionSpec)} - {"d_model", "dropout", "output_dropout"}
    plain, drawn = ([random_case(seed).spec for seed in seeds] for seeds in (range(6), range(6, 80)))
    assert {name for name in features if len({getattr(spec, name) for spec in drawn}) > 1} == features
    assert {spec.value_head_dim == spec.head_dim for spec in plain} == {True}
    assert {(spec.qk_norm, spec.gate, spec.temperature, spec.window_size) for spec in plain} == {(None,) * 4}


def test_a_case_is_found_by_its_name():
    assert case_named("rope-gqa") is CASES["rope-gqa"]
    assert case_named("random-7") == random_case(7)


def test_an_unknown_case_is_refused_with_the_nearest_names():
    with pytest.raises(ValueError, match=r"got case='ropegqa'; the nearest are rope-gqa, "):
        case_named("ropegqa")


def has_scaling(case):
    return case.spec.rope is not None and case.spec.rope.scaling is not None


def test_cases_cover_what_attention_can_do():
    cases = CASES.values()
    covered = {
        "causal": any(case.is_causal for case in cases),
        "empty row": any(0 in (case.key_padding_lengths or ()) for case in cases),
        "cross": any(case.spec.d_kv != case.spec.d_in for case in cases),
        "grouped": any(1 < case.spec.num_kv_heads < case.spec.num_heads for case in cases),
        "single key/value head": any(case.spec.num_kv_heads == 1 < case.spec.num_heads for case in cases),
        "groups that differ from heads": any(
            len({case.spec.num_heads, case.spec.num_kv_heads, case.spec.num_heads // case.spec.num_kv_heads}) == 3
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
            for kind, over, weight in (("rms", "head", "w"), ("rms", "head", "1+w"), ("rms", "width", "w"))
        },
        "norm without a weight": any(norm.weight is None for case in cases for norm in case.spec.norms.values()),
        "layer norm for each head": any(
            norm.kind == "layer" and norm.per_head for case in cases for norm in case.spec.norms.values()
        ),
        "norm after RoPE": any(norm.after_rope for case in cases for norm in case.spec.norms.values()),
        "biases of some": any(isinstance(case.spec.qkv_bias, tuple) for case in cases),
        "gate": any(case.spec.gate and not case.spec.gate.per_head for case in cases),
        "gate of each head": any(case.spec.gate and case.spec.gate.per_head for case in cases),
        "gate with a cache": any(case.spec.gate for case in cases if case.is_cached),
        "temperature without RoPE": any(case.spec.temperature and not case.spec.rope for case in cases),
        "temperature after RoPE": any(case.spec.temperature and case.spec.rope for case in cases),
        "temperature with a cache": any(case.spec.temperature for case in cases if case.is_cached),
        "latents": any(case.spec.latent and case.spec.latent.q_rank for case in cases if not case.is_cached),
        "latents of keys and values alone": any(case.spec.latent and not case.spec.latent.q_rank for case in cases),
        "latents with a cache": any(case.spec.latent for case in cases if case.is_cached),
        "latents without RoPE": any(case.spec.latent and not case.spec.rope for case in cases),
        "clipped": any(case.spec.clip_qkv for case in cases if not case.is_cached),
        "clipped with a cache": any(case.spec.clip_qkv for case in cases if case.is_cached),
        "sinks": any(case.spec.sinks for case in cases if not case.is_cached),
        "ALiBi": any(case.spec.alibi for case in cases if not case.is_cached),
        "ALiBi with a cache": any(case.spec.alibi for case in cases if case.is_cached),
        "relative bias": any(case.spec.relative_bias for case in cases if not case.is_cached),
        "relative bias with a cache": any(case.spec.relative_bias for case in cases if case.is_cached),
        "sinks with a cache": any(case.spec.sinks for case in cases if case.is_cached),
        "norm of values": any(case.spec.v_norm for case in cases),
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
                "interleaved sections": lambda rope: rope.sections and rope.section_order == "interleaved",
                **{kind: lambda rope, kind=kind: rope.scaling and rope.scaling.kind == kind for kind in SCALINGS},
            }.items()
        },
        "scaled RoPE and a cache": {
            case.spec.rope.scaling.kind for case in cases if case.is_cached and has_scaling(case)
        }
        >= {"dynamic", "longrope", "yarn"},
        "positions far out": any(case.first_position > 40000 for case in cases),
        "positions across the original length": any(case.first_position and case.is_cached for case in cases),
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
def test_stage_is_read_from_its_name_and_says_it_again(name, stage):
    assert stage_named(name) == stage
    assert str(stage) == name


def test_stage_knows_what_rounding_does_not_touch():
    exact = [name for name in STAGES if stage_named(name).is_exact]
    assert exact == ["mask", "cache.lengths", "module.cache.lengths"]


def test_stage_names_know_their_step_and_axes():
    assert stage_named("step12.cache.keys").kind == "cache.keys"
    assert stage_named("step12.cache.keys").axes == STAGES["cache.keys"]
    assert stage_named("fused.grad.q_proj.weight").axes == ("out", "in")
    assert stage_named("grad.q_proj.bias").axes == ("out",)
    assert stage_named("fused.grad.query").axes == stage_named("blocks.grad.query").axes == ("B", "T", "d_in")


def test_stage_names_know_their_path():
    assert stage_named("blocks.grad.q_proj.weight").path == stage_named("step3.blocks.output").path == "blocks"
    assert stage_named("step3.module.cache.keys").path == "module"
    assert stage_named("cache.keys").path == stage_named("grad.query").path == stage_named("step3.scores").path == ""


def test_weight_shapes_are_in_torch_order():
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


def test_cache_nbytes_is_20_gib_for_64_heads_and_80_layers():
    spec = AttentionSpec(64 * 128, 64)
    assert spec.cache_nbytes(1, 8192, np.dtype(np.float16), num_layers=80) == 20 * 2**30

"""Further arguments of a layer's call are part of the identification, or the layer is not
identified.
"""

from __future__ import annotations

import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from helpers.samples import sample
from helpers.towers import GRID, small_tower
from torch import Tensor, nn

import mha_torch
import parity
from mha_spec import Alibi, AttentionSpec, Rope
from parity.explain.identification import identify

HEADS, WIDTH, TOKENS = 4, 8, 24
E = HEADS * WIDTH


class OwnAttention(nn.Module):
    """Attention that passes queries, keys, values and a further argument to one function."""

    def __init__(self, attend: Any) -> None:
        super().__init__()
        self.attend = attend
        self.query, self.key, self.value, self.out = (nn.Linear(E, E) for _ in range(4))

    def forward(self, x: Tensor, argument: Any) -> Tensor:
        heads = [
            projection(x).unflatten(-1, (HEADS, WIDTH)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        ]
        return self.out(self.attend(*heads, argument).transpose(1, 2).flatten(2))


class Caller(nn.Module):
    """A model that passes the same argument to its attention in each call."""

    def __init__(self, attend: Any, argument: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention, self.argument = OwnAttention(attend), argument

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, self.argument)


def scored(
    q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None = None, scale: Any = WIDTH**-0.5
) -> Tensor:
    scores = q @ k.mT * scale
    return (scores if hidden is None else scores.masked_fill(hidden, -1e9)).softmax(-1) @ v


def segments_of(ends: Tensor) -> Tensor:
    return (torch.arange(TOKENS)[:, None] >= ends[1:]).sum(-1)


def by_boundaries(q: Tensor, k: Tensor, v: Tensor, ends: Tensor) -> Tensor:
    ids = segments_of(ends)
    return scored(q, k, v, ids[:, None] != ids)


def by_boundaries_and_causal(q: Tensor, k: Tensor, v: Tensor, ends: Tensor) -> Tensor:
    ids = segments_of(ends)
    return scored(q, k, v, (ids[:, None] != ids) | LATER)


def by_lengths(q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> Tensor:
    ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    return scored(q, k, v, ids[:, None] != ids)


def by_numbers(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    return scored(q, k, v, ids[:, None] != ids)


def in_a_loop(q: Tensor, k: Tensor, v: Tensor, ends: Tensor) -> Tensor:
    parts = zip(*(x.split((ends[1:] - ends[:-1]).tolist(), 2) for x in (q, k, v)), strict=True)
    return torch.cat([scored(*part) for part in parts], 2)


def in_fixed_chunks(q: Tensor, k: Tensor, v: Tensor, _: Any) -> Tensor:
    ids = torch.arange(TOKENS) // 8
    return scored(q, k, v, ids[:, None] != ids)


def plus(q: Tensor, k: Tensor, v: Tensor, added: Tensor) -> Tensor:
    return (q @ k.mT * WIDTH**-0.5 + added).softmax(-1) @ v


def turned(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * angles[0] + torch.cat([-second, first], -1) * angles[1]


def with_angles(q: Tensor, k: Tensor, v: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    return scored(turned(q, angles), turned(k, angles), v)


def angles_of(*positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin of the positions on each axis."""
    pairs = WIDTH // 2 // len(positions)
    frequencies = 1e4 ** (-torch.arange(pairs) / pairs)
    angles = torch.cat([of_axis[:, None] * frequencies for of_axis in positions], -1).repeat(1, 2)
    return angles.cos(), angles.sin()


def numbers_of(hidden: Tensor) -> Tensor:
    return torch.zeros(TOKENS, TOKENS).masked_fill(hidden, torch.finfo(torch.float32).min)


LATER = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
POSITIONS = torch.arange(TOKENS)
ENDS, EQUAL_ENDS, ONE = (
    torch.tensor([0, 10, 24]),
    torch.tensor([0, 8, 16, 24]),
    torch.tensor([0, 24]),
)
IDS, EQUAL_IDS = segments_of(ENDS), segments_of(EQUAL_ENDS)
SLOPES = 2.0 ** (-2.0 * torch.arange(1, HEADS + 1))
PLAIN = AttentionSpec(E, HEADS)
GRID_ROPE = Rope(sections=(2, 2), section_frequencies="own")

REPORTED: dict[str, tuple[Any, Any, AttentionSpec, bool, dict[str, str]]] = {
    "boundaries": (by_boundaries, ENDS, PLAIN, False, {"segment_ids": "argument"}),
    "boundaries-of-one-segment": (by_boundaries, ONE, PLAIN, False, {"segment_ids": "argument"}),
    "boundaries-of-equal-segments": (
        by_boundaries,
        EQUAL_ENDS,
        PLAIN,
        False,
        {"segment_ids": "argument"},
    ),
    "boundaries-in-causal": (
        by_boundaries_and_causal,
        ENDS,
        PLAIN,
        True,
        {"segment_ids": "argument"},
    ),
    "equal-boundaries-in-causal": (
        by_boundaries_and_causal,
        EQUAL_ENDS,
        PLAIN,
        True,
        {"segment_ids": "argument"},
    ),
    "lengths": (by_lengths, [10, 14], PLAIN, False, {"segment_ids": "argument"}),
    "numbers-of-segments": (by_numbers, IDS, PLAIN, False, {"segment_ids": "argument"}),
    "mask-of-blocks": (plus, numbers_of(IDS[:, None] != IDS), PLAIN, False, {"mask": "argument"}),
    "mask-of-equal-blocks": (
        plus,
        numbers_of(EQUAL_IDS[:, None] != EQUAL_IDS),
        PLAIN,
        False,
        {"mask": "argument"},
    ),
    "mask-that-is-causal": (plus, numbers_of(LATER), PLAIN, True, {"mask": "argument"}),
    "mask-of-a-window": (
        *(plus, numbers_of(LATER | (POSITIONS[:, None] - POSITIONS >= 5))),
        *(PLAIN.replace(window_size=5), True, {"mask": "argument"}),
    ),
    "scale": (
        lambda q, k, v, scale: scored(q, k, v, None, scale),
        0.3,
        PLAIN.replace(scale=0.3),
        False,
        {"scale": "argument"},
    ),
    "bias": (
        plus,
        -SLOPES[:, None, None] * (POSITIONS[:, None] - POSITIONS).abs(),
        PLAIN.replace(alibi=Alibi()),
        False,
        {"bias": "argument"},
    ),
    "angles": (
        with_angles,
        angles_of(POSITIONS),
        PLAIN.replace(rope=Rope()),
        False,
        {"positions": "argument"},
    ),
    "angles-on-a-grid": (
        with_angles,
        angles_of(POSITIONS // 6, POSITIONS % 6),
        PLAIN.replace(rope=GRID_ROPE),
        False,
        {"positions": "argument"},
    ),
    "nothing-that-counts": (lambda q, k, v, _: scored(q, k, v), ENDS, PLAIN, False, {}),
    "chunks-of-its-own": (in_fixed_chunks, EQUAL_ENDS, PLAIN.replace(chunk_size=8), False, {}),
}
"""The function of a layer, its argument, and the expected spec, causality and arguments by part."""


@sample(12)
@pytest.mark.parametrize("name", REPORTED)
def test_call_argument_is_reported(name):
    """The report names the part of attention that an argument sets, such as segments, a mask, a
    scale, a bias or positions; an argument without effect is left out.
    """
    attend, argument, spec, is_causal, from_call = REPORTED[name]
    x = torch.randn(2, TOKENS, E, generator=torch.Generator().manual_seed(1))
    (layer,) = identify(Caller(attend, argument).eval(), {"x": x})
    assert layer.spec is not None, str(layer)
    assert (layer.spec, layer.is_causal, layer.from_call) == (spec, is_causal, from_call)
    for part in from_call:
        assert f"from its call: {part}=argument" in str(layer)


REJECTED: dict[str, tuple[Any, Any, str]] = {
    "loop-over-segments": (in_a_loop, ENDS, "got 2 softmaxes instead of one"),
    "loop-over-one-segment": (in_a_loop, ONE, "got 2 softmaxes instead of one"),
    "mask-of-a-prefix": (
        plus,
        numbers_of(LATER & ((POSITIONS[:, None] > 4) | (POSITIONS > 4))),
        "got a different pattern",
    ),
    "any-bias": (
        plus,
        torch.randn(HEADS, TOKENS, TOKENS, generator=torch.Generator().manual_seed(2)),
        "got values up to 3.7",
    ),
    "angles-of-other-positions": (
        with_angles,
        angles_of(POSITIONS.flip(0)),
        "got pairs that turn by other angles",
    ),
    "angles-of-later-positions": (
        with_angles,
        angles_of(POSITIONS + 7),
        "got pairs that turn by other angles",
    ),
    "values-scaled": (
        lambda q, k, v, factor: scored(q, k, factor * v),
        0.5,
        "got v of (2, 4, 24, 8)",
    ),
    "context-scaled": (
        lambda q, k, v, factor: factor * scored(q, k, v),
        0.5,
        "got something else",
    ),
    "segments-and-a-key": (
        lambda q, k, v, ends: scored(
            q, k, v, (segments_of(ends)[:, None] != segments_of(ends)) & (POSITIONS != 0)
        ),
        ENDS,
        "got a different pattern",
    ),
}
"""The function of a layer, its argument, and a part of the reason."""


class AttentionByPosition(OwnAttention):
    """A layer whose further arguments have no names."""

    def forward(self, x: Tensor, *more: Any) -> Tensor:
        return super().forward(x, more[0])


def test_unnamed_argument_is_numbered():
    """An argument in `*more` is reported by its index, as `more0`."""
    model = Caller(by_boundaries, ENDS)
    model.attention = AttentionByPosition(by_boundaries)
    (layer,) = identify(model.eval(), {"x": torch.randn(2, TOKENS, E)})
    assert layer.spec == PLAIN, str(layer)
    assert layer.from_call == {"segment_ids": "more0"}


def strict_about_its_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    if mask.any():
        raise ValueError("a mask of zeros alone")
    return plus(q, k, v, mask)


def test_unchangeable_argument_is_unknown():
    """A mask that raises an error when changed is reported as `unknown`."""
    model = Caller(strict_about_its_mask, torch.zeros(TOKENS, TOKENS)).eval()
    (layer,) = identify(model, {"x": torch.randn(2, TOKENS, E)})
    assert layer.from_call == {"unknown": "argument"}


@pytest.mark.parametrize("name", REJECTED)
def test_undescribed_argument_is_rejected(name):
    """A layer whose use of an argument no report can describe has no spec, and the reason."""
    attend, argument, reason = REJECTED[name]
    x = torch.randn(2, TOKENS, E, generator=torch.Generator().manual_seed(1))
    (layer,) = identify(Caller(attend, argument).eval(), {"x": x})
    assert layer.spec is None, str(layer)
    assert layer.reason is not None
    assert reason in layer.reason


def test_segments_of_mha_torch_are_reported():
    """A layer of mha_torch shows its segments in one mask to an observer, though it computes them
    one by one.
    """
    layer = mha_torch.MultiHeadSelfAttention(E, 4).eval()
    x = torch.randn(1, TOKENS, E, generator=torch.Generator().manual_seed(1))
    ids = torch.arange(TOKENS)[None] * 3 // TOKENS
    (observed,) = identify(layer, {"x": x, "segment_ids": ids})
    assert (observed.spec, observed.from_call) == (layer.spec, {"segment_ids": "segment_ids"})


def test_segments_are_needed_for_parity():
    """With the reported segments, the reference agrees with the layer; without them it does not."""
    x = torch.randn(1, TOKENS, E, generator=torch.Generator().manual_seed(1))
    model = Caller(by_boundaries, ENDS).eval()
    (layer,) = identify(model, {"x": x})
    case = parity.Case(
        "with", layer.spec, "", batch=1, seq_len=TOKENS, segment_ids=(tuple(IDS.tolist()),)
    )
    with torch.no_grad():
        output = model(x)
    for case_and_spec, is_right in (
        (case, True),
        (parity.Case("without", layer.spec, "", batch=1, seq_len=TOKENS), False),
    ):
        problem = parity.make_problem(case_and_spec, "float32", layer.weights)
        problem.inputs["query"] = x.numpy()
        if is_right:
            parity.assert_parity(output, problem=problem)
        else:
            with pytest.raises(AssertionError):
                parity.assert_parity(output, problem=problem, diagnose=False)


# ---- Towers of transformers ----------------------------------------------------------------------

AUDIO = {
    "d_model": 64,
    "encoder_layers": 1,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 32,
    "num_mel_bins": 16,
}
ENCODERS = {
    "qwen2_5_omni": ("Qwen2_5OmniAudioEncoder", {**AUDIO, "n_window": 16, "output_dim": 64}, 128),
    "qwen3_asr": (
        "Qwen3ASREncoder",
        {**AUDIO, "n_window": 50, "n_window_infer": 100, "downsample_hidden_size": 8},
        300,
    ),
}


def small_encoder(name: str) -> tuple[Any, dict[str, Tensor]]:
    of_class, options, length = ENCODERS[name]
    modules = [
        importlib.import_module(f"transformers.models.{name}.{kind}_{name}")
        for kind in ("configuration", "modeling")
    ]
    config = getattr(modules[0], f"{of_class}Config")(**options)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = getattr(modules[1], of_class)(config).eval()
    if name == "qwen3_asr":
        arguments = {
            "input_features": torch.randn(1, 16, length),
            "input_features_mask": torch.ones(1, length).long(),
        }
        return model, arguments
    return model, {
        "input_features": torch.randn(16, length),
        "feature_lens": torch.tensor([length]),
    }


@pytest.mark.parametrize("name", ENCODERS)
def test_audio_encoder_reports_segments(name):
    """Audio encoders report segments from `cu_seqlens`, and a tap records more than one of them."""
    model, inputs = small_encoder(name)
    (layer,) = parity.layers_of(model, inputs)
    assert layer.spec is not None, str(layer)
    assert layer.from_call == {"segment_ids": "cu_seqlens"}
    with parity.tap(model) as tapped, torch.no_grad():
        model(**inputs)
    assert len(set(tapped.layers[0].calls[0].values["segment_ids"][0].tolist())) > 1


@pytest.mark.parametrize("pictures", [1, 2])
def test_vision_encoder_reports_segments(pictures):
    """Qwen2-VL's encoder reports segments and positions from
    its arguments, for one picture and for two.
    """
    model, _ = small_tower("qwen2_vl")
    inputs = {"hidden_states": torch.randn(24 * pictures, 96), "grid_thw": GRID.repeat(pictures, 1)}
    (layer,) = parity.layers_of(model, inputs)
    assert layer.spec is not None, str(layer)
    assert layer.from_call == {"segment_ids": "cu_seqlens", "positions": "position_embeddings"}
    assert "from its call: segment_ids=cu_seqlens" in str(layer)


# ---- Flax ----------------------------------------------------------------------------------------


class FlaxAttention(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.query, self.key, self.value, self.out = (nnx.Linear(E, E, rngs=rngs) for _ in range(4))

    def __call__(self, x: Any, mask: Any = None, ids: Any = None) -> Any:
        q, k, v = (
            projection(x).reshape(*x.shape[:2], HEADS, WIDTH)
            for projection in (self.query, self.key, self.value)
        )
        scores = jnp.einsum("bthd,bshd->bhts", q, k) * WIDTH**-0.5
        if ids is not None:
            scores = jnp.where(ids[:, None, :, None] != ids[:, None, None], -1e9, scores)
        if mask is not None:
            scores = jnp.where(mask, scores, -1e9)
        return self.out(
            jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores, -1), v).reshape(x.shape)
        )


@pytest.mark.parametrize(
    ("argument", "is_causal", "from_call"),
    [
        ({"ids": np.repeat([[0, 1], [0, 1]], 8, axis=1)}, False, {"segment_ids": "ids"}),
        ({"mask": np.tril(np.ones((1, 1, 16, 16), bool))}, True, {"mask": "mask"}),
        ({}, False, {}),
    ],
)
def test_flax_call_argument_is_reported(argument, is_causal, from_call):
    """The report names segments and masks that a call passes to a
    Flax layer, and nothing if there are none.
    """
    x = jax.random.normal(jax.random.key(0), (2, 16, E))
    with jax.numpy_rank_promotion("allow"):
        (layer,) = identify(FlaxAttention(), {"x": x, **argument})
    assert layer.spec == PLAIN, str(layer)
    assert (layer.is_causal, layer.from_call) == (is_causal, from_call)

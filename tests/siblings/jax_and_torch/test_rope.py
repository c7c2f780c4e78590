"""Tests of rotary position embedding: its definition, its pairs and its invariants."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from helpers.input_errors import rejects, rejects_type
from helpers.samples import sample

import mha_torch
import parity
from mha_spec import (
    AttentionSpec,
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    Rope,
    YarnScaling,
)

DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
EPSILON = float(np.finfo(np.float32).eps)


def rotated(sibling, x, positions, theta=10000.0):
    """Apply `apply_rope` to NumPy features (B, N, T, H)."""
    return sibling.numpy(
        sibling.package.apply_rope(sibling.array(x), sibling.array(positions), Rope(theta))
    )


def rotated_in_float64(x, positions, theta):
    """Rotate by the definition, pair by pair: (a, b) -> (a cos - b sin, b cos + a sin)."""
    half = x.shape[-1] // 2
    angles = np.array(positions)[:, None, :, None] * theta ** (-np.arange(half) / half)
    first, second = x[..., :half].astype(np.float64), x[..., half:].astype(np.float64)
    turned = [
        first * np.cos(angles) - second * np.sin(angles),
        second * np.cos(angles) + first * np.sin(angles),
    ]
    return np.concatenate(turned, axis=-1)


@sample(jax=1)
@pytest.mark.parametrize("position", [1, 1000, 131071])
def test_rotation_preserves_length(sibling, rng, position):
    """Rotation preserves the norm of features, up to position 131071."""
    x = rng.standard_normal((1, 2, 1, 8)).astype(np.float32)

    turned = rotated(sibling, x, [[position]])

    # cos^2 + sin^2 is 1 up to rounding, however large the angle.
    assert np.linalg.norm(turned, axis=-1) == pytest.approx(
        np.linalg.norm(x, axis=-1), rel=4 * EPSILON
    )


@sample(jax=1)
@pytest.mark.parametrize("position", [0, 1, 63, 5000, 131071])
def test_rotation_matches_definition(sibling, rng, position):
    """Rotation matches the definition in float64, up to position 131071."""
    x = rng.standard_normal((1, 2, 1, 8)).astype(np.float32)

    turned = rotated(sibling, x, [[position]], 500000.0)

    # float32 rounds the frequency and the product, so the angle is off by at most position *
    # epsilon.
    tolerance = (position + 3) * EPSILON * np.abs(x).max() * 2
    assert np.abs(turned - rotated_in_float64(x, [[position]], 500000.0)).max() <= tolerance


@sample(jax=1)
@pytest.mark.parametrize("shift", [1, 64, 5000])
def test_score_depends_only_on_distance(sibling, rng, shift):
    """A score is the same if both positions are shifted, up to 5000."""
    query, key = rng.standard_normal((2, 1, 1, 1, 8)).astype(np.float32)

    near = rotated(sibling, query, [[5]]) * rotated(sibling, key, [[2]])
    far = rotated(sibling, query, [[5 + shift]]) * rotated(sibling, key, [[2 + shift]])

    # Both angles are off by at most position * epsilon, and a score changes by at most |query|
    # |key| per radian.
    tolerance = 2 * (10 + shift) * EPSILON * np.linalg.norm(query) * np.linalg.norm(key)
    assert abs(near.sum() - far.sum()) <= tolerance


def test_score_depends_on_distance(sibling, rng):
    """Scores at distances 3 and 4 differ."""
    query, key = rng.standard_normal((2, 1, 1, 1, 8)).astype(np.float32)

    near = rotated(sibling, query, [[5]]) * rotated(sibling, key, [[2]])
    further = rotated(sibling, query, [[5]]) * rotated(sibling, key, [[1]])

    assert abs(near.sum() - further.sum()) > 0.01


@sample(jax=1)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))
def test_rotation_preserves_dtype(sibling, dtype):
    assert rotated(sibling, np.ones((1, 1, 1, 4), dtype), [[3]]).dtype == dtype


@sample(jax=1)
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
def test_half_precision_rotation_rounds_once(sibling, rng, dtype):
    """In half precision at position 5001, rotation equals that in float32, rounded, bit for bit."""
    # At position 5001 a bfloat16 angle would be off by 16 radians.
    x = rng.standard_normal((1, 2, 1, 8)).astype(dtype)
    assert np.array_equal(
        rotated(sibling, x, [[5001]]),
        rotated(sibling, x.astype(np.float32), [[5001]]).astype(dtype),
    )


def test_positions_of_one_sequence_broadcast(sibling, rng):
    """Positions of one sequence apply to both sequences of a batch."""
    x = rng.standard_normal((2, 2, 3, 4)).astype(np.float32)
    assert np.array_equal(
        rotated(sibling, x, [[4, 5, 6]]), rotated(sibling, x, [[4, 5, 6], [4, 5, 6]])
    )


# ---- Variants ------------------------------------------------------------------------------------


def rotated_by(sibling, x, positions, rope):
    return sibling.numpy(
        sibling.package.apply_rope(sibling.array(x), sibling.array(positions), rope)
    )


@sample(jax=1)
@pytest.mark.parametrize(
    ("rope", "partner"),
    [
        (Rope(1.0), [(0, 3), (1, 4), (2, 5)]),
        (Rope(1.0, pairs="interleaved"), [(0, 1), (2, 3), (4, 5)]),
        (Rope(1.0, rotary_dim=4), [(0, 2), (1, 3)]),
        (Rope(1.0, rotary_dim=4, rotated="last"), [(2, 4), (3, 5)]),
        (Rope(1.0, rotary_dim=4, rotated="last", pairs="interleaved"), [(2, 3), (4, 5)]),
        (Rope(1.0, scaling=ProportionalScaling(0.7)), [(0, 3), (1, 4)]),
    ],
)
def test_features_are_rotated_in_pairs(sibling, rope, partner):
    """Each variant of RoPE rotates the expected pairs of features and
    leaves the others unchanged.
    """
    # With theta 1 all pairs are rotated by the position, in radians.
    expected = np.eye(6)
    for first, second in partner:
        expected[first, first] = expected[second, second] = math.cos(2)
        expected[first, second], expected[second, first] = math.sin(2), -math.sin(2)
    x = np.eye(6, dtype=np.float32)[None, None]
    actual = rotated_by(sibling, x, [[2] * 6], rope)[0, 0]
    assert actual == pytest.approx(expected, abs=3 * EPSILON)


def test_partial_rotation_frequencies():
    """The frequencies of 8 rotated features of 32 equal the frequencies of a head of 8."""
    assert np.array_equal(Rope(rotary_dim=8).frequencies(32), Rope().frequencies(8))


def test_llama3_scales_only_slow_pairs():
    """Llama 3's scaling keeps pairs of more than 4 turns, divides pairs of less than 1 by 8, and
    is between for the others.
    """
    plain, rope = Rope(5e5).frequencies(128), Rope(5e5, scaling=Llama3Scaling(8.0, 8192))
    turns = 8192 * plain / (2 * math.pi)
    ratio = rope.frequencies(128) / plain
    assert np.array_equal(ratio[turns > 4], np.ones(np.count_nonzero(turns > 4)))
    assert ratio[turns < 1] == pytest.approx(1 / 8, rel=1e-15)
    between = (turns > 1) & (turns < 4)
    assert between.any()
    assert ((ratio[between] > 1 / 8) & (ratio[between] < 1)).all()


def test_yarn_frequencies_match_the_paper():
    """YaRN's frequencies and attention factor match the paper: unscaled up to pair 20,
    divided by 4 from pair 46, and halfway at pair 33.
    """
    # 4096 / (2 pi theta ** (2 i / 128)) is 32 at i = 20.9, and 1 at i = 45.03: the ramp goes from
    # 20 to 46.
    plain, rope = Rope().frequencies(128), Rope(scaling=YarnScaling(4.0, 4096))
    ratio = rope.frequencies(128) / plain
    assert np.array_equal(ratio[:21], np.ones(21))
    assert ratio[33] == pytest.approx(0.25 * 0.5 + 0.5, rel=1e-14)
    assert ratio[46:] == pytest.approx(0.25, rel=1e-14)
    assert rope.attention_factor == pytest.approx(0.1 * math.log(4) + 1, rel=1e-15)


def test_longrope_matches_the_paper():
    """LongRoPE's attention factor matches the paper, and its long factors apply
    to more than 4096 tokens.
    """
    rope = Rope(scaling=LongRopeScaling(32.0, 4096, (1.0,), (2.0,)))
    assert rope.attention_factor == pytest.approx(
        math.sqrt(1 + math.log(32) / math.log(4096)), rel=1e-15
    )
    assert [rope.frequencies(2, length)[0] for length in (0, 4096, 4097)] == [1.0, 1.0, 0.5]


def test_attention_factor_scales_rotation(sibling, rng):
    """An attention factor of 1.5 scales the rotated features and leaves the others unchanged."""
    x = rng.standard_normal((1, 1, 3, 8)).astype(np.float32)
    rope = Rope(scaling=YarnScaling(4.0, 64, attention_factor=1.5), rotary_dim=4)
    turned = rotated_by(sibling, x, [[0, 1, 50]], rope)
    assert np.linalg.norm(turned[..., :4], axis=-1) == pytest.approx(
        1.5 * np.linalg.norm(x[..., :4], axis=-1), rel=4 * EPSILON
    )
    assert np.array_equal(turned[..., 4:], x[..., 4:])


LENGTHS = {
    "dynamic": Rope(scaling=DynamicScaling(4.0, 6)),
    "longrope": Rope(scaling=LongRopeScaling(4.0, 6, (1.0, 1.1, 1.3, 1.6), (1.0, 2.0, 8.0, 30.0))),
}


@sample(jax=1)
@pytest.mark.parametrize("kind", LENGTHS)
def test_frequencies_depend_on_each_length(sibling, rng, kind):
    """The frequencies of dynamic scaling and LongRoPE depend on the last position of each
    sequence, not of the batch.
    """
    x, rope = rng.standard_normal((2, 1, 3, 8)).astype(np.float32), LENGTHS[kind]
    near, far = [0, 4, 5], [0, 4, 6]
    both = rotated_by(sibling, x, [near, far], rope)
    assert np.array_equal(both[:1], rotated_by(sibling, x[:1], [near], rope))
    assert np.array_equal(both[1:], rotated_by(sibling, x[1:], [far], rope))
    assert np.abs(both[1:, :, 1] - rotated_by(sibling, x[1:], [near], rope)[:, :, 1]).max() > 1e-3


@sample(jax=1)
@pytest.mark.parametrize("kind", LENGTHS)
def test_empty_sequence_is_rotated(sibling, kind):
    """Rotating 0 tokens, with scaling by length, returns an empty array."""
    assert (
        rotated_by(
            sibling, np.ones((2, 1, 0, 8), np.float32), np.ones((1, 0), np.int32), LENGTHS[kind]
        ).size
        == 0
    )


@sample(jax=1)
@pytest.mark.parametrize("order", ["contiguous", "interleaved"])
def test_sections_use_positions_of_own_axis(sibling, rng, order):
    """With sections, each pair of features is rotated by the position on its axis."""
    rope = Rope(100.0, sections=(2, 1, 1), section_order=order)
    axes = {"contiguous": [0, 0, 1, 2], "interleaved": [0, 1, 2, 0]}[order]
    x, positions = (
        rng.standard_normal((2, 1, 3, 8)).astype(np.float32),
        rng.integers(0, 9, (3, 2, 3)),
    )
    actual = rotated_by(sibling, x, positions.astype(np.int32), rope)
    for pair, axis in enumerate(axes):
        alone = rotated_by(sibling, x, positions[axis].astype(np.int32), Rope(100.0))
        assert np.array_equal(actual[..., [pair, pair + 4]], alone[..., [pair, pair + 4]])


@sample(jax=1)
@pytest.mark.parametrize("order", ["contiguous", "interleaved"])
@pytest.mark.parametrize(
    ("series", "exponents"), [("own", [0, 1 / 2, 0, 1 / 2]), ("strided", [0, 1 / 2, 1 / 4, 3 / 4])]
)
def test_section_frequencies_match_series(sibling, rng, series, exponents, order):
    """With sections, the frequencies of an axis are its own series or
    strided from a common one.
    """
    rope = Rope(81.0, sections=(2, 2), section_order=order, section_frequencies=series)
    axes = {"contiguous": [0, 0, 1, 1], "interleaved": [0, 1, 0, 1]}[order]
    exponents = exponents if order == "contiguous" else [exponents[pair] for pair in (0, 2, 1, 3)]
    x, positions = (
        rng.standard_normal((2, 1, 3, 8)).astype(np.float32),
        rng.integers(0, 9, (2, 2, 3)),
    )
    actual = rotated_by(sibling, x, positions.astype(np.int32), rope)
    before, after = x[..., :4] + 1j * x[..., 4:], actual[..., :4] + 1j * actual[..., 4:]
    angles = np.moveaxis(positions[axes], 0, -1) * 81.0 ** -np.array(exponents)
    assert np.abs(after - before * np.exp(1j * angles[:, None])).max() < 1e-5


@pytest.mark.parametrize(
    ("shape", "input_error"),
    [
        ((2, 1, 3), rejects("positions", {"positions.shape": (2, 1, 3)})),
        ((3, 3), rejects("positions", {"positions.shape": (3, 3)})),
    ],
)
def test_positions_with_wrong_axes_raise(sibling, shape, input_error):
    """With sections, positions on 2 axes instead of 3, or of 3 sequences
    instead of 1, raise an error.
    """
    x = np.ones((1, 1, 3, 8), np.float32)
    with input_error:
        rotated_by(sibling, x, np.zeros(shape, np.int32), Rope(sections=(2, 1, 1)))


def test_positions_on_axes_require_sections(sibling):
    """Positions on three axes raise an error for a RoPE without sections."""
    with rejects("positions", {"positions.shape": (3, 1, 3)}):
        rotated_by(
            sibling, np.ones((1, 1, 3, 8), np.float32), np.zeros((3, 1, 3), np.int32), Rope()
        )


@sample(jax=0)
@pytest.mark.parametrize("kind", [*LENGTHS, "llama3"])
def test_ragged_steps_match_single_sequences(sibling, rng, kind):
    """Ragged steps give each sequence its output alone: neither padding nor other
    sequences make it longer.
    """
    rope = LENGTHS.get(kind, Rope(scaling=Llama3Scaling(4.0, 8)))
    layer = sibling.module("MultiHeadAttentionWithCache", AttentionSpec(16, 2, rope=rope))
    x = rng.standard_normal((2, 9, 16)).astype(np.float32)

    def run(rows, steps):
        cache, outputs, at = layer.init_cache(len(rows), 9), [], 0
        for chunk, lengths in steps:
            tokens = sibling.array(x[rows, at : at + chunk])
            output, cache = layer(
                tokens, cache, new_lengths=sibling.array([lengths[row] for row in rows])
            )
            outputs.append(sibling.numpy(output))
            at += chunk
        return outputs

    steps = [(4, [4, 2]), (1, [1, 1]), (3, [3, 2]), (1, [1, 1])]
    together = run([0, 1], steps)
    for row in (0, 1):
        for both, alone in zip(together, run([row], steps), strict=True):
            assert both[row] == pytest.approx(
                alone[0], abs=8 * EPSILON
            )  # other sizes have a different order of summation


def test_layer_uses_given_positions(sibling, rng):
    """A layer with RoPE and given positions has a different output than one with default
    positions.
    """
    module = sibling.module("MultiHeadAttention", AttentionSpec(8, 2, rope=Rope(100.0)))
    x = sibling.array(rng.standard_normal((2, 3, 8)).astype(np.float32))

    default, _ = module(x)
    at_positions, _ = module(x, positions=sibling.array([[0, 1, 9]]))

    assert np.abs(sibling.numpy(default) - sibling.numpy(at_positions)).max() > 1e-3


REJECTIONS = {
    "odd head": (np.ones((1, 1, 1, 3), np.float32), [[0]], 1e4, rejects("head_dim", head_dim=3)),
    "theta 0": (np.ones((1, 1, 1, 4), np.float32), [[0]], 0.0, rejects("theta", theta=0.0)),
    "theta negative": (
        np.ones((1, 1, 1, 4), np.float32),
        [[0]],
        -1.0,
        rejects("theta", theta=-1.0),
    ),
    "theta NaN": (
        np.ones((1, 1, 1, 4), np.float32),
        [[0]],
        math.nan,
        rejects("theta", theta=math.nan),
    ),
    "three axes": (
        np.ones((1, 1, 4), np.float32),
        [[0]],
        1e4,
        rejects("x", {"x.shape": (1, 1, 4)}),
    ),
    "integers": (np.ones((1, 1, 1, 4), np.int32), [[0]], 1e4, rejects_type("x", {"x.dtype": ...})),
    "float positions": (
        np.ones((1, 1, 1, 4), np.float32),
        [[0.0]],
        1e4,
        rejects_type("positions", {"positions.dtype": ...}),
    ),
    "boolean positions": (
        np.ones((1, 1, 1, 4), np.float32),
        [[True]],
        1e4,
        rejects_type("positions", {"positions.dtype": ...}),
    ),
    "flat positions": (
        np.ones((1, 1, 1, 4), np.float32),
        [0],
        1e4,
        rejects("positions", {"positions.shape": (1,)}),
    ),
    "too many positions": (
        np.ones((1, 1, 1, 4), np.float32),
        [[0, 1]],
        1e4,
        rejects("positions", {"positions.shape": (1, 2)}),
    ),
    "positions of another batch": (
        np.ones((3, 1, 1, 4), np.float32),
        [[0], [1]],
        1e4,
        rejects("positions", {"positions.shape": (2, 1)}),
    ),
}


@pytest.mark.parametrize("name", REJECTIONS)
def test_invalid_rotation_raises(sibling, name):
    """Invalid head widths, thetas, features and positions of `apply_rope` raise
    an error with their name.
    """
    x, positions, theta, input_error = REJECTIONS[name]
    positions = np.array(positions)
    positions = positions.astype(
        {"i": np.int32, "f": np.float32, "b": np.bool_}[positions.dtype.kind]
    )
    with input_error:
        rotated(sibling, x, positions, theta)


def test_number_as_rope_raises(sibling):
    """`apply_rope` raises an error for a number instead of a `Rope`."""
    x = sibling.array(np.ones((1, 1, 1, 4), np.float32))
    with rejects_type("rope", rope=10000.0):
        sibling.package.apply_rope(x, sibling.array([[0]]), 10000.0)


@pytest.mark.parametrize(
    ("head_dim", "error"), [(3, ValueError), (0, ValueError), (4.0, TypeError)]
)
def test_invalid_head_dim_of_frequencies(head_dim, error):
    """Frequencies for a head of 3, 0 or 4.0 features raise an error."""
    with rejects("head_dim", head_dim=head_dim).of(error):
        Rope().frequencies(head_dim)


SCALED = [LinearScaling(4.0), Llama3Scaling(8.0, 64), YarnScaling(4.0, 64)]


@pytest.mark.parametrize("scaling", SCALED, ids=lambda scaling: scaling.kind)
def test_frequencies_over_head_dim_are_named(scaling, monkeypatch):
    """A port that computes scaled frequencies for the whole head and uses the first few is
    diagnosed as `rope-frequencies-over-head-dim`.
    """
    spec = AttentionSpec(32, 4, head_dim=32, rope=Rope(500.0, scaling=scaling, rotary_dim=8))
    problem = parity.make_problem(
        parity.Case("partial", spec, "a part of each head", seq_len=48), "float32"
    )
    wrong = Rope(500.0, scaling=scaling).frequencies(32)[:4]
    monkeypatch.setattr(Rope, "frequencies", lambda rope, head_dim, length=0: wrong)
    weights = {name: torch.from_numpy(weight) for name, weight in problem.weights.items()}
    output, _ = mha_torch.multi_head_attention(
        torch.from_numpy(problem.inputs["query"]), weights, spec
    )
    monkeypatch.undo()
    (finding,) = parity.diagnose({"output": output.numpy()}, problem).named
    assert finding.bugs == ("rope-frequencies-over-head-dim",)


@pytest.mark.parametrize("name", ["rope-sections", "rope-sections-interleaved"])
def test_ignored_sections_are_named(name):
    """A layer that uses text positions on all axes is diagnosed as `rope-sections-ignored`."""
    problem = parity.make_problem(parity.CASES[name], "float32")
    weights = {name: torch.from_numpy(weight) for name, weight in problem.weights.items()}
    x = torch.from_numpy(problem.inputs["query"])
    output, _ = mha_torch.multi_head_attention(
        x, weights, problem.spec, is_causal=problem.case.is_causal
    )
    (finding,) = parity.diagnose({"output": output.numpy()}, problem).named
    assert finding.bugs == ("rope-sections-ignored",)


@pytest.mark.parametrize("shape", [(3, 5), (1, 1), (5,)])
def test_invalid_projection_positions_raise(sibling, shape):
    """`project_qkv` raises an error for positions of the wrong shape."""
    layer = sibling.module("MultiHeadAttention", AttentionSpec(8, 2, rope=Rope()))
    x, positions = (
        sibling.array(np.ones((1, 5, 8), np.float32)),
        sibling.array(np.zeros(shape, np.int32)),
    )
    with rejects("positions", {"positions.shape": shape}):
        sibling.package.project_qkv(layer.project, x, x, x, layer.spec, positions)

"""Rotary position embedding: on paper, its pairs, and what it leaves unchanged."""

import math

import ml_dtypes
import numpy as np
import pytest

from mha_spec import AttentionSpec, Rope

DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
EPSILON = float(np.finfo(np.float32).eps)


def rotated(sibling, x, positions, theta=10000.0):
    """`apply_rope` of NumPy features (B, N, T, H)."""
    return sibling.numpy(sibling.package.apply_rope(sibling.array(x), sibling.array(positions), Rope(theta)))


def rotated_in_float64(x, positions, theta):
    """The definition, pair by pair: (a, b) -> (a cos - b sin, b cos + a sin)."""
    half = x.shape[-1] // 2
    angles = np.array(positions)[:, None, :, None] * theta ** (-np.arange(half) / half)
    first, second = x[..., :half].astype(np.float64), x[..., half:].astype(np.float64)
    turned = [first * np.cos(angles) - second * np.sin(angles), second * np.cos(angles) + first * np.sin(angles)]
    return np.concatenate(turned, axis=-1)


def test_frequencies_fall_from_one_by_powers_of_theta():
    # theta ** (-2 i / H) for i = 0, 1, 2 and H = 6: 1, 1000 ** (-1/3), 1000 ** (-2/3).
    assert Rope(1000.0).frequencies(6) == pytest.approx([1.0, 0.1, 0.01], rel=1e-15)


@pytest.mark.parametrize("position", [0, 1, 2, 100])
def test_two_features_turn_by_their_position(sibling, position):
    x = np.array([[[[3.0, 4.0]]]], np.float32)
    cos, sin = math.cos(position), math.sin(position)

    # One rounding of each cosine, product and sum, on numbers of at most 5.
    expected = pytest.approx([3 * cos - 4 * sin, 4 * cos + 3 * sin], abs=5 * 3 * EPSILON)
    assert rotated(sibling, x, [[position]])[0, 0, 0] == expected


@pytest.mark.parametrize(("feature", "partner", "sign"), [(0, 2, 1), (1, 3, 1), (2, 0, -1), (3, 1, -1)])
def test_feature_turns_with_the_one_half_a_head_away(sibling, feature, partner, sign):
    x = np.zeros((1, 1, 1, 4), np.float32)
    x[..., feature] = 1.0
    angle = 7 * 100.0 ** (-(feature % 2) / 2)
    expected = np.zeros(4)
    expected[feature], expected[partner] = math.cos(angle), sign * math.sin(angle)

    # float32's rounding of the angle, at most 7, is all there is.
    assert rotated(sibling, x, [[7]], 100.0)[0, 0, 0] == pytest.approx(expected, abs=7 * EPSILON)


def test_position_zero_changes_nothing(sibling, rng):
    x = rng.standard_normal((1, 2, 1, 8)).astype(np.float32)
    assert np.array_equal(rotated(sibling, x, [[0]]), x)


@pytest.mark.parametrize("position", [1, 1000, 131071])
def test_rotation_keeps_the_length(sibling, rng, position):
    x = rng.standard_normal((1, 2, 1, 8)).astype(np.float32)

    turned = rotated(sibling, x, [[position]])

    # cos^2 + sin^2 is 1 but for the rounding of each, however large the angle.
    assert np.linalg.norm(turned, axis=-1) == pytest.approx(np.linalg.norm(x, axis=-1), rel=4 * EPSILON)


@pytest.mark.parametrize("position", [0, 1, 63, 5000, 131071])
def test_rotation_is_the_definition_at_far_positions(sibling, rng, position):
    x = rng.standard_normal((1, 2, 1, 8)).astype(np.float32)

    turned = rotated(sibling, x, [[position]], 500000.0)

    # The angle is rounded to float32 twice, the frequency and the product, so it is off by at most position * epsilon.
    tolerance = (position + 3) * EPSILON * np.abs(x).max() * 2
    assert np.abs(turned - rotated_in_float64(x, [[position]], 500000.0)).max() <= tolerance


@pytest.mark.parametrize("shift", [1, 64, 5000])
def test_score_depends_on_the_distance_only(sibling, rng, shift):
    query, key = rng.standard_normal((2, 1, 1, 1, 8)).astype(np.float32)

    near = rotated(sibling, query, [[5]]) * rotated(sibling, key, [[2]])
    far = rotated(sibling, query, [[5 + shift]]) * rotated(sibling, key, [[2 + shift]])

    # Both angles are off by at most position * epsilon, and a score changes by at most |query| |key| per radian.
    tolerance = 2 * (10 + shift) * EPSILON * np.linalg.norm(query) * np.linalg.norm(key)
    assert abs(near.sum() - far.sum()) <= tolerance


def test_score_depends_on_the_distance(sibling, rng):
    query, key = rng.standard_normal((2, 1, 1, 1, 8)).astype(np.float32)

    near = rotated(sibling, query, [[5]]) * rotated(sibling, key, [[2]])
    further = rotated(sibling, query, [[5]]) * rotated(sibling, key, [[1]])

    assert abs(near.sum() - further.sum()) > 0.01


def test_theta_changes_the_result(sibling, rng):
    x = rng.standard_normal((1, 1, 4, 8)).astype(np.float32)
    positions = [[0, 1, 2, 3]]
    assert np.abs(rotated(sibling, x, positions, 1e4) - rotated(sibling, x, positions, 1e5)).max() > 0.01


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))
def test_rotation_keeps_the_dtype(sibling, dtype):
    assert rotated(sibling, np.ones((1, 1, 1, 4), dtype), [[3]]).dtype == dtype


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
def test_narrow_features_are_rounded_once(sibling, rng, dtype):
    # At position 5001 an angle in bfloat16 would be off by 16 radians.
    x = rng.standard_normal((1, 2, 1, 8)).astype(dtype)
    assert np.array_equal(rotated(sibling, x, [[5001]]), rotated(sibling, x.astype(np.float32), [[5001]]).astype(dtype))


def test_positions_of_one_sequence_serve_all(sibling, rng):
    x = rng.standard_normal((2, 2, 3, 4)).astype(np.float32)
    assert np.array_equal(rotated(sibling, x, [[4, 5, 6]]), rotated(sibling, x, [[4, 5, 6], [4, 5, 6]]))


def test_each_sequence_has_its_own_positions(sibling, rng):
    x = rng.standard_normal((2, 2, 3, 4)).astype(np.float32)

    turned = rotated(sibling, x, [[4, 5, 6], [9, 0, 2]])

    assert np.array_equal(turned[1], rotated(sibling, x, [[9, 0, 2]])[1])


def test_layer_counts_positions_from_zero(sibling, rng):
    module = sibling.module("MultiHeadAttention", AttentionSpec(8, 2, rope=Rope(100.0)))
    x = sibling.array(rng.standard_normal((2, 3, 8)).astype(np.float32))

    default, _ = module(x)
    given, _ = module(x, positions=sibling.array([[0, 1, 2]]))

    assert np.array_equal(sibling.numpy(default), sibling.numpy(given))


def test_layer_uses_the_positions_given(sibling, rng):
    module = sibling.module("MultiHeadAttention", AttentionSpec(8, 2, rope=Rope(100.0)))
    x = sibling.array(rng.standard_normal((2, 3, 8)).astype(np.float32))

    default, _ = module(x)
    given, _ = module(x, positions=sibling.array([[0, 1, 9]]))

    assert np.abs(sibling.numpy(default) - sibling.numpy(given)).max() > 1e-3


def test_layer_turns_queries_and_keys_but_not_values(sibling, rng):
    q, k, v = (sibling.array(x) for x in rng.standard_normal((3, 1, 3, 8)).astype(np.float32))

    def projected(rope):
        stages = sibling.package.project_qkv(lambda _, x: x, q, k, v, AttentionSpec(8, 2, rope=rope))
        return [sibling.numpy(x) for x in stages]

    unchanged = [np.array_equal(*pair) for pair in zip(projected(None), projected(Rope(100.0)), strict=True)]
    assert unchanged == [False, False, True]


REFUSALS = {
    "odd head": (np.ones((1, 1, 1, 3), np.float32), [[0]], 1e4, ValueError, "head_dim must be even.*head_dim=3"),
    "theta 0": (np.ones((1, 1, 1, 4), np.float32), [[0]], 0.0, ValueError, "theta must be positive"),
    "theta negative": (np.ones((1, 1, 1, 4), np.float32), [[0]], -1.0, ValueError, "theta must be positive"),
    "theta NaN": (np.ones((1, 1, 1, 4), np.float32), [[0]], math.nan, ValueError, "theta must be positive"),
    "three axes": (np.ones((1, 1, 4), np.float32), [[0]], 1e4, ValueError, "x must have 4 axes"),
    "integers": (np.ones((1, 1, 1, 4), np.int32), [[0]], 1e4, TypeError, "x must be floating point.*int32"),
    "float positions": (np.ones((1, 1, 1, 4), np.float32), [[0.0]], 1e4, TypeError, "positions must be integers"),
    "boolean positions": (np.ones((1, 1, 1, 4), np.float32), [[True]], 1e4, TypeError, "positions must be integers"),
    "flat positions": (np.ones((1, 1, 1, 4), np.float32), [0], 1e4, ValueError, r"positions must have shape .*\(1,\)"),
    "too many positions": (np.ones((1, 1, 1, 4), np.float32), [[0, 1]], 1e4, ValueError, "positions must have shape"),
    "positions of another batch": (
        np.ones((3, 1, 1, 4), np.float32),
        [[0], [1]],
        1e4,
        ValueError,
        "positions must have shape",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_rotation_refuses(sibling, name):
    x, positions, theta, error, message = REFUSALS[name]
    positions = np.array(positions)
    positions = positions.astype({"i": np.int32, "f": np.float32, "b": np.bool_}[positions.dtype.kind])
    with pytest.raises(error, match=message):
        rotated(sibling, x, positions, theta)


def test_rotation_refuses_a_number_for_a_rope(sibling):
    x = sibling.array(np.ones((1, 1, 1, 4), np.float32))
    with pytest.raises(TypeError, match=r"^rope must be a Rope, got rope=10000\.0"):
        sibling.package.apply_rope(x, sibling.array([[0]]), 10000.0)


@pytest.mark.parametrize(("head_dim", "error"), [(3, ValueError), (0, ValueError), (4.0, TypeError)])
def test_frequencies_refuse(head_dim, error):
    with pytest.raises(error, match="head_dim must be"):
        Rope().frequencies(head_dim)

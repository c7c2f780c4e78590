"""Rotary position embedding in every implementation, on paper and in layers."""

import math

import numpy as np
import pytest
from helpers.samples import sample
from helpers.siblings import DTYPES, EPSILON

from mha_spec import AttentionSpec, Rope


def rotated(sibling, x, positions, theta=10000.0):
    """Features (B, N, T, H) after `apply_rope`."""
    positions = sibling.option(np.array(positions, np.int32))
    return sibling.numpy(sibling.package.apply_rope(sibling.array(x), positions, Rope(theta)))


@sample(jax=1)
@pytest.mark.parametrize("position", [0, 1, 2, 100])
def test_two_features_rotate_by_position(sibling, position):
    """Two features rotate by their position in radians."""
    x, cos, sin = np.array([[[[3.0, 4.0]]]], np.float32), math.cos(position), math.sin(position)
    expected = np.array([3 * cos - 4 * sin, 4 * cos + 3 * sin])
    # Each cosine, product and sum is rounded once; the values are at most 5.
    sibling.assert_close(
        rotated(sibling, x, [[position]])[0, 0, 0], expected, within=5 * 3 * EPSILON
    )


@sample(jax=1)
@pytest.mark.parametrize(
    ("feature", "partner", "sign"), [(0, 2, 1), (1, 3, 1), (2, 0, -1), (3, 1, -1)]
)
def test_pairs_are_half_a_head_apart(sibling, feature, partner, sign):
    """A feature rotates with the one half a head away, at the frequency of their pair."""
    x, expected = np.zeros((1, 1, 1, 4), np.float32), np.zeros(4)
    x[..., feature] = 1.0
    angle = 7 * 100.0 ** (-(feature % 2) / 2)
    expected[feature], expected[partner] = math.cos(angle), sign * math.sin(angle)
    # The only error is the float32 rounding of the angle, which is at most 7.
    sibling.assert_close(rotated(sibling, x, [[7]], 100.0)[0, 0, 0], expected, within=7 * EPSILON)


@sample(jax=1)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_position_zero_changes_nothing(sibling, rng, dtype):
    """At position zero nothing rotates."""
    x = rng.standard_normal((1, 2, 1, 8)).astype(dtype)
    assert np.array_equal(rotated(sibling, x, [[0]]), x)


def test_sequences_have_their_own_positions(sibling, rng):
    """Each sequence of a batch rotates by its own positions."""
    x = rng.standard_normal((2, 2, 3, 4)).astype(np.float32)
    turned = rotated(sibling, x, [[4, 5, 6], [9, 0, 2]])
    for row, positions in enumerate(([4, 5, 6], [9, 0, 2])):
        assert np.array_equal(turned[row], rotated(sibling, x, [positions])[row])


def test_theta_changes_the_rotation(sibling, rng):
    """A different theta rotates by other angles."""
    x = rng.standard_normal((1, 1, 4, 8)).astype(np.float32)
    actual, other = (rotated(sibling, x, [[0, 1, 2, 3]], theta) for theta in (1e4, 1e5))
    assert np.abs(actual - other).max() > 0.01


def test_layer_counts_from_zero(sibling, rng):
    """A layer without positions counts them from zero, and other positions change its output."""
    module = sibling.filled("MultiHeadAttention", AttentionSpec(8, 2, rope=Rope(100.0)))
    x = sibling.array(rng.standard_normal((2, 3, 8)).astype(np.float32))

    def output(**options):
        return sibling.numpy(module(x, **options)[0])

    counted, other = (sibling.option(np.array([row], np.int32)) for row in ([0, 1, 2], [0, 3, 9]))
    assert np.array_equal(output(), output(positions=counted))
    assert np.abs(output() - output(positions=other)).max() > 1e-3


def test_layer_rotates_no_values(sibling, rng):
    """A layer rotates queries and keys, but not values."""
    q, k, v = (sibling.array(x) for x in rng.standard_normal((3, 1, 3, 128)).astype(np.float32))

    def projected(rope):
        heads = sibling.package.project_qkv(
            lambda _, x: x, q, k, v, AttentionSpec(128, 2, rope=rope)
        )
        return [sibling.numpy(x) for x in heads]

    pairs = zip(projected(None), projected(Rope(100.0)), strict=True)
    assert [np.array_equal(*pair) for pair in pairs] == [False, False, True]

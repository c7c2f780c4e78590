"""Tests of the fits that diagnosis and identification share: each returns the parameters that made
its input.
"""

import numpy as np
import pytest

from mha_spec import Rope
from parity.explain.fitting.distances import band_of, chunk_of, key_distances, slopes_of
from parity.explain.fitting.numbers import round_numbers
from parity.explain.fitting.rotation import (
    complex_pairs,
    fit_rotation,
    nearest_positions,
    with_pairs,
)
from parity.explain.fitting.thetas import fit_theta, plain_exponents

ROPES = {
    "half": Rope(),
    "interleaved": Rope(pairs="interleaved"),
    "last features": Rope(rotary_dim=8, rotated="last"),
}


def drawn_heads() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(2, 3, 9, 16))


@pytest.mark.parametrize("name", ROPES)
def test_rotation_of_pairs_is_fitted(name):
    """Frequencies, the angle at position 0 and the amplitude of a rotation are found again."""
    rope, heads = ROPES[name], drawn_heads()
    pairs = complex_pairs(heads, rope)
    count = pairs.shape[-1]
    frequencies, begin = np.linspace(1.0, 0.01, count), np.linspace(-0.4, 0.6, count)
    positions = np.arange(9.0)[None]
    turns = 1.25 * np.exp(1j * (begin + positions[..., None] * frequencies))
    rotated = with_pairs(heads, pairs * turns[:, None], rope)
    rotation = fit_rotation(pairs, complex_pairs(rotated, rope), positions)
    assert rotation is not None
    np.testing.assert_allclose(rotation.frequencies, frequencies, atol=1e-9)
    np.testing.assert_allclose(rotation.begin, begin, atol=1e-9)
    assert rotation.amplitude == pytest.approx(1.25)


def test_rotation_needs_successive_tokens():
    """No rotation is fitted to tokens at every second position."""
    pairs = complex_pairs(drawn_heads(), Rope())
    assert fit_rotation(pairs, pairs, 2.0 * np.arange(9.0)[None]) is None


def test_other_features_stay_the_same():
    """New pairs leave the features that are not rotated."""
    heads, rope = drawn_heads(), ROPES["last features"]
    changed = with_pairs(heads, 2.0 * complex_pairs(heads, rope), rope)
    np.testing.assert_array_equal(changed[..., :8], heads[..., :8])
    np.testing.assert_array_equal(changed[..., 8:], 2.0 * heads[..., 8:])


def test_positions_of_tokens_are_found():
    """The position of each token is found from its turns."""
    positions = np.array([[5, 0, 900], [17, 17, 3]])
    frequencies = Rope().frequencies(16).astype(np.float64)
    turns = np.exp(1j * positions[..., None] * frequencies)
    np.testing.assert_array_equal(nearest_positions(turns, frequencies, 1024), positions)


@pytest.mark.parametrize("theta", [500.0, 10000.0, 1e6])
def test_theta_of_frequencies_is_fitted(theta):
    """The base of exact frequencies is found."""
    assert fit_theta(theta ** -plain_exponents(8)) == pytest.approx(theta)


def test_single_pair_has_no_theta():
    """The frequency of a single pair is 1 with any base."""
    assert fit_theta(np.ones(1)) is None


def test_numbers_are_rounded():
    """Numbers are rounded to significant digits, in order."""
    assert list(round_numbers(1234.5, (1, 3))) == [1000.0, 1230.0]


def test_slopes_of_heads_are_fitted():
    """The slope of each head is found; without distances it is 0."""
    distances = key_distances(4, 5)
    slopes = np.array([0.5, -2.0])
    values = np.broadcast_to(slopes[:, None, None] * distances, (3, 2, 4, 5))
    np.testing.assert_allclose(slopes_of(values, distances), slopes)
    np.testing.assert_array_equal(slopes_of(values, np.zeros((4, 5))), 0.0)


def test_band_of_a_window_is_found():
    """A window has the least and the greatest distance that it shows."""
    distances = key_distances(8, 8)
    assert band_of((distances > 0) | (distances < -2), distances) == (-2, 0)
    assert band_of(distances == -1, distances) is None
    assert band_of(np.ones((8, 8), bool), distances) is None


def test_band_ignores_other_cells():
    """Only the cells that count must have the pattern."""
    distances = key_distances(8, 8)
    cells = distances <= 0
    assert band_of(distances < -3, distances, cells) == (-3, 0)


def test_chunk_of_a_mask_is_found():
    """The length of chunks is found, in a causal mask too; a window has none."""
    distances, chunks = key_distances(8, 8), np.arange(8) // 3
    cells = distances <= 0
    assert chunk_of(chunks[:, None] != chunks, cells) == 3
    assert chunk_of(distances < -2, cells) is None

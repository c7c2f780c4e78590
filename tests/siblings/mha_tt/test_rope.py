"""Rotary position embedding: compared by hand, with float64, and in padded heads on a device."""

import math

import numpy as np
import pytest
import ttnn
from helpers.input_errors import rejects, rejects_type
from helpers.samples import sample
from helpers.tt.formulas import TOLERANCES, assert_close, both_dtypes, rotate, rounded

import mha_tt
import parity
from mha_spec import DynamicScaling, ProportionalScaling, YarnScaling
from parity.measure.core.reference.rope import amplitude, axes, frequencies, pairs


def rotated(device, x, positions, theta=10000.0, *, dtype=ttnn.float32, **options):
    """Return the result of `apply_rope` for NumPy features (B, N, T, H)."""
    x = mha_tt.upload(x, device=device, dtype=dtype)
    return mha_tt.download(mha_tt.apply_rope(x, np.array(positions), parity.Rope(theta), **options))


def padded_heads(x):
    """Return heads padded as on the device, with each half beginning at a tile."""
    padded = np.zeros((*x.shape[:3], mha_tt.padded_head_dim(x.shape[3], rope=True)), x.dtype)
    padded[..., mha_tt.feature_indices(x.shape[3], rope=parity.Rope())] = x
    return padded


# ---- By hand -------------------------------------------------------------------------------------


# ---- Compared with float64 -----------------------------------------------------------------------


@both_dtypes
@pytest.mark.parametrize("head_dim", [2, 12, 16, 48, 64, 80])
def test_rotation_matches_float64(device, rng, head_dim, dtype):
    """Rotated heads of 2 to 80 features match the formula in float64."""
    x, positions = rounded(rng.standard_normal((2, 3, 5, head_dim)), dtype), np.arange(5)[None]
    assert_close(
        rotated(device, x, positions, 500.0, dtype=dtype), rotate(x, positions, 500.0), dtype
    )


@pytest.mark.parametrize("position", [63, 5000, 131071, 2**24 + 1])
def test_far_positions_are_accurate(device, rng, position):
    """Rotations of positions up to 2^24 + 1 are within the usual tolerance."""
    # Angles are computed in float64: in float32, the angles of the last position would be off by
    # whole radians.
    x = rng.standard_normal((1, 2, 1, 8)).astype(np.float32)
    assert_close(
        rotated(device, x, [[position]], 500000.0), rotate(x, [[position]], 500000.0), ttnn.float32
    )


@pytest.mark.parametrize("position", [1, 1000, 131071])
def test_rotation_preserves_norm(device, rng, position):
    """The norm of a head is the same before and after its rotation."""
    x = rng.standard_normal((1, 2, 1, 8)).astype(np.float32)
    y = rotated(device, x, [[position]])
    expected = pytest.approx(np.linalg.norm(x, axis=-1), rel=2 * TOLERANCES[ttnn.float32])
    assert np.linalg.norm(y, axis=-1) == expected


@both_dtypes
def test_rows_of_positions_are_the_formula(device, rng, dtype):
    """Sequences with positions of their own rotate by the formula, in both dtypes."""
    x, positions = rounded(rng.standard_normal((2, 2, 3, 4)), dtype), [[4, 5, 6], [9, 0, 2]]
    assert_close(rotated(device, x, positions, dtype=dtype), rotate(x, positions, 10000.0), dtype)


def test_one_row_of_positions_is_broadcast(device, rng):
    """One row of positions is used for all sequences of a batch."""
    x = rng.standard_normal((2, 2, 3, 4)).astype(np.float32)
    assert np.array_equal(
        rotated(device, x, [[4, 5, 6]]), rotated(device, x, [[4, 5, 6], [4, 5, 6]])
    )


@pytest.mark.parametrize("shift", [1, 64, 5000])
def test_scores_depend_only_on_distance(device, rng, shift):
    """Shifting the positions of a query and a key by the same number does not change their
    product.
    """
    query, key = rng.standard_normal((2, 1, 1, 1, 8)).astype(np.float32)
    near = rotated(device, query, [[5]]) * rotated(device, key, [[2]])
    far = rotated(device, query, [[5 + shift]]) * rotated(device, key, [[2 + shift]])
    allowed = 2 * TOLERANCES[ttnn.float32] * np.linalg.norm(query) * np.linalg.norm(key)
    assert abs(near.sum() - far.sum()) <= allowed


@both_dtypes
def test_rotation_preserves_dtype(device, dtype):
    """A rotated tensor has the dtype of its input."""
    x = mha_tt.upload(np.ones((1, 1, 1, 4)), device=device, dtype=dtype)
    assert mha_tt.apply_rope(x, np.array([[3]]), parity.Rope()).dtype == dtype


def test_bfloat16_features_are_rounded_once(device, rng):
    """A rotation in bfloat16 equals the float32 one rounded once, even at position 5001."""
    # At position 5001 an angle in bfloat16 would be off by 16 radians.
    x = rounded(rng.standard_normal((1, 2, 1, 8)), ttnn.bfloat16)
    wide = rotated(device, x, [[5001]])
    assert np.array_equal(
        rotated(device, x, [[5001]], dtype=ttnn.bfloat16), rounded(wide, ttnn.bfloat16)
    )


# ---- In padded heads -----------------------------------------------------------------------------


@both_dtypes
@pytest.mark.parametrize("head_dim", [2, 12, 16, 48, 64, 80])
def test_padded_head_rotates_like_bare_one(device, rng, head_dim, dtype):
    """The features of a padded head are rotated to the same bits as the features of a bare head."""
    x, positions = rounded(rng.standard_normal((2, 3, 5, head_dim)), dtype), np.arange(5)[None] + 7
    padded = rotated(device, padded_heads(x), positions, dtype=dtype, head_dim=head_dim)
    bare = rotated(device, x, positions, dtype=dtype)
    assert np.array_equal(padded[..., mha_tt.feature_indices(head_dim, rope=parity.Rope())], bare)


@pytest.mark.parametrize("head_dim", [2, 12, 48, 80])
def test_padding_of_heads_stays_zero_in_rope(device, rng, head_dim):
    """The padding of a head remains exactly 0."""
    x = rng.standard_normal((2, 3, 5, head_dim)).astype(np.float32)
    padded = rotated(device, padded_heads(x), np.arange(5)[None], head_dim=head_dim)
    indices = mha_tt.feature_indices(head_dim, rope=parity.Rope())
    assert not np.delete(padded, indices, axis=-1).any()


# ---- Kinds ---------------------------------------------------------------------------------------

KINDS = {
    "neighbours": parity.Rope(pairs="interleaved"),
    "the last features": parity.Rope(rotary_dim=8, rotated="last"),
    "neighbours among the first": parity.Rope(rotary_dim=4, pairs="interleaved"),
    "scaled": parity.Rope(scaling=YarnScaling(4.0, 64), rotary_dim=8),
    "proportional": parity.Rope(scaling=ProportionalScaling(0.5)),
    "by length": parity.Rope(scaling=DynamicScaling(4.0, 6)),
    "sections": parity.Rope(100.0, sections=(3, 2, 1), section_order="interleaved"),
    "sections of their own": parity.Rope(
        100.0, sections=(2, 2, 2), section_frequencies="own", pairs="interleaved"
    ),
    "sections that are strided": parity.Rope(
        100.0, sections=(2, 2, 2), section_frequencies="strided"
    ),
}


def rotated_on_paper(x, positions, rope):
    """Return rotated features, one by one; positions are (axes or 1, B or 1, T)."""
    lengths = positions.max(axis=(0, 2)) + 1
    rotated = x.astype(np.float64)
    firsts, seconds = pairs(rope, x.shape[3])
    for b in range(x.shape[0]):
        row = b % positions.shape[1]
        angular = frequencies(rope, x.shape[3], int(lengths[row]))
        for pair, (i, j, axis) in enumerate(
            zip(firsts, seconds, axes(rope, x.shape[3]), strict=True)
        ):
            angles = positions[axis % len(positions), row] * angular[pair]
            cos, sin = amplitude(rope) * np.cos(angles), amplitude(rope) * np.sin(angles)
            rotated[b, :, :, i] = x[b, :, :, i] * cos - x[b, :, :, j] * sin
            rotated[b, :, :, j] = x[b, :, :, j] * cos + x[b, :, :, i] * sin
    return rotated


@sample(12)
@both_dtypes
@pytest.mark.parametrize("kind", KINDS)
def test_rope_kinds_match_formula(device, rng, kind, dtype):
    """Each kind of RoPE rotates heads in the order of feature_indices as the formula does, and
    keeps padding 0.
    """
    rope, x = KINDS[kind], rounded(rng.standard_normal((2, 3, 5, 12)), dtype)
    positions = rng.integers(0, 12, (3 if rope.sections else 1, 2, 5))
    padded = np.zeros((2, 3, 5, mha_tt.padded_head_dim(12, rope=True)), x.dtype)
    indices = mha_tt.feature_indices(12, rope=rope)
    padded[..., indices] = x
    heads = mha_tt.upload(padded, device=device, dtype=dtype)
    positions_given = positions if rope.sections else positions[0]
    actual = mha_tt.download(mha_tt.apply_rope(heads, positions_given, rope, head_dim=12))
    assert_close(actual[..., indices], rotated_on_paper(x, positions, rope), dtype)
    assert not np.delete(actual, indices, axis=-1).any()


@pytest.mark.parametrize("kind", ["neighbours", "the last features"])
def test_bare_heads_with_other_pairs_raise(device, kind):
    """Bare heads raise an error without head_dim if RoPE pairs neighbors or the last features."""
    x = mha_tt.upload(np.ones((1, 1, 1, 12)), device=device)
    with rejects("head_dim", head_dim=None, rope=...):
        mha_tt.apply_rope(x, np.array([[0]]), KINDS[kind])


def test_positions_on_axes_need_sections(device):
    """Positions on three axes without sections, and on two axes for three sections, raise an
    error.
    """
    x = mha_tt.upload(np.ones((1, 1, 3, 12)), device=device)
    with rejects("positions", {"positions.shape": (3, 1, 3)}):
        mha_tt.apply_rope(x, np.zeros((3, 1, 3), np.int32), parity.Rope())
    with rejects("positions", {"positions.shape": (2, 1, 3)}):
        mha_tt.apply_rope(x, np.zeros((2, 1, 3), np.int32), KINDS["sections"])


# ---- In a layer ----------------------------------------------------------------------------------


SPEC = parity.AttentionSpec(8, 2, rope=parity.Rope(100.0))


def layer_output(device, x, **options):
    """Return the output of a layer with RoPE, always with the same weights."""
    module = mha_tt.MultiHeadAttention(
        SPEC, device=device, dtype=ttnn.float32, rng=np.random.default_rng(0)
    )
    output, _ = module(mha_tt.upload(x, device=device, dtype=ttnn.float32), **options)
    return mha_tt.download(output)


def test_layer_uses_given_positions(device, rng):
    """Given positions change the output."""
    x = rng.standard_normal((2, 3, 8))
    at_positions = layer_output(device, x, positions=np.array([[0, 1, 9]]))
    assert np.abs(layer_output(device, x) - at_positions).max() > 1e-3


def test_layer_adapts_rotations_to_length(device, rng):
    """A layer called with 3 and then 5 tokens returns the bits of a new layer."""
    # A layer keeps the rotations of the last length.
    x = rng.standard_normal((2, 5, 8)).astype(np.float32)
    module = mha_tt.MultiHeadAttention(
        SPEC, device=device, dtype=ttnn.float32, rng=np.random.default_rng(0)
    )
    module(mha_tt.upload(x[:, :3], device=device, dtype=ttnn.float32))
    output, _ = module(mha_tt.upload(x, device=device, dtype=ttnn.float32))
    assert np.array_equal(mha_tt.download(output), layer_output(device, x))


# ---- Errors --------------------------------------------------------------------------------------

REJECTIONS = {
    "odd head": ((1, 1, 1, 3), [[0]], 1e4, rejects("head_dim", head_dim=3)),
    "theta 0": ((1, 1, 1, 4), [[0]], 0.0, rejects("theta", theta=0.0)),
    "theta negative": ((1, 1, 1, 4), [[0]], -1.0, rejects("theta", theta=-1.0)),
    "theta NaN": ((1, 1, 1, 4), [[0]], math.nan, rejects("theta", theta=math.nan)),
    "theta text": ((1, 1, 1, 4), [[0]], "1e4", rejects_type("theta", theta="1e4")),
    "three axes": ((1, 1, 4), [[0]], 1e4, rejects("x", {"x.shape": (1, 1, 4)})),
    "float positions": (
        (1, 1, 1, 4),
        [[0.0]],
        1e4,
        rejects_type("positions", {"positions.dtype": ...}),
    ),
    "boolean positions": (
        (1, 1, 1, 4),
        [[True]],
        1e4,
        rejects_type("positions", {"positions.dtype": ...}),
    ),
    "flat positions": ((1, 1, 1, 4), [0], 1e4, rejects("positions", {"positions.shape": (1,)})),
    "too many positions": (
        (1, 1, 1, 4),
        [[0, 1]],
        1e4,
        rejects("positions", {"positions.shape": (1, 2)}),
    ),
    "another batch": (
        (3, 1, 1, 4),
        [[0], [1]],
        1e4,
        rejects("positions", {"positions.shape": (2, 1)}),
    ),
}


@pytest.mark.parametrize("name", REJECTIONS)
def test_invalid_rotation_arguments_raise(device, name):
    """Odd heads, bad values of theta and positions of a wrong shape or dtype raise an error."""
    shape, positions, theta, input_error = REJECTIONS[name]
    with input_error:
        rotated(device, np.ones(shape, np.float32), positions, theta)


def test_list_of_positions_raises(device):
    """Positions in a list instead of an array raise an error."""
    x = mha_tt.upload(np.ones((1, 1, 1, 4)), device=device)
    with rejects_type("positions", "list"):
        mha_tt.apply_rope(x, [[0]], parity.Rope())


def test_number_instead_of_rope_raises(device):
    """A number instead of a Rope raises an error."""
    x = mha_tt.upload(np.ones((1, 1, 1, 32), np.float32), device=device)
    with rejects_type("rope", rope=10000.0):
        mha_tt.apply_rope(x, np.array([[0]]), 10000.0)


@pytest.mark.parametrize(
    ("head_dim", "input_error"),
    [(10, rejects("head_dim", head_dim=10)), (0, rejects("head_dim", head_dim=0))],
)
def test_wrong_head_dim_raises(device, head_dim, input_error):
    """A head_dim larger than the heads or 0 raises an error."""
    with input_error:
        rotated(device, np.ones((1, 1, 1, 8), np.float32), [[0]], head_dim=head_dim)


def test_heads_padded_without_rope_raise(device):
    """Heads whose padding does not separate their halves by a tile raise an error."""
    # Six features of eight: the second half would begin at the 32nd.
    with rejects("heads of head_dim=6", "8"):
        rotated(device, np.ones((1, 1, 1, 8), np.float32), [[0]], head_dim=6)


@pytest.mark.parametrize(
    ("head_dim", "theta", "input_error"),
    [(3, 1e4, rejects("head_dim", head_dim=3)), (4, 0.0, rejects("theta", theta=0.0))],
)
def test_invalid_frequencies_raise(head_dim, theta, input_error):
    """An odd head_dim or a theta of 0 raises an error."""
    with input_error:
        parity.Rope(theta).frequencies(head_dim)

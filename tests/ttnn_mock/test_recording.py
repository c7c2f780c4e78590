"""Recordings of programs from a computing device: making, saving and replaying them, and keeping
them current.
"""

import re
from dataclasses import replace

import numpy as np
import pytest
import ttnn
from helpers.tt.formulas import IS_MOCK

import mha_tt
import ttnn_mock
from ttnn_mock import Recording, recording

pytestmark = pytest.mark.skipif(
    not IS_MOCK, reason="recordings are given back on a mock board only"
)

X = np.arange(64.0).reshape(1, 64)


def program(device, *, x=X, factor=2.0, times=1, is_of_first=False):
    """Return the output of a small program that multiplies a tensor by a factor repeatedly.

    With `is_of_first`, each step multiplies the first tensor instead of the previous result.
    """
    y = first = mha_tt.upload(x, device=device, dtype=ttnn.float32)
    for _ in range(times):
        y = ttnn.multiply(first if is_of_first else y, factor)
    return mha_tt.download(y)


def keep(device, monkeypatch, **options):
    """Return a recording of the program, made on a device whose values are off by one."""
    with ttnn_mock.shadow() as values, monkeypatch.context() as patched:
        patched.setattr(recording, "is_in_use", lambda: False)
        patched.setattr(recording, "read_back", lambda tensor: values.download(tensor) + 1)
        with recording.recorded() as recorded:
            assert np.array_equal(program(device, **options), 2 ** options.get("times", 1) * X + 1)
    return recorded


@pytest.fixture
def recorded_program(device, monkeypatch):
    return keep(device, monkeypatch)


def test_same_program_replays_recording(device, recorded_program):
    """A replay of the same program returns the recorded values."""
    with recording.replayed(recorded_program) as replay:
        assert np.array_equal(program(device), 2 * X + 1)
    assert replay.differs == ""


def test_upload_within_rounding_is_unchanged(device, recorded_program):
    """An upload that differs by a factor of 1 + 1e-7 is replayed as the same program."""
    with recording.replayed(recorded_program) as replay:
        assert np.array_equal(program(device, x=X * (1 + 1e-7)), 2 * X + 1)
    assert replay.differs == ""


OTHERS = {
    "a different number": (
        {"factor": 3.0},
        "step 3 is 'ttnn.multiply .* 3.0 -> #2' and was 'ttnn.multiply .* 2.0 -> #2'",
    ),
    "a different shape": (
        {"x": X.reshape(2, 32)},
        r"step 1 is 'ttnn.to_device #0 \(2, 32\) .* was 'ttnn.to_device #0 \(1, 64\)",
    ),
    "other values in a tensor": ({"x": X + 1}, "step 2 uploads other values"),
    "the same values in a different order": ({"x": X[:, ::-1]}, "step 2 uploads other values"),
    "an operation more": ({"times": 2}, "step 4 is 'ttnn.multiply .* and was 'read "),
    "an operation less": ({"times": 0}, "step 3 is 'read .* and was 'ttnn.multiply "),
}


@pytest.mark.parametrize(("options", "difference"), OTHERS.values(), ids=list(OTHERS))
def test_different_program_is_reported(device, recorded_program, options, difference):
    """A different program gets golden values, and the replay names the first step that differs."""
    with recording.replayed(recorded_program) as replay:
        actual = program(device, **options)
    expected = options.get("x", X) * options.get("factor", 2.0) ** options.get("times", 1)
    assert np.array_equal(actual, expected)
    assert re.match(difference, replay.differs)


def test_operations_on_other_tensors_differ(device, monkeypatch):
    """Operations on other tensors of the same shape, as in keys written for values, are a different
    program.
    """
    twice = keep(device, monkeypatch, times=2)
    with recording.replayed(twice) as replay:
        assert np.array_equal(program(device, times=2, is_of_first=True), 2 * X)
    assert re.match(r"step 4 is 'ttnn.multiply #1 .* and was 'ttnn.multiply #2 ", replay.differs)


def test_program_that_ends_early_is_reported(device, recorded_program):
    """A program that ends before the recording is reported with the missing step."""
    with recording.replayed(recorded_program) as replay:
        mha_tt.upload(X, device=device, dtype=ttnn.float32)
    assert replay.differs.startswith("step 3 is the end and was 'ttnn.multiply")


def test_recording_round_trips_through_file(tmp_path, recorded_program):
    """A saved recording is loaded with the same lines, sums, arrays and origin."""
    made = replace(recorded_program, sums=[(1.5, 2.0), (-3.0, 4.0)], made_on="a simulated board")
    made.save(tmp_path / "a.npz")
    loaded = Recording.load(tmp_path / "a.npz")
    assert (loaded.lines, loaded.sums, loaded.made_on) == (
        recorded_program.lines,
        [(1.5, 2.0), (-3.0, 4.0)],
        "a simulated board",
    )
    assert all(
        np.array_equal(a, b) for a, b in zip(loaded.arrays, recorded_program.arrays, strict=True)
    )


def test_recording_on_mock_board_raises(device):
    rejected = pytest.raises(RuntimeError, match="a mock one")
    with rejected, recording.recorded():
        pass

"""Temperatures of queries, fitted to the factors of their tokens."""

import numpy as np
import pytest

from mha_spec import Temperature
from parity.explain.identification.temperatures import fit_temperature

POSITIONS = np.arange(20)


def factors_of(length, first_position=0):
    """Return the factors of tokens of a temperature with scale 0.25."""
    return 1.0 + 0.25 * np.log1p((POSITIONS + first_position) // length)


def test_two_steps_show_the_length():
    """Factors that grow twice need no configuration, and show the first position."""
    expected = Temperature(6, 0.25, first_position=2)
    assert fit_temperature(factors_of(6, 2), POSITIONS, {}) == expected


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"sizes": {"lengths": [4, 12]}, "name": "tokens"}, Temperature(12, 0.25)),
        ({"length": 13}, Temperature(13, 0.25, first_position=1)),
        ({"name": "12", "use": True, "size": -12}, None),
        ({"length": 12, "vocabulary": 13}, None),
    ],
    ids=["nested, with text", "positions from 1", "no integer", "two fit"],
)
def test_one_step_needs_the_config(config, expected):
    """After a single step, the length is the integer of the configuration that fits, if only one
    does.
    """
    assert fit_temperature(factors_of(12), POSITIONS, config) == expected


def test_constant_factors_are_no_temperature():
    """Factors that never grow, decrease, or begin above 1 are no temperature."""
    for factors in (np.ones(20), 2.0 - factors_of(12), 2.0 * factors_of(12)):
        assert fit_temperature(factors, POSITIONS, {"length": 12}) is None

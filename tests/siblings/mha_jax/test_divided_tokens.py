"""Tokens of mha_jax divided over devices, for `make test`; test_sharded_tokens has more layers and meshes."""

import pytest
from helpers.shell import found_by

NAMES = ["ring, two", "heads for tokens, all that hides"]


@pytest.mark.costly("a process in which JAX has more devices")
def test_divided_tokens_match_one_device():
    """Outputs and gradients of divided tokens match one device, and exchanging tokens of two
    devices is detected.
    """
    found = found_by("sharded_tokens", *NAMES)["attended"]
    assert found.keys() == {*NAMES}
    for name, (wrong, _, _, exchanged) in found.items():
        assert wrong is None, name
        assert "output" in exchanged, name

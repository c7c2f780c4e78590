"""The numerics lock: set, recorded, and restored."""

import os

import jax
import jax.numpy as jnp
import pytest
import torch

import parity
from parity.measure.backends import jax as jax_backend
from parity.measure.backends.numerics import environment, numerics_lock


def torch_settings():
    return (
        torch.get_float32_matmul_precision(),
        torch.backends.mha.get_fastpath_enabled(),
        torch.backends.cudnn.allow_tf32,
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
    )


def test_torch_settings_are_restored():
    """The lock sets and records torch's settings, and restores the previous ones."""
    torch.set_float32_matmul_precision("medium")
    try:
        before = torch_settings()
        with numerics_lock(["torch"]) as settings:
            assert torch_settings() == ("highest", False, False, False)
            assert settings["torch"]["float32_matmul_precision"] == "highest"
            assert settings["torch"]["threads"] == torch.get_num_threads()
        assert torch_settings() == before
    finally:
        torch.set_float32_matmul_precision("highest")


def test_torch_is_restored_after_error():
    """The lock restores torch's settings after an exception."""
    before = torch_settings()
    with pytest.raises(KeyError), numerics_lock(["torch"]):
        raise KeyError
    assert torch_settings() == before


def test_jax_settings_are_restored():
    """The lock sets and records JAX's matmul precision, and restores the previous one."""
    before = jax.config.jax_default_matmul_precision
    with numerics_lock(["jax"]) as settings:
        assert jax.config.jax_default_matmul_precision == "highest"
        assert settings["jax"]["matmul_precision"] == "highest"
    assert jax.config.jax_default_matmul_precision == before


def test_float64_enables_x64_temporarily():
    """With float64 the lock enables and records x64, and disables it afterwards."""
    with numerics_lock(["jax"], "float64") as settings:
        assert jnp.zeros(1, float).dtype == jnp.float64
        assert settings["jax"]["x64"]
    assert not jax.config.jax_enable_x64


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="mappings are counted in /proc")
def test_many_compiled_programs_are_freed(monkeypatch):
    """A run with JAX frees compiled programs before their memory mappings reach the limit of a
    process, and keeps fewer.
    """
    case = parity.CASES["textbook"]
    parity.run_cases([case], ["jax"])
    num_functions = jax_backend._compiled.cache_info().currsize
    with numerics_lock(["jax"]):
        assert jax_backend._compiled.cache_info().currsize == num_functions > 0
    monkeypatch.setattr(jax_backend, "MOST_MAPS", 0)
    with numerics_lock(["jax"]):
        assert jax_backend._compiled.cache_info().currsize == 0


def test_environment_lists_versions():
    """The environment has versions of torch and JAX, JAX's platform, and the number of CPUs."""
    versions = environment(["jax", "torch"])
    assert versions["packages"]["torch"] == torch.__version__
    assert versions["packages"]["jax"] == jax.__version__
    assert versions["backends"]["jax"]["numerics"]["platform"] == jax.default_backend()
    assert versions["cpus"] > 0

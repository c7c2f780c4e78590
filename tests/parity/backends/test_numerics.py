"""The numerics lock: set, recorded, and put back."""

import jax
import jax.numpy as jnp
import pytest
import torch

from parity.backends.numerics import environment, numerics_lock


def torch_settings():
    return (
        torch.get_float32_matmul_precision(),
        torch.backends.mha.get_fastpath_enabled(),
        torch.backends.cudnn.allow_tf32,
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
    )


def test_torch_is_held_and_put_back():
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


def test_torch_is_put_back_after_an_error():
    before = torch_settings()
    with pytest.raises(KeyError), numerics_lock(["torch"]):
        raise KeyError
    assert torch_settings() == before


def test_jax_is_held_and_put_back():
    before = jax.config.jax_default_matmul_precision
    with numerics_lock(["jax"]) as settings:
        assert jax.config.jax_default_matmul_precision == "highest"
        assert settings["jax"]["matmul_precision"] == "highest"
    assert jax.config.jax_default_matmul_precision == before


def test_float64_switches_x64_on_and_off_again():
    with numerics_lock(["jax"], "float64") as settings:
        assert jnp.zeros(1, float).dtype == jnp.float64
        assert settings["jax"]["x64"]
    assert not jax.config.jax_enable_x64


def test_environment_names_versions_devices_and_settings():
    found = environment(["jax", "torch"])
    assert found["packages"]["torch"] == torch.__version__
    assert found["packages"]["jax"] == jax.__version__
    assert found["backends"]["jax"]["numerics"]["platform"] == jax.default_backend()
    assert found["cpus"] > 0

"""`keras.layers.MultiHeadAttention` and `GroupQueryAttention`, on any framework of Keras."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from mha_spec import AttentionSpec, InputError
from parity.measure.core.arrays import to_jax, to_torch
from parity.measure.core.weights import Weights
from parity.measure.files.small import read_json
from parity.port.foreign.adapter import Adapter, reject_options


def import_keras(framework: str | None = None) -> ModuleType:
    """Import Keras, which runs on the framework that it was first imported with.

    Args:
        framework: framework to import it with, unless Keras is already imported or `KERAS_BACKEND`
            is set. Default: the backend of the user's Keras settings if installed, otherwise torch
            or JAX.

    Raises:
        ImportError: if Keras or its framework is not installed.
    """
    if "keras" in sys.modules or "KERAS_BACKEND" in os.environ:
        import keras

        return keras
    os.environ["KERAS_BACKEND"] = framework or _configured_framework()
    try:
        import keras
    finally:
        del os.environ["KERAS_BACKEND"]
    return keras


def _configured_framework() -> str:
    """Return the framework of the user's settings, if it is installed.

    Keras may write one that is not.
    """
    settings = Path(os.environ.get("KERAS_HOME", Path.home() / ".keras")) / "keras.json"
    chosen = read_json(settings).get("backend") if settings.exists() else None
    if chosen is not None and find_spec(chosen):
        return chosen
    return "torch" if find_spec("torch") else "jax"


class _KerasAttention(Adapter):
    """Code that the two layers share."""

    mask_true = "shows"

    def tensors(self, module: Any) -> Mapping[str, Any]:
        if not module.built:
            raise InputError(
                f"a {self.name}", "be built first, with layer.build(query_shape, value_shape)"
            )
        # A path ends with the projection and its kernel or bias; it begins with the names of
        # enclosing layers.
        return {
            ".".join(variable.path.split("/")[-2:]): variable.value for variable in module.weights
        }

    def write(self, module: Any, tensors: Weights) -> Any:
        converts: dict[str, Callable[[np.ndarray], Any]] = {"torch": to_torch, "jax": to_jax}
        convert = converts.get(import_keras().backend.backend(), np.asarray)
        for name, variable in zip(self.tensors(module), module.weights, strict=True):
            variable.assign(convert(tensors[name]))
        return module

    def call(
        self,
        module: Any,
        query: Any,
        key: Any,
        value: Any,
        *,
        mask: Any = None,
        is_causal: bool = False,
        need_weights: bool = False,
        train: bool = False,
    ) -> tuple[Any, Any]:
        """Call the layer as `Adapter.call` does; the mask must be the same for all heads."""
        if mask is not None:
            if mask.shape[1] != 1:
                raise InputError(
                    f"the mask of a {self.name}", "be one for all heads", {"mask.shape": mask.shape}
                )
            mask = mask[:, 0]
        # Keras takes values before keys.
        result = module(
            query,
            value,
            key,
            attention_mask=mask,
            use_causal_mask=is_causal,
            return_attention_scores=need_weights,
            training=train,
        )
        return result if need_weights else (result, None)


class KerasMultiHeadAttention(_KerasAttention):
    """`keras.layers.MultiHeadAttention`."""

    name = "keras.layers.MultiHeadAttention"
    layout = "keras.MultiHeadAttention"

    def make(self, spec: AttentionSpec, dtype: str = "float32", **options: Any) -> Any:
        self.check_can_be(spec)
        arguments = {
            "use_bias": spec.qkv_bias,
            "output_shape": spec.d_model,
            "dropout": spec.dropout,
            "dtype": dtype,
            "seed": 0,
        }
        layer = import_keras().layers.MultiHeadAttention(
            spec.num_heads, spec.head_dim, **(arguments | options)
        )
        layer.build((None, None, spec.d_in), (None, None, spec.d_kv))
        return layer

    def open_fields(self, module: Any) -> dict[str, Any]:
        config = module.get_config()
        unsupported = _later_options(config)
        axes = config["attention_axes"]
        if axes is not None and tuple(axes) != (1,):
            unsupported["attention_axes"] = axes
        if config["value_dim"] != config["key_dim"]:
            unsupported["value_dim"] = config["value_dim"]
        reject_options(unsupported, self.name)
        return {"num_heads": config["num_heads"], "dropout": config["dropout"]}


class KerasGroupQueryAttention(_KerasAttention):
    """`keras.layers.GroupQueryAttention`, whose output is as wide as its query."""

    name = "keras.layers.GroupQueryAttention"
    layout = "keras.GroupQueryAttention"

    def make(self, spec: AttentionSpec, dtype: str = "float32", **options: Any) -> Any:
        self.check_can_be(spec)
        if spec.d_model != spec.d_in:
            raise InputError(
                f"a {self.name}",
                "have d_model equal to d_in",
                {"spec.d_model": spec.d_model, "spec.d_in": spec.d_in},
            )
        heads = (spec.head_dim, spec.num_heads, spec.num_kv_heads)
        arguments = {"use_bias": spec.qkv_bias, "dropout": spec.dropout, "dtype": dtype, "seed": 0}
        layer = import_keras().layers.GroupQueryAttention(*heads, **(arguments | options))
        layer.build((None, None, spec.d_in), (None, None, spec.d_kv))
        return layer

    def open_fields(self, module: Any) -> dict[str, Any]:
        config = module.get_config()
        reject_options(_later_options(config), self.name)
        return {"num_heads": config["num_query_heads"], "dropout": config["dropout"]}


def _later_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that older versions of Keras lack, and no specification expresses."""
    return {"use_gate": config.get("use_gate"), "sliding_window": config.get("sliding_window")}


ADAPTERS = [KerasMultiHeadAttention(), KerasGroupQueryAttention()]

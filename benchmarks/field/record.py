"""Run a library's own model on a transformers folder with its own loader, and record its attention
layers.

    python benchmarks/field/record.py LIBRARY FOLDER TAP.safetensors

LIBRARY is transformers, tunix, keras-hub or maxtext, which must be installed. The recording comes
from `parity.tap`, with the queries and keys that the library's own rotary function returns.
`mha-parity diagnose TAP.safetensors --model FOLDER` checks it, in any environment. Options of
MaxText, such as rope_type=default, follow TAP.safetensors.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import parity
from parity.measure.core.weights import load_tensors
from parity.port.models.config import read_config
from parity.port.tapping.record import Tapped

TOKENS = np.random.default_rng(0).integers(0, 64, (1, 128))
SIZES = {"num_layers": "num_hidden_layers", "vocab_size": "vocab_size", "embed_dim": "hidden_size"}
SIZES |= {
    "hidden_dim": "intermediate_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
}


@contextmanager
def rotated(owner: Any, name: str) -> Iterator[list[np.ndarray]]:
    """Wrap the rotary function `name` of `owner`; yield its outputs q and k, (B, N, T, H), layer by
    layer.
    """
    original: Callable[..., Any] = getattr(owner, name)
    heads: list[np.ndarray] = []

    def heard(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        heads.append(parity.to_numpy(result).swapaxes(1, 2).copy())
        return result

    setattr(owner, name, heard)
    try:
        yield heads
    finally:
        setattr(owner, name, original)


def with_heads(tapped: Tapped, heads: list[np.ndarray]) -> Tapped:
    """Return the recording with the queries and keys of each layer."""
    for layer, q, k in zip(tapped.layers, heads[::2], heads[1::2], strict=True):
        layer.calls[0].values.update(q=q, k=k)
    return tapped


def record_transformers(folder: str) -> Tapped:
    """Load with `from_pretrained`."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    with parity.tap(model) as tapped, torch.no_grad():
        model(torch.from_numpy(TOKENS))
    return tapped


def record_tunix(folder: str) -> Tapped:
    """Load with `create_model_from_safe_tensors`, with the theta of the configuration."""
    import jax.numpy as jnp
    from tunix.models.llama3 import model as llama3
    from tunix.models.llama3 import params

    config_values = read_config(folder)
    config = llama3.ModelConfig(
        **{name: config_values[key] for name, key in SIZES.items()},
        head_dim=config_values["head_dim"],
        rope_theta=int(config_values["rope_parameters"]["rope_theta"]),
        norm_eps=config_values["rms_norm_eps"],
        weight_tying=config_values["tie_word_embeddings"],
    )
    model = params.create_model_from_safe_tensors(folder, config, dtype=jnp.float32)
    length = TOKENS.shape[1]
    shows = jnp.tril(jnp.ones((1, length, length), bool))
    with parity.tap(model) as tapped, rotated(llama3, "apply_rope") as heads:
        model(jnp.asarray(TOKENS), jnp.arange(length)[None], None, shows)
    return with_heads(tapped, heads)


def record_keras_hub(folder: str) -> Tapped:
    """Load with `from_preset`, on torch."""
    os.environ["KERAS_BACKEND"] = "torch"
    import torch
    from keras_hub.models import Llama3Backbone
    from keras_hub.src.models.llama.llama_rotary_embedding import LlamaRotaryEmbedding

    model = Llama3Backbone.from_preset(folder, dtype="float32")
    layers = torch.nn.ModuleList(
        model.get_layer(f"transformer_layer_{i}") for i in range(model.num_layers)
    )
    with (
        parity.tap(layers) as tapped,
        rotated(LlamaRotaryEmbedding, "call") as heads,
        torch.no_grad(),
    ):
        model({"token_ids": TOKENS, "padding_mask": np.ones_like(TOKENS)})
    return with_heads(tapped, heads)


def record_maxtext(folder: str) -> Tapped:
    """Load with the parameter mapping of its checkpoint converter, and its OLMo-3 7B configuration,
    made smaller.
    """
    import jax.numpy as jnp
    import maxtext
    from flax import nnx
    from maxtext.checkpoint_conversion.utils import param_mapping
    from maxtext.configs import pyconfig
    from maxtext.layers.attentions import Attention
    from maxtext.utils.model_creation_utils import from_config

    config_values = read_config(folder)
    options = {
        "model_name": (name := "olmo3-7b"),
        "override_model_config": True,
        "run_name": "field",
        "base_emb_dim": config_values["hidden_size"],
        "base_num_query_heads": config_values["num_attention_heads"],
        "base_num_kv_heads": config_values["num_key_value_heads"],
        "base_mlp_dim": config_values["intermediate_size"],
        "base_num_decoder_layers": config_values["num_hidden_layers"],
        "vocab_size": config_values["vocab_size"],
        "sliding_window_size": config_values["sliding_window"],
        "max_target_length": TOKENS.shape[1],
        "per_device_batch_size": 1,
        "dtype": "float32",
        "scan_layers": False,
        "attention": "dot_product",
        "enable_checkpointing": False,
        "skip_jax_distributed_system": True,
        "hardware": "cpu",
    }
    base = str(Path(maxtext.__file__).parent / "configs" / "base.yml")
    config = pyconfig.initialize(
        ["", base, *(f"{key}={value}" for key, value in options.items()), *sys.argv[4:]]
    )
    model = from_config(config, rngs=nnx.Rngs(0))
    tensors, _ = load_tensors(Path(folder) / "model.safetensors")
    names = param_mapping.PARAM_MAPPING[name](config_values, config, scan_layers=False)
    hooks = param_mapping.HOOK_FNS[name](
        config_values, config, scan_layers=False, saving_to_hf=False
    )
    filled = []
    for path, param in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        key = "-".join(("params", *path))
        filled.append(
            (path, param.replace(jnp.asarray(hooks[key](tensors[names[key]], param.shape))))
        )
    nnx.update(model, nnx.from_flat_state(filled))
    x = jnp.asarray(tensors["model.embed_tokens.weight"][TOKENS])
    positions = jnp.arange(TOKENS.shape[1])[None]
    with (
        parity.tap(model, "Attention") as tapped,
        rotated(Attention, "apply_rotary_embedding") as heads,
    ):
        for i in range(
            config.num_decoder_layers
        ):  # one by one, because the model calls copies within jax.checkpoint
            x, _ = getattr(model.decoder, f"layers_{i}")(x, None, positions, True, "train")
    return with_heads(tapped, heads)


RECORD = {
    "transformers": record_transformers,
    "tunix": record_tunix,
    "keras-hub": record_keras_hub,
    "maxtext": record_maxtext,
}


if __name__ == "__main__":
    RECORD[sys.argv[1]](sys.argv[2]).save(sys.argv[3])

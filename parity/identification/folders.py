"""Observe the layers of a model in a folder whose family nobody has rules for."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import ml_dtypes  # noqa: F401, whose dtypes NumPy then knows by name
import numpy as np

from mha_spec import Refusal
from parity.conversion.layouts import LAYOUTS
from parity.conversion.metadata import metadata_of, tells_layout
from parity.conversion.prefixes import join
from parity.files import write_tensors
from parity.identification.layers import LiveLayer, layers_of
from parity.models.config import read_config
from parity.models.specs import known_parts

if TYPE_CHECKING:
    import torch

NUM_TOKENS = 32
"""Tokens of each of two sequences."""


def is_unknown(folder: str | os.PathLike[str]) -> bool:
    """Return whether a path is the folder of a model of which neither rules nor its own metadata tell any layer."""
    config = Path(folder) / "config.json"
    return config.is_file() and not known_parts(read_config(config)) and not tells_layout(folder)


def observe_folder(folder: str | os.PathLike[str]) -> list[LiveLayer]:
    """Return what the layers of a model in a folder compute, by `layers_of` on random inputs.

    transformers loads the model, from this folder alone, in float32, without code from the folder.

    Raises:
        ModuleNotFoundError: if transformers is not installed.
        OSError: if the folder has no weights in safetensors.
        ValueError: if transformers has no such model, the folder lacks weights of attention, or the inputs of such a
            model are not known.
    """
    import torch
    from transformers import AutoConfig, AutoModel

    local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        config = AutoConfig.from_pretrained(folder, **local)
        model, told = AutoModel.from_pretrained(
            folder,
            config=config,
            dtype=torch.float32,
            attn_implementation="eager",
            use_safetensors=True,
            output_loading_info=True,
            **local,
        )
    except (KeyError, ValueError) as error:
        raise Refusal(folder, "be a model that transformers loads without code of others", f"{error!s:.200}") from error
    layers = [_as_stored(layer, config) for layer in layers_of(model.eval(), random_inputs(model))]
    absent = [*told["missing_keys"], *(name for name, *_ in told["mismatched_keys"])]
    if lost := [name for name in absent if any(f"{name}.".startswith(f"{layer.name}.") for layer in layers)]:
        raise Refusal(folder, "hold the weights of all layers", f"none of {', '.join(lost[:3])}")
    return layers


def random_inputs(model: Any) -> dict[str, torch.Tensor]:
    """Return keywords of a call of a model of transformers: tokens, or an image.

    Raises:
        ValueError: if it takes anything else.
    """
    import torch

    generator, config = torch.Generator().manual_seed(0), model.config
    channels, size = getattr(config, "num_channels", None), getattr(config, "image_size", None)
    if model.main_input_name == "pixel_values" and channels and size:
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        return {"pixel_values": torch.randn(2, channels, height, width, generator=generator)}
    words = getattr(config.get_text_config(), "vocab_size", None)
    if model.main_input_name != "input_ids" or not words:
        hint = "parity.layers_of(model, inputs) takes the inputs of any"
        raise Refusal("a folder to observe", "be of a model of tokens or images", model.main_input_name, hint=hint)
    tokens = torch.randint(words, (2, NUM_TOKENS), generator=generator)
    padding = getattr(config, "pad_token_id", None)
    tokens[tokens == padding] = (0 if padding is None else padding + 1) % words
    decoder = {"decoder_input_ids": tokens.flip(1)} if getattr(config, "is_encoder_decoder", False) else {}
    return {"input_ids": tokens, **decoder}


def _as_stored(layer: LiveLayer, config: Any) -> LiveLayer:
    """Return a layer with weights in the dtype of its files, if that holds them all."""
    dtype = np.dtype(str(config.dtype or "float32").removeprefix("torch."))
    narrow = {name: weight.astype(dtype) for name, weight in layer.weights.items()}
    is_exact = all((narrow[name].astype(weight.dtype) == weight).all() for name, weight in layer.weights.items())
    return replace(layer, weights=narrow) if is_exact else layer


@contextmanager
def observed_file(layers: Sequence[LiveLayer]) -> Iterator[Path]:
    """Write the layers that were identified to a file that is there for a while, with their specifications.

    Raises:
        ValueError: if there is none.
    """
    known = [layer for layer in layers if layer.spec is not None]
    if not known:
        raise Refusal("a layer of the model", "be identified", "; ".join(map(str, layers)))
    specs = {layer.name: layer.spec for layer in known if layer.spec is not None}
    held = {join(layer.name, name): weight for layer in known for name, weight in layer.weights.items()}
    infos = {name: (weight.shape, weight.dtype) for name, weight in held.items()}
    with TemporaryDirectory() as folder:
        path = Path(folder) / "observed.safetensors"
        write_tensors(path, infos, held.__getitem__, metadata_of(LAYOUTS["canonical"], specs, None))
        yield path

"""Observe the layers of a model folder whose family has no rules."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import ml_dtypes  # noqa: F401, registers its dtypes with NumPy by name
import numpy as np

from mha_spec import InputError
from parity.explain.identification.layers import LiveLayer, layers_of
from parity.measure.core.user_code import user_code
from parity.measure.files import write_tensors
from parity.measure.files.small import check_small_files
from parity.measure.text import in_line
from parity.port.conversion.layouts import LAYOUTS
from parity.port.conversion.metadata import metadata_of
from parity.port.conversion.prefixes import join
from parity.port.models.config import read_config
from parity.port.models.specs import known_parts, layers_of_parts

if TYPE_CHECKING:
    import torch

NUM_TOKENS = 32
"""Tokens of each of two sequences."""

MOST_OF_ERROR = 200
"""Characters of an error of transformers."""


@contextmanager
def code_of_transformers(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Run code of transformers on a folder. It does not check what it reads, so it may raise
    anything.

    Raises:
        OSError, ImportError, MemoryError: as raised: something is missing, not wrong.
        ValueError: for every other exception: why our rules reject the configuration if its family
            has rules, otherwise the beginning of the exception's text.
    """
    try:
        with user_code("transformers"):
            yield
    except (InputError, OSError, ImportError, MemoryError):
        raise
    except Exception as error:
        text = in_line(f"{type(error).__name__}: {error}", MOST_OF_ERROR)
        broken = _broken_rule(folder)
        if broken is None:
            rule = "be a model that transformers loads without code of others"
            raise InputError(folder, rule, text) from error
        hints = [f"transformers does not load it either: {text}"]
        if broken.hint:
            hints.insert(0, broken.hint)
        broken.hint = "; ".join(hints)
        raise broken from error


def _broken_rule(folder: str | os.PathLike[str]) -> InputError | None:
    """Return why the rules of its family reject a folder; None if its family has none, or they
    accept it.
    """
    try:
        config = read_config(folder)
        if known_parts(config):
            layers_of_parts(config)
    except InputError as error:
        return error.within(os.fspath(folder))
    return None


def observe_folder(folder: str | os.PathLike[str]) -> list[LiveLayer]:
    """Return the layers of a model folder, by `layers_of` on random inputs.

    transformers loads the model offline, in float32, and runs no code from the folder.

    Raises:
        ModuleNotFoundError: if transformers is not installed.
        OSError: if the folder has no weights in safetensors.
        ValueError: if transformers cannot load the model, the folder lacks attention weights, or no
            known inputs run the model.
    """
    import torch
    from transformers import AutoConfig, AutoModel

    check_small_files(folder)
    local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    with code_of_transformers(folder):
        config = AutoConfig.from_pretrained(folder, **local)
        model, loading = AutoModel.from_pretrained(
            folder,
            config=config,
            dtype=torch.float32,
            attn_implementation="eager",
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # such weights are reported by name below
            **local,
        )
        model.eval()
        candidates = list(random_inputs(model.config))
        dtype = np.dtype(str(config.dtype or "float32").removeprefix("torch."))
    layers = layers_of(model, _working_inputs(model, candidates))
    stored = [_as_stored(layer, dtype) for layer in layers]

    absent = list(loading["missing_keys"])
    absent += [name for name, *_ in loading["mismatched_keys"]]
    lost = [name for name in absent if _is_in_layer(name, stored)]
    if lost:
        raise InputError(folder, "hold the weights of all layers", f"none of {', '.join(lost[:3])}")
    return stored


def _is_in_layer(name: str, layers: Sequence[LiveLayer]) -> bool:
    """Return whether a weight belongs to one of some layers."""
    return any(f"{name}.".startswith(f"{layer.name}.") for layer in layers)


# ---- Inputs --------------------------------------------------------------------------------------


def _working_inputs(
    model: Any, candidates: Sequence[dict[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """Return the first keyword arguments with which a transformers model runs.

    Raises:
        ValueError: if neither tokens nor images run it.
    """
    import torch

    last_error: Exception | None = None
    for inputs in candidates:
        try:
            with torch.no_grad(), user_code(model):
                model(**inputs)
        except Exception as error:  # the model's own code may raise anything
            last_error = error
        else:
            return inputs
    raise InputError(
        "a folder to observe",
        "be of a model of tokens or images",
        in_line(repr(last_error), 120),
        hint="parity.layers_of(model, inputs) takes the inputs of any",
    )


def random_inputs(config: Any) -> Iterator[dict[str, torch.Tensor]]:
    """Yield candidate keyword arguments of a transformers model: tokens with an image, tokens, an
    image.
    """
    import torch

    generator = torch.Generator().manual_seed(0)
    tokens = _random_tokens(config, generator)
    image = _random_image(config, generator)
    if tokens and image:
        yield {**tokens, **image}
    if tokens:
        yield tokens
    if image:
        yield image


def _random_tokens(config: Any, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Return tokens without padding; nothing if the model has no vocabulary."""
    import torch

    vocab_size = getattr(config.get_text_config(), "vocab_size", None)
    if not vocab_size:
        return {}
    ids = torch.randint(vocab_size, (2, NUM_TOKENS), generator=generator)
    padding = getattr(config, "pad_token_id", None)
    if padding is not None:
        ids[ids == padding] = (padding + 1) % vocab_size
    tokens = {"input_ids": ids}
    if getattr(config, "is_encoder_decoder", False):
        tokens["decoder_input_ids"] = ids.flip(1)
    return tokens


def _random_image(config: Any, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Return two images of random numbers; nothing if the model has no images."""
    import torch

    vision = getattr(config, "vision_config", config)
    num_channels = getattr(vision, "num_channels", None)
    size = getattr(vision, "image_size", None)
    if not num_channels or not size:
        return {}
    if isinstance(size, (list, tuple)):
        height, width = size
    else:
        height = width = size
    return {"pixel_values": torch.randn(2, num_channels, height, width, generator=generator)}


# ---- Weights -------------------------------------------------------------------------------------


def _as_stored(layer: LiveLayer, dtype: np.dtype) -> LiveLayer:
    """Return a layer with weights in the dtype of its files, if that dtype represents them
    exactly.
    """
    narrow = {}
    for name, weight in layer.weights.items():
        narrow[name] = weight.astype(dtype)
        if not (narrow[name].astype(weight.dtype) == weight).all():
            return layer
    return replace(layer, weights=narrow)


@contextmanager
def observed_file(layers: Sequence[LiveLayer]) -> Iterator[Path]:
    """Write the identified layers with their specifications to a temporary file, and yield its
    path.

    Raises:
        ValueError: if no layer was identified.
    """
    specs = {}
    tensors = {}
    for layer in layers:
        if layer.spec is None:
            continue
        specs[layer.name] = layer.spec
        for name, weight in layer.weights.items():
            tensors[join(layer.name, name)] = weight
    if not specs:
        raise InputError("a layer of the model", "be identified", "; ".join(map(str, layers)))
    infos = {name: (weight.shape, weight.dtype) for name, weight in tensors.items()}
    with TemporaryDirectory() as folder:
        path = Path(folder) / "observed.safetensors"
        metadata = metadata_of(LAYOUTS["canonical"], specs, None)
        write_tensors(path, infos, tensors.__getitem__, metadata)
        yield path

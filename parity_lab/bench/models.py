"""Speed of the attention of a model with its own weights, compared with transformers' own
modules.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from functools import cache, partial
from typing import Any, Unpack

import numpy as np

from mha_spec import AttentionSpec, InputError
from parity.port.conversion.checkpoint import Checkpoint
from parity.port.conversion.hints import CALLER, LayerHints, LayerKeywords
from parity.port.conversion.layers import FileLayer
from parity.use.running.models import chosen_layers, number_of, skeleton_of
from parity_lab.bench import Bench, Make, bench_work, checked, effort, environment_of, open_sides
from parity_lab.bench.measure import Contender
from parity_lab.bench.work import Work, draw_inputs

TRANSFORMERS = "transformers"
NAMES = {TRANSFORMERS: "the model's own module of transformers, with SDPA if it has that"}


def bench_model(
    path: str | os.PathLike[str],
    frameworks: Sequence[str] | None = None,
    dtypes: Sequence[str] | None = None,
    *,
    layers: Collection[int] | None = None,
    device: str = "cpu",
    quick: bool = False,
    profile: bool = False,
    on_row: Callable[..., Any] = lambda *what: None,
    layout: str | None = None,
    prefix: str | None = None,
    **said: Unpack[LayerKeywords],
) -> Bench:
    """Measure the self-attention of a model: many tokens at once, and one more token with a cache.

    Layers that compute the same function of their weights are measured once, with the weights of
    the first. In torch the module of transformers is also measured on many tokens, if that is
    installed, the folder has a config.json, and the module computes only attention, unlike in BERT
    and BLOOM, which add the residual.

    Args:
        path, layers, layout, prefix, said: arguments of `run_model`.
        frameworks, dtypes, device, quick, profile, on_row: arguments of `bench`.

    Raises:
        ModuleNotFoundError, OSError, RuntimeError, ValueError: as `bench` and `run_model`, or if no
            layer attends to its own tokens.
    """
    _, frameworks, dtypes = checked((), frameworks, dtypes, device)
    sides, names = open_sides(frameworks, device)
    rows = []
    with Checkpoint.open(path) as checkpoint:
        open_layers = checkpoint.layers(LayerHints.by(CALLER, **said), layout, prefix)
        open_layers.warn_if_incomplete()
        # Made for the first layer that needs it, and only if torch is measured.
        skeleton = cache(partial(_skeleton, checkpoint))
        for layer, label in _alike(chosen_layers(open_layers.in_order, layers)):
            weights, _ = layer.load()
            for work in _works(layer, label, dtypes, quick):
                on_row(f"{work.what} {work.shape}")
                inputs = draw_inputs(work, weights)
                more: dict[str, Make] = {}
                if "torch" in sides and work.kind == "layer":
                    x = inputs.arrays["x"]
                    more[TRANSFORMERS] = partial(
                        _own_module, skeleton, layer, work, sides["torch"], x
                    )
                rows += bench_work(
                    work, sides, inputs=inputs, more=more, profile=profile, **effort(quick)
                )
    if "torch" in names:
        names["torch"] = names["torch"] | NAMES
    return Bench(rows, environment_of(sides), names)


def _alike(layers: Sequence[FileLayer]) -> list[tuple[FileLayer, str]]:
    """Return the first of equal layers, with all of them in words: `layers 0-4, 6`."""
    groups: dict[tuple[AttentionSpec, bool, str], list[FileLayer]] = {}
    for layer in layers:
        if layer.is_cross:
            continue
        key = (layer.spec, _is_causal(layer), _part_of(layer))
        groups.setdefault(key, []).append(layer)
    if not groups:
        raise InputError("there", "be a layer that attends to its own tokens to measure", "none")
    has_parts = len({part for _, _, part in groups}) > 1
    labeled = []
    for (_, _, part), group in groups.items():
        label = _in_words([number_of(layer) for layer in group])
        if has_parts and part:
            label = f"{part} {label}"
        labeled.append((group[0], label))
    return labeled


def _part_of(layer: FileLayer) -> str:
    """Return the part of the model that a layer belongs to, such as `encoder`."""
    if layer.model is not None:
        return layer.model.part
    return layer.prefix.split(".")[0]


def _in_words(numbers: Sequence[int]) -> str:
    """Return numbers in words: `layers 0-4, 6`."""
    different = sorted(set(numbers))
    runs: list[list[int]] = []
    for number in different:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    words = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    noun = "layer" if len(different) == 1 else "layers"
    return f"{noun} {', '.join(words)}"


def _is_causal(layer: FileLayer) -> bool:
    """Return whether a layer is causal, which is the default."""
    return layer.model is None or layer.model.is_causal


def _works(layer: FileLayer, label: str, dtypes: Sequence[str], quick: bool) -> list[Work]:
    """Return the pieces of work of a layer: many tokens and, if it is causal, one more token after
    the most of them.
    """
    lengths = (256,) if quick else (256, 1024)
    works = []
    for dtype in dtypes:
        options: dict[str, Any] = {
            "num_heads": layer.spec.num_heads,
            "head_dim": layer.spec.head_dim,
            "dtype": dtype,
            "layer": layer.spec,
            "label": label,
        }
        for seq_len in lengths:
            works.append(Work("model", "layer", 1, seq_len, is_causal=_is_causal(layer), **options))
        if _is_causal(layer):
            works.append(Work("model", "decode", 1, lengths[-1], **options))
    return works


def _skeleton(checkpoint: Checkpoint) -> Any:
    """Return the model of transformers for the folder's config.json, with SDPA if it has that."""
    try:
        return skeleton_of(checkpoint, "sdpa")
    except ValueError:  # BLOOM and others have no SDPA
        return skeleton_of(checkpoint)


def _own_module(
    skeleton: Callable[[], Any], layer: FileLayer, work: Work, side: Any, x: np.ndarray
) -> Contender:
    """Return the library's own module of a layer, called like in its model."""
    import torch
    from torch.utils._pytree import tree_map_only

    if layer.model is None:
        raise ValueError("its configuration does not determine its module")
    call = skeleton().call(layer.model, layer.label, layer.tensors(), x.astype(np.float32))
    dtype = getattr(torch, work.dtype)
    module = call.module.to(side.device, dtype)

    def put(tensor: Any) -> Any:
        # Indices and masks keep their dtype.
        if tensor.is_floating_point():
            return tensor.to(side.device, dtype)
        return tensor.to(side.device)

    args, kwargs = tree_map_only(torch.Tensor, put, (call.args, call.kwargs))
    states = side.put(x)  # the inputs of our layer, instead of normalized ones of the model
    if args:
        args = (states, *args[1:])
    else:
        kwargs["hidden_states"] = states

    def forward() -> Any:
        output = module(*args, **kwargs)
        # Most modules also return attention weights.
        if isinstance(output, tuple):
            return output[0]
        return output

    return side.contender(work, forward, {"x": states})

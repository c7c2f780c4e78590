"""Attention written out: the plain code of one layer, without options and without this package.

Each framework has a template: a plain definition of attention with a branch for each field of a specification. A
layer's file is what `specialize` leaves of it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import mha_spec
from mha_spec import AttentionSpec, Refusal
from parity.conversion.layers import FileLayer
from parity.writing.about import NAMES, docstring_of, title_of
from parity.writing.loader import loader_of
from parity.writing.specialize import specialize
from parity.writing.subject import ABSENT, CallForm, CallKeywords

TEMPLATES = Path(__file__).with_name("templates")

NAMES_GO_HERE = "from parity.writing.templates.names import *\n"
"""The line of a template that stands for `names.py`."""

KEEP = ("Attention", "attention", "params_from", "weights_from")
"""Names of a written module that its users call."""


def source_of(spec: AttentionSpec, framework: str, **call: Unpack[CallKeywords]) -> str:
    """Return the source of a module of plain code that computes one layer, and nothing else.

    It has no branch for other layers. Weights have their canonical names. In torch they are the state dict of
    `Attention`. In JAX `attention` accepts nested mappings, kernels (in, out). In TTNN `Attention` is made of them.
    Inputs are finite: NaN in a hidden key may show.

    Args:
        spec: the layer.
        framework: `jax`, `torch` or `ttnn`.
        call: how it is called, see `CallKeywords`; default: causal self-attention without a cache.

    Returns:
        The source. What acts in training only is left out but for the dropout of torch's attention weights.

    Raises:
        ValueError: if there is no such framework, or the keywords do not fit each other.
    """
    return written(spec, framework, CallForm(**call))


def source_of_layer(layer: FileLayer, framework: str, **call: Unpack[CallKeywords]) -> str:
    """Return the source of a layer of a checkpoint, with a function that takes the checkpoint's tensors.

    Args:
        layer: the layer, of an open file.
        framework, call: as `source_of` takes them; default: causal or not, and across, as the layer is.

    Raises:
        ValueError: as `source_of`, or if the tensors are quantized.
    """
    return written(layer.spec, framework, call_of_layer(layer, **call), loader_of(layer, framework))


def call_of_layer(layer: FileLayer, **call: Unpack[CallKeywords]) -> CallForm:
    """Return how a layer of a checkpoint is called: across and causally as its model does, and as the keywords say."""
    is_causal = layer.model is None or layer.model.is_causal is not False
    default: CallKeywords = {"is_cross": layer.is_cross, "is_causal": is_causal and not layer.is_cross}
    return CallForm(**{**default, **call})


def written(spec: AttentionSpec, framework: str, call: CallForm, loader: str = "") -> str:
    """Return the source of a layer, and after it that of a function that loads its weights."""
    if framework not in NAMES:
        raise Refusal("framework", f"be one of {', '.join(NAMES)}", framework=framework)
    if call.is_cross and (spec.rope is not None or spec.latent is not None):
        raise Refusal("is_cross", "be False with RoPE or latents, whose keys come from the queries' tokens", spec=spec)
    if not call.is_cross and spec.d_kv != spec.d_in:
        raise Refusal("is_cross", "be True for keys of another width", d_in=spec.d_in, d_kv=spec.d_kv)
    if spec.shared_kv and (call.is_cross or call.cache is not None):
        rule = "be False in calls of a second input or with a cache, which the other layer fills"
        raise Refusal("shared_kv", rule, shared_kv=True, is_cross=call.is_cross, cache=call.cache)
    if call.has_positions and not spec.has_positions:
        raise Refusal("has_positions", "be False for a layer without RoPE and temperature", has_positions=True)
    known = {"spec": replace(spec, fused_qkv=False), "call": call, "ABSENT": ABSENT, **_records()}
    template = (TEMPLATES / f"{framework}.py").read_text().replace(NAMES_GO_HERE, _names(), 1)
    source = specialize(f"{template}\n\n{loader}", known, _unused(spec, call), _kept(call))
    return source.replace("TITLE", docstring_of(spec, framework, call), 1).replace("ABOUT", title_of(spec, call), 1)


def _names() -> str:
    """Return what all templates begin with, after its docstring."""
    return (TEMPLATES / "names.py").read_text().partition('"""\n\n')[2]


def _records() -> dict[str, Any]:
    return {name: getattr(mha_spec, name) for name in mha_spec.__all__}


def _kept(call: CallForm) -> tuple[str, ...]:
    return KEEP if call.cache is None else (*KEEP, "empty_cache")


def _unused(spec: AttentionSpec, call: CallForm) -> list[str]:
    """List the arguments that a call does not pass."""
    passed = {
        "x": not call.is_cross,
        "query": call.is_cross,
        "key": call.is_cross,
        "other_k": spec.shared_kv,
        "other_v": spec.shared_kv,
        "cache": call.cache is not None,
        "new_lengths": call.cache == "ragged",
        "mask": call.has_mask,
        "bias": call.has_bias,
        "positions": call.has_positions,
    }
    return [name for name, is_passed in passed.items() if not is_passed]

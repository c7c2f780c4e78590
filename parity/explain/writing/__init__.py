"""Write attention as source code: the plain code of one layer, without options and without this
package.

Each framework has a template: a plain definition of attention with a branch for each field of a
specification. `specialize` keeps the parts that a layer needs, and `check` runs what was
written. Start at `source_of`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import mha_spec
from mha_spec import AttentionSpec, InputError
from parity.explain.writing.about import NAMES, docstring_of, title_of
from parity.explain.writing.loader import Loader, loader_of
from parity.explain.writing.quoting import check_keys
from parity.explain.writing.specialize import Decision, specialize
from parity.explain.writing.subject import ABSENT, CallForm, CallKeywords
from parity.port.conversion.layers import FileLayer

TEMPLATES = Path(__file__).with_name("templates")

NAMES_GO_HERE = "from parity.explain.writing.templates.names import *\n"
"""The line of a template that `names.py` replaces."""

KEEP = ("Attention", "attention")
"""Public names of a written module."""


def source_of(spec: AttentionSpec, framework: str, **call: Unpack[CallKeywords]) -> str:
    """Return the source of a module that computes one layer in plain code.

    It has no branches for other layers. Weights have their canonical names. In torch they are the
    state dict of `Attention`. In JAX `attention` accepts nested mappings, kernels (in, out). In
    TTNN they are an argument of `Attention`. Inputs must be finite: NaN in a hidden key may
    propagate.

    Args:
        spec: the layer.
        framework: `jax`, `torch` or `ttnn`.
        call: the form of its calls, see `CallKeywords`; default: causal self-attention without a
            cache.

    Returns:
        The source. Features that act only in training are left out, except torch's dropout of
        attention weights.

    Raises:
        ValueError: if the framework is unknown, or the keywords conflict.
    """
    return written(spec, framework, CallForm(**call))


def source_of_layer(layer: FileLayer, framework: str, **call: Unpack[CallKeywords]) -> str:
    """Return the source of a checkpoint's layer, with a function that accepts the checkpoint's
    tensors.

    Args:
        layer: a layer of an open file.
        framework, call: as in `source_of`; by default, causality and cross-attention follow the
            layer.

    Raises:
        ValueError: as in `source_of`, or if the tensors are quantized.
    """
    return written(layer.spec, framework, call_of_layer(layer, **call), loader_of(layer, framework))


def call_of_layer(layer: FileLayer, **call: Unpack[CallKeywords]) -> CallForm:
    """Return the form of calls of a checkpoint's layer: that of its model, overridden by
    keywords.
    """
    is_causal = layer.model is None or layer.model.is_causal is not False
    default: CallKeywords = {
        "is_cross": layer.is_cross,
        "is_causal": is_causal and not layer.is_cross,
    }
    return CallForm(**{**default, **call})


def written(
    spec: AttentionSpec,
    framework: str,
    call: CallForm,
    loader: Loader | None = None,
    decided: set[Decision] | None = None,
) -> str:
    """Return the source of a layer, followed by that of a function that loads its weights.

    The template becomes code without any text of a checkpoint. Only the loader has such text, and
    it comes last: it has no branches to specialize.

    Args:
        spec, framework, call: as in `source_of`.
        loader: the function that loads the weights; None for none.
        decided: as in `specialize`.
    """
    if framework not in NAMES:
        raise InputError("framework", f"be one of {', '.join(NAMES)}", framework=framework)
    if call.is_cross and (spec.rope is not None or spec.latent is not None):
        raise InputError(
            "is_cross",
            "be False with RoPE or latents, whose keys come from the queries' tokens",
            spec=spec,
        )
    if not call.is_cross and spec.d_kv != spec.d_in:
        raise InputError(
            "is_cross", "be True for keys of another width", d_in=spec.d_in, d_kv=spec.d_kv
        )
    if spec.shared_kv and call.is_cross:
        raise InputError(
            "is_cross",
            "be False with shared_kv, whose keys are those of another layer",
            is_cross=True,
        )
    if call.has_positions and not spec.has_positions:
        raise InputError(
            "has_positions", "be False for a layer without RoPE and temperature", has_positions=True
        )
    known = {"spec": replace(spec, fused_qkv=False), "call": call, "ABSENT": ABSENT, **_records()}
    template = (TEMPLATES / f"{framework}.py").read_text().replace(NAMES_GO_HERE, _names(), 1)
    keep = [*_public_names(spec, call), *(loader.used if loader is not None else ())]
    source = specialize(template, known, _unused(spec, call), keep, decided)
    source = source.replace("TITLE", docstring_of(spec, framework, call), 1).replace(
        "ABOUT", title_of(spec, call), 1
    )
    if loader is None:
        return source
    with_loader = f"{source}\n\n{loader.source}"
    check_keys(with_loader, f"{source}\n\n{loader.numbered}", loader.names)
    return with_loader


def _names() -> str:
    """Return the code that all templates share, without its docstring."""
    return (TEMPLATES / "names.py").read_text().partition('"""\n\n')[2]


def _records() -> dict[str, Any]:
    return {name: getattr(mha_spec, name) for name in mha_spec.__all__}


def _public_names(spec: AttentionSpec, call: CallForm) -> tuple[str, ...]:
    return KEEP if call.cache is None or spec.shared_kv else (*KEEP, "empty_cache")


def _unused(spec: AttentionSpec, call: CallForm) -> list[str]:
    """Return the names of arguments that such a call, or a function in it, does not pass."""
    passed = {
        "x": not call.is_cross,
        "query": call.is_cross,
        "key": call.is_cross,
        "other_k": spec.shared_kv and call.cache is None,
        "other_v": spec.shared_kv and call.cache is None,
        "cache": call.cache is not None and not spec.shared_kv,
        "other_cache": call.cache is not None and spec.shared_kv,
        "new_lengths": call.cache == "ragged",
        "mask": call.has_mask,
        "bias": call.has_bias,
        "positions": call.has_positions,
        "length": spec.rope is not None and spec.rope.depends_on_length,
    }
    return [name for name, is_passed in passed.items() if not is_passed]

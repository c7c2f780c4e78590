"""Write attention as source code: the plain code of one layer, without options and without this
package.

Each framework has a template: a plain definition of attention with a branch for each field of a
specification. The module `parts` adds code that frameworks share, and the norms of a layer. Then
`specialize` selects the code of the layer, and `check` writes its test. Start at `source_of`.

The implementations themselves would be one definition less. A prototype that evaluated `mha_torch`
for a specification gave right results. But a LLaMA layer with a cache had 65 statements instead of
37, no shapes, 14 variables without a name, and a table instead of the formula of its frequencies.
It depended on eight conditions of a sample call. Figures: docs/how-to/write.md.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Unpack

import mha_spec
from mha_spec import AttentionSpec, InputError
from parity.explain.writing.about import NAMES, docstring_of, title_of
from parity.explain.writing.loader import Loader, loader_of
from parity.explain.writing.parts import own_norms, template_of
from parity.explain.writing.quoting import check_keys
from parity.explain.writing.specialize import Decision, specialize
from parity.explain.writing.subject import ABSENT, CallForm, CallKeywords
from parity.port.conversion.layers import FileLayer


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

    Example:
        >>> source = parity.source_of(parity.AttentionSpec(64, 8), "torch")
        >>> "class Attention(" in source
        True
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
    """Return the form of calls of a checkpoint's layer: the form of its model, overridden by
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
    """Return the source of a layer, followed by the source of a function that loads its weights.

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
            "is_cross", "be True for keys of a different width", d_in=spec.d_in, d_kv=spec.d_kv
        )
    if spec.shared_kv and call.is_cross:
        raise InputError(
            "is_cross",
            "be False with shared_kv, whose keys come from another layer",
            is_cross=True,
        )
    if call.has_positions and not spec.has_positions:
        raise InputError(
            "has_positions", "be False for a layer without RoPE and temperature", has_positions=True
        )
    if decided is None:
        decided = set()
    template = template_of(spec, framework, decided)
    keep = _public_names(spec, call)
    if loader is not None:
        keep |= loader.used
    renamed = _renamed_variables(call)
    source = specialize(template, _known(spec, call), keep, renamed, decided)
    source = source.replace("TITLE", docstring_of(spec, framework, call), 1)
    source = source.replace("ABOUT", title_of(spec, call), 1)
    if loader is None:
        return source
    with_loader = f"{source}\n\n{loader.source}"
    check_keys(with_loader, f"{source}\n\n{loader.numbered}", loader.names)
    return with_loader


def _known(spec: AttentionSpec, call: CallForm) -> dict[str, Any]:
    """Return what a template knows of a layer and its calls, by name."""
    records = {name: getattr(mha_spec, name) for name in mha_spec.__all__}
    return {
        **records,
        "spec": replace(spec, fused_qkv=False),
        "call": call,
        "own_norms": tuple(own_norms(spec)),
        "ABSENT": ABSENT,
    }


def _renamed_variables(call: CallForm) -> dict[str, str]:
    """Return variables of a template that other ones are, with these calls."""
    renamed = {}
    if not call.is_cross:
        renamed["query"] = "x"
        renamed["key"] = "x"
    if not call.has_positions:
        renamed["positions"] = "token_positions"
    return renamed


def _public_names(spec: AttentionSpec, call: CallForm) -> set[str]:
    """Return the public names of a written module."""
    names = {"Attention", "attention"}
    if call.cache is not None and not spec.shared_kv:
        names.add("empty_cache")
    return names

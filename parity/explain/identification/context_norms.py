"""Fit the norm between a context and its output projection."""

from __future__ import annotations

import numpy as np

from parity.explain.identification.evidence import FittedLayer
from parity.explain.identification.norms import norm_of
from parity.explain.identification.observe import ObservedLayer
from parity.explain.identification.trace import as_tokens, features_of


def fit_context_norm(layer: ObservedLayer, projected: np.ndarray, fitted: FittedLayer) -> bool:
    """Fit the norm of the context before the output projection; return whether there is one.

    Args:
        layer: the layer.
        projected: input of the projection, (B * T, N * Hv).
        fitted: collects the fields.

    Raises:
        ValueError: if a module between the two is neither an RMS nor a layer norm.
    """
    context = features_of(layer.values["context"])
    for submodule in layer.norms():
        if not np.array_equal(as_tokens(submodule.input), context):
            continue
        if np.array_equal(as_tokens(submodule.output), projected):
            norm, weights = norm_of(submodule, "width")
            fitted.add("context_norm", norm, f"{submodule.name} recomputed from the context")
            fitted.normalize("context_norm", submodule.name, weights)
            return True
    return False

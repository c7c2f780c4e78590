"""Fit the norm between a context and its output projection."""

from __future__ import annotations

import numpy as np

from parity.explain.identification.found import Fit
from parity.explain.identification.norms import norm_of
from parity.explain.identification.observe import ObservedLayer
from parity.explain.identification.trace import features_of, flat


def fit_context_norm(layer: ObservedLayer, entered: np.ndarray, found: Fit) -> bool:
    """Fit the norm of the context before the output projection; return whether there is one.

    Args:
        layer: the layer.
        entered: input of the projection, (B * T, N * Hv).
        found: collects the fields.

    Raises:
        ValueError: if a module between the two is neither an RMS nor a layer norm.
    """
    context = features_of(layer.values["context"])
    for each in layer.norms():
        if np.array_equal(flat(each.given), context) and np.array_equal(flat(each.result), entered):
            norm, weights = norm_of(each, "width")
            found.add("context_norm", norm, f"{each.name} recomputed from the context")
            found.normalize("context_norm", each.name, weights)
            return True
    return False

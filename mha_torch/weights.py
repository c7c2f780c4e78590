"""Functional weights, and projections that use them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch.nn.functional as F
from torch import Tensor

from mha_spec import AttentionSpec
from mha_torch.checks import check_projected
from mha_torch.features.norms import apply_norm

Project = Callable[[str, Tensor], Tensor]
"""Applies a projection or a norm by its name in `AttentionSpec.projections` or
`AttentionSpec.norms`, such as `q_proj` or `k_norm`, to its input.
"""


def project_with(weights: Mapping[str, Tensor], spec: AttentionSpec | None = None) -> Project:
    """Return a function that applies projections and norms, with weights as in
    `multi_head_attention`.
    """
    if spec is None:
        norms = {}
    else:
        norms = spec.norms

    def project(name: str, x: Tensor) -> Tensor:
        if name in norms:
            return apply_norm(
                x, norms[name], weights.get(f"{name}.weight"), weights.get(f"{name}.bias")
            )
        weight = weights[f"{name}.weight"]
        check_projected(name, x, weight)
        return F.linear(x, weight, weights.get(f"{name}.bias"))

    return project

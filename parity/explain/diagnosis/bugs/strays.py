"""Bugs that belong to no formula: lost values, stray factors, values of other tokens, and products
over the wrong axis.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from parity.explain.diagnosis.bugs.families import FACTOR, LOST, PRODUCTS, TOKENS
from parity.explain.diagnosis.bugs.record import Edit
from parity.explain.diagnosis.bugs.sites import Overrides, before, projected
from parity.measure.core.case import Case
from parity.measure.core.reference import Layer
from parity.measure.core.stages import Values


def lost(case: Case) -> Iterator[Edit]:
    """Yield contexts of which a part was never written."""
    bug = LOST.shown_in("context", "module.output")
    if case.spec.num_heads > 1:
        yield bug(
            "last-head-lost",
            "the context of the last head is 0, as if it was not written",
            _changing("context", _without_last_head),
        )
    if not case.is_cached and case.key_padding_lengths is None and case.seq_len > 1:
        yield bug(
            "last-token-lost",
            "the context of the last token is 0, as if it was not written",
            _changing("context", _without_last_token),
        )


def multiplied(_: Case) -> Iterator[Edit]:
    """Yield stages that are summed twice, as by two devices or into a buffer that was not 0."""
    for stage in ("context", "output"):
        yield FACTOR.shown_in(stage, "module.output")(
            f"{stage}-doubled",
            f"the {stage} is added up twice",
            _changing(stage, _doubled),
            fix=f"add up the {stage} once: one reduction, into a buffer of zeros",
        )


def of_other_tokens(case: Case) -> Iterator[Edit]:
    """Yield keys and values that are off by one token."""
    if case.is_cached or case.spec.latent is not None or case.key_len < 2 or case.not_finite:
        return
    for name, words in (("k", "keys"), ("v", "values")):
        yield TOKENS.shown_in(name)(
            f"{words}-of-token-before",
            f"each token has the {words} of the token before",
            projected(_rolled(name)),
        )


def products(case: Case) -> Iterator[Edit]:
    """Yield products over the axis of queries."""
    if case.is_cached or case.key_len != case.seq_len or case.seq_len < 2 or case.not_finite:
        return
    yield PRODUCTS.shown_in("context", "module.output")(
        "attn-weights-transposed",
        "attention weights are transposed in their product with the values",
        {"weighed": before(_transposed_weights)},
    )


def _changing(stage: str, change: Callable[[np.ndarray], np.ndarray]) -> Overrides:
    """Change a stage itself, in the reference's dtype."""

    def override(layer: Layer, original: Callable[..., Values], values: Values) -> Values:
        right = original(values)[stage]
        return {stage: change(right).astype(right.dtype)}

    return {stage: override}


def _without_last_head(context: np.ndarray) -> np.ndarray:
    changed = context.copy()
    changed[:, -1] = 0
    return changed


def _without_last_token(context: np.ndarray) -> np.ndarray:
    changed = context.copy()
    changed[:, :, -1] = 0
    return changed


def _doubled(values: np.ndarray) -> np.ndarray:
    return values + values


def _rolled(name: str) -> Callable[[Values], Values]:
    def change(heads: Values) -> Values:
        return {name: np.roll(heads[name], 1, axis=2)} if name in heads else {}

    return change


def _transposed_weights(values: Values) -> tuple[Values]:
    return ({**values, "attn_weights": values["attn_weights"].swapaxes(2, 3)},)

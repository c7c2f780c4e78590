"""Sample of a problem that represents all of it: some query rows, attending to all keys, and some
features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from parity.measure.core import absorbed
from parity.measure.core.case import Case
from parity.measure.core.stages import PATHS, Step, Values


@dataclass(frozen=True, eq=False)
class Sample:
    """Part of a problem to compute, if all of it takes too long.

    Attributes:
        rows: query tokens, in order.
        features: features of the output, in order.
        keys: number of leading keys they attend to; default: all.
        kept: number of leading rows that continue after the softmax; default: all. The others are
            only for a softmax that includes them.
        others: all other query tokens as one more row of scores, (B, N, 1, S): their log-sum-exp,
            so that a softmax over queries has its sums. It does not continue after the softmax.
        absorbs: keys and values of a wrong weight are not computed, see
            `parity.measure.core.absorbed`.
        rows_out: rows of the output, if the context is placed among all tokens, which wrongly
            combined heads need; default: the context has only the rows.
        tokens: the tokens that the inputs of the problem consist of, if these are some of its
            tokens only. Then only stages of single tokens are computed: q, k, v, the gate and
            latents.
    """

    rows: np.ndarray
    features: np.ndarray
    keys: int | None = None
    kept: int | None = None
    rows_out: np.ndarray | None = None
    others: np.ndarray | None = None
    absorbs: bool = False
    tokens: np.ndarray | None = None

    def rows_of(self, quantity: str) -> np.ndarray:
        """Return the query tokens of a stage."""
        if quantity == "output" and self.rows_out is not None:
            return self.rows_out
        return (
            self.rows[: self.kept]
            if quantity in ("attn_weights", "context", "output", "gate")
            else self.rows
        )

    def tokens_of(self, quantity: str) -> dict[str, np.ndarray]:
        """Return the indices of a stage's query tokens "T" and, if they are not the first ones, of
        its keys "S".
        """
        if self.tokens is not None:
            return {"T": self.tokens, "S": self.tokens}
        return {"T": self.rows_of(quantity)}


def steps_of_sample(layer: Any, sample: Sample, case: Case) -> Sequence[Step]:
    """Return the stages of a `reference.Layer` without a cache as functions, for the rows and
    features of a sample.
    """
    if sample.tokens is not None:
        return _steps_of_tokens(layer, sample.tokens, case)
    width, seq_len = case.spec.output_width, case.seq_len
    rows, keys = sample.rows, slice(sample.keys)

    def mask(values: Values) -> dict[str, np.ndarray]:
        masked = layer.mask(values)["mask"][:, :, rows, keys]
        if sample.others is not None:
            masked = np.concatenate([masked, np.isneginf(sample.others)], axis=2)
        return {"mask": masked}

    def qkv(values: Values) -> dict[str, np.ndarray]:
        with absorbed.making_weights_once(layer):
            return made(values)

    def made(values: Values) -> dict[str, np.ndarray]:
        wrong, inputs = (
            absorbed.wrong_weights(layer) if sample.absorbs else {},
            layer.problem.inputs,
        )
        q = absorbed.queries(layer, rows)
        left_out = [*wrong, *(["q"] if q is not None else [])]
        others = absorbed.without(layer, left_out) if left_out else layer
        found = {
            name: x if name in ("q", "gate") else x[:, :, keys]
            for name, x in others.qkv(values).items()
        }
        found |= {"q": q if q is not None else found["q"][:, :, rows]} if "q" in layer.asked else {}
        of = {name: inputs[side] for name, side in layer.problem.sides.items()}
        found |= {
            name: absorbed.unmade(layer, name, x, of[name], len(rows)) for name, x in wrong.items()
        }
        return (
            found
            if "gate" not in found
            else {**found, "gate": found["gate"][:, sample.rows_of("gate")]}
        )

    def scores(values: Values) -> dict[str, np.ndarray]:
        k: Any = values["k"]
        products = absorbed.products(layer, values, k) if isinstance(k, absorbed.Unmade) else None
        found = layer.scores(values, rows[None], products)["scores"]
        if sample.others is not None:
            others = np.where(
                np.isneginf(sample.others), 0.0, sample.others
            )  # the mask hides these
            found = np.concatenate([found, others.astype(found.dtype)], axis=2)
        return {"scores": found}

    def attn_weights(values: Values) -> dict[str, np.ndarray]:
        return {"attn_weights": layer.attn_weights(values)["attn_weights"][:, :, : sample.kept]}

    def context(values: Values) -> dict[str, np.ndarray]:
        v: Any = values["v"]
        if isinstance(v, absorbed.Unmade):
            return {"context": absorbed.context(layer, values, v)}
        return layer.context({**values, "mask": values["mask"][:, :, : sample.kept]})

    def output(values: Values) -> dict[str, np.ndarray]:
        if sample.rows_out is not None:
            values = {**values, **_in_place(values, sample.rows_of("context"), seq_len)}
        found = layer.output(values)["output"]
        found = found[:, sample.rows_out] if sample.rows_out is not None else found
        return {"output": found[..., sample.features] if found.shape[-1] == width else found}

    def whole(_: Values) -> dict[str, np.ndarray]:
        values: dict[str, np.ndarray] = {}
        for step in steps[:-1]:
            values |= step(values)
        return of_paths(values)

    steps = [mask, qkv, scores, attn_weights, context, output, whole]
    return steps


def _steps_of_tokens(layer: Any, tokens: np.ndarray, case: Case) -> Sequence[Step]:
    """Return the stages of single tokens as functions. The mask, which does not affect them, hides
    nothing.
    """

    def mask(_: Values) -> dict[str, np.ndarray]:
        shape = (case.batch, case.spec.num_heads, len(tokens), len(tokens))
        return {"mask": np.broadcast_to(np.zeros((), bool), shape)}

    def qkv(_: Values) -> dict[str, np.ndarray]:
        inputs = layer.problem.inputs
        given = {name: inputs[side] for name, side in layer.problem.sides.items()}
        return layer.project(given, case.positions()[..., tokens])

    return [mask, qkv]


def _in_place(values: Values, rows: np.ndarray, seq_len: int) -> dict[str, np.ndarray]:
    """Return context and gate in their places among all query tokens; 0 elsewhere."""
    found = {}
    for name, axis in (("context", 2), ("gate", 1)):
        if name in values:
            x = values[name]
            found[name] = np.zeros((*x.shape[:axis], seq_len, *x.shape[axis + 1 :]), x.dtype)
            found[name][(slice(None),) * axis + (rows,)] = x
    return found


def of_paths(values: Values) -> dict[str, np.ndarray]:
    """Return the stages of each path of a module, which equal those of the stage functions."""
    outputs = {f"{path}.output": values["output"] for path in PATHS}
    return (
        {"module.attn_weights": values["attn_weights"], **outputs}
        if "attn_weights" in values
        else outputs
    )

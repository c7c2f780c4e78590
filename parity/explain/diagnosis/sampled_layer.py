"""The steps of the reference for a sample of its problem."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from parity.explain.diagnosis import absorbed
from parity.explain.diagnosis.changed_layer import ChangedLayer
from parity.explain.diagnosis.sample import Sample, SampledProblem
from parity.measure.core.stages import Step, Values, of_paths


class SampledLayer(ChangedLayer):
    """Layer whose steps compute only the sample of its problem."""

    problem: SampledProblem

    def steps(self) -> Sequence[Step]:
        """Return the stages as functions, for the rows and features of the sample."""
        if self.problem.sample.tokens is not None:
            of_tokens = _StepsOfTokens(self, self.problem.sample.tokens)
            return [of_tokens.mask, of_tokens.qkv]
        of_rows = _StepsOfRows(self)
        return [*of_rows.before_paths(), of_rows.whole]

    def linear(self, name: str, x: np.ndarray) -> np.ndarray:
        """Return a projection of features by its name; of the output, only the sampled ones."""
        if name != "out_proj":
            return super().linear(name, x)
        features, bias = self.problem.sample.features, None
        if self.has_bias(name):
            bias = self.parameter(f"{name}.bias")[features]
        return self.projected(x, self.parameter(f"{name}.weight")[features], bias)


@dataclass(frozen=True)
class _StepsOfRows:
    """Steps of a layer without a cache, for some query rows."""

    layer: SampledLayer

    @property
    def sample(self) -> Sample:
        return self.layer.problem.sample

    def before_paths(self) -> list[Step]:
        return [self.mask, self.qkv, self.scores, self.attn_weights, self.context, self.output]

    def mask(self, values: Values) -> dict[str, np.ndarray]:
        masked = self.layer.mask(values)["mask"][:, :, self.sample.rows, : self.sample.keys]
        if self.sample.other_rows is not None:
            masked = np.concatenate([masked, np.isneginf(self.sample.other_rows)], axis=2)
        return {"mask": masked}

    def qkv(self, values: Values) -> dict[str, np.ndarray]:
        with absorbed.computing_weights_once(self.layer):
            return self._heads(values)

    def _heads(self, values: Values) -> dict[str, np.ndarray]:
        layer, rows = self.layer, self.sample.rows
        deferred_weights = {}
        if self.sample.absorbs:
            deferred_weights = absorbed.wrong_weights(layer)
        queries = absorbed.queries(layer, rows)
        left_out = [*deferred_weights]
        if queries is not None:
            left_out.append("q")
        computed = layer
        if left_out:
            computed = absorbed.without(layer, left_out)
        heads: dict[str, Any] = {}
        for name, x in computed.qkv(values).items():
            if name == "q":
                heads[name] = x[:, :, rows]
            elif name == "gate":
                heads[name] = x[:, self.sample.rows_of("gate")]
            else:
                heads[name] = x[:, :, : self.sample.keys]
        if queries is not None:
            heads["q"] = queries
        problem = layer.problem
        for name, weight in deferred_weights.items():
            x = problem.inputs[problem.sides[name]]
            heads[name] = absorbed.deferred(layer, name, weight, x, len(rows))
        return heads

    def scores(self, values: Values) -> dict[str, np.ndarray]:
        k: Any = values["k"]
        products = None
        if isinstance(k, absorbed.DeferredHeads):
            products = absorbed.products(self.layer, values, k)
        scores = self.layer.scores(values, self.sample.rows[None], products)["scores"]
        if self.sample.other_rows is not None:
            # The mask hides the keys that no other query attends to.
            other_rows = np.where(np.isneginf(self.sample.other_rows), 0.0, self.sample.other_rows)
            scores = np.concatenate([scores, other_rows.astype(scores.dtype)], axis=2)
        return {"scores": scores}

    def attn_weights(self, values: Values) -> dict[str, np.ndarray]:
        attn_weights = self.layer.attn_weights(values)["attn_weights"]
        return {"attn_weights": attn_weights[:, :, : self.sample.num_continuing]}

    def context(self, values: Values) -> dict[str, np.ndarray]:
        v: Any = values["v"]
        if isinstance(v, absorbed.DeferredHeads):
            return {"context": absorbed.context(self.layer, values, v)}
        return self.layer.context(
            {**values, "mask": values["mask"][:, :, : self.sample.num_continuing]}
        )

    def output(self, values: Values) -> dict[str, np.ndarray]:
        rows_out, problem = self.sample.rows_out, self.layer.problem
        if rows_out is not None:
            rows = self.sample.rows_of("context")
            values = {**values, **_among_all_tokens(values, rows, problem.case.seq_len)}
        output = self.layer.output(values)["output"]
        if rows_out is not None:
            output = output[:, rows_out]
        # out_proj computes only the sampled features; without it, all are there.
        if output.shape[-1] == problem.spec.output_width:
            output = output[..., self.sample.features]
        return {"output": output}

    def whole(self, _: Values) -> dict[str, np.ndarray]:
        values: dict[str, np.ndarray] = {}
        for step in self.before_paths():
            values |= step(values)
        return of_paths(values)


@dataclass(frozen=True)
class _StepsOfTokens:
    """Steps of single tokens. The mask, which does not affect them, hides nothing."""

    layer: SampledLayer
    tokens: np.ndarray

    def mask(self, _: Values) -> dict[str, np.ndarray]:
        case = self.layer.problem.case
        shape = (case.batch, case.spec.num_heads, len(self.tokens), len(self.tokens))
        return {"mask": np.broadcast_to(np.zeros((), bool), shape)}

    def qkv(self, _: Values) -> dict[str, np.ndarray]:
        problem = self.layer.problem
        inputs = {name: problem.inputs[side] for name, side in problem.sides.items()}
        return self.layer.project(inputs, problem.case.positions()[..., self.tokens])


def _among_all_tokens(values: Values, rows: np.ndarray, seq_len: int) -> dict[str, np.ndarray]:
    """Return context and gate at their positions among all query tokens; 0 elsewhere."""
    of_all_tokens = {}
    for name, axis in (("context", 2), ("gate", 1)):
        if name in values:
            x = values[name]
            of_all_tokens[name] = np.zeros(
                (*x.shape[:axis], seq_len, *x.shape[axis + 1 :]), x.dtype
            )
            of_all_tokens[name][(slice(None),) * axis + (rows,)] = x
    return of_all_tokens

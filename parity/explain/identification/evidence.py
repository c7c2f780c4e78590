"""The fields of a layer that are fitted so far, and the evidence for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mha_spec import AttentionSpec, InputError
from parity.explain.identification.endpoints import Endpoint
from parity.explain.identification.observe import Submodule, matrix_of
from parity.explain.identification.trace import as_tokens, is_close
from parity.measure.core.arrays import to_numpy
from parity.measure.core.weights import Weights


@dataclass(frozen=True)
class Evidence:
    """Evidence for a field of a specification.

    Attributes:
        field: its name.
        value: its value.
        how: how it was found.
        up_to: number of tokens up to which it was observed; None if it does not depend on that.
        is_observed: False if it was read from an attribute or a configuration, because the input
            was too short to show it.
    """

    field: str
    value: Any
    how: str
    up_to: int | None = None
    is_observed: bool = True

    def __str__(self) -> str:
        text = f"{self.field}={self.value!r}: {self.how}"
        if not self.is_observed:
            return f"{text}, not observed"
        if self.up_to is not None:
            return f"{text}, observed up to {self.up_to} tokens"
        return text


@dataclass
class FittedLayer:
    """A layer of which some fields are fitted.

    Attributes:
        fields: fields of the specification.
        weights: canonical weights.
        names: parameter of the module that holds each weight.
        rows: rows of that parameter, for each weight that does not hold all of them once and in
            order.
        is_causal: whether queries attend to no later key.
        evidence: how each field was found.
        is_scaled_before: whether the scale multiplies queries instead of scores.
        endpoints: submodules that receive the inputs and return the output.
        descriptions: where each endpoint is in the module.
        received: description of the keys and values of another layer, by `key` and `value`.
        from_call: arguments that hold segments, a mask, a bias, positions or a scale, by that part
            of a call.
        mask: name of the argument that hides keys of some sequences only; empty if there is none.
        reason: first stage that no field explains; empty if there is none.
    """

    fields: dict[str, Any] = field(default_factory=dict)
    weights: Weights = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    rows: dict[str, list[int]] = field(default_factory=dict)
    is_causal: bool = False
    evidence: list[Evidence] = field(default_factory=list)
    is_scaled_before: bool = False
    endpoints: dict[str, Endpoint] = field(default_factory=dict)
    descriptions: dict[str, str] = field(default_factory=dict)
    received: dict[str, str] = field(default_factory=dict)
    from_call: dict[str, str] = field(default_factory=dict)
    mask: str = ""
    reason: str = ""

    def add(
        self, name: str, value: Any, how: str, *, up_to: int | None = None, is_observed: bool = True
    ) -> None:
        """Add a field of the specification, and how it was found."""
        self.fields[name] = value
        self.evidence.append(Evidence(name, value, how, up_to, is_observed))

    def agree(self, name: str, value: Any) -> None:
        """Add a field of the specification that queries and keys share.

        Raises:
            ValueError: if they differ.
        """
        if name in self.fields and self.fields[name] != value:
            both = f"{self.fields[name]} and {value}"
            raise InputError(name, "be the same for queries and keys", both)
        self.fields[name] = value

    def project(self, name: str, submodule: Submodule, rows: Sequence[int] | np.ndarray) -> bool:
        """Use rows of a linear submodule as a canonical projection; return whether it has a bias.

        Raises:
            ValueError: if the submodule does not return the product with its matrix.
        """
        weight = matrix_of(submodule.module)[rows]
        x = as_tokens(submodule.input).astype(np.float64)
        expected = x @ weight.T.astype(np.float64)
        self.weights[f"{name}.weight"] = np.ascontiguousarray(weight)
        self.names[f"{name}.weight"] = submodule.parameter("weight")
        self._use_rows(name, "weight", submodule, rows)

        bias = getattr(submodule.module, "bias", None)
        if bias is not None:
            self.weights[f"{name}.bias"] = to_numpy(bias)[rows]
            self.names[f"{name}.bias"] = submodule.parameter("bias")
            self._use_rows(name, "bias", submodule, rows)
            expected = expected + self.weights[f"{name}.bias"]
        if not is_close(expected, as_tokens(submodule.output)[:, rows]):
            rule = "be the product with one matrix"
            raise InputError(name, rule, f"{submodule.name} returned a different one")
        return bias is not None

    def _use_rows(
        self, name: str, leaf: str, submodule: Submodule, rows: Sequence[int] | np.ndarray
    ) -> None:
        """Record the rows of a parameter that a weight holds, unless it holds all of them in
        order.
        """
        first_row = submodule.first_rows.get(leaf)
        num_rows = len(matrix_of(submodule.module))
        if first_row is None and np.array_equal(rows, np.arange(num_rows)):
            return
        if first_row is None:
            first_row = 0
        self.rows[f"{name}.{leaf}"] = [int(row) + first_row for row in rows]

    def normalize(self, name: str, module: str, weights: Weights) -> None:
        """Add the parameters of a norm."""
        for leaf, weight in weights.items():
            self.weights[f"{name}.{leaf}"] = weight
            self.names[f"{name}.{leaf}"] = f"{module}.{leaf}"

    @property
    def entries(self) -> set[Endpoint]:
        """Return the submodules that receive inputs."""
        return {end for side, end in self.endpoints.items() if side != "output"}

    @property
    def spec(self) -> AttentionSpec:
        """Return the specification of the fields so far."""
        return AttentionSpec(**self.fields)

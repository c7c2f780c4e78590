"""The fields of a layer found so far, and the evidence for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mha_spec import AttentionSpec, InputError
from parity.explain.identification.ends import End
from parity.explain.identification.observe import Submodule, matrix_of
from parity.explain.identification.trace import flat, is_close
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
        is_seen: False if it was read from an attribute or a configuration, because the input was
            too short to show it.
    """

    field: str
    value: Any
    how: str
    up_to: int | None = None
    is_seen: bool = True

    def __str__(self) -> str:
        seen = (
            f", seen up to {self.up_to} tokens" if self.up_to is not None and self.is_seen else ""
        )
        return (
            f"{self.field}={self.value!r}: {self.how}{seen}{'' if self.is_seen else ', not seen'}"
        )


@dataclass
class Fit:
    """A partly fitted layer.

    Attributes:
        fields: of the specification.
        weights: canonical weights.
        names: parameter of the module that holds each weight.
        rows: rows of that parameter, for each weight that does not hold all of them once and in
            order.
        is_causal: whether queries attend to no later key.
        evidence: how each field was found.
        is_scaled_before: whether the scale multiplies queries instead of scores.
        ends: submodules that receive the inputs and return the output.
        words: description of the place of each end in the module.
        received: description of the keys and values of another layer, by `key` and `value`.
        from_call: arguments that hold segments, a mask, a bias, positions or a scale, by that part
            of a call.
        mask: name of the argument that hides keys of some sequences only; empty if there is none.
        refusal: first stage that no field explains; empty if there is none.
    """

    fields: dict[str, Any] = field(default_factory=dict)
    weights: Weights = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    rows: dict[str, list[int]] = field(default_factory=dict)
    is_causal: bool = False
    evidence: list[Evidence] = field(default_factory=list)
    is_scaled_before: bool = False
    ends: dict[str, End] = field(default_factory=dict)
    words: dict[str, str] = field(default_factory=dict)
    received: dict[str, str] = field(default_factory=dict)
    from_call: dict[str, str] = field(default_factory=dict)
    mask: str = ""
    refusal: str = ""

    def add(self, name: str, value: Any, how: str, **seen: Any) -> None:
        """Add a field of the specification, and how it was found."""
        self.fields[name] = value
        self.evidence.append(Evidence(name, value, how, **seen))

    def agree(self, name: str, value: Any) -> None:
        """Add a field of the specification that queries and keys share.

        Raises:
            ValueError: if they differ.
        """
        if name in self.fields and self.fields[name] != value:
            raise InputError(
                name, "be the same for queries and keys", f"{self.fields[name]} and {value}"
            )
        self.fields[name] = value

    def project(self, name: str, each: Submodule, rows: Sequence[int] | np.ndarray) -> bool:
        """Use rows of a linear submodule as a canonical projection; return whether it has a bias.

        Raises:
            ValueError: if the submodule does not return the product with its matrix.
        """
        matrix, bias = matrix_of(each.module), getattr(each.module, "bias", None)
        weight = matrix[rows]
        made = flat(each.given).astype(np.float64) @ weight.T.astype(np.float64)
        self.weights[f"{name}.weight"] = np.ascontiguousarray(weight)
        self.names[f"{name}.weight"] = each.parameter("weight")
        self._use_rows(name, "weight", each, rows)
        if bias is not None:
            self.weights[f"{name}.bias"] = to_numpy(bias)[rows]
            self.names[f"{name}.bias"] = each.parameter("bias")
            self._use_rows(name, "bias", each, rows)
            made = made + self.weights[f"{name}.bias"]
        if not is_close(made, flat(each.result)[:, rows]):
            raise InputError(
                name, "be the product with one matrix", f"{each.name} returned another"
            )
        return bias is not None

    def _use_rows(
        self, name: str, leaf: str, each: Submodule, rows: Sequence[int] | np.ndarray
    ) -> None:
        """Record the rows of a parameter that a weight holds, unless it holds all of them in
        order.
        """
        first = each.first_rows.get(leaf)
        if first is None and np.array_equal(rows, np.arange(len(matrix_of(each.module)))):
            return
        self.rows[f"{name}.{leaf}"] = [int(row) + (first or 0) for row in rows]

    def normalize(self, name: str, module: str, weights: Weights) -> None:
        """Add the parameters of a norm."""
        for leaf, weight in weights.items():
            self.weights[f"{name}.{leaf}"] = weight
            self.names[f"{name}.{leaf}"] = f"{module}.{leaf}"

    @property
    def entries(self) -> set[End]:
        """Return the submodules that receive inputs."""
        return {end for side, end in self.ends.items() if side != "output"}

    @property
    def spec(self) -> AttentionSpec:
        """Return the specification of the fields so far."""
        return AttentionSpec(**self.fields)

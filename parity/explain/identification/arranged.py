"""Arrange attention of a program as heads: find the axes of sequences, heads, tokens and
features.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mha_spec import InputError
from parity.explain.identification.biases import scored
from parity.explain.identification.fit import LEAST_TOKENS
from parity.explain.identification.heads import Attention, AttentionFinder
from parity.explain.identification.norms import norm_between
from parity.explain.identification.program import Values
from parity.explain.identification.trace import CLOSE

HIDES = 5000.0
"""Smallest decrease of a score that the mask hides."""

TOKENS = {"q": "t", "k": "s", "v": "s"}
"""Names of the token axes of queries, keys and values. The other axes are b, heads by number, and
h.
"""


@dataclass(frozen=True)
class NormPlace:
    """A norm in a program: the numbers of its input, its output and its parameters, and its eps."""

    given: int
    result: int
    parameters: Mapping[str, int]
    eps: float


class Arranged:
    """Attention of a program, and how its values are arranged.

    Args:
        finder: the finder of attention in the program.
        found: the attention.
        values: values of a call.

    Attributes:
        found: the attention, with queries and keys distinguished.
        inputs: numbers of the inputs of the projections, (B, T, features).
        factors: queries and keys before a scalar multiplies them, by the number of the product.
        scale: total factor of the products of queries and keys.
        soft_cap: bound of the scores, or None.
        norms: places of the norms for queries, keys and values.
        places: numbers of the positions of queries and keys that can be moved.

    Raises:
        ValueError: if a value is not arranged as in attention; the message names it.
    """

    def __init__(self, finder: AttentionFinder, found: Attention, values: Values) -> None:
        self._finder, self._program, self._base = finder, finder.program, values
        self.found = found
        dtypes = {str(np.asarray(values[number]).dtype) for number in found.numbers.values()}
        if dtypes != {"float32"}:
            raise InputError("attention", "compute in float32", " and ".join(sorted(dtypes)))
        self.inputs: dict[str, int] = {}
        self.inputs = {part: self._input(part) for part in "qkv"}
        if self._is_exchanged():
            self.found, self.inputs = (
                found.exchanged(),
                {**self.inputs, "q": self.inputs["k"], "k": self.inputs["q"]},
            )
        self._axes = self._named_axes()
        self._token_axes: dict[str, dict[int, tuple[int, int]]] = {}
        self.factors: dict[int, int] = {}
        self._order, self._kept = self._groups()
        self._inner, self.soft_cap = self._fit_scores()
        self.scale = _rounded(self._scale_of("q") * self._scale_of("k") * self._inner)
        self.norms = {part: norm for part in "qkv" if (norm := self._norm(part)) is not None}
        self.places = self._positions()

    # ---- Axes ------------------------------------------------------------------------------------

    def _shape(self, number: int) -> tuple[int, ...]:
        return np.shape(self._base[number])

    def _input(self, part: str) -> int:
        """Return the number of the input of a projection, (B, T, features)."""
        number = self.found.projections[part].given
        while len(self._shape(number)) != 3:
            maker = self._program.maker.get(number)
            if maker is None or maker.name != "reshape":
                raise InputError(
                    "inputs", "be tokens of sequences, (B, T, features)", f"{self._shape(number)}"
                )
            number = maker.given[0]
        batch_size, num_tokens, _ = self._shape(number)
        if batch_size < 2 or num_tokens < LEAST_TOKENS:
            least = f"be at least {LEAST_TOKENS} tokens of 2 sequences"
            raise InputError("inputs", least, f"{num_tokens} of {batch_size}")
        return number

    def _followed(self, source: int, axis: int, wanted: Sequence[int]) -> list[int | None]:
        """Return the axis of each value on which only one index depends on that index of an axis of
        the source.
        """
        x = np.array(self._base[source])
        place = x.shape[axis] // 2
        at = (slice(None),) * axis + (place,)
        x[at] = 0.5 * x[at] + 0.25
        inputs = {
            n: self._base[n] for n in self.inputs.values()
        }  # heads may also depend on positions
        changed = self._program.again(self._base, {**inputs, source: x}, wanted)
        return [
            _only_axis(np.asarray(changed[n]) != np.asarray(self._base[n]), place) for n in wanted
        ]

    def _is_exchanged(self) -> bool:
        """Return whether the softmax is over the tokens of the first operand, so that this operand
        is the keys.
        """
        found, weights = self.found, np.asarray(self._base[self.found.weights])
        axes = [axis for axis, size in enumerate(weights.shape) if size > 1]
        sums = [axis for axis in axes if np.allclose(weights.sum(axis), 1.0, atol=1e-4)]
        (tokens,) = self._followed(self.inputs["q"], 1, [found.operands["q"]])
        if len(sums) != 1 or tokens is None or weights.shape != self._shape(found.logits):
            raise InputError(
                "attn_weights", "be a softmax over keys", f"numbers of {weights.shape}"
            )
        return self._followed(found.operands["q"], tokens, [found.logits]) == sums

    def _named_axes(self) -> dict[str, dict[str, int]]:
        """Return the axes of each value by name."""
        numbers, (sums, pairs) = self.found.numbers, self._pairs()
        axes: dict[str, dict[str, int | None]] = {
            part: {
                name: self._followed(self.inputs[part], axis, [numbers[part]])[0]
                for axis, name in enumerate(("b", token))
            }
            for part, token in TOKENS.items()
        }
        of_queries, of_keys, of_values = (axes[part] for part in "qkv")
        if len(sums) != 1 or None in (*of_queries.values(), *of_keys.values(), *of_values.values()):
            raise InputError(
                "heads",
                "have axes for sequences and tokens",
                f"queries of {self._shape(numbers['q'])}",
            )
        ((of_queries["h"], of_keys["h"]),) = sums.items()
        rest = [
            axis
            for axis in range(len(self._shape(numbers["q"])))
            if axis not in of_queries.values()
        ]
        of_queries |= {
            str(axis): axis for axis in sorted(rest, key=lambda axis: axis not in pairs)
        }  # groups come last
        of_keys |= {str(axis): pairs[axis] for axis in rest if axis in pairs}
        for part in ("scores", "logits", "context"):
            axes[part] = {
                name: self._axis("q", axis, part)
                for name, axis in of_queries.items()
                if name != "h"
            }
        for part in ("scores", "logits"):
            axes[part]["s"] = self._axis("k", of_keys["s"], part)
        heads = {axis: name for name, axis in axes["context"].items() if axis is not None}
        for axis in range(len(self._shape(numbers["v"]))):
            if (
                axis not in of_values.values()
                and (at := self._axis("v", axis, "context")) is not None
            ):
                of_values[heads.get(at, "h")] = axis
                axes["context"].setdefault(heads.get(at, "h"), at)
        axes["attn_weights"] = axes["logits"]
        named = {
            part: {name: axis for name, axis in each.items() if axis is not None}
            for part, each in axes.items()
        }
        for part, each in named.items():
            shape = self._shape(numbers[part])
            rest = [
                axis for axis, size in enumerate(shape) if axis not in each.values() and size > 1
            ]
            if (
                part in ("logits", "attn_weights")
                and len(rest) == 1
                and not any(name.isdigit() for name in each)
            ):
                each["heads"] = rest.pop()  # heads of all groups; the scores show their order
            if rest or len(set(each.values())) < len(each) or not {"b"} < each.keys():
                raise InputError(
                    part, "have axes for sequences, heads and tokens", f"axes of {shape}"
                )
        return named

    def _axis(self, source: str, axis: int | None, wanted: str) -> int | None:
        """Return the axis of a value that corresponds to an axis of the source."""
        numbers = self.found.numbers
        if axis is None or self._shape(numbers[source])[axis] == 1:
            return None
        return self._followed(numbers[source], axis, [numbers[wanted]])[0]

    def _pairs(self) -> tuple[dict[int, int], dict[int, int]]:
        """Return the contracted axes of queries and keys, and the batch axes that they share."""
        maker = self._program.maker[self.found.scores]
        sums, pairs = (dict(zip(*axes, strict=True)) for axes in maker.params["dimension_numbers"])
        if maker.given[0] == self.found.operands["q"]:
            return sums, pairs
        return {y: x for x, y in sums.items()}, {y: x for x, y in pairs.items()}

    def heads(self, values: Values) -> dict[str, np.ndarray]:
        """Return the values of a call by stage, (B, heads, T, features or keys); queries and keys
        are unscaled.
        """
        plain = dict(values)
        for made, given in sorted(self.factors.items()):
            numbers = self._program.after([made]) & self._program.before(
                self.found.operands.values()
            )
            plain |= self._program.again(plain, {made: plain[given]}, numbers)
        heads = {
            part: self._all_heads(part, plain if part in ("q", "k") else values)
            for part in self.found.numbers
        }
        return {
            part: x[:, self._kept if part in ("k", "v") else self._order]
            for part, x in heads.items()
        }

    @property
    def words_of_order(self) -> str:
        """Return how query heads are put in the order of their key heads; empty if they already
        are.
        """
        order, count = self._order.tolist(), len(self._kept)
        if order == sorted(order):
            return ""
        words = f"query heads are those of the module in the order {' '.join(map(str, order))}"
        if order == sorted(order, key=lambda head: head % count):
            words += f", whose head n uses key head n mod {count}: tiled"
        return f"{words}; so are columns of out_proj"

    def is_hidden(self, heads: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the keys that the scores of a call hide, (B, heads, T, S)."""
        return heads["logits"] < scored(heads["scores"], self._inner, self.soft_cap) - HIDES

    def _all_heads(self, part: str, values: Values) -> np.ndarray:
        x, axes = np.asarray(values[self.found.numbers[part]]), self._axes[part]
        before = [axis for name, axis in axes.items() if name not in ("t", "s", "h", "b")]
        last = [axes[name] for name in ("t", "s", "h") if name in axes]
        used = [axes["b"], *before, *last]
        x = x.transpose(*(axis for axis in range(x.ndim) if axis not in used), *used)
        return x.reshape(x.shape[-len(used)], -1, *x.shape[-len(last) :])

    def _groups(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the order of query heads, and the distinct heads among repeated key/value
        heads.
        """
        k, v = (self._all_heads(part, self._base) for part in "kv")
        first: dict[bytes, int] = {}
        bits = [k[:, i].tobytes() + v[:, i].tobytes() for i in range(k.shape[1])]
        of_head = np.array([first.setdefault(each, i) for i, each in enumerate(bits)])
        num_heads = self._all_heads("q", self._base).shape[1]
        return np.argsort(np.repeat(of_head, num_heads // len(of_head)), kind="stable"), np.unique(
            of_head
        )

    # ---- Scores ----------------------------------------------------------------------------------

    def _scale_of(self, part: str) -> float:
        """Return the last scalar factor of queries or keys, and record their values before it."""
        number, scale = self.found.operands[part], 1.0
        while (maker := self._program.maker.get(number)) is not None:
            number = self._program.moved_from(maker)
            if number is None:
                number, factor = self._scalar(maker)
                if factor is None:
                    break
                self.factors[maker.made[0]] = number
                scale *= factor
        return scale

    def _scalar(self, maker: Any) -> tuple[int, float | None]:
        """Return the input and the factor of a multiplication by a scalar; None for another
        operation.
        """
        number, *others = maker.given
        if maker.name in ("mul", "div") and len(others) == 1:
            for x, factor in (
                (number, others[0]),
                *(((others[0], number),) if maker.name == "mul" else ()),
            ):
                value = np.asarray(self._base[factor])
                if (
                    factor not in self._finder.varying
                    and not self._finder.leaves(factor)
                    and np.ptp(value) == 0
                ):
                    return x, float(value.flat[0]) ** (1.0 if maker.name == "mul" else -1.0)
        return number, None

    def _fit_scores(self) -> tuple[float, float | None]:
        """Return the scalar factor of products, and the soft cap; biases are fitted later.

        Raises:
            ValueError: if the weights are not a softmax of scores.
        """
        heads = {
            part: self._all_heads(part, self._base).astype(np.float64)
            for part in ("scores", "logits", "attn_weights")
        }
        scores, logits = heads["scores"], heads["logits"]
        if scores.shape != logits.shape:
            raise InputError(
                "attn_weights",
                "be a softmax over keys alone, without sinks",
                f"scores of {logits.shape}",
            )
        shifted = np.exp(logits - logits.max(-1, keepdims=True))
        if np.abs(shifted / shifted.sum(-1, keepdims=True) - heads["attn_weights"]).max() > CLOSE:
            raise InputError("attn_weights", "be the softmax of scores", "another function of them")
        shown = (logits > -HIDES) & (np.abs(scores) > 0.1 * np.abs(scores).max())
        for cap in list(self._caps()) or [None]:
            with np.errstate(all="ignore"):
                before = logits if cap is None else cap * np.arctanh(logits / cap)
                ratios = (before / scores)[shown]
            ratios = ratios[np.isfinite(ratios)]
            factor = float(np.median(ratios)) if ratios.size else 0.0
            made = scored(scores, factor, cap)
            is_close = np.abs(made - logits) <= CLOSE * np.abs(logits[shown]).max(initial=0.0)
            if factor > 0 and (is_close | (logits < made - HIDES)).all():
                return factor, cap
        return self._factor_of_scores(), None

    def _factor_of_scores(self) -> float:
        """Return the first scalar factor of products whose scores are processed further."""
        number, factor, within = self.found.scores, 1.0, self._program.before([self.found.logits])
        while (
            len(
                users := [
                    each for each in self._program.users.get(number, ()) if within & set(each.made)
                ]
            )
            == 1
        ):
            scalar = (
                1.0 if self._program.moved_from(users[0]) == number else self._scalar(users[0])[1]
            )
            if scalar is None:
                break
            number, factor = users[0].made[0], factor * scalar
        return factor

    def _caps(self) -> Iterator[float]:
        """Yield the scalar factors of a tanh of scores."""
        for number in self._program.before([self.found.logits], [self.found.scores]):
            if number in self._program.maker and self._program.maker[number].name == "tanh":
                for each in self._program.users.get(number, ()):
                    factor = self._scalar(each)[1] if each.name == "mul" else None
                    if factor is not None:
                        yield _shortest(factor)

    def _scalars(
        self, numbers: Iterable[int], stop: Iterable[int], low: float, high: float
    ) -> list[float]:
        """Return the constant scalars between two bounds that some values are computed from, after
        `stop`.
        """
        before = self._program.before(numbers, stop)
        found = (
            np.asarray(x)
            for n, x in self._program.constants.items()
            if n in before and np.size(x) == 1
        )
        return sorted(
            {
                _shortest(x.flat[0])
                for x in found
                if x.dtype.kind in "fiu" and low < x.flat[0] < high
            }
        )

    # ---- Positions -------------------------------------------------------------------------------

    def _positions(self) -> set[int]:
        """Return the numbers of the movable positions that queries and keys depend on."""
        num_tokens, found = self._shape(self.inputs["q"])[1], set[int]()
        for part in "qk":
            operand, axis_of_tokens = self.found.operands[part], self._axes[part][TOKENS[part]]
            for number in sorted(self._program.before([operand], self.inputs.values())):
                x = np.asarray(self._base[number])
                for axis in (axis for axis, size in enumerate(x.shape) if size == num_tokens):
                    places = np.arange(num_tokens).reshape(-1, *(1,) * (x.ndim - axis - 1))
                    if (
                        (x == places).all()
                        and number not in self._program.after(found)
                        and self._followed(number, axis, [operand]) == [axis_of_tokens]
                    ):
                        found.add(number)
        return found

    def far(self, values: Values, first: int) -> Values:
        """Return a call with its tokens at positions from `first` on, or as far as its RoPE tables
        reach.
        """
        after = self._program.after(self.places)
        tables = [
            each for each in self._program.operations if each.name in ("gather", "dynamic_slice")
        ]
        read = [
            each.given[0]
            for each in tables
            if after & set(each.given[1:]) and each.given[0] not in after
        ]
        num_tokens = self._shape(self.inputs["q"])[1]
        first = max(0, min([first, *(self._shape(number)[0] - num_tokens for number in read)]))
        moved = {
            n: np.asarray(values[n]) + np.asarray(first, np.asarray(values[n]).dtype)
            for n in self.places
        }
        return {
            **values,
            **self._program.again(
                values, {n: values[n] for n in self.inputs.values()} | moved, after
            ),
        }

    def scalars_of_queries(self) -> list[float]:
        """Return the constant scalars that queries are computed from, after the input."""
        return self._scalars([self.found.operands["q"]], [self.inputs["q"]], 1.0, np.inf)

    # ---- Norms -----------------------------------------------------------------------------------

    def by_token(self, numbers: Iterable[int], part: str, values: Values) -> dict[int, np.ndarray]:
        """Return the values that have axes of sequences and tokens as (B, T, …)."""
        axes = self._token_axes[part]
        return {
            n: np.moveaxis(np.asarray(values[n]), axes[n], (0, 1)) for n in numbers if n in axes
        }

    def _norm(self, part: str) -> NormPlace | None:
        """Return the norm between a projection and an operand, if there is one."""
        program, linear, operand = (
            self._program,
            self.found.projections[part].result,
            self.found.operands[part],
        )
        path = sorted(program.after([linear]) & program.before([operand]))
        pairs = [self._followed(self.inputs[part], axis, path) for axis in (0, 1)]
        self._token_axes[part] = {
            n: (b, t)
            for n, b, t in zip(path, *pairs, strict=True)
            if b is not None and t is not None and max(b, t) < len(self._shape(n)) - 1
        }
        values = self.by_token(path, part, self._base)
        for given in path:
            for result in reversed(path):
                if (
                    result > given
                    and given in values
                    and result in values
                    and values[given].shape == values[result].shape
                ):
                    found = self._norm_between(given, result, values)
                    if found is not None:
                        return found
        return None

    def _norm_between(
        self, given: int, result: int, values: Mapping[int, np.ndarray]
    ) -> NormPlace | None:
        before = self._program.before([result], [given])
        every_eps = self._scalars([result], [given], 0.0, 0.1)
        width = values[given].shape[-1]
        leaves = [n for n in before if n in self._finder.names and np.size(self._base[n]) == width]
        known = list(_parameters(leaves))
        parameters = [
            {leaf: np.ravel(self._base[n]) for leaf, n in names.items()} for names in known
        ]
        found = norm_between(values[given], values[result], every_eps, parameters)
        return None if found is None else NormPlace(given, result, known[found[1]], found[0].eps)


def _parameters(leaves: Sequence[int]) -> Iterator[dict[str, int]]:
    """Yield candidates for the weight and the bias of a norm."""
    for weight in leaves:
        yield from ({"weight": weight, "bias": bias} for bias in leaves if bias != weight)
        yield {"weight": weight}
    yield {}


def _shortest(x: Any) -> float:
    """Return a float32 number with the fewest digits that identify it."""
    return float(str(np.float32(x)))


def _rounded(x: float) -> float:
    """Return a number rounded to the digits that float32 can hold."""
    return next(
        y for digits in range(1, 18) if abs((y := float(f"{x:.{digits}g}")) - x) <= 3e-7 * abs(x)
    )


def _only_axis(changed: np.ndarray, place: int) -> int | None:
    """Return the only axis on which just one index has changed."""
    found = [
        axis
        for axis in range(changed.ndim)
        if changed.shape[axis] > 1
        and np.flatnonzero(changed.any(tuple(a for a in range(changed.ndim) if a != axis))).tolist()
        == [place]
    ]
    return found[0] if len(found) == 1 else None

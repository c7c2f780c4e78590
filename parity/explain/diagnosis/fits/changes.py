"""Replacements of a part of a layer: a different weight, input, mask or order of axes; each an edit
of the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np

from mha_spec import Norm
from mha_spec.features.relative_products import RELATIVE_TABLES
from parity.explain.diagnosis.bugs import families as of
from parity.explain.diagnosis.bugs.families import BugFamily, in_families
from parity.explain.diagnosis.bugs.record import Edit
from parity.measure.core.problem import Problem
from parity.measure.core.reference import Layer
from parity.measure.core.stages import Values
from parity.measure.core.weights import QKV
from parity.measure.text import and_listed

Form = Callable[[np.ndarray], np.ndarray]
"""Makes wrong values of right ones."""

MOST_HEADS = 16
"""The largest number of heads of a projection of which two may be exchanged."""

READING_OTHERS = (QKV[:1], QKV[1:2], QKV[2:], QKV[1:])
"""Projections that may read the wrong input: each alone, and keys and values together."""


def part(
    problem: Problem, name: str, about: str, change: Edit, family: BugFamily | None = None
) -> Edit:
    """Return an edit of a part of a layer with its name, description, page and fix.

    Args:
        problem: with the layer.
        name: name of its kind, such as `weight`.
        about: its description.
        change: what it overrides.
        family: whose page and fix it has; None if it may belong to several.
    """
    named = replace(change, name=name, about=about)
    if family is None:
        return named
    return in_families(named, problem.spec, (family,))


def _be(names: Sequence[str]) -> str:
    if len(names) == 1:
        return "is"
    return "are"


# ---- Weights -------------------------------------------------------------------------------------


def weights(problem: Problem, names: list[str]) -> Iterator[Edit]:
    """Yield replacements of weights: by another one, two exchanged, one or all projections in a
    different form.

    Args:
        problem: with the weights.
        names: the weights that the stage depends on.
    """
    yield from _other_weights(problem, names)
    yield from _exchanged(problem, names)
    yield from _other_projections(problem, names)
    yield from _heads_exchanged(problem, names)
    yield from _split_otherwise(problem, names)
    yield from _in_other_forms(problem, names)


def _other_weights(problem: Problem, names: list[str]) -> Iterator[Edit]:
    for one in names:
        right = problem.weights[one]
        for other, weight in problem.weights.items():
            if other != one and weight.shape == right.shape:
                change = _replaced({one: weight})
                about = f"{other} is used instead of {one}"
                yield part(problem, "weight", about, change, family_of(one))


def _exchanged(problem: Problem, names: list[str]) -> Iterator[Edit]:
    for one, other in combinations(names, 2):
        weight, other_weight = problem.weights[one], problem.weights[other]
        if weight.shape == other_weight.shape:
            words = f"{one} and {other} are exchanged"
            change = _replaced({one: other_weight, other: weight})
            yield part(problem, "weight", words, change, family_of(one))


def _other_projections(problem: Problem, names: list[str]) -> Iterator[Edit]:
    """Yield replacements of a projection with a bias by another one."""
    shapes = {name: _shapes_of(problem, name) for name in (*QKV, "out_proj")}
    for one, shapes_of_one in shapes.items():
        if len(shapes_of_one) < 2 or f"{one}.weight" not in names:
            continue
        for other, shapes_of_other in shapes.items():
            if other == one or shapes_of_other != shapes_of_one:
                continue
            leaves = _leaves(problem, other)
            change = _replaced({f"{one}.{leaf}": weight for leaf, weight in leaves.items()})
            about = f"{other} is used instead of {one}"
            yield part(problem, "weight", about, change, of.SWAPPED)


def _heads_exchanged(problem: Problem, names: list[str]) -> Iterator[Edit]:
    """Yield exchanges of two heads of a projection, including its bias; neighboring heads first."""
    spec = problem.spec
    if spec.latent is not None:
        return
    counts = {"q_proj": spec.num_heads, "k_proj": spec.num_kv_heads, "v_proj": spec.num_kv_heads}
    for projection, count in counts.items():
        # For two heads it is a known bug.
        if f"{projection}.weight" not in names or not 2 < count <= MOST_HEADS:
            continue
        leaves = _leaves(problem, projection)
        for away in range(1, count):
            for one in range(count - away):
                other = one + away
                order = np.arange(count)
                order[[one, other]] = other, one
                words = f"heads {one} and {other} of {projection} are exchanged"
                change = _with_heads(projection, leaves, order)
                yield part(problem, "weight", words, change, of.HEAD_ORDER)


def _with_heads(projection: str, leaves: Mapping[str, np.ndarray], order: np.ndarray) -> Edit:
    """Return the edit that reorders the heads of a projection."""
    reordered = {}
    for leaf, weight in leaves.items():
        heads = weight.reshape(len(order), -1, *weight.shape[1:])
        reordered[f"{projection}.{leaf}"] = heads[order].reshape(weight.shape)
    return _replaced(reordered)


def _split_otherwise(problem: Problem, names: list[str]) -> Iterator[Edit]:
    """Yield heads of one projection, including its bias, that are split differently."""
    spec = problem.spec
    if spec.latent is not None or spec.shared_kv or problem.case.is_cached:
        return
    for name in "qkv":
        if f"{name}_proj.weight" not in names:
            continue
        for words, split in SPLITS.items():
            if name == "k" and split is exchanged_split:
                continue  # the same as keys that are not transposed in the product
            change = _splitting(name, split)
            yield part(problem, "weight", f"{name}'s heads are {words}", change, of.HEAD_ORDER)


Split = Callable[[np.ndarray, int], np.ndarray]
"""Splits features (B, T, width) into heads (B, N, T, H)."""


def innermost_split(x: np.ndarray, n: int) -> np.ndarray:
    return x.reshape(*x.shape[:2], -1, n).transpose(0, 3, 1, 2)


def unmoved_split(x: np.ndarray, n: int) -> np.ndarray:
    return x.reshape(x.shape[0], n, x.shape[1], -1)


def exchanged_split(x: np.ndarray, n: int) -> np.ndarray:
    return x.reshape(*x.shape[:2], n, -1).transpose(0, 2, 3, 1)


def reversed_split(x: np.ndarray, n: int) -> np.ndarray:
    return x.reshape(*x.shape[:2], n, -1).swapaxes(1, 3)


SPLITS: dict[str, Split] = {
    "split into (H, N) instead of (N, H)": innermost_split,
    "split by a reshape, without moving them before the tokens": unmoved_split,
    "split with tokens and features exchanged": exchanged_split,
    "split into (B, H, N, T) instead of (B, N, T, H)": reversed_split,
}
"""Wrong ways to split heads; some fit only if axes have the same length."""


def _splitting(name: str, split: Split) -> Edit:
    def entering(layer: Any, original: Any, which: str, *inputs: Any) -> np.ndarray:
        if which != name:
            return original(which, *inputs)
        with layer.overriding(split_heads=split):
            return original(which, *inputs)

    return Edit(overrides={"entering": entering})


def family_of(name: str) -> BugFamily:
    """Return the family of bugs in a weight by its name."""
    if name.endswith("_proj.bias"):
        return of.BIAS
    if name.startswith(("q_norm", "k_norm", "v_norm", "context_norm")):
        return of.QK_NORM
    if name.startswith(("q_proj", "k_proj", "v_proj", "out_proj")):
        return of.SWAPPED
    if name.startswith("sinks"):
        return of.SINKS
    if name.startswith("relative_bias"):
        return of.RELATIVE_BIAS
    if name.startswith("gate"):
        return of.GATE
    if name.startswith(tuple(RELATIVE_TABLES)):
        return of.RELATIVE_PRODUCTS
    return of.LATENTS


def _leaves(problem: Problem, projection: str) -> dict[str, np.ndarray]:
    """Return the weight and the bias of a projection, if it has them."""
    leaves = {}
    for leaf in ("weight", "bias"):
        name = f"{projection}.{leaf}"
        if name in problem.weights:
            leaves[leaf] = problem.weights[name]
    return leaves


def _shapes_of(problem: Problem, projection: str) -> dict[str, tuple[int, ...]]:
    return {leaf: weight.shape for leaf, weight in _leaves(problem, projection).items()}


def multiple(name: str, times: float) -> Edit:
    """Multiply a weight by a number."""

    def parameter(_: Any, original: Any, which: str) -> np.ndarray:
        weight = original(which)
        if which != name:
            return weight
        return weight.astype(np.float64) * times

    return Edit(overrides={"parameter": parameter})


def _replaced(others: Mapping[str, np.ndarray]) -> Edit:
    def parameter(_: Any, original: Any, name: str) -> np.ndarray:
        if name in others:
            return others[name]
        return original(name)

    return Edit(overrides={"parameter": parameter})


# ---- Forms of weights ----------------------------------------------------------------------------


def _in_other_forms(problem: Problem, names: list[str]) -> Iterator[Edit]:
    """Yield weights with other values, or with the same ones in a different order."""
    forms = {name: dict(_forms(name, problem)) for name in names}
    for group in _together(names):
        for words in forms[group[0]]:
            if not all(words in forms[name] for name in group):
                continue
            changed = {}
            for name in group:
                form = forms[name][words]
                changed[name] = form(problem.weights[name].astype(np.float64))
            family = family_of(group[0])
            if words == "transposed":
                family = of.TRANSPOSED
            elif words.startswith("read with"):
                family = of.HEAD_ORDER
            about = f"{and_listed(group)} {_be(group)} {words}"
            yield part(problem, "weight", about, _replaced(changed), family)


def _together(names: list[str]) -> Iterator[list[str]]:
    """Yield weights that may be wrong alike: each alone, then the weights of several
    projections.
    """
    for name in names:
        yield [name]
    for leaf in ("weight", "bias"):
        of_projections = [f"{name}.{leaf}" for name in (*QKV, "out_proj")]
        present = [name for name in of_projections if name in names]
        for count in dict.fromkeys((2, 3, len(present))):
            if 1 < count <= len(present):
                yield present[:count]
        norms = [f"q_norm.{leaf}", f"k_norm.{leaf}"]
        if set(norms) <= set(names):
            yield norms


def _forms(name: str, problem: Problem) -> Iterator[tuple[str, Form]]:
    """Yield forms of a weight, with their descriptions."""
    weight, spec = problem.weights[name], problem.spec
    if weight.ndim == 1:
        yield from VECTOR_FORMS.items()
    elif weight.ndim == 2 and weight.shape[0] == weight.shape[1]:
        yield "transposed", np.transpose
    if name.startswith(QKV) and spec.latent is None:
        heads = spec.num_kv_heads
        if name.startswith("q"):
            heads = spec.num_heads
        if heads > 1:
            for words, form in ROW_FORMS.items():
                yield f"read with {words.format('rows')}", partial(form, heads)
    elif name == "out_proj.weight" and spec.num_heads > 1:
        for words, form in ROW_FORMS.items():
            yield (
                f"read with {words.format('columns')}",
                partial(_in_columns, form, spec.num_heads),
            )


def plus_one(x: np.ndarray) -> np.ndarray:
    return x + 1.0


def minus_one(x: np.ndarray) -> np.ndarray:
    return x - 1.0


VECTOR_FORMS: dict[str, Form] = {
    "its exponential": np.exp,
    "1 + its value": plus_one,
    "its value - 1": minus_one,
    "its square": np.square,
    "its absolute value": np.abs,
    "1 throughout": np.ones_like,
}
"""Forms of a bias, or of a norm's weight."""


def features_outside(heads: int, x: np.ndarray) -> np.ndarray:
    return x.reshape(heads, -1, *x.shape[1:]).swapaxes(0, 1).reshape(x.shape)


def heads_outside(heads: int, x: np.ndarray) -> np.ndarray:
    return x.reshape(-1, heads, *x.shape[1:]).swapaxes(0, 1).reshape(x.shape)


def heads_rolled(heads: int, x: np.ndarray) -> np.ndarray:
    return np.roll(x.reshape(heads, -1, *x.shape[1:]), 1, axis=0).reshape(x.shape)


ROW_FORMS: dict[str, Callable[[int, np.ndarray], np.ndarray]] = {
    "{} (H, N) instead of (N, H)": features_outside,
    "{} (N, H) instead of (H, N)": heads_outside,
    "its heads rolled by 1": heads_rolled,
}
"""Orders of the rows of a projection, or of the columns of out_proj, by the number of heads."""


def _in_columns(
    form: Callable[[int, np.ndarray], np.ndarray], heads: int, x: np.ndarray
) -> np.ndarray:
    return form(heads, x.T).T


# ---- Inputs --------------------------------------------------------------------------------------


def inputs(problem: Problem) -> Iterator[Edit]:
    """Yield projections of the other input, of another sequence, or of other tokens."""
    if problem.case.is_cached or problem.spec.latent is not None:
        return
    query, key = problem.inputs["query"], problem.inputs.get("key")
    if key is not None and key.shape == query.shape:
        yield from _other_input(problem, query, key)
    for projections in READING_OTHERS:
        whose = and_listed([name[0] for name in projections])
        for words, form in INPUT_FORMS.items():
            changed = {}
            for name in projections:
                read = query
                if key is not None and name != "q_proj":
                    read = key
                changed[name] = form(read)
            family = of.TOKENS
            if "sequence" in words:
                family = of.SEQUENCES
            about = f"{whose} {_be(projections)} made of {words}"
            yield part(problem, "input", about, _projecting(changed), family)


def _other_input(problem: Problem, query: np.ndarray, key: np.ndarray) -> Iterator[Edit]:
    """Yield projections that read the query instead of the key, and the other way round."""
    exchanged = {"q_proj": key, "k_proj": query, "v_proj": query}
    words = "the query and the key are exchanged"
    yield part(problem, "input", words, _projecting(exchanged), of.INPUTS)
    for projections in READING_OTHERS:
        other = "query"
        if "q_proj" in projections:
            other = "key"
        whose = and_listed([name[0] for name in projections])
        words = f"{whose} {_be(projections)} made of the {other}"
        change = _projecting({name: exchanged[name] for name in projections})
        yield part(problem, "input", words, change, of.INPUTS)


def sequence_before(x: np.ndarray) -> np.ndarray:
    return np.roll(x, 1, axis=0)


def first_sequence(x: np.ndarray) -> np.ndarray:
    return np.broadcast_to(x[:1], x.shape)


def token_before(x: np.ndarray) -> np.ndarray:
    return np.roll(x, 1, axis=1)


def token_after(x: np.ndarray) -> np.ndarray:
    return np.roll(x, -1, axis=1)


def reversed_tokens(x: np.ndarray) -> np.ndarray:
    return x[:, ::-1]


INPUT_FORMS: dict[str, Form] = {
    "the sequence before": sequence_before,
    "the first sequence": first_sequence,
    "the token before": token_before,
    "the token after": token_after,
    "tokens in reverse order": reversed_tokens,
}
"""Wrong inputs (B, T, d) of a projection."""


def _projecting(others: Mapping[str, np.ndarray]) -> Edit:
    """Return the edit that passes other inputs to projections, by their names."""

    def linear(_: Any, original: Any, name: str, x: np.ndarray) -> np.ndarray:
        return original(name, others.get(name, x))

    return Edit(overrides={"linear": linear})


# ---- Masks and biases ----------------------------------------------------------------------------


def masks_and_biases(problem: Problem) -> Iterator[Edit]:
    """Yield a mask, and a bias of the scores, in other axes or of another head or sequence."""
    case = problem.case
    if case.is_causal and case.key_padding_lengths is not None:
        words = "a key is hidden only if all parts of the mask hide it, instead of any part"
        yield part(problem, "mask", words, Edit(overrides={"mask": _all_of}), of.POLARITY)
    if case.window_size is not None or problem.spec.window_size is not None:
        for words, is_before_window in OUTSIDE_WINDOW.items():
            change = Edit(overrides={"is_before_window": is_before_window})
            yield part(problem, "mask", words, change, of.WINDOW)
    if case.has_mask:
        for words, form in PLANES.items():
            change, family = _with_mask(form), _family_of_mask(problem, words)
            yield part(problem, "mask", f"the mask is {words}", change, family)
    if case.bias:
        for words, form in BIAS_FORMS.items():
            about = f"the bias of the scores is {words}"
            yield part(problem, "mask", about, _with_bias(form), of.SCORE_BIAS)


def _outside_window(_: Any, original: Any, t: np.ndarray, s: np.ndarray, size: int) -> np.ndarray:
    return ~original(t, s, size)


def _outside_or_own(_: Any, original: Any, t: np.ndarray, s: np.ndarray, size: int) -> np.ndarray:
    return ~original(t, s, size) & (s != t)


OUTSIDE_WINDOW = {
    "keys in the window are hidden, and those before it are visible": _outside_window,
    "keys in the window but a query's own are hidden, and those before it are visible": (
        _outside_or_own
    ),
}


def _with_mask(form: Form) -> Edit:
    def hidden(_: Layer, original: Any, x: Any) -> np.ndarray:
        return form(original(x))

    return Edit(overrides={"hidden": hidden})


def _with_bias(form: Form) -> Edit:
    def score_bias(_: Layer, original: Any) -> np.ndarray:
        return form(original().astype(np.float64))

    return Edit(overrides={"score_bias": score_bias})


def _family_of_mask(problem: Problem, words: str) -> BugFamily | None:
    """Return the family of a mask in a different form, if the masks of a case determine one."""
    case = problem.case
    if words == "transposed":
        if case.is_causal and not case.has_own_mask:
            return of.CAUSAL
        return of.POLARITY
    if "head" in words or "(N, B)" in words:
        return of.MASK_HEADS
    if case.key_padding_lengths is not None and "sequence" in words:
        return of.PADDING
    return None


def _all_of(layer: Any, original: Any, values: Values) -> dict[str, np.ndarray]:
    """Return the mask of keys that both causality and padding hide."""
    with layer.overriding(is_later=_hides_nothing):
        padding = original(values)["mask"]
    with layer.overriding(is_padding=_hides_nothing):
        return {"mask": padding & original(values)["mask"]}


def _hides_nothing(*_: Any) -> np.ndarray:
    return np.zeros((1, 1), bool)


def transposed(x: np.ndarray) -> np.ndarray:
    return x.swapaxes(2, 3)


def of_first_head(x: np.ndarray) -> np.ndarray:
    return np.broadcast_to(x[:, :1], x.shape)


def rolled_heads(x: np.ndarray) -> np.ndarray:
    return np.roll(x, 1, axis=1)


def reversed_heads(x: np.ndarray) -> np.ndarray:
    return x[:, ::-1]


def read_as_sequences(x: np.ndarray) -> np.ndarray:
    """Read (N, B, T, S) as (B, N, T, S)."""
    return np.ascontiguousarray(x.swapaxes(0, 1)).reshape(x.shape)


def read_as_heads(x: np.ndarray) -> np.ndarray:
    """Read (B, N, T, S) as (N, B, T, S)."""
    return x.reshape(x.shape[1], x.shape[0], *x.shape[2:]).swapaxes(0, 1)


PLANES: dict[str, Form] = {
    "transposed": transposed,
    "the first head's": of_first_head,
    "the first sequence's": first_sequence,
    "the previous sequence's": sequence_before,
    "with its heads rolled by 1": rolled_heads,
    "with its heads in reverse order": reversed_heads,
    "read as (B, N) instead of (N, B)": read_as_sequences,
    "read as (N, B) instead of (B, N)": read_as_heads,
}
"""Wrong orders of queries by keys of each sequence and head, (B, N, T, S)."""


def doubled(x: np.ndarray) -> np.ndarray:
    return x + x


BIAS_FORMS: dict[str, Form] = {"subtracted": np.negative, "added twice": doubled, **PLANES}


# ---- Products of heads ---------------------------------------------------------------------------


def products(problem: Problem) -> Iterator[Edit]:
    """Yield scores and contexts of other keys and values, or of the same ones in other axes."""
    spec = problem.spec
    words = "the keys are not transposed in the product"
    yield part(problem, "product", words, _with_other_inputs("products", k=transposed), of.PRODUCTS)
    words = "the products of queries and keys are transposed"
    change = Edit(overrides={"products": _transposed_products})
    yield part(problem, "product", words, change, of.SWAPPED)
    words = "the attention weights are transposed in their product with the values"
    yield part(
        problem,
        "product",
        words,
        _with_other_inputs("weighed", attn_weights=transposed),
        of.PRODUCTS,
    )
    yield from _other_tokens(problem, "products", "k", "keys")
    yield from _other_heads(problem, "products", "keys")
    yield from _other_tokens(problem, "weighed", "v", "values")
    yield from _other_heads(problem, "weighed", "values")
    yield from _other_heads(problem, "", "keys and values")
    for words, order in _orders_of_queries(spec.num_heads, spec.num_kv_heads):
        change = _with_other_inputs("products", q=partial(_in_order, order))
        yield part(problem, "product", f"the queries used are {words}", change, of.HEAD_ORDER)
    if spec.soft_cap is not None:
        for words, capped in CAPS.items():
            change = Edit(overrides={"capped": partial(capped, spec.soft_cap)})
            yield part(problem, "product", words, change, of.SOFT_CAP)


def _transposed_products(_: Layer, original: Any, values: Values) -> np.ndarray:
    return original(values).swapaxes(2, 3)


def of_token_before(x: np.ndarray) -> np.ndarray:
    return np.roll(x, 1, axis=2)


def of_token_after(x: np.ndarray) -> np.ndarray:
    return np.roll(x, -1, axis=2)


def _with_other_inputs(method: str, **forms: Form) -> Edit:
    """Return the edit that passes other values to a method."""

    def override(_: Any, original: Any, values: Values) -> Any:
        changed = {name: form(values[name]) for name, form in forms.items()}
        return original({**values, **changed})

    return Edit(overrides={method: override})


def _other_tokens(problem: Problem, method: str, name: str, whose: str) -> Iterator[Edit]:
    """Yield the use of keys, or values, of other tokens or sequences, and of normalized ones."""
    eps = Norm().eps
    if problem.spec.qk_norm is not None:
        eps = problem.spec.qk_norm.eps
    of_tokens = of.TOKENS
    if problem.case.is_cached:
        of_tokens = of.CACHE_SLOTS  # what is used is read from the cache
    forms: tuple[tuple[str, Form, BugFamily], ...] = (
        ("of the token before", of_token_before, of_tokens),
        ("of the token after", of_token_after, of_tokens),
        ("of the sequence before", sequence_before, of.SEQUENCES),
        ("normalized, each head separately", partial(_normalized, eps), of.QK_NORM),
    )
    for words, form, family in forms:
        change = _with_other_inputs(method, **{name: form})
        yield part(problem, "product", f"the {whose} used are {words}", change, family)


OF_SINGLE_HEADS: dict[str, tuple[Form, BugFamily]] = {
    "of the token before": (of_token_before, of.TOKENS),
    "of the token after": (of_token_after, of.TOKENS),
    "0": (np.zeros_like, of.LOST),
}


def single_heads(problem: Problem) -> Iterator[Edit]:
    """Yield products of a single head with keys or values of other tokens, or with none."""
    count = problem.spec.num_heads
    if not 1 < count <= MOST_HEADS:
        return
    for method, name, whose in (("products", "k", "keys"), ("weighed", "v", "values")):
        for words, (form, family) in OF_SINGLE_HEADS.items():
            for head in range(count):
                about = f"the {whose} used by head {head} alone are {words}"
                yield part(problem, "head", about, _in_head(head, method, name, form), family)


def _in_head(head: int, method: str, name: str, form: Form) -> Edit:
    """Return the edit that passes other values to one head of a product."""

    def override(_: Any, original: Any, values: Values) -> Any:
        right, wrong = original(values), original({**values, name: form(values[name])})
        if not isinstance(right, dict):
            return _with_head(right, wrong, head)
        return {stage: _with_head(x, wrong[stage], head) for stage, x in right.items()}

    return Edit(overrides={method: override})


def _with_head(right: np.ndarray, wrong: np.ndarray, head: int) -> np.ndarray:
    changed = right.copy()
    changed[:, head] = wrong[:, head]
    return changed


def _normalized(eps: float, x: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)


def _other_heads(problem: Problem, method: str, whose: str) -> Iterator[Edit]:
    """Yield the use of keys, or values, of other key/value heads."""
    count, shared = problem.spec.num_heads, problem.spec.num_kv_heads
    if shared == 1:
        return
    own = np.arange(count) // (count // shared)
    orders = {
        "tiled (0 1 0 1)": np.arange(count) % shared,
        "the next group's": (own + 1) % shared,
        "in reverse order of groups": shared - 1 - own,
        "the first head's": np.zeros(count, int),
    }
    family = of.GROUPED
    if shared == count:
        family = of.HEAD_ORDER
    for words, order in orders.items():
        if not np.array_equal(order, own):
            about = f"the {whose} used are {words}"
            yield part(problem, "product", about, using_kv_heads(order, method), family)


def _orders_of_queries(count: int, shared: int) -> Iterator[tuple[str, np.ndarray]]:
    """Yield wrong orders of query heads in their products with keys."""
    heads = np.arange(count)
    if count > 1:
        yield "in reverse order of heads", heads[::-1]
    if 1 < shared < count:
        yield "grouped by tiles (0 2 1 3)", heads.reshape(-1, shared).T.ravel()
        yield "grouped by tiles, and ungrouped (0 2 1 3)", heads.reshape(shared, -1).T.ravel()


def _in_order(order: np.ndarray, x: np.ndarray) -> np.ndarray:
    return x[:, order]


def using_kv_heads(order: np.ndarray, method: str = "") -> Edit:
    """Return the edit by which query heads use other key/value heads: in scores and contexts, or in
    one method.

    Args:
        order: the key/value head of each query head.
        method: method of the reference, `products` or `weighed`; empty for both.
    """

    def per_query_head(_: Layer, __: Any, x: np.ndarray) -> np.ndarray:
        return x[:, order]

    def override(layer: Any, original: Any, values: Values) -> Any:
        with layer.overriding(per_query_head=partial(_in_order, order)):
            return original(values)

    if method:
        return Edit(overrides={method: override})
    return Edit(overrides={"per_query_head": per_query_head})


def _capped_twice(_: float, __: Layer, original: Any, scores: np.ndarray) -> np.ndarray:
    return original(original(scores))


def _clipped(cap: float, _: Layer, __: Any, scores: np.ndarray) -> np.ndarray:
    return np.clip(scores, -cap, cap)


def _not_multiplied_back(cap: float, _: Layer, original: Any, scores: np.ndarray) -> np.ndarray:
    return original(scores) / cap


CAPS = {
    "scores are capped twice": _capped_twice,
    "scores are clipped instead of softly capped": _clipped,
    "the soft cap is not multiplied back": _not_multiplied_back,
}
"""Wrong soft caps, by the cap of the layer."""

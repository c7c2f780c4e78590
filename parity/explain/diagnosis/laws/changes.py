"""Replacements of a part of a layer: another weight, input, mask or order of axes; each a
description and a change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from mha_spec import Norm
from mha_spec.features.relative_products import RELATIVE_TABLES
from parity.explain.diagnosis.bugs import families as of
from parity.explain.diagnosis.bugs.families import BugFamily
from parity.explain.diagnosis.bugs.record import Edit
from parity.measure.core.problem import Problem
from parity.measure.core.stages import Values
from parity.measure.core.weights import QKV
from parity.measure.text import and_listed

Part = tuple[str, Edit, BugFamily | None]
"""The description of a change, the change of the reference, and its family of bugs, if any."""

Form = Callable[[np.ndarray], np.ndarray]

MOST_HEADS = 16
"""The largest number of heads of a projection of which two may be exchanged."""

GIVEN_OTHERS = (QKV[:1], QKV[1:2], QKV[2:], QKV[1:])
"""Projections that may read another input: each alone, and keys and values together."""


# ---- Weights -------------------------------------------------------------------------------------


def weights(problem: Problem, names: list[str]) -> Iterator[Part]:
    """Yield replacements of weights: by another one, two exchanged, one or all projections in
    another form.

    Args:
        problem: with the weights.
        names: the weights that the stage depends on.
    """
    held = problem.weights
    for one in names:
        for other in (name for name in held if name != one and held[name].shape == held[one].shape):
            yield f"{one} is {other}", _replaced({one: held[other]}), family_of(one)
    for one, other in combinations(names, 2):
        if held[one].shape == held[other].shape:
            yield (
                f"{one} and {other} are exchanged",
                _replaced({one: held[other], other: held[one]}),
                family_of(one),
            )
    yield from _projections(held, names)
    yield from _heads_exchanged(problem, names)
    yield from _split_otherwise(problem, names)
    forms = {name: dict(_forms(name, problem)) for name in names}
    for some in _together(names):
        for words in forms[some[0]]:
            if all(words in forms[name] for name in some):
                changed = {name: forms[name][words](held[name].astype(np.float64)) for name in some}
                family = of.TRANSPOSED if words == "transposed" else family_of(some[0])
                yield (
                    f"{and_listed(some)} {_be(some)} {words}",
                    _replaced(changed),
                    of.HEAD_ORDER if words.startswith("read with") else family,
                )


def _projections(held: Mapping[str, np.ndarray], names: list[str]) -> Iterator[Part]:
    """Yield replacements of a projection, including its bias, by another one."""
    leaves = {
        one: {leaf: w.shape for leaf, w in _leaves(held, one).items()} for one in (*QKV, "out_proj")
    }
    for one, shapes in leaves.items():
        for other in leaves:
            if (
                other != one
                and leaves[other] == shapes
                and len(shapes) > 1
                and f"{one}.weight" in names
            ):
                changed = {f"{one}.{leaf}": w for leaf, w in _leaves(held, other).items()}
                yield f"{one} is {other}", _replaced(changed), of.SWAPPED


def _heads_exchanged(problem: Problem, names: list[str]) -> Iterator[Part]:
    """Yield exchanges of two heads of a projection, including its bias; neighboring heads first."""
    spec = problem.spec
    counts = {"q_proj": spec.num_heads, "k_proj": spec.num_kv_heads, "v_proj": spec.num_kv_heads}
    for projection, count in counts.items() if spec.latent is None else ():
        if (
            f"{projection}.weight" not in names or not 2 < count <= MOST_HEADS
        ):  # for two heads it is a known bug
            continue
        for one, other in sorted(combinations(range(count), 2), key=lambda pair: pair[1] - pair[0]):
            order = np.arange(count)
            order[[one, other]] = other, one
            changed = {
                f"{projection}.{leaf}": w.reshape(count, -1, *w.shape[1:])[order].reshape(w.shape)
                for leaf, w in _leaves(problem.weights, projection).items()
            }
            yield (
                f"heads {one} and {other} of {projection} are exchanged",
                _replaced(changed),
                of.HEAD_ORDER,
            )


def _split_otherwise(problem: Problem, names: list[str]) -> Iterator[Part]:
    """Yield heads of one projection, including its bias, that are split in another way."""
    spec = problem.spec
    if spec.latent is not None or spec.shared_kv or problem.case.is_cached:
        return
    for name in "qkv":
        if f"{name}_proj.weight" not in names:
            continue
        for words, split in SPLITS.items():
            if name == "k" and split is exchanged_split:
                continue  # the same as keys that are not transposed in the product
            yield f"{name}'s heads are {words}", _splitting(name, split), of.HEAD_ORDER


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
    known = {"sinks": of.SINKS, "relative_bias": of.RELATIVE_BIAS, "gate": of.GATE}
    known |= dict.fromkeys(RELATIVE_TABLES, of.RELATIVE_PRODUCTS)
    return next((family for begin, family in known.items() if name.startswith(begin)), of.LATENTS)


def _leaves(held: Mapping[str, np.ndarray], projection: str) -> dict[str, np.ndarray]:
    names = {leaf: f"{projection}.{leaf}" for leaf in ("weight", "bias")}
    return {leaf: held[name] for leaf, name in names.items() if name in held}


def multiple(name: str, times: float) -> Edit:
    """Multiply a weight by a number."""

    def parameter(_: Any, original: Any, which: str) -> np.ndarray:
        return original(which).astype(np.float64) * times if which == name else original(which)

    return Edit(overrides={"parameter": parameter})


def _replaced(others: Mapping[str, np.ndarray]) -> Edit:
    def parameter(_: Any, original: Any, name: str) -> np.ndarray:
        return others[name] if name in others else original(name)

    return Edit(overrides={"parameter": parameter})


def _together(names: list[str]) -> Iterator[list[str]]:
    """Yield weights that may be wrong alike: each alone, then those of several projections."""
    yield from ([name] for name in names)
    for leaf in ("weight", "bias"):
        of = [
            name
            for name in (f"{projection}.{leaf}" for projection in (*QKV, "out_proj"))
            if name in names
        ]
        some = [of[:2], of[:3], of]
        yield from (each for i, each in enumerate(some) if len(each) > 1 and each not in some[:i])
        norms = [name for name in (f"q_norm.{leaf}", f"k_norm.{leaf}") if name in names]
        if len(norms) == 2:
            yield norms


def _be(some: Sequence[str]) -> str:
    return "is" if len(some) == 1 else "are"


def _forms(name: str, problem: Problem) -> Iterator[tuple[str, Form]]:
    """Yield forms of a weight with other numbers, or with the same ones in another order."""
    w, spec = problem.weights[name], problem.spec
    if w.ndim == 1:
        yield "its exponential", np.exp
        yield "1 + its value", lambda x: x + 1.0
        yield "its value - 1", lambda x: x - 1.0
        yield "its square", np.square
        yield "its absolute value", np.abs
        yield "1 throughout", np.ones_like
    elif w.ndim == 2 and w.shape[0] == w.shape[1]:
        yield "transposed", np.transpose
    heads = {"q": spec.num_heads, "k": spec.num_kv_heads, "v": spec.num_kv_heads}
    if name.startswith(QKV) and spec.latent is None and heads[name[0]] > 1:
        yield from _rows(heads[name[0]])
    elif name == "out_proj.weight" and spec.num_heads > 1:
        for words, form in _rows(spec.num_heads):
            yield words.replace("rows", "columns"), lambda x, form=form: form(x.T).T


def _rows(heads: int) -> Iterator[tuple[str, Form]]:
    """Yield orders of the rows of a projection."""

    def inside(x: np.ndarray) -> np.ndarray:
        return x.reshape(heads, -1, *x.shape[1:]).swapaxes(0, 1).reshape(x.shape)

    def outside(x: np.ndarray) -> np.ndarray:
        return x.reshape(-1, heads, *x.shape[1:]).swapaxes(0, 1).reshape(x.shape)

    def rolled(x: np.ndarray) -> np.ndarray:
        return np.roll(x.reshape(heads, -1, *x.shape[1:]), 1, axis=0).reshape(x.shape)

    yield "read with rows (H, N) instead of (N, H)", inside
    yield "read with rows (N, H) instead of (H, N)", outside
    yield "read with its heads rolled by 1", rolled


# ---- Inputs --------------------------------------------------------------------------------------


def inputs(problem: Problem) -> Iterator[Part]:
    """Yield projections of the other input, of another sequence, or of other tokens."""
    if problem.case.is_cached or problem.spec.latent is not None:
        return
    query, key = problem.inputs["query"], problem.inputs.get("key")
    if key is not None and key.shape == query.shape:
        both = {"q_proj": key, "k_proj": query, "v_proj": query}
        yield "the query and the key are exchanged", _projecting(both), of.INPUTS
        for some in GIVEN_OTHERS:
            words = f"{and_listed([name[0] for name in some])} {_be(some)} made of the "
            words += "key" if "q" in some[0] else "query"
            yield words, _projecting({name: both[name] for name in some}), of.INPUTS
    forms: dict[str, Form] = {
        "the sequence before": lambda x: np.roll(x, 1, axis=0),
        "the first sequence": lambda x: np.broadcast_to(x[:1], x.shape),
        "the token before": lambda x: np.roll(x, 1, axis=1),
        "the token after": lambda x: np.roll(x, -1, axis=1),
        "tokens in reverse order": lambda x: x[:, ::-1],
    }
    for some in GIVEN_OTHERS:
        for words, form in forms.items():
            others = {
                name: form(query if key is None or name == "q_proj" else key) for name in some
            }
            family = of.SEQUENCES if "sequence" in words else of.TOKENS
            yield (
                f"{and_listed([name[0] for name in some])} {_be(some)} made of {words}",
                _projecting(others),
                family,
            )


def _projecting(others: Mapping[str, np.ndarray]) -> Edit:
    """Return the layer whose projections of some names read other inputs."""
    return Edit(
        overrides={"linear": lambda _, original, name, x: original(name, others.get(name, x))}
    )


# ---- Masks and biases ----------------------------------------------------------------------------


def masks_and_biases(problem: Problem) -> Iterator[Part]:
    """Yield a mask, and a bias of the scores, in other axes or of another head or sequence."""
    forms = dict(_planes())
    if problem.case.is_causal and problem.case.key_padding_lengths is not None:
        yield (
            "a key is hidden only if all parts of the mask hide it, instead of any part",
            Edit(overrides={"mask": _all_of}),
            of.POLARITY,
        )
    if problem.case.window_size is not None or problem.spec.window_size is not None:
        for words, method in _OUTSIDE_WINDOW.items():
            yield words, Edit(overrides={"is_before_window": method}), of.WINDOW
    if problem.case.has_mask:
        for words, form in forms.items():
            changed = Edit(overrides={"hidden": lambda _, f, x, form=form: form(f(x))})
            yield f"the mask is {words}", changed, _family_of_mask(problem, words)
    if problem.case.bias:
        others = {"subtracted": np.negative, "added twice": lambda x: x + x, **forms}
        for words, form in others.items():
            yield (
                f"the bias of the scores is {words}",
                Edit(
                    overrides={"score_bias": lambda _, f, form=form: form(f().astype(np.float64))}
                ),
                of.SCORE_BIAS,
            )


def _outside_window(_: Any, original: Any, t: np.ndarray, s: np.ndarray, size: int) -> np.ndarray:
    return ~original(t, s, size)


def _outside_or_own(_: Any, original: Any, t: np.ndarray, s: np.ndarray, size: int) -> np.ndarray:
    return ~original(t, s, size) & (s != t)


_OUTSIDE_WINDOW = {
    "keys in the window are hidden, and those before it are visible": _outside_window,
    "keys in the window but a query's own are hidden, and those before it are visible": (
        _outside_or_own
    ),
}


def _family_of_mask(problem: Problem, words: str) -> BugFamily | None:
    """Return the family of a mask in another form, if the masks of a case determine one."""
    case = problem.case
    if words == "transposed":
        return of.CAUSAL if case.is_causal and not case.random_mask else of.POLARITY
    if "head" in words or "(N, B)" in words:
        return of.MASK_HEADS
    return of.PADDING if case.key_padding_lengths is not None and "sequence" in words else None


def _all_of(layer: Any, original: Any, values: Values) -> dict[str, np.ndarray]:
    """Return the mask of keys that both causality and padding hide."""
    none = np.zeros((1, 1), bool)
    with layer.overriding(is_later=lambda *_: none):
        padding = original(values)["mask"]
    with layer.overriding(is_padding=lambda *_: none):
        return {"mask": padding & original(values)["mask"]}


def _planes() -> Iterator[tuple[str, Form]]:
    """Yield orders of queries by keys of each sequence and head."""
    yield "transposed", lambda x: x.swapaxes(2, 3)
    yield "that of the first head", lambda x: np.broadcast_to(x[:, :1], x.shape)
    yield "that of the first sequence", lambda x: np.broadcast_to(x[:1], x.shape)
    yield "that of the sequence before", lambda x: np.roll(x, 1, axis=0)
    yield "with its heads rolled by 1", lambda x: np.roll(x, 1, axis=1)
    yield "with its heads in reverse order", lambda x: x[:, ::-1]
    yield "read as (B, N) instead of (N, B)", lambda x: _as_rows(x.swapaxes(0, 1), x.shape)
    yield (
        "read as (N, B) instead of (B, N)",
        lambda x: x.reshape(x.shape[1], x.shape[0], *x.shape[2:]).swapaxes(0, 1),
    )


def _as_rows(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    return np.ascontiguousarray(x).reshape(shape)


# ---- Products of heads ---------------------------------------------------------------------------


_OF_FORMS = {
    "of the token before": of.TOKENS,
    "of the token after": of.TOKENS,
    "of the sequence before": of.SEQUENCES,
    "normalized, each head separately": of.QK_NORM,
}


def single_heads(problem: Problem) -> Iterator[Part]:
    """Yield products of a single head with keys or values of other tokens, or with none."""
    count = problem.spec.num_heads
    if not 1 < count <= MOST_HEADS:
        return
    for method, name, whose in (("products", "k", "keys"), ("weighed", "v", "values")):
        for words, (form, family) in _OF_SINGLE_HEADS.items():
            for head in range(count):
                changed = _in_head(head, method, name, form)
                yield f"the {whose} used by head {head} alone are {words}", changed, family


def _in_head(head: int, method: str, name: str, form: Form) -> Edit:
    """Return the layer in which one head of a product receives other values."""

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


def of_token_before(x: np.ndarray) -> np.ndarray:
    return np.roll(x, 1, axis=2)


def of_token_after(x: np.ndarray) -> np.ndarray:
    return np.roll(x, -1, axis=2)


_OF_SINGLE_HEADS: dict[str, tuple[Form, BugFamily]] = {
    "of the token before": (of_token_before, of.TOKENS),
    "of the token after": (of_token_after, of.TOKENS),
    "0": (np.zeros_like, of.LOST),
}


def products(problem: Problem) -> Iterator[Part]:
    """Yield scores and contexts of other keys and values, or of the same ones in other axes."""
    spec = problem.spec
    eps = Norm().eps if spec.qk_norm is None else spec.qk_norm.eps
    yield (
        "the keys are not transposed in the product",
        _given("products", k=lambda x: x.swapaxes(2, 3)),
        of.PRODUCTS,
    )
    yield (
        "the products of queries and keys are transposed",
        Edit(overrides={"products": lambda _, f, values: f(values).swapaxes(2, 3)}),
        of.SWAPPED,
    )
    transposed = _given("weighed", attn_weights=lambda x: x.swapaxes(2, 3))
    yield (
        "the attention weights are transposed in their product with the values",
        transposed,
        of.PRODUCTS,
    )
    for method, name, whose in (("products", "k", "keys"), ("weighed", "v", "values")):
        forms: dict[str, Form] = {
            "of the token before": of_token_before,
            "of the token after": of_token_after,
            "of the sequence before": lambda x: np.roll(x, 1, axis=0),
            "normalized, each head separately": lambda x: (
                x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
            ),
        }
        for words, form in forms.items():
            family = _OF_FORMS[words]
            if problem.case.is_cached and family is of.TOKENS:
                family = of.CACHE_SLOTS  # what is used is read from the cache
            yield f"the {whose} used are {words}", _given(method, **{name: form}), family
        yield from _heads_of(method, whose, spec.num_heads, spec.num_kv_heads)
    yield from _heads_of("", "keys and values", spec.num_heads, spec.num_kv_heads)
    for words, order in _orders_of_queries(spec.num_heads, spec.num_kv_heads):
        changed = _given("products", q=lambda x, order=order: x[:, order])
        yield f"the queries used are {words}", changed, of.HEAD_ORDER
    if spec.soft_cap is not None:
        cap = spec.soft_cap
        yield (
            "scores are capped twice",
            Edit(overrides={"capped": lambda _, f, x: f(f(x))}),
            of.SOFT_CAP,
        )
        yield (
            "scores are clipped instead of softly capped",
            Edit(overrides={"capped": lambda _, f, x: np.clip(x, -cap, cap)}),
            of.SOFT_CAP,
        )
        yield (
            "the soft cap is not multiplied back",
            Edit(overrides={"capped": lambda _, f, x: f(x) / cap}),
            of.SOFT_CAP,
        )


def _given(method: str, **forms: Form) -> Edit:
    """Return the layer in which a method receives other values."""

    def override(_: Any, original: Any, values: Values) -> Any:
        return original({**values, **{name: form(values[name]) for name, form in forms.items()}})

    return Edit(overrides={method: override})


def _heads_of(method: str, whose: str, count: int, shared: int) -> Iterator[Part]:
    """Yield the use of keys, or values, of other key/value heads."""
    if shared == 1:
        return
    own = np.arange(count) // (count // shared)
    orders = {
        "tiled (0 1 0 1)": np.arange(count) % shared,
        "those of the next group": (own + 1) % shared,
        "those of the groups in reverse order": shared - 1 - own,
        "those of the first head": np.zeros(count, int),
    }
    for words, order in orders.items():
        if not np.array_equal(order, own):
            family = of.HEAD_ORDER if shared == count else of.GROUPED
            yield f"the {whose} used are {words}", meeting(order, method), family


def _orders_of_queries(count: int, shared: int) -> Iterator[tuple[str, np.ndarray]]:
    """Yield wrong orders of query heads in their products with keys."""
    heads = np.arange(count)
    if count > 1:
        yield "those of the heads in reverse order", heads[::-1]
    if 1 < shared < count:
        yield "grouped by tiles (0 2 1 3)", heads.reshape(-1, shared).T.ravel()
        yield "grouped by tiles, and ungrouped (0 2 1 3)", heads.reshape(shared, -1).T.ravel()


def meeting(order: np.ndarray, method: str = "") -> Edit:
    """Return the layer whose query heads use other key/value heads: in scores and contexts, or in
    one method.
    """

    def heads(x: np.ndarray) -> np.ndarray:
        return x[:, order]

    if not method:
        return Edit(overrides={"per_query_head": lambda _, __, x: heads(x)})

    def override(layer: Any, original: Any, values: Values) -> Any:
        with layer.overriding(per_query_head=heads):
            return original(values)

    return Edit(overrides={method: override})

"""Recognize attention by its operations, in a layer that calls no attention function.

A layer is attention if it computes one softmax, of scores that come from one product of queries and
keys, and multiplies the unchanged result by values. A single call of `scaled_dot_product_attention`
also counts. Operations are recorded below autograd, where `@`, `einsum` and `baddbmm` are all
batched matrix products.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import permutations
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

LEAST_HIDDEN = -5000.0
"""Largest number that hides a key, relative to the maximum of its row: masks add -1e4, or fill in
-1e9.
"""

SOFTMAX = ("_softmax", "_safe_softmax", "_masked_softmax", "_log_softmax", "_sparse_softmax")
PRODUCTS = {"bmm": (0, 1), "baddbmm": (1, 2)}
"""Batched matrix products, and the positions of the arguments that they multiply."""


@dataclass(frozen=True, eq=False)
class Product:
    """A batched matrix product."""

    left: Tensor
    right: Tensor
    result: Tensor


@dataclass(frozen=True)
class Scores:
    """Values computed from a product: factor * product or bound * tanh(factor * product), plus an
    optional addend.
    """

    product: Product
    factor: float = 1.0
    bound: float | None = None

    @property
    def scale(self) -> float:
        """Return the factor of small products."""
        return self.factor if self.bound is None else self.factor * self.bound

    def made_of(self, products: Tensor) -> Tensor:
        """Return the scores of products, without biases."""
        made = self.factor * products
        return made if self.bound is None else self.bound * torch.tanh(made)


@dataclass(frozen=True, eq=False)
class Softmax:
    """A softmax over an axis, with the name of its operation and copies of its input and result."""

    name: str
    given: tuple[Scores | Softmax, ...]
    scores: Tensor
    weights: Tensor
    axis: int


@dataclass(frozen=True)
class Attended:
    """Attention of a layer in one call.

    Attributes:
        q, k, v, context: heads (B, heads, tokens, features).
        mask: True where a query may attend to a key, or numbers that are added to scores.
        scale: factor of the products of queries and keys.
        soft_cap: bound of the scores; None if there is none.
        scores: input of the softmax, (B, N, T, S); None if it was not recorded.
        weights: output of the softmax.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    context: Tensor
    mask: Tensor
    scale: float
    soft_cap: float | None = None
    scores: Tensor | None = None
    weights: Tensor | None = None


@dataclass
class LayerOperations:
    """Record the operations of a layer during its call.

    Attributes:
        sees_functions: whether calls of `scaled_dot_product_attention` are recorded themselves.
            Code that detects such recording, such as the fast path of `nn.MultiheadAttention`, then
            computes in another way.
    """

    sees_functions: bool = False
    softmaxes: list[Softmax] = field(default_factory=list)
    contexts: list[Product] = field(default_factory=list)
    calls: list[tuple[dict[str, Any], Tensor]] = field(default_factory=list)
    is_inside: bool = False  # inside a function that was recorded as a whole
    _known: dict[int, tuple[Tensor, tuple[Scores | Softmax, ...]]] = field(default_factory=dict)
    _scaled: dict[int, tuple[Tensor, Tensor, float]] = field(
        default_factory=dict
    )  # what a number was multiplied by
    _modes: ExitStack = field(default_factory=ExitStack)

    def watch(self) -> None:
        """Begin to record operations."""
        self.softmaxes, self.contexts, self.calls = [], [], []
        if self.sees_functions:
            self._modes.enter_context(_FunctionMode(self))
        self._modes.enter_context(_DispatchMode(self))

    def close(self) -> None:
        """Stop recording operations."""
        self._modes.close()
        self._known.clear()
        self._scaled.clear()

    def ran(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Record an operation."""
        name = func._schema.name.partition("::")[2].rstrip("_")  # in-place operations count as well
        if name.startswith("_scaled_dot_product") and "backward" not in name:
            names = [each.name for each in func._schema.arguments]
            self.calls.append(
                ({**dict(zip(names, args, strict=False)), **kwargs}, tree_leaves(result)[0])
            )
            return
        given = self._given(tree_leaves((args, kwargs)))
        if name in PRODUCTS:
            left, right = (args[place] for place in PRODUCTS[name])
            if any(isinstance(each, Softmax) for each in self._given([left, right])):
                self.contexts.append(
                    _with_weights_first(Product(left, right, result), self._given([right]))
                )
            else:
                right, factor = self._scaled.get(id(right), (None, right, 1.0))[1:]
                scores = Scores(
                    Product(left, right, result), factor * float(kwargs.get("alpha", 1.0))
                )
                self._known[id(result)] = result, (scores,)
        elif name in SOFTMAX:
            copies = args[0].detach().clone(), result.detach().clone()
            softmax = Softmax(name, given, *copies, args[1] % args[0].ndim)
            self.softmaxes.append(softmax)
            self._known[id(result)] = result, (softmax,)
        elif not given and (factor := _factor_of(name, args)) is not None:
            given_tensors = [x for x in args if isinstance(x, Tensor)]
            self._scaled[id(result)] = result, max(given_tensors, key=Tensor.numel), factor
        elif given:
            given = tuple(
                _after(name, args, each) if isinstance(each, Scores) else each for each in given
            )
            self._known |= {id(x): (x, given) for x in tree_leaves(result) if isinstance(x, Tensor)}

    def _given(self, values: list[Any]) -> tuple[Scores | Softmax, ...]:
        """Return the products and softmaxes that some values came from, each once."""
        known = (
            self._known[id(x)][1] for x in values if isinstance(x, Tensor) and id(x) in self._known
        )
        return tuple(dict.fromkeys(each for of_one in known for each in of_one))

    def attention(self, batch_size: int, num_tokens: int | None) -> Attended | str:
        """Return the recorded attention, or the reason why there is none.

        Args:
            batch_size: number of sequences; heads may share an axis with them.
            num_tokens: number of query tokens, which may share an axis with groups of heads; None
                if unknown.
        """
        if len(self.softmaxes) + len(self.calls) != 1:
            calls = (
                f" and {len(self.calls)} calls of scaled_dot_product_attention"
                if self.calls
                else ""
            )
            return f"{len(self.softmaxes)} softmaxes{calls} instead of one"
        if self.calls:
            return _of_call(*self.calls[0], batch_size)
        (softmax,) = self.softmaxes
        shape = self.contexts[0].left.shape if len(self.contexts) == 1 else None
        scores = [each for each in softmax.given if isinstance(each, Scores)]
        if len(scores) > 1:  # of others, with vectors of distances, the numbers may be fitted
            scores = [each for each in scores if each.product.result.shape == shape]
        if len(scores) != 1 or any(isinstance(each, Softmax) for each in softmax.given):
            return f"scores that come from {len(softmax.given)} products of queries and keys"
        if len(self.contexts) != 1:
            return f"attention weights that are multiplied by values {len(self.contexts)} times"
        if softmax.name != "_softmax":
            return f"{softmax.name} instead of a softmax of scores"
        return _of_softmax(softmax, scores[0], self.contexts[0], batch_size, num_tokens)


class _DispatchMode(TorchDispatchMode):
    """Records operations below autograd."""

    supports_higher_order_operators = True

    def __init__(self, operations: LayerOperations) -> None:
        super().__init__()
        self.operations = operations

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not hasattr(func, "_schema"):  # a higher-order operator
            return func(*args, **kwargs)
        with self:  # in inference mode, nothing above decomposes it
            parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        result = func(*args, **kwargs)
        if not self.operations.is_inside:
            self.operations.ran(func, args, kwargs, result)
        return result


class _FunctionMode(TorchFunctionMode):
    """Record calls of `scaled_dot_product_attention`, which may be several operations below
    autograd.
    """

    def __init__(self, operations: LayerOperations) -> None:
        super().__init__()
        self.operations = operations

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.nn.functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        self.operations.is_inside = True
        try:
            result = func(*args, **kwargs)
        finally:
            self.operations.is_inside = False
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        self.operations.calls.append(({**dict(zip(names, args, strict=False)), **kwargs}, result))
        return result


def _with_weights_first(product: Product, of_right: tuple[Any, ...]) -> Product:
    """Return the product of attention weights and values, which may have been computed
    transposed.
    """
    if not any(isinstance(each, Softmax) for each in of_right):
        return product
    return Product(product.right.mT, product.left.mT, product.result.mT)


def _after(name: str, args: tuple[Any, ...], scores: Scores) -> Scores:
    """Return scores after an operation. The effect of unknown operations shows in the scores
    themselves.
    """
    if name == "tanh" and scores.bound is None:
        return replace(scores, bound=1.0)
    if (factor := _factor_of(name, args)) is None:
        return scores
    if scores.bound is None:
        return replace(scores, factor=scores.factor * factor)
    return replace(scores, bound=scores.bound * factor)


def _factor_of(name: str, args: tuple[Any, ...]) -> float | None:
    """Return the number that an operation multiplies a tensor by; None if it does not."""
    numbers = [
        float(x)
        for x in args
        if isinstance(x, (int, float)) or (isinstance(x, Tensor) and x.numel() == 1)
    ]
    if name not in ("mul", "div") or len(numbers) != 1:
        return None
    return numbers[0] if name == "mul" else 1.0 / numbers[0] if numbers[0] else 0.0


def _of_call(given: dict[str, Any], context: Tensor, batch_size: int) -> Attended | str:
    """Return the attention of a call of `scaled_dot_product_attention`."""
    q, k, v = (given[name] for name in ("query", "key", "value"))
    if q.ndim == 3 and q.shape[0] % batch_size == 0 and given.get("attn_mask") is None:
        q, k, v, context = (x.unflatten(0, (batch_size, -1)) for x in (q, k, v, context))
    if q.ndim != 4:
        return f"a call of scaled_dot_product_attention with queries {tuple(q.shape)}"
    if given.get("dropout_p"):
        return "dropout"
    mask = next(
        (given[name] for name in ("attn_mask", "attn_bias") if given.get(name) is not None), None
    )
    if mask is None:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
        mask = mask.tril() if given.get("is_causal") else mask
    scale = given.get("scale")
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    return Attended(q, *_grouped(k, v), context, mask[(None,) * (4 - mask.ndim)], scale)


def _of_softmax(
    softmax: Softmax, scores: Scores, context: Product, batch_size: int, num_tokens: int | None
) -> Attended | str:
    """Return the attention of a softmax between two products, with heads separated from
    sequences.
    """
    folded, rows, _ = context.left.shape
    if scores.product.result.shape != context.left.shape or folded % batch_size:
        return (
            f"{tuple(scores.product.result.shape)} scores and {tuple(context.left.shape)} "
            f"attention weights"
        )
    if num_tokens is not None and rows % num_tokens:
        return f"{rows} queries of {num_tokens} tokens"
    order = next(
        (each for each in _orders(softmax) if _is_aligned(softmax, each, context.left)), None
    )
    if order is None:
        return (
            "attention weights that are not over keys, or change before they are multiplied by "
            "values"
        )
    tokens = num_tokens or rows
    sizes = [
        softmax.weights.shape[axis] for axis in range(softmax.weights.ndim) if axis != softmax.axis
    ]
    q = _heads(scores.product.left, batch_size, tokens, sizes)
    sizes = [softmax.weights.shape[axis] for axis in order[:-1]]
    received = softmax.scores.permute(order).reshape(context.left.shape)
    received, weights, out = (
        _heads(x, batch_size, tokens, sizes) for x in (received, context.left, context.result)
    )
    k, v = (x.unflatten(0, (batch_size, -1)) for x in (scores.product.right.mT, context.right))
    added = received - scores.made_of(q @ k.repeat_interleave(rows // tokens, 1).mT)
    seen = (received > 0.5 * torch.finfo(received.dtype).min) & (
        added > added.amax(-1, True) + LEAST_HIDDEN
    )
    return Attended(q, *_grouped(k, v), out, seen, scores.scale, scores.bound, received, weights)


def _heads(x: Tensor, batch_size: int, num_tokens: int, sizes: list[int]) -> Tensor:
    """Return rows (sequences * heads, groups * tokens, features) as heads (B, heads, T, features).

    Args:
        x: the rows.
        batch_size: number of sequences.
        num_tokens: number of tokens.
        sizes: of the axes before keys; they show whether tokens come before groups.
    """
    groups = x.shape[1] // num_tokens
    places = {size: place for place, size in enumerate(sizes)}
    if groups == 1 or places.get(num_tokens, len(sizes)) > places.get(groups, -1):
        return x.reshape(batch_size, -1, num_tokens, x.shape[-1])
    x = x.reshape(batch_size, -1, num_tokens, groups, x.shape[-1])
    return x.transpose(2, 3).flatten(1, 2)


def _is_aligned(softmax: Softmax, order: tuple[int, ...], weights: Tensor) -> bool:
    """Return whether the result of a softmax, with axes in this order, is the weights that multiply
    values.
    """
    result = softmax.weights.permute(order)
    return result.numel() == weights.numel() and torch.equal(
        result.to(weights.dtype).reshape(weights.shape), weights
    )


def _orders(softmax: Softmax) -> Iterator[tuple[int, ...]]:
    """Yield the orders of axes that put the softmax axis last."""
    others = [axis for axis in range(softmax.scores.ndim) if axis != softmax.axis]
    yield from ((*order, softmax.axis) for order in permutations(others))


def _grouped(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distinct heads of keys and values, if each is repeated for a group of query
    heads.
    """
    for count in range(1, k.shape[1]):
        if k.shape[1] % count == 0 and all(_is_repeated(x, count) for x in (k, v)):
            step = k.shape[1] // count
            return k[:, ::step], v[:, ::step]
    return k, v


def _is_repeated(heads: Tensor, count: int) -> bool:
    """Return whether there are `count` distinct heads, each followed by its copies."""
    groups = heads.unflatten(1, (count, -1))
    return bool((groups == groups[:, :, :1]).all())

"""Recognize attention by its operations, in a layer that calls no attention function.

A layer is attention if it computes one softmax, of scores that come from one product of queries and
keys, and multiplies the unchanged result by values. A single call of `scaled_dot_product_attention`
also counts. Operations are recorded below autograd, where `@`, `einsum` and `baddbmm` are all
batched matrix products.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import permutations
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

LEAST_HIDDEN = -5000.0
"""Largest number that hides a key, relative to the maximum of its row.

Masks add -1e4, or fill in -1e9: half of the former leaves room for biases in the same row.
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
    """Values computed from a product, plus an optional addend.

    They are factor * product, or bound * tanh(factor * product).
    """

    product: Product
    factor: float = 1.0
    bound: float | None = None

    @property
    def scale(self) -> float:
        """Return the factor of small products."""
        if self.bound is None:
            return self.factor
        return self.factor * self.bound

    def of_products(self, products: Tensor) -> Tensor:
        """Return the scores of products, without biases."""
        scaled = self.factor * products
        if self.bound is None:
            return scaled
        return self.bound * torch.tanh(scaled)


@dataclass(frozen=True, eq=False)
class Softmax:
    """A softmax over an axis.

    Attributes:
        name: name of its operation.
        origins: scores and other softmaxes that its input came from.
        scores, weights: copies of its input and result, which later operations may overwrite.
        axis: axis that it normalizes, >= 0.
    """

    name: str
    origins: Origins
    scores: Tensor
    weights: Tensor
    axis: int


Origins: TypeAlias = tuple[Scores | Softmax, ...]
"""Scores and softmaxes that a tensor was computed from."""


@dataclass(frozen=True)
class Attended:
    """Attention of a layer in one call.

    Attributes:
        q, k, v, context: heads (B, heads, tokens, features).
        mask: True where a query may attend to a key, or values that are added to scores.
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
            computes differently.
        softmaxes: recorded softmaxes.
        contexts: products of attention weights and values, weights first.
        calls: arguments by name and results of calls of `scaled_dot_product_attention`.
        is_inside: whether a function runs that is recorded as a whole.
    """

    sees_functions: bool = False
    softmaxes: list[Softmax] = field(default_factory=list)
    contexts: list[Product] = field(default_factory=list)
    calls: list[tuple[dict[str, Any], Tensor]] = field(default_factory=list)
    is_inside: bool = False
    # Both by the id of a tensor, which they hold as well: the id of a freed one is used again.
    _origins: dict[int, tuple[Tensor, Origins]] = field(default_factory=dict)
    _scaled: dict[int, _Scaled] = field(default_factory=dict)
    _modes: ExitStack = field(default_factory=ExitStack)

    def start(self) -> None:
        """Begin to record operations."""
        self.softmaxes, self.contexts, self.calls = [], [], []
        if self.sees_functions:
            self._modes.enter_context(_FunctionMode(self))
        self._modes.enter_context(_DispatchMode(self))

    def stop(self) -> None:
        """Stop recording operations; keep the recorded ones."""
        self._modes.close()
        self._origins.clear()
        self._scaled.clear()

    def record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Record an operation."""
        name = func._schema.name.partition("::")[2].rstrip("_")  # in-place operations count as well
        if name.startswith("_scaled_dot_product") and "backward" not in name:
            names = [argument.name for argument in func._schema.arguments]
            arguments = {**dict(zip(names, args, strict=False)), **kwargs}
            self.calls.append((arguments, tree_leaves(result)[0]))
            return
        origins = self._origins_of(tree_leaves((args, kwargs)))
        if name in PRODUCTS:
            self._record_product(name, args, kwargs, result)
        elif name in SOFTMAX:
            scores, weights = args[0].detach().clone(), result.detach().clone()
            softmax = Softmax(name, origins, scores, weights, args[1] % args[0].ndim)
            self.softmaxes.append(softmax)
            self._origins[id(result)] = result, (softmax,)
        elif origins:
            self._record_derived(name, args, origins, result)
        else:
            factor = _factor_of(name, args)
            if factor is not None:
                # The other tensor, if there is one, is the factor.
                tensors = [x for x in args if isinstance(x, Tensor)]
                scaled = max(tensors, key=Tensor.numel)
                self._scaled[id(result)] = _Scaled(result, scaled, factor)

    def _record_product(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
    ) -> None:
        """Record a product as one with attention weights, or as new scores."""
        left_index, right_index = PRODUCTS[name]
        left, right = args[left_index], args[right_index]
        if _has_softmax(self._origins_of([right])):  # values · weights, both transposed
            self.contexts.append(Product(right.mT, left.mT, result.mT))
            return
        if _has_softmax(self._origins_of([left])):
            self.contexts.append(Product(left, right, result))
            return
        factor = float(kwargs.get("alpha", 1.0))
        # Keys may be scaled before the product. Those without the factor are the layer's keys.
        scaled_keys = self._scaled.get(id(right))
        if scaled_keys is not None:
            right = scaled_keys.tensor
            factor *= scaled_keys.factor
        self._origins[id(result)] = result, (Scores(Product(left, right, result), factor),)

    def _record_derived(
        self, name: str, args: tuple[Any, ...], origins: Origins, result: Any
    ) -> None:
        """Record where the results of an operation on scores or attention weights come from."""
        origins_of_result = []
        for origin in origins:
            if isinstance(origin, Scores):
                origin = _after(name, args, origin)
            origins_of_result.append(origin)
        for x in tree_leaves(result):
            if isinstance(x, Tensor):
                self._origins[id(x)] = x, tuple(origins_of_result)

    def _origins_of(self, values: list[Any]) -> Origins:
        """Return the scores and softmaxes that some values came from, each once."""
        origins: dict[Scores | Softmax, None] = {}
        for x in values:
            if isinstance(x, Tensor) and id(x) in self._origins:
                origins |= dict.fromkeys(self._origins[id(x)][1])
        return tuple(origins)

    def attention(self, batch_size: int, num_tokens: int | None) -> Attended | str:
        """Return the recorded attention, or the reason why there is none.

        Args:
            batch_size: number of sequences; heads may share an axis with them.
            num_tokens: number of query tokens, which may share an axis with groups of heads; None
                if unknown.
        """
        if len(self.softmaxes) + len(self.calls) != 1:
            calls = ""
            if self.calls:
                calls = f" and {len(self.calls)} calls of scaled_dot_product_attention"
            return f"{len(self.softmaxes)} softmaxes{calls} instead of one"
        if self.calls:
            return _of_call(*self.calls[0], batch_size)
        (softmax,) = self.softmaxes
        scores = [origin for origin in softmax.origins if isinstance(origin, Scores)]
        if len(scores) > 1:
            # Scores of the shape of the weights are the products of queries and keys. Others are
            # products of vectors of distances, which may be fitted to the values.
            shape = self.contexts[0].left.shape if len(self.contexts) == 1 else None
            scores = [origin for origin in scores if origin.product.result.shape == shape]
        if len(scores) != 1 or _has_softmax(softmax.origins):
            return f"scores that come from {len(softmax.origins)} products of queries and keys"
        if len(self.contexts) != 1:
            return f"attention weights that are multiplied by values {len(self.contexts)} times"
        if softmax.name != "_softmax":
            return f"{softmax.name} instead of a softmax of scores"
        return _of_softmax(softmax, scores[0], self.contexts[0], batch_size, num_tokens)


@dataclass(frozen=True, eq=False)
class _Scaled:
    """A tensor times a factor."""

    result: Tensor
    tensor: Tensor
    factor: float


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
            self.operations.record(func, args, kwargs, result)
        return result


class _FunctionMode(TorchFunctionMode):
    """Record calls of `scaled_dot_product_attention`.

    Below autograd, one may be several operations.
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
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        self.operations.calls.append((arguments, result))
        return result


def _has_softmax(origins: Origins) -> bool:
    return any(isinstance(origin, Softmax) for origin in origins)


def _after(name: str, args: tuple[Any, ...], scores: Scores) -> Scores:
    """Return scores after an operation. The effect of unknown ones shows in the scores' values."""
    if name == "tanh" and scores.bound is None:
        return replace(scores, bound=1.0)
    factor = _factor_of(name, args)
    if factor is None:
        return scores
    if scores.bound is None:
        return replace(scores, factor=scores.factor * factor)
    return replace(scores, bound=scores.bound * factor)


def _factor_of(name: str, args: tuple[Any, ...]) -> float | None:
    """Return the number that an operation multiplies a tensor by; None if it does not."""
    if name not in ("mul", "div"):
        return None
    numbers = [float(x) for x in args if _is_number(x)]
    if len(numbers) != 1:
        return None
    (number,) = numbers
    if name == "mul":
        return number
    if number == 0.0:
        return 0.0  # any factor will do: the scores are infinite or NaN
    return 1.0 / number


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float)) or (isinstance(x, Tensor) and x.numel() == 1)


def _of_call(arguments: dict[str, Any], context: Tensor, batch_size: int) -> Attended | str:
    """Return the attention of a call of `scaled_dot_product_attention`."""
    q, k, v = arguments["query"], arguments["key"], arguments["value"]
    mask = arguments.get("attn_mask")
    if q.ndim == 3 and q.shape[0] % batch_size == 0 and mask is None:
        q, k, v, context = (x.unflatten(0, (batch_size, -1)) for x in (q, k, v, context))
    if q.ndim != 4:
        return f"a call of scaled_dot_product_attention with queries {tuple(q.shape)}"
    if arguments.get("dropout_p"):
        return "dropout"
    if mask is None:
        mask = arguments.get("attn_bias")  # so the operations below autograd call it
    if mask is None:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
        if arguments.get("is_causal"):
            mask = mask.tril()
    scale = arguments.get("scale")
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    return Attended(q, *_grouped(k, v), context, mask[(None,) * (4 - mask.ndim)], scale)


def _of_softmax(
    softmax: Softmax, scores: Scores, context: Product, batch_size: int, num_tokens: int | None
) -> Attended | str:
    """Return the attention of a softmax between two products.

    Heads, which share an axis with sequences in batched products, are separated from them.
    """
    folded, rows, _ = context.left.shape
    if scores.product.result.shape != context.left.shape or folded % batch_size:
        return (
            f"{tuple(scores.product.result.shape)} scores and {tuple(context.left.shape)} "
            f"attention weights"
        )
    if num_tokens is not None and rows % num_tokens:
        return f"{rows} queries of {num_tokens} tokens"
    order = _order_of_weights(softmax, context.left)
    if order is None:
        return (
            "attention weights that are not over keys, or change before they are multiplied by "
            "values"
        )
    if num_tokens is None:
        num_tokens = rows
    sizes = list(softmax.weights.shape)
    del sizes[softmax.axis]
    q = _heads(scores.product.left, batch_size, num_tokens, sizes)
    # The weights were multiplied by values with their axes in a different order.
    logits = softmax.scores.permute(order)
    sizes = list(logits.shape[:-1])
    logits = _heads(logits.reshape(context.left.shape), batch_size, num_tokens, sizes)
    weights = _heads(context.left, batch_size, num_tokens, sizes)
    output = _heads(context.result, batch_size, num_tokens, sizes)
    k = scores.product.right.mT.unflatten(0, (batch_size, -1))
    v = context.right.unflatten(0, (batch_size, -1))
    products = q @ k.repeat_interleave(rows // num_tokens, 1).mT
    addend = logits - scores.of_products(products)
    # In a row whose keys are all hidden, none is hidden relative to the others, but each has about
    # the lowest number: the products add little to it.
    is_above_lowest = logits > 0.5 * torch.finfo(logits.dtype).min
    is_visible = is_above_lowest & (addend > addend.amax(-1, True) + LEAST_HIDDEN)
    k, v = _grouped(k, v)
    return Attended(q, k, v, output, is_visible, scores.scale, scores.bound, logits, weights)


def _heads(x: Tensor, batch_size: int, num_tokens: int, sizes: list[int]) -> Tensor:
    """Return rows (sequences * heads, groups * tokens, features) as heads (B, heads, T, features).

    Args:
        x: the rows.
        batch_size: number of sequences.
        num_tokens: number of tokens.
        sizes: sizes of the axes before keys; they show whether tokens come before groups.
    """
    groups = x.shape[1] // num_tokens
    axis_by_size = {size: axis for axis, size in enumerate(sizes)}
    if groups == 1 or axis_by_size.get(num_tokens, len(sizes)) > axis_by_size.get(groups, -1):
        return x.reshape(batch_size, -1, num_tokens, x.shape[-1])
    x = x.reshape(batch_size, -1, num_tokens, groups, x.shape[-1])
    return x.transpose(2, 3).flatten(1, 2)


def _order_of_weights(softmax: Softmax, weights: Tensor) -> tuple[int, ...] | None:
    """Return the order of the softmax's axes in the weights that multiply values.

    The softmax's axis comes last, since it is the axis of keys. None if the weights are not its
    result.
    """
    other_axes = list(range(softmax.scores.ndim))
    other_axes.remove(softmax.axis)
    for order_of_others in permutations(other_axes):
        order = (*order_of_others, softmax.axis)
        result = softmax.weights.permute(order)
        if result.numel() != weights.numel():
            continue
        if torch.equal(result.to(weights.dtype).reshape(weights.shape), weights):
            return order
    return None


def _grouped(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distinct heads, as few as possible, if each is repeated for a group of queries."""
    num_heads = k.shape[1]
    for num_distinct in range(1, num_heads):
        if num_heads % num_distinct:
            continue
        if _is_repeated(k, num_distinct) and _is_repeated(v, num_distinct):
            step = num_heads // num_distinct
            return k[:, ::step], v[:, ::step]
    return k, v


def _is_repeated(heads: Tensor, count: int) -> bool:
    """Return whether there are `count` distinct heads, each followed by its copies."""
    groups = heads.unflatten(1, (count, -1))
    return bool((groups == groups[:, :, :1]).all())

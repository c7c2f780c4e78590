"""Record attention layers of a torch model by hooks on modules, on two functions of transformers,
and on operations.

The attention function is intercepted in `AttentionInterface.get_interface`, where layers look it
up. That covers all functions, including eager ones, which are in no table, and leaves the model's
configuration, which decides on masks, unchanged. New keys and values are recorded in
`Cache.update`, because the attention function may receive others. If a layer calls no attention
function, its operations are recorded: see `parity.port.tapping.operations`.
"""

from __future__ import annotations

import functools
import inspect
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mha_spec import InputError
from parity.measure.core.arrays import to_numpy
from parity.port.tapping.operations import Attended, LayerOperations
from parity.port.tapping.record import Tapped, TappedCall, TappedLayer, chosen, is_hidden, kinds_of

POSITIONS = ("position_ids", "positions")
OF_FUNCTION = ("q", "k", "v", "mask", "context", "attn_weights")
"""Inputs and outputs of the attention function."""

COUNTING = ("RoFormerSinusoidalPositionalEmbedding",)
"""Modules that count positions themselves, including padding, and return the angles that layers
rotate by.
"""
CACHES = ("past_key_values", "past_key_value", "layer_past", "cache")
KEY_INPUTS = ("key_value_states", "encoder_hidden_states", "key")
"""Names of parameters of attention layers that receive the input of keys; the first tensor
counts.
"""


@contextmanager
def tap_torch(
    model: nn.Module, patterns: tuple[str, ...] | None, *, sees_functions: bool = False
) -> Iterator[Tapped]:
    """Record the attention layers of a torch model: see `parity.tap`.

    Args:
        model: the model.
        patterns: names of modules or classes; None for those of attention.
        sees_functions: whether to also record operations inside attention functions, and whole
            function calls. Layers may then compute their results in another way.
    """
    modules = dict(model.named_modules())
    if any(
        type(each).__name__ == "OptimizedModule" or each._compiled_call_impl
        for each in modules.values()
    ):
        raise InputError("model", "not be compiled, because hooks do not run in compiled models")
    names = chosen(modules, patterns)
    config: Any = getattr(model, "config", None)
    told = (
        json.loads(json.dumps(config.to_dict(), default=str)) if hasattr(config, "to_dict") else {}
    )
    kinds = kinds_of(told)
    tapped = Tapped([], told, type(model).__name__)
    with ExitStack() as stack:
        model_state = _ModelState()
        for module in modules.values():
            model_state.listen(module, stack)
        listeners: dict[nn.Module, _TorchListener] = {}
        for place, name in enumerate(names):
            module = modules[name]
            index = getattr(module, "layer_idx", None)
            index = index if isinstance(index, int) else place
            kind = kinds[index] if 0 <= index < len(kinds) else ""
            is_causal = getattr(module, "is_causal", None)
            is_causal = is_causal if isinstance(is_causal, bool) else None
            layer = TappedLayer(name, index, type(module).__name__, kind, is_causal)
            tapped.layers.append(layer)
            operations = LayerOperations(sees_functions=sees_functions)
            listeners[module] = _TorchListener(
                module, layer, model_state, getattr(module, "config", config), operations
            )
            listeners[module].listen(stack)
        stack.enter_context(_listening(listeners))
        yield tapped


# ---- Functions of transformers -------------------------------------------------------------------

_LISTENING: list[Mapping[nn.Module, _TorchListener]] = []
"""Listeners of each open tap, by module."""

_ORIGINALS: dict[str, Callable[..., Any]] = {}
"""The original functions, by name, while a tap is open."""


@contextmanager
def _listening(listeners: Mapping[nn.Module, _TorchListener]) -> Iterator[None]:
    """Let listeners record the calls of these functions."""
    if "transformers.modeling_utils" not in sys.modules:  # which every transformers model imports
        yield
        return
    interface: Any = sys.modules["transformers.modeling_utils"].AttentionInterface
    cache: Any = sys.modules["transformers.cache_utils"].Cache
    if not _LISTENING:
        _ORIGINALS.update(get_interface=interface.get_interface, update=cache.update)
        interface.get_interface, cache.update = _get_interface, _update
    _LISTENING.append(listeners)
    try:
        yield
    finally:
        _LISTENING[:] = [each for each in _LISTENING if each is not listeners]
        if not _LISTENING:
            interface.get_interface, cache.update = (
                _ORIGINALS["get_interface"],
                _ORIGINALS["update"],
            )


def _get_interface(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace `AttentionInterface.get_interface` while a tap is open."""
    function = _ORIGINALS["get_interface"](self, *args, **kwargs)

    @functools.wraps(function)
    def heard(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **keywords: Any
    ) -> Any:
        listening = [each[module] for each in _LISTENING if module in each]
        mask = rest[0] if rest else keywords.get("attention_mask")
        scale, window, cap = (
            keywords.get(name) for name in ("scaling", "sliding_window", "softcap")
        )
        for listener in listening:
            listener.layer.scale = float(scale) if isinstance(scale, int | float) else None
            listener.layer.window = window if type(window) is int else None
            listener.layer.soft_cap = float(cap) if isinstance(cap, int | float) else None
            listener.function_called(query, key, value, mask)
            if not listener.operations.sees_functions or listener.layer.attention not in (
                "eager",
                "sdpa",
            ):
                listener.operations.close()  # other functions may be compiled
        result = function(module, query, key, value, *rest, **keywords)
        for listener in listening:
            listener.function_returned(result)
        return result

    return heard


def _update(self: Any, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Replace `Cache.update` while a tap is open."""
    for listeners in _LISTENING:
        for listener in listeners.values():
            if listener.cache is self:
                listener.cached(key_states, value_states)
    return _ORIGINALS["update"](self, key_states, value_states, *args, **kwargs)


# ---- Modules -------------------------------------------------------------------------------------


class _ModelState:
    """State of a model that its layers don't receive: the positions of tokens, and which are
    padding.
    """

    def __init__(self) -> None:
        self.positions: Tensor | None = None
        self.padding: Tensor | None = None
        self.key_padding: Tensor | None = (
            None  # padding of the sequence that cross-attention attends to
        )
        self.has_other_mask = False
        self.has_other_key_mask = False

    def listen(self, module: nn.Module, stack: ExitStack) -> None:
        """Listen to a module, if it receives positions or padding."""
        if any(kind.__name__ == "PreTrainedModel" for kind in type(module).__mro__):
            _pre_hook(module, self._model_called, stack)
        elif "Rotary" in type(module).__name__:
            _pre_hook(module, self._rotary_called, stack)
        elif type(module).__name__ in COUNTING:
            _pre_hook(module, self._counted, stack)

    def _model_called(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        told = arguments_of(module, args, kwargs)
        self.positions = None
        self.padding, self.has_other_mask = _padding(told.get("attention_mask"))
        self.key_padding, self.has_other_key_mask = _padding(told.get("encoder_attention_mask"))

    def _rotary_called(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        positions = _first(arguments_of(module, args, kwargs), POSITIONS)
        if positions is not None:
            self.positions = positions

    def _counted(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        told = arguments_of(module, args, kwargs)
        begin = told.get("past_key_values_length") or 0
        self.positions = torch.arange(begin, begin + told["input_ids_shape"][1])[None]


def _padding(mask: Any) -> tuple[Tensor | None, bool]:
    """Return a padding mask or None, and whether there is another mask instead, as with a static
    cache.
    """
    is_padding = isinstance(mask, Tensor) and mask.ndim == 2
    return mask if is_padding else None, mask is not None and not is_padding


class _TorchListener:
    """Record inputs and outputs of one layer.

    The values of a call are collected while it runs, and recorded when the layer returns.
    """

    def __init__(
        self,
        module: nn.Module,
        layer: TappedLayer,
        model: _ModelState,
        config: Any,
        operations: LayerOperations,
    ) -> None:
        self.module, self.layer, self.model, self.config, self.operations = (
            module,
            layer,
            model,
            config,
            operations,
        )
        self.values: dict[str, np.ndarray] = {}
        self.projections: dict[str, np.ndarray] = {}
        self.past: int | None = None
        self.first_key = 0
        self.cache: Any = None  # while the call lasts
        self.adds_residual = False
        self.key_len = 0  # length of the other sequence; 0 for self-attention
        self.seen: dict[str, np.ndarray] = {}  # keys and values so far, or of the other sequence
        self.segments: list[
            dict[str, np.ndarray]
        ] = []  # values of the attention function in earlier calls

    def listen(self, stack: ExitStack) -> None:
        """Register hooks on the module and its projections; the stack removes them."""
        # torch calls no hook if the module raises a BaseException, such as SystemExit or an
        # interrupt.
        stack.callback(self.operations.close)
        if isinstance(self.module, nn.MultiheadAttention):
            _around_forward(
                self.module, self._called, self._left, self._returned, stack
            )  # hooks change its path
            return
        _pre_hook(self.module, self._called, stack)
        handle = self.module.register_forward_hook(self._left, always_call=True)
        stack.callback(handle.remove)
        handle = self.module.register_forward_hook(self._returned, with_kwargs=True)
        stack.callback(handle.remove)
        for name, child in self.module.named_children():
            weight = getattr(child, "weight", None)
            if isinstance(weight, Tensor) and weight.ndim == 2:
                handle = child.register_forward_hook(functools.partial(self._projected, name))
                stack.callback(handle.remove)

    def _called(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            raise RuntimeError(
                "model must not be compiled while it is tapped: pass disable_compile=True to "
                "generate"
            )
        told = arguments_of(module, args, kwargs)
        name, given = next(
            ((name, each) for name, each in told.items() if isinstance(each, Tensor)), ("", None)
        )
        self.values, self.projections, self.segments, self.first_key = {}, {}, [], 0
        self.layer.training = self.layer.training or module.training
        self.layer.attention = str(getattr(self.config, "_attn_implementation", None) or "")
        if given is None:
            return
        self.values["input"] = x = self._batched(given)
        other = _first({each: told[each] for each in told if each != name}, KEY_INPUTS)
        length = x.shape[-2] if x.ndim > 1 else 0
        self.adds_residual = told.get("residual") is not None
        self.cache = next((told[each] for each in CACHES if told.get(each) is not None), None)
        self.past, self.key_len = _cached(self.cache, self.layer.index), 0
        if self.cache is not None and getattr(
            module, "is_kv_shared_layer", False
        ):  # others have appended this call's
            self.past = (_cached(self.cache, 0) or length) - length
        if other is not None and other is not given:
            self._attends_to(other, length)
        values = told.get("value")
        if (
            isinstance(values, Tensor)
            and name != "value"
            and values is not (given if other is None else other)
        ):
            self.values["value_input"] = self._batched(values)
        own = _first(told, POSITIONS)
        places = [
            x
            for x in (own, self.model.positions)
            if x is not None and x.ndim > 1 and x.shape[-1] == length
        ]
        if places:  # a layer may receive text positions only, without RoPE's axes
            self.values["positions"] = to_numpy(max(places, key=lambda x: x.ndim))
        padding = self.model.padding
        if padding is not None and padding.shape == (x.shape[0], (self.past or 0) + length):
            is_real = to_numpy(padding[:, padding.shape[1] - length :]).astype(bool)
            if not is_real.all():
                self.values["is_real"] = is_real
        self.operations.watch()

    def _left(self, *_: Any) -> None:
        """Clean up when the module is left, also by an exception."""
        self.operations.close()

    def _attends_to(self, other: Tensor, length: int) -> None:
        """Record another sequence that the keys of this call come from; with a cache, the first
        call records it.
        """
        if self.cache is not None:  # self-attention has already cached this call's tokens
            is_known = hasattr(self.cache, "cross_attention_cache") and self.past is not None
            self.past = (self.past or 0) - length if is_known else None
        x, padding = self._batched(other), self.model.key_padding
        self.key_len = x.shape[-2]
        if not self.past or not _is_same(self.seen.get("key_input", x[:0]), x):
            self.values["key_input"] = self.seen["key_input"] = x
        if padding is not None and padding.shape == x.shape[:2] and not bool(padding.all()):
            self.values["key_is_real"] = to_numpy(padding).astype(bool)

    def _batched(self, x: Tensor) -> np.ndarray:
        if x.ndim == 2:  # tokens of one sequence
            return to_numpy(x)[None]
        if x.ndim == 4:  # rows and columns of tokens
            x = x.flatten(1, 2)
        is_batched = x.ndim != 3 or getattr(self.module, "batch_first", True)
        return to_numpy(x if is_batched else x.transpose(0, 1))

    def function_called(self, query: Tensor, key: Tensor, value: Tensor, mask: Any) -> None:
        """Record the heads that the attention function receives."""
        if "q" in self.values:
            self.segments.append(
                {name: self.values.pop(name) for name in OF_FUNCTION if name in self.values}
            )
        self.values["q"] = to_numpy(query)
        if self.key_len:
            self._cross_function_called(query, key, value, mask)
            return
        if isinstance(mask, Tensor):
            self.values["mask"] = to_numpy(~mask if mask.dtype == torch.bool else mask)
            if self.model.has_other_mask:
                sees = (~is_hidden(self.values["mask"])).any(axis=(1, 3))
                shape = (query.shape[0], query.shape[2])
                self.values |= (
                    {} if sees.all() else {"is_real": np.broadcast_to(sees, shape).copy()}
                )
        length, past = query.shape[-2], self.past or 0
        if (
            self.cache is None and key.ndim == 4 and key.shape[2] > length
        ):  # some keys belong to other tokens
            self.key_len = key.shape[2]
            self._cross_function_called(query, key, value, mask)
            return
        if key.ndim != 4 or key.shape[2] < length:
            self.values |= {"k": to_numpy(key), "v": to_numpy(value)}
            return
        all_keys = past + length
        self.first_key = first = max(0, all_keys - key.shape[2])
        for name, part, x in (("k", "keys", key), ("v", "values", value)):
            tokens = to_numpy(x[:, :, : all_keys - first])  # a static cache has unused slots
            new = self.values.get(name)
            if new is None or (*new.shape[:2], new.shape[3]) != (
                *x.shape[:2],
                x.shape[3],
            ):  # or latents are cached
                new = self.values[name] = tokens[
                    :, :, past - first :
                ].copy()  # a view would keep all of them alive
            seen = (
                np.concatenate([self.seen[name][:, :, :past], new], axis=2)
                if past and name in self.seen
                else new
            )
            if not _is_same(seen[:, :, -tokens.shape[2] :], tokens):
                self.values[f"cache.{part}"] = tokens
            self.seen[name] = seen

    def _cross_function_called(self, query: Tensor, key: Tensor, value: Tensor, mask: Any) -> None:
        if mask is None:
            self.values["mask"] = np.zeros((query.shape[0], 1, query.shape[2], self.key_len), bool)
        elif isinstance(mask, Tensor) and mask.ndim == 4:
            x = to_numpy(~mask if mask.dtype == torch.bool else mask)[..., : self.key_len]
            sees = (~is_hidden(x)).any(axis=(1, 2))
            self.values |= {
                "mask": np.broadcast_to(x, (*x.shape[:2], query.shape[2], self.key_len)).copy()
            }
            if self.model.has_other_key_mask and not sees.all():
                self.values["key_is_real"] = np.broadcast_to(
                    sees, (query.shape[0], self.key_len)
                ).copy()
        for name, part, x in (("k", "keys", key), ("v", "values", value)):
            tokens = to_numpy(x[:, :, : self.key_len])
            if not self.past:
                self.values[name] = self.seen[name] = tokens
            elif not _is_same(self.seen.get(name, tokens[:0]), tokens):
                self.values[f"cache.{part}"] = tokens

    def cached(self, key: Tensor, value: Tensor) -> None:
        """Record new keys and values that enter the cache."""
        if (
            "input" in self.values
            and not self.key_len
            and key.ndim == 4
            and key.shape[2] == self.values["input"].shape[1]
        ):
            self.values |= {"k": to_numpy(key), "v": to_numpy(value)}

    def function_returned(self, result: Any) -> None:
        """Record the context (B, T, N, H) that the attention function returns, and its weights if
        present.
        """
        context, *more = result if isinstance(result, tuple) else (result,)
        if isinstance(context, Tensor) and context.ndim == 4:
            self.values["context"] = to_numpy(context.transpose(1, 2))
        if more and isinstance(more[0], Tensor) and more[0].ndim == 4:
            self.values["attn_weights"] = to_numpy(more[0])

    def _operations_ran(self) -> None:
        """Record operations if the module called no attention function, or if its inner scores are
        requested.
        """
        x = self.values.get("input")
        if x is None or ("q" in self.values and not self.operations.sees_functions):
            return
        attended = self.operations.attention(x.shape[0], x.shape[1] if x.ndim == 3 else None)
        if not isinstance(attended, Attended):
            self.layer.not_seen = "" if "q" in self.values else attended
            return
        if "q" not in self.values:
            dtype = getattr(torch, x.dtype.name)
            q, k, v = (_narrowed(each, dtype) for each in (attended.q, attended.k, attended.v))
            self.function_called(q, k, v, attended.mask)
            self.function_returned((attended.context.transpose(1, 2), attended.weights))
        elif not self.past:
            self.values["mask"] = to_numpy(
                ~attended.mask if attended.mask.dtype == torch.bool else attended.mask
            )
        self.layer.scale, self.layer.soft_cap = attended.scale, attended.soft_cap
        if attended.scores is not None:
            self.values["scores"] = to_numpy(attended.scores)

    def _projected(self, name: str, module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        if isinstance(result, Tensor):
            self.projections.pop(f"projections.{name}", None)
            self.projections[f"projections.{name}"] = to_numpy(result)

    def _returned(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        self._operations_ran()
        first, *more = result if isinstance(result, tuple | list) else (result,)
        if (
            self.adds_residual and self.projections
        ):  # as in BLOOM: take the output before the residual
            self.values["output"] = list(self.projections.values())[-1]
        elif isinstance(first, Tensor):
            self.values["output"] = self._batched(first)
        is_ours = type(module).__module__.startswith("mha_torch.")
        if is_ours and more and isinstance(more[0], Tensor):
            self.values["attn_weights"] = to_numpy(more[0])
        if self.segments:
            self.values |= _joined([*self.segments, self.values])
        values = self.values if "q" in self.values else {**self.values, **self.projections}
        self.layer.calls.append(TappedCall(values, self.past, self.first_key))
        self.values, self.projections, self.segments, self.cache = {}, {}, [], None


def _joined(segments: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Return joined values of the attention function over segments; empty if they don't cover the
    sequence.
    """
    num_tokens, lengths = segments[-1]["input"].shape[1], [each["q"].shape[2] for each in segments]
    is_whole = sum(lengths) == num_tokens and all(
        len(each["q"]) == 1 and "mask" not in each for each in segments
    )
    if not is_whole or any(each["k"].shape[2] != each["q"].shape[2] for each in segments):
        return {}
    found = {"segment_ids": np.repeat(np.arange(len(segments)), lengths)[None]}
    for name in ("q", "k", "v", "context"):
        if all(name in each for each in segments):
            found[name] = np.concatenate([each[name] for each in segments], axis=2)
    if all("attn_weights" in each for each in segments):
        weights = [each["attn_weights"] for each in segments]
        whole = found["attn_weights"] = np.zeros(
            (*weights[0].shape[:2], num_tokens, num_tokens), weights[0].dtype
        )
        for stop, each in zip(np.cumsum(lengths), weights, strict=True):
            start = stop - each.shape[2]
            whole[:, :, start:stop, start:stop] = each
    return found


def _narrowed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return heads in the dtype of their layer if it represents them: scores may use a wider
    dtype.
    """
    narrow = x.to(dtype)
    return narrow if torch.equal(narrow.to(x.dtype), x) else x


def _is_same(one: np.ndarray, other: np.ndarray) -> bool:
    return one.shape == other.shape and one.tobytes() == other.tobytes()


def _pre_hook(module: nn.Module, hook: Callable[..., None], stack: ExitStack) -> None:
    stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)


def _around_forward(
    module: nn.Module,
    called: Callable[..., None],
    left: Callable[[], None],
    returned: Callable[..., None],
    stack: ExitStack,
) -> None:
    """Wrap the forward method as hooks would, without registering hooks on the module."""
    forward, own = module.forward, module.__dict__.get("forward")

    @functools.wraps(forward)
    def heard(*args: Any, **kwargs: Any) -> Any:
        called(module, args, kwargs)
        try:
            result = forward(*args, **kwargs)
        finally:
            left()
        returned(module, args, kwargs, result)
        return result

    def put_back() -> None:
        module.__dict__.pop("forward", None)
        if own is not None:
            module.__dict__["forward"] = own

    module.__dict__["forward"] = heard
    stack.callback(put_back)


def arguments_of(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a module's call, by name."""
    signature = inspect.signature(module.forward)
    try:
        bound = signature.bind_partial(*args, **kwargs)
    except TypeError:  # the module itself will raise it
        return dict(kwargs)
    found: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            found |= value
        elif kind is inspect.Parameter.VAR_POSITIONAL:
            found |= {f"{name}{place}": each for place, each in enumerate(value)}
        else:
            found[name] = value
    return found


def _first(told: Mapping[str, Any], names: tuple[str, ...]) -> Tensor | None:
    """Return the first tensor among these names."""
    return next((told[name] for name in names if isinstance(told.get(name), Tensor)), None)


def _cached(cache: Any, index: int) -> int | None:
    """Return the number of tokens that a cache holds for a layer; 0 without a cache, None if
    unknown or ragged.
    """
    if cache is None:
        return 0
    if hasattr(cache, "get_seq_length"):
        try:
            return int(cache.get_seq_length(index))
        except ValueError:  # a layer without cached keys
            return None
    lengths = getattr(cache, "lengths", None)
    if isinstance(lengths, Tensor) and lengths.numel() and bool((lengths == lengths[0]).all()):
        return int(lengths[0])
    return None

"""Record attention layers of a torch model by hooks.

They are on modules, on two functions of transformers, and on operations.

The attention function is intercepted in `AttentionInterface.get_interface`, where layers look it
up. That covers all functions, including eager ones, which are in no table, and leaves the model's
configuration, which decides on masks, unchanged. New keys and values are recorded in
`Cache.update`, because the attention function may receive others. `reorder_cache`, which beam
search calls, says which sequences the next call continues. If a layer calls no attention function,
its operations are recorded: see `parity.port.tapping.operations`.
"""

from __future__ import annotations

import functools
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
from parity.port.tapping.arguments import arguments_of
from parity.port.tapping.operations import Attended, LayerOperations
from parity.port.tapping.record import Tapped, TappedCall, TappedLayer, chosen, is_hidden, kinds_of

POSITIONS = ("position_ids", "positions")
OF_FUNCTION = ("q", "k", "v", "mask", "context", "attn_weights")
"""Inputs and outputs of the attention function."""

COUNTING = ("RoFormerSinusoidalPositionalEmbedding",)
"""Modules that count positions themselves, padding included, and return the angles of RoPE."""

CACHES = ("past_key_values", "past_key_value", "layer_past", "cache")
KEY_INPUTS = ("key_value_states", "encoder_hidden_states", "key")
"""Names of parameters of attention layers that receive the input of keys; the first tensor
counts.
"""

TRACEABLE = ("eager", "sdpa")
"""Attention functions of transformers whose operations may be recorded: others may be compiled."""


@contextmanager
def tap_torch(
    model: nn.Module, patterns: tuple[str, ...] | None, *, sees_functions: bool = False
) -> Iterator[Tapped]:
    """Record the attention layers of a torch model: see `parity.tap`.

    Args:
        model: the model.
        patterns: names of modules or classes; None for attention modules.
        sees_functions: whether to also record operations inside attention functions, and whole
            function calls. Layers may then compute their results differently.
    """
    modules = dict(model.named_modules())
    if any(_is_compiled(module) for module in modules.values()):
        raise InputError("model", "not be compiled, because hooks do not run in compiled models")
    names = chosen(modules, patterns)
    config: Any = getattr(model, "config", None)
    config_values = {}
    if hasattr(config, "to_dict"):
        # As in the file of a recording: dtypes and other objects become text.
        config_values = json.loads(json.dumps(config.to_dict(), default=str))
    kinds = kinds_of(config_values)
    tapped = Tapped([], config_values, type(model).__name__)
    with ExitStack() as stack:
        model_state = _ModelState()
        for module in modules.values():
            model_state.listen(module, stack)
        listeners: dict[nn.Module, _TorchListener] = {}
        for number, name in enumerate(names):
            module = modules[name]
            layer = _new_layer(name, module, number, kinds)
            tapped.layers.append(layer)
            operations = LayerOperations(sees_functions=sees_functions)
            module_config = getattr(module, "config", config)
            listener = _TorchListener(module, layer, model_state, module_config, operations)
            listener.listen(stack)
            listeners[module] = listener
        stack.enter_context(_listening(listeners))
        yield tapped


def _is_compiled(module: nn.Module) -> bool:
    return type(module).__name__ == "OptimizedModule" or bool(module._compiled_call_impl)


def _new_layer(name: str, module: nn.Module, number: int, kinds: list[str]) -> TappedLayer:
    """Return an empty recording of a module.

    Args:
        name: name of the module.
        module: the module.
        number: its index among the tapped modules.
        kinds: type of each layer of the model; empty if unknown.
    """
    index = getattr(module, "layer_idx", None)
    if not isinstance(index, int):
        index = number
    kind = kinds[index] if 0 <= index < len(kinds) else ""
    is_causal = getattr(module, "is_causal", None)
    if not isinstance(is_causal, bool):
        is_causal = None
    return TappedLayer(name, index, type(module).__name__, kind, is_causal)


# ---- Functions of transformers -------------------------------------------------------------------

_LISTENING: list[Mapping[nn.Module, _TorchListener]] = []
"""Listeners of each open tap, by module."""

_ORIGINALS: dict[str, Callable[..., Any]] = {}
"""The original functions, by the name of what replaces them while a tap is open."""


@contextmanager
def _listening(listeners: Mapping[nn.Module, _TorchListener]) -> Iterator[None]:
    """Let listeners record the calls of these functions."""
    if "transformers.modeling_utils" not in sys.modules:  # which every transformers model imports
        yield
        return
    interface: Any = sys.modules["transformers.modeling_utils"].AttentionInterface
    caches: Any = sys.modules["transformers.cache_utils"]
    replaced = (
        (interface, "get_interface", _get_interface),
        (caches.Cache, "update", _update),
        (caches.Cache, "reorder_cache", _reorder_cache),
    )
    if not _LISTENING:
        for owner, name, replacement in replaced:
            _ORIGINALS[replacement.__name__] = getattr(owner, name)
            setattr(owner, name, replacement)
    _LISTENING.append(listeners)
    try:
        yield
    finally:
        # Taps may close in any order; the last one to close restores the functions.
        _LISTENING.remove(listeners)
        if not _LISTENING:
            for owner, name, replacement in replaced:
                setattr(owner, name, _ORIGINALS[replacement.__name__])


def _get_interface(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace `AttentionInterface.get_interface` while a tap is open."""
    function = _ORIGINALS["_get_interface"](self, *args, **kwargs)

    @functools.wraps(function)
    def recording_attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **keywords: Any
    ) -> Any:
        listeners_here = [listeners[module] for listeners in _LISTENING if module in listeners]
        mask = rest[0] if rest else keywords.get("attention_mask")
        for listener in listeners_here:
            listener.function_configured(
                keywords.get("scaling"), keywords.get("sliding_window"), keywords.get("softcap")
            )
            listener.function_called(query, key, value, mask)
            listener.watch_heads(query, key, value)
        result = function(module, query, key, value, *rest, **keywords)
        for listener in listeners_here:
            listener.function_returned(result)
            listener.watch_context(result)
        return result

    return recording_attention


def _update(self: Any, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Replace `Cache.update` while a tap is open."""
    for listeners in _LISTENING:
        for listener in listeners.values():
            if listener.cache is self:
                listener.cache_updated(key_states, value_states)
    return _ORIGINALS["_update"](self, key_states, value_states, *args, **kwargs)


def _reorder_cache(self: Any, beam_idx: Tensor) -> Any:
    """Replace `Cache.reorder_cache` while a tap is open."""
    for listeners in _LISTENING:
        for listener in listeners.values():
            if listener.reordered_cache is self:
                listener.cache_reordered(beam_idx)
    return _ORIGINALS["_reorder_cache"](self, beam_idx)


# ---- Modules -------------------------------------------------------------------------------------


class _ModelState:
    """State of a model that its layers do not receive.

    Attributes:
        positions: positions of the tokens; None if unknown.
        padding: mask of the tokens, False for padding; None if the model received none.
        key_padding: the same of the sequence that cross-attention attends to.
        has_other_mask, has_other_key_mask: whether it received a different kind of mask.
    """

    def __init__(self) -> None:
        self.positions: Tensor | None = None
        self.padding: Tensor | None = None
        self.key_padding: Tensor | None = None
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
        arguments = arguments_of(module.forward, args, kwargs)
        self.positions = None
        self.padding, self.has_other_mask = _padding(arguments.get("attention_mask"))
        self.key_padding, self.has_other_key_mask = _padding(
            arguments.get("encoder_attention_mask")
        )

    def _rotary_called(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        positions = _first_tensor(arguments_of(module.forward, args, kwargs), POSITIONS)
        if positions is not None:
            self.positions = positions

    def _counted(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        arguments = arguments_of(module.forward, args, kwargs)
        begin = arguments.get("past_key_values_length") or 0
        num_tokens = arguments["input_ids_shape"][1]
        self.positions = torch.arange(begin, begin + num_tokens)[None]


def _padding(mask: Any) -> tuple[Tensor | None, bool]:
    """Return a padding mask or None, and whether there is a different mask, as with a static
    cache.
    """
    if mask is None:
        return None, False
    if isinstance(mask, Tensor) and mask.ndim == 2:
        return mask, False
    return None, True


class _TorchListener:
    """Record inputs and outputs of one layer.

    The values of a call are collected while it runs, and recorded when the layer returns.

    Attributes:
        values: values of the running call.
        projections: outputs of the projections in the running call, the latest one last.
        past: number of tokens cached before the call; None if unknown.
        first_key: index of the first key that the call attends to.
        cache: cache of the running call.
        adds_residual: whether the call receives a residual, which the layer adds to its output.
        num_keys: length of the other sequence; 0 for self-attention.
        history: keys and values of all calls so far, or of the other sequence and its input.
        segments: values of the attention function in its earlier calls of this layer's call.
        has_gradients: whether the input of the running call has a gradient: then the gradients of
            values that are computed from it are recorded.
        watched: hooks on the values of the running call whose gradients are recorded, by name;
            None for a value that has no gradient, though the layer's input has one.
        last_projection: output of the latest projection in the running call.
        hooks_of_gradients: hooks on tensors of all calls.
    """

    def __init__(
        self,
        module: nn.Module,
        layer: TappedLayer,
        model: _ModelState,
        config: Any,
        operations: LayerOperations,
    ) -> None:
        self.module = module
        self.layer = layer
        self.model = model
        self.config = config
        self.operations = operations
        self.values: dict[str, np.ndarray] = {}
        self.projections: dict[str, np.ndarray] = {}
        self.past: int | None = None
        self.first_key = 0
        self.cache: Any = None
        self.reordered_cache: Any = None
        self.continued_rows: np.ndarray | None = None
        self.adds_residual = False
        self.num_keys = 0
        self.history: dict[str, np.ndarray] = {}
        self.segments: list[dict[str, np.ndarray]] = []
        self.has_gradients = False
        self.watched: dict[str, Any] = {}
        self.last_projection: Tensor | None = None
        self.hooks_of_gradients: list[Any] = []

    def listen(self, stack: ExitStack) -> None:
        """Register hooks on the module and its projections; the stack removes them."""
        # torch calls no hook if the module raises a BaseException, such as SystemExit or an
        # interrupt.
        stack.callback(self.operations.stop)
        stack.callback(self._forget_gradients)
        if isinstance(self.module, nn.MultiheadAttention):
            # It leaves its fast path if it has hooks.
            _around_forward(self.module, self._called, self._left, self._returned, stack)
            return
        _pre_hook(self.module, self._called, stack)
        # Also if the module raises an Exception: its recording ends.
        handle = self.module.register_forward_hook(self._left, always_call=True)
        stack.callback(handle.remove)
        handle = self.module.register_forward_hook(self._returned, with_kwargs=True)
        stack.callback(handle.remove)
        for name, child in self.module.named_children():
            weight = getattr(child, "weight", None)
            # A weight with two axes belongs to a projection; norms have one.
            if isinstance(weight, Tensor) and weight.ndim == 2:
                handle = child.register_forward_hook(functools.partial(self._projected, name))
                stack.callback(handle.remove)

    def cache_reordered(self, beam_idx: Tensor) -> None:
        """Continue other sequences in the next call: sequence b that of row beam_idx[b], (B,)."""
        rows = to_numpy(beam_idx)
        for name, x in self.history.items():
            self.history[name] = x[rows]
        if self.continued_rows is None:
            self.continued_rows = rows
        else:
            self.continued_rows = self.continued_rows[rows]

    # The call of the layer begins.

    def _called(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Record what the layer receives, and return it."""
        if torch.compiler.is_compiling():
            raise RuntimeError(
                "model must not be compiled while it is tapped: pass disable_compile=True to "
                "generate"
            )
        arguments = arguments_of(module.forward, args, kwargs)
        self.values, self.projections, self.segments, self.first_key = {}, {}, [], 0
        self.watched, self.last_projection = {}, None
        self.layer.training = self.layer.training or module.training
        self.layer.attention = str(getattr(self.config, "_attn_implementation", None) or "")
        input_name = _name_of_first_tensor(arguments)
        if input_name is None:
            return args, kwargs
        other_arguments = dict(arguments)
        layer_input = other_arguments.pop(input_name)
        x = self.values["input"] = self._batched(layer_input)
        self.has_gradients = layer_input.requires_grad
        num_tokens = x.shape[-2] if x.ndim > 1 else 0
        self.adds_residual = arguments.get("residual") is not None
        self._open_cache(arguments, num_tokens)
        key_input = _first_tensor(other_arguments, KEY_INPUTS)
        if key_input is None:
            key_input = layer_input
        if key_input is not layer_input:
            self._attends_to(key_input, num_tokens)
        value_input = other_arguments.get("value")
        if isinstance(value_input, Tensor) and value_input is not key_input:
            self.values["value_input"] = self._batched(value_input)
        self._record_positions(_first_tensor(arguments, POSITIONS), num_tokens)
        self._record_padding(x, num_tokens)
        self.operations.start()
        if self.num_keys or "value_input" in self.values:
            return args, kwargs
        return self._with_watched_input(layer_input, args, kwargs)

    def _with_watched_input(
        self, layer_input: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with a view of the layer's input, whose gradient is recorded: the
        model may also add the input to the output, outside of the layer.
        """
        if not layer_input.requires_grad:
            return args, kwargs
        view = layer_input.view_as(layer_input)
        self._watch("input", view, self._batched)
        own_args = tuple(view if x is layer_input else x for x in args)
        own_kwargs = {name: view if x is layer_input else x for name, x in kwargs.items()}
        return own_args, own_kwargs

    def _open_cache(self, arguments: Mapping[str, Any], num_tokens: int) -> None:
        """Find the cache among the arguments of a call, and the number of tokens in it."""
        self.cache = None
        for name in CACHES:
            if arguments.get(name) is not None:
                self.cache = arguments[name]
                break
        # An encoder and decoder have two caches, which are reordered together.
        self.reordered_cache = getattr(self.cache, "self_attention_cache", self.cache)
        self.past = _num_cached(self.cache, self.layer.index)
        if not self.past:
            self.continued_rows = None
        self.num_keys = 0
        if self.cache is not None and getattr(self.module, "is_kv_shared_layer", False):
            # It has no keys of its own; the first layer has already appended the keys of this call.
            self.past = (_num_cached(self.cache, 0) or num_tokens) - num_tokens

    def _attends_to(self, other: Tensor, num_tokens: int) -> None:
        """Record the other sequence that the keys of this call come from.

        With a cache, only the first call records it.
        """
        if self.cache is not None:
            # Self-attention, which comes first, has already cached this call's tokens.
            if self.past is not None and hasattr(self.cache, "cross_attention_cache"):
                self.past -= num_tokens
            else:
                self.past = None
        x = self._batched(other)
        self.num_keys = x.shape[-2]
        if not self.past or not _is_same(self.history.get("key_input", x[:0]), x):
            self.values["key_input"] = self.history["key_input"] = x
        padding = self.model.key_padding
        if padding is not None and padding.shape == x.shape[:2] and not bool(padding.all()):
            self.values["key_is_real"] = to_numpy(padding).astype(bool)

    def _record_positions(self, positions: Tensor | None, num_tokens: int) -> None:
        """Record the positions of the layer or of the model, whichever have more axes."""
        recorded = None
        for x in (positions, self.model.positions):
            # Without an axis of sequences, or of other tokens, such as the tokens of the whole
            # cache.
            if x is None or x.ndim < 2 or x.shape[-1] != num_tokens:
                continue
            # A layer may receive the positions in the text only, without the axes of RoPE.
            if recorded is None or x.ndim > recorded.ndim:
                recorded = x
        if recorded is not None:
            self.values["positions"] = to_numpy(recorded)

    def _record_padding(self, x: np.ndarray, num_tokens: int) -> None:
        """Record which of the call's tokens are padding, if the model's mask covers them."""
        padding = self.model.padding
        num_past = self.past or 0
        if padding is None or padding.shape != (*x.shape[:1], num_past + num_tokens):
            return
        is_real = to_numpy(padding[:, num_past:]).astype(bool)
        if not is_real.all():
            self.values["is_real"] = is_real

    def _batched(self, x: Tensor) -> np.ndarray:
        if x.ndim == 2:  # tokens of one sequence
            return to_numpy(x)[None]
        if x.ndim == 4:  # rows and columns of tokens
            x = x.flatten(1, 2)
        if x.ndim == 3 and not getattr(self.module, "batch_first", True):
            x = x.transpose(0, 1)
        return to_numpy(x)

    # The layer calls its attention function, and before it the cache.

    def cache_updated(self, key: Tensor, value: Tensor) -> None:
        """Record new keys and values that enter the cache."""
        if "input" not in self.values or self.num_keys:
            return
        if key.ndim == 4 and key.shape[2] == self.values["input"].shape[1]:
            self.values |= {"k": to_numpy(key), "v": to_numpy(value)}

    def function_configured(self, scale: Any, window: Any, soft_cap: Any) -> None:
        """Record arguments of the attention function that are no tensors, and may be missing."""
        self.layer.scale = _as_float(scale)
        self.layer.window = window if type(window) is int else None
        self.layer.soft_cap = _as_float(soft_cap)
        if not self.operations.sees_functions or self.layer.attention not in TRACEABLE:
            self.operations.stop()

    def function_called(self, query: Tensor, key: Tensor, value: Tensor, mask: Any) -> None:
        """Record the heads that the attention function receives."""
        if "q" in self.values:
            # It is called once for each segment of the sequence.
            segment = {name: x for name, x in self.values.items() if name in OF_FUNCTION}
            self.segments.append(segment)
            for name in segment:
                del self.values[name]
                self._stop_watching(name)
        self.values["q"] = to_numpy(query)
        if self.num_keys:
            self._cross_function_called(query, key, value, mask)
            return
        if isinstance(mask, Tensor):
            self._record_mask(query, mask)
        num_tokens = query.shape[-2]
        has_heads = key.ndim == 4
        if self.cache is None and has_heads and key.shape[2] > num_tokens:
            # Some keys belong to other tokens.
            self.num_keys = key.shape[2]
            self._cross_function_called(query, key, value, mask)
        elif not has_heads or key.shape[2] < num_tokens:
            self.values |= {"k": to_numpy(key), "v": to_numpy(value)}
        else:
            num_past = self.past or 0
            # A window's cache drops older keys.
            self.first_key = max(0, num_past + num_tokens - key.shape[2])
            self._record_self_keys("k", "cache.keys", key, num_past, num_tokens)
            self._record_self_keys("v", "cache.values", value, num_past, num_tokens)

    def _record_mask(self, query: Tensor, mask: Tensor) -> None:
        """Record a mask of self-attention, and padding, if only this mask shows it."""
        self.values["mask"] = _hiding(mask)
        if not self.model.has_other_mask:
            return
        # The mask is (B, N, T, S): padding attends to no key in any head.
        is_real = (~is_hidden(self.values["mask"])).any(axis=(1, 3))
        if not is_real.all():
            shape = (query.shape[0], query.shape[2])
            self.values["is_real"] = np.broadcast_to(is_real, shape).copy()

    def _record_self_keys(
        self, name: str, cache_name: str, x: Tensor, num_past: int, num_tokens: int
    ) -> None:
        """Record keys or values of self-attention, and of its cache if they differ.

        Args:
            name: name of the call's own keys or values.
            cache_name: name of all that the function received.
            x: keys or values that the attention function received.
            num_past: number of tokens before the call.
            num_tokens: number of tokens in the call.
        """
        # A static cache has unused slots at its end.
        num_used = num_past + num_tokens - self.first_key
        received = to_numpy(x[:, :, :num_used])
        own = self.values.get(name)
        # The cache may have been updated with latents, or with other heads.
        if own is None or not _has_same_heads(own, x):
            # A view would keep all keys alive.
            own = received[:, :, num_past - self.first_key :].copy()
            self.values[name] = own
        so_far = own
        if num_past and name in self.history:
            so_far = np.concatenate([self.history[name][:, :, :num_past], own], axis=2)
        if not _is_same(so_far[:, :, -received.shape[2] :], received):
            # A wrong call may have written its tokens beyond the used slots.
            self.values[cache_name] = to_numpy(x[:, :, : _num_written(x, num_used)])
        self.history[name] = so_far

    def _cross_function_called(self, query: Tensor, key: Tensor, value: Tensor, mask: Any) -> None:
        """Record heads of attention to another sequence."""
        batch_size, num_tokens = query.shape[0], query.shape[2]
        if mask is None:
            self.values["mask"] = np.zeros((batch_size, 1, num_tokens, self.num_keys), bool)
        elif isinstance(mask, Tensor) and mask.ndim == 4:
            x = _hiding(mask)[..., : self.num_keys]
            shape = (*x.shape[:2], num_tokens, self.num_keys)
            self.values["mask"] = np.broadcast_to(x, shape).copy()
            is_real = (~is_hidden(x)).any(axis=(1, 2))
            if self.model.has_other_key_mask and not is_real.all():
                shape = (batch_size, self.num_keys)
                self.values["key_is_real"] = np.broadcast_to(is_real, shape).copy()
        for name, cache_name, x in (("k", "cache.keys", key), ("v", "cache.values", value)):
            received = to_numpy(x[:, :, : self.num_keys])
            if not self.past:
                self.values[name] = self.history[name] = received
            elif not _is_same(self.history.get(name, received[:0]), received):
                self.values[cache_name] = received

    def function_returned(self, result: Any) -> None:
        """Record the context (B, T, N, H) of the attention function, and its weights if present."""
        context, *rest = result if isinstance(result, tuple) else (result,)
        if isinstance(context, Tensor) and context.ndim == 4:
            self.values["context"] = _heads_first(context)
        if rest and isinstance(rest[0], Tensor) and rest[0].ndim == 4:
            self.values["attn_weights"] = to_numpy(rest[0])

    # Gradients of a training step. Values that are recorded from operations have none: operations
    # are observed below autograd.

    def watch_heads(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Record the gradients of the heads that an attention function receives, if all keys belong
        to the tokens of the call.
        """
        if self.num_keys or self.segments or key.ndim != 4 or key.shape[2] != query.shape[2]:
            return
        self._watch("q", query, to_numpy)
        self._watch("k", key, to_numpy)
        self._watch("v", value, to_numpy)

    def watch_context(self, result: Any) -> None:
        """Record the gradient of the context (B, T, N, H) that an attention function returned."""
        context = result[0] if isinstance(result, tuple) else result
        if isinstance(context, Tensor) and context.ndim == 4 and not self.segments:
            self._watch("context", context, _heads_first)

    def _watch(self, name: str, x: Tensor, as_recorded: Callable[[Tensor], np.ndarray]) -> None:
        """Record the gradient of a value of this call when the backward pass computes it.

        Args:
            name: the name of the value.
            x: the value.
            as_recorded: how the value itself was recorded.
        """
        if not self.has_gradients:
            return
        self.watched[name] = None
        if not x.requires_grad:
            return
        values = self.values

        def record(gradient: Tensor) -> None:
            values[f"grad.{name}"] = as_recorded(gradient)

        self.watched[name] = x.register_hook(record)
        self.hooks_of_gradients.append(self.watched[name])

    def _stop_watching(self, name: str) -> None:
        """Record no gradient of a value, which is a part of it only."""
        hook = self.watched.pop(name, None)
        if hook is not None:
            hook.remove()

    def _record_cotangent(self, output: Tensor) -> None:
        """Record the gradient of the output, where the backward pass of the layer begins.

        A gradient that the backward pass does not reach is 0.
        """
        if not output.requires_grad or not self.has_gradients:
            return
        values, watched = self.values, [*self.watched]

        def record(gradient: Tensor) -> None:
            values["grad.output"] = self._batched(gradient)
            for name in watched:
                values.setdefault(f"grad.{name}", np.zeros_like(values[name]))

        self.hooks_of_gradients.append(output.register_hook(record))

    def _forget_gradients(self) -> None:
        """Remove the hooks on tensors."""
        for hook in self.hooks_of_gradients:
            hook.remove()
        self.hooks_of_gradients = []

    # The call of the layer ends.

    def _projected(self, name: str, module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        if isinstance(result, Tensor):
            # Removed first, so that the latest projection is last.
            self.projections.pop(f"projections.{name}", None)
            self.projections[f"projections.{name}"] = to_numpy(result)
            self.last_projection = result

    def _left(self, *_: Any) -> None:
        """Clean up when the module is left, also by an exception."""
        self.operations.stop()

    def _returned(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        """Record what the layer returns, and the call."""
        self._record_operations()
        output, *rest = result if isinstance(result, tuple | list) else (result,)
        if self.adds_residual and self.last_projection is not None:
            # As in BLOOM: the output before the residual is the output of the last projection.
            self.values["output"] = self._batched(self.last_projection)
            self._record_cotangent(self.last_projection)
        elif isinstance(output, Tensor):
            self.values["output"] = self._batched(output)
            self._record_cotangent(output)
        is_ours = type(module).__module__.startswith("mha_torch.")
        if is_ours and rest and isinstance(rest[0], Tensor):
            self.values["attn_weights"] = to_numpy(rest[0])
        if self.segments:
            self.values |= _joined([*self.segments, self.values])
        if "q" not in self.values:
            self.values |= self.projections
        self.layer.cache = _quantized_cache(self.cache, self.layer.index) or self.layer.cache
        rows = None
        if self.continued_rows is not None:
            rows = tuple(self.continued_rows.tolist())
            if rows == tuple(range(len(rows))):
                rows = None
        self.layer.calls.append(TappedCall(self.values, self.past, self.first_key, rows))
        self.values, self.projections, self.segments, self.cache = {}, {}, [], None
        self.continued_rows = None
        self.last_projection = None  # which keeps the graph of the call alive

    def _record_operations(self) -> None:
        """Record attention from operations.

        It is needed if the module called no attention function, or if the scores inside of one are
        requested.
        """
        x = self.values.get("input")
        if x is None:
            return
        called_function = "q" in self.values
        if called_function and not self.operations.sees_functions:
            return
        num_tokens = x.shape[1] if x.ndim == 3 else None
        attended = self.operations.attention(x.shape[0], num_tokens)
        if not isinstance(attended, Attended):
            self.layer.not_observed = "" if called_function else attended
            return
        if not called_function:
            dtype = getattr(torch, x.dtype.name)
            q = _narrowed(attended.q, dtype)
            k = _narrowed(attended.k, dtype)
            v = _narrowed(attended.v, dtype)
            self.function_called(q, k, v, attended.mask)
            self.function_returned((attended.context.transpose(1, 2), attended.weights))
        elif not self.past:
            # A function may add to its mask or build one, so what the operations hide is exact.
            # With a cache, whose unused slots they include, the mask that was passed stays.
            self.values["mask"] = _hiding(attended.mask)
        self.layer.scale, self.layer.soft_cap = attended.scale, attended.soft_cap
        if attended.scores is not None:
            self.values["scores"] = to_numpy(attended.scores)


def _heads_first(x: Tensor) -> np.ndarray:
    """Return (B, N, T, H) from (B, T, N, H)."""
    return to_numpy(x.transpose(1, 2))


def _joined(segments: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Return joined values of the attention function over segments.

    Empty if the segments do not cover the sequence, each attending to itself.
    """
    num_tokens = segments[-1]["input"].shape[1]
    lengths = [segment["q"].shape[2] for segment in segments]
    if sum(lengths) != num_tokens or not all(_is_whole(segment) for segment in segments):
        return {}
    joined = {"segment_ids": np.repeat(np.arange(len(segments)), lengths)[None]}
    for name in ("q", "k", "v", "context"):
        if all(name in segment for segment in segments):
            joined[name] = np.concatenate([segment[name] for segment in segments], axis=2)
    if all("attn_weights" in segment for segment in segments):
        joined["attn_weights"] = _block_diagonal([segment["attn_weights"] for segment in segments])
    return joined


def _is_whole(segment: Mapping[str, np.ndarray]) -> bool:
    """Return whether one sequence attends to all of its own tokens."""
    q, k = segment["q"], segment["k"]
    return len(q) == 1 and k.shape[2] == q.shape[2] and "mask" not in segment


def _block_diagonal(blocks: list[np.ndarray]) -> np.ndarray:
    """Return matrices (B, N, T, T) as blocks on the diagonal of one."""
    num_tokens = sum(block.shape[2] for block in blocks)
    whole = np.zeros((*blocks[0].shape[:2], num_tokens, num_tokens), blocks[0].dtype)
    start = 0
    for block in blocks:
        stop = start + block.shape[2]
        whole[:, :, start:stop, start:stop] = block
        start = stop
    return whole


def _has_same_heads(own: np.ndarray, x: Tensor) -> bool:
    """Return whether keys of some tokens, and of other tokens, have the same axes but tokens."""
    return (*own.shape[:2], own.shape[3]) == (*x.shape[:2], x.shape[3])


def _num_written(x: Tensor, num_used: int) -> int:
    """Return the number of slots of a static cache (B, K, S, H) up to the last one that is used or
    not empty.
    """
    is_written = (x != 0).any(dim=3).any(dim=1).any(dim=0)
    written = is_written.nonzero()
    if not len(written):
        return num_used
    return max(num_used, int(written[-1]) + 1)


def _hiding(mask: Tensor) -> np.ndarray:
    """Return a mask that is True where a key is hidden; torch's is True where it is not."""
    if mask.dtype == torch.bool:
        mask = ~mask
    return to_numpy(mask)


def _as_float(number: Any) -> float | None:
    """Return an argument as a number; None if it is something else, such as a tensor."""
    return float(number) if isinstance(number, int | float) else None


def _narrowed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return heads in their layer's dtype if it represents them: scores may use a wider one."""
    narrow = x.to(dtype)
    if torch.equal(narrow.to(x.dtype), x):
        return narrow
    return x


def _is_same(one: np.ndarray, other: np.ndarray) -> bool:
    return one.shape == other.shape and one.tobytes() == other.tobytes()


def _pre_hook(module: nn.Module, hook: Callable[..., Any], stack: ExitStack) -> None:
    stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)


def _around_forward(
    module: nn.Module,
    called: Callable[..., tuple[tuple[Any, ...], dict[str, Any]]],
    left: Callable[[], None],
    returned: Callable[..., None],
    stack: ExitStack,
) -> None:
    """Wrap the forward method as hooks would, without registering hooks on the module."""
    forward = module.forward
    own_forward = module.__dict__.get("forward")  # of another open tap, for instance

    @functools.wraps(forward)
    def recording_forward(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = called(module, args, kwargs)
        try:
            result = forward(*args, **kwargs)
        finally:
            left()
        returned(module, args, kwargs, result)
        return result

    def restore() -> None:
        module.__dict__.pop("forward", None)
        if own_forward is not None:
            module.__dict__["forward"] = own_forward

    module.__dict__["forward"] = recording_forward
    stack.callback(restore)


def _name_of_first_tensor(arguments: Mapping[str, Any]) -> str | None:
    """Return the name of the first argument that is a tensor."""
    for name, x in arguments.items():
        if isinstance(x, Tensor):
            return name
    return None


def _first_tensor(arguments: Mapping[str, Any], names: tuple[str, ...]) -> Tensor | None:
    """Return the first tensor among these names."""
    for name in names:
        x = arguments.get(name)
        if isinstance(x, Tensor):
            return x
    return None


def _quantized_cache(cache: Any, index: int) -> str:
    """Return the class of transformers of a layer's quantized cache; empty if it has none."""
    layers = getattr(getattr(cache, "self_attention_cache", cache), "layers", ())
    if index >= len(layers):
        return ""
    for kind in type(layers[index]).__mro__:
        if kind.__module__ == "transformers.cache_utils" and "Quantized" in kind.__name__:
            return kind.__name__
    return ""


def _num_cached(cache: Any, index: int) -> int | None:
    """Return the number of tokens that a cache holds for a layer.

    0 without a cache; None if it is unknown, or differs between sequences.
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

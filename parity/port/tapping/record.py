"""A recording of attention layers, call by call, and its file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import ml_dtypes
import numpy as np

from mha_spec import InputError, InputTypeError
from parity.measure.core.weights import FORMAT, load_tensors, save_tensors
from parity.measure.files.tensor_file import parse_json
from parity.measure.text import counted

VALUES = {
    "input": ("B", "T", "d_in"),
    "key_input": ("B", "S", "d_kv"),
    "value_input": ("B", "S", "d_kv"),
    "positions": ("B", "T"),
    "is_real": ("B", "T"),
    "segment_ids": ("B", "T"),
    "key_is_real": ("B", "S"),
    "mask": ("B", "N", "T", "S"),
    "call_mask": ("B", "N", "T", "S"),
    "q": ("B", "N", "T", "H"),
    "k": ("B", "K", "T", "H"),
    "v": ("B", "K", "T", "H"),
    "cache.keys": ("B", "K", "S", "H"),
    "cache.values": ("B", "K", "S", "H"),
    "scores": ("B", "N", "T", "S"),
    "attn_weights": ("B", "N", "T", "S"),
    "context": ("B", "N", "T", "H"),
    "output": ("B", "T", "E"),
    "grad.output": ("B", "T", "E"),
    "grad.context": ("B", "N", "T", "H"),
    "grad.q": ("B", "N", "T", "H"),
    "grad.k": ("B", "K", "T", "H"),
    "grad.v": ("B", "K", "T", "H"),
}
"""Values that a call may hold, with the axes of each, in the model's own dtypes.

`positions` may have one more leading axis, for rows and columns. `is_real` is False for padding; if
the model received a full mask instead of a padding mask, it is False for tokens that attend to
nothing. `mask` is the mask of the attention function: True where a key is hidden, or values added
to the scores. `call_mask` is the part of it that the caller passed and the specification does not
define; a tap does not record it. `k` and `v` belong to the call's own tokens. `scores` are the
input of the softmax, mask and biases included, if no attention function was called. `cache.keys`
and `cache.values` are all keys and values that the attention function received. They are present
only if they differ from the keys and values of the calls so far. If no attention function was
observed, outputs of projections are stored as `projections.<name>`.

`segment_ids` tells which tokens of one sequence attend to each other, if the attention function was
called once per segment. Its inputs and outputs are then joined.

`grad.output` and `grad.input` are gradients of a training step; `grad.q` and others belong to
layers of transformers and Flax. `grad.input` is what the layer adds to the gradient of its input.

A layer that attends to another sequence has `key_input`, `k` and `v` in the first of several calls
with a cache, and `key_is_real` is False for padding of that sequence. `value_input` is present only
if values come from a different input than keys.
"""


OF_CALL = ("past", "first_key", "continued_rows")
"""Fields of a call that a file describes as text; all others are tensors."""


@dataclass(frozen=True)
class TappedCall:
    """One call of a layer.

    Attributes:
        values: recorded values, by the names of `VALUES`.
        past: number of tokens cached before; None if unknown.
        first_key: index of the first key that the call attended to among all tokens: a window's
            cache drops older ones.
        continued_rows: the row of each sequence in the call before, if the model reordered the
            cache, as beam search does; None if every sequence stays in its row.
    """

    values: dict[str, np.ndarray] = field(repr=False)
    past: int | None = None
    first_key: int = 0
    continued_rows: tuple[int, ...] | None = None


@dataclass
class TappedLayer:
    """The calls of one attention layer.

    Attributes:
        name: name of the module in its model.
        index: number of the layer in the model; its index among the tapped layers if it has none.
        module: name of its class.
        kind: its type in the model's configuration, such as `sliding_attention`; empty if not
            specified.
        is_causal: the module's own flag that no token attends to a later one; None if it has none.
        training: whether it was called in training mode.
        attention: its attention implementation, as transformers names it: `eager`, `sdpa`, …; empty
            if unknown.
        scale, window, soft_cap: arguments of its attention function: the factor of scores, the
            number of last tokens to attend to, and the bound of scores. Without such a function,
            the ones of its operations; None if unknown.
        cache: the class of transformers whose quantized cache it has, such as `Fp8QuantizedLayer`;
            empty for other caches.
        not_observed: why neither an attention function nor attention operations were observed;
            empty if they were.
        calls: its calls, in order.
    """

    name: str
    index: int
    module: str
    kind: str = ""
    is_causal: bool | None = None
    training: bool = False
    attention: str = ""
    scale: float | None = None
    window: int | None = None
    soft_cap: float | None = None
    cache: str = ""
    not_observed: str = ""
    calls: list[TappedCall] = field(default_factory=list, repr=False)

    def __str__(self) -> str:
        recorded: set[str] = set()
        for call in self.calls:
            recorded.update(call.values)
        names = [name for name in VALUES if name in recorded] + sorted(recorded - VALUES.keys())
        text = f"{self.title}, {self.name}: {counted(len(self.calls), 'call')}"
        if names:
            text += f", with {', '.join(names)}"
        return text

    @property
    def is_cross(self) -> bool:
        """Return whether it attends to another sequence."""
        return any("key_input" in call.values for call in self.calls)

    @property
    def title(self) -> str:
        """Return its title in reports: `layer 17 (sliding_attention)`."""
        if not self.kind:
            return f"layer {self.index}"
        return f"layer {self.index} ({self.kind})"


@dataclass
class Tapped:
    """A recording of the attention layers of a model.

    Attributes:
        layers: the tapped layers, in the model's order.
        config: the model's transformers configuration, as JSON values; empty if it has none.
        model: name of the model's class.
    """

    layers: list[TappedLayer]
    config: dict[str, Any] = field(default_factory=dict, repr=False)
    model: str = ""

    def __str__(self) -> str:
        return "\n".join([f"{self.model}, tapped", *map(str, self.layers)])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the recording to a safetensors file, whole or not at all.

        Raises:
            OSError: if it cannot be written.
            ValueError: if the suffix or the existing file has a different format.
        """
        layers = []
        tensors = {}
        for index, layer in enumerate(self.layers):
            calls = []
            for number, call in enumerate(layer.calls):
                calls.append({name: getattr(call, name) for name in OF_CALL})
                for name, value in call.values.items():
                    tensors[f"{index}/{number}/{name}"] = value
            layers.append({**vars(layer), "calls": calls})
        description = {"layers": layers, "config": self.config, "model": self.model}
        text = json.dumps(description, sort_keys=True)
        save_tensors(path, tensors, {"format": FORMAT, "kind": "tap", "tap": text})


def load_tap(path: str | os.PathLike[str]) -> Tapped:
    """Read a recording that `Tapped.save` wrote.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if it is not a recording.

    Example:
        >>> from transformers import LlamaConfig, LlamaModel
        >>> sizes = {"vocab_size": 16, "hidden_size": 32, "intermediate_size": 16}
        >>> heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1}
        >>> model = LlamaModel(LlamaConfig(**sizes, **heads)).eval()
        >>> with torch.no_grad(), parity.tap(model) as tapped:
        ...     _ = model(torch.arange(10).reshape(2, 5))
        >>> tapped.save("tap.safetensors")
        >>> len(parity.load_tap("tap.safetensors").layers)
        1
    """
    tensors, metadata = load_tensors(path)
    if metadata.get("kind") != "tap" or metadata.get("format") != FORMAT:
        raise InputError(
            path, f"be a recording of parity.tap in format {FORMAT}", str(sorted(metadata))
        )
    try:
        description = parse_json(metadata["tap"].encode())
        layers = [_read_layer(fields) for fields in description["layers"]]
        tapped = Tapped(layers, description["config"], description["model"])
        if not isinstance(tapped.config, dict) or not isinstance(tapped.model, str):
            raise InputTypeError(
                "config", "be a dict, and model text", config=tapped.config, model=tapped.model
            )
        for key, value in tensors.items():
            index, number, name = key.split("/", 2)
            tapped.layers[int(index)].calls[int(number)].values[name] = value
        for layer in tapped.layers:
            for call in layer.calls:
                _check_shapes(layer.name, call.values)
                _check_rows(layer.name, call)
    except (KeyError, IndexError, TypeError, ValueError, RecursionError) as error:
        raise InputError(
            path, "hold its layers and calls as they were written", repr(error)
        ) from None
    return tapped


def _read_layer(fields: Mapping[str, Any]) -> TappedLayer:
    """Return a layer from its fields in a file, without values.

    Raises:
        TypeError: if a field is missing or unknown, or its type is wrong.
    """
    calls = []
    counts = []
    for call in fields["calls"]:
        past, first_key, rows = (call[name] for name in OF_CALL)
        if rows is not None:
            rows = tuple(rows)
            counts += rows
        calls.append(TappedCall({}, past, first_key, rows))
        counts += [number for number in (past, first_key) if number is not None]
    layer = TappedLayer(**{**fields, "calls": calls})
    counts += [layer.index, layer.training]  # in Python, True and False are integers
    texts = (layer.name, layer.module, layer.kind, layer.attention, layer.cache, layer.not_observed)
    arguments = (layer.scale, layer.window, layer.soft_cap)
    are_texts = all(isinstance(text, str) for text in texts)
    numbers = [argument for argument in arguments if argument is not None]
    are_numbers = all(isinstance(number, int | float) for number in numbers)
    if not are_texts or not are_numbers:
        raise InputTypeError(
            "names",
            "be text, and a scale, a window and a cap numbers",
            names=texts,
            numbers=arguments,
        )
    for count in counts:
        if not isinstance(count, int) or count < 0:
            raise InputTypeError("numbers of layers and tokens", "be integers >= 0", str(counts))
    return layer


def _check_shapes(layer: str, values: Mapping[str, np.ndarray]) -> None:
    """Reject arrays with wrong axes, or whose batch sizes or numbers of tokens differ."""
    sizes: dict[str, int] = {}
    for name, x in values.items():
        axes = VALUES.get(name, x.shape)
        # Positions may have a leading axis, for rows and columns.
        are_on_grid = name == "positions" and x.ndim == len(axes) + 1
        if x.ndim != len(axes) and not are_on_grid:
            raise InputError(f"{name} of {layer}", f"be {axes}", {f"{name}.shape": x.shape})
        # k, v and masks are left out: they may have the tokens of another sequence.
        if name not in ("input", "output", "q", "context", "is_real"):
            continue
        for axis, size in zip(axes, x.shape, strict=True):
            if axis in ("B", "T") and sizes.setdefault(axis, size) != size:
                rule = f"be {axes} with {axis} = {sizes[axis]}"
                raise InputError(f"{name} of {layer}", rule, {f"{name}.shape": x.shape})


def _check_rows(layer: str, call: TappedCall) -> None:
    """Reject rows that the call before cannot have."""
    rows = call.continued_rows
    if rows is None:
        return
    batch_size = len(call.values["input"])
    if len(rows) != batch_size or any(row >= batch_size for row in rows):
        rule = f"be a row below {batch_size} for each of {batch_size} sequences"
        raise InputError(f"continued_rows of {layer}", rule, str(rows))


def chosen(modules: Mapping[str, Any], patterns: tuple[str, ...] | None) -> list[str]:
    """Return the names of the modules to tap.

    They are those that match patterns, or the innermost attention modules.

    Raises:
        ValueError: if there are none.
    """
    classes: dict[str, str] = {}
    attention: list[str] = []
    for name, module in modules.items():
        classes[name] = type(module).__name__
        if "Attention" in classes[name]:
            attention.append(name)
    innermost = [name for name in attention if not _contains_another(name, attention)]
    if patterns is None:
        names = innermost
    else:
        fitting: set[str] = set()
        missing = []
        for pattern in patterns:
            fitting_pattern = [name for name in modules if fits(pattern, name, classes[name])]
            if not fitting_pattern:
                missing.append(pattern)
            fitting.update(fitting_pattern)
        if missing:
            rule = f"be names of modules or classes of the model, such as {innermost[:3]}"
            raise InputError("layers", rule, str(missing))
        names = [name for name in modules if name in fitting]
    if not names:
        raise InputError(
            "model", "have modules whose class is named …Attention…, or layers must be their names"
        )
    return names


def fits(pattern: str, name: str, class_name: str) -> bool:
    """Return whether a pattern matches a module's name, or the name of its class."""
    return fnmatchcase(name, pattern) or fnmatchcase(class_name, pattern)


def _contains_another(name: str, names: list[str]) -> bool:
    """Return whether one of the names belongs to a module inside this one; "" is the model."""
    if not name:
        return any(names)
    return any(other.startswith(f"{name}.") for other in names)


def is_hidden(mask: np.ndarray) -> np.ndarray:
    """Return where a mask hides a key: it is True, or adds about the lowest number of its dtype."""
    if mask.dtype == np.bool_:
        return mask
    # Half of the lowest one, since masks may be sums of that number and a bias.
    lowest = float(ml_dtypes.finfo(mask.dtype).min)
    return mask.astype(np.float64) <= 0.5 * lowest


def kinds_of(config: Mapping[str, Any]) -> list[str]:
    """Return the type of each layer in a configuration; empty if it specifies none."""
    for part in (config, *config.values()):
        if not isinstance(part, Mapping):
            continue
        kinds = part.get("layer_types")
        if isinstance(kinds, list | tuple):
            return [str(kind) for kind in kinds]
    return []

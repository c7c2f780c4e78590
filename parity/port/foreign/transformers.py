"""Run one attention layer of a transformers model by its own module."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mha_spec import AttentionSpec, InputError
from parity.port.conversion.layouts import LAYOUTS
from parity.port.foreign.live import LIVE, ancestors, names_at, names_in_files
from parity.port.models.specs import ModelLayer


class Ran(NamedTuple):
    """Input (B, T, d_in) and output (B, T, E) of an attention module, float32."""

    input: np.ndarray
    output: np.ndarray


class ModuleCall(NamedTuple):
    """An attention module with its weights, and the arguments that its model calls it with.

    Attributes:
        module: the transformers module.
        args, kwargs: states, angles, mask, and further arguments of the family's modules.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


LARGEST_BLOCK = 1 << 28
"""Largest number of parameters of a layer that is allocated as a whole.

Only some layers need it: their attention depends on other parts. The bound is arbitrary: 1 GiB.
"""

NUMS_OUTPUTS = (0, 1, 2, 3)
"""Numbers of outputs that a layer may return as a tuple; 0 for states alone.

They depend on the family, which nothing but its code tells, so all are tried.
"""


class NotAlone(RuntimeError):
    """A layer that its model cannot run by itself, with the reason. Its weights may be right."""


class _Way(NamedTuple):
    """A way to run one layer.

    Attributes:
        root: path of the part that is called.
        args, kwargs: its arguments.
        states: states that the layer gets instead of the states of the call; None to keep these.
    """

    root: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    states: Tensor | None = None


class _Done(Exception):
    """Ends a forward pass after the attention module has run."""


class _Probe:
    """Hooks that record the input and output of an attention module, and then end the pass.

    Several passes may be tried: the last one counts.
    """

    def __init__(self) -> None:
        self.input: Any = None
        self.output: Any = None

    def record_input(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Record the states that the query projection, or a norm before it, receives."""
        states = args[0] if args else kwargs["hidden_states"]
        self.input = states.detach().clone()

    def record_output(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        """Record the result of the output projection, and end the pass."""
        self.output = output.detach().clone()
        raise _Done


class _CallProbe:
    """A hook that records the call of an attention module, and ends the pass before it."""

    def __init__(self) -> None:
        self.call: Any = None

    def record(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the arguments, and end the pass."""
        self.call = ModuleCall(module, args, kwargs)
        raise _Done


class Skeleton:
    """A model without weights, in which one attention layer at a time is loaded.

    It is run as the model runs it.
    """

    def __init__(self, config: Any, attn_implementation: str = "eager") -> None:
        """Create the model on torch's meta device.

        Args:
            config: transformers configuration, as `AutoConfig.from_pretrained` returns it.
            attn_implementation: attention implementation, as transformers names it.

        Raises:
            ValueError: if transformers does not support such a model.
        """
        from transformers import AutoModel

        try:
            with torch.device("meta"):
                self._model = AutoModel.from_config(
                    config, attn_implementation=attn_implementation
                ).eval()
        except ValueError as error:  # its text lists all supported models
            if "Unrecognized configuration class" not in str(error):
                raise
            raise InputError(
                "transformers", f"support {type(config).__name__}, but does not"
            ) from None

    def run(
        self,
        layer: ModelLayer,
        label: str,
        tensors: Mapping[str, Any],
        x: np.ndarray,
        *,
        keys: np.ndarray | None = None,
        positions: np.ndarray | None = None,
    ) -> Ran:
        """Run a layer's own module.

        Args:
            layer: the layer.
            label: prefix of the names of its weights.
            tensors: its weights by their names in the checkpoint.
            x: (B, T, d_model), output of the previous layer.
            keys: (B, S, d_kv), output of the encoder, for cross-attention.
            positions: (3, B, T), if they are not 0, 1, …

        Returns:
            The input of the module, after any norm before it, and its output.

        Raises:
            RuntimeError: if the model cannot be run in this way.
        """
        path = self._path_of(layer, label)
        extra = {}
        if positions is not None:
            extra["position_ids"] = torch.from_numpy(positions)
        if keys is not None:
            extra["encoder_hidden_states"] = torch.from_numpy(keys)
        attention = self._model.get_submodule(path)
        q_proj = _part_of(attention, layer, "q")
        out_proj = _part_of(attention, layer, "out")
        probe = _Probe()
        hooks = [
            q_proj.register_forward_pre_hook(probe.record_input, with_kwargs=True),
            out_proj.register_forward_hook(probe.record_output),
        ]
        try:
            self._run(layer, path, tensors, x, extra, lambda: probe.input.shape == x.shape)
        finally:
            for hook in hooks:
                hook.remove()
            # The memory of this layer; other parts serve the next ones.
            _, block = _layers_and_block(path)
            self._model.get_submodule(block).to("meta")
        out_bias = getattr(out_proj, "bias", out_proj)  # None only if it has none
        if layer.spec is not None and layer.spec.out_bias and out_bias is None:
            raise NotAlone("its output bias is added outside of its module")
        output = probe.output.reshape(*x.shape[:-1], -1)
        return Ran(probe.input.numpy(), output.numpy())

    def call(
        self, layer: ModelLayer, label: str, tensors: Mapping[str, Any], x: np.ndarray
    ) -> ModuleCall:
        """Return a layer's own module, to be called repeatedly, and the model's arguments for it.

        Args:
            layer, label, tensors, x: as in `run`.

        Raises:
            RuntimeError: if the model cannot be run in this way.
        """
        path = self._path_of(layer, label)
        probe = _CallProbe()
        attention = self._model.get_submodule(path)
        hook = attention.register_forward_pre_hook(probe.record, with_kwargs=True)
        try:
            self._run(layer, path, tensors, x, {}, lambda: True)
        finally:
            hook.remove()
        return probe.call

    # ---- Where a layer is ------------------------------------------------------------------------

    def _path_of(self, layer: ModelLayer, label: str) -> str:
        """Return the path of a layer's attention module in memory.

        It may differ from that in files.
        """
        if layer.kv_source is not None:
            raise NotAlone("it attends to keys and values of another layer")
        names = [name for name, _ in self._model.named_modules() if name]
        # Paths in files, by those in memory.
        paths = {name: name for name in names if layer.is_at(name)}
        if not paths:
            paths = self._paths_by_files(layer, names)
        if len(paths) > 1:  # also in another part of the model
            ending = {name: path for name, path in paths.items() if _ends_with(label, path)}
            words = label.split(".")
            beginning = {name: path for name, path in paths.items() if path.split(".")[0] in words}
            paths = ending or beginning
        if len(paths) != 1:
            count = "several modules" if paths else "no module"
            raise NotAlone(
                f"{type(self._model).__name__} of transformers has {count} with its name"
            )
        return next(iter(paths))

    def _paths_by_files(self, layer: ModelLayer, names: list[str]) -> dict[str, str]:
        """Return the paths in files of modules whose tensors are all a layer's, by their names."""
        modules: dict[str, tuple[int, str]] = {}
        # Shorter names first: of a module and one inside it, the outer one comes first.
        for name in sorted(names, key=len):
            if str(layer.index) not in name.split("."):
                continue
            state = self._model.get_submodule(name).state_dict()
            in_memory = {f"{name}.{short}": value for short, value in state.items()}
            split = names_at(layer.path, names_in_files(self._model, in_memory))
            if split is None:
                continue
            prefix, short_names = split
            path = f"{prefix}.{layer.path}".strip(".")
            # Its submodules have a part of its tensors.
            most, _ = modules.get(path, (0, ""))
            if len(short_names) > most:
                modules[path] = len(short_names), name
        return {name: path for path, (_, name) in modules.items()}

    # ---- Weights ---------------------------------------------------------------------------------

    def _load(self, layer: ModelLayer, path: str, tensors: Mapping[str, Any]) -> None:
        """Load the weights of an attention module, and those that it shares with allocated ones."""
        attention = self._model.get_submodule(path)
        in_memory = self._as_in_memory(layer, path, tensors)
        state = {name: torch.from_numpy(value) for name, value in in_memory.items()}
        attention.load_state_dict(state, strict=False)
        for short, owner_path in layer.shared.items():
            if short not in tensors:
                continue
            for name, parameter in self._model.named_parameters():
                if _ends_with(name, owner_path) and not parameter.is_meta:
                    parameter.data.copy_(torch.from_numpy(tensors[short]))

    def _as_in_memory(
        self, layer: ModelLayer, path: str, tensors: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Return the tensors of a layer's file by their names in memory, arranged as there."""
        state = self._model.get_submodule(path).state_dict()
        in_memory = {f"{path}.{name}": value for name, value in state.items()}
        in_files = names_in_files(self._model, in_memory)
        has_same_names = in_files.keys() == in_memory.keys()
        if has_same_names and all(in_files[name] is x for name, x in in_memory.items()):
            return tensors
        # The library only converts from memory to files. Numbers that say where each value lies
        # make that a way back.
        indices_by_name: dict[str, Tensor] = {}
        start = 0
        for name, value in in_memory.items():
            indices_by_name[name] = torch.arange(start, start + value.numel()).reshape(value.shape)
            start += value.numel()
        values, is_in_file = np.zeros(start, np.float32), np.zeros(start, bool)
        for name, indices_in_file in names_in_files(self._model, indices_by_name).items():
            short = f".{name}".rpartition(f".{layer.path}.")[2]
            if short in tensors:
                indices = indices_in_file.numpy().ravel()
                values[indices] = np.ravel(tensors[short])
                is_in_file[indices] = True
        arranged: dict[str, np.ndarray] = {}
        for name, indices in indices_by_name.items():
            if is_in_file[indices.numpy()].all():
                arranged[name.removeprefix(f"{path}.")] = values[indices.numpy()]
        return arranged

    def _allocate(self, name: str, module: nn.Module) -> None:
        """Allocate and initialize the tensors of a module, but not of its submodules, if one of
        them is on the meta device.
        """
        own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        if not any(tensor.is_meta for tensor in own):
            return
        module.to_empty(device="cpu", recurse=False)
        # Models do not initialize everything, and uninitialized memory would differ from run to
        # run. Any finite values do, because the rules of the owners, below, come last: ones leave
        # norms unchanged, and 0.02 is the usual initializer_range.
        for parameter in module.parameters(recurse=False):
            if parameter.ndim <= 1:
                nn.init.ones_(parameter)
            else:
                nn.init.normal_(parameter, std=0.02)
        for buffer in module.buffers(recurse=False):
            buffer.zero_()
        # Parts have rules of their own for buffers.
        for owner in ancestors(self._model, name):
            if isinstance(owner, PreTrainedModel):
                owner._init_weights(module)
                return

    # ---- Forward passes --------------------------------------------------------------------------

    def _run(
        self,
        layer: ModelLayer,
        path: str,
        tensors: Mapping[str, Any],
        x: np.ndarray,
        extra: Mapping[str, Any],
        is_right: Callable[[], bool],
    ) -> None:
        """Run the model until a hook ends that, in the first way that works.

        `is_right` must hold after it.

        Raises:
            NotAlone: if no way works. The error of the last one is its cause.
        """
        if not any(word.isdigit() for word in path.split(".")):
            raise NotAlone(
                f"{type(self._model).__name__} of transformers does not number its layers"
            )
        error: Exception | None = None
        for way in self._ways(layer, path, x, extra):
            for whole_block in (False, True):
                if whole_block and not self._is_small(path):
                    continue
                self._fill(way, path, layer, whole_block=whole_block)
                self._load(layer, path, tensors)
                for num_outputs in NUMS_OUTPUTS:
                    try:
                        self._pass(way, path, num_outputs, self._sharing_layer(layer, path))
                    except _Done:
                        if is_right():
                            return
                    except Exception as model_error:  # the model's own code may raise anything
                        error = model_error
        name = type(self._model).__name__
        raise NotAlone(
            f"{name} of transformers does not run it without the layers before it"
        ) from error

    def _ways(
        self, layer: ModelLayer, path: str, x: np.ndarray, extra: Mapping[str, Any]
    ) -> Iterator[_Way]:
        """Yield the ways to run a layer, beginning with those in which its model does the most."""
        for way_on in (self._on_embeddings, self._on_tokens, self._on_states):
            way = way_on(layer, path, x, extra)
            if way is not None:
                yield way

    def _pass(self, way: _Way, path: str, num_outputs: int, sharing_layer: str) -> None:
        """Run a part of the model, with the identity for the layers before a module's."""
        with ExitStack() as stack:
            if way.states is not None:
                block = self._model.get_submodule(_layers_and_block(path)[1])
                replace_states = partial(_with_states, way.states)
                hook = block.register_forward_pre_hook(replace_states, with_kwargs=True)
                stack.callback(hook.remove)
            stack.enter_context(_passed_through(self._model, path, num_outputs, sharing_layer))
            stack.enter_context(torch.no_grad())
            self._model.get_submodule(way.root)(*way.args, **way.kwargs)

    def _on_embeddings(
        self, layer: ModelLayer, path: str, x: np.ndarray, extra: Mapping[str, Any]
    ) -> _Way | None:
        """Run the smallest part of the model that accepts embeddings and makes the layer's mask."""
        root = self._smallest(path, "inputs_embeds", makes_mask=layer.is_causal)
        if root is None:
            return None
        width = getattr(self._input_embeddings(), "embedding_dim", x.shape[-1])
        # Embeddings are narrower in ALBERT, and wider in RemBERT; the layer may then have any
        # input.
        if width > x.shape[-1]:
            embeddings = np.resize(x, (*x.shape[:-1], width))
        else:
            embeddings = x[..., :width].copy()
        kwargs = {"inputs_embeds": torch.from_numpy(embeddings), **extra}
        parameters = inspect.signature(self._model.get_submodule(root).forward).parameters
        kinds = [parameter.kind for parameter in parameters.values()]
        # A cache would have no use. Some models read the argument from their keywords alone.
        if "use_cache" in parameters or inspect.Parameter.VAR_KEYWORD in kinds:
            kwargs["use_cache"] = False
        return _Way(root, (), kwargs)

    def _on_tokens(
        self, layer: ModelLayer, path: str, x: np.ndarray, extra: Mapping[str, Any]
    ) -> _Way | None:
        """Run the smallest part of the model that accepts tokens.

        The layer gets other states than theirs.
        """
        root = self._smallest(path, "input_ids", makes_mask=True)
        if root is None:
            return None
        tokens = torch.zeros(x.shape[:2], dtype=torch.long)
        return _Way(root, (), {"input_ids": tokens, **extra}, torch.from_numpy(x))

    def _on_states(
        self, layer: ModelLayer, path: str, x: np.ndarray, extra: Mapping[str, Any]
    ) -> _Way | None:
        """Run the layer on its states alone, if it needs no mask or positions, as for images."""
        if extra or layer.is_causal or layer.spec is None or _needs_positions(layer.spec):
            return None
        _, block = _layers_and_block(path)
        block_signature = inspect.signature(self._model.get_submodule(block).forward)
        _, *parameters = block_signature.parameters.values()  # without the states
        num_required = 0
        for parameter in parameters:
            is_positional = parameter.kind in (
                inspect.Parameter.POSITIONAL_ONLY,
                inspect.Parameter.POSITIONAL_OR_KEYWORD,
            )
            if is_positional and parameter.default is inspect.Parameter.empty:
                num_required += 1
        return _Way(block, (torch.from_numpy(x), *[None] * num_required), {})

    def _smallest(self, path: str, argument: str, *, makes_mask: bool) -> str | None:
        """Return the path of the smallest part with a layer that accepts an argument, or None.

        Args:
            path: path of the layer.
            argument: name of the argument.
            makes_mask: it must be a model, which makes the mask; encoders of CLIP receive one.
        """
        words = path.split(".")
        for count in range(len(words) - 1, -1, -1):
            name = ".".join(words[:count])
            part = self._model.get_submodule(name)
            is_enough = isinstance(part, PreTrainedModel) or not makes_mask
            if is_enough and argument in inspect.signature(part.forward).parameters:
                return name
        return None

    def _sharing_layer(self, layer: ModelLayer, path: str) -> str:
        """Return the path of an earlier layer whose weights this one uses, as in T5; or nothing."""
        layers, block = _layers_and_block(path)
        own = self._model.get_submodule(path).state_dict()
        for short, owner_path in layer.shared.items():
            if short in own:
                continue
            for name, _ in self._model.named_parameters():
                is_in_layers = name.startswith(f"{layers}.")
                is_in_this_one = name.startswith(f"{block}.")
                if _ends_with(name, owner_path) and is_in_layers and not is_in_this_one:
                    return _layers_and_block(name)[1]
        return ""

    def _is_small(self, path: str) -> bool:
        """Return whether the layer around an attention module may be allocated as a whole."""
        _, block = _layers_and_block(path)
        parameters = self._model.get_submodule(block).parameters()
        return sum(parameter.numel() for parameter in parameters) <= LARGEST_BLOCK

    def _fill(self, way: _Way, path: str, layer: ModelLayer, *, whole_block: bool) -> None:
        """Allocate the modules that run before an attention module is done, except other layers.

        Args:
            way: how the model runs. Embeddings of words are not needed if it begins with
                embeddings.
            path: path of the attention module.
            layer: the layer.
            whole_block: allocate all modules of its layer. Otherwise those that are listed before
                it, and norms.
        """
        layers, block = _layers_and_block(path)
        sharing_layer = self._sharing_layer(layer, path)
        embeddings = self._input_embeddings() if way.states is None else None
        is_attention_listed = False
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            for short, module in self._model.get_submodule(way.root).named_modules():
                name = f"{way.root}.{short}".strip(".")
                is_inside = _is_in(name, path)
                is_norm = "norm" in type(module).__name__.lower()
                if _is_in(name, block):
                    is_before = is_norm or is_inside or not is_attention_listed
                    is_needed = is_before or whole_block
                elif sharing_layer and _is_in(name, sharing_layer):
                    is_needed = True
                else:
                    is_needed = not _is_in(name, layers)
                is_attention_listed |= is_inside
                if is_needed and (embeddings is None or module is not embeddings):
                    self._allocate(name, module)

    def _input_embeddings(self) -> nn.Module | None:
        """Return the embeddings of words, if the model has some."""
        try:
            return self._model.get_input_embeddings()
        except (AttributeError, NotImplementedError):
            return None


def _needs_positions(spec: AttentionSpec) -> bool:
    """Return whether the model passes positions, or a mask made of them, to a layer of this kind
    even if it is not causal.
    """
    features = (
        spec.alibi,
        spec.relative_bias,
        spec.relative_products,
        spec.temperature,
        spec.rope,
        spec.window_size,
        spec.chunk_size,
    )
    return any(feature is not None for feature in features)


def _ends_with(name: str, path: str) -> bool:
    """Return whether a name ends with a path, word by word."""
    return f".{name}".endswith(f".{path}")


def _is_in(name: str, path: str) -> bool:
    """Return whether a name is a path, or begins with it, word by word."""
    return f"{name}.".startswith(f"{path}.")


def _with_states(
    states: Tensor, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a layer with other states."""
    if args:
        return (states, *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": states}


def _part_of(attention: nn.Module, layer: ModelLayer, what: str) -> nn.Module:
    """Return the submodule that projects queries or the output, otherwise the attention module.

    A norm may precede the query projection.
    """
    modules = dict(attention.named_modules())
    # The names in memory may come from other layouts.
    for layout in (layer.layout, *LIVE):
        for tensor in LAYOUTS[layout].tensors:
            path = tensor.name.rpartition(".")[0]
            # "qkv" and "qk" begin with "q".
            holds_it = tensor.holds == what or tensor.holds[0] == what
            if holds_it and path and path in modules:
                return modules[path]
    return attention


def _layers_and_block(path: str) -> tuple[str, str]:
    """Return the path of all layers, and the path of the layer that contains an attention
    module.
    """
    words = path.split(".")
    are_numbers = [word.isdigit() for word in words]
    number = are_numbers.index(True)
    return ".".join(words[:number]), ".".join(words[: number + 1])


class _Identity(nn.Module):
    """A layer that returns its input, with the attributes of the layer that it replaces."""

    def __init__(self, layer: nn.Module, num_outputs: int) -> None:
        super().__init__()
        self.__dict__["of"] = layer  # no submodule: it is not called
        self.num_outputs = num_outputs

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["of"], name)

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        """Return the input unchanged, alone or as the first of some outputs."""
        if self.num_outputs == 0:
            return hidden_states
        return (hidden_states, *[None] * (self.num_outputs - 1))


class _IdentityOfStates(nn.Module):
    """A layer that returns its input, and the other outputs of a layer that is run."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the input unchanged as the first output."""
        _, *other_outputs = self.layer(hidden_states, *args, **kwargs)
        return (hidden_states, *other_outputs)


@contextmanager
def _passed_through(
    model: nn.Module, path: str, num_outputs: int, sharing_layer: str
) -> Iterator[None]:
    """Replace the layers before the layer of an attention module by the identity.

    Args:
        model: the model.
        path: path of the attention module.
        num_outputs: length of the tuple that a layer returns; 0 if it returns only states.
        sharing_layer: path of an earlier layer that is run for its other outputs; empty if there is
            none.
    """
    layers_path, block = _layers_and_block(path)
    layers: Any = model.get_submodule(layers_path)
    layers_before = list(layers[: int(block.rpartition(".")[2])])
    run_layer = model.get_submodule(sharing_layer) if sharing_layer else None
    for index, layer in enumerate(layers_before):
        if run_layer is None:
            layers[index] = _Identity(layer, num_outputs)
        else:
            layers[index] = _IdentityOfStates(run_layer)
    try:
        yield
    finally:
        for index, layer in enumerate(layers_before):
            layers[index] = layer

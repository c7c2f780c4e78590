"""Run one attention layer of a transformers model by its own module."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mha_spec import AttentionSpec, InputError
from parity.port.conversion.layouts import LAYOUTS
from parity.port.foreign.live import LIVE, names_in_files
from parity.port.models.specs import ModelLayer


class Ran(NamedTuple):
    """Input (B, T, d_in) and output (B, T, E) of an attention module, float32."""

    given: np.ndarray
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
"""Largest number of parameters of a layer that is allocated as a whole, because its attention needs
other parts.
"""


class NotAlone(RuntimeError):
    """A layer that its model cannot run by itself, with the reason; it says nothing about the
    layer.
    """


class _Way(NamedTuple):
    """A way to run one layer.

    Attributes:
        root: path of the part that is called.
        args, kwargs: its arguments.
        states: states that the layer gets instead of those of the call; None to keep these.
    """

    root: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    states: Tensor | None = None


class _Done(Exception):
    """Ends a forward pass after the attention module has run."""


class Skeleton:
    """A model without weights, in which one attention layer at a time is loaded, and run as the
    model runs it.
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
        extra = {"position_ids": torch.from_numpy(positions)} if positions is not None else {}
        extra |= {"encoder_hidden_states": torch.from_numpy(keys)} if keys is not None else {}
        got: list[Tensor] = []
        gave: list[Tensor] = []

        def begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            states = args[0] if args else kwargs["hidden_states"]
            got[:] = [states.detach().clone()]

        def stop(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
            gave[:] = [output.detach().clone()]
            raise _Done

        attention = self._model.get_submodule(path)
        hooks = [
            _part_of(attention, layer, "q").register_forward_pre_hook(begin, with_kwargs=True),
            _part_of(attention, layer, "out").register_forward_hook(stop),
        ]
        try:
            self._run(layer, path, tensors, x, extra, lambda: got[0].shape == x.shape)
        finally:
            for hook in hooks:
                hook.remove()
            # The memory of this layer; other parts serve the next ones.
            _, block = _layers_and_block(path)
            self._model.get_submodule(block).to("meta")
        out = _part_of(attention, layer, "out")
        if layer.spec is not None and layer.spec.out_bias and getattr(out, "bias", out) is None:
            raise NotAlone("its output bias is added outside of its module")
        return Ran(got[0].numpy(), gave[0].reshape(*x.shape[:-1], -1).numpy())

    def call(
        self, layer: ModelLayer, label: str, tensors: Mapping[str, Any], x: np.ndarray
    ) -> ModuleCall:
        """Return a layer's own module with the arguments that the model passes, to be called
        repeatedly.

        Args:
            layer, label, tensors, x: as in `run`.

        Raises:
            RuntimeError: if the model cannot be run in this way.
        """
        path = self._path_of(layer, label)
        calls: list[ModuleCall] = []

        def stop(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls[:] = [ModuleCall(module, args, kwargs)]
            raise _Done

        hook = self._model.get_submodule(path).register_forward_pre_hook(stop, with_kwargs=True)
        try:
            self._run(layer, path, tensors, x, {}, lambda: True)
        finally:
            hook.remove()
        return calls[0]

    # ---- Where a layer is ------------------------------------------------------------------------

    def _path_of(self, layer: ModelLayer, label: str) -> str:
        """Return the path of a layer's attention module in memory, which may differ from that in
        files.
        """
        if layer.kv_source is not None:
            raise NotAlone("it attends to keys and values of another layer")
        names = [name for name, _ in self._model.named_modules() if name]
        paths = {name: name for name in names if layer.is_at(name)} or self._paths_by_files(
            layer, names
        )
        if len(paths) > 1:  # also in another part of the model
            ends = {name: path for name, path in paths.items() if f".{label}".endswith(f".{path}")}
            begins = {
                name: path for name, path in paths.items() if path.split(".")[0] in label.split(".")
            }
            paths = ends or begins
        if len(paths) != 1:
            count = "several modules" if paths else "no module"
            raise NotAlone(
                f"{type(self._model).__name__} of transformers has {count} with its name"
            )
        return next(iter(paths))

    def _paths_by_files(self, layer: ModelLayer, names: list[str]) -> dict[str, str]:
        """Return the modules all of whose tensors a layer has in files, by path, with their paths
        in files.
        """
        modules: dict[str, tuple[int, str]] = {}
        for name in sorted(names, key=len):
            if str(layer.index) not in name.split("."):
                continue
            state = self._model.get_submodule(name).state_dict()
            in_files = names_in_files(
                self._model, {f"{name}.{short}": value for short, value in state.items()}
            )
            cut = [f".{each}".rpartition(f".{layer.path}.") for each in in_files]
            begins = {before for before, *_ in cut}
            if len(begins) == 1 and all(between for _, between, _ in cut):
                where = f"{min(begins)}.{layer.path}".strip(".")
                # Its submodules have a part of its tensors.
                most, _ = modules.get(where, (0, ""))
                if len(cut) > most:
                    modules[where] = len(cut), name
        return {name: where for where, (_, name) in modules.items()}

    # ---- Weights ---------------------------------------------------------------------------------

    def _load(self, layer: ModelLayer, path: str, tensors: Mapping[str, Any]) -> None:
        """Load the weights of an attention module, and those that it uses of other modules that are
        allocated.
        """
        attention = self._model.get_submodule(path)
        in_memory = self._as_in_memory(layer, path, tensors)
        attention.load_state_dict(
            {name: torch.from_numpy(value) for name, value in in_memory.items()}, strict=False
        )
        for short, where in layer.shared.items():
            for name, parameter in self._model.named_parameters():
                if short in tensors and f".{name}".endswith(f".{where}") and not parameter.is_meta:
                    parameter.data.copy_(torch.from_numpy(tensors[short]))

    def _as_in_memory(
        self, layer: ModelLayer, path: str, tensors: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Return the tensors of a layer's file by their names in memory, where they may be arranged
        otherwise.
        """
        state = self._model.get_submodule(path).state_dict()
        known = {f"{path}.{name}": value for name, value in state.items()}
        in_files = names_in_files(self._model, known)
        if in_files.keys() == known.keys() and all(in_files[name] is known[name] for name in known):
            return tensors
        # The library only converts from memory to files. Numbers that say where each value lies
        # make that a way back.
        places: dict[str, Tensor] = {}
        start = 0
        for name, value in known.items():
            places[name] = torch.arange(start, start + value.numel()).reshape(value.shape)
            start += value.numel()
        values, is_known = np.zeros(start, np.float32), np.zeros(start, bool)
        for name, where in names_in_files(self._model, places).items():
            short = f".{name}".rpartition(f".{layer.path}.")[2]
            if short in tensors:
                values[where.numpy().ravel()] = np.ravel(tensors[short])
                is_known[where.numpy().ravel()] = True
        found: dict[str, np.ndarray] = {}
        for name, where in places.items():
            if is_known[where.numpy()].all():
                found[name.removeprefix(f"{path}.")] = values[where.numpy()]
        return found

    def _allocate(self, name: str, module: nn.Module) -> None:
        """Allocate and initialize a module without its submodules, unless it is."""
        own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        if not any(each.is_meta for each in own):
            return
        module.to_empty(device="cpu", recurse=False)
        # Models do not initialize everything: memory that is not would differ from run to run.
        for parameter in module.parameters(recurse=False):
            if parameter.ndim <= 1:
                nn.init.ones_(parameter)
            else:
                nn.init.normal_(parameter, std=0.02)
        for buffer in module.buffers(recurse=False):
            buffer.zero_()
        # Parts have rules of their own for buffers.
        words = name.split(".")
        owners = [self._model.get_submodule(".".join(words[:count])) for count in range(len(words))]
        models = [owner for owner in owners if isinstance(owner, PreTrainedModel)]
        models[-1]._init_weights(module)

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
        """Run the model until a hook ends that, in the first way that works; `is_right` must then
        hold.

        Raises:
            NotAlone: if no way works. The error of the last one is its cause.
        """
        if not any(word.isdigit() for word in path.split(".")):
            raise NotAlone(
                f"{type(self._model).__name__} of transformers does not number its layers"
            )
        error: Exception | None = None
        for way_of in (self._on_embeddings, self._on_tokens, self._on_states):
            way = way_of(layer, path, x, extra)
            if way is None:
                continue
            for whole_block in (False, True):
                if whole_block and not self._is_small(path):
                    continue
                self._fill(way, path, layer, whole_block=whole_block)
                self._load(layer, path, tensors)
                for num_outputs in (
                    0,
                    1,
                    2,
                    3,
                ):  # the type of a layer's output depends on the family
                    try:
                        self._pass(way, path, num_outputs, self._lender(layer, path))
                    except _Done:
                        if is_right():
                            return
                    except Exception as wrong:  # the model's own code may raise anything
                        error = wrong
        name = type(self._model).__name__
        raise NotAlone(
            f"{name} of transformers does not run it without the layers before it"
        ) from error

    def _pass(self, way: _Way, path: str, num_outputs: int, lender: str) -> None:
        """Run a part of the model, with the identity for the layers before that of an attention
        module.
        """
        _, block = _layers_and_block(path)
        hooks = []
        if way.states is not None:
            states = way.states

            def replace_states(
                module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
            ) -> Any:
                if args:
                    return (states, *args[1:]), kwargs
                return args, {**kwargs, "hidden_states": states}

            hooks.append(
                self._model.get_submodule(block).register_forward_pre_hook(
                    replace_states, with_kwargs=True
                )
            )
        try:
            with _passed_through(self._model, path, num_outputs, lender), torch.no_grad():
                self._model.get_submodule(way.root)(*way.args, **way.kwargs)
        finally:
            for hook in hooks:
                hook.remove()

    def _on_embeddings(
        self, layer: ModelLayer, path: str, x: np.ndarray, extra: Mapping[str, Any]
    ) -> _Way | None:
        """Run the smallest part of the model that accepts embeddings and makes the mask of the
        layer.
        """
        root = self._smallest(path, "inputs_embeds", makes_mask=layer.is_causal)
        if root is None:
            return None
        width = getattr(self._input_embeddings(), "embedding_dim", x.shape[-1])
        # Embeddings are narrower in ALBERT, and wider in RemBERT; the layer may then have any
        # input.
        embeddings = (
            np.resize(x, (*x.shape[:-1], width)) if width > x.shape[-1] else x[..., :width].copy()
        )
        given = {"inputs_embeds": torch.from_numpy(embeddings), **extra}
        names = inspect.signature(self._model.get_submodule(root).forward).parameters.values()
        if any(
            each.name == "use_cache" or each.kind is inspect.Parameter.VAR_KEYWORD for each in names
        ):
            given["use_cache"] = False
        return _Way(root, (), given)

    def _on_tokens(
        self, layer: ModelLayer, path: str, x: np.ndarray, extra: Mapping[str, Any]
    ) -> _Way | None:
        """Run the smallest part of the model that accepts tokens, and give the layer other states
        than theirs.
        """
        root = self._smallest(path, "input_ids", makes_mask=True)
        if root is None:
            return None
        tokens = torch.zeros(x.shape[:2], dtype=torch.long)
        return _Way(root, (), {"input_ids": tokens, **extra}, torch.from_numpy(x))

    def _on_states(
        self, layer: ModelLayer, path: str, x: np.ndarray, extra: Mapping[str, Any]
    ) -> _Way | None:
        """Run the layer on its states alone, if it needs neither a mask nor positions, like those
        of images.
        """
        if extra or layer.is_causal or layer.spec is None or _needs_positions(layer.spec):
            return None
        _, block = _layers_and_block(path)
        _, *others = inspect.signature(self._model.get_submodule(block).forward).parameters.values()
        plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        required = [
            each
            for each in others
            if each.kind in plain and each.default is inspect.Parameter.empty
        ]
        return _Way(block, (torch.from_numpy(x), *(None for _ in required)), {})

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

    def _lender(self, layer: ModelLayer, path: str) -> str:
        """Return the path of an earlier layer whose weights this one uses, as in T5; or nothing."""
        layers, block = _layers_and_block(path)
        own = self._model.get_submodule(path).state_dict()
        for short, where in layer.shared.items():
            for name, _ in self._model.named_parameters():
                is_lent = f".{name}".endswith(f".{where}") and name.startswith(f"{layers}.")
                if is_lent and short not in own and not name.startswith(f"{block}."):
                    return _layers_and_block(name)[1]
        return ""

    def _is_small(self, path: str) -> bool:
        """Return whether the layer around an attention module is small enough to be allocated as a
        whole.
        """
        _, block = _layers_and_block(path)
        return (
            sum(each.numel() for each in self._model.get_submodule(block).parameters())
            <= LARGEST_BLOCK
        )

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
        lender = self._lender(layer, path)
        embeddings = self._input_embeddings() if way.states is None else None
        has_come = False
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            for short, module in self._model.get_submodule(way.root).named_modules():
                name = f"{way.root}.{short}".strip(".")
                is_inside = f"{name}.".startswith(f"{path}.")
                is_before = "norm" in type(module).__name__.lower() or is_inside or not has_come
                has_come |= is_inside
                if f"{name}.".startswith(f"{block}."):
                    is_needed = is_before or whole_block
                elif lender and f"{name}.".startswith(f"{lender}."):
                    is_needed = True
                else:
                    is_needed = not f"{name}.".startswith(f"{layers}.")
                if is_needed and (embeddings is None or module is not embeddings):
                    self._allocate(name, module)

    def _input_embeddings(self) -> nn.Module | None:
        """Return the embeddings of words, if the model has some."""
        try:
            return self._model.get_input_embeddings()
        except (AttributeError, NotImplementedError):
            return None


def _needs_positions(spec: AttentionSpec) -> bool:
    """Return whether a layer that is not causal needs more than its states, from outside."""
    biases = (spec.alibi, spec.relative_bias, spec.relative_products, spec.temperature, spec.rope)
    return any(each is not None for each in (*biases, spec.window_size, spec.chunk_size))


def _part_of(attention: nn.Module, layer: ModelLayer, what: str) -> nn.Module:
    """Return the submodule that projects queries or the output, otherwise the attention module.

    A norm may precede the query projection.
    """
    modules = dict(attention.named_modules())
    # The names in memory may be those of other layouts.
    for layout in (layer.layout, *LIVE):
        for tensor in LAYOUTS[layout].tensors:
            path = tensor.name.rpartition(".")[0]
            if (tensor.holds == what or what == tensor.holds[0]) and path and path in modules:
                return modules[path]
    return attention


def _layers_and_block(path: str) -> tuple[str, str]:
    """Return the path of all layers, and that of the layer that contains an attention module."""
    words = path.split(".")
    number = next(index for index, word in enumerate(words) if word.isdigit())
    return ".".join(words[:number]), ".".join(words[: number + 1])


class _Passes(nn.Module):
    """A layer that returns its input, with the attributes of the layer in whose place it is."""

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


class _Lends(nn.Module):
    """A layer that returns its input, and the other outputs of a layer that is run."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the input unchanged as the first output."""
        _, *others = self.layer(hidden_states, *args, **kwargs)
        return (hidden_states, *others)


@contextmanager
def _passed_through(model: nn.Module, path: str, num_outputs: int, lender: str) -> Iterator[None]:
    """Replace the layers before that of an attention module by the identity.

    Args:
        model: the model.
        path: path of the attention module.
        num_outputs: length of the tuple that a layer returns; 0 if it returns only states.
        lender: path of an earlier layer that is run for its other outputs; empty if there is none.
    """
    where, block = _layers_and_block(path)
    layers: Any = model.get_submodule(where)
    before = list(layers[: int(block.rpartition(".")[2])])
    lending = model.get_submodule(lender) if lender else None
    for index, layer in enumerate(before):
        layers[index] = _Passes(layer, num_outputs) if lending is None else _Lends(lending)
    try:
        yield
    finally:
        for index, layer in enumerate(before):
            layers[index] = layer

"""A layer of the user on the command line of `diagnose`: the function, the weights that it should
have, and its inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from parity.measure.text import and_listed
from parity.use.cli.command import Options
from parity.use.cli.layers import layer_options
from parity.use.cli.messages import input_error, requires
from parity.use.cli.options import first_or_none

if TYPE_CHECKING:
    import numpy as np

    from mha_spec import AttentionSpec
    from parity.measure.core.case import Case
    from parity.measure.core.problem import Problem
    from parity.port.conversion.layers import FileLayer

SEQ_LEN = 19
"""Tokens that are drawn. Few are fast; the number differs from usual sizes, so that swapped axes
show.
"""

NAMES = ("canonical", "model")
"""Names of the weights that a function may receive, besides the names of layouts."""


class OwnLayer(NamedTuple):
    """A layer of the user.

    Attributes:
        function: its call, with its weights.
        problem: the right weights, and inputs.
        framework: framework of its arrays.
        is_causal_known: whether an option or the model's configuration says if it is causal.
    """

    function: Callable[..., Any]
    problem: Problem
    framework: str
    is_causal_known: bool


class _RightLayer(NamedTuple):
    """The layer of a file, with a case for it.

    Attributes:
        weights: its canonical weights.
        spec: the layer.
        tensors: its weights by their names in the file.
        case: a case of few tokens, or of as many as a window needs.
        received: keys and values of another layer, if it shares those.
        is_causal_known: whether an option or the model's configuration says if it is causal.
    """

    weights: Mapping[str, np.ndarray]
    spec: AttentionSpec
    tensors: Mapping[str, np.ndarray]
    case: Case
    received: Mapping[str, np.ndarray]
    is_causal_known: bool


def own_layer(options: Options) -> OwnLayer:
    """Return the function of a command line, its right weights and its inputs."""
    from parity.explain.conformance.discover import framework_of
    from parity.explain.diagnosis.diagnose import parameter_of_cotangent
    from parity.measure.backends import FRAMEWORKS, load_backend, why_missing

    name = options.files[0]
    source = options.model
    if source is None:
        source = options.weights
    if source is None:
        raise requires(name, "--model or --weights, with the weights of the right layer")
    function, receives_weights = _function(name, options)
    if options.cotangent is not None and not parameter_of_cotangent(function):
        raise requires("--cotangent", f"a function with a parameter `cotangent`, not {name}")
    framework = options.framework or framework_of(function)
    if framework is None:
        rule = f"be the framework of {name}, one of {', '.join(FRAMEWORKS)}"
        raise input_error("--framework", rule)
    reason = why_missing(FRAMEWORKS[framework])
    if reason:
        raise ModuleNotFoundError(reason)
    dtype = "float32"
    if framework == "ttnn":
        dtype = "bfloat16"  # the dtype of its fused kernels
    right = _right_layer(source, dtype, options)
    problem = _problem(right, dtype, options)
    if receives_weights:
        named = _named_weights(problem, right, options.weight_names)
        backend = load_backend(FRAMEWORKS[framework])
        # Arrays are made under the settings that the function runs with.
        with backend.lock(dtype):
            weights = {key: backend.from_numpy(array) for key, array in named.items()}
            function = _with_weights(function, name, weights)
    return OwnLayer(function, problem, framework, right.is_causal_known)


# ---- The right layer -----------------------------------------------------------------------------


def _right_layer(source: str, dtype: str, options: Options) -> _RightLayer:
    """Read the layer of a file or a model folder."""
    from parity.port.conversion.checkpoint import Checkpoint
    from parity.port.conversion.hints import CALLER, LayerHints
    from parity.use.running.models import received_by

    layout = first_or_none(options.layouts)
    prefix = first_or_none(options.prefix)
    hints = LayerHints.by(CALLER, **layer_options(options))
    with Checkpoint.open(source) as checkpoint:
        layers = checkpoint.layers(hints, layout, prefix)
        layers.warn_if_incomplete()
        layer = _chosen_layer(layers.in_order, source, options)
        weights, spec = layer.load()
        is_causal = options.causal
        if is_causal is None and layer.model is not None:
            is_causal = layer.model.is_causal
        case = _case(layer, spec, is_causal, dtype, options)
        received = received_by(layer, layers.in_order, [case]).get(case.name, {})
        tensors: Mapping[str, np.ndarray] = {}
        if options.weight_names == "model":
            tensors = layer.tensors()
    return _RightLayer(weights, spec, tensors, case, received, is_causal is not None)


def _chosen_layer(layers: list[FileLayer], source: str, options: Options) -> FileLayer:
    """Return the layer of a number, or the only one."""
    from parity.use.running.models import chosen_layers, number_of

    number = options.layer
    chosen = layers
    if number is not None:
        chosen = chosen_layers(layers, [number])
    if len(chosen) == 1:
        return chosen[0]
    numbers = sorted({number_of(layer) for layer in chosen})
    if number is None and len(numbers) > 1:
        text = f"missing option --layer: {source} has layers {numbers[0]} to {numbers[-1]}"
        raise click.UsageError(text, options.context)
    remedy = [{"--prefix": layer.label} for layer in chosen]
    raise input_error(
        "--prefix", "select one layer", f"{len(chosen)} of them", remedy=remedy, hint="selects one"
    )


def _case(
    layer: FileLayer, spec: AttentionSpec, is_causal: bool | None, dtype: str, options: Options
) -> Case:
    """Return a case for a layer: self-attention, causal unless it is known not to be, or calls that
    append to a cache, or cross-attention.
    """
    from mha_spec import GridBias
    from parity.measure.core.case import Case
    from parity.measure.core.exercise import longer_case, not_exercised_by
    from parity.use.running.lengths import check_memory

    about = "inputs for a layer of the user"
    # A layer that is searched for bugs is compared without dropout.
    spec = replace(spec, dropout=0.0, output_dropout=0.0)
    if options.chunks is not None:
        if layer.is_cross or is_causal is False:
            raise requires("--chunks", "causal self-attention")
        total = sum(options.chunks)
        check_memory(spec, total)
        return Case(
            "diagnose", spec, about, seq_len=total, chunks=tuple(options.chunks), capacity=total
        )
    seq_len = options.seq_len
    if seq_len is None:
        seq_len = SEQ_LEN
        bias = spec.relative_bias
        if isinstance(bias, GridBias):
            seq_len = min(seq_len, bias.num_tokens)
    check_memory(spec, seq_len)
    if layer.is_cross:
        # The numbers of queries and keys differ, so that swapped axes show.
        return Case(
            "diagnose",
            spec,
            about,
            seq_len=seq_len,
            seq_len_k=seq_len + 4,
            is_causal=bool(is_causal),
        )
    case = Case("diagnose", spec, about, seq_len=seq_len, is_causal=is_causal is not False)
    if options.seq_len is not None or options.input is not None:
        return case
    # A window, for example, shows in longer sequences only.
    return longer_case(case, not_exercised_by(case, dtype)) or case


# ---- Inputs --------------------------------------------------------------------------------------


def _problem(right: _RightLayer, dtype: str, options: Options) -> Problem:
    """Return the weights of a layer and drawn inputs, or the weights and inputs in the files of the
    options.
    """
    from parity.measure.core.problem import make_problem

    case = right.case
    if options.input is None:
        return make_problem(case, dtype, right.weights, right.received)
    inputs = _inputs_of_files(case, options)
    if right.received:
        raise input_error(
            "--input", "be left out for a layer that shares keys and values of another"
        )
    batch, num_tokens, _ = inputs["query"].shape
    num_keys = None
    if "key" in inputs:
        num_keys = inputs["key"].shape[1]
    case = replace(case, batch=batch, seq_len=num_tokens, seq_len_k=num_keys)
    if case.is_cached:
        case = replace(case, capacity=num_tokens)
    drawn = make_problem(case, dtype, right.weights)
    inputs_dtype = drawn.inputs["query"].dtype
    rounded = {name: x.astype(inputs_dtype) for name, x in inputs.items()}
    return replace(drawn, inputs={**drawn.inputs, **rounded})


def _inputs_of_files(case: Case, options: Options) -> dict[str, np.ndarray]:
    """Return the arrays of --input, --key-input and --cotangent, which fit each other."""
    from parity.explain.diagnosis.attention import input_array, read_array

    spec = case.spec
    query = input_array("--input", read_array(options.input), spec.d_in)
    inputs = {"query": query}
    batch, num_tokens, _ = query.shape
    if options.chunks is not None and sum(options.chunks) != num_tokens:
        rule = f"have the sum {num_tokens}, the tokens of {options.input}"
        raise input_error("--chunks", rule, ",".join(map(str, options.chunks)))
    is_cross = case.seq_len_k is not None
    if is_cross and options.key_input is None:
        raise requires("--input for cross-attention", "--key-input")
    if options.key_input is not None:
        key = input_array("--key-input", read_array(options.key_input), spec.d_kv)
        if key.shape[0] != batch:
            sizes = f"{key.shape[0]} and {batch}"
            raise input_error("--key-input", "have as many sequences as --input", sizes)
        inputs["key"] = key
    if options.cotangent is not None:
        inputs["cotangent"] = _cotangent(options, spec, (batch, num_tokens))
    return inputs


def _cotangent(options: Options, spec: AttentionSpec, tokens: tuple[int, int]) -> np.ndarray:
    """Return the gradient of the output in the file of --cotangent, (B, T, E)."""
    from parity.explain.diagnosis.attention import input_array, read_array

    cotangent = input_array("--cotangent", read_array(options.cotangent), spec.output_width)
    if cotangent.shape[:2] != tokens:
        rule = f"have {tokens[0]} sequences of {tokens[1]} tokens, as --input"
        sizes = f"{cotangent.shape[0]} of {cotangent.shape[1]}"
        raise input_error("--cotangent", rule, sizes)
    return cotangent


# ---- The function --------------------------------------------------------------------------------


def _function(name: str, options: Options) -> tuple[Callable[..., Any], bool]:
    """Return a function of the user, and whether it receives the right weights.

    It does not if it has weights of its own, or if it has the weights of --params.
    """
    from parity.explain.conformance.discover import load_callable, load_params, made
    from parity.explain.conformance.functional import weights_parameter
    from parity.explain.conformance.signatures import parameters_of, required

    target = load_callable(name)
    if isinstance(target, type):
        raise input_error(name, "be a function, or an instance of a layer", "a class")
    if options.params is None:
        parameters = parameters_of(target) or {}
        parameter = weights_parameter(target, parameters)
        if parameter and parameter in required(parameters):
            return target, True
    if options.weight_names is not None:
        raise requires(
            "--names", f"a function that receives its weights, such as {name}(params, x)"
        )
    params = None
    if options.params is not None:
        params = load_params(options.params)
    return made(target, name, params), False


def _with_weights(
    function: Callable[..., Any], name: str, weights: Mapping[str, Any]
) -> Callable[..., Any]:
    """Return a function with its weights; one of the weights alone makes the layer."""
    from parity.explain.conformance.discover import made
    from parity.explain.conformance.signatures import parameters_of, required
    from parity.measure.core.user_code import user_code

    if len(required(parameters_of(function) or {})) > 1:
        return made(function, name, weights)
    with user_code(name):
        layer = function(weights)
    if not callable(layer):
        rule = "return a layer that can be called, because it receives weights alone"
        raise input_error(name, rule, type(layer).__name__)
    return layer


def _named_weights(
    problem: Problem, right: _RightLayer, names: str | None
) -> Mapping[str, np.ndarray]:
    """Return the weights of a problem under canonical names, the names of the model, or of a
    layout.
    """
    from parity.port.conversion.convert import convert

    if names in (None, "canonical"):
        return problem.weights
    if names == "model":
        dtype = problem.inputs["query"].dtype
        return {name: tensor.astype(dtype) for name, tensor in right.tensors.items()}
    return convert(problem.weights, source="canonical", target=names, spec=right.spec)


def names_of_weights(function: Callable[..., Any], error: BaseException | None) -> str:
    """Return the names that a function receives if it failed because of a name that is not among
    them; else an empty text.
    """
    from parity.explain.conformance.functional import WithParams

    if not isinstance(function, WithParams) or not isinstance(function.params, Mapping):
        return ""
    if not isinstance(error, KeyError) or not error.args:
        return ""
    if error.args[0] in list(function.params):
        return ""
    return f"{function.name} has {and_listed(function.params)}, and --names sets other names"

"""Sources of attention weights: a module, a trace, or a layer and its input."""

from __future__ import annotations

import inspect
import os
from dataclasses import replace
from typing import Any

import numpy as np

from mha_spec import AttentionSpec, InputError, InputTypeError
from parity.measure.backends import backend_of, load_backend
from parity.measure.core import reference
from parity.measure.core.case import Case
from parity.measure.core.problem import Problem, make_problem
from parity.measure.core.stages import run_steps, stage_named
from parity.measure.core.trace import Trace
from parity.measure.core.weights import Weights, is_finite, is_floating
from parity.measure.files.small import check_is_file


def attention_of(module: Any, *inputs: Any, **keywords: Any) -> np.ndarray:
    """Return the attention weights of a `MultiHeadAttention` of any framework, (B, N, T, S).

    Args:
        module: the layer.
        inputs, keywords: arguments of its call, in arrays of its framework.

    Raises:
        TypeError: if the module does not return attention weights.

    Example:
        >>> import mha_torch
        >>> layer = mha_torch.MultiHeadAttention(64, 8)
        >>> parity.attention_of(layer, torch.ones(1, 5, 64)).shape
        (1, 8, 5, 5)
    """
    backend = backend_of(module)
    call = getattr(module, "forward", module)
    if backend is None or "need_weights" not in inspect.signature(call).parameters:
        raise InputTypeError("module", "be a MultiHeadAttention of ours", type(module).__name__)
    _, attn_weights = module(*inputs, **{**keywords, "need_weights": True})
    return load_backend(backend).to_numpy(attn_weights)


def attention_in(trace: Trace, stage: str | None = None) -> tuple[str, np.ndarray]:
    """Return the attention weights of a trace, (B, N, T, S), and their stage.

    Args:
        trace: the trace.
        stage: one of its stages `attn_weights`; by default of the last step.

    Raises:
        ValueError: if the trace has no such stage.
    """
    own_stages = []
    of_module = []
    for name in trace.accumulated:
        if stage_named(name).kind == "attn_weights":
            own_stages.append(name)
        elif stage_named(name).is_attn_weights:
            of_module.append(name)
    stages = [*of_module, *own_stages]
    if not stages:
        why = trace.error or trace.skipped or "no stage attn_weights"
        raise InputError("the trace", "have attention weights", why)
    chosen = stage
    if chosen is None:
        chosen = stages[-1]
    if chosen not in stages:
        raise InputError("stage", f"be one of {', '.join(stages)}", stage=chosen)
    return chosen, trace.accumulated[chosen]


def attention_for(
    weights: Weights,
    spec: AttentionSpec,
    query: np.ndarray,
    key: np.ndarray | None = None,
    *,
    is_causal: bool = False,
) -> np.ndarray:
    """Return the attention weights of a layer for an input, (B, N, T, S), by the float64 reference.

    Args:
        weights: canonical weights.
        spec: the layer.
        query: (B, T, d_in) or (T, d_in).
        key: (B, S, d_kv) or (S, d_kv), for cross-attention.
        is_causal: hide every key after the query's own position.

    Raises:
        TypeError: if an input is not floating-point.
        ValueError: if shapes do not fit the layer, or a value is not finite.
    """
    if spec.shared_kv:
        raise InputError("shared_kv", "be False for an input of tokens alone", shared_kv=True)
    inputs = {"query": input_array("query", query, spec.d_in)}
    if key is not None:
        inputs["key"] = input_array("key", key, spec.d_kv)
        if spec.rope is not None:
            raise InputError("key", "be absent for a layer with RoPE", rope=spec.rope)
    elif spec.d_kv != spec.d_in:
        raise InputError("key", "be given where d_kv is not d_in", d_kv=spec.d_kv, d_in=spec.d_in)
    batch, seq_len, _ = inputs["query"].shape
    seq_len_k = None
    if key is not None:
        key_batch, seq_len_k, _ = inputs["key"].shape
        if key_batch != batch:
            sizes = f"{key_batch} and {batch}"
            raise InputError("key", "have as many sequences as query", sizes)
    case = Case("input", spec, "an input of the user", batch, seq_len, seq_len_k, is_causal)
    wide = {name: weight.astype(np.float64) for name, weight in weights.items()}
    problem = Problem(case, "float64", wide, inputs)
    return run_steps(reference.steps(problem, "float64"))["attn_weights"]


def attention_in_case(weights: Weights, spec: AttentionSpec, case: Case) -> tuple[str, np.ndarray]:
    """Return the attention weights of a layer for the inputs of a case, drawn for its widths, and
    their stage.
    """
    problem = make_problem(replace(case, spec=spec), "float64", weights)
    values = run_steps(reference.steps(problem, "float64"))
    stage = [name for name in values if stage_named(name).kind == "attn_weights"][-1]
    return stage, values[stage]


def read_array(path: str | os.PathLike[str]) -> np.ndarray:
    """Return the array in a `.npy` file, without unpickling.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if it does not hold a single array.
    """
    check_is_file(path, os.stat(path).st_mode)
    try:
        with open(path, "rb") as file:
            return np.lib.format.read_array(file, allow_pickle=False)
    except (ValueError, EOFError):
        raise InputError(path, "hold one array as numpy.save writes it") from None


def input_array(name: str, x: np.ndarray, width: int) -> np.ndarray:
    """Return an input of a layer as (B, tokens, width) in float64.

    Raises:
        TypeError: if it is not floating-point.
        ValueError: if it has the wrong shape, or a value is not finite.
    """
    if not is_floating(x.dtype):
        raise InputTypeError(
            name, "be an array of floating-point numbers", {f"{name}.dtype": x.dtype}
        )
    if x.ndim not in (2, 3) or x.shape[-1] != width or not x.size:
        raise InputError(
            name, f"have shape (B, tokens, {width}) or (tokens, {width})", {name: x.shape}
        )
    if not is_finite(x):
        raise InputError(
            name, "be finite", f"{np.count_nonzero(~np.isfinite(x))} NaN or infinities"
        )
    return x.reshape((1,) * (3 - x.ndim) + x.shape).astype(np.float64)

"""Call a subject with NumPy arrays on any path, and classify its errors."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mha_spec import AttentionSpec
from parity.explain.conformance.subjects import Inputs, Path, Subject
from parity.measure.core.arrays import to_numpy
from parity.measure.core.user_code import user_code
from parity.measure.core.weights import Weights, dtype_named, is_floating


class Refused(Exception):
    """The subject deliberately raised an error, because it does not support the call."""


class Failed(Exception):
    """The subject failed by accident, for example with a NameError, or returned something other
    than an output.

    Attributes:
        words: text for the cell of the matrix.
    """

    def __init__(self, words: str, seen: str) -> None:
        super().__init__(seen)
        self.words = words


REFUSALS = (ValueError, TypeError, NotImplementedError)
LIBRARIES = ("torch", "jax", "jaxlib", "flax", "keras", "equinox", "jaxtyping", "ttnn")


@dataclass(frozen=True)
class Result:
    """Result of a call: output, attention weights if returned, and gradients of the distinct
    inputs.
    """

    output: np.ndarray
    attn_weights: np.ndarray | None
    grads: tuple[np.ndarray, ...]


def run(
    subject: Subject,
    path: Path,
    inputs: Inputs,
    *,
    cotangent: np.ndarray | None = None,
    spec: AttentionSpec | None = None,
    weights: Weights | None = None,
    strided: bool = False,
    seed: int = 0,
    **options: Any,
) -> Result:
    """Call a subject on a path, with the framework's default settings and a fixed seed.

    Args:
        subject: the subject.
        path: the path.
        inputs: split heads (B, N, T, H) or (B, T, E), in any dtype; they are rounded to the path's
            dtype.
        cotangent: cotangent of the output, for the gradients of the inputs.
        spec, weights: of a layer with settable weights.
        strided: pass inputs that are not contiguous in memory.
        seed: seed of torch; JAX subjects hold their own keys.
        options: the mask and other arguments, see `Call`.

    Raises:
        Refused: if the subject raises a deliberate error, see `REFUSALS`, or one of its library's
            own errors.
        Failed: if it raises another error, or does not return floating-point numbers with one row
            per query.
    """
    dtype, swaps = dtype_named(path.dtype), subject.axes == "BTNH"

    def ordered(x: np.ndarray) -> np.ndarray:
        x = x.swapaxes(1, 2) if swaps else x
        return (
            np.ascontiguousarray(x.swapaxes(0, -1)).swapaxes(0, -1)
            if strided
            else np.ascontiguousarray(x)
        )

    given = {id(x): ordered(x.astype(dtype)) for x in inputs}
    if cotangent is not None:
        cotangent = cotangent.swapaxes(1, 2) if swaps else cotangent
        cotangent = np.ascontiguousarray(cotangent.astype(dtype))
    options = {
        name: option
        for name, option in options.items()
        if option is not None and option is not False
    }
    options |= {"need_weights": True} if path.need_weights else {}

    def prepare(from_numpy: Callable[[np.ndarray], Any], kind: Any) -> Attend:
        call = (
            subject.make(path) if spec is None else subject.make(path, spec=spec, weights=weights)
        )
        converted = {
            name: from_numpy(x) if isinstance(x, np.ndarray) else x for name, x in options.items()
        }

        def attend(*arrays: Any) -> tuple[Any, Any]:
            by_id = dict(zip(given, arrays, strict=True))
            output, attn_weights = call(*(by_id[id(x)] for x in inputs), **converted)
            if not isinstance(output, kind):
                raise Failed("no array", f"the output is not an array but {type(output).__name__}")
            return output, attn_weights

        return attend

    try:
        with warnings.catch_warnings(), user_code(subject.name):
            warnings.simplefilter("ignore")
            run_in = _RUNNERS[subject.framework]
            output, attn_weights, grads = run_in(path, [*given.values()], prepare, cotangent, seed)
        output = to_numpy(output)
        _check_output(subject, output, given[id(inputs[0])].shape)
        attn_weights = None if attn_weights is None else to_numpy(attn_weights).astype(np.float64)
        grads = tuple(to_numpy(grad).astype(np.float64) for grad in grads)
    except Failed:
        raise
    except Exception as error:  # other libraries may raise anything
        kind = type(error).__name__
        reason = str(error).strip().split("\n")[0]
        reason = f"{kind}: {reason}" if reason else kind
        if _is_overflow(error):
            raise Failed(
                "overflow",
                f"{reason}; a constant in the code, such as -1e9, is out of range for {path.dtype}",
            ) from error
        if _is_meant(error, subject.framework):
            raise Refused(reason) from error
        raise Failed(kind, reason) from error
    output = output.astype(np.float64)
    return Result(output.swapaxes(1, 2) if swaps else output, attn_weights, grads)


def _is_overflow(error: Exception) -> bool:
    """Return whether a number of the subject's own code, such as -1e9 for hidden scores, does not
    fit its dtype.

    torch raises a RuntimeError for it, as its kernels do for unsupported calls. A deliberate error
    has other words.
    """
    return (
        type(error) is RuntimeError
        and "cannot be converted to type" in str(error)
        and "overflow" in str(error)
    )


def _is_meant(error: Exception, framework: str) -> bool:
    """Return whether an error is deliberate, instead of an accident in the subject's own code."""
    if isinstance(error, REFUSALS) or type(error).__module__.split(".")[0] in LIBRARIES:
        return True
    if type(error) is RuntimeError:
        return framework != "jax"  # raised by their kernels
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    raised_in = (
        "" if trace is None else str(trace.tb_frame.f_globals.get("__name__", "")).split(".")[0]
    )
    return isinstance(error, (AssertionError, LookupError)) and raised_in in LIBRARIES


def _check_output(subject: Subject, output: np.ndarray, query_shape: Sequence[int]) -> None:
    if not is_floating(output.dtype):
        raise Failed(
            f"returns {output.dtype}",
            f"the output is of dtype {output.dtype}, which is not floating point",
        )
    is_fit = (
        output.ndim == 3 and output.shape[:2] == query_shape[:2]
        if subject.is_layer
        else output.shape == query_shape
    )
    if not is_fit:
        wanted = (
            f"({', '.join(map(str, query_shape[:2]))}, width)"
            if subject.is_layer
            else str(tuple(query_shape))
        )
        raise Failed("wrong shape", f"the output is of shape {output.shape}, not {wanted}")


Arrays = Sequence[np.ndarray]
Outputs = tuple[Any, Any, Sequence[Any]]
Attend = Callable[..., tuple[Any, Any]]
Prepare = Callable[[Callable[[np.ndarray], Any], Any], Attend]
"""Prepares the subject, given a framework's conversion of arrays and the type of its outputs."""


def _run_torch(
    path: Path, arrays: Arrays, prepare: Prepare, cotangent: np.ndarray | None, seed: int
) -> Outputs:
    import torch

    from parity.measure.backends.torch import from_numpy

    leaves = [from_numpy(x).requires_grad_(path.grad) for x in arrays]
    with torch.random.fork_rng(devices=[]), torch.set_grad_enabled(path.grad):
        _seed_torch(0)
        attend = prepare(from_numpy, torch.Tensor)
        _seed_torch(seed)
        output, attn_weights = attend(*leaves)
        grads = (
            () if cotangent is None else torch.autograd.grad(output, leaves, from_numpy(cotangent))
        )
    return output, attn_weights, grads


def _seed_torch(seed: int) -> None:
    import torch

    # torch.manual_seed records a traceback for each uninitialized accelerator, which takes half the
    # time of a call.
    seeded = torch if torch.accelerator.is_available() else torch.default_generator
    seeded.manual_seed(seed)


def _run_jax(
    path: Path, arrays: Arrays, prepare: Prepare, cotangent: np.ndarray | None, _: int
) -> Outputs:
    import jax

    from parity.measure.backends.jax import from_numpy

    with (
        jax.numpy_dtype_promotion("standard"),  # the default
        jax.numpy_rank_promotion("allow"),
        jax.default_matmul_precision(
            "highest"
        ),  # no TF32, whose rounding would look like a difference
    ):
        attend, leaves = (
            prepare(from_numpy, (jax.Array, np.ndarray)),
            [from_numpy(x) for x in arrays],
        )
        if not path.grad:
            return *attend(*leaves), ()
        output, backward, attn_weights = jax.vjp(attend, *leaves, has_aux=True)
        grads = () if cotangent is None else backward(from_numpy(cotangent).astype(output.dtype))
    return output, attn_weights, grads


def _run_ttnn(path: Path, arrays: Arrays, prepare: Prepare, *_: Any) -> Outputs:
    import ttnn  # pyright: ignore[reportMissingImports]  (installed in the other environment)

    from parity.measure.backends.tt import from_numpy, lock

    with lock(path.dtype):
        output, attn_weights = prepare(np.asarray, ttnn.Tensor)(*map(from_numpy, arrays))
        return to_numpy(output), None if attn_weights is None else to_numpy(attn_weights), ()


_RUNNERS = {"torch": _run_torch, "jax": _run_jax, "ttnn": _run_ttnn}


def fresh_copies(
    module: Any, change: Callable[[Any], Any] = lambda leaf: leaf
) -> Callable[[], Any]:
    """Return a function that copies an `nnx` module in its current state, random numbers included,
    for another trace.

    Args:
        module: module to copy.
        change: applied to each of its arrays.
    """
    import jax
    from flax import nnx

    graph, state = nnx.split(module)
    return lambda: nnx.merge(graph, jax.tree.map(change, state))

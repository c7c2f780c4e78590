"""Call a subject with NumPy arrays on any path, and classify its errors."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mha_spec import AttentionSpec
from parity.explain.conformance.subjects import (
    Call,
    Inputs,
    Path,
    Subject,
    by_letters,
    from_letters,
)
from parity.measure.core.arrays import to_numpy
from parity.measure.core.user_code import user_code
from parity.measure.core.weights import Weights, dtype_named, is_floating


class RejectedCall(Exception):
    """The subject deliberately raised an error, because it does not support the call."""


class Failed(Exception):
    """The subject failed by accident, for example with a NameError, or returned something other
    than an output.

    Attributes:
        words: text for the cell of the matrix.
    """

    def __init__(self, words: str, reason: str) -> None:
        super().__init__(reason)
        self.words = words


REJECTIONS = (ValueError, TypeError, NotImplementedError)
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
        spec, weights: specification and weights of a layer with settable weights.
        strided: pass inputs that are not contiguous in memory.
        seed: seed of torch; JAX subjects hold their own keys.
        options: the mask and other arguments, see `Call`.

    Raises:
        RejectedCall: if the subject raises a deliberate error, see `REJECTIONS`, or one of its
            library's own errors.
        Failed: if it raises any other error, or does not return floating-point numbers with one row
            per query.
    """
    arrays: dict[str, np.ndarray] = {}  # equal inputs are one array for the subject too
    for letters, x in by_letters(inputs).items():
        arrays[letters] = _as_argument(x, subject, path, strided)
    query, _, _ = from_letters(arrays)
    if cotangent is not None:
        cotangent = _as_argument(cotangent, subject, path)
    requested: dict[str, Any] = {}
    for name, option in options.items():
        if option is not None and option is not False:
            requested[name] = option
    if path.need_weights:
        requested["need_weights"] = True
    call = _SubjectCall(
        subject,
        path,
        arrays=arrays,
        cotangent=cotangent,
        options=requested,
        spec=spec,
        weights=weights,
        seed=seed,
    )
    try:
        with warnings.catch_warnings(), user_code(subject.name):
            warnings.simplefilter("ignore")
            returned = _RUNNERS[subject.framework](call)
        output = to_numpy(returned.output)
        _check_output(subject, output, query.shape)
        attn_weights = None
        if returned.attn_weights is not None:
            attn_weights = to_numpy(returned.attn_weights).astype(np.float64)
        grads = tuple(to_numpy(grad).astype(np.float64) for grad in returned.grads)
    except Failed:
        raise
    except Exception as error:  # other libraries may raise anything
        raise _classified(error, subject, path) from error
    output = output.astype(np.float64)
    if subject.axes == "BTNH":
        output = output.swapaxes(1, 2)
    return Result(output, attn_weights, grads)


def _as_argument(x: np.ndarray, subject: Subject, path: Path, strided: bool = False) -> np.ndarray:
    """Return an array in the path's dtype and in the order of axes of the subject."""
    x = x.astype(dtype_named(path.dtype))
    if subject.axes == "BTNH":
        x = x.swapaxes(1, 2)
    if strided:
        return np.ascontiguousarray(x.swapaxes(0, -1)).swapaxes(0, -1)
    return np.ascontiguousarray(x)


# ---- Errors --------------------------------------------------------------------------------------


def _classified(error: Exception, subject: Subject, path: Path) -> RejectedCall | Failed:
    """Return the error of a subject as deliberate or accidental."""
    kind = type(error).__name__
    reason = kind
    first_line = str(error).strip().split("\n")[0]
    if first_line:
        reason = f"{kind}: {first_line}"
    if _is_overflow(error):
        return Failed(
            "overflow",
            f"{reason}; a constant in the code, such as -1e9, is out of range for {path.dtype}",
        )
    if _is_deliberate(error, subject.framework):
        return RejectedCall(reason)
    return Failed(kind, reason)


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


def _is_deliberate(error: Exception, framework: str) -> bool:
    """Return whether an error is deliberate, instead of an accident in the subject's own code."""
    if isinstance(error, REJECTIONS) or _top_package(type(error).__module__) in LIBRARIES:
        return True
    if type(error) is RuntimeError:
        return framework != "jax"  # raised by their kernels
    if isinstance(error, (AssertionError, LookupError)):
        return _raised_in(error) in LIBRARIES
    return False


def _raised_in(error: Exception) -> str:
    """Return the top-level package whose code raised an error; empty if unknown."""
    trace = error.__traceback__
    if trace is None:
        return ""
    while trace.tb_next is not None:
        trace = trace.tb_next
    return _top_package(str(trace.tb_frame.f_globals.get("__name__", "")))


def _top_package(module_name: str) -> str:
    return module_name.split(".")[0]


def _check_output(subject: Subject, output: np.ndarray, query_shape: Sequence[int]) -> None:
    """Check that an output is floating point, with one row per query.

    Raises:
        Failed: if it is not.
    """
    if not is_floating(output.dtype):
        raise Failed(
            f"returns {output.dtype}",
            f"the output is of dtype {output.dtype}, which is not floating point",
        )
    if subject.is_layer:  # its outputs may differ in width from its inputs
        has_a_row_per_query = output.ndim == 3 and output.shape[:2] == query_shape[:2]
        expected = f"({', '.join(map(str, query_shape[:2]))}, width)"
    else:
        has_a_row_per_query = output.shape == query_shape
        expected = str(tuple(query_shape))
    if not has_a_row_per_query:
        raise Failed("wrong shape", f"the output is of shape {output.shape}, not {expected}")


# ---- The frameworks ------------------------------------------------------------------------------


@dataclass(frozen=True)
class _SubjectCall:
    """One call of a subject, with NumPy arrays, to be run in its framework.

    Attributes:
        subject, path: what is called, and how.
        arrays: the distinct inputs, see `by_letters`.
        cotangent: cotangent of the output; None for no gradients.
        options: arguments other than the inputs, see `Call`.
        spec, weights: specification and weights of a layer with settable weights.
        seed: seed of torch for the call.
    """

    subject: Subject
    path: Path
    arrays: Mapping[str, np.ndarray]
    cotangent: np.ndarray | None
    options: Mapping[str, Any]
    spec: AttentionSpec | None
    weights: Weights | None
    seed: int

    def make(self) -> Call:
        """Return the subject's callable for the path."""
        if self.spec is None:
            return self.subject.make(self.path)
        return self.subject.make(self.path, spec=self.spec, weights=self.weights)

    def options_in(self, from_numpy: Callable[[np.ndarray], Any]) -> dict[str, Any]:
        """Return the options with arrays of a framework."""
        options = dict(self.options)
        for name, option in options.items():
            if isinstance(option, np.ndarray):
                options[name] = from_numpy(option)
        return options

    def attend(
        self, call: Call, arrays: Sequence[Any], options: Mapping[str, Any], array_type: Any
    ) -> tuple[Any, Any]:
        """Return output and attention weights for the distinct inputs in a framework's arrays.

        Raises:
            Failed: if the output is not an array of the framework.
        """
        inputs = from_letters(dict(zip(self.arrays, arrays, strict=True)))
        output, attn_weights = call(*inputs, **options)
        if not isinstance(output, array_type):
            reason = f"the output is not an array but {type(output).__name__}"
            raise Failed("no array", reason)
        return output, attn_weights


@dataclass(frozen=True)
class _Returned:
    """Output, attention weights and gradients of a call, in the framework's arrays."""

    output: Any
    attn_weights: Any
    grads: Sequence[Any] = ()


def _run_torch(call: _SubjectCall) -> _Returned:
    import torch

    from parity.measure.backends.torch import from_numpy

    leaves = [from_numpy(x).requires_grad_(call.path.grad) for x in call.arrays.values()]
    with torch.random.fork_rng(devices=[]), torch.set_grad_enabled(call.path.grad):
        _seed_torch(0)
        attention = call.make()
        options = call.options_in(from_numpy)
        _seed_torch(call.seed)
        output, attn_weights = call.attend(attention, leaves, options, torch.Tensor)
        if call.cotangent is None:
            return _Returned(output, attn_weights)
        grads = torch.autograd.grad(output, leaves, from_numpy(call.cotangent))
    return _Returned(output, attn_weights, grads)


def _seed_torch(seed: int) -> None:
    import torch

    # torch.manual_seed records a traceback for each uninitialized accelerator, which takes half the
    # time of a call.
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def _run_jax(call: _SubjectCall) -> _Returned:
    import jax

    from parity.measure.backends.jax import from_numpy

    with (
        # The defaults of JAX, whatever the settings of this process.
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
        # No TF32, whose rounding would look like a difference.
        jax.default_matmul_precision("highest"),
    ):
        attention = call.make()
        options = call.options_in(from_numpy)
        leaves = [from_numpy(x) for x in call.arrays.values()]

        def attend(*arrays: Any) -> tuple[Any, Any]:
            return call.attend(attention, arrays, options, (jax.Array, np.ndarray))

        if not call.path.grad:
            return _Returned(*attend(*leaves))
        output, backward, attn_weights = jax.vjp(attend, *leaves, has_aux=True)
        if call.cotangent is None:
            return _Returned(output, attn_weights)
        grads = backward(from_numpy(call.cotangent).astype(output.dtype))
    return _Returned(output, attn_weights, grads)


def _run_ttnn(call: _SubjectCall) -> _Returned:
    import ttnn  # pyright: ignore[reportMissingImports]  (installed in the other environment)

    from parity.measure.backends.tt import from_numpy, lock

    with lock(call.path.dtype):
        attention = call.make()
        options = call.options_in(np.asarray)
        leaves = [from_numpy(x) for x in call.arrays.values()]
        output, attn_weights = call.attend(attention, leaves, options, ttnn.Tensor)
        # Arrays leave the device before it is unlocked.
        if attn_weights is not None:
            attn_weights = to_numpy(attn_weights)
        return _Returned(to_numpy(output), attn_weights)


_RUNNERS = {"torch": _run_torch, "jax": _run_jax, "ttnn": _run_ttnn}


def _unchanged(leaf: Any) -> Any:
    return leaf


def fresh_copies(module: Any, change: Callable[[Any], Any] = _unchanged) -> Callable[[], Any]:
    """Return a function that copies an `nnx` module in its current state, random numbers included,
    for a second trace.

    Args:
        module: module to copy.
        change: applied to each of its arrays.
    """
    import jax
    from flax import nnx

    graph, state = nnx.split(module)

    def fresh_copy() -> Any:
        return nnx.merge(graph, jax.tree.map(change, state))

    return fresh_copy

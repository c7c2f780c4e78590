"""tt backend: loading of canonical weights into `mha_tt` modules, and running cases.

Without a card or a simulator, cases run on a mock board, `MHA_TT_MOCK` (p150 by default), which
validates all programs. Values are then those recorded from such a device for the same program
(`ttnn_mock.replayed`), or else the values of ttnn's golden functions (`ttnn_mock.shadow`).
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from mha_spec import InputError, InputTypeError

os.environ.setdefault("LOGURU_LEVEL", "WARNING")  # ttnn logs its whole configuration on import
import ttnn  # pyright: ignore[reportMissingImports]  (it lies in the other environment)

import mha_tt
import mha_tt.plain
import ttnn_mock
from mha_spec import AttentionSpec
from mha_tt.layout import TILE, feature_indices_of, padded_features
from parity.measure.backends.port import FilledModule, Shapes, kind_of, kind_of_tutorial
from parity.measure.core.case import Case
from parity.measure.core.problem import Problem
from parity.measure.core.weights import Weights, check_weights
from ttnn_mock.goldens import GOLDENS

RECORDINGS = Path(__file__).parents[3] / "parity_lab" / "recorded"
"""Recordings in a clone of the repository, one folder per kind of device: see `tools/record-tt`."""

DTYPES = {"float32": ttnn.float32, "bfloat16": ttnn.bfloat16}


def from_numpy(x: np.ndarray) -> ttnn.Tensor:
    """Return a tensor of the same values and dtype."""
    return mha_tt.upload(x, device=open_device(), dtype=DTYPES[x.dtype.name])


def to_numpy(x: ttnn.Tensor) -> np.ndarray:
    """Return the values of a tensor on host or device.

    Integers and float32 keep their dtype; bfloat16 and block formats (8 or 4 bits) become
    bfloat16.
    """
    kind = str(x.dtype).rpartition(".")[2].lower()
    if x.storage_type() == ttnn.StorageType.DEVICE:
        values = mha_tt.download(x)
    else:
        values = ttnn_mock.value_of(x)
        if values is None:
            values = _values_on_host(x, is_integer="int" in kind)
    if "int" in kind:
        return values.astype(kind)
    if kind == "float32":
        return values
    return values.astype(ml_dtypes.bfloat16)


def _values_on_host(x: ttnn.Tensor, *, is_integer: bool) -> np.ndarray:
    if is_integer:
        return x.to_numpy()
    # bfloat16 converts to no NumPy dtype.
    return ttnn._ttnn.operations.core.to_dtype(x, ttnn.float32).to_numpy()


_open_devices = ExitStack()
_devices: list[ttnn.MeshDevice] = []
"""The device of cases, if it is open."""


def open_device(shape: tuple[int, int] | None = None) -> ttnn.MeshDevice:
    """Return the device of cases, kept open until the process ends or a different shape is
    requested.

    Args:
        shape: shape of a mesh of chips; default: the open device, or one chip.
    """
    if not _devices or shape not in (None, tuple(_devices[-1].shape)):
        _choose_target()
        _close()
        if shape is None:
            opening = mha_tt.open_device()
        else:
            opening = mha_tt.open_mesh(shape)
        _devices.append(_open_devices.enter_context(opening))
    return _devices[-1]


def num_chips() -> int:
    """Return the number of chips of the board, or of all available ones."""
    _choose_target()
    return ttnn.get_num_devices()


def _choose_target() -> None:
    """Use a mock board if there is nothing else."""
    if mha_tt.target() is None:
        ttnn_mock.use(os.environ.get("MHA_TT_MOCK", "p150"))


@atexit.register
def _close() -> None:
    _devices.clear()
    _open_devices.close()


def why_skipped(case: Case, dtype: str) -> str | None:
    """Return why a case cannot run in a dtype, or None if it can."""
    if dtype not in DTYPES:
        return f"ttnn has no {dtype}"
    return None


# ---- Weights -------------------------------------------------------------------------------------


def load_into(module: Any, weights: Mapping[str, np.ndarray]) -> Any:
    """Fill a module of `mha_tt` from canonical weights, bit for bit; unchanged on errors.

    A module with bfloat8_b weights accepts bfloat16 weights and rounds them.
    """
    weights = check_weights(weights, spec_of(module))
    expected = np.dtype(ml_dtypes.bfloat16)
    if module.weight_dtype == ttnn.float32:
        expected = np.dtype(np.float32)
    for name, weight in weights.items():
        if weight.dtype != expected:
            raise InputTypeError(
                "weights", f"be {expected} for the module", {f"{name}.dtype": weight.dtype}
            )
    module.load_weights(weights)
    return module


def spec_of(module: Any) -> AttentionSpec:
    """Return the specification of a module of `mha_tt`."""
    return module.full_spec


def weights_of(module: Any) -> Weights:
    """Return the canonical weights of a module of `mha_tt`, bit for bit; bfloat8_b as bfloat16."""
    weights = mha_tt.download_weights(
        module.weights, module.full_spec, heads_axis=module.heads_axis
    )
    if module.weight_dtype != ttnn.float32:
        weights = {name: weight.astype(ml_dtypes.bfloat16) for name, weight in weights.items()}
    return weights


# ---- Cases ---------------------------------------------------------------------------------------


SIBLING = mha_tt
GRADIENT_PATHS = ()  # ttnn has no automatic differentiation


def argument(x: np.ndarray) -> np.ndarray:
    """Return the argument unchanged: it stays on the host."""
    return x


whole_argument = argument


class Padded(Shapes):
    """Shapes on the device, where features of heads and slots of caches are padded to whole tiles.

    A gate has one value for each head, (B, T, N), or one for each feature, which is padded.
    """

    def from_numpy(self, name: str, x: np.ndarray) -> ttnn.Tensor:
        if name == "gate" and x.shape[2] != self.spec.num_heads:
            heads = x.reshape(*x.shape[:2], self.spec.num_heads, -1).swapaxes(1, 2)
            return mha_tt.combine_heads(self.from_numpy("context", heads))
        if name == "gate":
            return self.port.from_numpy(x)
        if name == "latents":
            return from_numpy(self.padded(x, "kv_a_proj"))
        return self.port.from_numpy(self.padded(x, self.like(name)))

    def to_numpy(self, name: str, x: ttnn.Tensor) -> np.ndarray:
        if name == "output":
            if self.spec.out_proj:
                return to_numpy(x)
            return self._of_heads(x)
        if name == "gate":
            if x.shape[2] == self.own_heads:
                return to_numpy(x)
            return self._of_heads(x)
        if name == "latents":
            return self.real(to_numpy(x), "kv_a_proj")
        return self.real(self.port.to_numpy(x), self.like(name))

    def like(self, name: str) -> str:
        """Return a projection with the same padding of heads as a stage."""
        if name in ("v", "values", "context"):
            return "v_proj"
        if self.spec.latent is None:
            return "k_proj"
        if self.spec.latent.q_rank is None:
            return "q_proj"
        return "q_b_proj"

    def padded(self, x: np.ndarray, projection: str) -> np.ndarray:
        """Return heads with padded features, as after a projection."""
        padded = np.zeros((*x.shape[:-1], padded_features(projection, self.spec)), x.dtype)
        padded[..., feature_indices_of(projection, self.spec)] = x
        return padded

    def real(self, padded: np.ndarray, projection: str) -> np.ndarray:
        """Return heads without padded features, which must be 0."""
        indices = feature_indices_of(projection, self.spec)
        heads = padded[..., indices]
        # Kernels may make the padding of a NaN token infinite: then its features are lost anyway.
        is_lost = ~np.isfinite(heads).any(axis=-1)
        if np.delete(padded, indices, axis=-1)[~is_lost].any():
            raise InputError("features that pad a head", "be 0", f"others in {padded.shape}")
        return heads

    @property
    def own_heads(self) -> int:
        """Number of query heads on the device."""
        return self.spec.num_heads

    def _of_heads(self, x: ttnn.Tensor) -> np.ndarray:
        """Return concatenated features of heads without padding."""
        heads = self.to_numpy("context", mha_tt.split_heads(x, self.own_heads))
        return heads.swapaxes(1, 2).reshape(x.shape[0], x.shape[1], -1)

    def cache_from_numpy(self, parts: Sequence[np.ndarray]) -> Any:
        *arrays, lengths = parts
        capacity = arrays[0].shape[2]
        tensors = []
        for name, x in zip(self.cache_parts, arrays, strict=False):  # without lengths
            whole_tiles = np.pad(x, ((0, 0), (0, 0), (0, -capacity % TILE), (0, 0)))
            tensors.append(self.from_numpy(name, whole_tiles))
        return self.cache_kind(*tensors, lengths, capacity)

    def cache_to_numpy(self, cache: Any) -> dict[str, np.ndarray]:
        parts: dict[str, np.ndarray] = {}
        for name in self.cache_parts[:-1]:
            slots = self.to_numpy(name, getattr(cache, name))
            if slots[:, :, cache.capacity :].any():
                raise InputError("slots beyond the capacity", "be 0", f"others in the {name}")
            parts[name] = slots[:, :, : cache.capacity]
        return {**parts, "lengths": cache.lengths}


SHAPES = Padded


def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call the function without compilation."""
    return function(SIBLING, *arguments)


class TtModule(FilledModule):
    """Module with the weights of a problem, in evaluation mode."""

    def __init__(self, problem: Problem) -> None:
        kind = kind_of(mha_tt, problem.case)
        rng = np.random.default_rng(0)  # random weights are uploaded, then replaced
        module = kind(
            problem.spec, device=open_device(), dtype=DTYPES[problem.dtype], rng=rng
        ).eval()
        self.module: Any = load_into(module, problem.weights)
        self.weights = self.module.weights


filled = TtModule


def tutorial(problem: Problem) -> Any:
    """Return the tutorial's module with the weights of a problem, in evaluation mode."""
    spec, kind = problem.spec, kind_of_tutorial(mha_tt, problem.case)
    module = kind(
        spec.d_model,
        spec.num_heads,
        bias=spec.out_bias,
        device=open_device(),
        dtype=DTYPES[problem.dtype],
    )
    module.load_weights(problem.weights)
    module.eval()
    return module


# ---- Environment ---------------------------------------------------------------------------------


def arithmetic() -> str:
    """Return the arithmetic of the device; without one, or on a mock board, the arithmetic of
    golden functions.
    """
    if mha_tt.target() in (None, "mock"):
        return "ieee"
    return "tensix"


def golden_function(operation: Any) -> Callable[..., Any] | None:
    """Return the golden function of a ttnn operation: ours if ttnn's is wrong or missing."""
    return GOLDENS.get(operation.python_fully_qualified_name, operation.golden_function)


@contextmanager
def lock(dtype: str) -> Iterator[dict[str, Any]]:
    """Report the settings that affect a device's results, which modules fix; on a mock board,
    compute values.
    """
    device = open_device()
    is_mock = mha_tt.target() == "mock"
    with ExitStack() as stack:
        if is_mock:
            stack.enter_context(ttnn_mock.shadow())
        yield {
            "arithmetic": arithmetic(),
            "compute_kernel_config": mha_tt.describe_config(mha_tt.accurate_config(device)),
            "values": "golden functions" if is_mock else "device",
        }


@contextmanager
def replayed(problem: Problem) -> Iterator[ttnn_mock.Replay | None]:
    """Replay, on a mock board, the recording of a problem on a device of the same architecture and
    grid.
    """
    path = recording_path(problem.case.name, problem.dtype)
    if mha_tt.target() != "mock" or not path.exists():
        yield None
        return
    with ttnn_mock.replayed(ttnn_mock.Recording.load(path)) as replay:
        yield replay


def recording_path(case: str, dtype: str) -> Path:
    """Return the path of a case's recording for this kind of device."""
    architecture, grid = _architecture()
    return RECORDINGS / f"{architecture}-{grid.x}x{grid.y}" / f"{case}-{dtype}.npz"


def environment() -> dict[str, Any]:
    """Return versions and devices."""
    architecture, grid = _architecture()
    return {
        "ttnn": metadata.version("ttnn"),
        "device": mha_tt.describe_target(),
        "devices": [f"{architecture}, {grid.x} x {grid.y} cores"] * open_device().get_num_devices(),
    }


def _architecture() -> tuple[str, Any]:
    """Return the architecture of the device, and its grid of cores."""
    device = open_device()
    return str(device.arch()).rpartition(".")[2].lower(), device.compute_with_storage_grid_size()

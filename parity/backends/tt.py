"""The tt backend: canonical weights into `mha_tt` modules, and cases through them.

Without a card or a simulator the cases run on a mock board, `MHA_TT_MOCK` (p150 by default), which validates every
program. The values are then those that a device of that kind gave the same program, where that is recorded
(`mha_tt.recording`), else those of ttnn's golden functions (`mha_tt.mock`).
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

from mha_spec import Refusal, WrongType

os.environ.setdefault("LOGURU_LEVEL", "WARNING")  # ttnn logs its whole configuration when it is imported
import ttnn  # pyright: ignore[reportMissingImports]  (it lies in the other environment)

import mha_tt
from mha_spec import AttentionSpec
from mha_tt.layout import TILE, padded_features, slots_of
from mha_tt.mock.goldens import GOLDENS
from mha_tt.recording import Recording, Replay
from parity.backends.port import FilledModule, Shapes, kind_of
from parity.core.case import Case
from parity.core.problem import Problem
from parity.core.weights import Weights, check_weights

RECORDINGS = Path(__file__).parents[2] / "parity_lab" / "recorded"
"""Where a clone of the repository has what devices gave, a folder for each kind: see `tools/record-tt`."""

DTYPES = {"float32": ttnn.float32, "bfloat16": ttnn.bfloat16}


def from_numpy(x: np.ndarray) -> ttnn.Tensor:
    """The tensor of the same values and dtype."""
    return mha_tt.upload(x, device=open_device(), dtype=DTYPES[x.dtype.name])


def to_numpy(x: ttnn.Tensor) -> np.ndarray:
    """Return the values of a tensor wherever it lies; those of bfloat16 and of blocks of 8 or 4 bits as bfloat16."""
    kind = str(x.dtype).rpartition(".")[2].lower()
    is_on_device = x.storage_type() == ttnn.StorageType.DEVICE
    values = mha_tt.download(x) if is_on_device else mha_tt.mock.value_of(x)
    if values is None:  # it lies on the host, whose conversion of bfloat16 gives none of NumPy's dtypes
        values = x.to_numpy() if "int" in kind else ttnn._ttnn.operations.core.to_dtype(x, ttnn.float32).to_numpy()
    if "int" in kind:
        return values.astype(kind)
    return values if kind == "float32" else values.astype(ml_dtypes.bfloat16)


_held = ExitStack()
_devices: list[ttnn.MeshDevice] = []


def open_device(shape: tuple[int, int] | None = None) -> ttnn.MeshDevice:
    """The device that cases run on, opened once and kept open until the process ends or another shape is asked for.

    Args:
        shape: of a mesh of chips; when absent whatever is open, or one chip.
    """
    if not _devices or shape not in (None, tuple(_devices[-1].shape)):
        _choose_target()
        _close()
        opened = mha_tt.open_device() if shape is None else mha_tt.open_mesh(shape)
        _devices.append(_held.enter_context(opened))
    return _devices[-1]


def num_chips() -> int:
    """The chips of the board, or of all that are here."""
    _choose_target()
    return ttnn.get_num_devices()


def _choose_target() -> None:
    """Use a mock board where there is nothing else."""
    if mha_tt.target() is None:
        mha_tt.mock.use(os.environ.get("MHA_TT_MOCK", "p150"))


@atexit.register
def _close() -> None:
    _devices.clear()
    _held.close()


def why_skipped(case: Case, dtype: str) -> str | None:
    """Why a case cannot run in a dtype, or None if it can."""
    return None if dtype in DTYPES else f"ttnn has no {dtype}"


# ---- Weights ---------------------------------------------------------------------------------------------------------


def load_into(module: Any, weights: Mapping[str, np.ndarray]) -> Any:
    """Fill a module of `mha_tt` from canonical weights, bit for bit, or leave it as it was.

    A module with bfloat8_b weights takes those of bfloat16 and rounds them.
    """
    weights = check_weights(weights, spec_of(module))
    expected = np.dtype(np.float32 if module.weight_dtype == ttnn.float32 else ml_dtypes.bfloat16)
    for name, weight in weights.items():
        if weight.dtype != expected:
            raise WrongType("weights", f"be {expected} for the module", {f"{name}.dtype": weight.dtype})
    module.load_weights(weights)
    return module


def spec_of(module: Any) -> AttentionSpec:
    """The specification of a module of `mha_tt`."""
    return module.full_spec


def weights_of(module: Any) -> Weights:
    """The canonical weights of a module of `mha_tt`, bit for bit; those of bfloat8_b as bfloat16."""
    held = mha_tt.download_weights(module.weights, module.full_spec, heads=module.heads)
    if module.weight_dtype != ttnn.float32:
        held = {name: weight.astype(ml_dtypes.bfloat16) for name, weight in held.items()}
    return held


# ---- Cases -----------------------------------------------------------------------------------------------------------


SIBLING = mha_tt
GRADIENT_PATHS = ()  # ttnn has no automatic differentiation


def beside(x: np.ndarray) -> np.ndarray:
    """What stays on the host."""
    return x


whole = beside


class Padded(Shapes):
    """The features of a head and the slots of a cache are padded to whole tiles on the device."""

    def from_numpy(self, name: str, x: np.ndarray) -> ttnn.Tensor:
        if name == "gate" and x.shape[2] != self.spec.num_heads:
            heads = x.reshape(*x.shape[:2], self.spec.num_heads, -1).swapaxes(1, 2)
            return mha_tt.combine_heads(self.from_numpy("context", heads))
        if name == "latents":
            return from_numpy(self.padded(x, "kv_a_proj"))
        return self.port.from_numpy(x if name == "gate" else self.padded(x, self.like(name)))

    def to_numpy(self, name: str, x: ttnn.Tensor) -> np.ndarray:
        if name == "output":
            return to_numpy(x) if self.spec.out_proj else self._of_heads(x)
        if name == "gate":
            return to_numpy(x) if x.shape[2] == self.own_heads else self._of_heads(x)
        if name == "latents":
            return self.real(to_numpy(x), "kv_a_proj")
        return self.real(self.port.to_numpy(x), self.like(name))

    def like(self, name: str) -> str:
        """Name a projection whose heads are padded as those of a stage are."""
        if name in ("v", "values", "context"):
            return "v_proj"
        if self.spec.latent is None:
            return "k_proj"
        return "q_proj" if self.spec.latent.q_rank is None else "q_b_proj"

    def padded(self, x: np.ndarray, part: str) -> np.ndarray:
        """Heads with the features that pad them."""
        padded = np.zeros((*x.shape[:-1], padded_features(part, self.spec)), x.dtype)
        padded[..., slots_of(part, self.spec)] = x
        return padded

    def real(self, padded: np.ndarray, part: str) -> np.ndarray:
        """Heads without the features that pad them, which must be 0."""
        slots = slots_of(part, self.spec)
        heads = padded[..., slots]
        is_lost = ~np.isfinite(heads).any(axis=-1)  # of a token that is NaN, which kernels may make infinite
        if np.delete(padded, slots, axis=-1)[~is_lost].any():
            raise Refusal("features that pad a head", "be 0", f"others in {padded.shape}")
        return heads

    @property
    def own_heads(self) -> int:
        """How many query heads the device has."""
        return self.spec.num_heads

    def _of_heads(self, x: ttnn.Tensor) -> np.ndarray:
        """Features of heads, side by side, without those that pad them."""
        heads = self.to_numpy("context", mha_tt.split_heads(x, self.own_heads))
        return heads.swapaxes(1, 2).reshape(x.shape[0], x.shape[1], -1)

    def cache_from_numpy(self, parts: Sequence[np.ndarray]) -> Any:
        *slots, lengths = parts
        capacity = slots[0].shape[2]
        slots = [np.pad(x, ((0, 0), (0, 0), (0, -capacity % TILE), (0, 0))) for x in slots]
        return self.cache_kind(*map(self.from_numpy, self.cache_parts, slots), lengths, capacity)

    def cache_to_numpy(self, cache: Any) -> dict[str, np.ndarray]:
        held: dict[str, np.ndarray] = {}
        for name in self.cache_parts[:-1]:
            slots = self.to_numpy(name, getattr(cache, name))
            if slots[:, :, cache.capacity :].any():
                raise Refusal("slots beyond the capacity", "be 0", f"others in the {name}")
            held[name] = slots[:, :, : cache.capacity]
        return {**held, "lengths": cache.lengths}


SHAPES = Padded


def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """The function called as it is."""
    return function(SIBLING, *arguments)


class TtModule(FilledModule):
    """A module with the weights of a problem, in evaluation."""

    def __init__(self, problem: Problem) -> None:
        kind = kind_of(mha_tt, problem.case)
        rng = np.random.default_rng(0)  # what is drawn is replaced, but uploaded before
        module = kind(problem.spec, device=open_device(), dtype=DTYPES[problem.dtype], rng=rng).eval()
        self.module: Any = load_into(module, problem.weights)
        self.weights = self.module.weights


filled = TtModule


# ---- Surroundings ----------------------------------------------------------------------------------------------------


def arithmetic() -> str:
    """Name the arithmetic of the device: that of golden functions on a mock board, or where there is none."""
    return "ieee" if mha_tt.target() in (None, "mock") else "tensix"


def golden_function(operation: Any) -> Callable[..., Any] | None:
    """Return the golden function of an operation of ttnn: ours where its own is wrong or missing."""
    return GOLDENS.get(operation.python_fully_qualified_name, operation.golden_function)


@contextmanager
def lock(dtype: str) -> Iterator[dict[str, Any]]:
    """Report what sets the numbers of a device, which is fixed by each module; on a mock board, compute the values."""
    device = open_device()
    is_mock = mha_tt.target() == "mock"
    with ExitStack() as stack:
        if is_mock:
            stack.enter_context(mha_tt.mock.shadow())
        yield {
            "arithmetic": arithmetic(),
            "compute_kernel_config": mha_tt.describe_config(mha_tt.accurate_config(device)),
            "values": "golden functions" if is_mock else "device",
        }


@contextmanager
def replayed(problem: Problem) -> Iterator[Replay | None]:
    """Give on a mock board what was recorded of a problem on a device of the same architecture and grid."""
    path = recording_path(problem.case.name, problem.dtype)
    if mha_tt.target() != "mock" or not path.exists():
        yield None
        return
    with mha_tt.recording.replayed(Recording.load(path)) as replay:
        yield replay


def recording_path(case: str, dtype: str) -> Path:
    """Where what a device as the one here gave for a case is kept."""
    architecture, grid = _architecture()
    return RECORDINGS / f"{architecture}-{grid.x}x{grid.y}" / f"{case}-{dtype}.npz"


def environment() -> dict[str, Any]:
    """Versions and devices."""
    architecture, grid = _architecture()
    return {
        "ttnn": metadata.version("ttnn"),
        "device": mha_tt.describe_target(),
        "devices": [f"{architecture}, {grid.x} x {grid.y} cores"] * open_device().get_num_devices(),
    }


def _architecture() -> tuple[str, Any]:
    """That of the device, and its grid of cores."""
    device = open_device()
    return str(device.arch()).rpartition(".")[2].lower(), device.compute_with_storage_grid_size()

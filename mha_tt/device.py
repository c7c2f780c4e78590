"""Device: detection, opening, arithmetic, uploads and downloads."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import ttnn

from mha_spec import InputError, InputTypeError
from mha_tt.arrays import as_dtype
from mha_tt.checks import check_dtype, check_on_device
from ttnn_mock.hooks import observers, readers

# ---- Opening -------------------------------------------------------------------------------------


def target() -> str | None:
    """Return the kind of device that would be opened now: `mock`, `simulator`, `silicon`, or None.

    ttnn does not distinguish mock boards from cards, so the environment decides, in the order in
    which ttnn reads it.
    """
    if os.environ.get("TT_METAL_MOCK_CLUSTER_DESC_PATH"):
        return "mock"
    if os.environ.get("TT_METAL_SIMULATOR"):
        return "simulator"
    if _cards():
        return "silicon"
    return None


def describe_target() -> str:
    """Describe the device that would be opened now, and why."""
    kind = target()
    if kind == "mock":
        board = Path(os.environ["TT_METAL_MOCK_CLUSTER_DESC_PATH"]).stem
        return f"mock {board} (no hardware: ttnn validates every program and computes nothing)"
    if kind == "simulator":
        compiler = _compiler() or "none found"
        simulator = os.environ["TT_METAL_SIMULATOR"]
        return f"simulator (TT_METAL_SIMULATOR={simulator}; compiler: {compiler})"
    if kind == "silicon":
        return f"silicon ({', '.join(_cards())})"
    return "nothing (no /dev/tenstorrent/*, TT_METAL_SIMULATOR is not set, no mock board is in use)"


@contextmanager
def open_device(device_id: int = 0, *, trace_region_size: int = 0) -> Iterator[ttnn.MeshDevice]:
    """Open a device for a `with` block.

    Args:
        device_id: number of the card.
        trace_region_size: bytes reserved for traces (`ttnn.begin_trace_capture`).

    Yields:
        Device: silicon, a simulator or a mock board, see `target`.

    Raises:
        RuntimeError: if there is none or it does not open; reports the devices searched for.
    """
    if target() == "simulator" and (reason := _simulator_lacks()):
        raise RuntimeError(f"{reason}; tools/tt-simulator sets it up")
    with _opening(f"device {device_id}"):
        if target() == "mock" and ttnn.get_num_devices() > 1:
            options = _dispatch_of_mock()
        else:
            options = {}
        device = ttnn.open_device(
            device_id=device_id, trace_region_size=trace_region_size, **options
        )
    try:
        yield device
    finally:
        ttnn.close_device(device)


@contextmanager
def _opening(what: str) -> Iterator[None]:
    """Raise an error without a device; if opening fails, report the device searched for."""
    where = describe_target()
    if target() is None:
        raise RuntimeError(
            f"a device must be present to be opened, found {where}; ttnn_mock.board() needs none"
        )
    try:
        yield
    except RuntimeError as error:
        reason = str(error).strip().partition("\n")[0]
        raise RuntimeError(f"{what} must open, looked for {where}, got: {reason}") from error


def _dispatch_of_mock() -> dict[str, ttnn.DispatchCoreConfig]:
    """Return options of a mock board of several chips, for which the default dispatch cores are not
    validated.
    """
    return {"dispatch_core_config": ttnn.DispatchCoreConfig(ttnn.DispatchCoreType.WORKER)}


def _simulator_lacks() -> str | None:
    """Describe a missing part of a simulator, which ttnn barely reports; None if it is complete."""
    simulator = Path(os.environ["TT_METAL_SIMULATOR"])
    if not simulator.exists():
        rule = "be a simulator's library or folder"
        return f"TT_METAL_SIMULATOR must {rule}, got {simulator}, which does not exist"
    if simulator.is_dir():
        folder = simulator
    else:
        folder = simulator.parent
    if not (folder / "soc_descriptor.yaml").is_file():
        return f"soc_descriptor.yaml, which describes the chip, must lie in {folder}, found none"
    if _compiler() is None:
        folders = " or ".join(map(str, _sfpi_folders()))
        return f"Tenstorrent's compiler, SFPI, must lie in {folders}, found none"
    return None


def _compiler() -> Path | None:
    """Return the compiler that ttnn would use."""
    paths = (folder / "compiler" / "bin" / "riscv-tt-elf-g++" for folder in _sfpi_folders())
    return next((path for path in paths if path.exists()), None)


def _sfpi_folders() -> list[Path]:
    """List the folders that ttnn searches for the compiler, in order."""
    root = os.environ.get("TT_METAL_RUNTIME_ROOT")
    return [*([Path(root) / "runtime" / "sfpi"] if root else []), Path("/opt/tenstorrent/sfpi")]


@contextmanager
def open_mesh(shape: Sequence[int]) -> Iterator[ttnn.MeshDevice]:
    """Open several chips and their fabric for a `with` block.

    Args:
        shape: rows and columns of chips: (1, 2) for an n300, (1, 8) or (2, 4) for a T3000.

    Yields:
        Mesh. Uploads are replicated on all chips.

    Raises:
        ValueError: if the shape is not two sizes.
        RuntimeError: if there are too few chips or they do not open; reports the devices searched
            for.
    """
    if len(shape) != 2:
        raise InputError("shape", "be rows and columns", shape=tuple(shape))
    with ExitStack() as stack:
        with _opening(f"a mesh of {tuple(shape)}"):
            ttnn.set_fabric_config(ttnn.FabricConfig.FABRIC_1D)  # only before a mesh is opened
            stack.callback(ttnn.set_fabric_config, ttnn.FabricConfig.DISABLED)
            mesh = ttnn.open_mesh_device(
                ttnn.MeshShape(*shape), **_dispatch_of_mock() if target() == "mock" else {}
            )
            stack.callback(ttnn.close_mesh_device, mesh)
        yield mesh


def _cards() -> list[str]:
    return sorted(str(path) for path in Path("/dev/tenstorrent").glob("[0-9]*"))


# ---- Arithmetic ----------------------------------------------------------------------------------


def accurate_config(device: ttnn.MeshDevice) -> ttnn.DeviceComputeKernelConfig:
    """Return the most accurate arithmetic of a device, the default throughout this package.

    All bits of bfloat16 operands (float32 operands always enter the matrix engine as TF32), float32
    sums, no approximations. HiFi3 on Wormhole, because HiFi4 with float32 sums occasionally returns
    wrong results there (tt-metal#38306).
    """
    if device.arch() == ttnn.Arch.WORMHOLE_B0:
        fidelity = ttnn.MathFidelity.HiFi3
    else:
        fidelity = ttnn.MathFidelity.HiFi4
    return ttnn.init_device_compute_kernel_config(
        device.arch(),
        math_fidelity=fidelity,
        math_approx_mode=False,
        fp32_dest_acc_en=True,
        packer_l1_acc=True,
    )


def fast_config(device: ttnn.MeshDevice) -> ttnn.DeviceComputeKernelConfig:
    """Return fast arithmetic: HiFi2 (without the lowest bit of one operand), bfloat16 sums, and
    approximate exponentials.
    """
    return ttnn.init_device_compute_kernel_config(
        device.arch(),
        math_fidelity=ttnn.MathFidelity.HiFi2,
        math_approx_mode=True,
        fp32_dest_acc_en=False,
        packer_l1_acc=True,
    )


def with_bfloat16_sums(
    config: ttnn.DeviceComputeKernelConfig, device: ttnn.MeshDevice
) -> ttnn.DeviceComputeKernelConfig:
    """Return the same arithmetic with bfloat16 sums."""
    return ttnn.init_device_compute_kernel_config(
        device.arch(),
        math_fidelity=config.math_fidelity,
        math_approx_mode=config.math_approx_mode,
        fp32_dest_acc_en=False,
        packer_l1_acc=config.packer_l1_acc,
    )


def describe_config(config: ttnn.DeviceComputeKernelConfig) -> str:
    """Describe a compute-kernel configuration, such as `HiFi3, float32 sums, no approximations`."""
    fidelity = str(config.math_fidelity).rpartition(".")[2]
    if config.fp32_dest_acc_en:
        sums = "float32"
    else:
        sums = "bfloat16"
    approximations = "approximations" if config.math_approx_mode else "no approximations"
    return f"{fidelity}, {sums} sums, {approximations}"


# ---- Arrays --------------------------------------------------------------------------------------


def upload(
    array: np.ndarray,
    *,
    device: ttnn.MeshDevice,
    dtype: ttnn.DataType = ttnn.bfloat16,
    pad_value: float = 0.0,
) -> ttnn.Tensor:
    """Upload an array to a device, in tiles.

    Args:
        array: any floating-point dtype, or booleans (True becomes 1), with at least one axis.
        device: destination.
        dtype: `ttnn.bfloat16`, `ttnn.bfloat8_b` or `ttnn.float32`; values are rounded to nearest
            even.
        pad_value: padding of the last tiles. Some kernels read it, for example in masks.

    Raises:
        TypeError: if the array has the wrong dtype, or `dtype` is unsupported.
        ValueError: if the array has no axis.
    """
    check_dtype("dtype", dtype)
    array = np.asarray(array)
    if array.ndim < 1:
        raise InputError("array", "have at least 1 axis", shape=array.shape)
    if array.dtype.kind not in "fb" and array.dtype.name != "bfloat16":
        raise InputTypeError("array", "be floating point or boolean", dtype=array.dtype)
    # ttnn supports neither float16 nor read-only arrays, and float64 aborts the process. Tiling
    # here uses `pad_value`.
    array = np.array(array, dtype=np.float32, order="C")
    return _sent(
        ttnn.Tensor(array, dtype, None, ttnn.TILE_LAYOUT, pad_value=pad_value),
        device,
        array,
        pad_value,
    )


def _sent(
    host: ttnn.Tensor,
    device: ttnn.MeshDevice,
    array: np.ndarray | list[np.ndarray],
    pad_value: float = 0.0,
) -> ttnn.Tensor:
    """Move a tensor of an array, or of one per chip, to a device, and notify observers of
    uploads.
    """
    tensor = ttnn.to_device(host, device)
    for observe in observers:
        observe(tensor, array, pad_value)
    return tensor


def upload_parts(
    arrays: Sequence[np.ndarray],
    *,
    axis: int,
    device: ttnn.MeshDevice,
    dtype: ttnn.DataType = ttnn.bfloat16,
) -> ttnn.Tensor:
    """Upload one array to each chip along an axis of a mesh, replicated along the others, in tiles.

    Args:
        arrays: floating point, all of one shape.
        axis: axis of the mesh; one array per chip along it.
        device: mesh.
        dtype: see `upload`.

    Returns:
        Tensor of the shape of one array.
    """
    parts = [np.array(array, dtype=np.float32, order="C") for array in arrays]
    indices_on_axis = np.indices(tuple(device.shape))[axis].ravel().tolist()
    by_chip = [parts[index] for index in indices_on_axis]
    hosts = [ttnn.Tensor(array, dtype, None, ttnn.TILE_LAYOUT) for array in by_chip]
    return _sent(ttnn.from_host_shards(hosts, device.shape), device, by_chip)


def upload_integers(
    array: np.ndarray | Sequence[int], *, device: ttnn.MeshDevice, is_index: bool = False
) -> ttnn.Tensor:
    """Upload integers, as int32 in rows for positions, or as uint32 in tiles for indices."""
    if not is_index:
        return upload_rows(np.asarray(array), device=device, dtype=ttnn.int32)
    array = np.array(array, dtype=np.uint32, order="C")
    return _sent(ttnn.Tensor(array, ttnn.uint32, None, ttnn.TILE_LAYOUT), device, array)


def upload_rows(array: np.ndarray, *, device: ttnn.MeshDevice, dtype: ttnn.DataType) -> ttnn.Tensor:
    """Upload an array in rows instead of tiles: for positions, row indices and lookup tables."""
    array = np.array(
        array,
        dtype={ttnn.int32: np.int32, ttnn.uint32: np.uint32}.get(dtype, np.float32),
        order="C",
    )
    return _sent(ttnn.Tensor(array, dtype, None, ttnn.ROW_MAJOR_LAYOUT), device, array)


def download(tensor: ttnn.Tensor) -> np.ndarray:
    """Read back a tensor exactly, as float32.

    Raises:
        TypeError: if it is not a tensor on a device.
        ValueError: if the chips of a mesh have different values.
        RuntimeError: if the device is a mock board without values: see `ttnn_mock`.
    """
    check_on_device("tensor", tensor)
    if readers:
        # A shadow or a recording, see `ttnn_mock.hooks`.
        return readers[-1](tensor)
    if target() == "mock":
        raise RuntimeError(
            "values must come from a device that computes, got a mock one; "
            "ttnn_mock.shadow() gives them"
        )
    return read_back(tensor)


def read_back(tensor: ttnn.Tensor) -> np.ndarray:
    """Read back a tensor from a device that computes, exactly, as float32."""
    first, *copies = (
        ttnn.to_dtype(part, ttnn.float32).to_numpy()
        for part in ttnn.get_device_tensors(ttnn.from_device(tensor))
    )
    for chip, copy in enumerate(copies, 1):
        if not np.array_equal(first, copy, equal_nan=True):
            raise InputError(
                "tensor",
                "be the same on all chips to be read as one",
                f"a different value on chip {chip} and shape={tuple(tensor.shape)}",
                hint="mha_tt.download_parts returns the tensor of each",
            )
    return first


def has_values() -> bool:
    """Return whether tensors can be read back: on a mock board only with `ttnn_mock.shadow`."""
    return bool(readers) or target() != "mock"


def download_parts(tensor: ttnn.Tensor) -> list[np.ndarray]:
    """Return the part of a tensor on each chip of a mesh, in row-major order; otherwise see
    `download`.
    """
    check_on_device("tensor", tensor)
    return [download(part) for part in ttnn.get_device_tensors(tensor)]


def zeros(shape: Sequence[int], dtype: ttnn.DataType, device: ttnn.MeshDevice) -> ttnn.Tensor:
    """Return zeros; bfloat8_b is narrowed on the device, because the host needs seconds for a large
    cache.
    """
    if dtype == ttnn.bfloat8_b:
        wide = ttnn.bfloat16
    else:
        wide = dtype
    return as_dtype(ttnn.zeros(shape, dtype=wide, layout=ttnn.TILE_LAYOUT, device=device), dtype)

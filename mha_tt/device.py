"""The arithmetic of a device, and the places where arrays and weights enter it and leave it."""

from collections.abc import Sequence

import numpy as np
import ttnn

from mha_spec import Refusal, WrongType
from mha_tt.arrays import as_dtype
from mha_tt.checks import check_dtype, check_on_device
from mha_tt.mock.shadows import observers, read_back, readers
from mha_tt.mock.targets import target

# ---- Arithmetic ------------------------------------------------------------------------------------------------------


def accurate_config(device: ttnn.MeshDevice) -> ttnn.DeviceComputeKernelConfig:
    """The most exact arithmetic of a device: the default of everything in this package.

    Every bit of bfloat16 operands (float32 operands enter the matrix engine as TF32 whatever is chosen), sums in
    float32, no approximations. HiFi4 with float32 sums gives occasional wrong results on Wormhole (tt-metal#38306), so
    HiFi3 there.
    """
    fidelity = ttnn.MathFidelity.HiFi3 if device.arch() == ttnn.Arch.WORMHOLE_B0 else ttnn.MathFidelity.HiFi4
    return ttnn.init_device_compute_kernel_config(
        device.arch(), math_fidelity=fidelity, math_approx_mode=False, fp32_dest_acc_en=True, packer_l1_acc=True
    )


def fast_config(device: ttnn.MeshDevice) -> ttnn.DeviceComputeKernelConfig:
    """Speed instead of accuracy: HiFi2, which cuts a bit of each operand, bfloat16 sums, approximate exponentials."""
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
    """The same arithmetic but for its sums."""
    return ttnn.init_device_compute_kernel_config(
        device.arch(),
        math_fidelity=config.math_fidelity,
        math_approx_mode=config.math_approx_mode,
        fp32_dest_acc_en=False,
        packer_l1_acc=config.packer_l1_acc,
    )


# ---- Arrays ----------------------------------------------------------------------------------------------------------


def upload(
    array: np.ndarray, *, device: ttnn.MeshDevice, dtype: ttnn.DataType = ttnn.bfloat16, pad_value: float = 0.0
) -> ttnn.Tensor:
    """Put an array on a device, in tiles.

    Args:
        array: numbers of any floating-point dtype, or booleans (True becomes 1), of one axis or more.
        device: where to.
        dtype: `ttnn.bfloat16`, `ttnn.bfloat8_b` or `ttnn.float32`; rounded to it, to the nearest even.
        pad_value: what fills the last tiles beyond the array. Some kernels read it, a mask's for one.

    Raises:
        TypeError: if the array does not hold such numbers, or the dtype is another.
        ValueError: if it has no axis.
    """
    check_dtype("dtype", dtype)
    array = np.asarray(array)
    if array.ndim < 1:
        raise Refusal("array", "have at least 1 axis", shape=array.shape)
    if array.dtype.kind not in "fb" and array.dtype.name != "bfloat16":
        raise WrongType("array", "be floating point or boolean", dtype=array.dtype)
    # ttnn takes no float16 and no read-only array, and float64 aborts the process. Tiles made here are padded with what
    # was asked for.
    array = np.array(array, dtype=np.float32, order="C")
    tensor = ttnn.to_device(ttnn.Tensor(array, dtype, None, ttnn.TILE_LAYOUT, pad_value=pad_value), device)
    for observe in observers:
        observe(tensor, array, pad_value)
    return tensor


def upload_parts(
    arrays: Sequence[np.ndarray], *, axis: int, device: ttnn.MeshDevice, dtype: ttnn.DataType = ttnn.bfloat16
) -> ttnn.Tensor:
    """Put an array of its own on each chip along an axis of a mesh, and a copy on those beside it, in tiles.

    Args:
        arrays: floating-point numbers, all of one shape.
        axis: of the mesh, as long as there are arrays.
        device: the mesh.
        dtype: as `upload` takes it.

    Returns:
        A tensor of the shape of one array.
    """
    parts = [np.array(array, dtype=np.float32, order="C") for array in arrays]
    places = np.indices(tuple(device.shape))[axis].ravel().tolist()
    held = [parts[place] for place in places]
    hosts = [ttnn.Tensor(array, dtype, None, ttnn.TILE_LAYOUT) for array in held]
    tensor = ttnn.to_device(ttnn.from_host_shards(hosts, device.shape), device)
    for observe in observers:
        observe(tensor, held, 0.0)
    return tensor


def upload_integers(
    array: np.ndarray | Sequence[int], *, device: ttnn.MeshDevice, is_index: bool = False
) -> ttnn.Tensor:
    """Put integers on a device, as int32 in rows, the form of positions, or as uint32 in tiles, that of an index."""
    if not is_index:
        return upload_rows(np.asarray(array), device=device, dtype=ttnn.int32)
    array = np.array(array, dtype=np.uint32, order="C")
    tensor = ttnn.to_device(ttnn.Tensor(array, ttnn.uint32, None, ttnn.TILE_LAYOUT), device)
    for observe in observers:
        observe(tensor, array, 0.0)
    return tensor


def upload_rows(array: np.ndarray, *, device: ttnn.MeshDevice, dtype: ttnn.DataType) -> ttnn.Tensor:
    """Put an array on a device in rows, not in tiles: positions, the rows of a table to pick, and that table."""
    array = np.array(array, dtype={ttnn.int32: np.int32, ttnn.uint32: np.uint32}.get(dtype, np.float32), order="C")
    tensor = ttnn.to_device(ttnn.Tensor(array, dtype, None, ttnn.ROW_MAJOR_LAYOUT), device)
    for observe in observers:
        observe(tensor, array, 0.0)
    return tensor


def download(tensor: ttnn.Tensor) -> np.ndarray:
    """Read a tensor back, exactly, as float32.

    Raises:
        TypeError: if it is not a tensor on a device.
        ValueError: if the chips of a mesh have several values.
        RuntimeError: if the device is a mock one whose values nobody computes: see `mha_tt.mock`.
    """
    check_on_device("tensor", tensor)
    if readers:
        return readers[-1](tensor)
    if target() == "mock":
        raise RuntimeError(
            "values must come from a device that computes, got a mock one; mha_tt.mock.shadow() gives them"
        )
    return read_back(tensor)


def download_parts(tensor: ttnn.Tensor) -> list[np.ndarray]:
    """What each chip of a mesh has of a tensor, in the order of the mesh's rows; as `download`."""
    check_on_device("tensor", tensor)
    return [download(part) for part in ttnn.get_device_tensors(tensor)]


def zeros(shape: Sequence[int], dtype: ttnn.DataType, device: ttnn.MeshDevice) -> ttnn.Tensor:
    """Zeros; those of bfloat8_b are narrowed on the device, since the host takes seconds to make a large cache."""
    made_as = ttnn.bfloat16 if dtype == ttnn.bfloat8_b else dtype
    return as_dtype(ttnn.zeros(shape, dtype=made_as, layout=ttnn.TILE_LAYOUT, device=device), dtype)

"""TTNN without hardware: boards that do not exist, and the values that they would compute.

ttnn can open a *mock* board: every operation checks its arguments and builds its program for the real grid of cores,
and computes nothing. `board` opens one on any machine, without a toolchain. `shadow` adds the values: next to each
tensor it keeps what ttnn's own golden (torch) function says that the tensor holds. Together ttnn says that a program is
valid, and ttnn says what it computes. Nothing here knows attention; it serves any TTNN code:

    with mha_tt.mock.board("n150") as device:
        x = ttnn.from_torch(torch.randn(2, 40, 64), dtype=ttnn.bfloat16, layout=ttnn.TILE_LAYOUT, device=device)
        y = ttnn.to_torch(ttnn.softmax(x, dim=-1))

What golden functions do not see: the filling of tiles, the rounding inside kernels, writes outside of a tensor. The
worst of these traps are checked here (`Shadow._check_filling` and the golden functions in `mha_tt.goldens`).
"""

from __future__ import annotations

import importlib.util
import os
import struct
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
import ttnn

from mha_tt import device as devices
from mha_tt.device import TILE
from mha_tt.goldens import GOLDENS
from mha_tt.goldens import golden as golden

if TYPE_CHECKING:
    import torch

# ---- Boards ----------------------------------------------------------------------------------------------------------

_BLACKHOLE = """\
arch: {0: blackhole}
chips: {}
chip_unique_ids: {0: 4476187513037}
ethernet_connections: []
chips_with_mmio: [0: 0]
harvesting: {0: {noc_translation: true, harvest_mask: %d, dram_harvesting_mask: 0, eth_harvesting_mask: 288,
                 pcie_harvesting_mask: 2, l2cpu_harvesting_mask: 0}}
boards: [[board_id: 4476187513037, board_type: %s, chips: [0]]]
"""
BOARDS = {
    "n150": """\
arch: {0: wormhole_b0}
chips: {0: [0, 0, 0, 0]}
ethernet_connections: []
chips_with_mmio: [0: 0]
harvesting: {0: {noc_translation: true, harvest_mask: 32}}
boards: [[board_id: 72059269369839682, board_type: n150, chips: [0]]]
""",
    "n300": """\
arch: {0: wormhole_b0, 1: wormhole_b0}
chips: {0: [0, 0, 0, 0], 1: [1, 0, 0, 0]}
ethernet_connections:
  - [{chip: 0, chan: 8}, {chip: 1, chan: 0}]
  - [{chip: 0, chan: 9}, {chip: 1, chan: 1}]
chips_with_mmio: [0: 0]
harvesting: {0: {noc_translation: true, harvest_mask: 65}, 1: {noc_translation: true, harvest_mask: 5}}
boards: [[board_id: 72058994491072686, board_type: n300, chips: [0, 1]]]
""",
    "p100": _BLACKHOLE % (3, "p100"),
    "p150": _BLACKHOLE % (0, "p150"),
}
"""The boards in tt-umd's format: n150 is one Wormhole, n300 a mesh of 1 x 2 of them, p100 and p150 are Blackholes."""

# What ttnn calls as a compiler. Its version text is part of the key under which ttnn caches kernels, so that nothing
# compiled here is ever taken for a real kernel. The shell itself writes the file: a process less than `cp`.
_COMPILER = """\
#!/bin/sh
case "$*" in *--version*) echo "riscv-tt-elf-g++ (mha_tt mock)"; exit;; esac
while [ "$1" != -o ]; do shift; done
printf 'KERNEL' > "$2" && echo "$2:" > "${2%.*}.d"
"""

_used: str | None = None


def use(board: str) -> None:
    """Let this process see a board that does not exist, from the first device that it opens to its end.

    Writes to `$XDG_CACHE_HOME/mha_tt` (`~/.cache/mha_tt`) only: ttnn's own cache of kernels is left alone.

    Args:
        board: `n150`, `n300`, `p100` or `p150`.

    Raises:
        ValueError: if there is no such board, or the cache folder's path has blanks in it.
        RuntimeError: if this process uses another board already; ttnn reads its environment once.
    """
    global _used
    if board not in BOARDS:
        raise ValueError(f"board must be one of {list(BOARDS)}, got board={board!r}")
    if _used not in (None, board):
        raise RuntimeError(f"board must stay the same for the whole process, got {board!r} after {_used!r}")
    package = Path(ttnn.__file__).parent  # pyright: ignore
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    root = cache / "mha_tt" / f"mock-{zlib.crc32(str(package).encode()):08x}"  # two environments must not share one
    if any(character.isspace() for character in str(root)):
        raise ValueError(
            f"the cache folder must have no blanks in its path, which ttnn's build cannot take, got {root}"
        )
    binaries = root / "runtime" / "sfpi" / "compiler" / "bin"
    binaries.mkdir(parents=True, exist_ok=True)
    for name in ("tt_metal", "ttnn", "runtime/hw"):  # without the last ttnn links every kernel again in every process
        with suppress(FileExistsError):  # from before, or from another process at this moment
            (root / name).symlink_to(package / name)
    kernel = "".join(f"\\{byte:03o}" for byte in _kernel_elf())
    _write(binaries / "riscv-tt-elf-g++", _COMPILER.replace("KERNEL", kernel).encode(), mode=0o755)
    _write(root / f"{board}.yaml", BOARDS[board].encode())
    os.environ["TT_METAL_RUNTIME_ROOT"] = str(root)
    os.environ["TT_METAL_CACHE"] = f"{root}/cache/"  # without the slash ttnn glues its key to the name
    os.environ["TT_METAL_MOCK_CLUSTER_DESC_PATH"] = str(root / f"{board}.yaml")
    os.environ.setdefault("TT_METAL_LOGS_PATH", str(root))  # else "generated" appears in the working directory
    os.environ.setdefault("TT_METAL_LOGGER_LEVEL", "fatal")
    os.environ.setdefault("TT_METAL_DISABLE_BACKTRACE", "1")
    ttnn.begin_trace_capture = _refuse_traces  # which would end the process
    _used = board


def _refuse_traces(*_: Any, **__: Any) -> None:
    raise RuntimeError(f"begin_trace_capture must have a device that computes, got a mock {_used}, which has no queue")


@contextmanager
def board(name: str = "n150", *, values: bool = True) -> Iterator[ttnn.MeshDevice]:
    """Open a board that does not exist, for the time of a `with` block.

    Args:
        name: `n150`, `n300` (a mesh of 1 x 2), `p100` or `p150`.
        values: also compute values, by golden functions, which needs torch. Without them a program is validated in any
            size, and reading a tensor back is an error. On n300 they are those of each chip, both having the same.

    Yields:
        The device.

    Raises:
        ModuleNotFoundError: if values are wanted and torch is not installed.
        RuntimeError: if the board does not open, or the process uses another already.
    """
    use(name)
    opened = _open_mesh() if name == "n300" else devices.open_device()
    with opened as device, shadow() if values else nullcontext():
        yield device


@contextmanager
def _open_mesh() -> Iterator[ttnn.MeshDevice]:
    dispatch = ttnn.DispatchCoreConfig(ttnn.DispatchCoreType.WORKER)  # the default is not validated on this mock
    device = ttnn.open_mesh_device(ttnn.MeshShape(1, 2), dispatch_core_config=dispatch)
    try:
        yield device
    finally:
        ttnn.close_mesh_device(device)


def _write(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Write a file whole: another process may be reading it, or executing it."""
    if path.exists() and path.read_bytes() == content:
        return
    handle, temporary = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
    os.chmod(temporary, mode)
    os.replace(temporary, path)


def _kernel_elf(address: int = 0x10000) -> bytes:
    """The least that tt-metal's loader takes for a kernel: one text segment, a symbol table, a relocation section.

    One file serves every processor of Wormhole and Blackhole; the loader looks neither at the address nor at the code.
    """
    names = b"\0.text\0.rela.text\0.symtab\0.strtab\0.shstrtab\0"
    text, symbols, strings = struct.pack("<I", 0x00008067), bytes(16), bytes(4)  # ret
    body = text + symbols + strings + names + bytes(-len(names) % 4)
    at, sections_at = 96, 96 + len(body)
    header = struct.pack("<HHIIIIIHHHHHH", 2, 243, 1, address, 52, sections_at, 0, 52, 32, 1, 40, 6, 5)
    segment = struct.pack("<8I", 1, at, address, address, len(text), len(text), 5, 16)

    def name(section: bytes) -> int:
        return names.index(b"\0" + section + b"\0") + 1

    sections = [
        (0,) * 10,
        (name(b".text"), 1, 6, address, at, 4, 0, 0, 4, 0),
        (name(b".rela.text"), 4, 64, 0, at, 0, 3, 1, 4, 12),
        (name(b".symtab"), 2, 0, 0, at + 4, 16, 4, 1, 4, 16),
        (name(b".strtab"), 3, 0, 0, at + 20, 4, 0, 0, 1, 0),
        (name(b".shstrtab"), 3, 0, 0, at + 24, len(names), 0, 0, 1, 0),
    ]
    start = b"\x7fELF\x01\x01\x01" + bytes(9) + header + segment
    return start + bytes(at - len(start)) + body + b"".join(struct.pack("<10I", *section) for section in sections)


# ---- Values ----------------------------------------------------------------------------------------------------------


class Shadow:
    """The values of tensors, as golden functions compute them, and the operations that ran.

    Values are kept by `tensor_id`, which is never given twice, and is the same for a cache and for the result of its
    update in place. They stay until the block ends or `ttnn.deallocate` is called: a long loop wants blocks of its own.

    Attributes:
        operations: full names of the operations, in the order in which they ran.
    """

    def __init__(self) -> None:
        self.operations: list[str] = []
        self._values: dict[int, torch.Tensor] = {}
        self._filling: dict[int, float] = {}  # what lies beyond a tensor in its last tiles, where that is known

    def __getitem__(self, tensor: ttnn.Tensor) -> torch.Tensor:
        """The value of a tensor, in float32.

        Raises:
            KeyError: if the tensor was made outside of the shadow.
        """
        if tensor.tensor_id not in self._values:
            raise KeyError(f"tensor must have been made while the shadow is on, got one of shape {tuple(tensor.shape)}")
        return self._values[tensor.tensor_id]

    def _set(self, tensor: ttnn.Tensor, value: torch.Tensor) -> None:
        self._values[tensor.tensor_id] = _rounded(value, tensor)

    def uploaded(self, tensor: ttnn.Tensor, array: np.ndarray, pad_value: float) -> None:
        """Take note of an array that went to the device."""
        import torch

        self._set(tensor, torch.from_numpy(array.copy()))
        self._filling[tensor.tensor_id] = pad_value

    def download(self, tensor: ttnn.Tensor) -> np.ndarray:
        """The value of a tensor as an array of its own."""
        return self[tensor].numpy().copy()

    def __call__(self, operation: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], result: Any) -> None:
        """What ttnn calls after every operation."""
        name = operation.python_fully_qualified_name
        self.operations.append(name)
        if name == "ttnn.deallocate":
            self._values.pop(arguments[0].tensor_id, None)
        if name in ("ttnn.to_device", "ttnn.deallocate", "ttnn.synchronize_device"):
            return
        if name in ("ttnn.from_torch", "ttnn.as_tensor"):
            self._set(result, arguments[0].detach().clone())
            self._filling[result.tensor_id] = keywords.get("pad_value") or 0.0
            return
        if name == "ttnn.to_torch":
            result.copy_(self[arguments[0]].reshape(result.shape))
            return
        if name == "ttnn.transformer.scaled_dot_product_attention":
            self._check_filling(**keywords)
        function = GOLDENS.get(name, operation.golden_function)
        if function is None:
            raise NotImplementedError(f"{name} has no golden function; mha_tt.mock.golden({name!r}) takes one")
        value = function(*self._values_of(arguments), **{key: self._values_of(x) for key, x in keywords.items()})
        tensors, values = ([x] if not isinstance(x, list | tuple) else x for x in (result, value))
        for tensor, value in zip(tensors, values, strict=True):
            if tuple(tensor.shape) != tuple(value.shape):
                raise AssertionError(f"{name} gives {tuple(tensor.shape)}, its golden function {tuple(value.shape)}")
            self._set(tensor, value)
        if name == "ttnn.fill_implicit_tile_padding":
            self._filling[result.tensor_id] = arguments[1]

    def _values_of(self, argument: Any) -> Any:
        if isinstance(argument, list | tuple):
            return type(argument)(self._values_of(x) for x in argument)
        return self[argument] if isinstance(argument, ttnn.Tensor) else argument

    def _check_filling(self, *, attn_mask: ttnn.Tensor | None = None, **_: Any) -> None:
        """The kernel reads what fills the last tiles of a mask, which no golden function sees (tt-metal#54833)."""
        if attn_mask is not None and attn_mask.shape[3] % TILE:
            filling = self._filling.get(attn_mask.tensor_id, 0.0)
            if filling > -1e4:
                raise AssertionError(
                    f"the mask's last tiles must hide the keys beyond the last one, got {filling} in them "
                    f"and attn_mask.shape={tuple(attn_mask.shape)}"
                )


def value_of(tensor: ttnn.Tensor) -> np.ndarray | None:
    """The value of a tensor, wherever it lies, if a shadow is on and knows it."""
    known = bool(_active) and tensor.tensor_id in _active[-1]._values
    return _active[-1].download(tensor) if known else None


_INTEGERS = (ttnn.int32, ttnn.uint8, ttnn.uint16, ttnn.uint32)
_active: list[Shadow] = []


@contextmanager
def shadow() -> Iterator[Shadow]:
    """Compute the values that a mock board does not, for the time of a `with` block.

    `mha_tt.download` and `ttnn.to_torch` then give these values, so that the same code runs with and without hardware.
    A block inside another shares its values.

    Yields:
        The values, by tensor.

    Raises:
        ModuleNotFoundError: if torch, in which golden functions are written, is not installed.
    """
    if _active:
        yield _active[-1]
        return
    if importlib.util.find_spec("torch") is None:
        raise ModuleNotFoundError("mha_tt.mock needs torch for values, ttnn's golden functions being written in it")
    state = Shadow()
    _active.append(state)
    try:
        with observed(state):
            yield state
    finally:
        _active.remove(state)


@contextmanager
def observed(state: Any) -> Iterator[None]:
    """Tell a state of every upload (`uploaded`) and operation (`__call__`), and ask it for arrays (`download`)."""
    fast = ttnn.CONFIG.enable_fast_runtime_mode
    ttnn.CONFIG.enable_fast_runtime_mode = False  # ttnn calls hooks outside of the fast mode only
    devices.observers.append(state.uploaded)
    devices.readers.append(state.download)
    try:
        with ttnn.register_post_operation_hook(state), _without_graphs():
            yield
    finally:
        devices.readers.remove(state.download)
        devices.observers.remove(state.uploaded)
        ttnn.CONFIG.enable_fast_runtime_mode = fast


@contextmanager
def _without_graphs() -> Iterator[None]:
    """Outside of its fast mode ttnn captures a graph of each operation, for reports: half of the time that it takes."""
    begin, end = ttnn.graph.begin_graph_capture, ttnn.graph.end_graph_capture
    captured: list[bool] = []

    def begin_if_asked(*arguments: Any, _internal: bool = False) -> None:
        captured.append(not _internal or ttnn.graph.is_graph_capture_active())
        if captured[-1]:
            begin(*arguments, _internal=_internal)

    def end_if_begun() -> Any:
        return end() if not captured or captured.pop() else []

    with patch.multiple(ttnn.graph, begin_graph_capture=begin_if_asked, end_graph_capture=end_if_begun):
        yield


def _rounded(value: torch.Tensor, tensor: ttnn.Tensor) -> torch.Tensor:
    """A value as a tensor of that dtype holds it, in float32."""
    import torch

    if not value.is_floating_point():  # that of a comparison is in the dtype of what was compared
        return value if tensor.dtype in _INTEGERS else value.float()
    if tensor.dtype == ttnn.bfloat16:
        return value.to(torch.bfloat16).float()
    if tensor.dtype in (ttnn.bfloat8_b, ttnn.bfloat4_b):  # the host's own conversion knows the block formats
        host = ttnn.Tensor(np.array(value.float().numpy(), order="C"), tensor.dtype, None, ttnn.TILE_LAYOUT)
        rounded = ttnn._ttnn.operations.core.to_dtype(host, ttnn.float32).to_numpy()  # under the hooks
        return torch.from_numpy(np.array(rounded))
    return value.float()

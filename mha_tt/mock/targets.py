"""Targets that the code runs on: silicon, a simulator, or a board that does not exist.

ttnn can open a *mock* board: every operation checks its arguments and builds its program for the real grid of cores,
and computes nothing. `board` opens one on any machine, without a toolchain, and `shadow` adds the values. Together ttnn
says that a program is valid, and ttnn says what it computes. Nothing here knows attention; it serves any TTNN code:

    with mha_tt.mock.board("n150") as device:
        x = ttnn.from_torch(torch.randn(2, 40, 64), dtype=ttnn.bfloat16, layout=ttnn.TILE_LAYOUT, device=device)
        y = ttnn.to_torch(ttnn.softmax(x, dim=-1))
"""

from __future__ import annotations

import os
import struct
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import ttnn

from mha_spec import Refusal
from mha_tt.mock.boards import BOARDS, MESHES
from mha_tt.mock.shadows import shadow


def target() -> str | None:
    """What a device opened now would be: `mock`, `simulator`, `silicon`, or None for nothing at all.

    ttnn answers the same for a mock board as for a card, so the environment decides, in the order in which ttnn reads
    it.
    """
    if os.environ.get("TT_METAL_MOCK_CLUSTER_DESC_PATH"):
        return "mock"
    if os.environ.get("TT_METAL_SIMULATOR"):
        return "simulator"
    return "silicon" if _cards() else None


def describe_target() -> str:
    """What a device opened now would be, and why, in words."""
    found = target()
    if found == "mock":
        board = Path(os.environ["TT_METAL_MOCK_CLUSTER_DESC_PATH"]).stem
        return f"mock {board} (no hardware: ttnn validates every program and computes nothing)"
    if found == "simulator":
        compiler = _compiler() or "none found"
        return f"simulator (TT_METAL_SIMULATOR={os.environ['TT_METAL_SIMULATOR']}; compiler: {compiler})"
    if found == "silicon":
        return f"silicon ({', '.join(_cards())})"
    return "nothing (no /dev/tenstorrent/*, TT_METAL_SIMULATOR is not set, no mock board is in use)"


@contextmanager
def open_device(device_id: int = 0, *, trace_region_size: int = 0) -> Iterator[ttnn.MeshDevice]:
    """Open a device for the time of a `with` block.

    Args:
        device_id: which of several cards.
        trace_region_size: bytes that are set aside for traces (`ttnn.begin_trace_capture`).

    Yields:
        The device, which is silicon, a simulator or a mock board: see `target`.

    Raises:
        RuntimeError: if there is none or it does not open; says what was looked for.
    """
    where = describe_target()
    if target() is None:
        raise RuntimeError(f"a device must be there to be opened, found {where}; mha_tt.mock.board() needs none")
    if target() == "simulator" and (reason := _simulator_lacks()):
        raise RuntimeError(f"{reason}; tools/tt-simulator sets it up")
    try:
        options = _of_dispatch() if target() == "mock" and ttnn.get_num_devices() > 1 else {}
        device = ttnn.open_device(device_id=device_id, trace_region_size=trace_region_size, **options)
    except RuntimeError as error:
        reason = str(error).strip().partition("\n")[0]
        raise RuntimeError(f"device {device_id} must open, looked for {where}, got: {reason}") from error
    try:
        yield device
    finally:
        ttnn.close_device(device)


def _of_dispatch() -> dict[str, ttnn.DispatchCoreConfig]:
    """Options of a mock board of several chips, on which the default place of dispatch is not validated."""
    return {"dispatch_core_config": ttnn.DispatchCoreConfig(ttnn.DispatchCoreType.WORKER)}


def _simulator_lacks() -> str | None:
    """What a simulator needs and has not, of which ttnn tells little or nothing; None if it has all."""
    simulator = Path(os.environ["TT_METAL_SIMULATOR"])
    if not simulator.exists():
        return f"TT_METAL_SIMULATOR must be a simulator's library or folder, got {simulator}, which is not there"
    folder = simulator if simulator.is_dir() else simulator.parent
    if not (folder / "soc_descriptor.yaml").is_file():
        return f"soc_descriptor.yaml, which describes the chip, must lie in {folder}, found none"
    if _compiler() is None:
        return f"Tenstorrent's compiler, SFPI, must lie in {' or '.join(map(str, _sfpi_folders()))}, found none"
    return None


def _compiler() -> Path | None:
    """The compiler that ttnn would take."""
    paths = (folder / "compiler" / "bin" / "riscv-tt-elf-g++" for folder in _sfpi_folders())
    return next((path for path in paths if path.exists()), None)


def _sfpi_folders() -> list[Path]:
    """Where ttnn looks for it, in order."""
    root = os.environ.get("TT_METAL_RUNTIME_ROOT")
    return [*([Path(root) / "runtime" / "sfpi"] if root else []), Path("/opt/tenstorrent/sfpi")]


@contextmanager
def open_mesh(shape: Sequence[int]) -> Iterator[ttnn.MeshDevice]:
    """Open several chips, and the fabric that joins them, for the time of a `with` block.

    Args:
        shape: rows and columns of chips: (1, 2) for an n300, (1, 8) or (2, 4) for a T3000.

    Yields:
        The mesh, on which what is uploaded lies once on each chip.

    Raises:
        ValueError: if the shape is not two sizes.
        RuntimeError: if there are not so many chips or they do not open; says what was looked for.
    """
    if len(shape) != 2:
        raise Refusal("shape", "be rows and columns", shape=tuple(shape))
    where = describe_target()
    if target() is None:
        raise RuntimeError(f"a device must be there to be opened, found {where}; mha_tt.mock.board() needs none")
    options = _of_dispatch() if target() == "mock" else {}
    ttnn.set_fabric_config(ttnn.FabricConfig.FABRIC_1D)  # before a mesh is opened, and not after
    try:
        try:
            mesh = ttnn.open_mesh_device(ttnn.MeshShape(*shape), **options)
        except RuntimeError as error:
            reason = str(error).strip().partition("\n")[0]
            raise RuntimeError(f"a mesh of {tuple(shape)} must open, looked for {where}, got: {reason}") from error
        try:
            yield mesh
        finally:
            ttnn.close_mesh_device(mesh)
    finally:
        ttnn.set_fabric_config(ttnn.FabricConfig.DISABLED)


def describe_config(config: ttnn.DeviceComputeKernelConfig) -> str:
    """A compute-kernel configuration in words, such as `HiFi3, float32 sums, no approximations`."""
    fidelity = str(config.math_fidelity).rpartition(".")[2]
    sums = "float32" if config.fp32_dest_acc_en else "bfloat16"
    return f"{fidelity}, {sums} sums, {'approximations' if config.math_approx_mode else 'no approximations'}"


def _cards() -> list[str]:
    return sorted(str(path) for path in Path("/dev/tenstorrent").glob("[0-9]*"))


# ---- Boards that do not exist ----------------------------------------------------------------------------------------

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
        board: `n150`, `n300`, `t3000`, `p100` or `p150`.

    Raises:
        ValueError: if there is no such board, or the cache folder's path has blanks in it.
        RuntimeError: if this process uses another board already; ttnn reads its environment once.
    """
    global _used
    if board not in BOARDS:
        raise Refusal("board", f"be one of {list(BOARDS)}", board=board)
    if _used not in (None, board):
        raise RuntimeError(f"board must stay the same for the whole process, got {board!r} after {_used!r}")
    package = Path(ttnn.__file__).parent  # pyright: ignore
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    root = cache / "mha_tt" / f"mock-{zlib.crc32(str(package).encode()):08x}"  # two environments must not share one
    if any(character.isspace() for character in str(root)):
        raise Refusal("the cache folder", "have no blanks in its path, which ttnn's build cannot take", str(root))
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
        name: `n150`, `n300` (a mesh of 1 x 2), `t3000` (1 x 8), `p100` or `p150`.
        values: also compute values, by golden functions, which needs torch. Without them a program is validated in any
            size, and reading a tensor back is an error. Each chip of a mesh has its own.

    Yields:
        The device.

    Raises:
        ModuleNotFoundError: if values are wanted and torch is not installed.
        RuntimeError: if the board does not open, or the process uses another already.
    """
    use(name)
    opened = open_mesh(MESHES[name]) if name in MESHES else open_device()
    with opened as device, shadow() if values else nullcontext():
        yield device


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

"""Mock boards, for any TTNN code.

ttnn can open a *mock* board: every operation checks its arguments and builds its program for the
real grid of cores, but computes nothing. `board` opens one on any machine, without a toolchain, and
`shadow` adds the values. Together they validate a program and compute its results:

    with ttnn_mock.board("n150") as device:
        x = torch.randn(2, 40, 64)
        x = ttnn.from_torch(x, dtype=ttnn.bfloat16, layout=ttnn.TILE_LAYOUT, device=device)
        y = ttnn.to_torch(ttnn.softmax(x, dim=-1))
"""

from __future__ import annotations

import os
import struct
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import ttnn

from ttnn_mock.shadows import shadow

# ---- Descriptions in tt-umd's format -------------------------------------------------------------

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


def _t3000() -> str:
    """Return four n300: chips 0..3 are connected to the host, 4..7 to these; two links between
    neighbors.
    """
    links = []
    for chip in range(4):
        for link in (0, 1):
            links.append(
                f"[{{chip: {chip}, chan: {8 + link}}}, {{chip: {chip + 4}, chan: {link}}}]"
            )
    for chip in (0, 1, 2, 4, 5, 6):  # two rows of four chips
        for link in (0, 1):
            links.append(
                f"[{{chip: {chip}, chan: {14 + link}}}, {{chip: {chip + 1}, chan: {6 + link}}}]"
            )

    architectures = []
    positions = []
    harvesting = []
    for chip in range(8):
        mask = 65 if chip < 4 else 5
        architectures.append(f"{chip}: wormhole_b0")
        positions.append(f"{chip}: [{chip % 4}, {chip // 4}, 0, 0]")
        harvesting.append(f"{chip}: {{noc_translation: true, harvest_mask: {mask}}}")

    boards = []
    for chip in range(4):
        board_id = 72058994491072686 + chip
        boards.append(f"[board_id: {board_id}, board_type: n300, chips: [{chip}, {chip + 4}]]")

    lines = [
        f"arch: {{{', '.join(architectures)}}}",
        f"chips: {{{', '.join(positions)}}}",
        "ethernet_connections:",
        *[f"  - {link}" for link in links],
        "chips_with_mmio: [0: 0, 1: 1, 2: 2, 3: 3]",
        f"harvesting: {{{', '.join(harvesting)}}}",
        f"boards: [{', '.join(boards)}]",
    ]
    return "\n".join(lines) + "\n"


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
    "t3000": _t3000(),
    "p100": _BLACKHOLE % (3, "p100"),
    "p150": _BLACKHOLE % (0, "p150"),
}
"""n150 is one Wormhole, n300 a 1 x 2 mesh of them, t3000 four n300 (a 2 x 4 or 1 x 8 mesh); p100
and p150 are Blackholes.
"""

MESHES = {"n300": (1, 2), "t3000": (1, 8)}
"""Mesh shapes in which `ttnn_mock.board` opens boards of several chips."""

# ---- Opening -------------------------------------------------------------------------------------

# Compiler that ttnn calls. Its version text is part of the cache key of kernels, so that nothing
# compiled here can pass for a real kernel. The shell writes the file itself, which saves the
# process of `cp`.
_COMPILER = """\
#!/bin/sh
case "$*" in *--version*) echo "riscv-tt-elf-g++ (ttnn_mock)"; exit;; esac
while [ "$1" != -o ]; do shift; done
printf 'KERNEL' > "$2" && echo "$2:" > "${2%.*}.d"
"""

_used: str | None = None


def is_in_use() -> bool:
    """Return whether ttnn opens a mock board in this process."""
    return bool(os.environ.get("TT_METAL_MOCK_CLUSTER_DESC_PATH"))


def use(board: str) -> None:
    """Select a mock board for this process, until its end.

    Writes only to `$XDG_CACHE_HOME/ttnn_mock` (`~/.cache/ttnn_mock`), not to ttnn's cache of
    kernels.

    Args:
        board: `n150`, `n300`, `t3000`, `p100` or `p150`.

    Raises:
        ValueError: if there is no such board, or the cache folder's path contains blanks.
        RuntimeError: if this process already uses a different board; ttnn reads its environment
            once.
    """
    global _used
    if board not in BOARDS:
        raise ValueError(f"board must be one of {list(BOARDS)}, got {board=}")
    if _used not in (None, board):
        raise RuntimeError(
            f"board must stay the same for the whole process, got {board!r} after {_used!r}"
        )
    package = Path(ttnn.__file__).parent  # pyright: ignore
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    # Two environments must not share a folder.
    root = cache / "ttnn_mock" / f"{zlib.crc32(str(package).encode()):08x}"
    if any(character.isspace() for character in str(root)):
        raise ValueError(
            f"the cache folder must have no blanks in its path, which ttnn's build cannot take, "
            f"got {root}"
        )
    binaries = root / "runtime" / "sfpi" / "compiler" / "bin"
    binaries.mkdir(parents=True, exist_ok=True)
    # Without runtime/hw, each process links all kernels again.
    for name in ("tt_metal", "ttnn", "runtime/hw"):
        with suppress(FileExistsError):  # by an earlier process, or one that runs right now
            (root / name).symlink_to(package / name)
    kernel = "".join(f"\\{byte:03o}" for byte in _kernel_elf())
    _write(binaries / "riscv-tt-elf-g++", _COMPILER.replace("KERNEL", kernel).encode(), mode=0o755)
    _write(root / f"{board}.yaml", BOARDS[board].encode())
    os.environ["TT_METAL_RUNTIME_ROOT"] = str(root)
    # Without the slash ttnn appends its key to the name.
    os.environ["TT_METAL_CACHE"] = f"{root}/cache/"
    os.environ["TT_METAL_MOCK_CLUSTER_DESC_PATH"] = str(root / f"{board}.yaml")
    # Otherwise a folder "generated" appears in the working directory.
    os.environ.setdefault("TT_METAL_LOGS_PATH", str(root))
    os.environ.setdefault("TT_METAL_LOGGER_LEVEL", "fatal")
    os.environ.setdefault("TT_METAL_DISABLE_BACKTRACE", "1")
    ttnn.begin_trace_capture = _reject_traces  # a trace would end the process
    _used = board


def _reject_traces(*_: Any, **__: Any) -> None:
    raise RuntimeError(
        f"begin_trace_capture must have a device that computes, got a mock {_used}, which has no "
        f"queue"
    )


@contextmanager
def board(name: str = "n150", *, values: bool = True) -> Iterator[ttnn.MeshDevice]:
    """Open a mock board for a `with` block.

    Args:
        name: `n150`, `n300` (a mesh of 1 x 2), `t3000` (1 x 8), `p100` or `p150`.
        values: also compute values, by golden functions, which requires torch; each chip of a mesh
            has its own. Without values programs of any size are validated, and reading back a
            tensor is an error.

    Yields:
        Device.

    Raises:
        ModuleNotFoundError: if values=True and torch is not installed.
        RuntimeError: if the board does not open, or the process already uses a different one.
    """
    use(name)
    with ExitStack() as stack:
        if name in MESHES:
            ttnn.set_fabric_config(ttnn.FabricConfig.FABRIC_1D)  # only before a mesh is opened
            stack.callback(ttnn.set_fabric_config, ttnn.FabricConfig.DISABLED)
            # The default cores are not validated.
            workers = ttnn.DispatchCoreConfig(ttnn.DispatchCoreType.WORKER)
            device = ttnn.open_mesh_device(
                ttnn.MeshShape(*MESHES[name]), dispatch_core_config=workers
            )
            stack.callback(ttnn.close_mesh_device, device)
        else:
            device = ttnn.open_device(device_id=0)
            stack.callback(ttnn.close_device, device)
        if values:
            stack.enter_context(shadow())
        yield device


def _write(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Write a file atomically: another process may be reading or executing it."""
    if path.exists() and path.read_bytes() == content:
        return
    handle, temporary = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
    os.chmod(temporary, mode)
    os.replace(temporary, path)


def _kernel_elf(address: int = 0x10000) -> bytes:
    """Return the smallest kernel that tt-metal's loader accepts: a text segment, a symbol table, a
    relocation section.

    One file serves all processors of Wormhole and Blackhole; the loader checks neither the address
    nor the code.
    """
    names = b"\0.text\0.rela.text\0.symtab\0.strtab\0.shstrtab\0"
    text = struct.pack("<I", 0x00008067)  # the instruction ret
    symbols = bytes(16)
    strings = bytes(4)
    body = text + symbols + strings + names + bytes(-len(names) % 4)
    at = 96
    sections_at = at + len(body)
    header = struct.pack(
        "<HHIIIIIHHHHHH", 2, 243, 1, address, 52, sections_at, 0, 52, 32, 1, 40, 6, 5
    )
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
    table = b"".join(struct.pack("<10I", *section) for section in sections)
    return start + bytes(at - len(start)) + body + table

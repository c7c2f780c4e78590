"""Measure time and memory of whole-checkpoint conversions, compared with reading and writing them
unchanged.

    python benchmarks/convert.py [--gib 1] [--only-attention] [--json PATH]

A synthetic LLaMA-like checkpoint in bfloat16 is written to a temporary folder (--folder), which
needs four times its size. Each step runs in its own process, several times, in changing order; the
median counts.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import ml_dtypes
import numpy as np

from mha_spec import Rope

PREFIX = "model.layers.{i}.self_attn"
HEADS = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 64, "rope": Rope(500000.0)}
WIDTH, MLP_WIDTH, VOCABULARY = 2048, 8192, 32000
ALLOWED_BYTES = (1.5, 500 * 10**6)  # factor of the largest tensor, plus a constant


# ---- The checkpoint ------------------------------------------------------------------------------


def shapes_of(num_layers: int, *, only_attention: bool) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield the names and shapes of the tensors of a checkpoint."""
    if not only_attention:
        yield "model.embed_tokens.weight", (VOCABULARY, WIDTH)
    kv_width = HEADS["num_kv_heads"] * HEADS["head_dim"]
    for i in range(num_layers):
        for name, rows in {"q": WIDTH, "k": kv_width, "v": kv_width, "o": WIDTH}.items():
            yield f"model.layers.{i}.self_attn.{name}_proj.weight", (int(rows), WIDTH)
        if not only_attention:
            yield f"model.layers.{i}.mlp.gate_proj.weight", (MLP_WIDTH, WIDTH)
            yield f"model.layers.{i}.mlp.up_proj.weight", (MLP_WIDTH, WIDTH)
            yield f"model.layers.{i}.mlp.down_proj.weight", (WIDTH, MLP_WIDTH)


def make_checkpoint(path: Path, gib: float, *, only_attention: bool) -> None:
    """Write a checkpoint of about this size."""
    from parity.measure.files import write_tensors

    def size(num_layers: int) -> int:
        shapes = shapes_of(num_layers, only_attention=only_attention)
        return sum(2 * rows * columns for _, (rows, columns) in shapes)

    num_layers = max(1, round((gib * 2**30 - size(0)) / (size(1) - size(0))))
    shapes = dict(shapes_of(num_layers, only_attention=only_attention))
    drawn = np.random.default_rng(0).normal(size=1 << 20).astype(ml_dtypes.bfloat16)

    def read(name: str) -> np.ndarray:
        count = shapes[name][0] * shapes[name][1]
        return np.resize(np.roll(drawn, zlib.crc32(name.encode()) % drawn.size), count).reshape(
            shapes[name]
        )

    write_tensors(path, {name: (shape, drawn.dtype) for name, shape in shapes.items()}, read)


# ---- Steps ---------------------------------------------------------------------------------------


def flush(path: Path) -> None:
    """Flush a file to disk, as a conversion does before it moves the file into place."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def library(source: Path, target: Path) -> None:
    """Use safetensors' own functions."""
    from safetensors.torch import load_file, save_file

    save_file(load_file(source), target)
    flush(target)


def byte_copy(source: Path, target: Path) -> None:
    """Copy bytes, as a lower bound on time."""
    shutil.copyfile(source, target)
    flush(target)


def unchanged(source: Path, target: Path) -> None:
    """Use our own reading and writing, with hash and verification."""
    from parity.measure.files import open_tensors, write_tensors

    with open_tensors(source) as file:
        write_tensors(target, file.infos, file.tensor)


def conversion(layout: str, source_layout: str | None = None) -> Callable[[Path, Path], None]:
    """Return a conversion; without a source layout, the metadata specifies it."""

    def convert(source: Path, target: Path) -> None:
        from parity.port.conversion.convert import convert_file

        convert_file(
            source,
            target,
            source=source_layout,
            target=layout,
            prefix=PREFIX,
            force=True,
            **(HEADS if source_layout else {}),
        )

    return convert


STEPS: dict[str, tuple[str, Callable[[Path, Path], None]]] = {
    "safetensors load_file, save_file": ("source", library),
    "byte copy": ("source", byte_copy),
    "read and written unchanged": ("source", unchanged),
    "to meta.LLaMA": ("source", conversion("meta.LLaMA", "transformers.LLaMA")),
    "back from meta.LLaMA": ("to meta.LLaMA", conversion("transformers.LLaMA")),
    "to qkv_proj": ("source", conversion("qkv_proj", "transformers.LLaMA")),
    "back from qkv_proj": ("to qkv_proj", conversion("transformers.LLaMA")),
}
"""Steps by name: the file that each reads (the checkpoint, or another step's output), and its
function.
"""
YARDSTICK = "safetensors load_file, save_file"


def run_step(name: str, source: Path, target: Path) -> dict[str, float]:
    """Run a step in this process; return its wall and CPU seconds without imports, and its peak
    memory.
    """
    import safetensors.torch  # noqa: F401

    import parity.port.conversion.convert  # noqa: F401

    begin, cpu_begin = time.perf_counter(), time.process_time()
    STEPS[name][1](source, target)
    seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu_begin
    (peak,) = [
        line.split()[1]
        for line in Path("/proc/self/status").read_text().splitlines()
        if "VmHWM" in line
    ]
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "peak_bytes": int(peak) * 1024}


def run_apart(name: str, source: Path, target: Path) -> dict[str, float]:
    """Run a step in its own process."""
    command = [sys.executable, __file__, "--step", name, str(source), str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name}: {done.stderr}")
    return json.loads(done.stdout)


def measure(source: Path, folder: Path, repeats: int) -> dict[str, list[dict[str, float]]]:
    """Run every step `repeats` times, in changing order, because the memory location of a file
    affects its speed.
    """
    files = {"source": source}
    for name in {reads for reads, _ in STEPS.values()} - files.keys():
        files[name] = folder / f"{name}.safetensors"
        run_apart(name, source, files[name])
    found: dict[str, list[dict[str, float]]] = {name: [] for name in STEPS}
    shuffle = random.Random(0).shuffle
    for _ in range(repeats):
        names = list(STEPS)
        shuffle(names)
        for name in names:
            target = folder / "target.safetensors"
            found[name].append(run_apart(name, files[STEPS[name][0]], target))
            target.unlink()
            print(f"  {name}: {found[name][-1]['seconds']:.2f} s", file=sys.stderr, flush=True)
    return found


# ---- The report ----------------------------------------------------------------------------------


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--gib", type=float, default=1.0, help="size of the checkpoint; 1 by default"
    )
    parser.add_argument(
        "--only-attention",
        action="store_true",
        help="leave out all other tensors: the hardest case",
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", help="where the temporary files go")
    parser.add_argument("--json", metavar="PATH", help="also write the figures as JSON")
    parser.add_argument("--step", nargs=3, metavar=("NAME", "FROM", "TO"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.step:
        name, source, target = options.step
        print(json.dumps(run_step(name, Path(source), Path(target))))
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        source = Path(folder) / "source.safetensors"
        make_checkpoint(source, options.gib, only_attention=options.only_attention)
        nbytes = source.stat().st_size
        found = measure(source, Path(folder), options.repeats)
    seconds, cpu_seconds = (
        {name: statistics.median(run[what] for run in runs) for name, runs in found.items()}
        for what in ("seconds", "cpu_seconds")
    )
    peaks = {name: max(run["peak_bytes"] for run in runs) for name, runs in found.items()}
    largest = max(
        2 * rows * columns
        for _, (rows, columns) in shapes_of(1, only_attention=options.only_attention)
    )
    limit = ALLOWED_BYTES[0] * largest + ALLOWED_BYTES[1]
    print(
        f"{nbytes / 2**30:.2f} GiB, largest tensor {largest / 1e6:.0f} MB, median of "
        f"{options.repeats}"
    )
    print(f"{'':36}{'s':>7}{'MB/s':>8}{'ratio':>8}{'cpu s':>8}{'ratio':>8}{'peak MB':>10}")
    for name in STEPS:
        ratio, cpu_ratio = (these[YARDSTICK] / these[name] for these in (seconds, cpu_seconds))
        speed = nbytes / 1e6 / seconds[name]
        print(
            f"{name:36}{seconds[name]:7.2f}{speed:8.0f}{ratio:8.2f}{cpu_seconds[name]:8.2f}{cpu_ratio:8.2f}"
            f"{peaks[name] / 1e6:10.0f}"
        )
    print(
        f"ratio: to {YARDSTICK}; a conversion should have at least 0.9, and at most "
        f"{limit / 1e6:.0f} MB"
    )
    if options.json:
        content = {
            "format": 1,
            "platform": platform.platform(),
            "cpus": os.cpu_count(),
            "nbytes": nbytes,
            "largest_tensor": largest,
            "allowed_peak_bytes": limit,
            "yardstick": YARDSTICK,
            "steps": {
                name: {
                    "seconds": [run["seconds"] for run in runs],
                    "cpu_seconds": [run["cpu_seconds"] for run in runs],
                    "ratio": seconds[YARDSTICK] / seconds[name],
                    "peak_bytes": peaks[name],
                }
                for name, runs in found.items()
            },
        }
        Path(options.json).write_text(f"{json.dumps(content, indent=1)}\n")


if __name__ == "__main__":
    main()

"""Speed of the conversion of a checkpoint, compared with reading and writing it with safetensors' own functions."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from mha_spec import AttentionSpec
from parity.conversion.convert import convert_file
from parity.core.weights import random_weights
from parity_lab.bench.measure import LIMIT, OURS, Row, run_in_turn, times_of

SPEC = AttentionSpec(1024, 16, qkv_bias=False, out_bias=False)
PREFIX = "model.layers.{i}.self_attn"


def bench_conversion(*, num_layers: int, repeats: int) -> list[Row]:
    """A row for attention layers in float32, from LLaMA's layout in transformers to that of Meta, on the disk.

    Args:
        num_layers: how many, of 16 MiB each.
        repeats: how often.
    """
    from safetensors.numpy import load_file, save_file

    weights = random_weights(SPEC, 0)
    names = {name: name.replace("out_proj", "o_proj") for name in weights}
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "source.safetensors", Path(folder) / "target.safetensors"
        save_file(
            {f"{PREFIX.format(i=i)}.{names[name]}": x for i in range(num_layers) for name, x in weights.items()}, source
        )
        heads: dict[str, Any] = {
            "num_heads": SPEC.num_heads,
            "num_kv_heads": SPEC.num_kv_heads,
            "head_dim": SPEC.head_dim,
            "force": True,
        }

        def ours() -> None:
            convert_file(source, target, source="transformers.LLaMA", target="meta.LLaMA", prefix=PREFIX, **heads)

        def library() -> None:
            save_file(load_file(source), target)
            _flush(target)

        def copy() -> None:
            shutil.copyfile(source, target)
            _flush(target)

        runs = {OURS: ours, "load_file, save_file": library, LIMIT: copy}
        for run in runs.values():
            run()
        seconds = run_in_turn(runs, budget_s=0.0, rounds=(repeats, repeats), warm_up=False)
        nbytes = float(source.stat().st_size)
    shape = [num_layers, 4, SPEC.d_model, SPEC.d_model]
    fields = times_of(seconds, amount=nbytes, probe=nbytes)  # the limit is a copy of the file
    return [Row("convert", "", shape, np.dtype(np.float32).name, group="convert", axes="layers 4 E E", **fields)]


def _flush(path: Path) -> None:
    """Wait until a file is on the disk, as a conversion does before it moves its own into place."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)

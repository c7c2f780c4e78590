"""Speed of the conversion of a checkpoint, compared with reading and writing it with safetensors'
own functions.

Each run has its own process, as for users: in one that has used memory before, its allocator
decides the ratio.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

from mha_spec import AttentionSpec
from parity.measure.core.weights import random_weights
from parity_lab.bench.imports import run_python
from parity_lab.bench.measure import LIMIT, OURS, Row, times_of

SPEC = AttentionSpec(1024, 16, qkv_bias=False, out_bias=False)
PREFIX = "model.layers.{i}.self_attn"
HEADS = f"num_heads={SPEC.num_heads}, num_kv_heads={SPEC.num_kv_heads}, head_dim={SPEC.head_dim}"

STEPS = {
    OURS: (
        f"convert_file(*paths, source='transformers.LLaMA', target='meta.LLaMA', "
        f"prefix='{PREFIX}', {HEADS})"
    ),
    "load_file, save_file": "save_file(load_file(paths[0]), paths[1])",
    LIMIT: "shutil.copyfile(*paths)",
}
PROGRAM = """
import os, shutil, sys, time
from safetensors.numpy import load_file, save_file
from parity.port.conversion.convert import convert_file
paths = sys.argv[1:]
begin = time.perf_counter()
{step}
os.fsync(os.open(paths[1], os.O_RDONLY))  # until the file is on the disk
print(time.perf_counter() - begin)
"""


def bench_conversion(*, num_layers: int, repeats: int) -> list[Row]:
    """Return a row for attention layers in float32, from LLaMA's layout in transformers to Meta's,
    on the disk.

    Args:
        num_layers: how many, of 16 MiB each.
        repeats: how often.
    """
    from safetensors.numpy import save_file

    weights = {}
    for name, weight in random_weights(SPEC, 0).items():
        weights[name.replace("out_proj", "o_proj")] = weight
    tensors = {}
    for index in range(num_layers):
        prefix = PREFIX.format(i=index)
        for name, weight in weights.items():
            tensors[f"{prefix}.{name}"] = weight
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source.safetensors"
        target = Path(folder) / "target.safetensors"
        save_file(tensors, source)
        seconds: dict[str, list[float]] = {name: [] for name in STEPS}
        rng = random.Random(0)
        for _ in range(repeats):
            names = list(STEPS)
            rng.shuffle(names)
            for name in names:
                program = PROGRAM.format(step=STEPS[name])
                output = run_python("-c", program, str(source), str(target))
                seconds[name].append(float(output))
                target.unlink()
        nbytes = float(source.stat().st_size)
    shape = [num_layers, 4, SPEC.d_model, SPEC.d_model]
    # The limit is a copy of the file.
    fields = times_of(seconds, amount=nbytes, probe=nbytes)
    row = Row("convert", "", shape, "float32", group="convert", axes="layers 4 E E", **fields)
    return [row]

"""Measure a step of mha_torch with a cache, compared with the same step by hand.

    python benchmarks/step.py [--rounds 300] [--json PATH]

Three steps share their weights: by hand, with `F.linear`; the same in a module of four `nn.Linear`;
and `MultiHeadAttentionWithCache`. Each has a cache of its own. Processor seconds of one thread. A
round runs all three in random order, so that the load of the machine affects all of them.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mha_torch

WORKS = [(16, 64, 4), (1024, 512, 8), (2048, 512, 8), (4096, 512, 8), (1024, 1024, 16)]
"""Cached tokens, width, and heads of each row."""


class ByHand:
    """A step without checks, whose cache is two tensors and the number of filled slots."""

    def __init__(self, slots: tuple[Tensor, Tensor], filled: int) -> None:
        self.keys, self.values = slots
        self.filled = filled

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Append projected k and v (1, 1, E), and return the heads of the context side by side."""
        _, num_heads, _, head_dim = self.keys.shape
        q, k, v = (x.view(1, 1, num_heads, head_dim).transpose(1, 2) for x in (q, k, v))
        stop = self.filled + 1
        self.keys[:, :, self.filled : stop] = k
        self.values[:, :, self.filled : stop] = v
        self.filled = stop
        context = F.scaled_dot_product_attention(
            q, self.keys[:, :, :stop], self.values[:, :, :stop]
        )
        return context.transpose(1, 2).flatten(2)


class Module(nn.Module):
    """A step by hand in a module with the projections of a layer."""

    def __init__(self, layer: mha_torch.MultiHeadAttentionWithCache, cache: ByHand) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = layer.q_proj, layer.k_proj, layer.v_proj
        self.out_proj = layer.out_proj
        self.cache = cache

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of a token, (1, 1, E)."""
        q = self.q_proj(x)
        k = self.k_proj(x)
        v = self.v_proj(x)
        return self.out_proj(self.cache.attend(q, k, v))


def steps_of(
    seq_len: int, width: int, num_heads: int, rounds: int
) -> dict[str, Callable[[], object]]:
    """Return each step as a function, by name."""
    layer = mha_torch.MultiHeadAttentionWithCache(width, num_heads).eval().requires_grad_(False)
    weights = dict(layer.named_parameters())
    x = torch.randn(1, 1, width)
    shape = (1, num_heads, seq_len + rounds + 1, width // num_heads)

    def slots() -> tuple[Tensor, Tensor]:
        return torch.randn(shape), torch.randn(shape)

    def project(name: str, x: Tensor) -> Tensor:
        return F.linear(x, weights[f"{name}_proj.weight"], weights[f"{name}_proj.bias"])

    by_hand = ByHand(slots(), seq_len)
    module = Module(layer, ByHand(slots(), seq_len)).eval()
    lengths = torch.full((1,), seq_len, dtype=torch.int32)
    cache = mha_torch.KVCache(*slots(), lengths)

    def ours() -> Tensor:
        nonlocal cache
        output, cache = layer(x, cache)
        return output

    return {
        "by hand": lambda: project("out", by_hand.attend(*(project(name, x) for name in "qkv"))),
        "module by hand": lambda: module(x),
        "ours": ours,
    }


def measured(steps: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the median time of each step, in µs."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    for _ in range(rounds):
        random.shuffle(names)
        for name in names:
            start = time.thread_time()
            steps[name]()
            times[name].append(time.thread_time() - start)
    return {name: 1e6 * statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure a step of mha_torch.")
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    print(f"{'cached':>7}{'width':>7}{'by hand':>10}{'module':>10}{'ours':>10}{'ratio':>8}  (µs)")
    with torch.inference_mode():
        for seq_len, width, num_heads in WORKS:
            steps = steps_of(seq_len, width, num_heads, options.rounds)
            times = measured(steps, options.rounds)
            ratio = times["by hand"] / times["ours"]
            columns = "".join(f"{value:10.0f}" for value in times.values())
            print(f"{seq_len:7}{width:7}{columns}{ratio:8.2f}", flush=True)
            rows.append({"seq_len": seq_len, "width": width, "us": times, "ratio": ratio})
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()

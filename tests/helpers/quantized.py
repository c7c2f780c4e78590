"""A decoder with a quantized cache in torch, right or with a bug, as people write it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import parity
from mha_spec import AttentionSpec, Rope
from parity.measure.core.case import Case
from parity.measure.core.problem import Problem
from parity.measure.core.quantization import CacheQuantization

LARGEST = {"int8": 127.0, "int4": 7.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
SHARED_AXES = {
    "tensor": (0, 1, 2, 3),
    "head": (0, 2, 3),
    "channel": (0, 2),
    "token": (1, 3),
    "token_head": (3,),
}
SPEC = AttentionSpec(32, 4, num_kv_heads=2, qkv_bias=False, out_bias=False, rope=Rope())

Through = Callable[["Quantizer", str, torch.Tensor], torch.Tensor]
"""Returns new keys or values as they are read from the cache, by `keys` or `values`."""


def problem_of(
    quantization: CacheQuantization,
    dtype: str = "float32",
    spec: AttentionSpec = SPEC,
    name: str = "quantized",
    **options: Any,
) -> Problem:
    """Return the problem of a prompt and two calls with a quantized cache."""
    case = Case(
        name,
        spec,
        "a quantized cache",
        seq_len=7,
        chunks=(4, 1, 2),
        capacity=8,
        cache_quantization=quantization,
        **options,
    )
    return parity.make_problem(case, dtype)


class Quantizer:
    """Rounding of a cache, with its scales."""

    def __init__(self, quantization: CacheQuantization, num_heads: int) -> None:
        self.quantization = quantization
        self.num_heads = num_heads
        self.of_first_call: dict[str, torch.Tensor] = {}

    @property
    def limits(self) -> tuple[float, float]:
        """The smallest and the largest stored number."""
        largest = LARGEST[self.quantization.dtype]
        if self.quantization.zero_point == "none":
            return -largest, largest
        return 0.0, 2 * largest + 1

    def scales(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Return the scales of keys or values."""
        quantization = self.quantization
        own = quantization.key_scales if name == "keys" else quantization.value_scales
        if own is not None:
            shape = (1, 1, 1, 1) if len(own) == 1 else (1, self.num_heads, 1, -1)
            scales = torch.tensor(own).reshape(shape)
        else:
            scales = self.computed(self.source(name, x), quantization.scale_per_of(name))
        return scales.to(getattr(torch, quantization.scale_dtype)).float()

    def source(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Return the keys or values of which scales are computed."""
        if self.quantization.scale_per_of(name) in ("tensor", "head", "channel"):
            return self.of_first_call.setdefault(name, x)
        return x

    def zeros(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Return the keys or values that are stored as 0."""
        quantization = self.quantization
        if quantization.zero_point == "none":
            return torch.zeros(())
        lowest, _ = self.range(self.source(name, x), quantization.scale_per_of(name))
        if quantization.zero_point == "minimum":
            return lowest.to(getattr(torch, quantization.scale_dtype)).float()
        scales = self.scales(name, x)
        return (lowest / scales).round() * scales

    def range(self, x: torch.Tensor, group: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the ends of groups of values."""
        axes = SHARED_AXES[group]
        if self.quantization.zero_point == "none":
            size = x.abs().amax(axes, keepdim=True)
            return -size, size
        lowest, highest = x.amin(axes, keepdim=True), x.amax(axes, keepdim=True)
        if self.quantization.zero_point == "integer":
            return lowest.clamp(max=0), highest.clamp(min=0)
        return lowest, highest

    def computed(self, x: torch.Tensor, group: str) -> torch.Tensor:
        """Return the scales of groups of values."""
        lowest, highest = self.range(x, group)
        smallest, largest = self.limits
        size = highest - lowest
        return torch.where(size > 0, size / (largest - smallest), 1.0)

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        """Return values as they are stored."""
        dtype = self.quantization.dtype
        x = x.clamp(*self.limits)
        if dtype.startswith("int"):
            return x.round()
        return x.to(getattr(torch, dtype)).float()


def rightly(quantizer: Quantizer, name: str, x: torch.Tensor) -> torch.Tensor:
    """Return keys or values, rounded with their scales."""
    scales, zeros = quantizer.scales(name, x), quantizer.zeros(name, x)
    return quantizer.rounded((x - zeros) / scales) * scales + zeros


@dataclass(frozen=True)
class NewTokens:
    """Keys and values of a call, 0 in padding, and where they are written."""

    keys: torch.Tensor
    values: torch.Tensor
    positions: torch.Tensor
    before: np.ndarray
    added: np.ndarray

    def read(
        self, quantizer: Quantizer, through: Through, rope: Rope | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return them as they are read from the cache."""
        dtype = self.keys.dtype
        keys = through(quantizer, "keys", self.keys.float()).to(dtype)
        if quantizer.quantization.before_rope:
            keys = rotated(keys, self.positions, rope)
        return keys, through(quantizer, "values", self.values.float()).to(dtype)

    def write(
        self, keys: torch.Tensor, values: torch.Tensor, new_keys: torch.Tensor, new_values: Any
    ) -> None:
        """Write real tokens into the cache."""
        for b, (first, count) in enumerate(zip(self.before, self.added, strict=True)):
            keys[b, :, first : first + count] = new_keys[b, :, :count]
            values[b, :, first : first + count] = new_values[b, :, :count]


def computed(
    problem: Problem, through: Through = rightly, quantization: CacheQuantization | None = None
) -> dict[str, np.ndarray]:
    """Return all stages of a decoder with a quantized cache.

    Args:
        problem: the problem.
        through: returns new keys or values as they are read.
        quantization: of the cache, if not the problem's.
    """
    case, spec = problem.case, problem.spec
    if quantization is None:
        quantization = case.cache_quantization
    assert quantization is not None
    quantizer = Quantizer(quantization, spec.num_kv_heads)
    w = {name: parity.to_torch(x) for name, x in problem.weights.items()}
    dtype = w["q_proj.weight"].dtype
    group = spec.num_heads // spec.num_kv_heads
    keys = torch.zeros(case.batch, spec.num_kv_heads, case.capacity, spec.head_dim, dtype=dtype)
    values = keys.clone()
    stages: dict[str, torch.Tensor] = {}
    exact_calls: list[NewTokens] = []
    for step, chunk in enumerate(case.chunks):
        x = parity.to_torch(problem.step_input(step))
        before, added = np.array(case.lengths_before(step)), np.array(case.added(step))
        positions = torch.tensor(before[:, None] + np.arange(chunk))
        is_real = torch.tensor(np.arange(chunk) < added[:, None])[:, None, :, None]

        def heads(name: str, count: int, x: torch.Tensor = x) -> torch.Tensor:
            return (x @ w[f"{name}_proj.weight"].T).unflatten(-1, (count, -1)).transpose(1, 2)

        q = rotated(heads("q", spec.num_heads), positions, spec.rope)
        unrotated = heads("k", spec.num_kv_heads)
        k, v = rotated(unrotated, positions, spec.rope), heads("v", spec.num_kv_heads)
        entering = unrotated if quantization.before_rope else k
        new = NewTokens(entering * is_real, v * is_real, positions, before, added)
        is_exact = quantization.exact == "new" or (quantization.exact == "first_call" and step == 0)
        if is_exact:
            new.write(keys, values, k, v)
            exact_calls.append(new)
        else:
            new.write(keys, values, *new.read(quantizer, through, spec.rope))
        repeated = keys.repeat_interleave(group, 1).float()
        scores = q.float() @ repeated.mT / spec.head_dim**0.5
        mask = (torch.arange(case.capacity) > positions[:, :, None])[:, None]
        weights = scores.masked_fill(mask, -torch.inf).softmax(-1).to(dtype)
        context = weights @ values.repeat_interleave(group, 1)
        output = context.transpose(1, 2).flatten(2) @ w["out_proj.weight"].T
        call = {
            "q": q,
            "k": k,
            "v": v,
            "cache.keys": keys.clone(),
            "cache.values": values.clone(),
            "scores": scores,
            "attn_weights": weights,
            "context": context,
            "output": output,
        }
        stages |= {f"step{step}.{name}": x for name, x in call.items()}
        num_exact = sum(tokens.positions.shape[1] for tokens in exact_calls)
        if step == 0 or num_exact >= quantization.residual_length:
            for tokens in exact_calls:
                tokens.write(keys, values, *tokens.read(quantizer, through, spec.rope))
            exact_calls = []
    return {name: parity.to_numpy(x) for name, x in stages.items()}


def rotated(x: torch.Tensor, positions: torch.Tensor, rope: Rope | None) -> torch.Tensor:
    """Return heads (B, N, T, H), rotated by positions (B, T) in halves."""
    if rope is None:
        return x
    half = x.shape[-1] // 2
    frequencies = rope.theta ** (-torch.arange(half, dtype=torch.float32) / half)
    angles = positions[:, None, :, None].float() * frequencies
    first, second = x.float().chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)

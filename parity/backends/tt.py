"""The tt backend: canonical weights into `mha_tt` modules, and cases through them.

Without a card or a simulator the cases run on a mock board, `MHA_TT_MOCK` (n150 by default), which validates every
program; the values are then those of ttnn's golden functions. See `mha_tt.mock`.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from importlib import metadata
from typing import Any

import ml_dtypes
import numpy as np

os.environ.setdefault("LOGURU_LEVEL", "WARNING")  # ttnn tells its whole configuration when it is imported
import ttnn  # pyright: ignore[reportMissingImports]  (it lies in the other environment)

import mha_tt
from parity.backends import values_to_weigh
from parity.core.arrays import to_numpy
from parity.core.problem import Problem
from parity.core.reference import Step, Values, in_step
from parity.core.spec import AttentionSpec, Case
from parity.core.weights import Weights, check_weights, dtype_named, unpack_qkv, weight_shapes

HAS_GRADIENTS = False  # ttnn has no automatic differentiation

DTYPES = {"float32": ttnn.float32, "bfloat16": ttnn.bfloat16}


def from_numpy(x: np.ndarray) -> ttnn.Tensor:
    """The tensor of the same values and dtype."""
    return mha_tt.upload(x, device=open_device(), dtype=DTYPES[x.dtype.name])


@cache
def open_device() -> ttnn.MeshDevice:
    """The device that cases run on, opened once and kept open until the process ends."""
    if mha_tt.target() is None:
        mha_tt.mock.use(os.environ.get("MHA_TT_MOCK", "n150"))
    opened = ExitStack()
    device = opened.enter_context(mha_tt.open_device())
    atexit.register(opened.close)
    return device


def why_skipped(case: Case, dtype: str) -> str | None:
    """Why a case cannot run in a dtype, or None if it can."""
    return None if dtype in DTYPES else f"ttnn has no {dtype}"


# ---- Weights ---------------------------------------------------------------------------------------------------------


def load_into(module: Any, weights: Mapping[str, np.ndarray]) -> Any:
    """Fill a module of `mha_tt` from canonical weights, bit for bit, or leave it as it was.

    A module with bfloat8_b weights takes those of bfloat16 and rounds them.
    """
    weights = check_weights(weights, spec_of(module))
    expected = np.dtype(np.float32 if module.weight_dtype == ttnn.float32 else ml_dtypes.bfloat16)
    for name, weight in weights.items():
        if weight.dtype != expected:
            raise TypeError(f"weights must be {expected} for the module, got {name}.dtype={weight.dtype}")
    module.load_weights(weights)
    return module


def spec_of(module: Any) -> AttentionSpec:
    """The specification of a module of `mha_tt`."""
    return AttentionSpec(**module.config)


def weights_of(module: Any) -> Weights:
    """The canonical weights of a module of `mha_tt`, bit for bit; those of bfloat8_b as bfloat16."""
    spec = spec_of(module)
    held = mha_tt.download_weights(
        module.weights,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        rope=spec.rope_theta is not None,
    )
    if module.weight_dtype != ttnn.float32:
        held = {name: weight.astype(ml_dtypes.bfloat16) for name, weight in held.items()}
    return unpack_qkv(held, spec) if spec.fused_qkv else {name: held[name] for name in weight_shapes(spec)}


# ---- Cases -----------------------------------------------------------------------------------------------------------


def steps(problem: Problem) -> list[Step]:
    """The stages of a problem as functions, in the order of the data flow: see `parity.core.reference.steps`."""
    layer = _Layer(problem)
    if not problem.case.is_cached:
        return [layer.mask, layer.qkv, layer.scores, layer.attn_weights, layer.context, layer.output, layer.whole]
    return [in_step(index, step) for index in range(len(problem.case.chunks)) for step in layer.cached_steps(index)]


def gradients(problem: Problem) -> dict[str, np.ndarray]:
    """There are none: see `HAS_GRADIENTS`."""
    raise NotImplementedError(f"ttnn has no automatic differentiation, asked for {problem.case.name}")


class _Layer:
    """A problem's arrays, and each stage of it.

    On the device a head has more features than the layer's; stages are compared without them, and must be 0 there.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.spec = problem.spec
        self.dtype = dtype_named(problem.dtype)
        self.rope = problem.spec.rope_theta is not None
        self.slots = mha_tt.head_slots(self.spec.head_dim, rope=self.rope)
        self.padded = mha_tt.padded_head_dim(self.spec.head_dim, rope=self.rope)
        self.inputs = {name: from_numpy(x) for name, x in problem.inputs.items() if name in ("query", "key")}
        kind = mha_tt.MultiHeadAttentionWithCache if problem.case.is_cached else mha_tt.MultiHeadAttention
        module = kind(**self.spec.keywords, device=open_device(), dtype=DTYPES[problem.dtype]).eval()
        self.module = load_into(module, problem.weights)
        self.weights = self.module.weights

    def heads_from_numpy(self, x: np.ndarray) -> ttnn.Tensor:
        padded = np.zeros((*x.shape[:-1], self.padded), x.dtype)
        padded[..., self.slots] = x
        return from_numpy(padded)

    def heads_to_numpy(self, x: ttnn.Tensor) -> np.ndarray:
        padded = to_numpy(x)
        heads = padded[..., self.slots]
        is_nan = np.isnan(heads).all(axis=-1)  # a token that is NaN is so in all features
        if np.delete(padded, self.slots, axis=-1)[~is_nan].any():
            raise ValueError(f"features that pad a head must be 0, got others in {padded.shape}")
        return heads

    def mask(self, _: Values) -> dict[str, np.ndarray]:
        case = self.problem.case
        shape = (case.batch, self.spec.num_heads, case.seq_len, case.key_len)
        return {"mask": np.broadcast_to(self.build_mask(), shape)}

    def build_mask(self) -> np.ndarray:
        case = self.problem.case
        lengths = case.key_padding_lengths
        mask = mha_tt.create_attention_mask(
            case.seq_len, case.key_len, is_causal=case.is_causal, key_padding_lengths=lengths
        )
        if case.window_size is not None:
            mask = mask | mha_tt.create_sliding_window_mask(case.seq_len, case.key_len, window_size=case.window_size)
        return mask | self.problem.inputs["mask"] if "mask" in self.problem.inputs else mask

    def project(
        self, query: ttnn.Tensor, key: ttnn.Tensor | None, positions: np.ndarray | None
    ) -> dict[str, np.ndarray]:
        key = query if key is None else key
        qkv = mha_tt.project_qkv(
            mha_tt.project_with(self.weights),
            query,
            key,
            key,
            num_heads=self.spec.num_heads,
            num_kv_heads=self.spec.num_kv_heads,
            fused_qkv=self.spec.fused_qkv,
            positions=positions,
            rope_theta=self.spec.rope_theta,
            head_dim=self.spec.head_dim,
        )
        return {name: self.heads_to_numpy(x) for name, x in zip("qkv", qkv, strict=True)}

    def qkv(self, _: Values) -> dict[str, np.ndarray]:
        return self.project(self.inputs["query"], self.inputs.get("key"), None)

    def scores(self, values: Values) -> dict[str, np.ndarray]:
        q, k = self.heads_from_numpy(values["q"]), self.heads_from_numpy(values["k"])
        bias = self.problem.inputs.get("bias")
        return {"scores": to_numpy(mha_tt.attention_scores(q, k, bias, head_dim=self.spec.head_dim))}

    def attn_weights(self, values: Values) -> dict[str, np.ndarray]:
        attn_weights = mha_tt.masked_softmax(from_numpy(values["scores"]), values["mask"])
        return {"attn_weights": to_numpy(attn_weights).astype(self.dtype)}

    def context(self, values: Values) -> dict[str, np.ndarray]:
        v = self.heads_from_numpy(values_to_weigh(self.problem, values))
        context = mha_tt.attention_context(from_numpy(values["attn_weights"]), v)
        return {"context": self.heads_to_numpy(context)}

    def output(self, values: Values) -> dict[str, np.ndarray]:
        output = mha_tt.combine_heads(self.heads_from_numpy(values["context"]))
        if self.spec.out_proj:
            return {"output": to_numpy(mha_tt.project_with(self.weights)("out_proj", output))}
        return {"output": self.combined_to_numpy(output)}

    def combined_to_numpy(self, output: ttnn.Tensor) -> np.ndarray:
        """The output of a layer; the features that pad its heads are still in it where no projection follows."""
        if self.spec.out_proj:
            return to_numpy(output)
        batch, seq_len, _ = output.shape
        heads = mha_tt.split_heads(output, self.spec.num_heads)
        return self.heads_to_numpy(heads).swapaxes(1, 2).reshape(batch, seq_len, -1)

    def whole(self, _: Values) -> dict[str, np.ndarray]:
        query, key = self.inputs["query"], self.inputs.get("key")
        mask = self.build_mask() if self.problem.case.has_mask else None
        bias = self.problem.inputs.get("bias")
        output, attn_weights = self.module(query, key, mask=mask, bias=bias, need_weights=True)
        fused, _ = self.module(query, key, mask=mask, bias=bias)
        outputs = {"module.output": self.combined_to_numpy(output), "fused.output": self.combined_to_numpy(fused)}
        return {"module.attn_weights": to_numpy(attn_weights), **outputs}

    def cached_steps(self, index: int) -> list[Step]:
        case = self.problem.case
        x = self.problem.step_input(index)
        lengths = np.array(case.lengths_before(index), np.int32)
        new_lengths = np.array(case.added(index), np.int32) if case.new_lengths else None

        def cache_of(values: Values, name: str) -> mha_tt.KVCache:
            cache = self.module.init_cache(case.batch, case.capacity)
            if index == 0:
                return cache
            keys, values_, lengths = (values[f"previous.{name}.{part}"] for part in ("keys", "values", "lengths"))
            filler = np.zeros((*keys.shape[:2], cache.keys.shape[2] - case.capacity, keys.shape[3]), keys.dtype)
            keys, values_ = (self.heads_from_numpy(np.concatenate([x, filler], axis=2)) for x in (keys, values_))
            return mha_tt.KVCache(keys, values_, lengths, case.capacity)

        def stages_of(cache: mha_tt.KVCache, name: str) -> dict[str, np.ndarray]:
            stages: dict[str, np.ndarray] = {f"{name}.lengths": cache.lengths}
            for part, slots in (("keys", cache.keys), ("values", cache.values)):
                array = self.heads_to_numpy(slots)
                if array[:, :, case.capacity :].any():
                    raise ValueError(f"slots beyond the capacity must be 0, got others in {name}.{part}")
                stages[f"{name}.{part}"] = array[:, :, : case.capacity]
            return stages

        def mask(_: Values) -> dict[str, np.ndarray]:
            mask = mha_tt.create_cache_mask(lengths, case.chunks[index], case.capacity)
            shape = (case.batch, case.spec.num_heads, case.chunks[index], case.capacity)
            return {"mask": np.broadcast_to(mask, shape)}

        def qkv(_: Values) -> dict[str, np.ndarray]:
            return self.project(from_numpy(x), None, lengths[:, None] + np.arange(case.chunks[index]))

        def cache(values: Values) -> dict[str, np.ndarray]:
            k, v = self.heads_from_numpy(values["k"]), self.heads_from_numpy(values["v"])
            grown = mha_tt.append_to_cache(cache_of(values, "cache"), k, v, new_lengths=new_lengths)
            return stages_of(grown, "cache")

        def whole(values: Values) -> dict[str, np.ndarray]:
            output, grown = self.module(from_numpy(x), cache_of(values, "module.cache"), new_lengths=new_lengths)
            return {"module.output": self.combined_to_numpy(output), **stages_of(grown, "module.cache")}

        def scores(values: Values) -> dict[str, np.ndarray]:
            return self.scores({**values, "k": values["cache.keys"]})

        def context(values: Values) -> dict[str, np.ndarray]:
            return self.context({**values, "v": values["cache.values"]})

        return [mask, qkv, cache, scores, self.attn_weights, context, self.output, whole]


# ---- Surroundings ----------------------------------------------------------------------------------------------------


@contextmanager
def lock(dtype: str) -> Iterator[dict[str, Any]]:
    """Tell what sets the numbers of a device, which is fixed by each module; on a mock board, compute the values."""
    device = open_device()
    is_mock = mha_tt.target() == "mock"
    with ExitStack() as stack:
        if is_mock:
            stack.enter_context(mha_tt.mock.shadow())
        yield {
            "arithmetic": "ieee" if is_mock else "tensix",
            "compute_kernel_config": mha_tt.describe_config(mha_tt.accurate_config(device)),
            "values": "golden functions" if is_mock else "device",
        }


def environment() -> dict[str, Any]:
    """Versions and devices."""
    device = open_device()
    grid = device.compute_with_storage_grid_size()
    architecture = str(device.arch()).rpartition(".")[2].lower()
    return {
        "ttnn": metadata.version("ttnn"),
        "device": mha_tt.describe_target(),
        "devices": [f"{architecture}, {grid.x} x {grid.y} cores"],
    }

"""The torch backend: canonical weights into `mha_torch` modules, and cases through them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

import mha_torch
from parity.backends import values_to_weigh
from parity.core.arrays import to_numpy, to_torch
from parity.core.problem import Problem
from parity.core.reference import Step, Values, in_step
from parity.core.spec import AttentionSpec, Case
from parity.core.weights import Weights, check_held, check_weights, pack_qkv, unpack_qkv, weight_shapes

from_numpy = to_torch


# ---- Weights ---------------------------------------------------------------------------------------------------------


def load_into(module: Any, weights: Mapping[str, np.ndarray]) -> Any:
    """Fill a module of `mha_torch` from canonical weights, bit for bit, or leave it as it was."""
    spec = spec_of(module)
    tensors = to_state_dict(check_weights(weights, spec), spec)
    parameters = dict(module.named_parameters())
    check_held(parameters, spec)
    for name, tensor in tensors.items():
        if tensor.dtype != parameters[name].dtype:
            raise TypeError(
                f"weights must have the dtype of the module, got {tensor.dtype} and {parameters[name].dtype} for {name}"
            )
    with torch.no_grad():
        for name, tensor in tensors.items():
            parameters[name].copy_(tensor)
    return module


def spec_of(module: Any) -> AttentionSpec:
    """The specification of a module of `mha_torch`."""
    return AttentionSpec(**module.config)


def weights_of(module: Any) -> Weights:
    """The canonical weights of a module of `mha_torch`, bit for bit."""
    spec, parameters = spec_of(module), dict(module.named_parameters())
    check_held(parameters, spec)
    return from_state_dict(parameters, spec)


def to_state_dict(weights: Mapping[str, np.ndarray], spec: AttentionSpec) -> dict[str, Tensor]:
    """Canonical weights as the tensors that a layer of that specification holds."""
    held = pack_qkv(weights) if spec.fused_qkv else weights
    return {name: from_numpy(weight) for name, weight in held.items()}


def from_state_dict(tensors: Mapping[str, Tensor], spec: AttentionSpec) -> Weights:
    """Canonical weights from the tensors that a layer of that specification holds."""
    held = {name: to_numpy(tensor).copy() for name, tensor in tensors.items()}
    return unpack_qkv(held, spec) if spec.fused_qkv else {name: held[name] for name in weight_shapes(spec)}


# ---- Cases -----------------------------------------------------------------------------------------------------------

HAS_GRADIENTS = True


def why_skipped(case: Case, dtype: str) -> str | None:
    """Why a case cannot run in a dtype, or None: here all can."""
    return None


def steps(problem: Problem) -> list[Step]:
    """The stages of a problem as functions, in the order of the data flow: see `parity.core.reference.steps`."""
    layer = _Layer(problem)
    if not problem.case.is_cached:
        return [layer.mask, layer.qkv, layer.scores, layer.attn_weights, layer.context, layer.output, layer.whole]
    return [in_step(index, step) for index in range(len(problem.case.chunks)) for step in layer.cached_steps(index)]


def gradients(problem: Problem) -> dict[str, np.ndarray]:
    """Gradients of sum(output * cotangent) on the plain path, `grad.…`, and on the fused one, `fused.grad.…`."""
    layer = _Layer(problem)
    return {**layer.backward("", need_weights=True), **layer.backward("fused.", need_weights=False)}


class _Layer:
    """A problem's arrays, and each stage of it."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.spec = problem.spec
        self.inputs = {name: from_numpy(x) for name, x in problem.inputs.items()}
        self.weights = to_state_dict(problem.weights, problem.spec)
        kind = mha_torch.MultiHeadAttentionWithCache if problem.case.is_cached else mha_torch.MultiHeadAttention
        module = kind(**problem.spec.keywords, dtype=getattr(torch, problem.dtype)).eval()
        self.module = load_into(module, problem.weights)

    def mask(self, _: Values) -> dict[str, np.ndarray]:
        case = self.problem.case
        shape = (case.batch, self.spec.num_heads, case.seq_len, case.key_len)
        return {"mask": to_numpy(self.build_mask().expand(shape))}

    def build_mask(self) -> Tensor:
        case = self.problem.case
        lengths = case.key_padding_lengths
        mask = mha_torch.create_attention_mask(
            case.seq_len, case.key_len, is_causal=case.is_causal, key_padding_lengths=lengths
        )
        if case.window_size is not None:
            window = mha_torch.create_sliding_window_mask(case.seq_len, case.key_len, window_size=case.window_size)
            mask = mask | window
        return mask | self.inputs["mask"] if "mask" in self.inputs else mask

    def project(self, query: Tensor, key: Tensor | None, positions: Tensor | None) -> dict[str, np.ndarray]:
        key = query if key is None else key
        qkv = mha_torch.project_qkv(
            mha_torch.project_with(self.weights),
            query,
            key,
            key,
            num_heads=self.spec.num_heads,
            num_kv_heads=self.spec.num_kv_heads,
            fused_qkv=self.spec.fused_qkv,
            positions=positions,
            rope_theta=self.spec.rope_theta,
        )
        return {name: to_numpy(x) for name, x in zip("qkv", qkv, strict=True)}

    def qkv(self, _: Values) -> dict[str, np.ndarray]:
        return self.project(self.inputs["query"], self.inputs.get("key"), None)

    def scores(self, values: Values) -> dict[str, np.ndarray]:
        bias = self.inputs.get("bias")
        return {"scores": to_numpy(mha_torch.attention_scores(from_numpy(values["q"]), from_numpy(values["k"]), bias))}

    def attn_weights(self, values: Values) -> dict[str, np.ndarray]:
        attn_weights = mha_torch.masked_softmax(from_numpy(values["scores"]), from_numpy(values["mask"]))
        return {"attn_weights": to_numpy(attn_weights.to(self.inputs["query"].dtype))}

    def context(self, values: Values) -> dict[str, np.ndarray]:
        v = from_numpy(values_to_weigh(self.problem, values))
        context = mha_torch.attention_context(from_numpy(values["attn_weights"]), v)
        return {"context": to_numpy(context)}

    def output(self, values: Values) -> dict[str, np.ndarray]:
        output = mha_torch.combine_heads(from_numpy(values["context"]))
        if self.spec.out_proj:
            output = mha_torch.project_with(self.weights)("out_proj", output)
        return {"output": to_numpy(output)}

    def whole(self, _: Values) -> dict[str, np.ndarray]:
        query, key = self.inputs["query"], self.inputs.get("key")
        mask = self.build_mask() if self.problem.case.has_mask else None
        bias = self.inputs.get("bias")
        with torch.no_grad():
            output, attn_weights = self.module(query, key, mask=mask, bias=bias, need_weights=True)
            fused, _ = self.module(query, key, mask=mask, bias=bias)
        values = {"module.attn_weights": attn_weights, "module.output": output, "fused.output": fused}
        return {name: to_numpy(value) for name, value in values.items()}

    def cached_steps(self, index: int) -> list[Step]:
        case = self.problem.case
        x = from_numpy(self.problem.step_input(index))
        lengths = torch.tensor(case.lengths_before(index), dtype=torch.int32)
        new_lengths = torch.tensor(case.added(index), dtype=torch.int32) if case.new_lengths else None

        def cache_of(values: Values, name: str) -> mha_torch.KVCache:
            if index == 0:
                return self.module.init_cache(case.batch, case.capacity)
            arrays = (values[f"previous.{name}.{part}"] for part in ("keys", "values", "lengths"))
            return mha_torch.KVCache(*map(from_numpy, arrays))

        def stages_of(cache: mha_torch.KVCache, name: str) -> dict[str, np.ndarray]:
            parts = {"keys": cache.keys, "values": cache.values, "lengths": cache.lengths}
            return {f"{name}.{part}": to_numpy(array) for part, array in parts.items()}

        def mask(_: Values) -> dict[str, np.ndarray]:
            mask = mha_torch.create_cache_mask(lengths, case.chunks[index], case.capacity)
            shape = (case.batch, case.spec.num_heads, case.chunks[index], case.capacity)
            return {"mask": to_numpy(mask.expand(shape))}

        def qkv(_: Values) -> dict[str, np.ndarray]:
            positions = lengths[:, None] + torch.arange(case.chunks[index]) if case.spec.rope_theta else None
            return self.project(x, None, positions)

        def cache(values: Values) -> dict[str, np.ndarray]:
            k, v = from_numpy(values["k"]), from_numpy(values["v"])
            grown = mha_torch.append_to_cache(cache_of(values, "cache"), k, v, new_lengths=new_lengths)
            return stages_of(grown, "cache")

        def whole(values: Values) -> dict[str, np.ndarray]:
            with torch.no_grad():
                output, grown = self.module(x, cache_of(values, "module.cache"), new_lengths=new_lengths)
            return {"module.output": to_numpy(output), **stages_of(grown, "module.cache")}

        def scores(values: Values) -> dict[str, np.ndarray]:
            return self.scores({**values, "k": values["cache.keys"]})

        def context(values: Values) -> dict[str, np.ndarray]:
            return self.context({**values, "v": values["cache.values"]})

        return [mask, qkv, cache, scores, self.attn_weights, context, self.output, whole]

    def backward(self, prefix: str, *, need_weights: bool) -> dict[str, np.ndarray]:
        names = [name for name in ("query", "key", "bias") if name in self.inputs]
        inputs = {name: self.inputs[name].clone().requires_grad_() for name in names}
        weights = {name: weight.clone().requires_grad_() for name, weight in self.weights.items()}
        output, _ = mha_torch.multi_head_attention(
            inputs["query"],
            weights,
            inputs.get("key"),
            num_heads=self.spec.num_heads,
            num_kv_heads=self.spec.num_kv_heads,
            mask=self.build_mask() if self.problem.case.has_mask else None,
            bias=inputs.get("bias"),
            need_weights=need_weights,
            rope_theta=self.spec.rope_theta,
        )
        leaves = [*inputs.values(), *weights.values()]
        grads = torch.autograd.grad(output, leaves, self.inputs["cotangent"])
        of_inputs = {name: to_numpy(grad) for name, grad in zip(inputs, grads, strict=False)}
        of_weights = from_state_dict(dict(zip(weights, grads[len(inputs) :], strict=True)), self.spec)
        return {f"{prefix}grad.{name}": grad for name, grad in {**of_inputs, **of_weights}.items()}


# ---- Surroundings ----------------------------------------------------------------------------------------------------


@contextmanager
def lock(dtype: str) -> Iterator[dict[str, Any]]:
    """Hold still what changes torch's numbers, tell what is set, and put everything back afterwards."""
    matmul, cudnn, mha = torch.backends.cuda.matmul, torch.backends.cudnn, torch.backends.mha
    precision, fastpath = torch.get_float32_matmul_precision(), mha.get_fastpath_enabled()
    settings: list[tuple[Any, str, bool]] = [
        (cudnn, "allow_tf32", False),
        (matmul, "allow_fp16_reduced_precision_reduction", False),
        (matmul, "allow_bf16_reduced_precision_reduction", False),
    ]
    before = [(holder, name, getattr(holder, name)) for holder, name, _ in settings]
    try:
        torch.set_float32_matmul_precision("highest")  # no TF32, no bfloat16 inside float32 products
        mha.set_fastpath_enabled(False)
        for holder, name, value in settings:
            setattr(holder, name, value)
        yield {
            "float32_matmul_precision": torch.get_float32_matmul_precision(),
            "cudnn_allow_tf32": cudnn.allow_tf32,
            "fp16_reduced_precision_reduction": False,
            "bf16_reduced_precision_reduction": False,
            "mha_fastpath": mha.get_fastpath_enabled(),
            "sdp_backends": [
                name
                for name, enabled in {
                    "flash": torch.backends.cuda.flash_sdp_enabled(),
                    "mem_efficient": torch.backends.cuda.mem_efficient_sdp_enabled(),
                    "math": torch.backends.cuda.math_sdp_enabled(),
                    "cudnn": torch.backends.cuda.cudnn_sdp_enabled(),
                }.items()
                if enabled
            ],
            "threads": torch.get_num_threads(),
        }
    finally:
        torch.set_float32_matmul_precision(precision)
        mha.set_fastpath_enabled(fastpath)
        for holder, name, value in before:
            setattr(holder, name, value)


def environment() -> dict[str, Any]:
    """Versions and devices."""
    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {"torch": torch.__version__, "device": "cpu", "cuda_devices": devices}

"""Contenders that run on torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

# The profiler, which counts allocations here, otherwise writes lines of its own to standard error.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import mha_torch
from parity.measure.backends.torch import from_numpy, to_numpy
from parity.port.foreign import load_adapter, load_into
from parity_lab.bench.keras import keras_layer
from parity_lab.bench.measure import OURS, Contender, Probe, large_enough
from parity_lab.bench.operations import operations_of_torch
from parity_lab.bench.work import Inputs, Work

NAMES = {
    "plain path": "mha_torch.scaled_dot_product_attention, ours, with every stage",
    "SDPA": "torch.nn.functional.scaled_dot_product_attention",
    "masked SDPA": "torch.nn.functional.scaled_dot_product_attention with a mask, made beforehand",
    "flash SDPA": "torch.nn.functional.scaled_dot_product_attention, flash attention alone",
    "FlexAttention": "torch.nn.attention.flex_attention, compiled, its blocks made beforehand",
    "varlen_attn": "torch.nn.attention.varlen.varlen_attn, on sequences in a row",
    "scores by hand": "two matrix products, and what comes between them, a mask made beforehand",
    "SDPA by hand": "linear layers around torch.nn.functional.scaled_dot_product_attention",
    "softmax by hand": "linear layers around two matrix products and a softmax",
    "torch.nn": "torch.nn.MultiheadAttention",
    "keras": "keras.layers.MultiHeadAttention on torch",
    "concatenation": "SDPA by hand, keys and values concatenated to those so far",
    "static cache": (
        "SDPA by hand, keys and values written into a tensor of which the filled part is read"
    ),
    "StaticCache": "SDPA by hand with transformers' StaticCache, which is read whole under a mask",
    "DynamicCache": "SDPA by hand with transformers' DynamicCache",
}
"""Descriptions of the contenders, by name."""


class Side:
    """The benchmark of torch.

    Args:
        device: where tensors lie, `cpu` or `cuda`.
    """

    def __init__(self, device: str = "cpu") -> None:
        self.device = torch.device(device)
        self._probes: dict[str, Probe] = {}

    def settings(self) -> dict[str, Any]:
        """Return the settings that change the speed."""
        return {
            "threads": torch.get_num_threads(),
            "float32_matmul_precision": torch.get_float32_matmul_precision(),
            "mha_fastpath": torch.backends.mha.get_fastpath_enabled(),
            "device": torch.cuda.get_device_name(self.device)
            if self.device.type == "cuda"
            else "cpu",
        }

    def matmul(self, dtype: str) -> Probe:
        """Return a probe: the product of two large square matrices."""

        def make(size: int) -> Probe:
            matrix = torch.full((size, size), 0.5, dtype=getattr(torch, dtype), device=self.device)
            return Probe(partial(self._done, partial(torch.matmul, matrix, matrix)), 2.0 * size**3)

        if dtype not in self._probes:
            self._probes[dtype] = large_enough(make, 8192 if self.device.type == "cuda" else 1024)
        return self._probes[dtype]

    def reading(self) -> Probe | None:
        """Return a probe: the largest value of a buffer that exceeds every cache; None on a CPU."""
        if self.device.type == "cpu":
            return None
        if "reading" not in self._probes:
            values = torch.ones(2**28, device=self.device)
            self._probes["reading"] = Probe(partial(self._done, values.max), 4.0 * 2**28)
        return self._probes["reading"]

    def contenders(self, work: Work, inputs: Inputs) -> dict[str, Callable[[], Contender]]:
        """Return functions that prepare each contender, including ours, for a piece of work; they
        may raise errors.
        """
        makers = {"core": _Core, "layer": _Layer, "prefill": _Prefill, "decode": _Decode}
        return makers[work.kind](self, work, inputs).contenders()

    def put(self, x: np.ndarray, requires_grad: bool = False) -> Tensor:
        """Return an array on the device."""
        return from_numpy(x).to(self.device).requires_grad_(requires_grad)

    def contender(
        self,
        work: Work,
        forward: Callable[[], Any],
        inputs: Mapping[str, Tensor],
        weights: Mapping[str, Tensor] | None = None,
        *,
        counts: bool = True,
        carries: bool = False,
    ) -> Contender:
        """Return a contender of a function of inputs and weights, with its backward pass if the
        work includes it.
        """
        differentiated = [inputs[name] for name in inputs if name != "cotangent"]

        def run() -> list[Tensor]:
            if not work.backward:
                with torch.inference_mode():
                    outputs = forward()
                return list(outputs) if isinstance(outputs, tuple) else [outputs]
            output = forward()
            sources = [*differentiated, *(weights or {}).values()]
            return [output.detach(), *torch.autograd.grad(output, sources, inputs["cotangent"])]

        def arrays(found: list[Tensor]) -> list[np.ndarray]:
            # The gradients of the weights come last, and each library has them in a layout of its
            # own.
            return (
                [to_numpy(x) for x in found[: 1 + len(differentiated)]]
                if work.backward
                else [*map(to_numpy, found)]
            )

        done = partial(self._done, run)
        operations = partial(operations_of_torch, run)
        peak_bytes = partial(self.peak_bytes, done)
        return Contender(
            done, arrays, peak_bytes, counts=counts, carries=carries, operations=operations
        )

    def peak_bytes(self, run: Callable[[], Any]) -> int | None:
        """Return the peak of allocated bytes during a run, without its results."""
        if self.device.type == "cuda":
            run()
            torch.cuda.reset_peak_memory_stats(self.device)
            before = torch.cuda.memory_allocated(self.device)
            found = run()
            peak = torch.cuda.max_memory_allocated(self.device) - before
        else:
            with torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
            ) as profile:
                found = run()
            recorded: Any = profile.profiler
            events = [
                event for event in recorded.kineto_results.events() if event.name() == "[memory]"
            ]
            steps = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
            peak = int(np.cumsum(steps).max(initial=0))
        return max(0, peak - sum(x.nbytes for x in found if isinstance(x, Tensor)))

    def _done(self, run: Callable[[], Any]) -> Any:
        found = run()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return found


class _Core:
    def __init__(self, side: Side, work: Work, inputs: Inputs) -> None:
        self.side, self.work = side, work
        self.inputs = {
            name: side.put(x, work.backward and name != "cotangent")
            for name, x in inputs.arrays.items()
        }

    def contenders(self) -> dict[str, Callable[[], Contender]]:
        work, on_cuda = self.work, self.side.device.type == "cuda"
        hides_more = work.is_padded or work.num_segments > 1 or work.window_size is not None
        others = {"SDPA": lambda: self.contender(F.scaled_dot_product_attention)}
        if work.soft_cap is not None or work.has_sinks:  # which SDPA has not
            others = {"scores by hand": lambda: self.contender(self.scores_by_hand())}
        elif hides_more or work.has_alibi:
            others = {"masked SDPA": lambda: self.contender(self.masked_sdpa())}
        elif on_cuda:
            others |= {"flash SDPA": lambda: self.contender(_flash_sdpa)}
        if on_cuda and hides_more:
            others |= {"FlexAttention": lambda: self.contender(self.flex_attention())}
        if on_cuda and work.num_segments > 1:
            others |= {"varlen_attn": lambda: self.contender(self.varlen_attn())}
        options: dict[str, Any] = {
            "spec": work.spec,
            "kernel": mha_torch.fused.attend,
            **self.told(),
        }
        return {
            OURS: lambda: self.contender(_core_attention(**options)),
            **others,
            "plain path": self.plain,
        }

    def plain(self) -> Contender:
        self.work.check_scores()
        return self.contender(_core_attention(spec=self.work.spec, **self.told()), counts=False)

    def told(self) -> dict[str, Tensor]:
        """Return the lengths and the segments, as keywords of attention and of masks."""
        found, device = {}, self.side.device
        if self.work.is_padded:
            found["key_padding_lengths"] = torch.tensor(self.work.lengths, device=device)
        if self.work.num_segments > 1:
            lengths = torch.tensor(self.work.segment_lengths, device=device)
            ids = torch.arange(self.work.num_segments, device=device).repeat_interleave(lengths)
            found["segment_ids"] = ids.expand(self.work.batch, -1)
        return found

    def shown(self) -> Tensor:
        """Return a mask (B or 1, 1, T, S), True = attend."""
        self.work.check_scores()
        told: dict[str, Any] = {
            "window_size": self.work.window_size,
            "device": self.side.device,
            **self.told(),
        }
        return ~mha_torch.create_attention_mask(self.work.seq_len, is_causal=True, **told)

    def masked_sdpa(self) -> Callable[..., Tensor]:
        shown, slopes = self.shown(), self.work.spec.alibi_slopes
        if slopes is not None:
            places = torch.arange(self.work.seq_len, device=self.side.device)
            dtype = self.inputs["query"].dtype
            lost = torch.tensor(slopes, device=self.side.device)[:, None, None] * (
                places[:, None] - places
            )
            shown = (-lost).masked_fill(~shown, -torch.inf).to(dtype)
        return lambda *inputs, is_causal: F.scaled_dot_product_attention(*inputs, attn_mask=shown)

    def flex_attention(self) -> Callable[..., Tensor]:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        told, seq_len, window_size = self.told(), self.work.seq_len, self.work.window_size
        lengths, ids = told.get("key_padding_lengths"), told.get("segment_ids")

        def is_shown(batch: Tensor, head: Tensor, row: Tensor, place: Tensor) -> Tensor:
            shown = place <= row
            shown = shown if window_size is None else shown & (row - place < window_size)
            shown = shown if lengths is None else shown & (place < lengths[batch])
            return shown if ids is None else shown & (ids[batch, row] == ids[batch, place])

        num_masks = self.work.batch if told else None
        blocks = create_block_mask(
            is_shown, num_masks, None, seq_len, seq_len, device=str(self.side.device)
        )
        compiled: Any = torch.compile(flex_attention)
        return lambda *inputs, is_causal: compiled(*inputs, block_mask=blocks)

    def varlen_attn(self) -> Callable[..., Tensor]:
        from torch.nn.attention.varlen import varlen_attn

        lengths = torch.tensor(
            [0, *self.work.segment_lengths * self.work.batch], device=self.side.device
        )
        ends, most = lengths.cumsum(0, dtype=torch.int32), max(self.work.segment_lengths)

        def attend(*inputs: Tensor, is_causal: bool) -> Tensor:
            rows = (x.transpose(1, 2).flatten(0, 1) for x in inputs)  # (tokens, N, H)
            varlen: Any = partial(varlen_attn, window_size=(-1, 0 if is_causal else -1))
            found = varlen(*rows, ends, ends, most, most)
            return found.unflatten(0, (self.work.batch, -1)).transpose(1, 2)

        return attend

    def scores_by_hand(self) -> Callable[..., Tensor]:
        hidden, cap, scale = ~self.shown(), self.work.spec.soft_cap, self.work.spec.score_scale

        def attend(
            query: Tensor,
            key: Tensor,
            value: Tensor,
            *,
            is_causal: bool,
            sinks: Tensor | None = None,
        ) -> Tensor:
            scores = query @ key.mT * scale
            scores = scores if cap is None else cap * torch.tanh(scores / cap)
            scores = scores.masked_fill(hidden, -torch.inf)
            if sinks is None:
                return scores.softmax(-1) @ value
            column = sinks[:, None, None].expand(*scores.shape[:3], 1)
            return torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1] @ value

        return attend

    def contender(self, function: Callable[..., Tensor], *, counts: bool = True) -> Contender:
        query, key, value = (self.inputs[name] for name in ("query", "key", "value"))
        forward = partial(function, query, key, value, is_causal=self.work.is_causal)
        forward = partial(forward, sinks=self.inputs["sinks"]) if self.work.has_sinks else forward
        return self.side.contender(self.work, forward, self.inputs, counts=counts)


class _Layer:
    def __init__(self, side: Side, work: Work, inputs: Inputs) -> None:
        self.side, self.work, self.canonical = side, work, inputs.weights
        self.inputs = {
            name: side.put(x, work.backward and name == "x") for name, x in inputs.arrays.items()
        }
        self.weights = {name: side.put(x, work.backward) for name, x in inputs.weights.items()}
        self.x = self.inputs["x"]
        self.lengths = (
            torch.tensor(work.lengths, dtype=torch.int32, device=side.device)
            if work.is_padded
            else None
        )

    def contenders(self) -> dict[str, Callable[[], Contender]]:
        by_hand = (
            {"softmax by hand": self.softmax_by_hand}
            if self.work.need_weights
            else {"SDPA by hand": self.by_hand}
        )
        others = {"torch.nn": self.torch_nn, **by_hand, "keras": self.keras}
        return {OURS: self.ours, **(others if self.work.layer is None else {})}

    def made(self, kind: Any) -> Any:
        """Return a module with the weights of the work."""
        module = kind(self.work.spec, dtype=getattr(torch, self.work.dtype))
        return self.placed(load_into(module, self.canonical, self.work.spec))

    def placed(self, module: Any) -> Any:
        """Return a module on the device, in the dtype and mode of the measurement."""
        return module.to(self.side.device).eval().requires_grad_(self.work.backward)

    def of_module(self, forward: Callable[[], Any], module: Any) -> Contender:
        return self.side.contender(self.work, forward, self.inputs, dict(module.named_parameters()))

    def masks(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the causal mask (T, S) and the padding mask (B, S), if any, True = masked; made
        beforehand.
        """
        seq_len, device = self.work.seq_len, self.side.device
        causal = (
            mha_torch.create_causal_mask(seq_len, device=device) if self.work.is_causal else None
        )
        padding = (
            None
            if self.lengths is None
            else mha_torch.create_padding_mask(self.lengths, seq_len)[:, 0, 0]
        )
        return causal, padding

    def shown(self) -> Tensor | None:
        """Return the mask of SDPA: (B, 1, T, S) or (B, 1, 1, S), True = attend; None if `is_causal`
        suffices.
        """
        causal, padding = self.masks()
        if padding is None:
            return None
        return ~(padding[:, None, None] if causal is None else padding[:, None, None] | causal)

    def ours(self) -> Contender:
        if self.work.need_weights:
            module = self.made(mha_torch.MultiHeadAttention)
            return self.of_module(
                partial(module, self.x, mask=self.masks()[0], need_weights=True), module
            )
        module = self.made(mha_torch.MultiHeadSelfAttention)
        keywords = {"is_causal": self.work.is_causal, "key_padding_lengths": self.lengths}
        return self.of_module(partial(module, self.x, **keywords), module)

    def torch_nn(self) -> Contender:
        adapter = load_adapter("torch.nn.MultiheadAttention")
        module = self.placed(
            adapter.load_into(adapter.make(self.work.spec, self.work.dtype), self.canonical)
        )
        causal, padding = self.masks()
        keywords = {
            "attn_mask": causal,
            "key_padding_mask": padding,
            "is_causal": self.work.is_causal,
            "need_weights": self.work.need_weights,
            "average_attn_weights": False,
        }
        call = partial(module, self.x, self.x, self.x, **keywords)
        return self.of_module(call if self.work.need_weights else _first(call), module)

    def project(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.weights[f"{name}_proj.weight"], self.weights[f"{name}_proj.bias"])

    def heads(self, x: Tensor) -> list[Tensor]:
        """Queries, keys and values, (B, N, T, H)."""
        shape = (*x.shape[:2], self.work.num_heads, self.work.head_dim)
        return [self.project(name, x).view(shape).transpose(1, 2) for name in "qkv"]

    def out(self, context: Tensor) -> Tensor:
        return self.project("out", context.transpose(1, 2).flatten(2))

    def by_hand(self) -> Contender:
        shown = self.shown()
        is_causal = self.work.is_causal and shown is None

        def forward() -> Tensor:
            context = F.scaled_dot_product_attention(
                *self.heads(self.x), attn_mask=shown, is_causal=is_causal
            )
            return self.out(context)

        return self.side.contender(self.work, forward, self.inputs, self.weights)

    def softmax_by_hand(self) -> Contender:
        causal, _ = self.masks()

        def forward() -> tuple[Tensor, Tensor]:
            query, key, value = self.heads(self.x)
            scores = query * self.work.head_dim**-0.5 @ key.mT
            weights = (
                scores if causal is None else scores.masked_fill(causal, -torch.inf)
            ).softmax(-1)
            return self.out(weights @ value), weights

        return self.side.contender(self.work, forward, self.inputs, self.weights)

    def keras(self) -> Contender:
        layer = keras_layer("torch", self.work.spec, self.work.dtype, self.canonical)
        shown = self.shown()
        keywords = {
            "attention_mask": None
            if shown is None
            else shown[:, 0].expand(-1, self.work.seq_len, -1),
            "use_causal_mask": self.work.is_causal,
            "return_attention_scores": self.work.need_weights,
        }
        weights = {variable.path: variable.value for variable in layer.trainable_variables}
        return self.side.contender(
            self.work, partial(layer, self.x, self.x, **keywords), self.inputs, weights
        )


class _Prefill(_Layer):
    """A prompt into an empty cache, which every run creates."""

    def contenders(self) -> dict[str, Callable[[], Contender]]:
        return {
            OURS: self.ours,
            "static cache": self.static_cache,
            "concatenation": self.concatenation,
            "StaticCache": self.hugging_static,
            "DynamicCache": self.hugging_dynamic,
        }

    def ours(self) -> Contender:
        module = self.made(mha_torch.MultiHeadAttentionWithCache)
        return self.of_module(
            _first(lambda: module(self.x, module.init_cache(self.work.batch, self.work.capacity))),
            module,
        )

    def attended(self, keep: Callable[[Tensor, Tensor], Any]) -> Contender:
        """Return a step by hand, with a function that keeps keys and values."""

        def forward() -> Tensor:
            query, key, value = self.heads(self.x)
            keep(key, value)
            return self.out(F.scaled_dot_product_attention(query, key, value, is_causal=True))

        return self.side.contender(self.work, forward, self.inputs)

    def static_cache(self) -> Contender:
        def keep(key: Tensor, value: Tensor) -> None:
            for x in (key, value):
                cache = x.new_zeros(*x.shape[:2], self.work.capacity, x.shape[3])
                cache[:, :, : self.work.seq_len] = x

        return self.attended(keep)

    def concatenation(self) -> Contender:
        return self.attended(lambda key, value: None)

    def hugging_static(self) -> Contender:
        return self.attended(
            lambda key, value: _static_cache(self.work.capacity).update(key, value, 0)
        )

    def hugging_dynamic(self) -> Contender:
        from transformers.cache_utils import DynamicCache

        return self.attended(lambda key, value: DynamicCache().update(key, value, 0))


class _Decode(_Layer):
    """One more token with a filled cache."""

    def __init__(self, side: Side, work: Work, inputs: Inputs) -> None:
        super().__init__(side, work, inputs)
        self.cached = {name: self.inputs.pop(name) for name in [*self.inputs] if name != "x"}

    def contenders(self) -> dict[str, Callable[[], Contender]]:
        if self.work.layer is not None:
            return {OURS: self.ours}
        return {
            OURS: self.ours,
            "concatenation": self.concatenation,
            "static cache": self.static_cache,
            "StaticCache": self.hugging_static,
            "DynamicCache": self.hugging_dynamic,
        }

    def with_room(self) -> list[Tensor]:
        """The cached keys and values, and room for more."""
        room = self.work.capacity - self.work.seq_len
        return [F.pad(self.cached[name], (0, 0, 0, room)) for name in ("keys", "values")]

    def ours(self) -> Contender:
        module = self.made(mha_torch.MultiHeadAttentionWithCache)
        state = self.state(module)

        def forward() -> Tensor:
            nonlocal state
            output, state = module(self.x, state)
            return output

        return self.side.contender(self.work, forward, self.inputs, carries=True)

    def state(self, module: Any) -> Any:
        """Return our cache with the cached keys and values."""
        if "prompt" in self.cached:
            with torch.inference_mode():
                return module(
                    self.cached["prompt"], module.init_cache(self.work.batch, self.work.capacity)
                )[1]
        lengths = torch.full(
            (self.work.batch,), self.work.seq_len, dtype=torch.int32, device=self.side.device
        )
        keys, values = self.with_room()
        return mha_torch.KVCache(keys, values, lengths)

    def attended(
        self,
        extend: Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor | None]],
        *,
        carries: bool = False,
    ) -> Contender:
        """Return a step by hand, with a function that returns all keys, all values, and their
        mask.
        """

        def forward() -> Tensor:
            query, key, value = self.heads(self.x)
            keys, values, shown = extend(key, value)
            return self.out(F.scaled_dot_product_attention(query, keys, values, attn_mask=shown))

        return self.side.contender(self.work, forward, self.inputs, carries=carries)

    def concatenation(self) -> Contender:
        def extend(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, None]:
            keys, values = (
                torch.cat(pair, dim=2)
                for pair in zip(self.cached.values(), (key, value), strict=True)
            )
            return keys, values, None

        return self.attended(extend)

    def static_cache(self) -> Contender:
        keys, values = self.with_room()
        filled = self.work.seq_len

        def extend(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, None]:
            nonlocal filled
            keys[:, :, filled : filled + 1] = key
            values[:, :, filled : filled + 1] = value
            filled += 1
            return keys[:, :, :filled], values[:, :, :filled], None

        return self.attended(extend, carries=True)

    def hugging_static(self) -> Contender:
        cache = _static_cache(self.work.capacity)
        cache.update(self.cached["keys"], self.cached["values"], 0)
        slots = torch.arange(self.work.capacity, device=self.side.device)

        def extend(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            keys, values = cache.update(key, value, 0)
            return keys, values, (slots < cache.get_seq_length())[None, None, None]

        return self.attended(extend, carries=True)

    def hugging_dynamic(self) -> Contender:
        from transformers.cache_utils import DynamicCache

        cache = DynamicCache()
        cache.update(self.cached["keys"], self.cached["values"], 0)
        return self.attended(lambda key, value: (*cache.update(key, value, 0), None), carries=True)


def _flash_sdpa(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)


def _static_cache(capacity: int) -> Any:
    """transformers' StaticCache of a single layer, without the configuration of a model."""
    from transformers.cache_utils import Cache, StaticLayer

    return Cache(layers=[StaticLayer(max_cache_len=capacity)])


def _core_attention(**options: Any) -> Callable[..., Tensor]:
    """Return our attention of split heads, with sinks as an argument, as other contenders take
    them.
    """

    def attend(
        query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, sinks: Tensor | None = None
    ) -> Tensor:
        learned = {} if sinks is None else {"sinks": sinks}
        context, _ = mha_torch.scaled_dot_product_attention(
            query, key, value, is_causal=is_causal, learned=learned, **options
        )
        return context

    return attend


def _first(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with its first result only."""
    return lambda *args, **keywords: function(*args, **keywords)[0]

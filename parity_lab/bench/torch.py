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
        device = "cpu"
        if self.device.type == "cuda":
            device = torch.cuda.get_device_name(self.device)
        return {
            "threads": torch.get_num_threads(),
            "float32_matmul_precision": torch.get_float32_matmul_precision(),
            "mha_fastpath": torch.backends.mha.get_fastpath_enabled(),
            "device": device,
        }

    def matmul(self, dtype: str) -> Probe:
        """Return a probe: the product of two large square matrices."""

        def make(size: int) -> Probe:
            matrix = torch.full((size, size), 0.5, dtype=getattr(torch, dtype), device=self.device)
            return Probe(partial(self._done, partial(torch.matmul, matrix, matrix)), 2.0 * size**3)

        if dtype not in self._probes:
            largest = 8192 if self.device.type == "cuda" else 1024
            self._probes[dtype] = large_enough(make, largest)
        return self._probes[dtype]

    def reading(self) -> Probe | None:
        """Return a probe: the largest value of a buffer that exceeds every cache; None on a CPU."""
        if self.device.type == "cpu":
            return None
        if "reading" not in self._probes:
            values = torch.ones(2**28, device=self.device)
            self._probes["reading"] = Probe(partial(self._done, values.max), float(values.nbytes))
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
        differentiated = [x for name, x in inputs.items() if name != "cotangent"]
        parameters = list(weights.values()) if weights is not None else []

        def run() -> list[Tensor]:
            if work.backward:
                output = forward()
                sources = [*differentiated, *parameters]
                return [output.detach(), *torch.autograd.grad(output, sources, inputs["cotangent"])]
            with torch.inference_mode():
                outputs = forward()
            return list(outputs) if isinstance(outputs, tuple) else [outputs]

        def arrays(results: list[Tensor]) -> list[np.ndarray]:
            if work.backward:
                # The gradients of the weights come last, and each library has them in a layout of
                # its own.
                results = results[: 1 + len(differentiated)]
            return [to_numpy(x) for x in results]

        done = partial(self._done, run)
        return Contender(
            done,
            arrays,
            partial(self.peak_bytes, done),
            counts=counts,
            carries=carries,
            operations=partial(operations_of_torch, run),
        )

    def peak_bytes(self, run: Callable[[], Any]) -> int | None:
        """Return the peak of allocated bytes during a run, without its results."""
        if self.device.type == "cuda":
            run()
            torch.cuda.reset_peak_memory_stats(self.device)
            before = torch.cuda.memory_allocated(self.device)
            results = run()
            peak = torch.cuda.max_memory_allocated(self.device) - before
        else:
            activities = [torch.profiler.ProfilerActivity.CPU]
            with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
                results = run()
            recorded: Any = profile.profiler
            events = [
                event for event in recorded.kineto_results.events() if event.name() == "[memory]"
            ]
            events.sort(key=lambda event: event.start_ns())
            # Bytes of each event: positive if memory is allocated, negative if it is released.
            changes = [event.nbytes() for event in events]
            peak = int(np.cumsum(changes).max(initial=0))
        result_bytes = sum(x.nbytes for x in results if isinstance(x, Tensor))
        return max(0, peak - result_bytes)

    def _done(self, run: Callable[[], Any]) -> Any:
        """Return the results of a run after the device has computed them."""
        results = run()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return results


class _Core:
    """Attention of split heads."""

    def __init__(self, side: Side, work: Work, inputs: Inputs) -> None:
        self.side = side
        self.work = work
        self.inputs = {}
        for name, x in inputs.arrays.items():
            requires_grad = work.backward and name != "cotangent"
            self.inputs[name] = side.put(x, requires_grad)

    def contenders(self) -> dict[str, Callable[[], Contender]]:
        # Each makes a function of query, key and value, outside of the measured time.
        libraries = {
            "SDPA": self.sdpa,
            "flash SDPA": self.flash_sdpa,
            "masked SDPA": self.masked_sdpa,
            "FlexAttention": self.flex_attention,
            "varlen_attn": self.varlen_attn,
            "scores by hand": self.scores_by_hand,
        }
        makers: dict[str, Callable[[], Contender]] = {OURS: self.ours}
        for name in self.library_names():
            makers[name] = partial(self.library_contender, libraries[name])
        makers["plain path"] = self.plain
        return makers

    def library_names(self) -> list[str]:
        """Return the names of the libraries' functions that can do the work."""
        work = self.work
        on_cuda = self.side.device.type == "cuda"
        hides_more = work.is_padded or work.num_segments > 1 or work.window_size is not None
        if work.soft_cap is not None or work.has_sinks:
            names = ["scores by hand"]  # SDPA has neither
        elif hides_more or work.has_alibi:
            names = ["masked SDPA"]
        elif on_cuda:
            names = ["SDPA", "flash SDPA"]
        else:
            names = ["SDPA"]
        if on_cuda and hides_more:
            names.append("FlexAttention")
        if on_cuda and work.num_segments > 1:
            names.append("varlen_attn")
        return names

    def ours(self) -> Contender:
        keywords = self.mask_keywords()
        attend = _core_attention(spec=self.work.spec, kernel=mha_torch.fused.attend, **keywords)
        return self.contender(attend)

    def plain(self) -> Contender:
        self.work.check_scores()
        attend = _core_attention(spec=self.work.spec, **self.mask_keywords())
        return self.contender(attend, counts=False)

    def library_contender(self, make: Callable[[], Callable[..., Tensor]]) -> Contender:
        return self.contender(make())

    def contender(self, function: Callable[..., Tensor], *, counts: bool = True) -> Contender:
        """Return a contender of a function of arrays (B, N, S, H)."""
        query, key, value = (self.inputs[name] for name in ("query", "key", "value"))
        keywords: dict[str, Any] = {"is_causal": self.work.is_causal}
        if self.work.has_sinks:
            keywords["sinks"] = self.inputs["sinks"]
        forward = partial(function, query, key, value, **keywords)
        return self.side.contender(self.work, forward, self.inputs, counts=counts)

    def mask_keywords(self) -> dict[str, Any]:
        """Return the lengths and the segments, as keywords of attention and of masks."""
        keywords = {}
        device = self.side.device
        if self.work.is_padded:
            keywords["key_padding_lengths"] = torch.tensor(self.work.lengths, device=device)
        if self.work.num_segments > 1:
            lengths = torch.tensor(self.work.segment_lengths, device=device)
            ids = torch.arange(self.work.num_segments, device=device).repeat_interleave(lengths)
            keywords["segment_ids"] = ids.expand(self.work.batch, -1)
        return keywords

    def visible_keys(self) -> Tensor:
        """Return a mask (B or 1, 1, T, S), True = attend."""
        self.work.check_scores()
        hidden = mha_torch.create_attention_mask(
            self.work.seq_len,
            is_causal=True,
            window_size=self.work.window_size,
            device=self.side.device,
            **self.mask_keywords(),
        )
        return ~hidden

    def sdpa(self) -> Callable[..., Tensor]:
        return F.scaled_dot_product_attention

    def flash_sdpa(self) -> Callable[..., Tensor]:
        return _flash_sdpa

    def masked_sdpa(self) -> Callable[..., Tensor]:
        mask = self.visible_keys()
        slopes = self.work.spec.alibi_slopes
        if slopes is not None:
            # ALiBi makes the mask one of logits: what it takes away, and -inf where it hides.
            positions = torch.arange(self.work.seq_len, device=self.side.device)
            distances = positions[:, None] - positions
            penalties = torch.tensor(slopes, device=self.side.device)[:, None, None] * distances
            mask = (-penalties).masked_fill(~mask, -torch.inf).to(self.inputs["query"].dtype)

        def attend(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> Tensor:
            return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)

        return attend

    def flex_attention(self) -> Callable[..., Tensor]:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        seq_len = self.work.seq_len
        window_size = self.work.window_size
        keywords = self.mask_keywords()
        lengths = keywords.get("key_padding_lengths")
        ids = keywords.get("segment_ids")

        def is_visible(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
            visible = column <= row
            if window_size is not None:
                visible = visible & (row - column < window_size)
            if lengths is not None:
                visible = visible & (column < lengths[batch])
            if ids is not None:
                visible = visible & (ids[batch, row] == ids[batch, column])
            return visible

        # Without lengths and segments, all sequences have the same blocks.
        num_masks = self.work.batch if keywords else None
        blocks = create_block_mask(
            is_visible, num_masks, None, seq_len, seq_len, device=str(self.side.device)
        )
        compiled: Any = torch.compile(flex_attention)

        def attend(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> Tensor:
            return compiled(query, key, value, block_mask=blocks)

        return attend

    def varlen_attn(self) -> Callable[..., Tensor]:
        from torch.nn.attention.varlen import varlen_attn

        lengths = torch.tensor(
            [0, *self.work.segment_lengths * self.work.batch], device=self.side.device
        )
        ends = lengths.cumsum(0, dtype=torch.int32)
        longest = max(self.work.segment_lengths)

        def attend(*inputs: Tensor, is_causal: bool) -> Tensor:
            query, key, value = (x.transpose(1, 2).flatten(0, 1) for x in inputs)  # (tokens, N, H)
            varlen: Any = partial(varlen_attn, window_size=(-1, 0 if is_causal else -1))
            context = varlen(query, key, value, ends, ends, longest, longest)
            return context.unflatten(0, (self.work.batch, -1)).transpose(1, 2)

        return attend

    def scores_by_hand(self) -> Callable[..., Tensor]:
        hidden = ~self.visible_keys()
        cap = self.work.spec.soft_cap
        scale = self.work.spec.score_scale

        def attend(
            query: Tensor,
            key: Tensor,
            value: Tensor,
            *,
            is_causal: bool,
            sinks: Tensor | None = None,
        ) -> Tensor:
            scores = query @ key.mT * scale
            if cap is not None:
                scores = cap * torch.tanh(scores / cap)
            scores = scores.masked_fill(hidden, -torch.inf)
            if sinks is None:
                return scores.softmax(-1) @ value
            column = sinks[:, None, None].expand(*scores.shape[:3], 1)
            return torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1] @ value

        return attend


class _Layer:
    """A whole layer."""

    def __init__(self, side: Side, work: Work, inputs: Inputs) -> None:
        self.side = side
        self.work = work
        self.canonical = inputs.weights
        self.inputs = {}
        for name, x in inputs.arrays.items():
            self.inputs[name] = side.put(x, work.backward and name == "x")
        self.weights = {name: side.put(x, work.backward) for name, x in inputs.weights.items()}
        self.x = self.inputs["x"]
        self.lengths = None
        if work.is_padded:
            self.lengths = torch.tensor(work.lengths, dtype=torch.int32, device=side.device)

    def contenders(self) -> dict[str, Callable[[], Contender]]:
        makers = {OURS: self.ours}
        if self.work.layer is not None:
            return makers  # the others lack what layers of models have
        makers["torch.nn"] = self.torch_nn
        if self.work.need_weights:
            makers["softmax by hand"] = self.softmax_by_hand
        else:
            makers["SDPA by hand"] = self.by_hand
        makers["keras"] = self.keras
        return makers

    def our_module(self, kind: Any) -> Any:
        """Return a module of ours with the weights of the work."""
        module = kind(self.work.spec, dtype=getattr(torch, self.work.dtype))
        return self.on_device(load_into(module, self.canonical, self.work.spec))

    def on_device(self, module: Any) -> Any:
        """Return a module on the device, in the mode of the measurement."""
        return module.to(self.side.device).eval().requires_grad_(self.work.backward)

    def module_contender(self, forward: Callable[[], Any], module: Any) -> Contender:
        return self.side.contender(self.work, forward, self.inputs, dict(module.named_parameters()))

    def masks(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the causal mask (T, S) and the padding mask (B, S), if any, True = masked; made
        beforehand.
        """
        seq_len = self.work.seq_len
        causal = None
        if self.work.is_causal:
            causal = mha_torch.create_causal_mask(seq_len, device=self.side.device)
        padding = None
        if self.lengths is not None:
            padding = mha_torch.create_padding_mask(self.lengths, seq_len)[:, 0, 0]
        return causal, padding

    def visible_keys(self) -> Tensor | None:
        """Return the mask of SDPA: (B, 1, T, S) or (B, 1, 1, S), True = attend; None if `is_causal`
        suffices.
        """
        causal, padding = self.masks()
        if padding is None:
            return None
        hidden = padding[:, None, None]
        if causal is not None:
            hidden = hidden | causal
        return ~hidden

    def ours(self) -> Contender:
        if self.work.need_weights:
            module = self.our_module(mha_torch.MultiHeadAttention)
            causal, _ = self.masks()
            forward = partial(module, self.x, mask=causal, need_weights=True)
        else:
            module = self.our_module(mha_torch.MultiHeadSelfAttention)
            forward = partial(
                module, self.x, is_causal=self.work.is_causal, key_padding_lengths=self.lengths
            )
        return self.module_contender(forward, module)

    def torch_nn(self) -> Contender:
        adapter = load_adapter("torch.nn.MultiheadAttention")
        module = adapter.make(self.work.spec, self.work.dtype)
        module = self.on_device(adapter.load_into(module, self.canonical))
        causal, padding = self.masks()
        call = partial(
            module,
            self.x,
            self.x,
            self.x,
            attn_mask=causal,
            key_padding_mask=padding,
            is_causal=self.work.is_causal,
            need_weights=self.work.need_weights,
            average_attn_weights=False,
        )
        forward = call if self.work.need_weights else _first(call)
        return self.module_contender(forward, module)

    def project(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.weights[f"{name}_proj.weight"], self.weights[f"{name}_proj.bias"])

    def heads(self, x: Tensor) -> list[Tensor]:
        """Queries, keys and values, (B, N, T, H)."""
        shape = (*x.shape[:2], self.work.num_heads, self.work.head_dim)
        return [self.project(name, x).view(shape).transpose(1, 2) for name in "qkv"]

    def out(self, context: Tensor) -> Tensor:
        return self.project("out", context.transpose(1, 2).flatten(2))

    def by_hand(self) -> Contender:
        mask = self.visible_keys()
        is_causal = self.work.is_causal and mask is None

        def forward() -> Tensor:
            context = F.scaled_dot_product_attention(
                *self.heads(self.x), attn_mask=mask, is_causal=is_causal
            )
            return self.out(context)

        return self.side.contender(self.work, forward, self.inputs, self.weights)

    def softmax_by_hand(self) -> Contender:
        causal, _ = self.masks()

        def forward() -> tuple[Tensor, Tensor]:
            query, key, value = self.heads(self.x)
            scores = query * self.work.head_dim**-0.5 @ key.mT
            if causal is not None:
                scores = scores.masked_fill(causal, -torch.inf)
            attn_weights = scores.softmax(-1)
            return self.out(attn_weights @ value), attn_weights

        return self.side.contender(self.work, forward, self.inputs, self.weights)

    def keras(self) -> Contender:
        layer = keras_layer("torch", self.work.spec, self.work.dtype, self.canonical)
        mask = self.visible_keys()
        if mask is not None:
            mask = mask[:, 0].expand(-1, self.work.seq_len, -1)  # (B, T, S)
        forward = partial(
            layer,
            self.x,
            self.x,
            attention_mask=mask,
            use_causal_mask=self.work.is_causal,
            return_attention_scores=self.work.need_weights,
        )
        weights = {variable.path: variable.value for variable in layer.trainable_variables}
        return self.side.contender(self.work, forward, self.inputs, weights)


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
        module = self.our_module(mha_torch.MultiHeadAttentionWithCache)

        def forward() -> Tensor:
            cache = module.init_cache(self.work.batch, self.work.capacity)
            output, _ = module(self.x, cache)
            return output

        return self.module_contender(forward, module)

    def by_hand_with(self, store: Callable[[Tensor, Tensor], Any]) -> Contender:
        """Return a prompt by hand, with a function that stores its keys and values."""

        def forward() -> Tensor:
            query, key, value = self.heads(self.x)
            store(key, value)
            return self.out(F.scaled_dot_product_attention(query, key, value, is_causal=True))

        return self.side.contender(self.work, forward, self.inputs)

    def static_cache(self) -> Contender:
        def store(key: Tensor, value: Tensor) -> None:
            for x in (key, value):
                cache = x.new_zeros(*x.shape[:2], self.work.capacity, x.shape[3])
                cache[:, :, : self.work.seq_len] = x

        return self.by_hand_with(store)

    def concatenation(self) -> Contender:
        def store(key: Tensor, value: Tensor) -> None:
            """Nothing is to be done: the keys and values are the cache."""

        return self.by_hand_with(store)

    def hugging_static(self) -> Contender:
        def store(key: Tensor, value: Tensor) -> None:
            _static_cache(self.work.capacity).update(key, value, 0)

        return self.by_hand_with(store)

    def hugging_dynamic(self) -> Contender:
        from transformers.cache_utils import DynamicCache

        def store(key: Tensor, value: Tensor) -> None:
            DynamicCache().update(key, value, 0)

        return self.by_hand_with(store)


class _Decode(_Layer):
    """One more token with a filled cache."""

    def __init__(self, side: Side, work: Work, inputs: Inputs) -> None:
        super().__init__(side, work, inputs)
        # Only the new token is an input of the step.
        self.cached = {name: x for name, x in self.inputs.items() if name != "x"}
        self.inputs = {"x": self.x}

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
        """Return the cached keys and values, (B, N, capacity, H)."""
        room = self.work.capacity - self.work.seq_len
        return [F.pad(self.cached[name], (0, 0, 0, room)) for name in ("keys", "values")]

    def ours(self) -> Contender:
        module = self.our_module(mha_torch.MultiHeadAttentionWithCache)
        cache = self.filled_cache(module)

        def forward() -> Tensor:
            nonlocal cache
            output, cache = module(self.x, cache)
            return output

        return self.side.contender(self.work, forward, self.inputs, carries=True)

    def filled_cache(self, module: Any) -> Any:
        """Return our cache with the cached keys and values."""
        batch, seq_len = self.work.batch, self.work.seq_len
        if "prompt" in self.cached:
            with torch.inference_mode():
                empty = module.init_cache(batch, self.work.capacity)
                _, cache = module(self.cached["prompt"], empty)
            return cache
        lengths = torch.full((batch,), seq_len, dtype=torch.int32, device=self.side.device)
        keys, values = self.with_room()
        return mha_torch.KVCache(keys, values, lengths)

    def by_hand_with(
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
            keys, values, mask = extend(key, value)
            return self.out(F.scaled_dot_product_attention(query, keys, values, attn_mask=mask))

        return self.side.contender(self.work, forward, self.inputs, carries=carries)

    def concatenation(self) -> Contender:
        def extend(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, None]:
            keys = torch.cat((self.cached["keys"], key), dim=2)
            values = torch.cat((self.cached["values"], value), dim=2)
            return keys, values, None

        return self.by_hand_with(extend)

    def static_cache(self) -> Contender:
        keys, values = self.with_room()
        filled = self.work.seq_len

        def extend(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, None]:
            nonlocal filled
            keys[:, :, filled : filled + 1] = key
            values[:, :, filled : filled + 1] = value
            filled += 1
            return keys[:, :, :filled], values[:, :, :filled], None

        return self.by_hand_with(extend, carries=True)

    def hugging_static(self) -> Contender:
        cache = _static_cache(self.work.capacity)
        cache.update(self.cached["keys"], self.cached["values"], 0)
        slots = torch.arange(self.work.capacity, device=self.side.device)

        def extend(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            keys, values = cache.update(key, value, 0)
            return keys, values, (slots < cache.get_seq_length())[None, None, None]

        return self.by_hand_with(extend, carries=True)

    def hugging_dynamic(self) -> Contender:
        from transformers.cache_utils import DynamicCache

        cache = DynamicCache()
        cache.update(self.cached["keys"], self.cached["values"], 0)

        def extend(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, None]:
            keys, values = cache.update(key, value, 0)
            return keys, values, None

        return self.by_hand_with(extend, carries=True)


def _flash_sdpa(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)


def _static_cache(capacity: int) -> Any:
    """Return transformers' StaticCache of a single layer, without the configuration of a model."""
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


def _first(function: Callable[[], Any]) -> Callable[[], Any]:
    """Return the function with its first result only."""

    def first() -> Any:
        return function()[0]

    return first

"""All correct ports and all bugs."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module

from wild.how import How
from wild.records import STYLES, Bug, Right

BUGS: dict[str, Bug] = {bug.id: bug for style in STYLES for bug in import_module(f"wild.bugs.{style}").m.made}
"""Bugs by id, in order of style."""

CASES = {
    "nanogpt": ("gpt", "gpt-square", "gpt-one", "gpt-token", "gpt-h1", "gpt-no-bias", "gpt-loud", "gpt-wide"),
    "bert": ("bert", "bert-three", "bert-full", "bert-square", "bert-one", "bert-wide", "bert-biased", "cross",
             "cross-narrow", "cross-square"),
    "llama": ("llama", "llama-six", "llama-mha", "llama-mqa", "llama-square", "llama-one", "llama-500k", "llama-far",
              "llama-offset", "llama-linear", "llama31", "llama-wide", "neox", "qwen2", "qwen3", "llama-steps",
              "llama-exact-steps", "qwen2-steps"),
    "meta_llama": ("meta", "meta-mqa", "meta-mha", "meta-500k", "meta-steps", "meta-two", "meta-token"),
    "flax_linen": ("bert", "gpt", "causal-padded", "gqa", "gpt-square", "bert-three", "cross", "cross-narrow",
                   "gqa-cross", "bert-biased", "bert-wide"),
    "jnp_einsum": ("llama", "gpt-oss", "mistral", "neox", "llama-mqa", "gqa", "gpt-oss-full", "capped", "llama-far",
                   "llama-six"),
    "flash": ("gpt", "bert", "bert-three", "gqa", "causal-padded", "empty-rows", "cross", "gpt-loud", "gpt-wide"),
    "sdpa": ("gpt", "bert", "cross", "gqa", "random-mask", "bert-biased", "causal-padded", "empty-rows", "gqa-cross",
             "gpt-wide"),
    "nn_mha": ("gpt", "bert", "cross", "cross-narrow", "causal-padded", "gpt-h1", "bert-wide", "bert-biased"),
    "decode": ("decode", "decode-ragged", "decode-gpt", "decode-one", "decode-mqa"),
    "serve": ("serve", "serve-window", "serve-chunks", "serve-chunks-window", "decode-ragged", "decode-gpt"),
    "ring": ("ring-six", "ring"),
    "left": ("left",),
    "packed": ("packed", "packed-mha"),
    "quantized": ("cache-int8-token", "cache-fp8", "cache-fp8-heads", "cache-int8-head", "cache-before-rope",
                  "cache-int8-zero", "cache-kivi"),
    "gemma": ("gemma", "gemma-window", "gemma-loud", "gemma-plain", "mistral", "llama"),
    "mpt": ("mpt", "mpt-four", "mpt-clipped", "mpt-normed"),
    "torch_training": ("train", "train-biased", "train-gqa", "train-full", "llama", "gpt"),
    "torch_kernel": ("train-gqa", "train-full", "train-gqa-causal", "train-ring", "gpt"),
    "jax_training": ("train-gqa-causal", "train-ring", "gpt"),
    "mla": ("mla", "mla-other"),
}  # fmt: skip
"""Layers that each port supports, its own layers first."""

SHAPES = ("bthd", "flat", "heads-into-batch", "batch-second", "mean-heads", "hooks", "no-mask", "last-stages")
ANY_MASK = ("mask-broadcast", "mask-visible", "mask-additive")

RECORDED: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "nanogpt": (("gpt", "gpt-square"), (*SHAPES, *ANY_MASK, "mask-t-s", "scores-unscaled", "scores-masked")),
    "bert": (("bert", "bert-three"), (*SHAPES, *ANY_MASK, "scores-unscaled", "scores-masked", "zeroed-padding")),
    "llama": (("llama", "llama-square"), (*SHAPES, *ANY_MASK, "mask-t-s", "scores-unscaled", "scores-masked",
                                          "before-rope", "kv-repeated")),
    "meta_llama": (("meta",), (*SHAPES, "mask-visible", "mask-t-s", "scores-unscaled", "scores-masked", "before-rope",
                               "kv-repeated")),
    "flax_linen": (("gqa", "bert"), (*SHAPES, *ANY_MASK, "scores-unscaled", "scores-masked", "kv-repeated")),
    "jnp_einsum": (("llama", "gpt-oss"), (*SHAPES, "mask-visible", "mask-t-s", "scores-unscaled", "scores-masked",
                                          "before-rope")),
    "flash": (("bert", "causal-padded"), ("bthd", "flat", "hooks", "last-stages", "scores-masked", "zeroed-padding")),
    "sdpa": (("gpt", "bert"), ("bthd", "flat", "batch-second", "mask-broadcast", "mask-visible", "mask-additive")),
    "nn_mha": (("gpt", "cross"), ("mean-heads", "batch-second")),
    "decode": (("decode", "decode-ragged"), ("growing", "dirty-slots", "bthd", "mask-broadcast", "scores-masked",
                                             "hooks")),
    "serve": (("serve", "serve-window"), ("no-mask", "dirty-slots", "bthd", "mask-broadcast", "hooks")),
    "ring": (("ring-six",), ("hooks",)),
    "left": (("left",), ("no-mask", "bthd", "hooks")),
    "packed": (("packed",), ("no-mask", "bthd", "mask-broadcast", "hooks")),
    "quantized": (("cache-int8-token", "cache-fp8"), ("no-mask", "bthd", "mask-broadcast", "hooks")),
    "gemma": (("gemma", "gemma-window"), (*SHAPES, "mask-visible", "mask-t-s", "scores-unscaled", "scores-masked",
                                          "before-rope", "before-norm", "kv-repeated")),
    "mpt": (("mpt",), (*SHAPES, "mask-visible", "mask-t-s", "scores-masked")),
    "torch_training": (("train",), ("gradients", "gradients-alone", "gradients-between")),
    "torch_kernel": (("train-gqa", "train-full"), ("gradients", "gradients-alone", "gradients-between")),
    "jax_training": (("train-gqa-causal", "train-ring"), ("gradients", "gradients-alone")),
    "mla": (("mla",), ("bthd", "no-mask", "mask-visible", "mask-t-s", "last-stages")),
}  # fmt: skip
"""Other ways to record each port: the layers and the variants."""

IN_JAX = ("flax_linen", "jnp_einsum", "decode")
TRAINING = ("torch_training", "torch_kernel", "jax_training")
WITH_A_CHOICE = ("nanogpt", "bert", "llama", "meta_llama", "flax_linen", "jnp_einsum", "gemma", "mpt")


def _base(style: str, number: int) -> tuple[tuple[str, ...], How]:
    """Return the dtypes of a layer and how it runs.

    JAX compiles each shape separately, so only the first layers run in all dtypes, and only the first one runs
    operation by operation.
    """
    if style not in IN_JAX:
        return ("float32", "bfloat16", "float16"), How()
    return ("float32", "bfloat16", "float16") if number < 4 else ("float32",), How() if number < 1 else How(mode="jit")


def _rights() -> Iterator[Right]:
    for style, cases in CASES.items():
        for number, case in enumerate(cases):
            dtypes, how = _base(style, number)
            for dtype in dtypes:
                yield Right(style, case, 0, dtype, how, "plain")
            yield Right(style, case, 1, "float32", how, "plain")
            yield Right(style, case, 1, "float32", how, "output")
        yield Right(style, cases[0], 0, "bfloat16", How(), "output")
        yield Right(style, cases[0], 0, "float16", How(), "output")
        for seed in range(2, 5):
            yield Right(style, cases[0], seed, "float32", How(), "plain")
        layers, recordings = RECORDED[style]
        for case in layers:
            how = _base(style, cases.index(case))[1]
            for recording in recordings:
                yield Right(style, case, 0, "float32", how, recording)
            yield Right(style, case, 0, "bfloat16", how, recordings[0])
        if style in TRAINING:
            continue
        for dtype in ("bfloat16", "float16"):
            yield Right(style, cases[0], 0, dtype, How(), "upcast")
    for style in TRAINING:
        for case in CASES[style]:
            for dtype in ("float32", "bfloat16", "float16"):
                for seed in (0, 1):
                    yield Right(style, case, seed, dtype, How(), "gradients")
                    yield Right(style, case, seed, dtype, How(), "gradients-alone")
    yield from _with_choices()


def _with_choices() -> Iterator[Right]:
    """Yield variants: scores and softmax in 16 bits, finite penalties, compiled, growing caches."""
    for style in WITH_A_CHOICE:
        case = CASES[style][0]
        for dtype in ("bfloat16", "float16"):
            for seed in (0, 1):
                yield Right(style, case, seed, dtype, How(wide=False), "plain")
            yield Right(style, case, 0, dtype, How(wide=False), "output")
            yield Right(style, case, 0, dtype, How(wide=False, penalty="min"), "scores-masked")
        for penalty in ("min", "1e4", "1e9"):
            for recording in ("plain", "scores-masked"):
                yield Right(style, case, 0, "float32", How(penalty=penalty), recording)
    for style in IN_JAX:
        for recording in ("plain", "output"):
            for dtype in ("float32", "bfloat16", "float16"):
                yield Right(style, CASES[style][0], 0, dtype, How(mode="jit"), recording)
    for style in ("nanogpt", "llama"):
        yield Right(style, CASES[style][0], 0, "float32", How(mode="compile"), "plain")
    for case in ("llama-steps", "qwen2-steps"):
        for dtype in ("float32", "bfloat16"):
            yield Right("llama", case, 0, dtype, How(), "growing")
    for recording in ("growing", "dirty-slots", "bthd", "before-rope"):
        yield Right("meta_llama", "meta-steps", 0, "float32", How(), recording)


RIGHTS: dict[str, Right] = {right.id: right for right in _rights()}
"""Correct ports by id."""

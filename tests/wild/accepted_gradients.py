"""Names of the catalog that are right for bugs of training steps: see accepted.py."""

OF_TRAINING: dict[str, dict[str, str]] = {
    "jax_training": {
        "weights-stopped": "grad-stopped-at-attn-weights",
        "k-stopped": "grad-stopped-at-k",
        "k-stopped-bf16": "grad-stopped-at-k",
        "v-stopped": "grad-stopped-at-v",
        "qkv-stopped": "grad-stopped-at-k",
        "biases-stopped": "grad-missing-of-qkv-bias",
        "ring-stale": "grad-ring-block-stale",
        "lse-not-merged": "grad-lse-not-merged",
    },
    "torch_kernel": {
        "group-not-summed": "grad-group-not-summed",
        "group-averaged": "grad-group-averaged",
        "group-tiled": "grad-group-tiled",
        "group-in-bf16": "grad-group-sums-bfloat16",
        "scores-in-fp16": "grad-scores-float16",
        "padding-visible": "grad-padding-visible",
        "mask-lost": "grad-mask-ignored",
        "lse-of-block": "grad-lse-not-merged",
        "scale-lost": "grad-scale-missing",
        "delta-lost": "grad-softmax-mean-missing",
        "dropout-again": "grad-dropout-redrawn",
        "dropout-unscaled": "grad-dropout-unscaled",
        "dropout-gradients-unscaled": "grad-dropout-unscaled",
    },
    "torch_training": {
        "k-detached": "grad-stopped-at-k",
        "v-detached": "grad-stopped-at-v",
        "weights-detached": "grad-stopped-at-attn-weights",
        "weights-detached-alone": "grad-stopped-at-attn-weights",
        "norm-statistics": "grad-stopped-in-norm",
        "norm-input": "grad-stopped-before-norm",
        "three-of-four-keys": "grad-group-not-summed",
        "three-of-four-values": "grad-group-not-summed",
        "three-of-four-heads": "grad-group-not-summed",
        "gate-detached": "grad-stopped-at-gate",
        "kv-input-detached": "grad-stopped-at-kv-input",
        "v-input-detached": "grad-stopped-at-v-input",
        "biases-detached": "grad-missing-of-all-bias",
        "score-bias-detached": "grad-missing-of-score-bias",
        "context-detached": "grad-stopped-at-context",
    },
}

PAGES_OF_TRAINING = {f"torch_kernel-dropout-{name}": "dropout" for name in ("again", "unscaled", "gradients-unscaled")}
"""The forward pass of these has dropout, which the reference has not."""

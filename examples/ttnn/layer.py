"""The layer as a function, and its description for the tool: `python layer.py layer.safetensors`.

That writes the weights to a file, for the command line. A real bring-up loads its checkpoint here.
"""

import sys

import attention_tt
import attention_tt_fixed

import parity
from mha_spec import Rope

# 32 heads: with up to 16, the framework's decode kernel is 2% off (docs/reference/ttnn.md).
SPEC = parity.AttentionSpec(
    128, 32, num_kv_heads=8, head_dim=32, qkv_bias=False, out_bias=False, rope=Rope(10000.0)
)
PROBLEM = parity.make_problem(
    parity.Case("port", SPEC, "a bring-up", seq_len=40, is_causal=True), "bfloat16"
)
STATE = parity.convert(
    PROBLEM.weights, source="canonical", target="transformers.LLaMA", num_heads=SPEC.num_heads
)


def made(module, x):
    """Run a module's layer on prompts like x, with the weights of the problem, on the device of
    x.
    """
    return module.Attention(
        STATE, SPEC.num_heads, SPEC.num_kv_heads, SPEC.rope.theta, x.shape[0], x.device()
    )


def draft(x):
    """Run the unfixed layer."""
    return made(attention_tt, x).prefill(x)


def fixed(x):
    """Run the fixed layer."""
    return made(attention_tt_fixed, x).prefill(x)


if __name__ == "__main__":
    parity.save(sys.argv[1], PROBLEM.weights, SPEC)

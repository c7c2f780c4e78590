"""What the tool is told about the layer, and the layer as a function: `python layer.py layer.safetensors`.

That writes the weights to a file, for the command line. A real bring-up loads its checkpoint here.
"""

import sys

import attention_tt
import attention_tt_fixed

import parity
from mha_spec import Rope

# 32 heads: up to 16 the framework's kernel of a step is 2 % off (docs/ttnn.md).
SPEC = parity.AttentionSpec(128, 32, num_kv_heads=8, head_dim=32, qkv_bias=False, out_bias=False, rope=Rope(10000.0))
PROBLEM = parity.make_problem(parity.Case("port", SPEC, "a bring-up", seq_len=40, is_causal=True), "bfloat16")
STATE = parity.convert(PROBLEM.weights, source="canonical", target="transformers.LLaMA", num_heads=SPEC.num_heads)


def made(module, x):
    """The layer of a module for prompts like x, with the weights of the problem, where x lies."""
    return module.Attention(STATE, SPEC.num_heads, SPEC.num_kv_heads, SPEC.rope.theta, x.shape[0], x.device())


def draft(x):
    """The layer before anything is mended."""
    return made(attention_tt, x).prefill(x)


def fixed(x):
    """The layer as it should be."""
    return made(attention_tt_fixed, x).prefill(x)


if __name__ == "__main__":
    parity.save(sys.argv[1], PROBLEM.weights, SPEC)

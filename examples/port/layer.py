"""The layer to port: the original with its weights, and its description for the tool.

`python layer.py layer.safetensors` writes the weights to a file, for the command line.
"""

import sys

import torch
from attention_torch import Attention

import parity
from mha_spec import Rope

torch.manual_seed(0)
ORIGINAL = Attention()  # a real port loads its checkpoint here
STATE = {name: tensor.numpy() for name, tensor in ORIGINAL.state_dict().items()}

SPEC = parity.AttentionSpec(
    64, 8, num_kv_heads=2, qkv_bias=False, out_bias=False, rope=Rope(10000.0)
)

# `wqkv` and `wo` are the original's own names, in a known layout: one Linear for q, k and v.
WEIGHTS = parity.convert(
    {"qkv_proj.weight": STATE["wqkv.weight"], "out_proj.weight": STATE["wo.weight"]},
    source="qkv_proj",
    target="canonical",
    num_heads=SPEC.num_heads,
    num_kv_heads=SPEC.num_kv_heads,
)

# Inputs are random; the float64 reference and the tolerance follow from them.
PROBLEM = parity.make_problem(
    parity.Case("port", SPEC, "a port", seq_len=16, is_causal=True), "float32", WEIGHTS
)

if __name__ == "__main__":
    parity.save(sys.argv[1], WEIGHTS, SPEC)

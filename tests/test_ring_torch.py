"""Tokens divided over two processes, in `make test`: test_sharded_torch has more layers, sizes and mistakes."""

import subprocess
import sys

import processes
import rings
import torch
from shell import environment

import mha_torch
import parity


def test_divided_tokens_give_output_and_gradients_of_one_process(tmp_path):
    program = [sys.executable, processes.__file__, str(tmp_path), "ring"]
    subprocess.run(program, env=environment(), check=True)
    ((name, found),) = torch.load(tmp_path / "ring.pt").items()
    spec, seq_len, options = rings.calls({"grouped": processes.RINGS["grouped"]})[name]
    one, exact = (
        rings.trained(
            processes.make(mha_torch.MultiHeadSelfAttention, spec, dtype), seq_len=seq_len, dtype=dtype, **options
        )
        for dtype in (torch.float32, torch.float64)
    )
    parity.assert_parity(found, exact, same_precision=one)

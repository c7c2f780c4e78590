"""Tokens divided over two processes, in `make test`: test_sharded_torch has more layers, sizes and mistakes."""

import subprocess
import sys

import processes
import rings
import torch
from shell import environment
from test_sharded_torch import assert_as_whole


def test_divided_tokens_give_output_and_gradients_of_one_process(tmp_path):
    program = [sys.executable, processes.__file__, str(tmp_path), "ring"]
    subprocess.run(program, env=environment(), check=True)
    ((name, found),) = torch.load(tmp_path / "ring.pt").items()
    assert_as_whole(found, *rings.calls({"grouped": processes.RINGS["grouped"]})[name])

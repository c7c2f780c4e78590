"""TTNN without hardware: mock boards, and the values that they would compute.

It serves any TTNN code. It imports only ttnn and NumPy, and for values torch, in which ttnn's
golden functions are written:

    import torch, ttnn, ttnn_mock

    options = {"dtype": ttnn.bfloat16, "layout": ttnn.TILE_LAYOUT}
    with ttnn_mock.board("n150") as device:
        x = ttnn.from_torch(torch.randn(2, 40, 64), device=device, **options)
        y = ttnn.to_torch(ttnn.softmax(x, dim=-1))
    print(y.float().sum(-1))  # ones, to bfloat16

On a mock board each operation checks its arguments and builds its program for the real grid of
cores, and computes nothing. A shadow keeps the value of its golden function next to each tensor.
`golden` adds a golden function for an operation that has none. `recorded` and `replayed` return the
values of a card or a simulator for the same program.

Code that transfers arrays only by `ttnn.from_torch` and `ttnn.to_torch` needs nothing else. A
library that builds a `ttnn.Tensor` itself notifies the mock board of it: see `ttnn_mock.hooks`.
"""

from ttnn_mock import hooks
from ttnn_mock.boards import BOARDS, board, use
from ttnn_mock.goldens import golden
from ttnn_mock.recording import Recording, Replay, recorded, replayed
from ttnn_mock.shadows import Shadow, observed, shadow, value_of

__all__ = [
    "BOARDS",
    "Recording",
    "Replay",
    "Shadow",
    "board",
    "golden",
    "hooks",
    "observed",
    "recorded",
    "replayed",
    "shadow",
    "use",
    "value_of",
]

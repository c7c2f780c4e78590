"""Tests of `mha_tt`, which require ttnn: on a mock board, a simulator or a card."""

import os

os.environ.setdefault("LOGURU_LEVEL", "WARNING")  # ttnn logs its whole configuration at import

MOCK_BOARD = os.environ.get("MHA_TT_MOCK", "p150")
RECORDED_BOARD = "p150"
"""Board of all recordings made by tools/record-tt; other boards have nothing to replay."""

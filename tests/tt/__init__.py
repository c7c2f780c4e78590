"""Tests of `mha_tt`, which require ttnn: on a mock board, a simulator or a card."""

import os

os.environ.setdefault("LOGURU_LEVEL", "WARNING")  # ttnn logs its whole configuration at import

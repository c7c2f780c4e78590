"""Tests of `mha_tt`, where ttnn is: on a mock board, on a simulator or on a card."""

import os

os.environ.setdefault("LOGURU_LEVEL", "WARNING")  # ttnn tells its whole configuration when it is imported

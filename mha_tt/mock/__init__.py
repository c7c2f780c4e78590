"""TTNN without hardware: mock boards, and the values that they would compute."""

from mha_tt.mock.boards import BOARDS, board, use
from mha_tt.mock.goldens import golden
from mha_tt.mock.shadows import Shadow, observed, shadow, value_of

__all__ = ["BOARDS", "Shadow", "board", "golden", "observed", "shadow", "use", "value_of"]

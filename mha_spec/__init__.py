"""What an attention layer computes, written once: pure Python and NumPy, for every sibling and for `parity`."""

from mha_spec.attention import AttentionSpec, Projection
from mha_spec.gate import Gate
from mha_spec.norm import Norm
from mha_spec.rope import Rope

__all__ = ["AttentionSpec", "Gate", "Norm", "Projection", "Rope"]

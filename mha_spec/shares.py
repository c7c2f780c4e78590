"""Division of a layer's heads among ranks, and the axis of heads in each weight.

Source: Megatron-LM, arXiv:1909.08053, section 3.
"""

from math import gcd
from typing import NamedTuple

from mha_spec.attention import AttentionSpec
from mha_spec.score_weights import SCORE_WEIGHTS, score_axes

OUT_BIAS = "out_proj.bias"

ROWS, COLUMNS = 0, 1

OF_QUERIES: dict[str, int] = dict.fromkeys(
    ("q_proj", "q_b_proj", "kv_b_proj", "gate_proj", "q_norm", "context_norm"), ROWS
)
OF_QUERIES["out_proj"] = COLUMNS
OF_QUERIES |= {name: axes.index("N") for name, axes in SCORE_WEIGHTS.items()}
OF_KEYS: dict[str, int] = dict.fromkeys(("k_proj", "v_proj", "k_norm", "v_norm"), ROWS)
"""Axis of query heads, or of key/value heads, in each weight.

With latents, each query head has its own keys and values.
"""


class LocalHeads(NamedTuple):
    """Indices of a rank's heads in the whole layer.

    Attributes:
        queries: consecutive query heads.
        keys: their key/value heads, one per local group.
    """

    queries: range
    keys: list[int]


def local_heads(spec: AttentionSpec, size: int, rank: int) -> LocalHeads:
    """Return the heads of one of `size` ranks; `size` divides the number of query heads.

    With fewer key/value heads than ranks, several ranks share one. If neither number divides the
    other, a rank has parts of several groups. Its groups are then the largest equal ones that all
    parts divide into, and a key/value head may occur twice.
    """
    count = spec.num_heads // size
    group = spec.num_heads // spec.num_kv_heads
    queries = range(rank * count, (rank + 1) * count)
    return LocalHeads(queries, [first // group for first in queries[:: gcd(count, group)]])


def axis_of_heads(name: str, spec: AttentionSpec) -> int | None:
    """Return the axis of heads in a canonical weight, or None."""
    part = name.partition(".")[0]
    norm = spec.norms.get(part)
    if name == OUT_BIAS or (norm is not None and norm.over == "head" and not norm.per_head):
        return None
    if name in spec.score_shapes and "N" not in score_axes(name, spec.score_shapes[name]):
        return None
    return (OF_QUERIES | OF_KEYS).get(part)

"""Which heads of a layer each of several ranks has, and where its weights have them.

Source: Megatron-LM, arXiv:1909.08053, section 3.
"""

from math import gcd
from typing import NamedTuple

from mha_spec.attention import AttentionSpec
from mha_spec.relative_products import SIDES

OUT_BIAS = "out_proj.bias"

ROWS, COLUMNS = 0, 1

OF_QUERIES: dict[str, int] = dict.fromkeys(("q_proj", "q_b_proj", "kv_b_proj", "gate_proj", "q_norm", "sinks"), ROWS)
OF_QUERIES["context_norm"] = ROWS
OF_QUERIES |= dict.fromkeys(("out_proj", "relative_bias", *SIDES), COLUMNS)
OF_KEYS: dict[str, int] = dict.fromkeys(("k_proj", "v_proj", "k_norm", "v_norm"), ROWS)
"""What has something for each query head, or each key/value head, and on which axis. With latents, which every query
head expands for itself, the two are the same heads."""


class Held(NamedTuple):
    """The heads of a rank, by their numbers in the whole layer.

    Attributes:
        queries: its query heads, neighbours.
        keys: the key/value heads that these see, one for each group of its own.
    """

    queries: range
    keys: list[int]


def local_heads(spec: AttentionSpec, size: int, rank: int) -> Held:
    """The heads of one of so many ranks, whose number divides that of the query heads.

    Where there are fewer key/value heads than ranks, several ranks have the same one. Where neither number divides the
    other, a rank's query heads are in parts of several groups; a key/value head then stands for as many of them as all
    parts can be cut into, and may be there twice.
    """
    count, group = spec.num_heads // size, spec.num_heads // spec.num_kv_heads
    queries = range(rank * count, (rank + 1) * count)
    return Held(queries, [first // group for first in queries[:: gcd(count, group)]])


def axis_of_heads(name: str, spec: AttentionSpec) -> int | None:
    """The axis of a canonical weight on which its heads lie, one after the other; None for one that has none."""
    part = name.partition(".")[0]
    norm = spec.norms.get(part)
    if name == OUT_BIAS or (norm is not None and norm.over == "head" and not norm.per_head):
        return None
    if part in SIDES and spec.relative_products is not None and not spec.relative_products.per_head:
        return None
    return (OF_QUERIES | OF_KEYS).get(part)

"""Multi-head latent attention (MLA): keys and values of all heads made of one narrow vector a token."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mha_spec.norm import Norm
from mha_spec.record import Record
from mha_spec.refusal import Refusal
from mha_spec.rules import as_count, as_factor, as_number

if TYPE_CHECKING:
    from mha_spec.rope import Rope


@dataclass(frozen=True, repr=False)
class Latent(Record):
    """Keys and values are made of a latent, which the heads share and a cache keeps in their place.

    Of a token x: kv_a_proj gives the latent, which kv_a_norm normalises, and after it the last rope_dim features of all
    keys, which are rotated; kv_b_proj makes of the latent, head by head, the other features of the key and then the
    value. Queries are as elsewhere, or made of a latent of their own: q_a_proj, q_a_norm, q_b_proj. After its norm a
    latent is multiplied by its factor.

    Attributes:
        kv_rank: width of the latent of keys and values.
        rope_dim: features of a key, its last ones, that the heads share; RoPE rotates these alone.
        q_rank: width of the latent of queries, or None where q_proj makes them of the input.
        eps: of the RMS norms of the latents.
        q_factor, kv_factor: what the latents are multiplied by, those of queries and those of keys and values:
            sqrt(d_model / q_rank) and sqrt(d_model / kv_rank) in LongCat-Flash.

    Raises:
        TypeError: if a width is not an integer, or eps or a factor not a number.
        ValueError: if a width is below 1, eps or a factor is not positive and finite, or queries that are made of no
            latent have a factor.

    Source: DeepSeek-V2, arXiv:2405.04434, section 2.1; the factors, LongCat-Flash, arXiv:2509.01322.
    """

    kv_rank: int
    rope_dim: int
    q_rank: int | None = None
    eps: float = 1e-6
    q_factor: float = 1.0
    kv_factor: float = 1.0

    def __post_init__(self) -> None:
        for name in ("kv_rank", "rope_dim", "q_rank"):
            if getattr(self, name) is not None or name != "q_rank":
                object.__setattr__(self, name, as_count(name, getattr(self, name)))
        object.__setattr__(self, "eps", as_number("eps", self.eps))
        if not 0.0 < self.eps < math.inf:
            raise Refusal("eps", "be positive and finite", eps=self.eps)
        for name in ("q_factor", "kv_factor"):
            object.__setattr__(self, name, as_factor(name, getattr(self, name)))
        if self.q_rank is None and self.q_factor != 1.0:
            raise Refusal("q_factor", "be 1 without q_rank", q_factor=self.q_factor)

    @property
    def width(self) -> int:
        """Features that a cache keeps of a token: kv_rank + rope_dim."""
        return self.kv_rank + self.rope_dim

    @property
    def norms(self) -> dict[str, tuple[Norm, int]]:
        """The norms of the latents by name, with the width that each is taken over."""
        widths = {"q_a_norm": self.q_rank, "kv_a_norm": self.kv_rank}
        norm = Norm(over="width", eps=self.eps)
        return {name: (norm, width) for name, width in widths.items() if width is not None}

    @property
    def factors(self) -> dict[str, float]:
        """What the latents are multiplied by after their norms, by the names of these."""
        return {"q_a_norm": self.q_factor, "kv_a_norm": self.kv_factor}


def check_latent_rope(latent: Latent, rope: Rope | None) -> None:
    """Refuse RoPE of other features than those that the heads' keys share.

    Raises:
        ValueError: if it rotates others.
    """
    if rope is not None and (rope.rotary_dim, rope.rotated) != (latent.rope_dim, "last"):
        raise Refusal(
            "rope",
            f"rotate the last rope_dim features with latent (rotary_dim={latent.rope_dim}, rotated='last')",
            rope=rope,
            latent=latent,
        )

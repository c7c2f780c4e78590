"""Multi-head latent attention (MLA): one narrow vector per token, from which all keys and values
are expanded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mha_spec.errors import InputError
from mha_spec.features.norm import Norm
from mha_spec.record import Record
from mha_spec.rules import as_count, as_factor

if TYPE_CHECKING:
    from mha_spec.features.rope import Rope


@dataclass(frozen=True, repr=False)
class Latent(Record):
    """Latents of keys and values: shared by all heads, and cached instead of keys and values.

    For each token, kv_a_proj returns the latent followed by the last rope_dim features of all keys.
    kv_a_norm normalizes the latent, and RoPE rotates those features. For each head, kv_b_proj
    expands the latent to the other features of the key, followed by the value. Queries come from
    q_proj, or from their own latent: q_a_proj, q_a_norm, q_b_proj. Each latent is multiplied by its
    factor after its norm.

    Attributes:
        kv_rank: width of the key/value latent.
        rope_dim: last features of each key, shared by the heads; only these are rotated.
        q_rank: width of the query latent, or None for q_proj.
        eps: epsilon of the RMS norms of the latents.
        q_factor, kv_factor: factors of the query latent and the key/value latent; sqrt(d_model /
            q_rank) and sqrt(d_model / kv_rank) in LongCat-Flash.

    Raises:
        TypeError: if a width is not an integer, or eps or a factor not a number.
        ValueError: if a width is below 1, eps or a factor is not positive and finite, or q_factor
            is set without q_rank.

    Source: DeepSeek-V2, arXiv:2405.04434, section 2.1; the factors, LongCat-Flash,
    arXiv:2509.01322.
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
        object.__setattr__(self, "eps", as_factor("eps", self.eps))
        for name in ("q_factor", "kv_factor"):
            object.__setattr__(self, name, as_factor(name, getattr(self, name)))
        if self.q_rank is None and self.q_factor != 1.0:
            raise InputError("q_factor", "be 1 without q_rank", q_factor=self.q_factor)

    @property
    def width(self) -> int:
        """Cached features per token: kv_rank + rope_dim."""
        return self.kv_rank + self.rope_dim

    @property
    def norms(self) -> dict[str, tuple[Norm, int]]:
        """Norms of the latents by name, each with its width."""
        widths = {"q_a_norm": self.q_rank, "kv_a_norm": self.kv_rank}
        norm = Norm(over="width", eps=self.eps)
        return {name: (norm, width) for name, width in widths.items() if width is not None}

    @property
    def factors(self) -> dict[str, float]:
        """Factors of the latents by the names of their norms."""
        return {"q_a_norm": self.q_factor, "kv_a_norm": self.kv_factor}


def check_latent_rope(latent: Latent, rope: Rope | None) -> None:
    """Reject RoPE that does not rotate exactly the shared features of keys.

    Raises:
        ValueError: if it rotates other features.
    """
    if rope is not None and (rope.rotary_dim, rope.rotated) != (latent.rope_dim, "last"):
        raise InputError(
            "rope",
            "rotate the last rope_dim features with latent "
            f"(rotary_dim={latent.rope_dim}, rotated='last')",
            rope=rope,
            latent=latent,
        )

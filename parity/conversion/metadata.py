"""What is known of layers beside their tensors, layout, prefix and heads, and what is written of it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from mha_spec import AttentionSpec
from parity.conversion.layouts import LAYOUTS, Layout, find_layout, find_spec
from parity.conversion.model_config import HEADS, Beside, heads_beside
from parity.conversion.prefixes import either, fitting_prefixes
from parity.core.weights import FORMAT, read_spec, unheld
from parity.files import TensorFile

Heads = dict[str, Any]
"""What a checkpoint's shapes may leave open: num_heads, num_kv_heads, head_dim, rope."""


def source_prefix(file: TensorFile, said: str | None) -> str:
    """The prefix that the caller says, or else the metadata of a file of ours."""
    told = file.metadata.get("prefix", "") if _is_ours(file.metadata) else ""
    return told if said is None else said


def source_layout(file: TensorFile, layout: str | None, path: str | os.PathLike[str], what: str = "layout") -> Layout:
    """The layout that the caller names, or else the file's metadata.

    Raises:
        ValueError: if there is none of that name, or neither is known.
    """
    told = layout or file.metadata.get("layout") or ("canonical" if "spec" in file.metadata else None)
    if told is not None:
        return find_layout(told, what)
    shapes = {name: info.shape for name, info in file.infos.items()}
    fitting = [
        f"{what}={each.name!r} with prefix={p!r}" for each in LAYOUTS.values() for p in fitting_prefixes(shapes, each)
    ]
    raise ValueError(
        f"{what} must be given for {path}, whose metadata do not have it; "
        f"{f'{either(fitting)} fits' if fitting else '`mha-parity inspect` lists what is in it'}"
    )


@dataclass(frozen=True)
class KnownHeads:
    """What is known of the heads.

    Attributes:
        said: what the caller says, or the file's own metadata.
        saved: the specification in the file's own metadata.
        told: what others tell of the model.
        told_by: who.
        not_carried: what they say of RoPE that is not read from them, where the caller says nothing of it.
    """

    said: Heads
    saved: AttentionSpec | None
    told: Heads
    told_by: str
    not_carried: tuple[str, ...]

    def find_spec(self, shapes: Mapping[str, tuple[int, ...]], layout: Layout) -> tuple[AttentionSpec, str]:
        """The specification of a layer, and where its heads come from, if from another file."""
        if self.told:
            with suppress(ValueError):  # that may be of other layers, or of another model
                return find_spec(shapes, layout, **self.said | self.told), self.told_by
        spec = find_spec(shapes, layout, **self.said)
        if self.saved is not None and unheld(self.saved) == spec:
            return self.saved, ""
        return spec, ""


def known_heads(file: TensorFile, said: Heads) -> KnownHeads:
    """What the caller says of the heads, the file's own metadata, and what lies beside it."""
    known: Heads = {}
    saved = None
    if "spec" in file.metadata and _is_ours(file.metadata):
        saved = read_spec(file.path, {**file.metadata, "format": FORMAT})
        known = {name: getattr(saved, name) for name in HEADS}
    merged = {name: said.get(name) if said.get(name) is not None else known.get(name) for name in (*known, *said)}
    beside = Beside() if known else heads_beside(file)
    told = {name: value for name, value in beside.heads.items() if said.get(name) is None}
    if any(said.get(name) is not None for name in ("num_heads", "num_kv_heads", "head_dim")):
        told = {name: value for name, value in told.items() if name == "rope"}  # counts of two origins do not mix
    not_carried = beside.not_carried if said.get("rope") is None else ()
    return KnownHeads(merged, saved, told, beside.origin, not_carried)


def metadata_of(layout: Layout, specs: Sequence[AttentionSpec], prefix: str) -> dict[str, str]:
    """What is written of layers beside their tensors."""
    # transformers 4 refuses files of another format than "pt"; `load_weights` knows canonical ones by ours.
    form = FORMAT if layout.name == "canonical" and not prefix else "pt"
    metadata = {"format": form, "mha_parity": FORMAT, "layout": layout.name, "rope": layout.rope, "prefix": prefix}
    if len(specs) == 1:
        (spec,) = specs
        metadata |= {"spec": spec.to_json(), "num_heads": str(spec.num_heads), "num_kv_heads": str(spec.num_kv_heads)}
        metadata["head_dim"] = str(spec.head_dim)
    return metadata


def _is_ours(metadata: Mapping[str, str]) -> bool:
    """Whether metadata were written here; other programs use some of the same words."""
    return metadata.get("mha_parity", metadata.get("format")) == FORMAT

"""Edits of the specification: the layer computes a different one than its own."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

from mha_spec import AttentionSpec, Norm, Rope
from parity.explain.diagnosis.bugs.record import (
    Edit,
    Override,
    OverridesOfSpec,
    WrongField,
    with_spec,
)
from parity.explain.diagnosis.bugs.sites import Overrides, always, features_unchanged
from parity.measure.core.reference import Layer

READ_BY = {
    "rope": "rope",
    "latent": "latent",
    "temperature": "temperature",
    "alibi": "alibi",
    "relative_bias": "relative_bias",
    "relative_products": "distance_record",
}
"""Records of a specification that one method of the reference returns, by field: the method."""

SPANS = ("window_size", "chunk_size")
"""Fields that a method of the reference of the same name returns, also if they are None."""

LEAVING_FEATURES = {"rope": "turned", "temperature": "tempered", "clip_qkv": "clipped"}
"""Methods that leave features as they are in a layer without a field: the method, by field."""

NORMS = ("qk_norm", "v_norm", "context_norm")
"""Fields that `norm` of the reference reads."""


def spec_edit(right: AttentionSpec, wrong: AttentionSpec) -> Edit:
    """Return the edit that makes a layer compute a different specification.

    If methods of the reference that read nothing else read all that differs, the edit overrides
    them, so that the steps which do not call them need not be computed again.
    """
    overrides = overrides_of(right, wrong)
    wrong_fields = wrong_fields_in(right, wrong)
    if overrides is None:
        return replace(with_spec(wrong), wrong_fields=wrong_fields)
    return Edit(overrides=overrides, wrong_fields=wrong_fields)


def of_spec(right: AttentionSpec, **changes: Any) -> Overrides:
    """Return the overrides that make a layer compute a specification with other fields.

    Raises:
        ValueError: if only the whole layer of the other specification has the changes.
    """
    wrong = replace(right, **changes)
    overrides = overrides_of(right, wrong)
    if overrides is None:
        raise ValueError(f"no methods of the reference read these fields alone: {[*changes]}")
    return OverridesOfSpec(overrides, wrong_fields_in(right, wrong))


def with_rope(right: AttentionSpec, rope: Rope | None) -> Overrides:
    """Return the overrides that make a layer compute a specification with a different RoPE.

    The scale of its scores remains, although YaRN's mscale belongs to it in a layer with latents.
    """
    wrong = replace(right, rope=rope)
    if wrong.score_scale != right.score_scale:
        return of_spec(right, rope=rope, scale=right.score_scale)
    return of_spec(right, rope=rope)


def without_default_scale(spec: AttentionSpec) -> AttentionSpec:
    """Return a specification without a scale of its own if that only repeats the default one."""
    if spec.scale is None:
        return spec
    usual = replace(spec, scale=None)
    if math.isclose(spec.scale, usual.score_scale, rel_tol=1e-6):
        return usual
    return spec


def overrides_of(right: AttentionSpec, wrong: AttentionSpec) -> Overrides | None:
    """Return overrides of the methods that read all that differs; None if others read it too."""
    overrides: Overrides = {}
    for name in changed_fields(right, wrong):
        if name == "scale":
            continue  # below: other fields may change the scale of scores too
        if name in NORMS:
            overrides["norm"] = _norms(right, wrong)
        elif name in SPANS:
            overrides[name] = always(getattr(wrong, name))
        elif name == "soft_cap":
            overrides["soft_cap"] = _soft_cap(wrong)
        elif name in LEAVING_FEATURES and getattr(wrong, name) is None:
            overrides[LEAVING_FEATURES[name]] = features_unchanged
        elif name in READ_BY and _is_read_by_one(name, right, wrong):
            overrides[READ_BY[name]] = _record(getattr(right, name), getattr(wrong, name))
            if wrong.norms != right.norms:  # of latents
                overrides["norm"] = _norms(right, wrong)
        else:
            return None
    if wrong.score_scale != right.score_scale:
        if wrong.scale is None:
            return None
        overrides["scale"] = always(1.0 / wrong.scale)
    return overrides


def _is_read_by_one(name: str, right: AttentionSpec, wrong: AttentionSpec) -> bool:
    """Return True if only the method of a record reads how two specifications differ in it."""
    before, after = getattr(right, name), getattr(wrong, name)
    # Other methods read if a layer has the record, and which of several kinds.
    if type(before) is not type(after):
        return False
    if isinstance(before, Rope):
        # Positions have an axis for each section.
        return _num_sections(before) == _num_sections(after)
    if name == "latent":
        # The widths of a layer follow from the widths of its latents.
        return set(changed_fields(before, after)) <= {"q_factor", "kv_factor", "eps"}
    return True


def _num_sections(rope: Rope) -> int:
    if rope.sections is None:
        return 0
    return len(rope.sections)


def _record(right: Any, wrong: Any) -> Override:
    """Return an override of a method that returns a record of the specification.

    Edits of different fields of one record may come together.
    """
    changes = changed_fields(right, wrong)

    def override(_: Layer, original: Any) -> Any:
        record = original()
        if record == right:  # no other edit changes it
            return wrong
        return replace(record, **changes)

    return override


def _norms(right: AttentionSpec, wrong: AttentionSpec) -> Override:
    """Return an override of `norm`, which returns the norm of q, k, v or the context."""
    wrong_norms = {
        name: norm for name, norm in wrong.norms.items() if norm != right.norms.get(name)
    }
    removed = right.norms.keys() - wrong.norms.keys()

    def override(_: Layer, original: Any, name: str) -> Norm | None:
        norm = original(name)
        key = f"{name}_norm"
        if key in removed:
            return None
        if key not in wrong_norms:
            return norm
        if norm == right.norms.get(key):  # no other edit changes it
            return wrong_norms[key]
        if norm is None:
            return None
        return replace(norm, **changed_fields(right.norms[key], wrong_norms[key]))

    return override


def _soft_cap(wrong: AttentionSpec) -> Override:
    """Return an override of `soft_cap`, the bound of the scores in a wide dtype."""

    def override(layer: Layer, _: Any) -> Any:
        if wrong.soft_cap is None:
            return None
        return layer.arithmetic.wide.type(wrong.soft_cap)

    return override


def changed_fields(right: Any, wrong: Any) -> dict[str, Any]:
    """Return the fields in which one record differs from another of its kind, with their
    values.
    """
    changed = {}
    for field in fields(right):
        value = getattr(wrong, field.name)
        if value != getattr(right, field.name):
            changed[field.name] = value
    return changed


def wrong_fields_in(right: AttentionSpec, wrong: AttentionSpec) -> tuple[WrongField, ...]:
    """Return the fields in which a specification is wrong; a field of a record, such as
    `rope.theta`, alone if both have the record.
    """
    return tuple(_wrong_fields("", right, wrong))


def _wrong_fields(prefix: str, right: Any, wrong: Any) -> Iterator[WrongField]:
    for name, value in changed_fields(right, wrong).items():
        expected = getattr(right, name)
        if name == "scale" and isinstance(right, AttentionSpec):
            # A scale may be written out so that it stays the same: the default depends on RoPE.
            if wrong.score_scale != right.score_scale:
                yield WrongField(name, wrong.score_scale, right.score_scale)
        elif is_dataclass(expected) and type(expected) is type(value):
            yield from _wrong_fields(f"{prefix}{name}.", expected, value)
        else:
            yield WrongField(f"{prefix}{name}", value, expected)


def edited_spec(right: AttentionSpec, edits: Sequence[Edit]) -> AttentionSpec:
    """Return a specification with the fields that edits change, the first of them last."""
    spec = right
    for edit in reversed(edits):
        if edit.spec is not None:
            spec = replace(spec, **changed_fields(right, edit.spec))
    return spec

"""Edits of the specification: the layer computes another one than its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

from mha_spec import AttentionSpec
from parity.explain.diagnosis.bugs.record import Edit, instead, overriding, with_spec


def spec_edit(right: AttentionSpec, wrong: AttentionSpec) -> Edit:
    """Return the layer of another specification.

    If one method of the reference reads all that differs, the edit overrides that method, so that
    the steps which do not call it need not be computed again.
    """
    differing = [*changed_fields(right, wrong)]
    if differing == ["rope"] and wrong.rope is not None and wrong.score_scale == right.score_scale:
        return overriding(rope=instead(lambda: wrong.rope))
    if differing == ["relative_bias"] and wrong.relative_bias is not None:
        return overriding(relative_bias=instead(lambda: wrong.relative_bias))
    if differing == ["scale"]:
        return overriding(scale=instead(lambda: 1.0 / wrong.score_scale))
    return with_spec(wrong)


def changed_fields(right: AttentionSpec, wrong: AttentionSpec) -> dict[str, object]:
    """Return the fields in which one specification differs from another, with their values."""
    names = [each.name for each in fields(AttentionSpec)]
    return {
        name: getattr(wrong, name) for name in names if getattr(wrong, name) != getattr(right, name)
    }


def edited_spec(right: AttentionSpec, edits: Sequence[Edit]) -> AttentionSpec:
    """Return a specification with the fields that edits change, the first of them last."""
    spec = right
    for edit in reversed(edits):
        if edit.spec is not None:
            spec = replace(spec, **changed_fields(right, edit.spec))
    return spec

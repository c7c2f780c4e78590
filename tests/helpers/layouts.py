"""Properties of layouts."""

from typing import Any

from mha_spec import AttentionSpec
from parity.port.conversion.layouts import Layout
from parity.port.conversion.layouts.layout import RULES


def layout_fits(layout: Layout, spec: AttentionSpec) -> bool:
    """Return whether a layout can hold the weights of a specification and needs no other hint."""
    return not layout.needs_spec and all(RULES[rule].holds(spec) for rule in layout.rules)


def undetermined_fields(spec: AttentionSpec) -> dict[str, Any]:
    """Return the fields of a specification that the tensors of a layout do not determine."""
    return {name: getattr(spec, name) for name in ("num_heads", "num_kv_heads", "head_dim", "rope")}

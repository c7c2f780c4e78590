"""Configurations as earlier versions of transformers wrote them."""

import json

BASES = {
    "modernbert": ("global_rope_theta", "local_rope_theta"),
    "modernbert-decoder": ("global_rope_theta", "local_rope_theta"),
    "olmo3": ("rope_theta", None),  # layers with a window had the same base
}


def older(values):
    """Return the same configuration as transformers wrote it before version 5."""
    values = json.loads(json.dumps(values))
    rope = values.pop("rope_parameters", None)
    if rope is None:
        return values
    base, base_of_windows = BASES.get(values["model_type"], ("rope_theta", "rope_local_base_freq"))
    if all(
        isinstance(entry, dict) for entry in rope.values()
    ):  # layers with a window had a base of their own
        if base_of_windows is not None:
            values[base_of_windows] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    values[base] = rope.pop("rope_theta")
    values["partial_rotary_factor"] = rope.pop("partial_rotary_factor", 1.0)
    if rope["rope_type"] != "default" or "mrope_section" in rope:
        values["rope_scaling"] = rope
    return values

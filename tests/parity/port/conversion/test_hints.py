"""Tests of merging hints about a layer: precedence of sources, and contradictions."""

from dataclasses import replace

import pytest
from helpers.input_errors import rejects

from mha_spec import AttentionSpec, Rope
from parity import random_weights
from parity.measure.files import write_tensors
from parity.port.conversion.checkpoint import Checkpoint
from parity.port.conversion.hints import CALLER, METADATA, LayerHints, merge
from parity.port.conversion.inspect import find_layers
from parity.port.conversion.layouts import LAYOUTS
from parity.port.conversion.metadata import metadata_of

SPEC = AttentionSpec(16, 4, num_kv_heads=2, rope=Rope(500.0))


def merged(*sources):
    return merge("layer", sources)


def test_first_source_of_a_hint_wins():
    """The caller's RoPE overrides the GGUF file's, whose head count is kept, with their origins."""
    hints = merged(
        LayerHints.by(CALLER, rope=Rope(10.0)),
        LayerHints(),
        LayerHints.by("GGUF", num_heads=4, rope=Rope(500.0)),
    )
    assert hints.values == {"num_heads": 4, "rope": Rope(10.0)}
    assert hints.origins == {"num_heads": "GGUF", "rope": CALLER}
    assert [hints.origin_of(name) for name in ("num_heads", "rope", "head_dim")] == [
        "GGUF",
        CALLER,
        "the shapes",
    ]
    assert (hints.overridden, hints.from_model) == (500.0, "GGUF")


def test_head_counts_are_not_mixed():
    """A caller's num_kv_heads hides num_heads of a later source, whose RoPE is still used."""
    hints = merged(
        LayerHints.by(CALLER, num_kv_heads=2),
        LayerHints.by("config.json", num_heads=4, rope=Rope(500.0)),
    )
    assert hints.values == {"num_kv_heads": 2, "rope": Rope(500.0)}


def test_given_rope_hides_unread_rope():
    """Unread RoPE options are not reported if an earlier source sets RoPE; other options are."""
    unread = {"rope_scaling": {"factor": 2.0}, "softcap": 50.0}
    later = replace(LayerHints.by("config.json", num_heads=4), unread=unread)
    assert merged(LayerHints.by(CALLER), later).unread == unread
    assert merged(LayerHints.by(CALLER, rope=Rope(10.0)), later).unread == {"softcap": 50.0}


def test_caller_rope_overrides_whole_layer():
    """The caller's RoPE replaces the RoPE of a whole layer, and the overridden base is recorded."""
    hints = merged(
        LayerHints.by(CALLER, num_heads=4, rope=Rope(10.0)), LayerHints.by(METADATA, spec=SPEC)
    )
    assert (hints.spec.rope, hints.overridden) == (Rope(10.0), 500.0)
    assert (hints.origin_of("num_heads"), hints.origin_of("head_dim"), hints.from_model) == (
        CALLER,
        METADATA,
        "",
    )


@pytest.mark.parametrize(
    ("hint", "input_error"),
    [
        ({"num_heads": 8}, rejects("num_heads", "num_heads=8")),
        ({"rope": Rope(10.0, rotary_dim=2)}, rejects("rope", rope=Rope(10.0, rotary_dim=2))),
    ],
)
def test_hint_contradicting_layer_raises(hint, input_error):
    """A head count or a rotary dimension that contradicts a whole layer raises an error."""
    with input_error:
        merged(LayerHints.by(CALLER, **hint), LayerHints.by(METADATA, spec=SPEC))


def test_rope_is_added_only_if_unknown():
    """The caller's RoPE is added to a layer that may rotate, and raises for one known not to."""
    plain, rope = AttentionSpec(16, 4), LayerHints.by(CALLER, rope=Rope(10.0))
    assert merged(
        rope, replace(LayerHints.by(METADATA, spec=plain), may_rotate=True)
    ).spec.rope == Rope(10.0)
    with rejects("rope", rope=Rope(10.0)):
        merged(rope, LayerHints.by("config.json", spec=plain))


def test_inspect_reports_contradictions(tmp_path):
    """Layers whose metadata contradict the caller's head count are listed, each with the error."""
    specs = {"a": SPEC, "b": replace(SPEC, window_size=4)}
    tensors = {
        f"{label}.{name}": x
        for label, spec in specs.items()
        for name, x in random_weights(spec).items()
    }
    infos = {name: (x.shape, x.dtype) for name, x in tensors.items()}
    write_tensors(
        tmp_path / "a.npz",
        infos,
        tensors.__getitem__,
        metadata_of(LAYOUTS["canonical"], specs, None),
    )
    with Checkpoint.open(tmp_path / "a.npz") as checkpoint:
        errors = {
            layer.prefix: layer.heads
            for layer in find_layers(checkpoint, num_heads=8)
            if layer.layout == "canonical"
        }
    assert errors.keys() == {"a", "b"}
    assert all(
        rejects("num_heads", "num_heads=8").is_printed_in(f"mha-parity: {words}")
        for words in errors.values()
    )


def test_only_layer_keywords_are_hints():
    """A keyword that does not describe a layer raises a TypeError with its name."""
    with pytest.raises(TypeError, match="num_head"):
        LayerHints.by(CALLER, num_head=4)
    with pytest.raises(TypeError, match="may_rotate"):
        LayerHints.by(CALLER, may_rotate=True)

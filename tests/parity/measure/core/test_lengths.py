"""Features of a layer that show only with enough tokens, and the smallest number of tokens that
shows them.
"""

from dataclasses import replace

import numpy as np
import pytest

from mha_spec import (
    AttentionSpec,
    DynamicScaling,
    GridBias,
    InputError,
    Llama3Scaling,
    LongRopeScaling,
    RelativeBias,
    RelativeProducts,
    Rope,
    Temperature,
)
from parity import Case, make_problem, random_weights
from parity.measure.core import reference
from parity.measure.core.stages import run_steps
from parity.use.running.lengths import check_memory, not_exercised

PLAIN = AttentionSpec(16, 2)
SHORT, LONG = (1.0, 1.5, 2.0, 3.0), (1.0, 2.0, 4.0, 8.0)


def with_rope(scaling):
    return PLAIN.replace(rope=Rope(100.0, scaling=scaling))


# The layer with the feature, the layer without it, and the smallest number of tokens at which they
# differ.
FEATURES = {
    "a window of 5": (PLAIN.replace(window_size=5), PLAIN, 6),
    "chunks of 5": (PLAIN.replace(chunk_size=5), PLAIN, 6),
    "a temperature that grows every 7 tokens": (
        PLAIN.replace(temperature=Temperature(7)),
        PLAIN,
        8,
    ),
    "a temperature that grows every 8 tokens": (
        PLAIN.replace(temperature=Temperature(8, first_position=1)),
        PLAIN,
        8,
    ),
    "the long factors of LongRoPE": (
        with_rope(LongRopeScaling(2.0, 6, SHORT, LONG)),
        with_rope(LongRopeScaling(2.0, 6, SHORT, SHORT)),
        7,
    ),
    "dynamic scaling of RoPE beyond 6 tokens": (
        with_rope(DynamicScaling(4.0, 6)),
        with_rope(None),
        7,
    ),
}


def output_of(spec, num_tokens, weights, is_causal=True):
    case = Case("lengths", spec, "a feature", seq_len=num_tokens, is_causal=is_causal)
    return run_steps(reference.steps(make_problem(case, "float32", weights), "float64"))["output"]


@pytest.mark.parametrize("what", FEATURES)
def test_feature_shows_at_stated_length(what):
    """A feature changes the output at the stated number of tokens, but not with one fewer."""
    spec, other, needed = FEATURES[what]
    (entry,) = not_exercised([("layer-0", spec)], needed - 1, ["float32"])
    assert (entry.what, entry.needed, entry.layers) == (what, needed, ["layer-0"])
    assert not_exercised([("layer-0", spec)], needed, ["float32"]) == []
    weights = random_weights(spec)
    assert (output_of(spec, needed - 1, weights) == output_of(other, needed - 1, weights)).all()
    assert (output_of(spec, needed, weights) != output_of(other, needed, weights)).any()


@pytest.mark.parametrize(
    ("fields", "tables", "is_causal"),
    [
        ({"relative_bias": RelativeBias(8, 12, bidirectional=False)}, ["relative_bias"], True),
        ({"relative_bias": RelativeBias(8, 12)}, ["relative_bias"], False),
        ({"relative_bias": GridBias(2, 3)}, ["relative_bias"], False),
        ({"relative_products": RelativeProducts(3, 2)}, ["relative_keys"], False),
    ],
)
def test_buckets_show_at_stated_length(fields, tables, is_causal):
    """The stated number of tokens shows more buckets than one fewer, and all that can show."""
    spec = PLAIN.replace(**fields)
    weights = random_weights(spec)
    (entry,) = not_exercised([("layer-0", spec)], 2, ["float32"])

    def shows(bucket, num_tokens):
        changed = dict(weights)
        for name in tables:
            changed[name] = weights[name].copy()
            axis = [
                size == fields[next(iter(fields))].num_buckets for size in changed[name].shape
            ].index(True)
            changed[name][(slice(None),) * axis + (bucket,)] += 1.0
        return (
            output_of(spec, num_tokens, changed, is_causal)
            != output_of(spec, num_tokens, weights, is_causal)
        ).any()

    buckets = range(fields[next(iter(fields))].num_buckets)
    shown = {
        number: {bucket for bucket in buckets if shows(bucket, number)}
        for number in range(2, entry.needed + 1)
    }
    assert shown[entry.needed] > shown[entry.needed - 1]
    more = entry.needed + (0 if isinstance(spec.relative_bias, GridBias) else 2)
    assert {bucket for bucket in buckets if shows(bucket, more)} == shown[entry.needed]


def test_layers_share_a_feature_entry():
    """Layers with the same hidden feature share an entry; a layer that shows its own has none."""
    wide, narrow = PLAIN.replace(window_size=20), PLAIN.replace(window_size=4)
    entries = not_exercised(
        [("layer-0", wide), ("layer-1", narrow), ("layer-2", wide)], 9, ["float32"]
    )
    assert [(entry.what, entry.layers) for entry in entries] == [
        ("a window of 20", ["layer-0", "layer-2"])
    ]


def test_hidden_scaling_depends_on_dtype():
    """A scaling that changes angles by less than bfloat16 rounds is listed for bfloat16 alone."""
    rope = Rope(1e8, scaling=Llama3Scaling(8.0, 1 << 20))
    spec = PLAIN.replace(rope=rope)
    assert not_exercised([("layer-0", spec)], 9, ["float32"]) == []
    assert not_exercised([("layer-0", spec)], 9, ["bfloat16", "float32"]) == []
    (entry,) = not_exercised([("layer-0", spec)], 9, ["bfloat16"])
    unscaled = replace(rope, scaling=None)
    change = np.abs(rope.frequencies(8) - unscaled.frequencies(8)).max()
    assert entry.what == "the llama3 scaling of RoPE"
    assert change * (entry.needed - 2) < 2.0**-7 <= change * (entry.needed - 1)


def test_scores_beyond_memory_raise():
    """Scores of 2^17 tokens exceed the memory and raise an error; those of 64 do not."""
    check_memory(PLAIN, 64)
    with pytest.raises(InputError, match="GiB"):
        check_memory(PLAIN, 1 << 17)

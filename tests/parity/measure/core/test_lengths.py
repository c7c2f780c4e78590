"""Features of a layer that show only with enough tokens, and the smallest number of tokens that
shows them.
"""

from dataclasses import replace

import numpy as np
import pytest
from helpers.input_errors import rejects_type

import parity
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
from parity.measure.core.exercise import more_cases
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
    return stages_of(case, spec, weights)["output"]


def stages_of(case, spec, weights):
    problem = make_problem(replace(case, spec=spec), "float32", weights)
    return run_steps(reference.steps(problem, "float64"))


def missing_from(*specs, num_tokens, dtypes=("float32",)):
    """The features that sequences of a length do not exercise of layers, each a specification."""
    cases = {}
    for number, spec in enumerate(specs):
        case = Case("lengths", spec, "", seq_len=num_tokens, is_causal=True)
        cases[f"layer-{number}"] = [case]
    return not_exercised(cases, dtypes)


@pytest.mark.parametrize("what", FEATURES)
def test_feature_shows_at_stated_length(what):
    """A feature changes the output at the stated number of tokens, but not with one fewer."""
    spec, other, needed = FEATURES[what]
    (entry,) = missing_from(spec, num_tokens=needed - 1)
    assert (entry.what, entry.needed, entry.layers) == (what, needed, ["layer-0"])
    assert missing_from(spec, num_tokens=needed) == []
    weights = random_weights(spec)
    assert (output_of(spec, needed - 1, weights) == output_of(other, needed - 1, weights)).all()
    assert (output_of(spec, needed, weights) != output_of(other, needed, weights)).any()


def test_chosen_cases_show_features():
    """Calls that are chosen for a layer, and further cases of a run, show its feature in a call
    after the first one as well.
    """
    for what, (spec, other, needed) in FEATURES.items():
        weights = random_weights(spec)
        short = Case("short", spec, "", seq_len=4, chunks=(2, 1, 1), capacity=4)
        chosen = make_problem(spec, "float32").case
        (further,) = more_cases(short, ["float32"])
        assert not_exercised({"layer-0": [short]}, ["float32"])[0].needed == needed, what
        for case in (chosen, further):
            assert what in case.about
            assert not_exercised({"layer-0": [short, case]}, ["float32"]) == [], what
            right, without = (
                stages_of(case, spec_of_case, weights) for spec_of_case in (spec, other)
            )
            last = f"step{len(case.chunks) - 1}.output"
            assert (right[last] != without[last]).any(), what


def test_far_boundaries_need_few_tokens():
    """A boundary far from position 0 is crossed by few tokens, in the first call after the prompt;
    a window that needs too many scores is listed as not exercised.
    """
    spec = with_rope(LongRopeScaling(2.0, 4096, SHORT, LONG)).replace(window_size=4096)
    problem = make_problem(spec, "float32")
    case = problem.case
    assert case.seq_len == sum(case.chunks) == 11
    assert case.first_position + case.chunks[0] == 4096
    right = run_steps(reference.steps(problem, "float32"))
    diagnosis = parity.diagnose({"step3.output": right["step3.output"]}, problem)
    assert diagnosis.not_exercised == ("a window of 4096, with at least 4097 tokens",)
    assert str(diagnosis).endswith("Not exercised: a window of 4096, with at least 4097 tokens")
    # A number of tokens that is fixed leaves positions to choose.
    short = Case("short", PLAIN.replace(window_size=5), "", seq_len=4, is_causal=True)
    assert more_cases(short, ["float32"], with_more_tokens=False) == []
    with rejects_type("case"):
        make_problem(12, "float32")  # pyright: ignore[reportArgumentType]


def test_outputs_of_many_scores_are_read():
    """The outputs of calls whose scores are not stored are diagnosed, wrong or not."""
    problem = make_problem(AttentionSpec(16, 64, head_dim=8, window_size=128), "float32")
    right = run_steps(reference.steps(problem, "float32"))
    outputs = {f"step{call}.output": right[f"step{call}.output"] for call in range(4)}
    assert parity.diagnose(outputs, problem).kind == "none"


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
    (entry,) = missing_from(spec, num_tokens=2)

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
    entries = missing_from(wide, narrow, wide, num_tokens=9)
    assert [(entry.what, entry.layers) for entry in entries] == [
        ("a window of 20", ["layer-0", "layer-2"])
    ]


def test_hidden_scaling_depends_on_dtype():
    """A scaling that changes angles by less than bfloat16 rounds is listed for bfloat16 alone."""
    rope = Rope(1e8, scaling=Llama3Scaling(8.0, 1 << 20))
    spec = PLAIN.replace(rope=rope)
    assert missing_from(spec, num_tokens=9) == []
    assert missing_from(spec, num_tokens=9, dtypes=["bfloat16", "float32"]) == []
    (entry,) = missing_from(spec, num_tokens=9, dtypes=["bfloat16"])
    unscaled = replace(rope, scaling=None)
    change = np.abs(rope.frequencies(8) - unscaled.frequencies(8)).max()
    assert entry.what == "the llama3 scaling of RoPE"
    assert change * (entry.needed - 2) < 2.0**-7 <= change * (entry.needed - 1)


def test_scores_beyond_memory_raise():
    """Scores of 2^17 tokens exceed the memory and raise an error; scores of 64 do not."""
    check_memory(PLAIN, 64)
    with pytest.raises(InputError, match="GiB"):
        check_memory(PLAIN, 1 << 17)

"""Families of numbers and orders: ALiBi's slopes, numbers of RoPE in 16 bits, pairs of RoPE, orders
of a packed weight. Each is injected into a float32 layer, and named from its output alone.
"""

from dataclasses import replace
from functools import partial

import ml_dtypes
import numpy as np
import pytest
from helpers.samples import sample

import parity
from mha_spec import Alibi, AttentionSpec, LongRopeScaling, ProportionalScaling, Rope
from parity import Case, make_problem
from parity.explain.diagnosis.changed_layer import ChangedLayer
from parity.measure.core.reference import Arithmetic
from parity.measure.core.stages import run_steps
from parity.measure.core.weights import dtype_named

OF_ALIBI = Case("slopes", AttentionSpec(48, 6, alibi=Alibi()), "", seq_len=12, is_causal=True)
OF_ROPE = Case(
    "numbers", AttentionSpec(32, 4, rope=Rope()), "", seq_len=12, first_position=300, is_causal=True
)
PROPORTIONAL = replace(
    OF_ROPE, spec=replace(OF_ROPE.spec, rope=Rope(scaling=ProportionalScaling(0.5)))
)


def output_of(problem, **methods):
    """Return the output of a float32 layer with overridden methods, each by the original one."""
    layer = ChangedLayer(problem, Arithmetic(dtype_named("float32")))
    layer.override(**{name: make(getattr(layer, name)) for name, make in methods.items()})
    return run_steps(layer.steps())["output"]


def only_edit(observed, problem):
    """Return the known bug or the first pattern of the only finding."""
    (finding,) = parity.diagnose(observed, problem).findings
    if finding.edits:
        return finding.edits[0]
    assert finding.description is not None
    return finding.description.patterns[0]


def diagnosed(problem, **methods):
    """Return the page and the words for an output."""
    edit = only_edit({"output": output_of(problem, **methods)}, problem)
    return edit.page, edit.about


def always_slopes(slopes):
    return lambda original: lambda: np.asarray(slopes)


@sample(where=lambda words: words != "1 / n")
@pytest.mark.parametrize(
    ("slopes", "words"),
    [
        ([0.25, 0.0625, 0.015625] * 2, "the slopes of the first 3 heads, 2 times"),
        (2.0 ** (-2.0 * np.arange(1, 7)), "2 ** (-8 n / 4), also after head 3"),
        (1.0 / np.arange(1, 7), "1 / n"),
        (np.roll(Alibi().slopes(6), 3), "the slopes of the other half of the heads"),
        ([0.31, 0.02, 0.57, 0.11, 0.23, 0.44], "0.31, 0.02, 0.57, 0.11, 0.23, 0.44 instead of"),
    ],
)
def test_alibi_slopes_are_named_or_fitted(slopes, words):
    """Slopes of a different formula are named, and any others fitted, from the output alone."""
    page, about = diagnosed(make_problem(OF_ALIBI, "float32"), slopes=always_slopes(slopes))
    assert page == "alibi"
    assert words in about


def in_bfloat16(x):
    return x.astype(ml_dtypes.bfloat16).astype(x.dtype)


def rounded_angles(original):
    return lambda positions: in_bfloat16(original(positions))


def test_rope_angles_in_16_bits_are_named():
    """Angles in bfloat16 are no rounded frequencies, positions or tables."""
    page, about = diagnosed(make_problem(OF_ROPE, "float32"), angles=rounded_angles)
    assert page == "rope-positions"
    assert about == "RoPE's angles are rounded to bfloat16"


def in_layout(first, second, original):
    """Return a rotation of other pairs with the right frequencies."""

    def turned(layer, name, x, positions):
        if name == "v":
            return original(name, x, positions)
        cos, sin = layer.tables(positions)
        cos, sin = cos[..., : len(first)], sin[..., : len(first)]
        rotated = x.copy()
        rotated[..., first] = x[..., first] * cos - x[..., second] * sin
        rotated[..., second] = x[..., second] * cos + x[..., first] * sin
        return rotated

    return turned


@pytest.mark.parametrize(
    ("first", "second", "page", "words"),
    [
        ([0, 1], [2, 3], "rope-partial", "(i, i + 2) within the first 4 features"),
        ([4, 5], [6, 7], "rope-pairs", "in halves of the last 4 features"),
    ],
)
def test_pairs_in_a_block_are_named(first, second, page, words):
    """Pairs of proportional RoPE inside a block of the head are named with their features."""
    problem = make_problem(PROPORTIONAL, "float32")
    layer = ChangedLayer(problem, Arithmetic(dtype_named("float32")))
    layer.override(turned=partial(in_layout(first, second, layer.turned), layer))
    edit = only_edit({"output": run_steps(layer.steps())["output"]}, problem)
    assert edit.page == page
    assert words in edit.about


def test_packed_order_is_named_by_outputs():
    """A weight with all queries, then key and value of each head, read as thirds, is one cause."""
    problem = make_problem(Case("packed", AttentionSpec(32, 4), "", seq_len=6), "float32")
    weights = dict(problem.weights)
    for leaf in ("weight", "bias"):
        keys, values = weights[f"k_proj.{leaf}"], weights[f"v_proj.{leaf}"]
        rest = keys.shape[1:]
        heads = [keys.reshape(4, 8, *rest), values.reshape(4, 8, *rest)]
        packed = np.stack(heads, axis=1).reshape(64, *rest)
        weights[f"k_proj.{leaf}"], weights[f"v_proj.{leaf}"] = packed[:32], packed[32:]
    wrong = run_steps(
        ChangedLayer(replace(problem, weights=weights), Arithmetic(dtype_named("float32"))).steps()
    )
    for observed in ({"output": wrong["output"]}, {name: wrong[name] for name in "qkv"}):
        pattern = only_edit(observed, problem)
        assert pattern.page == "fused-qkv"
        assert pattern.about.startswith("a packed weight of all queries, then [k v] for each")


# ---- One cause -----------------------------------------------------------------------------------


def stages_of(problem):
    """Return the float32 stages of a layer."""
    return run_steps(ChangedLayer(problem, Arithmetic(dtype_named("float32"))).steps())


def test_one_number_explains_q_and_k():
    """YaRN's attention factor in a layer with LongRoPE is one finding: the fitted number is exact
    enough to explain queries and keys.
    """
    scaling = LongRopeScaling(4.0, 64, (1.0, 1.5, 2.0, 4.0), (2.0, 3.0, 4.0, 8.0))
    case = Case("factor", AttentionSpec(32, 4, rope=Rope(scaling=scaling)), "", seq_len=12)
    problem = make_problem(case, "float32")
    wrong_scaling = replace(scaling, attention_factor=0.1 * np.log(4.0) + 1.0)
    wrong_case = replace(case, spec=replace(case.spec, rope=Rope(scaling=wrong_scaling)))
    (finding,) = parity.diagnose(stages_of(replace(problem, case=wrong_case)), problem).findings
    assert finding.about.startswith("RoPE's attention factor is 1.139 instead of")
    assert finding.explained_stages == ("q", "k")


def test_equal_patterns_of_keys_and_values():
    """Features of keys and of values that are exchanged alike are one finding."""
    case = Case("neighbors", AttentionSpec(32, 4), "", seq_len=12)
    problem = make_problem(case, "float32")
    stages = stages_of(problem)
    neighbors = np.arange(8) ^ 1
    wrong = {"q": stages["q"], "k": stages["k"][..., neighbors], "v": stages["v"][..., neighbors]}
    (finding,) = parity.diagnose(wrong, problem, seconds=2.0).findings
    assert finding.explained_stages == ("k", "v")

"""Masks and positions of a user: the reference computes them, and bugs in them are named."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.input_errors import rejects, rejects_type
from helpers.quantized import rotated

import parity
from mha_spec import AttentionSpec, Rope
from parity.measure.core.case import Case
from parity.measure.core.reference import steps
from parity.measure.core.stages import run_steps
from parity.use.running.run import run_cases

SPEC = AttentionSpec(32, 4, num_kv_heads=2, qkv_bias=False, out_bias=False, rope=Rope())
LATER = np.triu(np.ones((8, 8), bool), 1)
PADDING = np.arange(8) < np.array([[3], [0]])
POSITIONS = np.maximum(np.cumsum(~PADDING, axis=1) - 1, 0)
LEFT = Case(
    "left",
    SPEC,
    "padding on the left",
    seq_len=8,
    is_causal=True,
    mask=PADDING[:, None, None],
    position_ids=POSITIONS,
)
PREFIX = Case("prefix", SPEC, "a prefix", seq_len=8, mask=LATER & (np.arange(8) >= 4))
STEPS = Case(
    "steps",
    SPEC,
    "padding on the left, in steps",
    seq_len=8,
    chunks=(6, 1, 1),
    capacity=8,
    mask=PADDING[:, None, None],
    position_ids=POSITIONS,
)


def attended(problem, mask, positions):
    """Return the stages of a layer in torch with a mask and positions; padding attends to all."""
    w = {name: parity.to_torch(x) for name, x in problem.weights.items()}
    x = parity.to_torch(problem.inputs["query"])

    def heads(name, count):
        return (x @ w[f"{name}_proj.weight"].T).unflatten(-1, (count, -1)).transpose(1, 2)

    positions = torch.tensor(positions)
    q = rotated(heads("q", 4), positions, SPEC.rope)
    k = rotated(heads("k", 2), positions, SPEC.rope)
    v = heads("v", 2).repeat_interleave(2, 1)
    scores = q @ k.repeat_interleave(2, 1).mT / 8**0.5
    lowest = torch.finfo(torch.float32).min
    weights = scores.masked_fill(torch.tensor(mask), lowest).softmax(-1)
    context = weights @ v
    output = context.transpose(1, 2).flatten(2) @ w["out_proj.weight"].T
    stages = {"q": q, "k": k, "scores": scores, "attn_weights": weights, "context": context}
    stages |= {"mask": np.broadcast_to(mask, tuple(scores.shape)), "output": output}
    return {name: parity.to_numpy(x) for name, x in stages.items()}


LEFT_MASK = (LATER | PADDING[:, None])[:, None]


def test_left_padding_agrees():
    """A right port with padding on the left agrees, whatever its rows of padding are."""
    problem = parity.make_problem(LEFT, "float32")
    stages = attended(problem, LEFT_MASK, POSITIONS)
    parity.assert_parity(stages, problem=problem)
    parity.assert_parity(stages["output"], problem=problem)
    stages["output"][0, :3] = np.nan
    parity.assert_parity(stages["output"], problem=problem)
    stages["output"][0, 3] += 0.1
    with pytest.raises(AssertionError):
        parity.assert_parity(stages["output"], problem=problem, diagnose=False)


def test_prefix_of_a_user_agrees():
    """A prefix-LM agrees with the case that has its mask."""
    problem = parity.make_problem(PREFIX, "float32")
    mask = np.asarray(PREFIX.mask)[None, None]
    parity.assert_parity(attended(problem, mask, np.arange(8)[None]), problem=problem)


@pytest.mark.parametrize(
    ("name", "mask", "positions"),
    [
        ("own-mask-ignored", LATER[None, None], POSITIONS),
        ("own-mask-inverted", (LATER | ~PADDING[:, None])[:, None], POSITIONS),
        ("mask-ignored", np.zeros((1, 1, 8, 8), bool), POSITIONS),
        ("rope-position-ids-ignored", LEFT_MASK, np.arange(8)[None]),
    ],
)
def test_bugs_of_own_arrays_are_named(name, mask, positions):
    """A lost or inverted mask, and lost positions, are the first finding; the inverted mask also
    shows how rows without a key are computed.
    """
    problem = parity.make_problem(LEFT, "float32")
    finding, *others = parity.diagnose(attended(problem, mask, positions), problem).findings
    assert finding.bugs == (name,)
    assert [other.bugs for other in others] == [("empty-row-mean",)] * (name == "own-mask-inverted")


PACKED = Case(
    "packed",
    SPEC,
    "packed sequences",
    seq_len=8,
    is_causal=True,
    segment_ids=((0, 0, 0, 1, 1, 2, 2, 2), (0, 0, 0, 0, 0, 1, 1, 1)),
)


def test_positions_of_packed_sequences():
    """Positions that run on over packed sequences are one finding, and right ones are none."""
    problem = parity.make_problem(PACKED, "float32")
    ids = np.array(PACKED.segment_ids)
    mask = (LATER | (ids[:, :, None] != ids[:, None]))[:, None]
    parity.assert_parity(attended(problem, mask, PACKED.positions()), problem=problem)
    stages = attended(problem, mask, np.arange(8)[None])
    (finding,) = parity.diagnose(stages, problem).findings
    assert finding.bugs == ("rope-positions-run-on",)
    assert finding.stages == ("q", "k")


def test_steps_equal_the_whole_layer():
    """A cache with a mask and positions of the user returns the rows of the layer without one."""
    problem = parity.make_problem(STEPS, "float32")
    whole = parity.make_problem(LEFT, "float32", problem.weights)
    whole.inputs["query"][:] = problem.inputs["query"]
    by_steps = run_steps(steps(problem, "float64"))
    at_once = run_steps(steps(whole, "float64"))
    for step, first in enumerate((0, 6, 7)):
        output = by_steps[f"step{step}.output"]
        expected = at_once["output"][:, first : first + output.shape[1]]
        np.testing.assert_allclose(output, expected, atol=1e-12)
        hidden = by_steps[f"step{step}.mask"]
        assert hidden[0, :, :, :3].all()


RING = Case(
    "ring",
    AttentionSpec(32, 4, num_kv_heads=2, qkv_bias=False, rope=Rope(), window_size=3),
    "a ring of six slots, with a window of three",
    seq_len=10,
    chunks=(4, *[1] * 6),
    capacity=6,
    cache_slots=np.arange(10)[None] % 6,
)


def test_ring_equals_the_whole_layer():
    """A cache whose slots are used again returns the rows of the layer without one; stale slots of
    tokens outside of the window have no weight.
    """
    problem = parity.make_problem(RING, "float32")
    whole = Case("ring", RING.spec, "", seq_len=10, is_causal=True)
    at_once = parity.make_problem(whole, "float32", problem.weights)
    at_once.inputs["query"][:] = problem.inputs["query"]
    expected = run_steps(steps(at_once, "float64"))["output"]
    by_steps = run_steps(steps(problem, "float64"))
    outputs = [by_steps[f"step{step}.output"] for step in range(7)]
    np.testing.assert_allclose(np.concatenate(outputs, axis=1), expected, atol=1e-12)
    np.testing.assert_array_equal(
        by_steps["step6.cache.keys"][:, :, 3], by_steps["step6.k"][:, :, 0]
    )
    stages = run_steps(steps(problem, "float32"))
    stages["step0.cache.keys"][:, :, 4:] = np.nan
    stages["step0.scores"][..., 4:] = np.nan
    assert not parity.diagnose(stages, problem).is_wrong


def test_masks_by_slot_are_named():
    """A mask that compares positions with slots, instead of the tokens in them, is named."""
    problem = parity.make_problem(RING, "float32")
    stages = run_steps(steps(problem, "float32"))
    for step, position in enumerate((None, 4, 5, 6, 7, 8, 9)):
        if position is not None:
            slots = np.arange(6)
            mask = (slots > position) | (slots <= position - 3)
            stages[f"step{step}.mask"] = np.broadcast_to(mask, stages[f"step{step}.mask"].shape)
    only_masks = {name: x for name, x in stages.items() if name.endswith("mask")}
    (finding,) = parity.diagnose(only_masks, problem).findings
    assert finding.bugs == ("cache-mask-by-slot",)


def test_lost_mask_of_a_cache_is_named():
    """A mask that steps with a cache ignore is named."""
    problem = parity.make_problem(STEPS, "float32")
    without = parity.make_problem(STEPS, "float32")
    without.inputs["mask"][:] = False
    stages = run_steps(steps(without, "float32"))
    (finding,) = parity.diagnose(stages, problem).findings
    assert finding.bugs == ("own-mask-ignored",)


def test_implementations_take_own_arrays():
    """mha_torch agrees with masks and positions of the user; with a cache the case is skipped."""
    report = run_cases([LEFT, PREFIX, STEPS], backends=["torch"], dtypes=["float32"])
    assert not report.failed
    assert {comparison.case for comparison in report.comparisons} == {"left", "prefix"}
    assert [skipped.case for skipped in report.skipped_cases] == ["steps"]


def test_bad_user_arrays_raise():
    """Arrays of other types and shapes raise one clear error each."""
    with rejects_type("mask"):
        Case("", SPEC, "", mask=[[True]])  # pyright: ignore[reportArgumentType]
    with rejects_type("mask"):
        Case("", SPEC, "", mask=np.zeros((5, 5)))
    with rejects("mask"):
        Case("", SPEC, "", mask=np.zeros((4, 4), bool))
    with rejects("mask", random_mask=True):
        Case("", SPEC, "", random_mask=True, mask=np.zeros((5, 5), bool))
    with rejects_type("position_ids"):
        Case("", SPEC, "", position_ids=np.zeros((1, 5)))
    with rejects("position_ids"):
        Case("", SPEC, "", position_ids=np.zeros((3, 5), int))
    with rejects("position_ids"):
        Case("", SPEC, "", position_ids=-np.ones((1, 5), int))
    with rejects("cache_slots", chunks=()):
        Case("", SPEC, "", cache_slots=np.zeros((1, 5), int))
    steps_of_two = {"seq_len": 4, "chunks": (2, 2), "capacity": 3}
    with rejects_type("cache_slots"):
        Case("", SPEC, "", **steps_of_two, cache_slots=np.zeros((1, 4)))
    with rejects("cache_slots"):
        Case("", SPEC, "", **steps_of_two, cache_slots=np.zeros((1, 3), int))
    with rejects("cache_slots", capacity=3):
        Case("", SPEC, "", **steps_of_two, cache_slots=np.array([[0, 1, 2, 3]]))
    with rejects("cache_slots", step=1):
        Case("", SPEC, "", **steps_of_two, cache_slots=np.array([[0, 1, 2, 2]]))
    with rejects("position_ids", first_position=2):
        Case("", SPEC, "", first_position=2, position_ids=np.zeros((1, 5), int))

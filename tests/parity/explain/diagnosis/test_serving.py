"""Bugs in the bookkeeping of a batch with a cache, and in rings: each is one finding, named from
all stages and from the outputs alone.

The ports are in tests/wild; `make nightly` diagnoses all of them.
"""

from dataclasses import replace

import numpy as np
import pytest
from helpers.samples import sample
from wild.rates import Job, grade_of, verdict_on
from wild.sets import BUGS

import parity
from mha_spec import Alibi
from parity.explain.diagnosis.bugs.moved_slots import moved_slots
from parity.explain.diagnosis.bugs.record import Edit
from parity.explain.diagnosis.bugs.serving import (
    MOST_BLOCKS,
    blocks,
    caching_padding,
    call_after,
    exchanges,
    has_padding,
    not_reset,
    ragged,
    reordered,
)
from parity.explain.diagnosis.bugs.sites import NewTokens
from parity.explain.diagnosis.fits import location_of
from parity.explain.diagnosis.trial import Trial
from parity.measure.core.compare import dtype_of_stage
from parity.measure.core.trace import Reference
from parity.measure.core.unused import unused_cells

NAMED = (
    "decode-clamped-at-end",
    "left-slots-of-positions",
    "left-visible-in-steps-bf16",
    "ring-doubled",
    "ring-lost-after-wrap-bf16",
    "serve-block-of-another",
    "serve-block-shared",
    "serve-cache-empty-window",
    "serve-causal-transposed-in-steps-window",
    "serve-chunks-top-left-window",
    "serve-columns-of-out-proj",
    "serve-copies-after-tokens",
    "serve-keys-rotated-again-window",
    "serve-length-with-padding-window",
    "serve-mask-from-0-window",
    "serve-mask-of-longest",
    "serve-padding-visible",
    "serve-rows-reordered-window",
    "serve-scores-overflow",
    "serve-slot-of-longest-window",
)


FROM_STAGES = (
    "serve-block-of-another",
    "serve-cache-empty-window",
    "serve-keys-rotated-again-window",
    "serve-length-with-padding-window",
    "serve-scores-overflow",
)
FROM_OUTPUT = (
    "decode-clamped-at-end",
    "left-slots-of-positions",
    "ring-doubled",
    "serve-block-shared",
    "serve-columns-of-out-proj",
    "serve-padding-visible",
)
"""Bugs in `make test`: of every kind, and without those whose search takes seconds."""


@sample(where=lambda name, output_only: name in (FROM_OUTPUT if output_only else FROM_STAGES))
@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("output_only", [False, True])
def test_cause_is_one_named_finding(name, output_only):
    """A bug of a server is the only finding, and has the right name."""
    verdict = verdict_on(Job(name, output_only))
    assert grade_of(verdict) == "right", verdict["text"]
    assert len(verdict["said"]["findings"]) == 1, verdict["text"]


@pytest.mark.parametrize(
    "name", ["packed-positions-run-on-bf16", "packed-texts-see-each-other", "serve-slots-exchanged"]
)
def test_cause_in_stages_is_one_finding(name):
    """A bug that the output does not show, or not alone, is the only finding in the stages."""
    verdict = verdict_on(Job(name))
    assert grade_of(verdict) == "right", verdict["text"]
    assert len(verdict["said"]["findings"]) == 1, verdict["text"]


@pytest.mark.parametrize(
    "name",
    [
        "left-visible",
        "packed-positions-run-on",
        "serve-mask-of-longest",
        "serve-scores-overflow",
        "serve-slot-of-first-window",
    ],
)
def test_right_port_of_bug_is_clean(name):
    """Without its edit a port raises no alarm."""
    bug = BUGS[name]
    right = parity.diagnose(bug.right(), bug.problem)
    assert right.kind in ("none", "convention"), right.text


def test_padding_in_cache_is_not_compared():
    """Stages of a layer that caches padding equal the stages of one that does not, but for unused
    cells: the trial with it rejects none of them.
    """
    problem = BUGS["serve-slot-late"].problem
    assert has_padding(problem.case, 1)
    assert not has_padding(problem.case, 0)
    stages = BUGS["serve-slot-late"].right()
    trial = Trial(problem, stages, "ieee")
    caching = trial.computed_otherwise(Edit(overrides=caching_padding()))
    keys = "step0.cache.keys"
    own_padding = caching.stage(keys)[2, :, 2:6]
    assert np.abs(own_padding).min() > 0.0
    assert not trial.stage(keys)[2, :, 2:6].any()
    np.testing.assert_allclose(own_padding, stages[keys][2, :, 2:6], atol=1e-5)
    output = "step4.output"
    np.testing.assert_allclose(caching.stage(output), trial.stage(output), atol=1e-12)


def test_call_is_known_by_its_lengths():
    """A call is identified by the numbers of cached tokens before it; no call has others."""
    case = BUGS["serve-slot-late"].problem.case
    assert call_after(case, np.array([4, 6, 2])) == 1
    assert call_after(case, np.array([6, 8, 4])) == 3
    with pytest.raises(ValueError, match="another"):
        call_after(case, np.array([4, 6, 3]))


def test_bugs_of_batches_need_a_batch():
    """Sequences of one length have no numbers of others, and one sequence has no other order."""
    chunked = BUGS["serve-chunks-top-left"].problem.case
    assert not list(ragged(chunked))
    one = parity.Case("one", chunked.spec, "", batch=1, seq_len=2, chunks=(1, 1), capacity=2)
    assert not list(reordered(one, 1, None))


def test_numbers_of_tried_blocks_are_limited():
    """Blocks are tried in all sizes of which the cache has at most `MOST_BLOCKS`."""
    spec = BUGS["serve-slot-late"].problem.spec
    case = parity.Case("long", spec, "", seq_len=65, chunks=(64, 1), capacity=65)
    abouts = [bug.about for bug in blocks(case, 1, None) if " tokens" in bug.about]
    sizes = {int(about.split(" tokens")[0].split()[-1]) for about in abouts}
    assert sizes == {16, 32, 64}
    assert min(sizes) >= 65 / (MOST_BLOCKS + 1)


def test_slots_without_a_token_are_listed():
    """Slots with keys of another layer are listed as belonging to no token; tokens in other slots,
    or at other positions, are not.
    """
    bug = BUGS["serve-cache-of-another-layer"]
    reference = Reference(bug.problem)
    name = "step1.cache.keys"
    expected = reference.accumulated[name]
    same = reference.same_precision(local=False)[name]

    unused = unused_cells(bug.problem.case, name, expected.shape)

    def signs_of(actual):
        about = {"problem": bug.problem, "unused": unused}
        description = location_of(name, actual, expected, same, **about)
        return [sign for sign in description.signs if "no token" in sign or "appended" in sign]

    foreign, added = signs_of(bug.recorded()[name].astype(np.float64))
    assert foreign.startswith("slots 0-5 (the first half) have keys of no token")
    assert added == "the keys that this call appended are right"
    exchanged = expected.copy()
    exchanged[:, :, [0, 1]] = expected[:, :, [1, 0]]
    assert signs_of(exchanged) == []
    first, second = expected[..., :4], expected[..., 4:]
    assert signs_of(np.concatenate([-second, first], axis=-1)) == []


def test_lengths_left_tell_their_number():
    """A cache whose lengths were not reset is tried with the observed number of tokens, also a
    large one; with none if sequences differ, or if the lengths are right.
    """
    case = BUGS["serve-chunks-top-left"].problem.case
    right = np.array(case.added(0))
    (plain, clamped) = not_reset(case, {"step0.cache.lengths": right + 4096})
    assert "after 4096 tokens" in plain.about
    assert clamped.about.startswith(plain.about)
    for wrong in (right, right + np.array([1, 2]), right - 1):
        assert not list(not_reset(case, {"step0.cache.lengths": wrong}))
    numbers = {edit.about.split(" tokens")[0].split()[-1] for edit in not_reset(case, {})}
    assert {"2", str(case.capacity)} <= numbers


def test_mask_showing_keys_is_not_a_leak():
    """Weights of the softmax over more keys are the weights of a mask that shows these: the report
    names them, and padding if no query may attend to them.
    """
    spec = parity.AttentionSpec(32, 4)
    case = parity.Case("shown", spec, "", seq_len=8, is_causal=True, key_padding_lengths=(8, 6))
    problem = parity.make_problem(case, "float32")
    stages = Reference(problem).accumulated
    for sequence, key, page in ((0, 5, ""), (1, 6, "padding")):
        shown = stages["mask"].copy()
        shown[sequence, :, :, key] = False
        scores = np.where(shown, -np.inf, stages["scores"])
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        diagnosis = parity.diagnose({"attn_weights": weights.astype(np.float32)}, problem)
        (finding,) = diagnosis.findings
        assert f"key {key} (of 8) of sequence {sequence}" in finding.about
        assert ",".join(finding.pages) == page


def exchanged_in_call(problem, change):
    """Return the stages of a layer whose cache is changed in call 2, and stays so."""

    def appended(_, original, *inputs):
        return NewTokens(*inputs).with_cached(original(*inputs), change)

    bug = Edit(overrides={"appended": appended}, calls=frozenset([2]))
    trial = Trial(problem, {}, "ieee")
    stages = {}
    for index in range(len(trial.steps)):
        stages |= trial.computed(index, (bug,))
    return {name: x.astype(dtype_of_stage(name, "float32")) for name, x in stages.items()}


def between_sequences(cached):
    changed = cached.copy()
    changed[0, :, 1:4], changed[1, :, 1:4] = cached[1, :, 1:4], cached[0, :, 1:4]
    return changed


def within_a_sequence(cached):
    order = np.arange(cached.shape[2])
    order[[0, 3]] = 3, 0
    changed = cached.copy()
    changed[1] = cached[1][:, order]
    return changed


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (between_sequences, "slots 1-3 of sequence 0 with slots 1-3 of sequence 1"),
        (within_a_sequence, "slot 0 of sequence 1 with slot 3 of sequence 1"),
    ],
)
def test_exchanged_tokens_are_one_finding(change, words):
    """Tokens that exchange their slots, in no whole block, are one bug of keys and values."""
    problem = BUGS["serve-slot-late"].problem
    stages = exchanged_in_call(problem, change)
    (finding,) = parity.diagnose(stages, problem).findings
    assert finding.bugs == ("cache-slots-exchanged",)
    assert finding.about == f"tokens are exchanged in the cache: {words}, from call 2 on"
    assert finding.stage == "step2.cache.keys"
    assert not finding.others


def test_observed_tokens_limit_the_blocks():
    """Changes of blocks are tried only if they move tokens as they moved; all are tried if a cache
    was not observed.
    """
    problem = BUGS["serve-slot-late"].problem
    case = problem.case
    right = exchanged_in_call(problem, np.copy)
    # A block of new tokens may still be another one.
    abouts = {bug.about for bug in blocks(case, 2, moved_slots(case, 2, right))}
    of_old_tokens = "sequences 0 and 1 have exchanged block 0 of 2 tokens"
    assert of_old_tokens not in abouts
    assert of_old_tokens in {bug.about for bug in blocks(case, 2, None)}
    assert not list(exchanges(case, 2, moved_slots(case, 2, right)))
    number = len(list(blocks(case, 2, None)))
    without_one = {name: x for name, x in right.items() if name != "step1.cache.keys"}
    assert len(list(blocks(case, 2, moved_slots(case, 2, without_one)))) == number > 50
    lost = exchanged_in_call(
        problem, lambda cached: cached * (np.arange(cached.shape[2]) > 1)[:, None]
    )
    abouts = {bug.about for bug in blocks(case, 2, moved_slots(case, 2, lost))}
    assert "block 0 of 2 tokens of every sequence is stale in the cache: it is empty" in abouts
    assert of_old_tokens not in abouts
    assert not list(exchanges(case, 2, moved_slots(case, 2, lost)))


def test_empty_cache_is_one_finding():
    """A cache that is read as zeros after the first call is one bug of keys and values, and not
    several stale blocks.
    """
    problem = BUGS["serve-chunks-top-left"].problem

    def appended(_, original, *inputs):
        return NewTokens(*inputs).with_cached(original(*inputs), np.zeros_like)

    later = frozenset(range(1, len(problem.case.chunks)))
    bug = Edit(overrides={"appended": appended}, calls=later)
    trial = Trial(problem, {}, "ieee")
    stages = {}
    for index in range(len(trial.steps)):
        stages |= trial.computed(index, (bug,))
    stages = {name: x.astype(dtype_of_stage(name, "float32")) for name, x in stages.items()}
    (finding,) = parity.diagnose(stages, problem).findings
    assert finding.bugs == ("cache-empty",)
    assert finding.edits[0].when == "in calls after the first"


@pytest.mark.parametrize("chunks", [(4, 1, 1), (4, 3, 1), (5, 3)])
@pytest.mark.parametrize("window_size", [None, 4])
def test_call_that_reads_no_cache_is_named(chunks, window_size):
    """Calls that attend to their own tokens alone do not read the cache, in steps and in calls of
    several tokens, with and without a window: their causal mask is not transposed.
    """
    spec = parity.AttentionSpec(32, 4, window_size=window_size)
    seq_len = sum(chunks)
    case = parity.Case("alone", spec, "", seq_len=seq_len, chunks=chunks, capacity=seq_len)
    problem = parity.make_problem(case, "float32")
    outputs = {}
    for call in range(len(chunks)):
        length = chunks[call]
        alone = parity.Case("call", spec, "", seq_len=length, is_causal=True)
        of_call = replace(
            parity.make_problem(alone, "float32"),
            weights=problem.weights,
            inputs={"query": problem.step_input(call)},
        )
        outputs[f"step{call}.output"] = Reference(of_call).accumulated["output"]
    (finding,) = parity.diagnose(outputs, problem).findings
    assert finding.bugs == ("cache-not-read",)
    assert not finding.edits[0].when
    assert not finding.others


def read_through(problem, change, first_call):
    """Return the stages of a layer that reads its cache with a change, from a call on, and stores
    the right one.
    """
    stored_after = {}

    def appended(_, original, *inputs):
        tokens = NewTokens(*inputs)
        call = call_after(problem.case, tokens.before)
        before = stored_after.get((tokens.cache, call - 1), {})
        stored = {f"previous.{name}": x for name, x in before.items()}
        grown = original(*tokens._replace(values={**tokens.values, **stored}))
        stored_after[tokens.cache, call] = grown
        if call < first_call:
            return grown
        return tokens.with_cached(grown, change)

    return stages_with(problem, Edit(overrides={"appended": appended}))


def stages_with(problem, bug):
    trial = Trial(problem, {}, "ieee")
    stages = {}
    for index in range(len(trial.steps)):
        stages |= trial.computed(index, (bug,))
    return {name: x.astype(dtype_of_stage(name, "float32")) for name, x in stages.items()}


IN_ORDER = {
    (2, 0, 1): "cache-rows-reordered",
    (0, 0, 0): "cache-rows-reordered",
    (0, 1, 0): "cache-block-of-another",
}
"""Orders in which rows are read, with the names of the bugs."""


@pytest.mark.costly("searches for bugs of outputs alone, in later calls")
@sample(4)
@pytest.mark.parametrize("output_only", [False, True])
@pytest.mark.parametrize("first_call", [0, 1])
@pytest.mark.parametrize("order", IN_ORDER)
def test_rows_read_in_an_order_are_one_bug(order, first_call, output_only):
    """A cache whose rows are read in a different order, in every call or in all later ones, is one
    finding with that order; it does not compound.
    """
    problem = BUGS["serve-slot-late"].problem
    stages = read_through(problem, lambda cached: cached[list(order)], first_call)
    if output_only:
        stages = {name: x for name, x in stages.items() if name.endswith("output")}
    (finding,) = parity.diagnose(stages, problem).findings
    assert finding.bugs == (IN_ORDER[order],)
    words = "sequence 2 reads the whole block table of sequence 0"
    if IN_ORDER[order] == "cache-rows-reordered":
        words = f"read in a different order than that of the sequences: {' '.join(map(str, order))}"
    if first_call == 1:
        words += ", from call 1 on"
    assert finding.about.endswith(words)
    assert not finding.others


@pytest.mark.costly("searches for bugs of outputs alone, in later calls")
@pytest.mark.thorough
@pytest.mark.parametrize("call", [1, 2])
def test_rows_stored_in_an_order_are_one_bug(call):
    """A cache that is reordered once, and stored so, is one finding with its order."""
    problem = BUGS["serve-slot-late"].problem
    about = "the sequences of the cache are in a different order than in the call: 2 0 1"
    bug = next(bug for bug in reordered(problem.case, call, None) if bug.about == about)
    stages = stages_with(problem, bug)
    outputs = {name: x for name, x in stages.items() if name.endswith("output")}
    for observed in (stages, outputs):
        (finding,) = parity.diagnose(observed, problem).findings
        assert finding.bugs == ("cache-rows-reordered",)
        assert finding.about == bug.sentence


@pytest.mark.parametrize("has_mask", [False, True])
def test_bias_of_longest_sequence_is_named(has_mask):
    """Distances of ALiBi that are counted from the end of the longest sequence are one bug with the
    mask. Alone they add a number to each row of scores, which a softmax ignores.
    """
    spec = parity.AttentionSpec(32, 4, alibi=Alibi())
    case = replace(BUGS["serve-slot-late"].problem.case, spec=spec)
    problem = parity.make_problem(case, "float32")
    longest = np.array([max(case.lengths_before(call)) for call in range(len(case.chunks))])

    def queries(t, s):
        moved = longest[call_after(case, t[:, 0, 0, 0])] - t[:, 0, 0, 0]
        return t + moved[:, None, None, None], s

    def distances(layer, original, positions, key_len):
        moved, _ = queries(positions[:, None, :, None], 0)
        return np.abs(moved - np.arange(key_len))

    overrides = {"distances": distances}
    if has_mask:
        overrides["is_later"] = lambda layer, original, t, s: original(*queries(t, s))
    stages = stages_with(problem, Edit(overrides=overrides))
    diagnosis = parity.diagnose(stages, problem)
    if not has_mask:
        assert diagnosis.kind == "convention"
        return
    (finding,) = diagnosis.findings
    assert finding.bugs == ("cache-position-of-longest",)
    assert "and its mask" in finding.about


def with_blocks_exchanged(cached):
    order = np.arange(cached.shape[2])
    order[:4] = 2, 3, 0, 1
    changed = cached.copy()
    changed[1] = cached[1][:, order]
    return changed


def with_block_of_another(cached):
    changed = cached.copy()
    changed[2, :, :2] = cached[0, :, :2]
    return changed


@pytest.mark.parametrize("output_only", [False, True])
@pytest.mark.parametrize(
    ("change", "name", "about"),
    [
        (
            with_blocks_exchanged,
            "cache-blocks-exchanged",
            "blocks 0 and 1 of 2 tokens of sequence 1 are exchanged in the cache",
        ),
        (
            with_block_of_another,
            "cache-block-of-another",
            "sequence 2 reads block 0 of 2 tokens of sequence 0",
        ),
    ],
)
def test_wrong_block_tables_of_prompts(change, name, about, output_only):
    """A block table that is wrong from the first call on is one finding, without a limit."""
    problem = BUGS["serve-slot-late-window"].problem
    stages = read_through(problem, change, 0)
    if output_only:
        stages = {name: x for name, x in stages.items() if name.endswith("output")}
    (finding,) = parity.diagnose(stages, problem).findings
    assert (finding.bugs, finding.about) == ((name,), about)


@pytest.mark.parametrize(("capacity", "is_clamped"), [(6, False), (6, True), (7, False)])
def test_late_slots_are_one_finding(capacity, is_clamped):
    """Steps that cache their token one slot late are one bug, whether the last one fits, is lost
    or is moved back into the cache.
    """
    spec = BUGS["serve-slot-late"].problem.spec
    case = parity.Case("late", spec, "", seq_len=6, chunks=(4, 1, 1), capacity=capacity)
    problem = parity.make_problem(case, "float32")
    right = Reference(problem).accumulated
    observed = {}
    caches = {name: np.zeros((2, 2, capacity, 8), np.float32) for name in ("keys", "values")}
    length = 0
    for step, chunk in enumerate(case.chunks):
        slot = length + (step > 0)
        if is_clamped:
            slot = min(slot, capacity - chunk)
        for stage, name in (("k", "keys"), ("v", "values")):
            new = right[f"step{step}.{stage}"].astype(np.float32)
            observed[f"step{step}.{stage}"] = new
            if slot < capacity:
                caches[name][:, :, slot : slot + chunk] = new
            observed[f"step{step}.cache.{name}"] = caches[name].copy()
        length += chunk
    (finding,) = parity.diagnose(observed, problem).findings
    assert finding.bugs == ("cache-slot-late",)
    assert ("moved back" in finding.about) == is_clamped

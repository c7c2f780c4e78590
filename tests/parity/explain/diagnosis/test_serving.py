"""Bugs in the bookkeeping of a batch with a cache, and in rings: each is one finding, named from
all stages and from the outputs alone.

The ports are those of tests/wild; `make nightly` diagnoses all of them.
"""

import numpy as np
import pytest
from wild.rates import Job, judge, judged_names
from wild.sets import BUGS

import parity
from parity.explain.diagnosis.bugs.record import Edit
from parity.explain.diagnosis.bugs.serving import (
    MOST_BLOCKS,
    blocks,
    caching_padding,
    call_after,
    has_padding,
    ragged,
    reordered,
)
from parity.explain.diagnosis.trial import Trial

NAMED = (
    "ring-doubled",
    "ring-lost-after-wrap-bf16",
    "serve-block-of-another",
    "serve-chunks-top-left-window",
    "serve-length-with-padding-window",
    "serve-mask-from-0-window",
    "serve-mask-of-longest",
    "serve-padding-visible",
    "serve-rows-reordered-window",
    "serve-slot-of-longest-window",
)


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("output_only", [False, True])
def test_cause_is_one_named_finding(name, output_only):
    """A bug of a server is the only finding, and has the right name."""
    verdict = judge(Job(name, output_only))
    assert judged_names(verdict) == "right", verdict["text"]
    assert len(verdict["said"]["findings"]) == 1, verdict["text"]


@pytest.mark.parametrize("name", ["serve-mask-of-longest", "serve-slot-of-first-window"])
def test_right_port_of_bug_is_clean(name):
    """Without its edit a port raises no alarm."""
    bug = BUGS[name]
    right = parity.diagnose(bug.right(), bug.problem)
    assert right.kind in ("none", "convention"), right.text


def test_padding_in_cache_is_not_compared():
    """Stages of a layer that caches padding are those of one that does not, but for unused cells:
    the trial with it rejects none of them.
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
    assert not list(reordered(one, 1))


def test_numbers_of_tried_blocks_are_limited():
    """Blocks are tried in all sizes of which the cache has at most `MOST_BLOCKS`."""
    spec = BUGS["serve-slot-late"].problem.spec
    case = parity.Case("long", spec, "", seq_len=65, chunks=(64, 1), capacity=65)
    abouts = [bug.about for bug in blocks(case, 1)]
    sizes = {int(about.split(" tokens")[0].split()[-1]) for about in abouts}
    assert sizes == {16, 32, 64}
    assert min(sizes) >= 65 / (MOST_BLOCKS + 1)

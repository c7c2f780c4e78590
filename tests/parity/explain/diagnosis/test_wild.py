"""Twenty diverse ports of tests/wild: correct ones raise no alarm, and one bug of each kind is
named.

`make nightly` runs all of them, and audits them by plain arithmetic.
"""

import pytest
from wild.rates import Job, grade_of, is_caught, is_clean, verdict_on
from wild.recordings import RECORDINGS
from wild.sets import BUGS

import parity

A_BUG_OF_EACH_KIND = (
    "bert-square-split",
    "flash-diagonal-strict",
    "gemma-cap-twice",
    "gemma-norm-w",
    "gemma-window-inclusive",
    "jnp_einsum-sinks-scaled",
    "llama-cache-values-stale",
    "llama-softmax-temperature",
    "llama-tiled",
    "meta_llama-by-head",
    "mpt-slopes-plain",
    "nanogpt-no-scale",
    "nanogpt-residual",
    "nanogpt-softmax-half",
    "nn_mha-packed-kqv",
    "sdpa-bias-lost",
    "sdpa-dropout-p",
    "torch_kernel-group-not-summed",
)
RIGHT_IN_OTHER_FORMS = (
    "bert/bert-0/bfloat16/eager-wide-inf/bthd",
    "gemma/gemma-0/float32/eager-wide-inf/before-norm",
    "llama/llama-0/float16/eager-narrow-inf/output",
)


@pytest.mark.parametrize("name", A_BUG_OF_EACH_KIND)
def test_bug_is_named_and_port_is_clean(name):
    """Without its edit the port raises no alarm; with it, the bug is caught and named correctly."""
    bug = BUGS[name]
    noted = RECORDINGS[bug.recording](bug.right(), bug.problem)
    right = parity.diagnose(noted, bug.problem)
    assert right.kind in ("none", "convention"), right.text
    verdict = verdict_on(Job(name))
    assert is_caught(verdict)
    assert grade_of(verdict) == "right", verdict["names"]


@pytest.mark.parametrize("name", RIGHT_IN_OTHER_FORMS)
def test_other_forms_raise_no_alarm(name):
    """Correct ports in 16 bits or recorded in other forms raise no alarm."""
    assert is_clean(verdict_on(Job(name)))


def test_each_bug_kind_has_one_example():
    """`A_BUG_OF_EACH_KIND` has exactly one bug of each kind in `BUGS`."""
    kinds = {bug.kind for bug in BUGS.values()}
    assert sorted(BUGS[name].kind for name in A_BUG_OF_EACH_KIND) == sorted(kinds)

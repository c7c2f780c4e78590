"""Find the three bugs of the port and fix them one by one: `python find_bugs.py`."""

import textwrap
from collections.abc import Mapping
from functools import partial
from typing import Any

import attention_jax
import attention_jax_fixed
import jax.numpy as jnp
import numpy as np
import torch
from layer import ORIGINAL, PROBLEM, STATE

import parity

FIXED_IN = {
    "rope-interleaved": "rotary",
    "kv-heads-tiled": "for_query_heads",
    "out_proj-transposed": "from_torch",
}
"""The function of the port that has each bug."""

draft = partial(attention_jax.stages, attention_jax.from_torch(STATE))
"""The port with its weights, before any fix: for `mha-parity diagnose find_bugs:draft`."""


def main() -> None:
    query = PROBLEM.inputs["query"]
    with torch.no_grad():
        report("the original, its output alone", {"output": ORIGINAL(torch.tensor(query)).numpy()})

    stages = run_port(query)
    report("the draft, its output alone", {"output": stages["output"]})
    diagnosis = report("the draft, stage by stage", stages)

    while diagnosis.named:
        function = FIXED_IN[diagnosis.likely_bug]
        fix(function)
        print(f"\n== {function} fixed ==")
        stages = run_port(query)
        report("its output alone", {"output": stages["output"]})
        diagnosis = report("stage by stage", stages, in_full=False)


def run_port(query: np.ndarray) -> dict[str, Any]:
    """Return the stages of the port in its current state."""
    return attention_jax.stages(attention_jax.from_torch(STATE), jnp.asarray(query))


def report(title: str, stages: Mapping[str, Any], *, in_full: bool = True) -> parity.Diagnosis:
    """Diagnose stages, and print the names of the bugs; the whole diagnosis also if `in_full`."""
    diagnosis = parity.diagnose(stages, PROBLEM)
    bugs = ", ".join(finding.likely_bug for finding in diagnosis.named)
    print(f"{title}: {bugs or diagnosis.headline}")
    if diagnosis.is_wrong and in_full:
        print(textwrap.indent(str(diagnosis), "  "))
    return diagnosis


def fix(function: str) -> None:
    """Replace a function of the draft by the fixed one, as you would in the editor."""
    setattr(attention_jax, function, getattr(attention_jax_fixed, function))


if __name__ == "__main__":
    main()

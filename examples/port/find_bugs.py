"""Find three bugs in the port, and fix them one by one: `python find_bugs.py`."""

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
"""The function of the port that contains each bug."""

draft = partial(attention_jax.stages, attention_jax.from_torch(STATE))
"""The unfixed port with its weights, for `mha-parity diagnose find_bugs:draft`."""


def main() -> None:
    query = PROBLEM.inputs["query"]
    with torch.no_grad():
        tell("the original, its output alone", {"output": ORIGINAL(torch.tensor(query)).numpy()})

    stages = run_port(query)
    tell("the draft, its output alone", {"output": stages["output"]})
    diagnosis = tell("the draft, stage by stage", stages)

    while diagnosis.explanations:
        function = FIXED_IN[diagnosis.explanations[0].hypotheses[0]]
        fix(function)
        print(f"\n== {function} fixed ==")
        stages = run_port(query)
        tell("its output alone", {"output": stages["output"]})
        diagnosis = tell("stage by stage", stages, in_full=False)


def run_port(query: np.ndarray) -> dict[str, Any]:
    """Return the stages of the port in its current state."""
    return attention_jax.stages(attention_jax.from_torch(STATE), jnp.asarray(query))


def tell(title: str, stages: Mapping[str, Any], *, in_full: bool = True) -> parity.Diagnosis:
    """Diagnose the stages, and print the diagnosis, or only the names of the bugs."""
    diagnosis = parity.diagnose(stages, PROBLEM)
    bugs = ", ".join(" and ".join(explanation.hypotheses) for explanation in diagnosis.explanations)
    print(f"{title}: {bugs or diagnosis}")
    if bugs and in_full:
        print(textwrap.indent(str(diagnosis), "  "))
    return diagnosis


def fix(function: str) -> None:
    """Replace a function by that of the fixed port, as you would in the editor."""
    setattr(attention_jax, function, getattr(attention_jax_fixed, function))


if __name__ == "__main__":
    main()

"""Three mistakes in the port, found and mended one by one: `python find_bugs.py`."""

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

MENDED_IN = {
    "rope-interleaved": "rotary",
    "kv-heads-tiled": "for_query_heads",
    "out_proj-transposed": "from_torch",
}
"""The function of the port in which each mistake lies."""

draft = partial(attention_jax.stages, attention_jax.from_torch(STATE))
"""The port with its weights, before anything is mended: for `mha-parity diagnose find_bugs:draft`."""


def main() -> None:
    query = PROBLEM.inputs["query"]
    with torch.no_grad():
        tell("the original, its output alone", {"output": ORIGINAL(torch.tensor(query)).numpy()})

    stages = run_port(query)
    tell("the draft, its output alone", {"output": stages["output"]})
    diagnosis = tell("the draft, stage by stage", stages)

    while diagnosis.explanations:
        mistake = diagnosis.explanations[0].hypotheses[0]
        mend(MENDED_IN[mistake])
        print(f"\n== {MENDED_IN[mistake]} mended ==")
        stages = run_port(query)
        tell("its output alone", {"output": stages["output"]})
        diagnosis = tell("stage by stage", stages, in_full=False)


def run_port(query: np.ndarray) -> dict[str, Any]:
    """The stages of the port as it now is."""
    return attention_jax.stages(attention_jax.from_torch(STATE), jnp.asarray(query))


def tell(title: str, stages: Mapping[str, Any], *, in_full: bool = True) -> parity.Diagnosis:
    """Ask why these stages differ from the reference, and print the answer, or only the names of the mistakes."""
    diagnosis = parity.diagnose(stages, PROBLEM)
    mistakes = ", ".join(" and ".join(explanation.hypotheses) for explanation in diagnosis.explanations)
    print(f"{title}: {mistakes or diagnosis}")
    if mistakes and in_full:
        print(textwrap.indent(str(diagnosis), "  "))
    return diagnosis


def mend(function: str) -> None:
    """Put a function of the fixed port in its place, as one would in the editor."""
    setattr(attention_jax, function, getattr(attention_jax_fixed, function))


if __name__ == "__main__":
    main()

"""What the attention layers of a live model get and give, recorded while it runs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from mha_spec import WrongType
from parity.tapping.record import Tapped


def tap(model: Any, layers: str | Sequence[str] | None = None) -> AbstractContextManager[Tapped]:
    """Record what the attention layers of a model get and give while it runs.

        with parity.tap(model) as tapped:
            model.generate(tokens, max_new_tokens=6)

    Within it the model is called as ever, any number of times, and its results are what they are without, bit for bit.
    Afterwards, also after an exception, nothing is left in the model. Several taps may be open at once.

    Of transformers' models it sees queries, keys and values as the attention function receives them, after norms and
    RoPE, with the mask, and what that function returns. Of another torch module it sees the same if its operations are
    attention, else what its projections return. Of any other module it sees inputs and outputs. What cannot be seen is
    absent.

    Args:
        model: a `torch.nn.Module`, a `flax.nnx.Module`, or a `flax.linen.Module`, whose `apply` is called then. It must
            not be compiled: JAX's functions run under `jax.disable_jit()`.
        layers: names of modules, or of their classes, with `*` for any part; the innermost modules whose class has
            `Attention` in its name when absent.

    Returns:
        A context that gives the recording, which grows as the model runs.

    Raises:
        TypeError: if the model is of another kind.
        ValueError: if there are no such layers in it, or it is compiled.
    """
    packages = {kind.__module__.partition(".")[0]: kind.__module__ for kind in type(model).__mro__}
    patterns = patterns_of(layers)
    if "torch" in packages:
        from parity.tapping.torch import tap_torch

        return tap_torch(model, patterns)
    if "flax" in packages:
        from parity.tapping.flax import tap_flax

        return tap_flax(model, patterns)
    raise WrongType("model", "be a module of torch or Flax", type(model).__name__)


def patterns_of(layers: str | Sequence[str] | None) -> tuple[str, ...] | None:
    """Return the names of the requested layers; None for all."""
    return None if layers is None else (layers,) if isinstance(layers, str) else tuple(layers)

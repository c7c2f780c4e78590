"""Record the inputs and outputs of a live model's attention layers while it runs.

- `Tapped` (`record`): a recording, and its file.
- `torch` and `flax`: how layers of each are observed; `operations`: attention in the operations of
  a torch module.

Start at `tap`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from mha_spec import InputTypeError
from parity.port.tapping.record import Tapped


def tap(model: Any, layers: str | Sequence[str] | None = None) -> AbstractContextManager[Tapped]:
    """Record the inputs and outputs of a model's attention layers while it runs.

        with parity.tap(model) as tapped:
            model.generate(tokens, max_new_tokens=6)

    Inside the `with` block, call the model as usual, as often as you like; its results are
    unchanged, bit for bit. When the block ends, also by an exception, nothing is left in the model.
    Several taps may be open at once.

    For transformers models, queries, keys and values are recorded as the attention function
    receives them, after norms and RoPE, with the mask and the outputs of that function. For any
    other torch module, the same values are recorded if its operations form attention; otherwise the
    outputs of its projections. For Flax modules, inputs and outputs are recorded. Values that
    cannot be observed are absent.

    Args:
        model: a `torch.nn.Module`, a `flax.nnx.Module`, or a `flax.linen.Module` whose `apply` you
            then call. It must not be compiled: run JAX functions under `jax.disable_jit()`.
        layers: names of modules or of their classes, where `*` matches any part. Default: the
            innermost modules whose class has `Attention` in its name.

    Returns:
        A context manager that returns the recording, which grows as the model runs.

    Raises:
        TypeError: if the model is neither a torch nor a Flax module.
        ValueError: if it has no such layers, or is compiled.

    Example:
        >>> from transformers import LlamaConfig, LlamaModel
        >>> sizes = {"vocab_size": 16, "hidden_size": 32, "intermediate_size": 16}
        >>> heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1}
        >>> model = LlamaModel(LlamaConfig(**sizes, **heads)).eval()
        >>> with torch.no_grad(), parity.tap(model) as tapped:
        ...     _ = model(torch.arange(10).reshape(2, 5))
        >>> sorted(tapped.layers[0].calls[0].values)
        ['context', 'input', 'k', 'output', 'positions', 'q', 'v']
    """
    packages = {kind.__module__.partition(".")[0] for kind in type(model).__mro__}
    patterns = patterns_of(layers)
    if "torch" in packages:
        from parity.port.tapping.torch import tap_torch

        return tap_torch(model, patterns)
    if "flax" in packages:
        from parity.port.tapping.flax import tap_flax

        return tap_flax(model, patterns)
    raise InputTypeError("model", "be a module of torch or Flax", type(model).__name__)


def patterns_of(layers: str | Sequence[str] | None) -> tuple[str, ...] | None:
    """Return the names of the requested layers; None for all."""
    if layers is None:
        return None
    return (layers,) if isinstance(layers, str) else tuple(layers)

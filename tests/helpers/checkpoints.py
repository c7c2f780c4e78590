"""Layers of files, opened in one line."""

from contextlib import contextmanager

from parity.port.conversion.checkpoint import Checkpoint
from parity.port.conversion.hints import CALLER, LayerHints


@contextmanager
def open_layers(path, layout=None, *, prefix=None, **keywords):
    """Open the attention layers of a file, in numerical order, to read them one at a time."""
    with Checkpoint.open(path) as checkpoint:
        layers = checkpoint.layers(LayerHints.by(CALLER, **keywords), layout, prefix)
        layers.warn_if_incomplete()
        yield layers.in_order

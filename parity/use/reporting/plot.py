"""Pictures of attention: which query attends to which key, head by head, as PNG or SVG."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mha_spec import InputError, InputTypeError
from parity.measure.core import packages
from parity.measure.core.weights import is_floating
from parity.measure.files.target import check_writable, write_whole
from parity.measure.text import printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from parity.use.reporting.figure import NotebookFigure

FORMATS = (".png", ".svg")

MOST_LABELS = 64
"""Most labels along an axis, which can still be read; of more tokens, every second, third, … has
one.
"""

MOST_CELLS = 1024
"""Most cells along an axis, about the pixels of a panel; of more tokens, a cell is the largest of
several.
"""


def check_destination(path: str | os.PathLike[str], name: str = "path") -> None:
    """Reject a picture that cannot be drawn or written, before the work.

    `name` is the user's name for the path.
    """
    if Path(path).suffix.lower() not in FORMATS:
        raise InputError(name, f"end in {' or '.join(FORMATS)}", {name: path})
    check_writable(path, name)
    packages.check_installed("a plot", "matplotlib")


def plot_attention(
    attn_weights: Any,
    *,
    path: str | os.PathLike[str] | None = None,
    tokens: Sequence[str] | None = None,
    query_tokens: Sequence[str] | None = None,
    heads: Sequence[int] | None = None,
    sequence: int = 0,
    title: str = "",
) -> Figure:
    """Draw attention weights, one heat map for each head.

    Args:
        attn_weights: (B, N, T, S), (N, T, S) or (T, S); anything that NumPy can convert to an
            array.
        path: file to write, whole or not at all; `.png` or `.svg` selects the format. Default: no
            file.
        tokens: a label for each key, (S,).
        query_tokens: a label for each query, (T,); default: the labels of the keys if T = S, else
            positions.
        heads: heads to draw; default: all.
        sequence: sequence of the batch to draw.
        title: text above the maps, of one or more lines.

    Returns:
        The matplotlib figure, which a notebook shows.

    Raises:
        ModuleNotFoundError: if matplotlib is not installed.
        OSError: if the file cannot be written.
        TypeError: if the weights are not real numbers.
        ValueError: if shapes, labels, heads or the path do not fit.

    Example:
        >>> attn_weights = np.full((2, 3, 3), 1 / 3)
        >>> figure = parity.plot_attention(attn_weights, path="heads.png")
    """
    if path is None:
        packages.check_installed("a plot", "matplotlib")
    else:
        check_destination(path)
    weights = _checked_weights(attn_weights)
    batch, num_heads, num_queries, num_keys = weights.shape
    if not 0 <= sequence < batch:
        raise InputError("sequence", f"be from 0 to {batch - 1}", sequence=sequence)
    heads = list(range(num_heads) if heads is None else heads)
    if not heads or any(not 0 <= head < num_heads for head in heads):
        raise InputError("heads", f"be some of 0 to {num_heads - 1}", heads=heads)
    if query_tokens is None and num_queries == num_keys:
        query_tokens = tokens
    _check_labels("tokens", tokens, num_keys)
    _check_labels("query_tokens", query_tokens, num_queries)

    maps = weights[sequence, heads].astype(np.float64)
    figure = _draw(maps, heads, tokens, query_tokens, title)
    if path is not None:
        kind = "svg" if Path(path).suffix.lower() == ".svg" else "png"
        write_whole(path, figure.image(kind))
    return figure


def _checked_weights(attn_weights: Any) -> np.ndarray:
    """Return attention weights with all four axes, (B, N, T, S)."""
    weights = np.asarray(attn_weights)
    if not (is_floating(weights.dtype) or weights.dtype.kind in "iub"):
        raise InputTypeError(
            "attn_weights", "be an array of real numbers", f"dtype {weights.dtype}"
        )
    if not 2 <= weights.ndim <= 4 or not weights.size:
        raise InputError(
            "attn_weights",
            "have shape (B, N, T, S), (N, T, S) or (T, S)",
            attn_weights=weights.shape,
        )
    missing_axes = (1,) * (4 - weights.ndim)
    return weights.reshape(missing_axes + weights.shape)


def _check_labels(name: str, labels: Sequence[str] | None, count: int) -> None:
    """Reject labels of which there are not as many as tokens."""
    if labels is not None and len(labels) != count:
        raise InputError(
            name, f"have {count} labels, as attn_weights have", {f"len({name})": len(labels)}
        )


def _draw(
    maps: np.ndarray,
    heads: Sequence[int],
    tokens: Sequence[str] | None,
    query_tokens: Sequence[str] | None,
    title: str,
) -> NotebookFigure:
    """Return the figure: panels in about as many rows as columns, with one scale of colors."""
    import matplotlib as mpl

    from parity.use.reporting.figure import NotebookFigure

    _, num_queries, num_keys = maps.shape
    finite = maps[np.isfinite(maps)]
    # A scale from 0 shows a share; without any positive weight it needs a different end.
    smallest = min(0.0, float(finite.min(initial=0.0)))
    largest = float(finite.max(initial=0.0)) or 1.0
    num_columns = math.ceil(math.sqrt(len(heads)))
    num_rows = math.ceil(len(heads) / num_columns)
    width = _length(num_keys, tokens)
    height = _length(num_queries, query_tokens)
    # The color bar and the labels of the figure take the rest, in inches. These and the other
    # sizes are a choice, by eye.
    size = (num_columns * width + 1.0, num_rows * height + 0.6)
    figure = NotebookFigure(figsize=size, layout="constrained")
    panels = figure.subplots(num_rows, num_columns, squeeze=False)
    # Words stand upright below a map, because adjacent ones would overlap; numbers do not.
    rotation = 90 if tokens else 0
    image = None
    for panel, head, weights in zip(panels.flat, heads, maps, strict=False):
        # NaN is red, which the scale of colors does not have.
        colors = mpl.colormaps["viridis"].with_extremes(bad="red")
        image = panel.imshow(
            downsample(weights, MOST_CELLS),
            cmap=colors,
            vmin=smallest,
            vmax=largest,
            interpolation="nearest",
            extent=(-0.5, num_keys - 0.5, num_queries - 0.5, -0.5),
            aspect="auto",
        )
        panel.set_title(f"head {head}", fontsize=9)
        _label(panel.xaxis, tokens, rotation=rotation)
        _label(panel.yaxis, query_tokens, rotation=0)
    for panel in panels.flat[len(heads) :]:
        panel.axis("off")
    if image is not None:
        figure.colorbar(image, ax=panels, shrink=0.8, aspect=40, label="attention weight")
    figure.supxlabel("key", fontsize=9)
    figure.supylabel("query", fontsize=9)
    if title:
        figure.suptitle(printable(title), fontsize=10, parse_math=False)
    return figure


def _length(num_tokens: int, labels: Sequence[str] | None) -> float:
    """Return the inches of a panel along an axis, with as many as its labels need."""
    if labels:
        # A label of 7 points needs about 0.13 inches; the title and the other axis have 0.8.
        return max(2.2, 0.13 * min(num_tokens, MOST_LABELS) + 0.8)
    return 2.2 + 1.3 * min(num_tokens / MOST_LABELS, 1.0)


def downsample(maps: np.ndarray, most: int) -> np.ndarray:
    """Return the largest of each run of cells, so that the last two axes have at most `most`
    cells.
    """
    for axis in (-2, -1):
        size = maps.shape[axis]
        if size > most:
            maps = np.maximum.reduceat(maps, np.arange(most) * size // most, axis=axis)
    return maps


def _label(axis: Any, labels: Sequence[str] | None, rotation: int) -> None:
    """Label the tokens along an axis; without labels, number them."""
    axis.set_tick_params(labelsize=7)
    if labels is None:
        axis.get_major_locator().set_params(integer=True)
        return
    step = math.ceil(len(labels) / MOST_LABELS)
    indices = range(0, len(labels), step)
    words = [printable(labels[index], keep="") for index in indices]
    # A token may contain a dollar sign, which would begin a formula.
    axis.set_ticks(indices, labels=words, rotation=rotation, parse_math=False)

"""Layers in the weight files of a command line: which they are, and their heads."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from parity.use.cli.command import Options, option, together
from parity.use.cli.messages import input_error, warn
from parity.use.cli.options import Decorator, flag_of

if TYPE_CHECKING:
    from parity.port.conversion.checkpoint import Checkpoint
    from parity.port.conversion.hints import LayerKeywords
    from parity.port.conversion.layers import FileLayer
    from parity.port.conversion.not_compared import NotCompared, OnlyInOne


ASSUMED_CAUSAL = "is assumed to be causal; if it is not, pass --no-causal"


def weight_options(what: str = "", *, many: bool = False, are_hidden: bool = False) -> Decorator:
    """Declare the options that choose layers of a file: `--prefix` for the names of `what`, and
    sizes that shapes do not show.

    Args:
        what: the layers; empty for a command that reads all of them.
        many: whether `--prefix` may be passed once for each file.
        are_hidden: whether `--help` hides all of them, because the command usually reads a model
            folder, whose config.json has all this. Otherwise it hides the rare ones.
    """
    options = [
        option(
            "--num-heads",
            type=int,
            metavar="N",
            hidden=are_hidden,
            help="query heads, if shapes are ambiguous",
        ),
        option(
            "--num-kv-heads",
            type=int,
            metavar="K",
            hidden=True,
            help="key/value heads, if shapes are ambiguous",
        ),
        option(
            "--head-dim",
            type=int,
            metavar="H",
            hidden=True,
            help="features of a head, if shapes are ambiguous",
        ),
        option(
            "--rope-theta",
            type=float,
            metavar="THETA",
            hidden=True,
            help="base of RoPE's frequencies, for layers with RoPE",
        ),
        option(
            "--layout",
            "layout_files",
            multiple=True,
            metavar="FILE.toml",
            hidden=True,
            help=(
                "a table of a further layout; options that name a layout also accept the file of "
                "its table"
            ),
        ),
    ]
    if what:
        about = f"common prefix of the names of {what}; {{i}} stands for a number"
        prefix = option("--prefix", metavar="P", multiple=many, hidden=are_hidden, help=about)
        options.insert(0, prefix)
    return together(*options)


def layer_options(options: Options) -> LayerKeywords:
    """Return the keywords of functions that read layers; None for an option that was not passed."""
    from mha_spec import Rope

    theta = options.rope_theta
    if theta is not None and not 0.0 < theta < math.inf:
        raise input_error("--rope-theta", "be positive and finite", {"--rope-theta": theta})
    rope = None
    if theta is not None:
        rope = Rope(theta)
    return {
        "num_heads": options.num_heads,
        "num_kv_heads": options.num_kv_heads,
        "head_dim": options.head_dim,
        "rope": rope,
    }


def passed_layer_flags(options: Options) -> list[str]:
    """Return the options about layers of files that were passed."""
    values = {"--from": options.layout, "--prefix": options.prefix}
    for name, value in layer_options(options).items():
        values[flag_of(name)] = value
    return [flag for flag, value in values.items() if value is not None]


def warn_of_parts(checkpoint: Checkpoint) -> None:
    """Warn of the parts of a model that are not read, with the reasons; for a folder with a
    config.json.
    """
    # Reading the layers reports errors of the configuration.
    with suppress(OSError, ValueError, RecursionError):
        config = checkpoint.config_of_folder
        if config is None:
            return
        for name, why in config.unknown_parts.items():
            warn(f"{name or config.values['model_type']} is not read: {why}")


class Pairs(NamedTuple):
    """Matching layers of two files, parts that their comparison leaves out, and tensors that only
    one file has.
    """

    layers: list[tuple[Any, Any]]
    not_compared: list[NotCompared]
    only_in_one: list[OnlyInOne]


def status_of(same: bool, pairs: Pairs) -> int:
    """Return the exit status of a comparison: 0 only if everything was compared and is the same."""
    if not same:
        return 1
    if any(part.is_open for part in pairs.not_compared):
        return 2
    return 0


@contextmanager
def pairs_of_layers(options: Options) -> Iterator[Pairs]:
    """Yield matching layers of two open files. An option that is passed once holds for both
    files.
    """
    from parity.port.conversion.checkpoint import Checkpoint
    from parity.port.conversion.hints import CALLER, LayerHints
    from parity.port.conversion.not_compared import (
        by_reason,
        find_not_compared,
        find_only_in_one,
        of_files,
    )

    layouts = _for_each_file("--from", options.layouts)
    prefixes = _for_each_file("--prefix", options.prefix)
    hints = LayerHints.by(CALLER, **layer_options(options))
    with ExitStack() as stack:
        checkpoints = [stack.enter_context(Checkpoint.open(path)) for path in options.files]
        if len(options.layouts) == 1:
            layouts = _layouts_without_metadata(checkpoints, options.layouts[0])
        opened = []
        for checkpoint, layout, prefix in zip(checkpoints, layouts, prefixes, strict=True):
            opened.append(checkpoint.layers(hints, layout, prefix))
        first = opened[0].in_order
        second = _in_order_of(first, opened[1].in_order)
        have_one_layer = len(first) == len(second) == 1
        if _indices_of(first) != _indices_of(second) and not have_one_layer:
            for words in by_reason(of_files(options.files, opened)):
                warn(f"not compared: {words}")
            counts = [f"{len(layers)} ({layers[0].label}, …)" for layers in (first, second)]
            raise input_error(
                "both files", "have layers of the same numbers to be compared", " and ".join(counts)
            )
        pairs = list(zip(first, second, strict=True))
        not_compared = find_not_compared(pairs, options.files, opened)
        for words in by_reason(not_compared):
            warn(f"not compared: {words}")
        restored = [(_restored(one, other), _restored(other, one)) for one, other in pairs]
        only_in_one = find_only_in_one(pairs, options.files, opened)
        yield Pairs(restored, not_compared, only_in_one)


def _for_each_file(flag: str, values: list[str]) -> list[str | None]:
    """Return the value of an option for each of two files."""
    if len(values) > 2:
        raise input_error(flag, "be passed once or twice", {flag: values})
    if not values:
        return [None, None]
    # A value that is passed once is the first and the last.
    return [values[0], values[-1]]


def _layouts_without_metadata(checkpoints: list[Checkpoint], layout: str) -> list[str | None]:
    """Return the layout that was passed once: for the file without metadata, or for both.

    Metadata decide if they can: a file that mha-parity wrote may be compared with its source, whose
    layout alone is unknown.
    """
    have_metadata = [checkpoint.own.names_layout for checkpoint in checkpoints]
    if all(have_metadata):
        return [layout, layout]
    return [None if has_metadata else layout for has_metadata in have_metadata]


def _indices_of(layers: list[FileLayer]) -> list[Any]:
    return [layer.indices for layer in layers]


def _in_order_of(first: list[FileLayer], second: list[FileLayer]) -> list[FileLayer]:
    """Return the second layers in the order of the first ones, by their labels or the model's, or
    else unchanged.

    Each file has its own order of the parts of a model.
    """
    for name_of in (_label, _path_in_model):
        names = [name_of(layer) for layer in first]
        second_by_name = {name_of(layer): layer for layer in second}
        # Names must be different: in some models, several layers have none.
        are_unique = len(second_by_name) == len(second) == len(first)
        if are_unique and second_by_name.keys() == set(names):
            return [second_by_name[name] for name in names]
    return second


def _label(layer: FileLayer) -> str:
    return layer.label


def _path_in_model(layer: FileLayer) -> str | None:
    if layer.model is None:
        return None
    return layer.model.path


def _restored(layer: FileLayer, other: FileLayer) -> FileLayer:
    """Return a layer with the features that its file dropped, if the other layer has them."""
    from dataclasses import replace

    from parity.port.conversion.layouts.layout import with_dropped

    return replace(layer, spec=with_dropped(layer.spec, other.spec, layer.dropped))

"""Layers in the weight files of a command line: which they are, and their heads."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from parity.use.cli.messages import refusal, warn
from parity.use.cli.options import flag_of

if TYPE_CHECKING:
    from parity.port.conversion.checkpoint import Checkpoint
    from parity.port.conversion.hints import LayerKeywords
    from parity.port.conversion.layers import FileLayer
    from parity.port.conversion.not_compared import NotCompared, OnlyInOne


ASSUMED_CAUSAL = "is assumed to be causal; if it is not, pass --no-causal"


def add_layer_options(
    parser: argparse._ActionsContainer, what: str = "", *, many: bool = False
) -> None:
    """Add the options that choose layers of a file: `--prefix` for the names of `what`, and
    ambiguous sizes.
    """
    if what:
        repeated: dict[str, Any] = {"action": "append", "default": []} if many else {}
        about = f"common prefix of the names of {what}; {{i}} stands for a number"
        parser.add_argument("--prefix", metavar="P", help=about, **repeated)
    add_table_option(parser)
    parser.add_argument(
        "--num-heads", type=int, metavar="N", help="query heads, if shapes are ambiguous"
    )
    parser.add_argument(
        "--num-kv-heads", type=int, metavar="K", help="key/value heads, if shapes are ambiguous"
    )
    parser.add_argument(
        "--head-dim", type=int, metavar="H", help="features of a head, if shapes are ambiguous"
    )
    parser.add_argument(
        "--rope-theta", type=float, metavar="THETA", help="base of RoPE's frequencies, if any"
    )


def add_table_option(parser: argparse._ActionsContainer) -> None:
    """Add the option for tables of layouts, which other options then know by their names."""
    parser.add_argument(
        "--layout",
        dest="layout_files",
        action="append",
        default=[],
        metavar="FILE.toml",
        help="a table of a layout that is not listed; wherever a layout is named, its file may be",
    )


def layer_options(options: argparse.Namespace) -> LayerKeywords:
    """Return the keywords of functions that read layers; None for an option that was not given."""
    from mha_spec import Rope

    theta = options.rope_theta
    if theta is not None and not 0.0 < theta < math.inf:
        raise refusal("--rope-theta", "be positive and finite", {"--rope-theta": theta})
    return {
        "num_heads": options.num_heads,
        "num_kv_heads": options.num_kv_heads,
        "head_dim": options.head_dim,
        "rope": None if theta is None else Rope(theta),
    }


def said_of_layers(options: argparse.Namespace) -> list[str]:
    """Return the options about layers of files that were passed."""
    said = {"--from": options.layout, "--prefix": options.prefix}
    said |= {flag_of(name): value for name, value in layer_options(options).items()}
    return [flag for flag, value in said.items() if value is not None]


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
    return (2 if any(each.is_open for each in pairs.not_compared) else 0) if same else 1


@contextmanager
def pairs_of_layers(options: argparse.Namespace) -> Iterator[Pairs]:
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

    def each(flag: str, values: list[str]) -> list[str | None]:
        if len(values) > 2:
            raise refusal(flag, "be passed once or twice", {flag: values})
        return [values[0], values[-1]] if values else [None, None]

    layouts, prefixes = each("--from", options.layouts), each("--prefix", options.prefix)
    hints = LayerHints.by(CALLER, **layer_options(options))
    with ExitStack() as stack:
        checkpoints = [stack.enter_context(Checkpoint.open(path)) for path in options.files]
        if len(options.layouts) == 1:  # it holds for the file without metadata, or for both
            named = [checkpoint.own.names_layout for checkpoint in checkpoints]
            if not all(named):
                layouts = [None if is_named else layouts[0] for is_named in named]
        opened = [
            checkpoint.layers(hints, layout, prefix)
            for checkpoint, layout, prefix in zip(checkpoints, layouts, prefixes, strict=True)
        ]
        one, other = opened[0].in_order, _in_order_of(opened[0].in_order, opened[1].in_order)
        places = [[layer.place for layer in layers] for layers in (one, other)]
        if places[0] != places[1] and not len(one) == len(other) == 1:
            for words in by_reason(of_files(options.files, opened)):
                warn(f"not compared: {words}")
            counts = " and ".join(
                f"{len(layers)} ({layers[0].label}, …)" for layers in (one, other)
            )
            raise refusal("both files", "have layers of the same numbers to be compared", counts)
        pairs = list(zip(one, other, strict=True))
        left_out = find_not_compared(pairs, options.files, opened)
        for words in by_reason(left_out):
            warn(f"not compared: {words}")
        only_in_one = find_only_in_one(pairs, options.files, opened)
        yield Pairs(
            [(_restored(each, beside), _restored(beside, each)) for each, beside in pairs],
            left_out,
            only_in_one,
        )


def _in_order_of(layers: list[FileLayer], others: list[FileLayer]) -> list[FileLayer]:
    """Return the other layers in the order of the first ones, by their labels or the model's, or
    else unchanged.

    Each file has its own order of the parts of a model.
    """
    for name_of in (lambda layer: layer.label, lambda layer: layer.model and layer.model.path):
        held = {name_of(layer): layer for layer in others}
        if len(held) == len(others) == len(layers) and held.keys() == {
            name_of(layer) for layer in layers
        }:
            return [held[name_of(layer)] for layer in layers]
    return others


def _restored(layer: FileLayer, other: FileLayer) -> FileLayer:
    """Return a layer with the features that its file dropped, if the other layer has them."""
    from dataclasses import replace

    from parity.port.conversion.layouts.layout import with_dropped

    return replace(layer, spec=with_dropped(layer.spec, other.spec, layer.dropped))

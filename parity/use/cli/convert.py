"""`mha-parity convert`."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from parity.measure.text import some_of
from parity.use.cli.command import OneOf, Options, Result, argument, command, option
from parity.use.cli.layers import (
    layer_options,
    passed_layer_flags,
    warn_of_parts,
    weight_options,
)
from parity.use.cli.messages import input_error, warn
from parity.use.cli.options import from_option, name_list

if TYPE_CHECKING:
    from parity.explain.identification.layers import LiveLayer
    from parity.port.conversion.checkpoint import Checkpoint
    from parity.port.conversion.layouts.losses import LossyError as LossyType
    from parity.port.conversion.plan import Converted

MOST_GIB = 2**20
"""The largest size of a shard, a pebibyte. The number is a choice: larger than any file, and small
enough for its bytes to be an exact integer.
"""


def may_write(options: Options, path: str) -> bool:
    """Return whether a file may be one of DST: the file, its shards and their index, or anything in
    a new folder.
    """
    from parity.measure.files.reading import INDEX, SUFFIXES
    from parity.measure.files.target import is_shard_of

    file, target = Path(os.path.realpath(path)), Path(options.target)
    is_folder = options.ranks is not None or SUFFIXES.get(target.suffix.lower()) == "orbax"
    if is_folder:
        whole = Path(os.path.realpath(target))
        return file == whole or whole in file.parents
    if target.is_dir():
        target /= "model.safetensors"
    if file == Path(os.path.realpath(target)):
        return True
    is_of_set = file.name == f"{target.name}{INDEX}" or is_shard_of(target, file.name)
    return is_of_set and file.parent == Path(os.path.realpath(target.parent))


def _accepting(words: Sequence[str], lossy: LossyType) -> str:
    """Return the command line of this process with the options that accept its losses."""
    remedy: Mapping[str, Any] = dict(cast(Any, lossy.remedy))
    words = list(words)
    if "drop" in remedy:
        # The remedy has all features to drop, also those that were passed.
        words = _without_drop(words)
        words += ["--drop", remedy["drop"]]
    if "fill_bias" in remedy:
        words.append("--fill-bias")
    return shlex.join(["mha-parity", *words])


def _without_drop(words: Sequence[str]) -> list[str]:
    """Return the words of a command line without `--drop` and its value."""
    remaining: list[str] = []
    is_value = False
    for word in words:
        if is_value:
            is_value = False
        elif word == "--drop":
            is_value = True
        elif not word.startswith("--drop="):
            remaining.append(word)
    return remaining


@command(
    "convert attention weights between layouts",
    about=(
        "Convert the attention layers of a checkpoint between layouts, tensor by tensor, and keep"
        " or drop all other tensors. If the file is ambiguous, an error names the option that "
        "decides. DST is written completely or not at all."
    ),
    example=(
        "mha-parity convert model.safetensors flax.safetensors --from transformers.LLaMA \\\n"
        "      --to flax.nnx --prefix 'model.layers.{i}.self_attn' --num-heads 32"
    ),
    well="written",
    may_write=may_write,
)
@argument("source", metavar="SRC", help="a file, or a folder of shards or of files of ranks")
@argument("target", metavar="DST", help="a file, whose suffix selects the format, or a folder")
@from_option("layout of SRC; default: from its metadata")
@option(
    "--to",
    required=True,
    metavar="LAYOUT",
    help="layout of DST: see `mha-parity inspect --layouts`",
)
@option(
    "--to-prefix", metavar="P", help="prefix in DST; without {i}, layers are stacked on an axis"
)
@option(
    "--rest",
    type=OneOf(("keep", "drop")),
    default="keep",
    help="keep or drop all other tensors; default: keep",
)
@option(
    "--drop",
    type=name_list,
    metavar="A,B",
    help=(
        "features to leave out if DST cannot hold them, such as rope.scaling or soft_cap; the"
        " file records them"
    ),
)
@option("--fill-bias", is_flag=True, help="add zero biases if DST needs biases")
@option(
    "--max-shard-gib", type=float, metavar="G", help="split DST into files of at most this size"
)
@option(
    "--ranks",
    type=int,
    metavar="R",
    help="divide the heads over R ranks: DST is a new folder with one file per rank",
)
@option("--force", is_flag=True, help="replace DST if it has the same format")
@option(
    "--dry-run",
    is_flag=True,
    help="read everything, report the result or the errors, and write nothing",
)
@weight_options("a layer")
def run(options: Options) -> Result:
    """Convert, and print the result for the tensors."""
    from parity.port.conversion.checkpoint import Checkpoint
    from parity.port.conversion.layouts.losses import LossyError
    from parity.use.reporting.console import console, progress_bar
    from parity.use.reporting.conversion import print_conversion

    gib = options.max_shard_gib
    if gib is not None and not 0 < gib <= MOST_GIB:
        raise input_error(
            "--max-shard-gib", f"be a number > 0 and <= {MOST_GIB}", {"--max-shard-gib": gib}
        )
    with ExitStack() as stack:
        checkpoint = stack.enter_context(Checkpoint.open(options.source))
        observed: list[LiveLayer] = []
        path: Path | None = None
        if checkpoint.is_unknown and _may_observe(options):
            # Only here, because a conversion by rules needs neither observation nor diagnosis.
            from parity.explain.identification.folders import observe_folder, observed_file

            try:
                observed = observe_folder(options.source)
                path = stack.enter_context(observed_file(observed))
            except (OSError, ValueError) as error:
                warn(f"not observed: {error}")
        source = checkpoint
        if path is not None:
            if options.rest == "keep":
                raise input_error(
                    "--rest",
                    "be drop if no rules distinguish the other tensors",
                    {"--rest": "keep"},
                )
            source = stack.enter_context(Checkpoint.open(path))
        # About as many tensors are written as there are.
        on_tensor = stack.enter_context(progress_bar(len(source.file.infos)))
        try:
            converted = _convert(source, options, on_tensor)
        except LossyError as lossy:
            lossy.command = _accepting(options.words, lossy)
            raise
    print_conversion(converted, options.to, console())
    for layer in observed:
        warn(f"no rules of a family, observed with random inputs: {layer}")
    if source is not checkpoint:
        warn(
            "left out: all tensors except its attention layers', because no rules distinguish them"
        )
    warn_of_parts(checkpoint)
    prefix = "--prefix"
    if options.prefix is None:
        # The table, the file's metadata or the model decided.
        prefix = "the layout's prefix"
    for what, names in (
        (
            "missing in the file, though its configuration or its metadata requires them",
            converted.missing,
        ),
        ("left out, because they are not tensors", converted.left_out),
        ("metadata of the source that the target cannot hold", converted.metadata_left_out),
        (
            f"kept in {converted.source}, because {prefix} does not match them",
            converted.unconverted,
        ),
        (
            "kept in the old layout, although an optimizer expects the new one",
            converted.optimizer_state,
        ),
        (
            "norms over the width of all heads: each rank has its own weights, and code that "
            "computes with them must add up the squares of all ranks",
            converted.joined,
        ),
        (
            "quantized in the source, and written as the float32 values that they represent",
            converted.dequantized,
        ),
    ):
        if names:
            warn(f"{what}: {some_of(names)} ({len(names)})")
    return 0, converted


def _may_observe(options: Options) -> bool:
    """Return whether layers that no rules specify can be observed, and no option specifies them."""
    if passed_layer_flags(options):
        return False
    return find_spec("torch") is not None and find_spec("transformers") is not None


def _convert(
    checkpoint: Checkpoint, options: Options, on_tensor: Callable[[str], None]
) -> Converted:
    """Convert the layers of a checkpoint as the options ask for."""
    from parity.port.conversion.hints import CALLER, LayerHints
    from parity.port.conversion.layouts import find_layout
    from parity.port.conversion.plan import target_file

    target = find_layout(options.to, "target")
    path = options.target if options.ranks else target_file(options.target)
    hints = LayerHints.by(CALLER, **layer_options(options))
    gib = options.max_shard_gib
    layers = checkpoint.layers(
        hints, options.layout, options.prefix, argument="source", drop=options.drop or []
    )
    plan = layers.plan(
        target,
        to_prefix=options.to_prefix,
        keep_rest=options.rest == "keep",
        drop=options.drop or [],
        fill_bias=options.fill_bias,
    )
    return plan.write(
        path,
        max_shard_bytes=None if gib is None else max(1, int(gib * 2**30)),
        ranks=options.ranks,
        force=options.force,
        dry_run=options.dry_run,
        on_tensor=on_tensor,
    )

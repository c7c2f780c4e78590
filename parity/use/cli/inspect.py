"""`mha-parity inspect`."""

from __future__ import annotations

import argparse
from typing import Any

from parity.use.cli.help import Page, Result
from parity.use.cli.layers import add_layer_options, layer_options, warn_of_parts

PAGE = Page(
    "list the tensors of a file and the layouts they fit",
    "List the names, shapes and dtypes of a file, the prefixes of its attention layers, and the "
    "layouts that they fit.",
    "mha-parity inspect model.safetensors",
    "read, with or without attention in it",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file", metavar="FILE", help="a file of tensors, or a folder of shards or of files of ranks"
    )
    add_layer_options(parser)


def run(options: argparse.Namespace) -> Result:
    """Print the tensors and layers of a file."""
    from parity.port.conversion.checkpoint import Checkpoint
    from parity.port.conversion.inspect import find_layers
    from parity.port.conversion.layouts.propose import propose_table
    from parity.use.reporting.console import console
    from parity.use.reporting.conversion import print_inspection

    with Checkpoint.open(options.file) as checkpoint:
        file = checkpoint.file
        layers = find_layers(checkpoint, **layer_options(options))
        # NumPy computes the name of a dtype in Python: once for each, not for each of many tensors.
        dtypes = {info.dtype for info in file.infos.values()}
        names_of_dtypes = {dtype: dtype.name for dtype in dtypes}
        tensors: dict[str, dict[str, Any]] = {}
        for name, info in file.infos.items():
            tensors[name] = {"shape": list(info.shape), "dtype": names_of_dtypes[info.dtype]}
        for name, kind in file.quantised.items():
            tensors[name]["quantised"] = kind
        proposal = ""
        if not layers:
            proposal = propose_table(checkpoint.tensors.shapes)
        print_inspection(options.file, file, layers, console(), proposal)
        content = {
            "file_format": file.format,
            "metadata": dict(file.metadata),
            "tensors": tensors,
            "layers": layers,
            "proposed_layout": proposal,
        }
    warn_of_parts(checkpoint)
    return 0, content

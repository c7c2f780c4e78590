"""`mha-parity inspect`."""

from __future__ import annotations

import os
from typing import Any

from parity.measure.text import did_you_mean
from parity.use.cli.command import Options, Result, argument, command, option
from parity.use.cli.layers import layer_options, warn_of_parts, weight_options
from parity.use.cli.messages import requires


@command(
    "list the tensors of a file, or describe layouts",
    about=(
        "List the names, shapes and dtypes of a file, the prefixes of its attention layers, and "
        "the layouts that they fit. Or list the layouts, or the tensors of one with their axes."
    ),
    example="mha-parity inspect model.safetensors",
    well="the input was read, whether or not it has attention",
    forms=(
        ("FILE", "a file of tensors, or a folder of shards or of files of ranks"),
        ("LAYOUT", "a layout, such as flax.nnx, or the file of its table, such as own.toml"),
        ("--layouts", "all layouts"),
    ),
)
@argument(
    "file",
    required=False,
    metavar="INPUT",
    help="a file, a folder or a layout: see the forms below",
)
@option("--layouts", "is_list", is_flag=True, help="list the layouts")
@weight_options()
def run(options: Options) -> Result:
    """Print the tensors and layers of a file, or layouts."""
    if options.is_list == (options.file is not None):
        raise requires("inspect", "INPUT or --layouts, and not both")
    if options.is_list:
        return _list_layouts()
    if _is_layout(options.file):
        return _describe_layout(options.file)
    return _inspect_file(options)


def _is_layout(text: str) -> bool:
    """Return whether a word is a layout or the file of a table: not a file of weights, nor a
    missing file.
    """
    from parity.measure.files.reading import SUFFIXES
    from parity.port.conversion.layouts import LAYOUTS, register_packages

    if text.lower().endswith(".toml"):
        return True
    if os.path.isfile(text):
        return False
    register_packages()
    if text in LAYOUTS:
        return True
    if os.path.lexists(text):
        return False
    # A misspelled layout gets a suggestion, and a misspelled file its own error.
    is_file_name = os.sep in text or os.path.splitext(text)[1].lower() in SUFFIXES
    return not is_file_name and did_you_mean(text, LAYOUTS) != ""


def _list_layouts() -> Result:
    """Print all layouts."""
    from parity.port.conversion.layouts import LAYOUTS, register_packages
    from parity.use.reporting.console import console
    from parity.use.reporting.conversion import print_layouts

    register_packages()
    listed = list(LAYOUTS.values())
    print_layouts(listed, console())
    return 0, {"layouts": listed}


def _describe_layout(name: str) -> Result:
    """Print the tensors of a layout."""
    from parity.port.conversion.layouts import find_layout, register_layout
    from parity.use.reporting.console import console
    from parity.use.reporting.conversion import print_layout

    # The suffix of a table tells it from a name.
    is_table = name.lower().endswith(".toml")
    layout = register_layout(name) if is_table else find_layout(name)
    print_layout(layout, console())
    return 0, {"layouts": [layout]}


def _inspect_file(options: Options) -> Result:
    """Print the tensors and layers of a file."""
    from parity.port.conversion.checkpoint import Checkpoint
    from parity.port.conversion.inspect import find_layers
    from parity.port.conversion.layouts.propose import propose_table
    from parity.use.reporting.console import console, working
    from parity.use.reporting.conversion import print_inspection

    with Checkpoint.open(options.file) as checkpoint:
        file = checkpoint.file
        with working("finding the layers of the file"):
            layers = find_layers(checkpoint, **layer_options(options))
        # NumPy computes the name of a dtype in Python: once for each, not for each of many tensors.
        dtypes = {info.dtype for info in file.infos.values()}
        names_of_dtypes = {dtype: dtype.name for dtype in dtypes}
        tensors: dict[str, dict[str, Any]] = {}
        for name, info in file.infos.items():
            tensors[name] = {"shape": list(info.shape), "dtype": names_of_dtypes[info.dtype]}
        for name, kind in file.quantized.items():
            tensors[name]["quantized"] = kind
        proposal = ""
        if not layers:
            with working("proposing a layout"):
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

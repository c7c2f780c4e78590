"""`mha-parity write`."""

from __future__ import annotations

import keyword
import os
import sys
import unicodedata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parity.measure.text import printable
from parity.use.cli.command import OneOf, Options, Result, argument, command, group, option
from parity.use.cli.layers import layer_options, weight_options
from parity.use.cli.messages import contradiction, input_error, print_out, requires
from parity.use.cli.options import FrameworkName, from_option

if TYPE_CHECKING:
    from parity.port.conversion.layers import FileLayer

FRAMEWORKS = ("jax", "torch", "ttnn")

IMPORTED = {*FRAMEWORKS, "numpy", "parity", "mha_spec", "pytest", *sys.stdlib_module_names}
"""Modules that the code, its test or Python itself imports."""

READ_ALONE = {"__init__", "__main__", "conftest"}
"""Files that Python and pytest read by themselves."""


def may_write(options: Options, path: str) -> bool:
    """Return whether a path belongs to a file that the command writes."""
    return os.path.realpath(path) in map(os.path.realpath, _paths(options))


def _paths(options: Options) -> list[Path]:
    """Return the files to write: the layer, its test, and the trace that the test reads."""
    if options.output is None:
        return []
    path = Path(options.output)
    paths = [path]
    if options.test is not None:
        paths.append(path.with_name(f"test_{path.name}"))
    if options.test == "trace":
        paths.append(path.with_name(f"{path.stem}_trace.npz"))
    return paths


@command(
    "write one layer as plain code, with a test",
    about=(
        "Write one attention layer of a model as a file of plain code, without options, branches "
        "or imports of this package. The file ends with a function that makes its weights from "
        "the checkpoint's tensors. --test also writes a test."
    ),
    example="mha-parity write checkpoints/llama --layer 3 --to torch -o attention.py",
    well="written",
    may_write=may_write,
)
@argument(
    "source", metavar="MODEL", help="folder with a config.json and weights, or file of weights"
)
@option("--to", type=FrameworkName(FRAMEWORKS), required=True, help="framework of the code")
@option(
    "--layer",
    type=int,
    metavar="N",
    help=(
        "number of the layer; --prefix selects one if several parts have that number; "
        "default: the first in MODEL"
    ),
)
@option("--cache", type=OneOf(("static", "ragged")), help="write the layer over a key/value cache")
@option("--mask", is_flag=True, help="accept a boolean mask, True = masked, in each call")
@option("-o", "--output", metavar="FILE.py", help="file to write; default: standard output")
@option(
    "--test",
    type=OneOf(("reference", "trace")),
    help="also write a test: against the float64 reference, or against a trace, without mha-parity",
)
@option("--force", is_flag=True, help="replace files that exist")
@group(
    "reading weights",
    from_option(is_hidden=True),
    weight_options("a layer", are_hidden=True),
)
def run(options: Options) -> Result:
    """Write the layer, and its test if requested."""
    from parity.measure.files.target import errors_name, write_files
    from parity.port.conversion.checkpoint import Checkpoint
    from parity.port.conversion.hints import CALLER, LayerHints
    from parity.use.reporting.console import working
    from parity.use.running.models import chosen_layers

    _check_module(options)
    paths = _paths(options)
    if may_write(options, options.source):
        values = {"MODEL": options.source, "--output": options.output}
        raise input_error("MODEL", "differ from the files to write", values)
    _check_free(paths, force=options.force)
    with Checkpoint.open(options.source) as checkpoint:
        hints = LayerHints.by(CALLER, **layer_options(options))
        with working("finding the layers of the file"):
            layers = checkpoint.layers(hints, options.layout, options.prefix)
        layers.warn_if_incomplete()
        chosen = layers.in_order[:1]
        if options.layer is not None:
            chosen = chosen_layers(layers.in_order, [options.layer])
        if len(chosen) != 1:
            remedy = [{"--prefix": layer.label} for layer in chosen]
            raise input_error(
                "--layer",
                "select one layer",
                f"{len(chosen)} of them",
                remedy=remedy,
                hint="selects one",
            )
        with working("writing the code"):
            contents = _contents(chosen[0], options)
    content = {"layer": chosen[0].label, "source": contents[0].decode(), "files": []}
    if options.output is None:
        with errors_name("standard output"):
            print_out(content["source"])
        return 0, content
    write_files(dict(zip(paths, contents, strict=True)), overwrite=options.force)
    names = ", ".join(map(str, paths))
    print_out(f"wrote {printable(names, keep='')}\n")
    return 0, {**content, "files": [str(path) for path in paths]}


def _contents(layer: FileLayer, options: Options) -> list[bytes]:
    """Return the content of each file to write; of the layer alone for standard output."""
    from parity.explain.writing import call_of_layer, source_of_layer
    from parity.explain.writing.check import check_of

    call: Any = {"cache": options.cache, "has_mask": options.mask}
    if options.cache is not None and not call_of_layer(layer).is_causal:
        raise input_error("--cache", "be passed with a causal layer", layer.label)
    contents = [source_of_layer(layer, options.to, **call).encode()]
    if options.test is not None:
        form = call_of_layer(layer, **call)
        module = Path(options.output).stem
        check = check_of(module, layer.spec, options.to, form, with_trace=options.test == "trace")
        contents.append(check.source.encode())
        if check.trace is not None:
            contents.append(check.trace)
    return contents


def _check_module(options: Options) -> None:
    """Reject a file that is not a new module, and options that it cannot have."""
    if options.mask and options.cache is not None:
        raise contradiction("--mask", "--cache")
    if options.output is None:
        if options.test is not None:
            raise requires("--test", "--output")
        return
    path = Path(options.output)
    if path.suffix != ".py" or not _is_free(path.stem):
        rule = "be the file of a new module, such as attention.py"
        raise input_error("--output", rule, {"--output": options.output})


def _is_free(name: str) -> bool:
    """Return whether a file of this name is a module that can be imported, and replaces no
    other.
    """
    if not name.isidentifier() or keyword.iskeyword(name):
        return False
    if unicodedata.normalize("NFKC", name) != name:  # Python imports the normalized name
        return False
    if name.startswith("test_") or name.endswith("_test"):  # pytest collects it as a file of tests
        return False
    return name not in IMPORTED | READ_ALONE


def _check_free(paths: list[Path], *, force: bool) -> None:
    for path in paths:
        if path.is_dir():
            raise input_error("--output", "be no existing folder", str(path))
        if path.exists() and not force:
            raise FileExistsError(f"{path} exists; pass --force to replace it")

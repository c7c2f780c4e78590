"""`mha-parity plot`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parity.use.cli.command import Options, Result, argument, command, option
from parity.use.cli.layers import layer_options, weight_options
from parity.use.cli.messages import check_exclusive, input_error, requires
from parity.use.cli.options import causal_option, from_option, range_list
from parity.use.cli.paths import kind_of


@command(
    "draw attention heat maps, head by head",
    about=(
        "Draw a heat map of attention for each head, queries by keys, from a trace or from a "
        "layer and its input."
    ),
    example="mha-parity plot layer.safetensors attention.png --case causal --heads 0,1",
    well="drawn",
)
@argument("source", metavar="SRC", help="a trace, or a file with the weights of a layer")
@argument("target", metavar="DST", help="picture to write, .png or .svg")
@option("--input", metavar="NPY", help="input of the layer, (tokens, width) or (B, tokens, width)")
@option("--case", metavar="CASE", help="apply the layer to the inputs of this case")
@option(
    "--key-input", metavar="NPY", help="with --input: sequence to attend to, for cross-attention"
)
@causal_option("with --input: tokens attend to no later token; default: --no-causal")
@option(
    "--labels",
    metavar="A,B",
    help="labels of the keys, and of the queries unless --query-labels has those",
)
@option("--labels-file", metavar="FILE", help="file with one label per line")
@option("--query-labels", metavar="A,B", help="labels of the queries, if they differ")
@option("--heads", type=range_list, metavar="0,5-7", help="heads to draw; default: all")
@option(
    "--sequence", type=int, default=0, metavar="B", help="sequence of the batch to draw; default: 0"
)
@option(
    "--stage",
    metavar="STAGE",
    help="stage of a trace, such as step0.attn_weights; default: the last one",
)
@from_option()
@weight_options("the layer")
def run(options: Options) -> Result:
    """Draw, and print a summary."""
    from parity.use.reporting.console import console, working
    from parity.use.reporting.plot import check_destination, plot_attention

    check_exclusive(options, "--input", "--case")
    check_exclusive(options, "--labels", "--labels-file")
    check_destination(options.target, "DST")
    labels = _labels(options)
    query_labels = None
    if options.query_labels is not None:
        query_labels = options.query_labels.split(",")
    with working("computing attention weights"):
        stage, attn_weights = _attention(options)
    heads = options.heads
    if heads is None:
        heads = list(range(attn_weights.shape[1]))
    with working("drawing"):
        plot_attention(
            attn_weights,
            path=options.target,
            tokens=labels,
            query_tokens=query_labels,
            heads=options.heads,
            sequence=options.sequence,
            title=f"{Path(options.source).name}\n{stage}, sequence {options.sequence}",
        )
    noun = "head" if len(heads) == 1 else "heads"
    numbers = ", ".join(map(str, heads))
    drawn = f"{stage}, sequence {options.sequence}, {noun} {numbers}"
    summary = f"{drawn}; wrote {options.target}"
    console().print(summary, soft_wrap=True)
    content = {
        "stage": stage,
        "sequence": options.sequence,
        "heads": heads,
        "shape": list(attn_weights.shape),
        "target": options.target,
    }
    return 0, content


def _labels(options: Options) -> list[str] | None:
    """Return the labels of the keys; None without any."""
    from parity.measure.files.small import read_text

    if options.labels_file is not None:
        return read_text(options.labels_file).splitlines()
    if options.labels is not None:
        return options.labels.split(",")
    return None


def _attention(options: Options) -> tuple[str, Any]:
    """Return the stage and the attention weights of a trace, or of a layer for an input."""
    from parity.explain.diagnosis.attention import (
        attention_for,
        attention_in,
        attention_in_case,
        read_array,
    )
    from parity.measure.core.cases import case_named
    from parity.port.conversion.convert import load
    from parity.use.running.traces import load_trace

    case = None
    if options.case is not None:
        case = case_named(options.case)
    of_input = {"--causal": options.causal, "--key-input": options.key_input}
    if kind_of(options.source) == "trace":
        of_layer = {
            "--input": options.input,
            "--case": options.case,
            **of_input,
            "--from": options.layout,
            "--prefix": options.prefix,
        }
        needless = _passed(of_layer)
        if needless:
            raise input_error(", ".join(needless), "be left out for a trace", str(options.source))
        return attention_in(load_trace(options.source), options.stage)
    if options.stage is not None:
        raise input_error(
            "--stage", "be left out for a file of weights", {"--stage": options.stage}
        )
    if options.input is None:
        needless = _passed(of_input)
        if needless:
            raise requires(needless, "--input")
        if case is None:
            raise requires("a file of weights", "--input or --case")
    weights, spec = load(
        options.source, options.layout, prefix=options.prefix, **layer_options(options)
    )
    if case is not None:
        return attention_in_case(weights, spec, case)
    query = read_array(str(options.input))
    key = None
    if options.key_input is not None:
        key = read_array(options.key_input)
    is_causal = bool(options.causal)
    return "attn_weights", attention_for(weights, spec, query, key, is_causal=is_causal)


def _passed(values: Mapping[str, Any]) -> list[str]:
    """Return the options that have a value; `--no-causal` is the default and does not count."""
    return [flag for flag, value in values.items() if value]

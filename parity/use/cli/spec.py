"""`mha-parity spec`."""

from __future__ import annotations

from collections.abc import Mapping

from parity.use.cli.command import Options, Result, argument, command, option
from parity.use.cli.messages import add_hint, input_error, requires


@command(
    "read what each attention layer of a model computes",
    about=(
        "Read the configuration of a Hugging Face model. Report what each of its attention layers"
        " computes, and which key specifies it. With --live, observe a model in memory instead, "
        "report how each field was determined, and check the rules of its family against it."
    ),
    example="mha-parity spec checkpoints/llama",
    well="every layer is understood",
    wrong="a live layer is rejected",
)
@argument("path", required=False, metavar="PATH", help="config.json, or its folder")
@option("--families", is_flag=True, help="list the known families, by their model_type")
@option(
    "--live",
    metavar="PKG.MODULE:NAME",
    help=(
        "a function that returns a torch or Flax model in evaluation mode, and the keywords "
        "of a call"
    ),
)
@option(
    "--part",
    metavar="NAME",
    help=(
        "only this part of a composite model: the key of its configuration, such as "
        "text_config or thinker_config.text_config"
    ),
)
def run(options: Options) -> Result:
    """Print the specifications."""
    forms = [options.path is not None, options.live is not None, options.families]
    if forms.count(True) != 1:
        raise input_error("PATH, --live or --families", "be passed, and only one of them")
    if options.families:
        return _list_families(options)
    if options.live is not None:
        return _observe_model(options)
    return _read_configuration(options)


def _list_families(options: Options) -> Result:
    """Print the names of families, one in each line."""
    from parity.port.models.families import FAMILIES
    from parity.use.reporting.console import console

    if options.part is not None:
        raise requires("--part", "PATH")
    console().print("\n".join(sorted(FAMILIES)))
    return 0, {"families": sorted(FAMILIES)}


def _observe_model(options: Options) -> Result:
    """Print the specification of each layer of a live model, or why there is none."""
    from parity.explain.conformance.discover import load_callable
    from parity.explain.identification.layers import layers_of
    from parity.measure.core.user_code import line_of, user_code
    from parity.use.reporting.console import console, working

    if options.part is not None:
        raise requires("--part", "PATH")
    function = load_callable(options.live)
    try:
        with user_code(options.live):
            result = function()
    except Exception as error:  # a user's function may raise anything
        raised = f"{type(error).__name__}: {error}, {line_of(error)}"
        rule = "be a function without arguments that returns a model and its inputs by name"
        raise input_error("--live", rule, raised) from error
    values = result if isinstance(result, tuple) else (result,)
    if len(values) != 2 or not isinstance(values[1], Mapping):
        got = ", ".join(type(value).__name__ for value in values)
        raise input_error(
            "--live", "be a function that returns a model and its inputs by name", got
        )
    model, inputs = values
    with working("observing the layers of the model"):
        layers = layers_of(model, inputs)
    out = console()
    for layer in layers:
        out.print(str(layer), markup=False, highlight=False, soft_wrap=True)
    is_rejected = any(layer.spec is None for layer in layers)
    return int(is_rejected), {"layers": [layer.to_dict() for layer in layers]}


def _read_configuration(options: Options) -> Result:
    """Print the specifications of the layers of a configuration."""
    from mha_spec import InputError
    from parity.port.conversion.model_config import ModelConfig
    from parity.port.models.specs import part_of, specs_of
    from parity.use.reporting.console import console
    from parity.use.reporting.models import print_heading, print_layers

    out = console()
    config = ModelConfig.read(options.path)
    if options.part is None:
        # The empty name is the name of a model without parts.
        names = list(config.parts) or [""]
        not_read = config.unknown_parts
    else:
        names = [options.part]
        not_read = {}
    try:
        layers = {name: specs_of(config.values, part=name or None) for name in names}
    except InputError as error:
        add_hint(error, "--live observes a model that runs")
        raise
    records = []
    for name, layers_of_part in layers.items():
        if name:
            print_heading(name, out)
        family = str(part_of(config.values, name or None)["model_type"])
        print_layers(family, layers_of_part, out)
        for layer in layers_of_part:
            records.append({**layer.to_dict(), "section": name})
    for name, why in not_read.items():
        print_heading(name or str(config.values["model_type"]), out, f"not read: {why}")
    return 0, {"layers": records, "not_read": not_read}

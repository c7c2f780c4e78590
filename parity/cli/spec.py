"""`mha-parity spec`."""

from __future__ import annotations

import argparse

from parity.cli.help import Page
from parity.cli.options import add_json_option

PAGE = Page(
    "what each attention layer of a model computes, by its config.json",
    "Read the configuration of a model of Hugging Face, and say what each of its attention layers computes, and which "
    "key says so.",
    "mha-parity spec checkpoints/llama",
    "every key about attention was understood",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("path", metavar="PATH", help="a config.json, or the folder that it lies in")
    parser.add_argument(
        "--part", metavar="NAME", help="of a model with several parts: the key of its configuration, text_config"
    )
    add_json_option(parser)


def run(options: argparse.Namespace) -> int:
    """Print the specifications."""
    from parity.models.config import read_config
    from parity.models.specs import specs_of
    from parity.reporting.console import console
    from parity.reporting.json import write_json
    from parity.reporting.models import print_layers

    config = read_config(options.path)
    if options.part is not None:
        if not isinstance(config.get(options.part), dict):
            raise ValueError(f"--part must name a part of the configuration, got {options.part}")
        config = config[options.part]
    layers = specs_of(config)
    print_layers(str(config["model_type"]), layers, console())
    if options.json is not None:
        write_json(options.json, {"format": 1, "layers": [layer.to_dict() for layer in layers]})
    return 0

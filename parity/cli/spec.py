"""`mha-parity spec`."""

from __future__ import annotations

import argparse

from parity.cli.help import Page, Result

PAGE = Page(
    "what each attention layer of a model computes, by its config.json",
    "Read the configuration of a model of Hugging Face, and say what each of its attention layers computes, and which "
    "key says so.",
    "mha-parity spec checkpoints/llama",
    "every key about attention was understood",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="a config.json, or the folder that it lies in")
    parser.add_argument(
        "--part",
        metavar="NAME",
        help="of a model with several parts one alone: the key of its configuration, text_config, or the keys on "
        "the way to it, thinker_config.text_config",
    )


def run(options: argparse.Namespace) -> Result:
    """Print the specifications."""
    from parity.models.config import read_config
    from parity.models.specs import known_parts, part_of, specs_of, unknown_parts
    from parity.reporting.console import console
    from parity.reporting.models import print_heading, print_layers

    config, out = read_config(options.path), console()
    names = (list(known_parts(config)) or [""]) if options.part is None else [options.part]
    layers = {name: specs_of(config, part=name or None) for name in names}
    unread = unknown_parts(config) if options.part is None else {}
    for name, found in layers.items():
        if name:
            print_heading(name, out)
        print_layers(str(part_of(config, name or None)["model_type"]), found, out)
    for name, why in unread.items():
        print_heading(name or str(config["model_type"]), out, f"not read: {why}")
    told = [{**layer.to_dict(), "section": name} for name, found in layers.items() for layer in found]
    return 0, {"layers": told, "not_read": unread}

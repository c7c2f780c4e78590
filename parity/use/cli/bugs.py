"""`mha-parity bugs`."""

from __future__ import annotations

import click

from parity.use.cli.command import (
    Completions,
    Options,
    Result,
    argument,
    beginning_with,
    command,
    option,
)
from parity.use.cli.messages import contradiction


def _names(context: click.Context, parameter: click.Parameter, incomplete: str) -> Completions:
    """Complete the name of a page."""
    from parity.use.reporting.bugs import bug_lines

    return beginning_with(bug_lines(), incomplete)


@command(
    "describe known bugs: symptoms, reproduction, fix",
    about=(
        "Describe known bugs: their symptoms, a few lines that reproduce them, and the fix. "
        "Without a name, list the pages. `diagnose` and failing tests name these pages."
    ),
    example="mha-parity bugs rope-pairs",
    well="printed",
)
@argument(
    "names",
    nargs=-1,
    metavar="NAME",
    help="a page or a bug; default: list the pages",
    shell_complete=_names,
)
@option("--all", is_flag=True, help="list every bug with its page")
def run(options: Options) -> Result:
    """Print pages, or a list."""
    from parity.use.reporting.bugs import (
        bug_lines,
        bug_page,
        bug_pages,
        print_bugs,
        print_list,
        print_pages,
    )
    from parity.use.reporting.console import console

    if options.all and options.names:
        raise contradiction("--all", "NAME")
    if options.all:
        bugs = bug_pages()
        print_bugs(bugs, console())
        return 0, {"bugs": bugs}
    if not options.names:
        lines = bug_lines()
        print_list(lines, console())
        return 0, {"list": lines}
    pages = {name: bug_page(name) for name in options.names}
    print_pages(pages.values(), console())
    return 0, {"pages": pages}

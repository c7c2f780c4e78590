"""`mha-parity conformance`."""

from __future__ import annotations

import shlex

from parity.use.cli.command import Options, Result, argument, command, option
from parity.use.cli.messages import contradiction, input_error, requires
from parity.use.cli.options import (
    check_names,
    declarations,
    dtype_list,
    flag_of,
    matching,
    name_list,
)

DECLARATIONS = ("framework", "params", "axes", "d_model", "num_heads", "num_kv_heads")
DECLARATIONS += ("mask_name", "mask_true", "causal_name", "causal_alignment")
"""Options that declare properties of the callable."""


@command(
    "report how attention code treats masks, empty rows and NaN",
    about=(
        "Report the conventions of an attention function or module (mask polarity, causal "
        "alignment, fully masked rows, …) and the guarantees that it breaks. It may be your own, "
        "or one of torch, JAX, Flax, Keras and Equinox."
    ),
    example="mha-parity conformance my_package.attention:attention --mask-true hides",
    well="no guarantee is broken",
    wrong="one is broken",
)
@argument(
    "subject",
    required=False,
    metavar="PKG.MODULE:CALLABLE",
    help="a function, a module, or a function that makes a module",
)
@option(
    "--libraries",
    is_flag=True,
    help=(
        "examine the attention of torch, JAX, Flax, Keras and Equinox, and the layers of this"
        " project"
    ),
)
@option(
    "--only",
    type=name_list,
    metavar="GLOBS",
    help="with --libraries: only these, such as 'keras*,torch*'",
)
@option(
    "--checks",
    type=name_list,
    metavar="A,B",
    help="checks to run, such as 'mask,empty row'; default: all",
)
@option(
    "--dtypes",
    type=dtype_list,
    metavar="A,B",
    help="dtypes of the inputs; default: float32,bfloat16,float16; for ttnn: bfloat16",
)
@declarations(("torch", "jax", "ttnn"))
@option("--d-model", type=int, metavar="E", help="width of a layer's inputs")
@option("--num-heads", type=int, metavar="N", help="query heads of a layer")
@option(
    "--num-kv-heads",
    type=int,
    metavar="K",
    help="key/value heads; with it, grouped heads are declared as supported",
)
def run(options: Options) -> Result:
    """Run the checks, and print the matrix."""
    from parity.explain.conformance.answers import exit_status, unexamined_dtypes
    from parity.explain.conformance.discover import load_callable, load_params
    from parity.explain.conformance.examine import examine, examine_peers
    from parity.explain.conformance.peers import PEERS
    from parity.explain.conformance.questions import QUESTIONS
    from parity.explain.conformance.subjects import DTYPES
    from parity.measure.core.packages import installed
    from parity.use.reporting.conformance import print_conformance
    from parity.use.reporting.console import console, progress_bar, working

    if options.libraries == (options.subject is not None):
        raise input_error("PKG.MODULE:CALLABLE or --libraries", "be passed, and not both")
    declared = {}
    for name in DECLARATIONS:
        value = getattr(options, name)
        if value is not None:
            declared[name] = value
    flags = {flag_of(name): value for name, value in declared.items()}
    check_names("--dtypes", options.dtypes, DTYPES)
    check_names("--checks", options.checks, QUESTIONS)
    if options.libraries:
        if flags:
            raise contradiction("--libraries", [*flags])
        names = matching("--only", options.only or ["*"], PEERS)
        with progress_bar(len(names)) as on_subject:
            answers = examine_peers(names, options.checks, options.dtypes, on_subject=on_subject)
    else:
        if options.only is not None:
            raise requires("--only", "--libraries")
        if options.params is not None:
            declared["params"] = load_params(options.params)
        if "causal_alignment" in declared:
            declared["causal"] = declared.pop("causal_alignment")
        target = load_callable(options.subject)
        with working(f"examining {options.subject}"):
            answer = examine(
                target, options.checks, options.dtypes, name=options.subject, **declared
            )
        answers = [answer]

    def command_for(subject: str, question: str) -> str:
        """Return the command line that repeats one check."""
        words = ["mha-parity", "conformance"]
        if options.libraries:
            words += ["--libraries", "--only", subject]
        else:
            words.append(options.subject)
        for flag, value in flags.items():
            words += [flag, str(value)]
        if options.dtypes is not None:
            words += ["--dtypes", ",".join(options.dtypes)]
        return shlex.join([*words, "--checks", question])

    print_conformance(answers, console(), command_for)
    content = {
        "packages": installed(),
        "subjects": answers,
        "not_examined": unexamined_dtypes(answers),
    }
    return exit_status(answers), content

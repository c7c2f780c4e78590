"""The command line, `mha-parity`: exit status 0 all well, 1 a mismatch, 2 bad usage or something missing."""

from __future__ import annotations

import argparse
import fnmatch
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parity.spec import Case

# Everything else is imported by the command that needs it, so that --help answers at once.


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: as on the command line; those of the process when absent.

    Returns:
        The exit status.
    """
    options = _parser().parse_args(arguments)
    try:
        _check_destination(options.json)
        return options.command(options)
    except KeyboardInterrupt:
        print("mha-parity: interrupted", file=sys.stderr)
        return 130
    except (OSError, ValueError, TypeError, ImportError, RuntimeError) as error:
        print(f"mha-parity: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mha-parity",
        description="Prove that attention layers in JAX, PyTorch and TTNN agree, or see where they do not.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {metadata.version('mha-parity')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    run = commands.add_parser("run", help="run cases on backends and judge every stage")
    run.add_argument("--backends", type=_names, metavar="A,B", help="jax, torch, tt; all that are there by default")
    run.add_argument("--cases", default="*", metavar="GLOB", help="names of the cases to run, such as 'rope*'")
    run.add_argument("--random", type=int, default=0, metavar="N", help="also run N cases drawn at random")
    run.add_argument("--dtypes", type=_names, default=["float32"], metavar="A,B", help="float32 by default")
    run.add_argument("--grad", action="store_true", help="also compare gradients")
    run.add_argument("--weights", metavar="FILE", help="run the layer of this file of canonical weights instead")
    run.add_argument("--save-traces", metavar="DIR", help="keep every stage as a file, for `compare` and --join")
    run.add_argument("--join", action="append", default=[], metavar="DIR", help="also judge the traces of this folder")
    length = run.add_mutually_exclusive_group()
    length.add_argument("--verbose", action="store_true", help="print every comparison")
    length.add_argument("--quiet", action="store_true", help="print failures and the last line only")
    run.set_defaults(command=_run)

    compare = commands.add_parser("compare", help="judge saved traces, also from other machines")
    compare.add_argument("traces", nargs="+", metavar="DIR", help="folders of traces, or single files")
    compare.add_argument("--verbose", action="store_true", help="print every comparison")
    compare.set_defaults(command=_compare, quiet=False)

    doctor = commands.add_parser("doctor", help="what is installed, and what would be skipped and why")
    doctor.set_defaults(command=_doctor)

    cache_size = commands.add_parser("cache-size", help="memory of a key/value cache")
    cache_size.add_argument("--batch", type=int, default=1, metavar="B")
    cache_size.add_argument("--num-kv-heads", type=int, required=True, metavar="K")
    cache_size.add_argument("--head-dim", type=int, required=True, metavar="H")
    cache_size.add_argument("--seq-len", type=int, required=True, metavar="S", help="tokens, or slots, a sequence")
    cache_size.add_argument("--num-layers", type=int, default=1, metavar="L")
    cache_size.add_argument("--dtype", default="float16")
    cache_size.set_defaults(command=_cache_size)

    convert = commands.add_parser("convert", help="attention weights from one layout to another, whole checkpoints too")
    convert.add_argument("source", metavar="SRC", help="a file, or a folder of shards")
    convert.add_argument("target", metavar="DST", help="a file; its suffix tells the format")
    convert.add_argument("--from", dest="layout", metavar="LAYOUT", help="what the file's metadata tell, by default")
    convert.add_argument("--to", required=True, metavar="LAYOUT", help="see `mha-parity layouts`")
    convert.add_argument("--to-prefix", metavar="P", help="prefix of the layers that are written; --prefix by default")
    convert.add_argument("--rest", choices=("keep", "drop"), default="keep", help="all other tensors; kept by default")
    convert.add_argument("--max-shard-gib", type=float, metavar="G", help="divide the target into files of that size")
    convert.set_defaults(command=_convert)

    layouts = commands.add_parser("layouts", help="the layouts there are, or the tensors of one")
    layouts.add_argument("name", nargs="?", metavar="LAYOUT")
    layouts.set_defaults(command=_layouts)

    inspect = commands.add_parser("inspect", help="what a file holds, and which layouts its attention layers fit")
    inspect.add_argument("file", metavar="FILE")
    inspect.set_defaults(command=_inspect)

    verify = commands.add_parser("verify", help="do two files hold the same attention?")
    verify.add_argument("files", nargs=2, metavar="FILE")
    verify.add_argument(
        "--from", dest="layouts", action="append", default=[], metavar="LAYOUT", help="of both, or each"
    )
    verify.set_defaults(command=_verify)

    for command, what in ((convert, "a layer"), (verify, "the layer, in both files or each"), (inspect, "")):
        if what:
            many: dict[str, Any] = {"action": "append", "default": []} if command is verify else {}
            about = f"what the names of {what} begin with; {{i}} stands for a number"
            command.add_argument("--prefix", metavar="P", help=about, **many)
        command.add_argument("--num-heads", type=int, metavar="N", help="where the shapes do not tell")
        command.add_argument("--num-kv-heads", type=int, metavar="K")
        command.add_argument("--head-dim", type=int, metavar="H")
        command.add_argument("--rope-theta", type=float, metavar="THETA", help="base of the RoPE frequencies, if any")

    for command in (run, compare, doctor, cache_size, convert, layouts, inspect, verify):
        command.add_argument("--json", metavar="PATH", help="also write the result as JSON")
    return parser


def _names(text: str) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise argparse.ArgumentTypeError("must name at least one")
    return names


def _check_destination(path: str | None) -> None:
    """Refuse a place that cannot be written to before the work, not after it."""
    if path is not None and (Path(path).is_dir() or not Path(path).absolute().parent.is_dir()):
        raise ValueError(f"--json must name a file in a folder that is there, got {path}")


# ---- Commands --------------------------------------------------------------------------------------------------------


def _run(options: argparse.Namespace) -> int:
    from parity import report
    from parity.backends import NEEDS, why_missing
    from parity.run import run_cases
    from parity.weights import load_weights

    weights, cases = None, _chosen_cases(options)
    if options.weights is not None:
        if options.cases != "*" or options.random or options.save_traces or options.join:
            raise ValueError("--weights must stand without --cases, --random, --save-traces and --join")
        weights, spec = load_weights(options.weights)
        cases = _weight_cases(Path(options.weights).stem, spec)
    backends = [name for name in options.backends or NEEDS if name in NEEDS and why_missing(name) is None]
    runs = sum(1 if case.dtype else len(options.dtypes) for case in cases) * len(backends)
    with report.progress_bar(runs) as on_case:
        results = run_cases(
            cases,
            options.backends,
            options.dtypes,
            with_gradients=options.grad,
            weights=weights,
            traces=options.save_traces,
            join=options.join,
            on_case=on_case,
        )
    return _finish(options, results)


def _compare(options: argparse.Namespace) -> int:
    from parity.run import compare_traces

    return _finish(options, compare_traces(options.traces))


def _finish(options: argparse.Namespace, results: Any) -> int:
    from parity import report

    report.print_report(results, report.console(), verbose=options.verbose, quiet=options.quiet)
    if options.json is not None:
        report.write_json(options.json, results.to_dict())
    return 1 if results.failed else 0


def _chosen_cases(options: argparse.Namespace) -> list[Case]:
    from parity.spec import CASES, find_case, random_case

    if options.random < 0:
        raise ValueError(f"--random must be at least 0, got {options.random}")
    drawn = {case.name: case for case in map(random_case, range(options.random))}
    cases = {name: case for name, case in CASES.items() if fnmatch.fnmatchcase(name, options.cases)} | drawn
    if not cases and (case := find_case(options.cases)):
        cases = {case.name: case}
    if not cases:
        raise ValueError(f"--cases must match a case, got {options.cases!r}; there are {', '.join(CASES)}")
    return list(cases.values())


def _weight_cases(name: str, spec: Any) -> list[Case]:
    """What a layer of unknown purpose is tried on: all keys seen, causal and cached; or, if it must be, across."""
    from parity.spec import Case

    if spec.d_kv != spec.d_in:
        return [Case(f"weights-{name}-cross", spec, "queries over keys of another width", seq_len=6, seq_len_k=9)]
    return [
        Case(f"weights-{name}-full", spec, "every token sees every token", seq_len=9),
        Case(f"weights-{name}-causal", spec, "no token sees a later one", seq_len=9, is_causal=True),
        Case(f"weights-{name}-decode", spec, "a prompt, then token by token", seq_len=7, chunks=(5, 1, 1), capacity=8),
    ]


def _doctor(options: argparse.Namespace) -> int:
    from parity import report
    from parity.backends import NEEDS, why_missing
    from parity.numerics import environment

    missing = {name: reason for name in NEEDS if (reason := why_missing(name))}
    for name in NEEDS.keys() - missing.keys():
        try:
            environment([name])
        except Exception as error:  # a doctor that dies of the illness is of no use
            missing[name] = f"{name} does not start: {type(error).__name__}: {error}"
    found = environment(name for name in NEEDS if name not in missing)
    out = report.console()
    table = report.begin_table(out, "Environment", show_header=False)
    table.add_row("python", found["python"])
    table.add_row("platform", found["platform"])
    table.add_row("cpus", str(found["cpus"]))
    for package, version in found["packages"].items():
        table.add_row(package, version)
    out.print(table)
    backends = report.begin_table(out, "Backends")
    for column in ("backend", "runs here", "device", "numerics while a case runs"):
        backends.add_column(column, overflow="fold")
    for name in NEEDS:
        if name in missing:
            backends.add_row(name, "[yellow]no[/]", "", f"skipped: {missing[name]}")
            continue
        facts = found["backends"][name]
        device, devices = facts["device"], facts.get("cuda_devices") or facts.get("devices") or []
        others = ", ".join(name for name in devices if name != device)
        numerics = ", ".join(f"{key}={value}" for key, value in facts["numerics"].items())
        backends.add_row(name, "[green]yes[/]", f"{device} ({others})" if others else device, numerics)
    out.print(backends)
    if options.json is not None:
        report.write_json(options.json, {"format": 1, "environment": found, "missing": missing})
    return 0


def _cache_size(options: argparse.Namespace) -> int:
    from parity import report
    from parity.spec import DTYPES, AttentionSpec
    from parity.weights import dtype_named

    if options.dtype not in DTYPES:
        raise ValueError(f"--dtype must be one of {', '.join(DTYPES)}, got {options.dtype}")
    for name in ("batch", "num_kv_heads", "head_dim", "seq_len", "num_layers"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(options, name)}")
    spec = AttentionSpec(options.num_kv_heads * options.head_dim, options.num_kv_heads)
    nbytes = spec.cache_nbytes(
        options.batch, options.seq_len, dtype_named(options.dtype), num_layers=options.num_layers
    )
    out = report.console()
    out.print(
        f"2 x {options.batch} sequences x {options.num_kv_heads} heads x {options.seq_len} tokens x "
        f"{options.head_dim} features x {options.num_layers} layers in {options.dtype}: "
        f"{nbytes} bytes = {nbytes / 2**30:.3g} GiB",
        soft_wrap=True,
    )
    if options.json is not None:
        report.write_json(options.json, {"format": 1, "nbytes": nbytes})
    return 0


def _heads(options: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(options, name) for name in ("num_heads", "num_kv_heads", "head_dim", "rope_theta")}


def _convert(options: argparse.Namespace) -> int:
    from parity import report
    from parity.convert import convert_file, count_tensors

    shard = None if options.max_shard_gib is None else int(options.max_shard_gib * 2**30)
    with report.progress_bar(count_tensors(options.source)) as on_tensor:
        converted = convert_file(
            options.source,
            options.target,
            source=options.layout,
            target=options.to,
            prefix=options.prefix,
            to_prefix=options.to_prefix,
            keep_rest=options.rest == "keep",
            max_shard_bytes=shard,
            on_tensor=on_tensor,
            **_heads(options),
        )
    out = report.console()
    layers, spec = converted.layers, converted.spec
    heads = f", {spec.num_heads} x {spec.head_dim}, key/value {spec.num_kv_heads}" if spec else ""
    out.print(
        f"{len(layers)} attention layer{'s' if len(layers) != 1 else ''}{heads}: {converted.source} -> {options.to}; "
        f"{len(converted.kept)} other tensors kept, {len(converted.dropped)} dropped; wrote {options.target}",
        soft_wrap=True,
    )
    if options.json is not None:
        report.write_json(options.json, {"format": 1, **converted.to_dict()})
    return 0


def _layouts(options: argparse.Namespace) -> int:
    from parity import report
    from parity.layouts import LAYOUTS, find_layout

    out = report.console()
    if options.name is None:
        table = report.begin_table(out, "Layouts")
        for column in ("layout", "what it is", "RoPE pairs"):
            table.add_column(column, overflow="fold")
        for layout in LAYOUTS.values():
            table.add_row(layout.name, layout.about, layout.rope)
        out.print(table)
        shown = list(LAYOUTS.values())
    else:
        shown = [find_layout(options.name)]
        report.print_layout(shown[0], out)
    if options.json is not None:
        report.write_json(options.json, {"format": 1, "layouts": [layout.to_dict() for layout in shown]})
    return 0


def _inspect(options: argparse.Namespace) -> int:
    from dataclasses import asdict

    from parity import report
    from parity.convert import find_layers
    from parity.formats import open_tensors

    with open_tensors(options.file) as file:
        found = find_layers(file, **_heads(options))
        infos = {name: {"shape": list(info.shape), "dtype": info.dtype.name} for name, info in file.infos.items()}
        report.print_inspection(options.file, file, found, report.console())
        told = {"file_format": file.format, "metadata": dict(file.metadata), "tensors": infos}
    if options.json is not None:
        report.write_json(options.json, {"format": 1, **told, "layers": [asdict(layer) for layer in found]})
    return 0


def _verify(options: argparse.Namespace) -> int:
    from parity import report
    from parity.convert import load
    from parity.verify import same_bits, verify

    def each(flag: str, values: list[str]) -> list[str | None]:
        if len(values) > 2:
            raise ValueError(f"{flag} must be given once or twice, got {values}")
        return [values[0], values[-1]] if values else [None, None]

    layouts, prefixes = each("--from", options.layouts), each("--prefix", options.prefix)
    (weights, spec), (other, other_spec) = (
        load(path, layout, prefix=prefix, **_heads(options))
        for path, layout, prefix in zip(options.files, layouts, prefixes, strict=True)
    )
    comparisons = verify(weights, spec, other, other_spec)
    out = report.console()
    report.print_verdict(comparisons, same_bits(weights, other), options.files, out)
    if options.json is not None:
        report.write_json(options.json, {"format": 1, "results": [comparison.to_dict() for comparison in comparisons]})
    return 0 if all(comparison.passed for comparison in comparisons) else 1

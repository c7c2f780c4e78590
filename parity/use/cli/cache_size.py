"""`mha-parity cache-size`."""

from __future__ import annotations

import argparse

from parity.use.cli.help import Page, Result
from parity.use.cli.options import check_names, check_range, dtype_name

MOST_SIZE = 2**63 - 1
"""The largest size of an axis of an array."""

PAGE = Page(
    "compute the memory of a key/value cache",
    "Compute the memory of a key/value cache.",
    "mha-parity cache-size --num-kv-heads 8 --head-dim 128 --capacity 8192 --num-layers 80",
    "computed",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--batch-size", type=int, default=1, metavar="B", help="sequences; default: 1"
    )
    parser.add_argument(
        "--num-kv-heads", type=int, required=True, metavar="K", help="key/value heads"
    )
    parser.add_argument(
        "--head-dim", type=int, required=True, metavar="H", help="features of a head"
    )
    parser.add_argument(
        "--capacity", type=int, required=True, metavar="S", help="tokens of each sequence"
    )
    parser.add_argument("--num-layers", type=int, default=1, metavar="L", help="layers; default: 1")
    parser.add_argument(
        "--dtype",
        type=dtype_name,
        default="float16",
        help="float32, bfloat16, float16, float64; default: float16",
    )


def run(options: argparse.Namespace) -> Result:
    """Print the size."""
    from mha_spec import AttentionSpec
    from parity.measure.core.case import DTYPES
    from parity.measure.core.weights import dtype_named
    from parity.use.reporting.console import console

    check_names("--dtype", [options.dtype], DTYPES)
    for name in ("batch_size", "num_kv_heads", "head_dim", "capacity", "num_layers"):
        check_range(options, name, 1, MOST_SIZE)
    spec = AttentionSpec(options.num_kv_heads * options.head_dim, options.num_kv_heads)
    nbytes = spec.cache_nbytes(
        options.batch_size,
        options.capacity,
        dtype_named(options.dtype),
        num_layers=options.num_layers,
    )
    sizes = (
        f"2 x {options.batch_size} sequences x {options.num_kv_heads} heads x {options.capacity} "
        f"slots x {options.head_dim} features x {options.num_layers} layers in {options.dtype}"
    )
    text = f"{sizes}: {nbytes} bytes = {nbytes / 2**30:.3g} GiB"
    console().print(text, soft_wrap=True)
    return 0, {"nbytes": nbytes}

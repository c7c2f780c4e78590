"""`mha-parity cache-size`."""

from __future__ import annotations

from parity.use.cli.command import Options, Result, command, option
from parity.use.cli.options import check_names, check_range, dtype_name

MOST_SIZE = 2**63 - 1
"""The largest size of an axis of an array."""


@command(
    "compute the memory of a key/value cache",
    about="Compute the memory of a key/value cache.",
    example="mha-parity cache-size --num-kv-heads 8 --head-dim 128 --capacity 8192 --num-layers 80",
    well="computed",
)
@option("--batch-size", type=int, default=1, metavar="B", help="number of sequences; default: 1")
@option("--num-kv-heads", type=int, required=True, metavar="K", help="key/value heads")
@option("--head-dim", type=int, required=True, metavar="H", help="features of a head")
@option("--capacity", type=int, required=True, metavar="S", help="tokens of each sequence")
@option("--num-layers", type=int, default=1, metavar="L", help="number of layers; default: 1")
@option(
    "--dtype",
    type=dtype_name,
    default="float16",
    metavar="DTYPE",
    help="float32, bfloat16, float16, float64; default: float16",
)
def run(options: Options) -> Result:
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

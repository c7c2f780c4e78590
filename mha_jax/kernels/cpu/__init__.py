"""Attention for CPUs, for which neither JAX nor XLA has a fused kernel.

`whole` computes few scores at once, `blockwise` accumulates many of them block by block, `windows`
skips the keys outside a window or chunk, and `blocks` divides their work. The sizes of blocks fit
the caches of a CPU.

Other callers share these functions. An accelerator runs `blockwise` and `windows` if its own
kernels do not support a call and its scores are too many to store. The formulas are the same there,
and only the order of loops, the skipping of blocks and sizes differ (`Options.at_once`).
`parallel.ring` sums the parts of several devices.
"""

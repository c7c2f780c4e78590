"""The fused path, in the kernels of `ttnn`, and what keeps NaN and infinity where they are seen."""

"""Kernels: attention without the attention weights, and what keeps NaN and infinity where they are seen."""

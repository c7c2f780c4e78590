"""Attention as people write it: right ports, and the same with one mistake each. See README.md."""

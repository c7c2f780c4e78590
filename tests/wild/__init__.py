"""Attention as people write it: right ports, and the same with one bug each. See README.md."""

"""Fit the few parameters behind an observed array: the mathematics of diagnosis and identification.

- `rotation`: by which angles pairs of features were rotated, and at which positions.
- `thetas`: which base of RoPE has some frequencies, and bases in use.
- `numbers`: round numbers near a fitted one.
- `distances`: slopes of biases by distance; the window or the chunks of a mask.

The functions take arrays, and know nothing of layers, stages or bugs.
"""

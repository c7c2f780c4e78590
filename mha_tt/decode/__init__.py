"""Decoding on the device: a step of all sequences, the places that are counted there, slots and pages of a cache."""

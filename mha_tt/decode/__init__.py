"""Decoding on the device: steps of all sequences, positions counted there, slots and pages of
caches.
"""

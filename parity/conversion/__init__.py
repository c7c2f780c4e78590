"""Checkpoint layouts, and weights from one to another."""

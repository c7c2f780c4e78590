"""Specifications of attention layers from the configurations of released models."""

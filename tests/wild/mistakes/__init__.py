"""Mistakes in the ports, a module for each style."""

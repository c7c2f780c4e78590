"""Bugs in the ports, a module for each style."""

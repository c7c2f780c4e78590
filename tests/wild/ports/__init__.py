"""Ports of attention layers, a module for each style: `port(problem, how)` gives what it recorded, by name."""

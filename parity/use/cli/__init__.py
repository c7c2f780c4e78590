"""The command line, `mha-parity`: one module for each command.

Start at `main.main`. A command's module has two functions: one adds its options to a parser, the
other runs it and returns the exit code and the content of its JSON report. Several commands share
the modules `options` and `paths`.
"""

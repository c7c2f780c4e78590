"""The command line, `mha-parity`: one module for each command, imported when the command runs.

- `COMMANDS` (`main`): the module of each command, whose `run` is a `Command`.
- `command`, `argument`, `option`, `group` (`command`): declare a command, on click.
- `Result` (`command`): what `run` returns, the exit status and the content of the JSON report.

Start at `main.main`. `running` runs a command, `usage` has the errors of a wrong command line, and
`project` reads options from pyproject.toml. Commands share `options`, `layers` (of weight files),
`cases`, `paths`, `reports` and `messages`; `own_layer`, `ranks`, `taps` and `weight_files` are
forms of `diagnose` and `compare`. `clone` finds the commands of `parity_lab`.
"""

"""The command line, `mha-parity`: one module for each command, imported when the command runs.

- `COMMANDS` (`main`): the module of each command, which has a `PAGE`, `add_arguments` and `run`.
- `Page` (`help`): the help of a command.
- `Result` (`help`): what `run` returns, the exit status and the content of the JSON report.

Start at `main.main`. Commands share `options`, `layers` (of weight files), `paths`, `reports` and
`messages`; `ranks` and `taps` are forms of `diagnose` and `compare`. `clone` finds the commands of
`parity_lab`, and `completion` completes words in shells.
"""

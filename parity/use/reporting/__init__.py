"""Output for people and for tools: console, HTML, JUnit, JSON, plots.

Nothing is computed here. `summary` arranges a `Report` once, and `run`, `html` and `junit` print
it; other results have one module each.

- `console`: `print_table` and `print_line`, with which all modules print on a terminal or in a
  pipe. They escape text that comes from files, see `parity.measure.text`.
- `AttentionMaps` (`html`): what the page shows of a run besides its report.
- `Schema` (`schemas`): the keys that other programs read, in JSON, files and JUnit XML.

Start at `run.print_report`.
"""

"""Output for people and for tools: console, HTML, JUnit, JSON, plots.

Nothing is computed here. `summary` arranges a `Report` once, and `run`, `html` and `junit` print
it; other results have one module each.

- `console`: `print_table` and `print_line`, with which modules print tables and text that comes
  from files, on a terminal or in a pipe. They escape it, see `parity.measure.text`.
- `AttentionMaps` (`html`): what the page shows of a run besides its report; `html_report`
  has its style.
- `Schema` (`schemas`): the keys that other programs read, in JSON, files and JUnit XML.

Start at `run.print_report`.
"""

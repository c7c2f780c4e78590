"""The command line, pytest, runs of many cases, and reports: the parts a person or a CI job calls.

- `running`: cases x backends, here or from recorded traces. Start at `running.run.run_cases`.
- `reporting`: results of the other wings as text, HTML, JUnit, JSON and plots.
- `testing`: `assert_parity`, and the plugin for pytest.
- `cli`: `mha-parity`. Start at `cli.main.main`.
"""

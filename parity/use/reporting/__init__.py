"""Output for people and for tools: console, HTML, JUnit, JSON, plots.

Nothing is computed here. `summary` arranges a `Report` once, and `console`, `html` and `junit`
print it; other results have one module each. Text that comes from files passes through
`parity.measure.text` first.
"""

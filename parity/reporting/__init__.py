"""Output for people: console, HTML, JUnit, plots."""

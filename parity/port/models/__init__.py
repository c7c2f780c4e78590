"""Specifications of attention layers from the configurations of released models.

- `ModelLayer` (`specs`): one layer: its label, its specification, and the layout and prefix
  of its weights.
- `Family` (`rules`): how one architecture's keys become a specification; `families` has all of
  them.
- `Config` (`config`): a `config.json`, read with errors that name the key.

Start at `specs.specs_of`. No library of models is imported: a `config.json` suffices.
"""

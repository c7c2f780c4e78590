"""Carry weights between the names and layouts of other libraries and ours.

- `models`: what the `config.json` of a released model says about its layers.
- `conversion`: checkpoints from one layout to another. Start at `conversion.convert.convert_file`.
- `foreign`: weights of live modules of other libraries.
- `tapping`: inputs and outputs of the attention layers of a running model.

This wing imports `measure` alone. It explains nothing: a file or module that it does not know
raises an error that says what is missing.
"""

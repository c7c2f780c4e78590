"""The warning for what a model says of its attention and what is read of it does not."""


class NotCarriedWarning(UserWarning):
    """Part of what a model says of its attention is left out: it is not read, or not there."""

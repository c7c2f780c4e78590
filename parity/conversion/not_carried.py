"""The warning for what a model says of its attention and what is read of it does not."""


class NotCarriedWarning(UserWarning):
    """What a model's configuration says of its attention is left out, for it is not read, or not there."""

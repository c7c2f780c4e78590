"""The warning for what a model says of its attention and its specification does not."""


class NotCarriedWarning(UserWarning):
    """What a model's configuration says of its attention is left out of its specification, for it is not read."""

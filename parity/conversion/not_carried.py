"""The warning for what a model says of its attention and a specification cannot hold."""


class NotCarriedWarning(UserWarning):
    """What a model's configuration says of its attention is left out, for a specification cannot hold it."""

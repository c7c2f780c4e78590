"""The warning for attention settings of a model that are not read."""


class IgnoredSettingsWarning(UserWarning):
    """Part of the model configuration's attention settings is not supported and was ignored.

    Example:
        >>> import warnings
        >>> parity.save("layer.safetensors", torch.nn.MultiheadAttention(64, 8))
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("error", parity.IgnoredSettingsWarning)
        ...     weights, spec = parity.load("layer.safetensors")
    """

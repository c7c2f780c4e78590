"""The warning for attention settings of a model that are not read."""


class IgnoredSettingsWarning(UserWarning):
    """Part of the model configuration's attention settings is not supported and was ignored."""

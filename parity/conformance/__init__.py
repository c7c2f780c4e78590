"""Questions that an implementation's conventions answer."""

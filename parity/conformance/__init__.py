"""Check the conventions of an attention implementation by calling it."""

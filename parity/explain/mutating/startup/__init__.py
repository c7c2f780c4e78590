"""A folder for PYTHONPATH: Python runs its `sitecustomize` at startup."""

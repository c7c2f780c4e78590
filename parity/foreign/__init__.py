"""Live modules of other libraries."""

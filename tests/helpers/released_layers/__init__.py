"""Released layers of transformers by their names in tests, and our specification of each."""

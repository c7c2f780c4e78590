"""Released layers of transformers, and our specification of each: what its name stands for in tests."""

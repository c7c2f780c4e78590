"""`assert_parity`, and the pytest plugin."""

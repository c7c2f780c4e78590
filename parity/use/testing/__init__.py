"""`assert_parity`, and the pytest plugin.

Start at `assertion.assert_parity`. It imports the diagnosis only when a comparison fails.
"""

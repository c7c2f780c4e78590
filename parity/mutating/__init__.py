"""Would a user's tests notice? Known mistakes planted in a user's own attention, and the tests run for each."""

"""Programs that tests run in processes of their own."""

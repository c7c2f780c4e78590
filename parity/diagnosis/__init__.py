"""The diagnosis of differences between two implementations: the known bugs, and the search for them."""

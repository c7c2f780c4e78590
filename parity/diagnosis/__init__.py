"""Why two implementations differ: the known mistakes, and the search among them."""

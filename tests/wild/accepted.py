"""Which names of the catalogue are right for a mistake, by its id; what is not here is to be judged."""

ACCEPTED: dict[str, frozenset[str]] = {}

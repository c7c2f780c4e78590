"""Division of a layer over ranks (devices)."""

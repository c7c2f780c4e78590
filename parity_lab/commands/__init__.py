"""The commands of `mha-parity` that only a clone of the repository has."""

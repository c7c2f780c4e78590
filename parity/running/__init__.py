"""Cases x backends -> report, recorded here or read from traces."""

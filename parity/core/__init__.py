"""What a run is made of: cases and stages, weights, the reference, comparing, traces."""

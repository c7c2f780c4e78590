"""Convert attention weights between checkpoint layouts."""

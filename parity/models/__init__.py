"""What the configuration of a released model says of its attention layers."""

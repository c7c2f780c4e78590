"""What each of several devices, the ranks, must hold of a layer."""

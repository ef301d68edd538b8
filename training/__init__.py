"""What surrounds Algorithm 1: settings, and the life of a run."""

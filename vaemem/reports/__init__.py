"""Documents computed from tables."""

"""Not in the page."""

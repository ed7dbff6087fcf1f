"""Tables of measurements and predictions, and the tools that take them."""

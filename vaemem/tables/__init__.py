"""Rows of measurements and predictions, and what is made of them."""

"""Whole pipelines: what they take in every phase, and which way of running them fits a card."""

"""Whole pipelines: their memory in every phase, and the ways of running them that fit a card."""

"""Whole pipelines: what their components take beside the VAE."""

"""Latents of whole data sets: encoders for batches of any program, and folders of latents that survive a kill."""

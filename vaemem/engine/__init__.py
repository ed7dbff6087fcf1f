"""The VAE that runs: arguments, weights files, devices, runs."""

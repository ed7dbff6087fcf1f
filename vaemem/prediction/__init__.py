"""Predict PyTorch's memory, without PyTorch and without a GPU."""

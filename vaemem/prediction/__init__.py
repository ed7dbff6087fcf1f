"""PyTorch's memory, known without PyTorch and without a GPU."""

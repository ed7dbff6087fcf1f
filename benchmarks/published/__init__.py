"""Judge what others published about this memory: `make reproduce`."""

"""What others published about this memory, checked: a benchmark and its report, a table of plans, an equation."""

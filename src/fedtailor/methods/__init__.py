"""Methods: one paper, one file, both halves in the order of the paper's algorithm box."""

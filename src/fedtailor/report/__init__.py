"""The self-contained HTML report of a run, or of several runs side by side."""

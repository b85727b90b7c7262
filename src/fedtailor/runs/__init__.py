"""The run folder: events, checkpoints, and reading results back."""

"""Search spaces: one file each, found by name. `base.py` is the interface, `layers.py` the shared building blocks."""

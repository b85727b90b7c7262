"""Fixed networks: one file each, found by name. Each is the space with one point (`base.FixedNet`)."""

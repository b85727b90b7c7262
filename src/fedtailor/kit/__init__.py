"""Parts that several methods share and that are no search: private networks, hypernetworks, clusters, distillation."""

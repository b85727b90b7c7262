"""Computations on a GPU that a training step of a small network spends its time on, each as few kernels as can be."""

"""Layers whose messages the generator runs: DGL's that have no kernels of their own, and users'."""

"""Layers whose messages the generator runs: PyG's that have no kernels of their own, and users'."""

"""Chooses the implementation that computes a call: by the user's choice, a measurement on this GPU, or a rule."""

"""The choice of who computes a call: what the user said, what was measured on this GPU, or the rule."""

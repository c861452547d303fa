"""``python -m edgeless demo``: the same training, with the upstream layers and with edgeless, side by side."""

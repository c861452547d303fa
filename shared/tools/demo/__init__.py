"""``python -m edgeless demo``: the same training, once with the stock layers and once with edgeless, side by side."""

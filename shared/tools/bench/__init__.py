"""``python -m edgeless bench``: layers and bare aggregation, timed side by side with what a user could use instead."""

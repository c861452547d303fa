"""``python -m edgeless bench``: times layers and bare aggregation side by side with the alternatives of a user."""

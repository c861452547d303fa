"""``python -m edgeless bench``: times layers and bare aggregation against the alternatives that a user has."""

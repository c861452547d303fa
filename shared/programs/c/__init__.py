"""Writes the items of a walk as text in C, by loops over scalars. Nothing here runs or compiles the text."""

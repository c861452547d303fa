"""Writes the items of a walk as text in CUDA. Nothing here runs or compiles the text, or knows a GPU."""

"""Lowers a walk to items, expressions of scalars for what it computes per edge and per row."""

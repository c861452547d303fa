"""Traces a function of tensors to a graph of ATen ops, and finds the index space of each value's rows."""

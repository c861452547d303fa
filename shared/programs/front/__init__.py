"""From a function of tensors to a graph of ATen ops in which every value is known by the space of its rows."""

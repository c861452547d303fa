"""The graph handle, what is derived from a graph and kept with it, and the caches by which layers find both."""

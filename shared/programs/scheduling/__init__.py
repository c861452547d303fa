"""Turns a graph of ops into a schedule of steps over nodes and walks over edges, with few ops left on edges."""

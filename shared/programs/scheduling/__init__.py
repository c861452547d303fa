"""From a graph of ops to a schedule: steps over whole nodes and walks over edges, as few as possible on edges."""

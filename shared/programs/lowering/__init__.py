"""From a walk to items: what it computes for each edge and each row, as expressions of scalars."""
